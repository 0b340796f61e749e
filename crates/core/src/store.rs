//! The store path: reserve, commit, abort.
//!
//! Reserved slots are anonymous: they get their key when they are committed. So an engine can take a stock of
//! them ahead of time and name them without a round trip on its scheduling path; if two engines store the same
//! block, the second commit finds the first and its slot is free again.
//!
//! A slot that the daemon fills for somebody is the daemon's own reservation ([`Instance::DAEMON`]): it ends when the
//! copy has ended, by commit or abort, and by nothing else.

use crate::block::{Block, BlockId, ClassId, NamespaceIndex, State};
use crate::core::{Core, Effect, policy_key};
use crate::index::Fingerprint;
use crate::key::{BlockHash, Generation, Instance, SlotId};
use crate::layout::Attention;
use crate::miss::Fate;

/// What became of one committed slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommitOutcome {
    Stored,
    /// The same block was there already; the slot is free again.
    Duplicate,
    /// Its predecessor is neither here nor on a tier, so no prefix could ever reach it; the slot is free again.
    Orphan,
    /// Not all ranks left a birth record; the slot is free again.
    Incomplete,
    /// The slot is not this instance's.
    Lost,
}

impl Core {
    /// Slots that one `reserve` may ask for: each may evict, which is three cache misses and an index removal.
    pub const MAX_RESERVE_PER_EVENT: usize = 64;
    /// More than are asked for only if the coldest blocks are held, or in draining extents.
    const MAX_EVICTIONS_PER_EVENT: usize = 512;

    /// Takes up to `count` empty slots of `group`'s size for `instance`. Gives fewer, or none, when the pool is
    /// full of held blocks, the share of reservations is used up, or room is still being made.
    /// `holds_mapping` is false for callers whose writes end with the daemon's process, as its own do.
    pub fn reserve(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        count: usize,
        holds_mapping: bool,
        slots: &mut Vec<(SlotId, Generation)>,
    ) {
        let Some(class) = self.names.get(namespace).class(group) else { return };
        self.settle(Core::TOUCHES_PER_STEP);
        self.step_drain();
        let mut budget = Core::MAX_EVICTIONS_PER_EVENT;
        let wanted = count.min(Core::MAX_RESERVE_PER_EVENT) as u64;
        let mut left = self.reservations_left(class).min(wanted);
        let is_short = left < wanted;
        while left > 0 && (self.has_room(class) || self.make_room(class, left as usize, &mut budget)) {
            slots.push(self.grant(instance, class, holds_mapping));
            left -= 1;
        }
        self.stats.reserve_refused += u64::from(is_short || left > 0);
    }

    /// Brings what commits of these keys will look at into the processor's cache, all at once. Changes nothing.
    pub fn prepare_commits(&self, namespace: NamespaceIndex, group: u16, hashes: &[BlockHash]) {
        let Some(class) = self.names.get(namespace).class(group) else { return };
        let key = |hash: &BlockHash| self.fingerprint(namespace, group, hash.as_bytes());
        let keys: Vec<Fingerprint> = hashes.iter().map(key).collect();
        self.index.warm(&keys);
        let key = |hash: &BlockHash| policy_key(namespace, group, hash.as_bytes());
        let keys: Vec<Fingerprint> = hashes.iter().map(key).collect();
        self.policies[class.0 as usize].warm(&keys);
        self.memory.warm(hashes.iter().map(|hash| (group, hash.as_bytes())));
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
        let is_orphan = predecessor.is_some_and(|hash| parent.is_none() && !self.is_below(namespace, group, &hash));
        if is_orphan && self.needs_parent(namespace, group) {
            self.stats.orphans += 1;
            self.memory.note(namespace, group, &hash, Fate::Refused);
            let key = policy_key(namespace, group, hash.as_bytes());
            self.policies[class.0 as usize].refuse(&mut self.nodes, key);
            self.unreserve(block);
            return CommitOutcome::Orphan;
        }
        let is_returning = self.is_returning(namespace, group, &hash);
        self.make_ready(block, namespace, group, hash, parent);
        if self.below.is_on() {
            self.sight_stored(block, predecessor, is_returning);
        }
        CommitOutcome::Stored
    }

    /// Gives a reserved slot back. Unknown ones are ignored.
    pub fn abort(&mut self, instance: Instance, at: (SlotId, Generation)) {
        if let Some(block) = self.reserved_by(instance, at) {
            self.stats.aborted += 1;
            self.unreserve(block);
        }
    }

    /// The slot is the instance's to fill.
    pub(crate) fn hand_out(&mut self, instance: Instance, block: BlockId) {
        let record = &mut self.blocks[block];
        record.state = State::Reserved;
        record.owner = instance.0;
        self.tallies[record.class.0 as usize].reserved += 1;
        self.reserved_bytes += self.space.class_info(record.class).slot_bytes;
        self.reserved[instance.0 as usize].push_head(&mut self.nodes, block);
    }

