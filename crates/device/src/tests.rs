//! Claims about the host engine as a whole. Copies are compared byte for byte, whole memories included, with a naive
//! model over vectors. Guards that wait at a gate make the threads' order certain, never sleeps.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::checksum::checksum;
use proptest::prelude::*;

use crate::bench::{CopyBench, Shape};
use crate::*;

const PATIENCE: Duration = Duration::from_secs(30);
const PAGE: usize = 4096;
const BLOCKS: u32 = 16;
/// Small, so that items of a few MiB are copied in parts.
const PART_BYTES: u64 = 2 << 20;

/// An engine over one tensor of 16 pages, and a pool of 16 slots.
struct Rig {
    engine: HostCopyEngine,
    tensor: Memory,
    memory: Memory,
    pool: PoolId,
}

impl Rig {
    fn new(threads: usize, queue_jobs: usize) -> Rig {
        Rig::with_pages(PAGE, threads, queue_jobs)
    }

    fn with_pages(page_bytes: usize, threads: usize, queue_jobs: usize) -> Rig {
        let tensor = Memory::anonymous(page_bytes * BLOCKS as usize).unwrap();
        tensor.write(0, &noise(tensor.len(), 1));
        let memory = Memory::anonymous(tensor.len()).unwrap();
        let stride = page_bytes as u64;
        let rows = Tensor { place: Place::Host(tensor.clone()), offset: 0, rows: BLOCKS, row_stride_bytes: stride };
        let tensors = Tensors::new(vec![rows], vec![vec![PageRef { tensor: 0, page_bytes: stride }]]).unwrap();
        let options = HostOptions { threads, queue_jobs, part_bytes: PART_BYTES, ..HostOptions::default() };
        let engine = HostCopyEngine::new(tensors, options).unwrap();
        let pool = engine.attach_pool(memory.clone()).unwrap();
        Rig { engine, tensor, memory, pool }
    }

    /// A job that copies block i to or from slot i, for each of `blocks`.
    fn job(&self, id: JobId, direction: Direction, blocks: &[u32]) -> Job {
        let page = (self.tensor.len() / BLOCKS as usize) as u64;
        let item = |at: usize| Item {
            offset: u64::from(blocks[at]) * page,
            group: 0,
            blocks: at as u32..at as u32 + 1,
            beside: [0; 2],
        };
        let items = (0..blocks.len()).map(item).collect();
        Job {
            id,
            direction,
            pool: self.pool,
            after: After::Now,
            items,
            block_ids: blocks.to_vec(),
            is_summed: false,
            guard: None,
        }
    }

