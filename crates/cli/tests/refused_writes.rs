//! A shared store that refuses writes is shown as such, is read from all the same, and is written to when it can be.
//! One that refuses reads is shown too, until it answers them.

mod command;
#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod servers;
mod support;
#[path = "../../io/tests/fs/volume.rs"]
mod volume;

use std::fs;
use std::time::{Duration, Instant};

use command::run;
use forebay_rpc::proto::StoreInfo;
use rustix::mount::{MountFlags, mount_remount};
use rustix::process::Signal;
use servers::{Kind, Server};
use support::tiers::*;
use support::*;

struct Rig {
    tier: &'static str,
    daemon: Daemon,
    client: Client,
    worker: Worker,
    namespace: u32,
    next_seed: u64,
    place: Place,
}

impl Rig {
    /// What is stored before anything is refused can be read later.
    fn start(tier: &'static str, arguments: &[&str], before: u64) -> Rig {
        let place = Place::new();
        let (daemon, client, worker) = serving(&place, &[arguments, &["--http.address", "127.0.0.1:0"]].concat());
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..before);
        Rig { tier, daemon, client, worker, namespace, next_seed: 1_000, place }
    }

    fn told(&self) -> String {
        let store = tier(&self.client, self.tier).stores.into_iter().next().expect("a store");
        assert!(store.is_healthy, "it can be read: {store:?}");
        store.refuses_writes
    }

    /// So many blocks at a time.
    fn stores_until(&mut self, what: &str, count: u64, mut is_so: impl FnMut(&str) -> bool) {
        wait_until(what, || {
            store(&self.client, &self.worker, self.namespace, self.next_seed..self.next_seed + count);
            self.next_seed += count;
            is_so(&self.told())
        });
    }

    fn lines(&self, says: &str) -> usize {
        self.daemon.log().lines().filter(|line| line.contains(says)).count()
    }

    fn is_told(&mut self, why: &str) {
        assert_eq!(self.told(), "");
        self.stores_until("the refusals are told", 4, |told| told.contains(why));
        assert_eq!(tier(&self.client, self.tier).state, "serving");
        let ready = self.daemon.page("/readyz");
        assert!(ready.starts_with("HTTP/1.1 200 OK"), "{ready}");
        let line = ready.lines().find(|line| line.contains("without writes to")).unwrap_or_else(|| panic!("{ready}"));
        assert!(line.starts_with("warn") && line.contains(why), "{ready}");
        assert_eq!(self.can_be_used(), [true, false]);
        // The log is written beside; room may be made for one block meanwhile, and then it begins again.
        wait_until("the log says so", || (1..=3).contains(&self.lines("the shared store refuses writes")));
        for command in ["doctor", "inspect"] {
            let said = self.run(command);
            assert!(said.contains("refuses writes") && said.contains(why), "{said}");
            assert!(said.contains(" hint: make room"), "as the log says: {said}");
        }
    }

    fn run(&self, command: &str) -> String {
        let directory = self.place.sockets();
        run(&[command, "--socket.directory", directory.to_str().expect("a path in UTF-8")]).out
    }

    /// A volume of 32 MiB is not full before the stores that succeed have shown it.
    fn is_over(&mut self) {
        self.stores_until("they are over", 1, str::is_empty);
        wait_until("the log says so", || (1..=3).contains(&self.lines("the shared store takes writes again")));
        let ready = self.daemon.page("/readyz");
        assert!(!ready.contains("without"), "{ready}");
        assert_eq!(self.can_be_used(), [true, true]);
    }

    /// For loads, and for stores, as the metrics say.
    fn can_be_used(&self) -> [bool; 2] {
        let metrics = self.daemon.page("/metrics");
        ["load", "store"].map(|direction| {
            let is_of = |line: &&str| line.contains(&format!("direction=\"{direction}\""));
            let mut lines = metrics.lines().filter(|line| line.starts_with("forebay_shared_store_healthy"));
            lines.find(is_of).unwrap_or_else(|| panic!("{metrics}")).ends_with(" 1")
        })
    }

    fn is_read(&self, arguments: &[&str], seeds: std::ops::Range<u64>) {
        let place = Place::new();
        let (_daemon, client, worker) = serving(&place, arguments);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        is_served(&client, &worker, namespace, seeds);
    }
}

#[test]
fn a_server_without_memory_for_more_says_so_and_is_still_read() {
    let server = Server::start(Kind::Valkey);
    let url = server.url();
    let arguments = ["--tier.redis.urls", url.as_str()];
    let mut rig = Rig::start("redis", &arguments, 50);
    server.admin().must(&["CONFIG", "SET", "maxmemory", "1"]);
    rig.is_told("OOM");
    rig.is_read(&arguments, 0..50);
    server.admin().must(&["CONFIG", "SET", "maxmemory", "0"]);
    rig.is_over();
}

