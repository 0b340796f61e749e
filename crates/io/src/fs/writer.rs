//! From a slot to an object: a bounce buffer, a file under a unique name, flushed, then linked to its key.
//!
//! Invariants: a key's name leads to a file that was written to its end. A whole object, also one in a later format, is
//! never replaced, except by a host with a secret if it has no MAC. A kill at any moment leaves the object, or an
//! unfinished file that the sweeper removes.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_core::ErrorKind;
use forebay_core::tier::{Operation, Outcome};
use rustix::fs::{OFlags, fdatasync, fstat, fsync};
use rustix::io::Errno;
use rustix::path::Arg;

use super::buffer::Buffer;
use super::config::Fsync;
use super::directory::{Directory, clock};
use super::folder::Folder;
use super::layout::{self, file_bytes};
use super::lease::touch;
use crate::cancel::SlotGuard;
use crate::header::HEADER_BYTES;

/// How often an object's folder is created again if the sweeper removes it as empty at that moment.
const TRIES: u32 = 4;

/// The result of writing an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    New,
    /// Instead of a file of that many bytes.
    Replaced(u64),
    /// A whole object with the same key already exists.
    WasThere,
    /// The object may exist or not.
    Unsure(Errno),
}

/// See the module documentation. The flag beside the outcome is true if the object was already there.
pub(super) fn store(directory: &Directory, buffer: &mut Buffer, op: &Operation, guard: &SlotGuard) -> (Outcome, bool) {
    let Some((slot, _)) = op.slot.filter(|_| !directory.is_read_only) else {
        return (Outcome::Failed(ErrorKind::Unsupported), false);
    };
    let path = layout::object(&op.key, directory.is_sharded);
    let root = match directory.enter() {
        Ok(root) => root,
        Err(error) => return (refused(directory, error), false),
    };
    let stored = Outcome::Stored;
    if stays(directory, &root, &path, op) {
        note_use(&root, &path);
        return (stored, true);
    }
    if let Err(error) = directory.still_refuses() {
        return (refused(directory, error), false);
    }
    match guard.use_slot(|| buffer.fill(&directory.sealing, op, slot)) {
        None => return (Outcome::Failed(ErrorKind::Timeout), false),
        Some(false) => return (Outcome::Failed(ErrorKind::Corrupt), false),
        Some(true) => {}
    }
    let spent = match directory.grants.spend(file_bytes(op.length_bytes), clock()) {
        Ok(Some(spent)) => spent,
        Ok(None) => {
            directory.note_refusal(None);
            return (Outcome::Failed(ErrorKind::Full), false);
        }
        Err(error) => return (refused(directory, error), false),
    };
    let count = directory.grants.count();
    let written = write(directory, &root, buffer, op, &path);
    if matches!(written, Ok(Written::WasThere) | Err(_)) {
        directory.grants.refund(spent);
    }
    if let Err(Errno::NOSPC | Errno::DQUOT) | Ok(Written::Unsure(Errno::NOSPC | Errno::DQUOT)) = written {
        // If the count cannot be written either, this host's own sweeper still knows.
        let _ = directory.grants.refused(file_bytes(op.length_bytes));
    }
    match written {
        Ok(Written::New) => {
            directory.note_refusal(None);
            (stored, false)
        }
        Ok(Written::Replaced(bytes)) => {
            directory.note_refusal(None);
            directory.grants.removed(bytes, count);
            (stored, false)
        }
        Ok(Written::WasThere) => {
            note_use(&root, &path);
            (stored, true)
        }
        Ok(Written::Unsure(error)) | Err(error) => (refused(directory, error), false),
    }
}

fn refused(directory: &Directory, error: Errno) -> Outcome {
    directory.note_refusal(Some(error));
    Outcome::Failed(kind_of(error))
}

/// Removes the object.
pub(super) fn remove(directory: &Directory, op: &Operation) -> Outcome {
    if directory.is_read_only {
        return Outcome::Failed(ErrorKind::Unsupported);
    }
    let path = layout::object(&op.key, directory.is_sharded);
    let count = directory.grants.count();
    let removed = directory.enter().and_then(|root| {
        let (folder, name) = resolve(&root, &path)?;
        let about = folder.about(name)?;
        folder.remove(name).map(|()| about.st_size as u64)
    });
    match removed {
        Ok(bytes) => {
            directory.grants.removed(bytes, count);
            Outcome::Removed
        }
        Err(Errno::NOENT | Errno::NOTDIR) => Outcome::Absent,
        Err(Errno::STALE) if directory.has_no(&path) => Outcome::Absent,
        Err(error) => Outcome::Failed(kind_of(error)),
    }
}

/// Maps an error to a tier's error kind.
pub(super) fn kind_of(error: Errno) -> ErrorKind {
    match error {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => ErrorKind::Full,
        Errno::ROFS | Errno::ACCESS | Errno::PERM => ErrorKind::Unsupported,
        Errno::TIMEDOUT => ErrorKind::Timeout,
        Errno::NOMEM => ErrorKind::Unavailable,
        _ => ErrorKind::Io,
    }
}

