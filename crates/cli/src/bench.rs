//! `forebay bench`: measurements, as a table while they are made and as one JSON object for reports.

mod copy;
mod lookup;
mod plot;
mod redis;
mod ssd;
mod transfer;

use serde::Serialize;
use serde_json::json;

use crate::arguments::Bench;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::output::print_json;

pub fn run(arguments: &Bench) -> Result<(), Failure> {
    match arguments {
        Bench::Copy(arguments) => copy::run(arguments),
        Bench::Lookup(arguments) => lookup::run(arguments),
        Bench::Redis(arguments) => redis::run(arguments),
        Bench::Ssd(arguments) => ssd::run(arguments),
        Bench::Transfer(arguments) => transfer::run(arguments),
    }
}

/// The object that `--json` prints: what was run, where, and the rows.
pub fn print_report(bench: &str, rows: &[impl Serialize]) {
    let command = std::env::args().enumerate().map(|(at, word)| if at == 0 { "forebay".to_string() } else { word });
    print_json(&json!({
        "bench": bench,
        "version": crate::machine::version(),
        "command": command.collect::<Vec<_>>().join(" "),
        "machine": Machine::here(),
        "rows": rows,
    }));
}
