//! Write limits: token buckets; the caller passes the time in.
//!
//! Invariant: over any time, at most `rate * time + burst` bytes plus one batch are written to the disk. The daily
//! limit holds over restarts too: the disk keeps what was left, and the time. A clock that jumps gives at most one
//! burst.

use std::time::Duration;

/// Both limits of a disk.
pub(super) struct Budget {
    per_second: Option<Bucket>,
    per_day: Option<Bucket>,
}

impl Budget {
    pub fn new(bytes_per_second: Option<u64>, bytes_per_day: Option<u64>) -> Budget {
        const DAY: f64 = 86_400.0;
        Budget {
            per_second: bytes_per_second.map(|bytes| Bucket::new(bytes as f64, bytes as f64)),
            per_day: bytes_per_day.map(|bytes| Bucket::new(bytes as f64 / DAY, bytes as f64 / 24.0)),
        }
    }

    /// What is left of the daily limit.
    pub fn left_of_day(&self) -> Option<i64> {
        self.per_day.as_ref().map(|bucket| bucket.bytes as i64)
    }

    /// Continues with what was left of the daily limit before a pause.
    pub fn resume_day(&mut self, left: i64, pause: Duration) {
        if let Some(bucket) = &mut self.per_day {
            bucket.bytes = bucket.burst.min(left as f64);
            bucket.fill(pause);
        }
    }

    pub fn advance(&mut self, elapsed: Duration) {
        self.buckets().for_each(|bucket| bucket.fill(elapsed));
    }

    /// Whether a batch may be written now.
    pub fn allows(&mut self) -> bool {
        self.buckets().all(|bucket| bucket.bytes > 0.0)
    }

    /// How long nothing may be written.
    pub fn wait(&self) -> Duration {
        let wait = |bucket: &Bucket| (-bucket.bytes / bucket.bytes_per_second).max(0.0);
        let longest = self.per_second.iter().chain(&self.per_day).map(wait).fold(0.0, f64::max);
        Duration::try_from_secs_f64(longest).unwrap_or(Duration::MAX)
    }

    /// Subtracts written bytes, including those of carried blocks, which are never refused.
    pub fn take(&mut self, bytes: u64) {
        self.buckets().for_each(|bucket| bucket.bytes -= bytes as f64);
    }

    fn buckets(&mut self) -> impl Iterator<Item = &mut Bucket> {
        self.per_second.iter_mut().chain(&mut self.per_day)
    }
}

struct Bucket {
    bytes: f64,
    bytes_per_second: f64,
    burst: f64,
}

impl Bucket {
    fn new(bytes_per_second: f64, burst: f64) -> Bucket {
        Bucket { bytes: burst, bytes_per_second, burst }
    }

    fn fill(&mut self, elapsed: Duration) {
        self.bytes = (self.bytes + self.bytes_per_second * elapsed.as_secs_f64()).min(self.burst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut budget = Budget::new(Some(1000), None);
        assert!(budget.allows());
        budget.take(1500);
        assert!(!budget.allows());
        budget.advance(Duration::from_millis(400));
        assert!(!budget.allows(), "100 bytes are still owed");
        budget.advance(Duration::from_millis(200));
        assert!(budget.allows());
        budget.advance(Duration::from_secs(3600));
        budget.take(1000);
        assert!(!budget.allows(), "an idle hour saves up one burst, not more");
    }

    #[test]
    fn a_day_goes_on_after_a_pause_with_what_was_left_and_what_came_since() {
        let day = || Budget::new(None, Some(24_000));
        let mut spent = day();
        spent.take(1500);
        assert_eq!(spent.left_of_day(), Some(-500));
        // (what was left, seconds of the pause, what is left then); an hour gives 1,000.
        for (left, seconds, then) in
            [(-500, 0, -500), (-500, 1800, 0), (-500, 86_400 * 365, 1000), (5_000_000, 0, 1000), (-2000, 3600, -1000)]
        {
            let mut resumed = day();
            resumed.resume_day(left, Duration::from_secs(seconds));
            assert_eq!(resumed.left_of_day(), Some(then), "{left} and {seconds} s");
        }
        let mut unlimited = Budget::new(Some(1), None);
        unlimited.resume_day(-1, Duration::ZERO);
        assert_eq!((unlimited.left_of_day(), unlimited.allows()), (None, true));
    }

    #[test]
    fn the_scarcer_limit_counts() {
        let mut budget = Budget::new(Some(1_000_000), Some(24_000));
        budget.take(1000);
        assert!(!budget.allows(), "an hour's worth of a day is spent");
        budget.advance(Duration::from_secs(1));
        assert!(budget.allows());
    }
}
