//! Lookup, lease, release.
//!
//! A lookup comes in pieces (`begin`, `look` for each group, again for long prompts, `finish`), so that no event is
//! long. One that found keys "not yet" can pause and look at those keys again, and at no others.
//!
//! Invariant: what a lookup reports as ready to somebody who wants a lease is pinned at once, and stays so until the
//! lease is released or its instance is gone. What was promised as a hit is there when the engine comes for it.

use std::cmp::Reverse;

use super::promote::Allowance;
use crate::core::Core;
use crate::key::{BlockHash, BlockId, Fingerprint, Instance, NamespaceIndex, TierId};
use crate::layout::Attention;
pub use crate::leases::LeaseId;
use crate::miss::MissReason;
use crate::slots::{Block, FRESH, PREFETCH, State, TOUCHED_TOGETHER};
use crate::stats::Counts;
use crate::stats::Finder;

/// A lookup under way. It pins what it found: it ends by `finish_lookup` or `cancel_lookup`. It counts once, with its
/// last answer for each key.
#[must_use]
pub struct Lookup {
    /// Who gets the lease; `None` only asks.
    instance: Option<Instance>,
    namespace: NamespaceIndex,
    /// Found ready.
    found: Vec<BlockId>,
    /// Where in their prompts they end, run by run.
    runs: Vec<Run>,
    /// Those of `found` whose first hit it is.
    fresh: Vec<BlockId>,
    /// What it was promised so far: none before the first pause.
    lease: Option<LeaseId>,
    /// How many of `found` the lease covers.
    leased: usize,
    /// Keys of the group before those that are looked at now.
    before: u64,
    /// The group being looked at.
    cursor: Option<Cursor>,
    /// Tiers, by their bits, to which nothing more that it finds goes: one that took no more gets no child alone.
    full_tiers: u8,
    /// A key whose promotion finds no slot is "not yet", rather than a miss.
    waits_for_room: bool,
    /// A promotion that it wants found no slot.
    lacks_room: bool,
    /// Promotions that it wants could start at once.
    has_more: bool,
    /// Bytes of the promises' share that are kept for its windowed groups, and those of them that stay for the last.
    set_aside: u64,
    kept_to_last: u64,
    /// Why the last group of full attention that ended before its last key did.
    ended: Option<MissReason>,
    counts: Counts,
}

/// Where a lookup is in the keys of a group.
#[derive(Clone, Copy)]
struct Cursor {
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

/// Neighbours in a prompt, from one place in `Lookup::found` on to where the next run begins.
struct Run {
    first: usize,
    /// The token position at which the first of them ends, and how far each other ends behind the one before.
    end: u64,
    tokens: u64,
}

/// Hits of neighbouring keys. They go into lookup and answer together: a vector looks at its room once for all of them.
struct Hits {
    blocks: [BlockId; TOUCHED_TOGETHER],
    slots: [u32; TOUCHED_TOGETHER],
    generations: [u32; TOUCHED_TOGETHER],
    count: usize,
}

/// States of keys, as they travel.
pub const STATE_MISS: u8 = 0;
/// Ready, and leased where the lookup wanted that.
pub const STATE_READY: u8 = 1;
/// Not ready, but soon: being verified or promoted.
pub const STATE_NOT_YET: u8 = 2;
/// Of a windowed group, before the blocks that the prefix needs: nobody looked.
pub const STATE_LEFT_OUT: u8 = 3;

/// Where ready blocks were before their first hit, as it travels. The first hit of a block that a tier brought up is
/// the tier's; all others are the pool's.
pub const SOURCE_POOL: u8 = 0;
/// A tier of this host.
pub const SOURCE_DISK: u8 = 1;
/// A tier that hosts share.
pub const SOURCE_SHARED: u8 = 2;

/// What is known about the keys of one group, in their order.
#[derive(Default, Debug, PartialEq, Eq, Clone)]
pub struct Answer {
    /// One state a key; trailing misses are cut off.
    pub states: Vec<u8>,
    /// Of the ready ones.
    pub slots: Vec<u32>,
    /// Of the slots, parallel to them.
    pub generations: Vec<u32>,
    /// Of the slots, parallel to them; what is cut off at the end came from the pool.
    pub sources: Vec<u8>,
}

impl Core {
    /// Keys that one `look` may carry: 2,048 stay below 200 µs.
    pub const MAX_KEYS_PER_EVENT: usize = 2048;
    /// Half as many as keys, since an event that ends leases also lists them.
    const UNPINS_PER_EVENT: usize = 1024;
    /// Touches that may wait for `step`; over it a lookup applies as many as it adds.
    pub(crate) const MAX_TOUCHES: usize = 1 << 16;

