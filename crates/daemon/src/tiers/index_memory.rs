//! What the blocks on this host's disks take of the daemon's memory when the disks are full, beside what there is.
//!
//! The daemon serves without that memory until the disks fill up, and is killed by the kernel then. So it warns at the
//! start, and `forebay doctor` warns before.

use forebay_core::key::PAGE_BYTES;
use forebay_core::size::{human, human_at_most};
use forebay_core::tiers::MEMORY_BYTES_PER_BLOCK as MAP_BYTES;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::pool::Room;
use forebay_io::ssd::{DiskReport, MEMORY_BYTES_PER_BLOCK as INDEX_BYTES};

/// What a block on a disk takes in all tables together.
pub const BYTES_PER_BLOCK: u64 = INDEX_BYTES + MAP_BYTES;
/// A block where none is known yet: 16 tokens of a model with 8 billion parameters and 8-bit KV.
const USUAL_BLOCK_BYTES: u64 = 1 << 20;
/// Fewer blocks say nothing of those that will come.
const ENOUGH_BLOCKS: u64 = 1000;

/// Disks, and the blocks on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disks {
    pub capacity_bytes: u64,
    pub blocks: u64,
    /// Of those blocks.
    pub live_bytes: u64,
}

/// What full disks take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexMemory {
    /// Of which the blocks that are there have `held_bytes` already.
    pub bytes: u64,
    pub held_bytes: u64,
    block_bytes: u64,
    is_assumed: bool,
}

impl Disks {
    pub(crate) fn of(reports: &[DiskReport]) -> Disks {
        let of_one = |report: &DiskReport| Disks {
            capacity_bytes: report.geometry.segment_bytes * u64::from(report.geometry.segments),
            blocks: report.blocks,
            live_bytes: report.live_bytes,
        };
        Disks::all(reports.iter().map(of_one))
    }

    /// All of them together.
    pub fn all(disks: impl Iterator<Item = Disks>) -> Disks {
        disks.fold(Disks::default(), |all, disk| Disks {
            capacity_bytes: all.capacity_bytes + disk.capacity_bytes,
            blocks: all.blocks + disk.blocks,
            live_bytes: all.live_bytes + disk.live_bytes,
        })
    }

    pub fn when_full(&self) -> IndexMemory {
        let is_assumed = self.blocks < ENOUGH_BLOCKS;
        let block_bytes = if is_assumed { USUAL_BLOCK_BYTES } else { self.live_bytes / self.blocks };
        // On the disk it takes whole pages.
        let blocks = self.capacity_bytes / block_bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let bytes = |blocks: u64| blocks * BYTES_PER_BLOCK;
        let held_bytes = bytes(self.blocks);
        IndexMemory { bytes: bytes(blocks).max(held_bytes), held_bytes, block_bytes, is_assumed }
    }
}

impl IndexMemory {
    /// In a sentence.
    pub fn said(&self) -> String {
        let of = if self.is_assumed { "which is usual" } else { "the mean of those there" };
        format!(
            "full disks take {} of the daemon's memory with blocks of {}, {of}: {BYTES_PER_BLOCK} bytes a block",
            human(self.bytes),
            human(self.block_bytes)
        )
    }

    /// Errors with `Full` and a hint if what the disks will take has no room beside `pool_bytes`, the part of the pool
    /// that is not populated yet.
    pub fn check(&self, room: &Room, pool_bytes: u64) -> Result<()> {
        let left_bytes = room.free_memory_bytes().saturating_sub(pool_bytes);
        if self.bytes - self.held_bytes <= left_bytes {
            return Ok(());
        }
        let left = format!("{}; {} is left beside the pool", self.said(), human_at_most(left_bytes));
        Err(Error::new(ErrorKind::Full, left).hint(
            "lower `pool.capacity_bytes` or `tier.ssd.capacity_bytes`, or give the daemon more memory, before the disks \
             are full",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(available_bytes: u64) -> Room {
        Room {
            memory_total_bytes: 64 << 30,
            memory_available_bytes: available_bytes,
            cgroup_available_bytes: None,
            filesystem_free_bytes: None,
            memlock_bytes: None,
        }
    }

    #[test]
    fn thirty_terabytes_are_reckoned_by_the_blocks_that_are_there() {
        let empty = Disks { capacity_bytes: 30 << 40, ..Disks::default() };
        assert_eq!(empty.when_full().bytes, (30 << 20) * BYTES_PER_BLOCK);
        assert!(empty.when_full().said().contains("blocks of 1.0 MiB, which is usual"), "{}", empty.when_full().said());
        let blocks = 1 << 20;
        let small = Disks { blocks, live_bytes: blocks * 15_000, ..empty }.when_full();
        assert_eq!((small.bytes, small.held_bytes), ((30 << 26) * BYTES_PER_BLOCK, blocks * BYTES_PER_BLOCK));
        assert!(small.said().contains("the mean of those there"), "{}", small.said());
    }

    #[test]
    fn what_does_not_fit_beside_the_pool_is_said_with_a_hint() {
        let memory = Disks { capacity_bytes: 30 << 40, ..Disks::default() }.when_full();
        assert!(memory.check(&room(16 << 30), 8 << 30).is_ok());
        let error = memory.check(&room(16 << 30), 15 << 30).unwrap_err();
        assert!(error.to_string().contains("is left beside the pool"), "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("tier.ssd.capacity_bytes")), "{error}");
        // What the blocks have already is not needed again.
        let full = IndexMemory { held_bytes: memory.bytes, ..memory };
        assert!(full.check(&room(0), 0).is_ok());
    }
}
