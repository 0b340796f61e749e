//! Links that others who may write to the directory put in place of folders and files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use forebay_core::tier::Outcome;
use forebay_core::{ErrorKind, NamespaceId};
use forebay_io::fs::{Fs, FsConfig};
use forebay_io::purge::Purging;

use crate::bed::*;

const LENGTH: u64 = 9000;

/// Every store asks for a grant.
fn small(home: &Path) -> FsConfig {
    FsConfig { capacity_bytes: Some(2 * MIB), ..config(home) }
}

/// Moves what is called so to `theirs`, and leaves a link.
fn replace(name: &Path, theirs: &Path) {
    fs::rename(name, theirs).unwrap();
    symlink(theirs, name).unwrap();
}

#[test]
fn a_link_in_place_of_a_folder_leads_no_store_load_removal_or_purge_out_of_the_directory() {
    for depth in 1..4 {
        let (home, elsewhere) = (home(), home());
        let mut host = Host::open(&small(home.path()));
        (1..3).for_each(|number| host.is_stored(number, LENGTH));
        let theirs = elsewhere.path().join("theirs");
        replace(object_of(home.path(), 1).ancestors().nth(depth).unwrap(), &theirs);
        let before = files(&theirs);
        assert!(matches!(host.load(1, LENGTH), Outcome::Failed(_)), "{depth}");
        let remove = host.op(REMOVE, 1, 0);
        assert!(matches!(host.run(&[remove])[0], Outcome::Failed(_)), "{depth}");
        fs::remove_file(&before[0]).unwrap();
        assert!(matches!(host.store(1, LENGTH), Outcome::Failed(_)), "{depth}");
        let purging = Purging::new([NamespaceId(9)].into(), Instant::now() + DEADLINE);
        let purged = (host.fs.places().remove(0).empty)(&purging);
        assert_eq!(purged.is_err(), depth == 3, "a link among folders is somebody else's: {depth}");
        assert_eq!(files(&theirs), before[1..], "{depth}");
    }
}

#[test]
fn a_link_in_place_of_a_folder_leads_no_sweeper_out_of_the_directory() {
    let (home, elsewhere) = (home(), home());
    let old = Some(Duration::from_secs(3600));
    let brisk = FsConfig {
        sweep_interval: Duration::from_millis(10),
        grant_age: Duration::from_millis(100),
        ..small(home.path())
    };
    let mut host = Host::open(&FsConfig { max_age: old, orphan_age: Duration::ZERO, ..brisk });
    host.is_stored(1, LENGTH);
    let (theirs, object) = (elsewhere.path().join("theirs"), object_of(home.path(), 1));
    replace(object.parent().unwrap(), &theirs);
    let block = &files(&theirs)[0];
    fs::File::open(block).unwrap().set_modified(SystemTime::now() - Duration::from_secs(9000)).unwrap();
    let before = host.fs.report().roots[0].counters.sweeps;
    host.until("two more walks", |host| host.fs.report().roots[0].counters.sweeps >= before + 2);
    assert!(block.exists());
}

#[test]
fn a_link_in_place_of_a_control_file_lets_nothing_be_written_elsewhere() {
    for name in [".forebay", ".forebay/usage"] {
        let (home, elsewhere) = (home(), home());
        let mut host = Host::open(&small(home.path()));
        host.is_stored(1, LENGTH);
        let theirs = elsewhere.path().join("theirs");
        replace(&home.path().join(name), &theirs);
        let contents = || files(elsewhere.path()).iter().map(|file| fs::read(file).unwrap()).collect::<Vec<_>>();
        let before = contents();
        assert_eq!(host.store(2, LENGTH), Outcome::Failed(ErrorKind::Io), "{name}");
        assert_eq!(contents(), before, "{name}");
    }
}

#[test]
fn a_link_in_place_of_the_marker_is_not_followed() {
    let (home, elsewhere) = (home(), home());
    drop(Host::open(&small(home.path())));
    replace(&home.path().join(".forebay/directory"), &elsewhere.path().join("theirs"));
    assert_eq!(Fs::open(&small(home.path()), pool()).err().unwrap().kind(), ErrorKind::Io);
}
