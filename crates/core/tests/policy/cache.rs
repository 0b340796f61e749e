//! A cache of nothing but a policy: no slots, no keys, no leases.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::policy::{Make, Nodes, Policy, Residents};
use forebay_core::{BlockId, Fingerprint};

/// A block's key follows from its number.
#[derive(Default)]
pub struct World {
    pub held: BTreeSet<u32>,
    pub wanted: BTreeSet<u32>,
    pub spares_wanted: bool,
}

impl Residents for World {
    fn is_held(&self, block: BlockId) -> bool {
        self.held.contains(&block.0)
    }

    fn is_protected(&self, block: BlockId) -> bool {
        self.wanted.contains(&block.0)
    }

    fn may_take_protected(&self) -> bool {
        !self.spares_wanted
    }

    fn fingerprint(&self, block: BlockId) -> Fingerprint {
        let product = u128::from(block.0 + 1) * 0x9e37_79b9_7f4a_7c15;
        Fingerprint((product as u64 ^ (product >> 32) as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    fn at(&self, _place: u32) -> Option<BlockId> {
        None
    }
}

/// A cache of `capacity` blocks without parents under one policy.
pub struct Cache {
    pub policy: Box<dyn Policy>,
    pub nodes: Nodes,
    pub world: World,
    pub capacity: usize,
    pub residents: BTreeMap<u32, Option<u32>>,
}

impl Cache {
    pub fn new(make: Make, capacity: usize) -> Cache {
        let mut nodes = Nodes::default();
        nodes.cover(BlockId(4096));
        Cache { policy: make(), nodes, world: World::default(), capacity, residents: BTreeMap::new() }
    }

    /// Asks for a block, stores it if it is missing, and says what was evicted.
    pub fn ask(&mut self, block: u32) -> Option<u32> {
        if self.residents.contains_key(&block) {
            self.policy.touch(&mut self.nodes, BlockId(block));
            return None;
        }
        self.store(block, None)
    }

    pub fn store(&mut self, block: u32, parent: Option<u32>) -> Option<u32> {
        let victim = if self.residents.len() == self.capacity { self.evict() } else { None };
        let key = self.world.fingerprint(BlockId(block));
        self.policy.insert(&mut self.nodes, BlockId(block), key, parent.map(BlockId));
        self.residents.insert(block, parent);
        victim
    }

    pub fn evict(&mut self) -> Option<u32> {
        let coldest = self.policy.coldest(&self.nodes);
        let victim = self.policy.evict(&mut self.nodes, &self.world).map(|block| block.0)?;
        assert!(self.residents.remove(&victim).is_some(), "{victim} was evicted and not resident");
        assert!(coldest.is_some());
        Some(victim)
    }

    pub fn drain(&mut self) -> Vec<u32> {
        std::iter::from_fn(|| self.evict()).collect()
    }

    /// A request as the core handles it: touches last to first, then stores forwards.
    pub fn request(&mut self, path: &[u32]) {
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

    pub fn orphans(&self) -> usize {
        let has_no_parent = |parent: &&Option<u32>| parent.is_some_and(|parent| !self.residents.contains_key(&parent));
        self.residents.values().filter(has_no_parent).count()
    }
}

/// Held blocks stay, and wanted ones go last.
pub fn spares_the_held_and_then_the_wanted(all: &[(&str, Make)]) {
    for (name, make) in all {
        let mut cache = Cache::new(*make, 8);
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

/// However many blocks of one kind are held, those of the other kind are found.
pub fn finds_what_is_not_held(all: &[(&str, Make)]) {
    for (name, make) in all {
        for held in [0..100, 100..300] {
            let mut cache = Cache::new(*make, 300);
            (0..300).for_each(|block| _ = cache.ask(block));
            (0..3).for_each(|_| (100..300).for_each(|block| _ = cache.ask(block)));
            cache.world.held = held.clone().collect();
            for left in (1..=300 - held.len()).rev() {
                let found = (0..20).any(|_| cache.evict().is_some_and(|block| !held.contains(&block)));
                assert!(found, "{name} holds {held:?} and finds none of {left} others");
            }
        }
    }
}

/// Wanted blocks stay where they are to be spared.
pub fn spares_the_wanted(all: &[(&str, Make)]) {
    for (name, make) in all {
        let mut cache = Cache::new(*make, 8);
        (0..8).for_each(|block| _ = cache.ask(block));
        cache.world.wanted = BTreeSet::from([1, 2, 6]);
        cache.world.spares_wanted = true;
        assert_eq!(BTreeSet::from_iter(cache.drain()), BTreeSet::from([0, 3, 4, 5, 7]), "{name}");
    }
}

/// Each resident is evicted once, whatever happened before: (block, what is done with it).
pub fn evicts_each_resident_once(all: &[(&str, Make)], ops: &[(u32, u8)]) {
    for (name, make) in all {
        let mut cache = Cache::new(*make, 20);
        for (block, kind) in ops {
            match kind {
                0 if cache.residents.remove(block).is_some() => cache.policy.remove(&mut cache.nodes, BlockId(*block)),
                1 if cache.residents.contains_key(block) => cache.policy.refresh(&mut cache.nodes, BlockId(*block)),
                _ => {
                    cache.ask(*block);
                }
            }
        }
        let residents: BTreeSet<u32> = cache.residents.keys().copied().collect();
        let drained = cache.drain();
        assert_eq!(drained.len(), residents.len(), "{} evicted {:?}", name, drained);
        assert_eq!(drained.into_iter().collect::<BTreeSet<_>>(), residents);
    }
}

/// The tests that hold of all policies of a list.
macro_rules! test_all {
    ($all:expr) => {
        #[test]
        fn held_blocks_stay_and_wanted_ones_go_last() {
            cache::spares_the_held_and_then_the_wanted(&$all);
        }

        #[test]
        fn however_many_are_held_the_others_are_found() {
            cache::finds_what_is_not_held(&$all);
        }

        #[test]
        fn wanted_blocks_stay_where_they_are_to_be_spared() {
            cache::spares_the_wanted(&$all);
        }

        proptest! {
            #[test]
            fn every_policy_evicts_each_resident_once(ops in proptest::collection::vec((0u32..60, 0u8..8), 1..400)) {
                cache::evicts_each_resident_once(&$all, &ops);
            }
        }
    };
}
pub(crate) use test_all;
