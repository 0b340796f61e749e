//! The core's hot loops, each in a function of its own that is never inlined: `tools/instructions.py` runs them below
//! callgrind and compares the instructions that a key takes with `bench/instructions.json`.
//!
//! The core is deterministic, so the counts are too; times on a busy machine are not.

use std::ops::Range;

use forebay_bench::blocks::{hash, layout};
use forebay_core::key::BlockHash;
use forebay_core::lookup::{Answer, LeaseId};
use forebay_core::recover::Resumption;
use forebay_core::{Config, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex, SlotId};

type Slot = (SlotId, Generation);

const SLOT_BYTES: u64 = 16 << 10;
const UNIT_BYTES: u64 = 256 << 20;
const UNITS: u32 = 4;
const ENGINE: Instance = Instance(0);
/// Blocks of a prompt, and of a reservation and the commit after it.
const PROMPT: usize = Core::MAX_RESERVE_PER_EVENT;
const HASH_BYTES: usize = 32;
const PROMPTS: usize = (UNITS as u64 * UNIT_BYTES / SLOT_BYTES) as usize / PROMPT;
/// Leases that an engine has when it resumes and when it is gone: a quarter of the pool.
const LEASES: usize = PROMPTS / 4;

fn main() {
    let mut bench = Bench::new();
    for prompt in 0..PROMPTS {
        let slots = reserve_free(&mut bench, prompt);
        commit_free(&mut bench, prompt, &slots);
    }
    let mut answer = Answer::default();
    for nth in 0..PROMPTS {
        let prompt = nth * 37 % PROMPTS;
        let lease = look_up(&mut bench, prompt, &mut answer);
        assert_eq!(answer.slots.len(), PROMPT, "every block is resident");
        release(&mut bench, lease);
        touch(&mut bench);
    }
    for prompt in PROMPTS..2 * PROMPTS {
        let slots = reserve_evicting(&mut bench, prompt);
        commit_full(&mut bench, prompt, &slots);
    }
    assert_eq!(bench.core.stats().evicted as usize, PROMPTS * PROMPT, "each store evicts one");
    for nth in 0..PROMPTS / LEASES {
        let first = PROMPTS + nth * LEASES;
        let held = bench.lease(first..first + LEASES);
        let resumption = hold(&mut bench, &held);
        resume(&mut bench, resumption);
        unpin(&mut bench);
        gone(&mut bench);
        unpin(&mut bench);
    }
    assert_eq!(bench.core.held(), Default::default());
    bench.core.audit().expect("the core's books are right");
    println!("{}", PROMPTS * PROMPT);
}

struct Bench {
    core: Core,
    namespace: NamespaceIndex,
    effects: Vec<Effect>,
    /// Of all prompts, so that no counted function makes names.
    hashes: Vec<Vec<BlockHash>>,
    bytes: Vec<Vec<u8>>,
}

impl Bench {
    fn new() -> Bench {
        let mut core = Core::new(Config::new(UNIT_BYTES, UNITS));
        (0..UNITS).for_each(|unit| core.populate(unit));
        let namespace = core.open_namespace(NamespaceId(1), &layout(SLOT_BYTES)).expect("the layout is right");
        let resumption = core.begin_resume(ENGINE);
        core.resume(resumption, &[]);
        let names = |prompt| (0..PROMPT).map(move |position| hash(prompt, position));
        let prompts = 0..2 * PROMPTS;
        let hashes = |prompt| names(prompt).map(|name| BlockHash::new(&name).expect("32 bytes")).collect();
        Bench {
            core,
            namespace,
            effects: Vec::new(),
            hashes: prompts.clone().map(hashes).collect(),
            bytes: prompts.map(|prompt| names(prompt).flatten().collect()).collect(),
        }
    }

    fn reserve(&mut self, prompt: usize) -> Vec<Slot> {
        let mut slots = Vec::with_capacity(PROMPT);
        self.core.reserve(ENGINE, self.namespace, 0, self.hashes[prompt].len(), true, &mut slots);
        self.take_effects();
        slots
    }

    fn commit(&mut self, prompt: usize, slots: &[Slot]) {
        let hashes = &self.hashes[prompt];
        self.core.prepare_commits(self.namespace, 0, hashes);
        let mut predecessor = None;
        for (&hash, &slot) in hashes.iter().zip(slots) {
            self.core.commit(ENGINE, self.namespace, 0, hash, predecessor, slot, Some(0));
            predecessor = Some(hash);
        }
        self.take_effects();
    }

    fn look_up(&mut self, prompt: usize, answer: &mut Answer) -> LeaseId {
        answer.states.clear();
        answer.slots.clear();
        answer.generations.clear();
        let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespace);
        self.core.look(&mut lookup, 0, &self.bytes[prompt], HASH_BYTES, answer);
        let lease = self.core.finish_lookup(lookup);
        self.take_effects();
        lease
    }

    /// Looks up these prompts, each under a lease of its own, and works off the touches.
    fn lease(&mut self, prompts: Range<usize>) -> Vec<Slot> {
        let (mut held, mut answer) = (Vec::new(), Answer::default());
        for prompt in prompts {
            self.look_up(prompt, &mut answer);
            held.extend(answer.slots.iter().map(|s| SlotId(*s)).zip(answer.generations.iter().map(|g| Generation(*g))));
        }
        assert_eq!(held.len(), LEASES * PROMPT, "every block is resident");
        self.work_off();
        held
    }

    fn work_off(&mut self) {
        while self.core.step() {}
        self.take_effects();
    }

    fn take_effects(&mut self) {
        self.core.take_effects(&mut self.effects);
        self.effects.clear();
    }
}

#[inline(never)]
fn reserve_free(bench: &mut Bench, prompt: usize) -> Vec<Slot> {
    bench.reserve(prompt)
}

#[inline(never)]
fn commit_free(bench: &mut Bench, prompt: usize, slots: &[Slot]) {
    bench.commit(prompt, slots);
}

#[inline(never)]
fn look_up(bench: &mut Bench, prompt: usize, answer: &mut Answer) -> LeaseId {
    bench.look_up(prompt, answer)
}

#[inline(never)]
fn release(bench: &mut Bench, lease: LeaseId) {
    bench.core.release(ENGINE, lease);
    bench.take_effects();
}

#[inline(never)]
fn touch(bench: &mut Bench) {
    bench.core.step();
    bench.take_effects();
}

#[inline(never)]
fn reserve_evicting(bench: &mut Bench, prompt: usize) -> Vec<Slot> {
    bench.reserve(prompt)
}

#[inline(never)]
fn commit_full(bench: &mut Bench, prompt: usize, slots: &[Slot]) {
    bench.commit(prompt, slots);
}

#[inline(never)]
fn hold(bench: &mut Bench, held: &[Slot]) -> Resumption {
    let mut resumption = bench.core.begin_resume(ENGINE);
    held.chunks(Core::MAX_HELD_PER_EVENT).for_each(|piece| bench.core.hold(&mut resumption, piece));
    bench.take_effects();
    resumption
}

#[inline(never)]
fn resume(bench: &mut Bench, resumption: Resumption) {
    bench.core.resume(resumption, &[]);
    bench.take_effects();
}

#[inline(never)]
fn gone(bench: &mut Bench) {
    bench.core.instance_gone(ENGINE);
    bench.take_effects();
}

/// What an event leaves of the leases that it ended; twice for each key.
#[inline(never)]
fn unpin(bench: &mut Bench) {
    bench.work_off();
}
