//! How long to wait before the next attempt: doubling from 50 ms to 2 s, with jitter so that the engines of a host do
//! not all reconnect at once after a restart of the daemon.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// See the module documentation.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    /// The first step, also after a reset.
    pub const FIRST: Duration = Duration::from_millis(50);
    /// The longest step.
    pub const MAX: Duration = Duration::from_secs(2);

    /// Begins with [`Backoff::FIRST`].
    pub fn new() -> Backoff {
        Backoff { next: Backoff::FIRST }
    }

    /// The next pause: a random part, between half and all, of the current step.
    pub fn pause(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(Backoff::MAX);
        step / 2 + step.mul_f64(jitter() / 2.0)
    }

    /// An attempt succeeded: the next pause is short again.
    pub fn reset(&mut self) {
        self.next = Backoff::FIRST;
    }
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff::new()
    }
}

/// Between 0 and 1. A hasher's random keys are random enough.
fn jitter() -> f64 {
    RandomState::new().hash_one(0u8) as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_limit_and_start_over_after_a_reset() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = (0..10).map(|_| backoff.pause()).collect();
        assert!(pauses[0] >= Backoff::FIRST / 2 && pauses[0] <= Backoff::FIRST, "{pauses:?}");
        assert!(pauses[9] >= Backoff::MAX / 2 && pauses.iter().all(|pause| *pause <= Backoff::MAX), "{pauses:?}");
        backoff.reset();
        assert!(backoff.pause() <= Backoff::FIRST);
    }
}
