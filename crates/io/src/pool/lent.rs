//! Memory that a client lends to the daemon, for the payloads of its calls. Both map it.
//!
//! The client makes it and allocates all of its pages. The daemon maps it. Then the client seals it, and only then does
//! the daemon use it.
//!
//! Invariants: no touch of the daemon's mapping can fail, allocate or wait, whatever the client does. The seals forbid
//! that the memory shrinks, and (`F_SEAL_FUTURE_WRITE`) that pages are punched out of it; so the pages that were there
//! after it was sealed stay there. The client pays for them. The daemon calls nothing on the descriptor that takes the
//! lock of the file: a client can hold that lock for good, by a write whose source never comes (`userfaultfd`). So it
//! asks neither for the size nor for the blocks of the file, and uses no `pread` and `pwrite`.
//!
//! The client can change the bytes at any time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_core::checksum::Checksum;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, ftruncate, memfd_create};

use super::map::{Access, Region};

/// Most bytes of one memory: several of the largest messages.
pub const MAX_LENT_BYTES: u64 = 64 << 20;

const TMPFS_MAGIC: u32 = 0x0102_1994;

/// Memory that both sides have mapped and that stays there. See the module documentation.
pub struct Lent {
    pub(super) region: Region,
}

/// Memory that is not sealed yet.
pub struct Lending {
    region: Region,
    file: OwnedFd,
}

impl Lending {
    /// Errors with `Invalid` unless memory can have this size.
    pub fn check(bytes: u64) -> Result<()> {
        if bytes == 0 || bytes > MAX_LENT_BYTES || !bytes.is_multiple_of(rustix::param::page_size() as u64) {
            return Err(Error::invalid("lent memory cannot have this size")
                .with("bytes", bytes)
                .with("limit", MAX_LENT_BYTES)
                .hint("lend whole pages, up to the limit"));
        }
        Ok(())
    }
}

/// For the client.
impl Lending {
    /// New memory, whole pages of it.
    pub fn make(bytes: u64) -> Result<Lending> {
        Lending::check(bytes)?;
        let make = || -> io::Result<Lending> {
            let file = memfd_create("forebay-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, bytes)?;
            let region = Region::map(&file, 0, bytes, Access::ReadWrite)?;
            // Pages that only `fallocate` has made count as absent until they are touched.
            region.populate(0..region.len())?;
            Ok(Lending { region, file })
        };
        make().map_err(|error| Error::new(ErrorKind::Io, "cannot make memory to lend").source(error))
    }

    /// The descriptor, for the daemon.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Call it when the daemon has mapped the memory: later it could not.
    pub fn seal(self) -> Result<Lent> {
        fcntl_add_seals(&self.file, needed() | SealFlags::GROW | SealFlags::SEAL).map_err(|errno| {
            Error::new(ErrorKind::Unsupported, "cannot seal memory to lend")
                .source(io::Error::from(errno))
                .hint("Linux 5.1 or later is needed")
        })?;
        Ok(Lent { region: self.region })
    }
}

/// For the daemon.
impl Lending {
    /// Maps what a client has sent.
    pub fn received(file: OwnedFd, bytes: u64) -> Result<Lending> {
        Lending::check(bytes)?;
        // Answered by memory alone, and without its lock; another file could make anything else wait.
        let is_memory = fcntl_get_seals(&file).is_ok()
            && fstatfs(&file).is_ok_and(|found| found.f_type as u64 as u32 == TMPFS_MAGIC);
        if !is_memory {
            return Err(Error::invalid("a client lent a descriptor that is no memory of small pages"));
        }
        let region = Region::map(&file, 0, bytes, Access::ReadWrite)
            .map_err(|error| Error::invalid("lent memory cannot be mapped").source(error))?;
        Ok(Lending { region, file })
    }

    /// Errors with `Invalid` unless the memory is all there and stays as it is.
    pub fn sealed(self) -> Result<Lent> {
        if !fcntl_get_seals(&self.file).is_ok_and(|seals| seals.contains(needed())) {
            return Err(Error::invalid("lent memory is not sealed"));
        }
        let cannot = |error| Error::invalid("lent memory cannot be used").source(error);
        if !self.region.is_resident().map_err(cannot)? {
            return Err(Error::invalid("lent memory is not allocated"));
        }
        self.region.populate(0..self.region.len()).map_err(cannot)?;
        Ok(Lent { region: self.region })
    }
}

impl Lent {
    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.region.len() as u64
    }

