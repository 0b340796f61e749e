//! Making room: free slots, new extents, eviction, and units that move between classes.
//!
//! A class first uses its free slots, then free units, then evicts its own coldest. A few times while it evicts as much
//! as one more extent would hold, it compares the age of its older blocks with those of the other classes; where another
//! class keeps much older ones, or has none to lose, a run of units is drained for it: nothing new goes in, what is not held
//! moves to other slots of its class (`relocate`), which evicts its coldest for that, the rest is waited for, and all the while
//! its empty units go to nobody else, or a busy class would take them back. Draining goes on in pieces.

use std::cmp::Reverse;

use crate::block::{BlockId, ClassId};
use crate::core::{Core, Effect, Tally, View, WARM, policy_key};
use crate::index::Fingerprint;
use crate::miss::Fate;
use crate::policy::MAX_SCAN;
use crate::space::{Extent, ExtentId, Run};

pub(crate) struct Drain {
    run: Run,
    /// Who gets the units.
    heir: ClassId,
    /// Where this pass stands: the extent at or behind `unit`, from `slot` on.
    unit: u32,
    slot: u32,
    /// In this pass a block found no other place.
    has_unplaced: bool,
    /// A whole pass was made; what is left is held.
    pub is_waiting: bool,
}

/// Classes that are sampled in one comparison, at about 20 µs each: one may have old blocks and yet not an extent's worth.
const MAX_DONORS: usize = 4;

/// What a sample says of an extent.
struct Warmth {
    /// How much is to be copied: the less, the fewer its blocks are, and the older, since the oldest are evicted instead.
    /// What is held counts most, since it has to be waited for.
    mean: u64,
    /// Slots looked at.
    slots: u64,
    /// Of them, free or with an old block.
    spare: u64,
}

/// Slots of a draining run looked at in one step, and so copies at a time: each takes an eviction, and what is evicted
/// for them is not there meanwhile.
const DRAIN_SLOTS_PER_STEP: u32 = 32;
/// Evictions of one step, at about 2 µs each.
const EVICTIONS_PER_STEP: usize = 2 * DRAIN_SLOTS_PER_STEP as usize;
/// Drains at a time. A new one begins only when all others wait for holders, so that a paused engine does not
/// keep classes from growing.
const MAX_DRAINS: usize = 4;
/// Comparisons with the other classes while a class evicts as much as one more extent would hold: more make no difference
/// to the default policy, fewer leave a class that suddenly needs room behind (bench/reports/2026-11-22-policy.md).
const COMPARISONS_PER_EXTENT: u64 = 4;
/// A class is as old as one in so many of its slots at least. The oldest block says little: a policy that keeps what
/// returned may give up what is new at a tenth of that age (bench/reports/2026-11-22-policy.md).
const OLD_ONE_IN: usize = 4;
/// How many times older another class must be: below this the exchange is noise.
const MUCH_COLDER: u64 = 2;
/// Of so many slots of a class one at least is in nobody's hand after a promotion that nobody asked for: the shares of
/// promises, reservations and stores to tiers add up to less than that leaves.
const SPARE_ONE_IN: u64 = 8;
/// Extents of a class and slots of an extent that are looked at, so that a comparison stays cheap.
const SAMPLED_EXTENTS: usize = 16;
const SAMPLED_SLOTS: u32 = 32;

impl Core {
    /// Whether `class` has a free slot, or gets one from free units.
    pub(crate) fn has_room(&mut self, class: ClassId) -> bool {
        self.space.has_free(class) || self.grow(class)
    }

