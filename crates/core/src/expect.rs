//! What waiting requests will ask for: the engine's queue as a look into the future.
//!
//! An engine that queues a request tells its keys. Resident blocks among them are refreshed, and as long as the
//! request waits they are passed over by evictions; those that lie below the pool come up (`below/ahead.rs`).
//! Requests are honoured first come first served, in prefix order, until the blocks they want would fill
//! [`SHARE_PERMILLE`] of the pool; then one that is met makes way for the next. A hint, never a pin: what cannot
//! be kept is evicted, and nothing is owed.
//!
//! Invariants: `wanted` counts each key once for every honoured mention; at most [`Core::MAX_EXPECTED_KEYS`]
//! keys are remembered; honouring goes on in pieces in `step`; no more comes up than is honoured.

use std::collections::{HashMap, VecDeque};

use crate::block::NamespaceIndex;
use crate::core::Core;
use crate::index::Fingerprint;
use crate::key::{BlockHash, Instance};

/// Thousandths of the pool that may be wanted: the rest turns over, so that a queue longer than the pool can
/// serve leaves room for blocks being stored. Hit rates grow slowly from 500 to 900.
const SHARE_PERMILLE: u32 = 750;
/// Once so many keys are honoured, the next request is left to the next step: an index probe and a list move each.
const KEYS_PER_STEP: usize = 512;

/// So many keys of a prompt are asked for at once before anything of it is up, later as many again as are up: most of what
/// shared tiers do not have are prompts of which they have nothing, and a question to some of them costs money.
const FIRST_ASKED: usize = 8;

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
    /// Honoured keys that may have to come up, over all requests.
    unraised: usize,
}

struct Expectation {
    id: u64,
    instance: Instance,
    namespace: NamespaceIndex,
    group: u16,
    slot_bytes: u64,
    keys: Vec<Fingerprint>,
    /// Packed, to ask tiers with; empty where there is none.
    hashes: Vec<u8>,
    hash_bytes: usize,
    /// Keys from the first that are counted in `wanted`.
    honoured: usize,
    /// Of these from the first, those that are up or on their way, and those that shared tiers were asked for.
    raised: usize,
    asked: usize,
    /// The next one is nowhere: what is behind it is of no use.
    is_at_end: bool,
}

/// A key that a waiting request will ask for.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub namespace: NamespaceIndex,
    pub group: u16,
    pub hash: BlockHash,
}

impl Core {
    /// Keys of all waiting requests together, 8 bytes each and as much again where honoured; above a tier the bytes of
    /// the key itself as well, 32 at most.
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
        let hashes = if self.below.is_on() { hashes.to_vec() } else { Vec::new() };
        self.expectations.keys += count;
        self.expectations.next_id += 1;
        let id = self.expectations.next_id;
        self.expectations.queue.push_back(Expectation {
            id,
            instance,
            namespace,
            group,
            slot_bytes,
            keys,
            hashes,
            hash_bytes,
            honoured: 0,
            raised: 0,
            asked: 0,
            is_at_end: false,
        });
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

    /// No request of `instance` waits any more, or it is not known which do.
    pub fn drop_expectations(&mut self, instance: Instance) {
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

    pub fn has_unraised(&self) -> bool {
        self.unraised > 0
    }

    /// The first key of request number `at` that may have to come up, if it lies within its first `reach_bytes`.
    pub fn next_unraised(&self, at: usize, reach_bytes: u64) -> Option<Wanted> {
        let expectation = &self.queue[at];
        let is_within = expectation.raised as u64 * expectation.slot_bytes < reach_bytes;
        (is_within && expectation.unraised() > 0).then(|| expectation.wanted(expectation.raised))
    }

    /// Of all its keys that are up, or may have to come up.
    pub fn reachable_bytes(&self, at: usize) -> u64 {
        let expectation = &self.queue[at];
        (expectation.raised + expectation.unraised()) as u64 * expectation.slot_bytes
    }

    /// That key is up, or is passed over.
    pub fn raised(&mut self, at: usize) {
        self.update(at, |expectation| expectation.raised += 1);
    }

    /// That key is nowhere.
    pub fn end_prefix(&mut self, at: usize) {
        self.update(at, |expectation| expectation.is_at_end = true);
    }

    /// The next key behind that one that shared tiers may be asked for; each is told once.
    pub fn next_unasked(&mut self, at: usize) -> Option<Wanted> {
        let expectation = &mut self.queue[at];
        let next = expectation.asked.max(expectation.raised + 1);
        let end = expectation.honoured.min(2 * expectation.raised + FIRST_ASKED);
        let wanted = (next < end).then(|| expectation.wanted(next))?;
        expectation.asked = next + 1;
        Some(wanted)
    }

    /// They are told once more.
    pub fn ask_anew(&mut self, at: usize) {
        self.queue[at].asked = 0;
    }

    /// Changes a request, and what is counted of it.
    fn update(&mut self, at: usize, change: impl FnOnce(&mut Expectation)) {
        let expectation = &mut self.queue[at];
        self.unraised -= expectation.unraised();
        change(expectation);
        self.unraised += expectation.unraised();
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
        self.unraised += if first.is_at_end { 0 } else { first.honoured - from };
        if first.honoured == first.keys.len() {
            self.honoured += 1;
        }
        if first.honoured > from { first.keys[..first.honoured].to_vec() } else { Vec::new() }
    }

    fn remove(&mut self, at: usize) {
        let gone = self.queue.remove(at).expect("the caller found it");
        self.honoured -= usize::from(at < self.honoured);
        self.keys -= gone.keys.len();
        self.unraised -= gone.unraised();
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

impl Expectation {
    /// Honoured keys that may have to come up.
    fn unraised(&self) -> usize {
        if self.is_at_end { 0 } else { self.honoured - self.raised }
    }

    fn wanted(&self, at: usize) -> Wanted {
        let hash = &self.hashes[at * self.hash_bytes..][..self.hash_bytes];
        let hash = BlockHash::new(hash).expect("hashes have 1 to 32 bytes each");
        Wanted { namespace: self.namespace, group: self.group, hash }
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
