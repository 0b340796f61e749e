//! Opening a pool: find what is there, decide, act.
//!
//! Invariants: the decision depends only on what was found and configured (`plan`). A pool that workers map never
//! changes its shape and is never truncated. Nothing is created before there is space for it. A pool whose creation
//! or removal was interrupted is recognised and created again.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_core::size::human;
use forebay_core::{Error, ErrorKind, Generation, Result};

use super::config::{HugePages, PoolConfig};
use super::directory::{Directory, MOUNT_SOURCE, is_empty, remove_if_there};
use super::files::{BIRTH_NAME, FILE_MODE, Files, GENERATION_NAME, NAMESPACE_NAME, PURGE_NAME, TABLE_NAME, held_bytes};
use super::format::*;
use super::found::{self, Found};
use super::geometry::Geometry;
use super::owner::Pool;
use super::room::Room;
use super::site::{self, Site};

/// A pool, and how it was opened.
pub struct Opened {
    /// The pool, mapped; its units have no memory before [`Pool::populate_unit`].
    pub pool: Pool,
    /// What became of the files in the directory.
    pub outcome: Outcome,
}

/// What opening found, and what it did with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// There was no pool.
    Created,
    /// A pool of an earlier daemon, as that daemon left it; perhaps with more units at the end.
    Recovered {
        /// How often the pool was opened before.
        previous_epoch: u32,
        /// Units that were added at the end, because more capacity is configured now.
        grown_by_units: u32,
    },
    /// The old pool could not be used. It is gone, and this is a new one.
    Replaced {
        /// What was wrong with the old one, for the operator.
        reason: String,
    },
}

impl Pool {
    /// Opens the pool in the directory, or makes it; see [`Outcome`]. Costs milliseconds whatever the
    /// pool's size: memory is taken by [`Pool::populate_unit`].
    pub fn open(config: &PoolConfig) -> Result<Opened> {
        let directory = Directory::claim(&config.directory)?;
        let is_unmounted = matches!(directory.private_mount(), Ok(None));
        Pool::open_in(directory.clone(), config).inspect_err(|_| take_back(&directory, is_unmounted))
    }

    /// Errors as [`Pool::open`] would: somebody uses the pool, workers map one of another shape, or there is no room.
    /// Otherwise, why the pool that is there would be replaced, if it would be. Takes the pool's lock for a moment, and
    /// changes nothing. A directory that does not exist is not made.
    pub fn check(config: &PoolConfig) -> Result<Option<String>> {
        if !config.directory.exists() {
            let home = config.directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
            return check_room(home, &Geometry::new(config.capacity_bytes, config.unit_bytes)?, 0).map(|()| None);
        }
        let directory = Directory::claim(&config.directory)?;
        let found = found::look(&directory)?;
        let is_crowded = found::is_crowded(&directory)?;
        let summary = found.as_ref().map(|found| found.summary(is_crowded));
        match (plan(summary, config)?, found) {
            (Plan::Keep(geometry), Some(found)) => check_growth(&found, &geometry).map(|()| None),
            (Plan::Make { geometry, reason }, found) => {
                let freed_bytes = found.as_ref().and_then(|found| found.data.as_ref());
                let freed_bytes = freed_bytes.map_or(0, |(_, data)| held_bytes(data));
                check_room(
                    found.as_ref().map_or(directory.path(), |found| found.home.as_path()),
                    &geometry,
                    freed_bytes,
                )
                .map(|()| reason)
            }
            (Plan::Keep(_), None) => unreachable!("there is nothing to keep"),
        }
    }

    fn open_in(directory: Directory, config: &PoolConfig) -> Result<Opened> {
        let found = found::look(&directory)?;
        let replaced = found::replaced_data(&directory)?;
        let summary = found.as_ref().map(|found| found.summary(!replaced.is_empty()));
        match (plan(summary, config)?, found) {
            (Plan::Keep(geometry), Some(found)) => recover(directory, found, geometry, replaced),
            (Plan::Make { geometry, reason }, found) => make(directory, config, geometry, reason, found),
            (Plan::Keep(_), None) => unreachable!("there is nothing to keep"),
        }
    }
}

