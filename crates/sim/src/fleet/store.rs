//! The store that a fleet shares: a model of which blocks it keeps, as far as it was told of their uses.
//!
//! Invariants: after each write it holds at most its capacity. The same calls evict the same blocks.

use std::collections::{BTreeMap, HashMap};

use forebay_core::BlockKey;

use crate::trace::mix;

/// Folders of a shared directory in a namespace (`FIRSTS * LASTS` in `crates/io/src/fs/hand.rs`).
const FOLDERS: usize = 4096;
/// A batch ends once it has seen so many blocks (`BATCH_BLOCKS` there).
const BATCH_BLOCKS: usize = 4096;
/// The part of a batch that goes, unless the batch is the whole directory (`PART` there).
const PART: usize = 8;
/// Candidates that Redis keeps between two evictions (`EVPOOL_SIZE` in its `evict.c`).
const POOL_CANDIDATES: usize = 16;
/// What its clock of uses counts (`LRU_CLOCK_RESOLUTION` in its `server.h`).
const CLOCK_MS: u64 = 1000;

/// Which blocks a store evicts, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// When there is one too many, the one whose use was noted first.
    Exact,
    /// Like the sweeper of a shared directory: when it is nearly full, the oldest eighth of some folders.
    Hand,
    /// Like Redis and Valkey with `allkeys-lru`: nodes that have a part of the blocks each; when a node has one too
    /// many, the oldest of so many samples and of those seen before.
    Sampled { nodes: usize, samples: usize },
}

/// What hosts asked of the store, in blocks, and what it removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    pub writes: u64,
    /// Promotions, also of blocks that were gone.
    pub reads: u64,
    pub probes: u64,
    /// Reads that noted a use.
    pub noted_reads: u64,
    /// Touches that noted a use, because the last one was noted long enough ago.
    pub noted_touches: u64,
    pub removals: u64,
}

pub(super) struct Store {
    capacity: usize,
    fresh_ms: u64,
    pub now_ms: u64,
    blocks: HashMap<BlockKey, Block>,
    /// Folders or nodes: a block's hash chooses one.
    parts: Vec<Vec<BlockKey>>,
    notes: u64,
    order: Order,
    pub operations: Operations,
}

struct Block {
    /// When it was used last, as far as is noted, and the number of that note.
    noted_ms: u64,
    note: u64,
    part: usize,
    /// Index in the part.
    place: usize,
}

enum Order {
    /// By the notes' numbers.
    Exact(BTreeMap<u64, BlockKey>),
    Hand(Hand),
    Sampled(Sampled),
}

#[derive(Default)]
struct Hand {
    /// The next folder.
    next: usize,
    /// What is left of the last batch, with the times of its uses, the oldest last.
    candidates: Vec<(u64, BlockKey)>,
    is_making_room: bool,
}

struct Sampled {
    samples: usize,
    /// Candidates of each node, and for how long they were unused when they were sampled, the oldest last.
    pools: Vec<Vec<(u64, BlockKey)>>,
    draws: u64,
}

impl Store {
    pub fn new(eviction: Eviction, capacity: u64, fresh_ms: u64, seed: u64) -> Store {
        let (parts, order) = match eviction {
            Eviction::Exact => (1, Order::Exact(BTreeMap::new())),
            Eviction::Hand => (FOLDERS, Order::Hand(Hand::default())),
            Eviction::Sampled { nodes, samples } => {
                (nodes, Order::Sampled(Sampled { samples, pools: vec![Vec::new(); nodes], draws: mix(seed) }))
            }
        };
        let (capacity, parts, operations) = (capacity as usize, vec![Vec::new(); parts], Operations::default());
        Store { capacity, fresh_ms, now_ms: 0, blocks: HashMap::new(), parts, notes: 0, order, operations }
    }

    pub fn probe(&mut self, key: &BlockKey) -> bool {
        self.operations.probes += 1;
        self.blocks.contains_key(key)
    }

    pub fn write(&mut self, key: &BlockKey) {
        self.operations.writes += 1;
        self.insert(key);
    }

    /// By a host whose clock is so far ahead of the store's. False if it is not there, like [`Store::touch`] and
    /// [`Store::see`].
    pub fn read(&mut self, key: &BlockKey, ahead_ms: i64) -> bool {
        self.operations.reads += 1;
        let notes = self.notes;
        let is_there = self.see(key, ahead_ms);
        self.operations.noted_reads += self.notes - notes;
        is_there
    }

