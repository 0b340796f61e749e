//! The suite that every tier passes. It tests a real tier for what [`Tier`] promises.
//!
//! [`check`] runs all claims that apply to the tier's capabilities, and panics with the claim that is broken. A
//! [`Bed`] provides the tier and its memory. Where possible, it can also reopen the tier and damage a stored block.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, ErrorKind, Generation, NamespaceId, PAGE_BYTES, SlotId};

use crate::uring::Region;

/// No operation of a healthy tier takes longer.
const DEADLINE: Duration = Duration::from_secs(60);
/// The suite's slots: this many of [`SLOT_BYTES`], from the start of the memory.
pub const SLOTS: u64 = 64;
/// Bytes of one slot: the longest block of the suite.
pub const SLOT_BYTES: u64 = 256 << 10;
/// Lengths around the borders of pages and of the pieces into which a tier may cut blocks.
const LENGTHS: [u64; 8] = [1, 511, 4096, 4097, 65_536, 100_003, SLOT_BYTES - 1, SLOT_BYTES];

/// A tier under test.
pub trait Bed {
    /// The open tier.
    fn tier(&mut self) -> &mut dyn Tier;
    /// The memory with the slots: at least [`SLOTS`] × [`SLOT_BYTES`].
    fn pool(&self) -> Region;
    /// Lets a little time pass for the tier.
    fn turn(&mut self) {}
    /// Closes the tier without a clean shutdown, and opens it again. Called for durable tiers only.
    fn reopen(&mut self);
    /// Changes a byte of the stored block on the medium; false if this bed cannot.
    fn damage(&mut self, _key: &BlockKey, _length_bytes: u64) -> bool {
        false
    }
}

/// See the module documentation.
pub fn check(bed: &mut dyn Bed) {
    let capabilities = bed.tier().capabilities();
    an_absent_block_is_absent(&mut Suite::new(bed, 1));
    if capabilities.can_store {
        what_was_stored_comes_back_byte_for_byte(&mut Suite::new(bed, 2));
        a_load_leaves_other_slots_alone(&mut Suite::new(bed, 3));
        what_does_not_fit_is_refused_and_asked_again(&mut Suite::new(bed, 4));
        a_second_store_of_a_block_is_stored(&mut Suite::new(bed, 5));
        a_cancelled_operation_still_completes_once(&mut Suite::new(bed, 6));
        a_load_of_another_length_touches_nothing(&mut Suite::new(bed, 7));
        a_damaged_block_is_corrupt_and_never_data(&mut Suite::new(bed, 8));
    }
    if capabilities.can_store && capabilities.can_remove {
        a_removed_block_is_absent(&mut Suite::new(bed, 9), capabilities);
    }
    if capabilities.can_touch {
        a_touched_block_stays_as_it_is_and_an_absent_one_is_absent(&mut Suite::new(bed, 11), capabilities);
    } else {
        a_tier_that_takes_no_touches_says_so(&mut Suite::new(bed, 11));
    }
    if capabilities.can_store && capabilities.is_durable {
        what_was_stored_is_found_after_a_restart(&mut Suite::new(bed, 10));
    }
    assert_eq!(bed.tier().health(), Health::Healthy, "a tier on which nothing failed is healthy");
}

fn an_absent_block_is_absent(suite: &mut Suite) {
    let load = suite.load(1, 0, 4096);
    let find = suite.find(1);
    assert_eq!(suite.run(&[load, find]), [Outcome::Absent, Outcome::Absent]);
}

fn what_was_stored_comes_back_byte_for_byte(suite: &mut Suite) {
    for (number, length_bytes) in (0..).zip(LENGTHS) {
        suite.store_all(&[(number, length_bytes)]);
        suite.verify(number, length_bytes, 40);
        let find = suite.find(number);
        let found = suite.run(&[find])[0];
        assert!(matches!(found, Outcome::Found), "a stored block is found, not {found:?}");
    }
}

