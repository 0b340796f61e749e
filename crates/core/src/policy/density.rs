//! The default: keeps what earns most hits for the time it stays, as learned from the traffic itself.
//!
//! Two lists in order of last use: `fresh` blocks, seen once, and `reused` ones, asked for again while resident
//! or later, as long as a ghost remembers. The victim is one of the two tails: the reused one only if it is both
//! older and worth no more than the fresh one (see `worth`). No share is set: under scans fresh blocks go first,
//! in agent traffic the rule comes down to plain recency.
//!
//! Invariant: prompts stay closed. In one list a child is colder than its parent (see `lists`); a fresh child of
//! the reused tail is as old as it or older, and an older fresh tail always goes first.

use super::ghosts::{Ghost, Ghosts};
use super::lists::{FRESH, Lists, REUSED};
use super::worth::Worth;
use super::{Nodes, Policy, Residents};
use crate::block::BlockId;
use crate::index::Fingerprint;

/// Ghosts for each resident block. Shorter lists cannot learn how late blocks come back, longer ones learn more
/// slowly; measured flat between 4 and 6 on three traces, and 6 is better when half the requests are scans.
const GHOSTS_PER_BLOCK: usize = 8;
/// Fewest evictions between two lessons: a lesson costs as much as about 20 evictions.
const LEAST_BETWEEN_LESSONS: u32 = 64;

#[derive(Default)]
pub struct Density {
    lists: Lists,
    /// By list.
    worth: [Worth; 2],
    ghosts: Ghosts,
    evictions_to_lesson: u32,
}

impl Policy for Density {
    fn name(&self) -> &'static str {
        "density"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let ghost = self.ghosts.take(key);
        self.lists.insert(nodes, block, parent, ghost.is_some());
        if let Some(ghost) = ghost {
            self.worth[usize::from(ghost.mark)].hit(nodes.clock.wrapping_sub(ghost.touched));
        }
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.worth[Lists::of(&nodes[block])].hit(nodes.age(block));
        self.lists.lift(nodes, block, REUSED);
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.learn_now_and_then();
        let worth = &self.worth;
        let block = self.lists.evict(nodes, residents, |lists, nodes| choose(lists, nodes, worth))?;
        let ghost = Ghost { touched: nodes[block].touched, mark: Lists::of(&nodes[block]) == REUSED };
        if let Some(lost) = self.ghosts.insert(residents.fingerprint(block), ghost, nodes.clock) {
            self.worth[usize::from(lost.mark)].lapse(nodes.clock.wrapping_sub(lost.touched));
        }
        Some(block)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.tail(choose(&self.lists, nodes, &self.worth)).or(self.lists.tail(REUSED))
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.heap_bytes()
    }
}

impl Density {
    fn learn_now_and_then(&mut self) {
        if self.evictions_to_lesson > 0 {
            self.evictions_to_lesson -= 1;
            return;
        }
        let residents = self.lists.len();
        self.evictions_to_lesson = (residents / Worth::LESSONS_PER_TURNOVER).max(LEAST_BETWEEN_LESSONS);
        self.ghosts.fit(residents as usize * GHOSTS_PER_BLOCK);
        self.worth.iter_mut().for_each(Worth::learn);
    }
}

fn choose(lists: &Lists, nodes: &Nodes, worth: &[Worth; 2]) -> usize {
    let (Some(fresh), Some(reused)) = (lists.tail(FRESH), lists.tail(REUSED)) else { return FRESH };
    let [fresh, reused] = [nodes.age(fresh), nodes.age(reused)];
    usize::from(reused > fresh && worth[REUSED].at(reused) <= worth[FRESH].at(fresh))
}
