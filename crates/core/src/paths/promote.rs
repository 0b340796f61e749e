//! Promotion: from a tier into the pool.
//!
//! Lookup → location, or a probe of shared tiers → slot within the promises' share → `Effect::Promote` →
//! [`Core::promoted`]. Lookups of the block during the promotion are answered "not yet" and start nothing. A failure is
//! a miss. If the block is absent or not whole on the tier, its location is forgotten. If the load failed in another
//! way, or is late, the block is skipped until [`Core::expire_skips`], so that requests do not wait for it again and
//! again.
//!
//! Invariants: a slot that a tier fills is `Promoting` or `Fenced`, pinned once, and free only after the tier's
//! completion, however late that is. Promotions count towards the promises' share, and evict no held block. The bytes
//! of late loads have a limit.

use crate::cache::Fate;
use crate::core::Core;
use crate::error::ErrorKind;
use crate::journal::Effect;
use crate::key::{BlockHash, BlockId, ClassId, Fingerprint, Generation, NamespaceId, NamespaceIndex, TierId};
use crate::miss::MissReason;
use crate::slots::{Block, State};
use crate::stats::Finder;
use crate::tier::Outcome;
use crate::tiers::{LoadHealth, TRANSFERS};

/// See [`Core::MAX_STARTS_PER_LOOK`].
const STARTS: usize = 48;
/// Touches applied before the first of them evicts.
const TOUCHES_FIRST: usize = 512;

/// Questions to shared tiers that one event may ask, at about 0.3 µs each.
const PROBES: usize = 256;

/// How many promotions one event may still start, how many evictions these may take, and how many keys it may ask
/// shared tiers for.
pub(crate) struct Allowance {
    starts: usize,
    evictions: usize,
    probes: usize,
    /// A promotion that finds no slot is tried again by a later look.
    waits_for_room: bool,
    /// A promotion found no slot: what would have to go is held.
    pub lacks_room: bool,
    /// More promotions could start.
    pub is_spent: bool,
}

impl Allowance {
    pub fn new(waits_for_room: bool) -> Allowance {
        let (starts, evictions, probes) = (STARTS, 2 * STARTS, PROBES);
        Allowance { starts, evictions, probes, waits_for_room, lacks_room: false, is_spent: false }
    }
}

impl Core {
    /// Promotions that one `look` may start: one that evicts takes about 2 µs.
    pub const MAX_STARTS_PER_LOOK: usize = STARTS;

