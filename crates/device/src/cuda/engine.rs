//! The copy engine over a device's memory. [`CudaCopyEngine::submit`] gives the driver all copies of registered memory
//! at once; a thread for each direction waits for them and does the rest.
//!
//! Invariants: a job is in `in_flight` from `submit` until its completion is published, once. Jobs of one direction are
//! queued on its stream, released and published in the order of submission. A job is released when no copy of it can
//! be made any more; only then is it settled: the guard is asked, and a store's slices are summed before. A load's
//! slices are summed while the device copies them. No lock is held while the driver is called, but for the lane's own,
//! which orders submissions. Jobs in flight and completions not yet polled together never exceed `queue_jobs`.
//!
//! On a host with several NUMA nodes the threads run on the device's. Staging memory is allocated by a thread that is
//! there, so that it lies there. The thread that makes the engine has its CPUs back afterwards.

use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::checksum::Checksum;
use forebay_core::{Error, ErrorKind, Result};
use forebay_numa::{Home, Kernel, Linux, Nodes, ROOT};

use super::calibrate::{Calibration, Quiet, Refused};
use super::choice::{Choice, Reason, Wish};
use super::context::Context;
use super::driver::{Driver, EventHandle, Location, StreamHandle};
use super::gpus::Link;
use super::lane::{Failed, Lane};
use super::methods::Method;
use super::ops::{Ground, Op, Ops, Piece, ops};
use super::register::{Pool, REGISTRATION_BYTES, Registrar};
use super::selftest::SelfTest;
use crate::copy::{self, Level, Memory};
use crate::engine::{Bell, CopyEngine, EngineReport, PoolId};
use crate::job::{After, Completion, Direction, Job, JobId, Outcome, SlotGuard, Until};
use crate::plan;
use crate::tensor::{Place, Tensors};

/// Small slices are summed together up to this size: it takes 40 µs, much longer than taking it.
const SUM_BYTES: u64 = 1 << 20;

/// How often an engine that has jobs, or is being captured, is looked at again by what waits for neither.
const LOOK: Duration = Duration::from_secs(1);

/// A driver that hangs in its start would hang the engine with it.
pub(super) const START_PATIENCE: Duration = Duration::from_secs(60);

/// A sixteenth of an H100's. By arithmetic three or four have as much in flight as the way to the host holds: each has
/// 32 KiB, and 55 GB/s times 1.5 us are 82 KB.
pub(super) const MULTIPROCESSORS: u32 = 8;

/// An engine's options; the defaults suit a worker that shares its machine with the model.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Position of the device among those that the process sees.
    pub ordinal: u32,
    /// Threads that sum, 1 to 64.
    pub threads: usize,
    /// Limit on the jobs submitted whose completions were not yet polled.
    pub queue_jobs: usize,
    pub level: Level,
    pub method: Wish,
    /// The folder that keeps what was measured for [`Wish::Auto`]; without one each engine measures it.
    pub calibrations: Option<PathBuf>,
    /// The most that the kernel takes of the device while it copies.
    pub multiprocessors: u32,
    /// Of each of two buffers a direction: a copy of it takes 0.3 ms.
    pub staging_bytes: u64,
    /// Whether copies of memory that is not registered are made, through staging memory. They have steps on the host
    /// after `submit`, so nobody may unmap the tensors without a flush; otherwise such jobs are refused.
    pub stages: bool,
    /// Bytes that are registered at a time: a power of two.
    pub registration_bytes: u64,
    /// How long the driver may take to start: seconds on a host with many GPUs whose driver was not in use.
    pub start_patience: Duration,
    /// How long the end waits for copies that are with the device. A device that hangs longer keeps what it has.
    pub patience: Duration,
    /// Below which the system tells of its NUMA nodes, and whose calls keep threads there.
    pub root: PathBuf,
    pub kernel: Arc<dyn Kernel>,
}

impl CudaOptions {
    pub fn new(ordinal: u32) -> CudaOptions {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        CudaOptions {
            ordinal,
            threads: cores.min(4),
            queue_jobs: 1024,
            level: Level::best(),
            method: Wish::Auto,
            calibrations: None,
            multiprocessors: MULTIPROCESSORS,
            staging_bytes: 16 << 20,
            stages: true,
            registration_bytes: REGISTRATION_BYTES,
            start_patience: START_PATIENCE,
            patience: Duration::from_secs(10),
            root: PathBuf::from(ROOT),
            kernel: Arc::new(Linux),
        }
    }
}

