//! The nth I/O fails, then the one after it, until the whole run passes: opening, stores, loads, a removal, and
//! stores that need room made, with blocks carried over.
//!
//! After each run the disk works again: what was acknowledged is there, byte for byte, before and after a restart.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_core::tier::{Health, Outcome, Tier};
use forebay_core::{BlockKey, ErrorKind};
use forebay_io::ssd::{Ssd, SsdConfig};
use forebay_io::uring::{Done, Engine, Fault, FaultKind, Region, Request, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;

const LENGTHS: [u64; 6] = [1, 4096, 9000, 15_000, 20_000, 31_111];
/// A block of the run that is removed again.
const REMOVED: u64 = 100;

fn length(number: u64) -> u64 {
    LENGTHS[number as usize % LENGTHS.len()]
}

/// A full disk, half of whose blocks were read.
fn used_image() -> Vec<u8> {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..24).map(|number| (number, length(number))));
    for number in (0..24).step_by(2) {
        bed.look(number, length(number));
    }
    bed.store_all((24..30).map(|number| (number, length(number))));
    bed.settle();
    bed.disk.image()
}

/// What a run was told: the outcome of each store, and of the removal.
struct Told {
    /// Blocks that were there when the disk was opened.
    found: usize,
    stored: BTreeMap<u64, Outcome>,
    removed: Option<Outcome>,
    loaded: Vec<Outcome>,
    evicted: Vec<u64>,
}

/// None where the disk could not be opened.
fn run(disk: &SimulatedDisk, seed: Option<u64>) -> Option<(Bed, Told)> {
    let mut bed = Bed::open(disk, &small_config(), seed).ok()?;
    let stored = bed.holds_numbers();
    let mut told = Told { found: stored.len(), stored, removed: None, loaded: Vec::new(), evicted: Vec::new() };
    let store = |bed: &mut Bed, told: &mut Told, numbers: std::ops::Range<u64>| {
        let stores: Vec<_> =
            (0..).zip(numbers.clone()).map(|(slot, number)| bed.store(number, slot, length(number))).collect();
        told.stored.extend(numbers.zip(bed.run(&stores).unwrap()));
    };
    store(&mut bed, &mut told, 100..106);
    for number in [20, 23, 27, 100] {
        told.loaded.push(bed.look(number, length(number)));
    }
    let remove = bed.remove(REMOVED);
    told.removed = Some(bed.run(&[remove]).unwrap()[0]);
    for first in [106, 112, 118] {
        store(&mut bed, &mut told, first..first + 6);
    }
    told.loaded.extend((100..124).map(|number| bed.look(number, length(number))));
    Some((bed, told))
}

/// Everything acknowledged is there or was given up to make room. `may_lose`: the medium changed bytes.
fn verify(bed: &mut Bed, told: &mut Told, may_lose: bool) {
    for (number, outcome) in &told.stored {
        if *number == REMOVED {
            continue;
        }
        let is_there = bed.look(*number, length(*number));
        told.evicted.extend(bed.evictions());
        match (outcome, is_there) {
            (_, Outcome::Loaded { .. }) => {}
            (Outcome::Stored, Outcome::Absent) if told.evicted.contains(number) => {}
            (Outcome::Stored, Outcome::Absent | Outcome::Failed(ErrorKind::Corrupt)) if may_lose => {}
            (Outcome::Failed(_), Outcome::Absent | Outcome::Failed(ErrorKind::Corrupt)) => {}
            (told, found) => panic!("block {number} was {told:?} and is {found:?}"),
        }
    }
    if told.removed == Some(Outcome::Removed) && !may_lose {
        assert_eq!(bed.look(REMOVED, length(REMOVED)), Outcome::Absent);
    }
}

