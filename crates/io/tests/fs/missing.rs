//! Directories that are missing at the start while others are there.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::fs::{Fs, FsConfig};
use forebay_io::purge::Purging;

use crate::bed::*;
use crate::fuse::hanging::{answer, fifo};

const LENGTH: u64 = 9000;

fn both(there: &Path, missing: &Path) -> FsConfig {
    let directories = vec![missing.to_owned(), there.to_owned()];
    FsConfig { timeout: Duration::from_secs(3), directories, ..config(there) }
}

#[test]
fn a_directory_that_is_missing_is_done_without_and_taken_up_when_it_comes() {
    let home = home();
    let (there, missing) = (home.path().join("there"), home.path().join("missing"));
    fs::create_dir(&there).unwrap();
    let mut host = Host::open(&both(&there, &missing));
    let report = host.fs.report();
    assert_eq!(report.roots[0].health, Health::Sick(ErrorKind::NotFound));
    assert!(report.roots[0].missing.as_ref().unwrap().contains("cannot use the directory"));
    assert_eq!((&report.roots[1].path, &report.roots[1].missing), (&there, &None));
    assert_eq!(host.fs.health(), Health::Healthy);
    (0..40).for_each(|number| host.is_stored(number, LENGTH));
    (0..40).for_each(|number| host.verify(number, LENGTH));
    let purges = host.fs.places().into_iter().map(|place| {
        (place.empty)(&Purging::new(Default::default(), Instant::now() + DEADLINE)).map_err(|error| error.kind())
    });
    assert_eq!(purges.collect::<Vec<_>>(), [Ok(()), Err(ErrorKind::Unavailable)]);

    fs::create_dir(&missing).unwrap();
    host.until("it is taken up", |host| host.fs.report().roots[0].health == Health::Healthy);
    assert_eq!(host.fs.report().roots[0].path, missing, "in the order of the configuration");
    (100..140).for_each(|number| host.is_stored(number, LENGTH));
    (100..140).for_each(|number| host.verify(number, LENGTH));
    let stored = objects(&missing).len();
    assert!((5..35).contains(&stored), "{stored}");
    // What went to the other one meanwhile is where it is looked for, or a miss.
    let found = (0..40).filter(|number| matches!(host.load(*number, LENGTH), Outcome::Loaded { .. })).count();
    assert!((5..35).contains(&found), "{found}");
}

/// Somebody mounts the wrong one first.
#[test]
fn a_missing_directory_is_used_when_it_comes_after_another_that_is_used_already() {
    let home = home();
    let (there, missing) = (home.path().join("there"), home.path().join("missing"));
    fs::create_dir(&there).unwrap();
    let mut host = Host::open(&both(&there, &missing));
    std::os::unix::fs::symlink(&there, &missing).unwrap();
    let says = |host: &Host| host.fs.report().roots[0].missing.clone().unwrap_or_default();
    host.until("it is refused", |host| says(host).contains("two paths lead to the same directory"));
    fs::remove_file(&missing).and_then(|()| fs::create_dir(&missing)).unwrap();
    host.until("it is taken up", |host| host.fs.report().roots[0].health == Health::Healthy);
    (0..40).for_each(|number| host.is_stored(number, LENGTH));
    assert!(!objects(&missing).is_empty());
}

#[test]
fn a_directory_that_hangs_at_the_start_holds_up_no_other_for_longer_than_the_timeout() {
    let home = home();
    let (there, hanging) = (home.path().join("there"), home.path().join("hanging"));
    fs::create_dir(&there).unwrap();
    fs::create_dir_all(hanging.join(".forebay")).unwrap();
    let marker = hanging.join(".forebay/directory");
    fifo(&marker);
    let mut host = Host::open(&both(&there, &hanging));
    assert_eq!(host.fs.report().roots[0].health, Health::Sick(ErrorKind::Timeout));
    host.is_stored(1, LENGTH);
    host.verify(1, LENGTH);
    let begun = Instant::now();
    drop(host);
    assert!(begun.elapsed() < DEADLINE / 2, "closing does not wait for it");
    answer(&marker);
}

#[test]
fn without_any_directory_or_with_one_that_cannot_be_meant_there_is_no_tier() {
    let home = home();
    let (there, missing) = (home.path().join("there"), home.path().join("missing"));
    let error = Fs::open(&both(&there, &missing), pool()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    fs::create_dir(&there).unwrap();
    fs::write(&missing, "").unwrap();
    let error = Fs::open(&both(&there, &missing), pool()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid, "a file");
}
