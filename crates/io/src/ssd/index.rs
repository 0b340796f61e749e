//! The position of each block on one disk. The disk is authoritative and this is a cache of it: 33 bytes per block.
//!
//! A block is known by its fingerprint of 64 bits, and by a proof: a keyed hash of its key, its length and its
//! checksum. No key is here. What a load has read is the block that was asked for if its checksum, with the asked key,
//! gives the proof: so neither another block of the same fingerprint nor damaged bytes pass. Which keys a segment
//! holds, the list in the segment says: `listing` reads it.
//!
//! Invariants: a fingerprint has one entry, that of the latest record. An entry keeps its place. A block whose record
//! recovery might find has an entry, also if the block is not served any more. Otherwise a removal would find nothing
//! to remove, and the block would come back with the next start. (Of two blocks with one fingerprint the earlier has
//! none: after a purge of it, the list of purges says that it is void.)
//!
//! The table grows by linear hashing (Litwin, 1980): there are as many buckets as entries, and each insertion splits
//! one bucket in two, so no insertion moves more than the few entries of one bucket, however many blocks there are.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;

use forebay_core::tiers::TierHasher;
use forebay_core::{BlockKey, Fingerprint};

use super::layout::{MOST_PAGES, Record};
use super::places::Places;

/// The end of a chain.
const NONE: u32 = u32::MAX;

/// A block on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub block: Fingerprint,
    pub proof: Proof,
    pub length_bytes: u64,
    pub spot: Spot,
    /// Whether it was read since it was written here.
    pub is_hot: bool,
    /// It is not served: its removal has begun, its bytes are wrong or could not be read when the disk was opened, its
    /// store failed after its head was written, or it was evicted and its segment's next header is not flushed.
    pub is_withdrawn: bool,
}

impl Entry {
    pub fn is_served(&self) -> bool {
        !self.is_withdrawn
    }
}

/// Where a block lies. Of all blocks that the index has, one lies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub segment: u32,
    pub first_page: u32,
}

/// A keyed hash of a block's key, length and checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Proof(u64);

/// What gives blocks their fingerprints and proofs.
#[derive(Clone)]
pub(super) struct Hasher {
    tier: TierHasher,
    proofs: RandomState,
}

impl Hasher {
    pub fn new(tier: TierHasher) -> Hasher {
        Hasher { tier, proofs: RandomState::new() }
    }

    pub fn block(&self, key: &BlockKey) -> Fingerprint {
        self.tier.hash(key)
    }

    pub fn proof(&self, key: &BlockKey, length_bytes: u64, checksum: u64) -> Proof {
        Proof(self.proofs.hash_one((key, length_bytes, checksum)))
    }

    pub fn proof_of(&self, record: &Record) -> Proof {
        self.proof(&record.key, record.length_bytes, record.checksum)
    }
}

/// An entry as it is kept, without a byte between its fields.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Packed {
    /// In its bucket. Next to the fingerprint: a search reads both, and nothing else of other blocks' entries.
    below: u32,
    block: u64,
    proof: u64,
    /// The block's length, and above it the flags. 0 in a place without a block.
    length_and_flags: u32,
    /// The block's first page, counted from the first segment; the lower bits, and the upper ones.
    page: u32,
    page_above: u8,
}

/// What the index takes for a block: its entry, and a bucket.
pub const MEMORY_BYTES_PER_BLOCK: u64 = (size_of::<Packed>() + size_of::<u32>()) as u64;

const IS_HOT: u32 = 1 << 30;
const IS_WITHDRAWN: u32 = 1 << 31;
const LENGTH: u32 = IS_HOT - 1;

impl Packed {
    fn is_vacant(&self) -> bool {
        self.length_and_flags & LENGTH == 0
    }

    fn is_withdrawn(&self) -> bool {
        self.length_and_flags & IS_WITHDRAWN != 0
    }

    fn page(&self) -> u64 {
        u64::from(self.page_above) << 32 | u64::from(self.page)
    }
}

