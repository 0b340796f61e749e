//! A tier with the rules around it, and one table of the operations in flight.
//!
//! Only this file knows the order of the rules. The counts see what the driver sees. The breaker sees late operations,
//! and one failure for all attempts at an operation. The deadline covers all attempts, and its cancelling ends them.
//! The throttle holds up second attempts as well as first ones.
//!
//! Invariant: an operation is in the table from the moment the tier takes its first attempt until it ends, also while
//! it waits for its next attempt. An operation that the open breaker refused is never in the table.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use super::Timed;
use super::breakers::Breakers;
use super::deadline::Deadline;
use super::retry::{Attempts, InFlight, Retry, State, first_id};
use super::stats::{Counts, Stats};
use super::throttle::{Limits, Throttle};
use crate::error::ErrorKind;
use crate::tier::{Capabilities, Completion, Health, OpId, Operation, Outcome, Tier};

/// The rules around one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// How much of the tier may be used.
    pub limits: Limits,
    /// How often a failed operation is tried.
    pub attempts: Attempts,
    /// Spreads the pauses between attempts.
    pub seed: u64,
    /// How long a load or a probe may take.
    pub deadline: Duration,
    /// Whether a tier that fails again and again is left alone for a while.
    pub has_breaker: bool,
}

/// See the module's head.
pub struct Stack<T> {
    tier: T,
    pub(super) now: Duration,
    pub(super) in_flight: HashMap<OpId, InFlight>,
    throttle: Throttle,
    pub(super) retry: Retry,
    pub(super) deadline: Deadline,
    breakers: Breakers,
    stats: Stats,
    /// Late operations that `take_late` has not returned yet.
    late: Vec<OpId>,
    /// Operations that were submitted while a breaker kept them from the tier. They end at the next poll.
    refused: Vec<Operation>,
}

