//! Flushes, and what a flushed batch means for its blocks and for the operations that wait for them.

use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::Outcome;

use super::disk::Disk;
use super::index::{Entry, Spot};
use super::io::Flight;
use super::layout::{PAGE, Record, RecordKind};
use super::log::{Batch, Erase, Item, Stage};
use crate::uring::Work;

/// So many heads with nothing but notes wait for one flush, and so long. Nobody waits for them, and each flush delays
/// the reads that made them. Those heads are lost with the host's power, and the blocks are not carried over then.
const HEADS_OF_NOTES: usize = 16;
const NOTES_INTERVAL: Duration = Duration::from_secs(1);
/// Records settled in one turn, without notes: each costs some cache misses, 1 to 3 us in an index of millions.
const RECORDS_PER_TURN: usize = 48;

impl Disk {
    /// Starts a flush when it is worth it: nothing more is being written, or enough bytes wait, or they have waited
    /// long enough. Notes alone wait longer, while nothing waits for their batches.
    pub(super) fn flush(&mut self) {
        if self.log.is_syncing {
            return;
        }
        let (mut held_up, mut bytes, mut is_writing) = (Vec::new(), 0, false);
        let mut is_waited_for = !self.log.has_kept;
        let mut next = Vec::new();
        for (id, batch) in &self.log.batches {
            match batch.stage {
                Stage::Flushed(_) => {}
                Stage::Written if held_up.contains(&batch.segment) => {}
                Stage::Written => {
                    next.push(*id);
                    bytes += u64::from(batch.next_page - batch.page) * PAGE;
                    is_waited_for |= !batch.has_only_notes() || self.space.active != Some(batch.segment);
                }
                Stage::Filling | Stage::Writing | Stage::Syncing => {
                    held_up.push(batch.segment);
                    is_writing |= batch.stage == Stage::Writing;
                }
            }
        }
        let erased = self.log.erase.filter(|erase| matches!(erase, Erase::Written(_)));
        let waited = self.log.waiting_since.map_or(Duration::ZERO, |since| self.now.saturating_sub(since));
        let is_due = if is_waited_for || erased.is_some() {
            !is_writing || bytes >= self.limits.flush_bytes || waited >= self.limits.flush_interval
        } else {
            next.len() >= HEADS_OF_NOTES || waited >= NOTES_INTERVAL
        };
        if !is_due || (next.is_empty() && erased.is_none()) {
            return;
        }
        for id in next {
            self.log.batches.get_mut(&id).expect("from the list").stage = Stage::Syncing;
        }
        if let Some(Erase::Written(segment)) = erased {
            self.log.erase = Some(Erase::Syncing(segment));
        }
        let still_waits = self.log.batches.values().any(|batch| batch.stage == Stage::Written);
        self.log.waiting_since = still_waits.then_some(self.now);
        self.log.is_syncing = true;
        self.io.start(Flight::Sync, Work::Sync);
    }

    pub(super) fn sync_ended(&mut self, result: Result<u64, ErrorKind>) {
        self.log.is_syncing = false;
        self.log.count(result, self.now);
        self.counters.flushes += 1;
        self.counters.failed_flushes += u64::from(result.is_err());
        let syncing = |(id, batch): (&u64, &Batch)| (batch.stage == Stage::Syncing).then_some((*id, batch.segment));
        let synced: Vec<(u64, u32)> = self.log.batches.iter().filter_map(syncing).collect();
        for (id, segment) in synced {
            if result.is_err() {
                // After a failed flush the state on the disk is unknown, and a second flush would not reveal it.
                self.break_chain(segment, id);
            }
            self.log.batches.get_mut(&id).expect("from the list").stage = Stage::Flushed(result.err());
        }
        if let Some(Erase::Syncing(segment)) = self.log.erase {
            self.erase_settled(segment, result);
        }
    }

    /// Settles flushed batches, the earliest first, a few per turn.
    pub(super) fn settle_flushed(&mut self) {
        let mut records = 0;
        loop {
            let flushed = |(id, batch): (&u64, &Batch)| match batch.stage {
                Stage::Flushed(error) => Some((*id, error, batch.without_notes())),
                _ => None,
            };
            let Some((id, error, count)) = self.log.batches.iter().find_map(flushed) else { return };
            if records > 0 && records + count > RECORDS_PER_TURN {
                self.has_more = true;
                return;
            }
            records += count;
            self.settle(id, error);
        }
    }

