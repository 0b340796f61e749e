//! Single files that hang, on any filesystem; `mounts` has whole mounts. A FIFO in place of a file makes `open` hang
//! for real until somebody writes to it; a lock on the usage file makes stores hang in the middle, with their bounce
//! buffer full.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::fs::{Fs, FsConfig};
use rustix::fs::{FlockOperation, flock};

use crate::bed::*;
use crate::fuse::hanging::{answer, fifo};

const LATE: Outcome = Outcome::Failed(ErrorKind::Timeout);
const LENGTH: u64 = 9000;

/// Puts a FIFO where the block's file was.
fn hang(home: &Path, number: u64) -> std::path::PathBuf {
    let path = object_of(home, number);
    fs::remove_file(&path).unwrap();
    fifo(&path);
    path
}

/// Longer than any operation takes on a busy machine when nothing hangs.
fn quick(home: &Path) -> FsConfig {
    FsConfig { timeout: Duration::from_secs(3), ..config(home) }
}

#[test]
fn a_load_that_hangs_is_answered_late_and_the_tier_goes_on_with_other_threads() {
    let home = home();
    let mut host = Host::open(&quick(home.path()));
    (1..5).for_each(|number| host.is_stored(number, LENGTH));
    let path = hang(home.path(), 1);
    host.pool.write(SLOT_BYTES, &[0x77; SLOT_BYTES as usize]);
    assert_eq!(host.load(1, LENGTH), LATE);
    for number in 2..5 {
        host.verify(number, LENGTH);
        assert!(matches!(host.find(number), Outcome::Found));
    }
    assert_eq!(host.fs.health(), Health::Healthy, "one of three threads hangs");
    assert_eq!(host.fs.report().roots[0].hanging_threads, 1);
    answer(&path);
    host.until("the thread comes back", |host| host.fs.report().roots[0].hanging_threads == 0);
    let mut slot = vec![0; SLOT_BYTES as usize];
    host.pool.read(SLOT_BYTES, &mut slot);
    assert!(slot.iter().all(|byte| *byte == 0x77), "nothing came to the slot");
}

#[test]
fn a_cancelled_load_is_answered_at_once_though_its_thread_hangs() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    let path = hang(home.path(), 1);
    let load = host.op(LOAD, 1, LENGTH);
    assert_eq!(host.fs.submit(&[load]), 1);
    host.fs.cancel(load.id);
    let mut completions = Vec::new();
    host.until("its completion", |host| {
        host.fs.poll(&mut completions);
        !completions.is_empty()
    });
    assert_eq!((completions.len(), completions[0].outcome), (1, LATE));
    answer(&path);
}

#[test]
fn a_store_that_hangs_keeps_its_bytes_in_its_buffer_and_leaves_lookups_a_way() {
    let home = home();
    let mut host = Host::open(&FsConfig { capacity_bytes: Some(16 << 20), ..quick(home.path()) });
    host.is_stored(1, LENGTH);
    // Every grant hangs; what is left of the first one is too small for these.
    let usage = File::options().read(true).write(true).open(home.path().join(".forebay/usage")).unwrap();
    flock(&usage, FlockOperation::LockExclusive).unwrap();
    let stores: Vec<_> = (10..20).map(|number| host.store_op(number, SLOT_BYTES)).collect();
    let outcomes = host.run(&stores);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{outcomes:?}");
    assert!(outcomes.contains(&LATE));
    assert_eq!(host.fs.health(), Health::Healthy, "the thread without stores is well");
    host.verify(1, LENGTH);
    assert!(matches!(host.find(1), Outcome::Found));
    // Their slots have other owners when the stores go on.
    (10..20).for_each(|number| host.pool.write(number * SLOT_BYTES, &[0xEE; SLOT_BYTES as usize]));
    flock(&usage, FlockOperation::Unlock).unwrap();
    host.until("the threads come back", |host| host.fs.report().roots[0].hanging_threads == 0);
    host.until("what hung was stored late", |_| objects(home.path()).len() > 1);
    let mut late = 0;
    for number in 10..20 {
        match host.load(number, SLOT_BYTES) {
            Outcome::Loaded { .. } => {
                host.holds(number, SLOT_BYTES);
                late += 1;
            }
            outcome => assert_eq!(outcome, Outcome::Absent),
        }
    }
    assert!(late > 0, "those that hung had their bytes already");
}

#[test]
fn opening_a_directory_that_hangs_fails_in_time() {
    let home = home();
    fs::create_dir(home.path().join(".forebay")).unwrap();
    let marker = home.path().join(".forebay/directory");
    fifo(&marker);
    let error = Fs::open(&quick(home.path()), pool()).err().expect("it is not opened");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.hint_text().unwrap().contains("mount"));
    answer(&marker);
}