    /// `instance` gets the lease; `None` only asks.
    pub fn begin_lookup(&mut self, instance: Option<Instance>, namespace: NamespaceIndex) -> Lookup {
        let (found, runs, fresh, counts) = (Vec::new(), Vec::new(), Vec::new(), Counts::default());
        let (lease, leased, before, cursor) = (None, 0, 0, None);
        let (full_tiers, lacks_room, has_more, set_aside, kept_to_last, ended) = (0, false, false, 0, 0, None);
        Lookup {
            instance,
            namespace,
            found,
            runs,
            fresh,
            lease,
            leased,
            before,
            cursor,
            full_tiers,
            waits_for_room: true,
            lacks_room,
            has_more,
            set_aside,
            kept_to_last,
            ended,
            counts,
        }
    }

    /// Asks for the next `hashes` (packed, `hash_bytes` each) of `group` in prefix order; pieces of one group
    /// come one after another. A group that is not in the layout misses.
    pub fn look(&mut self, lookup: &mut Lookup, group: u16, hashes: &[u8], hash_bytes: usize, answer: &mut Answer) {
        let count = (hashes.len() / hash_bytes) as u64;
        debug_assert!(count <= Core::MAX_KEYS_PER_EVENT as u64);
        lookup.counts.keys += count;
        let Some(layout) = self.cache.namespace(lookup.namespace).layout.group(group) else {
            lookup.counts.misses[MissReason::NeverSeen as usize] += count;
            lookup.cursor = None;
            return;
        };
        // The room that others leave is for the windowed groups of the lookups for which it was set aside.
        let is_for_it = layout.attention == Attention::Windowed && lookup.set_aside > 0;
        let set_aside = if is_for_it { 0 } else { self.leases.set_aside_bytes };
        let start = Cursor {
            group,
            attention: layout.attention,
            tokens: layout.tokens_per_block.into(),
            slot_bytes: layout.slot_bytes(),
            limit: self.slots.share(self.config.promise_permille).saturating_sub(set_aside),
            position: 0,
            gap: None,
        };
        let mut cursor = lookup.cursor.filter(|cursor| cursor.group == group).unwrap_or(start);
        let end = cursor.position + count;
        let found = lookup.found.len();
        lookup.found.reserve(count as usize);
        answer.reserve(count as usize);
        let mut allowance = Allowance::new(lookup.waits_for_room);
        match hashes.as_chunks::<{ BlockHash::MAX_LEN }>() {
            // The usual length, which the compiler then knows.
            (hashes, []) if hash_bytes == BlockHash::MAX_LEN => {
                self.look_all(lookup, &mut cursor, &mut allowance, hashes, answer);
            }
            _ => {
                let hashes: Vec<&[u8]> = hashes.chunks_exact(hash_bytes).collect();
                self.look_all(lookup, &mut cursor, &mut allowance, &hashes, answer);
            }
        }
        // Behind the end of a prefix all misses have its reason.
        if let Some(reason) = cursor.gap {
            lookup.counts.misses[reason as usize] += end - cursor.position;
        }
        if cursor.is_over() {
            lookup.ended = cursor.gap;
        }
        lookup.cursor = Some(Cursor { position: end, ..cursor });
        lookup.lacks_room |= allowance.lacks_room;
        lookup.has_more |= allowance.is_spent;
        if self.uses_tiers(lookup.namespace) {
            lookup.full_tiers = self.consider_hits(&lookup.found, found, lookup.full_tiers);
        }
        let hits = (lookup.found.len() - found) as u64;
        lookup.counts.hits += hits;
        lookup.counts.hit_bytes += hits * cursor.slot_bytes;
        if is_for_it {
            // What is leased needs no room any more.
            let taken = lookup.set_aside.saturating_sub(lookup.kept_to_last).min(hits * cursor.slot_bytes);
            lookup.set_aside -= taken;
            self.leases.set_aside_bytes -= taken;
        }
    }

