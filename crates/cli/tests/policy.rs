//! `pool.policy` on the shipped daemon: what each policy keeps, what `advise` says under it, and a restart with another
//! one.

mod command;
mod support;

use std::ops::Range;

use forebay_rpc::client::Client as Adviser;
use forebay_rpc::proto::*;
use support::*;

const BYTES: u64 = 64 << 10;
/// Blocks that the pool holds.
const CAPACITY: u64 = 32;

/// A daemon under one policy, with an engine whose prompts have one block each.
struct Rig {
    daemon: Daemon,
    client: Client,
    worker: Worker,
    namespace: u32,
}

impl Rig {
    fn start(place: &Place, policy: &str) -> Rig {
        let pool = ["--pool.capacity_bytes", "2MiB", "--pool.unit_bytes", "2MiB", "--pool.policy", policy];
        let daemon = Daemon::start(place, &pool);
        let (client, worker) = engine(place, "a", BYTES);
        let namespace = client.namespace("t", vec![group()]).expect("a namespace");
        Rig { daemon, client, worker, namespace }
    }

    /// The engine goes first, so that none of its slots is fenced after the restart.
    fn stop(self) {
        drop((self.client, self.worker));
        self.daemon.terminate();
        let (succeeded, log) = self.daemon.finish();
        assert!(succeeded, "{log}");
    }

    /// Looks a block up; whether it is there, whole.
    fn ask(&self, seed: u64) -> bool {
        let reply = self.client.lookup_settled(self.namespace, &[hash(seed)]);
        let is_hit = reply.groups[0].states == [1];
        if is_hit {
            assert!(
                self.worker.read(reply.groups[0].slots()[0]) == pattern(seed, BYTES),
                "block {seed} has other bytes"
            );
        }
        self.client.release(reply.lease);
        is_hit
    }

    fn put(&self, seed: u64) {
        let request = PutRequest {
            session: self.client.welcome.session,
            namespace: self.namespace,
            group: 0,
            predecessor: Vec::new(),
            blocks: vec![Block { hash: hash(seed).to_vec(), data: pattern(seed, BYTES) }],
            lent: None,
        };
        let outcomes: Vec<CommitOutcome> = call!(self.client, put, request).expect("a put").outcomes().collect();
        assert_eq!(outcomes, [CommitOutcome::CommitStored], "block {seed}");
    }

    fn put_all(&self, seeds: Range<u64>) {
        seeds.for_each(|seed| self.put(seed));
    }

    /// As an engine does: what is not there is computed and stored.
    fn serve(&self, seed: u64) -> bool {
        let is_hit = self.ask(seed);
        if !is_hit {
            self.put(seed);
        }
        is_hit
    }

    /// Asks for all of them, in order, so that they are the most recent.
    fn assert_there(&self, seeds: Range<u64>, is_there: bool) {
        let others: Vec<u64> = seeds.filter(|seed| self.ask(*seed) != is_there).collect();
        assert!(others.is_empty(), "of these blocks `is_there` is not {is_there}: {others:?}");
    }
}

/// Hits of a few popular prompts that come back behind more new ones than the pool holds, and the hit ratio that
/// `advise` gives for the pool as it is.
fn under_a_scan(policy: &str) -> (u64, f64) {
    const ROUNDS: u64 = 40;
    const POPULAR: u64 = 8;
    const NEW: u64 = CAPACITY + 8;
    let place = Place::new();
    let rig = Rig::start(&place, policy);
    let serve_popular = || (0..POPULAR).map(|seed| u64::from(rig.serve(seed))).sum::<u64>();
    assert_eq!([0; 3].map(|_| serve_popular()), [0, POPULAR, POPULAR]);
    let mut hits = 0;
    for round in 0..ROUNDS {
        (0..NEW).for_each(|nth| assert!(!rig.serve(1000 + round * NEW + nth), "a new block was there"));
        hits += serve_popular();
    }
    let mut adviser = Adviser::new(place.sockets(), "adviser", DEADLINE);
    let runtime = runtime();
    let mut advise = || runtime.block_on(adviser.advise()).expect("advice");
    wait_until("all lookups are looked at", || advise().windows[2].keys == 3 * POPULAR + ROUNDS * (POPULAR + NEW));
    let advice = advise();
    assert_eq!(advice.curve[1].capacity_bytes, advice.capacity_bytes);
    (hits, advice.curve[1].hit_ratio)
}

#[test]
fn a_scan_pushes_out_what_is_popular_under_lru_and_not_under_the_others_and_the_advice_agrees() {
    let [default, lru, tinylfu] = ["default", "lru", "tinylfu"].map(under_a_scan);
    assert!(lru.0 == 0 && lru.1 < 0.02, "lru: {} hits, and a curve of {}", lru.0, lru.1);
    for (policy, (hits, ratio)) in [("default", default), ("tinylfu", tinylfu)] {
        assert!(hits > 100 && ratio > 0.1, "{policy}: {hits} hits, and a curve of {ratio}");
    }
}

#[test]
fn a_restart_with_another_policy_keeps_all_blocks_and_their_order() {
    let place = Place::new();
    let rig = Rig::start(&place, "default");
    assert!(rig.daemon.log().contains("policy=\"default\""), "{}", rig.daemon.log());
    rig.put_all(0..CAPACITY);
    rig.stop();

    let rig = Rig::start(&place, "lru");
    rig.put_all(100..110);
    rig.assert_there(0..10, false);
    rig.assert_there(20..CAPACITY, true);
    // The order of use is now 10 to 19, 100 to 109, 20 to 31.
    rig.put_all(200..215);
    rig.assert_there(10..20, false);
    rig.assert_there(100..105, false);
    rig.assert_there(105..110, true);
    rig.assert_there(20..CAPACITY, true);
    rig.stop();

    for policy in ["tinylfu", "default"] {
        let rig = Rig::start(&place, policy);
        for seeds in [20..CAPACITY, 105..110, 200..215] {
            rig.assert_there(seeds, true);
        }
        rig.stop();
    }
}

#[test]
fn a_name_that_is_no_policy_is_refused_with_those_that_are() {
    for name in ["lfu", "lhd", "Default"] {
        let refused = command::run(&["serve", "--pool.policy", name]);
        refused.assert_refused(2, &format!("`pool.policy` cannot be `{name}` (from=`flag`)"));
        let hint = "hint: give `\"default\"`, `\"lru\"` or `\"tinylfu\"`";
        assert!(refused.err.contains(hint), "{}", refused.err);
    }
}
