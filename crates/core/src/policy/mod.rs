//! Which block goes when room is needed: one trait, one file a policy.
//!
//! A policy sees block ids, never keys or bytes of memory; its entries are the intrusive nodes below, so that a
//! resident block costs no allocation. Each size class has a policy of its own. A request's blocks are touched
//! last-to-first, hence a parent is always more recent than its children and plain recency is leaf-first.

pub mod arc;
pub mod density;
pub mod ghosts;
pub mod lists;
pub mod lru;
pub mod s3fifo;
pub mod sketch;
pub mod tinylfu;
pub mod twoq;
pub mod worth;

#[cfg(test)]
mod tests;

use std::hint::black_box;

use crate::block::BlockId;
use crate::chunked::Chunked;
use crate::index::Fingerprint;

/// Link and memory of one block, for whichever policy its class has.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub prev: BlockId,
    pub next: BlockId,
    /// The core's clock at the last insert or touch; compares the age of blocks across classes.
    pub touched: u32,
    /// Free for the policy: which of its queues holds the block, hit bits and the like.
    pub mark: u32,
}

/// The nodes of all blocks, by block id.
#[derive(Default)]
pub struct Nodes {
    nodes: Chunked<Node>,
    /// Advances by one with every insert and touch.
    pub clock: u32,
}

impl Nodes {
    /// Makes room for `block`; ids grow one by one.
    pub fn cover(&mut self, block: BlockId) {
        while self.nodes.len() <= block.0 {
            self.nodes.push(Node { prev: BlockId::NONE, next: BlockId::NONE, touched: 0, mark: 0 });
        }
    }

    /// Brings nodes into the processor's cache, all at once instead of one after another.
    pub fn warm(&self, blocks: &[BlockId]) {
        black_box(blocks.iter().fold(0, |sum, block| sum ^ self[*block].mark));
    }

    pub fn stamp(&mut self, block: BlockId) {
        self.clock = self.clock.wrapping_add(1);
        self.nodes[block.0].touched = self.clock;
    }

    /// Inserts and touches since `block`'s last one.
    pub fn age(&self, block: BlockId) -> u32 {
        self.clock.wrapping_sub(self.nodes[block.0].touched)
    }

    pub fn heap_bytes(&self) -> usize {
        self.nodes.heap_bytes()
    }
}

impl std::ops::Index<BlockId> for Nodes {
    type Output = Node;

    fn index(&self, block: BlockId) -> &Node {
        &self.nodes[block.0]
    }
}

impl std::ops::IndexMut<BlockId> for Nodes {
    fn index_mut(&mut self, block: BlockId) -> &mut Node {
        &mut self.nodes[block.0]
    }
}

/// What a policy asks about a block it would like to evict.
pub trait Residents {
    /// True while somebody may touch its slot: it must stay.
    fn is_held(&self, block: BlockId) -> bool;
    /// True while a waiting request expects it: it had better stay.
    fn is_wanted(&self, block: BlockId) -> bool;
    /// Whether a wanted block goes if nothing else is found.
    fn may_take_wanted(&self) -> bool;
    /// For ghosts, which remember keys after their blocks are gone.
    fn fingerprint(&self, block: BlockId) -> Fingerprint;
}

/// Entries that one `evict` may pass over because somebody holds or wants them; bounds the time of an eviction.
pub const MAX_SCAN: usize = 64;

/// See the module's head. No call looks at more than [`MAX_SCAN`] entries.
pub trait Policy: Send {
    fn name(&self) -> &'static str;

