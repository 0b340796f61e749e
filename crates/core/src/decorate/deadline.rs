//! Tells which loads and questions are late, and asks the tier to cancel them.
//!
//! A deadline frees the waiter, never the memory: the completion of a late load still comes from the tier, when its
//! slot is safe. Stores have no deadline: nobody waits for them, and a write budget may hold them back for long.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use super::{Timed, pass_on};
use crate::tier::{Completion, OpId, OpKind, Operation, Tier};

/// See the module's head. `T` is the tier with the wrappers inside this one.
pub struct Deadline<T> {
    inner: T,
    limit: Duration,
    now: Duration,
    /// Waited for and in flight, by the moment they are late, and some that have ended.
    due: VecDeque<(Duration, OpId)>,
    awaited: HashSet<OpId>,
    late: Vec<OpId>,
}

impl<T> Deadline<T> {
    /// Loads and questions are late once `limit` has passed since they were taken.
    pub fn new(inner: T, limit: Duration) -> Deadline<T> {
        let (due, awaited, late) = (VecDeque::new(), HashSet::new(), Vec::new());
        Deadline { inner, limit, now: Duration::ZERO, due, awaited, late }
    }

    /// What it wraps.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// What it wraps.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: Timed> Tier for Deadline<T> {
    pass_on!(name, capabilities, cancel, health);

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = self.inner.submit(batch);
        let is_waited_for = |op: &&Operation| matches!(op.kind, OpKind::Load { .. } | OpKind::Exists);
        for op in batch[..taken].iter().filter(is_waited_for) {
            self.awaited.insert(op.id);
            self.due.push_back((self.now + self.limit, op.id));
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        for completion in &completions[from..] {
            self.awaited.remove(&completion.id);
        }
        while self.due.front().is_some_and(|(_, id)| !self.awaited.contains(id)) {
            self.due.pop_front();
        }
    }
}

impl<T: Timed> Timed for Deadline<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        self.now = now;
        while let Some((_, id)) = self.due.pop_front_if(|(due, _)| *due <= now) {
            if self.awaited.contains(&id) {
                self.late.push(id);
                self.inner.cancel(id);
            }
        }
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        self.inner.take_late(late);
        late.append(&mut self.late);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, done, op, polled};
    use super::*;
    use crate::tier::Outcome;

    const LIMIT: Duration = Duration::from_millis(100);

    fn late(tier: &mut Deadline<Told>, at: u64) -> Vec<u64> {
        let mut late = Vec::new();
        tier.advance(Duration::from_millis(at));
        tier.take_late(&mut late);
        late.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn a_load_is_late_once_and_still_completes() {
        let mut tier = Deadline::new(Told::default(), LIMIT);
        assert_eq!(tier.submit(&[op(1, LOAD), op(2, LOAD), op(3, OpKind::Store)]), 3);
        assert_eq!(late(&mut tier, 50), []);
        tier.submit(&[op(4, LOAD)]);
        tier.inner.completions.push(done(1, Outcome::Absent));
        assert_eq!(polled(&mut tier).len(), 1);
        assert_eq!(late(&mut tier, 100), [2]);
        assert_eq!(late(&mut tier, 149), []);
        assert_eq!(late(&mut tier, 1000), [4], "stores are never late");
        assert_eq!(tier.inner.cancelled, [OpId(2), OpId(4)]);
        tier.inner.completions.push(done(2, Outcome::Absent));
        assert_eq!(polled(&mut tier), [done(2, Outcome::Absent)]);
    }

    #[test]
    fn a_question_is_late_too() {
        let mut tier = Deadline::new(Told::default(), LIMIT);
        tier.submit(&[op(1, OpKind::Exists), op(2, OpKind::Remove { at: Default::default() })]);
        assert_eq!(late(&mut tier, 100), [1]);
    }

    #[test]
    fn what_was_not_taken_is_not_waited_for() {
        let mut tier = Deadline::new(Told { room: Some(1), ..Told::default() }, LIMIT);
        assert_eq!(tier.submit(&[op(1, LOAD), op(2, LOAD)]), 1);
        assert_eq!(late(&mut tier, 1000), [1]);
    }

    #[test]
    fn what_has_ended_is_not_kept() {
        let mut tier = Deadline::new(Told::default(), LIMIT);
        for id in 0..1000 {
            tier.submit(&[op(id, LOAD)]);
            tier.inner.completions.push(done(id, Outcome::Absent));
            polled(&mut tier);
        }
        assert_eq!((tier.due.len(), tier.awaited.len()), (0, 0));
    }
}
