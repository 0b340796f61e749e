//! Which ready blocks the daemon reads next, to find those whose bytes changed in the living pool.
//!
//! Holds true: nothing is pinned, touched or counted for it, so no decision is another one because of it. What is read
//! may therefore be evicted and filled anew meanwhile: that its bytes are wrong counts only if it still has its
//! generation afterwards, which [`Core::drop_corrupt`] looks at. Every second piece is from the walk over all
//! records, so that the walk ends however much is hit.

use std::collections::VecDeque;

use crate::block::BlockId;
use crate::core::Core;
use crate::key::Generation;
use crate::report::ReadyBlock;

#[derive(Default)]
pub(crate) struct Scrub {
    /// Nobody reads, and no hit is noted, until a piece was asked for.
    is_on: bool,
    /// Where the walk stands.
    next: u32,
    is_walks_turn: bool,
    /// One of each batch of hits, the newest last: what is hit often is here often.
    hot: VecDeque<BlockId>,
    batches: usize,
    /// Which of these were read, and how many bytes had been read until then, by generation modulo the length. Where
    /// two meet, the older one may be read again early.
    lately: Vec<(Generation, u64)>,
}

/// Blocks of one piece: reading their entries in the table takes some 20 µs.
const BLOCKS: usize = 64;
/// Bytes of one piece; the block that goes past it is its last.
const BYTES: u64 = 4 << 20;
/// Records the walk looks at for one piece.
const RECORDS: u32 = 256;
/// Hits that wait to be read: what the cache misses for them take stays in the tens of microseconds.
const HOT: usize = 128;
/// 128 KiB: a hot set of so many blocks is read in turn.
const LATELY: usize = 1 << 13;
/// A hot block is read again once so many thousandths of the pool's bytes were read since.
const AGAIN_PERMILLE: u32 = 63;

impl Scrub {
    /// These were hit. One of them stands for all: it costs a batch some nanoseconds.
    #[inline]
    pub fn note(&mut self, batch: &[BlockId]) {
        if !self.is_on {
            return;
        }
        self.batches = self.batches.wrapping_add(1);
        if self.hot.len() == HOT {
            self.hot.pop_front();
        }
        self.hot.push_back(batch[self.batches % batch.len()]);
    }
}

impl Core {
    /// The next ready blocks to compare with their checksums, in one event of bounded work: what was hit lately and
    /// not read lately, and every second time, or if there is no such, what the walk over all records meets. They are
    /// not held; [`Core::drop_corrupt`] tells whether a find counts. The first call switches the scrub on.
    pub fn scrub_piece(&mut self) -> Vec<ReadyBlock> {
        if !self.scrub.is_on {
            self.scrub.is_on = true;
            self.scrub.lately = vec![(Generation(0), 0); LATELY];
        }
        let mut piece = Vec::new();
        if !self.scrub.is_walks_turn {
            self.scrub_hot(&mut piece);
        }
        self.scrub.is_walks_turn = !piece.is_empty();
        if piece.is_empty() {
            self.scrub_walk(&mut piece);
        }
        piece
    }

    fn scrub_hot(&mut self, piece: &mut Vec<ReadyBlock>) {
        let again = self.share(AGAIN_PERMILLE);
        let mut left = BYTES;
        while piece.len() < BLOCKS && left > 0 {
            let Some(block) = self.scrub.hot.pop_front() else { return };
            let Some(ready) = self.ready_block(block) else { continue };
            let (generation, at) = &mut self.scrub.lately[ready.generation.0 as usize % LATELY];
            let now = self.stats.scrubbed_bytes;
            if *generation == ready.generation && now - *at < again {
                continue;
            }
            (*generation, *at) = (ready.generation, now);
            self.take_scrubbed(ready, piece, &mut left);
        }
    }

    fn scrub_walk(&mut self, piece: &mut Vec<ReadyBlock>) {
        let end = self.blocks.end();
        let mut left = BYTES;
        for _ in 0..RECORDS {
            if self.scrub.next >= end || piece.len() == BLOCKS || left == 0 {
                break;
            }
            let ready = self.ready_block(BlockId(self.scrub.next));
            self.scrub.next += 1;
            ready.into_iter().for_each(|ready| self.take_scrubbed(ready, piece, &mut left));
        }
        if self.scrub.next >= end {
            self.scrub.next = 0;
            self.stats.scrubs += u64::from(end > 0);
        }
    }

    fn take_scrubbed(&mut self, ready: ReadyBlock, piece: &mut Vec<ReadyBlock>, left: &mut u64) {
        let bytes = self.slot_bytes(ready.block);
        *left = left.saturating_sub(bytes);
        self.stats.scrubbed_bytes += bytes;
        piece.push(ready);
    }
}