/// Arms `kind` at each I/O of the run in turn. `is_hidden`: nobody may notice it.
fn at_every_io(kind: FaultKind, count: u64, is_hidden: bool, may_lose: bool) {
    let image = used_image();
    for nth in 0.. {
        let seed = (nth % 2 == 1).then_some(nth);
        let context = format!("{kind:?}, {count} times from i/o {nth}, seed {seed:?}");
        let check = std::panic::AssertUnwindSafe(|| {
            let disk = SimulatedDisk::from_image(image.clone());
            disk.arm(&[Fault { nth, count, kind }]);
            let Some((mut bed, mut told)) = run(&disk, seed) else {
                assert!(!is_hidden, "it cannot be opened");
                let (mut bed, mut told) = {
                    disk.arm(&[]);
                    run(&disk, seed)
                }
                .expect("it is opened without faults");
                verify(&mut bed, &mut told, may_lose);
                return true;
            };
            let is_over = disk.ios() <= nth;
            disk.arm(&[]);
            if is_hidden || is_over {
                assert!(told.stored.values().all(|outcome| matches!(outcome, Outcome::Stored)), "{:?}", told.stored);
                let is_fine = |outcome: &Outcome| matches!(outcome, Outcome::Loaded { .. } | Outcome::Absent);
                assert!(told.loaded.iter().all(is_fine), "{:?}", told.loaded);
                assert_eq!(told.removed, Some(Outcome::Removed));
            }
            bed.settle();
            verify(&mut bed, &mut told, may_lose);
            let mut bed = Bed::open(&disk, &small_config(), seed).unwrap();
            verify(&mut bed, &mut told, may_lose);
            !is_over
        });
        match std::panic::catch_unwind(check) {
            Ok(true) => {}
            Ok(false) => return assert!(nth > 100, "a run of {nth} I/Os only"),
            Err(_) => panic!("{context}"),
        }
    }
}

#[test]
fn any_failed_io_costs_its_own_operation_only() {
    at_every_io(FaultKind::Error(Errno::IO), 1, false, false);
}

#[test]
fn five_failed_ios_in_a_row_cost_no_acknowledged_block() {
    at_every_io(FaultKind::Error(Errno::IO), 5, false, false);
}

#[test]
fn a_disk_that_fails_for_good_at_any_io_answers_everything_and_works_when_it_is_back() {
    at_every_io(FaultKind::Error(Errno::NODEV), u64::MAX, false, false);
}

#[test]
fn no_space_at_any_io_costs_its_own_operation_only() {
    at_every_io(FaultKind::Error(Errno::NOSPC), 3, false, false);
}

#[test]
fn nobody_notices_interrupted_short_and_late_ios() {
    at_every_io(FaultKind::Error(Errno::INTR), 1, true, false);
    at_every_io(FaultKind::Error(Errno::AGAIN), 3, true, false);
    at_every_io(FaultKind::Short(4096), 1, true, false);
    at_every_io(FaultKind::Short(5000), 2, true, false);
    at_every_io(FaultKind::Delayed(50), 4, true, false);
}

#[test]
fn an_io_that_moves_nothing_fails() {
    at_every_io(FaultKind::Short(0), 1, false, false);
}

#[test]
fn a_torn_write_costs_its_own_operation_only() {
    at_every_io(FaultKind::Torn, 1, false, false);
}

#[test]
fn an_io_that_was_not_done_and_says_it_was_never_gives_other_bytes() {
    at_every_io(FaultKind::Lies, 1, false, true);
    at_every_io(FaultKind::Lies, 4, false, true);
}

#[test]
fn a_bit_that_flips_on_its_way_never_gives_other_bytes() {
    at_every_io(FaultKind::Flipped, 1, false, true);
}

/// Removes what a walk names, and returns what was acknowledged. Twice, as a purge tries again.
fn remove_what_is_named(bed: &mut Bed) -> Vec<u64> {
    let mut acknowledged = Vec::new();
    for _ in 0..2 {
        let keys: Vec<BlockKey> = bed.listed().iter().map(|block| block.key).collect();
        let removals: Vec<_> = keys.iter().map(|key| bed.remove(number_of(key))).collect();
        let outcomes = bed.run(&removals).unwrap();
        let is_gone = |outcome: &Outcome| matches!(outcome, Outcome::Removed | Outcome::Absent);
        let gone = keys.iter().zip(outcomes).filter(|(_, outcome)| is_gone(outcome));
        acknowledged.extend(gone.map(|(key, _)| number_of(key)));
    }
    acknowledged
}

