//! Claims about the device engine as a whole, on the fake driver. What is copied is compared byte for byte with what
//! the model wrote. Held streams and gates make the order certain, never sleeps.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use forebay_core::ErrorKind;
use forebay_core::checksum::checksum;
use forebay_numa::Kernel;

use super::bench as rows;
use super::driver::{CaptureMode, StreamHandle};
use super::fake::{Fake, Fault};
use super::register::REGISTRATION_BYTES;
use super::*;
use crate::bench::Random;
use crate::cuda::driver::Status;
use crate::*;

const PATIENCE: Duration = Duration::from_secs(30);
const ROWS: u32 = 16;
/// Of the two tensors: a page and the row that it lies in.
const PAGES: [(u64, u64); 2] = [(3000, 4096), (1000, 1000)];
/// The same in words of 16 bytes, which the kernel takes.
const WORDS: [(u64, u64); 2] = [(3008, 4096), (992, 992)];
const BLOCK: u64 = 4000;
const SLOTS: u64 = 24;
/// Small, so that slots cross the borders.
const CHUNK: u64 = 16 << 10;

/// A model's tensors on device 0 with its stream, and a pool of 24 slots of 4,096 bytes.
struct Rig {
    engine: CudaCopyEngine,
    device: Device,
    memory: Memory,
    pool: PoolId,
}

/// The device without an engine.
#[derive(Clone)]
struct Device {
    fake: Arc<Fake>,
    ordinal: u32,
    pages: [(u64, u64); 2],
    tensors: [Memory; 2],
    compute: StreamHandle,
}

impl Device {
    fn new(seed: u64) -> Device {
        Device::with(seed, PAGES)
    }

    fn with(seed: u64, pages: [(u64, u64); 2]) -> Device {
        println!("seed {seed}");
        Device::of(Arc::new(Fake::new(seed)), 0, pages)
    }

    fn of(fake: Arc<Fake>, ordinal: u32, pages: [(u64, u64); 2]) -> Device {
        // The test's thread is the engine's, which has a context of its own.
        fake.push_current(fake.context(ordinal)).unwrap();
        let compute = fake.create_stream(0).unwrap();
        let tensor = |(_, stride)| fake.device_memory(fake.alloc_device(stride * u64::from(ROWS)).unwrap());
        let tensors = pages.map(tensor);
        Device { fake, ordinal, pages, tensors, compute }
    }

    fn tensors(&self, ordinal: u32) -> Tensors {
        let tensor = |(memory, (_, row_stride_bytes)): (&Memory, (u64, u64))| Tensor {
            place: Place::Device { ordinal, base: memory.address(), bytes: memory.len() as u64 },
            offset: 0,
            rows: ROWS,
            row_stride_bytes,
        };
        let refs = [0, 1].map(|tensor| PageRef { tensor, page_bytes: self.pages[tensor].0 }).to_vec();
        Tensors::new(self.tensors.iter().zip(self.pages).map(tensor).collect(), vec![refs]).unwrap()
    }

    fn engine(&self, options: CudaOptions) -> forebay_core::Result<CudaCopyEngine> {
        let options = CudaOptions { ordinal: self.ordinal, ..options };
        CudaCopyEngine::new(self.fake.clone(), self.tensors(self.ordinal), options)
    }

    /// What block `block` holds.
    fn block(&self, block: u32) -> Vec<u8> {
        let page = |(memory, (page, stride)): (&Memory, (u64, u64))| {
            memory.span(u64::from(block) * stride, page).bytes().to_vec()
        };
        self.tensors.iter().zip(self.pages).map(page).collect::<Vec<_>>().concat()
    }

    fn write(&self, block: u32, content: &[u8]) {
        let (first, second) = content.split_at(self.pages[0].0 as usize);
        self.tensors[0].write(u64::from(block) * self.pages[0].1, first);
        self.tensors[1].write(u64::from(block) * self.pages[1].1, second);
    }

    /// Queues what the model does: it writes a block.
    fn compute(&self, block: u32, content: Vec<u8>) {
        let device = self.clone();
        self.fake.task(self.compute, move || device.write(block, &content));
    }
}

fn options() -> CudaOptions {
    let patience = Duration::from_secs(30);
    CudaOptions {
        threads: 2,
        queue_jobs: 64,
        staging_bytes: 512 << 10,
        registration_bytes: CHUNK,
        // Nothing is measured beside what a test orders.
        method: Wish::Batch,
        patience,
        ..CudaOptions::new(0)
    }
}

fn by_kernel() -> CudaOptions {
    CudaOptions { method: Wish::Kernel, multiprocessors: 2, ..options() }
}

impl Rig {
    fn new(seed: u64, options: CudaOptions) -> Rig {
        Rig::on(Device::new(seed), options)
    }

    fn on(device: Device, options: CudaOptions) -> Rig {
        let engine = device.engine(options).unwrap();
        let memory = Memory::anonymous((SLOTS << 12) as usize).unwrap();
        memory.write(0, &vec![0x11; memory.len()]);
        let pool = engine.attach_pool(memory.clone()).unwrap();
        engine.populated(pool, memory.len() as u64);
        Rig { engine, device, memory, pool }
    }

    fn registered(seed: u64) -> Rig {
        Rig::new(seed, options()).wait()
    }

    /// Loads by the kernel.
    fn kernel(seed: u64) -> Rig {
        Rig::on(Device::with(seed, WORDS), by_kernel()).wait()
    }

    fn wait(self) -> Rig {
        let bytes = self.memory.len() as u64;
        until("the pool is registered", || self.engine.report().registered_bytes == bytes);
        self
    }

    /// Blocks to or from slots, after what the model has queued.
    fn job(&self, id: JobId, direction: Direction, pairs: &[(u32, u64)]) -> Job {
        let item = |(at, (_, slot)): (usize, &(u32, u64))| Item {
            offset: slot << 12,
            group: 0,
            blocks: at as u32..at as u32 + 1,
            beside: [0; 2],
        };
        let items = pairs.iter().enumerate().map(item).collect();
        let block_ids = pairs.iter().map(|(block, _)| *block).collect();
        let after = After::Stream(self.device.compute.0);
        Job { id, direction, pool: self.pool, after, items, block_ids, is_summed: true, guard: None }
    }

    fn slot(&self, slot: u64) -> Vec<u8> {
        self.memory.span(slot << 12, BLOCK).bytes().to_vec()
    }

    fn finish(&self, id: JobId) -> Completion {
        self.engine.wait(&[id], Until::Settled, Instant::now() + PATIENCE).unwrap();
        let mut completions = self.engine.poll();
        let at = completions.iter().position(|completion| completion.job_id == id).expect("the job is published");
        completions.remove(at)
    }

    fn is_open(&self, id: JobId, until: Until) -> bool {
        self.engine.wait(&[id], until, Instant::now()).is_err()
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "it never came that {what}");
        thread::yield_now();
    }
}