    /// Ends a lookup. The lease is `LeaseId(0)` if nothing is ready, nobody wants one, or it was released in a pause.
    pub fn finish_lookup(&mut self, lookup: Lookup) -> LeaseId {
        self.touch_found(&lookup);
        self.end_lookup(lookup)
    }

    /// Ends one of several lookups that are one use together. [`Core::note_use`] is to follow, with what all of them
    /// found.
    pub fn finish_part(&mut self, lookup: Lookup) -> (LeaseId, Vec<BlockId>) {
        let found = lookup.found.clone();
        (self.end_lookup(lookup), found)
    }

    /// Blocks were used together; in prefix order. At most [`Core::MAX_KEYS_PER_EVENT`]; the end of a longer prompt
    /// comes first.
    pub fn note_use(&mut self, blocks: &[BlockId]) {
        self.add_touches(blocks.iter().rev().copied(), blocks.len());
    }

    fn add_touches(&mut self, blocks: impl Iterator<Item = BlockId>, count: usize) {
        self.cache.add_touches(blocks);
        if self.cache.waiting_touches() > Core::MAX_TOUCHES {
            self.settle(count);
        }
    }

    fn end_lookup(&mut self, mut lookup: Lookup) -> LeaseId {
        self.leases.set_aside_bytes -= lookup.set_aside;
        self.count(&lookup);
        match (lookup.instance, lookup.lease) {
            (Some(_), Some(lease)) => self.extend(lease, lookup.found.split_off(lookup.leased)),
            (Some(instance), None) if !lookup.found.is_empty() => self.leases.add(instance, lookup.found),
            _ => LeaseId(0),
        }
    }

    /// Hands out what was found so far, under a lease that grows when the lookup goes on with [`Core::look_again`].
    /// There is a lease even if nothing is ready yet: its release ends the lookup. `LeaseId(0)` if that has happened,
    /// or nobody wants a lease.
    /// Nothing is touched before the lookup ends: however often it pauses, it is one use.
    pub fn pause_lookup(&mut self, lookup: &mut Lookup) -> LeaseId {
        let Some(instance) = lookup.instance else { return LeaseId(0) };
        let found = lookup.found[lookup.leased..].to_vec();
        lookup.leased = lookup.found.len();
        match lookup.lease {
            Some(lease) => self.extend(lease, found),
            None => *lookup.lease.insert(self.leases.add(instance, found)),
        }
    }

    /// After a pause: what was "not yet" is looked at again, and counts with its next answer. `namespace` is what the
    /// asker's name of it means now. False, without any change, if the lease was released: nobody waits any more.
    pub fn look_again(&self, lookup: &mut Lookup, namespace: NamespaceIndex) -> bool {
        let is_awaited = lookup.lease.is_none_or(|lease| self.leases.is_held(lease));
        if is_awaited {
            lookup.namespace = namespace;
            (lookup.lacks_room, lookup.has_more) = (false, false);
            lookup.counts.forget_passing();
        }
        is_awaited
    }

