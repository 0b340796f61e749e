//! A file or block device as it is claimed: who else uses it, how long it is, whether it takes direct I/O.
//!
//! Invariants: one daemon uses a disk, and a lock says so; bytes are not moved before all I/O of an earlier daemon
//! is over; nothing that is not ours is ever written to, or given another length; no symbolic link is followed that
//! another user could have made, and no disk is used in a directory that another user could change; no file is made on
//! the root filesystem or below a mount point of `/etc/fstab` without its mount, unless that is wanted, because the
//! disk is probably not mounted there.
//!
//! Two locks on two open file descriptions. The first lives with the process. The second lies on the description
//! that does the I/O, which the kernel keeps until the last transfer of a killed daemon is over: who holds the
//! first and not the second knows that bytes may still be moving.

use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::trust::Role;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::config::DiskConfig;
use super::layout::{
    FIRST_SEGMENT_AT, Geometry, MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, PAGE, PAGE_BYTES, PurgeRecord, SegmentHeader,
    not_ours,
};
use super::mounts;
use super::staging::HEADS;
use crate::trust;
use crate::uring::{Memory, Region, Span, try_lock};

/// The byte that a daemon locks as long as it lives; far behind what any disk holds.
pub const DAEMON_BYTE: u64 = i64::MAX as u64 - 2;
/// The byte that is locked on the description that moves bytes.
pub const TRANSFERS_BYTE: u64 = i64::MAX as u64 - 1;

/// How long a device may be busy: the kernel lets it go when an earlier daemon's last transfer is over.
const BUSY: Duration = Duration::from_secs(5);
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Bytes of one reading that looks for data on a disk that seems empty, and how many such readings: 256 MiB in all.
const SAMPLE_BYTES: usize = 64 << 10;
const SAMPLES: u64 = 4096;

/// A disk that no other daemon uses.
pub(super) struct Device {
    pub path: PathBuf,
    pub file: Arc<File>,
    pub bytes: u64,
    pub is_direct: bool,
    has_transfers_lock: bool,
    daemon_lock: File,
}

impl Device {
    /// Claims the disk, and makes or lengthens the file where that is needed. Takes as long as `fallocate` does.
    pub fn claim(config: &DiskConfig) -> Result<Device> {
        let path = config.path.clone();
        let (real, links) = trusted_path(&path)?;
        let was_missing = !real.exists();
        if was_missing {
            check_place(&real, config)?;
        }
        check_kind(&real, &path)?;
        let daemon_lock = open(&real, links).map_err(|error| cannot("open", &path, error))?;
        if !try_lock(&daemon_lock, DAEMON_BYTE).map_err(|error| cannot("lock", &path, error))? {
            return Err(in_use(&path));
        }
        // Judged under the lock: another daemon may have made the file meanwhile, and may have ended since.
        let is_made = was_missing && daemon_lock.metadata().is_ok_and(|metadata| metadata.len() == 0);
        let opened = sized(&daemon_lock, config)
            .and_then(|bytes| Ok((bytes, open_for_transfers(&real, links, &daemon_lock)?)))
            .inspect_err(|_| {
                // An empty file that nobody asked for would only be in the way. The error that is told is the first.
                let _ = if is_made { remove_made(&real, &daemon_lock) } else { Ok(()) };
            });
        let (bytes, (file, is_direct)) = opened?;
        Ok(Device::of(path, [daemon_lock, file], bytes, is_direct))
    }

    /// A disk that this process or another has claimed, with the descriptions that [`Device::descriptors`] gave.
    pub fn of(path: PathBuf, [daemon_lock, file]: [File; 2], bytes: u64, is_direct: bool) -> Device {
        Device { path, file: Arc::new(file), bytes, is_direct, has_transfers_lock: false, daemon_lock }
    }

    pub fn is_block_device(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
    }

    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.daemon_lock.as_fd(), self.file.as_fd()]
    }

    /// Whether no transfer of an earlier daemon can move bytes any more. Once true, it stays so.
    pub fn is_earlier_io_done(&mut self) -> Result<bool> {
        if !self.has_transfers_lock {
            let locked = try_lock(&*self.file, TRANSFERS_BYTE);
            self.has_transfers_lock = locked.map_err(|error| cannot("lock", &self.path, error))?;
        }
        Ok(self.has_transfers_lock)
    }
}

