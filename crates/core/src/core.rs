//! The state machine: what it holds, how it is made, and the small steps that all paths share.
//!
//! Events are the public methods here and in `load`, `store`, `recover` and `purge`; what the outside has to do
//! about them is left in `effects`, in order, and must be done before the answer leaves the daemon. No event
//! takes longer than about 200 µs: lookups come in pieces, and touches, drains and purges go on in `step`.
//!
//! Invariants: a slot is in one hand (free, one reservation, or one block); a held block is never evicted; a
//! block in the index is `Unverified`, `Verifying` or `Ready`, in its class's policy, and has a slot; or it is
//! `Promoting`, in no policy, and has a slot. A `Moving` record has a slot and no key.

use std::collections::{BTreeMap, VecDeque};

use crate::below::{Below, TierId};
use crate::block::{Block, BlockId, Blocks, NamespaceIndex, State};
use crate::corrupt::Finder;
use crate::error::Result;
use crate::expect::Expectations;
use crate::index::{Fingerprint, Index};
use crate::key::{BlockHash, Generation, Instance, NamespaceId, SlotId};
use crate::layout::Layout;
use crate::load::Lease;
use crate::miss::{Fate, Memory};
use crate::names::Names;
use crate::policy::{List, Nodes, Policy, Residents};
use crate::purge::Purge;
use crate::room::Drain;
use crate::scrub::Scrub;
use crate::space::Space;
use crate::stats::{Stats, Unfinished};
use crate::tables::TABLE_BITS;

pub struct Config {
    pub unit_bytes: u64,
    pub units: u32,
    /// Makes hash collisions unpredictable; fixed in tests and in the simulator.
    pub seed: u64,
    /// Makes the policy of each class.
    pub policy: crate::policy::Make,
    /// Thousandths of the pool that leases may pin. Over it, requests get a shorter prefix.
    pub promise_permille: u32,
    /// Thousandths of the pool that reservations may take.
    pub reserve_permille: u32,
    /// Entries of the memory that explains misses, 8 bytes each.
    pub memory_entries: usize,
    /// Tables of the index, and of the map of what lies below, as a power of two, at most 12.
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
            policy: crate::policy::ALL[0].1,
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

/// Loads from memory that are started together: about as many as a processor core can have under way.
pub(crate) const WARM: usize = 32;

/// What the outside has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The slot was handed out for filling: publish the generation, write holder and state to the table.
    Reserved {
        slot: SlotId,
        generation: Generation,
        holders: u64,
    },
    /// Nothing valid is in the slot any more, and nobody may touch it; `next` tells a late one so.
    Freed {
        slot: SlotId,
        next: Generation,
    },
    /// Who may touch the slot, before its offset leaves.
    Held {
        slot: SlotId,
        holders: u64,
    },
    /// The slot holds no block any more, yet it is not free: its holders, and its generation, stay.
    Fenced {
        slot: SlotId,
    },
    ExtentMade {
        first_unit: u32,
        units: u32,
        slot_bytes: u64,
    },
    ExtentCleared {
        first_unit: u32,
        units: u32,
    },
    /// Compare the slot with its checksum and call [`Core::verified`]; whoever finds it whole sees to its births.
    Verify {
        block: BlockId,
        slot: SlotId,
        generation: Generation,
        finder: Finder,
    },
    /// Fill the slot from the tier and call [`Core::loaded`]; who the block is, [`Core::key_below`] says.
    Load {
        tier: TierId,
        block: BlockId,
        slot: SlotId,
        generation: Generation,
    },
    /// Write the slot to the tier and call [`Core::stored`].
    Store {
        tier: TierId,
        block: BlockId,
        slot: SlotId,
        generation: Generation,
    },
    /// Copy what `slot` holds to `to_slot`, which has [`Core::slot_bytes`] of `to`, and call [`Core::moved`]. What the
    /// table says of the block is to be read when this effect's turn comes: `slot` may be somebody else's soon after.
    Move {
        from: BlockId,
        slot: SlotId,
        generation: Generation,
        to: BlockId,
        to_slot: SlotId,
    },
    /// Remove all blocks of this namespace from all tiers, tell each to [`Core::tier_evicted`], then call
    /// [`Core::purged_below`].
    PurgeBelow {
        namespace: NamespaceIndex,
    },
}

const _: () = assert!(size_of::<Effect>() <= 24, "effects are written on the fastest paths");

/// Blocks of a class that are in somebody's hand.
#[derive(Clone, Default)]
pub(crate) struct Tally {
    pub pinned: u64,
    pub reserved: u64,
    pub promoting: u64,
    /// Being filled with a block that leaves its slot.
    pub moving: u64,
    pub fenced: u64,
}