    /// Frees up to `want` slots of `class`. False if everything looked at is held, or if it would take more than
    /// `budget` evictions.
    pub(crate) fn make_room(&mut self, class: ClassId, want: usize, budget: &mut usize) -> bool {
        if self.stats.evicted >= self.next_comparison && !self.compare(class) {
            self.next_comparison = self.stats.evicted + self.space.extent_slots(class) / COMPARISONS_PER_EXTENT;
        }
        let mut is_stuck = false;
        while *budget > 0 && !self.space.has_free(class) {
            // The victims may be in a draining extent, whose slots are not taken again.
            let evicted = self.evict(class, want.min(*budget));
            is_stuck |= evicted == 0;
            *budget = budget.saturating_sub(if evicted > 0 { evicted } else { MAX_SCAN });
        }
        if is_stuck {
            self.consider_drain(class, None);
        }
        self.has_room(class)
    }

    /// As `make_room` for one slot that nobody asked for yet: no wanted block goes for it, no other class gives anything,
    /// and one in [`SPARE_ONE_IN`] of the class's slots stays in nobody's hand.
    pub(crate) fn make_room_ahead(&mut self, class: ClassId, budget: &mut usize) -> bool {
        if !self.has_spare(class) {
            return false;
        }
        while *budget > 0 && !self.has_room(class) {
            let is_evicted = self.evict_next(class, false);
            *budget = budget.saturating_sub(if is_evicted { 1 } else { MAX_SCAN });
            if !is_evicted {
                break;
            }
        }
        self.space.has_free(class)
    }

    /// Whether a slot of `class` may be held for a while without being missed.
    fn has_spare(&self, class: ClassId) -> bool {
        let Tally { pinned, reserved, moving, fenced, .. } = self.tallies[class.0 as usize];
        let held = pinned + reserved + moving + fenced + 1;
        let slots = self.space.class_info(class).slots;
        held * SPARE_ONE_IN <= slots * (SPARE_ONE_IN - 1) || self.space.may_grow(class)
    }

    /// Goes on with one of the drains under way.
    pub(crate) fn step_drain(&mut self) {
        // A pass never meets a block that is being copied.
        if self.copies > 0 {
            return;
        }
        let Some(drain) = self.drains.first_mut() else { return };
        let Some(id) = self.space.extent_from(drain.run, drain.unit) else {
            (drain.unit, drain.slot, drain.is_waiting) = (drain.run.first_unit, 0, !drain.has_unplaced);
            drain.has_unplaced = false;
            return self.drains.rotate_left(1);
        };
        let run = drain.run;
        let Extent { first_unit, units, slots, .. } = *self.space.extent(id);
        let from = drain.slot;
        let to = (from + DRAIN_SLOTS_PER_STEP).min(slots);
        (drain.unit, drain.slot) = if to == slots { (first_unit + units, 0) } else { (first_unit, to) };
        let blocks: Vec<BlockId> = self.space.blocks_in(id, from, to).collect();
        let (mut budget, mut is_all) = (EVICTIONS_PER_STEP, true);
        for block in blocks {
            if self.is_indexed(block) && !self.is_held(block) {
                is_all &= self.relocate(block, &mut budget);
            }
        }
        if let Some(drain) = self.drains.iter_mut().find(|drain| drain.run == run) {
            drain.has_unplaced |= !is_all;
        }
    }

    /// The last slot of a draining extent is free.
    pub(crate) fn give_back(&mut self, extent: ExtentId) {
        let Run { first_unit, units } = self.space.give_back(extent);
        self.stats.extents_moved += 1;
        self.effects.push(Effect::ExtentCleared { first_unit, units });
        let space = &mut self.space;
        if let Some(at) = self.drains.iter().position(|drain| space.finish_drain(drain.run)) {
            let heir = self.drains.remove(at).heir;
            self.grow(heir);
        }
    }

    /// Makes an extent of free units, if there are any for it.
    fn grow(&mut self, class: ClassId) -> bool {
        let Some(id) = self.space.grow(class, self.nodes.clock) else { return false };
        let Extent { first_unit, units, .. } = *self.space.extent(id);
        let slot_bytes = self.space.class_info(class).slot_bytes;
        self.effects.push(Effect::ExtentMade { first_unit, units, slot_bytes });
        true
    }

