//! The `forebay` command: reads the arguments, runs one command, and says what went wrong in two lines.
//!
//! Exit codes: 0 done, 1 it failed (or `doctor` found a failure), 2 the arguments or the configuration are wrong.
//! Answers go to standard output, everything else to standard error.

#![forbid(unsafe_code)]

mod advise;
mod arguments;
mod audit;
mod bench;
mod client;
mod config;
mod doctor;
mod ending;
mod failure;
#[cfg(test)]
#[path = "../tests/golden/mod.rs"]
mod golden;
mod health;
mod help;
mod inspect;
mod log;
mod machine;
mod output;
mod pool;
mod purge;
mod serve;
mod settings;
mod simulate;
mod top;
mod trace;

use std::io::{self, ErrorKind};
use std::process::ExitCode;

use arguments::{Arguments, ClaimDisk, Command, Pool};
use clap::FromArgMatches;
use failure::{FAILED, Failure};
use forebay_core::Error;
use forebay_io::ssd::DiskConfig;

fn main() -> ExitCode {
    let parsed =
        help::command().try_get_matches_from(help::words()).and_then(|matches| Arguments::from_arg_matches(&matches));
    let outcome = parsed
        .map_err(|error| Failure::of_arguments(error, &help::given()))
        .and_then(|arguments| run(arguments.command));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Health(arguments) => health::run(&arguments),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::Purge(arguments) => purge::run(&arguments),
        Command::Pool(Pool::Remove(arguments)) => pool::remove(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Advise(arguments) => advise::run(&arguments),
        Command::Trace(command) => trace::run(&command),
        Command::Completions(arguments) => {
            help::completions(&arguments);
            Ok(())
        }
        Command::Man(arguments) => help::man(&arguments),
        Command::Version(arguments) => {
            match arguments.json {
                true => output::print_json(&machine::about_json()),
                false => output::print(&machine::about()),
            }
            Ok(())
        }
        Command::PrivateDaemon(settings) => serve::run_privately(&settings),
        Command::ClaimDisk(ClaimDisk { path, capacity_bytes, create, makes_file }) => {
            let claimed = forebay_io::ssd::answer_claim(&DiskConfig { path, capacity_bytes, create }, makes_file);
            claimed.map_err(|error| if is_unheard(&error) { Failure::Told(FAILED) } else { Failure::Run(error) })
        }
    }
}

/// Whether the daemon is gone that asked. Its end is no error of the disk, and its log is over.
fn is_unheard(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset))
}
