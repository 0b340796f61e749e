//! Purge of a namespace: lookups miss at once, and slots are freed in pieces.
//!
//! The namespace's id gets a new, empty short name, so no lookup can hit an old block. The blocks of the old short name
//! are then dropped a few at a time; held blocks are freed when they are released. The tiers' drivers remove the
//! namespace's blocks from the tiers.
//!
//! A trial that ends is dropped in the same pieces. No tier has blocks of it, and no id means it any more. At last the
//! memory of its sizes goes back, if no other namespace has them.

use crate::cache::Fate;
use crate::core::Core;
use crate::journal::Effect;
use crate::key::{BlockId, ClassId, NamespaceId, NamespaceIndex};
use crate::slots::{Block, State};

/// What a purge took away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Purged {
    /// Blocks in the index.
    pub blocks: u64,
    /// Bytes of their slots.
    pub bytes: u64,
}

/// Records examined in one step, and how many of them may be dropped: a drop costs several cache misses.
const RECORDS_PER_STEP: u32 = 4096;
const DROPS_PER_STEP: u32 = 512;

impl Core {
    /// Empties a namespace. Returns what it contained and its short names (old, new); clients that use the old one must
    /// be told. `None` if the id is unknown.
    pub fn purge(&mut self, id: NamespaceId) -> Option<(Purged, NamespaceIndex, NamespaceIndex)> {
        let (old, new) = self.cache.begin_purge(id)?;
        let groups = &self.cache.namespace(old).groups;
        let blocks = groups.iter().map(|group| group.blocks).sum();
        let bytes =
            groups.iter().map(|group| group.blocks * self.slots.space().class_info(group.class).slot_bytes).sum();
        if !self.is_trial(old) {
            self.purge_tiers(id, old);
            self.journal.stats_mut().purged += blocks;
        }
        Some((Purged { blocks, bytes }, old, new))
    }

    /// Removes a trial with all its blocks; see [`Core::open_trial`]. Panics if the namespace is none.
    pub fn end_trial(&mut self, trial: NamespaceIndex) {
        assert!(self.is_trial(trial), "{trial:?} is no trial: its blocks stay");
        self.cache.end_trial(self.namespace_id(trial));
    }

    pub(crate) fn step_purge(&mut self) {
        let Some((namespace, cursor)) = self.cache.names().next_purge() else { return };
        let (mut at, mut dropped) = (cursor, 0);
        let end = (cursor + RECORDS_PER_STEP).min(self.slots.end());
        while at < end && dropped < DROPS_PER_STEP {
            let block = BlockId(at);
            let Block { namespace: its, state, .. } = self.slots[block];
            if its == namespace && self.slots.is_indexed(block) {
                self.forget(block, Fate::Evicted);
                dropped += 1;
            } else if its == namespace && state == State::Promoting {
                self.abandon(block);
                dropped += 1;
            }
            at += 1;
        }
        if at < self.slots.end() {
            return self.cache.advance_purge(Some(at));
        }
        let is_trial = self.is_trial(namespace);
        let of_trial = self.cache.namespace(namespace).groups.iter().filter(|_| is_trial);
        let classes: Vec<ClassId> = of_trial.map(|group| group.class).collect();
        self.cache.advance_purge(None);
        if !self.cache.names().is_purging(self.namespace_id(namespace)) {
            self.journal.push(Effect::PoolPurged { namespace });
        }
        for class in classes {
            if !self.cache.names().is_used(class) {
                self.slots.free_empty_extents(class, &mut self.journal);
            }
        }
    }
}
