//! Which blocks of a windowed group are worth bringing up.
//!
//! Layers with a sliding window need the last few blocks of a prefix only, and a recurrent state is one block. So of a
//! windowed group whose engine has told the length of its window, a lookup or a prefetch takes the last run of so many
//! blocks that can be had, before the end of the prefix that the groups of full attention have.
//!
//! Invariant: nothing here changes what is in the pool. A key may turn out to be absent: then the engine asks for those
//! before it, in a lookup that asks for no group of full attention.

use std::ops::Range;

use crate::core::Core;
use crate::key::{BlockHash, BlockId, Fingerprint, NamespaceIndex, PackedKeys};
use crate::slots::TOUCHED_TOGETHER;
use crate::tiers::{LoadHealth, Presence};

impl Core {
    /// Keys that [`Core::narrow`] looks through: about 0.1 µs each.
    pub const MAX_NARROWED_KEYS: usize = 1024;

    /// Of the keys of a windowed group: those from the last run of `window` blocks that can be had, to the end of a
    /// prefix of `prefix_tokens`. If the last `most` keys before that end have no such run, these. All, if the window
    /// is longer than that.
    pub fn narrow(&self, keys: PackedKeys, window: usize, prefix_tokens: u64, most: usize) -> Range<usize> {
        match self.end_of(keys, prefix_tokens) {
            Some(_) if window > most => 0..keys.count(),
            Some(end) => self.last_window(keys, window, prefix_tokens, most).unwrap_or(end.saturating_sub(most)..end),
            None => 0..keys.count(),
        }
    }

    /// The same, if there is such a run.
    pub fn last_window(
        &self,
        keys: PackedKeys,
        window: usize,
        prefix_tokens: u64,
        most: usize,
    ) -> Option<Range<usize>> {
        let end = self.end_of(keys, prefix_tokens).filter(|_| window <= most)?;
        let first = end.saturating_sub(most);
        let (mut at, mut run) = (end, 0);
        while at > first {
            let batch = at.saturating_sub(TOUCHED_TOGETHER).max(first)..at;
            let can_be_had = self.can_be_had(keys, batch.clone());
            for key in batch.clone().rev() {
                run = if can_be_had[key - batch.start] { run + 1 } else { 0 };
                if run == window {
                    return Some(key..end);
                }
            }
            at = batch.start;
        }
        None
    }

    /// Asks shared tiers for those of some keys that are nowhere nearer, so that it is known whether they have them
    /// when they are looked at. About 0.4 µs each.
    pub fn ask_ahead(&mut self, keys: PackedKeys, some: Range<usize>) {
        let PackedKeys { namespace, group, .. } = keys;
        if !self.uses_tiers(namespace) {
            return;
        }
        let (id, mut probes) = (self.cache.namespace(namespace).id, some.len());
        for hash in some.map(|at| keys.hash(at)) {
            let found = BlockHash::new(hash).map(|hash| self.cache.find(&self.slots, namespace, group, &hash));
            let is_here = matches!(found, Ok(Some(_)));
            if !is_here && self.tiers.source(self.tiers.key(id, group, hash)).is_none() {
                self.probe(namespace, group, hash, &mut probes);
            }
        }
    }

    /// How many keys lie before the end of that prefix; none without such a group.
    fn end_of(&self, keys: PackedKeys, prefix_tokens: u64) -> Option<usize> {
        let layout = self.cache.namespace(keys.namespace).layout.group(keys.group)?;
        let tokens = u64::from(layout.tokens_per_block).max(1);
        Some(prefix_tokens.div_ceil(tokens).min(keys.count() as u64) as usize)
    }

    /// Whether each of a few keys has its block in the pool, or on a tier, or perhaps on a shared one.
    fn can_be_had(&self, keys: PackedKeys, some: Range<usize>) -> [bool; TOUCHED_TOGETHER] {
        let PackedKeys { namespace, group, .. } = keys;
        let mut names = [Fingerprint(0); TOUCHED_TOGETHER];
        for (name, at) in names.iter_mut().zip(some.clone()) {
            *name = self.cache.fingerprint(namespace, group, keys.hash(at));
        }
        let candidates = self.cache.candidates(&names);
        self.slots.touch_lines(&candidates[..some.len()]);
        let uses_tiers = self.uses_tiers(namespace);
        if uses_tiers {
            let absent = some.clone().filter(|at| candidates[at - some.start] == BlockId::NONE);
            self.prepare_promotions(namespace, group, absent.map(|at| keys.hash(at)));
        }
        let mut can_be_had = [false; TOUCHED_TOGETHER];
        for (place, at) in some.enumerate() {
            let is_here = candidates[place] != BlockId::NONE
                && BlockHash::new(keys.hash(at))
                    .is_ok_and(|hash| self.cache.find(&self.slots, namespace, group, &hash).is_some());
            can_be_had[place] = is_here || uses_tiers && self.may_come(namespace, group, keys.hash(at));
        }
        can_be_had
    }

    fn may_come(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> bool {
        let id = self.cache.namespace(namespace).id;
        if self.is_purging_tiers(id) {
            return false;
        }
        let key = self.tiers.key(id, group, hash);
        match self.tiers.source(key) {
            Some((tier, health)) => self.tiers.is_open(tier) && health == LoadHealth::Good,
            // Nobody was asked yet, or has answered.
            None => {
                let known = self.tiers.presence().get(key);
                self.tiers.is_any_shared() && known.is_none_or(|known| matches!(known, Presence::Pending(..)))
            }
        }
    }
}
