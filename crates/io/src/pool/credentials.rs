//! Who is at the other end of a Unix socket.
//!
//! Invariant: a peer in another PID namespace has a user like any other. Libraries read its process id too, which is 0
//! there, and take that for an error.

// Unsafe code: one call of the kernel, which writes to one value of ours.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The user id of the process that listened or connected, as this process's user namespace has it. Errors with those of
/// `getsockopt`.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    option(socket, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: 0, gid: 0 }).map(|peer| peer.uid)
}

/// The process that listened or connected, for as long as somebody asks for it.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// Errors before Linux 6.5, and if the process has ended.
    pub fn peer(socket: impl AsFd) -> io::Result<Process> {
        let descriptor = option(socket, libc::SO_PEERPIDFD, -1)?;
        // SAFETY: the kernel has just made the descriptor for this call, so it is nobody else's.
        Ok(Process(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// Whether it has given back all it had, though its parent may not have asked for its end. Yes if the kernel does
    /// not say.
    pub fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
    }
}

impl From<OwnedFd> for Process {
    fn from(pidfd: OwnedFd) -> Process {
        Process(pidfd)
    }
}

/// An option of the socket's own level; `value` is a whole number or made of such.
fn option<T: Copy>(socket: impl AsFd, name: libc::c_int, mut value: T) -> io::Result<T> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is as long as `length` says and outlives the call, and the kernel writes whole numbers to it.
    let rc = unsafe {
        let into = (&raw mut value).cast();
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, name, into, &mut length)
    };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_other_end_of_a_pair_is_this_user() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&one).unwrap(), rustix::process::geteuid().as_raw());
        assert!(peer_uid(std::fs::File::open("/").unwrap()).is_err(), "a directory has no other end");
    }

    #[test]
    fn the_process_at_the_other_end_is_known_to_live_until_it_has_ended() {
        let name = tempfile::tempdir().unwrap();
        let name = name.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&name).unwrap();
        let script = "import socket,sys,time; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.close(); time.sleep(60)";
        let mut child = std::process::Command::new("python3").args(["-c", script]).arg(&name).spawn().unwrap();
        let (socket, _) = listener.accept().unwrap();
        let process = Process::peer(&socket).unwrap();
        assert!(!process.has_ended());
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !process.has_ended() {
            assert!(std::time::Instant::now() < deadline, "a killed process never ended");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(process.has_ended());
    }
}
