//! `forebay bench transfer`: two processes on this host, or one side of a measurement between two hosts.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use forebay_bench::transfer::{Direction, Row, TransferBench, run as measure, serve};
use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::{Address, Options, Secret};
use forebay_sim::chart;

use super::plot::{Point, throughput};
use super::{hinted, print_report};
use crate::arguments::BenchTransfer;
use crate::failure::Failure;
use crate::output::{Table, print, size};

/// What the serving side says before its address.
const LISTENS: &str = "listening at ";

pub fn run(arguments: &BenchTransfer) -> Result<(), Failure> {
    let bench = bench(arguments)?;
    if let Some(address) = &arguments.listen {
        let listens = |address: &Address| print(&format!("{LISTENS}{address}\n"));
        return Ok(serve(bench.options, &Address::parse(address)?, arguments.once, listens)?);
    }
    let transports = match &arguments.transport {
        Some(transport) => vec![transport.as_str()],
        None => vec!["tcp", "shm"],
    };
    let rounds = if arguments.connect.is_some() { 1 } else { transports.len() };
    let (total, mut done) = (rounds * bench.rows(), 0);
    let mut tell = |row: &Row| {
        done += 1;
        let what = format!("{} {} {} x {}", row.transport, row.direction, size(row.size_bytes), row.segments);
        eprintln!("{done:>3} of {total}: {what}, depth {}, {:.2} x {}", row.depth, row.ratio, row.baseline);
    };
    let mut rows = Vec::new();
    match &arguments.connect {
        Some(address) => {
            let hint = "start `forebay bench transfer --listen` at this address, and measure again";
            rows = measure(&bench, &Address::parse(address)?, &mut tell).map_err(|error| hinted(error, hint))?;
        }
        None => {
            for transport in transports {
                let other = Other::start(transport)?;
                rows.extend(measure(&bench, &other.address, &mut tell)?);
            }
        }
    }
    match arguments.json {
        true => print_report("transfer", &rows),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        chart::write(path, &throughput(rows.iter().flat_map(points).collect(), "segment"))?;
    }
    let wrong: u64 = rows.iter().map(|row| row.wrong_bytes).sum();
    if wrong > 0 {
        return Err(Error::new(ErrorKind::Corrupt, "bytes arrived that were not sent").with("bytes", wrong).into());
    }
    Ok(())
}

fn points(row: &Row) -> [Point; 2] {
    let panel = format!("{} over {}", row.direction, row.transport);
    let segments = if row.segments == 1 { String::new() } else { format!("{} segments, ", row.segments) };
    let line = format!("{segments}depth {}", row.depth);
    Point::pair(&panel, &line, row.size_bytes, row.gb_per_s, (row.baseline, row.baseline_gb_per_s))
}

fn bench(arguments: &BenchTransfer) -> Result<TransferBench> {
    let mut bench = TransferBench::default();
    let given = |wanted: &[u64], default: &mut Vec<u64>| {
        if !wanted.is_empty() {
            *default = wanted.to_vec();
        }
    };
    given(&arguments.size_bytes, &mut bench.sizes_bytes);
    given(&arguments.segments, &mut bench.segments);
    given(&arguments.depth, &mut bench.depths);
    if !arguments.direction.is_empty() {
        let named = |name: &String| match name.as_str() {
            "read" => Direction::Read,
            "write" => Direction::Write,
            _ => Direction::Both,
        };
        bench.directions = arguments.direction.iter().map(named).collect();
    }
    bench.pairs = arguments.pairs.unwrap_or(bench.pairs);
    bench.run_bytes = arguments.run_bytes.unwrap_or(bench.run_bytes);
    let secret = arguments.secret_file.as_deref().map(Secret::read).transpose()?;
    let connections = arguments.connections.unwrap_or(bench.options.connections);
    bench.options = Options { secret, connections, ..bench.options };
    Ok(bench)
}

/// The other process of a measurement on this host. It ends with this one's connection.
struct Other {
    process: Child,
    address: Address,
    _home: tempfile::TempDir,
}

impl Other {
    fn start(transport: &str) -> Result<Other> {
        let failed = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start the other process").source(error);
        let home = tempfile::tempdir().map_err(failed)?;
        let address = match transport {
            "tcp" => "tcp://127.0.0.1:0".to_string(),
            _ => format!("shm://{}", home.path().join("bench.sock").display()),
        };
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["bench", "transfer", "--once", "--listen", &address]).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(failed)?;
        let mut line = String::new();
        let said = BufReader::new(process.stdout.take().expect("it is piped")).read_line(&mut line);
        let address = said.map_err(failed).and_then(|_| match line.trim_end().strip_prefix(LISTENS) {
            Some(address) => Address::parse(address),
            None => Err(Error::new(ErrorKind::Unavailable, "the other process does not listen")),
        });
        match address {
            Ok(address) => Ok(Other { process, address, _home: home }),
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(error)
            }
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "transport",
        "direction",
        ">size",
        ">segments",
        ">depth",
        ">GB/s",
        "baseline",
        ">its GB/s",
        ">ratio",
        ">p50 us",
        ">p99 us",
        ">its p50 us",
        ">its p99 us",
        ">CPU s/GB",
        ">its CPU s/GB",
        ">CPU ratio",
        ">wrong bytes",
    ]);
    for row in rows {
        table.row([
            row.transport.to_string(),
            row.direction.to_string(),
            size(row.size_bytes),
            row.segments.to_string(),
            row.depth.to_string(),
            format!("{:.2}", row.gb_per_s),
            row.baseline.to_string(),
            format!("{:.2}", row.baseline_gb_per_s),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.p50_us),
            format!("{:.1}", row.p99_us),
            format!("{:.1}", row.baseline_p50_us),
            format!("{:.1}", row.baseline_p99_us),
            format!("{:.3}", row.cpu_s_per_gb),
            format!("{:.3}", row.baseline_cpu_s_per_gb),
            format!("{:.2}", row.cpu_ratio),
            row.wrong_bytes.to_string(),
        ]);
    }
    table.render("") + "\nCPU time is that of both sides\n"
}
