//! Real daemons that are killed: the test's own binary again, playing one, and a SIGKILL while it works.
//!
//! The child writes a line for each thing that the parent may rely on. What it was told to do comes in
//! `FOREBAY_TEST_DAEMON`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{ErrorKind, Generation, SlotId};
use forebay_io::ssd::{DiskClaim, Inspection, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};

use crate::bed::*;
use crate::files::{file_config, home, open_when_free, turn_taken};

const TOLD: &str = "FOREBAY_TEST_DAEMON";
const DISK_BYTES: u64 = 24 * MIB;
/// The pool that a killed daemon was reading into.
const POOL_SLOTS: u64 = 64;
const POOL_SLOT_BYTES: u64 = 256 * KIB;

struct Daemon {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Daemon {
    fn start(body: &str, told: &str) -> Daemon {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([body, "--exact", "--nocapture"]).env(TOLD, told);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Daemon { child, lines }
    }

    /// Kills it and waits until it is gone; returns what it still had said.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        // The last line may have been cut in the middle.
        self.lines.by_ref().map_while(Result::ok).collect()
    }
}

/// No child outlives a test that failed.
impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait().map(drop));
    }
}

fn said(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush()).expect("the parent listens");
}

/// None among the other tests, where the bodies of children have nothing to do.
fn told() -> Option<(PathBuf, EngineChoice, u64)> {
    let told = std::env::var(TOLD).ok()?;
    let parts: Vec<&str> = told.split(' ').collect();
    let engine = if parts[1] == "threads" { EngineChoice::Threads } else { EngineChoice::Uring };
    Some((parts[0].into(), engine, parts[2].parse().unwrap()))
}

fn config(home: &Path, engine: EngineChoice, bytes: u64) -> SsdConfig {
    SsdConfig { engine, segment_bytes: Some(MIB), ..file_config(&home.join("disk"), bytes) }
}

fn length(number: u64) -> u64 {
    1 + number.wrapping_mul(7919) % 40_000
}

#[test]
fn writes_until_it_is_killed() {
    let Some((home, engine, first)) = told() else { return };
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let ssd = open_when_free(&config(&home, engine, DISK_BYTES), &pool);
    let mut bed = Bed::on_file(ssd, &pool);
    let (mut next, mut waiting) = (first, BTreeMap::new());
    let mut free: Vec<u64> = (0..SLOTS).collect();
    loop {
        while let Some(slot) = free.pop() {
            let store = bed.store(next, slot, length(next));
            assert_eq!(bed.ssd.submit(&[store]), 1);
            waiting.insert(store.id, (next, slot));
            next += 1;
        }
        bed.turn();
        bed.evictions().iter().for_each(|number| said(&format!("evicted {number} .")));
        for (id, outcome) in std::mem::take(&mut bed.outcomes) {
            let (number, slot) = waiting.remove(&id).unwrap();
            assert!(matches!(outcome, Outcome::Stored), "{outcome:?}");
            free.push(slot);
            said(&format!("stored {number} ."));
        }
    }
}

/// Notes what a line says, if it is whole.
fn note(line: &str, there: &mut BTreeSet<u64>) {
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["stored", number, "."] => drop(there.insert(number.parse().unwrap())),
        ["evicted", number, "."] => drop(there.remove(&number.parse().unwrap())),
        _ => {}
    }
}

#[test]
fn a_daemon_killed_while_it_writes_loses_nothing_that_it_acknowledged() {
    for engine in ["uring", "threads"] {
        let home = home();
        let mut there = BTreeSet::new();
        for round in 0..6u64 {
            let told = format!("{} {engine} {}", home.path().display(), round * 1_000_000);
            let mut daemon = Daemon::start("kill::writes_until_it_is_killed", &told);
            // Each round is killed at another moment, the later ones when the disk is full and room is made.
            for line in daemon.lines.by_ref().take(100 + 397 * round as usize) {
                note(&line.unwrap(), &mut there);
            }
            daemon.kill().iter().for_each(|line| note(line, &mut there));
            let config = config(home.path(), EngineChoice::Auto, DISK_BYTES);
            drop(free_claim(&config));
            let mut inspection = free_inspection(&config);
            let found: Vec<u64> = inspection.blocks().map(|block| number_of(&block.unwrap().key)).collect();
            // Room that was being made may have cost blocks that the child had no time to name: the oldest ones.
            let oldest = found.iter().min().copied().unwrap();
            for number in there.iter().filter(|number| **number >= oldest) {
                assert!(found.contains(number), "{engine}, round {round}: block {number} was acknowledged");
            }
            assert_eq!(inspection.audit().unwrap().damaged, [], "{engine}, round {round}: all that is found is whole");
            for block in inspection.blocks().map(Result::unwrap) {
                let number = number_of(&block.key);
                let is_it = block.checksum == checksum(&block_bytes(number, length(number)));
                assert!(is_it, "{engine}, round {round}: block {number} has other bytes");
            }
            assert!(found.len() as u64 > 100.min(30 * round), "only {} blocks", found.len());
            there = found.into_iter().collect();
        }
    }
}

