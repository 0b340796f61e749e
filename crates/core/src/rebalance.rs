//! Drains under way: runs of units that one class gives to another.
//!
//! Invariants: a run has at most one drain at a time; a new drain begins only when all others wait for holders; a pass
//! over a run meets no block that is being copied. `paths::rebalance` decides which class gives to which.

use crate::key::ClassId;
use crate::slots::{Run, Slots};

/// Drains at a time. A new one begins only when all others wait for holders, so that a paused engine does not
/// keep classes from growing.
const MAX_DRAINS: usize = 4;
/// While so many wait, one more may begin for a class that has nothing to evict, where nobody holds a slot: up to this
/// number.
const MOST_DRAINS: usize = 4 * MAX_DRAINS;

struct Drain {
    run: Run,
    /// Who gets the units.
    recipient: ClassId,
    /// Where this pass stands: the extent at or behind `unit`, from `slot` on.
    unit: u32,
    slot: u32,
    /// In this pass a block found no other place.
    has_unplaced: bool,
    /// A pass met a slot that somebody has to fill, or that is fenced.
    has_kept: bool,
    /// A whole pass was made; what is left is held.
    is_waiting: bool,
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct Drains {
    all: Vec<Drain>,
    /// Blocks that are being copied out of draining extents.
    copies: u32,
    /// Blocks evicted or refused after which classes are compared again.
    next_comparison: u64,
    /// Classes were compared in this event. One event may turn away so many large blocks that each makes the next
    /// comparison due, and a comparison takes up to 0.1 ms.
    has_compared: bool,
    /// For this class no drain could be given up in this event. One event may try for each of many keys, and a try
    /// looks at each extent of some runs.
    in_vain: Option<ClassId>,
    /// Since the last [`Drains::retry`], a class that starves found no run. A search looks at the slots of many runs.
    has_found_none: bool,
    vain_searches: u32,
}

impl Drains {
    /// `is_starving`: who asks has nothing to evict.
    pub fn may_begin(&self, is_starving: bool) -> bool {
        let most = if is_starving && !self.has_found_none { MOST_DRAINS } else { MAX_DRAINS };
        self.all.len() < most && self.all.iter().all(|drain| drain.is_waiting)
    }

    /// Whether the next drain may be one that has to wait for holders.
    pub fn may_wait(&self) -> bool {
        self.all.len() < MAX_DRAINS
    }

    /// A search found no run.
    pub fn note_none(&mut self) {
        self.has_found_none = true;
        self.vain_searches = self.vain_searches.wrapping_add(1);
    }

    /// Where a search begins: each that may not wait looks at other extents than the one before.
    pub fn first_of(&self, steps: usize) -> usize {
        if self.may_wait() { 0 } else { self.vain_searches as usize % steps }
    }

    /// Runs may have lost their holders.
    pub fn retry(&mut self) {
        self.has_found_none = false;
    }

    /// From now on `run` is drained for `recipient`.
    pub fn begin(&mut self, run: Run, recipient: ClassId) {
        let (unit, slot) = (run.first_unit, 0);
        let drain = Drain { run, recipient, unit, slot, has_unplaced: false, has_kept: false, is_waiting: false };
        self.all.insert(0, drain);
    }

    /// Whether a step would find something to do.
    pub fn has_more(&self) -> bool {
        self.copies == 0 && self.all.iter().any(|drain| !drain.is_waiting)
    }

    /// Whether a drain is under way that does not wait for holders.
    pub fn is_moving(&self) -> bool {
        self.copies > 0 || self.all.iter().any(|drain| !drain.is_waiting)
    }

    /// The drain to continue, and the position of its pass: the extent at or after a unit, from a slot on.
    pub fn next(&self) -> Option<(Run, u32, u32)> {
        let drain = self.all.first().filter(|_| self.copies == 0)?;
        Some((drain.run, drain.unit, drain.slot))
    }

    /// The pass of that drain stands here now.
    pub fn advance(&mut self, unit: u32, slot: u32) {
        (self.all[0].unit, self.all[0].slot) = (unit, slot);
    }

    /// The pass of that drain is over; the next step is another drain's.
    pub fn end_pass(&mut self) {
        let drain = &mut self.all[0];
        (drain.unit, drain.slot, drain.is_waiting) = (drain.run.first_unit, 0, !drain.has_unplaced);
        drain.has_unplaced = false;
        self.all.rotate_left(1);
    }

    /// In this pass over `run` a block found no other place.
    pub fn note_unplaced(&mut self, run: Run) {
        if let Some(drain) = self.all.iter_mut().find(|drain| drain.run == run) {
            drain.has_unplaced = true;
        }
    }

    /// A pass over `run` met a slot that somebody has to fill, or that is fenced.
    pub fn note_kept(&mut self, run: Run) {
        if let Some(drain) = self.all.iter_mut().find(|drain| drain.run == run) {
            drain.has_kept = true;
        }
    }

    /// Ends the drain whose run is empty, if there is one; the class that gets its units.
    pub fn finish(&mut self, slots: &mut Slots) -> Option<ClassId> {
        let at = self.all.iter().position(|drain| slots.finish_drain(drain.run))?;
        Some(self.all.remove(at).recipient)
    }

    /// Gives up a drain that waits for whoever keeps such slots, of a run in which `class` has a free slot. False if
    /// there is none.
    pub fn give_up(&mut self, slots: &mut Slots, class: ClassId) -> bool {
        if self.copies > 0 || self.in_vain == Some(class) {
            return false;
        }
        let may_end = |drain: &Drain| drain.is_waiting && drain.has_kept && slots.has_free_in(drain.run, class);
        let Some(at) = self.all.iter().position(may_end) else {
            self.in_vain = Some(class);
            return false;
        };
        slots.give_up_drain(self.all.remove(at).run);
        true
    }

    pub fn begin_copy(&mut self) {
        self.copies += 1;
    }

    /// True if no other copy is under way.
    pub fn end_copy(&mut self) -> bool {
        self.copies -= 1;
        self.copies == 0
    }

    /// Whether classes are to be compared after so many blocks were evicted or refused.
    pub fn is_comparison_due(&self, turned_away: u64) -> bool {
        !self.has_compared && turned_away >= self.next_comparison
    }

    pub fn note_comparison(&mut self) {
        self.has_compared = true;
    }

    pub fn end_event(&mut self) {
        (self.has_compared, self.in_vain) = (false, None);
    }

    pub fn compare_after(&mut self, turned_away: u64) {
        self.next_comparison = turned_away;
    }
}
