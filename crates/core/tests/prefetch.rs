//! Requests that wait: what of theirs lies below the pool comes up before they ask, and nobody is the worse for it.

mod common;

use common::{ENGINE, LARGE, Rig, SMALL, UNIT_BYTES, group, hash, layout};
use forebay_core::hints::HintId;
use forebay_core::layout::{Attention, Layout};
use forebay_core::lookup::{STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits, Probe, TierId};
use forebay_core::{BlockId, BlockKey, Config, Effect, ErrorKind, Generation, Instance, NamespaceId, NamespaceIndex};

const DISK: TierId = TierId(0);
const STORE: TierId = TierId(1);

type Load = (BlockId, Generation);

/// A pool of 16 slots a unit over a disk.
fn rig(units: u32) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(units);
    assert_eq!(rig.core.open_tier(Limits { admission: Admission::All, ..Limits::default() }), DISK);
    let ns = rig.open(1, &layout(SMALL));
    (rig, ns)
}

/// The same, with a store that hosts share below it.
fn shared(units: u32) -> (Rig, NamespaceIndex) {
    let (mut rig, ns) = rig(units);
    rig.core.open_tier(Limits { is_shared: true, ..Limits::default() });
    (rig, ns)
}

fn key(key: u64) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(key) }
}

fn lie_on_tier(rig: &mut Rig, keys: impl IntoIterator<Item = u64>) {
    keys.into_iter().for_each(|k| rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(k))));
}

/// A request for these keys waits, long enough that what can be done for it is done.
fn wait(rig: &mut Rig, ns: NamespaceIndex, keys: impl IntoIterator<Item = u64>) -> HintId {
    let packed: Vec<u8> = keys.into_iter().flat_map(u64::to_le_bytes).collect();
    let id = rig.core.hint(ENGINE, ns, 0, &packed, 8);
    rig.step_to_the_end();
    id
}

fn loads(rig: &mut Rig) -> Vec<Load> {
    let load = |effect| match effect {
        Effect::Promote { block, generation, .. } => Some((block, generation)),
        _ => None,
    };
    rig.effects().into_iter().filter_map(load).collect()
}

fn keys_of(rig: &Rig, loads: &[Load]) -> Vec<BlockKey> {
    loads.iter().map(|(block, _)| rig.core.block_key(*block)).collect()
}

fn end(rig: &mut Rig, (block, generation): Load, outcome: Outcome) -> bool {
    let is_ready = rig.core.promoted(block, generation, outcome);
    rig.step_to_the_end();
    is_ready
}

/// Ends loads as they come, until no more do; the keys in the order in which they were asked for.
fn load_all(rig: &mut Rig) -> Vec<BlockKey> {
    let mut came = Vec::new();
    let mut begun = loads(rig);
    while !begun.is_empty() {
        came.extend(keys_of(rig, &begun));
        let length_bytes = |rig: &Rig, block| rig.core.block_length_bytes(block);
        for load in begun {
            let outcome = Outcome::Loaded { length_bytes: length_bytes(rig, load.0), checksum: 7 };
            assert!(end(rig, load, outcome));
        }
        begun = loads(rig);
    }
    came
}

fn whole() -> Outcome {
    Outcome::Loaded { length_bytes: SMALL, checksum: 7 }
}

fn states(rig: &mut Rig, ns: NamespaceIndex, keys: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let keys: Vec<u64> = keys.into_iter().collect();
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &keys);
    rig.core.release(ENGINE, lease);
    answer.states
}

fn prefetch(rig: &Rig) -> (u64, u64) {
    let stats = rig.core.tier_report(DISK).stats;
    (stats.prefetches, stats.prefetch_hits)
}

