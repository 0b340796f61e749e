//! Figures of a filesystem tier for metrics, `inspect` and `doctor`.

use std::path::PathBuf;

use forebay_core::tier::Health;

/// Counts of one directory since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    pub stored_blocks: u64,
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was written.
    pub repeated_stores: u64,
    pub loaded_blocks: u64,
    pub loaded_bytes: u64,
    pub absent_loads: u64,
    pub found_blocks: u64,
    /// Objects that two reads found damaged in the same way. They were removed where possible.
    pub corrupt_blocks: u64,
    /// Objects that were damaged at the first read and different at the second: something between object and host
    /// flips bits.
    pub misread_blocks: u64,
    pub failed_loads: u64,
    pub failed_stores: u64,
    /// Stores that found the directory full.
    pub full_stores: u64,
    pub removed_blocks: u64,
    /// Operations that were reported as failed before they ended.
    pub given_up: u64,
    /// Blocks that this host's sweeper removed to free space.
    pub evicted_blocks: u64,
    pub evicted_bytes: u64,
    /// Blocks that this host's sweeper removed for their age, or because a part was missing.
    pub expired_blocks: u64,
    /// Unfinished files that this host's sweeper removed.
    pub removed_orphans: u64,
    pub sweeps: u64,
}

/// One directory.
#[derive(Clone, PartialEq, Debug)]
pub struct RootReport {
    pub path: PathBuf,
    /// A random id, drawn when the directory was created; the same for all hosts.
    pub id: u128,
    pub health: Health,
    /// Why nothing is written; none if the directory is writable.
    pub read_only: Option<String>,
    /// An upper bound, as this host last saw it.
    pub used_bytes: u64,
    pub capacity_bytes: Option<u64>,
    /// Blocks that this host's last walk found; 0 before it, and on hosts that do not sweep.
    pub counted_blocks: u64,
    /// Whether this host sweeps.
    pub is_sweeper: bool,
    pub threads: usize,
    /// Threads that have been at one operation for longer than the timeout.
    pub hanging_threads: usize,
    pub buffers: usize,
    pub waiting_loads: usize,
    pub waiting_finds: usize,
    pub waiting_stores: usize,
    /// Operations that were accepted and not completed.
    pub in_flight: usize,
    pub counters: Counters,
}

/// The whole tier.
#[derive(Clone, PartialEq, Debug)]
pub struct FsReport {
    pub roots: Vec<RootReport>,
}
