//! Opens when a tier fails again and again, and lets it try from time to time.
//!
//! closed → (failures in a row) → open → (pause) → half open → success: closed, failure: open for twice as long.
//! While it is open nothing new reaches the tier: what is submitted all the same is answered without it.

use std::time::Duration;

use crate::error::ErrorKind;
use crate::tier::Outcome;

/// So many failures in a row are no accident.
const OPEN_AFTER: u32 = 8;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(32);

/// See the module's head.
pub struct Breaker {
    may_open: bool,
    failures: u32,
    /// Until when it is open, and why.
    open: Option<(Duration, ErrorKind)>,
    pause: Duration,
    opened: u64,
}

impl Breaker {
    /// One that may not open never does.
    pub fn new(may_open: bool) -> Breaker {
        Breaker { may_open, failures: 0, open: None, pause: FIRST_PAUSE, opened: 0 }
    }

    /// Whether the tier is left alone.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// What failed last before it opened.
    pub fn why_open(&self) -> Option<ErrorKind> {
        self.open.map(|(_, kind)| kind)
    }

    /// Until when it is open.
    pub fn open_until(&self) -> Option<Duration> {
        self.open.map(|(until, _)| until)
    }

    /// How often it has opened.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// After its pause the tier may try, and one more failure is enough.
    pub fn advance(&mut self, now: Duration) {
        if self.open.is_some_and(|(until, _)| until <= now) {
            self.end_pause();
        }
    }

    /// As if its pause was over, if it is open.
    pub fn end_pause(&mut self) {
        if self.open.take().is_some() {
            self.failures = OPEN_AFTER - 1;
        }
    }

    /// The tier ended an operation.
    pub fn heard(&mut self, outcome: Outcome, is_shared: bool, now: Duration) {
        match outcome {
            // A shared store that takes no more still gives what it has.
            Outcome::Failed(ErrorKind::Full) if is_shared => {}
            Outcome::Failed(kind) if kind.is_retryable() => self.failed(kind, now),
            // What was asked for is bad, not the tier.
            Outcome::Failed(_) => {}
            _ => (self.failures, self.open, self.pause) = (0, None, FIRST_PAUSE),
        }
    }

    /// The tier failed, or was late.
    pub fn failed(&mut self, kind: ErrorKind, now: Duration) {
        self.failures = self.failures.saturating_add(1);
        if self.may_open && self.failures >= OPEN_AFTER && self.open.is_none() {
            self.open = Some((now + self.pause, kind));
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            self.opened += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, bare, done, op, polled};
    use super::super::{Rules, Stack, Timed};
    use super::*;
    use crate::tier::{Capabilities, Health, OpKind, Tier};

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);

    fn breaker(told: Told) -> Stack<Told> {
        Stack::new(told, Rules { has_breaker: true, ..bare() })
    }

    fn end(tier: &mut Stack<Told>, outcome: Outcome) {
        end_of(tier, LOAD, outcome);
    }

    fn end_of(tier: &mut Stack<Told>, kind: OpKind, outcome: Outcome) {
        tier.submit(&[op(1, kind)]);
        tier.tier_mut().completions.push(done(1, outcome));
        polled(tier);
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_a_success_between_them_prevents_that() {
        let mut tier = breaker(Told::default());
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
        let mut tier = breaker(Told::default());
        (0..OPEN_AFTER).for_each(|_| end(&mut tier, IO));
        let before = tier.tier().taken.len();
        assert_eq!(tier.submit(&[op(7, LOAD), op(8, LOAD)]), 2);
        let unavailable = Outcome::Failed(ErrorKind::Unavailable);
        assert_eq!(polled(&mut tier), [done(7, unavailable), done(8, unavailable)]);
        assert_eq!(tier.tier().taken.len(), before);
    }

    #[test]
    fn it_tries_again_after_a_pause_that_grows_until_the_tier_is_well() {
        let mut tier = breaker(Told::default());
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
    fn a_tier_whose_writes_fail_is_still_read_from() {
        let mut tier = breaker(Told::default());
        (0..OPEN_AFTER).for_each(|_| end_of(&mut tier, OpKind::Store, IO));
        assert_eq!((tier.health(), tier.why_no_writes(), tier.opened()), (Health::Healthy, Some(ErrorKind::Io), 1));
        let before = tier.tier().taken.len();
        let batch = [op(7, OpKind::Store), op(8, LOAD), op(9, OpKind::Remove)];
        assert_eq!(tier.submit(&batch), 3);
        assert_eq!(tier.tier().taken[before..].iter().map(|op| op.id.0).collect::<Vec<_>>(), [8]);
        tier.tier_mut().completions.push(done(8, Outcome::Absent));
        let unavailable = Outcome::Failed(ErrorKind::Unavailable);
        assert_eq!(polled(&mut tier), [done(8, Outcome::Absent), done(7, unavailable), done(9, unavailable)]);
        assert_eq!(tier.why_no_writes(), Some(ErrorKind::Io), "a load says nothing of writes");
        tier.advance(FIRST_PAUSE);
        end_of(&mut tier, OpKind::Store, Outcome::Stored);
        assert_eq!(tier.why_no_writes(), None);
    }

    #[test]
    fn what_is_behind_an_operation_for_which_there_is_no_room_is_not_taken() {
        let mut tier = breaker(Told::default());
        (0..OPEN_AFTER).for_each(|_| end_of(&mut tier, OpKind::Store, IO));
        tier.tier_mut().room = Some(1);
        let batch = [op(2, LOAD), op(3, LOAD), op(4, OpKind::Store)];
        assert_eq!(tier.submit(&batch), 1);
        assert_eq!(polled(&mut tier), []);
    }

    #[test]
    fn a_full_shared_store_is_still_read_from() {
        for is_shared in [false, true] {
            let capabilities = Capabilities { is_shared, ..Capabilities::default() };
            let mut tier = breaker(Told { capabilities, ..Told::default() });
            (0..OPEN_AFTER).for_each(|_| end(&mut tier, Outcome::Failed(ErrorKind::Full)));
            assert_eq!(tier.health() == Health::Healthy, is_shared);
        }
    }
}
