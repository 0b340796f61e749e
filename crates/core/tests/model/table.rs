//! The pool's table as the daemon keeps it: built from effects alone, and all that is left after a restart.
//!
//! Invariants, checked as effects come in: rows never overlap, lie in an extent of their size, and are aligned
//! to it; extents never overlap or cross a registration; an extent is cleared only when it has no rows.

use std::collections::BTreeMap;

use forebay_core::key::{BlockHash, PAGE_BYTES};
use forebay_core::stats::Finder;
use forebay_core::{BlockId, Effect, Generation, Instance, NamespaceIndex, SlotId};

/// What a block was committed as. `short` is the core's name for the namespace in this epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    pub short: NamespaceIndex,
    pub namespace: u8,
    pub group: u16,
    pub hash: BlockHash,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    Unverified,
    Verifying,
    Verified,
}

#[derive(Clone, Debug)]
pub struct Row {
    pub generation: Generation,
    pub holders: u64,
    pub slot_bytes: u64,
    /// `None` while it is being filled.
    pub key: Option<Key>,
    pub trust: Trust,
    /// Its bytes are not what was written.
    pub is_corrupt: bool,
    /// No lookup may find it any more; its slot waits for its last holder.
    pub is_fenced: bool,
}

/// A copy under way from one slot to another.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    pub from: BlockId,
    pub at: (SlotId, Generation),
    pub to: BlockId,
    pub to_slot: SlotId,
}

#[derive(Clone, Copy, Debug)]
pub struct Extent {
    pub units: u32,
    pub slot_bytes: u64,
}

pub struct Table {
    pub unit_bytes: u64,
    pub rows: BTreeMap<SlotId, Row>,
    pub extents: BTreeMap<u32, Extent>,
    /// Verifications asked for and not answered.
    pub verifying: Vec<(BlockId, SlotId, Generation, Finder)>,
    /// Copies asked for and not done.
    pub moving: Vec<Moving>,
    /// Blocks that an audit is reading.
    pub audited: Vec<(BlockId, SlotId)>,
    /// Blocks that the scrub is reading, or was when they left.
    pub scrubbed: Vec<(SlotId, Generation)>,
    /// Units that cannot be read and may be touched by the engines of a mask.
    pub excluded: BTreeMap<u32, u64>,
    /// No generation up to this one is ever published again.
    pub last_generation: u32,
}

impl Table {
    pub fn new(unit_bytes: u64) -> Table {
        Table {
            unit_bytes,
            rows: BTreeMap::new(),
            extents: BTreeMap::new(),
            verifying: Vec::new(),
            moving: Vec::new(),
            audited: Vec::new(),
            scrubbed: Vec::new(),
            excluded: BTreeMap::new(),
            last_generation: 0,
        }
    }

    /// Does what the daemon does for `effect`. `is_touched` says whether an engine may still touch a slot.
    pub fn apply(&mut self, effect: Effect, is_touched: impl Fn(SlotId, Generation) -> bool) {
        match effect {
            Effect::Reserved { slot, generation, holders } => {
                self.give(generation);
                self.reserve(slot, generation, holders);
            }
            Effect::Freed { slot, .. } => {
                let row = self.rows.remove(&slot).unwrap_or_else(|| panic!("{slot:?} is freed, but was not in use"));
                assert!(!is_touched(slot, row.generation), "{slot:?} is freed under somebody who touches it: {row:?}");
                let is_verified = self.verifying.iter().any(|(_, s, g, _)| (*s, *g) == (slot, row.generation));
                assert!(!is_verified, "{slot:?} is freed while it is being read to verify it");
                assert!(self.audited.iter().all(|(_, audited)| *audited != slot), "{slot:?} is freed under an audit");
            }
            Effect::Held { slot, holders } => self.row(slot).holders = holders,
            Effect::Fenced { slot } => {
                let row = self.row(slot);
                (row.key, row.is_fenced) = (None, true);
            }
            Effect::Ready { slot, generation, .. } => {
                let row = self.row(slot);
                assert!(
                    row.generation == generation && row.key.is_some() && !row.is_fenced,
                    "{slot:?} is ready: {row:?}"
                );
            }
            Effect::ExtentMade { first_unit, units, slot_bytes } => self.make_extent(first_unit, units, slot_bytes),
            Effect::ExtentCleared { first_unit, .. } if self.excluded.contains_key(&first_unit) => {
                let holders = self.excluded.remove(&first_unit);
                assert_eq!(holders, Some(0), "unit {first_unit} is used again under somebody who touches it");
            }
            Effect::ExtentCleared { first_unit, units } => {
                let extent = self.extents.remove(&first_unit).expect("a cleared extent was made");
                assert_eq!(extent.units, units, "the extent at unit {first_unit} has another length");
                assert_eq!(
                    self.rows_of(first_unit, extent).count(),
                    0,
                    "extent {first_unit} is cleared with rows in it"
                );
            }
            Effect::Move { from, slot, generation, to, to_slot } => {
                let row = self.row(slot);
                assert!(row.generation == generation && row.trust != Trust::Verifying, "{slot:?} is moved: {row:?}");
                assert!(!row.is_fenced, "{slot:?} is moved: {row:?}");
                let target = self.row(to_slot);
                assert!(target.key.is_none() && target.holders == 0, "{to_slot:?} is moved to: {target:?}");
                self.moving.push(Moving { from, at: (slot, generation), to, to_slot });
            }
            // What moves between tiers is kept in `tiers`.
            Effect::Promote { .. } | Effect::WriteBack { .. } | Effect::Touch { .. } | Effect::PurgeTiers { .. } => {}
            Effect::PoolPurged { namespace } => {
                let is_its = |row: &&Row| row.key.is_some_and(|key| key.short == namespace) && !row.is_fenced;
                let left = self.rows.values().find(is_its);
                assert!(left.is_none(), "{namespace:?} is purged, and a restart would bring back {left:?}");
            }
            Effect::Verify { block, slot, generation, finder } => {
                let row = self.row(slot);
                let trust = if finder == Finder::Restart { Trust::Unverified } else { Trust::Verified };
                assert_eq!((row.generation, row.trust), (generation, trust), "{slot:?} to verify for {finder:?}");
                row.trust = Trust::Verifying;
                self.verifying.push((block, slot, generation, finder));
            }
        }
    }

