//! What was purged while a disk was away: the pool and the disks that were there tell it, and it loses nothing else.

use std::collections::BTreeMap;

use forebay_core::NamespaceId;
use forebay_core::checksum::checksum;
use forebay_core::tier::Outcome;
use forebay_io::ssd::{PoolPurges, Ssd};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;
use crate::purges::{note, remove_all};

const BLOCK_BYTES: u64 = 4000;

/// The disks with these numbers, in this order, as the next daemon finds them.
fn host(disks: &[(u128, &SimulatedDisk)]) -> Bed {
    below(PoolPurges::default(), disks)
}

/// The same, below a pool that knows of these purges.
fn below(purges: PoolPurges, disks: &[(u128, &SimulatedDisk)]) -> Bed {
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = disks.iter().map(|(id, disk)| medium(disk, None, &pool, *id)).collect();
    Bed::with(Ssd::on_below(purges, media, &small_config()).unwrap(), pool, disks[0].1)
}

fn copy_of(disk: &SimulatedDisk) -> SimulatedDisk {
    SimulatedDisk::from_image(disk.image())
}

/// Stores what is missing of these blocks, none of which is on two disks.
fn store(bed: &mut Bed, numbers: std::ops::Range<u64>) {
    bed.store_all(numbers.map(|number| (number, BLOCK_BYTES)));
    bed.settle();
}

/// All the blocks that a load brings, of those with these numbers.
fn served(bed: &mut Bed, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| matches!(bed.look(*number, BLOCK_BYTES), Outcome::Loaded { .. })).collect()
}

fn all(numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.collect()
}

fn purge(bed: &mut Bed) {
    assert!(remove_all(bed) && note(bed, [7]));
    bed.settle();
}

/// Two disks that both have some of the first forty blocks.
fn two_disks() -> [SimulatedDisk; 2] {
    let disks = [(); 2].map(|()| blank(&small_config(), 8));
    // One after another: a disk takes the blocks if it is alone.
    store(&mut host(&[(1, &disks[0])]), 0..20);
    store(&mut host(&[(2, &disks[1])]), 20..40);
    assert_eq!(served(&mut host(&[(1, &disks[0]), (2, &disks[1])]), 0..40), all(0..40));
    disks
}

#[test]
fn what_was_purged_while_a_disk_was_away_is_void_on_it_for_good() {
    for is_first in [true, false] {
        let [away, there] = two_disks();
        purge(&mut host(&[(2, &there)]));
        let order = |is_first: bool| match is_first {
            true => host(&[(1, &away), (2, &there)]),
            false => host(&[(2, &there), (1, &away)]),
        };
        let mut bed = order(is_first);
        assert_eq!((served(&mut bed, 0..40), bed.holds().len()), (vec![], 0));
        bed.settle();
        store(&mut bed, 10..30);
        drop(bed);
        // Alone too, without the disk that told it.
        let known: Vec<u64> =
            [&away, &there].into_iter().flat_map(|disk| served(&mut host(&[(9, disk)]), 0..40)).collect();
        assert_eq!(BTreeMap::from_iter(known.iter().map(|number| (*number, ()))).len(), 20, "{known:?}");
        let mut bed = order(!is_first);
        assert_eq!(served(&mut bed, 0..40), all(10..30), "what was stored since stays");
    }
}

#[test]
fn a_purge_is_told_once_and_what_is_stored_of_its_namespace_afterwards_stays() {
    let [first, second] = two_disks();
    let mut bed = host(&[(1, &first), (2, &second)]);
    purge(&mut bed);
    store(&mut bed, 0..20);
    for _ in 0..3 {
        let mut bed = host(&[(2, &second), (1, &first)]);
        assert_eq!(served(&mut bed, 0..40), all(0..20));
        bed.settle();
    }
    // The disk that was there keeps what it has stored since; the other loses what it had.
    let away = copy_of(&first);
    let mut bed = host(&[(2, &second)]);
    purge(&mut bed);
    store(&mut bed, 100..110);
    let mut bed = host(&[(2, &second), (1, &away)]);
    assert_eq!(served(&mut bed, 0..200), all(100..110));
}

