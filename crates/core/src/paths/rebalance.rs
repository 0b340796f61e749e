//! Units that move from one size class to another.
//!
//! A few times while as many blocks are evicted or refused as one more extent would hold, a class compares the age of
//! its older blocks with that of the other classes' older blocks. If another class keeps much older blocks, which are
//! not worth more than new ones here, or has an unused extent, a run of its units is drained: if possible, one of which
//! nobody holds a slot. Nothing new is placed in the run. Blocks that nobody holds move to other slots of their class
//! (`relocate`), which evicts its coldest blocks for that. Held blocks are moved when they are released. Meanwhile no
//! other class gets the run's empty units, or a busy class would take them back. Draining continues in pieces; its
//! state is [`Drains`](crate::rebalance::Drains). A drain that waits for slots that somebody has to fill, or that are
//! fenced, is given up if all extents of a class drain, and the class needs a slot in that run.

use std::cmp::Reverse;

use crate::core::Core;
use crate::key::{BlockId, ClassId};
use crate::slots::{Extent, ExtentId, Run, State};
use crate::stats::Stats;

/// Classes that are sampled in one comparison, at about 20 µs each: one may have old blocks and yet not an extent's
/// worth.
const MAX_DONORS: usize = 4;

/// What a sample says of an extent.
struct ExtentSample {
    /// The cost of draining: less if there are fewer blocks, and less if they are old, because the oldest are evicted
    /// instead of copied. Held blocks cost most, because the drain has to wait for them.
    mean: u64,
    /// Slots looked at.
    slots: u64,
    /// Of them, free or with an old block.
    spare: u64,
}

/// Slots of a draining run examined in one step, so the largest number of copies at a time: each copy takes an
/// eviction, and the evicted block is missing from then on.
const DRAIN_SLOTS_PER_STEP: u32 = 32;
/// Evictions of one step, at about 2 µs each.
const EVICTIONS_PER_STEP: usize = 2 * DRAIN_SLOTS_PER_STEP as usize;
/// Comparisons with the other classes while as much is evicted or refused as one more extent of a class would hold:
/// more make no difference to the default policy, fewer leave a class that suddenly needs room behind
/// (bench/reports/2026-11-22-policy.md).
const COMPARISONS_PER_EXTENT: u64 = 4;
/// The age of a class is the age that at least one in so many of its slots has reached. The oldest block alone says
/// little: a policy that keeps returning blocks may evict new ones at a tenth of that age
/// (bench/reports/2026-11-22-policy.md).
const OLD_ONE_IN: usize = 4;
/// How many times older another class must be: below this the exchange is noise.
const MUCH_OLDER: u64 = 2;
/// Extents of a class and slots of an extent that are looked at, so that a comparison stays cheap.
const SAMPLED_EXTENTS: usize = 16;
const SAMPLED_SLOTS: u32 = 32;
/// Slots that are looked at together for holders, at about 1 µs, and how many times in one search for a run: all slots
/// of two runs of 256 MiB, if blocks have 64 KiB.
const SLOTS_PER_SCAN: u32 = 64;
const MAX_SCANS: usize = 128;

impl Core {
    /// Goes on with one of the drains under way.
    pub(crate) fn step_drain(&mut self) {
        let Some((run, unit, from)) = self.drains.next() else { return };
        let Some(id) = self.slots.space().extent_from(run, unit) else { return self.drains.end_pass() };
        let Extent { first_unit, units, slots, .. } = *self.slots.space().extent(id);
        // The extent where the pass stood may be empty and given back by now: this is the next one, from its start.
        let from = if first_unit == unit { from } else { 0 };
        let to = (from + DRAIN_SLOTS_PER_STEP).min(slots);
        let (unit, slot) = if to == slots { (first_unit + units, 0) } else { (first_unit, to) };
        self.drains.advance(unit, slot);
        let blocks: Vec<BlockId> = self.slots.space().blocks_in(id, from, to).collect();
        let (mut budget, mut is_all) = (EVICTIONS_PER_STEP, true);
        for block in blocks {
            if matches!(self.slots[block].state, State::Reserved | State::Fenced) {
                self.drains.note_kept(run);
            } else if self.slots.is_indexed(block) && !self.slots.is_held(block) {
                is_all &= self.relocate(block, &mut budget);
            }
        }
        if !is_all {
            self.drains.note_unplaced(run);
        }
    }

    /// The last slot of a draining extent is free.
    pub(crate) fn give_back(&mut self, extent: ExtentId) {
        self.slots.give_back(extent, &mut self.journal);
        self.journal.stats_mut().extents_moved += 1;
        if let Some(recipient) = self.drains.finish(&mut self.slots) {
            self.slots.grow(recipient, &mut self.journal);
        }
    }

