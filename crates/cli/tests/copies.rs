//! The daemon's own copies, stopped half-way by stopping the thread that copies: whoever else comes and goes meanwhile,
//! the slot stays the copy's, and no block of anybody gets other bytes.

mod support;

#[cfg(target_arch = "x86_64")]
use std::sync::mpsc;
use std::thread::Scope;

#[cfg(target_arch = "x86_64")]
use forebay_core::SlotId;
use forebay_rpc::proto::*;
use support::threads::Grip;
use support::*;

/// Long enough to be met half-way: some milliseconds of copying. One message holds it.
const BYTES: u64 = 14 << 20;
const POOL: &[&str] = &["--pool.capacity_bytes", "128MiB", "--pool.unit_bytes", "16MiB"];
/// Tries to meet a copy half-way; on an idle machine the first does.
const TRIES: u64 = 100;
/// Threads that copy, as the runtime names them.
const COPIERS: &str = "tokio-rt-worker";

fn plain_group() -> Group {
    Group { rank_bytes: vec![BYTES], ..group() }
}

fn put_request(client: &Client, namespace: u32, seed: u64) -> PutRequest {
    let block = Block { hash: hash(seed).to_vec(), data: pattern(seed, BYTES) };
    PutRequest {
        session: client.welcome.session,
        namespace,
        group: 0,
        predecessor: Vec::new(),
        blocks: vec![block],
        lent: None,
    }
}

/// A client on a thread of its own in the middle of one call.
struct Calling<'scope, T> {
    thread: std::thread::ScopedJoinHandle<'scope, Option<T>>,
    end: tokio::sync::oneshot::Sender<()>,
}

impl<T> Calling<'_, T> {
    /// The client goes away with its call under way, as if it were killed; `None` unless it was answered before.
    fn cut(self) -> Option<T> {
        let _ = self.end.send(());
        self.thread.join().expect("a client does not panic")
    }

    fn wait(self) -> T {
        self.thread.join().expect("a client does not panic").expect("its call was answered")
    }
}

fn put<'scope>(scope: &'scope Scope<'scope, '_>, place: &'scope Place, seed: u64) -> Calling<'scope, PutReply> {
    let (end, is_over) = tokio::sync::oneshot::channel();
    let thread = scope.spawn(move || {
        let client = Client::open(place, "client", 0);
        let namespace = client.namespace("t", vec![plain_group()]).expect("a namespace");
        let request = put_request(&client, namespace, seed);
        let mut rpc = client.rpc.clone();
        client.runtime.block_on(async {
            tokio::select! {
                reply = rpc.put(request) => Some(reply.expect("a put").into_inner()),
                _ = is_over => None,
            }
        })
    });
    Calling { thread, end }
}

#[cfg(target_arch = "x86_64")]
fn get<'scope>(scope: &'scope Scope<'scope, '_>, place: &'scope Place, seed: u64) -> Calling<'scope, Option<GetReply>> {
    let (end, is_over) = tokio::sync::oneshot::channel();
    let (ready, is_ready) = mpsc::channel();
    let thread = scope.spawn(move || {
        let client = Client::open(place, "client", 0);
        let namespace = client.namespace("t", vec![plain_group()]).expect("a namespace");
        let session = client.welcome.session;
        let request =
            GetRequest { session, namespace, group: 0, hash_bytes: 32, hashes: hash(seed).to_vec(), lent: None };
        let mut rpc = client.rpc.clone();
        ready.send(()).expect("the test waits");
        client.runtime.block_on(async {
            tokio::select! {
                // A session that was replaced may be told so.
                reply = rpc.get(request) => Some(reply.ok().map(|reply| reply.into_inner())),
                _ = is_over => None,
            }
        })
    });
    is_ready.recv().expect("the client begins");
    Calling { thread, end }
}

fn has_session(client: &Client, engine_id: &str) -> bool {
    client.inspect().sessions.iter().any(|session| session.engine_id == engine_id && session.is_connected)
}

/// Stores one block after another until each slot that can be had was had at least once; returns them.
fn turn_over(client: &Client, worker: &Worker, namespace: u32, seeds: std::ops::Range<u64>) -> Vec<(u64, Held)> {
    let mut stored = Vec::new();
    for seed in seeds {
        let Some(held) = client.reserve(namespace, 1).pop() else { continue };
        worker.fill(&held, seed);
        assert_eq!(client.commit(namespace, &[hash(seed)], &[held]), [CommitOutcome::CommitStored]);
        stored.push((seed, held));
    }
    stored
}

