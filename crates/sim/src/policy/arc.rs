//! Adaptive replacement (Megiddo and Modha, FAST 2003): the share of blocks seen once follows the ghosts.
//!
//! Where the paper evicts for a key it knows, slots here are reserved before they are named; so a returning
//! ghost moves the share for the evictions after its own.

use forebay_core::policy::ghosts::{Ghost, Ghosts};
use forebay_core::policy::lists::{FRESH, Lists, REUSED};
use forebay_core::policy::{Nodes, Policy, Residents};
use forebay_core::{BlockId, Fingerprint};

#[derive(Default)]
pub struct Arc {
    lists: Lists,
    /// By the list their blocks were in.
    ghosts: [Ghosts; 2],
    /// How many fresh blocks there should be.
    target: f64,
}

impl Policy for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let [once, often] = [self.ghosts[FRESH].len() as f64, self.ghosts[REUSED].len() as f64];
        let mut is_known = false;
        if self.ghosts[FRESH].take(key, nodes.clock).is_some() {
            self.target = (self.target + (often / once).max(1.0)).min(f64::from(self.lists.count() + 1));
            is_known = true;
        } else if self.ghosts[REUSED].take(key, nodes.clock).is_some() {
            self.target = (self.target - (once / often).max(1.0)).max(0.0);
            is_known = true;
        }
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
        self.ghosts.iter_mut().for_each(|ghosts| ghosts.fit(self.lists.count() as usize, 1));
        let target = self.target;
        let block = self.lists.evict(nodes, residents, |lists: &Lists, _: &Nodes, _| choose(lists, target))?;
        let ghost = Ghost { touched: nodes[block].touched, mark: false };
        self.ghosts[Lists::of(&nodes[block])].insert(residents.fingerprint(block), ghost, nodes.clock);
        Some(block)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, |lists: &Lists, _: &Nodes, _| choose(lists, self.target))
    }

    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.oldest(nodes)
    }

    fn touch_lines(&self, keys: &[Fingerprint]) {
        self.ghosts.iter().for_each(|ghosts| ghosts.touch_lines(keys));
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.iter().map(Ghosts::heap_bytes).sum()
    }
}

fn choose(lists: &Lists, target: f64) -> usize {
    if f64::from(lists.len_of(FRESH)) > target { FRESH } else { REUSED }
}