/// Removes what a start made that was refused, and nothing that was there before.
fn take_back(directory: &Directory, was_unmounted: bool) {
    // The start failed and says why; whatever fails here leaves something that the next start or `remove` finds.
    if directory.is_new() {
        let _ = found::clear(directory);
    }
    if was_unmounted {
        let _ = unmount_if_empty(directory);
    }
    directory.unmake();
}

/// Unmounts the private tmpfs if Forebay mounted it and nothing is left in it. Returns whether it did.
fn unmount_if_empty(directory: &Directory) -> Result<bool> {
    let point = directory.mount_point();
    let cannot = |error| cannot_make("remove", directory, error);
    match directory.private_mount()? {
        Some(mount) if mount.source == MOUNT_SOURCE && is_empty(&point).map_err(cannot)? => {}
        _ => return Ok(false),
    }
    match site::unmount(directory) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            let what = "the pool is removed, but not its mount: a process has a file or a directory open there";
            Err(Error::new(ErrorKind::Unavailable, what)
                .with("path", point.display())
                .hint(format!("end that process (`fuser -vm {}` names it), and repeat the command", point.display())))
        }
        Err(error) => Err(cannot(error)),
    }
}

/// Removes the pool in `directory` and its private mount. False if there was none. Errors while a daemon serves it or
/// workers map it. Files that no pool made stay, and so does the mount if such files are in it.
pub fn remove(directory: &Path) -> Result<bool> {
    let in_use = |error: Error| match error.kind() {
        ErrorKind::Unavailable => {
            error.hint("stop that daemon, and repeat the command: only a pool that nobody uses is removed")
        }
        _ => error,
    };
    let directory = Directory::claim(directory).map_err(in_use)?;
    let found = found::look(&directory).map_err(in_use)?;
    let replaced = found::replaced_data(&directory)?;
    if found.as_ref().is_some_and(|found| found.is_attached) || !replaced.is_empty() {
        return Err(Error::new(ErrorKind::Unavailable, "cannot remove a pool that workers map")
            .hint("stop the engines, and repeat the command: only a pool that nobody uses is removed"));
    }
    if let Some(found) = &found {
        found::discard(found).map_err(|error| cannot_make("remove", &directory, error))?;
    }
    let had_rest = found::clear(&directory)?;
    let was_there = found.is_some() || had_rest;
    drop(found);
    Ok(unmount_if_empty(&directory)? || was_there)
}

/// The facts about the found pool that `plan` needs.
struct Summary {
    header: Result<Header, String>,
    is_attached: bool,
    /// Whether workers still map a pool that was replaced even earlier.
    is_crowded: bool,
}

