//! The tiers below the pool, one story each: what is written down, what comes up, and what a failure costs.

mod common;

use std::collections::BTreeMap;

use common::{ENGINE, Rig, SMALL, UNIT_BYTES, hash, layout};
use forebay_core::lookup::{LeaseId, SOURCE_DISK, SOURCE_POOL, STATE_MISS, STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::recover::{Recovered, Recovery};
use forebay_core::stats::Finder;
use forebay_core::store::CommitOutcome;
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits, TRANSFERS, TierId};
use forebay_core::{
    BlockId, BlockKey, Config, Core, Effect, ErrorKind, Generation, Instance, NamespaceId, NamespaceIndex, SlotId,
};

const TIER: TierId = TierId(0);

/// A pool of 16 slots a unit, with one tier.
fn rig(units: u32, limits: Limits) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(units);
    assert_eq!(rig.core.open_tier(limits), TIER);
    let ns = rig.open(1, &layout(SMALL));
    (rig, ns)
}

fn all() -> Limits {
    Limits { admission: Admission::All, ..Limits::default() }
}

fn key(key: u64) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(key) }
}

/// The tier has these.
fn lie_on_tier(rig: &mut Rig, keys: impl Iterator<Item = u64>) {
    keys.for_each(|k| rig.core.tier_found(TIER, rig.core.tier_hasher().hash(&key(k))));
}

fn stores(rig: &mut Rig) -> Vec<BlockId> {
    let block = |effect| if let Effect::WriteBack { block, .. } = effect { Some(block) } else { None };
    rig.effects().into_iter().filter_map(block).collect()
}

fn loads(rig: &mut Rig) -> Vec<(BlockId, SlotId, Generation)> {
    let load = |effect| match effect {
        Effect::Promote { block, slot, generation, .. } => Some((block, slot, generation)),
        _ => None,
    };
    rig.effects().into_iter().filter_map(load).collect()
}

/// Ends stores as they come until none is left; the keys in the order they were written.
fn write_all(rig: &mut Rig) -> Vec<BlockKey> {
    let mut written = Vec::new();
    let mut started = stores(rig);
    while !started.is_empty() {
        for block in started {
            written.push(rig.core.block_key(block));
            assert!(rig.core.written_back(TIER, block, Outcome::Stored));
        }
        started = stores(rig);
    }
    written
}

fn whole() -> Outcome {
    Outcome::Loaded { length_bytes: SMALL, checksum: 7 }
}

fn states(rig: &mut Rig, ns: NamespaceIndex, keys: &[u64]) -> Vec<u8> {
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, keys);
    rig.core.release(ENGINE, lease);
    answer.states
}

#[test]
fn a_lookup_that_pauses_while_blocks_come_up_counts_once_and_asks_for_no_key_twice() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..3);
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    assert_eq!(rig.look_on(&mut lookup, 0, 0, &[0, 1, 2, 3]).states, [STATE_NOT_YET; 3]);
    let lease = rig.core.pause_lookup(&mut lookup);
    assert_ne!(lease, LeaseId(0), "its release ends the lookup");
    let loads = loads(&mut rig);
    assert!(rig.core.promoted(loads[0].0, loads[0].2, whole()));
    assert!(rig.core.look_again(&mut lookup, ns));
    let answer = rig.look_on(&mut lookup, 0, 0, &[0, 1, 2]);
    assert_eq!((answer.states, answer.slots.len()), (vec![STATE_READY, STATE_NOT_YET, STATE_NOT_YET], 1));
    assert_eq!(rig.core.pause_lookup(&mut lookup), lease, "it grows");
    for (block, _, generation) in &loads[1..] {
        assert!(rig.core.promoted(*block, *generation, whole()));
    }
    assert!(rig.core.look_again(&mut lookup, ns));
    assert_eq!(rig.look_on(&mut lookup, 0, 1, &[1, 2]).states, [STATE_READY; 2]);
    assert_eq!(rig.core.stats().lookups, 0, "it counts when it ends");
    assert_eq!(rig.core.finish_lookup(lookup), lease);
    let stats = rig.core.stats();
    assert_eq!((stats.lookups, stats.keys, stats.hits, stats.miss_count()), (1, 4, 3, 1), "the last answer counts");
    assert_eq!(rig.core.held().pinned_bytes, 3 * SMALL);
    rig.core.release(ENGINE, lease);
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

/// Whoever waits for `ends` to change misses nothing: what a look finds changes with it, and by no other event.
#[test]
fn a_waiting_lookup_finds_nothing_new_before_something_has_ended() {
    let shared = Limits { is_shared: true, ..all() };
    for seed in 0..200u64 {
        let (mut rig, ns) = rig(2, all());
        assert_eq!(rig.core.open_tier(shared), TierId(1));
        lie_on_tier(&mut rig, 0..4);
        rig.store(ns, None, &[100, 101]);
        let mut waiting: Vec<u64> = (0..8).collect();
        let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
        assert_eq!(rig.look_on(&mut lookup, 0, 0, &waiting).states, [STATE_NOT_YET; 8]);
        let lease = rig.core.pause_lookup(&mut lookup);
        let (mut running, mut probes, mut ends) = (loads(&mut rig), Vec::new(), rig.core.ends());
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..40 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            rig.core.take_probes(&mut probes);
            match random >> 33 & 7 {
                0 if !running.is_empty() => {
                    let (block, _, generation) = running.swap_remove(0);
                    let outcome = if random >> 40 & 1 == 0 { whole() } else { Outcome::Failed(ErrorKind::Io) };
                    rig.core.promoted(block, generation, outcome);
                }
                1 if !running.is_empty() => rig.core.give_up(running[0].0, running[0].2),
                2 if !probes.is_empty() => {
                    let found = random >> 40 & 1 == 0;
                    let outcome = if found { Outcome::Found } else { Outcome::Absent };
                    rig.core.probe_done(&probes.swap_remove(0), outcome);
                }
                3 => drop(rig.store(ns, None, &[200 + (random >> 50)])),
                4 => rig.step_to_the_end(),
                5 => drop(rig.lease(ns, &[100, 101])),
                _ => {}
            }
            running.extend(loads(&mut rig));
            assert!(rig.core.look_again(&mut lookup, ns));
            // The keys are numbered from 0 on, so the first tells how many lie before it.
            let Some(before) = waiting.first() else { break };
            let now = rig.look_on(&mut lookup, 0, *before, &waiting).states;
            let is_same = now == vec![STATE_NOT_YET; waiting.len()];
            assert!(is_same || rig.core.ends() != ends, "seed {seed}: {waiting:?} became {now:?}");
            assert!(!lookup.lacks_room(), "seed {seed}: nobody holds so much");
            let keys = waiting.iter().zip(now).filter(|(_, state)| *state == STATE_NOT_YET);
            (waiting, ends) = (keys.map(|(key, _)| *key).collect(), rig.core.ends());
            rig.core.pause_lookup(&mut lookup);
            running.extend(loads(&mut rig));
        }
        rig.core.cancel_lookup(lookup);
        rig.core.release(ENGINE, lease);
        rig.audit();
    }
}

