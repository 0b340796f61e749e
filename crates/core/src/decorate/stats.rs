//! Counts what a tier is asked, how it ends, and how long it takes.

use std::time::Duration;

use crate::histogram::Histogram;
use crate::tier::{OpKind, Operation, Outcome};

/// As they stand in metrics, by [`number`].
const KINDS: [&str; 5] = ["load", "store", "exists", "remove", "touch"];

/// Operations of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Taken, by the tier or by the open breaker in its place.
    pub taken: u64,
    /// Asked for while the tier's queue was full.
    pub refused: u64,
    /// Ended as was asked for.
    pub done: u64,
    /// Bytes that were moved by those that were done: a question or a touch names a block, and moves none of it.
    pub done_bytes: u64,
    /// Ended because the tier does not have the block.
    pub absent: u64,
    /// Ended with an error.
    pub failed: u64,
    /// From submission to completion, of those that were done.
    pub time: Histogram,
}

/// See the module's head.
#[derive(Default)]
pub struct Stats {
    counts: [Counts; KINDS.len()],
}

impl Stats {
    /// By kind of operation.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &Counts)> {
        KINDS.into_iter().zip(&self.counts)
    }

    /// The first `taken` of `batch` were taken.
    pub fn submitted(&mut self, batch: &[Operation], taken: usize) {
        batch[..taken].iter().for_each(|op| self.counts[number(op.kind)].taken += 1);
        batch[taken..].iter().for_each(|op| self.counts[number(op.kind)].refused += 1);
    }

    /// The operation ended after `time`.
    pub fn ended(&mut self, op: &Operation, time: Duration, outcome: Outcome) {
        let counts = &mut self.counts[number(op.kind)];
        match outcome {
            Outcome::Absent => counts.absent += 1,
            Outcome::Failed(_) => counts.failed += 1,
            _ => {
                counts.done += 1;
                if matches!(op.kind, OpKind::Load | OpKind::Store) {
                    counts.done_bytes += op.length_bytes;
                }
                counts.time.record(time.as_micros() as u64);
            }
        }
    }
}

fn number(kind: OpKind) -> usize {
    match kind {
        OpKind::Load => 0,
        OpKind::Store => 1,
        OpKind::Exists => 2,
        OpKind::Remove => 3,
        OpKind::Touch { .. } => 4,
    }
}
