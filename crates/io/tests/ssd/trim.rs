//! A device is told of the segments that hold nothing, and nothing depends on it.

use std::os::unix::fs::MetadataExt;

use forebay_core::PAGE_BYTES;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::ssd::SsdConfig;
use forebay_io::uring::{EngineChoice, Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::{Bed, KIB, MIB, SLOT_BYTES, SLOTS, blank, small_config};
use crate::files::{Loop, file_config, home, open};

const BLOCK: u64 = 12_000;

/// Stores more blocks than the disk holds. Whether all of them were stored.
fn overfill(bed: &mut Bed, from: u64) -> bool {
    let mut is_stored = true;
    for first in (from..from + 96).step_by(SLOTS as usize / 2) {
        let stores: Vec<_> = (0..SLOTS / 2).map(|slot| bed.store(first + slot, slot, BLOCK)).collect();
        is_stored &= bed.run(&stores).unwrap().iter().all(|outcome| matches!(outcome, Outcome::Stored));
    }
    // What failed is tried again after a second.
    (0..300).for_each(|_| bed.turn());
    bed.settle();
    is_stored
}

/// Segments that hold zeros behind their headers.
fn empty_segments(disk: &SimulatedDisk) -> usize {
    let image = disk.image();
    let segments = image[MIB as usize..].chunks(64 * KIB as usize);
    segments.filter(|segment| segment[PAGE_BYTES as usize..].iter().all(|byte| *byte == 0)).count()
}

#[test]
fn a_segment_that_is_ready_for_new_blocks_was_trimmed() {
    for (trim, seed) in [(true, None), (true, Some(5)), (false, None)] {
        let config = SsdConfig { trim, ..small_config() };
        let mut bed = Bed::open(&blank(&config, 12), &config, seed).unwrap();
        assert!(overfill(&mut bed, 0));
        let trimmed_bytes = bed.ssd.report()[0].counters.trimmed_bytes;
        // One that has no other beside it is not trimmed.
        let least = if trim { 2 } else { 0 };
        assert_eq!((trimmed_bytes > 0, empty_segments(&bed.disk).min(2)), (trim, least), "{seed:?}");
        let held: Vec<u64> = bed.holds_numbers().into_keys().collect();
        assert!(held.len() > 20);
        for number in held {
            assert!(matches!(bed.look(number, BLOCK), Outcome::Loaded { .. }), "block {number}");
        }
    }
}

#[test]
fn a_device_that_refuses_a_trim_gets_no_other_and_serves() {
    let config = small_config();
    let mut refusals = 0;
    for nth in 0..120 {
        let mut bed = Bed::open(&blank(&config, 12), &config, None).unwrap();
        bed.disk.arm(&[Fault::once(nth, FaultKind::Error(Errno::OPNOTSUPP))]);
        let is_stored = overfill(&mut bed, 0);
        let before = bed.ssd.report()[0].counters.trimmed_bytes;
        assert!(overfill(&mut bed, 100), "the fault is over");
        let after = bed.ssd.report()[0].counters.trimmed_bytes;
        if before == after {
            refusals += 1;
            assert!(is_stored, "the fault hit the trim, and no store");
            assert_eq!(bed.ssd.health(), Health::Healthy);
        }
    }
    assert!(refusals > 1, "{refusals} of the faults hit a trim");
}

#[test]
fn a_load_that_is_late_reads_no_trimmed_bytes() {
    let config = small_config();
    for number in 0..20 {
        let mut bed = Bed::open(&blank(&config, 12), &config, None).unwrap();
        bed.store_all((0..20).map(|number| (number, BLOCK)));
        bed.settle();
        bed.disk.arm(&[Fault::once(0, FaultKind::Delayed(150))]);
        let load = bed.load(number, SLOTS - 1, BLOCK);
        assert_eq!(bed.ssd.submit(&[load]), 1);
        bed.turn();
        assert!(overfill(&mut bed, 100));
        let outcomes = bed.ended(&[load]);
        assert!(matches!(outcomes[..], [Outcome::Loaded { .. } | Outcome::Absent]), "{outcomes:?}");
        assert_eq!(bed.ssd.report()[0].counters.corrupt_blocks, 0);
    }
}

/// The device's file loses the blocks of the segments that are ready.
#[test]
fn a_real_device_gives_the_space_back() {
    let home = home();
    for (number, engine) in [EngineChoice::Auto, EngineChoice::Threads].into_iter().enumerate() {
        let mut kept = Vec::new();
        for trim in [false, true] {
            let file = home.path().join(format!("{number}-{trim}"));
            std::fs::File::create(&file).unwrap().set_len(17 * MIB).unwrap();
            let Some(device) = Loop::over(&file) else { return eprintln!("no loop devices for this user") };
            let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
            let base = file_config(&device.0, 17 * MIB);
            let config = SsdConfig { segment_bytes: Some(MIB), engine, trim, ..base };
            let mut bed = Bed::on_file(open(&config, &pool).unwrap(), &pool);
            bed.store_all((0..1000).map(|number| (number, 36_000)));
            bed.settle();
            for number in 900..1000 {
                assert!(matches!(bed.look(number, 36_000), Outcome::Loaded { .. }), "block {number}");
            }
            drop(bed);
            kept.push(std::fs::metadata(&file).unwrap().blocks() * 512);
        }
        assert!(kept[1] + MIB < kept[0], "{kept:?} bytes without and with trims");
    }
}