/// See the module documentation. Dropping it ends the copies that are with the device and abandons the others:
/// afterwards no byte is touched, unless the device hangs, which keeps what it could touch.
pub struct CudaCopyEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl CudaCopyEngine {
    /// Finds out what the device can do, and tests it. Errors with `Invalid` on options out of range and tensors that
    /// are not on the device, `Unsupported` and `Unavailable` if the driver cannot be used, and `Corrupt` if bytes do
    /// not arrive.
    pub fn new(driver: Arc<dyn Driver>, tensors: Tensors, options: CudaOptions) -> Result<CudaCopyEngine> {
        let is_one = |bytes: u64| bytes > 0 && bytes.is_power_of_two();
        let is_fitting = (1..=64).contains(&options.threads) && options.queue_jobs > 0;
        if !is_fitting || !is_one(options.registration_bytes) || options.staging_bytes < 512 << 10 {
            return Err(Error::invalid("a device engine must have 1 to 64 threads, a queue, and buffers of 512 KiB")
                .with("threads", options.threads)
                .with("queue_jobs", options.queue_jobs)
                .with("staging_bytes", options.staging_bytes));
        }
        let context = Arc::new(Context::retain(driver, options.ordinal, options.start_patience)?);
        let entered = context.enter()?;
        tensors.places().try_for_each(|place| check_place(&context, place))?;
        let (numa_node, home) = home(&context, &options);
        let visit = home.as_ref().map(Home::visit).transpose();
        let lane = |direction| Lane::new(context.clone(), direction, options.staging_bytes);
        let mut lanes = [lane(Direction::Store)?, lane(Direction::Load)?];
        let (methods, registers, mut trouble) = test(&context, &mut lanes, &options)?;
        if let Err(error) = &visit {
            trouble.get_or_insert_with(|| not_kept(error).told());
        }
        let calibration = (options.method == Wish::Auto)
            .then(|| Calibration::new(context.clone(), &lanes, &methods, options.calibrations.as_deref()));
        // Without its memory there is no measurement, and the driver's own methods are used.
        let calibration = calibration.and_then(|made| made.inspect_err(|error| trouble = Some(error.told())).ok());
        drop(visit);
        drop(entered);
        let threads = options.threads;
        let shared = Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            work: Condvar::new(),
            registrar: Registrar::default(),
            submitting: Default::default(),
            choice: Choice::new(methods, lanes[Direction::Load as usize].max_pitch()),
            trouble: Mutex::new(trouble),
            copied: AtomicU64::new(0),
            staged: AtomicU64::new(0),
            tensors,
            options,
            numa_node,
            home,
            calibration,
            lanes,
            context,
        };
        let mut engine = CudaCopyEngine { shared: Arc::new(shared), threads: Vec::new() };
        engine.start("forebay-load", |shared| shared.run_lane(Direction::Load))?;
        engine.start("forebay-store", |shared| shared.run_lane(Direction::Store))?;
        if registers {
            engine.start("forebay-register", |shared| shared.registrar.run(&shared.context))?;
        }
        if engine.shared.calibration.is_some() {
            engine.start("forebay-calibr", Shared::calibrate)?;
        }
        for _ in 0..threads {
            engine.start("forebay-sum", Shared::sum)?;
        }
        Ok(engine)
    }

    fn start(&mut self, name: &str, run: impl FnOnce(&Shared) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        shared.lock().threads += 1;
        let body = move || {
            // A thread that cannot enter the context finds it ended with each job, and fails them.
            let _ = shared.context.adopt();
            // A refusal is known from the thread that has made the engine.
            let _ = shared.home.as_ref().map(Home::stay);
            run(&shared);
            shared.lock().threads -= 1;
            shared.changed.notify_all();
        };
        match thread::Builder::new().name(name.to_string()).spawn(body) {
            Ok(thread) => self.threads.push(thread),
            Err(error) => {
                self.shared.lock().threads -= 1;
                return Err(Error::new(ErrorKind::Unavailable, "cannot start a copy thread").source(error));
            }
        }
        Ok(())
    }
}

/// The NUMA node of the device on a host with several, and its CPUs.
fn home(context: &Context, options: &CudaOptions) -> (Option<u32>, Option<Home>) {
    let Some(node) = Link::read(&options.root, context.bus_id()).numa_node else { return (None, None) };
    let nodes = Nodes::read(&options.root);
    (nodes.get(node).map(|node| node.id), Home::on(&nodes, node, options.kernel.clone()))
}

