//! The core's answers, one story each: why keys miss, what is promised, what is refused, who goes first.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

use common::{At, ENGINE, LARGE, Rig, SMALL, UNIT_BYTES, group, hash, layout};
use forebay_core::layout::{Attention, Layout};
use forebay_core::lookup::{Answer, LeaseId, STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::policy;
use forebay_core::recover::{Recovered, Recovery};
use forebay_core::store::CommitOutcome;
use forebay_core::tiers::Limits;
use forebay_core::{BlockHash, BlockKey, Config, Core, Effect, ErrorKind, Generation, Instance, NamespaceId, SlotId};

/// Recovers `keys` as ready blocks of one extent of small slots; the daemon was restarted.
fn recovered(config: Config, keys: &[u64]) -> (Rig, forebay_core::NamespaceIndex) {
    let mut rig = Rig::of(Core::new(config));
    let ns = rig.open(1, &layout(SMALL));
    assert!(rig.core.restore_extent(SMALL, 0, 1));
    for (nth, key) in keys.iter().enumerate() {
        let key = Some((ns, 0, hash(*key)));
        let (slot, generation) = (SlotId(nth as u32), Generation(1));
        assert_eq!(rig.core.restore(Recovered { slot, generation, holders: 0, key }), Recovery::Block);
    }
    rig.core.finish_restore();
    (rig, ns)
}

#[test]
fn every_miss_has_its_reason() {
    for reason in MissReason::ALL {
        let mut rig = Rig::new(2);
        let ns = rig.open(1, &layout(SMALL));
        let (ns, key) = match reason {
            MissReason::NeverSeen => (ns, 1),
            MissReason::Evicted => {
                rig.store(ns, None, &[1]);
                (2..200).for_each(|key| assert_eq!(rig.store(ns, None, &[key]), 1));
                (ns, 1)
            }
            MissReason::Refused => {
                let at = rig.reserve(ns, 1)[0];
                assert_eq!(rig.commit(ns, 2, Some(1), at), CommitOutcome::Orphan);
                (ns, 2)
            }
            MissReason::NotYet => {
                let (recovered, ns) = recovered(Config::new(UNIT_BYTES, 2), &[1]);
                rig = recovered;
                (ns, 1)
            }
            MissReason::Failed => {
                let (recovered, ns) = recovered(Config::new(UNIT_BYTES, 2), &[1]);
                rig = recovered;
                assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::NotYet));
                let effects = rig.effects();
                let [Effect::Verify { block, generation, finder, .. }] = effects[..] else { panic!("{effects:?}") };
                rig.core.verified(block, generation, false, finder);
                (ns, 1)
            }
            MissReason::OtherNamespace => {
                rig.store(ns, None, &[1]);
                (rig.open(2, &layout(SMALL)), 1)
            }
            MissReason::OverLimit => {
                let keys: Vec<u64> = (0..31).collect();
                keys.chunks(4).for_each(|keys| assert_eq!(rig.store(ns, keys[0].checked_sub(1), keys), keys.len()));
                assert_eq!(rig.lease(ns, &keys).0, 16, "half of 32 slots may be promised");
                rig.store(ns, None, &[100]);
                (ns, 100)
            }
            MissReason::TooSlow | MissReason::PromotionUnfinished => {
                let tier = rig.core.open_tier(Limits::default());
                let key = BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(1) };
                rig.core.tier_found(tier, rig.core.tier_hasher().hash(&key));
                assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::PromotionUnfinished));
                if let (MissReason::TooSlow, [.., Effect::Promote { block, generation, .. }]) =
                    (reason, &rig.effects()[..])
                {
                    rig.core.give_up(*block, *generation);
                }
                (ns, 1)
            }
        };
        assert_eq!(rig.reason(ns, 0, key), Some(reason));
        rig.audit();
    }
}

#[test]
fn what_was_purged_is_reported_as_evicted_not_as_anothers() {
    let mut rig = Rig::new(2);
    let ns = rig.open(1, &layout(SMALL));
    rig.store(ns, None, &[1]);
    let (purged, old, new) = rig.core.purge(NamespaceId(1)).unwrap();
    assert_eq!((purged.blocks, purged.bytes, old), (1, SMALL, ns));
    assert_eq!(rig.reason(new, 0, 1), Some(MissReason::Evicted));
}

