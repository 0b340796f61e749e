//! The state machine: its parts, and the small steps that all paths share.
//!
//! Each part keeps its state in private fields and maintains its own invariants; the paths (`paths`) combine the parts,
//! one event each. Events are the public methods here and in `paths`. The core writes effects to the journal, in order;
//! the daemon must carry them out before the answer leaves. No event takes longer than about 200 µs: lookups come in
//! pieces, and touches, drains and purges continue in `step`.

use crate::cache::{Cache, Fate, Names};
use crate::error::Result;
use crate::hints::QueueHints;
use crate::journal::{Effect, Journal};
use crate::key::{BlockId, Instance, NamespaceId, NamespaceIndex};
use crate::layout::Layout;
use crate::leases::Leases;
use crate::policy::{Make, PolicyChoice};
use crate::rebalance::Drains;
use crate::scrub::Scrub;
use crate::slots::{Block, Slots, TOUCHED_TOGETHER};
use crate::stats::Stats;
use crate::tables::TABLE_BITS;
use crate::tiers::Tiers;

/// Shape and shares of a pool, fixed for the life of its [`Core`].
pub struct Config {
    /// Bytes of a unit, the smallest piece of memory that moves from one extent to another.
    pub unit_bytes: u64,
    /// Units of the pool, populated or not.
    pub units: u32,
    /// Makes hash collisions unpredictable; fixed in tests and in the simulator.
    pub seed: u64,
    /// Makes the policy of each class.
    pub policy: Make,
    /// Thousandths of the pool that leases may pin. Over it, requests get a shorter prefix.
    pub promise_permille: u32,
    /// Thousandths of the pool that reservations may take. Engines that find them taken get up to half as much beyond
    /// them, and one slot of each size.
    pub reserve_permille: u32,
    /// Entries of the memory that explains misses, 8 bytes each.
    pub memory_entries: usize,
    /// Tables of the index, and of the map of what lies on tiers, as a power of two, at most 12.
    pub table_bits: u32,
    /// Counts the pool's openings; lease ids begin with it.
    pub epoch: u32,
    /// Larger than any generation an earlier epoch gave out.
    pub first_generation: u32,
}

impl Config {
    /// The defaults, for a pool of this shape.
    pub fn new(unit_bytes: u64, units: u32) -> Config {
        Config {
            unit_bytes,
            units,
            seed: 0,
            policy: PolicyChoice::Default.make(),
            // Half: the other half can always turn over, so waiting requests cannot freeze the cache.
            promise_permille: 500,
            // A quarter: stores are bursts of one step; more would evict what the next request hits.
            reserve_permille: 250,
            // 1 Mi: explains misses of the last million keys with 8 MiB.
            memory_entries: 1 << 20,
            // The most: of eight million blocks a table has some 2,000 entries to move when it grows.
            table_bits: TABLE_BITS,
            epoch: 1,
            first_generation: 1,
        }
    }
}

/// See the module's head.
pub struct Core {
    pub(crate) config: Config,
    pub(crate) slots: Slots,
    pub(crate) cache: Cache,
    pub(crate) leases: Leases,
    pub(crate) hints: QueueHints,
    pub(crate) tiers: Tiers,
    pub(crate) drains: Drains,
    pub(crate) scrub: Scrub,
    pub(crate) journal: Journal,
}

impl Core {
    /// An empty pool. None of its memory is used before [`Core::populate`].
    pub fn new(config: Config) -> Core {
        let slots = Slots::new(config.unit_bytes, config.units, config.first_generation);
        Core {
            cache: Cache::new(config.seed, config.table_bits, config.memory_entries, config.policy),
            leases: Leases::new(config.epoch),
            hints: QueueHints::default(),
            tiers: Tiers::new(config.seed, config.table_bits, slots.space().capacity_bytes()),
            drains: Drains::default(),
            scrub: Scrub::default(),
            journal: Journal::default(),
            slots,
            config,
        }
    }

