//! A disk that another daemon opens under another path, which no lock keeps it from.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::ssd::{Ssd, SsdConfig};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;
use crate::files::{Loop, file_config, home, open};

/// A daemon looks at its disks every half second; these are two.
const TURNS: usize = 400;

/// Of another daemon: each configuration draws what it signs with.
fn config() -> SsdConfig {
    let config = small_config();
    assert_ne!(config.owner, small_config().owner);
    config
}

/// The daemon has noticed, says so, and serves nothing of the disk.
fn has_stopped(bed: &mut Bed, blocks: u64) {
    let report = bed.ssd.report().remove(0);
    let why = report.trouble().expect("the disk is out of use");
    assert!(why.contains("another daemon, or another path of this host, writes to this disk"), "{why}");
    assert_eq!((bed.ssd.missing(), bed.ssd.health()), (1, Health::Sick(ErrorKind::Unavailable)));
    assert_eq!(bed.blocks().len(), 0);
    let mut gone = BTreeSet::new();
    while let more = bed.evictions()
        && !more.is_empty()
    {
        gone.extend(more);
    }
    assert_eq!(gone, (0..blocks).collect(), "the owner hears what it lost");
    let ops = [bed.load(0, 0, 4096), bed.store(900, 1, 4096)];
    let ios = bed.disk.ios();
    assert_eq!(bed.run(&ops).unwrap(), [Outcome::Failed(ErrorKind::Unavailable); 2]);
    (0..TURNS).for_each(|_| bed.turn());
    assert_eq!(bed.disk.ios(), ios, "the disk is left alone");
}

