//! Probation, main and a long ghost list: the strongest simple design with fixed shares.
//!
//! A new block is on probation; asked for again there, or soon after it left, it goes to main. The tail of
//! probation goes while probation holds its share, else that of main. Shares and lengths are those of the 2Q
//! family (Johnson and Shasha, VLDB 1994) with both lists in order of last use.

use forebay_core::policy::ghosts::{Ghost, Ghosts};
use forebay_core::policy::lists::{FRESH, Lists, REUSED};
use forebay_core::policy::{Nodes, Policy, Residents};
use forebay_core::{BlockId, Fingerprint};

/// One in so many blocks is on probation.
const PROBATION: u32 = 10;
const GHOSTS_PER_BLOCK: usize = 4;

#[derive(Default)]
pub struct TwoQ {
    lists: Lists,
    ghosts: Ghosts,
}

impl Policy for TwoQ {
    fn name(&self) -> &'static str {
        "twoq"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let is_known = self.ghosts.take(key, nodes.clock).is_some();
        self.lists.insert(nodes, block, parent, is_known);
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.lift(nodes, block, REUSED);
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.ghosts.fit(self.lists.count() as usize, GHOSTS_PER_BLOCK);
        let block = self.lists.evict(nodes, residents, choose)?;
        let ghost = Ghost { touched: nodes[block].touched, mark: false };
        self.ghosts.insert(residents.fingerprint(block), ghost, nodes.clock);
        Some(block)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, choose)
    }

    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.oldest(nodes)
    }

    fn touch_lines(&self, keys: &[Fingerprint]) {
        self.ghosts.touch_lines(keys);
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.heap_bytes()
    }
}

fn choose(lists: &Lists, _: &Nodes, _: [BlockId; 2]) -> usize {
    if lists.len_of(FRESH) * PROBATION >= lists.count() { FRESH } else { REUSED }
}
