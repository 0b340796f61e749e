//! The log: stores and removals that wait for it, the batches at its head, notes, and failures that pause it.
//!
//! A batch is written together: a page of headers, then the payloads in runs. `writer` fills and writes the batches,
//! `flush` settles them, `footer` and `reclaim` end a segment and begin its new life. Where the segments are and what
//! is in them, `space` and `index` know.
//!
//! Invariant: one store or removal of a key is in progress at a time, so they take effect in the order of the requests,
//! in memory as on the disk.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use forebay_core::tier::{OpId, OpKind, Operation};
use forebay_core::{BlockKey, ErrorKind};

use super::closing::Closing;
use super::index::Spot;
use super::io::RETRY_INTERVAL;
use super::layout::{PAGE, RECORDS_PER_BATCH, Record, RecordKind};
use crate::uring::{MOST_SPANS, Span};

/// A store that has not begun after this time fails, since its block is pinned in the pool and others wait behind it.
/// Six times what makes a disk count as hung.
pub(super) const STORE_DEADLINE: Duration = Duration::from_secs(30);
/// After this many failed writes in a row the log pauses: each attempt costs space.
const PAUSE_AFTER: u32 = 4;
/// Adjacent payloads are written together up to this size. The CPU cost of a transfer does not depend on its length,
/// and a disk moves long ones faster.
const RUN_PAGES: u32 = 128;

/// A segment's new life in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Erase {
    Writing(u32),
    Written(u32),
    Syncing(u32),
    /// The keys of its old records are being forgotten.
    Flushed(u32),
    /// The device is told of this part of its old bytes.
    Trimming {
        segment: u32,
        /// From the segment's start.
        from: u64,
        bytes: u64,
    },
}

impl Erase {
    pub fn segment(self) -> u32 {
        match self {
            Erase::Writing(segment) | Erase::Written(segment) | Erase::Syncing(segment) | Erase::Flushed(segment) => {
                segment
            }
            Erase::Trimming { segment, .. } => segment,
        }
    }
}

/// Of the numbers of records, what opening a disk determines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sequences {
    /// All records of earlier daemons have a lower one.
    pub end_of_earlier: u64,
    /// The first of this daemon.
    pub next: u64,
    /// The last of the log and of the list of purges, as these were found.
    pub found: [u64; 2],
}

/// See the module documentation.
pub(super) struct Log {
    /// Stores, and removals of keys of which a store waits, in the order of arrival, each with the time at which it is
    /// late.
    queue: VecDeque<(Operation, Duration)>,
    /// The other removals. They go before all stores, and no budget holds them back: a purge is short, however much is
    /// to be stored.
    removals: VecDeque<(Operation, Duration)>,
    pub batches: BTreeMap<u64, Batch>,
    /// Stores in them, and the bytes of their slots.
    pub begun_stores: usize,
    pub begun_bytes: u64,
    pub erase: Option<Erase>,
    /// The footer that is being made, or written.
    pub closing: Option<Closing>,
    /// Keys of stores and removals that have begun and are not settled.
    pub busy: HashSet<BlockKey>,
    /// Keys that were read for the first time since they were written.
    notes: VecDeque<BlockKey>,
    next_batch: u64,
    next_sequence: u64,
    /// Those that opening the disk has determined.
    sequences: Sequences,
    /// Whether a record of this daemon is on the disk for good.
    pub has_kept: bool,
    pub is_syncing: bool,
    pub waiting_since: Option<Duration>,
    failures_in_a_row: u32,
    pub last_failure: ErrorKind,
    /// Times that stores ended and none was kept, since one was kept.
    pub losses_in_a_row: u32,
    pub last_loss: ErrorKind,
    pub paused_until: Duration,
}

impl Log {
    pub fn new(sequences: Sequences) -> Log {
        Log {
            queue: VecDeque::new(),
            removals: VecDeque::new(),
            batches: BTreeMap::new(),
            begun_stores: 0,
            begun_bytes: 0,
            erase: None,
            closing: None,
            busy: HashSet::new(),
            notes: VecDeque::new(),
            next_batch: 0,
            next_sequence: sequences.next,
            sequences,
            has_kept: false,
            is_syncing: false,
            waiting_since: None,
            failures_in_a_row: 0,
            last_failure: ErrorKind::Io,
            losses_in_a_row: 0,
            last_loss: ErrorKind::Io,
            paused_until: Duration::ZERO,
        }
    }

    /// Whether nobody waits for anything. Notes that are written and not flushed may be there.
    pub fn is_idle(&self) -> bool {
        let is_over = self.batches.values().all(|batch| batch.stage == Stage::Written && batch.has_only_notes());
        self.waiting() == 0 && is_over && self.closing.is_none() && self.erase.is_none()
    }

