//! `forebay simulate`: policies side by side at several capacities, with their upper bounds.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use forebay_core::layout::Layout;
use forebay_core::miss::MissReason;
use forebay_core::policy::Make;
use forebay_core::tiers::Admission;
use forebay_core::{Error, Result, size};
use serde::Serialize;
use serde_json::Value;

use crate::bounds::{NextUses, opt_hit_bytes};
use crate::capacity::{Capacity, mean_bytes};
use crate::mix::with_one_time_requests;
use crate::policy;
use crate::read::{Hints, read};
use crate::replay::{Outcome, Setup, Ssd, Tally, replay, store_batch};
use crate::trace::{Trace, merge};

/// What a simulation is asked for.
#[derive(clap::Args, Clone, Debug)]
pub struct Arguments {
    /// Traces to replay: Mooncake, Qwen-Bailian or recorded JSONL, plain or compressed by zstd
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Policies to compare: default, lru, twoq, arc, s3fifo, tinylfu, or all
    #[arg(long, value_delimiter = ',', default_value = "default,lru")]
    pub policy: Vec<String>,
    /// Capacities of the pool: `5%` of the different blocks, `64GiB`, `1000000tokens`, `5000blocks`
    #[arg(long, value_delimiter = ',', default_value = "0.5%,1%,2%,5%,10%,20%")]
    pub capacity: Vec<Capacity>,
    /// Capacities of an SSD below the pool, in the same units; each pool is tried with each SSD
    #[arg(long, value_delimiter = ',')]
    pub ssd: Vec<Capacity>,
    /// Which blocks are written to the SSD: those that were looked up again, or all
    #[arg(long, value_enum, default_value = "second_sighting")]
    pub ssd_admission: SsdAdmission,
    /// Replay all traces into one cache; each trace is a tenant with its own namespaces
    #[arg(long)]
    pub together: bool,
    /// Requests that wait in the queue; the cache gets queue hints for them
    #[arg(long, value_name = "REQUESTS", default_value_t = 0)]
    pub lookahead: usize,
    /// Share of one-time requests to mix in; each begins with the system prompt of a real request
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub one_time: f64,
    /// Bytes of a block, if the trace does not name them: one value for all traces, or one for each
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = bytes)]
    pub block_bytes: Vec<u64>,
    /// Tokens of a block, if the trace does not name them
    #[arg(long, value_name = "TOKENS", value_parser = count::<u32>)]
    pub block_tokens: Option<u32>,
    /// The ids in the trace name a block alone, not the whole prefix up to it
    #[arg(long)]
    pub chain: bool,
    /// Number that is mixed into the names of all blocks and into all hashes
    #[arg(long, default_value_t = 0)]
    pub salt: u64,
    /// Leave out the exact optimum, which takes longer than a replay
    #[arg(long)]
    pub no_opt: bool,
    /// Blocks that are stored at once [default: 16, or fewer if the cache holds fewer than 1,024 blocks of each size]
    #[arg(long, value_name = "COUNT", value_parser = count::<usize>)]
    pub store_batch: Option<usize>,
    /// Write a plot of hit rate against capacity to this SVG file
    #[arg(long, value_name = "FILE", value_parser = crate::chart::file())]
    pub plot: Option<PathBuf>,
}

fn bytes(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| format!("give {}", size::KIND))
}

/// Blocks without tokens, or a batch without blocks, would be simulated as if another number had been given.
fn count<N: FromStr + Default + PartialEq>(text: &str) -> Result<N, String> {
    let count = text.parse().ok().filter(|count| *count != N::default());
    count.ok_or_else(|| "give a whole number from 1 on".to_owned())
}

/// Which blocks are written back.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
pub enum SsdAdmission {
    SecondSighting,
    All,
}

impl From<SsdAdmission> for Admission {
    fn from(admission: SsdAdmission) -> Admission {
        match admission {
            SsdAdmission::SecondSighting => Admission::SecondSighting,
            SsdAdmission::All => Admission::All,
        }
    }
}

