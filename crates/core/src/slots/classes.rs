//! The pool's memory: units, extents and exact-size classes.
//!
//! Invariants: a slot is in one extent, an extent in one class, a unit in at most one extent; a slot is on its
//! extent's free list or in its slot map, never both; an extent is a naturally aligned run of units and never
//! crosses a 1 GiB boundary, because GPU and disk registrations are made in pieces of 1 GiB; units of a run that
//! is being drained go to nobody before all of them are empty. At most 5 % of an extent is lost to its slot size
//! where a run of free units allows it.

use std::hint::black_box;

use crate::key::{BlockId, ClassId, PAGE_BYTES, SlotId};

const REGISTRATION_BYTES: u64 = 1 << 30;

/// Units side by side, as many as a power of two, beginning at a multiple of their number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub first_unit: u32,
    pub units: u32,
}

/// Index of an extent; reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct ExtentId(pub u32);

pub(crate) struct Extent {
    pub first_unit: u32,
    pub units: u32,
    pub class: ClassId,
    pub slots: u32,
    /// The clock of the core when it was.
    pub made: u32,
    /// No slot is taken from it any more; it is given back when the last one is free.
    pub is_draining: bool,
    /// Block id + 1 of each slot in use, 0 where free.
    map: Vec<u32>,
    free: Vec<u32>,
    /// Slots from here on were never used.
    fresh: u32,
}

pub(crate) struct Class {
    pub slot_bytes: u64,
    /// Slots in extents that are not draining.
    pub slots: u64,
    /// Slots in extents that are.
    pub draining: u64,
    pub used: u64,
    /// Extents with a free slot, not draining.
    available: Vec<ExtentId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// Its memory is not populated yet: touching it could fail.
    Absent,
    Free,
    Used(ExtentId),
    /// Empty, in a run that is not.
    Drained,
    /// Somebody may still touch what an earlier epoch had there.
    Excluded {
        is_populated: bool,
    },
}

/// Given the first unit, the number of units and the bytes of a slot: whether an extent may be made there.
pub(crate) type HasRoom = Box<dyn FnMut(u32, u32, u64) -> bool + Send>;

pub(crate) struct Space {
    unit_bytes: u64,
    units: Vec<Unit>,
    free_units: u32,
    extents: Vec<Option<Extent>>,
    classes: Vec<Class>,
    has_room: HasRoom,
    is_refused: bool,
}

impl Space {
    /// A pool of `units` units, none of which may be used yet.
    pub fn new(unit_bytes: u64, units: u32) -> Space {
        assert!(unit_bytes.is_power_of_two() && (PAGE_BYTES..=REGISTRATION_BYTES).contains(&unit_bytes));
        let pages = u64::from(units) * (unit_bytes / PAGE_BYTES);
        assert!(pages <= u64::from(u32::MAX), "slots are named by 32-bit page numbers, {pages} pages are too many");
        let units = vec![Unit::Absent; units as usize];
        let has_room = Box::new(|_, _, _| true);
        Space {
            unit_bytes,
            units,
            free_units: 0,
            extents: Vec::new(),
            classes: Vec::new(),
            has_room,
            is_refused: false,
        }
    }

    /// `has_room` is asked before each new extent.
    pub fn ask_before_growing(&mut self, has_room: HasRoom) {
        self.has_room = has_room;
    }

    /// `unit`'s memory is populated, and may be used. A second call, or a call for a unit in use, changes nothing.
    pub fn populate(&mut self, unit: u32) {
        match &mut self.units[unit as usize] {
            Unit::Excluded { is_populated } => *is_populated = true,
            absent @ Unit::Absent => {
                *absent = Unit::Free;
                self.free_units += 1;
            }
            Unit::Free | Unit::Used(_) | Unit::Drained => {}
        }
    }

    /// `unit` is not used until [`Space::readmit`].
    pub fn exclude(&mut self, unit: u32) {
        assert!(self.units[unit as usize] == Unit::Absent, "unit {unit} is excluded while in use");
        self.units[unit as usize] = Unit::Excluded { is_populated: false };
    }

    /// The units that were excluded are as any other from now on. Returns them.
    pub fn readmit(&mut self) -> Vec<u32> {
        let mut readmitted = Vec::new();
        for (number, unit) in (0..).zip(&mut self.units) {
            if let Unit::Excluded { is_populated } = *unit {
                *unit = if is_populated { Unit::Free } else { Unit::Absent };
                self.free_units += u32::from(is_populated);
                readmitted.push(number);
            }
        }
        readmitted
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.units.len() as u64 * self.unit_bytes
    }

