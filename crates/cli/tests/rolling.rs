//! A rolling upgrade and the way back, with two builds: `make rolling`.
//!
//! The next release is this build, made with `--cfg forebay_next`: it writes later versions of the pool, of disks and
//! of blocks in shared stores. This release is the command that `FOREBAY_BIN` names.

#![cfg(forebay_next)]

#[path = "../../io/tests/object/s3.rs"]
mod s3;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod servers;
mod support;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use s3::{BUCKET, Moto};
use servers::{BOTH, Server};
use support::tiers::*;
use support::*;

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "secret")];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Release {
    This,
    Next,
}

use Release::{Next, This};

impl Release {
    fn binary(self) -> PathBuf {
        let this = || std::env::var_os("FOREBAY_BIN").expect("the command of this release\nhint: run `make rolling`");
        if self == This { this().into() } else { env!("CARGO_BIN_EXE_forebay").into() }
    }
}

/// A host's daemon of one release, and an engine of this one: both speak the same protocol.
struct Host {
    client: Client,
    worker: Worker,
    daemon: Daemon,
    namespace: u32,
}

impl Host {
    fn start(release: Release, place: &mut Place, arguments: &[&str]) -> Host {
        place.run_next(&release.binary());
        let arguments = [arguments, &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"]].concat();
        let daemon = Daemon::start_in(place, &arguments, &KEYS);
        let (client, worker) = engine(place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        Host { client, worker, daemon, namespace }
    }

    /// Once its tiers serve.
    fn serving(release: Release, place: &mut Place, arguments: &[&str]) -> Host {
        let host = Host::start(release, place, arguments);
        wait_until("the tiers serve", || host.client.inspect().tiers.iter().all(|tier| tier.state == "serving"));
        host
    }

    fn store(&self, seeds: Range<u64>) {
        store(&self.client, &self.worker, self.namespace, seeds);
    }

    fn hits(&self, seeds: Range<u64>) {
        is_served(&self.client, &self.worker, self.namespace, seeds);
    }

    fn misses(&self, seeds: Range<u64>) {
        seeds.for_each(|seed| is_missed(&self.client, self.namespace, seed..seed + 1));
    }

    /// Of blocks that were read and were not what they should be.
    fn complaints(&self) -> Vec<String> {
        let names = ["corrupt", "foreign"];
        let is_one = |line: &&str| !line.starts_with('#') && names.iter().any(|name| line.contains(name));
        let page = self.daemon.page("/metrics");
        page.lines().filter(is_one).filter(|line| !line.ends_with(" 0")).map(str::to_owned).collect()
    }

    fn end(self) {
        drop((self.client, self.worker));
        self.daemon.kill();
    }
}

fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            match path.is_dir() {
                true if !path.ends_with(".forebay") => folders.push(path),
                true => {}
                false => found.push((path.clone(), fs::read(path).expect("ours"))),
            }
        }
    }
    found.sort();
    found
}

/// Hosts of both releases on one store whose names have no version, at the same time. `blocks` reads the store.
fn both_on_one_store<B: PartialEq>(arguments: &[&str], blocks: impl Fn() -> Vec<B>) {
    let (mut one, mut other) = (Place::new(), Place::new());
    let old = Host::serving(This, &mut one, arguments);
    old.store(0..20);
    let new = Host::serving(Next, &mut other, arguments);
    new.hits(0..20);
    new.store(20..40);
    let before = blocks();
    assert_eq!(before.len(), 40);
    // A block of the next release is a miss, and stays where this release would store it.
    old.misses(20..40);
    old.store(20..40);
    assert!(blocks() == before, "nothing of the next release was changed");
    assert_eq!((old.complaints(), new.complaints()), (vec![], vec![]));
    old.end();
    new.end();

    // The way back, with empty pools.
    let (mut one, mut other) = (Place::new(), Place::new());
    let old = Host::serving(This, &mut one, arguments);
    old.hits(0..20);
    old.misses(20..40);
    old.store(40..50);
    let new = Host::serving(Next, &mut other, arguments);
    new.hits(0..50);
    assert_eq!((old.complaints(), new.complaints()), (vec![], vec![]));
    assert!(before.iter().all(|block| blocks().contains(block)));
    old.end();
    new.end();
}