/// One policy on one trace at one capacity of each tier.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Whether bytes are those of the trace, and not of a size that was assumed.
    #[serde(skip)]
    pub has_bytes: bool,
    pub trace: String,
    pub policy: String,
    /// Capacity of the pool.
    pub capacity_bytes: u64,
    pub capacity_blocks: u64,
    /// Relative to the trace's distinct blocks.
    pub capacity_share: f64,
    /// 0 without an SSD.
    pub ssd_capacity_bytes: u64,
    pub ssd_capacity_share: f64,
    pub lookahead: usize,
    pub requests: u64,
    pub blocks: u64,
    pub bytes: u64,
    pub object_hits: u64,
    /// On all tiers.
    pub prefix_hits: u64,
    pub pool_hits: u64,
    pub ssd_hits: u64,
    pub hit_bytes: u64,
    /// At both capacities together. `null` if it was not requested, or if blocks differ in size.
    pub opt_prefix_hits: Option<u64>,
    pub opt_hit_bytes: Option<u64>,
    pub infinite_prefix_hits: u64,
    pub infinite_hit_bytes: u64,
    /// Misses by reason.
    pub misses: BTreeMap<&'static str, u64>,
    /// If there are several.
    pub namespaces: Vec<Share>,
    pub orphan_peak: u64,
    pub evicted: u64,
    /// Blocks copied to other slots, because another size took the memory of their slots.
    pub moved: u64,
    pub ssd_written_blocks: u64,
    pub ssd_written_bytes: u64,
    pub metadata_bytes: u64,
    pub ghost_bytes: u64,
    pub blocks_per_s: f64,
}

/// The results of one namespace.
#[derive(Clone, Debug, Serialize)]
pub struct Share {
    pub namespace: usize,
    /// `null` where it is not known.
    pub block_bytes: Option<u64>,
    pub requests: u64,
    pub blocks: u64,
    pub prefix_hits: u64,
    pub pool_hits: u64,
    pub ssd_hits: u64,
}

impl Row {
    /// As an object. Bytes that nobody knows are `null`; what the caches need for themselves is known.
    pub fn to_json(&self) -> Value {
        let mut row = serde_json::to_value(self).expect("it has names and numbers");
        let facts = row.as_object_mut().expect("a row is an object").iter_mut();
        let of_blocks = |name: &str| name.ends_with("bytes") && !matches!(name, "metadata_bytes" | "ghost_bytes");
        facts.filter(|(name, _)| !self.has_bytes && of_blocks(name)).for_each(|(_, fact)| *fact = Value::Null);
        row
    }

    pub fn hit_ratio(&self) -> f64 {
        self.prefix_hits as f64 / self.blocks as f64
    }

    /// By bytes; equals `hit_ratio` if all blocks have one size.
    pub fn hit_bytes_ratio(&self) -> f64 {
        self.hit_bytes as f64 / self.bytes as f64
    }

    /// Relative to the optimum at the same capacity, by bytes.
    pub fn opt_ratio(&self) -> Option<f64> {
        self.opt_hit_bytes.map(|opt| if opt == 0 { 1.0 } else { self.hit_bytes as f64 / opt as f64 })
    }
}

/// Errors with `Invalid` if the arguments are wrong whatever the traces are.
pub fn check(arguments: &Arguments) -> Result<()> {
    if !(0.0..=0.95).contains(&arguments.one_time) {
        return Err(Error::invalid("the share of one-time requests is 0 to 0.95")
            .with("one_time", arguments.one_time)
            .hint("give a share such as 0.5"));
    }
    (0..arguments.traces.len()).try_for_each(|at| block_bytes(arguments, at).map(|_| ()))?;
    policies(&arguments.policy).map(|_| ())
}

/// Runs the whole simulation; long ones report to `progress` about every second. Writes the plot if requested. Errors
/// as [`check`] does.
pub fn simulate(arguments: &Arguments, progress: &mut dyn Write) -> Result<Vec<Row>> {
    check(arguments)?;
    arguments.plot.iter().try_for_each(|path| crate::chart::check(path))?;
    let policies = policies(&arguments.policy)?;
    let mut rows = Vec::new();
    let run = |base: Trace, progress: &mut dyn Write, rows: &mut Vec<Row>| {
        let trace = match arguments.one_time {
            0.0 => base.clone(),
            share => with_one_time_requests(&base, share, arguments.salt),
        };
        simulate_trace(arguments, &base, &trace, &policies, progress, rows)
    };
    if arguments.together {
        let traces = (0..arguments.traces.len()).map(|at| read_trace(arguments, at)).collect::<Result<Vec<_>>>()?;
        run(merge(&traces), progress, &mut rows)?;
    } else {
        for at in 0..arguments.traces.len() {
            run(read_trace(arguments, at)?, progress, &mut rows)?;
        }
    }
    if let Some(path) = &arguments.plot {
        crate::chart::write(path, &crate::plot::panels(&rows))?;
    }
    Ok(rows)
}

