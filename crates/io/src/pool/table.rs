//! The `table` file: what each slot holds, and which units form which extent.
//!
//! Invariants: only the daemon maps it, and stores nothing but whole words; a slot's state word is stored
//! after all that it speaks for (release), so a crash at any instruction leaves the slot in its old or its new
//! state; a ready entry carries a checksum over itself, its place and its generation. Holders lie there twice
//! and are read as the union, so that a crash between the two, or one flipped bit, adds holders and never
//! loses one.
//!
//! The entry of an extent's `k`th slot is the `k`th from the extent's first page number: entries lie densely,
//! and only as much of the sparse file has memory as there are slots.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use forebay_core::{Error, ErrorKind, Generation, Result, SlotId};

use super::format::*;
use super::geometry::{Extent, Geometry};
use super::map::{Access, Region};
use super::order;

/// The ceiling of generations is recorded anew once in this many: one store more, at no cost.
const CEILING_STEP: u32 = 1 << 16;

/// See the module's head.
pub(super) struct Table {
    file: File,
    header: Region,
    entries: Region,
    geometry: Geometry,
    epoch: u32,
    first_generation: Generation,
    /// For each unit the extent it is part of, so that an entry is found without reading the file.
    extents: Vec<AtomicU64>,
}

/// What the table says about its units.
#[derive(Default)]
pub(super) struct Units {
    pub extents: Vec<Extent>,
    /// Units whose record is damaged, and those behind that may be part of the same extent.
    pub unreadable: Vec<u32>,
}

/// What a slot was when the pool was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecoveredSlot {
    /// Number of its first page.
    pub slot: SlotId,
    /// Bytes of the slot, as its extent says.
    pub slot_bytes: u64,
    /// The published number: the last owner's, or one that never was an owner's.
    pub generation: Generation,
    /// Instances that were handed the slot's offset and may still touch it.
    pub holders: u64,
    /// What the table says of its content.
    pub state: SlotState,
}

/// The content of a recovered slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// It holds no block and has no owner.
    Free,
    /// It holds no block. Since boot epoch `epoch` it was being filled, by its holders or by the I/O of a daemon that
    /// died; or it is fenced: what it held became ready then and counts no more, and its holders may still read it.
    Reserved {
        /// The start of the daemon in which it was reserved or fenced.
        epoch: u32,
    },
    /// Whole as far as the table can tell; its bytes are not verified.
    Ready(Entry),
    /// Neither of these can be believed.
    Torn,
}