#[test]
fn a_lookup_says_whether_its_next_look_starts_more_promotions_though_none_has_ended() {
    let (mut rig, ns) = rig(16, Limits { load_blocks: 120, ..all() });
    lie_on_tier(&mut rig, 0..150);
    let keys: Vec<u64> = (0..150).collect();
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    for (started, has_more) in [(48, true), (48, true), (24, false), (0, false)] {
        assert_eq!(rig.look_on(&mut lookup, 0, 0, &keys).states, vec![STATE_NOT_YET; 150]);
        assert_eq!((loads(&mut rig).len(), lookup.has_more_to_start()), (started, has_more));
        rig.core.pause_lookup(&mut lookup);
        assert!(rig.core.look_again(&mut lookup, ns));
    }
    rig.core.cancel_lookup(lookup);
    rig.audit();
}

#[test]
fn a_lookup_that_finds_no_slot_does_not_look_again_at_once() {
    let config = Config { promise_permille: 1000, reserve_permille: 1000, ..Config::new(UNIT_BYTES, 16) };
    let mut rig = Rig::with(config);
    rig.core.open_tier(all());
    let ns = rig.open(1, &layout(SMALL));
    let held: Vec<u64> = (0..100).collect();
    held.chunks(50).for_each(|some| assert_eq!(rig.store(ns, None, some), 50));
    let (_, lease) = rig.lease(ns, &held);
    (0..3).for_each(|_| drop(rig.reserve(ns, (16 * 16 - 100) / 3)));
    lie_on_tier(&mut rig, 100..250);
    let keys: Vec<u64> = (100..250).collect();
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    assert_eq!(rig.look_on(&mut lookup, 0, 0, &keys).states, vec![STATE_NOT_YET; 150]);
    assert!(loads(&mut rig).is_empty(), "all slots are held");
    assert!(lookup.lacks_room() && !lookup.has_more_to_start());
    rig.core.pause_lookup(&mut lookup);
    assert!(rig.core.look_again(&mut lookup, ns));
    lookup.stop_waiting_for_room();
    assert_eq!(rig.look_on(&mut lookup, 0, 0, &keys).states, [0; 0], "nothing to wait for");
    assert!(!lookup.lacks_room());
    rig.core.finish_lookup(lookup);
    assert_eq!(rig.core.stats().misses[MissReason::OverLimit as usize], 150);
    rig.core.release(ENGINE, lease);
    rig.audit();
}

#[test]
fn a_lookup_that_is_given_up_while_blocks_come_up_counts_once_too() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..3);
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    assert_eq!(rig.look_on(&mut lookup, 0, 0, &[0, 1, 2]).states, [STATE_NOT_YET; 3]);
    let lease = rig.core.pause_lookup(&mut lookup);
    let mut unanswered = rig.core.begin_lookup(Some(ENGINE), ns);
    rig.look_on(&mut unanswered, 0, 0, &[0, 1, 2]);
    rig.core.cancel_lookup(unanswered);
    assert_eq!(rig.core.stats().lookups, 0, "who got no answer is not counted");
    rig.core.cancel_lookup(lookup);
    let stats = rig.core.stats();
    assert_eq!((stats.lookups, stats.misses[MissReason::PromotionUnfinished as usize]), (1, 3));
    rig.core.release(ENGINE, lease);
    for (block, _, generation) in loads(&mut rig) {
        assert!(rig.core.promoted(block, generation, whole()));
    }
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn a_lookup_without_an_answer_leaves_the_first_hit_to_the_next() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    let (_, lease) = rig.lease(ns, &[0]);
    rig.core.release(ENGINE, lease);
    for (block, _, generation) in loads(&mut rig) {
        assert!(rig.core.promoted(block, generation, whole()));
    }
    let mut unanswered = rig.core.begin_lookup(Some(ENGINE), ns);
    assert_eq!(rig.look_on(&mut unanswered, 0, 0, &[0]).states, [STATE_READY]);
    rig.core.cancel_lookup(unanswered);
    assert_eq!(rig.core.tier_report(TIER).stats.hits, 0);
    let (_, lease) = rig.lease(ns, &[0]);
    assert_eq!(rig.core.tier_report(TIER).stats.hits, 1);
    rig.core.release(ENGINE, lease);
    rig.audit();
}

#[test]
fn what_comes_up_after_its_lease_was_released_is_promised_to_nobody() {
    for ends in [false, true] {
        let (mut rig, ns) = rig(2, all());
        lie_on_tier(&mut rig, 0..1);
        let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
        rig.look_on(&mut lookup, 0, 0, &[0]);
        let lease = rig.core.pause_lookup(&mut lookup);
        let loads = loads(&mut rig);
        assert!(rig.core.promoted(loads[0].0, loads[0].2, whole()));
        assert!(rig.core.look_again(&mut lookup, ns));
        rig.core.release(ENGINE, lease);
        assert!(!rig.core.look_again(&mut lookup, ns), "nobody waits any more");
        assert_eq!(rig.look_on(&mut lookup, 0, 0, &[0]).states, [STATE_READY]);
        if ends {
            assert_eq!(rig.core.finish_lookup(lookup), LeaseId(0));
        } else {
            assert_eq!(rig.core.pause_lookup(&mut lookup), LeaseId(0));
            rig.core.cancel_lookup(lookup);
        }
        assert_eq!(rig.core.held(), Default::default());
        rig.audit();
    }
}

