//! Purge of a namespace: lookups miss at once, and slots are freed in pieces.
//!
//! The namespace's id gets a new, empty short name, so no lookup can hit an old block. The blocks of the old short name
//! are then dropped a few at a time; held blocks are freed when they are released. The tiers' drivers remove the
//! namespace's blocks from the tiers.

use crate::cache::Fate;
use crate::core::Core;
use crate::key::{BlockId, NamespaceId, NamespaceIndex};
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
        self.purge_tiers(id, old);
        self.journal.stats_mut().purged += blocks;
        Some((Purged { blocks, bytes }, old, new))
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
        self.cache.advance_purge((at < self.slots.end()).then_some(at));
    }
}
