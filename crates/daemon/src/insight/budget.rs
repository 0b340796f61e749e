//! The processor time that estimates may take: a share of one core, whatever is asked for.
//!
//! Invariant: since the start, the thread has taken at most [`CREDIT`], one lookup's work, and [`SHARE`] of the time.
//! It rests where it would take more. What is asked for meanwhile waits in order, and what finds no room there is left
//! out and counted: so runs of lookups are seen whole, with gaps between the runs.

use std::time::{Duration, Instant};

/// Of one core. Beside lookups in a closed loop the thread took ten times as much.
const SHARE: f64 = 0.02;
/// Of processor time that was not used before: a minute's share, so that a start or a burst is seen whole.
const CREDIT: Duration = Duration::from_millis(1200);

pub(super) struct Budget {
    /// Seconds that the thread may take at once; negative after more than that.
    credit: f64,
    at: Instant,
    used: Duration,
}

impl Budget {
    /// `used` is the thread's processor time so far.
    pub fn new(now: Instant, used: Duration) -> Budget {
        Budget { credit: CREDIT.as_secs_f64(), at: now, used }
    }

    /// How long to rest now.
    pub fn rest(&mut self, now: Instant, used: Duration) -> Duration {
        let earned = (now - self.at).as_secs_f64() * SHARE;
        let spent = used.saturating_sub(self.used).as_secs_f64();
        self.credit = (self.credit + earned - spent).min(CREDIT.as_secs_f64());
        (self.at, self.used) = (now, used);
        Duration::from_secs_f64((-self.credit / SHARE).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_always_has_work_takes_its_share_and_no_more() {
        for work in [Duration::from_micros(20), Duration::from_millis(10), Duration::from_millis(400)] {
            let start = Instant::now();
            let (mut now, mut used) = (start, Duration::ZERO);
            let mut budget = Budget::new(start, used);
            while now < start + Duration::from_secs(3600) {
                (now, used) = (now + work, used + work);
                now += budget.rest(now, used);
            }
            let share = (used.as_secs_f64() - CREDIT.as_secs_f64()) / (now - start).as_secs_f64();
            assert!((0.019..=0.0202).contains(&share), "{work:?} at a time: {share}");
        }
    }

    #[test]
    fn a_burst_after_a_quiet_time_is_seen_whole() {
        let start = Instant::now();
        let mut budget = Budget::new(start, Duration::ZERO);
        assert_eq!(budget.rest(start, Duration::from_millis(1200)), Duration::ZERO);
        assert!(budget.rest(start, Duration::from_millis(1300)) >= Duration::from_secs(4));
        let later = start + Duration::from_secs(3600);
        assert_eq!(budget.rest(later, Duration::from_millis(2400)), Duration::ZERO);
    }
}
