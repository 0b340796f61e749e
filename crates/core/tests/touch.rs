//! Shared stores are told of the uses that they do not see, and are given again what they lost.

mod common;

use common::{ENGINE, Rig, SMALL, hash, layout};
use forebay_core::store::CommitOutcome;
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits, TierId, TierStats, Touching};
use forebay_core::{BlockId, Effect, ErrorKind, Generation, NamespaceIndex};

const STORE: TierId = TierId(0);
const FOUND: Outcome = Outcome::Found;
const GONE: Outcome = Outcome::Absent;

type Touch = (BlockId, Generation, u8);

/// A shared store with a mark that is old after each tick.
fn rig(per_tick: u32) -> (Rig, NamespaceIndex) {
    rig_of(4, per_tick)
}

fn rig_of(units: u32, per_tick: u32) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(units);
    let touching = Some(Touching { per_tick, least_ticks: 1, most_ticks: 1, asks_per_tick: 0 });
    rig.core.open_tier(Limits { admission: Admission::All, is_shared: true, touching, ..Limits::default() });
    let ns = rig.open(1, &layout(SMALL));
    (rig, ns)
}

/// Ends the stores that are under way, and returns the touches that were asked for.
fn follow(rig: &mut Rig) -> (usize, Vec<Touch>) {
    let (mut stored, mut touches) = (0, Vec::new());
    loop {
        let effects = rig.effects();
        if effects.is_empty() {
            return (stored, touches);
        }
        for effect in effects {
            match effect {
                Effect::WriteBack { tier, block, .. } => {
                    rig.core.written_back(tier, block, Outcome::Stored);
                    stored += 1;
                }
                Effect::Touch { tier, age, block, generation } => {
                    assert_eq!(tier, STORE);
                    touches.push((block, generation, age));
                }
                Effect::Promote { tier, block, generation, .. } => {
                    assert_eq!(tier, DISK);
                    let length_bytes = rig.core.block_length_bytes(block);
                    assert!(rig.core.promoted(block, generation, Outcome::Loaded { length_bytes, checksum: 1 }));
                }
                _ => {}
            }
        }
    }
}

fn hit(rig: &mut Rig, ns: NamespaceIndex, keys: &[u64]) -> (usize, Vec<Touch>) {
    let (hits, lease) = rig.lease(ns, keys);
    assert_eq!(hits, keys.len());
    rig.core.release(ENGINE, lease);
    follow(rig)
}

fn stats(rig: &Rig) -> TierStats {
    rig.core.tier_report(STORE).stats
}

fn end(rig: &mut Rig, touches: &[Touch], outcome: Outcome) {
    for (block, generation, age) in touches {
        rig.core.touched(STORE, *block, *generation, *age, outcome);
    }
    rig.audit();
}

#[test]
fn a_hit_of_an_old_mark_touches_once_in_a_period_leaves_first() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0, 1, 2]);
    assert_eq!(follow(&mut rig), (3, vec![]));
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (0, vec![]), "it was just stored");
    rig.core.expire_skips();
    let (stored, touches) = hit(&mut rig, ns, &[0, 1, 2]);
    let keys: Vec<_> = touches.iter().map(|touch| rig.core.block_key(touch.0).hash).collect();
    assert_eq!((stored, keys), (0, vec![hash(2), hash(1), hash(0)]));
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (0, vec![]), "once in a period");
    end(&mut rig, &touches, FOUND);
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (0, vec![]));
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]).1.len(), 3);
    assert_eq!((stats(&rig).touches, stats(&rig).lost), (6, 0));
}

#[test]
fn what_is_gone_is_stored_again_at_the_next_hit() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0, 1, 2]);
    follow(&mut rig);
    rig.core.expire_skips();
    let (_, touches) = hit(&mut rig, ns, &[0, 1, 2]);
    end(&mut rig, &touches, GONE);
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (3, vec![]));
    assert_eq!(stats(&rig).lost, 3);
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]).1.len(), 3, "and is touched like before");
}

#[test]
fn a_repeated_store_is_a_use_too() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0, 1]);
    follow(&mut rig);
    rig.core.expire_skips();
    rig.store(ns, None, &[0, 1]);
    let (stored, touches) = follow(&mut rig);
    assert_eq!((stored, touches.len()), (0, 2));
    end(&mut rig, &touches, GONE);
    rig.store(ns, None, &[0, 1]);
    assert_eq!(follow(&mut rig), (2, vec![]));
}

