//! Bits that rot on the medium: in every field of every page of the tier's own, and in payloads.
//!
//! After each flip the disk is opened and all of its blocks are asked for: each is itself or a miss, and the disk
//! goes on storing. Pages lie where `docs/formats/ssd.md` draws them.

use std::collections::BTreeMap;

use forebay_core::ErrorKind;
use forebay_core::tier::Outcome;
use forebay_io::ssd::{Inspection, SegmentState};
use forebay_io::uring::{Region, SimulatedDisk};

use crate::bed::*;

const SEGMENT_BYTES: usize = 64 << 10;
const PAGE: usize = 4096;
const RECORD: usize = 96;

/// Closed segments, an open one, and what lies on them.
pub fn image() -> (Vec<u8>, BTreeMap<u64, u64>) {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..16).map(|number| (number, 1 + number * 1999 % 20_000)));
    let remove = bed.remove(3);
    assert_eq!(bed.run(&[remove]), Some(vec![Outcome::Removed]));
    bed.settle();
    let states: Vec<SegmentState> = bed.ssd.segments(0).iter().map(|segment| segment.state).collect();
    assert!(states.contains(&SegmentState::Closed) && states.contains(&SegmentState::Active), "{states:?}");
    let lengths = bed.blocks().into_iter().map(|block| (number_of(&block.key), block.length_bytes)).collect();
    (bed.disk.image(), lengths)
}

fn segment_at(segment: usize) -> usize {
    (1 << 20) + segment * SEGMENT_BYTES
}

/// How many of the blocks are there after the byte at `at` was changed; panics on wrong bytes.
fn survivors(image: &[u8], lengths: &BTreeMap<u64, u64>, at: usize, bit: u8) -> usize {
    let disk = SimulatedDisk::from_image(image.to_vec());
    disk.alter(at, |bytes| bytes[0] ^= 1 << bit);
    let mut bed = Bed::open(&disk, &small_config(), None).unwrap_or_else(|error| panic!("flip at {at:#x}: {error}"));
    let mut there = 0;
    for (number, length_bytes) in lengths {
        match bed.look(*number, *length_bytes) {
            Outcome::Loaded { .. } => there += 1,
            Outcome::Absent | Outcome::Failed(ErrorKind::Corrupt) => {}
            other => panic!("flip at {at:#x}: block {number} is {other:?}"),
        }
    }
    bed.store_all([(100, 9000)]);
    assert!(matches!(bed.look(100, 9000), Outcome::Loaded { .. }), "flip at {at:#x}: the disk stores on");
    there
}

fn flip_each(image: &[u8], lengths: &BTreeMap<u64, u64>, range: std::ops::Range<usize>, least: usize) {
    for at in range {
        let there = survivors(image, lengths, at, (at % 8) as u8);
        assert!(there >= least, "flip at {at:#x}: {there} of {} blocks are left", lengths.len());
    }
}

#[test]
fn a_damaged_superblock_is_rebuilt_and_costs_nothing() {
    let (image, lengths) = image();
    for field in [0..48, PAGE - 8..PAGE] {
        flip_each(&image, &lengths, field, lengths.len());
    }
    let disk = SimulatedDisk::from_image(image);
    disk.alter(0, |bytes| bytes[..PAGE].fill(0));
    let mut bed = Bed::open(&disk, &small_config(), None).unwrap();
    assert!(bed.ssd.report()[0].recovery.was_rebuilt);
    assert!(lengths.iter().all(|(number, length)| matches!(bed.look(*number, *length), Outcome::Loaded { .. })));
    let bed = Bed::open(&bed.disk, &small_config(), None).unwrap();
    assert!(!bed.ssd.report()[0].recovery.was_rebuilt, "once is enough");
}

#[test]
fn a_shape_is_never_guessed() {
    let (image, _) = image();
    let disk = SimulatedDisk::from_image(image.clone());
    disk.alter(0, |bytes| bytes[..PAGE].fill(0));
    for segment in 1..8 {
        disk.alter(segment_at(segment), |bytes| bytes[..PAGE].fill(0));
    }
    let error = Bed::open(&disk, &small_config(), None).err().expect("one witness is not enough");
    assert!(error.kind() == ErrorKind::Corrupt && error.hint_text().unwrap().contains("delete the file"), "{error}");
    assert!(error.hint_text().unwrap().contains("`blkdiscard -z`"), "the rest of a device has blocks: {error:?}");
    // Another version's superblock is somebody else's to read.
    let disk = SimulatedDisk::from_image(image);
    disk.alter(0, |bytes| bytes[8] = 2);
    for segment in 0..8 {
        disk.alter(segment_at(segment), |bytes| bytes[8] = 2);
    }
    let before = disk.image();
    let error = Bed::open(&disk, &small_config(), None).err().expect("another version is refused");
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("another version"), "{error}");
    assert!(disk.image() == before, "and left alone");
}

