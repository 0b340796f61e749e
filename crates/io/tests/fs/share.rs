//! Hosts that share a directory: processes that write the same blocks at once, and are killed while they do.
//!
//! The child is this test's own binary; what it was told to do comes in `FOREBAY_TEST_WRITER`. Between them they have
//! only the directory.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::tier::{Outcome, Tier};
use forebay_io::fs::{FsConfig, Fsync};
use forebay_io::header::Sealing;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::bed::*;

const TOLD: &str = "FOREBAY_TEST_WRITER";
const WRITERS: usize = 4;
/// Few, so that writers meet at the same keys.
const BLOCKS: u64 = 400;

fn length(number: u64) -> u64 {
    1 + number.wrapping_mul(7919) % (SLOT_BYTES - 1)
}

pub struct Writer {
    child: Child,
    pub lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Writer {
    /// Starts this binary as `body`, with `told` in its environment.
    pub fn start(body: &str, told: &str) -> Writer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([body, "--exact", "--nocapture"]).env(TOLD, told).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Writer { child, lines }
    }

    /// Lets it stand still, until it goes on.
    pub fn stop(&self) {
        let child = Pid::from_child(&self.child);
        kill_process(child, Signal::STOP).unwrap();
        // It goes on until the last of its threads has noticed.
        waitpid(Some(child), WaitOptions::UNTRACED).unwrap();
    }

    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    /// Kills it; returns what it still had said.
    pub fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.lines.by_ref().map_while(Result::ok).collect()
    }
}

/// No child outlives a test that failed.
impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait().map(drop));
    }
}

/// None among the other tests, where the bodies of children have nothing to do.
pub fn told() -> Option<Vec<String>> {
    std::env::var(TOLD).ok().map(|told| told.split(' ').map(str::to_owned).collect())
}

pub fn said(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush()).expect("the parent listens");
}

fn shared(home: &Path) -> FsConfig {
    let sweep_interval = Duration::from_millis(20);
    FsConfig { fsync: Fsync::Data, sweep_interval, lease: Duration::from_millis(200), ..config(home) }
}

#[test]
fn writes_and_reads_until_it_is_killed() {
    let Some(told) = told() else { return };
    let (home, seed) = (Path::new(&told[0]), told[1].parse().unwrap());
    let (mut host, mut dice) = (Host::open(&shared(home)), Dice(seed));
    loop {
        let mut numbers = BTreeSet::new();
        // One block for each slot.
        (0..24).map(|_| dice.below(BLOCKS)).for_each(|number| {
            if !numbers.iter().any(|other| other % SLOTS == number % SLOTS) {
                numbers.insert(number);
            }
        });
        let stores: Vec<_> = numbers.iter().map(|number| host.store_op(*number, length(*number))).collect();
        for (number, outcome) in numbers.iter().zip(host.run(&stores)) {
            assert!(matches!(outcome, Outcome::Stored), "{outcome:?}");
            said(&format!("stored {number} ."));
        }
        let number = dice.below(BLOCKS);
        match host.load(number, length(number)) {
            Outcome::Loaded { .. } => host.holds(number, length(number)),
            outcome => assert_eq!(outcome, Outcome::Absent),
        }
    }
}

fn note(line: &str, stored: &mut BTreeSet<u64>) {
    if let ["stored", number, "."] = line.split(' ').collect::<Vec<_>>()[..] {
        stored.insert(number.parse().unwrap());
    }
}

#[test]
fn whoever_is_killed_when_every_published_object_is_whole_and_every_acknowledged_one_is_there() {
    let seed: u64 = std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap());
    let (home, mut dice, mut stored, mut left) = (home(), Dice(seed), BTreeSet::new(), 0);
    for round in 0..12u64 {
        let begin = |writer: usize| {
            let told = format!("{} {}", home.path().display(), seed * 1000 + round * 10 + writer as u64);
            Writer::start("share::writes_and_reads_until_it_is_killed", &told)
        };
        let mut writers: Vec<Writer> = (0..WRITERS).map(begin).collect();
        // Each is killed at a moment of its own, by what it has said and not by time.
        while !writers.is_empty() {
            let mut writer = writers.swap_remove(dice.below(writers.len() as u64) as usize);
            for _ in 0..20 + dice.below(60) {
                let line = writer.lines.next().unwrap_or_else(|| panic!("seed {seed}: a writer ended by itself"));
                note(&line.unwrap(), &mut stored);
            }
            writer.kill().iter().for_each(|line| note(line, &mut stored));
        }
        left += unfinished(home.path()).len();
        let mut host = Host::open(&shared(home.path()));
        for number in 0..BLOCKS {
            match host.load(number, length(number)) {
                Outcome::Loaded { .. } => host.holds(number, length(number)),
                outcome => {
                    assert_eq!(outcome, Outcome::Absent, "seed {seed}, round {round}: block {number}");
                    assert!(!stored.contains(&number), "seed {seed}, round {round}: block {number} was acknowledged");
                }
            }
        }
        let published = objects(home.path()).len();
        assert!(published >= stored.len() && published <= BLOCKS as usize);
        if round % 3 == 2 {
            // From nothing again, so that writers race for names that are not there.
            let removes: Vec<_> = (0..BLOCKS).map(|number| host.op(REMOVE, number, 0)).collect();
            host.run(&removes);
            stored.clear();
        }
    }
    println!("{left} unfinished files were left by kills in the middle of a store");
    assert!(left > 0, "no kill hit a store: the test tests nothing");
}

#[test]
fn one_of_several_hosts_publishes_and_all_are_told_that_it_is_stored() {
    let home = home();
    let mut hosts: Vec<Host> = (0..3).map(|_| Host::open(&shared(home.path()))).collect();
    let ops: Vec<Vec<_>> =
        hosts.iter_mut().map(|host| (0..60).map(|number| host.store_op(number, length(number))).collect()).collect();
    hosts.iter_mut().zip(&ops).for_each(|(host, ops)| assert!(host.fs.submit(ops) > 0));
    let (mut done, begun) = (0, Instant::now());
    while done < 180 {
        for host in &mut hosts {
            let completions = host.turn();
            assert!(completions.iter().all(|done| matches!(done.outcome, Outcome::Stored)), "{completions:?}");
            done += completions.len();
        }
        assert!(begun.elapsed() < DEADLINE);
    }
    assert_eq!(objects(home.path()).len(), 60);
    let counters = |host: &Host| host.fs.report().roots[0].counters;
    let stored: u64 = hosts.iter().map(|host| counters(host).stored_blocks).sum();
    let repeated: u64 = hosts.iter().map(|host| counters(host).repeated_stores).sum();
    assert_eq!((stored, repeated), (60, 120));
    for host in &mut hosts {
        (0..60).for_each(|number| host.verify(number, length(number)));
    }
}

/// The old and the new file of each would not fit together.
#[test]
fn a_block_that_a_host_with_a_secret_replaces_counts_once() {
    let (home, length) = (home(), 60_000);
    let limited = FsConfig { capacity_bytes: Some(100 * (4096 + 61_440)), ..config(home.path()) };
    let mut plain = Host::open(&limited);
    (0..90).for_each(|number| plain.is_stored(number, length));
    drop(plain);
    let sealing = Sealing::with(&[7; 32]).unwrap();
    let mut host = Host::open(&FsConfig { sealing, ..limited });
    (0..90).for_each(|number| host.is_stored(number, length));
    assert_eq!(host.fs.report().roots[0].counters.repeated_stores, 0);
    assert_eq!(objects(home.path()).len(), 90);
    (0..90).for_each(|number| host.verify(number, length));
}
