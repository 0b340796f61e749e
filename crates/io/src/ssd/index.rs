//! The position of each block on one disk. The disk is authoritative and this is a cache of it: 80 bytes per block.
//!
//! Invariants: a key has one entry, that of its latest record. Each entry is in the chain of the segment that holds
//! it, so that a segment's blocks are found without a search. An entry keeps its place.
//!
//! A key whose record recovery might find has an entry, also if the block is not served any more. Otherwise a removal
//! would find nothing to remove, and the block would come back with the next start.
//!
//! The table grows by linear hashing (Litwin, 1980): there are as many buckets as entries, and each insertion splits
//! one bucket in two, so no insertion moves more than the few entries of one bucket, however many blocks there are.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::hint::black_box;

use forebay_core::{BlockHash, BlockKey};

use super::layout::{MOST_PAGES, Record, RecordKind};
use super::names::{Name, Names};
use super::places::Places;

/// The end of a chain; the name of a place without a block.
const NONE: u32 = u32::MAX;

/// A block on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    key: BlockKey,
    pub sequence: u64,
    pub checksum: u64,
    pub length_bytes: u64,
    pub segment: u32,
    pub first_page: u32,
    /// Whether it was read since it was written here.
    pub is_hot: bool,
    /// It is not served: its removal has begun, its bytes are wrong or could not be read when the disk was opened, its
    /// store failed after its head was written, or it was evicted and its segment's next header is not flushed.
    pub is_withdrawn: bool,
    /// Of its record's own checksum.
    seal: u32,
}

impl Entry {
    pub fn key(self) -> BlockKey {
        self.key
    }

    pub fn record(&self) -> Record {
        let Entry { key, sequence, first_page, length_bytes, checksum, .. } = *self;
        Record { kind: RecordKind::Block, key, sequence, first_page, length_bytes, checksum }
    }

    /// Whether this is what was said of the block when it was stored: its key, where it lies, its length and checksum.
    pub fn is_sealed(&self) -> bool {
        part_of(self.record().seal()) == self.seal
    }

    pub fn payload_pages(&self) -> u32 {
        self.record().payload_pages()
    }
}

/// An entry as it is kept. Fields lie as close as they can: so 76 bytes are not 80.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
struct Packed {
    /// In its bucket. Next to the hash: a search for a key reads both, and nothing else of other keys' entries.
    below: u32,
    hash: [u8; BlockHash::MAX_LEN],
    sequence: u64,
    checksum: u64,
    /// `NONE` in a place without a block.
    name: u32,
    /// The block's first page, counted from the first segment; the lower bits.
    page: u32,
    /// The upper bits of that, and above them a part of the seal.
    page_and_seal: u32,
    /// The block's length, and above it the flags.
    length_and_flags: u32,
    /// In the chain of its segment.
    next: u32,
    previous: u32,
}

/// What the index takes for a block: its entry, and a bucket.
pub const MEMORY_BYTES_PER_BLOCK: u64 = (size_of::<Packed>() + size_of::<u32>()) as u64;

const SEAL_AT: u32 = MOST_PAGES.ilog2() - 32;
const IS_HOT: u32 = 1 << 30;
const IS_WITHDRAWN: u32 = 1 << 31;
const LENGTH: u32 = IS_HOT - 1;

impl Packed {
    fn is_withdrawn(&self) -> bool {
        self.length_and_flags & IS_WITHDRAWN != 0
    }

    fn page(&self) -> u64 {
        u64::from(self.page_and_seal & ((1 << SEAL_AT) - 1)) << 32 | u64::from(self.page)
    }
}

/// As many as [`Index::warm`] looks at. A core waits for some ten to twenty reads at once.
pub(super) const WARM_AT_ONCE: usize = 32;

/// As many bits as there is space for.
fn part_of(seal: u64) -> u32 {
    (seal >> (32 + SEAL_AT)) as u32
}

/// See the module documentation.
pub(super) struct Index<S = RandomState> {
    /// The first entry of each bucket; the others follow by `below`.
    buckets: Places<u32>,
    hasher: S,
    entries: Places<Packed>,
    names: Names,
    /// Pages of a segment, as a power of two.
    page_bits: u32,
    /// Places with an entry.
    filled: u32,
    /// The first place without a block; the others follow by `next`.
    free: u32,
    /// Those that are served.
    blocks: usize,
    /// By segment: its entries that are served, and the others.
    chains: [Vec<u32>; 2],
}