    pub fn touch(&mut self, key: &BlockKey, ahead_ms: i64) -> bool {
        let notes = self.notes;
        let is_there = self.see(key, ahead_ms);
        self.operations.noted_touches += self.notes - notes;
        is_there
    }

    /// Notes a use, unless one was noted a short time ago by the host's clock (`is_fresh` in
    /// `crates/io/src/fs/reader.rs`). The time that is noted is the store's. No operation.
    pub fn see(&mut self, key: &BlockKey, ahead_ms: i64) -> bool {
        let Some(block) = self.blocks.get(key) else { return false };
        let now_ms = self.now_ms.saturating_add_signed(ahead_ms);
        if now_ms.checked_sub(block.noted_ms).is_none_or(|age_ms| age_ms >= self.fresh_ms) {
            self.note(key);
        }
        true
    }

    /// No operation.
    pub fn insert(&mut self, key: &BlockKey) {
        if !self.blocks.contains_key(key) {
            let part = part(key, self.parts.len());
            let place = self.parts[part].len();
            self.parts[part].push(*key);
            self.blocks.insert(*key, Block { noted_ms: 0, note: 0, part, place });
        }
        self.note(key);
        // A candidate of a pool that was gone and is written again goes again, be it this one.
        let part = self.blocks[key].part;
        while let Some(victim) = self.victim(part) {
            self.remove(&victim);
            self.operations.removals += 1;
        }
    }

    pub fn empty(&mut self) {
        self.blocks.clear();
        self.parts.iter_mut().for_each(Vec::clear);
        if let Order::Exact(order) = &mut self.order {
            order.clear();
        }
    }

    fn note(&mut self, key: &BlockKey) {
        self.notes += 1;
        let block = self.blocks.get_mut(key).expect("only what is there is noted");
        if let Order::Exact(order) = &mut self.order {
            order.remove(&block.note);
            order.insert(self.notes, *key);
        }
        (block.noted_ms, block.note) = (self.now_ms, self.notes);
    }

    /// What has to go now that a block was written to `part`.
    fn victim(&mut self, part: usize) -> Option<BlockKey> {
        match &mut self.order {
            Order::Exact(order) if self.blocks.len() > self.capacity => order.values().next().copied(),
            Order::Exact(_) => None,
            Order::Hand(hand) => hand.victim(&self.blocks, &self.parts, self.capacity),
            Order::Sampled(sampled) => {
                let is_full = self.parts[part].len() > self.capacity / self.parts.len();
                is_full.then(|| sampled.victim(&self.blocks, part, &self.parts[part], self.now_ms / CLOCK_MS))
            }
        }
    }

    fn remove(&mut self, key: &BlockKey) {
        let block = self.blocks.remove(key).expect("a victim is there");
        let part = &mut self.parts[block.part];
        part.swap_remove(block.place);
        if let Some(moved) = part.get(block.place) {
            self.blocks.get_mut(moved).expect("a part has what is there").place = block.place;
        }
        if let Order::Exact(order) = &mut self.order {
            order.remove(&block.note);
        }
    }
}

impl Hand {
    /// Begins above 19/20 of the capacity, and goes on down to 9/10 (`excess` in `crates/io/src/fs/sweeper.rs`).
    fn victim(
        &mut self,
        blocks: &HashMap<BlockKey, Block>,
        folders: &[Vec<BlockKey>],
        capacity: usize,
    ) -> Option<BlockKey> {
        let limit = if self.is_making_room { capacity - capacity / 10 } else { capacity - capacity / 20 };
        self.is_making_room = blocks.len() > limit;
        while self.is_making_room {
            match self.candidates.pop() {
                // What was used since then stays.
                Some((noted_ms, key)) if blocks.get(&key).is_some_and(|block| block.noted_ms == noted_ms) => {
                    return Some(key);
                }
                Some(_) => {}
                None => self.candidates = self.batch(blocks, folders),
            }
        }
        None
    }