/// As many as [`Index::warm`] looks at. A core waits for some ten to twenty reads at once.
pub(super) const WARM_AT_ONCE: usize = 32;

/// See the module documentation.
pub(super) struct Index {
    /// The first entry of each bucket; the others follow by `below`.
    buckets: Places<u32>,
    hasher: Hasher,
    entries: Places<Packed>,
    /// Pages of a segment, as a power of two.
    page_bits: u32,
    /// Places with an entry.
    filled: u32,
    /// The first place without a block; the others follow by `below`.
    free: u32,
    /// Those that are served.
    blocks: usize,
    /// Entries that were looked at to make buckets, for the tests.
    #[cfg(test)]
    moved: u64,
}

impl Index {
    /// Of a disk with so many segments of so many pages, a power of two.
    pub fn new(segments: u32, pages: u32, hasher: Hasher) -> Index {
        assert!(
            pages.is_power_of_two() && u64::from(segments) * u64::from(pages) <= MOST_PAGES,
            "no such disk is opened"
        );
        Index {
            buckets: Places::new(),
            hasher,
            entries: Places::new(),
            page_bits: pages.ilog2(),
            filled: 0,
            free: NONE,
            blocks: 0,
            #[cfg(test)]
            moved: 0,
        }
    }

    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Entries for which memory is allocated.
    pub fn capacity(&self) -> usize {
        self.entries.len() as usize
    }

    /// Makes the buckets of so many blocks that are inserted next, into an empty index. Takes time by their number.
    pub fn reserve(&mut self, blocks: usize) {
        assert!(self.filled == 0, "entries lie in the buckets that there are");
        (self.buckets.len() as usize..blocks).for_each(|_| _ = self.buckets.push(NONE));
    }

    /// Reads what the calls that take these blocks will read first. In a large index that is three reads from memory
    /// for each, each of which needs the one before. Those of several blocks overlap.
    pub fn warm(&self, blocks: impl Iterator<Item = Fingerprint>) {
        let mut warmed = [Fingerprint(0); WARM_AT_ONCE];
        warmed.iter_mut().zip(blocks).for_each(|(warmed, block)| *warmed = block);
        if self.buckets.len() > 0 {
            let below = |place: u32| if place == NONE { NONE } else { self.entries[place].below };
            let firsts = warmed.map(|block| self.buckets[self.bucket_of(block)]);
            black_box(firsts.map(below).map(below));
        }
    }

    /// The block of that key, if it is served.
    pub fn get(&self, key: &BlockKey) -> Option<Entry> {
        self.entry_of(self.hasher.block(key)).filter(Entry::is_served)
    }

    /// The entry of that key, also if the block is not served.
    pub fn record(&self, key: &BlockKey) -> Option<Entry> {
        self.entry_of(self.hasher.block(key))
    }

    /// The entry of that fingerprint, also if the block is not served.
    pub fn entry_of(&self, block: Fingerprint) -> Option<Entry> {
        self.find(block).map(|place| self.entry(place))
    }

    /// Records that the block was read; true the first time.
    pub fn touch(&mut self, block: Fingerprint) -> bool {
        let Some(place) = self.find(block) else { return false };
        let packed = &mut self.entries[place];
        let is_first = packed.length_and_flags & (IS_HOT | IS_WITHDRAWN) == 0;
        packed.length_and_flags |= if is_first { IS_HOT } else { 0 };
        is_first
    }

    /// From now on the block is not served. Returns its entry if it was served until now.
    pub fn withdraw(&mut self, block: Fingerprint) -> Option<Entry> {
        let place = self.find(block).filter(|place| !self.entries[*place].is_withdrawn())?;
        let entry = self.entry(place);
        self.entries[place].length_and_flags |= IS_WITHDRAWN;
        self.blocks -= 1;
        Some(entry)
    }

    /// Stores the entry of `record`, and returns the old one of the same block.
    pub fn insert(&mut self, record: &Record, segment: u32) -> Option<Entry> {
        let (block, proof) = (self.hasher.block(&record.key), self.hasher.proof_of(record));
        let replaced = self.remove(block);
        self.add(record, segment, block, proof);
        replaced
    }

