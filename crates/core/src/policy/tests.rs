//! What each policy evicts in cases worked out by hand, and what must hold for any traffic.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{ALL, Nodes, Policy, Residents, by_name};
use crate::block::BlockId;
use crate::index::Fingerprint;

/// A block's key follows from its number.
#[derive(Default)]
struct World {
    held: BTreeSet<u32>,
    wanted: BTreeSet<u32>,
    spares_wanted: bool,
}

impl Residents for World {
    fn is_held(&self, block: BlockId) -> bool {
        self.held.contains(&block.0)
    }

    fn is_wanted(&self, block: BlockId) -> bool {
        self.wanted.contains(&block.0)
    }

    fn may_take_wanted(&self) -> bool {
        !self.spares_wanted
    }

    fn fingerprint(&self, block: BlockId) -> Fingerprint {
        let product = u128::from(block.0 + 1) * 0x9e37_79b9_7f4a_7c15;
        Fingerprint((product as u64 ^ (product >> 32) as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }
}

/// A cache of `capacity` blocks without parents under one policy.
struct Cache {
    policy: Box<dyn Policy>,
    nodes: Nodes,
    world: World,
    capacity: usize,
    residents: BTreeMap<u32, Option<u32>>,
}

impl Cache {
    fn new(name: &str, capacity: usize) -> Cache {
        let mut nodes = Nodes::default();
        nodes.cover(BlockId(4096));
        let policy = by_name(name).unwrap()();
        Cache { policy, nodes, world: World::default(), capacity, residents: BTreeMap::new() }
    }

    /// Asks for a block, stores it if it is missing, and says what was evicted.
    fn ask(&mut self, block: u32) -> Option<u32> {
        if self.residents.contains_key(&block) {
            self.policy.touch(&mut self.nodes, BlockId(block));
            return None;
        }
        self.store(block, None)
    }

    fn store(&mut self, block: u32, parent: Option<u32>) -> Option<u32> {
        let victim = if self.residents.len() == self.capacity { self.evict() } else { None };
        let key = self.world.fingerprint(BlockId(block));
        self.policy.insert(&mut self.nodes, BlockId(block), key, parent.map(BlockId));
        self.residents.insert(block, parent);
        victim
    }

    fn evict(&mut self) -> Option<u32> {
        let coldest = self.policy.coldest(&self.nodes);
        let victim = self.policy.evict(&mut self.nodes, &self.world).map(|block| block.0)?;
        assert!(self.residents.remove(&victim).is_some(), "{victim} was evicted and not resident");
        assert!(coldest.is_some());
        Some(victim)
    }

    fn drain(&mut self) -> Vec<u32> {
        std::iter::from_fn(|| self.evict()).collect()
    }

    /// A request as the core handles it: touches last to first, then stores forwards.
    fn request(&mut self, path: &[u32]) {
        let hits = path.iter().take_while(|block| self.residents.contains_key(block)).count();
        path[..hits].iter().rev().for_each(|block| self.policy.touch(&mut self.nodes, BlockId(*block)));
        for at in hits..path.len() {
            if self.residents.len() == self.capacity {
                self.evict();
            }
            let parent = at.checked_sub(1).map(|before| path[before]);
            if parent.is_none_or(|parent| self.residents.contains_key(&parent)) {
                self.store(path[at], parent);
            } else {
                let key = self.world.fingerprint(BlockId(path[at]));
                self.policy.refuse(&mut self.nodes, key);
            }
        }
    }

    fn orphans(&self) -> usize {
        let has_no_parent = |parent: &&Option<u32>| parent.is_some_and(|parent| !self.residents.contains_key(&parent));
        self.residents.values().filter(has_no_parent).count()
    }
}

#[test]
fn lru_evicts_what_was_used_longest_ago() {
    let mut cache = Cache::new("lru", 3);
    let evicted: Vec<_> = [1, 2, 3, 1, 4, 5].into_iter().filter_map(|block| cache.ask(block)).collect();
    assert_eq!(evicted, [2, 3]);
    assert_eq!(cache.drain(), [1, 4, 5]);
}

#[test]
fn lru_evicts_a_prompt_from_its_end() {
    let mut cache = Cache::new("lru", 8);
    cache.request(&[1, 2, 3, 4]);
    cache.request(&[1, 2, 5]);
    assert_eq!(cache.drain(), [4, 3, 5, 2, 1]);
}

#[test]
fn twoq_evicts_from_probation_while_it_holds_its_tenth() {
    let mut cache = Cache::new("twoq", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    (0..9).for_each(|block| assert_eq!(cache.ask(block), None));
    // Nine in main, 9 on probation: each newcomer pushes the one before out.
    assert_eq!([cache.ask(20), cache.ask(21), cache.ask(22)], [Some(9), Some(20), Some(21)]);
    // 9 is remembered: it goes to main, which gives its coldest as soon as probation is below its share.
    assert_eq!([cache.ask(9), cache.ask(30)], [Some(22), Some(0)]);
}

#[test]
fn arc_gives_room_to_what_returns() {
    let mut cache = Cache::new("arc", 4);
    for block in [1, 1, 2, 2, 3, 4] {
        assert_eq!(cache.ask(block), None);
    }
    // 1 and 2 were asked for twice; of the others the older goes, as long as nothing speaks for them.
    assert_eq!([cache.ask(5), cache.ask(6)], [Some(3), Some(4)]);
    // 3 returns: one block seen once is worth keeping. 5 goes for it, and then the oldest seen twice.
    assert_eq!([cache.ask(3), cache.ask(7)], [Some(5), Some(1)]);
}

#[test]
fn s3fifo_promotes_what_was_hit_twice_and_remembers_what_was_not() {
    let mut cache = Cache::new("s3fifo", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    for block in [0, 0, 1] {
        assert_eq!(cache.ask(block), None);
    }
    // 0 moves on to main, 1 was hit only once.
    assert_eq!([cache.ask(20), cache.ask(21)], [Some(1), Some(2)]);
    // 1 is remembered and comes back into main: the small queue is evicted around it.
    assert_eq!(cache.ask(1), Some(3));
    let order = cache.drain();
    assert_eq!(order[..order.len() - 3], [4, 5, 6, 7, 8, 9, 20]);
}

#[test]
fn tinylfu_admits_to_main_only_what_is_as_popular_as_its_victim() {
    let mut cache = Cache::new("tinylfu", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    for _ in 0..3 {
        (0..8).for_each(|block| assert_eq!(cache.ask(block), None));
    }
    // Main is full with blocks asked for four times; 8, asked for twice, stays in the window and goes first.
    cache.ask(8);
    assert_eq!([cache.ask(20), cache.ask(21)], [Some(9), Some(8)]);
}

/// Blocks asked for again and again among ten times as many that come once.
fn share_of_hits_under_scan(name: &str) -> f64 {
    let mut cache = Cache::new(name, 100);
    let (mut hits, mut asked) = (0, 0);
    for round in 0..400u32 {
        let block = round % 40;
        if round >= 160 {
            asked += 1;
            hits += u32::from(cache.residents.contains_key(&block));
        }
        cache.ask(block);
        (0..9).for_each(|n| {
            cache.ask(100 + (round * 9 + n) % 3900);
        });
    }
    f64::from(hits) / f64::from(asked)
}

#[test]
fn density_learns_to_keep_what_returns_out_of_a_scan() {
    assert_eq!(share_of_hits_under_scan("lru"), 0.0);
    let density = share_of_hits_under_scan("density");
    assert!(density > 0.9, "{density} of the returning blocks were hits");
}

/// Two kinds of traffic that do not fit into 100 blocks together: 60 blocks asked for in a circle, and new ones, of which
/// one in four comes back after 25 rounds. Hits of each.
fn hits_by_kind(is_backed: bool) -> (u32, u32) {
    let mut cache = Cache::new("density", 100);
    cache.policy.back(is_backed);
    let (mut circling, mut new) = (0, 0);
    for round in 0..8000u32 {
        let fresh = |round: u32, nth: u32| 100 + (round * 2 + nth) % 3900;
        let is_hit = |cache: &Cache, block: u32| u32::from(round > 3000 && cache.residents.contains_key(&block));
        circling += is_hit(&cache, round % 60);
        cache.ask(round % 60);
        (0..2).for_each(|nth| {
            cache.ask(fresh(round, nth));
        });
        if round % 2 == 0 && round > 25 {
            new += is_hit(&cache, fresh(round - 25, 0));
            cache.ask(fresh(round - 25, 0));
        }
    }
    (circling, new)
}

#[test]
fn density_leaves_to_a_tier_what_returns_and_keeps_what_the_tier_lacks() {
    let ((circling, new), (circling_backed, new_backed)) = (hits_by_kind(false), hits_by_kind(true));
    let what = format!("{circling} and {new} hits alone, {circling_backed} and {new_backed} above a tier");
    assert!(new_backed > 2 * new && circling_backed < circling, "{what}");
}

#[test]
fn held_blocks_stay_and_wanted_ones_go_last() {
    for (name, _) in ALL {
        let mut cache = Cache::new(name, 8);
        (0..8).for_each(|block| {
            cache.ask(block);
        });
        cache.world.held = BTreeSet::from([0, 3]);
        cache.world.wanted = BTreeSet::from([1, 2, 6]);
        let order = cache.drain();
        assert_eq!(order.len(), 6, "{name} evicted {order:?}");
        assert_eq!(order[..3].iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([4, 5, 7]), "{name}");
        cache.world.held.clear();
        assert_eq!(cache.drain().len(), 2, "{name} lost a held block");
    }
}

#[test]
fn wanted_blocks_stay_where_they_are_to_be_spared() {
    for (name, _) in ALL {
        let mut cache = Cache::new(name, 8);
        (0..8).for_each(|block| _ = cache.ask(block));
        cache.world.wanted = BTreeSet::from([1, 2, 6]);
        cache.world.spares_wanted = true;
        assert_eq!(BTreeSet::from_iter(cache.drain()), BTreeSet::from([0, 3, 4, 5, 7]), "{name}");
    }
}

proptest! {
    #[test]
    fn every_policy_evicts_each_resident_once(ops in proptest::collection::vec((0u32..60, 0u8..8), 1..400)) {
        for (name, _) in ALL {
            let mut cache = Cache::new(name, 20);
            for (block, kind) in &ops {
                match kind {
                    0 if cache.residents.remove(block).is_some() => cache.policy.remove(&mut cache.nodes, BlockId(*block)),
                    1 if cache.residents.contains_key(block) => cache.policy.refresh(&mut cache.nodes, BlockId(*block)),
                    _ => { cache.ask(*block); }
                }
            }
            let residents: BTreeSet<u32> = cache.residents.keys().copied().collect();
            let drained = cache.drain();
            prop_assert_eq!(drained.len(), residents.len(), "{} evicted {:?}", name, drained);
            prop_assert_eq!(drained.into_iter().collect::<BTreeSet<_>>(), residents);
        }
    }

    /// Prompts are paths of a tree in which block b has children 4b+1 to 4b+4.
    #[test]
    fn lru_and_density_never_strand_a_child(
        paths in proptest::collection::vec((proptest::collection::vec(1u32..5, 1..6), any::<bool>()), 1..200),
        capacity in 6usize..40,
    ) {
        for name in ["lru", "density"] {
            let mut cache = Cache::new(name, capacity);
            for (steps, is_expected) in &paths {
                let descend = |block: &mut u32, step: &u32| { *block = *block * 4 + step; Some(*block) };
                let path: Vec<u32> = steps.iter().scan(0, |block, step| descend(block, step)).collect();
                if *is_expected {
                    let residents: Vec<u32> = path.iter().copied().filter(|b| cache.residents.contains_key(b)).collect();
                    residents.iter().rev().for_each(|b| cache.policy.refresh(&mut cache.nodes, BlockId(*b)));
                }
                cache.request(&path);
                prop_assert_eq!(cache.orphans(), 0, "{} after {:?}", name, path);
            }
        }
    }
}