    /// `block` became resident. `parent` is the block before it in its prompt, resident in the same class: a
    /// child goes right behind its parent, so that a prompt stored piece by piece ends up leaf-first too.
    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>);

    /// As `insert`, of a block that a waiting request expects.
    fn insert_wanted(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        self.insert(nodes, block, key, parent);
    }

    /// A block of this key came and was not admitted, since its parent is not resident.
    fn refuse(&mut self, _nodes: &mut Nodes, _key: Fingerprint) {}

    /// `block` was asked for and found.
    fn touch(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block`, inserted before anybody asked for it, is asked for now, and touched soon.
    fn begin_use(&mut self, _nodes: &mut Nodes, _block: BlockId) {}

    /// `block` is in use or will be soon: no sign of its worth, but not to be evicted next.
    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block` left without being evicted.
    fn remove(&mut self, nodes: &mut Nodes, block: BlockId);

    /// Takes the next victim out, or none if all candidates looked at are held, or wanted and to be spared.
    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId>;

    /// Whether a tier below is given the blocks that were asked for again, and not the others.
    fn back(&mut self, _is_backed: bool) {}

    /// The block that `evict` would look at first.
    fn coldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// The block used longest ago, as far as the policy knows: how long it keeps what is of no use, which compares
    /// classes whatever else their policies go by.
    fn oldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// `insert` or `evict` is about to be called for blocks of these keys, if the guess is right: a chance to
    /// start loads from memory, so that they overlap.
    fn warm(&self, _keys: &[Fingerprint]) {}

    /// Bytes on the heap that remember keys without blocks.
    fn ghost_bytes(&self) -> usize {
        0
    }
}

/// Makes a policy.
pub type Make = fn() -> Box<dyn Policy>;

/// All policies by name, the default first.
pub const ALL: [(&str, Make); 6] = [
    ("density", || Box::<density::Density>::default()),
    ("lru", || Box::<lru::Lru>::default()),
    ("twoq", || Box::<twoq::TwoQ>::default()),
    ("arc", || Box::<arc::Arc>::default()),
    ("s3fifo", || Box::<s3fifo::S3Fifo>::default()),
    ("tinylfu", || Box::<tinylfu::TinyLfu>::default()),
];

/// The policy of this name.
pub fn by_name(name: &str) -> Option<Make> {
    ALL.iter().find(|(known, _)| *known == name).map(|(_, make)| *make)
}

/// A doubly linked list through the nodes; head is the most recent.
#[derive(Debug)]
pub struct List {
    pub head: BlockId,
    pub tail: BlockId,
    pub len: u32,
}

impl Default for List {
    fn default() -> Self {
        List { head: BlockId::NONE, tail: BlockId::NONE, len: 0 }
    }
}

impl List {
    pub fn push_head(&mut self, nodes: &mut Nodes, block: BlockId) {
        let head = self.head;
        nodes[block].prev = BlockId::NONE;
        nodes[block].next = head;
        match head {
            BlockId::NONE => self.tail = block,
            head => nodes[head].prev = block,
        }
        self.head = block;
        self.len += 1;
    }

    /// Puts `block` on the colder side of `other`, which is in this list.
    pub fn push_behind(&mut self, nodes: &mut Nodes, block: BlockId, other: BlockId) {
        let next = nodes[other].next;
        nodes[block].prev = other;
        nodes[block].next = next;
        nodes[other].next = block;
        match next {
            BlockId::NONE => self.tail = block,
            next => nodes[next].prev = block,
        }
        self.len += 1;
    }

    /// From the head on.
    pub fn iter<'a>(&self, nodes: &'a Nodes) -> impl Iterator<Item = BlockId> + 'a {
        let is_there = |block: BlockId| (block != BlockId::NONE).then_some(block);
        std::iter::successors(is_there(self.head), move |block| is_there(nodes[*block].next))
    }

    pub fn unlink(&mut self, nodes: &mut Nodes, block: BlockId) {
        let Node { prev, next, .. } = nodes[block];
        match prev {
            BlockId::NONE => self.head = next,
            prev => nodes[prev].next = next,
        }
        match next {
            BlockId::NONE => self.tail = prev,
            next => nodes[next].prev = prev,
        }
        self.len -= 1;
    }
}
