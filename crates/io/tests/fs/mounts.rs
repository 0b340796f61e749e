//! Mounts that hang, fail and lie.
//!
//! What holds of every hanging mount is shown on a real filesystem in user space, once with a server that reads
//! requests and does not answer them and once with one that is frozen; and on FIFOs in place of files, at which `open`
//! hangs as well. Where there is no FUSE the FIFOs are what is left, and each test says so; what the other tests claim
//! is then shown by `hang`, `damage` and `limits` alone, by other means.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, OpKind, Outcome, Tier};
use forebay_io::conformance;
use forebay_io::fs::{Fs, FsConfig, Fsync};

use crate::bed::*;
use crate::conform::Bed;
use crate::fuse::hanging::{each_kind, mount};

const LENGTH: u64 = 9000;
const LATE: Outcome = Outcome::Failed(ErrorKind::Timeout);

/// Longer than any operation takes on a busy machine when nothing hangs.
fn quick(path: &Path) -> FsConfig {
    FsConfig { timeout: Duration::from_secs(3), buffers: 8, ..config(path) }
}

fn give_to_others(host: &Host) {
    (0..SLOTS).for_each(|number| host.pool.write(number * SLOT_BYTES, &[0x77; SLOT_BYTES as usize]));
}

fn are_untouched(host: &Host, slots: impl IntoIterator<Item = u64>) {
    let mut slot = vec![0; SLOT_BYTES as usize];
    for number in slots {
        host.pool.read(number * SLOT_BYTES, &mut slot);
        assert!(slot.iter().all(|byte| *byte == 0x77), "slot {number} has another owner and was written to");
    }
}

fn nothing_hangs(host: &mut Host) -> bool {
    host.fs.report().roots.iter().all(|root| root.hanging_threads == 0)
}

#[test]
fn nobody_waits_for_a_mount_that_hangs_and_it_serves_again_when_it_answers() {
    each_kind(|mount| {
        let mut host = Host::open(&quick(mount.path()));
        (1..40).for_each(|number| host.is_stored(number, LENGTH));
        mount.hang();
        let mut ops: Vec<_> = (1..40).map(|number| host.op(LOAD, number, LENGTH)).collect();
        if mount.hangs_whole() {
            ops.extend((1..40).map(|number| host.op(OpKind::Exists, number, 0)));
            ops.extend((40..44).map(|number| host.store_op(number, LENGTH)));
        }
        let begun = Instant::now();
        let outcomes = host.run(&ops);
        assert!(begun.elapsed() < DEADLINE / 2, "nobody waits for the mount");
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{outcomes:?}");
        assert!(outcomes.contains(&LATE));
        // Whoever was told so gives the slots to others at once.
        give_to_others(&host);
        host.until("it is sick", |host| host.fs.health() == Health::Sick(ErrorKind::Timeout));
        // What is asked all the same is answered, and piles up nowhere.
        for number in 1..200 {
            let ops = [host.op(LOAD, number, LENGTH), host.op(OpKind::Exists, number, 0)];
            assert!(host.run(&ops).iter().all(|outcome| matches!(outcome, Outcome::Failed(_))));
        }
        let report = host.fs.report().roots.remove(0);
        let waiting = report.waiting_loads + report.waiting_finds + report.waiting_stores;
        assert_eq!((report.in_flight, waiting, report.hanging_threads), (0, 0, 3));
        assert!(report.buffers <= 3, "{report:?}");
        mount.answer();
        host.until("the threads come back", nothing_hangs);
        are_untouched(&host, 0..SLOTS);
        assert_eq!(host.fs.health(), Health::Healthy);
        (1..40).for_each(|number| host.verify(number, LENGTH));
        host.is_stored(50, LENGTH);
    });
}

#[test]
fn a_directory_that_hangs_costs_its_own_blocks_and_no_others() {
    each_kind(|mount| {
        let other = home();
        let directories = vec![mount.path().to_owned(), other.path().to_owned()];
        let mut host = Host::open(&FsConfig { directories, ..quick(mount.path()) });
        (0..SLOTS).for_each(|number| host.is_stored(number, LENGTH));
        let own: Vec<String> = objects(other.path()).iter().map(|path| name_of(path).to_owned()).collect();
        assert!((10..SLOTS as usize - 10).contains(&own.len()), "{}", own.len());
        mount.hang();
        let loads: Vec<_> = (0..SLOTS).map(|number| host.op(LOAD, number, LENGTH)).collect();
        for (number, outcome) in (0..SLOTS).zip(host.run(&loads)) {
            let is_served = own.iter().any(|name| name.ends_with(&key(number).hash.to_string()));
            assert_eq!(matches!(outcome, Outcome::Loaded { .. }), is_served, "block {number}: {outcome:?}");
        }
        assert_eq!(host.fs.health(), Health::Healthy, "one of two serves");
        mount.answer();
        host.until("the threads come back", nothing_hangs);
        (0..SLOTS).for_each(|number| host.verify(number, LENGTH));
    });
}

