//! Memory that the engine may touch, and bounds-checked pieces of it.
//!
//! Invariants: a [`Memory`] stays mapped while any clone of it lives. A `Span` never reaches outside its memory.
//! Neither ever returns a reference that outlives a call, since other threads and processes write the same bytes at
//! other times.

use std::any::Any;
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// A range of mapped, readable and writable memory: the pool's data, or the storage of KV tensors.
#[derive(Clone)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only an address range that `new`'s caller made valid for every thread, and `_owner`
// is itself `Send + Sync`.
unsafe impl Send for Memory {}
// SAFETY: as above; who may touch which bytes when is `new`'s contract, not the borrow checker's.
unsafe impl Sync for Memory {}

impl Memory {
    /// The `len` bytes at `base`. `owner` is dropped, on any thread, when nothing here uses the bytes any more: pass
    /// the value that unmaps them, or `()` if they outlive the engine anyway.
    ///
    /// # Safety
    /// While a clone of this lives, the range is mapped, readable and writable. While a job is in flight, its
    /// submitter ensures that nobody writes the bytes that it reads and nobody touches the bytes that it writes.
    /// (Between processes leases and generations ensure this; a race there tears bytes that the guard's second check
    /// then rejects.)
    pub unsafe fn new(base: *mut u8, len: usize, owner: impl Any + Send + Sync) -> Result<Memory> {
        match NonNull::new(base) {
            Some(base) if len <= isize::MAX as usize && base.addr().checked_add(len).is_some() => {
                Ok(Memory { base, len, _owner: Arc::new(owner) })
            }
            _ => Err(Error::invalid("memory is null or wraps around").with("base", base.addr()).with("bytes", len)),
        }
    }

    /// New zeroed memory on huge pages where the kernel grants them; unmapped with the last clone.
    pub fn anonymous(len: usize) -> Result<Memory> {
        let fail = |e| Error::new(ErrorKind::Unavailable, "cannot map anonymous memory").with("bytes", len).source(e);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new private mapping at an address that the kernel chooses; it aliases nothing.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }.map_err(fail)?;
        let mapping = Mapping { base: base.addr(), len };
        // SAFETY: advice about our own mapping changes no bytes. Where huge pages are disabled the advice fails, and
        // the memory still works.
        let _ = unsafe { mm::madvise(base, len, Advice::LinuxHugepage) };
        // SAFETY: `mapping` unmaps the range when the last clone is gone. Only this crate's jobs, tests and
        // benchmarks know its address.
        unsafe { Memory::new(base.cast(), len, mapping) }
    }

    /// The first `len` bytes of a file, shared with everybody who maps it. The file must stay as long as it is.
    pub fn shared(file: impl AsFd, len: usize) -> Result<Memory> {
        let fail = |e| Error::new(ErrorKind::Unavailable, "cannot map a file").with("bytes", len).source(e);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. Rust forms no reference that outlives a call.
        let base =
            unsafe { mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }.map_err(fail)?;
        let mapping = Mapping { base: base.addr(), len };
        // SAFETY: `mapping` unmaps the range when the last clone is gone, and the caller keeps the file's length.
        unsafe { Memory::new(base.cast(), len, mapping) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, which may be given to a driver.
    pub fn address(&self) -> u64 {
        self.base.expose_provenance().get() as u64
    }

    /// For tests and benchmarks, while no job touches the bytes.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.span(offset, bytes.len() as u64).write(bytes);
    }

    pub(crate) fn overlaps(&self, other: &Memory) -> bool {
        let (a, b) = (self.base.addr().get(), other.base.addr().get());
        a < b + other.len && b < a + self.len
    }

    /// Panics if the range is not inside: callers check their input first.
    pub(crate) fn span(&self, offset: u64, len: u64) -> Span<'_> {
        let end = offset.checked_add(len).expect("a span's end fits 64 bits");
        assert!(end <= self.len as u64, "span {offset}..{end} ends outside {} bytes of memory", self.len);
        // SAFETY: `offset <= len`, so the sum stays inside the mapped range.
        let start = unsafe { self.base.add(offset as usize) };
        Span { start, len: len as usize, memory: PhantomData }
    }
}

/// Part of a [`Memory`].
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    start: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a Memory>,
}

