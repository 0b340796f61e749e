//! Who is at the other end of a Unix socket.
//!
//! Invariant: a peer in another PID namespace has a user like any other. Libraries read its process id too, which is 0
//! there, and take that for an error.

// Unsafe code: one call of the kernel, which writes to one structure of ours.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The user id of the process that listened or connected, as this process's user namespace has it. Errors with those of
/// `getsockopt`.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    let socket = socket.as_fd();
    // SAFETY: `peer` is as long as `length` says and outlives the call, and the kernel writes whole numbers to it.
    let rc = unsafe {
        let into = (&raw mut peer).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, into, &mut length)
    };
    if rc == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
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
}
