//! Whether a shared store refuses writes, or reads, at present: in half of the recent seconds it refused at least half
//! of them.
//!
//! One that is taken now and then does not hide that the others are refused: a full volume, of which a sweeper frees a
//! little, takes the next blocks. So seconds are compared, and neither operations nor the last of them: a burst is one
//! second.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::seldom::Seldom;

/// So many refusals, over so long a time, are more than a moment without room. As long without a refusal, and then one
/// that is taken, and it is over.
const LEAST: u32 = 8;
const LASTING: Duration = Duration::from_secs(5);
/// What counts as one, and how many are looked at. Seconds without an operation are none.
const SECOND: Duration = Duration::from_secs(1);
const SECONDS: usize = 10;
/// Refusals begin to be told at a half of the seconds, and end at less than a quarter: a share that varies between is
/// told once.
const END_PARTS: usize = 4;

/// What a store refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    Writes,
    Reads,
}

/// What became of the operations of about one second.
struct Second {
    since: Instant,
    refused: u32,
    taken: u32,
}

impl Second {
    fn is_refused(&self) -> bool {
        self.refused >= self.taken
    }
}

/// See the module documentation.
pub(crate) struct Refusals {
    of: Refused,
    /// What to do, in words of the store's own tier.
    hint: &'static str,
    /// The last ones, since the first refusal.
    seconds: VecDeque<Second>,
    last: Option<Instant>,
    why: Option<String>,
    warnings: Seldom,
    has_warned: bool,
}

impl Refusals {
    pub fn of(of: Refused, hint: &'static str) -> Refusals {
        Refusals::found(of, hint, None)
    }

    /// As the store was found when it was opened. `why` is what it said when it refused, and was logged.
    pub fn found(of: Refused, hint: &'static str, why: Option<String>) -> Refusals {
        let (seconds, warnings, has_warned) = (VecDeque::new(), Seldom::default(), why.is_some());
        Refusals { of, hint, seconds, last: None, why, warnings, has_warned }
    }

    /// The store refused one.
    pub fn refused(&mut self, now: Instant) {
        self.last = Some(now);
        self.second(now).refused += 1;
    }

    /// The store did not refuse.
    pub fn taken(&mut self, store: &str, now: Instant) {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) >= LASTING) {
            self.seconds.clear();
        } else {
            self.second(now).taken += 1;
        }
        let is_over = self.refused_seconds().count() * END_PARTS < self.seconds.len().max(1);
        if is_over && self.why.take().is_some() && std::mem::take(&mut self.has_warned) {
            match self.of {
                Refused::Writes => tracing::info!(store, "the shared store takes writes again"),
                Refused::Reads => tracing::info!(store, "the shared store answers reads again"),
            }
        }
    }

    /// Whether it matters that an operation is taken: some were refused lately.
    pub fn are_pending(&self) -> bool {
        !self.seconds.is_empty()
    }

    /// Says so when the refusals have lasted, and again when the store gives another reason. `why` is what it said
    /// last.
    pub fn judge(&mut self, store: &str, now: Instant, why: impl FnOnce() -> String) {
        if !self.have_lasted() {
            return;
        }
        let why = why();
        if self.why.as_ref() == Some(&why) {
            return;
        }
        let why = self.why.insert(why);
        let warns = self.warnings.add(now).is_some();
        self.has_warned |= warns;
        match self.of {
            _ if !warns => {}
            Refused::Writes => tracing::warn!(
                store,
                why,
                hint = self.hint,
                "the shared store refuses writes; what it holds is still read"
            ),
            Refused::Reads => tracing::warn!(
                store,
                why,
                hint = self.hint,
                "the shared store refuses reads; the blocks that it does not give are misses"
            ),
        }
    }

    /// Why the store refuses; none while it does not.
    pub fn told(&self) -> Option<String> {
        self.why.clone()
    }

    /// What to do about that.
    pub fn hint(&self) -> Option<&'static str> {
        self.why.is_some().then_some(self.hint)
    }

    /// The one under way.
    fn second(&mut self, now: Instant) -> &mut Second {
        let is_over = |second: &Second| now.saturating_duration_since(second.since) >= SECOND;
        if self.seconds.back().is_none_or(is_over) {
            if self.seconds.len() == SECONDS {
                self.seconds.pop_front();
            }
            self.seconds.push_back(Second { since: now, refused: 0, taken: 0 });
        }
        self.seconds.back_mut().expect("one was pushed")
    }

    fn refused_seconds(&self) -> impl Iterator<Item = &Second> {
        self.seconds.iter().filter(|second| second.is_refused())
    }

    fn have_lasted(&self) -> bool {
        let first = self.refused_seconds().next().map(|second| second.since);
        let lasts = first.zip(self.last).is_some_and(|(first, last)| last.saturating_duration_since(first) >= LASTING);
        let refused: u32 = self.refused_seconds().map(|second| second.refused).sum();
        lasts && refused >= LEAST && self.refused_seconds().count() * 2 >= self.seconds.len()
    }
}

