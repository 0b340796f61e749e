//! `forebay bench lookup`: how long one lookup takes over the socket, as an engine's scheduler asks it, beside an empty
//! call of as many bytes.

use forebay_bench::lookup::{LookupBench, Row, run as measure};
use forebay_core::ErrorKind;

use super::{Interruption, print_report};
use crate::arguments::BenchLookup;
use crate::failure::Failure;
use crate::output::{Table, print};
use crate::serve::runtime;

pub fn run(arguments: &BenchLookup) -> Result<(), Failure> {
    let BenchLookup { socket_directory, keys, rounds, json } = arguments;
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
    Ok(())
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
