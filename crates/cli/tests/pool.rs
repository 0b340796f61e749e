//! `forebay pool remove`: a pool that a killed daemon left, on a mount or not, and what is none of its business.

mod command;
mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use command::{Answer, run};
use support::{Daemon, Place, engine};

const CAPACITY: [&str; 2] = ["--pool.capacity_bytes", "64MiB"];

fn remove(directory: &Path) -> Answer {
    run(&["pool", "remove", directory.to_str().expect("a path in UTF-8")])
}

/// For a start that is refused.
fn serve(place: &Place, flags: &[&str]) -> Answer {
    let [pool, sockets] = [place.pool(), place.sockets()].map(|path| path.display().to_string());
    let places = ["--pool.directory", &pool, "--socket.directory", &sockets];
    run(&[&["serve", "--http.address", "off"], &places[..], flags].concat())
}

fn is_mounted(below: &Path) -> bool {
    fs::read_to_string("/proc/self/mountinfo").expect("the mounts").contains(below.to_str().expect("UTF-8"))
}

#[test]
fn the_pool_of_a_killed_daemon_goes_with_its_mount_and_its_directory() {
    for huge_pages in ["auto", "off"] {
        let place = Place::new();
        let flags = [&CAPACITY[..], &["--pool.huge_pages", huge_pages]].concat();
        Daemon::start(&place, &flags).kill();
        assert!(place.pool().is_dir(), "a killed daemon leaves its pool");
        let answer = remove(&place.pool());
        let expected = format!("the pool in `{}` is removed\n", place.pool().display());
        assert_eq!((answer.code, answer.out, answer.err), (0, expected, String::new()));
        assert!(!place.pool().exists() && !is_mounted(&place.pool()));
        remove(&place.pool()).assert_refused(1, "there is no pool in");
    }
}

/// A pool's files have common names, and whoever types the wrong directory has such files.
#[test]
fn files_that_no_pool_made_are_left_alone() {
    for name in ["data", "table", "generation", "birth", "namespace", "purge", "data.replaced"] {
        let place = Place::new();
        fs::create_dir(place.pool()).expect("a directory");
        let file = place.pool().join(name);
        fs::write(&file, "somebody's work").expect("a file");
        for refused in [remove(&place.pool()), serve(&place, &CAPACITY)] {
            refused.assert_refused(1, "it has a file that Forebay did not make");
            assert!(refused.err.contains("hint: name another directory, or move the file away"), "{refused:?}");
            assert_eq!(fs::read_to_string(&file).expect("the file stays"), "somebody's work");
        }
    }
}

/// The pool's mount would hide it, or its removal destroy it.
#[test]
fn what_is_at_the_place_of_the_mount_stays() {
    type Put = fn(&Place, &Path) -> bool;
    let cases: [(&str, Put); 3] = [
        ("is a symbolic link", |place, point| {
            let target = place.log().with_file_name("target");
            fs::create_dir(&target).expect("a directory");
            std::os::unix::fs::symlink(target, point).is_ok()
        }),
        ("it has a file that Forebay did not make", |_, point| fs::create_dir(point).is_ok()),
        ("it has a mount that Forebay did not make", |_, point| {
            fs::create_dir(point).expect("a directory");
            let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "mode=0755", "mine"]).arg(point).output();
            mounted.is_ok_and(|mounted| mounted.status.success())
        }),
    ];
    for (expected, put) in cases {
        let place = Place::new();
        let point = place.pool().join("mnt");
        fs::create_dir(place.pool()).expect("a directory");
        if !put(&place, &point) {
            eprintln!("skipped: nothing can be mounted here");
            continue;
        }
        let file = point.join("report");
        fs::write(&file, "precious").expect("a file");
        let refused = [remove(&place.pool()), serve(&place, &CAPACITY)];
        let stays = fs::read_to_string(&file);
        // A place is not left with a mount in it; where the test mounted nothing, this fails.
        let _ = Command::new("umount").arg(&point).output();
        for refused in refused {
            refused.assert_refused(1, expected);
        }
        assert_eq!(stays.expect("the file stays"), "precious");
        assert!(!is_mounted(place.log().parent().expect("a directory")), "{expected}");
    }
}

#[test]
fn a_pool_in_use_stays() {
    let place = Place::new();
    let mut daemon = Daemon::start(&place, &CAPACITY);
    let refused = remove(&place.pool());
    assert!(refused.err.starts_with("error: a daemon is using this pool (path="), "{refused:?}");
    assert!(refused.err.contains("hint: stop that daemon, and repeat the command"), "{refused:?}");
    assert!(daemon.is_running() && place.pool().is_dir());
}

#[test]
fn a_pool_that_engines_map_stays_and_names_them_though_its_daemon_is_gone() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &CAPACITY);
    let (client, worker) = engine(&place, "a", 20_000);
    daemon.kill();
    let refused = remove(&place.pool());
    refused.assert_refused(1, "cannot remove a pool that workers map");
    assert!(refused.err.contains("hint: stop the engines") && !refused.err.contains("daemon"), "{refused:?}");
    drop((client, worker));
    assert_eq!(remove(&place.pool()).code, 0);
}

#[test]
fn a_refused_start_leaves_no_directory_and_no_mount() {
    let place = Place::new();
    for huge_pages in ["auto", "off"] {
        let refused = serve(&place, &["--pool.capacity_bytes", "15TiB", "--pool.huge_pages", huge_pages]);
        refused.assert_refused(1, "cannot allocate 15.2 TiB for the pool");
        assert!(!place.pool().exists() && !is_mounted(&place.pool()), "{huge_pages}");
    }
}

/// The kernel closes the files of a killed process a moment later, and an operator's shell may stand in the mount.
#[test]
fn a_mount_that_somebody_uses_is_waited_for_and_then_named() {
    let place = Place::new();
    Daemon::start(&place, &CAPACITY).kill();
    let mount = place.pool().join("mnt");
    assert!(is_mounted(&mount), "the pool is on a mount of its own");
    let opened = fs::File::open(&mount).expect("the mount");
    let refused = remove(&place.pool());
    refused.assert_refused(1, "a process has a file or a directory open there");
    assert!(refused.err.contains("hint: "), "{refused:?}");
    let closing = thread::spawn(move || {
        thread::sleep(Duration::from_millis(500));
        drop(opened);
    });
    let answer = remove(&place.pool());
    assert_eq!((answer.code, answer.err), (0, String::new()));
    closing.join().expect("a file is closed");
    assert!(!place.pool().exists() && !is_mounted(&place.pool()));
}

#[test]
fn what_is_no_pool_stays_and_so_do_other_files() {
    let place = Place::new();
    remove(&place.pool()).assert_refused(1, "there is no pool in");
    assert!(!place.pool().exists(), "looking makes no directory");
    fs::create_dir(place.pool()).expect("a directory");
    remove(&place.pool()).assert_refused(1, "there is no pool in");
    assert!(place.pool().is_dir());

    Daemon::start(&place, &[&CAPACITY[..], &["--pool.huge_pages", "off"]].concat()).kill();
    let other = place.pool().join("notes");
    fs::write(&other, "mine").expect("a file");
    let answer = remove(&place.pool());
    assert!(
        answer.code == 0 && answer.out.ends_with("the directory stays, since it holds other files\n"),
        "{answer:?}"
    );
    assert_eq!(fs::read_to_string(&other).expect("it is there"), "mine");
}
