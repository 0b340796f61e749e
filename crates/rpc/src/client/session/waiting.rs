//! Which of the engine's requests wait, as far as the daemon was or has to be told.
//!
//! Holds true: at most [`limits::WAITING`] requests are known, and those beyond are not told of; a request that is met
//! before the daemon heard of it is never told of. It is a hint: what is lost with a connection is not told again.

use std::collections::HashSet;

use super::limits;
use crate::Hashes;
use crate::proto::{GroupKeys, Waiting as Told};

/// See the module's head.
#[derive(Default)]
pub(super) struct Waiting {
    fresh: Vec<Told>,
    told: HashSet<u64>,
    met: Vec<u64>,
}

impl Waiting {
    pub fn expect(&mut self, request: u64, groups: Vec<(u32, Hashes)>) {
        if self.fresh.len() + self.told.len() >= limits::WAITING || self.told.contains(&request) {
            return;
        }
        let groups = groups.into_iter().map(|(group, mut hashes)| {
            hashes.truncate(limits::KEYS_PER_WAITING);
            GroupKeys { group, hash_bytes: hashes.hash_bytes() as u32, hashes: hashes.into_packed() }
        });
        self.fresh.push(Told { request, groups: groups.collect() });
    }

    pub fn met(&mut self, request: u64) {
        self.fresh.retain(|waiting| waiting.request != request);
        if self.told.remove(&request) {
            self.met.push(request);
        }
    }

    /// What to tell: who is met, and who waits.
    pub fn next(&mut self) -> Option<(Vec<u64>, Vec<Told>)> {
        if self.met.is_empty() && self.fresh.is_empty() {
            return None;
        }
        self.told.extend(self.fresh.iter().map(|waiting| waiting.request));
        Some((std::mem::take(&mut self.met), std::mem::take(&mut self.fresh)))
    }

    /// The engine asks under another namespace from now on: what waits there was not told of yet.
    pub fn leave(&mut self) {
        self.fresh.clear();
        self.met.extend(self.told.drain());
    }

    /// The daemon forgot all with the session.
    pub fn disconnected(&mut self) {
        *self = Waiting::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack;

    fn keys(count: usize) -> Vec<(u32, Hashes)> {
        vec![(0, pack(vec![b"hash".as_slice(); count]).unwrap())]
    }

    fn told(waiting: &mut Waiting) -> (Vec<u64>, Vec<u64>) {
        let (met, fresh) = waiting.next().unwrap_or_default();
        (met, fresh.iter().map(|waiting| waiting.request).collect())
    }

    #[test]
    fn only_changes_are_told_and_who_was_met_at_once_not_at_all() {
        let mut waiting = Waiting::default();
        (1..=3).for_each(|request| waiting.expect(request, keys(2)));
        waiting.met(2);
        assert_eq!(told(&mut waiting), (vec![], vec![1, 3]));
        assert!(waiting.next().is_none());
        waiting.met(1);
        waiting.met(1);
        waiting.expect(4, keys(1));
        assert_eq!(told(&mut waiting), (vec![1], vec![4]));
        waiting.leave();
        let (mut met, fresh) = told(&mut waiting);
        met.sort_unstable();
        assert_eq!((met, fresh), (vec![3, 4], vec![]));
    }

    #[test]
    fn there_is_a_limit_on_requests_and_on_keys() {
        let mut waiting = Waiting::default();
        (0..2 * limits::WAITING as u64).for_each(|request| waiting.expect(request, keys(limits::KEYS_PER_WAITING + 7)));
        let (_, fresh) = waiting.next().unwrap();
        assert_eq!(fresh.len(), limits::WAITING);
        assert!(fresh.iter().all(|waiting| waiting.groups[0].hashes.len() == 4 * limits::KEYS_PER_WAITING));
        waiting.expect(1 << 20, keys(1));
        assert!(waiting.next().is_none(), "it is full");
        waiting.met(0);
        waiting.expect(1 << 20, keys(1));
        assert_eq!(told(&mut waiting), (vec![0], vec![1 << 20]));
    }
}
