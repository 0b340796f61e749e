//! The interface of a tier below the pool, as the core and the daemon use it.
//!
//! A tier is polled, never awaited, so that the simulator and the fault tests can implement one as easily as a disk. It
//! does not retry, time out or count: `decorate` does. The conformance suite checks this contract: `submit` takes a
//! prefix of the batch and returns its length; each accepted operation completes exactly once, in any order; the bytes
//! of a load are not touched after its completion; `cancel` is advisory, and the completion still comes; if a load's
//! bytes do not match their checksum, the load fails as corrupt.

use std::num::NonZeroU64;

use crate::error::ErrorKind;
use crate::key::{BlockKey, Generation, SlotId};

/// Names one operation from submission to completion; never reused within a daemon's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// A position in prompts: all tokens up to the last one of a block. Blocks of several groups that end there have the
/// same one. It is a digest, which means something as long as the process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Position(NonZeroU64);

impl Position {
    /// Two digests that differ in the lowest bit alone are one position.
    pub fn new(digest: u64) -> Position {
        Position(NonZeroU64::MIN | digest)
    }
}

/// Where a block stands in its prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lineage {
    /// The block's own position.
    pub own: Position,
    /// That of the block before it; `None` at the start of a prompt, or if it is not known.
    pub parent: Option<Position>,
}

/// What a tier is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// Pool slot to tier.
    Store,
    /// Tier to pool slot.
    Load,
    /// Is the key there? For tiers whose truth is elsewhere.
    Exists,
    /// The block was used elsewhere: keep it as if it had been loaded now. Completes as `Exists` does.
    Touch {
        /// A use that the tier noted less than so many seconds ago is as good.
        fresh_seconds: u32,
    },
    /// Forget the key.
    Remove,
}

/// One request to a tier, about one block.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Comes back in the completion.
    pub id: OpId,
    /// What to do.
    pub kind: OpKind,
    /// The block's name, the same on every tier.
    pub key: BlockKey,
    /// The pool slot to read or fill; `None` for all but `Store` and `Load`.
    pub slot: Option<(SlotId, Generation)>,
    /// Bytes of the block; of an `Exists` or a `Remove`, 0 where they are not known.
    pub length_bytes: u64,
    /// Checksum of what a `Store` writes; 0 for all others.
    pub checksum: u64,
    /// Of a `Store`, where the block stands in its prompt, for tiers that keep neighbours together; `None` if that is
    /// not known.
    pub lineage: Option<Lineage>,
}

/// How an operation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A `Store` is done.
    Stored,
    /// A `Load` is done: the slot holds what was stored.
    Loaded {
        /// Bytes of the block, as the tier knows them.
        length_bytes: u64,
        /// Checksum of the block; the bytes in the slot were compared with it.
        checksum: u64,
    },
    /// `Exists`, `Touch`: the block is there.
    Found,
    /// The block is not there, and that is no failure.
    Absent,
    /// A `Remove` is done.
    Removed,
    /// It could not be done. Whether another attempt may help, the kind says.
    Failed(ErrorKind),
}

/// The end of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Of the operation that ended.
    pub id: OpId,
    /// How it ended.
    pub outcome: Outcome,
}

/// What the conformance suite may ask of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    /// Takes `Store`.
    pub can_store: bool,
    /// Takes `Remove`.
    pub can_remove: bool,
    /// Takes `Touch`. All others fail one as unsupported.
    pub can_touch: bool,
    /// Blocks written before a restart are found after it.
    pub is_durable: bool,
    /// Other daemons see what this one stored.
    pub is_shared: bool,
}

/// Whether a tier is of use at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// It is asked and written to.
    Healthy,
    /// Skipped by lookups and stores until it recovers.
    Sick(ErrorKind),
}

/// See the module's head for the contract.
pub trait Tier {
    /// The kind of tier, as in configuration and metrics.
    fn name(&self) -> &'static str;
    /// What the tier can do; the same for its whole life.
    fn capabilities(&self) -> Capabilities;
    /// Takes operations from the front of `batch`; returns how many. Never blocks.
    fn submit(&mut self, batch: &[Operation]) -> usize;
    /// Appends what has completed since the last call. Never blocks.
    fn poll(&mut self, completions: &mut Vec<Completion>);
    /// Asks the tier to end an operation early; unknown ids are ignored. Its completion still comes. Never blocks.
    fn cancel(&mut self, id: OpId);
    /// What the tier thinks of itself. Never blocks.
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
