//! Slots: sizes, limits, recovery after a restart, and who may use each slot.

use super::record::State;
use super::{Block, Run, Slots, Space};
use crate::journal::Journal;
use crate::key::{BlockHash, BlockId, ClassId, Generation, Instance, NamespaceIndex, SlotId};

const REGISTRATION_BYTES: u64 = 1 << 30;

fn populated(unit_bytes: u64, units: u32) -> Space {
    let mut space = Space::new(unit_bytes, units);
    (0..units).for_each(|unit| space.populate(unit));
    space
}

/// Bytes lost at the end of an extent of this length.
fn lost(slot_bytes: u64, extent_bytes: u64) -> u64 {
    extent_bytes % slot_bytes
}

#[test]
fn an_extent_loses_at_most_five_percent_where_some_length_does() {
    for (unit_bytes, units) in [(256 << 20, 16), (16 << 20, 256), (2 << 20, 1024), (64 << 10, 1024)] {
        for kib in [4, 16, 20, 100, 256, 1000, 1024, 2304, 5000, 10_240, 40_960, 61_440, 102_400, 307_200, 524_288] {
            let mut space = populated(unit_bytes, units);
            let slot_bytes = kib * 1024;
            let Some(class) = space.class(slot_bytes) else { continue };
            let extent = space.grow(class, 0).expect("the pool is empty");
            let extent = space.extent(extent);
            let bytes = u64::from(extent.units) * unit_bytes;
            let lengths = (0..).map(|bits| unit_bytes << bits).take_while(|bytes| *bytes <= REGISTRATION_BYTES);
            let fitting = lengths.filter(|bytes| *bytes >= slot_bytes && *bytes <= unit_bytes * u64::from(units));
            let least = fitting.map(|bytes| lost(slot_bytes, bytes) as f64 / bytes as f64).fold(1.0, f64::min);
            let share = lost(slot_bytes, bytes) as f64 / bytes as f64;
            assert!(share <= least.max(0.05), "{kib} KiB in {bytes} bytes loses {share}, {least} were possible");
            assert_eq!(u64::from(extent.slots), bytes / slot_bytes);
        }
    }
}

#[test]
fn no_extent_crosses_a_registration_and_no_slot_an_extent() {
    for slot_bytes in [16 << 10, 5000 << 10, 40 << 20, 300 << 20] {
        let mut space = populated(128 << 20, 24);
        let class = space.class(slot_bytes).unwrap();
        let mut slots = Vec::new();
        while let Some(extent) = space.grow(class, 0) {
            let extent = space.extent(extent);
            let start = u64::from(extent.first_unit) * (128 << 20);
            let end = start + u64::from(extent.units) * (128 << 20);
            assert_eq!(start / REGISTRATION_BYTES, (end - 1) / REGISTRATION_BYTES, "{slot_bytes}");
            for _ in 0..extent.slots {
                let slot = space.take(class, BlockId(slots.len() as u32)).unwrap();
                assert!((start..end).contains(&slot.offset()) && slot.offset() + slot_bytes <= end, "{slot:?}");
                slots.push(slot);
            }
        }
        slots.sort();
        assert!(slots.windows(2).all(|pair| pair[0].offset() + slot_bytes <= pair[1].offset()), "slots overlap");
        assert_eq!(space.take(class, BlockId(0)), None);
    }
}

#[test]
fn memory_that_is_not_there_is_not_used() {
    let mut space = Space::new(64 << 10, 8);
    let class = space.class(40 << 10).unwrap();
    assert_eq!(space.grow(class, 0), None);
    space.populate(5);
    space.populate(5);
    let extent = space.grow(class, 0).unwrap();
    assert_eq!((space.extent(extent).first_unit, space.extent(extent).units), (5, 1));
    assert_eq!(space.grow(class, 0), None);
    assert_eq!(space.populated_bytes(), 64 << 10);
}

#[test]
fn sizes_that_no_run_could_hold_have_no_class() {
    for (units, largest) in [(1, 1), (2, 2), (3, 2), (7, 4), (20_000, 16_384)] {
        let mut space = Space::new(64 << 10, units);
        assert_eq!(space.max_slot_bytes(), largest * (64 << 10), "{units} units");
        assert!(space.class(largest * (64 << 10)).is_some());
        assert!(space.class(largest * (64 << 10) + 4096).is_none());
    }
    let mut none = Space::new(64 << 10, 0);
    assert!(none.class(4096).is_none());
    assert!(populated(64 << 10, 4).class(0).is_none());
    assert!(populated(64 << 10, 4).class(100).is_none());
}