    /// Copies `bytes` to `offset`. Panics if they leave the memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.region.write(offset, bytes);
    }

    /// Fills `bytes` from `offset`. Panics if they leave the memory.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.region.read(offset, bytes);
    }

    /// Checksum of `len` bytes at `offset`. Panics if they leave the memory.
    pub fn checksum(&self, offset: u64, len: u64) -> u64 {
        let mut sum = Checksum::new();
        self.region.sum(&mut sum, offset, len);
        sum.finish()
    }
}

fn needed() -> SealFlags {
    SealFlags::SHRINK | SealFlags::FUTURE_WRITE
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, fallocate};
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const BYTES: u64 = 1 << 20;

    fn memory(flags: MemfdFlags, bytes: u64) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | flags).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    }

    fn copy(file: &OwnedFd) -> OwnedFd {
        file.try_clone().unwrap()
    }

    /// What the daemon says to memory whose client seals it so, after the daemon has mapped it.
    fn refusal(file: &OwnedFd, seals: SealFlags) -> String {
        let lending = Lending::received(copy(file), BYTES).unwrap();
        // Memory that nobody can seal refuses even no seals.
        if !seals.is_empty() {
            fcntl_add_seals(file, seals).unwrap();
        }
        lending.sealed().map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn both_sides_see_the_same_bytes() {
        let mine = Lending::make(BYTES).unwrap();
        let theirs = Lending::received(mine.file().try_clone_to_owned().unwrap(), BYTES).unwrap();
        let mine = mine.seal().unwrap();
        let theirs = theirs.sealed().unwrap();
        mine.write(BYTES - 3, b"end");
        let mut bytes = [0; 3];
        theirs.read(BYTES - 3, &mut bytes);
        assert_eq!((&bytes, theirs.bytes()), (b"end", BYTES));
        assert_eq!(mine.checksum(BYTES - 3, 3), forebay_core::checksum::checksum(b"end"));
    }

    #[test]
    fn only_memory_of_small_pages_is_mapped() {
        let (pipe, _writer) = std::io::pipe().unwrap();
        let zeros = OwnedFd::from(File::options().read(true).write(true).open("/dev/zero").unwrap());
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(BYTES).unwrap();
        for other in [pipe.into(), zeros, file.into()] {
            let refused = Lending::received(other, BYTES).map(|_| ()).unwrap_err();
            assert!(refused.to_string().contains("no memory of small pages"), "{refused}");
        }
    }

    #[test]
    fn sizes_that_are_no_whole_pages_or_too_many_are_refused() {
        for bytes in [0, 1, 4097, MAX_LENT_BYTES + 4096, u64::MAX] {
            let file = memory(MemfdFlags::ALLOW_SEALING, BYTES);
            assert!(Lending::received(file, bytes).is_err() && Lending::make(bytes).is_err(), "{bytes}");
        }
    }

    /// Each of these could end the daemon by a signal, or make it pay for the pages.
    #[test]
    fn memory_that_could_go_away_is_refused() {
        let allocated = |bytes| {
            let file = memory(MemfdFlags::ALLOW_SEALING, bytes);
            rustix::io::pwrite(&file, &vec![1; bytes as usize], 0).unwrap();
            file
        };
        let all = needed() | SealFlags::GROW;
        assert!(refusal(&allocated(BYTES), SealFlags::SHRINK).contains("not sealed"));
        assert!(refusal(&allocated(BYTES), SealFlags::FUTURE_WRITE).contains("not sealed"));
        assert!(refusal(&memory(MemfdFlags::empty(), BYTES), SealFlags::empty()).contains("not sealed"));
        assert!(refusal(&memory(MemfdFlags::ALLOW_SEALING, BYTES), all).contains("not allocated"));
        assert!(refusal(&allocated(BYTES - 4096), all).contains("not allocated"));
        let punched = allocated(BYTES);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&punched, hole, 8192, 4096).unwrap();
        assert!(refusal(&punched, all).contains("not allocated"));
        // Shared memory that other programs see by a name has seals too, which nobody can add to.
        let named = tempfile::tempfile_in("/dev/shm").unwrap();
        named.write_all_at(&vec![1; BYTES as usize], 0).unwrap();
        assert!(refusal(&named.into(), SealFlags::empty()).contains("not sealed"));
    }

    #[test]
    fn a_client_cannot_take_pages_from_sealed_memory() {
        let mine = Lending::make(BYTES).unwrap();
        let file = mine.file().try_clone_to_owned().unwrap();
        let theirs = Lending::received(copy(&file), BYTES).unwrap();
        let _mine = mine.seal().unwrap();
        let theirs = theirs.sealed().unwrap();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(fallocate(&file, hole, 0, BYTES).is_err());
        assert!(ftruncate(&file, 0).is_err());
        theirs.write(0, &[7; 4096]);
    }
}
