//! Open-file-description locks: they show who uses a file, including the kernel on behalf of a dead process.
//!
//! Invariant: such a lock ends with the last reference to its open file description. I/O in flight holds a reference,
//! so the lock of a killed process ends when its last transfer has ended, not before.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Takes the exclusive lock on one byte of `file`; false if another description holds it. Never waits.
pub fn try_lock(file: impl AsFd, byte: u64) -> io::Result<bool> {
    let request = exclusive(byte);
    // SAFETY: the descriptor is open for the call, and the kernel reads exactly one `flock`.
    let rc = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &request) };
    match io::Error::last_os_error() {
        _ if rc == 0 => Ok(true),
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        error => Err(error),
    }
}

/// Whether another description holds the lock on that byte. `file` may be open for reading only.
pub fn is_locked(file: impl AsFd, byte: u64) -> io::Result<bool> {
    let mut request = exclusive(byte);
    // SAFETY: the descriptor is open for the call, and the kernel reads and writes exactly one `flock`.
    let rc = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &mut request) };
    if rc == 0 { Ok(request.l_type != libc::F_UNLCK as libc::c_short) } else { Err(io::Error::last_os_error()) }
}

fn exclusive(byte: u64) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}
