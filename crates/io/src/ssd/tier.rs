//! The SSD tier: blocks distributed over disks by their keys.
//!
//! Claim → open → use. Invariants: a key lives on one disk, chosen by the key and the disks' ids alone, so it is
//! found again whatever the order of the configuration. A disk that fails affects its own blocks only.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::checksum::Checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, Operation, Tier};
use forebay_core::{BlockKey, Error, ErrorKind, Result};

use super::config::SsdConfig;
use super::device::Device;
use super::disk::Disk;
use super::recover::{self, Medium, Mode};
use super::report::{BlockInfo, DiskReport};
use super::staging::STAGING_BYTES;
use crate::uring::{self, Memory, Region, Waker};

/// Disks that no other daemon uses; nothing is read yet.
pub struct Claim {
    devices: Vec<Device>,
    config: SsdConfig,
}

impl Claim {
    /// Locks the disks, and preallocates files. An error names the disk and what to do.
    pub fn new(config: &SsdConfig) -> Result<Claim> {
        let devices = config.disks.iter().map(Device::claim).collect::<Result<_>>()?;
        Ok(Claim { devices, config: config.clone() })
    }

    /// Whether every transfer of an earlier daemon has ended. Until then its reads may still write into the pool and
    /// its writes may still reach the disks. So the slots that it was filling stay fenced, and [`Claim::open`]
    /// refuses.
    pub fn is_earlier_io_done(&mut self) -> Result<bool> {
        let mut is_done = true;
        for device in &mut self.devices {
            is_done &= device.is_earlier_io_done()?;
        }
        Ok(is_done)
    }

    /// Reads the content of the disks; blocks for at most `open_deadline` each. `pool` is the memory with the slots.
    pub fn open(mut self, pool: Region) -> Result<Ssd> {
        self.config.share(pool.len() as u64);
        if !self.is_earlier_io_done()? {
            return Err(Error::new(ErrorKind::Unavailable, "the i/o of an earlier daemon has not ended yet")
                .hint("wait, and try again"));
        }
        let waker = Arc::new(Waker::new().map_err(no_memory)?);
        let mut disks = Vec::new();
        for device in self.devices {
            let staging = Region::anonymous(STAGING_BYTES).map_err(no_memory)?;
            let memory = Arc::new(Memory::new(pool.clone(), staging));
            let uring::Started { engine, why } =
                uring::start(self.config.engine, &device.file, &memory, &waker, self.config.depth)?;
            let medium = Medium {
                name: device.path.display().to_string(),
                engine,
                engine_why: why,
                memory,
                bytes: device.bytes,
                is_direct: device.is_direct,
                new_id: random_id()?,
            };
            disks.push(recover::open(medium, Some(device), &self.config, Mode::Serve)?);
        }
        Ok(Ssd { disks, waker })
    }
}

/// See the module documentation.
pub struct Ssd {
    disks: Vec<Disk>,
    waker: Arc<Waker>,
}

impl Ssd {
    /// A disk of this host alone: its operations may outlive the process, in the kernel.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, is_durable: true, is_shared: false };

    /// Opens disks behind the caller's engines, for tests and simulations.
    pub fn on(media: Vec<Medium>, config: &SsdConfig) -> Result<Ssd> {
        let open = |medium| recover::open(medium, None, config, Mode::Serve);
        let disks = media.into_iter().map(open).collect::<Result<_>>()?;
        Ok(Ssd { disks, waker: Arc::new(Waker::new().map_err(no_memory)?) })
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    /// Advances the time for the write budgets, delayed flushes and sick disks. `now` counts from any fixed moment;
    /// call about every 10 ms.
    pub fn tick(&mut self, now: Duration) {
        self.disks.iter_mut().for_each(|disk| disk.tick(now));
    }

    /// Reports that the pool's first bytes are populated: they are then pinned for the engines, once.
    pub fn register(&mut self, populated_bytes: u64) {
        self.disks.iter_mut().for_each(|disk| disk.io.engine.register(populated_bytes));
    }

    /// The index's record of a block; does no I/O.
    pub fn block(&self, key: &BlockKey) -> Option<BlockInfo> {
        self.disks.iter().find_map(|disk| disk.block(key))
    }

    /// All blocks, disk by disk, the oldest first.
    pub fn blocks(&self) -> impl Iterator<Item = BlockInfo> {
        self.disks.iter().flat_map(Disk::blocks)
    }

    /// Appends the keys of blocks that the disks evicted to free space since the last call. Call it after `poll` and
    /// after its completions were handled: a block may be stored and evicted in one turn, and is then reported here
    /// last.
    pub fn take_evicted(&mut self, keys: &mut Vec<BlockKey>) {
        self.disks.iter_mut().for_each(|disk| disk.take_evicted(keys));
    }

    /// The figures of each disk, in the order of the configuration. Costs a pass over all segments.
    pub fn report(&self) -> Vec<DiskReport> {
        self.disks.iter().map(Disk::report).collect()
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.disks.iter().all(Disk::is_idle)
    }

    /// Blocks until every accepted operation has completed and was flushed; false if that takes longer than
    /// `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll(completions);
            if self.is_idle() {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            let busy = self.disks.iter_mut().find(|disk| disk.io.in_flight() > 0);
            busy.into_iter().for_each(|disk| disk.io.engine.wait(Duration::from_millis(10)));
        }
    }

    /// The disk that holds the key, otherwise the one to which the key belongs.
    fn disk_of(&mut self, key: &BlockKey) -> &mut Disk {
        let holder = self.disks.iter().position(|disk| disk.block(key).is_some());
        let index = holder.unwrap_or_else(|| self.home_of(key));
        &mut self.disks[index]
    }

    /// Rendezvous hashing: adding or losing a disk moves no other disk's keys.
    fn home_of(&self, key: &BlockKey) -> usize {
        let weight = |disk: &Disk| {
            let mut sum = Checksum::new();
            sum.update(&disk.geometry.id.to_le_bytes());
            sum.update(&key.namespace.0.to_le_bytes());
            sum.update(&key.group.to_le_bytes());
            sum.update(key.hash.as_bytes());
            // A checksum is linear. After mixing, its high bits depend on the whole key.
            sum.finish().wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        (0..self.disks.len()).max_by_key(|index| weight(&self.disks[*index])).unwrap_or(0)
    }
}

impl Tier for Ssd {
    fn name(&self) -> &'static str {
        "ssd"
    }

    fn capabilities(&self) -> Capabilities {
        Ssd::CAPABILITIES
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.iter().take_while(|op| self.disk_of(&op.key).take(op)).count();
        self.disks.iter_mut().for_each(Disk::start);
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.waker.clear();
        for disk in &mut self.disks {
            disk.poll();
            completions.append(&mut disk.completions);
        }
    }

    fn cancel(&mut self, id: OpId) {
        self.disks.iter_mut().any(|disk| disk.cancel(id));
    }

    /// Sick only when no disk can be read.
    fn health(&self) -> Health {
        let mut health = Health::Sick(ErrorKind::Unavailable);
        for disk in &self.disks {
            health = disk.health();
            if health == Health::Healthy {
                break;
            }
        }
        health
    }
}

impl Timed for Ssd {
    fn advance(&mut self, now: Duration) {
        self.tick(now);
    }
}

fn random_id() -> Result<u128> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| no_memory(error.into()))?;
    Ok(u128::from_le_bytes(bytes))
}

pub(super) fn no_memory(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot get threads or memory for a disk").source(error)
}
