//! A random owner of a tier: stores, loads, removals and purges, as the daemon makes them, beside faults, restarts,
//! power losses, damage, and disks that come and go.
//!
//! Of each block the model keeps the versions that a load may give. Loaded bytes have to be those of one of them. What
//! was purged is not back, whatever happens, and each purge ends.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::tier::{Outcome, Tier};
use forebay_core::{BlockKey, NamespaceId};
use forebay_io::ssd::{PoolPurges, Ssd, SsdConfig, Walked};
use forebay_io::uring::{Fault, FaultKind, Region, SimulatedDisk};
use rustix::io::Errno;

use crate::bed::*;
use crate::lists::blind;

const KEYS: u64 = 60;

fn namespace(number: u64) -> NamespaceId {
    NamespaceId(100 + u128::from(number % 3))
}

fn nkey(number: u64) -> BlockKey {
    BlockKey { namespace: namespace(number), ..key(number) }
}

fn tag(number: u64, version: u64) -> u64 {
    number + 100_000 * version
}

fn length(number: u64, version: u64) -> u64 {
    1 + (number * 7919 + version * 4271) % 9000
}

type Versions = BTreeSet<Option<u64>>;

struct World {
    bed: Bed,
    config: SsdConfig,
    dice: Dice,
    allowed: BTreeMap<u64, Versions>,
    next: u64,
    log: Vec<String>,
    /// Nothing may be missing that was not told as evicted.
    is_strict: bool,
    gone: BTreeSet<u64>,
    /// Only a purge takes a version away.
    is_lenient: bool,
    disks: Vec<SimulatedDisk>,
    /// Of each namespace; the version of its blocks where there are several disks.
    epochs: [u64; 3],
}

fn open_disks(disks: &[SimulatedDisk], ids: &[u128], config: &SsdConfig, seed: Option<u64>) -> Bed {
    open_below(PoolPurges::default(), disks, ids, config, seed)
}

fn open_below(known: PoolPurges, disks: &[SimulatedDisk], ids: &[u128], config: &SsdConfig, seed: Option<u64>) -> Bed {
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let media = disks.iter().zip(ids).map(|(disk, id)| medium(disk, seed, &pool, *id)).collect();
    Bed::with(Ssd::on_below(known, media, config).unwrap(), pool, &disks[0])
}

impl World {
    fn states(&mut self, number: u64) -> &mut Versions {
        self.allowed.entry(number).or_insert_with(|| BTreeSet::from([None]))
    }

    fn note_evictions(&mut self) {
        let (mut keys, mut lost) = (Vec::new(), Vec::new());
        self.bed.ssd.take_evicted(&mut keys, &mut lost);
        for key in keys {
            self.gone.insert(number_of(&key));
        }
        for number in 0..KEYS {
            if lost.contains(&hasher().hash(&nkey(number))) {
                self.gone.insert(number);
            }
        }
    }

