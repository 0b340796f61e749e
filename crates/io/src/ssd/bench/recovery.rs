//! How long disks full of small blocks take to open, all of them at once.
//!
//! The blocks hold zeros and are not written: the file has holes in their place, which read as zeros. So tens of
//! millions of blocks fit on a small disk. Recovery reads blocks in the last segments only.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, Generation, NamespaceId, PAGE_BYTES, Result, SlotId};
use rustix::fs::OFlags;

use crate::ssd::staging::no_memory;
use crate::ssd::{Medium, Recovery, STAGING_BYTES, Ssd, SsdConfig};
use crate::uring::{self, Done, Engine, EngineChoice, Memory, Place, Region, Request, Waker, Work};

/// Blocks per submission; all from the same page of memory.
const BATCH: usize = 256;
const PATIENCE: Duration = Duration::from_secs(60);

/// Disks that were filled, closed without a clean shutdown and opened again, each on a thread of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct RecoveryRow {
    /// Blocks that were stored, all of which were found again.
    pub stored_blocks: u64,
    /// Time until all of them serve: reading, index.
    pub took: Duration,
    /// Of each disk.
    pub disks: Vec<RecoveredDisk>,
    /// Growth of this process's resident memory, over the blocks.
    pub index_bytes_per_block: f64,
}

/// One disk of a [`RecoveryRow`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecoveredDisk {
    /// Time until it serves.
    pub took: Duration,
    /// CPU time of the thread that opens it, in this time.
    pub cpu: Duration,
    /// What opening it found.
    pub recovery: Recovery,
}

/// Stores `blocks` blocks of 4 KiB in segments of `segment_bytes` on each of the new files `paths`, one after the
/// other, opens all of them again at once, and removes them. A short segment has a short footer, as a long segment of
/// large blocks has.
pub fn recovery(paths: &[PathBuf], blocks: u64, segment_bytes: u64, engine: EngineChoice) -> Result<RecoveryRow> {
    let config = SsdConfig { engine, segment_bytes: Some(segment_bytes), ..SsdConfig::new(Vec::new()) };
    let mut files = Vec::new();
    let one = [NamespaceId(1)];
    // A head per 40 blocks, footers, and the segments that are kept free.
    let capacity_bytes = blocks * (PAGE_BYTES + PAGE_BYTES / 8) + (1 << 30);
    let make = |path: &PathBuf| filled(path, blocks, &one, capacity_bytes, &config).map(|file| files.push(file));
    let filled = paths.iter().try_for_each(make);
    let row = filled.and_then(|()| reopen(&files, &config, blocks));
    // Only the files that this call has made.
    paths.iter().take(files.len()).for_each(|path| _ = std::fs::remove_file(path));
    row
}

/// Stores `blocks` blocks of 4 KiB of these namespaces in turn in segments of `segment_bytes` on the new file `path`,
/// for a daemon to open. It has room for some thousands more.
pub fn fill_file(path: &Path, blocks: u64, namespaces: &[NamespaceId], segment_bytes: u64) -> Result<()> {
    let config = SsdConfig { segment_bytes: Some(segment_bytes), ..SsdConfig::new(Vec::new()) };
    // A page of records for 39 blocks, and each segment's footer.
    let capacity_bytes = blocks * (PAGE_BYTES + 250) + 6 * segment_bytes;
    filled(path, blocks, namespaces, capacity_bytes, &config).map(|_| ())
}

/// A new file with so many blocks. Without an error, the caller removes it.
fn filled(
    path: &Path,
    blocks: u64,
    namespaces: &[NamespaceId],
    capacity_bytes: u64,
    config: &SsdConfig,
) -> Result<Arc<File>> {
    let cannot = |error| Error::new(ErrorKind::Io, "cannot use the benchmark's file").source(error);
    let direct = OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).write(true).create_new(true).custom_flags(direct).open(path);
    let file = Arc::new(file.map_err(cannot)?);
    let filled = file.set_len(capacity_bytes).map_err(cannot).and_then(|()| {
        // When it ends, the last writes have ended: nothing is in flight.
        let ssd = open(&file, config, |engine| Box::new(WithoutBlocks { engine, done: Vec::new() }))?;
        fill(ssd, blocks, namespaces)
    });
    if filled.is_err() {
        let _ = std::fs::remove_file(path);
    }
    filled.map(|()| file)
}

/// Drops what is written of the blocks themselves.
struct WithoutBlocks {
    engine: Box<dyn Engine>,
    done: Vec<Done>,
}