    fn finish(&self, ids: &[JobId]) -> Vec<Completion> {
        self.engine.wait(ids, Until::Settled, Instant::now() + PATIENCE).unwrap();
        self.engine.poll()
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn contents(memory: &Memory) -> Vec<u8> {
    memory.span(0, memory.len() as u64).bytes().to_vec()
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

/// Holds threads until it is opened.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) -> bool {
        let is_open = self.is_open.lock().unwrap();
        let (is_open, _) = self.opened.wait_timeout_while(is_open, PATIENCE, |is_open| !*is_open).unwrap();
        assert!(*is_open, "nobody opened the gate");
        true
    }

    /// A guard that waits here before each item.
    fn guard(self: &Arc<Gate>) -> Option<Box<dyn SlotGuard>> {
        let gate = self.clone();
        Some(Box::new(Probe(move |_| gate.pass(), |_, _| true)))
    }
}

// --- what is copied -------------------------------------------------------------------------------------------

/// A random layout, and which blocks go to which offsets.
#[derive(Clone, Debug)]
struct Case {
    /// For each tensor: offset, padding of a row, and bytes of a page.
    tensors: Vec<(u64, u64, u64)>,
    /// For each group its tensors; a page may have fewer bytes than the tensor's.
    groups: Vec<Vec<(usize, u64)>>,
    items: Vec<CaseItem>,
    threads: usize,
    part_bytes: u64,
    level: usize,
    seed: u64,
}

#[derive(Clone, Debug)]
struct CaseItem {
    group: usize,
    blocks: Vec<u32>,
    gap_before: u64,
}

const ROWS: u32 = 40;

fn case() -> impl Strategy<Value = Case> {
    let page = prop_oneof![1..700u64, (1..40u64).prop_map(|lines| lines * 64), Just(4096), Just(16384)];
    let tensors = prop::collection::vec((0..130u64, 0..200u64, page), 1..5);
    let items = prop::collection::vec((any::<prop::sample::Index>(), 1..5usize, 0..150u64), 1..9);
    let order = Just((0..ROWS).collect::<Vec<_>>()).prop_shuffle();
    let groups = prop::collection::vec(prop::collection::vec((any::<prop::sample::Index>(), 0..3u64), 1..6), 1..4);
    let part_bytes = prop_oneof![Just(1u64), Just(10_000), Just(8 << 20)];
    (tensors, groups, items, order, 1..5usize, part_bytes, 0..8usize, any::<u64>()).prop_map(
        |(tensors, groups, items, order, threads, part_bytes, level, seed)| {
            let page_ref = |(at, less): (prop::sample::Index, u64)| {
                let tensor = at.index(tensors.len());
                (tensor, tensors[tensor].2.saturating_sub(less).max(1))
            };
            let groups: Vec<Vec<_>> = groups.into_iter().map(|g| g.into_iter().map(page_ref).collect()).collect();
            // No block is in two items: a load would write it twice.
            let mut order = order.into_iter();
            let item = |(group, blocks, gap_before): (prop::sample::Index, usize, u64)| CaseItem {
                group: group.index(groups.len()),
                blocks: order.by_ref().take(blocks).collect(),
                gap_before,
            };
            let items = items.into_iter().map(item).collect();
            Case { tensors, groups, items, threads, part_bytes, level, seed }
        },
    )
}

/// The same copies over vectors, one byte range after another.
struct Model {
    tensors: Vec<Vec<u8>>,
    pool: Vec<u8>,
    /// For each item: position of its slice, and its fragments.
    items: Vec<(u64, Vec<Fragment>)>,
}

/// Tensor, start and length.
type Fragment = (usize, usize, usize);

impl Model {
    fn new(case: &Case) -> Model {
        let mut at = 0;
        let mut items = Vec::new();
        for item in &case.items {
            let offset = at + item.gap_before;
            let mut fragments = Vec::new();
            for block in &item.blocks {
                for (tensor, len) in &case.groups[item.group] {
                    let (start, padding, page) = case.tensors[*tensor];
                    let row = start + u64::from(*block) * (page + padding);
                    fragments.push((*tensor, row as usize, *len as usize));
                }
            }
            at = offset + fragments.iter().map(|fragment| fragment.2 as u64).sum::<u64>();
            items.push((offset, fragments));
        }
        let bytes = |(at, (start, padding, page)): (usize, &(u64, u64, u64))| {
            noise((start + u64::from(ROWS) * (page + padding)) as usize, case.seed ^ at as u64)
        };
        let tensors = case.tensors.iter().enumerate().map(bytes).collect();
        Model { tensors, pool: noise(at as usize + 100, !case.seed), items }
    }

    fn store(&mut self) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for (offset, fragments) in &self.items {
            let parts = fragments.iter().map(|(tensor, start, len)| &self.tensors[*tensor][*start..start + len]);
            let slice = parts.collect::<Vec<_>>().concat();
            self.pool[*offset as usize..][..slice.len()].copy_from_slice(&slice);
            outcomes.push(Outcome::Stored { checksum: checksum(&slice) });
        }
        outcomes
    }

    fn load(&mut self) {
        for (offset, fragments) in &self.items {
            let mut at = *offset as usize;
            for (tensor, start, len) in fragments {
                self.tensors[*tensor][*start..start + len].copy_from_slice(&self.pool[at..at + len]);
                at += len;
            }
        }
    }
}

fn case_job(case: &Case, model: &Model, id: JobId, direction: Direction, pool: PoolId) -> Job {
    let (mut items, mut block_ids) = (Vec::new(), Vec::new());
    for (item, (offset, _)) in case.items.iter().zip(&model.items) {
        let start = block_ids.len() as u32;
        block_ids.extend(&item.blocks);
        items.push(Item {
            offset: *offset,
            group: item.group as u16,
            blocks: start..block_ids.len() as u32,
            beside: [0; 2],
        });
    }
    Job { id, direction, pool, after: After::Now, items, block_ids, is_summed: false, guard: None }
}

