//! What is counted, at one moment.

use std::time::Instant;

use forebay_core::histogram::Histogram;
use forebay_core::stats::Stats;

use crate::instances::Looked;
use crate::metrics::Saved;
use crate::tiers::Moved;

/// Sessions that are told about at most: twice as many as engines have numbers.
pub const MAX_ENGINES: usize = 128;

#[derive(Clone)]
pub struct Sample {
    pub at: Instant,
    /// Since 1970.
    pub at_ms: u64,
    pub core: Stats,
    pub used_bytes: u64,
    /// That cannot be evicted.
    pub held_bytes: u64,
    pub saved: Saved,
    pub lookup_time: Histogram,
    /// Of the configured tiers, in their order.
    pub tiers: Vec<Moved>,
    /// Of at most [`MAX_ENGINES`] sessions, by their incarnation.
    pub engines: Vec<(u128, Looked)>,
}

impl Sample {
    /// What an engine had looked up.
    pub fn looked(&self, incarnation: u128) -> Looked {
        self.engines.iter().find(|(its, _)| *its == incarnation).map_or(Looked::default(), |(_, looked)| *looked)
    }

    /// Hits on blocks that were in the pool already.
    pub fn pool_hits(&self) -> u64 {
        self.core.hits - self.tiers.iter().map(|tier| tier.hits).sum::<u64>()
    }
}

/// The duration below which the share `q` of those lies that were recorded after `before`; `None` if there are none.
/// Within a bucket they are taken to be evenly spread, as Prometheus does.
pub fn quantile(now: &Histogram, before: Option<&Histogram>, q: f64) -> Option<f64> {
    let mut buckets = now.buckets();
    for (bucket, old) in buckets.iter_mut().zip(before.map(Histogram::buckets).unwrap_or_default()) {
        bucket.1 = bucket.1.saturating_sub(old.1);
    }
    let all: u64 = buckets.iter().map(|(_, count)| count).sum();
    let (mut left, mut lower) = (q * all as f64, 0.0);
    for (bound, count) in buckets.into_iter().filter(|_| all > 0) {
        if left <= count as f64 && count > 0 {
            // Of what is beyond the last bound nothing is known but that.
            let width = if bound.is_finite() { bound - lower } else { 0.0 };
            return Some(lower + width * left / count as f64);
        }
        left -= count as f64;
        lower = bound;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_of_what_came_after_the_earlier_sample() {
        let micros = |seconds: Option<f64>| seconds.map(|seconds| (seconds * 1e6).round());
        let mut histogram = Histogram::default();
        assert_eq!(quantile(&histogram, None, 0.5), None);
        (0..100).for_each(|_| histogram.record(5_000_000));
        let before = histogram.clone();
        assert_eq!(quantile(&histogram, Some(&before), 0.5), None);
        (0..100).for_each(|_| histogram.record(150));
        assert_eq!(micros(quantile(&histogram, Some(&before), 0.5)), Some(150.0));
        assert_eq!(micros(quantile(&histogram, Some(&before), 1.0)), Some(200.0));
        histogram.record(u64::MAX);
        assert_eq!(quantile(&histogram, Some(&before), 1.0), Some(10.0), "more than that is not told");
    }
}
