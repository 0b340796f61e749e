//! The interface of a tier below the pool, as the core and the daemon use it.
//!
//! A tier is polled, never awaited, so that the simulator and the fault tests can implement one as easily as a disk. It
//! does not retry, time out or count: decorators do. The conformance suite checks this contract: `submit` takes a
//! prefix of the batch and returns its length; each accepted operation completes exactly once, in any order; the bytes
//! of a load are not touched after its completion; `cancel` is advisory, and the completion still comes; if a load's
//! bytes do not match their checksum, the load fails as corrupt.

use crate::error::ErrorKind;
use crate::key::{BlockKey, Generation, SlotId};

/// Names one operation from submission to completion; never reused within a daemon's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// Where a tier keeps a block, in words of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Location(pub u64, pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// Pool slot to tier. Completes with the location and the checksum unchanged.
    Store,
    /// Tier to pool slot.
    Load { at: Location },
    /// Is the key there? For tiers whose truth is elsewhere.
    Exists,
    /// Forget the key.
    Remove { at: Location },
}

#[derive(Clone, Copy, Debug)]
pub struct Operation {
    pub id: OpId,
    pub kind: OpKind,
    pub key: BlockKey,
    /// The pool slot to read or fill; `None` for `Exists` and `Remove`.
    pub slot: Option<(SlotId, Generation)>,
    pub length_bytes: u64,
    pub checksum: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Stored(Location),
    Loaded { length_bytes: u64, checksum: u64 },
    Found(Location),
    Absent,
    Removed,
    Failed(ErrorKind),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    pub id: OpId,
    pub outcome: Outcome,
}

/// What the conformance suite may ask of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    pub can_store: bool,
    pub can_remove: bool,
    /// Blocks written before a restart are found after it.
    pub is_durable: bool,
    /// Other daemons see what this one stored.
    pub is_shared: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    Healthy,
    /// Skipped by lookups and stores until it recovers.
    Sick(ErrorKind),
}

pub trait Tier {
    fn name(&self) -> &'static str;
    fn capabilities(&self) -> Capabilities;
    /// Takes operations from the front of `batch`; returns how many. Never blocks.
    fn submit(&mut self, batch: &[Operation]) -> usize;
    /// Appends what has completed since the last call. Never blocks.
    fn poll(&mut self, completions: &mut Vec<Completion>);
    fn cancel(&mut self, id: OpId);
    fn health(&self) -> Health;
}

impl<T: Tier + ?Sized> Tier for Box<T> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        (**self).submit(batch)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        (**self).poll(completions);
    }

    fn cancel(&mut self, id: OpId) {
        (**self).cancel(id);
    }

    fn health(&self) -> Health {
        (**self).health()
    }
}
