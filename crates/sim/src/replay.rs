//! One trace through the real core: one policy, one capacity, one request after another.
//!
//! Each request is looked up, its lease released, and what it missed stored in pieces of [`store_batch`] slots,
//! every commit before the next request: the order in which one engine without overlap would ask a daemon. A
//! daemon that is asked the same way (see [`keys`]) gives the same hits.

use forebay_core::core::Effect;
use forebay_core::expect::ExpectationId;
use forebay_core::key::{Instance, NamespaceId};
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::load::{Answer, STATE_READY};
use forebay_core::policy::Make;
use forebay_core::store::CommitOutcome;
use forebay_core::{BlockHash, Config, Core, Error, Generation, Result, SlotId};

use crate::capacity::ASSUMED_BLOCK_BYTES;
use crate::trace::{Request, Trace};

/// Slots asked for at once; fewer where the whole cache is small, so that one request does not evict much of
/// itself.
pub const STORE_BATCH: usize = 16;
/// Length of the hashes on the wire.
pub const HASH_BYTES: usize = 16;

const ENGINE: Instance = Instance(0);
/// Holds what is left of the last unit, so that the capacity is exact.
const BALLAST: Instance = Instance(1);
const GROUP: u16 = 0;
/// How often the residents are checked for blocks without parents.
const INSPECTIONS: usize = 32;

#[derive(Clone, Copy)]
pub struct Setup {
    pub policy: Make,
    pub capacity_blocks: u64,
    /// How many requests wait behind the one being served, told to the core by `expect`.
    pub lookahead: usize,
    /// Slots asked for at once.
    pub store_batch: usize,
    /// Renames all blocks; results must not depend on it but by chance.
    pub salt: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub requests: u64,
    pub blocks: u64,
    /// Blocks that were resident when asked for.
    pub object_hits: u64,
    /// Of those, the ones that could be used: no block before them was missing.
    pub prefix_hits: u64,
    /// The most residents without a resident parent, of [`INSPECTIONS`] looks.
    pub orphan_peak: u64,
    pub evicted: u64,
    pub metadata_bytes: u64,
    pub ghost_bytes: u64,
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

/// Errors with `Invalid` if the trace mixes block sizes. Calls `progress` with the number of requests done.
pub fn replay(trace: &Trace, setup: Setup, mut progress: impl FnMut(usize)) -> Result<Outcome> {
    let mut replay = Replay::new(trace, setup)?;
    let inspect_every = (trace.len() / INSPECTIONS).max(1);
    for at in 0..trace.len() {
        replay.expect_until(trace, at + setup.lookahead);
        replay.request(trace.request(at));
        if (at + 1) % inspect_every == 0 {
            replay.inspect(trace);
            progress(at + 1);
        }
    }
    Ok(replay.finish())
}

struct Replay {
    core: Core,
    setup: Setup,
    namespaces: Vec<forebay_core::block::NamespaceIndex>,
    hashes: Vec<[u8; HASH_BYTES]>,
    /// Block by slot, and whether it is resident by block: kept from effects, apart from the core's own index.
    blocks: Vec<u32>,
    is_resident: Vec<bool>,
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

impl Replay {
    fn new(trace: &Trace, setup: Setup) -> Result<Replay> {
        let bytes = trace.shapes[0].block_bytes;
        if trace.shapes.iter().any(|shape| shape.block_bytes != bytes) {
            return Err(Error::invalid("blocks of several sizes cannot be compared with one capacity in blocks"));
        }
        let (unit_slots, units) = pool_shape(setup.capacity_blocks);
        let mut config = Config::new(unit_slots * ASSUMED_BLOCK_BYTES, units);
        config.policy = setup.policy;
        config.seed = setup.salt;
        config.promise_permille = 1000;
        config.reserve_permille = 1000;
        let mut core = Core::new(config);
        (0..units).for_each(|unit| core.populate(unit));
        let group = |tokens| GroupLayout {
            attention: Attention::Full,
            tokens_per_block: tokens,
            rank_bytes: vec![ASSUMED_BLOCK_BYTES],
            is_replicated: false,
        };
        let namespaces = trace.shapes.iter().enumerate().map(|(at, shape)| {
            core.open_namespace(NamespaceId(at as u128 + 1), &Layout::new(vec![(GROUP, group(shape.block_tokens))])?)
        });
        let namespaces = namespaces.collect::<Result<Vec<_>>>()?;
        let slots = u64::from(units) * unit_slots;
        let mut ballast = Vec::new();
        while (ballast.len() as u64) < slots - setup.capacity_blocks {
            let missing = slots - setup.capacity_blocks - ballast.len() as u64;
            let count = missing.min(Core::MAX_RESERVE_PER_EVENT as u64) as usize;
            core.reserve(BALLAST, namespaces[0], GROUP, count, false, &mut ballast);
        }
        Ok(Replay {
            core,
            setup,
            namespaces,
            hashes: (0..trace.unique() as u32).map(|block| Trace::hash(block, setup.salt)).collect(),
            blocks: vec![NOBODY; slots as usize],
            is_resident: vec![false; trace.unique()],
            expected: Default::default(),
            expected_until: 0,
            outcome: Outcome::default(),
            packed: Vec::new(),
            answer: Answer::default(),
            slots: Vec::new(),
            effects: Vec::new(),
        })
    }

