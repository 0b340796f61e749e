//! Whether the daemon is one that a client may believe: its directory, and who listens there.
//!
//! Holds true: nothing is written to a socket before root's, this user's, or the named user's daemon was found at its
//! other end.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use forebay_core::trust::{Facts, Role, Trust};
use forebay_core::{Error, ErrorKind, Result};

use super::sockets::variable;

/// Names the user whose daemon is believed besides root's and the own one, where `socket.allow_uids` of that daemon
/// names this user.
const VARIABLE: &str = "FOREBAY_DAEMON_UID";

/// The path of a socket in the daemon's directory. Errors with `Invalid` where somebody else could have made the
/// directory or can change it, and with `Unavailable` where there is none.
pub fn socket(directory: &Path, name: &str) -> Result<PathBuf> {
    let absent = |error: io::Error| unreachable(ErrorKind::Unavailable, &directory.join(name), error);
    let directory = std::path::absolute(directory).map_err(absent)?;
    let real = match (directory.parent(), directory.file_name()) {
        (Some(above), Some(last)) => fs::canonicalize(above).map(|above| above.join(last)),
        _ => fs::canonicalize(&directory),
    };
    let real = real.map_err(absent)?;
    trust()?.check_path(Role::Directory, &real, |path| look(path).map_err(absent))?;
    Ok(real.join(name))
}

/// Whether the user at the other end of a connection is believed. Errors with `Invalid` if not.
pub fn peer(uid: u32) -> Result<()> {
    trust()?.check_user(uid, "the daemon")
}

/// No daemon at `path`, and what to do: one that runs and refuses this user is not to be started.
pub fn unreachable(kind: ErrorKind, path: &Path, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    let why = why.into();
    let kind_of_why = why.downcast_ref::<io::Error>().map(io::Error::kind);
    let hint = match (kind_of_why, closed_directory(path)) {
        (Some(io::ErrorKind::PermissionDenied), Some(closed)) => {
            format!("run `chmod o+x {}`: this user may not look in there", closed.display())
        }
        (Some(io::ErrorKind::PermissionDenied), None) => allow_user(),
        (Some(io::ErrorKind::WouldBlock), _) => "it accepts nobody: see whether it is stopped or hangs".to_string(),
        _ => format!("start it with `forebay serve`, or name the directory of its sockets (`{}`)", variable()),
    };
    Error::new(kind, "cannot reach the daemon").with("socket", path.display()).source(why).hint(hint)
}

/// The directory on the way to `path` that this user may not look in, if there is one.
fn closed_directory(path: &Path) -> Option<&Path> {
    let is_denied = |error: io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    path.ancestors().filter(|path| path.symlink_metadata().is_err_and(is_denied)).last()?.parent()
}

/// The daemon at `path` accepted the connection and closed it without a word, as it does with users that it does not
/// allow.
pub fn closed(path: &Path, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorKind::Unavailable, "the daemon closed the connection at once")
        .with("socket", path.display())
        .source(why)
        .hint(format!("{}; if it was just stopped, start it again", allow_user()))
}

fn allow_user() -> String {
    format!("add this user's id ({}) to the daemon's `socket.allow_uids`, or run as its user", own())
}

fn trust() -> Result<Trust> {
    let named = match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => Some(text.parse().map_err(|_| {
            Error::invalid(format!("`{VARIABLE}` cannot be `{text}`"))
                .hint("give a user id, such as 998, and not a name")
        })?),
        _ => None,
    };
    Ok(Trust { own: own(), named, remedy: "set `FOREBAY_DAEMON_UID` to it where engines and commands run" })
}

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn look(path: &Path) -> io::Result<Facts> {
    let metadata = fs::symlink_metadata(path)?;
    Ok(Facts { uid: metadata.uid(), mode: metadata.mode(), links: metadata.nlink() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_accepts_nobody_is_not_to_be_started() {
        let hint = |kind| {
            let error = unreachable(ErrorKind::Unavailable, Path::new("/nowhere/forebay.sock"), io::Error::from(kind));
            error.hint_text().expect("what to do").to_owned()
        };
        assert!(hint(io::ErrorKind::WouldBlock).contains("stopped or hangs"));
        assert!(hint(io::ErrorKind::NotFound).contains("forebay serve"));
    }
}
