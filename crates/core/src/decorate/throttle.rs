//! Keeps a tier below a rate of bytes and a number of operations, by taking fewer: what is not taken is offered again.
//!
//! For stores that others use as well: a shared mount, a server, a bucket. Loads and stores have a budget each, so that
//! writing never holds up reading. A budget may be overdrawn by one operation, so that a block larger than it passes,
//! and is full again after a second without use.

use std::collections::HashSet;
use std::time::Duration;

use super::{Timed, pass_on};
use crate::tier::{Completion, OpId, OpKind, Operation, Tier};

/// None is without limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// Bytes of blocks read from the tier in a second.
    pub load_bytes_per_second: Option<u64>,
    /// Bytes of blocks written to the tier in a second.
    pub store_bytes_per_second: Option<u64>,
    /// Operations of any kind that were taken and not completed.
    pub in_flight: Option<usize>,
}

/// See the module's head. `T` is the tier with the wrappers inside this one.
pub struct Throttle<T> {
    inner: T,
    in_flight_limit: usize,
    now: Duration,
    loads: Budget,
    stores: Budget,
    in_flight: HashSet<OpId>,
}

/// What may be moved now; below zero it is a debt. One second's worth at most.
struct Budget {
    bytes_per_second: Option<u64>,
    left_bytes: f64,
}

impl Budget {
    fn new(bytes_per_second: Option<u64>) -> Budget {
        Budget { bytes_per_second, left_bytes: bytes_per_second.map_or(0.0, |rate| rate as f64) }
    }

    fn allows(&self) -> bool {
        self.bytes_per_second.is_none() || self.left_bytes > 0.0
    }

    fn spend(&mut self, bytes: u64) {
        self.left_bytes -= if self.bytes_per_second.is_some() { bytes as f64 } else { 0.0 };
    }

    fn refill(&mut self, passed: Duration) {
        if let Some(rate) = self.bytes_per_second {
            self.left_bytes = (self.left_bytes + rate as f64 * passed.as_secs_f64()).min(rate as f64);
        }
    }
}

impl<T> Throttle<T> {
    /// Both budgets start full: a second's worth each.
    pub fn new(inner: T, limits: Limits) -> Throttle<T> {
        Throttle {
            inner,
            in_flight_limit: limits.in_flight.unwrap_or(usize::MAX),
            now: Duration::ZERO,
            loads: Budget::new(limits.load_bytes_per_second),
            stores: Budget::new(limits.store_bytes_per_second),
            in_flight: HashSet::new(),
        }
    }

    /// What it wraps.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// What it wraps.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    fn budget(&mut self, kind: OpKind) -> Option<&mut Budget> {
        match kind {
            OpKind::Load { .. } => Some(&mut self.loads),
            OpKind::Store => Some(&mut self.stores),
            OpKind::Exists | OpKind::Remove { .. } => None,
        }
    }

    /// Whether the operation's budget allows it; it is then spent.
    fn charge(&mut self, op: &Operation) -> bool {
        let Some(budget) = self.budget(op.kind) else { return true };
        let is_allowed = budget.allows();
        if is_allowed {
            budget.spend(op.length_bytes);
        }
        is_allowed
    }
}

impl<T: Timed> Tier for Throttle<T> {
    pass_on!(name, capabilities, cancel, health);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let room = self.in_flight_limit - self.in_flight.len();
        let allowed = batch.iter().take(room).take_while(|op| self.charge(op)).count();
        let taken = if allowed > 0 { self.inner.submit(&batch[..allowed]) } else { 0 };
        for op in &batch[taken..allowed] {
            if let Some(budget) = self.budget(op.kind) {
                budget.left_bytes += if budget.bytes_per_second.is_some() { op.length_bytes as f64 } else { 0.0 };
            }
        }
        self.in_flight.extend(batch[..taken].iter().map(|op| op.id));
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        for completion in &completions[from..] {
            self.in_flight.remove(&completion.id);
        }
    }
}

