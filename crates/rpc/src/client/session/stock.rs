//! The stock of reserved slots, and the slots that the engine has taken from it.
//!
//! Invariant: a slot is in the stock, with the engine, or in the outbox, never in two of them. A group's stock is
//! refilled when it is not full, with a pause after the daemon gave less than requested. A block needs a slot of each
//! group. So where slots are scarce, the groups are filled little by little, such that each has slots for as many of
//! the engine's steps as the others. If the daemon has none for one group nevertheless, the fuller ones give some back.
//!
//! An idle engine's stock shrinks to a few slots, and then to none: one slot keeps a whole unit of the pool from blocks
//! of other sizes. An engine that fills slots is not idle, however long its step takes.
//!
//! Slots of a pool that is gone stay *void* until the engine has returned them: another pool may hand out the same
//! number and generation, and a late commit must not name somebody else's block.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::limits::{IDLE, IDLE_STOCK, LONG_IDLE, RESERVED_BLOCKS};
use crate::proto::Held;

/// Pauses after the daemon gave less than requested: a full pool drains as fast as engines finish loads.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The same once the daemon has taken slots back.
const PAUSE_OF_FREED: Duration = Duration::from_millis(1);
/// Slots requested in one call: as many as the daemon gives in one event.
const RESERVE_AT_ONCE: usize = 64;
/// Where slots are scarce, a group has slots for at most so many steps more than the emptiest other one. Beside a group
/// that gets nothing, whatever the others do, it has so many slots.
const AHEAD: usize = 16;
/// What is wanted within this time is wanted by the requests of one step.
const STEP: Duration = Duration::from_millis(2);
/// Slots are scarce for so long after the daemon gave less than requested.
const SCARCE: Duration = Duration::from_secs(2);
/// A group that got nothing although others gave some of theirs back is helped again after this time.
const HELP_AGAIN: Duration = Duration::from_secs(2);

/// See the module documentation.
pub(super) struct Reservations {
    stock_blocks: usize,
    stocks: BTreeMap<u32, Stock>,
    /// Slots with the engine, and the epoch of the namespace for which each was reserved.
    taken: HashMap<Held, u64>,
    void: HashSet<Held>,
    last_use: Instant,
    /// Since the last question for slots, the daemon has taken some back.
    has_freed: bool,
}

#[derive(Default)]
struct Stock {
    free: VecDeque<Held>,
    /// When the daemon last gave less than requested.
    short_at: Option<Instant>,
    /// From then on.
    pause: Duration,
    help: Help,
    /// Slots that the requests of this step have wanted, and since when.
    step: Option<(usize, Instant)>,
    /// The most that those of one step wanted in a while, and when. At most the stock's target.
    wanted: Option<(usize, Instant)>,
}

/// What fuller stocks did for one that got fewer slots than it asked for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Help {
    #[default]
    Unneeded,
    /// Nothing yet: a request may be taking its slots of one group after another, and finds those that are there.
    Late,
    /// They gave some of theirs back, and ask for none until it has asked again.
    Given,
    /// It got nothing nevertheless, since then. So for a while the others keep and take what they get.
    InVain(Instant),
}

/// The next step for the stock.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refill {
    Reserve {
        group: u32,
        count: usize,
    },
    /// Check again at that time, or when a slot is used.
    Wait(Option<Instant>),
}

/// The kind of a slot that the engine returns.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Returned {
    /// The engine's slot, of this epoch.
    Taken(u64),
    /// Lost with its pool, or never handed out.
    Unknown,
}

impl Reservations {
    pub fn new(stock_blocks: usize, now: Instant) -> Reservations {
        Reservations {
            stock_blocks,
            stocks: BTreeMap::new(),
            taken: HashMap::new(),
            void: HashSet::new(),
            last_use: now,
            has_freed: false,
        }
    }

    pub fn in_stock(&self) -> usize {
        self.stocks.values().map(|stock| stock.free.len()).sum()
    }

    /// Whether slots are requested, without a pause since the daemon gave less.
    pub fn is_filling(&self, now: Instant) -> bool {
        now < self.last_use + IDLE && self.next(now, self.stock_blocks, false).is_some()
    }

    pub fn taken(&self) -> usize {
        self.taken.len()
    }

    pub fn taken_slots(&self) -> impl Iterator<Item = Held> {
        self.taken.keys().copied()
    }

