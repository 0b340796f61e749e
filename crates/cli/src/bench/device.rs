//! `forebay bench device`: copies between a GPU and the pool's memory by size, number, method and direction, against
//! the peak of pinned memory in the same run; without a GPU the engine over host memory, against a parallel memcpy.

use std::ops::RangeInclusive;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use forebay_device::HostOptions;
use forebay_device::bench::device::{DeviceBench, Prepared, Row, Way};
use forebay_device::cuda::LibCuda;
use forebay_sim::chart;

use super::plot::{Point, throughput};
use super::{announce, demand, print_report};
use crate::arguments::BenchDevice;
use crate::failure::Failure;
use crate::output::{Table, note, print, size};

const SIZE_BYTES: RangeInclusive<u64> = 16..=1 << 30;
/// A method's copies are listed before they are made.
const MOST_COUNT: usize = 1 << 20;
const WORKING_SET_BYTES: RangeInclusive<u64> = 1 << 20..=64 << 30;
const MOST_PRODUCT_ROWS: u32 = 16384;
const MOST_RUNS: usize = 1_000_000;
const THREADS: RangeInclusive<usize> = 1..=64;

pub fn run(arguments: &BenchDevice) -> std::result::Result<(), Failure> {
    let bench = bench(arguments)?;
    let threads = arguments.threads.unwrap_or(HostOptions::default().threads);
    demand("--threads", threads, THREADS.contains(&threads), "be from 1 to 64")?;
    let prepared = prepare(bench, arguments, threads)?;
    let ((most, bytes), mut done) = (prepared.extent(), 0);
    if most == 0 {
        let error = Error::invalid("no number of copies fits the working set at any of the sizes")
            .with("working_set_bytes", arguments.working_set_bytes);
        return Err(Failure::Usage(error.hint("raise `--working-set-bytes`, or lower `--size-bytes` or `--count`")));
    }
    announce(most, bytes, if prepared.engine() == "host" { 4.0 } else { 20.0 });
    let rows = prepared.run(|row| {
        done += 1;
        let what = format!("{} {} x {}, {}", panel(row), row.count, size(row.size_bytes), row.method);
        note(&format!("{done:>3} of {most} at most: {what}, {:.2} x {}", row.ratio, row.baseline));
    })?;
    match arguments.json {
        true => print_report("device", &rows),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &throughput(rows.iter().flat_map(points).collect(), "copy"))?;
    }
    Ok(())
}

fn bench(arguments: &BenchDevice) -> std::result::Result<DeviceBench, Failure> {
    let named = |name: &String| Way::ALL.into_iter().find(|way| way.name() == name).expect("the parser knows them");
    let working_set = arguments.working_set_bytes;
    let is_good = WORKING_SET_BYTES.contains(&working_set.0);
    demand("--working-set-bytes", working_set, is_good, "be from 1MiB to 64GiB")?;
    for bytes in &arguments.size_bytes {
        let is_good = SIZE_BYTES.contains(&bytes.0) && bytes.0.is_multiple_of(16) && bytes.0 <= working_set.0;
        demand("--size-bytes", bytes, is_good, "be a multiple of 16 up to 1GiB, and no more than the working set")?;
    }
    for count in &arguments.count {
        demand("--count", count, (2..=MOST_COUNT).contains(count), &format!("be from 2 to {MOST_COUNT}"))?;
    }
    demand("--runs", arguments.runs, (1..=MOST_RUNS).contains(&arguments.runs), &format!("be from 1 to {MOST_RUNS}"))?;
    let (rows, most) = (arguments.product_rows, MOST_PRODUCT_ROWS);
    demand(
        "--product-rows",
        rows,
        rows <= most && rows.is_multiple_of(4),
        &format!("be a multiple of 4 up to {most}, or 0"),
    )?;
    Ok(DeviceBench {
        sizes_bytes: arguments.size_bytes.iter().map(|bytes| bytes.0).collect(),
        counts: arguments.count.clone(),
        ways: arguments.direction.iter().map(named).collect(),
        working_set_bytes: working_set.0,
        runs: arguments.runs,
        product_rows: rows,
        ..DeviceBench::default()
    })
}

/// On the engine that was named, or on a GPU if there is one.
fn prepare(bench: DeviceBench, arguments: &BenchDevice, threads: usize) -> Result<Prepared> {
    let on_device = |bench: DeviceBench| bench.on_device(Arc::new(LibCuda::load()?), arguments.device);
    match arguments.engine.as_deref() {
        Some("host") => bench.on_host(threads),
        Some(_) => on_device(bench),
        None => match on_device(bench.clone()) {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                note(&format!("no GPU is measured, but the engine over host memory: {}", error.told()));
                bench.on_host(threads)
            }
            prepared => prepared,
        },
    }
}

fn panel(row: &Row) -> String {
    let beside = row.beside.map(|what| format!(" beside a {what}")).unwrap_or_default();
    format!("{}{beside}", row.direction.name())
}

fn points(row: &Row) -> [Point; 2] {
    let line = format!("{}, {} copies", row.method, row.count);
    Point::pair(&panel(row), &line, row.size_bytes, row.gb_per_s, (row.baseline, row.baseline_gb_per_s))
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "engine",
        "method",
        "direction",
        ">size",
        ">copies",
        ">GB/s",
        "peak of",
        ">its GB/s",
        ">ratio",
        ">SMs",
        ">CPU s/GB",
        "beside",
        ">its ratio",
    ]);
    let number = |value: Option<f64>, digits| value.map_or("-".to_string(), |value| format!("{value:.digits$}"));
    for row in rows {
        table.row([
            row.engine.to_string(),
            row.method.to_string(),
            row.direction.name().to_string(),
            size(row.size_bytes),
            row.count.to_string(),
            format!("{:.2}", row.gb_per_s),
            row.baseline.to_string(),
            format!("{:.2}", row.baseline_gb_per_s),
            format!("{:.2}", row.ratio),
            row.multiprocessors.map_or("-".to_string(), |count| count.to_string()),
            number(row.cpu_s_per_gb, 3),
            row.beside.unwrap_or("-").to_string(),
            number(row.product_ratio, 2),
        ]);
    }
    table.render("")
        + "\nratio: the share of the peak; both: half of the copies each way, at once; SMs: the most multiprocessors that \
           the copies take; its ratio: the share of its speed that the product keeps\n"
}