impl Found {
    fn summary(&self, is_crowded: bool) -> Summary {
        let header = self.content.as_ref().map(|(header, _)| *header).map_err(String::clone);
        Summary { header, is_attached: self.is_attached, is_crowded }
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Plan {
    /// Continue with the existing pool, in this geometry.
    Keep(Geometry),
    /// Create a new one; `reason` says what was wrong with the old one, if there was one.
    Make { geometry: Geometry, reason: Option<String> },
}

fn plan(found: Option<Summary>, config: &PoolConfig) -> Result<Plan> {
    let fresh = || Geometry::new(config.capacity_bytes, config.unit_bytes);
    let Some(Summary { header, is_attached, is_crowded }) = found else {
        return Ok(Plan::Make { geometry: fresh()?, reason: None });
    };
    let header = match header {
        Ok(header) => header,
        Err(_) if is_attached && is_crowded => {
            return Err(still_attached("replace the pool a second time", config, None));
        }
        Err(reason) => return Ok(Plan::Make { geometry: fresh()?, reason: Some(reason) }),
    };
    let old = header.geometry;
    let wanted = Geometry::new(config.capacity_bytes, Some(config.unit_bytes.unwrap_or(old.unit_bytes)));
    let reason = match wanted {
        Ok(wanted) if wanted.unit_bytes != old.unit_bytes => {
            format!("its units have {}, but {} are configured", human(old.unit_bytes), human(wanted.unit_bytes))
        }
        Ok(wanted) if wanted.units >= old.units => match (config.huge_pages, header.backing) {
            (HugePages::Require, Backing::Small) => "it is on small pages, but huge pages are required".to_owned(),
            _ => return Ok(Plan::Keep(wanted)),
        },
        _ => format!("it has {}, but {} are configured", human(old.data_bytes()), human(config.capacity_bytes)),
    };
    if is_attached {
        return Err(still_attached("change the shape of the pool", config, Some(old)).with("reason", reason));
    }
    Ok(Plan::Make { geometry: fresh()?, reason: Some(reason) })
}

/// Whether there is room for the units that a pool gets in addition.
fn check_growth(found: &Found, geometry: &Geometry) -> Result<()> {
    let old_units = found.content.as_ref().map_or(0, |(header, _)| header.geometry.units);
    match u64::from(geometry.units - old_units) * geometry.unit_bytes {
        0 => Ok(()),
        added => Room::read(&found.home)?.check(added).map_err(|error| error.with("growing_by", human(added))),
    }
}

/// Whether there is room for a new pool on a filesystem in memory, where `freed_bytes` of an old one go.
fn check_room(home: &Path, geometry: &Geometry, freed_bytes: u64) -> Result<()> {
    // The small files take about one hundredth more.
    let needed_bytes = geometry.data_bytes() + geometry.data_bytes() / 64;
    Room::read(home)?.check(needed_bytes.saturating_sub(freed_bytes))
}

fn recover(directory: Directory, found: Found, geometry: Geometry, replaced: Vec<(PathBuf, File)>) -> Result<Opened> {
    check_growth(&found, &geometry)?;
    let (Ok((old, files)), Some(table), Some((data, _))) = (found.content, found.table, found.data) else {
        unreachable!("a readable pool has its files");
    };
    let grown_by_units = geometry.units - old.geometry.units;
    let header = Header { geometry, epoch: old.epoch.wrapping_add(1), ..old };
    // From here on a pool of an older version has this version: an older daemon would not see who holds which slots.
    // The write lies in one page, so a kill comes before it or after it.
    lengthen(&table, &files, &geometry)
        .and_then(|()| table.write_all_at(&header.encode(LIVE), 0))
        .map_err(|error| cannot_make("open", &directory, error))?;
    let site = Site { home: found.home, data, backing: old.backing, notes: Vec::new() };
    let pool = Pool::assemble(directory, site, header, table, files, replaced)?;
    tracing::info!(epoch = header.epoch, units = geometry.units, grown_by_units, backing = %old.backing, "pool recovered");
    Ok(Opened { pool, outcome: Outcome::Recovered { previous_epoch: old.epoch, grown_by_units } })
}

fn make(
    directory: Directory,
    config: &PoolConfig,
    geometry: Geometry,
    reason: Option<String>,
    found: Option<Found>,
) -> Result<Opened> {
    let old_data = found.as_ref().and_then(|found| found.data.as_ref());
    let is_reserved =
        matches!(found.as_ref().map(|found| &found.content), Some(Ok((old, _))) if old.backing == Backing::Hugetlbfs);
    let freed_bytes = old_data.map_or(0, |(_, data)| held_bytes(data));
    let site = site::choose(&directory, config.huge_pages, &geometry, if is_reserved { freed_bytes } else { 0 })?;
    if site.backing != Backing::Hugetlbfs {
        check_room(&site.home, &geometry, freed_bytes)?;
    }
    if let (Some(found), Some(reason)) = (&found, &reason) {
        tracing::warn!(%reason, attached = found.is_attached, path = %found.home.display(), "the pool is replaced; its blocks are lost");
        let cannot = |error| cannot_make("remove", &directory, error);
        found::carry_purges(&found.home, &site.home).map_err(cannot)?;
        found::discard(found).map_err(cannot)?;
        if found.home != site.home {
            remove_if_there(&found.home.join(PURGE_NAME)).map_err(cannot)?;
        }
    }
    drop(found);
    warn_of_small_pages(config, &site, &geometry);
    let header = Header {
        id: draw_id().map_err(|error| cannot_make("make", &directory, error))?,
        geometry,
        backing: site.backing,
        epoch: 1,
        ceiling: Generation(1),
    };
    let (table, files) = create_files(&site, &header).map_err(|error| cannot_make("make", &directory, error))?;
    let replaced = found::replaced_data(&directory)?;
    let pool = Pool::assemble(directory, site, header, table, files, replaced)?;
    tracing::info!(units = geometry.units, unit_bytes = geometry.unit_bytes, backing = %header.backing, "pool created");
    let outcome = reason.map_or(Outcome::Created, |reason| Outcome::Replaced { reason });
    Ok(Opened { pool, outcome })
}

/// The table is created first, marked as incomplete. It is marked as complete last.
pub(super) fn create_files(site: &Site, header: &Header) -> io::Result<(File, Files)> {
    let create = |path: &Path| -> io::Result<File> {
        remove_if_there(path)?;
        File::options().read(true).write(true).create_new(true).mode(FILE_MODE).open(path)
    };
    let table = create(&site.home.join(TABLE_NAME))?;
    if !found::lock_table(&table)? {
        return Err(io::Error::other("another daemon locked the new table"));
    }
    table.write_all_at(&header.encode(CREATING), 0)?;
    let files = Files {
        generation: create(&site.home.join(GENERATION_NAME))?,
        data: create(&site.data)?,
        birth: create(&site.home.join(BIRTH_NAME))?,
        namespaces: create(&site.home.join(NAMESPACE_NAME))?,
    };
    files.generation.write_all_at(&encode_generation_header(header.id), 0)?;
    files.namespaces.set_len(u64::from(NAMESPACES) * NAMESPACE_BYTES)?;
    lengthen(&table, &files, &header.geometry)?;
    table.write_all_at(&LIVE.to_le_bytes(), STATE_AT)?;
    Ok((table, files))
}

/// Extends the files to the length that `geometry` needs. They are sparse, and never made shorter.
fn lengthen(table: &File, files: &Files, geometry: &Geometry) -> io::Result<()> {
    let lengths = [
        (table, table_bytes(geometry)),
        (&files.generation, generation_bytes(geometry)),
        (&files.birth, birth_bytes(geometry)),
        (&files.data, geometry.data_bytes()),
    ];
    for (file, bytes) in lengths {
        if file.metadata()?.len() < bytes {
            file.set_len(bytes)?;
        }
    }
    Ok(())
}

fn draw_id() -> io::Result<u128> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

fn warn_of_small_pages(config: &PoolConfig, site: &Site, geometry: &Geometry) {
    if config.huge_pages == HugePages::Auto && site.backing == Backing::Small {
        // Eight bytes of page table per 4 KiB page.
        let table_bytes = human(geometry.data_bytes() / 512);
        let why = site.notes.join("; ");
        tracing::warn!(%why, "the pool is on 4 KiB pages: each process that maps it needs {table_bytes} of page tables");
    }
}

fn still_attached(what: &str, config: &PoolConfig, old: Option<Geometry>) -> Error {
    let keep = old.map_or(String::new(), |old| {
        format!(", or set `pool.capacity_bytes = {}` and `pool.unit_bytes = {}`", old.data_bytes(), old.unit_bytes)
    });
    Error::new(ErrorKind::Unavailable, format!("cannot {what} while workers map it"))
        .with("path", config.directory.display())
        .hint(format!("stop the engines first{keep}"))
}

fn cannot_make(what: &str, directory: &Directory, error: io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::FileTooLarge => {
            Some("raise the limit on the size of files (`ulimit -f unlimited`; `LimitFSIZE=` of a service)")
        }
        // Bytes were counted before, and a pool has few files.
        io::ErrorKind::StorageFull => Some(
            "the filesystem of the path has no room for another file: `df -i` counts its inodes, and \
             `mount -o remount,nr_inodes=…` raises their number on a tmpfs",
        ),
        _ => None,
    };
    let error = Error::new(ErrorKind::Io, format!("cannot {what} the pool"))
        .with("path", directory.path().display())
        .source(error);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capacity_bytes: u64, unit_bytes: Option<u64>, huge_pages: HugePages) -> PoolConfig {
        PoolConfig { directory: "/pool".into(), capacity_bytes, unit_bytes, huge_pages }
    }

