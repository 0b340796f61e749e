//! One walk through a shared directory, folder by folder: it counts what is there, and removes what is too old.
//!
//! Invariants: a folder that cannot be read is passed over and does not end the walk. The walk enters, counts and
//! removes only folders and files with names of ours. Its memory is bounded for any number of objects.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::directory::Directory;
use super::folder::Folder;
use super::grants::Figures;
use super::layout::{self, OWN_FOLDER, is_folder, is_object_length, is_temporary};
use super::lease::touched_at;
use super::writer::{head, resolve};

/// What is removed whatever the capacity is.
#[derive(Clone, Copy)]
pub(super) struct Ages {
    /// By the filesystem's clock.
    pub now: Duration,
    pub max_age: Option<Duration>,
    pub orphan_age: Duration,
}

impl Ages {
    /// Of an object that was used last at `touched`.
    fn are_over(&self, touched: Duration) -> bool {
        self.max_age.is_some_and(|age| self.now.saturating_sub(touched) > age)
    }
}

/// What the sweep of one folder removed.
#[derive(Clone, Copy, Default)]
pub(super) struct Swept {
    pub expired_blocks: u64,
    pub expired_bytes: u64,
    pub orphans: u64,
}

/// See the module documentation.
pub(super) struct Walk {
    /// Relative to the directory. The directory itself has an empty path.
    pending: Vec<PathBuf>,
    /// Bytes granted long enough before the walk began; none if its count is not valid.
    pub basis: Option<Option<u64>>,
    /// The figures when the walk began.
    pub begun: Option<Figures>,
    pub found_bytes: u64,
    pub found_blocks: u64,
    pub skipped_folders: u64,
    /// The first folder that could not be read, relative to the directory.
    pub skipped: Option<(PathBuf, Errno)>,
}

impl Walk {
    pub fn new(basis: Option<Option<u64>>, begun: Option<Figures>) -> Walk {
        let pending = vec![PathBuf::from(OWN_FOLDER), PathBuf::new()];
        let (found_bytes, found_blocks, skipped_folders, skipped) = Default::default();
        Walk { pending, basis, begun, found_bytes, found_blocks, skipped_folders, skipped }
    }

    /// Processes the next folder; none when all were seen.
    pub fn step(&mut self, directory: &Directory, ages: Ages) -> Result<Option<Swept>, Errno> {
        let Some(path) = self.pending.pop() else { return Ok(None) };
        let root = directory.enter()?;
        let mut swept = Swept::default();
        match self.folder(directory, ages, &root, &path, &mut swept) {
            // Another sweeper removed the empty folder.
            Ok(()) | Err(Errno::NOENT) => {}
            // Without the directory's own list there is nothing to walk through.
            Err(error) if path.as_os_str().is_empty() => return Err(error),
            Err(error) => {
                self.skipped_folders += 1;
                self.skipped.get_or_insert((path, error));
            }
        }
        Ok(Some(swept))
    }

    fn folder(
        &mut self,
        directory: &Directory,
        ages: Ages,
        root: &Folder,
        path: &Path,
        swept: &mut Swept,
    ) -> Result<(), Errno> {
        let opened = if path.as_os_str().is_empty() { None } else { Some(root.folder(path)?) };
        let folder = opened.as_ref().unwrap_or(root);
        let mut is_empty = true;
        for entry in folder.list()? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name != "." && name != ".." {
                is_empty = false;
                self.look(directory, ages, folder, &path.join(name), entry.file_type(), swept);
            }
        }
        let is_old = |about: Stat| ages.now.saturating_sub(touched_at(&about)) > ages.orphan_age;
        if is_empty && opened.is_some() && folder.about_it().is_ok_and(is_old) {
            let (parent, name) = resolve(root, path)?;
            // This fails if a file was just created in it.
            let _ = parent.remove_folder(name);
        }
        Ok(())
    }

    /// Looks at what `path` leads to, which is in `folder`.
    fn look(
        &mut self,
        directory: &Directory,
        ages: Ages,
        folder: &Folder,
        path: &Path,
        kind: FileType,
        swept: &mut Swept,
    ) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return };
        if is_a_folder(folder, name, kind) {
            if is_folder(name) {
                self.pending.push(path.to_owned());
            }
        } else if is_temporary(name) {
            if is_older(folder, name, ages.now, ages.orphan_age) && folder.remove(name).is_ok() {
                swept.orphans += 1;
            }
        } else if layout::key_of(path, directory.is_sharded).is_some()
            && let Ok(about) = folder.about(name)
            && FileType::from_raw_mode(about.st_mode) == FileType::RegularFile
        {
            let bytes = about.st_size as u64;
            let is_later = || head(folder, name).is_some_and(|head| directory.sealing.is_later(&head));
            // Only whole files get a name. This one lost a part later, and every load of it is a miss.
            let is_broken = !is_object_length(bytes) && !is_later();
            if (ages.are_over(touched_at(&about)) || is_broken) && folder.remove(name).is_ok() {
                swept.expired_blocks += 1;
                swept.expired_bytes += bytes;
            } else {
                (self.found_bytes, self.found_blocks) = (self.found_bytes + bytes, self.found_blocks + 1);
            }
        }
    }
}

/// Whether the file of that name was written last longer ago than `age`.
pub(super) fn is_older(folder: &Folder, name: &str, now: Duration, age: Duration) -> bool {
    folder.about(name).is_ok_and(|about| now.saturating_sub(touched_at(&about)) > age)
}

/// Whether the entry is a folder. Not every filesystem lists the kinds of its entries.
pub(super) fn is_a_folder(folder: &Folder, name: &str, listed: FileType) -> bool {
    let kind = match listed {
        FileType::Unknown => folder.about(name).map_or(listed, |about| FileType::from_raw_mode(about.st_mode)),
        listed => listed,
    };
    kind == FileType::Directory
}
