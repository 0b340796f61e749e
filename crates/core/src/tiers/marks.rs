//! How old the marks of one shared tier are: when each resident block was last known to be there.
//!
//! A shared store sees no hit in this host's pool, and loses blocks without a word: it evicts them, their time ends,
//! somebody empties it. So a mark ages. A sighting of a block whose mark is older than a period touches the block
//! there. The period is a fraction of what the store keeps. It begins short. It doubles when blocks were still there
//! that nobody here had touched for several periods. It halves when blocks as old as that were gone.
//!
//! A block that the tier was given before, and that comes up from another tier, is asked for, by a touch, before it is
//! stored again.
//!
//! Invariants: constant work for a sighting. One byte for a block, and eight for each that waits to be touched. Between
//! two ticks at most so many touches are asked for as the limits say; the rest waits, and the first that was seen is
//! the first that is touched. A block waits once. A block that waits to be written is not touched.

use std::collections::VecDeque;

use crate::key::{BlockId, Generation};

/// Numbers of periods: 1 to this.
const PERIODS: u8 = 254;
/// The block waits to be written.
const UNWRITTEN: u8 = 0;
/// The block waits to be touched.
const DUE: u8 = 255;
/// Instead of the periods since a block was last known to be there: it was asked for, and not known to be there.
pub(crate) const ASKED: u8 = 255;
/// Blocks that may wait to be touched. More than that are due for longer than the longest period.
const MAX_DUE: usize = 1 << 16;
/// A store that keeps blocks for so many periods is touched often enough.
const ENOUGH: u8 = 4;
/// One touched block of so many may be gone in a period that is short enough: stores evict by samples.
const FEW: u32 = 16;
/// Periods without growth after blocks were gone, so that a length that was too long is not soon tried again.
const CAUTION: u32 = 16;
/// A page of the bytes.
const PAGE: usize = 4096;

/// How a shared tier is told of the uses of its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touching {
    /// Touches between two ticks, which are the calls of [`crate::Core::expire_skips`].
    pub per_tick: u32,
    /// Ticks after which a mark is old, at least.
    pub least_ticks: u32,
    /// The same, at most.
    pub most_ticks: u32,
    /// Questions between two ticks for blocks that the tier was given before: each is a touch, instead of a store. 0
    /// where a store asks by itself.
    pub asks_per_tick: u32,
}

/// See the module's head.
pub(crate) struct Marks {
    limits: Touching,
    /// The period in which each block was last known to be there. Allocated where it is used.
    known: Vec<Option<Box<[u8; PAGE]>>>,
    /// What waits to be touched, and the period in which it was last known to be there.
    due: VecDeque<(BlockId, u8)>,
    /// What waits to be asked for.
    asked: VecDeque<(BlockId, Generation)>,
    period: u8,
    /// Ticks of a period, before they are spread.
    length: u32,
    /// Ticks until the next period.
    left: u32,
    budget: u32,
    budget_of_asks: u32,
    caution: u32,
    /// Touches of this period that found their block, those of them that show that the store keeps blocks for long
    /// enough, and touches whose block was gone too early.
    kept: u32,
    kept_long: u32,
    gone_early: u32,
    random: u64,
}

impl Marks {
    pub fn new(limits: Touching, seed: u64) -> Marks {
        let length = limits.least_ticks.max(1);
        Marks {
            limits,
            known: Vec::new(),
            due: VecDeque::new(),
            asked: VecDeque::new(),
            period: 1,
            length,
            left: length,
            budget: limits.per_tick,
            budget_of_asks: limits.asks_per_tick,
            caution: 0,
            kept: 0,
            kept_long: 0,
            gone_early: 0,
            random: seed | 1,
        }
    }

    /// The block is on its way to the tier.
    pub fn wait(&mut self, block: BlockId) {
        *self.of(block) = UNWRITTEN;
    }

    /// The tier has the block now.
    pub fn confirm(&mut self, block: BlockId) {
        *self.of(block) = self.period;
    }

    /// Whether the block waits to be written.
    pub fn is_waiting(&self, block: BlockId) -> bool {
        self.get(block) == UNWRITTEN
    }

    /// The block was used: it waits to be touched if its mark is old.
    pub fn see(&mut self, block: BlockId) {
        let known = self.get(block);
        if known != UNWRITTEN && known != DUE && known != self.period && self.due.len() < MAX_DUE {
            self.due.push_back((block, known));
            *self.of(block) = DUE;
        }
    }

    /// Whether a touch asks for a block before it is stored.
    pub fn asks_first(&self) -> bool {
        self.limits.asks_per_tick > 0
    }

    /// The tier probably has the block: it waits to be touched, which tells. False if no more may wait.
    pub fn ask(&mut self, block: BlockId, generation: Generation) -> bool {
        let has_room = self.asked.len() < MAX_DUE;
        if has_room {
            self.asked.push_back((block, generation));
            *self.of(block) = DUE;
        }
        has_room
    }