#[test]
fn a_purge_ends_what_a_paused_lookup_waits_for_and_its_lease_stays() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..2);
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    rig.look_on(&mut lookup, 0, 0, &[0, 1]);
    let lease = rig.core.pause_lookup(&mut lookup);
    let loads = loads(&mut rig);
    assert!(rig.core.promoted(loads[0].0, loads[0].2, whole()));
    assert!(rig.core.look_again(&mut lookup, ns));
    assert_eq!(rig.look_on(&mut lookup, 0, 0, &[0, 1]).states, [STATE_READY, STATE_NOT_YET]);
    assert_eq!(rig.core.pause_lookup(&mut lookup), lease);
    let (_, _, new) = rig.core.purge(NamespaceId(1)).unwrap();
    rig.step_to_the_end();
    assert!(rig.core.look_again(&mut lookup, new));
    assert_eq!(rig.look_on(&mut lookup, 0, 1, &[1]).states, []);
    assert_eq!(rig.core.finish_lookup(lookup), lease);
    assert_eq!(rig.core.stats().keys, 2);
    assert_ne!(rig.core.held().pinned_bytes, 0, "the engine may load what it was promised");
    rig.core.release(ENGINE, lease);
    assert!(!rig.core.promoted(loads[1].0, loads[1].2, whole()));
    rig.step_to_the_end();
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn what_lies_below_comes_up_once_however_many_ask() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..3);
    assert_eq!(states(&mut rig, ns, &[0, 1, 2, 3]), [STATE_NOT_YET; 3]);
    let (other, _) = rig.look(Some(Instance(5)), ns, 0, &[0, 1, 2, 2]);
    assert_eq!(other.states, [STATE_NOT_YET; 4]);
    let started = loads(&mut rig);
    let positions: Vec<BlockKey> = started.iter().map(|(block, ..)| rig.core.block_key(*block)).collect();
    assert_eq!(positions, [key(0), key(1), key(2)], "in prefix order");
    for (block, _, generation) in started.into_iter().rev() {
        assert!(rig.core.promoted(block, generation, whole()));
    }
    assert_eq!(states(&mut rig, ns, &[0, 1, 2, 3]), [STATE_READY; 3]);
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn the_first_hit_of_what_a_tier_brought_up_is_the_tiers_and_all_others_are_the_pools() {
    let (mut rig, ns) = rig(2, all());
    rig.store(ns, None, &[0, 1]);
    lie_on_tier(&mut rig, 2..4);
    let keys = [0, 1, 2, 3];
    let (before, _) = rig.look(Some(ENGINE), ns, 0, &keys);
    assert_eq!((before.states, before.sources), (vec![STATE_READY, STATE_READY, STATE_NOT_YET, STATE_NOT_YET], vec![]));
    for (block, _, generation) in loads(&mut rig) {
        assert!(rig.core.promoted(block, generation, whole()));
    }
    assert_eq!(rig.look(None, ns, 0, &keys).0.sources, [0u8; 0], "who wants no lease takes nothing");
    assert_eq!(rig.look(Some(ENGINE), ns, 0, &keys).0.sources, [SOURCE_POOL, SOURCE_POOL, SOURCE_DISK, SOURCE_DISK]);
    assert_eq!(rig.look(Some(ENGINE), ns, 0, &keys).0.sources, [0u8; 0], "now the pool has them");
    assert_eq!((rig.core.stats().hits, rig.core.tier_report(TIER).stats.hits), (2 + 3 * 4, 2));
    rig.audit();
}

#[test]
fn a_key_that_is_asked_for_twice_at_once_comes_up_once() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    assert_eq!(states(&mut rig, ns, &[0, 0]), [STATE_NOT_YET; 2]);
    assert_eq!(loads(&mut rig).len(), 1);
    rig.audit();
}

#[test]
fn who_wants_no_lease_starts_nothing() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    assert_eq!(rig.look(None, ns, 0, &[0]).0.states, [0u8; 0]);
    assert_eq!(loads(&mut rig), []);
}

#[test]
fn nothing_is_promoted_behind_a_miss_of_its_prefix() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 5..9);
    assert_eq!(states(&mut rig, ns, &[4, 5, 6]), [0u8; 0]);
    assert_eq!(loads(&mut rig), []);
}

#[test]
fn promotions_stay_within_the_share_of_promises() {
    let mut config = Config::new(UNIT_BYTES, 2);
    config.promise_permille = 250;
    let mut rig = Rig::with(config);
    rig.core.open_tier(all());
    let ns = rig.open(1, &layout(SMALL));
    lie_on_tier(&mut rig, 0..20);
    let keys: Vec<u64> = (0..20).collect();
    assert_eq!(states(&mut rig, ns, &keys), [STATE_NOT_YET; 8], "a quarter of 32 slots");
    assert_eq!(loads(&mut rig).len(), 8);
    assert_eq!(rig.core.held().pinned_bytes, 8 * SMALL);
    assert_eq!(rig.reason(ns, 0, 12), Some(MissReason::OverLimit));
}

#[test]
fn a_promotion_evicts_nothing_that_is_held() {
    let mut config = Config::new(UNIT_BYTES, 1);
    (config.promise_permille, config.reserve_permille) = (1000, 1000);
    let mut rig = Rig::with(config);
    rig.core.open_tier(all());
    let ns = rig.open(1, &layout(SMALL));
    let held: Vec<u64> = (0..15).collect();
    assert_eq!(rig.store(ns, None, &held), 15);
    write_all(&mut rig);
    assert_eq!(rig.lease(ns, &held).0, 15);
    lie_on_tier(&mut rig, 100..102);
    // The last free slot, then none.
    assert_eq!(states(&mut rig, ns, &[100, 101]), [STATE_NOT_YET]);
    assert_eq!(loads(&mut rig).len(), 1);
    assert!(held.iter().all(|key| rig.is_resident(ns, *key)));
}

#[test]
fn a_late_load_frees_its_waiters_at_once_and_its_slot_when_it_ends() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    states(&mut rig, ns, &[0]);
    let (block, slot, generation) = loads(&mut rig)[0];
    rig.core.give_up(block, generation);
    rig.core.give_up(block, generation);
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::TooSlow));
    assert!(!rig.effects().iter().any(|effect| matches!(effect, Effect::Freed { .. } | Effect::Promote { .. })));
    assert_eq!(rig.core.held().fenced_bytes, SMALL);
    rig.audit();
    assert!(!rig.core.promoted(block, generation, whole()), "nobody takes what comes too late");
    assert!(rig.effects().iter().any(|effect| matches!(effect, Effect::Freed { slot: freed, .. } if *freed == slot)));
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::TooSlow));
    rig.core.expire_skips();
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::PromotionUnfinished), "it is tried again");
    assert_eq!(rig.core.tier_report(TIER).stats.late, 1);
}

