//! The `generation` file: it publishes to workers who owns each slot now, and whether the pool is still valid.
//!
//! Invariants: only the daemon stores, workers load. A slot's number is that of its present owner, or one that never
//! belonged to an owner. It is published before the table changes, so it is right whatever the table says. Zero
//! belongs to nobody, so an empty birth record matches no slot.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};

use forebay_core::{Generation, SlotId};

use super::format::{GENERATIONS_AT, RETIRED_WORD, decode_generation_header, generation_bytes};
use super::geometry::Geometry;
use super::map::{Access, Region};
use super::order;

/// See the module documentation.
pub(super) struct Generations {
    region: Region,
}

impl Generations {
    pub fn map(file: &File, geometry: &Geometry, access: Access) -> io::Result<Generations> {
        let region = Region::map(file, 0, generation_bytes(geometry), access)?;
        if access == Access::ReadWrite {
            region.populate(0..GENERATIONS_AT as usize)?;
        }
        Ok(Generations { region })
    }

    /// For a worker: its pool may grow to as much as `largest` describes, see [`Generations::grow`].
    pub fn map_with_room(file: &File, geometry: &Geometry, largest: &Geometry) -> io::Result<Generations> {
        let (bytes, room) = (generation_bytes(geometry), generation_bytes(largest));
        Ok(Generations { region: Region::map_with_room(file, 0, bytes, room, Access::Read)? })
    }

    /// Maps the numbers of the pool's new units too; see [`Region::grow`].
    pub fn grow(&self, geometry: &Geometry) -> io::Result<()> {
        self.region.grow(generation_bytes(geometry))
    }

    /// Allocates memory for the numbers of one unit, so that neither a store nor a worker's load can fail.
    pub fn populate_unit(&self, geometry: &Geometry, unit: u32) -> io::Result<()> {
        let bytes = geometry.pages_per_unit() as usize * 4;
        let start = GENERATIONS_AT as usize + unit as usize * bytes;
        let page = rustix::param::page_size();
        self.region.populate(start / page * page..start + bytes)
    }

    /// The slot's number. Everything that was stored before its publication is visible afterwards.
    pub fn get(&self, slot: SlotId) -> Generation {
        Generation(order::current(&self.region.half_words()[word_of(slot)]))
    }

    /// Whether the slot still had this number when this thread made its latest reads.
    pub fn is_still(&self, slot: SlotId, generation: Generation) -> bool {
        order::is_still(&self.region.half_words()[word_of(slot)], generation.0)
    }

    pub fn publish(&self, slot: SlotId, generation: Generation) {
        order::publish(&self.region.half_words()[word_of(slot)], generation.0);
    }

    pub fn is_retired(&self) -> bool {
        self.region.half_words()[RETIRED_WORD].load(Relaxed) != 0
    }

    pub fn retire(&self) {
        self.region.half_words()[RETIRED_WORD].store(1, Release);
    }

    /// The id of the file's pool; none if it is not such a file.
    pub fn pool_id(&self) -> Option<u128> {
        let mut bytes = [0; 32];
        self.region.read(0, &mut bytes);
        decode_generation_header(&bytes).map(|(id, _)| id)
    }
}

fn word_of(slot: SlotId) -> usize {
    (GENERATIONS_AT / 4) as usize + slot.0 as usize
}
