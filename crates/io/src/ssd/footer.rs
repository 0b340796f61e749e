//! The footer that closes a full segment, so that opening the disk reads its headers in one piece.
//!
//! It is made some records at a time: all 16,384 of a segment of small blocks would keep the thread for milliseconds.

use forebay_core::ErrorKind;

use super::closing::Closing;
use super::disk::Disk;
use super::io::Flight;
use super::layout::{Footer, PAGE_BYTES, RECORD_BYTES};
use super::staging::Staging;
use crate::uring::Work;

impl Disk {
    /// Makes the footer of the oldest full segment, once everything written to it has settled, and writes it.
    pub(super) fn close_segments(&mut self) {
        if self.log.closing.is_none() {
            self.begin_footer();
        }
        if let Some(closing) = self.log.closing.as_mut().filter(|closing| !closing.is_written) {
            let (at, bytes) = closing.next();
            self.memory.write(Staging::footer(at, bytes.len() as u32), &bytes);
            if closing.is_encoded() {
                self.write_footer();
            }
        }
    }

    fn begin_footer(&mut self) {
        let Some(&segment) = self.space.closing.front() else { return };
        let is_settled = self.log.batches.values().all(|batch| batch.segment != segment);
        if is_settled {
            let records = std::mem::take(&mut self.space.segment(segment).whole);
            self.log.closing = Some(Closing::new(segment, records));
        }
    }

    /// All records are in the staging memory.
    fn write_footer(&mut self) {
        let balance = Some(self.balance());
        let closing = self.log.closing.as_mut().expect("its records were encoded");
        let (index, count) = (closing.segment, closing.records.len() as u32);
        let segment = self.space.segment(index);
        let record_pages = Footer::record_pages(count);
        let (life, end_page, records_checksum) = (segment.life, segment.next_page, closing.checksum());
        let footer = Footer { life, index, count, end_page, records_checksum, balance };
        let mut bytes = vec![0; record_pages as usize * PAGE_BYTES - count as usize * RECORD_BYTES];
        bytes.extend_from_slice(&footer.encode(&self.geometry));
        let records_bytes = count * RECORD_BYTES as u32;
        self.memory.write(Staging::footer(records_bytes, bytes.len() as u32), &bytes);
        closing.is_written = true;
        let at = self.geometry.at(index, self.geometry.pages() - 1 - record_pages);
        let span = Staging::footer(0, records_bytes + bytes.len() as u32);
        self.write(Flight::Footer, Work::Write { at, spans: span.into() });
    }

    /// A failed footer write costs a scan at the next start, and the memory of its records until the segment is
    /// reclaimed.
    pub(super) fn footer_ended(&mut self, result: Result<u64, ErrorKind>) {
        let Closing { segment, mut records, .. } = self.log.closing.take().expect("its write was in flight");
        self.space.close(segment);
        if result.is_ok() {
            self.space.segment(segment).listed = records.len() as u32;
            records.clear();
            self.space.spare = records;
        } else {
            self.space.segment(segment).whole = records;
        }
    }
}
