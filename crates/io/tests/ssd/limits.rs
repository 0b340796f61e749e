//! What is bounded: queues, transfers, the budget, space, and what a block may be.

use std::time::Duration;

use forebay_core::tier::{Health, Operation, Outcome, Tier};
use forebay_core::{ErrorKind, Generation, SlotId};
use forebay_io::ssd::{SegmentState, Ssd, SsdConfig};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bed::*;

/// Each record takes a few cache misses in an index of millions, and the thread that decides has other work.
#[test]
fn a_turn_ends_a_few_records_and_asks_for_the_next_one_at_once() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 32), &config, None).unwrap();
    bed.store_all((0..200).map(|number| (number, 4096)));
    let removals: Vec<_> = (0..200).map(|number| bed.remove(number)).collect();
    assert_eq!(bed.ssd.submit(&removals), 200);
    let (mut ended, mut most, mut wakes) = (0, 0, 0);
    for _ in 0..1000 {
        let mut completions = Vec::new();
        bed.now += Duration::from_millis(5);
        bed.ssd.tick(bed.now);
        bed.ssd.poll(&mut completions);
        (ended, most) = (ended + completions.len(), most.max(completions.len()));
        // Nothing else wakes the owner of a simulated disk.
        let mut woken = [PollFd::from_borrowed_fd(bed.ssd.wake_fd(), PollFlags::IN)];
        wakes += poll(&mut woken, Some(&Timespec::default())).unwrap();
    }
    assert_eq!(ended, 200);
    assert!((1..=48).contains(&most), "{most} operations ended in one turn");
    assert!(wakes > 0, "nobody was woken for the rest");
}

/// Each flush delays the reads that made the notes. Somebody waits for other batches, and for a segment's footer.
#[test]
fn notes_of_reads_are_flushed_together_and_hold_up_nobody() {
    let config = SsdConfig { segment_bytes: Some(4 * MIB), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..2400).map(|number| (number, 4096)));
    bed.settle();
    let flushes = |bed: &Bed| bed.ssd.report()[0].counters.flushes;
    let read = |bed: &mut Bed, numbers: std::ops::Range<u64>| {
        for first in numbers.step_by(39) {
            let loads: Vec<_> = (0..39).map(|slot| bed.load(first + slot, slot, 4096)).collect();
            assert!(bed.run(&loads).unwrap().iter().all(|outcome| matches!(outcome, Outcome::Loaded { .. })));
        }
        bed.settle();
    };
    // Fifteen heads.
    let (before, begun) = (flushes(&bed), bed.now);
    read(&mut bed, 0..15 * 39);
    assert!(bed.now - begun < Duration::from_millis(900), "the reads took {:?}", bed.now - begun);
    assert_eq!(flushes(&bed), before, "the notes wait, and the tier is idle nevertheless");
    (0..200).for_each(|_| bed.turn());
    assert_eq!(flushes(&bed), before + 1, "but no longer than a second");
    read(&mut bed, 15 * 39..31 * 39);
    (0..3).for_each(|_| bed.turn());
    assert_eq!(flushes(&bed), before + 2, "nor more of them than sixteen heads");

    read(&mut bed, 31 * 39..46 * 39);
    let begun = bed.now;
    bed.store_all([(5000, 4096)]);
    assert!(bed.now - begun <= Duration::from_millis(50), "a store behind notes took {:?}", bed.now - begun);
    read(&mut bed, 46 * 39..48 * 39);
    let begun = bed.now;
    let removal = bed.remove(5000);
    assert_eq!(bed.run(&[removal]).unwrap(), [Outcome::Removed]);
    assert!(bed.now - begun <= Duration::from_millis(50), "a removal behind notes took {:?}", bed.now - begun);

    // Notes alone fill segments, and each gets its footer at once.
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 256), &config, None).unwrap();
    bed.store_all((0..1200).map(|number| (number, 4096)));
    bed.settle();
    let count = |bed: &Bed, state| bed.ssd.segments(0).iter().filter(|segment| segment.state == state).count();
    let closed = count(&bed, SegmentState::Closed);
    for first in (0..30 * 39).step_by(39) {
        read(&mut bed, first..first + 39);
        (0..4).for_each(|_| bed.turn());
        assert_eq!(count(&bed, SegmentState::Closing), 0, "a footer waits for notes");
    }
    assert!(count(&bed, SegmentState::Closed) > closed, "the notes filled no segment");
}

