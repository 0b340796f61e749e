//! The scrub's state: which blocks were hit lately, which were read lately, and how far its walk has come.
//!
//! Invariant: all of it is advice. A block that is named here may be gone, or may be another one by now. Nothing here
//! pins, touches or counts a block.

use std::collections::VecDeque;

use crate::key::{BlockId, Generation};

/// Hits that wait to be read; few enough that their cache misses take only tens of microseconds.
const HOT: usize = 128;
/// 128 KiB: a hot set of so many blocks is read in turn.
const LATELY: usize = 1 << 13;

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
    /// Which generations were read, and how many bytes had been read until then, by generation modulo the length. If
    /// two generations share a place, the older one may be read again early.
    lately: Vec<(Generation, u64)>,
}

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

    /// Somebody reads from now on.
    pub fn switch_on(&mut self) {
        if !self.is_on {
            self.is_on = true;
            self.lately = vec![(Generation(0), 0); LATELY];
        }
    }

    /// Whether the next piece is the walk's.
    pub fn is_walks_turn(&self) -> bool {
        self.is_walks_turn
    }

    pub fn set_walks_turn(&mut self, is_walks_turn: bool) {
        self.is_walks_turn = is_walks_turn;
    }

    /// The hit that waited longest.
    pub fn take_hot(&mut self) -> Option<BlockId> {
        self.hot.pop_front()
    }

    /// Whether to read this generation when `now` bytes have been read: not again before `again` more bytes were read.
    pub fn begin_reading(&mut self, generation: Generation, now: u64, again: u64) -> bool {
        let (lately, at) = &mut self.lately[generation.0 as usize % LATELY];
        if *lately == generation && now - *at < again {
            return false;
        }
        (*lately, *at) = (generation, now);
        true
    }

    /// The next record of the walk, if it comes before `end`.
    pub fn take_next(&mut self, end: u32) -> Option<BlockId> {
        let next = self.next;
        (next < end).then(|| {
            self.next += 1;
            BlockId(next)
        })
    }

    /// True if the walk has come to `end`; then it begins anew.
    pub fn end_walk(&mut self, end: u32) -> bool {
        let is_over = self.next >= end;
        self.next = if is_over { 0 } else { self.next };
        is_over
    }
}
