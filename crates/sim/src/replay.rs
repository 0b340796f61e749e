//! One trace through the real core: one policy, one capacity of each tier, one request after another.
//!
//! Each request is looked up, again while something of it is on its way up from the disk, its lease released, and
//! what it missed stored in pieces of [`store_batch`] slots, every commit before the next request: the order in which
//! one engine without overlap would ask a daemon. A daemon that is asked the same way (see [`keys`]) gives the same
//! hits. What the disk is given is written, and what it is asked for is loaded, before the next event.

use forebay_core::below::{Admission, Limits, TierId};
use forebay_core::block::NamespaceIndex;
use forebay_core::core::Effect;
use forebay_core::expect::ExpectationId;
use forebay_core::key::{Instance, NamespaceId};
use forebay_core::load::{Answer, LeaseId, STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::policy::Make;
use forebay_core::store::CommitOutcome;
use forebay_core::tier::{Location, Outcome as Ended};
use forebay_core::{BlockHash, BlockKey, Core, Generation, Result, SlotId};

use crate::disk::Disk;
use crate::pool::{self, Scale};
use crate::trace::{ROOT, Request, Trace};

/// Slots asked for at once; fewer where the whole cache is small, so that one request does not evict much of
/// itself.
pub const STORE_BATCH: usize = 16;
/// Length of the hashes on the wire.
pub const HASH_BYTES: usize = 16;

const ENGINE: Instance = Instance(0);
pub(crate) const GROUP: u16 = 0;
/// How often the residents are checked for blocks without parents.
const INSPECTIONS: usize = 32;
/// Lookups of a request that may bring nothing new up before it is served with what there is.
const MAX_IDLE: usize = 16;

#[derive(Clone, Copy)]
pub struct Setup {
    pub policy: Make,
    pub capacity_bytes: u64,
    /// The disk under the pool, if there is one.
    pub ssd: Option<Ssd>,
    /// How many requests wait behind the one being served, told to the core by `expect`.
    pub lookahead: usize,
    /// Slots asked for at once.
    pub store_batch: usize,
    /// Renames all blocks; results must not depend on it but by chance.
    pub salt: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Ssd {
    pub capacity_bytes: u64,
    pub admission: Admission,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub requests: u64,
    pub blocks: u64,
    /// Blocks that were on any tier when asked for.
    pub object_hits: u64,
    /// Of those, the ones that could be used: no block before them was missing.
    pub prefix_hits: u64,
    /// Of those, the ones that were in the pool already.
    pub pool_hits: u64,
    /// Why the others were none, by `MissReason as usize`.
    pub misses: [u64; MissReason::ALL.len()],
    pub namespaces: Vec<Tally>,
    /// The most residents of the pool that no prefix on any tier can reach, of [`INSPECTIONS`] looks.
    pub orphan_peak: u64,
    pub evicted: u64,
    /// Blocks that were copied to other slots, because another size got the memory they lay in.
    pub moved: u64,
    pub ssd_written_blocks: u64,
    pub ssd_written_bytes: u64,
    pub metadata_bytes: u64,
    pub ghost_bytes: u64,
}

/// Of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub requests: u64,
    pub blocks: u64,
    pub pool_hits: u64,
    pub prefix_hits: u64,
}

/// The requests of a trace as a daemon would be asked: namespace and hashes, in order.
pub fn keys(trace: &Trace, salt: u64) -> impl Iterator<Item = (u16, Vec<[u8; HASH_BYTES]>)> {
    trace
        .requests()
        .map(move |request| (request.namespace, request.blocks.iter().map(|block| Trace::hash(*block, salt)).collect()))
}

/// How many slots a request may ask for at once in a cache of this size.
pub fn store_batch(capacity_blocks: u64) -> usize {
    (capacity_blocks / 16).clamp(1, STORE_BATCH as u64) as usize
}

/// Errors with `Full` if the pool cannot hold a block. Calls `progress` with the number of requests done.
pub fn replay(trace: &Trace, setup: Setup, mut progress: impl FnMut(usize)) -> Result<Outcome> {
    let mut replay = Replay::new(trace, setup)?;
    let inspect_every = (trace.len() / INSPECTIONS).max(1);
    for at in 0..trace.len() {
        replay.expect_until(at + setup.lookahead);
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
    core: Core,
    setup: Setup,
    scale: Scale,
    namespaces: Vec<NamespaceIndex>,
    ssd: Option<(TierId, Disk)>,
    hashes: Vec<[u8; HASH_BYTES]>,
    /// Block by page of its slot, and whether it is resident by block: kept from effects, apart from the core's own
    /// index.
    blocks: Vec<u32>,
    is_resident: Vec<bool>,
    residents: u64,
    expected: std::collections::VecDeque<ExpectationId>,
    expected_until: usize,
    outcome: Outcome,
    // Scratch, to allocate once.
    packed: Vec<u8>,
    answer: Answer,
    slots: Vec<(SlotId, Generation)>,
    effects: Vec<Effect>,
}

const NOBODY: u32 = u32::MAX;

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, setup: Setup) -> Result<Replay<'a>> {
        let scale = Scale::of(trace);
        let (pages, mut core, namespaces) = pool::open(trace, &setup, &scale)?;
        let ssd = setup.ssd.map(|ssd| {
            let tier = core.open_tier(Limits { admission: ssd.admission, ..Limits::default() });
            (tier, Disk::new(ssd.capacity_bytes, trace.unique()))
        });
        Ok(Replay {
            trace,
            core,
            setup,
            scale,
            ssd,
            hashes: (0..trace.unique() as u32).map(|block| Trace::hash(block, setup.salt)).collect(),
            blocks: vec![NOBODY; pages as usize],
            is_resident: vec![false; trace.unique()],
            residents: 0,
            expected: Default::default(),
            expected_until: 0,
            outcome: Outcome { namespaces: vec![Tally::default(); namespaces.len()], ..Outcome::default() },
            namespaces,
            packed: Vec::new(),
            answer: Answer::default(),
            slots: Vec::new(),
            effects: Vec::new(),
        })
    }

    /// The requests up to `until` wait.
    fn expect_until(&mut self, until: usize) {
        if self.setup.lookahead == 0 {
            return;
        }
        let trace = self.trace;
        for at in self.expected_until..(until + 1).min(trace.len()) {
            let request = trace.request(at);
            self.pack(request.blocks);
            let namespace = self.namespaces[request.namespace as usize];
            let id = self.core.expect(ENGINE, namespace, GROUP, &self.packed, HASH_BYTES);
            self.expected.push_back(id);
        }
        self.expected_until = self.expected_until.max((until + 1).min(trace.len()));
        while self.core.step() {}
    }

    fn request(&mut self, request: Request<'_>) {
        if let Some(id) = self.expected.pop_front() {
            self.core.met(ENGINE, id);
        }
        self.outcome.object_hits += request.blocks.iter().filter(|block| self.is_anywhere(**block)).count() as u64;
        let (pool_hits, hits) = self.fetch(request);
        let tally = &mut self.outcome.namespaces[request.namespace as usize];
        tally.requests += 1;
        tally.blocks += request.blocks.len() as u64;
        tally.pool_hits += pool_hits as u64;
        tally.prefix_hits += hits as u64;
        self.store(request, hits);
        while self.core.step() {}
        self.follow_effects();
    }

    /// Blocks of the prefix that were in the pool, and all that are there once nothing more comes up.
    fn fetch(&mut self, request: Request<'_>) -> (usize, usize) {
        let before = self.core.stats().misses;
        let (mut lease, pool_hits) = self.lookup(request);
        let (mut last, mut hits, mut idle) = (before, pool_hits, 0);
        while self.answer.states.contains(&STATE_NOT_YET) && idle < MAX_IDLE {
            self.follow_effects();
            last = self.core.stats().misses;
            let (next, found) = self.lookup(request);
            self.core.release(ENGINE, lease);
            lease = next;
            idle = if found > hits { 0 } else { idle + 1 };
            hits = found;
        }
        self.core.release(ENGINE, lease);
        for (reason, count) in self.core.stats().misses.iter().enumerate() {
            self.outcome.misses[reason] += count - last[reason];
        }
        (pool_hits, hits)
    }

    fn lookup(&mut self, request: Request<'_>) -> (LeaseId, usize) {
        self.pack(request.blocks);
        self.answer.states.clear();
        self.answer.slots.clear();
        self.answer.generations.clear();
        let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespaces[request.namespace as usize]);
        for piece in self.packed.chunks(Core::MAX_KEYS_PER_EVENT * HASH_BYTES) {
            self.core.look(&mut lookup, GROUP, piece, HASH_BYTES, &mut self.answer);
        }
        let lease = self.core.finish_lookup(lookup);
        (lease, self.answer.states.iter().take_while(|state| **state == STATE_READY).count())
    }

    fn store(&mut self, request: Request<'_>, hits: usize) {
        let namespace = self.namespaces[request.namespace as usize];
        let hash = |replay: &Replay, at: usize| {
            BlockHash::new(&replay.hashes[request.blocks[at] as usize]).expect("16 bytes are a hash")
        };
        let mut at = hits;
        while at < request.blocks.len() {
            let batch = self.setup.store_batch.min(request.blocks.len() - at);
            self.slots.clear();
            self.core.reserve(ENGINE, namespace, GROUP, batch, false, &mut self.slots);
            let slots = std::mem::take(&mut self.slots);
            let is_full = slots.len() < batch;
            // Freed slots are noted before they are filled again.
            self.follow_effects();
            for slot in &slots {
                let predecessor = at.checked_sub(1).map(|before| hash(self, before));
                let outcome = self.core.commit(ENGINE, namespace, GROUP, hash(self, at), predecessor, *slot, true);
                if outcome == CommitOutcome::Stored {
                    self.arrive(slot.0, request.blocks[at]);
                }
                at += 1;
            }
            self.slots = slots;
            // What comes behind a block that could not be stored could never be hit.
            if is_full {
                return;
            }
        }
    }

    fn pack(&mut self, blocks: &[u32]) {
        self.packed.clear();
        blocks.iter().for_each(|block| self.packed.extend_from_slice(&self.hashes[*block as usize]));
    }

    fn follow_effects(&mut self) {
        loop {
            self.core.take_effects(&mut self.effects);
            let effects = std::mem::take(&mut self.effects);
            if effects.is_empty() {
                return;
            }
            effects.iter().for_each(|effect| self.follow(*effect));
            self.effects = effects;
            self.effects.clear();
        }
    }

    fn follow(&mut self, effect: Effect) {
        match effect {
            Effect::Freed { slot, .. } => {
                let block = std::mem::replace(&mut self.blocks[slot.0 as usize], NOBODY);
                if block != NOBODY {
                    self.is_resident[block as usize] = false;
                    self.residents -= 1;
                }
            }
            Effect::Load { block, slot, generation, .. } => {
                let place = self.core.place_below(&self.core.key_below(block));
                let number = place.map(|place| place.at.0 as u32);
                let (_, disk) = self.ssd.as_mut().expect("only a tier is loaded from");
                let outcome = match number.filter(|number| disk.read(*number)) {
                    Some(_) => Ended::Loaded { length_bytes: self.core.length_below(block), checksum: 0 },
                    None => Ended::Absent,
                };
                if self.core.loaded(block, generation, outcome) {
                    self.arrive(slot, number.expect("it was loaded"));
                }
            }
            Effect::Move { from, slot, generation, to, to_slot } => {
                let is_moved = self.core.moved(from, generation, to, true);
                if is_moved {
                    self.blocks.swap(slot.0 as usize, to_slot.0 as usize);
                }
            }
            Effect::Store { tier, block, slot, .. } => {
                let number = self.blocks[slot.0 as usize];
                assert!(number != NOBODY, "{slot:?} is written down and holds nothing");
                let is_kept = self.core.stored(tier, block, Ended::Stored(Location(number.into(), 0)));
                assert!(is_kept, "nothing is purged here");
                self.write(tier, number);
            }
            _ => {}
        }
    }

    fn write(&mut self, tier: TierId, block: u32) {
        let (_, disk) = self.ssd.as_mut().expect("only a tier is written to");
        disk.write(block, self.trace.block_bytes(block));
        for gone in std::mem::take(&mut disk.given_up) {
            let namespace = NamespaceId(u128::from(self.trace.namespace_of(gone)) + 1);
            let hash = BlockHash::new(&self.hashes[gone as usize]).expect("16 bytes are a hash");
            self.core.tier_evicted(tier, &BlockKey { namespace, group: GROUP, hash });
        }
    }

    fn arrive(&mut self, slot: SlotId, block: u32) {
        self.blocks[slot.0 as usize] = block;
        self.is_resident[block as usize] = true;
        self.residents += 1;
    }

    fn is_anywhere(&self, block: u32) -> bool {
        self.is_resident[block as usize] || self.ssd.as_ref().is_some_and(|(_, disk)| disk.holds(block))
    }

    fn inspect(&mut self) {
        let is_orphan = |block: &u32| {
            let parent = self.trace.parent(*block);
            self.is_resident[*block as usize] && parent != ROOT && !self.is_anywhere(parent)
        };
        let unique = self.trace.unique() as u32;
        let orphans = (0..unique).filter(is_orphan).count() as u64;
        assert_eq!(self.residents, self.core.resident_blocks(), "effects and index disagree");
        let resident = (0..unique).filter(|block| self.is_resident[*block as usize]);
        let pages: u64 = resident.map(|block| self.scale.pages[usize::from(self.trace.namespace_of(block))]).sum();
        let capacity = self.scale.pages_of(self.setup.capacity_bytes);
        assert!(pages <= capacity, "{pages} pages of resident blocks are more than the capacity, {capacity}");
        if let Some((tier, disk)) = &self.ssd {
            let held = (0..unique).filter(|block| disk.holds(*block)).count() as u64;
            assert_eq!(held, self.core.tier_report(*tier).blocks, "disk and residence disagree");
        }
        self.outcome.orphan_peak = self.outcome.orphan_peak.max(orphans);
    }

    fn finish(mut self) -> Outcome {
        let stats = self.core.stats();
        assert_eq!(stats.keys, stats.hits + stats.miss_count(), "hits and misses do not add up to all keys");
        self.outcome.evicted = stats.evicted;
        self.outcome.moved = stats.moved;
        self.outcome.metadata_bytes = self.core.heap_bytes() as u64;
        self.outcome.ghost_bytes = self.core.ghost_bytes() as u64;
        if let Some((_, disk)) = &self.ssd {
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
