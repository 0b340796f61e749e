//! Purging a namespace: gone for lookups at once, freed piece by piece.
//!
//! The namespace's id gets a new, empty short name, so nothing old can be hit; the old one's blocks are then
//! dropped a few at a time. Held ones go when they are released. Tiers below are emptied of it by their drivers.

use crate::block::{Block, BlockId, NamespaceIndex, State};
use crate::core::Core;
use crate::key::NamespaceId;
use crate::miss::Fate;

pub(crate) struct Purge {
    namespace: NamespaceIndex,
    cursor: u32,
}

/// What a purge took away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Purged {
    pub blocks: u64,
    pub bytes: u64,
}

/// Records looked at in one step, and how many of them may be dropped: the latter costs several cache misses.
const RECORDS_PER_STEP: u32 = 4096;
const DROPS_PER_STEP: u32 = 512;

impl Core {
    /// Empties a namespace. Returns what it held and its short names (old, new); holders of the old one must
    /// be told. `None` if the id is unknown.
    pub fn purge(&mut self, id: NamespaceId) -> Option<(Purged, NamespaceIndex, NamespaceIndex)> {
        let (old, new) = self.names.replace(id)?;
        let groups = &self.names.get(old).groups;
        let blocks = groups.iter().map(|group| group.blocks).sum();
        let bytes = groups.iter().map(|group| group.blocks * self.space.class_info(group.class).slot_bytes).sum();
        self.purges.push(Purge { namespace: old, cursor: 0 });
        self.purge_below(id, old);
        self.stats.purged += blocks;
        Some((Purged { blocks, bytes }, old, new))
    }

    pub(crate) fn step_purge(&mut self) {
        let Some(Purge { namespace, cursor }) = self.purges.pop() else { return };
        let (mut at, mut dropped) = (cursor, 0);
        let end = (cursor + RECORDS_PER_STEP).min(self.blocks.end());
        while at < end && dropped < DROPS_PER_STEP {
            let block = BlockId(at);
            let Block { namespace: its, state, .. } = self.blocks[block];
            if its == namespace && self.is_indexed(block) {
                self.forget(block, Fate::Evicted);
                dropped += 1;
            } else if its == namespace && state == State::Promoting {
                self.abandon(block);
                dropped += 1;
            }
            at += 1;
        }
        if at < self.blocks.end() {
            self.purges.push(Purge { namespace, cursor: at });
        } else {
            self.names.clear(namespace);
        }
    }
}
