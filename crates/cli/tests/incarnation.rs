//! Two starts of an engine under one id: the second is served, and frees nothing that the first may still touch.

mod support;

use std::os::unix::fs::FileExt;

use forebay_rpc::proto::*;
use support::*;

const BYTES: u64 = 20_000;
const SMALL: &[&str] = &["--pool.capacity_bytes", "32MiB"];

/// An engine of one rank, ready to store: the `start`th of this id.
fn started(place: &Place, engine_id: &str, start: u8) -> (Client, Worker) {
    let mut client = Client::open_start(place, engine_id, start, 1);
    let mut worker = Worker::attach(place, Worker::request_of(engine_id, start, 0, 1, BYTES), None);
    assert_eq!(worker.reply.error, "");
    worker.acknowledge();
    assert!(matches!(client.event(), session_event::Event::Attached(_)));
    (client, worker)
}

/// Stores into every slot that can be had, twice over, none of which may be one of these.
fn turn_over(client: &Client, worker: &Worker, not: &[Held]) {
    let namespace = client.namespace("t", vec![group()]).unwrap();
    for round in 0..2 * (32 << 20) / 20_480 / 64 {
        let slots = client.reserve(namespace, 64);
        assert!(!slots.is_empty(), "the rest of the pool is usable");
        for (i, held) in slots.iter().enumerate() {
            assert!(not.iter().all(|its| its.slot != held.slot), "slot {} is in two hands", held.slot);
            worker.fill(held, 1_000 + round * 64 + i as u64);
        }
        let seeds = 1_000 + round * 64..1_000 + round * 64 + slots.len() as u64;
        assert_eq!(client.commit(namespace, &hashes(seeds), &slots), vec![CommitOutcome::CommitStored; slots.len()]);
    }
}

#[test]
fn another_start_of_an_engine_frees_nothing_that_the_first_still_writes() {
    for is_first_connected in [true, false] {
        let place = Place::new();
        let _daemon = Daemon::start(&place, SMALL);
        let (first, writing) = started(&place, "fixed", 1);
        let namespace = first.namespace("t", vec![group()]).unwrap();
        let held = first.reserve(namespace, 5);
        let watcher = Client::open(&place, "watcher", 0);
        let first = is_first_connected.then_some(first);
        if !is_first_connected {
            // Its scheduler is gone; the worker, in the middle of its copy, is not.
            wait_until("the session ends", || {
                watcher.inspect().sessions.iter().all(|session| session.engine_id != "fixed" || !session.is_connected)
            });
        }
        let second = Client::open_start(&place, "fixed", 2, 1);
        turn_over_by_another(&place, &held);
        drop((first, writing, second));
        wait_until("all is free", || watcher.inspect().pinned_bytes == 0 && watcher.inspect().fenced_bytes == 0);
    }
}

fn turn_over_by_another(place: &Place, not: &[Held]) {
    let (other, worker) = engine(place, "other", BYTES);
    turn_over(&other, &worker, not);
}

#[test]
fn another_start_of_an_engine_is_served_while_the_first_is_paused() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (first, writing) = started(&place, "fixed", 1);
    let namespace = first.namespace("t", vec![group()]).unwrap();
    let held = first.reserve(namespace, 5);
    let (second, worker) = started(&place, "fixed", 2);
    let sessions = first.inspect().sessions;
    assert!(sessions.iter().all(|session| session.instance.is_some()), "{sessions:?}");
    assert_ne!(sessions[0].instance, sessions[1].instance);
    turn_over(&second, &worker, &held);
    // What the first one wrote meanwhile is whole, and its own.
    held.iter().enumerate().for_each(|(i, held)| writing.fill(held, i as u64));
    assert_eq!(first.commit(namespace, &hashes(0..5), &held), [CommitOutcome::CommitStored; 5]);
}

#[test]
fn another_session_of_the_same_start_is_let_in_when_the_workers_of_the_first_are_gone() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (first, writing) = started(&place, "fixed", 1);
    let namespace = first.namespace("t", vec![group()]).unwrap();
    let held = first.reserve(namespace, 5);
    let request = || OpenSessionRequest { owner: vec![99; 16], ..Client::request("fixed", 1, 1) };
    let refused = Client::try_open(&place, request()).err().expect("it knows nothing of what the worker writes");
    assert_eq!(refused.code(), tonic::Code::Unavailable, "it is asked again");
    assert!(refused.message().contains("another session"), "{refused}");
    drop(first);
    turn_over_by_another(&place, &held);
    drop(writing);
    wait_until("it is let in", || Client::try_open(&place, request()).is_ok());
}

