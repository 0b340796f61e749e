//! Warnings of what happens again and again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time between two warnings of one kind: while a cause lasts, each try fails.
const QUIET: Duration = Duration::from_secs(10);

/// How often something was not told, and when it was last.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<(u64, Option<Instant>)>);

impl Seldom {
    /// Adds one; returns how many are to be told now, if it is time.
    pub fn add(&self, now: Instant) -> Option<u64> {
        let mut this = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        this.0 += 1;
        let is_time = this.1.is_none_or(|told| now - told >= QUIET);
        is_time.then(|| std::mem::replace(&mut *this, (0, Some(now))).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_of_event_is_told_of_every_ten_seconds_at_most() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let told = [0, 1, 9, 10, 11, 21].map(|second| seldom.add(start + Duration::from_secs(second)));
        assert_eq!(told, [Some(1), None, None, Some(3), None, Some(2)]);
    }
}
