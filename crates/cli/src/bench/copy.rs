//! `forebay bench copy`: the host copy engine against a plain parallel memcpy in the same run.

use forebay_device::bench::{CopyBench, Row, run as measure};
use forebay_sim::chart;

use super::plot::{Point, throughput};
use super::{demand, print_report};
use crate::arguments::BenchCopy;
use crate::failure::Failure;
use crate::output::{Table, print, size};

pub fn run(arguments: &BenchCopy) -> Result<(), Failure> {
    let mut bench = CopyBench::default();
    bench.threads = arguments.threads.unwrap_or(bench.threads);
    demand("--threads", bench.threads, bench.threads > 0, "be 1 or more")?;
    bench.pairs = arguments.pairs.unwrap_or(bench.pairs);
    bench.working_set_bytes = arguments.working_set_bytes.unwrap_or(bench.working_set_bytes);
    let total = 3 * bench.shapes.len();
    let mut done = 0;
    let rows = measure(&bench, |row| {
        done += 1;
        eprintln!(
            "{done:>2} of {total}: {} {}, {:.2} x {}",
            row.direction,
            size(row.size_bytes),
            row.ratio,
            row.baseline
        );
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
