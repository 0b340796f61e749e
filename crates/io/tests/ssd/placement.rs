//! Which disk a block goes to: what is left of prompts when a disk is lost, how even the disks are filled, and where
//! new blocks go while a disk is sick.
//!
//! `cargo test -p forebay-io --test ssd placement -- --nocapture` prints the measurements beside what a disk chosen by
//! each block's own key gives.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::checksum::checksum;
use forebay_core::tier::{Health, Lineage, Operation, Outcome, Position, Tier};
use forebay_io::ssd::{DiskClaim, Ssd, SsdConfig};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::{Bed, Dice, KIB, MIB, SLOT_BYTES, SLOTS, blank, key, medium, number_of, numbers_of, small_config};
use crate::files::{file_config, home};

const BLOCK_BYTES: u64 = 4 * KIB;
const DISKS: usize = 8;
/// As `placement::RUN_BLOCKS`.
const RUN: usize = 64;

/// Several disks, in memory.
fn host(disks: &[SimulatedDisk], config: &SsdConfig) -> Bed {
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = disks.iter().zip(1..).map(|(disk, id)| medium(disk, None, &pool, id)).collect();
    Bed::with(Ssd::on(media, config).unwrap(), pool, &disks[0])
}

fn blanks(count: usize, segments: u64) -> (Vec<SimulatedDisk>, SsdConfig) {
    let config = SsdConfig { segment_bytes: Some(256 * KIB), ..small_config() };
    ((0..count).map(|_| blank(&config, segments)).collect(), config)
}

/// A block of a prompt; a prompt's blocks are numbered one after another.
fn block_of(prompt: u64, at: u64) -> u64 {
    prompt << 16 | at
}

