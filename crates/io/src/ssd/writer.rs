//! From slots to the disk: batches of blocks at the head of the log.
//!
//! A batch is one page of headers and the payloads behind it. Payloads go to the disk directly from their slots, many
//! in one transfer. Filling (only when blocks are carried over) → writing → written → syncing → settled. Invariants:
//! a store succeeds only when its batch and all earlier ones in its segment were flushed, so that recovery, which
//! follows the chain of heads, reaches it. A record that may be incomplete holds its segment's mark back until the
//! footer excludes it.

use std::ops::Range;

use forebay_core::tier::{OpKind, Operation, Outcome};
use forebay_core::{BlockKey, ErrorKind};

use super::disk::Disk;
use super::index::Entry;
use super::io::Flight;
use super::layout::{BatchHead, PAGE, RECORDS_PER_BATCH, RecordKind};
use super::log::{Batch, Item, Run, STORE_DEADLINE, Stage};
use super::staging::Staging;
use crate::uring::{Spans, Work};

/// Longest batch, so that the first of many stores does not wait for the last.
const BATCH_PAGES: u32 = 2048;
/// Batches begun in one turn: 40 to 80 us each, of small blocks.
const BATCHES_PER_TURN: u32 = 2;

impl Disk {
    /// False if it does not fit into the queue.
    pub(super) fn take_store(&mut self, op: &Operation) -> bool {
        let padded_bytes = op.length_bytes.next_multiple_of(PAGE);
        let fits = (1..=self.geometry.max_block_bytes()).contains(&op.length_bytes);
        if !fits || self.slot_of(op, padded_bytes).is_none() {
            self.complete(op.id, Outcome::Failed(ErrorKind::Invalid));
        } else if self.budget.wait() > STORE_DEADLINE {
            self.fail_store(op, ErrorKind::Full);
        } else {
            return self.log.push(op, self.now, self.limits.queued_stores);
        }
        true
    }

    pub(super) fn start_batches(&mut self) {
        if self.now < self.log.paused_until {
            let failure = (self.log.waiting() > 0).then_some(self.log.last_failure);
            self.log.count_stores(0, failure);
            return self.fail_waiting(self.log.last_failure);
        }
        for begun in 0.. {
            if !self.may_write() {
                return;
            }
            if begun == BATCHES_PER_TURN {
                self.has_more |= self.log.waiting() > 0;
                return;
            }
            let (mut items, runs) = self.next_items();
            if items.is_empty() {
                // Two stay ready for carried blocks. Otherwise nothing could ever be reclaimed.
                if self.lacks_room() && self.space.roll(self.stores_leave_ready()) {
                    continue;
                }
                return;
            }
            self.add_notes(&mut items);
            self.start_batch(items, runs);
        }
    }

    /// Ends the stores and removals that have not begun.
    pub(super) fn fail_waiting(&mut self, kind: ErrorKind) {
        while let Some(op) = self.log.pop() {
            self.fail_store(&op, kind);
        }
    }

    /// Ends those of them that have waited for too long.
    pub(super) fn fail_late(&mut self) {
        while let Some(op) = self.log.pop_late(self.now) {
            self.fail_store(&op, ErrorKind::Timeout);
        }
    }

    fn fail_store(&mut self, op: &Operation, kind: ErrorKind) {
        self.counters.failed_stores += 1;
        self.complete(op.id, Outcome::Failed(kind));
    }

    /// How many ready segments stores may not use.
    fn stores_leave_ready(&self) -> usize {
        let is_filling_up = self.space.closed.is_empty() && self.reclaim.is_none();
        if is_filling_up { 0 } else { 1 }
    }

    fn may_write(&mut self) -> bool {
        let half = (self.limits.depth as usize / 2).max(2);
        let next_pages = self.log.front().map_or(0, |op| Item::of(op).record.payload_pages());
        !self.staging.free_heads.is_empty()
            && self.log.may_add()
            && self.log.outstanding() < half
            && self.log.unsettled_bytes() < 2 * self.limits.flush_bytes
            && !self.keeps_enough(0, next_pages)
            && self.may_begin_next()
    }

