//! `forebay simulate`: policies side by side at several capacities, with the bounds nobody can pass.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_core::policy::{self, Make};
use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::bounds::{NextUses, opt_prefix_hits};
use crate::capacity::{Capacity, block_bytes};
use crate::mix::with_one_time_requests;
use crate::read::{Hints, read};
use crate::replay::{Outcome, Setup, replay, store_batch};
use crate::trace::Trace;

/// What a simulation is asked for.
#[derive(clap::Args, Clone, Debug)]
pub struct Arguments {
    /// Traces: Mooncake, Qwen-Bailian or recorded JSONL, plain or zstd
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Policies: density, lru, twoq, arc, s3fifo, tinylfu, or all
    #[arg(long, value_delimiter = ',', default_value = "density,lru")]
    pub policy: Vec<String>,
    /// Capacities: `5%` of the different blocks, `64GiB`, `1000000tokens`, `5000blocks`
    #[arg(long, value_delimiter = ',', default_value = "0.5%,1%,2%,5%,10%,20%")]
    pub capacity: Vec<Capacity>,
    /// Requests that wait behind the one served, told to the cache ahead of time
    #[arg(long, value_name = "REQUESTS", default_value_t = 0)]
    pub lookahead: usize,
    /// Share of one-time requests to strew in, which share a real one's system prompt
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub one_time: f64,
    /// Bytes of a block, where the trace does not say
    #[arg(long, value_name = "BYTES")]
    pub block_bytes: Option<u64>,
    /// Tokens of a block, where the trace does not say
    #[arg(long, value_name = "TOKENS")]
    pub block_tokens: Option<u32>,
    /// The trace's ids name a block alone, not with all before it
    #[arg(long)]
    pub chain: bool,
    /// Renames all blocks and reseeds all hashes
    #[arg(long, default_value_t = 0)]
    pub salt: u64,
    /// Leave out the exact optimum, which costs more than a replay
    #[arg(long)]
    pub no_opt: bool,
    /// Blocks stored at once [default: 16, fewer in caches below 256 blocks]
    #[arg(long, value_name = "COUNT")]
    pub store_batch: Option<usize>,
    /// Write a plot of hit rate against capacity to this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// One policy on one trace at one capacity.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub trace: String,
    pub policy: String,
    pub capacity_bytes: u64,
    pub capacity_blocks: u64,
    /// Of the trace's different blocks.
    pub capacity_share: f64,
    pub lookahead: usize,
    pub requests: u64,
    pub blocks: u64,
    pub object_hits: u64,
    pub prefix_hits: u64,
    /// `null` where it was not asked for.
    pub opt_prefix_hits: Option<u64>,
    pub infinite_prefix_hits: u64,
    pub orphan_peak: u64,
    pub evicted: u64,
    pub metadata_bytes: u64,
    pub ghost_bytes: u64,
    pub blocks_per_s: f64,
}

impl Row {
    pub fn hit_ratio(&self) -> f64 {
        self.prefix_hits as f64 / self.blocks as f64
    }

    /// Of the optimum at the same capacity.
    pub fn opt_ratio(&self) -> Option<f64> {
        self.opt_prefix_hits.map(|opt| if opt == 0 { 1.0 } else { self.prefix_hits as f64 / opt as f64 })
    }
}

/// Runs the whole simulation; long ones tell `progress` about every second how far they are. Writes the plot, if
/// one is asked for.
pub fn simulate(arguments: &Arguments, progress: &mut dyn Write) -> Result<Vec<Row>> {
    if !(0.0..=0.95).contains(&arguments.one_time) {
        return Err(Error::invalid("the share of one-time requests is 0 to 0.95").with("one_time", arguments.one_time));
    }
    let policies = policies(&arguments.policy)?;
    let mut rows = Vec::new();
    for path in &arguments.traces {
        let hints = Hints {
            block_tokens: arguments.block_tokens,
            block_bytes: arguments.block_bytes,
            is_chaining: arguments.chain,
        };
        let base = read(path, hints)?;
        let trace = match arguments.one_time {
            0.0 => base.clone(),
            share => with_one_time_requests(&base, share, arguments.salt),
        };
        simulate_trace(arguments, &base, &trace, &policies, progress, &mut rows)?;
    }
    if let Some(path) = &arguments.plot {
        let failed = |error| Error::new(ErrorKind::Io, "cannot write plot").with("path", path.display()).source(error);
        std::fs::write(path, crate::plot::svg(&rows)).map_err(failed)?;
    }
    Ok(rows)
}

/// Capacities are shares of `base`, so that strewn-in requests do not make the cache larger.
fn simulate_trace(
    arguments: &Arguments,
    base: &Trace,
    trace: &Trace,
    policies: &[(&'static str, Make)],
    progress: &mut dyn Write,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let next_uses = (!arguments.no_opt).then(|| NextUses::of(trace));
    let mut capacities: Vec<u64> = arguments.capacity.iter().map(|capacity| capacity.blocks(base)).collect();
    capacities.sort_unstable();
    capacities.dedup();
    for capacity_blocks in capacities {
        let opt = next_uses.as_ref().map(|next_uses| opt_prefix_hits(trace, next_uses, capacity_blocks as usize));
        for (name, make) in policies {
            let setup = Setup {
                policy: *make,
                capacity_blocks,
                lookahead: arguments.lookahead,
                store_batch: arguments.store_batch.unwrap_or_else(|| store_batch(capacity_blocks)).max(1),
                salt: arguments.salt,
            };
            let mut ticker = Ticker::new(format!("{} {name} {capacity_blocks} blocks", trace.name), trace.len());
            let start = Instant::now();
            let outcome = replay(trace, setup, |done| ticker.tick(done, progress))?;
            let seconds = start.elapsed().as_secs_f64();
            rows.push(row(base, trace, name, &setup, outcome, opt, seconds));
        }
    }
    Ok(())
}

fn row(base: &Trace, trace: &Trace, policy: &str, setup: &Setup, done: Outcome, opt: Option<u64>, seconds: f64) -> Row {
    Row {
        trace: trace.name.clone(),
        policy: policy.to_owned(),
        capacity_bytes: setup.capacity_blocks * block_bytes(trace),
        capacity_blocks: setup.capacity_blocks,
        capacity_share: setup.capacity_blocks as f64 / base.unique() as f64,
        lookahead: setup.lookahead,
        requests: done.requests,
        blocks: done.blocks,
        object_hits: done.object_hits,
        prefix_hits: done.prefix_hits,
        opt_prefix_hits: opt,
        infinite_prefix_hits: trace.infinite_hits(),
        orphan_peak: done.orphan_peak,
        evicted: done.evicted,
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
        let found = policy::ALL.iter().find(|(known, _)| known == name).copied();
        let known = policy::ALL.map(|(name, _)| name).join(", ");
        found.ok_or_else(|| {
            Error::invalid("there is no such policy").with("policy", name).hint(format!("one of {known}"))
        })
    };
    names.iter().map(find).collect()
}

/// Says how far a replay is, about once a second.
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
            // Nobody reads it, perhaps; the result does not depend on it.
            let _ = writeln!(progress, "{}: {done} of {} requests", self.what, self.total);
        }
    }
}
