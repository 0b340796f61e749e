//! Submits operations to a tier in order; what the tier does not take yet waits here, each with the time since then.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_core::tier::{OpId, Operation, Tier};

#[derive(Default)]
pub(super) struct Submissions {
    ops: VecDeque<Operation>,
    since: VecDeque<Duration>,
}

impl Submissions {
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    pub fn push(&mut self, op: Operation, now: Duration) {
        self.ops.push_back(op);
        self.since.push_back(now);
    }

    /// Hands the tier what it takes.
    pub fn submit(&mut self, tier: &mut impl Tier) {
        self.submit_some(usize::MAX, tier);
    }

    /// The same with the first `most` of them.
    pub fn submit_some(&mut self, most: usize, tier: &mut impl Tier) {
        if self.ops.is_empty() {
            return;
        }
        let count = most.min(self.ops.len());
        let taken = tier.submit(&self.ops.make_contiguous()[..count]);
        self.ops.drain(..taken);
        self.since.drain(..taken);
    }

    /// Takes out those of which `is_it` says yes, in their order.
    pub fn take(&mut self, is_it: impl Fn(&Operation) -> bool) -> Vec<Operation> {
        let its: Vec<Operation> = self.ops.iter().copied().filter(&is_it).collect();
        if !its.is_empty() {
            let kept = std::mem::take(self);
            let kept = kept.ops.into_iter().zip(kept.since).filter(|(op, _)| !is_it(op));
            kept.for_each(|(op, since)| self.push(op, since));
        }
        its
    }

    /// Takes out what has waited since before `since`.
    pub fn take_stale(&mut self, since: Duration, stale: &mut Vec<OpId>) {
        while self.since.pop_front_if(|begun| *begun < since).is_some() {
            stale.extend(self.ops.pop_front().map(|op| op.id));
        }
    }
}
