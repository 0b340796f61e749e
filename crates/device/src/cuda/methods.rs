//! The ways to queue copies on a stream that the driver has itself; `kernel` is another.
//!
//! Invariants: whatever the method, the copies are queued on the stream and nothing waits for them. A store reads its
//! sources in the order of the stream, since the model goes on writing the tensors. A load may read its sources at any
//! time: the slots are leased and do not change.

use super::driver::{Answer, Batch, Driver, SourceOrder, StreamHandle};
use super::ops::Op;
use super::pitched;
use crate::job::Direction;

/// The copies of one call to the driver: a job of 8,192 tokens of a large model has 40,000, and a limit bounds what one
/// call takes.
const BATCH_OPS: usize = 16_384;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// Multiprocessors copy, for loads alone.
    Kernel,
    /// `cuMemcpyBatchAsync`, of CUDA 12.8 and newer.
    Batch,
    /// `cuMemcpyAsync` for each copy.
    Loop,
    /// `cuMemcpy2DAsync` for copies in evenly spaced rows.
    Pitched,
}

impl Method {
    pub const ALL: [Method; 4] = [Method::Kernel, Method::Batch, Method::Loop, Method::Pitched];

    pub fn name(self) -> &'static str {
        match self {
            Method::Kernel => "kernel",
            Method::Batch => "batch",
            Method::Loop => "loop",
            Method::Pitched => "pitched",
        }
    }

    /// Whether it leaves no copy to the next one.
    pub fn takes_all(self) -> bool {
        !matches!(self, Method::Kernel | Method::Pitched)
    }

    /// Whether it copies in this direction at all.
    pub fn copies(self, direction: Direction) -> bool {
        self != Method::Kernel || direction == Direction::Load
    }
}

/// Queues the copies in batches. After an error some may be queued: only a wait for the stream tells when they have
/// ended.
pub fn batches(driver: &dyn Driver, direction: Direction, ops: &[Op], stream: StreamHandle) -> Answer<()> {
    ops.chunks(BATCH_OPS).try_for_each(|ops| batch(driver, direction, ops, stream))
}

/// Queues the copies one by one, under the same rules.
pub fn singles(driver: &dyn Driver, direction: Direction, ops: &[Op], stream: StreamHandle) -> Answer<()> {
    ops.iter().try_for_each(|op| {
        let (to, from) = op.ends(direction);
        driver.copy(to, from, op.bytes, stream)
    })
}

/// Queues copies in rows, under the same rules, and returns those that are in none.
pub fn rows(
    driver: &dyn Driver,
    direction: Direction,
    ops: &[Op],
    max_pitch: u64,
    stream: StreamHandle,
) -> Answer<Vec<Op>> {
    let (calls, left) = pitched::rows(direction, ops, max_pitch);
    calls.iter().try_for_each(|rows| driver.copy_rows(rows, stream)).map(|()| left)
}

fn batch(driver: &dyn Driver, direction: Direction, ops: &[Op], stream: StreamHandle) -> Answer<()> {
    let order = match direction {
        Direction::Store => SourceOrder::Stream,
        Direction::Load => SourceOrder::Any,
    };
    let (to, from) = ops.iter().map(|op| op.ends(direction)).unzip();
    let bytes = ops.iter().map(|op| op.bytes as usize).collect();
    driver.copy_batch(&mut Batch { to, from, bytes }, order, stream)
}
