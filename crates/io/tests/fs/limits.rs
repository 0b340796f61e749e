//! What a directory must be, who may use it, and what happens when it is full or cannot be written.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Outcome, Tier};
use forebay_io::fs::{Fs, FsConfig};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::bed::*;

const TOLD: &str = "FOREBAY_TEST_FULL";
const LENGTH: u64 = 9000;

fn refused(config: &FsConfig) -> forebay_core::Error {
    let error = Fs::open(config, pool()).err().expect("it is refused");
    assert!(error.hint_text().is_some(), "{error} has a hint");
    error
}

#[test]
fn what_cannot_be_a_shared_directory_is_refused_and_left_alone() {
    let home = home();
    assert_eq!(refused(&config(&home.path().join("nowhere"))).kind(), ErrorKind::NotFound);
    fs::write(home.path().join("file"), "").unwrap();
    assert_eq!(refused(&config(&home.path().join("file"))).kind(), ErrorKind::Invalid);
    let error = refused(&config(home.path()));
    assert!(error.to_string().contains("other files"), "{error}");
    assert_eq!(files(home.path()).len(), 1, "nothing was written there");
}

#[test]
fn options_that_cannot_be_meant_are_refused() {
    let home = home();
    let path = home.path().to_owned();
    let good = config(&path);
    for wrong in [
        FsConfig { directories: Vec::new(), ..good.clone() },
        FsConfig { directories: vec![path.clone(), path.clone()], ..good.clone() },
        FsConfig { directories: vec![path.clone(), path.join(".")], ..good.clone() },
        FsConfig { directories: vec![path.clone(), path.join("../").join(path.file_name().unwrap())], ..good.clone() },
        FsConfig { streams: 0, ..good.clone() },
        FsConfig { buffers: 0, ..good.clone() },
        FsConfig { timeout: Duration::ZERO, ..good.clone() },
        FsConfig { capacity_bytes: Some(5), ..good.clone() },
        FsConfig { max_age: Some(Duration::ZERO), ..good.clone() },
    ] {
        assert_eq!(refused(&wrong).kind(), ErrorKind::Invalid, "{wrong:?}");
    }
    drop(Host::open(&good));
    let error = refused(&FsConfig { is_sharded: false, ..good });
    assert!(error.hint_text().unwrap().contains("true"), "{error}");
    let marker = path.join(".forebay/directory");
    fs::write(&marker, "forebay directory 2\nsomething new\n").unwrap();
    assert_eq!(refused(&config(&path)).kind(), ErrorKind::Corrupt);
}

/// Without the right to override permissions, as every user but one is.
pub fn give_up_privileges() {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).unwrap();
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn a_directory_that_cannot_be_written_is_read_and_says_why_until_it_can() {
    give_up_privileges();
    let home = home();
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    drop(host);
    let object = object_of(home.path(), 1);
    let own = home.path().join(".forebay");
    // New folders have the mode of the directory, which stays as it is.
    let folders: Vec<&Path> = object.ancestors().skip(1).take_while(|path| *path != home.path()).collect();
    let all = |mode| folders.iter().copied().chain([own.as_path()]).for_each(|path| chmod(path, mode));
    all(0o555);
    let mut host = Host::open(&config(home.path()));
    let why = |host: &Host| host.fs.report().roots[0].refuses_writes.clone();
    assert!(why(&host).expect("it cannot be written").contains("ermission"));
    assert_eq!(host.store(2, LENGTH), Outcome::Failed(ErrorKind::Unsupported));
    host.verify(1, LENGTH);
    all(0o700);
    let mut number = 1;
    host.until("it is over", |host| {
        number += 1;
        host.is_stored(number, LENGTH);
        why(host).is_none()
    });
}

