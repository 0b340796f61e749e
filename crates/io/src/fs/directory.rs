//! One open shared directory: what it is, who may do what in it, and how files get their names.
//!
//! Invariants: nothing is written into a directory that holds foreign content. A name is given only to a whole file,
//! and to one file only. Folders and files get the permissions of the directory itself, whatever this process's umask
//! is, so `chmod` on the directory alone decides who may use it. But all users may never write to them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_core::size::human_at_most;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use super::config::{FsConfig, Fsync};
use super::folder::Folder;
use super::grants::Grants;
use super::ground::Ground;
use super::layout::{self, MARKER, OWN_FOLDER, USAGE};
use crate::header::Sealing;
use crate::seldom::Seldom;

const TITLE: &str = "forebay directory 1";
/// Entries that filesystems keep in an otherwise empty directory.
const NOT_CONTENT: [&str; 3] = ["lost+found", ".snapshot", OWN_FOLDER];
const OPEN_TO_ALL: &str = "let a group share it: `chgrp GROUP`, `chmod 2770`";
const NFS_MAGIC: i128 = 0x6969;
/// Longer than any control file.
const MAX_CONTROL_BYTES: u64 = 4096;

/// See the module documentation.
pub(super) struct Directory {
    pub path: PathBuf,
    pub id: u128,
    pub is_sharded: bool,
    /// Whether the configuration says that nothing is written here.
    pub is_read_only: bool,
    pub grants: Grants,
    pub fsync: Fsync,
    pub sealing: Sealing,
    /// Loads that read an object damaged, and differently the second time.
    pub misreads: AtomicU64,
    /// Warnings of damaged objects. After a change of the secret, each object of before is one.
    pub damaged: Seldom,
    /// Why the last store was refused, as the system numbers errors; 0 where [`Directory::last_refusal`] has none.
    last_refusal: AtomicI32,
    /// Device, inode and time of the marker when the directory was last seen to be this one.
    marker_seen: Mutex<Option<[i128; 4]>>,
    /// This host and process.
    pub writer: String,
    pub ground: Option<Ground>,
    is_direct: bool,
    is_open_to_all: bool,
    folder_mode: Mode,
    file_mode: Mode,
}

impl Directory {
    /// Examines the directory, creates its marker if it is empty, and tries the operations that it will need. Blocks
    /// as long as the mount does.
    pub fn open(path: &Path, config: &FsConfig) -> Result<Directory> {
        Directory::open_unless(path, config, |_| None)
    }

    /// Opens what is now where a directory was that stood on `ground`. The mount point of a missing mount stays empty.
    pub fn open_again(path: &Path, config: &FsConfig, ground: Option<&Ground>) -> Result<Directory> {
        let refusal = |directory: &Directory| {
            let is_still_mounted = ground.is_some_and(Ground::is_still_mounted);
            let what = "the directory is not initialised, and may be the mount point of a missing mount";
            let refusal = Error::new(ErrorKind::NotFound, what).with("path", directory.path.display());
            let refusal = refusal.hint("mount it, or restart the daemon to use the empty directory");
            (!is_still_mounted).then_some(refusal)
        };
        Directory::open_unless(path, config, refusal)
    }

    /// `refusal` is asked before an empty directory is made one of ours.
    fn open_unless(
        path: &Path,
        config: &FsConfig,
        refusal: impl FnOnce(&Directory) -> Option<Error>,
    ) -> Result<Directory> {
        let (mut directory, marker) = Directory::find(path, config)?;
        let marker = match marker {
            Some(marker) => marker,
            None => match refusal(&directory) {
                Some(error) => return Err(error),
                None => directory.make(config)?,
            },
        };
        directory.id = marker.id;
        directory.agrees(&marker, config)?;
        directory.try_out()?;
        if directory.is_open_to_all {
            tracing::warn!(path = %path.display(), hint = OPEN_TO_ALL, "all users may write to the shared directory");
        }
        Ok(directory)
    }

