//! The state of the lower tiers: which tiers there are, which blocks they have, and which transfers are under way.
//!
//! A tier itself knows what it contains; the state here is a cache of that, rebuilt at every start. The paths use it:
//! `probe` (does a shared tier have the block?), `promote` (into the pool), `prefetch` (into the pool, before a
//! lookup), `write_back` (to a tier), `tier_events` (reports of the tiers' driver).
//!
//! Invariants: `loading` counts all bytes that are being loaded; of these, `late` counts those that no request waits
//! for any more, and `prefetch` those that no lookup has asked for yet. A block is known to be on one own tier.
//! Without a tier, nothing here is ever called.
//!
//! In the order of dependence: `locations` (which tier has which block), `presence` (answers of shared tiers), `marks`
//! (how old is what is known of resident blocks on shared tiers), `backfill` (which recovered blocks an own tier may
//! lack), this file.

mod backfill;
mod locations;
mod marks;
mod presence;

use std::collections::{HashMap, VecDeque};

use crate::key::{BlockHash, BlockId, BlockKey, Fingerprint, Generation, Instance, NamespaceId};
use crate::policy::Backing;
use crate::slots::Block;
use crate::tier::Position;

pub use crate::key::TierId;
use backfill::Backfill;
pub(crate) use locations::LoadHealth;
use locations::Locations;
pub use locations::{MEMORY_BYTES_PER_BLOCK, TierHasher};
pub(crate) use marks::ASKED;
use marks::Marks;
pub use marks::Touching;
pub(crate) use presence::Presence;
use presence::PresenceCache;
pub use presence::Probe;

/// Keys that are passed over at a time; beyond it a block that failed is forgotten.
const MAX_SKIPPED: usize = 1 << 16;
/// While so many loads are under way, no prefetch starts. They keep a disk busy. With blocks of 1 MiB they take 10 ms
/// of the disk's time, the longest time that a lookup's load should wait behind them.
const PREFETCH_LOADS: usize = 32;

/// In the table, the holder of the slots that own disks fill: after a daemon was killed, its disk transfers may still
/// write to them. Copies by the daemon's own threads, also those from shared stores, end with the process and need no
/// holder there.
pub const TRANSFERS: Instance = Instance::DAEMON;

/// Which blocks are written down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Blocks that were seen again: hit in the pool, or stored once more after their eviction.
    SecondSighting,
    /// Every block that is committed.
    All,
}

/// What one tier may take of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Which blocks are written to the tier.
    pub admission: Admission,
    /// Other hosts store and evict there too. So the tier is probed for each key, and its content is not kept here. The
    /// daemon's own threads copy the blocks, so no byte arrives after the process has ended.
    pub is_shared: bool,
    /// Loads in flight.
    pub load_blocks: usize,
    /// Blocks that wait to be written. They are not pinned: one that is evicted meanwhile was not worth it.
    pub queue_blocks: usize,
    /// Disks, or whatever else hangs by itself, in the tier.
    pub parts: usize,
    /// Blocks being written at a time to each part.
    pub store_blocks: usize,
    /// Thousandths of the pool that those may pin.
    pub store_permille: u32,
    /// Thousandths of the pool that late loads may keep out of use; over it the tier is closed.
    pub late_permille: u32,
    /// How the tier is told of uses; `None` for one that loses nothing unsaid, or takes no touches.
    pub touching: Option<Touching>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            admission: Admission::SecondSighting,
            is_shared: false,
            // 1,024 of 1 MiB keep a disk of 3 GB/s busy for 0.3 s: more would be late before they begin.
            load_blocks: 1024,
            // 16 bytes each. A burst of stores waits here while the disk takes them one after another.
            queue_blocks: 16 << 10,
            parts: 1,
            store_blocks: 256,
            // A 32nd: enough to keep a disk busy, and nothing that eviction would notice.
            store_permille: 31,
            late_permille: 62,
            touching: None,
        }
    }
}

