//! The kinds of tiers there are, and what the driver needs of each beyond [`Tier`].

use std::os::fd::BorrowedFd;
use std::time::Duration;

use forebay_core::below::Limits;
use forebay_core::decorate::{Limits as Rates, Timed};
use forebay_core::{BlockKey, NamespaceId};
use forebay_io::StoreReport;
use forebay_io::fs::Fs;
use forebay_io::purge::Place;
use forebay_io::redis::Redis;
use forebay_io::ssd::{DiskReport, Ssd};

use crate::config::Config;

/// In the order in which they are asked: the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Ssd,
    Fs,
    Redis,
    Object,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Ssd, Kind::Fs, Kind::Redis, Kind::Object];

    pub fn configured(config: &Config) -> Vec<Kind> {
        let is_configured = |kind: &Kind| match kind {
            Kind::Ssd => !config.tier_ssd.disks.is_empty(),
            Kind::Fs => !config.tier_fs.directories.is_empty(),
            Kind::Redis => !config.tier_redis.urls.is_empty(),
            Kind::Object => !config.tier_object.bucket.is_empty(),
        };
        Kind::ALL.into_iter().filter(is_configured).collect()
    }

    /// As it stands in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ssd => "ssd",
            Kind::Fs => "fs",
            Kind::Redis => "redis",
            Kind::Object => "object",
        }
    }

    /// Whether other hosts store and evict there too.
    pub fn is_shared(self) -> bool {
        match self {
            Kind::Ssd => false,
            Kind::Fs | Kind::Redis | Kind::Object => true,
        }
    }

    /// What the core may do with it.
    pub fn limits(self, config: &Config) -> Limits {
        let admission = match self {
            Kind::Ssd => config.tier_ssd.admission,
            Kind::Fs => config.tier_fs.admission,
            Kind::Redis => config.tier_redis.admission,
            Kind::Object => config.tier_object.admission,
        };
        Limits { admission, is_shared: self.is_shared(), ..Limits::default() }
    }

    /// How much of it this daemon uses. A disk's own budget is the disk's to keep, since it lasts for days.
    pub fn rates(self, config: &Config) -> Rates {
        let (loads, stores) = match self {
            Kind::Ssd => (None, None),
            Kind::Fs => (config.tier_fs.load_bytes_per_second, config.tier_fs.store_bytes_per_second),
            Kind::Redis => (config.tier_redis.load_bytes_per_second, config.tier_redis.store_bytes_per_second),
            Kind::Object => (config.tier_object.load_bytes_per_second, config.tier_object.store_bytes_per_second),
        };
        let [load_bytes_per_second, store_bytes_per_second] = [loads, stores].map(|rate| rate.map(|bytes| bytes.0));
        Rates { load_bytes_per_second, store_bytes_per_second, in_flight: None }
    }

    /// How long a request waits for a block of it.
    pub fn load_deadline(self, config: &Config) -> Duration {
        Duration::from_millis(match self {
            Kind::Ssd => config.tier_ssd.load_deadline_ms,
            Kind::Fs => config.tier_fs.load_deadline_ms,
            Kind::Redis => config.tier_redis.load_deadline_ms,
            Kind::Object => config.tier_object.load_deadline_ms,
        })
    }
}

/// A tier as the driver has it.
pub(super) trait Driven: Timed + Send {
    /// Readable when `poll` has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// The pool's first bytes are populated, and may be pinned.
    fn register(&mut self, _populated_bytes: u64) {}

    /// Appends blocks that the tier gave up by itself.
    fn take_evicted(&mut self, _keys: &mut Vec<BlockKey>) {}

    /// All blocks of a namespace, as far as the tier knows without asking anybody.
    fn blocks_of(&self, _namespace: NamespaceId) -> Vec<BlockKey> {
        Vec::new()
    }

    fn disks(&self) -> Vec<DiskReport> {
        Vec::new()
    }

    fn stores(&self) -> Vec<StoreReport> {
        Vec::new()
    }

    /// Where the blocks of a tier are that hosts share, to be emptied of namespaces.
    fn places(&self) -> Vec<Place> {
        Vec::new()
    }
}

impl Driven for Ssd {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Ssd::wake_fd(self)
    }

    fn register(&mut self, populated_bytes: u64) {
        Ssd::register(self, populated_bytes);
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>) {
        Ssd::take_evicted(self, keys);
    }

    fn blocks_of(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.blocks().map(|block| block.key).filter(|key| key.namespace == namespace).collect()
    }

    fn disks(&self) -> Vec<DiskReport> {
        self.report()
    }
}

impl Driven for Redis {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Redis::wake_fd(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        vec![StoreReport::of_redis(self.report())]
    }

    fn places(&self) -> Vec<Place> {
        Redis::places(self)
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

#[cfg(feature = "object")]
impl Driven for forebay_io::object::Object {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        forebay_io::object::Object::wake_fd(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        vec![StoreReport::of_object(self.report())]
    }

    fn places(&self) -> Vec<Place> {
        forebay_io::object::Object::places(self)
    }
}