#[test]
fn what_a_waiting_request_wants_comes_up_unasked_and_its_lookup_hits_at_once() {
    let (mut rig, ns) = rig(8);
    lie_on_tier(&mut rig, 0..5);
    let id = wait(&mut rig, ns, 0..6);
    assert_eq!(load_all(&mut rig), (0..5).map(key).collect::<Vec<_>>(), "in prefix order");
    assert_eq!(prefetch(&rig), (5, 0));
    rig.core.withdraw_hint(ENGINE, id);
    assert_eq!(states(&mut rig, ns, 0..6), [STATE_READY; 5]);
    assert_eq!(states(&mut rig, ns, 0..6), [STATE_READY; 5]);
    assert_eq!(prefetch(&rig), (5, 5), "each is of use once");
    rig.audit();
}

#[test]
fn the_first_in_the_queue_is_served_first_and_no_further_than_an_eighth_of_the_pool() {
    let (mut rig, ns) = rig(10);
    lie_on_tier(&mut rig, 0..160);
    let ids: Vec<_> = [40, 80, 120].map(|first| wait(&mut rig, ns, first..first + 15)).into();
    let expected: Vec<_> = (40..55).chain(80..85).map(key).collect();
    assert_eq!(load_all(&mut rig), expected, "20 of 160 slots");
    rig.core.withdraw_hint(ENGINE, ids[0]);
    rig.step_to_the_end();
    assert_eq!(load_all(&mut rig), (85..95).chain(120..125).map(key).collect::<Vec<_>>());
    ids.into_iter().for_each(|id| rig.core.withdraw_hint(ENGINE, id));
    rig.step_to_the_end();
    assert_eq!(load_all(&mut rig), []);
    rig.audit();
}

#[test]
fn nothing_comes_up_behind_a_hole() {
    let (mut rig, ns) = rig(8);
    lie_on_tier(&mut rig, [0, 1, 3, 10]);
    wait(&mut rig, ns, 0..4);
    wait(&mut rig, ns, 10..11);
    assert_eq!(load_all(&mut rig), [0, 1, 10].map(key), "nor does the hole hold up others");
    assert!(!rig.core.has_prefetches());
}

#[test]
fn blocks_of_a_window_come_up_whatever_is_missing_before_them() {
    let mut rig = Rig::new(8);
    rig.core.open_tier(Limits::default());
    let groups = vec![(0, group(Attention::Windowed, SMALL)), (1, group(Attention::Full, SMALL))];
    let ns = rig.open(1, &Layout::new(groups).unwrap());
    lie_on_tier(&mut rig, [1, 3]);
    wait(&mut rig, ns, 0..4);
    assert_eq!(load_all(&mut rig), [1, 3].map(key));
}

#[test]
fn what_is_in_the_pool_or_on_its_way_is_not_loaded_again() {
    let (mut rig, ns) = rig(8);
    rig.store(ns, None, &[0]);
    lie_on_tier(&mut rig, 0..4);
    assert_eq!(states(&mut rig, ns, 0..2), [STATE_READY, STATE_NOT_YET]);
    assert_eq!(loads(&mut rig).len(), 1);
    wait(&mut rig, ns, 0..3);
    wait(&mut rig, ns, 0..4);
    let begun = loads(&mut rig);
    assert_eq!(keys_of(&rig, &begun), [2, 3].map(key));
}

#[test]
fn only_some_loads_are_under_way_ahead_and_none_beside_those_of_lookups() {
    let (mut rig, ns) = rig(64);
    lie_on_tier(&mut rig, 0..1000);
    wait(&mut rig, ns, 0..100);
    let begun = loads(&mut rig);
    assert_eq!(begun.len(), 32);
    assert!(end(&mut rig, begun[0], whole()));
    assert_eq!(loads(&mut rig).len(), 1, "one goes on where another has ended");
    // A lookup starts as many as ever, and until they have ended nothing more is started ahead.
    assert_eq!(states(&mut rig, ns, 500..540), [STATE_NOT_YET; 40]);
    let asked = loads(&mut rig);
    assert_eq!(asked.len(), 40);
    begun[1..].iter().for_each(|load| assert!(end(&mut rig, *load, whole())));
    assert_eq!(loads(&mut rig), []);
    asked.into_iter().for_each(|load| assert!(end(&mut rig, load, whole())));
    assert!(!loads(&mut rig).is_empty());
    rig.audit();
}

