//! Other engines beside the fabric: each is a program of its own, `bench/transfer_peer.py`, which runs the engine on
//! both sides through the engine's own Python interface. Nothing of them is a part of the product.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind as IoErrorKind, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::Verb;
use serde::Deserialize;
use serde_json::json;

use super::Run;
use super::shape::Shape;

const PROGRAM: &str = include_str!("../../../../bench/transfer_peer.py");
/// What can be beside the fabric.
pub const PEERS: [&str; 3] = ["nixl", "mooncake", "ucx"];
/// Until a program has started, or a run has ended whose last operations are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running engine. It ends when this is dropped.
pub struct Peer {
    pub name: &'static str,
    pub version: String,
    process: Child,
    asks: ChildStdin,
    /// From a thread, so that there is a limit to the wait.
    answers: Receiver<String>,
    home: tempfile::TempDir,
}

/// Why a peer does not run: it, or the Python, is not installed.
pub struct Missing(pub String);

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Start {
    Version(String),
    Missing(String),
}

#[derive(Deserialize)]
struct Measured {
    seconds: f64,
    cpu_s: f64,
    latencies_us: Vec<f64>,
    wrong_bytes: u64,
}

impl Peer {
    /// Of one run. Some engines need minutes on a busy machine for what others move in a second.
    pub const MOST_SECONDS: f64 = 2.0;

    /// Starts both sides of the engine, with memory of so many bytes each.
    pub fn start(name: &'static str, python: &Path, bytes: u64) -> Result<std::result::Result<Peer, Missing>> {
        let failed = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start a peer").source(error);
        let home = tempfile::tempdir().map_err(failed)?;
        let program = home.path().join("transfer_peer.py");
        std::fs::write(&program, PROGRAM).map_err(failed)?;
        // What engines say of themselves belongs into no table.
        let said = File::create(home.path().join("said")).map_err(failed)?;
        let mut command = Command::new(python);
        command.arg(&program).arg(name).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(said);
        let mut process = match command.spawn() {
            Ok(process) => process,
            Err(error) if error.kind() == IoErrorKind::NotFound => {
                return Ok(Err(Missing(format!("there is no program `{}`", python.display()))));
            }
            Err(error) => return Err(failed(error)),
        };
        let asks = process.stdin.take().expect("it is piped");
        let lines = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        let (sender, answers) = channel();
        std::thread::spawn(move || lines.map_while(std::result::Result::ok).all(|line| sender.send(line).is_ok()));
        let mut peer = Peer { name, version: String::new(), process, asks, answers, home };
        match peer.ask(&json!({ "bytes": bytes }))? {
            Start::Version(version) => peer.version = version,
            Start::Missing(why) => return Ok(Err(Missing(why))),
        }
        Ok(Ok(peer))
    }

    /// One run, in one direction, and how many of its bytes are wrong.
    pub(super) fn run(&mut self, shape: Shape, seed: u64) -> Result<(Run, u64)> {
        let shape = json!({
            "verb": if shape.direction.verbs() == [Verb::Write] { "write" } else { "read" },
            "size_bytes": shape.size_bytes,
            "segments": shape.segments,
            "depth": shape.depth,
            "operations": shape.operations,
            "seed": seed,
            "most_seconds": Self::MOST_SECONDS,
        });
        let Measured { seconds, cpu_s, latencies_us, wrong_bytes } = self.ask(&shape)?;
        Ok((Run { seconds, cpu_s, latencies_us }, wrong_bytes))
    }

    fn ask<T: for<'a> Deserialize<'a>>(&mut self, what: &serde_json::Value) -> Result<T> {
        if writeln!(self.asks, "{what}").is_err() {
            return Err(self.failed("it has ended"));
        }
        let line = self.answers.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => self.failed("it does not answer"),
            RecvTimeoutError::Disconnected => self.failed("it has ended"),
        })?;
        serde_json::from_str(&line).map_err(|error| self.failed("it answers something else").source(error))
    }

    fn failed(&self, why: &str) -> Error {
        let said = std::fs::read_to_string(self.home.path().join("said")).unwrap_or_default();
        let last = said.lines().last().unwrap_or_default().to_owned();
        let error = Error::new(ErrorKind::Unavailable, "a peer failed").with("peer", self.name).with("why", why);
        error.with("it_said", last).hint("leave it out of `--peers`, or mend it")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