#[test]
fn a_server_that_refuses_reads_says_so_until_it_answers_them() {
    let server = Server::on_port(Kind::Valkey, &[]);
    server.admin().must(&["ACL", "SETUSER", "fb", "on", ">pw", "~forebay:*", "+@all"]);
    let url = server.tcp_url().replace("redis://", "redis://fb:pw@");
    let rig = Rig::start("redis", &["--tier.redis.urls", &url], 0);
    let mut seed = 5_000;
    let mut asked_until = |what: &str, is_so: &dyn Fn(&StoreInfo) -> bool| {
        wait_until(what, || {
            is_missed(&rig.client, rig.namespace, seed..seed + 4);
            seed += 4;
            is_so(&tier(&rig.client, "redis").stores[0])
        });
    };
    server.admin().must(&["ACL", "SETUSER", "fb", "-exists"]);
    asked_until("the refusals are told", &|store| store.is_healthy && store.refuses_reads.contains("NOPERM"));
    assert_eq!(rig.can_be_used(), [false, true]);
    let ready = rig.daemon.page("/readyz");
    assert!(ready.contains("without reads from") && ready.contains("NOPERM"), "{ready}");
    wait_until("the log says so", || rig.lines("the shared store refuses reads") == 1);
    for command in ["doctor", "inspect"] {
        let said = rig.run(command);
        assert!(said.contains("refuses reads") && said.contains("NOPERM"), "{said}");
    }
    server.admin().must(&["ACL", "SETUSER", "fb", "+exists"]);
    asked_until("they are over", &|store| store.refuses_reads.is_empty());
    wait_until("the log says so", || rig.lines("the shared store answers reads again") == 1);
    assert_eq!(rig.can_be_used(), [true, true]);
}

#[test]
fn a_directory_that_becomes_read_only_says_so_and_is_still_read() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let Some(volume) = volume::Volume::of_bytes(home, 64 << 20) else { return };
    let arguments = ["--tier.fs.directories", volume.path().to_str().expect("a path in UTF-8")];
    let mut rig = Rig::start("fs", &arguments, 50);
    mount_remount(volume.path(), MountFlags::RDONLY, "").expect("it becomes read-only");
    rig.is_told("Read-only file system");
    rig.is_read(&arguments, 0..50);
    mount_remount(volume.path(), MountFlags::empty(), "").expect("it can be written");
    rig.is_over();
}

/// With an error that is neither a right nor room that is missing.
#[test]
fn a_directory_whose_writes_fail_is_still_read() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let mount = fuse::Mount::start(home).inspect_err(|why| eprintln!("no filesystem in user space: {why}"));
    let Ok(mut mount) = mount else { return };
    let path = mount.path().display().to_string();
    let mut rig = Rig::start("fs", &["--tier.fs.directories", &path], 50);
    // The pool has no room for the first ones.
    store(&rig.client, &rig.worker, rig.namespace, 100..1_000);
    mount.harm("write", &format!("fail {}", rustix::io::Errno::SPIPE.raw_os_error()));
    wait_until("writes are given up for a while", || {
        store(&rig.client, &rig.worker, rig.namespace, rig.next_seed..rig.next_seed + 4);
        rig.next_seed += 4;
        assert_eq!(tier(&rig.client, "fs").state, "serving");
        !rig.daemon.page("/metrics").contains("forebay_tier_breaker_opened_total{tier=\"fs\"} 0")
    });
    is_served(&rig.client, &rig.worker, rig.namespace, 0..50);
    rig.stores_until("it is told", 4, |told| !told.is_empty());
    assert_eq!(rig.can_be_used(), [true, false]);
    mount.calm();
    rig.stores_until("writes are over", 1, str::is_empty);
}

/// With probes that succeed: files can be found and not read.
#[test]
fn a_directory_whose_reads_fail_says_so() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let mount = fuse::Mount::start(home).inspect_err(|why| eprintln!("no filesystem in user space: {why}"));
    let Ok(mut mount) = mount else { return };
    let path = mount.path().display().to_string();
    let rig = Rig::start("fs", &["--tier.fs.directories", &path], 50);
    // The pool has no room for the first ones.
    store(&rig.client, &rig.worker, rig.namespace, 100..1_000);
    mount.harm("read", &format!("fail {}", rustix::io::Errno::IO.raw_os_error()));
    let mut seed = 0;
    wait_until("it is told", || {
        is_missed(&rig.client, rig.namespace, seed..seed + 1);
        seed = (seed + 1) % 50;
        tier(&rig.client, "fs").stores[0].refuses_reads.contains("input/output errors")
    });
    wait_until("the log says so", || rig.lines("the shared store refuses reads") == 1);
    assert!(rig.daemon.page("/readyz").contains("input/output errors"));
    mount.calm();
    wait_until("reads are over", || {
        let reply = rig.client.lookup_settled(rig.namespace, &hashes(0..50));
        rig.client.release(reply.lease);
        let is_told = !tier(&rig.client, "fs").stores[0].refuses_reads.is_empty();
        !is_told && reply.groups[0].states == [1; 50]
    });
    is_served(&rig.client, &rig.worker, rig.namespace, 0..50);
}

