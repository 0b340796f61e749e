//! The whole host as state machines, under one seed: no sockets, no clock, and no thread that decides anything.
//!
//! What runs is the product's own: the core; the daemon's state, table, instances and drivers of tiers; the events of
//! its calls, of the attach socket, and of its threads; recovery from the pool's real files; the workers' mapping and
//! kernel locks. What is a model: the processes of engines and clients, what is under way between them and the daemon,
//! the tiers' media, and time.
//!
//! The seed chooses the order of all steps; when requests are looked at and when answers arrive, if they do; kills of
//! schedulers, workers and the daemon; workers that stop in the middle of a copy and go on much later; broken
//! connections, repeated commits and releases; damaged records of instances; bytes of the pool that change; media that
//! fail, are full, hang, lose and lie; purges and drains. `truth` knows who may touch which page, and what was stored
//! under which key: each hand-over, each write of a worker, a tier or a copy, and each load is checked with it. At the
//! end all is given back or dies, and nothing may be left: no slot, lease, pin, fence or instance, in this daemon and
//! in the next one on the same files.
//!
//! Not here: a kill inside an event (`forebay_io::pool` has crash images at each system call); weak memory orders
//! (`pool/order.rs`); the client's session thread and the copy engine (`crates/rpc`, `crates/device`), whose protocol
//! `engine` follows; the real media (`crates/io/tests`); purges of shared stores; the core's own arithmetic with many
//! more block sizes and policies (`crates/core/tests/model`).
//!
//! A failure prints its seed and the steps that are left after shrinking. `SIMULATION_SEED=N` runs one seed again,
//! `SIMULATION_SECONDS=N` searches for so long, `SIMULATION_FROM=N` from another seed on.

mod copies;
mod daemon;
mod dice;
mod engine;
mod medium;
mod truth;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use world::{Setup, World};

/// What a run came to.
struct Run {
    violation: Option<String>,
    digest: u64,
    counts: BTreeMap<&'static str, u64>,
}

/// The steps that a run takes; all of the seed's, before it is shrunk.
type Steps = Vec<u64>;

fn steps(seed: u64) -> Steps {
    (0..Setup::of(seed).steps).collect()
}

fn run(seed: u64, steps: &[u64]) -> Run {
    let mut world = World::new(Setup::of(seed));
    let truth = world.truth.clone();
    let done = catch_unwind(AssertUnwindSafe(|| {
        for step in steps {
            world.step(*step);
            if world.is_over() {
                return;
            }
        }
        world.finish();
    }));
    if done.is_err() {
        truth.get().violate("a panic".to_owned());
        // An event is half done: what the destructors would do now is of no use.
        std::mem::forget(world);
    } else {
        world.kill_daemon();
    }
    let mut truth = truth.get();
    Run { violation: truth.violation.take(), digest: truth.digest, counts: std::mem::take(&mut truth.counts) }
}

/// Fewer steps that fail as well.
fn shrink(seed: u64, mut steps: Steps, tries: usize) -> Steps {
    let (mut piece, mut left) = (steps.len() / 2, tries);
    while piece > 0 && left > 0 {
        let mut at = 0;
        while at < steps.len() && left > 0 {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + piece).min(steps.len()));
            left -= 1;
            match run(seed, &fewer).violation {
                Some(_) => steps = fewer,
                None => at += piece,
            }
        }
        piece /= 2;
    }
    steps
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("`{name}` is not a number: {value}")))
}

fn fail(seed: u64, steps: Steps) -> ! {
    let shrunk = shrink(seed, steps, 300);
    let violation = run(seed, &shrunk).violation.expect("it failed a moment ago");
    panic!(
        "seed {seed}, {} steps: {violation}\nagain: SIMULATION_SEED={seed} cargo test -p forebay-daemon --lib \
         simulation\nsteps: {shrunk:?}",
        shrunk.len()
    );
}

#[test]
fn no_schedule_gives_a_slot_to_two_or_serves_what_was_not_stored() {
    if let Some(seed) = variable("SIMULATION_SEED") {
        let done = run(seed, &steps(seed));
        println!("seed {seed}: {:?}, {:?}", done.violation, done.counts);
        if done.violation.is_some() {
            fail(seed, steps(seed));
        }
        return;
    }
    let limit = Duration::from_secs(variable("SIMULATION_SECONDS").unwrap_or(45));
    let from = variable("SIMULATION_FROM").unwrap_or(0);
    let (start, next) = (Instant::now(), AtomicU64::new(from));
    let (counts, failed) = (Mutex::new(BTreeMap::new()), Mutex::new(None));
    let search = || {
        while start.elapsed() < limit && failed.lock().unwrap().is_none() {
            let seed = next.fetch_add(1, Relaxed);
            let done = run(seed, &steps(seed));
            if let Some(violation) = done.violation {
                println!("seed {seed} fails after {} seeds: {violation}", next.load(Relaxed) - from);
                failed.lock().unwrap().get_or_insert(seed);
            }
            let mut counts = counts.lock().unwrap();
            done.counts.into_iter().for_each(|(what, count)| *counts.entry(what).or_insert(0) += count);
        }
    };
    // A run is one thread's; two runs have nothing in common.
    std::thread::scope(|threads| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        (0..cores).for_each(|_| drop(threads.spawn(search)));
    });
    if let Some(seed) = failed.into_inner().unwrap() {
        fail(seed, steps(seed));
    }
    let (seeds, counts) = (next.into_inner() - from, counts.into_inner().unwrap());
    println!("{seeds} seeds from {from} in {} s: {counts:?}", start.elapsed().as_secs());
    // A search that never comes to these would pass whatever is broken.
    for what in ["a load", "a get", "stored", "puts stored", "moved", "verified", "kills of the daemon", "lost"] {
        assert!(seeds < 100 || counts.contains_key(what), "no seed came to `{what}`");
    }
}

#[test]
fn a_seed_is_the_same_run_each_time() {
    for seed in 0..20 {
        let [first, second] = [0, 1].map(|_| run(seed, &steps(seed)));
        assert_eq!((first.digest, first.counts), (second.digest, second.counts), "seed {seed}");
    }
}
