//! A table of descriptors for each thread that a hung disk or mount may hold.
//!
//! A thread that waits for one outlives its process: not even SIGKILL ends it. Invariant: such a thread keeps nothing
//! but what it works with: of a disk the file, with the lock that shows that transfers are under way. So the sockets
//! and the locks of the pool go with the process, and the next daemon can start.
//!
//! What is closed in such a thread stays open in the process. So the process drops what it gave to the thread, and the
//! thread is never the last to drop the memory.
//!
//! Nor does such a thread take a signal of the process. A handler would run on it, and the pipe into which the handler
//! writes is closed there: the process would not hear of the signal.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr;

use crate::uring::Waker;

/// Gives this thread a table of its own, with these descriptors and the standard ones in it. Kernels before 5.9 cannot:
/// there the thread shares the table of its process, as any thread does.
pub(crate) fn own<const N: usize>(file: &File, wakers: [&Waker; N]) -> io::Result<(File, [Waker; N])> {
    let is_own = make_own_table();
    let file = file.try_clone()?;
    let wakers = wakers.map(Waker::try_clone).into_iter().collect::<io::Result<Vec<Waker>>>()?;
    if is_own {
        let kept = wakers.iter().map(|waker| waker.as_fd().as_raw_fd());
        close_all_but(kept.chain([file.as_raw_fd()]).collect());
    }
    Ok((file, wakers.try_into().ok().expect("one for each")))
}

/// The same for a thread that opens its files itself, and closes them before it hands anything on. The waker keeps its
/// number.
pub(crate) fn own_but(waker: Option<&Waker>) {
    if make_own_table() {
        close_all_but(waker.map(|waker| waker.as_fd().as_raw_fd()).into_iter().collect());
    }
}

/// Whether the kernel did it.
fn make_own_table() -> bool {
    leave_signals_to_others();
    close_range(RawFd::MAX, RawFd::MAX, libc::CLOSE_RANGE_UNSHARE)
}

/// All but those of a thread's own faults, which no other thread can take.
fn leave_signals_to_others() {
    let own = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];
    let mut others = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call makes the set, the others read or change it, and nothing but this thread's mask changes.
    // They fail for numbers that are no signals only.
    unsafe {
        libc::sigfillset(others.as_mut_ptr());
        for signal in own {
            libc::sigdelset(others.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, others.as_ptr(), ptr::null_mut());
    }
}

/// Keeps the standard ones too. For a thread with a table of its own.
fn close_all_but(mut kept: Vec<RawFd>) {
    kept.extend([libc::STDERR_FILENO, RawFd::MAX]);
    kept.sort_unstable();
    for pair in kept.windows(2).filter(|pair| pair[0] + 1 < pair[1]) {
        close_range(pair[0] + 1, pair[1] - 1, 0);
    }
}

fn close_range(first: RawFd, last: RawFd, flags: u32) -> bool {
    // SAFETY: the first call of a thread makes its own table, and the others are left out where it got none. So nothing
    // of the process is closed, and what the thread uses is not among the numbers.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) == 0 }
}
