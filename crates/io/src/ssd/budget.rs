//! Write limits: token buckets; the caller passes the time in.
//!
//! Invariant: over any time, at most `rate * time + burst` bytes plus one batch are written to the disk.

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
    fn the_scarcer_limit_counts() {
        let mut budget = Budget::new(Some(1_000_000), Some(24_000));
        budget.take(1000);
        assert!(!budget.allows(), "an hour's worth of a day is spent");
        budget.advance(Duration::from_secs(1));
        assert!(budget.allows());
    }
}