#[test]
fn a_flip_in_any_field_of_a_segments_header_costs_that_segment_at_most() {
    let (image, lengths) = image();
    for field in [0..72, PAGE - 8..PAGE] {
        let range = segment_at(0) + field.start..segment_at(0) + field.end;
        flip_each(&image, &lengths, range, lengths.len() - 8);
    }
}

/// Lives would be counted from 1 again, and a segment's old footer would be that of its new life.
#[test]
fn a_disk_that_lost_all_headers_keeps_what_it_stores_then() {
    let (image, _) = image();
    let disk = SimulatedDisk::from_image(image);
    (0..8).for_each(|segment| disk.alter(segment_at(segment), |bytes| bytes[50] ^= 1));
    let mut bed = Bed::open(&disk, &small_config(), None).unwrap();
    assert_eq!(bed.ssd.report()[0].recovery.segments_lost, 8);
    bed.store_all([(100, 9000), (101, 20_000)]);
    bed.settle();
    let mut bed = Bed::open(&bed.disk, &small_config(), None).unwrap();
    for (number, length_bytes) in [(100, 9000), (101, 20_000)] {
        assert!(matches!(bed.look(number, length_bytes), Outcome::Loaded { .. }), "block {number} was acknowledged");
    }
}

#[test]
fn a_flip_in_a_footer_costs_a_scan() {
    let (image, lengths) = image();
    let last_page = segment_at(1) - PAGE;
    for field in [0..56, PAGE - 8..PAGE] {
        flip_each(&image, &lengths, last_page + field.start..last_page + field.end, lengths.len());
    }
    let records = last_page - PAGE;
    flip_each(&image, &lengths, records..records + 3 * RECORD, lengths.len());
}

/// The chain is read in windows, which hold payloads and the footer too. None of these is needed to find the others.
#[test]
fn a_page_that_cannot_be_read_costs_no_block_on_other_pages() {
    let (image, lengths) = image();
    let [last_page, records] = [1, 2].map(|pages| segment_at(1) - pages * PAGE);
    let readable = |disk: &SimulatedDisk| {
        let mut bed = Bed::open(disk, &small_config(), None).unwrap();
        disk.set_unreadable(&[]);
        let is_there = |(number, length): (&u64, &u64)| matches!(bed.look(*number, *length), Outcome::Loaded { .. });
        lengths.iter().map(is_there).filter(|is_there| *is_there).count()
    };
    for bad in [last_page, records] {
        let disk = SimulatedDisk::from_image(image.clone());
        disk.set_unreadable(&[bad]);
        assert_eq!(readable(&disk), lengths.len(), "of the footer");
    }
    let mut bed = Bed::open(&SimulatedDisk::from_image(image.clone()), &small_config(), None).unwrap();
    for block in bed.blocks().into_iter().filter(|block| block.segment == 0) {
        let disk = SimulatedDisk::from_image(image.clone());
        disk.alter(last_page + 40, |bytes| bytes[0] ^= 1);
        disk.set_unreadable(&[segment_at(0) + block.first_page as usize * PAGE]);
        assert!(readable(&disk) >= lengths.len() - 1, "{block:?}");
    }
}