impl Table {
    /// The lock of `file` goes with the descriptor: a process that a hung disk keeps in the kernel keeps its mappings,
    /// which are of a description of their own.
    pub fn map(file: File, header: &Header) -> io::Result<(Table, Units)> {
        let Header { geometry, epoch, ceiling, .. } = *header;
        let bytes = u64::from(geometry.pages) * ENTRY_BYTES;
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mapped = File::options().read(true).write(true).open(again)?;
        let head = Region::map(&mapped, 0, HEADER_BYTES, Access::ReadWrite)?;
        head.populate(0..head.len())?;
        let entries = Region::map(&mapped, ENTRIES_AT, bytes, Access::ReadWrite)?;
        let extents = (0..geometry.units).map(|_| AtomicU64::new(0)).collect();
        let table = Table { file, header: head, entries, geometry, epoch, first_generation: ceiling, extents };
        let units = table.read_units()?;
        units.extents.iter().for_each(|extent| table.remember(extent));
        Ok((table, units))
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Takes memory for an entry for each of the extent's slots, whatever stands there. Errors with `Full` where the
    /// filesystem has none.
    pub fn make_room(&self, extent: &Extent) -> Result<()> {
        assert!(self.geometry.admits(extent), "{extent:?} does not fit {:?}", self.geometry);
        let start = self.first_entry(extent) * ENTRY_BYTES as usize;
        let end = start + self.geometry.slots(extent) as usize * ENTRY_BYTES as usize;
        let populated = self.entries.populate(start..end);
        // Written again, the word of the unit has its page too.
        let written = populated.and_then(|()| self.write_unit(extent.first_unit, self.read_unit(extent.first_unit)?));
        written.map_err(no_room)
    }

    /// Gives the units' slots an entry each. Errors with `Full` where the filesystem has no room for them.
    pub fn set_extent(&self, extent: &Extent) -> Result<()> {
        let units = extent.first_unit..extent.first_unit + extent.units;
        assert!(units.clone().all(|unit| self.extent_at(unit).is_none()), "{extent:?} overlaps another");
        self.make_room(extent)?;
        for word in self.entries_of(extent).flat_map(|entry| &entry[..SEALED_AT]) {
            // Left from an extent whose record was damaged; everywhere else they are zero already.
            if word.load(Relaxed) != 0 {
                word.store(0, Relaxed);
            }
        }
        self.write_unit(extent.first_unit, encode_extent(extent)).map_err(no_room)?;
        self.remember(extent);
        Ok(())
    }

    /// Forgets the extent that begins at `first_unit`, all of whose slots must be free, or whatever damaged
    /// record stands there.
    pub fn clear_extent(&self, first_unit: u32) -> Result<()> {
        let extent = self.extent_at(first_unit);
        if let Some(extent) = &extent {
            assert!(extent.first_unit == first_unit, "unit {first_unit} lies inside {extent:?}");
            let slots = (0..self.geometry.slots(extent)).map(|index| self.geometry.slot(extent, index));
            slots.for_each(|slot| self.expect_free(slot));
        }
        let cannot = |error| Error::new(ErrorKind::Io, "cannot write the pool's table").source(error);
        self.write_unit(first_unit, 0).map_err(cannot)?;
        for unit in extent.map_or(0..0, |extent| extent.first_unit..extent.first_unit + extent.units) {
            self.extents[unit as usize].store(0, Relaxed);
        }
        Ok(())
    }

    /// Later than any generation that was published before the pool was opened.
    pub fn first_generation(&self) -> Generation {
        self.first_generation
    }

    /// Makes sure that the recorded ceiling is later than `generation`, which is about to be published. Numbers
    /// wrap around, so "later" means the nearer way.
    pub fn raise_ceiling(&self, generation: Generation) {
        let word = &self.header.words()[CEILING_WORD_AT as usize / 8];
        let ceiling = word.load(Relaxed) as u32;
        if generation.0.wrapping_sub(ceiling) < 1 << 31 {
            word.store(echoed(generation.0.wrapping_add(CEILING_STEP)), Release);
        }
    }

    pub fn reserve(&self, slot: SlotId, generation: Generation) {
        self.expect_free(slot);
        let entry = self.entry(slot);
        entry[SEALED_AT + EPOCH_WORD].store(u64::from(self.epoch) << 32, Relaxed);
        entry[STATE_WORD].store(state_word(RESERVED, generation), Release);
    }

    /// The core knows that the slot is free; where memory says another thing, it is repaired. What no flipped bit
    /// makes, a whole state or a holder in both places, says that the core is wrong.
    fn expect_free(&self, slot: SlotId) {
        let entry = self.entry(slot);
        let [word, holders, copy] = [STATE_WORD, HOLDERS_WORD, HOLDERS_COPY_WORD].map(|at| entry[at].load(Relaxed));
        assert!(!matches!(split(word).0, RESERVED | READY), "{slot:?} is reserved while it has an owner");
        assert!(holders & copy == 0, "{slot:?} is reserved while {:#x} may touch it", holders & copy);
        if word | holders | copy != 0 {
            tracing::warn!(slot = slot.0, "the table's entry of a free slot was damaged; it is repaired");
            self.free(slot);
        }
    }

    /// `generation` is the published one. A damaged state word does no harm: its owner came back after all.
    pub fn ready(&self, slot: SlotId, generation: Generation, content: &Entry) {
        let (entry, slot_bytes) = (self.entry(slot), self.extent_of(slot).slot_bytes);
        let (state, _) = split(entry[STATE_WORD].load(Relaxed));
        assert!(state != READY, "{slot:?} became ready twice");
        assert!((1..=slot_bytes).contains(&content.length), "{slot:?} of {slot_bytes} bytes holds {content:?}");
        let sealed = seal_entry(content, slot, generation, self.epoch);
        order::seal(&entry[STATE_WORD], &entry[SEALED_AT..], &sealed, state_word(READY, generation));
    }

    /// `generation` is the published one. What the slot was matters no more: a damaged word is put right.
    pub fn fence(&self, slot: SlotId, generation: Generation) {
        self.entry(slot)[STATE_WORD].store(state_word(RESERVED, generation), Release);
    }

    /// Holders go first, so that a free slot never has any.
    pub fn free(&self, slot: SlotId) {
        self.set_holders(slot, 0);
        self.entry(slot)[STATE_WORD].store(0, Release);
    }

    pub fn set_holders(&self, slot: SlotId, holders: u64) {
        let entry = self.entry(slot);
        entry[HOLDERS_WORD].store(holders, Release);
        entry[HOLDERS_COPY_WORD].store(holders, Release);
    }

    /// What a ready slot holds; `generation` is the published one.
    pub fn content(&self, slot: SlotId, generation: Generation) -> Option<Entry> {
        self.find(slot)?;
        match self.state(slot, generation) {
            SlotState::Ready(content) => Some(content),
            SlotState::Free | SlotState::Reserved { .. } | SlotState::Torn => None,
        }
    }

    /// What the `index`th slot of `extent` is, given the generation published for it.
    pub fn recover(&self, extent: &Extent, index: u32, published: impl Fn(SlotId) -> Generation) -> RecoveredSlot {
        let slot = self.geometry.slot(extent, index);
        let (generation, holders) = (published(slot), holders_of(self.entry(slot)));
        let state = match self.state(slot, generation) {
            SlotState::Free if holders != 0 => SlotState::Torn,
            state => state,
        };
        RecoveredSlot { slot, slot_bytes: extent.slot_bytes, generation, holders, state }
    }

    fn state(&self, slot: SlotId, published: Generation) -> SlotState {
        let (entry, slot_bytes) = (self.entry(slot), self.extent_of(slot).slot_bytes);
        let (word, sealed) = order::unseal::<_, SEALED_WORDS>(&entry[STATE_WORD], &entry[SEALED_AT..]);
        let (state, generation) = split(word);
        let fits = |content: &Entry| (1..=slot_bytes).contains(&content.length);
        match state {
            0 if word == 0 => SlotState::Free,
            // An owner is published before the table changes: one that differs is damaged, or was being freed.
            _ if generation != published => SlotState::Torn,
            RESERVED => SlotState::Reserved { epoch: (sealed[EPOCH_WORD] >> 32) as u32 },
            READY => unseal_entry(&sealed, slot, generation).filter(fits).map_or(SlotState::Torn, SlotState::Ready),
            _ => SlotState::Torn,
        }
    }

    /// The extent that `slot` begins in; `slot` must be one of its slots.
    fn extent_of(&self, slot: SlotId) -> Extent {
        let extent = self.extent_at(self.geometry.unit_of(slot));
        extent.unwrap_or_else(|| panic!("{slot:?} lies in no extent"))
    }

    fn extent_at(&self, unit: u32) -> Option<Extent> {
        let word = self.extents.get(unit as usize)?.load(Relaxed);
        let (first_unit, slot_pages, units) = (word as u32 & 0xffff, word >> 16 & 0xffff_ffff, (word >> 48) as u32);
        (word != 0).then(|| Extent { first_unit, units, slot_bytes: slot_pages * forebay_core::PAGE_BYTES })
    }

    fn remember(&self, extent: &Extent) {
        let (first_unit, slot_pages) = (u64::from(extent.first_unit), u64::from(extent.slot_pages()));
        let word = first_unit | slot_pages << 16 | u64::from(extent.units) << 48;
        for unit in extent.first_unit..extent.first_unit + extent.units {
            self.extents[unit as usize].store(word, Relaxed);
        }
    }

    fn entry(&self, slot: SlotId) -> &[AtomicU64] {
        self.find(slot).unwrap_or_else(|| panic!("{slot:?} is not where a slot begins"))
    }

    /// The entry of `slot`, if a slot of an extent begins there.
    fn find(&self, slot: SlotId) -> Option<&[AtomicU64]> {
        let extent = self.extent_at(self.geometry.unit_of(slot))?;
        let (first, pages) = (self.geometry.slot(&extent, 0).0, extent.slot_pages());
        let (index, rest) = ((slot.0 - first) / pages, (slot.0 - first) % pages);
        let is_slot = rest == 0 && index < self.geometry.slots(&extent);
        is_slot.then(|| self.words(self.first_entry(&extent) + index as usize))
    }

    fn entries_of(&self, extent: &Extent) -> impl Iterator<Item = &[AtomicU64]> {
        let first = self.first_entry(extent);
        (first..first + self.geometry.slots(extent) as usize).map(|index| self.words(index))
    }

    fn first_entry(&self, extent: &Extent) -> usize {
        self.geometry.slot(extent, 0).0 as usize
    }

    fn words(&self, entry: usize) -> &[AtomicU64] {
        &self.entries.words()[entry * ENTRY_WORDS..][..ENTRY_WORDS]
    }

    fn read_units(&self) -> io::Result<Units> {
        let mut bytes = vec![0; self.geometry.units as usize * 8];
        self.file.read_exact_at(&mut bytes, UNITS_AT)?;
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
        Ok(sort_units(&self.geometry, &words))
    }

    fn read_unit(&self, unit: u32) -> io::Result<u64> {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, UNITS_AT + u64::from(unit) * 8)?;
        Ok(u64::from_le_bytes(word))
    }