    /// Bytes that may be used or are in use.
    pub fn populated_bytes(&self) -> u64 {
        let is_there = |unit: &&Unit| matches!(unit, Unit::Free | Unit::Used(_) | Unit::Drained);
        self.units.iter().filter(is_there).count() as u64 * self.unit_bytes
    }

    /// The class of this slot size, made if new. `None` if no extent could ever hold such a slot, or there are
    /// too many sizes already.
    pub fn class(&mut self, slot_bytes: u64) -> Option<ClassId> {
        if let Some(at) = self.classes.iter().position(|class| class.slot_bytes == slot_bytes) {
            return Some(ClassId(at as u16));
        }
        let is_possible =
            slot_bytes > 0 && slot_bytes.is_multiple_of(PAGE_BYTES) && slot_bytes <= self.max_slot_bytes();
        if !is_possible || self.classes.len() >= Space::MAX_CLASSES {
            return None;
        }
        self.classes.push(Class { slot_bytes, slots: 0, draining: 0, used: 0, available: Vec::new() });
        Some(ClassId(self.classes.len() as u16 - 1))
    }

    /// Different slot sizes in one pool; each model has one a group.
    pub const MAX_CLASSES: usize = 256;

    /// Bytes of the longest extent this pool could have.
    pub fn max_slot_bytes(&self) -> u64 {
        let longest = self.units.len().checked_ilog2().map_or(0, |bits| 1 << bits);
        (longest * self.unit_bytes).min(REGISTRATION_BYTES)
    }

    pub fn classes(&self) -> impl Iterator<Item = (ClassId, &Class)> {
        self.classes.iter().enumerate().map(|(i, class)| (ClassId(i as u16), class))
    }

    pub fn class_info(&self, class: ClassId) -> &Class {
        &self.classes[class.0 as usize]
    }

    pub fn extent(&self, id: ExtentId) -> &Extent {
        self.extents[id.0 as usize].as_ref().expect("an extent id names a live extent")
    }

    pub fn extents_of(&self, class: ClassId) -> impl Iterator<Item = (ExtentId, &Extent)> {
        self.extents.iter().enumerate().filter_map(move |(i, extent)| {
            extent.as_ref().filter(|extent| extent.class == class).map(|extent| (ExtentId(i as u32), extent))
        })
    }

    pub fn has_free(&self, class: ClassId) -> bool {
        !self.classes[class.0 as usize].available.is_empty()
    }

    /// A free slot of `class`, if one of its extents has one. It belongs to `block` from now on.
    pub fn take(&mut self, class: ClassId, block: BlockId) -> Option<SlotId> {
        let id = *self.classes[class.0 as usize].available.last()?;
        let pages = self.slot_pages(class);
        let first_page = self.first_page(self.extent(id).first_unit);
        let extent = self.extents[id.0 as usize].as_mut().expect("available extents live");
        let index = extent.free.pop().unwrap_or_else(|| {
            extent.fresh += 1;
            extent.fresh - 1
        });
        extent.map[index as usize] = block.0 + 1;
        let is_full = extent.free.is_empty() && extent.fresh == extent.slots;
        let class = &mut self.classes[class.0 as usize];
        class.used += 1;
        if is_full {
            class.available.pop();
        }
        Some(SlotId(first_page + index * pages))
    }

    /// The slot is free again. Returns the extent if it was draining and this was its last slot; the caller
    /// then calls [`Space::give_back`].
    pub fn free(&mut self, slot: SlotId) -> Option<ExtentId> {
        let (id, index) = self.locate(slot).expect("a freed slot lies in an extent");
        let extent = self.extents[id.0 as usize].as_mut().expect("located extents live");
        assert!(extent.map[index as usize] != 0, "slot {slot:?} is freed twice");
        extent.map[index as usize] = 0;
        let was_full = extent.free.is_empty() && extent.fresh == extent.slots;
        extent.free.push(index);
        let class = &mut self.classes[extent.class.0 as usize];
        class.used -= 1;
        if was_full && !extent.is_draining {
            class.available.push(id);
        }
        (extent.is_draining && extent.used() == 0).then_some(id)
    }

    /// Whether `slot` is the start of a slot that nothing is in.
    pub fn is_free(&self, slot: SlotId) -> bool {
        self.locate(slot).is_some_and(|(id, index)| self.extent(id).map[index as usize] == 0)
    }

