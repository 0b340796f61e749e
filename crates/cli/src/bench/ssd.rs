//! `forebay bench ssd`: the SSD tier against fio, or plain direct I/O, on the same file in the same run.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

use forebay_core::{Error, ErrorKind, PAGE_BYTES};
use forebay_daemon::config::Bytes;
use forebay_io::ssd::bench::{BenchConfig, Direction, Row, run as measure};
use forebay_sim::chart;
use serde_json::{Value, json};

use super::plot::{Point, throughput};
use super::{announce, demand, on_thread, print_report};
use crate::arguments::BenchSsd;
use crate::failure::Failure;
use crate::output::{Table, note, print, size};

/// Sixteen of the smallest segments, and what files of common filesystems can have twice.
const CAPACITY_BYTES: RangeInclusive<u64> = 16 << 20..=1 << 42;
/// A thread of the baseline for each.
const MOST_DEPTH: u32 = 1024;
/// A time is kept for each operation.
const MOST_RUN_BYTES: u64 = 1 << 50;

pub fn run(arguments: &BenchSsd) -> Result<(), Failure> {
    let config = config(arguments)?;
    config.check_path()?;
    let (shapes, moved) = (config.sizes_bytes.len() * config.depths.len(), config.moved_bytes());
    let total = config.directions.len() * shapes;
    announce(total, moved, 2.0);
    let mut done = 0;
    let tell = move |row: &Row| {
        done += 1;
        let (name, size) = (direction(row), size(row.size_bytes));
        let told = ratio(row).map_or("failed".to_owned(), |ratio| format!("{ratio:.2} x {}", row.baseline));
        note(&format!("{done:>2} of {total}: {name} {size} x {}, {told}", row.depth));
    };
    let (path, was_there, stop) = (config.path.clone(), config.path.exists(), config.stop.clone());
    let stop = || {
        stop.store(true, Ordering::Relaxed);
        // A file that was there before is not the benchmark's.
        if !was_there {
            let _ = std::fs::remove_file(path);
        }
    };
    let rows = on_thread(move || measure(&config, tell), stop)?;
    match arguments.json {
        true => print_report("ssd", &rows.iter().map(to_json).collect::<Vec<_>>()),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        let good = rows.iter().filter(|row| ratio(row).is_some());
        chart::write(path, &throughput(good.flat_map(points).collect(), "block"))?;
    }
    judge(&rows)
}

fn config(arguments: &BenchSsd) -> Result<BenchConfig, Failure> {
    let bytes = |sizes: &[Bytes]| sizes.iter().map(|size| size.0).collect();
    let config = BenchConfig {
        sizes_bytes: bytes(&arguments.size_bytes),
        depths: arguments.depth.clone(),
        pairs: arguments.pairs,
        run_bytes: arguments.run_bytes.0,
        capacity_bytes: arguments.capacity_bytes.0,
        ..BenchConfig::new(arguments.path.clone())
    };
    let capacity = arguments.capacity_bytes;
    demand("--capacity-bytes", capacity, CAPACITY_BYTES.contains(&capacity.0), "be from 16MiB to 4TiB")?;
    let most = config.most_block_bytes();
    for size in &arguments.size_bytes {
        let is_good = (PAGE_BYTES..=most).contains(&size.0) && size.0.is_multiple_of(PAGE_BYTES);
        let must = format!("be a multiple of 4KiB, and {} at most with this `--capacity-bytes`", Bytes(most));
        demand("--size-bytes", size, is_good, &must)?;
    }
    for depth in &config.depths {
        demand("--depth", depth, (1..=MOST_DEPTH).contains(depth), &format!("be from 1 to {MOST_DEPTH}"))?;
    }
    demand("--pairs", config.pairs, config.pairs > 0, "be 1 or more")?;
    let deepest = u64::from(config.depths.iter().copied().max().unwrap_or(1));
    let least = config.sizes_bytes.iter().copied().max().unwrap_or(1) * deepest;
    let is_good = (least..=MOST_RUN_BYTES).contains(&config.run_bytes);
    let must = format!("be from {} (the largest block, as often as the largest depth says) to 1024TiB", Bytes(least));
    demand("--run-bytes", arguments.run_bytes, is_good, &must)?;
    Ok(config)
}

/// None if operations failed: nothing is known then.
fn ratio(row: &Row) -> Option<f64> {
    (row.errors.count == 0).then(|| row.ratio())
}

