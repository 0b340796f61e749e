//! From key to place below the pool: open addressing in many small tables, like the pool's index.
//!
//! Keys are kept as fingerprints of 52 bits beside the table's number, 64 in all. They are seeded by a secret, and a
//! tier is asked with the whole key: should two ever be alike, one block is not found, and never a wrong one.
//!
//! Invariants: a table is at most 3/4 full; an entry takes 24 bytes, so a block 32 to 64; no allocation per entry.

use super::TierId;
use crate::block::NamespaceIndex;
use crate::index::Fingerprint;
use crate::key::NamespaceId;
use crate::tier::Location;

const SHARD_BITS: u32 = 12;
const FIRST_TABLE: usize = 4;

/// Bits of `Entry::key` that are not the fingerprint's: in use, standing (2), tier (3).
const IN_USE: u64 = 1;
const STANDING_AT: u32 = 1;
const STANDING_MASK: u64 = 3 << STANDING_AT;
const TIER_AT: u32 = 3;
const FINGERPRINT_MASK: u64 = !((1 << SHARD_BITS) - 1);

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub tier: TierId,
    pub at: Location,
}

/// Whether a block may be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    Good,
    /// The last load was late, or failed: it is a miss for a while.
    Late,
    Failed,
}

/// The fingerprint of a block below. By the namespace's own id: what lies on a tier outlives short names.
pub(super) fn key(seed: u64, namespace: NamespaceId, group: u16, hash: &[u8]) -> Fingerprint {
    let id = namespace.0 as u64 ^ ((namespace.0 >> 64) as u64).rotate_left(29);
    Fingerprint::new(seed.rotate_left(17) ^ id, NamespaceIndex(0), group, hash)
}

#[derive(Clone, Copy, Default)]
struct Entry {
    key: u64,
    at: [u64; 2],
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct Residence {
    /// None before the first block.
    shards: Vec<Shard>,
    count: u64,
}

#[derive(Default)]
struct Shard {
    entries: Box<[Entry]>,
    used: usize,
}

impl Residence {
    pub fn len(&self) -> u64 {
        self.count
    }

    pub fn get(&self, key: Fingerprint) -> Option<(Place, Standing)> {
        let shard = self.shards.get(shard_of(key))?;
        let entry = &shard.entries[shard.find(key)?];
        Some((entry.place(), entry.standing()))
    }

    /// Returns the place that was replaced.
    pub fn insert(&mut self, key: Fingerprint, place: Place) -> Option<Place> {
        if self.shards.is_empty() {
            self.shards = (0..1 << SHARD_BITS).map(|_| Shard::default()).collect();
        }
        let shard = &mut self.shards[shard_of(key)];
        if let Some(at) = shard.find(key) {
            let replaced = shard.entries[at].place();
            shard.entries[at] = Entry::new(key, place);
            return Some(replaced);
        }
        if (shard.used + 1) * 4 > shard.entries.len() * 3 {
            shard.grow();
        }
        shard.put(Entry::new(key, place));
        shard.used += 1;
        self.count += 1;
        None
    }

    pub fn remove(&mut self, key: Fingerprint) {
        let Some(shard) = self.shards.get_mut(shard_of(key)) else { return };
        if let Some(at) = shard.find(key) {
            shard.close_gap(at);
            shard.used -= 1;
            self.count -= 1;
        }
    }

    pub fn stand(&mut self, key: Fingerprint, standing: Standing) {
        let Some(shard) = self.shards.get_mut(shard_of(key)) else { return };
        if let Some(at) = shard.find(key) {
            let entry = &mut shard.entries[at];
            entry.key = entry.key & !STANDING_MASK | (standing as u64) << STANDING_AT;
        }
    }

    pub fn heap_bytes(&self) -> usize {
        self.shards.iter().map(|shard| size_of_val(&*shard.entries) + size_of::<Shard>()).sum()
    }
}

impl Entry {
    fn new(key: Fingerprint, Place { tier, at }: Place) -> Entry {
        let bits = IN_USE | u64::from(tier.0) << TIER_AT;
        Entry { key: key.0 & FINGERPRINT_MASK | bits, at: [at.0, at.1] }
    }

