//! Write back: from the pool to the tiers, in the background.
//!
//! Sighting → queue → `Effect::WriteBack` with the block pinned → [`Core::written_back`].
//!
//! Invariants: admission is prefix-closed. A lookup's hits are queued from its first token on, as many as the queue
//! takes; a commit is queued only after a parent that is on the tier or queued, or may be: a recovered parent was not
//! looked for yet. Blocks that wait are not pinned. Blocks that are being written are pinned, within a limit, so that
//! eviction always finds a victim.

use crate::core::Core;
use crate::error::ErrorKind;
use crate::journal::Effect;
use crate::key::{BlockHash, BlockId, Fingerprint, Generation, NamespaceIndex, TierId};
use crate::layout::Attention;
use crate::slots::{Block, State, TOUCHED_TOGETHER};
use crate::stats::Finder;
use crate::tier::{Outcome, Position};
use crate::tiers::{Admission, Queued};

impl Core {
    /// The blocks from `from` on were hit, in prefix order. `full` are the bits of tiers whose queues took not all of
    /// the earlier ones; returns those that took not all of these either.
    pub(crate) fn consider_hits(&mut self, found: &[BlockId], from: usize, mut full: u8) -> u8 {
        for tier in self.tiers.writable() {
            if full & tier.bit() == 0 && !self.queue_hits(tier, found, from) {
                full |= tier.bit();
            }
            self.touch_marked(tier, &found[from..]);
        }
        self.start_write_backs();
        full
    }

