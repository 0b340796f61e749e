//! `forebay bench`: measurements, as a table while they are made and as one JSON object for reports.

mod copy;
mod device;
mod lookup;
mod plot;
mod redis;
mod ssd;
mod transfer;

use std::fmt::Display;
use std::thread;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::json;
use tokio::sync::oneshot;

use crate::arguments::Bench;
use crate::ending::Ending;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::output::{note, print_json, size, uptime};
use crate::serve::runtime;

/// For the thread of a measurement that was interrupted, to end and to remove what it made.
const REMOVAL: Duration = Duration::from_secs(5);

pub fn run(arguments: &Bench) -> std::result::Result<(), Failure> {
    let plot = match arguments {
        Bench::Copy(arguments) => &arguments.plot,
        Bench::Device(arguments) => &arguments.plot,
        Bench::Lookup(arguments) => &arguments.plot,
        Bench::Redis(arguments) => &arguments.plot,
        Bench::Ssd(arguments) => &arguments.plot,
        Bench::Transfer(arguments) => &arguments.plot,
    };
    plot.iter().try_for_each(|path| forebay_sim::chart::check(path))?;
    match arguments {
        Bench::Copy(arguments) => copy::run(arguments),
        Bench::Device(arguments) => device::run(arguments),
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

/// Refuses a value that cannot be measured.
pub fn demand(flag: &str, value: impl Display, holds: bool, must: &str) -> std::result::Result<(), Failure> {
    let error = || Error::invalid(format!("`{flag}` cannot be `{value}`")).hint(format!("it must {must}"));
    if holds { Ok(()) } else { Err(Failure::Usage(error())) }
}

/// Says before a measurement how long it takes, at a speed that is usual for what it measures.
pub fn announce(rows: usize, bytes: u64, gb_per_s: f64) {
    let seconds = (bytes as f64 / 1e9 / gb_per_s).ceil() as u64;
    let (moved, time) = (size(bytes), uptime(seconds));
    note(&format!("{rows} rows; {moved} are moved, which takes about {time} at {gb_per_s} GB/s"));
}

/// The error with this hint, unless it has one.
pub fn hinted(error: Error, hint: &str) -> Error {
    if error.hint_text().is_none() { error.hint(hint) } else { error }
}

/// What ends a measurement early.
pub fn interrupted() -> Error {
    Error::new(ErrorKind::Unavailable, "the measurement was interrupted")
}

/// For a measurement that blocks: it has a thread. If a signal comes first, `stop` tells the thread to end. The thread
/// removes what it made, or `stop` does, because a thread whose disk hangs ends only with the process.
pub fn on_thread<T: Send + 'static>(
    measure: impl FnOnce() -> Result<T> + Send + 'static,
    stop: impl FnOnce(),
) -> Result<T> {
    runtime()?.block_on(async {
        let mut ending = Ending::listen()?;
        let (done, mut measured) = oneshot::channel();
        let measure = move || drop(done.send(measure()));
        let thread = thread::Builder::new().name("bench".into()).spawn(measure);
        thread.map_err(|error| Error::new(ErrorKind::Io, "cannot start a thread").source(error))?;
        tokio::select! {
            biased;
            () = ending.come() => {
                stop();
                let _ = tokio::time::timeout(REMOVAL, &mut measured).await;
                Err(interrupted())
            }
            measured = &mut measured => measured.expect("it does not panic"),
        }
    })
}