    /// Stores and removals that have not begun.
    pub fn waiting(&self) -> usize {
        self.queue.len() + self.removals.len()
    }

    /// Whether a removal is next.
    pub fn has_removals(&self) -> bool {
        !self.removals.is_empty()
    }

    /// The next of them.
    pub fn front(&self) -> Option<&Operation> {
        self.removals.front().or(self.queue.front()).map(|(op, _)| op)
    }

    /// Whether fewer stores wait than may wait.
    pub fn has_room(&self, most: usize) -> bool {
        self.queue.len() < most
    }

    /// Whether a store of the key waits, or a store or removal of it has begun.
    pub fn is_storing(&self, key: &BlockKey) -> bool {
        self.is_busy(key) || self.queue.iter().any(|(waiting, _)| waiting.key == *key)
    }

    /// False if as many wait as may wait, of stores or of removals.
    pub fn push(&mut self, op: &Operation, now: Duration, most: usize) -> bool {
        let is_store = op.kind == OpKind::Store;
        let is_behind_a_store = is_store || self.queue.iter().any(|(waiting, _)| waiting.key == op.key);
        let queue = if is_behind_a_store { &mut self.queue } else { &mut self.removals };
        let has_room = queue.len() < most;
        if has_room {
            queue.push_back((*op, now + STORE_DEADLINE));
        }
        has_room
    }

    pub fn pop(&mut self) -> Option<Operation> {
        self.removals.pop_front().or_else(|| self.queue.pop_front()).map(|(op, _)| op)
    }

    /// The next operation that has waited for too long.
    pub fn pop_late(&mut self, now: Duration) -> Option<Operation> {
        let late = |queue: &mut VecDeque<(Operation, Duration)>| queue.pop_front_if(|(_, due)| *due <= now);
        late(&mut self.removals).or_else(|| late(&mut self.queue)).map(|(op, _)| op)
    }

    /// False if the operation does not wait here.
    pub fn withdraw(&mut self, id: OpId) -> bool {
        [&mut self.removals, &mut self.queue].into_iter().any(|queue| {
            let at = queue.iter().position(|(op, _)| op.id == id);
            at.and_then(|at| queue.remove(at)).is_some()
        })
    }

    pub fn count(&mut self, result: Result<u64, ErrorKind>, now: Duration) {
        match result {
            Ok(_) => self.failures_in_a_row = 0,
            Err(kind) => {
                self.last_failure = kind;
                self.failures_in_a_row += 1;
                if self.failures_in_a_row >= PAUSE_AFTER {
                    self.paused_until = now + RETRY_INTERVAL;
                }
            }
        }
    }

    /// What became of the stores of a batch, or of those that waited for one. On a full or write-protected device some
    /// writes and flushes go on to succeed between those that fail, so single transfers do not tell whether anything is
    /// kept.
    pub fn count_stores(&mut self, kept: usize, failure: Option<ErrorKind>) {
        match failure {
            _ if kept > 0 => self.losses_in_a_row = 0,
            Some(kind) => {
                self.losses_in_a_row = self.losses_in_a_row.saturating_add(1);
                self.last_loss = kind;
            }
            // Removals alone, which take no space.
            None => {}
        }
    }

    /// Whether the key's latest record is still in progress.
    pub fn is_busy(&self, key: &BlockKey) -> bool {
        self.busy.contains(key)
    }

    /// All records of namespaces of which nothing is in progress have a lower number. So have those that earlier
    /// daemons have written and this one has not found, as far as is known. Where this daemon has kept nothing yet,
    /// none of its own records is of such a namespace: one that failed has an entry until its removal is kept.
    pub fn end_of_records(&self) -> u64 {
        if self.has_kept { self.next_sequence } else { self.sequences.end_of_earlier }
    }

    /// All records, of whatever namespace, have a lower number, those in progress included.
    pub fn end_of_all_records(&self) -> u64 {
        if self.found().is_none() { self.next_sequence } else { self.sequences.end_of_earlier }
    }

    /// What opening the disk has found; none once this daemon has begun to write to the log.
    pub fn found(&self) -> Option<[u64; 2]> {
        (self.next_sequence == self.sequences.next).then_some(self.sequences.found)
    }

    /// Whether another batch may begin. The first one of a daemon is alone until it is on the disk for good. Were it
    /// lost with a batch behind it that is kept, the next daemon would use the same numbers and the same place, and the
    /// start after that would find the kept batch behind the new one.
    pub fn may_add(&self) -> bool {
        self.has_kept || self.batches.is_empty()
    }

