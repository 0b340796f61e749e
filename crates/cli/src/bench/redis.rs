//! `forebay bench redis`: the Redis tier on a server that runs, and the size at which blocks are best cut.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

use forebay_core::{Error, ErrorKind};
use forebay_daemon::config::Bytes;
use forebay_io::redis::RedisConfig;
use forebay_io::redis::bench::{BenchConfig, Direction, Lookups, Report, Row, run as measure, sweet_spot};
use forebay_sim::chart;
use serde_json::{Value, json};

use super::plot::{Point, throughput};
use super::{announce, demand, hinted, on_thread, print_report};
use crate::arguments::BenchRedis;
use crate::failure::Failure;
use crate::output::{Table, note, print, size};

/// Sizes of a sweep, in powers of two.
const SWEEP: RangeInclusive<u32> = 17..=25;
/// The bounds of what is measured: a block is one of the daemon's, and a time is kept for each.
const BLOCK_BYTES: RangeInclusive<u64> = 1..=512 << 20;
const MOST_COUNT: usize = 1024;
const MOST_RUNS: usize = 1_000_000;
const MOST_RUN_BYTES: u64 = 1 << 50;
/// Each has a block of 4 KiB.
const MOST_LOOKUP_KEYS: u64 = 1 << 16;

pub fn run(arguments: &BenchRedis) -> Result<(), Failure> {
    let config = config(arguments)?;
    let total = config.directions.len() * config.sizes_bytes.len();
    announce(total, config.moved_bytes(), 1.0);
    let (mut done, stop) = (0, config.stop.clone());
    let tell = move |row: &Row| {
        done += 1;
        let speed = row.gb_per_s();
        note(&format!("{done:>2} of {total}: {} {}, {speed:.2} GB/s", direction(row), size(row.size_bytes)));
    };
    let hint = "check the server and its URL, `redis://HOST:PORT`";
    let measure = move || measure(&config, tell).map_err(|error| hinted(error, hint));
    let report = on_thread(measure, move || stop.store(true, Ordering::Relaxed))?;
    match arguments.json {
        true => print_report("redis", &to_json(&report)),
        false => print(&table(&report)),
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &throughput(report.rows.iter().map(point).collect(), "block"))?;
    }
    if let Some(bytes) = sweet_spot(&report.rows).filter(|_| arguments.sweep && !arguments.json) {
        print(&format!("\n[tier.redis]\nvalue_bytes = {bytes}\n"));
    }
    judge(&report)
}

fn judge(report: &Report) -> Result<(), Failure> {
    let of_rows: u64 = report.rows.iter().map(|row| row.errors).sum();
    let errors = of_rows + report.lookups.as_ref().map_or(0, |lookups| lookups.errors);
    if errors == 0 {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Unavailable, "operations of the tier failed").with("errors", errors);
    Err(error.hint("a server that is full refuses stores or evicts blocks: see its `maxmemory`, and its log").into())
}

fn point(row: &Row) -> Point {
    Point {
        panel: direction(row).to_owned(),
        line: "the Redis tier".to_owned(),
        baseline_of: None,
        x: row.size_bytes as f64,
        y: row.gb_per_s(),
    }
}

fn config(arguments: &BenchRedis) -> Result<BenchConfig, Failure> {
    let mut redis = RedisConfig::new(vec![arguments.url.clone()]);
    redis.pipeline_depth = arguments.depth;
    redis.connections = arguments.connections;
    redis.threads = arguments.threads;
    for (flag, count) in
        [("--depth", redis.pipeline_depth), ("--connections", redis.connections), ("--threads", redis.threads)]
    {
        demand(flag, count, (1..=MOST_COUNT).contains(&count), &format!("be from 1 to {MOST_COUNT}"))?;
    }
    let mut config = BenchConfig::new(redis);
    config.sizes_bytes = match arguments.sweep {
        true => SWEEP.map(|power| 1 << power).collect(),
        false => arguments.size_bytes.iter().map(|size| size.0).collect(),
    };
    for size in &config.sizes_bytes {
        demand("--size-bytes", Bytes(*size), BLOCK_BYTES.contains(size), "be from 1 to 512MiB")?;
    }
    match arguments.op.as_deref() {
        Some("get") => config.directions = vec![Direction::Get],
        Some(_) => config.directions = vec![Direction::Set],
        None => {}
    }
    let longest = config.sizes_bytes.iter().copied().max().unwrap_or(0);
    let whole = config.redis.value_bytes.max(longest);
    config.redis.value_bytes = arguments.value_bytes.map_or(whole, |bytes| bytes.0);
    config.runs = arguments.runs;
    demand("--runs", config.runs, (1..=MOST_RUNS).contains(&config.runs), &format!("be from 1 to {MOST_RUNS}"))?;
    config.run_bytes = arguments.run_bytes.0;
    let is_good = (1..=MOST_RUN_BYTES).contains(&config.run_bytes);
    demand("--run-bytes", arguments.run_bytes, is_good, "be from 1 to 1024TiB")?;
    config.at_once = arguments.at_once;
    config.lookup_keys = arguments.lookup_keys;
    let is_good = config.lookup_keys <= MOST_LOOKUP_KEYS;
    demand("--lookup-keys", config.lookup_keys, is_good, &format!("be {MOST_LOOKUP_KEYS} or less"))?;
    config.redis.check().map_err(Failure::Usage)?;
    Ok(config)
}

