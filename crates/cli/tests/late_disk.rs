//! The SSD tier behind the shipped daemon, with disks that are missing or hang when it starts, and come later.
//!
//! A disk that hangs is a file on a filesystem in user space. Where there is no FUSE, or no right to mount, the tests
//! say so; what they claim of hung disks is then left to those of disks that are missing.

mod command;
#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
mod support;

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_rpc::proto::*;
use fuse::Mount;
use support::tiers::{self, BYTES, is_served, store};
use support::*;

const DISK_BYTES: u64 = 64 << 20;
/// The daemon calls a disk silent that has not answered for so long.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Of the drain, in seconds.
const DRAIN: &str = "2";
/// The end of a process, on a machine that is busy with other tests.
const SLACK: Duration = Duration::from_secs(5);

fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// A mount with a disk's file in it. None where there is no FUSE.
fn mount() -> Option<(Mount, PathBuf)> {
    let mount = Mount::start(home()).inspect_err(|why| eprintln!("no filesystem in user space: {why}")).ok()?;
    // The mount has no `fallocate`, so the file has its length before.
    File::create(mount.backing().join("disk")).and_then(|disk| disk.set_len(DISK_BYTES)).expect("a file");
    let path = mount.path().join("disk");
    Some((mount, path))
}

fn start(place: &Place, disks: &[&Path], more: &[&str]) -> Daemon {
    let disks = format!("{disks:?}");
    let tier = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"];
    let rest = ["--http.address", "127.0.0.1:0", "--drain.deadline_seconds", DRAIN];
    let capacity = ["--pool.capacity_bytes", "16MiB"];
    let capacity = if more.contains(&capacity[0]) { &[][..] } else { &capacity };
    Daemon::start(place, &[&tier[..], &rest, capacity, more].concat())
}

/// A daemon on these disks, and an engine of it.
struct Rig {
    daemon: Daemon,
    client: Client,
    worker: Worker,
    namespace: u32,
}

/// What the log says when a purge has ended that somebody was told of as not ended.
const ENDED: &str = "all purges that had not ended have ended now";
/// A disk whose file is missing is waited for.
const NO_NEW_DISK: [&str; 2] = ["--tier.ssd.create", "false"];

impl Rig {
    /// Whose tier serves.
    fn serving(place: &Place, disks: &[&Path], more: &[&str]) -> Rig {
        Rig::in_state("serving", place, disks, more)
    }

    fn in_state(state: &str, place: &Place, disks: &[&Path], more: &[&str]) -> Rig {
        let daemon = start(place, disks, more);
        let (client, worker) = engine(place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        let rig = Rig { daemon, client, worker, namespace };
        wait_until(state, || rig.tier().state == state);
        rig
    }

    fn tier(&self) -> TierInfo {
        tiers::tier(&self.client, "ssd")
    }

    fn blocks_on(&self, disk: usize) -> u64 {
        self.tier().disks[disk].blocks
    }

    fn trouble(&self, disk: usize) -> String {
        self.tier().disks[disk].trouble.clone()
    }

    fn is_taken(&self, disk: usize) {
        wait_until("the disk is taken", || self.trouble(disk).is_empty());
    }

    fn store(&self, seeds: Range<u64>) {
        store(&self.client, &self.worker, self.namespace, seeds);
    }

    fn is_served(&self, seeds: Range<u64>) {
        is_served(&self.client, &self.worker, self.namespace, seeds);
    }

    /// The misses among these blocks, each asked for alone; whatever comes is whole.
    fn misses(&self, seeds: Range<u64>) -> Vec<u64> {
        let is_miss = |seed: &u64| {
            let reply = self.client.lookup_settled(self.namespace, &hashes(*seed..seed + 1));
            let slots = &reply.groups[0].slots();
            let is_whole = |slot: &u32| self.worker.read(*slot) == pattern(*seed, BYTES);
            assert!(slots.iter().all(is_whole), "block {seed} is another");
            self.client.release(reply.lease);
            slots.is_empty()
        };
        seeds.filter(is_miss).collect()
    }

    /// Of the namespace, from all disks.
    fn purges(&self) {
        let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
        call!(self.client, purge, request).expect("a purge");
        assert_eq!(self.tier().disks.iter().map(|disk| disk.blocks).sum::<u64>(), 0);
    }

    /// Stores 200 blocks, then purges them while the first of two disks is `away`. The pool is lost before and after.
    fn purges_without_the_first(self, place: &Place, disks: &[&Path; 2], away: &Path) {
        self.store(0..200);
        self.loses_pool(place);
        fs::rename(disks[0], away).expect("ours");
        let rig = Rig::serving(place, disks, &NO_NEW_DISK);
        let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
        let told = call!(rig.client, purge, request).expect_err("a disk is missing");
        assert!(told.message().contains("still on a tier"), "{told:?}");
        rig.loses_pool(place);
    }

    fn ends_in_time(self) {
        drop((self.client, self.worker));
        ends_in_time(self.daemon);
    }

    /// Until no namespace is being purged.
    fn waits_for_purges(&self) {
        wait_until("the purge is over", || self.tier().purge.is_none_or(|purge| purge.namespaces == 0));
    }

    fn dies(self) {
        drop((self.client, self.worker));
        self.daemon.kill();
    }

    /// What comes back from now on comes from the disks.
    fn loses_pool(self, place: &Place) {
        tiers::lose_pool(place, self.daemon, (self.client, self.worker));
    }
}

/// From the first look at the tier's disks until it serves, as the log says.
fn opened_in(daemon: &Daemon) -> Duration {
    daemon.says("the tier is open", 1);
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("the tier is open")).expect("it serves");
    let ms = line.split("ms=").nth(1).and_then(|ms| ms.trim().parse().ok());
    Duration::from_millis(ms.expect("a number"))
}

