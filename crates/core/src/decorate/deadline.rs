//! Says which loads, probes and touches are late.
//!
//! A deadline frees the waiter, never the memory: the completion of a late load still comes from the tier, when its
//! slot is safe. Stores have no deadline: nobody waits for them, and a write budget may hold them back for long.

use std::collections::VecDeque;
use std::time::Duration;

use crate::tier::{OpId, OpKind, Operation};

/// See the module's head.
pub struct Deadline {
    limit: Duration,
    /// Loads, probes and touches, by the time at which they are late. Some of them have ended.
    due: VecDeque<(Duration, OpId)>,
}

impl Deadline {
    /// An operation is late `limit` after it was submitted.
    pub fn new(limit: Duration) -> Deadline {
        Deadline { limit, due: VecDeque::new() }
    }

    /// The tier took the operation.
    pub fn begin(&mut self, op: &Operation, now: Duration) {
        if matches!(op.kind, OpKind::Load | OpKind::Exists | OpKind::Touch { .. }) {
            self.due.push_back((now + self.limit, op.id));
        }
    }

    /// The next operation whose deadline has passed, each once. It may have ended.
    pub fn take_due(&mut self, now: Duration) -> Option<OpId> {
        self.due.pop_front_if(|(due, _)| *due <= now).map(|(_, id)| id)
    }

    /// Forgets operations that have ended, up to the first that has not.
    pub fn forget(&mut self, has_ended: impl Fn(&OpId) -> bool) {
        while self.due.pop_front_if(|(_, id)| has_ended(id)).is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, bare, done, op, polled, stack};
    use super::super::{Rules, Stack, Timed};
    use super::*;
    use crate::tier::{Outcome, Tier};

    const LIMIT: Duration = Duration::from_millis(100);

    fn deadline() -> Stack<Told> {
        stack(Rules { deadline: LIMIT, ..bare() })
    }

    fn late(tier: &mut Stack<Told>, at: u64) -> Vec<u64> {
        let mut late = Vec::new();
        tier.advance(Duration::from_millis(at));
        tier.take_late(&mut late);
        late.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn a_load_is_late_once_and_still_completes() {
        let mut tier = deadline();
        assert_eq!(tier.submit(&[op(1, LOAD), op(2, LOAD), op(3, OpKind::Store)]), 3);
        assert_eq!(late(&mut tier, 50), []);
        tier.submit(&[op(4, LOAD)]);
        tier.tier_mut().completions.push(done(1, Outcome::Absent));
        assert_eq!(polled(&mut tier).len(), 1);
        assert_eq!(late(&mut tier, 100), [2]);
        assert_eq!(late(&mut tier, 149), []);
        assert_eq!(late(&mut tier, 1000), [4], "stores are never late");
        assert_eq!(tier.tier().cancelled, [OpId(2), OpId(4)]);
        tier.tier_mut().completions.push(done(2, Outcome::Absent));
        assert_eq!(polled(&mut tier), [done(2, Outcome::Absent)]);
    }

    #[test]
    fn a_question_is_late_too() {
        let mut tier = deadline();
        tier.submit(&[op(1, OpKind::Exists), op(2, OpKind::Remove)]);
        assert_eq!(late(&mut tier, 100), [1]);
    }

    #[test]
    fn what_was_not_taken_is_not_waited_for() {
        let mut tier = deadline();
        tier.tier_mut().room = Some(1);
        assert_eq!(tier.submit(&[op(1, LOAD), op(2, LOAD)]), 1);
        assert_eq!(late(&mut tier, 1000), [1]);
    }

    #[test]
    fn what_has_ended_is_not_kept() {
        let mut tier = deadline();
        for id in 0..1000 {
            tier.submit(&[op(id, LOAD)]);
            tier.tier_mut().completions.push(done(id, Outcome::Absent));
            polled(&mut tier);
        }
        assert_eq!((tier.deadline.due.len(), tier.in_flight.len()), (0, 0));
    }
}
