//! S3-FIFO (Yang et al., SOSP 2023): a small queue and a main one that hits do not reorder, and ghosts.
//!
//! A block asked for twice in the small queue moves on to main at its end, one asked for in main goes round
//! again; the key of one that was not is remembered, and returns to main. Here both queues are leaf-first, since
//! a child enters behind its parent and is asked for no more often.

use forebay_core::policy::ghosts::{Ghost, Ghosts};
use forebay_core::policy::lists::{FRESH, Lists, REUSED};
use forebay_core::policy::{MAX_SCAN, Nodes, Policy, Residents};
use forebay_core::{BlockId, Fingerprint};

/// One in so many blocks is in the small queue.
const SMALL: u32 = 10;
/// Hits that let a block move on to main.
const ENOUGH: u32 = 2;
/// Hits are counted up to this, in the two bits of the mark above the list's.
const MOST: u32 = 3;

#[derive(Default)]
pub struct S3Fifo {
    /// Fresh: small. Reused: main.
    lists: Lists,
    ghosts: Ghosts,
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let is_known = self.ghosts.take(key, nodes.clock).is_some();
        self.lists.insert(nodes, block, parent, is_known);
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        set_hits(nodes, block, (hits(nodes, block) + 1).min(MOST));
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.ghosts.fit(self.lists.count() as usize, 1);
        for _ in 0..MAX_SCAN {
            let block = self.coldest(nodes)?;
            let (list, hits) = (Lists::of(&nodes[block]), hits(nodes, block));
            if list == REUSED && hits > 0 {
                set_hits(nodes, block, hits - 1);
            } else if list == FRESH && hits >= ENOUGH {
                set_hits(nodes, block, 0);
            } else {
                break;
            }
            self.lists.lift(nodes, block, REUSED);
        }
        let block = self.lists.evict(nodes, residents, choose)?;
        if Lists::of(&nodes[block]) == FRESH {
            let ghost = Ghost { touched: nodes[block].touched, mark: false };
            self.ghosts.insert(residents.fingerprint(block), ghost, nodes.clock);
        }
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
    if lists.len_of(FRESH) * SMALL >= lists.count() { FRESH } else { REUSED }
}

fn hits(nodes: &Nodes, block: BlockId) -> u32 {
    nodes[block].mark >> 1
}

fn set_hits(nodes: &mut Nodes, block: BlockId, hits: u32) {
    nodes[block].mark = nodes[block].mark & 1 | hits << 1;
}
