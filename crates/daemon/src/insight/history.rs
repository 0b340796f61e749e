//! The core's counts at each step, by default every five minutes for a day, so that changes can be seen.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forebay_core::stats::Stats;

/// A day of steps of five minutes.
const STEPS: usize = 288;

pub struct History {
    step: Duration,
    /// Oldest first, one a step.
    counts: VecDeque<Stats>,
    next: Option<Instant>,
}

impl History {
    pub fn new(step: Duration) -> History {
        History { step, counts: VecDeque::new(), next: None }
    }

    /// Called now and then with what was counted until `now`. True if it was time for a step.
    pub fn tick(&mut self, now: Instant, stats: &Stats) -> bool {
        if self.next.is_some_and(|next| now < next) {
            return false;
        }
        self.next = Some(now + self.step);
        if self.counts.len() == STEPS {
            self.counts.pop_front();
        }
        self.counts.push_back(stats.clone());
        true
    }

    /// What stood `steps` steps ago, or at the start.
    pub fn ago(&self, steps: usize) -> Option<&Stats> {
        self.counts.get(self.counts.len().saturating_sub(steps + 1))
    }

    /// The oldest there is.
    pub fn oldest(&self) -> Option<&Stats> {
        self.counts.front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_is_kept_in_steps_of_five_minutes() {
        let mut history = History::new(Duration::from_secs(300));
        let start = Instant::now();
        for minute in 0..2000u64 {
            let stats = Stats { keys: minute, ..Stats::default() };
            history.tick(start + Duration::from_secs(60 * minute), &stats);
        }
        assert_eq!(history.counts.len(), STEPS);
        assert_eq!(history.ago(3).unwrap().keys, 1995 - 15);
        assert_eq!(history.oldest().unwrap().keys, 1995 - 5 * 287);
    }
}
