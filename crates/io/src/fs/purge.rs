//! Removes all blocks of namespaces from a directory. Each namespace has a folder of its own; all files in it that
//! are named as blocks are removed.
//!
//! Removals are reported to the grants in the same way as by the sweeper, which may run at the same time, here or on
//! another host. Empty folders are left to the sweeper. Unfinished files are removed if nobody has written to them
//! for a while. Younger ones belong to a running store of this host or another: they get their name or are left to
//! the sweeper too.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use super::directory::{Directory, clock};
use super::folder::Folder;
use super::io_threads::IoThreads;
use super::layout::{self, is_folder, is_temporary};
use super::lease::now;
use super::walk::{is_a_folder, is_older};
use super::writer::kind_of;
use crate::purge::{Place, Purging};

/// A block is written in one piece; a writer that is silent for this long will not finish.
const UNFINISHED_AGE: Duration = Duration::from_secs(60);
/// How often stores are looked after that have not ended.
const LOOK: Duration = Duration::from_millis(20);
/// Files removed in one step and reported to the grants.
const FILES_AT_ONCE: usize = 64;
/// Names held in memory at a time, about 200 bytes each. At 268 million blocks a shard's folder has this many.
const MOST_LISTED: usize = 1 << 16;

pub(super) fn place(directory: &Arc<Directory>, io_threads: &Arc<IoThreads>, patience: Duration) -> Place {
    let (directory, io_threads, name) = (directory.clone(), io_threads.clone(), directory.path.display().to_string());
    let empty = move |purging: &Purging| {
        late_stores_end(&io_threads, purging, patience)?;
        empty(&directory, purging)
    };
    Place { name, patience, empty: Box::new(empty), is_mount: true }
}

/// A store that was given up goes on while its mount hangs. Its file would come after the purge.
fn late_stores_end(io_threads: &IoThreads, purging: &Purging, patience: Duration) -> Result<()> {
    let begun = Instant::now();
    while io_threads.is_storing(|namespace| purging.is_of(namespace)) {
        if begun.elapsed() > patience {
            return Err(Error::new(ErrorKind::Timeout, "stores that were given up have not ended")
                .with("seconds", patience.as_secs())
                .hint("check the mount and its server, and purge again when it answers"));
        }
        thread::sleep(LOOK);
        purging.rest(Instant::now())?;
    }
    Ok(())
}

fn empty(directory: &Directory, purging: &Purging) -> Result<()> {
    let failed = |error: Errno| {
        let hint = match kind_of(error) {
            ErrorKind::Unsupported => "purge on a host that may write to the directory",
            _ => "check the mount and its server, and purge again",
        };
        Error::new(kind_of(error), "cannot write to the directory").source(io::Error::from(error)).hint(hint)
    };
    if directory.is_read_only {
        return Err(Error::new(ErrorKind::Unsupported, "the directory is configured as read-only")
            .hint("purge on a host that may write to the directory"));
    }
    let begun = Instant::now();
    // The time comes from a file in the directory's own folder. If the mount is gone, there is no such file.
    let now = now(directory).map_err(failed)?;
    purging.rest(begun)?;
    let mut sweep = Sweep { directory, purging, now, begun: Instant::now(), left: 0, why: None };
    let swept = purging.namespaces().try_for_each(|id| sweep.folder(Path::new(&id.to_string())));
    sweep.settle();
    swept.and_then(|()| sweep.end())
}

/// A folder, or the first of its files to be removed.
struct Listed {
    /// Names, and how many blocks each file is: 1, or 0 if unfinished.
    files: Vec<(String, u64)>,
    /// Relative to the directory.
    folders: Vec<PathBuf>,
    is_whole: bool,
}

/// The purge of one directory.
struct Sweep<'a> {
    directory: &'a Directory,
    purging: &'a Purging,
    /// By the filesystem's clock.
    now: Duration,
    /// Start of this step.
    begun: Instant,
    /// How many files and folders could not be removed or read, and why the first one could not.
    left: u64,
    why: Option<(PathBuf, Errno)>,
}

