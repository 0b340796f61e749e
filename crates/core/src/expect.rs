//! What waiting requests will ask for: the engine's queue as a look into the future.
//!
//! An engine that queues a request tells its keys. Resident blocks among them are refreshed, and as long as the
//! request waits they are passed over by evictions. Requests are honoured first come first served, in prefix
//! order, until the blocks they want would fill [`SHARE_PERMILLE`] of the pool; then one that is met makes way
//! for the next. A hint, never a pin: what cannot be kept is evicted, and nothing is owed.
//!
//! Invariants: `wanted` counts each key once for every honoured mention; at most [`Core::MAX_EXPECTED_KEYS`]
//! keys are remembered; honouring goes on in pieces in `step`.

use std::collections::{HashMap, VecDeque};

use crate::block::NamespaceIndex;
use crate::core::Core;
use crate::index::Fingerprint;
use crate::key::Instance;

/// Thousandths of the pool that may be wanted: the rest turns over, so that a queue longer than the pool can
/// serve leaves room for blocks being stored. Hit rates grow slowly from 500 to 900.
const SHARE_PERMILLE: u32 = 750;
/// Once so many keys are honoured, the next request is left to the next step: an index probe and a list move each.
const KEYS_PER_STEP: usize = 512;

/// Names what one waiting request expects. 0 is nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ExpectationId(pub u64);

#[derive(Default)]
pub(crate) struct Expectations {
    queue: VecDeque<Expectation>,
    /// Requests at the head of the queue that are honoured in full.
    honoured: usize,
    next_id: u64,
    keys: usize,
    wanted_bytes: u64,
    wanted: HashMap<u64, u32>,
}

struct Expectation {
    id: u64,
    instance: Instance,
    slot_bytes: u64,
    keys: Vec<Fingerprint>,
    /// Keys from the first that are counted in `wanted`.
    honoured: usize,
}

impl Core {
    /// Keys of all waiting requests together, 8 bytes each and as much again where honoured.
    pub const MAX_EXPECTED_KEYS: usize = 1 << 20;

    /// A request of `instance` that will look up these `hashes` (packed, `hash_bytes` each) waits. Call
    /// [`Core::met`] when it is looked up or gone. `ExpectationId(0)` if there is no room for more.
    pub fn expect(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        hashes: &[u8],
        hash_bytes: usize,
    ) -> ExpectationId {
        let count = hashes.len() / hash_bytes;
        debug_assert!(count <= Core::MAX_KEYS_PER_EVENT);
        let Some(class) = self.names.get(namespace).class(group) else { return ExpectationId(0) };
        if count == 0 || self.expectations.keys + count > Core::MAX_EXPECTED_KEYS {
            return ExpectationId(0);
        }
        let key = |hash| self.fingerprint(namespace, group, hash);
        let keys: Vec<Fingerprint> = hashes.chunks_exact(hash_bytes).map(key).collect();
        let slot_bytes = self.space.class_info(class).slot_bytes;
        self.expectations.keys += count;
        self.expectations.next_id += 1;
        let id = self.expectations.next_id;
        self.expectations.queue.push_back(Expectation { id, instance, slot_bytes, keys, honoured: 0 });
        ExpectationId(id)
    }

    /// The request waits no more. Unknown and foreign ids are ignored.
    pub fn met(&mut self, instance: Instance, id: ExpectationId) {
        let expectations = &mut self.expectations;
        if let Ok(at) = expectations.queue.binary_search_by_key(&id.0, |expectation| expectation.id)
            && expectations.queue[at].instance == instance
        {
            expectations.remove(at);
        }
    }

    /// No request of `instance` waits any more.
    pub(crate) fn drop_expectations(&mut self, instance: Instance) {
        for at in (0..self.expectations.queue.len()).rev() {
            if self.expectations.queue[at].instance == instance {
                self.expectations.remove(at);
            }
        }
    }

    /// Goes on honouring. True if there is more to do now.
    pub(crate) fn step_expectations(&mut self) -> bool {
        let limit = self.share(SHARE_PERMILLE);
        let mut done = 0;
        while done < KEYS_PER_STEP {
            let keys = self.expectations.honour(limit);
            if keys.is_empty() {
                return false;
            }
            done += keys.len();
            // Last to first, like touches, so that recency stays leaf-first.
            keys.into_iter().rev().for_each(|key| self.refresh_resident(key));
        }
        true
    }

    fn refresh_resident(&mut self, key: Fingerprint) {
        let found = self.index.find(key, |block| self.key_of(block) == key);
        if let Some(block) = found.filter(|block| self.is_indexed(*block)) {
            let class = self.blocks[block].class;
            self.policies[class.0 as usize].refresh(&mut self.nodes, block);
        }
    }
}

