//! Lists of segments while the disk serves: damaged, unreadable, never written, and walked through while blocks move.
//! And blocks that one fingerprint names.

use std::collections::BTreeSet;

use forebay_core::tier::{Outcome, Tier};
use forebay_core::tiers::TierHasher;
use forebay_core::{ErrorKind, NamespaceId};
use forebay_io::ssd::{Inspection, SegmentState, SsdConfig, Walked};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::bed::*;
use crate::purges::note;

const SEGMENT_BYTES: usize = 64 << 10;
const PAGE: usize = 4096;

/// A disk with blocks `0..40`, and its closed segments.
fn used(config: &SsdConfig) -> (Bed, Vec<usize>) {
    let mut bed = Bed::open(&blank(config, 12), config, None).unwrap();
    bed.store_all((0..40).map(|number| (number, 4096)));
    bed.settle();
    let segments = bed.ssd.segments(0).into_iter();
    let closed = segments.filter(|segment| segment.state == SegmentState::Closed && segment.live_blocks > 0);
    let closed: Vec<usize> = closed.map(|segment| segment.index as usize).collect();
    assert!(closed.len() > 1, "{closed:?}");
    (bed, closed)
}

/// The last page of a segment, with the list's own checksum, and the page before it, with records.
fn pages_of_list(segment: usize) -> [usize; 2] {
    let end = (1 << 20) + (segment + 1) * SEGMENT_BYTES;
    [end - PAGE, end - 2 * PAGE]
}

/// What the tier counts is what it has, and what it has is what was stored.
fn accounts_add_up(bed: &mut Bed) {
    bed.settle();
    let held = bed.holds_numbers();
    let report = &bed.ssd.report()[0];
    let segments = bed.ssd.segments(0);
    let live: u64 = segments.iter().map(|segment| u64::from(segment.live_blocks)).sum();
    assert_eq!((report.blocks, live), (held.len() as u64, held.len() as u64), "{segments:?}");
    for number in held.into_keys() {
        let outcome = bed.look(number, 4096);
        assert!(matches!(outcome, Outcome::Loaded { .. } | Outcome::Absent), "block {number} is {outcome:?}");
    }
}

/// Writes the whole disk anew, several times.
fn goes_round(bed: &mut Bed) {
    for round in 0..6 {
        bed.store_all((0..130).map(|number| (1000 + round * 1000 + number, 4096)));
    }
    accounts_add_up(bed);
    assert!(bed.ssd.segments(0).iter().all(|segment| segment.life > 2), "{:?}", bed.ssd.segments(0));
}

#[test]
fn a_list_that_rots_costs_the_blocks_of_its_segment_when_they_are_evicted_and_nothing_before() {
    for page in 0..2 {
        for unreadable in [false, true] {
            let (mut bed, closed) = used(&small_config());
            let at: Vec<usize> = closed.iter().map(|segment| pages_of_list(*segment)[page]).collect();
            match unreadable {
                true => bed.disk.set_unreadable(&at),
                false => at.iter().for_each(|at| bed.disk.alter(*at, |bytes| bytes[200] ^= 4)),
            }
            for number in 0..40 {
                assert!(matches!(bed.look(number, 4096), Outcome::Loaded { .. }), "block {number}");
            }
            bed.disk.set_unreadable(&[]);
            let (mut evicted, mut stored) = (BTreeSet::new(), 100);
            while !(0..40).all(|number| evicted.contains(&number)) {
                bed.store_all((stored..stored + 10).map(|number| (number, 4096)));
                stored += 10;
                evicted.extend(bed.evictions());
                assert!(stored < 1000, "the owner hears of {evicted:?} only");
            }
            goes_round(&mut bed);
            assert_eq!(bed.ssd.report()[0].counters.untold_evictions, 0);
        }
    }
}

