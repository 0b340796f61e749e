//! Prefetch: promotions for requests that wait in an engine's queue, before their lookup.
//!
//! `Core::step` → the next key of each protected request → a probe of shared tiers if needed → a slot, for which no
//! protected block is evicted → `Effect::Promote`, as in `promote`. If a lookup finds such a load under way, it takes
//! the load over: then a request waits for it.
//!
//! Invariants: lookups come first. Prefetches take at most half of a tier's load slots, and none starts while that many
//! loads of lookups are under way. Their bytes do not count towards `promise_share`, but none starts while that share
//! is used up. If a prefetch fails, the block is not marked as failed. Keys are prefetched in prefix order, up to the
//! first that no tier has, and each key at most once. Of a windowed group, only the last blocks of the prefix are
//! prefetched, if the length of the window is known.

use crate::core::Core;
use crate::hints::HintedKey;
use crate::key::{BlockId, TierId};
use crate::layout::Attention;
use crate::miss::MissReason;
use crate::slots::{PREFETCH, State};
use crate::tiers::LoadHealth;

/// Keys looked at in one step, at about 0.3 us each.
const KEYS: usize = 128;
/// Keys of a windowed group that are looked through for the end of its prefix, at about 0.1 us each.
const NARROWED_KEYS: usize = 512;
/// Loads started in one step, at about 2 us each, and evictions for them.
const STARTS: usize = 24;
/// Thousandths of the pool, from the head of the queue, that are prefetched. The engine takes long to get through so
/// much; with more, blocks that no tier has go for others sooner (bench/reports/2026-11-22-ahead.md).
const REACH_PERMILLE: u32 = 125;
/// Thousandths of the pool that prefetches under way may fill.
const LOADING_PERMILLE: u32 = 62;
/// While so many probes of shared tiers are unanswered, prefetch probes no more keys.
const MAX_PENDING: usize = 64;

/// How much one step may still do.
struct Budget {
    keys: usize,
    starts: usize,
    evictions: usize,
}

/// What became of one key.
enum Prefetch {
    /// It is in the pool, or on its way there.
    Up,
    /// No tier has it, or none that may be asked for it.
    Nowhere,
    /// A shared tier has not answered yet; it may have been asked just now.
    Asked { is_new: bool },
    /// Its tier or its size class takes no more now, or its last load failed. Other keys may be prefetched.
    Blocked,
    /// Enough is on its way up.
    Enough,
}

impl Core {
    /// Brings up more of what waiting requests want. True if there is more to do now.
    pub(crate) fn step_prefetch(&mut self) -> bool {
        if !self.tiers.is_on() || !self.has_prefetches() {
            return false;
        }
        let mut left = Budget { keys: KEYS, starts: STARTS, evictions: 2 * STARTS };
        let mut has_moved = false;
        let mut reach_bytes = self.slots.share(REACH_PERMILLE);
        for at in 0..self.hints.len() {
            if let Some((keys, window, prefix_tokens)) = self.hints.to_narrow(at) {
                if left.is_spent() {
                    return has_moved;
                }
                let needed = self.narrow(keys, window, prefix_tokens, NARROWED_KEYS);
                left.keys = left.keys.saturating_sub(needed.len().max(1));
                self.hints.narrow(at, needed);
                has_moved = true;
            }
            while let Some(wanted) = self.hints.next_to_prefetch(at, reach_bytes) {
                if left.is_spent() {
                    return has_moved;
                }
                left.keys -= 1;
                match self.prefetch(&wanted, &mut left) {
                    Prefetch::Up => self.hints.prefetched(at),
                    // A window's blocks are of use without those before them.
                    Prefetch::Nowhere if self.is_windowed(&wanted) => self.hints.prefetched(at),
                    Prefetch::Nowhere => self.hints.end_prefix(at),
                    Prefetch::Asked { is_new } => {
                        self.probe_further(at, is_new, &mut left);
                        break;
                    }
                    Prefetch::Blocked => break,
                    Prefetch::Enough => return false,
                }
                has_moved = true;
            }
            reach_bytes = reach_bytes.saturating_sub(self.hints.reachable_bytes(at));
        }
        false
    }

    /// Whether [`Core::step`] may have something to bring up once loads and questions under way have ended.
    pub fn has_prefetches(&self) -> bool {
        self.hints.has_prefetches()
    }

    /// Whether the block is on its way up and nobody asked for it yet.
    pub fn is_prefetch(&self, block: BlockId) -> bool {
        let record = &self.slots[block];
        record.state == State::Promoting && record.owner & PREFETCH != 0
    }