    /// Completes the batch's operations and makes its blocks visible to lookups.
    fn settle(&mut self, id: u64, error: Option<ErrorKind>) {
        let batch = self.log.take(id);
        let has_only_notes = batch.has_only_notes();
        let Batch { segment, page, items, .. } = batch;
        let is_unreachable = self.space.segment(segment).broken_from.is_some_and(|from| id >= from);
        let error = error.or(is_unreachable.then_some(ErrorKind::Io));
        let (mut kept, mut failure) = (0, None);
        for Item { record, op, error: own_error, moved_from } in items {
            let outcome = match own_error.or(error) {
                Some(kind) => {
                    failure = Some(kind);
                    // A copy that failed before the head was written is not in the head.
                    if moved_from.is_none() || own_error.is_none() {
                        self.space.segment(segment).doubt(record.sequence);
                        self.withdraw_doubted(&record, segment);
                    }
                    self.counters.failed_stores += u64::from(op.is_some());
                    Outcome::Failed(kind)
                }
                None => {
                    self.log.has_kept = true;
                    kept += usize::from(record.kind == RecordKind::Block);
                    self.settle_record(&record, (segment, page), moved_from)
                }
            };
            if let Some(id) = op {
                self.log.busy.remove(&record.key);
                self.complete(id, outcome);
            }
        }
        // One flush ends many batches of notes: their failure is one, which the flush itself has counted.
        if !has_only_notes {
            self.log.count_stores(kept, failure);
        }
    }

    /// Recovery may take the block of a record that failed. So a removal has to find it.
    fn withdraw_doubted(&mut self, record: &Record, segment: u32) {
        let found = self.index.record(&record.key);
        if record.kind != RecordKind::Block || found.is_some_and(|entry| self.is_later(entry, segment, record)) {
            return;
        }
        self.put(record, segment);
        self.withdraw(self.index.hasher().block(&record.key));
        self.space.segment(segment).doubted.push(*record);
        if found.is_some_and(|entry| entry.is_served()) {
            self.tell_evicted(record.key);
            self.counters.evicted_blocks += 1;
        }
    }

    /// Whether the block of this entry was written after that of the record.
    fn is_later(&self, Entry { spot, .. }: Entry, segment: u32, record: &Record) -> bool {
        self.space.position(spot.segment, spot.first_page) > self.space.position(segment, record.first_page)
    }

    fn settle_record(&mut self, record: &Record, (segment, head): (u32, u32), moved_from: Option<Spot>) -> Outcome {
        self.space.segment(segment).whole.push(*record);
        if record.kind == RecordKind::Touched {
            return Outcome::Removed;
        }
        let block = self.index.hasher().block(&record.key);
        let found = self.index.entry_of(block);
        match record.kind {
            RecordKind::Block => {
                let is_news = match moved_from {
                    Some(spot) => found.is_some_and(|entry| entry.spot == spot),
                    None => found.is_none_or(|entry| !self.is_later(entry, segment, record)),
                };
                if is_news {
                    self.put(record, segment);
                }
                // The disk heard of a purge while this was on its way.
                let is_void = self.purges.cover(record);
                let was_withdrawn = found.is_some_and(|entry| entry.is_withdrawn);
                if is_news && (is_void || moved_from.is_some() && was_withdrawn) {
                    self.withdraw(block);
                    if !was_withdrawn {
                        self.tell_evicted(record.key);
                    }
                }
                if moved_from.is_some() {
                    self.counters.carried_blocks += 1;
                    self.counters.carried_bytes += record.length_bytes;
                } else {
                    self.counters.stored_blocks += 1;
                    self.counters.stored_bytes += record.length_bytes;
                }
                Outcome::Stored
            }
            RecordKind::Removed => {
                let position = |Spot { segment, first_page }| self.space.position(segment, first_page);
                if found.is_some_and(|entry| position(entry.spot) < self.space.position(segment, head)) {
                    self.forget(block);
                }
                self.counters.removed_blocks += 1;
                Outcome::Removed
            }
            RecordKind::Touched => unreachable!("a note changes no entry"),
        }
    }
}