#[test]
fn a_tier_whose_mount_hangs_is_closed_in_seconds_and_opened_when_the_mount_is_back() {
    each_kind(|mount| {
        let mut host = Host::open(&quick(mount.path()));
        (1..4).for_each(|number| host.is_stored(number, LENGTH));
        mount.hang();
        let ops: Vec<_> = (1..4).map(|number| host.op(LOAD, number, LENGTH)).collect();
        assert!(host.run(&ops).iter().all(|outcome| *outcome == LATE));
        let begun = Instant::now();
        drop(host);
        assert!(begun.elapsed() < DEADLINE / 2, "closing does not wait for the mount");
        if mount.hangs_whole() {
            let error = Fs::open(&quick(mount.path()), pool()).err().expect("it is not opened");
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            assert!(error.hint_text().unwrap().contains("mount"));
        }
        mount.answer();
        let mut host = Host::open(&quick(mount.path()));
        (1..4).for_each(|number| host.verify(number, LENGTH));
    });
}

#[test]
fn bytes_that_come_late_and_right_stay_in_the_bounce_buffer() {
    let Some(mut mount) = mount() else { return };
    for io_direct in [false, true] {
        let mut host = Host::open(&FsConfig { io_direct, ..quick(mount.path()) });
        (1..3).for_each(|number| host.is_stored(number, LENGTH));
        mount.harm("read", "hang");
        assert_eq!(host.load(1, LENGTH), LATE);
        assert!(mount.withheld() > 0, "it was reading");
        give_to_others(&host);
        mount.calm();
        host.until("the thread comes back", nothing_hangs);
        are_untouched(&host, [1]);
        (1..3).for_each(|number| host.verify(number, LENGTH));
        let removes: Vec<_> = (1..3).map(|number| host.op(REMOVE, number, 0)).collect();
        host.run(&removes);
    }
}

#[test]
fn stores_that_hang_leave_lookups_and_loads_a_way_and_are_kept_when_the_mount_answers() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&quick(mount.path()));
    host.is_stored(1, LENGTH);
    // Their folders are there: the kernel lets a lookup wait while a folder is made beside it.
    (10..30).for_each(|number| host.is_stored(number, LENGTH));
    let removes: Vec<_> = (10..30).map(|number| host.op(REMOVE, number, 0)).collect();
    assert_eq!(host.run(&removes), [Outcome::Removed; 20]);
    mount.harm("make,write", "hang");
    let stores: Vec<_> = (10..30).map(|number| host.store_op(number, LENGTH)).collect();
    let outcomes = host.run(&stores);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == LATE).count(), 2, "as many as there are threads for");
    assert_eq!(host.fs.health(), Health::Healthy, "the thread without stores is well");
    host.verify(1, LENGTH);
    assert!(matches!(host.find(1), Outcome::Found));
    give_to_others(&host);
    mount.calm();
    host.until("the threads come back", nothing_hangs);
    host.until("what hung was stored late", |_| objects(mount.path()).len() == 3);
    let late: Vec<u64> = (10..30).filter(|number| matches!(host.find(*number), Outcome::Found)).collect();
    assert_eq!(late.len(), 2);
    late.into_iter().for_each(|number| host.verify(number, LENGTH));
}

#[test]
fn a_sweeper_whose_mount_hangs_holds_up_no_load() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&quick(mount.path()));
    (1..20).for_each(|number| host.is_stored(number, LENGTH));
    drop(host);
    mount.harm("list", "hang");
    let mut host = Host::open(&FsConfig { capacity_bytes: Some(MIB), ..quick(mount.path()) });
    host.until("the sweeper hangs", |_| mount.withheld() > 0);
    (1..20).for_each(|number| host.verify(number, LENGTH));
    let begun = Instant::now();
    drop(host);
    assert!(begun.elapsed() < DEADLINE / 2);
}

