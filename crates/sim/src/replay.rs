//! One trace on the real core: one policy, one capacity of each tier, one request after another.
//!
//! `forebay_insight::rehearsal` documents how a request is looked up and its blocks are stored. A daemon with the same
//! requests (see [`keys`]) gives the same hits. Besides the core's own index, this module tracks the pool's content
//! from the core's effects, and compares both from time to time.

use std::collections::{HashMap, VecDeque};

use forebay_core::hints::HintId;
use forebay_core::key::PAGE_BYTES;
use forebay_core::layout::Attention;
use forebay_core::miss::MissReason;
use forebay_core::policy::Make;
use forebay_core::{BlockHash, Config, Result, SlotId};
use forebay_insight::rehearsal::{self, ENGINE, GROUP, Hash, Rehearsal, Scale, Shape, Watch};

use crate::trace::{ROOT, Request, Trace};

pub use forebay_insight::rehearsal::{STORE_BATCH, Ssd, store_batch};

/// Length of the hashes on the wire.
pub const HASH_BYTES: usize = size_of::<Hash>();

/// How often the residents are checked for blocks without parents.
const INSPECTIONS: usize = 32;

#[derive(Clone, Copy)]
pub struct Setup {
    pub policy: Make,
    pub capacity_bytes: u64,
    /// The disk as the tier under the pool, if there is one.
    pub ssd: Option<Ssd>,
    /// How many requests wait behind the one being served; the core receives them as queue hints.
    pub lookahead: usize,
    /// Slots requested at once.
    pub store_batch: usize,
    /// Renames all blocks; results depend on it only by chance.
    pub salt: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub requests: u64,
    pub blocks: u64,
    /// Blocks that were on any tier when requested.
    pub object_hits: u64,
    /// Those of them that could be used: no earlier block was missing.
    pub prefix_hits: u64,
    /// Those of them that were in the pool already.
    pub pool_hits: u64,
    /// The reasons of the other blocks' misses, by `MissReason as usize`.
    pub misses: [u64; MissReason::ALL.len()],
    pub namespaces: Vec<Tally>,
    /// The most residents of the pool that no prefix on any tier can reach, over [`INSPECTIONS`] inspections.
    pub orphan_peak: u64,
    pub evicted: u64,
    /// Blocks that were copied to other slots, because another size took the memory of their slots.
    pub moved: u64,
    /// Blocks that came up from the disk, for a lookup or ahead of one.
    pub ssd_loaded_blocks: u64,
    pub ssd_written_blocks: u64,
    pub ssd_written_bytes: u64,
    pub metadata_bytes: u64,
    pub ghost_bytes: u64,
}

/// Results of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub requests: u64,
    pub blocks: u64,
    pub pool_hits: u64,
    pub prefix_hits: u64,
}

/// The requests of a trace as a daemon receives them: namespace and hashes, in order.
pub fn keys(trace: &Trace, salt: u64) -> impl Iterator<Item = (u16, Vec<[u8; HASH_BYTES]>)> {
    trace
        .requests()
        .map(move |request| (request.namespace, request.blocks.iter().map(|block| Trace::hash(*block, salt)).collect()))
}

/// Errors with `Full` if the pool cannot hold a block. Calls `progress` with the number of requests done.
pub fn replay(trace: &Trace, setup: Setup, mut progress: impl FnMut(usize)) -> Result<Outcome> {
    let mut replay = Replay::new(trace, setup)?;
    let inspect_every = (trace.len() / INSPECTIONS).max(1);
    for at in 0..trace.len() {
        replay.hint_until(at + setup.lookahead);
        replay.request(trace.request(at));
        if (at + 1) % inspect_every == 0 {
            replay.inspect();
        }
        progress(at + 1);
    }
    Ok(replay.finish())
}

struct Replay<'a> {
    trace: &'a Trace,
    rehearsal: Rehearsal,
    lookahead: usize,
    scale: Scale,
    capacity_pages: u64,
    hashes: Vec<Hash>,
    residents: Residents,
    hinted: VecDeque<HintId>,
    expected_until: usize,
    outcome: Outcome,
    /// Hashes of the current request.
    asked: Vec<Hash>,
}

