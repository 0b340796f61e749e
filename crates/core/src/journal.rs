//! The core's output: effects, which the daemon carries out, what has ended, and counts.
//!
//! Invariant: effects are taken in the order in which they were decided, each once.

use crate::key::{BlockId, Generation, NamespaceIndex, SlotId};
use crate::stats::{Finder, Stats};
use crate::tier::Position;
use crate::tiers::TierId;

/// What the outside has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The slot was handed out for filling: publish the generation, write holder and state to the table.
    Reserved {
        /// The slot to fill.
        slot: SlotId,
        /// Whoever fills the slot writes this generation into its births.
        generation: Generation,
        /// Instances that may touch the slot, as in [`Instance::bit`].
        holders: u64,
    },
    /// Nothing valid is in the slot any more, and nobody may touch it; `next` tells a late one so.
    Freed {
        /// The slot that is free.
        slot: SlotId,
        /// The generation of the slot's next owner.
        next: Generation,
    },
    /// Who may touch the slot, before its offset leaves.
    Held {
        /// The slot of a block, or a fenced one.
        slot: SlotId,
        /// Instances that may touch the slot from now on, as in [`Instance::bit`].
        holders: u64,
    },
    /// The slot holds no block any more, yet it is not free: its holders, and its generation, stay.
    Fenced {
        /// The slot that stays out of use.
        slot: SlotId,
    },
    /// The slot holds a ready block from now on: write the block's entry to the table. Who the block is,
    /// [`crate::Core::block_key`] says, unless the block has left the pool in the same event:
    /// [`crate::Core::is_resident`].
    Ready {
        /// The block.
        block: BlockId,
        /// Where its bytes are.
        slot: SlotId,
        /// The slot's generation.
        generation: Generation,
        /// The checksum of the whole block.
        checksum: u64,
    },
    /// Units became an extent: write it to the table.
    ExtentMade {
        /// The extent's first unit.
        first_unit: u32,
        /// Number of its units.
        units: u32,
        /// Size of each of its slots.
        slot_bytes: u64,
    },
    /// An extent is units again: take it out of the table. All of its slots are free.
    ExtentCleared {
        /// The extent's first unit.
        first_unit: u32,
        /// Number of its units.
        units: u32,
    },
    /// Compare the slot with its checksum and call [`crate::Core::verified`]. If the block is whole, write its missing
    /// birth records.
    Verify {
        /// The block; it is pinned until it was compared.
        block: BlockId,
        /// Where its bytes are.
        slot: SlotId,
        /// The slot's generation, which the answer names again.
        generation: Generation,
        /// Who asked for it, to be counted should the block be corrupt.
        finder: Finder,
    },
    /// Fill the slot from the tier and call [`crate::Core::promoted`]; who the block is, [`crate::Core::block_key`]
    /// says.
    Promote {
        /// The tier that has the block.
        tier: TierId,
        /// The block; lookups are told to ask for it again.
        block: BlockId,
        /// The slot to fill.
        slot: SlotId,
        /// The slot's generation, for the births.
        generation: Generation,
    },
    /// Write the slot to the tier and call [`crate::Core::written_back`].
    WriteBack {
        /// The tier to write to.
        tier: TierId,
        /// The block; it is pinned until its store has ended.
        block: BlockId,
        /// Where its bytes are.
        slot: SlotId,
        /// The slot's generation.
        generation: Generation,
        /// Of the block before it in its prompt, if there is one and it is known.
        parent: Option<Position>,
    },
    /// Tell the tier that the block was used, and call [`crate::Core::touched`] with what the tier says of it.
    Touch {
        /// The shared tier that had the block.
        tier: TierId,
        /// Periods since that was last known.
        age: u8,
        /// The block. It is not pinned: [`crate::Core::resident_key`] says whether it is still there.
        block: BlockId,
        /// Its slot's generation.
        generation: Generation,
    },
    /// Copy the content of `slot` to `to_slot`, which has [`crate::Core::slot_bytes`] of `to`, and call
    /// [`crate::Core::moved`]. Read the block's entry in the table when this effect's turn comes: `slot` may get
    /// another owner soon after.
    Move {
        /// The block that moves. It is not pinned.
        from: BlockId,
        /// The slot that it leaves.
        slot: SlotId,
        /// The generation of that slot; if it is another one at the end, the copy is void.
        generation: Generation,
        /// The record that stands for the copy meanwhile.
        to: BlockId,
        /// The slot to fill.
        to_slot: SlotId,
    },
    /// Remove all blocks of this namespace from all tiers, tell each to [`crate::Core::tier_evicted`], then call
    /// [`crate::Core::tiers_purged`].
    PurgeTiers {
        /// The short name that the namespace had before its purge.
        namespace: NamespaceIndex,
    },
    /// The pool holds no block any more that a purge of this namespace took away, but for fenced ones.
    PoolPurged {
        /// The short name that the namespace had before its purge.
        namespace: NamespaceIndex,
    },
}

const _: () = assert!(size_of::<Effect>() <= 24, "effects are written on the fastest paths");

/// See the module's head.
#[derive(Default)]
pub(crate) struct Journal {
    effects: Vec<Effect>,
    ends: u64,
    stats: Stats,
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

    /// A promotion, verification or probe has ended.
    pub fn note_end(&mut self) {
        self.ends += 1;
    }

    pub fn ends(&self) -> u64 {
        self.ends
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// To count something.
    #[inline]
    pub fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }
}
