//! The store path: reserve, commit, abort.
//!
//! Reserved slots are anonymous: they get their key when they are committed. So an engine can take a stock of
//! them ahead of time and name them without a round trip on its scheduling path; if two engines store the same
//! block, the second commit finds the first and its slot is free again.

use crate::block::{Block, BlockId, ClassId, NamespaceIndex, State};
use crate::core::{Core, Effect};
use crate::key::{BlockHash, Generation, Instance, SlotId};
use crate::layout::Attention;
use crate::miss::Fate;

/// What became of one committed slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommitOutcome {
    Stored,
    /// The same block was there already; the slot is free again.
    Duplicate,
    /// Its predecessor is not here, so no prefix could ever reach it; the slot is free again.
    Orphan,
    /// Not all ranks left a birth record; the slot is free again.
    Incomplete,
    /// The slot is not this instance's.
    Lost,
}

impl Core {
    /// Slots that one `reserve` may ask for: each may evict, which is three cache misses and an index removal.
    pub const MAX_RESERVE_PER_EVENT: usize = 256;

    /// Takes up to `count` empty slots of `group`'s size for `instance`. Gives fewer, or none, when the pool is
    /// full of held blocks or the instance's share is used up. `holds_mapping` is false for callers that never
    /// learn the offset.
    pub fn reserve(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        count: usize,
        holds_mapping: bool,
        slots: &mut Vec<(SlotId, Generation)>,
    ) {
        self.settle(usize::MAX);
        let Some(class) = self.names.get(namespace).class(group) else { return };
        let slot_bytes = self.space.class_info(class).slot_bytes;
        let limit = self.space.capacity_bytes() / 1000 * u64::from(self.config.reserve_permille);
        for _ in 0..count.min(Core::MAX_RESERVE_PER_EVENT) {
            // One slot is always granted if there is one, or a small pool could never store a large block.
            let is_over = self.reserved_bytes > 0 && self.reserved_bytes + slot_bytes > limit;
            let taken = if is_over { None } else { self.reserve_one(instance, namespace, group, class, holds_mapping) };
            let Some(taken) = taken else {
                self.stats.reserve_refused += 1;
                return;
            };
            slots.push(taken);
        }
    }

    /// Names a filled slot. `predecessor` is the block before it in its prompt, `None` at the start. Whether all
    /// bytes are there is the caller's to know (`is_whole`).
    pub fn commit(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        hash: BlockHash,
        predecessor: Option<BlockHash>,
        at: (SlotId, Generation),
        is_whole: bool,
    ) -> CommitOutcome {
        let Some(block) = self.reserved_by(instance, at) else {
            return self.outcome_of_unknown(namespace, group, &hash, at);
        };
        let class = self.blocks[block].class;
        let fits = self.names.get(namespace).class(group) == Some(class);
        if !is_whole || !fits {
            self.stats.incomplete += 1;
            self.unreserve(block);
            return CommitOutcome::Incomplete;
        }
        if self.find(namespace, group, &hash).is_some() {
            self.stats.duplicates += 1;
            self.unreserve(block);
            return CommitOutcome::Duplicate;
        }
        let parent = predecessor.and_then(|hash| self.find(namespace, group, &hash));
        if predecessor.is_some() && parent.is_none() && self.needs_parent(namespace, group) {
            self.stats.orphans += 1;
            self.memory.note(namespace, group, &hash, Fate::Refused);
            let key = self.fingerprint(namespace, group, &hash);
            self.policies[class.0 as usize].refuse(&mut self.nodes, key);
            self.unreserve(block);
            return CommitOutcome::Orphan;
        }
        self.make_ready(block, namespace, group, hash, parent);
        CommitOutcome::Stored
    }

    /// Gives a reserved slot back. Unknown ones are ignored.
    pub fn abort(&mut self, instance: Instance, at: (SlotId, Generation)) {
        if let Some(block) = self.reserved_by(instance, at) {
            self.stats.aborted += 1;
            self.unreserve(block);
        }
    }

