//! Asks again what failed by accident: after a pause that grows and is jittered by a seed, so that many hosts do not
//! come back at one moment.
//!
//! All operations of a tier can be asked twice: a store has the same bytes, and what was removed is absent. Asked
//! again is only what failed as [`ErrorKind::Io`] or [`ErrorKind::Unavailable`]; corrupt, absent and full stay so, and
//! what is late or was cancelled has nobody who waits for it. Attempts, time and waiting operations are bounded.
//!
//! Invariant: the tier never sees an id twice, so no completion of one attempt is taken for that of another.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::ErrorKind;
use crate::tier::{OpId, Operation, Outcome};

/// An id's highest bits name the attempt. No driver counts up to them.
const ATTEMPT_SHIFT: u32 = 60;

/// More attempts do not fit into an id.
const MOST_ATTEMPTS: u32 = 1 << (64 - ATTEMPT_SHIFT);

/// How often and how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempts {
    /// With the first one, 1 to 16.
    pub most: u32,
    /// Before the second attempt; twice as long before each later one, each jittered from half to one and a half.
    pub first_pause: Duration,
    /// No attempt begins later than this after the first.
    pub within: Duration,
    /// Operations that may wait for another attempt; more fail at once.
    pub waiting: usize,
}

impl Default for Attempts {
    /// Three attempts over some 30 ms: longer disturbances are the breaker's.
    fn default() -> Attempts {
        let (first_pause, within) = (Duration::from_millis(10), Duration::from_secs(1));
        Attempts { most: 3, first_pause, within, waiting: 1024 }
    }
}

/// See the module's head.
pub struct Retry {
    attempts: Attempts,
    /// The jitter's random state.
    state: u64,
    /// Operations that wait for their next attempt, the earliest first, and how their last attempt ended.
    waiting: BTreeMap<Next, Outcome>,
}

/// When an operation is tried again, and which.
pub type Next = (Duration, OpId);

impl Retry {
    /// `attempts.most` is 1 to 16.
    pub fn new(attempts: Attempts, seed: u64) -> Retry {
        assert!((1..=MOST_ATTEMPTS).contains(&attempts.most), "{} attempts are not 1 to 16", attempts.most);
        Retry { attempts, state: seed, waiting: BTreeMap::new() }
    }

    /// An attempt ended: when the next one is due, or none if this was the last.
    pub fn plan(&mut self, tried: &InFlight, outcome: Outcome, now: Duration) -> Option<Duration> {
        let is_accident = matches!(outcome, Outcome::Failed(ErrorKind::Io | ErrorKind::Unavailable));
        let may_try = is_accident && !tried.is_final && tried.attempts < self.attempts.most;
        if !may_try || self.waiting.len() >= self.attempts.waiting {
            return None;
        }
        let pause = self.attempts.first_pause.saturating_mul(1 << (tried.attempts - 1));
        let at = now.saturating_add(pause / 2).saturating_add(pause.mul_f64(self.draw()));
        if at > self.last(tried) {
            return None;
        }
        self.waiting.insert((at, tried.op.id), outcome);
        Some(at)
    }

    /// The operations whose next attempt is due, the earliest first.
    pub fn due(&self, now: Duration) -> impl Iterator<Item = Next> {
        self.waiting.keys().copied().take_while(move |(at, _)| *at <= now)
    }

    /// Whether the operation ends instead of being tried again.
    pub fn is_over(&self, tried: &InFlight, now: Duration) -> bool {
        tried.is_final || self.last(tried) < now
    }

    /// The operation does not wait any more; returns how its last attempt ended.
    pub fn take(&mut self, next: Next) -> Outcome {
        self.waiting.remove(&next).expect("it waits")
    }

    /// The operation is due at once; returns the new time, which is the earliest of all.
    pub fn hurry(&mut self, next: Next) -> Duration {
        let outcome = self.take(next);
        self.waiting.insert((Duration::ZERO, next.1), outcome);
        Duration::ZERO
    }

    /// When the last attempt may begin.
    fn last(&self, tried: &InFlight) -> Duration {
        tried.since.saturating_add(self.attempts.within)
    }