    /// The engine is active: its stock is kept full for a while. True if the engine was idle before.
    pub fn used(&mut self, now: Instant) -> bool {
        let was_idle = now >= self.last_use + IDLE;
        self.last_use = now;
        was_idle
    }

    /// Sets the groups; returns the slots in stock, which must go back.
    pub fn set_groups(&mut self, groups: impl IntoIterator<Item = u32>) -> Vec<Held> {
        let stocks = groups.into_iter().map(|group| (group, Stock::default())).collect();
        let old = std::mem::replace(&mut self.stocks, stocks);
        old.into_values().flat_map(|stock| stock.free).collect()
    }

    /// Takes the slots in stock, which must go back.
    pub fn drain(&mut self) -> Vec<Held> {
        self.stocks.values_mut().flat_map(|stock| stock.free.drain(..)).collect()
    }

    /// Hands out up to `count` slots of `group`; `queued` are already being returned.
    pub fn take(&mut self, group: u32, count: usize, queued: usize, epoch: u64, now: Instant) -> Vec<Held> {
        let room = RESERVED_BLOCKS.saturating_sub(self.taken.len() + self.void.len() + queued);
        let Some(stock) = self.stocks.get_mut(&group) else { return Vec::new() };
        stock.want(count, self.stock_blocks, now);
        let count = count.min(stock.free.len()).min(room);
        let slots: Vec<Held> = stock.free.drain(..count).collect();
        if count > 0 && stock.help != Help::Late {
            stock.help = Help::Unneeded;
        }
        self.taken.extend(slots.iter().map(|slot| (*slot, epoch)));
        slots
    }

    /// Returns a slot from the engine, which had it in use until now.
    pub fn give_back(&mut self, slot: Held, now: Instant) -> Returned {
        self.void.remove(&slot);
        let Some(epoch) = self.taken.remove(&slot) else { return Returned::Unknown };
        self.last_use = now;
        Returned::Taken(epoch)
    }

    /// The daemon reserved `slots` of the `asked` number. Returns those that cannot be used, and if it reserved less
    /// twice in a row, some of the other groups. All of these must go back.
    pub fn stocked(&mut self, group: u32, slots: Vec<Held>, asked: usize, now: Instant) -> Vec<Held> {
        let (void, taken) = (&self.void, &self.taken);
        let is_usable = |slot: &Held| !void.contains(slot) && !taken.contains_key(slot);
        let (usable, mut unusable): (Vec<_>, Vec<_>) = slots.into_iter().partition(is_usable);
        let Some(stock) = self.stocks.get_mut(&group) else { return [usable, unusable].concat() };
        stock.rest(usable.len(), asked, now);
        if self.has_freed {
            stock.pause = stock.pause.min(PAUSE_OF_FREED);
        }
        stock.help = match usable.len() {
            given if given >= asked => Help::Unneeded,
            _ if stock.help == Help::Unneeded => Help::Late,
            0 if stock.help == Help::Given => Help::InVain(now),
            0 if matches!(stock.help, Help::InVain(since) if now < since + HELP_AGAIN) => stock.help,
            _ => Help::Given,
        };
        stock.free.extend(usable);
        if stock.help == Help::Given {
            unusable.extend(self.half_of_what_is_above(group, now));
        }
        unusable
    }

    /// Fuller stocks may have used up the engine's share of the pool.
    fn half_of_what_is_above(&mut self, helped: u32, now: Instant) -> Vec<Held> {
        let steps = self.stocks[&helped].steps(now);
        let mut given = Vec::new();
        for stock in self.stocks.values_mut() {
            let above = stock.free.len().saturating_sub(stock.slots_for(steps, now));
            if above > 1 {
                given.extend(stock.free.drain(..above / 2));
                stock.help = Help::Unneeded;
            }
        }
        given
    }

    /// The daemon has taken slots back, so it may have some again.
    pub fn freed(&mut self) {
        self.has_freed = true;
        self.stocks.values_mut().for_each(|stock| stock.pause = stock.pause.min(PAUSE_OF_FREED));
    }

    /// The daemon could not be asked.
    pub fn not_stocked(&mut self, group: u32, now: Instant) {
        if let Some(stock) = self.stocks.get_mut(&group) {
            stock.rest(0, 1, now);
            stock.help = Help::InVain(now);
        }
    }

