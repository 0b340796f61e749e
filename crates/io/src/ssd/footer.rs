//! The footer that closes a full segment, so that opening the disk reads its headers in one piece.

use forebay_core::checksum::checksum;

use super::disk::Disk;
use super::io::Flight;
use super::layout::{Footer, PAGE_BYTES, Record};
use super::staging::Staging;
use crate::uring::Work;

impl Disk {
    /// Writes the footer of the oldest full segment once everything written to it has settled.
    pub(super) fn close_segments(&mut self) {
        let Some(&index) = self.space.closing.front() else { return };
        let is_settled = self.writer.batches.values().all(|batch| batch.segment != index);
        if self.writer.footer.is_some() || !is_settled {
            return;
        }
        self.space.closing.pop_front();
        self.writer.footer = Some(index);
        let balance = Some(self.balance());
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
            balance,
        };
        bytes.resize(record_pages as usize * PAGE_BYTES, 0);
        bytes.extend_from_slice(&footer.encode(&self.geometry));
        let span = Staging::footer(bytes.len() as u32);
        self.memory.write(span, &bytes);
        let at = self.geometry.at(index, self.geometry.pages() - 1 - record_pages);
        self.write(Flight::Footer, Work::Write { at, spans: span.into() });
    }

    /// A failed footer write costs a scan at the next start, nothing else.
    pub(super) fn footer_ended(&mut self) {
        let index = self.writer.footer.take().expect("its write was in flight");
        self.space.close(index);
    }
}
