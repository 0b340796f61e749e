//! Asks again what failed by accident: after a pause that grows and is jittered by a seed, so that many hosts do not
//! come back at one moment.
//!
//! All operations of a tier can be asked twice: a store has the same bytes, and what was removed is absent. Asked
//! again is only what failed as [`ErrorKind::Io`] or [`ErrorKind::Unavailable`]; corrupt, absent and full stay so, and
//! what is late or was cancelled has nobody who waits for it. Attempts, time and waiting operations are bounded.
//! Invariant: the tier never sees an id twice, so no completion of one attempt is taken for that of another.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{Timed, pass_on};
use crate::error::ErrorKind;
use crate::tier::{Completion, Health, OpId, Operation, Outcome, Tier};

/// The attempt is told in an id's highest bits, which no driver counts up to.
const ATTEMPT_SHIFT: u32 = 60;
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

/// See the module's head. `T` is the tier with the wrappers inside this one.
pub struct Retry<T> {
    inner: T,
    attempts: Attempts,
    now: Duration,
    state: u64,
    under_way: HashMap<OpId, Tries>,
    /// By the moment of their next attempt.
    waiting: BTreeMap<(Duration, OpId), Outcome>,
    retried: u64,
}

struct Tries {
    op: Operation,
    made: u32,
    since: Duration,
    is_final: bool,
}

impl<T> Retry<T> {
    /// `attempts.most` is 1 to 16.
    pub fn new(inner: T, seed: u64, attempts: Attempts) -> Retry<T> {
        assert!((1..=MOST_ATTEMPTS).contains(&attempts.most), "{} attempts are not 1 to 16", attempts.most);
        let (under_way, waiting) = (HashMap::new(), BTreeMap::new());
        Retry { inner, attempts, now: Duration::ZERO, state: seed, under_way, waiting, retried: 0 }
    }

    /// What it wraps.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// What it wraps.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Attempts beyond the first ones.
    pub fn retried(&self) -> u64 {
        self.retried
    }

    /// When the operation may be tried again after `outcome`; none if that was all.
    fn next_attempt(&mut self, id: OpId, outcome: Outcome) -> Option<Duration> {
        let is_accident = matches!(outcome, Outcome::Failed(ErrorKind::Io | ErrorKind::Unavailable));
        let tries = self.under_way.get(&id)?;
        let may_try = is_accident && !tries.is_final && tries.made < self.attempts.most;
        if !may_try || self.waiting.len() >= self.attempts.waiting {
            return None;
        }
        let last = tries.since.saturating_add(self.attempts.within);
        let pause = self.attempts.first_pause.saturating_mul(1 << (tries.made - 1));
        let at = self.now.saturating_add(pause / 2).saturating_add(pause.mul_f64(self.draw()));
        (at <= last).then_some(at)
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

impl<T: Timed> Retry<T> {
    /// Tries again what is due, as far as the tier takes it.
    fn try_again(&mut self) {
        while let Some((&(at, id), _)) = self.waiting.first_key_value() {
            let tries = self.under_way.get_mut(&id).expect("what waits is under way");
            if at > self.now || self.inner.submit(&[Operation { id: tries.next_id(), ..tries.op }]) == 0 {
                break;
            }
            tries.made += 1;
            self.retried += 1;
            self.waiting.pop_first();
        }
    }

    /// Ends what is due and has nobody who waits any more, or no tier: one that is sick, or takes nothing for too long.
    fn give_up(&mut self, completions: &mut Vec<Completion>) {
        let is_sick = self.inner.health() != Health::Healthy;
        let is_over = |id: &OpId| {
            let tries = &self.under_way[id];
            is_sick || tries.is_final || tries.since.saturating_add(self.attempts.within) < self.now
        };
        let due = self.waiting.keys().copied().take_while(|(at, _)| *at <= self.now);
        for key in due.filter(|(_, id)| is_over(id)).collect::<Vec<_>>() {
            let outcome = self.waiting.remove(&key).expect("it was found there");
            self.under_way.remove(&key.1);
            completions.push(Completion { id: key.1, outcome });
        }
    }
}

impl<T: Timed> Tier for Retry<T> {
    pass_on!(name, capabilities, health);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = self.inner.submit(batch);
        for op in &batch[..taken] {
            assert!(op.id.0 >> ATTEMPT_SHIFT == 0, "{:?} leaves no room for the attempt", op.id);
            self.under_way.insert(op.id, Tries { op: *op, made: 1, since: self.now, is_final: false });
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        for Completion { id, outcome } in completions.split_off(from) {
            let id = first_id(id);
            match self.next_attempt(id, outcome) {
                Some(at) => drop(self.waiting.insert((at, id), outcome)),
                None => {
                    self.under_way.remove(&id);
                    completions.push(Completion { id, outcome });
                }
            }
        }
        self.give_up(completions);
        self.try_again();
    }

    fn cancel(&mut self, id: OpId) {
        let Some(tries) = self.under_way.get_mut(&id) else { return };
        tries.is_final = true;
        let waits = self.waiting.keys().find(|(_, waiting)| *waiting == id).copied();
        match waits {
            // It ends with what it had, at the next poll.
            Some(key) => {
                let outcome = self.waiting.remove(&key).expect("it was found there");
                self.waiting.insert((Duration::ZERO, id), outcome);
            }
            None => self.inner.cancel(tries.last_id()),
        }
    }
}

impl<T: Timed> Timed for Retry<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        self.now = now;
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        let from = late.len();
        self.inner.take_late(late);
        for id in &mut late[from..] {
            *id = first_id(*id);
            if let Some(tries) = self.under_way.get_mut(id) {
                tries.is_final = true;
            }
        }
    }
}