    fn write_unit(&self, unit: u32, word: u64) -> io::Result<()> {
        self.file.write_all_at(&word.to_le_bytes(), UNITS_AT + u64::from(unit) * 8)
    }
}

fn no_room(error: io::Error) -> Error {
    Error::new(ErrorKind::Full, "cannot take memory for the pool's table").source(error)
}

/// Tells extents from damaged records. Of two extents that overlap neither is believed. How long an extent was whose
/// record is damaged is unknown: up to the next record that can be read, all may have been its own.
fn sort_units(geometry: &Geometry, words: &[u64]) -> Units {
    let mut units = Units::default();
    let read = |unit: u32| match decode_extent(unit, words[unit as usize]) {
        Ok(Some(extent)) if !geometry.admits(&extent) => Err(()),
        read => read,
    };
    let mut unit = 0;
    while unit < geometry.units {
        let claimed = match read(unit) {
            Ok(None) => 1,
            Ok(Some(extent)) => {
                let inner = &words[unit as usize + 1..(unit + extent.units) as usize];
                match inner.iter().all(|word| *word == 0) {
                    true => units.extents.push(extent),
                    false => units.unreadable.extend(unit..unit + extent.units),
                }
                extent.units
            }
            Err(()) => {
                let reach = unit + geometry.longest_extent(unit);
                let end = (unit + 1..reach).find(|unit| matches!(read(*unit), Ok(Some(_)))).unwrap_or(reach);
                units.unreadable.extend(unit..end);
                end - unit
            }
        };
        unit += claimed;
    }
    units
}

