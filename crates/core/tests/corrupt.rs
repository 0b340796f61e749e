//! Blocks that are found to hold other bytes than were stored: dropped at once, out of use while they are held, and
//! taken when they are stored again.

mod common;

use common::{At, ENGINE, Rig, SMALL, group, hash, layout};
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::LeaseId;
use forebay_core::miss::MissReason;
use forebay_core::stats::Finder;
use forebay_core::store::CommitOutcome;
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits};
use forebay_core::{BlockKey, Effect, ErrorKind, Generation, NamespaceId, NamespaceIndex, SlotId};

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
    assert_eq!(rig.core.stats().corrupt, [0, 0, 1, 0, 0, 0]);
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
    let fenced = Effect::Fenced { slot };
    assert!(rig.effects().contains(&fenced), "a restart would take it for a block");
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

#[test]
fn a_suspected_block_is_compared_first_and_nobody_is_answered_with_it_meanwhile() {
    for is_whole in [true, false] {
        let mut rig = Rig::new(2);
        let (ns, (slot, generation)) = stored(&mut rig);
        let (_, lease) = rig.lease(ns, &[1]);
        rig.effects();
        assert!(rig.core.suspect(slot, generation));
        assert!(!rig.core.suspect(slot, generation), "it is compared already");
        assert_eq!((rig.lease(ns, &[1]).0, rig.core.stats().corrupt), (0, [0; 6]));
        let effects = rig.effects();
        let [Effect::Verify { block, generation, finder, .. }] = effects[..] else { panic!("{effects:?}") };
        rig.core.verified(block, generation, is_whole, finder);
        assert_eq!(rig.is_resident(ns, 1), is_whole);
        assert_eq!(rig.core.stats().corrupt, [0, u64::from(!is_whole), 0, 0, 0, 0]);
        rig.core.release(ENGINE, lease);
        let again = rig.reserve(ns, 1)[0];
        let outcome = if is_whole { CommitOutcome::Duplicate } else { CommitOutcome::Stored };
        assert_eq!(rig.commit(ns, 1, None, again), outcome);
        assert_eq!((rig.core.stats().suspected, rig.core.stats().verified), (1, 0));
        rig.audit();
    }
}

#[test]
fn what_comes_up_for_several_ranks_is_a_hit_once_its_slices_were_compared() {
    let mut rig = Rig::new(2);
    let sliced = GroupLayout { rank_bytes: vec![SMALL / 2; 2], ..group(Attention::Full, SMALL) };
    let ns = rig.open(1, &Layout::new(vec![(0, sliced)]).unwrap());
    let tier = rig.core.open_tier(Limits::default());
    rig.core.tier_found(
        tier,
        rig.core.tier_hasher().hash(&BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(1) }),
    );
    rig.lease(ns, &[1]);
    let [.., Effect::Promote { block, generation, .. }] = rig.effects()[..] else { panic!("nothing comes up") };
    assert!(rig.core.promoted(block, generation, Outcome::Loaded { length_bytes: SMALL, checksum: 1 }));
    assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::NotYet));
    let verify = rig.effects().into_iter().find(|effect| matches!(effect, Effect::Verify { .. }));
    let Some(Effect::Verify { block, generation, finder, .. }) = verify else { panic!("nothing to compare") };
    assert_eq!((rig.core.slices(block), finder), ([SMALL / 2; 2].as_slice(), Finder::Tier));
    rig.core.verified(block, generation, true, finder);
    assert!(rig.is_resident(ns, 1));
    rig.audit();
}

#[test]
fn a_block_that_a_tier_gave_damaged_is_counted_as_found_by_a_tier() {
    let mut rig = Rig::new(2);
    let ns = rig.open(1, &layout(SMALL));
    let tier = rig.core.open_tier(Limits::default());
    rig.core.tier_found(
        tier,
        rig.core.tier_hasher().hash(&BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(1) }),
    );
    rig.lease(ns, &[1]);
    let [.., Effect::Promote { block, generation, .. }] = rig.effects()[..] else { panic!("nothing comes up") };
    assert!(!rig.core.promoted(block, generation, Outcome::Failed(ErrorKind::Corrupt)));
    assert_eq!((rig.core.tier_report(tier).stats.corrupt, rig.core.stats().corrupt), (1, [0, 0, 0, 0, 0, 1]));
    rig.audit();
}

#[test]
fn a_block_that_a_tier_would_not_write_for_its_checksum_is_compared() {
    let mut rig = Rig::new(2);
    let tier = rig.core.open_tier(Limits { admission: Admission::All, ..Limits::default() });
    let ns = rig.open(1, &layout(SMALL));
    let at = rig.reserve(ns, 1)[0];
    rig.commit(ns, 1, None, at);
    let [.., Effect::WriteBack { block, .. }] = rig.effects()[..] else { panic!("nothing is written") };
    rig.core.written_back(tier, block, Outcome::Failed(ErrorKind::Corrupt));
    let effects = rig.effects();
    let [.., Effect::Verify { block, generation, finder, .. }] = effects[..] else { panic!("{effects:?}") };
    rig.core.verified(block, generation, false, finder);
    assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::Failed));
    assert_eq!(rig.core.stats().corrupt, [0, 0, 0, 0, 0, 1]);
    rig.audit();
}
