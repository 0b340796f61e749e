//! The SSD tier behind the shipped daemon, with disks that are missing or hang when it starts, and come later.
//!
//! A disk that hangs is a file on a filesystem in user space. Where there is no FUSE, or no right to mount, the tests
//! say so; what they claim of hung disks is then left to those of disks that are missing.

mod command;
#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
mod support;

use std::fs::{self, File};
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
    let rest = ["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0", "--drain.deadline_seconds", DRAIN];
    Daemon::start(place, &[&tier[..], &rest, more].concat())
}

/// An engine of a daemon whose tier is in this state.
fn engine_of(place: &Place, state: &str) -> (Client, Worker) {
    let (client, worker) = engine(place, "a", BYTES);
    wait_until(state, || tier(&client).state == state);
    (client, worker)
}

fn tier(client: &Client) -> TierInfo {
    tiers::tier(client, "ssd")
}

fn trouble(client: &Client, disk: usize) -> String {
    tier(client).disks[disk].trouble.clone()
}

fn is_taken(client: &Client, disk: usize) {
    wait_until("the disk is taken", || trouble(client, disk).is_empty());
}

/// The misses among these blocks, each asked for alone; whatever comes is whole.
fn misses(client: &Client, worker: &Worker, namespace: u32, seeds: std::ops::Range<u64>) -> Vec<u64> {
    let is_miss = |seed: &u64| {
        let reply = client.lookup_settled(namespace, &hashes(*seed..seed + 1));
        let slots = &reply.groups[0].slots;
        slots.iter().for_each(|slot| assert!(worker.read(*slot) == pattern(*seed, BYTES), "block {seed} is another"));
        client.release(reply.lease);
        slots.is_empty()
    };
    seeds.filter(is_miss).collect()
}

/// From the first look at the tier's disks until it serves, as the log says.
fn opened_in(daemon: &Daemon) -> Duration {
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
    let warnings = || daemon.log().lines().filter(|line| line.contains("a disk is missing")).count();
    wait_until("the log says so", || warnings() > 0);
    assert!(warnings() == 1 && daemon.log().contains("hint="), "{}", daemon.log());
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
    assert!(judged.contains(why) && judged.contains(&format!("check `{disk}`")), "{judged}");
}

#[test]
fn a_disk_that_hangs_at_the_start_costs_its_blocks_and_no_end_of_the_daemon() {
    for harm in ["look", "open", "read", "frozen"] {
        let Some((mut mount, hung)) = mount() else { return };
        let (place, home) = (Place::new(), home());
        match harm {
            "frozen" => mount.freeze(),
            op => mount.harm(op, "hang"),
        }
        let daemon = start(&place, &[&hung, &home.path().join("other")], &[]);
        let (client, worker) = engine_of(&place, "serving");
        wait_until("the disk is called silent", || trouble(&client, 0).contains("does not answer"));
        says_everywhere(&place, &daemon, &hung, "does not answer");
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..1500);
        assert_eq!(tier(&client).disks[1].blocks, 1500, "{harm}: all go to the disk that is there");
        is_served(&client, &worker, namespace, 0..50);
        drop((client, worker));
        ends_in_time(daemon);
        // Another one starts on the same pool, while the first one's look at the disk still hangs.
        let daemon = start(&place, &[&hung, &home.path().join("other")], &[]);
        let (client, worker) = engine_of(&place, "serving");
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        is_served(&client, &worker, namespace, 0..50);
        match harm {
            "frozen" => mount.thaw(),
            _ => mount.calm(),
        }
        is_taken(&client, 0);
        store(&client, &worker, namespace, 2000..2200);
        let stored = tier(&client).disks[0].blocks;
        assert!((50..150).contains(&stored), "{harm}: {stored} of 200 blocks went to the disk that came");
        drop((client, worker));
        ends_in_time(daemon);
    }
}

#[test]
fn disks_that_answer_serve_before_a_hung_one_counts_as_silent() {
    // The first hangs as it is claimed, the second as it is written for the first time.
    for harm in ["frozen", "write"] {
        let Some((mut mount, hung)) = mount() else { return };
        let (place, home) = (Place::new(), home());
        match harm {
            "frozen" => mount.freeze(),
            op => mount.harm(op, "hang"),
        }
        let daemon = start(&place, &[&hung, &home.path().join("other")], &[]);
        let (client, worker) = engine_of(&place, "serving");
        assert!(opened_in(&daemon) < SILENT_AFTER, "{harm}: {}", daemon.log());
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..100);
        assert_eq!(tier(&client).disks[1].blocks, 100, "{harm}");
        match harm {
            "frozen" => mount.thaw(),
            _ => mount.calm(),
        }
        is_taken(&client, 0);
        drop((client, worker));
        ends_in_time(daemon);
    }
}