#[test]
fn half_of_a_tiers_load_slots_are_the_lookups_and_what_comes_up_ahead_takes_none_of_theirs() {
    let mut rig = Rig::new(16);
    rig.core.open_tier(Limits { load_blocks: 4, ..Limits::default() });
    let ns = rig.open(1, &layout(SMALL));
    lie_on_tier(&mut rig, 0..100);
    wait(&mut rig, ns, 0..20);
    assert_eq!(loads(&mut rig).len(), 2);
    states(&mut rig, ns, 50..60);
    assert_eq!(loads(&mut rig).len(), 4);
    // Taken over by a lookup they count as its own.
    states(&mut rig, ns, 0..2);
    assert_eq!(prefetch(&rig), (2, 2));
    assert_eq!(rig.reason(ns, 0, 90), Some(MissReason::PromotionUnfinished));
    assert_eq!(loads(&mut rig), []);
}

#[test]
fn a_sixteenth_of_the_pool_may_be_on_its_way_and_lookups_have_their_share_beside_it() {
    let mut config = Config::new(UNIT_BYTES, 4);
    config.promise_permille = 250;
    let mut rig = Rig::with(config);
    rig.core.open_tier(Limits::default());
    let ns = rig.open(1, &layout(SMALL));
    lie_on_tier(&mut rig, 0..64);
    wait(&mut rig, ns, 0..8);
    assert_eq!(loads(&mut rig).len(), 3, "of 64 slots");
    assert_eq!(states(&mut rig, ns, 20..40), [STATE_NOT_YET; 16], "a quarter, as if nobody waited");
    assert_eq!(rig.reason(ns, 0, 50), Some(MissReason::OverLimit));
}

#[test]
fn nothing_that_is_wanted_and_nothing_that_is_held_goes_for_it() {
    let mut rig = Rig::with(Config { reserve_permille: 1000, ..Config::new(UNIT_BYTES, 1) });
    rig.core.open_tier(Limits { admission: Admission::All, store_blocks: 0, ..Limits::default() });
    rig.core.set_read_only(DISK);
    let ns = rig.open(1, &layout(SMALL));
    let stored: Vec<u64> = (0..16).collect();
    assert_eq!(rig.store(ns, None, &stored), 16);
    lie_on_tier(&mut rig, [100]);
    // What is wanted was used longest ago.
    let (_, held) = rig.lease(ns, &stored[11..]);
    let expected = rig.core.hint(ENGINE, ns, 0, &u64::to_le_bytes(100), 8);
    wait(&mut rig, ns, 0..11);
    assert_eq!(load_all(&mut rig), [], "eleven are wanted, five are held");
    assert!(stored.iter().all(|key| rig.is_resident(ns, *key)));
    rig.core.release(ENGINE, held);
    rig.step_to_the_end();
    assert_eq!(load_all(&mut rig), [key(100)]);
    assert!(stored[..11].iter().all(|key| rig.is_resident(ns, *key)));
    assert_eq!(rig.core.stats().evicted, 1);
    rig.core.withdraw_hint(ENGINE, expected);
    rig.audit();
}

#[test]
fn the_last_free_slots_are_left_to_those_who_ask() {
    let mut rig = Rig::with(Config { reserve_permille: 1000, ..Config::new(UNIT_BYTES, 1) });
    rig.core.open_tier(Limits::default());
    let ns = rig.open(1, &layout(SMALL));
    lie_on_tier(&mut rig, 0..4);
    let reserved = rig.reserve(ns, 14);
    assert_eq!(reserved.len(), 14);
    wait(&mut rig, ns, 0..4);
    assert_eq!(loads(&mut rig), [], "two of sixteen");
    assert_eq!(rig.reserve(ns, 2).len(), 2);
}

