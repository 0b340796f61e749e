//! After the end of a process: instances that reconnect or are gone, and the blocks of an earlier epoch.
//!
//! If an instance got the offset of a slot in an earlier epoch, the slot is not reused until the instance has
//! reconnected and declared the slots that it still holds, or until its workers are gone. Until then such a block can
//! be hit, but not evicted.

use std::collections::BTreeSet;

use crate::core::Core;
use crate::key::{BlockHash, BlockId, Generation, Instance, NamespaceIndex, SlotId};
use crate::leases::LeaseId;
use crate::slots::{Block, State, TOUCHED_TOGETHER};

/// A slot found in the table of an earlier epoch.
pub struct Recovered {
    /// The slot.
    pub slot: SlotId,
    /// Its generation in the table.
    pub generation: Generation,
    /// Instances that may touch the slot, as in [`Instance::bit`].
    pub holders: u64,
    /// Key of a block that was ready; `None` for a slot that was being filled, or fenced.
    pub key: Option<(NamespaceIndex, u16, BlockHash)>,
}

/// What became of a recovered slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// In the index, to be verified when first asked for.
    Block,
    /// Kept out of use until its holders are gone.
    Fenced,
    /// Free.
    Dropped,
}

/// What an instance that reconnected holds, as far as it has declared it. Its leases are pinned again. It ends by
/// [`Core::resume`] or [`Core::cancel_resume`].
#[must_use]
pub struct Resumption {
    instance: Instance,
    held: Vec<BlockId>,
    lost: Vec<(SlotId, Generation)>,
}

impl Core {
    /// Slots that one `hold` may name: each is a cache miss or two, and a note in the table.
    pub const MAX_HELD_PER_EVENT: usize = 1024;

    /// Workers of these instances (a mask) were attached in an earlier epoch and may be alive.
    pub fn set_earlier(&mut self, instances: u64) {
        self.slots.set_earlier(instances);
    }

    /// The instances of [`Core::set_earlier`] that are neither back nor gone.
    pub fn earlier(&self) -> u64 {
        self.slots.earlier()
    }

    /// An extent of the earlier epoch. False if there cannot be such an extent; then none of its blocks is recovered.
    pub fn restore_extent(&mut self, slot_bytes: u64, first_unit: u32, units: u32) -> bool {
        let is_restored = self.slots.restore_extent(slot_bytes, first_unit, units);
        self.cover_classes();
        is_restored
    }

    /// The content of this unit is unknown, and a process may still write to it: the unit is not used until all of
    /// [`Core::earlier`] are gone.
    pub fn exclude(&mut self, unit: u32) {
        self.slots.exclude(unit);
    }

    /// For a slot that is freed without ever having been restored.
    pub fn fresh_generation(&mut self) -> Generation {
        self.slots.generation()
    }

    /// A slot of a restored extent. Blocks get their recency from the order of the calls, oldest first.
    pub fn restore(&mut self, recovered: Recovered) -> Recovery {
        let Recovered { slot, generation, holders, key } = recovered;
        let holders = holders & self.slots.earlier();
        if key.is_none() && holders == 0 {
            return Recovery::Dropped;
        }
        let (namespace, group, hash) = key.unwrap_or((NamespaceIndex(0), 0, BlockHash::NONE));
        let is_duplicate = key.is_some() && self.cache.find(&self.slots, namespace, group, &hash).is_some();
        if is_duplicate && holders == 0 {
            return Recovery::Dropped;
        }
        let Some(class) = self.slots.space().class_at(slot) else { return Recovery::Dropped };
        let fits = key.is_none() || self.cache.namespace(namespace).class(group) == Some(class);
        let is_block = key.is_some() && !is_duplicate && fits;
        if !is_block && holders == 0 {
            return Recovery::Dropped;
        }
        let found = Block { namespace, group, hash, slot, ..Block::new(class, generation, holders) };
        let Some(block) = self.slots.restore(found, is_block, &mut self.journal) else { return Recovery::Dropped };
        if is_block {
            self.enter(block, self.cache.key_of(&self.slots[block]), None);
            self.journal.stats_mut().recovered += 1;
            Recovery::Block
        } else {
            Recovery::Fenced
        }
    }

    /// All slots were restored; the remaining slots of the extents become free.
    pub fn finish_restore(&mut self) {
        self.slots.finish_restore();
    }

    /// The instance is back, or new. It will declare what it holds, and which of its requests wait.
    pub fn begin_resume(&mut self, instance: Instance) -> Resumption {
        assert!(instance != Instance::DAEMON, "the daemon's own copies end one by one");
        self.drop_hints(instance);
        Resumption { instance, held: Vec::new(), lost: Vec::new() }
    }

