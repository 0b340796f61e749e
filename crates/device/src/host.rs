//! The copy engine over host memory: a few threads that take tiles from two queues, loads before stores.
//!
//! Invariants: a job is in `in_flight` from `submit` until its completion is published, once. Jobs of one direction
//! are published in the order of submission, so a finished job waits for earlier ones. Jobs in flight and completions
//! not yet polled together never exceed `queue_jobs`. Tiles are taken and completions published under one lock; no
//! lock is held while bytes are copied and guards called.
//!
//! A copy thread may run where the thread may that makes the engine: a worker that is kept on a NUMA node copies there.
//!
//! Loads go first because a request waits for its first token. Nobody waits for a store, except in `wait`; and the
//! engine's thread, which would submit more loads, is then itself the waiter.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::checksum::{self, Checksum};
use forebay_core::{Error, ErrorKind, Result};
use forebay_numa::{Linux, ROOT, own_node};

use crate::copy::{self, Level, Memory};
use crate::engine::{Bell, CopyEngine, EngineReport, PoolId};
use crate::job::{Completion, Direction, Job, JobId, Outcome, Until};
use crate::plan::{self, Part, Spread, Tile};
use crate::tensor::{Place, Tensors};

/// An engine's options; the defaults suit a worker that shares its machine with the model.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// 1 to 64. At most four by default, since the copies take cores from the model.
    pub threads: usize,
    /// Limit on the jobs submitted whose completions were not yet polled. An engine step submits a handful; a
    /// thousand means that nobody polls.
    pub queue_jobs: usize,
    /// Several threads copy a single large item in parts of about this size or more. 8 MiB take about 400 µs to copy,
    /// and joining the checksums of two parts takes 130 µs.
    pub part_bytes: u64,
    pub level: Level,
}

impl Default for HostOptions {
    fn default() -> HostOptions {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        HostOptions { threads: cores.min(4), queue_jobs: 1024, part_bytes: 8 << 20, level: Level::best() }
    }
}

/// See the module documentation. Dropping it ends the copies that have begun, abandons the others and joins the
/// threads: afterwards no byte is touched.
pub struct HostCopyEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl HostCopyEngine {
    /// Errors with `Invalid` on options out of range and tensors of a device, `Unavailable` if a thread cannot be
    /// started.
    pub fn new(tensors: Tensors, options: HostOptions) -> Result<HostCopyEngine> {
        if tensors.places().any(|place| matches!(place, Place::Device { .. })) {
            return Err(Error::invalid("a tensor is not in host memory"));
        }
        if !(1..=64).contains(&options.threads) || options.queue_jobs == 0 || options.part_bytes == 0 {
            return Err(Error::invalid(
                "a copy engine must have 1 to 64 threads, a queue of at least one job, and parts of at least one byte",
            )
            .with("threads", options.threads)
            .with("queue_jobs", options.queue_jobs)
            .with("part_bytes", options.part_bytes));
        }
        let shared = Shared {
            tensors,
            options,
            numa_node: own_node(Path::new(ROOT), &Linux),
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        };
        let mut engine = HostCopyEngine { shared: Arc::new(shared), threads: Vec::new() };
        for at in 0..options.threads {
            let shared = engine.shared.clone();
            let thread = thread::Builder::new().name(format!("forebay-copy-{at}")).spawn(move || shared.work());
            let fail = |e| Error::new(ErrorKind::Unavailable, "cannot start a copy thread").source(e);
            engine.threads.push(thread.map_err(fail)?);
        }
        Ok(engine)
    }
}

impl CopyEngine for HostCopyEngine {
    fn attach_pool(&self, memory: Memory) -> Result<PoolId> {
        if self.shared.tensors.overlap(&memory) {
            return Err(Error::invalid("the pool's mapping overlaps a tensor"));
        }
        let mut queue = self.shared.lock();
        let pool = PoolId(queue.next_pool);
        queue.next_pool += 1;
        queue.pools.insert(pool, memory);
        Ok(pool)
    }