fn holders_of(entry: &[AtomicU64]) -> u64 {
    entry[HOLDERS_WORD].load(Relaxed) | entry[HOLDERS_COPY_WORD].load(Relaxed)
}

fn split(word: u64) -> (u32, Generation) {
    ((word >> 32) as u32, Generation(word as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_extent_record_costs_its_units_and_no_others() {
        let geometry = Geometry::new(16 << 20, Some(2 << 20)).unwrap();
        let extent = |first_unit, units| Extent { first_unit, units, slot_bytes: 65_536 };
        let mut words = [0; 8];
        for good in [extent(0, 2), extent(3, 1), extent(4, 4)] {
            words[good.first_unit as usize] = encode_extent(&good);
        }
        assert_eq!(sort_units(&geometry, &words).extents, [extent(0, 2), extent(3, 1), extent(4, 4)]);
        for bit in 0..64 {
            let mut flipped = words;
            flipped[3] ^= 1 << bit;
            let units = sort_units(&geometry, &flipped);
            assert_eq!((units.extents, units.unreadable), (vec![extent(0, 2), extent(4, 4)], vec![3]), "bit {bit}");
        }
        words[5] = encode_extent(&extent(5, 1));
        let units = sort_units(&geometry, &words);
        assert_eq!((units.extents, units.unreadable), (vec![extent(0, 2), extent(3, 1)], vec![4, 5, 6, 7]));
    }

    /// Every way to put extents into `units` units from `first_unit` on.
    fn layouts(first_unit: u32, units: u32) -> Vec<Vec<Extent>> {
        let whole = vec![Extent { first_unit, units, slot_bytes: 65_536 }];
        if units == 1 {
            return vec![Vec::new(), whole];
        }
        let (front, back) = (layouts(first_unit, units / 2), layouts(first_unit + units / 2, units / 2));
        let pairs = front.iter().flat_map(|front| back.iter().map(|back| [&front[..], &back[..]].concat()));
        pairs.chain([whole]).collect()
    }

    #[test]
    fn whatever_bit_of_the_records_flips_no_unit_of_an_extent_counts_as_free() {
        let geometry = Geometry::new(16 << 20, Some(2 << 20)).unwrap();
        for layout in layouts(0, 8) {
            let mut words = [0; 8];
            layout.iter().for_each(|extent| words[extent.first_unit as usize] = encode_extent(extent));
            assert_eq!(sort_units(&geometry, &words).extents, layout);
            for (word, bit) in (0..8).flat_map(|word| (0..64).map(move |bit| (word, bit))) {
                let mut flipped = words;
                flipped[word] ^= 1 << bit;
                let found = sort_units(&geometry, &flipped);
                let is_lost = |extent: &Extent| {
                    let units = extent.first_unit..extent.first_unit + extent.units;
                    !found.extents.contains(extent) && !units.clone().all(|unit| found.unreadable.contains(&unit))
                };
                let lost = layout.iter().find(|extent| is_lost(extent));
                assert_eq!(lost, None, "bit {bit} of unit {word} in {layout:?}");
                assert!(
                    found.extents.iter().all(|extent| layout.contains(extent)),
                    "bit {bit} of unit {word} made one"
                );
            }
        }
    }

    #[test]
    fn a_damaged_record_costs_no_more_units_than_the_longest_extent_that_could_begin_there() {
        let geometry = Geometry::new(3 << 30, Some(256 << 20)).unwrap();
        for (unit, longest) in [(0, 4), (1, 1), (2, 2), (4, 4), (10, 2)] {
            let mut words = [0; 12];
            words[unit as usize] = 1;
            let unreadable = sort_units(&geometry, &words).unreadable;
            assert_eq!(unreadable, (unit..unit + longest).collect::<Vec<_>>());
        }
        let in_five_units = Geometry::new(10 << 20, Some(2 << 20)).unwrap();
        assert_eq!(sort_units(&in_five_units, &[1, 0, 0, 0, 0]).unreadable, [0, 1, 2, 3]);
    }
}