fn content(random: &mut Random) -> Vec<u8> {
    (0..BLOCK / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// A guard made of two closures.
struct Probe<B, A>(B, A);

impl<B: Fn(usize) -> bool + Send + Sync, A: Fn(usize, Option<u64>) -> bool + Send + Sync> SlotGuard for Probe<B, A> {
    fn before(&self, item: usize) -> bool {
        (self.0)(item)
    }

    fn after(&self, item: usize, checksum: Option<u64>) -> bool {
        (self.1)(item, checksum)
    }
}

// --- order ----------------------------------------------------------------------------------------------------

/// The engine's order of calls, under which blocks are reused as soon as a flush allows it.
#[test]
fn under_any_schedule_slots_and_blocks_hold_what_the_model_wrote() {
    for seed in 0..40 {
        any_schedule(&Rig::new(seed, options()), seed, 12);
    }
}

fn any_schedule(rig: &Rig, seed: u64, steps: u64) {
    let mut random = Random(seed ^ 0x5eed);
    let mut slots: Vec<Option<Vec<u8>>> = vec![None; SLOTS as usize];
    for step in 0..steps {
        // The model fills some blocks, and they are stored behind it.
        let count = 1 + random.next() % 4;
        let blocks = random.permutation(ROWS);
        let free = random.permutation(SLOTS as u32);
        let pairs: Vec<_> =
            blocks.iter().zip(&free).take(count as usize).map(|(block, slot)| (*block, u64::from(*slot))).collect();
        for (block, slot) in &pairs {
            let content = content(&mut random);
            rig.device.compute(*block, content.clone());
            slots[*slot as usize] = Some(content);
        }
        rig.engine.submit(rig.job(2 * step, Direction::Store, &pairs)).unwrap();
        let turns = random.next() % 30;
        (0..turns).take_while(|_| rig.device.fake.turn()).for_each(drop);
        if random.next().is_multiple_of(2) {
            // A flush: afterwards the blocks are somebody else's.
            rig.engine.wait(&[2 * step], Until::Released, Instant::now() + PATIENCE).unwrap();
            pairs.iter().for_each(|(block, _)| rig.device.write(*block, &[0x66; BLOCK as usize]));
        }
        let stored = rig.finish(2 * step);
        for ((_, slot), outcome) in pairs.iter().zip(&stored.outcomes) {
            let expected = slots[*slot as usize].as_ref().unwrap();
            assert!(rig.slot(*slot) == *expected, "slot {slot} of step {step} differs");
            assert_eq!(*outcome, Outcome::Stored { checksum: checksum(expected) });
        }
        // The next step zeroes blocks, into which a load follows.
        let filled: Vec<u64> = (0..SLOTS).filter(|slot| slots[*slot as usize].is_some()).collect();
        let blocks = random.permutation(ROWS);
        let pairs: Vec<_> = blocks.into_iter().zip(filled).take(5).collect();
        pairs.iter().for_each(|(block, _)| rig.device.compute(*block, vec![0; BLOCK as usize]));
        rig.engine.submit(rig.job(2 * step + 1, Direction::Load, &pairs)).unwrap();
        let loaded = rig.finish(2 * step + 1);
        assert_eq!(loaded.outcomes, vec![Outcome::Loaded; pairs.len()]);
        for (block, slot) in pairs {
            let is_equal = rig.device.block(block) == *slots[slot as usize].as_ref().unwrap();
            assert!(is_equal, "block {block} of step {step} differs");
        }
    }
    assert_eq!(rig.device.fake.spoiled_captures(), 0);
}

#[test]
fn a_store_waits_for_the_model_and_a_load_of_other_blocks_does_not_wait_for_the_store() {
    let rig = Rig::registered(1);
    let mut random = Random(1);
    let (written, lies) = (content(&mut random), content(&mut random));
    rig.memory.write(5 << 12, &lies);
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(3, written.clone());
    rig.engine.submit(rig.job(1, Direction::Store, &[(3, 4)])).unwrap();
    let free = Job { after: After::Now, ..rig.job(2, Direction::Load, &[(7, 5)]) };
    rig.engine.submit(free).unwrap();
    assert_eq!(rig.finish(2).outcomes, [Outcome::Loaded]);
    assert!(rig.device.block(7) == lies);
    assert!(rig.is_open(1, Until::Released), "the store did not wait for the model");
    rig.device.fake.hold(rig.device.compute, false);
    assert_eq!(rig.finish(1).outcomes, [Outcome::Stored { checksum: checksum(&written) }]);
    assert!(rig.slot(4) == written);
}

#[test]
fn a_flush_ends_when_the_tensors_are_released_and_does_not_wait_for_the_guard() {
    let rig = Rig::registered(2);
    let (gate, opened) = (Arc::new(Mutex::new(false)), Arc::new(Condvar::new()));
    let (at_gate, open) = (gate.clone(), opened.clone());
    let after = move |_: usize, _: Option<u64>| {
        let is_open = open.wait_timeout_while(at_gate.lock().unwrap(), PATIENCE, |is_open| !*is_open).unwrap();
        *is_open.0
    };
    let guard: Option<Box<dyn SlotGuard>> = Some(Box::new(Probe(|_| true, after)));
    rig.engine.submit(Job { guard, ..rig.job(1, Direction::Store, &[(0, 0)]) }).unwrap();
    rig.engine.wait(&[1], Until::Released, Instant::now() + PATIENCE).unwrap();
    assert!(rig.is_open(1, Until::Settled), "nobody waited for the guard");
    *gate.lock().unwrap() = true;
    opened.notify_all();
    assert!(matches!(rig.finish(1).outcomes[0], Outcome::Stored { .. }));
}

#[test]
fn stores_are_published_in_their_order_though_the_second_has_less_to_do() {
    let rig = Rig::registered(3);
    let all: Vec<_> = (0..ROWS).map(|block| (block, u64::from(block))).collect();
    rig.engine.submit(rig.job(1, Direction::Store, &all)).unwrap();
    rig.engine.submit(rig.job(2, Direction::Store, &[(1, 20)])).unwrap();
    rig.engine.submit(rig.job(3, Direction::Store, &[])).unwrap();
    rig.engine.wait(&[1, 2, 3], Until::Settled, Instant::now() + PATIENCE).unwrap();
    let order: Vec<_> = rig.engine.poll().iter().map(|completion| completion.job_id).collect();
    assert_eq!(order, [1, 2, 3]);
}

#[test]
fn a_capture_of_the_engines_stream_refuses_the_job_and_one_elsewhere_is_not_spoiled() {
    let rig = Rig::new(4, options());
    let other = rig.device.fake.create_stream(0).unwrap();
    rig.device.fake.capture(other, true);
    rig.engine.submit(rig.job(1, Direction::Store, &[(0, 0)])).unwrap();
    assert!(matches!(rig.finish(1).outcomes[0], Outcome::Stored { .. }));
    let bytes = rig.memory.len() as u64;
    until("the pool is registered during the capture", || rig.engine.report().registered_bytes == bytes);
    rig.device.fake.capture(rig.device.compute, true);
    assert_eq!(rig.engine.submit(rig.job(2, Direction::Load, &[(0, 0)])).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(rig.device.fake.spoiled_captures(), 0);
    let mode = rig.device.fake.exchange_capture_mode(CaptureMode::Global).unwrap();
    assert_eq!(mode, CaptureMode::Global, "the engine's thread was left in another mode");
    rig.device.fake.capture(rig.device.compute, false);
    rig.device.fake.capture(other, false);
    rig.engine.submit(rig.job(2, Direction::Load, &[(0, 0)])).unwrap();
    assert_eq!(rig.finish(2).outcomes, [Outcome::Loaded]);
}

// --- guards ---------------------------------------------------------------------------------------------------

#[test]
fn a_slot_that_the_guard_refuses_is_not_touched_and_the_others_are_stored() {
    for seed in [5, 6] {
        let rig = Rig::registered(seed);
        let guard = Probe(|item| item != 1, |item, _| item != 2);
        let pairs = [(0, 0), (1, 1), (2, 2), (3, 3)];
        rig.engine.submit(Job { guard: Some(Box::new(guard)), ..rig.job(1, Direction::Store, &pairs) }).unwrap();
        let completion = rig.finish(1);
        let stored = |block: u32| Outcome::Stored { checksum: checksum(&rig.device.block(block)) };
        assert_eq!(completion.outcomes, [stored(0), Outcome::Failed, Outcome::Failed, stored(3)]);
        assert_eq!(completion.bytes, 2 * BLOCK);
        assert!(rig.slot(1).iter().all(|byte| *byte == 0x11), "a refused slot was written");
    }
}

#[test]
fn a_load_is_summed_with_what_lies_beside_it() {
    let rig = Rig::registered(7);
    let mut random = Random(7);
    rig.memory.write(0, &[content(&mut random), content(&mut random), content(&mut random)].concat());
    let sums = Arc::new(Mutex::new(Vec::new()));
    let seen = sums.clone();
    let after = move |_: usize, sum: Option<u64>| {
        seen.lock().unwrap().push(sum);
        true
    };
    let guard = Probe(|_| true, after);
    let item = Item { offset: BLOCK, group: 0, blocks: 0..1, beside: [BLOCK, BLOCK] };
    let job = Job { items: vec![item], guard: Some(Box::new(guard)), ..rig.job(1, Direction::Load, &[(4, 0)]) };
    rig.engine.submit(job).unwrap();
    assert_eq!(rig.finish(1).outcomes, [Outcome::Loaded]);
    assert_eq!(*sums.lock().unwrap(), [Some(checksum(rig.memory.span(0, 3 * BLOCK).bytes()))]);
    assert!(rig.device.block(4) == rig.memory.span(BLOCK, BLOCK).bytes());
}

// --- registration and staging ---------------------------------------------------------------------------------

#[test]
fn memory_that_is_not_populated_is_staged_and_left_unregistered() {
    let rig = Rig::registered(8);
    let empty = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    let pool = rig.engine.attach_pool(empty.clone()).unwrap();
    rig.device.fake.turn();
    rig.engine.submit(Job { pool, ..rig.job(1, Direction::Store, &[(3, 9)]) }).unwrap();
    assert!(matches!(rig.finish(1).outcomes[0], Outcome::Stored { .. }));
    assert!(empty.span(9 << 12, BLOCK).bytes() == rig.device.block(3));
    let report = rig.engine.report();
    assert_eq!((report.staged_bytes, report.copied_bytes), (BLOCK, BLOCK));
    let (registered, whole) = (|| rig.engine.report().registered_bytes, rig.memory.len() as u64);
    assert_eq!(registered(), whole, "only the first pool is registered");
    rig.engine.populated(pool, 3 * CHUNK - 1);
    until("what is populated is registered, by whole chunks", || registered() == whole + 2 * CHUNK);
    rig.engine.populated(pool, CHUNK);
    rig.engine.populated(pool, whole);
    until("all is registered once it is populated", || registered() == 2 * whole);
}

#[test]
fn a_driver_that_registers_nothing_is_served_through_staging_with_one_reason() {
    let device = Device::new(9);
    device.fake.fault(Fault::Registration(600 << 10, Status::OUT_OF_MEMORY));
    let engine = device.engine(CudaOptions { registration_bytes: 1 << 20, ..options() }).unwrap();
    let memory = Memory::anonymous(4 << 20).unwrap();
    memory.write(0, &vec![1; 4 << 20]);
    let pool = engine.attach_pool(memory.clone()).unwrap();
    engine.populated(pool, memory.len() as u64);
    until("a smaller part is taken", || engine.report().registered_bytes == 4 << 20);
    assert!(device.fake.registrations().iter().all(|(_, bytes)| *bytes == 512 << 10));
    assert_eq!(engine.report().trouble, None);
    engine.detach_pool(pool).unwrap();
    until("they are gone with the pool", || device.fake.registrations().is_empty());

    device.fake.fault(Fault::Registration(0, Status::OUT_OF_MEMORY));
    let pool = engine.attach_pool(memory.clone()).unwrap();
    engine.populated(pool, memory.len() as u64);
    until("the refusal is known", || engine.report().trouble.is_some());
    let rig = Rig { engine, device, memory, pool };
    assert_eq!(rig.engine.report().registered_bytes, 0);
    rig.engine.submit(rig.job(1, Direction::Store, &[(3, 9)])).unwrap();
    rig.finish(1);
    assert!(rig.slot(9) == rig.device.block(3));
}

#[test]
fn memory_that_somebody_else_has_registered_in_part_is_staged() {
    let device = Device::new(25);
    let memory = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    memory.write(0, &vec![0x11; memory.len()]);
    // The first page of the third chunk, which holds slots 8 to 11.
    device.fake.register(&memory, 2 * CHUNK, 4096).unwrap();
    let engine = device.engine(options()).unwrap();
    let pool = engine.attach_pool(memory.clone()).unwrap();
    engine.populated(pool, memory.len() as u64);
    until("the refusal is known", || engine.report().trouble.is_some());
    until("the rest is registered", || engine.report().registered_bytes == memory.len() as u64 - CHUNK);
    let rig = Rig { engine, device, memory, pool };
    rig.engine.submit(rig.job(1, Direction::Store, &[(3, 9)])).unwrap();
    rig.finish(1);
    assert!(rig.slot(9) == rig.device.block(3));
    assert_eq!(rig.engine.report().staged_bytes, BLOCK, "a registration that is not ours was relied on");
    assert!(rig.engine.report().trouble.unwrap().contains("another part of this process"));
}

/// A pool of two chunks and a half that has grown to all of `rig`'s memory.
fn grown(seed: u64, options: CudaOptions) -> Rig {
    let device = Device::new(seed);
    let engine = device.engine(options).unwrap();
    let memory = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    memory.write(0, &vec![0x11; memory.len()]);
    let seam = 2 * CHUNK + CHUNK / 2;
    let smaller = engine.attach_pool(memory.start(seam)).unwrap();
    engine.populated(smaller, seam);
    until("the smaller pool is registered", || engine.report().registered_bytes == seam);
    let before = device.fake.registrations();
    let mut rig = Rig { engine, device, memory, pool: smaller };
    // A copy of the smaller pool is under way while it grows.
    rig.engine.submit(rig.job(1, Direction::Store, &[(3, 9)])).unwrap();
    rig.pool = rig.engine.attach_pool(rig.memory.clone()).unwrap();
    rig.engine.detach_pool(smaller).unwrap();
    assert_eq!(rig.device.fake.registrations(), before);
    rig.finish(1);
    assert!(rig.slot(9) == rig.device.block(3));
    assert_eq!((rig.engine.report().registered_bytes, rig.engine.report().staged_bytes), (seam, 0));
    rig.engine.submit(rig.job(2, Direction::Store, &[(4, 1), (5, 9)])).unwrap();
    rig.finish(2);
    assert!(rig.slot(1) == rig.device.block(4) && rig.slot(9) == rig.device.block(5));
    assert_eq!(rig.engine.report().staged_bytes, 0, "what was registered is copied at once");
    rig.engine.submit(rig.job(3, Direction::Store, &[(6, 10)])).unwrap();
    rig.finish(3);
    assert!(rig.slot(10) == rig.device.block(6));
    assert_eq!(rig.engine.report().staged_bytes, BLOCK, "what is new is staged until it is registered");
    assert!(before.iter().all(|registration| rig.device.fake.registrations().contains(registration)));
    rig
}

#[test]
fn a_pool_that_has_grown_keeps_what_is_registered() {
    let rig = grown(26, options());
    let seam = 2 * CHUNK + CHUNK / 2;
    rig.engine.populated(rig.pool, rig.memory.len() as u64);
    let rig = rig.wait();
    let borders: Vec<_> = rig.device.fake.registrations().iter().map(|(address, _)| *address).collect();
    assert!(borders.contains(&(rig.memory.address() + seam)), "another registration begins where the old one ends");
    // A slot on both sides of the seam, and schedules over all slots.
    let across = Item { offset: seam - 2000, group: 0, blocks: 0..1, beside: [0; 2] };
    let (staged, job) = (rig.engine.report().staged_bytes, rig.job(4, Direction::Store, &[(7, 0)]));
    rig.engine.submit(Job { items: vec![across], ..job }).unwrap();
    rig.finish(4);
    assert!(rig.memory.span(seam - 2000, BLOCK).bytes() == rig.device.block(7));
    any_schedule(&rig, 26, 12);
    assert_eq!(rig.engine.report().staged_bytes, staged);
    rig.engine.detach_pool(rig.pool).unwrap();
    until("all registrations end with the pool", || rig.device.fake.registrations().is_empty());
}

#[test]
fn a_pool_that_has_grown_is_registered_in_smaller_parts_where_it_must() {
    let rig = grown(27, options());
    rig.device.fake.fault(Fault::Registration(CHUNK / 4, Status::OUT_OF_MEMORY));
    rig.engine.populated(rig.pool, rig.memory.len() as u64);
    let rig = rig.wait();
    any_schedule(&rig, 27, 12);
}

/// The start of an engine does not wait for a pool of any size: what is attached is registered later.
#[test]
fn half_a_terabyte_is_attached_before_any_of_it_is_registered() {
    let device = Device::new(30);
    let engine = device.engine(CudaOptions { registration_bytes: REGISTRATION_BYTES, ..options() }).unwrap();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let (bytes, populated) = (512 << 30, 3 * REGISTRATION_BYTES);
    file.set_len(bytes).unwrap();
    let memory = Memory::shared(&file, bytes as usize).unwrap();
    let begun = Instant::now();
    let pool = engine.attach_pool(memory.clone()).unwrap();
    println!("attached after {:?}", begun.elapsed());
    assert_eq!((engine.report().registered_bytes, engine.report().pool_bytes), (0, bytes));
    let rig = Rig { engine, device, memory, pool };
    rig.engine.submit(rig.job(1, Direction::Store, &[(3, 9)])).unwrap();
    rig.finish(1);
    assert!(rig.slot(9) == rig.device.block(3));
    rig.engine.populated(pool, populated + 1);
    until("what is populated is registered", || rig.engine.report().registered_bytes == populated);
    assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) < 8192, "the rest stays without memory");
}

#[test]
fn what_was_refused_is_registered_when_the_pool_has_grown() {
    let device = Device::new(29);
    let engine = device.engine(options()).unwrap();
    let memory = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    memory.write(0, &vec![0x11; memory.len()]);
    // The first page of the first chunk is somebody else's for a while.
    device.fake.register(&memory, 0, 4096).unwrap();
    let smaller = engine.attach_pool(memory.start(2 * CHUNK)).unwrap();
    engine.populated(smaller, 2 * CHUNK);
    until("the other chunk is registered", || engine.report().registered_bytes == CHUNK);
    device.fake.unregister(memory.address()).unwrap();
    let pool = engine.attach_pool(memory.clone()).unwrap();
    engine.detach_pool(smaller).unwrap();
    engine.populated(pool, memory.len() as u64);
    let rig = Rig { engine, device, memory, pool }.wait();
    any_schedule(&rig, 29, 12);
    assert_eq!(rig.engine.report().staged_bytes, 0);
}

#[test]
fn what_was_not_registered_yet_when_a_pool_grew_is_registered_then() {
    let rig = Rig::new(28, options());
    let smaller = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    let pool = rig.engine.attach_pool(smaller.start(3 * CHUNK)).unwrap();
    rig.engine.populated(pool, CHUNK);
    let whole = rig.memory.len() as u64;
    until("one chunk is registered", || rig.engine.report().registered_bytes == whole + CHUNK);
    let larger = rig.engine.attach_pool(smaller.start(3 * CHUNK + CHUNK / 2)).unwrap();
    rig.engine.detach_pool(pool).unwrap();
    let largest = rig.engine.attach_pool(smaller.clone()).unwrap();
    rig.engine.detach_pool(larger).unwrap();
    rig.engine.populated(largest, 2 * CHUNK);
    until("a chunk of the first pool is registered", || rig.engine.report().registered_bytes == whole + 2 * CHUNK);
    rig.engine.populated(largest, smaller.len() as u64);
    until("all is registered", || rig.engine.report().registered_bytes == 2 * whole);
    assert!(rig.device.fake.registrations().iter().all(|(_, bytes)| *bytes <= CHUNK));
    let rig = Rig { pool: largest, memory: smaller, ..rig };
    any_schedule(&rig, 28, 12);
}

#[test]
fn an_engine_that_may_not_stage_refuses_what_is_not_registered() {
    let rig = Rig::new(10, CudaOptions { stages: false, ..options() });
    let empty = Memory::anonymous((SLOTS << 12) as usize).unwrap();
    let pool = rig.engine.attach_pool(empty).unwrap();
    let refused = rig.engine.submit(Job { pool, ..rig.job(1, Direction::Store, &[(0, 0)]) }).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    until("the pool is registered", || rig.engine.report().registered_bytes == rig.memory.len() as u64);
    rig.engine.submit(rig.job(1, Direction::Store, &[(0, 0)])).unwrap();
    rig.finish(1);
    assert_eq!(rig.engine.report().staged_bytes, 0);
}

#[test]
fn more_than_both_buffers_hold_goes_through_them_in_turn() {
    let device = Device::new(11);
    let big = device.fake.device_memory(device.fake.alloc_device(4 << 20).unwrap());
    let mut random = Random(11);
    random.fill(&big);
    let place = Place::Device { ordinal: 0, base: big.address(), bytes: 4 << 20 };
    let rows = Tensor { place, offset: 0, rows: 4, row_stride_bytes: 1 << 20 };
    let tensors = Tensors::new(vec![rows], vec![vec![PageRef { tensor: 0, page_bytes: 1 << 20 }]]).unwrap();
    device.fake.fault(Fault::Registration(0, Status::INVALID_VALUE));
    let engine = CudaCopyEngine::new(device.fake.clone(), tensors, options()).unwrap();
    assert!(engine.report().trouble.is_some());
    let memory = Memory::anonymous(4 << 20).unwrap();
    let pool = engine.attach_pool(memory.clone()).unwrap();
    let items = |id, direction| {
        let item = |at: u32| Item { offset: u64::from(at) << 20, group: 0, blocks: at..at + 1, beside: [0; 2] };
        let (items, block_ids) = ((0..4).map(item).collect(), vec![2, 0, 3, 1]);
        Job { id, direction, pool, after: After::Now, items, block_ids, is_summed: true, guard: None }
    };
    let sent = big.span(0, 4 << 20).bytes().to_vec();
    engine.submit(items(1, Direction::Store)).unwrap();
    engine.wait(&[1], Until::Released, Instant::now() + PATIENCE).unwrap();
    big.write(0, &vec![0; 4 << 20]);
    engine.submit(items(2, Direction::Load)).unwrap();
    engine.wait(&[1, 2], Until::Settled, Instant::now() + PATIENCE).unwrap();
    assert!(big.span(0, 4 << 20).bytes() == sent);
    assert!(memory.span(0, 1 << 20).bytes() == &sent[2 << 20..3 << 20]);
    assert_eq!(engine.report().staged_bytes, 8 << 20);
}

// --- the kernel ------------------------------------------------------------------------------------------------

#[test]
fn loads_by_the_kernel_hold_what_the_model_wrote_under_any_schedule() {
    for seed in 100..112 {
        let rig = Rig::kernel(seed);
        assert_eq!(rig.engine.report().methods, ["kernel", "batch", "loop"], "{:?}", rig.engine.report().trouble);
        let tested = rig.device.fake.launches();
        any_schedule(&rig, seed, 6);
        assert_eq!(rig.device.fake.launches() - tested, 6, "each load is one launch, and no store is one");
        assert_eq!(rig.engine.report().staged_bytes, 0);
        let fake = rig.device.fake.clone();
        drop(rig);
        assert_eq!(fake.open(), 3, "two tensors and a stream of the model's are left");
    }
}

#[test]
fn what_is_not_in_words_is_loaded_by_the_next_method() {
    let rig = Rig::on(Device::new(120), by_kernel()).wait();
    let tested = rig.device.fake.launches();
    any_schedule(&rig, 120, 6);
    assert_eq!(rig.device.fake.launches(), tested);
}

/// A table that is written again while the device may still read it would load other blocks.
#[test]
fn loads_beyond_the_tables_of_the_kernel_are_queued_by_the_next_method() {
    let rig = Rig::kernel(121);
    let mut random = Random(121);
    let contents: Vec<_> = (0..ROWS).map(|_| content(&mut random)).collect();
    for (slot, content) in contents.iter().enumerate() {
        rig.memory.write((slot as u64) << 12, content);
    }
    let tested = rig.device.fake.launches();
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(0, vec![0; BLOCK as usize]);
    for block in 0..ROWS {
        rig.engine.submit(rig.job(u64::from(block), Direction::Load, &[(block, u64::from(block))])).unwrap();
    }
    assert_eq!(rig.device.fake.launches() - tested, 8, "so many tables there are");
    rig.device.fake.hold(rig.device.compute, false);
    let jobs: Vec<_> = (0..ROWS).map(u64::from).collect();
    rig.engine.wait(&jobs, Until::Settled, Instant::now() + PATIENCE).unwrap();
    let completions = rig.engine.poll();
    assert_eq!(completions.len(), jobs.len());
    assert!(completions.iter().all(|completion| completion.outcomes == [Outcome::Loaded]));
    assert!((0..ROWS).all(|block| rig.device.block(block) == contents[block as usize]));
    rig.engine.submit(rig.job(99, Direction::Load, &[(3, 5)])).unwrap();
    assert_eq!(rig.finish(99).outcomes, [Outcome::Loaded]);
    assert_eq!(rig.device.fake.launches() - tested, 9, "the tables are free again");
    assert!(rig.device.block(3) == contents[5]);
}

#[test]
fn a_kernel_that_cannot_be_had_or_leaves_bytes_out_is_replaced_by_the_drivers_copies() {
    // Both streams have asked for an attribute before the kernel does.
    let refusals = [("load_module", 1), ("function", 1), ("launch", 1), ("attribute", 3)]
        .map(|(call, nth)| Fault::Call(call, nth, Status::NOT_FOUND));
    for fault in refusals.into_iter().chain([Fault::IdleThread]) {
        let device = Device::with(122, WORDS);
        device.fake.fault(fault);
        let engine = device.engine(by_kernel()).unwrap();
        let report = engine.report();
        assert_eq!(report.methods, ["batch", "loop"], "{fault:?}");
        assert!(report.trouble.is_some(), "{fault:?} was not told");
        drop(engine);
        assert_eq!(device.fake.open(), 3, "{fault:?}");
    }
}

#[test]
fn a_kernel_that_fails_later_is_given_up_and_the_next_load_is_whole() {
    for (call, nth) in [("launch", 1), ("query_event", 1), ("record", 2)] {
        let rig = Rig::kernel(123);
        rig.memory.write(0, &content(&mut Random(123)));
        rig.device.fake.fault(Fault::Call(call, nth, Status(801)));
        rig.engine.submit(rig.job(1, Direction::Load, &[(2, 0)])).unwrap();
        assert_eq!(rig.finish(1).outcomes, [Outcome::Failed], "{call}");
        assert_eq!(rig.engine.report().methods, ["batch", "loop"], "{call}");
        assert!(rig.engine.report().trouble.is_some());
        rig.engine.submit(rig.job(2, Direction::Load, &[(3, 0)])).unwrap();
        assert_eq!(rig.finish(2).outcomes, [Outcome::Loaded]);
        assert!(rig.device.block(3) == rig.slot(0), "{call}");
    }
}

#[test]
fn a_kernel_that_touches_foreign_memory_ends_the_context_and_every_job() {
    let rig = Rig::kernel(124);
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(0, vec![0; BLOCK as usize]);
    rig.engine.submit(rig.job(1, Direction::Load, &[(2, 0)])).unwrap();
    // The tensor goes away under the load, as it must not.
    rig.device.fake.free_device(rig.device.tensors[0].address()).unwrap();
    rig.device.fake.hold(rig.device.compute, false);
    assert_eq!(rig.finish(1).outcomes, [Outcome::Failed]);
    let refused = rig.engine.submit(rig.job(2, Direction::Load, &[(3, 0)])).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
}

// --- faults ---------------------------------------------------------------------------------------------------

#[test]
fn a_driver_without_batches_and_one_whose_batches_are_wrong_are_served_by_single_copies() {
    for (fault, has_trouble) in [(Fault::NoBatch, false), (Fault::Corruption, true)] {
        let device = Device::new(12);
        device.fake.fault(fault);
        let engine = device.engine(options()).unwrap();
        let report = engine.report();
        assert_eq!((report.methods, report.trouble.is_some()), (vec!["loop"], has_trouble), "{fault:?}");
    }
}

#[test]
fn a_device_whose_bytes_arrive_changed_by_every_method_is_refused() {
    let device = Device::new(13);
    device.fake.fault(Fault::NoBatch);
    device.fake.fault(Fault::Call("copy", 100, Status::INVALID_VALUE));
    let refused = device.engine(options()).err().expect("nothing can copy");
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let device = Device::new(13);
    device.fake.fault(Fault::Corruption);
    device.fake.fault(Fault::Call("copy", 1, Status::INVALID_VALUE));
    assert!(device.engine(options()).is_err());
    let tensors = 2 + 1;
    assert_eq!(device.fake.open(), tensors, "a refused engine has left something open");
}

/// Whatever call fails, nothing hangs, nothing is told that is not so, and the next job is served.
#[test]
fn whichever_call_fails_once_a_job_ends_and_the_next_one_is_whole() {
    let calls = ["record", "stream_wait", "is_capturing", "copy_batch", "synchronize", "create_event", "push_current"];
    for (seed, call) in calls.iter().cycle().take(3 * calls.len()).enumerate() {
        let nth = 1 + seed as u64 / calls.len() as u64;
        for staged in [false, true] {
            let rig = if staged {
                let rig = Rig::new(seed as u64, options());
                rig.device.fake.fault(Fault::Registration(0, Status::INVALID_VALUE));
                rig
            } else {
                Rig::registered(seed as u64)
            };
            let mut random = Random(seed as u64);
            rig.device.fake.fault(Fault::Call(call, nth, Status(801)));
            for id in 0..6 {
                let (block, slot, content) = (id as u32, id + 1, content(&mut random));
                rig.device.compute(block, content.clone());
                if rig.engine.submit(rig.job(id, Direction::Store, &[(block, slot)])).is_err() {
                    continue;
                }
                rig.engine.wait(&[id], Until::Released, Instant::now() + PATIENCE).unwrap();
                // Now it is somebody else's; a copy that is still made would store this.
                rig.device.write(block, &[0x77; BLOCK as usize]);
                match rig.finish(id).outcomes[0] {
                    Outcome::Stored { checksum: sum } => {
                        assert_eq!(sum, checksum(&content), "{call} {nth} {staged}");
                        assert!(rig.slot(slot) == content);
                    }
                    outcome => assert!(outcome == Outcome::Failed && id < 5, "{call} {nth} {staged}: {outcome:?}"),
                }
            }
        }
    }
}

#[test]
fn nothing_is_touched_after_a_failed_job_has_ended() {
    let cases = ["record", "copy_batch", "synchronize"].into_iter().flat_map(|call| (1..5).map(move |nth| (call, nth)));
    let mut failures = 0;
    for ((call, nth), staged) in cases.flat_map(|case| [false, true].map(|staged| (case, staged))) {
        for direction in [Direction::Store, Direction::Load] {
            let rig = if staged { Rig::new(nth, options()) } else { Rig::registered(nth) };
            let empty = Memory::anonymous((SLOTS << 12) as usize).unwrap();
            let (memory, pool) = match staged {
                true => (empty.clone(), rig.engine.attach_pool(empty).unwrap()),
                false => (rig.memory.clone(), rig.pool),
            };
            rig.device.fake.fault(Fault::Call(call, nth, Status(801)));
            let pairs: Vec<_> = (0..ROWS).map(|block| (block, u64::from(block))).collect();
            let job = Job { pool, ..rig.job(1, direction, &pairs) };
            if rig.engine.submit(job).is_err() || rig.finish(1).outcomes[0] != Outcome::Failed {
                continue;
            }
            failures += 1;
            // Slots and blocks are somebody else's by now.
            memory.write(0, &vec![0x33; memory.len()]);
            rig.device.tensors.iter().for_each(|tensor| tensor.write(0, &vec![0x44; tensor.len()]));
            until("the device is idle", || !rig.device.fake.turn());
            let is_still =
                |memory: &Memory, byte| memory.span(0, memory.len() as u64).bytes().iter().all(|b| *b == byte);
            let case = format!("{call} {nth}, staged {staged}, {direction:?}");
            assert!(is_still(&memory, 0x33), "a slot was written: {case}");
            assert!(rig.device.tensors.iter().all(|tensor| is_still(tensor, 0x44)), "a block was written: {case}");
        }
    }
    assert!(failures >= 12, "only {failures} jobs failed");
}

#[test]
fn two_devices_of_one_process_copy_beside_each_other() {
    let first = Device::new(31);
    let fake = first.fake.clone();
    thread::scope(|scope| {
        scope.spawn(|| any_schedule(&Rig::on(first, options()), 31, 12));
        scope.spawn(|| any_schedule(&Rig::on(Device::of(fake.clone(), 1, PAGES), options()), 32, 12));
    });
}

/// Of a fault of a kernel, and of a context that another library of the process has destroyed or reset.
#[test]
fn a_lost_device_fails_what_is_in_flight_and_refuses_the_rest() {
    for status in [Status::ILLEGAL_ADDRESS, Status(709), Status::INVALID_CONTEXT, Status::DEINITIALIZED] {
        lost(status);
    }
}

fn lost(status: Status) {
    let rig = Rig::registered(15);
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(0, vec![1; BLOCK as usize]);
    rig.engine.submit(rig.job(1, Direction::Store, &[(0, 0)])).unwrap();
    rig.engine.submit(rig.job(2, Direction::Load, &[(1, 1)])).unwrap();
    rig.device.fake.fault(Fault::Lost(status));
    rig.engine.wait(&[1, 2], Until::Settled, Instant::now() + PATIENCE).unwrap();
    let ends = rig.engine.poll();
    assert!(ends.len() == 2 && ends.iter().all(|end| end.outcomes == [Outcome::Failed]), "{ends:?}");
    let refused = rig.engine.submit(rig.job(3, Direction::Store, &[(0, 0)])).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(rig.engine.report().trouble.unwrap().contains("ended"));
}

#[test]
fn a_device_that_hangs_holds_neither_a_flush_nor_the_end_beyond_their_deadlines() {
    let rig = Rig::new(16, CudaOptions { patience: Duration::from_millis(50), ..options() });
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(0, vec![1; BLOCK as usize]);
    rig.engine.submit(rig.job(1, Direction::Store, &[(0, 0)])).unwrap();
    let error = rig.engine.wait(&[1], Until::Released, Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let fake = rig.device.fake.clone();
    drop(rig.engine);
    assert!(!fake.registrations().is_empty(), "memory that the device may still write was let go");
    fake.hold(rig.device.compute, false);
    until("all is let go when the device goes on", || fake.open() == 2 + 1);
}

#[test]
fn tensors_of_another_device_or_of_the_host_are_refused() {
    let device = Device::new(17);
    for tensors in [device.tensors(1), Tensors::new(Vec::new(), Vec::new()).unwrap()] {
        let engine = CudaCopyEngine::new(device.fake.clone(), tensors, CudaOptions { ordinal: 1, ..options() });
        assert_eq!(engine.is_ok(), device.fake.open() > 3, "the tensors lie on device 0");
        drop(engine);
    }
    let engine = CudaCopyEngine::new(device.fake.clone(), device.tensors(0), CudaOptions { ordinal: 7, ..options() });
    assert_eq!(engine.err().expect("there are two devices").kind(), ErrorKind::Unsupported);
    let place = Place::Host(Memory::anonymous(4096).unwrap());
    let rows = Tensor { place, offset: 0, rows: 1, row_stride_bytes: 4096 };
    let tensors = Tensors::new(vec![rows], vec![vec![PageRef { tensor: 0, page_bytes: 4096 }]]).unwrap();
    let error = CudaCopyEngine::new(device.fake.clone(), tensors, options()).err().expect("it is host memory");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = HostCopyEngine::new(device.tensors(0), HostOptions::default()).err().expect("it is device memory");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_driver_that_cannot_start_is_told_with_what_to_do() {
    let device = Device::new(26);
    for (status, hint) in [(Status::STUB_LIBRARY, "stubs"), (Status::NO_DEVICE, "CUDA_VISIBLE_DEVICES")] {
        device.fake.fault(Fault::Call("init", 1, status));
        let error = device.engine(options()).err().expect("the driver does not start");
        assert!(error.kind() == ErrorKind::Unsupported && error.hint_text().unwrap().contains(hint), "{error}");
        device.fake.heal();
    }
    // It hangs: whoever waits is told, and the driver is let go when it answers after all.
    let held = device.fake.hold_start();
    let error = device.engine(CudaOptions { start_patience: Duration::from_millis(50), ..options() }).err().unwrap();
    assert!(error.kind() == ErrorKind::Timeout && error.hint_text().is_some(), "{error}");
    drop(held);
    until("nothing is left open", || device.fake.open() == 3);
    assert!(device.engine(options()).is_ok());
}

// --- how it ends ----------------------------------------------------------------------------------------------

#[test]
fn a_detached_pool_is_unregistered_and_let_go_after_its_last_job() {
    let rig = Rig::registered(18);
    let (memory, witness) = Memory::with_witness((SLOTS << 12) as usize);
    let pool = rig.engine.attach_pool(memory).unwrap();
    rig.engine.populated(pool, SLOTS << 12);
    let bytes = rig.memory.len() as u64 + (SLOTS << 12);
    until("it is registered", || rig.engine.report().registered_bytes == bytes);
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(0, vec![1; BLOCK as usize]);
    rig.engine.submit(Job { pool, ..rig.job(1, Direction::Store, &[(0, 0)]) }).unwrap();
    rig.engine.detach_pool(pool).unwrap();
    assert!(witness.upgrade().is_some(), "the pool was let go while the device had a job in it");
    rig.device.fake.hold(rig.device.compute, false);
    assert!(matches!(rig.finish(1).outcomes[0], Outcome::Stored { .. }));
    until("it is let go", || witness.upgrade().is_none());
    let left: u64 = rig.device.fake.registrations().iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(left, rig.memory.len() as u64);
}

#[test]
fn dropping_the_engine_ends_what_the_device_has_and_leaves_nothing_open() {
    let rig = Rig::registered(19);
    let held = Arc::new(AtomicUsize::new(0));
    for id in 0..20 {
        let alive = held.clone();
        let guard = Probe(move |_| Arc::strong_count(&alive) > 0, |_, _| true);
        let direction = if id % 2 == 0 { Direction::Store } else { Direction::Load };
        let job = rig.job(id, direction, &[(id as u32 % ROWS, id % SLOTS)]);
        rig.engine.submit(Job { guard: Some(Box::new(guard)), ..job }).unwrap();
    }
    drop(rig.engine);
    assert_eq!(Arc::strong_count(&held), 1, "a job outlived the engine");
    assert_eq!(rig.device.fake.open(), 2 + 1, "two tensors and a stream of the model's are left");
}

#[test]
fn many_threads_submit_and_every_job_is_published_once() {
    let rig = Rig::registered(20);
    let seen = Mutex::new(Vec::new());
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|scope| {
        scope.spawn(|| {
            while seen.lock().unwrap().len() < 150 {
                assert!(Instant::now() < deadline, "completions are missing");
                seen.lock().unwrap().extend(rig.engine.poll().into_iter().map(|completion| completion.job_id));
                thread::yield_now();
            }
        });
        for at in 0..3u64 {
            let rig = &rig;
            scope.spawn(move || {
                for id in (0..50).map(|job| job * 3 + at) {
                    let direction = if id % 2 == 0 { Direction::Load } else { Direction::Store };
                    // The queue is full while the thread that polls has no turn.
                    while let Err(error) = rig.engine.submit(rig.job(id, direction, &[(at as u32, at)])) {
                        assert_eq!(error.kind(), ErrorKind::Full);
                        assert!(Instant::now() < deadline, "the queue stays full");
                        thread::yield_now();
                    }
                    rig.engine.wait(&[id], Until::Settled, deadline).unwrap();
                }
            });
        }
    });
    assert!(rig.engine.poll().is_empty());
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..150));
}

