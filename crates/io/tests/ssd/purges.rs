//! What was purged stays away: whatever becomes of the removals in the log, of the heads before them and of the headers
//! of their segments, and whatever a disk does with what it says it has written.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

use forebay_core::NamespaceId;
use forebay_core::tier::{Outcome, Tier};
use forebay_io::ssd::{DiskClaim, SegmentState};
use forebay_io::uring::{EngineChoice, Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;
use crate::files::{file_config, home, open_when_free};

const PAGE: usize = 4096;
const SEGMENT_BYTES: usize = 64 << 10;
/// Where the copies of the list begin, as `docs/formats/ssd.md` draws them.
const LISTS_AT: [usize; 2] = [64 << 10, 576 << 10];
const LIST_BYTES: usize = 64 << 10;

/// As the driver does when a walk has found nothing of the namespace.
pub fn note(bed: &mut Bed, namespaces: impl IntoIterator<Item = u128>) -> bool {
    bed.ssd.note_purged(&namespaces.into_iter().map(NamespaceId).collect::<BTreeSet<_>>());
    for _ in 0..10_000 {
        if let Some(is_noted) = bed.ssd.noted() {
            return is_noted;
        }
        bed.turn();
    }
    panic!("the disk comes to no end with the list of purges: {:?}", bed.ssd.report());
}

/// Removes all blocks; true if the disk says of each that it is gone.
pub fn remove_all(bed: &mut Bed) -> bool {
    let listed = bed.listed();
    let removals: Vec<_> = listed.iter().map(|block| bed.remove(number_of(&block.key))).collect();
    let is_gone = |outcome: &Outcome| matches!(outcome, Outcome::Removed | Outcome::Absent);
    bed.run(&removals).unwrap().iter().all(is_gone)
}

/// A disk in use: closed segments, and an open one that begins with stores. Removals of all blocks fill a page.
fn used_image() -> Vec<u8> {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..40).map(|number| (number, 1 + number * 1999 % 4096)));
    bed.settle();
    let states: Vec<SegmentState> = bed.ssd.segments(0).iter().map(|segment| segment.state).collect();
    assert!(states.contains(&SegmentState::Closed) && states.contains(&SegmentState::Active), "{states:?}");
    bed.disk.image()
}

fn purged_image() -> Vec<u8> {
    let mut bed = Bed::open(&SimulatedDisk::from_image(used_image()), &small_config(), None).unwrap();
    assert!(remove_all(&mut bed) && note(&mut bed, [7]));
    bed.settle();
    bed.disk.image()
}

fn reopened(image: Vec<u8>) -> Bed {
    Bed::open(&SimulatedDisk::from_image(image), &small_config(), None).unwrap()
}

/// Nothing is back, what is stored now is there after another start, and the next purge ends.
fn is_purged_and_goes_on(image: Vec<u8>, context: &str) {
    let mut bed = reopened(image);
    assert!(bed.holds().is_empty(), "{context}: {:?} came back", bed.holds_numbers());
    bed.store_all([(3, 9000), (100, 5000)]);
    bed.settle();
    let mut bed = reopened(bed.disk.image());
    for (number, length_bytes) in [(3, 9000), (100, 5000)] {
        let found = bed.look(number, length_bytes);
        assert!(matches!(found, Outcome::Loaded { .. }), "{context}: block {number} is {found:?}");
    }
    assert_eq!(bed.holds().len(), 2, "{context}");
    assert!(remove_all(&mut bed) && note(&mut bed, [7]), "{context}");
    assert!(reopened(bed.disk.image()).holds().is_empty(), "{context}");
}

#[test]
fn a_bit_that_flips_in_any_page_of_the_log_brings_no_purged_block_back() {
    let image = purged_image();
    for page in (1 << 20..image.len()).step_by(PAGE).filter(|at| image[at + 8] == 1) {
        for at in [page, page + 40, page + 48, page + 60, page + 260, page + 300] {
            let mut image = image.clone();
            image[at] ^= 1 << (at % 7);
            is_purged_and_goes_on(image, &format!("flip at {at:#x}"));
        }
    }
}