#[test]
fn all_keys_behind_a_gap_miss_for_its_reason() {
    let mut rig = Rig::new(4);
    let ns = rig.open(1, &layout(SMALL));
    rig.store(ns, None, &[0, 1, 2]);
    for keys in [0..4u64, 0..33, 0..100, 0..3000] {
        let keys: Vec<u64> = keys.collect();
        let before = rig.core.stats().clone();
        let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &keys);
        rig.core.release(ENGINE, lease);
        let now = rig.core.stats();
        assert_eq!((answer.states, now.hits - before.hits), (vec![1; 3], 3));
        let misses = now.misses[MissReason::NeverSeen as usize] - before.misses[MissReason::NeverSeen as usize];
        assert_eq!(misses, keys.len() as u64 - 3);
    }
}

#[test]
fn an_empty_lookup_is_no_lease() {
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(SMALL));
    let lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    assert_eq!(rig.core.finish_lookup(lookup), LeaseId(0));
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &[]);
    assert_eq!((answer, lease), (Answer::default(), LeaseId(0)));
    rig.core.release(ENGINE, LeaseId(0));
    assert_eq!(rig.core.held(), Default::default());
}

#[test]
fn hashes_of_all_lengths_are_kept_apart() {
    let mut rig = Rig::new(4);
    let ns = rig.open(1, &layout(SMALL));
    // Of each length one that begins like all others, and one of zeros only.
    let hashes = |len: usize| [vec![7; len], vec![0; len]];
    for bytes in (1..=BlockHash::MAX_LEN).flat_map(hashes) {
        let at = rig.reserve(ns, 1)[0];
        let hash = BlockHash::new(&bytes).unwrap();
        assert_eq!(rig.core.commit(ENGINE, ns, 0, hash, None, at, Some(0)), CommitOutcome::Stored, "{hash}");
    }
    for bytes in (1..=BlockHash::MAX_LEN).flat_map(hashes) {
        let (mut answer, mut lookup) = (Answer::default(), rig.core.begin_lookup(None, ns));
        rig.core.look(&mut lookup, 0, &bytes, bytes.len(), &mut answer);
        rig.core.cancel_lookup(lookup);
        assert_eq!(answer.slots.len(), 1, "{bytes:?}");
    }
    for wrong in [&[][..], &[0; 33]] {
        assert!(BlockHash::new(wrong).unwrap_err().hint_text().is_some_and(|hint| hint.contains("digest")));
    }
}

#[test]
fn a_group_that_the_layout_lacks_is_a_miss_and_takes_no_slot() {
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(SMALL));
    assert_eq!(rig.reason(ns, 5, 1), Some(MissReason::NeverSeen));
    let mut slots = Vec::new();
    rig.core.reserve(ENGINE, ns, 5, 1, true, &mut slots);
    assert_eq!(slots, []);
    let at = rig.reserve(ns, 1)[0];
    assert_eq!(rig.core.commit(ENGINE, ns, 5, hash(1), None, at, Some(0)), CommitOutcome::Incomplete);
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn a_reservation_larger_than_the_pool_gets_its_share() {
    let mut rig = Rig::new(8);
    let ns = rig.open(1, &layout(SMALL));
    assert_eq!(rig.reserve(ns, 100_000).len(), 8 * 16 / 4, "a quarter may be reserved");
    assert_eq!(rig.reserve(ns, 1), []);
    rig.core.instance_gone(ENGINE);
    assert_eq!(rig.core.held(), Default::default());
    assert_eq!(rig.reserve(ns, 1).len(), 1);
    rig.audit();
}

fn reserve_for(rig: &mut Rig, instance: Instance, ns: forebay_core::NamespaceIndex, count: usize) -> Vec<At> {
    let mut slots = Vec::new();
    rig.core.reserve(instance, ns, 0, count, instance != Instance::DAEMON, &mut slots);
    slots
}

#[test]
fn engines_that_fill_nothing_leave_a_part_to_each_that_comes_after_them() {
    let mut rig = Rig::new(8);
    let ns = rig.open(1, &layout(SMALL));
    let all = (0..Instance::MAX as u8).map(Instance).collect::<Vec<_>>();
    let given: Vec<usize> = all.iter().map(|instance| reserve_for(&mut rig, *instance, ns, 64).len()).collect();
    let (first, late) = given.split_at(5);
    assert_eq!(first, [32, 8, 4, 2, 1], "a quarter of 128 slots, then half of what is left of an eighth");
    assert!(late.iter().all(|slots| *slots == 1), "however late, each has a slot: {late:?}");
    let more: Vec<usize> = all.iter().map(|instance| reserve_for(&mut rig, *instance, ns, 64).len()).collect();
    assert_eq!(more.iter().sum::<usize>(), 0, "all have what they may have");
    rig.audit();
}