#[test]
fn the_owner_comes_back_to_what_it_holds_after_a_daemon_was_killed() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (first, writing) = started(&place, "fixed", 1);
    let namespace = first.namespace("t", vec![group()]).unwrap();
    let held = first.reserve(namespace, 5);
    daemon.kill();
    drop(first);
    let _daemon = Daemon::start(&place, SMALL);
    let stranger = OpenSessionRequest { owner: vec![99; 16], ..Client::request("fixed", 1, 1) };
    assert!(Client::try_open(&place, stranger).is_err(), "who the owner is was written down");
    let second = Client::open_start(&place, "fixed", 2, 1);
    turn_over_by_another(&place, &held);
    let back = OpenSessionRequest { reservations: held[..3].to_vec(), ..Client::request("fixed", 1, 1) };
    let back = Client::try_open(&place, back).unwrap();
    assert_eq!((&back.welcome.lost, back.inspect().fenced_bytes), (&vec![], 0));
    drop((second, back, writing));
}

/// The first word of each instance's record, as a daemon leaves it that was killed between clearing and setting it.
fn forget_instances(place: &Place) {
    let home = [place.pool().join("mnt"), place.pool()].into_iter().find(|home| home.join("table").exists());
    let table = std::fs::File::options().write(true).open(home.expect("a pool").join("table")).unwrap();
    (0..64).for_each(|instance| table.write_all_at(&[0; 8], 4096 + instance * 256).unwrap());
}

#[test]
fn a_live_worker_whose_record_cannot_be_read_keeps_its_slots() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (first, writing) = started(&place, "fixed", 1);
    let namespace = first.namespace("t", vec![group()]).unwrap();
    let held = first.reserve(namespace, 5);
    daemon.kill();
    drop(first);
    forget_instances(&place);
    let _daemon = Daemon::start(&place, SMALL);
    turn_over_by_another(&place, &held);
    let watcher = Client::open(&place, "watcher", 0);
    assert!(watcher.inspect().fenced_bytes > 0);
    drop(writing);
    wait_until("the fence falls", || watcher.inspect().fenced_bytes == 0);
}

#[test]
fn a_start_is_refused_only_when_all_numbers_are_held_by_live_workers() {
    let place = Place::new();
    let arguments = [SMALL, &["--limits.engines", "3"]].concat();
    let _daemon = Daemon::start(&place, &arguments);
    let mut paused: Vec<(Client, Worker)> = (1..=3).map(|start| started(&place, "fixed", start)).collect();
    let refused = Client::try_open(&place, Client::request("fixed", 4, 1)).err().expect("no number is free");
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    paused.pop();
    wait_until("a number is free", || Client::try_open(&place, Client::request("fixed", 4, 1)).is_ok());
}

#[test]
fn a_worker_of_another_start_is_never_counted_among_an_engines_ranks() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let mut client = Client::open_start(&place, "fixed", 1, 2);
    let mut first = Worker::attach(&place, Worker::request_of("fixed", 1, 0, 2, BYTES), None);
    // A rank of another start, one that changed the number of ranks, and one that is there already.
    let stranger = Worker::attach(&place, Worker::request_of("fixed", 2, 1, 2, BYTES), None);
    assert_eq!(stranger.reply.error, "");
    assert_ne!(stranger.reply.instance, first.reply.instance);
    let other = Worker::attach(&place, Worker::request_of("fixed", 1, 1, 3, BYTES), None);
    assert!(other.reply.error.contains("number of ranks"), "{}", other.reply.error);
    let twin = Worker::attach(&place, Worker::request_of("fixed", 1, 0, 2, BYTES), None);
    assert!(twin.reply.error.contains("another process"), "{}", twin.reply.error);
    let refused = client.namespace("t", vec![group()]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "one rank is missing");
    let mut late = Worker::attach(&place, Worker::request_of("fixed", 1, 1, 2, BYTES), None);
    first.acknowledge();
    late.acknowledge();
    assert!(matches!(client.event(), session_event::Event::Attached(_)));
}
