//! How long a disk full of small blocks takes to open.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, Generation, NamespaceId, PAGE_BYTES, Result, SlotId};

use crate::ssd::{DiskClaim, DiskConfig, Recovery, Ssd, SsdConfig};
use crate::uring::{EngineChoice, Region};

/// Blocks per submission; all from the same page of memory.
const BATCH: usize = 256;
const PATIENCE: Duration = Duration::from_secs(60);

/// One disk that was filled, closed without a clean shutdown and opened again.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecoveryRow {
    /// Blocks that were stored, all of which were found again.
    pub stored_blocks: u64,
    /// Time until the tier serves: locks, reading, index.
    pub took: Duration,
    /// What opening the disk found.
    pub recovery: Recovery,
    /// Growth of this process's resident memory, over the blocks.
    pub index_bytes_per_block: f64,
}

/// Stores `blocks` blocks of 4 KiB on a new file at `path`, opens it again, and removes it.
pub fn recovery(path: &Path, blocks: u64, engine: EngineChoice) -> Result<RecoveryRow> {
    // A head per 40 blocks, footers, and the segments that are kept free.
    let capacity_bytes = blocks * (PAGE_BYTES + PAGE_BYTES / 8) + (1 << 30);
    let disk = DiskConfig { path: path.to_owned(), capacity_bytes: Some(capacity_bytes), create: true };
    let config = SsdConfig { engine, segment_bytes: Some(64 << 20), ..SsdConfig::new(vec![disk]) };
    let result = fill(&config, blocks).and_then(|()| reopen(&config, blocks));
    let _ = std::fs::remove_file(path);
    result
}

fn pool() -> Result<Region> {
    Region::anonymous(PAGE_BYTES as usize)
        .map_err(|error| Error::new(ErrorKind::Io, "cannot get memory for a benchmark").source(error))
}

fn open(config: &SsdConfig) -> Result<Ssd> {
    let claims = config.disks.iter().map(DiskClaim::new).collect::<Result<_>>()?;
    Ssd::open(claims, config, &pool()?)
}

fn fill(config: &SsdConfig, blocks: u64) -> Result<()> {
    let mut ssd = open(config)?;
    let sum = checksum(&[0; PAGE_BYTES as usize]);
    let mut completions = Vec::new();
    for first in (0..blocks).step_by(BATCH) {
        let store = |number: u64| Operation {
            id: OpId(number),
            kind: OpKind::Store,
            key: key(number),
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

fn reopen(config: &SsdConfig, blocks: u64) -> Result<RecoveryRow> {
    let memory_before = resident_bytes();
    let begun = Instant::now();
    let ssd = open(config)?;
    let took = begun.elapsed();
    let recovery = ssd.report()[0].recovery;
    if recovery.blocks != blocks {
        return Err(Error::new(ErrorKind::Corrupt, "not all blocks were found again")
            .with("stored", blocks)
            .with("found", recovery.blocks));
    }
    let index_bytes_per_block = resident_bytes().saturating_sub(memory_before) as f64 / blocks as f64;
    Ok(RecoveryRow { stored_blocks: blocks, took, recovery, index_bytes_per_block })
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * PAGE_BYTES
}

fn key(number: u64) -> BlockKey {
    let hash = BlockHash::new(checksum(&number.to_le_bytes()).to_be_bytes().repeat(4).as_slice()).expect("32 bytes");
    BlockKey { namespace: NamespaceId(1), group: 0, hash }
}