#[test]
fn too_many_bytes_of_late_loads_close_the_tier() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..3);
    states(&mut rig, ns, &[0, 1]);
    let late = loads(&mut rig);
    late.iter().for_each(|(block, _, generation)| rig.core.give_up(*block, *generation));
    assert!(!rig.core.tier_report(TIER).is_open);
    assert_eq!(rig.reason(ns, 0, 2), Some(MissReason::Failed));
    late.iter().for_each(|(block, _, generation)| assert!(!rig.core.promoted(*block, *generation, whole())));
    assert_eq!(rig.reason(ns, 0, 2), Some(MissReason::PromotionUnfinished));
}

#[test]
fn a_block_that_is_absent_or_corrupt_is_forgotten_and_one_that_failed_is_tried_again() {
    let failed = |kind| Outcome::Failed(kind);
    let other_length = Outcome::Loaded { length_bytes: SMALL + 1, checksum: 7 };
    let outcomes = [
        (Outcome::Absent, false),
        (failed(ErrorKind::Corrupt), false),
        (other_length, false),
        (failed(ErrorKind::Io), true),
        (failed(ErrorKind::Unavailable), true),
    ];
    for (outcome, is_tried_again) in outcomes {
        let (mut rig, ns) = rig(2, all());
        lie_on_tier(&mut rig, 0..1);
        states(&mut rig, ns, &[0]);
        let (block, _, generation) = loads(&mut rig)[0];
        assert!(!rig.core.promoted(block, generation, outcome));
        assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::Failed), "{outcome:?}");
        rig.core.expire_skips();
        let expected = if is_tried_again { MissReason::PromotionUnfinished } else { MissReason::Failed };
        assert_eq!(rig.reason(ns, 0, 0), Some(expected), "{outcome:?}");
        rig.audit();
    }
}

#[test]
fn a_sick_tier_is_a_miss_until_it_is_well() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    rig.core.set_healthy(TIER, false);
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::Failed));
    rig.store(ns, None, &[10]);
    assert_eq!(stores(&mut rig), []);
    rig.core.set_healthy(TIER, true);
    assert_eq!(write_all(&mut rig), [key(10)], "what waited is written");
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::PromotionUnfinished));
}

#[test]
fn a_block_is_written_at_its_second_sighting_and_once() {
    let (mut rig, ns) = rig(4, Limits::default());
    rig.store(ns, None, &[0, 1, 2]);
    assert_eq!(write_all(&mut rig), []);
    states(&mut rig, ns, &[0, 1]);
    assert_eq!(write_all(&mut rig), [key(0), key(1)]);
    states(&mut rig, ns, &[0, 1, 2]);
    assert_eq!(write_all(&mut rig), [key(2)]);
    states(&mut rig, ns, &[0, 1, 2]);
    assert_eq!(write_all(&mut rig), []);
    assert_eq!(rig.core.tier_report(TIER).stats.stored, 3);
}

#[test]
fn a_block_that_comes_back_is_written_at_its_commit() {
    let (mut rig, ns) = rig(1, Limits::default());
    rig.store(ns, None, &[0]);
    (100..140).for_each(|key| assert_eq!(rig.store(ns, None, &[key]), 1));
    assert_eq!(write_all(&mut rig), []);
    assert!(!rig.is_resident(ns, 0));
    rig.store(ns, None, &[0]);
    assert_eq!(write_all(&mut rig), [key(0)]);
}

#[test]
fn a_block_that_was_refused_and_comes_back_is_written_at_its_commit() {
    let (mut rig, ns) = rig(1, Limits::default());
    assert_eq!(rig.store(ns, Some(0), &[1]), 0, "its parent is nowhere");
    rig.store(ns, None, &[0]);
    states(&mut rig, ns, &[0]);
    assert_eq!(write_all(&mut rig), [key(0)]);
    assert_eq!(rig.store(ns, Some(0), &[1]), 1);
    assert_eq!(write_all(&mut rig), [key(1)]);
}

#[test]
fn a_block_whose_parent_is_not_below_is_not_written_before_it() {
    let (mut rig, ns) = rig(4, Limits { queue_blocks: 1, store_blocks: 1, ..all() });
    // The first is written at once, the second waits, the third finds the queue full, the fourth no parent.
    rig.store(ns, None, &[0, 1, 2, 3]);
    assert_eq!(rig.core.tier_report(TIER).stats.dropped_full, 1);
    assert_eq!(write_all(&mut rig), [key(0), key(1)]);
    // Their next hits, in order, bring the rest.
    states(&mut rig, ns, &[0, 1, 2, 3]);
    states(&mut rig, ns, &[0, 1, 2, 3]);
    assert_eq!(write_all(&mut rig), [key(2), key(3)]);
}

#[test]
fn a_tier_whose_queue_is_full_keeps_no_hit_from_another() {
    const SLOW: TierId = TierId(1);
    let (mut rig, ns) = rig(4, Limits::default());
    assert_eq!(rig.core.open_tier(Limits { queue_blocks: 2, store_blocks: 0, ..Limits::default() }), SLOW);
    rig.store(ns, None, &[0, 1, 2, 3, 4, 5]);
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    // As a long prompt comes, in pieces.
    for (at, keys) in [(0, [0, 1, 2]), (3, [3, 4, 5])] {
        assert_eq!(rig.look_on(&mut lookup, 0, at, &keys).states, [STATE_READY; 3]);
    }
    let lease = rig.core.finish_lookup(lookup);
    rig.core.release(ENGINE, lease);
    let queued = [TIER, SLOW].map(|tier| rig.core.tier_report(tier).stats.queued);
    assert_eq!(queued, [6, 2], "and no child is queued without its parent");
}

/// Nobody asks so, but a client may.
#[test]
fn a_block_that_one_lookup_names_twice_is_written_once() {
    let (mut rig, ns) = rig(4, Limits::default());
    rig.store(ns, None, &[0, 1]);
    states(&mut rig, ns, &[0, 1, 0, 1, 1]);
    assert_eq!(stores(&mut rig).len(), 2);
    assert_eq!(rig.core.tier_report(TIER).stats.queued, 2);
}

