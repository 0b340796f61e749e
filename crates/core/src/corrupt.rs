//! Blocks whose bytes are not what was stored: a bit of memory flipped, or somebody wrote where he must not.
//!
//! Whoever has read a block's bytes, and found them wrong against the checksum of that very generation, says so here.
//! The block is a miss from then on, so the next store of it is taken; its slot stays out of use while anybody may
//! still read it. A copy on a tier is not touched: it comes up at the next lookup.

use crate::block::BlockId;
use crate::core::Core;
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

    /// As [`Core::drop_corrupt`], of a block in the index.
    pub(crate) fn drop_rotten(&mut self, block: BlockId, finder: Finder) {
        self.stats.corrupt[finder as usize] += 1;
        self.forget(block, Fate::Failed);
    }
}
