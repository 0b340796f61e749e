//! A secret in a file of its own, as secret stores of container platforms mount one.
//!
//! Invariants: no message repeats what a file holds. Only root and this user could have written the secret. The file
//! may be a symbolic link, as Kubernetes makes them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};

use crate::trust;

/// Longer ones are no secrets: the file is another than was meant.
const MOST_BYTES: u64 = 64 << 10;
const OTHERS_READ: u32 = 0o004;
/// Files that this process warned of. A configuration is checked before it is used, so its files are read repeatedly.
static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// What to do with a file of a secret that all users may read.
pub const HIDE: &str = "run `chmod o-r` on it; in Kubernetes, set `defaultMode: 0400` of the secret's volume";

/// Those that this process has read and that all users may read.
pub fn readable_by_all() -> Vec<PathBuf> {
    WARNED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}

/// A file that holds a secret, for those who read it again when it was replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SecretFile {
    key: &'static str,
    path: PathBuf,
}

impl SecretFile {
    /// `key` is the setting that names the file.
    pub fn new(key: &'static str, path: PathBuf) -> SecretFile {
        SecretFile { key, path }
    }

    /// As it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// See [`read_secret`].
    pub fn read(&self) -> Result<String> {
        read_secret(self.key, &self.path)
    }
}

/// The file's text without one newline at its end. Errors name the key and the file.
pub fn read_secret(key: &'static str, path: &Path) -> Result<String> {
    let bytes = read_file(key, path)?;
    let text = String::from_utf8(bytes).map_err(|_| cannot(key, path, io::Error::other("it is not UTF-8")))?;
    let secret = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
    if secret.is_empty() {
        return Err(cannot(key, path, io::Error::other("it is empty")));
    }
    // Some editors begin a text so, and some tools end one so. No service takes it for a part of the secret.
    if secret.starts_with('\u{feff}') || secret.contains('\0') {
        return Err(cannot(key, path, io::Error::other("it holds a byte order mark or a NUL")));
    }
    Ok(secret.to_owned())
}

/// All of a file that holds a secret, under the same conditions.
pub(crate) fn read_file(key: &'static str, path: &Path) -> Result<Vec<u8>> {
    let cannot = |error| cannot(key, path, error);
    let file = open(path).map_err(cannot)?;
    trust::check(&file, path).map_err(|error| named(key, path, error))?;
    if file.metadata().map_err(cannot)?.mode() & OTHERS_READ != 0 && is_news(path) {
        tracing::warn!(
            key,
            file = %path.display(),
            hint = HIDE,
            "all users who reach the file of a secret can read it"
        );
    }
    whole(&file, MOST_BYTES).map_err(cannot)
}

/// Opens a regular file without waiting. A pipe, a device or a file of the kernel could keep its reader waiting.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a file")),
    }
}

/// All of a file, if it has `most` bytes or less.
pub(crate) fn whole(file: &File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => Err(io::Error::other("it is too long")),
    }
}

fn cannot(key: &'static str, path: &Path, error: io::Error) -> Error {
    let hint = "give a file that this user may read, with the secret alone in it";
    named(key, path, Error::new(ErrorKind::Io, "cannot read the file of a secret").source(error).hint(hint))
}

fn named(key: &'static str, path: &Path, error: Error) -> Error {
    error.with("key", key).with("file", path.display())
}

fn is_news(path: &Path) -> bool {
    WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_secret_is_a_file_s_text_without_one_newline() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("secret");
        for (text, secret) in [
            ("s3cret", "s3cret"),
            ("s3cret\n", "s3cret"),
            ("s3cret\r\n", "s3cret"),
            ("a\nb\n\n", "a\nb\n"),
            (" x ", " x "),
        ] {
            write(&path, text).unwrap();
            assert_eq!(read_secret("tier.redis.password_file", &path).unwrap(), secret, "{text:?}");
        }
        // As Kubernetes mounts it: a link to a link to a file that all may read.
        set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        symlink(&path, home.path().join("..data")).unwrap();
        symlink(home.path().join("..data"), home.path().join("password")).unwrap();
        assert_eq!(read_secret("tier.redis.password_file", &home.path().join("password")).unwrap(), " x ");
    }

    #[test]
    fn a_file_that_all_may_read_is_told_of_once() {
        let home = tempfile::tempdir().unwrap();
        let told = ["one", "one", "another"].map(|name| is_news(&home.path().join(name)));
        assert_eq!(told, [true, false, true]);
    }

    #[test]
    fn a_file_that_is_no_secret_is_refused_without_a_word_of_what_it_holds() {
        let home = tempfile::tempdir().unwrap();
        let [empty, long, binary, open, marked, ended, pipe] =
            ["empty", "long", "binary", "open", "marked", "ended", "pipe"].map(|name| home.path().join(name));
        write(&empty, "\n").unwrap();
        write(&long, "s3cret".repeat(20_000)).unwrap();
        write(&binary, b"s3cret\xff").unwrap();
        write(&open, "s3cret").unwrap();
        write(&marked, "\u{feff}s3cret\n").unwrap();
        write(&ended, "s3cret\0").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        set_permissions(&open, Permissions::from_mode(0o666)).unwrap();
        for path in [empty, long, binary, open, marked, ended, pipe, home.path().to_owned(), home.path().join("absent")]
        {
            let error = read_secret("tier.redis.password_file", &path).unwrap_err();
            assert!(error.to_string().contains("tier.redis.password_file") && error.hint_text().is_some(), "{error}");
            assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
            assert!(!error.told().contains("s3cret"), "{error}");
        }
    }
}
