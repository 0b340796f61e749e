//! `forebay bench ssd`: the SSD tier against fio, or plain direct I/O, on the same file in the same run.

use forebay_core::PAGE_BYTES;
use forebay_daemon::config::Bytes;
use forebay_io::ssd::bench::{BenchConfig, Direction, Row, run as measure};
use forebay_sim::chart;
use serde_json::{Value, json};

use super::plot::{Point, throughput};
use super::{demand, on_thread, print_report};
use crate::arguments::BenchSsd;
use crate::failure::Failure;
use crate::output::{Table, print, size};

/// Sixteen of the smallest segments.
const MIN_CAPACITY_BYTES: u64 = 16 << 20;

pub fn run(arguments: &BenchSsd) -> Result<(), Failure> {
    let mut config = BenchConfig::new(arguments.path.clone());
    if !arguments.size_bytes.is_empty() {
        config.sizes_bytes = arguments.size_bytes.clone();
    }
    if !arguments.depth.is_empty() {
        config.depths = arguments.depth.clone();
    }
    config.capacity_bytes = arguments.capacity_bytes.unwrap_or(config.capacity_bytes);
    config.run_bytes = arguments.run_bytes.unwrap_or(config.run_bytes);
    config.pairs = arguments.pairs.unwrap_or(config.pairs);
    for bytes in &config.sizes_bytes {
        demand("--size-bytes", Bytes(*bytes), *bytes >= PAGE_BYTES, "be 4KiB or more")?;
    }
    let capacity_bytes = config.capacity_bytes;
    demand("--capacity-bytes", Bytes(capacity_bytes), capacity_bytes >= MIN_CAPACITY_BYTES, "be 16MiB or more")?;
    let total = config.directions.len() * config.sizes_bytes.len() * config.depths.len();
    let mut done = 0;
    let tell = move |row: &Row| {
        done += 1;
        let (name, size) = (direction(row), size(row.size_bytes));
        eprintln!("{done:>2} of {total}: {name} {size} x {}, {:.2} x {}", row.depth, row.ratio(), row.baseline);
    };
    let (path, was_there) = (config.path.clone(), config.path.exists());
    let remove = || {
        // A file that was there before is not the benchmark's.
        if !was_there {
            let _ = std::fs::remove_file(path);
        }
    };
    let rows = on_thread(move || measure(&config, tell), remove)?;
    match arguments.json {
        true => print_report("ssd", &rows.iter().map(to_json).collect::<Vec<_>>()),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &throughput(rows.iter().flat_map(points).collect(), "block"))?;
    }
    Ok(())
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
            format!("{:.2}", row.gb_per_s()),
            row.baseline.to_string(),
            format!("{:.2}", row.baseline_gb_per_s()),
            format!("{:.2}", row.ratio()),
            row.p50_us.to_string(),
            row.p99_us.to_string(),
            format!("{:.1}", row.cpu_ms_per_gb()),
            format!("{:.1}", row.baseline_cpu_ms_per_gb()),
            row.errors.to_string(),
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
        "gb_per_s": row.gb_per_s(),
        "baseline": row.baseline,
        "baseline_gb_per_s": row.baseline_gb_per_s(),
        "ratio": row.ratio(),
        "pairs": row.pairs.iter().map(|(tier, baseline)| [tier.gb_per_s, baseline.gb_per_s]).collect::<Vec<_>>(),
        "p50_us": row.p50_us,
        "p99_us": row.p99_us,
        "cpu_s_per_gb": row.cpu_ms_per_gb() / 1e3,
        "baseline_cpu_s_per_gb": row.baseline_cpu_ms_per_gb() / 1e3,
        "checksum_s_per_gb": row.checksum_ms_per_gb / 1e3,
        "errors": row.errors,
    })
}

fn direction(row: &Row) -> &'static str {
    match row.direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}