#[test]
fn a_store_that_is_sick_or_refuses_is_asked_again_in_the_next_period_and_given_nothing() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0, 1]);
    follow(&mut rig);
    rig.core.expire_skips();
    let (_, touches) = hit(&mut rig, ns, &[0, 1]);
    end(&mut rig, &touches[..1], Outcome::Failed(ErrorKind::Timeout));
    end(&mut rig, &touches[1..], Outcome::Failed(ErrorKind::Unsupported));
    assert_eq!(hit(&mut rig, ns, &[0, 1]), (0, vec![]));
    rig.core.expire_skips();
    rig.core.set_healthy(STORE, false);
    assert_eq!(hit(&mut rig, ns, &[0, 1]), (0, vec![]), "nothing is asked of a sick store");
    rig.core.set_healthy(STORE, true);
    assert_eq!(hit(&mut rig, ns, &[0, 1]).1.len(), 2);
}

#[test]
fn a_store_that_is_only_read_from_is_never_touched() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0, 1]);
    follow(&mut rig);
    rig.core.set_read_only(STORE);
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0, 1]), (0, vec![]));
}

#[test]
fn touches_have_a_limit_and_those_that_were_left_out_come_next() {
    let (mut rig, ns) = rig(5);
    let keys: Vec<u64> = (0..12).collect();
    rig.store(ns, None, &keys);
    follow(&mut rig);
    let mut touched = Vec::new();
    for expected in [5, 5, 5] {
        rig.core.expire_skips();
        let (_, touches) = hit(&mut rig, ns, &keys);
        assert_eq!(touches.len(), expected);
        assert_eq!(hit(&mut rig, ns, &keys).1.len(), 0);
        touched.extend(touches);
    }
    assert!(touched.iter().all(|(_, _, age)| (1..=3).contains(age)), "{touched:?}");
}

/// One event asks for 64, and the same ones are due again when the rest has its turn.
#[test]
fn all_blocks_of_a_long_prompt_are_touched_however_often_it_is_seen() {
    let (mut rig, ns) = rig_of(256, 100);
    let keys: Vec<u64> = (0..250).collect();
    for some in keys.chunks(50) {
        rig.store(ns, some[0].checked_sub(1), some);
        follow(&mut rig);
    }
    let mut counts = vec![0; keys.len()];
    for _ in 0..20 {
        rig.core.expire_skips();
        let (_, mut touches) = hit(&mut rig, ns, &keys);
        while rig.core.step() {}
        touches.extend(follow(&mut rig).1);
        assert_eq!(touches.len(), 100, "the limit between two ticks is used");
        for (block, ..) in &touches {
            let hash_of = rig.core.block_key(*block).hash;
            counts[keys.iter().position(|key| hash(*key) == hash_of).unwrap()] += 1;
        }
    }
    // Eight each would be equal shares.
    assert!(counts.iter().all(|count| (6..=10).contains(count)), "{counts:?}");
}

#[test]
fn what_was_evicted_while_it_waited_is_not_touched() {
    let (mut rig, ns) = rig(1);
    let keys: Vec<u64> = (0..3).collect();
    rig.store(ns, None, &keys);
    follow(&mut rig);
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &keys).1.len(), 1);
    rig.core.purge(rig.core.namespace_id(ns)).unwrap();
    rig.core.expire_skips();
    while rig.core.step() {}
    assert_eq!(follow(&mut rig).1, vec![]);
    rig.audit();
}

#[test]
fn a_block_that_waits_to_be_written_is_not_touched() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0]);
    let effects = rig.effects();
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0]), (0, vec![]), "its store has not ended");
    let write = |effect: &Effect| if let Effect::WriteBack { block, .. } = effect { Some(*block) } else { None };
    let block = effects.iter().find_map(write).expect("it is written");
    rig.core.written_back(STORE, block, Outcome::Stored);
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0]).1.len(), 1);
}

