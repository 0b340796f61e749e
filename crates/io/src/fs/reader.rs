//! From an object to a slot: open, read into a bounce buffer, verify there, copy.
//!
//! Invariants: a slot is written only with bytes that have the requested key and length and that their header proves,
//! and only while somebody still waits for them. An object is removed only after two reads that found the
//! same damage, the second one past the page cache: if bits flip on the way to this host, other hosts may still read
//! the object correctly. An object in a later format is a miss, and is not removed.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use forebay_core::ErrorKind;
use forebay_core::tier::{Operation, Outcome};
use rustix::fs::{Advice, FileType, OFlags, Stat, fadvise, fstat};
use rustix::io::Errno;

use super::buffer::Buffer;
use super::directory::{Directory, Visit};
use super::layout::{self, file_bytes, is_object_length};
use super::lease::{touch, touched_at};
use super::writer::{kind_of, resolve};
use crate::cancel::SlotGuard;
use crate::header::{HEADER_BYTES, Sealing};

/// Loads record the time of last use at most this often: one more request to a server for many loads. Mounts rarely
/// keep access times, and never exactly.
const NOTE_USE_EVERY: Duration = Duration::from_secs(60);

/// Whether the object exists. Checks its length, not its content.
pub(super) fn find(directory: &Directory, visit: &mut Visit, op: &Operation) -> Outcome {
    let path = layout::object(&op.key, directory.is_sharded);
    match visit.read(directory, |root| root.about(&path)) {
        Ok(about) if is_object_length(about.st_size as u64) => Outcome::Found,
        Ok(_) => Outcome::Absent,
        Err(error) => not_read(directory, op, error),
    }
}

/// Notes a use of the object in a host's pool, unless one was noted less than `fresh` ago. Checks its length, not its
/// content.
pub(super) fn note(directory: &Directory, visit: &mut Visit, op: &Operation, fresh: Duration) -> Outcome {
    let path = layout::object(&op.key, directory.is_sharded);
    let noted = visit.read(directory, |root| {
        let about = root.about(&path)?;
        let is_there = is_object_length(about.st_size as u64);
        if is_there && !is_fresh(&about, fresh) {
            touch(&root.open(&path, OFlags::RDONLY | OFlags::NONBLOCK)?)?;
        }
        Ok(is_there)
    });
    match noted {
        // Another user's object may not allow this: it then counts as last used when it was stored.
        Ok(true) | Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Outcome::Found,
        Ok(false) => Outcome::Absent,
        Err(error) => not_read(directory, op, error),
    }
}

/// The bytes that were read are not the block.
const DAMAGED: Outcome = Outcome::Failed(ErrorKind::Corrupt);

/// See the module documentation.
pub(super) fn load(
    directory: &Directory,
    visit: &mut Visit,
    buffer: &mut Buffer,
    op: &Operation,
    guard: &SlotGuard,
) -> Outcome {
    let Some((slot, _)) = op.slot else { return Outcome::Failed(ErrorKind::Invalid) };
    let path = layout::object(&op.key, directory.is_sharded);
    let file = match visit.read(directory, |root| directory.open_object(root, &path)) {
        Ok(file) => file,
        Err(error) => return not_read(directory, op, error),
    };
    let read = match read(directory, buffer, op, &file) {
        Err(DAMAGED) => read_again(directory, buffer, op, &file),
        read => read,
    };
    match read {
        Ok((checksum, about)) => {
            let copied = guard.use_slot(|| buffer.hand_out(slot, op.length_bytes));
            note_use(directory, &file, &about);
            match copied {
                Some(()) => Outcome::Loaded { length_bytes: op.length_bytes, checksum },
                None => Outcome::Failed(ErrorKind::Timeout),
            }
        }
        Err(DAMAGED) => {
            discard(directory, &path, &file, op);
            DAMAGED
        }
        Err(outcome) => outcome,
    }
}

/// Reads the block into the buffer and returns its checksum, and what is known of its file.
fn read(directory: &Directory, buffer: &mut Buffer, op: &Operation, file: &File) -> Result<(u64, Stat), Outcome> {
    let read_bytes = buffer.read_from(file, op.length_bytes);
    let read_bytes = read_bytes.map_err(|error| not_read(directory, op, error))?;
    if read_bytes >= HEADER_BYTES as u64 && directory.sealing.is_later(buffer.head()) {
        return Err(Outcome::Absent);
    }
    let about = fstat(file).map_err(|error| Outcome::Failed(kind_of(error)))?;
    let checksum = judge(&directory.sealing, buffer, op, read_bytes, about.st_size as u64).map_err(Outcome::Failed)?;
    Ok((checksum, about))
}

/// Reads a damaged object again, from the disk or the server instead of a local cache. If the damage differs from the
/// first read, the fault lies between the object and this host, not in the object.
fn read_again(directory: &Directory, buffer: &mut Buffer, op: &Operation, file: &File) -> Result<(u64, Stat), Outcome> {
    let first_sum = buffer.file_checksum(op.length_bytes);
    // Where the advice is ignored, the second read proves no more than the first.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    let read = match read(directory, buffer, op, file) {
        Err(DAMAGED) if buffer.file_checksum(op.length_bytes) == first_sum => return Err(DAMAGED),
        Err(DAMAGED) => Err(Outcome::Failed(ErrorKind::Io)),
        read => read,
    };
    directory.misreads.fetch_add(1, Relaxed);
    tracing::warn!(path = %directory.path.display(), "two reads of a shared object returned different bytes");
    read
}