fn not_kept(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the copy threads cannot be kept on the NUMA node of their GPU")
        .source(error.to_string())
        .hint("copies work, and may be slower; in a container, let its seccomp profile allow `sched_setaffinity`")
}

/// Errors with `Invalid` if a tensor is not where it says.
fn check_place(context: &Context, place: &Place) -> Result<()> {
    let Place::Device { ordinal, base, bytes } = *place else {
        return Err(Error::invalid("a tensor is not on a device"));
    };
    for address in [base, base + bytes.saturating_sub(1)] {
        let location = context.driver().location(address);
        let location =
            location.map_err(|status| context.error("the driver does not know a tensor's memory", status))?;
        if location != Location::Device(ordinal) || ordinal != context.ordinal() {
            return Err(Error::invalid("a tensor is not on the device that was named")
                .with("found", format!("{location:?}"))
                .with("named", context.ordinal()));
        }
    }
    Ok(())
}

/// The methods that copy rightly, whether memory can be registered, and what else was found. Errors if none does.
fn test(
    context: &Context,
    lanes: &mut [Lane; 2],
    options: &CudaOptions,
) -> Result<(Vec<Method>, bool, Option<String>)> {
    let [stores, loads] = lanes;
    let (wished, mut trouble) = (options.method.methods(), None);
    if wished.contains(&Method::Kernel) {
        // An older device is no trouble unless somebody wants the kernel.
        trouble = loads.load_kernel(options.multiprocessors).err().filter(|_| options.method == Wish::Kernel);
    }
    let test = SelfTest::new(context, loads, stores)?;
    // The kernel last, since it needs another method that stores what it has loaded.
    let (kernel, others): (Vec<_>, Vec<_>) =
        wished.iter().copied().filter(|method| loads.has(*method)).partition(|method| *method == Method::Kernel);
    let mut right: Vec<Method> = Vec::new();
    for method in others.into_iter().chain(kernel) {
        let own = right.iter().copied().find(|method| method.takes_all());
        let Some(store) = (if method == Method::Kernel { own } else { Some(method) }) else { continue };
        match test.with_pinned(method, store) {
            Ok(()) => right.push(method),
            Err(error) => trouble = Some(error),
        }
    }
    let Some(own) = right.iter().copied().find(|method| method.takes_all()) else {
        let none = || Error::new(ErrorKind::Unsupported, "the driver has no way to copy");
        return Err(trouble.unwrap_or_else(none));
    };
    let registered = test.with_registered(own, own);
    let registers = registered.is_ok();
    // Changed bytes are no matter of a limit on locked memory: nothing of this device is trusted.
    let registered = match registered {
        Err(error) if error.kind() == ErrorKind::Corrupt => return Err(error),
        Err(error) => Some(error.hint("copies go through staging memory, which is slower")),
        Ok(()) => None,
    };
    let others: Vec<_> = right.iter().copied().filter(|method| registers && !method.takes_all()).collect();
    for method in others {
        let store = if method == Method::Kernel { own } else { method };
        if let Err(error) = test.with_registered(method, store) {
            right.retain(|other| *other != method);
            trouble = Some(error);
        }
    }
    let methods = wished.iter().copied().filter(|method| right.contains(method)).collect();
    Ok((methods, registers, registered.or(trouble).map(|error| error.told())))
}

impl CopyEngine for CudaCopyEngine {
    fn attach_pool(&self, memory: Memory) -> Result<PoolId> {
        let shared = &self.shared;
        let mut queue = shared.lock();
        let starts = queue.pools.values().filter(|pool| pool.is_start_of(&memory));
        let smaller = starts.max_by_key(|pool| pool.memory().len()).cloned();
        let pool = Arc::new(Pool::new(memory, shared.context.clone(), shared.options.registration_bytes, smaller));
        let id = PoolId(queue.next_pool);
        queue.next_pool += 1;
        queue.pools.insert(id, pool.clone());
        drop(queue);
        shared.registrar.add(&pool);
        Ok(id)
    }

    fn populated(&self, pool: PoolId, bytes: u64) {
        let pool = self.shared.lock().pools.get(&pool).cloned();
        if let Some(pool) = pool {
            pool.populated(bytes);
            self.shared.registrar.look();
        }
    }