    /// Keeps twice so many bytes of the promises' share for the windowed groups of a lookup until it ends, or they are
    /// leased: for those that it looks at first, and as many for the last. False if lookups together would keep more
    /// than a quarter of the share.
    pub fn set_aside(&mut self, lookup: &mut Lookup, bytes: u64) -> bool {
        lookup.kept_to_last = bytes;
        let bytes = 2 * bytes;
        let share = self.slots.share(self.config.promise_permille);
        let has_room = self.leases.set_aside_bytes + bytes <= share / 4;
        if has_room {
            lookup.set_aside += bytes;
            self.leases.set_aside_bytes += bytes;
        }
        has_room
    }

    /// Gives a lookup's pins back, but for those that its lease covers. One that was never answered is not counted.
    pub fn cancel_lookup(&mut self, mut lookup: Lookup) {
        self.leases.set_aside_bytes -= lookup.set_aside;
        if lookup.lease.is_some() {
            self.touch_found(&lookup);
            self.count(&lookup);
        } else {
            lookup.fresh.iter().for_each(|block| self.slots.mark_fresh(*block));
        }
        if lookup.instance.is_some() {
            self.leases.give_up(lookup.found.split_off(lookup.leased));
            self.unpin_ended();
        }
    }

    /// Gives a lease back. Unknown and foreign leases are ignored, so that a release may be repeated.
    pub fn release(&mut self, instance: Instance, lease: LeaseId) {
        if self.leases.end(instance, lease) {
            self.unpin_ended();
        }
    }

    /// Unpins what was leased, as much as one event may; `step` goes on.
    pub(crate) fn unpin_ended(&mut self) {
        let mut left = Core::UNPINS_PER_EVENT;
        while left > 0 && self.leases.has_ended() {
            let blocks = self.leases.take_ended(left);
            left -= blocks.len();
            blocks.into_iter().rev().for_each(|block| self.unpin(block));
        }
    }

    fn count(&mut self, lookup: &Lookup) {
        if !self.is_trial(lookup.namespace) {
            self.journal.stats_mut().count(&lookup.counts);
            let of_tiers = (0..).map(TierId).zip(lookup.counts.hits_of_tiers);
            of_tiers.filter(|(_, hits)| *hits > 0).for_each(|(tier, hits)| self.tiers.stats_mut(tier).hits += hits);
        }
    }

    /// Last token position first, across groups: recency becomes leaf-first.
    fn touch_found(&mut self, lookup: &Lookup) {
        let found = &lookup.found;
        if lookup.ends().is_sorted() {
            self.add_touches(found.iter().rev().copied(), found.len());
        } else {
            let mut order: Vec<(u64, BlockId)> = lookup.ends().zip(found.iter().copied()).collect();
            order.sort_by_key(|(end, _)| Reverse(*end));
            self.add_touches(order.into_iter().map(|(_, block)| block), found.len());
        }
    }

    /// The lease covers these pinned blocks too, unless it has ended.
    fn extend(&mut self, lease: LeaseId, found: Vec<BlockId>) -> LeaseId {
        if self.leases.extend(lease, found) {
            return lease;
        }
        self.unpin_ended();
        LeaseId(0)
    }

    fn look_all<H: AsRef<[u8]>>(
        &mut self,
        lookup: &mut Lookup,
        cursor: &mut Cursor,
        allowance: &mut Allowance,
        hashes: &[H],
        answer: &mut Answer,
    ) {
        for batch in hashes.chunks(TOUCHED_TOGETHER) {
            if cursor.is_over() {
                return;
            }
            self.look_batch(lookup, cursor, allowance, batch, answer);
        }
    }