    /// Stores the entry of `record`, whose block has none.
    pub fn add(&mut self, record: &Record, segment: u32, block: Fingerprint, Proof(proof): Proof) {
        let page = u64::from(segment) << self.page_bits | u64::from(record.first_page);
        let length = 1..=u64::from(LENGTH);
        assert!(
            record.first_page >> self.page_bits == 0 && length.contains(&record.length_bytes),
            "it has bytes, and fits a segment"
        );
        let packed = Packed {
            below: NONE,
            block: block.0,
            proof,
            length_and_flags: record.length_bytes as u32,
            page: page as u32,
            page_above: (page >> 32) as u8,
        };
        let place = match self.free {
            NONE => self.entries.push(packed),
            free => {
                self.free = self.entries[free].below;
                self.entries[free] = packed;
                free
            }
        };
        (self.blocks, self.filled) = (self.blocks + 1, self.filled + 1);
        if self.filled > self.buckets.len() {
            self.split();
        }
        self.push_down(self.bucket_of(block), place);
    }

    pub fn remove(&mut self, block: Fingerprint) -> Option<Entry> {
        let place = self.find(block)?;
        let below = self.entries[place].below;
        let bucket = self.bucket_of(block);
        if self.buckets[bucket] == place {
            self.buckets[bucket] = below;
        } else {
            let mut above = self.buckets[bucket];
            while self.entries[above].below != place {
                above = self.entries[above].below;
            }
            self.entries[above].below = below;
        }
        let entry = self.entry(place);
        let vacant = &mut self.entries[place];
        (vacant.length_and_flags, vacant.below) = (0, self.free);
        self.free = place;
        self.filled -= 1;
        self.blocks -= usize::from(entry.is_served());
        Some(entry)
    }

    /// The entries in `places` places from `from` on, in no order, and where to go on; `None` behind the last place. A
    /// block keeps its place until it is removed, also when it is written anew.
    pub fn piece(&self, from: u32, places: u32) -> (impl Iterator<Item = Entry>, Option<u32>) {
        let end = from.saturating_add(places).min(self.entries.len());
        let filled = (from..end).filter(|place| !self.entries[*place].is_vacant());
        (filled.map(|place| self.entry(place)), (end < self.entries.len()).then_some(end))
    }

    fn entry(&self, place: u32) -> Entry {
        let packed = self.entries[place];
        let (page, flags) = (packed.page(), packed.length_and_flags);
        Entry {
            block: Fingerprint(packed.block),
            proof: Proof(packed.proof),
            length_bytes: u64::from(flags & LENGTH),
            spot: Spot {
                segment: (page >> self.page_bits) as u32,
                first_page: (page & ((1 << self.page_bits) - 1)) as u32,
            },
            is_hot: flags & IS_HOT != 0,
            is_withdrawn: packed.is_withdrawn(),
        }
    }

    fn find(&self, block: Fingerprint) -> Option<u32> {
        if self.filled == 0 {
            return None;
        }
        let mut place = self.buckets[self.bucket_of(block)];
        while place != NONE {
            let packed = &self.entries[place];
            if packed.block == block.0 {
                return Some(place);
            }
            place = packed.below;
        }
        None
    }

    /// By as many bits of the fingerprint as number all buckets. A bucket that is not split yet has the entries of the
    /// bucket that does not exist yet.
    fn bucket_of(&self, block: Fingerprint) -> u32 {
        let (buckets, half) = (u64::from(self.buckets.len()), 1 << self.buckets.len().ilog2());
        let bucket = block.0 & (2 * half - 1);
        (if bucket < buckets { bucket } else { bucket - half }) as u32
    }

    /// Makes one more bucket, of entries of another one.
    fn split(&mut self) {
        let new = self.buckets.push(NONE);
        let Some(bit) = new.checked_ilog2() else { return };
        let old = new - (1 << bit);
        let mut place = std::mem::replace(&mut self.buckets[old], NONE);
        while place != NONE {
            let Packed { below, block, .. } = self.entries[place];
            self.push_down(self.bucket_of(Fingerprint(block)), place);
            #[cfg(test)]
            (self.moved += 1);
            place = below;
        }
    }

