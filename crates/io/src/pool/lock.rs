//! Locks that show who is alive: open-file-description byte-range locks, and one `flock` on the directory.
//!
//! Invariants: an OFD lock belongs to an open file description. It stays while the process is stopped, and while the
//! process has closed its descriptor but kept the mapping. It is released when both are gone. Nothing here waits.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// Takes the exclusive lock on `bytes`; false if another description holds any of them.
pub(super) fn try_lock(file: impl AsFd, bytes: Range<u64>) -> io::Result<bool> {
    let mut request = exclusive(bytes);
    match control(&file, libc::F_OFD_SETLK, &mut request) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a description other than `file`'s own holds a lock on any of `bytes`.
pub(super) fn is_locked(file: impl AsFd, bytes: Range<u64>) -> io::Result<bool> {
    let mut request = exclusive(bytes);
    control(&file, libc::F_OFD_GETLK, &mut request)?;
    Ok(request.l_type != libc::F_UNLCK as libc::c_short)
}

fn exclusive(bytes: Range<u64>) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start as libc::off_t,
        l_len: (bytes.end - bytes.start) as libc::off_t,
        l_pid: 0,
    }
}

fn control(file: &impl AsFd, command: libc::c_int, request: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open for the call, and the kernel reads and writes exactly one `flock`.
    let rc = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, request) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_lock_is_seen_by_other_descriptions_until_the_last_descriptor_of_its_own_is_closed() {
        let _turn = crate::pool::tests::with_others();
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let open = || File::options().read(true).write(true).open(named.path()).unwrap();
        let (holder, other) = (open(), open());
        assert!(try_lock(&holder, 70..71).unwrap());
        assert!(!is_locked(&holder, 0..4096).unwrap(), "its own lock is not another's");
        assert!(is_locked(&other, 64..128).unwrap());
        assert!(!is_locked(&other, 0..70).unwrap() && !is_locked(&other, 71..4096).unwrap());
        assert!(!try_lock(&other, 70..71).unwrap());
        let copy = holder.try_clone().unwrap();
        drop(holder);
        assert!(is_locked(&other, 70..71).unwrap());
        drop(copy);
        assert!(try_lock(&other, 70..71).unwrap());
    }
}
