//! `forebay serve`: configuration, log, and then the daemon on this thread.

use std::fmt::{self, Debug};
use std::io;
use std::path::Path;

use forebay_bench::private;
use forebay_core::{Error, ErrorKind};
use forebay_daemon::config::{self, Loaded, LogFormat};
use serde_json::json;
use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::ending;
use crate::failure::{self, FAILED, Failure, LAST_WORDS, USAGE};
use crate::log::Log;
use crate::machine;
use crate::output::escaped;
use crate::settings::Settings;

/// Of what this module tells.
const TARGET: &str = "forebay::serve";

pub fn run(settings: &Settings) -> Result<(), Failure> {
    let loaded = settings.read()?;
    // The log has the first one.
    forebay_daemon::check_threads()?;
    let is_json = loaded.config.log.format == LogFormat::Json;
    let log = Log::start(io::stderr(), is_json);
    let named = std::env::var("FOREBAY_SOCKET").unwrap_or_default();
    let elsewhere = clients_look_elsewhere(&named, &loaded.config.socket.directory);
    for warning in loaded.warnings.iter().chain(&elsewhere) {
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

/// Clients look where this variable says, and the daemon does not read it.
fn clients_look_elsewhere(named: &str, ours: &Path) -> Option<String> {
    let is_here = [Some(Path::new(named)), Path::new(named).parent()].contains(&Some(ours));
    (!named.is_empty() && !is_here).then(|| {
        format!(
            "clients with `FOREBAY_SOCKET={named}` do not find this daemon, whose sockets are in `{}`; set \
             `FOREBAY_SOCKET_DIRECTORY` instead, for the daemon and its clients",
            ours.display()
        )
    })
}

/// As [`run`], for a measurement: ends with the process that started it, and leaves nothing.
pub fn run_privately(settings: &Settings) -> Result<(), Failure> {
    // From here on no signal ends this process before it has cleaned up.
    let _handled = runtime()?.block_on(async { ending::signals() })?;
    private::end_with_parent()?;
    let outcome = run(settings);
    let config = settings.read()?.config;
    private::remove_all(&config.socket.directory, &config.pool.directory)?;
    outcome
}

fn serve(loaded: Loaded, log: &Log) -> Result<(), Failure> {
    start_log(&loaded.config.log, log);
    abort_on_panic(log);
    tracing::info!(version = machine::version(), "starting");
    if let Some(file) = loaded.file {
        tracing::info!(file = %file.display(), "read the configuration");
    }
    Ok(runtime()?.block_on(forebay_daemon::serve(loaded.config, machine::REVISION))?)
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
    forebay_daemon::current_thread_runtime()
        .map_err(|error| Error::new(ErrorKind::Io, "cannot start the runtime").source(error))
}

/// One line an event to standard error: key=value, without colour so that it reads the same everywhere, or an object.
fn start_log(config: &config::Log, log: &Log) {
    let level = &config.level;
    let mut filter: Targets = level.parse().expect("the configuration demands it");
    if !["h2", "debug", "trace"].iter().any(|word| level.to_ascii_lowercase().contains(word)) {
        // What a client does wrong on the wire: with a line for each of it, one client could fill the log.
        filter = filter.with_target("h2", LevelFilter::OFF);
    }
    // The filter alone says what is logged.
    let lines = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_ansi(false).with_writer(log.clone());
    let lines = lines.log_internal_errors(false);
    match config.format {
        LogFormat::Json => lines.json().finish().with(filter).init(),
        LogFormat::Text => lines.fmt_fields(debug_fn(write_field).delimited(" ")).finish().with(filter).init(),
    }
}

/// A value of several words stands in quotes, so that it is seen where it ends.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    let text = format!("{value:?}");
    match field.name() {
        "message" => write!(writer, "{}", escaped(&text)),
        name if is_one_word(&text) => write!(writer, "{name}={text}"),
        name => write!(writer, "{name}={text:?}"),
    }
}

/// Or has its quotes or brackets already.
fn is_one_word(text: &str) -> bool {
    let is_plain = |letter: char| !letter.is_whitespace() && letter.escape_debug().count() == 1 && letter != '=';
    text.starts_with(['"', '[']) || (!text.is_empty() && text.chars().all(is_plain))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_variable_that_leads_clients_elsewhere_is_told_of() {
        let ours = Path::new("/run/forebay");
        for here in ["", "/run/forebay", "/run/forebay/", "/run/forebay/forebay.sock"] {
            assert_eq!(clients_look_elsewhere(here, ours), None, "{here}");
        }
        for elsewhere in ["/run", "/run/other", "/run/forebay/other/forebay.sock"] {
            let told = clients_look_elsewhere(elsewhere, ours).expect("clients do not find it");
            assert!(told.contains(elsewhere) && told.contains("`/run/forebay`"), "{told}");
        }
    }

    #[test]
    fn values_of_several_words_stand_in_quotes_and_no_line_is_broken() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = Log::start(writer, false);
        let lines = tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(log.clone());
        let lines = lines.fmt_fields(debug_fn(write_field).delimited(" ")).finish();
        tracing::subscriber::with_default(lines, || {
            let (reason, names) = ("it has 512 MiB", ["a b"]);
            tracing::info!(tier = %"ssd", %reason, ?names, text = "two words", blocks = 7, "it's\nlost");
        });
        log.flush(LAST_WORDS);
        let mut line = [0; 200];
        let length = reader.read(&mut line).unwrap();
        let line = std::str::from_utf8(&line[..length]).unwrap();
        let fields = "tier=ssd reason=\"it has 512 MiB\" names=[\"a b\"] text=\"two words\" blocks=7\n";
        assert!(line.ends_with(&format!("it's\\nlost {fields}")), "{line}");
    }
}
