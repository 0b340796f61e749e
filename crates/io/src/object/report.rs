//! Figures of an object tier for metrics, `inspect` and `doctor`.

use forebay_core::tier::Health;

/// Counts since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    pub stored_blocks: u64,
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was sent.
    pub repeated_stores: u64,
    pub loaded_blocks: u64,
    pub loaded_bytes: u64,
    pub absent_loads: u64,
    pub found_blocks: u64,
    /// Objects that two requests found damaged: they were removed.
    pub corrupt_blocks: u64,
    /// Objects that were damaged at one request and correct at the next.
    pub misread_blocks: u64,
    pub failed_loads: u64,
    pub failed_stores: u64,
    pub removed_blocks: u64,
    /// Operations that were cancelled before they ended.
    pub given_up: u64,
}

/// The whole tier.
#[derive(Clone, PartialEq, Debug)]
pub struct ObjectReport {
    /// Location of the objects: endpoint or region, bucket, prefix.
    pub name: String,
    pub health: Health,
    pub read_only: bool,
    /// Operations that were accepted and not completed.
    pub in_flight: usize,
    pub counters: Counters,
}
