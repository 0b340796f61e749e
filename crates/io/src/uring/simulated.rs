//! A disk in memory that fails as programmed, tears and reorders writes, and loses power: for tests and simulations.
//!
//! Invariants: a run repeats exactly from its seed. A write is in the durable image only after a flush that was
//! submitted when the write was done. After a power loss nothing is answered, and the remaining image holds any part
//! of the unflushed data, sector by sector.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::engine::{Done, Engine, Request, Work};
use super::memory::Memory;

/// A power loss leaves a sector whole or not written.
const SECTOR_BYTES: usize = 512;

/// What happens to one I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// Nothing is moved.
    Error(Errno),
    /// Moves this many bytes and reports that number.
    Short(u32),
    /// A write moves half of its bytes, then fails.
    Torn,
    /// A write keeps half of its bytes, and reports all of them.
    HalfKept,
    /// Completes only after this many polls.
    Delayed(u32),
    /// Reports success, and does nothing. For a flush: the drive lies.
    Lies,
    /// Like [`FaultKind::Lies`], for flushes only; transfers are not affected.
    LyingFlush,
    /// A read's bytes arrive with one bit flipped.
    Flipped,
    /// This and all later I/Os are never answered.
    PowerLoss,
}

/// Affects `count` I/Os, starting with the `nth` from now (0 is the next).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The first affected I/O.
    pub nth: u64,
    /// Number of affected I/Os in a row.
    pub count: u64,
    /// What happens to each.
    pub kind: FaultKind,
}

impl Fault {
    /// A fault of one I/O.
    pub fn once(nth: u64, kind: FaultKind) -> Fault {
        Fault { nth, count: 1, kind }
    }
}

/// The medium; clones are the same one.
#[derive(Clone)]
pub struct SimulatedDisk(Arc<Mutex<Medium>>);

struct Medium {
    current: Vec<u8>,
    durable: Vec<u8>,
    /// Writes since the last flush, in the order of their completion.
    unsynced: VecDeque<(usize, Vec<u8>)>,
    writes_done: u64,
    ios: u64,
    faults: Vec<Fault>,
    /// Positions of bytes that cannot be read.
    unreadable: Vec<usize>,
    is_off: bool,
}

impl SimulatedDisk {
    /// A blank medium of this many bytes.
    pub fn new(bytes: usize) -> SimulatedDisk {
        SimulatedDisk::from_image(vec![0; bytes])
    }

    /// A medium with this content, all of it durable.
    pub fn from_image(image: Vec<u8>) -> SimulatedDisk {
        SimulatedDisk(Arc::new(Mutex::new(Medium {
            durable: image.clone(),
            current: image,
            unsynced: VecDeque::new(),
            writes_done: 0,
            ios: 0,
            faults: Vec::new(),
            unreadable: Vec::new(),
            is_off: false,
        })))
    }

    /// Arms faults, counted from the next I/O, replacing the armed ones.
    pub fn arm(&self, faults: &[Fault]) {
        let mut medium = self.medium();
        let ios = medium.ios;
        medium.faults = faults.iter().map(|fault| Fault { nth: ios + fault.nth, ..*fault }).collect();
    }

    /// From now on a read of any of these bytes fails.
    pub fn set_unreadable(&self, at: &[usize]) {
        self.medium().unreadable = at.to_vec();
    }

    /// Bytes of the medium.
    #[allow(clippy::len_without_is_empty, reason = "a disk of no bytes is none")]
    pub fn len(&self) -> usize {
        self.medium().current.len()
    }

    /// I/Os done so far.
    pub fn ios(&self) -> u64 {
        self.medium().ios
    }

    /// Whether power was lost: no I/O is answered any more.
    pub fn is_off(&self) -> bool {
        self.medium().is_off
    }

    /// The content that a reader would see.
    pub fn image(&self) -> Vec<u8> {
        self.medium().current.clone()
    }

    /// Changes bytes without any I/O.
    pub fn alter(&self, at: usize, change: impl FnOnce(&mut [u8])) {
        change(&mut self.medium().current[at..]);
    }

    /// The disk after a power loss now: all flushed data, and of each later write all, none or some of its sectors,
    /// as drawn from `seed`.
    pub fn after_power_loss(&self, seed: u64) -> SimulatedDisk {
        let medium = self.medium();
        let (mut image, mut dice) = (medium.durable.clone(), Dice(seed));
        for (at, bytes) in &medium.unsynced {
            let fate = dice.below(3);
            for (i, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if fate == 0 || (fate == 1 && dice.below(2) == 0) {
                    let from = at + i * SECTOR_BYTES;
                    image[from..from + sector.len()].copy_from_slice(sector);
                }
            }
        }
        SimulatedDisk::from_image(image)
    }

    fn medium(&self) -> MutexGuard<'_, Medium> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module documentation. Does its I/O when polled.
pub struct Simulated {
    disk: SimulatedDisk,
    memory: Arc<Memory>,
    waiting: Vec<Waiting>,
    /// Without dice, everything is done at the next poll, in order.
    dice: Option<Dice>,
}

struct Waiting {
    request: Request,
    /// Writes that were done when the flush was submitted.
    writes_done: u64,
    polls_left: u32,
    is_delayed: bool,
}

impl Simulated {
    /// With a seed, each poll does some of the waiting requests in random order.
    pub fn new(disk: SimulatedDisk, memory: Arc<Memory>, seed: Option<u64>) -> Simulated {
        Simulated { disk, memory, waiting: Vec::new(), dice: seed.map(Dice) }
    }