/// A backup, or a snapshot that was put back.
#[test]
fn a_copy_of_a_disk_from_before_a_purge_brings_nothing_back() {
    let [first, second] = two_disks();
    let copy = copy_of(&first);
    let mut bed = host(&[(1, &first), (2, &second)]);
    purge(&mut bed);
    // The next purge of the same namespace counts, not the first one that both know.
    let later = copy_of(&first);
    store(&mut bed, 0..20);
    let latest = copy_of(&first);
    purge(&mut bed);
    for old in [copy, later, latest] {
        let mut bed = host(&[(1, &old), (2, &second)]);
        assert_eq!((served(&mut bed, 0..40), bed.holds().len()), (vec![], 0));
    }
}

#[test]
fn other_namespaces_of_the_disk_are_served_as_before() {
    let [away, there] = two_disks();
    let mut bed = host(&[(2, &there)]);
    assert!(note(&mut bed, [8, 9]));
    drop(bed);
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert_eq!(served(&mut bed, 0..40), all(0..40));
    // A blank disk takes over what the others know, and tells it when they are gone.
    let blank = blank(&small_config(), 8);
    let old = copy_of(&away);
    bed.settle();
    purge(&mut bed);
    drop(bed);
    host(&[(3, &blank), (2, &there)]).settle();
    let mut bed = host(&[(3, &blank), (1, &old)]);
    assert!(served(&mut bed, 0..20).is_empty());
    let other = NamespaceId(8);
    assert!(note(&mut bed, [other.0]));
}

/// Removals of blocks that are void already are harmless, and a purge under way ends.
#[test]
fn a_purge_goes_on_with_a_disk_that_was_told() {
    let [away, there] = two_disks();
    purge(&mut host(&[(2, &there)]));
    let mut bed = host(&[(1, &away), (2, &there)]);
    purge(&mut bed);
    store(&mut bed, 0..5);
    drop(bed);
    assert_eq!(served(&mut host(&[(1, &away), (2, &there)]), 0..40), all(0..5));
}

/// The copy answers first, and hears of a purge. That is no step beyond the disk.
#[test]
fn a_disk_is_used_and_not_its_older_copy_that_was_told_of_a_purge() {
    let [disk, other] = two_disks();
    let mut bed = host(&[(2, &other)]);
    assert!(note(&mut bed, [8]));
    drop(bed);
    let copy = copy_of(&disk);
    store(&mut host(&[(1, &disk)]), 100..110);
    let mut bed = host(&[(2, &other), (1, &copy), (1, &disk)]);
    bed.settle();
    assert_eq!(served(&mut bed, 100..110), all(100..110));
}

/// A store fails, and so does the list; the disk takes both again later.
#[test]
fn a_list_that_could_not_be_written_is_written_when_the_disk_takes_it() {
    let [away, there] = two_disks();
    purge(&mut host(&[(2, &there)]));
    let mut bed = host(&[(1, &away), (2, &there)]);
    away.arm(&[Fault { nth: 0, count: 3, kind: FaultKind::Error(Errno::NOSPC) }]);
    (0..20).for_each(|_| bed.turn());
    away.arm(&[]);
    (0..400).for_each(|_| bed.turn());
    bed.settle();
    drop(bed);
    assert!(served(&mut host(&[(1, &away)]), 0..40).is_empty(), "it was told, and alone it knows it still");
}

/// The times of all purges of a list lie ahead.
fn set_ahead(disk: &SimulatedDisk) -> SimulatedDisk {
    let mut image = disk.image();
    for page in [64 << 10, 576 << 10].into_iter().flat_map(|at| (at..at + (64 << 10)).step_by(4096)) {
        let page = &mut image[page..page + 4096];
        let count = u32::from_le_bytes(page[12..16].try_into().unwrap()) as usize;
        for record in page[64..].chunks_exact_mut(32).take(count) {
            let time = u64::from_le_bytes(record[24..].try_into().unwrap()) + 86_400_000_000;
            record[24..].copy_from_slice(&time.to_le_bytes());
        }
        let seal = checksum(&page[..4088]);
        page[4088..].copy_from_slice(&seal.to_le_bytes());
    }
    SimulatedDisk::from_image(image)
}

