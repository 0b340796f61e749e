//! The disk's list of purges: of which namespaces which blocks are void, whatever the log says.
//!
//! A removal in the log counts as long as its page, all heads before it in its segment, and the segment's header can be
//! read. What spoils one of them would bring all blocks of a purge back, and nothing would tell that from a log that
//! ended there. So a purge ends on a disk with a record in this list, which lies apart from the log, twice.
//!
//! Invariants: a record stays true for ever, so a page of any age may be believed, and what two copies say adds up. A
//! record keeps its page, so that a purge writes one page of each copy. Once the list was written, all pages of both
//! copies have something to say: one of zeros is damaged. A purge counts as noted when both copies were flushed and
//! read back. The list is bounded: if it is full, the record of the earliest purge goes, and that purge relies on the
//! log again.
//!
//! A disk that was away while a namespace was purged does not know of it, but the other disks of the host do: the tier
//! compares the lists of its disks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::{ErrorKind, NamespaceId};

use super::layout::{
    FIRST_TIME, Geometry, PURGES_AT, PURGES_PAGES, PURGES_PER_PAGE, Page, PurgeRecord, Record, RecordKind,
};
use super::lists::Walk;
use super::space::Position;
use crate::Seldom;

const MOST_RECORDS: usize = PURGES_PAGES as usize * PURGES_PER_PAGE;
const COPIES: usize = PURGES_AT.len();
/// Between attempts to write the list.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The pages of both copies; none for a page that could not be read.
pub(super) type Copies = [Vec<Option<Page>>; COPIES];

/// See the module documentation.
#[derive(Default)]
pub(super) struct Purges {
    records: BTreeMap<NamespaceId, Noted>,
    /// Pages that one copy or both do not have as they are here.
    changed: BTreeSet<u32>,
    /// The copy that is to be written next: the first if the list has changed, or a copy is not what it should be.
    pub due: Option<usize>,
    pub writing: Option<Writing>,
    /// How writing what was noted last has ended.
    ended: Option<Result<(), ErrorKind>>,
    pub failures: Seldom,
    pub found: Found,
    /// Whether the daemon has purged anything on this disk itself.
    pub has_purged: bool,
    /// When what could not be written is written again, and how long that is after the last failure.
    retry_at: Option<Duration>,
    pause: Duration,
}

struct Noted {
    record: PurgeRecord,
    /// None until one is chosen.
    page: Option<u32>,
}

/// What the disk had when it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Found {
    /// Of each copy.
    pub damaged_pages: [u32; COPIES],
    /// Damaged in both.
    pub lost_pages: u32,
}

/// Pages of the list on their way to the disk, one copy after the other.
pub(super) struct Writing {
    pub copy: usize,
    pub step: Step,
    pub pages: Range<u32>,
    pub records: Vec<Vec<PurgeRecord>>,
}

/// What was purged while the disk was away, or could not be read.
#[derive(Default)]
pub(super) struct Void {
    /// Of each namespace, the end of the log when the disk heard of the purge: what is stored behind it is another
    /// block. They stay: a block whose record cannot be read is not served either.
    pub ends: BTreeMap<NamespaceId, Position>,
    /// Through the blocks that are to be withdrawn.
    pub walk: Option<Walk>,
}

impl Void {
    pub fn has(&self, namespace: NamespaceId, position: Position) -> bool {
        self.ends.get(&namespace).is_some_and(|end| position < *end)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Write,
    Sync,
    ReadBack,
}

impl Purges {
    /// What was purged, as far as one of two copies says it. If they differ, or one is damaged, all is written again.
    pub fn read(copies: &Copies, geometry: &Geometry) -> Purges {
        let mut purges = Purges { changed: (0..PURGES_PAGES).collect(), ..Purges::default() };
        let is_zero = |page: &Option<Page>| page.as_ref().is_some_and(|page| page.iter().all(|byte| *byte == 0));
        if copies.iter().flatten().all(is_zero) {
            // It was never written.
            return purges;
        }
        let decode = |page: &Option<Page>| PurgeRecord::decode(page.as_ref()?, geometry);
        let [first, second] = copies.each_ref().map(|copy| copy.iter().map(decode).collect::<Vec<_>>());
        let mut found = 0;
        for (number, pair) in (0..).zip(first.iter().zip(&second)) {
            let (one, other) = pair;
            purges.found.lost_pages += u32::from(one.is_none() && other.is_none());
            for record in one.iter().chain(other).flatten() {
                purges.merge(record, Some(number));
            }
            found += one.as_ref().map_or(0, Vec::len);
        }
        purges.found.damaged_pages =
            [&first, &second].map(|copy| copy.iter().filter(|page| page.is_none()).count() as u32);
        if first == second && purges.found.damaged_pages[0] == 0 && found == purges.records.len() {
            purges.changed.clear();
        } else {
            purges.cut();
            purges.place();
            purges.due = Some(0);
        }
        purges
    }