    /// Evicts up to `want` blocks of `class`, some at a time, so that their loads from memory overlap. Returns
    /// how many; none if all that were looked at are held.
    fn evict(&mut self, class: ClassId, want: usize) -> usize {
        let want = want.min(WARM);
        self.warm_victims(class, want);
        (0..want).take_while(|_| self.evict_one(class)).count()
    }

    pub(crate) fn evict_one(&mut self, class: ClassId) -> bool {
        self.evict_next(class, true)
    }

    /// False if all that were looked at are held, or wanted where none of these may go.
    fn evict_next(&mut self, class: ClassId, may_take_wanted: bool) -> bool {
        let Core { blocks, earlier, expectations, .. } = self;
        let view = View { blocks, earlier: *earlier, seed: self.config.seed, expectations, may_take_wanted };
        let Some(block) = self.policies[class.0 as usize].evict(&mut self.nodes, &view) else { return false };
        self.count_eviction(block);
        self.remember(block, Fate::Evicted);
        self.unindex(block);
        self.release_slot(block);
        true
    }

    /// Brings what the next evictions will look at into the processor's cache. A guess: those that lie before
    /// the coldest in its list.
    fn warm_victims(&self, class: ClassId, count: usize) {
        let policy = &self.policies[class.0 as usize];
        let is_there = |block: &BlockId| *block != BlockId::NONE;
        let before = |block: &BlockId| Some(self.nodes[*block].prev).filter(is_there);
        let victims: Vec<BlockId> = std::iter::successors(policy.coldest(&self.nodes), before).take(count).collect();
        self.blocks.warm(&victims);
        let keys: Vec<Fingerprint> = victims.iter().map(|block| self.key_of(*block)).collect();
        self.index.warm(&keys);
        let records = victims.iter().map(|block| &self.blocks[*block]);
        let keys: Vec<Fingerprint> =
            records.map(|record| policy_key(record.namespace, record.group, record.hash.as_bytes())).collect();
        policy.warm(&keys);
        self.space.warm(victims.iter().map(|block| self.blocks[*block].slot));
        self.memory.warm(victims.iter().map(|block| (self.blocks[*block].group, self.blocks[*block].hash.as_bytes())));
    }

    fn count_eviction(&mut self, block: BlockId) {
        self.stats.evicted += 1;
        self.stats.evicted_bytes += self.slot_bytes(block);
    }

    /// Starts to drain a run of a class that is much older than `class`. False if nothing is to be had.
    fn compare(&mut self, class: ClassId) -> bool {
        let has_others = self.space.classes().any(|(other, info)| other != class && info.slots > 0);
        has_others && self.consider_drain(class, self.age_of(class))
    }

    /// Starts to drain a run of the class with the oldest block that has one to give, if that class is much older than
    /// `own`, the age of `class`, or if there is no such. False if nothing is to be had.
    fn consider_drain(&mut self, class: ClassId, own: Option<u64>) -> bool {
        if self.drains.len() >= MAX_DRAINS || self.drains.iter().any(|drain| !drain.is_waiting) {
            return false;
        }
        let age = own.map(|own| own.saturating_mul(MUCH_COLDER));
        let others = self.space.classes().map(|(other, _)| other).filter(|other| *other != class);
        let donors = others.filter_map(|other| Some((self.spareness(other)?, other)));
        let mut donors: Vec<_> = donors.filter(|(oldest, _)| age.is_none_or(|age| *oldest > age)).collect();
        donors.sort_unstable_by_key(|(oldest, donor)| (Reverse(*oldest), donor.0));
        let run = donors.into_iter().take(MAX_DONORS).find_map(|(_, donor)| self.coldest_run(donor, class, age));
        let Some(run) = run else { return false };
        self.drains.insert(
            0,
            Drain { run, heir: class, unit: run.first_unit, slot: 0, has_unplaced: false, is_waiting: false },
        );
        let empty = self.space.drain(run);
        empty.into_iter().for_each(|extent| self.give_back(extent));
        true
    }