/// (what fails, how, what a store says to it, what a load says to it); none where it does not come to it.
const FAILURES: [(&str, i32, Option<ErrorKind>, Option<Outcome>); 11] = [
    ("open", libc::EIO, None, Some(Outcome::Failed(ErrorKind::Io))),
    ("open", libc::ESTALE, None, Some(Outcome::Failed(ErrorKind::Io))),
    ("read", libc::EIO, None, Some(Outcome::Failed(ErrorKind::Io))),
    ("read", libc::ESTALE, None, Some(Outcome::Failed(ErrorKind::Io))),
    ("open", libc::EACCES, None, Some(Outcome::Failed(ErrorKind::Unsupported))),
    ("write", libc::ENOSPC, Some(ErrorKind::Full), None),
    ("write", libc::EDQUOT, Some(ErrorKind::Full), None),
    ("write", libc::EIO, Some(ErrorKind::Io), None),
    ("make", libc::ENOSPC, Some(ErrorKind::Full), None),
    ("link", libc::EIO, Some(ErrorKind::Io), None),
    ("sync", libc::ESTALE, Some(ErrorKind::Io), None),
];

#[test]
fn errors_of_the_filesystem_are_told_and_leave_nothing_behind() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&FsConfig { fsync: Fsync::Data, capacity_bytes: Some(MIB), ..quick(mount.path()) });
    host.is_stored(1, LENGTH);
    for (op, errno, stored, loaded) in FAILURES {
        mount.harm(op, &format!("fail {errno}"));
        if let Some(kind) = stored {
            assert_eq!(host.store(2, LENGTH), Outcome::Failed(kind), "{op} fails with {errno}");
        }
        if let Some(outcome) = loaded {
            assert_eq!(host.load(1, LENGTH), outcome, "{op} fails with {errno}");
        }
        mount.calm();
        assert_eq!(unfinished(mount.path()), Vec::<PathBuf>::new(), "{op} fails with {errno}");
        host.verify(1, LENGTH);
        assert_eq!(host.find(2), Outcome::Absent);
    }
    mount.harm("look", "fail 5");
    assert_eq!(host.find(1), Outcome::Failed(ErrorKind::Io));
    mount.harm("remove", &format!("fail {}", libc::ESTALE));
    let remove = host.op(REMOVE, 1, 0);
    assert_eq!(host.run(&[remove]), [Outcome::Failed(ErrorKind::Io)], "the file is there still");
    mount.calm();
    host.verify(1, LENGTH);
    host.is_stored(2, LENGTH);
}

#[test]
fn reads_that_end_early_or_lie_are_never_data() {
    let Some(mut mount) = mount() else { return };
    for io_direct in [false, true] {
        let mut host = Host::open(&FsConfig { io_direct, ..quick(mount.path()) });
        for (harm, kind, is_kept) in [("cut", ErrorKind::Io, true), ("flip", ErrorKind::Corrupt, false)] {
            host.is_stored(1, LENGTH);
            give_to_others(&host);
            mount.harm("read", harm);
            assert_eq!(host.load(1, LENGTH), Outcome::Failed(kind), "{harm}");
            are_untouched(&host, [1]);
            mount.calm();
            // A read that ended early is no word about the file; the same other bytes twice are, until it is stored
            // again.
            assert_eq!(objects(mount.path()).len(), usize::from(is_kept), "{harm}");
            host.is_stored(1, LENGTH);
            host.verify(1, LENGTH);
        }
    }
}

#[test]
fn a_bit_that_flips_in_one_read_costs_neither_the_object_nor_the_hit() {
    let Some(mut mount) = mount() else { return };
    for io_direct in [false, true] {
        let mut host = Host::open(&FsConfig { io_direct, ..quick(mount.path()) });
        host.is_stored(1, LENGTH);
        mount.harm("read", "flip once");
        host.verify(1, LENGTH);
        let counters = host.fs.report().roots[0].counters;
        // The flip came to pass, and a second read was asked of the server, not of the page cache.
        assert_eq!((counters.misread_blocks, counters.corrupt_blocks), (1, 0), "direct: {io_direct}");
        host.verify(1, LENGTH);
        assert_eq!(host.fs.report().roots[0].counters.misread_blocks, 1);
    }
}

