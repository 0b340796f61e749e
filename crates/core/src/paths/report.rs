//! Figures of the core for people: fill by class and namespace, and held blocks. Also the audit of all parts.
//!
//! Invariants: nothing here changes a decision; an audited block is pinned only while it is read.

use crate::core::Core;
use crate::key::{BlockId, BlockKey, ClassId, Generation, Instance, NamespaceId, NamespaceIndex, SlotId};
use crate::slots::{Block, Class, State};
use crate::stats::Finder;

/// The slots of one size, by what they are used for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassReport {
    /// Size of each slot.
    pub slot_bytes: u64,
    /// Slots of all extents of the class that do not drain.
    pub slots: u64,
    /// Slots of the others: no slot of them is given any more, and their memory goes to other sizes.
    pub draining: u64,
    /// Slots in use: `ready + reserved + promoting + fenced`.
    pub used: u64,
    /// Slots that hold a block, verified or not.
    pub ready: u64,
    /// Of the used ones, those under a lease, being verified, promoted, or written to a tier.
    pub pinned: u64,
    /// Slots handed out for filling and not committed yet.
    pub reserved: u64,
    /// Being filled by a tier, or with a block that leaves another slot.
    pub promoting: u64,
    /// Slots out of use until their holders are gone.
    pub fenced: u64,
}

impl ClassReport {
    /// Slots that can be used. While extents drain, the slots that they still hold may be more than all others.
    pub fn free(&self) -> u64 {
        self.slots.saturating_sub(self.used)
    }
}

/// The blocks of one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceReport {
    /// Its id.
    pub id: NamespaceId,
    /// (group, bytes of a block, blocks).
    pub groups: Vec<(u16, u64, u64)>,
}

/// Memory that eviction cannot free, and why.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Held {
    /// Ready blocks under a lease, and blocks being verified, promoted, or written to a tier.
    pub pinned_bytes: u64,
    /// Bytes of slots that were handed out for filling and are not committed yet.
    pub reserved_bytes: u64,
    /// Slots out of use until a holder of theirs is gone.
    pub fenced_bytes: u64,
    /// Number of those slots.
    pub fenced_blocks: u64,
    /// Leases that have not ended, of all instances.
    pub leases: u64,
    /// Waiting requests that engines have sent hints for; each group of a request counts by itself.
    pub hinted_groups: u64,
    /// Bytes of hinted blocks that evictions pass over, whether they are in the pool yet or not.
    pub protected_bytes: u64,
}

/// A block in the index that is to be read.
#[derive(Clone, Copy, Debug)]
pub struct ReadyBlock {
    /// The block; pinned for an audit, not for the scrub.
    pub block: BlockId,
    /// Where its bytes are.
    pub slot: SlotId,
    /// The slot's generation; if it differs after the reading, the reading does not count.
    pub generation: Generation,
    /// The block's name on every tier.
    pub key: BlockKey,
}

impl Core {
    /// All classes, in the order in which their sizes were first used.
    pub fn classes(&self) -> Vec<ClassReport> {
        let report = |(id, class): (ClassId, &Class)| {
            let tally = self.slots.tally(id);
            ClassReport {
                slot_bytes: class.slot_bytes,
                slots: class.slots,
                draining: class.draining,
                used: class.used,
                ready: class.used - tally.reserved - tally.promoting - tally.moving - tally.fenced,
                pinned: tally.pinned,
                reserved: tally.reserved,
                promoting: tally.promoting + tally.moving,
                fenced: tally.fenced,
            }
        };
        self.slots.space().classes().map(report).collect()
    }

    /// Blocks of a namespace that wait for their last holder.
    pub fn fenced_of(&self, namespace: NamespaceIndex) -> u64 {
        self.slots.fenced().filter(|block| self.slots[*block].namespace == namespace).count() as u64
    }

    /// Leases of this instance that have not ended.
    pub fn lease_count(&self, instance: Instance) -> u64 {
        self.leases.count(instance)
    }

    /// The namespaces that have an id at present; for a purged one, the empty one that took its place.
    pub fn namespaces(&self) -> Vec<NamespaceReport> {
        let report = |namespace: &crate::cache::Namespace| {
            let bytes = |group| namespace.layout.group(group).map_or(0, |layout| layout.block_bytes());
            let groups = namespace.groups.iter().map(|g| (g.group, bytes(g.group), g.blocks)).collect();
            NamespaceReport { id: namespace.id, groups }
        };
        self.cache.names().current().map(report).collect()
    }

    /// What cannot be evicted at this moment. Looks at each class once, at no block.
    pub fn held(&self) -> Held {
        Held {
            pinned_bytes: self.slots.pinned_bytes(),
            reserved_bytes: self.slots.reserved_bytes(),
            hinted_groups: self.hints.len() as u64,
            protected_bytes: self.hints.protected_bytes(),
            fenced_bytes: self.classes().iter().map(|class| class.fenced * class.slot_bytes).sum(),
            fenced_blocks: self.slots.fenced_count(),
            leases: self.leases.len(),
        }
    }

