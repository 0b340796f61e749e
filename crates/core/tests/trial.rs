//! Trials: namespaces of measurements and self-tests. What they store stays in the pool, counts nowhere, and goes.

mod common;

use common::{ENGINE, Rig, SMALL, UNIT_BYTES, layout};
use forebay_core::tiers::{Admission, Limits};
use forebay_core::{Effect, ErrorKind, NamespaceId, NamespaceIndex};

/// A disk and a shared store, both of which take every block.
fn rig() -> Rig {
    let mut rig = Rig::new(8);
    let all = Limits { admission: Admission::All, ..Limits::default() };
    rig.core.open_tier(all);
    rig.core.open_tier(Limits { is_shared: true, ..all });
    rig
}

fn open_trial(rig: &mut Rig, id: u128, bytes: u64) -> NamespaceIndex {
    rig.core.open_trial(NamespaceId(id), &layout(bytes)).expect("the layout fits")
}

fn store_and_look_up(rig: &mut Rig, namespace: NamespaceIndex) {
    assert_eq!(rig.store(namespace, None, &[1, 2, 3]), 3);
    for keys in [&[1, 2, 3][..], &[1, 2, 3], &[7, 8]] {
        let (_, lease) = rig.look(Some(ENGINE), namespace, 0, keys);
        rig.core.release(ENGINE, lease);
    }
    while rig.core.step() {}
}

fn goes_below(rig: &mut Rig) -> bool {
    let mut probes = Vec::new();
    rig.core.take_probes(&mut probes);
    let is_transfer = |effect: &Effect| matches!(effect, Effect::WriteBack { .. } | Effect::Promote { .. });
    let has_transfers = rig.effects().iter().any(is_transfer);
    !probes.is_empty() || has_transfers
}

#[test]
fn no_tier_gets_a_trials_blocks_or_is_asked_for_them() {
    let mut rig = rig();
    let kept = rig.open(1, &layout(SMALL));
    store_and_look_up(&mut rig, kept);
    assert!(goes_below(&mut rig), "a namespace that stays is written and asked for");
    let trial = open_trial(&mut rig, 2, SMALL);
    store_and_look_up(&mut rig, trial);
    assert!(!goes_below(&mut rig));
    rig.core.end_trial(trial);
    while rig.core.step() {}
    assert!(!rig.effects().iter().any(|effect| matches!(effect, Effect::PurgeTiers { .. })));
}

#[test]
fn a_trial_counts_nowhere() {
    let mut rig = rig();
    let trial = open_trial(&mut rig, 1, SMALL);
    store_and_look_up(&mut rig, trial);
    rig.core.end_trial(trial);
    while rig.core.step() {}
    let stats = rig.core.stats();
    assert_eq!((stats.lookups, stats.keys, stats.hits, stats.miss_count()), (0, 0, 0, 0));
    assert_eq!((stats.stored, stats.stored_bytes, stats.purged, stats.evicted), (0, 0, 0, 0));
    assert_eq!((stats.reserved, stats.short_reservations), (0, 0));
}

#[test]
fn nothing_is_evicted_for_a_trial() {
    let mut rig = Rig::new(8);
    let kept = rig.open(1, &layout(SMALL));
    let fits = 8 * UNIT_BYTES / SMALL;
    let keys: Vec<u64> = (0..fits).collect();
    keys.chunks(8).for_each(|keys| assert_eq!(rig.store(kept, None, keys), keys.len()));
    for bytes in [SMALL, 2 * SMALL] {
        let trial = open_trial(&mut rig, 2, bytes);
        assert_eq!(rig.reserve(trial, 1), [], "the pool is full");
        rig.core.end_trial(trial);
        while rig.core.step() {}
    }
    assert!(keys.iter().all(|key| rig.is_resident(kept, *key)));
    let before = rig.core.stats().evicted;
    assert_eq!((before, rig.store(kept, None, &[fits])), (0, 1), "who is no trial evicts");
    assert_eq!(rig.core.stats().evicted, 1);
    rig.audit();
}

#[test]
fn a_trial_that_has_ended_leaves_no_block_and_no_memory_of_its_size() {
    let mut rig = rig();
    let kept = rig.open(1, &layout(SMALL));
    assert_eq!(rig.store(kept, None, &[1]), 1);
    for bytes in [2 * SMALL, SMALL] {
        let before = rig.core.classes();
        let trial = open_trial(&mut rig, 2, bytes);
        store_and_look_up(&mut rig, trial);
        rig.core.end_trial(trial);
        assert_eq!(rig.core.namespaces().len(), 2, "it is listed until its blocks are gone");
        while rig.core.step() {}
        assert_eq!(rig.core.namespaces().len(), 1);
        assert_eq!(rig.core.resident_blocks(), 1);
        let with_memory = |class: &forebay_core::report::ClassReport| class.slots > 0;
        let after: Vec<_> = rig.core.classes().into_iter().filter(with_memory).collect();
        assert_eq!(after, before.into_iter().filter(with_memory).collect::<Vec<_>>(), "blocks of {bytes} bytes");
        rig.audit();
    }
    // All memory can be had by another size.
    let large = rig.open(3, &layout(16 * SMALL));
    assert!((0..7).all(|key| rig.store(large, None, &[key]) == 1));
    assert_eq!(rig.core.stats().evicted, 0);
}

#[test]
fn a_namespace_that_stays_never_becomes_a_trial_nor_a_trial_one_that_stays() {
    let mut rig = rig();
    rig.open(1, &layout(SMALL));
    let error = rig.core.open_trial(NamespaceId(1), &layout(SMALL)).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
    open_trial(&mut rig, 2, SMALL);
    let error = rig.core.open_namespace(NamespaceId(2), &layout(SMALL)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_trial_that_is_purged_stays_a_trial() {
    let mut rig = rig();
    let trial = open_trial(&mut rig, 1, SMALL);
    assert_eq!(rig.store(trial, None, &[1]), 1);
    let (_, _, new) = rig.core.purge(NamespaceId(1)).expect("it is known");
    assert!(rig.core.is_trial(new));
    store_and_look_up(&mut rig, new);
    assert!(!goes_below(&mut rig) && rig.core.stats().keys == 0);
    rig.core.end_trial(new);
    while rig.core.step() {}
    assert!(rig.core.namespaces().is_empty() && rig.core.resident_blocks() == 0);
}