fn a_load_leaves_other_slots_alone(suite: &mut Suite) {
    let length_bytes = 5000;
    suite.store_all(&[(1, length_bytes)]);
    for slot in 20..23 {
        suite.fill(slot, 0xEE);
    }
    suite.verify(1, length_bytes, 21);
    assert!(suite.is_filled(20, 0xEE, 0) && suite.is_filled(22, 0xEE, 0), "a load stays in its slot");
    let padded_bytes = length_bytes.next_multiple_of(PAGE_BYTES);
    assert!(suite.is_filled(21, 0xEE, padded_bytes), "a load ends with its last page");
    // When the load is over, the slot belongs to its owner again.
    suite.fill(21, 0x11);
    for other in 30..34 {
        suite.verify(1, length_bytes, other);
    }
    assert!(suite.is_filled(21, 0x11, 0), "a load's bytes are not touched after its completion");
}

/// Many more operations than any queue takes, all of them from one batch.
fn what_does_not_fit_is_refused_and_asked_again(suite: &mut Suite) {
    let blocks: Vec<(u64, u64)> = (100..600).map(|number| (number, 4096)).collect();
    suite.store_all(&blocks);
    // Each slot is always filled with the same block: two blocks in one slot would be the caller's fault.
    let loads: Vec<Operation> = (0..20_000).map(|i| suite.load(100 + i % SLOTS, i % SLOTS, 4096)).collect();
    let outcomes = suite.run(&loads);
    let is_loaded = |outcome: &Outcome| matches!(outcome, Outcome::Loaded { length_bytes: 4096, .. });
    assert!(outcomes.iter().all(is_loaded), "a full queue refuses, it loses nothing");
}

fn a_second_store_of_a_block_is_stored(suite: &mut Suite) {
    suite.store_all(&[(1, 9000)]);
    suite.store_all(&[(1, 9000)]);
    suite.verify(1, 9000, 5);
}

fn a_cancelled_operation_still_completes_once(suite: &mut Suite) {
    let blocks: Vec<(u64, u64)> = (1..40).map(|number| (number, 4096)).collect();
    suite.store_all(&blocks);
    let loads: Vec<Operation> = (1..40).map(|number| suite.load(number, number, 4096)).collect();
    let taken = suite.bed.tier().submit(&loads);
    suite.bed.tier().cancel(OpId(u64::MAX));
    loads[..taken].iter().for_each(|op| suite.bed.tier().cancel(op.id));
    for (op, outcome) in loads.iter().zip(suite.finish(&loads[..taken])) {
        match outcome {
            Outcome::Loaded { length_bytes, .. } => assert_eq!(length_bytes, 4096),
            Outcome::Failed(ErrorKind::Timeout | ErrorKind::Unavailable) => {}
            other => panic!("a cancelled load ends loaded or failed, not {other:?} ({op:?})"),
        }
    }
}

fn a_load_of_another_length_touches_nothing(suite: &mut Suite) {
    suite.store_all(&[(1, 20_000)]);
    suite.fill(9, 0x77);
    let load = suite.load(1, 9, 4096);
    let outcome = suite.run(&[load])[0];
    assert_eq!(outcome, Outcome::Failed(ErrorKind::Invalid), "the block is not damaged, but of another length");
    assert!(suite.is_filled(9, 0x77, 0), "a refused load writes nothing");
}

fn a_damaged_block_is_corrupt_and_never_data(suite: &mut Suite) {
    for (number, length_bytes) in [(1, 1), (2, 4096), (3, SLOT_BYTES)] {
        suite.store_all(&[(number, length_bytes)]);
        let key = suite.key(number);
        if !suite.bed.damage(&key, length_bytes) {
            return;
        }
        let load = suite.load(number, 3, length_bytes);
        assert_eq!(suite.run(&[load]), [Outcome::Failed(ErrorKind::Corrupt)], "damage of block {number} shows");
        // The block can be stored again.
        suite.store_all(&[(number, length_bytes)]);
        suite.verify(number, length_bytes, 4);
    }
}

fn a_removed_block_is_absent(suite: &mut Suite, capabilities: Capabilities) {
    suite.store_all(&[(1, 4096), (2, 4096)]);
    let remove = suite.remove(1);
    assert_eq!(suite.run(&[remove]), [Outcome::Removed]);
    let (find, load) = (suite.find(1), suite.load(1, 0, 4096));
    assert_eq!(suite.run(&[find, load]), [Outcome::Absent, Outcome::Absent]);
    let again = suite.remove(1);
    assert_eq!(suite.run(&[again]), [Outcome::Absent], "what is not there cannot be removed");
    if capabilities.is_durable {
        suite.bed.reopen();
        let find = suite.find(1);
        assert_eq!(suite.run(&[find]), [Outcome::Absent], "a restart brings no removed block back");
    }
    suite.verify(2, 4096, 0);
    suite.store_all(&[(1, 4096)]);
    suite.verify(1, 4096, 0);
}