impl Sweep<'_> {
    fn folder(&mut self, path: &Path) -> Result<()> {
        let folder = match self.root()?.and_then(|root| root.folder(path)) {
            Ok(folder) => folder,
            // Nothing was stored there, or the sweeper removed the empty folder.
            Err(Errno::NOENT) => return self.step(),
            Err(error) => return self.stays(path, error),
        };
        loop {
            let before = self.purging.values();
            let Listed { files, folders, is_whole } = match self.list(&folder, path) {
                Ok(listed) => listed,
                Err(Errno::NOENT) => return self.step(),
                Err(error) => return self.stays(path, error),
            };
            for some in files.chunks(FILES_AT_ONCE) {
                some.iter().try_for_each(|(name, blocks)| self.remove(&folder, path, name, *blocks))?;
                self.step()?;
            }
            self.step()?;
            if is_whole {
                return folders.iter().try_for_each(|folder| self.folder(folder));
            }
            // Files that cannot be removed would be listed again and again.
            if self.purging.values() == before {
                return Ok(());
            }
        }
    }

    /// The directory, as it is now. It may go away in the middle of a purge. An empty mount point would look like an
    /// empty directory, which says nothing about the mount's content.
    fn root(&self) -> Result<Result<Folder, Errno>> {
        let directory = self.directory;
        let root = directory.enter();
        match root.as_ref().map_or_else(|_| directory.loss(), |root| directory.loss_of(root)) {
            Some(loss) => Err(loss
                .error(&directory.path)
                .hint("check the mount, and purge again when `forebay inspect` shows the directory as serving")),
            None => Ok(root),
        }
    }

    /// Lists files to remove. They are removed after the folder was closed: not every filesystem continues a listing
    /// correctly while the folder changes.
    fn list(&mut self, folder: &Folder, path: &Path) -> Result<Listed, Errno> {
        let mut listed = Listed { files: Vec::new(), folders: Vec::new(), is_whole: false };
        for entry in folder.list()? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let below = path.join(name);
            let key = layout::key_of(&below, self.directory.is_sharded);
            if is_a_folder(folder, name, entry.file_type()) {
                listed.folders.extend(is_folder(name).then_some(below));
            } else if key.is_some_and(|key| self.purging.is_of(key.namespace)) {
                listed.files.push((name.to_owned(), 1));
            } else if is_temporary(name) && is_older(folder, name, self.now, UNFINISHED_AGE) {
                listed.files.push((name.to_owned(), 0));
            }
            if listed.files.len() == MOST_LISTED {
                return Ok(listed);
            }
        }
        Ok(Listed { is_whole: true, ..listed })
    }

    fn remove(&mut self, folder: &Folder, path: &Path, name: &str, blocks: u64) -> Result<()> {
        let count = self.directory.grants.count();
        let removed = folder.about(name).and_then(|about| folder.remove(name).map(|()| about.st_size as u64));
        match removed {
            Ok(bytes) => {
                self.purging.removed(blocks, 1);
                // The bytes of an unfinished file were never reported as stored.
                self.directory.grants.removed(bytes * blocks, count);
            }
            // Somebody else has removed the file.
            Err(Errno::NOENT) => {}
            Err(Errno::STALE) if self.directory.has_no(&path.join(name)) => {}
            Err(error) => self.stays(&path.join(name), error)?,
        }
        Ok(())
    }

    /// A file that cannot be removed does not stop the others, unless nothing can be removed.
    fn stays(&mut self, path: &Path, error: Errno) -> Result<()> {
        self.left += 1;
        self.why.get_or_insert_with(|| (self.directory.path.join(path), error));
        if error == Errno::ROFS { self.end() } else { Ok(()) }
    }

    fn step(&mut self) -> Result<()> {
        self.settle();
        self.purging.rest(self.begun)?;
        self.begun = Instant::now();
        Ok(())
    }

    /// If this fails, the sweeper's next walk still counts correctly.
    fn settle(&self) {
        let _ = self.directory.grants.settle(clock(), false);
    }

    fn end(&self) -> Result<()> {
        let Some((path, error)) = &self.why else { return Ok(()) };
        let hint = match kind_of(*error) {
            ErrorKind::Unsupported => "purge on a host, or as a user, that may remove these files",
            _ => "check the mount and its server, and purge again",
        };
        Err(Error::new(kind_of(*error), "some files could not be removed")
            .with("files", self.left)
            .with("path", path.display())
            .source(io::Error::from(*error))
            .hint(hint))
    }
}
