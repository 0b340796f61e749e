//! What more room would buy: the hit rate of leaf-first LRU at any capacity, from sampled reuse distances.
//!
//! SHARDS (Waldspurger et al., FAST 2015) in fixed memory: keys whose hash is below a threshold are followed, and
//! the threshold sinks whenever there are too many. The distance of a reuse is the number of different followed
//! keys between the two requests, scaled up; a cache hits it if it holds more.
//!
//! Invariants: at most `max_samples` keys are followed; each has one mark in a Fenwick tree over time, whose size
//! is four times that; no call does more than one pass over it.

use std::collections::{BinaryHeap, HashMap};

/// Sixteen to the octave: capacities are told apart by 4 %.
const STEPS_PER_OCTAVE: f64 = 16.0;
const BUCKETS: usize = 48 * STEPS_PER_OCTAVE as usize;

pub struct Curve {
    max_samples: usize,
    /// Keys below it are followed.
    threshold: u64,
    /// Time of the last reference, by key.
    last: HashMap<u64, u32>,
    largest: BinaryHeap<u64>,
    /// Key by time, zero where the reference is not the last.
    keys: Vec<u64>,
    tree: Vec<u32>,
    now: u32,
    /// References by scaled distance, each counting for all those not followed.
    reuses: Box<[f64]>,
    followed: f64,
    asked: f64,
}

impl Curve {
    /// Keep the error around one point, with less than 800 KiB.
    pub const SAMPLES: usize = 8192;

    pub fn new(max_samples: usize) -> Curve {
        let times = max_samples * 4;
        Curve {
            max_samples,
            threshold: u64::MAX,
            last: HashMap::with_capacity(max_samples + 1),
            largest: BinaryHeap::with_capacity(max_samples + 1),
            keys: vec![0; times],
            tree: vec![0; times + 1],
            now: 0,
            reuses: vec![0.0; BUCKETS].into_boxed_slice(),
            followed: 0.0,
            asked: 0.0,
        }
    }

    /// A request asked for `keys`, given last to first; whether they hit was decided before any was touched.
    /// Keys must be well mixed, as those of the index are, and must not be zero.
    pub fn note(&mut self, keys: &[u64]) {
        self.asked += keys.len() as f64;
        let (weight, threshold) = (self.scale(), self.threshold);
        for key in keys.iter().filter(|key| **key < threshold) {
            self.followed += weight;
            if let Some(before) = self.last.get(key) {
                let distance = self.last.len() as u32 - self.marks_until(*before);
                self.reuses[bucket(f64::from(distance) * weight)] += weight;
            }
        }
        for key in keys {
            // It sinks on the way.
            if *key < self.threshold {
                self.touch(*key);
            }
        }
    }

    /// The share of all keys asked for that a cache of `blocks` would have hit; 0 if none was asked for.
    pub fn hit_ratio(&self, blocks: f64) -> f64 {
        if self.asked == 0.0 || blocks < 1.0 {
            return 0.0;
        }
        let hits: f64 = self.reuses[..bucket(blocks)].iter().sum();
        // Very hot keys are followed or not by chance. What this adds or lacks is short reuse (SHARDS-adj).
        ((hits + self.asked - self.followed) / self.asked).clamp(0.0, 1.0)
    }

    /// Lets what was seen so far count for only `keep` of what is to come, so that the curve follows the load.
    pub fn fade(&mut self, keep: f64) {
        self.reuses.iter_mut().for_each(|count| *count *= keep);
        self.followed *= keep;
        self.asked *= keep;
    }

    pub fn heap_bytes(&self) -> usize {
        self.last.capacity() * 18
            + self.largest.capacity() * 8
            + self.keys.len() * 8
            + self.tree.len() * 4
            + BUCKETS * 8
    }

    /// How many keys one followed key stands for.
    fn scale(&self) -> f64 {
        u64::MAX as f64 / self.threshold as f64
    }

    fn touch(&mut self, key: u64) {
        if self.now as usize == self.keys.len() {
            self.close_ranks();
        }
        match self.last.insert(key, self.now) {
            Some(before) => self.unmark(before),
            None => self.largest.push(key),
        }
        self.mark(self.now, key);
        self.now += 1;
        if self.last.len() > self.max_samples {
            self.sink();
        }
    }

    /// Stops following the key with the largest hash, and all that would be as large.
    fn sink(&mut self) {
        let key = self.largest.pop().expect("followed keys are in the heap");
        self.threshold = key;
        let at = self.last.remove(&key).expect("keys in the heap are followed");
        self.unmark(at);
    }