impl<T: Timed> Timed for Throttle<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        let passed = now.saturating_sub(self.now);
        self.loads.refill(passed);
        self.stores.refill(passed);
        self.now = now;
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        self.inner.take_late(late);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, done, op, polled};
    use super::*;
    use crate::tier::Outcome;

    const MS: Duration = Duration::from_millis(1);

    fn ops(kind: OpKind, ids: std::ops::Range<u64>) -> Vec<Operation> {
        ids.map(|id| op(id, kind)).collect()
    }

    #[test]
    fn so_many_are_in_flight_and_no_more() {
        let mut tier = Throttle::new(Told::default(), Limits { in_flight: Some(3), ..Limits::default() });
        assert_eq!(tier.submit(&ops(OpKind::Exists, 0..5)), 3);
        assert_eq!(tier.submit(&ops(LOAD, 5..6)), 0);
        tier.inner.completions = vec![done(0, Outcome::Absent), done(2, Outcome::Absent)];
        polled(&mut tier);
        assert_eq!(tier.submit(&ops(LOAD, 5..9)), 2);
    }

    #[test]
    fn over_any_long_time_the_rate_is_kept_and_reached() {
        let rate = 40 * 4096;
        let limits = Limits { load_bytes_per_second: Some(rate), ..Limits::default() };
        let mut tier = Throttle::new(Told::default(), limits);
        let mut taken = 0;
        for millis in 0..10_000 {
            tier.advance(millis * MS);
            taken += tier.submit(&ops(LOAD, taken..taken + 100)) as u64;
            let most = rate + rate * u64::from(millis) / 1000 + 4096;
            assert!(taken * 4096 <= most, "{taken} blocks after {millis} ms");
        }
        assert!(taken >= 39 * 11, "the burst of a second and ten seconds' worth: {taken}");
    }

    #[test]
    fn stores_do_not_hold_up_loads_and_lookups_cost_no_bytes() {
        let limits = Limits { store_bytes_per_second: Some(4096), ..Limits::default() };
        let mut tier = Throttle::new(Told::default(), limits);
        assert_eq!(tier.submit(&ops(OpKind::Store, 0..3)), 1);
        assert_eq!(tier.submit(&ops(LOAD, 10..400)), 390);
        assert_eq!(tier.submit(&ops(OpKind::Exists, 400..500)), 100);
        let mixed = [op(500, LOAD), op(501, OpKind::Store), op(502, LOAD)];
        assert_eq!(tier.submit(&mixed), 1, "a prefix");
        tier.advance(1001 * MS);
        assert_eq!(tier.submit(&mixed[1..]), 2);
    }

    #[test]
    fn a_block_larger_than_a_seconds_worth_passes_and_is_paid_off() {
        let limits = Limits { load_bytes_per_second: Some(1000), ..Limits::default() };
        let mut tier = Throttle::new(Told::default(), limits);
        assert_eq!(tier.submit(&ops(LOAD, 0..2)), 1);
        tier.advance(3000 * MS);
        assert_eq!(tier.submit(&ops(LOAD, 1..2)), 0, "4096 bytes less a burst of 1000 take 3.1 seconds");
        tier.advance(3100 * MS);
        assert_eq!(tier.submit(&ops(LOAD, 1..2)), 1);
    }

    #[test]
    fn what_the_tier_does_not_take_costs_nothing() {
        let limits = Limits { store_bytes_per_second: Some(3 * 4096), ..Limits::default() };
        let mut tier = Throttle::new(Told { room: Some(0), ..Told::default() }, limits);
        for _ in 0..10 {
            assert_eq!(tier.submit(&ops(OpKind::Store, 0..3)), 0);
        }
        tier.inner.room = None;
        assert_eq!(tier.submit(&ops(OpKind::Store, 0..9)), 3);
    }
}
