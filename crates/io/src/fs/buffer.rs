//! A bounce buffer: an object's file as it stands in memory, between the pool and a mount that may hang.
//!
//! Invariant: system calls touch buffers only, never the pool, so whatever hangs holds a buffer and no slot. Bytes go
//! to the pool only after they were verified here.

use std::fs::File;
use std::io;

use forebay_core::SlotId;
use forebay_core::checksum::Checksum;
use rustix::io::Errno;

use super::layout::{HEAD_BYTES, file_bytes};
use crate::header::{HEADER_BYTES, Header};
use crate::uring::{Memory, Region, Span};

/// Copies pass through pieces of this size, which stay in the first-level cache.
const PIECE_BYTES: u64 = 16 << 10;
/// Buffers grow in steps of a huge page.
const STEP_BYTES: u64 = 2 << 20;

pub(super) struct Buffer {
    memory: Memory,
}

impl Buffer {
    /// For blocks of that length and shorter ones.
    pub fn new(pool: &Region, length_bytes: u64) -> io::Result<Buffer> {
        let region = Region::anonymous(file_bytes(length_bytes).next_multiple_of(STEP_BYTES) as usize)?;
        region.want_huge_pages();
        Ok(Buffer { memory: Memory::new(pool.clone(), region) })
    }

    pub fn fits(&self, length_bytes: u64) -> bool {
        file_bytes(length_bytes) <= self.memory.staging.len() as u64
    }

    /// Makes it the file of the block that lies in `slot`; returns the checksum of what was there.
    pub fn fill(&self, header: &Header, slot: SlotId) -> u64 {
        self.memory.staging.write(0, &[0; HEAD_BYTES as usize]);
        self.memory.staging.write(0, &header.write());
        let (mut sum, length_bytes) = (Checksum::new(), header.length_bytes);
        self.pieces(length_bytes, |at, piece| {
            self.memory.pool.read(slot.offset() + at, piece);
            sum.update(piece);
            self.memory.staging.write(HEAD_BYTES + at, piece);
        });
        let padding = file_bytes(length_bytes) - HEAD_BYTES - length_bytes;
        self.memory.staging.write(HEAD_BYTES + length_bytes, &[0; HEAD_BYTES as usize][..padding as usize]);
        sum.finish()
    }

    /// The header of the file that was read into it.
    pub fn header(&self) -> Option<Header> {
        let mut bytes = [0; HEADER_BYTES];
        self.memory.staging.read(0, &mut bytes);
        Header::read(&bytes)
    }

    /// The checksum of the block that was read into it.
    pub fn checksum(&self, length_bytes: u64) -> u64 {
        self.memory.checksum(Span::staging(HEAD_BYTES, length_bytes as u32))
    }

    /// Copies the block into `slot`.
    pub fn hand_out(&self, slot: SlotId, length_bytes: u64) {
        self.pieces(length_bytes, |at, piece| {
            self.memory.staging.read(HEAD_BYTES + at, piece);
            self.memory.pool.write(slot.offset() + at, piece);
        });
    }

    /// Writes the file of a block of that length, from its start.
    pub fn write_to(&self, file: &File, length_bytes: u64) -> Result<(), Errno> {
        let whole = file_bytes(length_bytes);
        let mut done = 0;
        while done < whole {
            match self.memory.pwrite(file, span(done, whole), done) {
                Ok(0) => return Err(Errno::IO),
                Ok(bytes) => done += u64::from(bytes),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what is there of the file of a block of that length; returns how much that was.
    pub fn read_from(&self, file: &File, length_bytes: u64) -> Result<u64, Errno> {
        let whole = file_bytes(length_bytes);
        let mut done = 0;
        while done < whole {
            match self.memory.pread(file, span(done, whole), done) {
                Ok(0) => break,
                Ok(bytes) => done += u64::from(bytes),
                Err(Errno::INTR) => {}
                // Direct I/O cannot go on behind an end that is not on a block's border.
                Err(Errno::INVAL) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn pieces(&self, length_bytes: u64, mut each: impl FnMut(u64, &mut [u8])) {
        let (mut buffer, mut at) = ([0; PIECE_BYTES as usize], 0);
        while at < length_bytes {
            let piece = &mut buffer[..(length_bytes - at).min(PIECE_BYTES) as usize];
            each(at, piece);
            at += piece.len() as u64;
        }
    }
}

fn span(from: u64, to: u64) -> Span {
    Span::staging(from, (to - from) as u32)
}