/// What is counted for one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Loads that were started.
    pub promotions: u64,
    /// Of these, those started for requests that waited, before a lookup asked.
    pub prefetches: u64,
    /// Of those, blocks that a lookup asked for then, ready or on their way.
    pub prefetch_hits: u64,
    /// Loads that ended with the block ready in the pool.
    pub promoted: u64,
    /// Bytes of the slots of those.
    pub promoted_bytes: u64,
    /// Keys looked up that were the first hits of their blocks after these promotions.
    pub hits: u64,
    /// Loads that ended because the block was not there.
    pub absent: u64,
    /// Loads that ended with bytes that are not what was stored.
    pub corrupt: u64,
    /// Loads that ended without the block for any other reason.
    pub failed_loads: u64,
    /// Loads whose waiters were let go.
    pub late: u64,
    /// Blocks that began to wait to be written.
    pub queued: u64,
    /// Stores that ended with the block on the tier.
    pub stored: u64,
    /// Bytes of the slots of those.
    pub stored_bytes: u64,
    /// Stores that ended without the block on the tier.
    pub failed_stores: u64,
    /// Blocks that were not written since too many waited.
    pub dropped_full: u64,
    /// Blocks that left the pool before they were written.
    pub dropped_gone: u64,
    /// Blocks that the tier said it has no more, evicted or removed.
    pub evicted: u64,
    /// Touches that the tier was asked for.
    pub touches: u64,
    /// Of those, blocks that were gone: their next sighting stores them again.
    pub lost: u64,
}

/// One tier, at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierReport {
    /// Counts since the tier was opened.
    pub stats: TierStats,
    /// Whether it is asked for blocks and given some: it is healthy, and its late loads do not hold too much of the
    /// pool.
    pub is_open: bool,
    /// Blocks known to lie there; 0 if it is shared.
    pub blocks: u64,
    /// Loads in flight, late ones included.
    pub loading_blocks: u64,
    /// Bytes of the slots that they fill.
    pub loading_bytes: u64,
    /// Of these, those that nobody waits for any more.
    pub late_bytes: u64,
    /// Blocks that wait to be written.
    pub waiting_blocks: u64,
    /// Blocks being written, each of which is pinned.
    pub storing_blocks: u64,
    /// Bytes of the slots of those.
    pub storing_bytes: u64,
    /// Calls of [`crate::Core::expire_skips`] after which a mark is old at present; 0 if the tier is never touched.
    pub touch_ticks: u32,
}

struct Tier {
    limits: Limits,
    /// What the driver says of its health.
    is_healthy: bool,
    is_read_only: bool,
    blocks: u64,
    loading: Amount,
    /// Of these, those that nobody asked for yet.
    prefetch: Amount,
    late: Amount,
    queue: VecDeque<Queued>,
    storing: Amount,
    stats: TierStats,
    marks: Option<Marks>,
    backfill: Backfill,
}

/// A block that waits to be written.
#[derive(Clone, Copy)]
pub(crate) struct Queued {
    pub block: BlockId,
    pub generation: Generation,
    /// Of the block before it in its prompt.
    pub parent: Option<Position>,
}

const _: () = assert!(size_of::<Queued>() == 16, "a tier's queue has `queue_blocks` of them");

impl Queued {
    fn is(&self, block: BlockId, generation: Generation) -> bool {
        self.block == block && self.generation == generation
    }
}

#[derive(Clone, Copy, Default)]
struct Amount {
    blocks: u64,
    bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes += bytes;
    }

    fn take(&mut self, bytes: u64) {
        self.blocks -= 1;
        self.bytes -= bytes;
    }
}

