//! What the readers of lists have: `listing` reads them.
//!
//! Invariant: each reader has space of its own for one list, so none waits for another.

use std::time::Duration;

use super::index::Entry;
use super::layout::Record;
use crate::Seldom;

/// Who reads a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reader {
    Reclaim,
    Purge,
    Void,
}

/// How many there are.
pub(super) const READERS: usize = 3;

/// The list of a segment, as one reader has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum List {
    /// It has so many records.
    Here(u32),
    /// It is being read, or will be read again.
    Waits,
    /// It cannot be read: no block of the segment is served any more.
    Lost,
}

/// The lists that readers have, and what becomes of segments without one.
#[derive(Default)]
pub(super) struct Lists {
    pub readings: [Reading; READERS],
    /// Whether the index may have blocks of such segments that are to be withdrawn.
    pub is_giving_up: bool,
    /// The place of the index from which on they are looked for, and whether one more segment was lost meanwhile.
    pub place: u32,
    pub is_one_more: bool,
    /// The place from which on blocks of a segment without a list are looked for, whose new life has begun.
    pub forget_place: u32,
    pub gave_up_at: Option<Duration>,
    /// Segments without a list.
    pub lost: u32,
    pub told: Seldom,
}

/// What one reader has.
#[derive(Default)]
pub(super) struct Reading {
    /// The segment, and its life.
    pub of: Option<(u32, u64)>,
    pub state: State,
    pub tries: u32,
    /// The last attempt has read something else.
    pub is_damaged: bool,
    /// A transfer into this reader's space, of whatever list.
    pub is_under_way: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum State {
    #[default]
    UnderWay,
    Whole,
    Failed {
        again_at: Duration,
    },
}

/// A walk through the lists of all segments, the oldest first.
///
/// Blocks that are carried over meanwhile go to the youngest segment, which comes last: a block that is there from the
/// start of the walk to its end is met, perhaps twice. One that is stored meanwhile may be missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    pub reader: Reader,
    /// All segments of earlier lives were gone through.
    pub life: u64,
    /// The next record of the segment of that life.
    pub record: u32,
    pub is_in_memory: bool,
    /// What was evicted from segments up to that life may still come back with a restart.
    pub void_until: Option<u64>,
}

/// A step of a walk.
pub(super) enum Step {
    /// Blocks of this segment whose record in its list is that of their entry, served or not.
    Blocks(u32, Vec<(Record, Entry)>),
    /// Something has to end first: the disk's next turn may be of use.
    Waits,
    End,
}

impl Walk {
    pub fn new(reader: Reader) -> Walk {
        Walk { reader, life: 0, record: 0, is_in_memory: false, void_until: None }
    }

    pub fn go_to(&mut self, life: u64) {
        (self.life, self.record) = (life, 0);
    }
}
