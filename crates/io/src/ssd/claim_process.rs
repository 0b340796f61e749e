//! Claims a disk in a process of its own, which may hang instead of the daemon.
//!
//! The kernel lets no thread go that waits for a filesystem in user space, or for a device, until there is an answer:
//! not even SIGKILL ends it, and its process stays. So another process looks at the disk for the daemon, and passes on
//! the descriptors, with their locks. Invariants: a disk has one such process at a time. It ends with the thread that
//! started it as soon as the kernel lets it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::claim::DiskClaim;
use super::config::DiskConfig;
use super::device::Device;
use crate::pool::{recv_fds, send_fds};

/// How long a message between the two may take once it has begun.
const MESSAGE: Duration = Duration::from_secs(10);
const KINDS: [ErrorKind; 8] = [
    ErrorKind::Invalid,
    ErrorKind::NotFound,
    ErrorKind::Full,
    ErrorKind::Io,
    ErrorKind::Corrupt,
    ErrorKind::Timeout,
    ErrorKind::Unavailable,
    ErrorKind::Unsupported,
];

/// The process, seen from the daemon.
pub struct ClaimProcess {
    path: PathBuf,
    child: Child,
    stream: UnixStream,
}

impl ClaimProcess {
    /// Starts `command`, which has to call [`answer_claim`] for the disk at `path`.
    pub fn start(mut command: Command, path: PathBuf) -> Result<ClaimProcess> {
        let cannot = |error: std::io::Error| {
            Error::new(ErrorKind::Io, "cannot start a process that looks at a disk").source(error)
        };
        let (stream, theirs) = UnixStream::pair().map_err(cannot)?;
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        Ok(ClaimProcess { path, child: command.spawn().map_err(cannot)?, stream })
    }

    /// Waits for its answer; false if there is none after `timeout`.
    pub fn has_answered(&self, timeout: Duration) -> bool {
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
        let stream = self.stream.as_fd();
        // Where the poll fails, so does `claim`, which says why.
        rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::IN)], Some(&timeout)) != Ok(0)
    }

    /// Its answer.
    pub fn claim(self) -> Result<DiskClaim> {
        let (bytes, fds) = recv_fds(&self.stream, Instant::now() + MESSAGE).map_err(|error| {
            Error::new(ErrorKind::Io, "the process that looked at a disk ended without an answer")
                .with("path", self.path.display())
                .source(error)
        })?;
        let text = String::from_utf8_lossy(&bytes);
        let words: Vec<&str> = text.splitn(3, '\n').collect();
        if let (["claimed", bytes, facts], Ok([lock, file])) = (&words[..], <[OwnedFd; 2]>::try_from(fds))
            && let Ok(bytes) = bytes.parse()
        {
            let files = [File::from(lock), File::from(file)];
            let facts = ["direct", "blank"].map(|fact| facts.split(' ').any(|named| named == fact));
            return Ok(DiskClaim::of(Device::of(self.path.clone(), files, bytes, facts)));
        }
        let kind = |name: &str| KINDS.into_iter().find(|kind| format!("{kind:?}") == name).unwrap_or(ErrorKind::Io);
        Err(match words[..] {
            [name, message, ""] => Error::new(kind(name), message),
            [name, message, hint] => Error::new(kind(name), message).hint(hint),
            _ => Error::new(ErrorKind::Io, "the process that looked at a disk answered something else"),
        })
    }
}

impl Drop for ClaimProcess {
    /// Waits until the process is gone, however long its disk hangs: another one would only hang too.
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// The process itself: claims the disk, and answers on its standard input.
pub fn answer_claim(config: &DiskConfig) -> Result<()> {
    let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot answer the daemon").source(error);
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| cannot(error.into()))?;
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(cannot)?);
    let deadline = || Instant::now() + MESSAGE;
    match DiskClaim::new(config) {
        Ok(claim) => {
            let device = claim.device();
            let facts = [("direct", device.is_direct), ("blank", device.is_blank)];
            let facts =
                facts.into_iter().filter(|(_, is_so)| *is_so).map(|(fact, _)| fact).collect::<Vec<_>>().join(" ");
            let text = format!("claimed\n{}\n{facts}", device.bytes);
            send_fds(&stream, text.as_bytes(), &device.descriptors(), deadline())
        }
        Err(error) => {
            let message = error.to_string().replace('\n', " ");
            let text = format!("{:?}\n{message}\n{}", error.kind(), error.hint_text().unwrap_or_default());
            send_fds(&stream, text.as_bytes(), &[], deadline())
        }
    }
}
