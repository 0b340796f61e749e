//! The position of each block on one disk. The disk is authoritative and this is a cache of it: about 120 bytes per
//! block.
//!
//! Invariants: a key has one entry, that of its latest record. Each entry is in the chain of the segment that holds
//! it, so that a segment's blocks are found without a search. An entry keeps its place, and no call moves more than a
//! few thousand entries: a table of all blocks would take seconds to double, for millions of blocks.
//!
//! A key whose record recovery might find has an entry, also if the block is not served any more. Otherwise a removal
//! would find nothing to remove, and the block would come back with the next start.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::{self, IndexMut};

use forebay_core::BlockKey;
use forebay_core::tier::Location;
use hashbrown::HashTable;

use super::layout::{Record, RecordKind};

/// The end of a chain; the segment of a place without a block.
const NONE: u32 = u32::MAX;

/// Tables that share the keys, each of which doubles by itself. With 60 million blocks one holds 4,000, which take
/// 0.3 ms to double. Empty, all of them take 512 KiB.
const TABLES: usize = 1 << 14;

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
    /// It is not served: its removal has begun, its bytes are wrong or could not be read when the disk was opened, its
    /// store failed after its head was written, or it was evicted and its segment's next header is not flushed.
    pub is_withdrawn: bool,
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
    tables: Vec<HashTable<u32>>,
    hasher: RandomState,
    entries: Entries,
    /// The first place without a block; the others follow by `next`.
    free: u32,
    /// Those that are served.
    blocks: usize,
    /// By segment: its entries that are served, and the others.
    chains: [Vec<u32>; 2],
}

impl Index {
    pub fn new(segments: u32) -> Index {
        Index {
            tables: vec![HashTable::new(); TABLES],
            hasher: RandomState::new(),
            entries: Entries::default(),
            free: NONE,
            blocks: 0,
            chains: [0, 1].map(|_| vec![NONE; segments as usize]),
        }
    }

    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Entries for which memory is allocated.
    pub fn capacity(&self) -> usize {
        self.entries.len() as usize
    }

    /// Of the tables, for so many blocks that are inserted next. Takes time by their number.
    pub fn reserve(&mut self, blocks: usize) {
        let Index { tables, hasher, entries, .. } = self;
        let each = blocks / TABLES;
        tables.iter_mut().for_each(|table| table.reserve(each, |place| hasher.hash_one(entries[*place].key)));
    }