#[test]
fn a_walk_gives_up_a_segment_whose_list_is_damaged_and_ends() {
    let (mut bed, closed) = used(&small_config());
    let lost: BTreeSet<u64> = bed
        .blocks()
        .iter()
        .filter(|block| block.segment as usize == closed[0])
        .map(|block| number_of(&block.key))
        .collect();
    bed.disk.alter(pages_of_list(closed[0])[1], |bytes| bytes[77] ^= 1);
    // The walk before has the last list in memory still, and not this one.
    let listed: BTreeSet<u64> = bed.listed().iter().map(|block| number_of(&block.key)).collect();
    assert!(listed.is_disjoint(&lost) && listed.len() == 40 - lost.len(), "{listed:?}, without {lost:?}");
    for number in 0..40 {
        let outcome = bed.look(number, 4096);
        assert_eq!(outcome == Outcome::Absent, lost.contains(&number), "block {number} is {outcome:?}");
    }
    assert_eq!(bed.evictions().into_iter().collect::<BTreeSet<_>>(), lost, "the owner hears of them");
    assert_eq!(bed.ssd.report()[0].counters.corrupt_blocks, lost.len() as u64);
    // They are stored again, and a removal removes them.
    bed.store_all(lost.iter().map(|number| (*number, 4096)));
    accounts_add_up(&mut bed);
    let removals: Vec<_> = (0..40).map(|number| bed.remove(number)).collect();
    assert!(bed.run(&removals).unwrap().iter().all(|outcome| *outcome == Outcome::Removed));
    bed.settle();
    assert!(bed.blocks().is_empty());
    goes_round(&mut bed);
}

#[test]
fn nothing_is_given_up_while_the_whole_disk_cannot_be_read() {
    let (mut bed, _) = used(&small_config());
    bed.disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
    let mut is_new = true;
    for _ in 0..1500 {
        let step = bed.ssd.walk(std::mem::take(&mut is_new), &namespaces());
        assert!(!matches!(step, Walked::End), "7 seconds are not long");
        bed.turn();
    }
    bed.disk.arm(&[]);
    (0..600).for_each(|_| bed.turn());
    assert_eq!(bed.listed().len(), 40);
    accounts_add_up(&mut bed);
}

/// One transfer fails, whichever it is: the list of a full segment, its header, a batch.
#[test]
fn a_disk_goes_round_whatever_transfer_has_failed() {
    for nth in 0..160 {
        let config = small_config();
        let mut bed = Bed::open(&blank(&config, 12), &config, None).unwrap();
        bed.disk.arm(&[Fault { nth, count: 1, kind: FaultKind::Error(Errno::IO) }]);
        for round in 0..3u64 {
            let numbers = round * 60..round * 60 + 60;
            let stores: Vec<_> = numbers.map(|number| bed.store(number, number % SLOTS, 4096)).collect();
            bed.run(&stores).unwrap();
            // A pause after a failure ends.
            (0..400).for_each(|_| bed.turn());
        }
        bed.disk.arm(&[]);
        accounts_add_up(&mut bed);
        let (mut held, image) = (bed.holds_numbers(), bed.disk.image());
        bed.evictions();
        goes_round(&mut bed);
        let mut restarted = Bed::open(&SimulatedDisk::from_image(image), &config, None).unwrap();
        restarted.holds_numbers().into_keys().for_each(|number| _ = held.remove(&number));
        assert!(held.is_empty(), "i/o {nth}: {held:?} were lost with a restart");
    }
}

/// Blocks that are read are carried over all the time, from segments before the walk to segments behind it.
#[test]
fn a_walk_meets_every_block_that_is_there_all_the_time() {
    for seed in 0..40 {
        let config = small_config();
        let mut bed = Bed::open(&blank(&config, 12), &config, Some(seed)).unwrap();
        let mut dice = Dice(seed);
        bed.store_all((0..130).map(|number| (number, 4096)));
        let mut next = 130;
        let (mut is_new, mut met, mut always) = (true, BTreeSet::new(), bed.holds_numbers());
        loop {
            // Hot blocks outlive the segments in which they lie.
            for _ in 0..dice.below(12) {
                let hot = next - 1 - dice.below(120);
                bed.look(hot, 4096);
            }
            if dice.below(3) == 0 {
                let count = 1 + dice.below(12);
                bed.store_all((next..next + count).map(|number| (number, 4096)));
                next += count;
            }
            for number in bed.evictions() {
                always.remove(&number);
            }
            match bed.ssd.walk(std::mem::take(&mut is_new), &namespaces()) {
                Walked::Blocks(some) => met.extend(some.iter().map(|block| number_of(&block.key))),
                Walked::Waits => bed.turn(),
                Walked::End => break,
            }
            assert!(next < 100_000, "seed {seed}: the walk does not end");
        }
        for number in bed.evictions() {
            always.remove(&number);
        }
        let missed: Vec<u64> = always.into_keys().filter(|number| !met.contains(number)).collect();
        assert!(missed.is_empty(), "seed {seed}: {missed:?} were there and were not met");
    }
}