/// A signal ends the process, with its pool whole, whatever its disks do.
fn ends_in_time(daemon: Daemon) {
    let begun = Instant::now();
    daemon.terminate();
    let (is_success, log) = daemon.finish();
    let limit = Duration::from_secs(DRAIN.parse().expect("seconds")) + SLACK;
    assert!(is_success && log.contains("drained") && begun.elapsed() < limit, "{:?}: {log}", begun.elapsed());
}

fn says_everywhere(place: &Place, daemon: &Daemon, disk: &Path, why: &str) {
    let disk = disk.to_str().expect("UTF-8");
    // The log is written beside.
    let warning = format!("a disk is missing; the tier serves without it disk=\"{disk}\"");
    let warnings = || daemon.log().lines().filter(|line| line.contains(&warning)).count();
    wait_until("the log says so", || warnings() > 0);
    assert_eq!(warnings(), 1, "{}", daemon.log());
    let log = daemon.log();
    let told = log.lines().find(|line| line.contains(&warning)).and_then(|line| line.split("hint=\"").nth(1));
    let hint = told.and_then(|told| told.split('"').next()).unwrap_or_else(|| panic!("{log}"));
    let ready = daemon.page("/readyz");
    assert!(ready.contains(&format!("without `{disk}`")) && ready.contains(why) && ready.contains("200 OK"), "{ready}");
    let metrics = daemon.page("/metrics");
    for direction in ["load", "store"] {
        let line = format!("forebay_disk_healthy{{tier=\"ssd\",disk=\"{disk}\",direction=\"{direction}\"}} 0");
        assert!(metrics.contains(&line), "{metrics}");
    }
    let sockets = place.sockets();
    let at = ["--socket.directory", sockets.to_str().expect("UTF-8")];
    let inspected = command::run(&[&["inspect"][..], &at].concat()).out;
    assert!(inspected.contains(&format!("disk {disk}: ")) && inspected.contains(why), "{inspected}");
    let judged = command::run(&[&["doctor"][..], &at].concat()).out;
    assert!(judged.contains(why) && judged.contains(&format!(" hint: {hint}\n")), "{hint}: {judged}");
    assert!(inspected.contains(&format!(" hint: {hint}\n")), "{hint}: {inspected}");
}

/// Hangs in this operation, or in all of them.
fn harmed(mount: &mut Mount, harm: &str) {
    match harm {
        "frozen" => mount.freeze(),
        operation => mount.harm(operation, "hang"),
    }
}

fn healed(mount: &mut Mount, harm: &str) {
    match harm {
        "frozen" => mount.thaw(),
        _ => mount.calm(),
    }
}

#[test]
fn a_disk_that_hangs_at_the_start_costs_its_blocks_and_no_end_of_the_daemon() {
    for harm in ["look", "open", "read", "frozen"] {
        let Some((mut mount, hung)) = mount() else { return };
        let (place, home) = (Place::new(), home());
        let disks = [&hung, &*home.path().join("other")];
        harmed(&mut mount, harm);
        let rig = Rig::serving(&place, &disks, &[]);
        wait_until("the disk is called silent", || rig.trouble(0).contains("does not answer"));
        says_everywhere(&place, &rig.daemon, &hung, "does not answer");
        rig.store(0..1500);
        assert_eq!(rig.blocks_on(1), 1500, "{harm}: all go to the disk that is there");
        rig.is_served(0..50);
        rig.ends_in_time();
        // Another one starts on the same pool, while the first one's look at the disk still hangs.
        let rig = Rig::serving(&place, &disks, &[]);
        rig.is_served(0..50);
        healed(&mut mount, harm);
        rig.is_taken(0);
        rig.store(2000..2200);
        let stored = rig.blocks_on(0);
        assert!((50..150).contains(&stored), "{harm}: {stored} of 200 blocks went to the disk that came");
        rig.ends_in_time();
    }
}