    /// What opening it would result in: a finding, or what to change. Changes nothing. Blocks as long as the mount
    /// does.
    pub fn examine(path: &Path, config: &FsConfig) -> Result<String> {
        let (directory, marker) = Directory::find(path, config)?;
        let what = match &marker {
            Some(marker) => {
                directory.agrees(marker, config)?;
                "holds blocks"
            }
            None if directory.is_empty_for_us()? => "is empty",
            None => "holds blocks, lacks `.forebay` (a daemon makes it again)",
        };
        let shown = path.display();
        if directory.is_read_only {
            return Ok(format!("`{shown}` is there, and is only read"));
        }
        let may_write =
            rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS);
        may_write.map_err(|error| {
            directory
                .failed("this user may not write to the directory", error.into())
                .hint("give this user the right to write there, or set `tier.fs.read_only`")
        })?;
        let unknown = |error: Errno| directory.failed("cannot ask for free space", error.into());
        let (free_bytes, volume_bytes) =
            (directory.free_bytes().map_err(unknown)?, directory.volume_bytes().map_err(unknown)?);
        let open = if directory.is_open_to_all {
            format!("; all users may write to it: {OPEN_TO_ALL}")
        } else {
            String::new()
        };
        let beyond = match config.capacity_bytes {
            Some(capacity_bytes) if capacity_bytes > volume_bytes => format!(
                "; its volume has {} in all, less than `tier.fs.capacity_bytes`, so the volume is full first",
                human_at_most(volume_bytes)
            ),
            _ => String::new(),
        };
        Ok(format!("`{shown}` {what} and can be written, with {} free{beyond}{open}", human_at_most(free_bytes)))
    }

    /// The directory as it is, and its marker if it has one; changes nothing.
    fn find(path: &Path, config: &FsConfig) -> Result<(Directory, Option<Marker>)> {
        let about = fs::metadata(path).map_err(|error| not_there(path, error))?;
        if !about.is_dir() {
            return Err(Error::invalid("this is not a directory")
                .with("path", path.display())
                .hint("name a directory"));
        }
        let mut directory = Directory {
            path: path.to_owned(),
            id: 0,
            is_sharded: config.is_sharded,
            is_read_only: config.read_only,
            grants: Grants::new(path.to_owned(), config.capacity_bytes, config.grant_age),
            fsync: config.fsync,
            sealing: config.sealing.clone(),
            misreads: AtomicU64::new(0),
            damaged: Seldom::default(),
            last_refusal: AtomicI32::new(0),
            marker_seen: Mutex::default(),
            writer: layout::writer(),
            ground: Ground::of(path),
            is_direct: config.io_direct,
            is_open_to_all: about.mode() & 0o2 != 0,
            folder_mode: Mode::from_raw_mode(about.mode() & 0o2775),
            file_mode: Mode::from_raw_mode(about.mode() & 0o664),
        };
        if directory.fsync == Fsync::None && directory.is_nfs() {
            directory.fsync = Fsync::Data;
        }
        let marker = directory.marker()?;
        Ok((directory, marker))
    }

    fn agrees(&self, marker: &Marker, config: &FsConfig) -> Result<()> {
        if marker.is_sharded == config.is_sharded {
            return Ok(());
        }
        let told = if marker.is_sharded { "is sharded" } else { "is not sharded" };
        Err(Error::invalid(format!("the directory {told}, but the configuration says the opposite"))
            .with("path", self.path.display())
            .hint(format!("set `tier.fs.shard_folders` to `{}`, or use another directory", marker.is_sharded)))
    }

    /// Whether its path leads elsewhere now. An error that does not show this counts as no. Blocks as long as the mount
    /// does.
    pub fn loss(&self) -> Option<Loss> {
        let marker = self.path.join(OWN_FOLDER).join(MARKER);
        let about = rustix::fs::statat(rustix::fs::CWD, &marker, AtFlags::SYMLINK_NOFOLLOW);
        // No marker is ever changed, so one of the same time is the same.
        let seen = about.ok().map(|about| {
            let [device, inode] = [about.st_dev, about.st_ino].map(i128::from);
            [device, inode, about.st_ctime.into(), about.st_ctime_nsec.into()]
        });
        let mut known = self.marker_seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_some() && *known == seen {
            return None;
        }
        let loss = match self.enter() {
            Ok(root) => self.loss_of(&root),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => Some(Loss::Gone),
            Err(_) => return None,
        };
        *known = seen.filter(|_| loss.is_none());
        loss
    }

    /// The same, of what its path led to.
    pub fn loss_of(&self, root: &Folder) -> Option<Loss> {
        match root.folder(OWN_FOLDER).and_then(|folder| read(&folder, MARKER)) {
            Ok((text, _)) => Marker::parse(&text).filter(|marker| marker.id != self.id).map(|_| Loss::Other),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => Some(Loss::Gone),
            Err(_) => None,
        }
    }

    /// Whether the object at `path` is certainly not there, looked at anew. A stale handle alone does not say so: the
    /// object may have been removed, or the server may have forgotten what this mount had open.
    pub fn has_no(&self, path: &Path) -> bool {
        let about = self.enter().and_then(|root| root.about(path));
        matches!(about, Err(Errno::NOENT | Errno::NOTDIR))
    }

    /// The directory as it is now.
    pub fn enter(&self) -> Result<Folder, Errno> {
        Folder::enter(&self.path)
    }

    /// The folder of the control files.
    pub fn own_folder(&self) -> Result<Folder, Errno> {
        self.enter()?.folder(OWN_FOLDER)
    }

    /// Bytes that the volume has left for this user.
    pub fn free_bytes(&self) -> Result<u64, Errno> {
        let about = rustix::fs::statvfs(&self.path)?;
        // Some filesystems do not know.
        Ok(if about.f_blocks == 0 { u64::MAX } else { about.f_bavail.saturating_mul(about.f_frsize) })
    }

    /// Bytes that the volume has room for, used or not.
    fn volume_bytes(&self) -> Result<u64, Errno> {
        let about = rustix::fs::statvfs(&self.path)?;
        Ok(if about.f_blocks == 0 { u64::MAX } else { about.f_blocks.saturating_mul(about.f_frsize) })
    }

    /// Bytes that the volume holds, of whomever.
    pub fn volume_used_bytes(&self) -> Result<u64, Errno> {
        let about = rustix::fs::statvfs(&self.path)?;
        let used_blocks = about.f_blocks.saturating_sub(about.f_bfree);
        Ok(if about.f_blocks == 0 { u64::MAX } else { used_blocks.saturating_mul(about.f_frsize) })
    }

    /// Opens the object at `path` below the directory for reading.
    pub fn open_object(&self, root: &Folder, path: &Path) -> Result<File, Errno> {
        root.open(path, OFlags::RDONLY | self.direct())
    }

    /// A new file in `folder` under a unique name, with its final permissions.
    pub fn create(&self, folder: &Folder) -> Result<(String, File), Errno> {
        let name = layout::temporary(&self.writer);
        let file = folder.create(&name, self.direct(), self.file_mode)?;
        Ok((name, file))
    }

    /// Creates the folders between the directory and the one at `below`.
    pub fn make_folders(&self, root: &Folder, below: &Path) -> Result<(), Errno> {
        // If the mount is gone, its mount point has no marker and must not be filled instead.
        root.folder(OWN_FOLDER)?.about(MARKER)?;
        let mut names = below.iter();
        let Some(first) = names.next() else { return Ok(()) };
        let made = root.make(first, self.folder_mode)?;
        names.try_fold(made, |folder, name| folder.make(name, self.folder_mode)).map(drop)
    }

    /// Writes `bytes` to a control file that gets that name; false if the name already exists.
    pub fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool, Errno> {
        let folder = self.own_folder()?;
        let temporary = layout::temporary(&self.writer);
        let mut file = folder.create(&temporary, OFlags::empty(), self.file_mode)?;
        let linked = file.write_all(bytes).map_err(errno).and_then(|()| folder.link(&temporary, name));
        let _ = folder.remove(&temporary);
        linked
    }

    /// Reads a control file, and leaves it open.
    pub fn read(&self, name: &str) -> Result<(String, File), Errno> {
        read(&self.own_folder()?, name)
    }

    /// The same; `INVAL` if it is no plain file. Another read waits for a FIFO until somebody writes to it.
    pub fn read_plain(&self, name: &str) -> Result<(String, File), Errno> {
        let file = self.own_folder()?.open(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if kind == FileType::RegularFile { text_of(file) } else { Err(Errno::INVAL) }
    }

    fn direct(&self) -> OFlags {
        if self.is_direct { OFlags::DIRECT } else { OFlags::empty() }
    }

    fn is_nfs(&self) -> bool {
        rustix::fs::statfs(&self.path).is_ok_and(|about| i128::from(about.f_type) == NFS_MAGIC)
    }

    fn marker(&self) -> Result<Option<Marker>> {
        match self.read(MARKER) {
            Ok((text, _)) => Marker::parse(&text).map(Some).ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, "this build cannot read the directory's marker file")
                    .with("path", self.path.join(OWN_FOLDER).join(MARKER).display())
                    .hint("use a later version of forebay, or another directory")
            }),
            Err(Errno::NOENT) => Ok(None),
            Err(error @ (Errno::ACCESS | Errno::PERM)) => Err(self
                .failed("cannot read the directory's marker file", error.into())
                .hint("give the daemon's user the right to enter the directory and read what is there")),
            Err(error) => Err(self.failed("cannot read the directory's marker file", error.into())),
        }
    }

    /// An error if the directory, which has no marker, cannot become one of ours. Otherwise whether it is empty:
    /// folders of blocks may be left of one that had a marker. What is in them is used only as far as it is whole.
    fn is_empty_for_us(&self) -> Result<bool> {
        let path = self.path.display();
        if self.is_read_only {
            return Err(Error::new(ErrorKind::NotFound, "the directory is not initialised, and is read-only")
                .with("path", path)
                .hint("start a host that may write there first, or name another directory"));
        }
        let mut is_empty = true;
        for entry in fs::read_dir(&self.path).map_err(|error| self.failed("cannot list the directory", error))? {
            let entry = entry.map_err(|error| self.failed("cannot list the directory", error))?;
            let name = entry.file_name();
            if NOT_CONTENT.iter().any(|known| OsStr::new(known) == name) {
                continue;
            }
            let is_of_blocks = name.to_str().is_some_and(layout::is_of_namespace);
            if !is_of_blocks || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                return Err(Error::invalid("the directory holds other files")
                    .with("path", path)
                    .with("found", name.to_string_lossy())
                    .hint("name an empty directory, or one that Forebay has used"));
            }
            is_empty = false;
        }
        Ok(is_empty)
    }

    /// Makes a directory without a marker one of ours. The first host decides its settings.
    fn make(&self, config: &FsConfig) -> Result<Marker> {
        if !self.is_empty_for_us()? {
            let path = self.path.display();
            tracing::warn!(%path, "a shared directory has lost the folder `.forebay`; it is made again, and the blocks stay");
        }
        let id = u128::from(layout::random()) << 64 | u128::from(layout::random());
        let marker = Marker { id, is_sharded: config.is_sharded };
        let made = self.enter().and_then(|root| root.make(OWN_FOLDER, self.folder_mode)).and_then(|_| {
            self.publish(USAGE, &Grants::empty())?;
            self.publish(MARKER, marker.text().as_bytes())
        });
        made.map_err(|error| {
            self.failed("cannot initialise the shared directory", error.into())
                .hint("give this user the right to write there, and use a filesystem with hard links")
        })?;
        self.marker()?.ok_or_else(|| self.failed("the directory's marker file is gone", Errno::NOENT.into()))
    }

    /// Makes the file of the figures again, if it is gone and the directory is still ours. It is empty, so that a walk
    /// counts what is there.
    pub fn restore_usage(&self) -> bool {
        !self.is_read_only && self.loss().is_none() && self.publish(USAGE, b"").unwrap_or(false)
    }

    /// Tests whether the directory can be written and has links, and direct I/O if that is wanted.
    fn try_out(&mut self) -> Result<()> {
        let probe = layout::probe(&self.writer);
        if !self.is_read_only {
            match self.publish(&probe, b"probe") {
                Ok(_) => drop(self.own_folder().and_then(|folder| folder.remove(&probe))),
                // It is tried again with each store: a mount may become writable.
                Err(error @ (Errno::ROFS | Errno::ACCESS | Errno::PERM)) => {
                    let why = io::Error::from(error);
                    tracing::warn!(
                        path = %self.path.display(),
                        %why,
                        hint = "let the daemon write there, or set `tier.fs.read_only`",
                        "cannot write to the shared directory; what it holds is still read"
                    );
                    self.note_refusal(Some(error));
                }
                // A full directory is written again when there is space.
                Err(Errno::NOSPC | Errno::DQUOT) => {}
                Err(error) => return Err(self.failed("cannot write to the directory", error.into())),
            }
        }
        match self.own_folder().and_then(|folder| self.open_object(&folder, Path::new(MARKER))) {
            Err(Errno::INVAL) if self.is_direct => {
                Err(Error::new(ErrorKind::Unsupported, "this filesystem has no direct I/O")
                    .with("path", self.path.display())
                    .hint("set `tier.fs.io_direct` to `false`"))
            }
            Err(error) => Err(self.failed("cannot open the directory's marker file", error.into())),
            Ok(_) => Ok(()),
        }
    }

    /// Why the last store was refused; none if it was not, or if the directory's capacity was spent.
    pub fn last_refusal(&self) -> Option<Errno> {
        let number = self.last_refusal.load(Relaxed);
        (number != 0).then(|| Errno::from_raw_os_error(number))
    }

    /// Tries a directory that refused the last store as one that this host may not write to, so that a store costs no
    /// copy of its block while it stays so.
    pub fn still_refuses(&self) -> Result<(), Errno> {
        match self.last_refusal() {
            Some(Errno::ROFS | Errno::ACCESS | Errno::PERM) => self.own_folder()?.open(USAGE, OFlags::RDWR).map(drop),
            _ => Ok(()),
        }
    }

    /// None if a store was taken, or if the directory's capacity is spent.
    pub fn note_refusal(&self, error: Option<Errno>) {
        self.last_refusal.store(error.map_or(0, Errno::raw_os_error), Relaxed);
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::new(ErrorKind::Io, what).with("path", self.path.display()).source(error)
    }
}