    /// From 0 to 1, by SplitMix64.
    fn draw(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// One operation from the moment the tier takes it to its end, over all attempts at it: an entry of the stack's table.
pub struct InFlight {
    /// As it was submitted.
    pub op: Operation,
    /// When it was submitted.
    pub since: Duration,
    /// Attempts that the tier took.
    pub attempts: u32,
    /// It was late or cancelled. Nobody waits for it, so it is not tried again.
    pub is_final: bool,
    /// Who has it.
    pub state: State,
}

/// Who has an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The tier works on its last attempt.
    AtTier,
    /// It waits for its next attempt, which is due at this time.
    Waiting(Duration),
}

impl InFlight {
    /// The tier took its first attempt.
    pub fn new(op: &Operation, now: Duration) -> InFlight {
        assert!(op.id.0 >> ATTEMPT_SHIFT == 0, "{:?} leaves no room for the attempt", op.id);
        InFlight { op: *op, since: now, attempts: 1, is_final: false, state: State::AtTier }
    }

    /// The next attempt, as the tier is asked for it.
    pub fn next_attempt(&self) -> Operation {
        Operation { id: self.attempt_id(self.attempts), ..self.op }
    }

    /// The last attempt's id.
    pub fn last_id(&self) -> OpId {
        self.attempt_id(self.attempts - 1)
    }

