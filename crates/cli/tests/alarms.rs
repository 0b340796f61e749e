//! Alarms as an operator sees them: a real daemon, its metrics, its log and `advise`.
//!
//! The history has steps of a second here. Traffic goes on until what is waited for shows, so that a slow machine needs
//! longer and fails no sooner.

mod command;
mod support;

use std::time::Instant;

use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::Block;
use support::{DEADLINE, Daemon, Place, runtime};

const NEVER_HIT: &str = "stored but never hit";
const FELL: &str = "hit rate fell";
const STORED: u64 = 1200;
const BATCH: u64 = 100;

struct World {
    daemon: Daemon,
    client: Client,
    namespace: u32,
    runtime: tokio::runtime::Runtime,
    /// Keys from here on were never asked for.
    next: u64,
    /// Behind the daemon, which is to end first.
    place: Place,
}

impl World {
    fn new() -> World {
        let place = Place::new();
        let arguments =
            ["--pool.capacity_bytes", "64MiB", "--http.address", "127.0.0.1:0", "--alarm.step_seconds", "1"];
        let daemon = Daemon::start(&place, &arguments);
        let mut client = Client::new(place.sockets(), "alarms", DEADLINE);
        let runtime = runtime();
        let group = GroupBytes { group: 0, bytes: 4096 };
        let fields = [("model".to_string(), "alarms".to_string())];
        let namespace = runtime.block_on(client.open_namespace(fields, [group])).expect("a namespace");
        World { place, daemon, client, namespace, runtime, next: 1 << 32 }
    }

    /// Each block a prompt of its own.
    fn store(&mut self, keys: std::ops::Range<u64>) {
        for key in keys {
            let blocks = vec![Block { hash: hash(key).to_vec(), data: vec![7; 4096] }];
            self.runtime.block_on(self.client.put(self.namespace, 0, &[], blocks)).expect("a store");
        }
    }

    /// Asks for each key alone; returns the hits.
    fn ask(&mut self, keys: std::ops::Range<u64>) -> usize {
        let one = |world: &mut World, key: u64| {
            let hashes = pack([hash(key).as_slice()]).expect("one length");
            let found = world.runtime.block_on(world.client.lookup(world.namespace, 0, &hashes)).expect("a lookup");
            usize::from(found[0])
        };
        keys.map(|key| one(self, key)).sum()
    }

    /// Keys nobody stored.
    fn ask_new(&mut self) {
        let first = self.next;
        self.next += BATCH;
        assert_eq!(self.ask(first..first + BATCH), 0);
    }

    fn ask_stored(&mut self) {
        assert_eq!(self.ask(0..BATCH), BATCH as usize);
    }

    fn holds(&self, name: &str) -> bool {
        let metrics = self.daemon.page("/metrics");
        let line = format!("forebay_alarm{{name=\"{name}\"}} ");
        let value = metrics.lines().find_map(|other| other.strip_prefix(&line)).expect("every alarm has its line");
        value == "1"
    }

    /// Goes on with `traffic` until the alarm holds, or does not, and the log says so for the nth time.
    fn until(&mut self, name: &str, holds: bool, traffic: fn(&mut World)) {
        let start = Instant::now();
        let logged = format!("alarm=\"{name}\"");
        let event = if holds { "raised" } else { "cleared" };
        let is_told = |line: &str| line.contains(&logged) && line.contains(event);
        while self.holds(name) != holds || !self.daemon.log().lines().any(is_told) {
            assert!(start.elapsed() < 3 * DEADLINE, "`{name}` is not {event}:\n{}", self.daemon.log());
            traffic(self);
        }
    }

    fn advised(&self) -> Vec<(String, String)> {
        let sockets = self.place.sockets();
        let advice = command::run(&["advise", "--json", "--socket.directory", &sockets.to_string_lossy()]).json();
        let text = |alarm: &serde_json::Value, field: &str| alarm[field].as_str().expect("a text").to_string();
        let alarms = advice["alarms"].as_array().expect("a list");
        alarms.iter().map(|alarm| (text(alarm, "name"), text(alarm, "cause"))).collect()
    }
}

fn hash(key: u64) -> [u8; 32] {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&key.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    hash[8..16].copy_from_slice(&key.to_le_bytes());
    hash
}

#[test]
fn alarms_begin_with_their_cause_and_end_when_what_they_tell_of_is_over() {
    let mut world = World::new();
    assert!(!world.holds(NEVER_HIT) && !world.holds(FELL));

    // A thousand blocks are stored, and other keys asked for: never the same twice.
    world.store(0..STORED);
    world.until(NEVER_HIT, true, World::ask_new);
    let advised = world.advised();
    assert!(advised.len() == 1 && advised[0].0 == NEVER_HIT && advised[0].1.contains("random seed"), "{advised:?}");

    // Some hits are enough to end it.
    world.until(NEVER_HIT, false, World::ask_stored);
    // Long enough that the good times are most of the history: until the rate of all is over a half.
    let asked = world.next - (1 << 32);
    for _ in 0..2 * asked / BATCH {
        world.ask_stored();
    }

    // Then new keys come only: what is asked for lately was never stored.
    world.until(FELL, true, World::ask_new);
    let advised = world.advised();
    assert!(advised.len() == 1 && advised[0].0 == FELL && advised[0].1.contains("never stored"), "{advised:?}");

    world.until(FELL, false, World::ask_stored);
    assert_eq!(world.advised(), []);
}
