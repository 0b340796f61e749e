//! Windowed groups: of a prompt that lies on a tier, no more comes up than its prefix needs.

mod common;

use common::{ENGINE, Rig, SMALL, UNIT_BYTES, group, hash};
use forebay_core::hints::HintId;
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::{Answer, Lookup};
use forebay_core::tier::Outcome;
use forebay_core::tiers::{Limits, Probe, TierId};
use forebay_core::{BlockKey, Config, Core, Effect, NamespaceId, NamespaceIndex, PackedKeys};

const DISK: TierId = TierId(0);
const FULL: u16 = 0;
const WINDOWED: u16 = 1;
const MOST: usize = Core::MAX_NARROWED_KEYS;

/// Blocks of 16 tokens in both groups.
fn rig(limits: Limits) -> (Rig, NamespaceIndex) {
    let mut rig = Rig::new(8);
    rig.core.open_tier(limits);
    let groups = vec![(FULL, group(Attention::Full, SMALL)), (WINDOWED, group(Attention::Windowed, SMALL))];
    let ns = rig.open(1, &Layout::new(groups).unwrap());
    (rig, ns)
}

fn key(group: u16, key: u64) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), group, hash: hash(key) }
}

fn lie_on_tier(rig: &mut Rig, group: u16, keys: impl IntoIterator<Item = u64>) {
    keys.into_iter().for_each(|k| rig.core.tier_found(DISK, rig.core.tier_hasher().hash(&key(group, k))));
}

