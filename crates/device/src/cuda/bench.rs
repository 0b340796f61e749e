//! What has to be measured on a GPU, for `bench/gpu.sh`: the device and its peaks, registration, the checksum beside
//! stores, the engine's order of calls with every byte checked, and kills in the middle of stores. And the methods by
//! size, for `forebay bench device`.
//!
//! Invariants: a figure of a copy comes after the same copies were checked with new random bytes. Nothing here is part
//! of an engine. On the fake driver the same code runs, and its figures mean nothing.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::checksum::{Checksum, checksum};
use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;

use super::context::Context;
use super::driver::{Attribute, Driver, StreamHandle};
use super::engine::{CudaCopyEngine, CudaOptions, MULTIPROCESSORS, START_PATIENCE};
use super::gpus::{Link, ROOT};
use super::lane::Lane;
use super::methods::{Method, singles};
use super::ops::Op;
use super::pitched;
use super::product::Product;
use super::register::Pool;
use crate::bench::Random;
use crate::bench::device::{DeviceBench, Side, Way, median, wrong};
use crate::copy::{self, Level, Memory};
use crate::engine::CopyEngine;
use crate::job::{After, Direction, Item, Job, Outcome, Until};
use crate::tensor::{PageRef, Place, Tensor, Tensors};

const PATIENCE: Duration = Duration::from_secs(60);

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Of a peak, and of the pool.
    pub bytes: u64,
    pub repeats: usize,
    /// Of the engine's order of calls.
    pub schedules: u64,
    pub seed: u64,
}

impl Extent {
    /// For a GPU: about a minute.
    pub fn whole(seed: u64) -> Extent {
        Extent { bytes: 512 << 20, repeats: 5, schedules: 400, seed }
    }

    /// For a rehearsal on the fake driver: seconds.
    pub fn small(seed: u64) -> Extent {
        Extent { bytes: 4 << 20, repeats: 1, schedules: 8, seed }
    }
}

/// One measured value.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub what: String,
    pub value: f64,
    pub unit: &'static str,
}

fn figure(what: impl Into<String>, value: f64, unit: &'static str) -> Figure {
    Figure { what: what.into(), value, unit }
}

fn gb_per_s(what: impl Into<String>, bytes: u64, took: Duration) -> Figure {
    figure(what, bytes as f64 / 1e9 / took.as_secs_f64(), "GB/s")
}

/// A device with memory on both sides.
struct Bench {
    context: Arc<Context>,
    /// By direction.
    lanes: [Lane; 2],
    device: u64,
    /// Pinned: what is sent, and what has come back.
    sent: Memory,
    back: Memory,
}

impl Bench {
    fn new(driver: Arc<dyn Driver>, ordinal: u32, bytes: u64) -> Result<Bench> {
        let context = Arc::new(Context::retain(driver, ordinal, START_PATIENCE)?);
        context.adopt()?;
        let lane = |direction| Lane::new(context.clone(), direction, 512 << 10);
        let lanes = [lane(Direction::Store)?, lane(Direction::Load)?];
        let cannot = |status| context.error("cannot allocate memory to measure with", status);
        let device = context.driver().alloc_device(bytes).map_err(cannot)?;
        let (sent, back) = (context.driver().alloc_host(bytes), context.driver().alloc_host(bytes));
        let (sent, back) = (sent.map_err(cannot)?, back.map_err(cannot)?);
        Ok(Bench { context, lanes, device, sent, back })
    }

    /// Queues copies and waits for them.
    fn pass(&self, direction: Direction, method: Method, ops: &[Op]) -> Result<Duration> {
        match direction {
            Direction::Load => self.at_once(method, ops, &[]),
            Direction::Store => self.at_once(method, &[], ops),
        }
    }

