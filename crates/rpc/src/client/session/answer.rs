//! The answer of a lookup, and the cell in which it waits for the engine.
//!
//! Invariant: a cell is answered once; later answers are ignored. Afterwards only keys that are promoting change: they
//! become ready or a miss, at the latest when the lookup ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::proto::{GroupAnswer, Held, LookupReply};
use crate::words;

/// Values of a key's byte in `Group::states`.
const MISS: u8 = 0;
const READY: u8 = 1;
const PROMOTING: u8 = 2;

/// The source of a block that no tier brought up for this hit.
const POOL: u8 = 0;

/// Each byte of the slot and of the generation of a key that is not ready.
const NO_SLOT: u8 = 0xFF;

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

    /// The keys that were promoting have these states now, in their order.
    pub fn update(&self, news: &Answer) {
        let mut state = self.state();
        let groups = state.answer.iter_mut().flat_map(|answer| &mut answer.groups);
        groups.zip(&news.groups).for_each(|(group, news)| group.update(news));
    }

    /// Nothing comes any more: keys that are promoting are misses. Returns whether there were any.
    pub fn end(&self) -> bool {
        let mut state = self.state();
        let groups = state.answer.iter_mut().flat_map(|answer| &mut answer.groups);
        let promoting = groups.flat_map(|group| &mut group.states).filter(|state| **state == PROMOTING);
        promoting.map(|state| *state = MISS).count() > 0
    }

    /// Numbers of the keys that are promoting, by group.
    pub fn promoting(&self) -> Vec<usize> {
        let state = self.state();
        let groups = state.answer.iter().flat_map(|answer| &answer.groups);
        groups.map(|group| group.states.iter().filter(|state| **state == PROMOTING).count()).collect()
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
    /// Where each key's block was before this hit, as in `GroupAnswer`; 0 for keys that are not ready.
    pub sources: Vec<u8>,
}

impl Answer {
    /// Misses everywhere.
    pub fn failed() -> Answer {
        Answer { has_failed: true, ..Answer::default() }
    }

    /// Assigns the reply to the keys that it answers, and lists the leased slots; `None` if the reply does not match
    /// them.
    pub fn from_reply(reply: LookupReply, keys: &[usize]) -> Option<(Answer, Vec<Held>)> {
        if reply.groups.len() != keys.len() {
            return None;
        }
        let mut held = Vec::with_capacity(reply.groups.iter().map(|group| group.slots.len() / 4).sum());
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
        let GroupAnswer { mut states, mut slots, mut generations, mut sources } = group;
        let ready = states.iter().filter(|state| **state == READY).count();
        let is_parallel = slots.len() == 4 * ready && generations.len() == 4 * ready && sources.len() <= ready;
        if states.len() > keys || !is_parallel {
            return None;
        }
        let leased = words(&slots).zip(words(&generations));
        held.extend(leased.map(|(slot, generation)| Held { slot, generation }));
        states.resize(keys, MISS);
        sources.resize(ready, POOL);
        // Nearly always the ready keys are the first ones, and their numbers stand where they belong.
        if states[..ready].iter().any(|state| *state != READY) {
            slots = spread::<4>(&slots, NO_SLOT, &states);
            generations = spread::<4>(&generations, NO_SLOT, &states);
            sources = spread::<1>(&sources, POOL, &states);
        }
        slots.resize(4 * keys, NO_SLOT);
        generations.resize(4 * keys, NO_SLOT);
        sources.resize(keys, POOL);
        Some(Group { states, slots, generations, sources })
    }

    /// `news` has as many keys as are promoting here.
    fn update(&mut self, news: &Group) {
        let promoting: Vec<usize> = (0..self.states.len()).filter(|at| self.states[*at] == PROMOTING).collect();
        for (from, to) in promoting.into_iter().enumerate() {
            self.states[to] = news.states[from];
            if self.states[to] == READY {
                self.slots[4 * to..][..4].copy_from_slice(&news.slots[4 * from..][..4]);
                self.generations[4 * to..][..4].copy_from_slice(&news.generations[4 * from..][..4]);
                self.sources[to] = news.sources[from];
            }
        }
    }
}