    /// An earlier purge of the namespace may have a higher number, and stays true.
    fn merge(&mut self, record: &PurgeRecord, page: Option<u32>) {
        let noted = self.records.entry(record.namespace).or_insert(Noted { record: *record, page });
        let (before, known) = (noted.record, &mut noted.record);
        known.sequence = known.sequence.max(record.sequence);
        if record.time >= known.time {
            let is_same = record.time == known.time;
            (known.time, known.is_due_again) = (record.time, record.is_due_again || is_same && known.is_due_again);
        }
        self.changed.extend(noted.page.filter(|_| noted.record != before));
    }

    /// No record has a lower number than this that is written after the list was read.
    pub fn last_sequence(&self) -> u64 {
        self.records.values().map(|noted| noted.record.sequence).max().unwrap_or(0)
    }

    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether the block was purged.
    pub fn cover(&self, record: &Record) -> bool {
        let is_earlier = |noted: &Noted| record.sequence < noted.record.sequence;
        record.kind == RecordKind::Block && self.records.get(&record.key.namespace).is_some_and(is_earlier)
    }

    pub fn is_idle(&self) -> bool {
        self.due.is_none() && self.writing.is_none()
    }

    /// Whether all that was noted is on the disk for good; none while it is being written.
    pub fn noted(&self) -> Option<bool> {
        if self.is_idle() { Some(self.ended == Some(Ok(()))) } else { None }
    }

    /// Namespaces of which the disk has no block with a lower number than `sequence`, and when each was purged.
    pub fn add(&mut self, purged: impl Iterator<Item = (NamespaceId, u64)>, sequence: u64) {
        self.add_records(purged.map(|(namespace, time)| PurgeRecord {
            namespace,
            sequence,
            time,
            is_due_again: false,
        }));
    }

    /// Namespaces that were purged while the disk was away. `sequence` as in [`Purges::add`]; unless the disk `is_new`,
    /// they are to be purged again.
    pub fn hear(&mut self, purged: &BTreeMap<NamespaceId, u64>, sequence: u64, is_new: bool) {
        let record = |(namespace, time): (&NamespaceId, &u64)| PurgeRecord {
            namespace: *namespace,
            sequence,
            time: *time,
            is_due_again: !is_new,
        };
        self.add_records(purged.iter().map(record));
    }

    /// Namespaces that are to be purged again, because the disk was away when they were purged.
    pub fn due_again(&self) -> impl Iterator<Item = NamespaceId> {
        self.records.values().filter(|noted| noted.record.is_due_again).map(|noted| noted.record.namespace)
    }

    fn add_records(&mut self, records: impl Iterator<Item = PurgeRecord>) {
        for record in records {
            self.merge(&record, None);
            // What one purge says at first and at last, at the same time.
            if let Some(noted) = self.records.get_mut(&record.namespace)
                && noted.record.time == record.time
                && noted.record.is_due_again != record.is_due_again
            {
                noted.record.is_due_again = record.is_due_again;
                self.changed.extend(noted.page);
            }
        }
        self.cut();
        self.place();
        // What is noted already, in both copies, need not be written.
        let is_noted = self.changed.is_empty();
        (self.due, self.ended) = ((!is_noted).then_some(0), is_noted.then_some(Ok(())));
    }

    /// Of each namespace in the list, when it was purged last; 0 if that is not known.
    pub fn times(&self) -> impl Iterator<Item = (NamespaceId, u64)> {
        self.records.values().map(|noted| (noted.record.namespace, noted.record.time))
    }

