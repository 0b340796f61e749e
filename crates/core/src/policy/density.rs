//! The default: keeps what earns most hits for the time it stays, as learned from the traffic itself.
//!
//! Two lists in order of last use: `fresh` blocks, seen once, and `reused` ones, asked for again while resident
//! or later, as long as a ghost remembers. The victim is one of the two tails: the reused one only if it is both
//! older and worth no more than the fresh one (see `worth`). A new block that is worth less than the victim is
//! only `passing`: it goes next, so that traffic too much for the pool does not push out what was about to be
//! asked for. No share is set: under scans fresh blocks go first, in agent traffic the rule comes down to plain
//! recency. Above a tier that is given the blocks that return, one of these is worth only what it costs to load it
//! again, and what was seen once stays longer: else the pool would keep copies of what the tier has.
//!
//! Invariant: prompts stay closed. In one list a child is colder than its parent (see `lists`); a fresh child of
//! the reused tail is as old as it or older, and an older fresh tail always goes first, as does a passing one.

use super::ghosts::{Ghost, Ghosts};
use super::lists::{Lists, REUSED};
use super::worth::Worth;
use super::{Nodes, Policy, Residents};
use crate::block::BlockId;
use crate::index::Fingerprint;

/// Ghosts for each resident block, 5.3 bytes each. With fewer it cannot learn how late blocks come back; many more
/// remember what is of no use (bench/reports/2026-11-22-policy.md).
const GHOSTS_PER_BLOCK: usize = 12;
/// Fewest evictions between two lessons: a lesson costs as much as about 20 evictions.
const LEAST_BETWEEN_LESSONS: u32 = 64;
/// Ghosts looked at in a lesson: enough that a quarter of an octave in age holds tens of them.
const SAMPLE: usize = 1536;

/// What a hit is worth that the tier below would have served, if what no tier serves is worth 1: a disk loads a block
/// about ten times as fast as an engine computes it. Every value from 0.03 to 0.25 serves its purpose on three traces,
/// no cell of pool and disk below 0.96 of leaf-first LRU (bench/reports/2026-11-22-policy.md).
const LOADED: f64 = 0.1;

/// The lowest mark bit is the list's. In `fresh`: goes next.
const PASSING: u32 = 2;
/// Set if the block was seen before it was last stored, or asked for since: which worth it has.
const KNOWN: u32 = 4;
const FLAGS: u32 = 7;

#[derive(Default)]
pub struct Density {
    lists: Lists,
    worth: Worths,
    ghosts: Ghosts,
    evictions_to_lesson: u32,
}

#[derive(Default)]
struct Worths {
    /// By whether the block is known.
    kinds: [Worth; 2],
    /// Known blocks lie below, too.
    is_backed: bool,
}

impl Policy for Density {
    fn name(&self) -> &'static str {
        "density"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let ghost = self.ghosts.take(key, nodes.clock);
        let has_place = self.is_worth_a_place(nodes, ghost.is_some());
        self.enter(nodes, block, ghost, parent, has_place);
    }

    fn insert_wanted(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let ghost = self.ghosts.take(key, nodes.clock);
        self.enter(nodes, block, ghost, parent, true);
    }

    /// Seen and gone: remembered like one that was evicted at once, so that its return is known.
    fn refuse(&mut self, nodes: &mut Nodes, key: Fingerprint) {
        nodes.clock = nodes.clock.wrapping_add(1);
        let known = self.ghosts.take(key, nodes.clock);
        self.count_return(nodes, known);
        self.remember(nodes, key, Ghost { touched: nodes.clock, mark: known.is_some() });
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.worth.kinds[kind(nodes, block)].hit(age(nodes, block));
        self.lists.lift(nodes, block, REUSED);
        nodes[block].mark = nodes[block].mark & !PASSING | KNOWN;
        set_used(nodes, block, nodes.clock);
    }

    /// How long it waited for that says how long the engine's queue is, and nothing of the block.
    fn begin_use(&mut self, nodes: &mut Nodes, block: BlockId) {
        set_used(nodes, block, nodes.clock);
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.learn_now_and_then(nodes);
        let worth = &self.worth;
        let block = self.lists.evict(nodes, residents, |_: &Lists, nodes: &Nodes, at| choose(nodes, worth, at))?;
        let ghost = Ghost { touched: used(nodes, block), mark: nodes[block].mark & KNOWN != 0 };
        self.remember(nodes, residents.fingerprint(block), ghost);
        Some(block)
    }

    fn back(&mut self, is_backed: bool) {
        self.worth.is_backed = is_backed;
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, |_: &Lists, nodes: &Nodes, at| choose(nodes, &self.worth, at))
    }

    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.oldest(nodes)
    }

    fn warm(&self, keys: &[Fingerprint]) {
        self.ghosts.warm(keys);
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.heap_bytes()
    }
}

