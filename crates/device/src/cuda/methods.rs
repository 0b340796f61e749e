//! The ways to queue copies on a stream that the driver has itself; `kernel` is another.
//!
//! Invariants: whatever the method, the copies are queued on the stream and nothing waits for them. A store reads its
//! sources in the order of the stream, since the model goes on writing the tensors. A load may read its sources at any
//! time: the slots are leased and do not change.

use super::driver::{Answer, Batch, Driver, SourceOrder, StreamHandle};
use super::ops::Op;
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
}

impl Method {
    pub const ALL: [Method; 3] = [Method::Kernel, Method::Batch, Method::Loop];

    pub fn name(self) -> &'static str {
        match self {
            Method::Kernel => "kernel",
            Method::Batch => "batch",
            Method::Loop => "loop",
        }
    }

    /// Whether it leaves no copy to the next one.
    pub fn takes_all(self) -> bool {
        self != Method::Kernel
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

fn batch(driver: &dyn Driver, direction: Direction, ops: &[Op], stream: StreamHandle) -> Answer<()> {
    let order = match direction {
        Direction::Store => SourceOrder::Stream,
        Direction::Load => SourceOrder::Any,
    };
    let (to, from) = ops.iter().map(|op| op.ends(direction)).unzip();
    let bytes = ops.iter().map(|op| op.bytes as usize).collect();
    driver.copy_batch(&mut Batch { to, from, bytes }, order, stream)
}