#[test]
fn disks_that_answer_serve_before_a_hung_one_counts_as_silent() {
    // The first hangs as it is claimed, the second as it is written for the first time.
    for harm in ["frozen", "write"] {
        let Some((mut mount, hung)) = mount() else { return };
        let (place, home) = (Place::new(), home());
        harmed(&mut mount, harm);
        let rig = Rig::serving(&place, &[&hung, &home.path().join("other")], &[]);
        assert!(opened_in(&rig.daemon) < SILENT_AFTER, "{harm}: {}", rig.daemon.log());
        rig.store(0..100);
        assert_eq!(rig.blocks_on(1), 100, "{harm}");
        healed(&mut mount, harm);
        rig.is_taken(0);
        rig.ends_in_time();
    }
}

#[test]
fn a_disk_that_comes_late_brings_its_blocks_and_what_was_stored_twice_is_one_block() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let rig = Rig::serving(&place, &[&first, &second], &[]);
    rig.store(0..1000);
    let on_first = rig.blocks_on(0);
    assert!((300..700).contains(&on_first), "{on_first}");
    rig.loses_pool(&place);

    fs::rename(&first, &away).expect("ours");
    let rig = Rig::serving(&place, &[&first, &second], &["--tier.ssd.create", "false"]);
    if home.path().metadata().expect("ours").dev() != Path::new("/").metadata().expect("a root").dev() {
        return eprintln!("the disks are not on the root filesystem, where no file is created");
    }
    let missed = rig.misses(0..1000);
    assert_eq!(missed.len() as u64, on_first, "the other disk's blocks are hits");
    says_everywhere(&place, &rig.daemon, &first, "root filesystem");
    assert!(!first.exists(), "no file is made where a mount is missing");
    // These are on the disk that is away.
    missed[..100].iter().for_each(|seed| rig.store(*seed..seed + 1));
    assert_eq!(rig.blocks_on(1), 1000 - on_first + 100);
    fs::rename(&away, &first).expect("ours");
    rig.is_taken(0);
    assert_eq!(rig.blocks_on(0), on_first);
    assert_eq!(rig.tier().blocks, 1000, "each is counted once");
    assert_eq!(rig.misses(0..1000).len(), 0);
    let audit = call!(rig.client, audit, AuditRequest {}).expect("an audit");
    assert_eq!((audit.corrupt, audit.misnamed, audit.complaint), (0, 0, String::new()));
    // It reaches both copies.
    rig.purges();
    rig.loses_pool(&place);
    let rig = Rig::serving(&place, &[&first, &second], &[]);
    assert_eq!(rig.misses(0..100).len(), 100);
}

#[test]
fn a_purge_waits_for_a_disk_that_is_missing_and_reaches_its_blocks_when_it_comes() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let rig = Rig::serving(&place, &[&first, &second], &[]);
    rig.store(0..200);
    rig.loses_pool(&place);
    fs::rename(&first, &away).expect("ours");
    // A directory that is not there, as that of a volume that is gone.
    let rig = Rig::serving(&place, &[&first, &second], &["--tier.ssd.create", "false"]);
    let told =
        command::run(&["purge", "--tenant", "t", "--socket.directory", place.sockets().to_str().expect("UTF-8")]);
    assert!(told.code == 1 && told.err.contains("still on a tier") && told.err.contains("after a restart"), "{told:?}");
    let says = [format!("missing=`{}`", first.display()), "pool_blocks=`".to_owned(), "disk_blocks=`".to_owned()];
    assert!(says.iter().all(|says| told.err.contains(says)), "{told:?}");
    fs::rename(&away, &first).expect("ours");
    rig.is_taken(0);
    rig.daemon.says(ENDED, 1);
    rig.purges();
    assert_eq!(rig.daemon.says(ENDED, 1), 1, "nobody was told of this purge that it had not ended");
    assert_eq!(rig.misses(0..200).len(), 200);
    rig.ends_in_time();
}