    /// The blocks in two slots in use are each in the other's from now on.
    pub fn exchange(&mut self, one: SlotId, other: SlotId) {
        let [one, other] = [one, other].map(|slot| self.locate(slot).expect("a slot in use lies in an extent"));
        let block = |space: &Space, (id, index): (ExtentId, u32)| space.extent(id).map[index as usize];
        let blocks = [block(self, one), block(self, other)];
        for ((id, index), block) in [other, one].into_iter().zip(blocks) {
            self.extents[id.0 as usize].as_mut().expect("located extents live").map[index as usize] = block;
        }
    }

    /// The block in `slot`, if `slot` is the start of a slot that is in use.
    pub fn block_at(&self, slot: SlotId) -> Option<BlockId> {
        let (id, index) = self.locate(slot)?;
        self.extent(id).map[index as usize].checked_sub(1).map(BlockId)
    }

    /// Brings what is known about the slots into the processor's cache.
    pub fn touch_lines(&self, slots: impl Iterator<Item = SlotId>) {
        black_box(slots.fold(0, |sum, slot| sum ^ self.block_at(slot).map_or(0, |block| block.0)));
    }

    /// The class of the extent that `slot` lies in.
    pub fn class_at(&self, slot: SlotId) -> Option<ClassId> {
        self.locate(slot).map(|(id, _)| self.extent(id).class)
    }

    /// Blocks in slots `from..to` of an extent.
    pub fn blocks_in(&self, id: ExtentId, from: u32, to: u32) -> impl Iterator<Item = BlockId> {
        let extent = self.extent(id);
        extent.map[from as usize..to.min(extent.slots) as usize].iter().filter_map(|b| b.checked_sub(1).map(BlockId))
    }

    /// Slots of the extent that `class` would be given next, if units for it were free.
    pub fn extent_slots(&self, class: ClassId) -> u64 {
        let slot_bytes = self.classes[class.0 as usize].slot_bytes;
        u64::from(self.best_run(slot_bytes)) * self.unit_bytes / slot_bytes
    }

    /// Whether there are as many free units as one more extent of `class` takes at least, side by side or not.
    pub fn may_grow(&self, class: ClassId) -> bool {
        self.free_units >= self.smallest_run(class)
    }

    /// Whether the last [`Space::grow`] found units and no room: more units would not help.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Gives a run of free units to `class` at this time of the core's clock. `None` if there is no run that fits, or
    /// no memory for what is kept of its slots.
    pub fn grow(&mut self, class: ClassId, clock: u32) -> Option<ExtentId> {
        self.is_refused = false;
        if self.free_units == 0 {
            return None;
        }
        let (smallest, slot_bytes) = (self.smallest_run(class), self.classes[class.0 as usize].slot_bytes);
        let mut units = self.best_run(slot_bytes).max(smallest);
        while units >= smallest {
            if let Some(first) = self.find_run(units) {
                self.is_refused = !(self.has_room)(first, units, slot_bytes);
                if !self.is_refused {
                    return Some(self.place_extent(class, first, units, clock));
                }
            }
            // A shorter run wastes more, but more than nothing is there to gain.
            units /= 2;
        }
        None
    }

    /// Puts an extent of an earlier epoch back where it was; no slot is taken from it before [`Space::finish_restore`].
    /// `None` if that is not possible any more.
    pub fn restore(&mut self, slot_bytes: u64, first_unit: u32, units: u32) -> Option<ExtentId> {
        let range = first_unit as usize..first_unit.checked_add(units)? as usize;
        let is_free = self.units.get(range.clone())?.iter().all(|unit| matches!(unit, Unit::Absent | Unit::Free));
        let is_run = units.is_power_of_two() && first_unit.is_multiple_of(units);
        let bytes = u64::from(units) * self.unit_bytes;
        if !is_free || !is_run || bytes > REGISTRATION_BYTES || slot_bytes > bytes {
            return None;
        }
        let class = self.class(slot_bytes)?;
        // An extent was only ever made of populated units.
        range.for_each(|unit| self.populate(unit as u32));
        let id = self.place_extent(class, first_unit, units, 0);
        self.classes[class.0 as usize].available.pop();
        Some(id)
    }

    /// Takes the very slot that held a block in an earlier epoch. `None` if it is no slot, or taken.
    pub fn restore_slot(&mut self, slot: SlotId, block: BlockId) -> Option<()> {
        let (id, index) = self.locate(slot)?;
        let extent = self.extents[id.0 as usize].as_mut().expect("located extents live");
        if extent.map[index as usize] != 0 {
            return None;
        }
        extent.map[index as usize] = block.0 + 1;
        self.classes[extent.class.0 as usize].used += 1;
        Some(())
    }

