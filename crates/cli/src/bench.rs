//! `forebay bench`: measurements, as a table while they are made and as one JSON object for reports.

mod copy;
mod lookup;
mod plot;
mod redis;
mod ssd;
mod transfer;

use std::fmt::Display;
use std::thread;

use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::arguments::Bench;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::output::print_json;
use crate::serve::runtime;

pub fn run(arguments: &Bench) -> std::result::Result<(), Failure> {
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

/// Refuses a value that cannot be measured.
pub fn demand(flag: &str, value: impl Display, holds: bool, must: &str) -> std::result::Result<(), Failure> {
    let error = || Error::invalid(format!("`{flag}` cannot be `{value}`")).hint(format!("it must {must}"));
    if holds { Ok(()) } else { Err(Failure::Usage(error())) }
}

/// The error with this hint, unless it has one.
pub fn hinted(error: Error, hint: &str) -> Error {
    if error.hint_text().is_none() { error.hint(hint) } else { error }
}

/// SIGINT and SIGTERM, which end a measurement early. Listened for before it makes anything that it has to remove.
pub struct Interruption {
    signals: [Signal; 2],
}

impl Interruption {
    /// Needs a runtime.
    pub fn listen() -> Result<Interruption> {
        let listen =
            |kind| signal(kind).map_err(|error| Error::new(ErrorKind::Io, "cannot handle signals").source(error));
        Ok(Interruption { signals: [listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?] })
    }

    /// Comes with a signal.
    pub async fn come(mut self) -> Error {
        let [interrupt, terminate] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Error::new(ErrorKind::Unavailable, "the measurement was interrupted")
    }
}

/// For a measurement that blocks: it has a thread. If a signal comes first, `clean` removes what it made, and the
/// thread ends with the process.
pub fn on_thread<T: Send + 'static>(
    measure: impl FnOnce() -> Result<T> + Send + 'static,
    clean: impl FnOnce(),
) -> Result<T> {
    runtime()?.block_on(async {
        let interruption = Interruption::listen()?;
        let (done, measured) = oneshot::channel();
        let measure = move || drop(done.send(measure()));
        let thread = thread::Builder::new().name("bench".into()).spawn(measure);
        thread.map_err(|error| Error::new(ErrorKind::Io, "cannot start a thread").source(error))?;
        tokio::select! {
            biased;
            error = interruption.come() => {
                clean();
                Err(error)
            }
            measured = measured => measured.expect("it does not panic"),
        }
    })
}