/// The mount points lie on another filesystem than the root's.
#[test]
fn a_disk_whose_mount_is_missing_is_not_made_anew_beside_another_and_a_purge_waits_for_it() {
    let (place, home) = (Place::new(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    [&first, &second].into_iter().for_each(|point| fs::create_dir(point).expect("ours"));
    let disks = [first.join("disk"), second.join("disk")];
    let disks = [disks[0].as_path(), disks[1].as_path()];
    let made_by_default = ["--tier.ssd.create", "false"];
    // At the first start all are made.
    let rig = Rig::serving(&place, &disks, &made_by_default);
    rig.store(0..200);
    rig.loses_pool(&place);
    fs::rename(&first, &away).and_then(|()| fs::create_dir(&first)).expect("ours");
    let rig = Rig::serving(&place, &disks, &made_by_default);
    says_everywhere(&place, &rig.daemon, disks[0], "other disks are there");
    assert!(!disks[0].exists(), "no file is made where a mount is missing");
    let told =
        command::run(&["purge", "--tenant", "t", "--socket.directory", place.sockets().to_str().expect("UTF-8")]);
    assert!(told.code == 1 && told.err.contains("still on a tier"), "{told:?}");
    assert!(!told.err.contains("seconds=`600`"), "it says how long it has waited, not how long it might: {told:?}");
    fs::remove_dir(&first).and_then(|()| fs::rename(&away, &first)).expect("ours");
    rig.is_taken(0);
    rig.purges();
    assert_eq!(rig.misses(0..200).len(), 200);
    rig.ends_in_time();
}

#[test]
fn a_new_disk_beside_others_is_used_once_its_empty_file_is_there() {
    let (place, home) = (Place::new(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    let [first, second] = ["first", "second"].map(|name| home.path().join(name));
    let made_by_default = ["--tier.ssd.create", "false"];
    let rig = Rig::serving(&place, &[&first], &made_by_default);
    rig.store(0..50);
    rig.loses_pool(&place);
    let rig = Rig::serving(&place, &[&first, &second], &made_by_default);
    says_everywhere(&place, &rig.daemon, &second, "other disks are there");
    File::create(&second).expect("ours");
    rig.is_taken(1);
    assert_eq!(rig.misses(0..50).len(), 0);
    rig.ends_in_time();
}

#[test]
fn a_purge_that_waits_for_a_disk_goes_on_after_the_daemon_was_killed() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let disks: [&Path; 2] = [&first, &second];
    let rig = Rig::serving(&place, &disks, &[]);
    rig.store(0..200);
    let other = rig.client.namespace("other", vec![group()]).expect("a namespace");
    store(&rig.client, &rig.worker, other, 500..600);
    rig.loses_pool(&place);
    fs::rename(&first, &away).expect("ours");
    let rig = Rig::serving(&place, &disks, &["--tier.ssd.create", "false"]);
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    let told = call!(rig.client, purge, request).expect_err("a disk is missing");
    assert!(told.message().contains("still on a tier"), "{told:?}");
    // What is stored since stays in the pool, over kills too.
    rig.store(1000..1010);
    rig.dies();
    let rig = Rig::serving(&place, &disks, &["--tier.ssd.create", "false"]);
    assert_eq!(rig.tier().purge.map(|purge| purge.namespaces), Some(1), "it still waits for the disk");
    rig.is_served(1000..1010);
    rig.dies();
    fs::rename(&away, &first).expect("ours");
    let rig = Rig::serving(&place, &disks, &[]);
    rig.is_taken(0);
    assert_eq!(rig.misses(0..200).len(), 200, "blocks of the disk that came back are purged");
    rig.waits_for_purges();
    rig.daemon.says(ENDED, 1);
    rig.is_served(1000..1010);
    let other = rig.client.namespace("other", vec![group()]).expect("a namespace");
    is_served(&rig.client, &rig.worker, other, 500..600);
    // It is over once and for all: what is written since is there after the next start.
    rig.store(0..50);
    rig.loses_pool(&place);
    let rig = Rig::serving(&place, &disks, &[]);
    rig.is_served(0..50);
    assert_eq!(rig.misses(50..200).len(), 150);
    rig.ends_in_time();
}

/// The pool goes with the host's memory, so nothing but the disks remembers the purge. The disk that was away comes
/// back before the daemon starts, or later, or the other one comes later.
#[test]
fn a_purge_that_waited_for_a_disk_reaches_it_after_a_restart_of_the_host() {
    for order in ["both are there", "the one that was away comes later", "the one that was there comes later"] {
        let (place, home) = (Place::new(), home());
        let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
        let disks: [&Path; 2] = [&first, &second];
        let rig = Rig::serving(&place, &disks, &[]);
        let other = rig.client.namespace("other", vec![group()]).expect("a namespace");
        store(&rig.client, &rig.worker, other, 500..600);
        rig.purges_without_the_first(&place, &disks, &away);
        fs::rename(&away, &first).expect("ours");
        let late = match order {
            "both are there" => None,
            "the one that was away comes later" => Some(0),
            _ => Some(1),
        };
        late.into_iter().for_each(|late| fs::rename(disks[late], &away).expect("ours"));
        let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
        if let Some(late) = late {
            fs::rename(&away, disks[late]).expect("ours");
            rig.is_taken(late);
        }
        let other = rig.client.namespace("other", vec![group()]).expect("a namespace");
        wait_until("what was purged is void", || rig.tier().disks.iter().map(|disk| disk.blocks).sum::<u64>() == 100);
        assert_eq!(rig.misses(0..200).len(), 200, "{order}");
        is_served(&rig.client, &rig.worker, other, 500..600);
        // What is stored before the end of the purge goes to no disk.
        rig.waits_for_purges();
        rig.store(0..50);
        rig.loses_pool(&place);
        let rig = Rig::serving(&place, &disks, &[]);
        rig.is_served(0..50);
        assert_eq!(rig.misses(50..200).len(), 150, "{order}");
        rig.ends_in_time();
    }
}

/// The host's disks answer one after another, and requests do not wait. The second one may come only when the daemon
/// was killed.
#[test]
fn what_a_disk_served_before_the_other_told_it_of_a_purge_is_purged_everywhere() {
    for is_killed in [false, true] {
        let (place, home) = (Place::new(), home());
        let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
        let disks: [&Path; 2] = [&first, &second];
        Rig::serving(&place, &disks, &[]).purges_without_the_first(&place, &disks, &away);
        fs::rename(&away, &first).and_then(|()| fs::rename(&second, &away)).expect("ours");
        let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
        assert!(rig.misses(0..200).len() < 150, "nobody knows of the purge");
        let second_comes = || fs::rename(&away, &second).expect("ours");
        let rig = if is_killed {
            rig.dies();
            second_comes();
            Rig::serving(&place, &disks, &NO_NEW_DISK)
        } else {
            second_comes();
            rig
        };
        rig.is_taken(1);
        wait_until("the purge was carried out again", || rig.misses(0..200).len() == 200);
        rig.waits_for_purges();
        rig.loses_pool(&place);
        // The removals alone say it too: other purges may push this one out of the lists.
        let file = File::options().write(true).open(&first).expect("ours");
        [64 << 10, 576 << 10].into_iter().for_each(|at| file.write_all_at(&[0; 64 << 10], at).expect("ours"));
        fs::rename(&second, &away).expect("ours");
        let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
        assert_eq!(rig.misses(0..200).len(), 200);
        rig.ends_in_time();
    }
}

/// One disk has its place taken during a purge, and comes back when all disks that heard of it are gone: before the
/// daemon starts, or later.
#[test]
fn a_pool_that_was_kept_tells_a_disk_of_a_purge_that_no_other_disk_knows_of() {
    for is_late in [false, true] {
        let (place, home) = (Place::new(), home());
        let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
        let disks: [&Path; 2] = [&first, &second];
        let replace = |disk: &Path, away: &Path| {
            fs::rename(disk, away).and_then(|()| File::create(disk)).expect("ours");
        };
        let rig = Rig::serving(&place, &disks, &[]);
        rig.store(0..200);
        let on_first = rig.blocks_on(0);
        assert!((50..150).contains(&on_first), "{on_first}");
        rig.ends_in_time();
        replace(&first, &away);
        let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
        rig.purges();
        rig.ends_in_time();

        replace(&second, &first);
        let comes = || fs::rename(&away, &first).expect("ours");
        let rig = if is_late {
            fs::remove_file(&first).expect("ours");
            let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
            comes();
            rig
        } else {
            comes();
            Rig::serving(&place, &disks, &NO_NEW_DISK)
        };
        rig.is_taken(0);
        assert_eq!(rig.misses(0..200).len(), 200, "the blocks of the disk that came back are purged");
        rig.waits_for_purges();
        assert_eq!(rig.tier().blocks, 0);
        // It is over once and for all, for that disk and for the blank one.
        rig.store(300..400);
        let on_each = [0, 1].map(|disk| rig.blocks_on(disk));
        assert!(on_each.iter().all(|blocks| (25..75).contains(blocks)), "{on_each:?}");
        rig.dies();
        let rig = Rig::serving(&place, &disks, &[]);
        rig.is_served(300..400);
        assert_eq!([0, 1].map(|disk| rig.blocks_on(disk)), on_each);
        rig.loses_pool(&place);
        let rig = Rig::serving(&place, &disks, &[]);
        rig.is_served(300..400);
        assert_eq!(rig.misses(0..200).len(), 200);
        rig.ends_in_time();
    }
}

/// The first disk has not heard of the purge, fills the pool, and is gone when the second one comes.
#[test]
fn what_a_disk_brought_into_the_pool_goes_when_another_comes_that_knows_of_the_purge() {
    let (place, home) = (Place::new(), home());
    let [first, second, away, gone] = ["first", "second", "away", "gone"].map(|name| home.path().join(name));
    let disks: [&Path; 2] = [&first, &second];
    Rig::serving(&place, &disks, &[]).purges_without_the_first(&place, &disks, &away);
    fs::rename(&away, &first).and_then(|()| fs::rename(&second, &away)).expect("ours");
    let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
    assert!(rig.misses(0..200).len() < 150, "nobody knows of the purge");
    rig.ends_in_time();
    fs::rename(&first, &gone).and_then(|()| File::create(&first)).expect("ours");
    fs::rename(&away, &second).expect("ours");
    let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
    wait_until("the purge was carried out again", || rig.misses(0..200).len() == 200);
    rig.waits_for_purges();
    // And only once.
    rig.store(300..400);
    rig.ends_in_time();
    let rig = Rig::serving(&place, &disks, &NO_NEW_DISK);
    rig.is_served(300..400);
    assert_eq!(rig.daemon.says("the pool has not heard of it", 1), 1, "of all daemons");
    rig.ends_in_time();
}

/// The pool is that in which the namespace was opened, or a new one.
#[test]
fn a_purge_of_a_host_without_disks_reaches_a_disk_that_is_configured_again() {
    for is_known in [true, false] {
        let (place, home) = (Place::new(), home());
        let disk = home.path().join("disk");
        let rig = Rig::serving(&place, &[&disk], &[]);
        rig.store(0..50);
        let namespace = rig.client.inspect().namespaces[0].namespace_id.clone();
        match is_known {
            true => rig.ends_in_time(),
            false => rig.loses_pool(&place),
        }
        let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
        let (client, worker) = engine(&place, "a", BYTES);
        let request = PurgeRequest { namespace_id: namespace, ..PurgeRequest::default() };
        let reply = call!(client, purge, request).expect("a purge");
        assert_eq!(reply.purged_blocks, if is_known { 50 } else { 0 });
        drop((client, worker));
        ends_in_time(daemon);
        let rig = Rig::serving(&place, &[&disk], &[]);
        assert_eq!(rig.misses(0..50).len(), 50, "the pool tells the disk");
        rig.waits_for_purges();
        rig.store(100..150);
        rig.dies();
        let rig = Rig::serving(&place, &[&disk], &[]);
        rig.is_served(100..150);
        assert_eq!(rig.blocks_on(0), 50);
        rig.ends_in_time();
    }
}

/// Two daemons each have a disk. One's disk is away during a purge; then an empty file is in its place, or the other's
/// disk.
#[test]
fn a_purge_that_waited_for_a_disk_says_with_which_disk_it_ends() {
    for is_new in [true, false] {
        let (place, other_place, home) = (Place::new(), Place::new(), home());
        let [volume, away, coming] = ["volume", "away", "coming"].map(|name| home.path().join(name));
        [&volume, &coming].into_iter().for_each(|directory| fs::create_dir(directory).expect("ours"));
        let (disk, other) = (volume.join("disk"), coming.join("disk"));
        match is_new {
            true => drop(File::create(&other).expect("ours")),
            false => Rig::serving(&other_place, &[&other], &[]).dies(),
        }
        let rig = Rig::serving(&place, &[&disk], &[]);
        rig.store(0..50);
        rig.dies();
        fs::rename(&volume, &away).expect("ours");
        let rig = Rig::in_state("sick", &place, &[&disk], &["--tier.ssd.create", "false"]);
        let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
        call!(rig.client, purge, request).expect_err("a disk is missing");
        fs::rename(&coming, &volume).expect("ours");
        rig.is_taken(0);
        rig.waits_for_purges();
        let says = format!("purges have waited for a disk, and end with the one that came disk=\"{}\"", disk.display());
        rig.daemon.says(&says, 1);
        let log = rig.daemon.log();
        assert_eq!((log.contains("it is a new disk"), log.contains("has another id")), (is_new, !is_new), "{log}");
        rig.ends_in_time();
    }
}

/// As an operator does who changes its size.
#[test]
fn a_purge_that_waits_for_a_disk_goes_on_in_a_pool_that_replaces_the_first() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let disks: [&Path; 2] = [&first, &second];
    let rig = Rig::serving(&place, &disks, &[]);
    rig.store(0..200);
    rig.dies();
    fs::rename(&first, &away).expect("ours");
    let rig = Rig::serving(&place, &disks, &["--tier.ssd.create", "false"]);
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    call!(rig.client, purge, request).expect_err("a disk is missing");
    rig.dies();
    fs::rename(&away, &first).expect("ours");
    let rig = Rig::serving(&place, &disks, &["--pool.capacity_bytes", "8MiB"]);
    assert!(rig.daemon.log().contains("the pool is replaced"), "{}", rig.daemon.log());
    rig.is_taken(0);
    assert_eq!(rig.misses(0..200).len(), 200);
    rig.waits_for_purges();
    assert_eq!(rig.tier().blocks, 0);
    rig.ends_in_time();
}

/// The daemon knows a namespace of the tenant, and not the one whose blocks the disk has.
#[test]
fn a_purge_that_began_before_its_disk_came_says_what_it_does_not_know_of_the_disk() {
    let (place, home) = (Place::new(), home());
    let [first, away] = ["first", "away"].map(|name| home.path().join(name));
    let rig = Rig::serving(&place, &[&first], &[]);
    rig.store(0..50);
    rig.loses_pool(&place);
    fs::rename(&first, &away).expect("ours");
    let daemon = start(&place, &[&first], &["--tier.ssd.create", "false"]);
    let (client, worker) = engine(&place, "a", BYTES);
    let fields = [("model", "other"), ("tenant", "t")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let request =
        OpenNamespaceRequest { session: client.welcome.session, fields: fields.into(), groups: vec![group()] };
    call!(client, open_namespace, request).expect("a namespace");
    let sockets = place.sockets().to_str().expect("UTF-8").to_owned();
    let purge = std::thread::spawn(move || {
        command::run(&["purge", "--tenant", "t", "--wait-seconds", "60", "--socket.directory", &sockets])
    });
    // If it has not begun by then, it is told the same.
    std::thread::sleep(Duration::from_millis(500));
    fs::rename(&away, &first).expect("ours");
    let told = purge.join().expect("an end");
    assert!(told.code == 1 && told.err.contains("whose tenant is not known"), "{told:?}");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let rig = Rig { daemon, client, worker, namespace };
    rig.purges();
    assert_eq!(rig.misses(0..50).len(), 50);
    rig.ends_in_time();
}

#[test]
fn one_dead_disk_of_eight_is_replaced_and_the_other_seven_stay_warm() {
    let (place, home) = (Place::new(), home());
    let disks: Vec<PathBuf> = (0..8).map(|number| home.path().join(format!("disk{number}"))).collect();
    let disks: Vec<&Path> = disks.iter().map(PathBuf::as_path).collect();
    let rig = Rig::serving(&place, &disks, &[]);
    rig.store(0..1600);
    let lost = rig.blocks_on(3);
    assert!((100..300).contains(&lost), "{lost}");
    rig.loses_pool(&place);

    // A blank one, and a larger one, as a new device is.
    fs::remove_file(disks[3]).expect("ours");
    File::create(disks[3]).and_then(|disk| disk.set_len(2 * DISK_BYTES)).expect("a file");
    let rig = Rig::serving(&place, &disks, &["--tier.ssd.create", "false"]);
    rig.is_taken(3);
    assert_eq!(rig.tier().blocks, 1600 - lost);
    assert_eq!(rig.misses(0..1600).len() as u64, lost);
    rig.store(2000..2800);
    assert!(rig.blocks_on(3) > 50, "the new disk gets its part: {:?}", rig.tier().disks[3]);
    assert_eq!(rig.tier().blocks, 1600 - lost + 800);
    rig.ends_in_time();
}

#[test]
fn a_daemon_whose_only_disk_is_missing_serves_from_its_pool_and_takes_the_disk_when_it_is_mounted() {
    let (place, home) = (Place::new(), home());
    let disk = home.path().join("volume/disk");
    let rig = Rig::in_state("sick", &place, &[&disk], &[]);
    assert!(rig.tier().why.contains("No such file"), "{}", rig.tier().why);
    let slots = rig.client.reserve(rig.namespace, 10);
    (0..10).zip(&slots).for_each(|(seed, held)| rig.worker.fill(held, seed));
    let outcomes = rig.client.commit(rig.namespace, &hashes(0..10), &slots);
    assert_eq!(outcomes, vec![CommitOutcome::CommitStored; 10]);
    rig.is_served(0..10);
    fs::create_dir(home.path().join("volume")).expect("ours");
    rig.is_taken(0);
    wait_until("the tier serves", || rig.tier().state == "serving");
    rig.store(100..200);
    assert_eq!(rig.blocks_on(0), 110, "with those that were stored before the disk came");
    rig.ends_in_time();
}

#[test]
fn a_disk_with_other_data_stops_the_start() {
    let (place, home) = (Place::new(), home());
    let foreign = home.path().join("foreign");
    fs::write(&foreign, vec![b'x'; 1 << 20]).expect("ours");
    let disks = format!("{:?}", [home.path().join("fine"), foreign.clone()]);
    let arguments = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB"];
    let (is_success, log) = Daemon::spawn(&place, &arguments).finish();
    assert!(!is_success && log.contains("this disk holds other data") && log.contains("hint: "), "{log}");
    assert!(fs::read(&foreign).expect("ours") == vec![b'x'; 1 << 20], "it was changed");
}

#[test]
fn something_else_than_a_disk_stops_the_start_and_is_called_what_it_is() {
    let (place, home) = (Place::new(), home());
    let socket = home.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let pipe = home.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()));
    for path in [socket, pipe] {
        let disks = format!("{:?}", [&path]);
        let arguments = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB"];
        let (is_success, log) = Daemon::spawn(&place, &arguments).finish();
        assert!(!is_success && log.contains("a disk is a file or a block device"), "{log}");
        assert!(log.contains(&format!("remove what is there: see `stat {}`", path.display())), "{log}");
    }
}

#[test]
fn a_disk_that_was_cut_and_cannot_be_preallocated_costs_itself_alone() {
    let (place, home) = (Place::new(), home());
    let Some((mount, own)) = mount() else { return };
    let fine = home.path().join("fine");
    let rig = Rig::serving(&place, &[&own, &fine], &[]);
    rig.store(0..100);
    rig.loses_pool(&place);
    let file = File::options().write(true).open(mount.backing().join("disk")).expect("ours");
    file.set_len(DISK_BYTES / 2).expect("it is cut");
    let rig = Rig::serving(&place, &[&own, &fine], &[]);
    says_everywhere(&place, &rig.daemon, &own, "shorter than its capacity");
    assert!(rig.misses(0..100).len() < 100, "the other disk serves");
    rig.ends_in_time();
}

#[test]
fn a_disk_that_keeps_its_capacity_is_named() {
    let (place, home) = (Place::new(), home());
    let disk = home.path().join("disk");
    Rig::serving(&place, &[&disk], &[]).ends_in_time();
    File::options().write(true).open(&disk).and_then(|file| file.set_len(2 * DISK_BYTES)).expect("ours");
    let rig = Rig::serving(&place, &[&disk], &[]);
    let log = rig.daemon.log();
    let line = log.lines().find(|line| line.contains("keeps the capacity")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains(&format!("path=\"{}\"", disk.display())), "{line}");
    rig.ends_in_time();
}

/// Its user may be a daemon that a hung call keeps from ending.
#[test]
fn a_disk_in_use_is_done_without_until_it_is_free() {
    let (place, other, home) = (Place::new(), Place::new(), home());
    let [own, fine] = ["own", "fine"].map(|name| home.path().join(name));
    let user = Rig::serving(&other, &[&own], &[]);
    user.store(0..100);
    let rig = Rig::serving(&place, &[&own, &fine], &[]);
    assert!(rig.trouble(0).contains("another daemon uses this disk"), "{}", rig.trouble(0));
    says_everywhere(&place, &rig.daemon, &own, "another daemon uses this disk");
    user.ends_in_time();
    rig.is_taken(0);
    rig.is_served(0..50);
    rig.ends_in_time();
}

#[test]
fn a_copy_of_a_disk_is_not_used_beside_it() {
    let (place, home) = (Place::new(), home());
    let [first, copy] = ["first", "copy"].map(|name| home.path().join(name));
    Rig::serving(&place, &[&first], &[]).ends_in_time();
    fs::copy(&first, &copy).expect("ours");
    let rig = Rig::serving(&place, &[&first, &copy], &[]);
    let troubles = [rig.trouble(0), rig.trouble(1)];
    assert_eq!(troubles.iter().filter(|trouble| trouble.contains("it is a copy of")).count(), 1, "{troubles:?}");
    rig.store(0..100);
    // Only a file that was emptied is a disk of its own.
    assert!(rig.daemon.log().contains("(delete a file and `touch` it, zero a device with `blkdiscard -z`)"));
    let unused = [&first, &copy][usize::from(troubles[0].is_empty())];
    rig.dies();
    fs::remove_file(unused).and_then(|()| File::create(unused)).expect("ours");
    let rig = Rig::serving(&place, &[&first, &copy], &[]);
    assert_eq!([rig.trouble(0), rig.trouble(1)], ["", ""]);
    rig.ends_in_time();
}

/// As after an upgrade that was taken back. The bytes stand for a build of a later version.
#[test]
fn a_disk_of_a_later_version_stays_as_it_is_and_costs_itself_alone() {
    let (place, home) = (Place::new(), home());
    let [own, fine] = ["own", "fine"].map(|name| home.path().join(name));
    let rig = Rig::serving(&place, &[&own, &fine], &[]);
    rig.store(0..100);
    rig.loses_pool(&place);
    set_version(&own, 2);
    let before = fs::read(&own).expect("ours");
    let rig = Rig::serving(&place, &[&own, &fine], &[]);
    says_everywhere(&place, &rig.daemon, &own, "formatted by another version");
    let missed = rig.misses(0..100).len();
    assert!((20..80).contains(&missed), "{missed}");
    assert!(fs::read(&own).expect("ours") == before, "it was changed");
    set_version(&own, 1);
    rig.is_taken(0);
    (0..100).for_each(|seed| rig.is_served(seed..seed + 1));
    rig.ends_in_time();
}

/// In the first page, with its seal; see docs/formats/ssd.md.
fn set_version(disk: &Path, number: u32) {
    let file = fs::OpenOptions::new().read(true).write(true).open(disk).expect("ours");
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 0).expect("a page");
    page[8..12].copy_from_slice(&number.to_le_bytes());
    let seal = checksum(&page[..4088]).to_le_bytes();
    page[4088..].copy_from_slice(&seal);
    file.write_all_at(&page, 0).expect("ours");
}
