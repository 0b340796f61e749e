//! Files and directories that only root and this user could have made; what is believed says `forebay_core::trust`.
//!
//! Invariant: what is opened here cannot be replaced by anybody else afterwards, so it may be opened again by its path.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_core::trust::{Facts, Role, Trust};
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::OFlags;

/// The directory's real path, after it was made with `mode` where it was missing, and all above it with it. `key` is
/// the configuration's name for it. Errors with `Invalid` where somebody else could have made it or can change it, and
/// then makes nothing.
pub fn make_directory(path: &Path, mode: u32, key: &str) -> Result<PathBuf> {
    let cannot = |error: io::Error| {
        Error::new(ErrorKind::Io, "cannot use the directory")
            .with("path", path.display())
            .source(error)
            .hint(format!("set `{key}` to a directory that this user may write to"))
    };
    let path = std::path::absolute(path).map_err(cannot)?;
    let there = path.ancestors().find(|above| fs::symlink_metadata(above).is_ok()).unwrap_or(&path);
    if there != path {
        // As something above a directory, that is: what is made in it is our own.
        checked(Role::Above, there)?;
        fs::DirBuilder::new().recursive(true).mode(mode).create(&path).map_err(cannot)?;
    }
    checked(Role::Directory, &path)
}

/// The real path of a directory that is there already.
pub fn checked(role: Role, path: &Path) -> Result<PathBuf> {
    let real = match (path.parent(), path.file_name()) {
        (Some(above), Some(name)) => fs::canonicalize(above).map(|above| above.join(name)),
        _ => fs::canonicalize(path),
    };
    let cannot =
        |error| Error::new(ErrorKind::Io, "cannot look at the directory").with("path", path.display()).source(error);
    let real = real.map_err(cannot)?;
    trust().check_path(role, &real, |path| Ok(facts(&fs::symlink_metadata(path).map_err(cannot)?)))?;
    Ok(real)
}

/// Opens a file in a directory that was checked. An error of kind `PermissionDenied` says why it is not believed.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)?;
    check(&file).map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, told(&error)))?;
    Ok(file)
}

/// Whether only root and this user could have made the file and can change it.
pub fn check(file: &File) -> Result<()> {
    let metadata = file.metadata().map_err(|error| Error::new(ErrorKind::Io, "cannot look at a file").source(error))?;
    trust().check(Role::File, facts(&metadata))
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

/// With its hint, where an error of the system has no place for one.
fn told(error: &Error) -> String {
    error.hint_text().map_or(error.to_string(), |hint| format!("{error}; {hint}"))
}
