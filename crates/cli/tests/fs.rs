//! The filesystem tier behind the shipped daemon: a mount that hangs, a store that two hosts share.

#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
mod support;
#[path = "../../io/tests/fs/volume.rs"]
mod volume;

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_rpc::proto::LookupReply;
use fuse::hanging::{Hung, each_kind};
use support::tiers::*;
use support::*;
use tonic::Streaming;

/// A tenth of it is far more than a lookup takes, and far less than a mount is waited for.
const DEADLINE_MS: u64 = 10_000;
/// A lookup that ends does so long before.
const PATIENCE: Duration = Duration::from_millis(100);

fn arguments<'a>(directory: &'a str, deadline_ms: &'a str, disk: Option<&'a str>) -> Vec<&'a str> {
    let mut arguments = vec!["--tier.fs.directories", directory, "--tier.fs.timeout_ms", "1000"];
    arguments.extend(["--tier.fs.load_deadline_ms", deadline_ms, "--http.address", "127.0.0.1:0"]);
    arguments.extend(["--tier.ssd.load_deadline_ms", deadline_ms]);
    if let Some(disk) = disk {
        arguments.extend(["--tier.ssd.disks", disk, "--tier.ssd.capacity_bytes", "64MiB"]);
        arguments.extend(["--tier.ssd.admission", "all"]);
    }
    arguments
}

/// Blocks 0 to 100 are on the mount alone, 100 to 200 on the disk as well, and the pool has none.
#[test]
fn a_mount_that_hangs_costs_its_own_hits_and_nobody_waits_for_it() {
    each_kind(|mount| {
        let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
        let (disk, deadline_ms) = (home.path().join("ssd"), DEADLINE_MS.to_string());
        let directory = mount.path().to_str().expect("a path in UTF-8").to_owned();
        for (disk, seeds) in [(None, 0..100), (Some(&disk), 100..200)] {
            let disk = disk.map(|path| path.to_str().expect("a path in UTF-8"));
            let (daemon, client, worker) = serving(&place, &arguments(&directory, &deadline_ms, disk));
            let namespace = client.namespace("t", vec![group()]).expect("a namespace");
            store(&client, &worker, namespace, seeds);
            lose_pool(&place, daemon, (client, worker));
        }
        let (daemon, client, worker) = serving(&place, &arguments(&directory, &deadline_ms, disk.to_str()));
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        is_served(&client, &worker, namespace, 0..10);

        let mount_hangs_whole = mount.hangs_whole();
        let hung = Hung::new(mount);
        let mut longest = Duration::ZERO;
        for round in 0..40 {
            let seeds = [10 + round % 4 * 10..20 + round % 4 * 10, 100 + round % 10 * 10..110 + round % 10 * 10];
            for seeds in seeds {
                let begun = Instant::now();
                let reply = client.lookup(namespace, &hashes(seeds));
                longest = longest.max(begun.elapsed());
                client.release(reply.lease);
            }
        }
        assert!(longest < Duration::from_millis(DEADLINE_MS / 10), "a lookup took {longest:?}");
        (10..50).step_by(10).for_each(|first| is_missed(&client, namespace, first..first + 10));
        (100..150).step_by(10).for_each(|first| is_served(&client, &worker, namespace, first..first + 10));
        // A FIFO has no length, so that no lookup leads to a load.
        if mount_hangs_whole {
            wait_until("the tier is sick", || {
                (10..50).step_by(10).for_each(|first| is_missed(&client, namespace, first..first + 10));
                daemon.page("/metrics").contains("forebay_tier_state{tier=\"fs\",state=\"sick\"} 1")
            });
            let ready = daemon.page("/readyz");
            assert!(ready.starts_with("HTTP/1.1 200 OK") && ready.contains("fs: sick"), "{ready}");
            assert!(ready.contains("ssd: serving"), "{ready}");
        }
        assert!(daemon.page("/livez").starts_with("HTTP/1.1 200 OK"));
        // What the engine computes meanwhile is stored, on the disk at least.
        let slots = client.reserve(namespace, 10);
        (500..510).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
        let outcomes = client.commit(namespace, &hashes(500..510), &slots);
        assert_eq!(outcomes, vec![forebay_rpc::proto::CommitOutcome::CommitStored; 10]);

        drop(hung);
        wait_until("the tier serves", || {
            client.release(client.lookup_settled(namespace, &hashes(90..100)).lease);
            tier(&client, "fs").state == "serving"
        });
        wait_until("its blocks come up", || {
            let reply = client.lookup_settled(namespace, &hashes(50..90));
            client.release(reply.lease);
            reply.groups[0].states == [1; 40]
        });
        is_served(&client, &worker, namespace, 50..90);
        wait_until("no slot waits for the mount", || tier(&client, "fs").late_bytes == 0);

        // It says that it is done while the mount hangs. The process itself may stay until the mount answers: the
        // kernel lets no thread go whose request a server in user space has read.
        let hung = Hung::new(mount);
        is_missed(&client, namespace, 20..40);
        drop((client, worker));
        daemon.terminate();
        wait_until("the daemon has drained", || daemon.log().contains("drained"));
        drop(hung);
        assert!(daemon.finish().0);
    });
}