    /// Before each new extent, `has_room` is asked whether there is memory for what the driver keeps of its slots,
    /// given the first unit, the number of units and the bytes of a slot. Where there is none, the class has no more
    /// slots than before. Without this call every extent has room.
    pub fn ask_before_growing(&mut self, has_room: impl FnMut(u32, u32, u64) -> bool + Send + 'static) {
        self.slots.ask_before_growing(Box::new(has_room));
    }

    /// Memory of this unit may be used from now on.
    pub fn populate(&mut self, unit: u32) {
        self.slots.populate(unit);
    }

    /// The short name of a namespace. Errors with `Invalid` if it is known with other sizes, with `Full` if
    /// the pool cannot hold such blocks or has too many size classes.
    pub fn open_namespace(&mut self, id: NamespaceId, layout: &Layout) -> Result<NamespaceIndex> {
        self.open(id, layout, false)
    }

    /// As [`Core::open_namespace`], for a measurement or a self-test: no tier is asked for its blocks or gets one, its
    /// lookups and stores count nowhere, and nothing is evicted for it. Errors with `Invalid` too if the id is known
    /// and is no trial.
    pub fn open_trial(&mut self, id: NamespaceId, layout: &Layout) -> Result<NamespaceIndex> {
        self.open(id, layout, true)
    }

    fn open(&mut self, id: NamespaceId, layout: &Layout, is_trial: bool) -> Result<NamespaceIndex> {
        let index = self.cache.open_namespace(id, layout, is_trial, &mut self.slots);
        self.cover_classes();
        index
    }

    /// Short names that are given between two starts; none of them twice.
    pub const MAX_NAMESPACES: usize = Names::MAX;

    /// Whether the id has a short name.
    pub fn knows_namespace(&self, id: NamespaceId) -> bool {
        self.cache.names().current_index(id).is_some()
    }

    /// Whether the pool has blocks of this id, or may get some of a promotion.
    pub fn has_blocks(&self, id: NamespaceId) -> bool {
        let names = self.cache.names();
        names.current_index(id).is_some_and(|index| names.get(index).groups.iter().any(|group| group.blocks > 0))
    }

    /// Forgets a namespace that holds no blocks. False if it does, or is unknown.
    pub fn close_namespace(&mut self, id: NamespaceId) -> bool {
        self.cache.close_namespace(id)
    }

    /// Whether the namespace was opened by [`Core::open_trial`].
    pub fn is_trial(&self, namespace: NamespaceIndex) -> bool {
        self.cache.namespace(namespace).is_trial
    }

    /// Ends an event: takes what has to be done since the last call.
    pub fn take_effects(&mut self, into: &mut Vec<Effect>) {
        self.drains.end_event();
        self.journal.take(into);
    }

    /// How many promotions, verifications and probes have ended. While this does not change, a lookup has nothing new
    /// to see of the keys that were "not yet", unless it [`lacks room`](crate::lookup::Lookup::lacks_room).
    pub fn ends(&self) -> u64 {
        self.journal.ends()
    }

    /// Whether room is being moved from blocks of one size to those of another: who found none may soon find some.
    pub fn is_moving_room(&self) -> bool {
        self.drains.is_moving()
    }

    /// Does one piece of the long work: ended leases, touches in the pool, purges, hints and their prefetches, touches
    /// of shared stores, drains. True if there may be more to do now.
    pub fn step(&mut self) -> bool {
        if self.leases.has_ended() {
            self.unpin_ended();
        } else if self.cache.waiting_touches() > 0 {
            self.settle(Core::TOUCHES_PER_STEP);
        } else if self.cache.names().next_purge().is_some() {
            self.step_purge();
        } else if !self.step_hints() && !self.step_prefetch() && !self.step_touches() && !self.step_backfill() {
            self.step_drain();
            return self.drains.has_more();
        }
        true
    }

