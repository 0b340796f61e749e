//! Shared stores, whose truth is elsewhere: what they are asked, what is believed of their answers, and for how long.

mod common;

use common::{ENGINE, Rig, SMALL, hash, layout};
use forebay_core::lookup::{STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits, Probe, TierId};
use forebay_core::{BlockKey, Effect, ErrorKind, NamespaceId, NamespaceIndex};

const DISK: TierId = TierId(0);
const NEAR: TierId = TierId(1);
const FAR: TierId = TierId(2);
const FOUND: Outcome = Outcome::Found;
const ABSENT: Outcome = Outcome::Absent;

/// A disk of its own and two shared stores.
fn rig() -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(2);
    let all = Limits { admission: Admission::All, ..Limits::default() };
    rig.core.open_tier(all);
    rig.core.open_tier(Limits { is_shared: true, ..all });
    rig.core.open_tier(Limits { is_shared: true, ..all });
    let ns = rig.open(1, &layout(SMALL));
    (rig, ns)
}

fn key(key: u64) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), group: 0, hash: hash(key) }
}

fn probes(rig: &mut Rig) -> Vec<Probe> {
    let mut probes = Vec::new();
    rig.core.take_probes(&mut probes);
    probes
}

fn asked(keys: impl IntoIterator<Item = u64>) -> Vec<Probe> {
    keys.into_iter().flat_map(|k| [NEAR, FAR].map(|tier| Probe { tier, key: key(k), length_bytes: SMALL })).collect()
}

fn states(rig: &mut Rig, ns: NamespaceIndex, keys: &[u64]) -> Vec<u8> {
    let (answer, lease) = rig.look(Some(ENGINE), ns, 0, keys);
    rig.core.release(ENGINE, lease);
    answer.states
}

fn answer(rig: &mut Rig, tier: TierId, k: u64, outcome: Outcome) {
    rig.core.probe_done(&Probe { tier, key: key(k), length_bytes: SMALL }, outcome);
}

/// (tier, key) of the loads that were started.
fn loads(rig: &mut Rig) -> Vec<(TierId, BlockKey)> {
    let load = |effect| if let Effect::Promote { tier, block, .. } = effect { Some((tier, block)) } else { None };
    let started: Vec<_> = rig.effects().into_iter().filter_map(load).collect();
    started.into_iter().map(|(tier, block)| (tier, rig.core.block_key(block))).collect()
}

#[test]
fn each_unknown_key_is_asked_of_every_shared_store_once() {
    let (mut rig, ns) = rig();
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 3]);
    assert_eq!(probes(&mut rig), asked(0..3));
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 3]);
    assert_eq!(probes(&mut rig), []);
    assert_eq!(rig.core.stats().misses[MissReason::PromotionUnfinished as usize], 6, "of two lookups");
}

#[test]
fn what_a_shared_store_fills_has_no_holder_that_outlives_the_daemon() {
    let (mut rig, ns) = rig();
    states(&mut rig, ns, &[0]);
    [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, 0, FOUND));
    rig.effects();
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    let [.., Effect::Reserved { holders, .. }, Effect::Promote { .. }] = rig.effects()[..] else {
        panic!("it does not come up")
    };
    assert_eq!(holders, 0);
}

#[test]
fn what_is_found_comes_up_from_the_nearest_store_that_has_it() {
    let (mut rig, ns) = rig();
    states(&mut rig, ns, &[0, 1, 2]);
    answer(&mut rig, FAR, 0, FOUND);
    answer(&mut rig, NEAR, 0, FOUND);
    answer(&mut rig, NEAR, 1, ABSENT);
    answer(&mut rig, FAR, 1, FOUND);
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 3]);
    assert_eq!(loads(&mut rig), [(NEAR, key(0)), (FAR, key(1))]);
}

#[test]
fn a_key_that_is_nowhere_ends_the_prefix_and_is_not_asked_for_again_for_a_while() {
    let (mut rig, ns) = rig();
    states(&mut rig, ns, &[0, 1]);
    probes(&mut rig);
    answer(&mut rig, NEAR, 0, ABSENT);
    assert_eq!(states(&mut rig, ns, &[0, 1]), [STATE_NOT_YET; 2], "one has not answered");
    answer(&mut rig, FAR, 0, ABSENT);
    rig.core.expire_skips();
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [0u8; 0]);
    assert_eq!(probes(&mut rig), []);
    rig.core.expire_skips();
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET], "somebody may have stored it by now");
    assert_eq!(probes(&mut rig), asked(0..1));
}