    /// If all extents of `class` drain, and one of the drains waits for slots that somebody has to fill or that are
    /// fenced, the class has its extents of that run again. These slots may be the stock of busy engines, or wait for a
    /// disk that hangs. Other holders let go.
    pub(crate) fn reclaim(&mut self, class: ClassId) -> bool {
        self.slots.space().class_info(class).slots == 0 && self.drains.give_up(&mut self.slots, class)
    }

    /// While drains wait, a search for another run that found none may be made again. Called a few times a second.
    pub fn retry_drains(&mut self) {
        self.drains.retry();
    }

    /// Now and then drains a run of a class that is much older than `class`, which is about to evict, or has refused a
    /// block. A class whose extents are refused takes no units of others.
    pub(crate) fn rebalance(&mut self, class: ClassId) {
        let is_due = !self.slots.space().is_refused() && self.drains.is_comparison_due(self.turned_away());
        if is_due && !self.compare_ages(class) {
            let interval = self.slots.space().extent_slots(class) / COMPARISONS_PER_EXTENT;
            self.drains.compare_after(self.turned_away() + interval);
        }
    }

    /// Blocks that had to go or could not stay. A class that refuses the rest of a prompt evicts nothing for it, and is
    /// as short of room as one that evicts.
    fn turned_away(&self) -> u64 {
        let Stats { evicted, orphans, .. } = self.journal.stats();
        evicted + orphans
    }

    /// Starts to drain a run of a class that is much older than `class`. False if no class has one to give.
    fn compare_ages(&mut self, class: ClassId) -> bool {
        let has_others = self.slots.space().classes().any(|(other, info)| other != class && info.slots > 0);
        self.drains.note_comparison();
        has_others && self.begin_drain(class, self.age_of(class))
    }

    /// Starts to drain a run of the oldest class that has one to give, if that class is much older than `own`, the age
    /// of `class`, or if `own` is none. False if no class has one to give.
    pub(crate) fn begin_drain(&mut self, class: ClassId, own: Option<u64>) -> bool {
        if !self.drains.may_begin(own.is_none()) {
            return false;
        }
        let age = own.map(|own| own.saturating_mul(MUCH_OLDER));
        let others = self.slots.space().classes().map(|(other, _)| other).filter(|other| *other != class);
        let donors = others.filter_map(|other| Some((self.spare_age(other)?, other)));
        let may_give = |(oldest, donor): &(u64, ClassId)| {
            age.is_none_or(|age| *oldest > age && self.is_worth_more_in(class, *donor))
        };
        let mut donors: Vec<_> = donors.filter(may_give).collect();
        donors.sort_unstable_by_key(|(oldest, donor)| (Reverse(*oldest), donor.0));
        let mut scans = MAX_SCANS;
        let mut donors = donors.into_iter().take(MAX_DONORS);
        let run = donors.find_map(|(_, donor)| self.run_to_drain(donor, class, age, &mut scans));
        let Some(run) = run else {
            if own.is_none() {
                self.drains.note_none();
            }
            return false;
        };
        self.drains.begin(run, class);
        let empty = self.slots.drain(run);
        empty.into_iter().for_each(|extent| self.give_back(extent));
        true
    }

    /// Whether memory of `donor`, which is older, would earn more hits in `class`: blocks that are old because their
    /// time has not come yet are worth more than new ones of `class`. Also true where one of them expects nothing.
    fn is_worth_more_in(&self, class: ClassId, donor: ClassId) -> bool {
        let densities = |class| self.cache.hit_densities(&self.slots, class);
        let slot_bytes = |class| self.slots.space().class_info(class).slot_bytes as f64;
        match (densities(class), densities(donor)) {
            (Some([new, _]), Some([_, oldest])) if self.slots.space().empty_extent(donor).is_none() => {
                new / slot_bytes(class) >= oldest / slot_bytes(donor)
            }
            _ => true,
        }
    }

    /// As [`Cache::oldest_age`](crate::cache::Cache::oldest_age). What got empty is colder than all; what was never
    /// used waits for its class as long as it is old.
    fn spare_age(&self, class: ClassId) -> Option<u64> {
        let idle = |id| match self.slots.space().extent(id) {
            extent if extent.is_unused() => self.slots.nodes().clock.wrapping_sub(extent.made).into(),
            _ => u64::MAX,
        };
        self.slots.space().empty_extent(class).map(idle).max(self.cache.oldest_age(&self.slots, class))
    }

