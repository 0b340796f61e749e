//! A shared directory that somebody replaces, removes or unmounts under a daemon that uses it.

mod command;
mod support;

use std::fs;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use support::tiers::*;
use support::*;

fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn arguments(path: &Path) -> [&str; 4] {
    ["--tier.fs.directories", path.to_str().expect("a path in UTF-8"), "--http.address", "127.0.0.1:0"]
}

/// Why the directory is not used; empty while it is.
fn trouble(client: &Client) -> String {
    let store = tier(client, "fs").stores.into_iter().next().expect("a store");
    assert_eq!(store.is_healthy, store.trouble.is_empty(), "{store:?}");
    store.trouble
}

fn is_lost(place: &Place, daemon: &Daemon, client: &Client, path: &Path, why: &str) {
    wait_until("the directory is lost", || trouble(client).contains(why));
    assert!(trouble(client).contains(&path.display().to_string()), "{}", trouble(client));
    let metrics = daemon.page("/metrics");
    let healthy: Vec<&str> = metrics.lines().filter(|line| line.starts_with("forebay_shared_store_healthy")).collect();
    assert!(healthy.len() == 2 && healthy.iter().all(|line| line.ends_with(" 0")), "{healthy:?}");
    wait_until("the tier is not asked", || tier(client, "fs").state == "sick");
    let ready = daemon.page("/readyz");
    assert!(ready.contains("warn") && ready.contains(&path.display().to_string()), "{ready}");
    let hint = tier(client, "fs").stores.remove(0).hint;
    assert!(hint.contains("mount it"), "{hint}");
    wait_until("the log says so", || daemon.log().contains(&hint));
    let sockets = place.sockets();
    let judged = command::run(&["doctor", "--socket.directory", sockets.to_str().expect("UTF-8")]).out;
    assert!(judged.contains(&format!(" hint: {hint}\n")), "{judged}");
}

fn is_used_again(daemon: &Daemon, client: &Client) {
    wait_until("it is taken up", || trouble(client).is_empty());
    wait_until("the tier serves", || tier(client, "fs").state == "serving");
    let lines = |says: &str| daemon.log().lines().filter(|line| line.contains(says)).count();
    // The log is written beside.
    wait_until("the log says so", || lines("a missing shared directory appeared and is used now") > 0);
    assert_eq!(lines("a shared directory is lost"), 1, "{}", daemon.log());
    assert_eq!(lines("a missing shared directory appeared and is used now"), 1, "{}", daemon.log());
}

/// Blocks that are stored now are served from the directory to a host that has nothing else.
fn takes_blocks(place: &Place, path: &Path, daemon: Daemon, engine: (Client, Worker)) {
    let (client, worker) = engine;
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 100..150);
    lose_pool(place, daemon, (client, worker));
    let (_daemon, client, worker) = serving(place, &arguments(path));
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 100..150);
}

fn used(place: &Place, path: &Path) -> (Daemon, Client, Worker) {
    let (daemon, client, worker) = serving(place, &arguments(path));
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    (daemon, client, worker)
}

#[test]
fn a_directory_that_was_removed_and_made_again_is_used_again() {
    let (place, home) = (Place::new(), home());
    let path = home.path().join("shared");
    fs::create_dir(&path).expect("a directory");
    let (daemon, client, worker) = used(&place, &path);
    fs::remove_dir_all(&path).expect("it is removed");
    is_lost(&place, &daemon, &client, &path, "cannot use the directory");
    fs::create_dir(&path).expect("a directory");
    is_used_again(&daemon, &client);
    takes_blocks(&place, &path, daemon, (client, worker));
}

/// As when somebody empties it while a daemon stores blocks there: the daemon made folders again before it noticed.
#[test]
fn a_directory_that_lost_its_marker_is_used_again_with_the_blocks_that_are_left() {
    let (place, home, other) = (Place::new(), home(), Place::new());
    let path = home.path().join("shared");
    fs::create_dir(&path).expect("a directory");
    let (daemon, client, worker) = used(&place, &path);
    fs::remove_dir_all(path.join(".forebay")).expect("it is removed");
    wait_until("it is lost and taken up", || daemon.log().contains("a missing shared directory appeared"));
    is_used_again(&daemon, &client);
    {
        let (_daemon, client, worker) = serving(&other, &arguments(&path));
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        is_served(&client, &worker, namespace, 0..50);
    }
    // What is not Forebay's is not touched.
    fs::write(path.join("0".repeat(32)), "not a folder").expect("a file");
    fs::remove_dir_all(path.join(".forebay")).expect("it is removed");
    wait_until("it is lost", || trouble(&client).contains("holds other files"));
    fs::remove_file(path.join("0".repeat(32))).expect("it is removed");
    wait_until("it is taken up", || trouble(&client).is_empty());
    takes_blocks(&place, &path, daemon, (client, worker));
}