/// Why an open directory is not used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Loss {
    /// Its marker is not at its path any more.
    Gone,
    /// Another directory of ours is at its path.
    Other,
}

impl Loss {
    pub fn error(self, path: &Path) -> Error {
        let what = match self {
            Loss::Gone => "the shared directory is not there any more",
            Loss::Other => "another shared directory is in its place",
        };
        let error = Error::new(ErrorKind::NotFound, what).with("path", path.display());
        error.hint("mount it again, or put another directory there; it is opened as soon as it can be used")
    }
}

/// The directory as a busy thread has it open for reading: entering it costs as much as opening a file.
///
/// The thread leaves before it waits for work, after an error other than a miss, and after [`MOST_READS`]: it keeps no
/// filesystem from being unmounted, and soon sees what the path leads to. Whatever is changed is changed in a directory
/// just entered.
#[derive(Default)]
pub(super) struct Visit {
    root: Option<Folder>,
    reads: u32,
}

/// Some milliseconds of work.
const MOST_READS: u32 = 64;

impl Visit {
    pub fn is_open(&self) -> bool {
        self.root.is_some()
    }

    pub fn leave(&mut self) {
        *self = Visit::default();
    }

    pub fn read<T>(
        &mut self,
        directory: &Directory,
        read: impl FnOnce(&Folder) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let root = match self.root.take().filter(|_| self.reads < MOST_READS) {
            Some(root) => root,
            None => {
                self.reads = 0;
                directory.enter()?
            }
        };
        let outcome = read(&root);
        if matches!(outcome, Ok(_) | Err(Errno::NOENT)) {
            (self.root, self.reads) = (Some(root), self.reads + 1);
        }
        outcome
    }
}

