//! Compares the host copy engine with a plain parallel memcpy: the figures of `forebay bench copy`.
//!
//! Method: both sides are anonymous memory on huge pages, touched before, much larger than any cache. Each row copies
//! the whole working set, block by block in random order, alternately with the engine and with `copy_nonoverlapping`:
//! the same blocks, slots, order and number of threads. The ratio is the median over the pairs, so noise of the
//! machine that lasts longer than a pair affects both. Before the pairs the engine's copy is checked against the
//! source, which has new bytes for each row.

pub mod device;

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::checksum::{self, Checksum};
use forebay_core::{Error, ErrorKind, Result};
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::Serialize;

use crate::copy::{Level, Memory};
use crate::engine::{CopyEngine, PoolId};
use crate::host::{HostCopyEngine, HostOptions};
use crate::job::{After, Direction, Item, Job, Outcome, Until};
use crate::tensor::{PageRef, Place, Tensor, Tensors};

/// The parameters of a measurement.
#[derive(Clone, Debug)]
pub struct CopyBench {
    pub threads: usize,
    /// On each side; much larger than the last-level cache.
    pub working_set_bytes: u64,
    pub pairs: usize,
    pub level: Level,
    pub shapes: Vec<Shape>,
    pub seed: u64,
}

/// A block: number of fragments and bytes of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub fragments: usize,
    pub fragment_bytes: u64,
}

/// One measured row, in the format of all `forebay bench` rows.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub op: &'static str,
    /// The direction, and for loads whether the copy was summed up.
    pub direction: &'static str,
    /// Of a block.
    pub size_bytes: u64,
    pub fragments: usize,
    pub threads: usize,
    /// The instructions used.
    pub level: String,
    pub gb_per_s: f64,
    pub baseline: &'static str,
    pub baseline_gb_per_s: f64,
    /// Median over the pairs, like all other figures, so it may differ from the quotient of the two.
    pub ratio: f64,
    pub cpu_s_per_gb: f64,
    pub baseline_cpu_s_per_gb: f64,
}

impl Default for CopyBench {
    fn default() -> CopyBench {
        let whole = |kib: u64| Shape { fragments: 1, fragment_bytes: kib << 10 };
        let mut shapes: Vec<_> = [16, 64, 256, 1024, 4096, 16384].map(whole).to_vec();
        shapes.extend([32, 64].map(|fragments| Shape { fragments, fragment_bytes: 16 << 10 }));
        let HostOptions { threads, level, .. } = HostOptions::default();
        CopyBench { threads, working_set_bytes: 512 << 20, pairs: 15, level, shapes, seed: 1 }
    }
}

/// Measures all rows: stores, loads and summed loads for each shape. Calls `progress` with each row when it is done.
/// Takes about 2 s a row at the defaults. Errors if memory cannot be allocated, or if a copy is wrong.
pub fn run(bench: &CopyBench, mut progress: impl FnMut(&Row)) -> Result<Vec<Row>> {
    let tensors = Memory::anonymous(bench.working_set_bytes as usize)?;
    let pool = Memory::anonymous(bench.working_set_bytes as usize)?;
    let mut random = Random(bench.seed);
    let mut rows = Vec::new();
    for shape in &bench.shapes {
        for kind in Kind::ALL {
            let source = if kind.direction() == Direction::Store { &tensors } else { &pool };
            random.fill(source);
            let row = Rig::new(bench, *shape, kind, &tensors, &pool)?.row(bench, &mut random)?;
            progress(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The kind of copy of a row. A store always sums.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Store,
    Load,
    SummedLoad,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Store, Kind::Load, Kind::SummedLoad];

    fn direction(self) -> Direction {
        if self == Kind::Store { Direction::Store } else { Direction::Load }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Store => "store",
            Kind::Load => "load",
            Kind::SummedLoad => "load, summed",
        }
    }
}

/// Everything that one row needs.
struct Rig<'a> {
    shape: Shape,
    kind: Kind,
    threads: usize,
    blocks: u32,
    pool: &'a Memory,
    tensors: Tensors,
    engine: HostCopyEngine,
    pool_id: PoolId,
}

/// The order of one pass: the block of each slot offset.
struct Order {
    block_ids: Vec<u32>,
    offsets: Vec<u64>,
}

/// The cost of a pass.
#[derive(Clone, Copy)]
struct Cost {
    wall: Duration,
    cpu: Duration,
}