    fn populated(&self, _pool: PoolId, _bytes: u64) {}

    fn ring_when_registered(&self, _bell: Bell) {}

    fn detach_pool(&self, pool: PoolId) -> Result<()> {
        let detached = self.shared.lock().pools.remove(&pool);
        detached.map(drop).ok_or_else(|| unknown_pool(ErrorKind::NotFound, pool))
    }

    fn submit(&self, job: Job) -> Result<()> {
        let shared = &self.shared;
        let pool = shared.lock().pools.get(&job.pool).cloned();
        let pool = pool.ok_or_else(|| unknown_pool(ErrorKind::Invalid, job.pool))?;
        let HostOptions { threads, part_bytes, queue_jobs, .. } = shared.options;
        let tiles = plan::plan(&job, &shared.tensors, pool.len() as u64, Spread { threads, part_bytes })?;
        let mut queue = shared.lock();
        queue.admit(job.id, queue_jobs)?;
        let direction = job.direction;
        queue.push(Arc::new(Running::new(job, pool, tiles)));
        drop(queue);
        shared.work.notify_all();
        // A job without items is already finished.
        shared.publish(direction);
        Ok(())
    }

    fn poll(&self) -> Vec<Completion> {
        self.shared.lock().published.drain(..).collect()
    }

    /// A thread releases a job's tensors and settles its items in one pass, so both ends are one.
    fn wait(&self, jobs: &[JobId], _until: Until, deadline: Instant) -> Result<()> {
        let mut queue = self.shared.lock();
        loop {
            let left = jobs.iter().filter(|id| queue.in_flight.contains(id)).count();
            if left == 0 {
                return Ok(());
            }
            let Some(patience) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return Err(Error::new(ErrorKind::Timeout, "copies are still in flight").with("jobs", left));
            };
            (queue, _) = self.shared.done.wait_timeout(queue, patience).expect(LOCK);
        }
    }

    fn report(&self) -> EngineReport {
        let pool_bytes = self.shared.lock().pools.values().map(|pool| pool.len() as u64).sum();
        let numa_node = self.shared.numa_node;
        EngineReport { numa_node, methods: vec!["host"], choice: "given", pool_bytes, ..EngineReport::default() }
    }
}

impl Drop for HostCopyEngine {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A copy thread catches the guard's panics and does not panic itself. If it did, this would be the wrong
            // place to propagate it.
            let _ = thread.join();
        }
    }
}

fn unknown_pool(kind: ErrorKind, pool: PoolId) -> Error {
    Error::new(kind, "the pool is not attached").with("pool", pool.0)
}

const LOCK: &str = "no thread panics while it holds this lock";

struct Shared {
    tensors: Tensors,
    options: HostOptions,
    numa_node: Option<u32>,
    queue: Mutex<Queue>,
    /// A tile may be taken, or the engine stops.
    work: Condvar,
    /// A job was published.
    done: Condvar,
}

#[derive(Default)]
struct Queue {
    pools: HashMap<PoolId, Memory>,
    next_pool: u32,
    loads: Lane,
    stores: Lane,
    in_flight: HashSet<JobId>,
    published: VecDeque<Completion>,
    is_stopping: bool,
}

/// The jobs of one direction.
#[derive(Default)]
struct Lane {
    /// Not yet published, in the order of submission.
    order: VecDeque<Arc<Running>>,
    /// Those of them with tiles that nobody has taken, and the next such tile.
    open: VecDeque<(Arc<Running>, usize)>,
}

struct Running {
    job: Job,
    pool: Memory,
    tiles: Vec<Tile>,
    tiles_left: AtomicUsize,
    started: OnceLock<Instant>,
    progress: Mutex<Progress>,
}

struct Progress {
    outcomes: Vec<Outcome>,
    /// Copied parts of items that are copied in parts.
    parts: HashMap<usize, Vec<Copied>>,
    bytes: u64,
    finished: Instant,
}