    /// Gives the last references the times from 0 on, in their order.
    fn close_ranks(&mut self) {
        let mut next = 0;
        for at in 0..self.keys.len() {
            let key = std::mem::take(&mut self.keys[at]);
            if key != 0 {
                self.keys[next] = key;
                *self.last.get_mut(&key).expect("marked keys are followed") = next as u32;
                next += 1;
            }
        }
        self.now = next as u32;
        // Linear construction: each place passes its sum on to the one that covers it.
        self.tree.fill(0);
        for place in 1..self.tree.len() {
            self.tree[place] += u32::from(place <= next);
            let parent = place + (place & place.wrapping_neg());
            if parent < self.tree.len() {
                self.tree[parent] += self.tree[place];
            }
        }
    }

    fn mark(&mut self, at: u32, key: u64) {
        self.keys[at as usize] = key;
        self.add(at, 1);
    }

    fn unmark(&mut self, at: u32) {
        self.keys[at as usize] = 0;
        self.add(at, u32::MAX);
    }

    fn add(&mut self, at: u32, amount: u32) {
        let mut place = at as usize + 1;
        while place < self.tree.len() {
            self.tree[place] = self.tree[place].wrapping_add(amount);
            place += place & place.wrapping_neg();
        }
    }

    /// Marks at times up to and with `at`.
    fn marks_until(&self, at: u32) -> u32 {
        let (mut place, mut sum) = (at as usize + 1, 0u32);
        while place > 0 {
            sum = sum.wrapping_add(self.tree[place]);
            place &= place - 1;
        }
        sum
    }
}

/// Of a distance (different keys since) or a capacity; a cache hits the distances in buckets below its own.
fn bucket(count: f64) -> usize {
    (((count + 1.0).log2() * STEPS_PER_OCTAVE).round() as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::mix;

    /// Distances of `keys` by the definition.
    fn exact(keys: &[u64], blocks: usize) -> f64 {
        let mut stack: Vec<u64> = Vec::new();
        let mut hits = 0;
        for key in keys {
            if let Some(at) = stack.iter().rev().position(|known| known == key) {
                hits += u32::from(at < blocks);
                stack.remove(stack.len() - 1 - at);
            }
            stack.push(*key);
        }
        f64::from(hits) / keys.len() as f64
    }

    /// Some keys hot, most cold: key n of 1..=limit with density 1/n.
    fn skewed(count: u64, limit: f64) -> Vec<u64> {
        (0..count).map(|n| mix(limit.powf(mix(n) as f64 / u64::MAX as f64) as u64)).collect()
    }

    #[test]
    fn it_is_exact_up_to_its_buckets_while_all_keys_are_followed() {
        let keys = skewed(30_000, 3000.0);
        let mut curve = Curve::new(4096);
        keys.iter().for_each(|key| curve.note(&[*key]));
        for blocks in [10, 50, 200, 1000, 2500] {
            let (exact, curve) = (exact(&keys, blocks), curve.hit_ratio(blocks as f64));
            assert!((exact - curve).abs() < 0.01, "{blocks} blocks: {curve}, exactly {exact}");
        }
    }

    #[test]
    fn it_is_within_two_points_when_it_follows_one_key_in_ten() {
        let keys = skewed(60_000, 20_000.0);
        let different = keys.iter().collect::<std::collections::HashSet<_>>().len();
        let mut curve = Curve::new(different / 10);
        keys.iter().for_each(|key| curve.note(&[*key]));
        // Below about fifty followed keys in the cache, chance decides.
        for blocks in [500, 1000, 2000, 5000, 9000] {
            let (exact, curve) = (exact(&keys, blocks), curve.hit_ratio(blocks as f64));
            assert!((exact - curve).abs() < 0.02, "{blocks} blocks: {curve}, exactly {exact}");
        }
    }

    #[test]
    fn a_request_does_not_stand_in_its_own_way() {
        let mut curve = Curve::new(1024);
        let request: Vec<u64> = (0..100).map(mix).collect();
        (0..1000).for_each(|_| curve.note(&request));
        // A cache of a hundred blocks holds all of it, one of ten its first ten.
        assert!(curve.hit_ratio(104.0) > 0.99, "{}", curve.hit_ratio(104.0));
        assert!((curve.hit_ratio(10.0) - 0.1).abs() < 0.02, "{}", curve.hit_ratio(10.0));
    }

    #[test]
    fn a_fading_curve_follows_the_load() {
        let mut curve = Curve::new(1024);
        (0..50_000u64).for_each(|n| curve.note(&[mix(n)]));
        assert!(curve.hit_ratio(500.0) < 0.05);
        curve.fade(0.01);
        (0..50_000u64).for_each(|n| curve.note(&[mix(n % 100)]));
        assert!(curve.hit_ratio(500.0) > 0.9, "{}", curve.hit_ratio(500.0));
    }

    #[test]
    fn memory_is_fixed() {
        let mut curve = Curve::new(Curve::SAMPLES);
        for n in 0..300_000u64 {
            curve.note(&[mix(n)]);
            assert!(curve.heap_bytes() < 800 << 10, "{} bytes", curve.heap_bytes());
        }
    }
}
