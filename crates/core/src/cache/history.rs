//! A small, lossy memory of keys that are not in the pool, which gives the reasons of misses.
//!
//! Keys share lines of eight places, newest first; a full line forgets its last key. A lookup of a forgotten key is
//! reported as never seen. A tier that admits blocks on their second sighting treats the key, and all keys after it in
//! the prompt, as new. With only one place for each key, 4 % of the places used, such a disk lost 3 of 50 points of hit
//! rate. The reasons add up to all misses.

use std::hint::black_box;

use crate::key::{BlockHash, Fingerprint, NamespaceIndex};

/// The last thing that happened to a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Fate {
    Stored = 1,
    Evicted,
    Refused,
    Failed,
}

pub(crate) struct Memory {
    /// From `first` on, which is aligned, one line after another. Tag (32 bits), namespace (24 bits), fate (8 bits).
    /// Zero: empty.
    entries: Box<[u64]>,
    first: usize,
    lines: usize,
    seed: u64,
}

/// As many as a line of the processor's cache holds.
const LINE: usize = 8;

impl Memory {
    /// 8 bytes an entry; touched pages only.
    pub fn new(entries: usize, seed: u64) -> Memory {
        let lines = entries.div_ceil(LINE).next_power_of_two();
        let entries = vec![0; (lines + 1) * LINE].into_boxed_slice();
        let first = entries.as_ptr().align_offset(LINE * size_of::<u64>());
        Memory { entries, first, lines, seed }
    }

    pub fn note(&mut self, namespace: NamespaceIndex, group: u16, hash: &BlockHash, fate: Fate) {
        let (at, tag) = self.place(group, hash.as_bytes());
        let line: &mut [u64; LINE] = self.entries[at..].first_chunk_mut().expect("a line is whole");
        match line.iter().position(|entry| entry >> 32 == tag) {
            Some(place) => (0..place).rev().for_each(|at| line[at + 1] = line[at]),
            // Most keys are new. A length that the compiler knows takes two moves.
            None => line.copy_within(..LINE - 1, 1),
        }
        line[0] = tag << 32 | u64::from(namespace.0 & 0xff_ffff) << 8 | fate as u64;
    }

    /// Brings entries into the processor's cache.
    pub fn touch_lines<'a>(&self, keys: impl Iterator<Item = (u16, &'a [u8])>) {
        black_box(keys.fold(0, |sum, (group, hash)| sum ^ self.entries[self.place(group, hash).0]));
    }

    /// What happened last to this hash, and in which namespace.
    pub fn recall(&self, group: u16, hash: &[u8]) -> Option<(NamespaceIndex, Fate)> {
        let (at, tag) = self.place(group, hash);
        let entry = *self.entries[at..at + LINE].iter().find(|entry| **entry >> 32 == tag)?;
        let fates = [Fate::Stored, Fate::Evicted, Fate::Refused, Fate::Failed];
        let fate = fates.into_iter().find(|fate| *fate as u8 == entry as u8)?;
        Some((NamespaceIndex((entry >> 8) as u32 & 0xff_ffff), fate))
    }

    pub fn heap_bytes(&self) -> usize {
        self.entries.len() * size_of::<u64>()
    }

    /// Where the key's line begins, and its tag.
    fn place(&self, group: u16, hash: &[u8]) -> (usize, u64) {
        let key = Fingerprint::new(self.seed, NamespaceIndex(0), group, hash).0;
        (self.first + (key as usize & (self.lines - 1)) * LINE, key >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u64) -> BlockHash {
        BlockHash::new(&n.to_le_bytes()).unwrap()
    }

    fn is_known(memory: &Memory, n: u64) -> bool {
        memory.recall(0, hash(n).as_bytes()).is_some()
    }

    #[test]
    fn a_memory_half_full_forgets_next_to_nothing_and_a_full_one_the_oldest() {
        let mut memory = Memory::new(1 << 12, 7);
        (0..2048).for_each(|n| memory.note(NamespaceIndex(3), 0, &hash(n), Fate::Stored));
        let forgotten = (0..2048).filter(|n| !is_known(&memory, *n)).count();
        assert!(forgotten < 40, "{forgotten} of 2048");
        (2048..20_000).for_each(|n| memory.note(NamespaceIndex(3), 0, &hash(n), Fate::Stored));
        let known = |from: u64| (from..from + 1000).filter(|n| is_known(&memory, *n)).count();
        assert!(known(19_000) > 990 && known(10_000) < 50, "{} and {}", known(19_000), known(10_000));
    }

    #[test]
    fn the_last_that_happened_to_a_key_is_remembered_once() {
        let mut memory = Memory::new(LINE, 7);
        for (n, fate) in [(1, Fate::Stored), (2, Fate::Stored), (1, Fate::Evicted), (3, Fate::Refused)] {
            memory.note(NamespaceIndex(n), 0, &hash(u64::from(n)), fate);
        }
        let recalled = [1, 2, 3, 4].map(|n| memory.recall(0, hash(n).as_bytes()));
        let some = |n, fate| Some((NamespaceIndex(n), fate));
        assert_eq!(recalled, [some(1, Fate::Evicted), some(2, Fate::Stored), some(3, Fate::Refused), None]);
        assert_eq!(memory.entries.iter().filter(|entry| **entry != 0).count(), 3);
    }
}