#[test]
fn a_block_that_is_being_written_is_not_evicted_and_one_that_waits_may_be() {
    let (mut rig, ns) = rig(1, Limits { store_blocks: 1, ..all() });
    rig.store(ns, None, &[0]);
    rig.store(ns, None, &[1]);
    let [first] = stores(&mut rig)[..] else { panic!("one at a time") };
    (100..140).for_each(|key| assert_eq!(rig.store(ns, None, &[key]), 1, "eviction goes on"));
    assert!(rig.is_resident(ns, 0) && !rig.is_resident(ns, 1));
    assert!(rig.core.written_back(TIER, first, Outcome::Stored));
    assert!(!write_all(&mut rig).contains(&key(1)));
    assert!(rig.core.tier_report(TIER).stats.dropped_gone > 0);
    rig.audit();
}

/// Two rounds of three times as many blocks as the pool holds: what comes back bypasses the pool, and the tier is to
/// get it. The tier writes three blocks at a time, and none before a document is stored as a whole.
#[test]
fn a_slow_tier_gets_every_block_of_a_burst_that_bypasses_the_pool() {
    const BLOCKS: u64 = 20;
    for piece in [1, 2, 4, 8, 20] {
        let (mut rig, ns) = rig(7, Limits { store_blocks: 3, ..Limits::default() });
        let mut written = 0;
        for document in (0..16).chain(0..16) {
            let keys: Vec<u64> = (document * BLOCKS..(document + 1) * BLOCKS).collect();
            let held = states(&mut rig, ns, &keys).iter().filter(|state| **state == STATE_READY).count();
            for at in (held..keys.len()).step_by(piece) {
                let end = keys.len().min(at + piece);
                rig.store(ns, at.checked_sub(1).map(|before| keys[before]), &keys[at..end]);
            }
            written += write_all(&mut rig).len();
        }
        let lost = rig.core.tier_report(TIER).stats.dropped_gone;
        assert_eq!((written, lost, rig.core.stats().orphans), (320, 0, 0), "{piece} blocks at a time");
        rig.audit();
    }
}

/// As above, and a second tier writes each block as soon as it is stored.
#[test]
fn a_block_that_one_tier_has_written_still_waits_for_the_other() {
    const BLOCKS: u64 = 20;
    const SLOW: TierId = TierId(1);
    let (mut rig, ns) = rig(7, Limits { store_blocks: 3, ..Limits::default() });
    assert_eq!(rig.core.open_tier(Limits { store_blocks: 3, ..Limits::default() }), SLOW);
    let mut written = [0; 2];
    for document in (0..16).chain(0..16) {
        let keys: Vec<u64> = (document * BLOCKS..(document + 1) * BLOCKS).collect();
        let held = states(&mut rig, ns, &keys).iter().filter(|state| **state == STATE_READY).count();
        let (mut fast, mut slow) = (Vec::new(), Vec::new());
        for at in held..keys.len() {
            rig.store(ns, at.checked_sub(1).map(|before| keys[before]), &keys[at..=at]);
            take_stores(&mut rig, &mut fast, &mut slow);
            written[0] += fast.len();
            fast.drain(..).for_each(|block| assert!(rig.core.written_back(TIER, block, stored())));
        }
        while !fast.is_empty() || !slow.is_empty() {
            written[0] += fast.len();
            written[1] += slow.len();
            fast.drain(..).for_each(|block| assert!(rig.core.written_back(TIER, block, stored())));
            slow.drain(..).for_each(|block| assert!(rig.core.written_back(SLOW, block, stored())));
            take_stores(&mut rig, &mut fast, &mut slow);
        }
    }
    let lost = [TIER, SLOW].map(|tier| rig.core.tier_report(tier).stats.dropped_gone);
    assert_eq!((written, lost), ([320; 2], [0; 2]));
    rig.audit();
}

/// The stores that began, by tier.
fn take_stores(rig: &mut Rig, fast: &mut Vec<BlockId>, slow: &mut Vec<BlockId>) {
    for effect in rig.effects() {
        match effect {
            Effect::WriteBack { tier: TIER, block, .. } => fast.push(block),
            Effect::WriteBack { block, .. } => slow.push(block),
            _ => {}
        }
    }
}

fn stored() -> Outcome {
    Outcome::Stored
}

/// A tier of several disks keeps neighbours together.
#[test]
fn a_store_says_behind_which_block_of_its_prompt_it_comes() {
    for limits in [all(), Limits::default()] {
        let is_all = limits.admission == Admission::All;
        let (mut rig, ns) = rig(4, limits);
        let parents = |rig: &mut Rig| {
            let of = |effect: Effect| match effect {
                Effect::WriteBack { block, parent, .. } => Some((block, parent)),
                _ => None,
            };
            let mut all = Vec::new();
            loop {
                let began: Vec<_> = rig.effects().into_iter().filter_map(of).collect();
                if began.is_empty() {
                    return all;
                }
                for (block, parent) in began {
                    all.push((rig.core.position(block), parent));
                    assert!(rig.core.written_back(TIER, block, stored()));
                }
            }
        };
        rig.store(ns, None, &[1, 2, 3]);
        // Another prompt, whose blocks come in between.
        rig.store(ns, None, &[10, 11]);
        rig.store(ns, Some(3), &[4]);
        let mut began = parents(&mut rig);
        assert_eq!(began.len(), if is_all { 6 } else { 0 });
        if !is_all {
            // Written when they are looked up, in pieces.
            let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
            rig.look_on(&mut lookup, 0, 0, &[1, 2]);
            let packed: Vec<u8> = [3u64, 4].iter().flat_map(|key| key.to_le_bytes()).collect();
            rig.core.look(&mut lookup, 0, &packed, 8, &mut Default::default());
            rig.core.finish_lookup(lookup);
            rig.look(Some(ENGINE), ns, 0, &[10, 11]);
            began = parents(&mut rig);
            began.swap(3, 5);
            began.swap(3, 4);
        }
        let own: Vec<_> = began.iter().map(|(own, _)| Some(*own)).collect();
        let behind: Vec<_> = began.iter().map(|(_, parent)| *parent).collect();
        assert_eq!(behind, [None, own[0], own[1], None, own[3], own[2]]);
        assert!((1..6).all(|at| !own[..at].contains(&own[at])), "{own:?}");
    }
}

