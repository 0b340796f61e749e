//! The memory that engines read and write.
//!
//! Invariants: a region stays mapped as long as anybody holds its [`Memory`]. Nobody forms a reference to its bytes,
//! which the kernel and other processes write. A span outside its region panics before it reaches the kernel.

#![allow(unsafe_code)]

use std::any::Any;
use std::fs::File;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::{io, ptr};

use forebay_core::checksum::Checksum;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::sum::sum_up;
use crate::pool::Pool;

/// The kernel takes up to 1,024 pieces in one transfer.
pub const MOST_SPANS: usize = 1024;

/// A piece of mapped memory, and its owner, which keeps it mapped.
#[derive(Clone)]
pub struct Region {
    base: *mut u8,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is accessed by copies and system calls only, never by reference, from whatever thread; the
// pool's owner decides who may touch which slot when.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// `base` must be the start of `len` readable and writable bytes, on a page boundary. They must stay mapped while
    /// `owner` lives, and nobody may hold a reference to them.
    pub unsafe fn from_raw(base: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Region {
        Region { base, len, _owner: owner }
    }

    /// The pool's slots.
    pub fn of_pool(pool: Arc<Pool>) -> Region {
        // SAFETY: the pool's mapping holds that many bytes and lives as long as the pool.
        unsafe { Region::from_raw(pool.data_ptr(), pool.geometry().data_bytes() as usize, pool) }
    }

    /// New zeroed memory, allocated on first touch.
    pub fn anonymous(len: usize) -> io::Result<Region> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)? };
        Ok(Region::of_mapping(Mapped { base, len }))
    }

    /// The first `len` bytes of a file, shared with others that map or read it. The file must stay that long.
    pub fn of_file(file: &File, len: usize) -> io::Result<Region> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as for an anonymous one.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)? };
        Ok(Region::of_mapping(Mapped { base, len }))
    }

    /// Asks for 2 MiB pages, as the pool has them, before the first touch: a transfer then has few pieces. Without
    /// huge pages, nothing changes.
    pub fn want_huge_pages(&self) {
        // SAFETY: the advice changes neither addresses nor contents of a mapping that `self` keeps.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, Advice::LinuxHugepage) };
    }

    fn of_mapping(mapped: Mapped) -> Region {
        let (base, len) = (mapped.base.cast(), mapped.len);
        // SAFETY: the mapping is that long, and only its owner's drop unmaps it.
        unsafe { Region::from_raw(base, len, Arc::new(mapped)) }
    }

    /// Bytes of the region.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies from `offset` into `bytes`.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let source = self.at(offset, bytes.len());
        // SAFETY: the source lies in the region, the target is Rust's own. Another process may write the source at
        // the same time: the copy is then a mix, which its checksum detects.
        unsafe { ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let target = self.at(offset, bytes.len());
        // SAFETY: the target lies in the region and cannot overlap memory that Rust owns.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) }
    }

    /// Adds the present content of `len` bytes from `offset` to `sum`.
    pub fn sum(&self, sum: &mut Checksum, offset: u64, len: usize) {
        // SAFETY: `at` found the bytes inside the region, which `self` keeps mapped.
        unsafe { sum_up(sum, self.at(offset, len), len) }
    }

    pub(super) fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.len as u64);
        assert!(is_inside, "{len} bytes at {offset} leave a region of {} bytes", self.len);
        // SAFETY: checked above.
        unsafe { self.base.add(offset as usize) }
    }
}

struct Mapped {
    base: *mut std::ffi::c_void,
    len: usize,
}

// SAFETY: only the address is kept; see `Region`.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the last owner, and everybody who moves bytes holds one.
        let unmapped = unsafe { rustix::mm::munmap(self.base, self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// The region of a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The pool's slots.
    Pool,
    /// The tier's own pages.
    Staging,
}

/// A piece of a [`Memory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Says where `offset` counts from.
    pub place: Place,
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Bytes of the piece.
    pub len: u32,
}

impl Span {
    /// A piece of the pool's slots.
    pub fn pool(offset: u64, len: u32) -> Span {
        Span { place: Place::Pool, offset, len }
    }

    /// A piece of the tier's own pages.
    pub fn staging(offset: u64, len: u32) -> Span {
        Span { place: Place::Staging, offset, len }
    }

    /// The rest after the first `bytes`.
    pub fn after(self, bytes: u32) -> Span {
        Span { offset: self.offset + u64::from(bytes), len: self.len - bytes, ..self }
    }
}

/// Pieces of a [`Memory`] that one transfer uses consecutively; at least one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spans(Arc<[Span]>);