#[test]
fn a_restored_extent_gives_exactly_what_is_left_of_it() {
    let mut space = Space::new(64 << 10, 4);
    let extent = space.restore(12 << 10, 2, 1).unwrap();
    let slots = space.extent(extent).slots;
    assert_eq!(slots, 5);
    let first = 2 * 16;
    for (slot, is_slot) in [(first + 12, true), (first, true), (first + 1, false), (first + 15, false), (0, false)] {
        assert_eq!(space.restore_slot(SlotId(slot), BlockId(slot)).is_some(), is_slot, "page {slot}");
    }
    assert_eq!(space.restore_slot(SlotId(first), BlockId(9)), None, "it is taken");
    let class = space.class(12 << 10).unwrap();
    assert_eq!(space.take(class, BlockId(1)), None, "nothing is handed out before all is restored");
    space.finish_restore();
    let mut left: Vec<u32> = std::iter::from_fn(|| space.take(class, BlockId(1))).map(|slot| slot.0 - first).collect();
    left.sort_unstable();
    assert_eq!(left, [3, 6, 9]);
    assert_eq!(space.block_at(SlotId(first + 12)), Some(BlockId(first + 12)));
    assert_eq!(space.class_info(class).used, 5);
}

#[test]
fn units_of_a_run_go_to_nobody_before_all_of_them_are_empty() {
    let mut space = populated(64 << 10, 4);
    let (small, large) = (space.class(4 << 10).unwrap(), space.class(256 << 10).unwrap());
    let fill = |space: &mut Space, class: ClassId| {
        let extent = space.grow(class, 0).unwrap();
        (extent, space.take(class, BlockId(0)).unwrap())
    };
    // Two of four units are free.
    let (one, first) = fill(&mut space, small);
    (0..15).for_each(|_| assert!(space.take(small, BlockId(0)).is_some()));
    let (other, second) = fill(&mut space, small);
    let run = space.run_around(other, large).unwrap();
    assert_eq!(run, Run { first_unit: 0, units: 4 });
    assert_eq!(space.drain(run), []);
    assert_eq!(space.take(small, BlockId(1)), None, "nothing is taken from draining extents");
    assert_eq!((space.grow(small, 0), space.grow(large, 0)), (None, None), "free units are kept for the run");
    (0..16).for_each(|at| assert_eq!(space.free(SlotId(first.0 + at)), (at == 15).then_some(one)));
    space.give_back(one);
    assert!(!space.finish_drain(run));
    assert_eq!((space.grow(small, 0), space.grow(large, 0)), (None, None), "so are those that got empty");
    assert_eq!(space.run_around(other, small), None, "a run is drained once");
    assert_eq!(space.free(second), Some(other));
    space.give_back(other);
    assert!(space.finish_drain(run));
    let extent = space.grow(large, 0).unwrap();
    assert_eq!((space.extent(extent).units, space.extent(extent).slots), (4, 1));
}

#[test]
fn a_drain_that_is_given_up_leaves_all_as_it_was() {
    let mut space = populated(64 << 10, 4);
    let (small, other) = (space.class(4 << 10).unwrap(), space.class(16 << 10).unwrap());
    let large = space.class(256 << 10).unwrap();
    let [_, _, empty] = [small, other, small].map(|class| space.grow(class, 0).unwrap());
    // The latest extent is filled first.
    let taken: Vec<SlotId> = (0..32).map(|_| space.take(small, BlockId(0)).unwrap()).collect();
    let kept = space.take(other, BlockId(1)).unwrap();
    let run = space.run_around(empty, large).unwrap();
    assert_eq!(space.drain(run), []);
    (0..16).for_each(|at| assert_eq!(space.free(taken[at]), (at == 15).then_some(empty)));
    space.give_back(empty);
    assert!(!space.finish_drain(run));
    assert!(!space.has_free_in(run, small) && space.has_free_in(run, other) && !space.has_free_in(run, large));
    space.give_up_drain(run);
    assert_eq!([small, other].map(|class| space.class_info(class).slots), [16, 4]);
    assert!(!space.has_free(small));
    assert_eq!(space.free(taken[20]), None);
    assert_eq!(space.take(small, BlockId(2)), Some(taken[20]));
    assert_eq!((0..3).filter_map(|_| space.take(other, BlockId(3))).count(), 3);
    assert_eq!((space.take(other, BlockId(3)), space.block_at(kept)), (None, Some(BlockId(1))));
    assert!(space.grow(other, 0).is_some() && space.grow(small, 0).is_some() && space.grow(small, 0).is_none());
}