/// See the module's head.
pub(crate) struct Tiers {
    all: Vec<Tier>,
    locations: Locations,
    presence: PresenceCache,
    /// Blocks that the policy keeps until they are written, and the tiers (a mask) that they are queued for. Each has
    /// an entry in a queue, or is being written.
    waits: HashMap<BlockId, (Generation, u8)>,
    /// Keys that are passed over until [`Tiers::expire_skips`].
    skipped: Vec<Fingerprint>,
    /// Namespaces whose blocks are being removed from the tiers: meanwhile they are neither probed, loaded nor written
    /// there. In order; with a set in its place, the compiler puts up to 6 % more instructions into each store.
    purging: Vec<NamespaceId>,
    /// Over all tiers, bytes on their way up that nobody asked for yet.
    prefetch_bytes: u64,
    /// Makes the fingerprints of keys unpredictable.
    seed: u64,
    pool_bytes: u64,
}

impl Tiers {
    pub fn new(seed: u64, table_bits: u32, pool_bytes: u64) -> Tiers {
        Tiers {
            all: Vec::new(),
            locations: Locations::new(table_bits),
            presence: PresenceCache::default(),
            waits: HashMap::new(),
            skipped: Vec::new(),
            purging: Vec::new(),
            prefetch_bytes: 0,
            seed,
            pool_bytes,
        }
    }

    /// One more tier. Panics beyond [`TierId::MAX`].
    pub fn open(&mut self, limits: Limits) -> TierId {
        assert!(self.all.len() < TierId::MAX, "more tiers than a block's record has bits for");
        let seed = self.seed.rotate_left(self.all.len() as u32 + 1);
        self.all.push(Tier {
            limits,
            is_healthy: true,
            is_read_only: false,
            blocks: 0,
            loading: Amount::default(),
            prefetch: Amount::default(),
            late: Amount::default(),
            queue: VecDeque::new(),
            storing: Amount::default(),
            stats: TierStats::default(),
            marks: limits.touching.map(|touching| Marks::new(touching, seed)),
            backfill: Backfill::default(),
        });
        TierId(self.all.len() as u8 - 1)
    }

    /// Whether there is a tier at all.
    #[inline]
    pub fn is_on(&self) -> bool {
        !self.all.is_empty()
    }

    /// Which blocks the tiers are given.
    pub fn backing(&self) -> Backing {
        match self.all.iter().all(|tier| tier.limits.admission == Admission::SecondSighting) {
            _ if !self.is_on() => Backing::None,
            true => Backing::OfReturning,
            false => Backing::OfAll,
        }
    }

    pub fn limits(&self, tier: TierId) -> &Limits {
        &self.get(tier).limits
    }

    /// To count something.
    pub fn stats_mut(&mut self, tier: TierId) -> &mut TierStats {
        &mut self.get_mut(tier).stats
    }

    pub fn set_healthy(&mut self, tier: TierId, is_healthy: bool) {
        self.get_mut(tier).is_healthy = is_healthy;
    }

    pub fn set_read_only(&mut self, tier: TierId) {
        self.get_mut(tier).is_read_only = true;
    }

    /// Whether a tier is asked for blocks and given some.
    pub fn is_open(&self, tier: TierId) -> bool {
        let state = self.get(tier);
        // One late load is always borne, or a small pool would close its tier at the first.
        let is_quarantine_full = state.late.blocks > 1 && state.late.bytes >= self.share(state.limits.late_permille);
        state.is_healthy && !is_quarantine_full
    }

    /// Tiers that are given blocks.
    pub fn writable(&self) -> impl Iterator<Item = TierId> + use<> {
        let mut takes = [false; TierId::MAX];
        takes.iter_mut().zip(&self.all).for_each(|(takes, tier)| *takes = !tier.is_read_only);
        (0..TierId::MAX as u8).map(TierId).filter(move |tier| takes[tier.0 as usize])
    }

    /// Shared tiers that may be asked whether they have a block.
    pub fn to_probe(&self) -> Vec<TierId> {
        let all = (0..self.all.len() as u8).map(TierId);
        all.filter(|tier| self.limits(*tier).is_shared && self.is_open(*tier)).collect()
    }

