//! What more room would buy: the hit rate of leaf-first LRU at any capacity of the pool, and with a disk of some
//! capacities under the pool there is, from sampled reuse distances.
//!
//! SHARDS (Waldspurger et al., FAST 2015) in fixed memory: keys whose hash is below a threshold are followed. The
//! distance of a reuse is the pages of the different followed keys asked for between the two requests, scaled up; a
//! pool hits it if it holds as much. The threshold sinks while what is followed stands for less than the largest pool
//! to be told about; from then on the key asked for longest ago is given up for a new one, so that what was said of a
//! week says no less of the next.
//!
//! A prompt is served no further than leases may pin of a pool, whatever lies below it: what its end needs is at least
//! that.
//!
//! A disk is no stack, so each capacity of it is run in miniature, on the followed keys (Waldspurger et al., ATC 2017):
//! a queue that is given what comes again (or everything), whose oldest goes, or once more to the end if it was read, as
//! long as no more than three in eight do (docs/tiers/ssd.md).
//!
//! Invariants: at most `max_samples` keys are followed, and twice as many are on the disks or remembered; each followed key has one
//! mark in a Fenwick tree over time, whose size is four times that; no call does more than one pass over it. Counts
//! are kept for each owner, some namespace, of which there are [`OWNERS`] at most; all share the pool and the disk.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::key::PAGE_BYTES;

/// Owners that are told apart; the last one may stand for all others.
pub const OWNERS: usize = 16;
/// Capacities of a disk.
pub const DISKS: usize = 8;
/// Sixteen to the octave: capacities are told apart by 4 %.
const STEPS_PER_OCTAVE: f64 = 16.0;
/// Of what is reclaimed at a time, the share that a disk carries on, and of a disk, the share that is reclaimed at a time.
const CARRIED: f64 = 3.0 / 8.0;
const SEGMENT: f64 = 1.0 / 64.0;
const BUCKETS: usize = 48 * STEPS_PER_OCTAVE as usize;

/// What the curve is to tell about.
#[derive(Clone, Debug)]
pub struct Tiers {
    /// The largest pool.
    pub reach_bytes: u64,
    /// The pool above the disks.
    pub pool_bytes: u64,
    /// The part of a pool that leases may pin.
    pub promise_share: f64,
    /// Capacities of the disk, at most [`DISKS`].
    pub disk_bytes: Vec<u64>,
    /// The disk is given every block, and not only those asked for again.
    pub admits_all: bool,
    /// Different blocks after which the core has forgotten that it knew one.
    pub memory_blocks: u64,
}

pub struct Curve {
    max_samples: usize,
    tiers: Tiers,
    /// Keys below it are followed.
    threshold: u64,
    /// Time of the last reference, by key.
    last: HashMap<u64, u32>,
    /// Key and pages by time, none where the reference is not the last.
    marks: Vec<Mark>,
    tree: Vec<u32>,
    now: u32,
    /// No mark is older.
    oldest: u32,
    disks: Vec<Disk>,
    /// Followed keys on the disks: one bit for each that holds the key, and one for each where it was read.
    on_disks: HashMap<u64, (u8, u8)>,
    /// Keys that were given up, which the core still knows when they return; oldest first.
    given_up: VecDeque<u64>,
    remembered: HashSet<u64>,
    counts: Vec<Counts>,
}

#[derive(Clone, Copy, Default)]
struct Mark {
    key: u64,
    pages: u32,
}

/// A disk in miniature.
#[derive(Default)]
struct Disk {
    /// As it is, not scaled.
    capacity_pages: f64,
    /// Oldest first.
    queue: VecDeque<Mark>,
    pages: u64,
    /// Pages that may be carried on for those that went.
    allowance: f64,
}

/// What was counted for one owner.
#[derive(Clone)]
struct Counts {
    /// References by scaled distance, each counting for all those not followed.
    reuses: Box<[f64]>,
    /// That the pool or the disk hit, for each capacity of the disk.
    hits: [f64; DISKS],
    followed: f64,
    asked: f64,
}