fn pool_file(home: &Path) -> File {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(home.join("pool")).unwrap();
    file.set_len(POOL_SLOTS * POOL_SLOT_BYTES).unwrap();
    file
}

#[test]
fn reads_until_it_is_killed() {
    let Some((home, engine, _)) = told() else { return };
    let pool = Region::of_file(&pool_file(&home), (POOL_SLOTS * POOL_SLOT_BYTES) as usize).unwrap();
    let mut ssd = open_when_free(&config(&home, engine, 4 * DISK_BYTES), &pool);
    let mut next_id = 0;
    let mut operation = |kind, number: u64| {
        next_id += 1;
        Operation {
            id: OpId(next_id),
            kind,
            key: key(number),
            slot: Some((SlotId((number * POOL_SLOT_BYTES / 4096) as u32), Generation(0))),
            length_bytes: POOL_SLOT_BYTES,
            checksum: checksum(&block_bytes(number, POOL_SLOT_BYTES)),
            lineage: None,
        }
    };
    let mut completions = Vec::new();
    for number in 0..POOL_SLOTS {
        pool.write(number * POOL_SLOT_BYTES, &block_bytes(number, POOL_SLOT_BYTES));
        let store = operation(OpKind::Store, number);
        assert_eq!(ssd.submit(&[store]), 1);
    }
    assert!(ssd.drain(Duration::from_secs(30), &mut completions));
    said("reading");
    let load = OpKind::Load;
    loop {
        // Every slot is always being filled.
        let loads: Vec<_> = (0..POOL_SLOTS).map(|number| operation(load, number)).collect();
        assert_eq!(ssd.submit(&loads), loads.len());
        while !ssd.is_idle() {
            turn_taken(&ssd, Duration::from_millis(5));
            ssd.poll(&mut completions);
        }
    }
}

/// The first free moment: how long it took, and the claim.
fn free_claim(config: &SsdConfig) -> (u32, DiskClaim) {
    let (deadline, mut waits) = (Instant::now() + Duration::from_secs(30), 0);
    let mut claim = loop {
        match DiskClaim::new(&config.disks[0]) {
            Ok(claim) => break claim,
            Err(error) => assert!(error.kind() == ErrorKind::Unavailable && Instant::now() < deadline, "{error}"),
        }
    };
    while !claim.is_earlier_io_done().unwrap() {
        assert!(Instant::now() < deadline, "the reads of a dead daemon do not end");
        waits += 1;
        std::thread::yield_now();
    }
    (waits, claim)
}

/// The disk that nobody has claimed. Another test's child holds a copy of a claim's file from its fork to its exec.
fn free_inspection(config: &SsdConfig) -> Inspection {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match Inspection::open(&config.disks[0].path) {
            Ok(inspection) => return inspection,
            Err(error) => assert!(error.kind() == ErrorKind::Unavailable && Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    }
}

/// A pattern that is no block's, laid over the pool as soon as the lock says that nothing moves any more, is never
/// overwritten.
#[test]
fn reads_of_a_killed_daemon_land_before_its_lock_is_free_and_never_after() {
    for engine in ["uring", "threads"] {
        let (mut waited, mut landed) = (0, 0);
        for round in 0..8u64 {
            let home = home();
            let pool = pool_file(home.path());
            let told = format!("{} {engine} 0", home.path().display());
            let mut daemon = Daemon::start("kill::reads_until_it_is_killed", &told);
            let is_reading = daemon.lines.by_ref().map_while(Result::ok).any(|line| line.ends_with("reading"));
            assert!(is_reading, "the child ended by itself");
            std::thread::sleep(Duration::from_micros(700 * round));
            daemon.kill();
            let pattern = vec![0xA7; (POOL_SLOTS * POOL_SLOT_BYTES) as usize];
            pool.write_all_at(&pattern, 0).unwrap();
            let choice = if engine == "threads" { EngineChoice::Threads } else { EngineChoice::Uring };
            let (waits, claim) = free_claim(&config(home.path(), choice, 4 * DISK_BYTES));
            waited += waits.min(1);
            landed += u32::from(contents(&pool) != pattern);
            pool.write_all_at(&pattern, 0).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert!(contents(&pool) == pattern, "{engine}, round {round}: a read landed after the lock was free");
            drop(claim);
        }
        println!("{engine}: of 8 killed daemons {waited} held the lock when they were gone, {landed} had reads land");
    }
}

fn contents(pool: &File) -> Vec<u8> {
    let mut bytes = vec![0; (POOL_SLOTS * POOL_SLOT_BYTES) as usize];
    pool.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
