//! The default: keeps the blocks that earn the most hits for the time that they stay, as learned from the traffic.
//!
//! There are two lists in order of last use. `fresh` has the blocks that were seen once. `reused` has those that were
//! looked up again, while resident or while a ghost remembered them. The victim is one of the two tails. It is the
//! reused tail only if that is older and its hit density is no higher than that of the fresh tail (see `hit_density`).
//!
//! A new block whose hit density is lower than the victim's bypasses the cache: it is evicted next. So more traffic
//! than the pool can hold does not push out blocks that are about to be looked up. No share is set: under scans fresh
//! blocks go first, and in agent traffic the rule amounts to plain recency.
//!
//! That rule looks at the length of the record, and traffic may change. So there is an account with plain recency.
//! Each block that came back while recency would still have had it pays for one eviction by recency alone. Each hit
//! that recency would not have had takes such a payment back. So what is lost where the record is wrong is at most
//! about what the pool holds, and where it is right little changes.
//!
//! When traffic ends, the record still promises its returns. So there is a second account, of the record itself. Each
//! block that was due past the reach of recency, resident or ghost, pays for the eviction of one block that lies there.
//! Each that came takes three such payments back: a record that is right by a third holds. So when about a third as
//! many blocks as the pool holds are overdue, blocks go that were last used before the first of them was. Those used
//! since then are other traffic, of which the shortfall says nothing.
//!
//! A block that bypasses stays among the reused ones while it waits for a tier, and is evicted next when the tier has
//! it. Otherwise a tier would get only as much of a burst as it writes at once.
//!
//! Above a tier that gets the blocks that return, losing such a block costs only its load. It counts less there, so
//! blocks that were seen once stay longer. Otherwise the pool would keep copies of what the tier has.
//!
//! Invariant: prompts stay closed. In one list a child is colder than its parent (see `lists`). A fresh child of the
//! reused tail is as old as that tail or older, and an older fresh tail goes first. So does one that bypasses.

use super::ghosts::{Ghost, Ghosts};
use super::hit_density::{HitDensity, Shares};
use super::lists::{FRESH, Lists, REUSED};
use super::{Backing, MAX_SCAN, Nodes, Policy, Residents};
use crate::key::{BlockId, Fingerprint};

/// Ghosts for each resident block, 5.3 bytes each. With fewer, the policy cannot learn how late blocks come back. Many
/// more remember useless keys (bench/reports/2026-11-22-policy.md).
const GHOSTS_PER_BLOCK: usize = 12;
/// Fewest evictions between two updates. An update costs as much as about 200 evictions: 350,000 instructions.
const LEAST_BETWEEN_UPDATES: u32 = 64;
/// Ghosts that an update looks at: enough that a quarter of an octave in age holds tens of them.
const SAMPLE: usize = 1536;
/// Blocks that an update looks at, to tell how many residents were due. Eight such samples a turnover tell it to a
/// tenth.
const SAMPLE_OF_SLOTS: usize = 256;

/// The value of a hit that the lower tier would have served, if a hit that no tier serves counts 1. A disk loads a
/// block about ten times as fast as an engine computes it. With every value from 0.03 to 0.25, no cell of pool and disk
/// is below 0.96 of leaf-first LRU on three traces (bench/reports/2026-11-22-policy.md).
const LOAD: f64 = 0.1;

/// Recency owes at most one hit for so many residents: hits of an earlier time say nothing of now. With 2, 4 or 8
/// rounds keep 0.985 of the optimum, with 16 only 0.957. Of these, 8 notices the end of rounds soonest
/// (bench/reports/2026-11-24-cliff.md).
const RESIDENTS_PER_DEBT: i64 = 8;
/// The record holds if one in so many of the hits that were due come. Where traffic has ended none comes, so the end
/// shows as soon with 1 as with 4. But a record is never exact: with 1 golden rows lose up to 4 % of their hits, with 2
/// up to 0.5 % (bench/reports/2026-11-27-cliff.md).
const RECORD_HOLDS: f64 = 3.0;
/// Blocks that are due come by whole prompts, so a record that is right is behind by some prompts at times. It pays
/// when one hit is missing for so many residents. With 2 the end of rounds shows up to a turnover later, with 4 the cut
/// agents trace loses 1 % of its hits (bench/reports/2026-11-27-cliff.md).
const RESIDENTS_PER_MARGIN: f64 = 3.0;
/// While all blocks fit, nothing is evicted, and one update may span days. It counts for no more hits, and for no
/// longer a time, than so many for each resident, or the hits of those days would hide all others for days. With 1 or 2
/// the results there hardly differ, with 16 they do (bench/reports/2026-11-30-after-all-fitted.md).
const MOST_OF_A_RESIDENT: f64 = 4.0;

