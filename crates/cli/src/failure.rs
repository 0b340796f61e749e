//! How a command can fail, and what the user sees of it: `error:` with what is wrong, `hint:` with what to do.

use std::io;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind as Wrong};
use forebay_core::Error;
use forebay_daemon::config::{key_hint, keys};
use forebay_daemon::write_whole;

use crate::output::{self, Colour, painted};

/// How long the end waits for the reader of standard error.
pub const LAST_WORDS: Duration = Duration::from_secs(2);

/// The exit codes.
pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;

const LISTS: &str = "`forebay --help` lists the commands, and `forebay COMMAND --help` lists their arguments";

pub enum Failure {
    /// The arguments or the configuration are wrong.
    Usage(Error),
    /// What was asked for failed.
    Run(Error),
    /// The answer is printed, and it is a bad one.
    Judged,
    /// The log has it, or nobody is left to tell: the process's exit code.
    Told(u8),
    /// The user asked for help or the version (to standard output, no failure), or gave no command at all.
    Help(clap::Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Run(error)
    }
}

impl Failure {
    /// Of arguments for `command`, the words of a command that there is, or none.
    pub fn of_arguments(error: clap::Error, command: &str) -> Failure {
        match error.kind() {
            Wrong::DisplayHelp | Wrong::DisplayVersion | Wrong::DisplayHelpOnMissingArgumentOrSubcommand => {
                Failure::Help(error)
            }
            _ => Failure::Usage(explain(&error, &lists(command))),
        }
    }

    /// Tells the user, and gives the process's exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Failure::Usage(error) => {
                print(&error);
                ExitCode::from(USAGE)
            }
            Failure::Run(error) => {
                print(&error);
                ExitCode::from(FAILED)
            }
            Failure::Judged => ExitCode::from(FAILED),
            Failure::Told(code) => ExitCode::from(code),
            Failure::Help(help) => {
                match help.use_stderr() {
                    true if output::is_coloured(&io::stderr()) => say(help.render().ansi().to_string()),
                    true => say(help.render().to_string()),
                    false => output::print_help(&help),
                }
                ExitCode::from(help.exit_code() as u8)
            }
        }
    }
}

fn print(error: &Error) {
    let hint = error.hint_text().map_or(String::new(), |hint| format!("{} {hint}\n", word("hint:", Colour::Cyan)));
    say(format!("{} {error}\n{hint}", word("error:", Colour::Red)));
}

/// What goes on, but hardly as was meant.
pub fn warn(warning: &str) {
    say(format!("{} {warning}\n", word("warning:", Colour::Yellow)));
}

/// The first of a line to standard error.
fn word(text: &str, colour: Colour) -> String {
    if output::is_coloured(&io::stderr()) { painted(text, colour) } else { text.to_owned() }
}

/// Written by a thread, because nobody may read standard error while its pipe is full. Where no thread can be started,
/// that may be what the words are about.
pub fn say(text: String) {
    let (done, written) = mpsc::channel();
    // Nobody is left to tell if standard error is gone.
    let write = |text: &str| drop(write_whole(&mut io::stderr(), text.as_bytes()));
    let words = text.clone();
    let run = move || {
        write(&words);
        let _ = done.send(());
    };
    match thread::Builder::new().name("words".into()).spawn(run) {
        Ok(_) => drop(written.recv_timeout(LAST_WORDS)),
        Err(_) => write(&text),
    }
}

/// clap's complaint in our words.
fn explain(error: &clap::Error, lists: &str) -> Error {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => texts.first().cloned(),
        _ => None,
    };
    match (error.kind(), context(ContextKind::InvalidArg), context(ContextKind::InvalidSubcommand)) {
        (Wrong::UnknownArgument, Some(flag), _) => {
            // A name with a section is a key, and clap may know a flag of another section that looks alike.
            let own = context(ContextKind::SuggestedArg).filter(|_| !flag.contains('.'));
            let hint = own.map(|own| format!("did you mean `{own}`?"));
            let name = flag.trim_start_matches('-');
            let hint = hint.or_else(|| match keys().into_iter().any(|key| key.name == name) {
                true => Some(format!("`{flag}` is for `forebay serve`, `config` and `doctor`; {LISTS}")),
                false => key_hint(name, "--"),
            });
            let error = Error::invalid(format!("unknown argument `{flag}`"));
            error.hint(hint.unwrap_or_else(|| lists.to_owned()))
        }
        (Wrong::InvalidSubcommand, _, Some(command)) => suggest(
            Error::invalid(format!("unknown command `{command}`")),
            context(ContextKind::SuggestedSubcommand),
            lists,
        ),
        (Wrong::ValueValidation, Some(flag), _) => {
            // Our own readers of values say what to give, in words or in the hint of an error.
            let source = std::error::Error::source(error);
            let hint = source.and_then(|source| source.downcast_ref::<Error>()?.hint_text()).map(str::to_owned);
            let reason = hint.or_else(|| source.map(ToString::to_string)).unwrap_or_default();
            let value = context(ContextKind::InvalidValue).unwrap_or_default();
            match reason.starts_with("give ") {
                true => {
                    let flag = flag.split(' ').next().unwrap_or_default();
                    Error::invalid(format!("`{flag}` cannot be `{value}`")).hint(reason)
                }
                false => suggest(Error::invalid(first_paragraph(error)), None, lists),
            }
        }
        _ => suggest(Error::invalid(first_paragraph(error)), None, lists),
    }
}

fn suggest(error: Error, suggestion: Option<String>, lists: &str) -> Error {
    match suggestion {
        Some(suggestion) => error.hint(format!("did you mean `{suggestion}`?")),
        None => error.hint(lists),
    }
}

/// Where the user finds what there is.
fn lists(command: &str) -> String {
    match command.is_empty() {
        true => LISTS.to_owned(),
        false => format!("`forebay {command} --help` lists its arguments"),
    }
}

fn first_paragraph(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect::<Vec<_>>().join(" ");
    lines.trim_start_matches("error: ").replace('\'', "`")
}