    /// Whether a block may be touched now.
    pub fn has_due(&self) -> bool {
        self.has_asked() || self.budget > 0 && !self.due.is_empty()
    }

    fn has_asked(&self) -> bool {
        self.budget_of_asks > 0 && !self.asked.is_empty()
    }

    /// The next block to be asked for. [`Marks::begin_asking`] follows, unless it has left the pool meanwhile.
    pub fn take_asked(&mut self) -> Option<(BlockId, Generation)> {
        if self.has_asked() { self.asked.pop_front() } else { None }
    }

    /// False if the block was written anew meanwhile. It counts as known from now on.
    pub fn begin_asking(&mut self, block: BlockId) -> bool {
        let is_due = self.get(block) == DUE;
        if is_due {
            self.budget_of_asks -= 1;
            self.confirm(block);
        }
        is_due
    }

    /// The next block to be touched, and the periods since it was last known to be there. It counts as known from now
    /// on. The caller leaves out what the tier does not have any more.
    pub fn take_due(&mut self) -> Option<(BlockId, u8)> {
        while self.budget > 0 && !self.due.is_empty() {
            let (block, known) = self.due.pop_front()?;
            // Written anew meanwhile, or another block of the same number.
            if self.get(block) == DUE {
                self.budget -= 1;
                self.confirm(block);
                let age = (u16::from(self.period) + u16::from(PERIODS) - u16::from(known)) % u16::from(PERIODS);
                return Some((block, age as u8));
            }
        }
        None
    }

    /// A touch of a mark of that age has ended.
    pub fn touched(&mut self, age: u8, is_there: bool) {
        if is_there {
            self.kept += 1;
            self.kept_long += u32::from(age >= ENOUGH);
        } else {
            self.gone_early += u32::from(age <= 2 * ENOUGH);
        }
    }

    /// Ticks of a period.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Time passes.
    pub fn tick(&mut self) {
        self.budget = self.limits.per_tick;
        self.budget_of_asks = self.limits.asks_per_tick;
        self.left -= 1;
        if self.left == 0 {
            self.judge();
            self.period = self.period % PERIODS + 1;
            self.left = self.spread();
        }
    }

    pub fn heap_bytes(&self) -> usize {
        let pages = self.known.iter().flatten().count() * PAGE;
        let due = self.due.capacity() * size_of::<(BlockId, u8)>()
            + self.asked.capacity() * size_of::<(BlockId, Generation)>();
        pages + due + self.known.capacity() * size_of::<Option<Box<[u8; PAGE]>>>()
    }

    /// Whether the next period is longer or shorter.
    fn judge(&mut self) {
        let Touching { least_ticks, most_ticks, .. } = self.limits;
        if self.gone_early > (self.kept + self.gone_early) / FEW {
            (self.length, self.caution) = ((self.length / 2).max(least_ticks).max(1), CAUTION);
        } else if self.caution > 0 {
            self.caution -= 1;
        } else if self.kept_long > 0 {
            self.length = (self.length * 2).min(most_ticks.max(least_ticks));
        }
        (self.kept, self.kept_long, self.gone_early) = (0, 0, 0);
    }

    /// Three to five quarters of the length, so that hosts do not touch the same block at the same time.
    fn spread(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let quarter = self.length / 4;
        self.length - quarter + (self.random >> 32) as u32 % (2 * quarter + 1)
    }

    fn get(&self, block: BlockId) -> u8 {
        let page = self.known.get(block.0 as usize / PAGE).and_then(Option::as_ref);
        page.map_or(0, |page| page[block.0 as usize % PAGE])
    }

