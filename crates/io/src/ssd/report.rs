//! Figures of a disk for metrics, `inspect` and `doctor`.

use forebay_core::tier::Health;
use forebay_core::{BlockKey, Error, ErrorKind};

use super::index::Entry;
use super::layout::{Geometry, Record};
use super::space::SegmentState;

/// Counts since the disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Blocks that were written and flushed.
    pub stored_blocks: u64,
    /// Bytes of these blocks, without heads and padding.
    pub stored_bytes: u64,
    /// Stores of blocks that were already there: nothing was written.
    pub repeated_stores: u64,
    /// Blocks that were loaded and whose checksum matched.
    pub loaded_blocks: u64,
    /// Bytes of these blocks.
    pub loaded_bytes: u64,
    /// Loads of blocks that the disk does not have, or evicted while they waited.
    pub absent_loads: u64,
    /// Blocks whose bytes did not match their checksum, or whose segment's list could not be read; each was dropped.
    pub corrupt_blocks: u64,
    /// Loads whose transfer failed.
    pub failed_loads: u64,
    /// Stores and removals whose transfer or flush failed, or that came while the log paused.
    pub failed_stores: u64,
    /// Removals that were flushed.
    pub removed_blocks: u64,
    /// Blocks that were dropped when their segment was reclaimed.
    pub evicted_blocks: u64,
    /// Hot blocks that were copied to the head of the log when their segment was reclaimed.
    pub carried_blocks: u64,
    /// Bytes of these blocks; part of the disk's write amplification.
    pub carried_bytes: u64,
    /// All written bytes: payloads, heads, footers, headers.
    pub written_bytes: u64,
    /// Flushes that ended, failed ones included.
    pub flushes: u64,
    /// Flushes that failed; nothing that waited for them counts as stored.
    pub failed_flushes: u64,
    /// Segments that were emptied for the log.
    pub reclaimed_segments: u64,
    /// Bytes of those that the device was told of, because nobody needs them.
    pub trimmed_bytes: u64,
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
    /// Blocks that were found.
    pub blocks: u64,
    /// Segments whose blocks were listed by a footer.
    pub segments_with_footer: u32,
    /// Segments without a footer, which were read along their chain of heads.
    pub segments_scanned: u32,
    /// Segments with an unreadable header; their content is lost.
    pub segments_lost: u32,
    /// Blocks that a crash left incomplete, or that could not be read.
    pub blocks_not_whole: u64,
    /// Bytes read for verification.
    pub verified_bytes: u64,
    /// Namespaces in the list of purges.
    pub purges: u64,
    /// Of each copy of the list, the pages that were damaged or could not be read.
    pub damaged_purge_pages: [u32; 2],
    /// Pages of the list that were so in both copies.
    pub lost_purge_pages: u32,
    /// From the start of opening to a complete index.
    pub took_us: u64,
}

/// One segment, for `forebay inspect ssd`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentReport {
    /// Number of the segment on its disk.
    pub index: u32,
    /// Where it stands on the way from free to closed.
    pub state: SegmentState,
    /// Orders segments by age: the lowest is the oldest.
    pub life: u64,
    /// Bytes written to the disk since this life began.
    pub age_bytes: u64,
    /// Bytes behind which the next batch would begin, the segment's header included.
    pub used_bytes: u64,
    /// Blocks in it that can be loaded.
    pub live_blocks: u32,
    /// Bytes of these blocks.
    pub live_bytes: u64,
}

