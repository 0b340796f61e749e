//! The disk's list of purges: of which namespaces which blocks are void, whatever the log says.
//!
//! A removal in the log counts as long as its page, all heads before it in its segment, and the segment's header can be
//! read. What spoils one of them would bring all blocks of a purge back, and nothing would tell that from a log that
//! ended there. So a purge ends on a disk with a record in this list, which lies apart from the log, twice.
//!
//! Invariants: a record stays true for ever, so a page of any age may be believed, and what two copies say adds up. A
//! purge counts as noted when both copies were flushed and read back. The list is bounded: if it is full, the record of
//! the earliest purge goes, and that purge relies on the log again.

use std::collections::BTreeMap;

use forebay_core::{ErrorKind, NamespaceId};

use super::layout::{PURGES_PAGES, PURGES_PER_PAGE, PurgeRecord, Record, RecordKind};
use crate::Seldom;

const MOST_RECORDS: usize = PURGES_PAGES as usize * PURGES_PER_PAGE;

/// See the module documentation.
#[derive(Default)]
pub(super) struct Purges {
    pub records: BTreeMap<NamespaceId, PurgeRecord>,
    /// The copy that is to be written next: the first if the list has changed, or a copy is not what it should be.
    pub due: Option<usize>,
    pub writing: Option<Writing>,
    /// How writing what was noted last has ended.
    pub ended: Option<Result<(), ErrorKind>>,
    pub failures: Seldom,
}

/// The list on its way to the disk, one copy after the other.
pub(super) struct Writing {
    pub copy: usize,
    pub step: Step,
    pub records: Vec<PurgeRecord>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Write,
    Sync,
    ReadBack,
}

impl Writing {
    pub fn chunks(&self) -> impl Iterator<Item = &[PurgeRecord]> {
        self.records.chunks(PURGES_PER_PAGE)
    }

    pub fn pages(&self) -> u32 {
        self.chunks().count() as u32
    }
}

impl Purges {
    /// Adds what a page says.
    pub fn found(&mut self, records: &[PurgeRecord]) {
        records.iter().for_each(|record| self.merge(record));
    }

    /// An earlier purge of the namespace may have a higher number, and stays true.
    fn merge(&mut self, record: &PurgeRecord) {
        let known = self.records.entry(record.namespace).or_insert(*record);
        (known.sequence, known.life) = (known.sequence.max(record.sequence), known.life.max(record.life));
    }

    /// A copy is damaged: it is written again.
    pub fn renew(&mut self) {
        self.due = (!self.records.is_empty()).then_some(0);
    }

    /// No record has a lower number than this that is written after the list was read.
    pub fn last_sequence(&self) -> u64 {
        self.records.values().map(|record| record.sequence).max().unwrap_or(0)
    }

    /// Whether the block was purged.
    pub fn cover(&self, record: &Record) -> bool {
        let is_earlier = |purge: &PurgeRecord| record.sequence < purge.sequence;
        record.kind == RecordKind::Block && self.records.get(&record.key.namespace).is_some_and(is_earlier)
    }

    pub fn is_idle(&self) -> bool {
        self.due.is_none() && self.writing.is_none()
    }

    /// Whether all that was noted is on the disk for good; none while it is being written.
    pub fn noted(&self) -> Option<bool> {
        if self.is_idle() { Some(self.ended == Some(Ok(()))) } else { None }
    }

    /// `oldest_life`: all that is on the disk is of this life or a later one.
    pub fn add(&mut self, namespaces: impl Iterator<Item = NamespaceId>, sequence: u64, life: u64, oldest_life: u64) {
        self.records.retain(|_, record| record.life >= oldest_life);
        namespaces.for_each(|namespace| self.merge(&PurgeRecord { namespace, sequence, life }));
        self.cut();
        (self.due, self.ended) = (Some(0), None);
    }

    /// Leaves the latest, as many as the disk has room for. Two copies together may have twice as many: those of a full
    /// list whose second copy is of before.
    pub fn cut(&mut self) {
        let excess = self.records.len().saturating_sub(MOST_RECORDS);
        if excess > 0 {
            let mut order: Vec<_> = self.records.values().map(|record| (record.sequence, record.namespace)).collect();
            order.sort_unstable();
            order[..excess].iter().for_each(|(_, namespace)| _ = self.records.remove(namespace));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_keeps_the_latest_purges_and_those_whose_blocks_may_be_there() {
        let mut purges = Purges::default();
        let most = MOST_RECORDS as u128;
        (0..most + 50).for_each(|n| purges.add([NamespaceId(n)].into_iter(), n as u64, 10, 0));
        assert_eq!(purges.records.len(), MOST_RECORDS);
        assert!(purges.records.keys().all(|namespace| namespace.0 >= 50));
        purges.add((0..100).map(NamespaceId), 9_000, 12, 0);
        assert_eq!(purges.records.len(), MOST_RECORDS);
        assert!((0..100).all(|n| purges.records[&NamespaceId(n)].sequence == 9_000));
        purges.add([NamespaceId(7)].into_iter(), 10_000, 20, 11);
        assert_eq!(purges.records.len(), 100, "of the life before the oldest nothing is there");
        assert_eq!((purges.records[&NamespaceId(7)].sequence, purges.last_sequence()), (10_000, 10_000));
    }

    #[test]
    fn what_copies_of_any_age_say_adds_up() {
        let record = |n, sequence| PurgeRecord { namespace: NamespaceId(n), sequence, life: sequence };
        let mut purges = Purges::default();
        [[record(1, 5), record(2, 9)], [record(1, 7), record(3, 1)], [record(1, 6), record(2, 8)]]
            .iter()
            .for_each(|page| purges.found(page));
        assert_eq!(purges.records.into_values().collect::<Vec<_>>(), [record(1, 7), record(2, 9), record(3, 1)]);
    }
}
