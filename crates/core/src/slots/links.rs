//! Links between blocks, for the lists that contain blocks: those of a policy, of reservations, of fenced blocks.
//!
//! Invariants: a block is in at most one list; a list needs no allocation, however long it is.

use std::hint::black_box;

use crate::chunked::Chunked;
use crate::key::BlockId;

/// Link and memory of one block, for whichever policy its class has.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The next block towards the head of its list, or [`BlockId::NONE`].
    pub prev: BlockId,
    /// The next block towards the tail of its list, or [`BlockId::NONE`].
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
    pub fn touch_lines(&self, blocks: &[BlockId]) {
        black_box(blocks.iter().fold(0, |sum, block| sum ^ self[*block].mark));
    }

    /// Advances the clock; `block` was touched at that time.
    pub fn stamp(&mut self, block: BlockId) {
        self.clock = self.clock.wrapping_add(1);
        self.nodes[block.0].touched = self.clock;
    }

    /// Inserts and touches since `block`'s last one.
    pub fn age(&self, block: BlockId) -> u32 {
        self.clock.wrapping_sub(self.nodes[block.0].touched)
    }

    /// Bytes of all nodes.
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

/// A doubly linked list through the nodes; head is the most recent.
#[derive(Debug)]
pub struct List {
    /// The most recent block, or [`BlockId::NONE`].
    pub head: BlockId,
    /// The block that was not used for longest, or [`BlockId::NONE`].
    pub tail: BlockId,
    /// Blocks in the list.
    pub len: u32,
}

impl Default for List {
    fn default() -> Self {
        List { head: BlockId::NONE, tail: BlockId::NONE, len: 0 }
    }
}

impl List {
    /// Puts `block`, which is in no list, at the head.
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

    /// From the tail on.
    pub fn iter_back<'a>(&self, nodes: &'a Nodes) -> impl Iterator<Item = BlockId> + 'a {
        let is_there = |block: BlockId| (block != BlockId::NONE).then_some(block);
        std::iter::successors(is_there(self.tail), move |block| is_there(nodes[*block].prev))
    }

    /// Puts all of `others` on the colder side of what is here.
    pub fn append(&mut self, nodes: &mut Nodes, others: List) {
        match (self.tail, others.head) {
            (_, BlockId::NONE) => return,
            (BlockId::NONE, head) => self.head = head,
            (tail, head) => (nodes[tail].next, nodes[head].prev) = (head, tail),
        }
        self.tail = others.tail;
        self.len += others.len;
    }

    /// Takes `block`, which is in this list, out. Its own links are left as they were.
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