    /// Puts the entry first in the bucket.
    fn push_down(&mut self, bucket: u32, place: u32) {
        self.entries[place].below = std::mem::replace(&mut self.buckets[bucket], place);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, HashMap};

    use forebay_core::{BlockHash, NamespaceId};
    use proptest::prelude::*;

    use super::super::layout::RecordKind;
    use super::*;

    const PAGES: u32 = 1 << 18;

    fn hasher() -> Hasher {
        Hasher::new(TierHasher::new(0x5eed))
    }

    fn key(number: u64) -> BlockKey {
        // The same hash under several names, one of them as it would be with zeros behind it.
        let (bytes, len) = ((number / 4).to_le_bytes(), if number.is_multiple_of(4) { 7 } else { 8 });
        let namespace = NamespaceId(u128::from(number % 4 / 2));
        BlockKey { namespace, group: (number % 4 == 3) as u16, hash: BlockHash::new(&bytes[..len]).unwrap() }
    }

    fn record(number: u64, first_page: u64) -> Record {
        let (kind, first_page) = (RecordKind::Block, first_page as u32 % PAGES);
        Record { kind, key: key(number), sequence: 0, first_page, length_bytes: 4096, checksum: number }
    }

    fn listed(index: &Index, places: u32) -> Vec<Fingerprint> {
        let (mut at, mut all) = (Some(0), Vec::new());
        while let Some(from) = at {
            let (entries, next) = index.piece(from, places);
            all.extend(entries.map(|entry| entry.block));
            at = next;
        }
        all
    }

    /// So that some are in one bucket, whatever their number.
    fn crowded(number: u64) -> Fingerprint {
        Fingerprint((number << 40) | (number % 3))
    }

    proptest! {
        /// Against a map: the entry of each block, whether it is served, and all piece by piece.
        #[test]
        fn it_has_the_latest_record_of_each_block(
            ops in proptest::collection::vec((0u8..5, 0u64..60, 0u32..4), 1..400),
        ) {
            let (mut index, mut model) = (Index::new(4, PAGES, hasher()), BTreeMap::new());
            for (at, (op, number, segment)) in ops.into_iter().enumerate() {
                let block = crowded(number);
                let seen = |entry: Entry| {
                    prop_assert_eq!((entry.block.0 >> 40, entry.length_bytes), (entry.block.0 >> 40, 4096));
                    Ok((entry.spot.first_page as usize, entry.spot.segment, !entry.is_withdrawn))
                };
                if op == 0 {
                    prop_assert_eq!(index.remove(block).map(seen).transpose()?, model.remove(&number));
                } else if op == 1 {
                    let was_served = model.get_mut(&number).filter(|(.., is_served)| *is_served);
                    let expected = was_served.as_deref().copied();
                    was_served.into_iter().for_each(|(.., is_served)| *is_served = false);
                    prop_assert_eq!(index.withdraw(block).map(seen).transpose()?, expected);
                } else {
                    let (record, proof) = (record(number, at as u64), hasher().proof_of(&record(number, 0)));
                    let replaced = index.remove(block);
                    index.add(&record, segment, block, proof);
                    prop_assert_eq!(index.entry_of(block).map(|entry| entry.proof), Some(proof));
                    prop_assert_eq!(replaced.map(seen).transpose()?, model.insert(number, (at, segment, true)));
                }
                prop_assert_eq!(index.len(), model.values().filter(|(.., is_served)| *is_served).count());
                for number in 0..60 {
                    let entry = index.entry_of(crowded(number)).map(seen).transpose()?;
                    prop_assert_eq!(entry, model.get(&number).copied());
                }
            }
            let all: BTreeSet<u64> = model.keys().map(|number| crowded(*number).0).collect();
            for places in [1, 7, 1000] {
                let listed = listed(&index, places);
                prop_assert_eq!(listed.len(), all.len(), "each once");
                prop_assert_eq!(listed.into_iter().map(|block| block.0).collect::<BTreeSet<_>>(), all.clone());
            }
        }
    }

