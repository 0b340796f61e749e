//! The disks that the daemons on a pool have had, by their paths. One that is not there is missing, and not new.
//!
//! Invariants: a disk is in the file before the first block is on the disk. The file is replaced as a whole. It is
//! beside the pool and outlives it: a pool that is replaced, or another boot of the host, changes no disk.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_core::{Error, ErrorKind, Result};

use crate::pool::DISKS_NAME;
use crate::trust;

/// See the module documentation.
#[derive(Default)]
pub struct Known {
    /// The pool's directory.
    directory: PathBuf,
    disks: Mutex<Disks>,
}

#[derive(Default)]
struct Disks {
    /// None where no daemon has had a disk, as far as this pool tells.
    paths: Option<BTreeSet<PathBuf>>,
    /// Whether the file does not have them all.
    is_changed: bool,
}

impl Known {
    /// Reads the file in the pool's directory, if there is one.
    pub fn read(directory: &Path) -> Result<Known> {
        let path = directory.join(DISKS_NAME);
        let mut bytes = Vec::new();
        let paths = match trust::open(&path, File::options().read(true)) {
            Ok(mut file) => {
                file.read_to_end(&mut bytes).map_err(|error| cannot("read", &path, error))?;
                let names = bytes.split(|byte| *byte == 0).filter(|name| !name.is_empty());
                Some(names.map(|name| PathBuf::from(OsStr::from_bytes(name))).collect())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(cannot("read", &path, error)),
        };
        Ok(Known { directory: directory.to_owned(), disks: Mutex::new(Disks { paths, is_changed: false }) })
    }

    /// Whether nothing is known: a first start, or a pool that was lost.
    pub fn is_nothing(&self) -> bool {
        self.lock().paths.is_none()
    }

    /// Whether a daemon on this pool has had the disk.
    pub fn has(&self, path: &Path) -> bool {
        self.lock().paths.as_ref().is_some_and(|paths| paths.contains(path))
    }

    /// From the next [`Known::keep`] on.
    pub fn add(&self, path: &Path) {
        let mut disks = self.lock();
        disks.is_changed |= disks.paths.get_or_insert_default().insert(path.to_owned());
    }

    /// Writes the file if it does not have all disks. The directory must be there, and this daemon's.
    pub fn keep(&self) -> Result<()> {
        let mut disks = self.lock();
        if disks.is_changed {
            let path = self.directory.join(DISKS_NAME);
            let names: Vec<&[u8]> = disks.paths.iter().flatten().map(|path| path.as_os_str().as_bytes()).collect();
            replace(&path, &names.join(&0)).map_err(|error| cannot("write", &path, error))?;
            disks.is_changed = false;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Disks> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = trust::open(&new, File::options().write(true).create(true).truncate(true).mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

fn cannot(what: &str, path: &Path, error: io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot {what} the list of a pool's disks"))
        .with("path", path.display())
        .source(error)
        .hint("let the daemon's user read and write the files in `pool.directory`, and see that there is space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_known_to_the_next_daemon_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let read = || Known::read(directory.path()).unwrap();
        let [first, second] = ["/mnt/a b\n/disk", "/mnt/c/disk"].map(Path::new);
        let known = read();
        assert!(known.is_nothing() && !known.has(first));
        known.keep().unwrap();
        assert!(read().is_nothing(), "there is nothing to keep");
        known.add(first);
        assert!(known.has(first) && read().is_nothing());
        known.keep().unwrap();
        known.add(second);
        let next = read();
        assert!(!next.is_nothing() && next.has(first) && !next.has(second));
        known.keep().unwrap();
        assert!(read().has(first) && read().has(second));
        let names: Vec<_> = directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [DISKS_NAME]);
    }
}