#[test]
fn the_loss_of_any_segment_brings_no_purged_block_back() {
    let image = purged_image();
    for segment in (1 << 20..image.len()).step_by(SEGMENT_BYTES) {
        for (from, to) in [(0, SEGMENT_BYTES), (PAGE, SEGMENT_BYTES), (0, PAGE)] {
            let mut image = image.clone();
            image[segment + from..segment + to].fill(0);
            is_purged_and_goes_on(image, &format!("{from} to {to} of {segment:#x}"));
        }
    }
}

/// The numbers of records begin anew with a disk that lost all headers.
#[test]
fn a_disk_that_lost_its_log_after_a_purge_stores_on() {
    let mut image = purged_image();
    for segment in (1 << 20..image.len()).step_by(SEGMENT_BYTES) {
        image[segment + 50] ^= 1;
    }
    is_purged_and_goes_on(image, "no header is left");
}

#[test]
fn what_a_purge_said_is_gone_stays_gone_whatever_the_disk_did_to_any_io_of_it() {
    let image = used_image();
    let kinds = [
        FaultKind::HalfKept,
        FaultKind::Lies,
        FaultKind::Torn,
        FaultKind::Flipped,
        FaultKind::Short(2048),
        FaultKind::Error(Errno::IO),
        FaultKind::Error(Errno::NOSPC),
    ];
    for (kind, count) in kinds.iter().flat_map(|kind| [1, 3, 5].map(|count| (*kind, count))) {
        let mut refused = 0;
        for nth in 0.. {
            let seed = (nth % 2 == 1).then_some(nth);
            let context = format!("{kind:?}, {count} times from i/o {nth}, seed {seed:?}");
            let disk = SimulatedDisk::from_image(image.clone());
            let mut bed = Bed::open(&disk, &small_config(), seed).unwrap();
            bed.settle();
            disk.arm(&[Fault { nth, count, kind }]);
            let armed_at = disk.ios();
            let is_off = remove_all(&mut bed) && note(&mut bed, [7]);
            let is_over = disk.ios() <= armed_at + nth;
            disk.arm(&[]);
            if is_off {
                is_purged_and_goes_on(disk.image(), &context);
                is_purged_and_goes_on(disk.after_power_loss(nth).image(), &format!("{context}, and a power loss"));
            }
            refused += u32::from(!is_off);
            // A pause of the log ends, and the purge is tried again.
            (0..400).for_each(|_| bed.turn());
            assert!(remove_all(&mut bed) && note(&mut bed, [7]), "{context}: the purge never ends");
            is_purged_and_goes_on(disk.image(), &context);
            if is_over {
                break;
            }
        }
        assert!(refused > 0 || kind == FaultKind::Short(2048), "{kind:?}: nothing was noticed");
    }
}

/// A disk whose last segment several daemons have gone on with, behind others.
fn image_of_several_daemons() -> Vec<u8> {
    let mut bed = Bed::open(&blank(&small_config(), 8), &small_config(), None).unwrap();
    bed.store_all((0..8).map(|number| (number, 20_000)));
    for first in [8, 10, 12] {
        bed.store_all((first..first + 2).map(|number| (number, 3000)));
        bed.settle();
        bed = reopened(bed.disk.image());
    }
    bed.settle();
    bed.disk.image()
}

#[test]
fn what_could_not_be_read_when_the_disk_was_opened_is_purged_as_well() {
    let image = image_of_several_daemons();
    for count in [1, 2, 8] {
        let mut unread = 0;
        for nth in 0.. {
            let disk = SimulatedDisk::from_image(image.clone());
            disk.arm(&[Fault { nth, count, kind: FaultKind::Error(Errno::IO) }]);
            let Ok(mut bed) = Bed::open(&disk, &small_config(), None) else { continue };
            let is_over = disk.ios() <= nth;
            disk.arm(&[]);
            unread += 14 - bed.holds().len();
            assert!(remove_all(&mut bed) && note(&mut bed, [7]));
            is_purged_and_goes_on(disk.image(), &format!("{count} failed from i/o {nth}"));
            if is_over {
                break;
            }
        }
        assert!(unread >= 14, "{unread} blocks could not be read");
    }
}