/// As during a failover.
#[test]
fn a_server_that_lets_writes_hang_says_so_and_is_still_read() {
    let server = Server::start(Kind::Redis);
    let url = server.url();
    let arguments = ["--tier.redis.urls", url.as_str(), "--tier.redis.operation_timeout_ms", "1000"];
    let mut rig = Rig::start("redis", &arguments, 50);
    server.admin().must(&["CLIENT", "PAUSE", "3600000", "WRITE"]);
    rig.is_told("does not answer writes in time");
    rig.is_read(&arguments, 0..50);
    server.admin().must(&["CLIENT", "UNPAUSE"]);
    rig.is_over();
}

/// As when a host starts before somebody has mended a mount.
#[test]
fn a_directory_that_is_read_only_at_the_start_says_so_and_is_written_later() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let Some(volume) = volume::Volume::of_bytes(home, 64 << 20) else { return };
    let arguments = ["--tier.fs.directories", volume.path().to_str().expect("a path in UTF-8")];
    drop(Rig::start("fs", &arguments, 50));
    mount_remount(volume.path(), MountFlags::RDONLY, "").expect("it becomes read-only");
    let mut rig = Rig::start("fs", &arguments, 0);
    assert!(rig.told().contains("Read-only file system"), "{}", rig.told());
    assert_eq!(rig.can_be_used(), [true, false]);
    is_served(&rig.client, &rig.worker, rig.namespace, 0..50);
    mount_remount(volume.path(), MountFlags::empty(), "").expect("it can be written");
    rig.is_over();
}

#[test]
fn a_directory_on_a_volume_that_others_fill_says_so() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let Some(volume) = volume::Volume::of_bytes(home, 32 << 20) else { return };
    let (path, filler) = (volume.path().join("shared"), volume.path().join("filler"));
    fs::create_dir(&path).expect("a directory");
    let mut rig = Rig::start("fs", &["--tier.fs.directories", path.to_str().expect("a path in UTF-8")], 0);
    // Nothing of ours is there that could be evicted.
    assert!(fs::write(&filler, vec![0; 33 << 20]).is_err(), "the volume is full");
    rig.is_told("No space left on device");
    fs::remove_file(&filler).expect("it is removed");
    rig.is_over();
}

/// As by a sweeper, which evicts a few blocks whenever stores find no room.
#[test]
fn a_full_volume_on_which_some_room_is_made_again_and_again_says_so() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let Some(volume) = volume::Volume::of_bytes(home, 32 << 20) else { return };
    let (path, filler) = (volume.path().join("shared"), volume.path().join("filler"));
    fs::create_dir(&path).expect("a directory");
    let mut rig = Rig::start("fs", &["--tier.fs.directories", path.to_str().expect("a path in UTF-8")], 0);
    assert!(fs::write(&filler, vec![0; 33 << 20]).is_err(), "the volume is full");
    let rest = fs::File::options().write(true).open(&filler).expect("the filler");
    let mut is_relieved = Instant::now();
    rig.stores_until("the refusals are told", 4, |told| {
        if is_relieved.elapsed() > Duration::from_millis(500) {
            is_relieved = Instant::now();
            let length_bytes = rest.metadata().expect("its length").len();
            rest.set_len(length_bytes.saturating_sub(64 << 10)).expect("it is cut");
        }
        told.contains("No space left on device")
    });
    let counters = tier(&rig.client, "fs");
    assert!(counters.stored_blocks > 8, "some were taken between: {counters:?}");
    assert!(rig.daemon.page("/readyz").contains("without writes to"));
    for command in ["doctor", "inspect"] {
        assert!(rig.run(command).contains("refuses writes: No space left on device"), "{}", rig.run(command));
    }
    rest.set_len(0).expect("it is cut");
    rig.is_over();
}

#[test]
fn a_stop_does_not_wait_for_a_store_that_answers_nothing() {
    let server = Server::on_port(Kind::Redis, &[]);
    let (place, url) = (Place::new(), server.tcp_url());
    // Neither the drain nor an operation ends by itself before the test does.
    let long = ["--drain.deadline_seconds", "600", "--tier.redis.operation_timeout_ms", "600000"];
    let (daemon, client, worker) = serving(&place, &[&["--tier.redis.urls", &url][..], &long].concat());
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    server.signal(Signal::STOP);
    let slots = client.reserve(namespace, 4);
    (0..).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
    client.commit(namespace, &hashes(0..slots.len() as u64), &slots);
    wait_until("the store is asked to write", || tier(&client, "redis").storing_blocks > 0);
    daemon.terminate();
    let (is_success, log) = daemon.finish();
    server.signal(Signal::CONT);
    assert!(is_success && log.contains("the stop does not wait for it tier=\"redis\""), "{log}");
    assert!(log.contains("operations of the tier redis: "), "{log}");
}
