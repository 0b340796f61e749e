//! One block between a slot and an object: the header, then the payload.
//!
//! Invariants: a slot is read and written by plain copies without a wait in the middle, and written only with verified
//! bytes. An object is removed only after two requests that found the same damage, since bits may flip in transit. An
//! object in a later format is a miss, and is not removed or replaced. A host with a secret replaces objects without a
//! MAC.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use forebay_core::checksum::Checksum;
use forebay_core::tier::{OpKind, Operation, Outcome};
use forebay_core::{BlockKey, ErrorKind};
use futures_util::TryStreamExt;
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, ObjectStoreExt};

use crate::cancel::SlotGuard;
use crate::header::{HEADER_BYTES, Sealing};
use crate::seldom::Seldom;
use crate::uring::Region;

/// Parts of one object that are uploaded at a time.
const PARTS_AT_ONCE: usize = 4;
/// The bytes that were read are not the block.
const DAMAGED: Outcome = Outcome::Failed(ErrorKind::Corrupt);

/// Everything that a request needs.
pub(super) struct Place {
    pub store: AmazonS3,
    pub prefix: String,
    pub sealing: Sealing,
    pub part_bytes: u64,
    pub pool: Region,
    /// Whether objects are not removed, however damaged.
    pub is_read_only: bool,
    /// Warnings of damaged objects. After a change of the secret, each object of before is one.
    pub damaged: Seldom,
    /// Loads whose first answer was damaged and whose second one was not, or was damaged in another way.
    pub misreads: Arc<AtomicU64>,
}

impl Place {
    fn path(&self, op: &Operation) -> Path {
        path_of(&op.key, &self.prefix)
    }

    /// Carries the operation out. The flag beside the outcome is true if a store found its block there.
    pub async fn perform(&self, op: &Operation, guard: &SlotGuard) -> (Outcome, bool) {
        let outcome = match op.kind {
            OpKind::Load => self.load(op, guard).await,
            // A bucket evicts nothing by use: it is only asked whether its own rules ended the object.
            OpKind::Exists | OpKind::Touch { .. } => self.find(op).await,
            OpKind::Remove => self.remove(op).await,
            OpKind::Store => return self.store(op, guard).await,
        };
        (outcome, false)
    }

    async fn find(&self, op: &Operation) -> Outcome {
        match self.store.head(&self.path(op)).await {
            Ok(about) if about.size > HEADER_BYTES as u64 => Outcome::Found,
            Ok(_) => Outcome::Absent,
            Err(error) => not_done(&error),
        }
    }

    /// S3 reports success even if the object did not exist, so this checks for it first.
    async fn remove(&self, op: &Operation) -> Outcome {
        let path = self.path(op);
        let removed = match self.store.head(&path).await {
            Ok(_) => self.store.delete(&path).await,
            Err(error) => Err(error),
        };
        removed.map_or_else(|error| not_done(&error), |()| Outcome::Removed)
    }

    async fn load(&self, op: &Operation, guard: &SlotGuard) -> Outcome {
        let Some((slot, _)) = op.slot else { return Outcome::Failed(ErrorKind::Invalid) };
        let path = self.path(op);
        let (mut read, mut pieces) = self.read(op, &path).await;
        if matches!(read, Err(DAMAGED)) {
            let first_sum = sum_of(&pieces);
            (read, pieces) = self.read(op, &path).await;
            if matches!(read, Err(DAMAGED)) && sum_of(&pieces) != first_sum {
                read = Err(Outcome::Failed(ErrorKind::Io));
            }
            if !matches!(read, Err(DAMAGED)) {
                self.misreads.fetch_add(1, Relaxed);
                tracing::warn!(%path, "two reads of an object returned different bytes");
            }
        }
        match read {
            Ok(checksum) => {
                let copied = guard.use_slot(|| {
                    let mut at = slot.offset();
                    payload(&pieces, |bytes| {
                        self.pool.write(at, bytes);
                        at += bytes.len() as u64;
                    });
                });
                let loaded = Outcome::Loaded { length_bytes: op.length_bytes, checksum };
                copied.map_or(Outcome::Failed(ErrorKind::Timeout), |()| loaded)
            }
            Err(outcome) => {
                if outcome == DAMAGED
                    && let Some(objects) = self.damaged.add(Instant::now())
                {
                    tracing::warn!(%path, objects, "objects are damaged, or of another secret");
                }
                if outcome == DAMAGED && !self.is_read_only {
                    // So that the block can be stored again. A failure shows at the next store.
                    let _ = self.store.delete(&path).await;
                }
                outcome
            }
        }
    }

    /// The block's checksum, if the object is the block. One request returns header and payload, which are compared
    /// with each other. No bytes beyond the block's length are requested.
    async fn read(&self, op: &Operation, path: &Path) -> (Result<u64, Outcome>, Vec<impl AsRef<[u8]> + use<>>) {
        match self.fetch(op, path).await {
            Ok((object_bytes, pieces)) => (judge(&self.sealing, op, object_bytes, &pieces), pieces),
            Err(error) => (Err(not_done(&error)), Vec::new()),
        }
    }

    async fn fetch(&self, op: &Operation, path: &Path) -> Result<(u64, Vec<impl AsRef<[u8]> + use<>>), Error> {
        let range = GetRange::Bounded(0..HEADER_BYTES as u64 + op.length_bytes);
        let got = object_store::ObjectStore::get_opts(&self.store, path, GetOptions::new().with_range(Some(range)));
        let got = got.await?;
        Ok((got.meta.size, got.into_stream().try_collect::<Vec<_>>().await?))
    }