/// A seed under which every hash of 32 bytes in the tests' namespace has the fingerprint 0.
fn colliding() -> TierHasher {
    let (factor, namespace) = (0xd1b5_4a32_d192_ed03u64 ^ 32, 7);
    TierHasher::new((factor.rotate_right(32) ^ namespace).rotate_right(17))
}

#[test]
fn two_blocks_of_one_fingerprint_are_never_taken_for_each_other() {
    let hasher = colliding();
    assert_eq!(hasher.hash(&key(1)), hasher.hash(&key(2)));
    let config = SsdConfig { hasher, ..small_config() };
    let disk = blank(&config, 12);
    let mut bed = Bed::open(&disk, &config, None).unwrap();
    for number in 0..60 {
        bed.store_all([(number, 4096)]);
        assert!(matches!(bed.look(number, 4096), Outcome::Loaded { .. }), "the latest of them is there");
        if number > 0 {
            // The check of the bytes is in `look`.
            let other = bed.look(number - 1, 4096);
            assert_eq!(other, Outcome::Failed(ErrorKind::Corrupt), "it was asked for with another key");
        }
    }
    let removal = bed.remove(3);
    bed.run(&[removal]).unwrap();
    bed.settle();
    let mut bed = Bed::open(&SimulatedDisk::from_image(bed.disk.image()), &config, None).unwrap();
    for number in 0..60 {
        let outcome = bed.look(number, 4096);
        let is_right =
            matches!(outcome, Outcome::Loaded { .. } | Outcome::Absent | Outcome::Failed(ErrorKind::Corrupt));
        assert!(is_right, "block {number} is {outcome:?}");
    }
    let report = &bed.ssd.report()[0];
    assert!(report.blocks <= 1, "one entry for all of them");
}

/// The whole disk cannot be read; writes pass.
pub fn blind(disk: &SimulatedDisk) {
    let all: Vec<usize> = (0..disk.len()).step_by(PAGE).collect();
    disk.set_unreadable(&all);
}

/// Until the disk counts as missing.
fn blind_until_given_up(bed: &mut Bed) {
    blind(&bed.disk);
    for _ in 0..3000 {
        let load = bed.load(3, SLOTS - 1, 4096);
        bed.run(&[load]);
        bed.turn();
    }
}

fn walked(bed: &mut Bed, namespace: u128) -> Vec<u64> {
    let (mut is_new, mut all) = (true, Vec::new());
    for _ in 0..100_000 {
        match bed.ssd.walk(std::mem::take(&mut is_new), &BTreeSet::from([NamespaceId(namespace)])) {
            Walked::Blocks(some) => all.extend(some.iter().map(|block| number_of(&block.key))),
            Walked::Waits => bed.turn(),
            Walked::End => return all,
        }
    }
    panic!("a walk does not end");
}

fn served(bed: &mut Bed) -> Vec<u64> {
    (0..200).filter(|number| matches!(bed.look(*number, 4096), Outcome::Loaded { .. })).collect()
}

fn restarted(bed: &Bed) -> Bed {
    Bed::open(&SimulatedDisk::from_image(bed.disk.image()), &small_config(), None).unwrap()
}

