//! The secret of shared stores, behind the shipped daemon: who has it shares blocks, and nobody else can make one up.

mod command;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod servers;
mod support;

use std::fs::{self, Permissions, set_permissions};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forebay_core::checksum::checksum;
use servers::{Kind, Server};
use support::tiers::*;
use support::*;

const OURS: &str = "5d41402abc4b2a76b9719d911017c592ae8bfc1d0f4c6f3f2d7e0d2f3a1b4c5d";
const THEIRS: &str = "secret of somebody else: as long as it must be";
/// Where a file of `tier.fs` has its block.
const PAGE_BYTES: usize = 4096;

/// Directory and secrets.
struct Shared {
    home: tempfile::TempDir,
}

impl Shared {
    fn new() -> Shared {
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        fs::create_dir(home.path().join("store")).expect("ours");
        Shared { home }
    }

    /// A host that uses the directory, with that secret.
    fn host(&self, secret: Option<&str>) -> Host {
        let directory = self.store().to_str().expect("UTF-8").to_owned();
        self.host_of(&["--tier.fs.directories", &directory], secret)
    }

    fn host_of(&self, tier: &[&str], secret: Option<&str>) -> Host {
        let arguments = [tier, &["--http.address", "127.0.0.1:0"]].concat();
        let file = self.home.path().join("secret");
        let file = file.to_str().expect("UTF-8");
        let mut all = arguments.clone();
        if let Some(secret) = secret {
            fs::write(file, format!("{secret}\n")).expect("ours");
            set_permissions(file, Permissions::from_mode(0o600)).expect("ours");
            all.extend(["--tier.secret_file", file]);
        }
        let place = Place::new();
        let (daemon, client, worker) = serving(&place, &all);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        Host { client, worker, daemon, place, namespace }
    }

    fn store(&self) -> PathBuf {
        self.home.path().join("store")
    }

    /// The files of all blocks.
    fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        walk(&self.store(), &mut found);
        found.sort();
        found
    }
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()) {
        match entry.is_dir() {
            true if !entry.ends_with(".forebay") => walk(&entry, found),
            true => {}
            false => found.push(entry),
        }
    }
}

struct Host {
    client: Client,
    worker: Worker,
    daemon: Daemon,
    /// Behind the daemon that uses it.
    place: Place,
    namespace: u32,
}

impl Host {
    fn store(&self, seeds: Range<u64>) {
        store(&self.client, &self.worker, self.namespace, seeds);
    }

    fn hits(&self, seeds: Range<u64>) {
        is_served(&self.client, &self.worker, self.namespace, seeds);
    }

    fn misses(&self, seeds: Range<u64>) {
        seeds.for_each(|seed| is_missed(&self.client, self.namespace, seed..seed + 1));
    }

    fn event(&self, name: &str) -> f64 {
        let page = self.daemon.page("/metrics");
        let is_it = |line: &&str| line.starts_with("forebay_shared_store_events_total") && line.contains(name);
        page.lines().find(is_it).map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().expect("a number"))
    }

    /// In the counter that alerts watch, and once in the log, with what the cause may be.
    fn tells_of_damage(&self, blocks: u64) {
        let page = self.daemon.page("/metrics");
        let counted = format!("forebay_corrupt_blocks_total{{found_by=\"tier\"}} {blocks}");
        assert!(page.lines().any(|line| line == counted), "{page}");
        wait_until("the log says so", || self.daemon.log().contains("the tier gave damaged blocks"));
        let log = self.daemon.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("the tier gave damaged blocks")).collect();
        assert!(lines.len() < 5 && lines[0].contains("tier.secret_file"), "{lines:?}");
    }

    fn end(self) {
        drop((self.client, self.worker));
        self.daemon.kill();
        drop(self.place);
    }
}