/// A followed key of a request.
struct Reference {
    mark: Mark,
    /// Pages that a pool needs to hit it, scaled; infinite for one that is not followed yet.
    needs: f64,
    /// Pages that a pool needs to serve so much of the prompt, wherever it lies.
    needs_to_serve: f64,
}

impl Curve {
    /// Keep the error around one point, with less than 4 MiB for six disks.
    pub const SAMPLES: usize = 8192;

    /// Of a pool of any size, with no disk.
    pub fn new(max_samples: usize) -> Curve {
        let tiers = Tiers {
            reach_bytes: u64::MAX,
            pool_bytes: 0,
            promise_share: 1.0,
            disk_bytes: Vec::new(),
            admits_all: false,
            memory_blocks: 0,
        };
        Curve::of_tiers(max_samples, tiers)
    }

    pub fn of_tiers(max_samples: usize, tiers: Tiers) -> Curve {
        assert!(tiers.disk_bytes.len() <= DISKS, "a key has a bit for each of {DISKS} disks");
        let times = max_samples * 4;
        let disk = |bytes: &u64| Disk { capacity_pages: pages(*bytes), ..Disk::default() };
        let counts =
            Counts { reuses: vec![0.0; BUCKETS].into_boxed_slice(), hits: [0.0; DISKS], followed: 0.0, asked: 0.0 };
        Curve {
            max_samples,
            threshold: u64::MAX,
            last: HashMap::with_capacity(max_samples + 1),
            marks: vec![Mark::default(); times],
            tree: vec![0; times + 1],
            now: 0,
            oldest: 0,
            disks: tiers.disk_bytes.iter().map(disk).collect(),
            on_disks: HashMap::new(),
            given_up: VecDeque::new(),
            remembered: HashSet::new(),
            counts: vec![counts; OWNERS],
            tiers,
        }
    }

    /// A request of `owner` asked for `keys` of blocks of one size, given last to first; whether they hit was decided
    /// before any was touched. Keys must be well mixed, as those of the index are, and must not be zero.
    pub fn note(&mut self, owner: usize, block_bytes: u64, keys: &[u64]) {
        let pages = block_bytes.div_ceil(PAGE_BYTES).max(1) as u32;
        let (weight, threshold) = (self.scale(), self.threshold);
        let all = self.pages_until(None);
        let references: Vec<Reference> = (keys.iter().enumerate().filter(|(_, key)| **key < threshold))
            .map(|(at, key)| {
                let needs_to_serve = (keys.len() - at) as f64 * f64::from(pages) / self.tiers.promise_share;
                let between = |before: &u32| f64::from(all - self.pages_until(Some(*before))) * weight;
                let needs = self.last.get(key).map_or(f64::INFINITY, |before| between(before) + f64::from(pages));
                Reference { mark: Mark { key: *key, pages }, needs: needs.max(needs_to_serve), needs_to_serve }
            })
            .collect();
        let counts = &mut self.counts[owner];
        counts.asked += keys.len() as f64;
        for reference in &references {
            counts.followed += weight;
            if reference.needs.is_finite() {
                counts.reuses[bucket(reference.needs - 1.0)] += weight;
            }
        }
        self.ask_disks(owner, weight, &references);
        for Reference { mark, .. } in references {
            // It sinks on the way.
            if mark.key < self.threshold {
                self.touch(mark);
            }
        }
    }

    /// The share of all keys asked for that a pool of `bytes` would have hit; 0 if none was asked for.
    pub fn hit_ratio(&self, bytes: u64) -> f64 {
        self.ratio(&self.counts, |counts| counts.of_pool(bytes))
    }

    pub fn hit_ratio_of(&self, owner: usize, bytes: u64) -> f64 {
        self.ratio(&self.counts[owner..=owner], |counts| counts.of_pool(bytes))
    }