/// The walk of a namespace passes the disk over. Others are walked through and noted before this one is.
#[test]
fn a_purge_that_passed_a_disk_over_holds_whatever_is_purged_meanwhile() {
    let (mut bed, _) = used(&small_config());
    blind_until_given_up(&mut bed);
    assert!(walked(&mut bed, 8).is_empty());
    bed.ssd.note_purged(&BTreeSet::from([NamespaceId(8)]));
    for _ in 0..200 {
        bed.turn();
        assert_eq!(bed.ssd.noted(), None, "it waits while the disk is away");
    }
    assert!(walked(&mut bed, 7).is_empty(), "it is passed over");
    bed.disk.set_unreadable(&[]);
    while bed.ssd.noted().is_none() {
        bed.turn();
    }
    (0..500).for_each(|_| bed.turn());
    assert!(walked(&mut bed, 9).is_empty());
    assert!(note(&mut bed, [7]));
    assert!(served(&mut bed).is_empty());
    assert!(served(&mut restarted(&bed)).is_empty());
}

/// Then the purge no longer relies on the list alone.
#[test]
fn a_purge_that_passed_a_disk_over_is_due_again_when_the_disk_can_be_read() {
    let (mut bed, _) = used(&small_config());
    blind_until_given_up(&mut bed);
    assert!(walked(&mut bed, 7).is_empty(), "it is passed over");
    bed.ssd.note_purged(&BTreeSet::from([NamespaceId(7)]));
    bed.disk.set_unreadable(&[]);
    while bed.ssd.noted().is_none() {
        bed.turn();
    }
    (0..500).for_each(|_| bed.turn());
    assert_eq!(bed.ssd.take_void(), BTreeSet::from([NamespaceId(7)]));
    let removals: Vec<_> = walked(&mut bed, 7).into_iter().map(|number| bed.remove(number)).collect();
    assert_eq!(removals.len(), 40, "no removal names them yet");
    bed.run(&removals).unwrap();
    assert!(walked(&mut bed, 7).is_empty() && note(&mut bed, [7]));
    // The list forgets it.
    (0..21).for_each(|some| assert!(note(&mut bed, 1000 + some * 100..1100 + some * 100)));
    assert!(served(&mut restarted(&bed)).is_empty());
}

/// A restart reads the heads of such a segment, and finds what no walk could name.
#[test]
fn what_was_purged_stays_away_after_a_restart_if_a_segment_had_lost_its_list() {
    let (mut bed, closed) = used(&small_config());
    bed.disk.alter(pages_of_list(closed[0])[1], |bytes| bytes[77] ^= 1);
    for _ in 0..2 {
        let removals: Vec<_> = walked(&mut bed, 7).into_iter().map(|number| bed.remove(number)).collect();
        bed.run(&removals).unwrap();
    }
    assert!(walked(&mut bed, 7).is_empty() && note(&mut bed, [7]));
    bed.store_all((20..25).map(|number| (number, 4096)));
    bed.settle();
    let mut bed = restarted(&bed);
    assert_eq!(served(&mut bed), [20, 21, 22, 23, 24]);
    assert!(bed.ssd.take_void().is_empty(), "what was stored since stays");
}

/// The first store of a daemon fails with its flush, and its record is on the disk. No walk names it: the disk cannot
/// be read, or the segment has lost its list.
#[test]
fn a_purge_covers_a_failed_first_store_that_no_walk_has_named() {
    for (nth, count, is_blind) in (0..6).flat_map(|nth| (1..5).flat_map(move |n| [(nth, n, true), (nth, n, false)])) {
        let config = small_config();
        let disk = blank(&config, 8);
        let mut bed = Bed::open(&disk, &config, None).unwrap();
        bed.store_all((0..5).map(|number| (number, 4096)));
        bed.settle();
        drop(bed);
        let mut bed = Bed::open(&disk, &config, None).unwrap();
        (0..100).for_each(|_| bed.turn());
        let store = bed.store(100, 0, 4096);
        bed.ssd.submit(&[store]);
        disk.arm(&[Fault { nth, count, kind: FaultKind::Error(Errno::IO) }]);
        bed.ended(&[store]);
        (0..20).for_each(|_| bed.turn());
        disk.arm(&[]);
        match is_blind {
            true => blind_until_given_up(&mut bed),
            false => disk.alter(pages_of_list(0)[1], |bytes| bytes[100] ^= 4),
        }
        let context = format!("{count} from i/o {nth}, blind {is_blind}");
        let removals: Vec<_> = walked(&mut bed, 7).into_iter().map(|number| bed.remove(number)).collect();
        bed.run(&removals).unwrap();
        let is_clean = walked(&mut bed, 7).is_empty();
        disk.set_unreadable(&[]);
        (0..5).any(|_| note(&mut bed, [7]));
        assert!(is_clean && note(&mut bed, [7]), "{context}");
        bed.settle();
        assert_eq!(served(&mut bed), [0; 0], "{context}");
        assert_eq!(served(&mut restarted(&bed)), [0; 0], "{context}, after a restart");
    }
}