const STATES: [State; 8] = [
    State::Vacant,
    State::Reserved,
    State::Unverified,
    State::Verifying,
    State::Promoting,
    State::Moving,
    State::Ready,
    State::Fenced,
];

fn in_state(state: State) -> Block {
    Block { state, ..Block::new(ClassId(0), Generation(1), 0) }
}

#[test]
fn a_state_changes_as_the_table_says_and_no_other_way() {
    let changes = |from: State| -> Vec<State> {
        let may = |to: &State| std::panic::catch_unwind(|| in_state(from).transition(*to)).is_ok();
        STATES.into_iter().filter(may).collect()
    };
    use State::{Fenced, Moving, Promoting, Ready, Reserved, Unverified, Vacant, Verifying};
    assert_eq!(changes(Vacant), [Reserved, Unverified, Promoting, Moving, Fenced]);
    assert_eq!(changes(Reserved), [Vacant, Ready]);
    assert_eq!(changes(Unverified), [Vacant, Verifying, Fenced]);
    assert_eq!(changes(Verifying), [Ready, Fenced]);
    assert_eq!(changes(Promoting), [Ready, Fenced]);
    assert_eq!(changes(Moving), [Vacant]);
    assert_eq!(changes(Ready), [Vacant, Verifying, Fenced]);
    assert_eq!(changes(Fenced), [Vacant, Reserved]);
}

/// Slots of one class of a page, and one block that is ready.
fn one_ready() -> (Slots, BlockId, Journal) {
    let (mut slots, mut journal) = (Slots::new(64 << 10, 1, 1), Journal::default());
    slots.populate(0);
    let class = slots.class(4096).unwrap();
    assert!(slots.grow(class, &mut journal));
    let (slot, _) = slots.reserve(Instance(3), class, Instance(3).bit(), &mut journal);
    let block = slots.space().block_at(slot).unwrap();
    assert_eq!((slots.reservation_count(Instance(3)), slots.reserved_bytes()), (1, 4096));
    slots.commit(block, NamespaceIndex(0), 0, BlockHash::new(&[1]).unwrap(), 7, &mut journal);
    assert_eq!((slots.reservation_count(Instance(3)), slots.reserved_bytes()), (0, 0));
    (slots, block, journal)
}

#[test]
fn a_fenced_slot_is_free_when_its_last_holder_lets_go() {
    let (mut slots, block, mut journal) = one_ready();
    slots.pin(block, Some(Instance(1)), &mut journal);
    slots.pin(block, None, &mut journal);
    slots.fence(block, &mut journal);
    assert_eq!((slots.fenced_count(), slots.tally(ClassId(0)).fenced, slots.pinned_bytes()), (1, 1, 4096));
    assert!(!slots.unpin(block, &mut journal));
    assert!(slots.unpin(block, &mut journal));
    let slot = slots[block].slot;
    assert_eq!(slots.free(block, &mut journal), None);
    assert_eq!((slots.fenced_count(), slots.tally(ClassId(0)).fenced, slots.pinned_bytes()), (0, 0, 0));
    assert!(slots.space().is_free(slot));
}

#[test]
fn who_comes_back_keeps_what_it_names_and_the_rest_is_named_oldest_first() {
    let (mut slots, ready, mut journal) = one_ready();
    let class = slots[ready].class;
    let mut reserve = |slots: &mut Slots| slots.reserve(Instance(3), class, 0, &mut journal).0;
    let taken: Vec<SlotId> = (0..5).map(|_| reserve(&mut slots)).collect();
    let taken: Vec<BlockId> = taken.into_iter().map(|slot| slots.space().block_at(slot).unwrap()).collect();
    let undeclared = slots.declare(Instance(3), &[taken[1], taken[3]]);
    assert_eq!(undeclared, [taken[0], taken[2], taken[4]]);
    undeclared.into_iter().for_each(|block| assert_eq!(slots.free(block, &mut journal), None));
    assert_eq!(slots.reservations(Instance(3)), [taken[1], taken[3]]);
    assert_eq!((slots.reserved_bytes(), slots.count()), (2 * 4096, 3));
}

#[test]
#[should_panic(expected = "is freed in somebody's hand")]
fn a_held_block_is_not_freed() {
    let (mut slots, block, mut journal) = one_ready();
    slots.pin(block, None, &mut journal);
    let _ = slots.free(block, &mut journal);
}
