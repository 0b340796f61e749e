//! One mapped file, and the only access to its bytes.
//!
//! Invariants: the mapping lives as long as the `Region` and is aligned for huge pages. It grows at its end alone, so
//! an address in it stays right. Forked children do not inherit it and core dumps exclude it. Bytes that another
//! process may change are only copied through raw pointers, or loaded and stored as atomic words, so no reference to
//! them exists.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, PoisonError};

use forebay_core::checksum::Checksum;
use forebay_numa::Kernel;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap, munmap};

use crate::uring::sum_up;

/// The common size of huge pages; mappings begin on a multiple of it.
pub(super) const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// While memory is populated, other threads of the process get no new memory from the kernel: 256 MiB in one call kept
/// them for up to 0.9 s. In pieces of this size it was 2 to 5 ms at most, and took no longer in all (kernel 6.18).
const POPULATED_AT_ONCE: usize = 256 << 10;
/// `MADV_COLLAPSE`: part of the kernel's interface since Linux 6.1, not yet in every C library's headers.
const MADV_COLLAPSE: libc::c_int = 25;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// See the module documentation.
pub(super) struct Region {
    base: NonNull<u8>,
    len: AtomicUsize,
    /// Bytes from the base whose addresses belong to this region: those of whole pages that are mapped, and behind
    /// them a range that is kept free for growth.
    room: Mutex<usize>,
    access: Access,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is reached only through the methods below,
// which hand out no reference to bytes that are written without atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of `file` from `offset`, shared.
    pub fn map(file: impl AsFd, offset: u64, len: u64, access: Access) -> io::Result<Region> {
        Region::map_with_room(file, offset, len, 0, access)
    }

    /// The same, and keeps the addresses behind it free up to `room` bytes from its start, for [`Region::grow`]. It has
    /// no such room if the system refuses so many addresses.
    pub fn map_with_room(file: impl AsFd, offset: u64, len: u64, room: u64, access: Access) -> io::Result<Region> {
        let file = file.as_fd();
        let whole = |len| usize::try_from(len).map(|len: usize| len.next_multiple_of(rustix::param::page_size()));
        let (needed, room) = (whole(len).map_err(io::Error::other)?, whole(room.max(len)).map_err(io::Error::other)?);
        let len = len as usize;
        let align = page_bytes(file)?.max(HUGE_PAGE_BYTES) as usize;
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let (reserved, room) = match reserve(room, align) {
            Err(_) if room > needed => (reserve(needed, align)?, needed),
            reserved => (reserved?, room),
        };
        let base = map_aligned(file, offset, len, &reserved, room, protection, align)?;
        let region = Region { base, len: AtomicUsize::new(len), room: Mutex::new(room), access };
        region.advise(0..len, Advice::LinuxDontFork)?;
        region.advise(0..len, Advice::LinuxDontDump)?;
        Ok(region)
    }

    /// Maps the file's bytes behind those that are mapped, so that they are `len` together. The file must be as long.
    /// Errors if there is no room, or the kernel cannot: the region is as it was, and does not grow any more.
    pub fn grow(&self, len: u64) -> io::Result<()> {
        self.grow_while(len, || {})
    }

