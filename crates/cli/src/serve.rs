//! `forebay serve`: configuration, log, and then the daemon on this thread.

use std::io;

use forebay_core::{Error, ErrorKind};
use forebay_daemon::config::{self, Loaded, LogFormat};
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::failure::{self, FAILED, Failure, LAST_WORDS, USAGE};
use crate::log::Log;
use crate::settings::Settings;

/// Of what this module tells.
const TARGET: &str = "forebay::serve";

pub fn run(settings: &Settings) -> Result<(), Failure> {
    let loaded = settings.read()?;
    let is_json = loaded.config.log.format == LogFormat::Json;
    let log = Log::start(io::stderr(), is_json);
    for warning in &loaded.warnings {
        match is_json {
            true => log.tell("WARN", TARGET, &json!({"message": warning})),
            false => failure::warn(warning),
        }
    }
    let outcome = serve(loaded, &log);
    let outcome = if is_json { outcome.map_err(|failure| tell(&log, failure)) } else { outcome };
    log.flush(LAST_WORDS);
    outcome
}

fn serve(loaded: Loaded, log: &Log) -> Result<(), Failure> {
    start_log(&loaded.config.log, log)?;
    abort_on_panic(log);
    if let Some(file) = loaded.file {
        tracing::info!(file = %file.display(), "read the configuration");
    }
    Ok(runtime()?.block_on(forebay_daemon::serve(loaded.config))?)
}

/// A log of objects ends with one too. `log.level` does not take it: it is the answer to whoever started the daemon.
fn tell(log: &Log, failure: Failure) -> Failure {
    let (error, code) = match failure {
        Failure::Usage(error) => (error, USAGE),
        Failure::Run(error) => (error, FAILED),
        other => return other,
    };
    let mut fields = json!({"message": error.to_string()});
    if let Some(hint) = error.hint_text() {
        fields["hint"] = hint.into();
    }
    log.tell("ERROR", TARGET, &fields);
    Failure::Told(code)
}

/// What was logged before a panic stands before its words.
fn abort_on_panic(log: &Log) {
    forebay_daemon::abort_on_panic();
    let (log, abort) = (log.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        log.flush(LAST_WORDS);
        abort(panic);
    }));
}

/// One thread: all commands wait for one thing at a time, and the daemon's control plane is one thread by design.
pub fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::new(ErrorKind::Io, "cannot start the runtime").source(error))
}

/// One line an event to standard error: key=value, without colour so that it reads the same everywhere, or an object.
fn start_log(config: &config::Log, log: &Log) -> Result<(), Failure> {
    let level = &config.level;
    let mut filter = EnvFilter::try_new(level).map_err(|error| {
        let error = Error::invalid(format!("`log.level` cannot be `{level}`")).source(error);
        Failure::Usage(error.hint("give a level such as `info`, or `module=level` pairs with commas between"))
    })?;
    if !["h2", "debug", "trace"].iter().any(|word| level.to_ascii_lowercase().contains(word)) {
        // What a client does wrong on the wire: with a line for each of it, one client could fill the log.
        filter = filter.add_directive("h2=off".parse().expect("a directive"));
    }
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(log.clone());
    let lines = lines.log_internal_errors(false);
    match config.format {
        LogFormat::Json => lines.json().init(),
        LogFormat::Text => lines.init(),
    }
    Ok(())
}
