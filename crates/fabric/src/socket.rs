//! The two system calls that move bytes: from memory to a socket, and from a socket to memory.
//!
//! Invariants: no call waits. Nothing is staged: the kernel copies between the socket and the memory itself.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::memory::Memory;

/// Parts in one call: more gain nothing (the kernel copies page by page), and each costs 16 bytes of the stack.
pub const MOST_PARTS: usize = 66;

/// A piece of what one call sends.
pub enum Part<'a> {
    Bytes(&'a [u8]),
    /// Offset and length.
    Memory(&'a Memory, u64, u64),
}

/// Where one call receives to.
pub enum Place<'a> {
    Bytes(&'a mut [u8]),
    /// Offset and length.
    Memory(&'a Memory, u64, u64),
}

/// Room for one descriptor beside the bytes, aligned as `cmsghdr` is.
#[repr(C, align(8))]
struct Beside([u8; 24]);

/// Bytes that the socket took: fewer than there are if it is full. A `right` goes with the first of them. `WouldBlock`
/// if it takes none.
pub fn send<'a>(
    socket: BorrowedFd<'_>,
    parts: impl Iterator<Item = Part<'a>>,
    right: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST_PARTS];
    let mut count = 0;
    for (vector, part) in vectors.iter_mut().zip(parts) {
        let (base, bytes) = match part {
            Part::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            Part::Memory(memory, offset, bytes) => (memory.at(offset, bytes), bytes as usize),
        };
        *vector = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        count += 1;
    }
    let mut beside = Beside([0; 24]);
    let mut message = message(&mut vectors[..count]);
    if let Some(right) = right {
        message.msg_control = beside.0.as_mut_ptr().cast();
        message.msg_controllen = beside.0.len();
        // SAFETY: there is room for one header with one descriptor, and the header is aligned.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(right.as_raw_fd());
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: each vector is a slice or a checked range of memory, borrowed until the call returns; the kernel only
    // reads them.
    counted(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
}

/// Bytes that were there: 0 if the other side has closed. A descriptor that came along, if `rights` asks for it, is
/// pushed to it. `WouldBlock` if there is nothing.
pub fn receive<'a>(
    socket: BorrowedFd<'_>,
    places: impl Iterator<Item = Place<'a>>,
    rights: Option<&mut Vec<OwnedFd>>,
) -> io::Result<usize> {
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST_PARTS];
    let mut count = 0;
    for (vector, place) in vectors.iter_mut().zip(places) {
        let (base, bytes) = match place {
            Place::Bytes(bytes) => (bytes.as_mut_ptr(), bytes.len()),
            Place::Memory(memory, offset, bytes) => (memory.at(offset, bytes), bytes as usize),
        };
        *vector = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        count += 1;
    }
    let mut beside = Beside([0; 24]);
    let mut message = message(&mut vectors[..count]);
    if rights.is_some() {
        message.msg_control = beside.0.as_mut_ptr().cast();
        // Exactly one: the kernel would put a second descriptor into the padding, where nobody closes it.
        // SAFETY: computes a length.
        message.msg_controllen = unsafe { libc::CMSG_LEN(4) } as usize;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: each vector is a slice that is ours alone or a checked range of memory, borrowed until the call returns.
    // Without room for descriptors the kernel closes those that come.
    let received = counted(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) })?;
    if let Some(rights) = rights {
        // SAFETY: the kernel wrote whole headers into `beside`; a descriptor in it is new and nobody else's.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            let is_right = !header.is_null()
                && (*header).cmsg_level == libc::SOL_SOCKET
                && (*header).cmsg_type == libc::SCM_RIGHTS
                && (*header).cmsg_len as u64 >= u64::from(libc::CMSG_LEN(4));
            if is_right {
                rights.push(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<i32>().read_unaligned()));
            }
        }
    }
    Ok(received)
}

fn message(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a header of zeros is one with nothing in it.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len();
    message
}

fn counted(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