/// The last block of a document that bypasses the pool is being compared when its turn comes to be written.
#[test]
fn a_block_that_was_not_ready_when_its_store_was_due_bypasses_the_pool_like_the_others() {
    const BLOCKS: u64 = 20;
    const LAST: u64 = 12;
    for is_suspected in [false, true] {
        let (mut rig, ns) = rig(7, Limits { store_blocks: 3, ..Limits::default() });
        let keys = |document| (document * BLOCKS..(document + 1) * BLOCKS).collect::<Vec<u64>>();
        for document in (0..16).chain(0..LAST) {
            states(&mut rig, ns, &keys(document));
            rig.store(ns, None, &keys(document));
            write_all(&mut rig);
        }
        let keys = keys(LAST);
        let slots = rig.reserve(ns, keys.len());
        for (at, slot) in slots.iter().enumerate() {
            rig.commit(ns, keys[at], at.checked_sub(1).map(|before| keys[before]), *slot);
        }
        let last = slots.len() - 1;
        if is_suspected {
            let (slot, generation) = slots[last];
            assert!(rig.core.suspect(slot, generation));
        }
        let began = rig.effects();
        let writing =
            began.iter().filter_map(|e| if let Effect::WriteBack { block, .. } = e { Some(*block) } else { None });
        writing.for_each(|block| assert!(rig.core.written_back(TIER, block, stored())));
        write_all(&mut rig);
        for effect in began {
            if let Effect::Verify { block, generation, finder, .. } = effect {
                assert!(!rig.core.verified(block, generation, true, finder));
            }
        }
        assert_eq!(rig.core.tier_report(TIER).stats.dropped_gone, u64::from(is_suspected));
        assert_eq!(rig.reserve(ns, 5).len(), 5);
        assert!(!rig.is_resident(ns, keys[last]), "suspected: {is_suspected}");
        rig.audit();
    }
}

/// Whoever carries the effects out writes each block to the table once, before anybody is answered.
#[test]
fn a_block_is_written_down_when_it_becomes_ready_and_at_no_other_time() {
    let (mut rig, ns) = rig(2, all());
    let ready = |rig: &mut Rig| {
        let of = |effect| if let Effect::Ready { slot, checksum, .. } = effect { Some((slot, checksum)) } else { None };
        rig.effects().into_iter().filter_map(of).collect::<Vec<_>>()
    };
    let slots = rig.reserve(ns, 3);
    let commit = |rig: &mut Rig, key, at, sum| rig.core.commit(ENGINE, ns, 0, hash(key), None, at, sum);
    assert_eq!(commit(&mut rig, 0, slots[0], Some(5)), CommitOutcome::Stored);
    assert_eq!(ready(&mut rig), [(slots[0].0, 5)]);
    assert_eq!(commit(&mut rig, 0, slots[0], Some(5)), CommitOutcome::Stored, "it is repeated");
    assert_eq!(commit(&mut rig, 0, slots[1], Some(5)), CommitOutcome::Duplicate);
    assert_eq!(commit(&mut rig, 1, slots[2], None), CommitOutcome::Incomplete);
    assert_eq!(ready(&mut rig), []);
    lie_on_tier(&mut rig, 7..9);
    states(&mut rig, ns, &[7, 8]);
    let loads = loads(&mut rig);
    assert!(rig.core.promoted(loads[0].0, loads[0].2, whole()));
    assert!(!rig.core.promoted(loads[1].0, loads[1].2, Outcome::Absent));
    assert_eq!(ready(&mut rig), [(loads[0].1, 7)]);
    let trial = rig.core.open_trial(NamespaceId(9), &layout(SMALL)).unwrap();
    let at = rig.reserve(trial, 1)[0];
    assert_eq!(rig.core.commit(ENGINE, trial, 0, hash(0), None, at, Some(6)), CommitOutcome::Stored);
    assert_eq!(ready(&mut rig), [(at.0, 6)], "a client may ask for its bytes too");
}

#[test]
fn a_child_of_a_block_below_is_no_orphan() {
    let (mut rig, ns) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    assert_eq!(rig.store(ns, Some(0), &[1]), 1);
    assert_eq!(rig.store(ns, Some(5), &[6]), 0);
}

#[test]
fn what_the_tier_gave_up_is_written_again() {
    let (mut rig, ns) = rig(2, Limits::default());
    rig.store(ns, None, &[0]);
    states(&mut rig, ns, &[0]);
    write_all(&mut rig);
    rig.core.tier_evicted(TIER, &key(0));
    assert_eq!(rig.core.tier_of(&key(0)), None);
    states(&mut rig, ns, &[0]);
    assert_eq!(write_all(&mut rig), [key(0)]);
}

#[test]
fn what_the_tier_lost_without_its_key_is_written_again_once_it_was_looked_for() {
    let (mut rig, ns) = rig(2, Limits::default());
    rig.store(ns, None, &[0, 1]);
    states(&mut rig, ns, &[0, 1]);
    assert_eq!(write_all(&mut rig), [key(0), key(1)]);
    rig.core.tier_lost(TIER, rig.core.tier_hasher().hash(&key(0)));
    let report = rig.core.tier_report(TIER);
    assert_eq!((rig.core.tier_of(&key(0)), report.blocks, report.stats.evicted), (None, 1, 1));
    states(&mut rig, ns, &[0, 1]);
    assert_eq!(write_all(&mut rig), []);
    let mut at = Some(0);
    while let Some(from) = at {
        at = rig.core.look_for_lost(TIER, from, 1);
    }
    states(&mut rig, ns, &[0, 1]);
    assert_eq!(write_all(&mut rig), [key(0)]);
    rig.audit();
}

/// One that waits to be written may be taken for one that is lost.
#[test]
fn a_block_that_is_queued_twice_is_written_and_nothing_is_left_of_it() {
    let (mut rig, ns) = rig(2, all());
    rig.store(ns, None, &[0]);
    assert_eq!(rig.core.look_for_lost(TIER, 0, 100), None);
    states(&mut rig, ns, &[0]);
    let written = write_all(&mut rig);
    assert!(written.iter().all(|written| *written == key(0)) && !written.is_empty(), "{written:?}");
    rig.step_to_the_end();
    assert_eq!((rig.core.held(), rig.core.tier_report(TIER).blocks), (Default::default(), 1));
    rig.audit();
}

