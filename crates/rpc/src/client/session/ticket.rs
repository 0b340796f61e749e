//! A lookup: in flight, answered, returned.
//!
//! Invariants: a ticket is answered exactly once; if its lookup is dropped, with a failure. The lease of an answer is
//! released when the ticket is dropped, or at once if that happened before.
//!
//! Locks are taken in the order holdings, cell.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::{Error, Result};

use super::Shared;
use crate::Hashes;
use crate::proto::{self, Held};

/// Values of a key's byte in `Ticket::states`.
pub const READY: u8 = 1;

/// Slot and generation of a key that is not ready.
const NO_SLOT: u32 = u32::MAX;

/// The engine's end of a lookup. Dropping it returns the lease.
pub struct Ticket {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
}

impl Ticket {
    pub(super) fn new(shared: Arc<Shared>, cell: Arc<Cell>) -> Ticket {
        Ticket { shared, cell }
    }

    /// Whether there is an answer; waits for one at most `timeout`.
    pub fn poll(&self, timeout: Duration) -> bool {
        let until = Instant::now().checked_add(timeout);
        let mut state = self.cell.state();
        while state.answer.is_none() {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            let woken = self.cell.answered.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// One byte per key of the `position`-th group: 0 miss, 1 ready and leased, 2 promoting. Errors with `Invalid` if
    /// there is no such group.
    pub fn states(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.states, 0, 1)
    }

    /// Little-endian u32 slots, one per key: 0xFFFFFFFF where the key is not ready.
    pub fn slots(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.slots, 0xFF, 4)
    }