    /// Queues copies both ways, of which one may have none, and waits for them.
    fn at_once(&self, method: Method, loads: &[Op], stores: &[Op]) -> Result<Duration> {
        let [store, load] = &self.lanes;
        let used: Vec<_> = [(load, loads), (store, stores)].into_iter().filter(|(_, ops)| !ops.is_empty()).collect();
        let start = Instant::now();
        let queued: Vec<_> = used.iter().map(|(lane, ops)| lane.queue(&[method], ops)).collect();
        let ended: Vec<_> = used.iter().map(|(lane, _)| lane.finish(lane.mark())).collect();
        let took = start.elapsed();
        ended.into_iter().collect::<Result<()>>()?;
        queued.into_iter().try_for_each(|queued| queued.map_err(Error::from))?;
        Ok(took)
    }

    /// GB/s of a load, of a store, and of both at once, in one copy each.
    fn peaks(&self, repeats: usize) -> Result<[f64; 3]> {
        let (bytes, half) = (self.sent.len() as u64, self.sent.len() as u64 / 2);
        let op = |at: u64, host: &Memory, bytes| vec![Op::new(self.device + at, host.address(), bytes)];
        let (load, store) = (op(0, &self.sent, bytes), op(0, &self.back, bytes));
        // One that warms up, and arrives before it goes back.
        self.at_once(Method::Loop, &load, &[])?;
        self.at_once(Method::Loop, &[], &store)?;
        same(&self.sent, &self.back, "a peak")?;
        let both = (op(0, &self.sent, half), op(half, &self.back, half));
        let speed = |loads: &[Op], stores: &[Op]| -> Result<f64> {
            let passes = (0..repeats).map(|_| self.at_once(Method::Loop, loads, stores));
            Ok(gb_per_s("", bytes, median(passes.collect::<Result<_>>()?)).value)
        };
        Ok([speed(&load, &[])?, speed(&[], &store)?, speed(&both.0, &both.1)?])
    }

    /// Whether what is sent comes back by this method.
    fn check(&self, method: Method, there: &[Op], back: &[Op]) -> Result<()> {
        let store = if method.copies(Direction::Store) { method } else { Method::Loop };
        self.back.write(0, &vec![0xd5; self.back.len()]);
        self.pass(Direction::Load, method, there)?;
        self.pass(Direction::Store, store, back)?;
        for op in there {
            let at = op.host - self.sent.address();
            let is_equal = self.sent.span(at, op.bytes).bytes() == self.back.span(at, op.bytes).bytes();
            let error = || wrong(method.name()).with("bytes", op.bytes).with("count", there.len());
            is_equal.then_some(()).ok_or_else(error)?;
        }
        Ok(())
    }

    /// Copies as a method takes them, in the first `room` bytes of either side; fewer than `count` if no more fit.
    fn shape(&self, method: Method, room: u64, size: u64, count: usize, random: &mut Random) -> Vec<Op> {
        let op = |there: u64, here: u64| Op::new(self.device + there * size, self.sent.address() + here * size, size);
        let places = room / size;
        if method == Method::Pitched {
            let fits = |place: &u64| *place < places;
            return (0..count as u64).map(pitched::place).filter(fits).map(|place| op(place, place)).collect();
        }
        let [there, here] = [(); 2].map(|()| random.permutation(places as u32));
        there.into_iter().zip(here).take(count).map(|(there, here)| op(there.into(), here.into())).collect()
    }

    /// Half of the copies are loads into one half of the device, and half are stores from the other one.
    fn halves(&self, method: Method, size: u64, count: usize, random: &mut Random) -> [Vec<Op>; 2] {
        let half = self.sent.len() as u64 / 2;
        let loads = self.shape(method, half, size, count / 2, random);
        let stores = loads.iter().map(|op| self.mirrored(&Op { device: op.device + half, ..*op })).collect();
        [loads, stores]
    }

    /// The same copy for what comes back.
    fn mirrored(&self, op: &Op) -> Op {
        Op { host: op.host - self.sent.address() + self.back.address(), ..*op }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let _ = driver.free_device(self.device);
        for host in [&self.sent, &self.back] {
            let _ = driver.free_host(host);
        }
    }
}