    /// All slots of the earlier epoch are back: the rest is free.
    pub fn finish_restore(&mut self) {
        for (at, extent) in self.extents.iter_mut().enumerate().filter_map(|(at, e)| Some((at, e.as_mut()?))) {
            extent.fresh = extent.slots;
            extent.free = (0..extent.slots).rev().filter(|index| extent.map[*index as usize] == 0).collect();
            if !extent.free.is_empty() {
                self.classes[extent.class.0 as usize].available.push(ExtentId(at as u32));
            }
        }
    }

    /// The run around `id` that an extent of `class` needs, if all of it is in use or free.
    pub fn run_around(&self, id: ExtentId, class: ClassId) -> Option<Run> {
        let extent = self.extent(id);
        let units = extent.units.max(self.smallest_run(class));
        let first_unit = extent.first_unit / units * units;
        let is_usable = |unit: &Unit| match unit {
            Unit::Free => true,
            Unit::Used(id) => !self.extent(*id).is_draining,
            Unit::Absent | Unit::Drained | Unit::Excluded { .. } => false,
        };
        let all = self.units.get(first_unit as usize..(first_unit + units) as usize)?;
        all.iter().all(is_usable).then_some(Run { first_unit, units })
    }

    /// Nothing is taken from the run's extents and free units any more. Returns the extents that are empty; the
    /// caller then calls [`Space::give_back`] for each.
    pub fn drain(&mut self, run: Run) -> Vec<ExtentId> {
        let mut empty = Vec::new();
        for unit in run.first_unit..run.first_unit + run.units {
            match self.units[unit as usize] {
                Unit::Free => {
                    self.units[unit as usize] = Unit::Drained;
                    self.free_units -= 1;
                }
                Unit::Used(id) if !self.extent(id).is_draining => {
                    self.drain_extent(id);
                    empty.extend((self.extent(id).used() == 0).then_some(id));
                }
                _ => {}
            }
        }
        empty
    }

    /// The first extent of the run at or behind `unit`.
    pub fn extent_from(&self, run: Run, unit: u32) -> Option<ExtentId> {
        let units = &self.units[unit as usize..(run.first_unit + run.units) as usize];
        units.iter().find_map(|unit| if let Unit::Used(id) = unit { Some(*id) } else { None })
    }

    /// The empty, draining extent is no more. Returns its units.
    pub fn give_back(&mut self, id: ExtentId) -> Run {
        let extent = self.extents[id.0 as usize].take().expect("given-back extents live");
        assert!(extent.is_draining && extent.used() == 0, "extent {id:?} is given back while in use");
        self.classes[extent.class.0 as usize].draining -= u64::from(extent.slots);
        let (first_unit, units) = (extent.first_unit, extent.units);
        self.units[first_unit as usize..(first_unit + units) as usize].fill(Unit::Drained);
        Run { first_unit, units }
    }

    /// If all of a draining run is empty, its units are free for any class.
    pub fn finish_drain(&mut self, run: Run) -> bool {
        let units = &mut self.units[run.first_unit as usize..(run.first_unit + run.units) as usize];
        let is_empty = units.iter().all(|unit| *unit == Unit::Drained);
        if is_empty {
            units.fill(Unit::Free);
            self.free_units += run.units;
        }
        is_empty
    }

    /// Whether an extent of `class` in the run has a free slot.
    pub fn has_free_in(&self, run: Run, class: ClassId) -> bool {
        self.extents_in(run).any(|id| self.extent(id).class == class && self.extent(id).used() < self.extent(id).slots)
    }

    /// What is left of a draining run is as it was before, and its empty units are free for any class.
    pub fn give_up_drain(&mut self, run: Run) {
        for id in self.extents_in(run).collect::<Vec<_>>() {
            let extent = self.extents[id.0 as usize].as_mut().expect("an extent's units name it");
            extent.is_draining = false;
            let class = &mut self.classes[extent.class.0 as usize];
            class.slots += u64::from(extent.slots);
            class.draining -= u64::from(extent.slots);
            if extent.used() < extent.slots {
                class.available.push(id);
            }
        }
        let units = &mut self.units[run.first_unit as usize..(run.first_unit + run.units) as usize];
        for unit in units.iter_mut().filter(|unit| **unit == Unit::Drained) {
            *unit = Unit::Free;
            self.free_units += 1;
        }
    }

    /// Each extent of the run once.
    fn extents_in(&self, run: Run) -> impl Iterator<Item = ExtentId> {
        let first = move |unit: u32| self.extent_from(run, unit);
        std::iter::successors(first(run.first_unit), move |id| {
            let Extent { first_unit, units, .. } = self.extent(*id);
            first(first_unit + units)
        })
    }