/// Stores, loads and then removals on a disk on which an I/O fails: what a removal acknowledged does not come back, and
/// a walk names all that could.
fn removed_for_good(kind: FaultKind, count: u64) {
    let image = used_image();
    let all = Bed::open(&SimulatedDisk::from_image(image.clone()), &small_config(), None).unwrap().holds().len();
    for nth in 0.. {
        let seed = (nth % 2 == 1).then_some(nth);
        let context = format!("{kind:?}, {count} times from i/o {nth}, seed {seed:?}");
        let disk = SimulatedDisk::from_image(image.clone());
        disk.arm(&[Fault { nth, count, kind }]);
        let Some((mut bed, told)) = run(&disk, seed) else { continue };
        if told.found < all {
            // Records that could not be read when the disk was opened are out of a removal's reach. The list of purges
            // covers them: `purges`.
            continue;
        }
        let acknowledged = remove_what_is_named(&mut bed);
        let is_over = disk.ios() <= nth;
        disk.arm(&[]);
        let mut restarted = Bed::open(&SimulatedDisk::from_image(disk.image()), &small_config(), seed).unwrap();
        let back: Vec<u64> = restarted.holds_numbers().into_keys().filter(|n| acknowledged.contains(n)).collect();
        assert!(back.is_empty(), "{context}: {back:?} came back after their removal");
        // A pause of the log ends.
        (0..400).for_each(|_| bed.turn());
        remove_what_is_named(&mut bed);
        let mut restarted = Bed::open(&SimulatedDisk::from_image(disk.image()), &small_config(), seed).unwrap();
        let back: Vec<u64> = restarted.holds_numbers().into_keys().collect();
        assert!(back.is_empty(), "{context}: {back:?} came back after all that was named was removed");
        if is_over {
            return assert!(nth > 100, "a run of {nth} I/Os only");
        }
    }
}

#[test]
fn what_was_removed_stays_away_whatever_io_failed_before() {
    removed_for_good(FaultKind::Error(Errno::IO), 1);
    removed_for_good(FaultKind::Error(Errno::IO), 5);
    removed_for_good(FaultKind::Error(Errno::NODEV), u64::MAX);
    removed_for_good(FaultKind::Error(Errno::NOSPC), 3);
    removed_for_good(FaultKind::Torn, 1);
}

/// A disk that comes later takes keys of the first; their blocks stay where they are.
#[test]
fn a_removal_that_failed_is_tried_again_on_the_disk_that_has_the_block() {
    let config = small_config();
    let mut first = Bed::open(&blank(&config, 8), &config, None).unwrap();
    first.store_all((0..40).map(|number| (number, 4096)));
    first.settle();
    let disks = [SimulatedDisk::from_image(first.disk.image()), blank(&config, 8)];
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = vec![medium(&disks[0], None, &pool, 1), medium(&disks[1], None, &pool, 2)];
    let mut bed = Bed::with(Ssd::on(media, &config).unwrap(), pool, &disks[0]);
    disks[0].arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    assert!(remove_what_is_named(&mut bed).is_empty(), "nothing was written");
    disks[0].arm(&[]);
    (0..400).for_each(|_| bed.turn());
    let acknowledged = remove_what_is_named(&mut bed);
    let left = bed.listed();
    assert!(left.is_empty(), "{} of 40 are named for ever", left.len());
    assert_eq!(acknowledged.len(), 40);
    let mut restarted = Bed::open(&SimulatedDisk::from_image(disks[0].image()), &config, None).unwrap();
    assert!(restarted.holds().is_empty(), "{:?} came back", restarted.holds_numbers());
}