/// Row 1: what the device is, and the peaks of pinned memory, one way and both ways at once.
pub fn peaks(driver: Arc<dyn Driver>, ordinal: u32, extent: &Extent) -> Result<Vec<Figure>> {
    let bench = Bench::new(driver, ordinal, extent.bytes)?;
    let mut figures = vec![figure(bench.context.description(), f64::from(ordinal), "device")];
    let attributes = [
        ("largest pitch", Attribute::MaxPitch, "B"),
        ("multiprocessors", Attribute::Multiprocessors, ""),
        ("copy engines", Attribute::CopyEngines, ""),
        ("compute capability, major", Attribute::ComputeMajor, ""),
        ("compute capability, minor", Attribute::ComputeMinor, ""),
        ("NUMA node of the host", Attribute::HostNumaNode, ""),
    ];
    for (what, attribute, unit) in attributes {
        // A driver that is older than an attribute does not know it.
        figures.extend(bench.context.attribute(attribute).ok().map(|value| figure(what, f64::from(value), unit)));
    }
    let Link { numa_node, lanes, most_lanes, gt_per_s, most_gt_per_s } =
        Link::read(Path::new(ROOT), bench.context.bus_id());
    let told = [
        ("NUMA node of the device", numa_node.map(f64::from), ""),
        ("speed of the link now", gt_per_s, "GT/s"),
        ("speed of the link at most", most_gt_per_s, "GT/s"),
        ("width of the link now", lanes.map(f64::from), "lanes"),
        ("width of the link at most", most_lanes.map(f64::from), "lanes"),
    ];
    figures.extend(told.into_iter().filter_map(|(what, value, unit)| Some(figure(what, value?, unit))));
    Random(extent.seed).fill(&bench.sent);
    let names = ["peak of a load", "peak of a store", "peak of both ways at once"];
    figures.extend(names.into_iter().zip(bench.peaks(extent.repeats)?).map(|(what, peak)| figure(what, peak, "GB/s")));
    Ok(figures)
}

/// Row 2: how long the driver takes to register memory that is populated, 1 GiB at a time, and to let it go.
pub fn registration(driver: Arc<dyn Driver>, ordinal: u32, what: &str, memory: Memory) -> Result<Vec<Figure>> {
    let context = Arc::new(Context::retain(driver, ordinal, START_PATIENCE)?);
    context.adopt()?;
    let bytes = memory.len() as u64;
    let pool = Pool::new(memory, context.clone(), super::register::REGISTRATION_BYTES, None);
    let start = Instant::now();
    let registered = pool.register_all();
    let took = start.elapsed();
    let gib = pool.registered_bytes() as f64 / f64::from(1 << 30);
    let start = Instant::now();
    drop(pool);
    let mut figures = vec![
        figure(format!("{what}: registered of {} MiB", bytes >> 20), gib * 1024.0, "MiB"),
        figure(format!("{what}: registered in"), took.as_secs_f64(), "s"),
        figure(format!("{what}: let go in"), start.elapsed().as_secs_f64(), "s"),
    ];
    if let Err(status) = registered {
        figures.push(figure(
            format!("{what}: refused, {}", context.driver().error_name(status)),
            f64::from(status.0),
            "",
        ));
    }
    Ok(figures)
}

/// What `forebay bench device` measures on a device: each method of its driver. Shuffled copies, or evenly spaced rows
/// for the method that copies these. The kernel loads only, so what it has loaded comes back by another method.
pub(crate) fn side(driver: Arc<dyn Driver>, ordinal: u32, asked: &DeviceBench) -> Result<impl Side + use<>> {
    let mut bench = Bench::new(driver, ordinal, asked.working_set_bytes)?;
    let [_, loads] = &mut bench.lanes;
    // Without it there are the driver's own methods.
    let _ = loads.load_kernel(MULTIPROCESSORS);
    Random(asked.seed).fill(&bench.sent);
    let methods = Method::ALL.into_iter().filter(|method| bench.lanes[Direction::Load as usize].has(*method)).collect();
    let context = bench.context.clone();
    let product = (asked.product_rows > 0).then(|| Product::load(context, asked.product_rows));
    // An older device takes neither.
    let product = match product.transpose() {
        Err(error) if error.kind() == ErrorKind::Corrupt => return Err(error),
        product => product.ok().flatten(),
    };
    Ok(Methods { product, bench, methods, method: Method::Loop, laid: Default::default() })
}