pub struct Core {
    pub(crate) config: Config,
    pub(crate) names: Names,
    pub(crate) space: Space,
    pub(crate) blocks: Blocks,
    pub(crate) index: Index,
    pub(crate) nodes: Nodes,
    /// By class.
    pub(crate) policies: Vec<Box<dyn Policy>>,
    pub(crate) memory: Memory,
    pub(crate) leases: BTreeMap<u64, Lease>,
    pub(crate) next_lease: u64,
    /// Leases of each instance.
    pub(crate) lease_counts: [u64; Instance::MAX],
    pub(crate) next_generation: u32,
    /// Blocks of leases that ended, to be unpinned.
    pub(crate) ended: Vec<BlockId>,
    pub(crate) pinned_bytes: u64,
    pub(crate) reserved_bytes: u64,
    /// By class.
    pub(crate) tallies: Vec<Tally>,
    /// The blocks in state `Reserved`, by owner. No policy has them, so they use its nodes.
    pub(crate) reserved: Vec<List>,
    /// Instances of earlier epochs whose workers may still touch what they were handed then.
    pub(crate) earlier: u64,
    /// Those of them whose workers may touch an excluded unit: one that came back may still, until it is gone.
    pub(crate) excluding: u64,
    /// The blocks in state `Fenced`. No policy has them either.
    pub(crate) fenced: List,
    /// Blocks to be touched, coldest first; applied after the reply.
    pub(crate) touches: VecDeque<BlockId>,
    pub(crate) unfinished: Unfinished,
    pub(crate) drains: Vec<Drain>,
    /// Blocks that are being copied out of draining extents.
    pub(crate) copies: u32,
    /// Evictions after which classes are compared again.
    pub(crate) next_comparison: u64,
    pub(crate) purges: Vec<Purge>,
    pub(crate) expectations: Expectations,
    pub(crate) below: Below,
    pub(crate) scrub: Scrub,
    pub(crate) stats: Stats,
    pub(crate) effects: Vec<Effect>,
}

impl Core {
    pub fn new(config: Config) -> Core {
        Core {
            space: Space::new(config.unit_bytes, config.units),
            memory: Memory::new(config.memory_entries, config.seed),
            next_generation: config.first_generation.max(1),
            names: Names::default(),
            blocks: Blocks::default(),
            index: Index::new(config.table_bits),
            nodes: Nodes::default(),
            policies: Vec::new(),
            leases: BTreeMap::new(),
            // A release that was sent before a restart must not end a lease given after it.
            next_lease: u64::from(config.epoch) << 32 | 1,
            lease_counts: [0; Instance::MAX],
            ended: Vec::new(),
            pinned_bytes: 0,
            reserved_bytes: 0,
            tallies: Vec::new(),
            reserved: (0..Instance::MAX).map(|_| List::default()).collect(),
            earlier: 0,
            excluding: 0,
            fenced: List::default(),
            touches: VecDeque::new(),
            unfinished: Unfinished::default(),
            drains: Vec::new(),
            copies: 0,
            next_comparison: 0,
            purges: Vec::new(),
            expectations: Expectations::default(),
            below: Below::new(config.table_bits),
            scrub: Scrub::default(),
            stats: Stats::default(),
            effects: Vec::new(),
            config,
        }
    }

    /// Memory of this unit may be used from now on.
    pub fn populate(&mut self, unit: u32) {
        self.space.populate(unit);
    }

    /// The short name of a namespace. Errors with `Invalid` if it is known with other sizes, with `Full` if
    /// the pool cannot hold such blocks or has too many size classes.
    pub fn open_namespace(&mut self, id: NamespaceId, layout: &Layout) -> Result<NamespaceIndex> {
        let index = self.names.open(id, layout, &mut self.space);
        self.cover_classes();
        index
    }

    /// Forgets a namespace that holds no blocks. False if it does, or is unknown.
    pub fn close_namespace(&mut self, id: NamespaceId) -> bool {
        self.names.close(id)
    }

    /// Takes what has to be done since the last call.
    pub fn take_effects(&mut self, into: &mut Vec<Effect>) {
        if into.is_empty() {
            std::mem::swap(into, &mut self.effects);
        } else {
            into.append(&mut self.effects);
        }
    }