impl Expectations {
    pub fn is_wanted(&self, key: Fingerprint) -> bool {
        self.wanted.contains_key(&key.0)
    }

    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes
    }

    /// Counts as many more keys of the first request that is not honoured in full as `limit` bytes allow, and
    /// returns all that are counted by now, so that they stay in order. None if there was nothing to count.
    fn honour(&mut self, limit: u64) -> Vec<Fingerprint> {
        let Some(first) = self.queue.get_mut(self.honoured) else { return Vec::new() };
        let from = first.honoured;
        for key in &first.keys[from..] {
            let is_new = !self.wanted.contains_key(&key.0);
            if is_new && self.wanted_bytes + first.slot_bytes > limit {
                break;
            }
            self.wanted_bytes += if is_new { first.slot_bytes } else { 0 };
            *self.wanted.entry(key.0).or_default() += 1;
            first.honoured += 1;
        }
        if first.honoured == first.keys.len() {
            self.honoured += 1;
        }
        if first.honoured > from { first.keys[..first.honoured].to_vec() } else { Vec::new() }
    }

    fn remove(&mut self, at: usize) {
        let gone = self.queue.remove(at).expect("the caller found it");
        self.honoured -= usize::from(at < self.honoured);
        self.keys -= gone.keys.len();
        for key in &gone.keys[..gone.honoured] {
            let count = self.wanted.get_mut(&key.0).expect("honoured keys are counted");
            *count -= 1;
            if *count == 0 {
                self.wanted.remove(&key.0);
                self.wanted_bytes -= gone.slot_bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Config;
    use crate::key::{BlockHash, NamespaceId};
    use crate::layout::{Attention, GroupLayout, Layout};
    use crate::store::CommitOutcome;

    const ENGINE: Instance = Instance(0);
    const SLOTS: u32 = 16;

    fn core() -> (Core, NamespaceIndex) {
        let mut config = Config::new(u64::from(SLOTS) * 4096, 1);
        config.policy = crate::policy::by_name("lru").unwrap();
        config.reserve_permille = 1000;
        let mut core = Core::new(config);
        core.populate(0);
        let group = GroupLayout {
            attention: Attention::Full,
            tokens_per_block: 16,
            rank_bytes: vec![4096],
            is_replicated: false,
        };
        let namespace = core.open_namespace(NamespaceId(1), &Layout::new(vec![(0, group)]).unwrap()).unwrap();
        (core, namespace)
    }

    fn store(core: &mut Core, namespace: NamespaceIndex, block: u8) {
        let mut slots = Vec::new();
        core.reserve(ENGINE, namespace, 0, 1, false, &mut slots);
        let outcome = core.commit(ENGINE, namespace, 0, BlockHash::new(&[block]).unwrap(), None, slots[0], true);
        assert_eq!(outcome, CommitOutcome::Stored);
    }

    fn is_resident(core: &Core, namespace: NamespaceIndex, block: u8) -> bool {
        core.find(namespace, 0, &BlockHash::new(&[block]).unwrap()).is_some()
    }

    #[test]
    fn expected_blocks_outlive_others_until_their_request_is_met() {
        let (mut core, namespace) = core();
        (0..16).for_each(|block| store(&mut core, namespace, block));
        // 40 is not there yet; it is wanted from the moment it is stored.
        let id = core.expect(ENGINE, namespace, 0, &[0, 1, 40], 1);
        while core.step() {}
        store(&mut core, namespace, 40);
        (50..80).for_each(|block| store(&mut core, namespace, block));
        assert!([0, 1, 40].iter().all(|block| is_resident(&core, namespace, *block)));
        core.met(ENGINE, id);
        (80..100).for_each(|block| store(&mut core, namespace, block));
        assert!(![0, 1, 40].iter().any(|block| is_resident(&core, namespace, *block)));
    }

    #[test]
    fn no_more_is_wanted_than_its_share_and_those_behind_move_up() {
        let (mut core, namespace) = core();
        let ids: Vec<_> = (0..4u8)
            .map(|n| {
                let keys: Vec<u8> = (0..8).map(|block| n * 8 + block).collect();
                core.expect(ENGINE, namespace, 0, &keys, 1)
            })
            .collect();
        while core.step() {}
        assert_eq!(core.expectations.wanted.len(), 12, "three quarters of 16");
        core.met(ENGINE, ids[0]);
        core.met(ENGINE, ids[0]);
        core.met(Instance(1), ids[1]);
        while core.step() {}
        assert_eq!((core.expectations.wanted.len(), core.expectations.honoured), (12, 1));
        core.met(ENGINE, ids[2]);
        core.met(ENGINE, ids[3]);
        assert_eq!((core.expectations.wanted.len(), core.expectations.keys), (8, 8));
        core.instance_gone(ENGINE);
        assert_eq!((core.expectations.wanted.len(), core.expectations.wanted_bytes), (0, 0));
    }

    #[test]
    fn a_pool_full_of_wanted_blocks_still_takes_new_ones() {
        let (mut core, namespace) = core();
        (0..16).for_each(|block| store(&mut core, namespace, block));
        core.expect(ENGINE, namespace, 0, &(0..16).collect::<Vec<u8>>(), 1);
        while core.step() {}
        (20..60).for_each(|block| store(&mut core, namespace, block));
        assert!(is_resident(&core, namespace, 59));
    }

    #[test]
    fn there_is_a_limit_on_what_is_expected() {
        let (mut core, namespace) = core();
        let keys = vec![7; 2048];
        let full = (0..=Core::MAX_EXPECTED_KEYS / 2048).map(|_| core.expect(ENGINE, namespace, 0, &keys, 1)).last();
        assert_eq!(full, Some(ExpectationId(0)));
        assert_eq!(core.expect(ENGINE, namespace, 9, &keys, 1), ExpectationId(0), "there is no such group");
    }
}
