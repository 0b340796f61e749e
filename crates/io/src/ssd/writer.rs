//! The log: batches of blocks at its head, flushed together, and the footer that closes a segment.
//!
//! A batch is one page of headers and the payloads behind it, which go to the disk straight from their slots, many in
//! one transfer. Filling (only when blocks are carried over) → writing → written → syncing → settled.
//! Invariants: a store is
//! answered as stored only when its batch and all before it in its segment were flushed, so that recovery, which
//! follows the chain of heads, reaches it; a record that may not be whole holds its segment's mark down until the
//! footer leaves it out; of a key, one store or removal is on its way at a time, so they count in the order in which
//! they were asked for, in memory as on the disk.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use forebay_core::checksum::checksum;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome};
use forebay_core::{BlockKey, ErrorKind};

use super::disk::{Disk, RETRY_INTERVAL, location};
use super::io::Flight;
use super::layout::{BatchHead, Footer, PAGE, PAGE_BYTES, RECORDS_PER_BATCH, Record, RecordKind};
use super::staging::Staging;
use crate::uring::{MOST_SPANS, Span, Spans, Work};

/// A batch is not made longer than this, so that the first of many stores does not wait for the last.
const BATCH_PAGES: u32 = 2048;
/// Payloads that follow each other are written together up to this size: a transfer costs the processor as much
/// whatever its length, and a disk moves long ones faster.
const RUN_PAGES: u32 = 128;
/// After so many failed writes in a row the log stands still for a while: each attempt costs room.
const PAUSE_AFTER: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Its payloads come from elsewhere on the disk; its head is written when they are in place.
    Filling,
    Writing,
    Written,
    Syncing,
}

#[derive(Debug)]
pub(super) struct Item {
    pub record: Record,
    /// Who waits for it.
    pub op: Option<OpId>,
    pub error: Option<ErrorKind>,
    /// The sequence of the record that it is a copy of.
    pub moved_from: Option<u64>,
}

/// Payloads that one transfer takes: those among these items.
struct Run {
    items: Range<usize>,
    spans: Vec<Span>,
    pages: u32,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub segment: u32,
    pub page: u32,
    pub next_page: u32,
    /// The page in staging from which its head is written.
    pub head: u32,
    pub stage: Stage,
    pub items: Vec<Item>,
    /// Transfers that are not over.
    pub outstanding: usize,
}

/// The new life of a segment on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Erase {
    Writing(u32),
    Written(u32),
    Syncing(u32),
}

/// See the module's head.
pub(super) struct Writer {
    /// Stores and removals in the order in which they came.
    pub queue: VecDeque<Operation>,
    pub batches: BTreeMap<u64, Batch>,
    pub erase: Option<Erase>,
    /// The segment whose footer is being written.
    pub footer: Option<u32>,
    /// Keys of stores and removals that have begun and are not settled.
    busy: HashSet<BlockKey>,
    /// Keys that were read for the first time since they were written.
    notes: VecDeque<BlockKey>,
    next_batch: u64,
    next_sequence: u64,
    is_syncing: bool,
    waiting_since: Option<Duration>,
    failures_in_a_row: u32,
    last_failure: ErrorKind,
    pub paused_until: Duration,
}