    /// Inserts and touches since the block of `class` that was used longest ago was used. `None` if it has none.
    fn coldness(&self, class: ClassId) -> Option<u64> {
        self.policies[class.0 as usize].oldest(&self.nodes).map(|block| self.nodes.age(block).into())
    }

    /// As `coldness`. What got empty is colder than all; what was never used waits for its class as long as it is old.
    fn spareness(&self, class: ClassId) -> Option<u64> {
        let idle = |id| match self.space.extent(id) {
            extent if extent.is_unused() => self.nodes.clock.wrapping_sub(extent.made).into(),
            _ => u64::MAX,
        };
        self.space.empty_extent(class).map(idle).max(self.coldness(class))
    }

    /// The age that one in [`OLD_ONE_IN`] of the slots of `class` has at least, by a sample. `None` if it has no blocks.
    fn age_of(&self, class: ClassId) -> Option<u64> {
        let oldest = self.coldness(class)?;
        let mut ages: Vec<u64> = self.sample(class).into_iter().flat_map(|id| self.sample_ages(id)).collect();
        let nth = ages.len() / OLD_ONE_IN;
        let (_, age, _) = ages.select_nth_unstable_by_key(nth, |age| Reverse(*age));
        Some(oldest.min(*age))
    }

    /// The run that `heir` needs, around the extent of `donor` whose sampled slots are coldest, among a few. `None` if
    /// fewer of the donor's slots are older than `age` than one in [`OLD_ONE_IN`], or than an extent's worth: it would have to
    /// give up what is in use, which it does only for a class that has nothing.
    fn coldest_run(&self, donor: ClassId, heir: ClassId, age: Option<u64>) -> Option<Run> {
        let mut sampled: Vec<(Warmth, ExtentId)> =
            self.sample(donor).into_iter().map(|id| (self.warmth(id, age), id)).collect();
        let sum = |of: fn(&Warmth) -> u64| sampled.iter().map(|(warmth, _)| of(warmth)).sum::<u64>();
        let one_in = self.space.extents_of(donor).take(OLD_ONE_IN).count() as u64;
        let has_spare = sum(|warmth| warmth.spare) * one_in >= sum(|warmth| warmth.slots);
        if age.is_some() && !has_spare {
            return None;
        }
        sampled.sort_unstable_by_key(|(warmth, id)| (warmth.mean, id.0));
        let candidates = self.space.empty_extent(donor).into_iter().chain(sampled.into_iter().map(|(_, id)| id));
        candidates.into_iter().find_map(|id| self.space.run_around(id, heir))
    }

    fn warmth(&self, id: ExtentId, age: Option<u64>) -> Warmth {
        let ages: Vec<u64> = self.sample_ages(id).collect();
        let slots = ages.len() as u64;
        let spare = ages.iter().filter(|own| age.is_some_and(|age| **own > age)).count() as u64;
        let mean = ages.iter().map(|own| u64::from(u32::MAX).saturating_sub(*own)).sum::<u64>() / slots;
        Warmth { mean, slots, spare }
    }

    /// Some extents of `class`, spread over all it has.
    fn sample(&self, class: ClassId) -> Vec<ExtentId> {
        let all: Vec<ExtentId> = self.space.extents_of(class).map(|(id, _)| id).collect();
        all.iter().step_by(all.len().div_ceil(SAMPLED_EXTENTS).max(1)).copied().collect()
    }

    /// Ages of some slots of an extent: a free one is older than all, what is held is in use.
    fn sample_ages(&self, id: ExtentId) -> impl Iterator<Item = u64> {
        let slots = self.space.extent(id).slots;
        let sample = (0..slots).step_by(slots.div_ceil(SAMPLED_SLOTS) as usize);
        sample.map(move |at| match self.space.blocks_in(id, at, at + 1).next() {
            None => u64::MAX,
            Some(block) if self.is_indexed(block) && !self.is_held(block) => self.nodes.age(block).into(),
            Some(_) => 0,
        })
    }
}