#[test]
fn a_disk_that_another_daemon_opened_has_all_that_was_acknowledged_and_one_daemon() {
    let disk = blank(&config(), 16);
    for seed in [None, Some(1), Some(2)] {
        let mut first = Bed::open(&disk, &config(), seed).unwrap();
        let held = first.blocks().len() as u64;
        first.store_all((held..held + 40).map(|number| (number, 4096)));
        (0..TURNS).for_each(|_| first.turn());
        assert_eq!(first.ssd.missing(), 0, "a daemon alone keeps its disk");
        let mut second = Bed::open(&disk, &config(), seed).unwrap();
        (0..TURNS).for_each(|_| first.turn());
        has_stopped(&mut first, held + 40);
        for number in 0..held + 40 {
            assert!(matches!(second.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
        }
        second.settle();
        assert_eq!(second.ssd.missing(), 0);
    }
}

/// Both have found it blank.
#[test]
fn a_disk_that_another_daemon_made_anew_is_that_daemons() {
    let disk = blank(&config(), 16);
    let mut first = Bed::open(&disk, &config(), None).unwrap();
    first.store_all((0..40).map(|number| (number, 4096)));
    first.settle();
    disk.alter(0, |bytes| bytes.fill(0));
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let config = config();
    let mut second = Bed::with(Ssd::on(vec![medium(&disk, None, &pool, 2)], &config).unwrap(), pool, &disk);
    (0..TURNS).for_each(|_| first.turn());
    has_stopped(&mut first, 40);
    second.store_all((0..40).map(|number| (number, 4096)));
    assert!((0..40).all(|number| matches!(second.look(number, 4096), Outcome::Loaded { .. })));
}

#[test]
fn a_daemon_that_was_stopped_writes_nothing_over_the_blocks_of_another() {
    let disk = blank(&config(), 16);
    for seed in [None, Some(1), Some(2)] {
        let mut first = Bed::open(&disk, &config(), seed).unwrap();
        let held = first.blocks().len() as u64;
        first.store_all((held..held + 20).map(|number| (number, 4096)));
        first.settle();
        first.now += Duration::from_secs(3);
        let mut second = Bed::open(&disk, &config(), seed).unwrap();
        second.store_all((held + 20..held + 40).map(|number| (number, 4096)));
        second.settle();
        let stores: Vec<_> = (0..20).map(|number| first.store(500 + number, number, 4096)).collect();
        first.turn();
        assert_eq!(first.run(&stores).unwrap(), [Outcome::Failed(ErrorKind::Unavailable); 20]);
        has_stopped(&mut first, held + 20);
        let mut third = Bed::open(&disk, &config(), seed).unwrap();
        for number in 0..held + 40 {
            assert!(matches!(third.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
        }
    }
}

#[test]
fn a_daemon_whose_looks_fail_writes_nothing_over_the_blocks_of_another() {
    let disk = blank(&config(), 16);
    let mut first = Bed::open(&disk, &config(), None).unwrap();
    first.store_all((0..20).map(|number| (number, 4096)));
    first.settle();
    disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    (0..TURNS).for_each(|_| first.turn());
    disk.arm(&[]);
    let mut second = Bed::open(&disk, &config(), None).unwrap();
    second.store_all((20..40).map(|number| (number, 4096)));
    second.settle();
    let stores: Vec<_> = (0..20).map(|number| first.store(500 + number, number, 4096)).collect();
    assert_eq!(first.run(&stores).unwrap(), [Outcome::Failed(ErrorKind::Unavailable); 20]);
    has_stopped(&mut first, 20);
    let mut third = Bed::open(&disk, &config(), None).unwrap();
    for number in 0..40 {
        assert!(matches!(third.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
    }
}

#[test]
fn stores_on_a_disk_whose_superblock_cannot_be_read_end_and_begin_again_when_it_can() {
    let disk = blank(&config(), 16);
    let mut bed = Bed::open(&disk, &config(), None).unwrap();
    bed.settle();
    disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    (0..TURNS).for_each(|_| bed.turn());
    let stores: Vec<_> = (0..20).map(|number| bed.store(number, number, 4096)).collect();
    assert_eq!(bed.run(&stores).unwrap(), [Outcome::Failed(ErrorKind::Unavailable); 20]);
    assert_eq!(bed.ssd.report()[0].health_of_writes, Health::Sick(ErrorKind::Timeout));
    disk.arm(&[]);
    (0..TURNS).for_each(|_| bed.turn());
    bed.store_all((0..20).map(|number| (number, 4096)));
}

#[test]
fn what_is_under_way_on_a_disk_that_another_takes_ends_once_and_is_not_acknowledged() {
    let disk = blank(&config(), 16);
    let mut first = Bed::open(&disk, &config(), None).unwrap();
    first.store_all((0..4).map(|number| (number, 4096)));
    first.settle();
    disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Delayed(300) }]);
    let stores: Vec<_> = (20..26).map(|number| first.store(number, number, 4096)).collect();
    let loads: Vec<_> = (0..3).map(|number| first.load(number, number, 4096)).collect();
    let ops = [stores, loads, vec![first.remove(3)]].concat();
    assert_eq!(first.ssd.submit(&ops), ops.len());
    first.turn();
    disk.arm(&[]);
    let mut second = Bed::open(&disk, &config(), None).unwrap();
    assert_eq!(second.blocks().len(), 4);
    let outcomes = first.ended(&ops);
    assert_eq!(outcomes, vec![Outcome::Failed(ErrorKind::Unavailable); ops.len()]);
    has_stopped(&mut first, 3);
}

/// Two paths of one daemon: the disk is named twice, and serves once.
#[test]
fn a_disk_under_two_paths_of_one_daemon_serves_under_one() {
    let config = config();
    let disk = blank(&config, 16);
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = [1, 2].map(|id| medium(&disk, None, &pool, id)).into();
    let mut bed = Bed::with(Ssd::on(media, &config).unwrap(), pool, &disk);
    bed.store_all((0..40).map(|number| (number, 4096)));
    (0..TURNS).for_each(|_| bed.turn());
    assert_eq!(bed.ssd.missing(), 1);
    let why = bed.ssd.report()[1].trouble().expect("the second path is not used");
    assert!(why.contains("another path"), "{why}");
    assert!((0..40).all(|number| matches!(bed.look(number, 4096), Outcome::Loaded { .. })));
}

/// Restored from a backup, or left behind when a disk was moved.
#[test]
fn of_a_disk_and_an_older_copy_of_it_the_disk_is_used_whichever_answers_first() {
    let mut bed = Bed::open(&blank(&config(), 8), &config(), None).unwrap();
    bed.store_all((0..4).map(|number| (number, 4096)));
    bed.settle();
    let copy = bed.disk.image();
    // A purge that writes to the list alone, and stores.
    assert!(crate::purges::note(&mut bed, [8]));
    bed.settle();
    let purged = bed.disk.image();
    bed.store_all((4..8).map(|number| (number, 4096)));
    bed.settle();
    let image = bed.disk.image();
    for (old, new, blocks) in [(&copy, &purged, 4), (&copy, &image, 8), (&purged, &image, 8), (&image, &image, 8)] {
        for is_old_first in [true, false] {
            let images = if is_old_first { [old, new] } else { [new, old] };
            let disks = images.map(|image| SimulatedDisk::from_image(image.clone()));
            let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
            let media = disks.iter().map(|disk| medium(disk, None, &pool, 1)).collect();
            let mut bed = Bed::with(Ssd::on(media, &config()).unwrap(), pool, &disks[0]);
            (0..TURNS).for_each(|_| bed.turn());
            let used = usize::from(is_old_first && old != new);
            let troubles: Vec<_> = bed.ssd.report().iter().map(|report| report.trouble()).collect();
            assert_eq!((&troubles[used], bed.ssd.missing()), (&None, 1), "{troubles:?}");
            assert!(troubles[1 - used].as_ref().unwrap().contains("it is a copy of"), "{troubles:?}");
            assert_eq!(bed.blocks().len(), blocks);
            bed.store_all([(100, 4096)]);
            assert!(matches!(bed.look(100, 4096), Outcome::Loaded { .. }));
            let unused = disks[1 - used].image();
            assert!(unused[1 << 20..] == images[1 - used][1 << 20..], "left alone");
        }
    }
}

#[test]
fn a_device_under_two_paths_is_the_last_ones_with_every_block_that_was_acknowledged() {
    let home = home();
    let file = home.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(32 * MIB).unwrap();
    let (Some(one), Some(other)) = (Loop::over(&file), Loop::over(&file)) else {
        return eprintln!("no loop devices for this user");
    };
    let pools = [(); 2].map(|()| Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap());
    let configs = [&one, &other].map(|device| file_config(&device.0, 32 * MIB));
    let mut first = Bed::on_file(open(&configs[0], &pools[0]).unwrap(), &pools[0]);
    first.store_all((0..40).map(|number| (number, 4096)));
    let (config, pool) = (configs[1].clone(), pools[1].clone());
    let second = thread::spawn(move || open(&config, &pool).unwrap());
    // It writes on until it notices.
    let mut number = 40;
    while first.ssd.missing() == 0 {
        if number == 1000 {
            first.turn();
            continue;
        }
        let store = first.store(number, number % SLOTS, 4096);
        match first.run(&[store]).unwrap()[0] {
            Outcome::Stored => number += 1,
            outcome => assert_eq!(outcome, Outcome::Failed(ErrorKind::Unavailable)),
        }
    }
    let mut second = Bed::on_file(second.join().unwrap(), &pools[1]);
    for number in 0..number {
        assert!(matches!(second.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
    }
    assert_eq!(second.ssd.missing(), 0);
}