    fn batch(&mut self, blocks: &HashMap<BlockKey, Block>, folders: &[Vec<BlockKey>]) -> Vec<(u64, BlockKey)> {
        let (mut seen, mut looked) = (Vec::new(), 0);
        while looked < FOLDERS && seen.len() < BATCH_BLOCKS {
            seen.extend(folders[self.next].iter().map(|key| (blocks[key].noted_ms, *key)));
            (self.next, looked) = ((self.next + 1) % FOLDERS, looked + 1);
        }
        seen.sort_unstable();
        if looked < FOLDERS {
            seen.truncate(seen.len() / PART);
        }
        seen.reverse();
        seen
    }
}

impl Sampled {
    /// Like `performEvictions`: a candidate that was used since it was sampled goes all the same.
    fn victim(&mut self, blocks: &HashMap<BlockKey, Block>, node: usize, keys: &[BlockKey], now: u64) -> BlockKey {
        loop {
            for sample in 0..self.samples.min(keys.len()) {
                self.draws += 1;
                let at = if self.samples < keys.len() { mix(self.draws) as usize % keys.len() } else { sample };
                offer(&mut self.pools[node], now - blocks[&keys[at]].noted_ms / CLOCK_MS, keys[at]);
            }
            while let Some((_, key)) = self.pools[node].pop() {
                if blocks.contains_key(&key) {
                    return key;
                }
            }
        }
    }
}

/// Like `evictionPoolPopulate`: a full pool gives up the one that was unused for the shortest time.
fn offer(pool: &mut Vec<(u64, BlockKey)>, unused: u64, key: BlockKey) {
    let at = pool.partition_point(|(other, _)| *other < unused);
    if pool.len() < POOL_CANDIDATES {
        pool.insert(at, (unused, key));
    } else if at > 0 {
        pool[..at].rotate_left(1);
        pool[at - 1] = (unused, key);
    }
}

fn part(key: &BlockKey, parts: usize) -> usize {
    let sum = key.hash.as_bytes().iter().fold(0, |sum, byte| mix(sum ^ u64::from(*byte)));
    sum as usize % parts
}

#[cfg(test)]
mod tests {
    use forebay_core::{BlockHash, NamespaceId};

    use super::*;

    const ALL: [Eviction; 3] = [Eviction::Exact, Eviction::Hand, Eviction::Sampled { nodes: 3, samples: 5 }];

    fn key(number: u64) -> BlockKey {
        BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
    }

    /// Writes and uses 2 s apart, so that no two have the same time on any clock. Uses are of the blocks that were
    /// written last, so that no candidate of a pool is among them. After each call `check` sees the store and all
    /// blocks in the order of their last uses.
    fn ages(store: &mut Store, writes: u64, mut check: impl FnMut(&Store, &[u64])) {
        let mut order: Vec<u64> = Vec::new();
        for number in 0..writes {
            store.now_ms += 2000;
            store.write(&key(number));
            order.push(number);
            let used = number - mix(number) % 50.min(number + 1);
            store.now_ms += 2000;
            assert!(store.touch(&key(used), 0));
            order.retain(|other| *other != used);
            order.push(used);
            check(store, &order);
        }
    }

    /// Of those that were used last.
    fn assert_has_the_last(store: &Store, order: &[u64]) {
        let gone = order.len() - store.blocks.len();
        order.iter().enumerate().for_each(|(at, number)| {
            assert_eq!(store.blocks.contains_key(&key(*number)), at >= gone, "{at} of {}", order.len());
        });
    }

    #[test]
    fn no_store_holds_more_than_its_capacity_and_all_are_full_before_they_evict() {
        for eviction in ALL {
            let (mut store, mut fullest) = (Store::new(eviction, 9000, 0, 1), 0);
            for number in 0..40_000 {
                store.now_ms += 7;
                store.write(&key(number));
                store.see(&key(mix(number) % (number + 1)), 0);
                assert!(store.blocks.len() <= 9000, "{eviction:?}");
                assert_eq!(store.blocks.len(), store.parts.iter().map(Vec::len).sum::<usize>());
                fullest = fullest.max(store.blocks.len());
            }
            let expected = if eviction == Eviction::Hand { 9000 * 19 / 20 } else { 9000 };
            assert_eq!(fullest, expected, "{eviction:?}");
            assert_eq!(store.operations.removals, 40_000 - store.blocks.len() as u64, "{eviction:?}");
            store.empty();
            store.write(&key(0));
            assert!(store.probe(&key(0)) && !store.read(&key(1), 0), "{eviction:?}");
        }
    }

