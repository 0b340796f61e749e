//! One open shared directory: what it is, who may do what in it, and how files get their names.
//!
//! Invariants: nothing is written into a directory that holds foreign content. A name is given only to a whole file,
//! and to one file only. Folders and files get the permissions of the directory itself, whatever this process's umask
//! is, so `chmod` on the directory alone decides who may use it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use super::config::{FsConfig, Fsync};
use super::grants::Grants;
use super::layout::{self, MARKER, OWN_FOLDER, USAGE};

const TITLE: &str = "forebay directory 1";
/// Entries that filesystems keep in an otherwise empty directory.
const NOT_CONTENT: [&str; 3] = ["lost+found", ".snapshot", OWN_FOLDER];
const NFS_MAGIC: i128 = 0x6969;

/// See the module documentation.
pub(super) struct Directory {
    pub path: PathBuf,
    pub id: u128,
    pub is_sharded: bool,
    /// Why nothing is written here; none if the directory is writable.
    pub read_only: Option<String>,
    pub grants: Grants,
    pub fsync: Fsync,
    /// Loads that read an object damaged, and differently the second time.
    pub misreads: AtomicU64,
    /// This host and process.
    pub writer: String,
    is_direct: bool,
    folder_mode: u32,
    file_mode: u32,
}

impl Directory {
    /// Examines the directory, creates its marker if it is empty, and tries the operations that it will need. Blocks
    /// as long as the mount does.
    pub fn open(path: &Path, config: &FsConfig) -> Result<Directory> {
        let about = fs::metadata(path).map_err(|error| not_there(path, error))?;
        if !about.is_dir() {
            return Err(Error::invalid("not a directory").with("path", path.display()).hint("name a directory"));
        }
        let mut directory = Directory {
            path: path.to_owned(),
            id: 0,
            is_sharded: config.is_sharded,
            read_only: config.read_only.then(|| "by configuration".to_owned()),
            grants: Grants::new(path.join(USAGE), config.capacity_bytes, config.grant_age),
            fsync: config.fsync,
            misreads: AtomicU64::new(0),
            writer: layout::writer(),
            is_direct: config.io_direct,
            folder_mode: about.mode() & 0o2777,
            file_mode: about.mode() & 0o666,
        };
        if directory.fsync == Fsync::None && directory.is_nfs() {
            directory.fsync = Fsync::Data;
        }
        let marker = match directory.marker()? {
            Some(marker) => marker,
            None => directory.make(config)?,
        };
        directory.id = marker.id;
        if marker.is_sharded != config.is_sharded {
            let told = if marker.is_sharded { "is sharded" } else { "is not sharded" };
            return Err(Error::invalid(format!("the directory {told}, unlike the configuration"))
                .with("path", path.display())
                .hint(format!("set `tier.fs.shard_folders` to {}, or use another directory", marker.is_sharded)));
        }
        directory.try_out()?;
        Ok(directory)
    }