#[test]
fn hosts_with_one_secret_share_a_directory_and_hosts_without_it_take_no_part() {
    let shared = Shared::new();
    let first = shared.host(Some(OURS));
    first.store(0..20);
    let files: Vec<Vec<u8>> = shared.files().iter().map(|path| fs::read(path).expect("ours")).collect();
    assert_eq!(files.len(), 20);
    assert!(files.iter().all(|file| file[8..12] == 2u32.to_le_bytes()), "each has a MAC");
    first.end();

    let second = shared.host(Some(OURS));
    second.hits(0..20);
    assert_eq!(tier(&second.client, "fs").promoted_blocks, 20);
    assert_eq!(second.event("corrupt_blocks"), 0.0);
    second.end();

    // A host without a secret leaves what it cannot read.
    let without = shared.host(None);
    without.misses(0..20);
    without.store(0..20);
    without.store(20..30);
    assert_eq!(without.event("corrupt_blocks"), 0.0);
    without.end();
    let now: Vec<Vec<u8>> = shared.files().iter().map(|path| fs::read(path).expect("ours")).collect();
    assert_eq!((now.len(), files.iter().filter(|file| now.contains(file)).count()), (30, 20));

    // What it stored counts as damaged, and is replaced: by a store, and after a load.
    let third = shared.host(Some(OURS));
    third.store(20..25);
    third.misses(25..30);
    assert_eq!(third.event("corrupt_blocks"), 5.0);
    third.store(25..30);
    third.end();
    let fourth = shared.host(Some(OURS));
    fourth.hits(0..30);
    fourth.end();

    let theirs = shared.host(Some(THEIRS));
    theirs.misses(0..10);
    assert_eq!(theirs.event("corrupt_blocks"), 10.0);
    theirs.tells_of_damage(10);
    theirs.store(0..10);
    theirs.end();
    let theirs = shared.host(Some(THEIRS));
    theirs.hits(0..10);
    assert!(!theirs.daemon.log().contains(THEIRS) && !theirs.daemon.log().contains(OURS));
}

/// They know the format and can compute every checksum.
#[test]
fn nobody_without_the_secret_can_change_make_up_or_rename_a_block() {
    let shared = Shared::new();
    let host = shared.host(Some(OURS));
    host.store(0..8);
    host.end();
    let files = shared.files();
    let read = |at: usize| fs::read(&files[at]).expect("ours");
    let reseal = |file: &mut [u8]| {
        let seal = checksum(&file[..88]).to_le_bytes();
        file[88..96].copy_from_slice(&seal);
    };
    let (first, second) = (read(0), read(1));
    // Two files are swapped; then two blocks under each other's headers.
    fs::write(&files[0], &second).expect("ours");
    fs::write(&files[1], &first).expect("ours");
    let (mut third, mut fourth) = (read(2), read(3));
    third[PAGE_BYTES..].swap_with_slice(&mut fourth[PAGE_BYTES..]);
    fs::write(&files[2], &third).expect("ours");
    fs::write(&files[3], &fourth).expect("ours");
    // A block of another name is renamed in its header too.
    let mut renamed = second.clone();
    renamed[..72].copy_from_slice(&read(4)[..72]);
    reseal(&mut renamed);
    fs::write(&files[4], &renamed).expect("ours");
    // A block that is made up, in the version without a MAC.
    let mut forged = read(5);
    forged[PAGE_BYTES..PAGE_BYTES + 100].fill(0x66);
    let sum = checksum(&forged[PAGE_BYTES..PAGE_BYTES + BYTES as usize]);
    forged[8] = 1;
    forged[72..80].copy_from_slice(&sum.to_le_bytes());
    forged[80..88].fill(0);
    reseal(&mut forged);
    fs::write(&files[5], &forged).expect("ours");

    let host = shared.host(Some(OURS));
    let is_right = |seed: &u64| {
        let hex: String = hash(*seed).iter().map(|byte| format!("{byte:02x}")).collect();
        files[6..].iter().any(|path| path.to_string_lossy().ends_with(&hex))
    };
    let (right, wrong): (Vec<u64>, Vec<u64>) = (0..8).partition(is_right);
    right.iter().for_each(|seed| host.hits(*seed..seed + 1));
    wrong.iter().for_each(|seed| host.misses(*seed..seed + 1));
    let left = shared.files();
    assert_eq!((left.len(), host.event("corrupt_blocks")), (2, 6.0), "the right ones alone are left: {left:?}");
    // However many there are, the log tells of them at most every ten seconds.
    assert_eq!(host.daemon.says("shared objects are damaged, or of another secret", 1), 1);
    wrong.iter().for_each(|seed| host.store(*seed..seed + 1));
    host.end();
    shared.host(Some(OURS)).hits(0..8);
}

