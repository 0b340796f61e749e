//! Two lists of blocks, `fresh` and `reused`, that keep prompts closed. Most policies are made of them.
//!
//! Invariants: the lowest bit of a block's mark says in which list it is. Both lists are in order of last use. A block
//! enters `reused` only if its parent is there. It goes right behind its parent if both are in one list. Touches go
//! from the last block to the first, so every block of a list is more recent than its children in that list.

use super::{List, MAX_SCAN, Node, Nodes, Residents};
use crate::key::BlockId;

/// Number of the list `fresh`, in which keys that were not seen before begin.
pub const FRESH: usize = 0;
/// Number of the list `reused`, for keys that were.
pub const REUSED: usize = 1;

/// Says from which list a block should go, given a candidate of each.
pub trait Choose: Fn(&Lists, &Nodes, [BlockId; 2]) -> usize {}
impl<F: Fn(&Lists, &Nodes, [BlockId; 2]) -> usize> Choose for F {}

/// See the module's head.
#[derive(Default)]
pub struct Lists {
    /// By number: [`FRESH`], [`REUSED`].
    lists: [List; 2],
}

impl Lists {
    /// The list in which a block of this node is, or was when it was evicted.
    pub fn of(node: &Node) -> usize {
        (node.mark & 1) as usize
    }

    /// Blocks in both lists.
    pub fn count(&self) -> u32 {
        self.lists[FRESH].len + self.lists[REUSED].len
    }

    /// Blocks in one list.
    pub fn len_of(&self, list: usize) -> u32 {
        self.lists[list].len
    }

