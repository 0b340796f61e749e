//! The tier's side of a benchmark: it keeps the requested number of operations in flight, and measures time.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_core::checksum::{checksum, combine};
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::Limits;
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, Generation, NamespaceId, PAGE_BYTES, Result, SlotId};
use rustix::event::{PollFd, PollFlags};
use rustix::time::ClockId;

use super::config::{BenchConfig, Direction};
use super::sample::{Sample, cpu_time};
use crate::ssd::reclaim::READY;
use crate::ssd::{DiskClaim, DiskConfig, SegmentReport, SegmentState, Ssd, SsdConfig};
use crate::uring::{Memory, Region, Span};

/// A disk that completes nothing for this long is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Memory limit for waiting stores. Stores wait for the disk and for their flush, as many as the daemon keeps in
/// flight. So the disk has the requested depth, and its writer never waits for work; the same holds for the baseline.
const STORES_BYTES: u64 = 512 << 20;
/// A block begins with its number; all other bytes are ones.
const TAG_BYTES: u64 = 8;
/// Limit on the bytes that are summed up to measure a checksum's cost.
const CHECKSUM_BYTES: u64 = 256 << 20;

/// A tier, its pool, and its stored blocks.
pub(super) struct Rig {
    pub size_bytes: u64,
    pub depth: u32,
    waiting_stores: u64,
    slot_bytes: u64,
    pool: Region,
    ssd: Ssd,
    begun: Instant,
    next_op: u64,
    next_block: u64,
    /// Numbers of the stored blocks, unordered.
    stored: Vec<u64>,
    checksums: HashMap<u64, u64>,
    /// Checksum of a block without its first eight bytes.
    rest_checksum: u64,
    path: PathBuf,
    capacity_bytes: u64,
    errors: Errors,
    stop: Arc<AtomicBool>,
}

/// Operations that failed, and why the first one did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Errors {
    /// How many.
    pub count: u64,
    /// None without errors.
    pub first: Option<String>,
}

impl Errors {
    fn add(&mut self, why: impl FnOnce() -> String) {
        self.count += 1;
        self.first.get_or_insert_with(why);
    }
}

impl Rig {
    pub fn new(config: &BenchConfig, size_bytes: u64, depth: u32) -> Result<Rig> {
        if size_bytes < PAGE_BYTES {
            return Err(Error::invalid("a benchmark's blocks have 4 KiB at least").with("size_bytes", size_bytes));
        }
        let disk = DiskConfig { path: config.path.clone(), capacity_bytes: Some(config.capacity_bytes), create: true };
        // Stores take half of a disk's depth.
        let ssd_config = SsdConfig {
            engine: config.engine,
            depth: 2 * depth,
            segment_bytes: Some(config.segment_bytes()),
            ..SsdConfig::new(vec![disk.clone()])
        };
        let slot_bytes = size_bytes.next_multiple_of(PAGE_BYTES);
        let most = (STORES_BYTES / slot_bytes).max(u64::from(depth));
        let waiting_stores = (Limits::default().store_blocks as u64).min(most);
        let pool_bytes = slot_bytes * waiting_stores;
        let pool = Region::anonymous(pool_bytes as usize)
            .map_err(|error| Error::new(ErrorKind::Io, "cannot get memory for a benchmark").source(error))?;
        pool.want_huge_pages();
        let mut ssd = Ssd::open(vec![DiskClaim::new(&disk)?], &ssd_config, &pool)?;
        pool.write(0, &vec![1; pool_bytes as usize]);
        ssd.register(pool_bytes);
        Ok(Rig {
            size_bytes,
            depth,
            waiting_stores,
            slot_bytes,
            pool,
            ssd,
            begun: Instant::now(),
            next_op: 0,
            next_block: 0,
            stored: Vec::new(),
            checksums: HashMap::new(),
            rest_checksum: ones_checksum(size_bytes - TAG_BYTES),
            path: config.path.clone(),
            capacity_bytes: config.capacity_bytes,
            errors: Errors::default(),
            stop: config.stop.clone(),
        })
    }

