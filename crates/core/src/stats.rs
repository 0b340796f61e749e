//! What the core counts. Plain numbers; the daemon turns them into metrics.

use crate::miss::MissReason;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests asked about, each with all its groups.
    pub lookups: u64,
    /// Keys asked about; `hits + misses.sum()` equals it.
    pub keys: u64,
    /// Keys answered as ready and, in full-attention groups, without a gap before them.
    pub hits: u64,
    pub hit_bytes: u64,
    /// By `MissReason as usize`.
    pub misses: [u64; MissReason::ALL.len()],
    pub reserved: u64,
    pub reserve_refused: u64,
    pub stored: u64,
    pub stored_bytes: u64,
    pub duplicates: u64,
    pub orphans: u64,
    pub incomplete: u64,
    pub lost: u64,
    pub aborted: u64,
    pub evicted: u64,
    pub evicted_bytes: u64,
    pub purged: u64,
    pub recovered: u64,
    pub verified: u64,
    pub corrupt: u64,
    pub extents_moved: u64,
    /// Blocks that left a draining extent for another slot.
    pub moved: u64,
}

impl Stats {
    pub fn miss_count(&self) -> u64 {
        self.misses.iter().sum()
    }
}
