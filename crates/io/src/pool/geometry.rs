//! How a pool is divided: pages, units, extents, slots.
//!
//! Invariants: a unit is a power of two from 2 MiB to 256 MiB. An extent is a run of 1, 2, 4, … units that begins at a
//! multiple of their number and crosses no 1 GiB boundary. Slots fill their extent from its start without gaps. A page
//! number has 32 bits, so a pool stays under 16 TiB.

use forebay_core::size::human;
use forebay_core::{Error, PAGE_BYTES, Result, SlotId};

/// Ranks of one instance: each has a lock byte, and a birth record per page.
pub const MAX_RANKS: usize = 64;
/// One huge page.
pub const MIN_UNIT_BYTES: u64 = 2 << 20;
/// 256 MiB: large enough that a 500 GiB pool has 2,000 units, small enough to populate one in a tenth of a second.
pub const MAX_UNIT_BYTES: u64 = 256 << 20;
/// 65,536 units of 256 MiB make 16 TiB; the table keeps a word for each.
pub const MAX_UNITS: u32 = 65_536;
/// Devices register the pool in pieces of this size.
const REGISTRATION_BYTES: u64 = 1 << 30;

/// The size of a pool and of its units. Growing adds units and changes nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of one unit, a power of two.
    pub unit_bytes: u64,
    /// Number of units.
    pub units: u32,
    /// Total number of 4 KiB pages; page numbers are slot ids.
    pub pages: u32,
}

impl Geometry {
    /// Divides `capacity_bytes` into whole units. Errors with `Invalid` if the unit size is not allowed, or the pool
    /// would be too small or too large.
    pub fn new(capacity_bytes: u64, unit_bytes: Option<u64>) -> Result<Geometry> {
        let unit_bytes = unit_bytes.unwrap_or_else(|| default_unit_bytes(capacity_bytes));
        if !unit_bytes.is_power_of_two() || !(MIN_UNIT_BYTES..=MAX_UNIT_BYTES).contains(&unit_bytes) {
            return Err(Error::invalid("a pool's unit must be a power of two from 2 MiB to 256 MiB")
                .with("unit_bytes", unit_bytes)
                .hint("leave `pool.unit_bytes` out for the default"));
        }
        let units = capacity_bytes / unit_bytes;
        if units == 0 {
            return Err(Error::invalid(format!("a pool of {} is smaller than one unit", human(capacity_bytes)))
                .with("unit_bytes", unit_bytes)
                .hint("raise `pool.capacity_bytes`"));
        }
        let pages = units.saturating_mul(unit_bytes / PAGE_BYTES);
        match (u32::try_from(units), u32::try_from(pages)) {
            (Ok(units), Ok(pages)) if units <= MAX_UNITS => Ok(Geometry { unit_bytes, units, pages }),
            _ => Err(Error::invalid(format!("a pool of {} has too many units", human(capacity_bytes)))
                .with("units", units)
                .with("limit", MAX_UNITS)
                .hint("raise `pool.unit_bytes`, or lower `pool.capacity_bytes`; the limit is 16 TiB")),
        }
    }

    /// Bytes of all slots: the length of the `data` file.
    pub fn data_bytes(&self) -> u64 {
        u64::from(self.units) * self.unit_bytes
    }

    /// Number of 4 KiB pages in one unit.
    pub fn pages_per_unit(&self) -> u32 {
        (self.unit_bytes / PAGE_BYTES) as u32
    }

    /// The unit in which `slot` begins.
    pub fn unit_of(&self, slot: SlotId) -> u32 {
        slot.0 / self.pages_per_unit()
    }

    /// Whether `extent` may exist in this pool.
    pub fn admits(&self, extent: &Extent) -> bool {
        let Some(end_unit) = extent.first_unit.checked_add(extent.units) else { return false };
        let (start, end) = (u64::from(extent.first_unit) * self.unit_bytes, u64::from(end_unit) * self.unit_bytes);
        extent.units.is_power_of_two()
            && extent.first_unit.is_multiple_of(extent.units)
            && end_unit <= self.units
            && start / REGISTRATION_BYTES == (end - 1) / REGISTRATION_BYTES
            && extent.slot_bytes >= PAGE_BYTES
            && extent.slot_bytes.is_multiple_of(PAGE_BYTES)
            && extent.slot_bytes <= end - start
    }