    /// So much waits for [`Core::step`] that its regular time is too late: before long, lookups do it themselves.
    pub fn has_backlog(&self) -> bool {
        self.cache.waiting_touches() > Core::MAX_TOUCHES / 8
    }

    /// What the core was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Counts since the core was made.
    pub fn stats(&self) -> &Stats {
        self.journal.stats()
    }

    /// The id of a namespace, by its short name. Panics if there is no such name.
    pub fn namespace_id(&self, namespace: NamespaceIndex) -> NamespaceId {
        self.cache.namespace(namespace).id
    }

    /// The block sizes of a namespace. Panics if there is no such name.
    pub fn layout(&self, namespace: NamespaceIndex) -> &Layout {
        &self.cache.namespace(namespace).layout
    }

    /// Bytes on the heap that grow with the number of resident blocks.
    pub fn heap_bytes(&self) -> usize {
        self.slots.heap_bytes() + self.cache.index_bytes()
    }

    /// Bytes on the heap by which the policies remember keys without blocks.
    pub fn ghost_bytes(&self) -> usize {
        self.cache.ghost_bytes()
    }

    /// Bytes on the heap by which misses are explained.
    pub fn memory_bytes(&self) -> usize {
        self.cache.memory_bytes()
    }

    /// Blocks in the index, those that are being verified or promoted included.
    pub fn resident_blocks(&self) -> u64 {
        self.cache.len()
    }

    /// Bytes of the slot that a block has.
    pub fn slot_bytes(&self, block: BlockId) -> u64 {
        self.slots.slot_bytes(block)
    }

    /// 2,048 list moves of three cache misses each stay below 200 µs.
    pub(crate) const TOUCHES_PER_STEP: usize = 2048;

    /// Applies pending touches, at most `limit`.
    pub(crate) fn settle(&mut self, limit: usize) {
        let touches = self.cache.take_touches(limit);
        for batch in touches.chunks(TOUCHED_TOGETHER) {
            self.slots.nodes().touch_lines(batch);
            self.scrub.note(batch);
            for block in batch {
                self.cache.touch(&mut self.slots, *block);
            }
        }
    }

    /// Whether blocks of the namespace go to tiers and come from them.
    #[inline]
    pub(crate) fn uses_tiers(&self, namespace: NamespaceIndex) -> bool {
        self.tiers.is_on() && !self.is_trial(namespace)
    }

    /// Every class has a policy, which knows what tiers take.
    pub(crate) fn cover_classes(&mut self) {
        self.cache.cover_classes(&self.slots, self.tiers.backing());
    }

    /// Pinned bytes without those of prefetches that no lookup has asked for yet: prefetches have a limit of their own.
    #[inline]
    pub(crate) fn promised_bytes(&self) -> u64 {
        self.slots.pinned_bytes() - self.tiers.prefetch_bytes()
    }

    /// One more lease covers `block`; `instance` may touch it from now on. Returns its record.
    #[inline]
    pub(crate) fn pin(&mut self, block: BlockId, instance: Option<Instance>) -> &Block {
        self.slots.pin(block, instance, &mut self.journal)
    }

    #[inline]
    pub(crate) fn unpin(&mut self, block: BlockId) {
        if self.slots.unpin(block, &mut self.journal) {
            self.release_slot(block);
        }
    }

    /// Takes `block` out of the index; its slot is free now, or when the last holder is gone.
    pub(crate) fn forget(&mut self, block: BlockId, fate: Fate) {
        self.cache.dismiss(&mut self.slots, block);
        self.cache.remember(&self.slots[block], fate);
        self.cache.unname(&self.slots, block);
        if self.slots.is_held(block) {
            self.slots.fence(block, &mut self.journal);
        } else {
            self.release_slot(block);
        }
    }

    /// Nobody holds the slot: it is free, and the record vacant.
    pub(crate) fn release_slot(&mut self, block: BlockId) {
        if let Some(extent) = self.slots.free(block, &mut self.journal) {
            self.give_back(extent);
        }
    }
}
