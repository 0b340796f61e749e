//! Finds the pool in a directory before it is opened.
//!
//! Invariants: the search takes the table's lock and changes nothing else. A pool is readable only if all its files
//! exist, are long enough, and belong to the same pool. Files of a pool's names that no pool made (`ours`) are never
//! touched.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_core::Result;
use rustix::fs::FallocateFlags;

use super::directory::{Directory, in_use, remove_if_there};
use super::files::{
    ALL_LOCK_BYTES, BIRTH_NAME, Files, GENERATION_NAME, NAMESPACE_NAME, PURGE_NAME, TABLE_NAME, replaced_name,
};
use super::format::*;
use super::geometry::Geometry;
use super::{lock, ours};

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
    let homes = directory.homes()?;
    homes.iter().try_for_each(|home| ours::check(home))?;
    let cannot = |(path, error): (PathBuf, io::Error)| ours::unreadable(&path, error);
    let data = first_of(directory.data_places()?).map_err(cannot)?;
    let table = first_of(homes.iter().map(|home| home.join(TABLE_NAME))).map_err(cannot)?;
    let is_attached = match &data {
        Some((path, file)) => lock::is_locked(file, ALL_LOCK_BYTES).map_err(|error| ours::unreadable(path, error))?,
        None => false,
    };
    let Some((path, table)) = table else {
        let content = Err("its table is gone".to_owned());
        let beside = |data: &(PathBuf, File)| homes.iter().find(|home| data.0.starts_with(home)).cloned();
        return Ok(data.map(|data| {
            let home = beside(&data).unwrap_or_else(|| directory.path().to_owned());
            Found { home, table: None, data: Some(data), content, is_attached }
        }));
    };
    let home = path.parent().expect("a table has a directory").to_owned();
    if !lock_table(&table).map_err(|error| ours::unreadable(&path, error))? {
        return Err(in_use(&home));
    }
    let content = read_header(&table).and_then(|header| {
        let data = data.as_ref().ok_or("its data file is gone")?;
        check_length(TABLE_NAME, &table, table_bytes(&header.geometry))?;
        Ok((header, open_files(&home, &data.1, &header)?))
    });
    Ok(Some(Found { home, table: Some(table), data, content, is_attached }))
}

pub(super) fn lock_table(table: &File) -> io::Result<bool> {
    lock::try_lock(table, DAEMON_LOCK_BYTE)
}