    pub fn is_any_shared(&self) -> bool {
        (0..self.all.len() as u8).any(|tier| self.limits(TierId(tier)).is_shared)
    }

    pub fn report(&self, tier: TierId) -> TierReport {
        let state = self.get(tier);
        TierReport {
            stats: state.stats,
            is_open: self.is_open(tier),
            blocks: state.blocks,
            loading_blocks: state.loading.blocks,
            loading_bytes: state.loading.bytes,
            late_bytes: state.late.bytes,
            waiting_blocks: state.queue.len() as u64,
            storing_blocks: state.storing.blocks,
            storing_bytes: state.storing.bytes,
            touch_ticks: state.marks.as_ref().map_or(0, Marks::length),
        }
    }

    /// Bytes on the heap that grow with the number of blocks there.
    pub fn heap_bytes(&self) -> usize {
        let marks = self.all.iter().filter_map(|tier| tier.marks.as_ref());
        self.locations.heap_bytes() + marks.map(Marks::heap_bytes).sum::<usize>()
    }

    // What lies where.

    /// The fingerprint of a block's key, as tiers know the block.
    #[inline]
    pub fn key(&self, namespace: NamespaceId, group: u16, hash: &[u8]) -> Fingerprint {
        locations::key(self.seed, namespace, group, hash)
    }

    pub fn key_of(&self, key: &BlockKey) -> Fingerprint {
        self.hasher().hash(key)
    }

    pub fn hasher(&self) -> TierHasher {
        TierHasher { seed: self.seed }
    }

    /// An own tier comes before a shared one.
    pub fn location(&self, key: Fingerprint) -> Option<(TierId, LoadHealth)> {
        self.locations.get(key).or_else(|| self.presence.location(key))
    }

    /// The tier to load from: that of this host if it has the block and loads it well, or else a shared one that has
    /// said that it has it.
    pub fn source(&self, key: Fingerprint) -> Option<(TierId, LoadHealth)> {
        let own = self.locations.get(key).filter(|(tier, health)| self.is_open(*tier) && *health == LoadHealth::Good);
        own.or_else(|| self.presence.location(key))
    }

    /// Whether the tier is known to have the block of this key.
    pub fn has(&self, tier: TierId, key: Fingerprint) -> bool {
        self.location(key).is_some_and(|(known, _)| known == tier)
    }

    /// Whether the tier is to be asked for the block of this key before it is stored there: it was given the block, or
    /// gave it, since the block is on an own tier. What else is under the block's name there may be of no use to
    /// anybody, and the tier would say that it is there.
    pub fn is_asked_first(&self, tier: TierId, key: Fingerprint) -> bool {
        self.marks(tier).is_some_and(Marks::asks_first) && self.locations.is_given(key)
    }

    /// The block of this key is whole on the tier, as far as this host can know.
    pub fn note_given(&mut self, tier: TierId, key: Fingerprint) {
        if self.marks(tier).is_some_and(Marks::asks_first) {
            self.locations.set_given(key, true);
        }
    }

    /// A block that is in the pool has come to an own tier. Its other tiers are noted, but for those where it waits.
    pub fn note_given_before(&mut self, block: BlockId, tiers: u8, key: Fingerprint) {
        let is_there =
            |tier: &Tier| tier.marks.as_ref().is_some_and(|marks| marks.asks_first() && !marks.is_waiting(block));
        let all = self.all.iter().enumerate().filter(|(at, _)| tiers & TierId(*at as u8).bit() != 0);
        if all.into_iter().any(|(_, tier)| is_there(tier)) {
            self.locations.set_given(key, true);
        }
    }

    /// The position of a block in its prompt; the same for blocks of all groups that end there.
    pub fn position(&self, namespace: NamespaceId, hash: &BlockHash) -> Position {
        Position::new(self.key(namespace, 0, hash.as_bytes()).0)
    }

