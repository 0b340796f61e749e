//! Backfill: blocks of an earlier epoch, from the pool to an own tier that takes every block and lacks them.
//!
//! What waited to be written when the process ended is in the pool and on no tier. Without a hit nothing would queue
//! it again before it is evicted.
//!
//! [`Core::tier_is_whole`] → the recovered blocks, newest first → those that the tier lacks are compared with their
//! checksums ([`Effect::Verify`](crate::Effect::Verify)) → the tier's queue.
//!
//! Invariants: it goes on only while nothing else waits to be written. A few blocks are pinned at a time. It ends where
//! the tier has all blocks for a while: what is older and lacks was evicted there. Shared tiers get no backfill: to
//! learn which blocks they lack, each block would have to be asked for.

use crate::core::Core;
use crate::key::{BlockId, Generation, TierId};
use crate::slots::{Block, State};
use crate::stats::Finder;

/// Records looked at in one piece: a cache miss or two each.
const RECORDS: u32 = 256;

impl Core {
    /// An own tier has told of all blocks that it had at its start. Called once.
    pub fn tier_is_whole(&mut self, tier: TierId) {
        let end = self.slots.end();
        self.tiers.begin_backfill(tier, end);
    }

    /// Whether [`Core::step`] has blocks to look at for a tier now.
    pub fn has_backfill(&self) -> bool {
        self.tiers.to_backfill().is_some()
    }

    /// False if there is nothing to do now.
    pub(crate) fn step_backfill(&mut self) -> bool {
        let Some(tier) = self.tiers.to_backfill() else { return false };
        for _ in 0..RECORDS {
            let Some(block) = self.tiers.backfill_mut(tier).take_next() else { break };
            self.backfill(tier, block);
            if self.tiers.to_backfill() != Some(tier) {
                break;
            }
        }
        self.start_write_backs();
        true
    }

    fn backfill(&mut self, tier: TierId, block: BlockId) {
        let Block { state, generation, tiers, .. } = self.slots[block];
        if !self.slots.is_indexed(block) || !self.is_current(block) {
            return;
        }
        let is_there = tiers & tier.bit() != 0 || self.tiers.has(tier, self.tier_key_of(block));
        self.tiers.backfill_mut(tier).saw(is_there);
        if is_there || state == State::Ready {
            _ = self.queue_write_back(tier, block, None);
            return;
        }
        let bytes = self.slots.slot_bytes(block);
        self.tiers.backfill_mut(tier).begin_comparing(block, generation, bytes);
        // A lookup may have had it compared, and need not ask again.
        if state == State::Unverified {
            self.verify(block, Finder::Restart);
        }
    }

    /// The block was compared: it is queued if that was for a tier's sake.
    pub(crate) fn compared(&mut self, block: BlockId, generation: Generation) {
        let bytes = self.slots.slot_bytes(block);
        let Some(tier) = self.tiers.end_comparing(block, generation, bytes) else { return };
        if self.slots[block].state == State::Ready {
            self.queue_write_back(tier, block, None);
            self.start_write_backs();
        }
    }
}
