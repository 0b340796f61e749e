//! `forebay bench copy`: the host copy engine against a plain parallel memcpy in the same run.

use std::ops::RangeInclusive;

use forebay_device::bench::{CopyBench, Row, run as measure};
use forebay_sim::chart;

use super::plot::{Point, throughput};
use super::{announce, demand, print_report};
use crate::arguments::BenchCopy;
use crate::failure::Failure;
use crate::output::{Table, note, print, size};

const MOST_THREADS: usize = 1024;
/// At least one of the largest blocks.
const WORKING_SET_BYTES: RangeInclusive<u64> = 16 << 20..=1 << 40;

pub fn run(arguments: &BenchCopy) -> Result<(), Failure> {
    let mut bench = CopyBench::default();
    bench.threads = arguments.threads.unwrap_or(bench.threads);
    let threads = bench.threads;
    demand("--threads", threads, (1..=MOST_THREADS).contains(&threads), &format!("be from 1 to {MOST_THREADS}"))?;
    bench.pairs = arguments.pairs;
    demand("--pairs", bench.pairs, bench.pairs > 0, "be 1 or more")?;
    bench.working_set_bytes = arguments.working_set_bytes.0;
    let is_good = WORKING_SET_BYTES.contains(&bench.working_set_bytes);
    demand("--working-set-bytes", arguments.working_set_bytes, is_good, "be from 16MiB to 1TiB")?;
    let total = 3 * bench.shapes.len();
    announce(total, 2 * (total as u64).saturating_mul(bench.pairs as u64).saturating_mul(bench.working_set_bytes), 8.0);
    let mut done = 0;
    let rows = measure(&bench, |row| {
        done += 1;
        let (direction, size) = (row.direction, size(row.size_bytes));
        note(&format!("{done:>2} of {total}: {direction} {size}, {:.2} x {}", row.ratio, row.baseline));
    })?;
    match arguments.json {
        true => print_report("copy", &rows),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &throughput(rows.iter().flat_map(points).collect(), "block"))?;
    }
    Ok(())
}

fn points(row: &Row) -> [Point; 2] {
    let line = if row.fragments == 1 { "in one piece" } else { "in many pieces" };
    Point::pair(row.direction, line, row.size_bytes, row.gb_per_s, (row.baseline, row.baseline_gb_per_s))
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "direction",
        ">block",
        ">fragments",
        ">threads",
        "level",
        ">GB/s",
        ">memcpy GB/s",
        ">ratio",
        ">CPU s/GB",
        ">memcpy CPU s/GB",
    ]);
    for row in rows {
        table.row([
            row.direction.to_string(),
            size(row.size_bytes),
            row.fragments.to_string(),
            row.threads.to_string(),
            row.level.clone(),
            format!("{:.2}", row.gb_per_s),
            format!("{:.2}", row.baseline_gb_per_s),
            format!("{:.2}", row.ratio),
            format!("{:.3}", row.cpu_s_per_gb),
            format!("{:.3}", row.baseline_cpu_s_per_gb),
        ]);
    }
    table.render("")
        + "\nsummed: each block is compared with its checksum in the same pass, as engines load by default\n"
}
