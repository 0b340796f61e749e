//! The pool's slots, and who may use each of them.
//!
//! "No slot in two hands" follows from these invariants: a slot is free, or it belongs to exactly one record. A record
//! is in one of the states of [`State`], which only `transition` changes. A `Reserved` record is on its instance's
//! list, and a `Fenced` one on the list of fenced blocks; tallies and byte counts equal the sums over the records. A
//! block is held while it has pins, or while an instance of an earlier epoch may still read or write it; a held block
//! is never freed. Each step writes its effect to the journal, so that the table says who may use a slot before the
//! slot's offset leaves the daemon.
//!
//! In the order of dependence: `record` (one block), `links` (lists of blocks), `classes` (the memory), this file.

mod classes;
mod links;
mod record;
#[cfg(test)]
mod tests;

use crate::journal::{Effect, Journal};
use crate::key::{BlockHash, BlockId, ClassId, Generation, Instance, NamespaceIndex, SlotId};

use record::Records;

pub(crate) use classes::{Class, Extent, ExtentId, HasRoom, Run, Space};
pub use links::{List, Node, Nodes};
pub(crate) use record::{Block, FRESH, PREFETCH, State};

/// Loads from memory that are started together: about as many as a processor core can have under way.
pub(crate) const TOUCHED_TOGETHER: usize = 32;

/// Blocks of a class that are in somebody's hand.
#[derive(Clone, Default)]
pub(crate) struct Tally {
    pub pinned: u64,
    pub reserved: u64,
    pub promoting: u64,
    /// Being filled with a block that leaves its slot.
    pub moving: u64,
    pub fenced: u64,
}

/// Where the reservations of a class and an owner are counted.
fn counted_at(class: ClassId, owner: u8) -> usize {
    class.0 as usize * Instance::MAX + owner as usize
}

/// See the module's head.
pub(crate) struct Slots {
    space: Space,
    records: Records,
    nodes: Nodes,
    /// By class.
    tallies: Vec<Tally>,
    pinned_bytes: u64,
    reserved_bytes: u64,
    /// The blocks in state `Reserved`, by owner. No policy has them, so they use its nodes.
    reserved: Vec<List>,
    /// How many of them there are, by class and owner.
    reserved_of: Vec<u32>,
    /// The blocks in state `Fenced`. No policy has them either.
    fenced: List,
    next_generation: u32,
    /// Instances of earlier epochs whose workers may still touch what they were handed then.
    earlier: u64,
    /// Those of them whose workers may touch an excluded unit; an instance that reconnected is still one of them until
    /// it is gone.
    excluding: u64,
}

/// Who asks which blocks are held while the nodes change hands.
pub(crate) struct Holds<'a> {
    records: &'a Records,
    earlier: u64,
}

impl Holds<'_> {
    #[inline]
    pub fn is_held(&self, block: BlockId) -> bool {
        let Block { pins, holders, .. } = self.records[block];
        pins > 0 || holders & self.earlier != 0
    }

    #[inline]
    pub fn record(&self, block: BlockId) -> &Block {
        &self.records[block]
    }

    /// One more than the largest block id ever given.
    pub fn end(&self) -> u32 {
        self.records.end()
    }
}

impl std::ops::Index<BlockId> for Slots {
    type Output = Block;

    #[inline]
    fn index(&self, block: BlockId) -> &Block {
        &self.records[block]
    }
}

impl Slots {
    /// A pool of `units` units, none of which may be used yet.
    pub fn new(unit_bytes: u64, units: u32, first_generation: u32) -> Slots {
        Slots {
            space: Space::new(unit_bytes, units),
            records: Records::default(),
            nodes: Nodes::default(),
            tallies: Vec::new(),
            pinned_bytes: 0,
            reserved_bytes: 0,
            reserved: (0..Instance::MAX).map(|_| List::default()).collect(),
            reserved_of: Vec::new(),
            fenced: List::default(),
            next_generation: first_generation.max(1),
            earlier: 0,
            excluding: 0,
        }
    }