/// The pool's content, tracked from effects, independent of the core's own index.
struct Residents {
    /// Block numbers by the first half of the hash.
    numbers: HashMap<u64, u32>,
    /// Blocks by the page of their slot; and by block, whether it is resident.
    blocks: Vec<u32>,
    is_resident: Vec<bool>,
    count: u64,
}

const NOBODY: u32 = u32::MAX;

impl Residents {
    fn new(hashes: &[Hash], pages: u64) -> Residents {
        let numbers: HashMap<u64, u32> = hashes.iter().enumerate().map(|(at, hash)| (half(hash), at as u32)).collect();
        assert_eq!(numbers.len(), hashes.len(), "two blocks have one name");
        Residents { numbers, blocks: vec![NOBODY; pages as usize], is_resident: vec![false; hashes.len()], count: 0 }
    }
}

impl Watch for Residents {
    fn arrived(&mut self, slot: SlotId, hash: &BlockHash) {
        let block = self.numbers[&half(hash.as_bytes())];
        self.blocks[slot.0 as usize] = block;
        self.is_resident[block as usize] = true;
        self.count += 1;
    }

    fn left(&mut self, slot: SlotId) {
        let block = std::mem::replace(&mut self.blocks[slot.0 as usize], NOBODY);
        if block != NOBODY {
            self.is_resident[block as usize] = false;
            self.count -= 1;
        }
    }

    fn moved(&mut self, from: SlotId, to: SlotId) {
        self.blocks.swap(from.0 as usize, to.0 as usize);
    }
}

fn half(hash: &[u8]) -> u64 {
    u64::from_le_bytes(*hash.first_chunk().expect("a hash has 16 bytes"))
}

