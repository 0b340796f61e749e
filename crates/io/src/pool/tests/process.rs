//! Child processes that play a part.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

const PART: &str = "FOREBAY_TEST_PART";
const DIRECTORY: &str = "FOREBAY_TEST_DIRECTORY";
const ENTRY_POINT: &str = "pool::tests::process::plays_its_part";

/// A child that is killed and reaped when dropped.
pub struct Actor {
    pub child: Child,
    pub socket: UnixStream,
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Starts a child in `part`, with `directory` to work in; as user `nobody` if asked for.
pub fn act(part: &str, directory: &Path, as_nobody: bool) -> Actor {
    let (socket, theirs) = UnixStream::pair().unwrap();
    // Not started by its path, which another user may not be able to reach.
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", ENTRY_POINT, "--nocapture", "--test-threads=1"]);
    command.env(PART, part).env(DIRECTORY, directory);
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
    if as_nobody && rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    Actor { child: command.spawn().unwrap(), socket }
}

impl Actor {
    pub fn say(&self, line: &str, fds: &[std::os::fd::BorrowedFd<'_>]) {
        send_fds(&self.socket, line.as_bytes(), fds, soon()).unwrap();
    }

    pub fn hear(&self) -> String {
        String::from_utf8(recv_fds(&self.socket, soon()).unwrap().0).unwrap()
    }

    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: the child is ours and not reaped yet, so its id is no other process's.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Waits until the child's main thread is stopped, or gone.
    pub fn wait_until_stopped(&self) {
        let deadline = soon();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            if stat.rsplit(')').next().unwrap().trim_start().starts_with(['T', 't']) {
                return;
            }
            assert!(Instant::now() < deadline, "the child did not stop: {stat}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The entry point of child processes. In an ordinary test run it does nothing.
#[test]
fn plays_its_part() {
    let Ok(part) = std::env::var(PART) else { return };
    // Ends the child in any case. SAFETY: the call touches no memory.
    unsafe { libc::alarm(120) };
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    match part.as_str() {
        "worker" => workers::play_worker(&socket),
        "unprivileged" => life::play_unprivileged(&socket, &directory),
        "store" => crash::play_store(&socket, &directory),
        "open" => crash::play_open(&socket, &directory),
        "records" => crash::play_records(&socket, &directory),
        part => panic!("there is no part `{part}`"),
    }
}

/// Reads as a worker's copy does.
pub fn peek(mapping: &Mapping, offset: usize, bytes: &mut [u8]) {
    assert!(offset + bytes.len() <= mapping.len());
    // SAFETY: the range was checked, and the mapping outlives the call.
    unsafe { std::ptr::copy_nonoverlapping(mapping.data_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) }
}

/// Writes as a worker's copy does.
pub fn poke(mapping: &Mapping, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= mapping.len());
    // SAFETY: as for `peek`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapping.data_ptr().add(offset), bytes.len()) }
}
