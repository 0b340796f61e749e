//! The records of a full segment on their way into its footer, some at a time.

use forebay_core::checksum::Checksum;

use super::layout::{RECORD_BYTES, Record};

/// Records that one call encodes: 40 to 80 us.
const RECORDS_AT_A_TIME: usize = 512;

/// The footer in progress.
pub(super) struct Closing {
    pub segment: u32,
    pub records: Vec<Record>,
    /// Their positions, by sequence.
    order: Vec<u32>,
    /// How many of `order` were encoded.
    encoded: usize,
    /// Of those.
    sum: Checksum,
    /// Whether the whole footer is on its way to the disk.
    pub is_written: bool,
}

impl Closing {
    pub fn new(segment: u32, records: Vec<Record>) -> Closing {
        let mut order: Vec<u32> = (0..records.len() as u32).collect();
        order.sort_by_key(|at| records[*at as usize].sequence);
        Closing { segment, records, order, encoded: 0, sum: Checksum::new(), is_written: false }
    }

    /// The next encoded records, and where in the footer they belong; none after the last.
    pub fn next(&mut self) -> (u32, Vec<u8>) {
        let end = self.order.len().min(self.encoded + RECORDS_AT_A_TIME);
        let mut bytes = Vec::with_capacity((end - self.encoded) * RECORD_BYTES);
        for at in &self.order[self.encoded..end] {
            bytes.extend_from_slice(&self.records[*at as usize].encode());
        }
        self.sum.update(&bytes);
        let at = std::mem::replace(&mut self.encoded, end) * RECORD_BYTES;
        (at as u32, bytes)
    }

    pub fn is_encoded(&self) -> bool {
        self.encoded == self.order.len()
    }

    /// Over all encoded records.
    pub fn checksum(&self) -> u64 {
        self.sum.finish()
    }
}
