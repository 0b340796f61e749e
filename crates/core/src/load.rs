//! The load path: lookup, lease, release.
//!
//! A lookup comes in pieces (`begin`, `look` for each group, again for long prompts, `finish`), so that no event
//! is long. What it reports as ready is pinned at once and stays so until its lease is released or its instance
//! is gone: what was promised as a hit is there when the engine comes for it.

use std::cmp::Reverse;

use crate::below::Allowance;
use crate::block::{AHEAD, Block, BlockId, NamespaceIndex, State};
use crate::core::{Core, WARM};
use crate::corrupt::Finder;
use crate::index::Fingerprint;
use crate::key::Instance;
use crate::layout::Attention;
use crate::miss::{Fate, MissReason};
use crate::stats::Counts;

/// Names the pins of one lookup. 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct LeaseId(pub u64);

pub(crate) struct Lease {
    pub instance: Instance,
    pub blocks: Vec<BlockId>,
}

/// A lookup under way. It pins what it found: it ends by `finish_lookup` or `cancel_lookup`.
#[must_use]
pub struct Lookup {
    /// Who gets the lease; `None` only asks.
    instance: Option<Instance>,
    namespace: NamespaceIndex,
    /// Found ready, and the token position each ends at.
    found: Vec<BlockId>,
    ends: Vec<u64>,
    /// The group being looked at.
    place: Option<Place>,
    /// What it finds goes to the tiers that lack it: until one takes no more, so that none gets a child alone.
    is_writing: bool,
    counts: Counts,
    /// The last key that was asked for.
    last: Fingerprint,
}

/// Where a lookup is in the keys of a group.
#[derive(Clone, Copy)]
struct Place {
    group: u16,
    attention: Attention,
    tokens: u64,
    slot_bytes: u64,
    /// Bytes that may be pinned.
    limit: u64,
    /// Keys seen.
    position: u64,
    /// Why the prefix ended, if it did; a passing reason if more of it is on its way.
    gap: Option<MissReason>,
}

/// States of keys, as they travel.
pub const STATE_MISS: u8 = 0;
pub const STATE_READY: u8 = 1;
pub const STATE_NOT_YET: u8 = 2;

/// What is known about the keys of one group, in their order.
#[derive(Default, Debug, PartialEq, Eq, Clone)]
pub struct Answer {
    /// One state a key; trailing misses are cut off.
    pub states: Vec<u8>,
    /// Of the ready ones.
    pub slots: Vec<u32>,
    pub generations: Vec<u32>,
}

impl Core {
    /// Keys that one `look` may carry: 2,048 stay below 200 µs.
    pub const MAX_KEYS_PER_EVENT: usize = 2048;
    /// Half as many as keys, since an event that ends leases also lists them.
    const UNPINS_PER_EVENT: usize = 1024;
    /// Touches that may wait for `step`; over it a lookup applies as many as it adds.
    const MAX_TOUCHES: usize = 1 << 16;

    /// `instance` gets the lease; `None` only asks.
    pub fn begin_lookup(&mut self, instance: Option<Instance>, namespace: NamespaceIndex) -> Lookup {
        let (found, ends, counts, last) = (Vec::new(), Vec::new(), Counts::default(), Fingerprint(0));
        Lookup { instance, namespace, found, ends, place: None, is_writing: true, counts, last }
    }