    /// Units of the longest extent that may begin at `first_unit`.
    pub fn longest_extent(&self, first_unit: u32) -> u32 {
        let lengths = (0..u32::BITS).map(|bits| 1 << bits);
        let is_admitted = |units: &u32| self.admits(&Extent { first_unit, units: *units, slot_bytes: PAGE_BYTES });
        lengths.take_while(is_admitted).last().unwrap_or(1)
    }

    /// How many slots `extent` holds.
    pub fn slots(&self, extent: &Extent) -> u32 {
        (u64::from(extent.units) * self.unit_bytes / extent.slot_bytes) as u32
    }

    /// The `index`th slot of `extent`.
    pub fn slot(&self, extent: &Extent, index: u32) -> SlotId {
        SlotId(extent.first_unit * self.pages_per_unit() + index * extent.slot_pages())
    }
}

/// A run of units that holds slots of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Its first unit, counted from the start of the pool.
    pub first_unit: u32,
    /// Number of units in a row.
    pub units: u32,
    /// Bytes of each slot, whole pages.
    pub slot_bytes: u64,
}

impl Extent {
    /// Number of 4 KiB pages in each slot.
    pub fn slot_pages(&self) -> u32 {
        (self.slot_bytes / PAGE_BYTES) as u32
    }
}

/// A sixteenth of the capacity, so that even a small pool can serve several slot sizes.
fn default_unit_bytes(capacity_bytes: u64) -> u64 {
    let share = (capacity_bytes / 16).clamp(MIN_UNIT_BYTES, MAX_UNIT_BYTES);
    1 << share.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_a_sixteenth_of_the_pool_rounded_down() {
        let cases: [(u64, u64, u32); 6] = [
            (2 << 20, 2 << 20, 1),
            (64 << 20, 4 << 20, 16),
            (100 << 20, 4 << 20, 25),
            (1 << 30, 64 << 20, 16),
            (500 << 30, 256 << 20, 2000),
            ((16 << 40) - (256 << 20), 256 << 20, 65_535),
        ];
        for (capacity, unit_bytes, units) in cases {
            let geometry = Geometry::new(capacity, None).unwrap();
            assert_eq!((geometry.unit_bytes, geometry.units), (unit_bytes, units), "capacity {capacity}");
            assert_eq!(u64::from(geometry.pages) * PAGE_BYTES, geometry.data_bytes());
        }
    }

    #[test]
    fn a_pool_that_cannot_be_cut_is_refused_with_a_hint() {
        let cases = [
            (1 << 20, None),
            (1 << 30, Some(3 << 20)),
            (1 << 30, Some(1 << 20)),
            (1 << 30, Some(512 << 20)),
            (16 << 40, None),
            (1 << 40, Some(2 << 20)),
            (u64::MAX, None),
        ];
        for (capacity, unit) in cases {
            let error = Geometry::new(capacity, unit).unwrap_err();
            assert!(error.hint_text().is_some(), "{capacity} in units of {unit:?}: {error}");
        }
    }

    #[test]
    fn an_extent_crosses_no_gibibyte_and_stays_in_the_pool() {
        let geometry = Geometry::new(5 << 30, None).unwrap();
        let extent = |first_unit, units, slot_bytes| Extent { first_unit, units, slot_bytes };
        for good in [extent(0, 1, 4096), extent(0, 4, 1 << 30), extent(6, 2, 12_288), extent(19, 1, 256 << 20)] {
            assert!(geometry.admits(&good), "{good:?}");
        }
        let bad = [
            extent(3, 2, 4096),
            extent(5, 2, 4096),
            extent(0, 8, 4096),
            extent(0, 3, 4096),
            extent(20, 1, 4096),
            extent(0, 0, 4096),
            extent(0, 1, 0),
            extent(0, 1, 100),
            extent(0, 1, 512 << 20),
            extent(u32::MAX, 1, 4096),
        ];
        for bad in bad {
            assert!(!geometry.admits(&bad), "{bad:?}");
        }
    }

    #[test]
    fn slots_lie_in_their_extent_without_gaps() {
        let geometry = Geometry::new(64 << 20, None).unwrap();
        let extent = Extent { first_unit: 2, units: 2, slot_bytes: 3 << 20 };
        assert_eq!(geometry.slots(&extent), 2);
        assert_eq!(geometry.slot(&extent, 0).offset(), 8 << 20);
        assert_eq!(geometry.slot(&extent, 1).offset(), 11 << 20);
        assert_eq!(geometry.unit_of(geometry.slot(&extent, 1)), 2);
    }
}