    /// First starts all loads from memory that the batch needs, so that they overlap, then looks.
    fn look_batch<H: AsRef<[u8]>>(
        &mut self,
        lookup: &mut Lookup,
        cursor: &mut Cursor,
        allowance: &mut Allowance,
        hashes: &[H],
        answer: &mut Answer,
    ) {
        let mut keys = [Fingerprint(0); TOUCHED_TOGETHER];
        for (key, hash) in keys.iter_mut().zip(hashes) {
            *key = self.cache.fingerprint(lookup.namespace, cursor.group, hash.as_ref());
        }
        let mut candidates = self.cache.candidates(&keys);
        let candidates = &mut candidates[..hashes.len()];
        self.slots.touch_lines(candidates);
        if lookup.instance.is_some() && self.uses_tiers(lookup.namespace) {
            let absent = candidates.iter().zip(hashes).filter(|(block, _)| **block == BlockId::NONE);
            self.prepare_promotions(lookup.namespace, cursor.group, absent.map(|(_, hash)| hash.as_ref()));
        }
        let mut at = 0;
        while at < hashes.len() && !cursor.is_over() {
            if cursor.gap.is_none() {
                let hits = self.promise(lookup, cursor, &candidates[at..], &hashes[at..]);
                at += hits.count;
                lookup.hit(cursor, &hits, answer);
                if lookup.instance.is_some() && hits.last().is_some_and(|block| self.slots[block].is_promoted()) {
                    self.use_promoted(lookup, candidates[at - 1], answer);
                    continue;
                }
                if at == hashes.len() {
                    break;
                }
            }
            let hash = hashes[at].as_ref();
            let is_match = |id: BlockId| self.slots[id].has_key(lookup.namespace, cursor.group, hash);
            let reason = match candidates[at] {
                BlockId::NONE => self.fetch(lookup, cursor, hash, allowance),
                candidate if is_match(candidate) => self.why_not(candidate, cursor, lookup.instance.is_some()),
                _ => {
                    // Another key's block, with the same tag.
                    candidates[at] = self.cache.find_under(keys[at], is_match).unwrap_or(BlockId::NONE);
                    continue;
                }
            };
            at += 1;
            cursor.position += 1;
            lookup.miss(cursor, reason, answer);
        }
    }

    /// Pins the blocks of the next keys, until one is no hit, or a block has its first hit since a tier brought it up.
    // The loop over all hits: in line with the rest, it has too few registers and a quarter more instructions.
    #[inline(never)]
    fn promise<H: AsRef<[u8]>>(
        &mut self,
        lookup: &Lookup,
        cursor: &Cursor,
        candidates: &[BlockId],
        hashes: &[H],
    ) -> Hits {
        let mut hits = Hits::default();
        let (wants_lease, mapper) = (lookup.instance.is_some(), lookup.mapper());
        for (block, hash) in candidates.iter().zip(hashes) {
            if *block == BlockId::NONE {
                break;
            }
            let record = &self.slots[*block];
            let is_hit = record.state == State::Ready && record.has_key(lookup.namespace, cursor.group, hash.as_ref());
            if !is_hit || wants_lease && self.is_over(record.pins, cursor) {
                break;
            }
            hits.push(*block, record);
            if wants_lease && self.pin(*block, mapper).is_promoted() {
                break;
            }
        }
        hits
    }

    /// The lookup has a block, the last of its answer, that a tier brought up.
    #[cold]
    fn use_promoted(&mut self, lookup: &mut Lookup, block: BlockId, answer: &mut Answer) {
        let owner = self.slots[block].owner;
        if owner & PREFETCH != 0 {
            self.use_prefetch(block);
        }
        if owner & FRESH != 0 {
            let tier = self.slots[block].filler();
            lookup.counts.hits_of_tiers[tier.0 as usize] += 1;
            answer.come_from(if self.tiers.limits(tier).is_shared { SOURCE_SHARED } else { SOURCE_DISK });
            self.slots.unmark_fresh(block);
            lookup.fresh.push(block);
        }
    }

    /// Whether half of what may be promised is: then nothing is brought up that may not be needed.
    pub fn is_half_promised(&self) -> bool {
        self.promised_bytes() + self.leases.set_aside_bytes >= self.slots.share(self.config.promise_permille) / 2
    }