    pub fn engine(&self) -> &'static str {
        self.ssd.report()[0].engine
    }

    pub fn take_errors(&mut self) -> Errors {
        std::mem::take(&mut self.errors)
    }

    /// Writes the whole disk once, so that no later write is the first to its place.
    pub fn fill(&mut self) -> Result<()> {
        self.store(self.capacity_bytes + self.capacity_bytes / 4, &mut Vec::new())?;
        self.look_again()
    }

    pub fn sample(&mut self, direction: Direction, bytes: u64, latencies_us: &mut Vec<u64>) -> Result<Sample> {
        let drawn = if direction == Direction::Read { self.draw(bytes / self.size_bytes) } else { Vec::new() };
        let (begun, cpu_begun) = (Instant::now(), cpu_time(ClockId::ProcessCPUTime));
        match direction {
            Direction::Read => self.load(&drawn, latencies_us)?,
            Direction::Write => self.store(bytes, latencies_us)?,
        }
        let (took, cpu) = (begun.elapsed(), cpu_time(ClockId::ProcessCPUTime) - cpu_begun);
        match direction {
            Direction::Read => self.compare(bytes / self.size_bytes),
            Direction::Write => self.look_again()?,
        }
        Ok(Sample::new(bytes, took, cpu))
    }

    /// One core's time for the checksums alone, on bytes that have just arrived from this disk. They are in no cache,
    /// so it takes two to three times as long as a second pass over the same bytes.
    pub fn checksum_ms_per_gb(&self, most_bytes: u64) -> Result<f64> {
        let count = most_bytes.min(CHECKSUM_BYTES) / self.size_bytes;
        let cannot = |error| Error::new(ErrorKind::Io, "cannot read the benchmark's file").source(error);
        let mut options = File::options();
        let file = options.read(true).custom_flags(libc::O_DIRECT).open(&self.path).map_err(cannot)?;
        let memory = Memory::new(self.pool.clone(), self.pool.clone());
        let mut spent = Duration::ZERO;
        for nth in 0..count {
            let slot = nth % u64::from(self.depth);
            let span = Span::pool(slot * self.slot_bytes, self.size_bytes as u32);
            let at = (nth * self.slot_bytes) % (self.capacity_bytes - self.slot_bytes);
            memory.pread(&file, span, at - at % PAGE_BYTES).map_err(|error| cannot(error.into()))?;
            let begun = cpu_time(ClockId::ThreadCPUTime);
            std::hint::black_box(memory.checksum(span));
            spent += cpu_time(ClockId::ThreadCPUTime) - begun;
        }
        Ok(spent.as_secs_f64() * 1e3 / ((count * self.size_bytes) as f64 / 1e9))
    }

    /// Stores new blocks; each slot has its block's bytes, which differ in their first page.
    fn store(&mut self, bytes: u64, latencies_us: &mut Vec<u64>) -> Result<()> {
        let first = self.next_block;
        let count = bytes / self.size_bytes;
        self.next_block += count;
        self.drive(count, self.waiting_stores, latencies_us, |rig, nth, slot| {
            let number = first + nth;
            rig.pool.write(slot * rig.slot_bytes, &number.to_le_bytes());
            // An engine's workers deliver the checksum with the block, so it is no cost of the tier.
            let sum = rig.checksum_of(number);
            rig.checksums.insert(number, sum);
            rig.stored.push(number);
            (number, OpKind::Store, sum)
        })?;
        Ok(())
    }

    /// Waits until the disk is at rest, and drops the blocks that the disk evicted from the list.
    fn look_again(&mut self) -> Result<()> {
        self.settle()?;
        let (ssd, checksums) = (&self.ssd, &mut self.checksums);
        self.stored.retain(|number| {
            let is_there = ssd.block(&key(*number)).is_some();
            if !is_there {
                checksums.remove(number);
            }
            is_there
        });
        Ok(())
    }

    fn checksum_of(&self, number: u64) -> u64 {
        combine(checksum(&number.to_le_bytes()), self.rest_checksum, self.size_bytes - TAG_BYTES)
    }

    /// Numbers of `count` stored blocks at random, and their checksums: looked up here, because the look into large
    /// tables is no work of the tier.
    fn draw(&self, count: u64) -> Vec<(u64, u64)> {
        let mut seed = self.next_op;
        let draw = |_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = self.stored[(seed >> 33) as usize % self.stored.len()];
            (number, self.checksums[&number])
        };
        (0..count).map(draw).collect()
    }

    /// Loads these blocks. In the place of one that was evicted meanwhile, because notes of reads take space too, it
    /// loads the next one that is there.
    fn load(&mut self, drawn: &[(u64, u64)], latencies_us: &mut Vec<u64>) -> Result<()> {
        self.drive(drawn.len() as u64, u64::from(self.depth), latencies_us, |rig, nth, _| {
            let from = &drawn[nth as usize..];
            let there = from.iter().chain(drawn).find(|(number, _)| rig.ssd.block(&key(*number)).is_some());
            let (number, sum) = there.unwrap_or(&from[0]);
            (*number, OpKind::Load, *sum)
        })
    }

    /// Waits until space for the next stores was reclaimed, so that no block is evicted before it is read.
    fn settle(&mut self) -> Result<()> {
        let (begun, mut completions) = (Instant::now(), Vec::new());
        let is_ready = |segment: &&SegmentReport| segment.state == SegmentState::Ready;
        while self.ssd.segments(0).iter().filter(is_ready).count() < READY || !self.ssd.is_idle() {
            self.turn(&mut completions);
            if begun.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::Timeout, "the disk makes no room"));
            }
        }
        Ok(())
    }

    /// Flushes since the disk was opened.
    pub fn flushes(&self) -> u64 {
        self.ssd.report()[0].counters.flushes
    }

    /// Checks that the bytes in the slots into which `loads` blocks were loaded are those of stored blocks. The first
    /// loads take one slot each, from the last one down, so a short run leaves the others as the stores left them.
    fn compare(&mut self, loads: u64) {
        let depth = u64::from(self.depth);
        for slot in depth - loads.min(depth)..depth {
            let mut bytes = vec![0; self.size_bytes as usize];
            self.pool.read(slot * self.slot_bytes, &mut bytes);
            let number = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            let is_whole = self.checksums.contains_key(&number) && bytes[8..].iter().all(|byte| *byte == 1);
            if !is_whole {
                self.errors.add(|| format!("block {number} came back with other bytes"));
            }
        }
    }

    /// Keeps `width` operations in flight until `count` are done. `next` gives the nth operation and its slot.
    fn drive(
        &mut self,
        count: u64,
        width: u64,
        latencies_us: &mut Vec<u64>,
        mut next: impl FnMut(&mut Rig, u64, u64) -> (u64, OpKind, u64),
    ) -> Result<()> {
        let mut free: Vec<u64> = (0..width).collect();
        let (mut waiting, mut ready, mut completions) = (HashMap::new(), Vec::new(), Vec::new());
        let (mut asked, mut done, mut last_progress) = (0, 0, Instant::now());
        while done < count {
            while asked < count
                && let Some(slot) = free.pop()
            {
                let (number, kind, sum) = next(self, asked, slot);
                ready.push(self.operation(number, kind, sum, slot));
                asked += 1;
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Unavailable, "the measurement was stopped"));
            }
            let taken = self.ssd.submit(&ready);
            for op in ready.drain(..taken) {
                waiting.insert(op.id, (op, Instant::now()));
            }
            self.turn(&mut completions);
            for Completion { id, outcome } in completions.drain(..) {
                let (op, begun) = waiting.remove(&id).expect("an operation completes once");
                latencies_us.push(begun.elapsed().as_micros() as u64);
                if !is_as_asked(&op, outcome) {
                    self.errors.add(|| why(op.kind, outcome));
                }
                free.push(u64::from(op.slot.expect("it has one").0.0) * PAGE_BYTES / self.slot_bytes);
                done += 1;
                last_progress = Instant::now();
            }
            if last_progress.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::Timeout, "the disk completes nothing").with("waiting", waiting.len()));
            }
        }
        Ok(())
    }

    fn operation(&mut self, number: u64, kind: OpKind, checksum: u64, slot: u64) -> Operation {
        self.next_op += 1;
        let slot = SlotId((slot * self.slot_bytes / PAGE_BYTES) as u32);
        Operation {
            id: OpId(self.next_op),
            kind,
            key: key(number),
            slot: Some((slot, Generation(0))),
            length_bytes: self.size_bytes,
            checksum,
            lineage: None,
        }
    }

    fn turn(&mut self, completions: &mut Vec<Completion>) {
        let descriptor = self.ssd.wake_fd();
        let timeout = Duration::from_millis(5).try_into().expect("5 ms");
        let _ = rustix::event::poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout));
        self.ssd.tick(self.begun.elapsed());
        self.ssd.poll(completions);
    }
}