/// How many resident blocks of a namespace are on the tier in the end, of those that waited for it.
fn moved_while_they_wait(is_looked_for: bool, count: u64, units: u32) -> (usize, usize, u64, u64) {
    let mut rig = Rig::new(units);
    assert_eq!(rig.core.open_tier(all()), TIER);
    let ns = rig.open(1, &layout(SMALL));
    let late = rig.open(3, &layout(16 * SMALL));
    for key in 0..count {
        rig.store(ns, None, &[key]);
    }
    let mut started = stores(&mut rig);
    if is_looked_for {
        assert_eq!(rig.core.look_for_lost(TIER, 0, 1000), None);
    }
    for n in 0..10u64 {
        rig.store(late, None, &[1000 + n]);
        rig.step_to_the_end();
        started.extend(stores(&mut rig));
        rig.step_to_the_end();
    }
    let moved = rig.core.stats().moved;
    while !started.is_empty() {
        for block in std::mem::take(&mut started) {
            rig.core.written_back(TIER, block, Outcome::Stored);
        }
        started.extend(stores(&mut rig));
    }
    let resident: Vec<u64> = (0..count).filter(|k| rig.is_resident(ns, *k)).collect();
    let there = resident.iter().filter(|k| rig.core.tier_of(&key(**k)).is_some()).count();
    rig.audit();
    (resident.len(), there, moved, rig.core.tier_report(TIER).stats.dropped_gone)
}

#[test]
fn a_block_that_moves_while_it_waits_and_is_looked_for_is_written() {
    for (units, count) in [(2, 24), (3, 30), (4, 60), (5, 42)] {
        let before = moved_while_they_wait(false, count, units);
        let after = moved_while_they_wait(true, count, units);
        assert_eq!(before, after, "{units} units, {count} blocks");
    }
}

#[test]
fn a_purged_namespace_is_gone_below_at_once_and_for_good() {
    let (mut rig, ns) = rig(4, all());
    lie_on_tier(&mut rig, 50..52);
    rig.store(ns, None, &[0, 1]);
    let writing = stores(&mut rig);
    states(&mut rig, ns, &[50]);
    let (loading, _, generation) = loads(&mut rig)[0];
    let (_, old, new) = rig.core.purge(NamespaceId(1)).unwrap();
    assert!(rig.effects().iter().any(|e| matches!(e, Effect::PurgeTiers { namespace } if *namespace == old)));
    assert_eq!(rig.reason(new, 0, 51), Some(MissReason::NeverSeen));
    rig.step_to_the_end();
    assert!(!rig.core.promoted(loading, generation, whole()));
    let kept = writing.iter().filter(|block| rig.core.written_back(TIER, **block, Outcome::Stored)).count();
    assert_eq!(kept, 0, "what was being written is to be removed");
    // Stored anew meanwhile: not written before the tier is empty.
    rig.store(new, None, &[0]);
    assert_eq!(stores(&mut rig), []);
    (50..52).for_each(|k| rig.core.tier_evicted(TIER, &key(k)));
    rig.core.tiers_purged(NamespaceId(1));
    states(&mut rig, new, &[0]);
    assert_eq!(write_all(&mut rig), [key(0)]);
    rig.core.tier_evicted(TIER, &key(0));
    assert_eq!(rig.core.tier_report(TIER).blocks, 0);
    assert_eq!(rig.reason(new, 0, 50), Some(MissReason::NeverSeen));
    rig.step_to_the_end();
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn a_closed_namespace_finds_its_blocks_below_when_it_is_opened_again() {
    let (mut rig, _) = rig(2, all());
    lie_on_tier(&mut rig, 0..1);
    assert!(rig.core.close_namespace(NamespaceId(1)));
    let ns = rig.open(1, &layout(SMALL));
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::PromotionUnfinished));
}

#[test]
fn slots_that_a_killed_daemon_was_filling_are_used_only_when_its_transfers_are_over() {
    let (mut rig, ns) = rig(1, all());
    lie_on_tier(&mut rig, 0..1);
    states(&mut rig, ns, &[0]);
    let effects = rig.effects();
    let reserved = effects.iter().find_map(|effect| match effect {
        Effect::Reserved { slot, generation, holders } => Some((*slot, *generation, *holders)),
        _ => None,
    });
    let (slot, generation, holders) = reserved.unwrap();
    assert_eq!(holders, TRANSFERS.bit());
    let mut core = Core::new(Config { first_generation: 100, ..Config::new(UNIT_BYTES, 1) });
    core.set_earlier(TRANSFERS.bit());
    assert!(core.restore_extent(SMALL, 0, 1));
    core.restore(forebay_core::recover::Recovered { slot, generation, holders, key: None });
    core.finish_restore();
    core.populate(0);
    let mut rig = Rig::of(core);
    let ns = rig.open(1, &layout(SMALL));
    let taken = |rig: &mut Rig| (0..40).flat_map(|_| rig.reserve(ns, 1)).any(|(taken, _)| taken == slot);
    rig.core.instance_gone(Instance(0));
    assert!(!taken(&mut rig), "all other slots are reserved, this one is not");
    rig.core.instance_gone(Instance(0));
    rig.core.transfers_over();
    assert!(taken(&mut rig));
}

/// A disk that is missing at the start may still fill slots of the earlier daemon, for as long as it is missing.
#[test]
fn while_transfers_of_an_earlier_daemon_may_be_under_way_slots_filled_since_then_are_evicted() {
    let (mut rig, ns) = rig(1, all());
    rig.core.set_earlier(TRANSFERS.bit());
    lie_on_tier(&mut rig, 0..64);
    let mut holders = BTreeMap::new();
    let mut note = |effects: &[Effect]| {
        effects.iter().for_each(|effect| match effect {
            Effect::Reserved { slot, holders: by, .. } | Effect::Held { slot, holders: by } => {
                holders.insert(*slot, *by);
            }
            _ => {}
        });
    };
    for key in 0..64 {
        assert_eq!(states(&mut rig, ns, &[key]), [STATE_NOT_YET], "no slot for block {key} any more");
        let effects = rig.effects();
        note(&effects);
        let promotion = effects.iter().find_map(|effect| match effect {
            Effect::Promote { block, generation, .. } => Some((*block, *generation)),
            _ => None,
        });
        let (block, generation) = promotion.unwrap_or_else(|| panic!("no slot for block {key} any more"));
        let outcome = if key % 4 == 3 { Outcome::Failed(ErrorKind::Io) } else { whole() };
        rig.core.promoted(block, generation, outcome);
        note(&rig.effects());
    }
    assert!(holders.values().all(|by| *by == 0), "a restart would find some in a disk's hands: {holders:?}");
    rig.audit();
}