    /// The next step; also returns excess slots, which must go back. `is_returning`: what groups gave back is still
    /// on its way to the daemon.
    pub fn refill(&mut self, now: Instant, is_returning: bool) -> (Refill, Vec<Held>) {
        if !self.taken.is_empty() {
            self.last_use = now;
        }
        let [idle_at, long_idle_at] = [IDLE, LONG_IDLE].map(|pause| self.last_use + pause);
        let (target, shrinks_at) = if now < idle_at {
            (self.stock_blocks, idle_at)
        } else if now < long_idle_at {
            (self.stock_blocks.min(IDLE_STOCK), long_idle_at)
        } else {
            (0, long_idle_at)
        };
        let surplus_of = |stock: &Stock| stock.free.len().saturating_sub(target);
        let surplus = self.stocks.values_mut().flat_map(|stock| stock.free.drain(..surplus_of(stock))).collect();
        let wakes = self.stocks.values().flat_map(|stock| {
            let is_short = stock.free.len() < target;
            let pause = stock.paused_until(now).filter(|_| is_short);
            [pause, (!stock.free.is_empty()).then_some(shrinks_at)]
        });
        let wait = Refill::Wait(wakes.flatten().min());
        let Some((group, count)) = self.next(now, target, is_returning) else { return (wait, surplus) };
        self.has_freed = false;
        (Refill::Reserve { group, count }, surplus)
    }

    /// The group to ask for, and how many slots.
    fn next(&self, now: Instant, target: usize, is_returning: bool) -> Option<(u32, usize)> {
        let is_helped = |stock: &&Stock| stock.help == Help::Given && stock.free.len() < target;
        let helped = self.stocks.values().filter(is_helped).map(|stock| stock.steps(now)).reduce(f64::min);
        let is_scarce = self.stocks.values().any(|stock| stock.short_at.is_some_and(|at| now < at + SCARCE));
        let mut emptiest: Option<(u32, f64, usize)> = None;
        for (group, stock) in &self.stocks {
            let steps = stock.steps(now);
            let most_beside = |other: &Stock| match other.help {
                _ if !is_scarce => other.free.len() + RESERVE_AT_ONCE,
                _ if other.free.len() >= target => target,
                Help::InVain(_) => other.free.len() + AHEAD.max(stock.wanted(now)),
                _ => stock.slots_for(other.steps_and_some(now), now),
            };
            let others = self.stocks.iter().filter(|(other, _)| *other != group);
            let most = others.map(|(_, other)| most_beside(other)).min();
            let room = most.map_or(target, |most| target.min(most)).saturating_sub(stock.free.len());
            let is_paused = stock.paused_until(now).is_some();
            let must_wait = match (is_helped(&stock), helped) {
                (true, _) if is_returning => true,
                (is_helped, Some(least)) => steps > least || steps == least && !is_helped,
                (_, None) => false,
            };
            let is_emptier = emptiest.is_none_or(|(_, least, _)| steps < least);
            if room > 0 && !is_paused && !must_wait && is_emptier {
                emptiest = Some((*group, steps, room.min(RESERVE_AT_ONCE)));
            }
        }
        emptiest.map(|(group, _, count)| (group, count))
    }

    /// The connection ended: the daemon frees what is not declared, and the stock is not declared.
    pub fn disconnected(&mut self) {
        for stock in self.stocks.values_mut() {
            *stock = Stock::default();
        }
    }

    /// These slots no longer belong to the engine; `None` means all.
    pub fn lost(&mut self, lost: Option<&HashSet<Held>>) {
        let is_lost = |slot: &Held| lost.is_none_or(|lost| lost.contains(slot));
        let gone: Vec<Held> = self.taken.keys().copied().filter(is_lost).collect();
        for slot in gone {
            self.taken.remove(&slot);
            self.void.insert(slot);
        }
    }
}

impl Stock {
    /// An engine that takes nothing says only that it runs.
    fn want(&mut self, count: usize, most: usize, now: Instant) {
        if count == 0 {
            return;
        }
        let (before, since) = self.step.filter(|(_, since)| now < *since + STEP).unwrap_or((0, now));
        self.step = Some((before + count, since));
        let wanted = (before + count).min(most);
        if wanted >= self.wanted(now) {
            self.wanted = Some((wanted, now));
        }
    }

    /// The most slots that the requests of one step wanted lately.
    fn wanted(&self, now: Instant) -> usize {
        self.wanted.filter(|(_, at)| now < *at + SCARCE).map_or(1, |(count, _)| count.max(1))
    }

    /// So many steps find their slots.
    fn steps(&self, now: Instant) -> f64 {
        self.free.len() as f64 / self.wanted(now) as f64
    }