/// The lowest mark bit is the list's. This bit is set in `fresh` if the block is evicted next, and in `reused` if it is
/// evicted next when a tier has it.
const BYPASSED: u32 = 2;
/// The flags of a block that waits for a tier, then bypasses.
const WAITS: u32 = BYPASSED | REUSED as u32;
/// Set if the block was seen before it was last stored, or was looked up since. It says which hit densities apply. A
/// block of `reused` without it counts as known: a tier loaded it and the lookup that it came for has not used it yet,
/// or it waits.
const KNOWN: u32 = 4;
const FLAGS: u32 = 7;
/// The flags of a block that a tier loaded and nobody has used yet.
const LOADED: u32 = REUSED as u32;

/// See the module's head.
#[derive(Default)]
pub struct Lhd {
    lists: Lists,
    hit_density: HitDensities,
    ghosts: Ghosts,
    evictions_to_update: u32,
    pace: Pace,
    /// Where the next sample of slots goes on.
    places: Places,
    /// The loaded block that was last used for the first time, while it is resident.
    last_loaded: Option<BlockId>,
}

#[derive(Default)]
struct HitDensities {
    /// By whether the block is known.
    kinds: [HitDensity; 2],
    shares: Shares,
    backing: Backing,
    recency: Account,
    record: Promises,
}

/// What plain recency would have hit and this policy did not, less the opposite.
#[derive(Default)]
struct Account {
    /// So many evictions by recency alone are paid for. Below 0: so many hits are first to be made up for.
    balance: i64,
    /// Blocks that were resident at the last update.
    residents: u32,
}

/// What was due past the reach of recency, by the record, and did not come.
#[derive(Default)]
struct Promises {
    /// So many evictions by recency alone are paid for. Below 0: so many hits may be late before any is.
    missing: f64,
    /// The clock when as much came as was to come, for the last time.
    held: u32,
}

/// How many steps of the clock lie between two updates: the mean over the updates whose evidence counts.
#[derive(Default)]
struct Pace {
    last_update: u32,
    steps: f64,
    updates: f64,
}