    /// Extents, classes and which block is in a slot.
    #[inline]
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The links of all blocks, of which policies make their lists.
    #[inline]
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// For the policies, which link the blocks in the index and no others.
    #[inline]
    pub fn nodes_mut(&mut self) -> &mut Nodes {
        &mut self.nodes
    }

    /// The links, and beside them what a policy asks about blocks.
    #[inline]
    pub fn nodes_and_holds(&mut self) -> (&mut Nodes, Holds<'_>) {
        (&mut self.nodes, Holds { records: &self.records, earlier: self.earlier })
    }

    /// Brings records into the processor's cache, all at once instead of one after another.
    pub fn touch_lines(&self, blocks: &[BlockId]) {
        self.records.touch_lines(blocks);
    }

    /// One more than the largest block id ever given.
    pub fn end(&self) -> u32 {
        self.records.end()
    }

    /// Slots in use.
    pub fn count(&self) -> u32 {
        self.records.count()
    }

    /// Whether `block` is in the index and in its class's policy.
    #[inline]
    pub fn is_indexed(&self, block: BlockId) -> bool {
        self.records[block].is_indexed()
    }

    /// Whether somebody may still touch the slot.
    #[inline]
    pub fn is_held(&self, block: BlockId) -> bool {
        Holds { records: &self.records, earlier: self.earlier }.is_held(block)
    }

    /// Bytes of the slot that a block has.
    #[inline]
    pub fn slot_bytes(&self, block: BlockId) -> u64 {
        self.space.class_info(self.records[block].class).slot_bytes
    }

    /// Thousandths of the pool, in bytes.
    pub fn share(&self, permille: u32) -> u64 {
        self.space.capacity_bytes() * u64::from(permille) / 1000
    }

    #[inline]
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// Of these, the instance's. Takes time by the number of classes.
    pub fn bytes_reserved_by(&self, instance: Instance) -> u64 {
        let bytes = |(id, class): (ClassId, &Class)| class.slot_bytes * self.reserved_of(id, instance);
        self.space.classes().map(bytes).sum()
    }

    /// How many slots of `class` the instance has reserved.
    pub fn reserved_of(&self, class: ClassId, instance: Instance) -> u64 {
        self.reserved_of[counted_at(class, instance.0)].into()
    }

    /// Instances that have reserved something, this one not counted.
    pub fn others_that_reserve(&self, instance: Instance) -> u64 {
        let others = (0..).zip(&self.reserved).filter(|(owner, reserved)| *owner != instance.0 && reserved.len > 0);
        others.count() as u64
    }

    /// Whether the counts by class and owner are those of the reservations, for the audit.
    pub fn are_reservations_right(&self) -> bool {
        let mut counted = vec![0; self.reserved_of.len()];
        for (owner, reserved) in self.reserved.iter().enumerate() {
            let classes = reserved.iter_back(&self.nodes).map(|block| self.records[block].class);
            classes.for_each(|class| counted[counted_at(class, owner as u8)] += 1);
        }
        counted == self.reserved_of
    }

    pub fn tally(&self, class: ClassId) -> &Tally {
        &self.tallies[class.0 as usize]
    }

    /// The blocks in state `Fenced`.
    pub fn fenced(&self) -> impl Iterator<Item = BlockId> {
        self.fenced.iter(&self.nodes)
    }

    pub fn fenced_count(&self) -> u64 {
        self.fenced.len.into()
    }

    /// The instance's reservations, oldest first.
    pub fn reservations(&self, instance: Instance) -> Vec<BlockId> {
        self.reserved[instance.0 as usize].iter_back(&self.nodes).collect()
    }

    pub fn reservation_count(&self, instance: Instance) -> u64 {
        self.reserved[instance.0 as usize].len.into()
    }

    pub fn heap_bytes(&self) -> usize {
        self.records.heap_bytes() + self.nodes.heap_bytes() + self.space.heap_bytes()
    }

    // Memory.

