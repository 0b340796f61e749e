//! What is given out to be read: what is hit first, all in the end, and nothing decides otherwise because of it.

mod common;

use std::collections::BTreeSet;

use common::{ENGINE, LARGE, Rig, SMALL, hash, layout};
use forebay_core::report::ReadyBlock;
use forebay_core::stats::Finder;
use forebay_core::{Effect, NamespaceIndex};

fn keys(piece: &[ReadyBlock]) -> Vec<u64> {
    let key = |block: &ReadyBlock| u64::from_le_bytes(block.key.hash.as_bytes().try_into().expect("8 bytes"));
    piece.iter().map(key).collect()
}

/// Stores that many prompts of one block, and hands them out once.
fn filled(rig: &mut Rig, blocks: u64) -> NamespaceIndex {
    let ns = rig.open(1, &layout(SMALL));
    (0..blocks).for_each(|key| assert_eq!(rig.store(ns, None, &[key]), 1));
    rig.effects();
    ns
}

fn hit(rig: &mut Rig, ns: NamespaceIndex, key: u64) {
    let (hits, lease) = rig.lease(ns, &[key]);
    assert_eq!(hits, 1, "{key} is there");
    rig.core.release(ENGINE, lease);
    rig.step_to_the_end();
    rig.effects();
}

/// Reads until that many more walks have ended.
fn walk(rig: &mut Rig, walks: u64) -> Vec<u64> {
    let end = rig.core.stats().scrubs + walks;
    let mut read = Vec::new();
    for _ in 0..100_000 {
        if rig.core.stats().scrubs == end {
            return read;
        }
        read.extend(keys(&rig.core.scrub_piece()));
    }
    panic!("the walk never ends");
}

#[test]
fn what_was_hit_is_read_before_the_rest_and_the_walk_goes_on() {
    let mut rig = Rig::new(64);
    let ns = filled(&mut rig, 1000);
    let first = keys(&rig.core.scrub_piece());
    assert!(!first.contains(&900) && !first.contains(&500), "the walk is not there yet: {first:?}");
    hit(&mut rig, ns, 900);
    hit(&mut rig, ns, 500);
    assert_eq!(keys(&rig.core.scrub_piece()), [900, 500]);
    let next = keys(&rig.core.scrub_piece());
    assert!(first.iter().chain(&next).copied().eq(0..next.len() as u64 + first.len() as u64), "{first:?} {next:?}");
}

#[test]
fn while_the_walk_rests_only_what_was_hit_is_read() {
    let mut rig = Rig::new(64);
    let ns = filled(&mut rig, 1000);
    let first = keys(&rig.core.scrub_piece());
    assert!(rig.core.scrub_hits().is_empty());
    hit(&mut rig, ns, 900);
    assert_eq!([(); 2].map(|()| keys(&rig.core.scrub_hits())), [vec![900], vec![]]);
    let next = keys(&rig.core.scrub_piece());
    assert_eq!(next.first(), Some(&(first.len() as u64)), "the walk goes on where it was");
}

#[test]
fn the_walk_ends_however_much_is_hit_and_what_is_hit_is_read_more_often() {
    let mut rig = Rig::new(64);
    let ns = filled(&mut rig, 1000);
    let (mut times, mut pieces) = ([0u32; 1000], 0);
    rig.core.scrub_piece();
    while rig.core.stats().scrubs < 4 {
        // A set that is hit in turn, over and over.
        (900..950).for_each(|key| hit(&mut rig, ns, key));
        keys(&rig.core.scrub_piece()).iter().for_each(|key| times[*key as usize] += 1);
        pieces += 1;
        assert!(pieces < 1000, "the walk never ends");
    }
    let (cold, hot) = (times[100..900].iter().max().unwrap(), times[900..950].iter().min().unwrap());
    assert!((3..=4).contains(cold) && *hot > 2 * cold, "cold at most {cold} times, hot at least {hot} times");
}