    /// It still holds leases on these ready slots.
    pub fn hold(&mut self, resumption: &mut Resumption, leases: &[(SlotId, Generation)]) {
        debug_assert!(leases.len() <= Core::MAX_HELD_PER_EVENT);
        let instance = resumption.instance;
        for batch in leases.chunks(TOUCHED_TOGETHER) {
            let known: Vec<BlockId> = batch.iter().filter_map(|(slot, _)| self.slots.space().block_at(*slot)).collect();
            self.slots.touch_lines(&known);
            for at in batch {
                match self.declared(*at).filter(|block| self.may_read(instance, *block)) {
                    Some(block) => {
                        self.pin(block, Some(instance));
                        resumption.held.push(block);
                    }
                    None => resumption.lost.push(*at),
                }
            }
        }
    }

    /// The instance also holds these reservations, and nothing else: everything else that it held is freed. Returns the
    /// lease that covers the blocks that [`Core::hold`] found, and the slots that the instance named but does not have.
    pub fn resume(
        &mut self,
        resumption: Resumption,
        reservations: &[(SlotId, Generation)],
    ) -> (LeaseId, Vec<(SlotId, Generation)>) {
        let Resumption { instance, held, mut lost } = resumption;
        let mut kept = Vec::new();
        for at in BTreeSet::from_iter(reservations) {
            match self.declared(*at).filter(|block| self.may_fill(instance, *block)) {
                Some(block) => kept.push(block),
                None => lost.push(*at),
            }
        }
        let others = self.slots.declare(instance, &kept);
        self.drop_leases(instance);
        self.drop_reservations(others);
        self.resolve(instance);
        let lease = if held.is_empty() { LeaseId(0) } else { self.leases.add(instance, held) };
        (lease, lost)
    }

    /// The instance disconnected before it had declared everything.
    pub fn cancel_resume(&mut self, resumption: Resumption) {
        self.leases.give_up(resumption.held);
        self.unpin_ended();
    }

    /// The session of the instance has ended, and its requests wait no longer. Its workers may still copy, so it keeps
    /// what it holds until it resumes or is gone.
    pub fn session_ended(&mut self, instance: Instance) {
        self.drop_hints(instance);
    }

    /// No process of the instance is left: everything that it held becomes free.
    pub fn instance_gone(&mut self, instance: Instance) {
        assert!(instance != Instance::DAEMON, "the daemon's own copies end one by one");
        self.drop_leases(instance);
        self.drop_hints(instance);
        let reserved = self.slots.reservations(instance);
        self.drop_reservations(reserved);
        self.resolve(instance);
        self.slots.readmit(instance, &mut self.journal);
    }

    /// No transfer of an earlier daemon is under way: the slots that its tiers were filling become free.
    pub fn transfers_over(&mut self) {
        self.resolve(Instance::DAEMON);
        self.slots.readmit(Instance::DAEMON, &mut self.journal);
    }

    /// Leases, leased blocks and reserved blocks of an instance.
    pub fn holdings(&self, instance: Instance) -> (u64, u64, u64) {
        (self.leases.count(instance), self.leases.blocks(instance), self.slots.reservation_count(instance))
    }

    fn declared(&self, (slot, generation): (SlotId, Generation)) -> Option<BlockId> {
        let block = self.slots.space().block_at(slot)?;
        (self.slots[block].generation == generation).then_some(block)
    }

    /// A hit of its own. A block that was purged or found corrupt since is no hit any more, but it is still being read.
    fn may_read(&self, instance: Instance, block: BlockId) -> bool {
        let record = &self.slots[block];
        self.slots.is_indexed(block) || record.state == State::Fenced && record.holders & instance.bit() != 0
    }

    /// A slot it was filling: in this epoch, or in an earlier one, where it is fenced since.
    fn may_fill(&self, instance: Instance, block: BlockId) -> bool {
        let record = &self.slots[block];
        match record.state {
            State::Reserved => record.owner == instance.0,
            State::Fenced => record.holders == instance.bit() && record.pins == 0,
            _ => false,
        }
    }

    fn drop_leases(&mut self, instance: Instance) {
        self.leases.end_all(instance);
        self.unpin_ended();
    }

    fn drop_reservations(&mut self, reserved: Vec<BlockId>) {
        reserved.into_iter().for_each(|block| self.release_slot(block));
    }

    /// Nothing of an earlier epoch is held by `instance` any more.
    fn resolve(&mut self, instance: Instance) {
        let free = self.slots.resolve(instance);
        free.into_iter().for_each(|block| self.release_slot(block));
    }
}