fn block_bytes(arguments: &Arguments, at: usize) -> Result<Option<u64>> {
    let block_bytes = match arguments.block_bytes[..] {
        [] => None,
        [same] => Some(same),
        ref each if each.len() == arguments.traces.len() => Some(each[at]),
        ref each => {
            return Err(Error::invalid("`--block-bytes` has neither one value nor one for each trace")
                .with("values", each.len())
                .with("traces", arguments.traces.len())
                .hint("give one value, or one for each trace, in the order of the traces"));
        }
    };
    if block_bytes.is_some_and(|bytes| !(1..=Layout::MAX_BLOCK_BYTES).contains(&bytes)) {
        let error = Error::invalid("blocks have 1 byte to 512 MiB");
        return Err(error.hint("leave `--block-bytes` out if you do not know how many"));
    }
    Ok(block_bytes)
}

fn read_trace(arguments: &Arguments, at: usize) -> Result<Trace> {
    let block_bytes = block_bytes(arguments, at)?;
    let hints = Hints { block_tokens: arguments.block_tokens, block_bytes, is_chaining: arguments.chain };
    read(&arguments.traces[at], hints)
}

/// Capacities are shares of `base`, so that inserted requests do not make the cache larger.
fn simulate_trace(
    arguments: &Arguments,
    base: &Trace,
    trace: &Trace,
    policies: &[(&'static str, Make)],
    progress: &mut dyn Write,
    rows: &mut Vec<Row>,
) -> Result<()> {
    arguments.capacity.iter().chain(&arguments.ssd).try_for_each(|capacity| capacity.check(base))?;
    let next_uses = (!arguments.no_opt).then(|| NextUses::of(trace));
    for (capacity_bytes, ssd) in capacities(arguments, base) {
        let all_bytes = capacity_bytes + ssd.map_or(0, |ssd| ssd.capacity_bytes);
        let opt = next_uses.as_ref().map(|next_uses| opt_hit_bytes(trace, next_uses, all_bytes));
        let blocks = (capacity_bytes as f64 / mean_bytes(base)).round() as u64;
        for (name, make) in policies {
            let setup = Setup {
                policy: *make,
                capacity_bytes,
                ssd,
                lookahead: arguments.lookahead,
                store_batch: arguments.store_batch.unwrap_or_else(|| store_batch(blocks, base.sizes())),
                salt: arguments.salt,
            };
            let mut ticker = Ticker::new(format!("{} {name} {blocks} blocks", trace.name), trace.len());
            let start = Instant::now();
            let outcome = replay(trace, setup, |done| ticker.tick(done, progress))?;
            let seconds = start.elapsed().as_secs_f64();
            rows.push(row(base, trace, name, &setup, outcome, opt, seconds));
        }
    }
    Ok(())
}

/// Each pool with each SSD, ascending.
fn capacities(arguments: &Arguments, base: &Trace) -> Vec<(u64, Option<Ssd>)> {
    let ascending = |capacities: &[Capacity]| {
        let mut bytes: Vec<u64> = capacities.iter().map(|capacity| capacity.bytes(base)).collect();
        bytes.sort_unstable();
        bytes.dedup();
        bytes
    };
    let admission = arguments.ssd_admission.into();
    let mut disks: Vec<Option<Ssd>> =
        ascending(&arguments.ssd).into_iter().map(|capacity_bytes| Some(Ssd { capacity_bytes, admission })).collect();
    if disks.is_empty() {
        disks.push(None);
    }
    ascending(&arguments.capacity).into_iter().flat_map(|pool| disks.iter().map(move |ssd| (pool, *ssd))).collect()
}

fn row(base: &Trace, trace: &Trace, policy: &str, setup: &Setup, done: Outcome, opt: Option<u64>, seconds: f64) -> Row {
    let bytes = |hits: fn(&Tally) -> u64| {
        (done.namespaces.iter().enumerate()).map(|(at, tally)| hits(tally) * trace.bytes_in(at as u16)).sum::<u64>()
    };
    let share = |(namespace, tally): (usize, &Tally)| Share {
        namespace,
        block_bytes: trace.shapes[namespace].block_bytes,
        requests: tally.requests,
        blocks: tally.blocks,
        prefix_hits: tally.prefix_hits,
        pool_hits: tally.pool_hits,
        ssd_hits: tally.prefix_hits - tally.pool_hits,
    };
    let namespaces = (done.namespaces.len() > 1).then(|| done.namespaces.iter().enumerate().map(share).collect());
    let ssd_bytes = setup.ssd.map_or(0, |ssd| ssd.capacity_bytes);
    let of_all = |bytes: u64| bytes as f64 / base.unique_bytes() as f64;
    let asked = bytes(|tally| tally.blocks);
    Row {
        has_bytes: trace.has_bytes(),
        trace: trace.name.clone(),
        policy: policy.to_owned(),
        capacity_bytes: setup.capacity_bytes,
        capacity_blocks: (setup.capacity_bytes as f64 / mean_bytes(base)).round() as u64,
        capacity_share: of_all(setup.capacity_bytes),
        ssd_capacity_bytes: ssd_bytes,
        ssd_capacity_share: of_all(ssd_bytes),
        lookahead: setup.lookahead,
        requests: done.requests,
        blocks: done.blocks,
        bytes: asked,
        object_hits: done.object_hits,
        prefix_hits: done.prefix_hits,
        pool_hits: done.pool_hits,
        ssd_hits: done.prefix_hits - done.pool_hits,
        hit_bytes: bytes(|tally| tally.prefix_hits),
        opt_prefix_hits: trace.uniform_bytes().and_then(|each| Some(opt? / each)),
        opt_hit_bytes: opt,
        infinite_prefix_hits: trace.infinite_hits(),
        infinite_hit_bytes: asked - trace.unique_bytes(),
        misses: MissReason::ALL.iter().map(|reason| (reason.name(), done.misses[*reason as usize])).collect(),
        namespaces: namespaces.unwrap_or_default(),
        orphan_peak: done.orphan_peak,
        evicted: done.evicted,
        moved: done.moved,
        ssd_written_blocks: done.ssd_written_blocks,
        ssd_written_bytes: done.ssd_written_bytes,
        metadata_bytes: done.metadata_bytes,
        ghost_bytes: done.ghost_bytes,
        blocks_per_s: done.blocks as f64 / seconds,
    }
}

fn policies(names: &[String]) -> Result<Vec<(&'static str, Make)>> {
    if names.iter().any(|name| name == "all") {
        return Ok(policy::ALL.to_vec());
    }
    let find = |name: &String| {
        let known = policy::ALL.map(|(name, _)| name).join(", ");
        policy::find(name)
            .ok_or_else(|| Error::invalid("unknown policy").with("policy", name).hint(format!("give {known} or all")))
    };
    names.iter().map(find).collect()
}

/// Reports the progress of a replay about once a second.
struct Ticker {
    what: String,
    total: usize,
    last: Instant,
}

impl Ticker {
    fn new(what: String, total: usize) -> Ticker {
        Ticker { what, total, last: Instant::now() }
    }

    fn tick(&mut self, done: usize, progress: &mut dyn Write) {
        if self.last.elapsed() >= Duration::from_secs(1) {
            self.last = Instant::now();
            // A failed write is ignored; the result does not depend on it.
            let _ = writeln!(progress, "{}: {done} of {} requests", self.what, self.total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_about_once_a_second() {
        let mut ticker = Ticker::new("conv default 5 blocks".to_string(), 10);
        let mut told = Vec::new();
        ticker.last = Instant::now().checked_sub(Duration::from_secs(2)).expect("the clock runs for two seconds");
        ticker.tick(3, &mut told);
        ticker.last = Instant::now() + Duration::from_secs(60);
        ticker.tick(4, &mut told);
        assert_eq!(String::from_utf8_lossy(&told), "conv default 5 blocks: 3 of 10 requests\n");
    }
}
