//! From the disk into a slot.
//!
//! Invariants: a load succeeds only if the requested key, with the checksum of the bytes in the slot, gives the entry's
//! proof: then they are the bytes that were stored under that key. A segment with readers is not overwritten. A block
//! whose bytes do not match is dropped from the index.

use forebay_core::ErrorKind;
use forebay_core::tier::{Operation, Outcome};

use super::disk::Disk;
use super::index::Entry;
use super::io::Flight;
use super::layout::PAGE;
use crate::uring::{Span, Work};

impl Disk {
    pub(super) fn take_load(&mut self, op: &Operation) {
        if self.reads.breaker.is_open() {
            self.counters.failed_loads += 1;
            self.complete(op.id, Outcome::Failed(ErrorKind::Unavailable));
        } else if self.served(&op.key).is_none() {
            self.counters.absent_loads += 1;
            self.complete(op.id, Outcome::Absent);
        } else {
            self.reads.push(op);
        }
    }

    pub(super) fn start_loads(&mut self) {
        while self.io.in_flight() < self.limits.depth as usize
            && let Some(op) = self.reads.pop(self.limits.begun_load_bytes)
        {
            if let Err(outcome) = self.start_load(op) {
                self.complete(op.id, outcome);
            }
        }
    }

    fn start_load(&mut self, op: Operation) -> Result<(), Outcome> {
        // The block may have been evicted while the load waited.
        let Some(entry) = self.served(&op.key) else {
            self.counters.absent_loads += 1;
            return Err(Outcome::Absent);
        };
        let len = entry.length_bytes.next_multiple_of(PAGE);
        let span = self.slot_of(&op, len).filter(|_| op.length_bytes == entry.length_bytes);
        let span = span.ok_or(Outcome::Failed(ErrorKind::Invalid))?;
        let checksum = Some(Span { len: entry.length_bytes as u32, ..span });
        let Entry { spot, proof, length_bytes, .. } = entry;
        let at = self.geometry.at(spot.segment, spot.first_page);
        let flight = Flight::Load { op, spot, length_bytes, proof };
        self.space.segment(spot.segment).readers += 1;
        self.reads.begin(length_bytes);
        self.io.start(flight, Work::Read { at, span, checksum });
        Ok(())
    }

    pub(super) fn load_ended(&mut self, flight: Flight, result: Result<u64, ErrorKind>) {
        let Flight::Load { op, spot, length_bytes, proof } = flight else { unreachable!("only loads end here") };
        self.space.segment(spot.segment).readers -= 1;
        let was_late = self.reads.end(op.id, length_bytes);
        if !was_late {
            self.note_read(result);
        }
        let outcome = match result {
            Ok(checksum) if self.index.hasher().proof(&op.key, length_bytes, checksum) == proof => {
                self.counters.loaded_blocks += 1;
                self.counters.loaded_bytes += length_bytes;
                self.note_touch(&op.key);
                Outcome::Loaded { length_bytes, checksum }
            }
            Ok(_) => {
                self.counters.corrupt_blocks += 1;
                if let Some(entry) = self.index.get(&op.key).filter(|entry| entry.spot == spot) {
                    self.withdraw(entry.block);
                }
                Outcome::Failed(ErrorKind::Corrupt)
            }
            Err(kind) => {
                self.counters.failed_loads += 1;
                Outcome::Failed(kind)
            }
        };
        self.complete(op.id, outcome);
    }

    /// Reports each read that ended before it was given up to the breaker.
    pub(super) fn note_read(&mut self, result: Result<u64, ErrorKind>) {
        let outcome = result.map_or_else(Outcome::Failed, |_| Outcome::Absent);
        self.reads.breaker.heard(outcome, false, self.now);
    }

    /// The pool's bytes of an operation's slot, in whole pages; none if there is no such slot.
    pub(super) fn slot_of(&self, op: &Operation, padded_bytes: u64) -> Option<Span> {
        let offset = op.slot?.0.offset();
        let is_inside = offset.checked_add(padded_bytes)? <= self.memory.pool.len() as u64;
        is_inside.then(|| Span::pool(offset, padded_bytes as u32))
    }
}