#[test]
fn what_was_out_of_reach_behind_a_damaged_head_is_purged_as_well() {
    let image = image_of_several_daemons();
    let heads = (1 << 20..image.len()).step_by(PAGE).filter(|at| image[*at..].starts_with(b"FBBATCH"));
    for at in heads {
        let mut image = image.clone();
        image[at + 300] ^= 1;
        let mut bed = reopened(image.clone());
        let out_of_reach = 14 - bed.holds().len();
        assert!(remove_all(&mut bed) && note(&mut bed, [7]));
        bed.settle();
        // The sector is read right again, unless it was written meanwhile.
        let mut image_now = bed.disk.image();
        if image_now[at..at + PAGE] == image[at..at + PAGE] {
            image_now[at + 300] ^= 1;
        }
        is_purged_and_goes_on(image_now, &format!("{out_of_reach} blocks were out of reach behind {at:#x}"));
    }
}

fn image_of_a_removed_block() -> Vec<u8> {
    let mut bed = Bed::open(&blank(&small_config(), 8), &small_config(), None).unwrap();
    bed.store_all([(0, 9000)]);
    assert!(remove_all(&mut bed));
    bed.settle();
    bed.disk.image()
}

/// Batches of a daemon of which the power loss keeps a later one and loses the first. The next daemon goes on in the
/// place of the first, with a batch of as many pages.
#[test]
fn what_lies_behind_a_batch_that_a_power_loss_took_is_purged_as_well() {
    let image = image_of_a_removed_block();
    for seed in 0..400 {
        let disk = SimulatedDisk::from_image(image.clone());
        let mut bed = Bed::open(&disk, &small_config(), Some(seed)).unwrap();
        disk.arm(&[Fault::once(1 + seed % 12, FaultKind::PowerLoss)]);
        for number in 10..14 {
            let op = bed.store(number, number, 9000);
            bed.ssd.submit(&[op]);
            bed.ssd.poll(&mut Vec::new());
        }
        (0..20).for_each(|_| bed.ssd.poll(&mut Vec::new()));
        let mut bed = Bed::open(&disk.after_power_loss(seed), &small_config(), None).unwrap();
        assert!(remove_all(&mut bed) && note(&mut bed, [7]));
        bed.store_all([(1, 9000)]);
        bed.settle();
        let mut bed = reopened(bed.disk.image());
        assert_eq!(bed.holds_numbers().keys().copied().collect::<Vec<_>>(), [1], "seed {seed}");
    }
}

/// The disk said that it had kept both batches of a daemon, and had lost the first. The next daemon goes on in its
/// place, with a batch of as many pages.
#[test]
fn what_lies_behind_a_batch_that_the_disk_lost_never_counts_behind_a_later_one() {
    let before = image_of_a_removed_block();
    let mut bed = reopened(before.clone());
    bed.store_all([(10, 9000)]);
    bed.settle();
    let first = bed.disk.image();
    bed.store_all([(11, 9000)]);
    bed.settle();
    let mut image = bed.disk.image();
    for page in (1 << 20..image.len()).step_by(PAGE).map(|at| at..at + PAGE) {
        if first[page.clone()] != before[page.clone()] {
            image[page.clone()].copy_from_slice(&before[page]);
        }
    }
    let mut bed = reopened(image);
    assert!(bed.holds().is_empty(), "the first batch is lost");
    assert!(note(&mut bed, [7]));
    bed.store_all([(1, 9000)]);
    bed.settle();
    let mut bed = reopened(bed.disk.image());
    assert_eq!(bed.holds_numbers().keys().copied().collect::<Vec<_>>(), [1]);
}

#[test]
fn a_damaged_copy_of_the_list_is_made_good_from_the_other() {
    let image = purged_image();
    // Without its log the disk has the list alone.
    let log_gone = |image: &[u8]| {
        let mut image = image.to_vec();
        let heads: Vec<usize> =
            (1 << 20..image.len()).step_by(PAGE).filter(|at| image[*at..].starts_with(b"FBBATCH")).collect();
        heads.into_iter().skip(1).for_each(|at| image[at + 300] ^= 1);
        image
    };
    for [damaged, other] in [LISTS_AT, [LISTS_AT[1], LISTS_AT[0]]] {
        let mut image = image.clone();
        image[damaged + 70] ^= 1;
        is_purged_and_goes_on(log_gone(&image), "one copy is damaged");
        let mut bed = reopened(image);
        bed.settle();
        let mut image = bed.disk.image();
        assert!(image[damaged..damaged + PAGE] == image[other..other + PAGE], "it was written again");
        image[other..other + PAGE].fill(0);
        is_purged_and_goes_on(log_gone(&image), "the other copy is lost later");
    }
    let mut image = image;
    LISTS_AT.iter().for_each(|at| image[at + 70] ^= 1);
    assert!(reopened(image).holds().is_empty(), "the log alone says it too");
}

