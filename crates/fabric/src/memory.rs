//! Memory that peers may reach: mapped files without a name, a peer's mapped files, and buffers of the caller.
//!
//! Invariants: every access is inside the memory. A mapped file is sealed, so that nobody can shorten it under a
//! reader. Other threads, processes and hosts may change the bytes at any time; so nothing here makes a reference to
//! them.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::address::NO_DESCRIPTORS;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A range of bytes that stays where it is.
pub struct Memory {
    base: *mut u8,
    bytes: u64,
    may_write: bool,
    kept: Kept,
}

/// What keeps the bytes in place.
enum Kept {
    /// Our own file; `None` for a peer's. The mapping ends with this.
    Mapped(Option<OwnedFd>),
    Owner(#[allow(dead_code, reason = "it is only dropped")] Box<dyn Any + Send + Sync>),
}

// SAFETY: the memory is only reached by copies of bytes and by system calls, which may race with others' writes; what
// keeps it may be sent and shared.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// New memory, all zero, which peers on this host can map. Its pages come into being when they are written.
    pub fn allocate(bytes: u64) -> Result<Memory> {
        let failed = |errno: rustix::io::Errno| match errno {
            rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => {
                Error::new(ErrorKind::Full, "cannot make the file of memory").source(errno).hint(NO_DESCRIPTORS)
            }
            errno => cannot_map(bytes).source(errno),
        };
        if bytes == 0 {
            return Err(Error::invalid("memory of no bytes").hint("give at least one byte"));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("forebay-transfer", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&file, SEALS).map_err(failed)?;
        let base = map(&file, bytes, true)?;
        Ok(Memory { base, bytes, may_write: true, kept: Kept::Mapped(Some(file)) })
    }

    /// The `bytes` bytes at `base`, which stay in place until `owner` is dropped.
    ///
    /// # Safety
    ///
    /// They can be read until then, and written if `may_write`. Whoever else uses them meanwhile expects them to
    /// change.
    pub unsafe fn borrowed(base: *mut u8, bytes: u64, may_write: bool, owner: Box<dyn Any + Send + Sync>) -> Memory {
        Memory { base, bytes, may_write, kept: Kept::Owner(owner) }
    }

    /// A peer's memory, by its descriptor. Errors with `Invalid` if the peer could shorten it, or if it is shorter than
    /// the peer says: reading behind the end of a file kills a process.
    pub(crate) fn of_peer(file: &OwnedFd, bytes: u64, may_write: bool) -> Result<Memory> {
        let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let has_bytes = rustix::fs::fstat(file).is_ok_and(|stat| stat.st_size as u64 >= bytes);
        if !seals.contains(SEALS) || !has_bytes || bytes == 0 {
            return Err(Error::invalid("a peer's memory is no sealed file of its length").with("bytes", bytes));
        }
        Ok(Memory { base: map(file, bytes, may_write)?, bytes, may_write, kept: Kept::Mapped(None) })
    }

    /// Bytes of it.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Never true of memory that was allocated.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether its bytes may change.
    pub fn may_write(&self) -> bool {
        self.may_write
    }

    /// Its descriptor, if peers on this host can map it.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.kept {
            Kept::Mapped(file) => file.as_ref().map(|file| file.as_fd()),
            Kept::Owner(_) => None,
        }
    }

    /// The address of `bytes` bytes at `offset`, for a system call or a copy.
    pub fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{offset}+{bytes} lies outside of {} bytes", self.bytes);
        self.base.wrapping_add(offset as usize)
    }

    /// Copies the bytes at `offset` out.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len() as u64);
        // SAFETY: `at` checked the range; `into` is the caller's alone.
        unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in at `offset`.
    pub fn write(&self, offset: u64, from: &[u8]) {
        assert!(self.may_write, "memory that may only be read");
        let into = self.at(offset, from.len() as u64);
        // SAFETY: `at` checked the range, and it may be written.
        unsafe { std::ptr::copy(from.as_ptr(), into, from.len()) }
    }

    /// Copies `bytes` bytes from one memory to another, which may be the same. An operation has several such copies:
    /// where its ranges overlap, it leaves unspecified bytes.
    pub fn copy(from: (&Memory, u64), into: (&Memory, u64), bytes: u64) {
        assert!(into.0.may_write, "memory that may only be read");
        let (from, into) = (from.0.at(from.1, bytes), into.0.at(into.1, bytes));
        // SAFETY: `at` checked both ranges, and `into` may be written. `copy` allows that they overlap.
        unsafe { std::ptr::copy(from, into, bytes as usize) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Kept::Mapped(_) = self.kept {
            // SAFETY: mapped with these bytes by `map`, and nobody has an address of it any more: operations hold it.
            let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes as usize) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes)
    }
}

/// Of each file that a peer maps.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

fn map(file: &OwnedFd, bytes: u64, may_write: bool) -> Result<*mut u8> {
    let rights = if may_write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let length = usize::try_from(bytes).map_err(|_| cannot_map(bytes))?;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, rights, MapFlags::SHARED, file, 0) };
    mapped.map(|base| base.cast()).map_err(|errno| cannot_map(bytes).source(errno))
}

fn cannot_map(bytes: u64) -> Error {
    let hint = "ask for less, or raise the limits of memory (`ulimit -v`, the container's)";
    Error::new(ErrorKind::Full, "cannot map memory").with("bytes", bytes).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_copied_in_and_out() {
        let memory = Memory::allocate(10_000).unwrap();
        memory.write(9_990, b"0123456789");
        let other = Memory::allocate(10).unwrap();
        Memory::copy((&memory, 9_990), (&other, 0), 10);
        let mut bytes = [0; 10];
        other.read(0, &mut bytes);
        assert_eq!(&bytes, b"0123456789");
        let panics = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
        assert!(panics(&|| memory.read(9_991, &mut [0; 10])));
        assert!(panics(&|| assert!(memory.at(u64::MAX, 2).is_null())));
    }

    #[test]
    fn a_file_that_its_owner_can_shorten_is_not_mapped() {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(Memory::of_peer(&file, 4096, false).unwrap_err().kind(), ErrorKind::Invalid);
        rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
        assert_eq!(Memory::of_peer(&file, 4097, false).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(Memory::of_peer(&file, 4096, false).unwrap().len(), 4096);
    }
}
