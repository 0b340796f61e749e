//! Files that are not what was written: cut, flipped, swapped, emptied, foreign. Never data, and the block can be
//! stored again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::Outcome;
use forebay_io::fs::FsConfig;

use crate::bed::*;

const CORRUPT: Outcome = Outcome::Failed(ErrorKind::Corrupt);
const LENGTH: u64 = 10_000;

/// A host with blocks 1 and 2 stored, and the file of block 1.
fn stored() -> (tempfile::TempDir, Host, std::path::PathBuf) {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    (1..3).for_each(|number| host.is_stored(number, LENGTH));
    let path = object_of(home.path(), 1);
    (home, host, path)
}

fn never_data(host: &mut Host, what: &str) {
    host.pool.write(SLOT_BYTES, &[0x77; SLOT_BYTES as usize]);
    let outcome = host.load(1, LENGTH);
    assert!(matches!(outcome, Outcome::Failed(ErrorKind::Corrupt) | Outcome::Absent), "{what}: {outcome:?}");
    let mut slot = vec![0; SLOT_BYTES as usize];
    host.pool.read(SLOT_BYTES, &mut slot);
    assert!(slot.iter().all(|byte| *byte == 0x77), "{what}: the slot was touched");
    assert_eq!(host.load(1, LENGTH), Outcome::Absent, "{what}: a damaged object is taken away");
    host.is_stored(1, LENGTH);
    host.verify(1, LENGTH);
}

#[test]
fn a_file_cut_anywhere_is_never_data() {
    let (_home, mut host, path) = stored();
    let whole = fs::metadata(&path).unwrap().len();
    assert_eq!(whole, 4096 + 12_288);
    for length in [0, 1, 95, 96, 4095, 4096, 4097, 4096 + LENGTH - 1, 4096 + LENGTH, whole - 4096, whole - 1] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        never_data(&mut host, &format!("cut to {length}"));
    }
}

#[test]
fn a_flipped_bit_in_header_or_payload_is_never_data() {
    let (_home, mut host, path) = stored();
    let seed = std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut dice = Dice(seed);
    let in_header = (0..96 * 8).step_by(7);
    let in_payload: Vec<u64> = (0..60).map(|_| 4096 * 8 + dice.below(LENGTH * 8)).collect();
    for bit in in_header.chain(in_payload) {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, bit / 8).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], bit / 8).unwrap();
        never_data(&mut host, &format!("seed {seed}, bit {bit}"));
    }
}

#[test]
fn another_blocks_file_under_this_name_is_never_data() {
    let (home, mut host, path) = stored();
    // Same length, whole, with a right checksum: only the key in the header tells.
    fs::copy(object_of(home.path(), 2), &path).unwrap();
    never_data(&mut host, "swapped");
    fs::write(&path, vec![0; 4096 + 12_288]).unwrap();
    never_data(&mut host, "zeros");
    let other = fs::read(object_of(home.path(), 2)).unwrap();
    let mut mixed = fs::read(&path).unwrap();
    mixed[4096..].copy_from_slice(&other[4096..]);
    fs::write(&path, mixed).unwrap();
    never_data(&mut host, "this header, another's payload");
    host.verify(2, LENGTH);
}

#[test]
fn an_empty_file_is_not_found_and_does_not_prevent_a_store() {
    let (_home, mut host, path) = stored();
    for length in [0, 4096, 5000, 1 << 40] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        assert_eq!(host.find(1), Outcome::Absent, "{length}");
        // Without a load that would have taken it away.
        host.is_stored(1, LENGTH);
        assert_eq!(host.fs.report().roots[0].counters.repeated_stores, 0);
        host.verify(1, LENGTH);
    }
}

#[test]
fn a_slot_that_changed_under_a_store_is_not_published() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    let store = host.store_op(7, LENGTH);
    host.pool.write(7 * SLOT_BYTES + 5, b"!");
    assert_eq!(host.run(&[store]), [CORRUPT]);
    assert_eq!(host.find(7), Outcome::Absent);
    assert_eq!(unfinished(home.path()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_folder_or_a_loop_in_place_of_an_object_fails_that_block_alone() {
    let (_home, mut host, path) = stored();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(host.load(1, LENGTH), Outcome::Failed(_)));
    assert!(matches!(host.store(1, LENGTH), Outcome::Failed(_)));
    fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink(&path, &path).unwrap();
    assert!(matches!(host.load(1, LENGTH), Outcome::Failed(_)));
    host.verify(2, LENGTH);
}

/// As a host that was upgraded already may have written it: the header says another version, and is whole.
fn make_later(path: &std::path::Path, length: u64) -> Vec<u8> {
    let mut bytes = fs::read(path).unwrap();
    bytes[8..12].copy_from_slice(&2u32.to_le_bytes());
    let seal = forebay_core::checksum::checksum(&bytes[..88]);
    bytes[88..96].copy_from_slice(&seal.to_le_bytes());
    bytes.resize(length as usize, 7);
    fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn a_block_in_a_later_format_is_a_miss_and_stays_whatever_its_length() {
    for length in [4096 + 12_288, 4096 + 4096, 4096 + 16_384, 5000, 100] {
        let home = home();
        let brisk = FsConfig {
            sweep_interval: Duration::from_millis(10),
            grant_age: Duration::from_millis(100),
            ..config(home.path())
        };
        let mut host = Host::open(&brisk);
        (1..3).for_each(|number| host.is_stored(number, LENGTH));
        let path = object_of(home.path(), 1);
        let bytes = make_later(&path, length);
        assert_eq!(host.load(1, LENGTH), Outcome::Absent, "{length}");
        host.is_stored(1, LENGTH);
        let before = host.fs.report().roots[0].counters.sweeps;
        host.until("two more walks", |host| host.fs.report().roots[0].counters.sweeps >= before + 2);
        assert!(fs::read(&path).unwrap() == bytes, "{length}");
        let counters = host.fs.report().roots[0].counters;
        assert_eq!((counters.repeated_stores, counters.corrupt_blocks, counters.expired_blocks), (1, 0, 0), "{length}");
        host.verify(2, LENGTH);
    }
}
