//! The interface of an engine.

use std::collections::VecDeque;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::memory::{Span, Spans};

/// Of `fallocate`: on a device that supports it, the kernel writes zeros by giving the range back, or fails.
pub(super) const TRIM: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// One transfer or flush. Offsets, lengths and memory are multiples of 4 KiB, as direct I/O requires.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Fills `span`. When all of it arrived and `checksum` gives a piece of memory, the engine's thread sums that
    /// piece up.
    Read {
        /// Bytes from the start of the file.
        at: u64,
        /// Where the bytes go.
        span: Span,
        /// What is summed up: usually `span` without its padding.
        checksum: Option<Span>,
    },
    /// Writes `spans` consecutively, [`MOST_SPANS`](super::MOST_SPANS) at most.
    Write {
        /// Bytes from the start of the file.
        at: u64,
        /// The bytes, in their order in the file.
        spans: Spans,
    },
    /// Makes every write that was done before this was submitted durable across a power loss.
    Sync,
    /// Tells a block device that nobody needs this range. Afterwards it reads as zeros.
    Trim {
        /// Bytes from the start of the device.
        at: u64,
        /// Whole logical blocks of the device.
        bytes: u64,
    },
}

/// A piece of work, and the name by which its owner knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Returned in [`Done`]. The owner sees to it that no two requests in flight have the same.
    pub tag: u64,
    /// What is to be done.
    pub work: Work,
}

/// The end of a request: bytes moved, perhaps fewer than requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// That of the request.
    pub tag: u64,
    /// Bytes moved; 0 for a flush. The error is the kernel's own.
    pub result: Result<u32, Errno>,
    /// Of the piece that a read named, once all of it arrived; otherwise it says nothing.
    pub checksum: u64,
}

/// See the module documentation. Dropping an engine waits a short time for requests in flight. After that a thread
/// keeps file and memory until they have ended.
pub trait Engine: Send {
    /// For reports: `io_uring`, `threads`.
    fn name(&self) -> &'static str;
    /// Takes all of `requests`; their owner bounds how many are in flight.
    fn submit(&mut self, requests: &mut VecDeque<Request>);
    /// Appends completed requests. Never blocks.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// Blocks until [`Engine::poll`] has something to return, or `timeout` has passed.
    fn wait(&mut self, timeout: Duration);
    /// Reports that the pool's first bytes are populated, so that they can be pinned.
    fn register(&mut self, _populated_bytes: u64) {}
}