fn memory_of(bytes: &[u8]) -> Memory {
    let memory = Memory::anonymous(bytes.len()).unwrap();
    memory.write(0, bytes);
    memory
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_store_and_a_load_equal_the_naive_copy_of_any_layout_at_every_level(case in case()) {
        let mut model = Model::new(&case);
        let memories: Vec<_> = model.tensors.iter().map(|bytes| memory_of(bytes)).collect();
        let memory = memory_of(&model.pool);
        let tensors = memories.iter().zip(&case.tensors).map(|(memory, (offset, padding, page))| Tensor {
            place: Place::Host(memory.clone()), offset: *offset, rows: ROWS, row_stride_bytes: page + padding,
        });
        let page_ref = |(tensor, page_bytes): &(usize, u64)| PageRef { tensor: *tensor, page_bytes: *page_bytes };
        let groups = case.groups.iter().map(|refs| refs.iter().map(page_ref).collect());
        let levels = Level::available();
        let level = levels[case.level % levels.len()];
        let options = HostOptions { threads: case.threads, queue_jobs: 4, part_bytes: case.part_bytes, level };
        let engine = HostCopyEngine::new(Tensors::new(tensors.collect(), groups.collect()).unwrap(), options).unwrap();
        let pool = engine.attach_pool(memory.clone()).unwrap();

        engine.submit(case_job(&case, &model, 1, Direction::Store, pool)).unwrap();
        engine.wait(&[1], Until::Settled, Instant::now() + PATIENCE).unwrap();
        let outcomes = model.store();
        let stored = engine.poll();
        prop_assert_eq!(&stored[0].outcomes, &outcomes, "at level {}", level);
        let slices = model.items.iter().flat_map(|(_, fragments)| fragments).map(|fragment| fragment.2 as u64);
        prop_assert_eq!(stored[0].bytes, slices.sum::<u64>());
        prop_assert!(contents(&memory) == model.pool, "the pool differs at level {}", level);
        for (memory, bytes) in memories.iter().zip(&model.tensors) {
            prop_assert!(contents(memory) == *bytes, "a store changed a tensor at level {}", level);
        }

        // A tensor that two refs of a block share is written twice with the bytes of one page. Both refs read the
        // same bytes, so the order does not matter.
        for (memory, bytes) in memories.iter().zip(&mut model.tensors) {
            *bytes = noise(bytes.len(), case.seed.wrapping_add(99));
            memory.write(0, bytes);
        }
        engine.submit(case_job(&case, &model, 2, Direction::Load, pool)).unwrap();
        engine.wait(&[2], Until::Settled, Instant::now() + PATIENCE).unwrap();
        model.load();
        prop_assert!(engine.poll()[0].outcomes.iter().all(|outcome| *outcome == Outcome::Loaded));
        for (memory, bytes) in memories.iter().zip(&model.tensors) {
            prop_assert!(contents(memory) == *bytes, "a tensor differs at level {}", level);
        }
        prop_assert!(contents(&memory) == model.pool, "a load changed the pool at level {}", level);
    }
}

#[test]
fn a_large_item_copied_in_parts_has_the_bytes_and_the_checksum_of_the_whole() {
    let page = (9 << 20) + 3;
    let rig = Rig::with_pages(page, 4, 8);
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let before = move |_| counted.fetch_add(1, Ordering::Relaxed) < 100;
    let mut store = rig.job(1, Direction::Store, &[3]);
    store.guard = Some(Box::new(Probe(before, |_, _| true)));
    rig.engine.submit(store).unwrap();
    let source = rig.tensor.span(3 * page as u64, page as u64);
    let expected = Outcome::Stored { checksum: checksum(source.bytes()) };
    assert_eq!(rig.finish(&[1])[0].outcomes, [expected]);
    assert_eq!(asked.load(Ordering::Relaxed), 4, "the item was not copied in four parts");
    assert!(rig.memory.span(3 * page as u64, page as u64).bytes() == source.bytes());

    rig.tensor.write(3 * page as u64, &vec![0; page]);
    rig.engine.submit(rig.job(2, Direction::Load, &[3])).unwrap();
    assert_eq!(rig.finish(&[2])[0].bytes, page as u64);
    assert!(rig.memory.span(3 * page as u64, page as u64).bytes() == source.bytes());
}