fn table(report: &Report) -> String {
    let mut table = Table::new(&["op", ">block", ">in flight", ">GB/s", ">GB/CPU-s", ">p50 us", ">p99 us", ">errors"]);
    for row in &report.rows {
        table.row([
            direction(row).to_string(),
            size(row.size_bytes),
            row.depth.to_string(),
            format!("{:.2}", row.gb_per_s()),
            format!("{:.2}", 1.0 / row.cpu_s_per_gb()),
            row.latency_us(50).to_string(),
            row.latency_us(99).to_string(),
            row.errors.to_string(),
        ]);
    }
    let lookups = |lookups: &Lookups| {
        format!(
            "lookup of {} keys: p50 {} us, p99 {} us; one round trip for each: {} us, {:.1} x; {} errors\n",
            lookups.keys,
            lookups.p50_us,
            lookups.p99_us,
            lookups.one_by_one_p50_us,
            ratio(lookups),
            lookups.errors
        )
    };
    table.render("") + &report.lookups.as_ref().map(lookups).unwrap_or_default()
}

fn to_json(report: &Report) -> Vec<Value> {
    let mut rows: Vec<Value> = report.rows.iter().map(row_to_json).collect();
    rows.extend(report.lookups.as_ref().map(|lookups| {
        json!({
            "op": "lookup",
            "keys": lookups.keys,
            "p50_us": lookups.p50_us,
            "p99_us": lookups.p99_us,
            "baseline": "one round trip for each key",
            "baseline_p50_us": lookups.one_by_one_p50_us,
            "ratio": ratio(lookups),
            "errors": lookups.errors,
        })
    }));
    rows
}

fn row_to_json(row: &Row) -> Value {
    json!({
        "op": direction(row),
        "size_bytes": row.size_bytes,
        "depth": row.depth,
        "gb_per_s": row.gb_per_s(),
        "cpu_s_per_gb": row.cpu_s_per_gb(),
        "samples": row.samples.iter().map(|sample| json!({
            "gb_per_s": sample.gb_per_s,
            "client_cpu_s_per_gb": sample.client_cpu_s_per_gb,
            "server_cpu_s_per_gb": sample.server_cpu_s_per_gb,
        })).collect::<Vec<_>>(),
        "p50_us": row.latency_us(50),
        "p99_us": row.latency_us(99),
        "latencies_us": row.latencies_us,
        "errors": row.errors,
    })
}

fn direction(row: &Row) -> &'static str {
    match row.direction {
        Direction::Get => "get",
        Direction::Set => "set",
    }
}

/// How many times longer one round trip for each key takes.
fn ratio(lookups: &Lookups) -> f64 {
    lookups.one_by_one_p50_us as f64 / lookups.p50_us.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_with_errors_fails_and_says_how_many() {
        let row = Row {
            direction: Direction::Set,
            size_bytes: 1 << 20,
            depth: 4,
            samples: Vec::new(),
            latencies_us: Vec::new(),
            errors: 0,
        };
        let lookups = Lookups { keys: 64, p50_us: 1, p99_us: 2, one_by_one_p50_us: 3, errors: 0 };
        let good = Report { rows: vec![row.clone()], lookups: Some(lookups.clone()) };
        assert!(judge(&good).is_ok());
        let rows = vec![Row { errors: 3, ..row.clone() }, row];
        let bad = Report { rows, lookups: Some(Lookups { errors: 4, ..lookups }) };
        let Err(Failure::Run(error)) = judge(&bad) else { panic!("it is a failure of the run") };
        assert!(error.to_string().contains("(errors=`7`)"), "{error}");
    }
}
