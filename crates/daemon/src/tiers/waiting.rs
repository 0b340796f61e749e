//! Operations that a tier has not taken yet, in their order, and since when they wait.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_core::tier::{OpId, Operation, Tier};

#[derive(Default)]
pub(super) struct Waiting {
    ops: VecDeque<Operation>,
    since: VecDeque<Duration>,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    pub fn push(&mut self, op: Operation, now: Duration) {
        self.ops.push_back(op);
        self.since.push_back(now);
    }

    /// Hands the tier what it takes.
    pub fn offer(&mut self, tier: &mut impl Tier) {
        if self.ops.is_empty() {
            return;
        }
        let taken = tier.submit(self.ops.make_contiguous());
        self.ops.drain(..taken);
        self.since.drain(..taken);
    }

    /// Takes out what is wanted, in order.
    pub fn withdraw(&mut self, is_wanted: impl Fn(&Operation) -> bool) -> Vec<OpId> {
        let (ops, since) = (std::mem::take(&mut self.ops), std::mem::take(&mut self.since));
        let mut withdrawn = Vec::new();
        for (op, since) in ops.into_iter().zip(since) {
            if is_wanted(&op) {
                withdrawn.push(op.id);
            } else {
                self.push(op, since);
            }
        }
        withdrawn
    }

    /// Takes out what has waited since before `since`.
    pub fn take_stale(&mut self, since: Duration, stale: &mut Vec<OpId>) {
        while self.since.pop_front_if(|begun| *begun < since).is_some() {
            stale.extend(self.ops.pop_front().map(|op| op.id));
        }
    }
}