/// One disk.
#[derive(Clone, PartialEq, Debug)]
pub struct DiskReport {
    /// The disk's path.
    pub name: String,
    /// Name of the engine, such as `io_uring`.
    pub engine: &'static str,
    /// The reason for that engine.
    pub engine_why: String,
    /// Whether transfers bypass the page cache.
    pub is_direct: bool,
    /// Capacity and segment size that the disk was formatted with.
    pub geometry: Geometry,
    /// Of reads: sick after failures or late loads in a row, or when no read was answered for seconds.
    pub health: Health,
    /// Of writes and flushes: sick after failures in a row, or when none was answered for seconds.
    pub health_of_writes: Health,
    /// Why the disk is not in use at all; all figures are zero then.
    pub missing: Option<String>,
    /// What to do about that.
    pub hint: Option<String>,
    /// Times that no loads were tried for a while.
    pub breaker_opened: u64,
    /// Blocks that can be loaded.
    pub blocks: u64,
    /// Number of blocks for which the index has memory; it grows to the most that the disk ever held.
    pub index_room_blocks: u64,
    /// Bytes of these blocks.
    pub live_bytes: u64,
    /// Loads that were accepted and not begun.
    pub waiting_loads: usize,
    /// Stores and removals that were accepted and not begun.
    pub waiting_stores: usize,
    /// Transfers and flushes that the engine has not ended.
    pub transfers_in_flight: usize,
    /// Bytes written since the disk was created, for its endurance; a crash loses the count of one segment.
    pub lifetime_written_bytes: u64,
    /// Bytes of blocks stored since the disk was created; a crash loses the count of one segment.
    pub lifetime_stored_bytes: u64,
    /// Counts since the disk was opened.
    pub counters: Counters,
    /// What opening the disk found.
    pub recovery: Recovery,
}

impl DiskReport {
    /// Of a configured disk that is not in use.
    pub(super) fn missing(name: String, why: String, hint: Option<String>) -> DiskReport {
        DiskReport {
            name,
            engine: "none",
            engine_why: String::new(),
            is_direct: false,
            geometry: Geometry { id: 0, segment_bytes: 0, segments: 0 },
            health: Health::Sick(ErrorKind::Unavailable),
            health_of_writes: Health::Sick(ErrorKind::Unavailable),
            missing: Some(why),
            hint,
            breaker_opened: 0,
            blocks: 0,
            index_room_blocks: 0,
            live_bytes: 0,
            waiting_loads: 0,
            waiting_stores: 0,
            transfers_in_flight: 0,
            lifetime_written_bytes: 0,
            lifetime_stored_bytes: 0,
            counters: Counters::default(),
            recovery: Recovery::default(),
        }
    }

    /// Bytes written per byte stored since the disk was created; none before the first store.
    pub fn lifetime_amplification(&self) -> Option<f64> {
        amplification(self.lifetime_written_bytes, self.lifetime_stored_bytes)
    }

    /// What is wrong with the disk, if anything is.
    pub fn trouble(&self) -> Option<String> {
        self.missing.clone().or_else(|| trouble(self.health, self.health_of_writes))
    }

    /// The part of the disk's block space that holds loadable blocks.
    pub fn live_ratio(&self) -> f64 {
        self.live_bytes as f64 / (self.geometry.segment_bytes * u64::from(self.geometry.segments)) as f64
    }
}

pub(super) fn hint_of(error: &Error) -> Option<String> {
    error.hint_text().map(str::to_owned)
}

pub(super) fn trouble(reads: Health, writes: Health) -> Option<String> {
    let told = |health, what: &str| match health {
        Health::Sick(ErrorKind::Timeout) => Some(format!("{what} are not answered in time")),
        Health::Sick(kind) => Some(format!("{what} fail ({})", format!("{kind:?}").to_lowercase())),
        Health::Healthy => None,
    };
    let troubles = [told(reads, "reads"), told(writes, "writes")];
    troubles.into_iter().flatten().reduce(|reads, writes| format!("{reads}, {writes}"))
}

/// A block on a disk, by its record there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// The block's key.
    pub key: BlockKey,
    /// The segment in which a load finds it, and the first page there; both change when the block is carried over.
    pub segment: u32,
    /// See `segment`.
    pub first_page: u32,
    /// Bytes of the block without padding.
    pub length_bytes: u64,
    /// Checksum of these bytes, as the store gave it.
    pub checksum: u64,
    /// Whether it was read since it was written.
    pub is_hot: bool,
}

impl BlockInfo {
    pub(super) fn new(record: &Record, entry: &Entry, segment: u32) -> BlockInfo {
        let Record { key, first_page, length_bytes, checksum, .. } = *record;
        BlockInfo { key, segment, first_page, length_bytes, checksum, is_hot: entry.is_hot }
    }

    /// Where the payload starts on a disk of this geometry, in bytes.
    pub fn offset_bytes(&self, geometry: &Geometry) -> u64 {
        geometry.at(self.segment, self.first_page)
    }
}
