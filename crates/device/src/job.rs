//! What is to be copied, and what came of it.
//!
//! A job copies items between tensors and slots of one pool, in one direction. The slice of an item is its
//! blocks in the order given, each with its fragments in the order of its group's refs, without gaps:
//! block-major, so that the part of a slot that belongs to a run of blocks is one range, and a load that needs
//! only the last blocks of a slot is an item with a later offset.

use std::ops::Range;
use std::time::Duration;

use crate::engine::PoolId;

/// Chosen by the submitter; unique among the jobs whose completions were not yet polled.
pub type JobId = u64;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Direction {
    /// From the tensors to the pool, with a checksum of each item's slice.
    Store,
    /// From the pool to the tensors, with the checksum of each item's slice if the job says so.
    Load,
}

/// A batch of copies with one completion.
pub struct Job {
    pub id: JobId,
    pub direction: Direction,
    pub pool: PoolId,
    pub items: Vec<Item>,
    /// Rows of the tensors, which the items refer to by range.
    pub block_ids: Vec<u32>,
    /// Whether a load sums its slices, in the same pass; a store always does.
    pub is_summed: bool,
    pub guard: Option<Box<dyn SlotGuard>>,
}

/// One slice: consecutive blocks of one slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Byte offset in the pool's data mapping at which the first block begins.
    pub offset: u64,
    /// Position of the group in [`crate::Tensors`].
    pub group: u16,
    /// Which of the job's `block_ids`; at least one.
    pub blocks: Range<u32>,
    /// Bytes of the slice before and behind the item's that a summed load only sums, since the slice has one checksum.
    pub beside: [u64; 2],
}

/// Decides for each item whether its slot is still the one that was meant. Called on the engine's threads, from
/// several at a time; a guard that panics has refused.
pub trait SlotGuard: Send + Sync {
    /// Whether item `item` may be copied. Asked before each part of it where an item is copied in parts.
    fn before(&self, item: usize) -> bool;

    /// Whether the copy of item `item` counts; asked once, after its last byte is visible to all. `checksum` is
    /// of the slice, `None` for loads that are not summed. The place to write a birth record, or to compare with one.
    fn after(&self, item: usize, checksum: Option<u64>) -> bool;
}

/// What came of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Stored {
        checksum: u64,
    },
    Loaded,
    /// The guard refused before or after the copy: the destination's bytes mean nothing.
    Failed,
}

/// The end of a job, delivered exactly once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Completion {
    pub job_id: JobId,
    pub direction: Direction,
    /// By item.
    pub outcomes: Vec<Outcome>,
    /// Of the items that did not fail.
    pub bytes: u64,
    /// From the start of the first copy to the end of the last; time in the queue is not in it.
    pub elapsed: Duration,
}
