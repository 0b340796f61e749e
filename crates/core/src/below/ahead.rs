//! From a tier up into the pool before anybody asks: what requests that wait in an engine's queue will look up.
//!
//! `Core::step` → the next key of each honoured request → asked for if need be (`seek`) → slot for which nothing wanted is
//! evicted → `Effect::Load`, as in `promote`. A lookup that meets such a load takes it over: now somebody waits for it.
//!
//! Invariants: lookups come first. What comes up ahead takes at most half of a tier's load slots, and none beside so
//! many loads of lookups; it is left out of the share of promises, but starts only within it; a failure of it is held
//! against no block. Keys are looked at in prefix order, as far as the first that is nowhere, and none again once its
//! load began.

use super::{Standing, Tier, TierId, residence};
use crate::block::{AHEAD, BlockId, State};
use crate::core::Core;
use crate::expect::Wanted;
use crate::layout::Attention;

/// Keys looked at in one step, at about 0.3 us each.
const KEYS: usize = 128;
/// Loads started in one step, at about 2 us each, and evictions for them.
const STARTS: usize = 24;
/// With so many loads under way nothing more is started ahead. They keep a disk busy, and of blocks of 1 MiB they are 10 ms
/// of its time: as long as a lookup's load may stand behind them.
const LOADS: usize = 32;
/// Thousandths of the pool, from the head of the queue, that come up. The engine takes long to get through so much; with
/// more, blocks that no tier has go for others sooner (bench/reports/2026-11-22-ahead.md).
const REACH_PERMILLE: u32 = 125;
/// Thousandths of the pool that may be on its way up ahead.
const LOADING_PERMILLE: u32 = 62;
/// With so many keys that a shared tier has not answered for yet, no more are asked for ahead.
const UNANSWERED: usize = 64;

/// How much one step may still do.
struct Budget {
    keys: usize,
    starts: usize,
    evictions: usize,
}

/// What became of one key.
enum Raised {
    /// It is in the pool, or on its way there.
    Up,
    /// No tier has it, or none that may be asked for it.
    Nowhere,
    /// A shared tier has not answered yet; it may have been asked just now.
    Asked { is_new: bool },
    /// Its tier or its class of slots takes no more now, or it failed lately. Other keys may come up.
    Blocked,
    /// Enough is on its way up.
    Enough,
}

impl Core {
    /// Brings up more of what waiting requests want. True if there is more to do now.
    pub(crate) fn step_ahead(&mut self) -> bool {
        if !self.below.is_on() || !self.is_expecting_below() {
            return false;
        }
        let mut left = Budget { keys: KEYS, starts: STARTS, evictions: 2 * STARTS };
        let mut has_moved = false;
        let mut reach_bytes = self.share(REACH_PERMILLE);
        for at in 0..self.expectations.len() {
            while let Some(wanted) = self.expectations.next_unraised(at, reach_bytes) {
                if left.is_spent() {
                    return has_moved;
                }
                left.keys -= 1;
                match self.raise(&wanted, &mut left) {
                    Raised::Up => self.expectations.raised(at),
                    // A window's blocks are of use without those before them.
                    Raised::Nowhere if self.is_windowed(&wanted) => self.expectations.raised(at),
                    Raised::Nowhere => self.expectations.end_prefix(at),
                    Raised::Asked { is_new } => {
                        self.ask_further(at, is_new, &mut left);
                        break;
                    }
                    Raised::Blocked => break,
                    Raised::Enough => return false,
                }
                has_moved = true;
            }
            reach_bytes = reach_bytes.saturating_sub(self.expectations.reachable_bytes(at));
        }
        false
    }

    /// Whether [`Core::step`] may have something to bring up once loads and questions under way have ended.
    pub fn is_expecting_below(&self) -> bool {
        self.expectations.has_unraised()
    }

    /// Whether the block is on its way up and nobody asked for it yet.
    pub fn is_ahead(&self, block: BlockId) -> bool {
        let record = &self.blocks[block];
        record.state == State::Promoting && record.owner & AHEAD != 0
    }

    /// A lookup asks for a block that came up ahead, or is on its way.
    pub(crate) fn use_ahead(&mut self, block: BlockId) {
        let tier = self.filler(block);
        self.tier_mut(tier).stats.ahead_used += 1;
        self.end_ahead(block);
        self.blocks[block].owner &= !AHEAD;
        if self.is_indexed(block) {
            let class = self.blocks[block].class;
            self.policies[class.0 as usize].begin_use(&mut self.nodes, block);
        }
    }