    /// Some operations at once, of distinct keys.
    fn operate(&mut self, purging: Option<NamespaceId>) {
        let count = 1 + self.dice.below(12);
        let mut chosen = BTreeSet::new();
        (0..count).for_each(|_| _ = chosen.insert(self.dice.below(KEYS)));
        let (mut ops, mut wanted) = (Vec::new(), Vec::new());
        for (slot, number) in chosen.into_iter().enumerate() {
            if purging == Some(namespace(number)) {
                continue;
            }
            match self.dice.below(10) {
                0..5 => {
                    self.next += 1;
                    let version = if self.disks.len() > 1 { self.epochs[(number % 3) as usize] } else { self.next };
                    let mut op = self.bed.store(tag(number, version), slot as u64, length(number, version));
                    op.key = nkey(number);
                    self.states(number).insert(Some(version));
                    ops.push(op);
                    wanted.push((number, Some(version)));
                }
                5 => {
                    let mut op = self.bed.remove(number);
                    op.key = nkey(number);
                    self.states(number).insert(None);
                    ops.push(op);
                    wanted.push((number, None));
                }
                _ => {
                    self.look(number);
                }
            }
        }
        let mut taken = 0;
        for turn in 0.. {
            taken += self.bed.ssd.submit(&ops[taken..]);
            if ops.iter().all(|op| self.bed.outcomes.contains_key(&op.id)) || self.bed.disk.is_off() {
                break;
            }
            assert!(turn < 20_000, "operations never end: {:?}", self.bed.ssd.report());
            self.bed.turn();
            self.note_evictions();
        }
        for (op, (number, version)) in ops.iter().zip(wanted) {
            match self.bed.outcomes.get(&op.id) {
                Some(Outcome::Stored) => {
                    if !self.is_lenient {
                        *self.states(number) = BTreeSet::from([version]);
                    }
                    self.gone.remove(&number);
                }
                Some(Outcome::Removed) if !self.is_lenient => *self.states(number) = BTreeSet::from([None]),
                _ => {
                    // Whatever was there may be gone.
                    self.gone.insert(number);
                }
            }
            // Evicted in the turn of its store.
        }
        self.note_evictions();
    }

    /// What a load gives has to be allowed.
    fn look(&mut self, number: u64) -> Option<u64> {
        let block = self.bed.ssd.block(&nkey(number))?;
        let mut op = self.bed.load(number, SLOTS - 1, block.length_bytes);
        op.key = nkey(number);
        let outcome = self.bed.run(&[op])?[0];
        let Outcome::Loaded { length_bytes, .. } = outcome else { return None };
        let mut bytes = vec![0; length_bytes as usize];
        self.bed.pool.read((SLOTS - 1) * SLOT_BYTES, &mut bytes);
        let allowed = self.states(number).clone();
        let found = allowed.iter().flatten().copied().find(|version| {
            length(number, *version) == length_bytes && block_bytes(tag(number, *version), length_bytes) == bytes
        });
        let told = u64::from_le_bytes({
            let mut head = [0; 8];
            let n = bytes.len().min(8);
            head[..n].copy_from_slice(&bytes[..n]);
            head
        }) >> 16;
        assert!(
            found.is_some(),
            "block {number} is block {} version {}, allowed {allowed:?}\n{}",
            told % 100_000,
            told / 100_000,
            self.log.join("\n")
        );
        found
    }

    fn check(&mut self, may_lose: bool) {
        for number in 0..KEYS {
            let found = self.look(number);
            self.note_evictions();
            let states = self.states(number).clone();
            if found.is_none() && self.is_strict && !may_lose {
                assert!(
                    states.contains(&None) || self.gone.contains(&number),
                    "block {number} is lost, {states:?}\n{}",
                    self.log.join("\n")
                );
            }
        }
    }