    fn chosen(&mut self) -> Option<usize> {
        let ready = |waiting: &Waiting| waiting.polls_left == 0;
        match &mut self.dice {
            None => self.waiting.iter().position(ready),
            // A quarter of the polls end with requests still waiting.
            Some(dice) => {
                if dice.below(4) == 0 {
                    return None;
                }
                let indices: Vec<usize> = (0..self.waiting.len()).filter(|i| ready(&self.waiting[*i])).collect();
                (!indices.is_empty()).then(|| indices[dice.below(indices.len() as u64) as usize])
            }
        }
    }
}

impl Engine for Simulated {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        let writes_done = self.disk.medium().writes_done;
        let waiting = |request| Waiting { request, writes_done, polls_left: 0, is_delayed: false };
        self.waiting.extend(requests.drain(..).map(waiting));
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        self.waiting.iter_mut().for_each(|waiting| waiting.polls_left = waiting.polls_left.saturating_sub(1));
        while let Some(index) = self.chosen() {
            let mut medium = self.disk.medium();
            if medium.is_off {
                return;
            }
            let fault = if self.waiting[index].is_delayed { None } else { medium.next_fault() };
            match fault {
                Some(FaultKind::PowerLoss) => {
                    medium.is_off = true;
                    return;
                }
                Some(FaultKind::Delayed(polls)) => {
                    (self.waiting[index].polls_left, self.waiting[index].is_delayed) = (polls, true);
                }
                fault => {
                    let Waiting { request, writes_done, .. } = self.waiting.remove(index);
                    let (result, checksum) = medium.perform(&self.memory, request.work, writes_done, fault);
                    done.push(Done { tag: request.tag, result, checksum });
                }
            }
        }
    }

    fn wait(&mut self, _timeout: Duration) {}
}

impl Medium {
    fn next_fault(&mut self) -> Option<FaultKind> {
        let nth = self.ios;
        self.ios += 1;
        self.faults
            .iter()
            .find(|fault| (fault.nth..fault.nth.saturating_add(fault.count)).contains(&nth))
            .map(|fault| fault.kind)
    }

    fn perform(
        &mut self,
        memory: &Memory,
        work: Work,
        writes_done: u64,
        fault: Option<FaultKind>,
    ) -> (Result<u32, Errno>, u64) {
        if let Some(FaultKind::Error(errno)) = fault {
            return (Err(errno), 0);
        }
        match work {
            Work::Read { at, span, checksum } => {
                let moved = self.clipped(at, span.len, fault);
                let at = at as usize;
                if self.unreadable.iter().any(|bad| (at..at + moved as usize).contains(bad)) {
                    return (Err(Errno::IO), 0);
                }
                let mut bytes = self.current[at.min(self.current.len())..][..moved as usize].to_vec();
                if fault == Some(FaultKind::Flipped) && !bytes.is_empty() {
                    bytes[moved as usize / 2] ^= 1;
                }
                if fault != Some(FaultKind::Lies) {
                    memory.region(span.place).write(span.offset, &bytes);
                }
                let whole = checksum.filter(|_| moved == span.len);
                (Ok(moved), whole.map_or(0, |span| memory.checksum(span)))
            }
            Work::Write { at, spans } => {
                let moved = self.clipped(at, spans.len_bytes() as u32, fault);
                if fault != Some(FaultKind::Lies) {
                    let mut bytes = Vec::new();
                    for span in spans.iter() {
                        let from = bytes.len();
                        bytes.resize(from + span.len as usize, 0);
                        memory.read(*span, &mut bytes[from..]);
                    }
                    bytes.truncate(moved as usize);
                    if fault == Some(FaultKind::HalfKept) {
                        bytes.truncate(moved as usize / 2);
                    }
                    self.current[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                    self.unsynced.push_back((at as usize, bytes));
                    self.writes_done += 1;
                }
                (if fault == Some(FaultKind::Torn) { Err(Errno::IO) } else { Ok(moved) }, 0)
            }
            Work::Trim { at, bytes } => {
                let moved = self.clipped(at, bytes as u32, fault) as usize;
                if fault != Some(FaultKind::Lies) {
                    self.current[at as usize..][..moved].fill(0);
                    self.unsynced.push_back((at as usize, vec![0; moved]));
                    self.writes_done += 1;
                }
                (if fault == Some(FaultKind::Torn) { Err(Errno::IO) } else { Ok(0) }, 0)
            }
            Work::Sync => {
                if !matches!(fault, Some(FaultKind::Lies | FaultKind::LyingFlush)) {
                    self.sync(writes_done);
                }
                (Ok(0), 0)
            }
        }
    }

    /// How many of `len` bytes at `at` are moved.
    fn clipped(&self, at: u64, len: u32, fault: Option<FaultKind>) -> u32 {
        let there = (self.current.len() as u64).saturating_sub(at).min(u64::from(len)) as u32;
        match fault {
            Some(FaultKind::Short(bytes)) => there.min(bytes),
            Some(FaultKind::Torn) => there / 2,
            _ => there,
        }
    }

    /// Makes the first `writes_done` writes of the disk's life durable.
    fn sync(&mut self, writes_done: u64) {
        let later = (self.writes_done - writes_done) as usize;
        for (at, bytes) in self.unsynced.drain(..self.unsynced.len().saturating_sub(later)) {
            self.durable[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
}

/// Splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % limit
    }
}