#[test]
fn an_engine_has_a_slot_of_each_of_its_sizes_however_many_others_hold() {
    let mut rig = Rig::new(64);
    let [small, large] = [(1, SMALL), (2, LARGE)].map(|(id, size)| rig.open(id, &layout(size)));
    while !rig.reserve(small, 64).is_empty() {}
    let other = Instance(40);
    while !reserve_for(&mut rig, other, small, 64).is_empty() {}
    assert_eq!(reserve_for(&mut rig, other, large, 64).len(), 1, "its small slots take nothing from its large ones");
    assert_eq!(reserve_for(&mut rig, other, large, 64), []);
    rig.audit();
}

#[test]
fn an_engine_that_took_all_gives_way_to_others_as_it_fills() {
    let mut rig = Rig::new(8);
    let ns = rig.open(1, &layout(SMALL));
    let (quarter, other) = (8 * 16 / 4, Instance(40));
    let mut held = rig.reserve(ns, 64);
    let mut others = Vec::new();
    assert_eq!(held.len(), quarter);
    for key in 0..quarter as u64 {
        // Who has more asks first, and for more.
        let at = held.remove(0);
        assert_eq!(rig.commit(ns, key, None, at), CommitOutcome::Stored);
        held.extend(rig.reserve(ns, 64));
        others.extend(reserve_for(&mut rig, other, ns, 64));
        rig.audit();
    }
    assert_eq!(held.len() + others.len(), quarter);
    assert!(held.len() <= quarter / 2 + 1, "{} of {quarter} are left", held.len());
}

#[test]
fn the_part_of_an_engine_that_hangs_is_the_others_when_it_is_gone() {
    let mut rig = Rig::new(8);
    let ns = rig.open(1, &layout(SMALL));
    let (quarter, hung) = (8 * 16 / 4, Instance(40));
    let held = reserve_for(&mut rig, hung, ns, 64);
    rig.core.session_ended(hung);
    assert_eq!((held.len(), rig.reserve(ns, 64).len()), (quarter, quarter / 4));
    // It comes back with what it held, or goes.
    let resumption = rig.core.begin_resume(hung);
    assert_eq!(rig.core.resume(resumption, &held).1, []);
    assert_eq!(rig.reserve(ns, 64), []);
    rig.core.instance_gone(hung);
    assert_eq!(rig.reserve(ns, 64).len(), quarter - quarter / 4);
    rig.audit();
}

#[test]
fn engines_that_hold_what_they_may_lease_and_reserve_leave_a_slot_to_each_other_engine() {
    let mut rig = Rig::new(64);
    let ns = rig.open(1, &layout(SMALL));
    let keys: Vec<u64> = (0..64 * 16).collect();
    for keys in keys.chunks(64) {
        assert_eq!(rig.store(ns, keys[0].checked_sub(1), keys), keys.len());
    }
    assert_eq!(rig.lease(ns, &keys).0, keys.len() / 2);
    rig.step_to_the_end();
    while !rig.reserve(ns, 64).is_empty() {}
    assert_eq!(rig.core.held().reserved_bytes, 64 * 16 / 4 * SMALL);
    for instance in (1..Instance::MAX as u8).map(Instance) {
        let slots = (0..50).map(|_| reserve_for(&mut rig, instance, ns, 64).len()).sum::<usize>();
        assert!(slots > 0, "{instance:?} has no slot");
    }
    rig.audit();
}

#[test]
fn one_block_can_always_be_stored_and_promised_however_large() {
    // 40 of 64 KiB: more than a quarter to reserve, more than half to promise.
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(LARGE));
    assert_eq!(rig.store(ns, None, &[1]), 1);
    let (found, lease) = rig.lease(ns, &[1]);
    assert_eq!(found, 1);
    assert_eq!(rig.store(ns, None, &[2]), 0, "the only slot is leased");
    rig.core.release(ENGINE, lease);
    assert_eq!(rig.store(ns, None, &[2]), 1);
}

