//! Queue hints: which of the engine's requests wait, and what the daemon must still be told about them.
//!
//! Invariants: at most [`limits::WAITING`] requests are kept, and further ones are not reported. A request that is
//! withdrawn before its hint was sent is never reported. Hints are not durable: those lost with a connection are not
//! repeated.

use std::collections::HashSet;

use super::limits;
use crate::Hashes;
use crate::proto::{GroupKeys, QueueHint};

/// See the module documentation.
#[derive(Default)]
pub(super) struct Hints {
    fresh: Vec<QueueHint>,
    sent: HashSet<u64>,
    withdrawn: Vec<u64>,
}

impl Hints {
    pub fn add(&mut self, request: u64, groups: Vec<(u32, Hashes)>) {
        if self.fresh.len() + self.sent.len() >= limits::WAITING || self.sent.contains(&request) {
            return;
        }
        let groups = groups.into_iter().map(|(group, mut hashes)| {
            hashes.truncate(limits::KEYS_PER_WAITING);
            GroupKeys { group, hash_bytes: hashes.hash_bytes() as u32, hashes: hashes.into_packed() }
        });
        self.fresh.push(QueueHint { request, groups: groups.collect() });
    }

    pub fn withdraw(&mut self, request: u64) {
        self.fresh.retain(|waiting| waiting.request != request);
        if self.sent.remove(&request) {
            self.withdrawn.push(request);
        }
    }

    /// The next report: withdrawn requests and waiting ones.
    pub fn next(&mut self) -> Option<(Vec<u64>, Vec<QueueHint>)> {
        if self.withdrawn.is_empty() && self.fresh.is_empty() {
            return None;
        }
        self.sent.extend(self.fresh.iter().map(|waiting| waiting.request));
        Some((std::mem::take(&mut self.withdrawn), std::mem::take(&mut self.fresh)))
    }

    /// The engine changes to another namespace: unsent hints of the old one are dropped, sent ones withdrawn.
    pub fn leave(&mut self) {
        self.fresh.clear();
        self.withdrawn.extend(self.sent.drain());
    }

    /// The daemon dropped all hints with the session.
    pub fn disconnected(&mut self) {
        *self = Hints::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack;

    fn keys(count: usize) -> Vec<(u32, Hashes)> {
        vec![(0, pack(vec![b"hash".as_slice(); count]).unwrap())]
    }

    fn told(hints: &mut Hints) -> (Vec<u64>, Vec<u64>) {
        let (withdrawn, fresh) = hints.next().unwrap_or_default();
        (withdrawn, fresh.iter().map(|hints| hints.request).collect())
    }

    #[test]
    fn only_changes_are_told_and_who_was_met_at_once_not_at_all() {
        let mut hints = Hints::default();
        (1..=3).for_each(|request| hints.add(request, keys(2)));
        hints.withdraw(2);
        assert_eq!(told(&mut hints), (vec![], vec![1, 3]));
        assert!(hints.next().is_none());
        hints.withdraw(1);
        hints.withdraw(1);
        hints.add(4, keys(1));
        assert_eq!(told(&mut hints), (vec![1], vec![4]));
        hints.leave();
        let (mut withdrawn, fresh) = told(&mut hints);
        withdrawn.sort_unstable();
        assert_eq!((withdrawn, fresh), (vec![3, 4], vec![]));
    }

    #[test]
    fn there_is_a_limit_on_requests_and_on_keys() {
        let mut hints = Hints::default();
        (0..2 * limits::WAITING as u64).for_each(|request| hints.add(request, keys(limits::KEYS_PER_WAITING + 7)));
        let (_, fresh) = hints.next().unwrap();
        assert_eq!(fresh.len(), limits::WAITING);
        assert!(fresh.iter().all(|hints| hints.groups[0].hashes.len() == 4 * limits::KEYS_PER_WAITING));
        hints.add(1 << 20, keys(1));
        assert!(hints.next().is_none(), "it is full");
        hints.withdraw(0);
        hints.add(1 << 20, keys(1));
        assert_eq!(told(&mut hints), (vec![0], vec![1 << 20]));
    }
}