/// A walk gives up the segment that is being emptied.
#[test]
fn a_segment_may_lose_its_list_while_it_is_reclaimed() {
    for nth in 0..5 {
        let config = SsdConfig { segment_bytes: Some(256 * KIB), ..small_config() };
        let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
        bed.store_all((0..10).map(|number| (number, 4096)));
        bed.settle();
        // A batch that fails: its records are in no list.
        let stores: Vec<_> = (100..139).map(|number| bed.store(number, number - 100, 4096)).collect();
        bed.disk.arm(&[Fault { nth, count: 1, kind: FaultKind::Error(Errno::IO) }]);
        bed.ssd.submit(&stores);
        bed.ended(&stores);
        bed.disk.arm(&[]);
        bed.settle();
        let last_page = (1 << 20) + (256 << 10) - PAGE;
        let (mut number, mut is_new, mut evicted) = (1000, true, 0);
        while number < 4000 {
            let stores: Vec<_> = (0..4).map(|slot| bed.store(number + slot, slot, 4096)).collect();
            number += 4;
            let mut taken = 0;
            while !stores.iter().all(|op| bed.outcomes.contains_key(&op.id)) {
                taken += bed.ssd.submit(&stores[taken..]);
                bed.turn();
                evicted += bed.evictions().len();
                if evicted > 0 {
                    // The reclaim has read the list by now, and the walk has not.
                    bed.disk.set_unreadable(&[last_page]);
                    bed.ssd.walk(std::mem::take(&mut is_new), &BTreeSet::from([NamespaceId(7)]));
                }
            }
        }
        bed.disk.set_unreadable(&[]);
        accounts_add_up(&mut bed);
    }
}

#[test]
fn an_inspection_ends_when_its_disk_cannot_be_read_any_more() {
    let (bed, _) = used(&small_config());
    let disk = SimulatedDisk::from_image(bed.disk.image());
    let pool = Region::anonymous(PAGE).unwrap();
    let mut inspection = Inspection::on(medium(&disk, None, &pool, 0)).unwrap();
    blind(&disk);
    let error = inspection.audit().expect_err("no block can be read");
    assert_eq!(error.kind(), ErrorKind::Io);
    disk.set_unreadable(&[]);
    let mut inspection = Inspection::on(medium(&disk, None, &pool, 0)).unwrap();
    let found = inspection.blocks().filter(Result::is_ok).count();
    assert_eq!(found, 40);
}

#[test]
fn a_tier_with_lost_lists_and_void_blocks_does_not_wake_its_owner() {
    let (mut bed, closed) = used(&small_config());
    bed.disk.alter(pages_of_list(closed[0])[1], |bytes| bytes[77] ^= 1);
    bed.listed();
    bed.store_all((1000..1200).map(|number| (number, 4096)));
    bed.settle();
    blind_until_given_up(&mut bed);
    walked(&mut bed, 7);
    bed.ssd.note_purged(&BTreeSet::from([NamespaceId(7)]));
    bed.disk.set_unreadable(&[]);
    (0..2000).for_each(|_| bed.turn());
    bed.evictions();
    let mut awake = 0;
    for _ in 0..200 {
        bed.turn();
        bed.evictions();
        let mut fds = [PollFd::from_borrowed_fd(bed.ssd.wake_fd(), PollFlags::IN)];
        awake += rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    }
    assert!(awake < 20, "awake after {awake} of 200 turns");
}