    /// `meanwhile` is what happens while the addresses belong to nobody.
    fn grow_while(&self, len: u64, meanwhile: impl FnOnce()) -> io::Result<()> {
        let page = rustix::param::page_size();
        let whole = |len: usize| len.next_multiple_of(page);
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let (old, len) = (self.len(), usize::try_from(len).map_err(io::Error::other)?);
        let (old_end, end) = (whole(old), whole(len));
        if len < old || end > *room {
            return Err(Errno::NOMEM.into());
        }
        let base = self.as_ptr();
        let give_up = |room: &mut usize, start: usize| {
            if start < *room {
                // SAFETY: behind `start` is this region's own range, in which nothing is mapped that anybody knows of.
                let _ = unsafe { munmap(base.add(start).cast(), *room - start) };
            }
            *room = old_end;
        };
        if old_end < end {
            // SAFETY: this is a part of the range that is kept free, in which nothing is mapped.
            unsafe { munmap(base.add(old_end).cast(), end - old_end) }?;
            meanwhile();
            // SAFETY: the last page is this mapping's. Without leave to move it the kernel extends the mapping where it
            // is, or not at all: another thread may have mapped something in the gap.
            let extended =
                unsafe { mremap(base.add(old_end - page).cast(), page, page + end - old_end, MremapFlags::empty()) };
            if let Err(error) = extended {
                give_up(&mut room, end);
                return Err(error.into());
            }
            // Bytes behind the end of a file would raise a signal at the first touch.
            // SAFETY: the page was just mapped; reading it changes nothing.
            let last = unsafe { madvise(base.add(end - page).cast(), page, Advice::LinuxPopulateRead) };
            if let Err(error) = last {
                give_up(&mut room, old_end);
                return Err(error.into());
            }
        }
        self.len.store(len, Release);
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.len.load(Acquire)
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Asks for huge pages. A kernel without them refuses, which only affects speed.
    pub fn want_huge_pages(&self) -> bool {
        self.advise(0..self.len(), Advice::LinuxHugepage).is_ok()
    }

    /// Allocates and maps every page of `range`, keeping the file's content. If the filesystem is full, a plain touch
    /// would kill the process (`SIGBUS`); this returns an error.
    ///
    /// Between two pieces other threads of the process get at their memory, see [`POPULATED_AT_ONCE`].
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let mut pieces = range.clone().step_by(POPULATED_AT_ONCE);
        let populate = |start: usize| {
            let piece = start..range.end.min(start + POPULATED_AT_ONCE);
            self.advise(piece, Advice::LinuxPopulateWrite).map_err(|error| match error.raw_os_error() {
                // "Bad address": the touch that was spared.
                Some(libc::EFAULT) => Errno::NOSPC.into(),
                _ => error,
            })
        };
        pieces.try_for_each(populate)
    }

    /// Has `range` get its memory from a NUMA node, where it has none yet; see [`Kernel::prefer`].
    pub fn prefer(&self, range: Range<usize>, node: u32, kernel: &dyn Kernel) -> io::Result<()> {
        self.check(&range);
        let base = self.as_ptr() as usize;
        kernel.prefer(base + range.start..base + range.end, node)
    }