/// Bytes of an item that were copied, or refused.
#[derive(Clone, Copy)]
struct Copied {
    part: usize,
    bytes: u64,
    /// Number of bytes in the checksum: the bytes beside the item belong to its first and last part.
    summed: u64,
    /// `None` if the guard refused; 0 for loads that are not summed.
    checksum: Option<u64>,
}

impl Queue {
    fn admit(&mut self, id: JobId, limit: usize) -> Result<()> {
        if self.in_flight.contains(&id) || self.published.iter().any(|completion| completion.job_id == id) {
            return Err(Error::invalid("the job's id is already in use").with("job", id));
        }
        if self.in_flight.len() + self.published.len() >= limit {
            return Err(Error::new(ErrorKind::Full, "the copy queue is full").with("queue_jobs", limit));
        }
        Ok(())
    }

    fn push(&mut self, running: Arc<Running>) {
        self.in_flight.insert(running.job.id);
        let lane = self.lane(running.job.direction);
        lane.order.push_back(running.clone());
        if !running.tiles.is_empty() {
            lane.open.push_back((running, 0));
        }
    }

    fn lane(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::Load => &mut self.loads,
            Direction::Store => &mut self.stores,
        }
    }

    fn take_tile(&mut self) -> Option<(Arc<Running>, usize)> {
        let lane = if self.loads.open.is_empty() { &mut self.stores } else { &mut self.loads };
        let (running, next) = lane.open.front_mut()?;
        let (running, tile) = (running.clone(), *next);
        *next += 1;
        if *next == running.tiles.len() {
            lane.open.pop_front();
        }
        Some((running, tile))
    }

    /// Publishes and returns the finished jobs that no unfinished one precedes.
    fn publish(&mut self, direction: Direction) -> Vec<Arc<Running>> {
        let is_finished = |running: &mut Arc<Running>| running.tiles_left.load(Ordering::Acquire) == 0;
        let mut finished = Vec::new();
        while let Some(running) = self.lane(direction).order.pop_front_if(is_finished) {
            self.in_flight.remove(&running.job.id);
            self.published.push_back(running.completion());
            finished.push(running);
        }
        finished
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect(LOCK)
    }

    /// The loop of a copy thread.
    fn work(&self) {
        while let Some((running, tile)) = self.next_tile() {
            if self.run(&running, &running.tiles[tile]) {
                self.publish(running.job.direction);
            }
        }
    }

    /// Waits for a tile; `None` when the engine stops.
    fn next_tile(&self) -> Option<(Arc<Running>, usize)> {
        let mut queue = self.lock();
        while !queue.is_stopping {
            if let Some(tile) = queue.take_tile() {
                return Some(tile);
            }
            queue = self.work.wait(queue).expect(LOCK);
        }
        None
    }

    fn publish(&self, direction: Direction) {
        let finished = self.lock().publish(direction);
        if !finished.is_empty() {
            self.done.notify_all();
        }
        // Dropped without the lock: the last job on a detached pool unmaps it, which takes time.
        drop(finished);
    }

    /// Copies a tile; returns whether it was the job's last.
    fn run(&self, running: &Running, tile: &Tile) -> bool {
        running.started.get_or_init(Instant::now);
        for item in tile.items.clone() {
            let copied = self.copy(running, item, tile.part.as_ref());
            let whole = match &tile.part {
                None => Some(copied),
                Some(part) => running.join(item, part.count, copied),
            };
            if let Some(whole) = whole {
                running.settle(item, whole);
            }
        }
        running.progress().finished = Instant::now();
        running.tiles_left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn copy(&self, running: &Running, item: usize, part: Option<&Part>) -> Copied {
        let Job { direction, block_ids, items, is_summed, .. } = &running.job;
        let it = &items[item];
        let slice_bytes = plan::slice_bytes(it, &self.tensors);
        let range = part.map_or(0..slice_bytes, |part| part.bytes.clone());
        let (part, bytes) = (part.map_or(0, |part| part.index), range.end - range.start);
        if !running.allows(|guard| guard.before(item)) {
            return Copied { part, bytes, summed: bytes, checksum: None };
        }
        let slice = running.pool.span(it.offset + range.start, bytes);
        let block_ids = &block_ids[it.blocks.start as usize..it.blocks.end as usize];
        let fragments = self.tensors.spans(it.group, block_ids, range.clone());
        let level = self.options.level;
        let (summed, checksum) = match direction {
            Direction::Store => (bytes, copy::gather(level, slice, fragments)),
            Direction::Load if *is_summed => {
                let before = if range.start == 0 { it.beside[0] } else { 0 };
                let behind = if range.end == slice_bytes { it.beside[1] } else { 0 };
                let mut sum = Checksum::new();
                copy::sum_up(level, &mut sum, running.pool.span(it.offset - before, before));
                copy::scatter_summed(level, &mut sum, fragments, slice);
                copy::sum_up(level, &mut sum, running.pool.span(it.offset + slice_bytes, behind));
                (before + bytes + behind, sum.finish())
            }
            Direction::Load => {
                copy::scatter(level, fragments, slice);
                (bytes, 0)
            }
        };
        Copied { part, bytes, summed, checksum: Some(checksum) }
    }
}