    /// An extent of `class` with no slot in use.
    pub fn empty_extent(&self, class: ClassId) -> Option<ExtentId> {
        let mut available = self.classes[class.0 as usize].available.iter();
        available.find(|id| self.extent(**id).used() == 0).copied()
    }

    pub fn heap_bytes(&self) -> usize {
        let extents = self.extents.iter().flatten();
        extents.map(|extent| (extent.map.capacity() + extent.free.capacity()) * 4).sum::<usize>() + self.units.len() * 8
    }

    fn place_extent(&mut self, class: ClassId, first_unit: u32, units: u32, made: u32) -> ExtentId {
        let slots = (u64::from(units) * self.unit_bytes / self.classes[class.0 as usize].slot_bytes) as u32;
        let extent = Extent {
            first_unit,
            units,
            class,
            slots,
            made,
            is_draining: false,
            map: vec![0; slots as usize],
            free: Vec::new(),
            fresh: 0,
        };
        let at = self.extents.iter().position(Option::is_none).unwrap_or(self.extents.len());
        let id = ExtentId(at as u32);
        if at == self.extents.len() {
            self.extents.push(None);
        }
        self.extents[at] = Some(extent);
        for unit in first_unit..first_unit + units {
            self.units[unit as usize] = Unit::Used(id);
        }
        self.free_units -= units;
        let class = &mut self.classes[class.0 as usize];
        class.slots += u64::from(slots);
        class.available.push(id);
        id
    }

    fn drain_extent(&mut self, id: ExtentId) {
        let extent = self.extents[id.0 as usize].as_mut().expect("drained extents live");
        extent.is_draining = true;
        let class = &mut self.classes[extent.class.0 as usize];
        class.slots -= u64::from(extent.slots);
        class.draining += u64::from(extent.slots);
        class.available.retain(|available| *available != id);
    }

    /// Units in an extent of this slot size: the shortest run that loses at most 5 %, or if there is none, the one that
    /// loses least.
    fn best_run(&self, slot_bytes: u64) -> u32 {
        let longest = REGISTRATION_BYTES / self.unit_bytes;
        let runs = (0..=longest.ilog2()).map(|bits| 1u32 << bits);
        // Bytes lost in as many of these runs as make a registration, so that runs compare.
        let waste = |units: u32| {
            let bytes = u64::from(units) * self.unit_bytes;
            bytes % slot_bytes * (REGISTRATION_BYTES / bytes)
        };
        let fits = |units: &u32| slot_bytes <= u64::from(*units) * self.unit_bytes;
        let is_good = |units: &u32| waste(*units) * 20 <= REGISTRATION_BYTES;
        let fitting = runs.filter(fits);
        fitting.clone().find(is_good).or_else(|| fitting.min_by_key(|units| waste(*units))).unwrap_or(1)
    }

    /// Units of the shortest run that holds a slot of `class`.
    fn smallest_run(&self, class: ClassId) -> u32 {
        self.classes[class.0 as usize].slot_bytes.div_ceil(self.unit_bytes).next_power_of_two() as u32
    }

    /// First of a naturally aligned run of free units, which therefore crosses no registration.
    fn find_run(&self, units: u32) -> Option<u32> {
        if self.free_units < units {
            return None;
        }
        let runs = self.units.chunks_exact(units as usize);
        Some(runs.enumerate().find(|(_, run)| run.iter().all(|unit| *unit == Unit::Free))?.0 as u32 * units)
    }

    #[inline(always)]
    fn locate(&self, slot: SlotId) -> Option<(ExtentId, u32)> {
        // A division by the unit, which is a power of two.
        let unit = (slot.offset() >> self.unit_bytes.trailing_zeros()) as usize;
        let Unit::Used(id) = *self.units.get(unit)? else { return None };
        let extent = self.extent(id);
        let page = slot.0 - self.first_page(extent.first_unit);
        let pages = self.slot_pages(extent.class);
        (page.is_multiple_of(pages) && page / pages < extent.slots).then_some((id, page / pages))
    }

    fn first_page(&self, unit: u32) -> u32 {
        (u64::from(unit) * self.unit_bytes / PAGE_BYTES) as u32
    }

    fn slot_pages(&self, class: ClassId) -> u32 {
        (self.classes[class.0 as usize].slot_bytes / PAGE_BYTES) as u32
    }
}

impl Extent {
    /// No slot of it was ever taken.
    pub fn is_unused(&self) -> bool {
        self.fresh == 0
    }

    pub fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }
}
