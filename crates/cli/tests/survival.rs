//! What survives whom: the shipped daemon, killed with SIGKILL, against a worker that lives on in this process.

mod command;
mod support;

use std::fs;
use std::os::unix::fs::FileExt;

use forebay_core::SlotId;
use forebay_core::checksum::checksum;
use forebay_rpc::proto::*;
use support::tiers::*;
use support::*;

const BYTES: u64 = 20_000;
const SMALL: &[&str] = &["--pool.capacity_bytes", "32MiB"];

#[test]
fn what_a_worker_stored_is_read_back_and_nothing_stays_pinned() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 10);
    assert_eq!(slots.len(), 10);
    slots.iter().enumerate().for_each(|(i, held)| worker.fill(held, i as u64));
    let outcomes = client.commit(namespace, &hashes(0..10), &slots);
    assert_eq!(outcomes, vec![CommitOutcome::CommitStored; 10]);
    assert_eq!(client.commit(namespace, &hashes(0..10), &slots), outcomes, "a commit may be repeated");

    let reply = client.lookup(namespace, &hashes(0..12));
    assert_eq!(reply.groups[0].states, vec![1; 10]);
    for (i, slot) in reply.groups[0].slots().iter().enumerate() {
        assert_eq!(worker.read(*slot), pattern(i as u64, BYTES), "block {i}");
    }
    assert!(client.inspect().pinned_bytes > 0);
    client.release(reply.lease);
    client.release(reply.lease);
    assert_eq!(client.inspect().pinned_bytes, 0);
}

/// A daemon stores 20 blocks and is killed; a bit of block 13 flips while nobody looks.
fn leave_twenty_blocks_one_of_them_rotten(place: &Place) {
    let daemon = Daemon::start(place, SMALL);
    let (client, worker) = engine(place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 20);
    slots.iter().enumerate().for_each(|(i, held)| worker.fill(held, i as u64));
    client.commit(namespace, &hashes(0..20), &slots);
    daemon.kill();
    let mut rotten = pattern(13, BYTES);
    rotten[4_321] ^= 4;
    worker.write(&slots[13], &rotten);
}

#[test]
fn blocks_outlive_a_killed_daemon_and_are_verified_before_they_are_served() {
    let place = Place::new();
    leave_twenty_blocks_one_of_them_rotten(&place);

    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "b", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    assert!(!client.lookup(namespace, &hashes(0..1)).groups[0].states.contains(&1), "served before it was verified");
    let reply = client.lookup_settled(namespace, &hashes(0..20));
    assert_eq!(reply.groups[0].states, vec![1; 13], "all up to the rotten one, and no further");
    for (i, slot) in reply.groups[0].slots().iter().enumerate() {
        assert_eq!(worker.read(*slot), pattern(i as u64, BYTES), "block {i}");
    }
}

#[test]
fn a_slot_that_a_live_worker_fills_is_not_reused_by_a_restarted_daemon() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let filling = client.reserve(namespace, 5);
    let stored = client.reserve(namespace, 5);
    stored.iter().enumerate().for_each(|(i, held)| worker.fill(held, i as u64));
    client.commit(namespace, &hashes(0..5), &stored);
    let lease = client.lookup(namespace, &hashes(0..5));
    assert_eq!(lease.groups[0].states, vec![1; 5]);
    daemon.kill();
    // The worker is paused, as far as the daemon can tell: it maps the pool and says nothing.
    let mapping = worker.detach();
    drop(client);

    let _daemon = Daemon::start(&place, SMALL);
    let (other, other_worker) = engine(&place, "b", BYTES);
    let namespace = other.namespace("t", vec![group()]).unwrap();
    let fenced: Vec<u32> = filling.iter().map(|held| held.slot).collect();
    let leased: Vec<u32> = lease.groups[0].slots();
    // Turn the whole pool over, twice.
    let mut seed = 1_000;
    for _ in 0..(64 << 20) / 20_480 / 64 {
        let slots = other.reserve(namespace, 64);
        assert!(!slots.is_empty(), "the rest of the pool is usable");
        for held in &slots {
            assert!(!fenced.contains(&held.slot), "slot {} was given away while its worker fills it", held.slot);
            assert!(!leased.contains(&held.slot), "slot {} was given away while its worker reads it", held.slot);
            other_worker.fill(held, seed);
            assert_eq!(other.commit(namespace, &[hash(seed)], &[*held]), [CommitOutcome::CommitStored]);
            seed += 1;
        }
    }
    assert!(other.inspect().fenced_bytes > 0);

    // It wakes up, comes back, and says what it still holds: one slot to fill and nothing to read.
    let mut worker = Worker::attach(&place, Worker::request("a", 0, 1, BYTES), Some(mapping));
    assert!(!worker.reply.has_files, "the mapping it has is the right one");
    let keeps = vec![filling[2]];
    let mut back = Client::resume(&place, "a", 1, Vec::new(), keeps.clone());
    assert_eq!(back.welcome.lost, vec![]);
    worker.acknowledge();
    assert!(matches!(back.event(), session_event::Event::Attached(_)));
    let name = back.namespace("t", vec![group()]).unwrap();
    worker.fill(&keeps[0], 77);
    assert_eq!(back.commit(name, &[hash(77)], &keeps), [CommitOutcome::CommitStored]);
    assert_eq!(other.inspect().fenced_bytes, 0, "all else it held is free");
    let reply = back.lookup(name, &[hash(77)]);
    assert_eq!(worker.read(reply.groups[0].slots()[0]), pattern(77, BYTES));
}