fn position(number: u64) -> Position {
    Position::new((number << 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn lineage(number: u64) -> Lineage {
    let is_first = number & 0xFFFF == 0;
    Lineage { own: position(number), parent: (!is_first).then(|| position(number - 1)) }
}

/// Stores these blocks, in this order.
fn store(bed: &mut Bed, numbers: &[u64]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for some in numbers.chunks(SLOTS as usize - 1) {
        let of = |(slot, number): (u64, &u64)| Operation {
            lineage: Some(lineage(*number)),
            ..bed.store(*number, slot, BLOCK_BYTES)
        };
        let stores: Vec<_> = (0..).zip(some).map(of).collect();
        outcomes.extend(bed.run(&stores).unwrap());
    }
    outcomes
}

fn is_stored(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Stored)
}

/// The blocks of each disk.
fn by_disk(bed: &mut Bed) -> Vec<Vec<u64>> {
    let mut blocks = bed.blocks().into_iter().map(|block| number_of(&block.key));
    bed.ssd.report().iter().map(|disk| blocks.by_ref().take(disk.blocks as usize).collect()).collect()
}

/// Prompts that are stored at the same time, a few blocks of each in turn, as engines store them.
fn interleaved(lengths: &[u64], dice: &mut Dice) -> Vec<u64> {
    let (mut next, mut numbers) = (vec![0; lengths.len()], Vec::new());
    while let Some(prompt) = {
        let open: Vec<usize> = (0..lengths.len()).filter(|prompt| next[*prompt] < lengths[*prompt]).collect();
        (!open.is_empty()).then(|| open[dice.below(open.len() as u64) as usize])
    } {
        for _ in 0..(1 + dice.below(8)).min(lengths[prompt] - next[prompt]) {
            numbers.push(block_of(prompt as u64, next[prompt]));
            next[prompt] += 1;
        }
    }
    numbers
}

/// The disk of a block whose key alone chooses it.
fn by_key(number: u64) -> usize {
    (checksum(key(number).hash.as_bytes()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % DISKS
}

/// What is left of prompts of these lengths if one disk is lost, over all disks: the share of whole prompts, the blocks
/// that are left of one up to the first that is lost, and all of them.
fn left_over(lengths: &[u64], disk_of: impl Fn(u64) -> usize) -> (f64, f64, f64) {
    let (mut whole, mut left, mut all) = (0, 0, 0);
    for lost in 0..DISKS {
        for (prompt, length) in (0..).zip(lengths) {
            let kept = (0..*length).take_while(|at| disk_of(block_of(prompt, *at)) != lost).count() as u64;
            whole += u64::from(kept == *length);
            left += kept;
            all += length;
        }
    }
    let cases = (DISKS * lengths.len()) as f64;
    (whole as f64 / cases, left as f64 / cases, all as f64 / cases)
}

/// Of as many loads as the core has under way, those of the busiest disk, as a multiple of its even part: the mean over
/// all such pieces of long prompts. So many times longer takes a load than on disks that are all as busy.
fn busiest(lengths: &[u64], disk_of: impl Fn(u64) -> usize) -> Option<f64> {
    const LOADS: u64 = 1024;
    let mut ratios = Vec::new();
    for (prompt, length) in (0..).zip(lengths) {
        for from in (0..).take_while(|from| from + LOADS <= *length) {
            let mut counts = [0u64; DISKS];
            (from..from + LOADS).for_each(|at| counts[disk_of(block_of(prompt, at))] += 1);
            ratios.push((counts.into_iter().max().unwrap() * DISKS as u64) as f64 / LOADS as f64);
        }
    }
    (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
}

#[test]
fn prompts_outlive_a_lost_disk_by_runs_and_not_by_single_blocks() {
    let mut dice = Dice(5);
    for (what, lengths) in [
        ("200 prompts of 1 to 40 blocks", (0..200).map(|_| 1 + dice.below(40)).collect::<Vec<_>>()),
        ("24 prompts of 60 to 200 blocks", (0..24).map(|_| 60 + dice.below(140)).collect()),
        ("2 prompts of 2048 blocks", vec![2048; 2]),
    ] {
        let (disks, config) = blanks(DISKS, 24);
        let mut bed = host(&disks, &config);
        let numbers = interleaved(&lengths, &mut dice);
        assert!(store(&mut bed, &numbers).iter().all(is_stored));
        bed.settle();
        let held = by_disk(&mut bed);
        let places: BTreeMap<u64, usize> =
            held.iter().enumerate().flat_map(|(disk, numbers)| numbers.iter().map(move |n| (*n, disk))).collect();
        assert_eq!(places.len(), numbers.len(), "{what}: each block is on one disk");
        let (whole, left, all) = left_over(&lengths, |number| places[&number]);
        let (whole_by_key, left_by_key, _) = left_over(&lengths, by_key);
        let counts: Vec<usize> = held.iter().map(Vec::len).collect();
        println!("{what}, of {all:.0} blocks on average, if one of {DISKS} disks is lost:");
        println!("  by run: {:.1} % whole, {left:.1} blocks left; blocks by disk {counts:?}", 100.0 * whole);
        println!("  by key: {:.1} % whole, {left_by_key:.1} blocks left", 100.0 * whole_by_key);
        if let Some(by_run) = busiest(&lengths, |number| places[&number]) {
            let by_key = busiest(&lengths, by_key).unwrap();
            println!("  of 1,024 loads the busiest disk has {by_run:.2} times its part; by key {by_key:.2}");
            assert!(by_run < 2.0, "all disks read for a long prompt: {by_run}");
        }
        // A prompt of so many runs is on so many disks.
        let runs = |length: &u64| length.div_ceil(RUN as u64).min(DISKS as u64) as f64;
        let expected = lengths.iter().map(|length| 1.0 - runs(length) / DISKS as f64).sum::<f64>();
        assert!(whole >= expected / lengths.len() as f64 - 0.001, "{what}: {whole} whole, {expected} expected");
        assert!(left >= 1.7 * left_by_key, "{what}: {left} against {left_by_key}");
        // Each disk has its part, but for a run of each prompt that was stored last.
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= RUN.max(numbers.len() / 20), "{what}: {counts:?}");

        // In fact: one disk is taken away, and the daemon starts with the others.
        let lost = dice.below(DISKS as u64) as usize;
        let others: Vec<_> = (0..DISKS).filter(|disk| *disk != lost).collect();
        let images: Vec<_> = others.iter().map(|disk| SimulatedDisk::from_image(disks[*disk].image())).collect();
        let mut bed = host(&images, &config);
        let there: HashSet<u64> = bed.blocks().into_iter().map(|block| number_of(&block.key)).collect();
        assert!(numbers.iter().all(|number| there.contains(number) == (places[number] != lost)));
        // What is stored again goes to the others, and the prompts are whole.
        let gone: Vec<u64> = numbers.iter().copied().filter(|number| places[number] == lost).collect();
        assert!(store(&mut bed, &gone).iter().all(is_stored));
        assert_eq!(bed.blocks().len(), numbers.len());
        assert!(matches!(bed.look(gone[0], BLOCK_BYTES), Outcome::Loaded { .. }));
    }
}

/// Opens files as a daemon does after another: the other's locks may need a moment to go.
fn open_all(config: &SsdConfig, pool: &Region) -> Ssd {
    let deadline = Instant::now() + Duration::from_secs(30);
    let claim = |disk| loop {
        let claim = DiskClaim::new(disk).and_then(|mut claim| Ok((claim.is_earlier_io_done()?, claim)));
        match claim {
            Ok((true, claim)) => return claim,
            Err(error) if error.kind() != ErrorKind::Unavailable => panic!("{error}"),
            _ if Instant::now() > deadline => panic!("the disk does not become free"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    Ssd::open(config.disks.iter().map(claim).collect(), config, pool).unwrap()
}

#[test]
fn prompts_on_eight_files_are_whole_or_gone_when_one_file_is_lost() {
    let home = home();
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let disk_of = |disk| file_config(&home.path().join(format!("disk-{disk}")), 8 * MIB).disks.remove(0);
    let disks = (0..DISKS).map(disk_of).collect();
    let mut config = SsdConfig { segment_bytes: Some(256 * KIB), ..SsdConfig::new(disks) };
    let mut dice = Dice(9);
    let lengths: Vec<u64> = (0..48).map(|_| 1 + dice.below(RUN as u64)).collect();
    let numbers = interleaved(&lengths, &mut dice);
    let mut bed = Bed::on_file(open_all(&config, &pool), &pool);
    assert!(store(&mut bed, &numbers).iter().all(is_stored));
    let counts: Vec<u64> = bed.ssd.report().iter().map(|disk| disk.blocks).collect();
    bed.settle();
    drop(bed);

    std::fs::remove_file(config.disks.remove(3).path).unwrap();
    let mut bed = Bed::on_file(open_all(&config, &pool), &pool);
    let there: HashSet<u64> = bed.blocks().into_iter().map(|block| number_of(&block.key)).collect();
    let mut whole = 0;
    for (prompt, length) in (0..).zip(&lengths) {
        let kept = (0..*length).filter(|at| there.contains(&block_of(prompt, *at))).count() as u64;
        assert!(kept == 0 || kept == *length, "{kept} of {length} blocks");
        whole += u64::from(kept > 0);
    }
    assert!((36..48).contains(&whole), "{whole} of 48 are whole; blocks by disk {counts:?}");
    let gone: Vec<u64> = numbers.iter().copied().filter(|number| !there.contains(number)).collect();
    assert!(store(&mut bed, &gone).iter().all(is_stored));
    assert_eq!(bed.blocks().len(), numbers.len());
}

#[test]
fn one_long_prompt_goes_round_over_all_disks() {
    let (disks, config) = blanks(DISKS, 24);
    let mut bed = host(&disks, &config);
    let numbers: Vec<u64> = (0..(3 * DISKS * RUN) as u64).map(|at| block_of(0, at)).collect();
    assert!(store(&mut bed, &numbers).iter().all(is_stored));
    bed.settle();
    for mut held in by_disk(&mut bed) {
        held.sort_unstable();
        assert_eq!(held.len(), 3 * RUN);
        for run in held.chunks(RUN) {
            assert!(run[0] % RUN as u64 == 0 && run.windows(2).all(|pair| pair[1] == pair[0] + 1), "{run:?}");
        }
        // Any eight runs in a row are on eight disks.
        assert!(held.chunks(RUN).map(|run| run[0] / RUN as u64 / DISKS as u64).eq(0..3), "{held:?}");
    }
}

/// A system prompt, and many questions behind it.
#[test]
fn prompts_with_one_beginning_do_not_all_go_to_its_disk() {
    let (disks, config) = blanks(DISKS, 24);
    let mut bed = host(&disks, &config);
    let beginning: Vec<u64> = (0..10).map(|at| block_of(0, at)).collect();
    assert!(store(&mut bed, &beginning).iter().all(is_stored));
    for prompt in 1..=80 {
        let stores: Vec<_> = (0..20)
            .map(|at| {
                let number = block_of(prompt, at);
                let parent = if at == 0 { position(block_of(0, 9)) } else { position(number - 1) };
                let lineage = Lineage { own: position(number), parent: Some(parent) };
                Operation { lineage: Some(lineage), ..bed.store(number, at, BLOCK_BYTES) }
            })
            .collect();
        assert!(bed.run(&stores).unwrap().iter().all(is_stored));
    }
    bed.settle();
    let counts: Vec<usize> = by_disk(&mut bed).iter().map(Vec::len).collect();
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 30, "{counts:?}");
}

#[test]
fn blocks_of_all_groups_at_one_position_go_to_one_disk() {
    let (disks, config) = blanks(DISKS, 24);
    let mut bed = host(&disks, &config);
    for at in (0..200).step_by(20) {
        let stores: Vec<_> = (0..40)
            .map(|index| {
                let (group, number) = (index / 20, block_of(0, at + index % 20));
                let mut op = bed.store(number, index, BLOCK_BYTES);
                op.key.group = group as u16;
                Operation { lineage: Some(lineage(number)), ..op }
            })
            .collect();
        assert!(bed.run(&stores).unwrap().iter().all(is_stored));
    }
    bed.settle();
    for held in by_disk(&mut bed).iter_mut() {
        held.sort_unstable();
        assert!(held.chunks(2).all(|pair| pair.len() == 2 && pair[0] == pair[1]), "{held:?}");
    }
}

fn fail_all(kind: FaultKind) -> [Fault; 1] {
    [Fault { nth: 0, count: u64::MAX, kind }]
}

#[test]
fn new_blocks_go_away_from_a_disk_that_refuses_writes_and_back_when_it_takes_them() {
    let (disks, config) = blanks(4, 64);
    let mut bed = host(&disks, &config);
    let prompt = |prompt: u64| (0..100).map(|at| block_of(prompt, at)).collect::<Vec<_>>();
    assert!(store(&mut bed, &prompt(0)).iter().all(is_stored));
    disks[1].arm(&fail_all(FaultKind::Error(Errno::ROFS)));
    // Until it is known to be sick.
    let mut number = 1;
    while bed.ssd.report()[1].health_of_writes == Health::Healthy {
        store(&mut bed, &prompt(number));
        number += 1;
        assert!(number < 100, "the disk is never sick: {:?}", bed.ssd.report()[1]);
    }
    bed.settle();
    let (before, begun) = (bed.ssd.report()[1].counters.failed_stores, bed.now);
    for number in 100..120 {
        let outcomes = store(&mut bed, &prompt(number));
        assert!(outcomes.iter().all(is_stored), "{outcomes:?}");
        (0..40).for_each(|_| bed.turn());
    }
    let tried = bed.ssd.report()[1].counters.failed_stores - before;
    let seconds = (bed.now - begun).as_secs();
    assert!((1..=seconds + 2).contains(&tried), "{tried} stores in {seconds} s were tried there");
    assert_eq!(bed.ssd.report()[1].health, Health::Healthy, "loads are served");

    disks[1].arm(&[]);
    (0..400).for_each(|_| bed.turn());
    let before = bed.ssd.report()[1].blocks;
    for number in 200..208 {
        assert!(store(&mut bed, &prompt(number)).iter().all(is_stored));
        (0..200).for_each(|_| bed.turn());
    }
    let report = bed.ssd.report();
    let new = report[1].blocks - before;
    assert_eq!(report[1].health_of_writes, Health::Healthy);
    assert!((130..=400).contains(&new), "its part, and not what it missed: {new} of 800");
}

#[test]
fn a_disk_that_cannot_be_read_for_long_is_as_one_that_is_missing_until_it_can() {
    let (disks, config) = blanks(2, 64);
    let mut bed = host(&disks, &config);
    let numbers: Vec<u64> = (0..1500).map(|at| block_of(0, at)).collect();
    assert!(store(&mut bed, &numbers).iter().all(is_stored));
    bed.settle();
    let of_first: Vec<u64> = by_disk(&mut bed)[0].clone();
    assert!(bed.evictions().is_empty());
    disks[0].arm(&fail_all(FaultKind::Error(Errno::IO)));
    for number in &of_first[..8] {
        assert!(matches!(bed.look(*number, BLOCK_BYTES), Outcome::Failed(_)));
    }
    assert_eq!(bed.ssd.report()[0].health, Health::Sick(ErrorKind::Io));
    (0..1800).for_each(|_| bed.turn());
    assert!(bed.evictions().is_empty(), "a drive that resets may take seconds");
    (0..400).for_each(|_| bed.turn());
    let mut gone = HashSet::new();
    (0..20).for_each(|_| gone.extend(bed.evictions()));
    assert_eq!(gone, of_first.iter().copied().collect());
    assert_eq!(bed.look(of_first[0], BLOCK_BYTES), Outcome::Absent);

    // Stored again, they are on the other disk.
    let again = &of_first[..200];
    assert!(store(&mut bed, again).iter().all(is_stored));
    assert!(again.iter().all(|number| matches!(bed.look(*number, BLOCK_BYTES), Outcome::Loaded { .. })));
    assert!(bed.evictions().is_empty());

    disks[0].arm(&[]);
    (0..400).for_each(|_| bed.turn());
    let mut found = Vec::new();
    while bed.ssd.take_found(&mut found, &mut Vec::new()) {}
    let found: HashSet<u64> = numbers_of(&found).collect();
    assert_eq!(found, of_first.iter().copied().collect(), "its blocks are hits again");
    assert!(matches!(bed.look(of_first[700], BLOCK_BYTES), Outcome::Loaded { .. }));
    // A block of which both have a copy is gone when it was removed from both.
    let removals = [bed.remove(again[0]), bed.remove(again[0]), bed.remove(again[0])];
    let outcomes: Vec<_> = removals.iter().map(|op| bed.run(&[*op]).unwrap()[0]).collect();
    assert_eq!(outcomes, [Outcome::Removed, Outcome::Removed, Outcome::Absent]);
}

#[test]
fn new_blocks_go_away_from_a_disk_whose_daily_budget_is_spent() {
    let (disks, config) = blanks(2, 64);
    let daily = SsdConfig { write_bytes_per_day: Some(24 * 256 * KIB), ..config };
    let mut spent = host(&disks[..1], &daily);
    let outcomes = store(&mut spent, &(0..120).map(|at| block_of(0, at)).collect::<Vec<_>>());
    assert_eq!(outcomes.last(), Some(&Outcome::Failed(ErrorKind::Full)));
    spent.settle();
    let images = [SimulatedDisk::from_image(disks[0].image()), disks[1].clone()];
    let mut bed = host(&images, &daily);
    let before = bed.ssd.report()[0].blocks;
    assert!(store(&mut bed, &(0..50).map(|at| block_of(1, at)).collect::<Vec<_>>()).iter().all(is_stored));
    let blocks: Vec<u64> = bed.ssd.report().iter().map(|disk| disk.blocks).collect();
    assert_eq!(blocks, [before, 50]);
}

/// A removal comes after the store that was submitted before it, wherever that went.
#[test]
fn a_removal_finds_the_disk_on_which_the_store_is_under_way() {
    let (disks, config) = blanks(DISKS, 24);
    let mut bed = host(&disks, &config);
    for number in 0..64 {
        let store = Operation { lineage: Some(lineage(number)), ..bed.store(number, 0, BLOCK_BYTES) };
        let removal = bed.remove(number);
        assert!(is_stored(&bed.run(&[store, removal]).unwrap()[0]));
        assert_eq!(bed.outcomes[&removal.id], Outcome::Removed, "block {number}");
    }
    assert_eq!(bed.blocks().len(), 0);
}

/// Prints what one submission of a store costs the thread that decides.
#[test]
fn a_store_is_placed_in_little_time() {
    let (disks, config) = blanks(DISKS, 24);
    let mut bed = host(&disks, &config);
    let (mut spent, mut count) = (Duration::ZERO, 0);
    for round in 0..100 {
        let stores: Vec<_> = (0..SLOTS - 1)
            .map(|slot| {
                let number = block_of(round / 8, round % 8 * (SLOTS - 1) + slot);
                Operation { lineage: Some(lineage(number)), ..bed.store(number, slot, BLOCK_BYTES) }
            })
            .collect();
        for op in &stores {
            let begun = Instant::now();
            assert_eq!(bed.ssd.submit(std::slice::from_ref(op)), 1);
            spent += begun.elapsed();
            count += 1;
        }
        assert!(bed.ended(&stores).iter().all(is_stored));
    }
    println!("{} ns a store submitted alone, of {count}", spent.as_nanos() / count);
}