    /// Replaces the small pages of `range` by huge ones; at least one page of each 2 MiB must exist.
    pub fn collapse(&self, range: Range<usize>) -> io::Result<()> {
        self.check(&range);
        // SAFETY: the range lies in this mapping; collapsing keeps its contents and addresses.
        let rc = unsafe { libc::madvise(self.as_ptr().add(range.start).cast(), range.len(), MADV_COLLAPSE) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The mapping as words, for files that only this process writes, and only through these words.
    pub fn words(&self) -> &[AtomicU64] {
        assert!(self.access == Access::ReadWrite);
        // SAFETY: the base is page-aligned, the length covers the words, and the mapping outlives `&self`. Any other
        // process that maps the file (none, for a table) can only load them.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len() / 8) }
    }

    /// The mapping as half words, which the daemon stores and workers load. In a read-only mapping only relaxed loads
    /// are allowed: on some processors stronger ones may be compiled into stores.
    pub fn half_words(&self) -> &[AtomicU32] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len() / 4) }
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(self.access == Access::ReadWrite);
        let range = self.range(offset, bytes.len());
        // SAFETY: the target lies in this writable mapping and cannot overlap memory that Rust owns. Another process
        // may touch the same bytes at the same time; generation and checksum detect what it then reads.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(range.start), bytes.len()) }
    }

    /// Copies from `offset` into `bytes`.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let range = self.range(offset, bytes.len());
        // SAFETY: the source lies in this mapping, the target is Rust's own. Another process may write the source at
        // the same time: the copy is then a mix of old and new bytes, which its checksum detects.
        unsafe { ptr::copy_nonoverlapping(self.as_ptr().add(range.start), bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies `len` bytes to `to`. The two ranges must not overlap.
    pub fn copy(&self, from: u64, to: u64, len: u64) {
        assert!(self.access == Access::ReadWrite);
        let (from, to) = (self.range(from, len as usize), self.range(to, len as usize));
        assert!(from.end <= to.start || to.end <= from.start, "{from:?} and {to:?} overlap");
        // SAFETY: both ranges lie in this writable mapping and do not overlap. Another process may write them at the
        // same time: the user of the copy detects that by the slot's generation.
        unsafe { ptr::copy_nonoverlapping(self.as_ptr().add(from.start), self.as_ptr().add(to.start), from.len()) }
    }

    /// Copies `len` bytes to `to` in another region.
    pub fn copy_to(&self, from: u64, other: &Region, to: u64, len: u64) {
        assert!(other.access == Access::ReadWrite);
        let (from, to) = (self.range(from, len as usize), other.range(to, len as usize));
        // SAFETY: both ranges lie in their mappings, which do not overlap, and the target is writable. Other processes
        // may write them at the same time: the user of the copy detects that by a checksum.
        unsafe { ptr::copy_nonoverlapping(self.as_ptr().add(from.start), other.as_ptr().add(to.start), from.len()) }
    }

    /// Whether every page of the mapping is in memory, so that touching it allocates nothing.
    pub fn is_resident(&self) -> io::Result<bool> {
        let mut pages = vec![0u8; self.len().div_ceil(rustix::param::page_size())];
        // SAFETY: the range is this mapping's, and there is a byte for each of its pages.
        let rc = unsafe { libc::mincore(self.as_ptr().cast(), self.len(), pages.as_mut_ptr()) };
        if rc == 0 { Ok(pages.iter().all(|page| page & 1 == 1)) } else { Err(io::Error::last_os_error()) }
    }

    /// Adds the present content of `len` bytes from `offset` to `sum`.
    pub fn sum(&self, sum: &mut Checksum, offset: u64, len: u64) {
        let range = self.range(offset, len as usize);
        // SAFETY: the bytes lie in this mapping, which lives as long as `self`.
        unsafe { sum_up(sum, self.as_ptr().add(range.start), range.len()) }
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> io::Result<()> {
        self.check(&range);
        loop {
            // SAFETY: the range lies in this mapping, and none of the advices used here drops contents.
            match unsafe { madvise(self.as_ptr().add(range.start).cast(), range.len(), advice) } {
                Err(Errno::INTR) => continue,
                done => return Ok(done?),
            }
        }
    }

    fn range(&self, offset: u64, len: usize) -> Range<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let range = start..start.saturating_add(len);
        self.check(&range);
        range
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} is outside the {} bytes mapped",
            self.len()
        );
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let room = *self.room.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is exactly this region's, and nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.as_ptr().cast(), room) };
    }
}

/// Page size of the filesystem; on hugetlbfs larger than the machine's own.
fn page_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    let status = rustix::fs::fstatfs(file)?;
    let is_hugetlbfs = status.f_type as u64 as u32 == HUGETLBFS_MAGIC;
    Ok(if is_hugetlbfs { status.f_bsize as u64 } else { rustix::param::page_size() as u64 })
}

const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// Addresses for `room` bytes, whole pages, at a multiple of `align`.
fn reserve(room: usize, align: usize) -> io::Result<Range<usize>> {
    let span = room.checked_add(align).ok_or(Errno::NOMEM)?;
    // SAFETY: the kernel chooses the address, so nothing existing is replaced.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), span, ProtFlags::empty(), MapFlags::PRIVATE) }? as usize;
    Ok(start..start + span)
}

