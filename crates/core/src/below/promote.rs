//! From a tier up into the pool.
//!
//! Lookup → place, asked for if need be (`seek`) → slot within the promises' share → `Effect::Load` → [`Core::loaded`]. Whoever asks meanwhile is told
//! "not yet" and starts nothing. A failure is a miss: a block that is not there or not whole is forgotten; one that
//! failed otherwise, or is late, is passed over until [`Core::forgive`], so that nobody waits for it again and again.

use super::{Below, Standing, TRANSFERS, TierId, residence};
use crate::block::{AHEAD, Block, BlockId, ClassId, NamespaceIndex, State};
use crate::core::{Core, Effect};
use crate::corrupt::Finder;
use crate::error::ErrorKind;
use crate::index::Fingerprint;
use crate::key::{BlockHash, Generation, SlotId};
use crate::miss::{Fate, MissReason};
use crate::tier::Outcome;

/// Keys that are passed over at a time; beyond it a block that failed is forgotten.
const MAX_SET_ASIDE: usize = 1 << 16;
/// Promotions that one event may start: one that evicts takes about 2 µs.
const STARTS: usize = 48;
/// Touches applied before the first of them evicts.
const TOUCHES_FIRST: usize = 512;

/// Questions to shared tiers that one event may ask, at about 0.3 µs each.
const FINDS: usize = 256;

/// How many promotions one event may still start, how many evictions these may take, and how many keys it may ask
/// shared tiers for.
pub(crate) struct Allowance {
    starts: usize,
    evictions: usize,
    finds: usize,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance { starts: STARTS, evictions: 2 * STARTS, finds: FINDS }
    }
}