// --- the measurements -----------------------------------------------------------------------------------------

#[test]
fn the_measurements_check_their_bytes_and_leave_nothing_open() {
    let fake = Arc::new(Fake::new(21));
    let extent = rows::Extent::small(21);
    let peaks = rows::peaks(fake.clone(), 1, &extent).unwrap();
    assert!(peaks.iter().any(|figure| figure.what == "peak of a load" && figure.value > 0.0));
    let memory = rows::populated(1 << 20, 21).unwrap();
    let registered = rows::registration(fake.clone(), 0, "memory", memory).unwrap();
    assert_eq!((registered[0].value, registered.len()), (1.0, 3));
    let driver: Arc<dyn Driver> = fake.clone();
    rows::checksums(&driver, 0, &extent).unwrap();
    for layout in [rows::Layout::Layers, rows::Layout::Blocks] {
        assert!(rows::schedules(&driver, 0, layout, &extent).unwrap() > 0);
    }
    assert_eq!(fake.open(), 0);
}

// --- rows -----------------------------------------------------------------------------------------------------

fn in_rows() -> CudaOptions {
    CudaOptions { method: Wish::Pitched, ..options() }
}

#[test]
fn consecutive_blocks_are_copied_in_rows_and_hold_what_the_model_wrote_under_any_schedule() {
    for seed in 200..212 {
        let rig = Rig::on(Device::new(seed), in_rows()).wait();
        assert_eq!(rig.engine.report().methods, ["pitched", "batch", "loop"], "{:?}", rig.engine.report().trouble);
        any_schedule(&rig, seed, 6);
        // Blocks 3 to 7 to slots 2 to 6: the pages of each tensor are rows, cut where registrations end.
        let tested = rig.device.fake.row_copies();
        let pairs: Vec<_> = (3..8).map(|block| (block, u64::from(block) - 1)).collect();
        let mut random = Random(seed);
        let contents: Vec<_> = pairs.iter().map(|_| content(&mut random)).collect();
        for ((block, _), content) in pairs.iter().zip(&contents) {
            rig.device.compute(*block, content.clone());
        }
        rig.engine.submit(rig.job(90, Direction::Store, &pairs)).unwrap();
        assert!(rig.finish(90).outcomes.iter().all(|outcome| matches!(outcome, Outcome::Stored { .. })));
        for ((_, slot), content) in pairs.iter().zip(&contents) {
            assert!(rig.slot(*slot) == *content, "slot {slot}");
        }
        // The first tensor's rows are evenly spaced on both sides; of the second the pages touch, and are rows too.
        let copies = rig.device.fake.row_copies() - tested;
        assert_eq!(copies, 4, "two tensors, on two registrations");
        let fake = rig.device.fake.clone();
        drop(rig);
        assert_eq!(fake.open(), 3);
    }
}

