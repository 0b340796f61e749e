//! Figures of a disk for metrics, `inspect` and `doctor`.

use forebay_core::BlockKey;
use forebay_core::tier::{Health, Location};

use super::layout::Geometry;
use super::space::SegmentState;

/// Counts since the disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    pub stored_blocks: u64,
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was written.
    pub repeated_stores: u64,
    pub loaded_blocks: u64,
    pub loaded_bytes: u64,
    pub absent_loads: u64,
    pub corrupt_blocks: u64,
    pub failed_loads: u64,
    pub failed_stores: u64,
    pub removed_blocks: u64,
    /// Blocks that were dropped when their segment was reclaimed.
    pub evicted_blocks: u64,
    pub carried_blocks: u64,
    pub carried_bytes: u64,
    /// All written bytes: payloads, heads, footers, headers.
    pub written_bytes: u64,
    pub flushes: u64,
    pub failed_flushes: u64,
    pub reclaimed_segments: u64,
    /// Keys of evicted blocks that nobody fetched in time.
    pub untold_evictions: u64,
}

impl Counters {
    /// Bytes written per byte stored; none before the first store.
    pub fn write_amplification(&self) -> Option<f64> {
        amplification(self.written_bytes, self.stored_bytes)
    }
}

fn amplification(written_bytes: u64, stored_bytes: u64) -> Option<f64> {
    (stored_bytes > 0).then(|| written_bytes as f64 / stored_bytes as f64)
}

/// How a disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovery {
    /// The disk was blank and was formatted.
    pub was_made: bool,
    /// Its superblock was unreadable and was rebuilt from its segments.
    pub was_rebuilt: bool,
    pub blocks: u64,
    pub segments_with_footer: u32,
    pub segments_scanned: u32,
    /// Segments with an unreadable header; their content is lost.
    pub segments_lost: u32,
    /// Blocks that a crash left incomplete, or that could not be read.
    pub blocks_not_whole: u64,
    /// Bytes read for verification.
    pub verified_bytes: u64,
    pub took_us: u64,
}

/// One segment, for `forebay inspect ssd`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentReport {
    pub index: u32,
    pub state: SegmentState,
    /// Orders segments by age: the lowest is the oldest.
    pub life: u64,
    /// Bytes written to the disk since this life began.
    pub age_bytes: u64,
    pub used_bytes: u64,
    pub live_blocks: u32,
    pub live_bytes: u64,
}

/// One disk.
#[derive(Clone, PartialEq, Debug)]
pub struct DiskReport {
    pub name: String,
    pub engine: &'static str,
    /// The reason for that engine.
    pub engine_why: String,
    pub is_direct: bool,
    pub geometry: Geometry,
    pub health: Health,
    pub blocks: u64,
    /// Number of blocks for which the index has memory; it grows to the most that the disk ever held.
    pub index_room_blocks: u64,
    pub live_bytes: u64,
    pub waiting_loads: usize,
    pub waiting_stores: usize,
    pub transfers_in_flight: usize,
    /// Bytes written since the disk was created, for its endurance; a crash loses the count of one segment.
    pub lifetime_written_bytes: u64,
    /// Bytes of blocks stored since the disk was created; a crash loses the count of one segment.
    pub lifetime_stored_bytes: u64,
    pub counters: Counters,
    pub recovery: Recovery,
    pub segments: Vec<SegmentReport>,
}

impl DiskReport {
    /// Bytes written per byte stored since the disk was created; none before the first store.
    pub fn lifetime_amplification(&self) -> Option<f64> {
        amplification(self.lifetime_written_bytes, self.lifetime_stored_bytes)
    }

    /// The part of the disk's block space that holds loadable blocks.
    pub fn live_ratio(&self) -> f64 {
        self.live_bytes as f64 / (self.geometry.segment_bytes * u64::from(self.geometry.segments)) as f64
    }
}

/// A block on a disk, as reported to the core after a restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    pub key: BlockKey,
    pub location: Location,
    pub length_bytes: u64,
    pub checksum: u64,
    /// Whether it was read since it was written.
    pub is_hot: bool,
}
