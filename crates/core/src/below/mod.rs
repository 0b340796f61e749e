//! Tiers below the pool: which blocks lie there, how they come up, and which are written down.
//!
//! A tier's truth is on the tier; what is kept here is a cache of it, rebuilt at every start. The core decides and
//! leaves `Effect::Load` and `Effect::Store`; a driver moves the bytes and reports with [`Core::loaded`],
//! [`Core::stored`], [`Core::give_up`] and [`Core::tier_evicted`].
//!
//! Invariants: a slot that a tier fills is `Promoting` or `Fenced`, pinned once, and free only after the tier's
//! completion, however late that is; promotions count among the promises and evict nothing that is held; bytes
//! pinned by stores and bytes of late loads have a limit each; without a tier nothing here is ever reached.
//!
//! In the order data passes: `seek` (whether shared stores have it), `promote` (up), `ahead` (up, before anybody asks),
//! `write` (down), `residence` (what lies where).

mod ahead;
mod promote;
mod residence;
mod seek;
mod write;

use std::collections::VecDeque;

use crate::block::{Block, BlockId, NamespaceIndex};
use crate::core::{Core, Effect};
use crate::index::Fingerprint;
use crate::key::{BlockKey, Generation, Instance, NamespaceId};
use crate::layout::GroupLayout;
use crate::tier::Location;

pub(crate) use promote::Allowance;
pub use residence::Place;
use residence::{Residence, Standing};
pub use seek::Find;
use seek::Sought;

/// Number of a tier, in the order they were opened: the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct TierId(pub u8);

impl TierId {
    /// A block's record has a bit for each.
    pub const MAX: usize = 8;

    fn bit(self) -> u8 {
        1 << self.0
    }
}

/// Holds the slots that disks of its own fill, in the table: after a daemon was killed its transfers may still land there.
/// What it copies itself, from a store that hosts share too, ends with its process and needs no holder there.
pub const TRANSFERS: Instance = Instance::DAEMON;

/// Which blocks are written down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Those that were asked for again: hit in the pool, or stored once more after they had left it.
    SecondSighting,
    All,
}

/// What one tier may take of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub admission: Admission,
    /// Its truth is elsewhere: others store and evict there. It is asked for each key, and what it holds is not kept
    /// here. The daemon's own threads copy what comes from it, so nothing lands after its process has ended.
    pub is_shared: bool,
    /// Loads in flight.
    pub load_blocks: usize,
    /// Blocks that wait to be written. They are not pinned: one that is evicted meanwhile was not worth it.
    pub queue_blocks: usize,
    /// Blocks being written, and thousandths of the pool that they pin.
    pub store_blocks: usize,
    pub store_permille: u32,
    /// Thousandths of the pool that late loads may keep out of use; over it the tier is closed.
    pub late_permille: u32,
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
            store_blocks: 256,
            // A 32nd: enough to keep a disk busy, and nothing that eviction would notice.
            store_permille: 31,
            late_permille: 62,
        }
    }
}

/// What is counted for one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    pub promotions: u64,
    /// Of these, those started for requests that waited, before a lookup asked.
    pub ahead: u64,
    /// Of those, blocks that a lookup asked for then, ready or on their way.
    pub ahead_used: u64,
    pub promoted: u64,
    pub promoted_bytes: u64,
    /// Loads that ended without the block, by cause: not there, not what was stored, anything else.
    pub absent: u64,
    pub corrupt: u64,
    pub failed_loads: u64,
    /// Loads whose waiters were let go.
    pub late: u64,
    pub queued: u64,
    pub stored: u64,
    pub stored_bytes: u64,
    pub failed_stores: u64,
    /// Blocks that were not written since too many waited.
    pub dropped_full: u64,
    /// Blocks that left the pool before they were written.
    pub dropped_gone: u64,
    pub evicted: u64,
}

/// One tier, at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierReport {
    pub stats: TierStats,
    pub is_open: bool,
    /// Blocks known to lie there; 0 if it is shared.
    pub blocks: u64,
    pub loading_blocks: u64,
    pub loading_bytes: u64,
    /// Of these, those that nobody waits for any more.
    pub late_bytes: u64,
    pub waiting_blocks: u64,
    pub storing_blocks: u64,
    pub storing_bytes: u64,
}

