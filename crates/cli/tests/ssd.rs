//! The SSD tier behind the shipped daemon: a real file, real kills, and a worker that checks every byte.

mod command;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use command::run;
use forebay_core::namespace::Descriptor;
use forebay_rpc::client::session::Namespace;
use forebay_rpc::client::{EngineSession, SessionConfig, SessionState, Ticket};
use forebay_rpc::proto::*;
use forebay_rpc::{RPC_SOCKET, pack};
use rustix::process::Signal;
use support::tiers::{BYTES, is_served, store};
use support::*;

/// A disk's file, where files are kept on a disk.
struct DiskFile {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

impl DiskFile {
    fn new() -> DiskFile {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let path = directory.path().join("ssd");
        DiskFile { _directory: directory, path }
    }
}

fn start(place: &Place, disk: &Path, more: &[&str]) -> Daemon {
    let disk = disk.to_str().expect("a path in UTF-8");
    let mut arguments = vec!["--pool.capacity_bytes", "16MiB", "--tier.ssd.disks", disk];
    arguments.extend(["--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"]);
    arguments.extend(more);
    Daemon::start(place, &arguments)
}

/// A daemon with an open tier, and an engine.
fn serving(place: &Place, disk: &Path, more: &[&str]) -> (Daemon, Client, Worker) {
    let daemon = start(place, disk, more);
    let (client, worker) = engine(place, "a", BYTES);
    wait_until("the tier serves", || tier(&client).state == "serving");
    (daemon, client, worker)
}

fn tier(client: &Client) -> TierInfo {
    support::tiers::tier(client, "ssd")
}

#[test]
fn what_the_pool_has_no_room_for_comes_back_from_disk_byte_for_byte() {
    for engine in ["auto", "threads"] {
        let (place, disk) = (Place::new(), DiskFile::new());
        let (_daemon, client, worker) = serving(&place, &disk.path, &["--tier.ssd.engine", engine]);
        let namespace = client.namespace("t", vec![group()]).unwrap();
        // The pool holds 819 of them.
        store(&client, &worker, namespace, 0..2000);
        let before = tier(&client);
        assert_eq!((before.stored_blocks, before.blocks, before.promoted_blocks), (2000, 2000, 0));
        let first = client.lookup(namespace, &hashes(0..50));
        assert_eq!(first.groups[0].states, vec![2; 50], "not yet");
        // Blocks that come up before the daemon hears that nobody waits are under the lease, and are hits.
        client.release(first.lease);
        let hits_of_first = client.inspect().hits;
        (0..20).for_each(|prompt| is_served(&client, &worker, namespace, prompt * 50..prompt * 50 + 50));
        let after = tier(&client);
        assert!(after.promoted_blocks >= 900, "{after:?}");
        // Some came up for the first lookup, which was released, and were evicted before the next.
        assert!((900..=after.promoted_blocks).contains(&after.hits), "{after:?}");
        let hits = client.inspect().hits;
        assert!((after.hits..=hits_of_first + 1000).contains(&hits), "{hits_of_first}, {hits}: {after:?}");
        is_served(&client, &worker, namespace, 950..1000);
        assert_eq!((tier(&client).hits, client.inspect().hits), (after.hits, hits + 50), "the pool had them");
        assert_eq!((after.late_bytes, after.loading_blocks), (0, 0));
        assert_eq!(client.inspect().pinned_bytes, 0);
        assert!(!after.disks[0].engine_why.is_empty());
    }
}

/// Nobody asks for them after the start, and the pool would evict them unwritten.
#[test]
fn what_waited_to_be_written_at_a_kill_is_written_after_the_start() {
    let (place, disk) = (Place::new(), DiskFile::new());
    // So slow that most of it waits.
    let slow = ["--tier.ssd.write_bytes_per_second", "1MiB"];
    let (daemon, client, worker) = serving(&place, &disk.path, &slow);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    for first in (0..400).step_by(50) {
        let slots = client.reserve(namespace, 50);
        (first..).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
        let outcomes = client.commit(namespace, &hashes(first..first + 50), &slots);
        assert_eq!(outcomes, [CommitOutcome::CommitStored; 50]);
    }
    drop((client, worker));
    daemon.kill();
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    wait_until("all is on the disk", || tier(&client).blocks == 400);
    assert_eq!(client.inspect().pinned_bytes, 0);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 1000..2000);
    (0..8).for_each(|prompt| is_served(&client, &worker, namespace, prompt * 50..prompt * 50 + 50));
}

