//! An open folder of a shared directory, from which everything below it is reached.
//!
//! Whoever may write to a shared directory can replace a folder or a file by a link at any moment, while a daemon of
//! root works there. Invariants: what is opened, made, renamed or removed is below the directory, and no symbolic link
//! leads to it. Permissions are set through the descriptor of what was made, never by name.
//!
//! The directory is opened for each piece of work, or for some loads of a busy thread. A directory that stays open
//! keeps its filesystem from being unmounted, and goes on to show what its path no longer leads to.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, Result};
use rustix::path::Arg;

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const LIST: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);
const NEW: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL);

/// See the module documentation.
pub(super) struct Folder(OwnedFd);

impl Folder {
    /// The shared directory that its path leads to now. An operator may have links in the path.
    pub fn enter(directory: &Path) -> Result<Folder> {
        rustix::fs::open(directory, FOLDER, Mode::empty()).map(Folder)
    }

    /// The folder at `path` below this one.
    pub fn folder(&self, path: impl Arg) -> Result<Folder> {
        self.resolve(path, FOLDER, Mode::empty()).map(Folder)
    }

    /// The existing file at `path` below this folder.
    pub fn open(&self, path: impl Arg, flags: OFlags) -> Result<File> {
        self.resolve(path, flags, Mode::empty()).map(File::from)
    }

    /// What is known of `path`, without opening it. A link at its end is not followed. A link on the way may be, so
    /// this answers questions and justifies no change.
    pub fn about(&self, path: impl Arg) -> Result<Stat> {
        rustix::fs::statat(&self.0, path, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// What is known of this folder.
    pub fn about_it(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.0)
    }

    /// The names in this folder.
    pub fn list(&self) -> Result<Dir> {
        Dir::new(self.resolve(c".", LIST, Mode::empty())?)
    }

    /// Makes a file of that name; an error if there is one.
    pub fn create(&self, name: impl Arg, flags: OFlags, mode: Mode) -> Result<File> {
        let file = self.resolve(name, NEW | flags, mode)?;
        if Mode::from_raw_mode(rustix::fs::fstat(&file)?.st_mode & 0o777) != mode {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(file.into())
    }

    /// The folder of that name, which is made if it is missing.
    pub fn make(&self, name: impl Arg + Copy, mode: Mode) -> Result<Folder> {
        match rustix::fs::mkdirat(&self.0, name, mode) {
            Ok(()) => rustix::fs::fchmod(self.resolve(name, LIST, Mode::empty())?, mode)?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        self.folder(name)
    }

    /// Gives the file `name` the further name `new`; false if that name exists.
    pub fn link(&self, name: impl Arg, new: impl Arg) -> Result<bool> {
        match rustix::fs::linkat(&self.0, name, &self.0, new, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives the file `name` the name `new` instead, whatever had that name.
    pub fn rename(&self, name: impl Arg, new: impl Arg) -> Result<()> {
        rustix::fs::renameat(&self.0, name, &self.0, new)
    }

    /// Removes the file of that name.
    pub fn remove(&self, name: impl Arg) -> Result<()> {
        rustix::fs::unlinkat(&self.0, name, AtFlags::empty())
    }

    /// Removes the empty folder of that name.
    pub fn remove_folder(&self, name: impl Arg) -> Result<()> {
        rustix::fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR)
    }

    fn resolve(&self, path: impl Arg, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(&self.0, path, flags | OFlags::CLOEXEC, mode, within)
    }
}
