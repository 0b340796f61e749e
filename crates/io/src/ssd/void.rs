//! Blocks that were purged while their disk was away.
//!
//! A purge reaches the disks that are there. Those note it in their lists, so that a disk which comes later can be
//! told, whatever became of the pool and of the host meanwhile. All blocks of the namespace that this disk has are void
//! from then on: noted in its own list at once, withdrawn some at a time. This daemon, or one before, may have served
//! some of them into the pool and to other disks, even if the disk has none left. So the namespace is due again until
//! the owner has purged it from everything once more.

use std::collections::BTreeMap;

use forebay_core::{BlockKey, NamespaceId};

use super::disk::Disk;
use super::index::Entry;
use super::purges::Void;

impl Disk {
    /// These purges, each with its time, were carried out on other disks without this one.
    pub(super) fn void(&mut self, purges: BTreeMap<NamespaceId, u64>) {
        if !self.is_new() {
            let (disk, namespaces) = (self.name(), purges.len());
            tracing::info!(disk, namespaces, "namespaces were purged while a disk was away: they are purged again");
        }
        let end = self.log.end_of_all_records();
        self.purges.hear(&purges, end, self.is_new());
        let void = self.void.get_or_insert_default();
        void.ends.extend(purges.keys().map(|namespace| (*namespace, end)));
        void.at = 0;
    }

    /// It was blank when it was opened: nothing can have come from it.
    pub(super) fn is_new(&self) -> bool {
        self.recovery.was_made
    }

    /// Withdraws void blocks among `places` places of the index, and appends their keys. False if there is nothing to
    /// do.
    pub(super) fn withdraw_void(&mut self, places: u32, withdrawn: &mut Vec<BlockKey>) -> bool {
        let Some(void) = self.void.take() else { return false };
        let (entries, next) = self.index.piece(void.at, places);
        let is_void = |entry: &Entry| !entry.is_withdrawn && void.has(&entry.record());
        let keys: Vec<BlockKey> = entries.filter(is_void).map(Entry::key).collect();
        keys.iter().for_each(|key| self.withdraw(key));
        withdrawn.extend(keys);
        self.void = next.map(|next| Void { at: next, ..void });
        true
    }

    /// The block of that key, unless it is not served, or is about to be withdrawn.
    pub(super) fn served(&self, key: &BlockKey) -> Option<Entry> {
        let is_void = |entry: &Entry| self.void.as_ref().is_some_and(|void| void.has(&entry.record()));
        self.index.get(key).filter(|entry| !is_void(entry))
    }
}
