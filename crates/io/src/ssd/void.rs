//! Blocks that were purged while their disk was away.
//!
//! A purge reaches the disks that are there. Those note it in their lists, so that a disk which comes later can be
//! told, whatever became of the pool and of the host meanwhile. All blocks of the namespace that this disk has are void
//! from then on: noted in its own list at once, not served from then on, and withdrawn some at a time. This daemon, or
//! one before, may have served some of them into the pool and to other disks, even if the disk has none left. So the
//! namespace is due again until the owner has purged it from everything once more.

use std::collections::BTreeMap;

use forebay_core::{BlockKey, NamespaceId};

use super::disk::Disk;
use super::index::Entry;
use super::lists::{Reader, Step, Walk};

/// Records that are looked at in one turn.
const RECORDS_AT_A_TIME: u32 = 256;

impl Disk {
    /// These purges, each with its time, were carried out on other disks without this one.
    pub(super) fn void(&mut self, purges: BTreeMap<NamespaceId, u64>) {
        if !self.is_new() {
            let (disk, namespaces) = (self.name(), purges.len());
            tracing::info!(disk, namespaces, "namespaces were purged while a disk was away: they are purged again");
        }
        self.purges.hear(&purges, self.log.end_of_all_records(), self.is_new());
        let end = self.space.end();
        self.void.ends.extend(purges.keys().map(|namespace| (*namespace, end)));
        self.void.walk = Some(Walk::new(Reader::Void));
        self.has_more = true;
    }

    /// These namespaces were purged while the disk could not be read.
    pub(super) fn void_unread(&mut self, namespaces: impl Iterator<Item = NamespaceId>) {
        let end = self.space.end();
        self.void.ends.extend(namespaces.map(|namespace| (namespace, end)));
        self.void.walk = Some(Walk::new(Reader::Void));
    }

    /// It was blank when it was opened: nothing can have come from it.
    pub(super) fn is_new(&self) -> bool {
        self.recovery.was_made
    }

    /// Goes on to withdraw void blocks.
    pub(super) fn withdraw_void(&mut self) {
        let Some(mut walk) = self.void.walk.take() else { return };
        let ends = std::mem::take(&mut self.void.ends);
        let step = self.walk_on(&mut walk, RECORDS_AT_A_TIME, |record| ends.contains_key(&record.key.namespace));
        self.void.ends = ends;
        match step {
            Step::Blocks(segment, blocks) => {
                for (record, entry) in blocks {
                    let position = self.space.position(segment, record.first_page);
                    if entry.is_served() && self.void.has(record.key.namespace, position) {
                        self.withdraw(entry.block);
                        self.tell_evicted(record.key);
                    }
                }
                (self.void.walk, self.has_more) = (Some(walk), true);
            }
            Step::Waits => self.void.walk = Some(walk),
            Step::End => {}
        }
    }

    /// The block of that key, unless it is not served, is void, or is given up.
    pub(super) fn served(&self, key: &BlockKey) -> Option<Entry> {
        let position = |Entry { spot, .. }: &Entry| self.space.position(spot.segment, spot.first_page);
        let is_lost = |entry: &Entry| self.space.segments[entry.spot.segment as usize].is_lost;
        let found = self.index.get(key).filter(|entry| !self.void.has(key.namespace, position(entry)));
        found.filter(|entry| !(self.lists.is_giving_up && is_lost(entry)))
    }
}