    /// `unit`'s memory is there.
    pub fn populate(&mut self, unit: u32) {
        self.space.populate(unit);
    }

    /// See [`Space::ask_before_growing`].
    pub fn ask_before_growing(&mut self, has_room: HasRoom) {
        self.space.ask_before_growing(has_room);
    }

    /// The class of this slot size, made if new; see [`Space::class`].
    pub fn class(&mut self, slot_bytes: u64) -> Option<ClassId> {
        let class = self.space.class(slot_bytes);
        self.cover_classes();
        class
    }

    /// Makes an extent of free units, if there are any for it.
    pub fn grow(&mut self, class: ClassId, journal: &mut Journal) -> bool {
        let Some(id) = self.space.grow(class, self.nodes.clock) else { return false };
        let Extent { first_unit, units, .. } = *self.space.extent(id);
        let slot_bytes = self.space.class_info(class).slot_bytes;
        journal.push(Effect::ExtentMade { first_unit, units, slot_bytes });
        true
    }

    /// See [`Space::drain`].
    pub fn drain(&mut self, run: Run) -> Vec<ExtentId> {
        self.space.drain(run)
    }

    /// The empty, draining extent is no more.
    pub fn give_back(&mut self, extent: ExtentId, journal: &mut Journal) {
        let Run { first_unit, units } = self.space.give_back(extent);
        journal.push(Effect::ExtentCleared { first_unit, units });
    }

    /// The units of the class's empty extents are free for any class.
    pub fn free_empty_extents(&mut self, class: ClassId, journal: &mut Journal) {
        while let Some(id) = self.space.empty_extent(class) {
            let Extent { first_unit, units, .. } = *self.space.extent(id);
            let run = Run { first_unit, units };
            self.space.drain(run).into_iter().for_each(|extent| self.give_back(extent, journal));
            self.space.finish_drain(run);
        }
    }

    /// See [`Space::finish_drain`].
    pub fn finish_drain(&mut self, run: Run) -> bool {
        self.space.finish_drain(run)
    }

    /// See [`Space::has_free_in`].
    pub fn has_free_in(&self, run: Run, class: ClassId) -> bool {
        self.space.has_free_in(run, class)
    }

    /// See [`Space::give_up_drain`].
    pub fn give_up_drain(&mut self, run: Run) {
        self.space.give_up_drain(run);
    }

    // Hands.

    /// A free slot of `class`, which has one, is the instance's to fill.
    pub fn reserve(
        &mut self,
        instance: Instance,
        class: ClassId,
        holders: u64,
        journal: &mut Journal,
    ) -> (SlotId, Generation) {
        let generation = self.generation();
        let record = Block { owner: instance.0, ..Block::new(class, generation, holders) };
        let (_, slot) = self.take(record, State::Reserved, journal);
        (slot, generation)
    }

    /// A free slot of `class`, which has one, is a tier's to fill with the block of this key; it is pinned.
    pub fn begin_promotion(
        &mut self,
        class: ClassId,
        (namespace, group, hash): (NamespaceIndex, u16, BlockHash),
        (tier, tier_bit): (u8, u8),
        holders: u64,
        journal: &mut Journal,
    ) -> BlockId {
        let generation = self.generation();
        let record = Block::new(class, generation, holders);
        let record = Block { namespace, group, hash, owner: tier, tiers: tier_bit, ..record };
        let (block, _) = self.take(record, State::Promoting, journal);
        self.pin(block, None, journal);
        block
    }

    /// A free slot of `class`, which has one, is to be filled with a block that leaves another slot.
    pub fn begin_move(&mut self, class: ClassId, journal: &mut Journal) -> (BlockId, SlotId) {
        let generation = self.generation();
        self.take(Block::new(class, generation, 0), State::Moving, journal)
    }