/// Errors if something else than a disk is there, which may not even open. A directory has an error of its own.
pub(super) fn check_kind(real: &Path, path: &Path) -> Result<()> {
    // What cannot be looked at cannot be opened, which says why.
    let Ok(kind) = std::fs::metadata(real).map(|metadata| metadata.file_type()) else { return Ok(()) };
    if kind.is_file() || kind.is_block_device() || kind.is_dir() {
        return Ok(());
    }
    let shown = path.display();
    let error = Error::invalid("a disk is a file or a block device").with("path", path.display());
    Err(error.hint(format!("name another path in `tier.ssd.disks`, or remove what is there: see `stat {shown}`")))
}

/// Removes the file that this claim has made, and no other that is there by now.
fn remove_made(real: &Path, made: &File) -> io::Result<()> {
    let target = real.canonicalize()?;
    if is_same(&File::open(&target)?, made)? { std::fs::remove_file(target) } else { Ok(()) }
}

/// A disk that may be used.
pub(super) struct Judged {
    /// The length that the disk has, or gets.
    pub bytes: u64,
    /// False for a file that has to be preallocated to that length.
    pub is_whole: bool,
    /// Whether it was used before.
    pub is_ours: bool,
}

/// The length of the disk, after a file was given its own.
fn sized(file: &File, config: &DiskConfig) -> Result<u64> {
    let Judged { bytes, is_whole, is_ours } = judged(file, config)?;
    if !is_whole {
        let metadata = file.metadata().map_err(|error| cannot("look at", &config.path, error))?;
        match preallocate(file, &metadata, bytes) {
            // Written whole by others, for all that can be done here.
            Err(Errno::OPNOTSUPP) if metadata.len() >= bytes => {}
            Err(Errno::OPNOTSUPP) if is_ours => return Err(cut_short(&config.path, metadata.len(), bytes)),
            preallocated => preallocated.map_err(|error| no_room(&config.path, bytes, error))?,
        }
    }
    Ok(bytes)
}

/// Changes nothing. Errors where the disk must not be used, or not with this configuration.
pub(super) fn judged(file: &File, config: &DiskConfig) -> Result<Judged> {
    let path = &config.path;
    let metadata = file.metadata().map_err(|error| cannot("look at", path, error))?;
    if metadata.file_type().is_block_device() {
        let mut device = file;
        let bytes = device.seek(SeekFrom::End(0)).map_err(|error| cannot("measure", path, error))?;
        let sector_bytes = rustix::fs::ioctl_blksszget(file).map_err(|error| cannot("measure", path, error.into()))?;
        if u64::from(sector_bytes) > PAGE {
            return Err(Error::new(ErrorKind::Unsupported, "a disk's sectors are longer than 4 KiB")
                .with("path", path.display())
                .with("sector_bytes", sector_bytes));
        }
        let content = check_content(file, bytes).map_err(|error| error.with("path", path.display()))?;
        let is_ours = content == Content::Ours;
        return match config.capacity_bytes {
            Some(wanted) if wanted > bytes => Err(Error::invalid("a device is smaller than its configured capacity")
                .with("path", path.display())
                .with("bytes", bytes)
                .hint("lower `capacity_bytes`, or leave it out to take the whole device")),
            wanted => Ok(Judged { bytes: wanted.unwrap_or(bytes), is_whole: true, is_ours }),
        };
    }
    trust::check(file, path).map_err(|error| error.with("path", path.display()))?;
    let wanted = config.capacity_bytes.ok_or_else(|| needs_capacity(path))?;
    let content = check_content(file, metadata.len()).map_err(|error| error.with("path", path.display()))?;
    // Ours was preallocated, and keeps the capacity that it has. A file of zeros may be longer, or all holes.
    let is_ours = content == Content::Ours;
    let wanted = formatted_bytes(file).filter(|_| is_ours).map_or(wanted, |bytes| wanted.min(bytes));
    let is_whole = is_ours && metadata.len() >= wanted;
    Ok(Judged { bytes: if is_whole { metadata.len() } else { wanted }, is_whole, is_ours })
}

/// What is on a disk that may be used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Blank,
    Ours,
}

