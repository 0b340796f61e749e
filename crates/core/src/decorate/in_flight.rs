//! One operation from the moment the tier takes it to its end, over all attempts at it.
//!
//! Invariant: the tier never sees an id twice, so no completion of one attempt is taken for that of another.

use std::time::Duration;

use crate::tier::{OpId, Operation};

/// An id's highest bits name the attempt. No driver counts up to them.
const ATTEMPT_SHIFT: u32 = 60;

/// More attempts do not fit into an id.
pub const MOST_ATTEMPTS: u32 = 1 << (64 - ATTEMPT_SHIFT);

/// An entry of the stack's table.
pub struct InFlight {
    /// As it was submitted.
    pub op: Operation,
    /// When it was submitted.
    pub since: Duration,
    /// Attempts that the tier took.
    pub attempts: u32,
    /// It was late or cancelled. Nobody waits for it, so it is not tried again.
    pub is_final: bool,
    /// Who has it.
    pub state: State,
}

/// Who has an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The tier works on its last attempt.
    AtTier,
    /// It waits for its next attempt, which is due at this time.
    Waiting(Duration),
}

impl InFlight {
    /// The tier took its first attempt.
    pub fn new(op: &Operation, now: Duration) -> InFlight {
        assert!(op.id.0 >> ATTEMPT_SHIFT == 0, "{:?} leaves no room for the attempt", op.id);
        InFlight { op: *op, since: now, attempts: 1, is_final: false, state: State::AtTier }
    }

    /// The next attempt, as the tier is asked for it.
    pub fn next_attempt(&self) -> Operation {
        Operation { id: self.attempt_id(self.attempts), ..self.op }
    }

    /// The last attempt's id.
    pub fn last_id(&self) -> OpId {
        self.attempt_id(self.attempts - 1)
    }

    fn attempt_id(&self, before: u32) -> OpId {
        OpId(self.op.id.0 | u64::from(before) << ATTEMPT_SHIFT)
    }
}

/// The id of the operation that an attempt belongs to.
pub fn first_id(id: OpId) -> OpId {
    OpId(id.0 & ((1 << ATTEMPT_SHIFT) - 1))
}