/// Data files of earlier replaced pools that workers still map. Those that nobody maps are removed.
pub(super) fn replaced_data(directory: &Directory) -> Result<Vec<(PathBuf, File)>> {
    let mut still_mapped = Vec::new();
    for path in directory.data_places()?.iter().map(|place| replaced_name(place)) {
        let mut visit = || match ours::open(&path) {
            Ok(file) if lock::is_locked(&file, ALL_LOCK_BYTES)? => {
                still_mapped.push((path.clone(), file));
                Ok(())
            }
            Ok(_) => remove_if_there(&path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        visit().map_err(|error| ours::unreadable(&path, error))?;
    }
    Ok(still_mapped)
}

/// Whether workers still map a pool that was replaced.
pub(super) fn is_crowded(directory: &Directory) -> Result<bool> {
    for path in directory.data_places()?.iter().map(|place| replaced_name(place)) {
        let is_mapped = ours::open(&path).and_then(|file| lock::is_locked(&file, ALL_LOCK_BYTES));
        match is_mapped {
            Ok(false) => {}
            Ok(true) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(ours::unreadable(&path, error)),
        }
    }
    Ok(false)
}

fn first_of(paths: impl IntoIterator<Item = PathBuf>) -> Result<Option<(PathBuf, File)>, (PathBuf, io::Error)> {
    for path in paths {
        match ours::open(&path) {
            Ok(file) => return Ok(Some((path, file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err((path, error)),
        }
    }
    Ok(None)
}

fn read_header(table: &File) -> Result<Header, String> {
    let mut bytes = [0; HEADER_HEAD_BYTES];
    table.read_exact_at(&mut bytes, 0).map_err(|_| "its table is too short".to_owned())?;
    Header::decode(&bytes)
}

fn open_files(home: &Path, data: &File, header: &Header) -> Result<Files, String> {
    let open = |name: &str, bytes: u64| {
        let file = ours::open(&home.join(name)).map_err(|error| format!("its `{name}` file is gone: {error}"))?;
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

/// The list of purges. Earlier builds made no such file, or a shorter one. It stays where a pool is replaced: the
/// disks keep their blocks.
pub(super) fn purge_file(home: &Path) -> io::Result<File> {
    let path = home.join(PURGE_NAME);
    let file = match ours::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?
        }
        opened => opened?,
    };
    let mut head = [0; PURGE_HEAD.len()];
    let is_read = file.read_exact_at(&mut head, 0).is_ok();
    if !is_read || head != PURGE_HEAD {
        if is_read && head != [0; PURGE_HEAD.len()] {
            let hint = "purge again what was being purged, and what was purged while a disk was away";
            tracing::warn!(path = %path.display(), hint, "the list of purges cannot be read; it begins anew");
        }
        file.set_len(0)?;
        file.set_len(PURGE_FILE_BYTES)?;
        file.write_all_at(&PURGE_HEAD, 0)?;
    } else if file.metadata()?.len() < PURGE_FILE_BYTES {
        file.set_len(PURGE_FILE_BYTES)?;
    }
    // What is to be remembered later finds its room, also on a filesystem that is full by then.
    if let Err(error) = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PURGE_FILE_BYTES) {
        let error = io::Error::from(error);
        tracing::warn!(path = %path.display(), %error, "no room is kept for purges; a full filesystem will refuse them");
    }
    Ok(file)
}

/// A pool that is replaced by one in another directory leaves its purges to it: called before the old one is removed.
pub(super) fn carry_purges(old_home: &Path, home: &Path) -> io::Result<()> {
    if old_home == home {
        return Ok(());
    }
    let old = match ours::open(&old_home.join(PURGE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let length = old.metadata()?.len().min(PURGE_FILE_BYTES);
    if length < PENDING_BYTES {
        // It is not whole, so nothing is in it.
        return Ok(());
    }
    let mut bytes = vec![0; PURGE_FILE_BYTES as usize];
    old.read_exact_at(&mut bytes[..length as usize], 0)?;
    purge_file(home)?.write_all_at(&bytes, 0)
}

/// Marks workers' view of the pool in `home` as retired, whatever its version.
pub(super) fn retire_in(home: &Path) -> io::Result<()> {
    let generation = match ours::open(&home.join(GENERATION_NAME)) {
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
/// also knows that its memory is not free yet; the generations stay beside it and show that a pool made it. A retired
/// pool is no longer valid, so an interruption at any point is safe. The table is removed last, because its lock covers
/// the rest.
pub(super) fn discard(found: &Found) -> io::Result<()> {
    retire_in(&found.home)?;
    let names = [BIRTH_NAME, NAMESPACE_NAME].into_iter().chain((!found.is_attached).then_some(GENERATION_NAME));
    for name in names {
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

/// Removes all files of a pool's names, wherever they are: [`look`] has seen that a pool made each, and that nobody
/// maps them. Returns whether there was one.
pub(super) fn clear(directory: &Directory) -> Result<bool> {
    let homes = directory.homes()?;
    let beside = |names: &'static [&str]| homes.iter().flat_map(move |home| names.iter().map(|name| home.join(name)));
    // The table last, as it tells what the others are.
    let paths = beside(&[BIRTH_NAME, NAMESPACE_NAME, PURGE_NAME]).chain(directory.data_places()?);
    let mut was_there = false;
    for path in paths.chain(beside(&[GENERATION_NAME, TABLE_NAME])) {
        was_there |= path.exists();
        remove_if_there(&path).map_err(|error| ours::unreadable(&path, error))?;
    }
    Ok(was_there)
}