/// Errors where the file or device holds something, and no disk of ours: with that to lose, it is not changed.
pub(super) fn check_content(file: &File, bytes: u64) -> Result<Content> {
    let cannot = |error| {
        let hint = "look for errors of this disk in the kernel's log; replace it, or take it out of `tier.ssd.disks`";
        Error::new(ErrorKind::Io, "cannot read a disk").source(error).hint(hint)
    };
    let mut first = [0; PAGE_BYTES];
    let has_first = bytes >= PAGE;
    if has_first {
        file.read_exact_at(&mut first, 0).map_err(cannot)?;
        if Geometry::decode_superblock(&first).is_some() {
            return Ok(Content::Ours);
        }
    }
    let mut head = vec![0; bytes.min(FIRST_SEGMENT_AT) as usize];
    file.read_exact_at(&mut head, 0).map_err(cannot)?;
    // A damaged superblock is made again from the segments, and one that was never written leaves segments too. Behind
    // it there are zeros up to the first segment, and pages of the list of purges: anything else is of others, who have
    // taken the disk since.
    let pages = (0..).step_by(PAGE_BYTES).zip(head.chunks(PAGE_BYTES)).skip(1);
    let has_others = pages.into_iter().any(|(at, page)| !is_zero(page) && !PurgeRecord::is_at(at, page));
    if !has_others && has_segment(file, bytes) {
        return Ok(Content::Ours);
    }
    let is_empty = is_zero(&head) && is_empty_behind(file, bytes).map_err(cannot)?;
    if is_empty { Ok(Content::Blank) } else { Err(not_ours(has_first.then_some(&first))) }
}

/// The capacity that the superblock tells, if it can be read.
pub(super) fn formatted_bytes(file: &File) -> Option<u64> {
    let mut first = [0; PAGE_BYTES];
    file.read_exact_at(&mut first, 0).ok()?;
    Geometry::decode_superblock(&first).map(|geometry| geometry.disk_bytes())
}

/// Whether the header of one of the first segments is there, for any segment size. One that cannot be read is not.
fn has_segment(file: &File, bytes: u64) -> bool {
    let mut page = [0; PAGE_BYTES];
    let mut segment_bytes = MIN_SEGMENT_BYTES;
    while segment_bytes <= MAX_SEGMENT_BYTES {
        let starts = (0..u64::from(HEADS)).map(|index| FIRST_SEGMENT_AT + index * segment_bytes);
        for at in starts.take_while(|at| at + PAGE <= bytes) {
            if file.read_exact_at(&mut page, at).is_ok() && SegmentHeader::decode(&page).is_some() {
                return true;
            }
        }
        segment_bytes *= 2;
    }
    false
}

/// Whether a file has only holes and zeros behind the superblock's part. Of a device, and of long zeros, it reads
/// samples.
fn is_empty_behind(file: &File, bytes: u64) -> io::Result<bool> {
    let mut sample = [0; SAMPLE_BYTES];
    let mut is_zero_at = |at: u64| -> io::Result<bool> {
        let sample = &mut sample[..SAMPLE_BYTES.min((bytes - at) as usize)];
        file.read_exact_at(sample, at)?;
        Ok(is_zero(sample))
    };
    let step = (bytes / SAMPLES).next_multiple_of(PAGE).max(SAMPLE_BYTES as u64);
    let mut at = FIRST_SEGMENT_AT;
    while at < bytes {
        at = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data_at) => data_at,
            Err(Errno::NXIO) => return Ok(true),
            // A device knows no holes.
            Err(_) => at,
        };
        if !is_zero_at(at)? {
            return Ok(false);
        }
        at += step;
    }
    // Partition tables have a copy at the end.
    is_zero_at(bytes.saturating_sub(SAMPLE_BYTES as u64))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Preallocates, or leaves the file as it is: a `fallocate` that runs out of space keeps all it got.
fn preallocate(file: &File, metadata: &Metadata, wanted: u64) -> Result<(), Errno> {
    if free_bytes(file)?.is_some_and(|free| free + metadata.blocks() * 512 < wanted) {
        return Err(Errno::NOSPC);
    }
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, wanted).inspect_err(|_| {
        // Nothing more can be done; the error that is told is the first one.
        let _ = file.set_len(metadata.len());
    })
}

