//! A table of descriptors for each thread that a hung disk may hold.
//!
//! A thread that waits for a hung disk outlives its process: not even SIGKILL ends it. Invariant: such a thread keeps
//! nothing but its own disk's file, with the lock that shows that transfers are under way. So the sockets and the locks
//! of the pool go with the process, and the next daemon can start.
//!
//! What is closed in such a thread stays open in the process. So the process drops what it gave to the thread, and the
//! thread is never the last to drop the memory.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use super::shared::Waker;

/// Gives this thread a table of its own, with these descriptors and the standard ones in it. Kernels before 5.9 cannot:
/// there the thread shares the table of its process, as any thread does.
pub(super) fn own<const N: usize>(file: &File, wakers: [&Waker; N]) -> io::Result<(File, [Waker; N])> {
    let is_own = close_range(RawFd::MAX, RawFd::MAX, libc::CLOSE_RANGE_UNSHARE);
    let file = file.try_clone()?;
    let wakers = wakers.map(Waker::try_clone).into_iter().collect::<io::Result<Vec<Waker>>>()?;
    let mut kept = vec![libc::STDERR_FILENO, file.as_raw_fd(), RawFd::MAX];
    kept.extend(wakers.iter().map(|waker| waker.as_fd().as_raw_fd()));
    kept.sort_unstable();
    for pair in kept.windows(2).filter(|pair| is_own && pair[0] + 1 < pair[1]) {
        close_range(pair[0] + 1, pair[1] - 1, 0);
    }
    Ok((file, wakers.try_into().ok().expect("one for each")))
}

/// Whether the kernel did it.
fn close_range(first: RawFd, last: RawFd, flags: u32) -> bool {
    // SAFETY: `own` makes a table for this thread first, and stops where it got none. So nothing of the process is
    // closed, and what the thread uses is not among the numbers.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) == 0 }
}