    /// Brings what is known of `keys` into the processor's cache.
    pub fn touch_lines(&self, keys: impl Iterator<Item = Fingerprint>) {
        self.locations.touch_lines(keys);
    }

    pub fn set_location(&mut self, key: Fingerprint, tier: TierId) {
        if let Some(replaced) = self.locations.insert(key, tier) {
            self.get_mut(replaced).blocks -= 1;
        }
        self.get_mut(tier).blocks += 1;
    }

    /// Forgets that `tier` has the block, if it is that tier that was known to.
    pub fn forget_location(&mut self, key: Fingerprint, tier: TierId) {
        if self.locations.get(key).is_some_and(|(known, _)| known == tier) {
            self.locations.remove(key);
            self.get_mut(tier).blocks -= 1;
        } else if self.marks(tier).is_some_and(Marks::asks_first) {
            self.locations.set_given(key, false);
        }
        self.presence.leave(key, tier);
    }

    /// A load of this key went wrong: until [`Tiers::expire_skips`] it is a miss.
    pub fn skip(&mut self, key: Fingerprint, tier: TierId, health: LoadHealth) {
        if self.skipped.len() < MAX_SKIPPED {
            match self.locations.get(key) {
                Some((known, _)) if known == tier => self.locations.set_health(key, health),
                _ => self.presence.set_health(key, health),
            }
            self.skipped.push(key);
        } else {
            self.forget_location(key, tier);
        }
    }

    /// What was passed over is asked for again, and what is known of shared tiers ages.
    pub fn expire_skips(&mut self) {
        for key in std::mem::take(&mut self.skipped) {
            self.locations.set_health(key, LoadHealth::Good);
        }
        self.presence.forget();
        self.all.iter_mut().filter_map(|tier| tier.marks.as_mut()).for_each(Marks::tick);
    }

    /// What shared tiers answered.
    pub fn presence(&self) -> &PresenceCache {
        &self.presence
    }

    pub fn presence_mut(&mut self) -> &mut PresenceCache {
        &mut self.presence
    }

    pub fn begin_purge(&mut self, namespace: NamespaceId) {
        if self.is_on()
            && let Err(place) = self.purging.binary_search(&namespace)
        {
            self.purging.insert(place, namespace);
        }
    }

    pub fn end_purge(&mut self, namespace: NamespaceId) {
        if let Ok(place) = self.purging.binary_search(&namespace) {
            self.purging.remove(place);
        }
    }

    pub fn is_purging(&self, namespace: NamespaceId) -> bool {
        self.purging.binary_search(&namespace).is_ok()
    }

    // How old the marks of shared tiers are.

    /// None of a tier that is told of no uses.
    pub fn marks_mut(&mut self, tier: TierId) -> Option<&mut Marks> {
        self.get_mut(tier).marks.as_mut()
    }

    pub fn marks(&self, tier: TierId) -> Option<&Marks> {
        self.get(tier).marks.as_ref()
    }

    /// A tier of which blocks wait to be touched, and may be now.
    pub fn to_touch(&self) -> Option<TierId> {
        let has_due = |tier: &TierId| self.marks(*tier).is_some_and(Marks::has_due) && self.is_open(*tier);
        self.writable().find(has_due)
    }

    /// The block waits to be asked for. False if there is no room.
    pub fn ask(&mut self, tier: TierId, block: BlockId, generation: Generation) -> bool {
        self.marks_mut(tier).is_some_and(|marks| marks.ask(block, generation))
    }

    /// False if the block was written anew since it waits to be asked for.
    pub fn begin_asking(&mut self, tier: TierId, block: BlockId) -> bool {
        self.marks_mut(tier).is_some_and(|marks| marks.begin_asking(block))
    }

    /// The tier has the block.
    pub fn confirm(&mut self, tier: TierId, block: BlockId) {
        self.marks_mut(tier).into_iter().for_each(|marks| marks.confirm(block));
    }

