//! Whatever lies in a pool's files, a daemon opens them and finds what was stored, or less.

use std::ops::Range;

use forebay_core::Instance;
use forebay_fuzz::Target;

use super::*;
use crate::pool::format::{
    ENDED_AT, ENDED_BYTES, ENTRIES_AT, ENTRY_BYTES, GENERATIONS_AT, INSTANCE_BYTES, INSTANCES_AT, NAMESPACE_BYTES,
    PURGE_BYTES, UNITS_AT,
};

/// Slots of the pool's two extents, with the numbers of the blocks that are in them.
const EXTENTS: [Extent; 2] =
    [Extent { first_unit: 0, units: 1, slot_bytes: 8192 }, Extent { first_unit: 1, units: 1, slot_bytes: 512 << 10 }];
const BLOCKS: [(SlotId, u64); 3] = [(SlotId(0), 1), (SlotId(2), 2), (SlotId(512 + 128), 3)];
const CAPACITY_BYTES: u64 = 4 * MIB;

/// Parts of files that say something: file, first byte, and their bytes.
struct Pieces(Vec<(&'static str, u64, Vec<u8>)>);

const NAMES: [&str; 5] = ["table", "generation", "birth", "namespace", "purge"];

impl Pieces {
    /// Of a pool with blocks, a reserved slot, an instance and a namespace.
    fn of(home: &Home) -> Pieces {
        let pool = home.pool(CAPACITY_BYTES);
        (0..2).for_each(|unit| pool.populate_unit(unit).unwrap());
        EXTENTS.iter().for_each(|extent| pool.set_extent(extent).unwrap());
        for (slot, number) in BLOCKS {
            store(&pool, slot, 10 + number as u32, number);
        }
        pool.reserve(SlotId(4), Generation(20));
        pool.set_holders(SlotId(4), 0x8000_0000_0000_0001);
        let engine = InstanceRecord { engine_id: b"engine".to_vec(), ranks: 8, incarnation: 7 << 90, owner: 9 << 80 };
        (0..2).for_each(|_| pool.set_instance(Instance(0), &engine).unwrap());
        pool.set_namespace(1, NamespaceId(9), "model=m", Some(7), b"layout").unwrap();
        let purge = |disks| PurgeRecord { namespace: NamespaceId(9), places: PurgePlaces { pool: true, disks } };
        (0..2).for_each(|index| pool.set_purge(index, &purge(index == 0)).unwrap());
        let ended = |index| EndedPurge { namespace: NamespaceId(8), time: (1 << 50) + u64::from(index) };
        (0..2).for_each(|index| pool.set_ended_purge(index, &ended(index)).unwrap());
        pool.set_met_disks().unwrap();
        assert!(pool.set_births(SlotId(0), Generation(11), &pool.slices(0, &[300, 300])));
        drop(pool);
        let entries = |first: u64, count: u64| {
            ("table", ENTRIES_AT + first * ENTRY_BYTES..ENTRIES_AT + (first + count) * ENTRY_BYTES)
        };
        let places: [(&str, Range<u64>); 12] = [
            ("table", 0..72),
            ("table", INSTANCES_AT..INSTANCES_AT + INSTANCE_BYTES),
            ("table", UNITS_AT..UNITS_AT + 16),
            entries(0, 4),
            entries(512, 2),
            ("generation", 0..32),
            ("generation", GENERATIONS_AT..GENERATIONS_AT + 6 * 4),
            ("generation", GENERATIONS_AT + 640 * 4..GENERATIONS_AT + 641 * 4),
            ("birth", 0..16),
            ("namespace", NAMESPACE_BYTES..NAMESPACE_BYTES + 64 + 13),
            ("purge", 0..3 * PURGE_BYTES),
            ("purge", ENDED_AT..ENDED_AT + 3 * ENDED_BYTES),
        ];
        let piece = |(name, place): (&'static str, Range<u64>)| {
            let mut bytes = vec![0; (place.end - place.start) as usize];
            home.file(name).read_exact_at(&mut bytes, place.start).unwrap();
            (name, place.start, bytes)
        };
        Pieces(places.into_iter().map(piece).collect())
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(_, _, bytes)| bytes.iter().copied()).collect()
    }

    /// Where each lies in [`Pieces::bytes`].
    fn ranges(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let range = |(_, _, bytes): &(&str, u64, Vec<u8>)| {
            end += bytes.len();
            end - bytes.len()..end
        };
        self.0.iter().map(range).collect()
    }

    /// The pool as it was made, with these bytes in the places of the pieces.
    fn write(&self, home: &Home, lengths: &[u64], data: &[(u64, Vec<u8>)], bytes: &[u8]) {
        for (name, length) in NAMES.iter().chain(["data"].iter()).zip(lengths) {
            let path = home.path().join(name);
            let _ = std::fs::remove_file(&path);
            make_file(&path).set_len(*length).unwrap();
        }
        let mut rest = bytes;
        for (name, at, whole) in &self.0 {
            let some;
            (some, rest) = rest.split_at(rest.len().min(whole.len()));
            write_at(home, name, *at, whole);
            write_at(home, name, *at, some);
        }
        data.iter().for_each(|(at, bytes)| write_at(home, "data", *at, bytes));
    }
}

/// As somebody would who can write the format: all checksums of the pieces.
fn reseal(bytes: &mut [u8], ranges: &[Range<usize>]) {
    let put = |bytes: &mut [u8], at: usize, sum: u64| bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
    for (number, range) in ranges.iter().enumerate() {
        let Some(piece) = bytes.get_mut(range.clone()) else { return };
        match number {
            0 => {
                let mut sealed = piece[..40].to_vec();
                sealed[12..16].fill(0);
                put(piece, 40, checksum(&sealed));
                for at in [48, 56, 64] {
                    let number: [u8; 4] = piece[at..at + 4].try_into().unwrap();
                    piece[at + 4..at + 8].copy_from_slice(&number.map(|byte| !byte));
                }
            }
            1 => {
                for content in [8..120, 128..240] {
                    let sum = checksum(&piece[content.start + 8..content.end]);
                    put(piece, content.start, sum);
                }
            }
            2 => {
                for unit in 0..2 {
                    let mut body: [u8; 8] = piece[unit * 8..unit * 8 + 8].try_into().unwrap();
                    body[6..].fill(0);
                    let sum = checksum(&[&(unit as u32).to_le_bytes()[..], &body].concat()) as u16;
                    if body != [0; 8] {
                        piece[unit * 8 + 6..unit * 8 + 8].copy_from_slice(&sum.to_le_bytes());
                    }
                }
            }
            3 | 4 => {
                let (first, pages) = if number == 3 { (0, 2) } else { (512, 128) };
                for (index, entry) in piece.chunks_exact_mut(ENTRY_BYTES as usize).enumerate() {
                    let slot = (first + index * pages) as u32;
                    let sum = checksum(&[&slot.to_le_bytes()[..], &entry[..4], &entry[24..120]].concat());
                    put(entry, 120, sum);
                }
            }
            9 => {
                let length = |at: usize| u32::from_le_bytes(piece[at..at + 4].try_into().unwrap()) as usize;
                let end = length(32).saturating_add(length(36)).saturating_add(64);
                if let Some(sealed) = piece.get(16..end) {
                    let sum = checksum(sealed);
                    put(piece, 8, sum);
                }
            }
            10 => {
                for record in piece.chunks_exact_mut(PURGE_BYTES as usize).skip(1) {
                    let sum = checksum(&record[16..]);
                    put(record, 8, sum);
                }
            }
            11 => {
                for record in piece.chunks_exact_mut(ENDED_BYTES as usize).skip(1) {
                    let sum = checksum(&record[..24]);
                    put(record, 24, sum);
                }
            }
            _ => {}
        }
    }
}

fn said(error: forebay_core::Error) -> String {
    error.to_string().split(" (").next().unwrap_or_default().to_owned()
}

/// Opens the files as they are, uses all that is found, and returns the ready slots.
fn ready_slots(home: &Home) -> Result<Vec<RecoveredSlot>, String> {
    let Opened { pool, outcome } = Pool::open(&home.config(CAPACITY_BYTES)).map_err(said)?;
    let slots = recovered(&pool);
    let instances = pool.instances().map_err(said)?;
    assert!(instances.iter().all(|(_, record)| record.engine_id.len() <= MAX_ENGINE_ID_BYTES));
    pool.namespaces().map_err(said)?;
    pool.purges().map_err(said)?;
    pool.ended_purges().and_then(|_| pool.has_met_disks()).map_err(said)?;
    for slot in &slots {
        for rank in [0, 1, MAX_RANKS - 1] {
            let _ = pool.birth(slot.slot, rank);
        }
    }
    let is_ready = |slot: &&RecoveredSlot| matches!(slot.state, SlotState::Ready(_));
    let ready: Vec<RecoveredSlot> = slots.iter().filter(is_ready).copied().collect();
    for slot in &ready {
        let SlotState::Ready(entry) = slot.state else { continue };
        assert!(slot.slot.offset() + entry.length <= pool.geometry().data_bytes(), "{slot:?} leaves the pool");
        let mut bytes = vec![0; entry.length as usize];
        pool.read(slot.slot.offset(), &mut bytes);
        assert!(entry.length <= slot.slot_bytes && pool.entry(slot.slot, slot.generation) == Some(entry), "{slot:?}");
    }
    // A daemon fences or frees what it does not believe, and goes on.
    let Some(free) = slots.iter().find(|slot| slot.state == SlotState::Free) else { return Ok(ready) };
    let fresh = Generation(pool.first_generation().0.max(1));
    pool.reserve(free.slot, fresh);
    pool.ready(free.slot, fresh, &block(5).0);
    assert_eq!(pool.entry(free.slot, fresh), Some(block(5).0), "a pool that was {outcome:?} stores on");
    if let Some(torn) = slots.iter().find(|slot| slot.state == SlotState::Torn) {
        pool.fence(torn.slot);
        pool.free(torn.slot, Generation(fresh.0.wrapping_add(1).max(1)));
    }
    Ok(ready)
}

fn run(name: &'static str, is_mended: bool) {
    let home = Home::new();
    let pieces = Pieces::of(&home);
    let lengths: Vec<u64> =
        NAMES.iter().chain(["data"].iter()).map(|name| home.file(name).metadata().unwrap().len()).collect();
    let data: Vec<(u64, Vec<u8>)> = BLOCKS.iter().map(|(slot, number)| (slot.offset(), block(*number).1)).collect();
    let ranges = pieces.ranges();
    pieces.write(&home, &lengths, &data, &pieces.bytes());
    assert_eq!(ready_slots(&home).unwrap().len(), BLOCKS.len(), "the pool as it was made is read");
    let target = Target::new(name, vec![pieces.bytes()]).cases(1500).allocates(64, 2 << 20);
    let target = if is_mended { target.mended(|bytes| reseal(bytes, &ranges)) } else { target };
    target.run(|bytes| {
        pieces.write(&home, &lengths, &data, bytes);
        let ready = ready_slots(&home)?;
        for slot in ready.iter().filter(|_| !is_mended) {
            let SlotState::Ready(entry) = slot.state else { continue };
            let stored = BLOCKS.iter().find(|(place, _)| *place == slot.slot).map(|(_, number)| block(*number).0);
            assert_eq!(Some(entry), stored, "{slot:?} was never stored");
        }
        Ok::<_, String>(ready.len())
    });
}

#[test]
fn whatever_happened_to_a_pools_files_a_ready_slot_holds_what_was_stored_there() {
    run("a damaged pool", false);
}

#[test]
fn whatever_a_pools_files_say_under_right_checksums_they_are_opened_or_refused() {
    run("a forged pool", true);
}
