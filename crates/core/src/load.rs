//! The load path: lookup, lease, release.
//!
//! A lookup comes in pieces (`begin`, `look` for each group, again for long prompts, `finish`), so that no event
//! is long. What it reports as ready is pinned at once and stays so until its lease is released or its instance
//! is gone: what was promised as a hit is there when the engine comes for it.

use crate::block::{BlockId, NamespaceIndex, State};
use crate::core::{Core, Effect};
use crate::index::Fingerprint;
use crate::key::{BlockHash, Generation, Instance};
use crate::layout::Attention;
use crate::miss::{Fate, MissReason};

/// Names the pins of one lookup. 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct LeaseId(pub u64);

pub(crate) struct Lease {
    pub instance: Instance,
    pub blocks: Vec<BlockId>,
}

/// A lookup under way.
pub struct Lookup {
    /// Who gets the lease; `None` only asks.
    instance: Option<Instance>,
    namespace: NamespaceIndex,
    /// Found ready, with the token position they end at.
    found: Vec<(u64, BlockId)>,
    /// The group being looked at, how many of its keys were seen, and why its prefix ended, if it did.
    group: Option<(u16, u64, Option<MissReason>)>,
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

/// Keys whose index probes are started before the first record is compared.
const BATCH: usize = 32;

impl Core {
    /// Keys that one `look` may carry: 2,048 stay below 200 µs.
    pub const MAX_KEYS_PER_EVENT: usize = 2048;

    pub fn begin_lookup(&mut self, instance: Option<Instance>, namespace: NamespaceIndex) -> Lookup {
        self.stats.lookups += 1;
        Lookup { instance, namespace, found: Vec::new(), group: None }
    }

    /// Asks for the next `hashes` (packed, `hash_bytes` each) of `group` in prefix order; pieces of one group
    /// come one after another. A group that is not in the layout misses.
    pub fn look(&mut self, lookup: &mut Lookup, group: u16, hashes: &[u8], hash_bytes: usize, answer: &mut Answer) {
        debug_assert!(hashes.len() / hash_bytes <= Core::MAX_KEYS_PER_EVENT);
        if lookup.group.is_none_or(|(current, ..)| current != group) {
            lookup.group = Some((group, 0, None));
        }
        let count = (hashes.len() / hash_bytes) as u64;
        self.stats.keys += count;
        let layout = self.names.get(lookup.namespace).layout.group(group);
        let Some((attention, tokens)) = layout.map(|l| (l.attention, l.tokens_per_block)) else {
            self.stats.misses[MissReason::NeverSeen as usize] += count;
            return;
        };
        let mut seen = Seen { attention, tokens: u64::from(tokens), group, done: 0 };
        for batch in hashes.chunks(BATCH * hash_bytes) {
            if let Some((_, _, Some(reason))) = lookup.group
                && reason != MissReason::NotYet
                && attention == Attention::Full
            {
                self.stats.misses[reason as usize] += count - seen.done;
                return;
            }
            self.look_batch(lookup, &mut seen, batch, hash_bytes, answer);
        }
    }

    /// Ends a lookup. The lease is `LeaseId(0)` if nothing is ready or nobody wants one.
    pub fn finish_lookup(&mut self, mut lookup: Lookup) -> LeaseId {
        // Last token position first, across groups: recency becomes leaf-first.
        lookup.found.sort_by_key(|(end, _)| std::cmp::Reverse(*end));
        self.touches.extend(lookup.found.iter().map(|(_, block)| *block));
        match lookup.instance {
            Some(instance) if !lookup.found.is_empty() => {
                let blocks = lookup.found.into_iter().map(|(_, block)| block).collect();
                self.add_lease(Lease { instance, blocks })
            }
            _ => LeaseId(0),
        }
    }

    /// Gives a lookup's pins back without an answer.
    pub fn cancel_lookup(&mut self, lookup: Lookup) {
        if lookup.instance.is_some() {
            lookup.found.iter().for_each(|(_, block)| self.unpin(*block));
        }
    }

    /// Gives a lease back. Unknown and foreign leases are ignored, so that a release may be repeated.
    pub fn release(&mut self, instance: Instance, lease: LeaseId) {
        if self.leases.get(&lease.0).is_some_and(|lease| lease.instance == instance) {
            let lease = self.leases.remove(&lease.0).expect("it was just there");
            self.lease_counts[instance.0 as usize] -= 1;
            lease.blocks.iter().for_each(|block| self.unpin(*block));
        }
    }

    /// The comparison asked for by [`Effect::Verify`] is done.
    pub fn verified(&mut self, block: BlockId, generation: Generation, is_whole: bool) {
        let record = &mut self.blocks[block];
        if record.generation != generation || !matches!(record.state, State::Verifying | State::Fenced) {
            return;
        }
        if record.state == State::Verifying && is_whole {
            record.state = State::Ready;
            self.stats.verified += 1;
        } else if record.state == State::Verifying {
            self.stats.corrupt += 1;
            self.forget(block, Fate::Failed);
        }
        self.unpin(block);
    }