    /// The block of that key, if it is served.
    pub fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.record(key).filter(|entry| !entry.is_withdrawn)
    }

    /// The entry of that key, also if the block is not served.
    pub fn record(&self, key: &BlockKey) -> Option<&Entry> {
        self.find(key).map(|place| &self.entries[place])
    }

    /// Records that the block was read; true the first time.
    pub fn touch(&mut self, key: &BlockKey) -> bool {
        let entry = self.find(key).map(|place| &mut self.entries[place]);
        entry.is_some_and(|entry| !entry.is_withdrawn && !std::mem::replace(&mut entry.is_hot, true))
    }

    /// From now on the block is not served. Returns its entry if it was served until now.
    pub fn withdraw(&mut self, key: &BlockKey) -> Option<Entry> {
        let place = self.find(key).filter(|place| !self.entries[*place].is_withdrawn)?;
        let entry = self.unlink(place);
        self.entries[place].is_withdrawn = true;
        self.link(place);
        self.blocks -= 1;
        Some(entry)
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
            is_withdrawn: false,
            next: NONE,
            previous: NONE,
        };
        let place = match self.free {
            NONE => self.entries.push(entry),
            free => {
                self.free = self.entries[free].next;
                self.entries[free] = entry;
                free
            }
        };
        self.link(place);
        self.blocks += 1;
        let Index { tables, hasher, entries, .. } = self;
        let hash = hasher.hash_one(record.key);
        tables[table_of(hash)].insert_unique(hash, place, |place| hasher.hash_one(entries[*place].key));
        replaced
    }

    pub fn remove(&mut self, key: &BlockKey) -> Option<Entry> {
        let Index { tables, hasher, entries, .. } = self;
        let hash = hasher.hash_one(key);
        let found = tables[table_of(hash)].find_entry(hash, |place| entries[*place].key == *key).ok()?;
        let (place, _) = found.remove();
        let entry = self.unlink(place);
        let vacant = &mut self.entries[place];
        (vacant.segment, vacant.next) = (NONE, self.free);
        self.free = place;
        self.blocks -= usize::from(!entry.is_withdrawn);
        Some(entry)
    }

    /// The entries in `places` places from `from` on, in no order, and where to go on; `None` behind the last place. A
    /// key keeps its place until it is removed, also when its block is written anew.
    pub fn piece(&self, from: u32, places: u32) -> (impl Iterator<Item = &Entry>, Option<u32>) {
        let end = from.saturating_add(places).min(self.entries.len());
        let entries = (from..end).map(|place| &self.entries[place]).filter(|entry| entry.segment != NONE);
        (entries, (end < self.entries.len()).then_some(end))
    }

    /// The blocks of a segment that are served, the latest first.
    pub fn of_segment(&self, segment: u32) -> impl Iterator<Item = &Entry> {
        self.chain(self.chains[0][segment as usize])
    }

    /// The other entries of a segment, the latest withdrawn first.
    pub fn withdrawn_of_segment(&self, segment: u32) -> impl Iterator<Item = &Entry> {
        self.chain(self.chains[1][segment as usize])
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = &Entry> {
        let entry = |place: u32| (place != NONE).then(|| &self.entries[place]);
        std::iter::successors(entry(first), move |previous| entry(previous.next))
    }

    /// Puts the entry first in its chain.
    fn link(&mut self, place: u32) {
        let Entry { segment, is_withdrawn, .. } = self.entries[place];
        let first = &mut self.chains[usize::from(is_withdrawn)][segment as usize];
        let next = std::mem::replace(first, place);
        (self.entries[place].next, self.entries[place].previous) = (next, NONE);
        if next != NONE {
            self.entries[next].previous = place;
        }
    }

    /// Takes the entry out of its chain, and returns it.
    fn unlink(&mut self, place: u32) -> Entry {
        let entry = self.entries[place];
        match entry.previous {
            NONE => self.chains[usize::from(entry.is_withdrawn)][entry.segment as usize] = entry.next,
            previous => self.entries[previous].next = entry.next,
        }
        if entry.next != NONE {
            self.entries[entry.next].previous = entry.previous;
        }
        entry
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        let hash = self.hasher.hash_one(key);
        self.tables[table_of(hash)].find(hash, |place| self.entries[*place].key == *key).copied()
    }
}

/// Entries by place, in chunks that stay. A chunk is reserved and not touched before it is filled: fresh memory can
/// take 10 us a page.
#[derive(Default)]
struct Entries(Vec<Vec<Entry>>);

const CHUNK_BITS: u32 = 12;

impl Entries {
    fn len(&self) -> u32 {
        let whole = self.0.len().saturating_sub(1) << CHUNK_BITS;
        (whole + self.0.last().map_or(0, Vec::len)) as u32
    }

    fn push(&mut self, entry: Entry) -> u32 {
        let place = self.len();
        if place.is_multiple_of(1 << CHUNK_BITS) {
            self.0.push(Vec::with_capacity(1 << CHUNK_BITS));
        }
        self.0.last_mut().expect("there is a chunk with room").push(entry);
        place
    }
}

impl ops::Index<u32> for Entries {
    type Output = Entry;

    fn index(&self, place: u32) -> &Entry {
        &self.0[(place >> CHUNK_BITS) as usize][place as usize & ((1 << CHUNK_BITS) - 1)]
    }
}

impl IndexMut<u32> for Entries {
    fn index_mut(&mut self, place: u32) -> &mut Entry {
        &mut self.0[(place >> CHUNK_BITS) as usize][place as usize & ((1 << CHUNK_BITS) - 1)]
    }
}