#[test]
fn one_question_is_answered_until_all_has_come_up_and_counts_once() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..2000);
    let counts = || {
        let advice = call!(client, advise, AdviseRequest {}).unwrap();
        let misses: u64 = advice.misses.iter().map(|miss| miss.count).sum();
        (advice.keys, advice.hits, misses)
    };
    assert_eq!(counts(), (0, 0, 0));
    // A disk has the first hundred, nobody the others. More promotions than one look may start.
    let asked = [hashes(0..100), hashes(5000..5010)].concat();
    let mut replies = client.replies(namespace, &asked);
    let mut all = client.next(&mut replies, DEADLINE).unwrap().unwrap();
    assert_eq!(all.groups[0].states, [2; 100], "not yet");
    let lease = all.lease;
    while let Some(news) = client.next(&mut replies, DEADLINE).expect("a reply in time") {
        add(&mut all, news);
    }
    assert_eq!((all.groups[0].states.clone(), all.lease), (vec![1; 100], lease));
    (0..100).zip(&all.groups[0].slots()).for_each(|(seed, slot)| assert!(worker.read(*slot) == pattern(seed, BYTES)));
    assert_eq!(counts(), (110, 100, 10));
    assert_ne!(client.inspect().pinned_bytes, 0);
    client.release(lease);
    assert_eq!(client.inspect().pinned_bytes, 0);

    // One that nobody waits for counts as it stands, and one whose lease is released ends.
    let mut replies = client.replies(namespace, &hashes(200..250));
    let first = client.next(&mut replies, DEADLINE).unwrap().unwrap();
    assert_eq!(first.groups[0].states, [2; 50]);
    drop(replies);
    wait_until("it is counted", || counts().0 == 160);
    client.release(first.lease);
    let mut replies = client.replies(namespace, &hashes(300..350));
    let lease = client.next(&mut replies, DEADLINE).unwrap().unwrap().lease;
    client.release(lease);
    while client.next(&mut replies, DEADLINE).expect("the stream ends").is_some() {}
    assert_eq!(counts().0, 210);
    let sessions = client.inspect().sessions;
    assert_eq!(sessions.iter().map(|session| session.leased_blocks).sum::<u64>(), 0);
}

#[test]
fn a_lookup_whose_replies_nobody_reads_promotes_no_more_and_ends_with_its_engine() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..2000);
    let leased = || {
        let sessions = client.inspect().sessions;
        sessions.iter().map(|session| session.leased_blocks).sum::<u64>()
    };
    for (first, is_replaced) in [(0, true), (600, false)] {
        let (mut silent, other) = engine(&place, "b", BYTES);
        let own = silent.namespace("t", vec![group()]).unwrap();
        silent.narrow(&place, 700);
        let replies = silent.replies(own, &hashes(first..first + 600));
        let (mut before, mut after) = (0, 0);
        wait_until("nothing more comes up", || {
            (before, after) = (after, leased());
            thread::sleep(Duration::from_millis(200));
            after > 0 && before == after
        });
        assert!(after < 600, "all came up");
        is_served(&client, &worker, namespace, 1200..1220);
        let next = is_replaced.then(|| Client::open(&place, "b", 1));
        if next.is_none() {
            drop((silent, other));
        }
        wait_until("nothing is leased", || leased() == 0 && client.inspect().pinned_bytes == 0);
        drop(replies);
    }
}

/// A directory whose socket leads to the daemon's. What the daemon says arrives this much later.
fn far_away(place: &Place, delay: Duration) -> tempfile::TempDir {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let listener = UnixListener::bind(directory.path().join(RPC_SOCKET)).unwrap();
    let daemon = place.sockets().join(RPC_SOCKET);
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = UnixStream::connect(&daemon).unwrap();
            let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || pass_on(from, to, Duration::ZERO));
            thread::spawn(move || pass_on(far, near, delay));
        }
    });
    directory
}

