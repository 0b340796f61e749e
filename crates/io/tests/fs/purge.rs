//! Emptying directories of namespaces: what goes, what stays, what is counted, and directories that refuse or hang.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use forebay_core::tier::{Operation, Outcome};
use forebay_core::{BlockKey, Error, ErrorKind, NamespaceId};
use forebay_io::fs::{FsConfig, Fsync};
use forebay_io::purge::Purging;

use crate::bed::*;
use crate::fuse::hanging::mount;

const LENGTH: u64 = 9000;
const FILE_BYTES: u64 = 4096 + 12_288;
/// That of the bed's own blocks, and another one.
const OWN: NamespaceId = NamespaceId(9);
const OTHER: NamespaceId = NamespaceId(9 << 64);

fn purging(namespaces: &[NamespaceId]) -> Purging {
    Purging::new(namespaces.iter().copied().collect::<BTreeSet<_>>(), Instant::now() + DEADLINE)
}

/// What a purge of all directories came to: the first error, and how many blocks and values were removed.
fn empty(host: &Host, namespaces: &[NamespaceId]) -> (Result<(), Error>, u64, u64) {
    let (mut outcome, mut blocks, mut values) = (Ok(()), 0, 0);
    for place in host.fs.places() {
        let purging = purging(namespaces);
        outcome = outcome.and((place.empty)(&purging));
        (blocks, values) = (blocks + purging.blocks(), values + purging.values());
    }
    (outcome, blocks, values)
}

fn emptied(host: &Host, namespaces: &[NamespaceId]) -> (u64, u64) {
    let (outcome, blocks, values) = empty(host, namespaces);
    outcome.unwrap_or_else(|error| panic!("{error}"));
    (blocks, values)
}

fn refused(host: &Host, kind: ErrorKind) -> (String, u64) {
    let (outcome, blocks, _) = empty(host, &[OWN]);
    let error = outcome.unwrap_err();
    assert!(error.kind() == kind && error.hint_text().is_some(), "{error}");
    (error.to_string(), blocks)
}

fn store_other(host: &mut Host, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let op = host.store_op(number, LENGTH);
        let op = Operation { key: BlockKey { namespace: OTHER, ..op.key }, ..op };
        assert!(matches!(host.run(&[op])[0], Outcome::Stored));
    }
}

fn store_own(host: &mut Host, numbers: std::ops::Range<u64>) {
    numbers.for_each(|number| host.is_stored(number, LENGTH));
}

#[test]
fn one_namespace_goes_from_all_shards_of_all_directories_and_nothing_else() {
    for is_sharded in [true, false] {
        let (one, two) = (home(), home());
        let directories = vec![one.path().to_owned(), two.path().to_owned()];
        let mut host = Host::open(&FsConfig { directories, is_sharded, ..config(one.path()) });
        store_own(&mut host, 0..300);
        store_other(&mut host, 0..30);
        let block = object_of(one.path(), (10..16).find(|number| holds(one.path(), *number)).unwrap());
        let name = name_of(&block);
        let alike =
            [name.to_uppercase(), format!("{name}.old"), format!("{name}0"), "0001".into(), name.replace('-', "_")];
        let alike: Vec<_> = alike.iter().map(|name| block.with_file_name(name)).collect();
        alike.iter().for_each(|path| fs::write(path, "somebody's").unwrap());
        let own = one.path().join(OWN.to_string());
        fs::create_dir_all(own.join("notes")).unwrap();
        fs::write(own.join("notes").join(name), "somebody's").unwrap();
        assert_eq!(emptied(&host, &[OWN]), (300, 300));
        let left = |path: &Path| objects(path).len();
        assert_eq!(left(one.path()) + left(two.path()), 30 + alike.len() + 1);
        assert!(alike.iter().all(|path| path.exists()));
        assert_eq!(emptied(&host, &[OWN]), (0, 0));
        store_own(&mut host, 0..3);
        host.verify(1, LENGTH);
        assert_eq!(emptied(&host, &[OWN, OTHER]), (33, 33));
    }
}

