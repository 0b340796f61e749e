//! What has to be measured on a GPU, for `bench/gpu.sh`: the device and its peaks, registration, the methods by size,
//! the checksum beside stores, the engine's order of calls with every byte checked, and kills in the middle of stores.
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
use super::register::Pool;
use crate::bench::{Random, cpu_time};
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
    /// Of a copy.
    pub sizes: Vec<u64>,
    /// Copies of a call.
    pub counts: Vec<usize>,
    pub repeats: usize,
    /// Of the engine's order of calls.
    pub schedules: u64,
    pub seed: u64,
}

impl Extent {
    /// For a GPU: about two minutes.
    pub fn whole(seed: u64) -> Extent {
        let sizes = (12..=24).step_by(2).map(|power| 1 << power).collect();
        Extent { bytes: 512 << 20, sizes, counts: vec![16, 256, 4096], repeats: 5, schedules: 400, seed }
    }

    /// For a rehearsal on the fake driver: seconds.
    pub fn small(seed: u64) -> Extent {
        Extent { bytes: 4 << 20, sizes: vec![4096, 65536], counts: vec![16, 64], repeats: 1, schedules: 8, seed }
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
    fn peaks(&self, extent: &Extent) -> Result<[f64; 3]> {
        let (bytes, half) = (extent.bytes, extent.bytes / 2);
        let op = |at: u64, host: &Memory, bytes| vec![Op::new(self.device + at, host.address(), bytes)];
        let (load, store) = (op(0, &self.sent, bytes), op(0, &self.back, bytes));
        // One that warms up, and arrives before it goes back.
        self.at_once(Method::Loop, &load, &[])?;
        self.at_once(Method::Loop, &[], &store)?;
        same(&self.sent, &self.back, "a peak")?;
        let both = (op(0, &self.sent, half), op(half, &self.back, half));
        let speed = |loads: &[Op], stores: &[Op]| -> Result<f64> {
            let passes = (0..extent.repeats).map(|_| self.at_once(Method::Loop, loads, stores));
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

    /// Copies as a method takes them.
    fn shape(&self, method: Method, host: &Memory, size: u64, count: usize, random: &mut Random) -> Vec<Op> {
        if method == Method::Pitched {
            let places = (0..count as u64).map(|at| pitched::place(at) * size);
            return places.map(|at| Op::new(self.device + at, host.address() + at, size)).collect();
        }
        self.shuffled(host, size, count, random)
    }

    /// Loads into one half of the device, and stores from the other one; none if it has no room for both.
    fn halves(&self, method: Method, size: u64, count: usize, random: &mut Random) -> [Vec<Op>; 2] {
        let bytes = self.sent.len() as u64;
        if 2 * size * count as u64 > bytes {
            return [Vec::new(), Vec::new()];
        }
        let half = |at: u64| self.device + at % (bytes / 2 / size * size);
        let loads = self.shape(method, &self.sent, size, count, random);
        let loads: Vec<_> = match method {
            Method::Pitched => loads,
            _ => loads.into_iter().map(|op| Op { device: half(op.device - self.device), ..op }).collect(),
        };
        let stores = loads.iter().map(|op| self.mirrored(&Op { device: op.device + bytes / 2, ..*op })).collect();
        [loads, stores]
    }

    /// The same copy for what comes back.
    fn mirrored(&self, op: &Op) -> Op {
        Op { host: op.host - self.sent.address() + self.back.address(), ..*op }
    }

    /// Copies of `size` from shuffled places of `host` to shuffled places of the device.
    fn shuffled(&self, host: &Memory, size: u64, count: usize, random: &mut Random) -> Vec<Op> {
        let room = (host.len() as u64 / size) as u32;
        let (there, here) = (random.permutation(room), random.permutation(room));
        let at = |base: u64, place: u32| base + u64::from(place) * size;
        let pairs = there.into_iter().zip(here).take(count);
        pairs.map(|(d, h)| Op::new(at(self.device, d), at(host.address(), h), size)).collect()
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
    figures.extend(names.into_iter().zip(bench.peaks(extent)?).map(|(what, peak)| figure(what, peak, "GB/s")));
    Ok(figures)
}

/// Row 2: how long the driver takes to register memory that is populated, 1 GiB at a time, and to let it go.
pub fn registration(driver: Arc<dyn Driver>, ordinal: u32, what: &str, memory: Memory) -> Result<Vec<Figure>> {
    let context = Arc::new(Context::retain(driver, ordinal, START_PATIENCE)?);
    context.adopt()?;
    let bytes = memory.len() as u64;
    let pool = Pool::new(memory, context.clone(), super::register::REGISTRATION_BYTES);
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

/// Row 3: each method by size, number and direction, and both directions at once: the speed, its share of this run's
/// peak of pinned memory, and the processor time of this process. Shuffled copies, or evenly spaced rows for the method
/// that copies these. Every shape is checked there and back before it is timed. The kernel loads only, so what it has
/// loaded comes back by another method.
pub fn methods(driver: Arc<dyn Driver>, ordinal: u32, extent: &Extent, mut tell: impl FnMut(Figure)) -> Result<()> {
    let mut bench = Bench::new(driver, ordinal, extent.bytes)?;
    let [_, loads] = &mut bench.lanes;
    if let Err(error) = loads.load_kernel(MULTIPROCESSORS) {
        tell(figure(format!("no kernel: {}", error.told()), 0.0, ""));
    }
    let mut random = Random(extent.seed);
    random.fill(&bench.sent);
    let peaks = bench.peaks(extent)?;
    for method in Method::ALL.into_iter().filter(|method| bench.lanes[Direction::Load as usize].has(*method)) {
        for (size, count) in extent.sizes.iter().flat_map(|size| extent.counts.iter().map(move |count| (*size, *count)))
        {
            if size * count as u64 > extent.bytes {
                continue;
            }
            let there = bench.shape(method, &bench.sent, size, count, &mut random);
            let back: Vec<_> = there.iter().map(|op| bench.mirrored(op)).collect();
            bench.check(method, &there, &back)?;
            let [half_there, half_back] = bench.halves(method, size, count, &mut random);
            // Two different halves of the device, so that neither way reads what the other writes.
            let ways =
                [("load", &there, &Vec::new()), ("store", &Vec::new(), &back), ("both", &half_there, &half_back)];
            for ((way, loads, stores), peak) in ways.into_iter().zip(peaks) {
                let bytes = loads.iter().chain(stores).map(|op| op.bytes).sum::<u64>();
                if bytes == 0 || !stores.is_empty() && !method.copies(Direction::Store) {
                    continue;
                }
                let what = format!("{way}, {}, {count} x {size} B", method.name());
                let (begun, repeats) = (cpu_time(), extent.repeats as u64);
                let passes = (0..repeats).map(|_| bench.at_once(method, loads, stores)).collect::<Result<_>>()?;
                let cpu = cpu_time() - begun;
                let speed = gb_per_s(what.clone(), bytes, median(passes));
                let share = speed.value / peak;
                tell(speed);
                tell(figure(format!("of the peak: {what}"), share, "ratio"));
                let per_gb = cpu.as_secs_f64() / ((bytes * repeats) as f64 / 1e9);
                tell(figure(format!("processor: {what}"), per_gb, "s/GB"));
            }
        }
    }
    Ok(())
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

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, "bytes came back changed").with("from", what)
}

fn median(mut passes: Vec<Duration>) -> Duration {
    passes.sort_unstable();
    passes[passes.len() / 2]
}
