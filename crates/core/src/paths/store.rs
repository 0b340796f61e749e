//! Store: reserve, commit, abort.
//!
//! Reserved slots are anonymous: they get their key at commit. So an engine can keep a stock of slots and use them
//! without a round trip in its scheduler. If two engines store the same block, the second commit finds the first block,
//! and its slot is free again.
//!
//! No slot is taken back from an engine that does not fill it: copies into it may be under way for as long as a process
//! of the engine lives. So the share of the pool for reservations is divided such that whoever comes later finds room:
//! see [`Core::part_left`].
//!
//! A slot that the daemon fills for a client is the daemon's own reservation ([`Instance::DAEMON`]). It ends by commit
//! or abort when the copy has ended, and in no other way.

use crate::cache::Fate;
use crate::core::Core;
use crate::key::{BlockHash, BlockId, ClassId, Fingerprint, Generation, Instance, NamespaceIndex, SlotId};
use crate::layout::Attention;
use crate::slots::{Block, State};

/// What became of one committed slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommitOutcome {
    /// The block is ready.
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

    /// Takes up to `count` empty slots of `group`'s size for `instance`. Gives fewer, or none, when the pool is full of
    /// held blocks, the instance has its part of the share of reservations, or room is still being made. An instance
    /// that has none of this size gets one, whatever is reserved, if the pool has one to give. A trial evicts nothing:
    /// it gets slots that are free. `holds_mapping` is false for callers whose writes end with the daemon's process, as
    /// its own do.
    pub fn reserve(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        count: usize,
        holds_mapping: bool,
        slots: &mut Vec<(SlotId, Generation)>,
    ) {
        let Some(class) = self.cache.namespace(namespace).class(group) else { return };
        self.settle(Core::TOUCHES_PER_STEP);
        self.step_drain();
        let mut budget = Core::MAX_EVICTIONS_PER_EVENT;
        let wanted = count.min(Core::MAX_RESERVE_PER_EVENT) as u64;
        let most = self.reservations_left(instance, class, wanted);
        let is_trial = self.is_trial(namespace);
        let mut frees = |core: &mut Core, want| !is_trial && core.free_slots(class, want, &mut budget);
        let mut granted = 0;
        while granted < most && (self.has_free_slot(class) || frees(self, (most - granted) as usize)) {
            slots.push(self.grant(instance, class, holds_mapping));
            granted += 1;
        }
        if !is_trial {
            let stats = self.journal.stats_mut();
            stats.reserved += granted;
            stats.short_reservations += u64::from(granted < wanted);
        }
    }

    /// Brings the data that commits of these keys will read into the processor's cache, all at once. Changes nothing.
    pub fn prepare_commits(&self, namespace: NamespaceIndex, group: u16, hashes: &[BlockHash]) {
        let Some(class) = self.cache.namespace(namespace).class(group) else { return };
        self.cache.prepare_commits(class, namespace, group, hashes);
    }

    /// Names a filled slot. `predecessor` is the block before it in its prompt, `None` at the start. `checksum` is that
    /// of all bytes; `None` if not all of them are there, which is the caller's to know.
    pub fn commit(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        hash: BlockHash,
        predecessor: Option<BlockHash>,
        at: (SlotId, Generation),
        checksum: Option<u64>,
    ) -> CommitOutcome {
        let Some(block) = self.reserved_by(instance, at) else {
            return self.outcome_of_unknown(namespace, group, &hash, at);
        };
        let class = self.slots[block].class;
        let fits = self.cache.namespace(namespace).class(group) == Some(class);
        let Some(checksum) = checksum.filter(|_| fits) else {
            self.journal.stats_mut().incomplete += 1;
            self.release_slot(block);
            return CommitOutcome::Incomplete;
        };
        let key = self.cache.fingerprint(namespace, group, hash.as_bytes());
        let is_match = |id: BlockId| self.slots[id].has_key(namespace, group, hash.as_bytes());
        if let Some(stored) = self.cache.find_under(key, is_match) {
            self.journal.stats_mut().duplicates += 1;
            self.release_slot(block);
            self.consider_duplicate(stored, predecessor);
            return CommitOutcome::Duplicate;
        }
        let parent = predecessor.and_then(|hash| self.cache.find(&self.slots, namespace, group, &hash));
        let is_orphan =
            predecessor.is_some_and(|hash| parent.is_none() && !self.has_tier_copy(namespace, group, &hash));
        if is_orphan && self.needs_parent(namespace, group) {
            self.journal.stats_mut().orphans += 1;
            self.cache.refuse(&mut self.slots, class, namespace, group, &hash);
            self.release_slot(block);
            self.rebalance(class);
            return CommitOutcome::Orphan;
        }
        let is_returning = self.is_returning(namespace, group, &hash);
        let is_detached = predecessor.is_some() && parent.is_none() && self.needs_parent(namespace, group);
        self.slots.commit(block, namespace, group, hash, checksum, &mut self.journal);
        match is_detached {
            true => self.enter_detached(block, key),
            false => self.enter(block, key, parent),
        }
        self.cache.note(namespace, group, &hash, Fate::Stored);
        if !self.is_trial(namespace) {
            self.journal.stats_mut().stored += 1;
            self.journal.stats_mut().stored_bytes += self.slots.slot_bytes(block);
        }
        if self.uses_tiers(namespace) {
            self.consider_new(block, predecessor, parent, is_returning);
        }
        CommitOutcome::Stored
    }

    /// Gives a reserved slot back whose block is not stored. Unknown ones are ignored.
    pub fn abort(&mut self, instance: Instance, at: (SlotId, Generation)) {
        if let Some(block) = self.reserved_by(instance, at) {
            self.journal.stats_mut().aborted += 1;
            self.release_slot(block);
        }
    }

    /// Gives a reserved slot back that was for no block yet. Unknown ones are ignored.
    pub fn return_unused(&mut self, instance: Instance, at: (SlotId, Generation)) {
        if let Some(block) = self.reserved_by(instance, at) {
            self.release_slot(block);
        }
    }

    /// Index, counts and policy of a block whose record is complete.
    pub(crate) fn enter(&mut self, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        self.cache.name(&self.slots, key, block);
        self.cache.admit(&mut self.slots, block, parent, &self.hints);
    }

    /// As `enter`, for a block whose parent is on a tier and not in the pool. Out of line, since most have theirs.
    #[cold]
    fn enter_detached(&mut self, block: BlockId, key: Fingerprint) {
        self.cache.name(&self.slots, key, block);
        self.cache.admit_detached(&mut self.slots, block, &self.hints);
    }

    /// How many more slots of `class` the instance may reserve, at most `wanted`.
    fn reservations_left(&self, instance: Instance, class: ClassId, wanted: u64) -> u64 {
        let share = self.slots.share(self.config.reserve_permille);
        let slot_bytes = self.slots.space().class_info(class).slot_bytes;
        let of_share = share.saturating_sub(self.slots.reserved_bytes()) / slot_bytes;
        if of_share >= wanted {
            return wanted;
        }
        let of_part = self.part_left(instance, share) / slot_bytes;
        // One of each size is always granted, or a small pool could never store a large block, nor a late engine any.
        let least = u64::from(self.slots.reserved_of(class, instance) == 0);
        of_share.max(of_part).max(least).min(wanted)
    }

    /// Bytes that the instance may reserve when the others leave it none of the share: up to an equal part of the
    /// share, out of half as much beyond the share. Of this half each instance leaves as much as it has to those that
    /// come after it, so there is always some. It is half, because leases pin up to a half of the pool, and an eighth
    /// is left: for the one slot that everybody gets, and for stores to tiers.
    #[cold]
    fn part_left(&self, instance: Instance, share: u64) -> u64 {
        let own = self.slots.bytes_reserved_by(instance);
        let part = share / (1 + self.slots.others_that_reserve(instance));
        let beyond = (share + share / 2).saturating_sub(self.slots.reserved_bytes());
        part.saturating_sub(own).min(beyond.saturating_sub(own) / 2)
    }

    /// Takes a slot of `class`, which has a free one.
    fn grant(&mut self, instance: Instance, class: ClassId, holds_mapping: bool) -> (SlotId, Generation) {
        let holders = if holds_mapping { instance.bit() } else { 0 };
        self.slots.reserve(instance, class, holders, &mut self.journal)
    }

    fn reserved_by(&self, instance: Instance, (slot, generation): (SlotId, Generation)) -> Option<BlockId> {
        let is_ours = |block: &BlockId| {
            let Block { state, owner, generation: own, .. } = self.slots[*block];
            state == State::Reserved && owner == instance.0 && own == generation
        };
        let block = self.slots.space().block_at(slot).filter(is_ours);
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
        let block = self.cache.find(&self.slots, ns, group, hash).map(|block| &self.slots[block]);
        if block.is_some_and(|block| (block.slot, block.generation) == at) {
            return CommitOutcome::Stored;
        }
        self.journal.stats_mut().lost += 1;
        CommitOutcome::Lost
    }

    fn needs_parent(&self, namespace: NamespaceIndex, group: u16) -> bool {
        self.cache.namespace(namespace).layout.group(group).is_some_and(|group| group.attention == Attention::Full)
    }
}