pub(crate) struct Tier {
    limits: Limits,
    /// What the driver says of its health.
    is_healthy: bool,
    is_read_only: bool,
    blocks: u64,
    loading: Amount,
    /// Of these, those that nobody asked for yet.
    ahead: Amount,
    late: Amount,
    queue: VecDeque<(BlockId, Generation)>,
    storing: Amount,
    stats: TierStats,
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

#[derive(Default)]
pub(crate) struct Below {
    pub(crate) tiers: Vec<Tier>,
    residence: Residence,
    sought: Sought,
    /// Keys that are passed over until [`Core::forgive`].
    set_aside: Vec<Fingerprint>,
    /// Namespaces whose blocks are being removed from the tiers: neither asked for nor written there meanwhile.
    purging: Vec<NamespaceId>,
    /// Over all tiers, bytes on their way up that nobody asked for yet.
    pub(crate) ahead_bytes: u64,
}

impl Below {
    pub fn new(table_bits: u32) -> Below {
        Below { residence: Residence::new(table_bits), ..Below::default() }
    }

    /// Whether there is a tier at all.
    pub fn is_on(&self) -> bool {
        !self.tiers.is_empty()
    }

    /// Whether there is a tier, and each is given what was asked for again, and not the rest.
    pub fn keeps_what_returns(&self) -> bool {
        self.is_on() && self.tiers.iter().all(|tier| tier.limits.admission == Admission::SecondSighting)
    }

    /// An own tier comes before a shared one.
    fn place(&self, key: Fingerprint) -> Option<(Place, Standing)> {
        self.residence.get(key).or_else(|| self.sought.place(key))
    }
}

impl Core {
    /// One more tier. Panics beyond [`TierId::MAX`].
    pub fn open_tier(&mut self, limits: Limits) -> TierId {
        let tiers = &mut self.below.tiers;
        assert!(tiers.len() < TierId::MAX, "more tiers than a block's record has bits for");
        tiers.push(Tier {
            limits,
            is_healthy: true,
            is_read_only: false,
            blocks: 0,
            loading: Amount::default(),
            ahead: Amount::default(),
            late: Amount::default(),
            queue: VecDeque::new(),
            storing: Amount::default(),
            stats: TierStats::default(),
        });
        let id = TierId(tiers.len() as u8 - 1);
        self.cover_classes();
        id
    }

    /// A tier that is not healthy is asked for nothing and given nothing.
    pub fn set_healthy(&mut self, tier: TierId, is_healthy: bool) {
        self.tier_mut(tier).is_healthy = is_healthy;
        self.start_stores();
    }

    /// Nothing is written to this tier.
    pub fn set_read_only(&mut self, tier: TierId) {
        self.tier_mut(tier).is_read_only = true;
    }

    /// The tier holds this block: found at its start.
    pub fn found_below(&mut self, tier: TierId, key: &BlockKey, at: Location) {
        self.reside(self.below_key(key), Place { tier, at });
    }

    /// The tier does not hold this block any more.
    pub fn tier_evicted(&mut self, tier: TierId, key: &BlockKey) {
        self.tier_mut(tier).stats.evicted += 1;
        self.leave_below(self.below_key(key), tier);
        let block = self.names.current_index(key.namespace).and_then(|ns| self.find(ns, key.group, &key.hash));
        if let Some(block) = block {
            self.blocks[block].below &= !tier.bit();
        }
    }

    /// Until [`Core::purged_below`] the tiers are not asked for blocks of this namespace, nor given any, whether the
    /// core knows it or not.
    pub fn begin_purge_below(&mut self, namespace: NamespaceId) {
        if self.below.is_on() && !self.is_purging_below(namespace) {
            self.below.purging.push(namespace);
        }
    }

    /// A purged namespace has no block on any tier any more; called after [`Effect::PurgeBelow`] was carried out.
    pub fn purged_below(&mut self, namespace: NamespaceId) {
        self.below.purging.retain(|purging| *purging != namespace);
    }

    pub fn is_purging_below(&self, namespace: NamespaceId) -> bool {
        self.below.purging.contains(&namespace)
    }

    /// What was passed over after a failure is asked for again, and what is known of shared stores ages. Called every
    /// second or two.
    pub fn forgive(&mut self) {
        for key in std::mem::take(&mut self.below.set_aside) {
            self.below.residence.stand(key, Standing::Good);
        }
        self.below.sought.forget();
    }

