//! Least recently used. It is leaf-first, because a request's blocks are touched from the last to the first.

use super::lists::{FRESH, Lists};
use super::{Nodes, Policy, Residents};
use crate::key::{BlockId, Fingerprint};

/// All blocks are in the list of fresh ones.
#[derive(Default)]
pub struct Lru {
    lists: Lists,
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, _key: Fingerprint, parent: Option<BlockId>) {
        self.lists.insert(nodes, block, parent, false);
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.lists.evict(nodes, residents, |_: &Lists, _: &Nodes, _| FRESH)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, |_: &Lists, _: &Nodes, _| FRESH)
    }

    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.oldest(nodes)
    }
}
