//! How many of the recent requests' keys the best possible cache of a given size would have hit.
//!
//! The ceiling knows no capacity; this does. A sample of the keys, chosen by their hash, is remembered in the order
//! asked; in hindsight the exact optimum for a cache as much smaller is computed (evict what is asked for latest;
//! with prompts closed, this is the optimum for prefixes, too). Beside it stand the hits there really were, of the
//! same keys, so that both tell of the same time.
//!
//! Invariants: at most [`ACCESSES`] accesses are remembered, 16 bytes each; they reach back as far as sixteen times
//! the capacity in keys asked for. Keys must be well mixed. A key's first mention in that time is a miss to both.

use std::collections::{BinaryHeap, HashMap, VecDeque};

/// Remembered accesses.
pub const ACCESSES: usize = 1 << 16;
/// The sampled cache holds so many blocks: chance moves its optimum by about a point.
const SAMPLED_BLOCKS: f64 = 4096.0;
const NEVER: u32 = u32::MAX;

#[derive(Clone)]
pub struct Optimum {
    capacity: f64,
    /// Keys below it are in the sample.
    threshold: u64,
    /// Key, and the request's number doubled, plus one if it hit.
    accesses: VecDeque<(u64, u64)>,
    requests: u64,
}

/// Of the sampled keys asked for, in the time remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    pub asked: u64,
    /// That were asked for before in that time: what an unlimited cache hits.
    pub again: u64,
    pub hits: u64,
    pub optimum_hits: u64,
}

impl Optimum {
    /// For a cache of `capacity` blocks.
    pub fn new(capacity: u64) -> Optimum {
        let capacity = capacity.max(1) as f64;
        let rate = (SAMPLED_BLOCKS / capacity).min(1.0);
        let threshold = (u64::MAX as f64 * rate) as u64;
        Optimum { capacity: capacity * rate, threshold, accesses: VecDeque::new(), requests: 0 }
    }

    /// A request asked for `keys`, of which the first `hits` were there.
    pub fn note(&mut self, keys: &[u64], hits: usize) {
        self.requests += 1;
        for (at, key) in keys.iter().enumerate().filter(|(_, key)| **key <= self.threshold) {
            if self.accesses.len() == ACCESSES {
                self.accesses.pop_front();
            }
            self.accesses.push_back((*key, self.requests << 1 | u64::from(at < hits)));
        }
    }

    /// What the best cache would have hit. Takes some milliseconds where much is remembered.
    pub fn sampled(&self) -> Sampled {
        let next_uses = self.next_uses();
        let capacity = self.capacity.round().max(1.0) as usize;
        let mut kept: HashMap<u64, u32> = HashMap::new();
        let mut latest: BinaryHeap<(u32, u64)> = BinaryHeap::new();
        let mut sampled = Sampled { asked: self.accesses.len() as u64, ..Sampled::default() };
        let mut seen: std::collections::HashSet<u64> = std::collections::HashSet::new();
        let mut at = 0;
        while at < self.accesses.len() {
            let request = self.accesses[at].1 >> 1;
            let end = (at..self.accesses.len()).find(|other| self.accesses[*other].1 >> 1 != request);
            let end = end.unwrap_or(self.accesses.len());
            for access in at..end {
                let (key, mark) = self.accesses[access];
                sampled.hits += mark & 1;
                sampled.again += u64::from(!seen.insert(key));
                sampled.optimum_hits += u64::from(kept.remove(&key).is_some());
            }
            for access in (at..end).filter(|access| next_uses[*access] != NEVER) {
                kept.insert(self.accesses[access].0, next_uses[access]);
                latest.push((next_uses[access], self.accesses[access].0));
            }
            while kept.len() > capacity {
                let (next, key) = latest.pop().expect("what is kept is in the heap");
                if kept.get(&key) == Some(&next) {
                    kept.remove(&key);
                }
            }
            at = end;
        }
        sampled
    }

    /// For each access the next one of the same key.
    fn next_uses(&self) -> Vec<u32> {
        let mut next: HashMap<u64, u32> = HashMap::new();
        let mut uses = vec![NEVER; self.accesses.len()];
        for at in (0..self.accesses.len()).rev() {
            uses[at] = next.insert(self.accesses[at].0, at as u32).unwrap_or(NEVER);
        }
        uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::mix;

    #[test]
    fn a_cycle_larger_than_the_cache_is_hit_as_far_as_it_fits() {
        // LRU hits nothing of it; the optimum keeps two of three, each for one round.
        let mut optimum = Optimum::new(2);
        (0..30u64).for_each(|n| optimum.note(&[mix(n % 3)], 0));
        let Sampled { asked, again, hits, optimum_hits } = optimum.sampled();
        assert_eq!((asked, again, hits), (30, 27, 0));
        // Of each two steps in the cycle one is a hit.
        assert!((13..=18).contains(&optimum_hits), "{optimum_hits}");
    }

    #[test]
    fn a_sample_tells_about_what_the_whole_does() {
        // Half of the requests go to 4,000 keys, half to 400,000, with room for 40,000.
        let key = |n: u64| if n.is_multiple_of(2) { mix(mix(n) % 4000) } else { mix(4000 + mix(n) % 400_000) };
        let ratio = |optimum: &Optimum| {
            let sampled = optimum.sampled();
            sampled.optimum_hits as f64 / sampled.asked as f64
        };
        let mut sampled = Optimum::new(40_000);
        assert!(sampled.threshold < u64::MAX / 9);
        let mut whole = Optimum { threshold: u64::MAX, capacity: 40_000.0, ..sampled.clone() };
        for n in 0..60_000 {
            sampled.note(&[key(n)], 0);
            whole.note(&[key(n)], 0);
        }
        assert!((ratio(&sampled) - ratio(&whole)).abs() < 0.03, "{} and {}", ratio(&sampled), ratio(&whole));
    }

    #[test]
    fn hits_are_counted_of_the_same_keys_and_memory_is_bounded() {
        let mut optimum = Optimum::new(1000);
        for n in 0..100_000u64 {
            optimum.note(&[mix(n % 500), mix(1_000_000 + n)], 1);
        }
        assert_eq!(optimum.accesses.len(), ACCESSES);
        let Sampled { asked, hits, optimum_hits, again } = optimum.sampled();
        assert_eq!((asked, hits), (ACCESSES as u64, ACCESSES as u64 / 2));
        assert_eq!((optimum_hits, again), (ACCESSES as u64 / 2 - 500, ACCESSES as u64 / 2 - 500));
    }
}
