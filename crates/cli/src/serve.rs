//! `forebay serve`: configuration, log, and then the daemon on this thread.

use std::io;

use forebay_core::{Error, ErrorKind};
use tracing_subscriber::EnvFilter;

use crate::failure::{Failure, LAST_WORDS};
use crate::log::Log;
use crate::settings::Settings;

pub fn run(settings: &Settings) -> Result<(), Failure> {
    let config = settings.load()?.config;
    let log = start_log(&config.log.level)?;
    abort_on_panic(&log);
    let runtime = runtime()?;
    let outcome = runtime.block_on(forebay_daemon::serve(config));
    log.flush(LAST_WORDS);
    Ok(outcome?)
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

/// One line an event to standard error, key=value, without colour so that it reads the same everywhere.
fn start_log(level: &str) -> Result<Log, Failure> {
    let filter = EnvFilter::try_new(level).map_err(|error| {
        let error = Error::invalid(format!("`log.level` cannot be `{level}`")).source(error);
        Failure::Usage(error.hint("give a level such as `info`, or `module=level` pairs with commas between"))
    })?;
    let log = Log::start(io::stderr());
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(log.clone());
    lines.log_internal_errors(false).init();
    Ok(log)
}
