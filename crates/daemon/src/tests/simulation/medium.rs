//! A tier's medium, which outlives the daemon: its blocks, its transfers, and its faults.
//!
//! A disk's transfers go on when the daemon is killed, as the kernel's do; those of a shared store end with it. A load
//! writes its slot piece by piece. A medium may fail, be full, hang, lose what it said it has, say that a block is
//! corrupt after it wrote half of it, or write other bytes than it says. A disk may lose a removal: the next daemon
//! finds the block again, unless the disk was told that its namespace is purged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use forebay_core::checksum::checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::Admission;
use forebay_core::{BlockKey, Error, ErrorKind, Fingerprint, NamespaceId, Result};
use forebay_io::header::Sealing;
use rustix::event::{EventfdFlags, eventfd};

use super::dice::Dice;
use super::truth::{Holder, SharedTruth};
use crate::config::{Key, Section};
use crate::tiers::spec::{Claimed, Driven, Options, TierSpec, Walked};

/// Operations at the medium at a time: few, so that others wait in the daemon.
const MOST: usize = 6;

/// The configuration's part of it.
#[derive(Debug)]
pub struct Simulated {
    pub is_shared: bool,
}

impl Section for Simulated {
    fn section(&self) -> &'static str {
        "tier.simulated"
    }

    fn about(&self) -> &'static [&'static str] {
        &[]
    }

    fn keys(&self) -> &'static [Key] {
        &[]
    }

    fn set(&mut self, _: &Key, _: &toml::Value) -> bool {
        false
    }

    fn get(&self, _: &Key) -> Option<toml::Value> {
        None
    }
}

impl TierSpec for Simulated {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.is_shared)
    }

    fn is_configured(&self) -> bool {
        true
    }

    fn switch(&self) -> &'static str {
        "tier.simulated"
    }

    fn options(&self) -> Options {
        Options::new(Admission::All, 50, None, None)
    }

    fn examine(&self) -> Vec<Result<String>> {
        Vec::new()
    }

    fn claim(&self, _: &Sealing) -> Result<Box<dyn Claimed>> {
        Err(Error::invalid("a simulated tier is attached by the simulation"))
    }
}

fn capabilities(is_shared: bool) -> Capabilities {
    Capabilities { can_store: true, can_remove: true, can_touch: false, is_durable: true, is_shared }
}

#[derive(Clone)]
pub struct SharedMedium(Arc<Mutex<Medium>>);

pub struct Medium {
    number: usize,
    pub is_shared: bool,
    truth: SharedTruth,
    /// The pool's data, as a device writes to it.
    data: Option<File>,
    /// Starts of the daemon.
    boot: u32,
    /// Nothing moves.
    pub is_hanging: bool,
    /// No more faults.
    pub is_well: bool,
    capacity_bytes: u64,
    blocks: BTreeMap<BlockKey, (Vec<u8>, u64)>,
    /// Of a disk: blocks whose removal the next daemon does not see.
    lost_removals: BTreeMap<BlockKey, (Vec<u8>, u64)>,
    /// The oldest first, each with a number of its own.
    order: VecDeque<(u64, BlockKey)>,
    next_number: u64,
    transfers: Vec<Transfer>,
    ended: Vec<Completion>,
    evicted: Vec<BlockKey>,
}

struct Transfer {
    op: Operation,
    boot: u32,
    claim: Option<u64>,
    is_half_done: bool,
}

impl SharedMedium {
    pub fn new(number: usize, is_shared: bool, capacity_bytes: u64, truth: SharedTruth) -> SharedMedium {
        let (boot, data, is_hanging, is_well) = (0, None, false, false);
        let (blocks, lost_removals, order, transfers, ended, evicted) = Default::default();
        SharedMedium(Arc::new(Mutex::new(Medium {
            number,
            is_shared,
            truth,
            data,
            boot,
            is_hanging,
            is_well,
            capacity_bytes,
            blocks,
            lost_removals,
            order,
            next_number: 0,
            transfers,
            ended,
            evicted,
        })))
    }

    pub fn get(&self) -> MutexGuard<'_, Medium> {
        self.0.lock().expect("a medium does not panic")
    }

    /// As the daemon of start `boot` has it.
    pub fn open(&self, boot: u32) -> Box<dyn Driven> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("the system has an eventfd");
        Box::new(Handle { medium: self.clone(), boot, wake, walk_at: 0, is_shared: self.get().is_shared })
    }
}