/// The warning goes with the damage.
#[test]
fn a_list_that_was_lost_is_whole_again_after_one_start_and_a_disk_that_never_had_one_stays_as_it_is() {
    let list = |image: &[u8], at: usize| image[at..at + LIST_BYTES].to_vec();
    let listed = |image: &[u8]| LISTS_AT.map(|at| list(image, at).chunks(PAGE).filter(|page| page[12] > 0).count());
    let zero = |image: &mut [u8], at: usize| image[at..at + LIST_BYTES].fill(0);
    let settled = |image: Vec<u8>| {
        let mut bed = reopened(image);
        bed.settle();
        bed.disk.image()
    };
    let image = purged_image();
    for at in LISTS_AT {
        let mut image = image.clone();
        zero(&mut image, at);
        let image = settled(image);
        assert_eq!(listed(&image), [1, 1], "a copy of zeros beside a whole one is damaged");
    }
    let mut garbage = image.clone();
    LISTS_AT.iter().for_each(|at| garbage[*at..at + LIST_BYTES].fill(0xff));
    let garbage = settled(garbage);
    let pages = LISTS_AT.map(|at| list(&garbage, at).chunks(PAGE).filter(|page| page.starts_with(b"FBPURGES")).count());
    assert_eq!((pages, listed(&garbage)), ([16, 16], [0, 0]), "all pages are whole, and empty");
    let used = used_image();
    let used = settled(used);
    assert!(LISTS_AT.iter().all(|at| list(&used, *at).iter().all(|byte| *byte == 0)), "nothing was purged");
}

/// As a daemon leaves them that is killed between the copies of a full list, again and again.
#[test]
fn full_copies_that_differ_are_cut_to_what_a_list_holds() {
    let mut bed = Bed::open(&blank(&small_config(), 8), &small_config(), None).unwrap();
    assert!(note(&mut bed, 1000..3000));
    let older = bed.disk.image();
    assert!(note(&mut bed, 3000..3100));
    let mut image = bed.disk.image();
    let [first, second] = LISTS_AT;
    image[second..second + LIST_BYTES].copy_from_slice(&older[second..second + LIST_BYTES]);
    for damaged in [first + 70, second + 15 * PAGE + 70] {
        let mut image = image.clone();
        image[damaged] ^= 1;
        let mut bed = reopened(image);
        bed.settle();
        let image = bed.disk.image();
        assert!(image[first..first + LIST_BYTES] == image[second..second + LIST_BYTES], "it was written again");
        bed.store_all([(3, 9000)]);
        assert!(note(&mut bed, 3000..3200));
        assert!(matches!(bed.look(3, 9000), Outcome::Loaded { .. }));
    }
}

/// What a daemon that cannot read the list stores, as an earlier build, which ignores it: `lists` is what that daemon
/// finds there. The list is back when the next one starts.
fn stored_without_the_list_is_kept(mut image: Vec<u8>, lists: u8, context: &str) {
    let kept = LISTS_AT.map(|at| image[at..at + LIST_BYTES].to_vec());
    LISTS_AT.iter().for_each(|at| image[*at..at + LIST_BYTES].fill(lists));
    let mut bed = reopened(image);
    bed.store_all((500..510).map(|number| (number, 3000)));
    bed.settle();
    let mut image = bed.disk.image();
    LISTS_AT.iter().zip(&kept).for_each(|(at, bytes)| image[*at..at + LIST_BYTES].copy_from_slice(bytes));
    let mut bed = reopened(image);
    for number in 500..510 {
        let found = bed.look(number, 3000);
        assert!(matches!(found, Outcome::Loaded { .. }), "{context}: block {number} is {found:?}");
    }
    assert!(remove_all(&mut bed) && note(&mut bed, [7]), "{context}");
    assert!(reopened(bed.disk.image()).holds().is_empty(), "{context}");
}