fn pass_on(mut from: UnixStream, mut to: UnixStream, delay: Duration) {
    let mut bytes = vec![0; 1 << 20];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        thread::sleep(delay);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // Whatever ends one end ends the other; it may have ended.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// The session of an engine whose worker is attached.
fn session(place: &Place, sockets: &Path, engine_id: &str) -> (EngineSession, Worker) {
    let config = SessionConfig {
        socket_directory: sockets.into(),
        engine_id: engine_id.to_owned(),
        incarnation: [1; 16],
        ranks: 1,
        stock_blocks: 0,
        deadline: DEADLINE,
        breaker_failures: 3,
    };
    let session = EngineSession::new(config).unwrap();
    let fields = [("model", "test"), ("tenant", "t")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    session.set_namespace(Namespace { fields: fields.into(), groups: vec![group()] });
    wait_until("it waits for its worker", || session.state() == SessionState::Attaching);
    let mut worker = Worker::attach(place, Worker::request(engine_id, 0, 1, BYTES), None);
    worker.acknowledge();
    wait_until("it is ready", || session.state() == SessionState::Ready);
    (session, worker)
}

fn answered(session: &EngineSession, seed: u64) -> Ticket {
    let ticket = session.lookup(vec![(0, pack([hash(seed).as_slice()]).unwrap())]);
    assert!(ticket.poll(DEADLINE) && !ticket.has_failed());
    ticket
}

/// HTTP/2 closes a connection on which replies came for about a thousand streams that were reset before.
#[test]
fn thousands_of_lookups_that_are_given_up_leave_their_connection_as_it_was() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..2000);
    let sockets = far_away(&place, Duration::from_millis(20));
    let (session, other) = session(&place, sockets.path(), "b");

    let (mut given_up, mut seeds) = (0, (0..2000).cycle());
    for round in 0.. {
        let hashes = seeds.by_ref().take(400).map(|seed| pack([hash(seed).as_slice()]).unwrap());
        let tickets: Vec<Ticket> = hashes.map(|hashes| session.lookup(vec![(0, hashes)])).collect();
        let is_answered = |ticket: &Ticket| ticket.poll(DEADLINE) && !ticket.has_failed();
        assert!(tickets.iter().all(is_answered), "after {given_up}: {:?}", session.reason());
        given_up += tickets.iter().filter(|ticket| ticket.states(0).unwrap() == [2]).count();
        if round % 2 == 0 {
            tickets.iter().for_each(Ticket::stop_waiting);
            assert!(tickets.iter().all(|ticket| ticket.states(0).unwrap() != [2]));
        }
        drop(tickets);
        // A session has at most 1,024 lookups under way, and those that end count until their stream has ended.
        wait_until("their leases are returned", || client.inspect().pinned_bytes == 0);
        if given_up >= 5000 {
            break;
        }
    }
    println!("{given_up} were given up");
    let ticket = answered(&session, 0);
    wait_until("a block has come up", || ticket.states(0).unwrap() == [1]);
    let slot = u32::from_le_bytes(ticket.slots(0).unwrap().try_into().unwrap());
    assert!(other.read(slot) == pattern(0, BYTES));
    drop(ticket);
    wait_until("all leases are returned", || client.inspect().pinned_bytes == 0);
    assert_eq!((session.stats().reconnects, session.stats().lookup_failures), (0, 0));
}

/// However long `get` waits for the disk, each key is one lookup, with what came of it.
#[test]
fn what_get_brings_up_counts_once_and_as_a_hit_of_the_disk() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..2000);
    let hashes = [hashes(0..100), hashes(5000..5001)].concat().concat();
    let request =
        GetRequest { session: client.welcome.session, namespace, group: 0, hash_bytes: 32, hashes, lent: None };
    let reply = call!(client, get, request).unwrap();
    assert_eq!(reply.blocks.len(), 100);
    let advice = call!(client, advise, AdviseRequest {}).unwrap();
    let misses: u64 = advice.misses.iter().map(|miss| miss.count).sum();
    assert_eq!((advice.keys, advice.hits, misses, tier(&client).hits), (101, 100, 1, 100));
}

#[test]
fn blocks_outlive_a_killed_daemon_and_the_loss_of_the_pool() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..500);
    drop((client, worker));
    daemon.kill();
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");

    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    assert_eq!(tier(&client).blocks, 500);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    (0..10).for_each(|prompt| is_served(&client, &worker, namespace, prompt * 50..prompt * 50 + 50));
}

#[test]
fn a_daemon_killed_while_blocks_come_up_serves_them_after_its_restart() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (mut daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..1500);
    drop((client, worker));
    for round in 0..5 {
        let client = Client::open(&place, "b", 0);
        let fields = [("model", "test"), ("tenant", "t")];
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let groups = vec![Group { rank_bytes: vec![BYTES], ..group() }];
        let request = OpenNamespaceRequest { session: client.welcome.session, fields, groups };
        let namespace = call!(client, open_namespace, request).expect("a namespace").namespace;
        // Asks for 50 blocks; the answer to the last of them is not waited for.
        let hashes = hashes(round * 50..round * 50 + 50).concat();
        let request =
            GetRequest { session: client.welcome.session, namespace, group: 0, hash_bytes: 32, hashes, lent: None };
        let mut rpc = client.rpc.clone();
        let asked = client.runtime.block_on(async {
            tokio::time::timeout(std::time::Duration::from_millis(3 * round), rpc.get(request)).await
        });
        assert!(asked.is_err() || asked.is_ok_and(|reply| reply.is_ok()));
        daemon.kill();
        drop(client);
        daemon = start(&place, &disk.path, &[]);
    }
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("the tier serves", || tier(&client).state == "serving");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    (0..30).for_each(|prompt| is_served(&client, &worker, namespace, prompt * 50..prompt * 50 + 50));
    assert_eq!(client.inspect().fenced_bytes, 0, "what the killed daemons were filling is free");
    let audit = call!(client, audit, AuditRequest {}).expect("an audit");
    assert_eq!((audit.corrupt, audit.misnamed, audit.complaint), (0, 0, String::new()));
}