/// Nothing was under way there when it was lost.
#[test]
fn the_threads_of_a_lost_directory_end() {
    let (place, home) = (Place::new(), home());
    let [path, away] = ["shared", "away"].map(|name| home.path().join(name));
    fs::create_dir(&path).expect("a directory");
    let (daemon, client, _worker) = serving(&place, &[&arguments(&path)[..], &["--tier.fs.streams", "3"]].concat());
    let (threads, before) = (|| daemon.threads("forebay-fs").len(), 3);
    wait_until("it has its threads", || threads() == before);
    fs::rename(&path, &away).expect("it is moved");
    wait_until("it is lost", || !trouble(&client).is_empty());
    wait_until("its threads end", || threads() == 0);
    fs::rename(&away, &path).expect("it is moved back");
    wait_until("it is taken up", || trouble(&client).is_empty());
    // A thread takes its name when it first runs.
    wait_until("it has its threads again", || threads() == before);
}

#[test]
fn another_directory_of_ours_is_taken_in_place_of_the_lost_one() {
    let (place, home) = (Place::new(), home());
    let [path, away, other] = ["shared", "away", "other"].map(|name| home.path().join(name));
    for path in [&other, &path] {
        fs::create_dir(path).expect("a directory");
    }
    drop(serving(&place, &arguments(&other)));
    let (daemon, client, worker) = used(&place, &path);
    fs::rename(&path, &away).and_then(|()| fs::rename(&other, &path)).expect("it is replaced");
    wait_until("it is lost", || daemon.log().contains("another shared directory is in its place"));
    is_used_again(&daemon, &client);
    takes_blocks(&place, &path, daemon, (client, worker));
}

#[test]
fn a_directory_that_is_only_read_comes_back_with_its_blocks() {
    let (place, home) = (Place::new(), home());
    let [path, away] = ["shared", "away"].map(|name| home.path().join(name));
    fs::create_dir(&path).expect("a directory");
    let (daemon, client, worker) = used(&place, &path);
    lose_pool(&place, daemon, (client, worker));
    let arguments = [&arguments(&path)[..], &["--tier.fs.read_only", "true"]].concat();
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    fs::rename(&path, &away).expect("it is moved");
    wait_until("it is lost", || trouble_of_reader(&client).contains("cannot use the directory"));
    is_missed(&client, namespace, 0..10);
    fs::rename(&away, &path).expect("it is moved back");
    wait_until("it is taken up", || tier(&client, "fs").stores[0].is_healthy);
    wait_until("the tier serves", || tier(&client, "fs").state == "serving");
    is_served(&client, &worker, namespace, 10..50);
}

fn trouble_of_reader(client: &Client) -> String {
    tier(client, "fs").stores[0].trouble.clone()
}

/// The path is the mount point itself, and a bind mount has the device of what it hides.
#[test]
fn an_empty_mount_point_is_not_filled_and_what_is_mounted_there_next_is_used() {
    for is_bind in [false, true] {
        let (place, home) = (Place::new(), home());
        let [path, source] = ["shared", "source"].map(|name| home.path().join(name));
        [&path, &source].iter().for_each(|path| fs::create_dir(path).expect("a directory"));
        let mounted = || match is_bind {
            true => rustix::mount::mount_bind(&source, &path),
            false => mount("forebay-test", &path, "tmpfs", MountFlags::empty(), Some(c"size=64m")),
        };
        if let Err(error) = mounted() {
            eprintln!("not shown: no filesystem can be mounted here: {error}");
            return;
        }
        let (daemon, client, worker) = used(&place, &path);
        unmount(&path, UnmountFlags::DETACH).expect("it is unmounted");
        is_lost(&place, &daemon, &client, &path, "may be the mount point of a missing mount");
        daemon.says("restart the daemon to use the empty directory", 1);
        assert_eq!(fs::read_dir(&path).expect("a folder").count(), 0, "the mount point stays empty");
        mounted().expect("it is mounted again");
        let ours = Mounted(&path);
        is_used_again(&daemon, &client);
        takes_blocks(&place, &path, daemon, (client, worker));
        drop(ours);
        assert_eq!(fs::read_dir(&path).expect("a folder").count(), 0, "the mount point stays empty");
    }
}

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}