    /// Key of the block that an effect names, as long as its operation has not ended.
    pub fn key_below(&self, block: BlockId) -> BlockKey {
        let Block { namespace, group, hash, .. } = self.blocks[block];
        BlockKey { namespace: self.names.get(namespace).id, group, hash }
    }

    /// Bytes of the block that an effect names.
    pub fn length_below(&self, block: BlockId) -> u64 {
        self.group_below(block).map_or(0, |group| group.block_bytes())
    }

    pub fn tokens_below(&self, block: BlockId) -> u32 {
        self.group_below(block).map_or(0, |group| group.tokens_per_block)
    }

    /// Where a key lies, as far as is known.
    pub fn place_below(&self, key: &BlockKey) -> Option<Place> {
        self.below.place(self.below_key(key)).map(|(place, _)| place)
    }

    pub fn tier_report(&self, tier: TierId) -> TierReport {
        let state = &self.below.tiers[tier.0 as usize];
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
        }
    }

    /// Bytes on the heap that grow with the number of blocks below.
    pub fn below_heap_bytes(&self) -> usize {
        self.below.residence.heap_bytes()
    }

    /// Compares the counts of what moves with the records; for [`Core::audit`].
    pub(crate) fn audit_below(&self, promoting: u64) -> Result<(), String> {
        let tiers = &self.below.tiers;
        let loading: u64 = tiers.iter().map(|tier| tier.loading.blocks).sum();
        let late: u64 = tiers.iter().map(|tier| tier.late.blocks).sum();
        if loading - late != promoting {
            return Err(format!("loads: counted {promoting}, kept {loading}, {late} of them late"));
        }
        let ahead: u64 = tiers.iter().map(|tier| tier.ahead.bytes).sum();
        let counted = (0..self.blocks.end()).map(BlockId).filter(|block| self.is_ahead(*block));
        let counted: u64 = counted.map(|block| self.slot_bytes(block)).sum();
        if [ahead, counted] != [self.below.ahead_bytes; 2] {
            return Err(format!("bytes ahead: counted {counted}, kept {}, {ahead} of tiers", self.below.ahead_bytes));
        }
        let blocks: u64 = tiers.iter().map(|tier| tier.blocks).sum();
        let kept = self.below.residence.len();
        if blocks == kept { Ok(()) } else { Err(format!("blocks below: counted {blocks}, kept {kept}")) }
    }

    pub(crate) fn purge_below(&mut self, id: NamespaceId, old: NamespaceIndex) {
        self.begin_purge_below(id);
        if self.below.is_on() {
            self.effects.push(Effect::PurgeBelow { namespace: old });
        }
    }

    fn group_below(&self, block: BlockId) -> Option<&GroupLayout> {
        let Block { namespace, group, .. } = self.blocks[block];
        self.names.get(namespace).layout.group(group)
    }

    /// Whether a tier is asked for blocks and given some.
    fn is_open(&self, tier: TierId) -> bool {
        let state = &self.below.tiers[tier.0 as usize];
        // One late load is always borne, or a small pool would close its tier at the first.
        let is_quarantine_full = state.late.blocks > 1 && state.late.bytes >= self.share(state.limits.late_permille);
        state.is_healthy && !is_quarantine_full
    }

    fn tier_mut(&mut self, tier: TierId) -> &mut Tier {
        &mut self.below.tiers[tier.0 as usize]
    }

    fn below_key(&self, key: &BlockKey) -> Fingerprint {
        residence::key(self.config.seed, key.namespace, key.group, key.hash.as_bytes())
    }

    fn below_key_of(&self, block: BlockId) -> Fingerprint {
        let record = &self.blocks[block];
        let id = self.names.get(record.namespace).id;
        residence::key(self.config.seed, id, record.group, record.hash.as_bytes())
    }

    fn reside(&mut self, key: Fingerprint, place: Place) {
        if let Some(replaced) = self.below.residence.insert(key, place) {
            self.tier_mut(replaced.tier).blocks -= 1;
        }
        self.tier_mut(place.tier).blocks += 1;
    }

    /// Forgets that `tier` has the block, if it is that tier that was known to.
    fn leave_below(&mut self, key: Fingerprint, tier: TierId) {
        if self.below.residence.get(key).is_some_and(|(place, _)| place.tier == tier) {
            self.below.residence.remove(key);
            self.tier_mut(tier).blocks -= 1;
        }
        self.below.sought.leave(key, tier);
    }
}