    fn attempt_id(&self, before: u32) -> OpId {
        OpId(self.op.id.0 | u64::from(before) << ATTEMPT_SHIFT)
    }
}

/// The id of the operation that an attempt belongs to.
pub fn first_id(id: OpId) -> OpId {
    OpId(id.0 & ((1 << ATTEMPT_SHIFT) - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::testing::{LOAD, Told, bare, op, polled, stack};
    use super::super::{Faults, Rates, Rules, Stack, Timed};
    use super::*;
    use crate::tier::{Completion, OpKind, Tier};

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);
    const MS: Duration = Duration::from_millis(1);

    fn retry(attempts: Attempts) -> Stack<Told> {
        stack(Rules { attempts, ..bare() })
    }

    /// The tier ends its last operation so.
    fn end(tier: &mut Stack<Told>, outcome: Outcome) -> Vec<Completion> {
        let id = tier.tier().taken.last().unwrap().id;
        tier.tier_mut().completions.push(Completion { id, outcome });
        polled(tier)
    }

    /// Polls a millisecond later each time until the tier is asked again; how long that took.
    fn until_asked(tier: &mut Stack<Told>) -> u64 {
        let (before, begun) = (tier.tier().taken.len(), tier.now);
        while tier.tier().taken.len() == before {
            tier.advance(tier.now + MS);
            assert_eq!(polled(tier), []);
            assert!(tier.now < begun + 1000 * MS, "not asked again");
        }
        (tier.now - begun).as_millis() as u64
    }

    #[test]
    fn an_accident_is_tried_again_after_growing_pauses_and_told_when_it_repeats() {
        for kind in [LOAD, OpKind::Store, OpKind::Exists] {
            let mut tier = retry(Attempts::default());
            tier.submit(&[op(7, kind)]);
            assert_eq!(end(&mut tier, IO), []);
            assert!((5..=16).contains(&until_asked(&mut tier)));
            assert_eq!(end(&mut tier, Outcome::Failed(ErrorKind::Unavailable)), []);
            assert!((10..=31).contains(&until_asked(&mut tier)));
            assert_eq!(end(&mut tier, IO), [Completion { id: OpId(7), outcome: IO }], "the third attempt was the last");
            let ids: HashSet<OpId> = tier.tier().taken.iter().map(|op| op.id).collect();
            assert_eq!((ids.len(), tier.tier().taken.len()), (3, 3), "each attempt has an id of its own");
            assert!((tier.in_flight.is_empty(), tier.retry.waiting.is_empty()) == (true, true));
        }
    }

    #[test]
    fn what_is_no_accident_is_told_at_once() {
        let kinds =
            [ErrorKind::Corrupt, ErrorKind::Full, ErrorKind::Timeout, ErrorKind::Invalid, ErrorKind::Unsupported];
        for outcome in kinds.map(Outcome::Failed).into_iter().chain([Outcome::Absent, Outcome::Removed]) {
            let mut tier = retry(Attempts::default());
            tier.submit(&[op(7, LOAD)]);
            assert_eq!(end(&mut tier, outcome), [Completion { id: OpId(7), outcome }]);
        }
    }

    #[test]
    fn a_load_that_is_late_or_cancelled_is_not_tried_again() {
        let mut tier = retry(Attempts::default());
        tier.submit(&[op(1, LOAD)]);
        tier.cancel(OpId(1));
        assert_eq!(tier.tier().cancelled, [OpId(1)]);
        assert_eq!(end(&mut tier, IO), [Completion { id: OpId(1), outcome: IO }]);

        // While it waits for its next attempt it ends at once, with what it had.
        tier.submit(&[op(2, LOAD)]);
        assert_eq!(end(&mut tier, IO), []);
        tier.cancel(OpId(2));
        tier.advance(MS);
        assert_eq!(polled(&mut tier), [Completion { id: OpId(2), outcome: IO }]);
        assert_eq!(tier.tier().taken.len(), 2);

        // The second attempt is known by its own id below.
        tier.submit(&[op(3, LOAD)]);
        end(&mut tier, IO);
        until_asked(&mut tier);
        tier.cancel(OpId(3));
        assert_eq!(tier.tier().cancelled.last(), Some(&tier.tier().taken.last().unwrap().id));

        let mut tier = stack(Rules { attempts: Attempts::default(), deadline: 5 * MS, ..bare() });
        tier.submit(&[op(4, LOAD)]);
        tier.advance(6 * MS);
        let mut late = Vec::new();
        tier.take_late(&mut late);
        assert_eq!(late, [OpId(4)]);
        tier.tier_mut().completions.push(Completion { id: OpId(4), outcome: IO });
        assert_eq!(polled(&mut tier), [Completion { id: OpId(4), outcome: IO }]);
    }

    #[test]
    fn a_tier_that_takes_nothing_more_is_asked_for_a_bounded_time() {
        let mut tier = retry(Attempts::default());
        tier.submit(&[op(1, LOAD)]);
        end(&mut tier, IO);
        tier.tier_mut().room = Some(0);
        tier.advance(999 * MS);
        assert_eq!(polled(&mut tier), []);
        tier.advance(1001 * MS);
        assert_eq!(polled(&mut tier), [Completion { id: OpId(1), outcome: IO }]);
        assert_eq!(tier.tier().taken.len(), 1);
    }

    #[test]
    fn so_many_wait_and_no_more() {
        let mut tier = retry(Attempts { waiting: 2, ..Attempts::default() });
        let ops = [1, 2, 3].map(|id| op(id, LOAD));
        tier.submit(&ops);
        tier.tier_mut().completions = ops.map(|op| Completion { id: op.id, outcome: IO }).into();
        assert_eq!(polled(&mut tier), [Completion { id: OpId(3), outcome: IO }]);
    }

    /// The tier's faults and the pauses follow from the seed alone.
    fn run(seed: u64) -> Vec<(Duration, Completion)> {
        let faults = Faults::new(Told::default(), seed, Rates { failed: 400, refused: 200, ..Rates::default() }, MS);
        let mut tier = Stack::new(faults, Rules { attempts: Attempts::default(), seed, ..bare() });
        let (mut ended, mut next, mut seen) = (Vec::new(), 0, 0);
        while ended.len() < 500 {
            tier.advance(tier.now + MS);
            next += u64::from(next < 500 && tier.submit(&[op(next, LOAD)]) == 1);
            let told = tier.tier_mut().inner_mut();
            let fresh = told.taken[seen..].iter().map(|op| Completion { id: op.id, outcome: Outcome::Absent });
            told.completions.extend(fresh);
            seen = told.taken.len();
            ended.extend(polled(&mut tier).into_iter().map(|done| (tier.now, done)));
            assert!(tier.now < Duration::from_secs(60), "seed {seed}: {} of 500 ended", ended.len());
        }
        ended
    }

    #[test]
    fn under_faults_each_operation_ends_once_few_fail_and_a_seed_repeats() {
        let ended = run(3);
        let ids: HashSet<OpId> = ended.iter().map(|(_, done)| done.id).collect();
        let failed = ended.iter().filter(|(_, done)| done.outcome == IO).count();
        assert_eq!(ids.len(), 500);
        assert!((1..80).contains(&failed), "{failed} of 500: 0.4 to the third power is 32");
        assert!(run(3) == ended && run(4) != ended);
    }
}
