//! Requests that wait in an engine's queue, behind the shipped daemon: what they want comes up from a tier meanwhile.

mod support;

use forebay_rpc::proto::HintRequest;
use support::tiers::*;
use support::*;

const TIERS: [&str; 2] = ["ssd", "fs"];

/// A daemon over one tier in `directory`, with nothing in its pool, and its blocks `0..1000` on the tier.
fn stored(place: &Place, tier: &str, directory: &tempfile::TempDir, more: &[&str]) -> (Daemon, Client, Worker) {
    let path = directory.path().join(tier).to_str().expect("a path in UTF-8").to_owned();
    let arguments = match tier {
        "ssd" => vec!["--tier.ssd.disks", &path, "--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"],
        _ => {
            std::fs::create_dir(&path).expect("a directory");
            vec!["--tier.fs.directories", &path]
        }
    };
    let arguments = [arguments, vec!["--http.address", "127.0.0.1:0"]].concat();
    let (daemon, client, worker) = serving(place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..1000);
    lose_pool(place, daemon, (client, worker));
    serving(place, &[&arguments, more].concat())
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn states(client: &Client, namespace: u32, seeds: std::ops::Range<u64>) -> Vec<u8> {
    let mut reply = client.lookup(namespace, &hashes(seeds));
    client.release(reply.lease);
    std::mem::take(&mut reply.groups[0].states)
}

#[test]
fn a_request_that_waited_hits_at_once_what_one_that_did_not_is_told_to_wait_for() {
    for name in TIERS {
        let (place, directory) = (Place::new(), directory());
        let (daemon, client, worker) = stored(&place, name, &directory, &[]);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        assert_eq!(states(&client, namespace, 500..540), vec![2; 40], "{name}");

        (0..2).for_each(|request| client.hint(namespace, request, &hashes(request * 40..request * 40 + 40)));
        wait_until("what they want has come up", || tier(&client, name).promoted_blocks >= 80);
        wait_until("all of it", || tier(&client, name).loading_blocks == 0);
        assert_eq!(states(&client, namespace, 0..40), vec![1; 40], "{name}");
        is_served(&client, &worker, namespace, 40..80);

        let metrics = daemon.page("/metrics");
        for (metric, count) in [("prefetches", 80), ("prefetch_hits", 80)] {
            let line = format!("forebay_tier_{metric}_total{{tier=\"{name}\"}} {count}");
            assert!(metrics.lines().any(|other| other == line), "{line} is not in\n{metrics}");
        }
        assert_eq!(client.inspect().pinned_bytes, 0);
    }
}

/// Forty documents of forty blocks: twice what the pool holds, and far less than the disk.
#[test]
fn rounds_larger_than_the_pool_come_from_the_disk_ahead_of_their_requests() {
    const DOCUMENTS: u64 = 40;
    const BLOCKS: u64 = 40;
    for policy in ["default", "lru"] {
        let (place, directory) = (Place::new(), directory());
        let path = directory.path().join("ssd").to_str().expect("a path in UTF-8").to_owned();
        let disk = ["--tier.ssd.disks", &path, "--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"];
        let patient = ["--tier.ssd.load_deadline_ms", "60000", "--pool.policy", policy];
        let (_daemon, client, worker) = serving(&place, &[&disk[..], &patient].concat());
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        let document = |at: u64| at % DOCUMENTS * BLOCKS..(at % DOCUMENTS + 1) * BLOCKS;
        (0..DOCUMENTS).for_each(|at| store(&client, &worker, namespace, document(at)));
        let mut ahead = 0;
        let rounds = DOCUMENTS..3 * DOCUMENTS;
        for at in rounds.clone() {
            client.hint(namespace, at, &hashes(document(at)));
            let mut promoted = u64::MAX;
            wait_until("nothing more comes up", || {
                let now = tier(&client, "ssd");
                let is_quiet = now.loading_blocks == 0 && now.promoted_blocks == promoted;
                promoted = now.promoted_blocks;
                is_quiet
            });
            withdraw(&client, namespace, at);
            let reply = client.lookup(namespace, &hashes(document(at)));
            ahead += u64::from(reply.groups[0].states == [1; BLOCKS as usize]);
            client.release(reply.lease);
            is_served(&client, &worker, namespace, document(at));
        }
        // On a busy machine some are asked for while they still come up.
        let asked = rounds.end - rounds.start;
        assert!(ahead >= asked * 9 / 10, "{policy}: {ahead} of {asked} were there before their request");
        let promoted = tier(&client, "ssd").promoted_blocks;
        assert!(
            promoted >= 3 * DOCUMENTS * BLOCKS / 4,
            "{policy}: {promoted} blocks from the disk: the pool holds them all"
        );
    }
}

fn withdraw(client: &Client, namespace: u32, request: u64) {
    let (session, withdrawn) = (client.welcome.session, vec![request]);
    call!(client, hint, HintRequest { session, namespace, withdrawn, hints: Vec::new() }).expect("it is told");
}

/// The tier may load six blocks a second, after as many at once.
#[test]
fn who_asks_now_does_not_stand_behind_those_who_wait() {
    let (place, directory) = (Place::new(), directory());
    let slow = ["--tier.fs.load_bytes_per_second", "128KiB", "--tier.fs.load_deadline_ms", "60000"];
    let (_daemon, client, worker) = stored(&place, "fs", &directory, &slow);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    client.hint(namespace, 1, &hashes(0..60));
    let loading = || tier(&client, "fs").loading_blocks;
    wait_until("as many are on their way as may be", || loading() >= 16);
    is_served(&client, &worker, namespace, 500..510);
    let came = tier(&client, "fs").promoted_blocks;
    assert!(came < 10 + 26, "{came} blocks came up before those that were asked for");
}