    fn header(capacity_bytes: u64, backing: Backing) -> Result<Header, String> {
        Ok(Header {
            id: 1,
            geometry: Geometry::new(capacity_bytes, Some(4 << 20)).unwrap(),
            backing,
            epoch: 3,
            ceiling: Generation(70_000),
        })
    }

    #[derive(Debug, PartialEq)]
    enum Expected {
        Keep(u32),
        Make(u32),
        Refuse,
    }
    use Expected::*;

    #[test]
    fn what_is_done_with_an_old_pool_depends_on_shape_and_on_who_maps_it() {
        const MIB: u64 = 1 << 20;
        let auto = |mib: u64, unit: Option<u64>| config(mib * MIB, unit, HugePages::Auto);
        let old = || header(64 * MIB, Backing::Small);
        let unreadable = || Err("its table has version 9".to_owned());
        // (old pool, configuration, decision with no worker attached, decision with one attached)
        let cases = [
            (old(), auto(64, None), Keep(16), Keep(16)),
            (old(), auto(67, None), Keep(16), Keep(16)),
            (old(), auto(64, Some(4 * MIB)), Keep(16), Keep(16)),
            (old(), auto(1024, None), Keep(256), Keep(256)),
            (old(), auto(60, None), Make(30), Refuse),
            (old(), auto(2, None), Make(1), Refuse),
            (old(), auto(64, Some(2 * MIB)), Make(32), Refuse),
            (old(), auto(128, Some(2 * MIB)), Make(64), Refuse),
            (old(), config(64 * MIB, None, HugePages::Off), Keep(16), Keep(16)),
            (old(), config(64 * MIB, None, HugePages::Require), Make(16), Refuse),
            (header(64 * MIB, Backing::Advised), config(64 * MIB, None, HugePages::Require), Keep(16), Keep(16)),
            (unreadable(), auto(64, None), Make(16), Make(16)),
        ];
        for (header, config, alone, attached) in cases {
            for (is_attached, expected) in [(false, alone), (true, attached)] {
                let summary = Summary { header: header.clone(), is_attached, is_crowded: false };
                let outcome = match plan(Some(summary), &config) {
                    Ok(Plan::Keep(geometry)) => Keep(geometry.units),
                    Ok(Plan::Make { geometry, reason: Some(_) }) => Make(geometry.units),
                    Ok(plan) => panic!("{plan:?} has no reason"),
                    Err(error) => {
                        assert!(error.hint_text().unwrap().contains("stop the engines"), "{error}");
                        Refuse
                    }
                };
                assert_eq!(outcome, expected, "{header:?} {config:?} attached: {is_attached}");
            }
        }
        let crowded = Summary { header: unreadable(), is_attached: true, is_crowded: true };
        assert!(plan(Some(crowded), &auto(64, None)).is_err());
        assert_eq!(
            plan(None, &auto(64, None)).unwrap(),
            Plan::Make { geometry: Geometry::new(64 * MIB, None).unwrap(), reason: None }
        );
    }

    #[test]
    fn a_filesystem_without_inodes_is_told_with_what_gives_it_more() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = Directory::claim(&place.path().join("pool")).unwrap();
        let error = cannot_make("make", &directory, io::Error::from(io::ErrorKind::StorageFull));
        assert!(error.hint_text().is_some_and(|hint| hint.contains("nr_inodes")), "{error}");
    }

    #[test]
    fn a_header_with_any_bit_flipped_is_not_believed() {
        let header = header(64 << 20, Backing::Collapsed).unwrap();
        let mut bytes = header.encode(LIVE);
        assert_eq!(Header::decode(&bytes), Ok(header));
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
