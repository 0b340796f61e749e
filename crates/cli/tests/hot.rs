//! What hosts use most stays in the stores that they share, though no store sees the hits in their pools.

mod command;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod servers;
mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use servers::{Kind, Server};
use support::tiers::*;
use support::*;

fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// All blocks of a prompt are in the pool.
fn hit(client: &Client, namespace: u32, seeds: std::ops::Range<u64>) {
    let reply = client.lookup_settled(namespace, &hashes(seeds.clone()));
    assert_eq!(reply.groups[0].states, vec![1; (seeds.end - seeds.start) as usize], "{seeds:?} in the pool");
    client.release(reply.lease);
}

/// Another host, with an empty pool, finds them.
fn is_found_by_a_fresh_host(arguments: &[&str], seeds: std::ops::Range<u64>) {
    let place = Place::new();
    let (_daemon, client, worker) = serving(&place, arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    is_served(&client, &worker, namespace, seeds);
}

fn objects(directory: &Path) -> usize {
    let folders = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = folders(directory).filter(|path| !path.ends_with(".forebay"));
    let all = all.flat_map(|namespace| folders(&namespace).collect::<Vec<_>>());
    let all = all.flat_map(|shard| folders(&shard).collect::<Vec<_>>());
    all.flat_map(|path| if path.is_dir() { folders(&path).collect() } else { vec![path] }).count()
}

#[test]
fn what_a_server_lost_is_stored_again_while_it_is_hit() {
    let (server, place) = (Server::start(Kind::Redis), Place::new());
    let url = server.url();
    let arguments = ["--tier.redis.urls", &url, "--http.address", "127.0.0.1:0"];
    let (daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..100);
    assert_eq!(server.admin().must(&["DBSIZE"]), "100");
    server.admin().must(&["FLUSHALL"]);
    wait_until("all blocks are stored again", || {
        (0..100).step_by(50).for_each(|first| hit(&client, namespace, first..first + 50));
        server.admin().must(&["DBSIZE"]) == "100"
    });
    assert_eq!(tier(&client, "redis").lost_blocks, 100);
    let page = daemon.page("/metrics");
    assert!(page.contains("forebay_tier_lost_blocks_total{tier=\"redis\"} 100"), "{page}");
    is_found_by_a_fresh_host(&arguments[..2], 0..50);
    is_found_by_a_fresh_host(&arguments[..2], 50..100);
}

#[test]
fn a_value_that_ends_by_time_stays_while_it_is_hit_and_not_longer() {
    let (server, place) = (Server::start(Kind::Valkey), Place::new());
    let url = server.url();
    let arguments = ["--tier.redis.urls", &url, "--tier.redis.ttl_seconds", "9", "--tier.redis.value_bytes", "8KiB"];
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..20);
    let stored = server.admin().must(&["INFO", "commandstats"]);
    assert!(stored.contains("cmdstat_set:calls=60,"), "{stored}");
    let begun = Instant::now();
    wait_until("they have ended but for the hits", || {
        hit(&client, namespace, 0..10);
        begun.elapsed() > Duration::from_secs(12)
    });
    assert_eq!(server.admin().must(&["DBSIZE"]), "30", "three parts each of the ten that were hit");
    let stored = server.admin().must(&["INFO", "commandstats"]);
    assert!(stored.contains("cmdstat_set:calls=60,"), "none was written again: {stored}");
}

/// What is stored once pushes beside what is hit in the pool all the time.
#[test]
fn blocks_that_are_hit_in_the_pool_stay_in_a_directory_that_evicts() {
    let (shared, place) = (home(), Place::new());
    let directory = shared.path().to_str().expect("a path in UTF-8");
    let arguments = ["--tier.fs.directories", directory, "--tier.fs.capacity_bytes", "3MiB"];
    let more = ["--http.address", "127.0.0.1:0"];
    let (daemon, client, worker) = serving(&place, &[&arguments[..], &more].concat());
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..8);
    let evicted = || {
        let page = daemon.page("/metrics");
        let line = page
            .lines()
            .find(|line| line.starts_with("forebay_shared_store_events_total") && line.contains("evicted_blocks"));
        line.map_or(0, |line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number") as u64)
    };
    let mut next = 100;
    wait_until("what was not used for longest is evicted", || {
        let slots = client.reserve(namespace, 4);
        let seeds = next..next + slots.len() as u64;
        next = seeds.end;
        seeds.clone().zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
        client.commit(namespace, &hashes(seeds), &slots);
        (0..6).for_each(|_| {
            hit(&client, namespace, 0..8);
            std::thread::sleep(Duration::from_millis(50));
        });
        evicted() > 30
    });
    assert!(objects(shared.path()) > 50);
    drop((client, worker, daemon));
    is_found_by_a_fresh_host(&arguments, 0..8);
}

#[test]
fn what_somebody_removed_from_a_directory_is_stored_again_by_the_next_sightings() {
    let (shared, place) = (home(), Place::new());
    let directory = shared.path().to_str().expect("a path in UTF-8");
    let arguments = ["--tier.fs.directories", directory];
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..20);
    assert_eq!(objects(shared.path()), 20);
    for entry in std::fs::read_dir(shared.path()).expect("a directory") {
        let path = entry.expect("an entry").path();
        if !path.ends_with(".forebay") {
            std::fs::remove_dir_all(path).expect("it is removed");
        }
    }
    // An engine that does not look stores them again.
    wait_until("all blocks are stored again", || {
        let slots = client.reserve(namespace, 20);
        let seeds: Vec<u64> = (0..slots.len() as u64).collect();
        seeds.iter().zip(&slots).for_each(|(seed, held)| worker.fill(held, *seed));
        client.commit(namespace, &hashes(0..slots.len() as u64), &slots);
        objects(shared.path()) == 20
    });
    is_found_by_a_fresh_host(&arguments, 0..20);
}
