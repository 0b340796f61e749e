//! An operator's settings for shared directories, and the limits that follow from them.

use std::path::PathBuf;
use std::time::Duration;

use forebay_core::{Error, Result};

use super::layout::LONGEST_BLOCK_BYTES;
use crate::demand::{self, Demand, LONGEST_MS};
use crate::header::Sealing;

/// What is flushed before a block counts as stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fsync {
    /// Nothing. A crash of the host may cost its newest blocks: their checksums do not match, so they are misses.
    /// Over NFS it acts as [`Fsync::Data`]: close must flush there anyway, so the flush costs nothing more, and its
    /// errors are seen.
    None,
    /// The file's bytes, before the file gets its name.
    Data,
    /// The file, then the folder that holds its name.
    All,
}

/// See the module documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct FsConfig {
    /// Each key lives in one of these directories, chosen by the key and the directories' own ids. They must exist.
    pub directories: Vec<PathBuf>,
    /// With or without the secret of the hosts that share the directories.
    pub sealing: Sealing,
    /// Bypass the page cache: for mounts whose client would only cache what the pool already holds.
    pub io_direct: bool,
    /// Threads per directory, each with one operation at a time; 8 hide the latency of a remote mount. One of them
    /// does no stores, so that lookups and loads always make progress.
    pub streams: u32,
    /// After this time an operation's waiter is told that it failed; the thread may keep hanging.
    pub timeout: Duration,
    /// Bounce buffers per directory. They bound the concurrent transfers and the memory: `buffers` × (largest block +
    /// 4 KiB), allocated when needed. Stores leave one buffer for loads, unless there is only one.
    pub buffers: u32,
    /// Whether objects are spread over 4,096 folders for each namespace; otherwise a namespace is one folder. This is
    /// decided when a directory is created, and is the same for all who use it.
    pub is_sharded: bool,
    /// What is flushed before a store ends. Each flush costs the time of the mount or disk.
    pub fsync: Fsync,
    /// Capacity of each directory; the same on all hosts. None means no limit.
    pub capacity_bytes: Option<u64>,
    /// Blocks that were neither stored nor loaded for this long are removed.
    pub max_age: Option<Duration>,
    /// Stores nothing and removes nothing. A mount that cannot be written is treated as read-only.
    pub read_only: bool,
    /// Longer blocks are refused. This bounds the size of one bounce buffer.
    pub max_block_bytes: u64,
    /// Loads that may wait per directory; more are refused.
    pub queued_loads: usize,
    /// Lookups and removals that may wait per directory; more are refused.
    pub queued_finds: usize,
    /// Stores that may wait per directory; more are refused. Each pins a slot of the pool.
    pub queued_stores: usize,
    /// How long the sweeper rests between two walks through a directory that is not full.
    pub sweep_interval: Duration,
    /// After this long without a sign of life from the sweeper, another host may take its place.
    pub lease: Duration,
    /// Unspent grants of a directory's capacity lapse after this long; the same on all hosts.
    pub grant_age: Duration,
    /// Unfinished files that were not written to for this long are removed.
    pub orphan_age: Duration,
}

impl FsConfig {
    /// The defaults for these directories, without a limit on capacity or age. Nothing is opened or checked.
    pub fn new(directories: Vec<PathBuf>) -> FsConfig {
        FsConfig {
            directories,
            sealing: Sealing::default(),
            io_direct: false,
            streams: 8,
            timeout: Duration::from_secs(30),
            buffers: 16,
            is_sharded: true,
            fsync: Fsync::None,
            capacity_bytes: None,
            max_age: None,
            read_only: false,
            max_block_bytes: 256 << 20,
            queued_loads: 4096,
            queued_finds: 16_384,
            queued_stores: 256,
            sweep_interval: Duration::from_secs(600),
            lease: Duration::from_secs(60),
            grant_age: Duration::from_secs(5),
            orphan_age: Duration::from_secs(3600),
        }
    }

    /// Checks the settings before any directory is opened. Errors say what to change.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, hint: &str| Err(Error::invalid(what).hint(hint));
        if self.directories.is_empty() {
            return wrong("a filesystem tier needs a directory", "set `tier.fs.directories`, or remove the tier");
        }
        if let Some(twice) =
            (1..self.directories.len()).find(|at| self.directories[..*at].contains(&self.directories[*at]))
        {
            let path = self.directories[twice].display();
            return Err(Error::invalid("a directory is configured twice")
                .with("path", path)
                .hint("name each directory once"));
        }
        demand::check(self.demands(""))
    }

    /// What single values must hold. `section` stands before the names of the settings.
    pub fn demands(&self, section: &str) -> Vec<Demand> {
        let key = |name: &str| format!("{section}{name}");
        let at_least_1 = |name: &str, value| Demand::at_least_1(key(name), value);
        vec![
            Demand::within(key("streams"), self.streams.into(), 1..=1024),
            at_least_1("buffers", self.buffers.into()),
            at_least_1("queued_loads", self.queued_loads as u64),
            at_least_1("queued_finds", self.queued_finds as u64),
            at_least_1("queued_stores", self.queued_stores as u64),
            Demand::within(key("max_block_bytes"), self.max_block_bytes, 1..=LONGEST_BLOCK_BYTES),
            Demand::within(key("timeout_ms"), self.timeout.as_millis() as u64, 1..=LONGEST_MS),
            Demand::new(key("lease"), self.lease >= Duration::from_millis(100), "be at least 100 ms"),
            Demand::new(key("grant_age"), !self.grant_age.is_zero(), "be greater than 0"),
            Demand::new(
                key("capacity_bytes"),
                self.capacity_bytes.is_none_or(|bytes| bytes >= 1 << 20),
                "be at least 1 MiB, or not set",
            ),
            at_least_1("max_age_seconds", self.max_age.map_or(1, |age| age.as_secs())),
        ]
    }
}