#[test]
fn where_strides_do_not_allow_rows_the_next_method_copies() {
    // Blocks in descending order have a negative stride, and a device may take no pitch this long.
    let descending: Vec<_> = (2..10).map(|block| (12 - block, u64::from(block))).collect();
    let ascending: Vec<_> = (2..10).map(|block| (block, u64::from(block))).collect();
    for (pairs, max_pitch, has_rows) in
        [(&descending, 1 << 20, false), (&ascending, 4095, false), (&ascending, 4096, true)]
    {
        let device = Device::new(220);
        device.fake.fault(Fault::MaxPitch(max_pitch));
        let rig = Rig::on(device, in_rows()).wait();
        let tested = rig.device.fake.row_copies();
        let mut random = Random(220);
        for (_, slot) in pairs {
            rig.memory.write(slot << 12, &content(&mut random));
        }
        rig.engine.submit(rig.job(1, Direction::Load, pairs)).unwrap();
        assert!(rig.finish(1).outcomes.iter().all(|outcome| *outcome == Outcome::Loaded));
        assert!(pairs.iter().all(|(block, slot)| rig.device.block(*block) == rig.slot(*slot)));
        assert_eq!(rig.device.fake.row_copies() > tested, has_rows, "{max_pitch}");
    }
}

#[test]
fn rows_that_the_driver_refuses_are_given_up_and_the_next_job_is_whole() {
    let rig = Rig::on(Device::new(221), in_rows()).wait();
    rig.device.fake.fault(Fault::Call("copy_rows", 1, Status::INVALID_VALUE));
    let pairs: Vec<_> = (2..6).map(|block| (block, u64::from(block))).collect();
    rig.engine.submit(rig.job(1, Direction::Load, &pairs)).unwrap();
    assert_eq!(rig.finish(1).outcomes, [Outcome::Failed; 4]);
    assert_eq!(rig.engine.report().methods, ["batch", "loop"]);
    rig.engine.submit(rig.job(2, Direction::Load, &pairs)).unwrap();
    assert_eq!(rig.finish(2).outcomes, [Outcome::Loaded; 4]);
}