#[test]
fn what_was_stored_while_the_list_was_not_read_is_not_taken_for_purged() {
    let mut image = purged_image();
    for purges in 1..5 {
        for lists in [0, 0xff] {
            stored_without_the_list_is_kept(image.clone(), lists, &format!("{purges} purges, list {lists}"));
        }
        let mut bed = reopened(image);
        assert!(note(&mut bed, [7]));
        bed.settle();
        image = bed.disk.image();
    }
    // A store of another namespace fails, and what it took of the numbers is not in the log.
    let disk = SimulatedDisk::from_image(image);
    let mut bed = Bed::open(&disk, &small_config(), None).unwrap();
    bed.settle();
    let mut store = bed.store(600, 0, 3000);
    store.key.namespace = NamespaceId(8);
    disk.arm(&[Fault { nth: 0, count: 2, kind: FaultKind::Error(Errno::IO) }]);
    assert!(matches!(bed.run(&[store]).unwrap()[..], [Outcome::Failed(_)]));
    disk.arm(&[]);
    assert!(note(&mut bed, [7]));
    stored_without_the_list_is_kept(disk.image(), 0, "a store has failed");
    // As many daemons purge nothing on a disk that ends with a head of blocks, which is then lost without a trace.
    let mut image = used_image();
    let mut heads = (1 << 20..image.len()).step_by(PAGE).filter(|at| image[*at..].starts_with(b"FBBATCH"));
    let last = heads.next_back().unwrap();
    for _ in 0..4 {
        let mut bed = reopened(image);
        assert!(note(&mut bed, [7]));
        bed.settle();
        image = bed.disk.image();
    }
    assert!(reopened(image.clone()).holds().is_empty());
    image[last..last + PAGE].fill(0);
    stored_without_the_list_is_kept(image, 0, "the last head is lost");
}

/// Anybody who may purge can name many.
#[test]
fn a_purge_of_what_the_disk_does_not_know_writes_a_page_of_each_copy() {
    let mut bed = reopened(used_image());
    let written_bytes = |bed: &Bed| bed.ssd.report()[0].counters.written_bytes;
    assert!(note(&mut bed, 1000..2900));
    bed.settle();
    let before = written_bytes(&bed);
    (5000..5200).for_each(|namespace| assert!(note(&mut bed, [namespace])));
    assert_eq!(written_bytes(&bed) - before, 200 * 2 * PAGE as u64);
}

#[test]
fn a_disk_with_a_list_and_a_damaged_superblock_is_rebuilt() {
    let home = home();
    let path = home.path().join("disk");
    let config = file_config(&path, 9 * MIB);
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
    bed.store_all((0..4).map(|number| (number, 9000)));
    assert!(note(&mut bed, [8]));
    bed.settle();
    drop(bed);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0; 64], 0).unwrap();
    let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
    assert!(bed.ssd.report()[0].recovery.was_rebuilt);
    assert!((0..4).all(|number| matches!(bed.look(number, 9000), Outcome::Loaded { .. })));
    bed.settle();
    drop(bed);
    // What is neither of a list nor zeros is of others.
    file.write_all_at(&[0; 64], 0).unwrap();
    file.write_all_at(b"somebody", (LISTS_AT[0] + PAGE) as u64).unwrap();
    let refused = DiskClaim::new(&config.disks[0]).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("holds other data"), "{refused}");
}

#[test]
fn on_a_real_file_no_engine_finds_purged_blocks_behind_a_flipped_bit() {
    let home = home();
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let path = home.path().join(format!("{engine:?}"));
        let mut config = file_config(&path, 9 * MIB);
        config.engine = engine;
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
        bed.store_all((0..40).map(|number| (number, 9000)));
        assert!(remove_all(&mut bed) && note(&mut bed, [7]));
        bed.settle();
        drop(bed);
        let (mut image, file) = (std::fs::read(&path).unwrap(), std::fs::File::options().write(true).open(&path));
        let heads = (1 << 20..image.len()).step_by(PAGE).filter(|at| image[*at..].starts_with(b"FBBATCH"));
        let heads: Vec<usize> = heads.collect();
        // The first head has blocks; what is behind the second is out of reach.
        image[heads[1] + 300] ^= 1;
        file.unwrap().write_all_at(&image[heads[1]..][..PAGE], heads[1] as u64).unwrap();
        let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
        assert!(bed.holds().is_empty(), "{engine:?}: {:?} came back", bed.holds_numbers());
        bed.store_all([(3, 9000)]);
        assert!(matches!(bed.look(3, 9000), Outcome::Loaded { .. }));
    }
}
