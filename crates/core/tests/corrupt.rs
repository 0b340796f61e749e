//! Blocks that are found to hold other bytes than were stored: dropped at once, out of use while they are held, and
//! taken when they are stored again.

mod common;

use common::{At, ENGINE, Rig, SMALL, layout};
use forebay_core::block::NamespaceIndex;
use forebay_core::corrupt::Finder;
use forebay_core::load::LeaseId;
use forebay_core::miss::MissReason;
use forebay_core::store::CommitOutcome;
use forebay_core::{Effect, Generation, SlotId};

/// A ready block of key 1, and where it lies.
fn stored(rig: &mut Rig) -> (NamespaceIndex, At) {
    let ns = rig.open(1, &layout(SMALL));
    let at = rig.reserve(ns, 1)[0];
    assert_eq!(rig.commit(ns, 1, None, at), CommitOutcome::Stored);
    rig.effects();
    (ns, at)
}

#[test]
fn a_corrupt_block_is_a_miss_that_is_counted_and_the_next_store_of_it_is_taken() {
    let mut rig = Rig::new(2);
    let (ns, (slot, generation)) = stored(&mut rig);
    assert!(rig.core.drop_corrupt(slot, generation, Finder::Get));
    assert!(matches!(rig.effects()[..], [Effect::Freed { slot: freed, .. }] if freed == slot));
    assert_eq!(rig.core.stats().corrupt, [0, 0, 1, 0, 0]);
    assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::Failed));
    let again = rig.reserve(ns, 1)[0];
    assert_eq!(rig.commit(ns, 1, None, again), CommitOutcome::Stored);
    assert!(rig.is_resident(ns, 1));
    rig.audit();
}

#[test]
fn the_slot_of_a_corrupt_block_is_free_only_after_its_last_reader() {
    let mut rig = Rig::new(2);
    let (ns, (slot, generation)) = stored(&mut rig);
    let leases: Vec<LeaseId> = (0..2).map(|_| rig.lease(ns, &[1]).1).collect();
    assert!(rig.core.drop_corrupt(slot, generation, Finder::Scrub));
    assert_eq!((rig.lease(ns, &[1]).0, rig.core.held().fenced_blocks), (0, 1));
    let is_freed = |effects: Vec<Effect>| effects.iter().any(|effect| matches!(effect, Effect::Freed { .. }));
    rig.core.release(ENGINE, leases[0]);
    assert!(!is_freed(rig.effects()), "the slot is free under the second lease");
    // The new block lies elsewhere.
    let again = rig.reserve(ns, 1)[0];
    assert_ne!(again.0, slot);
    assert_eq!(rig.commit(ns, 1, None, again), CommitOutcome::Stored);
    rig.effects();
    rig.core.release(ENGINE, leases[1]);
    assert!(is_freed(rig.effects()));
    assert_eq!((rig.core.held(), rig.is_resident(ns, 1)), (Default::default(), true));
    rig.audit();
}

#[test]
fn a_find_that_comes_twice_or_too_late_or_names_no_block_changes_nothing() {
    let mut rig = Rig::new(2);
    let (ns, (slot, generation)) = stored(&mut rig);
    let filling = rig.reserve(ns, 1)[0];
    rig.effects();
    let nowhere = [
        (slot, Generation(generation.0 + 1)),
        (slot, Generation(0)),
        filling,
        (SlotId(slot.0 + 7), generation),
        (SlotId(u32::MAX), generation),
    ];
    for (slot, generation) in nowhere {
        assert!(!rig.core.drop_corrupt(slot, generation, Finder::Scrub), "{slot:?} of {generation:?}");
    }
    assert!(rig.is_resident(ns, 1) && rig.effects().is_empty());
    let (_, lease) = rig.lease(ns, &[1]);
    assert!(rig.core.drop_corrupt(slot, generation, Finder::Scrub));
    assert!(!rig.core.drop_corrupt(slot, generation, Finder::Load), "its slot is fenced, and it is dropped already");
    rig.core.release(ENGINE, lease);
    assert!(!rig.core.drop_corrupt(slot, generation, Finder::Load));
    assert_eq!(rig.core.stats().corrupt.iter().sum::<u64>(), 1);
    rig.audit();
}
