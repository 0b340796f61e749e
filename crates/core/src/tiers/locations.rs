//! Which own tier has which block: from key to tier.
//!
//! A key is kept as a fingerprint of 64 bits: 52 in the entry, the rest in the table's number. Fingerprints are seeded
//! by a secret, and a tier is asked with the whole key: if two fingerprints ever were equal, one block would not be
//! found, but never a wrong one. Where on the tier the block lies, only the tier knows.
//!
//! An entry takes 8 bytes, in tables that are 3/5 to 3/4 full, so a block takes 11 to 14 bytes; no entry needs an
//! allocation.

use std::fmt;

use crate::key::{BlockKey, Fingerprint, NamespaceId, NamespaceIndex, TierId};
use crate::tables::{self, TABLE_BITS, Tables};

/// What the map takes for a block, at most: tables grow by a quarter when they are 3/4 full.
pub const MEMORY_BYTES_PER_BLOCK: u64 = 14;

/// Bits of an entry that are not the fingerprint's: in use, health (2), tier (3), given.
const IN_USE: u64 = 1;
const HEALTH_AT: u32 = 1;
const HEALTH_MASK: u64 = 3 << HEALTH_AT;
const TIER_AT: u32 = 3;
const GIVEN: u64 = 1 << 6;
const FINGERPRINT_MASK: u64 = !((1 << TABLE_BITS) - 1);

/// Whether a block may be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LoadHealth {
    Good,
    /// The last load was late, or failed: it is a miss for a while.
    Late,
    Failed,
}

/// What gives each block on a tier its fingerprint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TierHasher {
    pub(super) seed: u64,
}

/// The seed stays in the process.
impl fmt::Debug for TierHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TierHasher")
    }
}

impl TierHasher {
    /// Of a seed that nobody outside the process knows: a client chooses the hashes of its blocks.
    pub fn new(seed: u64) -> TierHasher {
        TierHasher { seed }
    }

    /// The fingerprint under which the core knows the block. Two blocks of 2^64 may have the same.
    #[inline]
    pub fn hash(&self, key: &BlockKey) -> Fingerprint {
        self::key(self.seed, key.namespace, key.group, key.hash.as_bytes())
    }
}

/// The fingerprint of a block on a tier. It uses the namespace's own id, because blocks on a tier outlive short names.
pub(super) fn key(seed: u64, namespace: NamespaceId, group: u16, hash: &[u8]) -> Fingerprint {
    let id = namespace.0 as u64 ^ ((namespace.0 >> 64) as u64).rotate_left(29);
    Fingerprint::new(seed.rotate_left(17) ^ id, NamespaceIndex(0), group, hash)
}

#[derive(Clone, Copy, Default)]
struct Entry(u64);

/// See the module's head.
#[derive(Default)]
pub(crate) struct Locations(Tables<Entry>);

impl Locations {
    pub fn new(table_bits: u32) -> Locations {
        Locations(Tables::new(table_bits))
    }

    pub fn len(&self) -> u64 {
        self.0.len()
    }

    pub fn get(&self, key: Fingerprint) -> Option<(TierId, LoadHealth)> {
        self.entry(key).map(|entry| (entry.tier(), entry.health()))
    }

    /// Brings what is known of `keys` into the processor's cache.
    pub fn touch_lines(&self, keys: impl Iterator<Item = Fingerprint>) {
        self.0.touch_lines(keys);
    }

    /// Returns the tier that was known to have the block.
    pub fn insert(&mut self, key: Fingerprint, tier: TierId) -> Option<TierId> {
        if let Some(entry) = self.entry_mut(key) {
            let (replaced, given) = (entry.tier(), entry.0 & GIVEN);
            *entry = Entry(Entry::new(key, tier).0 | given);
            return Some(replaced);
        }
        self.0.insert(key, Entry::new(key, tier));
        None
    }

    pub fn remove(&mut self, key: Fingerprint) {
        self.0.remove(key, |entry| entry.is_of(key));
    }

    pub fn set_health(&mut self, key: Fingerprint, health: LoadHealth) {
        if let Some(entry) = self.entry_mut(key) {
            entry.0 = entry.0 & !HEALTH_MASK | (health as u64) << HEALTH_AT;
        }
    }

    /// Whether a shared tier was given the block, or gave it whole.
    pub fn is_given(&self, key: Fingerprint) -> bool {
        self.entry(key).is_some_and(|entry| entry.0 & GIVEN != 0)
    }

    /// Without an entry nothing is noted.
    pub fn set_given(&mut self, key: Fingerprint, is_given: bool) {
        if let Some(entry) = self.entry_mut(key) {
            entry.0 = entry.0 & !GIVEN | if is_given { GIVEN } else { 0 };
        }
    }

    pub fn heap_bytes(&self) -> usize {
        self.0.heap_bytes()
    }