/// The methods of a device, and the copies of the shape that is measured.
struct Methods {
    product: Option<Product>,
    bench: Bench,
    methods: Vec<Method>,
    method: Method,
    /// Loads and stores, by the position of the way.
    laid: [[Vec<Op>; 2]; 3],
}

impl Side for Methods {
    fn engine(&self) -> &'static str {
        "cuda"
    }

    fn baseline(&self) -> &'static str {
        "pinned"
    }

    fn peaks(&self, runs: usize) -> Result<[f64; 3]> {
        self.bench.peaks(runs)
    }

    fn methods(&self) -> Vec<&'static str> {
        self.methods.iter().map(|method| method.name()).collect()
    }

    fn multiprocessors(&self, method: usize) -> Option<u32> {
        // The driver's own methods copy by engines of the device that do nothing else.
        let is_kernel = self.methods[method] == Method::Kernel;
        Some(if is_kernel { self.bench.lanes[Direction::Load as usize].multiprocessors() } else { 0 })
    }

    fn lay_out(&mut self, method: usize, size: u64, count: usize, random: &mut Random) -> Result<()> {
        let (bench, method) = (&self.bench, self.methods[method]);
        let there = bench.shape(method, bench.sent.len() as u64, size, count, random);
        let back: Vec<_> = there.iter().map(|op| bench.mirrored(op)).collect();
        bench.check(method, &there, &back)?;
        self.method = method;
        self.laid = match method.copies(Direction::Store) {
            true => {
                let both = bench.halves(method, size, count, random);
                [[there, Vec::new()], [Vec::new(), back], both]
            }
            false => [[there, Vec::new()], Default::default(), Default::default()],
        };
        Ok(())
    }

    fn bytes(&self, way: Way) -> u64 {
        self.laid[way as usize].iter().flatten().map(|op| op.bytes).sum()
    }

    fn pass(&self, way: Way) -> Result<Duration> {
        let [loads, stores] = &self.laid[way as usize];
        self.bench.at_once(self.method, loads, stores)
    }

    fn has_product(&self) -> bool {
        self.product.is_some()
    }

    fn beside_product(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<Option<f64>> {
        self.product.as_ref().expect("there is one").beside(run)
    }
}

/// Row 4: a store of the engine's by the number of summing threads: until its tensors are released, and until it is
/// settled. And what one thread sums alone.
pub fn checksums(driver: &Arc<dyn Driver>, ordinal: u32, extent: &Extent) -> Result<Vec<Figure>> {
    let block = 2 << 20;
    let bench = Bench::new(driver.clone(), ordinal, extent.bytes)?;
    let (blocks, memory) = ((extent.bytes / block) as u32, Memory::anonymous(extent.bytes as usize)?);
    Random(extent.seed).fill(&memory);
    let start = Instant::now();
    let mut sum = Checksum::new();
    copy::sum_up(Level::best(), &mut sum, memory.span(0, extent.bytes));
    sum.finish();
    let mut figures = vec![gb_per_s("one thread sums alone", extent.bytes, start.elapsed())];
    for threads in [1, 2, 4] {
        let place = Place::Device { ordinal, base: bench.device, bytes: extent.bytes };
        let tensor = Tensor { place, offset: 0, rows: blocks, row_stride_bytes: block };
        let tensors = Tensors::new(vec![tensor], vec![vec![PageRef { tensor: 0, page_bytes: block }]])?;
        let engine =
            CudaCopyEngine::new(driver.clone(), tensors, CudaOptions { threads, ..CudaOptions::new(ordinal) })?;
        let pool = engine.attach_pool(memory.clone())?;
        engine.populated(pool, extent.bytes);
        wait_registered(&engine)?;
        let item = |at: u32| Item { offset: u64::from(at) * block, group: 0, blocks: at..at + 1, beside: [0; 2] };
        let (items, block_ids) = ((0..blocks).map(item).collect(), (0..blocks).collect());
        let (direction, after) = (Direction::Store, After::Now);
        let job = Job { id: 1, direction, pool, after, items, block_ids, is_summed: true, guard: None };
        let start = Instant::now();
        engine.submit(job)?;
        let submitted = start.elapsed();
        engine.wait(&[1], Until::Released, Instant::now() + PATIENCE)?;
        let released = start.elapsed();
        engine.wait(&[1], Until::Settled, Instant::now() + PATIENCE)?;
        let settled = start.elapsed();
        figures.push(figure(format!("{threads} threads: a job is submitted in"), submitted.as_secs_f64() * 1e6, "us"));
        figures.push(gb_per_s(format!("{threads} threads: a store is released"), extent.bytes, released));
        figures.push(gb_per_s(format!("{threads} threads: a store is settled"), extent.bytes, settled));
    }
    Ok(figures)
}