#[test]
fn a_purged_namespace_is_gone_from_the_disk_and_stays_gone() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let (doomed, kept) = (client.namespace("t", vec![group()]).unwrap(), client.namespace("u", vec![group()]).unwrap());
    store(&client, &worker, doomed, 0..500);
    store(&client, &worker, kept, 0..500);
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    call!(client, purge, request).expect("a purge");
    assert_eq!(tier(&client).blocks, 500);
    assert_eq!(client.lookup_settled(doomed, &hashes(0..50)).groups[0].states, vec![0u8; 0]);
    // Stored again, it is there again.
    store(&client, &worker, doomed, 0..50);
    assert_eq!(tier(&client).blocks, 550);
    drop((client, worker));
    daemon.kill();
    forebay_io::pool::remove(&place.pool()).expect("the pool is removed");

    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    assert_eq!(tier(&client).blocks, 550);
    let (doomed, kept) = (client.namespace("t", vec![group()]).unwrap(), client.namespace("u", vec![group()]).unwrap());
    is_served(&client, &worker, kept, 0..50);
    is_served(&client, &worker, doomed, 0..50);
    assert_eq!(client.lookup_settled(doomed, &hashes(50..100)).groups[0].states, vec![0u8; 0]);
}

/// Of the first page of removals: what is behind it cannot be read either.
#[test]
fn a_purged_namespace_stays_gone_when_a_bit_of_its_removals_has_flipped() {
    for engine in ["auto", "threads"] {
        let (place, disk) = (Place::new(), DiskFile::new());
        let more = ["--tier.ssd.engine", engine];
        let (daemon, client, worker) = serving(&place, &disk.path, &more);
        let names = ["t", "u"];
        let [doomed, kept] = names.map(|tenant| client.namespace(tenant, vec![group()]).unwrap());
        store(&client, &worker, kept, 0..100);
        store(&client, &worker, doomed, 0..500);
        let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
        call!(client, purge, request).expect("a purge");
        store(&client, &worker, doomed, 1000..1010);
        drop((client, worker));
        daemon.kill();
        forebay_io::pool::remove(&place.pool()).expect("the pool is removed");
        let mut bytes = fs::read(&disk.path).expect("the disk");
        let has_removals = |page: &[u8]| page.starts_with(b"FBBATCH") && page[256 + 27] == 2;
        let head = bytes.chunks_exact(4096).position(has_removals).expect("removals");
        bytes[head * 4096 + 300] ^= 1;
        fs::write(&disk.path, bytes).expect("the disk is damaged");

        let (_daemon, client, worker) = serving(&place, &disk.path, &more);
        let [doomed, kept] = names.map(|tenant| client.namespace(tenant, vec![group()]).unwrap());
        assert!(tier(&client).blocks <= 110, "{engine}: {} blocks", tier(&client).blocks);
        for first in (0..500).step_by(50) {
            let hits = client.lookup_settled(doomed, &hashes(first..first + 50)).groups[0].states.len();
            assert_eq!(hits, 0, "{engine}: of the blocks from {first} on");
        }
        is_served(&client, &worker, kept, 0..100);
    }
}

#[test]
fn an_audit_of_a_disk_shows_its_list_of_purges_and_fails_where_something_is_damaged() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let [doomed, kept] = ["t", "u"].map(|tenant| client.namespace(tenant, vec![group()]).unwrap());
    store(&client, &worker, doomed, 0..50);
    store(&client, &worker, kept, 0..50);
    let request = PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() };
    call!(client, purge, request).expect("a purge");
    drop((client, worker));
    daemon.kill();
    let path = disk.path.to_str().unwrap();
    let audited = || run(&["inspect", "ssd", "--audit", path]);
    let whole = fs::read(&disk.path).expect("the disk");
    let flipped = |places: &[usize]| {
        let mut bytes = whole.clone();
        places.iter().for_each(|place| bytes[*place] ^= 1);
        fs::write(&disk.path, bytes).expect("the disk is damaged");
    };
    let answer = audited();
    let says = "1 namespace in the list; damaged pages: 0 in the first copy, 0 in the second";
    assert!(answer.code == 0 && answer.out.contains(says), "{answer:?}");

    let lists = [64 << 10, 576 << 10];
    flipped(&[lists[1] + 100]);
    let answer = audited();
    let says = "1 namespace in the list; damaged pages: 0 in the first copy, 1 in the second";
    assert!(answer.code == 1 && answer.out.contains(says), "{answer:?}");
    assert!(answer.err.contains("a copy of a disk's list of purges is damaged"), "{answer:?}");
    let json = run(&["inspect", "ssd", "--json", path]);
    assert_eq!((json.code, &json.json()["disks"][0]["damaged_purge_pages"]), (0, &serde_json::json!([0, 1])));
    flipped(&lists.map(|at| at + 100));
    let answer = audited();
    assert!(answer.code == 1 && answer.err.contains("damaged in both copies"), "{answer:?}");
    assert!(answer.err.contains("hint: purge again"), "{answer:?}");

    let is_payload = |page: &[u8]| !page.starts_with(b"FB") && page.iter().any(|byte| *byte != 0);
    let pages = whole.chunks_exact(4096).enumerate().filter(|(_, page)| is_payload(page));
    flipped(&pages.map(|(page, _)| page * 4096).collect::<Vec<_>>());
    let answer = audited();
    assert!(answer.code == 1 && answer.err.contains("blocks of a disk are damaged"), "{answer:?}");

    flipped(&[lists[1] + 100]);
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let is_whole = || {
        let bytes = fs::read(&disk.path).expect("the disk");
        let [first, second] = lists.map(|at| &bytes[at..at + 4096]);
        first == second
    };
    wait_until("the list is written again", is_whole);
    drop((client, worker));
    daemon.terminate();
    assert!(daemon.finish().0);
    let answer = audited();
    assert!(
        answer.code == 0 && answer.out.contains("damaged pages: 0 in the first copy, 0 in the second"),
        "{answer:?}"
    );
}