#[test]
fn a_disk_that_comes_late_brings_its_blocks_and_what_was_stored_twice_is_one_block() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let daemon = start(&place, &[&first, &second], &[]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..1000);
    let on_first = tier(&client).disks[0].blocks;
    assert!((300..700).contains(&on_first), "{on_first}");
    tiers::lose_pool(&place, daemon, (client, worker));

    fs::rename(&first, &away).expect("ours");
    let daemon = start(&place, &[&first, &second], &["--tier.ssd.create", "false"]);
    let (client, worker) = engine_of(&place, "serving");
    if home.path().metadata().expect("ours").dev() != Path::new("/").metadata().expect("a root").dev() {
        return eprintln!("the disks are not on the root filesystem, where no file is created");
    }
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let missed = misses(&client, &worker, namespace, 0..1000);
    assert_eq!(missed.len() as u64, on_first, "the other disk's blocks are hits");
    says_everywhere(&place, &daemon, &first, "root filesystem");
    assert!(!first.exists(), "no file is made where a mount is missing");
    // These are on the disk that is away.
    missed[..100].iter().for_each(|seed| store(&client, &worker, namespace, *seed..seed + 1));
    assert_eq!(tier(&client).disks[1].blocks, 1000 - on_first + 100);
    fs::rename(&away, &first).expect("ours");
    is_taken(&client, 0);
    assert_eq!(tier(&client).disks[0].blocks, on_first);
    assert_eq!(tier(&client).blocks, 1000, "each is counted once");
    assert_eq!(misses(&client, &worker, namespace, 0..1000).len(), 0);
    let audit = call!(client, audit, AuditRequest {}).expect("an audit");
    assert_eq!((audit.corrupt, audit.misnamed, audit.complaint), (0, 0, String::new()));
    // A purge reaches both copies.
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    call!(client, purge, request).expect("a purge");
    assert_eq!(tier(&client).disks.iter().map(|disk| disk.blocks).sum::<u64>(), 0);
    tiers::lose_pool(&place, daemon, (client, worker));
    let _daemon = start(&place, &[&first, &second], &[]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    assert_eq!(misses(&client, &worker, namespace, 0..100).len(), 100);
}

