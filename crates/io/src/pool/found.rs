//! Finds the pool in a directory before it is opened.
//!
//! Invariants: the search takes the table's lock and changes nothing else. A pool is readable only if all its files
//! exist, are long enough, and belong to the same pool. Files of a pool's names that no pool made are never touched.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, Result};

use super::directory::{DATA_NAME, Directory, in_use, remove_if_there, replaced_name};
use super::files::{ALL_LOCK_BYTES, BIRTH_NAME, Files, GENERATION_NAME, NAMESPACE_NAME, PURGE_NAME, TABLE_NAME};
use super::format::*;
use super::geometry::Geometry;
use super::lock;
use crate::trust;

/// The byte of `table` that the daemon locks.
const DAEMON_LOCK_BYTE: Range<u64> = 0..1;

/// The files of a pool, usable or not.
pub(super) struct Found {
    pub home: PathBuf,
    /// Locked. Absent if only other files were left.
    pub table: Option<File>,
    pub data: Option<(PathBuf, File)>,
    /// The header and the other files, or why they cannot be used.
    pub content: Result<(Header, Files), String>,
    /// Whether workers map the data.
    pub is_attached: bool,
}

/// Looks for a pool in all directories where it may be. Errors if another daemon serves it, if it cannot be read, or if
/// a file there is of somebody else.
pub(super) fn look(directory: &Directory) -> Result<Option<Found>> {
    let cannot = |path: &Path, error: io::Error| {
        // A file that is not believed says itself what to do.
        let has_hint = error.get_ref().is_some();
        let error =
            Error::new(ErrorKind::Io, "cannot read the existing pool").with("path", path.display()).source(error);
        match has_hint {
            true => error,
            false => error.hint("run the daemon as the user that made the pool, or set another `pool.directory`"),
        }
    };
    let cannot_here = |error| cannot(directory.path(), error);
    let data = first_of(directory.data_places().map_err(cannot_here)?).map_err(|(path, error)| cannot(&path, error))?;
    let tables = directory.homes().map_err(cannot_here)?.into_iter().map(|home| home.join(TABLE_NAME));
    let table = first_of(tables).map_err(|(path, error)| cannot(&path, error))?;
    let is_attached = match &data {
        Some((path, file)) => lock::is_locked(file, ALL_LOCK_BYTES).map_err(|error| cannot(path, error))?,
        None => false,
    };
    refuse_foreign_files(directory).map_err(cannot_here)??;
    let Some((path, table)) = table else {
        let content = Err("its table is gone".to_owned());
        let home = directory.path().to_owned();
        return Ok(data.map(|data| Found { home, table: None, data: Some(data), content, is_attached }));
    };
    let home = path.parent().expect("a table has a directory").to_owned();
    if !lock_table(&table).map_err(|error| cannot(&path, error))? {
        return Err(in_use(&home));
    }
    // A file of another owner is reported to the operator. It is no reason to create the pool again.
    for path in [GENERATION_NAME, BIRTH_NAME, NAMESPACE_NAME, PURGE_NAME].map(|name| home.join(name)) {
        match open_read_write(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cannot(&path, error)),
            Ok(_) | Err(_) => {}
        }
    }
    let content = read_header(&table).and_then(|header| {
        let data = data.as_ref().ok_or("its data file is gone")?;
        check_length(TABLE_NAME, &table, table_bytes(&header.geometry))?;
        Ok((header, open_files(&home, &data.1, &header)?))
    });
    Ok(Some(Found { home, table: Some(table), data, content, is_attached }))
}

/// The names of a pool's files are common words, and an operator may name any directory. So a file that would be
/// replaced must be a pool's: the table is made first and removed last, and it or `generation` says whose it is. So
/// does `purge`, which stays where a pool is replaced.
fn refuse_foreign_files(directory: &Directory) -> io::Result<Result<()>> {
    let homes = directory.homes()?;
    let begins = |name: &str, magic: [u8; 8]| {
        homes.iter().filter_map(|home| open_read_write(&home.join(name)).ok()).any(|file| {
            let mut head = [0; 8];
            file.read_exact_at(&mut head, 0).is_ok() && head == magic
        })
    };
    let marks = [(TABLE_NAME, TABLE_MAGIC), (GENERATION_NAME, GENERATION_MAGIC), (PURGE_NAME, PURGE_MAGIC)];
    if marks.into_iter().any(|(name, magic)| begins(name, magic)) {
        return Ok(Ok(()));
    }
    let names = [TABLE_NAME, GENERATION_NAME, DATA_NAME, BIRTH_NAME, NAMESPACE_NAME, PURGE_NAME];
    let mut paths = homes.iter().flat_map(|home| names.map(|name| home.join(name)));
    // Nothing is lost with an empty file, and a daemon that was killed at the right moment leaves an empty table.
    let Some(path) = paths.find(|path| fs::symlink_metadata(path).is_ok_and(|file| !file.is_file() || file.len() > 0))
    else {
        return Ok(Ok(()));
    };
    Ok(Err(Error::invalid("the directory is not a pool's: it has a file that Forebay did not make")
        .with("path", path.display())
        .hint("name another directory, or move the file away; a directory for a pool may be missing or empty")))
}

pub(super) fn lock_table(table: &File) -> io::Result<bool> {
    lock::try_lock(table, DAEMON_LOCK_BYTE)
}

