//! Somebody removes the daemon's own files, or fills the filesystem of its pool, while it runs.

mod command;
mod support;

use std::fs;

use support::*;

const HTTP: [&str; 4] = ["--http.address", "127.0.0.1:0", "--pool.capacity_bytes", "16MiB"];

/// The line of `/readyz` that begins with `name`.
fn line(daemon: &Daemon, name: &str) -> String {
    let page = daemon.page("/readyz");
    page.lines()
        .find(|line| line.split_whitespace().any(|word| word.trim_end_matches(':') == name))
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn a_daemon_whose_sockets_were_removed_is_not_ready_and_says_so_once() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &HTTP);
    assert!(daemon.page("/readyz").contains("200 OK"));
    fs::remove_dir_all(place.sockets()).unwrap();
    wait_until("it is not ready", || daemon.page("/readyz").contains("503"));
    assert!(line(&daemon, "sockets").contains("restart the daemon"), "{}", daemon.page("/readyz"));
    assert!(daemon.page("/livez").contains("200 OK"), "a restart is the operator's to choose");
    wait_until("the log says so", || daemon.log().contains("a socket was removed or replaced"));
    assert_eq!(daemon.log().matches("a socket was removed or replaced").count(), 1, "{}", daemon.log());
}

#[test]
fn a_daemon_whose_pool_was_removed_serves_on_and_says_so() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[&HTTP[..], &["--pool.huge_pages", "off"]].concat());
    let (data, away) = (place.pool().join("data"), place.pool().join("away"));
    wait_until("the pool is populated", || !line(&daemon, "pool").contains("warn"));
    fs::rename(&data, &away).unwrap();
    wait_until("it says so", || line(&daemon, "pool").contains("the pool's file was removed"));
    let page = daemon.page("/readyz");
    assert!(page.contains("200 OK") && line(&daemon, "pool").contains("warn"), "{page}");
    fs::rename(&away, &data).unwrap();
    wait_until("it is well again", || line(&daemon, "pool").contains("populated"));
}

#[test]
fn a_daemon_whose_disk_was_removed_serves_on_and_says_so() {
    let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let (disk, away) = (home.path().join("disk"), home.path().join("away"));
    let path = disk.to_str().expect("a path in UTF-8");
    let daemon =
        Daemon::start(&place, &[&HTTP[..], &["--tier.ssd.disks", path, "--tier.ssd.capacity_bytes", "64MiB"]].concat());
    wait_until("the disk serves", || line(&daemon, "ssd").contains("serving"));
    fs::rename(&disk, &away).unwrap();
    wait_until("it says so", || line(&daemon, "disks").contains("a disk's file was removed or replaced"));
    let page = daemon.page("/readyz");
    assert!(page.contains("200 OK") && line(&daemon, "disks").contains("warn"), "{page}");
    assert_eq!(daemon.log().matches("a disk's file was removed or replaced").count(), 1, "{}", daemon.log());
    let judged = || {
        let sockets = place.sockets();
        command::run(&["doctor", "--socket.directory", sockets.to_str().expect("a path in UTF-8")]).out
    };
    let said = judged();
    assert!(said.contains("warn  files") && said.contains(path) && said.contains("hint: put the file back"), "{said}");
    fs::rename(&away, &disk).unwrap();
    wait_until("it is well again", || line(&daemon, "disks").is_empty());
    assert!(!judged().contains("warn  files"));
}