    // On its way up.

    pub fn begin_load(&mut self, tier: TierId, bytes: u64) {
        let tier = self.get_mut(tier);
        tier.loading.add(bytes);
        tier.stats.promotions += 1;
    }

    pub fn end_load(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).loading.take(bytes);
    }

    /// Nobody waits for a load any more.
    pub fn begin_late(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).late.add(bytes);
    }

    pub fn end_late(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).late.take(bytes);
    }

    /// A load that has begun is one that nobody asked for yet.
    pub fn begin_prefetch(&mut self, tier: TierId, bytes: u64) {
        self.prefetch_bytes += bytes;
        let tier = self.get_mut(tier);
        tier.prefetch.add(bytes);
        tier.stats.prefetches += 1;
    }

    /// It has ended, or somebody asked for it.
    pub fn end_prefetch(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).prefetch.take(bytes);
        self.prefetch_bytes -= bytes;
    }

    #[inline]
    pub fn prefetch_bytes(&self) -> u64 {
        self.prefetch_bytes
    }

    /// Whether lookups have as many loads under way as the tier takes.
    pub fn is_loading_enough(&self, tier: TierId) -> bool {
        let tier = self.get(tier);
        tier.loading.blocks - tier.prefetch.blocks >= tier.limits.load_blocks as u64
    }

    /// Whether so much is being loaded that what nobody waits for had better not stand in between.
    pub fn is_busy(&self, tier: TierId) -> bool {
        let tier = self.get(tier);
        tier.loading.blocks as usize >= PREFETCH_LOADS.min((tier.limits.load_blocks / 2).max(1))
    }

    // On its way down.

    /// False if there is no room in the queue.
    pub fn enqueue(&mut self, tier: TierId, queued: Queued) -> bool {
        let state = self.get_mut(tier);
        if state.queue.len() >= state.limits.queue_blocks {
            state.stats.dropped_full += 1;
            return false;
        }
        state.queue.push_back(queued);
        state.stats.queued += 1;
        state.marks.iter_mut().for_each(|marks| marks.wait(queued.block));
        true
    }

    /// The next block to be written, if the tier takes one now.
    pub fn take_queued(&mut self, tier: TierId) -> Option<Queued> {
        if self.may_write_back(tier) { self.get_mut(tier).queue.pop_front() } else { None }
    }

    /// The block waits from now on for the tiers that it was just queued for, if at most `most` blocks wait at one of
    /// them. False if it waits for none.
    pub fn begin_wait(&mut self, block: BlockId, generation: Generation, most: u64) -> bool {
        let is_last = |tier: &Tier| tier.queue.back().is_some_and(|last| last.is(block, generation));
        let queued = self.all.iter().enumerate().filter(|(_, tier)| is_last(tier));
        let tiers = queued.fold(0, |tiers, (at, _)| tiers | TierId(at as u8).bit());
        let waits = self.all.iter().any(|tier| is_last(tier) && tier.queue.len() as u64 <= most);
        if waits {
            self.waits.insert(block, (generation, tiers));
        }
        waits
    }

    /// The tier has written the block that had this generation, or gave up on it. True if the block waited, and waits
    /// for no other tier.
    pub fn end_wait(&mut self, tier: TierId, block: BlockId, generation: Generation) -> bool {
        let Some((_, tiers)) = self.waits.get_mut(&block).filter(|waits| waits.0 == generation) else { return false };
        *tiers &= !tier.bit();
        let is_over = *tiers == 0;
        if is_over {
            self.waits.remove(&block);
        }
        is_over
    }

    /// The block had another generation before it moved; what waits to be written is known by it.
    pub fn requeue(&mut self, block: BlockId, before: Generation, now: &Block) {
        for tier in self.all.iter_mut().filter(|tier| !tier.queue.is_empty()) {
            let waits = tier.queue.iter_mut().filter(|queued| queued.is(block, before));
            waits.for_each(|queued| queued.generation = now.generation);
        }
        if let Some(waits) = self.waits.get_mut(&block).filter(|waits| waits.0 == before) {
            waits.0 = now.generation;
        }
    }

    pub fn begin_write_back(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).storing.add(bytes);
    }

    pub fn end_write_back(&mut self, tier: TierId, bytes: u64) {
        self.get_mut(tier).storing.take(bytes);
    }

    // Recovered blocks that it lacks.

    /// The tier may lack blocks among the first `records`. Nothing happens unless it is an own tier that takes every
    /// block.
    pub fn begin_backfill(&mut self, tier: TierId, records: u32) {
        let Tier { limits, is_read_only, backfill, .. } = self.get_mut(tier);
        if limits.admission == Admission::All && !limits.is_shared && !*is_read_only {
            backfill.begin(records);
        }
    }

    /// A tier whose backfill may go on now: nothing else waits to be written there.
    pub fn to_backfill(&self) -> Option<TierId> {
        let is_due = |tier: &TierId| {
            let Tier { limits, queue, backfill, .. } = self.get(*tier);
            queue.is_empty() && backfill.is_due(self.share(limits.store_permille)) && self.is_open(*tier)
        };
        (0..self.all.len() as u8).map(TierId).find(is_due)
    }

    pub fn backfill_mut(&mut self, tier: TierId) -> &mut Backfill {
        &mut self.get_mut(tier).backfill
    }

    /// The tier for whose backfill the block was compared, if it was.
    pub fn end_comparing(&mut self, block: BlockId, generation: Generation, bytes: u64) -> Option<TierId> {
        let mut all = (0..).map(TierId).zip(&mut self.all);
        all.find_map(|(id, tier)| tier.backfill.end_comparing(block, generation, bytes).then_some(id))
    }

    /// Compares counts with each other and with the records: blocks that are being promoted, and the bytes of
    /// prefetches that no lookup has asked for yet.
    pub fn audit(&self, promoting: u64, prefetch_bytes: u64) -> Result<(), String> {
        let loading: u64 = self.all.iter().map(|tier| tier.loading.blocks).sum();
        let late: u64 = self.all.iter().map(|tier| tier.late.blocks).sum();
        if loading - late != promoting {
            return Err(format!("loads: counted {promoting}, kept {loading}, {late} of them late"));
        }
        let prefetch: u64 = self.all.iter().map(|tier| tier.prefetch.bytes).sum();
        if [prefetch, prefetch_bytes] != [self.prefetch_bytes; 2] {
            let kept = self.prefetch_bytes;
            return Err(format!("bytes prefetch: counted {prefetch_bytes}, kept {kept}, {prefetch} of tiers"));
        }
        let blocks: u64 = self.all.iter().map(|tier| tier.blocks).sum();
        let kept = self.locations.len();
        if blocks == kept { Ok(()) } else { Err(format!("blocks tiers: counted {blocks}, kept {kept}")) }
    }

    fn may_write_back(&self, tier: TierId) -> bool {
        let state = self.get(tier);
        let is_full = state.storing.bytes >= self.share(state.limits.store_permille);
        let parts = state.limits.parts as u64;
        let most = parts * state.limits.store_blocks as u64;
        // One block is always written to each part, or a small pool could never store a large one.
        let has_free_slot = state.storing.blocks < parts || !is_full && state.storing.blocks < most;
        has_free_slot && self.is_open(tier)
    }

    /// Thousandths of the pool, in bytes.
    fn share(&self, permille: u32) -> u64 {
        self.pool_bytes * u64::from(permille) / 1000
    }

    fn get(&self, tier: TierId) -> &Tier {
        &self.all[tier.0 as usize]
    }

    fn get_mut(&mut self, tier: TierId) -> &mut Tier {
        &mut self.all[tier.0 as usize]
    }
}
