//! Blocks whose bytes are not what was stored: a bit of memory flipped, or somebody wrote where he must not.
//!
//! Whoever has read a block's bytes, and found them wrong against the checksum of that very generation, says so here.
//! The block is a miss from then on, so the next store of it is taken; its slot stays out of use while anybody may
//! still read it. A copy on a tier is not touched: it comes up at the next lookup.
//!
//! Who is only told so by somebody else suspects the block: it is compared with its checksum first, and nobody is
//! answered with it meanwhile. Suspicion → [`Effect::Verify`] → [`Core::verified`], as for what a restart found.

use crate::block::{Block, BlockId, State};
use crate::core::{Core, Effect};
use crate::key::{Generation, SlotId};
use crate::miss::Fate;

/// Who found that a block is not what was stored. The order is that of `Stats::corrupt`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Finder {
    /// The comparison of a recovered block, when it was first asked for.
    Restart,
    /// A worker that loaded it; the daemon looked for itself afterwards.
    Load,
    /// A client that the daemon copied it for.
    Get,
    /// The daemon, while it read the pool on its own account.
    Scrub,
    /// Somebody who asked for all blocks to be compared.
    Audit,
}

impl Finder {
    pub const ALL: [Finder; 5] = [Finder::Restart, Finder::Load, Finder::Get, Finder::Scrub, Finder::Audit];

    /// As it stands in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Finder::Restart => "restart",
            Finder::Load => "load",
            Finder::Get => "get",
            Finder::Scrub => "scrub",
            Finder::Audit => "audit",
        }
    }
}

impl Core {
    /// The block that lay in `slot` under `generation` is not what was stored. False if no such block is in the index
    /// any more: then nothing changes. The slot and the generation may come from anywhere; that the bytes are wrong is
    /// the caller's to know.
    pub fn drop_corrupt(&mut self, slot: SlotId, generation: Generation, finder: Finder) -> bool {
        let block = self.space.block_at(slot).filter(|block| self.blocks[*block].generation == generation);
        let Some(block) = block.filter(|block| self.is_indexed(*block)) else { return false };
        self.drop_rotten(block, finder);
        true
    }

    /// Somebody says that the block that lay in `slot` under `generation` is not what was stored. False if no such block
    /// is ready any more, or if too much is pinned already: then nothing changes, and whoever reads it next tells again.
    pub fn suspect(&mut self, slot: SlotId, generation: Generation) -> bool {
        let Some(block) = self.space.block_at(slot) else { return false };
        let Block { state, generation: own, pins, .. } = self.blocks[block];
        let promised = self.promised_bytes();
        let limit = self.share(self.config.promise_permille);
        let is_over = pins == 0 && promised > 0 && promised + self.slot_bytes(block) > limit;
        if state != State::Ready || own != generation || is_over {
            return false;
        }
        self.stats.suspected += 1;
        self.verify(block, Finder::Load);
        true
    }

    /// The comparison asked for by [`Effect::Verify`] is done; called once for each. True if the block is dropped for it:
    /// one that was forgotten meanwhile has nothing in the table that it could be compared with, and is nobody's hit.
    pub fn verified(&mut self, block: BlockId, generation: Generation, is_whole: bool, finder: Finder) -> bool {
        let record = &mut self.blocks[block];
        let is_held = record.generation == generation && record.pins > 0;
        assert!(is_held && matches!(record.state, State::Verifying | State::Fenced), "{block:?} was not verified");
        let is_dropped = record.state == State::Verifying && !is_whole;
        if is_dropped {
            self.drop_rotten(block, finder);
        } else if record.state == State::Verifying {
            record.state = State::Ready;
            self.stats.verified += u64::from(finder == Finder::Restart);
        }
        self.unpin(block);
        is_dropped
    }

    /// The block, which is in the index, is a hit again when it was compared.
    pub(crate) fn verify(&mut self, block: BlockId, finder: Finder) {
        self.blocks[block].state = State::Verifying;
        self.pin(block, None);
        let Block { slot, generation, .. } = self.blocks[block];
        self.effects.push(Effect::Verify { block, slot, generation, finder });
    }

    /// Bytes of each rank's slice of a block that has a key.
    pub fn slices(&self, block: BlockId) -> &[u64] {
        let Block { namespace, group, .. } = self.blocks[block];
        self.names.get(namespace).layout.group(group).map_or(&[], |group| &group.rank_bytes)
    }

    /// As [`Core::drop_corrupt`], of a block in the index.
    pub(crate) fn drop_rotten(&mut self, block: BlockId, finder: Finder) {
        self.stats.corrupt[finder as usize] += 1;
        self.forget(block, Fate::Failed);
    }
}