    /// A lookup asks for a block that was prefetched, or is being prefetched.
    pub(crate) fn use_prefetch(&mut self, block: BlockId) {
        let tier = self.filler(block);
        self.tiers.stats_mut(tier).prefetch_hits += 1;
        self.end_prefetch(block);
        self.slots.unmark_prefetch(block);
    }

    /// It is no prefetch under way any more.
    pub(crate) fn end_prefetch(&mut self, block: BlockId) {
        if self.is_prefetch(block) {
            let (tier, bytes) = (self.filler(block), self.slots.slot_bytes(block));
            self.tiers.end_prefetch(tier, bytes);
        }
    }

    /// The tier that fills, or filled, the block's slot.
    pub(crate) fn filler(&self, block: BlockId) -> TierId {
        self.slots[block].filler()
    }

    fn prefetch(&mut self, wanted: &HintedKey, left: &mut Budget) -> Prefetch {
        let HintedKey { namespace, group, hash } = *wanted;
        if self.cache.find(&self.slots, namespace, group, &hash).is_some() {
            return Prefetch::Up;
        }
        let known = self.cache.namespace(namespace);
        let (id, class) = (known.id, known.class(group));
        let Some(class) = class.filter(|_| !self.is_purging_tiers(id)) else { return Prefetch::Nowhere };
        let key = self.tiers.key(id, group, hash.as_bytes());
        let Some((tier, health)) = self.tiers.source(key) else {
            return match self.probe_next(wanted) {
                // The tier that has it may become well.
                Prefetch::Nowhere if self.tiers.location(key).is_some() => Prefetch::Blocked,
                probed => probed,
            };
        };
        let bytes = self.slots.space().class_info(class).slot_bytes;
        let is_busy = self.tiers.is_busy(tier);
        if health != LoadHealth::Good || !self.tiers.is_open(tier) || is_busy {
            return Prefetch::Blocked;
        }
        if self.is_prefetching_enough(bytes) {
            return Prefetch::Enough;
        }
        if !self.free_slot_to_prefetch(class, &mut left.evictions) {
            return Prefetch::Blocked;
        }
        left.starts -= 1;
        let block = self.start_promotion(tier, class, namespace, group, hash);
        self.slots.mark_prefetch(block);
        self.tiers.begin_prefetch(tier, bytes);
        Prefetch::Up
    }

    /// One block at least may always be prefetched, or in a small pool none would be.
    fn is_prefetching_enough(&self, bytes: u64) -> bool {
        let is_over = |taken: u64, permille| taken > 0 && taken + bytes > self.slots.share(permille);
        is_over(self.tiers.prefetch_bytes(), LOADING_PERMILLE)
            || is_over(self.slots.pinned_bytes(), self.config.promise_permille)
    }

    fn probe_next(&mut self, wanted: &HintedKey) -> Prefetch {
        if self.tiers.presence().is_half_full() {
            return Prefetch::Blocked;
        }
        let most = MAX_PENDING.saturating_sub(self.tiers.presence().pending());
        let mut probes = most;
        match self.probe(wanted.namespace, wanted.group, wanted.hash.as_bytes(), &mut probes) {
            Some(MissReason::PromotionUnfinished) => Prefetch::Asked { is_new: probes < most },
            _ => Prefetch::Nowhere,
        }
    }

    /// While the request's next key is probed, some keys after it are probed too. If the probe of the next key is new,
    /// earlier answers for the keys after it have expired as well.
    fn probe_further(&mut self, at: usize, is_new: bool, left: &mut Budget) {
        if is_new {
            self.hints.probe_anew(at);
        }
        while left.keys > 0
            && self.tiers.presence().pending() < MAX_PENDING
            && let Some(wanted) = self.hints.next_to_probe(at)
        {
            left.keys -= 1;
            let HintedKey { namespace, group, hash } = wanted;
            let key = self.tiers.key(self.cache.namespace(namespace).id, group, hash.as_bytes());
            if self.cache.find(&self.slots, namespace, group, &hash).is_none() && self.tiers.source(key).is_none() {
                self.probe_next(&wanted);
            }
        }
    }

    fn is_windowed(&self, wanted: &HintedKey) -> bool {
        let layout = self.cache.namespace(wanted.namespace).layout.group(wanted.group);
        layout.is_some_and(|layout| layout.attention == Attention::Windowed)
    }
}

impl Budget {
    fn is_spent(&self) -> bool {
        self.keys == 0 || self.starts == 0 || self.evictions == 0
    }
}