/// By bits that a table uses neither for its buckets nor for their tags.
fn table_of(hash: u64) -> usize {
    (hash >> 32) as usize % TABLES
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use forebay_core::{BlockHash, NamespaceId};
    use proptest::prelude::*;

    use super::*;

    fn key(number: u64) -> BlockKey {
        let hash = BlockHash::new(&number.to_le_bytes()).unwrap();
        BlockKey { namespace: NamespaceId(u128::from(number % 3)), group: 0, hash }
    }

    fn record(number: u64, sequence: u64) -> Record {
        let (kind, first_page) = (RecordKind::Block, number as u32);
        Record { kind, key: key(number), sequence, first_page, length_bytes: 4096, checksum: number }
    }

    fn listed(index: &Index, places: u32) -> Vec<BlockKey> {
        let (mut at, mut all) = (Some(0), Vec::new());
        while let Some(from) = at {
            let (entries, next) = index.piece(from, places);
            all.extend(entries.map(|entry| entry.key));
            at = next;
        }
        all
    }

    proptest! {
        /// Against a map: the entry of each key, whether it is served, those of each segment, and all piece by piece.
        #[test]
        fn it_has_the_latest_record_of_each_key(ops in proptest::collection::vec((0u8..5, 0u64..60, 0u32..4), 1..400)) {
            let (mut index, mut model) = (Index::new(4), BTreeMap::new());
            for (at, (op, number, segment)) in ops.into_iter().enumerate() {
                let sequence = at as u64;
                let seen = |entry: &Entry| (entry.sequence, entry.segment, !entry.is_withdrawn);
                if op == 0 {
                    prop_assert_eq!(index.remove(&key(number)).as_ref().map(seen), model.remove(&number));
                } else if op == 1 {
                    let was_served = model.get_mut(&number).filter(|(.., is_served)| *is_served);
                    let expected = was_served.as_deref().copied();
                    was_served.into_iter().for_each(|(.., is_served)| *is_served = false);
                    prop_assert_eq!(index.withdraw(&key(number)).as_ref().map(seen), expected);
                } else {
                    let replaced = index.insert(&record(number, sequence), segment);
                    prop_assert_eq!(replaced.as_ref().map(seen), model.insert(number, (sequence, segment, true)));
                }
                prop_assert_eq!(index.len(), model.values().filter(|(.., is_served)| *is_served).count());
                for number in 0..60 {
                    let entry = model.get(&number).copied();
                    prop_assert_eq!(index.record(&key(number)).map(seen), entry);
                    prop_assert_eq!(index.get(&key(number)).map(seen), entry.filter(|(.., is_served)| *is_served));
                }
                for segment in 0..4 {
                    let chain: Vec<u64> = index.of_segment(segment).map(|entry| entry.sequence).collect();
                    prop_assert!(chain.is_sorted_by(|one, next| one > next), "the latest first: {:?}", chain);
                    let withdrawn: Vec<u64> = index.withdrawn_of_segment(segment).map(|entry| entry.sequence).collect();
                    for (is_served, chain) in [(true, chain), (false, withdrawn)] {
                        let theirs = model.values().filter(|(_, of, served)| (*of, *served) == (segment, is_served));
                        let theirs: BTreeSet<u64> = theirs.map(|(sequence, ..)| *sequence).collect();
                        prop_assert_eq!(chain.len(), theirs.len());
                        prop_assert_eq!(chain.into_iter().collect::<BTreeSet<_>>(), theirs);
                    }
                }
            }
            let all: BTreeSet<BlockKey> = model.keys().map(|number| key(*number)).collect();
            for places in [1, 7, 1000] {
                let listed = listed(&index, places);
                prop_assert_eq!(listed.len(), all.len(), "each once");
                prop_assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), all.clone());
            }
        }
    }

    #[test]
    fn a_block_that_is_written_anew_keeps_its_place() {
        let mut index = Index::new(4);
        (0..10).for_each(|number| _ = index.insert(&record(number, number), 0));
        index.remove(&key(2));
        index.insert(&record(7, 100), 1);
        let (entries, _) = index.piece(7, 1);
        assert_eq!(entries.map(|entry| entry.sequence).collect::<Vec<_>>(), [100]);
    }
}
