//! Ceiling and capacity curves as the daemon would estimate them, beside what is exact:
//! `cargo run --release -p forebay-sim --example estimate -- TRACE..`
//!
//! Pools are shares of the different blocks, disks are some multiples of them, given what comes again or everything.
//! With several traces, all of them together follow, with blocks of one size and of several.

use clap::Parser;
use forebay_core::Result;
use forebay_core::tiers::Admission;
use forebay_insight::ceiling::Ceiling;
use forebay_insight::curve::{Capacities, Curve, Rules, Samples};
use forebay_sim::estimate::note;
use forebay_sim::policy::by_name;
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Ssd, store_batch};
use forebay_sim::{Outcome, Setup, Trace, merge, replay};

const ALONE: [f64; 6] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2];
const ABOVE: [f64; 4] = [0.01, 0.02, 0.05, 0.1];
const MULTIPLES: [u64; 4] = [2, 4, 8, 16];

#[derive(Parser)]
struct Arguments {
    #[arg(required = true)]
    traces: Vec<std::path::PathBuf>,
    #[arg(long, default_value = "lhd")]
    policy: String,
    /// The most blocks that a miniature's pool holds
    #[arg(long, default_value_t = Samples::default().pool)]
    pool_samples: u64,
    /// The most blocks that a miniature's disk holds
    #[arg(long, default_value_t = Samples::default().disk)]
    disk_samples: u64,
    /// The most keys that it knows again
    #[arg(long, default_value_t = Samples::default().memory)]
    memory_samples: u64,
    /// Other names of all blocks, and so other samples, tried one after another
    #[arg(long, default_value_t = 1)]
    salts: u64,
    /// Leave out disks
    #[arg(long)]
    no_disks: bool,
    /// One line for each cell
    #[arg(long)]
    cells: bool,
}

/// One pool and disk of one trace.
struct Cell {
    capacities: Capacities,
    admission: Admission,
    share: f64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut traces = (arguments.traces.iter()).map(|path| read(path, Hints::default())).collect::<Result<Vec<_>>>()?;
    if traces.len() > 1 {
        // Tenants in one cache, with blocks of one size and of several.
        let mut tenants = traces.clone();
        traces.push(merge(&tenants));
        tenants.iter_mut().zip([4096, 12_288, 8192].iter().cycle()).for_each(|(trace, bytes)| trace.set_bytes(*bytes));
        traces.push(merge(&tenants));
        traces.last_mut().expect("it was just pushed").name += ", several sizes";
    }
    traces.iter().try_for_each(|trace| compare(trace, &arguments))
}

fn compare(trace: &Trace, arguments: &Arguments) -> Result<()> {
    println!("{}", trace.name);
    for salt in 0..arguments.salts {
        let alone = ALONE.map(|share| cell(trace, share, 0, Admission::All));
        let title = |what: &str| format!("{what}, salt {salt}");
        group(trace, arguments, salt, &title("pool alone"), &alone)?;
        for admission in [Admission::SecondSighting, Admission::All] {
            for share in ABOVE.iter().filter(|_| !arguments.no_disks) {
                let cells = MULTIPLES.map(|times| cell(trace, *share, times, admission));
                group(trace, arguments, salt, &title(&format!("pool {share}, disk, {admission:?}")), &cells)?;
            }
        }
    }
    Ok(())
}

fn cell(trace: &Trace, share: f64, times: u64, admission: Admission) -> Cell {
    let pool_bytes = (share * trace.unique_bytes() as f64) as u64;
    Cell { capacities: Capacities { pool_bytes, disk_bytes: times * pool_bytes }, admission, share }
}

/// Cells with one admission: one curve tells about all of them.
fn group(trace: &Trace, arguments: &Arguments, salt: u64, title: &str, cells: &[Cell]) -> Result<()> {
    let policy = by_name(&arguments.policy).expect("the name of a policy");
    // As the replay has it.
    let rules =
        Rules { policy, seed: salt, promise_permille: 1000, admission: cells[0].admission, memory_blocks: 1 << 20 };
    let samples =
        Samples { pool: arguments.pool_samples, disk: arguments.disk_samples, memory: arguments.memory_samples };
    let capacities: Vec<Capacities> = cells.iter().map(|cell| cell.capacities).collect();
    let (mut ceiling, mut curve) = (Ceiling::default(), Curve::new(rules, samples, &capacities));
    note(trace, salt, &mut ceiling, &mut curve);
    let (mut errors, mut by_namespace) = (Vec::new(), Vec::new());
    for (at, cell) in cells.iter().enumerate() {
        let Capacities { pool_bytes, disk_bytes } = cell.capacities;
        let ssd = (disk_bytes > 0).then_some(Ssd { capacity_bytes: disk_bytes, admission: cell.admission });
        let store_batch = store_batch((cell.share * trace.unique() as f64) as u64, trace.sizes());
        let setup = Setup { policy, capacity_bytes: pool_bytes, ssd, lookahead: 0, store_batch, salt };
        let done = replay(trace, setup, |_| {})?;
        let exact = done.prefix_hits as f64 / done.blocks as f64;
        errors.push(100.0 * (curve.hit_ratio(at) - exact));
        let namespaces = points_by_namespace(&done, |owner| curve.hit_ratio_of(owner, at));
        if arguments.cells {
            let (share, times, rate) = (cell.share, disk_bytes / pool_bytes, curve.rate(at));
            println!(
                "    pool {share}, disk {times} times, rate {rate:.3}: {:.4}, exactly {exact:.4}, by namespace {namespaces:.2?}",
                curve.hit_ratio(at)
            );
        }
        by_namespace.extend(namespaces);
    }
    let end = trace.request(trace.len() - 1).at_us;
    let day = ceiling.estimates(end)[2].ceiling().unwrap_or(0.0);
    let ceiling_points = 100.0 * (day - trace.infinite_hits() as f64 / trace.accesses() as f64);
    println!(
        "  {title}: {errors:+.2?}, by namespace at most {:.2}; ceiling {ceiling_points:+.2}; {} KiB",
        by_namespace.iter().map(|error: &f64| error.abs()).fold(0.0, f64::max),
        curve.heap_bytes() >> 10
    );
    Ok(())
}

/// How far each namespace's estimate is off.
fn points_by_namespace(done: &Outcome, estimate: impl Fn(usize) -> f64) -> Vec<f64> {
    let exact = done.namespaces.iter().map(|tally| tally.prefix_hits as f64 / tally.blocks.max(1) as f64);
    exact.enumerate().map(|(owner, exact)| 100.0 * (estimate(owner) - exact)).collect()
}
