//! Least recently used; leaf-first, because requests are touched last-to-first.

use super::{List, Nodes, Policy, Residents};
use crate::block::BlockId;
use crate::index::Fingerprint;

#[derive(Default)]
pub struct Lru {
    list: List,
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, _key: Fingerprint, parent: Option<BlockId>) {
        match parent {
            Some(parent) => self.list.push_behind(nodes, block, parent),
            None => self.list.push_head(nodes, block),
        }
        nodes.stamp(block);
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.list.unlink(nodes, block);
        self.list.push_head(nodes, block);
        nodes.stamp(block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.list.unlink(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.list.evict(nodes, residents)
    }

    fn coldest(&self) -> Option<BlockId> {
        (self.list.tail != BlockId::NONE).then_some(self.list.tail)
    }
}