/// The mount answers nothing for so long, so what ends lookups is not the tier.
fn patient(directory: &str) -> Vec<&str> {
    let directories = ["--tier.fs.directories", directory];
    [&directories[..], &["--tier.fs.timeout_ms", "60000", "--tier.fs.load_deadline_ms", "60000"]].concat()
}

/// Asks for blocks that only a mount which hangs could have; the later replies, and the lease.
fn waiting(client: &Client, namespace: u32, seeds: Range<u64>) -> (Streaming<LookupReply>, u64) {
    let mut replies = client.replies(namespace, &hashes(seeds.clone()));
    let first = client.next(&mut replies, DEADLINE).expect("a reply in time").expect("a first one");
    assert_eq!(first.groups[0].states, vec![2; seeds.count()]);
    (replies, first.lease)
}

#[test]
fn lookups_that_wait_for_a_mount_hold_nobody_up_and_end_with_their_lease_their_session_and_the_daemon() {
    each_kind(|mount| {
        if !mount.hangs_whole() {
            return;
        }
        let place = Place::new();
        let directory = mount.path().to_str().expect("a path in UTF-8").to_owned();
        let arguments = patient(&directory);
        let (daemon, client, worker) = serving(&place, &arguments);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..100);
        lose_pool(&place, daemon, (client, worker));
        let (daemon, client, worker) = serving(&place, &arguments);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        let hung = Hung::new(mount);

        let thousand: Vec<_> = (0..1000).map(|_| waiting(&client, namespace, 0..10)).collect();
        let begun = Instant::now();
        for _ in 0..100 {
            drop(waiting(&client, namespace, 0..10));
        }
        assert!(begun.elapsed() < Duration::from_secs(2), "100 lookups took {:?}", begun.elapsed());
        thousand.iter().for_each(|(_, lease)| client.release(*lease));
        for (mut replies, _) in thousand {
            assert!(client.next(&mut replies, DEADLINE).expect("a release ends it").is_none());
        }

        let (mut replies, _) = waiting(&client, namespace, 0..10);
        let next = Client::open(&place, "a", 1);
        assert!(client.next(&mut replies, DEADLINE).expect("the session was replaced").is_none());

        let namespace = next.namespace("t", vec![group()]).expect("a namespace");
        let (mut replies, lease) = waiting(&next, namespace, 0..10);
        daemon.terminate();
        assert!(next.next(&mut replies, DEADLINE).expect("a daemon that drains stops waiting").is_none());
        next.release(lease);
        drop((client, next, worker));
        wait_until("the daemon has drained", || daemon.log().contains("drained"));
        drop(hung);
        assert!(daemon.finish().0);
    });
}