#[test]
fn a_disk_that_is_cut_short_under_load_costs_misses_and_nothing_else() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (mut daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..2000);
    fs::File::options().write(true).open(&disk.path).unwrap().set_len(8 << 20).unwrap();
    for prompt in 0..40 {
        let seeds = prompt * 50..prompt * 50 + 50;
        let reply = client.lookup_settled(namespace, &hashes(seeds.clone()));
        for (seed, slot) in seeds.zip(&reply.groups[0].slots()) {
            assert!(worker.read(*slot) == pattern(seed, BYTES), "block {seed} has other bytes");
        }
        client.release(reply.lease);
    }
    // The pool serves on, whatever becomes of the disk.
    let slots = client.reserve(namespace, 10);
    (5000..5010).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
    assert_eq!(client.commit(namespace, &hashes(5000..5010), &slots), vec![CommitOutcome::CommitStored; 10]);
    is_served(&client, &worker, namespace, 5000..5010);
    assert!(daemon.is_running());
    let after = tier(&client);
    assert!(after.promoted_blocks > 0 && after.blocks < 2010, "what was cut off is forgotten: {after:?}");
}

#[test]
fn a_full_disk_gives_up_its_oldest_blocks_and_serves_the_rest() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    // Twice what it holds.
    store(&client, &worker, namespace, 0..6000);
    let tier = tier(&client);
    assert!(tier.evicted_blocks > 2000 && tier.blocks > 1500, "{tier:?}");
    assert_eq!(tier.blocks, tier.disks[0].blocks, "the core knows what is there");
    is_served(&client, &worker, namespace, 5950..6000);
    is_served(&client, &worker, namespace, 4500..4550);
    assert_eq!(client.lookup_settled(namespace, &hashes(0..50)).groups[0].states, vec![0u8; 0]);
}

#[test]
fn a_write_budget_that_is_spent_holds_back_writes_and_nothing_else() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let budget = ["--tier.ssd.write_bytes_per_second", "1MiB", "--drain.deadline_seconds", "1"];
    let (daemon, client, worker) = serving(&place, &disk.path, &budget);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let mut stored = 0;
    // Three times what the pool holds, as fast as it goes.
    while stored < 2400 {
        let slots = client.reserve(namespace, 50);
        slots.iter().zip(stored..).for_each(|(held, seed)| worker.fill(held, seed));
        let end = stored + slots.len() as u64;
        let outcomes = client.commit(namespace, &hashes(stored..end), &slots);
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
        stored = end;
    }
    let tier = tier(&client);
    assert_eq!(tier.state, "serving");
    assert!(tier.stored_blocks < 2400 && tier.waiting_blocks > 0, "{tier:?}");
    // What is pinned for the disk stays within its share of the pool, 31 thousandths.
    assert!(client.inspect().pinned_bytes <= (16 << 20) / 32 + 20_480, "{}", client.inspect().pinned_bytes);
    let last = stored - 50..stored;
    is_served(&client, &worker, namespace, last);
    drop((client, worker));
    daemon.terminate();
    assert!(daemon.finish().0, "it ends at its deadline, budget or not");
}