#[test]
fn a_lookup_starts_a_bounded_number_of_promotions_and_the_next_goes_on() {
    let (mut rig, ns) = rig(64, all());
    lie_on_tier(&mut rig, 0..300);
    let keys: Vec<u64> = (0..300).collect();
    assert_eq!(states(&mut rig, ns, &keys), [STATE_NOT_YET; 300]);
    let first = loads(&mut rig).len();
    assert!((32..=64).contains(&first), "{first} in one event");
    assert_eq!(states(&mut rig, ns, &keys), [STATE_NOT_YET; 300]);
    assert_eq!(loads(&mut rig).len(), first);
}

#[test]
fn a_miss_between_blocks_below_ends_the_prefix() {
    let (mut rig, ns) = rig(4, all());
    lie_on_tier(&mut rig, [0, 1, 3].into_iter());
    let found = states(&mut rig, ns, &[0, 1, 2, 3]);
    assert_eq!(found, [STATE_NOT_YET; 2]);
    assert!(!found.contains(&STATE_MISS));
    assert_eq!(loads(&mut rig).len(), 2);
}

/// A daemon was restarted: `keys` are in its pool, in one extent, and its tier is not open yet.
fn recovered(limits: Limits, keys: std::ops::Range<u64>) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(2);
    assert_eq!(rig.core.open_tier(limits), TIER);
    rig.core.set_healthy(TIER, false);
    let ns = rig.open(1, &layout(SMALL));
    assert!(rig.core.restore_extent(SMALL, 0, 1));
    for (nth, key) in keys.enumerate() {
        let (slot, generation) = (SlotId(nth as u32), Generation(1));
        let key = Some((ns, 0, hash(key)));
        assert_eq!(rig.core.restore(Recovered { slot, generation, holders: 0, key }), Recovery::Block);
    }
    rig.core.finish_restore();
    (rig, ns)
}

/// Steps, and answers each comparison with `is_whole`; the keys in the order in which they were written.
fn written_by_backfill(rig: &mut Rig, is_whole: impl Fn(&BlockKey) -> bool) -> Vec<BlockKey> {
    let mut written = Vec::new();
    loop {
        let is_stepped = rig.core.step();
        let effects = rig.effects();
        if !is_stepped && effects.is_empty() {
            return written;
        }
        for effect in effects {
            match effect {
                Effect::Verify { block, generation, finder, .. } => {
                    let is_whole = is_whole(&rig.core.block_key(block));
                    rig.core.verified(block, generation, is_whole, finder);
                }
                Effect::WriteBack { block, .. } => {
                    written.push(rig.core.block_key(block));
                    assert!(rig.core.written_back(TIER, block, Outcome::Stored));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_prompt_goes_on_to_be_written_behind_a_recovered_block() {
    let shared = Limits { is_shared: true, ..all() };
    for limits in [all(), shared] {
        let (mut rig, ns) = recovered(limits, 0..1);
        rig.store(ns, Some(0), &[1, 2]);
        if !limits.is_shared {
            lie_on_tier(&mut rig, 0..1);
        }
        rig.core.set_healthy(TIER, true);
        rig.store(ns, Some(2), &[3]);
        assert_eq!(write_all(&mut rig), [key(1), key(2), key(3)]);
        rig.audit();
    }
}

#[test]
fn what_waited_to_be_written_at_the_end_is_written_after_the_start() {
    let (mut rig, _) = recovered(all(), 0..12);
    lie_on_tier(&mut rig, 0..4);
    lie_on_tier(&mut rig, 6..8);
    rig.core.set_healthy(TIER, true);
    assert_eq!(written_by_backfill(&mut rig, |_| true), [], "nobody knows yet what the tier lacks");
    rig.core.tier_is_whole(TIER);
    assert!(rig.core.has_backfill());
    let written = written_by_backfill(&mut rig, |found| *found != key(9));
    assert_eq!(written, [11, 10, 8, 5, 4].map(key), "newest first, and none with wrong bytes");
    assert!(!rig.core.has_backfill());
    assert_eq!((rig.core.stats().corrupt[Finder::Restart as usize], rig.core.tier_report(TIER).blocks), (1, 11));
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

/// Whoever asked went away before the comparisons ended, and asked no more.
#[test]
fn what_was_compared_for_a_lookup_and_never_hit_is_written_too() {
    for is_compared in [false, true] {
        let (mut rig, ns) = recovered(all(), 0..8);
        rig.core.set_healthy(TIER, true);
        assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 3]);
        let verifies: Vec<_> = rig.effects();
        let end = |rig: &mut Rig| {
            for effect in &verifies {
                if let Effect::Verify { block, generation, finder, .. } = effect {
                    rig.core.verified(*block, *generation, true, *finder);
                }
            }
        };
        if is_compared {
            end(&mut rig);
        }
        rig.core.tier_is_whole(TIER);
        let mut written = written_by_backfill(&mut rig, |_| true);
        if !is_compared {
            assert_eq!(written, [7, 6, 5, 4, 3].map(key));
            end(&mut rig);
            written.extend(written_by_backfill(&mut rig, |_| true));
        }
        assert_eq!(written.len(), 8, "{written:?}");
        rig.audit();
    }
}

#[test]
fn a_backfill_gives_way_and_ends_with_what_is_gone() {
    let (mut rig, ns) = recovered(Limits { store_blocks: 1, ..all() }, 0..12);
    rig.core.set_healthy(TIER, true);
    rig.store(ns, None, &[100, 101, 102]);
    rig.core.tier_is_whole(TIER);
    assert!(!rig.core.has_backfill(), "others wait to be written");
    assert_eq!(write_all(&mut rig), [100, 101, 102].map(key));
    assert!(rig.core.has_backfill());
    rig.core.purge(NamespaceId(1));
    assert_eq!(written_by_backfill(&mut rig, |_| true), []);
    assert!(!rig.core.has_backfill());
    rig.audit();
}

#[test]
fn tiers_that_take_what_returns_and_shared_ones_get_no_backfill() {
    for limits in [Limits::default(), Limits { is_shared: true, ..all() }] {
        let (mut rig, _) = recovered(limits, 0..4);
        rig.core.set_healthy(TIER, true);
        rig.core.tier_is_whole(TIER);
        assert!(!rig.core.has_backfill());
        assert_eq!(written_by_backfill(&mut rig, |_| true), []);
    }
}
