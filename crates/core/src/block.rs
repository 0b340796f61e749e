//! The record of one block, and the slab that holds all of them.
//!
//! A record exists from the moment a slot is reserved until the slot is free again. It fits one cache line:
//! with its policy node, its share of the index and its entry in the slot map a resident block costs about
//! 100 bytes (measured by `cargo bench`-like example `core_speed`).

use std::hint::black_box;

use crate::chunked::Chunked;
use crate::key::{BlockHash, Generation, SlotId};

/// Index of a block's record; reused after the block is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    pub const NONE: BlockId = BlockId(u32::MAX);
}

/// Short name of a namespace inside the core; never on any medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct NamespaceIndex(pub u32);

impl NamespaceIndex {
    pub const NONE: NamespaceIndex = NamespaceIndex(u32::MAX);
}

/// In `Block::owner` beside the tier, from a promotion that nobody asked for yet until a lookup does.
pub const AHEAD: u8 = 1 << 7;

/// A size class of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ClassId(pub u16);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// On the free list of the slab.
    Vacant,
    /// Its slot is being filled by the instance in `owner`; it has no key yet.
    Reserved,
    /// Found in the table of an earlier epoch, not yet compared with its checksum.
    Unverified,
    /// The comparison runs: of what a restart found, of what somebody suspects, and of what came up from a tier and has
    /// more than one slice, whose births are made from it.
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
pub struct Block {
    /// Instances that were handed this slot and may still touch it; mirrors the table.
    pub holders: u64,
    pub hash: BlockHash,
    pub state: State,
    pub class: ClassId,
    pub group: u16,
    /// Who fills it: an instance while `Reserved`, a tier while `Promoting`. With [`AHEAD`] the tier that it came from,
    /// also once it is `Ready`.
    pub owner: u8,
    /// The tiers (a mask) where it is, or will be once what waits there is written.
    pub below: u8,
    pub namespace: NamespaceIndex,
    pub slot: SlotId,
    pub generation: Generation,
    /// Leases and lookups that cover it, plus one while it is being verified, promoted, or written to a tier.
    pub pins: u32,
}

const _: () = assert!(size_of::<Block>() == 64, "a block's record fits one cache line");

impl Block {
    pub fn has_key(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> bool {
        self.hash.is(hash) && self.namespace == namespace && self.group == group
    }
}

/// Records by id, vacant ones reused last-in first-out.
#[derive(Default)]
pub struct Blocks {
    records: Chunked<Block>,
    vacant: Vec<u32>,
}

impl Blocks {
    pub fn add(&mut self, block: Block) -> BlockId {
        match self.vacant.pop() {
            Some(id) => {
                self.records[id] = block;
                BlockId(id)
            }
            None => BlockId(self.records.push(block)),
        }
    }

    pub fn remove(&mut self, id: BlockId) {
        assert!(self[id].state != State::Vacant, "block {id:?} is removed twice");
        self[id].state = State::Vacant;
        // An id that was found before finds no key any more.
        self[id].namespace = NamespaceIndex::NONE;
        self.vacant.push(id.0);
    }

    /// Brings records into the processor's cache, all at once instead of one after another.
    pub fn warm(&self, blocks: &[BlockId]) {
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

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;

    fn index(&self, id: BlockId) -> &Block {
        &self.records[id.0]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.records[id.0]
    }
}
