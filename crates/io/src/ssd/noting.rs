//! The list of purges on its way to the disk: each copy is written, flushed and read back, one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use forebay_core::{ErrorKind, NamespaceId};

use super::disk::Disk;
use super::io::Flight;
use super::layout::{PAGE, PAGE_BYTES, PURGES_AT, PurgeRecord};
use super::purges::{Step, Writing};
use super::staging::Staging;
use crate::uring::{Span, Work};

impl Disk {
    /// Nothing of these namespaces is on the disk, or on its way there. Each with the time of its purge. Of those that
    /// are `unread` the disk may have blocks that nobody has named: they are void, and the namespace is due again,
    /// because no removal in the log says so. A segment that has lost its list may have such blocks too: until it is
    /// reclaimed, the list of purges alone says that they are void.
    pub(super) fn note_purged(&mut self, purged: &BTreeMap<NamespaceId, u64>, unread: &BTreeSet<NamespaceId>) {
        self.purges.has_purged = true;
        let (others, named): (BTreeMap<_, _>, BTreeMap<_, _>) =
            purged.iter().map(|(namespace, time)| (*namespace, *time)).partition(|(other, _)| unread.contains(other));
        if !others.is_empty() {
            self.purges.hear(&others, self.log.end_of_all_records(), false);
            self.void_unread(others.into_keys());
        }
        let is_all_named = self.lists.lost == 0;
        let end = if is_all_named { self.log.end_of_records() } else { self.log.end_of_all_records() };
        self.purges.add(named.into_iter(), end);
    }

    /// Begins to write the copy that is due.
    pub(super) fn write_purges(&mut self) {
        let Some(copy) = self.purges.due.take_if(|_| self.purges.writing.is_none()) else { return };
        let writing = self.purges.to_write(copy);
        let pages: Vec<u8> =
            writing.records.iter().flat_map(|records| PurgeRecord::encode(&self.geometry, records)).collect();
        let (at, span) = place(&writing);
        self.memory.write(span, &pages);
        self.purges.writing = Some(writing);
        self.write(Flight::Purges, Work::Write { at, spans: span.into() });
    }

    /// A step has ended.
    pub(super) fn purges_ended(&mut self, result: Result<u64, ErrorKind>) {
        let Some(mut writing) = self.purges.writing.take() else { unreachable!("one of its steps was in flight") };
        if self.purges.due.is_some() {
            // More was purged meanwhile: all of it begins anew.
            return;
        }
        let (copy, (at, span)) = (writing.copy, place(&writing));
        let next = match (result, writing.step) {
            (Err(kind), _) => return self.end_purges(Err(kind)),
            (Ok(_), Step::Write) => Step::Sync,
            (Ok(_), Step::Sync) => Step::ReadBack,
            (Ok(_), Step::ReadBack) if !self.is_read_back(&writing) => {
                return self.end_purges(Err(ErrorKind::Corrupt));
            }
            (Ok(_), Step::ReadBack) if copy + 1 < PURGES_AT.len() => return self.purges.due = Some(copy + 1),
            (Ok(_), Step::ReadBack) => return self.end_purges(Ok(())),
        };
        let work = match next {
            Step::Sync => Work::Sync,
            _ => {
                // What a read leaves alone is not taken for what was written.
                self.memory.write(span, &vec![0; span.len as usize]);
                Work::Read { at, span, checksum: None }
            }
        };
        writing.step = next;
        self.purges.writing = Some(writing);
        self.io.start(Flight::Purges, work);
    }

    fn is_read_back(&self, writing: &Writing) -> bool {
        let mut bytes = vec![0; writing.pages.len() * PAGE_BYTES];
        self.memory.read(place(writing).1, &mut bytes);
        let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
        let is_whole = |(page, records)| PurgeRecord::decode(page, &self.geometry).as_ref() == Some(records);
        pages.iter().zip(&writing.records).all(is_whole)
    }

    fn end_purges(&mut self, result: Result<(), ErrorKind>) {
        self.purges.end(result, self.now);
        if let Err(kind) = result
            && self.purges.failures.add(Instant::now()).is_some()
        {
            let (disk, why) = (self.name(), format!("{kind:?}").to_lowercase());
            let hint =
                "the purge goes on trying; if this lasts, replace the disk: it does not keep what is written to it";
            tracing::error!(disk, why, hint, "a disk does not keep the list of purges, so no purge ends on it");
        }
    }
}

/// Where the pages are on the disk, and in the staging memory.
fn place(Writing { copy, pages, .. }: &Writing) -> (u64, Span) {
    (PURGES_AT[*copy] + u64::from(pages.start) * PAGE, Staging::purges(pages.len() as u32))
}
