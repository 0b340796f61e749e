//! Blocks that leave a draining extent for another slot of their class, so that a class gives up what its policy would,
//! wherever that lies, and no prompt gets a hole for where one of its blocks lay.
//!
//! Slot of the class, freed by the policy if none is → [`Effect::Move`] → [`Core::moved`]. What is ready never changes, so
//! nothing is pinned while it is copied: if the block is gone or in somebody's hand when the copy is done, the copy is
//! dropped, and the next pass over the extent meets the block again. Otherwise the two records exchange their slots:
//! index, policy and tiers know the block by its record and notice nothing.

use crate::block::{Block, BlockId, ClassId, NamespaceIndex, State};
use crate::core::{Core, Effect};
use crate::key::{BlockHash, Generation, SlotId};
use crate::miss::Fate;

impl Core {
    /// Finds `block`, which lies in a draining extent, another place, or evicts it if it is the one to go. False if that
    /// would take more than `budget` evictions: the coldest may lie in draining extents, too, which makes no place.
    pub(crate) fn relocate(&mut self, block: BlockId, budget: &mut usize) -> bool {
        let Block { class, slot, generation, .. } = self.blocks[block];
        while *budget > 0 && !self.space.has_free(class) && self.is_indexed(block) && self.evict_one(class) {
            *budget -= 1;
        }
        let has_room = self.space.has_free(class);
        if has_room && self.is_indexed(block) {
            let (to, to_slot) = self.take_copy(class);
            self.copies += 1;
            self.effects.push(Effect::Move { from: block, slot, generation, to, to_slot });
        }
        has_room || !self.is_indexed(block)
    }

    /// The slot's bytes were copied, or could not be, then the block is dropped. True if it lies in its new slot from now
    /// on: then its entry is to be written there before the effects are followed.
    pub fn moved(&mut self, from: BlockId, generation: Generation, to: BlockId, is_copied: bool) -> bool {
        let is_there = self.blocks[from].generation == generation && self.is_indexed(from) && !self.is_held(from);
        let is_moved = is_there && is_copied;
        if is_there && !is_copied {
            self.forget(from, Fate::Failed);
        }
        if is_moved {
            self.exchange(from, to);
            self.stats.moved += 1;
        }
        let class = self.blocks[to].class;
        self.tallies[class.0 as usize].moving -= 1;
        self.release_slot(to);
        self.copies -= 1;
        if self.copies == 0 {
            self.step_drain();
        }
        is_moved
    }

    /// A slot to copy to.
    fn take_copy(&mut self, class: ClassId) -> (BlockId, SlotId) {
        let generation = self.generation();
        let (to, slot) = self.take_slot(Block {
            holders: 0,
            hash: BlockHash::NONE,
            state: State::Moving,
            class,
            group: 0,
            owner: 0,
            below: 0,
            namespace: NamespaceIndex::NONE,
            slot: SlotId(0),
            generation,
            pins: 0,
        });
        self.tallies[class.0 as usize].moving += 1;
        self.effects.push(Effect::Reserved { slot, generation, holders: 0 });
        (to, slot)
    }

    fn exchange(&mut self, from: BlockId, to: BlockId) {
        let [one, other] = [from, to].map(|block| (self.blocks[block].slot, self.blocks[block].generation));
        self.space.exchange(one.0, other.0);
        (self.blocks[from].slot, self.blocks[from].generation) = other;
        (self.blocks[to].slot, self.blocks[to].generation) = one;
        self.requeue(from, one.1);
    }
}
