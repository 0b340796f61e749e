//! The released formats: for each version a disk that was written by it, as text.
//!
//! `tests/fixtures/ssd-1.hex` lists all rows of 16 bytes that are not zero. To write it anew after a change that is
//! meant, run the tests with `FOREBAY_BLESS=1`.

use std::fmt::Write;

use forebay_core::tier::Outcome;
use forebay_io::ssd::SsdConfig;
use forebay_io::uring::SimulatedDisk;

use crate::bed::*;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/ssd-1.hex");

/// A disk whose every byte is known: a closed segment, an open one, a removed block and one that was read.
fn written_today() -> SimulatedDisk {
    // As builds that do not sign a disk.
    let config = SsdConfig { owner: 0, trim: false, ..small_config() };
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all([(1, 9), (2, 4096), (3, 12_000)]);
    let remove = bed.remove(2);
    assert_eq!(bed.run(&[remove]).unwrap(), [Outcome::Removed]);
    assert!(matches!(bed.look(3, 12_000), Outcome::Loaded { .. }));
    bed.store_all([(4, 36_000), (5, 7)]);
    bed.settle();
    bed.disk
}

fn dump(image: &[u8]) -> String {
    let mut text = format!("{}\n", image.len());
    for (row, bytes) in image.chunks(16).enumerate().filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0)) {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{:06x} {hex}", row * 16).unwrap();
    }
    text
}

fn restore(dump: &str) -> Vec<u8> {
    let mut lines = dump.lines();
    let mut image = vec![0; lines.next().unwrap().parse().unwrap()];
    for line in lines {
        let (at, hex) = line.split_once(' ').unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        for i in 0..16 {
            image[at + i] = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
        }
    }
    image
}

#[test]
fn this_build_writes_the_format_byte_for_byte() {
    let today = dump(&written_today().image());
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        std::fs::write(FIXTURE, &today).unwrap();
    }
    let fixture = std::fs::read_to_string(FIXTURE).unwrap();
    let differing = today.lines().zip(fixture.lines()).find(|(today, fixture)| today != fixture);
    assert!(today == fixture, "the format has changed; first other row: {differing:?}");
}

#[test]
fn a_disk_of_version_1_is_read() {
    let image = restore(&std::fs::read_to_string(FIXTURE).unwrap());
    let mut bed = Bed::open(&SimulatedDisk::from_image(image), &small_config(), None).unwrap();
    let recovery = bed.ssd.report()[0].recovery;
    assert_eq!((recovery.segments_with_footer, recovery.blocks, recovery.blocks_not_whole), (1, 4, 0));
    assert!(bed.ssd.block(&key(3)).unwrap().is_hot, "that it was read is on the disk");
    for (number, length_bytes) in [(1, 9), (3, 12_000), (4, 36_000), (5, 7)] {
        assert!(matches!(bed.look(number, length_bytes), Outcome::Loaded { .. }), "block {number}");
    }
    assert_eq!(bed.look(2, 4096), Outcome::Absent);
}
