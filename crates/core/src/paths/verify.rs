//! Verification: a block is compared with its checksum before it is served, and dropped if its bytes are wrong. They
//! are wrong if a bit of memory flipped, or if a process wrote where it must not.
//!
//! A block that was found at a restart, or that a worker's report made suspected → [`Effect::Verify`] → the daemon
//! reads the bytes (`tasks/verify.rs`) → [`Core::verified`]. No lookup gets the block until then.
//!
//! A block with wrong bytes is a miss from then on, so it can be stored again. Its slot stays out of use while any
//! process may still read it. A copy on a tier stays: the next lookup promotes it.

use crate::cache::Fate;
use crate::core::Core;
use crate::journal::Effect;
use crate::key::{BlockId, Generation, SlotId};
use crate::slots::{Block, State};
use crate::stats::Finder;

impl Core {
    /// The block that was in `slot` under `generation` is not the one that was stored. False if no such block is in the
    /// index any more: then nothing changes. The slot and the generation may come from any source; the caller must know
    /// that the bytes are wrong.
    pub fn drop_corrupt(&mut self, slot: SlotId, generation: Generation, finder: Finder) -> bool {
        let block = self.slots.space().block_at(slot).filter(|block| self.slots[*block].generation == generation);
        let Some(block) = block.filter(|block| self.slots.is_indexed(*block)) else { return false };
        self.drop_rotten(block, finder);
        true
    }

    /// A client reports that the block that was in `slot` under `generation` is not the one that was stored. False if
    /// no such block is ready any more, or if too much is pinned already: then nothing changes, and the next client
    /// that reads the block reports it again.
    pub fn suspect(&mut self, slot: SlotId, generation: Generation) -> bool {
        let Some(block) = self.slots.space().block_at(slot) else { return false };
        let Block { state, generation: own, pins, .. } = self.slots[block];
        let promised = self.promised_bytes();
        let limit = self.slots.share(self.config.promise_permille);
        let is_over = pins == 0 && promised > 0 && promised + self.slots.slot_bytes(block) > limit;
        if state != State::Ready || own != generation || is_over {
            return false;
        }
        self.journal.stats_mut().suspected += 1;
        self.verify(block, Finder::Load);
        true
    }

    /// The comparison that [`Effect::Verify`] asked for is done; called once for each. True if the block is dropped: a
    /// block that was forgotten meanwhile has no entry in the table to compare with, and cannot be hit.
    pub fn verified(&mut self, block: BlockId, generation: Generation, is_whole: bool, finder: Finder) -> bool {
        let Block { state, generation: own, pins, .. } = self.slots[block];
        let is_held = own == generation && pins > 0;
        assert!(is_held && matches!(state, State::Verifying | State::Fenced), "{block:?} was not verified");
        self.journal.note_end();
        let is_dropped = state == State::Verifying && !is_whole;
        if is_dropped {
            self.drop_rotten(block, finder);
        } else if state == State::Verifying {
            self.slots.end_verification(block);
            self.journal.stats_mut().verified += u64::from(finder == Finder::Restart);
        }
        self.compared(block, generation);
        self.unpin(block);
        is_dropped
    }

    /// The block that is being compared is whole, but workers could not compare what they load of it: it is a miss from
    /// now on, and does not count as corrupt.
    pub fn drop_unloadable(&mut self, block: BlockId) {
        if self.slots.is_indexed(block) {
            self.forget(block, Fate::Failed);
        }
    }

    /// The block, which is in the index, is a hit again when it was compared.
    pub(crate) fn verify(&mut self, block: BlockId, finder: Finder) {
        self.slots.begin_verification(block, &mut self.journal);
        let Block { slot, generation, .. } = self.slots[block];
        self.journal.push(Effect::Verify { block, slot, generation, finder });
    }

    /// Bytes of each rank's slice of a block that has a key.
    pub fn slices(&self, block: BlockId) -> &[u64] {
        let Block { namespace, group, .. } = self.slots[block];
        self.cache.namespace(namespace).layout.group(group).map_or(&[], |group| &group.rank_bytes)
    }

    /// As [`Core::drop_corrupt`], of a block in the index.
    pub(crate) fn drop_rotten(&mut self, block: BlockId, finder: Finder) {
        self.journal.stats_mut().corrupt[finder as usize] += 1;
        self.forget(block, Fate::Failed);
    }
}
