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
use super::device::{Device, is_to_be_made};
use super::examine::identity;
use crate::pool::{recv_fds, send_fds};

/// How long a message between the two may take once it has begun.
const MESSAGE: Duration = Duration::from_secs(10);
/// The answer for a file that is not there, if only one that is there was asked for.
const TO_BE_MADE: &str = "to be made";
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
    pub fn answer(self) -> Answer {
        let mut identity = None;
        let claim = self.claim(&mut identity);
        Answer { identity, claim }
    }

    fn claim(self, identity: &mut Option<String>) -> Result<Option<DiskClaim>> {
        let (bytes, fds) = recv_fds(&self.stream, Instant::now() + MESSAGE).map_err(|error| {
            Error::new(ErrorKind::Io, "the process that looked at a disk ended without an answer")
                .with("path", self.path.display())
                .source(error)
        })?;
        let text = String::from_utf8_lossy(&bytes);
        let (told, text) = text.split_once('\n').unwrap_or_default();
        *identity = (!told.is_empty()).then(|| told.to_owned());
        let words: Vec<&str> = text.splitn(3, '\n').collect();
        if let (["claimed", bytes, is_direct], Ok([lock, file])) = (&words[..], <[OwnedFd; 2]>::try_from(fds))
            && let Ok(bytes) = bytes.parse()
        {
            let files = [File::from(lock), File::from(file)];
            return Ok(Some(DiskClaim::of(Device::of(self.path.clone(), files, bytes, *is_direct == "true"))));
        }
        if words == [TO_BE_MADE] {
            return Ok(None);
        }
        let kind = |name: &str| KINDS.into_iter().find(|kind| format!("{kind:?}") == name).unwrap_or(ErrorKind::Io);
        Err(match words[..] {
            [name, message, ""] => Error::new(kind(name), message),
            [name, message, hint] => Error::new(kind(name), message).hint(hint),
            _ => Error::new(ErrorKind::Io, "the process that looked at a disk answered something else"),
        })
    }
}

/// What the process found.
pub struct Answer {
    /// What tells the disk from all others, if it is known.
    pub identity: Option<String>,
    /// The disk, or why it cannot be had. `None` if the process was asked for a file that is there, and the file would
    /// have to be made.
    pub claim: Result<Option<DiskClaim>>,
}

impl Drop for ClaimProcess {
    /// Waits until the process is gone, however long its disk hangs: another one would only hang too.
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// The process itself: claims the disk, and answers on its standard input. `makes_file` is false for a look at what is
/// there, which makes nothing.
pub fn answer_claim(config: &DiskConfig, makes_file: bool) -> Result<()> {
    let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot answer the daemon").source(error);
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| cannot(error.into()))?;
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(cannot)?);
    let deadline = || Instant::now() + MESSAGE;
    let is_left = if makes_file { Ok(false) } else { is_to_be_made(config) };
    let claimed = is_left.and_then(|is_left| if is_left { Ok(None) } else { DiskClaim::new(config).map(Some) });
    let identity = identity(&config.path).unwrap_or_default();
    match claimed {
        Ok(None) => send_fds(&stream, format!("{identity}\n{TO_BE_MADE}").as_bytes(), &[], deadline()),
        Ok(Some(claim)) => {
            let device = claim.device();
            let text = format!("{identity}\nclaimed\n{}\n{}", device.bytes, device.is_direct);
            send_fds(&stream, text.as_bytes(), &device.descriptors(), deadline())
        }
        Err(error) => {
            let message = error.to_string().replace('\n', " ");
            let text = format!("{identity}\n{:?}\n{message}\n{}", error.kind(), error.hint_text().unwrap_or_default());
            send_fds(&stream, text.as_bytes(), &[], deadline())
        }
    }
}
