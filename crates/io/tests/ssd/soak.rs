//! A full disk under a long mix of small blocks, and an audit at the end: what the owner was told, what the index
//! holds and what lies on the disk are the same.
//!
//! `FOREBAY_SOAK_OPS` asks for more operations (10,000,000 before a release, with `--release`), `FOREBAY_SEED` for
//! another run.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use forebay_core::tier::{OpId, OpKind, Operation, Outcome, Tier};
use forebay_io::ssd::{Inspection, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};

use crate::bed::*;
use crate::files::{file_config, home, open_when_free};

/// Operations in flight.
const WIDTH: usize = 60;
const DISK_BYTES: u64 = 32 * MIB;
/// Of blocks of one or two pages, a few times what the disk holds.
const KEYS: u64 = 20_000;
const MAX_LENGTH: u64 = 6000;

/// What the owner knows.
#[derive(Default)]
struct Owner {
    lengths: HashMap<u64, u64>,
    busy: HashSet<u64>,
    waiting: HashMap<OpId, (Operation, u64)>,
    tally: BTreeMap<&'static str, u64>,
}

impl Owner {
    fn next(&mut self, bed: &mut Bed, dice: &mut Dice, slot: u64) -> Operation {
        let number = loop {
            let number = dice.below(KEYS);
            if self.busy.insert(number) {
                break number;
            }
        };
        match (dice.below(20), self.lengths.get(&number)) {
            (0, _) => bed.remove(number),
            (1..=9, Some(&length_bytes)) => bed.load(number, slot, length_bytes),
            // Some blocks are stored again as they are.
            (10..=11, Some(&length_bytes)) => bed.store(number, slot, length_bytes),
            _ => {
                let length_bytes = 1 + dice.below(MAX_LENGTH);
                bed.store(number, slot, length_bytes)
            }
        }
    }

    /// Frees the operation's slot.
    fn answered(&mut self, bed: &Bed, id: OpId, outcome: Outcome, evicted: &[u64]) -> u64 {
        let (op, slot) = self.waiting.remove(&id).expect("an operation completes once");
        let number = number_of(&op.key);
        self.busy.remove(&number);
        let what = match (op.kind, outcome) {
            (OpKind::Store, Outcome::Stored) => {
                self.lengths.insert(number, op.length_bytes);
                "stored"
            }
            (OpKind::Remove, Outcome::Removed | Outcome::Absent) => {
                self.lengths.remove(&number);
                "removed"
            }
            (OpKind::Load, Outcome::Loaded { .. }) => {
                let mut bytes = vec![0; op.length_bytes as usize];
                bed.pool.read(slot * SLOT_BYTES, &mut bytes);
                assert!(bytes == block_bytes(number, op.length_bytes), "block {number} came back as other bytes");
                "loaded"
            }
            (OpKind::Load, Outcome::Absent) if !self.lengths.contains_key(&number) || evicted.contains(&number) => {
                "evicted while it waited"
            }
            other => panic!("block {number}: {other:?}"),
        };
        *self.tally.entry(what).or_default() += 1;
        slot
    }
}

fn operations() -> u64 {
    std::env::var("FOREBAY_SOAK_OPS").map_or(60_000, |ops| ops.parse().expect("FOREBAY_SOAK_OPS is a number"))
}

fn seed() -> u64 {
    std::env::var("FOREBAY_SEED").map_or(1, |seed| seed.parse().expect("FOREBAY_SEED is a number"))
}