#[test]
fn a_server_is_shared_by_hosts_with_one_secret_and_others_leave_its_values_alone() {
    let (shared, server) = (Shared::new(), Server::on_port(Kind::Redis, &[]));
    let url = server.tcp_url();
    // Blocks of three values.
    let tier = ["--tier.redis.urls", &url, "--tier.redis.value_bytes", "8KiB"];
    let host = |secret| shared.host_of(&tier, secret);
    let first = host(Some(OURS));
    first.store(0..10);
    assert_eq!(server.admin().must(&["DBSIZE"]), "30");
    first.end();
    let without = host(None);
    without.misses(0..10);
    without.store(0..10);
    assert_eq!(server.admin().must(&["DBSIZE"]), "60", "each has names of its own");
    without.end();
    let (second, without) = (host(Some(OURS)), host(None));
    second.hits(0..10);
    without.hits(0..10);
    assert_eq!((second.event("corrupt_blocks"), second.event("foreign_values")), (0.0, 0.0));
    second.end();
    without.end();

    let theirs = host(Some(THEIRS));
    theirs.misses(0..5);
    assert_eq!(theirs.event("corrupt_blocks"), 5.0);
    theirs.tells_of_damage(5);
    theirs.store(0..5);
    theirs.end();
    host(Some(THEIRS)).hits(0..5);

    // Somebody writes a byte into the second part of each: seal and header stay right.
    let names = server.admin().must(&["KEYS", "*v2:1"]);
    for name in names.split_whitespace().filter(|name| name.contains("v2:1")) {
        server.admin().must(&["SETRANGE", name, "5000", "x"]);
    }
    let ours = host(Some(OURS));
    ours.misses(0..10);
    assert_eq!(ours.event("corrupt_blocks"), 10.0);
    ours.store(0..10);
    ours.end();
    host(Some(OURS)).hits(0..10);
}

#[test]
fn a_secret_that_is_none_stops_the_start_with_a_hint_and_is_shown_nowhere() {
    let shared = Shared::new();
    let (directory, file) = (shared.store(), shared.home.path().join("key"));
    let (directory, file) = (directory.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    let tier = ["--tier.fs.directories", directory, "--tier.secret_file", file];
    for (text, says) in [(None, "cannot read"), (Some(""), "empty"), (Some(&OURS[..31]), "too short")] {
        if let Some(text) = text {
            fs::write(file, text).expect("ours");
        }
        let (is_success, log) = Daemon::spawn(&Place::new(), &tier).finish();
        assert!(!is_success && log.contains(says) && log.contains("hint: "), "{log}");
        assert!(log.contains("tier.secret_file") && !log.contains(&OURS[..31]), "{log}");
    }
    fs::write(file, OURS).expect("ours");
    set_permissions(file, Permissions::from_mode(0o644)).expect("ours");
    let (place, shown) = (Place::new(), command::run(&[&["config"][..], &tier].concat()));
    assert!(shown.out.contains(&format!("tier.secret_file = \"{file}\"")), "{}", shown.out);
    let judged = command::run(&[&["doctor"][..], &tier].concat());
    assert!(judged.out.contains("each block has a MAC"), "{}", judged.out);
    let (daemon, client, _worker) = serving(&place, &tier);
    let inspected = format!("{:?}", client.inspect());
    assert_eq!(daemon.log().matches("chmod o-r").count(), 1, "{}", daemon.log());
    assert!(!format!("{shown:?}{judged:?}{inspected}{}", daemon.log()).contains(OURS));
}