/// As after somebody has copied a directory, or changed its owner.
#[test]
fn files_and_folders_that_cannot_be_read_are_told_until_they_can() {
    give_up_privileges();
    let home = home();
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    let file = object_of(home.path(), 1);
    let why = |host: &Host| host.fs.report().roots[0].refuses_reads.clone();
    let is_told = |host: &mut Host, op: OpKind| {
        let begun = Instant::now();
        while why(host).is_none() {
            let op = host.op(op, 1, LENGTH);
            assert_eq!(host.run(&[op]), [Outcome::Failed(ErrorKind::Unsupported)]);
            assert!(begun.elapsed() < DEADLINE, "it is not told");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(why(host).unwrap().contains("ermission"));
    };
    let folder = file.parent().unwrap();
    for (path, mode, op) in [(file.as_path(), 0o600, LOAD), (folder, 0o700, OpKind::Exists)] {
        chmod(path, 0);
        is_told(&mut host, op);
        chmod(path, mode);
        host.until("it is over", |host| {
            assert!(matches!(host.find(1), Outcome::Found));
            host.verify(1, LENGTH);
            why(host).is_none()
        });
    }
}

#[test]
fn a_host_told_to_read_only_writes_nothing() {
    let home = home();
    let only_read = FsConfig { read_only: true, ..config(home.path()) };
    assert_eq!(refused(&only_read).kind(), ErrorKind::NotFound, "an empty directory is not made by a reader");
    assert!(files(home.path()).is_empty());
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    drop(host);
    let before = files(home.path());
    let mut host = Host::open(&only_read);
    let capabilities = host.fs.capabilities();
    assert!(!capabilities.can_store && !capabilities.can_remove);
    reads_only(&mut host, home.path());
    // Not even what is damaged is taken away.
    File::options().write(true).open(object_of(home.path(), 1)).unwrap().set_len(5000).unwrap();
    assert_eq!(host.load(1, LENGTH), Outcome::Failed(ErrorKind::Corrupt));
    assert_eq!(files(home.path()), before);
}

fn reads_only(host: &mut Host, home: &Path) {
    let (store, remove) = (host.store_op(2, LENGTH), host.op(REMOVE, 1, 0));
    let refused = Outcome::Failed(ErrorKind::Unsupported);
    assert_eq!(host.run(&[store, remove]), [refused, refused]);
    host.verify(1, LENGTH);
    assert!(matches!(host.find(1), Outcome::Found));
    assert_eq!(objects(home).len(), 1);
}

/// The umask is that of the process, which other tests share: what is tested is that it plays no part.
#[test]
fn folders_and_files_have_the_permissions_of_the_directory_and_all_users_may_write_to_none() {
    for (mode, folders, files_have) in [(0o700, 0o700, 0o600), (0o2770, 0o2770, 0o660), (0o1777, 0o775, 0o664)] {
        let home = home();
        chmod(home.path(), mode);
        let mut host = Host::open(&config(home.path()));
        host.is_stored(1, LENGTH);
        let mode_of = |path: &Path| Some(fs::metadata(path).ok()?.permissions().mode() & 0o7777);
        // What the sweeper writes down may be gone by the time it is looked at.
        let modes: Vec<_> = files(home.path()).into_iter().filter_map(|file| Some((mode_of(&file)?, file))).collect();
        assert!(!modes.is_empty());
        for (mode, file) in modes {
            assert_eq!(mode, files_have, "{}", file.display());
            for folder in file.ancestors().skip(1).take_while(|folder| *folder != home.path()) {
                assert_eq!(mode_of(folder), Some(folders), "{}", folder.display());
            }
        }
    }
}

#[test]
fn another_user_finds_loads_stores_removes_and_sweeps_where_the_directory_lets_it() {
    let home = home();
    chmod(home.path(), 0o2770);
    let mut host = Host::open(&config(home.path()));
    (1..5).for_each(|number| host.is_stored(number, LENGTH));
    // Who is not root has no other user to become, and then stands for one that shares by group.
    if rustix::process::geteuid().is_root() {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
    }
    let mut other = Host::open(&config(home.path()));
    assert_eq!(other.fs.report().roots[0].refuses_writes, None);
    (1..5).for_each(|number| other.verify(number, LENGTH));
    (3..9).for_each(|number| other.is_stored(number, LENGTH));
    let remove = other.op(REMOVE, 2, 0);
    assert_eq!(other.run(&[remove]), [Outcome::Removed]);
    assert_eq!(host.find(2), Outcome::Absent);
    (3..9).for_each(|number| host.verify(number, LENGTH));
}

#[test]
fn a_user_of_no_group_only_reads_where_all_may_write() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("not shown: only root becomes another user");
    }
    let home = home();
    chmod(home.path(), 0o777);
    let mut host = Host::open(&config(home.path()));
    host.is_stored(1, LENGTH);
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_gid(rustix::process::Gid::from_raw(65_534)).unwrap();
    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
    reads_only(&mut Host::open(&config(home.path())), home.path());
}

