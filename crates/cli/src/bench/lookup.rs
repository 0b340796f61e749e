//! `forebay bench lookup`: how long one lookup takes over the socket, as an engine's scheduler asks it, beside an empty
//! call of as many bytes.

use forebay_bench::lookup::{LookupBench, Row, run as measure};
use forebay_core::ErrorKind;
use forebay_sim::chart;

use super::plot::{Point, latency};
use super::{demand, interrupted, print_report};
use crate::arguments::BenchLookup;
use crate::ending::Ending;
use crate::failure::Failure;
use crate::output::{Table, note, print};
use crate::serve::runtime;

/// As many blocks of 4 KiB are stored.
const MOST_KEYS: usize = 1 << 20;
/// Each lookup's time is kept.
const MOST_ROUNDS: usize = 1_000_000_000;

pub fn run(arguments: &BenchLookup) -> Result<(), Failure> {
    let BenchLookup { socket_directory, keys, rounds, plot, json } = arguments;
    let bench = LookupBench { socket_directory: socket_directory.clone(), keys: keys.clone(), rounds: *rounds };
    for keys in keys {
        demand("--keys", keys, (1..=MOST_KEYS).contains(keys), &format!("be from 1 to {MOST_KEYS}"))?;
    }
    demand("--rounds", rounds, (1..=MOST_ROUNDS).contains(rounds), &format!("be from 1 to {MOST_ROUNDS}"))?;
    // Dropping the measurement ends the private daemon.
    let rows = runtime()?.block_on(async {
        let mut ending = Ending::listen()?;
        tokio::select! {
            biased;
            () = ending.come() => Err(interrupted()),
            rows = measure(&bench, &note) => rows,
        }
    });
    let rows = rows.map_err(|error| match error.kind() {
        ErrorKind::Invalid => Failure::Usage(error),
        _ => Failure::from(error),
    })?;
    match json {
        true => print_report("lookup", &rows),
        false => print(&table(&rows)),
    }
    if let Some(path) = plot {
        chart::write(path, &latency(rows.iter().flat_map(points).collect()))?;
    }
    Ok(())
}

/// The empty call is the baseline of the median.
fn points(row: &Row) -> [Point; 3] {
    let panel = match row.op {
        "hit" => "lookups that hit",
        _ => "lookups that miss",
    };
    let point = |line: &str, baseline_of: Option<&str>, y| Point {
        panel: panel.to_owned(),
        line: line.to_owned(),
        baseline_of: baseline_of.map(str::to_owned),
        x: row.keys as f64,
        y,
    };
    [
        point("p50", None, row.p50_us),
        point("p99", None, row.p99_us),
        point("empty call, p50", Some("p50"), row.empty_p50_us),
    ]
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "op",
        ">keys",
        ">lookups",
        ">p50 us",
        ">p99 us",
        ">max us",
        ">empty p50 us",
        ">empty p99 us",
        ">p50 ratio",
        ">p99 ratio",
        ">errors",
    ]);
    for row in rows {
        table.row([
            row.op.to_string(),
            row.keys.to_string(),
            row.rounds.to_string(),
            format!("{:.0}", row.p50_us),
            format!("{:.0}", row.p99_us),
            format!("{:.0}", row.max_us),
            format!("{:.0}", row.empty_p50_us),
            format!("{:.0}", row.empty_p99_us),
            format!("{:.2}", row.ratio),
            format!("{:.2}", row.p99_ratio),
            row.errors.to_string(),
        ]);
    }
    table.render("")
}