    /// The age that one in [`OLD_ONE_IN`] of the slots of `class` has at least, by a sample. `None` if it has no
    /// blocks.
    fn age_of(&self, class: ClassId) -> Option<u64> {
        let oldest = self.cache.oldest_age(&self.slots, class)?;
        let mut ages: Vec<u64> = self.sample(class).into_iter().flat_map(|id| self.sample_ages(id)).collect();
        let nth = ages.len() / OLD_ONE_IN;
        let (_, age, _) = ages.select_nth_unstable_by_key(nth, |age| Reverse(*age));
        Some(oldest.min(*age))
    }

    /// The run that `recipient` needs, around the extent of `donor` whose sampled slots are coldest, among a few.
    /// `None` if fewer of the donor's slots are older than `age` than one in [`OLD_ONE_IN`], or than an extent has:
    /// then the donor would have to give up blocks in use, and it does so only for a class that has nothing. A run of
    /// which nobody holds a slot is preferred.
    fn run_to_drain(&self, donor: ClassId, recipient: ClassId, age: Option<u64>, scans: &mut usize) -> Option<Run> {
        let mut sampled: Vec<(ExtentSample, ExtentId)> =
            self.sample(donor).into_iter().map(|id| (self.sample_extent(id, age), id)).collect();
        let sum =
            |of: fn(&ExtentSample) -> u64| sampled.iter().map(|(sample_extent, _)| of(sample_extent)).sum::<u64>();
        let one_in = self.slots.space().extents_of(donor).take(OLD_ONE_IN).count() as u64;
        let has_spare = sum(|sample_extent| sample_extent.spare) * one_in >= sum(|sample_extent| sample_extent.slots);
        if age.is_some() && !has_spare {
            return None;
        }
        sampled.sort_unstable_by_key(|(sample_extent, id)| (sample_extent.mean, id.0));
        let candidates =
            self.slots.space().empty_extent(donor).into_iter().chain(sampled.into_iter().map(|(_, id)| id));
        let runs: Vec<Run> = candidates.filter_map(|id| self.slots.space().run_around(id, recipient)).collect();
        let unheld = runs.iter().find(|run| self.is_unheld(**run, scans));
        unheld.or_else(|| runs.first().filter(|_| self.drains.may_wait())).copied()
    }

    /// Whether nobody holds one of the run's slots, or is to fill it: a drain of the run would wait for him, and a busy
    /// engine keeps its stock of slots. False if it would take more than `scans`.
    fn is_unheld(&self, run: Run, scans: &mut usize) -> bool {
        let mut unit = run.first_unit;
        while let Some(id) = self.slots.space().extent_from(run, unit) {
            let Extent { first_unit, units, slots, .. } = *self.slots.space().extent(id);
            unit = first_unit + units;
            for from in (0..slots).step_by(SLOTS_PER_SCAN as usize) {
                if *scans == 0 {
                    return false;
                }
                *scans -= 1;
                let to = (from + SLOTS_PER_SCAN).min(slots);
                let blocks: Vec<BlockId> = self.slots.space().blocks_in(id, from, to).collect();
                self.slots.touch_lines(&blocks);
                if blocks.iter().any(|block| !self.slots.is_indexed(*block) || self.slots.is_held(*block)) {
                    return false;
                }
            }
        }
        true
    }

    fn sample_extent(&self, id: ExtentId, age: Option<u64>) -> ExtentSample {
        let ages: Vec<u64> = self.sample_ages(id).collect();
        let slots = ages.len() as u64;
        let spare = ages.iter().filter(|own| age.is_some_and(|age| **own > age)).count() as u64;
        let mean = ages.iter().map(|own| u64::from(u32::MAX).saturating_sub(*own)).sum::<u64>() / slots;
        ExtentSample { mean, slots, spare }
    }

    /// Some extents of `class`, spread over all it has.
    fn sample(&self, class: ClassId) -> Vec<ExtentId> {
        let all: Vec<ExtentId> = self.slots.space().extents_of(class).map(|(id, _)| id).collect();
        let step = all.len().div_ceil(SAMPLED_EXTENTS).max(1);
        all.iter().skip(self.drains.first_of(step)).step_by(step).copied().collect()
    }

    /// Ages of some slots of an extent: a free one is older than all, what is held is in use.
    fn sample_ages(&self, id: ExtentId) -> impl Iterator<Item = u64> {
        let slots = self.slots.space().extent(id).slots;
        let sample = (0..slots).step_by(slots.div_ceil(SAMPLED_SLOTS) as usize);
        sample.map(move |at| match self.slots.space().blocks_in(id, at, at + 1).next() {
            None => u64::MAX,
            Some(block) if self.slots.is_indexed(block) && !self.slots.is_held(block) => {
                self.slots.nodes().age(block).into()
            }
            Some(_) => 0,
        })
    }
}
