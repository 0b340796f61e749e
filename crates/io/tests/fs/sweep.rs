//! The sweeper: one among hosts, killed in the middle, two at a time; capacity, age and orphans.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Outcome};
use forebay_io::fs::FsConfig;
use rustix::fs::{FlockOperation, flock};

use crate::bed::*;
use crate::share::{Writer, said, told};

const LENGTH: u64 = 12_288;
const FILE_BYTES: u64 = 4096 + LENGTH;
const CAPACITY: u64 = 2 * MIB;

fn brisk(home: &Path) -> FsConfig {
    FsConfig {
        sweep_interval: Duration::from_millis(10),
        lease: Duration::from_millis(400),
        orphan_age: Duration::from_secs(3600),
        grant_age: Duration::from_millis(200),
        ..config(home)
    }
}

fn bounded(home: &Path) -> FsConfig {
    FsConfig { capacity_bytes: Some(CAPACITY), ..brisk(home) }
}

fn age(path: &Path, by: Duration) {
    File::open(path).unwrap().set_modified(SystemTime::now() - by).unwrap();
}

fn sweeps(host: &Host) -> u64 {
    host.fs.report().roots[0].counters.sweeps
}

/// Until a walk that begins after this has ended.
fn swept(host: &mut Host) {
    let before = sweeps(host);
    host.until("two more walks", |host| sweeps(host) >= before + 2);
}

/// Stores `numbers` one after the other, each as often as it is refused for want of room; the directory's bytes never
/// exceed its capacity.
fn fill(host: &mut Host, home: &Path, numbers: std::ops::Range<u64>) -> u64 {
    let mut refused = 0;
    for number in numbers {
        let begun = Instant::now();
        loop {
            match host.store(number, LENGTH) {
                Outcome::Stored => break,
                outcome => assert_eq!(outcome, Outcome::Failed(ErrorKind::Full)),
            }
            refused += 1;
            assert!(begun.elapsed() < DEADLINE, "no room is made: {:?}", host.fs.report());
        }
        let bytes = object_bytes(home);
        assert!(bytes <= CAPACITY, "{bytes} of {CAPACITY}");
    }
    refused
}

#[test]
fn a_full_directory_makes_room_by_what_was_used_least_recently() {
    let home = home();
    let mut host = Host::open(&bounded(home.path()));
    fill(&mut host, home.path(), 0..100);
    // Made old in the order of their numbers; those that end in 7 were loaded since.
    for number in 0..100 {
        age(&object_of(home.path(), number), Duration::from_secs(20_000 - number * 100));
    }
    (7..100).step_by(10).for_each(|number| host.verify(number, LENGTH));
    // A walk that began before has seen some of them young.
    swept(&mut host);
    fill(&mut host, home.path(), 100..170);
    // What is looked at now stays: room is made until a walk is over.
    swept(&mut host);
    let there: BTreeSet<u64> = (0..170).filter(|number| matches!(host.find(*number), Outcome::Found)).collect();
    let gone: Vec<u64> = (0..170).filter(|number| !there.contains(number)).collect();
    assert!(gone.len() >= 170 - (CAPACITY / FILE_BYTES) as usize && gone.len() < 90, "{gone:?}");
    assert!(gone.iter().all(|number| number % 10 != 7 && *number < 100), "{gone:?}");
    let oldest_left = there.iter().find(|number| **number % 10 != 7).unwrap();
    assert!(gone.iter().all(|number| number < oldest_left), "in the order of their age: {gone:?}");
    // The sweeper counts a block after it is gone.
    let evicted = gone.len() as u64;
    host.until("all that are gone are counted", |host| host.fs.report().roots[0].counters.evicted_blocks == evicted);
}

#[test]
fn blocks_that_nobody_used_for_too_long_go_and_others_stay() {
    let home = home();
    let mut host = Host::open(&FsConfig { max_age: Some(Duration::from_secs(7200)), ..brisk(home.path()) });
    (0..20).for_each(|number| host.is_stored(number, LENGTH));
    (0..10).for_each(|number| age(&object_of(home.path(), number), Duration::from_secs(9000)));
    age(&object_of(home.path(), 15), Duration::from_secs(5000));
    host.until("ten are gone", |_| objects(home.path()).len() == 10);
    (10..20).for_each(|number| host.verify(number, LENGTH));
    assert_eq!(host.fs.report().roots[0].counters.expired_blocks, 10);
    host.until("their room is known", |host| host.fs.report().roots[0].counted_blocks == 10);
}

