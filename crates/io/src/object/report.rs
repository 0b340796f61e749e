//! Figures of an object tier for metrics, `inspect` and `doctor`.

use forebay_core::tier::Health;

/// Counts since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Blocks that were uploaded.
    pub stored_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was sent.
    pub repeated_stores: u64,
    /// Blocks that were loaded and whose checksum matched.
    pub loaded_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub loaded_bytes: u64,
    /// Loads of blocks that the bucket does not have.
    pub absent_loads: u64,
    /// Lookups that found their block.
    pub found_blocks: u64,
    /// Objects that two requests found damaged: they were removed.
    pub corrupt_blocks: u64,
    /// Objects that were damaged at one request and correct at the next.
    pub misread_blocks: u64,
    /// Loads that ended in an error other than a damaged block.
    pub failed_loads: u64,
    /// Stores that ended in an error.
    pub failed_stores: u64,
    /// Blocks that were removed on request.
    pub removed_blocks: u64,
    /// Operations that were cancelled before they ended.
    pub given_up: u64,
}

/// The whole tier.
#[derive(Clone, PartialEq, Debug)]
pub struct ObjectReport {
    /// Location of the objects: endpoint or region, bucket, prefix.
    pub name: String,
    /// Sick once the thread with the requests has ended.
    pub health: Health,
    /// Whether the configuration forbids stores and removals.
    pub read_only: bool,
    /// Operations that were accepted and not completed.
    pub in_flight: usize,
    /// Counts since the tier was opened.
    pub counters: Counters,
}