    /// Little-endian u32 generations, parallel to `slots`.
    pub fn generations(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.generations, 0xFF, 4)
    }

    /// Whether the daemon could not be asked.
    pub fn has_failed(&self) -> bool {
        self.cell.state().answer.as_ref().is_some_and(|answer| answer.has_failed)
    }

    /// The pool with the slots; empty if the lookup failed or is in flight.
    pub fn pool(&self) -> Vec<u8> {
        self.cell.state().answer.as_ref().map(|answer| answer.pool.clone()).unwrap_or_default()
    }

    /// Returns the lease. Idempotent.
    pub fn release(&self) {
        let mut holdings = self.shared.holdings();
        let was_released = std::mem::replace(&mut self.cell.state().is_released, true);
        if !was_released {
            holdings.release(self.cell.id);
            drop(holdings);
            self.shared.wake_deliver.notify_one();
        }
    }

    fn read(
        &self,
        position: usize,
        part: impl Fn(&AnsweredGroup) -> &Vec<u8>,
        missing: u8,
        key_bytes: usize,
    ) -> Result<Vec<u8>> {
        let no_such_group = || {
            Error::invalid("the lookup has no such group")
                .with("position", position)
                .with("groups", self.cell.keys.len())
        };
        let keys = self.cell.keys.get(position).ok_or_else(no_such_group)?;
        let state = self.cell.state();
        let group = state.answer.as_ref().and_then(|answer| answer.groups.get(position));
        Ok(group.map_or_else(|| vec![missing; keys * key_bytes], |group| part(group).clone()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.release();
    }
}

/// Holds the answer from the background thread.
pub(super) struct Cell {
    pub id: u64,
    /// Number of keys per group.
    keys: Vec<usize>,
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

    pub fn keys(&self) -> usize {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer per key.
#[derive(Default)]
pub(super) struct Answer {
    pool: Vec<u8>,
    groups: Vec<AnsweredGroup>,
    has_failed: bool,
}

struct AnsweredGroup {
    states: Vec<u8>,
    slots: Vec<u8>,
    generations: Vec<u8>,
}

impl Answer {
    /// Misses everywhere.
    pub fn failed() -> Answer {
        Answer { has_failed: true, ..Answer::default() }
    }

    pub fn in_pool(mut self, pool: &[u8]) -> Answer {
        self.pool = pool.to_vec();
        self
    }
}

/// The background thread's end of a lookup: it carries the request and the answer.
pub(super) struct Lookup {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
    /// Epoch of the lookup's namespace.
    epoch: u64,
    groups: Vec<(u32, Hashes)>,
}

impl Lookup {
    pub fn new(shared: Arc<Shared>, cell: Arc<Cell>, epoch: u64, groups: Vec<(u32, Hashes)>) -> Lookup {
        Lookup { shared, cell, epoch, groups }
    }

    /// The message to send, if the answer will be useful; can be taken once.
    pub fn request(&mut self, session: u64) -> Option<proto::LookupRequest> {
        let namespace = self.shared.holdings().link.handle(self.epoch)?;
        let groups = std::mem::take(&mut self.groups).into_iter().map(|(group, hashes)| proto::GroupKeys {
            group,
            hash_bytes: hashes.hash_bytes() as u32,
            hashes: hashes.into_packed(),
        });
        let groups = groups.collect();
        self.cell.is_waiting().then_some(proto::LookupRequest { session, namespace, groups })
    }

    /// The deadline passed: the engine continues without the answer, which may still come.
    pub fn give_up(&self) {
        self.shared.holdings().fail_lookup(&self.cell);
    }

    /// Takes the daemon's answer, and returns the lease at once if nobody needs it any more.
    pub fn answer(self, reply: proto::LookupReply) {
        let lease = reply.lease;
        let read = read(reply, &self.cell.keys);
        if self.shared.holdings().answer_lookup(&self.cell, self.epoch, lease, read) {
            self.shared.wake_deliver.notify_one();
        }
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        self.shared.holdings().end_lookup(&self.cell);
    }
}

/// Assigns the reply to the requested keys; `None` if it does not match them.
fn read(reply: proto::LookupReply, keys: &[usize]) -> Option<(Answer, Vec<Held>)> {
    if reply.groups.len() != keys.len() {
        return None;
    }
    let mut held = Vec::with_capacity(reply.groups.iter().map(|group| group.slots.len()).sum());
    let groups = reply.groups.into_iter().zip(keys).map(|(group, keys)| spread(group, *keys, &mut held));
    let groups = groups.collect::<Option<Vec<_>>>()?;
    Some((Answer { groups, ..Answer::default() }, held))
}

fn spread(group: proto::GroupAnswer, keys: usize, held: &mut Vec<Held>) -> Option<AnsweredGroup> {
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
    Some(AnsweredGroup { states, slots, generations })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(states: &[u8], slots: &[u32]) -> proto::GroupAnswer {
        let generations = slots.iter().map(|slot| slot + 100).collect();
        proto::GroupAnswer { states: states.to_vec(), slots: slots.to_vec(), generations }
    }

    #[test]
    fn ready_keys_get_their_slots_and_cut_off_keys_are_misses() {
        let mut held = Vec::new();
        let answer = spread(group(&[1, 2, 0, 1], &[7, 9]), 5, &mut held).unwrap();
        assert_eq!(answer.states, [1, 2, 0, 1, 0]);
        let slots: Vec<_> = answer.slots.chunks(4).map(|slot| u32::from_le_bytes(slot.try_into().unwrap())).collect();
        assert_eq!(slots, [7, NO_SLOT, NO_SLOT, 9, NO_SLOT]);
        assert_eq!(held, [Held { slot: 7, generation: 107 }, Held { slot: 9, generation: 109 }]);
    }

    #[test]
    fn replies_that_do_not_fit_the_question_are_refused() {
        let bad = [group(&[1, 1], &[7]), group(&[0], &[7]), group(&[0, 0, 0], &[])];
        for group in bad {
            assert!(spread(group.clone(), 2, &mut Vec::new()).is_none(), "{group:?}");
        }
        assert!(read(proto::LookupReply::default(), &[1]).is_none());
    }
}