fn holds(home: &Path, number: u64) -> bool {
    objects(home).iter().any(|file| name_of(file).ends_with(&format!("-{}", key(number).hash)))
}

#[test]
fn unfinished_files_go_if_nobody_writes_to_them_any_more() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    let folder = object_of(home.path(), 1).parent().unwrap().to_owned();
    let [old, young] = ["old", "young"].map(|host| folder.join(format!(".tmp-{host}-1-{:016x}", 1)));
    for (path, age) in [(&old, 120), (&young, 0)] {
        File::create(path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    assert_eq!(emptied(&host, &[OWN]), (1, 2));
    assert_eq!((old.exists(), young.exists()), (false, true));
}

#[test]
fn what_is_removed_makes_room_at_once() {
    let home = home();
    let mut host = Host::open(&FsConfig { capacity_bytes: Some(100 * FILE_BYTES), ..config(home.path()) });
    store_own(&mut host, 0..95);
    assert_eq!(emptied(&host, &[OWN]), (95, 95));
    // No walk has counted yet: the first one does so after ten seconds.
    let used_bytes = host.fs.report().roots[0].used_bytes;
    assert!(used_bytes.is_some_and(|used| used <= 2 * FILE_BYTES), "{:?}", host.fs.report());
    store_own(&mut host, 0..95);
}

#[test]
fn the_capacity_is_counted_right_while_others_sweep_and_store() {
    let home = home();
    let config = FsConfig {
        capacity_bytes: Some(400 * FILE_BYTES),
        sweep_interval: Duration::from_millis(10),
        grant_age: Duration::from_millis(200),
        ..config(home.path())
    };
    let (mut host, mut other) = (Host::open(&config), Host::open(&config));
    store_own(&mut host, 0..200);
    let place = host.fs.places().remove(0);
    let purging = purging(&[OWN]);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| (place.empty)(&purging));
        store_other(&mut other, 0..100);
        running.join().unwrap().unwrap();
    });
    assert_eq!((purging.blocks(), object_bytes(home.path())), (200, 100 * FILE_BYTES));
    drop(other);
    // What is granted and not spent is a 256th of the capacity, or one block. What this host saw last may be from
    // before the other one's last stores.
    let is_right = 100 * FILE_BYTES..=103 * FILE_BYTES;
    host.until("the count is right", |host| {
        host.fs.report().roots[0].used_bytes.is_some_and(|used| is_right.contains(&used))
    });
    store_own(&mut host, 200..480);
    assert!(object_bytes(home.path()) <= 400 * FILE_BYTES);
}

#[test]
fn a_directory_that_is_only_read_from_is_an_error_and_keeps_what_it_has() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    store_own(&mut host, 0..3);
    let reader = Host::open(&FsConfig { read_only: true, ..config(home.path()) });
    assert!(refused(&reader, ErrorKind::Unsupported).0.contains("configured as read-only"));
    assert_eq!(objects(home.path()).len(), 3);
}

#[test]
fn files_that_may_not_be_removed_are_counted_and_the_rest_goes() {
    let none = rustix::thread::CapabilitySet::empty();
    let none = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none).unwrap();
    let home = home();
    let mut host = Host::open(&config(home.path()));
    store_own(&mut host, 0..40);
    let folder = object_of(home.path(), 7).parent().unwrap().to_owned();
    let kept = objects(&folder).len() as u64;
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o555)).unwrap();
    let (says, blocks) = refused(&host, ErrorKind::Unsupported);
    assert!(says.contains(&format!("files=`{kept}`")) && says.contains("ermission"), "{says}");
    assert_eq!(blocks, 40 - kept);
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(emptied(&host, &[OWN]), (kept, kept));
}

#[test]
fn a_mount_that_went_away_is_not_called_empty() {
    let home = home();
    let path = home.path().join("mounted");
    fs::create_dir(&path).unwrap();
    let mut host = Host::open(&config(&path));
    host.is_stored(1, LENGTH);
    without_mount(&path, || drop(refused(&host, ErrorKind::Io)));
    assert_eq!(emptied(&host, &[OWN]), (1, 1));
}

