//! Jobs to copy, and their outcomes.
//!
//! A job copies items between tensors and slots of one pool, in one direction. The slice of an item is its blocks in
//! the given order, each with its fragments in the order of its group's refs, without gaps. This order is
//! block-major, so the part of a slot for a run of blocks is one range. A load that needs only the last blocks of a
//! slot is an item with a later offset.

use std::ops::Range;
use std::time::Duration;

use crate::engine::PoolId;

/// Chosen by the submitter; unique among the jobs whose completions were not yet polled.
pub type JobId = u64;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Direction {
    /// From the tensors to the pool, with a checksum of each item's slice.
    Store,
    /// From the pool to the tensors, with the checksum of each item's slice if the job asks for it.
    Load,
}

/// Whose work comes before a job's copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// The tensors may be touched at once.
    Now,
    /// All that was queued on this stream of the device before the submission.
    Stream(u64),
}

/// How far a job must be for a wait to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// Its tensors are not touched any more.
    Released,
    /// Its outcome is known as well.
    Settled,
}

/// A batch of copies with one completion.
pub struct Job {
    pub id: JobId,
    pub direction: Direction,
    pub pool: PoolId,
    /// A host engine has no streams and takes every job as one that may begin at once.
    pub after: After,
    pub items: Vec<Item>,
    /// Rows of the tensors; the items refer to them by range.
    pub block_ids: Vec<u32>,
    /// Whether a load sums its slices, in the same pass; a store always does.
    pub is_summed: bool,
    pub guard: Option<Box<dyn SlotGuard>>,
}

/// One slice: consecutive blocks of one slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Byte offset of the first block in the pool's data mapping.
    pub offset: u64,
    /// Position of the group in [`crate::Tensors`].
    pub group: u16,
    /// Range in the job's `block_ids`; at least one.
    pub blocks: Range<u32>,
    /// Bytes of the slice before and after the item's. A summed load only sums them, since the slice has one
    /// checksum.
    pub beside: [u64; 2],
}

/// Decides for each item whether its slot is still the intended one. Called on the engine's threads, on several at a
/// time. A guard that panics has refused.
pub trait SlotGuard: Send + Sync {
    /// Whether item `item` may be copied. If an item is copied in parts, called before each part. A device engine asks
    /// when the job is submitted.
    fn before(&self, item: usize) -> bool;

    /// Whether the copy of item `item` is valid. Called once, after its last byte is visible to all. `checksum`
    /// covers the slice, `None` for loads that are not summed. A slice checksum record (birth record) is written or
    /// compared here.
    fn after(&self, item: usize, checksum: Option<u64>) -> bool;
}

/// The outcome of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Stored {
        checksum: u64,
    },
    Loaded,
    /// The guard refused before or after the copy: the destination's bytes are meaningless.
    Failed,
}

/// The end of a job, delivered exactly once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Completion {
    pub job_id: JobId,
    pub direction: Direction,
    /// By item.
    pub outcomes: Vec<Outcome>,
    /// Total of the items that did not fail.
    pub bytes: u64,
    /// From the start of the first copy to the end of the last, without the time in the queue.
    pub elapsed: Duration,
}