/// A spent budget is for stores. Those of the purged tenant that wait for it are given up.
#[test]
fn a_purge_waits_for_no_write_budget() {
    for budget in ["--tier.ssd.write_bytes_per_day=24MiB", "--tier.ssd.write_bytes_per_second=4KiB"] {
        let (place, disk) = (Place::new(), DiskFile::new());
        let (daemon, client, worker) = serving(&place, &disk.path, &[]);
        let namespace = client.namespace("t", vec![group()]).unwrap();
        store(&client, &worker, namespace, 0..200);
        drop((client, worker));
        daemon.kill();
        let (_daemon, client, worker) = serving(&place, &disk.path, &[budget]);
        let spend = |tenant: &str, first: u64| {
            let namespace = client.namespace(tenant, vec![group()]).unwrap();
            for seeds in (first..first + 500).step_by(50).map(|first| first..first + 50) {
                let slots = client.reserve(namespace, 50);
                seeds.clone().zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
                client.commit(namespace, &hashes(seeds.start..seeds.start + slots.len() as u64), &slots);
            }
        };
        spend("u", 1000);
        spend("t", 2000);
        wait_until("stores wait for the budget", || tier(&client).storing_blocks > 0);
        let sockets = place.sockets();
        let purge = ["purge", "--tenant", "t", "--wait-seconds", "10", "--socket.directory"];
        let purged = run(&[&purge[..], &[sockets.to_str().unwrap()]].concat());
        assert_eq!((purged.code, tier(&client).purge), (0, None), "{purged:?}");
        assert_eq!(client.lookup_settled(namespace, &hashes(0..50)).groups[0].states, vec![0u8; 0]);
        // Of a thousand: they wait, or are refused where the wait would be too long.
        assert!(tier(&client).stored_blocks < 100, "the budget is spent all the time: {:?}", tier(&client));
    }
}

#[test]
fn two_paths_to_one_disk_and_sizes_that_no_disk_has_start_no_daemon_and_leave_no_file() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    // By one of its paths a disk is taken, before the other is known: a process of a daemon that has ended may still
    // make its file. So the others have a file of their own.
    let (disk, alone) = (at("disk"), at("alone"));
    fs::create_dir(at("folder")).unwrap();
    std::os::unix::fs::symlink(&disk, at("link")).unwrap();
    std::os::unix::fs::symlink(directory.path(), at("above")).unwrap();
    let by_two_paths = "two paths of `tier.ssd.disks` lead to the same disk";
    let twice = "it must name each disk once";
    let capacity = "it must be at least 1 MiB plus eight times `tier.ssd.segment_bytes`";
    let segment = "it must be a power of two from 64 KiB to 1 GiB";
    let mut cases: Vec<(Vec<String>, &[&str], &str)> = Vec::new();
    cases.push((vec![disk.clone(), disk.clone()], &["--tier.ssd.capacity_bytes", "64MiB"], twice));
    for other in [at("link"), at("above/disk"), at("folder/../disk")] {
        cases.push((vec![disk.clone(), other], &["--tier.ssd.capacity_bytes", "64MiB"], by_two_paths));
    }
    cases.push((vec![alone.clone()], &["--tier.ssd.capacity_bytes", "100KiB"], capacity));
    for (bytes, says) in [("3MiB", segment), ("512MiB", capacity), ("2GiB", segment)] {
        let sizes = ["--tier.ssd.capacity_bytes", "128MiB", "--tier.ssd.segment_bytes", bytes];
        cases.push((vec![alone.clone()], Box::leak(Box::new(sizes)), says));
    }
    cases.push((vec![alone.clone()], &[], "a file needs a capacity"));
    for (disks, sizes, says) in cases {
        let place = Place::new();
        let disks = format!("{disks:?}");
        let arguments = [&["--tier.ssd.disks", &disks, "--tier.ssd.create", "true"], sizes].concat();
        let (sockets, pool) = (place.sockets(), place.pool());
        let place_of_it = ["--socket.directory", sockets.to_str().unwrap(), "--pool.directory", pool.to_str().unwrap()];
        let judged = run(&[&["doctor"], &place_of_it[..], &arguments[..]].concat());
        let told = judged.out + &judged.err;
        assert!(judged.code != 0 && told.contains(says) && told.contains("hint: "), "{disks}: {told}");
        let (has_succeeded, log) =
            Daemon::spawn(&place, &[&["--pool.capacity_bytes", "16MiB"], &arguments[..]].concat()).finish();
        assert!(!has_succeeded && log.contains(says) && log.contains("hint: "), "{disks}: {log}");
        assert!(!Path::new(&alone).exists(), "{says}: it left a file");
    }
}

/// A file that cannot have its length is not left behind.
#[test]
fn a_disk_that_there_is_no_space_for_leaves_no_file() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let disks = ["--tier.ssd.disks", disk.path.to_str().unwrap(), "--tier.ssd.create", "true"];
    let arguments = [&disks[..], &["--pool.capacity_bytes", "16MiB", "--tier.ssd.capacity_bytes", "4096TiB"]].concat();
    let daemon = Daemon::start(&place, &arguments);
    wait_until("the daemon says so", || daemon.log().contains("cannot preallocate a disk's file"));
    // It looks again every few seconds.
    wait_until("no file is left", || !disk.path.exists());
}