#[test]
fn a_mount_that_goes_away_in_the_middle_is_not_called_empty() {
    let home = home();
    let path = home.path().join("mounted");
    fs::create_dir(&path).unwrap();
    let mut host = Host::open(&config(&path));
    store_own(&mut host, 0..400);
    store_other(&mut host, 0..30);
    let (place, purging) = (host.fs.places().remove(0), purging(&[OWN, OTHER]));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| (place.empty)(&purging));
        while purging.values() == 0 {
            std::thread::yield_now();
        }
        without_mount(&path, || {
            let error = running.join().unwrap().unwrap_err();
            assert!(
                error.kind() == ErrorKind::NotFound && error.hint_text().unwrap().contains("purge again"),
                "{error}"
            );
        });
    });
    assert_eq!(emptied(&host, &[OWN, OTHER]), (430 - purging.blocks(), 430 - purging.values()));
}

#[test]
fn another_directory_in_its_place_is_not_emptied_instead() {
    let home = home();
    let [path, other, away] = ["one", "other", "away"].map(|name| home.path().join(name));
    [&path, &other].into_iter().for_each(|path| fs::create_dir(path).unwrap());
    let (mut host, mut others) = (Host::open(&config(&path)), Host::open(&config(&other)));
    [&mut host, &mut others].into_iter().for_each(|host| host.is_stored(1, LENGTH));
    fs::rename(&path, &away).and_then(|()| fs::rename(&other, &path)).unwrap();
    assert!(refused(&host, ErrorKind::NotFound).0.contains("another shared directory"));
    assert_eq!((objects(&path).len(), objects(&away).len()), (1, 1));
}

#[test]
fn a_mount_that_fails_or_turns_read_only_is_an_error() {
    let Some(mut mount) = mount() else { return };
    let mut host = Host::open(&config(mount.path()));
    store_own(&mut host, 0..20);
    for (ops, errno, kind) in [
        ("remove", libc::EROFS, ErrorKind::Unsupported),
        ("remove", libc::EIO, ErrorKind::Io),
        ("remove", libc::ESTALE, ErrorKind::Io),
        ("list", libc::EIO, ErrorKind::Io),
    ] {
        mount.harm(ops, &format!("fail {errno}"));
        assert_eq!(refused(&host, kind).1, 0, "{ops} {errno}");
        mount.calm();
        assert_eq!(objects(&mount.backing()).len(), 20);
    }
    assert_eq!(emptied(&host, &[OWN]), (20, 20));
}

/// The host has given the store up, and the mount may answer again.
#[test]
fn a_store_that_hangs_does_not_come_after_a_purge_that_succeeded() {
    let Some(mut mount) = mount() else { return };
    let timeout = Duration::from_millis(500);
    let mut host = Host::open(&FsConfig { fsync: Fsync::Data, timeout, ..config(mount.path()) });
    mount.harm("sync", "hang");
    assert_eq!(host.store(1, LENGTH), Outcome::Failed(ErrorKind::Timeout));
    assert!(refused(&host, ErrorKind::Timeout).0.contains("have not ended"));
    assert_eq!(emptied(&host, &[OTHER]), (0, 0), "no other namespace waits for it");
    mount.calm();
    let (blocks, _) = emptied(&host, &[OWN]);
    assert!(blocks <= 1 && objects(&mount.backing()).is_empty());
}

#[test]
fn a_purge_that_is_stopped_in_the_middle_leaves_the_rest_to_the_next() {
    let home = home();
    let mut host = Host::open(&config(home.path()));
    store_own(&mut host, 0..400);
    let (place, purging) = (host.fs.places().remove(0), purging(&[OWN]));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| (place.empty)(&purging));
        while purging.values() == 0 {
            std::thread::yield_now();
        }
        purging.stop();
        assert_eq!(running.join().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    });
    let left = objects(home.path()).len() as u64;
    assert!(left > 0 && left == 400 - purging.blocks(), "{left} are left");
    assert_eq!(emptied(&host, &[OWN]), (left, left));
}