    fn ring_when_registered(&self, bell: Bell) {
        self.shared.registrar.ring(bell);
    }

    fn detach_pool(&self, pool: PoolId) -> Result<()> {
        let detached = self.shared.lock().pools.remove(&pool);
        detached.map(drop).ok_or_else(|| unknown_pool(ErrorKind::NotFound, pool))
    }

    fn submit(&self, job: Job) -> Result<()> {
        self.shared.submit(job)
    }

    fn poll(&self) -> Vec<Completion> {
        self.shared.lock().published.drain(..).collect()
    }

    fn wait(&self, jobs: &[JobId], until: Until, deadline: Instant) -> Result<()> {
        let mut queue = self.shared.lock();
        loop {
            let is_open = |running: &Arc<Running>| until == Until::Settled || !running.is_released();
            let left = jobs.iter().filter(|id| queue.in_flight.get(id).is_some_and(is_open)).count();
            if left == 0 {
                return Ok(());
            }
            let Some(patience) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return Err(Error::new(ErrorKind::Timeout, "copies are still in flight").with("jobs", left));
            };
            (queue, _) = self.shared.changed.wait_timeout(queue, patience).expect(LOCK);
        }
    }

    fn report(&self) -> EngineReport {
        let shared = &self.shared;
        let pools: Vec<_> = shared.lock().pools.values().cloned().collect();
        let ended = shared.context.check().err().map(|error| error.told());
        EngineReport {
            device: Some(shared.context.description().to_string()),
            numa_node: shared.numa_node,
            methods: shared.choice.methods().iter().map(|method| method.name()).collect(),
            choice: shared.choice.reason().name(),
            pool_bytes: pools.iter().map(|pool| pool.memory().len() as u64).sum(),
            registered_bytes: pools.iter().map(|pool| pool.registered_bytes()).sum(),
            copied_bytes: shared.copied.load(Ordering::Relaxed),
            staged_bytes: shared.staged.load(Ordering::Relaxed),
            trouble: ended.or_else(|| shared.trouble().clone()).or_else(|| shared.registrar.trouble()),
        }
    }
}

impl Drop for CudaCopyEngine {
    fn drop(&mut self) {
        self.shared.registrar.stop();
        let mut queue = self.shared.lock();
        queue.is_stopping = true;
        self.shared.work.notify_all();
        self.shared.changed.notify_all();
        let deadline = Instant::now() + self.shared.options.patience;
        while queue.threads > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // The device holds the threads, and they hold all that it may still touch.
                return;
            }
            (queue, _) = self.shared.changed.wait_timeout(queue, left).expect(LOCK);
        }
        drop(queue);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn unknown_pool(kind: ErrorKind, pool: PoolId) -> Error {
    Error::new(kind, "the pool is not attached").with("pool", pool.0)
}

const LOCK: &str = "no thread panics while it holds this lock";

/// Dropped in this order, by whoever is last: pools before the context in which they are registered.
struct Shared {
    queue: Mutex<Queue>,
    /// A job was released or published, or a thread has ended.
    changed: Condvar,
    /// There is something for a lane's or a summing thread, or the engine stops.
    work: Condvar,
    registrar: Registrar,
    /// By direction: held while a job is given to the driver, so that the lane has the order of the stream.
    submitting: [Mutex<()>; 2],
    choice: Choice,
    trouble: Mutex<Option<String>>,
    copied: AtomicU64,
    staged: AtomicU64,
    tensors: Tensors,
    options: CudaOptions,
    /// Of the device, on a host with several.
    numa_node: Option<u32>,
    home: Option<Home>,
    calibration: Option<Calibration>,
    /// By direction.
    lanes: [Lane; 2],
    context: Arc<Context>,
}

#[derive(Default)]
struct Queue {
    pools: HashMap<PoolId, Arc<Pool>>,
    next_pool: u32,
    in_flight: HashMap<JobId, Arc<Running>>,
    published: VecDeque<Completion>,
    /// By direction.
    order: [Order; 2],
    /// Slices to be summed; those of loads are in front.
    sums: VecDeque<Sum>,
    is_stopping: bool,
    threads: usize,
    /// Jobs that were admitted, and those of them that have ended.
    begun: u64,
    ended: u64,
    /// Of the last job that followed one.
    last_stream: Option<u64>,
}

