//! W-TinyLFU (Einziger et al., 2017) with prefix-closed admission.
//!
//! New blocks enter a window. When a block in the window is looked up, it is admitted to the main part if it is at
//! least as popular as main's next victim. Children are touched before their parents, and are looked up no more often.
//! So the parents of an admitted block are admitted with it. The published filter judges each block when it arrives,
//! which tears holes into prefixes. A block's popularity is counted in its node while it is resident, and in a sketch
//! while it is not.

use super::lists::{FRESH, Lists, REUSED};
use super::sketch::{MOST, Sketch};
use super::{Nodes, Policy, Residents};
use crate::key::{BlockId, Fingerprint};

/// One in so many blocks is in the window.
const WINDOW: u32 = 5;
/// Counts are halved each time that so many blocks for each resident one were counted.
const FADE: u32 = 10;

/// See the module's head.
#[derive(Default)]
pub struct TinyLfu {
    /// Fresh: window. Reused: main.
    lists: Lists,
    sketch: Sketch,
    counted: u32,
    halvings: u16,
}

impl Policy for TinyLfu {
    fn name(&self) -> &'static str {
        "tinylfu"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        self.lists.insert(nodes, block, parent, false);
        self.count(nodes, block, self.sketch.estimate(key));
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        let popularity = self.popularity(nodes, block);
        self.count(nodes, block, popularity);
        let is_admitted = Lists::of(&nodes[block]) == REUSED || self.admits(nodes, block);
        self.lists.lift(nodes, block, if is_admitted { REUSED } else { FRESH });
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        if self.sketch.capacity() < self.lists.count() as usize {
            self.sketch = Sketch::new(self.lists.count() as usize * 2);
        }
        let block = self.lists.evict(nodes, residents, choose)?;
        self.sketch.raise(residents.fingerprint(block), self.popularity(nodes, block));
        Some(block)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, choose)
    }

    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.oldest(nodes)
    }

    fn ghost_bytes(&self) -> usize {
        self.sketch.heap_bytes()
    }
}

impl TinyLfu {
    fn admits(&self, nodes: &Nodes, block: BlockId) -> bool {
        let has_free_slot = self.lists.len_of(FRESH) * WINDOW > self.lists.count();
        let victim = self.lists.tail(REUSED);
        has_free_slot || victim.is_none_or(|victim| self.popularity(nodes, block) >= self.popularity(nodes, victim))
    }

    /// Mark: list (1 bit), count (15 bits), halvings that the count has seen (16 bits).
    fn popularity(&self, nodes: &Nodes, block: BlockId) -> u8 {
        let mark = nodes[block].mark;
        let missed = self.halvings.wrapping_sub((mark >> 16) as u16);
        ((mark >> 1 & 0x7fff) >> missed.min(15)) as u8
    }

    /// Sets the count to one more than `before`.
    fn count(&mut self, nodes: &mut Nodes, block: BlockId, before: u8) {
        self.counted += 1;
        if self.counted >= self.lists.count() * FADE {
            self.counted = 0;
            self.halvings = self.halvings.wrapping_add(1);
            self.sketch.halve();
        }
        let count = u32::from((before + 1).min(MOST));
        nodes[block].mark = nodes[block].mark & 1 | count << 1 | u32::from(self.halvings) << 16;
    }
}

fn choose(lists: &Lists, _: &Nodes, _: [BlockId; 2]) -> usize {
    if lists.len_of(FRESH) * WINDOW >= lists.count() { FRESH } else { REUSED }
}
