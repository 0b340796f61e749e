//! Hosts on one shared store, with and without touches, against a store that sees every use.
//!
//! Ten hosts on a store that evicts in the exact order of use: `cargo run --release -p forebay-sim --example fleet`.
//! A hundred hosts for a day, on stores that evict as real ones do: the same with ` -- day`. It takes minutes. What a
//! store that samples loses, by samples and by the length of prompts: ` -- samples`. A day on a shared directory, with
//! hosts whose clocks are wrong: ` -- clocks`.

use std::thread;

use forebay_core::tiers::Touching;
use forebay_sim::fleet::{Eviction, Fleet, Found, Told, run};

/// As the daemon touches stores that evict by use.
const TOUCHES: Told = Told::Touches(Touching { per_tick: 512, least_ticks: 1, most_ticks: 128, asks_per_tick: 0 });
const TOLD: [(&str, Told); 3] = [("nothing", Told::Nothing), ("touches", TOUCHES), ("all", Told::All)];
const DAY_SECONDS: u64 = 24 * 3600;

const TEN: Fleet = Fleet {
    hosts: 10,
    changes: &[],
    pool_blocks: 4096,
    store_blocks: 20_000,
    eviction: Eviction::Exact,
    prompts: 2000,
    prompt_blocks: 20,
    once_permille: 500,
    requests: 40_000,
    requests_per_second: 10,
    restart_every: 500,
    emptied_at: None,
    fresh_ms: 1000,
    clocks_ahead_ms: &[],
    seed: 1,
};

fn main() {
    match std::env::args().nth(1).as_deref() {
        None => ten(),
        Some("day") => day(),
        Some("samples") => samples(),
        Some("clocks") => clocks(),
        Some(other) => panic!("`{other}` is no run; there are `day`, `samples` and `clocks`"),
    }
}

fn ten() {
    println!("case,seed,told,hit_rate,of_oracle,touches,lost,stored,noted,period_s");
    let base = TEN;
    let few_hot = Fleet { prompts: 150, once_permille: 800, ..base };
    let cases = [
        ("few hot", few_hot),
        ("few hot / emptied", Fleet { emptied_at: Some(25_000), ..few_hot }),
        ("few hot / small store", Fleet { store_blocks: 8000, ..few_hot }),
        ("base", base),
        ("base / emptied", Fleet { emptied_at: Some(25_000), ..base }),
        ("base / small store", Fleet { store_blocks: 8000, ..base }),
        ("base / notes of a minute", Fleet { fresh_ms: 60_000, ..base }),
    ];
    for (name, case) in cases {
        for seed in 1..=2 {
            let fleet = Fleet { seed, ..case };
            let oracle = run(&fleet, Told::All);
            for (told, found) in
                [("nothing", run(&fleet, Told::Nothing)), ("touches", run(&fleet, TOUCHES)), ("all", oracle)]
            {
                println!(
                    "{name},{seed},{told},{:.4},{:.4},{},{},{},{},{}",
                    found.hit_rate(),
                    found.hit_rate() / oracle.hit_rate(),
                    found.touches,
                    found.lost_blocks,
                    found.stored_blocks,
                    found.operations.noted_touches,
                    found.longest_period_seconds,
                );
            }
        }
    }
}

const RATE: u64 = 4;
const HOUR: u64 = 3600 * RATE;
/// One block stands for 256 tokens, say: a prompt has 5,120. Half of the day counts for the hit rate, the second one.
const DAY: Fleet = Fleet {
    hosts: 100,
    // Twenty hosts are gone for good, thirty join, ten more go.
    changes: &[(14 * HOUR, 80), (17 * HOUR, 110), (20 * HOUR, 100)],
    pool_blocks: 1024,
    store_blocks: 100_000,
    prompts: 10_000,
    requests: DAY_SECONDS * RATE,
    requests_per_second: RATE,
    // Each host once a day.
    restart_every: DAY_SECONDS * RATE / 100,
    ..TEN
};
/// As a directory notes loads.
const BY_MINUTE: Fleet = Fleet { eviction: Eviction::Hand, fresh_ms: 60_000, ..DAY };
const COLUMNS: &str =
    "told,pool_rate,hit_rate,of_oracle,touches,lost,writes,reads,noted,probes,removals,period_s,noted_reads";