    /// The share that the pool, or the disk of this number under it, would have hit.
    pub fn disk_hit_ratio(&self, disk: usize) -> f64 {
        self.ratio(&self.counts, |counts| counts.hits[disk])
    }

    pub fn disk_hit_ratio_of(&self, owner: usize, disk: usize) -> f64 {
        self.ratio(&self.counts[owner..=owner], |counts| counts.hits[disk])
    }

    /// Lets what was seen so far count for only `keep` of what is to come, so that the curve follows the load.
    pub fn fade(&mut self, keep: f64) {
        for counts in &mut self.counts {
            counts.reuses.iter_mut().chain(&mut counts.hits).for_each(|count| *count *= keep);
            counts.followed *= keep;
            counts.asked *= keep;
        }
    }

    pub fn heap_bytes(&self) -> usize {
        let queues: usize = self.disks.iter().map(|disk| disk.queue.capacity() * size_of::<Mark>()).sum();
        self.last.capacity() * 18
            + self.marks.len() * size_of::<Mark>()
            + self.tree.len() * 4
            + self.counts.len() * (size_of::<Counts>() + BUCKETS * 8)
            + self.on_disks.capacity() * 18
            + self.given_up.capacity() * 8
            + self.remembered.capacity() * 10
            + queues
    }

    fn ratio(&self, counts: &[Counts], hits: impl Fn(&Counts) -> f64) -> f64 {
        let sum = |of: &dyn Fn(&Counts) -> f64| counts.iter().map(of).sum::<f64>();
        let (asked, followed) = (sum(&|counts| counts.asked), sum(&|counts| counts.followed));
        let hits = sum(&|counts| hits(counts));
        // Very hot keys are followed or not by chance. What this adds or lacks is short reuse (SHARDS-adj).
        if asked == 0.0 || hits == 0.0 { 0.0 } else { ((hits + asked - followed) / asked).clamp(0.0, 1.0) }
    }

    /// How many keys one followed key stands for.
    fn scale(&self) -> f64 {
        u64::MAX as f64 / self.threshold as f64
    }

    /// What each disk would have served, and what it is given.
    fn ask_disks(&mut self, owner: usize, weight: f64, references: &[Reference]) {
        let pool_pages = pages(self.tiers.pool_bytes);
        // Behind a block that no tier has, nothing can be used.
        let mut is_over = [false; DISKS];
        for Reference { mark, needs, needs_to_serve } in references.iter().rev() {
            let in_pool = *needs <= pool_pages;
            for (at, is_over) in is_over.iter_mut().enumerate().take(self.disks.len()) {
                let bit = 1 << at;
                let (held, read) = self.on_disks.get(&mark.key).copied().unwrap_or_default();
                *is_over |= *needs_to_serve > pool_pages || !in_pool && held & bit == 0;
                if !*is_over {
                    self.counts[owner].hits[at] += weight;
                    if !in_pool {
                        self.on_disks.insert(mark.key, (held, read | bit));
                    }
                }
            }
        }
        for Reference { mark, needs, .. } in references.iter().rev() {
            let memory_pages = self.tiers.memory_blocks as f64 * f64::from(mark.pages);
            let is_known = *needs <= memory_pages || self.remembered.remove(&mark.key);
            if self.tiers.admits_all || is_known {
                (0..self.disks.len()).for_each(|disk| self.write(disk, *mark, weight));
            }
        }
    }

    fn write(&mut self, at: usize, mark: Mark, weight: f64) {
        let bit = 1 << at;
        let state = self.on_disks.entry(mark.key).or_default();
        if state.0 & bit != 0 {
            return;
        }
        state.0 |= bit;
        let disk = &mut self.disks[at];
        disk.queue.push_back(mark);
        disk.pages += u64::from(mark.pages);
        while disk.pages as f64 * weight > disk.capacity_pages.max(1.0) {
            let oldest = disk.queue.pop_front().expect("what is used is in the queue");
            let state = self.on_disks.get_mut(&oldest.key).expect("what is in a queue is on a disk");
            let is_read = state.1 & bit != 0;
            state.1 &= !bit;
            let pages = f64::from(oldest.pages);
            let most = (disk.pages as f64 * SEGMENT).max(pages / CARRIED);
            disk.allowance = (disk.allowance + CARRIED * pages).min(CARRIED * most);
            if is_read && disk.allowance >= pages {
                disk.allowance -= pages;
                disk.queue.push_back(oldest);
                continue;
            }
            disk.pages -= u64::from(oldest.pages);
            state.0 &= !bit;
            if state.0 == 0 {
                self.on_disks.remove(&oldest.key);
            }
        }
    }