    /// Sixteen thousand tables that double, each by itself, move 28 at a time by then.
    #[test]
    fn an_insertion_moves_a_few_blocks_however_many_there_are() {
        let (mut index, mut most) = (Index::new(1, PAGES, hasher()), 0);
        for number in 0..500_000 {
            let before = index.moved;
            index.insert(&record(number, number), 0);
            most = most.max(index.moved - before);
        }
        assert!(most <= 20, "one insertion moved {most} blocks");
        assert!(index.moved < 2 * 500_000, "{} blocks were moved for 500,000 insertions", index.moved);
        let longest = (0..index.buckets.len()).map(|bucket| chain_length(&index, bucket)).max();
        assert!(longest <= Some(20), "a bucket of {longest:?} blocks");
    }

    fn chain_length(index: &Index, bucket: u32) -> usize {
        let entry = |place: u32| (place != NONE).then(|| index.entries[place].below);
        std::iter::successors(entry(index.buckets[bucket]), |below| entry(*below)).count()
    }

    /// Growth through many sizes, with removals and with buckets that were made before.
    #[test]
    fn it_equals_a_map_at_every_size() {
        for reserved in [0, 1, 1000] {
            let (mut index, mut model) = (Index::new(1, PAGES, hasher()), HashMap::new());
            index.reserve(reserved);
            for number in 0..5000 {
                index.insert(&record(number, number), 0);
                model.insert(number, number as u32);
                if number % 3 == 0 {
                    let gone = number / 2;
                    let removed = index.remove(hasher().block(&key(gone)));
                    assert_eq!(removed.map(|entry| entry.spot.first_page), model.remove(&gone));
                }
                if number.is_power_of_two() || number == 4999 {
                    let found = |number: u64| index.get(&key(number)).map(|entry| entry.spot.first_page);
                    (0..5000).for_each(|number| assert_eq!(found(number), model.get(&number).copied(), "{number}"));
                }
            }
            assert_eq!(index.len(), model.len());
        }
    }

    #[test]
    fn a_block_takes_33_bytes() {
        assert_eq!(MEMORY_BYTES_PER_BLOCK, 33);
    }

    #[test]
    fn a_block_that_is_written_anew_keeps_its_place() {
        let mut index = Index::new(4, PAGES, hasher());
        (0..10).for_each(|number| _ = index.insert(&record(number, number), 0));
        index.remove(hasher().block(&key(2)));
        index.insert(&record(7, 100), 1);
        let (entries, _) = index.piece(7, 1);
        let spots: Vec<Spot> = entries.map(|entry| entry.spot).collect();
        assert_eq!(spots, [Spot { segment: 1, first_page: 100 }]);
    }

    /// Every part of a block's name counts, and its length and its checksum.
    #[test]
    fn a_proof_is_of_one_key_one_length_and_one_checksum() {
        let hasher = hasher();
        let hash = |bytes: &[u8]| BlockHash::new(bytes).unwrap();
        let key = BlockKey { namespace: NamespaceId(1), group: 2, hash: hash(&[3; 31]) };
        let of = |key: BlockKey, length_bytes, checksum| hasher.proof(&key, length_bytes, checksum);
        let own = of(key, 4096, 5);
        assert_eq!(of(key, 4096, 5), own);
        let others = [
            of(BlockKey { namespace: NamespaceId(1 << 100 | 1), ..key }, 4096, 5),
            of(BlockKey { group: 3, ..key }, 4096, 5),
            of(BlockKey { hash: hash(&[3; 32]), ..key }, 4096, 5),
            of(BlockKey { hash: hash(&[3; 30]), ..key }, 4096, 5),
            of(key, 4097, 5),
            of(key, 4096, 6),
        ];
        assert!(others.iter().all(|other| *other != own), "{others:?}");
    }
}
