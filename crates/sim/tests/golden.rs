//! Hit counts on cut traces are exact: any change of a policy or of the core's order of events shows here.
//!
//! A change that is meant is taken over with `UPDATE_GOLDEN=1 cargo test -p forebay-sim --test golden`.

use std::fmt::Write;
use std::path::PathBuf;

use forebay_core::tiers::Admission;
use forebay_insight::ceiling::Ceiling;
use forebay_insight::curve::{Capacities, Curve, Rules, Samples};
use forebay_sim::bounds::{NextUses, opt_prefix_hits};
use forebay_sim::estimate::note;
use forebay_sim::mix::with_one_time_requests;
use forebay_sim::policy::{self, ALL};
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Setup, Ssd, keys, store_batch};
use forebay_sim::rounds::{Order, Rounds};
use forebay_sim::{Outcome, Trace, replay};

const CUTS: [&str; 3] = ["conv", "synth", "agents"];
const SHARES: [f64; 3] = [0.02, 0.05, 0.2];

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn cut(name: &str) -> Trace {
    read(&data(&format!("{name}.jsonl.zst")), Hints::default()).unwrap()
}

fn run(trace: &Trace, policy: &str, capacity_blocks: u64, lookahead: usize, salt: u64) -> Outcome {
    replay(trace, Setup { lookahead, salt, ..setup(trace, policy, capacity_blocks) }, |_| {}).unwrap()
}

fn setup(trace: &Trace, policy: &str, capacity_blocks: u64) -> Setup {
    let policy = policy::by_name(policy).unwrap();
    let capacity_bytes = capacity_blocks * trace.bytes_in(0);
    Setup { policy, capacity_bytes, ssd: None, lookahead: 0, store_batch: store_batch(capacity_blocks, 1), salt: 0 }
}

fn capacity(trace: &Trace, share: f64) -> u64 {
    (trace.unique() as f64 * share) as u64
}

#[test]
fn hit_counts_are_those_of_the_golden_file() {
    let mut text = String::from("trace blocks policy lookahead prefix_hits object_hits evicted opt infinite\n");
    for name in CUTS {
        let trace = cut(name);
        let next_uses = NextUses::of(&trace);
        for share in SHARES {
            let blocks = capacity(&trace, share);
            let opt = opt_prefix_hits(&trace, &next_uses, blocks as usize);
            for (policy, lookahead) in ALL.map(|(policy, _)| (policy, 0)).into_iter().chain([("default", 16)]) {
                let Outcome { prefix_hits, object_hits, evicted, .. } = run(&trace, policy, blocks, lookahead, 0);
                let infinite = trace.infinite_hits();
                let _ = writeln!(
                    text,
                    "{name} {blocks} {policy} {lookahead} {prefix_hits} {object_hits} {evicted} {opt} {infinite}"
                );
            }
        }
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(data("golden.txt"), &text).unwrap();
    }
    let golden = std::fs::read_to_string(data("golden.txt")).unwrap();
    for (now, before) in text.lines().zip(golden.lines()) {
        assert_eq!(now, before);
    }
    assert_eq!(text.lines().count(), golden.lines().count());
}

#[test]
fn no_policy_beats_the_optimum_and_none_loses_anything_when_all_fits() {
    for name in CUTS {
        let trace = cut(name);
        let next_uses = NextUses::of(&trace);
        for (policy, _) in ALL {
            for share in [0.01, 0.1, 0.5] {
                let blocks = capacity(&trace, share).max(4);
                let opt = opt_prefix_hits(&trace, &next_uses, blocks as usize);
                let hits = run(&trace, policy, blocks, 8, 0).prefix_hits;
                assert!(hits <= opt, "{policy} hits {hits} of at most {opt} on {name} with {blocks} blocks");
            }
            let all = trace.unique() as u64;
            assert_eq!(run(&trace, policy, all, 0, 0).prefix_hits, trace.infinite_hits(), "{policy} on {name}");
        }
        let everything = opt_prefix_hits(&trace, &next_uses, trace.unique());
        assert_eq!(everything, trace.infinite_hits());
    }
}

#[test]
fn lru_and_density_keep_prompts_closed_with_and_without_lookahead() {
    for name in CUTS {
        let trace = with_one_time_requests(&cut(name), 0.5, 1);
        for policy in ["lru", "lhd"] {
            for (share, lookahead) in [(0.01, 0), (0.05, 0), (0.01, 32), (0.05, 32), (0.2, 32)] {
                let blocks = capacity(&trace, share);
                let Outcome { prefix_hits, object_hits, orphan_peak, .. } = run(&trace, policy, blocks, lookahead, 0);
                let what = format!("{policy} on {name} with {blocks} blocks, {lookahead} waiting");
                assert!(prefix_hits * 100 >= object_hits * 99, "{what}: {prefix_hits} of {object_hits} hits");
                assert!(orphan_peak * 100 <= blocks, "{what}: {orphan_peak} orphans");
            }
        }
    }
}