    /// Bytes of all units, populated or not.
    pub fn capacity_bytes(&self) -> u64 {
        self.slots.space().capacity_bytes()
    }

    /// Bytes of the units that may be used.
    pub fn populated_bytes(&self) -> u64 {
        self.slots.space().populated_bytes()
    }

    /// Ready blocks, and blocks of an earlier epoch that no lookup has asked for yet, among the records from `cursor`
    /// on. They are pinned so that they stay while they are read; release each with [`Core::audited`]. Examines `limit`
    /// records; the next cursor is `None` at the end.
    pub fn audit_piece(&mut self, cursor: u32, limit: u32) -> (Vec<ReadyBlock>, Option<u32>) {
        let end = cursor.saturating_add(limit).min(self.slots.end());
        let is_audited = |block: &BlockId| matches!(self.slots[*block].state, State::Ready | State::Unverified);
        let piece: Vec<ReadyBlock> =
            (cursor..end).map(BlockId).filter(is_audited).map(|block| self.block_to_read(block)).collect();
        for audited in &piece {
            self.pin(audited.block, None);
        }
        (piece, (end < self.slots.end()).then_some(end))
    }

    pub(crate) fn ready_block(&self, block: BlockId) -> Option<ReadyBlock> {
        (self.slots[block].state == State::Ready).then(|| self.block_to_read(block))
    }

    fn block_to_read(&self, block: BlockId) -> ReadyBlock {
        let Block { slot, generation, .. } = self.slots[block];
        ReadyBlock { block, slot, generation, key: self.block_key(block) }
    }

    /// The block was read; one that is not whole is dropped.
    pub fn audited(&mut self, block: BlockId, is_whole: bool) {
        if !is_whole && self.slots.is_indexed(block) {
            self.drop_rotten(block, Finder::Audit);
        }
        self.unpin(block);
    }

    /// Compares records with the slot map and the index: as many as [`Core::audit_piece`] examines from `cursor` on.
    /// Errors say which of them disagree.
    pub fn audit_records(&self, cursor: u32, limit: u32) -> Result<(), String> {
        let end = cursor.saturating_add(limit).min(self.slots.end());
        (cursor..end).map(BlockId).try_for_each(|block| self.audit_record(block))
    }

    /// Compares the counters that can be compared without looking at any block.
    pub fn audit_counters(&self) -> Result<(), String> {
        let used = self.slots.space().classes().map(|(_, class)| class.used).sum();
        let stats = self.journal.stats();
        expect("used slots", u64::from(self.slots.count()), used)?;
        expect("misses and hits", stats.keys, stats.hits + stats.miss_count())
    }

    fn audit_record(&self, block: BlockId) -> Result<(), String> {
        let record = &self.slots[block];
        if record.state == State::Vacant {
            return Ok(());
        }
        if self.slots.space().block_at(record.slot) != Some(block) {
            return Err(format!("{block:?} is not in its slot {:?}", record.slot));
        }
        let has_key = self.slots.is_indexed(block) || record.state == State::Promoting;
        if has_key && self.cache.find(&self.slots, record.namespace, record.group, &record.hash) != Some(block) {
            return Err(format!("{block:?} is not found by its key"));
        }
        Ok(())
    }

    /// Compares every record with the index, the slot map, the policies' nodes and the counters. Walks over everything:
    /// for tests. Errors say which of them disagree.
    pub fn audit(&self) -> Result<(), String> {
        let (mut indexed, mut promoting, mut reserved, mut pinned, mut fenced) = (0, 0, 0, 0, 0);
        for block in (0..self.slots.end()).map(BlockId) {
            let record = &self.slots[block];
            if record.state == State::Vacant {
                continue;
            }
            self.audit_record(block)?;
            promoting += u64::from(record.state == State::Promoting);
            indexed += u64::from(self.slots.is_indexed(block) || record.state == State::Promoting);
            pinned += if record.pins > 0 { self.slots.slot_bytes(block) } else { 0 };
            reserved += if record.state == State::Reserved { self.slots.slot_bytes(block) } else { 0 };
            fenced += u64::from(record.state == State::Fenced);
        }
        expect("indexed blocks", indexed, self.cache.len())?;
        expect("reserved bytes", reserved, self.slots.reserved_bytes())?;
        if !self.slots.are_reservations_right() {
            return Err("an instance's counts of reserved slots are not those of its reservations".to_owned());
        }
        expect("pinned bytes", pinned, self.slots.pinned_bytes())?;
        expect("fenced blocks", fenced, self.slots.fenced_count())?;
        let prefetch = (0..self.slots.end()).map(BlockId).filter(|block| self.is_prefetch(*block));
        self.tiers.audit(promoting, prefetch.map(|block| self.slots.slot_bytes(block)).sum())?;
        self.audit_counters()
    }
}

fn expect(what: &str, counted: u64, kept: u64) -> Result<(), String> {
    if counted == kept { Ok(()) } else { Err(format!("{what}: counted {counted}, kept {kept}")) }
}