/// Space for all blocks of the trace several times over, in pages: more makes no difference.
fn most_pages(trace: &Trace, scale: &Scale) -> u64 {
    const TIMES: u64 = 4;
    let pages = (0..trace.unique() as u32).map(|block| scale.pages[usize::from(trace.namespace_of(block))]);
    TIMES * pages.sum::<u64>() + 256
}

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, setup: Setup) -> Result<Replay<'a>> {
        let shape = |namespace| Shape { block_bytes: trace.bytes_in(namespace), attention: Attention::Full };
        let shapes: Vec<Shape> = (0..trace.shapes.len() as u16).map(shape).collect();
        let scale = Scale::of(&shapes.iter().map(|shape| shape.block_bytes).collect::<Vec<_>>());
        let capacity_bytes = setup.capacity_bytes.min(scale.bytes_of(most_pages(trace, &scale)));
        let defaults = Config::new(PAGE_BYTES, 1);
        let rehearsal = Rehearsal::new(
            &rehearsal::Setup {
                policy: setup.policy,
                seed: setup.salt,
                capacity_bytes,
                ssd: setup.ssd,
                promise_permille: 1000,
                store_batch: setup.store_batch,
                memory_entries: defaults.memory_entries,
                table_bits: defaults.table_bits,
            },
            &shapes,
        )?;
        let hashes: Vec<Hash> = (0..trace.unique() as u32).map(|block| Trace::hash(block, setup.salt)).collect();
        Ok(Replay {
            trace,
            lookahead: setup.lookahead,
            capacity_pages: scale.pages_of(setup.capacity_bytes),
            scale,
            residents: Residents::new(&hashes, rehearsal.core.capacity_bytes() / PAGE_BYTES),
            rehearsal,
            hashes,
            hinted: VecDeque::new(),
            expected_until: 0,
            outcome: Outcome { namespaces: vec![Tally::default(); shapes.len()], ..Outcome::default() },
            asked: Vec::new(),
        })
    }

    /// The requests up to `until` wait, long enough that their blocks are promoted from the disk.
    fn hint_until(&mut self, until: usize) {
        if self.lookahead == 0 {
            return;
        }
        let trace = self.trace;
        for at in self.expected_until..(until + 1).min(trace.len()) {
            let request = trace.request(at);
            self.name(request.blocks);
            let namespace = self.rehearsal.namespace(request.namespace.into());
            let id = self.rehearsal.core.hint(ENGINE, namespace, GROUP, self.asked.as_flattened(), HASH_BYTES);
            self.hinted.push_back(id);
        }
        self.expected_until = self.expected_until.max((until + 1).min(trace.len()));
        self.rehearsal.wait(&mut self.residents);
    }

    fn request(&mut self, request: Request<'_>) {
        if let Some(id) = self.hinted.pop_front() {
            self.rehearsal.core.withdraw_hint(ENGINE, id);
        }
        self.outcome.object_hits += request.blocks.iter().filter(|block| self.is_anywhere(**block)).count() as u64;
        self.name(request.blocks);
        let served = self.rehearsal.serve(request.namespace.into(), &self.asked, &mut self.residents);
        self.outcome.misses.iter_mut().zip(served.misses).for_each(|(sum, misses)| *sum += misses);
        let tally = &mut self.outcome.namespaces[request.namespace as usize];
        tally.requests += 1;
        tally.blocks += request.blocks.len() as u64;
        tally.pool_hits += served.pool_hits as u64;
        tally.prefix_hits += served.hits as u64;
    }

    fn name(&mut self, blocks: &[u32]) {
        self.asked.clear();
        self.asked.extend(blocks.iter().map(|block| self.hashes[*block as usize]));
    }

    fn is_anywhere(&self, block: u32) -> bool {
        self.residents.is_resident[block as usize] || self.has_tier_copy(block)
    }

    fn has_tier_copy(&self, block: u32) -> bool {
        let key = || Rehearsal::key(self.trace.namespace_of(block).into(), &self.hashes[block as usize]);
        self.rehearsal.disk().is_some() && self.rehearsal.core.tier_of(&key()).is_some()
    }

    fn inspect(&mut self) {
        let is_resident = |block: &u32| self.residents.is_resident[*block as usize];
        let is_orphan = |block: &u32| {
            let parent = self.trace.parent(*block);
            is_resident(block) && parent != ROOT && !self.is_anywhere(parent)
        };
        let unique = self.trace.unique() as u32;
        let orphans = (0..unique).filter(is_orphan).count() as u64;
        assert_eq!(self.residents.count, self.rehearsal.core.resident_blocks(), "effects and index disagree");
        let resident = (0..unique).filter(is_resident);
        let pages: u64 = resident.map(|block| self.scale.pages[usize::from(self.trace.namespace_of(block))]).sum();
        let capacity = self.capacity_pages;
        assert!(pages <= capacity, "{pages} pages of resident blocks are more than the capacity, {capacity}");
        if let Some((tier, disk)) = self.rehearsal.disk() {
            let known = (0..unique).filter(|block| self.has_tier_copy(*block)).count() as u64;
            let counts = [disk.blocks(), self.rehearsal.core.tier_report(tier).blocks];
            assert_eq!(counts, [known; 2], "disk and residence disagree");
        }
        self.outcome.orphan_peak = self.outcome.orphan_peak.max(orphans);
    }

    fn finish(mut self) -> Outcome {
        let core = &self.rehearsal.core;
        let stats = core.stats();
        assert_eq!(stats.keys, stats.hits + stats.miss_count(), "hits and misses do not add up to all keys");
        self.outcome.evicted = stats.evicted;
        self.outcome.moved = stats.moved;
        self.outcome.metadata_bytes = core.heap_bytes() as u64;
        self.outcome.ghost_bytes = core.ghost_bytes() as u64;
        if let Some((tier, disk)) = self.rehearsal.disk() {
            self.outcome.ssd_loaded_blocks = core.tier_report(tier).stats.promoted;
            self.outcome.ssd_written_blocks = disk.written_blocks;
            self.outcome.ssd_written_bytes = disk.written_bytes;
        }
        for tally in &self.outcome.namespaces {
            self.outcome.requests += tally.requests;
            self.outcome.blocks += tally.blocks;
            self.outcome.pool_hits += tally.pool_hits;
            self.outcome.prefix_hits += tally.prefix_hits;
        }
        self.outcome
    }
}