impl Density {
    /// A child of a passing block passes, too.
    fn enter(
        &mut self,
        nodes: &mut Nodes,
        block: BlockId,
        ghost: Option<Ghost>,
        parent: Option<BlockId>,
        has_place: bool,
    ) {
        let passing_parent = parent.filter(|parent| nodes[*parent].mark & PASSING != 0);
        if has_place && passing_parent.is_none() {
            self.lists.insert(nodes, block, parent, ghost.is_some());
            nodes[block].mark |= if Lists::of(&nodes[block]) == REUSED { KNOWN } else { 0 };
        } else {
            self.lists.insert_coldest(nodes, block, passing_parent);
            nodes[block].mark |= PASSING | if ghost.is_some() { KNOWN } else { 0 };
        }
        set_used(nodes, block, nodes[block].touched);
        self.count_return(nodes, ghost);
    }

    /// Whether a block that is used now will earn no less than what would go for it.
    fn is_worth_a_place(&self, nodes: &Nodes, is_known: bool) -> bool {
        if !self.has_evidence() {
            return true;
        }
        let own = self.worth.at(usize::from(is_known), 0);
        self.coldest(nodes).is_none_or(|victim| own >= self.worth.of(nodes, victim))
    }

    fn count_return(&mut self, nodes: &Nodes, ghost: Option<Ghost>) {
        if let Some(ghost) = ghost {
            self.worth.kinds[usize::from(ghost.mark)].hit(nodes.clock.wrapping_sub(ghost.touched));
        }
    }

    fn remember(&mut self, nodes: &Nodes, key: Fingerprint, ghost: Ghost) {
        if let Some(lost) = self.ghosts.insert(key, ghost, nodes.clock) {
            self.worth.kinds[usize::from(lost.mark)].lapse(nodes.clock.wrapping_sub(lost.touched));
        }
    }

    fn learn_now_and_then(&mut self, nodes: &Nodes) {
        if self.evictions_to_lesson > 0 {
            self.evictions_to_lesson -= 1;
            return;
        }
        let residents = self.lists.count();
        self.evictions_to_lesson = (residents / Worth::LESSONS_PER_TURNOVER).max(LEAST_BETWEEN_LESSONS);
        self.ghosts.fit(residents as usize, GHOSTS_PER_BLOCK);
        if self.has_evidence() {
            self.count_waiting(nodes);
        }
        self.worth.kinds.iter_mut().for_each(Worth::learn);
    }

    /// Ghosts that may still come back, by a sample.
    fn count_waiting(&mut self, nodes: &Nodes) {
        let Density { worth, ghosts, .. } = self;
        let scale = (ghosts.len() as f64 / SAMPLE as f64).max(1.0);
        ghosts.sample(SAMPLE, nodes.clock, |ghost| {
            worth.kinds[usize::from(ghost.mark)].wait(nodes.clock.wrapping_sub(ghost.touched), scale);
        });
    }

    /// In the first turnovers of a cache little came back yet and all that did was young. Until half of the ghosts'
    /// places were used, it is not told from that what will never come back, and nothing new is turned away.
    fn has_evidence(&self) -> bool {
        self.ghosts.len() * 2 > self.lists.count() as usize * GHOSTS_PER_BLOCK
    }
}

impl Worths {
    fn at(&self, kind: usize, age: u32) -> f64 {
        let share = if self.is_backed && kind == 1 { LOADED } else { 1.0 };
        share * self.kinds[kind].at(age)
    }

    fn of(&self, nodes: &Nodes, block: BlockId) -> f64 {
        self.at(kind(nodes, block), age(nodes, block))
    }
}

fn choose(nodes: &Nodes, worth: &Worths, [fresh, reused]: [BlockId; 2]) -> usize {
    let is_colder = nodes[fresh].mark & PASSING == 0 && nodes.age(reused) > nodes.age(fresh);
    usize::from(is_colder && worth.of(nodes, reused) <= worth.of(nodes, fresh))
}

/// Which worth a block has.
fn kind(nodes: &Nodes, block: BlockId) -> usize {
    usize::from(nodes[block].mark & KNOWN != 0)
}

/// Since the last use proper: a refresh is none, or what is learned would be the queue's length.
fn age(nodes: &Nodes, block: BlockId) -> u32 {
    nodes.clock.wrapping_sub(used(nodes, block))
}

/// In the mark, above the flags, whose place it leaves out.
fn used(nodes: &Nodes, block: BlockId) -> u32 {
    nodes[block].mark & !FLAGS
}

fn set_used(nodes: &mut Nodes, block: BlockId, clock: u32) {
    nodes[block].mark = clock & !FLAGS | nodes[block].mark & FLAGS;
}
