//! What outlives a process: instances that come back or are gone, and the blocks of an earlier epoch.
//!
//! A slot that was handed to an instance in an earlier epoch is not reused until that instance has come back
//! and said what it still holds, or its workers are gone. Until then such blocks can be hit, but not evicted.

use std::collections::BTreeSet;

use crate::block::{Block, BlockId, NamespaceIndex, State};
use crate::core::{Core, Effect, WARM};
use crate::key::{BlockHash, Generation, Instance, SlotId};
use crate::load::{Lease, LeaseId};
use crate::policy::List;

/// A slot found in the table of an earlier epoch.
pub struct Recovered {
    pub slot: SlotId,
    pub generation: Generation,
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

/// What an instance that came back holds, as far as it has said so. Its leases are pinned anew: it ends by
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
        self.earlier = instances;
    }

    /// The instances of [`Core::set_earlier`] that are neither back nor gone.
    pub fn earlier(&self) -> u64 {
        self.earlier
    }

    /// An extent of the earlier epoch. False if it cannot be there; then nothing of it is recovered.
    pub fn restore_extent(&mut self, slot_bytes: u64, first_unit: u32, units: u32) -> bool {
        let is_restored = self.space.restore(slot_bytes, first_unit, units).is_some();
        self.cover_classes();
        is_restored
    }

    /// What lies in this unit is unknown and may still be touched: it is not used until all of [`Core::earlier`] are gone.
    pub fn exclude(&mut self, unit: u32) {
        self.excluding = self.earlier;
        self.space.exclude(unit);
    }

    /// For a slot that is freed without ever having been restored.
    pub fn fresh_generation(&mut self) -> Generation {
        self.generation()
    }

    /// A slot of a restored extent. As far as recency goes, blocks come back in the order of the calls, oldest
    /// first.
    pub fn restore(&mut self, recovered: Recovered) -> Recovery {
        let Recovered { slot, generation, holders, key } = recovered;
        let holders = holders & self.earlier;
        if key.is_none() && holders == 0 {
            return Recovery::Dropped;
        }
        let (namespace, group, hash) = key.unwrap_or((NamespaceIndex(0), 0, BlockHash::NONE));
        let is_duplicate = key.is_some() && self.find(namespace, group, &hash).is_some();
        if is_duplicate && holders == 0 {
            return Recovery::Dropped;
        }
        let Some(class) = self.space.class_at(slot) else { return Recovery::Dropped };
        let fits = key.is_none() || self.names.get(namespace).class(group) == Some(class);
        let is_block = key.is_some() && !is_duplicate && fits;
        let state = if is_block { State::Unverified } else { State::Fenced };
        if !is_block && holders == 0 {
            return Recovery::Dropped;
        }
        let block = self.blocks.add(Block {
            holders,
            hash,
            state,
            class,
            group,
            owner: 0,
            below: 0,
            namespace,
            slot,
            generation,
            pins: 0,
        });
        self.nodes.cover(block);
        if self.space.restore_slot(slot, block).is_none() {
            self.blocks.remove(block);
            return Recovery::Dropped;
        }
        if is_block {
            self.enter(block, class, None);
            self.stats.recovered += 1;
            Recovery::Block
        } else {
            self.fence(block);
            Recovery::Fenced
        }
    }

    /// All slots were restored; what is left of the extents is free.
    pub fn finish_restore(&mut self) {
        self.space.finish_restore();
    }

    /// The instance is back, or new, and will say what it holds, and which of its requests wait.
    pub fn begin_resume(&mut self, instance: Instance) -> Resumption {
        assert!(instance != Instance::DAEMON, "the daemon's own copies end one by one");
        self.drop_expectations(instance);
        Resumption { instance, held: Vec::new(), lost: Vec::new() }
    }

    /// It still holds leases on these ready slots.
    pub fn hold(&mut self, resumption: &mut Resumption, leases: &[(SlotId, Generation)]) {
        debug_assert!(leases.len() <= Core::MAX_HELD_PER_EVENT);
        let instance = resumption.instance;
        for batch in leases.chunks(WARM) {
            let known: Vec<BlockId> = batch.iter().filter_map(|(slot, _)| self.space.block_at(*slot)).collect();
            self.blocks.warm(&known);
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

    /// It also holds these reservations, and nothing else: all it held besides is free. Returns the lease that
    /// covers what [`Core::hold`] found, and the slots it named but does not have.
    pub fn resume(
        &mut self,
        resumption: Resumption,
        reservations: &[(SlotId, Generation)],
    ) -> (LeaseId, Vec<(SlotId, Generation)>) {
        let Resumption { instance, held, mut lost } = resumption;
        let mut others = std::mem::take(&mut self.reserved[instance.0 as usize]);
        for at in BTreeSet::from_iter(reservations) {
            match self.declared(*at).filter(|block| self.may_fill(instance, *block)) {
                Some(block) => self.keep(instance, block, &mut others),
                None => lost.push(*at),
            }
        }
        self.drop_leases(instance);
        self.drop_reservations(others);
        self.resolve(instance);
        let lease = if held.is_empty() { LeaseId(0) } else { self.add_lease(Lease { instance, blocks: held }) };
        (lease, lost)
    }

    /// It went away before it had said all.
    pub fn cancel_resume(&mut self, resumption: Resumption) {
        self.ended.extend(resumption.held);
        self.unpin_ended();
    }

    /// No process of the instance is left: all it held is free.
    pub fn instance_gone(&mut self, instance: Instance) {
        assert!(instance != Instance::DAEMON, "the daemon's own copies end one by one");
        self.drop_leases(instance);
        self.count_unfinished(instance);
        self.drop_expectations(instance);
        let reserved = std::mem::take(&mut self.reserved[instance.0 as usize]);
        self.drop_reservations(reserved);
        self.resolve(instance);
        self.readmit(instance);
    }

    /// No transfer of an earlier daemon is under way: what tiers were filling then is free.
    pub fn transfers_over(&mut self) {
        self.resolve(Instance::DAEMON);
        self.readmit(Instance::DAEMON);
    }

    /// Leases, leased blocks and reserved blocks of an instance.
    pub fn holdings(&self, instance: Instance) -> (u64, u64, u64) {
        let leases = self.leases.values().filter(|lease| lease.instance == instance);
        let (count, blocks) = leases.fold((0, 0), |(n, blocks), lease| (n + 1, blocks + lease.blocks.len() as u64));
        (count, blocks, self.reserved[instance.0 as usize].len.into())
    }

    fn declared(&self, (slot, generation): (SlotId, Generation)) -> Option<BlockId> {
        let block = self.space.block_at(slot)?;
        (self.blocks[block].generation == generation).then_some(block)
    }

    /// A hit of its own. What was purged or found corrupt since is a hit no more, but it is still being read.
    fn may_read(&self, instance: Instance, block: BlockId) -> bool {
        let record = &self.blocks[block];
        self.is_indexed(block) || record.state == State::Fenced && record.holders & instance.bit() != 0
    }

    /// A slot it was filling: in this epoch, or in an earlier one, where it is fenced since.
    fn may_fill(&self, instance: Instance, block: BlockId) -> bool {
        let record = &self.blocks[block];
        match record.state {
            State::Reserved => record.owner == instance.0,
            State::Fenced => record.holders == instance.bit() && record.pins == 0,
            _ => false,
        }
    }

    /// The slot is, or is again, a reservation of `instance`, whose other ones are in `others`.
    fn keep(&mut self, instance: Instance, block: BlockId, others: &mut List) {
        if self.blocks[block].state == State::Reserved {
            others.unlink(&mut self.nodes, block);
            self.reserved[instance.0 as usize].push_head(&mut self.nodes, block);
        } else {
            self.unfence(block);
            self.hand_out(instance, block);
        }
    }

    fn drop_leases(&mut self, instance: Instance) {
        let its = self.leases.extract_if(.., |_, lease| lease.instance == instance);
        self.ended.extend(its.flat_map(|(_, lease)| lease.blocks));
        self.lease_counts[instance.0 as usize] = 0;
        self.unpin_ended();
    }

    fn drop_reservations(&mut self, mut reserved: List) {
        while reserved.tail != BlockId::NONE {
            let block = reserved.tail;
            reserved.unlink(&mut self.nodes, block);
            self.vacate(block);
        }
    }

    /// `instance` touches no excluded unit any more; once nobody does, they are used again.
    fn readmit(&mut self, instance: Instance) {
        if self.excluding & instance.bit() != 0 {
            self.excluding &= !instance.bit();
            let units = if self.excluding == 0 { self.space.readmit() } else { Vec::new() };
            let cleared = |unit| Effect::ExtentCleared { first_unit: unit, units: 1 };
            self.effects.extend(units.into_iter().map(cleared));
        }
    }

    /// Nothing of an earlier epoch is held by `instance` any more.
    fn resolve(&mut self, instance: Instance) {
        self.earlier &= !instance.bit();
        let mut next = self.fenced.head;
        while next != BlockId::NONE {
            let block = next;
            next = self.nodes[block].next;
            if !self.is_held(block) {
                self.unfence(block);
                self.release_slot(block);
            }
        }
    }
}
