//! The pool's table, as effects write it: which slots have ready blocks, and in which order they became ready.
//!
//! Invariant: a block becomes ready in the table by the core's effect alone, after the core has accepted it. A crash
//! between the two loses the block, but never serves a block that the core does not know.

use std::sync::Arc;

use forebay_core::layout::GroupLayout;
use forebay_core::{BlockId, Core, Generation, SlotId, checksum};
use forebay_io::pool::{Entry, Pool};

pub struct Table {
    pool: Arc<Pool>,
    /// Numbers the blocks in the order in which they became ready, across restarts.
    next_sequence: u64,
}

impl Table {
    pub fn new(pool: Arc<Pool>) -> Table {
        Table { pool, next_sequence: 1 }
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// A block of this number was found at start: later ones get higher numbers, as long as there are any.
    pub fn recovered(&mut self, sequence: u64) {
        self.next_sequence = self.next_sequence.max(sequence.saturating_add(1));
    }

    /// For `Effect::Ready`, unless the block has left the pool since.
    pub fn make_ready(&mut self, core: &Core, block: BlockId, (slot, generation): (SlotId, Generation), checksum: u64) {
        if !core.is_resident(block, generation) {
            return;
        }
        let (key, length, tokens) = (core.block_key(block), core.block_length_bytes(block), core.block_tokens(block));
        let sequence = self.next_sequence;
        self.next_sequence = sequence.saturating_add(1);
        self.pool.ready(slot, generation, &Entry { key, length, checksum, sequence, tokens });
    }

    /// The block's checksum, combined from the birth records of its ranks. `None` unless each rank wrote its whole
    /// slice in this generation.
    pub fn born(&self, layout: &GroupLayout, (slot, generation): (SlotId, Generation)) -> Option<u64> {
        if slot.0 >= self.pool.geometry().pages {
            return None;
        }
        let mut whole = None;
        for (rank, bytes) in layout.rank_bytes.iter().enumerate() {
            let birth = self.pool.birth(slot, rank)?;
            if birth.generation != generation || birth.length != *bytes {
                return None;
            }
            whole = Some(whole.map_or(birth.checksum, |sum| checksum::combine(sum, birth.checksum, *bytes)));
        }
        whole
    }
}