/// Free space of the filesystem; some filesystems do not know.
pub(super) fn free_bytes(file: &File) -> Result<Option<u64>, Errno> {
    let filesystem = rustix::fs::fstatvfs(file)?;
    Ok((filesystem.f_blocks > 0).then(|| filesystem.f_bavail * filesystem.f_frsize))
}

/// Opens the description that moves bytes, past the page cache where the filesystem allows it.
pub(super) fn open_for_transfers(path: &Path, links: OFlags, measured: &File) -> Result<(File, bool)> {
    let is_device = measured.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
    // The kernel opens a device exclusively for one holder and for no mounted filesystem.
    let exclusive = if is_device { links | OFlags::EXCL } else { links };
    let open = |path: &Path, flags| {
        let file = open(path, flags)?;
        let is_it = is_same(&file, measured)?;
        is_it.then_some(file).ok_or_else(|| io::Error::other("the file was replaced by another"))
    };
    let start = Instant::now();
    let mut opened = open(path, exclusive | OFlags::DIRECT);
    while is_busy(&opened) && start.elapsed() < BUSY {
        std::thread::sleep(BUSY_PAUSE);
        opened = open(path, exclusive | OFlags::DIRECT);
    }
    let is_busy = is_busy(&opened);
    match opened {
        Ok(file) if takes_pages(&file).map_err(|error| cannot("read", path, error))? => return Ok((file, true)),
        Err(_) if is_busy => {
            return Err(Error::new(ErrorKind::Unavailable, "this device is in use")
                .with("path", path.display())
                .hint("unmount it; after a crash, an earlier daemon's i/o may need a moment to end"));
        }
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(cannot("open", path, error)),
        Ok(_) | Err(_) => {}
    }
    let file = open(path, exclusive).map_err(|error| cannot("open", path, error))?;
    Ok((file, false))
}