#[test]
fn a_block_that_could_not_be_read_when_the_disk_was_opened_is_removed_for_good() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..4).map(|number| (number, length(number))));
    bed.settle();
    let (image, mut unread) = (bed.disk.image(), 0);
    for nth in 0.. {
        let disk = SimulatedDisk::from_image(image.clone());
        disk.arm(&[Fault::once(nth, FaultKind::Error(Errno::IO))]);
        let Ok(mut bed) = Bed::open(&disk, &config, None) else { continue };
        if disk.ios() <= nth {
            break;
        }
        disk.arm(&[]);
        let not_whole = bed.ssd.report()[0].recovery.blocks_not_whole;
        assert!(not_whole == 0 || bed.holds().len() < 4, "i/o {nth}: a block that was not read is served");
        unread += not_whole;
        if not_whole == 0 {
            continue;
        }
        remove_what_is_named(&mut bed);
        let mut restarted = Bed::open(&SimulatedDisk::from_image(disk.image()), &config, None).unwrap();
        assert!(restarted.holds().is_empty(), "i/o {nth}: {:?} came back", restarted.holds_numbers());
    }
    assert!(unread > 0, "no block's bytes were read at the start");
}

#[test]
fn a_disk_that_fails_is_sick_until_it_answers_again() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..8).map(|number| (number, 4096)));
    bed.disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    for number in 0..8 {
        assert_eq!(bed.look(number, 4096), Outcome::Failed(ErrorKind::Io));
    }
    assert_eq!(bed.ssd.health(), Health::Sick(ErrorKind::Io));
    let stores: Vec<_> = (10..50).map(|number| bed.store(number, number, 4096)).collect();
    let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed(ErrorKind::Io));
    assert!(bed.run(&stores).unwrap().iter().all(failed), "a store on a failed disk is answered");
    // A second and more without anything being asked: probes find out by themselves.
    (0..300).for_each(|_| bed.turn());
    assert_eq!(bed.ssd.health(), Health::Sick(ErrorKind::Io));
    bed.disk.arm(&[]);
    (0..300).for_each(|_| bed.turn());
    assert_eq!(bed.ssd.health(), Health::Healthy);
    bed.store_all((10..20).map(|number| (number, 4096)));
    for number in (0..8).chain(10..20) {
        assert!(matches!(bed.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
    }
}

/// A thin volume without space, or one that went read-only: flushes succeed, and blocks that are there can be read.
#[test]
fn a_disk_that_keeps_no_store_is_in_trouble_until_it_keeps_one() {
    let config = small_config();
    let disk = blank(&config, 8);
    let mut bed = Bed::open(&disk, &config, None).unwrap();
    bed.store_all([(1000, 8192)]);
    let mut failed = 0;
    for number in 0..20 {
        disk.arm(&[Fault::once(0, FaultKind::Error(Errno::NOSPC))]);
        let store = bed.store(number, 0, 8192);
        let outcomes = bed.run(&[store]).unwrap();
        // The fault may hit the beginning of a segment, which is tried again, and not the block.
        failed = if matches!(outcomes[..], [Outcome::Failed(_)]) { failed + 1 } else { 0 };
        disk.arm(&[]);
        bed.settle();
        let trouble = bed.ssd.report()[0].trouble();
        assert_eq!(trouble.as_deref(), (failed >= 4).then_some("writes fail (full)"), "after {failed} failed stores");
    }
    assert!(failed >= 4, "{failed} of the last stores failed");
    assert_eq!(bed.ssd.health(), Health::Healthy, "what it has is served");
    // A second, after which the disk is written to again.
    (0..300).for_each(|_| bed.turn());
    bed.store_all([(1001, 8192)]);
    assert_eq!(bed.ssd.report()[0].trouble(), None);
}

/// Many pages of notes end with one flush.
#[test]
fn one_failed_flush_of_notes_makes_no_sick_disk() {
    let config = SsdConfig { segment_bytes: Some(4 * MIB), ..small_config() };
    let disk = blank(&config, 8);
    let mut bed = Bed::open(&disk, &config, None).unwrap();
    bed.store_all((0..15 * 39).map(|number| (number, 4096)));
    for first in (0..15 * 39).step_by(39) {
        let loads: Vec<_> = (0..39).map(|slot| bed.load(first + slot, slot, 4096)).collect();
        assert!(bed.run(&loads).unwrap().iter().all(|outcome| matches!(outcome, Outcome::Loaded { .. })));
    }
    bed.settle();
    let failed = |bed: &Bed| bed.ssd.report()[0].counters.failed_flushes;
    assert_eq!(failed(&bed), 0);
    // Until the flush, nothing else is written.
    disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    (0..400).find(|_| {
        bed.turn();
        failed(&bed) > 0
    });
    disk.arm(&[]);
    assert_eq!(failed(&bed), 1);
    bed.settle();
    assert_eq!(bed.ssd.report()[0].health_of_writes, Health::Healthy);
}

#[test]
fn a_disk_that_answers_nothing_refuses_new_work_and_answers_the_old_when_it_wakes() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..8).map(|number| (number, 4096)));
    bed.disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Delayed(3000) }]);
    let loads: Vec<_> = (0..4).map(|number| bed.load(number, number, 4096)).collect();
    assert_eq!(bed.ssd.submit(&loads), 4);
    (0..1500).for_each(|_| bed.turn());
    assert_eq!(bed.ssd.health(), Health::Sick(ErrorKind::Timeout));
    assert!(bed.outcomes.is_empty() || loads.iter().all(|op| !bed.outcomes.contains_key(&op.id)));
    assert_eq!(bed.look(5, 4096), Outcome::Failed(ErrorKind::Unavailable), "nothing more waits for it");
    bed.disk.arm(&[]);
    (0..2000).for_each(|_| bed.turn());
    assert!(loads.iter().all(|op| matches!(bed.outcomes[&op.id], Outcome::Loaded { .. })), "late is not lost");
    assert_eq!(bed.ssd.health(), Health::Healthy);
    assert!(matches!(bed.look(5, 4096), Outcome::Loaded { .. }));
}

