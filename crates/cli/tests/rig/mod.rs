//! The shipped binary under test, and a daemon of it with its own sockets and pool.
//!
//! Commands run with an empty environment, so that nothing of this machine's leaks into what they say. A daemon
//! ends with its value, whatever the test does; its directories are removed last. Every wait has a deadline.

// Each test file uses its own part of this.
#![allow(dead_code)]

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// `forebay` with these arguments.
pub fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.env_clear().args(arguments).stdin(Stdio::null());
    command
}

pub fn run(arguments: &[&str]) -> Answer {
    Answer::of(forebay(arguments).output().expect("the binary runs"))
}

/// What a command left: exit code, standard output, standard error.
#[derive(Debug)]
pub struct Answer {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Answer {
    pub fn of(output: Output) -> Answer {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is text");
        Answer {
            code: output.status.code().expect("no signal ended it"),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// The output as JSON, of a command that must have succeeded.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error} in {}", self.out))
    }

    /// That the command failed with this code, an error that contains `error`, and a hint.
    pub fn assert_refused(&self, code: i32, error: &str) {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        let lines: Vec<&str> = self.err.lines().collect();
        let (first, last) = (lines[lines.len() - 2], lines[lines.len() - 1]);
        assert!(first.starts_with("error: ") && first.contains(error), "{error} is not in {}", self.err);
        assert!(last.starts_with("hint: "), "{}", self.err);
    }
}

pub struct Daemon {
    child: Option<Child>,
    sockets: TempDir,
    pool: TempDir,
}

pub const CAPACITY_BYTES: u64 = 64 << 20;

impl Daemon {
    /// Directories without a daemon.
    pub fn absent() -> Daemon {
        let directory = |parent: &str| tempfile::Builder::new().prefix("forebay-test-").tempdir_in(parent).unwrap();
        Daemon { child: None, sockets: directory("/tmp"), pool: directory("/dev/shm") }
    }

    /// A daemon whose pool is populated.
    pub fn start() -> Daemon {
        let mut daemon = Daemon::absent();
        daemon.launch(&[]);
        daemon.wait_until_populated();
        daemon
    }

    pub fn socket_directory(&self) -> &str {
        self.sockets.path().to_str().unwrap()
    }

    pub fn pool_directory(&self) -> &str {
        self.pool.path().to_str().unwrap()
    }

    /// The flags that make `serve` this daemon.
    pub fn flags(&self) -> [&str; 8] {
        [
            "--socket.directory",
            self.socket_directory(),
            "--pool.directory",
            self.pool_directory(),
            "--pool.capacity_bytes",
            "64MiB",
            "--http.address",
            "127.0.0.1:0",
        ]
    }

    pub fn serve(&self, more: &[&str]) -> Command {
        let mut command = forebay(&["serve"]);
        command.args(self.flags()).args(more);
        command
    }

    /// Starts it; does not wait.
    pub fn launch(&mut self, more: &[&str]) {
        let log = fs::File::options().create(true).append(true).open(self.log_path()).unwrap();
        self.child = Some(self.serve(more).stderr(log).stdout(Stdio::null()).spawn().expect("the binary runs"));
    }

    pub fn wait_until_populated(&mut self) {
        self.wait_for("the pool is populated", |daemon| {
            let answer = daemon.ask("inspect", &["--json"]);
            let bytes = (answer.code == 0).then(|| answer.json()["populated_bytes"].as_u64());
            (bytes == Some(Some(CAPACITY_BYTES))).then_some(())
        });
    }

    /// Waits until `probe` says something; panics with the log if the daemon ends, or after the deadline.
    pub fn wait_for<T>(&mut self, what: &str, probe: impl Fn(&Daemon) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = probe(self) {
                return found;
            }
            let status = self.child.as_mut().expect("it was launched").try_wait().unwrap();
            assert!(status.is_none(), "the daemon ended with {status:?}:\n{}", self.log());
            assert!(Instant::now() < deadline, "{what}: not after {PATIENCE:?}:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }

    /// A command to this daemon.
    pub fn ask(&self, command: &str, more: &[&str]) -> Answer {
        run(&[&[command, "--socket.directory", self.socket_directory()], more].concat())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// `host:port` of the HTTP pages, as the daemon logged it.
    pub fn http_address(&mut self) -> String {
        self.wait_for("the HTTP pages are there", |daemon| {
            let log = daemon.log();
            let line = log.lines().find(|line| line.contains("metrics and health"))?;
            Some(line.split("address=").nth(1)?.trim().to_string())
        })
    }

    /// SIGTERM, and the end.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the daemon does not end:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }

    /// SIGKILL, and the end.
    pub fn kill(&mut self) {
        let child = self.child.as_mut().expect("it was launched");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.child.as_ref().expect("it was launched")), signal).unwrap();
    }

    fn log_path(&self) -> PathBuf {
        self.sockets.path().join("log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        // The pool may lie on a mount of its own.
        let _ = forebay_io::arena::remove(self.pool.path());
    }
}