    /// A quarter more, so that what there is goes to all groups evenly.
    fn steps_and_some(&self, now: Instant) -> f64 {
        let steps = self.steps(now);
        steps + (steps / 4.0).clamp(1.0, AHEAD as f64)
    }

    fn slots_for(&self, steps: f64, now: Instant) -> usize {
        (steps * self.wanted(now) as f64).round() as usize
    }

    /// Pauses grow while the daemon gives nothing: the engine's share, or the pool, is used up.
    fn rest(&mut self, given: usize, asked: usize, now: Instant) {
        self.pause = match given {
            given if given >= asked => return self.pause = Duration::ZERO,
            0 => (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.short_at = Some(now);
    }

    fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.short_at.map(|at| at + self.pause).filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(slots: std::ops::Range<u32>) -> Vec<Held> {
        slots.map(|slot| Held { slot, generation: 1 }).collect()
    }

    fn with_stock(slots: std::ops::Range<u32>, now: Instant) -> Reservations {
        let mut reservations = Reservations::new(8, now);
        reservations.set_groups([0]);
        reservations.stocked(0, held(slots.clone()), slots.len(), now);
        reservations
    }

    #[test]
    fn the_stock_is_refilled_when_it_is_not_full() {
        let now = Instant::now();
        let mut reservations = with_stock(0..8, now);
        assert!(matches!(reservations.refill(now, false).0, Refill::Wait(_)));
        assert_eq!(reservations.take(0, 1, 0, 1, now), held(0..1));
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 1 });
    }