fn wait_registered(engine: &CudaCopyEngine) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let report = engine.report();
        if report.registered_bytes == report.pool_bytes || report.trouble.is_some() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::new(ErrorKind::Timeout, "the pool's memory is not registered"));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// How the tensors of row 5 lie.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// A tensor for each layer.
    Layers,
    /// All layers of a block side by side.
    Blocks,
}

/// Row 5: the engine's order of calls under random schedules, with every byte checked: a model's stream writes blocks,
/// they are stored behind it, flushed, overwritten, zeroed, and loaded into. Returns the number of bytes checked.
pub fn schedules(driver: &Arc<dyn Driver>, ordinal: u32, layout: Layout, extent: &Extent) -> Result<u64> {
    let model = Model::new(driver.clone(), ordinal, layout)?;
    let engine = CudaCopyEngine::new(driver.clone(), model.tensors()?, CudaOptions::new(ordinal))?;
    let memory = Memory::anonymous((SLOTS * BLOCK) as usize)?;
    memory.write(0, &vec![0x11; memory.len()]);
    let pool = engine.attach_pool(memory.clone())?;
    engine.populated(pool, memory.len() as u64);
    let mut random = Random(extent.seed);
    let mut slots: Vec<Option<u64>> = vec![None; SLOTS as usize];
    let mut checked = 0;
    for schedule in 0..extent.schedules {
        let pairs = |random: &mut Random, slots: Vec<u64>| -> Vec<(u32, u64)> {
            let count = 1 + random.next() as usize % 6;
            random.permutation(ROWS).into_iter().zip(slots).take(count).collect()
        };
        let job = |id: u64, direction: Direction, pairs: &[(u32, u64)]| {
            let item = |(at, (_, slot)): (usize, &(u32, u64))| Item {
                offset: slot * BLOCK,
                group: 0,
                blocks: at as u32..at as u32 + 1,
                beside: [0; 2],
            };
            let (items, after) = (pairs.iter().enumerate().map(item).collect(), After::Stream(model.stream.0));
            let block_ids = pairs.iter().map(|(block, _)| *block).collect();
            Job { id, direction, pool, after, items, block_ids, is_summed: true, guard: None }
        };
        let order = random.permutation(SLOTS as u32).into_iter().map(u64::from).collect();
        let stored = pairs(&mut random, order);
        for (block, slot) in &stored {
            let content = random.next();
            model.compute(*block, content)?;
            slots[*slot as usize] = Some(content);
        }
        engine.submit(job(2 * schedule, Direction::Store, &stored))?;
        if random.next().is_multiple_of(2) {
            engine.wait(&[2 * schedule], Until::Released, Instant::now() + PATIENCE)?;
            stored.iter().try_for_each(|(block, _)| model.compute(*block, 0))?;
        }
        engine.wait(&[2 * schedule], Until::Settled, Instant::now() + PATIENCE)?;
        for ((_, slot), outcome) in stored.iter().zip(&engine.poll()[0].outcomes) {
            let expected = content(slots[*slot as usize].unwrap_or(0));
            let is_equal = memory.span(slot * BLOCK, BLOCK).bytes() == expected;
            let is_right = is_equal && *outcome == Outcome::Stored { checksum: checksum(&expected) };
            is_right.then_some(()).ok_or_else(|| wrong("a store").with("schedule", schedule))?;
        }
        let filled: Vec<u64> = (0..SLOTS).filter(|slot| slots[*slot as usize].is_some()).collect();
        let loaded = pairs(&mut random, filled);
        loaded.iter().try_for_each(|(block, _)| model.compute(*block, 0))?;
        engine.submit(job(2 * schedule + 1, Direction::Load, &loaded))?;
        engine.wait(&[2 * schedule + 1], Until::Settled, Instant::now() + PATIENCE)?;
        let is_whole = engine.poll()[0].outcomes.iter().all(|outcome| *outcome == Outcome::Loaded);
        for (block, slot) in &loaded {
            let is_equal = model.read(*block)? == content(slots[*slot as usize].unwrap_or(0));
            (is_whole && is_equal).then_some(()).ok_or_else(|| wrong("a load").with("schedule", schedule))?;
        }
        checked += (stored.len() + loaded.len()) as u64 * BLOCK;
    }
    Ok(checked)
}