    /// Brings the data that promotions of these keys will read into the processor's cache, all at once. Changes
    /// nothing.
    pub(crate) fn prepare_promotions<'a>(
        &self,
        namespace: NamespaceIndex,
        group: u16,
        hashes: impl Iterator<Item = &'a [u8]>,
    ) {
        let id = self.cache.namespace(namespace).id;
        self.tiers.touch_lines(hashes.map(|hash| self.tiers.key(id, group, hash)));
    }

    /// Promotes the block of a key that is not in the pool, if a tier has it; the reason why it is a miss now.
    /// `None` if no tier has it. `limit` are the bytes that may be pinned.
    pub(crate) fn promote(
        &mut self,
        namespace: NamespaceIndex,
        group: u16,
        hash: &[u8],
        limit: u64,
        allowance: &mut Allowance,
    ) -> Option<MissReason> {
        let id = self.cache.namespace(namespace).id;
        let key = self.tiers.key(id, group, hash);
        let Some((tier, health)) = self.tiers.source(key) else {
            let asked = self.probe(namespace, group, hash, &mut allowance.probes);
            return asked.or_else(|| self.why_not_loaded(id, key));
        };
        let class = self.cache.namespace(namespace).class(group)?;
        let slot_bytes = self.slots.space().class_info(class).slot_bytes;
        match health {
            _ if self.is_purging_tiers(id) => return None,
            // A shared one, which has said that it has the block.
            _ if !self.tiers.is_open(tier) => return Some(MissReason::Failed),
            LoadHealth::Late => return Some(MissReason::TooSlow),
            LoadHealth::Failed => return Some(MissReason::Failed),
            LoadHealth::Good => {}
        }
        // Not `PromotionUnfinished`: that makes the engine wait for a lease that it cannot get.
        let promised = self.promised_bytes();
        if promised > 0 && promised + slot_bytes > limit {
            return Some(MissReason::OverLimit);
        }
        let hash = BlockHash::new(hash).ok()?;
        // The same key may stand twice in one batch.
        let is_started = self.cache.find(&self.slots, namespace, group, &hash).is_some();
        if is_started || self.tiers.is_loading_enough(tier) {
            return Some(MissReason::PromotionUnfinished);
        }
        if allowance.starts == 0 {
            allowance.is_spent = true;
            return Some(MissReason::PromotionUnfinished);
        }
        if allowance.starts == STARTS {
            self.settle(TOUCHES_FIRST);
        }
        allowance.starts -= 1;
        if !self.has_free_slot(class) && !self.free_slots(class, 1, &mut allowance.evictions) {
            // The coldest blocks are held, perhaps by this very lookup, and were moved out of the way: the next lookup
            // finds others. The limit above leaves some in the pool, but not in each class: then the lookup waits.
            if !allowance.waits_for_room {
                return Some(MissReason::OverLimit);
            }
            allowance.lacks_room = true;
            return Some(MissReason::PromotionUnfinished);
        }
        self.start_promotion(tier, class, namespace, group, hash);
        Some(MissReason::PromotionUnfinished)
    }

    /// Why a tier that has the block of this key, if one does, is not asked for it now.
    fn why_not_loaded(&self, namespace: NamespaceId, key: Fingerprint) -> Option<MissReason> {
        let (tier, health) = self.tiers.location(key).filter(|_| !self.is_purging_tiers(namespace))?;
        let is_late = self.tiers.is_open(tier) && health == LoadHealth::Late;
        Some(if is_late { MissReason::TooSlow } else { MissReason::Failed })
    }

    /// A load has ended. True if the block is whole: then it is ready.
    pub fn promoted(&mut self, block: BlockId, generation: Generation, outcome: Outcome) -> bool {
        let Block { state, generation: own, .. } = self.slots[block];
        assert!(own == generation && matches!(state, State::Promoting | State::Fenced), "{block:?} was not loading");
        let (tier, bytes) = (self.filler(block), self.slots.slot_bytes(block));
        self.tiers.end_load(tier, bytes);
        self.journal.note_end();
        let whole = self.checksum_of_whole(block, outcome).filter(|_| state == State::Promoting);
        match state {
            State::Promoting if let Some(checksum) = whole => self.arrive(block, tier, checksum),
            State::Promoting => {
                self.record_failure(block, tier, outcome);
                self.take_back(block);
            }
            _ => self.tiers.end_late(tier, bytes),
        }
        self.slots.end_transfer(block, TRANSFERS, &mut self.journal);
        self.unpin(block);
        whole.is_some()
    }

    /// The load is late: its waiters get a miss. The slot stays out of use until [`Core::promoted`].
    pub fn give_up(&mut self, block: BlockId, generation: Generation) {
        let Block { state, generation: own, .. } = self.slots[block];
        if state == State::Promoting && own == generation {
            let tier = self.filler(block);
            self.tiers.stats_mut(tier).late += 1;
            if self.is_current(block) && !self.is_prefetch(block) {
                self.tiers.skip(self.tier_key_of(block), tier, LoadHealth::Late);
            }
            self.abandon(block);
        }
    }

    /// No request waits for this promotion any more; the tier's remaining writes go to a fenced slot.
    pub(crate) fn abandon(&mut self, block: BlockId) {
        let (tier, bytes) = (self.filler(block), self.slots.slot_bytes(block));
        self.tiers.begin_late(tier, bytes);
        self.take_back(block);
    }

    /// Fills a free slot of `class` from the tier.
    pub(crate) fn start_promotion(
        &mut self,
        tier: TierId,
        class: ClassId,
        namespace: NamespaceIndex,
        group: u16,
        hash: BlockHash,
    ) -> BlockId {
        let holders = if self.tiers.limits(tier).is_shared { 0 } else { TRANSFERS.bit() };
        let key = (namespace, group, hash);
        let block = self.slots.begin_promotion(class, key, (tier.0, tier.bit()), holders, &mut self.journal);
        self.cache.name(&self.slots, self.cache.fingerprint(namespace, group, hash.as_bytes()), block);
        self.tiers.begin_load(tier, self.slots.slot_bytes(block));
        self.tiers.confirm(tier, block);
        let Block { slot, generation, .. } = self.slots[block];
        self.journal.push(Effect::Promote { tier, block, slot, generation });
        block
    }

    fn arrive(&mut self, block: BlockId, tier: TierId, checksum: u64) {
        let bytes = self.slots.slot_bytes(block);
        let stats = self.tiers.stats_mut(tier);
        stats.promoted += 1;
        stats.promoted_bytes += bytes;
        self.tiers.note_given(tier, self.tier_key_of(block));
        self.end_prefetch(block);
        self.slots.end_promotion(block, checksum, &mut self.journal);
        self.cache.admit_loaded(&mut self.slots, block);
        self.cache.remember(&self.slots[block], Fate::Stored);
        // The tier's checksum is of the whole; each worker compares its slice.
        if self.slices(block).len() > 1 {
            self.verify(block, Finder::Tier);
        }
    }

    /// A block of another length was stored under another layout of the same name: it is not the block that was asked
    /// for.
    fn checksum_of_whole(&self, block: BlockId, outcome: Outcome) -> Option<u64> {
        match outcome {
            Outcome::Loaded { length_bytes, checksum } if length_bytes == self.block_length_bytes(block) => {
                Some(checksum)
            }
            _ => None,
        }
    }

    /// Counts a failure and decides whether the block is asked for again.
    fn record_failure(&mut self, block: BlockId, tier: TierId, outcome: Outcome) {
        let key = self.tier_key_of(block);
        if outcome == Outcome::Failed(ErrorKind::Corrupt) {
            self.journal.stats_mut().corrupt[Finder::Tier as usize] += 1;
        }
        let stats = self.tiers.stats_mut(tier);
        match outcome {
            Outcome::Absent => stats.absent += 1,
            Outcome::Failed(ErrorKind::Corrupt) | Outcome::Loaded { .. } => stats.corrupt += 1,
            _ => stats.failed_loads += 1,
        }
        if !self.is_current(block) {
            return;
        }
        self.cache.remember(&self.slots[block], Fate::Failed);
        match outcome {
            // Whoever asks tries for himself.
            Outcome::Failed(kind) if kind.is_retryable() && self.is_prefetch(block) => {}
            Outcome::Failed(kind) if kind.is_retryable() => self.tiers.skip(key, tier, LoadHealth::Failed),
            _ => self.tiers.forget_location(key, tier),
        }
    }

    /// Out of the index and fenced; the load's pin keeps the slot.
    fn take_back(&mut self, block: BlockId) {
        self.end_prefetch(block);
        self.slots.unmark_prefetch(block);
        self.cache.unname(&self.slots, block);
        self.slots.fence(block, &mut self.journal);
        self.journal.note_end();
    }
}