    /// Asks for the next `hashes` (packed, `hash_bytes` each) of `group` in prefix order; pieces of one group
    /// come one after another. A group that is not in the layout misses.
    pub fn look(&mut self, lookup: &mut Lookup, group: u16, hashes: &[u8], hash_bytes: usize, answer: &mut Answer) {
        let count = (hashes.len() / hash_bytes) as u64;
        debug_assert!(count <= Core::MAX_KEYS_PER_EVENT as u64);
        lookup.counts.keys += count;
        if let Some(last) = hashes.chunks_exact(hash_bytes).next_back() {
            lookup.last = self.fingerprint(lookup.namespace, group, last);
        }
        let Some(layout) = self.names.get(lookup.namespace).layout.group(group) else {
            lookup.counts.misses[MissReason::NeverSeen as usize] += count;
            lookup.place = None;
            return;
        };
        let start = Place {
            group,
            attention: layout.attention,
            tokens: layout.tokens_per_block.into(),
            slot_bytes: layout.slot_bytes(),
            limit: self.share(self.config.promise_permille),
            position: 0,
            gap: None,
        };
        let mut place = lookup.place.filter(|place| place.group == group).unwrap_or(start);
        let end = place.position + count;
        let found = lookup.found.len();
        lookup.found.reserve(count as usize);
        lookup.ends.reserve(count as usize);
        answer.reserve(count as usize);
        let mut allowance = Allowance::default();
        for batch in hashes.chunks(WARM * hash_bytes) {
            if place.is_over() {
                break;
            }
            self.look_batch(lookup, &mut place, &mut allowance, batch, hash_bytes, answer);
        }
        // Behind the end of a prefix all misses have its reason.
        if let Some(reason) = place.gap {
            lookup.counts.misses[reason as usize] += end - place.position;
        }
        lookup.place = Some(Place { position: end, ..place });
        if self.below.is_on() {
            lookup.is_writing = lookup.is_writing && self.sight(&lookup.found[found..]);
        }
        let hits = (lookup.found.len() - found) as u64;
        lookup.counts.hits += hits;
        lookup.counts.hit_bytes += hits * place.slot_bytes;
    }

    /// Ends a lookup. The lease is `LeaseId(0)` if nothing is ready or nobody wants one.
    pub fn finish_lookup(&mut self, lookup: Lookup) -> LeaseId {
        let Lookup { instance, found, ends, counts, last, .. } = lookup;
        self.count(instance, last, counts);
        // Last token position first, across groups: recency becomes leaf-first.
        if ends.is_sorted() {
            self.touches.extend(found.iter().rev());
        } else {
            let mut order: Vec<usize> = (0..found.len()).collect();
            order.sort_by_key(|at| Reverse(ends[*at]));
            self.touches.extend(order.into_iter().map(|at| found[at]));
        }
        if self.touches.len() > Core::MAX_TOUCHES {
            self.settle(found.len());
        }
        match instance {
            Some(instance) if !found.is_empty() => self.add_lease(Lease { instance, blocks: found }),
            _ => LeaseId(0),
        }
    }

    /// Gives a lookup's pins back without an answer; it is not counted.
    pub fn cancel_lookup(&mut self, lookup: Lookup) {
        if lookup.instance.is_some() {
            self.ended.extend(lookup.found);
            self.unpin_ended();
        }
    }

    /// Gives a lease back. Unknown and foreign leases are ignored, so that a release may be repeated.
    pub fn release(&mut self, instance: Instance, lease: LeaseId) {
        if self.leases.get(&lease.0).is_some_and(|lease| lease.instance == instance) {
            let lease = self.leases.remove(&lease.0).expect("it was just there");
            self.lease_counts[instance.0 as usize] -= 1;
            self.ended.extend(lease.blocks);
            self.unpin_ended();
        }
    }

    /// A lookup that is asked again while blocks come up counts once, with its last answer.
    fn count(&mut self, instance: Option<Instance>, last: Fingerprint, counts: Counts) {
        let mut done = Some(counts);
        if let Some(instance) = instance {
            self.unfinished.forget(instance, last);
            if let Some(counts) = done.take_if(|counts| counts.is_unfinished()) {
                done = self.unfinished.keep(instance, last, counts);
            }
        }
        done.iter().for_each(|counts| self.stats.count(counts));
    }

    /// Counts what this instance was told to ask again, and will not.
    pub fn count_unfinished(&mut self, instance: Instance) {
        self.unfinished.take(instance).iter().for_each(|counts| self.stats.count(counts));
    }

    /// Unpins what was leased, as much as one event may; `step` goes on.
    pub(crate) fn unpin_ended(&mut self) {
        for _ in 0..Core::UNPINS_PER_EVENT {
            let Some(block) = self.ended.pop() else { return };
            self.unpin(block);
        }
    }

    pub(crate) fn add_lease(&mut self, lease: Lease) -> LeaseId {
        let id = self.next_lease;
        self.next_lease += 1;
        self.lease_counts[lease.instance.0 as usize] += 1;
        self.leases.insert(id, lease);
        LeaseId(id)
    }