/// The checksum of the requested block, if the bytes that were read are that block.
fn judge(
    sealing: &Sealing,
    buffer: &Buffer,
    op: &Operation,
    read_bytes: u64,
    size_bytes: u64,
) -> Result<u64, ErrorKind> {
    // A read that ended before the end of the file says nothing about the file; other hosts may read it correctly.
    if read_bytes < size_bytes.min(file_bytes(op.length_bytes)) {
        return Err(ErrorKind::Io);
    }
    let is_there = read_bytes >= layout::HEAD_BYTES;
    let header = is_there.then(|| sealing.read(buffer.head())).flatten().filter(|header| header.key == op.key);
    let header = header.ok_or(ErrorKind::Corrupt)?;
    if header.length_bytes != op.length_bytes {
        let has_it_all = size_bytes == file_bytes(header.length_bytes);
        return Err(if has_it_all { ErrorKind::Invalid } else { ErrorKind::Corrupt });
    }
    if read_bytes < file_bytes(op.length_bytes) {
        return Err(ErrorKind::Corrupt);
    }
    let mut sum = sealing.sum(&op.key, op.length_bytes);
    sum.update(buffer.block(op.length_bytes));
    sum.proves(&header).ok_or(ErrorKind::Corrupt)
}

fn note_use(directory: &Directory, file: &File, about: &Stat) {
    if !directory.is_read_only && !is_fresh(about, NOTE_USE_EVERY) {
        // As above.
        let _ = touch(file);
    }
}

/// Whether a use of the object was noted less than `limit` ago. One in the future shows that the clocks of this host
/// and of the server differ, and does not count.
fn is_fresh(about: &Stat, limit: Duration) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.checked_sub(touched_at(about)).is_some_and(|age| age < limit)
}

/// Removes a damaged object, unless it was replaced meanwhile, so that the block can be stored again.
fn discard(directory: &Directory, path: &Path, file: &File, op: &Operation) {
    if let Some(objects) = directory.damaged.add(Instant::now()) {
        let path = directory.path.join(path);
        let group = op.key.group;
        tracing::warn!(path = %path.display(), group, objects, "shared objects are damaged, or of another secret");
    }
    let is_same = |seen: &Stat, now: &Stat| (seen.st_dev, seen.st_ino) == (now.st_dev, now.st_ino);
    let Ok((folder, name)) = directory.enter().and_then(|root| resolve(&root, path)) else { return };
    let (Ok(seen), Ok(now)) = (fstat(file), folder.about(name)) else { return };
    let is_file = FileType::from_raw_mode(seen.st_mode) == FileType::RegularFile;
    let count = directory.grants.count();
    if !directory.is_read_only && is_file && is_same(&seen, &now) && folder.remove(name).is_ok() {
        directory.grants.removed(seen.st_size as u64, count);
    }
}

fn not_read(directory: &Directory, op: &Operation, error: Errno) -> Outcome {
    match error {
        Errno::NOENT | Errno::NOTDIR => Outcome::Absent,
        // Another host may have removed the file while it was open here.
        Errno::STALE if directory.has_no(&layout::object(&op.key, directory.is_sharded)) => Outcome::Absent,
        error => Outcome::Failed(kind_of(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_core::checksum::checksum;
    use forebay_core::tier::{OpId, OpKind};
    use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};

    use super::super::{config::FsConfig, writer};
    use super::*;
    use crate::uring::Region;

    const LENGTH: u64 = 5000;

    /// A hung mount delivers correct bytes after the waiter has gone: they come too late.
    #[test]
    fn bytes_that_come_after_the_waiter_left_stay_in_the_bounce_buffer() {
        let home = tempfile::tempdir().unwrap();
        let config = FsConfig::new(vec![home.path().to_owned()]);
        let directory = Arc::new(Directory::open(home.path(), &config).unwrap());
        let pool = Region::anonymous(8192).unwrap();
        let mut buffer = Buffer::new(&pool, LENGTH).unwrap();
        pool.write(0, &[5; LENGTH as usize]);
        let key = BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&[1]).unwrap() };
        let slot = Some((SlotId(0), Generation(0)));
        let (id, sum) = (OpId(1), checksum(&[5; LENGTH as usize]));
        let store =
            Operation { id, kind: OpKind::Store, key, slot, length_bytes: LENGTH, checksum: sum, lineage: None };
        let (outcome, _) = writer::store(&directory, &mut buffer, &store, &SlotGuard::default());
        assert!(matches!(outcome, Outcome::Stored), "{outcome:?}");

        pool.write(0, &[0x77; 8192]);
        let load_op = Operation { kind: OpKind::Load, ..store };
        let guard = SlotGuard::default();
        assert!(guard.give_up() && !guard.give_up());
        assert_eq!(
            load(&directory, &mut Visit::default(), &mut buffer, &load_op, &guard),
            Outcome::Failed(ErrorKind::Timeout)
        );
        assert_eq!(checksum(buffer.block(LENGTH)), sum, "they came");
        let mut bytes = [0; 8192];
        pool.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0x77), "and went no further");

        let waiting = SlotGuard::default();
        let loaded = Outcome::Loaded { length_bytes: LENGTH, checksum: sum };
        assert_eq!(load(&directory, &mut Visit::default(), &mut buffer, &load_op, &waiting), loaded);
        assert_eq!(waiting.use_slot(|| waiting.give_up()), Some(false), "a copy that runs is not given up");
    }
}