    fn of(&mut self, block: BlockId) -> &mut u8 {
        let page = block.0 as usize / PAGE;
        if self.known.len() <= page {
            self.known.resize_with(page + 1, || None);
        }
        &mut self.known[page].get_or_insert_with(|| Box::new([0; PAGE]))[block.0 as usize % PAGE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockId = BlockId(5000);

    fn marks(per_tick: u32, most_ticks: u32) -> Marks {
        Marks::new(Touching { per_tick, least_ticks: 1, most_ticks, asks_per_tick: 0 }, 7)
    }

    /// All of them are seen; what may be touched now.
    fn due(marks: &mut Marks, seen: std::ops::RangeInclusive<u32>) -> Vec<(BlockId, u8)> {
        seen.for_each(|block| marks.see(BlockId(block)));
        std::iter::from_fn(|| marks.take_due()).collect()
    }

    fn periods(marks: &mut Marks, count: u32) {
        (0..count).for_each(|_| {
            let period = marks.period;
            while marks.period == period {
                marks.tick();
            }
        });
    }

    #[test]
    fn a_mark_is_due_once_in_a_period_and_not_while_its_block_waits() {
        let mut marks = marks(10, 1);
        marks.confirm(BLOCK);
        assert_eq!(due(&mut marks, 0..=5000), [], "just confirmed");
        periods(&mut marks, 3);
        assert_eq!(due(&mut marks, 0..=5000), [(BLOCK, 3)]);
        assert_eq!(due(&mut marks, 0..=5000), []);
        marks.wait(BLOCK);
        periods(&mut marks, 1);
        assert_eq!(due(&mut marks, 0..=5000), []);
        assert_eq!(due(&mut marks, 1 << 20..=1 << 20), [], "never marked");
    }

    #[test]
    fn ages_go_on_where_the_numbers_of_periods_begin_anew() {
        let mut marks = marks(10, 1);
        periods(&mut marks, u32::from(PERIODS) - 2);
        marks.confirm(BLOCK);
        periods(&mut marks, 4);
        assert_eq!((marks.period, due(&mut marks, 5000..=5000)), (3, vec![(BLOCK, 4)]));
    }

    #[test]
    fn no_more_is_touched_between_two_ticks_than_the_limit_says() {
        let mut marks = marks(10, 1);
        (0..100).for_each(|block| marks.confirm(BlockId(block)));
        periods(&mut marks, 1);
        let numbers = |due: Vec<(BlockId, u8)>| due.into_iter().map(|(block, _)| block.0).collect::<Vec<_>>();
        assert_eq!(numbers(due(&mut marks, 0..=99)), (0..10).collect::<Vec<_>>());
        assert_eq!(due(&mut marks, 0..=99), []);
        marks.tick();
        assert_eq!(numbers(due(&mut marks, 0..=99)), (10..20).collect::<Vec<_>>(), "before those that were touched");
    }

    #[test]
    fn each_of_more_blocks_than_the_limit_has_its_turn_however_often_all_are_seen() {
        let mut marks = marks(10, 1);
        (0..100).for_each(|block| marks.confirm(BlockId(block)));
        let mut touched = Vec::new();
        for _ in 0..20 {
            periods(&mut marks, 1);
            touched.extend(due(&mut marks, 0..=99));
        }
        for block in 0..100 {
            assert_eq!(touched.iter().filter(|(touched, _)| touched.0 == block).count(), 2, "{block}");
        }
    }

    #[test]
    fn what_was_written_anew_while_it_waited_is_not_touched() {
        let mut marks = marks(1, 1);
        (0..3).for_each(|block| marks.confirm(BlockId(block)));
        periods(&mut marks, 1);
        assert_eq!(due(&mut marks, 0..=2), [(BlockId(0), 1)]);
        marks.wait(BlockId(1));
        marks.confirm(BlockId(1));
        marks.tick();
        assert_eq!(marks.take_due(), Some((BlockId(2), 2)));
    }

    #[test]
    fn what_waits_to_be_touched_is_bounded() {
        let mut marks = marks(1, 1);
        (0..1 << 17).for_each(|block| marks.confirm(BlockId(block)));
        periods(&mut marks, 1);
        due(&mut marks, 0..=(1 << 17) - 1);
        assert!(marks.due.len() <= MAX_DUE);
        assert!(marks.heap_bytes() < (1 << 17) + (1 << 12) + MAX_DUE * 8 + (1 << 12), "{}", marks.heap_bytes());
    }

    #[test]
    fn the_period_grows_while_blocks_stay_for_several_of_it_and_shrinks_when_they_are_gone() {
        let mut marks = marks(10, 64);
        for _ in 0..10 {
            marks.touched(1, true);
            periods(&mut marks, 1);
        }
        assert_eq!(marks.length(), 1, "that blocks stay for one period proves nothing of two");
        for expected in [2, 4, 8, 16, 32, 64, 64] {
            marks.touched(ENOUGH, true);
            periods(&mut marks, 1);
            assert_eq!(marks.length(), expected);
        }
        marks.touched(1, false);
        periods(&mut marks, 1);
        assert_eq!(marks.length(), 32);
        marks.touched(ENOUGH, true);
        periods(&mut marks, 1);
        assert_eq!(marks.length(), 32, "not soon again");
        (0..64).for_each(|_| marks.touched(1, true));
        marks.touched(1, false);
        periods(&mut marks, 1);
        assert_eq!(marks.length(), 32, "one of 64 is no sign");
        (0..10).for_each(|_| marks.touched(200, false));
        periods(&mut marks, 1);
        assert_eq!(marks.length(), 32, "what was left alone for so long may be gone");
    }

    #[test]
    fn memory_is_a_byte_for_each_block_that_has_a_mark() {
        let mut marks = marks(10, 1);
        (0..1 << 16).for_each(|block| marks.confirm(BlockId(block)));
        assert!(marks.heap_bytes() < (1 << 16) + (1 << 12), "{}", marks.heap_bytes());
    }
}