// --- the calibration ------------------------------------------------------------------------------------------

fn chosen(folder: &std::path::Path) -> CudaOptions {
    CudaOptions { method: Wish::Auto, calibrations: Some(folder.to_path_buf()), multiprocessors: 2, ..options() }
}

fn calibrated(rig: &Rig, how: &str) {
    until("the engine has chosen", || rig.engine.report().choice == how);
}

#[test]
fn nothing_is_measured_before_the_first_job_has_ended_nor_while_a_stream_is_captured() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::on(Device::with(230, WORDS), chosen(folder.path())).wait();
    let report = rig.engine.report();
    assert_eq!((report.choice, report.methods), ("given", vec!["batch", "loop", "pitched", "kernel"]));
    let tested = rig.device.fake.row_copies();
    let mut random = Random(230);
    rig.memory.write(0, &content(&mut random));
    // The first request finds the table that there is from the start, however long it takes.
    rig.device.fake.hold(rig.device.compute, true);
    rig.device.compute(9, vec![0; BLOCK as usize]);
    rig.engine.submit(rig.job(1, Direction::Load, &[(2, 0)])).unwrap();
    (0..200).for_each(|_| _ = rig.device.fake.turn());
    assert_eq!((rig.device.fake.row_copies(), rig.engine.report().choice), (tested, "given"));
    // A capture begins before the job has ended.
    rig.device.fake.capture(rig.device.compute, true);
    rig.device.fake.hold(rig.device.compute, false);
    assert_eq!(rig.finish(1).outcomes, [Outcome::Loaded]);
    (0..200).for_each(|_| _ = rig.device.fake.turn());
    assert_eq!((rig.device.fake.row_copies(), rig.engine.report().choice), (tested, "given"));
    rig.device.fake.capture(rig.device.compute, false);
    calibrated(&rig, "measured");
    assert!(rig.device.fake.row_copies() > tested, "rows were measured");
    assert_eq!(rig.device.fake.spoiled_captures(), 0);
    any_schedule(&rig, 230, 6);
    let fake = rig.device.fake.clone();
    drop(rig);
    assert_eq!(fake.open(), 3);
}

