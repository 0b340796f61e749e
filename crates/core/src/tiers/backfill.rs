//! How far the backfill of one tier has come: which records it has not looked at, and which blocks are being compared.

use std::ops::Range;

use crate::key::{BlockId, Generation};

/// While so many blocks are being compared, no other one is: lookups wait behind them.
const COMPARING: usize = 16;

#[derive(Default)]
pub(crate) struct Backfill {
    unseen: Range<u32>,
    comparing: Vec<(BlockId, Generation)>,
    comparing_bytes: u64,
}

impl Backfill {
    /// The first `records` are to be looked at.
    pub fn begin(&mut self, records: u32) {
        self.unseen = 0..records;
    }

    /// Whether a record may be looked at now, if the blocks being compared may have so many bytes. One is always
    /// compared, or a small pool could never compare a large one.
    pub fn is_due(&self, most_bytes: u64) -> bool {
        let has_room = self.comparing.len() < COMPARING && self.comparing_bytes < most_bytes;
        !self.unseen.is_empty() && (has_room || self.comparing.is_empty())
    }

    /// The next record.
    pub fn take_next(&mut self) -> Option<BlockId> {
        self.unseen.next().map(BlockId)
    }

    pub fn begin_comparing(&mut self, block: BlockId, generation: Generation, bytes: u64) {
        self.comparing.push((block, generation));
        self.comparing_bytes += bytes;
    }

    /// False if the block was not being compared for this tier.
    pub fn end_comparing(&mut self, block: BlockId, generation: Generation, bytes: u64) -> bool {
        let Some(at) = self.comparing.iter().position(|comparing| *comparing == (block, generation)) else {
            return false;
        };
        self.comparing.swap_remove(at);
        self.comparing_bytes -= bytes;
        true
    }
}