impl Core {
    /// Brings what promotions of these keys will look at into the processor's cache, all at once. Changes nothing.
    pub(crate) fn prepare_promotions<'a>(
        &self,
        namespace: NamespaceIndex,
        group: u16,
        hashes: impl Iterator<Item = &'a [u8]>,
    ) {
        let id = self.names.get(namespace).id;
        let keys: Vec<Fingerprint> = hashes.map(|hash| residence::key(self.config.seed, id, group, hash)).collect();
        self.below.residence.warm(&keys);
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
        let id = self.names.get(namespace).id;
        let key = residence::key(self.config.seed, id, group, hash);
        let Some((place, standing)) = self.below.place(key) else {
            return self.seek(namespace, group, hash, &mut allowance.finds);
        };
        let class = self.names.get(namespace).class(group)?;
        let slot_bytes = self.space.class_info(class).slot_bytes;
        match standing {
            _ if self.is_purging_below(id) => return None,
            _ if !self.is_open(place.tier) => return Some(MissReason::Failed),
            Standing::Late => return Some(MissReason::TooSlow),
            Standing::Failed => return Some(MissReason::Failed),
            Standing::Good => {}
        }
        // Not "not yet": nobody would wait for it in vain.
        let promised = self.promised_bytes();
        if promised > 0 && promised + slot_bytes > limit {
            return Some(MissReason::OverLimit);
        }
        let hash = BlockHash::new(hash).ok()?;
        // The same key may stand twice in one batch.
        let is_started = self.find(namespace, group, &hash).is_some();
        if is_started || allowance.starts == 0 || self.below.is_loading_enough(place.tier) {
            return Some(MissReason::PromotionUnfinished);
        }
        if allowance.starts == STARTS {
            self.settle(TOUCHES_FIRST);
        }
        allowance.starts -= 1;
        if !self.has_room(class) && !self.make_room(class, 1, &mut allowance.evictions) {
            // The coldest blocks are held, by this very lookup perhaps, and were moved out of the way: the next lookup
            // finds others. That there are some, the limit above says.
            return Some(MissReason::PromotionUnfinished);
        }
        self.load(place.tier, class, namespace, group, hash);
        Some(MissReason::PromotionUnfinished)
    }

    /// A load has ended. True if the block is whole: then its entry is to be written to the table.
    pub fn loaded(&mut self, block: BlockId, generation: Generation, outcome: Outcome) -> bool {
        let Block { state, generation: own, .. } = self.blocks[block];
        assert!(own == generation && matches!(state, State::Promoting | State::Fenced), "{block:?} was not loading");
        let (tier, bytes) = (self.filler(block), self.slot_bytes(block));
        self.tier_mut(tier).loading.take(bytes);
        let is_ready = state == State::Promoting && self.is_as_long(block, outcome);
        match state {
            State::Promoting if is_ready => self.arrive(block, tier),
            State::Promoting => {
                self.blame(block, tier, outcome);
                self.take_back(block);
            }
            _ => self.tier_mut(tier).late.take(bytes),
        }
        self.unpin(block);
        is_ready
    }

    /// The load is late: its waiters get a miss. The slot stays out of use until [`Core::loaded`].
    pub fn give_up(&mut self, block: BlockId, generation: Generation) {
        let Block { state, generation: own, .. } = self.blocks[block];
        if state == State::Promoting && own == generation {
            let tier = self.filler(block);
            self.tier_mut(tier).stats.late += 1;
            if self.is_current(block) && !self.is_ahead(block) {
                self.set_aside(self.below_key_of(block), tier, Standing::Late);
            }
            self.abandon(block);
        }
    }

    /// Nobody waits for this promotion any more; what the tier still writes lands in a fenced slot.
    pub(crate) fn abandon(&mut self, block: BlockId) {
        let (tier, bytes) = (self.filler(block), self.slot_bytes(block));
        self.tier_mut(tier).late.add(bytes);
        self.take_back(block);
    }

    /// Fills a free slot of `class` from the tier.
    pub(super) fn load(
        &mut self,
        tier: TierId,
        class: ClassId,
        namespace: NamespaceIndex,
        group: u16,
        hash: BlockHash,
    ) -> BlockId {
        let generation = self.generation();
        let holders = if self.below.tiers[tier.0 as usize].limits.is_shared { 0 } else { TRANSFERS.bit() };
        let (block, slot) = self.take_slot(Block {
            holders,
            hash,
            state: State::Promoting,
            class,
            group,
            owner: tier.0,
            below: tier.bit(),
            namespace,
            slot: SlotId(0),
            generation,
            pins: 0,
        });
        self.name(block);
        self.tallies[class.0 as usize].promoting += 1;
        self.effects.push(Effect::Reserved { slot, generation, holders });
        self.pin(block, None);
        let bytes = self.slot_bytes(block);
        let state = self.tier_mut(tier);
        state.loading.add(bytes);
        state.stats.promotions += 1;
        self.effects.push(Effect::Load { tier, block, slot, generation });
        block
    }

    fn arrive(&mut self, block: BlockId, tier: TierId) {
        let bytes = self.slot_bytes(block);
        let stats = &mut self.tier_mut(tier).stats;
        stats.promoted += 1;
        stats.promoted_bytes += bytes;
        let class = self.blocks[block].class;
        self.tallies[class.0 as usize].promoting -= 1;
        self.end_ahead(block);
        self.blocks[block].state = State::Ready;
        self.admit(block, class, None);
        self.remember(block, Fate::Stored);
        // The tier's checksum is of the whole; each worker compares its slice.
        if self.slices(block).len() > 1 {
            self.verify(block, Finder::Scrub);
        }
    }

    /// A block of another length was stored under another layout of the same name: it is not what was asked for.
    fn is_as_long(&self, block: BlockId, outcome: Outcome) -> bool {
        matches!(outcome, Outcome::Loaded { length_bytes, .. } if length_bytes == self.length_below(block))
    }

    /// Counts a failure and decides whether the block is asked for again.
    fn blame(&mut self, block: BlockId, tier: TierId, outcome: Outcome) {
        let key = self.below_key_of(block);
        let stats = &mut self.tier_mut(tier).stats;
        match outcome {
            Outcome::Absent => stats.absent += 1,
            Outcome::Failed(ErrorKind::Corrupt) | Outcome::Loaded { .. } => stats.corrupt += 1,
            _ => stats.failed_loads += 1,
        }
        if !self.is_current(block) {
            return;
        }
        self.remember(block, Fate::Failed);
        match outcome {
            // Whoever asks tries for himself.
            Outcome::Failed(kind) if kind.is_retryable() && self.is_ahead(block) => {}
            Outcome::Failed(kind) if kind.is_retryable() => self.set_aside(key, tier, Standing::Failed),
            _ => self.leave_below(key, tier),
        }
    }

    fn set_aside(&mut self, key: Fingerprint, tier: TierId, standing: Standing) {
        if self.below.set_aside.len() < MAX_SET_ASIDE {
            self.below.residence.stand(key, standing);
            self.below.sought.stand(key, standing);
            self.below.set_aside.push(key);
        } else {
            self.leave_below(key, tier);
        }
    }

    /// Out of the index and fenced; the load's pin keeps the slot.
    fn take_back(&mut self, block: BlockId) {
        let class = self.blocks[block].class;
        self.tallies[class.0 as usize].promoting -= 1;
        self.end_ahead(block);
        self.blocks[block].owner &= !AHEAD;
        self.unindex(block);
        self.fence(block);
    }
}

impl Below {
    fn is_loading_enough(&self, tier: TierId) -> bool {
        let tier = &self.tiers[tier.0 as usize];
        tier.loading.blocks - tier.ahead.blocks >= tier.limits.load_blocks as u64
    }
}