/// A sparse file, as a damaged filesystem has them: by its length it would take all of the capacity.
#[test]
fn a_file_that_is_longer_than_any_block_costs_no_block_its_room() {
    let home = home();
    let mut host = Host::open(&bounded(home.path()));
    (0..20).for_each(|number| host.is_stored(number, LENGTH));
    let path = object_of(home.path(), 3);
    File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    host.until("it is gone", |_| !path.exists());
    swept(&mut host);
    (0..20).filter(|number| *number != 3).for_each(|number| host.verify(number, LENGTH));
    assert_eq!(host.fs.report().roots[0].counters.evicted_blocks, 0);
}

#[test]
fn orphans_go_when_they_are_old_and_what_is_not_ours_stays() {
    let home = home();
    let mut host = Host::open(&brisk(home.path()));
    host.is_stored(1, LENGTH);
    let folder = object_of(home.path(), 1).parent().unwrap().to_owned();
    let own = home.path().join(".forebay");
    let old: Vec<PathBuf> = [(&folder, "gone-1-00000000000000aa"), (&own, "gone-1-00000000000000bb")]
        .map(|(folder, name)| folder.join(format!(".tmp-{name}")))
        .into();
    let kept = [
        folder.join(".tmp-busy-1-00000000000000cc"),
        folder.join(".tmp-backup"),
        folder.join("notes"),
        folder.join("0001-ABCD"),
        home.path().join("README"),
        home.path().join(".snapshot"),
    ];
    old.iter().chain(&kept).for_each(|path| fs::write(path, "x").unwrap());
    old.iter().chain(&kept[1..]).for_each(|path| age(path, Duration::from_secs(9000)));
    host.until("the old ones are gone", |_| old.iter().all(|path| !path.exists()));
    swept(&mut host);
    assert!(kept.iter().all(|path| path.exists()));
    host.verify(1, LENGTH);
    assert_eq!(host.fs.report().roots[0].counters.removed_orphans, 2);
}

#[test]
fn an_empty_folder_goes_and_stores_make_it_again() {
    let home = home();
    let mut host = Host::open(&FsConfig { orphan_age: Duration::ZERO, ..brisk(home.path()) });
    for _ in 0..5 {
        host.is_stored(1, LENGTH);
        let folder = object_of(home.path(), 1).parent().unwrap().to_owned();
        let remove = host.op(REMOVE, 1, 0);
        assert_eq!(host.run(&[remove]), [Outcome::Removed]);
        host.until("the folder is gone", |_| !folder.exists());
    }
}

#[test]
fn one_host_sweeps_and_another_takes_over_when_it_leaves() {
    let home = home();
    let mut first = Host::open(&brisk(home.path()));
    first.until("it sweeps", |host| host.fs.report().roots[0].is_sweeper);
    let mut second = Host::open(&brisk(home.path()));
    swept(&mut first);
    assert_eq!(sweeps(&second), 0);
    assert!(!second.fs.report().roots[0].is_sweeper);
    drop(first);
    second.until("it took over", |host| host.fs.report().roots[0].is_sweeper);
    swept(&mut second);
}

/// Fills the directory and sweeps it; says so once for each store.
#[test]
fn fills_and_sweeps_until_it_is_killed() {
    let Some(told) = told() else { return };
    let mut host = Host::open(&bounded(Path::new(&told[0])));
    for number in told[1].parse().unwrap().. {
        let outcome = host.store(number, LENGTH);
        assert!(matches!(outcome, Outcome::Stored | Outcome::Failed(ErrorKind::Full)), "{outcome:?}");
        said(&format!("{} {number}", host.fs.report().roots[0].is_sweeper));
    }
}