#[test]
fn density_stays_close_to_lru_or_above_it_whatever_the_salt() {
    for name in CUTS {
        for one_time in [0.0, 0.5] {
            let trace = with_one_time_requests(&cut(name), one_time, 1);
            for share in SHARES {
                for salt in 0..4 {
                    let blocks = capacity(&trace, share);
                    let [lhd, lru] = ["lhd", "lru"].map(|policy| run(&trace, policy, blocks, 0, salt).prefix_hits);
                    let what = format!("{name}, {one_time} one-time, {blocks} blocks, salt {salt}");
                    assert!(lhd * 100 >= lru * 97, "{what}: lhd {lhd}, lru {lru}");
                }
            }
        }
    }
}

#[test]
fn the_curve_is_within_two_points_of_a_replay_and_the_ceiling_within_one() {
    for name in CUTS {
        let trace = cut(name);
        let pools = SHARES.map(|share| (capacity(&trace, share), 0));
        let disks = [2, 8].map(|times| (capacity(&trace, 0.05), times * capacity(&trace, 0.05)));
        assert_estimated(&trace, pools.into_iter().chain(disks));
    }
}

/// Pools of half to almost all of the documents, and a disk below the smallest that holds all.
#[test]
fn the_curve_is_within_two_points_of_a_replay_on_rounds_too() {
    for order in [Order::Same, Order::Shuffled, Order::Random] {
        let rounds = Rounds::new(order, 20);
        let blocks = |share: f64| (rounds.working_set() as f64 * share) as u64;
        let pools = [0.5, 0.7, 0.9, 0.95].map(|share| (blocks(share), 0));
        assert_estimated(&rounds.trace(), pools.into_iter().chain([(blocks(0.5), blocks(2.0))]));
    }
}

/// Capacities are blocks of a pool and of a disk.
fn assert_estimated(trace: &Trace, capacities: impl Iterator<Item = (u64, u64)>) {
    let bytes = |blocks: u64| blocks * trace.bytes_in(0);
    let capacities: Vec<Capacities> =
        capacities.map(|(pool, disk)| Capacities { pool_bytes: bytes(pool), disk_bytes: bytes(disk) }).collect();
    let (policy, admission) = (ALL[0].1, Admission::SecondSighting);
    let rules = Rules { policy, seed: 0, promise_permille: 1000, admission, memory_blocks: 1 << 20 };
    let (mut ceiling, mut curve) = (Ceiling::default(), Curve::new(rules, Samples::default(), &capacities));
    note(trace, 0, &mut ceiling, &mut curve);
    for (at, Capacities { pool_bytes, disk_bytes }) in capacities.into_iter().enumerate() {
        let ssd = (disk_bytes > 0).then_some(Ssd { capacity_bytes: disk_bytes, admission });
        let setup = Setup { ssd, ..setup(trace, ALL[0].0, pool_bytes / trace.bytes_in(0)) };
        let Outcome { prefix_hits, blocks: asked, .. } = replay(trace, setup, |_| {}).unwrap();
        let (exact, estimate) = (prefix_hits as f64 / asked as f64, curve.hit_ratio(at));
        let what = format!("{}, pool of {pool_bytes} and disk of {disk_bytes} bytes", trace.name);
        println!("{what}: {estimate:.3}, replay {exact:.3}");
        assert!((exact - estimate).abs() <= 0.02, "{what}: {estimate}, replay {exact}");
    }
    let end = trace.request(trace.len() - 1).at_us;
    let exact = trace.infinite_hits() as f64 / trace.accesses() as f64;
    let estimate = ceiling.estimates(end)[2].ceiling().unwrap();
    assert!((exact - estimate).abs() <= 0.01, "{}: ceiling {estimate}, exactly {exact}", trace.name);
}

#[test]
fn a_trace_can_be_asked_of_a_daemon() {
    let trace = cut("conv");
    let all: Vec<_> = keys(&trace, 7).collect();
    assert_eq!(all.len(), trace.len());
    let blocks: usize = all.iter().map(|(_, keys)| keys.len()).sum();
    assert_eq!(blocks, trace.accesses());
    let unique: std::collections::HashSet<_> = all.iter().flat_map(|(_, keys)| keys).collect();
    assert_eq!(unique.len(), trace.unique());
}
