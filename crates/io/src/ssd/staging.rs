//! A disk's own pages, beside the pool: for data that are built in memory and written, or read and examined.
//!
//! Invariant: a page has one use at a time; the lists here contain the free ones.

use forebay_core::checksum::combine;
use forebay_core::{Error, ErrorKind};

use super::layout::{FOOTER_BYTES, PAGE, PAGE_BYTES, PURGES_PAGES, Page};
use super::lists::{READERS, Reader};
use crate::uring::{Memory, Span};

/// Blocks are carried over, and recovery reads, in pieces of this size.
pub(super) const CHUNK_BYTES: u32 = 1 << 20;
pub(super) const CHUNKS: u32 = 4;
pub(super) const HEADS: u32 = 128;

const CHUNKS_AT: u64 = FOOTER_BYTES;
const HEADS_AT: u64 = CHUNKS_AT + CHUNKS as u64 * CHUNK_BYTES as u64;
const HEADER_AT: u64 = HEADS_AT + HEADS as u64 * PAGE;
const PROBE_AT: u64 = HEADER_AT + PAGE;
const LOOK_AT: u64 = PROBE_AT + PAGE;
const PURGES_AT: u64 = LOOK_AT + PAGE;
const LISTS_AT: u64 = PURGES_AT + PURGES_PAGES as u64 * PAGE;

/// Bytes that a disk needs; memory is allocated on first touch.
pub const STAGING_BYTES: usize = (LISTS_AT + READERS as u64 * FOOTER_BYTES) as usize;

/// See the module documentation.
pub(super) struct Staging {
    pub free_heads: Vec<u32>,
    pub free_chunks: Vec<u32>,
}

impl Staging {
    pub fn new() -> Staging {
        Staging { free_heads: (0..HEADS).rev().collect(), free_chunks: (0..CHUNKS).rev().collect() }
    }

    pub fn head(index: u32) -> Span {
        Span::staging(HEADS_AT + u64::from(index) * PAGE, PAGE as u32)
    }

    pub fn chunk(index: u32, len: u32) -> Span {
        Span::staging(CHUNKS_AT + u64::from(index) * u64::from(CHUNK_BYTES), len)
    }

    /// A part of the space for one footer.
    pub fn footer(at: u32, len: u32) -> Span {
        Span::staging(at.into(), len)
    }

    /// The page from which segment headers are written.
    pub fn header() -> Span {
        Span::staging(HEADER_AT, PAGE as u32)
    }

    /// The page into which the superblock is read again.
    pub fn look() -> Span {
        Span::staging(LOOK_AT, PAGE as u32)
    }

    /// The first pages of those from which the list of purges is written, and into which it is read.
    pub fn purges(pages: u32) -> Span {
        Span::staging(PURGES_AT, pages * PAGE as u32)
    }

    /// A part of the space into which a reader reads lists.
    pub fn list(reader: Reader, at: u32, len: u32) -> Span {
        Span::staging(LISTS_AT + reader as u64 * FOOTER_BYTES + u64::from(at), len)
    }

    pub fn probe() -> Span {
        Span::staging(PROBE_AT, PAGE as u32)
    }
}

pub(super) fn page_at(memory: &Memory, span: Span) -> Page {
    let mut page = [0; PAGE_BYTES];
    memory.read(span, &mut page);
    page
}

/// A block in pieces of one chunk: offset and length of each.
pub(super) fn pieces(length_bytes: u64) -> impl Iterator<Item = (u64, u32)> {
    let chunk = u64::from(CHUNK_BYTES);
    (0..length_bytes.div_ceil(chunk)).map(move |i| (i * chunk, (length_bytes - i * chunk).min(chunk) as u32))
}

/// The checksum of a block from those of its pieces.
pub(super) fn joined(length_bytes: u64, sums: impl Iterator<Item = u64>) -> u64 {
    let joined = pieces(length_bytes).zip(sums).map(|((_, len), sum)| (sum, u64::from(len)));
    joined.reduce(|(a, a_len), (b, b_len)| (combine(a, b, b_len), a_len + b_len)).map_or(0, |(sum, _)| sum)
}

pub(super) fn no_memory(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot get threads or memory for a disk").source(error)
}