#[test]
fn a_question_that_is_not_answered_is_waited_for_however_long_until_it_is_given_up() {
    let (mut rig, ns) = rig();
    states(&mut rig, ns, &[0]);
    (0..5).for_each(|_| rig.core.expire_skips());
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    assert_eq!(probes(&mut rig).len(), 2);
    [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, 0, Outcome::Failed(ErrorKind::Timeout)));
    assert_eq!(states(&mut rig, ns, &[0]), [0u8; 0]);
    answer(&mut rig, FAR, 0, FOUND);
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET], "a late answer is welcome");
    assert_eq!(loads(&mut rig), [(FAR, key(0))]);
}

#[test]
fn a_block_that_was_evicted_after_it_was_found_is_a_miss() {
    let (mut rig, ns) = rig();
    states(&mut rig, ns, &[0]);
    probes(&mut rig);
    answer(&mut rig, NEAR, 0, FOUND);
    states(&mut rig, ns, &[0]);
    let load =
        |effect| if let Effect::Promote { block, generation, .. } = effect { Some((block, generation)) } else { None };
    let (block, generation) = rig.effects().into_iter().find_map(load).expect("it is being loaded");
    assert!(!rig.core.promoted(block, generation, Outcome::Absent));
    assert_eq!(states(&mut rig, ns, &[0]), [0u8; 0]);
    assert_eq!((probes(&mut rig), loads(&mut rig)), (vec![], vec![]));
    rig.audit();
}

#[test]
fn a_block_of_a_sick_disk_comes_up_from_a_store_that_has_it_too() {
    let (mut rig, ns) = rig();
    (0..3).for_each(|k| rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(k))));
    rig.core.set_healthy(DISK, false);
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 3]);
    assert_eq!(probes(&mut rig), asked(0..3));
    for (k, outcome) in [(0, FOUND), (1, FOUND), (2, ABSENT)] {
        [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, k, outcome));
    }
    assert_eq!(states(&mut rig, ns, &[0, 1, 2]), [STATE_NOT_YET; 2]);
    assert_eq!(rig.reason(ns, 0, 2), Some(MissReason::Failed), "only the disk has it");
    assert_eq!(loads(&mut rig), [(NEAR, key(0)), (NEAR, key(1))]);
    rig.core.set_healthy(DISK, true);
    states(&mut rig, ns, &[2]);
    assert_eq!(loads(&mut rig), [(DISK, key(2))]);
    rig.audit();
}

#[test]
fn a_block_that_a_disk_fails_to_load_comes_up_from_a_store_that_has_it_too() {
    let (mut rig, ns) = rig();
    (0..2).for_each(|k| rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(k))));
    states(&mut rig, ns, &[0, 1]);
    let load =
        |effect| if let Effect::Promote { block, generation, .. } = effect { Some((block, generation)) } else { None };
    let started: Vec<_> = rig.effects().into_iter().filter_map(load).collect();
    let [(failed, of_failed), (late, of_late)] = started[..] else { panic!("{started:?}") };
    assert!(!rig.core.promoted(failed, of_failed, Outcome::Failed(ErrorKind::Io)));
    rig.core.give_up(late, of_late);
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    assert_eq!(states(&mut rig, ns, &[1]), [STATE_NOT_YET]);
    assert_eq!(probes(&mut rig), asked(0..2));
    answer(&mut rig, FAR, 0, FOUND);
    answer(&mut rig, NEAR, 0, ABSENT);
    [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, 1, ABSENT));
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    assert_eq!(rig.reason(ns, 0, 1), Some(MissReason::TooSlow), "only the disk has it");
    assert_eq!(loads(&mut rig), [(FAR, key(0))]);
    rig.audit();
}

#[test]
fn an_own_disk_is_not_passed_by_for_a_store() {
    let (mut rig, ns) = rig();
    rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(0)));
    states(&mut rig, ns, &[0]);
    assert_eq!(probes(&mut rig), []);
    assert_eq!(loads(&mut rig), [(DISK, key(0))]);
}

#[test]
fn a_sick_store_is_not_asked_and_nobody_waits_for_it() {
    let (mut rig, ns) = rig();
    [NEAR, FAR].into_iter().for_each(|tier| rig.core.set_healthy(tier, false));
    assert_eq!(states(&mut rig, ns, &[0]), [0u8; 0]);
    assert_eq!(probes(&mut rig), []);
}