/// Maps at a multiple of `align` in the reserved range, of which `room` bytes from there stay reserved.
fn map_aligned(
    file: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    reserved: &Range<usize>,
    room: usize,
    protection: ProtFlags,
    align: usize,
) -> io::Result<NonNull<u8>> {
    let base = reserved.start.next_multiple_of(align);
    let unmap = |start: usize, end: usize| {
        if start < end {
            // SAFETY: this is a part of the reserved range in which nothing is mapped.
            let _ = unsafe { munmap(start as *mut _, end - start) };
        }
    };
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the new mapping replaces a part of the range just reserved, which nobody else uses.
    let mapped = unsafe { mmap(base as *mut _, len, protection, flags, file, offset) };
    unmap(reserved.start, base);
    let Ok(mapped) = mapped else {
        // What was to be mapped stays reserved: the kernel may have emptied it, and another thread may use it by now.
        unmap(base + len.next_multiple_of(rustix::param::page_size()), reserved.end);
        return Err(mapped.expect_err("it was not mapped").into());
    };
    unmap(base + room, reserved.end);
    Ok(NonNull::new(mapped.cast()).expect("the kernel maps nothing at address zero unasked"))
}

/// The address range of a region as `/proc/self/smaps` writes it.
pub(super) fn address_range(region: &Region) -> Range<u64> {
    let start = region.as_ptr() as u64;
    start..start + region.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    fn file(len: u64) -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn a_region_is_aligned_for_huge_pages_and_shows_the_file() {
        let file = file(5 << 20);
        let region = Region::map(&file, 0, 5 << 20, Access::ReadWrite).unwrap();
        assert_eq!(region.as_ptr() as u64 % HUGE_PAGE_BYTES, 0);
        region.write((5 << 20) - 3, b"end");
        let mut bytes = [0; 3];
        file.read_exact_at(&mut bytes, (5 << 20) - 3).unwrap();
        assert_eq!(&bytes, b"end");
        file.write_all_at(b"abc", 7).unwrap();
        region.read(7, &mut bytes);
        assert_eq!(&bytes, b"abc");
    }

    #[test]
    fn a_region_begins_where_it_was_told_and_leaves_nothing_behind() {
        let file = file(3 << 20);
        file.write_all_at(&7u64.to_le_bytes(), 1 << 20).unwrap();
        let region = Region::map(&file, 1 << 20, 4096 + 100, Access::ReadWrite).unwrap();
        assert_eq!(region.words()[0].load(std::sync::atomic::Ordering::Relaxed), 7);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", region.as_ptr() as u64);
        let line = maps.lines().find(|line| line.starts_with(&start)).expect("the region is mapped");
        assert!(line.starts_with(&format!("{start}{:x} ", region.as_ptr() as u64 + 8192)), "{line}");
    }

    /// Begin and end of what is mapped of the file at the region's addresses, and whether behind it comes a range that
    /// nobody may touch.
    fn mapped(region: &Region) -> (Range<u64>, bool) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let lines = maps.lines().map(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            (u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap(), rest.starts_with("---p"))
        });
        let lines: Vec<_> = lines.collect();
        let start = region.as_ptr() as u64;
        let (range, _) = lines.iter().find(|(range, _)| range.contains(&start)).expect("the region is mapped");
        (range.clone(), lines.iter().any(|(other, is_kept)| *is_kept && other.contains(&range.end)))
    }

    #[test]
    fn a_region_with_room_grows_where_it_is() {
        let file = file(2 << 20);
        let region = Region::map_with_room(&file, 0, 2 << 20, 1 << 40, Access::ReadWrite).unwrap();
        region.write(7, b"abc");
        let start = region.as_ptr();
        for mib in [4u64, 5, 64] {
            file.set_len(mib << 20).unwrap();
            region.grow(mib << 20).unwrap();
            assert_eq!((region.len() as u64, region.as_ptr()), (mib << 20, start));
            let (range, has_room) = mapped(&region);
            assert_eq!((range.end, has_room), (start as u64 + (mib << 20), true));
            region.write((mib << 20) - 3, b"end");
            let mut bytes = [0; 3];
            file.read_exact_at(&mut bytes, (mib << 20) - 3).unwrap();
            assert_eq!(&bytes, b"end");
        }
        let mut bytes = [0; 3];
        region.read(7, &mut bytes);
        assert_eq!(&bytes, b"abc");
        let end = start as u64 + (1 << 40) - 1;
        drop(region);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains(&format!("-{:x} ---p", end + 1)), "its addresses are free again");
    }

    #[test]
    fn a_mapping_that_is_refused_keeps_no_room() {
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        named.as_file().set_len(1 << 20).unwrap();
        let read_only = File::open(named.path()).unwrap();
        let reserved = || {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            status.split(' ').next().unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
        };
        let before = reserved();
        for _ in 0..10 {
            let refused = Region::map_with_room(&read_only, 0, 1 << 20, 1 << 40, Access::ReadWrite);
            assert!(refused.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied));
        }
        // Other tests map something too, but none of them half of this.
        assert!(reserved() < before + (1 << 40) / 2, "{} bytes", reserved() - before);
    }

    #[test]
    fn a_region_grows_by_less_than_a_page() {
        let file = file(4096 + 100);
        let region = Region::map_with_room(&file, 0, 4096 + 100, 1 << 20, Access::Read).unwrap();
        file.set_len(3 * 4096 + 8).unwrap();
        region.grow(4096 + 200).unwrap();
        assert_eq!(region.half_words().len(), (4096 + 200) / 4);
        file.write_all_at(&7u32.to_le_bytes(), 3 * 4096 + 4).unwrap();
        region.grow(3 * 4096 + 8).unwrap();
        assert_eq!(region.half_words().last().unwrap().load(std::sync::atomic::Ordering::Relaxed), 7);
    }

    #[test]
    fn a_region_that_cannot_grow_stays_as_it_was() {
        let named = file(2 << 20);
        named.write_all_at(b"abc", 7).unwrap();
        let without_room = Region::map(&named, 0, 2 << 20, Access::ReadWrite).unwrap();
        let file_too_short = Region::map_with_room(&named, 0, 2 << 20, 1 << 30, Access::ReadWrite).unwrap();
        let too_far = Region::map_with_room(&named, 0, 2 << 20, 4 << 20, Access::ReadWrite).unwrap();
        let in_the_way = Region::map_with_room(&named, 0, 2 << 20, 1 << 30, Access::ReadWrite).unwrap();
        let gap = in_the_way.as_ptr() as usize + (3 << 20);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let take = || {
            // SAFETY: an address that nobody has now: the kernel would refuse any other.
            let taken = unsafe { mmap_anonymous(gap as *mut _, 4096, ProtFlags::READ, flags) };
            assert_eq!(taken.unwrap() as usize, gap);
        };
        let nothing: &dyn Fn() = &|| {};
        for (region, mib, meanwhile) in [
            (&without_room, 4u64, nothing),
            (&file_too_short, 4, nothing),
            (&too_far, 8, nothing),
            (&in_the_way, 4, &take),
        ] {
            region.grow_while(mib << 20, meanwhile).unwrap_err();
            assert_eq!(region.len(), 2 << 20);
            let mut bytes = [0; 3];
            region.read(7, &mut bytes);
            assert_eq!(&bytes, b"abc");
        }
        named.set_len(4 << 20).unwrap();
        for region in [&without_room, &file_too_short, &in_the_way] {
            region.grow(4 << 20).unwrap_err();
            region.grow(2 << 20).unwrap();
            assert!(!mapped(region).1, "a region without room keeps no addresses");
        }
        too_far.grow(4 << 20).unwrap();
        drop(in_the_way);
        // SAFETY: the page that was mapped above, which is still there.
        unsafe { munmap(gap as *mut _, 4096) }.unwrap();
    }

    #[test]
    #[should_panic(expected = "outside the 4096 bytes mapped")]
    fn bytes_outside_the_region_cannot_be_named() {
        let file = file(4096);
        Region::map(&file, 0, 4096, Access::ReadWrite).unwrap().read(u64::MAX, &mut [0; 2]);
    }

    #[test]
    fn populating_a_file_that_is_too_short_is_an_error_and_not_a_signal() {
        let file = file(4096);
        let region = Region::map(&file, 0, 1 << 20, Access::ReadWrite).unwrap();
        region.populate(0..4096).unwrap();
        region.populate(0..1 << 20).unwrap_err();
    }
}
