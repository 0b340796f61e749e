//! How many of the recent requests' keys the best possible cache of a given size would have hit.
//!
//! The ceiling knows no capacity; this does. A sample of the keys, chosen by their hash, is remembered in the order
//! asked; in hindsight the exact optimum for a cache as much smaller is computed (evict what is asked for latest; with
//! prompts closed, this is the optimum for prefixes, too; blocks of several sizes go by when they come again, which is
//! close to it). Beside it stand the hits there really were, of the same keys, so that both tell of the same time. All
//! owners share the cache; what each got of it is told apart.
//!
//! Invariants: at most [`ACCESSES`] accesses are remembered, 16 bytes each; they reach back as far as sixteen times
//! the capacity in keys asked for. Keys must be well mixed. A key's first mention in that time is to the best cache
//! what it was really: a hit if the block had been stored before, else a miss.

use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use forebay_core::PAGE_BYTES;

use crate::curve::OWNERS;

/// Remembered accesses.
pub const ACCESSES: usize = 1 << 16;
/// The sampled cache holds so many blocks: chance moves its optimum by about a point.
const SAMPLED_BLOCKS: f64 = 4096.0;
const NEVER: u32 = u32::MAX;

#[derive(Clone)]
pub struct Optimum {
    capacity_pages: f64,
    /// Keys below it are in the sample.
    threshold: u64,
    accesses: VecDeque<Access>,
    requests: u32,
}

/// A sampled key that was asked for.
#[derive(Clone, Copy)]
struct Access {
    key: u64,
    /// Number of its request; only whether it is that of its neighbour matters.
    request: u32,
    /// Pages of the block (27 bits), owner (4 bits), whether it was a hit (1 bit).
    about: u32,
}

const _: () = assert!(OWNERS <= 16, "an access has four bits for its owner");

impl Access {
    fn pages(self) -> u64 {
        u64::from(self.about >> 5)
    }

    fn owner(self) -> usize {
        (self.about >> 1 & 15) as usize
    }

    fn is_hit(self) -> bool {
        self.about & 1 == 1
    }
}

/// Of the sampled keys asked for, in the time remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    pub asked: u64,
    /// That were asked for before in that time, or stored before it: what an unlimited cache hits.
    pub again: u64,
    pub hits: u64,
    pub optimum_hits: u64,
}

impl std::iter::Sum for Sampled {
    fn sum<I: Iterator<Item = Sampled>>(all: I) -> Sampled {
        all.fold(Sampled::default(), |sum, one| Sampled {
            asked: sum.asked + one.asked,
            again: sum.again + one.again,
            hits: sum.hits + one.hits,
            optimum_hits: sum.optimum_hits + one.optimum_hits,
        })
    }
}

impl Optimum {
    /// For a cache of `capacity_bytes`, and blocks of about `block_bytes`.
    pub fn new(capacity_bytes: u64, block_bytes: u64) -> Optimum {
        let capacity_pages = (capacity_bytes / PAGE_BYTES).max(1) as f64;
        let blocks = (capacity_bytes / block_bytes.max(1)).max(1) as f64;
        let rate = (SAMPLED_BLOCKS / blocks).min(1.0);
        let threshold = (u64::MAX as f64 * rate) as u64;
        Optimum { capacity_pages: capacity_pages * rate, threshold, accesses: VecDeque::new(), requests: 0 }
    }

    /// A request of `owner` asked for `keys` of blocks of one size, of which the first `hits` were there.
    pub fn note(&mut self, owner: usize, block_bytes: u64, keys: &[u64], hits: usize) {
        self.requests = self.requests.wrapping_add(1);
        let pages = block_bytes.div_ceil(PAGE_BYTES).clamp(1, (1 << 27) - 1) as u32;
        for (at, key) in keys.iter().enumerate().filter(|(_, key)| **key <= self.threshold) {
            if self.accesses.len() == ACCESSES {
                self.accesses.pop_front();
            }
            let about = pages << 5 | (owner as u32) << 1 | u32::from(at < hits);
            self.accesses.push_back(Access { key: *key, request: self.requests, about });
        }
    }