/// The jobs of one direction, in the order of submission.
#[derive(Default)]
struct Order {
    unpublished: VecDeque<Arc<Running>>,
    /// Those of them that the lane's thread has not taken.
    waiting: VecDeque<Arc<Running>>,
}

/// Consecutive items of a job whose slices are summed.
struct Sum {
    running: Arc<Running>,
    first: usize,
    count: usize,
}

struct Running {
    job: Job,
    pool: Arc<Pool>,
    /// Bytes of each item.
    sizes: Vec<u64>,
    /// Behind the copies that the driver was given at submission; `None` if that could not be marked.
    mark: Option<EventHandle>,
    pieces: Vec<Piece>,
    started: Instant,
    is_released: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// By item: whether the guard has refused it, or copying it has failed.
    refused: Vec<bool>,
    checksums: Vec<Option<u64>>,
    /// Sums and the release that are to come before the job is settled.
    left: usize,
    outcomes: Vec<Outcome>,
    bytes: u64,
    is_settled: bool,
    elapsed: Duration,
}

impl Queue {
    fn admit(&mut self, job: &Job, limit: usize) -> Result<()> {
        if self.in_flight.contains_key(&job.id) || self.published.iter().any(|completion| completion.job_id == job.id) {
            return Err(Error::invalid("the job's id is already in use").with("job", job.id));
        }
        if self.in_flight.len() + self.published.len() >= limit {
            return Err(Error::new(ErrorKind::Full, "the copy queue is full").with("queue_jobs", limit));
        }
        self.begun += 1;
        if let After::Stream(stream) = job.after {
            self.last_stream = Some(stream);
        }
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect(LOCK)
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().expect(LOCK)
    }

    fn submit(&self, job: Job) -> Result<()> {
        let pool = self.lock().pools.get(&job.pool).cloned();
        let pool = pool.ok_or_else(|| unknown_pool(ErrorKind::Invalid, job.pool))?;
        let sizes = plan::check(&job, &self.tensors, pool.memory().len() as u64)?;
        let lane = job.direction as usize;
        let _order = self.submitting[lane].lock().expect(LOCK);
        self.lock().admit(&job, self.options.queue_jobs)?;
        let begun = self.begin(job, pool, sizes).map(|running| self.enqueue(Arc::new(running)));
        begun.inspect_err(|_| self.lock().ended += 1)
    }

    /// Gives the driver what it can copy at once.
    fn begin(&self, job: Job, pool: Arc<Pool>, sizes: Vec<u64>) -> Result<Running> {
        let started = Instant::now();
        let allowed: Vec<_> = (0..job.items.len()).map(|item| allows(&job, |guard| guard.before(item))).collect();
        let ops = self.ops(&job, &pool, &allowed)?;
        let (mark, is_queued) = self.give(&job, &ops.direct)?;
        let refused = allowed.iter().map(|is_allowed| !is_allowed || !is_queued).collect();
        Ok(Running::new(job, pool, sizes, mark, ops.staged, started, refused))
    }

    /// `Unavailable` if copies would have to be staged and must not be.
    fn ops(&self, job: &Job, pool: &Pool, allowed: &[bool]) -> Result<Ops> {
        let ground = Ground {
            tensors: &self.tensors,
            base: pool.memory().address(),
            registered: &|offset| pool.registered(offset),
            border: &|offset| pool.border(offset),
            staging_bytes: self.options.staging_bytes,
        };
        let ops = ops(job, &ground, |item| allowed[item]);
        if let Some(piece) = ops.staged.first() {
            pool.want(piece.offset);
            if !self.options.stages {
                return Err(Error::new(ErrorKind::Unavailable, "the pool's memory is not registered yet")
                    .hint("an engine in sleep mode copies only memory that the driver has registered"));
            }
        }
        Ok(ops)
    }

    /// Gives copies to the driver, behind what they must follow. `Err` if none was given; otherwise the mark behind
    /// them, and whether all were.
    fn give(&self, job: &Job, direct: &[Op]) -> Result<(Option<EventHandle>, bool)> {
        let lane = &self.lanes[job.direction as usize];
        let _entered = self.context.enter()?;
        lane.follow(job.after)?;
        let queued = lane.queue(&self.choice.order(job.direction, direct), direct);
        let is_queued = queued.is_ok();
        if let Err(Failed { method, error }) = queued {
            self.choice.give_up(method);
            *self.trouble() = Some(error.told());
        }
        Ok((lane.mark(), is_queued))
    }