#[test]
fn a_summed_load_sums_the_whole_slice_also_where_it_copies_a_part_of_it_in_parts() {
    let page = 4 * PART_BYTES as usize;
    let rig = Rig::with_pages(page, 3, 8);
    rig.memory.write(0, &noise(rig.memory.len(), 2));
    let (page, told) = (page as u64, mpsc::channel());
    // A slot of four blocks. The loads take its last one, the middle two, the first, and all.
    for (id, (skipped, blocks)) in [(3, 1), (1, 2), (0, 1), (0, 4)].into_iter().enumerate() {
        let said = told.0.clone();
        let guard: Box<dyn SlotGuard> = Box::new(Probe(|_| true, move |_, sum| said.send(sum).is_ok()));
        let beside = [skipped * page, (4 - skipped - blocks) * page];
        let item = Item { offset: skipped * page, group: 0, blocks: 0..blocks as u32, beside };
        let job = rig.job(id as u64, Direction::Load, &(0..blocks as u32).collect::<Vec<_>>());
        rig.engine.submit(Job { items: vec![item], is_summed: true, guard: Some(guard), ..job }).unwrap();
        let completion = &rig.finish(&[id as u64])[0];
        assert_eq!((completion.outcomes.as_slice(), completion.bytes), ([Outcome::Loaded].as_slice(), blocks * page));
        let whole = checksum(rig.memory.span(0, 4 * page).bytes());
        assert_eq!(told.1.recv().unwrap(), Some(whole), "{blocks} blocks behind {skipped}");
        let (from, to) = (rig.memory.span(skipped * page, blocks * page), rig.tensor.span(0, blocks * page));
        assert!(from.bytes() == to.bytes(), "{blocks} blocks behind {skipped}");
    }
}

// --- what is refused ------------------------------------------------------------------------------------------

#[test]
fn a_job_that_could_touch_a_byte_outside_is_refused_and_leaves_no_trace() {
    let rig = Rig::new(1, 1);
    let end = rig.memory.len() as u64;
    let item = |offset, group, blocks| Item { offset, group, blocks, beside: [0; 2] };
    let beside = |beside| Item { beside, ..item(PAGE as u64, 0, 0..1) };
    let bad = [
        ("bytes before the pool", beside([PAGE as u64 + 1, 0]), vec![0]),
        ("bytes behind the pool", beside([0, end - 2 * PAGE as u64 + 1]), vec![0]),
        ("bytes that wrap", beside([0, u64::MAX]), vec![0]),
        ("offset past the end", item(end - 1, 0, 0..1), vec![0]),
        ("second block past the end", item(end - PAGE as u64, 0, 0..2), vec![0, 1]),
        ("offset that wraps", item(u64::MAX - 1, 0, 0..1), vec![0]),
        ("group", item(0, 1, 0..1), vec![0]),
        ("block id", item(0, 0, 0..1), vec![BLOCKS]),
        ("blocks not in the list", item(0, 0, 0..2), vec![0]),
        ("no blocks", item(0, 0, 1..1), vec![0, 1]),
        #[allow(clippy::reversed_empty_ranges)]
        ("blocks backwards", item(0, 0, 1..0), vec![0, 1]),
    ];
    for (what, item, block_ids) in bad {
        let job = Job {
            id: 1,
            direction: Direction::Load,
            pool: rig.pool,
            after: After::Now,
            items: vec![item],
            block_ids,
            is_summed: false,
            guard: None,
        };
        let error = rig.engine.submit(job).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
    }
    let other_pool = Job { pool: PoolId(99), ..rig.job(1, Direction::Store, &[0]) };
    assert_eq!(rig.engine.submit(other_pool).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(contents(&rig.memory).iter().all(|byte| *byte == 0));
    rig.engine.submit(rig.job(1, Direction::Store, &[0])).unwrap();
    assert_eq!(rig.finish(&[1]).len(), 1);
}

#[test]
fn a_full_queue_refuses_until_a_completion_is_polled() {
    let rig = Rig::new(1, 2);
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    rig.engine.submit(rig.job(2, Direction::Store, &[1])).unwrap();
    let refused = rig.engine.submit(rig.job(3, Direction::Load, &[2])).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Full);
    gate.open();
    rig.engine.wait(&[1, 2], Until::Settled, Instant::now() + PATIENCE).unwrap();
    assert_eq!(rig.engine.submit(rig.job(3, Direction::Load, &[2])).unwrap_err().kind(), ErrorKind::Full);
    assert_eq!(rig.engine.poll().len(), 2);
    rig.engine.submit(rig.job(3, Direction::Load, &[2])).unwrap();
    assert_eq!(rig.finish(&[3]).len(), 1);
}