/// Else operators would look for the reason in the prompts.
#[test]
fn a_miss_that_no_store_can_speak_for_has_failed() {
    let (mut rig, ns) = rig();
    let reasons =
        |rig: &Rig| [MissReason::NeverSeen, MissReason::Failed].map(|reason| rig.core.stats().misses[reason as usize]);
    let silent = Outcome::Failed(ErrorKind::Timeout);
    states(&mut rig, ns, &[0, 1]);
    [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, 0, silent));
    answer(&mut rig, NEAR, 1, ABSENT);
    answer(&mut rig, FAR, 1, silent);
    states(&mut rig, ns, &[0]);
    assert_eq!(reasons(&rig), [0, 1], "nobody could tell");
    states(&mut rig, ns, &[1]);
    assert_eq!(reasons(&rig), [1, 1], "what one store is given, all are given");
    rig.core.set_healthy(NEAR, false);
    states(&mut rig, ns, &[2]);
    answer(&mut rig, FAR, 2, ABSENT);
    states(&mut rig, ns, &[2]);
    assert_eq!(reasons(&rig), [2, 1]);
    rig.core.set_healthy(FAR, false);
    states(&mut rig, ns, &[3]);
    assert_eq!(reasons(&rig), [2, 2], "there is nobody to ask");
}

#[test]
fn what_is_stored_there_is_not_kept_in_memory() {
    let (mut rig, ns) = rig();
    let before = rig.core.tier_heap_bytes();
    rig.core.set_healthy(DISK, false);
    rig.store(ns, None, &[0]);
    let store = |effect| if let Effect::WriteBack { tier, block, .. } = effect { Some((tier, block)) } else { None };
    let stores: Vec<_> = rig.effects().into_iter().filter_map(store).collect();
    assert_eq!(stores.iter().map(|(tier, _)| *tier).collect::<Vec<_>>(), [NEAR, FAR]);
    for (tier, block) in stores {
        assert!(rig.core.written_back(tier, block, Outcome::Stored));
        assert_eq!((rig.core.tier_report(tier).blocks, rig.core.tier_report(tier).stats.stored), (0, 1));
    }
    assert_eq!(rig.core.tier_heap_bytes(), before);
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_READY]);
    rig.audit();
}

#[test]
fn a_long_prompt_is_asked_for_in_pieces() {
    let (mut rig, ns) = rig();
    let prompt: Vec<u64> = (0..1000).collect();
    for first in [0, 256, 512, 768] {
        assert_eq!(states(&mut rig, ns, &prompt).len(), 1000, "all of it may yet be found");
        assert!(probes(&mut rig) == asked(first..(first + 256).min(1000)), "{first}");
    }
    assert!(probes(&mut rig).is_empty());
}

#[test]
fn nothing_is_written_where_nothing_may_be_written() {
    let (mut rig, ns) = rig();
    [DISK, FAR].into_iter().for_each(|tier| rig.core.set_read_only(tier));
    rig.store(ns, None, &[0]);
    let store = |effect| if let Effect::WriteBack { tier, .. } = effect { Some(tier) } else { None };
    assert_eq!(rig.effects().into_iter().filter_map(store).collect::<Vec<_>>(), [NEAR]);
    rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(5)));
    states(&mut rig, ns, &[5]);
    assert_eq!(loads(&mut rig), [(DISK, key(5))], "it is still read from");
}

#[test]
fn what_this_host_stored_is_found_though_the_stores_lacked_it_a_moment_ago() {
    let (mut rig, ns) = rig();
    let write_back = |rig: &mut Rig| {
        for effect in rig.effects() {
            if let Effect::WriteBack { tier, block, .. } = effect {
                let is_stored = tier == FAR && rig.core.block_key(block) == key(0);
                let outcome = if is_stored { Outcome::Stored } else { Outcome::Failed(ErrorKind::Full) };
                rig.core.written_back(tier, block, outcome);
            }
        }
    };
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    [NEAR, FAR].into_iter().for_each(|tier| answer(&mut rig, tier, 0, ABSENT));
    assert_eq!(rig.store(ns, None, &[0]), 1);
    write_back(&mut rig);
    for other in 1..=rig.core.capacity_bytes() / SMALL {
        rig.store(ns, None, &[other]);
        write_back(&mut rig);
    }
    assert_eq!(states(&mut rig, ns, &[0]), [STATE_NOT_YET]);
    assert_eq!(loads(&mut rig), [(FAR, key(0))]);
}