const ROWS: u32 = 64;
const SLOTS: u64 = 96;
const LAYERS: u64 = 8;
const PAGE: u64 = 16 << 10;
const BLOCK: u64 = LAYERS * PAGE;

/// The bytes that stand for this content; 0 is zeros.
fn content(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..BLOCK / 8).flat_map(|_| if seed == 0 { [0; 8] } else { random.next().to_le_bytes() }).collect()
}

/// Tensors on a device, and a stream on which they are written.
struct Model {
    context: Arc<Context>,
    stream: StreamHandle,
    lane: Lane,
    device: u64,
    layout: Layout,
    /// What was sent and may still be read, and a place for what is read back.
    sources: std::cell::RefCell<Vec<Memory>>,
    back: Memory,
}

impl Model {
    fn new(driver: Arc<dyn Driver>, ordinal: u32, layout: Layout) -> Result<Model> {
        let context = Arc::new(Context::retain(driver, ordinal, START_PATIENCE)?);
        context.adopt()?;
        let cannot = |status| context.error("cannot make a model to measure with", status);
        let stream = context.driver().create_stream(0).map_err(cannot)?;
        let device = context.driver().alloc_device(u64::from(ROWS) * BLOCK).map_err(cannot)?;
        let back = context.driver().alloc_host(BLOCK).map_err(cannot)?;
        let lane = Lane::new(context.clone(), Direction::Store, 512 << 10)?;
        Ok(Model { context, stream, lane, device, layout, sources: Default::default(), back })
    }

    fn tensors(&self) -> Result<Tensors> {
        let (count, page, stride) = match self.layout {
            Layout::Layers => (LAYERS, PAGE, PAGE),
            Layout::Blocks => (1, BLOCK, BLOCK),
        };
        let tensor = |at: u64| Tensor {
            place: Place::Device {
                ordinal: self.context.ordinal(),
                base: self.device + at * u64::from(ROWS) * stride,
                bytes: u64::from(ROWS) * stride,
            },
            offset: 0,
            rows: ROWS,
            row_stride_bytes: stride,
        };
        let refs = (0..count as usize).map(|tensor| PageRef { tensor, page_bytes: page }).collect();
        Tensors::new((0..count).map(tensor).collect(), vec![refs])
    }

    /// The pieces of a block between the device and `host`.
    fn ops(&self, block: u32, host: &Memory) -> Vec<Op> {
        let block = u64::from(block);
        let piece = |(device, at, bytes)| Op::new(self.device + device, host.address() + at, bytes);
        match self.layout {
            Layout::Layers => {
                let page = |layer| ((layer * u64::from(ROWS) + block) * PAGE, layer * PAGE, PAGE);
                (0..LAYERS).map(page).map(piece).collect()
            }
            Layout::Blocks => vec![piece((block * BLOCK, 0, BLOCK))],
        }
    }

    /// Queues the writing of a block on the model's stream.
    fn compute(&self, block: u32, of: u64) -> Result<()> {
        let cannot = |status| self.context.error("the model cannot write", status);
        let source = self.context.driver().alloc_host(BLOCK).map_err(cannot)?;
        source.write(0, &content(of));
        let ops = self.ops(block, &source);
        self.sources.borrow_mut().push(source);
        singles(self.context.driver(), Direction::Load, &ops, self.stream).map_err(cannot)
    }