/// Data files of earlier replaced pools that workers still map. Those that nobody maps are removed.
pub(super) fn replaced_data(directory: &Directory) -> io::Result<Vec<(PathBuf, File)>> {
    let mut still_mapped = Vec::new();
    for path in directory.data_places()?.iter().map(|place| replaced_name(place)) {
        match open_read_write(&path) {
            Ok(file) if lock::is_locked(&file, ALL_LOCK_BYTES)? => still_mapped.push((path, file)),
            Ok(_) => remove_if_there(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(still_mapped)
}

fn first_of(paths: impl IntoIterator<Item = PathBuf>) -> Result<Option<(PathBuf, File)>, (PathBuf, io::Error)> {
    for path in paths {
        match open_read_write(&path) {
            Ok(file) => return Ok(Some((path, file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err((path, error)),
        }
    }
    Ok(None)
}

fn open_read_write(path: &Path) -> io::Result<File> {
    trust::open(path, File::options().read(true).write(true))
}

fn read_header(table: &File) -> Result<Header, String> {
    let mut bytes = [0; HEADER_HEAD_BYTES];
    table.read_exact_at(&mut bytes, 0).map_err(|_| "its table is too short".to_owned())?;
    Header::decode(&bytes)
}

fn open_files(home: &Path, data: &File, header: &Header) -> Result<Files, String> {
    let open = |name: &str, bytes: u64| {
        let file = open_read_write(&home.join(name)).map_err(|error| format!("its `{name}` file is gone: {error}"))?;
        check_length(name, &file, bytes)?;
        Ok::<File, String>(file)
    };
    let geometry: &Geometry = &header.geometry;
    let generation = open(GENERATION_NAME, generation_bytes(geometry))?;
    let mut head = [0; 32];
    generation.read_exact_at(&mut head, 0).map_err(|error| error.to_string())?;
    match decode_generation_header(&head) {
        Some((id, false)) if id == header.id => {}
        Some((id, true)) if id == header.id => return Err("it was discarded before".to_owned()),
        _ => return Err("its `generation` file is of another pool".to_owned()),
    }
    let birth = open(BIRTH_NAME, birth_bytes(geometry))?;
    let namespaces = open(NAMESPACE_NAME, u64::from(NAMESPACES) * NAMESPACE_BYTES)?;
    check_length("data", data, geometry.data_bytes())?;
    let data = data.try_clone().map_err(|error| error.to_string())?;
    Ok(Files { generation, data, birth, namespaces })
}

/// A longer file is fine: a daemon may have died while it grew the pool.
fn check_length(name: &str, file: &File, bytes: u64) -> Result<(), String> {
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    if len < bytes {
        return Err(format!("its `{name}` file has {len} bytes, not {bytes}"));
    }
    Ok(())
}

/// The purges that have not ended. An earlier build made no such file. It stays where a pool is replaced: the disks
/// keep their blocks.
pub(super) fn purge_file(home: &Path) -> io::Result<File> {
    let path = home.join(PURGE_NAME);
    let file = match open_read_write(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?
        }
        opened => opened?,
    };
    let mut head = [0; PURGE_HEAD.len()];
    let is_read = file.read_exact_at(&mut head, 0).is_ok();
    if !is_read || head != PURGE_HEAD {
        if is_read && head != [0; PURGE_HEAD.len()] {
            let hint = "purge again what was being purged";
            tracing::warn!(path = %path.display(), hint, "the list of purges cannot be read; it begins anew");
        }
        file.set_len(0)?;
        file.set_len(PURGE_FILE_BYTES)?;
        file.write_all_at(&PURGE_HEAD, 0)?;
    } else if file.metadata()?.len() < PURGE_FILE_BYTES {
        file.set_len(PURGE_FILE_BYTES)?;
    }
    Ok(file)
}

/// A pool that is replaced by one in another directory leaves its purges to it: called before the old one is removed.
pub(super) fn carry_purges(old_home: &Path, home: &Path) -> io::Result<()> {
    if old_home == home {
        return Ok(());
    }
    let old = match open_read_write(&old_home.join(PURGE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut bytes = vec![0; PURGE_FILE_BYTES as usize];
    match old.read_exact_at(&mut bytes, 0) {
        // It is not whole, so nothing is in it.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        read => read.and_then(|()| purge_file(home)?.write_all_at(&bytes, 0)),
    }
}

/// Marks workers' view of the pool in `home` as retired, whatever its version.
pub(super) fn retire_in(home: &Path) -> io::Result<()> {
    let generation = match open_read_write(&home.join(GENERATION_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut magic = [0; 8];
    match generation.read_exact_at(&mut magic, 0) {
        Ok(()) if magic == GENERATION_MAGIC => generation.write_all_at(&1u32.to_le_bytes(), RETIRED_WORD as u64 * 4),
        _ => Ok(()),
    }
}

/// Removes a pool's files. If workers map its data, the data file is kept under another name, so that a later daemon
/// also knows that its memory is not free yet. A retired pool is no longer valid, so an interruption at any point is
/// safe. The table is removed last, because its lock covers the rest.
pub(super) fn discard(found: &Found) -> io::Result<()> {
    retire_in(&found.home)?;
    for name in [GENERATION_NAME, BIRTH_NAME, NAMESPACE_NAME] {
        remove_if_there(&found.home.join(name))?;
    }
    if let Some((path, _)) = &found.data {
        match found.is_attached {
            true => fs::rename(path, replaced_name(path))?,
            false => remove_if_there(path)?,
        }
    }
    remove_if_there(&found.home.join(TABLE_NAME))
}