fn a_touched_block_stays_as_it_is_and_an_absent_one_is_absent(suite: &mut Suite, capabilities: Capabilities) {
    let absent = suite.touch(99, 4096);
    assert_eq!(suite.run(&[absent]), [Outcome::Absent]);
    if !capabilities.can_store {
        return;
    }
    for (number, length_bytes) in (0..).zip(LENGTHS) {
        suite.store_all(&[(number, length_bytes)]);
        let touch = suite.touch(number, length_bytes);
        let touched = suite.run(&[touch])[0];
        assert!(matches!(touched, Outcome::Found), "a stored block is there when it is touched, not {touched:?}");
        suite.verify(number, length_bytes, 41);
    }
    let touches: Vec<Operation> = (0..500).map(|i| suite.touch(i % 8, LENGTHS[i as usize % 8])).collect();
    let is_found = |outcome: &Outcome| matches!(outcome, Outcome::Found);
    assert!(suite.run(&touches).iter().all(is_found), "however often it is touched");
    if capabilities.can_remove {
        let (remove, touch) = (suite.remove(2), suite.touch(2, LENGTHS[2]));
        suite.run(&[remove]);
        assert_eq!(suite.run(&[touch]), [Outcome::Absent], "a touch brings nothing back");
    }
}

fn a_tier_that_takes_no_touches_says_so(suite: &mut Suite) {
    let touch = suite.touch(1, 4096);
    assert_eq!(suite.run(&[touch]), [Outcome::Failed(ErrorKind::Unsupported)]);
}

fn what_was_stored_is_found_after_a_restart(suite: &mut Suite) {
    let blocks: Vec<(u64, u64)> = (0..).zip(LENGTHS).collect();
    suite.store_all(&blocks);
    for _ in 0..2 {
        suite.bed.reopen();
        for (number, length_bytes) in &blocks {
            suite.verify(*number, *length_bytes, 7);
        }
    }
}

/// One claim's own keys, and the operations it has asked for.
struct Suite<'a> {
    bed: &'a mut dyn Bed,
    namespace: u128,
    next_id: u64,
}

impl<'a> Suite<'a> {
    fn new(bed: &'a mut dyn Bed, claim: u64) -> Suite<'a> {
        Suite { bed, namespace: u128::from(claim), next_id: claim << 32 }
    }

    fn key(&self, number: u64) -> BlockKey {
        let hash = BlockHash::new(&checksum(&number.to_le_bytes()).to_le_bytes()).expect("eight bytes");
        BlockKey { namespace: NamespaceId(self.namespace), group: number as u16, hash }
    }

    /// The bytes of a block. They depend on key and position, so that no other block's bytes pass for them.
    fn bytes(&self, number: u64, length_bytes: u64) -> Vec<u8> {
        let mut seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.namespace as u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        };
        (0..length_bytes).map(|_| next()).collect()
    }

    fn operation(&mut self, kind: OpKind, number: u64) -> Operation {
        self.next_id += 1;
        let key = self.key(number);
        Operation { id: OpId(self.next_id), kind, key, slot: None, length_bytes: 0, checksum: 0, lineage: None }
    }

    fn load(&mut self, number: u64, slot: u64, length_bytes: u64) -> Operation {
        let op = self.operation(OpKind::Load, number);
        Operation { slot: Some((slot_id(slot), Generation(1))), length_bytes, ..op }
    }

    fn find(&mut self, number: u64) -> Operation {
        self.operation(OpKind::Exists, number)
    }

    fn touch(&mut self, number: u64, length_bytes: u64) -> Operation {
        Operation { length_bytes, ..self.operation(OpKind::Touch { fresh_seconds: 0 }, number) }
    }

    fn remove(&mut self, number: u64) -> Operation {
        self.operation(OpKind::Remove, number)
    }