    /// First starts all loads from memory that the batch needs, so that they overlap, then looks.
    fn look_batch(
        &mut self,
        lookup: &mut Lookup,
        place: &mut Place,
        allowance: &mut Allowance,
        hashes: &[u8],
        hash_bytes: usize,
        answer: &mut Answer,
    ) {
        let mut keys = [Fingerprint(0); WARM];
        let hashes = hashes.chunks_exact(hash_bytes);
        for (key, hash) in keys.iter_mut().zip(hashes.clone()) {
            *key = self.fingerprint(lookup.namespace, place.group, hash);
        }
        let candidates = self.index.candidates(&keys);
        self.blocks.warm(&candidates[..hashes.len()]);
        if lookup.instance.is_some() && self.below.is_on() {
            let absent = candidates.iter().zip(hashes.clone()).filter(|(block, _)| **block == BlockId::NONE);
            self.prepare_promotions(lookup.namespace, place.group, absent.map(|(_, hash)| hash));
        }
        for (at, hash) in hashes.enumerate() {
            if place.is_over() {
                return;
            }
            place.position += 1;
            let is_match = |id: BlockId| self.blocks[id].has_key(lookup.namespace, place.group, hash);
            let block = match candidates[at] {
                BlockId::NONE => None,
                candidate if is_match(candidate) => Some(candidate),
                _ => self.index.find(keys[at], is_match),
            };
            let missed = match block {
                Some(block) => self.promise(lookup, place, block, answer),
                None => Some(self.fetch(lookup, place, hash, allowance)),
            };
            if let Some(reason) = missed {
                lookup.miss(place, reason, answer);
            }
        }
    }

    /// Answers with `block` and pins it, or says why not.
    fn promise(
        &mut self,
        lookup: &mut Lookup,
        place: &Place,
        block: BlockId,
        answer: &mut Answer,
    ) -> Option<MissReason> {
        if let Some(reason) = self.why_not(block, place, lookup.instance.is_some()) {
            return Some(reason);
        }
        if lookup.instance.is_some() {
            self.pin(block, lookup.mapper());
            if self.blocks[block].owner & AHEAD != 0 {
                self.use_ahead(block);
            }
        }
        lookup.found.push(block);
        lookup.ends.push(place.position * place.tokens);
        answer.push_ready(place.position, &self.blocks[block]);
        None
    }

    /// Why a block that is here cannot be handed out now, if so. Starts its verification if it needs one.
    fn why_not(&mut self, block: BlockId, place: &Place, wants_lease: bool) -> Option<MissReason> {
        let Block { state, pins, .. } = self.blocks[block];
        // At least one block can always be pinned, or a small pool could never serve a large one.
        let promised = self.promised_bytes();
        let is_over = pins == 0 && promised > 0 && promised + place.slot_bytes > place.limit;
        match state {
            // Not "not yet": nobody would wait for it in vain.
            State::Unverified if is_over => Some(MissReason::OverLimit),
            State::Unverified => {
                self.verify(block, Finder::Restart);
                Some(MissReason::NotYet)
            }
            State::Ready if place.gap.is_none() => (wants_lease && is_over).then_some(MissReason::OverLimit),
            State::Promoting => {
                if wants_lease && self.is_ahead(block) {
                    self.use_ahead(block);
                }
                Some(MissReason::PromotionUnfinished)
            }
            _ => Some(place.gap.unwrap_or(MissReason::NotYet)),
        }
    }

    /// Why a key has no block, after its promotion was started if a tier has it and a lease is wanted.
    #[inline(never)]
    fn fetch(&mut self, lookup: &Lookup, place: &Place, hash: &[u8], allowance: &mut Allowance) -> MissReason {
        let wants_it = lookup.instance.is_some() && self.below.is_on();
        let fetched =
            wants_it.then(|| self.promote(lookup.namespace, place.group, hash, place.limit, allowance)).flatten();
        fetched.unwrap_or_else(|| self.explain(lookup.namespace, place.group, hash))
    }

