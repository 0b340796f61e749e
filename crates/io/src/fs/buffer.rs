//! A bounce buffer between the pool and a mount that may hang. It holds an object's file in memory.
//!
//! Invariant: system calls touch buffers only, never the pool, so an operation that hangs holds a buffer and no slot.
//! Bytes are verified here before they go to the pool.

use std::fs::File;
use std::io;

use forebay_core::SlotId;
use forebay_core::checksum::checksum;
use forebay_core::tier::Operation;
use rustix::io::{Errno, pread, pwrite};

use super::layout::{HEAD_BYTES, file_bytes};
use crate::header::{HEADER_BYTES, Sealing};
use crate::uring::{Private, Region};

/// Buffers grow in steps of a huge page.
const STEP_BYTES: u64 = 2 << 20;
/// The head of a file.
const PAGE_BYTES: usize = HEAD_BYTES as usize;

pub(super) struct Buffer {
    pool: Region,
    memory: Private,
}

impl Buffer {
    /// A buffer for blocks of at most that length.
    pub fn new(pool: &Region, length_bytes: u64) -> io::Result<Buffer> {
        let memory = Private::new(file_bytes(length_bytes).next_multiple_of(STEP_BYTES) as usize)?;
        Ok(Buffer { pool: pool.clone(), memory })
    }

    pub fn fits(&self, length_bytes: u64) -> bool {
        file_bytes(length_bytes) <= self.memory.len() as u64
    }

    /// Fills the buffer with the file of the block in `slot`. False if the block does not have its checksum.
    pub fn fill(&mut self, sealing: &Sealing, op: &Operation, slot: SlotId) -> bool {
        let (pool, length_bytes) = (self.pool.clone(), op.length_bytes as usize);
        let (head, rest) = self.file_mut(op.length_bytes).split_at_mut(PAGE_BYTES);
        let (block, padding) = rest.split_at_mut(length_bytes);
        padding.fill(0);
        let mut sum = sealing.sum(&op.key, op.length_bytes);
        sum.copy_from(&pool, slot.offset(), block);
        head[..HEADER_BYTES].copy_from_slice(&sum.header().write());
        head[HEADER_BYTES..].fill(0);
        sum.checksum() == op.checksum
    }

    /// Where the file that was read has its header.
    pub fn head(&self) -> &[u8; HEADER_BYTES] {
        self.memory[..HEADER_BYTES].try_into().expect("as long as a header")
    }

    /// The block in the file that was read.
    pub fn block(&self, length_bytes: u64) -> &[u8] {
        &self.memory[PAGE_BYTES..][..length_bytes as usize]
    }

    /// The checksum of all bytes that a read of that block's file returns or should return.
    pub fn file_checksum(&self, length_bytes: u64) -> u64 {
        checksum(&self.memory[..file_bytes(length_bytes) as usize])
    }

    /// Copies the block into `slot`.
    pub fn hand_out(&self, slot: SlotId, length_bytes: u64) {
        self.pool.write(slot.offset(), self.block(length_bytes));
    }

    /// Writes the file of a block of that length, from its start.
    pub fn write_to(&mut self, file: &File, length_bytes: u64) -> Result<(), Errno> {
        let bytes = self.file_mut(length_bytes);
        let mut done = 0;
        while done < bytes.len() {
            match pwrite(file, &bytes[done..], done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads as much as there is of the file of a block of that length; returns the number of bytes.
    pub fn read_from(&mut self, file: &File, length_bytes: u64) -> Result<u64, Errno> {
        let bytes = self.file_mut(length_bytes);
        let mut done = 0;
        while done < bytes.len() {
            match pread(file, &mut bytes[done..], done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                // Direct I/O cannot continue after an end that is not at a block's border.
                Err(Errno::INVAL) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done as u64)
    }

    fn file_mut(&mut self, length_bytes: u64) -> &mut [u8] {
        &mut self.memory[..file_bytes(length_bytes) as usize]
    }
}