/// Footers are read 385 at a time, each piece while the one before is taken in. A scan comes between them.
#[test]
fn damaged_footers_among_many_cost_a_scan_each() {
    const SEGMENTS: u64 = 800;
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, SEGMENTS), &config, None).unwrap();
    let mut stored = 0;
    while bed.ssd.segments(0).iter().filter(|segment| segment.state == SegmentState::Closed).count() < 780 {
        bed.store_all((stored..stored + 200).map(|number| (number, 100)));
        bed.settle();
        stored += 200;
    }
    let blocks = |bed: &Bed| bed.ssd.segments(0).iter().map(|segment| segment.live_blocks).collect::<Vec<_>>();
    let (before, disk) = (blocks(&bed), SimulatedDisk::from_image(bed.disk.image()));
    let mut closed: Vec<_> = bed.ssd.segments(0);
    closed.retain(|segment| segment.state == SegmentState::Closed);
    closed.sort_by_key(|segment| segment.life);
    // Its last page, or its records: the latter are known to be damaged only when they were read.
    let damaged = [(0, 1), (100, 1), (101, 2), (384, 2), (385, 1), (386, 2), (500, 2), (771, 2), (779, 1)];
    for (nth, pages) in damaged {
        let end = segment_at(closed[nth].index as usize + 1);
        disk.alter(end - pages * PAGE + 40, |bytes| bytes[0] ^= 1);
    }
    let whole = Bed::open(&bed.disk, &config, None).unwrap().ssd.report()[0].recovery;
    let mut bed = Bed::open(&disk, &config, None).unwrap();
    let recovery = bed.ssd.report()[0].recovery;
    let scanned = whole.segments_scanned + damaged.len() as u32;
    assert_eq!((recovery.blocks, recovery.segments_scanned), (stored, scanned));
    assert_eq!(blocks(&bed), before);
    assert!((0..stored).step_by(7).all(|number| matches!(bed.look(number, 100), Outcome::Loaded { .. })));
}

#[test]
fn a_flip_in_a_head_of_a_closed_segment_costs_nothing() {
    let (image, lengths) = image();
    let head = segment_at(0) + PAGE;
    flip_each(&image, &lengths, head..head + 256 + 2 * RECORD, lengths.len());
}

#[test]
fn a_flip_in_a_head_of_the_open_segment_costs_what_lies_behind_it() {
    let (image, lengths) = image();
    let bed = Bed::open(&SimulatedDisk::from_image(image.clone()), &small_config(), None).unwrap();
    let segments = bed.ssd.segments(0);
    let active = segments.iter().find(|segment| segment.state == SegmentState::Active).unwrap();
    let head = segment_at(active.index as usize) + PAGE;
    let least = lengths.len() - active.live_blocks as usize;
    // A removal may lie behind it too; the block it was about is then there again, with its own bytes.
    flip_each(&image, &lengths, head..head + 256 + 2 * RECORD, least);
}

#[test]
fn a_flip_in_a_payload_costs_that_block() {
    let (image, lengths) = image();
    let mut bed = Bed::open(&SimulatedDisk::from_image(image.clone()), &small_config(), None).unwrap();
    let geometry = bed.ssd.report()[0].geometry;
    for block in bed.blocks() {
        let at = block.offset_bytes(&geometry) as usize;
        for offset in [0, block.length_bytes / 2, block.length_bytes - 1] {
            let there = survivors(&image, &lengths, at + offset as usize, 5);
            assert_eq!(there, lengths.len() - 1, "block {:?}, byte {offset}", block.key);
        }
    }
}

#[test]
fn an_audit_names_the_damaged_and_writes_nothing() {
    let (image, lengths) = image();
    let disk = SimulatedDisk::from_image(image);
    let pool = Region::anonymous(PAGE).unwrap();
    let look = || Inspection::on(medium(&disk, None, &pool, 0)).unwrap();
    let mut inspection = look();
    let audit = inspection.audit().unwrap();
    assert_eq!((audit.blocks, audit.damaged_blocks), (lengths.len() as u64, 0));
    assert_eq!(audit.bytes, lengths.values().sum::<u64>());
    let report = inspection.report();
    assert!(report.lifetime_amplification().is_some_and(|times| times > 1.0), "{report:?}");
    assert!((0.1..0.9).contains(&report.live_ratio()), "{report:?}");
    let [first, third] = [0, 2].map(|nth| inspection.blocks().nth(nth).unwrap().unwrap());
    for block in [first, third] {
        disk.alter(block.offset_bytes(&report.geometry) as usize, |bytes| bytes[0] ^= 1);
    }
    disk.alter(0, |bytes| bytes[20] ^= 1);
    let before = disk.image();
    let mut inspection = look();
    assert!(inspection.report().recovery.was_rebuilt, "the shape comes from the segments");
    let audit = inspection.audit().unwrap();
    assert_eq!((audit.damaged_blocks, audit.damaged), (2, vec![first.key, third.key]));
    assert!(disk.image() == before);
    let blank = blank(&small_config(), 8);
    let error = Inspection::on(medium(&blank, None, &pool, 0)).err().expect("there is nothing to see");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(blank.image().iter().all(|byte| *byte == 0), "a look makes no disk");
}