    /// Whether the stream is being captured, as far as the driver tells.
    fn may_capture(&self, stream: u64) -> bool {
        self.context.driver().is_capturing(StreamHandle(stream)).unwrap_or(true)
    }

    fn enqueue(&self, running: Arc<Running>) {
        let mut queue = self.lock();
        queue.in_flight.insert(running.job.id, running.clone());
        let order = &mut queue.order[running.job.direction as usize];
        order.unpublished.push_back(running.clone());
        order.waiting.push_back(running.clone());
        if running.job.direction == Direction::Load && running.job.is_summed {
            running.sums().for_each(|sum| queue.sums.push_front(sum));
        }
        drop(queue);
        self.work.notify_all();
    }

    /// The loop of a lane's thread. When the engine stops it still waits for what the device has.
    fn run_lane(&self, direction: Direction) {
        let lane = &self.lanes[direction as usize];
        while let Some((running, is_stopping)) = self.next(direction) {
            let staged = if running.pieces.is_empty() {
                Ok(())
            } else if is_stopping {
                Err(Error::new(ErrorKind::Unavailable, "the engine stops"))
            } else {
                let allows = |item| running.still_allows(item);
                lane.stage(&self.choice.own(), running.pool.memory(), &running.pieces, &allows)
            };
            let ended = lane.finish(running.mark);
            if let Err(error) = staged.and(ended) {
                running.fail();
                *self.trouble() = Some(error.told());
            }
            self.release(running);
        }
    }

    /// The next job of the lane; `None` when the engine stops and there is none.
    fn next(&self, direction: Direction) -> Option<(Arc<Running>, bool)> {
        let mut queue = self.lock();
        loop {
            if let Some(running) = queue.order[direction as usize].waiting.pop_front() {
                return Some((running, queue.is_stopping));
            }
            if queue.is_stopping {
                return None;
            }
            queue = self.work.wait(queue).expect(LOCK);
        }
    }

    /// Lets those go on who wait for the tensors, and has a store's slices summed.
    fn release(&self, running: Arc<Running>) {
        let bytes = |pieces: &[Piece]| pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        self.staged.fetch_add(bytes(&running.pieces), Ordering::Relaxed);
        let mut queue = self.lock();
        running.is_released.store(true, Ordering::Release);
        running.state().elapsed = running.started.elapsed();
        if running.job.direction == Direction::Store {
            queue.sums.extend(running.sums());
        }
        drop(queue);
        self.work.notify_all();
        self.changed.notify_all();
        self.count_down(&running);
    }

    /// The thread that finds out which methods are the best; see [`super::calibrate`].
    fn calibrate(&self) {
        let Some(calibration) = &self.calibration else { return };
        if let Some(costs) = calibration.kept() {
            return self.choice.go_by(costs, Reason::Kept);
        }
        match calibration.measure(&self.lanes, &self.choice.methods(), self) {
            Ok(None) => {}
            Ok(Some(costs)) => {
                calibration.keep(&costs);
                self.choice.go_by(costs, Reason::Measured);
            }
            Err(Refused { method, error }) => {
                self.choice.give_up(method);
                *self.trouble() = Some(error.told());
            }
        }
    }

    /// The loop of a summing thread.
    fn sum(&self) {
        while let Some(sum) = self.next_sum() {
            for item in sum.first..sum.first + sum.count {
                sum.running.sum(item, self.options.level);
            }
            self.count_down(&sum.running);
        }
    }

    fn next_sum(&self) -> Option<Sum> {
        let mut queue = self.lock();
        loop {
            if queue.is_stopping {
                return None;
            }
            if let Some(sum) = queue.sums.pop_front() {
                return Some(sum);
            }
            queue = self.work.wait(queue).expect(LOCK);
        }
    }

    /// Settles the job if nothing is left to come, and publishes those that no unsettled one precedes.
    fn count_down(&self, running: &Arc<Running>) {
        if !running.is_last() {
            return;
        }
        running.settle();
        self.copied.fetch_add(running.state().bytes, Ordering::Relaxed);
        let mut finished = Vec::new();
        let mut queue = self.lock();
        let direction = running.job.direction as usize;
        let is_settled = |running: &mut Arc<Running>| running.state().is_settled;
        while let Some(running) = queue.order[direction].unpublished.pop_front_if(is_settled) {
            finished.extend(queue.in_flight.remove(&running.job.id));
            queue.published.push_back(running.completion());
            queue.ended += 1;
            finished.push(running);
        }
        drop(queue);
        self.changed.notify_all();
        // Dropped without the lock: the last job on a detached pool unregisters and unmaps it, which takes time.
        drop(finished);
    }
}

