//! Moving blocks from a draining extent to other slots of their class. So a class loses the blocks that its policy
//! would evict, wherever they are, and no prompt gets a hole because one of its blocks is in the extent.
//!
//! A slot of the class, freed by the policy if there is none → [`Effect::Move`] → [`Core::moved`]. A ready block never
//! changes, so it is not pinned while it is copied. If the block is gone or held when the copy is done, the copy is
//! dropped, and the next pass over the extent tries the block again. Otherwise the two records exchange their slots:
//! index, policy and tiers refer to the record, and need no change.

use crate::cache::Fate;
use crate::core::Core;
use crate::journal::Effect;
use crate::key::{BlockId, Generation};
use crate::slots::Block;

impl Core {
    /// Finds another slot for `block`, which is in a draining extent, or evicts the block if it is the next victim.
    /// False if that would take more than `budget` evictions: the coldest blocks may be in draining extents too, and
    /// evicting those frees no usable slot.
    pub(crate) fn relocate(&mut self, block: BlockId, budget: &mut usize) -> bool {
        let Block { class, slot, generation, .. } = self.slots[block];
        while *budget > 0
            && !self.slots.space().has_free(class)
            && self.slots.is_indexed(block)
            && self.evict_one(class)
        {
            *budget -= 1;
        }
        let has_free_slot = self.slots.space().has_free(class);
        if has_free_slot && self.slots.is_indexed(block) {
            let (to, to_slot) = self.slots.begin_move(class, &mut self.journal);
            self.drains.begin_copy();
            self.journal.push(Effect::Move { from: block, slot, generation, to, to_slot });
        }
        has_free_slot || !self.slots.is_indexed(block)
    }

    /// The slot's bytes were copied, or could not be copied; then the block is dropped. True if the block is in its new
    /// slot from now on: then its entry must be written there before the effects are carried out.
    pub fn moved(&mut self, from: BlockId, generation: Generation, to: BlockId, is_copied: bool) -> bool {
        let is_there =
            self.slots[from].generation == generation && self.slots.is_indexed(from) && !self.slots.is_held(from);
        let is_moved = is_there && is_copied;
        if is_there && !is_copied {
            self.forget(from, Fate::Failed);
        }
        if is_moved {
            self.slots.exchange(from, to);
            self.tiers.requeue(from, generation, &self.slots[from]);
            self.journal.stats_mut().moved += 1;
        }
        self.release_slot(to);
        if self.drains.end_copy() {
            self.step_drain();
        }
        is_moved
    }
}