impl Policy for Lhd {
    fn name(&self) -> &'static str {
        "lhd"
    }

    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let ghost = self.ghosts.take(key, nodes.clock);
        let is_passing = parent.is_some_and(|parent| nodes[parent].mark & BYPASSED != 0);
        let has_place = !is_passing && self.is_worth_a_place(nodes, ghost.is_some());
        self.enter(nodes, block, ghost, parent, has_place);
    }

    fn insert_wanted(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        let ghost = self.ghosts.take(key, nodes.clock);
        self.enter(nodes, block, ghost, parent, true);
    }

    /// It is evicted next, as if its parent bypassed.
    fn insert_detached(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint) {
        let ghost = self.ghosts.take(key, nodes.clock);
        self.enter(nodes, block, ghost, None, false);
    }

    /// The key came back now. Whether the block stays is decided when it is used: until then it must not be evicted.
    /// The clock counts the use alone. If it counted the load too, blocks would seem to come back later the more of
    /// them are loaded.
    fn insert_loaded(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint) {
        let ghost = self.ghosts.take(key, nodes.clock);
        self.lists.insert_unused(nodes, block);
        set_used(nodes, block, nodes[block].touched);
        self.count_return(nodes, ghost);
    }

    /// The key is remembered as if its block had been evicted at once, so its return is recognised.
    fn refuse(&mut self, nodes: &mut Nodes, key: Fingerprint) {
        nodes.clock = nodes.clock.wrapping_add(1);
        let known = self.ghosts.take(key, nodes.clock);
        self.count_return(nodes, known);
        self.remember(nodes, key, Ghost { touched: nodes.clock, mark: known.is_some() });
    }

    fn touch(&mut self, nodes: &mut Nodes, block: BlockId) {
        if nodes[block].mark & FLAGS == LOADED {
            return self.use_loaded(nodes, block);
        }
        let age = age(nodes, block);
        self.hit_density.kinds[kind(nodes, block)].hit(age);
        self.hit_density.recency.hit(age);
        self.lift(nodes, block);
    }

    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.refresh(nodes, block);
    }

    fn begin_wait(&mut self, nodes: &mut Nodes, block: BlockId, parent: Option<BlockId>) {
        if nodes[block].mark & BYPASSED != 0 {
            self.lists.raise(nodes, block, parent);
        }
    }

    fn end_wait(&mut self, nodes: &mut Nodes, block: BlockId) {
        if nodes[block].mark & WAITS == WAITS {
            self.lists.lower(nodes, block);
        }
    }

    fn remove(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.forget_loaded(block);
        self.lists.remove(nodes, block);
    }

    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId> {
        self.learn_now_and_then(nodes, residents);
        let hit_density = &self.hit_density;
        let block =
            self.lists.evict(nodes, residents, |_: &Lists, nodes: &Nodes, at| choose(nodes, hit_density, at))?;
        self.forget_loaded(block);
        if Lists::of(&nodes[block]) == REUSED {
            self.hit_density.pay();
        }
        let ghost = Ghost { touched: used(nodes, block), mark: kind(nodes, block) == 1 };
        self.remember(nodes, residents.fingerprint(block), ghost);
        Some(block)
    }

    fn back(&mut self, backing: Backing) {
        self.hit_density.backing = backing;
    }

    fn coldest(&self, nodes: &Nodes) -> Option<BlockId> {
        self.lists.coldest(nodes, |_: &Lists, nodes: &Nodes, at| choose(nodes, &self.hit_density, at))
    }

    /// Blocks that bypass are new, and lie behind old ones.
    fn oldest(&self, nodes: &Nodes) -> Option<BlockId> {
        let stays = |block: &BlockId| nodes[*block].mark & BYPASSED == 0;
        let oldest = |list| self.lists.iter_back(nodes, list).take(MAX_SCAN).find(stays);
        let stay = [FRESH, REUSED].into_iter().filter_map(oldest).max_by_key(|block| nodes.age(*block));
        stay.or_else(|| self.lists.oldest(nodes))
    }

    fn hit_densities(&self, nodes: &Nodes) -> Option<[f64; 2]> {
        let used_now = self.hit_density.at(0, 0).max(self.hit_density.at(1, 0));
        let oldest = self.oldest(nodes)?;
        (used_now > 0.0).then(|| [used_now, self.hit_density.of(nodes, oldest)])
    }

    fn touch_lines(&self, keys: &[Fingerprint]) {
        self.ghosts.touch_lines(keys);
    }

    fn ghost_bytes(&self) -> usize {
        self.ghosts.heap_bytes()
    }
}

impl Lhd {
    /// A child of a block that bypasses the cache bypasses it too.
    fn enter(
        &mut self,
        nodes: &mut Nodes,
        block: BlockId,
        ghost: Option<Ghost>,
        parent: Option<BlockId>,
        has_place: bool,
    ) {
        let passing_parent = parent.filter(|parent| nodes[*parent].mark & BYPASSED != 0);
        if has_place && passing_parent.is_none() {
            self.lists.insert(nodes, block, parent, ghost.is_some());
            nodes[block].mark |= if Lists::of(&nodes[block]) == REUSED { KNOWN } else { 0 };
        } else {
            let passing_parent = passing_parent.filter(|parent| Lists::of(&nodes[*parent]) == FRESH);
            self.lists.insert_coldest(nodes, block, passing_parent);
            nodes[block].mark |= BYPASSED | if ghost.is_some() { KNOWN } else { 0 };
        }
        set_used(nodes, block, nodes[block].touched);
        self.count_return(nodes, ghost);
    }

    /// `block` leaves.
    fn forget_loaded(&mut self, block: BlockId) {
        if self.last_loaded == Some(block) {
            self.last_loaded = None;
        }
    }

    /// `block` is used now, and is the most recent of the reused ones.
    fn lift(&mut self, nodes: &mut Nodes, block: BlockId) {
        self.lists.lift(nodes, block, REUSED);
        nodes[block].mark = nodes.clock & !FLAGS | KNOWN | REUSED as u32;
    }

    /// The use that a block was loaded for: its return was counted when it came. The blocks of a prompt are used one
    /// right after another, from the last to the first. All stay, or all bypass: a block that stays needs its parent.
    fn use_loaded(&mut self, nodes: &mut Nodes, block: BlockId) {
        let child = self.last_loaded.replace(block).filter(|child| nodes[*child].touched == nodes.clock);
        let stays = match child {
            Some(child) => nodes[child].mark & BYPASSED == 0,
            None => self.is_worth_a_place(nodes, true),
        };
        if stays {
            return self.lift(nodes, block);
        }
        self.lists.sink(nodes, block, child);
        nodes[block].mark = nodes.clock & !FLAGS | KNOWN | BYPASSED;
    }