    /// As the daemon does. False if it came to no end in time.
    fn purge(&mut self, n: u64, others: bool) -> bool {
        let namespace = NamespaceId(100 + u128::from(n));
        let mut turns = 0;
        self.epochs[n as usize] += 1;
        loop {
            let (mut is_new, mut found) = (true, BTreeSet::new());
            loop {
                match self.bed.ssd.walk(std::mem::take(&mut is_new), &BTreeSet::from([namespace])) {
                    Walked::Blocks(some) => found.extend(some.iter().map(|block| number_of(&block.key))),
                    Walked::Waits => {
                        self.bed.turn();
                        self.note_evictions();
                        turns += 1;
                        if self.bed.disk.is_off() || turns > 6000 {
                            return false;
                        }
                        if others && self.dice.below(8) == 0 {
                            self.operate(Some(namespace));
                        }
                    }
                    Walked::End => break,
                }
                if others && self.dice.below(20) == 0 {
                    self.operate(Some(namespace));
                }
            }
            if found.is_empty() {
                break;
            }
            let removals: Vec<_> = found
                .iter()
                .map(|number| {
                    let mut op = self.bed.remove(*number);
                    op.key = nkey(*number);
                    op
                })
                .collect();
            found.iter().for_each(|number| _ = self.states(*number).insert(None));
            let Some(_) = self.bed.run(&removals) else { return false };
            (0..10).for_each(|_| self.bed.turn());
            self.note_evictions();
            turns += 10;
            if turns > 6000 {
                return false;
            }
        }
        for _ in 0..20 {
            self.bed.ssd.note_purged(&BTreeSet::from([namespace]));
            let is_noted = loop {
                if let Some(is_noted) = self.bed.ssd.noted() {
                    break is_noted;
                }
                self.bed.turn();
                self.note_evictions();
                turns += 1;
                if self.bed.disk.is_off() || turns > 9000 {
                    return false;
                }
            };
            if self.disks.len() > 1 && self.dice.below(3) == 0 {
                self.disks.iter().for_each(|disk| disk.set_unreadable(&[]));
                (0..300).for_each(|_| self.bed.turn());
            }
            if is_noted {
                for number in (0..KEYS).filter(|number| number % 3 == n) {
                    *self.states(number) = BTreeSet::from([None]);
                }
                return true;
            }
        }
        false
    }

    fn accounts(&mut self) {
        self.bed.settle();
        let listed = self.bed.listed();
        self.bed.settle();
        let held = listed.iter().filter(|block| self.bed.ssd.block(&block.key).is_some()).count() as u64;
        let report = &self.bed.ssd.report()[0];
        let live: u64 = self.bed.ssd.segments(0).iter().map(|segment| u64::from(segment.live_blocks)).sum();
        if self.disks.len() > 1 {
            for (place, report) in self.bed.ssd.report().iter().enumerate() {
                let live: u64 = self.bed.ssd.segments(place).iter().map(|segment| u64::from(segment.live_blocks)).sum();
                assert_eq!(report.blocks, live);
                assert!(report.index_room_blocks < 400);
            }
            return;
        }
        assert_eq!((report.blocks, live), (held, held), "{:?}\n{}", self.bed.ssd.segments(0), self.log.join("\n"));
        assert!(
            report.index_room_blocks < 400,
            "the index has {} places\n{}",
            report.index_room_blocks,
            self.log.join("\n")
        );
        self.note_evictions();
    }
}

#[derive(Clone, Copy)]
struct Plan {
    faults: bool,
    powers: bool,
    unreadable: bool,
    damage: bool,
    wipes_list: bool,
    is_lenient: bool,
    disks: usize,
}