impl Tries {
    fn next_id(&self) -> OpId {
        OpId(self.op.id.0 | u64::from(self.made) << ATTEMPT_SHIFT)
    }

    fn last_id(&self) -> OpId {
        OpId(self.op.id.0 | u64::from(self.made - 1) << ATTEMPT_SHIFT)
    }
}

fn first_id(id: OpId) -> OpId {
    OpId(id.0 & ((1 << ATTEMPT_SHIFT) - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::testing::{LOAD, Told, op, polled};
    use super::super::{Deadline, Faults, Rates};
    use super::*;
    use crate::tier::OpKind;

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);
    const MS: Duration = Duration::from_millis(1);

    fn retry() -> Retry<Told> {
        Retry::new(Told::default(), 1, Attempts { first_pause: 10 * MS, ..Attempts::default() })
    }

    /// The tier ends its last operation so.
    fn end(tier: &mut Retry<Told>, outcome: Outcome) -> Vec<Completion> {
        let id = tier.inner.taken.last().unwrap().id;
        tier.inner.completions.push(Completion { id, outcome });
        polled(tier)
    }

    /// Polls a millisecond later each time until the tier is asked again; how long that took.
    fn until_asked(tier: &mut Retry<Told>) -> u64 {
        let (before, begun) = (tier.inner.taken.len(), tier.now);
        while tier.inner.taken.len() == before {
            tier.advance(tier.now + MS);
            assert_eq!(polled(tier), []);
            assert!(tier.now < begun + 1000 * MS, "not asked again");
        }
        (tier.now - begun).as_millis() as u64
    }

    #[test]
    fn an_accident_is_tried_again_after_growing_pauses_and_told_when_it_repeats() {
        for kind in [LOAD, OpKind::Store, OpKind::Exists] {
            let mut tier = retry();
            tier.submit(&[op(7, kind)]);
            assert_eq!(end(&mut tier, IO), []);
            assert!((5..=16).contains(&until_asked(&mut tier)));
            assert_eq!(end(&mut tier, Outcome::Failed(ErrorKind::Unavailable)), []);
            assert!((10..=31).contains(&until_asked(&mut tier)));
            assert_eq!(end(&mut tier, IO), [Completion { id: OpId(7), outcome: IO }], "the third attempt was the last");
            let ids: HashSet<OpId> = tier.inner.taken.iter().map(|op| op.id).collect();
            assert_eq!((ids.len(), tier.retried()), (3, 2), "each attempt has an id of its own");
            assert!((tier.under_way.is_empty(), tier.waiting.is_empty()) == (true, true));
        }
    }

    #[test]
    fn what_is_no_accident_is_told_at_once() {
        let kinds =
            [ErrorKind::Corrupt, ErrorKind::Full, ErrorKind::Timeout, ErrorKind::Invalid, ErrorKind::Unsupported];
        for outcome in kinds.map(Outcome::Failed).into_iter().chain([Outcome::Absent, Outcome::Removed]) {
            let mut tier = retry();
            tier.submit(&[op(7, LOAD)]);
            assert_eq!(end(&mut tier, outcome), [Completion { id: OpId(7), outcome }]);
        }
    }

    #[test]
    fn a_load_that_is_late_or_cancelled_is_not_tried_again() {
        let mut tier = retry();
        tier.submit(&[op(1, LOAD)]);
        tier.cancel(OpId(1));
        assert_eq!(tier.inner.cancelled, [OpId(1)]);
        assert_eq!(end(&mut tier, IO), [Completion { id: OpId(1), outcome: IO }]);

        // While it waits for its next attempt it ends at once, with what it had.
        tier.submit(&[op(2, LOAD)]);
        assert_eq!(end(&mut tier, IO), []);
        tier.cancel(OpId(2));
        tier.advance(MS);
        assert_eq!(polled(&mut tier), [Completion { id: OpId(2), outcome: IO }]);
        assert_eq!(tier.inner.taken.len(), 2);

        // The second attempt is known by its own id below.
        tier.submit(&[op(3, LOAD)]);
        end(&mut tier, IO);
        until_asked(&mut tier);
        tier.cancel(OpId(3));
        assert_eq!(tier.inner.cancelled.last(), Some(&tier.inner.taken.last().unwrap().id));

        let mut tier = Retry::new(Deadline::new(Told::default(), 5 * MS), 1, Attempts::default());
        tier.submit(&[op(4, LOAD)]);
        tier.advance(6 * MS);
        let mut late = Vec::new();
        tier.take_late(&mut late);
        assert_eq!(late, [OpId(4)]);
        tier.inner.inner_mut().completions.push(Completion { id: OpId(4), outcome: IO });
        assert_eq!(polled(&mut tier), [Completion { id: OpId(4), outcome: IO }]);
    }

    #[test]
    fn a_tier_that_takes_nothing_more_is_asked_for_a_bounded_time() {
        let mut tier = retry();
        tier.submit(&[op(1, LOAD)]);
        end(&mut tier, IO);
        tier.inner.room = Some(0);
        tier.advance(999 * MS);
        assert_eq!(polled(&mut tier), []);
        tier.advance(1001 * MS);
        assert_eq!(polled(&mut tier), [Completion { id: OpId(1), outcome: IO }]);
        assert_eq!(tier.inner.taken.len(), 1);
    }

    #[test]
    fn so_many_wait_and_no_more() {
        let mut tier = Retry::new(Told::default(), 1, Attempts { waiting: 2, ..Attempts::default() });
        let ops = [1, 2, 3].map(|id| op(id, LOAD));
        tier.submit(&ops);
        tier.inner.completions = ops.map(|op| Completion { id: op.id, outcome: IO }).into();
        assert_eq!(polled(&mut tier), [Completion { id: OpId(3), outcome: IO }]);
    }

    /// The tier's faults and the pauses follow from the seed alone.
    fn run(seed: u64) -> Vec<(Duration, Completion)> {
        let faults = Faults::new(Told::default(), seed, Rates { failed: 400, refused: 200, ..Rates::default() }, MS);
        let mut tier = Retry::new(faults, seed, Attempts::default());
        let (mut ended, mut next, mut seen) = (Vec::new(), 0, 0);
        while ended.len() < 500 {
            tier.advance(tier.now + MS);
            next += u64::from(next < 500 && tier.submit(&[op(next, LOAD)]) == 1);
            let told = tier.inner.inner_mut();
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