    /// Removals are a page for 39 of them. They count against the budget and never wait for it.
    fn may_begin_next(&mut self) -> bool {
        self.log.has_removals() || self.budget.allows()
    }

    /// Whether the active segment keeps the next operation, or the notes, from being written.
    fn lacks_room(&mut self) -> bool {
        let next = self.log.front().filter(|op| !self.log.is_busy(&op.key));
        let pages = next.map(|op| Item::of(op).record.payload_pages());
        let pages = pages.or_else(|| self.log.has_page_of_notes().then_some(0));
        self.may_begin_next() && pages.is_some_and(|pages| !self.space.active_has_room(1, pages))
    }

    /// The items of the next batch and the runs in which they are written; completes operations that need no writing.
    fn next_items(&mut self) -> (Vec<Item>, Vec<Run>) {
        let most_runs = (self.limits.depth as usize / 2).max(2) - self.log.outstanding();
        let (mut items, mut runs, mut pages) = (Vec::new(), Vec::<Run>::new(), 0);
        while let Some(&op) = self.log.front()
            && !self.log.is_busy(&op.key)
            && self.may_begin_next()
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
                if self.keeps_enough(items.len(), pages + own_pages) {
                    break;
                }
                if matches!(op.kind, OpKind::Remove) {
                    self.withdraw(self.index.hasher().block(&op.key));
                }
                self.log.busy.insert(op.key);
                if let Some(span) = self.slot_of(&op, u64::from(own_pages) * PAGE).filter(|_| own_pages > 0) {
                    if !continues {
                        runs.push(Run::at(items.len()));
                    }
                    runs.last_mut().expect("there is one by now").add(items.len(), span, own_pages);
                }
                items.push(item);
                pages += own_pages;
            }
            self.log.pop();
        }
        if items.is_empty() && self.log.has_page_of_notes() && self.budget.allows() && self.space.active_has_room(1, 0)
        {
            items.extend(self.log.next_note());
        }
        (items, runs)
    }

    /// Whether the stores that have begun, `coming` and one more with them, would keep too much of the pool. One store
    /// always begins.
    fn keeps_enough(&self, coming: usize, pages: u32) -> bool {
        let (stores, bytes) = (self.log.begun_stores + coming, self.log.begun_bytes + u64::from(pages) * PAGE);
        stores > 0 && (stores >= self.limits.begun_stores || bytes > self.limits.begun_store_bytes)
    }

    /// A block that exists need not be written, and an absent one need not be removed.
    fn answered_at_once(&mut self, op: &Operation) -> bool {
        let proof = self.index.hasher().proof(&op.key, op.length_bytes, op.checksum);
        let is_same = |entry: &Entry| entry.length_bytes == op.length_bytes && entry.proof == proof;
        let outcome = match op.kind {
            OpKind::Store => self.served(&op.key).is_some_and(|entry| is_same(&entry)).then_some(Outcome::Stored),
            _ => self.index.record(&op.key).is_none().then_some(Outcome::Absent),
        };
        let Some(outcome) = outcome else { return false };
        self.counters.repeated_stores += u64::from(op.kind == OpKind::Store);
        self.complete(op.id, outcome);
        true
    }

    /// Fills the rest of the head's page with notes of keys that were read.
    fn add_notes(&mut self, items: &mut Vec<Item>) {
        let pages = items.iter().map(|item| item.record.payload_pages()).sum();
        while items.len() < RECORDS_PER_BATCH && self.space.active_has_room(items.len() as u32 + 1, pages) {
            match self.log.next_note() {
                Some(item) => items.push(item),
                None => return,
            }
        }
    }

    /// Records that a block was read, so that it is carried over, even after a restart.
    pub(super) fn note_touch(&mut self, key: &BlockKey) {
        if self.index.touch(self.index.hasher().block(key)) {
            self.log.note(key);
        }
    }

    fn start_batch(&mut self, items: Vec<Item>, runs: Vec<Run>) {
        let id = self.reserve_batch(items, Stage::Writing);
        for Run { items: Range { start, end }, spans, .. } in runs {
            let batch = self.log.batches.get_mut(&id).expect("just reserved");
            batch.outstanding += 1;
            let at = self.geometry.at(batch.segment, batch.items[start].record.first_page);
            let work = Work::Write { at, spans: Spans::from(spans.as_slice()) };
            self.write(Flight::Payloads { batch: id, first: start, end }, work);
        }
        self.write_head(id);
    }

    /// Assigns positions and sequence numbers at the head of the log to the items.
    pub(super) fn reserve_batch(&mut self, mut items: Vec<Item>, stage: Stage) -> u64 {
        let pages = items.iter().map(|item| item.record.payload_pages()).sum();
        let (segment, page) = self.space.append(items.len() as u32, pages);
        let mut first_page = page + 1;
        for item in &mut items {
            item.record.sequence = self.log.draw_sequence();
            if item.record.kind == RecordKind::Block {
                item.record.first_page = first_page;
                first_page += item.record.payload_pages();
            }
        }
        let head = self.staging.free_heads.pop().expect("looked for before");
        self.log.add(Batch { segment, page, next_page: page + 1 + pages, head, stage, items, outstanding: 0 })
    }

    /// Writes the page that makes the batch's records valid.
    pub(super) fn write_head(&mut self, id: u64) {
        let batch = &self.log.batches[&id];
        let segment = &self.space.segments[batch.segment as usize];
        let head = BatchHead {
            life: segment.life,
            page: batch.page,
            next_page: batch.next_page,
            mark: self.log.mark(batch.segment, segment.first_bad),
            first_sequence: batch.items[0].record.sequence,
            balance: Some(self.balance()),
            records: batch.items.iter().filter(|item| item.error.is_none()).map(|item| item.record).collect(),
        };
        let (span, at) = (Staging::head(batch.head), self.geometry.at(batch.segment, batch.page));
        self.memory.write(span, &head.encode(&self.geometry));
        let batch = self.log.batches.get_mut(&id).expect("looked up above");
        (batch.stage, batch.outstanding) = (Stage::Writing, batch.outstanding + 1);
        self.write(Flight::Head { batch: id }, Work::Write { at, spans: span.into() });
    }

    pub(super) fn payloads_ended(&mut self, id: u64, items: Range<usize>, result: Result<u64, ErrorKind>) {
        self.log.count(result, self.now);
        let batch = self.log.batches.get_mut(&id).expect("it has a transfer in flight");
        for item in &mut batch.items[items] {
            if item.record.payload_pages() > 0 {
                item.error = result.err();
            }
        }
        self.part_ended(id);
    }

    pub(super) fn head_ended(&mut self, id: u64, result: Result<u64, ErrorKind>) {
        self.log.count(result, self.now);
        let batch = &self.log.batches[&id];
        self.staging.free_heads.push(batch.head);
        let segment = batch.segment;
        if result.is_err() {
            self.break_chain(segment, id);
        }
        self.part_ended(id);
    }

    fn part_ended(&mut self, id: u64) {
        let batch = self.log.batches.get_mut(&id).expect("it had a transfer in flight");
        batch.outstanding -= 1;
        if batch.outstanding == 0 {
            batch.stage = Stage::Written;
            self.log.waiting_since.get_or_insert(self.now);
        }
    }

    /// Recovery could not find anything from this batch on: nothing more is written to the segment.
    pub(super) fn break_chain(&mut self, segment: u32, from: u64) {
        if self.space.active == Some(segment) {
            self.space.retire();
        }
        let broken_from = &mut self.space.segment(segment).broken_from;
        *broken_from = Some(broken_from.map_or(from, |earlier| earlier.min(from)));
    }
}