#[test]
fn over_its_share_a_request_gets_a_shorter_prefix() {
    let mut rig = Rig::new(4);
    let ns = rig.open(1, &layout(SMALL));
    let keys: Vec<u64> = (0..60).collect();
    keys.chunks(10).for_each(|keys| assert_eq!(rig.store(ns, keys[0].checked_sub(1), keys), keys.len()));
    let (found, first) = rig.lease(ns, &keys);
    assert_eq!(found, 32, "half of 64 slots");
    // What is pinned already costs nothing, what is not may not be pinned.
    let (found, second) = rig.lease(ns, &keys);
    assert_eq!(found, 32);
    // Who takes no lease may see all.
    assert_eq!(rig.look(None, ns, 0, &keys).0.states.len(), 60);
    rig.core.release(ENGINE, first);
    assert_eq!(rig.core.held().pinned_bytes, 32 * SMALL);
    rig.core.release(ENGINE, second);
    assert_eq!(rig.core.held(), Default::default());
    assert_eq!(rig.core.stats().misses[MissReason::OverLimit as usize], 2 * 28);
}

#[test]
fn verifications_take_part_in_the_share_of_promises_and_nobody_waits_in_vain() {
    let keys: Vec<u64> = (0..16).collect();
    let (mut rig, ns) = recovered(Config { promise_permille: 250, ..Config::new(UNIT_BYTES, 1) }, &keys);
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &keys);
    assert_eq!((answer.states, lease), (vec![STATE_NOT_YET; 4], LeaseId(0)), "a quarter of 16 slots");
    assert_eq!(rig.core.held().pinned_bytes, 4 * SMALL);
    let effects = rig.effects();
    assert_eq!(effects.len(), 4);
    for effect in effects {
        let Effect::Verify { block, generation, finder, .. } = effect else { panic!("{effect:?}") };
        rig.core.verified(block, generation, true, finder);
    }
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &keys);
    assert_eq!(answer.states, [STATE_READY; 4]);
    assert_eq!(rig.core.held().pinned_bytes, 4 * SMALL);
    rig.core.release(ENGINE, lease);
    assert_eq!(rig.core.held(), Default::default());
}

#[test]
fn a_release_from_before_a_restart_ends_no_lease_given_after_it() {
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(SMALL));
    rig.store(ns, None, &[1]);
    let (_, old) = rig.lease(ns, &[1]);
    let (mut rig, ns) = recovered(Config { epoch: 2, ..Config::new(UNIT_BYTES, 1) }, &[1]);
    rig.reason(ns, 0, 1);
    let Some(Effect::Verify { block, generation, finder, .. }) = rig.effects().pop() else {
        panic!("nothing to verify")
    };
    rig.core.verified(block, generation, true, finder);
    let (found, lease) = rig.lease(ns, &[1]);
    assert_eq!(found, 1);
    assert_ne!(lease, old);
    rig.core.release(ENGINE, old);
    assert_eq!(rig.core.held().leases, 1);
}

/// Two conversations with a common beginning, stored in several pieces and asked for again.
fn two_conversations(policy: policy::Make) -> (Rig, forebay_core::NamespaceIndex, [Vec<u64>; 2]) {
    let mut rig = Rig::with(Config { policy, ..Config::new(UNIT_BYTES, 4) });
    let ns = rig.open(1, &layout(SMALL));
    let (one, other): (Vec<u64>, Vec<u64>) = ((0..24).collect(), (0..8).chain(100..116).collect());
    for piece in [0..5usize, 5..8, 8..19, 19..24] {
        let before = piece.start.checked_sub(1).map(|at| one[at]);
        assert_eq!(rig.store(ns, before, &one[piece.clone()]), piece.len());
    }
    assert_eq!(rig.store(ns, Some(7), &other[8..16]), 8);
    assert_eq!(rig.store(ns, Some(other[15]), &other[16..]), 8);
    for prompt in [&one, &other, &one] {
        let (found, lease) = rig.lease(ns, prompt);
        assert_eq!(found, 24);
        rig.core.release(ENGINE, lease);
        rig.step_to_the_end();
    }
    (rig, ns, [one, other])
}