#[test]
fn what_one_engine_has_measured_the_next_one_reads_and_a_damaged_file_is_measured_anew() {
    let folder = tempfile::tempdir().unwrap();
    let begin = |seed| {
        let rig = Rig::on(Device::with(seed, WORDS), chosen(folder.path())).wait();
        rig.engine.submit(rig.job(1, Direction::Store, &[(2, 0)])).unwrap();
        rig.finish(1);
        rig
    };
    calibrated(&begin(231), "measured");
    calibrated(&begin(232), "kept");
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let whole = std::fs::read_to_string(&files[0]).unwrap();
    std::fs::write(&files[0], &whole[..whole.len() / 2]).unwrap();
    let rig = begin(233);
    calibrated(&rig, "measured");
    assert_eq!(rig.engine.report().trouble, None, "a damaged file is no error");
    drop(rig);
    calibrated(&begin(234), "kept");
}

#[test]
fn an_engine_that_ends_before_or_during_the_measurement_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::on(Device::with(235, WORDS), chosen(folder.path())).wait();
    let (fake, begun) = (rig.device.fake.clone(), Instant::now());
    drop(rig);
    assert!(begun.elapsed() < PATIENCE / 3);
    assert_eq!(fake.open(), 3);
    let rig = Rig::on(Device::with(236, WORDS), chosen(folder.path())).wait();
    rig.engine.submit(rig.job(1, Direction::Store, &[(2, 0)])).unwrap();
    rig.finish(1);
    let fake = rig.device.fake.clone();
    drop(rig);
    assert_eq!(fake.open(), 3);
}

