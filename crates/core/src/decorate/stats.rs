//! Counts what a tier is asked, how it ends, and how long it takes.

use std::collections::HashMap;
use std::time::Duration;

use super::{Timed, pass_on};
use crate::histogram::Histogram;
use crate::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};

/// Operations of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations that the tier took.
    pub taken: u64,
    /// Asked for while the tier's queue was full.
    pub refused: u64,
    /// Operations that ended as they should.
    pub done: u64,
    /// Bytes of the blocks of those.
    pub done_bytes: u64,
    /// Operations on a block that was not there.
    pub absent: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// From submission to completion, of those that were done.
    pub time: Histogram,
}

/// See the module's head. `T` is the tier with the wrappers inside this one.
pub struct Stats<T> {
    inner: T,
    now: Duration,
    under_way: HashMap<OpId, (usize, u64, Duration)>,
    counts: [Counts; 4],
}

impl<T> Stats<T> {
    /// As they stand in metrics, in the order of [`Stats::counts`].
    pub const KINDS: [&'static str; 4] = ["load", "store", "exists", "remove"];

    /// Nothing is counted yet.
    pub fn new(inner: T) -> Stats<T> {
        Stats { inner, now: Duration::ZERO, under_way: HashMap::new(), counts: Default::default() }
    }

    /// Counts by kind of operation, in the order of [`Stats::KINDS`].
    pub fn counts(&self) -> &[Counts; 4] {
        &self.counts
    }

    /// Operations taken and not completed.
    pub fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    /// What it wraps.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// What it wraps.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: Timed> Tier for Stats<T> {
    pass_on!(name, capabilities, cancel, health);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = self.inner.submit(batch);
        for op in &batch[..taken] {
            self.counts[number(op.kind)].taken += 1;
            self.under_way.insert(op.id, (number(op.kind), op.length_bytes, self.now));
        }
        for op in &batch[taken..] {
            self.counts[number(op.kind)].refused += 1;
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        for Completion { id, outcome } in &completions[from..] {
            let Some((kind, bytes, since)) = self.under_way.remove(id) else { continue };
            let counts = &mut self.counts[kind];
            match outcome {
                Outcome::Absent => counts.absent += 1,
                Outcome::Failed(_) => counts.failed += 1,
                _ => {
                    counts.done += 1;
                    counts.done_bytes += bytes;
                    counts.time.record(self.now.saturating_sub(since).as_micros() as u64);
                }
            }
        }
    }
}

impl<T: Timed> Timed for Stats<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        self.now = now;
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        self.inner.take_late(late);
    }
}

fn number(kind: OpKind) -> usize {
    match kind {
        OpKind::Load { .. } => 0,
        OpKind::Store => 1,
        OpKind::Exists => 2,
        OpKind::Remove { .. } => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, done, op, polled};
    use super::*;
    use crate::error::ErrorKind;
    use crate::tier::Location;

    #[test]
    fn what_is_taken_is_done_absent_failed_or_under_way() {
        let mut tier = Stats::new(Told { room: Some(3), ..Told::default() });
        let batch = [op(1, LOAD), op(2, LOAD), op(3, LOAD), op(4, OpKind::Store)];
        assert_eq!(tier.submit(&batch), 3);
        tier.inner.room = None;
        assert_eq!(tier.submit(&batch[3..]), 1);
        tier.advance(Duration::from_millis(3));
        let loaded = Outcome::Loaded { length_bytes: 4096, checksum: 0 };
        tier.inner.completions =
            vec![done(1, loaded), done(2, Outcome::Absent), done(4, Outcome::Stored(Location(0, 0)))];
        polled(&mut tier);
        assert_eq!(tier.in_flight(), 1);
        tier.inner.completions = vec![done(3, Outcome::Failed(ErrorKind::Io))];
        polled(&mut tier);
        let [load, store, ..] = tier.counts();
        assert_eq!((load.taken, load.done, load.absent, load.failed, load.done_bytes), (3, 1, 1, 1, 4096));
        assert_eq!((store.taken, store.refused, store.done), (1, 1, 1));
        assert_eq!((load.time.count(), load.time.sum_seconds()), (1, 0.003));
        assert_eq!(tier.in_flight(), 0);
    }
}