    #[test]
    fn a_large_stock_is_filled_in_pieces() {
        let now = Instant::now();
        let mut reservations = Reservations::new(100, now);
        reservations.set_groups([0]);
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 64 });
        reservations.stocked(0, held(0..64), 64, now);
        assert!(reservations.is_filling(now));
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 36 });
        reservations.stocked(0, held(64..80), 36, now);
        assert!(!reservations.is_filling(now), "there are no more");
        assert!(reservations.is_filling(now + FIRST_PAUSE));
        reservations.stocked(0, held(80..100), 20, now);
        assert!(!reservations.is_filling(now), "it is full");
    }

    #[test]
    fn a_daemon_that_gives_less_is_asked_again_after_growing_pauses() {
        let mut now = Instant::now();
        let mut reservations = with_stock(0..0, now);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            reservations.used(now);
            assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 8 });
            reservations.stocked(0, Vec::new(), 8, now);
            let Refill::Wait(Some(until)) = reservations.refill(now, false).0 else { panic!("no pause") };
            pauses.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 250, 250, 250, 250, 250]);
        reservations.stocked(0, held(0..8), 8, now);
        reservations.used(now);
        reservations.take(0, 8, 0, 1, now);
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 8 }, "the pause is over");
        reservations.stocked(0, Vec::new(), 8, now);
        assert_eq!(
            reservations.refill(now, false).0,
            Refill::Wait(Some(now + FIRST_PAUSE)),
            "and the next one short again"
        );
    }

    #[test]
    fn an_idle_engine_keeps_a_few_slots_and_later_none_and_a_busy_one_fills_up_again() {
        let now = Instant::now();
        let mut reservations = with_stock(0..8, now);
        assert_eq!(reservations.refill(now, false), (Refill::Wait(Some(now + IDLE)), Vec::new()));
        assert_eq!(reservations.refill(now + IDLE, false), (Refill::Wait(Some(now + LONG_IDLE)), held(0..4)));
        assert_eq!(reservations.in_stock(), IDLE_STOCK);
        let later = now + LONG_IDLE;
        assert_eq!(reservations.refill(later, false), (Refill::Wait(None), held(4..8)));
        reservations.used(later);
        assert_eq!(reservations.take(0, 1, 0, 1, now), []);
        assert_eq!(reservations.refill(later, false).0, Refill::Reserve { group: 0, count: 8 });
    }

    /// A request may compute for longer than an engine is idle before the next blocks of its prompt need slots.
    #[test]
    fn an_engine_that_fills_slots_is_not_idle() {
        let now = Instant::now();
        let mut reservations = with_stock(0..8, now);
        reservations.take(0, 1, 0, 1, now);
        reservations.stocked(0, held(8..9), 1, now);
        for seconds in [2, 4, 40] {
            let later = now + Duration::from_secs(seconds);
            assert_eq!(reservations.refill(later, false), (Refill::Wait(Some(later + IDLE)), Vec::new()));
        }
        let later = now + Duration::from_secs(40);
        reservations.give_back(held(0..1)[0], later);
        let later = later + IDLE;
        assert_eq!(reservations.refill(later, false).1, held(1..5));
    }

    /// A daemon that gives out so many slots and no more. Answers what the session asks it until that only waits.
    fn fill(reservations: &mut Reservations, left: &mut usize, next: &mut u32, now: &mut Instant) -> usize {
        for calls in 0..1000 {
            let (refill, surplus) = reservations.refill(*now, false);
            *left += surplus.len();
            match refill {
                Refill::Reserve { group, count } => {
                    let given = count.min(*left);
                    *left -= given;
                    *next += given as u32;
                    *left += reservations.stocked(group, held(*next - given as u32..*next), count, *now).len();
                }
                // Longer than all pauses are once the daemon gives nothing.
                Refill::Wait(_) if calls > 200 => return calls,
                Refill::Wait(until) => *now = until.expect("the stock shrinks when the engine is idle"),
            }
            reservations.used(*now);
        }
        panic!("it asks for ever")
    }

    fn stocks(reservations: &Reservations) -> Vec<usize> {
        reservations.stocks.values().map(|stock| stock.free.len()).collect()
    }

    #[test]
    fn groups_are_filled_evenly() {
        let mut now = Instant::now();
        let mut reservations = Reservations::new(100, now);
        reservations.set_groups([0, 1]);
        // What is asked for and given. Once that was less, a group has at most a quarter more than the other.
        let asked = [(0, 64, 0..20), (1, 25, 100..125), (0, 11, 20..31), (1, 14, 125..139)];
        for (group, count, given) in asked {
            now += if given.start == 20 { FIRST_PAUSE } else { Duration::ZERO };
            assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group, count });
            assert_eq!(reservations.stocked(group, held(given), count, now), []);
        }
        fill(&mut reservations, &mut 1000, &mut 1000, &mut now);
        assert_eq!(stocks(&reservations), [100, 100]);
    }

    /// Beside a step's takes an engine says that it runs, and wants nothing then.
    #[test]
    fn what_a_step_wants_counts_from_its_first_slot_on() {
        let now = Instant::now();
        let mut stock = Stock::default();
        for (us, count) in [(0, 0), (1500, 4), (2500, 4), (5000, 1)] {
            stock.want(count, 64, now + Duration::from_micros(us));
        }
        assert_eq!(stock.wanted(now + STEP), 8);
    }

    #[test]
    fn a_full_stock_holds_no_other_down() {
        let now = Instant::now();
        let mut reservations = Reservations::new(64, now);
        reservations.set_groups([0, 1]);
        reservations.take(0, 64, 0, 1, now);
        reservations.stocked(1, held(100..101), 8, now);
        reservations.stocked(0, held(0..63), 63, now);
        let later = now + FIRST_PAUSE;
        assert_eq!(reservations.refill(later, false).0, Refill::Reserve { group: 0, count: 1 });
        reservations.stocked(0, held(63..64), 1, later);
        assert_eq!(reservations.refill(later, false).0, Refill::Reserve { group: 1, count: 63 });
    }

    /// Slots that groups gave back are of use to another one when the daemon has them.
    #[test]
    fn a_group_asks_again_when_the_daemon_has_what_others_gave_back() {
        let mut now = Instant::now();
        let mut reservations = Reservations::new(64, now);
        reservations.set_groups([0, 1]);
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 0, count: 64 });
        assert_eq!(reservations.stocked(0, held(0..64), 64, now), []);
        assert!(reservations.is_filling(now));
        for (pause, count, returned) in [(Duration::ZERO, 64, 0..0), (FIRST_PAUSE, 64, 0..32)] {
            now += pause;
            assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 1, count });
            assert_eq!(reservations.stocked(1, Vec::new(), count, now), held(returned));
            assert!(!reservations.is_filling(now), "nothing is asked for now");
        }
        now += 2 * FIRST_PAUSE;
        assert!(matches!(reservations.refill(now, true).0, Refill::Wait(_)), "they are on their way");
        assert_eq!(reservations.refill(now, false).0, Refill::Reserve { group: 1, count: 40 });
    }

    /// The daemon had no slot for a while. The others had asked for what it has now before this group did.
    #[test]
    fn a_group_that_got_nothing_for_a_while_gets_its_part_later() {
        let mut now = Instant::now();
        let (mut next, mut left) = (0, 30);
        let mut reservations = Reservations::new(64, now);
        reservations.set_groups(0..3);
        fill(&mut reservations, &mut left, &mut next, &mut now);
        let slots = reservations.take(0, 64, 0, 1, now);
        fill(&mut reservations, &mut left, &mut next, &mut now);
        left += slots.len();
        reservations.lost(None);
        let begun = now;
        while now < begun + Duration::from_secs(5) {
            fill(&mut reservations, &mut left, &mut next, &mut now);
        }
        assert!(stocks(&reservations).iter().all(|len| *len >= 8), "{:?}", stocks(&reservations));
    }

    /// Of each group as much as there is, whichever was filled first.
    #[test]
    fn groups_share_what_the_daemon_gives() {
        for (groups, mut left, each) in [(3, 64, 20), (3, 16, 4), (6, 128, 19), (2, 64, 31)] {
            let (mut now, mut next) = (Instant::now(), 0);
            let mut reservations = Reservations::new(64, now);
            reservations.set_groups(0..groups);
            fill(&mut reservations, &mut left, &mut next, &mut now);
            assert!(stocks(&reservations).iter().all(|len| *len >= each), "{:?}", stocks(&reservations));
            // What was filled is stored and gone; the others are as full as they were.
            reservations.take(groups - 1, 64, 0, 1, now);
            reservations.lost(None);
            fill(&mut reservations, &mut left, &mut next, &mut now);
            let (lens, total) = (stocks(&reservations), stocks(&reservations).iter().sum::<usize>());
            assert!(lens.iter().all(|len| len + 2 >= total / groups as usize), "{lens:?}");
        }
    }

    /// A daemon and an engine. A call takes 100 us, and the engine takes the slots of one group so long after another.
    struct Model {
        needs: Vec<usize>,
        /// Bytes of a slot of each group.
        sizes: Vec<usize>,
        /// Slots that the daemon has of a group at most.
        most: Vec<usize>,
        share: usize,
        step: Duration,
        between_takes: Duration,
        /// Steps that a request holds its slots.
        held_steps: usize,
        /// As a connector, which stores nothing behind a gap.
        stops_at_gap: bool,
        /// Further requests in each step, of one slot of each group.
        decodes: usize,
        /// Every so many steps the first request wants what it needs, else none.
        every: usize,
        /// From step 120 on.
        then: Option<Vec<usize>>,
        jitter: bool,
    }

    /// Of 200 steps.
    #[derive(Debug, Default)]
    struct Served {
        /// All their requests found all their slots.
        whole: usize,
        /// All slots were there when their first one was taken, and some were lost before the last one.
        lost: usize,
        slots: Vec<usize>,
        calls: usize,
    }

    impl Model {
        fn new(needs: &[usize], step_ms: u64, held_steps: usize) -> Model {
            let groups = needs.len();
            let (step, between_takes) = (Duration::from_millis(step_ms), Duration::ZERO);
            let (sizes, most) = (vec![1; groups], vec![usize::MAX; groups]);
            Model {
                needs: needs.to_vec(),
                sizes,
                most,
                share: 32,
                step,
                between_takes,
                held_steps,
                stops_at_gap: false,
                decodes: 0,
                every: 1,
                then: None,
                jitter: false,
            }
        }

        fn run(&self) -> Served {
            let (mut now, mut next) = (Instant::now(), 0);
            let mut reservations = Reservations::new(64, now);
            reservations.set_groups(0..self.needs.len() as u32);
            let mut owners: HashMap<Held, usize> = HashMap::new();
            let mut random = 7u64;
            let mut served = Served { slots: vec![0; self.needs.len()], ..Served::default() };
            let mut in_hand: VecDeque<Vec<Held>> = VecDeque::from(vec![Vec::new(); self.held_steps]);
            for step in 0..220 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let factor = if self.jitter { 0.5 + ((random >> 33) % 1000) as f64 / 1000.0 } else { 1.0 };
                let needs = self.then.as_ref().filter(|_| step >= 120).unwrap_or(&self.needs);
                let (counts, end) = (step >= 20, now + self.step.mul_f64(factor));
                self.answer(&mut reservations, &mut owners, &mut next, &mut now, end, &mut served.calls);
                reservations.used(now);
                let first = (step % self.every == 0).then_some(needs);
                let ones = vec![1; needs.len()];
                let requests: Vec<&Vec<usize>> = first.into_iter().chain(vec![&ones; self.decodes]).collect();
                let wanted = |group: usize| requests.iter().map(|needs| needs[group]).sum::<usize>();
                let had_all = stocks(&reservations).iter().enumerate().all(|(group, free)| *free >= wanted(group));
                let (mut slots, mut is_whole) = (Vec::new(), true);
                for needs in requests {
                    let mut is_stopped = false;
                    for (group, need) in needs.iter().enumerate().filter(|(_, need)| **need > 0) {
                        if is_stopped {
                            break;
                        }
                        let taken = reservations.take(group as u32, *need, 0, 1, now);
                        served.slots[group] += if counts { taken.len() } else { 0 };
                        is_whole &= taken.len() == *need;
                        is_stopped = self.stops_at_gap && taken.len() < *need;
                        slots.extend(taken);
                        let until = now + self.between_takes;
                        self.answer(&mut reservations, &mut owners, &mut next, &mut now, until, &mut served.calls);
                    }
                }
                served.whole += usize::from(counts && is_whole);
                served.lost += usize::from(counts && had_all && !is_whole);
                in_hand.push_back(slots);
                for slot in in_hand.pop_front().expect("a request a step") {
                    reservations.give_back(slot, now);
                    owners.remove(&slot);
                    reservations.freed();
                }
            }
            served
        }

        fn answer(
            &self,
            reservations: &mut Reservations,
            owners: &mut HashMap<Held, usize>,
            next: &mut u32,
            now: &mut Instant,
            end: Instant,
            calls: &mut usize,
        ) {
            while *now < end {
                let (refill, surplus) = reservations.refill(*now, false);
                owners.retain(|slot, _| !surplus.contains(slot));
                match refill {
                    Refill::Reserve { group, count } => {
                        let group = group as usize;
                        let used: usize = owners.values().map(|owner| self.sizes[*owner]).sum();
                        let own = owners.values().filter(|owner| **owner == group).count();
                        let fits = (self.share - used.min(self.share)) / self.sizes[group];
                        let given = count.min(fits.max(usize::from(own == 0))).min(self.most[group] - own);
                        let slots = held(*next..*next + given as u32);
                        *next += given as u32;
                        owners.extend(slots.iter().map(|slot| (*slot, group)));
                        *now += Duration::from_micros(100);
                        *calls += 1;
                        for slot in reservations.stocked(group as u32, slots, count, *now) {
                            owners.remove(&slot);
                        }
                    }
                    Refill::Wait(until) => *now = until.map_or(end, |until| until.min(end)),
                }
            }
            *now = (*now).max(end);
        }
    }

    /// What is held for a step while the next request takes its slots has to fit twice, and then some.
    #[test]
    fn requests_that_fit_find_their_slots_of_each_group() {
        let even = [(6, 1, 2, 32), (6, 1, 4, 32), (10, 1, 2, 32), (3, 2, 3, 32), (6, 4, 1, 50), (3, 8, 1, 52)];
        let even = even.map(|(groups, each, held_steps, share)| (vec![each; groups], held_steps, share));
        let uneven = [(vec![10, 1, 1, 1], 1, 30), (vec![20, 1, 1], 1, 48), (vec![0, 1, 8], 1, 24), (vec![1, 9], 2, 32)];
        for (needs, held_steps, share) in even.into_iter().chain(uneven) {
            for (step, jitter) in [(4, false), (4, true), (20, true), (100, false)] {
                for stops_at_gap in [false, true] {
                    let model = Model { share, jitter, stops_at_gap, ..Model::new(&needs, step, held_steps) };
                    let served = model.run();
                    let what = format!("{needs:?} of {share}, {held_steps} steps of {step} ms: {served:?}");
                    assert!(served.whole >= 190 && served.lost == 0, "{what}");
                }
            }
        }
    }

    #[test]
    fn requests_that_want_other_groups_find_their_slots_soon() {
        let cases = [([1, 10], [10, 1], 32), ([10, 0], [0, 10], 32), ([0, 10], [10, 10], 44), ([16, 0], [8, 8], 36)];
        for (needs, then, share) in cases {
            for step in [4, 20, 100] {
                let model = Model { share, then: Some(then.to_vec()), ..Model::new(&needs, step, 1) };
                let served = model.run();
                assert!(served.whole >= 160, "{needs:?}, then {then:?} of {share}, {step} ms: {served:?}");
            }
        }
    }

    /// A long prompt wants many slots of one group, once in a while or in each step, beside requests that want one of
    /// each.
    #[test]
    fn a_long_prompt_leaves_short_requests_their_slots() {
        for (needs, every, share) in [([32, 1], 75, 80), ([32, 1], 75, 128), ([1, 32], 75, 128), ([10, 1], 1, 80)] {
            for stops_at_gap in [false, true] {
                let rest = Model::new(&needs, 20, 1);
                let served = Model { share, every, stops_at_gap, decodes: 8, ..rest }.run();
                assert!(served.whole >= 190, "{needs:?} each {every} steps, {share} slots: {served:?}");
            }
        }
    }

    #[test]
    fn a_group_with_few_slots_leaves_the_others_what_they_need() {
        for most in [0, 1, 2, 4] {
            for step in [4, 10, 20, 30, 100] {
                let model = Model { most: vec![most, usize::MAX], share: 10_000, ..Model::new(&[1, 10], step, 1) };
                let served = model.run();
                // Each request in flight has its own slot of the first group, where there are two.
                let whole = [0, 100, 200][most.min(2)];
                assert!(served.whole >= whole && served.slots[1] >= 1500, "{most}, {step} ms: {served:?}");
            }
        }
        let model = Model { sizes: vec![64, 1], share: 100, ..Model::new(&[1, 10], 10, 1) };
        assert_eq!(model.run().whole, 100, "one slot of the first group takes most of the share");
    }

    /// There is no slot of that size, whatever the others give back.
    #[test]
    fn a_group_that_gets_nothing_leaves_the_others_some() {
        let mut now = Instant::now();
        let mut reservations = Reservations::new(64, now);
        reservations.set_groups([0, 1]);
        let mut lens = HashSet::new();
        for step in 0..200 {
            match reservations.refill(now, false).0 {
                Refill::Reserve { group: 0, count } => drop(reservations.stocked(0, Vec::new(), count, now)),
                Refill::Reserve { group, count } => {
                    let first = step * 100;
                    reservations.stocked(group, held(first..first + count as u32), count, now);
                }
                Refill::Wait(until) => now = until.expect("the daemon is asked again"),
            }
            reservations.used(now);
            lens.extend((step >= 100).then(|| stocks(&reservations)[1]));
        }
        // Each two seconds they try whether that group gets some if they give half of theirs back.
        assert!(lens.iter().min() >= Some(&(AHEAD / 2)) && lens.iter().max() == Some(&AHEAD), "{lens:?}");
    }

    /// However long it had a slot in its hands before, and whenever that was looked at.
    #[test]
    fn an_engine_that_gave_a_slot_back_is_not_idle() {
        let now = Instant::now();
        let mut reservations = with_stock(0..8, now);
        let slot = reservations.take(0, 1, 0, 1, now)[0];
        let later = now + IDLE - Duration::from_millis(1);
        assert_eq!(reservations.give_back(slot, later), Returned::Taken(1));
        assert_eq!(reservations.refill(later + IDLE / 2, false).1, []);
        assert_eq!(reservations.refill(later + IDLE, false).1, held(1..4));
    }

    #[test]
    fn a_slot_of_a_lost_pool_is_not_handed_out_until_the_engine_is_done_with_it() {
        let now = Instant::now();
        let mut reservations = with_stock(0..2, now);
        let old = reservations.take(0, 2, 0, 1, now);
        reservations.disconnected();
        reservations.lost(None);
        assert_eq!(reservations.stocked(0, held(1..3), 2, now), held(1..2), "slot 1 is still in the engine's hands");
        assert_eq!(reservations.take(0, 9, 0, 1, now), held(2..3));
        assert_eq!(reservations.give_back(old[1], now), Returned::Unknown);
        assert_eq!(reservations.stocked(0, held(1..2), 1, now), []);
    }

    #[test]
    fn slots_in_the_engine_s_hands_are_limited() {
        let now = Instant::now();
        let mut reservations = with_stock(0..RESERVED_BLOCKS as u32 + 10, now);
        assert_eq!(reservations.take(0, RESERVED_BLOCKS, 6, 1, now).len(), RESERVED_BLOCKS - 6);
        assert_eq!(reservations.take(0, 10, 6, 1, now).len(), 0);
    }

    #[test]
    fn the_stock_of_groups_that_are_left_comes_back() {
        let now = Instant::now();
        let mut reservations = with_stock(0..3, now);
        assert_eq!(reservations.set_groups([1]), held(0..3));
        assert_eq!(reservations.take(0, 3, 0, 1, now), []);
    }
}
