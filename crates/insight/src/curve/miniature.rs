//! A core that is as much smaller as the sample of keys it is asked for.
//!
//! Invariants: the keys followed are those whose hash is below a threshold, the same for all owners and for all time
//! until it begins anew; pool, disk and memory are scaled by the same rate, and what leases may pin is the same share.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Capacities, OWNERS, Rules, Samples};
use crate::rehearsal::{Hash, Rehearsal, Setup, Shape, Ssd, store_batch};

/// Tables of its index, as a power of two: none of a few thousand blocks has much to move when it grows.
const TABLE_BITS: u32 = 5;
/// Of a core that needs no memory of keys, since it has no disk.
const NO_MEMORY: usize = 8;

pub(super) struct Miniature {
    capacities: Capacities,
    rate: f64,
    /// Keys up to it are followed.
    threshold: u64,
    /// None before the first request, and if the pool cannot hold a block.
    rehearsal: Option<Rehearsal>,
    counts: [Counts; OWNERS],
    /// Of one request.
    hashes: Vec<Hash>,
}

/// What was counted for one owner, each key for all those it stands for.
#[derive(Clone, Copy, Default)]
struct Counts {
    followed: f64,
    hits: f64,
}

impl Miniature {
    pub fn new(capacities: Capacities) -> Miniature {
        let counts = [Counts::default(); OWNERS];
        Miniature { capacities, rate: 1.0, threshold: u64::MAX, rehearsal: None, counts, hashes: Vec::new() }
    }

    /// Begins anew with blocks of these shapes.
    pub fn begin(&mut self, rules: &Rules, samples: &Samples, shapes: &[Shape]) {
        let Capacities { pool_bytes, disk_bytes } = self.capacities;
        let sizes: BTreeSet<u64> = shapes.iter().map(|shape| shape.block_bytes).collect();
        let smallest = *sizes.first().expect("there is a shape");
        let blocks = |bytes: u64| (bytes / smallest).max(1) as f64;
        let rate = (samples.pool as f64 / blocks(pool_bytes)).min(samples.disk as f64 / blocks(disk_bytes)).min(1.0);
        let scaled = |amount: u64| (amount as f64 * rate) as u64;
        let memory_entries = if disk_bytes > 0 { scaled(rules.memory_blocks).min(samples.memory) as usize } else { 0 };
        let batch = store_batch(pool_bytes / smallest, sizes.len()) as f64 * rate;
        let setup = Setup {
            policy: rules.policy,
            seed: rules.seed,
            capacity_bytes: scaled(pool_bytes),
            ssd: (disk_bytes > 0).then_some(Ssd { capacity_bytes: scaled(disk_bytes), admission: rules.admission }),
            promise_permille: rules.promise_permille,
            store_batch: batch.round().max(1.0) as usize,
            memory_entries: memory_entries.max(NO_MEMORY),
            table_bits: TABLE_BITS,
        };
        self.rate = rate;
        self.threshold = (u64::MAX as f64 * rate) as u64;
        self.rehearsal = Rehearsal::new(&setup, shapes).ok();
        self.counts = [Counts::default(); OWNERS];
    }

    pub fn rate(&self) -> f64 {
        self.rate
    }

    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// A request asked for these keys, and others that nobody follows.
    pub fn ask(&mut self, owner: usize, namespace: usize, keys: &[u64]) {
        let threshold = self.threshold;
        self.hashes.clear();
        self.hashes.extend(keys.iter().filter(|key| **key <= threshold).map(|key| hash(*key)));
        if self.hashes.is_empty() {
            return;
        }
        let Some(rehearsal) = &mut self.rehearsal else { return };
        let served = rehearsal.serve(namespace, &self.hashes, &mut ());
        let counts = &mut self.counts[owner];
        counts.followed += self.hashes.len() as f64 / self.rate;
        counts.hits += served.hits as f64 / self.rate;
    }

    /// Of what these owners asked for.
    pub fn hit_ratio(&self, asked: &[f64; OWNERS], owners: Range<usize>) -> f64 {
        let sum = |of: fn(&Counts) -> f64| self.counts[owners.clone()].iter().map(of).sum::<f64>();
        let (followed, hits) = (sum(|counts| counts.followed), sum(|counts| counts.hits));
        let asked: f64 = asked[owners.clone()].iter().sum();
        // Very hot keys are followed or not by chance. What this adds or lacks is hit by any capacity (SHARDS-adj).
        if asked == 0.0 || hits == 0.0 { 0.0 } else { ((hits + asked - followed) / asked).clamp(0.0, 1.0) }
    }

    pub fn fade(&mut self, keep: f64) {
        for Counts { followed, hits } in &mut self.counts {
            *followed *= keep;
            *hits *= keep;
        }
    }

    pub fn heap_bytes(&self) -> usize {
        self.rehearsal.as_ref().map_or(0, Rehearsal::heap_bytes) + self.hashes.capacity() * size_of::<Hash>()
    }
}

/// A key as a block's hash.
fn hash(key: u64) -> Hash {
    (u128::from(key) << 64 | u128::from(key.swap_bytes())).to_le_bytes()
}