fn is_busy(opened: &io::Result<File>) -> bool {
    opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

/// Whether direct I/O in whole pages works: some filesystems want more, some say no only now.
fn takes_pages(file: &File) -> io::Result<bool> {
    let memory = Memory::new(Region::anonymous(PAGE as usize)?, Region::anonymous(PAGE as usize)?);
    match memory.pread(file, Span::pool(0, PAGE as u32), 0) {
        Err(Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(true),
    }
}

/// The path without links above its last part, where nobody else can change it, and whether its last part may be a
/// link: one is followed where only root and this user could have made it, as in `/dev/disk/by-id`.
pub(super) fn trusted_path(path: &Path) -> Result<(PathBuf, OFlags)> {
    let absolute = std::path::absolute(path).map_err(|error| cannot("look at", path, error))?;
    let real = |directory: &Path| directory.canonicalize().map_err(|error| cannot("open", path, error));
    let parent = real(absolute.parent().unwrap_or(&absolute))?;
    check_links(&absolute).map_err(|error| {
        Error::invalid("a disk's path is a symbolic link that others may change")
            .with("path", path.display())
            .source(error)
            .hint(format!("name the file that the link leads to: `readlink -f {}` prints it", path.display()))
    })?;
    // Others may add names beside a file, whose owner is checked.
    let check =
        |directory: &Path| trust::checked(Role::Above, directory).map_err(|error| error.with("disk", path.display()));
    let parent = check(&parent)?;
    let target = std::fs::read_link(&absolute).ok().map(|target| parent.join(target));
    if let Some(above) = target.as_deref().and_then(Path::parent) {
        check(&real(above)?)?;
    }
    let links = if target.is_some() { OFlags::empty() } else { OFlags::NOFOLLOW };
    Ok((absolute.file_name().map_or(parent.clone(), |name| parent.join(name)), links))
}

/// Whether the disk is a file that is not there and may be made. Where the disk hangs, so does this call.
pub(super) fn is_to_be_made(config: &DiskConfig) -> Result<bool> {
    let (real, _) = trusted_path(&config.path)?;
    let is_missing = !real.exists();
    if is_missing {
        check_place(&real, config)?;
    }
    Ok(is_missing)
}

/// A file that is not there yet is made where that fills no filesystem by mistake, and hides no disk.
pub(super) fn check_place(real: &Path, config: &DiskConfig) -> Result<()> {
    if config.create {
        return Ok(());
    }
    let place = place_of(real);
    let missing = |says: &str, hint: String| {
        Err(Error::new(ErrorKind::NotFound, says).with("path", config.path.display()).hint(hint))
    };
    if let Some(point) = mounts::missing_above(&place) {
        let says = "a disk's file does not exist, and a filesystem of `/etc/fstab` is not mounted there";
        let point = point.display();
        let hint = format!("`mount {point}`; if blocks belong in the directory itself, set `tier.ssd.create = true`");
        return missing(says, hint);
    }
    let device = |path: &Path| path.metadata().map(|metadata| metadata.dev());
    let cannot = |error| cannot("look at", &config.path, error);
    if device(&place).map_err(cannot)? != device(Path::new("/")).map_err(cannot)? {
        return Ok(());
    }
    let hint = "mount the disk there; if blocks belong on the root filesystem, set `tier.ssd.create = true`";
    missing("a disk's file does not exist, and its directory is on the root filesystem", hint.to_owned())
}

/// The directory in which the file is made.
pub(super) fn place_of(real: &Path) -> PathBuf {
    let target = std::fs::read_link(real).ok().and_then(|target| Some(real.parent()?.join(target)));
    target.as_deref().unwrap_or(real).parent().unwrap_or(Path::new("/")).to_owned()
}

/// Checks the directory of each link on the way: others must not add names beside a link. There is no loop of links
/// above the last part.
fn check_links(path: &Path) -> Result<()> {
    for part in path.ancestors() {
        let (Ok(target), Some(above)) = (std::fs::read_link(part), part.parent()) else { continue };
        let above = above.canonicalize().map_err(|error| cannot("look at", part, error))?;
        trust::checked(Role::Directory, &above)?;
        if above.join(&target).exists() {
            check_links(&above.join(target))?;
        }
    }
    Ok(())
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let [one, other] = [one.metadata()?, other.metadata()?];
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let exists = path.exists();
    let mut options = File::options();
    options.read(true).write(true).mode(0o600).custom_flags(flags.bits() as i32);
    if exists { options.open(path) } else { options.create(true).truncate(false).open(path) }
}

pub(super) fn in_use(path: &Path) -> Error {
    Error::new(ErrorKind::Unavailable, "another daemon uses this disk").with("path", path.display()).hint(
        "name a disk of one daemon only in `tier.ssd.disks`; of a daemon that has ended, a call that hangs may still \
             hold the disk: it is taken when the call ends",
    )
}

pub(super) fn needs_capacity(path: &Path) -> Error {
    Error::invalid("a file needs a capacity")
        .with("path", path.display())
        .hint("set `tier.ssd.capacity_bytes`, to which the file is preallocated")
}

/// No mistake of the operator: the daemon starts without the disk.
fn cut_short(path: &Path, bytes: u64, wanted: u64) -> Error {
    let shown = path.display();
    Error::new(ErrorKind::Corrupt, "a disk's file is shorter than its capacity, and its filesystem cannot preallocate")
        .with("path", path.display())
        .with("bytes", bytes)
        .with("wanted_bytes", wanted)
        .hint(format!(
            "if it was cut, its blocks are lost: write it anew with `head -c {wanted} /dev/zero > {shown}`; if \
             `tier.ssd.capacity_bytes` was raised, lower it again"
        ))
}

pub(super) fn no_room(path: &Path, wanted: u64, error: Errno) -> Error {
    let kind = if error == Errno::NOSPC { ErrorKind::Full } else { ErrorKind::Unsupported };
    let hint = match error {
        Errno::FBIG => "raise the limit on the size of files (`ulimit -f unlimited`; `LimitFSIZE=` of a service)",
        _ => "free space, lower `capacity_bytes`, or use a filesystem that has `fallocate`",
    };
    Error::new(kind, "cannot preallocate a disk's file")
        .with("path", path.display())
        .with("bytes", wanted)
        .source(io::Error::from(error))
        .hint(hint)
}

pub(super) fn cannot(what: &str, path: &Path, error: io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::IsADirectory => "name a file in the directory, or a block device, in `tier.ssd.disks`",
        _ => "see that the path in `tier.ssd.disks` exists and that the daemon's user may read and write it",
    };
    Error::new(ErrorKind::Io, format!("cannot {what} a disk")).with("path", path.display()).source(error).hint(hint)
}
