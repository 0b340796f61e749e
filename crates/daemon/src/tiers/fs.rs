//! The entry of shared directories in `ALL`, the list of tiers.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use forebay_core::tier::Capabilities;
use forebay_core::tiers::Admission;
use forebay_io::fs::{Fs, FsConfig, Fsync, Opening};
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::uring::Region;
use forebay_io::{Demand, StoreReport};
use toml::Value;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec, Touches};
use crate::config::{Bytes, Setting, settings};

settings! {
    /// Directories, local or NFS, that several hosts share.
    "tier.fs": TierFs {
        /// Shared directories, which must exist; an empty list switches the tier off. Each block is in one of them.
        directories: Vec<PathBuf> = Vec::new();
        /// Whether reads and writes bypass the page cache (direct I/O). Useful for mounts whose client would only cache
        /// what the pool holds already.
        io_direct: bool = false;
        /// Threads for each directory, each with one operation at a time. Eight hide the latency of a remote mount.
        streams: u32 = 8;
        /// Bounce buffers for each directory. Each transfer uses one, so they limit the transfers at a time. A mount
        /// that hangs keeps some of them, and never a slot of the pool.
        buffers: u32 = 16;
        /// Milliseconds after which an operation fails. If the mount hangs, the operation's thread and buffer are not
        /// free until the mount answers.
        timeout_ms: u64 = 30_000;
        /// Whether the blocks of each namespace are spread over 4,096 folders. Set when a directory is first used, and
        /// the same for all hosts that use it.
        shard_folders: bool = true;
        /// What is flushed before a block counts as stored: `none`, the file's `data`, or `all`, which includes its
        /// name. Without a flush, a crash of the host costs misses.
        fsync: Fsync = Fsync::None;
        /// Bytes of each directory, the same on all hosts. Not limited by default.
        capacity_bytes: Option<Bytes> = None;
        /// Seconds after which a block is removed if it was not used meanwhile. Not limited by default.
        max_age_seconds: Option<u64> = None;
        /// Whether the tier only reads and never stores. A mount that cannot be written is treated as read-only anyway.
        read_only: bool = false;
        /// Which blocks are written to the tier: `second_sighting` or `all`, as for `tier.ssd.admission`. The default
        /// is `all`, as for every shared store.
        admission: Admission = Admission::All;
        /// Limit on the bytes loaded from the tier per second: this daemon's share of a store that others use as well.
        /// Loads beyond it wait, and are misses after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to the tier per second; writes beyond it wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a probe or a block before it is a miss. A wait for room in the pool
        /// does not count: it ends after half a second in which no block comes.
        load_deadline_ms: u64 = 1000;
    }
}

impl TierSpec for TierFs {
    fn capabilities(&self) -> Capabilities {
        Fs::CAPABILITIES
    }

    fn is_configured(&self) -> bool {
        !self.directories.is_empty()
    }

    fn switch(&self) -> &'static str {
        "tier.fs.directories"
    }

    fn demands(&self) -> Vec<Demand> {
        settings(self).demands("tier.fs.")
    }

    fn operation_timeout(&self) -> Option<(&'static str, Duration)> {
        Some(("tier.fs.timeout_ms", Duration::from_millis(self.timeout_ms)))
    }

    fn options(&self) -> Options {
        Options::new(self.admission, self.load_deadline_ms, self.load_bytes_per_second, self.store_bytes_per_second)
    }

    fn touching(&self) -> Option<Touches> {
        Some(Touches::by_use(self.max_age_seconds.map(Duration::from_secs)))
    }

    fn check(&self) -> Result<()> {
        settings(self).check()
    }

    fn examine(&self) -> Vec<Result<String>> {
        forebay_io::fs::examine(&settings(self))
    }

    fn claim(&self, sealing: &Sealing) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(Opening::new(FsConfig { sealing: sealing.clone(), ..settings(self) })))
    }
}

impl Claimed for Opening {
    fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        Ok(Box::new(Opening::open(self, Region::of_pool(pool.clone()))?))
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

impl Setting for Fsync {
    const KIND: &'static str = "`\"none\"`, `\"data\"` or `\"all\"`";

    fn read(value: &Value) -> Option<Fsync> {
        match value.as_str()? {
            "none" => Some(Fsync::None),
            "data" => Some(Fsync::Data),
            "all" => Some(Fsync::All),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            Fsync::None => "none",
            Fsync::Data => "data",
            Fsync::All => "all",
        };
        Some(Value::String(text.to_string()))
    }
}