fn day() {
    println!("case,{COLUMNS}");
    let sampled = Eviction::Sampled { nodes: 6, samples: 5 };
    let cases = [
        ("exact", DAY),
        // What a directory holds between 9/10 and 19/20 of its capacity.
        ("exact in 37/40", Fleet { store_blocks: DAY.store_blocks * 37 / 40, ..DAY }),
        ("hand", Fleet { eviction: Eviction::Hand, ..DAY }),
        ("hand / notes of a minute", BY_MINUTE),
        ("sampled", Fleet { eviction: sampled, ..DAY }),
    ];
    let mut oracle = None;
    for (name, fleet) in cases {
        let found: Vec<Found> = thread::scope(|scope| {
            let runs = TOLD.map(|(_, told)| scope.spawn(move || run(&fleet, told)));
            runs.map(|run| run.join().expect("a run ends")).into()
        });
        // Of the first case, told all.
        let oracle = *oracle.get_or_insert(found[2].hit_rate());
        for ((told, _), found) in TOLD.iter().zip(&found) {
            print_day(&format!("{name},{told}"), found, oracle);
        }
    }
}

/// A shared directory for a day, with hosts whose clocks are wrong.
fn clocks() {
    const SECOND: i64 = 1000;
    const HOUR_AHEAD: i64 = 3600 * SECOND;
    const SOME: &[i64] = &[0, 0, HOUR_AHEAD, 0, 0, -HOUR_AHEAD, 0, 0, 0, -30 * SECOND];
    const ALL: &[i64] = &[HOUR_AHEAD, -HOUR_AHEAD, -30 * SECOND];
    println!("case,{COLUMNS}");
    let cases = [("right", &[] as &[i64]), ("three of ten wrong", SOME), ("all wrong", ALL)];
    thread::scope(|scope| {
        let runs = cases.map(|(name, clocks_ahead_ms)| {
            (name, scope.spawn(move || run(&Fleet { clocks_ahead_ms, ..BY_MINUTE }, TOUCHES)))
        });
        let found = runs.map(|(name, run)| (name, run.join().expect("a run ends")));
        for (name, found_here) in &found {
            print_day(&format!("{name},touches"), found_here, found[0].1.hit_rate());
        }
    });
}

/// Operations in all; the report divides them by the seconds of a day.
fn print_day(case: &str, found: &Found, oracle: f64) {
    let pool_rate = found.pool_blocks as f64 / found.asked_blocks as f64;
    let done = &found.operations;
    println!(
        "{case},{pool_rate:.4},{:.4},{:.4},{},{},{},{},{},{},{},{},{}",
        found.hit_rate(),
        found.hit_rate() / oracle,
        found.touches,
        found.lost_blocks,
        done.writes,
        done.reads,
        done.noted_touches,
        done.probes,
        done.removals,
        found.longest_period_seconds,
        done.noted_reads,
    );
}

/// The same blocks a second, in prompts of 20 blocks and of one.
fn samples() {
    println!("eviction,seed,prompt_blocks,hit_rate");
    let sampled = |samples| Eviction::Sampled { nodes: 1, samples };
    for eviction in [Eviction::Exact, Eviction::Hand, sampled(5), sampled(10), sampled(20)] {
        for seed in 1..=2 {
            for prompt_blocks in [20, 1] {
                let times = 20 / prompt_blocks;
                let fleet = Fleet {
                    eviction,
                    prompts: TEN.prompts * times,
                    prompt_blocks,
                    requests: TEN.requests * times,
                    requests_per_second: TEN.requests_per_second * times,
                    restart_every: TEN.restart_every * times,
                    seed,
                    ..TEN
                };
                println!("\"{eviction:?}\",{seed},{prompt_blocks},{:.4}", run(&fleet, TOUCHES).hit_rate());
            }
        }
    }
}