    /// A filled slot holds the block of this key from now on.
    pub fn commit(
        &mut self,
        block: BlockId,
        namespace: NamespaceIndex,
        group: u16,
        hash: BlockHash,
        checksum: u64,
        journal: &mut Journal,
    ) {
        assert!(self.records[block].state == State::Reserved, "{block:?} is committed and not reserved");
        self.transition(block, State::Ready);
        let earlier = self.earlier;
        let record = self.records.get_mut(block);
        record.namespace = namespace;
        record.group = group;
        record.hash = hash;
        record.holders &= earlier;
        let Block { slot, generation, holders, .. } = *record;
        journal.push(Effect::Ready { block, slot, generation, checksum });
        journal.push(Effect::Held { slot, holders });
    }

    /// The tier has filled the slot.
    pub fn end_promotion(&mut self, block: BlockId, checksum: u64, journal: &mut Journal) {
        assert!(self.records[block].state == State::Promoting, "{block:?} was not being promoted");
        self.transition(block, State::Ready);
        let record = self.records.get_mut(block);
        record.owner |= FRESH;
        journal.push(Effect::Ready { block, slot: record.slot, generation: record.generation, checksum });
    }

    /// The transfer of `instance` into this slot, which was free when the transfer began, has ended: the instance holds
    /// the slot no longer, also while transfers of an earlier epoch may be under way elsewhere.
    pub fn end_transfer(&mut self, block: BlockId, instance: Instance, journal: &mut Journal) {
        let record = self.records.get_mut(block);
        if record.holders & instance.bit() != 0 {
            record.holders &= !instance.bit();
            journal.push(Effect::Held { slot: record.slot, holders: record.holders });
        }
    }

    /// The block, which is in the index, is compared with its checksum from now on, and pinned.
    pub fn begin_verification(&mut self, block: BlockId, journal: &mut Journal) {
        self.transition(block, State::Verifying);
        self.pin(block, None, journal);
    }

    /// It is what was stored.
    pub fn end_verification(&mut self, block: BlockId) {
        assert!(self.records[block].state == State::Verifying, "{block:?} was not being verified");
        self.transition(block, State::Ready);
    }

    /// Two blocks of one class exchange their slots: `to` was filled with what `from` holds.
    pub fn exchange(&mut self, from: BlockId, to: BlockId) {
        assert!(self.records[to].state == State::Moving && !self.is_held(from), "{from:?} does not move to {to:?}");
        let [one, other] = [from, to].map(|block| (self.records[block].slot, self.records[block].generation));
        self.space.exchange(one.0, other.0);
        for (block, (slot, generation)) in [(from, other), (to, one)] {
            let record = self.records.get_mut(block);
            (record.slot, record.generation) = (slot, generation);
        }
    }

    /// The slot is out of use until its last holder is gone, and a restart does not take its content for a block.
    pub fn fence(&mut self, block: BlockId, journal: &mut Journal) {
        self.transition(block, State::Fenced);
        journal.push(Effect::Fenced { slot: self.records[block].slot });
    }

    /// No client holds the slot: it is free, and the record vacant. A reservation is given back by its filler, which no
    /// longer writes there. Returns the slot's extent if that drains and is empty now; the caller then gives the extent
    /// back.
    #[must_use]
    pub fn free(&mut self, block: BlockId, journal: &mut Journal) -> Option<ExtentId> {
        let (next, earlier) = (self.generation(), self.earlier);
        let record = self.records.get_mut(block);
        if record.state == State::Reserved {
            record.holders = 0;
        }
        let slot = record.slot;
        assert!(record.pins == 0 && record.holders & earlier == 0, "{block:?} is freed in somebody's hand");
        journal.push(Effect::Freed { slot, next });
        self.transition(block, State::Vacant);
        self.records.remove(block);
        self.space.free(slot)
    }

