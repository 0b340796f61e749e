//! How far the backfill of one tier has come: which records it has not looked at, and which blocks are being compared.

use std::ops::Range;

use crate::key::{BlockId, Generation};

/// While so many blocks are being compared, no other one is: lookups wait behind them.
const COMPARING: usize = 16;
/// Blocks wait in the order in which they were stored. Behind so many in a row that the tier has, the tier lacks only
/// what it has evicted.
const ENOUGH_IN_A_ROW: u32 = 4096;

#[derive(Default)]
pub(crate) struct Backfill {
    unseen: Range<u32>,
    /// Blocks in a row that the tier has.
    in_a_row: u32,
    comparing: Vec<(BlockId, Generation)>,
    comparing_bytes: u64,
}

impl Backfill {
    /// The first `records` are to be looked at, the last of them first.
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
        self.unseen.next_back().map(BlockId)
    }

    /// The tier has the last block that was looked at, or lacks it.
    pub fn saw(&mut self, is_there: bool) {
        self.in_a_row = if is_there { self.in_a_row + 1 } else { 0 };
        if self.in_a_row == ENOUGH_IN_A_ROW {
            self.unseen = 0..0;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_behind_blocks_in_a_row_that_the_tier_has() {
        let mut backfill = Backfill::default();
        backfill.begin(10_000);
        for at in (0..10_000).rev() {
            assert_eq!(backfill.take_next(), Some(BlockId(at)));
            // The newest, and then one in a thousand.
            backfill.saw(at < 9_990 && (at < 5_000 || at % 1_000 > 0));
            assert_eq!(backfill.is_due(1), at > 5_000 - 4_096, "{at}");
            if at == 5_000 - 4_096 {
                break;
            }
        }
    }
}
