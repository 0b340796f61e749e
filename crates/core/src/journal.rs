//! The core's output: effects, which the daemon carries out, and counts.
//!
//! Invariants: effects are taken in the order in which they were decided, each once; a lookup that is repeated while
//! blocks are promoted counts once, with its last answer.

use crate::key::{BlockId, Fingerprint, Generation, Instance, NamespaceIndex, SlotId};
use crate::stats::{Counts, Finder, Stats, Unfinished};
use crate::tiers::TierId;

/// What the outside has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The slot was handed out for filling: publish the generation, write holder and state to the table.
    Reserved {
        slot: SlotId,
        generation: Generation,
        holders: u64,
    },
    /// Nothing valid is in the slot any more, and nobody may touch it; `next` tells a late one so.
    Freed {
        slot: SlotId,
        next: Generation,
    },
    /// Who may touch the slot, before its offset leaves.
    Held {
        slot: SlotId,
        holders: u64,
    },
    /// The slot holds no block any more, yet it is not free: its holders, and its generation, stay.
    Fenced {
        slot: SlotId,
    },
    ExtentMade {
        first_unit: u32,
        units: u32,
        slot_bytes: u64,
    },
    ExtentCleared {
        first_unit: u32,
        units: u32,
    },
    /// Compare the slot with its checksum and call [`crate::Core::verified`]. If the block is whole, write its missing
    /// birth records.
    Verify {
        block: BlockId,
        slot: SlotId,
        generation: Generation,
        finder: Finder,
    },
    /// Fill the slot from the tier and call [`crate::Core::promoted`]; who the block is, [`crate::Core::block_key`]
    /// says.
    Promote {
        tier: TierId,
        block: BlockId,
        slot: SlotId,
        generation: Generation,
    },
    /// Write the slot to the tier and call [`crate::Core::written_back`].
    WriteBack {
        tier: TierId,
        block: BlockId,
        slot: SlotId,
        generation: Generation,
    },
    /// Copy the content of `slot` to `to_slot`, which has [`crate::Core::slot_bytes`] of `to`, and call
    /// [`crate::Core::moved`]. Read the block's entry in the table when this effect's turn comes: `slot` may get
    /// another owner soon after.
    Move {
        from: BlockId,
        slot: SlotId,
        generation: Generation,
        to: BlockId,
        to_slot: SlotId,
    },
    /// Remove all blocks of this namespace from all tiers, tell each to [`crate::Core::tier_evicted`], then call
    /// [`crate::Core::tiers_purged`].
    PurgeTiers {
        namespace: NamespaceIndex,
    },
}

const _: () = assert!(size_of::<Effect>() <= 24, "effects are written on the fastest paths");

/// See the module's head.
#[derive(Default)]
pub(crate) struct Journal {
    effects: Vec<Effect>,
    stats: Stats,
    unfinished: Unfinished,
}

impl Journal {
    #[inline]
    pub fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Moves what has to be done since the last call behind what is in `into`.
    pub fn take(&mut self, into: &mut Vec<Effect>) {
        if into.is_empty() {
            std::mem::swap(into, &mut self.effects);
        } else {
            into.append(&mut self.effects);
        }
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// To count something.
    #[inline]
    pub fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// Counts a lookup by `instance`, if it has one, for keys up to `last`, or keeps its counts until the lookup is
    /// repeated.
    pub fn count_lookup(&mut self, instance: Option<Instance>, last: Fingerprint, counts: Counts) {
        let mut done = Some(counts);
        if let Some(instance) = instance {
            self.unfinished.forget(instance, last);
            if let Some(counts) = done.take_if(|counts| counts.is_unfinished()) {
                done = self.unfinished.keep(instance, last, counts);
            }
        }
        done.iter().for_each(|counts| self.stats.count(counts));
    }

    /// Counts what this instance was told to ask again, and will not.
    pub fn count_unfinished(&mut self, instance: Instance) {
        self.unfinished.take(instance).iter().for_each(|counts| self.stats.count(counts));
    }
}