#[test]
fn what_was_ever_written_to_a_disk_does_not_grow_by_restarts() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let mut before = None;
    for start in 0..5 {
        let (daemon, client, worker) = serving(&place, &disk.path, &[]);
        if start == 0 {
            let namespace = client.namespace("t", vec![group()]).unwrap();
            store(&client, &worker, namespace, 0..200);
        }
        let DiskInfo { lifetime_written_bytes: written, .. } = tier(&client).disks[0].clone();
        // A header for each segment that will be needed next.
        let before = *before.get_or_insert(written);
        assert!((before..before + start * 65_536 + 1).contains(&written), "start {start}: {written} after {before}");
        drop((client, worker));
        match start % 2 {
            0 => daemon.kill(),
            _ => {
                daemon.terminate();
                assert!(daemon.finish().0);
            }
        }
    }
}

/// A restart gives no new hour of the day's budget.
#[test]
fn a_daily_write_budget_that_is_spent_stays_spent_over_a_restart() {
    let (place, disk) = (Place::new(), DiskFile::new());
    // An hour's worth is 2 MiB, about a hundred blocks.
    let budget = ["--tier.ssd.write_bytes_per_day", "48MiB", "--drain.deadline_seconds", "1"];
    let mut stored = 0;
    for start in 0..4u64 {
        let (daemon, client, worker) = serving(&place, &disk.path, &budget);
        let namespace = client.namespace("t", vec![group()]).unwrap();
        let first = start * 1000;
        for seeds in (first..first + 400).step_by(50).map(|first| first..first + 50) {
            let slots = client.reserve(namespace, 50);
            seeds.clone().zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
            client.commit(namespace, &hashes(seeds.start..seeds.start + slots.len() as u64), &slots);
        }
        // Either all that the budget allows is written, or stores fail for want of it.
        let mut last = (u64::MAX, 0);
        wait_until("nothing more is written", || {
            thread::sleep(Duration::from_millis(300));
            let now = (tier(&client).blocks, tier(&client).disks[0].written_bytes);
            std::mem::replace(&mut last, now) == now
        });
        let blocks = last.0;
        if start == 0 {
            assert!((60..300).contains(&blocks), "the first hour is written: {blocks}");
            stored = blocks;
        }
        // A batch is written where a byte is left, and a minute gives two blocks.
        assert!(blocks <= stored + start * 60, "start {start}: {blocks} after {stored}");
        drop((client, worker));
        match start {
            // With and without a drain.
            0 | 2 => daemon.kill(),
            _ => {
                daemon.terminate();
                assert!(daemon.finish().0);
            }
        }
    }
}

/// Two disks, of which one comes back when the purge has begun.
#[test]
fn a_purge_whose_caller_went_goes_on_says_how_far_it_is_and_is_joined_by_the_next() {
    const BLOCKS: u64 = 160;
    let (place, disk, late) = (Place::new(), DiskFile::new(), DiskFile::new());
    let disks = PathBuf::from(format!("{:?}", [&disk.path, &late.path]));
    let (daemon, client, worker) = serving(&place, &disks, &["--tier.ssd.create", "true"]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..BLOCKS);
    drop((client, worker));
    daemon.kill();
    let away = late.path.with_extension("away");
    fs::rename(&late.path, &away).unwrap();
    fs::create_dir(&late.path).unwrap();
    let (_daemon, client, _worker) = serving(&place, &disks, &[]);
    assert!((1..BLOCKS).contains(&tier(&client).blocks) && tier(&client).purge.is_none(), "{:?}", tier(&client));
    let sockets = place.sockets();
    let purge = |more: &[&str]| {
        let what = ["purge", "--tenant", "t", "--socket.directory", sockets.to_str().unwrap()];
        run(&[&what, more].concat())
    };
    let early = purge(&["--wait-seconds", "1"]);
    assert!(early.code == 1 && early.err.contains("still on a tier"), "{early:?}");
    assert!(early.err.contains("`forebay inspect` says how far it is"), "{early:?}");
    let before = tier(&client).purge.expect("a purge is under way");
    assert!(before.namespaces == 1 && (1..BLOCKS).contains(&before.removed_blocks), "{before:?}");
    fs::remove_dir(&late.path).unwrap();
    fs::rename(&away, &late.path).unwrap();
    wait_until("the purge goes on", || {
        tier(&client).purge.is_none_or(|now| now.removed_blocks > before.removed_blocks)
    });
    assert_eq!(purge(&[]).code, 0);
    assert_eq!((tier(&client).blocks, tier(&client).purge), (0, None));
}