/// Every block of these that is still a hit has the bytes that were stored.
fn check(client: &Client, worker: &Worker, namespace: u32, stored: &[(u64, Held)]) {
    let mut hits = 0;
    for (seed, _) in stored {
        let reply = client.lookup_settled(namespace, &[hash(*seed)]);
        for slot in &reply.groups[0].slots() {
            let (read, right) = (worker.read(*slot), pattern(*seed, BYTES));
            let wrong = read.chunks(4096).zip(right.chunks(4096)).filter(|(read, right)| read != right).count();
            assert_eq!(wrong, 0, "pages of {} in block {seed} are somebody else's", BYTES / 4096);
            hits += 1;
        }
        client.release(reply.lease);
    }
    assert!(hits > 0, "none of {} blocks is there", stored.len());
}

/// Tries until `meet` says that a copy was met half-way.
fn meet(mut meet: impl FnMut(u64) -> bool) {
    assert!((0..TRIES).any(|nth| meet(1_000 + 100 * nth)), "no copy was met half-way in {TRIES} tries");
}

fn wait_for_sleep(daemon: &Daemon, threads: &[i32]) {
    wait_until("the copy ends", || threads.iter().all(|thread| daemon.is_asleep(*thread)));
}

#[test]
fn a_put_whose_client_is_gone_writes_into_nobody_elses_slot() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL);
    let (client, worker) = engine(&place, "engine", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots: Vec<u32> = turn_over(&client, &worker, namespace, 0..8).iter().map(|(_, held)| held.slot).collect();
    std::thread::scope(|scope| {
        meet(|seed| {
            let block = pattern(seed, BYTES);
            let arrived = |slot: &u32| worker.arrived(*slot, &block);
            // One that ends makes the thread that the next one is stopped in.
            assert!(!put(scope, &place, seed + 1).wait().outcomes.is_empty());
            let threads = daemon.threads(COPIERS);
            let mut grip: Grip = daemon.grip(&threads);
            let putting = put(scope, &place, seed);
            while !putting.thread.is_finished() && slots.iter().all(|slot| arrived(slot) == 0) {
                std::hint::spin_loop();
            }
            grip.stop();
            let Some(slot) = slots.iter().find(|slot| (1..Worker::SAMPLES).contains(&arrived(slot))) else {
                grip.release();
                putting.wait();
                return false;
            };
            assert!(putting.cut().is_none(), "a put is answered before it is copied");
            wait_until("the session ends", || !has_session(&client, "client"));
            let stored = turn_over(&client, &worker, namespace, seed + 2..seed + 10);
            grip.release();
            wait_for_sleep(&daemon, &threads);
            check(&client, &worker, namespace, &stored);
            assert!(stored.iter().all(|(_, held)| held.slot != *slot), "slot {slot} was given away under the copy");
            let is_idle = |class: &ClassInfo| class.ready + class.free == class.slots;
            wait_until("the slot is free again", || client.inspect().classes.iter().all(is_idle));
            assert!(client.lookup(namespace, &[hash(seed)]).groups[0].states.is_empty(), "nobody stored it");
            let stored = turn_over(&client, &worker, namespace, seed + 20..seed + 30);
            assert!(stored.iter().any(|(_, held)| held.slot == *slot), "slot {slot} never comes back");
            check(&client, &worker, namespace, &stored);
            true
        });
    });
    let audit = call!(client, audit, AuditRequest {}).unwrap();
    assert_eq!((audit.corrupt, audit.misnamed, audit.complaint.as_str()), (0, 0, ""));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_get_whose_session_is_over_is_answered_with_the_block_or_not_at_all() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL);
    let (client, worker) = engine(&place, "engine", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let data = daemon.mapped_at(&place.pool().join("mnt/data"));
    std::thread::scope(|scope| {
        meet(|seed| {
            let stored = turn_over(&client, &worker, namespace, seed..seed + 1);
            assert!(get(scope, &place, seed).wait().is_some_and(|reply| !reply.blocks.is_empty()));
            let mut grip: Grip = daemon.grip(&daemon.threads(COPIERS));
            grip.watch(data + SlotId(stored[0].1.slot).offset() + BYTES / 2);
            let getting = get(scope, &place, seed);
            if !grip.wait(|| getting.thread.is_finished()) {
                // A thread that is younger than the grip copied.
                getting.wait();
                return false;
            }
            assert!(client.inspect().pinned_bytes > 0, "a block is copied, and not pinned");
            // The engine opens another session, which holds nothing of what the first one did.
            let again = Client::open(&place, "client", 0);
            let others = turn_over(&client, &worker, namespace, seed + 1..seed + 10);
            grip.release();
            let reply = getting.wait();
            for block in reply.iter().flat_map(|reply| &reply.blocks) {
                assert!(block.data == pattern(seed, BYTES), "a block came with somebody else's bytes");
            }
            let slot = stored[0].1.slot;
            assert!(others.iter().all(|(_, held)| held.slot != slot), "slot {slot} was given away under the copy");
            wait_until("nothing stays pinned", || client.inspect().pinned_bytes == 0);
            drop(again);
            true
        });
    });
}