    /// The number of the next record.
    pub fn draw_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence - 1
    }

    /// Takes a batch into progress and gives it an id, later than all before.
    pub fn add(&mut self, batch: Batch) -> u64 {
        let id = self.next_batch;
        self.next_batch += 1;
        let (stores, bytes) = batch.stores();
        self.begun_stores += stores;
        self.begun_bytes += bytes;
        self.batches.insert(id, batch);
        id
    }

    /// Takes a batch out of progress.
    pub fn take(&mut self, id: u64) -> Batch {
        let batch = self.batches.remove(&id).expect("it is in progress");
        let (stores, bytes) = batch.stores();
        self.begun_stores -= stores;
        self.begun_bytes -= bytes;
        batch
    }

    /// Remembers that a block was read. A note beyond the limit is lost: the block is not carried over after a restart.
    pub fn note(&mut self, key: &BlockKey) {
        if self.notes.len() < 4 * RECORDS_PER_BATCH {
            self.notes.push_back(*key);
        }
    }

    pub fn next_note(&mut self) -> Option<Item> {
        let key = self.notes.pop_front()?;
        Some(Item::new(RecordKind::Touched, key, 0, 0, None))
    }

    /// Whether the notes alone fill a head's page.
    pub fn has_page_of_notes(&self) -> bool {
        self.notes.len() >= RECORDS_PER_BATCH
    }

    /// Payloads and heads in progress.
    pub fn outstanding(&self) -> usize {
        self.batches.values().map(|batch| batch.outstanding).sum()
    }

    pub fn unsettled_bytes(&self) -> u64 {
        self.batches.values().map(|batch| u64::from(batch.next_page - batch.page) * PAGE).sum()
    }

    /// Records of this segment with a lower sequence are whole and flushed.
    pub fn mark(&self, segment: u32, first_bad: Option<u64>) -> u64 {
        let unsettled = self.batches.values().find(|batch| batch.segment == segment);
        let first = unsettled.map_or(self.next_sequence, |batch| batch.items[0].record.sequence);
        first_bad.map_or(first, |bad| bad.min(first))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Its payloads are copied from elsewhere on the disk; its head is written when they are in place.
    Filling,
    Writing,
    Written,
    Syncing,
    /// The flush has ended, like this.
    Flushed(Option<ErrorKind>),
}

#[derive(Debug)]
pub(super) struct Item {
    pub record: Record,
    /// The operation that waits for it.
    pub op: Option<OpId>,
    pub error: Option<ErrorKind>,
    /// Where the block lies of which it is a copy.
    pub moved_from: Option<Spot>,
}

/// The payloads of one transfer: those of these items.
pub(super) struct Run {
    pub items: Range<usize>,
    pub spans: Vec<Span>,
    pages: u32,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub segment: u32,
    pub page: u32,
    pub next_page: u32,
    /// The staging page from which its head is written.
    pub head: u32,
    pub stage: Stage,
    pub items: Vec<Item>,
    /// Transfers that have not ended.
    pub outstanding: usize,
}

impl Batch {
    /// Blocks and removals in it.
    pub fn without_notes(&self) -> usize {
        self.items.iter().filter(|item| item.record.kind != RecordKind::Touched).count()
    }

    pub fn has_only_notes(&self) -> bool {
        self.without_notes() == 0
    }

    /// Stores in it, and the bytes of their slots. Copies have none.
    pub fn stores(&self) -> (usize, u64) {
        let stores = self.items.iter().filter(|item| item.op.is_some());
        let pages = stores.map(|item| item.record.payload_pages()).filter(|pages| *pages > 0);
        pages.fold((0, 0), |(count, bytes), pages| (count + 1, bytes + u64::from(pages) * PAGE))
    }
}

impl Run {
    pub fn at(item: usize) -> Run {
        Run { items: item..item, spans: Vec::new(), pages: 0 }
    }

    pub fn has_room(&self, pages: u32) -> bool {
        self.pages + pages <= RUN_PAGES && self.spans.len() < MOST_SPANS
    }

    pub fn add(&mut self, item: usize, span: Span, pages: u32) {
        self.items.end = item + 1;
        self.spans.push(span);
        self.pages += pages;
    }
}

impl Item {
    pub fn new(kind: RecordKind, key: BlockKey, length_bytes: u64, checksum: u64, op: Option<OpId>) -> Item {
        let record = Record { kind, key, sequence: 0, first_page: 0, length_bytes, checksum };
        Item { record, op, error: None, moved_from: None }
    }

    pub fn of(op: &Operation) -> Item {
        match op.kind {
            OpKind::Store => Item::new(RecordKind::Block, op.key, op.length_bytes, op.checksum, Some(op.id)),
            _ => Item::new(RecordKind::Removed, op.key, 0, 0, Some(op.id)),
        }
    }

    /// A copy of a block of that segment.
    pub fn copy(record: &Record, segment: u32) -> Item {
        let Record { key, length_bytes, checksum, first_page, .. } = *record;
        let item = Item::new(RecordKind::Block, key, length_bytes, checksum, None);
        Item { moved_from: Some(Spot { segment, first_page }), ..item }
    }
}
