//! Chooses which ready blocks the daemon reads next, to find blocks whose bytes changed in the pool.
//!
//! Invariants: the scrub pins, touches and counts nothing, so it changes no decision. A block may therefore be evicted,
//! and its slot filled again, while it is read: wrong bytes count only if the block still has its generation
//! afterwards, which [`Core::drop_corrupt`] checks. Every second piece comes from the walk over all records, so that
//! the walk ends however many blocks are hit.

use super::report::ReadyBlock;
use crate::core::Core;

/// Blocks of one piece: reading their entries in the table takes some 20 µs.
const BLOCKS: usize = 64;
/// Bytes of one piece; the block that goes past it is its last.
const BYTES: u64 = 4 << 20;
/// Records the walk looks at for one piece.
const RECORDS: u32 = 256;
/// A hot block is read again once so many thousandths of the pool's bytes were read since.
const AGAIN_PERMILLE: u32 = 63;

impl Core {
    /// The next ready blocks to compare with their checksums, in one event of bounded work: blocks that were hit lately
    /// and not read lately; every second time, or if there are none, the next blocks of the walk over all records. They
    /// are not held; [`Core::drop_corrupt`] decides whether a mismatch counts. The first call switches the scrub on.
    pub fn scrub_piece(&mut self) -> Vec<ReadyBlock> {
        let mut piece = match self.scrub.is_walks_turn() {
            false => self.scrub_hits(),
            true => Vec::new(),
        };
        self.scrub.set_walks_turn(!piece.is_empty());
        if piece.is_empty() {
            self.scrub_walk(&mut piece);
        }
        piece
    }

    /// As [`Core::scrub_piece`], without the walk: only blocks that were hit lately.
    pub fn scrub_hits(&mut self) -> Vec<ReadyBlock> {
        self.scrub.switch_on();
        let mut piece = Vec::new();
        let again = self.slots.share(AGAIN_PERMILLE);
        let mut left = BYTES;
        while piece.len() < BLOCKS && left > 0 {
            let Some(block) = self.scrub.take_hot() else { break };
            let Some(ready) = self.ready_block(block) else { continue };
            let now = self.journal.stats().scrubbed_bytes;
            if self.scrub.begin_reading(ready.generation, now, again) {
                self.take_scrubbed(ready, &mut piece, &mut left);
            }
        }
        piece
    }

    fn scrub_walk(&mut self, piece: &mut Vec<ReadyBlock>) {
        let end = self.slots.end();
        let mut left = BYTES;
        for _ in 0..RECORDS {
            if piece.len() == BLOCKS || left == 0 {
                break;
            }
            let Some(block) = self.scrub.take_next(end) else { break };
            let ready = self.ready_block(block);
            ready.into_iter().for_each(|ready| self.take_scrubbed(ready, piece, &mut left));
        }
        if self.scrub.end_walk(end) {
            self.journal.stats_mut().scrubs += u64::from(end > 0);
        }
    }

    fn take_scrubbed(&mut self, ready: ReadyBlock, piece: &mut Vec<ReadyBlock>, left: &mut u64) {
        let bytes = self.slots.slot_bytes(ready.block);
        *left = left.saturating_sub(bytes);
        self.journal.stats_mut().scrubbed_bytes += bytes;
        piece.push(ready);
    }
}