    /// What the best cache would have hit, by owner. Takes some milliseconds where much is remembered.
    pub fn sampled(&self) -> [Sampled; OWNERS] {
        let next_uses = self.next_uses();
        let capacity = self.capacity_pages.round().max(1.0) as u64;
        let mut kept: HashMap<u64, (u32, u64)> = HashMap::new();
        let mut used = 0;
        let mut latest: BinaryHeap<(u32, u64)> = BinaryHeap::new();
        let mut sampled = [Sampled::default(); OWNERS];
        let mut seen: HashSet<u64> = HashSet::new();
        let mut at = 0;
        while at < self.accesses.len() {
            let request = self.accesses[at].request;
            let end = (at..self.accesses.len()).find(|other| self.accesses[*other].request != request);
            let end = end.unwrap_or(self.accesses.len());
            for access in self.accesses.range(at..end) {
                let of = &mut sampled[access.owner()];
                let was_kept = kept.remove(&access.key);
                used -= was_kept.map_or(0, |(_, pages)| pages);
                of.asked += 1;
                of.hits += u64::from(access.is_hit());
                let is_first = seen.insert(access.key);
                let was_stored = is_first && access.is_hit();
                of.again += u64::from(!is_first || was_stored);
                of.optimum_hits += u64::from(was_kept.is_some() || was_stored);
            }
            for access in (at..end).filter(|access| next_uses[*access] != NEVER) {
                let (key, pages) = (self.accesses[access].key, self.accesses[access].pages());
                let before = kept.insert(key, (next_uses[access], pages));
                used = used + pages - before.map_or(0, |(_, pages)| pages);
                latest.push((next_uses[access], key));
            }
            while used > capacity {
                let (next, key) = latest.pop().expect("what is kept is in the heap");
                if kept.get(&key).is_some_and(|(kept_for, _)| *kept_for == next) {
                    used -= kept.remove(&key).map_or(0, |(_, pages)| pages);
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
            uses[at] = next.insert(self.accesses[at].key, at as u32).unwrap_or(NEVER);
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
        let mut optimum = Optimum::new(2 * PAGE_BYTES, PAGE_BYTES);
        (0..30u64).for_each(|n| optimum.note(0, PAGE_BYTES, &[mix(n % 3)], 0));
        let Sampled { asked, again, hits, optimum_hits } = optimum.sampled()[0];
        assert_eq!((asked, again, hits), (30, 27, 0));
        // Of each two steps in the cycle one is a hit.
        assert!((13..=18).contains(&optimum_hits), "{optimum_hits}");
    }

    #[test]
    fn a_sample_tells_about_what_the_whole_does() {
        // Half of the requests go to 4,000 keys, half to 400,000, with room for 40,000.
        let key = |n: u64| if n.is_multiple_of(2) { mix(mix(n) % 4000) } else { mix(4000 + mix(n) % 400_000) };
        let ratio = |optimum: &Optimum| {
            let sampled = optimum.sampled()[0];
            sampled.optimum_hits as f64 / sampled.asked as f64
        };
        let mut sampled = Optimum::new(40_000 * PAGE_BYTES, PAGE_BYTES);
        assert!(sampled.threshold < u64::MAX / 9);
        let mut whole = Optimum { threshold: u64::MAX, capacity_pages: 40_000.0, ..sampled.clone() };
        for n in 0..60_000 {
            sampled.note(0, PAGE_BYTES, &[key(n)], 0);
            whole.note(0, PAGE_BYTES, &[key(n)], 0);
        }
        assert!((ratio(&sampled) - ratio(&whole)).abs() < 0.03, "{} and {}", ratio(&sampled), ratio(&whole));
    }

    #[test]
    fn hits_are_counted_of_the_same_keys_and_memory_is_bounded() {
        let mut optimum = Optimum::new(1000 * PAGE_BYTES, PAGE_BYTES);
        for n in 0..100_000u64 {
            optimum.note(0, PAGE_BYTES, &[mix(n % 500), mix(1_000_000 + n)], 1);
        }
        assert_eq!(optimum.accesses.len(), ACCESSES);
        let Sampled { asked, hits, optimum_hits, again } = optimum.sampled()[0];
        assert_eq!((asked, hits), (ACCESSES as u64, ACCESSES as u64 / 2));
        assert_eq!(
            (optimum_hits, again),
            (ACCESSES as u64 / 2, ACCESSES as u64 / 2),
            "the first mentions were hits too"
        );
    }

    #[test]
    fn owners_share_the_cache_and_large_blocks_take_more_of_it() {
        // Two owners go round three keys each; there is room for all three of one, or for one of the other.
        let mut optimum = Optimum::new(3 * PAGE_BYTES, PAGE_BYTES);
        for n in 0..300u64 {
            optimum.note(0, PAGE_BYTES, &[mix(n % 3)], 1);
            optimum.note(5, 3 * PAGE_BYTES, &[mix(100 + n % 3)], 0);
        }
        let sampled = optimum.sampled();
        assert_eq!((sampled[0].asked, sampled[0].hits, sampled[5].asked, sampled[5].hits), (300, 300, 300, 0));
        assert!(sampled[0].optimum_hits > 250 && sampled[5].optimum_hits < 30, "{sampled:?}");
        assert_eq!(sampled.into_iter().sum::<Sampled>().asked, 600);
    }
}
