//! The SSD tier behind the shipped daemon, on a disk that answers late, with errors, or not at all.
//!
//! The disk is a file on a filesystem in user space that does harm on command. Where there is no FUSE the tests say so;
//! what they claim is then left to those of the tier, on a simulated disk, and to `ssd`, on one that is cut short.

#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
mod support;

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_rpc::proto::*;
use fuse::Mount;
use support::tiers::{self, BYTES};
use support::*;

const DISK: (&str, u64) = ("64MiB", 64 << 20);
const PROMPT: u64 = 50;
/// Twice what the pool holds.
const PROMPTS: u64 = 30;
const EIO: &str = "fail 5";
/// A request waits at most this long for a block of the disk.
const DEADLINE_MS: u64 = 500;

fn arguments(engine: &str, disk: &Path, other: Option<&Path>, pages: &str, deadline_ms: u64) -> Vec<String> {
    let disks = format!("{:?}", [Some(disk), other].into_iter().flatten().collect::<Vec<_>>());
    let deadline = deadline_ms.to_string();
    [
        ["--pool.capacity_bytes", "16MiB"],
        ["--http.address", pages],
        ["--drain.deadline_seconds", "2"],
        ["--tier.ssd.disks", &disks],
        ["--tier.ssd.capacity_bytes", DISK.0],
        ["--tier.ssd.admission", "all"],
        ["--tier.ssd.load_deadline_ms", &deadline],
        ["--tier.ssd.engine", engine],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}

fn as_str(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

struct Rig {
    daemon: Daemon,
    client: Client,
    worker: Worker,
    namespace: u32,
    next_seed: u64,
    mount: Mount,
    place: Place,
}

impl Rig {
    /// A daemon whose disk holds all prompts and whose pool the later half. None where there is no FUSE.
    fn start(engine: &str) -> Option<Rig> {
        Rig::beside(engine, None, DEADLINE_MS)
    }

    /// With another disk beside it, which never comes to harm; a request waits so long for a block.
    fn beside(engine: &str, other: Option<&Path>, deadline_ms: u64) -> Option<Rig> {
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mount = Mount::start(home).inspect_err(|why| eprintln!("no filesystem in user space: {why}")).ok()?;
        // The mount has no `fallocate`, so the file has its length before.
        File::create(mount.backing().join("disk")).and_then(|disk| disk.set_len(DISK.1)).expect("a file");
        let (place, path) = (Place::new(), mount.path().join("disk"));
        let daemon = Daemon::start(&place, &as_str(&arguments(engine, &path, other, "127.0.0.1:0", deadline_ms)));
        let (client, worker) = support::engine(&place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        let mut rig = Rig { daemon, client, worker, namespace, next_seed: 0, mount, place };
        rig.becomes("serving");
        for prompts in 1..=PROMPTS {
            rig.store();
            wait_until("it is written", || rig.tier().stored_blocks == prompts * PROMPT);
        }
        Some(rig)
    }

    fn tier(&self) -> TierInfo {
        tiers::tier(&self.client, "ssd")
    }

    fn becomes(&self, state: &str) {
        wait_until(state, || self.tier().state == state);
    }

    /// One more prompt, into the pool; the disk gets it when it can.
    fn store(&mut self) -> Range<u64> {
        let seeds = self.next_seed..self.next_seed + PROMPT;
        self.next_seed = seeds.end;
        let mut slots = Vec::new();
        wait_until("the pool has room", || {
            slots.extend(self.client.reserve(self.namespace, PROMPT as u32 - slots.len() as u32));
            slots.len() as u64 == PROMPT
        });
        seeds.clone().zip(&slots).for_each(|(seed, held)| self.worker.fill(held, seed));
        let outcomes = self.client.commit(self.namespace, &hashes(seeds.clone()), &slots);
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
        seeds
    }

    /// Blocks of the prompt that a request gets once nothing is "not yet" any more; whatever comes is whole.
    fn hits(&self, seeds: Range<u64>) -> usize {
        let reply = self.client.lookup_settled(self.namespace, &hashes(seeds.clone()));
        let group = &reply.groups[0];
        for (seed, slot) in seeds.zip(&group.slots()) {
            assert!(self.worker.read(*slot) == pattern(seed, BYTES), "block {seed} has other bytes");
        }
        self.client.release(reply.lease);
        group.slots().len()
    }

    /// Blocks among these that are hits, each asked for alone.
    fn each(&self, seeds: Range<u64>) -> usize {
        seeds.map(|seed| self.hits(seed..seed + 1)).sum()
    }

    fn old(&self, prompt: u64) -> Range<u64> {
        prompt * PROMPT..(prompt + 1) * PROMPT
    }

    /// Requests for blocks that only the disk has end soon, as misses, and the pool serves as if nothing was.
    fn serves_without_its_disk(&mut self, prompts: Range<u64>) {
        for prompt in prompts {
            let begun = Instant::now();
            let hits = self.hits(self.old(prompt));
            assert!(hits < PROMPT as usize, "prompt {prompt} cannot come from this disk");
            // Generous: what is tested is that nobody waits for the disk.
            assert!(begun.elapsed() < Duration::from_millis(DEADLINE_MS) + DEADLINE / 4, "{:?}", begun.elapsed());
        }
        let fresh = self.store();
        assert_eq!(self.hits(fresh), PROMPT as usize, "the pool serves on");
        assert!(self.daemon.is_running());
    }

    /// All that was written before comes back once the disk does; nothing stays held or out of use.
    fn recovers(&self, prompts: Range<u64>) {
        self.becomes("serving");
        for prompt in prompts {
            // A block whose load failed is passed over for a while.
            wait_until("the disk serves", || self.hits(self.old(prompt)) == PROMPT as usize);
        }
        wait_until("late reads have ended, and nothing waits to be written", || {
            let held = self.client.inspect();
            (self.tier().late_bytes, held.pinned_bytes, held.fenced_bytes) == (0, 0, 0)
        });
        let audit = call!(self.client, audit, AuditRequest {}).expect("an audit");
        assert_eq!((audit.corrupt, audit.misnamed, audit.complaint), (0, 0, String::new()));
    }
}

#[test]
fn a_late_disk_costs_its_hits_and_its_bytes_land_in_nobodys_slot() {
    for engine in ["auto", "threads"] {
        let Some(mut rig) = Rig::start(engine) else { return };
        rig.mount.harm("read", "slow 1500");
        rig.serves_without_its_disk(0..2);
        assert!(rig.tier().late_bytes > 0, "{:?}", rig.tier());
        // The pool turns over while the reads are still on their way.
        for _ in 0..PROMPTS {
            rig.store();
        }
        rig.mount.calm();
        rig.recovers(0..4);
    }
}

#[test]
fn a_disk_that_fails_is_left_alone_until_it_answers_again() {
    for engine in ["auto", "threads"] {
        let Some(mut rig) = Rig::start(engine) else { return };
        rig.mount.harm("read,write,sync", EIO);
        rig.serves_without_its_disk(0..2);
        wait_until("the tier is given up", || rig.tier().state != "serving");
        rig.serves_without_its_disk(2..4);
        rig.mount.calm();
        rig.recovers(4..8);
    }
}

#[test]
fn a_disk_that_hangs_stops_nobody_and_serves_when_it_comes_back() {
    for (engine, is_frozen) in [("auto", false), ("auto", true), ("threads", false), ("threads", true)] {
        let Some(mut rig) = Rig::start(engine) else { return };
        match is_frozen {
            true => rig.mount.freeze(),
            false => rig.mount.harm("read,write,sync", "hang"),
        }
        rig.serves_without_its_disk(0..2);
        wait_until("the tier is given up", || rig.tier().state != "serving");
        rig.serves_without_its_disk(2..4);
        if is_frozen {
            rig.mount.thaw();
        } else {
            assert!(rig.mount.withheld() > 0, "something was asked of the disk");
            rig.mount.calm();
        }
        rig.recovers(4..8);
    }
}

#[test]
fn a_disk_that_takes_no_writes_still_gives_what_it_has() {
    for engine in ["auto", "threads"] {
        // All blocks are to come, however busy the machine is.
        let Some(mut rig) = Rig::beside(engine, None, 60_000) else { return };
        rig.mount.harm("write,sync", EIO);
        for prompt in 0..8 {
            rig.store();
            wait_until("all is tried", || (rig.tier().waiting_blocks, rig.tier().storing_blocks) == (0, 0));
            assert_eq!(rig.hits(rig.old(prompt)), PROMPT as usize, "prompt {prompt}: {:?}", rig.tier());
        }
        assert_eq!(rig.tier().state, "serving");
        assert_eq!(rig.tier().disks[0].trouble, "writes fail (io)");
        let ready = rig.daemon.page("/readyz");
        assert!(ready.contains("ssd: serving: without writes to `") && ready.contains("200 OK"), "{ready}");
        let metrics = rig.daemon.page("/metrics");
        let says =
            |says: &str| metrics.lines().any(|line| line.starts_with("forebay_disk_healthy{") && line.ends_with(says));
        assert!(says("direction=\"load\"} 1") && says("direction=\"store\"} 0"), "{metrics}");
        rig.mount.calm();
        let before = rig.tier().stored_blocks;
        wait_until("it is written to again", || {
            rig.store();
            rig.tier().stored_blocks > before
        });
        rig.recovers(8..10);
        wait_until("the trouble is over", || rig.tier().disks[0].trouble.is_empty());
    }
}

#[test]
fn a_hung_disk_of_two_holds_up_no_store_and_no_load_of_the_other() {
    for engine in ["auto", "threads"] {
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let Some(mut rig) = Rig::beside(engine, Some(&home.path().join("other")), DEADLINE_MS) else { return };
        rig.mount.freeze();
        wait_until("the tier does without it", || {
            rig.store();
            !rig.tier().disks[0].trouble.is_empty()
        });
        // What is stored now goes to the other disk.
        wait_until("all before is tried", || rig.tier().waiting_blocks == 0);
        let before = rig.tier();
        for _ in 0..10 {
            rig.store();
            wait_until("all is tried", || rig.tier().waiting_blocks == 0);
        }
        let stored = rig.tier().stored_blocks - before.stored_blocks;
        assert!(stored >= 450, "{stored} of 500 stored: {:?}", rig.tier());
        assert_eq!((rig.tier().state.as_str(), rig.tier().disks[1].trouble.as_str()), ("serving", ""));
        let ready = rig.daemon.page("/readyz");
        assert!(ready.contains("ssd: serving: without ") && ready.contains("are not answered in time"), "{ready}");
        // Ten prompts that left the pool long ago.
        let hits: usize = (0..10).map(|prompt| rig.each(rig.old(prompt))).sum();
        assert!((100..400).contains(&hits), "{hits} of 500 blocks come from the other disk");
        rig.mount.thaw();
        rig.recovers(10..14);
    }
}

#[test]
fn a_disk_whose_host_goes_down_takes_nobody_along() {
    let Some(mut rig) = Rig::start("auto") else { return };
    rig.mount.end();
    rig.serves_without_its_disk(0..2);
    wait_until("the tier is given up", || rig.tier().state != "serving");
    rig.serves_without_its_disk(2..4);
    let pid = rustix::process::Pid::from_raw(rig.daemon.pid()).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is ours");
    let Rig { daemon, client, worker, .. } = rig;
    drop((client, worker));
    assert!(daemon.finish().0, "it ends well, disk or not");
}

/// Whether a thread of the daemon has a file below this directory open.
fn has_open(daemon: &Daemon, directory: &Path) -> bool {
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let tasks = entries(format!("/proc/{}/task", daemon.pid()).into());
    let mut files = tasks.flat_map(|task| entries(task.path().join("fd")));
    files.any(|file| fs::read_link(file.path()).is_ok_and(|file| file.starts_with(directory)))
}

/// The thread of the disk that hangs stays, and with it the process's mappings, among them the rings of other disks.
#[test]
fn a_disk_that_hangs_keeps_no_other_disk_from_the_next_daemon() {
    for engine in ["auto", "threads"] {
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let other = home.path().join("other");
        File::create(&other).expect("a file");
        let Some(mut rig) = Rig::beside(engine, Some(&other), DEADLINE_MS) else { return };
        rig.mount.harm("read,write,sync", "hang");
        assert!((0..2).map(|prompt| rig.hits(rig.old(prompt))).sum::<usize>() < 2 * PROMPT as usize, "one disk hangs");
        let pages = rig.daemon.address();
        rig.daemon.terminate();
        wait_until("its files are closed", || !has_open(&rig.daemon, &rig.place.pool()));
        let Rig { daemon, client, worker, mut mount, place, .. } = rig;
        drop((client, worker));
        let disk = mount.path().join("disk");
        let next = Daemon::start(&place, &as_str(&arguments(engine, &disk, Some(&other), &pages, DEADLINE_MS)));
        let (client, worker) = support::engine(&place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        // Of two prompts each disk has one, and the pool has the later half of all.
        let is_served = |prompt: u64| {
            let reply = client.lookup_settled(namespace, &hashes(prompt * PROMPT..(prompt + 1) * PROMPT));
            client.release(reply.lease);
            !reply.groups[0].slots().is_empty()
        };
        wait_until("the other disk serves", || (0..2).any(is_served));
        mount.calm();
        assert!(daemon.finish().0, "{engine}: it ends when its disk answers");
        drop((worker, next));
    }
}

#[test]
fn a_daemon_that_a_hung_disk_holds_leaves_its_pool_and_its_addresses_to_the_next() {
    for engine in ["auto", "threads"] {
        let Some(mut rig) = Rig::start(engine) else { return };
        rig.mount.harm("read,write,sync", "hang");
        rig.serves_without_its_disk(0..2);
        let (kept, pages) = (rig.store(), rig.daemon.address());
        rig.daemon.terminate();
        // With its files closed it is gone for everybody but the kernel, which keeps it for its disk.
        wait_until("it has drained", || rig.daemon.log().contains("drained"));
        let Rig { daemon, client, worker, mut mount, place, .. } = rig;
        drop((client, worker));
        wait_until("nobody listens any more", || std::net::TcpStream::connect(&pages).is_err());
        wait_until("its files are closed", || !has_open(&daemon, &place.pool()));
        let next =
            Daemon::start(&place, &as_str(&arguments(engine, &mount.path().join("disk"), None, &pages, DEADLINE_MS)));
        let (client, worker) = support::engine(&place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        tiers::is_served(&client, &worker, namespace, kept);
        mount.calm();
        assert!(daemon.finish().0, "{engine}: it ends when its disk answers");
        wait_until("the disk is taken", || tiers::tier(&client, "ssd").state == "serving");
        wait_until("it serves", || {
            let reply = client.lookup_settled(namespace, &hashes(100..101));
            client.release(reply.lease);
            !reply.groups[0].slots().is_empty()
        });
        assert!(client.inspect().fenced_bytes == 0 && next.pid() > 0);
    }
}