    fn touch(&mut self, mark: Mark) {
        if self.now as usize == self.marks.len() {
            self.close_ranks();
        }
        if let Some(before) = self.last.insert(mark.key, self.now) {
            self.unmark(before);
        }
        self.marks[self.now as usize] = mark;
        self.add(self.now, mark.pages);
        self.now += 1;
        let is_reached = f64::from(self.pages_until(None)) * self.scale() >= pages(self.tiers.reach_bytes);
        if self.on_disks.len() > 2 * self.max_samples || self.last.len() > self.max_samples && !is_reached {
            self.sink();
        } else if self.last.len() > self.max_samples {
            self.give_up_oldest();
        }
    }

    fn give_up_oldest(&mut self) {
        while self.marks[self.oldest as usize].key == 0 {
            self.oldest += 1;
        }
        let key = self.marks[self.oldest as usize].key;
        self.last.remove(&key);
        self.unmark(self.oldest);
        if !self.disks.is_empty() {
            self.remember(key);
        }
    }

    fn remember(&mut self, key: u64) {
        self.remembered.insert(key);
        self.given_up.push_back(key);
        let most = (self.tiers.memory_blocks as f64 / self.scale()).min(2.0 * self.max_samples as f64);
        while self.given_up.len() as f64 > most {
            let oldest = self.given_up.pop_front().expect("it is not empty");
            self.remembered.remove(&oldest);
        }
    }

    /// Stops following one key in eight, those with the largest hashes.
    fn sink(&mut self) {
        self.threshold -= self.threshold / 8;
        let threshold = self.threshold;
        self.last.retain(|key, _| *key < threshold);
        self.marks.iter_mut().filter(|mark| mark.key >= threshold).for_each(|mark| *mark = Mark::default());
        self.on_disks.retain(|key, _| *key < threshold);
        self.given_up.retain(|key| *key < threshold);
        self.remembered.retain(|key| *key < threshold);
        for disk in &mut self.disks {
            disk.queue.retain(|mark| mark.key < threshold);
            disk.pages = disk.queue.iter().map(|mark| u64::from(mark.pages)).sum();
        }
        self.close_ranks();
    }

    /// Gives the last references the times from 0 on, in their order.
    fn close_ranks(&mut self) {
        let mut next = 0;
        for at in 0..self.marks.len() {
            let mark = std::mem::take(&mut self.marks[at]);
            if mark.key != 0 {
                self.marks[next] = mark;
                *self.last.get_mut(&mark.key).expect("marked keys are followed") = next as u32;
                next += 1;
            }
        }
        (self.now, self.oldest) = (next as u32, 0);
        // Linear construction: each place passes its sum on to the one that covers it.
        self.tree.fill(0);
        for place in 1..self.tree.len() {
            self.tree[place] += self.marks[place - 1].pages;
            let parent = place + (place & place.wrapping_neg());
            if parent < self.tree.len() {
                self.tree[parent] += self.tree[place];
            }
        }
    }

    fn unmark(&mut self, at: u32) {
        let mark = std::mem::take(&mut self.marks[at as usize]);
        self.add(at, mark.pages.wrapping_neg());
    }

    fn add(&mut self, at: u32, amount: u32) {
        let mut place = at as usize + 1;
        while place < self.tree.len() {
            self.tree[place] = self.tree[place].wrapping_add(amount);
            place += place & place.wrapping_neg();
        }
    }