#[test]
fn an_id_in_use_is_refused_and_free_again_after_its_completion_was_polled() {
    let rig = Rig::new(1, 8);
    rig.engine.submit(rig.job(7, Direction::Store, &[0])).unwrap();
    assert_eq!(rig.engine.submit(rig.job(7, Direction::Load, &[0])).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(rig.finish(&[7]).len(), 1);
    rig.engine.submit(rig.job(7, Direction::Load, &[0])).unwrap();
    assert_eq!(rig.finish(&[7])[0].direction, Direction::Load);
}

#[test]
fn a_pool_over_a_tensor_and_options_out_of_range_are_refused() {
    let rig = Rig::new(1, 1);
    assert_eq!(rig.engine.attach_pool(rig.tensor.clone()).unwrap_err().kind(), ErrorKind::Invalid);
    for (threads, queue_jobs, part_bytes) in [(0, 1, 1), (65, 1, 1), (1, 0, 1), (1, 1, 0)] {
        let tensors = Tensors::new(vec![], vec![]).unwrap();
        let options = HostOptions { threads, queue_jobs, part_bytes, ..HostOptions::default() };
        assert!(HostCopyEngine::new(tensors, options).is_err(), "{threads} {queue_jobs} {part_bytes} were accepted");
    }
}

// --- what the guard decides -----------------------------------------------------------------------------------

#[test]
fn a_refused_item_fails_alone_and_is_not_copied_if_it_was_refused_before() {
    let rig = Rig::new(2, 8);
    let guard = Probe(|item| item != 1, |item, _| item != 2);
    rig.engine.submit(Job { guard: Some(Box::new(guard)), ..rig.job(1, Direction::Store, &[0, 1, 2, 3]) }).unwrap();
    let completion = &rig.finish(&[1])[0];
    let stored =
        |block: u64| Outcome::Stored { checksum: checksum(rig.tensor.span(block * PAGE as u64, PAGE as u64).bytes()) };
    assert_eq!(completion.outcomes, [stored(0), Outcome::Failed, Outcome::Failed, stored(3)]);
    assert_eq!(completion.bytes, 2 * PAGE as u64);
    let untouched = rig.memory.span(PAGE as u64, PAGE as u64);
    assert!(untouched.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn the_guard_sees_the_whole_slice_and_its_checksum_when_it_is_asked_after() {
    let rig = Rig::new(2, 8);
    for (id, direction) in [(1, Direction::Store), (2, Direction::Load)] {
        let (memory, (seen, told)) = (rig.memory.clone(), mpsc::channel());
        let after = move |item: usize, sum: Option<u64>| {
            let slot = memory.span(item as u64 * PAGE as u64, PAGE as u64);
            seen.send((item, sum, checksum(slot.bytes()))).is_ok()
        };
        let guard: Option<Box<dyn SlotGuard>> = Some(Box::new(Probe(|_| true, after)));
        rig.engine.submit(Job { guard, ..rig.job(id, direction, &[0, 1, 2]) }).unwrap();
        rig.finish(&[id]);
        let mut told: Vec<_> = told.try_iter().collect();
        told.sort();
        assert_eq!(told.iter().map(|(item, ..)| *item).collect::<Vec<_>>(), [0, 1, 2]);
        let expected = |of_slot| (direction == Direction::Store).then_some(of_slot);
        assert!(told.iter().all(|(_, sum, of_slot)| *sum == expected(*of_slot)), "{told:x?}");
    }
}

#[test]
fn a_guard_that_panics_has_refused_and_the_engine_lives_on() {
    let rig = Rig::new(1, 8);
    let guard = Probe(|item| if item == 0 { panic!("a guard's bug") } else { true }, |_, _| true);
    rig.engine.submit(Job { guard: Some(Box::new(guard)), ..rig.job(1, Direction::Load, &[0, 1]) }).unwrap();
    assert_eq!(rig.finish(&[1])[0].outcomes, [Outcome::Failed, Outcome::Loaded]);
    rig.engine.submit(rig.job(2, Direction::Load, &[0])).unwrap();
    assert_eq!(rig.finish(&[2])[0].outcomes, [Outcome::Loaded]);
}

#[test]
fn one_refused_part_fails_the_whole_item_and_nobody_is_asked_after() {
    let rig = Rig::with_pages(8 << 20, 4, 8);
    let (asked, after) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let counted = after.clone();
    let guard = Probe(
        move |_| asked.fetch_add(1, Ordering::Relaxed) != 2,
        move |_, _| counted.fetch_add(1, Ordering::Relaxed) == 0,
    );
    rig.engine.submit(Job { guard: Some(Box::new(guard)), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    let completion = &rig.finish(&[1])[0];
    assert_eq!((completion.outcomes.as_slice(), completion.bytes), ([Outcome::Failed].as_slice(), 0));
    assert_eq!(after.load(Ordering::Relaxed), 0);
}

// --- when completions come ------------------------------------------------------------------------------------

#[test]
fn every_job_of_many_threads_is_completed_exactly_once() {
    const SUBMITTERS: u64 = 4;
    const JOBS: u64 = 300;

    let rig = Rig::new(4, 64);
    let seen = Mutex::new(Vec::new());
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|scope| {
        for submitter in 0..SUBMITTERS {
            let rig = &rig;
            scope.spawn(move || {
                for id in submitter * JOBS..(submitter + 1) * JOBS {
                    let direction = if id % 3 == 0 { Direction::Load } else { Direction::Store };
                    // Each submitter has blocks of its own: two jobs never write the same bytes at once...
                    let block = (submitter * 4 + id % 4) as u32;
                    while let Err(error) = rig.engine.submit(rig.job(id, direction, &[block])) {
                        assert_eq!(error.kind(), ErrorKind::Full);
                        assert!(Instant::now() < deadline, "the queue stays full");
                        thread::yield_now();
                    }
                    // ...because it waits for one before it submits the next.
                    rig.engine.wait(&[id], Until::Settled, deadline).unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while seen.lock().unwrap().len() < (SUBMITTERS * JOBS) as usize {
                    assert!(Instant::now() < deadline, "completions are missing");
                    let completions = rig.engine.poll();
                    seen.lock().unwrap().extend(completions.into_iter().map(|completion| completion.job_id));
                    thread::yield_now();
                }
            });
        }
    });
    let seen = seen.into_inner().unwrap();
    let distinct: BTreeSet<_> = seen.iter().copied().collect();
    assert_eq!(seen.len(), (SUBMITTERS * JOBS) as usize);
    assert!(distinct.into_iter().eq(0..SUBMITTERS * JOBS));
    assert!(rig.engine.poll().is_empty());
}

#[test]
fn a_finished_store_waits_for_the_stores_before_it_and_a_load_does_not() {
    let rig = Rig::new(2, 8);
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    let (copied, is_copied) = mpsc::channel();
    let guard = Probe(|_| true, move |_, _| copied.send(()).is_ok());
    rig.engine.submit(Job { guard: Some(Box::new(guard)), ..rig.job(2, Direction::Store, &[1]) }).unwrap();
    is_copied.recv_timeout(PATIENCE).unwrap();
    // The thread that is not at the gate takes this only after store 2.
    rig.engine.submit(rig.job(3, Direction::Load, &[2])).unwrap();
    assert_eq!(rig.finish(&[3]).iter().map(|completion| completion.job_id).collect::<Vec<_>>(), [3]);
    gate.open();
    assert_eq!(rig.finish(&[1, 2]).iter().map(|completion| completion.job_id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn loads_are_taken_before_stores_that_were_queued_earlier() {
    let rig = Rig::new(1, 8);
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    rig.engine.submit(rig.job(2, Direction::Store, &[1])).unwrap();
    rig.engine.submit(rig.job(3, Direction::Load, &[2])).unwrap();
    rig.engine.submit(rig.job(4, Direction::Load, &[3])).unwrap();
    gate.open();
    let order: Vec<_> = rig.finish(&[1, 2, 3, 4]).iter().map(|completion| completion.job_id).collect();
    let place = |id| order.iter().position(|other| *other == id).unwrap();
    assert!(place(3) < place(4) && place(4) < place(2), "{order:?}");
}

#[test]
fn a_job_without_items_completes_in_its_turn() {
    let rig = Rig::new(1, 8);
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    rig.engine.submit(rig.job(2, Direction::Store, &[])).unwrap();
    assert!(rig.engine.poll().is_empty());
    gate.open();
    let completions = rig.finish(&[1, 2]);
    assert_eq!(completions.iter().map(|completion| completion.job_id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((completions[1].bytes, completions[1].elapsed), (0, Duration::ZERO));
    rig.engine.submit(rig.job(3, Direction::Load, &[])).unwrap();
    assert_eq!(rig.engine.poll().len(), 1);
}

#[test]
fn waiting_knows_unknown_ids_takes_nothing_away_and_ends_at_its_deadline() {
    let rig = Rig::new(1, 8);
    rig.engine.wait(&[], Until::Settled, Instant::now()).unwrap();
    rig.engine.wait(&[17, 18], Until::Settled, Instant::now()).unwrap();
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    let error = rig.engine.wait(&[17, 1], Until::Settled, Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    gate.open();
    rig.engine.wait(&[1], Until::Settled, Instant::now() + PATIENCE).unwrap();
    rig.engine.wait(&[1], Until::Settled, Instant::now()).unwrap();
    assert_eq!(rig.engine.poll().len(), 1);
    rig.engine.wait(&[1], Until::Settled, Instant::now()).unwrap();
}

// --- how it ends ----------------------------------------------------------------------------------------------

#[test]
fn a_detached_pool_takes_no_new_jobs_finishes_the_old_and_is_let_go() {
    let rig = Rig::new(1, 8);
    let (memory, witness) = Memory::with_witness(PAGE * BLOCKS as usize);
    let pool = rig.engine.attach_pool(memory).unwrap();
    let gate = Arc::new(Gate::default());
    rig.engine.submit(Job { pool, guard: gate.guard(), ..rig.job(1, Direction::Store, &[0]) }).unwrap();
    rig.engine.detach_pool(pool).unwrap();
    assert_eq!(rig.engine.detach_pool(pool).unwrap_err().kind(), ErrorKind::NotFound);
    let refused = rig.engine.submit(Job { pool, ..rig.job(2, Direction::Store, &[0]) }).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(witness.upgrade().is_some(), "the pool was let go while a job was at work in it");
    gate.open();
    assert!(matches!(rig.finish(&[1])[0].outcomes[0], Outcome::Stored { .. }));
    // The only thread releases a job before it takes the next.
    rig.engine.submit(rig.job(3, Direction::Store, &[0])).unwrap();
    rig.finish(&[3]);
    assert!(witness.upgrade().is_none(), "the pool was kept after its last job");
}

#[test]
fn dropping_the_engine_joins_its_threads_and_lets_go_of_everything() {
    let rig = Rig::with_pages(1 << 20, 3, 64);
    let (memory, witness) = Memory::with_witness((BLOCKS as usize) << 20);
    let pool = rig.engine.attach_pool(memory).unwrap();
    let alive = Arc::new(());
    let blocks: Vec<_> = (0..BLOCKS).collect();
    for id in 0..50 {
        let held = alive.clone();
        let guard = Probe(move |_| Arc::strong_count(&held) > 0, |_, _| true);
        let direction = if id % 2 == 0 { Direction::Store } else { Direction::Load };
        rig.engine.submit(Job { pool, guard: Some(Box::new(guard)), ..rig.job(id, direction, &blocks) }).unwrap();
    }
    drop(rig.engine);
    assert_eq!(Arc::strong_count(&alive), 1, "a job outlived the engine");
    assert!(witness.upgrade().is_none(), "the pool outlived the engine");
}

// --- the benchmark --------------------------------------------------------------------------------------------

#[test]
fn the_benchmark_measures_and_checks_stores_and_loads_of_each_shape() {
    let shapes = vec![Shape { fragments: 1, fragment_bytes: 64 << 10 }, Shape { fragments: 3, fragment_bytes: 5000 }];
    let small = CopyBench { threads: 2, working_set_bytes: 1 << 20, pairs: 3, shapes, ..CopyBench::default() };
    let mut told = 0;
    let rows = bench::run(&small, |_| told += 1).unwrap();
    let varied = |row: &bench::Row| (row.direction, row.size_bytes, row.fragments);
    let kinds = ["store", "load", "load, summed"];
    let expected = [(65_536, 1), (15_000, 3)].map(|(bytes, fragments)| kinds.map(|kind| (kind, bytes, fragments)));
    assert_eq!(rows.iter().map(varied).collect::<Vec<_>>(), expected.concat());
    assert_eq!(told, 6);
    for row in rows {
        let figures = [row.gb_per_s, row.baseline_gb_per_s, row.ratio, row.cpu_s_per_gb, row.baseline_cpu_s_per_gb];
        assert!(figures.iter().all(|figure| figure.is_finite() && *figure > 0.0), "{row:?}");
    }
}
