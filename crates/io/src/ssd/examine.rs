//! Judges a disk before a daemon claims it, by the rules of the claim itself.
//!
//! Invariant: nothing is made, written or locked.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use forebay_core::{Error, Result};
use rustix::fs::{Access, AtFlags, CWD, OFlags};
use rustix::io::Errno;

use super::config::DiskConfig;
use super::device::{
    Content, DAEMON_BYTE, cannot, check_place, free_bytes, in_use, judged, needs_capacity, no_room, open_for_transfers,
    place_of, trusted_path,
};
use crate::uring::is_locked;

/// What a daemon would do with a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prospect {
    /// It would take what is there.
    Take {
        /// Nothing is on it yet.
        is_blank: bool,
    },
    /// It would make a file.
    Make {
        /// Free space of the filesystem there.
        free_bytes: u64,
    },
}

/// What a daemon of this user would do, or every reason why it would refuse the disk or do without it, in the words of
/// that daemon. Where the disk hangs, so does this call.
pub fn examine(config: &DiskConfig) -> Result<Prospect, Vec<Error>> {
    let path = &config.path;
    let (real, links) = trusted_path(path).map_err(|error| vec![error])?;
    if real.exists() {
        examine_disk(&real, links, config).map_err(|error| vec![error])
    } else {
        examine_place(&real, config)
    }
}

fn examine_disk(real: &Path, links: OFlags, config: &DiskConfig) -> Result<Prospect> {
    let path = &config.path;
    let failed = |what: &str, error: io::Error| cannot(what, path, error);
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
    Ok(Prospect::Take { is_blank: wanted.content == Content::Blank })
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