#[test]
fn lookups_that_wait_for_a_mount_are_limited_and_give_way_to_others() {
    each_kind(|mount| {
        if !mount.hangs_whole() {
            return;
        }
        let place = Place::new();
        let directory = mount.path().to_str().expect("a path in UTF-8").to_owned();
        let arguments = patient(&directory);
        let (_daemon, greedy, worker) =
            serving(&place, &[&arguments[..], &["--limits.lookups_in_flight", "8"]].concat());
        let (modest, other) = engine(&place, "b", BYTES);
        let [namespace, own] =
            [&greedy, &modest].map(|client| client.namespace("t", vec![group()]).expect("a namespace"));
        store(&modest, &other, own, 0..10);
        let hung = Hung::new(mount);

        let (mut first, _) = waiting(&modest, own, 5000..5010);
        let mut all: Vec<_> = (0..20).map(|_| waiting(&greedy, namespace, 5000..5010).0).collect();
        for replies in &mut all[..13] {
            assert!(greedy.next(replies, DEADLINE).expect("the oldest ends").is_none());
        }
        let waits = |client: &Client, replies: &mut Streaming<LookupReply>| client.next(replies, PATIENCE).is_err();
        assert!(all[13..].iter_mut().all(|replies| waits(&greedy, replies)), "seven places are left");
        let reply = modest.lookup(own, &hashes(0..10));
        assert_eq!(reply.groups[0].states, [1; 10], "what is in the pool is found");
        assert!(waits(&modest, &mut first), "the modest one loses nothing");

        // A session that ends leaves its places.
        let next = Client::open(&place, "a", 1);
        for replies in &mut all[13..] {
            assert!(greedy.next(replies, DEADLINE).expect("the session was replaced").is_none());
        }
        let mut more: Vec<_> = (0..7).map(|_| waiting(&modest, own, 5000..5010).0).collect();
        assert!(waits(&modest, &mut first) && more.iter_mut().all(|replies| waits(&modest, replies)));
        drop((hung, next, worker, other));
    });
}

#[test]
fn a_client_that_waits_for_a_million_keys_slows_down_no_other() {
    each_kind(|mount| {
        if !mount.hangs_whole() {
            return;
        }
        let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
        let directory = mount.path().to_str().expect("a path in UTF-8").to_owned();
        let disk = home.path().join("ssd");
        let mut arguments = patient(&directory);
        arguments.extend(["--tier.ssd.disks", disk.to_str().expect("a path in UTF-8")]);
        arguments.extend(["--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"]);
        let (daemon, client, worker) = serving(&place, &arguments);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..200);
        lose_pool(&place, daemon, (client, worker));
        let (_daemon, client, worker) = serving(&place, &arguments);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        let (hostile, other) = engine(&place, "b", BYTES);
        let its = hostile.namespace("t", vec![group()]).expect("a namespace");
        let hung = Hung::new(mount);

        let wanted: Vec<_> = (0..16).map(|_| waiting(&hostile, its, 100_000..165_536)).collect();
        let begun = Instant::now();
        (0..200).step_by(20).for_each(|first| is_served(&client, &worker, namespace, first..first + 20));
        println!("ten lookups took {:?}", begun.elapsed());
        // Each paused for a second.
        assert!(begun.elapsed() < Duration::from_secs(5), "ten lookups took {:?}", begun.elapsed());
        drop((wanted, hung, hostile, other));
    });
}

#[test]
fn another_host_hits_what_one_has_stored_in_a_directory() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().to_str().expect("a path in UTF-8");
    let (one, other) = (Place::new(), Place::new());
    let (_one, client, worker) = serving(&one, &["--tier.fs.directories", path]);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    let arguments = ["--tier.fs.directories", path, "--tier.fs.read_only", "true", "--http.address", "127.0.0.1:0"];
    let (other, client, worker) = serving(&other, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    (0..100).step_by(50).for_each(|first| is_served(&client, &worker, namespace, first..first + 50));
    other.says("cannot write to the tier; it is used read-only", 1);
    // What nobody wants to write is not broken because it is not written.
    let page = other.page("/metrics");
    let healthy: Vec<&str> = page.lines().filter(|line| line.starts_with("forebay_shared_store_healthy{")).collect();
    assert!(healthy.len() == 1 && healthy[0].ends_with("direction=\"load\"} 1"), "{healthy:?}");
}