    /// One more lease covers `block`; `instance` may touch it from now on. Returns its record.
    #[inline]
    pub fn pin(&mut self, block: BlockId, instance: Option<Instance>, journal: &mut Journal) -> &Block {
        let record = self.records.get_mut(block);
        record.pins += 1;
        if record.pins == 1 {
            self.pinned_bytes += self.space.class_info(record.class).slot_bytes;
            self.tallies[record.class.0 as usize].pinned += 1;
        }
        let bit = instance.map_or(0, Instance::bit);
        if record.holders & bit != bit {
            record.holders |= bit;
            journal.push(Effect::Held { slot: record.slot, holders: record.holders });
        }
        record
    }

    /// True if the block was fenced and nobody holds it any more: the caller then frees it.
    #[inline]
    #[must_use]
    pub fn unpin(&mut self, block: BlockId, journal: &mut Journal) -> bool {
        let record = self.records.get_mut(block);
        assert!(record.pins > 0, "block {block:?} is unpinned more often than pinned");
        record.pins -= 1;
        if record.pins > 0 {
            return false;
        }
        self.pinned_bytes -= self.space.class_info(record.class).slot_bytes;
        self.tallies[record.class.0 as usize].pinned -= 1;
        let holders = record.holders & self.earlier;
        if record.holders != holders {
            record.holders = holders;
            journal.push(Effect::Held { slot: record.slot, holders });
        }
        record.state == State::Fenced && holders == 0
    }

    /// `tier_bit`'s tier has the block, or will have it.
    pub fn add_tier(&mut self, block: BlockId, tier_bit: u8) {
        self.records.get_mut(block).tiers |= tier_bit;
    }

    /// `tier_bit`'s tier has the block no more.
    pub fn remove_tier(&mut self, block: BlockId, tier_bit: u8) {
        self.records.get_mut(block).tiers &= !tier_bit;
    }

    /// Nobody asked yet for the block that a tier fills.
    pub fn mark_prefetch(&mut self, block: BlockId) {
        self.records.get_mut(block).owner |= PREFETCH;
    }

    /// A lookup has the block that a tier filled.
    pub fn unmark_fresh(&mut self, block: BlockId) {
        self.records.get_mut(block).owner &= !FRESH;
    }

    /// The lookup that had it was never answered.
    pub fn mark_fresh(&mut self, block: BlockId) {
        self.records.get_mut(block).owner |= FRESH;
    }

    pub fn unmark_prefetch(&mut self, block: BlockId) {
        self.records.get_mut(block).owner &= !PREFETCH;
    }

    /// A generation that no slot had in this epoch.
    pub fn generation(&mut self) -> Generation {
        let generation = Generation(self.next_generation);
        // 0 means "never handed out"; skipped when the counter wraps.
        self.next_generation = self.next_generation.wrapping_add(1).max(1);
        generation
    }

    // Earlier epochs.

    /// Workers of these instances (a mask) were attached in an earlier epoch and may be alive.
    pub fn set_earlier(&mut self, instances: u64) {
        self.earlier = instances;
    }

    pub fn earlier(&self) -> u64 {
        self.earlier
    }

    /// An extent of the earlier epoch. False if it cannot be there.
    pub fn restore_extent(&mut self, slot_bytes: u64, first_unit: u32, units: u32) -> bool {
        let is_restored = self.space.restore(slot_bytes, first_unit, units).is_some();
        self.cover_classes();
        is_restored
    }

    /// A slot of a restored extent, as `found`, which is a block again, or fenced. `None` if it is no slot, or taken.
    pub fn restore(&mut self, found: Block, is_block: bool, journal: &mut Journal) -> Option<BlockId> {
        let slot = found.slot;
        if !self.space.is_free(slot) {
            return None;
        }
        let block = self.records.add(found);
        self.nodes.cover(block);
        self.space.restore_slot(slot, block).expect("it is free");
        match is_block {
            true => self.transition(block, State::Unverified),
            false => self.fence(block, journal),
        }
        Some(block)
    }

    /// All slots were restored; what is left of the extents is free.
    pub fn finish_restore(&mut self) {
        self.space.finish_restore();
    }

    /// `unit` is not used until all instances of an earlier epoch are gone.
    pub fn exclude(&mut self, unit: u32) {
        self.excluding = self.earlier;
        self.space.exclude(unit);
    }