/// Where the table's words of units begin.
const UNITS_AT: u64 = 20_480;

#[test]
fn a_damaged_record_of_an_extent_of_several_units_gives_no_slot_of_a_live_worker_away() {
    const LONG: u64 = 1_500_000;
    let place = Place::new();
    let arguments = [SMALL, &["--pool.unit_bytes", "2MiB", "--pool.huge_pages", "off"]].concat();
    let daemon = Daemon::start(&place, &arguments);
    let (client, worker) = engine(&place, "a", LONG);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let held = client.reserve(namespace, 4);
    assert_eq!(held.len(), 4);
    daemon.kill();
    // It is paused, as far as the daemon can tell.
    let mapping = worker.detach();
    drop(client);
    let table = fs::File::options().read(true).write(true).open(place.pool().join("table")).unwrap();
    let mut word = [0; 8];
    table.read_exact_at(&mut word, UNITS_AT).unwrap();
    let units = u64::from(word[4]);
    assert!((2..16).contains(&units), "its extent has {units} units");
    word[6] ^= 4;
    table.write_all_at(&word, UNITS_AT).unwrap();
    // What is readable behind bounds what is lost: an extent of one unit with nothing in it.
    let behind = [1, 0, 0, 0, 1, 0];
    let checked = [&(units as u32).to_le_bytes()[..], &behind, &[0; 2]].concat();
    let check = checksum(&checked).to_le_bytes();
    table.write_all_at(&[&behind[..], &check[..2]].concat(), UNITS_AT + 8 * units).unwrap();

    let _daemon = Daemon::start(&place, &arguments);
    let mut other = Client::open(&place, "b", 1);
    let mut filling = Worker::attach(&place, Worker::request("b", 0, 1, BYTES), None);
    filling.acknowledge();
    assert!(matches!(other.event(), session_event::Event::Attached(_)));
    assert_eq!(other.inspect().populated_bytes, (32 << 20) - units * (2 << 20), "the rest of the pool");
    let namespace = other.namespace("short", vec![group()]).unwrap();
    let theirs: Vec<u32> = held.iter().flat_map(|held| held.slot..held.slot + (LONG as u32).div_ceil(4096)).collect();
    for seed in 0..2 * (32 << 20) / 20_480 {
        let slots = other.reserve(namespace, 1);
        assert!(!slots.is_empty(), "the rest of the pool is usable");
        assert!(!theirs.contains(&slots[0].slot), "slot {} is in two hands", slots[0].slot);
        filling.fill(&slots[0], seed);
        assert_eq!(other.commit(namespace, &[hash(seed)], &slots), [CommitOutcome::CommitStored]);
    }
    drop(mapping);
    wait_until("the units come back", || other.inspect().populated_bytes == 32 << 20);
}

#[test]
fn an_audit_reads_what_nobody_asked_for_since_a_restart() {
    let place = Place::new();
    leave_twenty_blocks_one_of_them_rotten(&place);

    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "b", BYTES);
    let audit = call!(client, audit, AuditRequest {}).unwrap();
    assert_eq!((audit.blocks, audit.corrupt, audit.misnamed, audit.complaint.as_str()), (20, 1, 0, ""));
    let audit = call!(client, audit, AuditRequest {}).unwrap();
    assert_eq!((audit.blocks, audit.corrupt), (19, 0), "the rotten one is dropped");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let reply = client.lookup_settled(namespace, &hashes(0..20));
    assert_eq!(reply.groups[0].states, vec![1; 13], "what was not read by a lookup is still verified by one");
    assert_eq!(worker.read(reply.groups[0].slots()[0]), pattern(0, BYTES));
}

