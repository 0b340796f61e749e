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

/// Ghosts for each resident block. With fewer it cannot learn how late blocks come back: 4, 6, 8 and 10 gave 0.622,
/// 0.634, 0.639 and 0.640 of the optimum (bench/reports/2026-11-21-policy.md).
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
        set_used(nodes, block, nodes[block].touched);
        if let Some(ghost) = ghost {
            self.worth[usize::from(ghost.mark)].hit(nodes.clock.wrapping_sub(ghost.touched));
        }
    }

    /// Seen and gone: remembered like one that was evicted at once, so that its return is known.
    fn refuse(&mut self, nodes: &mut Nodes, key: Fingerprint) {
        nodes.clock = nodes.clock.wrapping_add(1);
        let known = self.ghosts.take(key);
        if let Some(ghost) = known {
            self.worth[usize::from(ghost.mark)].hit(nodes.clock.wrapping_sub(ghost.touched));
        }
        self.remember(nodes, key, Ghost { touched: nodes.clock, mark: known.is_some() });
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.worth[Lists::of(&nodes[block])].hit(age(nodes, block));
        self.lists.lift(nodes, block, REUSED);
        set_used(nodes, block, nodes.clock);
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
        let block = self.lists.evict(nodes, residents, |_: &Lists, nodes: &Nodes, at| choose(nodes, worth, at))?;
        let ghost = Ghost { touched: used(nodes, block), mark: Lists::of(&nodes[block]) == REUSED };
        self.remember(nodes, residents.fingerprint(block), ghost);
        Some(block)
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, |_: &Lists, nodes: &Nodes, at| choose(nodes, &self.worth, at))
    }

    fn warm(&self, keys: &[Fingerprint]) {
        self.ghosts.warm(keys);
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.heap_bytes()
    }
}

impl Density {
    fn remember(&mut self, nodes: &Nodes, key: Fingerprint, ghost: Ghost) {
        if let Some(lost) = self.ghosts.insert(key, ghost, nodes.clock) {
            self.worth[usize::from(lost.mark)].lapse(nodes.clock.wrapping_sub(lost.touched));
        }
    }

    fn learn_now_and_then(&mut self) {
        if self.evictions_to_lesson > 0 {
            self.evictions_to_lesson -= 1;
            return;
        }
        let residents = self.lists.count();
        self.evictions_to_lesson = (residents / Worth::LESSONS_PER_TURNOVER).max(LEAST_BETWEEN_LESSONS);
        self.ghosts.fit(residents as usize * GHOSTS_PER_BLOCK);
        self.worth.iter_mut().for_each(Worth::learn);
    }
}

fn choose(nodes: &Nodes, worth: &[Worth; 2], [fresh, reused]: [BlockId; 2]) -> usize {
    let is_colder = nodes.age(reused) > nodes.age(fresh);
    let is_worth_less = || worth[REUSED].at(age(nodes, reused)) <= worth[FRESH].at(age(nodes, fresh));
    usize::from(is_colder && is_worth_less())
}

/// Since the last use proper: a refresh is none, or what is learned would be the queue's length.
fn age(nodes: &Nodes, block: BlockId) -> u32 {
    nodes.clock.wrapping_sub(used(nodes, block))
}

/// In the mark, above the list's bit, whose place it leaves out.
fn used(nodes: &Nodes, block: BlockId) -> u32 {
    nodes[block].mark & !1
}

fn set_used(nodes: &mut Nodes, block: BlockId, clock: u32) {
    nodes[block].mark = clock & !1 | nodes[block].mark & 1;
}