impl Rig<'_> {
    fn new<'a>(bench: &CopyBench, shape: Shape, kind: Kind, tensors: &Memory, pool: &'a Memory) -> Result<Rig<'a>> {
        let blocks = (bench.working_set_bytes / shape.block_bytes()) as u32;
        if blocks == 0 || bench.pairs == 0 {
            return Err(Error::invalid("the working set is smaller than one block, or the number of pairs is 0")
                .with("working_set_bytes", bench.working_set_bytes)
                .with("block_bytes", shape.block_bytes()));
        }
        let tensor = |layer: usize| Tensor {
            place: Place::Host(tensors.clone()),
            offset: layer as u64 * u64::from(blocks) * shape.fragment_bytes,
            rows: blocks,
            row_stride_bytes: shape.fragment_bytes,
        };
        let refs = (0..shape.fragments).map(|tensor| PageRef { tensor, page_bytes: shape.fragment_bytes }).collect();
        let tensors = Tensors::new((0..shape.fragments).map(tensor).collect(), vec![refs])?;
        let options = HostOptions { threads: bench.threads, level: bench.level, ..HostOptions::default() };
        let engine = HostCopyEngine::new(tensors.clone(), options)?;
        let pool_id = engine.attach_pool(pool.clone())?;
        Ok(Rig { shape, kind, threads: bench.threads, blocks, pool, tensors, engine, pool_id })
    }

    fn row(&self, bench: &CopyBench, random: &mut Random) -> Result<Row> {
        let order = self.order(random);
        let (_, outcomes) = self.pass_of_engine(&order)?;
        self.check(&order, &outcomes)?;
        self.pass_of_memcpy(&order);
        let mut pairs = Vec::new();
        for pair in 0..bench.pairs {
            let order = self.order(random);
            // The two sides alternate in going first, so that neither always finds the other's data in the cache.
            let first = if pair % 2 == 0 { Some(self.pass_of_memcpy(&order)) } else { None };
            let (ours, _) = self.pass_of_engine(&order)?;
            pairs.push((ours, first.unwrap_or_else(|| self.pass_of_memcpy(&order))));
        }
        Ok(self.summary(bench, &pairs))
    }

    fn order(&self, random: &mut Random) -> Order {
        let block_ids = random.permutation(self.blocks);
        let offsets = random.permutation(self.blocks).into_iter();
        Order { block_ids, offsets: offsets.map(|slot| u64::from(slot) * self.shape.block_bytes()).collect() }
    }

    /// One pass in jobs of the size of a long prompt's blocks, all submitted at once; returns the outcome of each
    /// block.
    fn pass_of_engine(&self, order: &Order) -> Result<(Cost, Vec<Outcome>)> {
        const JOB_BYTES: u64 = 32 << 20;
        const PATIENCE: Duration = Duration::from_secs(60);

        let blocks_per_job = (JOB_BYTES / self.shape.block_bytes()).max(1) as usize;
        let jobs = order.block_ids.chunks(blocks_per_job).zip(order.offsets.chunks(blocks_per_job)).enumerate();
        let jobs: Vec<_> = jobs.map(|(id, (block_ids, offsets))| self.job(id as u64, block_ids, offsets)).collect();
        let ids: Vec<_> = jobs.iter().map(|job| job.id).collect();
        let clock = Clock::start();
        jobs.into_iter().try_for_each(|job| self.engine.submit(job))?;
        self.engine.wait(&ids, Until::Settled, Instant::now() + PATIENCE)?;
        let cost = clock.stop();
        // Jobs of one direction complete in order, so these are the outcomes in the order of the blocks.
        Ok((cost, self.engine.poll().into_iter().flat_map(|completion| completion.outcomes).collect()))
    }

    fn job(&self, id: u64, block_ids: &[u32], offsets: &[u64]) -> Job {
        let item = |(at, offset): (usize, &u64)| Item {
            offset: *offset,
            group: 0,
            blocks: at as u32..at as u32 + 1,
            beside: [0; 2],
        };
        let items = offsets.iter().enumerate().map(item).collect();
        let (direction, pool, block_ids) = (self.kind.direction(), self.pool_id, block_ids.to_vec());
        let is_summed = self.kind == Kind::SummedLoad;
        Job { id, direction, pool, after: After::Now, items, block_ids, is_summed, guard: None }
    }

    fn pass_of_memcpy(&self, order: &Order) -> Cost {
        /// A thread takes about this much at a time, as the engine's threads do.
        const TAKE_BYTES: u64 = 256 << 10;

        let take = (TAKE_BYTES / self.shape.block_bytes()).max(1) as usize;
        let next = AtomicUsize::new(0);
        let start = Barrier::new(self.threads + 1);
        thread::scope(|scope| {
            for _ in 0..self.threads {
                scope.spawn(|| {
                    start.wait();
                    loop {
                        let from = next.fetch_add(take, Ordering::Relaxed);
                        let to = order.block_ids.len().min(from + take);
                        if from >= to {
                            break;
                        }
                        (from..to).for_each(|at| self.memcpy(&order.block_ids[at], order.offsets[at]));
                    }
                });
            }
            let clock = Clock::start();
            start.wait();
            clock
        })
        .stop()
    }

    fn memcpy(&self, block_id: &u32, offset: u64) {
        let bytes = self.shape.block_bytes();
        let mut slot = self.pool.span(offset, bytes);
        for fragment in self.tensors.spans(0, std::slice::from_ref(block_id), 0..bytes) {
            let part = slot.take(fragment.len());
            match self.kind.direction() {
                Direction::Store => part.copy_from(fragment),
                Direction::Load => fragment.copy_from(part),
            }
        }
    }

    /// Checks that every slot holds its block, and that every outcome reports success.
    fn check(&self, order: &Order, outcomes: &[Outcome]) -> Result<()> {
        let bytes = self.shape.block_bytes();
        assert_eq!(outcomes.len(), order.block_ids.len(), "each block has an outcome");
        for (at, (block_id, offset)) in order.block_ids.iter().zip(&order.offsets).enumerate() {
            let mut of_tensors = Checksum::new();
            let fragments = self.tensors.spans(0, std::slice::from_ref(block_id), 0..bytes);
            fragments.for_each(|fragment| of_tensors.update(fragment.bytes()));
            let checksum = of_tensors.finish();
            let expected = match self.kind.direction() {
                Direction::Store => Outcome::Stored { checksum },
                Direction::Load => Outcome::Loaded,
            };
            let of_slot = checksum::checksum(self.pool.span(*offset, bytes).bytes());
            if outcomes[at] != expected || of_slot != checksum {
                return Err(
                    Error::new(ErrorKind::Corrupt, "a copied block differs from its source").with("block_id", block_id)
                );
            }
        }
        Ok(())
    }

    fn summary(&self, bench: &CopyBench, pairs: &[(Cost, Cost)]) -> Row {
        let gb = u64::from(self.blocks) as f64 * self.shape.block_bytes() as f64 / 1e9;
        let median_of = |figure: &dyn Fn(&(Cost, Cost)) -> f64| median(pairs.iter().map(figure).collect());
        Row {
            op: "copy",
            direction: self.kind.name(),
            size_bytes: self.shape.block_bytes(),
            fragments: self.shape.fragments,
            threads: self.threads,
            level: bench.level.to_string(),
            gb_per_s: median_of(&|(ours, _)| gb / ours.wall.as_secs_f64()),
            baseline: "memcpy",
            baseline_gb_per_s: median_of(&|(_, memcpy)| gb / memcpy.wall.as_secs_f64()),
            ratio: median_of(&|(ours, memcpy)| memcpy.wall.as_secs_f64() / ours.wall.as_secs_f64()),
            cpu_s_per_gb: median_of(&|(ours, _)| ours.cpu.as_secs_f64() / gb),
            baseline_cpu_s_per_gb: median_of(&|(_, memcpy)| memcpy.cpu.as_secs_f64() / gb),
        }
    }
}

impl Shape {
    fn block_bytes(&self) -> u64 {
        self.fragments as u64 * self.fragment_bytes
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Clock {
    wall: Instant,
    cpu: Duration,
}

impl Clock {
    fn start() -> Clock {
        Clock { wall: Instant::now(), cpu: cpu_time() }
    }

    fn stop(self) -> Cost {
        Cost { wall: self.wall.elapsed(), cpu: cpu_time() - self.cpu }
    }
}

/// Of all threads of this process.
pub(crate) fn cpu_time() -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(tv_sec as u64, tv_nsec as u32)
}

/// SplitMix64: enough to shuffle blocks and to fill memory.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn permutation(&mut self, len: u32) -> Vec<u32> {
        let mut order: Vec<_> = (0..len).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
        order
    }

    pub fn fill(&mut self, memory: &Memory) {
        let mut chunk = vec![0; 1 << 20];
        for start in (0..memory.len()).step_by(chunk.len()) {
            chunk.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&self.next().to_le_bytes()));
            let len = chunk.len().min(memory.len() - start);
            memory.write(start as u64, &chunk[..len]);
        }
    }
}
