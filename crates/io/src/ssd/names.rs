//! What many keys of a disk have in common, kept once: namespace, group, and the length of the hash.
//!
//! Invariant: a name is there as long as a key has it. A number is given to another name only after that.

use std::collections::BTreeMap;
use std::ops::Index;

use forebay_core::{BlockHash, BlockKey, NamespaceId};

use super::places::Places;

/// A key without its hash's bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Name {
    namespace: NamespaceId,
    group: u16,
    hash_len: u8,
}

impl Name {
    /// Of that key; before it the hash, with zeros behind it.
    pub fn of(key: &BlockKey) -> ([u8; BlockHash::MAX_LEN], Name) {
        let bytes = key.hash.as_bytes();
        // The usual length, without a call.
        let hash = bytes.try_into().unwrap_or_else(|_| {
            let mut hash = [0; BlockHash::MAX_LEN];
            hash[..bytes.len()].copy_from_slice(bytes);
            hash
        });
        (hash, Name { namespace: key.namespace, group: key.group, hash_len: bytes.len() as u8 })
    }

    /// The key of this name that has this hash.
    pub fn key(&self, hash: &[u8; BlockHash::MAX_LEN]) -> BlockKey {
        let hash = BlockHash::new(&hash[..usize::from(self.hash_len)]).expect("it is a hash's length");
        BlockKey { namespace: self.namespace, group: self.group, hash }
    }
}

/// See the module documentation.
pub(super) struct Names {
    /// A tree, because no insertion into one moves more than a few names.
    numbers: BTreeMap<Name, u32>,
    /// By number: the name, and how many keys have it.
    all: Places<(Name, u32)>,
    free: Vec<u32>,
    /// The number that was asked for last: the next is likely to be the same.
    latest: u32,
}

impl Names {
    pub fn new() -> Names {
        Names { numbers: BTreeMap::new(), all: Places::new(), free: Vec::new(), latest: 0 }
    }

    /// The number of the name, of which there is one more key.
    pub fn take(&mut self, name: Name) -> u32 {
        let is_latest = |(latest, keys): (Name, u32)| keys > 0 && latest == name;
        if self.latest >= self.all.len() || !is_latest(self.all[self.latest]) {
            self.latest = match self.numbers.get(&name) {
                Some(number) => *number,
                None => self.add(name),
            };
        }
        self.all[self.latest].1 += 1;
        self.latest
    }

    /// There is one key less of this name.
    pub fn put_back(&mut self, number: u32) {
        let (name, keys) = &mut self.all[number];
        *keys -= 1;
        if *keys == 0 {
            self.numbers.remove(name);
            self.free.push(number);
        }
    }

    fn add(&mut self, name: Name) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| self.all.push((name, 0)));
        self.all[number] = (name, 0);
        self.numbers.insert(name, number);
        number
    }
}

impl Index<u32> for Names {
    type Output = Name;

    fn index(&self, number: u32) -> &Name {
        &self.all[number].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: u128, group: u16, hash: &[u8]) -> BlockKey {
        BlockKey { namespace: NamespaceId(namespace), group, hash: BlockHash::new(hash).unwrap() }
    }

    #[test]
    fn a_key_is_what_it_was_and_a_number_is_used_again() {
        let keys = [key(1, 0, &[0]), key(1, 0, &[0, 0]), key(1, 1, &[0]), key(2, 0, &[0]), key(1, 0, &[7; 32])];
        let mut names = Names::new();
        for round in 0..3 {
            let taken = keys.map(|key| {
                let (hash, name) = Name::of(&key);
                (key, hash, names.take(name), names.take(name))
            });
            for (key, hash, number, again) in taken {
                assert_eq!((names[number].key(&hash), number), (key, again));
            }
            assert_eq!((names.numbers.len(), names.all.len()), (5, 5), "round {round}");
            for (.., number, again) in taken {
                names.put_back(number);
                names.put_back(again);
            }
            assert_eq!((names.numbers.len(), names.free.len()), (0, 5), "round {round}");
        }
    }
}