    /// Whether a block of a key about to be committed came before; only asked where it matters.
    pub(crate) fn is_returning(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> bool {
        self.tiers.is_on() && self.cache.was_offered(namespace, group, hash)
    }

    /// This block was committed behind `predecessor`, which is in the pool as `parent`.
    pub(crate) fn consider_new(
        &mut self,
        block: BlockId,
        predecessor: Option<BlockHash>,
        parent: Option<BlockId>,
        is_returning: bool,
    ) {
        for tier in self.tiers.writable() {
            self.offer(tier, block, predecessor, is_returning);
        }
        // As much may wait as engines may reserve: a burst of stores, and not a pool that a slow tier fills.
        let most = self.slots.share(self.config.reserve_permille) / self.slots.slot_bytes(block);
        if self.tiers.begin_wait(block, self.slots[block].generation, most) {
            self.cache.begin_wait(&mut self.slots, block, parent);
        }
        self.start_write_backs();
    }

    /// A block was committed that is here already, as `block`. Tiers that may have lost it meanwhile are asked.
    pub(crate) fn consider_duplicate(&mut self, block: BlockId, predecessor: Option<BlockHash>) {
        if !self.tiers.is_on() || self.slots[block].state != State::Ready {
            return;
        }
        for tier in self.tiers.writable().filter(|tier| self.tiers.marks(*tier).is_some()).collect::<Vec<_>>() {
            self.offer(tier, block, predecessor, false);
            self.touch_marked(tier, &[block]);
        }
        self.start_write_backs();
    }

    /// A store has ended. False if the block was purged meanwhile: the tier must be told to remove it.
    pub fn written_back(&mut self, tier: TierId, block: BlockId, outcome: Outcome) -> bool {
        let bytes = self.slots.slot_bytes(block);
        self.tiers.end_write_back(tier, bytes);
        self.tiers.confirm(tier, block);
        let is_kept = match outcome {
            Outcome::Stored if self.is_current(block) => {
                let stats = self.tiers.stats_mut(tier);
                stats.stored += 1;
                stats.stored_bytes += bytes;
                let key = self.tier_key_of(block);
                if self.tiers.limits(tier).is_shared {
                    self.tiers.note_given(tier, key);
                    self.tiers.presence_mut().stored(key, tier);
                } else {
                    self.tiers.set_location(key, tier);
                    self.tiers.note_given_before(block, self.slots[block].tiers, key);
                }
                true
            }
            Outcome::Stored => false,
            _ => {
                self.tiers.stats_mut(tier).failed_stores += 1;
                self.slots.remove_tier(block, tier.bit());
                if outcome == Outcome::Failed(ErrorKind::Corrupt) && self.slots[block].state == State::Ready {
                    self.verify(block, Finder::Tier);
                }
                true
            }
        };
        let generation = self.slots[block].generation;
        self.unpin(block);
        self.end_wait(tier, block, generation);
        self.start_write_backs();
        is_kept
    }

    /// Starts as many of the waiting stores as the limits allow.
    pub(crate) fn start_write_backs(&mut self) {
        for tier in self.tiers.writable() {
            while let Some(queued) = self.tiers.take_queued(tier) {
                self.start_write_back(tier, queued);
            }
        }
    }

    fn start_write_back(&mut self, tier: TierId, Queued { block, generation, parent }: Queued) {
        let Block { state, generation: own, slot, .. } = self.slots[block];
        let is_same = own == generation;
        if !is_same || state != State::Ready || !self.is_current(block) {
            self.tiers.stats_mut(tier).dropped_gone += 1;
            // It may be queued again when the purge is over, or when it was compared.
            if is_same {
                self.slots.remove_tier(block, tier.bit());
            }
            return self.end_wait(tier, block, generation);
        }
        let bytes = self.slots.slot_bytes(block);
        self.pin(block, None);
        self.tiers.begin_write_back(tier, bytes);
        self.journal.push(Effect::WriteBack { tier, block, slot, generation, parent });
    }

    /// The tier has written the block that had this generation, or gave up on it.
    fn end_wait(&mut self, tier: TierId, block: BlockId, generation: Generation) {
        if self.tiers.end_wait(tier, block, generation) && self.slots[block].generation == generation {
            self.cache.end_wait(&mut self.slots, block);
        }
    }

    /// Queues a block that was committed, if the tier takes such ones.
    fn offer(&mut self, tier: TierId, block: BlockId, predecessor: Option<BlockHash>, is_returning: bool) {
        let is_admitted = is_returning || self.tiers.limits(tier).admission == Admission::All;
        if is_admitted && self.is_reachable(tier, block, predecessor) {
            self.queue_write_back(tier, block, predecessor);
        }
    }

    /// Queues those of the hits from `from` on that the tier lacks, each behind the one before it. All of them are of
    /// one group. False if the queue has no room for one; no later one is queued then.
    fn queue_hits(&mut self, tier: TierId, found: &[BlockId], from: usize) -> bool {
        let (earlier, hits) = found.split_at(from);
        let Some(first) = hits.first() else { return true };
        let Block { namespace, group, .. } = self.slots[*first];
        let id = self.cache.namespace(namespace).id;
        let mut before = earlier.last().copied().filter(|before| self.slots[*before].group == group);
        for batch in hits.chunks(TOUCHED_TOGETHER) {
            let mut keys = [None; TOUCHED_TOGETHER];
            for (key, block) in keys.iter_mut().zip(batch) {
                let Block { tiers, hash, .. } = &self.slots[*block];
                *key = (tiers & tier.bit() == 0).then(|| self.tiers.key(id, group, hash.as_bytes()));
            }
            self.tiers.touch_lines(keys.iter().copied().flatten());
            for (key, block) in keys.iter().zip(batch) {
                // A lookup may name a block twice: the first time has marked it.
                if let Some(key) = key.filter(|_| self.slots[*block].tiers & tier.bit() == 0) {
                    let parent = before.map(|before| self.tiers.position(id, &self.slots[before].hash));
                    if !self.queue_missing(tier, *block, key, parent) {
                        return false;
                    }
                }
                before = Some(*block);
            }
        }
        true
    }

    /// Whether the block is on the tier, or will be. False if there is no room in the queue.
    pub(crate) fn queue_write_back(&mut self, tier: TierId, block: BlockId, predecessor: Option<BlockHash>) -> bool {
        let Block { tiers, namespace, .. } = self.slots[block];
        if tiers & tier.bit() != 0 {
            return true;
        }
        let id = self.cache.namespace(namespace).id;
        let parent = predecessor.map(|hash| self.tiers.position(id, &hash));
        self.queue_missing(tier, block, self.tier_key_of(block), parent)
    }

    /// The same of a block that has this key on the tiers, and is not marked as one that this tier has.
    fn queue_missing(&mut self, tier: TierId, block: BlockId, key: Fingerprint, parent: Option<Position>) -> bool {
        let is_taken = if self.tiers.has(tier, key) {
            self.tiers.confirm(tier, block);
            true
        } else if self.tiers.is_asked_first(tier, key) {
            // A question costs less than a block. [`Core::touched`] queues the block if it is not there.
            self.tiers.ask(tier, block, self.slots[block].generation) || self.enqueue(tier, block, parent)
        } else {
            self.enqueue(tier, block, parent)
        };
        if is_taken {
            self.slots.add_tier(block, tier.bit());
        }
        is_taken
    }

    fn enqueue(&mut self, tier: TierId, block: BlockId, parent: Option<Position>) -> bool {
        let generation = self.slots[block].generation;
        self.tiers.enqueue(tier, Queued { block, generation, parent })
    }

    /// The tier was asked for the block, and lacks it. Where the block stands in a prompt matters only to disks.
    pub(crate) fn queue_asked(&mut self, tier: TierId, block: BlockId) {
        if self.enqueue(tier, block, None) {
            self.slots.add_tier(block, tier.bit());
        }
        self.start_write_backs();
    }

    /// Whether a prefix leads to the block on this tier, as far as that is known.
    fn is_reachable(&self, tier: TierId, block: BlockId, predecessor: Option<BlockHash>) -> bool {
        let Block { namespace, group, .. } = self.slots[block];
        let layout = self.cache.namespace(namespace).layout.group(group);
        let Some(predecessor) = predecessor.filter(|_| layout.is_some_and(|l| l.attention == Attention::Full)) else {
            return true;
        };
        let is_parent_there = self.cache.find(&self.slots, namespace, group, &predecessor).is_some_and(|parent| {
            let Block { state, tiers, .. } = self.slots[parent];
            tiers & tier.bit() != 0 || matches!(state, State::Unverified | State::Verifying)
        });
        is_parent_there || self.has_tier_copy(namespace, group, &predecessor)
    }

    /// Whether any tier is known to hold the key.
    pub(crate) fn has_tier_copy(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> bool {
        let id = self.cache.namespace(namespace).id;
        let key = self.tiers.key(id, group, hash.as_bytes());
        self.tiers.location(key).is_some() && !self.is_purging_tiers(id)
    }
}
