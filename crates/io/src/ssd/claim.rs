//! One disk on its way into the tier: claimed, then read.
//!
//! Invariant: nothing is read from a disk or written to it before every transfer of an earlier daemon has ended.

use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use super::config::{DiskConfig, SsdConfig};
use super::device::Device;
use super::disk::Disk;
use super::recover::{self, Medium, Mode};
use super::report::DiskReport;
use super::staging::{STAGING_BYTES, no_memory};
use crate::uring::{self, Memory, Region, Waker};

/// A disk that no other daemon uses; nothing is read yet.
pub struct DiskClaim {
    device: Device,
}

impl DiskClaim {
    /// Locks the disk, and preallocates its file. An error names the disk and what to do. Where the disk hangs, so does
    /// this call: see [`ClaimProcess`](super::ClaimProcess).
    pub fn new(config: &DiskConfig) -> Result<DiskClaim> {
        Ok(DiskClaim { device: Device::claim(config)? })
    }

    pub(super) fn of(device: Device) -> DiskClaim {
        DiskClaim { device }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether every transfer of an earlier daemon has ended. Until then its reads may still write into the pool and
    /// its writes may still reach the disk. So the slots that it was filling stay fenced, and [`DiskClaim::open`]
    /// refuses.
    pub fn is_earlier_io_done(&mut self) -> Result<bool> {
        self.device.is_earlier_io_done()
    }

    /// Reads the content of the disk; fails when nothing was answered for `open_patience`. `pool` is the memory with
    /// the slots, and `waker` that of the tier that the disk will be in.
    pub fn open(mut self, config: &SsdConfig, pool: &Region, waker: &Arc<Waker>) -> Result<OpenedDisk> {
        if !self.is_earlier_io_done()? {
            return Err(Error::new(ErrorKind::Unavailable, "the i/o of an earlier daemon has not ended yet")
                .hint("wait, and try again"));
        }
        let (device, mut config) = (self.device, config.clone());
        config.share(pool.len() as u64);
        let staging = Region::anonymous(STAGING_BYTES).map_err(no_memory)?;
        let memory = Arc::new(Memory::new(pool.clone(), staging));
        let uring::Started { engine, why } = uring::start(config.engine, &device.file, &memory, waker, config.depth)?;
        let medium = Medium {
            name: device.path.display().to_string(),
            engine,
            engine_why: why,
            memory,
            bytes: device.bytes,
            is_direct: device.is_direct,
            // A file would lose the space that was reserved for it.
            can_trim: device.is_block_device(),
            new_id: random_id()?,
        };
        if !medium.is_direct {
            tracing::warn!(path = medium.name, "no direct i/o here: bytes are copied through the page cache");
        }
        Ok(OpenedDisk::new(recover::open(medium, Some(device), &config, Mode::Serve)?))
    }
}

/// A disk that was read, and is in no tier yet.
pub struct OpenedDisk {
    pub(super) disk: Disk,
}

impl OpenedDisk {
    pub(super) fn new(disk: Disk) -> OpenedDisk {
        OpenedDisk { disk }
    }

    /// What opening the disk found.
    pub fn report(&self) -> DiskReport {
        self.disk.report()
    }
}

fn random_id() -> Result<u128> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| no_memory(error.into()))?;
    Ok(u128::from_le_bytes(bytes))
}
