//! Kinds of traffic in turn: the policy does not forget one kind while another one has its turn, and takes neither for
//! the whole.

use std::path::PathBuf;

use forebay_sim::policy::by_name;
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Setup, replay, store_batch};
use forebay_sim::rounds::{Order, Rounds};
use forebay_sim::trace::{ASSUMED_BLOCK_BYTES, Shape, Trace, in_turns};

const POOL: u64 = 1200;
const CYCLES: usize = 5;

fn hits(trace: &Trace, policy: &str, salt: u64) -> u64 {
    let policy = by_name(policy).unwrap();
    let capacity_bytes = POOL * ASSUMED_BLOCK_BYTES;
    let store_batch = store_batch(POOL, trace.sizes());
    replay(trace, Setup { policy, capacity_bytes, ssd: None, lookahead: 0, store_batch, salt }, |_| {})
        .unwrap()
        .prefix_hits
}

fn recorded(name: &str) -> Trace {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut trace = read(&data.join(format!("{name}.jsonl.zst")), Hints::default()).unwrap();
    trace.set_bytes(ASSUMED_BLOCK_BYTES);
    trace
}

/// Rounds over so many pools of documents of 40 blocks.
fn rounds(order: Order, pools: f64, rounds: usize, seed: u64) -> Trace {
    let documents = (pools * POOL as f64 / 40.0) as usize;
    Rounds { documents, seed, ..Rounds::new(order, rounds) }.trace()
}

fn one_time(blocks: u32) -> Trace {
    let mut trace = Trace::new("one-time", vec![Shape { block_tokens: 16, block_bytes: None }]);
    (0..blocks / 40).for_each(|at| trace.push(at.into(), 0, &(40 * at..40 * at + 40).collect::<Vec<_>>()));
    trace
}

/// Hits where both have turns of so many turnovers of the pool, beside the hits of each alone in the same pool: the
/// mean over three salts.
fn of_apart(traffic: &[(Trace, f64)]) -> f64 {
    let turn = |(at, (_, turnovers)): (usize, &(Trace, f64))| (at, (turnovers * POOL as f64) as u64);
    let traces: Vec<Trace> = traffic.iter().map(|(trace, _)| trace.clone()).collect();
    let turns: Vec<(usize, u64)> = (0..CYCLES).flat_map(|_| traffic.iter().enumerate().map(turn)).collect();
    let alone = |at: usize| {
        let own: Vec<(usize, u64)> = turns.iter().copied().filter(|(of, _)| *of == at).collect();
        in_turns(&traces, &own)
    };
    let apart: Vec<Trace> = (0..traces.len()).map(alone).collect();
    let together = in_turns(&traces, &turns);
    let of_salt = |salt| {
        let apart: u64 = apart.iter().map(|trace| hits(trace, "lhd", salt)).sum();
        hits(&together, "lhd", salt) as f64 / apart as f64
    };
    (0..3).map(of_salt).sum::<f64>() / 3.0
}

/// Six rounds, then four turnovers of something else. A policy whose evidence faded while it proved wrong had 0.57 of
/// the conversations after rounds over twice the pool (bench/reports/2026-11-30-rounds.md).
#[test]
fn rounds_and_other_traffic_in_turn_are_hit_as_often_as_they_return() {
    let rounds_of = |order, pools| (rounds(order, pools, 40, 1), 6.0 * pools);
    for (order, pools, least) in [
        (Order::Same, 1.3, [0.83, 0.83, 0.82, 0.85]),
        (Order::Same, 2.0, [0.80, 0.86, 0.80, 0.84]),
        (Order::Shuffled, 1.3, [0.82, 0.83, 0.75, 0.83]),
        (Order::Shuffled, 2.0, [0.64, 0.85, 0.70, 0.86]),
    ] {
        let others = [recorded("conv"), recorded("synth"), recorded("agents"), one_time(24_000)];
        for (other, least) in others.into_iter().zip(least) {
            let what = format!("{order:?} over {pools} of the pool, {}", other.name);
            let share = of_apart(&[rounds_of(order, pools), (other, 4.0)]);
            assert!(share >= least, "{what}: {share:.3}");
        }
    }
}

