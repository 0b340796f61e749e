//! A core with one engine's habits, for tests that tell a story.

#![allow(dead_code, reason = "each test uses a part")]

use forebay_core::key::BlockHash;
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::store::CommitOutcome;
use forebay_core::{Config, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex, SlotId};

pub const UNIT_BYTES: u64 = 64 << 10;
pub const SMALL: u64 = 4 << 10;
pub const LARGE: u64 = 40 << 10;
pub const ENGINE: Instance = Instance(0);

pub type At = (SlotId, Generation);

pub struct Rig {
    pub core: Core,
    effects: Vec<Effect>,
}

impl Rig {
    /// All units populated.
    pub fn new(units: u32) -> Rig {
        Rig::with(Config::new(UNIT_BYTES, units))
    }

    pub fn with(config: Config) -> Rig {
        let units = config.units;
        let mut core = Core::new(config);
        (0..units).for_each(|unit| core.populate(unit));
        Rig::of(core)
    }

    pub fn of(core: Core) -> Rig {
        Rig { core, effects: Vec::new() }
    }

    /// The instance is back and holds leases on these slots, and no reservation.
    pub fn resume(
        &mut self,
        instance: Instance,
        leases: &[(SlotId, Generation)],
    ) -> (LeaseId, Vec<(SlotId, Generation)>) {
        let mut resumption = self.core.begin_resume(instance);
        self.core.hold(&mut resumption, leases);
        self.core.resume(resumption, &[])
    }

    pub fn open(&mut self, id: u128, layout: &Layout) -> NamespaceIndex {
        self.core.open_namespace(NamespaceId(id), layout).expect("the layout fits")
    }

    pub fn reserve(&mut self, namespace: NamespaceIndex, count: usize) -> Vec<At> {
        let mut slots = Vec::new();
        self.core.reserve(ENGINE, namespace, 0, count, true, &mut slots);
        self.move_all();
        slots
    }

    pub fn commit(&mut self, ns: NamespaceIndex, key: u64, before: Option<u64>, at: At) -> CommitOutcome {
        self.core.commit(ENGINE, ns, 0, hash(key), before.map(hash), at, Some(0))
    }

    /// Reserves and commits these keys as one prompt, the first of them behind `before`. How many of them are
    /// there now.
    pub fn store(&mut self, ns: NamespaceIndex, before: Option<u64>, keys: &[u64]) -> usize {
        let slots = self.reserve(ns, keys.len());
        let mut before = before;
        let mut stored = 0;
        for (key, at) in keys.iter().zip(&slots) {
            let outcome = self.commit(ns, *key, before, *at);
            stored += usize::from(matches!(outcome, CommitOutcome::Stored | CommitOutcome::Duplicate));
            before = Some(*key);
        }
        stored
    }

    /// How many leading keys are ready, under a lease that is kept.
    pub fn lease(&mut self, ns: NamespaceIndex, keys: &[u64]) -> (usize, LeaseId) {
        let (answer, lease) = self.look(Some(ENGINE), ns, 0, keys);
        (answer.states.iter().filter(|state| **state == STATE_READY).count(), lease)
    }

    pub fn look(
        &mut self,
        instance: Option<Instance>,
        ns: NamespaceIndex,
        group: u16,
        keys: &[u64],
    ) -> (Answer, LeaseId) {
        let mut lookup = self.core.begin_lookup(instance, ns);
        let answer = self.look_on(&mut lookup, group, 0, keys);
        (answer, self.core.finish_lookup(lookup))
    }

    /// The answer for keys of a group, behind its first `before`.
    pub fn look_on(&mut self, lookup: &mut Lookup, group: u16, before: u64, keys: &[u64]) -> Answer {
        let mut answer = Answer::default();
        let packed: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        lookup.begin_group(before);
        for piece in packed.chunks(8 * Core::MAX_KEYS_PER_EVENT) {
            self.core.look(lookup, group, piece, 8, &mut answer);
        }
        answer
    }

    /// Asks for one key without leaving a trace in recency or statistics of leases.
    pub fn is_resident(&mut self, ns: NamespaceIndex, key: u64) -> bool {
        let mut answer = Answer::default();
        let mut lookup = self.core.begin_lookup(None, ns);
        self.core.look(&mut lookup, 0, &key.to_le_bytes(), 8, &mut answer);
        self.core.cancel_lookup(lookup);
        answer.states == [STATE_READY]
    }

    /// Why `key` is missed.
    pub fn reason(&mut self, ns: NamespaceIndex, group: u16, key: u64) -> Option<MissReason> {
        let before = self.core.stats().misses;
        let (_, lease) = self.look(Some(ENGINE), ns, group, &[key]);
        self.core.release(ENGINE, lease);
        let now = self.core.stats().misses;
        MissReason::ALL.into_iter().find(|reason| now[*reason as usize] > before[*reason as usize])
    }

    pub fn step_to_the_end(&mut self) {
        for _ in 0..100_000 {
            if !self.core.step() {
                return;
            }
        }
        panic!("steps never end");
    }

    pub fn effects(&mut self) -> Vec<Effect> {
        self.move_all();
        std::mem::take(&mut self.effects)
    }

    /// Copies at once what is to be copied.
    pub fn move_all(&mut self) {
        let mut at = self.effects.len();
        self.core.take_effects(&mut self.effects);
        while at < self.effects.len() {
            if let Effect::Move { from, generation, to, .. } = self.effects[at] {
                self.core.moved(from, generation, to, true);
                self.core.take_effects(&mut self.effects);
            }
            at += 1;
        }
    }

    pub fn audit(&self) {
        self.core.audit().unwrap_or_else(|error| panic!("audit: {error}"));
    }
}

pub fn hash(key: u64) -> BlockHash {
    BlockHash::new(&key.to_le_bytes()).expect("8 bytes are a hash")
}

pub fn group(attention: Attention, block_bytes: u64) -> GroupLayout {
    GroupLayout { attention, tokens_per_block: 16, rank_bytes: vec![block_bytes], is_replicated: false }
}

/// One full-attention group, number 0.
pub fn layout(block_bytes: u64) -> Layout {
    Layout::new(vec![(0, group(Attention::Full, block_bytes))]).expect("the layout is right")
}