#[test]
fn one_walk_meets_each_ready_block_once_and_nothing_else() {
    let mut rig = Rig::new(64);
    let ns = filled(&mut rig, 700);
    let large = rig.open(2, &layout(LARGE));
    assert_eq!(rig.store(large, None, &[10_000, 10_001]), 2);
    let filling = rig.reserve(ns, 3);
    rig.effects();
    let read = walk(&mut rig, 1);
    assert_eq!(read.len(), 702);
    assert_eq!(read.iter().copied().collect::<BTreeSet<u64>>(), (0..700).chain([10_000, 10_001]).collect());
    assert_eq!(rig.core.stats().scrubbed_bytes, 700 * SMALL + 2 * LARGE);
    filling.into_iter().for_each(|at| rig.core.abort(ENGINE, at));
    assert_eq!(walk(&mut rig, 2).len(), 2 * 702);
    rig.audit();
}

#[test]
fn an_empty_pool_gives_nothing_to_read() {
    let mut rig = Rig::new(4);
    for _ in 0..3 {
        assert!(rig.core.scrub_piece().is_empty());
    }
    assert_eq!((rig.core.stats().scrubbed_bytes, rig.core.stats().scrubs), (0, 0));
}

#[test]
fn what_is_read_is_not_held_and_a_find_that_comes_after_its_slot_changed_hands_is_none() {
    let mut rig = Rig::new(1);
    let blocks = common::UNIT_BYTES / SMALL;
    let ns = filled(&mut rig, blocks);
    let held = rig.core.held();
    let piece = rig.core.scrub_piece();
    assert_eq!((piece.len() as u64, rig.core.held()), (blocks, held));
    assert_eq!(rig.effects(), []);
    // All are evicted, in spite of the reading, and their slots are taken by others.
    (0..4 * blocks).for_each(|key| _ = rig.store(ns, None, &[100 + key]));
    let is_gone = |rig: &mut Rig, block: &&ReadyBlock| {
        let key = keys(&[**block])[0];
        !rig.is_resident(ns, key)
    };
    let gone: Vec<&ReadyBlock> = piece.iter().filter(|block| is_gone(&mut rig, block)).collect();
    assert!(!gone.is_empty(), "nothing was evicted");
    let resident = rig.core.resident_blocks();
    for block in gone {
        assert!(!rig.core.drop_corrupt(block.slot, block.generation, Finder::Scrub), "{block:?} is not there any more");
    }
    assert_eq!((rig.core.resident_blocks(), rig.core.stats().corrupt), (resident, [0; 6]));
    rig.audit();
}

#[test]
fn an_audit_beside_it_may_read_and_drop_the_same_block() {
    let mut rig = Rig::new(2);
    let ns = filled(&mut rig, 1);
    let (audited, _) = rig.core.audit_piece(0, 64);
    let scrubbed = rig.core.scrub_piece();
    assert_eq!((audited.len(), scrubbed.len()), (1, 1));
    assert!(rig.core.drop_corrupt(scrubbed[0].slot, scrubbed[0].generation, Finder::Scrub));
    assert!(matches!(rig.effects()[..], [Effect::Fenced { .. }]), "the audit still reads it");
    rig.core.audited(audited[0].block, false);
    assert!(matches!(rig.effects()[..], [Effect::Freed { .. }]));
    assert_eq!(rig.core.stats().corrupt, [0, 0, 0, 1, 0, 0]);
    let again = rig.reserve(ns, 1)[0];
    rig.core.commit(ENGINE, ns, 0, hash(0), None, again, Some(0));
    assert!(rig.is_resident(ns, 0));
    rig.audit();
}

#[test]
fn evictions_are_the_same_with_it_and_without() {
    let run = |is_scrubbed: bool| {
        let mut rig = Rig::new(2);
        let ns = rig.open(1, &layout(SMALL));
        let mut hits = Vec::new();
        for nth in 0..2_000u64 {
            let key = nth * 7 % 61 + nth / 500;
            let (found, lease) = rig.lease(ns, &[key]);
            hits.push(found);
            rig.core.release(ENGINE, lease);
            rig.store(ns, None, &[key]);
            rig.step_to_the_end();
            if is_scrubbed {
                rig.core.scrub_piece();
            }
            rig.effects();
        }
        (hits, rig.core.stats().evicted)
    };
    let (without, evicted) = run(false);
    assert!(evicted > 100 && without.contains(&1), "{evicted} evictions");
    assert_eq!(run(true), (without, evicted));
}