#[test]
fn operations_of_one_key_count_in_the_order_in_which_they_were_asked_for() {
    for seed in 0..200 {
        let config = small_config();
        let mut bed = Bed::open(&blank(&config, 8), &config, Some(seed)).unwrap();
        let mut dice = Dice(seed);
        let mut last = None;
        let mut ops: Vec<Operation> = Vec::new();
        for slot in 0..12 {
            last = (dice.below(3) > 0).then(|| 1 + dice.below(20_000));
            ops.push(match last {
                Some(length_bytes) => bed.store(1, slot, length_bytes),
                None => bed.remove(1),
            });
        }
        let outcomes = bed.run(&ops).unwrap();
        assert!(outcomes.iter().all(|outcome| !matches!(outcome, Outcome::Failed(_))), "seed {seed}: {outcomes:?}");
        let found = bed.ssd.block(&key(1)).map(|block| block.length_bytes);
        assert_eq!(found, last, "seed {seed}: what was asked last counts");
        let bed = Bed::open(&bed.disk.after_power_loss(seed), &config, None).unwrap();
        let found = bed.ssd.block(&key(1)).map(|block| block.length_bytes);
        assert_eq!(found, last, "seed {seed}: also after a power loss");
    }
}

#[test]
fn full_queues_refuse_and_transfers_stay_within_the_depth() {
    let config = SsdConfig { queued_loads: 5, queued_stores: 7, depth: 4, ..small_config() };
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all([(1, 4096)]);
    bed.settle();
    bed.disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Delayed(100) }]);
    let stores: Vec<_> = (10..40).map(|number| bed.store(number, number, 4096)).collect();
    let loads: Vec<_> = (0..30).map(|slot| bed.load(1, slot, 4096)).collect();
    assert_eq!(bed.ssd.submit(&stores), 7, "as many stores as may wait");
    let taken = bed.ssd.submit(&loads);
    assert_eq!(taken, 5, "as many loads as may wait");
    for _ in 0..50 {
        bed.turn();
        let report = &bed.ssd.report()[0];
        assert!(report.waiting_loads <= 5 && report.waiting_stores <= 7, "{report:?}");
        // A flush and what makes room go beside the depth.
        assert!(report.transfers_in_flight <= 4 + 4, "{} in flight", report.transfers_in_flight);
    }
    bed.disk.arm(&[]);
    bed.settle();
    assert!(stores[..7].iter().all(|op| matches!(bed.outcomes[&op.id], Outcome::Stored)));
    assert!(loads[..taken].iter().all(|op| matches!(bed.outcomes[&op.id], Outcome::Loaded { .. })));
}

#[test]
fn a_block_that_cannot_fit_or_has_no_slot_is_refused() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    let largest = config.segment_bytes.unwrap() - 4 * 4096;
    bed.store_all([(1, largest)]);
    let too_long = bed.store(2, 0, largest + 1);
    let outside =
        Operation { slot: Some((SlotId((SLOTS * SLOT_BYTES / 4096) as u32), Generation(0))), ..bed.store(3, 0, 1) };
    let nowhere = Operation { slot: None, ..bed.store(4, 0, 1) };
    let empty = Operation { length_bytes: 0, ..bed.store(5, 0, 1) };
    let load_outside = Operation { slot: outside.slot, ..bed.load(1, 0, largest) };
    let outcomes = bed.run(&[too_long, outside, nowhere, empty, load_outside]).unwrap();
    assert_eq!(outcomes, [Outcome::Failed(ErrorKind::Invalid); 5]);
    assert!(matches!(bed.look(1, largest), Outcome::Loaded { .. }));
}

#[test]
fn writing_keeps_to_its_budget() {
    let config = SsdConfig { write_bytes_per_second: Some(MIB), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 64), &config, None).unwrap();
    let begun = bed.now;
    bed.store_all((0..300).map(|number| (number, 15_000)));
    let seconds = (bed.now - begun).as_secs_f64();
    let written_bytes = bed.ssd.report()[0].counters.written_bytes as f64;
    // The burst is a second's worth; the last batch may go over.
    let allowed_bytes = (seconds + 1.0) * MIB as f64 + 128.0 * KIB as f64;
    assert!(written_bytes <= allowed_bytes, "{written_bytes} bytes in {seconds} s");
    assert!(seconds > 2.0, "300 blocks of 15 kB take more than two seconds at 1 MiB/s, not {seconds}");
    let daily = SsdConfig { write_bytes_per_day: Some(24 * MIB), ..small_config() };
    let mut bed = Bed::open(&blank(&daily, 64), &daily, None).unwrap();
    let stores: Vec<_> = (0..64).map(|number| bed.store(number, number, 60_000 / 2)).collect();
    bed.ssd.submit(&stores);
    (0..2000).for_each(|_| bed.turn());
    let written_bytes = bed.ssd.report()[0].counters.written_bytes;
    assert!((MIB / 2..MIB + 512 * KIB).contains(&written_bytes), "an hour's worth is 1 MiB, not {written_bytes}");
    assert!(!bed.ssd.is_idle(), "what is over the budget waits");
}

