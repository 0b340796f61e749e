//! What the core shows to people: fill by class and namespace, and what is held.

use crate::block::{Block, BlockId, ClassId, NamespaceIndex, State};
use crate::core::{Core, Tally};
use crate::corrupt::Finder;
use crate::key::{BlockKey, Generation, Instance, NamespaceId, SlotId};
use crate::space::Class;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassReport {
    pub slot_bytes: u64,
    pub slots: u64,
    /// Slots in use: `ready + reserved + promoting + fenced`.
    pub used: u64,
    pub ready: u64,
    /// Of the used ones, those under a lease, being verified, promoted, or written to a tier.
    pub pinned: u64,
    pub reserved: u64,
    /// Being filled by a tier, or with a block that leaves another slot.
    pub promoting: u64,
    pub fenced: u64,
}

impl ClassReport {
    /// Slots that can be had. While extents drain, what they still hold may be more than all the others have.
    pub fn free(&self) -> u64 {
        self.slots.saturating_sub(self.used)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceReport {
    pub id: NamespaceId,
    /// (group, bytes of a block, blocks).
    pub groups: Vec<(u16, u64, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Held {
    /// Ready blocks under a lease, and blocks being verified, promoted, or written to a tier.
    pub pinned_bytes: u64,
    pub reserved_bytes: u64,
    /// Slots out of use until a holder of theirs is gone.
    pub fenced_bytes: u64,
    pub fenced_blocks: u64,
    pub leases: u64,
    /// Requests that engines said wait, each of their groups by itself, and what evictions pass over for them.
    pub expected: u64,
    pub wanted_bytes: u64,
}

/// A ready block that is to be read.
#[derive(Clone, Copy, Debug)]
pub struct ReadyBlock {
    pub block: BlockId,
    pub slot: SlotId,
    pub generation: Generation,
    pub key: BlockKey,
}

impl Core {
    pub fn classes(&self) -> Vec<ClassReport> {
        let report = |((_, class), tally): ((ClassId, &Class), &Tally)| ClassReport {
            slot_bytes: class.slot_bytes,
            slots: class.slots,
            used: class.used,
            ready: class.used - tally.reserved - tally.promoting - tally.moving - tally.fenced,
            pinned: tally.pinned,
            reserved: tally.reserved,
            promoting: tally.promoting + tally.moving,
            fenced: tally.fenced,
        };
        self.space.classes().zip(&self.tallies).map(report).collect()
    }

    /// Blocks of a namespace that wait for their last holder.
    pub fn fenced_of(&self, namespace: NamespaceIndex) -> u64 {
        let fenced = self.fenced.iter(&self.nodes);
        fenced.filter(|block| self.blocks[*block].namespace == namespace).count() as u64
    }

    pub fn lease_count(&self, instance: Instance) -> u64 {
        self.lease_counts[instance.0 as usize]
    }

    pub fn namespaces(&self) -> Vec<NamespaceReport> {
        let report = |namespace: &crate::names::Namespace| {
            let bytes = |group| namespace.layout.group(group).map_or(0, |layout| layout.block_bytes());
            let groups = namespace.groups.iter().map(|g| (g.group, bytes(g.group), g.blocks)).collect();
            NamespaceReport { id: namespace.id, groups }
        };
        self.names.current().map(report).collect()
    }

    pub fn held(&self) -> Held {
        Held {
            pinned_bytes: self.pinned_bytes,
            reserved_bytes: self.reserved_bytes,
            expected: self.expectations.len() as u64,
            wanted_bytes: self.expectations.wanted_bytes(),
            fenced_bytes: self.classes().iter().map(|class| class.fenced * class.slot_bytes).sum(),
            fenced_blocks: self.fenced.len.into(),
            leases: self.leases.len() as u64,
        }
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.space.capacity_bytes()
    }

    pub fn populated_bytes(&self) -> u64 {
        self.space.populated_bytes()
    }

    /// Ready blocks among the records from `cursor` on, pinned so that they stay while they are read; give each
    /// back with [`Core::audited`]. Looks at `limit` records; `None` as the next cursor at the end.
    pub fn audit_piece(&mut self, cursor: u32, limit: u32) -> (Vec<ReadyBlock>, Option<u32>) {
        let end = cursor.saturating_add(limit).min(self.blocks.end());
        let piece: Vec<ReadyBlock> = (cursor..end).filter_map(|block| self.ready_block(BlockId(block))).collect();
        piece.iter().for_each(|audited| self.pin(audited.block, None));
        (piece, (end < self.blocks.end()).then_some(end))
    }

    pub(crate) fn ready_block(&self, block: BlockId) -> Option<ReadyBlock> {
        let Block { state, slot, generation, namespace, group, hash, .. } = self.blocks[block];
        let key = || BlockKey { namespace: self.names.get(namespace).id, group, hash };
        (state == State::Ready).then(|| ReadyBlock { block, slot, generation, key: key() })
    }

    /// The block was read; one that is not whole is dropped.
    pub fn audited(&mut self, block: BlockId, is_whole: bool) {
        if !is_whole && self.is_indexed(block) {
            self.drop_rotten(block, Finder::Audit);
        }
        self.unpin(block);
    }

    /// Compares every record with the index, the slot map, the policies' nodes and the counters. Walks
    /// everything: for tests and audits. Errors say what does not agree.
    pub fn audit(&self) -> Result<(), String> {
        let (mut indexed, mut promoting, mut reserved, mut pinned, mut fenced) = (0, 0, 0, 0, 0);
        for block in (0..self.blocks.end()).map(BlockId) {
            let record = &self.blocks[block];
            if record.state == State::Vacant {
                continue;
            }
            if self.space.block_at(record.slot) != Some(block) {
                return Err(format!("{block:?} is not in its slot {:?}", record.slot));
            }
            promoting += u64::from(record.state == State::Promoting);
            if self.is_indexed(block) || record.state == State::Promoting {
                indexed += 1;
                if self.find(record.namespace, record.group, &record.hash) != Some(block) {
                    return Err(format!("{block:?} is not found by its key"));
                }
            }
            pinned += if record.pins > 0 { self.slot_bytes(block) } else { 0 };
            reserved += if record.state == State::Reserved { self.slot_bytes(block) } else { 0 };
            fenced += u64::from(record.state == State::Fenced);
        }
        let expect = |what: &str, counted: u64, kept: u64| {
            if counted == kept { Ok(()) } else { Err(format!("{what}: counted {counted}, kept {kept}")) }
        };
        expect("indexed blocks", indexed, self.index.len())?;
        expect("reserved bytes", reserved, self.reserved_bytes)?;
        expect("pinned bytes", pinned, self.pinned_bytes)?;
        expect("fenced blocks", fenced, self.fenced.len.into())?;
        expect("used slots", u64::from(self.blocks.count()), self.space.classes().map(|(_, class)| class.used).sum())?;
        self.audit_below(promoting)?;
        expect("misses and hits", self.stats.keys, self.stats.hits + self.stats.miss_count())
    }
}