    /// Whether a block that is used now has at least the hit density of the block that would be evicted for it, or that
    /// eviction is paid for.
    fn is_worth_a_place(&self, nodes: &Nodes, is_known: bool) -> bool {
        let is_paid_for = |reused| self.hit_density.record_pays(nodes, reused);
        if self.hit_density.recency.pays() || self.lists.tail(REUSED).is_some_and(is_paid_for) {
            return true;
        }
        let own = self.hit_density.at(usize::from(is_known), 0);
        let is_no_better = |block| own >= self.hit_density.of(nodes, block);
        let (Some(fresh), Some(reused)) = (self.lists.tail(FRESH), self.lists.tail(REUSED)) else {
            return self.coldest(nodes).is_none_or(is_no_better);
        };
        // As `choose`: the reused tail is the victim where it may be and is worth no more.
        is_no_better(fresh) || may_be_colder(nodes, [fresh, reused]) && is_no_better(reused)
    }

    fn count_return(&mut self, nodes: &Nodes, ghost: Option<Ghost>) {
        if let Some(ghost) = ghost {
            let age = nodes.clock.wrapping_sub(ghost.touched);
            self.hit_density.recency.miss(age);
            self.hit_density.kinds[usize::from(ghost.mark)].hit(age);
        }
    }

    fn remember(&mut self, nodes: &Nodes, key: Fingerprint, ghost: Ghost) {
        if let Some(lost) = self.ghosts.insert(key, ghost, nodes.clock) {
            self.hit_density.kinds[usize::from(lost.mark)].age_out(nodes.clock.wrapping_sub(lost.touched));
        }
    }

    fn learn_now_and_then(&mut self, nodes: &Nodes, residents: &dyn Residents) {
        if self.evictions_to_update > 0 {
            self.evictions_to_update -= 1;
        } else {
            self.learn(nodes, residents);
        }
    }

    #[cold]
    #[inline(never)]
    fn learn(&mut self, nodes: &Nodes, residents: &dyn Residents) {
        let count = self.lists.count();
        self.hit_density.recency.residents = count;
        self.evictions_to_update = (count / HitDensity::UPDATES_PER_TURNOVER).max(LEAST_BETWEEN_UPDATES);
        self.ghosts.fit(count as usize, GHOSTS_PER_BLOCK);
        let most = MOST_OF_A_RESIDENT * f64::from(count.max(1));
        let (since, steps) = self.pace.update(nodes.clock, most);
        let kinds = &mut self.hit_density.kinds;
        // A sample of the ghosts that may still come back.
        let mut ghosts = Vec::with_capacity(SAMPLE);
        let stands_for = self.ghosts.sample(SAMPLE, nodes.clock, |ghost| ghosts.push(ghost));
        for ghost in ghosts {
            let (kind, age) = (&mut kinds[usize::from(ghost.mark)], nodes.clock.wrapping_sub(ghost.touched));
            kind.wait(age, stands_for);
            kind.pass(age, since, stands_for);
        }
        let places = self.places.by_ref().take(SAMPLE_OF_SLOTS);
        let blocks: Vec<BlockId> = places.filter_map(|place| residents.at(place)).collect();
        let stands_for = f64::from(count) / blocks.len().max(1) as f64;
        blocks.iter().for_each(|block| kinds[kind(nodes, *block)].pass(age(nodes, *block), since, stands_for));
        // Recency has blocks up to this age, and what they are due is not the record's to promise.
        let due = kinds.iter().map(|kind| kind.due(count)).sum();
        let came = kinds.iter().map(|kind| kind.came(count)).sum();
        self.hit_density.record.learn(due, came, count.into(), nodes.clock);
        let hits: f64 = kinds.iter().map(|kind| kind.came(0)).sum();
        if hits > most {
            kinds.iter_mut().for_each(|kind| kind.count_as(most / hits));
        }
        self.hit_density.shares.learn(kinds, count);
        let shares = &self.hit_density.shares;
        kinds.iter_mut().for_each(|kind| kind.learn(steps, shares));
    }
}

