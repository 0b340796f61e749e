//! Memory of one owner, for tiers that move bytes through memory of their own.
//!
//! Invariant: nobody else maps it and no address of it is kept beyond a borrow, so it can be borrowed as ordinary
//! bytes. Unlike heap memory it lies on huge pages, where the machine has them, so that direct I/O needs few pieces.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::{io, ptr, slice};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// See the module documentation.
pub struct Private {
    base: *mut u8,
    len: usize,
}

// SAFETY: it owns the mapping, as a vector owns its memory.
unsafe impl Send for Private {}

impl Private {
    /// Zeroed, allocated on first touch. `len` must not be zero.
    pub fn new(len: usize) -> io::Result<Private> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)? };
        // Without huge pages, nothing changes. SAFETY: the advice changes neither addresses nor contents of the
        // mapping that was just made.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) };
        Ok(Private { base: base.cast(), len })
    }
}

impl Deref for Private {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has that many readable, initialised bytes, and belongs to this value alone.
        unsafe { slice::from_raw_parts(self.base, self.len) }
    }
}

impl DerefMut for Private {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; the mutable borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: no borrow outlives the owner.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
