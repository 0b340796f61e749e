//! The map from key to block.
//!
//! Each entry has the upper 32 bits of its key's hash. So a probe reads a block's record only if it almost certainly
//! matches, and the tables can shift entries back without reading records.

use crate::key::{BlockId, Fingerprint};
use crate::tables::{self, Tables};

/// See the module's head.
#[derive(Default)]
pub(crate) struct Index(Tables<Entry>);

/// Upper half: tag. Lower half: block id + 1. Zero: empty.
#[derive(Clone, Copy, Default)]
struct Entry(u64);

impl Index {
    /// In as many tables as a power of two of `table_bits`.
    pub fn new(table_bits: u32) -> Index {
        Index(Tables::new(table_bits))
    }

    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// The block under `key` for which `is_match` says yes.
    pub fn find(&self, key: Fingerprint, mut is_match: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        self.0.find(key, |entry| entry.tag() == tag(key) && is_match(entry.block())).map(Entry::block)
    }

    /// For each key the first block that may be its own, to be compared by the caller, or `NONE`. Touches all
    /// homes first, so that no load from memory waits for another one or for a branch.
    // In line, a lookup has too few registers: 7 % more instructions.
    #[inline(never)]
    pub fn candidates<const N: usize>(&self, keys: &[Fingerprint; N]) -> [BlockId; N] {
        // Not `map`, which is a call of its own if the compiler lays out the code so.
        let mut homes = [Entry(0); N];
        homes.iter_mut().zip(keys).for_each(|(home, key)| *home = self.0.at_home(*key));
        std::array::from_fn(|at| match homes[at] {
            Entry(0) => BlockId::NONE,
            entry if entry.tag() == tag(keys[at]) => entry.block(),
            _ => self.find(keys[at], |_| true).unwrap_or(BlockId::NONE),
        })
    }

    /// Brings what the index knows of `keys` into the processor's cache.
    pub fn touch_lines(&self, keys: impl Iterator<Item = Fingerprint>) {
        self.0.touch_lines(keys);
    }

    /// `block` must not be in the index.
    pub fn insert(&mut self, key: Fingerprint, block: BlockId) {
        self.0.insert(key, Entry(u64::from(tag(key)) << 32 | u64::from(block.0 + 1)));
    }

    /// Panics if `block` is not in the index under `key`.
    pub fn remove(&mut self, key: Fingerprint, block: BlockId) {
        let was_there = self.0.remove(key, |entry| entry.block() == block);
        assert!(was_there, "block {block:?} is not in the index");
    }

    pub fn heap_bytes(&self) -> usize {
        self.0.heap_bytes()
    }
}

impl Entry {
    fn tag(&self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn block(&self) -> BlockId {
        BlockId((self.0 as u32).wrapping_sub(1))
    }
}

impl tables::Entry for Entry {
    const IS_DENSE: bool = false;

    fn is_empty(&self) -> bool {
        self.0 == 0
    }

    fn home(&self) -> u32 {
        self.tag()
    }

    fn home_of(key: Fingerprint) -> u32 {
        tag(key)
    }
}

fn tag(key: Fingerprint) -> u32 {
    (key.0 >> 32) as u32
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