    /// It is among what is on its way up ahead no more.
    pub(super) fn end_ahead(&mut self, block: BlockId) {
        if self.is_ahead(block) {
            let (tier, bytes) = (self.filler(block), self.slot_bytes(block));
            self.tier_mut(tier).ahead.take(bytes);
            self.below.ahead_bytes -= bytes;
        }
    }

    /// The tier that fills, or filled, the block's slot.
    pub(super) fn filler(&self, block: BlockId) -> TierId {
        TierId(self.blocks[block].owner & !AHEAD)
    }

    fn raise(&mut self, wanted: &Wanted, left: &mut Budget) -> Raised {
        let Wanted { namespace, group, hash } = *wanted;
        if self.find(namespace, group, &hash).is_some() {
            return Raised::Up;
        }
        let known = self.names.get(namespace);
        let (id, class) = (known.id, known.class(group));
        let Some(class) = class.filter(|_| !self.is_purging_below(id)) else { return Raised::Nowhere };
        let key = residence::key(self.config.seed, id, group, hash.as_bytes());
        let Some((place, standing)) = self.below.place(key) else { return self.ask(wanted) };
        let bytes = self.space.class_info(class).slot_bytes;
        let is_busy = self.below.tiers[place.tier.0 as usize].is_busy();
        if standing != Standing::Good || !self.is_open(place.tier) || is_busy {
            return Raised::Blocked;
        }
        if self.is_enough_ahead(bytes) {
            return Raised::Enough;
        }
        if !self.make_room_ahead(class, &mut left.evictions) {
            return Raised::Blocked;
        }
        left.starts -= 1;
        let block = self.load(place.tier, class, namespace, group, hash);
        self.blocks[block].owner |= AHEAD;
        self.below.ahead_bytes += bytes;
        let tier = self.tier_mut(place.tier);
        tier.ahead.add(bytes);
        tier.stats.ahead += 1;
        Raised::Up
    }

    /// One block at least may always come up, or in a small pool none would.
    fn is_enough_ahead(&self, bytes: u64) -> bool {
        let is_over = |taken: u64, permille| taken > 0 && taken + bytes > self.share(permille);
        is_over(self.below.ahead_bytes, LOADING_PERMILLE) || is_over(self.pinned_bytes, self.config.promise_permille)
    }

    fn ask(&mut self, wanted: &Wanted) -> Raised {
        if self.below.sought.is_half_full() {
            return Raised::Blocked;
        }
        let most = UNANSWERED.saturating_sub(self.below.sought.unanswered());
        let mut finds = most;
        match self.seek(wanted.namespace, wanted.group, wanted.hash.as_bytes(), &mut finds) {
            Some(_) => Raised::Asked { is_new: finds < most },
            None => Raised::Nowhere,
        }
    }

    /// While the request's next key is being asked for, some behind it are, too. A new question means that what was
    /// known of those behind it is forgotten as well.
    fn ask_further(&mut self, at: usize, is_new: bool, left: &mut Budget) {
        if is_new {
            self.expectations.ask_anew(at);
        }
        while left.keys > 0
            && self.below.sought.unanswered() < UNANSWERED
            && let Some(wanted) = self.expectations.next_unasked(at)
        {
            left.keys -= 1;
            let Wanted { namespace, group, hash } = wanted;
            let key = residence::key(self.config.seed, self.names.get(namespace).id, group, hash.as_bytes());
            if self.find(namespace, group, &hash).is_none() && self.below.place(key).is_none() {
                self.ask(&wanted);
            }
        }
    }

    fn is_windowed(&self, wanted: &Wanted) -> bool {
        let layout = self.names.get(wanted.namespace).layout.group(wanted.group);
        layout.is_some_and(|layout| layout.attention == Attention::Windowed)
    }
}

impl Budget {
    fn is_spent(&self) -> bool {
        self.keys == 0 || self.starts == 0 || self.evictions == 0
    }
}

impl Tier {
    /// Whether so much is being loaded that what nobody waits for had better not stand in between.
    fn is_busy(&self) -> bool {
        self.loading.blocks as usize >= LOADS.min((self.limits.load_blocks / 2).max(1))
    }
}