#[test]
fn hosts_of_two_releases_share_a_directory() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let directory = home.path().to_str().expect("UTF-8");
    both_on_one_store(&["--tier.fs.directories", directory], || files(home.path()));
}

#[test]
fn hosts_of_two_releases_share_a_bucket() {
    let moto = Moto::start();
    let endpoint = moto.endpoint();
    let list = || {
        let list = moto.ask(&format!("GET /{BUCKET}?list-type=2"), b"");
        // The entity tag is a sum of the object's bytes.
        let objects = list.split("<Contents>").skip(1);
        let part = |object: &str, tag: &str| object.split(tag).nth(1).expect("S3 says it").to_owned();
        objects.map(|object| (part(object, "Key>"), part(object, "ETag>"), part(object, "LastModified>"))).collect()
    };
    both_on_one_store(&["--tier.object.bucket", BUCKET, "--tier.object.endpoint", &endpoint], list);
}

/// The names contain the version, so each release has blocks of its own there.
#[test]
fn hosts_of_two_releases_share_a_redis() {
    for kind in BOTH {
        let server = Server::start(kind);
        let (url, mut admin) = (server.url(), server.admin());
        let mut count = || admin.must(&["DBSIZE"]);
        let (mut one, mut other) = (Place::new(), Place::new());
        let old = Host::serving(This, &mut one, &["--tier.redis.urls", &url]);
        let new = Host::serving(Next, &mut other, &["--tier.redis.urls", &url]);
        old.store(0..20);
        new.misses(0..20);
        new.store(10..30);
        assert_eq!(count(), "40", "{kind:?}");
        old.end();
        new.end();
        let (mut one, mut other) = (Place::new(), Place::new());
        let old = Host::serving(This, &mut one, &["--tier.redis.urls", &url]);
        let new = Host::serving(Next, &mut other, &["--tier.redis.urls", &url]);
        old.hits(0..20);
        old.misses(20..30);
        new.hits(10..30);
        new.misses(0..10);
        assert_eq!((old.complaints(), new.complaints(), count().as_str()), (vec![], vec![], "40"), "{kind:?}");
        old.end();
        new.end();
    }
}

#[test]
fn a_disk_goes_to_the_next_release_warm_and_waits_for_it_after_the_way_back() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let disk = home.path().join("disk");
    let disks = format!("{:?}", [&disk]);
    let arguments = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"];
    let mut place = Place::new();
    let host = Host::serving(This, &mut place, &arguments);
    host.store(0..50);
    host.end();
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");

    let host = Host::serving(Next, &mut place, &arguments);
    host.hits(0..50);
    host.store(50..80);
    host.end();
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");

    // This release serves without it, and leaves it alone.
    let before = fs::read(&disk).expect("ours");
    let host = Host::start(This, &mut place, &arguments);
    wait_until("the log says why", || host.daemon.log().contains("formatted by another version"));
    host.misses(0..10);
    host.end();
    assert!(fs::read(&disk).expect("ours") == before, "the disk was changed");
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");

    let host = Host::serving(Next, &mut place, &arguments);
    host.hits(0..80);
    assert_eq!(host.complaints(), Vec::<String>::new());
    host.end();
}

/// Memory cannot wait as a disk does: who goes back begins with an empty pool, and says so.
#[test]
fn a_pool_goes_to_the_next_release_warm_and_begins_empty_after_the_way_back() {
    let mut place = Place::new();
    let host = Host::start(This, &mut place, &[]);
    host.store(0..50);
    host.end();
    let host = Host::start(Next, &mut place, &[]);
    host.hits(0..50);
    host.store(50..80);
    host.end();

    let host = Host::start(This, &mut place, &[]);
    assert!(host.daemon.log().contains("the pool is replaced; its blocks are lost"), "{}", host.daemon.log());
    host.misses(0..80);
    host.store(100..120);
    host.end();
    let host = Host::start(Next, &mut place, &[]);
    host.hits(100..120);
    host.misses(0..80);
    host.end();
}