    /// Which of these purges are not in the list, or an earlier one of the namespace is. A full list may have had those
    /// that are earlier than all of its own.
    pub fn lacking(&self, purges: &BTreeMap<NamespaceId, u64>) -> BTreeMap<NamespaceId, u64> {
        let is_full = self.records.len() == MOST_RECORDS;
        let least = if is_full { self.times().map(|(_, time)| time).min().unwrap_or(0) } else { 0 };
        let is_lacking = |(namespace, time): &(&NamespaceId, &u64)| match self.records.get(namespace) {
            Some(noted) => noted.record.time < **time,
            None => **time > least,
        };
        purges.iter().filter(is_lacking).map(|(namespace, time)| (*namespace, *time)).collect()
    }

    /// Leaves the latest, as many as the disk has room for. Two copies together may have twice as many: those of a full
    /// list whose second copy is of before.
    fn cut(&mut self) {
        let excess = self.records.len().saturating_sub(MOST_RECORDS);
        if excess > 0 {
            let order =
                self.records.values().map(|noted| (noted.record.time, noted.record.sequence, noted.record.namespace));
            let mut order: Vec<_> = order.collect();
            order.sort_unstable();
            let gone = order[..excess].iter().filter_map(|(.., namespace)| self.records.remove(namespace));
            self.changed.extend(gone.filter_map(|noted| noted.page));
        }
    }

    /// Gives each record a page. Where one is, it stays, if there is room for those that both copies have there: so a
    /// page that is damaged in one copy is not lost while the other is written.
    fn place(&mut self) {
        let mut counts = [0; PURGES_PAGES as usize];
        for noted in self.records.values_mut() {
            noted.page = noted.page.filter(|page| counts[*page as usize] < PURGES_PER_PAGE);
            noted.page.into_iter().for_each(|page| counts[page as usize] += 1);
        }
        for noted in self.records.values_mut().filter(|noted| noted.page.is_none()) {
            let page = counts.iter().position(|count| *count < PURGES_PER_PAGE).expect("the list was cut to its pages");
            counts[page] += 1;
            noted.page = Some(page as u32);
            self.changed.insert(page as u32);
        }
    }

    /// The next step: pages that have changed, and what is between them, of this copy.
    pub fn to_write(&self, copy: usize) -> Writing {
        let first = self.changed.first().copied().unwrap_or(0);
        let pages = first..self.changed.last().map_or(first, |last| last + 1);
        let mut records = vec![Vec::new(); pages.len()];
        for Noted { record, page } in self.records.values() {
            if let Some(page) = page.filter(|page| pages.contains(page)) {
                records[(page - pages.start) as usize].push(*record);
            }
        }
        Writing { copy, step: Step::Write, pages, records }
    }

    /// What was due is written, or is not.
    pub fn end(&mut self, result: Result<(), ErrorKind>, now: Duration) {
        if result.is_ok() {
            self.changed.clear();
            (self.retry_at, self.pause) = (None, Duration::ZERO);
        } else {
            let [shortest, longest] = PAUSES;
            self.pause = (2 * self.pause).clamp(shortest, longest);
            self.retry_at = Some(now + self.pause);
        }
        self.ended = Some(result);
    }