/// A clock that continues while the host sleeps.
pub(super) fn clock() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
}

fn read(own_folder: &Folder, name: &str) -> Result<(String, File), Errno> {
    text_of(own_folder.open(name, OFlags::RDONLY)?)
}

fn text_of(file: File) -> Result<(String, File), Errno> {
    let mut bytes = Vec::new();
    (&file).take(MAX_CONTROL_BYTES).read_to_end(&mut bytes).map_err(errno)?;
    // A damaged file reads as one that says something else.
    Ok((String::from_utf8_lossy(&bytes).into_owned(), file))
}

pub(super) fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn not_there(path: &Path, error: io::Error) -> Error {
    let kind = if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
    Error::new(kind, "cannot use the directory")
        .with("path", path.display())
        .source(error)
        .hint("mount it, or create it with `mkdir`; Forebay does not create it, so that a missing mount is noticed")
}

/// What a directory records about itself.
struct Marker {
    id: u128,
    is_sharded: bool,
}

impl Marker {
    fn text(&self) -> String {
        format!("{TITLE}\nid {:032x}\nsharded {}\n", self.id, self.is_sharded)
    }

    fn parse(text: &str) -> Option<Marker> {
        let mut lines = text.lines();
        let is_known = lines.next() == Some(TITLE);
        let id = u128::from_str_radix(lines.next()?.strip_prefix("id ")?, 16).ok()?;
        let is_sharded = lines.next()?.strip_prefix("sharded ")?.parse().ok()?;
        (is_known && lines.next().is_none()).then_some(Marker { id, is_sharded })
    }
}

