//! Two lists of blocks, `fresh` and `reused`, that keep prompts closed: what most policies here are made of.
//!
//! Invariants: a block's lowest mark bit says which list it is in; both lists are in order of last use; a block
//! enters `reused` only if its parent is there, and goes right behind its parent where both are in one list.
//! With touches last-to-first, every block of a list is thus more recent than its children in it.

use super::{List, MAX_SCAN, Node, Nodes, Residents};
use crate::block::BlockId;

pub const FRESH: usize = 0;
pub const REUSED: usize = 1;

#[derive(Default)]
pub struct Lists {
    /// By number: [`FRESH`], [`REUSED`].
    lists: [List; 2],
}

impl Lists {
    /// Which list a block of this node is in, or was in when it was evicted.
    pub fn of(node: &Node) -> usize {
        (node.mark & 1) as usize
    }

    pub fn len(&self) -> u32 {
        self.lists[FRESH].len + self.lists[REUSED].len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn len_of(&self, list: usize) -> u32 {
        self.lists[list].len
    }

    pub fn tail(&self, list: usize) -> Option<BlockId> {
        let tail = self.lists[list].tail;
        (tail != BlockId::NONE).then_some(tail)
    }

    /// A new block; `is_known` if its key was seen before. Sets the mark to the list's number.
    pub fn insert(&mut self, nodes: &mut Nodes, block: BlockId, parent: Option<BlockId>, is_known: bool) {
        nodes.stamp(block);
        let list = match parent {
            Some(parent) if Lists::of(&nodes[parent]) == FRESH => FRESH,
            _ => usize::from(is_known),
        };
        nodes[block].mark = list as u32;
        let Some(parent) = parent else { return self.lists[list].push_head(nodes, block) };
        // A prompt has one recency, whenever its pieces were stored.
        nodes[block].touched = nodes[parent].touched;
        match Lists::of(&nodes[parent]) == list {
            true => self.lists[list].push_behind(nodes, block, parent),
            false => self.lists[list].push_head(nodes, block),
        }
    }

    /// To the head of `list`, as most recent of all.
    pub fn lift(&mut self, nodes: &mut Nodes, block: BlockId, list: usize) {
        self.remove(nodes, block);
        nodes[block].mark = nodes[block].mark & !1 | list as u32;
        self.lists[list].push_head(nodes, block);
        nodes.stamp(block);
    }

    /// To the head of the list it is in.
    pub fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        let list = Lists::of(&nodes[block]);
        self.lift(nodes, block, list);
    }

    pub fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists[Lists::of(&nodes[block])].unlink(nodes, block);
    }

    /// Takes a tail out, that of the list `choose` names or of the one that is not empty. What is held, or
    /// wanted as long as something else turns up, goes to the head: it is in use, hence not old, and every later
    /// eviction would meet it again.
    pub fn evict(
        &mut self,
        nodes: &mut Nodes,
        residents: &dyn Residents,
        mut choose: impl FnMut(&Lists, &Nodes) -> usize,
    ) -> Option<BlockId> {
        for passed in 1..=MAX_SCAN {
            let list = choose(self, nodes);
            let block = self.tail(list).or_else(|| self.tail(1 - list))?;
            if residents.is_held(block) || (passed < MAX_SCAN && residents.is_wanted(block)) {
                self.refresh(nodes, block);
                continue;
            }
            self.remove(nodes, block);
            return Some(block);
        }
        None
    }
}
