//! The record of one block, its states, and the slab that contains all records.
//!
//! Invariants: only [`super::Slots`] can change a record; a state changes only in `transition`, and only as its table
//! allows.
//!
//! A record exists from the time when a slot is reserved until the slot is free again. It fits one cache line. With its
//! policy node, its share of the index and its entry in the slot map, a resident block costs about 100 bytes (measured
//! by the benchmark `core_speed`).

use std::hint::black_box;

use crate::chunked::Chunked;
use crate::key::{BlockHash, BlockId, ClassId, Generation, Instance, NamespaceIndex, SlotId, TierId};

/// A bit in `Block::owner`, beside the tier: set by a prefetch, until a lookup asks for the block.
pub(crate) const PREFETCH: u8 = 1 << 7;
/// A bit in `Block::owner`, beside the tier: the tier brought the block up, and no lookup that leases has had it since.
pub(crate) const FRESH: u8 = 1 << 6;

const _: () = assert!(Instance::MAX <= FRESH as usize, "owners leave both bits free");
const _: () = assert!(TierId::MAX <= FRESH as usize, "owners leave both bits free");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// On the free list of the slab.
    Vacant,
    /// Its slot is being filled by the instance in `owner`; it has no key yet.
    Reserved,
    /// Found in the table of an earlier epoch, not yet compared with its checksum.
    Unverified,
    /// The comparison runs: of a block that was found at a restart, of a suspected block, or of a block of several
    /// slices that a tier promoted, whose birth records are made from it.
    Verifying,
    /// In the index, not in a policy: the tier in `owner` is filling its slot.
    Promoting,
    /// In no index: its slot is being filled with a block that leaves another one.
    Moving,
    /// Complete; never changes again.
    Ready,
    /// Not in the index any more (purged, corrupt, reserved in an earlier epoch, or filled by a tier too late), yet
    /// still held: the slot becomes free when the last holder is gone.
    Fenced,
}

#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Block {
    /// Instances that were handed this slot and may still touch it; mirrors the table.
    pub holders: u64,
    pub hash: BlockHash,
    pub state: State,
    pub class: ClassId,
    pub group: u16,
    /// Who fills it: an instance while `Reserved`, a tier while `Promoting`. With [`PREFETCH`] or [`FRESH`] the tier
    /// that it came from, also once it is `Ready`.
    pub owner: u8,
    /// The tiers (a mask) where it is, or will be once what waits there is written.
    pub tiers: u8,
    pub namespace: NamespaceIndex,
    pub slot: SlotId,
    pub generation: Generation,
    /// Leases and lookups that cover it, plus one while it is being verified, promoted, or written to a tier.
    pub pins: u32,
}

const _: () = assert!(size_of::<Block>() == 64, "a block's record fits one cache line");

impl State {
    /// Every change of state that there is.
    fn may_become(self, to: State) -> bool {
        match self {
            State::Vacant => {
                use State::{Fenced, Moving, Promoting, Reserved, Unverified};
                matches!(to, Reserved | Promoting | Moving | Unverified | Fenced)
            }
            State::Reserved => matches!(to, State::Ready | State::Vacant),
            State::Unverified => matches!(to, State::Verifying | State::Fenced | State::Vacant),
            // It is pinned as long as the comparison runs.
            State::Verifying => matches!(to, State::Ready | State::Fenced),
            // The tier may still write.
            State::Promoting => matches!(to, State::Ready | State::Fenced),
            State::Moving => matches!(to, State::Vacant),
            State::Ready => matches!(to, State::Verifying | State::Fenced | State::Vacant),
            // An instance that came back may go on filling what it filled before.
            State::Fenced => matches!(to, State::Reserved | State::Vacant),
        }
    }
}

impl Block {
    /// Vacant, without a key and a slot.
    #[inline]
    pub fn new(class: ClassId, generation: Generation, holders: u64) -> Block {
        Block {
            holders,
            hash: BlockHash::NONE,
            state: State::Vacant,
            class,
            group: 0,
            owner: 0,
            tiers: 0,
            namespace: NamespaceIndex::NONE,
            slot: SlotId(0),
            generation,
            pins: 0,
        }
    }

    /// The only place where a block's state changes. Returns the state before. Panics if the table does not allow the
    /// change.
    #[inline]
    pub(super) fn transition(&mut self, to: State) -> State {
        let from = self.state;
        assert!(from.may_become(to), "a block goes from {from:?} to {to:?}, in {:?}", self.slot);
        self.state = to;
        from
    }

    /// Whether it is in the index and in its class's policy.
    #[inline]
    pub fn is_indexed(&self) -> bool {
        matches!(self.state, State::Ready | State::Unverified | State::Verifying)
    }

    /// The tier that fills, or filled, its slot.
    pub fn filler(&self) -> TierId {
        TierId(self.owner & !(PREFETCH | FRESH))
    }

    /// Whether a tier brought it up, and no lookup that leases has had it since.
    pub fn is_promoted(&self) -> bool {
        self.owner & (PREFETCH | FRESH) != 0
    }

    pub fn has_key(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> bool {
        self.hash.is(hash) && self.namespace == namespace && self.group == group
    }
}

/// Records by id, vacant ones reused last-in first-out.
#[derive(Default)]
pub(crate) struct Records {
    records: Chunked<Block>,
    vacant: Vec<u32>,
}

impl Records {
    pub fn add(&mut self, block: Block) -> BlockId {
        match self.vacant.pop() {
            Some(id) => {
                self.records[id] = block;
                BlockId(id)
            }
            None => BlockId(self.records.push(block)),
        }
    }

    /// The record, which is vacant, may be used for another block.
    pub fn remove(&mut self, id: BlockId) {
        assert!(self[id].state == State::Vacant, "block {id:?} is removed while it has a slot");
        // An id that was found before finds no key any more.
        self.get_mut(id).namespace = NamespaceIndex::NONE;
        self.vacant.push(id.0);
    }

    /// For the slots alone: they see to it that lists and counts agree with the record.
    #[inline]
    pub(super) fn get_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.records[id.0]
    }

    /// Brings records into the processor's cache, all at once instead of one after another.
    pub fn touch_lines(&self, blocks: &[BlockId]) {
        let there = blocks.iter().filter(|block| **block != BlockId::NONE);
        black_box(there.fold(0, |sum, block| sum ^ self[*block].pins));
    }

    /// One more than the largest id ever given.
    pub fn end(&self) -> u32 {
        self.records.len()
    }

    pub fn count(&self) -> u32 {
        self.records.len() - self.vacant.len() as u32
    }

    pub fn heap_bytes(&self) -> usize {
        self.records.heap_bytes() + self.vacant.capacity() * 4
    }
}

impl std::ops::Index<BlockId> for Records {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.records[id.0]
    }
}