#[test]
fn stores_in_a_directory_that_fills_up_on_this_disk() {
    let Ok(home) = std::env::var(TOLD) else { return };
    let home = Path::new(&home);
    let mut host = Host::open(&config(home));
    // The file may not grow beyond 40 KiB: writing stops in the middle, as on a full disk.
    let outcome = host.store(1, SLOT_BYTES);
    host.is_stored(2, LENGTH);
    host.verify(2, LENGTH);
    println!("{outcome:?} {} {}", unfinished(home).len(), objects(home).len());
}

/// The kernel's limit on the length of files stops a write as a full disk does, for any user and on any filesystem.
#[test]
fn a_store_without_room_fails_as_full_and_leaves_nothing() {
    let home = home();
    let program = std::env::current_exe().unwrap();
    let body = "limits::stores_in_a_directory_that_fills_up_on_this_disk";
    let limited = "trap '' XFSZ; ulimit -f 80; exec \"$0\" \"$@\"";
    let mut child = Command::new("sh")
        .args(["-c", limited])
        .arg(program)
        .args([body, "--exact", "--nocapture"])
        .env(TOLD, home.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok).collect();
    assert!(child.wait().unwrap().success(), "{lines:?}");
    assert!(lines.iter().any(|line| line.ends_with("Failed(Full) 0 1")), "{lines:?}");
}

#[test]
fn queues_and_buffers_have_their_limits() {
    let home = home();
    let limits = FsConfig { queued_loads: 4, queued_finds: 5, queued_stores: 6, ..config(home.path()) };
    let mut host = Host::open(&FsConfig { max_block_bytes: 10_000, ..limits });
    assert_eq!(host.load(1, 10_001), Outcome::Failed(ErrorKind::Invalid));
    assert_eq!(host.store(1, 10_001), Outcome::Failed(ErrorKind::Invalid));
    let stores: Vec<_> = (0..60).map(|number| host.store_op(number, 10_000)).collect();
    let (taken, threads) = (host.fs.submit(&stores), 3);
    assert!((6..=6 + threads + 40).contains(&taken) && taken < 60, "{taken} of 60 were taken");
    let mut completions = Vec::new();
    assert!(host.fs.drain(DEADLINE, &mut completions));
    assert_eq!(completions.len(), taken);
    let rest = host.run(&stores[taken..]);
    assert!(rest.iter().all(|outcome| matches!(outcome, Outcome::Stored)));
    let mixed: Vec<_> =
        (0..60).flat_map(|number| [host.op(LOAD, number, 10_000), host.op(OpKind::Exists, number, 0)]).collect();
    let outcomes = host.run(&mixed);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Loaded { .. } | Outcome::Found)));
    assert!(host.fs.report().roots[0].buffers <= 2);
}

#[test]
fn a_mount_that_went_away_is_not_written_beside() {
    let home = home();
    let path = home.path().join("mounted");
    fs::create_dir(&path).unwrap();
    let mut host = Host::open(&config(&path));
    host.is_stored(1, LENGTH);
    without_mount(&path, || {
        assert!(matches!(host.store(2, LENGTH), Outcome::Failed(_)));
        assert_eq!(host.load(1, LENGTH), Outcome::Absent);
    });
    host.is_stored(2, LENGTH);
    // A thread that has just read in the other directory may not have left it yet.
    host.until("block 1 is found again", |host| host.load(1, LENGTH) != Outcome::Absent);
    (1..3).for_each(|number| host.verify(number, LENGTH));
}
