//! A daemon of our own for the time of a measurement: own sockets, own pool, gone with the value.
//!
//! The daemon's standard input is a pipe that nobody writes to. It closes when the value is dropped, and when the
//! process that started the daemon is gone, however it ended. Then the daemon ends, and removes what it made.

use std::io::{Read, Write, stderr, stdin};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::pool::remove;
use forebay_rpc::client::{Rpc, connect};
use forebay_rpc::from_status;
use forebay_rpc::proto::InspectRequest;
use rustix::process::{Signal, getpid, kill_process};
use tempfile::TempDir;

const START_DEADLINE: Duration = Duration::from_secs(30);
const END_DEADLINE: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(20);
/// A daemon without engines needs less to end.
const REPEAT: Duration = Duration::from_secs(2);

/// The command of this program that is the daemon, with the arguments of `serve`.
pub const COMMAND: &str = "private-daemon";

pub struct PrivateDaemon {
    child: Child,
    sockets: TempDir,
    pool: TempDir,
}

impl PrivateDaemon {
    /// Starts this program with [`COMMAND`] and a pool of `capacity`. Its log goes to our standard error, from `warn`
    /// up.
    pub fn start(capacity: &str) -> Result<PrivateDaemon> {
        let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start a private daemon").source(error);
        // With our number in them, so that it can be told whose they were.
        let prefix = format!("forebay-bench-{}-", std::process::id());
        let sockets = tempfile::Builder::new().prefix(&prefix).tempdir().map_err(cannot)?;
        let pool = tempfile::Builder::new().prefix(&prefix).tempdir_in("/dev/shm").map_err(cannot)?;
        let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
        command.arg(COMMAND).arg("--socket.directory").arg(sockets.path()).arg("--pool.directory").arg(pool.path());
        command.args(["--pool.capacity_bytes", capacity, "--http.address", "off", "--log.level", "warn"]);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FOREBAY_")) {
            command.env_remove(name);
        }
        // No file at all, the host's own neither.
        command.env("FOREBAY_CONFIG", "");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().map_err(cannot)?;
        Ok(PrivateDaemon { child, sockets, pool })
    }

    /// A connection, once all of the pool is there: blocks stored earlier might find no room.
    pub async fn connect(&mut self) -> Result<Rpc> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            let error = match self.connect_if_populated().await {
                Ok(rpc) => return Ok(rpc),
                Err(error) => error,
            };
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(Error::new(ErrorKind::Unavailable, "the private daemon ended while it started")
                    .with("status", status));
            }
            if Instant::now() > deadline {
                return Err(error);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn connect_if_populated(&self) -> Result<Rpc> {
        let mut rpc = connect(self.sockets.path(), START_DEADLINE).await?;
        let reply = rpc.inspect(InspectRequest {}).await.map_err(from_status)?.into_inner();
        if reply.populated_bytes < reply.capacity_bytes {
            let error = Error::new(ErrorKind::Timeout, "the private daemon's pool is not populated");
            return Err(error
                .with("populated_bytes", reply.populated_bytes)
                .with("capacity_bytes", reply.capacity_bytes));
        }
        Ok(rpc)
    }
}

impl Drop for PrivateDaemon {
    /// The daemon ends and removes its pool. If it does not end, SIGKILL ends it, and the pool is removed here.
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + END_DEADLINE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Before its directory: the pool may lie on a mount of its own there.
        if self.pool.path().exists()
            && let Err(error) = remove(self.pool.path())
        {
            let _ = writeln!(stderr(), "cannot remove the private pool: {error}");
        }
    }
}

/// The daemon's side: sends SIGTERM to this process once the other one is gone, or wants no daemon any more. Without
/// a handler that would end it before it has cleaned up, so signals are handled before this is called.
pub fn end_with_parent() -> Result<()> {
    let watch = || {
        // Nothing is written to it, so this returns at its end.
        let _ = stdin().read(&mut [0]);
        loop {
            let _ = kill_process(getpid(), Signal::TERM);
            // Again, because the first may come before the daemon listens.
            thread::sleep(REPEAT);
        }
    };
    let spawned = thread::Builder::new().name("parent".into()).spawn(watch);
    spawned.map(drop).map_err(|error| Error::new(ErrorKind::Io, "cannot start a thread").source(error))
}

/// Removes what the daemon has left. This process becomes another command: a thread that has not ended yet may hold the
/// pool, and with it its mount.
pub fn remove_all(sockets: &Path, pool: &Path) -> Result<()> {
    let _ = std::fs::remove_dir_all(sockets);
    // It was not begun.
    if std::fs::remove_dir(pool).is_ok() {
        return Ok(());
    }
    let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot remove a private pool").source(error);
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    Err(cannot(command.args(["pool", "remove"]).arg(pool).stdout(Stdio::null()).exec()))
}
