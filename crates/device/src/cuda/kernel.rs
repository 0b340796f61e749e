//! The kernel that copies many small pieces: `kernels/copy.cu`, of which `kernels/copy.ptx` is what every driver for
//! CUDA 12 compiles for the GPUs from Ampere on. **It never ran on a GPU**; tests run its text in an interpreter.
//!
//! Invariants: it is given copies in words of 16 bytes alone, cut to pieces of a bounded size, so that no block of
//! threads has much more to do than another. A table of pieces lies in pinned memory and is not written again before
//! the device has ended the kernel that reads it; while all tables are with the device, copies are left to the next
//! method, since nobody waits here. It takes no more multiprocessors than it was allowed to.

use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use forebay_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::driver::{Answer, Attribute, EventHandle, FunctionHandle, Grid, ModuleHandle, Status, StreamHandle};
use super::ops::Op;
use crate::copy::Memory;
use crate::job::Direction;

pub const TEXT: &str = concat!(include_str!("kernels/copy.ptx"), "\0");
const NAME: &CStr = c"forebay_copy";
const WORD_BYTES: u64 = 16;
/// Of a block: what `copy.cu` is compiled for.
const THREADS: u32 = 512;
/// What the threads of a block have in flight at once, four words each.
const PIECE_BYTES: u64 = 32 << 10;
/// Of a piece in a table.
const ENTRY_BYTES: u64 = 32;
const TABLE_PIECES: usize = 8192;
/// At 50 GB/s a launch keeps its multiprocessors for about a millisecond.
const LAUNCH_BYTES: u64 = 64 << 20;
/// So many launches are with the device at once: 512 MiB of pieces of 8 KiB.
const TABLES: usize = 8;

/// See the module documentation. Made and dropped in the context, when the device has ended all launches.
pub struct Kernel {
    context: Arc<Context>,
    module: ModuleHandle,
    function: FunctionHandle,
    blocks: u32,
    tables: Mutex<Vec<Table>>,
}

struct Table {
    memory: Memory,
    /// Behind the last launch that reads it.
    done: EventHandle,
    /// Whether it is unknown when that launch ends.
    is_lost: bool,
}

impl Kernel {
    /// For up to `multiprocessors` of the device. Errors, with a hint, if device or driver do not take it.
    pub fn load(context: Arc<Context>, multiprocessors: u32) -> Result<Kernel> {
        let driver = context.driver();
        let cannot = |status| {
            let error = context.error("the driver does not take the kernel for small copies", status);
            error.hint("the driver's own copies are used; the kernel needs a driver for CUDA 12 or newer")
        };
        let [major, host_pointers, there] =
            [Attribute::ComputeMajor, Attribute::HostPointers, Attribute::Multiprocessors]
                .map(|attribute| context.attribute(attribute));
        let (major, host_pointers, there) =
            (major.map_err(cannot)?, host_pointers.map_err(cannot)?, there.map_err(cannot)?);
        if major < 8 || host_pointers == 0 {
            let error = Error::new(ErrorKind::Unsupported, "the device does not take the kernel for small copies");
            let error = error.with("compute_capability", major).with("host_pointers", host_pointers);
            return Err(error.hint("the driver's own copies are used; the kernel needs a GPU from Ampere on"));
        }
        let text = CStr::from_bytes_with_nul(TEXT.as_bytes()).expect("the text has one null, at its end");
        let module = driver.load_module(text).map_err(cannot)?;
        let function = driver.function(module, NAME).map_err(|status| {
            let _ = driver.unload_module(module);
            cannot(status)
        })?;
        let blocks = multiprocessors.clamp(1, there.max(1) as u32);
        let kernel = Kernel { context: context.clone(), module, function, blocks, tables: Mutex::default() };
        // What was made before a failure is given back with it.
        for _ in 0..TABLES {
            kernel.add_table().map_err(cannot)?;
        }
        Ok(kernel)
    }

