//! Ceiling and capacity curves as the daemon would estimate them, beside what is exact:
//! `cargo run --release -p forebay-sim --example estimate -- SAMPLES TRACE..`
//!
//! Of the pool: leaf-first LRU at shares of the different blocks. Of the disk: at some multiples of pools of these sizes,
//! given what comes again, or everything.

use forebay_core::below::Admission;
use forebay_core::ceiling::Ceiling;
use forebay_core::curve::{Curve, Tiers};
use forebay_core::policy::by_name;
use forebay_sim::estimate::note;
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{STORE_BATCH, Ssd};
use forebay_sim::{Setup, Trace, merge, replay};

const MULTIPLES: [u64; 4] = [2, 4, 8, 16];

fn main() -> forebay_core::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let samples = arguments.next().and_then(|samples| samples.parse().ok()).unwrap_or(Curve::SAMPLES);
    let mut traces = arguments.map(|path| read(path.as_ref(), Hints::default())).collect::<Result<Vec<_>, _>>()?;
    if traces.len() > 1 {
        // Tenants with blocks of several sizes in one cache.
        let mut tenants = traces.clone();
        tenants.iter_mut().zip([4096, 12_288, 8192].iter().cycle()).for_each(|(trace, bytes)| trace.set_bytes(*bytes));
        traces.push(merge(&tenants));
    }
    traces.iter().try_for_each(|trace| compare(trace, samples))
}

fn compare(trace: &Trace, samples: usize) -> forebay_core::Result<()> {
    let (mut ceiling, mut curve) = (Ceiling::default(), Curve::new(samples));
    note(trace, 0, &mut ceiling, &mut curve);
    let end = trace.request(trace.len() - 1).at_us;
    let day = ceiling.estimates(end)[2];
    let exact = trace.infinite_hits() as f64 / trace.accesses() as f64;
    println!("{}: ceiling {:.4}, exactly {exact:.4}", trace.name, day.ceiling().unwrap_or(0.0));
    for share in [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5] {
        let pool_bytes = (share * trace.unique_bytes() as f64) as u64;
        let outcome = run(trace, pool_bytes, None)?;
        print(&format!("pool {share}"), &outcome, curve.hit_ratio(pool_bytes), |owner| {
            curve.hit_ratio_of(owner, pool_bytes)
        });
    }
    for share in [0.01, 0.02, 0.05, 0.1] {
        for admission in [Admission::SecondSighting, Admission::All] {
            disks(trace, samples, share, admission)?;
        }
    }
    Ok(())
}

fn disks(trace: &Trace, samples: usize, share: f64, admission: Admission) -> forebay_core::Result<()> {
    let pool_bytes = (share * trace.unique_bytes() as f64) as u64;
    let tiers = Tiers {
        reach_bytes: 16 * pool_bytes,
        pool_bytes,
        // As the replay has it.
        promise_share: 1.0,
        disk_bytes: MULTIPLES.map(|times| times * pool_bytes).to_vec(),
        admits_all: admission == Admission::All,
        memory_blocks: 1 << 20,
    };
    let mut curve = Curve::of_tiers(samples, tiers);
    note(trace, 0, &mut Ceiling::default(), &mut curve);
    for (at, times) in MULTIPLES.into_iter().enumerate() {
        let outcome = run(trace, pool_bytes, Some(Ssd { capacity_bytes: times * pool_bytes, admission }))?;
        let what = format!("pool {share}, disk {times} times, {admission:?}");
        print(&what, &outcome, curve.disk_hit_ratio(at), |owner| curve.disk_hit_ratio_of(owner, at));
    }
    Ok(())
}

fn run(trace: &Trace, capacity_bytes: u64, ssd: Option<Ssd>) -> forebay_core::Result<forebay_sim::Outcome> {
    let policy = by_name("lru").expect("there is an lru");
    replay(trace, Setup { policy, capacity_bytes, ssd, lookahead: 0, store_batch: STORE_BATCH, salt: 0 }, |_| {})
}

/// All, and each namespace where there are several.
fn print(what: &str, done: &forebay_sim::Outcome, estimate: f64, of: impl Fn(usize) -> f64) {
    let exact = done.prefix_hits as f64 / done.blocks as f64;
    print!("  {what}: {estimate:.4}, replay {exact:.4}, {:+.2} points", 100.0 * (estimate - exact));
    if done.namespaces.len() > 1 {
        for (owner, tally) in done.namespaces.iter().enumerate() {
            let points = 100.0 * (of(owner) - tally.prefix_hits as f64 / tally.blocks as f64);
            print!("; namespace {owner} {points:+.2}");
        }
    }
    println!();
}
