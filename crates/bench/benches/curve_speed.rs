//! What capacity curves cost: time for a key asked for, and memory, for pools of several sizes in the daemon's
//! configuration.
//!
//! `cargo bench -p forebay-bench --bench curve_speed -- [requests, 20000]`
//!
//! Prompts of 256 blocks, four pools of them, some asked for much more often than others. Beside it what one core of
//! the whole pool takes to serve the same requests: lookup, release, and the store of what it missed.

use std::time::Instant;

use forebay_core::layout::Attention;
use forebay_core::policy;
use forebay_core::tiers::Admission;
use forebay_insight::curve::{Capacities, Curve, Rules, Samples};
use forebay_insight::rehearsal::{Hash, Rehearsal, STORE_BATCH, Setup, Shape};

const BLOCK_BYTES: u64 = 4096;
const PROMPT: u64 = 256;

fn main() {
    let requests = forebay_bench::arguments().next().map_or(20_000, |count| count.parse().expect("a number"));
    println!("{:>8} {:>5} {:>10} {:>10} {:>8} {:>8}", "blocks", "disk", "ns a key", "core, ns", "heap KiB", "RSS KiB");
    for blocks in [1 << 10, 1 << 14, 1 << 20] {
        for disk_pools in [0, 4] {
            let keys = prompts(blocks, requests);
            let before = resident_bytes();
            let mut curve = Curve::new(rules(), Samples::default(), &capacities(blocks * BLOCK_BYTES, disk_pools));
            let curve_ns = time(&keys, |keys| curve.note(0, shape(), keys));
            let (heap, rss) = (curve.heap_bytes() >> 10, resident_bytes().saturating_sub(before) >> 10);
            drop(curve);
            let mut core = Rehearsal::new(&setup(blocks), &[shape()]).expect("the pool holds a block");
            let core_ns = time(&keys, |keys| {
                let hashes: Vec<Hash> =
                    keys.iter().map(|key| (u128::from(*key) << 64 | u128::from(!*key)).to_le_bytes()).collect();
                core.serve(0, &hashes, &mut ());
            });
            println!("{blocks:>8} {disk_pools:>5} {curve_ns:>10.0} {core_ns:>10.0} {heap:>8} {rss:>8}");
        }
    }
}

/// Those of the daemon, see its `insight`.
fn capacities(pool_bytes: u64, disk_pools: u64) -> Vec<Capacities> {
    let disk_bytes = disk_pools * pool_bytes;
    let pools = [1, 2, 3, 4, 8, 16, 32].map(|halves| Capacities { pool_bytes: pool_bytes / 2 * halves, disk_bytes });
    let disks = [0, 1, 2, 4, 8, 16, 32].map(|pools| Capacities { pool_bytes, disk_bytes: pools * pool_bytes });
    let mut all: Vec<Capacities> = pools.into_iter().chain(disks).collect();
    all.sort_unstable_by_key(|it| (it.pool_bytes, it.disk_bytes));
    all.dedup();
    all
}

fn rules() -> Rules {
    let (policy, admission) = (policy::ALL[0].1, Admission::SecondSighting);
    Rules { policy, seed: 1, promise_permille: 500, admission, memory_blocks: 1 << 20 }
}

fn setup(blocks: u64) -> Setup {
    Setup {
        policy: policy::ALL[0].1,
        seed: 1,
        capacity_bytes: blocks * BLOCK_BYTES,
        ssd: None,
        promise_permille: 500,
        store_batch: STORE_BATCH,
        memory_entries: 1 << 20,
        table_bits: 12,
    }
}

fn shape() -> Shape {
    Shape { block_bytes: BLOCK_BYTES, attention: Attention::Full }
}

/// Prompt number n of 1..=limit with density 1/n.
fn prompts(blocks: u64, requests: u64) -> Vec<Vec<u64>> {
    let limit = (4 * blocks / PROMPT) as f64;
    let prompt = |n: u64| limit.powf(mix(n) as f64 / u64::MAX as f64) as u64;
    (0..requests).map(|n| (0..PROMPT).map(|at| mix(prompt(n) << 32 | at)).collect()).collect()
}

/// Nanoseconds a key.
fn time(prompts: &[Vec<u64>], mut see: impl FnMut(&[u64])) -> f64 {
    let start = Instant::now();
    prompts.iter().for_each(|keys| see(keys));
    start.elapsed().as_nanos() as f64 / (prompts.len() as u64 * PROMPT) as f64
}

/// The finalizer of SplitMix64.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("the system tells");
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).expect("it has a line for it");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}