/// A removal is a page, and what it removes must go.
#[test]
fn removals_wait_for_no_budget_and_stand_behind_no_store_of_another_block() {
    for rate in [4 * KIB, 64 * KIB] {
        let config = SsdConfig { write_bytes_per_second: Some(rate), ..small_config() };
        let mut bed = Bed::open(&blank(&config, 64), &config, None).unwrap();
        let first: Vec<_> = (0..16).map(|number| bed.store(number, number, 4096)).collect();
        assert!(bed.run(&first).unwrap().iter().all(|outcome| matches!(outcome, Outcome::Stored)));
        // More than the budget, and more than may wait.
        let stores: Vec<_> = (100..500).map(|number| bed.store(number, number % 60, 40_000)).collect();
        let mut taken = 0;
        for _ in 0..20 {
            taken += bed.ssd.submit(&stores[taken..]);
            bed.turn();
        }
        assert!(taken < stores.len(), "no more stores may wait");
        let waiting = stores[..taken].iter().filter(|op| !bed.outcomes.contains_key(&op.id)).count();
        assert!(waiting > 100, "only {waiting} wait for the budget");
        let removals: Vec<_> = (0..16).map(|number| bed.remove(number)).collect();
        let begun = bed.now;
        assert_eq!(bed.run(&removals).unwrap(), [Outcome::Removed; 16]);
        assert!(bed.now - begun < Duration::from_millis(500), "they took {:?}", bed.now - begun);
        let waits = stores[..taken].iter().filter(|op| !bed.outcomes.contains_key(&op.id)).count();
        assert!(waits > 100, "the stores still wait: {waits}");
        // One of a block whose store waits comes after that.
        let last = stores[..taken].iter().rfind(|op| !bed.outcomes.contains_key(&op.id)).unwrap();
        let removal = Operation { key: last.key, ..bed.remove(0) };
        bed.ssd.submit(&[removal]);
        (0..20).for_each(|_| bed.turn());
        assert!(!bed.outcomes.contains_key(&removal.id), "the store of its block still waits");
    }
}

#[test]
fn a_full_disk_gives_up_its_oldest_blocks_and_keeps_those_that_are_read() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    let mut given_up = Vec::new();
    for number in 0..400 {
        bed.store_all([(number, 4096)]);
        // One block of many is read again and again.
        assert!(matches!(bed.look(0, 4096), Outcome::Loaded { .. }), "after {number} more blocks");
        bed.ssd.take_evicted(&mut given_up, &mut Vec::new());
    }
    assert!(given_up.windows(2).all(|pair| pair[0] != pair[1]) && !given_up.contains(&key(0)));
    let held = bed.holds();
    // Stored one by one, each has a head; three of eight segments are ready for what comes.
    assert!(held.len() > 20, "only {} blocks on 128 pages", held.len());
    assert!(given_up.iter().all(|key| !held.contains_key(key)), "what was given up is gone");
    assert_eq!(given_up.len() + held.len(), 400, "every block is there or was named");
    let newest: Vec<u64> = (0..400).rev().take(20).collect();
    assert!(newest.iter().all(|number| held.contains_key(&key(*number))), "the newest are kept");
    let bed = Bed::open(&bed.disk, &config, None).unwrap();
    assert!(bed.ssd.block(&key(0)).is_some(), "what is read survives restarts too");
}

#[test]
fn memory_is_bounded_by_what_the_disk_holds() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    for round in 0..20 {
        bed.store_all((0..200).map(|number| (round * 1000 + number, 100)));
        let report = &bed.ssd.report()[0];
        assert!(report.index_room_blocks <= 8 * 16, "room for {} blocks on 128 pages", report.index_room_blocks);
    }
}

