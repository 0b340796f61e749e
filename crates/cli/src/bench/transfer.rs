//! `forebay bench transfer`: two processes on this host, or one side of a measurement between two hosts.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_bench::transfer::{Direction, Missing, PEERS, Peer, Row, TransferBench, run as measure, serve};
use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::{Address, Options, Secret};
use forebay_sim::chart;

use super::plot::{Point, throughput};
use super::{announce, demand, hinted, on_thread, print_report};
use crate::arguments::BenchTransfer;
use crate::failure::Failure;
use crate::output::{Table, note, print, size, uptime};

/// What the serving side says before its address.
const LISTENS: &str = "listening at ";

pub fn run(arguments: &BenchTransfer) -> Result<(), Failure> {
    demand_amounts(arguments)?;
    let bench = bench(arguments)?;
    if let Some(address) = &arguments.listen {
        let listens = |address: &Address| print(&format!("{LISTENS}{address}\n"));
        return Ok(serve(bench.options, &Address::parse(address)?, arguments.once, listens)?);
    }
    let transports: Vec<String> = match &arguments.transport[..] {
        [] if arguments.encrypt => vec!["tcp".to_owned()],
        [] => ["tcp", "shm"].map(str::to_owned).to_vec(),
        some => some.to_vec(),
    };
    demand_peers(arguments)?;
    let other = transports.iter().find(|transport| arguments.encrypt && *transport != "tcp");
    let must = "be `tcp` with `--encrypt`: nothing else is encrypted";
    demand("--transport", other.map_or("tcp", String::as_str), other.is_none(), must)?;
    let rounds = if arguments.connect.is_some() { 1 } else { transports.len() };
    announce(rounds * bench.rows(), rounds as u64 * bench.moved_bytes(), 2.0);
    let (total, mut done) = (rounds * bench.rows(), 0);
    let mut tell = move |row: &Row| {
        done += usize::from(row.baseline_version.is_none());
        let what = format!("{} {} {} x {}", row.transport, row.direction, size(row.size_bytes), row.segments);
        note(&format!("{done:>3} of {total}: {what}, depth {}, {:.2} x {}", row.depth, row.ratio, row.baseline));
    };
    let (names, python) = (arguments.peers.clone(), arguments.python.clone());
    let connect = arguments.connect.as_deref().map(Address::parse).transpose()?;
    let arguments_of_other = arguments.clone();
    // Held here too, so that a signal ends it.
    let other: Arc<Mutex<Option<Other>>> = Arc::default();
    let taken = other.clone();
    let measure_all = move || match connect {
        Some(address) => {
            let hint = "start `forebay bench transfer --listen` at this address, and measure again";
            measure(&bench, &address, &mut [], &mut tell).map_err(|error| hinted(error.with("address", &address), hint))
        }
        None => {
            let mut peers = start(&names, &python, &bench)?;
            let mut rows = Vec::new();
            for transport in transports {
                let address = {
                    let mut other = lock(&other);
                    other.insert(Other::start(&transport, &arguments_of_other)?).address.clone()
                };
                let peers = if transport == "tcp" { &mut peers[..] } else { &mut [] };
                rows.extend(measure(&bench, &address, peers, &mut tell)?);
                drop(lock(&other).take());
            }
            Ok(rows)
        }
    };
    let rows = on_thread(measure_all, move || drop(lock(&taken).take()))?;
    match arguments.json {
        true => print_report("transfer", &rows),
        false => print(&table(&rows)),
    }
    if let Some(path) = &arguments.plot {
        let points = match arguments.peers.is_empty() {
            true => rows.iter().flat_map(points).collect(),
            false => rows.iter().flat_map(engines).collect(),
        };
        chart::write(path, &throughput(points, "segment"))?;
    }
    let wrong = |row: &&Row| row.wrong_bytes + row.baseline_wrong_bytes > 0;
    if let Some(row) = rows.iter().find(wrong) {
        let error = Error::new(ErrorKind::Corrupt, "bytes arrived that were not sent").with("bytes", row.wrong_bytes);
        return Err(error.with(row.baseline, row.baseline_wrong_bytes).into());
    }
    Ok(())
}

/// Refuses amounts with which nothing is measured.
fn demand_amounts(arguments: &BenchTransfer) -> Result<(), Failure> {
    demand("--pairs", arguments.pairs, arguments.pairs > 0, "be 1 or more")?;
    demand("--run-bytes", arguments.run_bytes, arguments.run_bytes.0 > 0, "be 1 or more")?;
    for size in &arguments.size_bytes {
        demand("--size-bytes", size, size.0 > 0, "be 1 or more")?;
    }
    for (flag, counts) in [("--segments", &arguments.segments), ("--depth", &arguments.depth)] {
        for count in counts {
            demand(flag, count, *count > 0, "be 1 or more")?;
        }
    }
    Ok(())
}