#[test]
fn a_method_that_fails_while_it_is_measured_is_given_up_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::on(Device::with(237, WORDS), chosen(folder.path())).wait();
    rig.device.fake.fault(Fault::Call("copy_rows", 1, Status(801)));
    rig.engine.submit(rig.job(1, Direction::Store, &[(2, 0)])).unwrap();
    rig.finish(1);
    until("it is given up", || rig.engine.report().methods == ["batch", "loop", "kernel"]);
    until("it is told", || rig.engine.report().trouble.is_some());
    assert_eq!(rig.engine.report().choice, "given");
    any_schedule(&rig, 237, 6);
}

/// The CPUs of each thread, by its name, in the order in which it was given them; the kernel may refuse.
#[derive(Debug, Default)]
struct Threads {
    given: Mutex<BTreeMap<String, Vec<BTreeSet<usize>>>>,
    refuses: bool,
}

impl Threads {
    /// Of the threads whose names begin so.
    fn given(&self, name: &str) -> Vec<Vec<BTreeSet<usize>>> {
        let given = self.given.lock().unwrap();
        given.iter().filter(|(of, _)| of.starts_with(name)).map(|(_, given)| given.clone()).collect()
    }
}

fn own_name() -> String {
    let thread = thread::current();
    format!("{} {:?}", thread.name().expect("threads of tests and of the engine have names"), thread.id())
}

