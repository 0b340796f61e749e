//! The answer of a lookup, and the cell in which it waits for the engine.
//!
//! Invariant: a cell is answered once; later answers are ignored.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::proto::{GroupAnswer, Held, LookupReply};

/// The byte of a ready key in `Group::states`.
const READY: u8 = 1;

/// Slot and generation of a key that is not ready.
const NO_SLOT: u32 = u32::MAX;

/// Holds the answer from the background thread, until the ticket is dropped.
pub(super) struct Cell {
    pub id: u64,
    /// Number of keys per group.
    pub keys: Vec<usize>,
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    answer: Option<Answer>,
    is_released: bool,
}

impl Cell {
    pub fn new(keys: Vec<usize>) -> Cell {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Cell { id, keys, state: Mutex::default(), answered: Condvar::new() }
    }

    /// Number of keys of all groups.
    pub fn key_count(&self) -> usize {
        self.keys.iter().sum()
    }

    /// Whether an answer is still useful: none has come yet, and the ticket is held.
    pub fn is_waiting(&self) -> bool {
        let state = self.state();
        state.answer.is_none() && !state.is_released
    }

    /// Sets the answer, unless there is one.
    pub fn settle(&self, answer: Answer) {
        self.state().answer.get_or_insert(answer);
        self.answered.notify_all();
    }

    /// Whether there is an answer; waits for one at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now().checked_add(timeout);
        let mut state = self.state();
        while state.answer.is_none() {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            let woken = self.answered.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// What `part` takes from the answer; `None` while there is none.
    pub fn read<T>(&self, part: impl FnOnce(&Answer) -> T) -> Option<T> {
        self.state().answer.as_ref().map(part)
    }

    /// The ticket needs the answer no more; false if that was said before.
    pub fn release(&self) -> bool {
        !std::mem::replace(&mut self.state().is_released, true)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer per key.
#[derive(Default)]
pub(super) struct Answer {
    /// The pool with the slots; empty if the daemon could not be asked.
    pub pool: Vec<u8>,
    pub groups: Vec<Group>,
    /// Whether the daemon could not be asked.
    pub has_failed: bool,
}

/// One group's keys, in the forms that `Ticket` gives to the engine.
pub(super) struct Group {
    pub states: Vec<u8>,
    pub slots: Vec<u8>,
    pub generations: Vec<u8>,
}

impl Answer {
    /// Misses everywhere.
    pub fn failed() -> Answer {
        Answer { has_failed: true, ..Answer::default() }
    }

    /// Assigns the reply to the requested keys, and lists the leased slots; `None` if the reply does not match them.
    pub fn from_reply(reply: LookupReply, keys: &[usize]) -> Option<(Answer, Vec<Held>)> {
        if reply.groups.len() != keys.len() {
            return None;
        }
        let mut held = Vec::with_capacity(reply.groups.iter().map(|group| group.slots.len()).sum());
        let groups = reply.groups.into_iter().zip(keys).map(|(group, keys)| Group::from_reply(group, *keys, &mut held));
        let groups = groups.collect::<Option<Vec<_>>>()?;
        Some((Answer { groups, ..Answer::default() }, held))
    }

    pub fn in_pool(mut self, pool: &[u8]) -> Answer {
        self.pool = pool.to_vec();
        self
    }
}

impl Group {
    /// Adds the leased slots to `held`; `None` if the reply does not match the number of keys.
    fn from_reply(group: GroupAnswer, keys: usize, held: &mut Vec<Held>) -> Option<Group> {
        let mut states = group.states;
        let ready = states.iter().filter(|state| **state == READY).count();
        if states.len() > keys || group.slots.len() != ready || group.generations.len() != ready {
            return None;
        }
        states.resize(keys, 0);
        let mut slots = Vec::with_capacity(keys * 4);
        let mut generations = Vec::with_capacity(keys * 4);
        let mut leased = group.slots.into_iter().zip(group.generations);
        for state in &states {
            let next = if *state == READY { leased.next() } else { None };
            let (slot, generation) = next.unwrap_or((NO_SLOT, NO_SLOT));
            slots.extend_from_slice(&slot.to_le_bytes());
            generations.extend_from_slice(&generation.to_le_bytes());
            if next.is_some() {
                held.push(Held { slot, generation });
            }
        }
        Some(Group { states, slots, generations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(states: &[u8], slots: &[u32]) -> GroupAnswer {
        let generations = slots.iter().map(|slot| slot + 100).collect();
        GroupAnswer { states: states.to_vec(), slots: slots.to_vec(), generations }
    }

    #[test]
    fn ready_keys_get_their_slots_and_cut_off_keys_are_misses() {
        let mut held = Vec::new();
        let answer = Group::from_reply(group(&[1, 2, 0, 1], &[7, 9]), 5, &mut held).unwrap();
        assert_eq!(answer.states, [1, 2, 0, 1, 0]);
        let slots: Vec<_> = answer.slots.chunks(4).map(|slot| u32::from_le_bytes(slot.try_into().unwrap())).collect();
        assert_eq!(slots, [7, NO_SLOT, NO_SLOT, 9, NO_SLOT]);
        assert_eq!(held, [Held { slot: 7, generation: 107 }, Held { slot: 9, generation: 109 }]);
    }

    #[test]
    fn replies_that_do_not_fit_the_question_are_refused() {
        let bad = [group(&[1, 1], &[7]), group(&[0], &[7]), group(&[0, 0, 0], &[])];
        for group in bad {
            assert!(Group::from_reply(group.clone(), 2, &mut Vec::new()).is_none(), "{group:?}");
        }
        assert!(Answer::from_reply(LookupReply::default(), &[1]).is_none());
    }
}
