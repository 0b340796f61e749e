//! How fast and how small the core is with blocks on a tier, how long its longest event is, and what the rules around a
//! tier cost.
//!
//! `cargo bench -p forebay-bench --bench tier_speed -- [Mi blocks on the tier, 1]`
//!
//! The pool is full and much smaller than the tier, so every promotion evicts: the worst case. Times are those of
//! one run; what the machine did meanwhile is in them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forebay_core::decorate::{self, Attempts, Rules, Stack, Timed};
use forebay_core::key::BlockHash;
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::Answer;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::{Limits, TierId};
use forebay_core::{BlockId, BlockKey, Config, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex};

const SLOT_BYTES: u64 = 16 << 10;
const UNIT_BYTES: u64 = 64 << 20;
const UNITS: u32 = 32;
const PROMPT: u64 = 2048;
/// Prompts that fill the pool; as many are brought up then, each of whose blocks evicts another.
const FILL: u64 = UNITS as u64 * UNIT_BYTES / SLOT_BYTES / PROMPT;
/// Operations that the driver submits at once, and that the tier has.
const BATCH: usize = 64;
const IN_FLIGHT: usize = 512;
const TURNS: u64 = 100_000;
const ENGINE: Instance = Instance(0);

fn main() {
    let blocks = forebay_bench::arguments().next().map_or(1, |count| count.parse().expect("a number")) << 20;
    let mut core = Core::new(Config { seed: 7, ..Config::new(UNIT_BYTES, UNITS) });
    (0..UNITS).for_each(|unit| core.populate(unit));
    let tier = core.open_tier(Limits::default());
    let group = GroupLayout {
        attention: Attention::Full,
        tokens_per_block: 16,
        rank_bytes: vec![SLOT_BYTES],
        is_replicated: false,
    };
    let ns = core.open_namespace(NamespaceId(1), &Layout::new(vec![(0, group)]).expect("a layout")).expect("room");
    let start = Instant::now();
    let hasher = core.tier_hasher();
    (0..blocks).for_each(|n| core.tier_found(tier, hasher.hash(&key(n))));
    println!("found at start: {:.1} M/s", blocks as f64 / start.elapsed().as_secs_f64() / 1e6);
    println!("memory: {:.1} bytes a block", core.tier_heap_bytes() as f64 / blocks as f64);

    let names =
        ["lookup that promotes", "load ended", "lookup that writes", "request counted in", "step that brings it up"];
    let mut times = names.map(|name| (name, Vec::new()));
    for prompt in 0..2 * FILL {
        if prompt == FILL {
            times.iter_mut().for_each(|(_, times)| times.clear());
        }
        run(&mut core, tier, ns, prompt * PROMPT, &mut times);
    }
    for prompt in 2 * FILL..4 * FILL {
        wait(&mut core, ns, prompt * PROMPT, &mut times);
    }
    for (name, times) in &mut times {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "{name}: {} events, p50 {:.1} us, p99 {:.1} us, max {:.1} us",
            times.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
    println!("rules around a tier: {:.0} ns an operation, {IN_FLIGHT} in flight", rules());
}

/// Brings one prompt up, a bounded number of blocks a lookup, then hits it.
fn run(core: &mut Core, tier: TierId, ns: NamespaceIndex, first: u64, times: &mut [(&str, Vec<f64>); 5]) {
    let hashes: Vec<u8> = (first..first + PROMPT).flat_map(hash).collect();
    let mut effects = Vec::new();
    loop {
        let (us, states) = look(core, ns, &hashes);
        core.take_effects(&mut effects);
        let loads: Vec<(BlockId, Generation)> = effects.drain(..).filter_map(load).collect();
        let is_up = states.iter().all(|state| *state == 1) && !states.is_empty();
        if is_up {
            break;
        }
        times[0].1.push(us);
        for (block, generation) in loads {
            let start = Instant::now();
            core.promoted(block, generation, Outcome::Loaded { length_bytes: SLOT_BYTES, checksum: 0 });
            times[1].1.push(start.elapsed().as_secs_f64() * 1e6);
        }
        core.step();
    }
    // What was just hit is on the tier already, so nothing is written; forgotten there, the next hit writes it.
    (first..first + PROMPT).for_each(|n| core.tier_evicted(tier, &key(n)));
    times[2].1.push(look(core, ns, &hashes).0);
    while core.step() {}
    loop {
        core.take_effects(&mut effects);
        let stores: Vec<BlockId> = effects.drain(..).filter_map(store).collect();
        if stores.is_empty() {
            break;
        }
        stores.into_iter().for_each(|block| _ = core.written_back(tier, block, Outcome::Stored));
    }
}

/// A request for one prompt waits until all of it is up.
fn wait(core: &mut Core, ns: NamespaceIndex, first: u64, times: &mut [(&str, Vec<f64>); 5]) {
    let hashes: Vec<u8> = (first..first + PROMPT).flat_map(hash).collect();
    let id = core.hint(ENGINE, ns, 0, &hashes, 32);
    let (mut effects, mut row) = (Vec::new(), 3);
    loop {
        let mut has_more = true;
        while has_more {
            let start = Instant::now();
            has_more = core.step();
            times[row].1.push(start.elapsed().as_secs_f64() * 1e6);
            row = 4;
        }
        core.take_effects(&mut effects);
        let loads: Vec<(BlockId, Generation)> = effects.drain(..).filter_map(load).collect();
        if loads.is_empty() {
            break;
        }
        let outcome = Outcome::Loaded { length_bytes: SLOT_BYTES, checksum: 0 };
        loads.into_iter().for_each(|(block, generation)| _ = core.promoted(block, generation, outcome));
    }
    core.withdraw_hint(ENGINE, id);
}

/// Nanoseconds that an operation takes between the driver and a tier that does nothing.
fn rules() -> f64 {
    let rules = Rules {
        limits: decorate::Limits::default(),
        attempts: Attempts::default(),
        seed: 7,
        deadline: Duration::from_secs(1),
        has_breaker: true,
    };
    let mut tier = Stack::new(Echo::default(), rules);
    let (mut ended, mut late) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for turn in 0..TURNS {
        tier.advance(Duration::from_micros(turn * 50));
        tier.poll(&mut ended);
        ended.clear();
        tier.take_late(&mut late);
        let batch: [Operation; BATCH] = std::array::from_fn(|at| {
            let n = turn * BATCH as u64 + at as u64;
            // Half of them have a deadline.
            let kind = if n.is_multiple_of(2) { OpKind::Load } else { OpKind::Store };
            Operation {
                id: OpId(n),
                kind,
                key: key(n),
                slot: None,
                length_bytes: SLOT_BYTES,
                checksum: 0,
                lineage: None,
            }
        });
        assert_eq!(tier.submit(&batch), BATCH);
    }
    assert!(late.is_empty(), "nothing takes a second");
    start.elapsed().as_secs_f64() * 1e9 / (TURNS * BATCH as u64) as f64
}

/// Ends each operation after so many later ones.
#[derive(Default)]
struct Echo(VecDeque<Completion>);

impl Tier for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let outcome = Outcome::Loaded { length_bytes: SLOT_BYTES, checksum: 0 };
        self.0.extend(batch.iter().map(|op| Completion { id: op.id, outcome }));
        batch.len()
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let over = self.0.len().saturating_sub(IN_FLIGHT - BATCH);
        completions.extend(self.0.drain(..over));
    }

    fn cancel(&mut self, _id: OpId) {}

    fn health(&self) -> Health {
        Health::Healthy
    }
}

impl Timed for Echo {
    fn advance(&mut self, _now: Duration) {}
}

/// Microseconds of the whole lookup, and the states.
fn look(core: &mut Core, ns: NamespaceIndex, hashes: &[u8]) -> (f64, Vec<u8>) {
    let mut answer = Answer::default();
    let start = Instant::now();
    let mut lookup = core.begin_lookup(Some(ENGINE), ns);
    core.look(&mut lookup, 0, hashes, 32, &mut answer);
    let lease = core.finish_lookup(lookup);
    let us = start.elapsed().as_secs_f64() * 1e6;
    core.release(ENGINE, lease);
    (us, answer.states)
}

fn load(effect: Effect) -> Option<(BlockId, Generation)> {
    if let Effect::Promote { block, generation, .. } = effect { Some((block, generation)) } else { None }
}

fn store(effect: Effect) -> Option<BlockId> {
    if let Effect::WriteBack { block, .. } = effect { Some(block) } else { None }
}

fn key(n: u64) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&hash(n)).expect("32 bytes") }
}

fn hash(n: u64) -> [u8; 32] {
    let mut hash = [7; 32];
    hash[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    hash
}