fn judge(rows: &[Row]) -> Result<(), Failure> {
    let Some(why) = rows.iter().find_map(|row| row.errors.first.as_ref()) else { return Ok(()) };
    let errors: u64 = rows.iter().map(|row| row.errors.count).sum();
    let error = Error::new(ErrorKind::Io, "operations of the tier failed").with("errors", errors).with("first", why);
    Err(error.hint("the kernel's log says what is wrong with a disk; `forebay doctor` checks the SSD tier").into())
}

fn points(row: &Row) -> [Point; 2] {
    let line = format!("depth {}", row.depth);
    Point::pair(direction(row), &line, row.size_bytes, row.gb_per_s(), (row.baseline, row.baseline_gb_per_s()))
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "direction",
        ">block",
        ">depth",
        "engine",
        ">GB/s",
        "baseline",
        ">its GB/s",
        ">ratio",
        ">p50 us",
        ">p99 us",
        ">CPU ms/GB",
        ">its CPU ms/GB",
        ">errors",
    ]);
    for row in rows {
        table.row([
            direction(row).to_string(),
            size(row.size_bytes),
            row.depth.to_string(),
            row.engine.to_string(),
            ratio(row).map_or("-".to_owned(), |_| format!("{:.2}", row.gb_per_s())),
            row.baseline.to_string(),
            format!("{:.2}", row.baseline_gb_per_s()),
            ratio(row).map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
            row.p50_us.to_string(),
            row.p99_us.to_string(),
            format!("{:.1}", row.cpu_ms_per_gb()),
            format!("{:.1}", row.baseline_cpu_ms_per_gb()),
            row.errors.count.to_string(),
        ]);
    }
    table.render("")
}

fn to_json(row: &Row) -> Value {
    json!({
        "direction": direction(row),
        "size_bytes": row.size_bytes,
        "depth": row.depth,
        "engine": row.engine,
        "gb_per_s": ratio(row).map(|_| row.gb_per_s()),
        "baseline": row.baseline,
        "baseline_gb_per_s": row.baseline_gb_per_s(),
        "ratio": ratio(row),
        "pairs": row.pairs.iter().map(|(tier, baseline)| [tier.gb_per_s, baseline.gb_per_s]).collect::<Vec<_>>(),
        "p50_us": row.p50_us,
        "p99_us": row.p99_us,
        "cpu_s_per_gb": row.cpu_ms_per_gb() / 1e3,
        "baseline_cpu_s_per_gb": row.baseline_cpu_ms_per_gb() / 1e3,
        "checksum_s_per_gb": row.checksum_ms_per_gb / 1e3,
        "errors": row.errors.count,
        "first_error": row.errors.first,
    })
}

fn direction(row: &Row) -> &'static str {
    match row.direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::ssd::bench::{Errors, Sample};

    use super::*;

    #[test]
    fn a_run_with_errors_has_a_reason_and_neither_rate_nor_ratio() {
        let sample = Sample { gb_per_s: 1.25, cpu_ms_per_gb: 1.0 };
        let good = Row {
            direction: Direction::Read,
            size_bytes: 4096,
            depth: 1,
            engine: "threads",
            baseline: "pread/pwrite",
            pairs: vec![(sample, sample)],
            p50_us: 1,
            p99_us: 2,
            checksum_ms_per_gb: 1.0,
            errors: Errors::default(),
        };
        let errors = Errors { count: 3, first: Some("a load failed: the disk reported an error".to_owned()) };
        let bad = Row { errors, ..good.clone() };
        assert!(judge(std::slice::from_ref(&good)).is_ok());
        let Err(Failure::Run(error)) = judge(&[good.clone(), bad.clone()]) else { panic!("it is a failure") };
        assert!(
            error.to_string().contains("(errors=`3`, first=`a load failed: the disk reported an error`)"),
            "{error}"
        );
        assert!(error.hint_text().is_some());
        let lines = table(&[good, bad.clone()]);
        let cells: Vec<Vec<&str>> = lines.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((cells[1][5], cells[1][8], cells[2][5], cells[2][8]), ("1.25", "1.00", "-", "-"), "{lines}");
        let json = to_json(&bad);
        assert!(json["ratio"].is_null() && json["gb_per_s"].is_null() && json["errors"] == 3, "{json}");
    }
}