#[test]
fn prompts_are_evicted_from_their_leaves() {
    for name in ["lru", "lhd"] {
        let (mut rig, ns, prompts) = two_conversations(policy::by_name(name).unwrap());
        let mut left = usize::MAX;
        let mut next = 1000;
        while left > 0 {
            rig.store(ns, None, &[next]);
            next += 1;
            for prompt in &prompts {
                let resident: Vec<bool> = prompt.iter().map(|key| rig.is_resident(ns, *key)).collect();
                let prefix = resident.iter().take_while(|is_there| **is_there).count();
                let all = resident.iter().filter(|is_there| **is_there).count();
                assert_eq!(prefix, all, "{name}: a block is left behind a gap: {resident:?}");
            }
            left = prompts[0].iter().chain(&prompts[1]).filter(|key| rig.is_resident(ns, **key)).count();
            assert!(next < 10_000, "{name}: {left} blocks are never evicted");
        }
    }
}

#[test]
fn blocks_that_no_extent_could_hold_are_refused_and_change_nothing() {
    let mut rig = Rig::new(3);
    let ns = rig.open(1, &layout(SMALL));
    rig.store(ns, None, &[1]);
    // Two units side by side are the most that three can give.
    for bytes in [2 * UNIT_BYTES + 1, 512 << 20] {
        let too_large = vec![(0, group(Attention::Full, LARGE)), (1, group(Attention::Full, bytes))];
        let error = rig.core.open_namespace(NamespaceId(2), &Layout::new(too_large).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full);
        assert!(error.to_string().contains(&bytes.next_multiple_of(4096).to_string()), "{error}");
        assert!(error.hint_text().is_some());
    }
    assert!(rig.core.namespaces().iter().all(|namespace| namespace.id == NamespaceId(1)));
    // The size that was fine has a class now; everything goes on.
    (2..200).for_each(|key| assert_eq!(rig.store(ns, None, &[key]), 1));
    let other = rig.open(3, &layout(2 * UNIT_BYTES));
    assert!((0..50).any(|key| rig.store(other, None, &[key]) == 1), "a block of two units is never stored");
    rig.audit();
}