impl Index {
    /// Of a disk with so many segments of so many pages, a power of two.
    pub fn new(segments: u32, pages: u32) -> Index {
        Index::with_hasher(segments, pages, RandomState::new())
    }
}

impl<S: BuildHasher> Index<S> {
    fn with_hasher(segments: u32, pages: u32, hasher: S) -> Index<S> {
        assert!(
            pages.is_power_of_two() && u64::from(segments) * u64::from(pages) <= MOST_PAGES,
            "no such disk is opened"
        );
        Index {
            buckets: Places::new(),
            hasher,
            entries: Places::new(),
            names: Names::new(),
            page_bits: pages.ilog2(),
            filled: 0,
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

    /// Makes the buckets of so many blocks that are inserted next, into an empty index. Takes time by their number.
    pub fn reserve(&mut self, blocks: usize) {
        assert!(self.filled == 0, "entries lie in the buckets that there are");
        (self.buckets.len() as usize..blocks).for_each(|_| _ = self.buckets.push(NONE));
    }

    /// Reads what the calls that take these hashes of keys will read first. In a large index that is three reads from
    /// memory for each key, each of which needs the one before. Those of several keys overlap.
    pub fn warm(&self, keys: impl Iterator<Item = u64>) {
        let mut hashes = [0; WARM_AT_ONCE];
        hashes.iter_mut().zip(keys).for_each(|(hash, key)| *hash = key);
        if self.buckets.len() > 0 {
            let firsts = hashes.map(|hash| self.buckets[self.bucket_of(hash)]);
            let seconds = firsts.map(|first| if first == NONE { NONE } else { self.warm_entry(first) });
            black_box(seconds.map(|second| if second == NONE { NONE } else { self.warm_entry(second) }));
        }
    }

    /// What a search reads of an entry, which may lie in two lines of the cache. The entry below it.
    fn warm_entry(&self, place: u32) -> u32 {
        let packed = &self.entries[place];
        black_box(packed.hash[BlockHash::MAX_LEN - 1]);
        packed.below
    }

    pub fn hash(&self, key: &BlockKey) -> u64 {
        self.hasher.hash_one(key)
    }

    /// The same, for another thread.
    pub fn hashing(&self) -> impl Fn(&BlockKey) -> u64 + Clone + Send + 'static
    where
        S: Clone + Send + 'static,
    {
        let hasher = self.hasher.clone();
        move |key| hasher.hash_one(key)
    }

    /// The block of that key, if it is served.
    pub fn get(&self, key: &BlockKey) -> Option<Entry> {
        self.record(key).filter(|entry| !entry.is_withdrawn)
    }

    /// The entry of that key, also if the block is not served.
    pub fn record(&self, key: &BlockKey) -> Option<Entry> {
        self.record_hashed(key, self.hash(key))
    }

    /// The same, with the key's hash.
    pub fn record_hashed(&self, key: &BlockKey, hash: u64) -> Option<Entry> {
        self.find_hashed(key, hash).map(|place| self.entry(place, *key))
    }

    /// Records that the block was read; true the first time.
    pub fn touch(&mut self, key: &BlockKey) -> bool {
        let Some(place) = self.find(key) else { return false };
        let flags = &mut self.entries[place].length_and_flags;
        let is_first = *flags & (IS_HOT | IS_WITHDRAWN) == 0;
        *flags |= if is_first { IS_HOT } else { 0 };
        is_first
    }

    /// From now on the block is not served. Returns its entry if it was served until now.
    pub fn withdraw(&mut self, key: &BlockKey) -> Option<Entry> {
        let place = self.find(key).filter(|place| !self.entries[*place].is_withdrawn())?;
        let entry = self.entry(place, *key);
        self.unlink(place);
        self.entries[place].length_and_flags |= IS_WITHDRAWN;
        self.link(place);
        self.blocks -= 1;
        Some(entry)
    }

    /// Stores the entry of `record` and returns the key's old one.
    pub fn insert(&mut self, record: &Record, segment: u32) -> Option<Entry> {
        let hash = self.hash(&record.key);
        let replaced = self.remove_hashed(&record.key, hash);
        self.add_hashed(record, record.seal(), segment, hash);
        replaced
    }

    /// Stores the entry of `record`, whose key has none, with the record's seal and the key's hash.
    pub fn add_hashed(&mut self, record: &Record, seal: u64, segment: u32, hash: u64) {
        let packed = self.packed(record, seal, segment);
        let place = match self.free {
            NONE => self.entries.push(packed),
            free => {
                self.free = self.entries[free].next;
                self.entries[free] = packed;
                free
            }
        };
        self.link(place);
        (self.blocks, self.filled) = (self.blocks + 1, self.filled + 1);
        if self.filled > self.buckets.len() {
            self.split();
        }
        self.push_down(self.bucket_of(hash), place);
    }

    pub fn remove(&mut self, key: &BlockKey) -> Option<Entry> {
        self.remove_hashed(key, self.hash(key))
    }

    fn remove_hashed(&mut self, key: &BlockKey, hash: u64) -> Option<Entry> {
        let place = self.find_hashed(key, hash)?;
        let below = self.entries[place].below;
        let bucket = self.bucket_of(hash);
        if self.buckets[bucket] == place {
            self.buckets[bucket] = below;
        } else {
            let mut above = self.buckets[bucket];
            while self.entries[above].below != place {
                above = self.entries[above].below;
            }
            self.entries[above].below = below;
        }
        let entry = self.entry(place, *key);
        self.unlink(place);
        self.names.put_back(self.entries[place].name);
        let vacant = &mut self.entries[place];
        (vacant.name, vacant.next) = (NONE, self.free);
        self.free = place;
        self.filled -= 1;
        self.blocks -= usize::from(!entry.is_withdrawn);
        Some(entry)
    }

    /// The entries in `places` places from `from` on, in no order, and where to go on; `None` behind the last place. A
    /// key keeps its place until it is removed, also when its block is written anew.
    pub fn piece(&self, from: u32, places: u32) -> (impl Iterator<Item = Entry>, Option<u32>) {
        let end = from.saturating_add(places).min(self.entries.len());
        let filled = (from..end).filter(|place| self.entries[*place].name != NONE);
        (filled.map(|place| self.entry(place, self.key(place))), (end < self.entries.len()).then_some(end))
    }

    /// The blocks of a segment that are served, the latest first.
    pub fn of_segment(&self, segment: u32) -> impl Iterator<Item = Entry> {
        self.chain(self.chains[0][segment as usize])
    }

    /// The other entries of a segment, the latest withdrawn first.
    pub fn withdrawn_of_segment(&self, segment: u32) -> impl Iterator<Item = Entry> {
        self.chain(self.chains[1][segment as usize])
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = Entry> {
        let place = |place: u32| (place != NONE).then_some(place);
        std::iter::successors(place(first), move |previous| place(self.entries[*previous].next))
            .map(|place| self.entry(place, self.key(place)))
    }

    fn packed(&mut self, record: &Record, seal: u64, segment: u32) -> Packed {
        let (hash, name) = Name::of(&record.key);
        let page = u64::from(segment) << self.page_bits | u64::from(record.first_page);
        assert!(
            record.first_page >> self.page_bits == 0 && record.length_bytes <= u64::from(LENGTH),
            "it fits a segment"
        );
        Packed {
            below: NONE,
            hash,
            sequence: record.sequence,
            checksum: record.checksum,
            name: self.names.take(name),
            page: page as u32,
            page_and_seal: (page >> 32) as u32 | part_of(seal) << SEAL_AT,
            length_and_flags: record.length_bytes as u32,
            next: NONE,
            previous: NONE,
        }
    }

    fn key(&self, place: u32) -> BlockKey {
        let packed = &self.entries[place];
        self.names[packed.name].key(&packed.hash)
    }

    /// The entry of a key that was found there.
    fn entry(&self, place: u32, key: BlockKey) -> Entry {
        let packed = &self.entries[place];
        let (page, flags) = (packed.page(), packed.length_and_flags);
        Entry {
            key,
            sequence: packed.sequence,
            checksum: packed.checksum,
            length_bytes: u64::from(flags & LENGTH),
            segment: (page >> self.page_bits) as u32,
            first_page: (page & ((1 << self.page_bits) - 1)) as u32,
            is_hot: flags & IS_HOT != 0,
            is_withdrawn: packed.is_withdrawn(),
            seal: packed.page_and_seal >> SEAL_AT,
        }
    }

    /// The first of the chain that the entry belongs to.
    fn first_of_chain(&mut self, place: u32) -> &mut u32 {
        let packed = &self.entries[place];
        let segment = (packed.page() >> self.page_bits) as usize;
        &mut self.chains[usize::from(packed.is_withdrawn())][segment]
    }

    /// Puts the entry first in its chain.
    fn link(&mut self, place: u32) {
        let next = std::mem::replace(self.first_of_chain(place), place);
        (self.entries[place].next, self.entries[place].previous) = (next, NONE);
        if next != NONE {
            self.entries[next].previous = place;
        }
    }

    /// Takes the entry out of its chain.
    fn unlink(&mut self, place: u32) {
        let Packed { next, previous, .. } = self.entries[place];
        match previous {
            NONE => *self.first_of_chain(place) = next,
            previous => self.entries[previous].next = next,
        }
        if next != NONE {
            self.entries[next].previous = previous;
        }
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        self.find_hashed(key, self.hash(key))
    }

    fn find_hashed(&self, key: &BlockKey, hash: u64) -> Option<u32> {
        if self.filled == 0 {
            return None;
        }
        let (bytes, name) = Name::of(key);
        let mut place = self.buckets[self.bucket_of(hash)];
        while place != NONE {
            let packed = &self.entries[place];
            if packed.hash == bytes && self.names[packed.name] == name {
                return Some(place);
            }
            place = packed.below;
        }
        None
    }

    fn hash_of(&self, place: u32) -> u64 {
        self.hash(&self.key(place))
    }

    /// By as many low bits of the hash as number all buckets. A bucket that is not split yet has the entries of the
    /// bucket that does not exist yet.
    fn bucket_of(&self, hash: u64) -> u32 {
        let (buckets, half) = (u64::from(self.buckets.len()), 1 << self.buckets.len().ilog2());
        let bucket = hash & (2 * half - 1);
        (if bucket < buckets { bucket } else { bucket - half }) as u32
    }

    /// Makes one more bucket, of entries of another one.
    fn split(&mut self) {
        let new = self.buckets.push(NONE);
        let Some(bit) = new.checked_ilog2() else { return };
        let old = new - (1 << bit);
        let mut place = std::mem::replace(&mut self.buckets[old], NONE);
        while place != NONE {
            let next = self.entries[place].below;
            self.push_down(self.bucket_of(self.hash_of(place)), place);
            place = next;
        }
    }

    /// Puts the entry first in the bucket.
    fn push_down(&mut self, bucket: u32, place: u32) {
        self.entries[place].below = std::mem::replace(&mut self.buckets[bucket], place);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::{BTreeMap, BTreeSet, HashMap};

    use forebay_core::NamespaceId;
    use proptest::prelude::*;

    use super::*;

    const PAGES: u32 = 1 << 18;

    fn key(number: u64) -> BlockKey {
        // The same hash under several names, one of them as it would be with zeros behind it.
        let (bytes, len) = ((number / 4).to_le_bytes(), if number.is_multiple_of(4) { 7 } else { 8 });
        let namespace = NamespaceId(u128::from(number % 4 / 2));
        BlockKey { namespace, group: (number % 4 == 3) as u16, hash: BlockHash::new(&bytes[..len]).unwrap() }
    }

    fn record(number: u64, sequence: u64) -> Record {
        let (kind, first_page) = (RecordKind::Block, number as u32 % PAGES);
        Record { kind, key: key(number), sequence, first_page, length_bytes: 4096, checksum: number }
    }

    fn listed<S: BuildHasher>(index: &Index<S>, places: u32) -> Vec<BlockKey> {
        let (mut at, mut all) = (Some(0), Vec::new());
        while let Some(from) = at {
            let (entries, next) = index.piece(from, places);
            all.extend(entries.map(Entry::key));
            at = next;
        }
        all
    }

    /// Has so many hashes for all keys.
    struct Few(u64);

    struct FewOf(u64, std::hash::DefaultHasher);

    impl BuildHasher for Few {
        type Hasher = FewOf;

        fn build_hasher(&self) -> FewOf {
            FewOf(self.0, std::hash::DefaultHasher::new())
        }
    }

    impl std::hash::Hasher for FewOf {
        fn finish(&self) -> u64 {
            self.1.finish() % self.0
        }

        fn write(&mut self, bytes: &[u8]) {
            self.1.write(bytes);
        }
    }

    proptest! {
        /// Against a map: the entry of each key, whether it is served, those of each segment, and all piece by piece.
        #[test]
        fn it_has_the_latest_record_of_each_key(
            hashes in 1u64..5,
            ops in proptest::collection::vec((0u8..5, 0u64..60, 0u32..4), 1..400),
        ) {
            let (mut index, mut model) = (Index::with_hasher(4, PAGES, Few(hashes)), BTreeMap::new());
            for (at, (op, number, segment)) in ops.into_iter().enumerate() {
                let sequence = at as u64;
                let seen = |entry: Entry| (entry.sequence, entry.segment, !entry.is_withdrawn);
                if op == 0 {
                    prop_assert_eq!(index.remove(&key(number)).map(seen), model.remove(&number));
                } else if op == 1 {
                    let was_served = model.get_mut(&number).filter(|(.., is_served)| *is_served);
                    let expected = was_served.as_deref().copied();
                    was_served.into_iter().for_each(|(.., is_served)| *is_served = false);
                    prop_assert_eq!(index.withdraw(&key(number)).map(seen), expected);
                } else {
                    let replaced = index.insert(&record(number, sequence), segment);
                    prop_assert_eq!(replaced.map(seen), model.insert(number, (sequence, segment, true)));
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

    /// Says how many keys were hashed.
    #[derive(Default)]
    struct Counting(RandomState, Cell<u64>);

    impl BuildHasher for Counting {
        type Hasher = std::hash::DefaultHasher;

        fn build_hasher(&self) -> Self::Hasher {
            self.1.set(self.1.get() + 1);
            self.0.build_hasher()
        }
    }

    /// Each key that is moved is hashed. Sixteen thousand tables that double, each by itself, hash 28 at a time by
    /// then.
    #[test]
    fn an_insertion_moves_a_few_keys_however_many_there_are() {
        let mut index = Index::with_hasher(1, PAGES, Counting::default());
        let mut most = 0;
        for number in 0..500_000 {
            let before = index.hasher.1.get();
            index.insert(&record(number, number), 0);
            most = most.max(index.hasher.1.get() - before);
        }
        assert!(most <= 20, "one insertion hashed {most} keys");
        let all = index.hasher.1.get();
        assert!(all < 4 * 500_000, "{all} keys were hashed for 500,000 insertions");
        let longest = (0..index.buckets.len()).map(|bucket| chain_length(&index, bucket)).max();
        assert!(longest <= Some(20), "a bucket of {longest:?} keys");
    }

    fn chain_length<S>(index: &Index<S>, bucket: u32) -> usize {
        let entry = |place: u32| (place != NONE).then(|| index.entries[place].below);
        std::iter::successors(entry(index.buckets[bucket]), |below| entry(*below)).count()
    }

    /// Growth through many sizes, with removals and with buckets that were made before.
    #[test]
    fn it_equals_a_map_at_every_size() {
        for reserved in [0, 1, 1000] {
            let (mut index, mut model) = (Index::new(1, PAGES), HashMap::new());
            index.reserve(reserved);
            for number in 0..5000 {
                index.insert(&record(number, number), 0);
                model.insert(number, number);
                if number % 3 == 0 {
                    let gone = number / 2;
                    assert_eq!(index.remove(&key(gone)).map(|entry| entry.sequence), model.remove(&gone));
                }
                if number.is_power_of_two() || number == 4999 {
                    let found = |number: u64| index.get(&key(number)).map(|entry| entry.sequence);
                    (0..5000).for_each(|number| assert_eq!(found(number), model.get(&number).copied(), "{number}"));
                }
            }
            assert_eq!(index.len(), model.len());
        }
    }

    #[test]
    fn a_block_takes_80_bytes() {
        assert_eq!(MEMORY_BYTES_PER_BLOCK, 80);
    }

    #[test]
    fn a_block_that_is_written_anew_keeps_its_place() {
        let mut index = Index::new(4, PAGES);
        (0..10).for_each(|number| _ = index.insert(&record(number, number), 0));
        index.remove(&key(2));
        index.insert(&record(7, 100), 1);
        let (entries, _) = index.piece(7, 1);
        assert_eq!(entries.map(|entry| entry.sequence).collect::<Vec<_>>(), [100]);
    }
}