#[test]
fn one_segment_is_active_and_the_accounts_add_up() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, Some(3)).unwrap();
    bed.store_all((0..300).map(|number| (number, 1 + number * 61 % 20_000)));
    bed.settle();
    let report = &bed.ssd.report()[0];
    let segments = bed.ssd.segments(0);
    let active = segments.iter().filter(|segment| segment.state == SegmentState::Active).count();
    assert!(active <= 1, "{active} are active");
    let blocks: u64 = segments.iter().map(|segment| u64::from(segment.live_blocks)).sum();
    let held = bed.holds();
    assert_eq!((blocks, report.blocks), (held.len() as u64, held.len() as u64));
    assert_eq!(report.live_bytes, held.values().map(|block| block.length_bytes).sum::<u64>());
    let amplification = report.counters.write_amplification().unwrap();
    assert!((1.0..2.0).contains(&amplification), "{amplification}");
}

/// Two disks, one of which fails: its blocks are misses, the other's are served.
#[test]
fn a_disk_that_fails_costs_its_own_blocks_and_no_others() {
    let config = small_config();
    let disks = [blank(&config, 8), blank(&config, 8)];
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = vec![medium(&disks[0], Some(1), &pool, 1), medium(&disks[1], Some(2), &pool, 2)];
    let mut bed = Bed::with(Ssd::on(media, &config).unwrap(), pool, &disks[0]);
    bed.store_all((0..40).map(|number| (number, 4096)));
    let of_first: Vec<u64> = disks_blocks(&mut bed, 0);
    assert!((5..35).contains(&of_first.len()), "both disks are used: {} of 40 on the first", of_first.len());
    disks[0].arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Error(rustix::io::Errno::IO) }]);
    for number in 0..40 {
        let outcome = bed.look(number, 4096);
        let is_there = matches!(outcome, Outcome::Loaded { .. });
        assert_eq!(is_there, !of_first.contains(&number), "block {number}: {outcome:?}");
    }
    assert_eq!(bed.ssd.health(), Health::Healthy, "the tier serves on");
    assert_eq!(bed.ssd.report()[0].health, Health::Sick(ErrorKind::Io));
    bed.ssd.tick(bed.now + Duration::from_millis(1));
}

/// Stores of a disk that hangs end, but for a bounded number that the kernel may still be reading; the other disk goes
/// on.
#[test]
fn a_disk_that_hangs_keeps_a_few_stores_and_holds_up_none_of_the_other_disk() {
    let config = SsdConfig { begun_stores: 6, begun_store_bytes: 4 * 8192, ..small_config() };
    let disks = [blank(&config, 8), blank(&config, 8)];
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = vec![medium(&disks[0], None, &pool, 1), medium(&disks[1], None, &pool, 2)];
    let mut bed = Bed::with(Ssd::on(media, &config).unwrap(), pool, &disks[0]);
    bed.store_all((1000..1040).map(|number| (number, 4096)));
    disks[0].arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Delayed(u32::MAX) }]);
    let stores: Vec<_> = (0..60).map(|number| bed.store(number, number, 8192)).collect();
    assert_eq!(bed.ssd.submit(&stores), 60);
    (0..1200).for_each(|_| bed.turn());
    let ended: Vec<&Outcome> = stores.iter().filter_map(|op| bed.outcomes.get(&op.id)).collect();
    let stored = ended.iter().filter(|outcome| matches!(outcome, Outcome::Stored)).count();
    let failed = ended.iter().filter(|outcome| ***outcome == Outcome::Failed(ErrorKind::Unavailable)).count();
    assert!((15..45).contains(&stored) && 60 - stored - failed == 4, "{stored} stored, {failed} failed");
    let report = bed.ssd.report();
    assert_eq!((report[0].health, report[0].health_of_writes), (Health::Healthy, Health::Sick(ErrorKind::Timeout)));
    assert_eq!(report[0].trouble().unwrap(), "writes are not answered in time");
    assert_eq!((report[1].trouble(), bed.ssd.health()), (None, Health::Healthy));
    // What comes later fails at once, or is stored.
    let stores: Vec<_> = (100..150).map(|number| bed.store(number, number - 100, 8192)).collect();
    let before = bed.now;
    bed.run(&stores).unwrap();
    assert!(bed.now - before < Duration::from_secs(1), "{:?}", bed.now - before);
}