/// A lookup of blocks that are there asks for them; what was asked for by name alone is no byte.
#[test]
fn loads_and_stores_move_bytes_and_questions_move_none() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().to_str().expect("a path in UTF-8");
    let arguments = ["--tier.fs.directories", path, "--http.address", "127.0.0.1:0"];
    let (one, other) = (Place::new(), Place::new());
    let (one, client, worker) = serving(&one, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    let moved = |daemon: &Daemon, op: &str| {
        let page = daemon.page("/metrics");
        let begin = format!("forebay_tier_operation_bytes_total{{tier=\"fs\",op=\"{op}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&begin)).unwrap_or_else(|| panic!("{page}"));
        value.parse::<u64>().expect("a number")
    };
    assert_eq!(["load", "store", "exists"].map(|op| moved(&one, op)), [0, 50 * BYTES, 0]);
    let (other, client, worker) = serving(&other, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 0..50);
    let moves = ["load", "store", "exists", "touch", "remove"].map(|op| moved(&other, op));
    assert_eq!(moves, [50 * BYTES, 0, 0, 0, 0]);
}

/// The daemon may be of root, and the directory of a group.
#[test]
fn links_that_others_put_into_a_shared_directory_lead_the_daemon_nowhere() {
    for link in [".forebay/usage", ".forebay", "a namespace"] {
        let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
        let path = home.path().join("shared");
        std::fs::create_dir(&path).expect("a directory");
        // A grant is for ten blocks.
        let arguments = ["--tier.fs.directories", path.to_str().expect("a path"), "--tier.fs.capacity_bytes", "64MiB"];
        let (daemon, client, worker) = serving(&place, &[&arguments[..], &["--http.address", "127.0.0.1:0"]].concat());
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..50);
        let is_namespace = |name: &String| name.len() == 32;
        let names = std::fs::read_dir(&path).expect("a folder").map(|entry| entry.expect("an entry").file_name());
        let own = names.map(|name| name.to_string_lossy().into_owned()).find(is_namespace).expect("a namespace");
        let (name, theirs) = (path.join(if link == "a namespace" { &own } else { link }), home.path().join("theirs"));
        std::fs::rename(&name, &theirs).expect("it is moved");
        std::os::unix::fs::symlink(&theirs, &name).expect("a link");
        let bytes = || match theirs.is_dir() {
            true => files(&theirs, 0).into_iter().map(|(_, name)| name.into_bytes()).collect(),
            false => vec![std::fs::read(&theirs).expect("a file")],
        };
        let before = bytes();
        store(&client, &worker, namespace, 100..150);
        assert_eq!(bytes(), before, "{link}");
        let failed = "event=\"failed_stores\"} ";
        let stores = daemon
            .page("/metrics")
            .lines()
            .filter_map(|line| line.split(failed).nth(1)?.parse::<u64>().ok())
            .sum::<u64>();
        assert!(stores > 0, "{link}");
    }
}

/// By default the directory has no capacity, so that the volume is the only limit.
#[test]
fn blocks_are_stored_again_after_the_volume_of_a_shared_directory_was_full() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let Some(volume) = volume::Volume::of_bytes(home, 4 << 20) else { return };
    let (place, path) = (Place::new(), volume.path().to_str().expect("a path in UTF-8"));
    let arguments = ["--tier.fs.directories", path, "--http.address", "127.0.0.1:0"];
    let (daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..200);
    let events = |name: &str| {
        let (page, name) = (daemon.page("/metrics"), format!("event=\"{name}\"}} "));
        page.lines().filter_map(|line| line.split(&name).nth(1)?.parse::<u64>().ok()).sum::<u64>()
    };
    assert!(events("full_stores") > 0, "the volume is full");
    let mut next = 1000;
    wait_until("room is made", || {
        store(&client, &worker, namespace, next..next + 1);
        next += 1;
        events("evicted_blocks") > 0
    });
    store(&client, &worker, namespace, next..next + 5);
    lose_pool(&place, daemon, (client, worker));
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, next..next + 5);
}

