//! Touch: a shared store is told of uses that it does not see.
//!
//! Sighting of a block with an old mark → a queue → [`Effect::Touch`] → [`Core::touched`]. A block that is gone there
//! loses its mark: the next sighting writes it back like one that never was there, and by the same rules. A store that
//! is sick or refuses the touch changes nothing; the next period asks again.
//!
//! A block that the store was given before, and that has come up from a disk since, is not written at once: a touch
//! asks for it first. What others left under the block's name would be found too, and be of no use. So a block that the
//! store was not given by this daemon, or that it gave back damaged, is written.
//!
//! Invariants: what is touched is not pinned. Nothing is touched on a tier that is closed or only read from, nor while
//! its namespace is being purged. `tiers/marks.rs` says how often.

use crate::core::Core;
use crate::error::ErrorKind;
use crate::journal::Effect;
use crate::key::{BlockId, BlockKey, Generation, TierId};
use crate::slots::{Block, State};
use crate::tier::Outcome;
use crate::tiers::ASKED;

/// Touches that one event asks for, at about 0.3 µs each; [`Core::step`] asks for the next ones.
const TOUCHES: usize = 64;

impl Core {
    /// Touches those of `seen` whose marks on the tier are old, as soon as the limits allow.
    pub(crate) fn touch_marked(&mut self, tier: TierId, seen: &[BlockId]) {
        if self.tiers.marks(tier).is_none() || !self.tiers.is_open(tier) {
            return;
        }
        // The last of a prompt first, so that the store evicts leaves before what leads to them.
        for block in seen.iter().rev() {
            if self.slots[*block].tiers & tier.bit() != 0
                && let Some(marks) = self.tiers.marks_mut(tier)
            {
                marks.see(*block);
            }
        }
        self.step_touches();
    }

    /// Asks for some of the touches that wait. False if none may be asked for now.
    pub(crate) fn step_touches(&mut self) -> bool {
        let Some(tier) = self.tiers.to_touch() else { return false };
        for _ in 0..TOUCHES {
            let Some(marks) = self.tiers.marks_mut(tier) else { break };
            // What left the pool while it waited, or was purged, is not touched.
            if let Some((block, generation)) = marks.take_asked() {
                if self.slots[block].generation == generation
                    && self.is_touchable(tier, block)
                    && self.tiers.begin_asking(tier, block)
                {
                    self.touch(tier, block, ASKED);
                }
            } else if let Some((block, age)) = marks.take_due() {
                if self.is_touchable(tier, block) {
                    self.touch(tier, block, age);
                }
            } else {
                break;
            }
        }
        true
    }

    fn is_touchable(&self, tier: TierId, block: BlockId) -> bool {
        let Block { state, tiers, .. } = self.slots[block];
        state == State::Ready && tiers & tier.bit() != 0 && self.is_current(block)
    }

    fn touch(&mut self, tier: TierId, block: BlockId, age: u8) {
        self.tiers.stats_mut(tier).touches += 1;
        self.journal.push(Effect::Touch { tier, age, block, generation: self.slots[block].generation });
    }

    /// What the tier says of a block that it was told the use of.
    pub fn touched(&mut self, tier: TierId, block: BlockId, generation: Generation, age: u8, outcome: Outcome) {
        if age == ASKED {
            return self.told(tier, block, generation, outcome);
        }
        let is_gone = outcome == Outcome::Absent;
        let Some(marks) = self.tiers.marks_mut(tier) else { return };
        if is_gone || matches!(outcome, Outcome::Found) {
            marks.touched(age, !is_gone);
        }
        // One that waits was seen to be gone before, by another touch or load.
        let is_waiting = marks.is_waiting(block);
        self.tiers.stats_mut(tier).lost += u64::from(is_gone);
        if is_gone && !is_waiting && self.resident_key(block, generation).is_some() {
            self.slots.remove_tier(block, tier.bit());
            self.tiers.forget_location(self.tier_key_of(block), tier);
        }
    }

    /// What the tier says of a block that it was given before.
    fn told(&mut self, tier: TierId, block: BlockId, generation: Generation, outcome: Outcome) {
        if outcome == Outcome::Found || self.tiers.marks(tier).is_some_and(|marks| marks.is_waiting(block)) {
            return;
        }
        let is_refused = outcome == Outcome::Failed(ErrorKind::Unsupported);
        if self.resident_key(block, generation).is_none() {
            self.tiers.stats_mut(tier).dropped_gone += u64::from(outcome == Outcome::Absent);
        } else if self.slots[block].tiers & tier.bit() != 0 {
            self.slots.remove_tier(block, tier.bit());
            // After another failure the next sighting asks again.
            if (outcome == Outcome::Absent || is_refused) && self.is_current(block) {
                self.tiers.forget_location(self.tier_key_of(block), tier);
                self.queue_asked(tier, block);
            }
        }
    }

    /// Key of a block that may have left the pool since an effect named it.
    pub fn resident_key(&self, block: BlockId, generation: Generation) -> Option<BlockKey> {
        let Block { state, generation: own, .. } = self.slots[block];
        (state == State::Ready && own == generation).then(|| self.block_key(block))
    }
}