/// Refuses what peers cannot do.
fn demand_peers(arguments: &BenchTransfer) -> Result<(), Failure> {
    let peers = arguments.peers.join(",");
    let is_over_tcp = peers.is_empty() || arguments.transport.iter().any(|transport| transport == "tcp");
    demand("--peers", &peers, is_over_tcp, "stand with `--transport tcp`: peers are measured over TCP")?;
    let is_one_way = peers.is_empty() || arguments.direction.iter().all(|name| name != "both");
    demand("--peers", &peers, is_one_way, "stand without `--direction both`: peers read or write")
}

/// Those that are installed, with memory for all shapes; and a note about each other one.
fn start(names: &[String], python: &Path, bench: &TransferBench) -> Result<Vec<Peer>> {
    let (mut found, mut is_missing) = (Vec::new(), false);
    for name in PEERS.into_iter().filter(|name| names.iter().any(|asked| asked == name)) {
        match Peer::start(name, python, bench.memory_bytes()?)? {
            Ok(peer) => {
                note(&format!("{name}: {}", peer.version));
                found.push(peer);
            }
            Err(Missing(why)) => {
                note(&format!("{name} is left out: {why}"));
                is_missing = true;
            }
        }
    }
    if is_missing {
        note("hint: `tools/transfer-peers.sh FOLDER` gets all peers, and `--python FOLDER/python` finds them");
    }
    if !found.is_empty() {
        let runs = (bench.rows() * (bench.pairs + 1) * found.len()) as f64;
        note(&format!("the peers take {} more at most", uptime((runs * Peer::MOST_SECONDS).ceil() as u64)));
    }
    Ok(found)
}

fn lock(other: &Mutex<Option<Other>>) -> MutexGuard<'_, Option<Other>> {
    other.lock().unwrap_or_else(PoisonError::into_inner)
}

fn points(row: &Row) -> [Point; 2] {
    let panel = format!("{} over {}", row.direction, row.transport);
    let segments = if row.segments == 1 { String::new() } else { format!("{} segments, ", row.segments) };
    let line = format!("{segments}depth {}", row.depth);
    Point::pair(&panel, &line, row.size_bytes, row.gb_per_s, (row.baseline, row.baseline_gb_per_s))
}

/// The same with peers: each engine has its line, and each depth its panel.
fn engines(row: &Row) -> Vec<Point> {
    let segments = if row.segments == 1 { String::new() } else { format!(", {} segments", row.segments) };
    let panel = format!("{} over {}{segments}, depth {}", row.direction, row.transport, row.depth);
    let line = |engine: &str, y| Point {
        panel: panel.clone(),
        line: engine.to_owned(),
        baseline_of: None,
        x: row.size_bytes as f64,
        y,
    };
    // Each of a shape's rows has the fabric's own figures.
    let own = (row.baseline_version.is_none()).then(|| line("forebay", row.gb_per_s));
    own.into_iter().chain([line(row.baseline, row.baseline_gb_per_s)]).collect()
}

fn bench(arguments: &BenchTransfer) -> Result<TransferBench> {
    let named = |name: &String| match name.as_str() {
        "read" => Direction::Read,
        "write" => Direction::Write,
        _ => Direction::Both,
    };
    let secret = arguments.secret_file.as_deref().map(Secret::read).transpose()?;
    Ok(TransferBench {
        directions: arguments.direction.iter().map(named).collect(),
        sizes_bytes: arguments.size_bytes.iter().map(|size| size.0).collect(),
        depths: arguments.depth.clone(),
        segments: arguments.segments.clone(),
        run_bytes: arguments.run_bytes.0,
        pairs: arguments.pairs,
        options: Options {
            secret,
            connections: arguments.connections,
            encrypt: arguments.encrypt,
            ucx_library: arguments.ucx_library.clone(),
            ..Options::default()
        },
    })
}

/// The other process of a measurement on this host. It ends with this one's connection.
struct Other {
    process: Child,
    address: Address,
    _home: tempfile::TempDir,
}

impl Other {
    /// `arguments` are those of the measuring side.
    fn start(transport: &str, arguments: &BenchTransfer) -> Result<Other> {
        let failed = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start the other process").source(error);
        let home = tempfile::tempdir().map_err(failed)?;
        let address = match transport {
            "tcp" => "tcp://127.0.0.1:0".to_string(),
            "ucx" => "ucx://127.0.0.1:0".to_string(),
            _ => format!("shm://{}", home.path().join("bench.sock").display()),
        };
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["bench", "transfer", "--once", "--listen", &address]).stdout(Stdio::piped());
        let [secret, library] = [&arguments.secret_file, &arguments.ucx_library];
        for (name, file) in [("--secret-file", secret), ("--ucx-library", library)] {
            command.args(file.iter().flat_map(|file| [name.as_ref(), file.as_os_str()]));
        }
        command.args(arguments.encrypt.then_some("--encrypt"));
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
        ">its wrong bytes",
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
            if row.baseline_verified_bytes > 0 { row.baseline_wrong_bytes.to_string() } else { "-".to_owned() },
        ]);
    }
    table.render("") + "\nCPU time is that of both sides\n"
}