impl<'a> Span<'a> {
    /// A span over Rust's own bytes, as a source.
    pub(crate) fn over(bytes: &'a [u8]) -> Span<'a> {
        Span { start: NonNull::from_ref(bytes).cast(), len: bytes.len(), memory: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts the first `len` bytes off.
    pub(crate) fn take(&mut self, len: usize) -> Span<'a> {
        assert!(len <= self.len, "{len} bytes taken from a span of {}", self.len);
        let front = Span { len, ..*self };
        // SAFETY: `len` was checked to be inside the span.
        self.start = unsafe { self.start.add(len) };
        self.len -= len;
        front
    }

    /// The empty span at the span's end.
    pub(crate) fn end(mut self) -> Span<'a> {
        self.take(self.len);
        self
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes, for the duration of one call.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the span is inside mapped memory, and `Memory::new`'s caller keeps writers away from what a
        // job reads.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// Copies the bytes to the start of `buffer`, which must be at least as long. Others may write them at the same
    /// time.
    pub(crate) fn read<'b>(&self, buffer: &'b mut [u8]) -> &'b [u8] {
        let bytes = &mut buffer[..self.len];
        // SAFETY: the span is inside mapped memory, and `bytes` is Rust's own and as long.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// Copies `bytes`, which must be as long as the span, here.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert_eq!(self.len, bytes.len(), "both ends of a copy are of one length");
        // SAFETY: the span is inside mapped memory, which no slice of Rust's owns.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_mut_ptr(), bytes.len()) }
    }

    /// A plain memcpy of all of `from`.
    pub(crate) fn copy_from(&self, from: Span<'_>) {
        assert_eq!(self.len, from.len, "both spans of a copy are of one length");
        // SAFETY: both spans are inside mapped memory, and pool and tensors were checked not to overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.as_mut_ptr(), self.len) }
    }
}

struct Mapping {
    base: usize,
    len: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `anonymous` and the last `Memory` that could reach it is gone.
        let unmapped = unsafe { mm::munmap(std::ptr::with_exposed_provenance_mut(self.base), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping failed: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    impl Memory {
        /// Memory, and a witness that is dead once its owner was dropped.
        pub(crate) fn with_witness(len: usize) -> (Memory, Weak<()>) {
            let alive = Arc::new(());
            let witness = Arc::downgrade(&alive);
            let mut bytes = vec![0u8; len];
            let base = bytes.as_mut_ptr();
            // SAFETY: the owner is the allocation itself, and nobody else knows its address.
            (unsafe { Memory::new(base, len, (bytes, alive)) }.unwrap(), witness)
        }

        /// The first `len` bytes, as they were mapped before the rest came.
        pub(crate) fn start(&self, len: u64) -> Memory {
            // SAFETY: inside this memory, which is kept as the owner.
            unsafe { Memory::new(self.span(0, len).as_mut_ptr(), len as usize, self.clone()) }.unwrap()
        }
    }

    #[test]
    fn the_owner_is_dropped_with_the_last_clone() {
        let (memory, witness) = Memory::with_witness(10);
        let clone = memory.clone();
        drop(memory);
        assert!(witness.upgrade().is_some());
        drop(clone);
        assert!(witness.upgrade().is_none());
    }

    #[test]
    fn memory_that_cannot_be_is_refused() {
        let top = std::ptr::without_provenance_mut(usize::MAX - 10);
        for (base, len) in [(std::ptr::null_mut(), 10), (top, 20), (std::ptr::dangling_mut(), usize::MAX)] {
            // SAFETY: refused, so never touched.
            assert!(unsafe { Memory::new(base, len, ()) }.is_err(), "{base:?} and {len} bytes were accepted");
        }
    }

    #[test]
    #[should_panic(expected = "ends outside 10 bytes")]
    fn a_span_cannot_reach_outside_its_memory() {
        Memory::with_witness(10).0.span(4, 7);
    }

    #[test]
    fn overlap_is_told_from_touching() {
        let (memory, _) = Memory::with_witness(30);
        let part = |offset: u64, len| {
            // SAFETY: inside `memory`, which outlives it; never touched.
            unsafe { Memory::new(memory.span(offset, len).as_mut_ptr(), len as usize, ()) }.unwrap()
        };
        assert!(part(0, 11).overlaps(&part(10, 20)) && part(10, 20).overlaps(&part(0, 11)));
        assert!(!part(0, 10).overlaps(&part(10, 20)) && !part(10, 20).overlaps(&part(0, 10)));
    }
}
