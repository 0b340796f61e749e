//! The pool's directory: who may use it, and where in it the files are.
//!
//! Invariant: at most one daemon holds a `Directory` at a time. The lock is on the directory itself, so that it also
//! covers choosing and mounting a place for the files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_core::trust::Role;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::FlockOperation;

use super::mounts::{Mount, mount_of, mounts};
use crate::trust::{self, Holds};

/// Where the private tmpfs is mounted, inside the directory.
const MOUNT_NAME: &str = "mnt";
pub(super) const DATA_NAME: &str = "data";
/// The list of the disks that daemons on the pool have had: see `crate::ssd::Known`.
pub(crate) const DISKS_NAME: &str = "disks";
const REPLACED_SUFFIX: &str = ".replaced";

/// See the module documentation.
pub(super) struct Directory {
    path: PathBuf,
    /// Device and inode: they identify the directory on filesystems that several pools share.
    identity: (u64, u64),
    _lock: File,
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
        let path = trust::make_directory(path, Holds::Pool)?;
        let lock = File::open(&path).map_err(unusable)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(in_use(&path));
        }
        let metadata = lock.metadata().map_err(unusable)?;
        Ok(Directory { path, identity: (metadata.dev(), metadata.ino()), _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn mount_point(&self) -> PathBuf {
        self.path.join(MOUNT_NAME)
    }

    /// The private tmpfs, if an earlier daemon or an operator mounted one.
    pub fn private_mount(&self) -> io::Result<Option<Mount>> {
        let point = self.mount_point();
        match fs::symlink_metadata(&point) {
            Ok(metadata) if metadata.dev() != self.identity.0 => {
                trust::checked(Role::Directory, &point).map_err(io::Error::other)?;
                Ok(Some(mount_of(&point)?).filter(|mount| mount.filesystem == "tmpfs"))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Directories where the small files may be, the more likely one first.
    pub fn homes(&self) -> io::Result<Vec<PathBuf>> {
        let mounted = self.private_mount()?.map(|_| self.mount_point());
        Ok(mounted.into_iter().chain([self.path.clone()]).collect())
    }

    /// Directories where the data file may be: beside the small files, or on a hugetlbfs.
    pub fn data_places(&self) -> io::Result<Vec<PathBuf>> {
        let beside = self.homes()?.into_iter().map(|home| home.join(DATA_NAME));
        let reserved = mounts()?.into_iter().filter(|mount| mount.filesystem == "hugetlbfs" && is_safe(mount));
        Ok(beside.chain(reserved.map(|mount| self.data_on_hugetlbfs(&mount))).collect())
    }

    /// hugetlbfs is shared by all pools of a host; the directory's identity keeps their files apart.
    pub fn data_on_hugetlbfs(&self, mount: &Mount) -> PathBuf {
        mount.point.join(format!("forebay-{:x}-{:x}", self.identity.0, self.identity.1))
    }
}

/// Whether nobody else can replace a file on this mount under the same name. The file itself is checked when it is
/// opened.
pub(super) fn is_safe(mount: &Mount) -> bool {
    trust::checked(Role::Above, &mount.point).is_ok()
}

pub(super) fn data_beside(home: &Path) -> PathBuf {
    home.join(DATA_NAME)
}

/// The new name of a data file whose pool was replaced while workers still mapped it.
pub(super) fn replaced_name(data: &Path) -> PathBuf {
    let mut name = data.as_os_str().to_owned();
    name.push(REPLACED_SUFFIX);
    PathBuf::from(name)
}

pub(super) fn in_use(path: &Path) -> Error {
    Error::new(ErrorKind::Unavailable, "another daemon is using this pool")
        .with("path", path.display())
        .hint("stop the other daemon, or give this one its own `pool.directory`")
}

pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