#[test]
fn a_sweeper_killed_in_the_middle_is_replaced_and_the_bound_holds() {
    let home = home();
    for round in 0..6u64 {
        let told = format!("{} {}", home.path().display(), round * 100_000);
        let mut writer = Writer::start("sweep::fills_and_sweeps_until_it_is_killed", &told);
        // It has to take the lease of the one that was killed before it.
        let is_sweeper = writer.lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("true"));
        assert!(is_sweeper, "round {round}: the child ended by itself");
        for (at, line) in writer.lines.by_ref().take(150 + 40 * round as usize).enumerate() {
            line.unwrap();
            // Looking takes longer than storing.
            assert!(at % 16 > 0 || object_bytes(home.path()) <= CAPACITY, "round {round}");
        }
        writer.kill();
        assert!(object_bytes(home.path()) <= CAPACITY, "round {round}");
    }
    let mut host = Host::open(&bounded(home.path()));
    host.until("it took over", |host| host.fs.report().roots[0].is_sweeper);
    swept(&mut host);
    // Grants that died with their holders are counted as free again.
    host.until("what is there is known", |host| {
        host.fs.report().roots[0].used_bytes == Some(object_bytes(home.path()))
    });
    fill(&mut host, home.path(), 1_000_000..1_000_050);
}

/// Until it says how full the directory is, and never that there is less in it than there is.
fn knows(host: &mut Host, least_bytes: u64) {
    host.until("how full it is", |host| match host.fs.report().roots[0].used_bytes {
        Some(used_bytes) => {
            assert!(used_bytes >= least_bytes, "{used_bytes} of {least_bytes}");
            true
        }
        None => false,
    });
}

#[test]
fn how_full_a_directory_is_is_not_said_before_it_is_known_and_soon_after_each_start() {
    let home = home();
    let path = home.path().join("store");
    fs::create_dir(&path).unwrap();
    let config = FsConfig { capacity_bytes: Some(100 * FILE_BYTES), ..config(&path) };
    let mut host = Host::open(&config);
    (0..30).for_each(|number| host.is_stored(number, LENGTH));
    let least_bytes = object_bytes(&path);
    // It does not get the lease, and stores nothing.
    let mut other = Host::open(&config);
    knows(&mut other, least_bytes);
    assert!(!other.fs.report().roots[0].is_sweeper);

    let away = home.path().join("away");
    fs::rename(&path, &away).unwrap();
    other.until("it is missed", |other| other.fs.report().roots[0].missing.is_some());
    assert_eq!(other.fs.report().roots[0].used_bytes, None);
    fs::rename(&away, &path).unwrap();
    other.until("it is back", |other| other.fs.report().roots[0].missing.is_none());
    knows(&mut other, least_bytes);
}

/// Of a grant that is for sixteen blocks.
fn granted_much(home: &Path) -> FsConfig {
    FsConfig { capacity_bytes: Some(64 * MIB), grant_age: Duration::from_secs(1), ..brisk(home) }
}

/// Stores one block, and many more as soon as there is room for them by what it knows.
#[test]
fn stores_one_block_and_later_what_it_can() {
    let Some(told) = told() else { return };
    let (home, go) = (Path::new(&told[0]), Path::new(&told[1]));
    let mut host = Host::open(&granted_much(home));
    host.is_stored(0, LENGTH);
    said("stored one .");
    host.until("it is told to", |_| go.exists());
    let stores: Vec<_> = (1..SLOTS).map(|number| host.store_op(number, LENGTH)).collect();
    host.run(&stores);
    said("stored all .");
}

/// Until the child says so.
fn hears(writer: &mut Writer, what: &str) -> bool {
    writer.lines.by_ref().map_while(Result::ok).any(|line| line.ends_with(what))
}

