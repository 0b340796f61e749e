//! A tier with all that the daemon puts around it.

use std::time::Duration;

use super::{Attempts, Breaker, Counts, Deadline, Limits, Retry, Stats, Throttle, Timed, pass_on};
use crate::tier::{Completion, OpId, Operation, Tier};

/// See the module's head, which says why the wrappers come in this order.
pub struct Stack<T> {
    inner: Stats<Breaker<Deadline<Retry<Throttle<T>>>>>,
}

impl<T: Timed> Stack<T> {
    /// `deadline` is for loads and probes; `seed` spreads the pauses between attempts.
    pub fn new(tier: T, rates: Limits, seed: u64, attempts: Attempts, deadline: Duration) -> Stack<T> {
        let tier = Retry::new(Throttle::new(tier, rates), seed, attempts);
        Stack { inner: Stats::new(Breaker::new(Deadline::new(tier, deadline))) }
    }

    /// The tier itself.
    pub fn tier(&self) -> &T {
        self.inner.inner().inner().inner().inner().inner()
    }

    /// The tier itself. What is submitted to it here passes the wrappers by.
    pub fn tier_mut(&mut self) -> &mut T {
        self.inner.inner_mut().inner_mut().inner_mut().inner_mut().inner_mut()
    }

    /// What was counted, by kind of operation as it stands in metrics.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &Counts)> {
        Stats::<T>::KINDS.into_iter().zip(self.inner.counts())
    }

    /// How often the breaker has opened.
    pub fn opened(&self) -> u64 {
        self.inner.inner().opened()
    }
}

impl<T: Timed> Tier for Stack<T> {
    pass_on!(name, capabilities, cancel, health);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        self.inner.submit(batch)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inner.poll(completions);
    }
}

impl<T: Timed> Timed for Stack<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        self.inner.take_late(late);
    }
}
