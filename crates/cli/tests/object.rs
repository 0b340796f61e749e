//! The object tier behind the shipped daemon, on moto's S3 server: hosts that share a bucket, and a store that is slow,
//! lies and dies.

#[path = "../../io/tests/object/s3.rs"]
mod s3;
mod support;

use std::time::{Duration, Instant};

use s3::{BUCKET, Moto};
use support::tiers::*;
use support::*;

/// A tenth of it is far more than a lookup takes, and far less than a store is waited for.
const DEADLINE_MS: u64 = 10_000;
const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "secret")];

fn host(place: &Place, moto: &Moto) -> (Daemon, Client, Worker, u32) {
    let (endpoint, deadline_ms) = (moto.endpoint(), DEADLINE_MS.to_string());
    let mut arguments = vec!["--tier.object.bucket", BUCKET, "--tier.object.endpoint", &endpoint];
    arguments.extend(["--tier.object.load_deadline_ms", &deadline_ms, "--tier.object.timeout_ms", "2000"]);
    let (daemon, client, worker) = serving_in(place, &arguments, &KEYS);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    (daemon, client, worker, namespace)
}

/// The names of all objects in the bucket.
fn names(moto: &Moto) -> Vec<String> {
    let list = moto.ask(&format!("GET /{BUCKET}?list-type=2"), b"");
    list.split("<Key>").skip(1).filter_map(|rest| Some(rest.split_once("</Key>")?.0.to_owned())).collect()
}

#[test]
fn a_host_with_an_empty_pool_hits_what_another_stored() {
    let (moto, one, other) = (Moto::start(), Place::new(), Place::new());
    let (daemon, client, worker, namespace) = host(&one, &moto);
    store(&client, &worker, namespace, 0..100);
    assert_eq!((tier(&client, "object").stored_blocks, names(&moto).len()), (100, 100));
    drop((client, worker));
    daemon.kill();
    let (_daemon, client, worker, namespace) = host(&other, &moto);
    is_served(&client, &worker, namespace, 0..50);
    is_served(&client, &worker, namespace, 50..100);
    let came = tier(&client, "object");
    assert_eq!((came.promoted_blocks, came.hits, client.inspect().hits), (100, 100, 100));
    // From the pool now: the hits are not the bucket's.
    is_served(&client, &worker, namespace, 0..50);
    assert_eq!((tier(&client, "object").hits, client.inspect().hits), (100, 150));
    is_missed(&client, namespace, 200..250);
}

#[test]
fn a_store_that_lies_hangs_or_dies_costs_hits_and_nobody_waits_for_it() {
    let (mut moto, one, other) = (Moto::start(), Place::new(), Place::new());
    let (daemon, client, worker, namespace) = host(&one, &moto);
    store(&client, &worker, namespace, 0..50);
    let first = names(&moto);
    store(&client, &worker, namespace, 50..250);
    drop((client, worker));
    daemon.kill();
    let (mut daemon, client, worker, namespace) = host(&other, &moto);

    // As long as the block, and not it; and one block under another's name.
    let foreign = vec![0x55; BYTES as usize + 96];
    for name in &first {
        assert!(moto.ask(&format!("PUT /{BUCKET}/{name}"), &foreign).contains("200"));
    }
    is_missed(&client, namespace, 0..50);
    is_served(&client, &worker, namespace, 50..100);
    assert!((200..250).contains(&names(&moto).len()), "what was found to be damaged is taken away, and no other");

    moto.freeze();
    let mut longest = Duration::ZERO;
    for round in 0..40 {
        let begun = Instant::now();
        let reply = client.lookup(namespace, &hashes(100 + round % 2 * 50..150 + round % 2 * 50));
        longest = longest.max(begun.elapsed());
        client.release(reply.lease);
    }
    assert!(longest < Duration::from_millis(DEADLINE_MS / 10), "a lookup took {longest:?}");
    (100..200).step_by(50).for_each(|first| is_missed(&client, namespace, first..first + 50));
    // What is in the pool is served, and what is computed is stored there.
    is_served(&client, &worker, namespace, 50..100);
    let slots = client.reserve(namespace, 10);
    (500..510).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
    let outcomes = client.commit(namespace, &hashes(500..510), &slots);
    assert_eq!(outcomes, vec![forebay_rpc::proto::CommitOutcome::CommitStored; 10]);
    moto.thaw();
    wait_until("the store is used again", || {
        let reply = client.lookup_settled(namespace, &hashes(100..150));
        client.release(reply.lease);
        reply.groups[0].states == [1; 50]
    });
    is_served(&client, &worker, namespace, 100..150);

    moto.kill();
    is_missed(&client, namespace, 200..250);
    is_served(&client, &worker, namespace, 100..150);
    assert!(daemon.is_running());
    drop((client, worker));
    daemon.terminate();
    let (is_success, log) = daemon.finish();
    assert!(is_success && log.contains("drained"), "{log}");
}