    /// The blocks of a list, from the one that was not used for longest on.
    pub fn iter_back<'a>(&self, nodes: &'a Nodes, list: usize) -> impl Iterator<Item = BlockId> + 'a {
        self.lists[list].iter_back(nodes)
    }

    /// The block of a list that was not used for longest; `None` if the list is empty.
    pub fn tail(&self, list: usize) -> Option<BlockId> {
        let tail = self.lists[list].tail;
        (tail != BlockId::NONE).then_some(tail)
    }

    /// Takes a new block in; `is_known` says whether its key was seen before. Sets the mark to the list's number.
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

    /// Takes a new block in at the head of `reused` that nobody uses yet: the clock does not advance. Sets the mark to
    /// the list's number.
    pub fn insert_unused(&mut self, nodes: &mut Nodes, block: BlockId) {
        nodes[block].touched = nodes.clock;
        nodes[block].mark = REUSED as u32;
        self.lists[REUSED].push_head(nodes, block);
    }

    /// Takes a new block in that is to be evicted first, or right behind `parent`, which is to be evicted first too. It
    /// goes to `fresh`, and its mark says so.
    pub fn insert_coldest(&mut self, nodes: &mut Nodes, block: BlockId, parent: Option<BlockId>) {
        nodes.stamp(block);
        nodes[block].mark = FRESH as u32;
        match parent.or(self.tail(FRESH)) {
            Some(before) => self.lists[FRESH].push_behind(nodes, block, before),
            None => self.lists[FRESH].push_head(nodes, block),
        }
    }

    /// Moves `block` to `fresh`, to be evicted first, or right before `child`, which is to be evicted first too. Its
    /// mark says so.
    pub fn sink(&mut self, nodes: &mut Nodes, block: BlockId, child: Option<BlockId>) {
        self.remove(nodes, block);
        let before = child.map_or(self.lists[FRESH].tail, |child| nodes[child].prev);
        nodes.stamp(block);
        nodes[block].mark = FRESH as u32;
        match before {
            BlockId::NONE => self.lists[FRESH].push_head(nodes, block),
            before => self.lists[FRESH].push_behind(nodes, block, before),
        }
    }

    /// Moves `block` to `reused`, right behind `parent`, or to the head if its parent is not there. Its mark changes by
    /// the list's bit alone.
    pub fn raise(&mut self, nodes: &mut Nodes, block: BlockId, parent: Option<BlockId>) {
        self.remove(nodes, block);
        nodes[block].mark |= REUSED as u32;
        match parent.filter(|parent| Lists::of(&nodes[*parent]) == REUSED) {
            Some(parent) => self.lists[REUSED].push_behind(nodes, block, parent),
            None => self.lists[REUSED].push_head(nodes, block),
        }
    }

    /// Moves `block` to `fresh`, to be evicted first. Its mark changes by the list's bit alone.
    pub fn lower(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.remove(nodes, block);
        nodes[block].mark &= !1;
        match self.tail(FRESH) {
            Some(tail) => self.lists[FRESH].push_behind(nodes, block, tail),
            None => self.lists[FRESH].push_head(nodes, block),
        }
    }

    /// Moves `block` to the head of `list`, as the most recent of all.
    pub fn lift(&mut self, nodes: &mut Nodes, block: BlockId, list: usize) {
        self.remove(nodes, block);
        nodes[block].mark = nodes[block].mark & !1 | list as u32;
        self.lists[list].push_head(nodes, block);
        nodes.stamp(block);
    }

    /// Moves `block` to the head of the list in which it is.
    pub fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        let list = Lists::of(&nodes[block]);
        self.lift(nodes, block, list);
    }

    /// Takes a block out of the list it is in. Its mark stays.
    pub fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists[Lists::of(&nodes[block])].unlink(nodes, block);
    }

    /// Takes out the coldest block that is neither held nor protected, as `choose` compares the two lists. If all
    /// blocks that it looks at are protected, it takes the coldest of them, a leaf, if `residents` allows that. Held
    /// blocks move to the head: they are in use, and every later eviction would meet them again. This one ends a list
    /// where it meets them again, or has met so many that the other list would not get its turn: `choose` may want one
    /// list as long as that is the longer. Protected ones keep their place, or a child could become more recent than
    /// its parent.
    pub fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents, choose: impl Choose) -> Option<BlockId> {
        let mut at = [self.lists[FRESH].tail, self.lists[REUSED].tail];
        let mut wanted = None;
        let mut first_moved = [BlockId::NONE; 2];
        let mut held = [0; 2];
        for _ in 0..MAX_SCAN {
            let Some(list) = self.pick(nodes, at, &choose) else { break };
            let block = at[list];
            at[list] = nodes[block].prev;
            if residents.is_held(block) {
                self.refresh(nodes, block);
                held[list] += 1;
                if first_moved[list] == BlockId::NONE {
                    first_moved[list] = block;
                }
            } else if residents.is_protected(block) {
                wanted.get_or_insert(block);
            } else {
                self.remove(nodes, block);
                return Some(block);
            }
            let is_others_turn = held[list] >= MAX_SCAN / 2 && at[1 - list] != BlockId::NONE;
            if at[list] == first_moved[list] || is_others_turn {
                at[list] = BlockId::NONE;
            }
        }
        let wanted = wanted.filter(|_| residents.may_take_protected())?;
        self.remove(nodes, wanted);
        Some(wanted)
    }

    /// The block that `evict` looks at first.
    pub fn coldest(&self, nodes: &Nodes, choose: impl Choose) -> Option<BlockId> {
        let tails = [self.lists[FRESH].tail, self.lists[REUSED].tail];
        self.pick(nodes, tails, &choose).map(|list| tails[list])
    }

    /// The block that was used longest ago.
    pub fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        [FRESH, REUSED].into_iter().filter_map(|list| self.tail(list)).max_by_key(|tail| nodes.age(*tail))
    }

    fn pick(&self, nodes: &Nodes, at: [BlockId; 2], choose: &impl Choose) -> Option<usize> {
        match at {
            [BlockId::NONE, BlockId::NONE] => None,
            [_, BlockId::NONE] => Some(FRESH),
            [BlockId::NONE, _] => Some(REUSED),
            both => Some(choose(self, nodes, both)),
        }
    }
}