/// Answers late.
struct Late(Box<dyn Engine>);

impl Late {
    const PAUSE: Duration = Duration::from_millis(20);
}

impl Engine for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        self.0.submit(requests);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        self.0.poll(done);
    }

    fn wait(&mut self, timeout: Duration) {
        std::thread::sleep(Late::PAUSE);
        self.0.wait(timeout);
    }
}

/// Each answer has the whole time: opening a large disk takes longer than it.
#[test]
fn a_disk_that_answers_is_opened_however_long_that_takes() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 64), &config, None).unwrap();
    bed.store_all((0..200).map(|number| (number, 9000)));
    bed.settle();
    let disk = SimulatedDisk::from_image(bed.disk.image());
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let mut late = medium(&disk, None, &pool, 1);
    late.engine = Box::new(Late(late.engine));
    // Less than the headers of all segments take.
    let config = SsdConfig { open_patience: 50 * Late::PAUSE, depth: 1, ..config };
    let begun = Instant::now();
    let ssd = Ssd::on(vec![late], &config).expect("it answers");
    assert!(begun.elapsed() > config.open_patience, "it was opened at once");
    assert_eq!(ssd.report()[0].recovery.blocks, 200);
}

#[test]
fn a_disk_that_stops_answering_while_it_is_opened_is_not_opened() {
    let config = SsdConfig { open_patience: Duration::from_millis(50), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..10).map(|number| (number, 9000)));
    bed.settle();
    let image = bed.disk.image();
    for nth in 0.. {
        let disk = SimulatedDisk::from_image(image.clone());
        disk.arm(&[Fault::once(nth, FaultKind::PowerLoss)]);
        let opened = Bed::open(&disk, &config, None);
        if disk.ios() <= nth {
            assert!(opened.is_ok() && nth > 10, "{nth} of all");
            break;
        }
        assert!(opened.is_err(), "i/o {nth} is under way for ever");
    }
}