impl Running {
    fn new(job: Job, pool: Memory, tiles: Vec<Tile>) -> Running {
        let outcomes = vec![Outcome::Failed; job.items.len()];
        Running {
            tiles_left: AtomicUsize::new(tiles.len()),
            started: OnceLock::new(),
            progress: Mutex::new(Progress { outcomes, parts: HashMap::new(), bytes: 0, finished: Instant::now() }),
            job,
            pool,
            tiles,
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect(LOCK)
    }

    fn allows(&self, ask: impl Fn(&dyn crate::SlotGuard) -> bool) -> bool {
        match &self.job.guard {
            None => true,
            Some(guard) => panic::catch_unwind(AssertUnwindSafe(|| ask(guard.as_ref()))).unwrap_or(false),
        }
    }

    /// Stores a part; returns the whole item with the last part.
    fn join(&self, item: usize, count: usize, copied: Copied) -> Option<Copied> {
        let mut progress = self.progress();
        let parts = progress.parts.entry(item).or_default();
        parts.push(copied);
        if parts.len() < count {
            return None;
        }
        let mut parts = progress.parts.remove(&item)?;
        drop(progress);
        parts.sort_by_key(|part| part.part);
        parts.into_iter().reduce(|front, back| Copied {
            part: 0,
            bytes: front.bytes + back.bytes,
            summed: front.summed + back.summed,
            checksum: front.checksum.zip(back.checksum).map(|(a, b)| checksum::combine(a, b, back.summed)),
        })
    }

    /// Asks the guard whether the copy is valid, and records the outcome.
    fn settle(&self, item: usize, whole: Copied) {
        let Some(checksum) = whole.checksum else { return };
        let (reported, outcome) = match self.job.direction {
            Direction::Store => (Some(checksum), Outcome::Stored { checksum }),
            Direction::Load => (self.job.is_summed.then_some(checksum), Outcome::Loaded),
        };
        if self.allows(|guard| guard.after(item, reported)) {
            let mut progress = self.progress();
            progress.outcomes[item] = outcome;
            progress.bytes += whole.bytes;
        }
    }

    fn completion(&self) -> Completion {
        let mut progress = self.progress();
        let finished = progress.finished;
        Completion {
            job_id: self.job.id,
            direction: self.job.direction,
            outcomes: std::mem::take(&mut progress.outcomes),
            bytes: progress.bytes,
            elapsed: self.started.get().map_or(Duration::ZERO, |started| finished.duration_since(*started)),
        }
    }
}