    #[test]
    fn a_block_that_was_evicted_may_be_written_again_while_a_pool_has_it_as_a_candidate() {
        for eviction in ALL {
            let mut store = Store::new(eviction, 300, 0, 1);
            for number in 0..10_000 {
                store.now_ms += 2000;
                store.write(&key(mix(number) % 600));
                assert!(store.blocks.len() <= 300, "{eviction:?}");
            }
        }
    }

    #[test]
    fn the_exact_store_and_one_that_samples_all_keep_what_was_used_last() {
        for eviction in [Eviction::Exact, Eviction::Sampled { nodes: 1, samples: 1000 }] {
            let mut store = Store::new(eviction, 200, 0, 1);
            ages(&mut store, 1000, |store, order| {
                assert_eq!(store.blocks.len(), order.len().min(200));
                assert_has_the_last(store, order);
            });
        }
    }

    #[test]
    fn a_small_directory_loses_a_twentieth_at_a_time_in_the_order_of_use() {
        let (mut store, mut held) = (Store::new(Eviction::Hand, 200, 0, 1), 0);
        ages(&mut store, 1000, |store, order| {
            let expected = if held == 190 { 180 } else { held + 1 };
            assert_eq!(store.blocks.len(), expected);
            assert_has_the_last(store, order);
            held = expected;
        });
    }

    /// As `an_eighth_of_each_batch_goes_and_all_blocks_have_their_turn` has it for the directory itself.
    #[test]
    fn of_a_large_directory_the_oldest_eighth_of_some_folders_goes() {
        let mut store = Store::new(Eviction::Hand, 30_000, 0, 1);
        for number in 0..28_500 {
            store.now_ms += 1;
            store.write(&key(number));
        }
        let Order::Hand(hand) = &mut store.order else { panic!("{:?} is a hand", Eviction::Hand) };
        for _ in 0..8 {
            let batch = hand.batch(&store.blocks, &store.parts);
            assert!(batch.is_sorted_by_key(|(noted_ms, _)| std::cmp::Reverse(*noted_ms)));
            assert!((512..640).contains(&batch.len()), "an eighth of somewhat more than 4,096: {}", batch.len());
            assert!(batch[0].0 < 28_500 * 3 / 20, "the times are among the oldest: {}", batch[0].0);
        }
    }

    #[test]
    fn a_host_whose_clock_is_wrong_notes_too_many_uses_or_some_too_late() {
        const MINUTE: u64 = 60_000;
        for (ahead_ms, after_ms, is_noted) in [
            (0, MINUTE - 1, false),
            (0, MINUTE, true),
            (3_600_000, 1, true),
            // The last use was in the future.
            (-3_600_000, MINUTE - 1, true),
            (-30_000, 29_999, true),
            (-30_000, 30_000, false),
            (-30_000, MINUTE + 29_999, false),
            (-30_000, MINUTE + 30_000, true),
        ] {
            let mut store = Store::new(Eviction::Exact, 10, MINUTE, 1);
            store.now_ms = 86_400_000;
            store.write(&key(1));
            store.now_ms += after_ms;
            assert!(store.touch(&key(1), ahead_ms));
            assert_eq!(store.operations.noted_touches, u64::from(is_noted), "{ahead_ms} ms ahead, after {after_ms} ms");
            let noted_ms = store.blocks[&key(1)].noted_ms;
            assert_eq!(noted_ms, 86_400_000 + if is_noted { after_ms } else { 0 }, "the time is the store's");
        }
    }

    #[test]
    fn a_candidate_of_the_hand_that_was_used_stays_and_one_of_a_pool_goes() {
        let sampled = Eviction::Sampled { nodes: 1, samples: 1000 };
        for (eviction, held, stays) in [(Eviction::Hand, 190, true), (sampled, 200, false)] {
            let mut store = Store::new(eviction, 200, 0, 1);
            // The last write evicts, and leaves the next oldest as a candidate.
            (0..=held).for_each(|number| {
                store.now_ms += 2000;
                store.write(&key(number));
            });
            let oldest = (0..held).find(|number| store.blocks.contains_key(&key(*number))).unwrap();
            store.touch(&key(oldest), 0);
            (0..20).for_each(|number| store.write(&key(1000 + number)));
            assert_eq!(store.blocks.contains_key(&key(oldest)), stays, "{eviction:?}");
        }
    }
}