    async fn store(&self, op: &Operation, guard: &SlotGuard) -> (Outcome, bool) {
        let path = self.path(op);
        let bytes = HEADER_BYTES as u64 + op.length_bytes;
        let stored = Outcome::Stored;
        match self.store.head(&path).await {
            Ok(about) if self.stays(op, &path, about.size == bytes).await => return (stored, true),
            Ok(_) | Err(Error::NotFound { .. }) => {}
            Err(error) => return (not_done(&error), false),
        }
        let object = match guard.use_slot(|| self.object(op)) {
            Some(Ok(object)) => object,
            Some(Err(kind)) => return (Outcome::Failed(kind), false),
            None => return (Outcome::Failed(ErrorKind::Timeout), false),
        };
        let sent = match bytes > self.part_bytes {
            true => self.send_parts(&path, &object.into()).await,
            false => self.store.put(&path, object.into()).await.map(drop),
        };
        (sent.map_or_else(|error| not_done(&error), |()| stored), false)
    }

    /// Whether the object is left as it is. Without a secret its length says enough, and it is not requested.
    async fn stays(&self, op: &Operation, path: &Path, is_whole: bool) -> bool {
        if is_whole && !self.sealing.has_secret() {
            return true;
        }
        let Ok(head) = self.store.get_range(path, 0..HEADER_BYTES as u64).await else { return false };
        let is_kept = |head| self.sealing.keeps(head, &op.key, op.length_bytes, is_whole);
        head[..].try_into().is_ok_and(is_kept)
    }

    /// The object of the block in the operation's slot.
    fn object(&self, op: &Operation) -> Result<Vec<u8>, ErrorKind> {
        let (slot, _) = op.slot.ok_or(ErrorKind::Invalid)?;
        let mut object = vec![0; HEADER_BYTES + op.length_bytes as usize];
        let mut sum = self.sealing.sum(&op.key, op.length_bytes);
        sum.copy_from(&self.pool, slot.offset(), &mut object[HEADER_BYTES..]);
        object[..HEADER_BYTES].copy_from_slice(&sum.header().write());
        if sum.checksum() == op.checksum { Ok(object) } else { Err(ErrorKind::Corrupt) }
    }

    /// The object appears when all parts were uploaded and joined, or not at all.
    async fn send_parts(&self, path: &Path, object: &object_store::PutPayload) -> Result<(), Error> {
        let object: Vec<_> = object.iter().collect();
        let part_bytes = self.part_bytes as usize;
        let mut upload = self.store.put_multipart(path).await?;
        let mut parts = Vec::new();
        for whole in object {
            for at in (0..whole.len()).step_by(part_bytes) {
                parts.push(upload.put_part(whole.slice(at..(at + part_bytes).min(whole.len())).into()));
            }
        }
        let parts = futures_util::stream::iter(parts.into_iter().map(Ok));
        let sent = match parts.try_for_each_concurrent(PARTS_AT_ONCE, |part| part).await {
            Ok(()) => upload.complete().await.map(drop),
            Err(error) => Err(error),
        };
        if sent.is_err() {
            // The bucket's own rule for unfinished uploads removes what is left.
            let _ = upload.abort().await;
        }
        sent
    }
}

/// `<prefix>/<namespace>/<group>-<hash>`, in hex digits.
pub(super) fn path_of(key: &BlockKey, prefix: &str) -> Path {
    let name = format!("{}/{:04x}-{}", key.namespace, key.group, key.hash);
    if prefix.is_empty() { Path::from(name) } else { Path::from(format!("{prefix}/{name}")) }
}

/// The checksum of the requested block, if the bytes are that block.
fn judge(sealing: &Sealing, op: &Operation, object_bytes: u64, pieces: &[impl AsRef<[u8]>]) -> Result<u64, Outcome> {
    let mut head = Vec::with_capacity(HEADER_BYTES);
    for piece in pieces.iter().map(AsRef::as_ref) {
        head.extend_from_slice(&piece[..piece.len().min(HEADER_BYTES - head.len())]);
    }
    let head: &[u8; HEADER_BYTES] = head[..].try_into().map_err(|_| DAMAGED)?;
    if sealing.is_later(head) {
        return Err(Outcome::Absent);
    }
    let header = sealing.read(head).filter(|header| header.key == op.key).ok_or(DAMAGED)?;
    if object_bytes != HEADER_BYTES as u64 + header.length_bytes {
        return Err(DAMAGED);
    }
    if header.length_bytes != op.length_bytes {
        return Err(Outcome::Failed(ErrorKind::Invalid));
    }
    let (mut sum, mut bytes) = (sealing.sum(&op.key, op.length_bytes), 0);
    payload(pieces, |piece| {
        sum.update(piece);
        bytes += piece.len() as u64;
    });
    sum.proves(&header).filter(|_| bytes == op.length_bytes).ok_or(DAMAGED)
}

/// The checksum of all bytes that a request returned.
fn sum_of(pieces: &[impl AsRef<[u8]>]) -> u64 {
    let mut sum = Checksum::new();
    pieces.iter().for_each(|piece| sum.update(piece.as_ref()));
    sum.finish()
}

/// The bytes after the header, piece by piece.
fn payload(pieces: &[impl AsRef<[u8]>], mut each: impl FnMut(&[u8])) {
    let mut head_bytes = HEADER_BYTES;
    for piece in pieces.iter().map(AsRef::as_ref) {
        let skipped = piece.len().min(head_bytes);
        head_bytes -= skipped;
        each(&piece[skipped..]);
    }
}

/// Maps an error to a tier's outcome.
fn not_done(error: &Error) -> Outcome {
    match error {
        Error::NotFound { .. } => Outcome::Absent,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Outcome::Failed(ErrorKind::Unsupported),
        _ => Outcome::Failed(ErrorKind::Io),
    }
}