    /// What is not on the disk yet is due again, some time after it has failed.
    pub fn retry(&mut self, now: Duration) {
        if self.is_idle() && self.retry_at.take_if(|at| *at <= now).is_some() {
            self.due = Some(0);
        }
    }
}

/// For a purge that ends now, where `last` is the latest time that is known: later than that, also if the clock was set
/// back.
pub fn purge_time_after(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
    now.max(FIRST_TIME).max(last.saturating_add(2)) & !1
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { id: 77, segment_bytes: 1 << 20, segments: 9 };
    const TIME: u64 = 1 << 50;

    /// As if a purge with that number were also as late.
    fn time(sequence: u64) -> u64 {
        TIME + 2 * sequence
    }

    fn purged(namespaces: Range<u128>, sequence: u64) -> impl Iterator<Item = (NamespaceId, u64)> {
        namespaces.map(move |n| (NamespaceId(n), time(sequence)))
    }

    fn record(n: u128, sequence: u64) -> PurgeRecord {
        PurgeRecord { namespace: NamespaceId(n), sequence, time: time(sequence), is_due_again: false }
    }

    fn records(purges: &Purges) -> Vec<PurgeRecord> {
        purges.records.values().map(|noted| noted.record).collect()
    }

    fn blank() -> Copies {
        [(); COPIES].map(|()| vec![Some([0; 4096]); PURGES_PAGES as usize])
    }

    /// Both copies of what is due; the pages that are written.
    fn written(purges: &mut Purges, copies: &mut Copies) -> Range<u32> {
        let Some(first) = purges.due.take() else { return 0..0 };
        let Writing { pages, records, .. } = purges.to_write(first);
        for copy in copies {
            for (page, records) in pages.clone().zip(&records) {
                copy[page as usize] = Some(PurgeRecord::encode(&GEOMETRY, records));
            }
        }
        purges.end(Ok(()), Duration::ZERO);
        pages
    }

    #[test]
    fn the_list_is_bounded_and_keeps_the_latest_purges() {
        let mut purges = Purges::default();
        let most = MOST_RECORDS as u128;
        (0..most + 50).for_each(|n| purges.add(purged(n..n + 1, n as u64), n as u64));
        assert_eq!(purges.len(), MOST_RECORDS);
        assert!(purges.records.keys().all(|namespace| namespace.0 >= 50));
        purges.add(purged(0..100, 9_000), 9_000);
        assert_eq!(purges.len(), MOST_RECORDS);
        assert!((0..100).all(|n| purges.records[&NamespaceId(n)].record.sequence == 9_000));
        purges.add(purged(7..8, 10_000), 10_000);
        assert_eq!(purges.len(), MOST_RECORDS);
        assert_eq!((purges.records[&NamespaceId(7)].record.sequence, purges.last_sequence()), (10_000, 10_000));
    }

    #[test]
    fn what_copies_of_any_age_say_adds_up_and_is_cut_to_what_a_list_holds() {
        let page = |records: &[PurgeRecord]| Some(PurgeRecord::encode(&GEOMETRY, records));
        let mut copies = blank();
        (copies[0][0], copies[0][9]) = (page(&[record(1, 5), record(2, 9)]), page(&[record(1, 6), record(2, 8)]));
        copies[1][0] = page(&[record(1, 7), record(3, 1)]);
        let purges = Purges::read(&copies, &GEOMETRY);
        assert_eq!(records(&purges), [record(1, 7), record(2, 9), record(3, 1)]);
        assert_eq!(purges.to_write(0).pages, 0..PURGES_PAGES);
        assert_eq!(purges.found, Found { damaged_pages: [14, 15], lost_pages: 14 });

        let full = |first: u128| (first..first + MOST_RECORDS as u128).map(|n| record(n, n as u64)).collect::<Vec<_>>();
        for (copy, first) in copies.iter_mut().zip([1500, 0]) {
            *copy = full(first).chunks(PURGES_PER_PAGE).map(page).collect();
        }
        let mut purges = Purges::read(&copies, &GEOMETRY);
        assert_eq!((records(&purges), purges.due), (full(1500), Some(0)));
        assert_eq!(purges.found, Found::default());
        written(&mut purges, &mut copies);
        let found = Purges::read(&copies, &GEOMETRY);
        assert_eq!((records(&found), found.due), (full(1500), None));
    }

    #[test]
    fn what_one_copy_alone_has_stays_in_its_page_when_the_list_is_written_again() {
        let mut copies = blank();
        let mut purges = Purges::read(&copies, &GEOMETRY);
        purges.add(purged(0..300, 4), 4);
        purges.add((100..110).map(|n| (NamespaceId(n * (n << 60)), time(5))), 5);
        written(&mut purges, &mut copies);
        let whole = copies.clone();
        (copies[0][1], copies[1][0]) = (None, None);
        let mut purges = Purges::read(&copies, &GEOMETRY);
        written(&mut purges, &mut copies);
        assert!(copies == whole, "each page is as it was, so no half of it is lost");
    }

    #[test]
    fn a_purge_writes_the_page_that_it_changes() {
        let mut copies = blank();
        let mut purges = Purges::read(&copies, &GEOMETRY);
        assert!(purges.is_idle());
        let mut add = |purges: &mut Purges, ids: Range<u128>, sequence| {
            purges.add(purged(ids, sequence), sequence);
            let pages = written(purges, &mut copies);
            let found = Purges::read(&copies, &GEOMETRY);
            assert_eq!((records(&found), found.due, found.found), (records(purges), None, Found::default()));
            assert_eq!((found.changed.len(), purges.noted()), (0, Some(true)));
            *purges = found;
            pages
        };
        assert_eq!(add(&mut purges, 0..1, 1), 0..PURGES_PAGES, "the first time all are");
        assert_eq!(add(&mut purges, 1..2, 2), 0..1);
        assert_eq!(add(&mut purges, 1..2, 2), 0..0, "it is noted");
        assert_eq!(add(&mut purges, 1..2, 3), 0..1);
        assert_eq!(add(&mut purges, 2..300, 4), 0..3);
        assert_eq!(add(&mut purges, 298..299, 5), 2..3);
        assert_eq!(add(&mut purges, 300..2000, 6), 2..PURGES_PAGES);
        assert_eq!(add(&mut purges, 5000..5001, 7), 0..1, "in the place of the earliest");
    }

    #[test]
    fn a_disk_lacks_a_purge_that_is_later_than_its_own_unless_its_list_is_full_of_later_ones() {
        let mut purges = Purges::default();
        purges.add(purged(0..10, 4), 4);
        let lacks_at = |purges: &Purges, n, time| !purges.lacking(&BTreeMap::from([(NamespaceId(n), time)])).is_empty();
        let lacks = |purges: &Purges, n, sequence| lacks_at(purges, n, time(sequence));
        assert_eq!([3, 4, 5].map(|sequence| lacks(&purges, 0, sequence)), [false, false, true]);
        assert!(lacks(&purges, 10, 1));
        purges.add(purged(0..MOST_RECORDS as u128, 6), 6);
        assert_eq!([5, 6, 7].map(|sequence| lacks(&purges, 1 << 90, sequence)), [false, false, true]);
        // Of a build that wrote no times.
        assert!(!lacks_at(&purges, 1 << 90, 0) && !lacks_at(&Purges::default(), 1, 0));
    }

    #[test]
    fn what_a_disk_hears_of_is_due_again_until_it_was_purged_again() {
        let mut copies = blank();
        let mut purges = Purges::read(&copies, &GEOMETRY);
        let due = |purges: &Purges| purges.due_again().map(|namespace| namespace.0).collect::<Vec<_>>();
        purges.add(purged(0..3, 4), 4);
        purges.hear(&purged(1..5, 6).collect(), 9, false);
        purges.hear(&purged(5..9, 6).collect(), 9, true);
        assert_eq!(due(&purges), [1, 2, 3, 4]);
        written(&mut purges, &mut copies);
        let mut found = Purges::read(&copies, &GEOMETRY);
        assert_eq!((due(&found), found.due, found.times().nth(1)), (vec![1, 2, 3, 4], None, purged(1..2, 6).next()));
        found.add(purged(2..4, 10), 10);
        assert_eq!(due(&found), [1, 4]);
        let mut half = copies.clone();
        written(&mut found, &mut copies);
        assert_eq!(due(&Purges::read(&copies, &GEOMETRY)), [1, 4]);
        // A kill after the first copy.
        half[0] = copies[0].clone();
        assert_eq!(due(&Purges::read(&half, &GEOMETRY)), [1, 4]);
    }

    #[test]
    fn a_page_of_zeros_beside_others_is_damaged() {
        let mut copies = blank();
        let mut purges = Purges::read(&copies, &GEOMETRY);
        purges.add(purged(0..300, 4), 4);
        written(&mut purges, &mut copies);
        let with = |change: &dyn Fn(&mut Copies)| {
            let mut copies = copies.clone();
            change(&mut copies);
            let purges = Purges::read(&copies, &GEOMETRY);
            (purges.len(), purges.due, purges.found.damaged_pages, purges.found.lost_pages)
        };
        let zero = Some([0; 4096]);
        assert_eq!(with(&|_| {}), (300, None, [0, 0], 0));
        assert_eq!(with(&|copies| copies[0] = blank()[0].clone()), (300, Some(0), [16, 0], 0));
        assert_eq!(with(&|copies| copies[1][12] = zero), (300, Some(0), [0, 1], 0));
        assert_eq!(with(&|copies| copies.iter_mut().for_each(|copy| copy[1] = zero)), (175, Some(0), [1, 1], 1));
        assert_eq!(with(&|copies| (copies[0][1], copies[1][1]) = (zero, None)), (175, Some(0), [1, 1], 1));
        let garbage = |copies: &mut Copies| copies.iter_mut().for_each(|copy| copy.fill(Some([255; 4096])));
        assert_eq!(with(&garbage), (0, Some(0), [16, 16], 16));
    }
}