#[test]
fn a_purge_after_the_clock_was_set_back_is_the_latest_all_the_same() {
    let [away, there] = two_disks();
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert!(note(&mut bed, 1000..3000));
    let [away, there] = [&away, &there].map(set_ahead);
    let mut bed = host(&[(2, &there)]);
    purge(&mut bed);
    drop(bed);
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert!(served(&mut bed, 0..40).is_empty());
}

fn due_again(bed: &mut Bed) -> Vec<u128> {
    bed.ssd.take_void().into_iter().map(|namespace| namespace.0).collect()
}

/// It may have served some before, into the pool and to other disks.
#[test]
fn what_a_disk_has_missed_is_due_again_until_it_was_purged_again_even_if_the_disk_has_none_left() {
    let [away, there] = two_disks();
    purge(&mut host(&[(2, &there)]));
    assert!(remove_all(&mut host(&[(1, &away)])));
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert_eq!(due_again(&mut bed), [7]);
    bed.settle();
    // The daemon ends before it has purged again.
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert_eq!(due_again(&mut bed), [7]);
    purge(&mut bed);
    store(&mut bed, 0..20);
    let mut bed = host(&[(1, &away), (2, &there)]);
    assert_eq!((due_again(&mut bed), served(&mut bed, 0..40)), (vec![], all(0..20)));
}

#[test]
fn what_a_copy_has_missed_is_due_again_though_the_disk_takes_its_place_at_once() {
    let [disk, _] = two_disks();
    let copy = copy_of(&disk);
    let mut bed = host(&[(1, &disk)]);
    purge(&mut bed);
    store(&mut bed, 100..110);
    let mut bed = host(&[(1, &copy), (1, &disk)]);
    assert_eq!((due_again(&mut bed), served(&mut bed, 0..200)), (vec![7], all(100..110)));
}

#[test]
fn a_blank_disk_has_missed_nothing() {
    let [_, there] = two_disks();
    purge(&mut host(&[(2, &there)]));
    let blank = blank(&small_config(), 8);
    for _ in 0..2 {
        let mut bed = host(&[(3, &blank), (2, &there)]);
        assert_eq!(due_again(&mut bed), []);
        bed.settle();
    }
}

/// Without the removals, only the list of purges says that the blocks before are void.
#[test]
fn damage_to_the_removals_of_a_purge_makes_nothing_due_again() {
    let [first, second] = two_disks();
    let mut bed = host(&[(1, &first), (2, &second)]);
    purge(&mut bed);
    store(&mut bed, 0..20);
    drop(bed);
    let segment_bytes = small_config().segment_bytes.unwrap() as usize;
    for header in (1 << 20..first.image().len()).step_by(segment_bytes) {
        let damaged = copy_of(&first);
        damaged.alter(header, |bytes| bytes[40] ^= 1);
        let mut bed = host(&[(1, &damaged), (2, &second)]);
        assert_eq!(due_again(&mut bed), [], "header at {header}");
        assert!(served(&mut bed, 20..40).is_empty());
    }
}

/// Of this namespace, in the year 2005.
fn known(namespace: u128) -> BTreeMap<NamespaceId, u64> {
    BTreeMap::from([(NamespaceId(namespace), 1 << 50)])
}