    /// The requests up to `until` wait.
    fn expect_until(&mut self, trace: &Trace, until: usize) {
        if self.setup.lookahead == 0 {
            return;
        }
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
        let hits = self.lookup(request);
        self.outcome.requests += 1;
        self.outcome.blocks += request.blocks.len() as u64;
        self.outcome.prefix_hits += hits as u64;
        self.outcome.object_hits += request.blocks.iter().filter(|b| self.is_resident[**b as usize]).count() as u64;
        self.store(request, hits);
        while self.core.step() {}
        self.follow_effects();
    }

    fn lookup(&mut self, request: Request<'_>) -> usize {
        self.pack(request.blocks);
        self.answer.states.clear();
        self.answer.slots.clear();
        self.answer.generations.clear();
        let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespaces[request.namespace as usize]);
        for piece in self.packed.chunks(Core::MAX_KEYS_PER_EVENT * HASH_BYTES) {
            self.core.look(&mut lookup, GROUP, piece, HASH_BYTES, &mut self.answer);
        }
        let lease = self.core.finish_lookup(lookup);
        self.core.release(ENGINE, lease);
        self.answer.states.iter().take_while(|state| **state == STATE_READY).count()
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
                    let block = request.blocks[at];
                    self.blocks[slot.0.0 as usize] = block;
                    self.is_resident[block as usize] = true;
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
        self.core.take_effects(&mut self.effects);
        for effect in self.effects.drain(..) {
            if let Effect::Freed { slot, .. } = effect {
                let block = std::mem::replace(&mut self.blocks[slot.0 as usize], NOBODY);
                if block != NOBODY {
                    self.is_resident[block as usize] = false;
                }
            }
        }
    }

    fn inspect(&mut self, trace: &Trace) {
        let is_orphan = |block: &u32| {
            let parent = trace.parent(*block);
            self.is_resident[*block as usize] && parent != crate::trace::ROOT && !self.is_resident[parent as usize]
        };
        let orphans = (0..trace.unique() as u32).filter(is_orphan).count() as u64;
        let residents = self.is_resident.iter().filter(|is_resident| **is_resident).count() as u64;
        assert_eq!(residents, self.core.resident_blocks(), "effects and index disagree");
        assert!(residents <= self.setup.capacity_blocks, "{residents} resident blocks are more than the capacity");
        self.outcome.orphan_peak = self.outcome.orphan_peak.max(orphans);
    }

    fn finish(mut self) -> Outcome {
        self.outcome.evicted = self.core.stats().evicted;
        self.outcome.metadata_bytes = self.core.heap_bytes() as u64;
        self.outcome.ghost_bytes = self.core.ghost_bytes() as u64;
        self.outcome
    }
}

/// (slots of a unit, units) with room for `capacity` slots: few enough units that finding one is cheap.
fn pool_shape(capacity: u64) -> (u64, u32) {
    let unit_slots = (capacity / 256).next_power_of_two().clamp(256, 1 << 18);
    (unit_slots, capacity.div_ceil(unit_slots) as u32)
}