fn run_model(seed: u64, steps: u64, plan: Plan) {
    let mut config = small_config();
    config.trim = seed.is_multiple_of(3);
    config.segment_bytes = Some(64 * KIB);
    config.flush_bytes = [32 << 20, 64 << 10][(seed % 2) as usize];
    let disks: Vec<SimulatedDisk> = (0..plan.disks).map(|_| blank(&config, 9 + seed % 4)).collect();
    let engine_seed = (!seed.is_multiple_of(4)).then_some(seed);
    let bed = open_disks(&disks, &[1, 2, 3], &config, engine_seed);
    let is_strict = !plan.faults && !plan.unreadable && !plan.damage;
    let mut world = World {
        bed,
        config,
        dice: Dice(seed),
        allowed: BTreeMap::new(),
        next: 0,
        log: vec![format!("seed {seed}")],
        is_strict,
        gone: BTreeSet::new(),
        is_lenient: plan.is_lenient,
        disks,
        epochs: [1; 3],
    };
    let mut present: Vec<usize> = (0..plan.disks).collect();
    for step in 0..steps {
        let choice = world.dice.below(40);
        match choice {
            0..26 => world.operate(None),
            27..30 => {
                let n = world.dice.below(3);
                let others = world.dice.below(2) == 0;
                let is_purged = world.purge(n, others);
                world.log.push(format!("{step}: purge {n} {is_purged}"));
            }
            30..31 if plan.faults => {
                let nth = world.dice.below(30);
                let count = 1 + world.dice.below(4);
                let kind = match world.dice.below(5) {
                    0..2 => FaultKind::Error(Errno::IO),
                    2 => FaultKind::Torn,
                    3 => FaultKind::Short(2048),
                    _ => FaultKind::Delayed(7),
                };
                world.bed.disk.arm(&[Fault { nth, count, kind }]);
                world.log.push(format!("{step}: {kind:?} {nth} {count}"));
            }
            31 if plan.faults => {
                world.bed.disk.arm(&[]);
                (0..500).for_each(|_| world.bed.turn());
                world.note_evictions();
            }
            32 if plan.unreadable => {
                let len = world.bed.disk.len();
                let some: Vec<usize> =
                    (0..world.dice.below(6)).map(|_| world.dice.below(len as u64) as usize & !4095).collect();
                world.log.push(format!("{step}: unreadable {some:x?}"));
                world.bed.disk.set_unreadable(&some);
            }
            33 if plan.damage => {
                let len = world.bed.disk.len() as u64 - MIB;
                let at = (MIB + world.dice.below(len)) as usize;
                let bit = world.dice.below(8);
                world.bed.disk.alter(at, |bytes| bytes[0] ^= 1 << bit);
                world.log.push(format!("{step}: flip {at:x}"));
            }
            34 => {
                (0..400).for_each(|_| world.bed.turn());
                world.note_evictions();
            }
            35 => world.check(false),
            36 if !plan.faults && !plan.unreadable => {
                world.disks.iter().for_each(|disk| disk.set_unreadable(&[]));
                (0..3000).for_each(|_| world.bed.turn());
                world.accounts()
            }
            39 if plan.disks > 1 => {
                let place = world.dice.below(2) as usize;
                blind(&world.disks[place]);
                let turns = world.dice.below(5000);
                world.log.push(format!("{step}: blind {place} {turns}"));
                for turn in 0..turns {
                    if turn % 300 == 0 {
                        world.check(true);
                    }
                    world.bed.turn();
                    world.note_evictions();
                }
            }
            26 if plan.disks > 1 => {
                world.disks.iter().for_each(|disk| disk.set_unreadable(&[]));
                (0..500).for_each(|_| world.bed.turn());
            }
            37..39 if plan.disks > 1 => {
                let was_alone = present.len() == 1;
                present = match world.dice.below(5) {
                    0 => vec![0],
                    1 => vec![1],
                    2 => vec![1, 0],
                    _ => vec![0, 1],
                };
                let images: Vec<SimulatedDisk> =
                    world.disks.iter().map(|disk| SimulatedDisk::from_image(disk.image())).collect();
                world.disks = images;
                let those: Vec<SimulatedDisk> = present.iter().map(|place| world.disks[*place].clone()).collect();
                let ids: Vec<u128> = present.iter().map(|place| *place as u128 + 1).collect();
                let seed = (world.dice.below(3) > 0).then_some(world.next);
                let times = (0..3).map(|n| NamespaceId(100 + n));
                let times = times.filter_map(|n| Some((n, world.bed.ssd.purge_time(n)?))).collect();
                let known = PoolPurges::new(times, true);
                world.bed = open_below(known, &those, &ids, &world.config, seed);
                let void = world.bed.ssd.take_void();
                world.log.push(format!("{step}: restart {present:?}, was alone {was_alone}, void {void:?}"));
                world.check(true);
                for namespace in void {
                    let is_purged = world.purge((namespace.0 - 100) as u64, false);
                    world.log.push(format!("{step}: purged again {namespace:?} {is_purged}"));
                }
                world.check(true);
            }
            37..39 => {
                // A restart, as after a kill: what is in flight may or may not be there.
                let is_power = plan.powers && world.dice.below(2) == 0;
                let disk = match is_power {
                    true => world.bed.disk.after_power_loss(world.dice.below(1 << 30)),
                    false => SimulatedDisk::from_image(world.bed.disk.image()),
                };
                if plan.wipes_list {
                    for at in [64 << 10, 576 << 10] {
                        disk.alter(at, |bytes| bytes[..64 << 10].fill(0));
                    }
                }
                let seed = (world.dice.below(3) > 0).then_some(world.next);
                world.bed = Bed::open(&disk, &world.config, seed).unwrap();
                world.log.push(format!("{step}: restart, power {is_power}, {:?}", world.bed.ssd.report()[0].recovery));
                // What an eviction took may be back, with any of the versions that were allowed.
                world.check(true);
            }
            _ => world.operate(None),
        }
    }
    world.bed.disk.arm(&[]);
    world.disks.iter().for_each(|disk| disk.set_unreadable(&[]));
    world.bed.disk.set_unreadable(&[]);
    (0..3000).for_each(|_| world.bed.turn());
    world.note_evictions();
    world.accounts();
    for n in 0..3 {
        assert!(world.purge(n, false), "a purge does not end\n{}", world.log.join("\n"));
    }
    world.check(false);
    let live: u64 = world.bed.ssd.report()[0].blocks;
    assert!(live == 0 || plan.damage || plan.unreadable, "{live} blocks are left\n{}", world.log.join("\n"));
    world.log.push("the end".to_owned());
    if plan.disks > 1 {
        world.bed = open_disks(&world.disks.clone(), &[1, 2], &world.config, None);
    } else {
        let disk = SimulatedDisk::from_image(world.bed.disk.image());
        world.bed = Bed::open(&disk, &world.config, None).unwrap();
    }
    world.check(true);
    (0..1000).for_each(|_| world.bed.turn());
    world.accounts();
}