#[test]
fn the_pool_tells_a_disk_of_a_purge_that_no_other_disk_knows_of() {
    let [away, _] = two_disks();
    let mut bed = below(PoolPurges::new(known(7), true), &[(1, &away)]);
    assert_eq!((due_again(&mut bed), bed.ssd.take_heard()), (vec![7], None));
    assert_eq!((served(&mut bed, 0..20), bed.holds().len()), (vec![], 0));
    bed.settle();
    drop(bed);
    // Below another pool too, and until it was purged again.
    let mut bed = host(&[(1, &away)]);
    assert_eq!((due_again(&mut bed), served(&mut bed, 0..20)), (vec![7], vec![]));
    purge(&mut bed);
    store(&mut bed, 0..20);
    drop(bed);
    let mut bed = below(PoolPurges::new(known(7), true), &[(1, &away)]);
    assert_eq!(served(&mut bed, 0..20), all(0..20), "the disk knows of a later one");
}

#[test]
fn a_blank_disk_below_a_pool_that_knows_of_purges_keeps_all_that_is_stored_on_it() {
    let blank = blank(&small_config(), 8);
    for numbers in [0..10, 10..20, 20..20] {
        let mut bed = below(PoolPurges::new(known(7), true), &[(3, &blank)]);
        assert_eq!((due_again(&mut bed), bed.ssd.take_heard()), (vec![], None));
        assert_eq!(served(&mut bed, 0..20), all(0..numbers.start));
        store(&mut bed, numbers);
    }
}

/// A disk that had not heard of it either may have filled the pool, and be gone.
#[test]
fn what_a_disk_knows_and_its_pool_does_not_is_due_again_until_the_pool_knows_it() {
    let [_, there] = two_disks();
    let mut bed = host(&[(2, &there)]);
    purge(&mut bed);
    store(&mut bed, 100..110);
    drop(bed);
    for purges in [BTreeMap::new(), known(7)] {
        let mut bed = below(PoolPurges::new(purges, true), &[(2, &there)]);
        assert_eq!((due_again(&mut bed), bed.ssd.take_heard()), (vec![7], None));
    }
    let mut bed = below(PoolPurges::new(BTreeMap::new(), true), &[(2, &there)]);
    purge(&mut bed);
    let purges = BTreeMap::from([(NamespaceId(7), bed.ssd.purge_time(NamespaceId(7)).unwrap())]);
    store(&mut bed, 0..20);
    drop(bed);
    let mut bed = below(PoolPurges::new(purges, true), &[(2, &there)]);
    assert_eq!((due_again(&mut bed), served(&mut bed, 0..20)), (vec![], all(0..20)));
}

#[test]
fn a_pool_that_has_met_no_disk_hears_of_purges_from_the_first_that_is_not_blank_and_nothing_is_due_again() {
    let ([first, there], [blank, other]) = (two_disks(), [(); 2].map(|()| blank(&small_config(), 8)));
    let mut bed = host(&[(1, &first), (2, &there)]);
    purge(&mut bed);
    store(&mut bed, 0..20);
    let heard = bed.ssd.purge_time(NamespaceId(7)).map(|time| (NamespaceId(7), time));
    assert_eq!(bed.ssd.take_heard(), Some(BTreeMap::new()), "these disks knew of none when they met");
    drop(bed);
    let mut bed = host(&[(3, &blank), (4, &other)]);
    assert_eq!(bed.ssd.take_heard(), None);
    drop(bed);
    let blank = self::blank(&small_config(), 8);
    for disks in [&[(2, &there)][..], &[(3, &blank), (1, &first)], &[(1, &first), (2, &there)]] {
        let mut bed = below(PoolPurges::new(known(7), false), disks);
        assert_eq!(bed.ssd.take_heard(), Some(heard.into_iter().collect()));
        assert_eq!((bed.ssd.take_heard(), due_again(&mut bed)), (None, vec![]));
    }
}

#[test]
fn a_purge_is_later_than_all_that_the_pool_knows_if_the_clock_was_set_back() {
    let [first, _] = two_disks();
    let ahead = BTreeMap::from([(NamespaceId(8), 1 << 60)]);
    let mut bed = below(PoolPurges::new(ahead, true), &[(1, &first)]);
    purge(&mut bed);
    assert_eq!(bed.ssd.purge_time(NamespaceId(7)), Some((1 << 60) + 2));
}
