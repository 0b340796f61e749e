//! The loads of a disk: those that wait, what those that have begun keep of the pool, and when to leave the disk alone.

use std::collections::{HashSet, VecDeque};

use forebay_core::decorate::Breaker;
use forebay_core::tier::{OpId, Operation};

/// See the module documentation.
pub(super) struct Reads {
    waiting: VecDeque<Operation>,
    /// Bytes of the blocks that are being read into slots.
    begun_bytes: u64,
    /// Loads that were given up and have not ended.
    late: HashSet<OpId>,
    /// Of the loads. Stores are held back by the log's own pause.
    pub breaker: Breaker,
}

impl Reads {
    pub fn new(has_breaker: bool) -> Reads {
        Reads { waiting: VecDeque::new(), begun_bytes: 0, late: HashSet::new(), breaker: Breaker::new(has_breaker) }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// False if the load does not wait here.
    pub fn withdraw(&mut self, id: OpId) -> bool {
        let at = self.waiting.iter().position(|op| op.id == id);
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }

    /// The load, which has begun, was given up.
    pub fn note_late(&mut self, id: OpId) {
        self.late.insert(id);
    }

    pub fn push(&mut self, op: &Operation) {
        self.waiting.push_back(*op);
    }

    /// The next load, unless those that have begun fill `most_bytes`. One may always begin.
    pub fn pop(&mut self, most_bytes: u64) -> Option<Operation> {
        let has_room = self.begun_bytes == 0 || self.begun_bytes < most_bytes;
        if has_room { self.waiting.pop_front() } else { None }
    }

    pub fn begin(&mut self, bytes: u64) {
        self.begun_bytes += bytes;
    }

    /// Whether it was given up.
    pub fn end(&mut self, id: OpId, bytes: u64) -> bool {
        self.begun_bytes -= bytes;
        !self.late.is_empty() && self.late.remove(&id)
    }
}
