//! Leases: which blocks each instance may load, under which id.
//!
//! Invariants: a block that a lease covers is pinned once for that lease. The blocks of an ended lease stay here until
//! they are unpinned, a bounded number in one event. An id is never given twice, not even in another epoch.

use std::collections::BTreeMap;

use crate::key::{BlockId, Instance};

/// Names the pins of one lookup. 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct LeaseId(pub u64);

struct Lease {
    instance: Instance,
    blocks: Vec<BlockId>,
}

/// See the module's head.
pub(crate) struct Leases {
    all: BTreeMap<u64, Lease>,
    next: u64,
    /// Leases of each instance.
    counts: [u64; Instance::MAX],
    /// Blocks under leases of each instance, each once for every lease.
    covered: [u64; Instance::MAX],
    /// Blocks to be unpinned, in the lists of the leases that they were under; no list is empty. One list of all would
    /// have to be copied in one event, however long it is.
    ended: Vec<Vec<BlockId>>,
    /// Bytes that lookups under way will pin last, and for which others leave room.
    pub set_aside_bytes: u64,
}

impl Leases {
    pub fn new(epoch: u32) -> Leases {
        // A release that was sent before a restart must not end a lease given after it.
        let next = u64::from(epoch) << 32 | 1;
        let (counts, covered) = ([0; Instance::MAX], [0; Instance::MAX]);
        Leases { all: BTreeMap::new(), next, counts, covered, ended: Vec::new(), set_aside_bytes: 0 }
    }

    /// A lease on `blocks`, which are pinned.
    pub fn add(&mut self, instance: Instance, blocks: Vec<BlockId>) -> LeaseId {
        let id = self.next;
        self.next += 1;
        self.counts[instance.0 as usize] += 1;
        self.covered[instance.0 as usize] += blocks.len() as u64;
        self.all.insert(id, Lease { instance, blocks });
        LeaseId(id)
    }

    /// The lease covers these pinned blocks too. False if it has ended: then they are left to be unpinned.
    pub fn extend(&mut self, lease: LeaseId, blocks: Vec<BlockId>) -> bool {
        match self.all.get_mut(&lease.0) {
            Some(lease) => {
                self.covered[lease.instance.0 as usize] += blocks.len() as u64;
                lease.blocks.extend(blocks);
            }
            None => {
                self.give_up(blocks);
                return false;
            }
        }
        true
    }

    /// Whether the lease has not ended.
    pub fn is_held(&self, lease: LeaseId) -> bool {
        self.all.contains_key(&lease.0)
    }

    /// The lease ends, if it is one of this instance's. False if it is not.
    pub fn end(&mut self, instance: Instance, lease: LeaseId) -> bool {
        if self.all.get(&lease.0).is_none_or(|lease| lease.instance != instance) {
            return false;
        }
        let lease = self.all.remove(&lease.0).expect("it was just there");
        self.counts[instance.0 as usize] -= 1;
        self.covered[instance.0 as usize] -= lease.blocks.len() as u64;
        self.give_up(lease.blocks);
        true
    }

    /// All leases of an instance end.
    pub fn end_all(&mut self, instance: Instance) {
        let its = self.all.extract_if(.., |_, lease| lease.instance == instance);
        self.ended.extend(its.map(|(_, lease)| lease.blocks).filter(|blocks| !blocks.is_empty()));
        self.counts[instance.0 as usize] = 0;
        self.covered[instance.0 as usize] = 0;
    }

    /// These blocks were pinned for a lease that nobody wants any more.
    pub fn give_up(&mut self, blocks: Vec<BlockId>) {
        if !blocks.is_empty() {
            self.ended.push(blocks);
        }
    }

    /// Whether blocks are left to be unpinned.
    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The last blocks of those to be unpinned, at most `limit`, and of one lease. None if no block is left.
    pub fn take_ended(&mut self, limit: usize) -> Vec<BlockId> {
        match self.ended.last_mut() {
            Some(blocks) if blocks.len() > limit => blocks.split_off(blocks.len() - limit),
            _ => self.ended.pop().unwrap_or_default(),
        }
    }

    pub fn len(&self) -> u64 {
        self.all.len() as u64
    }

    pub fn count(&self, instance: Instance) -> u64 {
        self.counts[instance.0 as usize]
    }

    /// Blocks under leases of an instance, each once for every lease.
    pub fn blocks(&self, instance: Instance) -> u64 {
        self.covered[instance.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_ended_leases_are_taken_from_the_last_on_and_no_more_than_asked_for() {
        let mut leases = Leases::new(1);
        let blocks = |range: std::ops::Range<u32>| range.map(BlockId).collect::<Vec<_>>();
        for range in [0..3, 3..3, 3..8] {
            leases.add(Instance(1), blocks(range));
        }
        leases.end_all(Instance(1));
        leases.give_up(Vec::new());
        let taken: Vec<_> = (0..5).map(|_| leases.take_ended(2)).collect();
        assert_eq!(taken, [6..8, 4..6, 3..4, 1..3, 0..1].map(blocks));
        assert!(!leases.has_ended() && leases.take_ended(2).is_empty());
    }
}