/// One block is written out of a grant; then its host stands still while another counts what is there, and a third
/// fills all the rest. Nobody makes room, since the sweeper's place is taken by one that is not there.
#[test]
fn a_host_that_stood_still_over_a_count_does_not_spend_what_it_was_granted_before() {
    let (home, go) = (home(), home());
    let go = go.path().join("go");
    let told = format!("{} {}", home.path().display(), go.display());
    let mut sleeper = Writer::start("sweep::stores_one_block_and_later_what_it_can", &told);
    assert!(hears(&mut sleeper, "stored one ."));
    // Not while it holds the lock of the figures: nobody could count then.
    sleeper.stop();
    while flock(figures(home.path()), FlockOperation::NonBlockingLockExclusive).is_err() {
        sleeper.go_on();
        sleeper.stop();
    }
    let mut host = Host::open(&granted_much(home.path()));
    host.until("what is there is counted", |host| host.fs.report().roots[0].used_bytes == Some(FILE_BYTES));
    drop(host);
    let lease = home.path().join(".forebay/sweeper");
    fs::write(&lease, "forebay sweeper 1\nholder nobody\nboot 0\nlease 0\nexpires_ms 3600000\n").unwrap();
    let mut host = Host::open(&granted_much(home.path()));
    for first in (1_000..).step_by(SLOTS as usize) {
        let stores: Vec<_> = (first..first + SLOTS).map(|number| host.store_op(number, LENGTH)).collect();
        if host.run(&stores).contains(&Outcome::Failed(ErrorKind::Full)) {
            break;
        }
    }
    assert!(object_bytes(home.path()) > 63 * MIB, "it is full");
    fs::write(&go, "").unwrap();
    sleeper.go_on();
    assert!(hears(&mut sleeper, "stored all ."));
    let bytes = object_bytes(home.path());
    assert!(bytes <= 64 * MIB, "{bytes}");
}

fn figures(home: &Path) -> File {
    File::open(home.join(".forebay/usage")).unwrap()
}

/// As a host that stands still in the middle of a change of the figures.
#[test]
fn a_host_that_keeps_the_lock_of_the_figures_holds_no_thread_of_another() {
    let home = home();
    // Each store asks for a grant of its own, so small is the directory.
    let mut host = Host::open(&bounded(home.path()));
    host.is_stored(0, LENGTH);
    let kept = figures(home.path());
    flock(&kept, FlockOperation::LockExclusive).unwrap();
    let begun = Instant::now();
    let stores: Vec<_> = (1..9).map(|number| host.store_op(number, LENGTH)).collect();
    let outcomes = host.run(&stores);
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Failed(ErrorKind::Timeout)), "{outcomes:?}");
    // What needs no figures goes on.
    host.verify(0, LENGTH);
    drop(host);
    assert!(begun.elapsed() < DEADLINE / 2, "each of them waited: {:?}", begun.elapsed());
    drop(kept);
    let mut host = Host::open(&bounded(home.path()));
    host.is_stored(1, LENGTH);
}

/// As after a file server whose clock was ahead, and was set right while the holder was gone.
#[test]
fn a_lease_from_the_future_is_taken_like_an_old_one() {
    let home = home();
    drop(Host::open(&bounded(home.path())));
    let lease = home.path().join(".forebay/sweeper");
    fs::write(&lease, "forebay sweeper 1\nholder nobody\nboot 0\nlease 0\nexpires_ms 400\n").unwrap();
    File::open(&lease).unwrap().set_modified(SystemTime::now() + Duration::from_secs(3_600)).unwrap();
    let mut host = Host::open(&bounded(home.path()));
    host.until("it sweeps", |host| host.fs.report().roots[0].is_sweeper);
}

/// Two that both believe to be the one: the second takes the lease file away by force, again and again.
#[test]
fn two_sweepers_at_a_time_do_no_harm() {
    let home = home();
    let mut hosts = [Host::open(&bounded(home.path())), Host::open(&bounded(home.path()))];
    let lease = home.path().join(".forebay/sweeper");
    let mut number = 0;
    let begun = Instant::now();
    // Neither keeps the lease for as long as a walk takes.
    let evicts = |host: &Host| host.fs.report().roots[0].counters.evicted_blocks > 0;
    while number < 400 || !hosts.iter().all(evicts) {
        for host in &mut hosts {
            let outcome = host.store(number, LENGTH);
            assert!(matches!(outcome, Outcome::Stored | Outcome::Failed(ErrorKind::Full)), "{outcome:?}");
            let bytes = object_bytes(home.path());
            assert!(bytes <= CAPACITY, "{bytes} of {CAPACITY}");
            number += 1;
        }
        let _ = fs::remove_file(&lease);
        assert!(begun.elapsed() < DEADLINE, "both make room");
    }
    let numbers: Vec<u64> = (0..number).collect();
    let host = &mut hosts[0];
    let there = numbers.iter().filter(|number| matches!(host.find(**number), Outcome::Found)).count();
    assert!(there > 20, "{there} blocks are left of {number}");
    for number in numbers {
        match host.load(number, LENGTH) {
            Outcome::Loaded { .. } => host.holds(number, LENGTH),
            outcome => assert_eq!(outcome, Outcome::Absent),
        }
    }
}