    /// Whether a lease on one more block, with so many pins, would go over the limit.
    #[inline]
    fn is_over(&self, pins: u32, cursor: &Cursor) -> bool {
        // At least one block can always be pinned, or a small pool could never serve a large one.
        let promised = self.promised_bytes();
        pins == 0 && promised > 0 && promised + cursor.slot_bytes > cursor.limit
    }

    /// Why a block that is here, and was not promised, cannot be handed out now. Starts its verification if it needs
    /// one.
    fn why_not(&mut self, block: BlockId, cursor: &Cursor, wants_lease: bool) -> MissReason {
        let Block { state, pins, .. } = self.slots[block];
        match state {
            // Not `NotYet`: that makes the engine wait for a lease that it cannot get.
            State::Unverified if self.is_over(pins, cursor) => MissReason::OverLimit,
            State::Unverified => {
                self.verify(block, Finder::Restart);
                MissReason::NotYet
            }
            State::Ready if cursor.gap.is_none() => MissReason::OverLimit,
            State::Promoting => {
                if wants_lease && self.is_prefetch(block) {
                    self.use_prefetch(block);
                }
                MissReason::PromotionUnfinished
            }
            _ => cursor.gap.unwrap_or(MissReason::NotYet),
        }
    }

    /// Why a key has no block, after its promotion was started if a tier has it and a lease is wanted.
    #[inline(never)]
    fn fetch(&mut self, lookup: &Lookup, cursor: &Cursor, hash: &[u8], allowance: &mut Allowance) -> MissReason {
        let wants_it = lookup.instance.is_some() && self.uses_tiers(lookup.namespace);
        let fetched =
            wants_it.then(|| self.promote(lookup.namespace, cursor.group, hash, cursor.limit, allowance)).flatten();
        fetched.unwrap_or_else(|| self.cache.explain(lookup.namespace, cursor.group, hash))
    }
}

impl Lookup {
    /// The next piece begins a group, behind its first `before` keys.
    pub fn begin_group(&mut self, before: u64) {
        (self.cursor, self.before) = (None, before);
    }

    /// Whether a key is "not yet" since all blocks that could make room for it are held. No end of anything says when
    /// that changes.
    pub fn lacks_room(&self) -> bool {
        self.lacks_room
    }

    /// From now on, a key whose promotion finds no slot is a miss. Otherwise the lookup may wait for ever: perhaps for
    /// memory that drains, and whose last blocks it holds itself.
    pub fn stop_waiting_for_room(&mut self) {
        self.waits_for_room = false;
    }

    /// The windowed groups that are looked at from now on are the last: they may use all room that was set aside.
    pub fn begin_last_windows(&mut self) {
        self.kept_to_last = 0;
    }

    /// Whether a key is "not yet" since one look starts only so many promotions: the next one starts more, whatever has
    /// ended meanwhile. Not if this look found no slot for one, which it would look for again.
    pub fn has_more_to_start(&self) -> bool {
        self.has_more && !self.lacks_room
    }

    /// So many more keys are behind the end of the prefix of a group of full attention, and miss for its reason.
    pub fn miss_behind(&mut self, keys: u64) {
        if let Some(reason) = self.ended {
            self.counts.keys += keys;
            self.counts.misses[reason as usize] += keys;
        }
    }

    /// Who is told the offsets, and so may touch the slots when the daemon is no more.
    fn mapper(&self) -> Option<Instance> {
        self.instance.filter(|instance| *instance != Instance::DAEMON)
    }

    /// Keys that missed for this reason.
    pub fn missed(&self, reason: MissReason) -> u64 {
        self.counts.misses[reason as usize]
    }

    /// Keys asked for and hits, as they count when the lookup ends now.
    pub fn counted(&self) -> (u64, u64) {
        (self.counts.keys, self.counts.hits)
    }

    /// The token positions at which the blocks of `found` end.
    fn ends(&self) -> impl Iterator<Item = u64> {
        let behind = self.runs.iter().skip(1).map(|run| run.first).chain([self.found.len()]);
        self.runs.iter().zip(behind).flat_map(|(run, behind)| (run.first..behind).map(|place| run.end_of(place)))
    }