impl Quiet for Shared {
    fn await_quiet(&self) -> Option<u64> {
        let mut queue = self.lock();
        loop {
            if queue.is_stopping {
                return None;
            }
            if queue.ended > 0 && queue.begun == queue.ended {
                let (mark, stream) = (queue.begun, queue.last_stream);
                drop(queue);
                if !stream.is_some_and(|stream| self.may_capture(stream)) {
                    return Some(mark);
                }
                queue = self.lock();
            }
            (queue, _) = self.changed.wait_timeout(queue, LOOK).expect(LOCK);
        }
    }

    fn was_quiet(&self, mark: u64) -> bool {
        self.lock().begun == mark
    }
}

fn allows(job: &Job, ask: impl Fn(&dyn SlotGuard) -> bool) -> bool {
    match &job.guard {
        None => true,
        Some(guard) => panic::catch_unwind(AssertUnwindSafe(|| ask(guard.as_ref()))).unwrap_or(false),
    }
}

impl Running {
    fn new(
        job: Job,
        pool: Arc<Pool>,
        sizes: Vec<u64>,
        mark: Option<EventHandle>,
        pieces: Vec<Piece>,
        started: Instant,
        refused: Vec<bool>,
    ) -> Running {
        let items = job.items.len();
        let state = State {
            refused,
            checksums: vec![None; items],
            left: 1,
            outcomes: vec![Outcome::Failed; items],
            bytes: 0,
            is_settled: false,
            elapsed: Duration::ZERO,
        };
        let (is_released, state) = (AtomicBool::new(false), Mutex::new(state));
        Running { job, pool, sizes, mark, pieces, started, is_released, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(LOCK)
    }

    fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }

    /// Asks the guard again, some time after the submission.
    fn still_allows(&self, item: usize) -> bool {
        let is_allowed = allows(&self.job, |guard| guard.before(item));
        self.state().refused[item] |= !is_allowed;
        is_allowed
    }

    fn fail(&self) {
        self.state().refused.fill(true);
    }

    /// The summing that the job needs, counted among what is left.
    fn sums(self: &Arc<Running>) -> impl Iterator<Item = Sum> {
        let (mut first, mut filled, mut sums) = (0, 0, Vec::new());
        for (item, bytes) in self.sizes.iter().enumerate() {
            filled += bytes;
            if filled >= SUM_BYTES || item + 1 == self.sizes.len() {
                sums.push(Sum { running: self.clone(), first, count: item + 1 - first });
                (first, filled) = (item + 1, 0);
            }
        }
        self.state().left += sums.len();
        sums.into_iter()
    }

    fn sum(&self, item: usize, level: Level) {
        if self.state().refused[item] {
            return;
        }
        let (it, bytes, mut sum) = (&self.job.items[item], self.sizes[item], Checksum::new());
        let [before, behind] = if self.job.direction == Direction::Load { it.beside } else { [0, 0] };
        copy::sum_up(level, &mut sum, self.pool.memory().span(it.offset - before, before + bytes + behind));
        self.state().checksums[item] = Some(sum.finish());
    }

    fn is_last(&self) -> bool {
        let mut state = self.state();
        state.left -= 1;
        state.left == 0
    }

    /// Asks the guard which of the copies are valid.
    fn settle(&self) {
        for item in 0..self.job.items.len() {
            let (is_refused, checksum) = {
                let state = self.state();
                (state.refused[item], state.checksums[item])
            };
            let outcome = match (self.job.direction, checksum) {
                (Direction::Store, Some(checksum)) => Outcome::Stored { checksum },
                (Direction::Store, None) => continue,
                (Direction::Load, _) => Outcome::Loaded,
            };
            if !is_refused && allows(&self.job, |guard| guard.after(item, checksum)) {
                let mut state = self.state();
                state.outcomes[item] = outcome;
                state.bytes += self.sizes[item];
            }
        }
        self.state().is_settled = true;
    }

    fn completion(&self) -> Completion {
        let mut state = self.state();
        Completion {
            job_id: self.job.id,
            direction: self.job.direction,
            outcomes: std::mem::take(&mut state.outcomes),
            bytes: state.bytes,
            elapsed: state.elapsed,
        }
    }
}