impl Medium {
    /// A daemon starts on the pool whose data these are.
    pub fn begin(&mut self, boot: u32, data: File) {
        (self.boot, self.data) = (boot, Some(data));
    }

    /// The daemon was killed. What a disk writes to the pool, it goes on writing.
    pub fn cut_off(&mut self) {
        self.boot = 0;
        let is_own = !self.is_shared;
        let goes_on = |transfer: &Transfer| is_own && matches!(transfer.op.kind, OpKind::Load);
        let (on, over) = std::mem::take(&mut self.transfers).into_iter().partition(goes_on);
        self.transfers = on;
        for transfer in over {
            self.give_up(transfer.claim);
        }
        self.ended.clear();
        self.evicted.clear();
        for (key, block) in std::mem::take(&mut self.lost_removals) {
            if self.blocks.contains_key(&key) {
                continue;
            }
            self.keep(key, block);
            self.truth.get().count("removals lost");
        }
    }

    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.ended.is_empty()
    }

    /// What a disk finds on itself when it is opened.
    pub fn found(&self) -> Vec<BlockKey> {
        self.blocks.keys().filter(|_| !self.is_shared).copied().collect()
    }

    /// One transfer comes a step nearer to its end.
    pub fn work(&mut self, dice: &mut Dice) {
        let Some(at) = dice.pick(self.transfers.len()).filter(|_| !self.is_hanging) else { return };
        let fault = if self.is_well { 0 } else { dice.below(24) };
        if let OpKind::Load = self.transfers[at].op.kind
            && !self.transfers[at].is_half_done
        {
            self.transfers[at].is_half_done = true;
            let op = self.transfers[at].op;
            if let Some((bytes, _)) = self.blocks.get(&op.key) {
                let half = bytes[..bytes.len().min(op.length_bytes as usize) / 2].to_vec();
                self.write(&op, &half);
            }
            return;
        }
        let Transfer { op, boot, claim, .. } = self.transfers.swap_remove(at);
        let outcome = match op.kind {
            OpKind::Load => self.load(&op, fault),
            OpKind::Store => self.store(&op, fault),
            OpKind::Exists if fault == 1 => Outcome::Failed(ErrorKind::Io),
            OpKind::Exists if self.blocks.contains_key(&op.key) => Outcome::Found,
            OpKind::Exists => Outcome::Absent,
            OpKind::Remove if fault == 1 => Outcome::Failed(ErrorKind::Io),
            OpKind::Remove if fault == 2 && !self.is_shared => {
                self.lost_removals.extend(self.blocks.get(&op.key).map(|block| (op.key, block.clone())));
                if self.remove(&op.key) { Outcome::Removed } else { Outcome::Absent }
            }
            OpKind::Remove if self.remove(&op.key) => Outcome::Removed,
            OpKind::Remove => Outcome::Absent,
            OpKind::Touch { .. } => Outcome::Failed(ErrorKind::Unsupported),
        };
        self.give_up(claim);
        if boot == self.boot {
            self.ended.push(Completion { id: op.id, outcome });
        }
    }

    fn load(&mut self, op: &Operation, fault: usize) -> Outcome {
        let Some((bytes, sum)) = self.blocks.get(&op.key).cloned() else { return Outcome::Absent };
        if bytes.len() as u64 != op.length_bytes {
            return Outcome::Failed(ErrorKind::Invalid);
        }
        match fault {
            1 => return Outcome::Failed(ErrorKind::Io),
            2 => {
                self.write(op, &vec![0xee; bytes.len()]);
                return Outcome::Failed(ErrorKind::Corrupt);
            }
            3 => {
                self.remove(&op.key);
                return Outcome::Absent;
            }
            _ => self.write(op, &bytes),
        }
        if fault == 4 {
            let slot = op.slot.expect("a load has a slot").0;
            self.write(op, &[0xdd; 100]);
            self.truth.get().spoil(slot.0);
            self.truth.get().count("a tier lied");
        }
        Outcome::Loaded { length_bytes: op.length_bytes, checksum: sum }
    }

    fn store(&mut self, op: &Operation, fault: usize) -> Outcome {
        let slot = op.slot.expect("a store has a slot").0;
        let mut bytes = vec![0; op.length_bytes as usize];
        let data = self.data.as_ref().expect("the daemon that stores has a pool");
        data.read_exact_at(&mut bytes, slot.offset()).expect("the slot lies in the pool");
        if op.length_bytes == 0 {
            return Outcome::Failed(ErrorKind::Invalid);
        }
        if checksum(&bytes) != op.checksum {
            return Outcome::Failed(ErrorKind::Corrupt);
        }
        match fault {
            1 => return Outcome::Failed(ErrorKind::Io),
            2 => return Outcome::Failed(ErrorKind::Full),
            3 => return Outcome::Stored,
            _ => self.remove(&op.key),
        };
        let used = |medium: &Medium| medium.blocks.values().map(|(bytes, _)| bytes.len() as u64).sum::<u64>();
        while used(self) + op.length_bytes > self.capacity_bytes {
            let Some((_, oldest)) = self.order.front().copied() else { return Outcome::Failed(ErrorKind::Full) };
            self.remove(&oldest);
            self.evicted.push(oldest);
        }
        // The later record of a key counts.
        self.lost_removals.remove(&op.key);
        self.keep(op.key, (bytes, op.checksum));
        Outcome::Stored
    }

    fn keep(&mut self, key: BlockKey, block: (Vec<u8>, u64)) {
        self.blocks.insert(key, block);
        self.next_number += 1;
        self.order.push_back((self.next_number, key));
    }

    fn write(&self, op: &Operation, bytes: &[u8]) {
        let slot = op.slot.expect("a load has a slot").0;
        let data = self.data.as_ref().expect("there was a daemon");
        data.write_all_at(bytes, slot.offset()).expect("the slot lies in the pool");
    }

    fn remove(&mut self, key: &BlockKey) -> bool {
        self.order.retain(|(_, other)| other != key);
        self.blocks.remove(key).is_some()
    }

    fn give_up(&mut self, claim: Option<u64>) {
        let holder = Holder::Transfer(self.number);
        claim.into_iter().for_each(|claim| self.truth.get().leave(claim, holder));
    }
}

