//! Whether a disk is still this daemon's.
//!
//! A lock keeps other daemons from a file, and from a device under the same path. It says nothing to a daemon of
//! another host, nor to one that has the device under another path. So each daemon signs the superblock of a disk when
//! it opens it, and reads the superblock again all the time. Invariants: the last to sign has the disk. Another that
//! finds this signature begins nothing more on the disk, keeps nothing that was not acknowledged, and serves nothing of
//! it. The new owner of a device reads what is there when the other has had time to stop. No write begins on a look
//! from before that time, so a daemon that was stopped meanwhile looks before it writes.

use forebay_core::tier::Outcome;
use forebay_core::{Error, ErrorKind};

use super::disk::Disk;
use super::io::Flight;
use super::layout::Geometry;
use super::owner::{Owner, taken_by_another};
use super::staging::{Staging, page_at};
use crate::uring::Work;

impl Disk {
    pub(super) fn look_again(&mut self) {
        if self.watch.begin_look(self.now) {
            self.io.start(Flight::Look, Work::Read { at: 0, span: Staging::look(), checksum: None });
        }
    }

    /// A superblock that cannot be read is nobody's signature.
    pub(super) fn looked(&mut self, result: Result<u64, ErrorKind>) {
        self.watch.end_look(result.is_ok());
        let page = page_at(&self.memory, Staging::look());
        if result.is_err() {
            return;
        }
        if self.watch.owner.is_of_another(&page, &self.geometry) {
            let (disk, error) = (self.name(), taken_by_another());
            tracing::error!(disk, error = error.to_string(), hint = error.hint_text(), "a disk is not used any more");
            self.lose(error);
        } else if Geometry::decode_superblock(&page).is_some() {
            self.watch.owner = Owner::Is(Geometry::owner_in(&page));
        }
    }

    /// The disk is not used any more: ends what has not begun.
    pub(super) fn lose(&mut self, why: Error) {
        (self.watch.is_taken, self.why_taken) = (true, Some(why));
        self.fail_waiting(ErrorKind::Unavailable);
        while let Some(op) = self.reads.pop(u64::MAX) {
            self.complete(op.id, Outcome::Failed(ErrorKind::Unavailable));
        }
    }

    /// Whether another has the disk, and nothing moves between it and the pool any more. The stores that were under way
    /// have failed then.
    pub(super) fn is_gone(&mut self) -> bool {
        let is_gone = self.watch.is_taken && self.io.in_flight() == 0;
        if is_gone {
            let items = std::mem::take(&mut self.log.batches).into_values().flat_map(|batch| batch.items);
            for op in items.filter_map(|item| item.op) {
                self.complete(op, Outcome::Failed(ErrorKind::Unavailable));
            }
        }
        is_gone
    }
}