    /// Opens an object for reading.
    pub fn open_object(&self, path: &Path) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | self.direct();
        Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
    }

    /// A new file in `folder` under a unique name, with its final permissions.
    pub fn create(&self, folder: &Path) -> Result<(PathBuf, File), Errno> {
        let path = layout::temporary(folder, &self.writer);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | self.direct();
        let file: File = rustix::fs::open(&path, flags, Mode::from_raw_mode(self.file_mode))?.into();
        let about = rustix::fs::fstat(&file)?;
        if about.st_mode & 0o666 != self.file_mode {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(self.file_mode))?;
        }
        Ok((path, file))
    }

    /// Creates the folders between the directory and `folder`.
    pub fn make_folders(&self, folder: &Path) -> Result<(), Errno> {
        // If the mount is gone, its mount point has no marker and must not be filled instead.
        rustix::fs::stat(self.path.join(MARKER))?;
        let below = folder.strip_prefix(&self.path).map_err(|_| Errno::INVAL)?;
        let mut path = self.path.clone();
        for name in below {
            path.push(name);
            self.make_folder(&path)?;
        }
        Ok(())
    }

    /// Writes `bytes` to a file that gets the name `path`; false if that name already exists.
    pub fn publish(&self, path: &Path, bytes: &[u8]) -> Result<bool, Errno> {
        let folder = self.path.join(OWN_FOLDER);
        let temporary = layout::temporary(&folder, &self.writer);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(&temporary, flags, Mode::from_raw_mode(self.file_mode))?;
        let written = rustix::fs::fchmod(&file, Mode::from_raw_mode(self.file_mode))
            .and_then(|()| File::from(file).write_all(bytes).map_err(errno));
        let linked = written.and_then(|()| link(&temporary, path));
        let _ = rustix::fs::unlink(&temporary);
        linked
    }

    /// The path relative to this directory.
    pub fn below<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        path.strip_prefix(&self.path).ok()
    }

    fn direct(&self) -> OFlags {
        if self.is_direct { OFlags::DIRECT } else { OFlags::empty() }
    }

    fn is_nfs(&self) -> bool {
        rustix::fs::statfs(&self.path).is_ok_and(|about| i128::from(about.f_type) == NFS_MAGIC)
    }

    fn make_folder(&self, path: &Path) -> Result<(), Errno> {
        match rustix::fs::mkdir(path, Mode::from_raw_mode(self.folder_mode)) {
            Ok(()) => rustix::fs::chmod(path, Mode::from_raw_mode(self.folder_mode)),
            Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn marker(&self) -> Result<Option<Marker>> {
        let path = self.path.join(MARKER);
        match fs::read_to_string(&path) {
            Ok(text) => Marker::parse(&text).map(Some).ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, "this build cannot read the directory's marker file")
                    .with("path", path.display())
                    .hint("use a later version of forebay, or another directory")
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed("cannot read the directory's marker file", error)),
        }
    }

    /// Makes an empty directory one of ours. The first host decides its settings.
    fn make(&self, config: &FsConfig) -> Result<Marker> {
        let path = self.path.display();
        if self.read_only.is_some() {
            return Err(Error::new(ErrorKind::NotFound, "the directory is not initialised, and is read-only")
                .with("path", path)
                .hint("start a host that may write there first, or name another directory"));
        }
        for entry in fs::read_dir(&self.path).map_err(|error| self.failed("cannot list the directory", error))? {
            let name = entry.map_err(|error| self.failed("cannot list the directory", error))?.file_name();
            if !NOT_CONTENT.iter().any(|known| OsStr::new(known) == name) {
                return Err(Error::invalid("the directory holds other files")
                    .with("path", path)
                    .with("found", name.to_string_lossy())
                    .hint("name an empty directory, or one that Forebay has used"));
            }
        }
        let id = u128::from(layout::random()) << 64 | u128::from(layout::random());
        let marker = Marker { id, is_sharded: config.is_sharded };
        let made = self.make_folder(&self.path.join(OWN_FOLDER)).and_then(|()| {
            self.publish(&self.path.join(USAGE), &Grants::empty())?;
            self.publish(&self.path.join(MARKER), marker.text().as_bytes())
        });
        made.map_err(|error| {
            self.failed("cannot initialise the shared directory", error.into())
                .hint("give this user the right to write there, and use a filesystem with hard links")
        })?;
        self.marker()?.ok_or_else(|| self.failed("the directory's marker file is gone", Errno::NOENT.into()))
    }

    /// Tests whether the directory can be written and has links, and direct I/O if that is wanted.
    fn try_out(&mut self) -> Result<()> {
        let folder = self.path.join(OWN_FOLDER);
        let probe = folder.join(format!("{}-probe", layout::temporary(Path::new(""), &self.writer).display()));
        if self.read_only.is_none() {
            match self.publish(&probe, b"probe") {
                Ok(_) => drop(rustix::fs::unlink(&probe)),
                Err(error @ (Errno::ROFS | Errno::ACCESS | Errno::PERM)) => {
                    let why = io::Error::from(error).to_string();
                    tracing::warn!(path = %self.path.display(), %why, "cannot write to the shared directory; it is used read-only");
                    self.read_only = Some(why);
                }
                // A full directory is written again when there is space.
                Err(Errno::NOSPC | Errno::DQUOT) => {}
                Err(error) => return Err(self.failed("cannot write to the directory", error.into())),
            }
        }
        match self.open_object(&self.path.join(MARKER)) {
            Err(Errno::INVAL) if self.is_direct => {
                Err(Error::new(ErrorKind::Unsupported, "this filesystem has no direct I/O")
                    .with("path", self.path.display())
                    .hint("set `tier.fs.io_direct` to false"))
            }
            Err(error) => Err(self.failed("cannot open the directory's marker file", error.into())),
            Ok(_) => Ok(()),
        }
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::new(ErrorKind::Io, what).with("path", self.path.display()).source(error)
    }
}

/// Gives `file` the further name `path`; false if that name exists.
pub(super) fn link(file: &Path, path: &Path) -> Result<bool, Errno> {
    match rustix::fs::link(file, path) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A clock that continues while the host sleeps.
pub(super) fn clock() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
}

pub(super) fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn not_there(path: &Path, error: io::Error) -> Error {
    let kind = if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
    Error::new(kind, "cannot use the directory")
        .with("path", path.display())
        .source(error)
        .hint("mount it, or create it with `mkdir`; the daemon does not create it, so that a missing mount is noticed")
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