    /// Pages of the marks at times up to and with `at`; of all for `None`.
    fn pages_until(&self, at: Option<u32>) -> u32 {
        let (mut place, mut sum) = (at.map_or(self.marks.len(), |at| at as usize + 1), 0u32);
        while place > 0 {
            sum = sum.wrapping_add(self.tree[place]);
            place &= place - 1;
        }
        sum
    }
}

impl Counts {
    fn of_pool(&self, bytes: u64) -> f64 {
        self.reuses[..bucket(pages(bytes))].iter().sum()
    }
}

fn pages(bytes: u64) -> f64 {
    bytes as f64 / PAGE_BYTES as f64
}

/// Of a distance (pages of others since) or a capacity; a cache hits the distances in buckets below its own.
fn bucket(pages: f64) -> usize {
    (((pages + 1.0).log2() * STEPS_PER_OCTAVE).round() as usize).min(BUCKETS - 1)
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
        keys.iter().for_each(|key| curve.note(0, PAGE_BYTES, &[*key]));
        for blocks in [10, 50, 200, 1000, 2500] {
            let (exact, curve) = (exact(&keys, blocks), curve.hit_ratio(blocks as u64 * PAGE_BYTES));
            assert!((exact - curve).abs() < 0.01, "{blocks} blocks: {curve}, exactly {exact}");
        }
    }

    #[test]
    fn it_is_within_two_points_when_it_follows_one_key_in_ten() {
        let keys = skewed(60_000, 20_000.0);
        let different = keys.iter().collect::<std::collections::HashSet<_>>().len();
        let mut curve = Curve::new(different / 10);
        keys.iter().for_each(|key| curve.note(0, PAGE_BYTES, &[*key]));
        // Below about fifty followed keys in the cache, chance decides.
        for blocks in [500, 1000, 2000, 5000, 9000] {
            let (exact, curve) = (exact(&keys, blocks), curve.hit_ratio(blocks as u64 * PAGE_BYTES));
            assert!((exact - curve).abs() < 0.02, "{blocks} blocks: {curve}, exactly {exact}");
        }
    }

    #[test]
    fn a_request_does_not_stand_in_its_own_way() {
        let mut curve = Curve::new(1024);
        let request: Vec<u64> = (0..100).map(mix).collect();
        (0..1000).for_each(|_| curve.note(0, PAGE_BYTES, &request));
        // A cache of a hundred blocks holds all of it, one of ten its first ten.
        assert!(curve.hit_ratio(104 * PAGE_BYTES) > 0.99, "{}", curve.hit_ratio(104 * PAGE_BYTES));
        assert!((curve.hit_ratio(10 * PAGE_BYTES) - 0.1).abs() < 0.02, "{}", curve.hit_ratio(10 * PAGE_BYTES));
    }

    #[test]
    fn a_fading_curve_follows_the_load() {
        let mut curve = Curve::new(1024);
        (0..50_000u64).for_each(|n| curve.note(0, PAGE_BYTES, &[mix(n)]));
        assert!(curve.hit_ratio(500 * PAGE_BYTES) < 0.05);
        curve.fade(0.01);
        (0..50_000u64).for_each(|n| curve.note(0, PAGE_BYTES, &[mix(n % 100)]));
        assert!(curve.hit_ratio(500 * PAGE_BYTES) > 0.9, "{}", curve.hit_ratio(500 * PAGE_BYTES));
    }

    fn tiers(pool: u64, disks: &[u64]) -> Tiers {
        let bytes = |blocks: &u64| blocks * PAGE_BYTES;
        Tiers {
            reach_bytes: 16 * bytes(&pool),
            pool_bytes: bytes(&pool),
            promise_share: 1.0,
            disk_bytes: disks.iter().map(bytes).collect(),
            admits_all: false,
            memory_blocks: 1 << 20,
        }
    }

    #[test]
    fn what_is_said_of_a_capacity_is_as_good_after_a_long_time() {
        // New keys all the time, each asked for once more 500 keys later: a sample of all keys there ever were would
        // follow none of the last thousand.
        let mut curve = Curve::of_tiers(1024, tiers(300, &[]));
        for n in 0..400_000u64 {
            curve.note(0, PAGE_BYTES, &[mix(n + 500)]);
            curve.note(0, PAGE_BYTES, &[mix(n)]);
            if n % 10_000 == 0 {
                curve.fade(0.5);
            }
        }
        let [below, above] = [400, 1200].map(|blocks| curve.hit_ratio(blocks * PAGE_BYTES));
        assert!(below < 0.02 && (above - 0.5).abs() < 0.02, "{below} and {above}");
    }

    #[test]
    fn sizes_count_in_bytes_and_owners_are_told_apart() {
        let mut curve = Curve::new(1024);
        // Each owner goes round ten keys, of one and of nine pages: both fit into a hundred pages, neither into nine.
        for n in 0..2000u64 {
            curve.note(1, PAGE_BYTES, &[mix(n % 10)]);
            curve.note(2, 9 * PAGE_BYTES, &[mix(100 + n % 10)]);
        }
        let at = |pages: u64| [1, 2].map(|owner| curve.hit_ratio_of(owner, pages * PAGE_BYTES));
        assert!(at(105).iter().all(|ratio| *ratio > 0.98) && at(90).iter().all(|ratio| *ratio < 0.02), "{:?}", at(105));
        assert!((curve.hit_ratio(105 * PAGE_BYTES) - at(105)[0]).abs() < 0.01);
        assert_eq!(curve.hit_ratio_of(3, 1 << 40), 0.0);
    }

    #[test]
    fn a_disk_serves_what_came_twice_and_its_pool_lost() {
        // A circle of 3,000 keys: a pool of 1,000 hits nothing of it, a disk of 2,000 neither, one of 4,000 all but
        // the first two rounds.
        let mut curve = Curve::of_tiers(1024, tiers(1000, &[2000, 4000]));
        (0..30_000u64).for_each(|n| curve.note(4, PAGE_BYTES, &[mix(n % 3000)]));
        let [small, large] = [0, 1].map(|disk| curve.disk_hit_ratio_of(4, disk));
        assert!(curve.hit_ratio(1000 * PAGE_BYTES) < 0.02);
        assert!(small < 0.1 && (large - 0.8).abs() < 0.05, "{small} and {large}");
    }

    #[test]
    fn a_prompt_larger_than_what_leases_may_pin_is_served_no_further() {
        // Two prompts of 1,000 blocks take turns above a disk with room for both.
        let prompts: [Vec<u64>; 2] = [0, 1000].map(|first| (first..first + 1000).rev().map(mix).collect());
        for (promise_share, below, alone) in [(1.0, 0.5, 1.0), (0.5, 0.25, 1.0), (0.25, 0.125, 0.525)] {
            let mut curve = Curve::of_tiers(4096, Tiers { promise_share, ..tiers(500, &[4000]) });
            (0..200).for_each(|turn| curve.note(0, PAGE_BYTES, &prompts[turn % 2]));
            // A pool of 2,100 holds both.
            let ratios = [curve.disk_hit_ratio_of(0, 0), curve.hit_ratio(2100 * PAGE_BYTES)];
            let is_close = |(ratio, expected): (f64, f64)| (ratio - expected).abs() < 0.03;
            assert!(ratios.into_iter().zip([below, alone]).all(is_close), "{promise_share}: {ratios:?}");
        }
    }

    #[test]
    fn memory_is_fixed() {
        let mut curve = Curve::of_tiers(Curve::SAMPLES, tiers(1000, &[1000, 2000, 4000, 8000, 16_000, 32_000]));
        for n in 0..300_000u64 {
            curve.note(0, PAGE_BYTES, &[mix(n), mix(n / 2), mix(n / 3)]);
            assert!(n % 1000 > 0 || curve.heap_bytes() < 4 << 20, "{} bytes", curve.heap_bytes());
        }
    }
}
