//! What an operator says about shared directories, and the limits that follow.

use std::path::PathBuf;
use std::time::Duration;

use forebay_core::{Error, Result};

/// What is flushed before a block counts as stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fsync {
    /// Nothing: a crash of the host may cost its newest blocks. They are misses then, by their checksums. Over NFS it
    /// is [`Fsync::Data`], which costs no more than the close that must flush there anyway, and sees its errors.
    None,
    /// The file's bytes, before it gets its name.
    Data,
    /// The file, and then the folder that names it.
    All,
}

/// See the module's head.
#[derive(Clone, PartialEq, Debug)]
pub struct FsConfig {
    /// Each key lives in one of them, chosen by the key and the directories' own ids. They must exist.
    pub directories: Vec<PathBuf>,
    /// Past the page cache: for mounts whose client would only cache what the pool holds already.
    pub io_direct: bool,
    /// Threads of each directory, each with one operation at a time; 8 hide the latency of a remote mount. One of
    /// them does no stores, so that lookups and loads always have a way.
    pub streams: u32,
    /// After so long an operation's waiter is told that it failed; the thread may hang on.
    pub timeout: Duration,
    /// Bounce buffers of each directory: transfers at a time, and so a bound of memory, `buffers` × (largest block +
    /// 4 KiB), taken as it is needed. Stores leave one for loads, unless there is no other.
    pub buffers: u32,
    /// Whether objects are spread over 4,096 folders for each namespace; said when a directory is made, and the same
    /// for all who use it. Without it a namespace is one folder.
    pub is_sharded: bool,
    pub fsync: Fsync,
    /// Of each directory; the same on all hosts. None is without limit.
    pub capacity_bytes: Option<u64>,
    /// Blocks that were not stored or loaded for so long are removed.
    pub max_age: Option<Duration>,
    /// Stores nothing and removes nothing. A mount that cannot be written is read-only by itself.
    pub read_only: bool,
    /// Longer blocks are refused: bounds what one bounce buffer takes.
    pub max_block_bytes: u64,
    /// Loads that wait per directory; more are refused.
    pub queued_loads: usize,
    /// Lookups and removals that wait per directory; more are refused.
    pub queued_finds: usize,
    /// Stores that wait per directory; more are refused. Each pins a slot of the pool.
    pub queued_stores: usize,
    /// How long the sweeper rests between two walks through a directory that is not full.
    pub sweep_interval: Duration,
    /// After so long without a sign of life the sweeper's place is free for another host.
    pub lease: Duration,
    /// What was granted of a directory's capacity and is not spent lapses after so long; the same on all hosts.
    pub grant_age: Duration,
    /// Unfinished files that were not written to for so long are removed.
    pub orphan_age: Duration,
}

impl FsConfig {
    pub fn new(directories: Vec<PathBuf>) -> FsConfig {
        FsConfig {
            directories,
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

    /// Whether it can be right, before any directory is looked at; errors with what to change.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, hint: &str| Err(Error::invalid(what).hint(hint));
        if self.directories.is_empty() {
            return wrong("a filesystem tier needs a directory", "name one, or leave the tier out");
        }
        if let Some(twice) =
            (1..self.directories.len()).find(|at| self.directories[..*at].contains(&self.directories[*at]))
        {
            let path = self.directories[twice].display();
            return Err(Error::invalid("a directory is named twice").with("path", path).hint("name each once"));
        }
        if self.streams == 0 || self.streams > 1024 || self.buffers == 0 {
            return wrong(
                "streams are 1 to 1024, and buffers at least 1",
                "leave them out: the defaults fit most mounts",
            );
        }
        if self.queued_loads == 0 || self.queued_finds == 0 || self.queued_stores == 0 {
            return wrong("a queue takes at least one operation", "leave the queue lengths out");
        }
        if self.max_block_bytes == 0 || self.max_block_bytes > 1 << 31 {
            return wrong("the longest block is 1 byte to 2 GiB", "leave it out");
        }
        if self.timeout.is_zero() || self.lease < Duration::from_millis(100) {
            return wrong("a timeout is longer than nothing, and a lease at least 100 ms", "leave them out");
        }
        if self.grant_age.is_zero() {
            return wrong("a grant lives longer than nothing", "leave its age out");
        }
        if self.capacity_bytes.is_some_and(|bytes| bytes < 1 << 20) {
            return wrong("a directory's capacity is at least 1 MiB", "raise it, or leave it out to have no limit");
        }
        if self.max_age.is_some_and(|age| age.is_zero()) {
            return wrong("an age limit is longer than nothing", "leave it out to keep blocks of any age");
        }
        Ok(())
    }
}