#[test]
fn several_hosts_fill_one_directory_and_its_bound_holds() {
    let home = home();
    let writers: Vec<Writer> = (0..3u64)
        .map(|writer| {
            let told = format!("{} {}", home.path().display(), writer * 1_000_000);
            Writer::start("sweep::fills_and_sweeps_until_it_is_killed", &told)
        })
        .collect();
    let mut most = 0;
    let mut writers = writers;
    for _ in 0..400 {
        for writer in &mut writers {
            writer.lines.next().expect("a writer ended by itself").unwrap();
        }
        most = most.max(object_bytes(home.path()));
        assert!(most <= CAPACITY, "{most} of {CAPACITY}");
    }
    assert!(most > CAPACITY / 2, "it was filled: {most}");
    writers.into_iter().for_each(|writer| drop(writer.kill()));
}

/// Seconds since the object of that number was used last, as far as its file tells.
fn unused_for(home: &Path, number: u64) -> u64 {
    let modified = fs::metadata(object_of(home, number)).unwrap().modified().unwrap();
    SystemTime::now().duration_since(modified).unwrap_or_default().as_secs()
}

#[test]
fn repeated_stores_and_touches_are_uses_and_loads_are_once_a_minute() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    (0..4).for_each(|number| host.is_stored(number, LENGTH));
    (0..4).for_each(|number| age(&object_of(home.path(), number), Duration::from_secs(50)));
    host.is_stored(0, LENGTH);
    host.verify(1, LENGTH);
    let touch = host.op(OpKind::Touch { fresh_seconds: 40 }, 2, LENGTH);
    let fresh = host.op(OpKind::Touch { fresh_seconds: 60 }, 3, LENGTH);
    let gone = host.op(OpKind::Touch { fresh_seconds: 0 }, 9, LENGTH);
    let outcomes = host.run(&[touch, fresh, gone]);
    assert!(matches!(outcomes[..], [Outcome::Found, Outcome::Found, Outcome::Absent]), "{outcomes:?}");
    let unused: Vec<u64> = (0..4).map(|number| unused_for(home.path(), number)).collect();
    assert!(unused[0] < 40 && unused[2] < 40, "a repeated store and a touch: {unused:?}");
    assert!(unused[1] >= 50 && unused[3] >= 50, "a use that was noted shortly before is enough: {unused:?}");
    age(&object_of(home.path(), 1), Duration::from_secs(70));
    host.verify(1, LENGTH);
    assert!(unused_for(home.path(), 1) < 40);
    // A server whose clock is ahead of this host's does not make its blocks look used for ever.
    let ahead = SystemTime::now() + Duration::from_secs(1000);
    File::open(object_of(home.path(), 3)).unwrap().set_modified(ahead).unwrap();
    let touch = host.op(OpKind::Touch { fresh_seconds: 60 }, 3, LENGTH);
    host.run(&[touch]);
    assert!(fs::metadata(object_of(home.path(), 3)).unwrap().modified().unwrap() < ahead);
}

#[test]
fn a_usage_file_that_is_gone_or_damaged_is_counted_anew() {
    for (is_gone, restarts) in [(true, true), (true, false), (false, true), (false, false)] {
        let home = home();
        let usage = home.path().join(".forebay/usage");
        let mut host = Host::open(&bounded(home.path()));
        (0..20).for_each(|number| host.is_stored(number, LENGTH));
        if is_gone {
            fs::remove_file(&usage).unwrap();
        } else {
            fs::write(&usage, "no figure").unwrap();
        }
        if restarts {
            drop(host);
            host = Host::open(&bounded(home.path()));
        }
        host.until("the file is made again", |_| usage.exists());
        fill(&mut host, home.path(), 20..40);
        let is_counted = |host: &mut Host| host.fs.report().roots[0].used_bytes >= Some(40 * FILE_BYTES);
        host.until(&format!("it is counted, {is_gone}, {restarts}"), is_counted);
        let find = host.op(OpKind::Exists, 5, 0);
        assert!(matches!(host.run(&[find])[0], Outcome::Found), "{is_gone}, {restarts}");
    }
}