    /// What a block holds once the stream is idle, when all sources can go.
    fn read(&self, block: u32) -> Result<Vec<u8>> {
        self.lane.follow(After::Stream(self.stream.0))?;
        self.lane.queue(&[Method::Loop], &self.ops(block, &self.back))?;
        self.lane.finish(self.lane.mark())?;
        for source in self.sources.borrow_mut().drain(..) {
            let _ = self.context.driver().free_host(&source);
        }
        Ok(self.back.span(0, BLOCK).bytes().to_vec())
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // Whoever fails in the middle may leave work on the stream.
        let _ = self.read(0);
        let _ = driver.destroy_stream(self.stream);
        let _ = driver.free_host(&self.back);
        let _ = driver.free_device(self.device);
    }
}

/// Row 6, the process that is killed: stores into the file without end, which it holds locked; calls `begun` once it
/// does.
pub fn store_for_ever(driver: Arc<dyn Driver>, ordinal: u32, file: &File, begun: impl FnOnce()) -> Result<()> {
    let bytes =
        file.metadata().map_err(|error| Error::new(ErrorKind::Io, "cannot measure a file").source(error))?.len();
    let bench = Bench::new(driver.clone(), ordinal, 2 * bytes)?;
    // Two halves that differ, so that each store changes every byte.
    Random(1).fill(&bench.sent);
    let whole = Op::new(bench.device, bench.sent.address(), 2 * bytes);
    bench.pass(Direction::Load, Method::Loop, &[whole])?;
    let block = 64 << 10;
    let rows = (2 * bytes / block) as u32;
    let place = Place::Device { ordinal, base: bench.device, bytes: 2 * bytes };
    let tensor = Tensor { place, offset: 0, rows, row_stride_bytes: block };
    let tensors = Tensors::new(vec![tensor], vec![vec![PageRef { tensor: 0, page_bytes: block }]])?;
    let engine = CudaCopyEngine::new(driver, tensors, CudaOptions::new(ordinal))?;
    let pool = engine.attach_pool(Memory::shared(file, bytes as usize)?)?;
    engine.populated(pool, bytes);
    wait_registered(&engine)?;
    begun();
    for id in 0.. {
        let half = rows / 2;
        let item = |at: u32| Item { offset: u64::from(at) * block, group: 0, blocks: at..at + 1, beside: [0; 2] };
        let items = (0..half).map(item).collect();
        let block_ids = (0..half).map(|at| at + (id % 2) as u32 * half).collect();
        let (direction, after) = (Direction::Store, After::Now);
        engine.submit(Job { id, direction, pool, after, items, block_ids, is_summed: true, guard: None })?;
        // Several in flight, so that a kill finds the device at work.
        if id >= 4 {
            engine.wait(&[id - 4], Until::Settled, Instant::now() + PATIENCE)?;
            engine.poll();
        }
    }
    Ok(())
}

/// Row 6, the process that watches: whether a byte of the file changes in this time.
pub fn changes_within(file: &File, bytes: u64, time: Duration) -> Result<bool> {
    let memory = Memory::shared(file, bytes as usize)?;
    let sum = || {
        let mut sum = Checksum::new();
        copy::sum_up(Level::best(), &mut sum, memory.span(0, bytes));
        sum.finish()
    };
    let (first, deadline) = (sum(), Instant::now() + time);
    while Instant::now() < deadline {
        if sum() != first {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Memory of `bytes` with content, on huge pages where the kernel grants them.
pub fn populated(bytes: u64, seed: u64) -> Result<Memory> {
    let memory = Memory::anonymous(bytes as usize)?;
    Random(seed).fill(&memory);
    Ok(memory)
}

fn same(one: &Memory, other: &Memory, what: &str) -> Result<()> {
    let bytes = |memory: &Memory| checksum(memory.span(0, memory.len() as u64).bytes());
    if bytes(one) == bytes(other) { Ok(()) } else { Err(wrong(what)) }
}