/// The pool's descriptors went with it, so nobody knows whose the blocks on the disk are.
#[test]
fn a_purge_after_the_pool_was_lost_removes_what_is_on_the_disk_or_says_that_it_cannot() {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let ids = ["blue", "red"].map(|tenant| {
        let namespace = client.namespace(tenant, vec![group()]).unwrap();
        store(&client, &worker, namespace, 0..50);
        let fields = [("model", "test"), ("tenant", tenant)].map(|(name, value)| (name.to_owned(), value.to_owned()));
        Descriptor::new(fields).unwrap().id().to_string()
    });
    support::tiers::lose_pool(&place, daemon, (client, worker));
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let sockets = place.sockets();
    let purge = |what: [&str; 2]| run(&["purge", what[0], what[1], "--socket.directory", sockets.to_str().unwrap()]);
    let refused = purge(["--tenant", "blue"]);
    assert!(refused.code == 1 && refused.err.contains("whose tenant is not known"), "{refused:?}");
    assert!(ids.iter().all(|id| refused.err.contains(id)) && refused.err.contains("hint: "), "{refused:?}");
    let mistyped = purge(["--namespace", &"0".repeat(32)]);
    assert!(mistyped.code == 0 && mistyped.out.contains("has not seen this namespace"), "{mistyped:?}");
    assert_eq!(purge(["--namespace", &ids[0]]).code, 0);
    assert_eq!(tier(&client).blocks, 50, "those of the other one are left");
    let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).unwrap());
    assert_eq!(client.lookup_settled(blue, &hashes(0..50)).groups[0].slots().len(), 0);
    is_served(&client, &worker, red, 0..50);
    // By now the daemon knows whose each is.
    assert_eq!(purge(["--tenant", "red"]).code, 0);
    assert_eq!(tier(&client).blocks, 0);
}

#[test]
fn a_daemon_that_ends_well_finishes_what_it_is_writing() {
    for signal in [Signal::TERM, Signal::HUP] {
        ends_well(signal);
    }
}

fn ends_well(signal: Signal) {
    let (place, disk) = (Place::new(), DiskFile::new());
    let (daemon, client, worker) = serving(&place, &disk.path, &[]);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..100);
    drop((client, worker));
    rustix::process::kill_process(rustix::process::Pid::from_raw(daemon.pid()).unwrap(), signal).unwrap();
    let (is_success, log) = daemon.finish();
    assert!(is_success && log.contains("drained"), "{log}");
    let answer = run(&["inspect", "ssd", "--json", "--audit", disk.path.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
    let found = &report["disks"][0];
    assert_eq!((&found["blocks"], &found["audit"]["damaged_blocks"]), (&100.into(), &0.into()), "{}", answer.out);
    let text = run(&["inspect", "ssd", "--segments", disk.path.to_str().unwrap()]).out;
    assert!(text.contains("100 blocks") && text.contains("active"), "{text}");
    let (_daemon, client, worker) = serving(&place, &disk.path, &[]);
    let refused = run(&["inspect", "ssd", disk.path.to_str().unwrap()]);
    assert!(refused.code != 0 && refused.err.contains("a daemon is using this disk"), "{}", refused.err);
    assert_eq!(tier(&client).blocks, 100);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    is_served(&client, &worker, namespace, 0..50);
}

/// A handler would write into a pipe that is closed there, and the daemon would go on after SIGTERM.
#[test]
fn a_thread_with_descriptors_of_its_own_takes_no_signal_of_the_daemon() {
    let (place, disk, directory) = (Place::new(), DiskFile::new(), tempfile::tempdir().expect("a directory"));
    let shared = ["--tier.fs.directories", directory.path().to_str().expect("UTF-8")];
    let (daemon, client, worker) = serving(&place, &disk.path, &shared);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..10);
    wait_until("the directory serves", || support::tiers::tier(&client, "fs").state == "serving");
    let process = PathBuf::from(format!("/proc/{}", daemon.pid()));
    // None of a thread that has ended, as those that open a directory do.
    let sockets = |of: &Path| {
        let entries = fs::read_dir(of.join("fd")).ok()?.flatten();
        Some(entries.filter_map(|entry| fs::read_link(entry.path()).ok()).filter(|link| is_socket(link)).count())
    };
    let of_the_daemon = sockets(&process).expect("its descriptors");
    let mut own = Vec::new();
    for task in fs::read_dir(process.join("task")).expect("its threads").flatten() {
        let read = |name| fs::read_to_string(task.path().join(name)).ok();
        let thread = (sockets(&task.path()), read("comm"), read("status"));
        let (Some(of_the_thread), Some(name), Some(status)) = thread else { continue };
        // Connections come and go, so the threads that share the daemon's table may differ by a few.
        if of_the_thread < of_the_daemon / 2 {
            own.push(name.trim().to_owned());
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask").trim();
            let blocked = u64::from_str_radix(blocked, 16).expect("a mask");
            for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
                assert_eq!(blocked >> (signal.as_raw() - 1) & 1, 1, "{signal:?} in {own:?}");
            }
        }
    }
    assert!(own.iter().any(|name| name == "forebay-ring") && own.len() > 1, "{own:?}");
}

fn is_socket(link: &Path) -> bool {
    link.to_string_lossy().starts_with("socket:")
}