#[test]
fn what_left_the_pool_meanwhile_is_nobodys() {
    let (mut rig, ns) = rig(100);
    rig.store(ns, None, &[0]);
    follow(&mut rig);
    rig.core.expire_skips();
    let (_, touches) = hit(&mut rig, ns, &[0]);
    let (block, generation, _) = touches[0];
    assert!(rig.core.resident_key(block, generation).is_some());
    let others = (100..1000).take_while(|key| {
        rig.store(ns, None, &[*key]);
        follow(&mut rig);
        rig.is_resident(ns, 0)
    });
    assert!(others.count() < 900, "it is evicted at some time");
    assert_eq!(rig.core.resident_key(block, generation), None);
    end(&mut rig, &touches, GONE);
    let slots = rig.reserve(ns, 1);
    assert_eq!(rig.commit(ns, 0, None, slots[0]), CommitOutcome::Stored);
    assert_eq!(follow(&mut rig).0, 1);
}

/// A shared store that takes hits, and a disk that takes all. The disk has these blocks, the store was given the first
/// `given` of them, and none is in the pool.
fn rig_with_a_disk(keys: &[u64], given: usize) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(keys.len().div_ceil(4).max(4) as u32);
    let touching = Some(Touching { per_tick: 5, least_ticks: 1, most_ticks: 1, asks_per_tick: 100 });
    let admission = Admission::SecondSighting;
    rig.core.open_tier(Limits { admission, is_shared: true, touching, ..Limits::default() });
    rig.core.open_tier(Limits { admission: Admission::All, ..Limits::default() });
    let ns = rig.open(1, &layout(SMALL));
    for some in keys.chunks(50) {
        rig.store(ns, some[0].checked_sub(1), some);
        assert_eq!(follow(&mut rig), (some.len(), vec![]));
    }
    if given > 0 {
        assert_eq!(hit(&mut rig, ns, &keys[..given]), (given, vec![]), "the store was never given them");
    }
    evict(&mut rig, ns, keys);
    (rig, ns)
}

fn evict(rig: &mut Rig, ns: NamespaceIndex, keys: &[u64]) {
    let mut others = 10_000..20_000;
    while keys.iter().any(|key| rig.is_resident(ns, *key)) {
        rig.store(ns, None, &[others.next().expect("they are evicted at some time")]);
        follow(rig);
    }
    rig.effects();
}

/// Brings them up from the disk, and hits them.
fn use_again(rig: &mut Rig, ns: NamespaceIndex, keys: &[u64]) -> (usize, Vec<Touch>) {
    let (mut stored, mut touches) = (0, Vec::new());
    for _ in 0..100 {
        let (hits, lease) = rig.lease(ns, keys);
        rig.core.release(ENGINE, lease);
        let (more_stored, more) = follow(rig);
        stored += more_stored;
        touches.extend(more);
        if hits == keys.len() {
            return (stored, touches);
        }
    }
    panic!("they do not come up");
}

const DISK: TierId = TierId(1);

#[test]
fn a_store_is_asked_for_what_it_was_given_before_the_block_is_sent_again() {
    let (mut rig, ns) = rig_with_a_disk(&[0, 1, 2], 3);
    let (stored, touches) = use_again(&mut rig, ns, &[0, 1, 2]);
    let keys: Vec<_> = touches.iter().map(|touch| rig.core.block_key(touch.0).hash).collect();
    assert_eq!((stored, keys), (0, vec![hash(0), hash(1), hash(2)]));
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (0, vec![]), "one question at a time");
    end(&mut rig, &touches[..2], FOUND);
    end(&mut rig, &touches[2..], GONE);
    assert_eq!(follow(&mut rig), (1, vec![]), "what the store lacks is sent at once");
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]), (0, vec![]));
    assert_eq!(stats(&rig).lost, 0, "a question is no use of a block that was known to be there");
    rig.core.expire_skips();
    assert_eq!(hit(&mut rig, ns, &[0, 1, 2]).1.len(), 3, "and is touched like others");
    evict(&mut rig, ns, &[0, 1, 2]);
    assert_eq!(use_again(&mut rig, ns, &[0, 1, 2]).1.len(), 3, "and asked for when it comes up again");
}