fn soak(bed: &mut Bed, operations: u64) -> Owner {
    let (mut owner, mut dice, mut asked) = (Owner::default(), Dice(seed()), 0);
    let mut free: Vec<u64> = (0..WIDTH as u64).collect();
    let begun = Instant::now();
    let mut refused: Option<(Operation, u64)> = None;
    while asked < operations || !owner.waiting.is_empty() {
        while asked < operations
            && let Some(slot) = refused.map(|(_, slot)| slot).or_else(|| free.pop())
        {
            let op = refused.take().map_or_else(|| owner.next(bed, &mut dice, slot), |(op, _)| op);
            if bed.ssd.submit(&[op]) == 0 {
                refused = Some((op, slot));
                break;
            }
            owner.waiting.insert(op.id, (op, slot));
            asked += 1;
        }
        bed.turn();
        let evicted = bed.evictions();
        for (id, outcome) in std::mem::take(&mut bed.outcomes) {
            free.push(owner.answered(bed, id, outcome, &evicted));
        }
        for number in evicted {
            owner.lengths.remove(&number);
        }
    }
    // A segment that is being emptied is so for some turns, in which nothing is in flight.
    (0..1000).for_each(|_| bed.turn());
    bed.settle();
    // Now and then the tier looks whether the disk is still the same, and is idle meanwhile.
    for _ in 0..1000 {
        if bed.ssd.report()[0].transfers_in_flight == 0 {
            break;
        }
        bed.turn();
    }
    for number in bed.evictions() {
        owner.lengths.remove(&number);
    }
    println!("{operations} operations in {:.1} s, seed {}: {:?}", begun.elapsed().as_secs_f64(), seed(), owner.tally);
    owner
}

/// Owner, index and medium agree, and nothing has grown beyond what the disk can hold.
fn audit(bed: &mut Bed, owner: &Owner, inspection: &mut Inspection) {
    let blocks = bed.blocks();
    let held: HashMap<u64, u64> = blocks.iter().map(|block| (number_of(&block.key), block.length_bytes)).collect();
    let report = &bed.ssd.report()[0];
    println!(
        "{} blocks, amplification {:.3}, {:?}",
        report.blocks,
        report.counters.write_amplification().unwrap(),
        report.counters
    );
    assert_eq!(held.len() as u64, report.blocks);
    assert!(held == owner.lengths, "{} blocks are held, the owner knows {}", held.len(), owner.lengths.len());
    let found: HashMap<u64, u64> =
        inspection.blocks().map(Result::unwrap).map(|block| (number_of(&block.key), block.length_bytes)).collect();
    assert!(held.iter().all(|block| found.get(block.0) == Some(block.1)), "the disk holds what the index says");
    // What was given up last may still lie in segments whose new lives have not begun.
    let of_free: usize = found.keys().filter(|number| !held.contains_key(number)).count();
    let segment_blocks = report.geometry.segment_bytes / 4096;
    assert!((of_free as u64) < 4 * segment_blocks, "{of_free} blocks are on the disk and not in the index");
    let audit = inspection.audit().unwrap();
    assert_eq!((audit.damaged_blocks, audit.blocks), (0, found.len() as u64));
    assert_eq!(report.live_bytes, held.values().sum::<u64>());
    let segments = inspection.segments();
    let live: u64 = segments.iter().map(|segment| u64::from(segment.live_blocks)).sum();
    assert_eq!(live, found.len() as u64);
    assert!(report.index_room_blocks <= DISK_BYTES / 4096, "the index has room for {}", report.index_room_blocks);
    assert_eq!((report.waiting_loads, report.waiting_stores, report.transfers_in_flight), (0, 0, 0));
    assert_eq!((report.counters.corrupt_blocks, report.counters.untold_evictions), (0, 0));
    assert!(report.counters.reclaimed_segments > segments.len() as u64, "the disk was full for long");
}

#[test]
fn a_full_simulated_disk_holds_what_it_said() {
    let config = SsdConfig { segment_bytes: Some(MIB), ..small_config() };
    let mut bed = Bed::open(&blank(&config, 31), &config, Some(seed())).unwrap();
    let owner = soak(&mut bed, operations());
    let pool = Region::anonymous(4096).unwrap();
    let mut inspection = Inspection::on(medium(&bed.disk, None, &pool, 0)).unwrap();
    audit(&mut bed, &owner, &mut inspection);
}

#[test]
fn a_full_file_holds_what_it_said() {
    let home = home();
    let file = file_config(&home.path().join("disk"), DISK_BYTES);
    let config = SsdConfig { segment_bytes: Some(MIB), engine: EngineChoice::Auto, ..file };
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
    let owner = soak(&mut bed, operations());
    // The same bytes under another name: the tier still has the file.
    let copy = home.path().join("copy");
    std::fs::copy(&config.disks[0].path, &copy).unwrap();
    audit(&mut bed, &owner, &mut Inspection::open(&copy).unwrap());
}
