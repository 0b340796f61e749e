//! Blocks that go down to a tier and come back.

use super::*;

/// Of a block.
pub const BYTES: u64 = 20_000;

pub fn tier(client: &Client, name: &str) -> TierInfo {
    client.inspect().tiers.into_iter().find(|tier| tier.name == name).expect("the tier is configured")
}

/// A daemon with a small pool whose tiers serve, and an engine.
pub fn serving(place: &Place, arguments: &[&str]) -> (Daemon, Client, Worker) {
    serving_in(place, arguments, &[])
}

/// With this environment and nothing else in it.
pub fn serving_in(place: &Place, arguments: &[&str], environment: &[(&str, &str)]) -> (Daemon, Client, Worker) {
    let daemon = Daemon::start_in(place, &[&["--pool.capacity_bytes", "16MiB"], arguments].concat(), environment);
    let (client, worker) = engine(place, "a", BYTES);
    wait_until("the tiers serve", || client.inspect().tiers.iter().all(|tier| tier.state == "serving"));
    (daemon, client, worker)
}

/// Stores blocks as prompts of 50 and waits until all are written.
pub fn store(client: &Client, worker: &Worker, namespace: u32, seeds: std::ops::Range<u64>) {
    for first in seeds.clone().step_by(50) {
        let seeds: Vec<u64> = (first..(first + 50).min(seeds.end)).collect();
        let hashes: Vec<[u8; 32]> = seeds.iter().copied().map(hash).collect();
        let mut slots = Vec::new();
        while slots.len() < seeds.len() {
            slots.extend(client.reserve(namespace, (seeds.len() - slots.len()) as u32));
        }
        seeds.iter().zip(&slots).for_each(|(seed, held)| worker.fill(held, *seed));
        let outcomes = client.commit(namespace, &hashes, &slots);
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
        written(client);
    }
}

/// Waits until nothing waits to be written.
pub fn written(client: &Client) {
    wait_until("all is written", || {
        client.inspect().tiers.iter().all(|tier| tier.waiting_blocks == 0 && tier.storing_blocks == 0)
    });
}

/// All blocks of a prompt come back, whole; they were not in the pool.
pub fn is_served(client: &Client, worker: &Worker, namespace: u32, seeds: std::ops::Range<u64>) {
    let reply = client.lookup_settled(namespace, &hashes(seeds.clone()));
    assert_eq!(reply.groups[0].states, vec![1; (seeds.end - seeds.start) as usize], "{seeds:?}");
    for (seed, slot) in seeds.zip(&reply.groups[0].slots()) {
        assert!(worker.read(*slot) == pattern(seed, BYTES), "block {seed} has other bytes");
    }
    client.release(reply.lease);
}

/// None of a prompt's blocks comes back; whoever asks waits for nobody.
pub fn is_missed(client: &Client, namespace: u32, seeds: std::ops::Range<u64>) {
    let reply = client.lookup_settled(namespace, &hashes(seeds.clone()));
    assert!(!reply.groups[0].states.contains(&1), "{seeds:?}");
    client.release(reply.lease);
}

/// The pool's files are gone: what comes back from now on comes from a tier.
pub fn lose_pool(place: &Place, daemon: Daemon, engine: (Client, Worker)) {
    drop(engine);
    daemon.kill();
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");
}
