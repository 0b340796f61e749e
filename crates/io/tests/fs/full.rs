//! A volume that is full before the directory is, and folders that cannot be read.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use forebay_core::ErrorKind;
use forebay_core::tier::Outcome;
use forebay_io::fs::FsConfig;

use crate::bed::*;
use crate::limits::give_up_privileges;
use crate::volume::Volume;

const LENGTH: u64 = 12_288;
const FULL: Outcome = Outcome::Failed(ErrorKind::Full);

fn brisk(home: &Path) -> FsConfig {
    FsConfig {
        sweep_interval: Duration::from_millis(10),
        lease: Duration::from_millis(400),
        grant_age: Duration::from_millis(100),
        ..config(home)
    }
}

/// Stores blocks until there is no room for one; returns its number.
fn fill(host: &mut Host) -> u64 {
    let refused = (0..).find(|number| host.store(*number, LENGTH) == FULL);
    refused.expect("the volume is small")
}

fn is_stored_in_time(host: &mut Host, number: u64) {
    let begun = Instant::now();
    while host.store(number, LENGTH) == FULL {
        assert!(begun.elapsed() < DEADLINE, "no room is made: {:?}", host.fs.report());
        host.turn();
    }
    host.verify(number, LENGTH);
}

#[test]
fn a_full_volume_makes_room_whatever_the_capacity_is() {
    for capacity_bytes in [None, Some(1 << 30)] {
        let Some(volume) = Volume::of_bytes(home(), 2 * MIB) else { return };
        let mut host = Host::open(&FsConfig { capacity_bytes, ..brisk(volume.path()) });
        let first = fill(&mut host);
        for number in 0..first {
            let file = fs::File::open(object_of(volume.path(), number)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(20_000 - number)).unwrap();
        }
        (first..first + 40).for_each(|number| is_stored_in_time(&mut host, number));
        let there = (0..first).filter(|number| matches!(host.find(*number), Outcome::Found)).count();
        assert!(there < first as usize - 30, "what was used least recently made room");
        assert!(there > first as usize / 4, "a tenth at a time: {there} of {first} are left");
    }
}

/// Not even for the file that names the sweeper.
#[test]
fn a_host_that_starts_on_a_volume_without_any_room_makes_room() {
    let Some(volume) = Volume::of_bytes(home(), 2 * MIB) else { return };
    let mut host = Host::open(&brisk(volume.path()));
    let first = fill(&mut host);
    drop(host);
    let mut other = fs::File::create(volume.path().join("another program's")).unwrap();
    while other.write_all(&[1; 4096]).is_ok() {}
    let mut host = Host::open(&brisk(volume.path()));
    is_stored_in_time(&mut host, first);
}

#[test]
fn the_sweeper_makes_room_for_another_host_that_the_volume_refused() {
    let Some(volume) = Volume::of_bytes(home(), 2 * MIB) else { return };
    // On a busy machine the other host would take the place of one whose lease is short.
    let config = FsConfig { lease: DEADLINE, ..brisk(volume.path()) };
    let mut sweeper = Host::open(&config);
    sweeper.until("it sweeps", |host| host.fs.report().roots[0].is_sweeper);
    let mut host = Host::open(&config);
    let first = fill(&mut host);
    is_stored_in_time(&mut host, first);
    sweeper.until("it counts what went", |host| host.fs.report().roots[0].counters.evicted_blocks > 0);
    assert_eq!(host.fs.report().roots[0].counters.evicted_blocks, 0);
}

#[test]
fn a_folder_that_cannot_be_read_does_not_end_the_walk() {
    give_up_privileges();
    let home = home();
    let mut host = Host::open(&FsConfig { max_age: Some(Duration::from_secs(3600)), ..brisk(home.path()) });
    (0..20).for_each(|number| host.is_stored(number, LENGTH));
    host.until("all is counted", |host| host.fs.report().roots[0].counted_blocks == 20);
    let folder = object_of(home.path(), 7).parent().unwrap().to_owned();
    let inside = objects(&folder).len();
    let chmod = |mode| fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
    for object in objects(home.path()) {
        fs::File::open(object).unwrap().set_modified(SystemTime::now() - Duration::from_secs(9000)).unwrap();
    }
    chmod(0o300);
    host.until("those in other folders go", |host| {
        host.fs.report().roots[0].counters.expired_blocks == 20 - inside as u64
    });
    host.until("it is counted", |host| host.fs.report().roots[0].counters.skipped_folders > 0);
    let used_bytes = host.fs.report().roots[0].used_bytes;
    assert!(used_bytes >= Some(inside as u64 * (4096 + LENGTH)), "what it holds still counts: {used_bytes:?}");
    chmod(0o755);
    host.until("those in the folder go", |_| objects(home.path()).is_empty());
}