fn is_as_asked(op: &Operation, outcome: Outcome) -> bool {
    match (op.kind, outcome) {
        (OpKind::Store, Outcome::Stored) => true,
        (OpKind::Load, Outcome::Loaded { checksum, .. }) => checksum == op.checksum,
        _ => false,
    }
}

fn why(kind: OpKind, outcome: Outcome) -> String {
    let what = if kind == OpKind::Store { "store" } else { "load" };
    match outcome {
        Outcome::Failed(kind) => format!("a {what} failed: {}", words(kind)),
        Outcome::Absent => format!("a {what} did not find its block"),
        _ => format!("a {what} answered with another block's checksum"),
    }
}

fn words(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid | ErrorKind::Unsupported => "the tier refused it",
        ErrorKind::NotFound => "the block is not there",
        ErrorKind::Full => "the tier is full",
        ErrorKind::Io => "the disk reported an error",
        ErrorKind::Corrupt => "the bytes are not those that were written",
        ErrorKind::Timeout => "the disk did not answer in time",
        ErrorKind::Unavailable => "the tier takes no more operations on this disk",
    }
}

fn key(number: u64) -> BlockKey {
    let hash = BlockHash::new(&number.to_be_bytes()).expect("eight bytes");
    BlockKey { namespace: NamespaceId(0), group: 0, hash }
}

/// The checksum of `len` bytes of ones, by doubling.
fn ones_checksum(len: u64) -> u64 {
    let (mut sum, mut sum_len) = (0, 0);
    for bit in (0..u64::BITS - len.leading_zeros()).rev() {
        (sum, sum_len) = (combine(sum, sum, sum_len), 2 * sum_len);
        if len >> bit & 1 == 1 {
            (sum, sum_len) = (combine(sum, checksum(&[1]), 1), sum_len + 1);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ones_are_summed_up_as_if_one_by_one() {
        for len in [0, 1, 2, 7, 4096, 100_003] {
            assert_eq!(ones_checksum(len), checksum(&vec![1; len as usize]), "{len} bytes");
        }
    }
}