    fn place(&self) -> Place {
        Place { tier: TierId((self.key >> TIER_AT) as u8 & 7), at: Location(self.at[0], self.at[1]) }
    }

    fn standing(&self) -> Standing {
        match (self.key & STANDING_MASK) >> STANDING_AT {
            0 => Standing::Good,
            1 => Standing::Late,
            _ => Standing::Failed,
        }
    }

    fn is_empty(&self) -> bool {
        self.key == 0
    }
}

impl Shard {
    fn find(&self, key: Fingerprint) -> Option<usize> {
        let mask = self.entries.len().checked_sub(1)?;
        let mut at = home(key.0, mask);
        while !self.entries[at].is_empty() {
            if (self.entries[at].key ^ key.0) & FINGERPRINT_MASK == 0 {
                return Some(at);
            }
            at = (at + 1) & mask;
        }
        None
    }

    fn put(&mut self, entry: Entry) {
        let mask = self.entries.len() - 1;
        let mut at = home(entry.key, mask);
        while !self.entries[at].is_empty() {
            at = (at + 1) & mask;
        }
        self.entries[at] = entry;
    }

    fn grow(&mut self) {
        let len = (self.entries.len() * 2).max(FIRST_TABLE);
        let old = std::mem::replace(&mut self.entries, vec![Entry::default(); len].into_boxed_slice());
        old.iter().filter(|entry| !entry.is_empty()).for_each(|entry| self.put(*entry));
    }

    /// Empties position `gap`, moving later entries back so that every probe still finds them.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.entries.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry.is_empty() {
                self.entries[gap] = Entry::default();
                return;
            }
            let from_home = at.wrapping_sub(home(entry.key, mask)) & mask;
            if from_home >= (at.wrapping_sub(gap) & mask) {
                self.entries[gap] = entry;
                gap = at;
            }
        }
    }
}

fn shard_of(key: Fingerprint) -> usize {
    key.0 as usize & ((1 << SHARD_BITS) - 1)
}

fn home(key: u64, mask: usize) -> usize {
    (key >> SHARD_BITS) as usize & mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Against a HashMap, over few tables and homes, so that runs collide and wrap.
        #[test]
        fn it_finds_what_was_put_there_last_and_nothing_else(ops in proptest::collection::vec((0u8..3, 0u64..120), 1..600)) {
            let mut residence = Residence::default();
            let mut model: HashMap<u64, (Place, Standing)> = HashMap::new();
            let key = |k: u64| Fingerprint((k / 7) << 40 | (k % 7) << 12 | (k % 2));
            for (step, (op, k)) in ops.into_iter().enumerate() {
                let place = Place { tier: TierId(step as u8 % 8), at: Location(step as u64, k) };
                match op {
                    0 => {
                        let replaced = residence.insert(key(k), place);
                        prop_assert_eq!(replaced, model.insert(k, (place, Standing::Good)).map(|(place, _)| place));
                    }
                    1 => {
                        residence.remove(key(k));
                        model.remove(&k);
                    }
                    _ => {
                        residence.stand(key(k), Standing::Late);
                        model.entry(k).and_modify(|(_, standing)| *standing = Standing::Late);
                    }
                }
                prop_assert_eq!(residence.len(), model.len() as u64);
                for k in 0..120 {
                    prop_assert_eq!(residence.get(key(k)), model.get(&k).copied());
                }
            }
        }
    }

    #[test]
    fn a_block_takes_at_most_64_bytes_once_there_are_many() {
        let mut residence = Residence::default();
        for n in 0..1_000_000u64 {
            let hash = n.to_le_bytes();
            residence.insert(key(7, NamespaceId(3), 0, &hash), Place { tier: TierId(0), at: Location(n, n) });
            if n > 100_000 && n % 10_000 == 0 {
                let each = residence.heap_bytes() as f64 / n as f64;
                assert!(each <= 64.0, "{each} bytes a block at {n}");
            }
        }
    }
}
