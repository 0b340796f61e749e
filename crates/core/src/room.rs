//! Making room: free slots, new extents, eviction, and extents that move between classes.
//!
//! A class first uses its free slots, then free units, then evicts its own coldest. Now and then it compares
//! its coldest block with that of the other classes; where another class keeps much colder ones, one of that
//! class's extents is drained (nothing new goes in, what is not held is evicted, the rest is waited for) and its
//! units are free for all. Draining goes on in pieces, one extent at a time.

use crate::block::{BlockId, ClassId};
use crate::core::{Core, Effect, View};
use crate::key::SlotId;
use crate::miss::Fate;
use crate::space::ExtentId;

pub(crate) struct Drain {
    pub extent: ExtentId,
    /// Slots before this one were looked at in this pass.
    cursor: u32,
}

/// Slots of a draining extent looked at in one step.
const DRAIN_SLOTS_PER_STEP: u32 = 256;
/// Evictions between two comparisons with the other classes: rare enough to cost nothing, often enough that a
/// shift of load moves an extent within one turnover of it.
const COMPARE_EVERY: u64 = 256;
/// How many times older another class's coldest block must be: below this the exchange is noise, since the
/// drained extent also holds blocks that are not cold.
const MUCH_COLDER: u64 = 2;

impl Core {
    /// A slot of `class`, which belongs to `block` from now on. `None` if everything is held.
    pub(crate) fn take_slot(&mut self, class: ClassId, block: BlockId) -> Option<SlotId> {
        if let Some(slot) = self.space.take(class, block) {
            return Some(slot);
        }
        if let Some(extent) = self.space.grow(class) {
            let (first_unit, units) = (self.space.extent(extent).first_unit, self.space.extent(extent).units);
            let slot_bytes = self.space.class_info(class).slot_bytes;
            self.effects.push(Effect::ExtentMade { first_unit, units, slot_bytes });
            return self.space.take(class, block);
        }
        if self.stats.evicted.is_multiple_of(COMPARE_EVERY) || self.space.class_info(class).slots == 0 {
            self.consider_drain(class);
        }
        self.step_drain();
        while self.evict(class) {
            // The victim may have been in a draining extent, whose slots are not taken again.
            if let Some(slot) = self.space.take(class, block) {
                return Some(slot);
            }
        }
        self.consider_drain(class);
        None
    }

    /// Goes on with the drain under way.
    pub(crate) fn step_drain(&mut self) {
        let Some(Drain { extent, cursor }) = self.drain else { return };
        let slots = self.space.extent(extent).slots;
        let end = (cursor + DRAIN_SLOTS_PER_STEP).min(slots);
        // What is held stays for the next pass.
        self.drain = Some(Drain { extent, cursor: if end == slots { 0 } else { end } });
        let blocks: Vec<BlockId> = self.space.blocks_in(extent, cursor, end).collect();
        for block in blocks {
            if self.is_indexed(block) && !self.is_held(block) {
                self.count_eviction(block);
                self.forget(block, Fate::Evicted);
            }
        }
        if self.drain.is_some() && self.space.extent(extent).used() == 0 {
            self.give_back(extent);
        }
    }

    /// Evicts one block of `class`. False if all that were looked at are held.
    fn evict(&mut self, class: ClassId) -> bool {
        let Core { blocks, earlier, expectations, .. } = self;
        let view = View { blocks, earlier: *earlier, seed: self.config.seed, expectations };
        let Some(block) = self.policies[class.0 as usize].evict(&mut self.nodes, &view) else { return false };
        self.count_eviction(block);
        let record = &self.blocks[block];
        let (namespace, group, hash) = (record.namespace, record.group, record.hash);
        self.unindex(block);
        self.memory.note(namespace, group, &hash, Fate::Evicted);
        self.release_slot(block);
        true
    }

    fn count_eviction(&mut self, block: BlockId) {
        self.stats.evicted += 1;
        self.stats.evicted_bytes += self.slot_bytes(block);
    }

    /// Starts to drain an extent of the class with the coldest block, if that is much colder than the coldest
    /// of `class`, or if `class` has nothing to evict.
    fn consider_drain(&mut self, class: ClassId) {
        if self.drain.is_some() {
            return;
        }
        let own = self.coldest_age(class).unwrap_or(0);
        let others = self.space.classes().map(|(other, _)| other).filter(|other| *other != class);
        let donor = others.filter_map(|other| Some((self.coldest_age(other)?, other))).max_by_key(|(age, _)| *age);
        let Some((age, donor)) = donor else { return };
        let has_nothing = self.coldest_age(class).is_none();
        if !has_nothing && u64::from(age) <= MUCH_COLDER * u64::from(own) {
            return;
        }
        if let Some(extent) = self.coldest_extent(donor) {
            self.space.drain(extent);
            self.drain = Some(Drain { extent, cursor: 0 });
            self.step_drain();
        }
    }

    /// Inserts and touches since the coldest block of `class` was last used.
    fn coldest_age(&self, class: ClassId) -> Option<u32> {
        self.policies[class.0 as usize].coldest(&self.nodes).map(|block| self.nodes.age(block))
    }

    /// The extent whose sampled blocks are oldest, among a few, so that the choice stays cheap.
    fn coldest_extent(&self, class: ClassId) -> Option<ExtentId> {
        const EXTENTS: usize = 16;
        const BLOCKS: u32 = 32;
        let all: Vec<ExtentId> = self.space.extents_of(class).map(|(id, _)| id).collect();
        let stride = all.len().div_ceil(EXTENTS).max(1);
        let age = |extent: &ExtentId| {
            let step = (self.space.extent(*extent).slots / BLOCKS).max(1);
            let sample = (0..BLOCKS).flat_map(|i| self.space.blocks_in(*extent, i * step, i * step + 1));
            let ages: Vec<u64> = sample.map(|block| u64::from(self.nodes.age(block))).collect();
            // An empty extent costs nothing to give.
            if ages.is_empty() { u64::MAX } else { ages.iter().sum::<u64>() / ages.len() as u64 }
        };
        all.into_iter().step_by(stride).max_by_key(age)
    }
}