#[test]
fn a_namespace_has_one_layout() {
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(SMALL));
    assert_eq!(rig.open(1, &layout(SMALL)), ns);
    let error = rig.core.open_namespace(NamespaceId(1), &layout(2 * SMALL)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn size_classes_are_limited() {
    let mut rig = Rig::with(Config::new(4 << 20, 4));
    let opened = (1..=300u64).map(|size| rig.core.open_namespace(NamespaceId(size.into()), &layout(size * 4096)));
    let opened: Vec<_> = opened.collect();
    assert_eq!(opened.iter().filter(|result| result.is_ok()).count(), 256);
    assert_eq!(opened[256].as_ref().unwrap_err().kind(), ErrorKind::Full);
}

#[test]
fn an_extent_of_a_size_that_no_namespace_has_is_restored_and_given_up_again() {
    let mut rig = Rig::of(Core::new(Config::new(UNIT_BYTES, 2)));
    let ns = rig.open(1, &layout(SMALL));
    assert!(rig.core.restore_extent(12 << 10, 0, 1));
    assert!(rig.core.restore_extent(20 << 10, 1, 1));
    rig.core.finish_restore();
    for key in 0..32 {
        assert_eq!(rig.store(ns, None, &[key]), 1, "key {key}");
    }
    assert_eq!(rig.core.stats().evicted, 0, "both units serve the only size in use");
    rig.audit();
}

#[test]
fn an_extent_is_made_when_there_is_room_for_it() {
    let mut rig = Rig::new(4);
    let (first, second) = (rig.open(1, &layout(SMALL)), rig.open(2, &layout(2 * SMALL)));
    let (has_room, asked) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
    let (answer, count) = (Arc::clone(&has_room), Arc::clone(&asked));
    rig.core.ask_before_growing(move |first_unit, units, slot_bytes| {
        assert!(first_unit + units <= 4 && slot_bytes % SMALL == 0);
        count.fetch_add(1, Relaxed);
        answer.load(Relaxed)
    });
    assert_eq!(rig.store(first, None, &[1]), 1);
    has_room.store(false, Relaxed);
    assert_eq!(rig.store(second, None, &[2]), 0, "the size has no slot yet");
    assert_eq!(rig.store(first, None, &[3]), 1, "there are slots of this size");
    rig.audit();
    has_room.store(true, Relaxed);
    assert_eq!(rig.store(second, None, &[2]), 1);
    assert!(asked.load(Relaxed) >= 3);
    rig.audit();
}

#[test]
fn a_table_that_lies_about_extents_is_not_believed() {
    let mut core = Core::new(Config::new(UNIT_BYTES, 8));
    for (slot_bytes, first_unit, units) in [
        (0, 0, 1),
        (100, 0, 1),
        (SMALL, 8, 1),
        (SMALL, 7, 2),
        (SMALL, 1, 2),
        (SMALL, 0, 0),
        (SMALL, 0, 3),
        (SMALL, u32::MAX, 1),
        (2 * UNIT_BYTES, 0, 1),
        (1 << 40, 0, 8),
    ] {
        assert!(!core.restore_extent(slot_bytes, first_unit, units), "{slot_bytes} {first_unit} {units}");
    }
    assert!(core.restore_extent(SMALL, 4, 4));
    assert!(!core.restore_extent(SMALL, 4, 1) && !core.restore_extent(SMALL, 7, 1), "extents overlap");
    let ns = core.open_namespace(NamespaceId(1), &layout(SMALL)).unwrap();
    let other = core.open_namespace(NamespaceId(2), &layout(LARGE)).unwrap();
    let (generation, holders) = (Generation(1), 0);
    for (slot, key) in
        [(0, Some((ns, 0, hash(1)))), (64, Some((other, 0, hash(1)))), (64, Some((ns, 9, hash(1)))), (64, None)]
    {
        let recovered = Recovered { slot: SlotId(slot), generation, holders, key };
        assert_eq!(core.restore(recovered), Recovery::Dropped, "slot {slot}, key {key:?}");
    }
    let twice = || Recovered { slot: SlotId(64), generation, holders, key: Some((ns, 0, hash(1))) };
    assert_eq!(core.restore(twice()), Recovery::Block);
    assert_eq!(core.restore(twice()), Recovery::Dropped);
    core.finish_restore();
    core.audit().unwrap();
}

#[test]
fn a_block_purged_under_its_reader_stays_the_readers_when_it_attaches_again() {
    let mut rig = Rig::new(1);
    let ns = rig.open(1, &layout(SMALL));
    rig.store(ns, None, &[1]);
    let (answer, _) = rig.look(Some(ENGINE), ns, 0, &[1]);
    let at = (SlotId(answer.slots[0]), Generation(answer.generations[0]));
    rig.core.purge(NamespaceId(1)).unwrap();
    rig.step_to_the_end();
    let (lease, lost) = rig.resume(ENGINE, &[at]);
    assert_eq!(lost, []);
    // Another engine named it, and never had it.
    assert_eq!(rig.resume(Instance(1), &[at]), (LeaseId(0), vec![at]));
    assert_eq!(rig.core.held().fenced_blocks, 1);
    rig.core.release(ENGINE, lease);
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn a_namespace_that_was_purged_or_closed_takes_no_blocks_by_its_old_name() {
    let mut rig = Rig::new(1);
    let purged = rig.open(1, &layout(SMALL));
    let closed = rig.open(2, &layout(SMALL));
    let (first, second) = (rig.reserve(purged, 1)[0], rig.reserve(closed, 1)[0]);
    rig.core.purge(NamespaceId(1)).unwrap();
    assert!(rig.core.close_namespace(NamespaceId(2)));
    for (ns, at) in [(purged, first), (closed, second)] {
        assert_eq!(rig.commit(ns, 1, None, at), CommitOutcome::Incomplete);
        assert_eq!(rig.reserve(ns, 1), []);
    }
    rig.step_to_the_end();
    assert_eq!((rig.core.held(), rig.core.resident_blocks()), (Default::default(), 0));
    rig.audit();
}

#[test]
fn a_slot_of_a_paused_engine_is_not_handed_out_before_it_is_gone() {
    let paused = Instance(5);
    let mut rig = Rig::of(Core::new(Config { reserve_permille: 1000, ..Config::new(UNIT_BYTES, 1) }));
    rig.core.set_earlier(paused.bit());
    let ns = rig.open(1, &layout(SMALL));
    assert!(rig.core.restore_extent(SMALL, 0, 1));
    let being_filled = Recovered { slot: SlotId(3), generation: Generation(1), holders: paused.bit(), key: None };
    assert_eq!(rig.core.restore(being_filled), Recovery::Fenced);
    rig.core.finish_restore();
    let slots: Vec<At> = rig.reserve(ns, 100);
    assert_eq!(slots.len(), 15);
    assert!(slots.iter().all(|(slot, _)| *slot != SlotId(3)));
    rig.core.instance_gone(paused);
    assert_eq!(rig.reserve(ns, 100).iter().map(|(slot, _)| *slot).collect::<Vec<_>>(), [SlotId(3)]);
}