    /// Stores blocks from slots that it fills for them, at most as many at once as there are slots.
    fn store_all(&mut self, blocks: &[(u64, u64)]) {
        for some in blocks.chunks(SLOTS as usize) {
            let mut stores = Vec::new();
            for (slot, (number, length_bytes)) in (0..).zip(some) {
                let bytes = self.bytes(*number, *length_bytes);
                self.bed.pool().write(slot * SLOT_BYTES, &bytes);
                let op = self.operation(OpKind::Store, *number);
                let slot = Some((slot_id(slot), Generation(1)));
                stores.push(Operation { slot, length_bytes: *length_bytes, checksum: checksum(&bytes), ..op });
            }
            for outcome in self.run(&stores) {
                assert!(matches!(outcome, Outcome::Stored), "a block that fits is stored, not {outcome:?}");
            }
        }
    }

    fn verify(&mut self, number: u64, length_bytes: u64, slot: u64) {
        let expected = self.bytes(number, length_bytes);
        let load = self.load(number, slot, length_bytes);
        let outcome = self.run(&[load])[0];
        let loaded = Outcome::Loaded { length_bytes, checksum: checksum(&expected) };
        assert_eq!(outcome, loaded, "block {number} of {length_bytes} bytes is there");
        let mut bytes = vec![0; length_bytes as usize];
        self.bed.pool().read(slot * SLOT_BYTES, &mut bytes);
        assert!(bytes == expected, "block {number} of {length_bytes} bytes came back as other bytes");
    }

    fn fill(&mut self, slot: u64, byte: u8) {
        self.bed.pool().write(slot * SLOT_BYTES, &vec![byte; SLOT_BYTES as usize]);
    }

    fn is_filled(&self, slot: u64, byte: u8, from: u64) -> bool {
        let mut bytes = vec![0; (SLOT_BYTES - from) as usize];
        self.bed.pool().read(slot * SLOT_BYTES + from, &mut bytes);
        bytes.iter().all(|found| *found == byte)
    }

    /// Submits all of `ops`, in as many steps as the tier needs, and returns the outcomes in the same order.
    fn run(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        let (mut outcomes, mut taken, begun) = (HashMap::new(), 0, Instant::now());
        while outcomes.len() < ops.len() {
            let more = self.bed.tier().submit(&ops[taken..]);
            assert!(more <= ops.len() - taken, "a tier takes a prefix");
            taken += more;
            self.collect(&ops[..taken], &mut outcomes);
            assert!(begun.elapsed() < DEADLINE, "{} of {} operations did not complete", outcomes.len(), ops.len());
        }
        self.nothing_more(&outcomes);
        ops.iter().map(|op| outcomes[&op.id]).collect()
    }

    /// The outcomes of operations that the tier accepted.
    fn finish(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        let (mut outcomes, begun) = (HashMap::new(), Instant::now());
        while outcomes.len() < ops.len() {
            self.collect(ops, &mut outcomes);
            assert!(begun.elapsed() < DEADLINE, "{} of {} operations did not complete", outcomes.len(), ops.len());
        }
        self.nothing_more(&outcomes);
        ops.iter().map(|op| outcomes[&op.id]).collect()
    }

    fn collect(&mut self, taken: &[Operation], outcomes: &mut HashMap<OpId, Outcome>) {
        let mut completions = Vec::new();
        self.bed.turn();
        self.bed.tier().poll(&mut completions);
        for Completion { id, outcome } in completions {
            let is_known =
                taken.first().is_some_and(|first| id >= first.id) && taken.last().is_some_and(|last| id <= last.id);
            assert!(is_known, "{id:?} completed and was not taken");
            let earlier = outcomes.insert(id, outcome);
            assert!(earlier.is_none(), "{id:?} completed twice: {earlier:?}, {outcome:?}");
        }
    }

    fn nothing_more(&mut self, outcomes: &HashMap<OpId, Outcome>) {
        let mut completions = Vec::new();
        self.bed.turn();
        self.bed.tier().poll(&mut completions);
        assert!(completions.is_empty(), "{completions:?} completed beside all {} that were asked", outcomes.len());
    }
}

fn slot_id(slot: u64) -> SlotId {
    SlotId((slot * SLOT_BYTES / PAGE_BYTES) as u32)
}
