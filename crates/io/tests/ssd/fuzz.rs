//! Whatever lies on a disk, it is refused or opened, and each block on it is itself or a miss.

use forebay_core::checksum::checksum;
use forebay_core::tier::Outcome;
use forebay_fuzz::Target;
use forebay_io::ssd::Inspection;
use forebay_io::uring::{Region, SimulatedDisk};

use crate::bed::{Bed, SLOTS, medium, small_config};
use crate::damage::image;
use crate::purges::note;

const PAGE: usize = 4096;
const RECORD: usize = 96;
const RECORDS_AT: usize = 256;

fn number(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn put(bytes: &mut [u8], at: usize, sum: u64) {
    bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
}

fn reseal_records(bytes: &mut [u8]) {
    for record in bytes.chunks_exact_mut(RECORD) {
        let sum = checksum(&record[..88]).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
        put(record, 88, sum);
    }
}

/// As somebody would who can write the format; `docs/formats/ssd.md` draws the pages.
fn reseal(image: &mut [u8]) {
    for at in (0..image.len() / PAGE).map(|page| page * PAGE) {
        let (before, page) = image[..at + PAGE].split_at_mut(at);
        let seal_at = match &page[..8] {
            b"FOREBAYS" | b"FBSEGMNT" | b"FBPURGES" => PAGE - 8,
            b"FBBATCH\0" => {
                reseal_records(&mut page[RECORDS_AT..]);
                RECORDS_AT - 8
            }
            b"FBFOOTER" => {
                let bytes = number(page, 12).saturating_mul(RECORD);
                let begin = at.checked_sub(bytes.div_ceil(PAGE).saturating_mul(PAGE));
                if let Some(records) = begin.and_then(|begin| before[begin..].get_mut(..bytes)) {
                    reseal_records(records);
                    let sum = checksum(records);
                    put(page, 48, sum);
                }
                PAGE - 8
            }
            _ => continue,
        };
        let sum = checksum(&[&page[..seal_at], &page[seal_at + 8..]].concat());
        put(page, seal_at, sum);
    }
}

/// The fields of all pages of the tier's own, and some of the payloads.
fn fields(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut fields = Vec::new();
    for (at, page) in image.chunks_exact(PAGE).enumerate().map(|(number, page)| (number * PAGE, page)) {
        match &page[..8] {
            b"FOREBAYS" | b"FBSEGMNT" | b"FBPURGES" => fields.extend([at..at + 96, at + PAGE - 8..at + PAGE]),
            b"FBBATCH\0" => {
                fields.extend([at..at + 96, at + RECORDS_AT - 8..at + RECORDS_AT + number(page, 12) * RECORD]);
            }
            b"FBFOOTER" => {
                let bytes = number(page, 12) * RECORD;
                let begin = at - bytes.next_multiple_of(PAGE);
                fields.extend([at..at + 80, begin..begin + bytes, at + PAGE - 8..at + PAGE]);
            }
            _ => {}
        }
    }
    fields
}

fn run(name: &'static str, is_mended: bool) {
    let (image, lengths) = image();
    let mut bed = Bed::open(&SimulatedDisk::from_image(image), &small_config(), None).unwrap();
    assert!(note(&mut bed, [8]), "it has a list of purges too");
    bed.settle();
    let image = bed.disk.image();
    let target = Target::new(name, vec![image.clone()]).places(fields(&image)).cases(300);
    // The image is there twice on the disk, and once more with what changed.
    let target = target.allocates(8, 8 << 20);
    let target = if is_mended { target.mended(reseal) } else { target };
    target.run(|bytes| {
        let look = Region::anonymous(PAGE).unwrap();
        let disk = SimulatedDisk::from_image(bytes.to_vec());
        let audit = Inspection::on(medium(&disk, None, &look, 0)).and_then(|mut inspection| inspection.audit());
        assert!(disk.image() == bytes, "who looks changes nothing");
        let mut bed = Bed::open(&disk, &small_config(), None).map_err(|error| format!("{:?}", error.kind()))?;
        let mut there = 0;
        for (number, length_bytes) in &lengths {
            if is_mended {
                // Under right checksums a block's bytes may be others.
                let load = bed.load(*number, SLOTS - 1, *length_bytes);
                bed.run(&[load]).expect("the disk is there");
            } else {
                there += usize::from(matches!(bed.look(*number, *length_bytes), Outcome::Loaded { .. }));
            }
        }
        let store = bed.store(100, 0, 9000);
        let stored = bed.run(&[store]).expect("the disk is there")[0];
        if !is_mended {
            assert!(matches!(stored, Outcome::Stored), "a damaged disk stores on: {stored:?}");
            assert!(matches!(bed.look(100, 9000), Outcome::Loaded { .. }), "what was stored is there");
            bed.settle();
            let mut bed = Bed::open(&bed.disk, &small_config(), None).expect("it is opened once more");
            assert!(matches!(bed.look(100, 9000), Outcome::Loaded { .. }), "what was stored is there after a restart");
        }
        Ok::<_, String>((there, audit.map(|audit| audit.damaged_blocks).ok()))
    });
}

#[test]
fn whatever_happened_to_a_disk_a_block_on_it_is_itself_or_a_miss() {
    run("a damaged disk", false);
}

#[test]
fn whatever_a_disk_says_under_right_checksums_it_is_opened_or_refused() {
    run("a forged disk", true);
}