#[test]
fn a_block_whose_slot_another_size_took_is_not_copied_over_the_neighbours() {
    const SMALL: u64 = 16 << 10;
    const LARGE: u64 = 160 << 10;
    const UNIT: u64 = 2 << 20;
    const UNITS: u64 = 8;
    const IN_UNIT: u64 = UNIT / SMALL;
    let arguments = ["--pool.capacity_bytes", "16MiB", "--pool.unit_bytes", "2MiB", "--http.address", "127.0.0.1:0"];
    // Which unit is given up is the policy's to say, so each is tried until it is that one.
    let is_met = (0..UNITS).any(|unit| {
        let place = Place::new();
        let daemon = Daemon::start(&place, &arguments);
        let client = Client::open(&place, "client", 0);
        let mut grip = daemon.grip(&daemon.threads("relocate"));
        grip.stop();
        let open = |tenant: &str, bytes| {
            client.namespace(tenant, vec![Group { rank_bytes: vec![bytes], ..group() }]).expect("a namespace")
        };
        let put = |namespace: u32, seed: u64, bytes: u64| {
            let blocks = vec![Block { hash: hash(seed).to_vec(), data: pattern(seed, bytes) }];
            let (session, predecessor) = (client.welcome.session, Vec::new());
            let request = PutRequest { session, namespace, group: 0, predecessor, blocks, lent: None };
            call!(client, put, request).expect("a put").outcomes().next().expect("an outcome")
        };
        // Each unit holds the blocks of one tenant. The first of every eight is in use, and so has to move.
        let tenants: Vec<u32> = (0..UNITS).map(|tenant| open(&format!("small-{tenant}"), SMALL)).collect();
        for seed in 0..UNITS * IN_UNIT {
            let tenant = tenants[(seed / IN_UNIT) as usize];
            assert_eq!(put(tenant, seed, SMALL), CommitOutcome::CommitStored);
        }
        for seed in (0..UNITS * IN_UNIT).step_by(8).chain((0..UNITS * IN_UNIT).step_by(8)) {
            client.release(client.lookup(tenants[(seed / IN_UNIT) as usize], &[hash(seed)]).lease);
        }
        let large = open("large", LARGE);
        let is_moving = || {
            let page = daemon.page("/metrics");
            page.lines().any(|line| line.contains("state=\"promoting\"") && !line.ends_with(" 0"))
        };
        let large_slots = || {
            let classes = client.inspect().classes;
            classes.iter().find(|class| class.slot_bytes == LARGE).map_or(0, |class| class.slots)
        };
        wait_until("a block begins to move", || {
            put(large, 10_000, LARGE);
            is_moving()
        });
        assert_eq!(large_slots(), 0, "nothing can have moved");
        let purge = PurgeRequest { tenant: format!("small-{unit}"), ..PurgeRequest::default() };
        call!(client, purge, purge).expect("a purge");
        let is_met = large_slots() > 0;
        if is_met {
            for seed in 10_001..10_001 + UNIT / LARGE {
                assert_eq!(put(large, seed, LARGE), CommitOutcome::CommitStored, "in the place of what was to move");
            }
        }
        grip.release();
        wait_until("nothing moves any more", || !is_moving());
        let audit = call!(client, audit, AuditRequest {}).unwrap();
        assert_eq!((audit.corrupt, audit.misnamed, audit.complaint.as_str()), (0, 0, ""), "unit {unit} was given up");
        is_met
    });
    assert!(is_met, "no block lost its slot while it was to move");
}

/// Its deadline is two seconds, and the call may take twenty.
#[test]
fn a_get_of_many_blocks_waits_once_for_a_store_that_is_slow() {
    const COUNT: u64 = 30;
    let (place, shared) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let path = shared.path().join("shared").display().to_string();
    std::fs::create_dir(&path).expect("ours");
    let tier = ["--tier.fs.directories", &path, "--tier.fs.capacity_bytes", "64MiB"];
    let (daemon, client, worker) = tiers::serving(&place, &tier);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    tiers::store(&client, &worker, namespace, 0..COUNT);
    tiers::lose_pool(&place, daemon, (client, worker));
    let slow = ["--tier.fs.load_bytes_per_second", "1KiB", "--tier.fs.load_deadline_ms", "2000"];
    let _daemon = Daemon::start(&place, &[&["--pool.capacity_bytes", "16MiB"][..], &tier, &slow].concat());
    let (client, _worker) = engine(&place, "a", tiers::BYTES);
    wait_until("the tier serves", || tiers::tier(&client, "fs").state == "serving");
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let (session, hashes) = (client.welcome.session, hashes(0..COUNT).concat());
    let request = GetRequest { session, namespace, group: 0, hash_bytes: 32, hashes, lent: None };
    let found = call!(client, get, request).expect("an answer").blocks;
    assert!((found.len() as u64) < COUNT, "the store was not slow");
}