impl Spans {
    /// Total bytes.
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|span| u64::from(span.len)).sum()
    }

    /// The rest after the first `bytes`; it must not be empty.
    pub fn after(&self, bytes: u64) -> Spans {
        let mut gone = bytes;
        let left = self.0.iter().filter_map(|span| {
            let taken = gone.min(u64::from(span.len));
            gone -= taken;
            (taken < u64::from(span.len)).then(|| span.after(taken as u32))
        });
        let left: Vec<Span> = left.collect();
        Spans::from(left.as_slice())
    }
}

impl Deref for Spans {
    type Target = [Span];

    fn deref(&self) -> &[Span] {
        &self.0
    }
}

impl From<&[Span]> for Spans {
    fn from(spans: &[Span]) -> Spans {
        assert!(!spans.is_empty(), "a transfer moves something");
        Spans(spans.into())
    }
}

impl From<Span> for Spans {
    fn from(span: Span) -> Spans {
        Spans(Arc::new([span]))
    }
}

/// All memory that one disk's engine may touch.
pub struct Memory {
    /// The pool's slots.
    pub pool: Region,
    /// The tier's own pages.
    pub staging: Region,
}

impl Memory {
    /// Keeps both regions mapped as long as any engine or request has this memory.
    pub fn new(pool: Region, staging: Region) -> Memory {
        Memory { pool, staging }
    }

    /// The region that `place` names.
    pub fn region(&self, place: Place) -> &Region {
        match place {
            Place::Pool => &self.pool,
            Place::Staging => &self.staging,
        }
    }

    /// The checksum of the present content of `span`.
    pub fn checksum(&self, span: Span) -> u64 {
        let mut sum = Checksum::new();
        self.region(span.place).sum(&mut sum, span.offset, span.len as usize);
        sum.finish()
    }

    /// Copies the span into the front of `bytes`, which must be at least as long.
    pub fn read(&self, span: Span, bytes: &mut [u8]) {
        self.region(span.place).read(span.offset, &mut bytes[..span.len as usize]);
    }

    /// Copies the front of `bytes` into the span; `bytes` must be at least as long.
    pub fn write(&self, span: Span, bytes: &[u8]) {
        self.region(span.place).write(span.offset, &bytes[..span.len as usize]);
    }

    /// The span's first byte, for the kernel.
    pub(super) fn pointer(&self, span: Span) -> *mut u8 {
        self.region(span.place).at(span.offset, span.len as usize)
    }

    /// One `pread` into `span`; may be short.
    pub(crate) fn pread(&self, file: &File, span: Span, at: u64) -> Result<u32, Errno> {
        let (to, len) = (self.pointer(span).cast(), span.len as usize);
        // SAFETY: `pointer` checked that the target lies in the region, which `self` keeps mapped for the call.
        outcome(unsafe { libc::pread(file.as_raw_fd(), to, len, at as libc::off_t) })
    }

    /// One `pwritev` from `spans`, [`MOST_SPANS`] at most; may be short.
    pub(crate) fn pwrite(&self, file: &File, spans: &[Span], at: u64) -> Result<u32, Errno> {
        let vectors = self.vectors(spans);
        // SAFETY: `vectors` checked that the sources lie in their regions, which `self` keeps mapped for the call.
        outcome(unsafe {
            libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, at as libc::off_t)
        })
    }

    /// The spans in the kernel's form.
    pub(super) fn vectors(&self, spans: &[Span]) -> Box<[libc::iovec]> {
        let vector = |span: &Span| libc::iovec { iov_base: self.pointer(*span).cast(), iov_len: span.len as usize };
        spans.iter().map(vector).collect()
    }
}

fn outcome(bytes: isize) -> Result<u32, Errno> {
    u32::try_from(bytes).map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_that_stopped_anywhere_goes_on_with_the_rest_of_its_spans() {
        let spans = Spans::from([Span::pool(0, 4), Span::staging(100, 3), Span::pool(50, 5)].as_slice());
        let bytes = |spans: &Spans| -> Vec<(Place, u64)> {
            spans.iter().flat_map(|span| (0..u64::from(span.len)).map(|i| (span.place, span.offset + i))).collect()
        };
        let all = bytes(&spans);
        for stop in 0..12 {
            let left = spans.after(stop);
            assert_eq!(bytes(&left), all[stop as usize..], "stopped at {stop}");
            assert_eq!(left.len_bytes(), 12 - stop);
        }
    }

    #[test]
    #[should_panic(expected = "leave a region")]
    fn no_vector_leaves_its_region() {
        let region = Region::anonymous(8192).unwrap();
        let memory = Memory::new(region.clone(), region);
        memory.vectors(&[Span::pool(0, 4096), Span::pool(4096, 4097)]);
    }
}