/// Entries of `N` bytes, one for each ready key, put where their keys are; `nothing` is in each byte between them.
fn spread<const N: usize>(entries: &[u8], nothing: u8, states: &[u8]) -> Vec<u8> {
    let mut at_keys = vec![nothing; N * states.len()];
    let ready = at_keys.as_chunks_mut::<N>().0.iter_mut().zip(states).filter(|(_, state)| **state == READY);
    ready.zip(entries.as_chunks::<N>().0).for_each(|((place, _), entry)| *place = *entry);
    at_keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::to_words;

    /// Slot and generation of a key that is not ready.
    const NONE: u32 = u32::MAX;

    fn group(states: &[u8], slots: &[u32]) -> GroupAnswer {
        let generations: Vec<_> = slots.iter().map(|slot| slot + 100).collect();
        let (slots, generations) = (to_words(slots), to_words(&generations));
        GroupAnswer { states: states.to_vec(), slots, generations, sources: Vec::new() }
    }

    fn answer(states: &[u8], slots: &[u32], keys: usize) -> Answer {
        let reply = LookupReply { lease: 1, groups: vec![group(states, slots)] };
        Answer::from_reply(reply, &[keys]).unwrap().0
    }

    #[test]
    fn ready_keys_get_their_slots_and_cut_off_keys_are_misses() {
        let mut held = Vec::new();
        let answer = Group::from_reply(group(&[1, 2, 0, 1], &[7, 9]), 5, &mut held).unwrap();
        assert_eq!(answer.states, [1, 2, 0, 1, 0]);
        assert!(words(&answer.slots).eq([7, NONE, NONE, 9, NONE]));
        assert!(words(&answer.generations).eq([107, NONE, NONE, 109, NONE]));
        assert_eq!(held, [Held { slot: 7, generation: 107 }, Held { slot: 9, generation: 109 }]);
    }

    #[test]
    fn ready_keys_at_the_head_keep_their_order() {
        let mut held = Vec::new();
        let answer = Group::from_reply(group(&[1, 1, 2], &[7, 9]), 5, &mut held).unwrap();
        assert!(words(&answer.slots).eq([7, 9, NONE, NONE, NONE]));
        assert!(words(&answer.generations).eq([107, 109, NONE, NONE, NONE]));
        assert_eq!((answer.states, answer.sources), (vec![1, 1, 2, 0, 0], vec![0; 5]));
        assert_eq!(held.len(), 2);
    }

    #[test]
    fn what_a_reply_says_of_sources_belongs_to_the_ready_keys() {
        let told = GroupAnswer { sources: vec![0, 2], ..group(&[1, 2, 0, 1, 1], &[7, 9, 8]) };
        let first = Group::from_reply(told, 6, &mut Vec::new()).unwrap();
        assert_eq!(first.sources, [0, 0, 0, 2, 0, 0]);
        let mut all = first;
        let news = GroupAnswer { sources: vec![1], ..group(&[1], &[5]) };
        all.update(&Group::from_reply(news, 1, &mut Vec::new()).unwrap());
        assert_eq!(all.sources, [0, 1, 0, 2, 0, 0]);
        let too_many = GroupAnswer { sources: vec![0, 1], ..group(&[1], &[5]) };
        assert!(Group::from_reply(too_many, 1, &mut Vec::new()).is_none(), "more sources than ready keys");
    }

    #[test]
    fn later_replies_answer_the_keys_that_were_promoting_and_no_others() {
        let cell = Cell::new(vec![5]);
        cell.settle(answer(&[1, 2, 0, 2, 2], &[7], 5));
        assert_eq!(cell.promoting(), [3]);
        cell.update(&answer(&[1, 2], &[9], 3));
        assert_eq!(cell.state().answer.as_ref().unwrap().groups[0].states, [1, 1, 0, 2, 0]);
        cell.update(&answer(&[1], &[8], 1));
        let state = cell.state();
        let group = &state.answer.as_ref().unwrap().groups[0];
        assert_eq!(group.states, [1, 1, 0, 1, 0]);
        assert!(words(&group.slots).eq([7, 9, NONE, 8, NONE]));
        assert!(words(&group.generations).eq([107, 109, NONE, 108, NONE]));
    }

    #[test]
    fn replies_that_do_not_fit_the_question_are_refused() {
        let torn = GroupAnswer { slots: vec![7, 0, 0], ..group(&[1], &[7]) };
        let bad = [group(&[1, 1], &[7]), group(&[0], &[7]), group(&[0, 0, 0], &[]), torn];
        for group in bad {
            assert!(Group::from_reply(group.clone(), 2, &mut Vec::new()).is_none(), "{group:?}");
        }
        assert!(Answer::from_reply(LookupReply::default(), &[1]).is_none());
    }
}
