//! Opens when a tier fails again and again, and lets it try from time to time.
//!
//! closed → (failures in a row) → open → (pause) → half open → success: closed, failure: open for twice as long.
//! While it is open nothing reaches the tier: what is submitted all the same is answered at once.

use std::time::Duration;

use super::{Timed, pass_on};
use crate::error::ErrorKind;
use crate::tier::{Completion, Health, OpId, Operation, Outcome, Tier};

/// So many failures in a row are no accident.
const OPEN_AFTER: u32 = 8;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(32);

/// See the module's head. `T` is the tier with the wrappers inside this one.
pub struct Breaker<T> {
    inner: T,
    now: Duration,
    failures: u32,
    /// Until when it is open, and why.
    open: Option<(Duration, ErrorKind)>,
    pause: Duration,
    opened: u64,
    refused: Vec<Completion>,
}

impl<T> Breaker<T> {
    /// Closed, with no failure counted.
    pub fn new(inner: T) -> Breaker<T> {
        let (now, refused) = (Duration::ZERO, Vec::new());
        Breaker { inner, now, failures: 0, open: None, pause: FIRST_PAUSE, opened: 0, refused }
    }

    /// What it wraps.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// What it wraps.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// How often it has opened.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    fn failed(&mut self, kind: ErrorKind) {
        self.failures += 1;
        if self.failures >= OPEN_AFTER && self.open.is_none() {
            self.open = Some((self.now + self.pause, kind));
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            self.opened += 1;
        }
    }

    fn heard(&mut self, outcome: Outcome, is_shared: bool) {
        match outcome {
            // A shared store that takes no more still gives what it has.
            Outcome::Failed(ErrorKind::Full) if is_shared => {}
            Outcome::Failed(kind) if kind.is_retryable() => self.failed(kind),
            // What was asked for is bad, not the tier.
            Outcome::Failed(_) => {}
            _ => (self.failures, self.open, self.pause) = (0, None, FIRST_PAUSE),
        }
    }
}

impl<T: Timed> Tier for Breaker<T> {
    pass_on!(name, capabilities, cancel);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        if self.open.is_none() {
            return self.inner.submit(batch);
        }
        let outcome = Outcome::Failed(ErrorKind::Unavailable);
        self.refused.extend(batch.iter().map(|op| Completion { id: op.id, outcome }));
        batch.len()
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        let is_shared = self.inner.capabilities().is_shared;
        completions[from..].iter().for_each(|completion| self.heard(completion.outcome, is_shared));
        completions.append(&mut self.refused);
    }

    fn health(&self) -> Health {
        match (self.open, self.inner.health()) {
            (Some((_, kind)), _) => Health::Sick(kind),
            (None, health) => health,
        }
    }
}

impl<T: Timed> Timed for Breaker<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        self.now = now;
        if self.open.is_some_and(|(until, _)| until <= now) {
            self.open = None;
            self.failures = OPEN_AFTER - 1;
        }
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        let from = late.len();
        self.inner.take_late(late);
        late[from..].iter().for_each(|_| self.failed(ErrorKind::Timeout));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, done, op, polled};
    use super::*;
    use crate::tier::Capabilities;

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);

    fn end(tier: &mut Breaker<Told>, outcome: Outcome) {
        tier.submit(&[op(1, LOAD)]);
        tier.inner.completions.push(done(1, outcome));
        polled(tier);
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_a_success_between_them_prevents_that() {
        let mut tier = Breaker::new(Told::default());
        for _ in 0..3 {
            (1..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
            end(&mut tier, Outcome::Absent);
        }
        assert_eq!(tier.health(), Health::Healthy);
        (0..OPEN_AFTER).for_each(|_| end(&mut tier, Outcome::Failed(ErrorKind::Corrupt)));
        assert_eq!(tier.health(), Health::Healthy, "corrupt blocks are the blocks' fault");
        (0..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
        assert_eq!((tier.health(), tier.opened()), (Health::Sick(ErrorKind::Io), 1));
    }

    #[test]
    fn while_it_is_open_all_is_answered_and_nothing_reaches_the_tier() {
        let mut tier = Breaker::new(Told::default());
        (0..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
        let before = tier.inner.taken.len();
        assert_eq!(tier.submit(&[op(7, LOAD), op(8, LOAD)]), 2);
        let unavailable = Outcome::Failed(ErrorKind::Unavailable);
        assert_eq!(polled(&mut tier), [done(7, unavailable), done(8, unavailable)]);
        assert_eq!(tier.inner.taken.len(), before);
    }

    #[test]
    fn it_tries_again_after_a_pause_that_grows_until_the_tier_is_well() {
        let mut tier = Breaker::new(Told::default());
        (0..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
        let mut now = Duration::ZERO;
        for seconds in [1, 2, 4, 8, 16, 32, 32] {
            tier.advance(now + Duration::from_secs(seconds) - Duration::from_millis(1));
            assert_ne!(tier.health(), Health::Healthy);
            now += Duration::from_secs(seconds);
            tier.advance(now);
            assert_eq!(tier.health(), Health::Healthy);
            end(&mut tier, IO);
            assert_ne!(tier.health(), Health::Healthy, "one failure is enough now");
        }
        tier.advance(now + LONGEST_PAUSE);
        end(&mut tier, Outcome::Removed);
        (1..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
        assert_eq!(tier.health(), Health::Healthy);
    }

    #[test]
    fn a_full_shared_store_is_still_read_from() {
        for is_shared in [false, true] {
            let capabilities = Capabilities { is_shared, ..Capabilities::default() };
            let mut tier = Breaker::new(Told { capabilities, ..Told::default() });
            (0..OPEN_AFTER).for_each(|_| end(&mut tier, Outcome::Failed(ErrorKind::Full)));
            assert_eq!(tier.health() == Health::Healthy, is_shared);
        }
    }
}