#[cfg(test)]
mod fuzz {
    use std::path::{Path, PathBuf};

    use forebay_core::{BlockHash, BlockKey, NamespaceId};
    use forebay_fuzz::Target;

    use super::*;

    #[test]
    fn whatever_a_directory_says_of_itself_is_read_as_it_was_written() {
        let made =
            [(0, true), (u128::MAX, false)].map(|(id, is_sharded)| Marker { id, is_sharded }.text().into_bytes());
        let words: [&[u8]; 5] = [b"\n", b"id ", b"sharded ", b"true", b"+"];
        Target::new("markers", made.to_vec()).words(&words).cases(30_000).run(|bytes| {
            let marker = std::str::from_utf8(bytes).ok().and_then(Marker::parse)?;
            let again = Marker::parse(&marker.text()).expect("a marker is read as it was written");
            assert_eq!((again.id, again.is_sharded), (marker.id, marker.is_sharded));
            Some(marker.is_sharded)
        });
    }

    /// Names in a shared directory are anybody's.
    #[test]
    fn whatever_a_file_is_called_it_is_the_object_of_one_key_or_of_none() {
        let key = BlockKey { namespace: NamespaceId(7 << 90), group: 2, hash: BlockHash::new(&[0xAB; 32]).unwrap() };
        let path = |is_sharded| layout::object(&key, is_sharded).to_str().unwrap().as_bytes().to_vec();
        let words: [&[u8]; 6] = [b"/", b"..", b"-", b"+1", b".tmp-", b"\xc3\xa9"];
        Target::new("names", vec![path(true), path(false)]).words(&words).cases(30_000).run(|bytes| {
            let text = std::str::from_utf8(bytes).ok()?;
            let found = [true, false].map(|is_sharded| layout::key_of(&PathBuf::from(text), is_sharded));
            for (key, is_sharded) in found.iter().zip([true, false]) {
                let is_its_own = |key: &BlockKey| layout::object(key, is_sharded).as_path() == Path::new(text);
                assert!(key.as_ref().is_none_or(is_its_own), "{text} is a name of {key:?}");
            }
            Some(found.map(|key| key.is_some()))
        });
    }
}