impl Kernel for Threads {
    fn affinity(&self) -> io::Result<BTreeSet<usize>> {
        let given = self.given.lock().unwrap();
        Ok(given.get(&own_name()).map_or_else(|| (0..4).collect(), |given| given.last().unwrap().clone()))
    }

    fn set_affinity(&self, cpus: &BTreeSet<usize>) -> io::Result<()> {
        if self.refuses {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        self.given.lock().unwrap().entry(own_name()).or_default().push(cpus.clone());
        Ok(())
    }

    fn has_policy(&self) -> io::Result<bool> {
        unreachable!("the driver takes the memory")
    }

    fn prefer(&self, _: std::ops::Range<usize>, _: u32) -> io::Result<()> {
        unreachable!("the driver takes the memory")
    }
}

/// A host whose device hangs on the second of two nodes, of two CPUs each.
fn host_with_two_nodes() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in [
        (
            "sys/devices/system/node/online",
            "0-1
",
        ),
        (
            "sys/devices/system/node/has_memory",
            "0-1
",
        ),
        (
            "sys/devices/system/node/node0/cpulist",
            "0-1
",
        ),
        (
            "sys/devices/system/node/node1/cpulist",
            "2-3
",
        ),
        (
            "sys/bus/pci/devices/fake:00:00.0/numa_node",
            "1
",
        ),
    ] {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn beside(root: &Path, kernel: &Arc<Threads>) -> CudaOptions {
    CudaOptions { root: root.to_owned(), kernel: kernel.clone(), ..options() }
}

#[test]
fn threads_run_and_staging_memory_is_allocated_on_the_node_of_the_device() {
    let (root, kernel) = (host_with_two_nodes(), Arc::new(Threads::default()));
    let rig = Rig::new(11, beside(root.path(), &kernel));
    let there: BTreeSet<usize> = [2, 3].into();
    assert_eq!(rig.engine.report().numa_node, Some(1));
    // Two lanes, one that registers, and two that sum.
    until("all threads are on the node", || kernel.given("forebay-").iter().flatten().count() == 5);
    assert!(kernel.given("forebay-").iter().flatten().all(|cpus| *cpus == there));
    let own = kernel.given(&own_name());
    assert_eq!(own, [[there, (0..4).collect()]], "whoever makes the engine is there meanwhile, and then as before");
}

#[test]
fn where_threads_cannot_be_kept_on_a_node_the_engine_copies_and_says_so_once() {
    let (root, kernel) = (host_with_two_nodes(), Arc::new(Threads { refuses: true, ..Threads::default() }));
    let rig = Rig::new(12, beside(root.path(), &kernel));
    let trouble = rig.engine.report().trouble.expect("the refusal is told");
    assert!(trouble.contains("NUMA node") && trouble.contains("seccomp"), "{trouble}");
    any_schedule(&rig.wait(), 12, 2);
}

#[test]
fn on_a_host_with_one_node_no_thread_is_moved() {
    let (root, kernel) = (host_with_two_nodes(), Arc::new(Threads::default()));
    fs::write(
        root.path().join("sys/devices/system/node/online"),
        "0
",
    )
    .unwrap();
    let rig = Rig::new(13, beside(root.path(), &kernel));
    assert_eq!((rig.engine.report().numa_node, rig.engine.report().trouble), (None, None));
    drop(rig);
    assert_eq!(kernel.given(""), Vec::<Vec<_>>::new());
}
