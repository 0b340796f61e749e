//! Directories that hosts share: their entry among the tiers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use forebay_io::StoreReport;
use forebay_io::fs::{Fs, FsConfig};
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::uring::Region;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec};
use crate::config::{Config, TierFs};

pub const SPEC: TierSpec = TierSpec {
    name: "fs",
    is_shared: true,
    is_configured: |config| !config.tier_fs.directories.is_empty(),
    options: |Config { tier_fs: tier, .. }| {
        Options::new(tier.admission, tier.load_deadline_ms, tier.load_bytes_per_second, tier.store_bytes_per_second)
    },
    claim: |config| {
        let config = settings(&config.tier_fs);
        config.check()?;
        Ok(Box::new(config))
    },
};

impl Claimed for FsConfig {
    fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        Ok(Box::new(Fs::open(self, Region::of_pool(pool.clone()))?))
    }
}

impl Driven for Fs {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Fs::wake_fd(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        StoreReport::of_fs(self.report())
    }

    fn places(&self) -> Vec<Place> {
        Fs::places(self)
    }
}

fn settings(config: &TierFs) -> FsConfig {
    FsConfig {
        io_direct: config.io_direct,
        streams: config.streams,
        timeout: Duration::from_millis(config.timeout_ms),
        buffers: config.buffers,
        is_sharded: config.shard_folders,
        fsync: config.fsync,
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
        max_age: config.max_age_seconds.map(Duration::from_secs),
        read_only: config.read_only,
        ..FsConfig::new(config.directories.clone())
    }
}
