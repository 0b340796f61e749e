//! Memory of one owner, for tiers that move bytes through memory of their own.
//!
//! Invariant: nobody else maps it and no address of it is kept beyond a borrow, so it is bytes like any others; unlike
//! those of the heap it lies on huge pages, where the machine has them, which makes direct I/O of few pieces.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::{io, ptr, slice};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// See the module's head.
pub struct Private {
    base: *mut u8,
    len: usize,
}

// SAFETY: it owns the mapping, as a vector owns its memory.
unsafe impl Send for Private {}

impl Private {
    /// Zeroed, taken from the machine as it is touched. `len` is more than nothing.
    pub fn new(len: usize) -> io::Result<Private> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)? };
        // Where there are no huge pages, it stays as it is.
        // SAFETY: the advice changes neither addresses nor contents of the mapping that was just made.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) };
        Ok(Private { base: base.cast(), len })
    }
}

impl Deref for Private {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has that many readable bytes, all of them set, and is this one's alone.
        unsafe { slice::from_raw_parts(self.base, self.len) }
    }
}

impl DerefMut for Private {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; whoever borrows it so is the only one.
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