/// The hints of reads and of writes, as one.
pub(crate) fn joined(hints: [Option<&str>; 2]) -> Option<String> {
    let hints: Vec<&str> = hints.into_iter().flatten().collect();
    (!hints.is_empty()).then(|| hints.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens, by the time of its beginning.
    struct Bed {
        refusals: Refusals,
        start: Instant,
    }

    impl Bed {
        fn new() -> Bed {
            Bed { refusals: Refusals::of(Refused::Writes, "make room"), start: Instant::now() }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn refuses(&mut self, count: usize, ms: u64) {
            (0..count).for_each(|_| self.refusals.refused(self.start + Duration::from_millis(ms)));
        }

        fn takes(&mut self, count: usize, ms: u64) {
            (0..count).for_each(|_| self.refusals.taken("a", self.start + Duration::from_millis(ms)));
        }

        fn told(&mut self, ms: u64) -> Option<String> {
            self.refusals.judge("a", self.at(ms), || "no memory".to_string());
            self.refusals.told()
        }

        fn is_told(&mut self, ms: u64) -> bool {
            self.told(ms).is_some()
        }
    }

    #[test]
    fn refusals_are_told_when_they_last() {
        let mut bed = Bed::new();
        bed.refuses(LEAST as usize - 1, 0);
        assert_eq!(bed.told(60_000), None, "too few");
        bed.refuses(1, 60_000);
        assert_eq!(bed.told(60_000), Some("no memory".to_string()));
        bed.refusals.judge("a", bed.at(61_000), || "read-only".to_string());
        assert_eq!(bed.refusals.told(), Some("read-only".to_string()), "the reason of today");
        let mut bed = Bed::new();
        bed.refuses(100, 0);
        assert_eq!(bed.told(3_600_000), None, "all at once: the next one may be taken");
    }

    /// As where a sweeper frees some blocks' room on a full volume, again and again.
    #[test]
    fn a_store_that_takes_some_between_is_told_and_stays_told() {
        let scattered = |ms: u64| ms.is_multiple_of(350);
        let bursts = |ms: u64| ms % 7_000 < 1_000;
        for is_taken in [scattered, bursts] {
            let mut bed = Bed::new();
            let told = (0..60_000).step_by(50).filter(|ms| {
                if is_taken(*ms) {
                    bed.takes(1, *ms)
                } else {
                    bed.refuses(1, *ms)
                }
                bed.is_told(*ms)
            });
            let told: Vec<u64> = told.collect();
            assert!(told[0] <= 7_000, "from {} ms on", told[0]);
            assert_eq!(told.len() as u64, (60_000 - told[0]) / 50, "it stays told");
        }
    }

    #[test]
    fn a_store_that_refuses_few_is_not_told() {
        let mut bed = Bed::new();
        for ms in (0..60_000_u64).step_by(50) {
            if ms.is_multiple_of(200) {
                bed.refuses(1, ms)
            } else {
                bed.takes(1, ms)
            }
            assert!(!bed.is_told(ms), "{ms}");
        }
    }

    #[test]
    fn it_is_over_when_the_store_has_taken_all_for_a_while_or_most_for_longer() {
        let told = || {
            let mut bed = Bed::new();
            (0..20).for_each(|second| bed.refuses(9, second * 1_000));
            assert!(bed.is_told(19_000));
            bed
        };
        let mut bed = told();
        bed.takes(9, 20_000);
        assert!(bed.is_told(20_000), "room for a few");
        bed.takes(1, 24_000);
        assert!(!bed.is_told(24_000) && !bed.refusals.are_pending());
        let mut bed = told();
        let over = (20..).find(|second| {
            bed.refuses(1, second * 1_000);
            bed.takes(9, second * 1_000);
            !bed.is_told(second * 1_000)
        });
        assert_eq!(over, Some(27));
        bed.refuses(9, 28_000);
        assert!(!bed.is_told(28_000), "a moment");
    }

    #[test]
    fn what_was_found_at_the_start_is_over_with_the_first_that_is_taken() {
        let mut refusals = Refusals::found(Refused::Writes, "make room", Some("read-only".to_string()));
        assert_eq!((refusals.told(), refusals.hint()), (Some("read-only".to_string()), Some("make room")));
        refusals.taken("a", Instant::now());
        assert_eq!((refusals.told(), refusals.hint()), (None, None));
    }
}