impl<T: Timed> Stack<T> {
    /// Panics unless `rules.attempts.most` is 1 to 16.
    pub fn new(tier: T, rules: Rules) -> Stack<T> {
        Stack {
            tier,
            now: Duration::ZERO,
            in_flight: HashMap::new(),
            throttle: Throttle::new(rules.limits),
            retry: Retry::new(rules.attempts, rules.seed),
            deadline: Deadline::new(rules.deadline),
            breakers: Breakers::new(rules.has_breaker),
            stats: Stats::default(),
            late: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// The tier itself.
    pub fn tier(&self) -> &T {
        &self.tier
    }

    /// The tier itself. What is submitted to it here passes the rules by.
    pub fn tier_mut(&mut self) -> &mut T {
        &mut self.tier
    }

    /// The counts of each kind of operation, under its name in metrics.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &Counts)> {
        self.stats.counts()
    }

    /// How often a breaker has opened.
    pub fn opened(&self) -> u64 {
        self.breakers.opened()
    }

    /// What failed last before writes were kept from the tier; none while they are not. Reads: see [`Tier::health`].
    pub fn why_no_writes(&self) -> Option<ErrorKind> {
        self.breakers.why_no_writes()
    }

    /// Appends loads and probes that are late, each once; their completions still come.
    pub fn take_late(&mut self, late: &mut Vec<OpId>) {
        late.append(&mut self.late);
    }

    /// Hands the tier what the throttle allows; returns how many operations the tier took.
    fn offer(&mut self, batch: &[Operation]) -> usize {
        let allowed = self.throttle.admit(batch);
        let taken = if allowed > 0 { self.tier.submit(&batch[..allowed]) } else { 0 };
        self.throttle.give_back(&batch[taken..allowed]);
        taken
    }

    /// The tier ended an attempt: the operation waits for its next attempt, or ends.
    fn attempt_ended(&mut self, Completion { id, outcome }: Completion, completions: &mut Vec<Completion>) {
        let Entry::Occupied(mut entry) = self.in_flight.entry(first_id(id)) else {
            panic!("a tier completes what it was given, once: {id:?}")
        };
        self.throttle.ended();
        match self.retry.plan(entry.get(), outcome, self.now) {
            Some(until) => entry.get_mut().state = State::Waiting(until),
            None => {
                let InFlight { op, since, .. } = entry.remove();
                self.heard(&op, outcome);
                self.ended(&op, since, outcome, completions);
            }
        }
    }

    /// Ends operations that are due for an attempt but have no waiter any more, or no tier: the tier is sick, or has
    /// taken nothing for too long.
    fn give_up(&mut self, completions: &mut Vec<Completion>) {
        let is_sick = self.tier.health() != Health::Healthy;
        let is_over = |id: &OpId| is_sick || self.retry.is_over(&self.in_flight[id], self.now);
        let over: Vec<_> = self.retry.due(self.now).filter(|(_, id)| is_over(id)).collect();
        for key in over {
            let outcome = self.retry.take(key);
            let InFlight { op, since, .. } = self.in_flight.remove(&key.1).expect("what waits is in flight");
            self.heard(&op, outcome);
            self.ended(&op, since, outcome, completions);
        }
    }

    /// Hands the tier the attempts that are due, as far as the tier takes them.
    fn try_again(&mut self) {
        for key in self.retry.due(self.now).collect::<Vec<_>>() {
            let attempt = self.in_flight[&key.1].next_attempt();
            if self.offer(&[attempt]) == 0 {
                break;
            }
            self.retry.take(key);
            let in_flight = self.in_flight.get_mut(&key.1).expect("it was found there");
            (in_flight.attempts, in_flight.state) = (in_flight.attempts + 1, State::AtTier);
        }
    }

    /// The tier ended an operation.
    fn heard(&mut self, op: &Operation, outcome: Outcome) {
        let is_shared = self.tier.capabilities().is_shared;
        self.breakers.heard(op.kind, outcome, is_shared, self.now);
    }

    fn ended(&mut self, op: &Operation, since: Duration, outcome: Outcome, completions: &mut Vec<Completion>) {
        self.stats.ended(op, self.now.saturating_sub(since), outcome);
        completions.push(Completion { id: op.id, outcome });
    }
}

impl<T: Timed> Tier for Stack<T> {
    fn name(&self) -> &'static str {
        self.tier.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.tier.capabilities()
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let mut taken = 0;
        while taken < batch.len() {
            // As many as have the same fate.
            let rest = &batch[taken..];
            let is_refused = self.breakers.refuse(rest[0].kind);
            let same = rest.iter().take_while(|op| self.breakers.refuse(op.kind) == is_refused).count();
            if is_refused {
                self.refused.extend(&rest[..same]);
                taken += same;
                continue;
            }
            let offered = self.offer(&rest[..same]);
            for op in &rest[..offered] {
                self.deadline.begin(op, self.now);
                self.in_flight.insert(op.id, InFlight::new(op, self.now));
            }
            taken += offered;
            if offered < same {
                break;
            }
        }
        self.stats.submitted(batch, taken);
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let mut attempts = Vec::new();
        self.tier.poll(&mut attempts);
        attempts.into_iter().for_each(|attempt| self.attempt_ended(attempt, completions));
        self.give_up(completions);
        self.try_again();
        self.deadline.forget(|id| !self.in_flight.contains_key(id));
        for op in std::mem::take(&mut self.refused) {
            self.ended(&op, self.now, Outcome::Failed(ErrorKind::Unavailable), completions);
        }
    }

    fn cancel(&mut self, id: OpId) {
        let Some(in_flight) = self.in_flight.get_mut(&id) else { return };
        in_flight.is_final = true;
        match in_flight.state {
            // It ends with what it had, at the next poll.
            State::Waiting(until) => in_flight.state = State::Waiting(self.retry.hurry((until, id))),
            State::AtTier => self.tier.cancel(in_flight.last_id()),
        }
    }

    fn health(&self) -> Health {
        // Without reads the tier is of no use; without writes it is.
        self.breakers.why_no_reads().map_or_else(|| self.tier.health(), Health::Sick)
    }
}

