//! An operator's settings for the disks, and the limits that follow from them.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::tiers::{Limits, TierHasher};
use forebay_core::{Error, Result};

use super::layout::{FIRST_SEGMENT_AT, MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, MIN_SEGMENTS, MOST_PAGES, PAGE};
use crate::uring::EngineChoice;

/// Of a segment whose length is not given.
const LEAST_DEFAULT_BYTES: u64 = 1 << 20;

/// One file or block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// A missing file is created where that is safe; the directory must exist.
    pub path: PathBuf,
    /// Bytes to use: a file is preallocated to this length. A device without it is used whole.
    pub capacity_bytes: Option<u64>,
    /// Whether the file is also created in a directory on the root filesystem, where a mount is probably missing.
    pub create: bool,
}

/// See the module documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct SsdConfig {
    /// A new block goes to one of them: see `placement`.
    pub disks: Vec<DiskConfig>,
    /// Space is reclaimed in pieces of this size, a power of two; no block may be longer. Without it, about a 64th of
    /// the disk, from 1 MiB to 256 MiB. An existing disk keeps its own.
    pub segment_bytes: Option<u64>,
    /// How transfers reach the kernel.
    pub engine: EngineChoice,
    /// Transfers in flight per disk. 32 fill an NVMe drive at 256 KiB; twice that leaves capacity for writes.
    pub depth: u32,
    /// Loads that may wait per disk; more are refused.
    pub queued_loads: usize,
    /// Stores that may wait per disk; more are refused. Each pins a slot of the pool.
    pub queued_stores: usize,
    /// Whether a disk gets no loads for a while after failed or late ones in a row. It is for tiers without rules
    /// around them that would do so for all disks at once.
    pub has_breakers: bool,
    /// Stores under way on one disk. With the next two limits, a disk that hangs keeps a bounded part of the pool.
    pub begun_stores: usize,
    /// Bytes of these blocks. [`DiskClaim::open`](super::DiskClaim::open) lowers it to the disk's part of what all
    /// disks may keep.
    pub begun_store_bytes: u64,
    /// Bytes of the blocks that one disk is loading; lowered in the same way.
    pub begun_load_bytes: u64,
    /// Limit on the written bytes that wait for one flush: a power loss may take this much of the newest blocks.
    pub flush_bytes: u64,
    /// How long a written block waits for others before its flush, while others are being written.
    pub flush_interval: Duration,
    /// Write budget of each disk; none means no limit. Burst: one second's worth.
    pub write_bytes_per_second: Option<u64>,
    /// Write budget of each disk for its endurance. Burst: one hour's worth.
    pub write_bytes_per_day: Option<u64>,
    /// Whether block devices are told of segments that hold nothing any more. Files are not: they would lose the space
    /// that is reserved for them.
    pub trim: bool,
    /// What names blocks by their fingerprints: the core's. Drawn by [`SsdConfig::new`].
    pub hasher: TierHasher,
    /// What this daemon signs its disks with, so that others notice. Drawn by [`SsdConfig::new`].
    pub owner: u128,
    /// How long a disk that is opened may answer nothing before it counts as hung. As long as it answers, opening may
    /// take any time: a large or slow disk takes long.
    pub open_patience: Duration,
}

impl SsdConfig {
    /// The defaults for these disks, without write budgets. Nothing is opened or checked.
    pub fn new(disks: Vec<DiskConfig>) -> SsdConfig {
        SsdConfig {
            disks,
            segment_bytes: None,
            engine: EngineChoice::Auto,
            depth: 64,
            queued_loads: 4096,
            queued_stores: 256,
            has_breakers: false,
            begun_stores: 256,
            begun_store_bytes: u64::MAX,
            begun_load_bytes: u64::MAX,
            flush_bytes: 32 << 20,
            flush_interval: Duration::from_millis(20),
            write_bytes_per_second: None,
            write_bytes_per_day: None,
            trim: false,
            hasher: TierHasher::new(random_owner() as u64),
            owner: random_owner(),
            open_patience: Duration::from_secs(60),
        }
    }

    /// Divides among several disks what the core lets them all keep of a pool of `pool_bytes`: stores that are being
    /// written, and loads that are late.
    pub(super) fn share(&mut self, pool_bytes: u64) {
        let (limits, disks) = (Limits::default(), self.disks.len() as u64);
        if disks > 1 {
            let part = |permille: u32| pool_bytes * u64::from(permille) / 1000 / disks;
            self.begun_store_bytes = self.begun_store_bytes.min(part(limits.store_permille));
            self.begun_load_bytes = self.begun_load_bytes.min(part(limits.late_permille));
        }
    }

    /// Whether segments may have this length: a power of two from 64 KiB to 1 GiB.
    pub fn is_segment(bytes: u64) -> bool {
        bytes.is_power_of_two() && (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&bytes)
    }

    /// Length of the shortest disk: 1 MiB and eight segments, which have at least 1 MiB where no length is given.
    pub fn least_disk_bytes(segment_bytes: Option<u64>) -> u64 {
        let segments = segment_bytes.unwrap_or(LEAST_DEFAULT_BYTES).saturating_mul(MIN_SEGMENTS.into());
        segments.saturating_add(FIRST_SEGMENT_AT)
    }

    /// Length and number of segments for a disk of `bytes`.
    pub(super) fn segments(&self, bytes: u64) -> Result<(u64, u32)> {
        let usable_bytes = bytes.saturating_sub(FIRST_SEGMENT_AT);
        let fitting = (usable_bytes / 64).max(1);
        let segment_bytes = self.segment_bytes.unwrap_or((1 << fitting.ilog2()).clamp(LEAST_DEFAULT_BYTES, 256 << 20));
        if !SsdConfig::is_segment(segment_bytes) {
            return Err(Error::invalid("a segment must be a power of two from 64 KiB to 1 GiB")
                .with("segment_bytes", segment_bytes)
                .hint("leave `tier.ssd.segment_bytes` out for the default"));
        }
        let most = MOST_PAGES * PAGE / segment_bytes;
        let segments = (usable_bytes / segment_bytes).min(most).try_into().unwrap_or(u32::MAX);
        if segments < MIN_SEGMENTS {
            return Err(Error::invalid(format!("a disk must hold at least {MIN_SEGMENTS} segments"))
                .with("capacity_bytes", bytes)
                .with("segment_bytes", segment_bytes)
                .hint("raise `tier.ssd.capacity_bytes`, or lower `tier.ssd.segment_bytes`"));
        }
        Ok((segment_bytes, segments))
    }
}

/// Of the kernel, or of the clock where the kernel has none yet.
fn random_owner() -> u128 {
    let mut bytes = [0; 16];
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos());
    drawn.map_or_else(|_| now(), |_| u128::from_le_bytes(bytes))
}