#[test]
fn a_host_that_reads_other_bytes_each_time_removes_nothing() {
    let Some(mut mount) = mount() else { return };
    for io_direct in [false, true] {
        let mut host = Host::open(&FsConfig { io_direct, ..quick(mount.path()) });
        host.is_stored(1, LENGTH);
        give_to_others(&host);
        mount.harm("read", "flip elsewhere");
        assert_eq!(host.load(1, LENGTH), Outcome::Failed(ErrorKind::Io), "direct: {io_direct}");
        are_untouched(&host, [1]);
        mount.calm();
        host.verify(1, LENGTH);
        let counters = host.fs.report().roots[0].counters;
        assert_eq!((counters.misread_blocks, counters.corrupt_blocks, counters.failed_loads), (1, 0, 1));
    }
}

#[test]
fn a_mount_that_loses_half_of_what_is_written_publishes_nothing() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&quick(mount.path()));
    mount.harm("write", "cut");
    assert_eq!(host.store(1, LENGTH), Outcome::Failed(ErrorKind::Io));
    mount.calm();
    assert_eq!((objects(mount.path()), unfinished(mount.path())), (Vec::new(), Vec::new()));
    host.is_stored(1, LENGTH);
    host.verify(1, LENGTH);
}

#[test]
fn files_cut_on_the_server_are_misses_and_are_stored_again() {
    let Some(mount) = mount() else { return };
    let mut host = Host::open(&quick(mount.path()));
    for length in [0, 100, 4096, 8192, 12_288] {
        host.is_stored(1, LENGTH);
        host.verify(1, LENGTH);
        // Past the mount, as another host of the server's would.
        fs::File::options().write(true).open(object_of(&mount.backing(), 1)).unwrap().set_len(length).unwrap();
        let outcome = host.load(1, LENGTH);
        assert!(matches!(outcome, Outcome::Failed(ErrorKind::Corrupt)), "cut to {length}: {outcome:?}");
        assert_eq!(objects(&mount.backing()), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_mount_whose_server_dies_fails_at_once_and_nothing_is_written_beside_it() {
    let Some(mut mount) = mount() else { return };
    let path = mount.path().to_owned();
    let mut host = Host::open(&quick(&path));
    (1..10).for_each(|number| host.is_stored(number, LENGTH));
    mount.freeze();
    let ops: Vec<_> = (1..10).map(|number| host.op(LOAD, number, LENGTH)).collect();
    assert!(host.fs.submit(&ops) == ops.len());
    // The threads that wait for it are told that it is gone.
    mount.end();
    host.until("all are answered", |host| host.fs.report().roots[0].in_flight == 0);
    let counters = host.fs.report().roots[0].counters;
    assert_eq!(counters.failed_loads + counters.absent_loads, ops.len() as u64);
    host.until("nothing hangs", nothing_hangs);
    assert!(matches!(host.store(20, LENGTH), Outcome::Failed(_)));
    assert!(matches!(host.load(1, LENGTH), Outcome::Failed(_) | Outcome::Absent));
    assert_eq!(files(&path), Vec::<PathBuf>::new(), "the folder below the mount stays empty");
}

#[test]
fn a_mount_that_is_read_only_at_first_says_so_is_read_and_later_written() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&quick(mount.path()));
    host.is_stored(1, LENGTH);
    drop(host);
    mount.harm("make,write,link,change,remove", &format!("fail {}", libc::EROFS));
    let mut host = Host::open(&quick(mount.path()));
    let why = |host: &Host| host.fs.report().roots[0].refuses_writes.clone();
    assert_eq!(why(&host).as_deref(), Some("Read-only file system (os error 30)"));
    assert_eq!(host.store(2, LENGTH), Outcome::Failed(ErrorKind::Unsupported));
    host.verify(1, LENGTH);
    mount.calm();
    let mut number = 1;
    host.until("it is over", |host| {
        number += 1;
        host.is_stored(number, LENGTH);
        why(host).is_none()
    });
}

#[test]
fn the_tier_conforms_on_a_mount_in_user_space() {
    let Some(mount) = mount() else { return };
    let config =
        FsConfig { fsync: Fsync::Data, capacity_bytes: Some(1 << 30), ..FsConfig::new(vec![mount.path().to_owned()]) };
    conformance::check(&mut Bed::new(config));
}

#[test]
fn a_slow_mount_serves_all_the_same() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&FsConfig { timeout: DEADLINE, ..quick(mount.path()) });
    mount.harm("all", "slow 5");
    let stores: Vec<_> = (0..20).map(|number| host.store_op(number, LENGTH)).collect();
    assert!(host.run(&stores).iter().all(|outcome| matches!(outcome, Outcome::Stored)));
    (0..20).for_each(|number| host.verify(number, LENGTH));
}