/// The folder of an object, and the object's name in it.
pub(super) fn resolve<'a>(root: &Folder, path: &'a Path) -> Result<(Folder, &'a OsStr), Errno> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::INVAL) };
    Ok((root.folder(folder)?, name))
}

/// A repeated store is a use: the object counts as stored now.
fn note_use(root: &Folder, path: &Path) {
    if let Ok(file) = root.open(path, OFlags::RDONLY | OFlags::NONBLOCK) {
        // Another user's object may not allow this: it then counts as last used when it was stored.
        let _ = touch(&file);
    }
}

/// Whether the file at `path` is left as it is. Without a secret its length says enough, and it is not opened.
fn stays(directory: &Directory, folder: &Folder, path: impl Arg + Copy, op: &Operation) -> bool {
    let Ok(about) = folder.about(path) else { return false };
    let (sealing, is_whole) = (&directory.sealing, about.st_size as u64 == file_bytes(op.length_bytes));
    let is_kept = |head| sealing.keeps(&head, &op.key, op.length_bytes, is_whole);
    (is_whole && !sealing.has_secret()) || head(folder, path).is_some_and(is_kept)
}

/// An error means that nothing was left behind.
fn write(
    directory: &Directory,
    root: &Folder,
    buffer: &mut Buffer,
    op: &Operation,
    path: &Path,
) -> Result<Written, Errno> {
    let New { folder, name, temporary, file } = create(directory, root, path)?;
    let published = write_whole(directory, buffer, op.length_bytes, &file)
        .map(|()| publish(directory, &folder, &temporary, name, op))
        .map(|written| match flush_name(directory, &folder) {
            Err(error) if matches!(written, Written::New | Written::Replaced(_)) => Written::Unsure(error),
            _ => written,
        });
    // The file may have moved. The sweeper removes it if it cannot be removed now.
    let _ = folder.remove(&temporary);
    published
}

/// An unfinished file, and where it belongs.
struct New<'a> {
    folder: Folder,
    name: &'a OsStr,
    temporary: String,
    file: File,
}

fn create<'a>(directory: &Directory, root: &Folder, path: &'a Path) -> Result<New<'a>, Errno> {
    let created = || {
        let (folder, name) = resolve(root, path)?;
        let (temporary, file) = directory.create(&folder)?;
        Ok(New { folder, name, temporary, file })
    };
    for _ in 1..TRIES {
        match created() {
            Err(Errno::NOENT) => directory.make_folders(root, path.parent().ok_or(Errno::INVAL)?)?,
            created => return created,
        }
    }
    created()
}

fn write_whole(directory: &Directory, buffer: &mut Buffer, length_bytes: u64, file: &File) -> Result<(), Errno> {
    buffer.write_to(file, length_bytes)?;
    match directory.fsync {
        Fsync::None => {}
        Fsync::Data => fdatasync(file)?,
        Fsync::All => fsync(file)?,
    }
    let is_complete = fstat(file)?.st_size as u64 == file_bytes(length_bytes);
    if is_complete { Ok(()) } else { Err(Errno::IO) }
}

/// Gives the file its key's name, unless an object that stays has that name. A broken object, which only another
/// program or a damaged filesystem can have left, is replaced, and so is one without a MAC where there is a secret.
fn publish(directory: &Directory, folder: &Folder, temporary: &str, name: &OsStr, op: &Operation) -> Written {
    match folder.link(temporary, name) {
        Ok(true) => Written::New,
        // An earlier link succeeded but its answer was lost.
        Ok(false) if is_same(folder, temporary, name) => Written::New,
        Ok(false) if stays(directory, folder, name, op) => Written::WasThere,
        Ok(false) => {
            let replaced_bytes = folder.about(name).map_or(0, |about| about.st_size as u64);
            folder.rename(temporary, name).map_or_else(Written::Unsure, |()| Written::Replaced(replaced_bytes))
        }
        Err(error) => Written::Unsure(error),
    }
}

/// The bytes where an object's file has its header.
pub(super) fn head(folder: &Folder, name: impl Arg) -> Option<[u8; HEADER_BYTES]> {
    // Without a wait, if it is a FIFO.
    let file = folder.open(name, OFlags::RDONLY | OFlags::NONBLOCK).ok()?;
    let mut head = [0; HEADER_BYTES];
    file.read_exact_at(&mut head, 0).ok().map(|()| head)
}

fn is_same(folder: &Folder, a: impl Arg, b: impl Arg) -> bool {
    let seen = [folder.about(a), folder.about(b)].map(|about| about.ok().map(|about| (about.st_dev, about.st_ino)));
    seen[0].is_some() && seen[0] == seen[1]
}

fn flush_name(directory: &Directory, folder: &Folder) -> Result<(), Errno> {
    if directory.fsync != Fsync::All {
        return Ok(());
    }
    fsync(folder.open(c".", OFlags::RDONLY | OFlags::DIRECTORY)?)
}
