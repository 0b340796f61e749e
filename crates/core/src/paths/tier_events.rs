//! Reports and questions of the tiers' driver, beside the results of operations.
//!
//! The core decides and emits [`Effect::Promote`] and [`Effect::WriteBack`]. The driver moves the bytes, and reports
//! with [`Core::promoted`], [`Core::written_back`], [`Core::touched`], [`Core::give_up`] and [`Core::probe_done`]. With
//! the events in this file it reports which blocks a tier had at its start, which it evicted, and whether it is
//! healthy.

use crate::core::Core;
use crate::journal::Effect;
use crate::key::{BlockId, BlockKey, Fingerprint, Generation, NamespaceId, NamespaceIndex, TierId};
use crate::layout::GroupLayout;
use crate::slots::{Block, State};
use crate::tier::Position;
use crate::tiers::{Limits, TierHasher, TierReport};

impl Core {
    /// One more tier. Panics beyond [`TierId::MAX`].
    pub fn open_tier(&mut self, limits: Limits) -> TierId {
        let id = self.tiers.open(limits);
        self.cover_classes();
        id
    }

    /// A tier that is not healthy is asked for nothing and given nothing.
    pub fn set_healthy(&mut self, tier: TierId, is_healthy: bool) {
        self.tiers.set_healthy(tier, is_healthy);
        self.start_write_backs();
    }

    /// Nothing is written to this tier.
    pub fn set_read_only(&mut self, tier: TierId) {
        self.tiers.set_read_only(tier);
    }

    /// What a tier names its blocks with in [`Core::tier_found`] and [`Core::tier_lost`].
    pub fn tier_hasher(&self) -> TierHasher {
        self.tiers.hasher()
    }

    /// The tier holds this block: found at its start.
    pub fn tier_found(&mut self, tier: TierId, block: Fingerprint) {
        self.tiers.set_location(block, tier);
    }

    /// The tier does not hold this block any more, and cannot tell its key. [`Core::look_for_lost`] finds what the pool
    /// has of such blocks.
    pub fn tier_lost(&mut self, tier: TierId, block: Fingerprint) {
        self.tiers.stats_mut(tier).evicted += 1;
        self.tiers.forget_location(block, tier);
    }

    /// Looks through `limit` records of the pool from `from` on for blocks that an own tier was said to have, and has
    /// lost: the next lookup has them written again. The next place; `None` at the end.
    pub fn look_for_lost(&mut self, tier: TierId, from: u32, limit: u32) -> Option<u32> {
        let end = from.saturating_add(limit).min(self.slots.end());
        for block in (from..end).map(BlockId) {
            // One that waits to be written is marked too. A tier that gets a block twice writes it once.
            if self.is_marked(tier, block) && !self.tiers.has(tier, self.tier_key_of(block)) {
                self.slots.remove_tier(block, tier.bit());
            }
        }
        (end < self.slots.end()).then_some(end)
    }

    fn is_marked(&self, tier: TierId, block: BlockId) -> bool {
        let Block { state, tiers, .. } = self.slots[block];
        state == State::Ready && tiers & tier.bit() != 0
    }

    /// The tier does not hold this block any more.
    pub fn tier_evicted(&mut self, tier: TierId, key: &BlockKey) {
        self.tiers.stats_mut(tier).evicted += 1;
        self.tiers.forget_location(self.tiers.key_of(key), tier);
        let block = self
            .cache
            .names()
            .current_index(key.namespace)
            .and_then(|ns| self.cache.find(&self.slots, ns, key.group, &key.hash));
        if let Some(block) = block {
            self.slots.remove_tier(block, tier.bit());
        }
    }

    /// Until [`Core::tiers_purged`], no block of this namespace is read from the tiers or written to them, whether the
    /// core knows the namespace or not.
    pub fn begin_tier_purge(&mut self, namespace: NamespaceId) {
        self.tiers.begin_purge(namespace);
    }

    /// A purged namespace has no block on any tier any more; called after [`Effect::PurgeTiers`] was carried out.
    pub fn tiers_purged(&mut self, namespace: NamespaceId) {
        self.tiers.end_purge(namespace);
    }

    /// Whether a purge of this namespace is under way on the tiers.
    pub fn is_purging_tiers(&self, namespace: NamespaceId) -> bool {
        self.tiers.is_purging(namespace)
    }

    /// Blocks that were skipped after a failure may be loaded again, and what is known of shared stores ages. Called
    /// every second or two.
    pub fn expire_skips(&mut self) {
        self.tiers.expire_skips();
    }

    /// Key of the block that an effect names, as long as its operation has not ended.
    pub fn block_key(&self, block: BlockId) -> BlockKey {
        let Block { namespace, group, hash, .. } = self.slots[block];
        BlockKey { namespace: self.cache.namespace(namespace).id, group, hash }
    }

    /// The block's position in its prompt.
    pub fn position(&self, block: BlockId) -> Position {
        let Block { namespace, hash, .. } = &self.slots[block];
        self.tiers.position(self.cache.namespace(*namespace).id, hash)
    }

    /// Whether the block is still in the index, ready or being compared, in a slot of this generation.
    pub fn is_resident(&self, block: BlockId, generation: Generation) -> bool {
        self.slots.is_indexed(block) && self.slots[block].generation == generation
    }

    /// Of the slot that the block lies in.
    pub fn block_generation(&self, block: BlockId) -> Generation {
        self.slots[block].generation
    }

    /// Bytes of the block that an effect names.
    pub fn block_length_bytes(&self, block: BlockId) -> u64 {
        self.block_group(block).map_or(0, |group| group.block_bytes())
    }

    /// Tokens of the block that an effect names.
    pub fn block_tokens(&self, block: BlockId) -> u32 {
        self.block_group(block).map_or(0, |group| group.tokens_per_block)
    }

    /// The tier that has the block, as far as is known.
    pub fn tier_of(&self, key: &BlockKey) -> Option<TierId> {
        self.tiers.location(self.tiers.key_of(key)).map(|(tier, _)| tier)
    }

    /// Counts and present state of one tier.
    pub fn tier_report(&self, tier: TierId) -> TierReport {
        self.tiers.report(tier)
    }

    /// Bytes on the heap that grow with the number of blocks on tiers.
    pub fn tier_heap_bytes(&self) -> usize {
        self.tiers.heap_bytes()
    }

    pub(crate) fn purge_tiers(&mut self, id: NamespaceId, old: NamespaceIndex) {
        self.begin_tier_purge(id);
        if self.tiers.is_on() {
            self.journal.push(Effect::PurgeTiers { namespace: old });
        }
    }

    fn block_group(&self, block: BlockId) -> Option<&GroupLayout> {
        let Block { namespace, group, .. } = self.slots[block];
        self.cache.namespace(namespace).layout.group(group)
    }

    pub(crate) fn tier_key_of(&self, block: BlockId) -> Fingerprint {
        let record = &self.slots[block];
        let id = self.cache.namespace(record.namespace).id;
        self.tiers.key(id, record.group, record.hash.as_bytes())
    }

    /// Whether the block's namespace is what its id means, and is not being removed.
    pub(crate) fn is_current(&self, block: BlockId) -> bool {
        let namespace = self.slots[block].namespace;
        let id = self.cache.namespace(namespace).id;
        self.cache.names().current_index(id) == Some(namespace) && !self.is_purging_tiers(id)
    }
}