    /// The most multiprocessors that a launch takes.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    fn add_table(&self) -> Answer<()> {
        let driver = self.context.driver();
        let memory = driver.alloc_host(TABLE_PIECES as u64 * ENTRY_BYTES)?;
        let done = driver.create_event().inspect_err(|_| _ = driver.free_host(&memory))?;
        self.tables.lock().expect(LOCK).push(Table { memory, done, is_lost: false });
        Ok(())
    }

    /// Queues what it can, and returns the rest. After an error some may be queued.
    pub fn queue(&self, direction: Direction, ops: &[Op], stream: StreamHandle) -> Answer<Vec<Op>> {
        let (pieces, mut left) = pieces(ops);
        let mut tables = self.tables.lock().expect(LOCK);
        let mut pieces = &pieces[..];
        while !pieces.is_empty() {
            let Some(table) = self.free(&mut tables)? else {
                left.extend_from_slice(pieces);
                break;
            };
            let (launched, rest) = pieces.split_at(launch_pieces(pieces));
            self.launch(direction, table, launched, stream)?;
            pieces = rest;
        }
        Ok(left)
    }

    /// A table that no launch reads.
    fn free<'a>(&self, tables: &'a mut [Table]) -> Answer<Option<&'a mut Table>> {
        for table in tables.iter_mut().filter(|table| !table.is_lost) {
            match self.context.driver().query_event(table.done) {
                Ok(()) => return Ok(Some(table)),
                Err(Status::NOT_READY) => {}
                Err(status) => return Err(status),
            }
        }
        Ok(None)
    }

    fn launch(&self, direction: Direction, table: &mut Table, pieces: &[Op], stream: StreamHandle) -> Answer<()> {
        let mut entries = Vec::with_capacity(pieces.len() * ENTRY_BYTES as usize);
        for piece in pieces {
            let (to, from) = piece.ends(direction);
            [to, from, piece.bytes / WORD_BYTES, 0].iter().for_each(|field| entries.extend(field.to_le_bytes()));
        }
        table.memory.write(0, &entries);
        let grid = Grid { blocks: self.blocks.min(pieces.len() as u32), threads: THREADS };
        let arguments = [table.memory.address(), pieces.len() as u64];
        let driver = self.context.driver();
        driver.launch(self.function, grid, &arguments, stream)?;
        driver.record(table.done, stream).inspect_err(|_| table.is_lost = true)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // A context that has ended has taken all of this with it.
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        for table in self.tables.lock().expect(LOCK).drain(..) {
            let _ = driver.destroy_event(table.done);
            let _ = driver.free_host(&table.memory);
        }
        let _ = driver.unload_module(self.module);
    }
}

const LOCK: &str = "nothing under this lock panics";

/// What the kernel can copy, in pieces, and what it cannot.
fn pieces(ops: &[Op]) -> (Vec<Op>, Vec<Op>) {
    let (mut pieces, mut others) = (Vec::with_capacity(ops.len()), Vec::new());
    for op in ops {
        if (op.device | op.host | op.bytes).is_multiple_of(WORD_BYTES) {
            let bytes = |at| PIECE_BYTES.min(op.bytes - at);
            let cut = |at| Op { device: op.device + at, host: op.host + at, bytes: bytes(at), ..*op };
            pieces.extend((0..op.bytes).step_by(PIECE_BYTES as usize).map(cut));
        } else {
            others.push(*op);
        }
    }
    (pieces, others)
}