    /// `instance` touches no excluded unit any more; once nobody does, they are used again.
    pub fn readmit(&mut self, instance: Instance, journal: &mut Journal) {
        if self.excluding & instance.bit() != 0 {
            self.excluding &= !instance.bit();
            let units = if self.excluding == 0 { self.space.readmit() } else { Vec::new() };
            units.into_iter().for_each(|unit| journal.push(Effect::ExtentCleared { first_unit: unit, units: 1 }));
        }
    }

    /// `instance`, which reconnected, continues to fill these slots: reservations of its own, or slots fenced since an
    /// earlier epoch. Returns its other reservations, oldest first, for the caller to free.
    pub fn declare(&mut self, instance: Instance, kept: &[BlockId]) -> Vec<BlockId> {
        let own = instance.0 as usize;
        let mut others = std::mem::take(&mut self.reserved[own]);
        for block in kept {
            if self.records[*block].state == State::Reserved {
                others.unlink(&mut self.nodes, *block);
                self.reserved[own].push_head(&mut self.nodes, *block);
            } else {
                self.records.get_mut(*block).owner = instance.0;
                self.transition(*block, State::Reserved);
            }
        }
        let undeclared = others.iter_back(&self.nodes).collect();
        self.reserved[own].append(&mut self.nodes, others);
        undeclared
    }

    /// `instance` holds nothing of an earlier epoch any more. Returns the fenced blocks that have no holder now, for
    /// the caller to free.
    pub fn resolve(&mut self, instance: Instance) -> Vec<BlockId> {
        self.earlier &= !instance.bit();
        self.fenced().filter(|block| !self.is_held(*block)).collect()
    }

    fn cover_classes(&mut self) {
        let classes = self.space.classes().count();
        self.tallies.resize(classes, Tally::default());
        self.reserved_of.resize(classes * Instance::MAX, 0);
    }

    /// A record, and a free slot of its class.
    #[inline]
    fn take(&mut self, record: Block, to: State, journal: &mut Journal) -> (BlockId, SlotId) {
        let Block { class, generation, holders, .. } = record;
        let block = self.records.add(record);
        self.nodes.cover(block);
        let slot = self.space.take(class, block).expect("the class has a free slot");
        self.records.get_mut(block).slot = slot;
        self.transition(block, to);
        journal.push(Effect::Reserved { slot, generation, holders });
        (block, slot)
    }

    /// Changes a block's state, and the lists and counts that follow from it. In line, since each caller knows `to`.
    #[inline(always)]
    fn transition(&mut self, block: BlockId, to: State) {
        let record = self.records.get_mut(block);
        let (class, owner) = (record.class, record.owner as usize);
        let tally = &mut self.tallies[class.0 as usize];
        match record.transition(to) {
            State::Reserved => {
                tally.reserved -= 1;
                self.reserved_bytes -= self.space.class_info(class).slot_bytes;
                self.reserved_of[counted_at(class, owner as u8)] -= 1;
                self.reserved[owner].unlink(&mut self.nodes, block);
            }
            State::Promoting => tally.promoting -= 1,
            State::Moving => tally.moving -= 1,
            State::Fenced => {
                tally.fenced -= 1;
                self.fenced.unlink(&mut self.nodes, block);
            }
            State::Vacant | State::Unverified | State::Verifying | State::Ready => {}
        }
        match to {
            State::Reserved => {
                tally.reserved += 1;
                self.reserved_bytes += self.space.class_info(class).slot_bytes;
                self.reserved_of[counted_at(class, owner as u8)] += 1;
                self.reserved[owner].push_head(&mut self.nodes, block);
            }
            State::Promoting => tally.promoting += 1,
            State::Moving => tally.moving += 1,
            State::Fenced => {
                tally.fenced += 1;
                self.fenced.push_head(&mut self.nodes, block);
            }
            State::Vacant | State::Unverified | State::Verifying | State::Ready => {}
        }
    }
}