#[test]
fn a_block_purged_under_a_lease_never_comes_back_and_its_reader_goes_on() {
    for stop in [Daemon::kill, |daemon: Daemon| {
        daemon.terminate();
        assert!(daemon.finish().0)
    }] {
        let place = Place::new();
        let daemon = Daemon::start(&place, SMALL);
        let (reader, its_worker) = engine(&place, "a", BYTES);
        let (writer, worker) = engine(&place, "b", BYTES);
        let store = |seed: u64| {
            let namespace = writer.namespace("t", vec![group()]).unwrap();
            let slots = writer.reserve(namespace, 2);
            slots.iter().zip(seed..).for_each(|(held, seed)| worker.fill(held, seed));
            assert_eq!(writer.commit(namespace, &hashes(0..2), &slots), [CommitOutcome::CommitStored; 2]);
        };
        store(10);
        let namespace = reader.namespace("t", vec![group()]).unwrap();
        let old = reader.lookup(namespace, &hashes(0..2)).groups.remove(0);
        let purged = command::run(&["purge", "--socket.directory", place.sockets().to_str().unwrap(), "--tenant", "t"]);
        assert_eq!(purged.code, 0, "{purged:?}");
        store(20);
        stop(daemon);
        let mappings = [its_worker.detach(), worker.detach()];
        drop((reader, writer));

        let _daemon = Daemon::start(&place, SMALL);
        let [its_mapping, mapping] = mappings;
        let mut its_worker = Worker::attach(&place, Worker::request("a", 0, 1, BYTES), Some(its_mapping));
        let held = old.slots().into_iter().zip(old.generations());
        let held = held.map(|(slot, generation)| Held { slot, generation }).collect();
        let reader = Client::resume(&place, "a", 1, held, Vec::new());
        assert_eq!(reader.welcome.lost, [], "it still reads what was purged");
        its_worker.acknowledge();
        let mut worker = Worker::attach(&place, Worker::request("b", 0, 1, BYTES), Some(mapping));
        let mut writer = Client::resume(&place, "b", 1, Vec::new(), Vec::new());
        worker.acknowledge();
        assert!(matches!(writer.event(), session_event::Event::Attached(_)));
        let namespace = writer.namespace("t", vec![group()]).unwrap();
        let new = writer.lookup_settled(namespace, &hashes(0..2)).groups.remove(0);
        assert_eq!(new.states, [1, 1]);
        for (seed, (old, new)) in old.slots().iter().zip(&new.slots()).enumerate() {
            assert!(worker.read(*new) == pattern(20 + seed as u64, BYTES), "block {seed} is the purged one");
            assert!(
                its_worker.read(*old) == pattern(10 + seed as u64, BYTES),
                "block {seed} has gone under its reader"
            );
        }
    }
}

#[test]
fn a_fence_falls_with_its_worker() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    assert_eq!(client.reserve(namespace, 5).len(), 5);
    daemon.kill();
    drop(client);
    let _daemon = Daemon::start(&place, SMALL);
    let watcher = Client::open(&place, "watcher", 0);
    assert!(watcher.inspect().fenced_bytes > 0, "its worker maps the pool");
    drop(worker);
    wait_until("the fence falls", || watcher.inspect().fenced_bytes == 0);
}

#[test]
fn a_cut_session_keeps_its_leases_until_its_worker_is_gone() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 4);
    slots.iter().for_each(|held| worker.fill(held, held.slot.into()));
    client.commit(namespace, &hashes(0..4), &slots);
    let lease = client.lookup(namespace, &hashes(0..4));
    drop(client);
    let watcher = Client::open(&place, "watcher", 0);
    wait_until("the session ends", || watcher.inspect().sessions.iter().all(|s| s.engine_id != "a" || !s.is_connected));
    assert!(watcher.inspect().pinned_bytes > 0, "the worker may be in the middle of a load");

    // Back with two of the four.
    let held = |i: usize| Held { slot: lease.groups[0].slots()[i], generation: lease.groups[0].generations()[i] };
    let back = Client::resume(&place, "a", 1, vec![held(0), held(1)], Vec::new());
    assert_eq!(back.welcome.lost, vec![]);
    let info = watcher.inspect().sessions.into_iter().find(|s| s.engine_id == "a").unwrap();
    assert_eq!((info.leases, info.leased_blocks), (1, 2));
    drop((back, worker));
    wait_until("all is free", || watcher.inspect().pinned_bytes == 0);
}

#[test]
fn two_ranks_lie_side_by_side_and_a_block_without_both_births_is_not_stored() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let mut client = Client::open(&place, "a", 2);
    let mut first = Worker::attach(&place, Worker::request("a", 0, 2, 5_000), None);
    let refused = client.namespace("t", vec![group()]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "one rank is missing");
    let mut second = Worker::attach(&place, Worker::request("a", 1, 2, 7_000), None);
    first.acknowledge();
    second.acknowledge();
    assert!(matches!(client.event(), session_event::Event::Attached(_)));
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 2);
    for held in &slots {
        first.fill(held, 1);
    }
    second.fill(&slots[0], 2);
    let outcomes = client.commit(namespace, &hashes(0..2), &slots);
    assert_eq!(outcomes, [CommitOutcome::CommitStored, CommitOutcome::CommitIncomplete]);
    let reply = client.lookup(namespace, &hashes(0..2));
    assert_eq!(reply.groups[0].states, vec![1]);
    assert_eq!(first.read(reply.groups[0].slots()[0]), pattern(1, 5_000));
    assert_eq!(second.read(reply.groups[0].slots()[0]), pattern(2, 7_000));
}