    /// The next keys are `hits`.
    fn hit(&mut self, cursor: &mut Cursor, hits: &Hits, answer: &mut Answer) {
        if hits.count == 0 {
            return;
        }
        let (first, end) = (self.found.len(), (self.before + cursor.position + 1) * cursor.tokens);
        if self.runs.last().is_none_or(|run| run.end_of(first) != end || run.tokens != cursor.tokens) {
            self.runs.push(Run { first, end, tokens: cursor.tokens });
        }
        self.found.extend_from_slice(&hits.blocks[..hits.count]);
        answer.fill(cursor.position, STATE_MISS);
        cursor.position += hits.count as u64;
        answer.fill(cursor.position, STATE_READY);
        answer.slots.extend_from_slice(&hits.slots[..hits.count]);
        answer.generations.extend_from_slice(&hits.generations[..hits.count]);
    }

    fn miss(&mut self, cursor: &mut Cursor, reason: MissReason, answer: &mut Answer) {
        self.counts.misses[reason as usize] += 1;
        if cursor.attention == Attention::Full {
            cursor.gap = Some(reason);
        }
        if reason.is_passing() {
            answer.fill(cursor.position - 1, STATE_MISS);
            answer.fill(cursor.position, STATE_NOT_YET);
        }
    }
}

impl Cursor {
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

    /// The state of all keys up to number `position`, counted from 1, that were not told.
    fn fill(&mut self, position: u64, state: u8) {
        self.states.resize(position as usize, state);
    }

    /// The source of the last ready key.
    fn come_from(&mut self, source: u8) {
        self.sources.resize(self.slots.len() - 1, SOURCE_POOL);
        self.sources.push(source);
    }
}

impl Run {
    /// Where the block at `place` in `Lookup::found` ends if it is of this run.
    fn end_of(&self, place: usize) -> u64 {
        self.end + (place - self.first) as u64 * self.tokens
    }
}

impl Default for Hits {
    fn default() -> Hits {
        let (blocks, slots) = ([BlockId::NONE; TOUCHED_TOGETHER], [0; TOUCHED_TOGETHER]);
        Hits { blocks, slots, generations: slots, count: 0 }
    }
}

impl Hits {
    #[inline]
    fn push(&mut self, block: BlockId, record: &Block) {
        let at = self.count;
        (self.blocks[at], self.slots[at], self.generations[at]) = (block, record.slot.0, record.generation.0);
        self.count += 1;
    }

    fn last(&self) -> Option<BlockId> {
        self.blocks[..self.count].last().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Config;
    use crate::key::{Generation, NamespaceId, SlotId};
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
        core.commit(Instance(0), ns, 0, BlockHash::new(&hash(1, 2)).unwrap(), None, slots[0], Some(0));
        let block = core.slots.space().block_at(slots[0].0).unwrap();
        let short = &hash(1, 2)[..31];
        let others = [
            (ns, 0, &hash(1, 3)[..]),
            (ns, 0, &hash(3, 2)),
            (ns, 0, short),
            (ns, 1, &hash(1, 2)),
            (other_ns, 0, &hash(1, 2)),
        ];
        for (ns, group, hash) in others {
            let key = core.cache.fingerprint(ns, group, hash);
            core.cache.insert_under(key, block);
            let (mut answer, mut lookup) = (Answer::default(), core.begin_lookup(Some(Instance(0)), ns));
            core.look(&mut lookup, group, hash, hash.len(), &mut answer);
            assert_eq!(core.finish_lookup(lookup), LeaseId(0), "{hash:?} of group {group} in {ns:?}");
            assert_eq!(answer, Answer::default());
            core.cache.remove_under(key, block);
        }
        assert!(core.cache.find(&core.slots, ns, 0, &BlockHash::new(&hash(1, 2)).unwrap()).is_some());
    }
}
