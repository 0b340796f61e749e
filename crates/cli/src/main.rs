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
mod failure;
#[cfg(test)]
#[path = "../tests/golden/mod.rs"]
mod golden;
mod inspect;
mod log;
mod machine;
mod output;
mod purge;
mod serve;
mod settings;
mod simulate;
mod trace;

use std::process::ExitCode;

use arguments::{Arguments, Command};
use clap::Parser;
use failure::Failure;

fn main() -> ExitCode {
    let outcome = Arguments::try_parse().map_err(Failure::from).and_then(|arguments| run(arguments.command));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::Purge(arguments) => purge::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Advise(arguments) => advise::run(&arguments),
        Command::Trace(command) => trace::run(&command),
        Command::Version => {
            output::print(&machine::about());
            Ok(())
        }
    }
}
