//! Judges a disk before a daemon claims it, by the rules of the claim itself.
//!
//! Invariant: nothing is made, written or locked.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use forebay_core::{Error, Result};
use rustix::fs::{Access, AtFlags, CWD, OFlags};
use rustix::io::Errno;

use super::config::DiskConfig;
use super::device::{
    DAEMON_BYTE, cannot, check_kind, check_place, formatted_bytes, free_bytes, in_use, judged, needs_capacity, no_room,
    open_for_transfers, place_of, trusted_path,
};
use super::layout::{Geometry, PAGE_BYTES};
use crate::uring::is_locked;

/// What a daemon would do with a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prospect {
    /// It would take what is there.
    Take {
        /// The capacity of a disk that was formatted, where another one is configured: it keeps its own.
        made_bytes: Option<u64>,
        /// The length of a file that was formatted with more: what was behind it is lost.
        cut_bytes: Option<u64>,
    },
    /// It would make a file.
    Make {
        /// Free space of the filesystem there.
        free_bytes: u64,
    },
}

/// What one look at a disk's path found. Whether the disk is there is asked once, since an answer may change.
#[derive(Debug)]
pub struct Look {
    /// Whether there is a file or a device.
    pub is_there: bool,
    /// What a daemon of this user would do, or every reason why it would refuse the disk or do without it, in the words
    /// of that daemon.
    pub prospect: Result<Prospect, Vec<Error>>,
}

/// Where the disk hangs, so does this call.
pub fn examine(config: &DiskConfig) -> Look {
    let (real, links) = match trusted_path(&config.path) {
        Ok(found) => found,
        Err(error) => return Look { is_there: false, prospect: Err(vec![error]) },
    };
    let is_there = real.exists();
    let prospect = match is_there {
        true => examine_disk(&real, links, config).map_err(|error| vec![error]),
        false => examine_place(&real, config),
    };
    Look { is_there, prospect }
}

/// An error if two of the paths lead to one disk: its lock would look like another daemon's.
pub fn check_twins(disks: &[DiskConfig]) -> Result<()> {
    let identities: Vec<Option<String>> = disks.iter().map(|disk| identity(&disk.path)).collect();
    for (place, found) in identities.iter().enumerate().filter(|(_, found)| found.is_some()) {
        if let Some(twin) = identities[..place].iter().position(|earlier| earlier == found) {
            return Err(named_twice(&disks[place].path, &disks[twin].path));
        }
    }
    Ok(())
}

/// What tells a disk from all others, whatever its path: the number of a device, or filesystem and inode of a file. Of
/// a file that is not there it is the place where it would be made. None if nobody can say.
pub(super) fn identity(path: &Path) -> Option<String> {
    let inode = |path: &Path| {
        let metadata = path.metadata().ok()?;
        let is_device = metadata.file_type().is_block_device();
        let of_file = || format!("{}:{}", metadata.dev(), metadata.ino());
        Some(if is_device { format!("device {}", metadata.rdev()) } else { of_file() })
    };
    inode(path).or_else(|| {
        let (real, _) = trusted_path(path).ok()?;
        let name = std::fs::read_link(&real).unwrap_or_else(|_| real.clone());
        Some(format!("{} {:?}", inode(&place_of(&real))?, name.file_name()?))
    })
}

/// Two paths of one configuration lead to one disk.
pub fn named_twice(one: &Path, other: &Path) -> Error {
    Error::invalid("two paths of `tier.ssd.disks` lead to the same disk")
        .with("path", one.display())
        .with("other", other.display())
        .hint("name each disk once: take one of the two paths out of `tier.ssd.disks`")
}

fn examine_disk(real: &Path, links: OFlags, config: &DiskConfig) -> Result<Prospect> {
    let path = &config.path;
    let failed = |what: &str, error: io::Error| cannot(what, path, error);
    check_kind(real, path)?;
    let flags = (links | OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).write(true).custom_flags(flags).open(real);
    let file = file.map_err(|error| failed("open", error))?;
    if is_locked(&file, DAEMON_BYTE).map_err(|error| failed("lock", error))? {
        return Err(in_use(path));
    }
    let metadata = file.metadata().map_err(|error| failed("look at", error))?;
    let wanted = judged(&file, config)?;
    if !wanted.is_whole && metadata.len() < wanted.bytes {
        let free = free_bytes(&file).map_err(|error| failed("look at", error.into()))?;
        if free.is_some_and(|free| free + metadata.blocks() * 512 < wanted.bytes) {
            return Err(no_room(path, wanted.bytes, Errno::NOSPC));
        }
    }
    if metadata.file_type().is_block_device() {
        // Whether it is mounted. The description is closed at once.
        open_for_transfers(real, links, &file)?;
    }
    let is_cut = metadata.is_file() && formatted_bytes(&file).is_some_and(|made| metadata.len() < made);
    let cut_bytes = is_cut.then_some(metadata.len());
    Ok(Prospect::Take { made_bytes: other_capacity(&file, config), cut_bytes })
}

/// The capacity that a disk keeps, if that is not the configured one.
fn other_capacity(file: &File, config: &DiskConfig) -> Option<u64> {
    let mut first = [0; PAGE_BYTES];
    file.read_exact_at(&mut first, 0).ok()?;
    let (geometry, wanted) = (Geometry::decode_superblock(&first)?, config.capacity_bytes?);
    let made_bytes = geometry.disk_bytes();
    let is_other = wanted < made_bytes || made_bytes + geometry.segment_bytes <= wanted;
    is_other.then_some(made_bytes)
}

fn examine_place(real: &Path, config: &DiskConfig) -> Result<Prospect, Vec<Error>> {
    let path = &config.path;
    let directory = place_of(real);
    let mut refusals = Vec::new();
    refusals.extend(check_place(real, config).err());
    if config.capacity_bytes.is_none() {
        refusals.push(needs_capacity(path));
    }
    let made = Access::WRITE_OK | Access::EXEC_OK;
    if let Err(errno) = rustix::fs::accessat(CWD, &directory, made, AtFlags::EACCESS) {
        refusals.push(cannot("open", path, errno.into()));
    }
    let free = File::open(&directory).and_then(|directory| Ok(free_bytes(&directory)?));
    let free = free.unwrap_or_default().unwrap_or(u64::MAX);
    if let Some(wanted) = config.capacity_bytes.filter(|wanted| *wanted > free) {
        refusals.push(no_room(path, wanted, Errno::NOSPC));
    }
    if refusals.is_empty() { Ok(Prospect::Make { free_bytes: free }) } else { Err(refusals) }
}