fn packed(keys: impl IntoIterator<Item = u64>) -> Vec<u8> {
    keys.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Of keys 0 to 19 of the windowed group.
fn narrow(rig: &Rig, ns: NamespaceIndex, window: usize, prefix_tokens: u64, most: usize) -> std::ops::Range<usize> {
    let hashes = packed(0..20);
    let keys = PackedKeys { namespace: ns, group: WINDOWED, hashes: &hashes, hash_bytes: 8 };
    rig.core.narrow(keys, window, prefix_tokens, most)
}

#[test]
fn the_last_whole_window_before_the_end_of_the_prefix_is_chosen() {
    let (mut rig, ns) = rig(Limits::default());
    lie_on_tier(&mut rig, WINDOWED, (0..8).chain(10..12).chain(14..20));
    assert_eq!(narrow(&rig, ns, 3, 16 * 20, MOST), 17..20);
    assert_eq!(narrow(&rig, ns, 3, 16 * 19 + 1, MOST), 17..20, "a block that the prefix ends in is needed");
    assert_eq!(narrow(&rig, ns, 3, 16 * 19, MOST), 16..19);
    assert_eq!(narrow(&rig, ns, 2, 16 * 13, MOST), 10..13, "12 is nowhere: perhaps the prefix may end before it");
    assert_eq!(narrow(&rig, ns, 3, 16 * 13, MOST), 5..13, "neither is there a window at 10");
    assert_eq!(narrow(&rig, ns, 3, 16 * 2, MOST), 0..2, "shorter than a window");
    assert_eq!(narrow(&rig, ns, 3, 0, MOST), 0..0);
    assert_eq!(narrow(&rig, ns, 3, u64::MAX, MOST), 17..20);
    assert_eq!(narrow(&rig, ns, 9, 16 * 20, MOST), 0..20, "there is none: all may be of use");
    assert_eq!(narrow(&rig, ns, 3, 16 * 13, 4), 9..13, "nor within four keys");
    assert_eq!(narrow(&rig, ns, 5, 16 * 13, 4), 0..20, "it is too long to be looked for");
}

#[test]
fn blocks_of_the_pool_count_wherever_else_the_others_are() {
    let (mut rig, ns) = rig(Limits::default());
    lie_on_tier(&mut rig, WINDOWED, [4, 6]);
    let mut slots = Vec::new();
    rig.core.reserve(ENGINE, ns, WINDOWED, 1, false, &mut slots);
    rig.core.commit(ENGINE, ns, WINDOWED, hash(5), None, slots[0], Some(7));
    assert_eq!(narrow(&rig, ns, 3, 16 * 10, MOST), 4..10);
}

#[test]
fn a_shared_tier_may_have_what_it_was_not_asked_for_and_has_nothing_that_it_lacks() {
    let (mut rig, ns) = rig(Limits { is_shared: true, ..Limits::default() });
    assert_eq!(narrow(&rig, ns, 2, 16 * 10, MOST), 8..10);
    // A lookup asks for all.
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    let mut answer = Default::default();
    rig.core.look(&mut lookup, WINDOWED, &packed(0..20), 8, &mut answer);
    rig.core.cancel_lookup(lookup);
    assert_eq!(narrow(&rig, ns, 2, 16 * 10, MOST), 8..10, "it has not answered");
    let mut probes: Vec<Probe> = Vec::new();
    rig.core.take_probes(&mut probes);
    for (at, probe) in probes.iter().enumerate() {
        rig.core.probe_done(probe, if at == 3 || at == 4 { Outcome::Found } else { Outcome::Absent });
    }
    assert_eq!(narrow(&rig, ns, 2, 16 * 10, MOST), 3..10);
}

#[test]
fn groups_of_other_block_sizes_end_where_their_tokens_do() {
    let mut rig = Rig::new(8);
    rig.core.open_tier(Limits::default());
    let long = GroupLayout { tokens_per_block: 64, ..group(Attention::Windowed, SMALL) };
    let ns = rig.open(1, &Layout::new(vec![(FULL, group(Attention::Full, SMALL)), (WINDOWED, long)]).unwrap());
    lie_on_tier(&mut rig, WINDOWED, 0..20);
    assert_eq!(narrow(&rig, ns, 2, 16 * 8, MOST), 0..2);
    assert_eq!(narrow(&rig, ns, 2, 16 * 9, MOST), 1..3);
}

/// The keys of the loads that have begun, which end well.
fn loaded(rig: &mut Rig) -> Vec<BlockKey> {
    let mut came = Vec::new();
    loop {
        let load = |effect| match effect {
            Effect::Promote { block, generation, .. } => Some((block, generation)),
            _ => None,
        };
        let loads: Vec<_> = rig.effects().into_iter().filter_map(load).collect();
        if loads.is_empty() {
            return came;
        }
        for (block, generation) in loads {
            came.push(rig.core.block_key(block));
            let length_bytes = rig.core.block_length_bytes(block);
            assert!(rig.core.promoted(block, generation, Outcome::Loaded { length_bytes, checksum: 7 }));
        }
        rig.step_to_the_end();
    }
}

fn hint_both(rig: &mut Rig, ns: NamespaceIndex, window: usize) -> [HintId; 2] {
    let hashes = packed(0..20);
    let full = rig.core.hint(ENGINE, ns, FULL, &hashes, 8);
    let keys = PackedKeys { namespace: ns, group: WINDOWED, hashes: &hashes, hash_bytes: 8 };
    let windowed = rig.core.hint_window(ENGINE, keys, window, &[(full, FULL)]);
    rig.step_to_the_end();
    [full, windowed]
}

#[test]
fn a_waiting_request_brings_up_its_prefix_and_the_window_at_its_end() {
    let (mut rig, ns) = rig(Limits::default());
    lie_on_tier(&mut rig, FULL, (0..6).chain(7..20));
    lie_on_tier(&mut rig, WINDOWED, 0..20);
    let ids = hint_both(&mut rig, ns, 2);
    let expected: Vec<_> = (0..6).map(|k| key(FULL, k)).chain([4, 5].map(|k| key(WINDOWED, k))).collect();
    assert_eq!(loaded(&mut rig), expected);
    assert!(!rig.core.has_prefetches());
    ids.into_iter().for_each(|id| rig.core.withdraw_hint(ENGINE, id));
    rig.step_to_the_end();
    rig.audit();
}

#[test]
fn a_waiting_request_with_more_keys_than_it_may_tell_brings_up_no_window() {
    // An eighth of the pool has room for all of them.
    let mut rig = Rig::new(2100);
    rig.core.open_tier(Limits { load_blocks: 1 << 14, ..Limits::default() });
    let groups = vec![(FULL, group(Attention::Full, SMALL)), (WINDOWED, group(Attention::Windowed, SMALL))];
    let ns = rig.open(1, &Layout::new(groups).unwrap());
    let most = Core::MAX_KEYS_PER_EVENT as u64;
    for (of_full, of_window, expected) in [(most, most, 0), (most - 1, most, 2), (100, most, 2), (most - 1, 100, 2)] {
        let key_of = |at: u64| 100_000 * of_full + 10_000_000 * of_window + at;
        lie_on_tier(&mut rig, WINDOWED, (0..of_window).map(key_of));
        // All of the full group is in the pool.
        let mut before = None;
        for at in (0..of_full).map(key_of) {
            let mut slots = Vec::new();
            rig.core.reserve(ENGINE, ns, FULL, 1, false, &mut slots);
            let before = before.replace(hash(at));
            rig.core.commit(ENGINE, ns, FULL, hash(at), before, slots[0], Some(7));
        }
        rig.effects();
        let full = rig.core.hint(ENGINE, ns, FULL, &packed((0..of_full).map(key_of)), 8);
        let hashes = packed((0..of_window).map(key_of));
        let keys = PackedKeys { namespace: ns, group: WINDOWED, hashes: &hashes, hash_bytes: 8 };
        let windowed = rig.core.hint_window(ENGINE, keys, 2, &[(full, FULL)]);
        rig.step_to_the_end();
        assert_eq!(loaded(&mut rig).len(), expected, "{of_full} and {of_window} keys");
        [full, windowed].into_iter().for_each(|id| rig.core.withdraw_hint(ENGINE, id));
    }
}

#[test]
fn the_shortest_prefix_of_several_full_groups_counts() {
    let mut rig = Rig::new(8);
    rig.core.open_tier(Limits::default());
    let full = group(Attention::Full, SMALL);
    let groups = vec![(FULL, full.clone()), (WINDOWED, group(Attention::Windowed, SMALL)), (2, full)];
    let ns = rig.open(1, &Layout::new(groups).unwrap());
    lie_on_tier(&mut rig, FULL, 0..6);
    lie_on_tier(&mut rig, 2, 0..3);
    lie_on_tier(&mut rig, WINDOWED, 0..20);
    let hashes = packed(0..20);
    let full = [FULL, 2].map(|group| (rig.core.hint(ENGINE, ns, group, &hashes, 8), group));
    let keys = PackedKeys { namespace: ns, group: WINDOWED, hashes: &hashes, hash_bytes: 8 };
    rig.core.hint_window(ENGINE, keys, 2, &full);
    rig.step_to_the_end();
    let came = loaded(&mut rig);
    assert_eq!(
        came.iter().filter(|key| key.group == WINDOWED).map(|key| key.hash).collect::<Vec<_>>(),
        [1, 2].map(hash)
    );
}

#[test]
fn what_is_set_aside_is_left_by_others_and_there_for_the_window() {
    let config = Config { promise_permille: 500, ..Config::new(UNIT_BYTES, 4) };
    let mut rig = Rig::with(config);
    rig.core.open_tier(Limits::default());
    let groups = vec![(FULL, group(Attention::Full, SMALL)), (WINDOWED, group(Attention::Windowed, SMALL))];
    let ns = rig.open(1, &Layout::new(groups).unwrap());
    lie_on_tier(&mut rig, FULL, 0..60);
    lie_on_tier(&mut rig, WINDOWED, 0..60);
    let states = |rig: &mut Rig, lookup: &mut Lookup, group| {
        lookup.begin_group(0);
        let mut answer = Answer::default();
        rig.core.look(lookup, group, &packed(0..60), 8, &mut answer);
        answer.states.len()
    };
    // Half of 64 slots may be promised; a quarter of that at most is set aside, for two windows of each lookup.
    let mut lookup = rig.core.begin_lookup(Some(ENGINE), ns);
    assert!(!rig.core.set_aside(&mut lookup, 5 * SMALL));
    assert!(rig.core.set_aside(&mut lookup, 4 * SMALL));
    let mut other = rig.core.begin_lookup(Some(ENGINE), ns);
    assert!(!rig.core.set_aside(&mut other, SMALL));
    assert_eq!(states(&mut rig, &mut lookup, FULL), 24);
    assert_eq!(states(&mut rig, &mut other, FULL), 24, "they are on their way");
    assert_eq!(states(&mut rig, &mut other, WINDOWED), 0);
    assert_eq!(states(&mut rig, &mut lookup, WINDOWED), 8);
    rig.core.cancel_lookup(lookup);
    rig.core.cancel_lookup(other);
    let mut last = rig.core.begin_lookup(Some(ENGINE), ns);
    assert!(rig.core.set_aside(&mut last, 4 * SMALL), "the first one has ended");
    _ = rig.core.finish_lookup(last);
}

#[test]
fn a_waiting_request_whose_whole_prompt_is_there_brings_up_its_last_window() {
    let (mut rig, ns) = rig(Limits::default());
    lie_on_tier(&mut rig, FULL, 0..20);
    lie_on_tier(&mut rig, WINDOWED, 0..20);
    let ids = hint_both(&mut rig, ns, 3);
    let came = loaded(&mut rig);
    assert_eq!(came[..16], (0..16).map(|k| key(FULL, k)).collect::<Vec<_>>(), "an eighth of the pool");
    // The rest is up when its turn comes.
    assert_eq!(came.len(), 16);
    rig.core.withdraw_hint(ENGINE, ids[0]);
    rig.step_to_the_end();
    assert_eq!(loaded(&mut rig), [], "nobody says where the prefix ends");
    assert!(!rig.core.has_prefetches());
    rig.core.withdraw_hint(ENGINE, ids[1]);
    rig.step_to_the_end();
    rig.audit();
}