#[test]
fn a_pool_of_another_size_with_a_worker_attached_is_refused_and_without_one_made_anew() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    daemon.kill();
    let (succeeded, log) =
        Daemon::spawn(&place, &["--pool.capacity_bytes", "16MiB", "--pool.unit_bytes", "4MiB"]).finish();
    assert!(!succeeded, "{log}");
    assert!(log.contains("hint: "), "{log}");
    drop((client, worker));
    let mut daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--pool.unit_bytes", "4MiB"]);
    assert!(daemon.is_running());
    assert_eq!(Client::open(&place, "b", 0).inspect().capacity_bytes, 16 << 20);
}

#[test]
fn sigterm_drains_and_the_successor_finds_everything() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (mut client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 3);
    slots.iter().enumerate().for_each(|(i, held)| worker.fill(held, i as u64));
    rustix::process::kill_process(rustix::process::Pid::from_raw(daemon.pid()).unwrap(), rustix::process::Signal::TERM)
        .unwrap();
    assert!(matches!(client.event(), session_event::Event::Draining(_)));
    let outcomes = client.commit(namespace, &hashes(0..3), &slots);
    assert_eq!(outcomes, [CommitOutcome::CommitStored; 3], "what was begun may be finished");
    assert!(client.reserve(namespace, 1).is_empty(), "nothing new is handed out");
    let (succeeded, log) = daemon.finish();
    assert!(succeeded, "{log}");
    drop((client, worker));
    let _daemon = Daemon::start(&place, SMALL);
    let (client, _worker) = engine(&place, "b", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    assert_eq!(client.lookup_settled(namespace, &hashes(0..3)).groups[0].states, vec![1; 3]);
}

#[test]
fn a_stale_offset_is_recognised_by_its_generation() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 1);
    assert_eq!(worker.mapping().generation(SlotId(slots[0].slot)).0, slots[0].generation);
    let request = AbortRequest { session: client.welcome.session, slots: slots.clone(), are_unused: false };
    call!(client, abort, request).unwrap();
    assert_ne!(worker.mapping().generation(SlotId(slots[0].slot)).0, slots[0].generation);
    worker.fill(&slots[0], 1);
    assert_eq!(client.commit(namespace, &[hash(1)], &slots), [CommitOutcome::CommitLost]);
    assert!(client.lookup(namespace, &[hash(1)]).groups[0].states.is_empty());
}

#[test]
fn an_audit_reads_every_block_and_drops_what_is_not_what_was_stored() {
    let place = Place::new();
    // Nobody else is to find it first.
    let daemon = Daemon::start(&place, &[SMALL, &["--pool.scrub_bytes_per_second", "0"]].concat());
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 60);
    slots.iter().enumerate().for_each(|(i, held)| worker.fill(held, i as u64));
    client.commit(namespace, &hashes(0..60), &slots);
    let whole = AuditReply { blocks: 60, bytes: 60 * BYTES, ..AuditReply::default() };
    assert_eq!(call!(client, audit, AuditRequest {}).unwrap(), whole);
    let mut rotten = pattern(50, BYTES);
    rotten[19_999] ^= 1;
    worker.write(&slots[50], &rotten);
    assert_eq!(call!(client, audit, AuditRequest {}).unwrap(), AuditReply { corrupt: 1, ..whole });
    assert_eq!(client.lookup(namespace, &hashes(0..60)).groups[0].states, vec![1; 50]);
    daemon.says("found_by=\"audit\"", 1);
}

#[test]
fn slots_that_a_killed_daemon_filled_from_a_shared_store_are_free_again() {
    let place = Place::new();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let fs = ["--tier.fs.directories", directory.path().to_str().unwrap(), "--tier.fs.admission", "all"];
    let (daemon, client, worker) = serving(&place, &[SMALL, &fs].concat());
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..100);
    lose_pool(&place, daemon, (client, worker));
    // Most loads wait for their turn.
    let slow = [SMALL, &fs, &["--tier.fs.load_bytes_per_second", "1MiB"]].concat();
    let (daemon, client, worker) = serving(&place, &slow);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    wait_until("blocks come up", || {
        client.release(client.lookup(namespace, &hashes(0..100)).lease);
        tier(&client, "fs").loading_blocks > 10
    });
    daemon.kill();
    drop((client, worker));
    let (_daemon, client, _worker) = serving(&place, &slow);
    assert_eq!(client.inspect().fenced_bytes, 0);
}
