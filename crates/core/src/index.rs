//! From key to block: open addressing in many small tables.
//!
//! Invariants: an entry is never zero; a table is at most 3/4 full, beyond which a probe for an absent key grows long; probing never leaves its table. Each entry
//! carries the upper 32 bits of its key's hash, so that a probe reads a block's record only where it almost
//! surely matches, and deletion can shift entries back without reading records. Small tables keep the cost of
//! one growth far below 200 µs.

use std::hint::black_box;

use crate::block::{BlockId, NamespaceIndex};

const SHARD_BITS: u32 = 12;
const FIRST_TABLE: usize = 8;

/// A key's hash inside the core. Block hashes are opaque and may be chosen by a hostile client, hence the seed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub u64);

impl Fingerprint {
    pub fn new(seed: u64, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
        // Both factors of a product hold a part of the seed, or a client could make them zero.
        let one = seed ^ 0x9e37_79b9_7f4a_7c15 ^ (u64::from(namespace.0) << 16 | u64::from(group));
        let other = seed.rotate_left(32) ^ 0xd1b5_4a32_d192_ed03 ^ hash.len() as u64;
        // Each part is mixed on its own, so that the multiplications overlap.
        let mix_part = |part: &[u8; 16]| {
            let part = u128::from_le_bytes(*part);
            mix(part as u64 ^ one, (part >> 64) as u64 ^ other)
        };
        let (parts, rest) = hash.as_chunks::<16>();
        let mut sum = parts.iter().fold(0u64, |sum, part| sum.rotate_left(23) ^ mix_part(part));
        if !rest.is_empty() {
            let mut last = [0; 16];
            last[..rest.len()].copy_from_slice(rest);
            sum = sum.rotate_left(23) ^ mix_part(&last);
        }
        Fingerprint(mix(sum ^ one, other))
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

pub struct Index {
    shards: Vec<Shard>,
    count: u64,
}

#[derive(Default)]
struct Shard {
    /// Upper half: tag. Lower half: block id + 1. Zero: empty.
    entries: Box<[u64]>,
    used: usize,
}

impl Default for Index {
    fn default() -> Self {
        Index { shards: (0..1 << SHARD_BITS).map(|_| Shard::default()).collect(), count: 0 }
    }
}

impl Index {
    pub fn len(&self) -> u64 {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The block under `key` for which `is_match` says yes.
    pub fn find(&self, key: Fingerprint, mut is_match: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let shard = &self.shards[shard_of(key)];
        let mask = shard.entries.len().checked_sub(1)?;
        let mut at = home(tag(key), mask);
        loop {
            let entry = shard.entries[at];
            if entry == 0 {
                return None;
            }
            if (entry >> 32) as u32 == tag(key) && is_match(block_of(entry)) {
                return Some(block_of(entry));
            }
            at = (at + 1) & mask;
        }
    }

    /// For each key the first block that may be its own, to be compared by the caller, or `NONE`. Touches all
    /// homes first, so that no load from memory waits for another one or for a branch.
    pub fn candidates<const N: usize>(&self, keys: &[Fingerprint; N]) -> [BlockId; N] {
        let homes = keys.map(|key| self.home_entry(key));
        std::array::from_fn(|at| match homes[at] {
            0 => BlockId::NONE,
            entry if (entry >> 32) as u32 == tag(keys[at]) => block_of(entry),
            _ => self.find(keys[at], |_| true).unwrap_or(BlockId::NONE),
        })
    }

    /// Brings what the index knows of `keys` into the processor's cache.
    pub fn warm(&self, keys: &[Fingerprint]) {
        black_box(keys.iter().fold(0, |sum, key| sum ^ self.home_entry(*key)));
    }

    /// `block` must not be in the index.
    pub fn insert(&mut self, key: Fingerprint, block: BlockId) {
        let shard = &mut self.shards[shard_of(key)];
        if (shard.used + 1) * 4 > shard.entries.len() * 3 {
            shard.grow();
        }
        shard.place(u64::from(tag(key)) << 32 | u64::from(block.0 + 1));
        shard.used += 1;
        self.count += 1;
    }

    /// Panics if `block` is not in the index under `key`.
    pub fn remove(&mut self, key: Fingerprint, block: BlockId) {
        let shard = &mut self.shards[shard_of(key)];
        let mask = shard.entries.len() - 1;
        let mut at = home(tag(key), mask);
        while block_of(shard.entries[at]) != block {
            assert!(shard.entries[at] != 0, "block {block:?} is not in the index");
            at = (at + 1) & mask;
        }
        shard.close_gap(at);
        shard.used -= 1;
        self.count -= 1;
    }

    /// The entry where a probe for `key` begins; zero if there is none.
    fn home_entry(&self, key: Fingerprint) -> u64 {
        let entries = &self.shards[shard_of(key)].entries;
        entries.get(home(tag(key), entries.len().wrapping_sub(1))).copied().unwrap_or(0)
    }

    pub fn heap_bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.entries.len() * 8 + size_of::<Shard>()).sum()
    }
}

impl Shard {
    fn place(&mut self, entry: u64) {
        let mask = self.entries.len() - 1;
        let mut at = home((entry >> 32) as u32, mask);
        while self.entries[at] != 0 {
            at = (at + 1) & mask;
        }
        self.entries[at] = entry;
    }

    fn grow(&mut self) {
        let len = (self.entries.len() * 2).max(FIRST_TABLE);
        let old = std::mem::replace(&mut self.entries, vec![0; len].into_boxed_slice());
        old.iter().filter(|entry| **entry != 0).for_each(|entry| self.place(*entry));
    }

    /// Empties position `gap`, moving later entries back so that every probe still finds them.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.entries.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry == 0 {
                self.entries[gap] = 0;
                return;
            }
            let from_home = at.wrapping_sub(home((entry >> 32) as u32, mask)) & mask;
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

fn tag(key: Fingerprint) -> u32 {
    (key.0 >> 32) as u32
}

fn home(tag: u32, mask: usize) -> usize {
    tag as usize & mask
}

fn block_of(entry: u64) -> BlockId {
    BlockId((entry as u32).wrapping_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Against a HashMap, over few shards and tags, so that runs collide and wrap.
        #[test]
        fn it_finds_what_was_inserted_and_nothing_else(ops in proptest::collection::vec((any::<bool>(), 0u64..400), 1..800)) {
            let mut index = Index::default();
            let mut model: HashMap<u64, BlockId> = HashMap::new();
            let key = |k: u64| Fingerprint((k % 13) << 32 | (k % 2));
            for (step, (is_insert, k)) in ops.into_iter().enumerate() {
                if is_insert {
                    if let std::collections::hash_map::Entry::Vacant(entry) = model.entry(k) {
                        let block = BlockId(step as u32 * 1000 + k as u32);
                        entry.insert(block);
                        index.insert(key(k), block);
                    }
                } else if let Some(block) = model.remove(&k) {
                    index.remove(key(k), block);
                }
                prop_assert_eq!(index.len(), model.len() as u64);
                for k in 0..400 {
                    let expected = model.get(&k).copied();
                    prop_assert_eq!(index.find(key(k), |b| Some(b) == expected), expected);
                }
            }
        }
    }
}
