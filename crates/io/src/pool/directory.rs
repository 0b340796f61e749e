//! The pool's directory: who may use it, and where in it the files are.
//!
//! Invariant: at most one daemon holds a `Directory` at a time. The lock is on the directory itself, so that it also
//! covers choosing and mounting a place for the files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::trust::Role;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::FlockOperation;

use super::files::DATA_NAME;
use super::mounts::{Mount, cover_of, mount_of, mounts};
use super::ours;
use crate::trust::{self, Holds};

/// Where the private tmpfs is mounted, inside the directory.
const MOUNT_NAME: &str = "mnt";
/// What the kernel calls the source of such a mount.
pub(super) const MOUNT_SOURCE: &str = "forebay";

/// See the module documentation. A copy holds the same lock.
#[derive(Clone)]
pub(super) struct Directory {
    path: PathBuf,
    /// Device and inode: they identify the directory on filesystems that several pools share.
    identity: (u64, u64),
    /// It, and those above it, that were made for this claim; the deepest first.
    made: Vec<PathBuf>,
    _lock: Arc<File>,
}

impl Directory {
    /// Creates the directory if it is missing, and takes its lock.
    pub fn claim(path: &Path) -> Result<Directory> {
        let hint = "set `pool.directory` to a directory that the daemon may write to, such as one in `/dev/shm`";
        let unusable = |error: io::Error| {
            Error::new(ErrorKind::Io, "cannot use the pool's directory")
                .with("path", path.display())
                .source(error)
                .hint(hint)
        };
        let (wanted, _) = trust::check_directory(path, Holds::Pool)?;
        let is_missing = |path: &&Path| fs::symlink_metadata(path).is_err();
        let made = wanted.ancestors().take_while(is_missing).map(Path::to_owned).collect();
        let path = trust::make_directory(path, Holds::Pool)?;
        let lock = File::open(&path).map_err(unusable)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(in_use(&path));
        }
        let metadata = lock.metadata().map_err(unusable)?;
        Ok(Directory { path, identity: (metadata.dev(), metadata.ino()), made, _lock: Arc::new(lock) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn mount_point(&self) -> PathBuf {
        self.path.join(MOUNT_NAME)
    }

    /// Whether the directory was made for this claim, so that all in it is the claimant's.
    pub fn is_new(&self) -> bool {
        !self.made.is_empty()
    }

    /// The private tmpfs, if an earlier daemon mounted one, or an operator one that is empty or holds a pool. Errors if
    /// something else has its place: a mount there would hide it.
    pub fn private_mount(&self) -> Result<Option<Mount>> {
        mount_in(&self.path, self.identity.0)
    }

    /// Gives back the directories that were made for this claim, as far as they are empty.
    pub fn unmake(&self) {
        for path in &self.made {
            if fs::remove_dir(path).is_err() {
                return;
            }
        }
    }

    /// Directories where the small files may be, the more likely one first.
    pub fn homes(&self) -> Result<Vec<PathBuf>> {
        let mounted = self.private_mount()?.map(|_| self.mount_point());
        Ok(mounted.into_iter().chain([self.path.clone()]).collect())
    }

    /// Directories where the data file may be: beside the small files, or on a hugetlbfs.
    pub fn data_places(&self) -> Result<Vec<PathBuf>> {
        let beside = self.homes()?.into_iter().map(|home| home.join(DATA_NAME));
        let mounts = mounts().map_err(|error| ours::unreadable(&self.path, error))?;
        let reserved = mounts.into_iter().filter(|mount| mount.filesystem == "hugetlbfs" && is_safe(mount));
        Ok(beside.chain(reserved.map(|mount| self.data_on_hugetlbfs(&mount))).collect())
    }

    /// hugetlbfs is shared by all pools of a host; the directory's identity keeps their files apart.
    pub fn data_on_hugetlbfs(&self, mount: &Mount) -> PathBuf {
        mount.point.join(format!("forebay-{:x}-{:x}", self.identity.0, self.identity.1))
    }
}

/// Errors where something in a directory has the place of the pool's mount, or covers it. Takes no lock, and changes
/// nothing.
pub fn check_mount(directory: &Path) -> Result<()> {
    let metadata = fs::metadata(directory).map_err(|error| ours::unreadable(directory, error))?;
    mount_in(directory, metadata.dev()).map(drop)
}

/// See [`Directory::private_mount`]. `device` is the directory's own.
fn mount_in(directory: &Path, device: u64) -> Result<Option<Mount>> {
    let point = directory.join(MOUNT_NAME);
    let cannot = |error| ours::unreadable(&point, error);
    let metadata = match fs::symlink_metadata(&point) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot(error)),
    };
    if metadata.is_symlink() {
        return Err(Error::invalid("the place of the pool's mount is a symbolic link")
            .with("path", point.display())
            .hint("remove the link, and unmount what is mounted where it leads; or name another directory"));
    }
    // First, because what follows looks at the upper filesystem, and would blame that.
    if let Some(cover) = cover_of(&point).map_err(cannot)?
        && cover.source != MOUNT_SOURCE
    {
        return Err(Error::invalid("a filesystem is mounted over the one in the pool's directory")
            .with("path", point.display())
            .with("filesystem", cover.filesystem)
            .hint(format!("`umount {}`, which takes the upper one away", point.display())));
    }
    if metadata.dev() == device {
        return match metadata.is_dir() && is_empty(&point).map_err(cannot)? {
            true => Ok(None),
            false => Err(ours::foreign(&point)),
        };
    }
    trust::checked(Role::Directory, &point)?;
    let mount = mount_of(&point).map_err(cannot)?;
    let is_for_pool = mount.source == MOUNT_SOURCE || is_empty(&point).map_err(cannot)? || ours::has_pool(&point)?;
    if mount.filesystem == "tmpfs" && is_for_pool {
        return Ok(Some(mount));
    }
    Err(Error::invalid("the directory is not a pool's: it has a mount that Forebay did not make")
        .with("path", point.display())
        .with("filesystem", mount.filesystem)
        .hint("name another directory, or unmount the filesystem"))
}

/// Whether nobody else can replace a file on this mount under the same name. The file itself is checked when it is
/// opened.
pub(super) fn is_safe(mount: &Mount) -> bool {
    trust::checked(Role::Above, &mount.point).is_ok()
}

pub(super) fn data_beside(home: &Path) -> PathBuf {
    home.join(DATA_NAME)
}

pub(super) fn in_use(path: &Path) -> Error {
    Error::new(ErrorKind::Unavailable, "a daemon is using this pool")
        .with("path", path.display())
        .hint("stop that daemon, or give this one its own `pool.directory`")
}

pub(super) fn is_empty(directory: &Path) -> io::Result<bool> {
    Ok(fs::read_dir(directory)?.next().is_none())
}

pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