    /// Why a key has no block.
    fn explain(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> MissReason {
        match self.memory.recall(group, hash) {
            None => MissReason::NeverSeen,
            Some((other, _)) if !self.names.is_same(other, namespace) => MissReason::OtherNamespace,
            Some((_, Fate::Refused)) => MissReason::Refused,
            Some((_, Fate::Failed)) => MissReason::Failed,
            // Stored and yet not here: it was purged or lost with its slot, which people call evicted.
            Some((_, Fate::Evicted | Fate::Stored)) => MissReason::Evicted,
        }
    }
}

impl Lookup {
    /// Who is told the offsets, and so may touch the slots when the daemon is no more.
    fn mapper(&self) -> Option<Instance> {
        self.instance.filter(|instance| *instance != Instance::DAEMON)
    }

    /// Keys that missed for this reason.
    pub fn missed(&self, reason: MissReason) -> u64 {
        self.counts.misses[reason as usize]
    }

    fn miss(&mut self, place: &mut Place, reason: MissReason, answer: &mut Answer) {
        self.counts.misses[reason as usize] += 1;
        if place.attention == Attention::Full {
            place.gap = Some(reason);
        }
        if reason.is_passing() {
            answer.push(place.position, STATE_NOT_YET);
        }
    }
}

impl Place {
    /// No later key of the group can be a hit, nor become one.
    fn is_over(&self) -> bool {
        self.attention == Attention::Full && self.gap.is_some_and(|reason| !reason.is_passing())
    }
}

impl Answer {
    fn reserve(&mut self, keys: usize) {
        self.states.reserve(keys);
        self.slots.reserve(keys);
        self.generations.reserve(keys);
    }

    /// The state of key number `position`, counted from 1; those before it that were not told are misses.
    fn push(&mut self, position: u64, state: u8) {
        self.states.resize(position as usize - 1, STATE_MISS);
        self.states.push(state);
    }

    #[inline]
    fn push_ready(&mut self, position: u64, block: &Block) {
        self.push(position, STATE_READY);
        self.slots.push(block.slot.0);
        self.generations.push(block.generation.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Config;
    use crate::key::{BlockHash, Generation, NamespaceId, SlotId};
    use crate::layout::{GroupLayout, Layout};

    fn hash(low: u8, high: u8) -> [u8; 32] {
        std::array::from_fn(|at| if at < 16 { low } else { high })
    }

    /// Fingerprints of keys do collide, once in 2^44 pairs; here they are made to.
    #[test]
    fn a_key_that_collides_with_another_finds_no_block_of_the_other() {
        let group = GroupLayout {
            attention: Attention::Windowed,
            tokens_per_block: 16,
            rank_bytes: vec![4096],
            is_replicated: false,
        };
        let mut core = Core::new(Config::new(4096, 64));
        (0..64).for_each(|unit| core.populate(unit));
        let layout = Layout::new(vec![(0, group.clone()), (1, group)]).unwrap();
        let ns = core.open_namespace(NamespaceId(1), &layout).unwrap();
        let other_ns = core.open_namespace(NamespaceId(2), &layout).unwrap();
        let mut slots: Vec<(SlotId, Generation)> = Vec::new();
        core.reserve(Instance(0), ns, 0, 1, true, &mut slots);
        core.commit(Instance(0), ns, 0, BlockHash::new(&hash(1, 2)).unwrap(), None, slots[0], true);
        let block = core.space.block_at(slots[0].0).unwrap();
        let short = &hash(1, 2)[..31];
        let others = [
            (ns, 0, &hash(1, 3)[..]),
            (ns, 0, &hash(3, 2)),
            (ns, 0, short),
            (ns, 1, &hash(1, 2)),
            (other_ns, 0, &hash(1, 2)),
        ];
        for (ns, group, hash) in others {
            let key = core.fingerprint(ns, group, hash);
            core.index.insert(key, block);
            let (mut answer, mut lookup) = (Answer::default(), core.begin_lookup(Some(Instance(0)), ns));
            core.look(&mut lookup, group, hash, hash.len(), &mut answer);
            assert_eq!(core.finish_lookup(lookup), LeaseId(0), "{hash:?} of group {group} in {ns:?}");
            assert_eq!(answer, Answer::default());
            core.index.remove(key, block);
        }
        assert!(core.find(ns, 0, &BlockHash::new(&hash(1, 2)).unwrap()).is_some());
    }
}