impl Engine for WithoutBlocks {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        requests.retain(|request| match &request.work {
            Work::Write { spans, .. } if spans.iter().all(|span| span.place == Place::Pool) => {
                self.done.push(Done { tag: request.tag, result: Ok(spans.len_bytes() as u32), checksum: 0 });
                false
            }
            _ => true,
        });
        self.engine.submit(requests);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.done);
        self.engine.poll(done);
    }

    fn wait(&mut self, timeout: Duration) {
        if self.done.is_empty() {
            self.engine.wait(timeout);
        }
    }
}

fn open(file: &Arc<File>, config: &SsdConfig, behind: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>) -> Result<Ssd> {
    let [pool, staging] = [PAGE_BYTES as usize, STAGING_BYTES].map(Region::anonymous);
    let memory = Arc::new(Memory::new(pool.map_err(no_memory)?, staging.map_err(no_memory)?));
    let waker = Arc::new(Waker::new().map_err(no_memory)?);
    let uring::Started { engine, why } = uring::start(config.engine, file, &memory, &waker, config.depth)?;
    let bytes = file.metadata().map_err(no_memory)?.len();
    let (engine, engine_why) = (behind(engine), why);
    let name = "disk".to_owned();
    let medium = Medium { name, engine, engine_why, memory, bytes, is_direct: true, can_trim: false, new_id: 1 };
    Ssd::on(vec![medium], config)
}

fn fill(mut ssd: Ssd, blocks: u64, namespaces: &[NamespaceId]) -> Result<()> {
    let sum = checksum(&[0; PAGE_BYTES as usize]);
    let mut completions = Vec::new();
    for first in (0..blocks).step_by(BATCH) {
        let store = |number: u64| Operation {
            id: OpId(number),
            kind: OpKind::Store,
            key: key(number, namespaces[number as usize % namespaces.len()]),
            slot: Some((SlotId(0), Generation(0))),
            length_bytes: PAGE_BYTES,
            checksum: sum,
            lineage: None,
        };
        let batch: Vec<Operation> = (first..blocks.min(first + BATCH as u64)).map(store).collect();
        let mut taken = 0;
        while taken < batch.len() {
            taken += ssd.submit(&batch[taken..]);
            ssd.poll(&mut completions);
            let is_fine = completions.drain(..).all(|done| matches!(done.outcome, Outcome::Stored));
            if !is_fine {
                return Err(Error::new(ErrorKind::Io, "a store failed while a disk was filled"));
            }
        }
    }
    if ssd.drain(PATIENCE, &mut completions) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::Timeout, "the disk completes nothing"))
    }
}

fn reopen(files: &[Arc<File>], config: &SsdConfig, blocks: u64) -> Result<RecoveryRow> {
    let memory_before = resident_bytes();
    let begin = Barrier::new(files.len());
    let open_one = |file: &Arc<File>| {
        begin.wait();
        let (begun, cpu_before) = (Instant::now(), thread_cpu());
        let ssd = open(file, config, |engine| engine)?;
        let (took, cpu) = (begun.elapsed(), thread_cpu() - cpu_before);
        let recovery = ssd.report()[0].recovery;
        if recovery.blocks != blocks {
            return Err(Error::new(ErrorKind::Corrupt, "not all blocks were found again")
                .with("stored", blocks)
                .with("found", recovery.blocks));
        }
        Ok((RecoveredDisk { took, cpu, recovery }, ssd))
    };
    let opened: Result<Vec<(RecoveredDisk, Ssd)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = files.iter().map(|file| scope.spawn(|| open_one(file))).collect();
        threads.into_iter().map(|thread| thread.join().expect("opening does not panic")).collect()
    });
    let opened = opened?;
    let stored_blocks = blocks * files.len() as u64;
    let index_bytes_per_block = resident_bytes().saturating_sub(memory_before) as f64 / stored_blocks as f64;
    let disks: Vec<RecoveredDisk> = opened.iter().map(|(disk, _)| *disk).collect();
    let took = disks.iter().map(|disk| disk.took).max().unwrap_or_default();
    Ok(RecoveryRow { stored_blocks, took, disks, index_bytes_per_block })
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * PAGE_BYTES
}

fn key(number: u64, namespace: NamespaceId) -> BlockKey {
    let hash = BlockHash::new(checksum(&number.to_le_bytes()).to_be_bytes().repeat(4).as_slice()).expect("32 bytes");
    BlockKey { namespace, group: 0, hash }
}
