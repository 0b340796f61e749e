//! `forebay bench lookup`: how long one lookup takes over the socket, as an engine's scheduler asks it, beside an empty
//! call of as many bytes.

use forebay_bench::lookup::{LookupBench, Row, run as measure};
use forebay_core::ErrorKind;
use forebay_sim::chart;

use super::plot::{Point, latency};
use super::{Interruption, print_report};
use crate::arguments::BenchLookup;
use crate::failure::Failure;
use crate::output::{Table, print};
use crate::serve::runtime;

pub fn run(arguments: &BenchLookup) -> Result<(), Failure> {
    let BenchLookup { socket_directory, keys, rounds, plot, json } = arguments;
    let bench = LookupBench { socket_directory: socket_directory.clone(), keys: keys.clone(), rounds: *rounds };
    // Dropping the measurement ends the private daemon.
    let rows = runtime()?.block_on(async {
        let interruption = Interruption::listen()?;
        tokio::select! {
            biased;
            error = interruption.come() => Err(error),
            rows = measure(&bench) => rows,
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
    let mut table =
        Table::new(&["op", ">keys", ">lookups", ">p50 us", ">p99 us", ">max us", ">empty p50 us", ">ratio", ">errors"]);
    for row in rows {
        table.row([
            row.op.to_string(),
            row.keys.to_string(),
            row.rounds.to_string(),
            format!("{:.0}", row.p50_us),
            format!("{:.0}", row.p99_us),
            format!("{:.0}", row.max_us),
            format!("{:.0}", row.empty_p50_us),
            format!("{:.2}", row.ratio),
            row.errors.to_string(),
        ]);
    }
    table.render("")
}