#[test]
fn a_purge_waits_for_a_disk_that_is_missing_and_reaches_its_blocks_when_it_comes() {
    let (place, home) = (Place::new(), home());
    let [first, second, away] = ["first", "second", "away"].map(|name| home.path().join(name));
    let daemon = start(&place, &[&first, &second], &[]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..200);
    tiers::lose_pool(&place, daemon, (client, worker));
    fs::rename(&first, &away).expect("ours");
    // A directory that is not there, as that of a volume that is gone.
    let daemon = start(&place, &[&first, &second], &["--tier.ssd.create", "false"]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    let told =
        command::run(&["purge", "--tenant", "t", "--socket.directory", place.sockets().to_str().expect("UTF-8")]);
    assert!(
        told.code == 1 && told.err.contains("still on a tier") && told.err.contains("before a restart"),
        "{told:?}"
    );
    fs::rename(&away, &first).expect("ours");
    is_taken(&client, 0);
    call!(client, purge, request).expect("a purge");
    assert_eq!(tier(&client).disks.iter().map(|disk| disk.blocks).sum::<u64>(), 0);
    assert_eq!(misses(&client, &worker, namespace, 0..200).len(), 200);
    drop((client, worker));
    ends_in_time(daemon);
}

#[test]
fn one_dead_disk_of_eight_is_replaced_and_the_other_seven_stay_warm() {
    let (place, home) = (Place::new(), home());
    let disks: Vec<PathBuf> = (0..8).map(|number| home.path().join(format!("disk{number}"))).collect();
    let disks: Vec<&Path> = disks.iter().map(PathBuf::as_path).collect();
    let daemon = start(&place, &disks, &[]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..1600);
    let lost = tier(&client).disks[3].blocks;
    assert!((100..300).contains(&lost), "{lost}");
    tiers::lose_pool(&place, daemon, (client, worker));

    // A blank one, and a larger one, as a new device is.
    fs::remove_file(disks[3]).expect("ours");
    File::create(disks[3]).and_then(|disk| disk.set_len(2 * DISK_BYTES)).expect("a file");
    let daemon = start(&place, &disks, &["--tier.ssd.create", "false"]);
    let (client, worker) = engine_of(&place, "serving");
    is_taken(&client, 3);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    assert_eq!(tier(&client).blocks, 1600 - lost);
    assert_eq!(misses(&client, &worker, namespace, 0..1600).len() as u64, lost);
    store(&client, &worker, namespace, 2000..2800);
    assert!(tier(&client).disks[3].blocks > 50, "the new disk gets its part: {:?}", tier(&client).disks[3]);
    assert_eq!(tier(&client).blocks, 1600 - lost + 800);
    drop((client, worker));
    ends_in_time(daemon);
}

#[test]
fn a_daemon_whose_only_disk_is_missing_serves_from_its_pool_and_takes_the_disk_when_it_is_mounted() {
    let (place, home) = (Place::new(), home());
    let disk = home.path().join("volume/disk");
    let daemon = start(&place, &[&disk], &[]);
    let (client, worker) = engine_of(&place, "sick");
    assert!(tier(&client).why.contains("No such file"), "{}", tier(&client).why);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let slots = client.reserve(namespace, 10);
    (0..10).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
    assert_eq!(client.commit(namespace, &hashes(0..10), &slots), vec![CommitOutcome::CommitStored; 10]);
    is_served(&client, &worker, namespace, 0..10);
    fs::create_dir(home.path().join("volume")).expect("ours");
    is_taken(&client, 0);
    wait_until("the tier serves", || tier(&client).state == "serving");
    store(&client, &worker, namespace, 100..200);
    assert_eq!(tier(&client).disks[0].blocks, 110, "with those that were stored before the disk came");
    drop((client, worker));
    ends_in_time(daemon);
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

/// Its user may be a daemon that a hung call keeps from ending.
#[test]
fn a_disk_in_use_is_done_without_until_it_is_free() {
    let (place, other, home) = (Place::new(), Place::new(), home());
    let [own, fine] = ["own", "fine"].map(|name| home.path().join(name));
    let user = start(&other, &[&own], &[]);
    let (client, worker) = engine_of(&other, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    let daemon = start(&place, &[&own, &fine], &[]);
    let (client, worker) = (engine_of(&place, "serving"), drop((client, worker))).0;
    assert!(trouble(&client, 0).contains("another daemon uses this disk"), "{}", trouble(&client, 0));
    says_everywhere(&place, &daemon, &own, "another daemon uses this disk");
    ends_in_time(user);
    is_taken(&client, 0);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 0..50);
    drop((client, worker));
    ends_in_time(daemon);
}

#[test]
fn a_copy_of_a_disk_is_not_used_beside_it() {
    let (place, home) = (Place::new(), home());
    let [first, copy] = ["first", "copy"].map(|name| home.path().join(name));
    let daemon = start(&place, &[&first], &[]);
    drop(engine_of(&place, "serving"));
    ends_in_time(daemon);
    fs::copy(&first, &copy).expect("ours");
    let daemon = start(&place, &[&first, &copy], &[]);
    let (client, worker) = engine_of(&place, "serving");
    let troubles = [trouble(&client, 0), trouble(&client, 1)];
    assert_eq!(troubles.iter().filter(|trouble| trouble.contains("it is a copy of")).count(), 1, "{troubles:?}");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    drop((client, worker));
    ends_in_time(daemon);
}

/// As after an upgrade that was taken back. The bytes stand for a build of a later version.
#[test]
fn a_disk_of_a_later_version_stays_as_it_is_and_costs_itself_alone() {
    let (place, home) = (Place::new(), home());
    let [own, fine] = ["own", "fine"].map(|name| home.path().join(name));
    let daemon = start(&place, &[&own, &fine], &[]);
    let (client, worker) = engine_of(&place, "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    tiers::lose_pool(&place, daemon, (client, worker));
    // The first page, with its seal; see docs/formats/ssd.md.
    let version = |number: u32| {
        let file = fs::OpenOptions::new().read(true).write(true).open(&own).expect("ours");
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, 0).expect("a page");
        page[8..12].copy_from_slice(&number.to_le_bytes());
        let seal = checksum(&page[..4088]).to_le_bytes();
        page[4088..].copy_from_slice(&seal);
        file.write_all_at(&page, 0).expect("ours");
    };
    version(2);
    let before = fs::read(&own).expect("ours");
    let daemon = start(&place, &[&own, &fine], &[]);
    let (client, worker) = engine_of(&place, "serving");
    says_everywhere(&place, &daemon, &own, "formatted by another version");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let missed = misses(&client, &worker, namespace, 0..100).len();
    assert!((20..80).contains(&missed), "{missed}");
    assert!(fs::read(&own).expect("ours") == before, "it was changed");
    version(1);
    is_taken(&client, 0);
    (0..100).for_each(|seed| is_served(&client, &worker, namespace, seed..seed + 1));
    drop((client, worker));
    ends_in_time(daemon);
}
