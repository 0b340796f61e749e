//! A core without payloads: one engine asks it, one request after another, and the disk below is a model.
//!
//! Each request is looked up, again while something of it is on its way up from the disk, its lease released, and what
//! it missed stored in batches, every commit before the next request: the order in which one engine without overlap
//! would ask a daemon. What the disk is given is written, and what it is asked for is loaded, before the next event.
//! The simulator runs whole traces through it, `curve` samples of the traffic there is.
//!
//! Invariants: what is a hit, what is evicted, promoted and written down is the core's own decision, none of its rules
//! is told here again; nothing is in flight between two requests.
//!
//! In the order data passes: `pool` (a core of an exact capacity), this file (one request), `disk`.

mod disk;
mod pool;

use forebay_core::layout::Attention;
use forebay_core::lookup::{Answer, Lookup, STATE_MISS, STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::policy::Make;
use forebay_core::store::CommitOutcome;
use forebay_core::tier::Outcome as Ended;
use forebay_core::tiers::{Admission, Limits, TierId};
use forebay_core::{
    BlockHash, BlockId, BlockKey, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex, Result, SlotId,
};

pub use disk::Disk;
pub use pool::Scale;

/// The engine that asks.
pub const ENGINE: Instance = Instance(0);
/// The group of layers that all blocks are of: kinds that differ are namespaces of their own.
pub const GROUP: u16 = 0;
/// A block's hash.
pub type Hash = [u8; 16];

/// Slots that an engine asks for at once.
pub const STORE_BATCH: usize = 16;
/// Lookups of a request that may bring nothing new up before it is served with what there is.
const MAX_IDLE: usize = 16;

/// What is rehearsed.
#[derive(Clone, Copy)]
pub struct Setup {
    pub policy: Make,
    pub seed: u64,
    /// Of the pool.
    pub capacity_bytes: u64,
    /// The disk under the pool, if there is one.
    pub ssd: Option<Ssd>,
    /// Thousandths of the pool that leases may pin.
    pub promise_permille: u32,
    /// Slots asked for at once.
    pub store_batch: usize,
    /// As in [`forebay_core::Config`].
    pub memory_entries: usize,
    pub table_bits: u32,
}

/// A request asks for no more than one in so many slots of its size: what an engine has reserved is no larger a part of
/// most real pools.
const LEAST_BATCHES: u64 = 64;

/// How many slots a request may ask for at once, where so many sizes of blocks share a pool of this many blocks. Each
/// size has a batch of slots of its own that holds nothing to be hit.
pub fn store_batch(capacity_blocks: u64, sizes: usize) -> usize {
    (capacity_blocks / (LEAST_BATCHES * sizes as u64)).clamp(1, STORE_BATCH as u64) as usize
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ssd {
    pub capacity_bytes: u64,
    pub admission: Admission,
}

/// What the blocks of one namespace are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub block_bytes: u64,
    pub attention: Attention,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Blocks that were in the pool at once.
    pub pool_hits: usize,
    /// Blocks that were there when nothing more came up.
    pub hits: usize,
    /// Why the others were not, by `MissReason as usize`.
    pub misses: [u64; MissReason::ALL.len()],
}

/// Is told what lies where in the pool.
pub trait Watch {
    fn arrived(&mut self, slot: SlotId, hash: &BlockHash);
    fn left(&mut self, slot: SlotId);
    fn moved(&mut self, from: SlotId, to: SlotId);
}

/// Nobody wants to know.
impl Watch for () {
    fn arrived(&mut self, _: SlotId, _: &BlockHash) {}
    fn left(&mut self, _: SlotId) {}
    fn moved(&mut self, _: SlotId, _: SlotId) {}
}

pub struct Rehearsal {
    pub core: Core,
    namespaces: Vec<NamespaceIndex>,
    disk: Option<(TierId, Disk)>,
    store_batch: usize,
    // Scratch, to allocate once.
    answer: Answer,
    states: Vec<u8>,
    missing: Vec<usize>,
    slots: Vec<(SlotId, Generation)>,
    effects: Vec<Effect>,
}

impl Rehearsal {
    /// With a namespace for each of `shapes`, numbered from 0. Errors with `Full` if the pool cannot hold a block, with
    /// `Invalid` if sizes are too different for one pool.
    pub fn new(setup: &Setup, shapes: &[Shape]) -> Result<Rehearsal> {
        let (mut core, namespaces) = pool::open(setup, shapes)?;
        let disk = setup.ssd.map(|ssd| {
            let tier = core.open_tier(Limits { admission: ssd.admission, ..Limits::default() });
            (tier, Disk::new(ssd.capacity_bytes, shapes.iter().map(|shape| shape.block_bytes).collect()))
        });
        Ok(Rehearsal {
            core,
            namespaces,
            disk,
            store_batch: setup.store_batch,
            answer: Answer::default(),
            states: Vec::new(),
            missing: Vec::new(),
            slots: Vec::new(),
            effects: Vec::new(),
        })
    }

    /// The core's name of a namespace.
    pub fn namespace(&self, namespace: usize) -> NamespaceIndex {
        self.namespaces[namespace]
    }

    pub fn disk(&self) -> Option<(TierId, &Disk)> {
        self.disk.as_ref().map(|(tier, disk)| (*tier, disk))
    }

    /// The key of a block, as tiers know it.
    pub fn key(namespace: usize, hash: &Hash) -> BlockKey {
        let hash = BlockHash::new(hash).expect("16 bytes are a hash");
        BlockKey { namespace: NamespaceId(namespace as u128 + 1), group: GROUP, hash }
    }

    /// One request for `hashes`, in prefix order, which all take part in one prompt.
    pub fn serve(&mut self, namespace: usize, hashes: &[Hash], watch: &mut dyn Watch) -> Served {
        let served = self.fetch(namespace, hashes, watch);
        self.store(namespace, hashes, watch);
        while self.core.step() {}
        self.follow_effects(watch);
        served
    }

    /// No request comes: what waits for one comes up, until all of it is there or nothing more finds room.
    pub fn wait(&mut self, watch: &mut dyn Watch) {
        while self.core.step() || self.follow_effects(watch) {}
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        let disk = self.disk.as_ref().map_or(0, |(_, disk)| disk.heap_bytes());
        self.core.heap_bytes() + self.core.ghost_bytes() + self.core.tier_heap_bytes() + self.core.memory_bytes() + disk
    }

    /// Blocks that were in the pool, and all that are there once nothing more comes up.
    fn fetch(&mut self, namespace: usize, hashes: &[Hash], watch: &mut dyn Watch) -> Served {
        let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespaces[namespace]);
        self.look(&mut lookup, hashes);
        self.states.clear();
        self.states.extend_from_slice(&self.answer.states);
        self.states.resize(hashes.len(), STATE_MISS);
        let pool_hits = self.answer.slots.len();
        let (mut hits, mut idle) = (pool_hits, 0);
        while self.states.contains(&STATE_NOT_YET) && idle < MAX_IDLE {
            self.core.pause_lookup(&mut lookup);
            self.follow_effects(watch);
            let found = self.look_again(&mut lookup, namespace, hashes);
            hits += found;
            idle = if found > 0 { 0 } else { idle + 1 };
        }
        let misses = MissReason::ALL.map(|reason| lookup.missed(reason));
        let lease = self.core.finish_lookup(lookup);
        self.core.release(ENGINE, lease);
        Served { pool_hits, hits, misses }
    }

    /// Asks for what was "not yet". Returns how much of it is there now.
    fn look_again(&mut self, lookup: &mut Lookup, namespace: usize, hashes: &[Hash]) -> usize {
        assert!(self.core.look_again(lookup, self.namespaces[namespace]), "its lease is held");
        let waiting: Vec<usize> = (0..hashes.len()).filter(|at| self.states[*at] == STATE_NOT_YET).collect();
        let keys: Vec<Hash> = waiting.iter().map(|at| hashes[*at]).collect();
        lookup.begin_group(waiting[0] as u64);
        self.look(lookup, &keys);
        let states = self.answer.states.iter().copied().chain(std::iter::repeat(STATE_MISS));
        waiting.into_iter().zip(states).for_each(|(at, state)| self.states[at] = state);
        self.answer.slots.len()
    }

    fn look(&mut self, lookup: &mut Lookup, hashes: &[Hash]) {
        self.answer.states.clear();
        self.answer.slots.clear();
        self.answer.generations.clear();
        for piece in hashes.chunks(Core::MAX_KEYS_PER_EVENT) {
            self.core.look(lookup, GROUP, piece.as_flattened(), size_of::<Hash>(), &mut self.answer);
        }
    }

    /// Stores what the last lookup did not find.
    fn store(&mut self, namespace: usize, hashes: &[Hash], watch: &mut dyn Watch) {
        let is_missing = |at: &usize| self.states[*at] != STATE_READY;
        self.missing.clear();
        self.missing.extend((0..hashes.len()).filter(is_missing));
        let missing = std::mem::take(&mut self.missing);
        for batch in missing.chunks(self.store_batch) {
            // What comes behind a block that could not be stored could never be hit.
            if !self.store_some(namespace, hashes, batch, watch) {
                break;
            }
        }
        self.missing = missing;
    }

    /// False if there was no room for all.
    fn store_some(&mut self, namespace: usize, hashes: &[Hash], some: &[usize], watch: &mut dyn Watch) -> bool {
        let index = self.namespaces[namespace];
        let hash = |at: usize| BlockHash::new(&hashes[at]).expect("16 bytes are a hash");
        self.slots.clear();
        self.core.reserve(ENGINE, index, GROUP, some.len(), false, &mut self.slots);
        // Freed slots are told before they are filled again.
        self.follow_effects(watch);
        for (at, slot) in some.iter().zip(&self.slots) {
            let predecessor = at.checked_sub(1).map(hash);
            let outcome = self.core.commit(ENGINE, index, GROUP, hash(*at), predecessor, *slot, Some(0));
            if outcome == CommitOutcome::Stored {
                watch.arrived(slot.0, &hash(*at));
            }
        }
        self.slots.len() == some.len()
    }

    /// False if there was nothing to do.
    fn follow_effects(&mut self, watch: &mut dyn Watch) -> bool {
        let mut is_any = false;
        loop {
            self.core.take_effects(&mut self.effects);
            let effects = std::mem::take(&mut self.effects);
            if effects.is_empty() {
                return is_any;
            }
            is_any = true;
            effects.iter().for_each(|effect| self.follow(*effect, watch));
            self.effects = effects;
            self.effects.clear();
        }
    }

    fn follow(&mut self, effect: Effect, watch: &mut dyn Watch) {
        match effect {
            Effect::Freed { slot, .. } => watch.left(slot),
            Effect::Promote { block, slot, generation, .. } => {
                let key = self.core.block_key(block);
                let outcome = match self.core.tier_of(&key) {
                    Some(_) => {
                        let (_, disk) = self.disk.as_mut().expect("only a tier is loaded from");
                        disk.read(&key);
                        Ended::Loaded { length_bytes: self.core.block_length_bytes(block), checksum: 0 }
                    }
                    // It was given up after the load was asked for.
                    None => Ended::Absent,
                };
                if self.core.promoted(block, generation, outcome) {
                    watch.arrived(slot, &key.hash);
                }
            }
            Effect::Move { from, slot, generation, to, to_slot } => {
                let is_moved = self.core.moved(from, generation, to, true);
                if is_moved {
                    watch.moved(slot, to_slot);
                }
            }
            Effect::WriteBack { tier, block, .. } => self.write(tier, block),
            _ => {}
        }
    }

    fn write(&mut self, tier: TierId, block: BlockId) {
        let (_, disk) = self.disk.as_mut().expect("only a tier is written to");
        disk.write(&self.core.block_key(block));
        let is_kept = self.core.written_back(tier, block, Ended::Stored);
        assert!(is_kept, "nothing is purged here");
        while disk.is_over() {
            disk.reclaim().iter().for_each(|key| self.core.tier_evicted(tier, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::key::PAGE_BYTES;
    use forebay_core::policy::by_name;

    fn setup(blocks: u64, ssd_blocks: Option<u64>) -> Setup {
        Setup {
            policy: by_name("lru").unwrap(),
            seed: 0,
            capacity_bytes: blocks * PAGE_BYTES,
            ssd: ssd_blocks.map(|blocks| Ssd { capacity_bytes: blocks * PAGE_BYTES, admission: Admission::All }),
            promise_permille: 1000,
            store_batch: 1,
            memory_entries: 1 << 12,
            table_bits: 4,
        }
    }

    fn hashes(numbers: std::ops::Range<u64>) -> Vec<Hash> {
        numbers.map(|n| [crate::mix::mix(n).to_le_bytes(), n.to_le_bytes()].concat().try_into().unwrap()).collect()
    }

    fn shape(attention: Attention) -> Shape {
        Shape { block_bytes: PAGE_BYTES, attention }
    }

    #[test]
    fn what_was_stored_is_hit_and_the_rest_has_its_reasons() {
        let mut rehearsal = Rehearsal::new(&setup(20, None), &[shape(Attention::Full)]).unwrap();
        let first = rehearsal.serve(0, &hashes(0..15), &mut ());
        assert_eq!((first.hits, first.misses[MissReason::NeverSeen as usize]), (0, 15));
        assert_eq!(rehearsal.serve(0, &hashes(0..15), &mut ()).hits, 15);
        // Another prompt takes the end of the first.
        rehearsal.serve(0, &hashes(100..115), &mut ());
        let third = rehearsal.serve(0, &hashes(0..15), &mut ());
        assert_eq!((third.hits, third.misses[MissReason::Evicted as usize]), (5, 10));
    }

    #[test]
    fn a_disk_brings_back_what_the_pool_lost() {
        let mut rehearsal = Rehearsal::new(&setup(20, Some(100)), &[shape(Attention::Full)]).unwrap();
        (0..3).for_each(|prompt| {
            rehearsal.serve(0, &hashes(prompt * 100..prompt * 100 + 15), &mut ());
        });
        let again = rehearsal.serve(0, &hashes(0..15), &mut ());
        assert_eq!((again.pool_hits, again.hits), (0, 15));
        let (tier, disk) = rehearsal.disk().unwrap();
        assert_eq!((disk.blocks(), rehearsal.core.tier_report(tier).blocks), (45, 45));
    }

    #[test]
    fn a_disk_never_holds_more_than_its_capacity_and_the_core_knows_what_it_holds() {
        // Segments of 15 blocks: of one alone nothing could be carried on.
        let mut rehearsal = Rehearsal::new(&setup(20, Some(1000)), &[shape(Attention::Full)]).unwrap();
        for n in 0..2000u64 {
            // Every third is one of a few, so that some are read and carried on.
            let first = if n % 3 == 0 { n % 5 * 1000 } else { n * 10_000 };
            rehearsal.serve(0, &hashes(first..first + 10), &mut ());
            let (tier, disk) = rehearsal.disk().unwrap();
            assert!(disk.blocks() <= 1000, "{} blocks", disk.blocks());
            assert_eq!(disk.blocks(), rehearsal.core.tier_report(tier).blocks);
        }
        let (_, disk) = rehearsal.disk().unwrap();
        assert!(disk.written_bytes > disk.written_blocks * PAGE_BYTES, "something was carried on");
    }

    #[test]
    fn blocks_of_a_window_are_hit_whatever_lies_before_them() {
        let mut rehearsal = Rehearsal::new(&setup(10, None), &[shape(Attention::Windowed)]).unwrap();
        let [one, all] = [hashes(5..6), hashes(0..8)];
        rehearsal.serve(0, &one, &mut ());
        assert_eq!(rehearsal.serve(0, &all, &mut ()).hits, 1);
        assert_eq!(rehearsal.serve(0, &all, &mut ()).hits, 8);
    }
}