/// How many of the pieces one launch takes: at least one.
fn launch_pieces(pieces: &[Op]) -> usize {
    let mut bytes = 0;
    let fits = |piece: &&Op| {
        bytes += piece.bytes;
        bytes <= LAUNCH_BYTES
    };
    pieces.iter().take(TABLE_PIECES).take_while(fits).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::driver::Grid;
    use super::super::ptx::{Access, Program};
    use super::*;
    use crate::bench::Random;

    /// Memory at two addresses; whoever touches anything else, or reads the second but for its table, is refused.
    struct Rig {
        bytes: Vec<u8>,
        table: Vec<u8>,
        /// Every byte may be written once.
        is_written: Vec<bool>,
    }

    const BASE: u64 = 1 << 32;
    const TABLE: u64 = 1 << 33;

    impl Access for Rig {
        fn load(&mut self, address: u64, bytes: &mut [u8]) -> Answer<()> {
            let (memory, at) = if address >= TABLE {
                (&self.table, address - TABLE)
            } else {
                (&self.bytes, address.wrapping_sub(BASE))
            };
            let from = memory.get(at as usize..).and_then(|rest| rest.get(..bytes.len()));
            bytes.copy_from_slice(from.ok_or(Status::ILLEGAL_ADDRESS)?);
            Ok(())
        }

        fn store(&mut self, address: u64, bytes: &[u8]) -> Answer<()> {
            let at = address.wrapping_sub(BASE) as usize;
            let to = self.bytes.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
            to.ok_or(Status::ILLEGAL_ADDRESS)?.copy_from_slice(bytes);
            for is_written in &mut self.is_written[at..at + bytes.len()] {
                assert!(!std::mem::replace(is_written, true), "a byte was written twice");
            }
            Ok(())
        }
    }

    fn program() -> Program {
        Program::read(TEXT.trim_end_matches('\0')).unwrap()
    }

    /// Runs the committed text over pieces of so many words between two halves of memory, and compares all of it.
    fn runs(words: &[u64], blocks: u32, threads: u32, seed: u64) {
        let mut random = Random(seed);
        let gap = |random: &mut Random| WORD_BYTES * (random.next() % 3);
        let half = words.iter().sum::<u64>() * WORD_BYTES + words.len() as u64 * 3 * WORD_BYTES;
        let bytes: Vec<u8> = (0..2 * half).map(|_| random.next() as u8).collect();
        let (mut from, mut to) = (vec![0; words.len()], vec![0; words.len()]);
        for (places, start) in [(&mut from, 0), (&mut to, half)] {
            let mut at = start;
            for piece in random.permutation(words.len() as u32) {
                at += gap(&mut random);
                places[piece as usize] = at;
                at += words[piece as usize] * WORD_BYTES;
            }
        }
        let mut expected = bytes.clone();
        let mut table = Vec::new();
        for ((from, to), words) in from.iter().zip(&to).zip(words) {
            let count = words * WORD_BYTES;
            expected[*to as usize..(to + count) as usize]
                .copy_from_slice(&bytes[*from as usize..(from + count) as usize]);
            [BASE + to, BASE + from, *words, 0].iter().for_each(|field| table.extend(field.to_le_bytes()));
        }
        let mut rig = Rig { is_written: vec![false; bytes.len()], bytes, table };
        let (program, grid) = (program(), Grid { blocks, threads });
        for thread in random.permutation(blocks * threads) {
            program.run(grid, thread, &[TABLE, words.len() as u64], &mut rig).unwrap();
        }
        assert!(rig.bytes == expected, "bytes differ");
        let written = rig.is_written.iter().filter(|is_written| **is_written).count() as u64;
        assert_eq!(written, words.iter().sum::<u64>() * WORD_BYTES, "bytes between the pieces were written");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_kernel_copies_every_word_of_every_piece_once_and_nothing_else(
            words in prop::collection::vec(0u64..300, 0..24),
            blocks in 1u32..6,
            threads in 1u32..40,
            seed in any::<u64>(),
        ) {
            runs(&words, blocks, threads, seed);
        }
    }

    #[test]
    fn pieces_as_they_are_launched_are_copied_whole() {
        // Around the borders of four words a thread, and the largest piece.
        let most = PIECE_BYTES / WORD_BYTES;
        runs(&[most, 3 * 512, 3 * 512 + 1, most - 1, 1, 0, 511, 512, 513], 4, THREADS, 1);
        runs(&[], 8, THREADS, 2);
    }

    #[test]
    fn the_text_holds_the_table_and_the_threads_that_are_launched() {
        let program = program();
        assert_eq!((program.name.as_str(), program.parameters), (NAME.to_str().unwrap(), 2));
        assert_eq!(program.threads, THREADS);
        // Any driver for CUDA 12 loads this version, and any GPU from Ampere on this target.
        assert!(TEXT.contains("\n.version 8.0\n.target sm_80\n"));
    }

    #[test]
    fn a_text_that_does_something_else_is_found() {
        let mut swapped = TEXT.trim_end_matches('\0').to_string();
        let place = swapped.rfind("setp.lt.u32").unwrap();
        swapped.replace_range(place..place + 11, "setp.ge.u32");
        let program = Program::read(&swapped).unwrap();
        let words = 40u64;
        let table = [BASE + 640, BASE, words, 0].iter().flat_map(|field| field.to_le_bytes()).collect();
        let mut rig = Rig { bytes: vec![7; 1280], table, is_written: vec![false; 1280] };
        let ran = program.run(Grid { blocks: 1, threads: 4 }, 0, &[TABLE, 1], &mut rig);
        assert!(ran.is_err() || rig.is_written.iter().filter(|is_written| **is_written).count() < 160);
        let unknown = TEXT.replace("shl.b64", "shf.l.wrap.b32");
        assert!(Program::read(&unknown).unwrap_err().contains("shf.l.wrap.b32"));
    }

    #[test]
    fn what_is_not_in_words_is_left_and_large_copies_are_cut() {
        let op = Op::new;
        let (taken, left) = pieces(&[op(16, 32, 48), op(8, 32, 16), op(16, 33, 16), op(16, 32, 17), op(0, 0, 70_000)]);
        assert_eq!(left, [op(8, 32, 16), op(16, 33, 16), op(16, 32, 17)]);
        let cut = [op(16, 32, 48), op(0, 0, 32_768), op(32_768, 32_768, 32_768), op(65_536, 65_536, 4464)];
        assert_eq!(taken, cut);
    }

    #[test]
    fn a_launch_is_bounded_in_pieces_and_bytes() {
        let of = |count: usize, bytes| launch_pieces(&vec![Op::new(0, 0, bytes); count]);
        assert_eq!((of(10, 16), of(TABLE_PIECES + 1, 16)), (10, TABLE_PIECES));
        assert_eq!(of(TABLE_PIECES, PIECE_BYTES) as u64, LAUNCH_BYTES / PIECE_BYTES);
    }
}