/// In the middle of a rolling upgrade.
#[test]
fn blocks_that_a_later_version_wrote_are_misses_and_stay_for_it() {
    let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let arguments = ["--tier.fs.directories", home.path().to_str().expect("a path in UTF-8")];
    let (daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..10);
    lose_pool(&place, daemon, (client, worker));
    let blocks = || paths(home.path()).into_iter().filter(|path| !path.starts_with(home.path().join(".forebay")));
    for path in blocks() {
        let mut bytes = std::fs::read(&path).expect("a block");
        bytes[8..12].copy_from_slice(&2u32.to_le_bytes());
        let seal = forebay_core::checksum::checksum(&bytes[..88]);
        bytes[88..96].copy_from_slice(&seal.to_le_bytes());
        std::fs::write(&path, bytes).expect("it is written");
    }
    let contents = || blocks().map(|path| std::fs::read(path).expect("a block")).collect::<Vec<_>>();
    let before = contents();
    assert_eq!(before.len(), 10);
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_missed(&client, namespace, 0..10);
    // The lookup is answered with its first miss.
    wait_until("no load is under way", || tier(&client, "fs").loading_blocks == 0);
    assert!(contents() == before, "no load removed a file");
    store(&client, &worker, namespace, 0..10);
    is_served(&client, &worker, namespace, 0..10);
    assert!(contents() == before, "the files are as they were");
}

/// Files below a folder, in an order that stays.
fn paths(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut found: Vec<_> = entries.flat_map(|path| if path.is_dir() { paths(&path) } else { vec![path] }).collect();
    found.sort();
    found
}

#[test]
fn one_missing_directory_of_two_is_done_without_and_taken_up_when_it_comes() {
    let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let [there, missing] = ["there", "missing"].map(|name| home.path().join(name));
    std::fs::create_dir(&there).expect("a directory");
    let named = format!("{:?}", [&there, &missing]);
    let arguments = ["--tier.fs.directories", &named, "--http.address", "127.0.0.1:0"];
    let (daemon, client, worker) = serving(&place, &arguments);
    let healthy = |path: &Path| {
        let (page, store) = (daemon.page("/metrics"), format!("store=\"{}\",direction=\"load\"}} ", path.display()));
        let line = page.lines().find(|line| line.starts_with("forebay_shared_store_healthy") && line.contains(&store));
        line.expect("each directory is named").ends_with(" 1")
    };
    assert!(healthy(&there) && !healthy(&missing));
    let ready = daemon.page("/readyz");
    assert!(ready.starts_with("HTTP/1.1 200 OK"), "{ready}");
    assert!(
        ready.contains(&format!("fs: serving: without `{}`: cannot use the directory", missing.display())),
        "{ready}"
    );
    let told = tier(&client, "fs").stores.into_iter().find(|store| !store.is_healthy).expect("it is told");
    assert_eq!(Path::new(&told.name), missing);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    assert_eq!(files(&there, 0).iter().filter(|(depth, name)| *depth > 1 && name.contains('-')).count(), 50);

    std::fs::create_dir(&missing).expect("a directory");
    wait_until("it is taken up", || healthy(&missing));
    let ready = daemon.page("/readyz");
    assert!(ready.contains("fs: serving\n"), "{ready}");
    store(&client, &worker, namespace, 100..150);
    assert!(paths(&missing).len() > 10, "it has its share");
    lose_pool(&place, daemon, (client, worker));
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 100..150);
}

