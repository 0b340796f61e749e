//! Keeps a tier below a rate of bytes and a number of operations, by taking fewer: what is not taken is offered again.
//!
//! For stores that others use as well: a shared mount, a server, a bucket. Loads and stores have a budget each, so that
//! writing never holds up reading. A budget may be overdrawn by one operation, so that a block larger than it passes,
//! and is full again after a second without use.

use std::time::Duration;

use crate::tier::{OpKind, Operation};

/// None is without limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// For all loads together.
    pub load_bytes_per_second: Option<u64>,
    /// For all stores together.
    pub store_bytes_per_second: Option<u64>,
    /// Operations of any kind that were taken and not completed.
    pub in_flight: Option<usize>,
}

/// See the module's head.
pub struct Throttle {
    /// How many more operations the tier may have.
    places: usize,
    loads: Budget,
    stores: Budget,
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

    fn give_back(&mut self, bytes: u64) {
        self.left_bytes += if self.bytes_per_second.is_some() { bytes as f64 } else { 0.0 };
    }

    fn refill(&mut self, passed: Duration) {
        if let Some(rate) = self.bytes_per_second {
            self.left_bytes = (self.left_bytes + rate as f64 * passed.as_secs_f64()).min(rate as f64);
        }
    }
}

impl Throttle {
    /// Full budgets, and nothing in flight.
    pub fn new(limits: Limits) -> Throttle {
        Throttle {
            places: limits.in_flight.unwrap_or(usize::MAX),
            loads: Budget::new(limits.load_bytes_per_second),
            stores: Budget::new(limits.store_bytes_per_second),
        }
    }

    /// How many operations from the front of `batch` may go to the tier. They are charged.
    pub fn admit(&mut self, batch: &[Operation]) -> usize {
        let admitted = batch.iter().take(self.places).take_while(|op| self.charge(op)).count();
        self.places -= admitted;
        admitted
    }

    /// The tier did not take these operations: the charge for them is given back.
    pub fn give_back(&mut self, ops: &[Operation]) {
        self.places += ops.len();
        for op in ops {
            if let Some(budget) = self.budget(op.kind) {
                budget.give_back(op.length_bytes);
            }
        }
    }

    /// The tier ended an attempt.
    pub fn ended(&mut self) {
        self.places += 1;
    }

    /// So much time has passed.
    pub fn refill(&mut self, passed: Duration) {
        self.loads.refill(passed);
        self.stores.refill(passed);
    }

    fn budget(&mut self, kind: OpKind) -> Option<&mut Budget> {
        match kind {
            OpKind::Load => Some(&mut self.loads),
            OpKind::Store => Some(&mut self.stores),
            OpKind::Exists | OpKind::Remove | OpKind::Touch { .. } => None,
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

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, bare, done, op, polled, stack};
    use super::super::{Rules, Stack, Timed};
    use super::*;
    use crate::tier::{Outcome, Tier};

    const MS: Duration = Duration::from_millis(1);

    fn throttle(limits: Limits) -> Stack<Told> {
        stack(Rules { limits, ..bare() })
    }

    fn ops(kind: OpKind, ids: std::ops::Range<u64>) -> Vec<Operation> {
        ids.map(|id| op(id, kind)).collect()
    }

    #[test]
    fn so_many_are_in_flight_and_no_more() {
        let mut tier = throttle(Limits { in_flight: Some(3), ..Limits::default() });
        assert_eq!(tier.submit(&ops(OpKind::Exists, 0..5)), 3);
        assert_eq!(tier.submit(&ops(LOAD, 5..6)), 0);
        tier.tier_mut().completions = vec![done(0, Outcome::Absent), done(2, Outcome::Absent)];
        polled(&mut tier);
        assert_eq!(tier.submit(&ops(LOAD, 5..9)), 2);
    }

    #[test]
    fn over_any_long_time_the_rate_is_kept_and_reached() {
        let rate = 40 * 4096;
        let limits = Limits { load_bytes_per_second: Some(rate), ..Limits::default() };
        let mut tier = throttle(limits);
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
        let mut tier = throttle(limits);
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
        let mut tier = throttle(limits);
        assert_eq!(tier.submit(&ops(LOAD, 0..2)), 1);
        tier.advance(3000 * MS);
        assert_eq!(tier.submit(&ops(LOAD, 1..2)), 0, "4096 bytes less a burst of 1000 take 3.1 seconds");
        tier.advance(3100 * MS);
        assert_eq!(tier.submit(&ops(LOAD, 1..2)), 1);
    }

    #[test]
    fn what_the_tier_does_not_take_costs_nothing() {
        let limits = Limits { store_bytes_per_second: Some(3 * 4096), in_flight: Some(4), ..Limits::default() };
        let mut tier = throttle(limits);
        tier.tier_mut().room = Some(0);
        for _ in 0..10 {
            assert_eq!(tier.submit(&ops(OpKind::Store, 0..3)), 0);
        }
        tier.tier_mut().room = None;
        assert_eq!(tier.submit(&ops(OpKind::Store, 0..9)), 3);
    }
}
