//! From the pool down to the tiers, in the background.
//!
//! Sighting → queue → `Effect::Store` with the block pinned → [`Core::stored`]. Admission is prefix-closed: a lookup's
//! hits are queued from its first token on and no further than the queue takes; a commit is queued only behind a
//! parent that is below or queued. Blocks that wait are not pinned, blocks being written are, within a limit, so
//! eviction always finds something.

use super::{Admission, Place, TierId};
use crate::block::{Block, BlockId, NamespaceIndex, State};
use crate::core::{Core, Effect};
use crate::corrupt::Finder;
use crate::error::ErrorKind;
use crate::key::{BlockHash, Generation};
use crate::layout::Attention;
use crate::miss::Fate;
use crate::tier::Outcome;

impl Core {
    /// These blocks were hit, in prefix order. False if a queue took not all of them.
    pub(crate) fn sight(&mut self, found: &[BlockId]) -> bool {
        let mut is_all = true;
        for tier in self.storing_tiers() {
            is_all &= found.iter().all(|block| self.queue_store(tier, *block));
        }
        self.start_stores();
        is_all
    }

    /// Whether a key about to be committed was in the pool before; only asked where it matters.
    pub(crate) fn is_returning(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> bool {
        self.below.is_on()
            && matches!(self.memory.recall(group, hash.as_bytes()),
                Some((known, Fate::Stored | Fate::Evicted)) if self.names.is_same(known, namespace))
    }

    /// This block was committed behind `predecessor`.
    pub(crate) fn sight_stored(&mut self, block: BlockId, predecessor: Option<BlockHash>, is_returning: bool) {
        for tier in self.storing_tiers() {
            let limits = self.below.tiers[tier.0 as usize].limits;
            let is_admitted = is_returning || limits.admission == Admission::All;
            if is_admitted && self.is_reachable(tier, block, predecessor) {
                self.queue_store(tier, block);
            }
        }
        self.start_stores();
    }

    /// A store has ended. False if the block was purged meanwhile: the tier must be told to remove it.
    pub fn stored(&mut self, tier: TierId, block: BlockId, outcome: Outcome) -> bool {
        let bytes = self.slot_bytes(block);
        self.tier_mut(tier).storing.take(bytes);
        let is_kept = match outcome {
            Outcome::Stored(at) if self.is_current(block) => {
                let stats = &mut self.tier_mut(tier).stats;
                stats.stored += 1;
                stats.stored_bytes += bytes;
                if !self.tier_mut(tier).limits.is_shared {
                    self.reside(self.below_key_of(block), Place { tier, at });
                }
                true
            }
            Outcome::Stored(_) => false,
            _ => {
                self.tier_mut(tier).stats.failed_stores += 1;
                self.blocks[block].below &= !tier.bit();
                if outcome == Outcome::Failed(ErrorKind::Corrupt) && self.blocks[block].state == State::Ready {
                    self.verify(block, Finder::Scrub);
                }
                true
            }
        };
        self.unpin(block);
        self.start_stores();
        is_kept
    }

    /// Starts as many of the waiting stores as the limits allow.
    pub(crate) fn start_stores(&mut self) {
        for tier in self.storing_tiers() {
            while self.may_store(tier)
                && let Some((block, generation)) = self.tier_mut(tier).queue.pop_front()
            {
                self.start_store(tier, block, generation);
            }
        }
    }

    fn start_store(&mut self, tier: TierId, block: BlockId, generation: Generation) {
        let Block { state, generation: own, slot, .. } = self.blocks[block];
        let is_same = own == generation;
        if !is_same || state != State::Ready || !self.is_current(block) {
            self.tier_mut(tier).stats.dropped_gone += 1;
            // It may be queued again when the purge is over, or when it was compared.
            self.blocks[block].below &= if is_same { !tier.bit() } else { u8::MAX };
            return;
        }
        let bytes = self.slot_bytes(block);
        self.pin(block, None);
        self.tier_mut(tier).storing.add(bytes);
        self.effects.push(Effect::Store { tier, block, slot, generation });
    }

    /// Whether the block is below, or will be. False if there is no room in the queue.
    fn queue_store(&mut self, tier: TierId, block: BlockId) -> bool {
        let Block { below, generation, .. } = self.blocks[block];
        if below & tier.bit() != 0 {
            return true;
        }
        let is_there = self.below.place(self.below_key_of(block)).is_some_and(|(place, _)| place.tier == tier);
        let state = self.tier_mut(tier);
        if !is_there && state.queue.len() >= state.limits.queue_blocks {
            state.stats.dropped_full += 1;
            return false;
        }
        if !is_there {
            state.queue.push_back((block, generation));
            state.stats.queued += 1;
        }
        self.blocks[block].below |= tier.bit();
        true
    }

    /// The block has another generation since it moved; what waits to be written is known by it.
    pub(crate) fn requeue(&mut self, block: BlockId, before: Generation) {
        let Block { generation, below, .. } = self.blocks[block];
        for tier in self.below.tiers.iter_mut().filter(|_| below != 0) {
            let waits = tier.queue.iter_mut().filter(|queued| **queued == (block, before));
            waits.for_each(|queued| queued.1 = generation);
        }
    }

    /// Whether a prefix leads to the block on this tier.
    fn is_reachable(&self, tier: TierId, block: BlockId, predecessor: Option<BlockHash>) -> bool {
        let Block { namespace, group, .. } = self.blocks[block];
        let layout = self.names.get(namespace).layout.group(group);
        let Some(predecessor) = predecessor.filter(|_| layout.is_some_and(|l| l.attention == Attention::Full)) else {
            return true;
        };
        match self.find(namespace, group, &predecessor) {
            Some(parent) if self.blocks[parent].below & tier.bit() != 0 => true,
            _ => self.is_below(namespace, group, &predecessor),
        }
    }

    /// Whether any tier is known to hold the key.
    pub(crate) fn is_below(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> bool {
        let id = self.names.get(namespace).id;
        let key = super::residence::key(self.config.seed, id, group, hash.as_bytes());
        self.below.place(key).is_some() && !self.is_purging_below(id)
    }

    /// Whether the block's namespace is what its id means, and is not being removed.
    pub(super) fn is_current(&self, block: BlockId) -> bool {
        let namespace = self.blocks[block].namespace;
        let id = self.names.get(namespace).id;
        self.names.current_index(id) == Some(namespace) && !self.is_purging_below(id)
    }

    fn may_store(&self, tier: TierId) -> bool {
        let state = &self.below.tiers[tier.0 as usize];
        let is_full = state.storing.bytes >= self.share(state.limits.store_permille);
        // One block is always written, or a small pool could never store a large one.
        let has_room = state.storing.blocks == 0 || !is_full && state.storing.blocks < state.limits.store_blocks as u64;
        has_room && self.is_open(tier)
    }

    fn storing_tiers(&self) -> impl Iterator<Item = TierId> + use<> {
        let mut takes = [false; TierId::MAX];
        takes.iter_mut().zip(&self.below.tiers).for_each(|(takes, tier)| *takes = !tier.is_read_only);
        (0..TierId::MAX as u8).map(TierId).filter(move |tier| takes[tier.0 as usize])
    }
}
