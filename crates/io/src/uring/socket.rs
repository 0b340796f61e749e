//! Bytes between a socket and a region, with no copy but the kernel's.
//!
//! Invariants: as in [`super::memory`], a span outside its region panics before it reaches the kernel. No call
//! blocks. A socket whose other side is gone returns an error, never a signal.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::{io, mem, ptr};

use rustix::io::Errno;

use super::memory::Region;

/// Pieces that one call takes; the kernel would take 1,024.
pub const MOST_PIECES: usize = 32;

/// A piece of data to send.
#[derive(Clone, Copy)]
pub enum Piece<'a> {
    /// Bytes of the caller, such as a command's header.
    Bytes(&'a [u8]),
    /// A span of the region.
    Pool {
        /// Bytes from the start of the region.
        offset: u64,
        /// Bytes of the span.
        len: usize,
    },
}

impl Region {
    /// Sends the first [`MOST_PIECES`] pieces in one call; may be short.
    pub fn send(&self, socket: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> Result<usize, Errno> {
        let mut vectors = [NOTHING; MOST_PIECES];
        for (vector, piece) in vectors.iter_mut().zip(pieces) {
            *vector = match *piece {
                Piece::Bytes(bytes) => vector_of(bytes.as_ptr().cast_mut(), bytes.len()),
                Piece::Pool { offset, len } => vector_of(self.at(offset, len), len),
            };
        }
        let message = message(&mut vectors[..pieces.len().min(MOST_PIECES)]);
        // SAFETY: each vector is a borrowed slice, or a span that `at` found inside the region, which `self` keeps
        // mapped for the call; the kernel only reads them.
        outcome(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
    }

    /// Receives into `len` bytes from `offset`, and the bytes after them into `tail`, in one call. 0 is the end.
    pub fn receive(
        &self,
        socket: BorrowedFd<'_>,
        (offset, len): (u64, usize),
        tail: &mut [u8],
    ) -> Result<usize, Errno> {
        let mut vectors = [vector_of(self.at(offset, len), len), vector_of(tail.as_mut_ptr(), tail.len())];
        let mut message = message(&mut vectors);
        // SAFETY: the first vector lies in the region, which `self` keeps mapped for the call and to which nobody
        // holds a reference; the second is the caller's exclusively borrowed slice.
        outcome(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
    }
}

/// For a TCP socket: wakes a waiting thread when `bytes` have arrived, at the end, or when the kernel's buffer is
/// full. If the kernel refuses, nothing changes.
pub fn wake_at(socket: BorrowedFd<'_>, bytes: u32) {
    let (bytes, len) = (libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX), size_of::<libc::c_int>());
    let value: *const libc::c_void = ptr::from_ref(&bytes).cast();
    // SAFETY: `value` is `len` bytes of this stack frame, which the kernel only reads.
    let _ = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, len as _) };
}

const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

fn vector_of(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

fn message(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeros is a message without address, vectors and control data.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), vectors.len() as _);
    message
}

fn outcome(bytes: isize) -> Result<usize, Errno> {
    usize::try_from(bytes).map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_sent_from_a_region_arrives_in_a_region_and_its_tail() {
        let (from, to) = (Region::anonymous(8192).unwrap(), Region::anonymous(8192).unwrap());
        let (here, there) = UnixStream::pair().unwrap();
        from.write(100, b"payload");
        let pieces = [Piece::Bytes(b"head "), Piece::Pool { offset: 100, len: 7 }, Piece::Bytes(b" tail")];
        assert_eq!(from.send(here.as_fd(), &pieces), Ok(17));
        let (mut tail, mut bytes) = ([0; 8], [0; 12]);
        assert_eq!(to.receive(there.as_fd(), (8180, 12), &mut tail), Ok(17));
        to.read(8180, &mut bytes);
        assert_eq!((&bytes, &tail[..5]), (b"head payload", &b" tail"[..]));
        assert_eq!(to.receive(there.as_fd(), (0, 12), &mut tail), Err(Errno::AGAIN));
        drop(here);
        assert_eq!(to.receive(there.as_fd(), (0, 12), &mut tail), Ok(0), "the end");
        assert_eq!(to.send(there.as_fd(), &pieces), Err(Errno::PIPE), "an error and no signal");
    }

    #[test]
    #[should_panic(expected = "leave a region")]
    fn a_span_outside_the_region_never_reaches_the_kernel() {
        let (here, _there) = UnixStream::pair().unwrap();
        let region = Region::anonymous(4096).unwrap();
        let _ = region.send(here.as_fd(), &[Piece::Pool { offset: 4090, len: 7 }]);
    }
}