#[test]
fn a_size_that_has_no_room_does_not_hold_up_another() {
    let mut rig = Rig::with(Config { reserve_permille: 1000, ..Config::new(UNIT_BYTES, 8) });
    rig.core.open_tier(Limits::default());
    let ns = rig.open(1, &layout(SMALL));
    let large = rig.open(2, &layout(LARGE));
    lie_on_tier(&mut rig, 0..4);
    rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&BlockKey { namespace: NamespaceId(2), ..key(50) }));
    // All memory is of the small size.
    let mut slots = Vec::new();
    (0..2).for_each(|_| rig.core.reserve(ENGINE, ns, 0, 64, true, &mut slots));
    slots[..60].iter().for_each(|at| rig.core.abort(ENGINE, *at));
    wait(&mut rig, large, 50..51);
    wait(&mut rig, ns, 0..1);
    assert_eq!(load_all(&mut rig), [key(0)]);
}

#[test]
fn a_request_that_is_met_or_gone_stops_what_has_not_begun_and_leaks_nothing() {
    for how in 0..3 {
        let (mut rig, ns) = rig(64);
        lie_on_tier(&mut rig, 0..1000);
        let id = wait(&mut rig, ns, 0..100);
        let begun = loads(&mut rig);
        match how {
            0 => rig.core.withdraw_hint(ENGINE, id),
            1 => rig.core.instance_gone(ENGINE),
            _ => _ = rig.resume(ENGINE, &[]),
        }
        begun.into_iter().for_each(|load| assert!(end(&mut rig, load, whole())));
        assert_eq!(loads(&mut rig), []);
        assert_eq!(rig.core.held(), Default::default());
        rig.audit();
    }
}

#[test]
fn a_purge_takes_back_what_is_on_its_way() {
    let (mut rig, ns) = rig(64);
    lie_on_tier(&mut rig, 0..100);
    wait(&mut rig, ns, 0..100);
    let begun = loads(&mut rig);
    let (_, _, new) = rig.core.purge(NamespaceId(1)).unwrap();
    wait(&mut rig, new, 0..100);
    assert_eq!(rig.core.tier_report(DISK).late_bytes, begun.len() as u64 * SMALL);
    begun.into_iter().for_each(|load| assert!(!end(&mut rig, load, whole())));
    assert_eq!(loads(&mut rig), []);
    assert_eq!(rig.core.held().pinned_bytes, 0);
    rig.audit();
}

#[test]
fn a_load_that_failed_or_is_late_while_nobody_asked_is_begun_again_by_who_asks() {
    for is_late in [false, true] {
        let (mut rig, ns) = rig(8);
        lie_on_tier(&mut rig, 0..2);
        wait(&mut rig, ns, 0..2);
        let [first, second] = loads(&mut rig)[..] else { panic!("two loads") };
        if is_late {
            rig.core.give_up(first.0, first.1);
            rig.step_to_the_end();
        } else {
            assert!(!end(&mut rig, first, Outcome::Failed(ErrorKind::Timeout)));
        }
        assert_eq!(loads(&mut rig), [], "a key is tried once for a request that waits");
        assert!(end(&mut rig, second, whole()));
        assert_eq!(states(&mut rig, ns, 0..2), [STATE_NOT_YET; 2]);
        assert_eq!(loads(&mut rig).len(), 1);
        rig.audit();
    }
}