/// What one start of the daemon has of a medium.
struct Handle {
    medium: SharedMedium,
    boot: u32,
    is_shared: bool,
    /// Where a walk through the blocks goes on.
    walk_at: u64,
    wake: OwnedFd,
}

impl Tier for Handle {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn capabilities(&self) -> Capabilities {
        capabilities(self.is_shared)
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let mut medium = self.medium.get();
        if medium.boot != self.boot {
            return 0;
        }
        let taken = batch.len().min(MOST.saturating_sub(medium.transfers.len()));
        for op in &batch[..taken] {
            let (truth, holder) = (medium.truth.clone(), Holder::Transfer(medium.number));
            let is_load = matches!(op.kind, OpKind::Load);
            let why = if is_load { "a load from a tier" } else { "a store to a tier" };
            let claim = op.slot.map(|at| truth.get().claim(at, op.length_bytes, is_load, holder, why));
            medium.transfers.push(Transfer { op: *op, boot: self.boot, claim, is_half_done: false });
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let mut medium = self.medium.get();
        if medium.boot == self.boot {
            completions.append(&mut medium.ended);
        }
    }

    fn cancel(&mut self, _: OpId) {}

    fn health(&self) -> Health {
        Health::Healthy
    }
}

impl Timed for Handle {
    fn advance(&mut self, _: Duration) {}
}

impl Driven for Handle {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn are_earlier_transfers_over(&self) -> bool {
        self.medium.get().transfers.iter().all(|transfer| transfer.boot == self.boot)
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>, _: &mut Vec<Fingerprint>) {
        keys.append(&mut self.medium.get().evicted);
    }

    fn note_purged(&mut self, namespaces: &BTreeSet<NamespaceId>) {
        let mut medium = self.medium.get();
        if medium.boot == self.boot {
            medium.lost_removals.retain(|key, _| !namespaces.contains(&key.namespace));
        }
    }

    fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>, is_new: bool) -> Walked {
        if is_new {
            self.walk_at = 0;
        }
        let medium = self.medium.get();
        let rest = medium.order.iter().filter(|(number, _)| *number >= self.walk_at);
        let some: Vec<(u64, BlockKey)> = rest.take(4).map(|(number, key)| (*number, *key)).collect();
        let Some((last, _)) = some.last() else { return Walked::End };
        self.walk_at = last + 1;
        Walked::Keys(some.into_iter().map(|(_, key)| key).filter(|key| namespaces.contains(&key.namespace)).collect())
    }
}
