//! Blocks in a map, for tests: only the tests of this crate are built with the tier.
//!
//! Small enough for one file. It shows what a tier is to the daemon: a section, its [`TierSpec`], and a [`Driven`].

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::checksum::checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::Admission;
use forebay_core::{BlockKey, ErrorKind, Fingerprint, NamespaceId, Result, SlotId};
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::uring::Region;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec, Walked};
use crate::config::{Bytes, settings};

settings! {
    /// Blocks in a map, for tests.
    "tier.memory": TierMemory {
        /// Bytes of all blocks; beyond it the oldest ones go. Not set by default, which switches the tier off.
        capacity_bytes: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a block to be promoted before it is a miss.
        load_deadline_ms: u64 = 1000;
    }
}

impl TierSpec for TierMemory {
    fn capabilities(&self) -> Capabilities {
        Memory::CAPABILITIES
    }

    fn is_configured(&self) -> bool {
        self.capacity_bytes.is_some()
    }

    fn switch(&self) -> &'static str {
        "tier.memory.capacity_bytes"
    }

    fn options(&self) -> Options {
        Options::new(Admission::All, self.load_deadline_ms, None, None)
    }

    fn examine(&self) -> Vec<Result<String>> {
        self.capacity_bytes.into_iter().map(|bytes| Ok(format!("{bytes} for blocks"))).collect()
    }

    fn claim(&self, _: &Sealing) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(self.clone()))
    }
}

impl Claimed for TierMemory {
    fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        let capacity_bytes = self.capacity_bytes.map_or(0, |bytes| bytes.0);
        Ok(Box::new(Memory::new(Region::of_pool(pool.clone()), capacity_bytes)))
    }
}

/// Operations between `submit` and `poll`; what does not fit is asked again.
const QUEUE: usize = 64;

pub(super) struct Memory {
    /// The memory that slots lie in.
    pool: Region,
    capacity_bytes: u64,
    used_bytes: u64,
    blocks: HashMap<BlockKey, (Vec<u8>, u64)>,
    /// Keys of the blocks, the oldest first.
    order: VecDeque<BlockKey>,
    evicted: Vec<BlockKey>,
    ended: Vec<Completion>,
    wake: OwnedFd,
    /// How often it was gone through for the blocks of namespaces.
    pub listings: Cell<u32>,
}

impl Memory {
    const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, can_touch: false, is_durable: false, is_shared: false };

    pub fn new(pool: Region, capacity_bytes: u64) -> Memory {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("the system has an eventfd");
        let (used_bytes, blocks, order, evicted, ended, listings) = Default::default();
        Memory { pool, capacity_bytes, used_bytes, blocks, order, evicted, ended, wake, listings }
    }

    fn run(&mut self, op: &Operation) -> Outcome {
        match (op.kind, op.slot) {
            (OpKind::Store, Some((slot, _))) => self.store(op, slot),
            (OpKind::Load, Some((slot, _))) => self.load(op, slot),
            (OpKind::Store | OpKind::Load, None) => Outcome::Failed(ErrorKind::Invalid),
            (OpKind::Remove, _) if self.remove(&op.key) => Outcome::Removed,
            (OpKind::Exists, _) if self.blocks.contains_key(&op.key) => Outcome::Found,
            (OpKind::Remove | OpKind::Exists, _) => Outcome::Absent,
            (OpKind::Touch { .. }, _) => Outcome::Failed(ErrorKind::Unsupported),
        }
    }

    fn store(&mut self, op: &Operation, slot: SlotId) -> Outcome {
        match op.length_bytes {
            0 => return Outcome::Failed(ErrorKind::Invalid),
            length if length > self.capacity_bytes => return Outcome::Failed(ErrorKind::Full),
            _ => self.remove(&op.key),
        };
        while self.used_bytes + op.length_bytes > self.capacity_bytes {
            let oldest = *self.order.front().expect("used bytes are of a block");
            self.remove(&oldest);
            self.evicted.push(oldest);
        }
        let mut bytes = vec![0; op.length_bytes as usize];
        self.pool.read(slot.offset(), &mut bytes);
        self.used_bytes += op.length_bytes;
        self.blocks.insert(op.key, (bytes, op.checksum));
        self.order.push_back(op.key);
        Outcome::Stored
    }

    /// Writes to the slot only what is known to be the block.
    fn load(&mut self, op: &Operation, slot: SlotId) -> Outcome {
        match self.blocks.get(&op.key) {
            None => Outcome::Absent,
            Some((bytes, _)) if bytes.len() as u64 != op.length_bytes => Outcome::Failed(ErrorKind::Invalid),
            Some((bytes, sum)) if checksum(bytes) != *sum => Outcome::Failed(ErrorKind::Corrupt),
            Some((bytes, sum)) => {
                self.pool.write(slot.offset(), bytes);
                Outcome::Loaded { length_bytes: op.length_bytes, checksum: *sum }
            }
        }
    }

    /// False if it is not there.
    fn remove(&mut self, key: &BlockKey) -> bool {
        let Some((bytes, _)) = self.blocks.remove(key) else { return false };
        self.used_bytes -= bytes.len() as u64;
        self.order.retain(|other| other != key);
        true
    }
}

impl Tier for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Memory::CAPABILITIES
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.len().min(QUEUE - self.ended.len());
        for op in &batch[..taken] {
            let outcome = self.run(op);
            self.ended.push(Completion { id: op.id, outcome });
        }
        // A counter that is full is readable as well.
        let _ = write(&self.wake, &1u64.to_ne_bytes());
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        // Nothing to read is no error here.
        let _ = read(&self.wake, &mut [0u8; 8]);
        completions.append(&mut self.ended);
    }

    /// Everything is over when `submit` returns.
    fn cancel(&mut self, _: OpId) {}

    fn health(&self) -> Health {
        Health::Healthy
    }
}

impl Timed for Memory {
    fn advance(&mut self, _: Duration) {}
}

impl Driven for Memory {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>, _: &mut Vec<Fingerprint>) {
        keys.append(&mut self.evicted);
    }

    fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>, is_new: bool) -> Walked {
        if !is_new {
            return Walked::End;
        }
        self.listings.update(|listings| listings + 1);
        Walked::Keys(self.order.iter().copied().filter(|key| namespaces.contains(&key.namespace)).collect())
    }
}

#[cfg(test)]
mod tests;