    /// Does one piece of the work that was cut up: ended leases, touches, purges, expectations and what comes up for
    /// them, drains. True if there may be more to do now.
    pub fn step(&mut self) -> bool {
        if !self.ended.is_empty() {
            self.unpin_ended();
        } else if !self.touches.is_empty() {
            self.settle(Core::TOUCHES_PER_STEP);
        } else if !self.purges.is_empty() {
            self.step_purge();
        } else if !self.step_expectations() && !self.step_ahead() {
            self.step_drain();
            return self.copies == 0 && self.drains.iter().any(|drain| !drain.is_waiting);
        }
        true
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    pub fn namespace_id(&self, namespace: NamespaceIndex) -> NamespaceId {
        self.names.get(namespace).id
    }

    pub fn layout(&self, namespace: NamespaceIndex) -> &Layout {
        &self.names.get(namespace).layout
    }

    /// Bytes on the heap that grow with the number of resident blocks.
    pub fn heap_bytes(&self) -> usize {
        self.blocks.heap_bytes() + self.index.heap_bytes() + self.nodes.heap_bytes() + self.space.heap_bytes()
    }

    /// Bytes on the heap by which the policies remember keys without blocks.
    pub fn ghost_bytes(&self) -> usize {
        self.policies.iter().map(|policy| policy.ghost_bytes()).sum()
    }

    /// Bytes on the heap by which misses are explained.
    pub fn memory_bytes(&self) -> usize {
        self.memory.heap_bytes()
    }

    pub fn resident_blocks(&self) -> u64 {
        self.index.len()
    }

    /// 2,048 list moves of three cache misses each stay below 200 µs.
    pub(crate) const TOUCHES_PER_STEP: usize = 2048;

    /// Applies pending touches, at most `limit`.
    pub(crate) fn settle(&mut self, limit: usize) {
        let count = limit.min(self.touches.len());
        let touches: Vec<BlockId> = self.touches.drain(..count).collect();
        for batch in touches.chunks(WARM) {
            self.nodes.warm(batch);
            self.scrub.note(batch);
            for block in batch {
                // It may have been corrupt or purged meanwhile, and its record reused.
                if self.is_indexed(*block) {
                    let class = self.blocks[*block].class;
                    self.policies[class.0 as usize].touch(&mut self.nodes, *block);
                }
            }
        }
    }

    /// Every class has a policy, which knows what lies below, and a tally.
    pub(crate) fn cover_classes(&mut self) {
        let count = self.space.classes().count();
        self.policies.resize_with(count, self.config.policy);
        let is_backed = self.below.keeps_what_returns();
        self.policies.iter_mut().for_each(|policy| policy.back(is_backed));
        self.tallies.resize(count, Tally::default());
    }

    pub(crate) fn fingerprint(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
        Fingerprint::new(self.config.seed, namespace, group, hash)
    }

    pub(crate) fn find(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> Option<BlockId> {
        let hash = hash.as_bytes();
        let key = self.fingerprint(namespace, group, hash);
        self.index.find(key, |id| self.blocks[id].has_key(namespace, group, hash))
    }

    /// The key of a block, as the index knows it.
    pub(crate) fn key_of(&self, block: BlockId) -> Fingerprint {
        let record = &self.blocks[block];
        self.fingerprint(record.namespace, record.group, record.hash.as_bytes())
    }

    /// Whether `block` is in the index and in its class's policy.
    pub(crate) fn is_indexed(&self, block: BlockId) -> bool {
        matches!(self.blocks[block].state, State::Ready | State::Unverified | State::Verifying)
    }

    /// Thousandths of the pool, in bytes.
    pub(crate) fn share(&self, permille: u32) -> u64 {
        self.space.capacity_bytes() * u64::from(permille) / 1000
    }

    /// Bytes of the slot that a block has.
    pub fn slot_bytes(&self, block: BlockId) -> u64 {
        self.space.class_info(self.blocks[block].class).slot_bytes
    }

    /// Bytes that are pinned, but for what comes up and nobody asked for yet: that has a limit of its own.
    #[inline]
    pub(crate) fn promised_bytes(&self) -> u64 {
        self.pinned_bytes - self.below.ahead_bytes
    }

    #[inline]
    /// One more lease covers `block`; `instance` may touch it from now on.
    pub(crate) fn pin(&mut self, block: BlockId, instance: Option<Instance>) {
        let slot_bytes = self.slot_bytes(block);
        let record = &mut self.blocks[block];
        record.pins += 1;
        if record.pins == 1 {
            self.pinned_bytes += slot_bytes;
            self.tallies[record.class.0 as usize].pinned += 1;
        }
        let bit = instance.map_or(0, Instance::bit);
        if record.holders & bit != bit {
            record.holders |= bit;
            self.effects.push(Effect::Held { slot: record.slot, holders: record.holders });
        }
    }

    pub(crate) fn unpin(&mut self, block: BlockId) {
        let slot_bytes = self.slot_bytes(block);
        let earlier = self.earlier;
        let record = &mut self.blocks[block];
        assert!(record.pins > 0, "block {block:?} is unpinned more often than pinned");
        record.pins -= 1;
        if record.pins > 0 {
            return;
        }
        self.pinned_bytes -= slot_bytes;
        self.tallies[record.class.0 as usize].pinned -= 1;
        let holders = record.holders & earlier;
        if record.holders != holders {
            record.holders = holders;
            self.effects.push(Effect::Held { slot: record.slot, holders });
        }
        if record.state == State::Fenced && holders == 0 {
            self.unfence(block);
            self.release_slot(block);
        }
    }

    /// Whether somebody may still touch the slot.
    pub(crate) fn is_held(&self, block: BlockId) -> bool {
        let record = &self.blocks[block];
        record.pins > 0 || record.holders & self.earlier != 0
    }

    /// Takes `block` out of the index; its slot is free now, or when the last holder is gone.
    pub(crate) fn forget(&mut self, block: BlockId, fate: Fate) {
        let class = self.blocks[block].class;
        self.policies[class.0 as usize].remove(&mut self.nodes, block);
        self.remember(block, fate);
        self.unindex(block);
        if self.is_held(block) {
            self.fence(block);
        } else {
            self.release_slot(block);
        }
    }

    /// The slot is out of use until its last holder is gone, and no restart takes what it holds for a block.
    pub(crate) fn fence(&mut self, block: BlockId) {
        let record = &mut self.blocks[block];
        record.state = State::Fenced;
        self.effects.push(Effect::Fenced { slot: record.slot });
        self.tallies[record.class.0 as usize].fenced += 1;
        self.fenced.push_head(&mut self.nodes, block);
    }

    pub(crate) fn unfence(&mut self, block: BlockId) {
        self.tallies[self.blocks[block].class.0 as usize].fenced -= 1;
        self.fenced.unlink(&mut self.nodes, block);
    }

    /// Keeps in mind what became of a block's key.
    pub(crate) fn remember(&mut self, block: BlockId, fate: Fate) {
        let Block { namespace, group, hash, .. } = &self.blocks[block];
        self.memory.note(*namespace, *group, hash, fate);
    }

    pub(crate) fn unindex(&mut self, block: BlockId) {
        self.index.remove(self.key_of(block), block);
        let Block { namespace, group, .. } = self.blocks[block];
        self.names.get_mut(namespace).leave(group);
    }

    /// Nobody holds the slot: it is free, and the record vacant.
    pub(crate) fn release_slot(&mut self, block: BlockId) {
        let (slot, next) = (self.blocks[block].slot, self.generation());
        self.effects.push(Effect::Freed { slot, next });
        self.blocks.remove(block);
        if let Some(extent) = self.space.free(slot) {
            self.give_back(extent);
        }
    }

    pub(crate) fn generation(&mut self) -> Generation {
        let generation = Generation(self.next_generation);
        // 0 means "never handed out"; skipped when the counter wraps.
        self.next_generation = self.next_generation.wrapping_add(1).max(1);
        generation
    }
}

/// What a policy may ask, borrowed apart from the policies themselves.
/// A block's key as policies know it: the same in every core, so that a trace replayed has the hits it had. Whoever
/// chose hashes that meet in one bucket of ghosts would make the policy forget some keys, no more.
pub(crate) fn policy_key(namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
    Fingerprint::new(0, namespace, group, hash)
}

pub(crate) struct View<'a> {
    pub blocks: &'a Blocks,
    pub earlier: u64,
    pub seed: u64,
    pub expectations: &'a Expectations,
    pub may_take_wanted: bool,
}

impl Residents for View<'_> {
    fn is_held(&self, block: BlockId) -> bool {
        let Block { pins, holders, .. } = self.blocks[block];
        pins > 0 || holders & self.earlier != 0
    }

    fn is_wanted(&self, block: BlockId) -> bool {
        if self.expectations.is_empty() {
            return false;
        }
        let record = &self.blocks[block];
        let key = Fingerprint::new(self.seed, record.namespace, record.group, record.hash.as_bytes());
        self.expectations.is_wanted(key)
    }

    fn may_take_wanted(&self) -> bool {
        self.may_take_wanted
    }

    fn fingerprint(&self, block: BlockId) -> Fingerprint {
        let record = &self.blocks[block];
        policy_key(record.namespace, record.group, record.hash.as_bytes())
    }
}
