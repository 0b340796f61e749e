//! Figures of a filesystem tier for metrics, `inspect` and `doctor`.

use std::path::PathBuf;

use forebay_core::Error;
use forebay_core::tier::Health;

/// Counts of one directory since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Blocks that this host wrote.
    pub stored_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was written.
    pub repeated_stores: u64,
    /// Blocks that were loaded and whose checksum matched.
    pub loaded_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub loaded_bytes: u64,
    /// Loads of blocks that the directory does not have.
    pub absent_loads: u64,
    /// Lookups that found their block.
    pub found_blocks: u64,
    /// Objects that two reads found damaged in the same way. They were removed where possible.
    pub corrupt_blocks: u64,
    /// Objects that were damaged at the first read and different at the second: something between object and host
    /// flips bits.
    pub misread_blocks: u64,
    /// Loads that ended in an error other than a damaged block.
    pub failed_loads: u64,
    /// Stores that ended in an error, a full directory included.
    pub failed_stores: u64,
    /// Stores that found the directory full.
    pub full_stores: u64,
    /// Blocks that were removed on request, not by the sweeper.
    pub removed_blocks: u64,
    /// Operations that were reported as failed before they ended.
    pub given_up: u64,
    /// Blocks that this host's sweeper removed to free space.
    pub evicted_blocks: u64,
    /// Bytes of these blocks' files.
    pub evicted_bytes: u64,
    /// Blocks that this host's sweeper removed for their age, or because a part was missing.
    pub expired_blocks: u64,
    /// Unfinished files that this host's sweeper removed.
    pub removed_orphans: u64,
    /// Folders that this host's sweeper could not read, in each walk.
    pub skipped_folders: u64,
    /// Walks through the directory that this host's sweeper finished.
    pub sweeps: u64,
}

/// One directory.
#[derive(Clone, PartialEq, Debug)]
pub struct RootReport {
    /// As it is configured.
    pub path: PathBuf,
    /// A random id, drawn when the directory was created; the same for all hosts.
    pub id: u128,
    /// Sick while so many threads hang that none is left for transfers.
    pub health: Health,
    /// Why the directory is not open; none if it is.
    pub missing: Option<String>,
    /// Whether the configuration says that nothing is written.
    pub is_read_only: bool,
    /// Why the directory has refused most recent stores, or could not be written when it was opened; none while it
    /// takes them.
    pub refuses_writes: Option<String>,
    /// Why the directory has refused most recent loads or looks; none while it answers them.
    pub refuses_reads: Option<String>,
    /// What to do where it is not open, or refuses anything.
    pub hint: Option<String>,
    /// An upper bound, as this host last saw it; none before it saw one.
    pub used_bytes: Option<u64>,
    /// The configured limit; none means no limit.
    pub capacity_bytes: Option<u64>,
    /// Blocks that this host's last walk found; 0 before it, and on hosts that do not sweep.
    pub counted_blocks: u64,
    /// Whether this host sweeps.
    pub is_sweeper: bool,
    /// Threads that serve this directory.
    pub threads: usize,
    /// Threads that have been at one operation for longer than the timeout.
    pub hanging_threads: usize,
    /// Bounce buffers that are allocated now.
    pub buffers: usize,
    /// Loads that no thread has begun.
    pub waiting_loads: usize,
    /// Lookups and removals that no thread has begun.
    pub waiting_finds: usize,
    /// Stores that no thread has begun. Each pins a slot of the pool.
    pub waiting_stores: usize,
    /// Operations that were accepted and not completed.
    pub in_flight: usize,
    /// Counts since the tier was opened.
    pub counters: Counters,
}

impl RootReport {
    pub(super) fn of_missing(path: PathBuf, why: &Error) -> RootReport {
        RootReport {
            path,
            id: 0,
            health: Health::Sick(why.kind()),
            missing: Some(why.to_string()),
            is_read_only: false,
            refuses_writes: None,
            refuses_reads: None,
            hint: why.hint_text().map(str::to_owned),
            used_bytes: None,
            capacity_bytes: None,
            counted_blocks: 0,
            is_sweeper: false,
            threads: 0,
            hanging_threads: 0,
            buffers: 0,
            waiting_loads: 0,
            waiting_finds: 0,
            waiting_stores: 0,
            in_flight: 0,
            counters: Counters::default(),
        }
    }
}

/// The whole tier.
#[derive(Clone, PartialEq, Debug)]
pub struct FsReport {
    /// One for each directory, in the order of the configuration.
    pub roots: Vec<RootReport>,
}
