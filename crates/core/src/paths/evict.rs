//! Slots for new blocks: free slots, new extents, eviction.
//!
//! A class first uses its free slots, then free units, then evicts the block that its policy chooses. From time to
//! time, a class that evicts gets units of another class (`rebalance`).

use crate::core::Core;
use crate::key::{BlockId, ClassId};
use crate::policy::MAX_SCAN;
use crate::slots::{TOUCHED_TOGETHER, Tally};

/// A prefetch leaves at least one in so many slots of a class neither reserved nor held: the shares of promises,
/// reservations and stores to tiers add up to less than the rest.
const SPARE_ONE_IN: u64 = 8;

impl Core {
    /// Whether `class` has a free slot, or gets one from free units.
    pub(crate) fn has_free_slot(&mut self, class: ClassId) -> bool {
        self.slots.space().has_free(class) || self.slots.grow(class, &mut self.journal)
    }

    /// Frees up to `want` slots of `class`. False if all blocks that were examined are held, or if it would take more
    /// than `budget` evictions. Follows `has_free_slot`: a class whose extents are refused takes no units of others.
    pub(crate) fn free_slots(&mut self, class: ClassId, want: usize, budget: &mut usize) -> bool {
        let needs_units = !self.slots.space().is_refused();
        self.rebalance(class);
        while *budget > 0 && !self.slots.space().has_free(class) {
            // The victims may be in a draining extent, whose slots are not taken again.
            let evicted = self.evict(class, want.min(*budget));
            *budget = budget.saturating_sub(if evicted > 0 { evicted } else { MAX_SCAN });
        }
        if self.has_free_slot(class) {
            return true;
        }
        if !self.reclaim(class) && needs_units {
            self.begin_drain(class, None);
        }
        self.has_free_slot(class)
    }

    /// As `free_slots`, for one slot of a prefetch: it evicts no hinted block, takes nothing from another class, and
    /// leaves one in [`SPARE_ONE_IN`] of the class's slots neither reserved nor held.
    pub(crate) fn free_slot_to_prefetch(&mut self, class: ClassId, budget: &mut usize) -> bool {
        if !self.has_spare(class) {
            return false;
        }
        while *budget > 0 && !self.has_free_slot(class) {
            let is_evicted = self.evict_next(class, false);
            *budget = budget.saturating_sub(if is_evicted { 1 } else { MAX_SCAN });
            if !is_evicted {
                break;
            }
        }
        self.slots.space().has_free(class)
    }

    /// Whether a slot of `class` may be held for a while without being missed.
    fn has_spare(&self, class: ClassId) -> bool {
        let Tally { pinned, reserved, moving, fenced, .. } = *self.slots.tally(class);
        let held = pinned + reserved + moving + fenced + 1;
        let slots = self.slots.space().class_info(class).slots;
        held * SPARE_ONE_IN <= slots * (SPARE_ONE_IN - 1) || self.slots.space().may_grow(class)
    }

    /// Evicts up to `want` blocks of `class`, several at a time, so that their loads from memory overlap. Returns how
    /// many; none if all blocks that were examined are held.
    fn evict(&mut self, class: ClassId, want: usize) -> usize {
        let want = want.min(TOUCHED_TOGETHER);
        self.cache.touch_victims(&self.slots, class, want);
        (0..want).take_while(|_| self.evict_one(class)).count()
    }

    pub(crate) fn evict_one(&mut self, class: ClassId) -> bool {
        self.evict_next(class, true)
    }

    /// False if all that were looked at are held, or wanted where none of these may go.
    fn evict_next(&mut self, class: ClassId, may_take_protected: bool) -> bool {
        let evicted = self.cache.evict(&mut self.slots, class, &self.hints, may_take_protected);
        let Some(block) = evicted else { return false };
        self.count_eviction(block);
        self.release_slot(block);
        true
    }

    fn count_eviction(&mut self, block: BlockId) {
        self.journal.stats_mut().evicted += 1;
        self.journal.stats_mut().evicted_bytes += self.slots.slot_bytes(block);
    }
}