#[test]
fn once_a_lookup_waits_for_a_load_its_failure_counts_as_ever() {
    let (mut rig, ns) = rig(8);
    lie_on_tier(&mut rig, 0..1);
    wait(&mut rig, ns, 0..1);
    let load = loads(&mut rig)[0];
    assert!(rig.core.is_prefetch(load.0));
    assert_eq!(rig.look(None, ns, 0, &[0]).0.states, [STATE_NOT_YET]);
    assert!(rig.core.is_prefetch(load.0), "who wants no lease waits for nothing");
    assert_eq!(states(&mut rig, ns, 0..1), [STATE_NOT_YET]);
    assert!(!rig.core.is_prefetch(load.0));
    rig.core.give_up(load.0, load.1);
    assert_eq!(rig.reason(ns, 0, 0), Some(MissReason::TooSlow));
}

#[test]
fn a_sick_tier_is_left_alone_until_it_is_well() {
    let (mut rig, ns) = rig(8);
    lie_on_tier(&mut rig, 0..2);
    rig.core.set_healthy(DISK, false);
    wait(&mut rig, ns, 0..2);
    assert_eq!(loads(&mut rig), []);
    assert!(rig.core.has_prefetches());
    rig.core.set_healthy(DISK, true);
    rig.step_to_the_end();
    assert_eq!(load_all(&mut rig), [0, 1].map(key));
}

#[test]
fn shared_stores_are_asked_ahead_a_few_keys_first_and_more_as_they_have_them() {
    let (mut rig, ns) = shared(64);
    wait(&mut rig, ns, 0..40);
    let mut probes: Vec<Probe> = Vec::new();
    rig.core.take_probes(&mut probes);
    assert_eq!(probes.iter().map(|probe| probe.key).collect::<Vec<_>>(), (0..8).map(key).collect::<Vec<_>>());
    for _ in 0..10 {
        probes.drain(..).for_each(|probe| {
            let is_there = probe.key.hash.as_bytes()[0] < 30;
            rig.core.probe_done(&probe, if is_there { Outcome::Found } else { Outcome::Absent });
        });
        rig.step_to_the_end();
        load_all(&mut rig);
        rig.core.take_probes(&mut probes);
    }
    assert_eq!(states(&mut rig, ns, 0..40), [STATE_READY; 30]);
    assert_eq!(rig.core.tier_report(STORE).stats.prefetches, 30);
    rig.core.take_probes(&mut probes);
    assert_eq!(probes, [], "what is nowhere is known as well");
    rig.audit();
}

#[test]
fn a_new_prompt_costs_shared_stores_few_questions() {
    let (mut rig, ns) = shared(1024);
    (0..40).for_each(|request| _ = wait(&mut rig, ns, request * 100..request * 100 + 50));
    let mut probes = Vec::new();
    rig.core.take_probes(&mut probes);
    assert_eq!(probes.len(), 64, "unanswered at a time");
    let mut asked = 0;
    while !probes.is_empty() {
        asked += probes.len();
        probes.drain(..).for_each(|probe| rig.core.probe_done(&probe, Outcome::Absent));
        rig.step_to_the_end();
        rig.core.take_probes(&mut probes);
        assert!(probes.len() <= 64);
    }
    assert_eq!(asked, 40 * 8);
    assert!(!rig.core.has_prefetches(), "all have ended");
}

#[test]
fn one_step_begins_few_and_no_step_is_told_of_more_when_there_is_none() {
    let (mut rig, ns) = rig(64);
    lie_on_tier(&mut rig, 0..1000);
    let packed: Vec<u8> = (0..500u64).flat_map(u64::to_le_bytes).collect();
    rig.core.hint(ENGINE, ns, 0, &packed, 8);
    let mut most = 0;
    while rig.core.step() {
        most = most.max(loads(&mut rig).len());
    }
    assert!((1..=24).contains(&most), "{most} in one step");
    assert!(!rig.core.step(), "the tier has enough to do");
}

#[test]
fn without_a_tier_nothing_is_kept_for_it() {
    let mut rig = Rig::new(2);
    let ns = rig.open(1, &layout(SMALL));
    wait(&mut rig, ns, 0..4);
    assert_eq!(loads(&mut rig), []);
    rig.core.withdraw_hint(Instance(3), HintId(1));
    rig.audit();
}
