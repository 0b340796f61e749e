//! How fast and how small the core is with blocks on a tier, and how long its longest event is.
//!
//! `cargo bench -p forebay-bench --bench tier_speed -- [Mi blocks on the tier, 1]`
//!
//! The pool is full and much smaller than the tier, so every promotion evicts: the worst case. Times are those of
//! one run; what the machine did meanwhile is in them.

use std::time::Instant;

use forebay_core::key::BlockHash;
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::Answer;
use forebay_core::tier::{Location, Outcome};
use forebay_core::tiers::{Limits, TierId};
use forebay_core::{BlockId, BlockKey, Config, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex};

const SLOT_BYTES: u64 = 16 << 10;
const UNIT_BYTES: u64 = 64 << 20;
const UNITS: u32 = 32;
const PROMPT: u64 = 2048;
/// Prompts that fill the pool; as many are brought up then, each of whose blocks evicts another.
const FILL: u64 = UNITS as u64 * UNIT_BYTES / SLOT_BYTES / PROMPT;
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
    (0..blocks).for_each(|n| core.tier_found(tier, &key(n), Location(n, n)));
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
        stores.into_iter().for_each(|block| _ = core.written_back(tier, block, Outcome::Stored(Location(0, 0))));
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