/// Two sets of documents in turn, and one that fits.
#[test]
fn rounds_over_two_sets_in_turn_are_hit_from_the_second_round_on() {
    for (order, least_of_large, least_of_small) in [(Order::Same, 0.81, 0.77), (Order::Shuffled, 0.69, 0.70)] {
        for pools in [1.3, 2.0] {
            let first = || (rounds(order, pools, 40, 1), 6.0 * pools);
            let large = of_apart(&[first(), (rounds(order, pools, 40, 7), 6.0 * pools)]);
            assert!(large >= least_of_large, "{order:?}, another set over {pools} of the pool: {large:.3}");
            let small = of_apart(&[first(), (rounds(order, 0.6, 40, 7), 4.0)]);
            assert!(small >= least_of_small, "{order:?} over {pools} of the pool, a set that fits: {small:.3}");
        }
    }
}

/// Prompts of 20 blocks that are asked twice, so many pools apart.
fn twice(pools: f64, blocks: u64) -> Trace {
    let mut trace = Trace::new("twice", vec![Shape { block_tokens: 16, block_bytes: None }]);
    let apart = (pools * POOL as f64 / 20.0) as usize;
    let mut first = Vec::new();
    for at in 0..blocks as usize / 20 {
        let is_return = at % (2 * apart) >= apart;
        let start = if is_return { first[at - apart] } else { trace.unique() as u32 };
        first.push(start);
        trace.push(at as u64, 0, &(start..start + 20).collect::<Vec<_>>());
    }
    trace
}

/// That nothing returns in a burst says nothing of what comes after it. A policy whose evidence faded in the burst had
/// 0.89 of the hits of `lru` (bench/reports/2026-11-30-memories.md).
#[test]
fn prompts_that_are_asked_twice_outlive_bursts_of_one_time_blocks() {
    for pools in [0.4, 0.8] {
        let traces = [twice(pools, 60 * POOL), one_time(60 * POOL as u32)];
        let turns: Vec<(usize, u64)> = (0..12).flat_map(|_| [(0, 4 * POOL), (1, 3 * POOL)]).collect();
        let both = in_turns(&traces, &turns);
        let [lhd, lru] = ["lhd", "lru"].map(|policy| (0..3).map(|salt| hits(&both, policy, salt)).sum::<u64>());
        assert!(lhd * 100 >= lru * 97, "{pools} pools apart: {lhd} hits, lru {lru}");
    }
}

/// The same prompts again and again, which together are so many pools long.
fn again(pools: f64, turnovers: u64) -> Trace {
    let mut trace = Trace::new("again", vec![Shape { block_tokens: 16, block_bytes: None }]);
    let prompts = (pools * POOL as f64 / 40.0) as u32;
    for at in 0..(turnovers * POOL / 40) as u32 {
        let start = at % prompts * 40;
        trace.push(at.into(), 0, &(start..start + 40).collect::<Vec<_>>());
    }
    trace
}

/// Nothing is evicted while all blocks fit, so the policy learns all of that time at once when it has ended. One that
/// counted each of its hits had 0.22 to 0.79 of the hits that a fresh pool has
/// (bench/reports/2026-11-30-after-all-fitted.md).
#[test]
fn a_long_time_in_which_all_fitted_is_not_believed_for_as_long() {
    let hits = |trace: &Trace| (0..2).map(|salt| hits(trace, "lhd", salt)).sum::<u64>() as f64;
    for (order, pools) in [(Order::Shuffled, 3.0), (Order::Shuffled, 2.0), (Order::Same, 2.0)] {
        let later = (rounds(order, pools, 40, 7), 30 * POOL);
        let fresh = hits(&in_turns(std::slice::from_ref(&later.0), &[(0, later.1)]));
        for turnovers in [100, 500] {
            let first = again(0.9, turnovers);
            let both = in_turns(&[first.clone(), later.0.clone()], &[(0, turnovers * POOL), (1, later.1)]);
            let share = (hits(&both) - hits(&first)) / fresh;
            let what = format!("{order:?} over {pools} of the pool after {turnovers} turnovers that fitted");
            println!("{what}: {share:.3}");
            assert!(share >= 0.8, "{what}: {share:.3}");
        }
    }
}