    pub(crate) fn add_lease(&mut self, lease: Lease) -> LeaseId {
        let id = self.next_lease;
        self.next_lease += 1;
        self.lease_counts[lease.instance.0 as usize] += 1;
        self.leases.insert(id, lease);
        LeaseId(id)
    }

    /// Probes first, records afterwards: the probes of a batch do not wait for each other, so their cache
    /// misses overlap.
    fn look_batch(
        &mut self,
        lookup: &mut Lookup,
        seen: &mut Seen,
        hashes: &[u8],
        hash_bytes: usize,
        answer: &mut Answer,
    ) {
        let mut keys = [(Fingerprint(0), None); BATCH];
        let count = hashes.len() / hash_bytes;
        for (key, hash) in keys.iter_mut().zip(hashes.chunks_exact(hash_bytes)) {
            let hash = BlockHash::new(hash).expect("the wire checked the length of hashes");
            *key = (self.fingerprint(lookup.namespace, seen.group, &hash), Some(hash));
        }
        let candidates: [Option<BlockId>; BATCH] =
            std::array::from_fn(|at| if at < count { self.index.candidate(keys[at].0) } else { None });
        for (at, (_, hash)) in keys[..count].iter().enumerate() {
            let hash = hash.expect("filled above");
            let is_match = |id: &BlockId| {
                let block = &self.blocks[*id];
                block.hash == hash && block.namespace == lookup.namespace && block.group == seen.group
            };
            let block = match candidates[at] {
                Some(id) if is_match(&id) => Some(id),
                Some(_) => self.find(lookup.namespace, seen.group, &hash),
                None => None,
            };
            self.answer_key(lookup, seen, block, &hash, answer);
            seen.done += 1;
            if seen.attention == Attention::Full
                && let Some((_, _, Some(reason))) = lookup.group
                && reason != MissReason::NotYet
            {
                return;
            }
        }
    }

    fn answer_key(
        &mut self,
        lookup: &mut Lookup,
        seen: &Seen,
        block: Option<BlockId>,
        hash: &BlockHash,
        answer: &mut Answer,
    ) {
        let (_, position, ended) = lookup.group.as_mut().expect("set by look");
        *position += 1;
        let end = *position * seen.tokens;
        let is_behind_gap = seen.attention == Attention::Full && ended.is_some();
        let miss = match block {
            None => Some(self.memory.explain(lookup.namespace, seen.group, hash)),
            Some(block) => self.why_not(block, is_behind_gap, lookup.instance.is_some()),
        };
        let Some(reason) = miss else {
            let block = block.expect("only a block can be a hit");
            if lookup.instance.is_some() {
                self.pin(block, lookup.instance);
            }
            lookup.found.push((end, block));
            self.stats.hits += 1;
            self.stats.hit_bytes += self.slot_bytes(block);
            answer.pad(*position - 1);
            answer.states.push(STATE_READY);
            answer.slots.push(self.blocks[block].slot.0);
            answer.generations.push(self.blocks[block].generation.0);
            return;
        };
        self.stats.misses[reason as usize] += 1;
        ended.get_or_insert(reason);
        if reason == MissReason::NotYet {
            answer.pad(*position - 1);
            answer.states.push(STATE_NOT_YET);
        } else if seen.attention == Attention::Full {
            // A gap for good behind blocks that are on their way ends the prefix all the same.
            *ended = Some(reason);
        }
    }

    /// Why a block that is here cannot be handed out now, if so. Starts its verification if it needs one.
    fn why_not(&mut self, block: BlockId, is_behind_gap: bool, wants_lease: bool) -> Option<MissReason> {
        if self.blocks[block].state == State::Unverified {
            self.blocks[block].state = State::Verifying;
            self.pin(block, None);
            let record = &self.blocks[block];
            self.effects.push(Effect::Verify { block, slot: record.slot, generation: record.generation });
        }
        if self.blocks[block].state == State::Verifying || is_behind_gap {
            return Some(MissReason::NotYet);
        }
        let limit = self.space.capacity_bytes() / 1000 * u64::from(self.config.promise_permille);
        let is_new_pin = self.blocks[block].pins == 0;
        let is_over = wants_lease && is_new_pin && self.pinned_bytes + self.slot_bytes(block) > limit;
        is_over.then_some(MissReason::OverLimit)
    }
}

/// Where a `look` is.
struct Seen {
    attention: Attention,
    tokens: u64,
    group: u16,
    done: u64,
}

impl Answer {
    /// Misses before key number `position` that were cut off so far.
    fn pad(&mut self, position: u64) {
        self.states.resize(position as usize, STATE_MISS);
    }
}
