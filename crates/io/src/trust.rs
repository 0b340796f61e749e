//! Files and directories that only root and this user could have made; `forebay_core::trust` has the rules.
//!
//! Invariant: nobody else can later replace a file that was opened here, so it may be opened again by its path.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_core::trust::{Facts, Role, Trust};
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Access, AtFlags, CWD, OFlags};

/// The use of a directory of the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holds {
    /// Its sockets. Everybody may look in: each socket decides who connects.
    Sockets,
    /// The pool's files, for this user alone.
    Pool,
}

impl Holds {
    /// Mode of a new directory. The sockets' modes and the peer's credentials decide who may connect.
    fn mode(self) -> u32 {
        match self {
            Holds::Sockets => 0o755,
            Holds::Pool => 0o700,
        }
    }

    fn cannot_use(self, path: &Path, error: impl Into<io::Error>) -> Error {
        let hint = match self {
            Holds::Sockets => {
                "set `socket.directory` to a directory that this user may write to; \
                 engines need the same in `FOREBAY_SOCKET_DIRECTORY`"
            }
            Holds::Pool => "set `pool.directory` to a directory that this user may write to, such as one in `/dev/shm`",
        };
        Error::new(ErrorKind::Io, "cannot use the directory")
            .with("path", path.display())
            .source(error.into())
            .hint(hint)
    }
}

/// Creates the directory with all its parents if missing, and returns its real path. Errors as [`check_directory`],
/// and then creates nothing.
pub fn make_directory(path: &Path, holds: Holds) -> Result<PathBuf> {
    let cannot = |error: io::Error| holds.cannot_use(path, error);
    let (real, is_there) = check_directory(path, holds)?;
    if is_there {
        return Ok(real);
    }
    fs::DirBuilder::new().recursive(true).mode(holds.mode()).create(&real).map_err(cannot)?;
    let real = checked(Role::Directory, &real)?;
    // The umask may have removed bits from the mode. The check has excluded links and other users' directories.
    fs::set_permissions(&real, Permissions::from_mode(holds.mode())).map_err(cannot)?;
    Ok(real)
}

/// The directory's path, existing or to be made, and whether it exists. Creates nothing. Errors with `Invalid` if
/// somebody else could have made it or can change it, and with `Io` if this user may not write to it or make it.
pub fn check_directory(path: &Path, holds: Holds) -> Result<(PathBuf, bool)> {
    let cannot = |error: io::Error| holds.cannot_use(path, error);
    let absolute = std::path::absolute(path).map_err(cannot)?;
    let there = absolute.ancestors().find(|above| fs::symlink_metadata(above).is_ok()).unwrap_or(&absolute);
    let is_there = there == absolute;
    let (real, made) = match is_there {
        true => (checked(Role::Directory, there)?, None),
        // Checked as a parent directory, because whatever is created in it is our own.
        false => {
            let real = fs::canonicalize(there).map_err(cannot)?;
            (checked(Role::Above, &real)?, absolute.strip_prefix(there).ok())
        }
    };
    let writes = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::accessat(CWD, &real, writes, AtFlags::EACCESS).map_err(|errno| holds.cannot_use(path, errno))?;
    Ok((made.map_or(real.clone(), |made| real.join(made)), is_there))
}

/// The real path of an existing directory.
pub fn checked(role: Role, path: &Path) -> Result<PathBuf> {
    let real = match (path.parent(), path.file_name()) {
        (Some(above), Some(name)) => fs::canonicalize(above).map(|above| above.join(name)),
        _ => fs::canonicalize(path),
    };
    let cannot =
        |error| Error::new(ErrorKind::Io, "cannot stat the directory").with("path", path.display()).source(error);
    let real = real.map_err(cannot)?;
    trust().check_path(role, &real, |path| Ok(facts(&fs::symlink_metadata(path).map_err(cannot)?)))?;
    Ok(real)
}

/// Opens a file in a directory that was checked. An error of kind `PermissionDenied` says why the file is not
/// trusted.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)?;
    check(&file, path).map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error.told()))?;
    Ok(file)
}

/// Whether only root and this user could have made the file and can change it.
pub fn check(file: &File, path: &Path) -> Result<()> {
    let metadata = file.metadata().map_err(|error| Error::new(ErrorKind::Io, "cannot stat a file").source(error))?;
    trust().check(Role::File, path, facts(&metadata))
}

fn trust() -> Trust {
    Trust {
        own: rustix::process::geteuid().as_raw(),
        named: None,
        remedy: "run the daemon as that user, or let root or this user own it",
    }
}

fn facts(metadata: &Metadata) -> Facts {
    Facts { uid: metadata.uid(), mode: metadata.mode(), links: metadata.nlink() }
}