/// Whatever is under its name there may be of no use to anybody.
#[test]
fn what_a_store_was_not_given_is_sent_without_a_question() {
    let (mut rig, ns) = rig_with_a_disk(&[0, 1, 2], 1);
    let (stored, touches) = use_again(&mut rig, ns, &[0, 1, 2]);
    assert_eq!((stored, touches.len()), (2, 1));
}

#[test]
fn what_a_store_gave_back_damaged_is_sent_without_a_question() {
    let (mut rig, ns) = rig_with_a_disk(&[0], 1);
    // The disk fails, so the block is asked for from the store, and comes back damaged.
    rig.core.set_healthy(DISK, false);
    let (mut is_found, mut is_damaged) = (false, false);
    for _ in 0..10 {
        let (_, lease) = rig.lease(ns, &[0]);
        rig.core.release(ENGINE, lease);
        let mut probes = Vec::new();
        rig.core.take_probes(&mut probes);
        for probe in probes {
            is_found = true;
            rig.core.probe_done(&probe, FOUND);
        }
        for effect in rig.effects() {
            if let Effect::Promote { tier, block, generation, .. } = effect {
                assert_eq!(tier, STORE);
                is_damaged = true;
                rig.core.promoted(block, generation, Outcome::Failed(ErrorKind::Corrupt));
            }
        }
    }
    assert!(is_found && is_damaged);
    rig.core.set_healthy(DISK, true);
    assert_eq!(use_again(&mut rig, ns, &[0]), (1, vec![]));
}

#[test]
fn a_store_that_cannot_be_asked_is_sent_the_block() {
    let (mut rig, ns) = rig_with_a_disk(&[0], 1);
    let (_, touches) = use_again(&mut rig, ns, &[0]);
    end(&mut rig, &touches, Outcome::Failed(ErrorKind::Timeout));
    assert_eq!(follow(&mut rig), (0, vec![]));
    let (stored, touches) = hit(&mut rig, ns, &[0]);
    assert_eq!((stored, touches.len()), (0, 1), "the next hit asks again");
    end(&mut rig, &touches, Outcome::Failed(ErrorKind::Unsupported));
    assert_eq!(follow(&mut rig), (1, vec![]));
}

#[test]
fn what_is_purged_while_the_store_is_asked_is_not_sent() {
    let (mut rig, ns) = rig_with_a_disk(&[0, 1], 2);
    let (_, touches) = use_again(&mut rig, ns, &[0, 1]);
    assert_eq!(touches.len(), 2);
    rig.core.purge(rig.core.namespace_id(ns)).unwrap();
    end(&mut rig, &touches, GONE);
    assert_eq!(follow(&mut rig), (0, vec![]));
}

#[test]
fn what_left_the_pool_while_the_store_was_asked_is_counted() {
    let (mut rig, ns) = rig_with_a_disk(&[0], 1);
    let (_, touches) = use_again(&mut rig, ns, &[0]);
    evict(&mut rig, ns, &[0]);
    end(&mut rig, &touches, GONE);
    assert_eq!(stats(&rig).dropped_gone, 1);
}

/// A question about a block that was evicted while it waited would cost others theirs.
#[test]
fn the_store_is_asked_within_a_limit_for_what_is_in_the_pool() {
    let (first, second): (Vec<u64>, Vec<u64>) = ((0..250).collect(), (1000..1050).collect());
    let (mut rig, ns) = rig_with_a_disk(&first, first.len());
    rig.store(ns, None, &second);
    follow(&mut rig);
    assert_eq!(hit(&mut rig, ns, &second), (second.len(), vec![]));
    evict(&mut rig, ns, &second);
    let (stored, mut touches) = use_again(&mut rig, ns, &first);
    while rig.core.step() {}
    touches.extend(follow(&mut rig).1);
    assert_eq!((stored, touches.len()), (0, 100), "the limit between two ticks");
    assert_eq!(use_again(&mut rig, ns, &second), (0, vec![]));
    let others = (20_000..).find(|other| {
        rig.store(ns, None, &[*other]);
        follow(&mut rig);
        first.iter().all(|key| !rig.is_resident(ns, *key))
    });
    assert!(others.is_some() && second.iter().all(|key| rig.is_resident(ns, *key)));
    rig.core.expire_skips();
    while rig.core.step() {}
    assert_eq!(follow(&mut rig).1.len(), second.len());
    rig.audit();
}