    fn entry(&self, key: Fingerprint) -> Option<&Entry> {
        self.0.find(key, |entry| entry.is_of(key))
    }

    fn entry_mut(&mut self, key: Fingerprint) -> Option<&mut Entry> {
        self.0.find_mut(key, |entry| entry.is_of(key))
    }
}

impl Entry {
    fn new(key: Fingerprint, tier: TierId) -> Entry {
        Entry(key.0 & FINGERPRINT_MASK | IN_USE | u64::from(tier.0) << TIER_AT)
    }

    fn tier(&self) -> TierId {
        TierId((self.0 >> TIER_AT) as u8 & 7)
    }

    fn health(&self) -> LoadHealth {
        match (self.0 & HEALTH_MASK) >> HEALTH_AT {
            0 => LoadHealth::Good,
            1 => LoadHealth::Late,
            _ => LoadHealth::Failed,
        }
    }

    fn is_of(&self, key: Fingerprint) -> bool {
        (self.0 ^ key.0) & FINGERPRINT_MASK == 0
    }
}

impl tables::Entry for Entry {
    const IS_DENSE: bool = true;

    fn is_empty(&self) -> bool {
        self.0 == 0
    }

    fn home(&self) -> u32 {
        (self.0 >> TABLE_BITS) as u32
    }

    fn home_of(key: Fingerprint) -> u32 {
        (key.0 >> TABLE_BITS) as u32
    }
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
            let mut locations = Locations::default();
            let mut model: HashMap<u64, (TierId, LoadHealth)> = HashMap::new();
            let key = |k: u64| Fingerprint((k / 7) << 40 | (k % 7) << 12 | (k % 2));
            for (step, (op, k)) in ops.into_iter().enumerate() {
                let tier = TierId(step as u8 % 8);
                match op {
                    0 => {
                        let replaced = locations.insert(key(k), tier);
                        prop_assert_eq!(replaced, model.insert(k, (tier, LoadHealth::Good)).map(|(tier, _)| tier));
                    }
                    1 => {
                        locations.remove(key(k));
                        model.remove(&k);
                    }
                    _ => {
                        locations.set_health(key(k), LoadHealth::Late);
                        model.entry(k).and_modify(|(_, health)| *health = LoadHealth::Late);
                    }
                }
                prop_assert_eq!(locations.len(), model.len() as u64);
                for k in 0..120 {
                    prop_assert_eq!(locations.get(key(k)), model.get(&k).copied());
                }
            }
        }
    }

    /// A tier is asked with the whole key, so what is wrongly known here is a lost hit and nothing else.
    #[test]
    fn two_keys_of_one_fingerprint_are_one_entry_and_the_end_of_either_is_the_end_of_both() {
        let (mut locations, same) = (Locations::default(), Fingerprint(7 << 40 | 3));
        assert_eq!(locations.insert(same, TierId(0)), None);
        assert_eq!(locations.insert(same, TierId(1)), Some(TierId(0)), "the caller counts it for one tier only");
        locations.set_health(same, LoadHealth::Failed);
        assert_eq!((locations.get(same), locations.len()), (Some((TierId(1), LoadHealth::Failed)), 1));
        (0..2).for_each(|_| locations.remove(same));
        assert_eq!((locations.get(same), locations.len()), (None, 0));
    }

    #[test]
    fn a_block_that_a_shared_tier_was_given_stays_so_while_an_own_tier_has_it() {
        let (mut locations, one) = (Locations::default(), Fingerprint(7 << 40 | 3));
        locations.set_given(one, true);
        assert!(!locations.is_given(one), "nothing is noted of what no own tier has");
        locations.insert(one, TierId(7));
        assert!(!locations.is_given(one));
        locations.set_given(one, true);
        locations.set_health(one, LoadHealth::Late);
        assert_eq!((locations.get(one), locations.is_given(one)), (Some((TierId(7), LoadHealth::Late)), true));
        assert_eq!(locations.insert(one, TierId(1)), Some(TierId(7)));
        assert_eq!((locations.get(one), locations.is_given(one)), (Some((TierId(1), LoadHealth::Good)), true));
        locations.set_given(one, false);
        assert!(!locations.is_given(one));
        locations.set_given(one, true);
        locations.remove(one);
        locations.insert(one, TierId(1));
        assert!(!locations.is_given(one), "it is another copy");
    }

    #[test]
    fn a_block_takes_at_most_14_bytes_once_there_are_many() {
        let mut locations = Locations::default();
        for n in 0..1_000_000u64 {
            let hash = n.to_le_bytes();
            locations.insert(key(7, NamespaceId(3), 0, &hash), TierId(0));
            if n > 100_000 && n % 10_000 == 0 {
                let each = locations.heap_bytes() as f64 / n as f64;
                assert!(each <= MEMORY_BYTES_PER_BLOCK as f64, "{each} bytes a block at {n}");
            }
        }
    }
}