    /// Frees a slot that is on no list of reservations any more: nobody writes there.
    pub(crate) fn vacate(&mut self, block: BlockId) {
        self.count_filled(block);
        self.blocks[block].holders = 0;
        self.release_slot(block);
    }

    /// Frees a reserved slot; its filler said that nobody writes there any more.
    fn unreserve(&mut self, block: BlockId) {
        self.take_off(block);
        self.vacate(block);
    }

    fn take_off(&mut self, block: BlockId) {
        self.reserved[self.blocks[block].owner as usize].unlink(&mut self.nodes, block);
    }

    fn count_filled(&mut self, block: BlockId) {
        self.tallies[self.blocks[block].class.0 as usize].reserved -= 1;
        self.reserved_bytes -= self.slot_bytes(block);
    }

    /// Puts a filled slot into the index, right behind its parent.
    fn make_ready(&mut self, block: BlockId, ns: NamespaceIndex, group: u16, hash: BlockHash, parent: Option<BlockId>) {
        self.take_off(block);
        self.count_filled(block);
        let earlier = self.earlier;
        let record = &mut self.blocks[block];
        record.state = State::Ready;
        record.namespace = ns;
        record.group = group;
        record.hash = hash;
        record.holders &= earlier;
        let (class, slot, holders) = (record.class, record.slot, record.holders);
        self.effects.push(Effect::Held { slot, holders });
        self.enter(block, class, parent);
        self.memory.note(ns, group, &hash, Fate::Stored);
        self.stats.stored += 1;
        self.stats.stored_bytes += self.slot_bytes(block);
    }

    /// Index, counts and policy of a block whose record is complete.
    pub(crate) fn enter(&mut self, block: BlockId, class: ClassId, parent: Option<BlockId>) {
        self.name(block);
        self.admit(block, class, parent);
    }

    /// From now on lookups find the block by its key.
    pub(crate) fn name(&mut self, block: BlockId) {
        let Block { namespace, group, .. } = self.blocks[block];
        self.index.insert(self.key_of(block), block);
        self.names.get_mut(namespace).enter(group);
    }

    /// From now on the policy of its class decides how long the block stays.
    pub(crate) fn admit(&mut self, block: BlockId, class: ClassId, parent: Option<BlockId>) {
        let parent = parent.filter(|parent| self.blocks[*parent].class == class && self.is_indexed(*parent));
        let is_wanted = self.expectations.is_wanted(self.key_of(block));
        let policy = &mut self.policies[class.0 as usize];
        let Block { namespace, group, hash, .. } = &self.blocks[block];
        let key = policy_key(*namespace, *group, hash.as_bytes());
        match is_wanted {
            true => policy.insert_wanted(&mut self.nodes, block, key, parent),
            false => policy.insert(&mut self.nodes, block, key, parent),
        }
    }

    /// How many more slots of `class` may be reserved.
    fn reservations_left(&self, class: ClassId) -> u64 {
        let left = self.share(self.config.reserve_permille).saturating_sub(self.reserved_bytes);
        // One is always granted, or a small pool could never store a large block.
        let least = u64::from(self.reserved_bytes == 0);
        (left / self.space.class_info(class).slot_bytes).max(least)
    }

    /// Takes a slot of `class`, which has a free one.
    fn grant(&mut self, instance: Instance, class: ClassId, holds_mapping: bool) -> (SlotId, Generation) {
        let generation = self.generation();
        let holders = if holds_mapping { instance.bit() } else { 0 };
        let (block, slot) = self.take_slot(Block {
            holders,
            hash: BlockHash::NONE,
            state: State::Reserved,
            class,
            group: 0,
            owner: instance.0,
            below: 0,
            namespace: NamespaceIndex(0),
            slot: SlotId(0),
            generation,
            pins: 0,
        });
        self.hand_out(instance, block);
        self.stats.reserved += 1;
        self.effects.push(Effect::Reserved { slot, generation, holders });
        (slot, generation)
    }

    /// A record and a slot of its class, which has a free one.
    pub(crate) fn take_slot(&mut self, record: Block) -> (BlockId, SlotId) {
        let class = record.class;
        let block = self.blocks.add(record);
        self.nodes.cover(block);
        let slot = self.space.take(class, block).expect("the class has a free slot");
        self.blocks[block].slot = slot;
        (block, slot)
    }

    fn reserved_by(&self, instance: Instance, (slot, generation): (SlotId, Generation)) -> Option<BlockId> {
        let is_ours = |block: &BlockId| {
            let Block { state, owner, generation: own, .. } = self.blocks[*block];
            state == State::Reserved && owner == instance.0 && own == generation
        };
        let block = self.space.block_at(slot).filter(is_ours);
        assert!(block.is_some() || instance != Instance::DAEMON, "{slot:?} was freed under the daemon's own copy");
        block
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
