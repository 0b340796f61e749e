//! Power loss and killed daemons, at every I/O of a run.
//!
//! A run stores, replaces, removes and reads blocks on a disk that is too small for them. [`Model`] keeps for each
//! key the states in which a crash may leave it: the one that was acknowledged last and those asked for since.
//! After the crash the disk is opened again; each key must be in one of its states and load byte for byte.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockKey, ErrorKind};
use forebay_io::uring::{Fault, FaultKind, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;

const KEYS: u64 = 48;
/// Operations that wait at once.
const WIDTH: usize = 10;

/// The length of the block a key has, or none.
type State = Option<u64>;

#[derive(Default)]
struct Model {
    allowed: BTreeMap<u64, BTreeSet<State>>,
    waiting: BTreeMap<OpId, Operation>,
}

impl Model {
    /// Takes what the disk holds for the truth.
    fn of(bed: &mut Bed) -> Model {
        let mut model = Model::default();
        for block in bed.blocks() {
            model.allowed.insert(number_of(&block.key), BTreeSet::from([Some(block.length_bytes)]));
        }
        model
    }

    fn is_busy(&self, number: u64) -> bool {
        self.waiting.values().any(|op| number_of(&op.key) == number)
    }

    fn states(&mut self, number: u64) -> &mut BTreeSet<State> {
        self.allowed.entry(number).or_insert_with(|| BTreeSet::from([None]))
    }

    fn asked(&mut self, op: &Operation) {
        match op.kind {
            OpKind::Store => drop(self.states(number_of(&op.key)).insert(Some(op.length_bytes))),
            OpKind::Remove => drop(self.states(number_of(&op.key)).insert(None)),
            _ => {}
        }
        self.waiting.insert(op.id, *op);
    }

    fn answered(&mut self, Completion { id, outcome }: Completion) {
        let op = self.waiting.remove(&id).expect("an operation completes once");
        let states = self.states(number_of(&op.key));
        match outcome {
            Outcome::Stored => *states = BTreeSet::from([Some(op.length_bytes)]),
            // Removing what is not there: it may yet come back if an eviction is undone by a crash.
            Outcome::Removed => *states = BTreeSet::from([None]),
            Outcome::Absent | Outcome::Loaded { .. } => {}
            other => panic!("{op:?} ended as {other:?} on a disk without faults"),
        }
    }

    /// What recovery must have left, and what it left is the truth from here on.
    fn check(&mut self, bed: &mut Bed, must_load: bool) {
        self.waiting.clear();
        let found: BTreeMap<u64, u64> =
            bed.holds().values().map(|block| (number_of(&block.key), block.length_bytes)).collect();
        let mut evicted = Vec::new();
        bed.ssd.take_evicted(&mut evicted, &mut Vec::new());
        for number in 0..KEYS {
            let state = found.get(&number).copied();
            let allowed = self.states(number);
            // An opened disk makes room at once.
            let is_evicted = state.is_none() && evicted.contains(&key(number));
            assert!(
                !must_load || is_evicted || allowed.contains(&state),
                "key {number} is {state:?}, not one of {allowed:?}"
            );
            let Some(length_bytes) = state else { continue };
            let outcome = bed.look(number, length_bytes);
            bed.ssd.take_evicted(&mut evicted, &mut Vec::new());
            match outcome {
                Outcome::Loaded { .. } => {}
                Outcome::Absent if evicted.contains(&key(number)) => {}
                Outcome::Failed(ErrorKind::Corrupt) if !must_load => {}
                other => panic!("key {number} of {length_bytes} bytes was found and is {other:?}"),
            }
        }
        assert!(found.keys().all(|number| *number < KEYS), "only keys that were stored are found");
        bed.outcomes.clear();
        *self = Model::of(bed);
        self.gave_up(bed, &evicted);
        for (number, length_bytes) in found.into_iter().filter(|(number, _)| bed.ssd.block(&key(*number)).is_none()) {
            self.allowed.insert(number, BTreeSet::from([None, Some(length_bytes)]));
        }
    }

    /// An evicted block may come back after a crash.
    fn gave_up(&mut self, bed: &Bed, evicted: &[BlockKey]) {
        for key in evicted.iter().filter(|key| bed.ssd.block(key).is_none()) {
            self.states(number_of(key)).insert(None);
        }
    }
}

/// Runs until `steps` operations were asked for and answered, or the disk has lost power.
fn run(bed: &mut Bed, model: &mut Model, dice: &mut Dice, steps: usize) {
    let mut free: Vec<u64> = (0..SLOTS - 1).collect();
    let mut slots = BTreeMap::new();
    let mut asked = 0;
    for _ in 0..100_000 {
        while asked < steps && model.waiting.len() < WIDTH {
            let number = dice.below(KEYS);
            if model.is_busy(number) {
                break;
            }
            let slot = free.pop().expect("more slots than operations");
            let op = draw(bed, dice, number, slot);
            if bed.ssd.submit(&[op]) == 0 {
                free.push(slot);
                break;
            }
            model.asked(&op);
            slots.insert(op.id, slot);
            asked += 1;
        }
        bed.turn();
        for (id, outcome) in std::mem::take(&mut bed.outcomes) {
            free.extend(slots.remove(&id));
            model.answered(Completion { id, outcome });
        }
        let mut evicted = Vec::new();
        bed.ssd.take_evicted(&mut evicted, &mut Vec::new());
        model.gave_up(bed, &evicted);
        if bed.disk.is_off() || (asked == steps && model.waiting.is_empty()) {
            return;
        }
    }
    panic!("{} operations hang: {:?}", model.waiting.len(), model.waiting);
}

fn draw(bed: &mut Bed, dice: &mut Dice, number: u64, slot: u64) -> Operation {
    match dice.below(8) {
        0 => bed.remove(number),
        1..=3 => {
            let length_bytes = bed.ssd.block(&key(number)).map_or(1, |block| block.length_bytes);
            bed.load(number, slot, length_bytes)
        }
        _ => {
            let length_bytes = 1 + dice.below(24_000);
            bed.store(number, slot, length_bytes)
        }
    }
}

fn opened(disk: &SimulatedDisk, seed: u64) -> Bed {
    // Every third run keeps the order of its I/Os, so that each is reached.
    Bed::open(disk, &small_config(), (!seed.is_multiple_of(3)).then_some(seed)).unwrap()
}

/// Loses power at I/O `nth` of a run on `image`; false if the run ended before.
fn loses_power_at(image: &SimulatedDisk, nth: u64, seed: u64) -> bool {
    let disk = SimulatedDisk::from_image(image.image());
    let mut bed = opened(&disk, seed);
    let mut model = Model::of(&mut bed);
    disk.arm(&[Fault::once(nth, FaultKind::PowerLoss)]);
    run(&mut bed, &mut model, &mut Dice(seed), 200);
    let was_lost = disk.is_off();
    for fate in 0..2 {
        let mut model = Model { allowed: model.allowed.clone(), ..Model::default() };
        let mut bed = opened(&disk.after_power_loss(seed ^ nth << 8 ^ fate << 40), seed);
        model.check(&mut bed, true);
        // What was recovered is worth as much as what was never interrupted.
        run(&mut bed, &mut model, &mut Dice(seed + 1), 40);
        let mut bed = opened(&bed.disk.after_power_loss(fate), seed);
        model.check(&mut bed, true);
    }
    was_lost
}

/// A disk that has been in use for a while: all segments have had several lives.
fn used_disk(seed: u64) -> SimulatedDisk {
    let mut bed = opened(&blank(&small_config(), 8), seed);
    run(&mut bed, &mut Model::default(), &mut Dice(seed), 400);
    bed.settle();
    bed.disk
}

fn seeds() -> Vec<u64> {
    match std::env::var("FOREBAY_SEED") {
        Ok(seed) => vec![seed.parse().expect("FOREBAY_SEED is a number")],
        Err(_) => (0..3).collect(),
    }
}

#[test]
fn power_lost_at_any_io_costs_nothing_that_was_acknowledged() {
    for seed in seeds() {
        let image = used_disk(seed);
        let mut nth = 0;
        loop {
            let was_lost = std::panic::catch_unwind(|| loses_power_at(&image, nth, seed));
            let was_lost = was_lost.unwrap_or_else(|_| panic!("FOREBAY_SEED={seed}, power lost at i/o {nth}"));
            if !was_lost {
                break;
            }
            nth += 1;
        }
        assert!(nth > 200, "only {nth} I/Os in a run");
    }
}

#[test]
fn a_killed_daemon_and_then_a_power_loss_cost_nothing_that_was_acknowledged() {
    for seed in 0..150 {
        let disk = used_disk(seed % 3);
        let (mut bed, mut dice) = (opened(&disk, seed), Dice(seed));
        let mut model = Model::of(&mut bed);
        for _ in 0..4 {
            let operations = 20 + dice.below(60) as usize;
            let turns = 1 + dice.below(6);
            run(&mut bed, &mut model, &mut dice, operations);
            // Killed with operations in flight: they were asked for and are never answered.
            for number in 0..WIDTH as u64 {
                let op = draw(&mut bed, &mut dice, number, number);
                if bed.ssd.submit(&[op]) == 1 {
                    model.asked(&op);
                }
            }
            (0..turns).for_each(|_| bed.ssd.poll(&mut Vec::new()));
            let mut evicted = Vec::new();
            bed.ssd.take_evicted(&mut evicted, &mut Vec::new());
            model.gave_up(&bed, &evicted);
            let disk = bed.disk.clone();
            drop(bed);
            bed = opened(&disk, seed);
            model.check(&mut bed, true);
        }
        let mut bed = opened(&bed.disk.after_power_loss(seed), seed);
        model.check(&mut bed, true);
    }
}

/// No log can save what a drive threw away after saying that it was safe; it must not be served as something else.
#[test]
fn a_drive_that_lies_about_flushes_costs_blocks_and_never_gives_other_bytes() {
    let mut lost = 0;
    for seed in 0..60 {
        let disk = used_disk(seed % 3);
        let (mut bed, mut dice) = (opened(&disk, seed), Dice(seed));
        let mut model = Model::of(&mut bed);
        disk.arm(&[Fault { nth: 0, count: u64::MAX, kind: FaultKind::LyingFlush }]);
        run(&mut bed, &mut model, &mut dice, 150);
        let held = bed.holds().len();
        match Bed::open(&disk.after_power_loss(seed), &small_config(), None) {
            Ok(mut bed) => {
                model.check(&mut bed, false);
                lost += held.saturating_sub(bed.holds().len());
                run(&mut bed, &mut model, &mut dice, 40);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
        }
    }
    assert!(lost > 0, "a drive that never flushes loses nothing: the test is not one");
}

#[test]
fn a_disk_whose_making_was_cut_short_is_made_again() {
    let config = small_config();
    for nth in 0.. {
        let disk = blank(&config, 8);
        disk.arm(&[Fault { nth, count: u64::MAX, kind: FaultKind::Error(Errno::IO) }]);
        let was_made = Bed::open(&disk, &config, Some(nth)).is_ok();
        for fate in 0..4 {
            let mut bed = Bed::open(&disk.after_power_loss(fate), &config, None)
                .unwrap_or_else(|error| panic!("cut short at i/o {nth}, fate {fate}: {error}"));
            bed.store_all([(1, 5000)]);
        }
        if was_made && disk.ios() <= nth {
            return;
        }
    }
}

#[test]
fn what_was_stored_in_all_is_the_same_after_a_restart_whatever_was_removed() {
    let config = small_config();
    let mut bed = Bed::open(&blank(&config, 8), &config, None).unwrap();
    bed.store_all((0..6).map(|number| (number, 8192)));
    let removals: Vec<_> = (0..4).map(|number| bed.remove(number)).collect();
    assert!(bed.run(&removals).is_some());
    bed.settle();
    let stored = |bed: &Bed| bed.ssd.report()[0].lifetime_stored_bytes;
    assert_eq!(stored(&bed), 6 * 8192);
    let again = Bed::open(&bed.disk.after_power_loss(1), &config, None).unwrap();
    assert_eq!(stored(&again), 6 * 8192);
}
