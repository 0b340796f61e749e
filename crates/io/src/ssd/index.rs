//! The position of each block on one disk. The disk is authoritative and this is a cache of it: about 120 bytes per
//! block.
//!
//! Invariants: a key has one entry, that of its latest record. Each entry is in the chain of the segment that holds
//! it, so that a segment's blocks are found without a search.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use forebay_core::BlockKey;
use forebay_core::tier::Location;
use hashbrown::HashTable;

use super::layout::{Record, RecordKind};

/// The end of a chain.
const NONE: u32 = u32::MAX;

/// A block on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub key: BlockKey,
    pub sequence: u64,
    pub checksum: u64,
    /// Its record's own checksum.
    pub seal: u64,
    pub length_bytes: u64,
    pub segment: u32,
    pub first_page: u32,
    /// Whether it was read since it was written here.
    pub is_hot: bool,
    next: u32,
    previous: u32,
}

impl Entry {
    /// The record of block `key`, assuming that this is its entry.
    pub fn record_of(&self, key: BlockKey) -> Record {
        let Entry { sequence, first_page, length_bytes, checksum, .. } = *self;
        Record { kind: RecordKind::Block, key, sequence, first_page, length_bytes, checksum }
    }

    /// A block's present position, and its record.
    pub fn location(&self) -> Location {
        Location(u64::from(self.segment) << 32 | u64::from(self.first_page), self.sequence)
    }

    pub fn payload_pages(&self) -> u32 {
        self.record_of(self.key).payload_pages()
    }
}

/// See the module documentation.
pub(super) struct Index {
    table: HashTable<u32>,
    hasher: RandomState,
    entries: Vec<Entry>,
    free: Vec<u32>,
    chains: Vec<u32>,
}

impl Index {
    pub fn new(segments: u32) -> Index {
        Index {
            table: HashTable::new(),
            hasher: RandomState::new(),
            entries: Vec::new(),
            free: Vec::new(),
            chains: vec![NONE; segments as usize],
        }
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Entries for which memory is allocated.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    pub fn reserve(&mut self, blocks: usize) {
        let Index { table, hasher, entries, .. } = self;
        table.reserve(blocks, |slot| hasher.hash_one(entries[*slot as usize].key));
        entries.reserve(blocks);
    }

    pub fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.find(key).map(|slot| &self.entries[slot as usize])
    }

    /// Records that the block was read; true the first time.
    pub fn touch(&mut self, key: &BlockKey) -> bool {
        self.find(key).is_some_and(|slot| !std::mem::replace(&mut self.entries[slot as usize].is_hot, true))
    }

    /// Stores the entry of `record` and returns the key's old one.
    pub fn insert(&mut self, record: &Record, segment: u32) -> Option<Entry> {
        let replaced = self.remove(&record.key);
        let entry = Entry {
            key: record.key,
            sequence: record.sequence,
            checksum: record.checksum,
            seal: record.seal(),
            length_bytes: record.length_bytes,
            segment,
            first_page: record.first_page,
            is_hot: false,
            next: self.chains[segment as usize],
            previous: NONE,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        if entry.next != NONE {
            self.entries[entry.next as usize].previous = slot;
        }
        self.chains[segment as usize] = slot;
        let Index { table, hasher, entries, .. } = self;
        let hash = |key: &BlockKey| hasher.hash_one(key);
        table.insert_unique(hash(&record.key), slot, |slot| hash(&entries[*slot as usize].key));
        replaced
    }

    pub fn remove(&mut self, key: &BlockKey) -> Option<Entry> {
        let Index { table, hasher, entries, .. } = self;
        let found = table.find_entry(hasher.hash_one(key), |slot| entries[*slot as usize].key == *key).ok()?;
        let (slot, _) = found.remove();
        let entry = self.entries[slot as usize];
        match entry.previous {
            NONE => self.chains[entry.segment as usize] = entry.next,
            previous => self.entries[previous as usize].next = entry.next,
        }
        if entry.next != NONE {
            self.entries[entry.next as usize].previous = entry.previous;
        }
        self.free.push(slot);
        Some(entry)
    }

    /// The blocks of a segment, the latest first.
    pub fn of_segment(&self, segment: u32) -> impl Iterator<Item = &Entry> {
        let entry = |slot: u32| (slot != NONE).then(|| &self.entries[slot as usize]);
        std::iter::successors(entry(self.chains[segment as usize]), move |previous| entry(previous.next))
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        self.table.find(self.hasher.hash_one(key), |slot| self.entries[*slot as usize].key == *key).copied()
    }
}