    fn give(&mut self, generation: Generation) {
        assert!(generation.0 > self.last_generation, "{generation:?} is given out twice");
        self.last_generation = generation.0;
    }

    pub fn row(&mut self, slot: SlotId) -> &mut Row {
        self.rows.get_mut(&slot).unwrap_or_else(|| panic!("{slot:?} is not in use"))
    }

    /// The block that a lookup for `key` may find.
    pub fn resident(&self, key: &Key) -> Option<(SlotId, &Row)> {
        let mut found = self.rows.iter().filter(|(_, row)| row.key == Some(*key) && !row.is_fenced);
        let one = found.next().map(|(slot, row)| (*slot, row));
        assert!(found.next().is_none(), "{key:?} is in two slots");
        one
    }

    /// Nobody of this number touches what cannot be read any more.
    pub fn let_go(&mut self, instance: Instance) {
        self.excluded.values_mut().for_each(|holders| *holders &= !instance.bit());
    }

    /// Whether the slot lies where nothing is known any more.
    pub fn is_excluded(&self, slot: SlotId) -> bool {
        self.excluded.contains_key(&((slot.offset() / self.unit_bytes) as u32))
    }

    pub fn rows_of(&self, first_unit: u32, extent: Extent) -> impl Iterator<Item = (&SlotId, &Row)> {
        let page = |unit: u32| SlotId((u64::from(unit) * self.unit_bytes / PAGE_BYTES) as u32);
        self.rows.range(page(first_unit)..page(first_unit + extent.units))
    }

    fn reserve(&mut self, slot: SlotId, generation: Generation, holders: u64) {
        let unit = (slot.offset() / self.unit_bytes) as u32;
        let (first, extent) = self.extents.range(..=unit).next_back().expect("a reserved slot lies in an extent");
        let within = slot.offset() - u64::from(*first) * self.unit_bytes;
        let end = u64::from(extent.units) * self.unit_bytes;
        let slot_bytes = extent.slot_bytes;
        assert!(within.is_multiple_of(slot_bytes) && within + slot_bytes <= end, "{slot:?} is no slot of its extent");
        if let Some((before, row)) = self.rows.range(..=slot).next_back() {
            assert!(
                before.offset() + row.slot_bytes <= slot.offset(),
                "{slot:?} is handed out over {before:?}: {row:?}"
            );
        }
        if let Some((behind, row)) = self.rows.range(slot..).next() {
            assert!(slot.offset() + slot_bytes <= behind.offset(), "{slot:?} is handed out over {behind:?}: {row:?}");
        }
        let row = Row {
            generation,
            holders,
            slot_bytes,
            key: None,
            trust: Trust::Verified,
            is_corrupt: false,
            is_fenced: false,
        };
        self.rows.insert(slot, row);
    }

    fn make_extent(&mut self, first_unit: u32, units: u32, slot_bytes: u64) {
        const REGISTRATION_BYTES: u64 = 1 << 30;
        let bytes = u64::from(units) * self.unit_bytes;
        let start = u64::from(first_unit) * self.unit_bytes;
        assert!(slot_bytes <= bytes, "an extent of {bytes} bytes holds no slot of {slot_bytes}");
        assert_eq!(start / REGISTRATION_BYTES, (start + bytes - 1) / REGISTRATION_BYTES, "crosses a registration");
        let before = self.extents.range(..=first_unit).next_back();
        assert!(before.is_none_or(|(first, extent)| first + extent.units <= first_unit), "extents overlap");
        let behind = self.extents.range(first_unit..).next();
        assert!(behind.is_none_or(|(first, _)| first_unit + units <= *first), "extents overlap");
        assert!(self.excluded.range(first_unit..first_unit + units).next().is_none(), "an excluded unit is used");
        self.extents.insert(first_unit, Extent { units, slot_bytes });
    }
}
