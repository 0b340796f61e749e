//! The shipped binary as a person or a script runs it: arguments in, exit code and two texts out.
//!
//! Commands run with an empty environment, so that nothing of this machine's leaks into what they say.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// `forebay` with these arguments.
pub fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    // No file is read, this host's own neither.
    command.env_clear().env("FOREBAY_CONFIG", "").args(arguments).stdin(Stdio::null());
    command
}

/// As [`forebay`], and it ignores no signal, whatever the tests themselves were told to ignore.
pub fn hearing(arguments: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/env");
    command.env_clear().env("FOREBAY_CONFIG", "").args(["--default-signal", env!("CARGO_BIN_EXE_forebay")]);
    command.args(arguments).stdin(Stdio::null());
    command
}

pub fn run(arguments: &[&str]) -> Answer {
    Answer::of(forebay(arguments).output().expect("the binary runs"))
}

/// What a command left.
#[derive(Debug)]
pub struct Answer {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Answer {
    pub fn of(output: Output) -> Answer {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is text");
        let code = output.status.code().expect("no signal ended it");
        Answer { code, out: text(output.stdout), err: text(output.stderr) }
    }

    /// The output as JSON, of a command that must have succeeded.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error} in {}", self.out))
    }

    /// Asserts that the command failed with this code, with `error` in its error, and with a hint.
    pub fn assert_refused(&self, code: i32, error: &str) {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        let lines: Vec<&str> = self.err.lines().collect();
        let [.., first, last] = lines[..] else { panic!("no error and hint in {}", self.err) };
        assert!(first.starts_with("error: ") && first.contains(error), "{error} is not in {}", self.err);
        assert!(last.starts_with("hint: "), "{}", self.err);
    }
}
