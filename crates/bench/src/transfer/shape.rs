//! What both sides of a measurement agree on: which operations, and what cannot be.

use forebay_core::{Error, ErrorKind};
use forebay_fabric::Verb;
use rustix::time::{ClockId, clock_gettime};

/// Of both sides' memory, each.
pub const MOST_MEMORY_BYTES: u64 = 2 << 30;

/// What moves in which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
    /// As many reads as writes, at once.
    Both,
}

impl Direction {
    pub fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
            Direction::Both => "both",
        }
    }

    pub fn verbs(self) -> &'static [Verb] {
        match self {
            Direction::Read => &[Verb::Read],
            Direction::Write => &[Verb::Write],
            Direction::Both => &[Verb::Read, Verb::Write],
        }
    }
}

/// One shape of operations.
#[derive(Clone, Copy)]
pub struct Shape {
    pub direction: Direction,
    pub size_bytes: u64,
    pub segments: u64,
    pub depth: u64,
    /// In each direction.
    pub operations: u64,
}

impl Shape {
    pub fn op_bytes(&self) -> u64 {
        self.size_bytes * self.segments
    }

    /// Of the memory that reads use, and of the memory that writes use.
    pub fn half_bytes(&self) -> u64 {
        self.op_bytes() * self.depth
    }
}

/// Of all threads of this process.
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// For an answer that no release of the other side gives.
pub fn odd() -> Error {
    let error = Error::new(ErrorKind::Corrupt, "the other side of the measurement answers something else");
    error.hint("use the same release on both sides")
}
