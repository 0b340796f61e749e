//! Checks a job and cuts it into tiles, the shares that threads take. Pure: no memory is touched.
//!
//! Invariants: an accepted job refers only to bytes inside its pool and its tensors. Its tiles cover each byte of
//! each item once. The tiles of an item are numbered in the order of its bytes.

use std::ops::Range;

use forebay_core::{Error, Result};

use crate::job::{Item, Job};
use crate::tensor::Tensors;

/// Small items share a tile up to this size: copying it takes 10 µs or more, much longer than taking a tile.
const TILE_BYTES: u64 = 256 << 10;

/// Consecutive whole items, or one part of one item.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tile {
    pub items: Range<usize>,
    pub part: Option<Part>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// Of the item's slice.
    pub bytes: Range<u64>,
    pub index: usize,
    pub count: usize,
}

/// Limits on splitting a job.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub threads: usize,
    /// An item is split only into parts of about this many bytes or more.
    pub part_bytes: u64,
}

/// Errors with `Invalid` if the job refers to a group, block or byte that does not exist.
pub(crate) fn plan(job: &Job, tensors: &Tensors, pool_bytes: u64, spread: Spread) -> Result<Vec<Tile>> {
    Ok(cut(&check(job, tensors, pool_bytes)?, spread))
}

/// The bytes of each item's slice. Errors like `plan`.
pub(crate) fn check(job: &Job, tensors: &Tensors, pool_bytes: u64) -> Result<Vec<u64>> {
    let check = |(at, item)| item_bytes(item, job, tensors, pool_bytes).map_err(|error| error.with("item", at));
    job.items.iter().enumerate().map(check).collect()
}

/// Length of an item's slice. The item must have been accepted by `plan`.
pub(crate) fn slice_bytes(item: &Item, tensors: &Tensors) -> u64 {
    tensors.block_bytes(item.group).map_or(0, |bytes| bytes * item.blocks.len() as u64)
}

fn item_bytes(item: &Item, job: &Job, tensors: &Tensors, pool_bytes: u64) -> Result<u64> {
    let unknown_group = || Error::invalid("a job names a group that is not registered").with("group", item.group);
    let block_bytes = tensors.block_bytes(item.group).ok_or_else(unknown_group)?;
    let rows = tensors.rows(item.group).ok_or_else(unknown_group)?;
    let blocks = item.blocks.start as usize..item.blocks.end as usize;
    let ids = job.block_ids.get(blocks).filter(|ids| !ids.is_empty()).ok_or_else(|| {
        Error::invalid("an item has no blocks, or blocks that are not in the job's list")
            .with("blocks", format!("{:?}", item.blocks))
            .with("block_ids", job.block_ids.len())
    })?;
    if let Some(block_id) = ids.iter().find(|block_id| **block_id >= rows) {
        return Err(Error::invalid("a block id is outside the tensors").with("block_id", block_id).with("rows", rows));
    }
    let bytes = block_bytes.saturating_mul(ids.len() as u64);
    let [before, behind] = item.beside;
    let end = item.offset.checked_add(bytes).and_then(|end| end.checked_add(behind));
    if before > item.offset || end.is_none_or(|end| end > pool_bytes) {
        return Err(Error::invalid("an item reaches outside the pool")
            .with("offset", item.offset)
            .with("bytes", bytes)
            .with("pool_bytes", pool_bytes));
    }
    Ok(bytes)
}

/// If there are fewer items than threads, large items are split, so that one big block does not leave threads idle.
/// Otherwise neighbours are joined up to `TILE_BYTES`.
fn cut(sizes: &[u64], spread: Spread) -> Vec<Tile> {
    if sizes.len() < spread.threads {
        let parts = |bytes: &u64| (bytes / spread.part_bytes).clamp(1, spread.threads.div_ceil(sizes.len()) as u64);
        return sizes.iter().enumerate().flat_map(|(item, bytes)| split(item, *bytes, parts(bytes))).collect();
    }
    let (mut tiles, mut start, mut filled) = (Vec::new(), 0, 0);
    for (item, bytes) in sizes.iter().enumerate() {
        filled += bytes;
        if filled >= TILE_BYTES || item + 1 == sizes.len() {
            tiles.push(Tile { items: start..item + 1, part: None });
            (start, filled) = (item + 1, 0);
        }
    }
    tiles
}

/// Splits at whole pages, so that a part begins unaligned only if the item does.
fn split(item: usize, bytes: u64, parts: u64) -> impl Iterator<Item = Tile> {
    let part_bytes = bytes.div_ceil(parts).next_multiple_of(forebay_core::PAGE_BYTES);
    let count = bytes.div_ceil(part_bytes) as usize;
    (0..count).map(move |index| {
        let start = index as u64 * part_bytes;
        let part = (count > 1).then_some(Part { bytes: start..bytes.min(start + part_bytes), index, count });
        Tile { items: item..item + 1, part }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn cut(sizes: &[u64], threads: usize) -> Vec<Tile> {
        super::cut(sizes, Spread { threads, part_bytes: 2 * MIB })
    }

    #[test]
    fn small_items_share_a_tile() {
        let items: Vec<_> = cut(&[100 << 10; 7], 2).into_iter().map(|tile| tile.items).collect();
        assert_eq!(items, [0..3, 3..6, 6..7]);
    }

    #[test]
    fn a_lone_large_item_is_split_among_the_threads_at_page_borders() {
        let parts: Vec<_> = cut(&[16 * MIB + 5], 3).into_iter().map(|tile| tile.part.unwrap()).collect();
        assert_eq!(parts.iter().map(|part| part.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(parts.iter().all(|part| part.count == 3 && part.bytes.start % 4096 == 0));
        assert!(parts.windows(2).all(|pair| pair[0].bytes.end == pair[1].bytes.start));
        assert_eq!((parts[0].bytes.start, parts[2].bytes.end), (0, 16 * MIB + 5));
    }

    #[test]
    fn no_part_is_empty_however_small_parts_may_be() {
        let tiles = super::cut(&[2 * 4096 + 1], Spread { threads: 64, part_bytes: 1 });
        let bytes: Vec<_> = tiles.into_iter().map(|tile| tile.part.unwrap().bytes).collect();
        assert_eq!(bytes, [0..4096, 4096..8192, 8192..8193]);
    }

    #[test]
    fn items_are_split_neither_below_the_least_part_nor_when_there_are_enough() {
        assert!(cut(&[3 * MIB], 4).iter().all(|tile| tile.part.is_none()));
        assert!(cut(&[16 * MIB; 4], 4).iter().all(|tile| tile.part.is_none()));
        assert!(cut(&[], 4).is_empty());
    }
}