    /// Frees a reserved slot; its filler said that nobody writes there any more.
    pub(crate) fn unreserve(&mut self, block: BlockId) {
        self.reserved_bytes -= self.slot_bytes(block);
        self.reserved.remove(&block);
        self.blocks[block].holders = 0;
        self.release_slot(block);
    }

    /// Puts a filled slot into the index, right behind its parent.
    pub(crate) fn make_ready(
        &mut self,
        block: BlockId,
        ns: NamespaceIndex,
        group: u16,
        hash: BlockHash,
        parent: Option<BlockId>,
    ) {
        let slot_bytes = self.slot_bytes(block);
        let earlier = self.earlier;
        let record = &mut self.blocks[block];
        record.state = State::Ready;
        record.namespace = ns;
        record.group = group;
        record.hash = hash;
        record.holders &= earlier;
        let (class, slot, holders) = (record.class, record.slot, record.holders);
        self.reserved_bytes -= slot_bytes;
        self.reserved.remove(&block);
        self.effects.push(Effect::Held { slot, holders });
        self.enter(block, class, parent);
        self.memory.note(ns, group, &hash, Fate::Stored);
        self.stats.stored += 1;
        self.stats.stored_bytes += slot_bytes;
    }

    /// Index, counts and policy of a block whose record is complete.
    pub(crate) fn enter(&mut self, block: BlockId, class: ClassId, parent: Option<BlockId>) {
        let record = &self.blocks[block];
        let (namespace, group) = (record.namespace, record.group);
        let key = self.fingerprint(namespace, group, &record.hash);
        self.index.insert(key, block);
        self.names.get_mut(namespace).enter(group);
        let parent = parent.filter(|parent| self.blocks[*parent].class == class);
        self.policies[class.0 as usize].insert(&mut self.nodes, block, key, parent);
    }

    fn reserve_one(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        class: ClassId,
        holds_mapping: bool,
    ) -> Option<(SlotId, Generation)> {
        let generation = self.generation();
        let holders = if holds_mapping { instance.bit() } else { 0 };
        let hash = BlockHash::new(&[0]).expect("one byte is a hash");
        let state = State::Reserved;
        let block = self.blocks.add(Block {
            holders,
            hash,
            state,
            class,
            group,
            owner: instance.0,
            namespace,
            slot: SlotId(0),
            generation,
            pins: 0,
        });
        self.nodes.cover(block);
        let Some(slot) = self.take_slot(class, block) else {
            self.blocks.remove(block);
            return None;
        };
        self.blocks[block].slot = slot;
        self.reserved_bytes += self.slot_bytes(block);
        self.reserved.insert(block);
        self.stats.reserved += 1;
        self.effects.push(Effect::Reserved { slot, generation, holders });
        Some((slot, generation))
    }

    fn reserved_by(&self, instance: Instance, (slot, generation): (SlotId, Generation)) -> Option<BlockId> {
        let block = self.space.block_at(slot)?;
        let record = &self.blocks[block];
        let is_ours = record.state == State::Reserved && record.owner == instance.0 && record.generation == generation;
        is_ours.then_some(block)
    }

    /// A commit that was sent again finds its block ready in the very slot.
    fn outcome_of_unknown(
        &mut self,
        ns: NamespaceIndex,
        group: u16,
        hash: &BlockHash,
        at: (SlotId, Generation),
    ) -> CommitOutcome {
        let block = self.find(ns, group, hash).map(|block| &self.blocks[block]);
        if block.is_some_and(|block| (block.slot, block.generation) == at) {
            return CommitOutcome::Stored;
        }
        self.stats.lost += 1;
        CommitOutcome::Lost
    }

    fn needs_parent(&self, namespace: NamespaceIndex, group: u16) -> bool {
        self.names.get(namespace).layout.group(group).is_some_and(|group| group.attention == Attention::Full)
    }
}