/// Each seed that fails is named. `SSD_MODEL_SEEDS` runs more of them.
fn run_all(plan: Plan, seeds: u64) {
    let seeds = std::env::var("SSD_MODEL_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(seeds);
    let failed: Vec<u64> =
        (0..seeds).filter(|seed| std::panic::catch_unwind(|| run_model(*seed, 250, plan)).is_err()).take(4).collect();
    assert!(failed.is_empty(), "seeds {failed:?}");
}

const PLAIN: Plan = Plan {
    faults: false,
    powers: false,
    unreadable: false,
    damage: false,
    wipes_list: false,
    is_lenient: false,
    disks: 1,
};

#[test]
fn blocks_and_purges_survive_power_losses_by_the_log_alone() {
    run_all(Plan { powers: true, wipes_list: true, ..PLAIN }, 12);
}

#[test]
fn they_survive_failed_transfers() {
    run_all(Plan { faults: true, powers: true, ..PLAIN }, 24);
}

#[test]
fn they_survive_failed_transfers_by_the_log_alone() {
    run_all(Plan { faults: true, wipes_list: true, ..PLAIN }, 24);
}

#[test]
fn they_survive_pages_that_cannot_be_read() {
    run_all(Plan { powers: true, unreadable: true, ..PLAIN }, 24);
}

#[test]
fn they_survive_bits_that_flip_while_the_disk_serves() {
    run_all(Plan { faults: true, unreadable: true, damage: true, is_lenient: true, ..PLAIN }, 24);
}

#[test]
fn they_survive_disks_that_come_and_go() {
    run_all(Plan { is_lenient: true, disks: 2, ..PLAIN }, 8);
}

#[test]
fn they_survive_disks_that_come_and_go_and_fail() {
    run_all(Plan { faults: true, unreadable: true, is_lenient: true, disks: 2, ..PLAIN }, 8);
}

#[test]
fn they_survive_disks_that_come_and_go_fail_and_rot() {
    run_all(Plan { faults: true, unreadable: true, damage: true, is_lenient: true, disks: 2, ..PLAIN }, 8);
}