impl Pace {
    /// The steps since the last update, which ends now, and the mean with them, of which each is `most` at most.
    fn update(&mut self, clock: u32, most: f64) -> (u32, f64) {
        let steps = clock.wrapping_sub(std::mem::replace(&mut self.last_update, clock));
        self.steps = HitDensity::KEEP * self.steps + f64::from(steps).min(most);
        self.updates = HitDensity::KEEP * self.updates + 1.0;
        (steps, self.steps / self.updates)
    }
}

impl Promises {
    /// So many hits were due since the last update, and so many came.
    fn learn(&mut self, due: f64, came: f64, residents: f64, clock: u32) {
        let least = -residents / RESIDENTS_PER_MARGIN;
        self.missing = (self.missing + due - RECORD_HOLDS * came).clamp(least, residents);
        if self.missing == least {
            self.held = clock;
        }
    }
}

/// Places spread evenly, however many are taken: the multiples of the golden ratio, as 2^-32ths.
#[derive(Default)]
struct Places(u32);

impl Iterator for Places {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.0 = self.0.wrapping_add(0x9e37_79b9);
        Some(self.0)
    }
}

impl Account {
    /// A resident was looked up. One as old as this was not among the blocks that were used last, unless some of these
    /// were used twice.
    fn hit(&mut self, age: u32) {
        self.balance -= i64::from(age > self.residents);
    }

    /// A ghost came back. One as young as this was among the blocks that were used last.
    fn miss(&mut self, age: u32) {
        if age <= self.residents {
            let residents = i64::from(self.residents);
            self.balance = (self.balance.max(-residents / RESIDENTS_PER_DEBT) + 1).min(residents);
        }
    }

    fn pays(&self) -> bool {
        self.balance > 0
    }
}

impl HitDensities {
    fn at(&self, kind: usize, age: u32) -> f64 {
        let share = if self.backing == Backing::OfReturning && kind == 1 { LOAD } else { 1.0 };
        share * self.kinds[kind].at(age)
    }

    /// Whether the eviction of this block by recency alone is paid for.
    fn pays(&self, nodes: &Nodes, reused: BlockId) -> bool {
        self.recency.pays() || self.record_pays(nodes, reused)
    }

    /// The record pays only for blocks of the time when it held. And only for one that is past the reach of recency by
    /// half: one that recency just let go is late at most, and rounds that begin need it.
    fn record_pays(&self, nodes: &Nodes, reused: BlockId) -> bool {
        let Promises { missing, held } = self.record;
        missing > 0.0 && {
            let (age, reach) = (age(nodes, reused), self.recency.residents);
            age > reach + reach / 2 && age >= nodes.clock.wrapping_sub(held)
        }
    }

    /// Recency has evicted a block, or would have.
    fn pay(&mut self) {
        self.recency.balance -= i64::from(self.recency.pays());
        self.record.missing -= f64::from(self.record.missing > 0.0);
    }

    fn of(&self, nodes: &Nodes, block: BlockId) -> f64 {
        self.at(kind(nodes, block), age(nodes, block))
    }
}

fn choose(nodes: &Nodes, hit_density: &HitDensities, [fresh, reused]: [BlockId; 2]) -> usize {
    let goes_first = || hit_density.of(nodes, reused) <= hit_density.of(nodes, fresh);
    usize::from(may_be_colder(nodes, [fresh, reused]) && (hit_density.pays(nodes, reused) || goes_first()))
}

/// Whether the reused tail goes before the fresh one if it is worth no more.
fn may_be_colder(nodes: &Nodes, [fresh, reused]: [BlockId; 2]) -> bool {
    nodes[fresh].mark & BYPASSED == 0 && nodes.age(reused) > nodes.age(fresh)
}

/// The number of the hit densities that apply to a block.
fn kind(nodes: &Nodes, block: BlockId) -> usize {
    usize::from(nodes[block].mark & (KNOWN | REUSED as u32) != 0)
}

/// The age since the last real use. A refresh is none; otherwise the policy would learn the length of the queue.
fn age(nodes: &Nodes, block: BlockId) -> u32 {
    nodes.clock.wrapping_sub(used(nodes, block))
}

/// The clock at the last use. The mark holds it without its lowest bits, where the flags are.
fn used(nodes: &Nodes, block: BlockId) -> u32 {
    nodes[block].mark & !FLAGS
}

fn set_used(nodes: &mut Nodes, block: BlockId, clock: u32) {
    nodes[block].mark = clock & !FLAGS | nodes[block].mark & FLAGS;
}