impl Writer {
    pub fn new(next_sequence: u64) -> Writer {
        Writer {
            queue: VecDeque::new(),
            batches: BTreeMap::new(),
            erase: None,
            footer: None,
            busy: HashSet::new(),
            notes: VecDeque::new(),
            next_batch: 0,
            next_sequence,
            is_syncing: false,
            waiting_since: None,
            failures_in_a_row: 0,
            last_failure: ErrorKind::Io,
            paused_until: Duration::ZERO,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.batches.is_empty() && self.footer.is_none() && self.erase.is_none()
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

    /// Whether the key's latest record is still on its way.
    pub fn is_busy(&self, key: &BlockKey) -> bool {
        self.busy.contains(key)
    }

    /// Payloads and heads on their way.
    fn outstanding(&self) -> usize {
        self.batches.values().map(|batch| batch.outstanding).sum()
    }

    fn unsettled_bytes(&self) -> u64 {
        self.batches.values().map(|batch| u64::from(batch.next_page - batch.page) * PAGE).sum()
    }

    /// Records of this segment below it are whole and flushed.
    fn mark(&self, segment: u32, first_bad: Option<u64>) -> u64 {
        let unsettled = self.batches.values().find(|batch| batch.segment == segment);
        let first = unsettled.map_or(self.next_sequence, |batch| batch.items[0].record.sequence);
        first_bad.map_or(first, |bad| bad.min(first))
    }
}

/// Stores and removals.
impl Disk {
    pub(super) fn take_store(&mut self, op: &Operation) {
        let padded_bytes = op.length_bytes.next_multiple_of(PAGE);
        let fits = (1..=self.geometry.max_block_bytes()).contains(&op.length_bytes);
        if fits && self.slot_of(op, padded_bytes).is_some() {
            self.writer.queue.push_back(*op);
        } else {
            self.complete(op.id, Outcome::Failed(ErrorKind::Invalid));
        }
    }

    pub(super) fn start_batches(&mut self) {
        if self.now < self.writer.paused_until {
            let kind = self.writer.last_failure;
            while let Some(op) = self.writer.queue.pop_front() {
                self.counters.failed_stores += 1;
                self.complete(op.id, Outcome::Failed(kind));
            }
            return;
        }
        while self.may_write() {
            let (mut items, runs) = self.next_items();
            if items.is_empty() {
                let waits = !self.writer.queue.is_empty() || self.writer.notes.len() >= RECORDS_PER_BATCH;
                // Two stay ready for blocks that are carried over, or nothing could ever be reclaimed.
                if waits && self.space.roll(self.stores_leave_ready()) {
                    continue;
                }
                return;
            }
            self.add_notes(&mut items);
            self.start_batch(items, runs);
        }
    }

    /// How many ready segments stores must not touch.
    fn stores_leave_ready(&self) -> usize {
        let is_filling_up = self.space.closed.is_empty() && self.reclaim.is_none();
        if is_filling_up { 0 } else { 1 }
    }

    fn may_write(&mut self) -> bool {
        let half = (self.limits.depth as usize / 2).max(2);
        !self.staging.free_heads.is_empty()
            && self.writer.outstanding() < half
            && self.writer.unsettled_bytes() < 2 * self.limits.flush_bytes
            && self.budget.allows()
    }

    /// The items of the next batch and the runs they are written in; answers what needs no writing.
    fn next_items(&mut self) -> (Vec<Item>, Vec<Run>) {
        let most_runs = (self.limits.depth as usize / 2).max(2) - self.writer.outstanding();
        let (mut items, mut runs, mut pages) = (Vec::new(), Vec::<Run>::new(), 0);
        while let Some(&op) = self.writer.queue.front()
            && !self.writer.is_busy(&op.key)
        {
            let item = Item::of(&op);
            if !self.answered_at_once(&op) {
                let own_pages = item.record.payload_pages();
                let continues = own_pages == 0 || runs.last().is_some_and(|run| run.has_room(own_pages));
                let is_full = items.len() >= RECORDS_PER_BATCH || pages >= BATCH_PAGES;
                if is_full || !(continues || runs.len() < most_runs) {
                    break;
                }
                if !self.space.active_has_room(items.len() as u32 + 1, pages + own_pages) {
                    break;
                }
                if matches!(op.kind, OpKind::Remove { .. }) {
                    self.forget(&op.key);
                }
                self.writer.busy.insert(op.key);
                if let Some(span) = self.slot_of(&op, u64::from(own_pages) * PAGE).filter(|_| own_pages > 0) {
                    if !continues {
                        runs.push(Run::at(items.len()));
                    }
                    runs.last_mut().expect("there is one by now").add(items.len(), span, own_pages);
                }
                items.push(item);
                pages += own_pages;
            }
            self.writer.queue.pop_front();
        }
        let has_notes = self.writer.notes.len() >= RECORDS_PER_BATCH;
        if items.is_empty() && has_notes && self.space.active_has_room(1, 0) {
            items.extend(self.next_note());
        }
        (items, runs)
    }

    /// A block that is there need not be written, one that is not there need not be removed.
    fn answered_at_once(&mut self, op: &Operation) -> bool {
        let found = self.index.get(&op.key);
        let outcome = match (op.kind, found) {
            (OpKind::Store, Some(entry)) if entry.checksum == op.checksum && entry.length_bytes == op.length_bytes => {
                Outcome::Stored(location(entry))
            }
            (OpKind::Remove { .. }, None) => Outcome::Absent,
            _ => return false,
        };
        self.counters.repeated_stores += u64::from(op.kind == OpKind::Store);
        self.complete(op.id, outcome);
        true
    }

    /// Fills the rest of the head's page with keys that were read.
    fn add_notes(&mut self, items: &mut Vec<Item>) {
        let pages = items.iter().map(|item| item.record.payload_pages()).sum();
        while items.len() < RECORDS_PER_BATCH && self.space.active_has_room(items.len() as u32 + 1, pages) {
            match self.next_note() {
                Some(item) => items.push(item),
                None => return,
            }
        }
    }

    fn next_note(&mut self) -> Option<Item> {
        let key = self.writer.notes.pop_front()?;
        Some(Item::new(RecordKind::Touched, key, 0, 0, None))
    }

    /// Remembers that a block was read, so that it is carried over, even after a restart.
    pub(super) fn note_touch(&mut self, key: &BlockKey) {
        if self.index.touch(key) && self.writer.notes.len() < 4 * RECORDS_PER_BATCH {
            self.writer.notes.push_back(*key);
        }
    }

    fn start_batch(&mut self, items: Vec<Item>, runs: Vec<Run>) {
        let id = self.reserve_batch(items, Stage::Writing);
        for Run { items: Range { start, end }, spans, .. } in runs {
            let batch = self.writer.batches.get_mut(&id).expect("just reserved");
            batch.outstanding += 1;
            let at = self.geometry.at(batch.segment, batch.items[start].record.first_page);
            let work = Work::Write { at, spans: Spans::from(spans.as_slice()) };
            self.write(Flight::Payloads { batch: id, first: start, end }, work);
        }
        self.write_head(id);
    }

    /// Gives the items their places and sequence numbers at the head of the log.
    pub(super) fn reserve_batch(&mut self, mut items: Vec<Item>, stage: Stage) -> u64 {
        let pages = items.iter().map(|item| item.record.payload_pages()).sum();
        let (segment, page) = self.space.append(items.len() as u32, pages);
        let mut first_page = page + 1;
        for item in &mut items {
            item.record.sequence = self.writer.next_sequence;
            self.writer.next_sequence += 1;
            if item.record.kind == RecordKind::Block {
                item.record.first_page = first_page;
                first_page += item.record.payload_pages();
            }
        }
        let id = self.writer.next_batch;
        self.writer.next_batch += 1;
        let head = self.staging.free_heads.pop().expect("looked for before");
        let batch = Batch { segment, page, next_page: page + 1 + pages, head, stage, items, outstanding: 0 };
        self.writer.batches.insert(id, batch);
        id
    }

    /// Writes the page that makes the batch's records count.
    pub(super) fn write_head(&mut self, id: u64) {
        let batch = &self.writer.batches[&id];
        let segment = &self.space.segments[batch.segment as usize];
        let head = BatchHead {
            life: segment.life,
            page: batch.page,
            next_page: batch.next_page,
            mark: self.writer.mark(batch.segment, segment.first_bad),
            first_sequence: batch.items[0].record.sequence,
            records: batch.items.iter().filter(|item| item.error.is_none()).map(|item| item.record).collect(),
        };
        let (span, at) = (Staging::head(batch.head), self.geometry.at(batch.segment, batch.page));
        self.memory.write(span, &head.encode(&self.geometry));
        let batch = self.writer.batches.get_mut(&id).expect("looked up above");
        (batch.stage, batch.outstanding) = (Stage::Writing, batch.outstanding + 1);
        self.write(Flight::Head { batch: id }, Work::Write { at, spans: span.into() });
    }

    pub(super) fn payloads_ended(&mut self, id: u64, items: Range<usize>, result: Result<u64, ErrorKind>) {
        self.writer.count(result, self.now);
        let batch = self.writer.batches.get_mut(&id).expect("it has a transfer in flight");
        for item in &mut batch.items[items] {
            if item.record.payload_pages() > 0 {
                item.error = result.err();
            }
        }
        self.part_ended(id);
    }

    pub(super) fn head_ended(&mut self, id: u64, result: Result<u64, ErrorKind>) {
        self.writer.count(result, self.now);
        let batch = &self.writer.batches[&id];
        self.staging.free_heads.push(batch.head);
        let segment = batch.segment;
        if result.is_err() {
            self.break_chain(segment, id);
        }
        self.part_ended(id);
    }

    fn part_ended(&mut self, id: u64) {
        let batch = self.writer.batches.get_mut(&id).expect("it had a transfer in flight");
        batch.outstanding -= 1;
        if batch.outstanding == 0 {
            batch.stage = Stage::Written;
            self.writer.waiting_since.get_or_insert(self.now);
        }
    }

    /// From this batch on recovery would not find what the segment holds: nothing more goes there.
    fn break_chain(&mut self, segment: u32, from: u64) {
        if self.space.active == Some(segment) {
            self.space.retire();
        }
        let broken_from = &mut self.space.segment(segment).broken_from;
        *broken_from = Some(broken_from.map_or(from, |earlier| earlier.min(from)));
    }
}

/// Flushes.
impl Disk {
    /// Starts a flush when one is worth it: nothing more is being written, or enough waits, or long enough.
    pub(super) fn flush(&mut self) {
        if self.writer.is_syncing {
            return;
        }
        let (mut held_up, mut bytes, mut is_writing) = (Vec::new(), 0, false);
        let mut next = Vec::new();
        for (id, batch) in &self.writer.batches {
            if batch.stage != Stage::Written {
                held_up.push(batch.segment);
                is_writing |= batch.stage == Stage::Writing;
            } else if !held_up.contains(&batch.segment) {
                next.push(*id);
                bytes += u64::from(batch.next_page - batch.page) * PAGE;
            }
        }
        let erased = self.writer.erase.filter(|erase| matches!(erase, Erase::Written(_)));
        let waited = self.writer.waiting_since.map_or(Duration::ZERO, |since| self.now.saturating_sub(since));
        let is_due = !is_writing || bytes >= self.limits.flush_bytes || waited >= self.limits.flush_interval;
        if !is_due || (next.is_empty() && erased.is_none()) {
            return;
        }
        for id in next {
            self.writer.batches.get_mut(&id).expect("from the list").stage = Stage::Syncing;
        }
        if let Some(Erase::Written(segment)) = erased {
            self.writer.erase = Some(Erase::Syncing(segment));
        }
        let still_waits = self.writer.batches.values().any(|batch| batch.stage == Stage::Written);
        self.writer.waiting_since = still_waits.then_some(self.now);
        self.writer.is_syncing = true;
        self.io.start(Flight::Sync, Work::Sync);
    }

    pub(super) fn sync_ended(&mut self, result: Result<u64, ErrorKind>) {
        self.writer.is_syncing = false;
        self.writer.count(result, self.now);
        self.counters.flushes += 1;
        self.counters.failed_flushes += u64::from(result.is_err());
        let syncing = |(id, batch): (&u64, &Batch)| (batch.stage == Stage::Syncing).then_some((*id, batch.segment));
        let synced: Vec<(u64, u32)> = self.writer.batches.iter().filter_map(syncing).collect();
        for (id, segment) in synced {
            if result.is_err() {
                // What a failed flush left behind is unknown, and a second one would not tell.
                self.break_chain(segment, id);
            }
            self.settle(id, result.err());
        }
        if let Some(Erase::Syncing(segment)) = self.writer.erase {
            self.erase_settled(segment, result);
        }
    }

    /// Answers the batch's operations and lets its blocks be found.
    fn settle(&mut self, id: u64, error: Option<ErrorKind>) {
        let Batch { segment, items, .. } = self.writer.batches.remove(&id).expect("it was being flushed");
        let is_unreachable = self.space.segment(segment).broken_from.is_some_and(|from| id >= from);
        let error = error.or(is_unreachable.then_some(ErrorKind::Io));
        for Item { record, op, error: own_error, moved_from } in items {
            let outcome = match own_error.or(error) {
                Some(kind) => {
                    // A copy that failed before its head was written is not in it.
                    if moved_from.is_none() || own_error.is_none() {
                        self.space.segment(segment).doubt(record.sequence);
                    }
                    self.counters.failed_stores += u64::from(op.is_some());
                    Outcome::Failed(kind)
                }
                None => self.settle_record(&record, segment, moved_from),
            };
            if let Some(id) = op {
                self.writer.busy.remove(&record.key);
                self.complete(id, outcome);
            }
        }
    }

    fn settle_record(&mut self, record: &Record, segment: u32, moved_from: Option<u64>) -> Outcome {
        self.space.segment(segment).whole.push(*record);
        let found = self.index.get(&record.key).map(|entry| entry.sequence);
        match record.kind {
            RecordKind::Block => {
                let is_news = match moved_from {
                    Some(sequence) => found == Some(sequence),
                    None => found.is_none_or(|sequence| sequence < record.sequence),
                };
                if is_news {
                    self.put(record, segment);
                }
                if moved_from.is_some() {
                    self.counters.carried_blocks += 1;
                    self.counters.carried_bytes += record.length_bytes;
                } else {
                    self.counters.stored_blocks += 1;
                    self.counters.stored_bytes += record.length_bytes;
                }
                Outcome::Stored(self.index.get(&record.key).map(location).unwrap_or_default())
            }
            RecordKind::Removed => {
                self.counters.removed_blocks += 1;
                Outcome::Removed
            }
            RecordKind::Touched => Outcome::Removed,
        }
    }
}

/// Footers.
impl Disk {
    /// Writes the footer of the oldest full segment once all that was written to it has settled.
    pub(super) fn close_segments(&mut self) {
        let Some(&index) = self.space.closing.front() else { return };
        let is_settled = self.writer.batches.values().all(|batch| batch.segment != index);
        if self.writer.footer.is_some() || !is_settled {
            return;
        }
        self.space.closing.pop_front();
        self.writer.footer = Some(index);
        let segment = self.space.segment(index);
        let mut whole = std::mem::take(&mut segment.whole);
        whole.sort_by_key(|record| record.sequence);
        let record_pages = Footer::record_pages(whole.len() as u32);
        let mut bytes: Vec<u8> = whole.iter().flat_map(Record::encode).collect();
        let footer = Footer {
            life: segment.life,
            index,
            count: whole.len() as u32,
            end_page: segment.next_page,
            records_checksum: checksum(&bytes),
        };
        bytes.resize(record_pages as usize * PAGE_BYTES, 0);
        bytes.extend_from_slice(&footer.encode(&self.geometry));
        let span = Staging::footer(bytes.len() as u32);
        self.memory.write(span, &bytes);
        let at = self.geometry.at(index, self.geometry.pages() - 1 - record_pages);
        self.write(Flight::Footer, Work::Write { at, spans: span.into() });
    }

    /// A footer that could not be written costs a scan at the next start, nothing else.
    pub(super) fn footer_ended(&mut self) {
        let index = self.writer.footer.take().expect("its write was in flight");
        self.space.close(index);
    }
}

impl Run {
    fn at(item: usize) -> Run {
        Run { items: item..item, spans: Vec::new(), pages: 0 }
    }

    fn has_room(&self, pages: u32) -> bool {
        self.pages + pages <= RUN_PAGES && self.spans.len() < MOST_SPANS
    }

    fn add(&mut self, item: usize, span: Span, pages: u32) {
        self.items.end = item + 1;
        self.spans.push(span);
        self.pages += pages;
    }
}

impl Item {
    fn new(kind: RecordKind, key: BlockKey, length_bytes: u64, checksum: u64, op: Option<OpId>) -> Item {
        let record = Record { kind, key, sequence: 0, first_page: 0, length_bytes, checksum };
        Item { record, op, error: None, moved_from: None }
    }

    fn of(op: &Operation) -> Item {
        match op.kind {
            OpKind::Store => Item::new(RecordKind::Block, op.key, op.length_bytes, op.checksum, Some(op.id)),
            _ => Item::new(RecordKind::Removed, op.key, 0, 0, Some(op.id)),
        }
    }

    /// A copy of a block of the disk.
    pub fn copy(record: &Record) -> Item {
        let Record { key, length_bytes, checksum, sequence, .. } = *record;
        let item = Item::new(RecordKind::Block, key, length_bytes, checksum, None);
        Item { moved_from: Some(sequence), ..item }
    }
}