impl<T: Timed> Timed for Stack<T> {
    fn advance(&mut self, now: Duration) {
        self.tier.advance(now);
        self.throttle.refill(now.saturating_sub(self.now));
        self.breakers.advance(now);
        self.now = now;
        while let Some(id) = self.deadline.take_due(now) {
            if let Some(in_flight) = self.in_flight.get(&id) {
                self.breakers.late(in_flight.op.kind, now);
                self.late.push(id);
                self.cancel(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, bare, done, op, polled, stack};
    use super::*;
    use crate::tier::OpKind;

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);
    const MS: Duration = Duration::from_millis(1);

    fn counts(tier: &Stack<Told>) -> Vec<Counts> {
        tier.counts().map(|(_, counts)| counts.clone()).collect()
    }

    /// The tier fails all that it has.
    fn fail(tier: &mut Stack<Told>) -> Vec<Completion> {
        let told = tier.tier_mut();
        told.completions = told.taken.drain(..).map(|op| Completion { id: op.id, outcome: IO }).collect();
        polled(tier)
    }

    #[test]
    fn what_is_taken_is_done_absent_failed_or_in_flight() {
        let mut tier = stack(bare());
        tier.tier_mut().room = Some(3);
        let batch = [op(1, LOAD), op(2, LOAD), op(3, LOAD), op(4, OpKind::Store)];
        assert_eq!(tier.submit(&batch), 3);
        tier.tier_mut().room = None;
        assert_eq!(tier.submit(&batch[3..]), 1);
        tier.advance(3 * MS);
        let loaded = Outcome::Loaded { length_bytes: 4096, checksum: 0 };
        tier.tier_mut().completions = vec![done(1, loaded), done(2, Outcome::Absent), done(4, Outcome::Stored)];
        polled(&mut tier);
        assert_eq!(tier.in_flight.len(), 1);
        tier.tier_mut().completions = vec![done(3, IO)];
        polled(&mut tier);
        let [load, store, ..] = &counts(&tier)[..] else { panic!("four kinds") };
        assert_eq!((load.taken, load.done, load.absent, load.failed, load.done_bytes), (3, 1, 1, 1, 4096));
        assert_eq!((store.taken, store.refused, store.done), (1, 1, 1));
        assert_eq!((load.time.count(), load.time.sum_seconds()), (1, 0.003));
        assert_eq!(tier.in_flight.len(), 0);
    }

    #[test]
    fn all_attempts_are_one_operation_for_the_counts_and_the_breaker() {
        let mut tier = stack(Rules { attempts: Attempts::default(), has_breaker: true, ..bare() });
        tier.submit(&(0..8).map(|id| op(id, LOAD)).collect::<Vec<_>>());
        assert_eq!(fail(&mut tier), []);
        tier.advance(100 * MS);
        polled(&mut tier);
        assert_eq!(tier.tier().taken.len(), 8, "tried again");
        assert_eq!(fail(&mut tier), []);
        assert_eq!((tier.health(), tier.opened()), (Health::Healthy, 0), "16 attempts have failed, and no operation");
        tier.advance(200 * MS);
        polled(&mut tier);
        assert_eq!(fail(&mut tier).len(), 8);
        assert_eq!((tier.health(), tier.opened()), (Health::Sick(ErrorKind::Io), 1));
        assert_eq!((counts(&tier)[0].taken, counts(&tier)[0].failed), (8, 8));
    }

    #[test]
    fn the_deadline_covers_all_attempts_and_ends_them() {
        let mut tier = stack(Rules { attempts: Attempts::default(), deadline: 5 * MS, ..bare() });
        tier.submit(&[op(1, LOAD)]);
        assert_eq!(fail(&mut tier), [], "the next attempt comes after 5 ms at the earliest");
        tier.advance(5 * MS);
        let mut late = Vec::new();
        tier.take_late(&mut late);
        assert_eq!(late, [OpId(1)]);
        assert_eq!(polled(&mut tier), [done(1, IO)]);
        tier.advance(1000 * MS);
        assert_eq!(polled(&mut tier), []);
        assert!(tier.tier().taken.is_empty(), "not tried again");
    }

    #[test]
    fn a_second_attempt_is_held_up_by_the_throttle_as_well() {
        let limits = Limits { load_bytes_per_second: Some(1000), ..Limits::default() };
        let mut tier =
            stack(Rules { limits, attempts: Attempts { within: 5000 * MS, ..Attempts::default() }, ..bare() });
        tier.submit(&[op(1, LOAD)]);
        fail(&mut tier);
        let mut now = Duration::ZERO;
        while tier.tier().taken.is_empty() {
            now += MS;
            tier.advance(now);
            assert_eq!(polled(&mut tier), []);
        }
        assert!(now > 3000 * MS, "4096 bytes less a burst of 1000 take 3.1 seconds: {now:?}");
    }

    #[test]
    fn late_loads_open_the_breaker_before_they_end() {
        let mut tier = stack(Rules { deadline: MS, has_breaker: true, ..bare() });
        tier.submit(&(0..8).map(|id| op(id, LOAD)).collect::<Vec<_>>());
        tier.advance(MS);
        tier.take_late(&mut Vec::new());
        assert_eq!(tier.health(), Health::Sick(ErrorKind::Timeout));
        assert_eq!(tier.in_flight.len(), 8, "the tier has them still");
    }
}