/// Names of files below a folder, with their depth.
fn files(folder: &Path, depth: usize) -> Vec<(usize, String)> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let found = entries.flat_map(|entry| match entry.file_type().expect("a kind").is_dir() {
        true => files(&entry.path(), depth + 1),
        false => vec![(depth, entry.file_name().to_string_lossy().into_owned())],
    });
    found.collect()
}

/// `storage_backends`, `stream_number`, `shard_data_dir`, and the line that its users know.
#[test]
fn the_options_of_a_ucm_store_reach_the_tier_and_each_transfer_is_told() {
    let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let directories = ["a", "b"].map(|name| home.path().join(name));
    directories.iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
    let named = format!("{directories:?}");
    let mut arguments = vec!["--tier.fs.directories", &named, "--tier.fs.streams", "3", "--tier.fs.buffers", "2"];
    arguments.extend(["--tier.fs.shard_folders", "false", "--tier.fs.io_direct", "true", "--log.level", "debug"]);
    let (daemon, client, worker) = serving(&place, &arguments);
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    // A thread takes its name when it first runs.
    wait_until("three threads for each directory", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("its threads");
        tasks.filter_map(name).filter(|name| name.trim() == "forebay-fs").count() == 6
    });
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    // The log is written beside, and not to its end by a daemon that is killed.
    let told = |daemon: &Daemon, direction: &str| {
        let blocks = || transfers(&daemon.log(), direction).map(|line| figure(line, "count")).sum::<f64>();
        wait_until("all transfers are told", || blocks() >= 50.0);
    };
    told(&daemon, "store");
    for path in &directories {
        let blocks: Vec<_> = files(path, 0).into_iter().filter(|(_, name)| name.contains('-')).collect();
        assert!(blocks.len() > 10 && blocks.iter().all(|(depth, _)| *depth == 1), "{blocks:?}");
    }
    lose_pool(&place, daemon, (client, worker));
    let (daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, 0..50);
    told(&daemon, "load");
    let log = daemon.log();
    for direction in ["store", "load"] {
        let blocks = transfers(&log, direction).map(|line| {
            let number = |name| figure(line, name);
            let gb_per_s: f64 = number("bytes") / number("time_ms") / 1e6;
            // Both are rounded, and a slow one to nothing.
            let is_speed = (gb_per_s - number("gb_per_s")).abs() <= 0.001 + gb_per_s / 20.0;
            assert!(number("time_ms") > 0.0 && is_speed && number("failed") == 0.0, "{line}");
            assert_eq!(number("bytes"), number("count") * BYTES as f64, "{line}");
            number("count")
        });
        assert_eq!(blocks.sum::<f64>(), 50.0, "{direction}");
    }
}

/// Lines of a log that tell of transfers in this direction.
fn transfers<'a>(log: &'a str, direction: &'a str) -> impl Iterator<Item = &'a str> {
    log.lines().filter(move |line| line.contains(" transfer task=") && line.contains(direction))
}

/// A number in a line of the log; -1 if it is not there.
fn figure(line: &str, name: &str) -> f64 {
    let figure = line.split(&format!(" {name}=")).nth(1).and_then(|rest| rest.split(' ').next());
    figure.and_then(|figure| figure.trim_matches('"').parse().ok()).unwrap_or(-1.0)
}

#[test]
fn a_stop_leaves_a_shared_directory_to_the_next_host_at_once() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let directory = home.path().to_str().expect("a path in UTF-8");
    let lease = home.path().join(".forebay/sweeper");
    for _ in 0..2 {
        let place = Place::new();
        let (daemon, client, worker) = serving(&place, &arguments(directory, "1000", None));
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        store(&client, &worker, namespace, 0..10);
        wait_until("it sweeps", || lease.exists());
        drop((client, worker));
        daemon.terminate();
        let (is_well, output) = daemon.finish();
        assert!(is_well, "{output}");
        assert!(!lease.exists(), "the next host waits until the lease has expired");
    }
}