#[test]
fn a_store_that_cannot_begin_for_half_a_minute_fails() {
    let config = SsdConfig { write_bytes_per_second: Some(8 * KIB), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 64), &config, None).unwrap();
    // Five seconds each.
    let stores: Vec<_> = (0..30).map(|number| bed.store(number, number, 40_000)).collect();
    for store in &stores {
        assert_eq!(bed.ssd.submit(&[*store]), 1);
    }
    (0..6100).for_each(|_| bed.turn());
    let timely = stores.iter().filter(|op| matches!(bed.outcomes[&op.id], Outcome::Stored)).count();
    assert!((2..12).contains(&timely), "{timely} stored in 30 s");
    let late = |op: &&Operation| bed.outcomes[&op.id] == Outcome::Failed(ErrorKind::Timeout);
    assert_eq!(stores.iter().filter(late).count(), 30 - timely);
    // A budget that is spent for longer refuses at once.
    let daily = SsdConfig { write_bytes_per_day: Some(24 * 16 * KIB), ..small_config() };
    let mut bed = Bed::open(&blank(&daily, 64), &daily, None).unwrap();
    bed.store_all([(1, 40_000)]);
    let store = bed.store(2, 0, 4096);
    assert_eq!(bed.run(&[store]).unwrap(), [Outcome::Failed(ErrorKind::Full)]);
    assert!(matches!(bed.look(1, 40_000), Outcome::Loaded { .. }), "reading goes on");
}

/// Late loads of one disk stop that disk's loads, for longer and longer, and no other's.
#[test]
fn a_disk_whose_loads_are_late_is_left_alone_and_the_other_serves() {
    let config = SsdConfig { has_breakers: true, ..small_config() };
    let disks = [blank(&config, 8), blank(&config, 8)];
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = vec![medium(&disks[0], None, &pool, 1), medium(&disks[1], None, &pool, 2)];
    let mut bed = Bed::with(Ssd::on(media, &config).unwrap(), pool, &disks[0]);
    bed.store_all((0..60).map(|number| (number, 4096)));
    let of_first = disks_blocks(&mut bed, 0);
    disks[0].arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::Delayed(20) }]);
    let late: Vec<_> = (0..8).map(|slot| bed.load(of_first[slot as usize], slot, 4096)).collect();
    assert_eq!(bed.ssd.submit(&late), 8);
    bed.turn();
    late.iter().for_each(|op| bed.ssd.cancel(op.id));
    assert_eq!(bed.ssd.report()[0].health, Health::Sick(ErrorKind::Timeout));
    assert_eq!((bed.ssd.report()[0].breaker_opened, bed.ssd.health()), (1, Health::Healthy));
    for number in 0..60 {
        let outcome = bed.look(number, 4096);
        let expected = if of_first.contains(&number) { Outcome::Failed(ErrorKind::Unavailable) } else { outcome };
        assert!(outcome == expected && outcome != Outcome::Absent, "block {number}: {outcome:?}");
    }
    (0..30).for_each(|_| bed.turn());
    assert!(late.iter().all(|op| matches!(bed.outcomes[&op.id], Outcome::Loaded { .. })), "late is not lost");
    assert_eq!(bed.ssd.report()[0].health, Health::Sick(ErrorKind::Timeout), "and no proof that it is well");
    disks[0].arm(&[]);
    (0..200).for_each(|_| bed.turn());
    assert!(matches!(bed.look(of_first[0], 4096), Outcome::Loaded { .. }), "after a second it is tried again");
}

fn disks_blocks(bed: &mut Bed, disk: usize) -> Vec<u64> {
    let blocks = bed.ssd.report()[disk].blocks as usize;
    // Blocks come disk by disk.
    let all: Vec<u64> = bed.blocks().into_iter().map(|block| number_of(&block.key)).collect();
    assert_eq!(disk, 0);
    all[..blocks].to_vec()
}

/// A segment of small blocks has more records than one call encodes.
#[test]
fn a_footer_of_many_records_is_read_as_it_was_made() {
    let config = SsdConfig { segment_bytes: Some(8 * MIB), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..2500).map(|number| (number, 100)));
    bed.settle();
    let first = &bed.ssd.segments(0)[0];
    assert!(first.state == SegmentState::Closed && first.live_blocks > 1536, "{first:?}");
    let mut bed = Bed::open(&SimulatedDisk::from_image(bed.disk.image()), &config, None).unwrap();
    let recovery = bed.ssd.report()[0].recovery;
    assert_eq!((recovery.segments_with_footer, recovery.blocks, recovery.blocks_not_whole), (1, 2500, 0));
    (0..2500).step_by(97).for_each(|number| assert!(matches!(bed.look(number, 100), Outcome::Loaded { .. })));
}
