//! Blocks in parts, damaged objects, servers that refuse, cut answers off, hang.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Outcome, Tier};
use forebay_io::header::Sealing;
use forebay_io::object::{Object, ObjectConfig};
use forebay_io::uring::Region;

use crate::bed::*;
use crate::server::{Fault, Server};

const LENGTH: u64 = 100_000;
const CORRUPT: Outcome = Outcome::Failed(ErrorKind::Corrupt);
const IO: Outcome = Outcome::Failed(ErrorKind::Io);
const LATE: Outcome = Outcome::Failed(ErrorKind::Timeout);

fn served() -> (Server, Host) {
    let server = Server::start();
    let host = Host::open(&config(&server.endpoint));
    (server, host)
}

#[test]
fn a_large_block_goes_in_parts_and_comes_back_whole() {
    let server = Server::start();
    let mut host = Host::open(&ObjectConfig { part_bytes: 5 << 20, ..config(&server.endpoint) });
    // Just in one part, just in two, in three.
    for (number, length_bytes, parts) in [(0, (5 << 20) - 96, 0), (1, (5 << 20) - 95, 2), (2, 15 << 20, 4)] {
        let before = server.state.parts.load(Relaxed);
        host.is_stored(number, length_bytes);
        assert_eq!(server.state.parts.load(Relaxed) - before, parts, "{length_bytes}");
        host.verify(number, length_bytes);
    }
}

#[test]
fn an_object_that_is_not_the_block_is_never_data_and_can_be_stored_again() {
    let (server, mut host) = served();
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 7] = [
        ("a bit of the header", |bytes| bytes[20] ^= 1),
        ("a bit of the payload", |bytes| bytes[5000] ^= 1),
        ("its last byte", |bytes| *bytes.last_mut().unwrap() ^= 0x80),
        ("cut", |bytes| bytes.truncate(bytes.len() - 1)),
        ("cut in the header", |bytes| bytes.truncate(50)),
        ("longer", |bytes| bytes.push(0)),
        ("zeros", |bytes| bytes.fill(0)),
    ];
    for (what, change) in changes {
        host.is_stored(1, LENGTH);
        server.alter(change);
        host.fill(1, 0x77);
        assert_eq!(host.one(LOAD, 1, LENGTH), CORRUPT, "{what}");
        assert!(host.is_filled(1, 0x77), "{what}");
        assert_eq!(host.one(LOAD, 1, LENGTH), Outcome::Absent, "{what}: it is taken away");
    }
    // Another block's object under this name: whole, of the same length.
    host.is_stored(2, LENGTH);
    let other = server.state.objects.lock().unwrap().values().next().unwrap().clone();
    assert_eq!(host.one(REMOVE, 2, 0), Outcome::Removed);
    host.is_stored(1, LENGTH);
    server.alter(|bytes| *bytes = other);
    assert_eq!(host.one(LOAD, 1, LENGTH), CORRUPT);
    host.is_stored(1, LENGTH);
    host.verify(1, LENGTH);
}

#[test]
fn a_bit_that_flips_in_one_answer_costs_neither_the_object_nor_the_hit() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    server.fail("GET", Fault::Flip, 1);
    host.verify(1, LENGTH);
    let counters = host.tier.report().counters;
    assert_eq!((counters.misread_blocks, counters.corrupt_blocks), (1, 0));
    // In two answers, it is the object's.
    server.fail("GET", Fault::Flip, 2);
    assert_eq!(host.one(LOAD, 1, LENGTH), CORRUPT);
    assert_eq!(server.count(), 0);
    assert_eq!(host.tier.report().counters.misread_blocks, 1);
}

#[test]
fn bits_that_flip_in_other_places_each_time_cost_no_object() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    server.alter(|bytes| bytes[5000] ^= 1);
    server.fail("GET", Fault::Flip, 1);
    assert_eq!(host.one(LOAD, 1, LENGTH), IO);
    assert_eq!(server.count(), 1);
    assert_eq!(host.tier.report().counters.misread_blocks, 1);
}

/// Its header, resealed as a later version's.
fn make_later(object: &mut [u8]) {
    object[8..12].copy_from_slice(&2u32.to_le_bytes());
    let seal = forebay_core::checksum::checksum(&object[..88]);
    object[88..96].copy_from_slice(&seal.to_le_bytes());
}

#[test]
fn a_block_in_a_later_format_is_a_miss_and_stays() {
    let (server, mut host) = served();
    for grown in [0, 1000] {
        host.is_stored(1, LENGTH);
        server.alter(|bytes| {
            make_later(bytes);
            bytes.resize(bytes.len() + grown, 7);
        });
        let before = server.state.objects.lock().unwrap().clone();
        assert_eq!(host.one(LOAD, 1, LENGTH), Outcome::Absent, "{grown}");
        host.is_stored(1, LENGTH);
        assert_eq!(*server.state.objects.lock().unwrap(), before, "{grown}");
        assert_eq!(host.one(REMOVE, 1, 0), Outcome::Removed);
    }
}

#[test]
fn a_store_of_what_is_there_sends_nothing_and_of_what_is_cut_replaces_it() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    host.is_stored(1, LENGTH);
    let counters = host.tier.report().counters;
    assert_eq!((counters.stored_blocks, counters.repeated_stores), (1, 1));
    server.alter(|bytes| bytes.truncate(500));
    host.is_stored(1, LENGTH);
    host.verify(1, LENGTH);
}

#[test]
fn an_object_is_for_hosts_with_its_secret_and_one_without_a_mac_is_replaced_by_those_with_one() {
    let (server, mut host) = served();
    let with = |secret: u8| {
        let sealing = Sealing::with(&[secret; 32]).unwrap();
        Host::open(&ObjectConfig { sealing, ..config(&server.endpoint) })
    };
    let (mut ours, mut theirs) = (with(1), with(2));
    host.is_stored(1, LENGTH);
    ours.is_stored(1, LENGTH);
    ours.is_stored(1, LENGTH);
    let counters = ours.tier.report().counters;
    assert_eq!((counters.stored_blocks, counters.repeated_stores), (1, 1));
    ours.verify(1, LENGTH);
    assert_eq!(host.one(LOAD, 1, LENGTH), Outcome::Absent, "later for a host without a secret");
    host.is_stored(1, LENGTH);
    ours.verify(1, LENGTH);
    theirs.fill(1, 0x77);
    assert_eq!(theirs.one(LOAD, 1, LENGTH), Outcome::Failed(ErrorKind::Corrupt));
    assert!(theirs.is_filled(1, 0x77) && server.state.objects.lock().unwrap().is_empty());
    theirs.is_stored(1, LENGTH);
    theirs.verify(1, LENGTH);
}

#[test]
fn a_server_that_fails_fails_that_operation_alone() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    host.fill(1, 0x77);
    for (fault, expected) in [
        (Fault::Status(500), IO),
        (Fault::Status(503), IO),
        (Fault::Status(403), Outcome::Failed(ErrorKind::Unsupported)),
        (Fault::Status(404), Outcome::Absent),
        (Fault::Cut, IO),
    ] {
        server.fail("GET", fault, 1);
        assert_eq!(host.one(LOAD, 1, LENGTH), expected, "{fault:?}");
        assert!(host.is_filled(1, 0x77), "{fault:?}");
    }
    server.fail("PUT", Fault::Status(500), 1);
    assert_eq!(host.store(2, LENGTH), IO);
    assert_eq!(host.one(OpKind::Exists, 2, 0), Outcome::Absent);
    host.is_stored(2, LENGTH);
    host.verify(1, LENGTH);
    host.verify(2, LENGTH);
}

#[test]
fn a_part_that_fails_leaves_no_object() {
    let server = Server::start();
    let mut host = Host::open(&ObjectConfig { part_bytes: 5 << 20, ..config(&server.endpoint) });
    server.fail("PUT", Fault::Status(500), 1);
    assert_eq!(host.store(1, 12 << 20), IO);
    assert_eq!(server.count(), 0);
    host.is_stored(1, 12 << 20);
    host.verify(1, 12 << 20);
}

#[test]
fn a_server_that_hangs_is_waited_for_until_the_timeout_and_no_longer() {
    let server = Server::start();
    let timeout = Duration::from_secs(3);
    let mut host = Host::open(&ObjectConfig { timeout, requests: 4, ..config(&server.endpoint) });
    host.is_stored(1, LENGTH);
    host.fill(1, 0x77);
    server.fail("GET", Fault::Hang, 8);
    // More than requests at a time: those behind wait no longer than those before.
    let loads: Vec<_> = (0..8).map(|_| host.op(LOAD, 1, LENGTH)).collect();
    let begun = Instant::now();
    let outcomes = host.run(&loads);
    assert!(begun.elapsed() < DEADLINE / 2);
    assert!(outcomes.iter().all(|outcome| [LATE, IO].contains(outcome)), "{outcomes:?}");
    assert!(host.is_filled(1, 0x77));
    server.fail("GET", Fault::Hang, 0);
    host.verify(1, LENGTH);

    server.fail("HEAD", Fault::Hang, 1);
    assert!([LATE, IO].contains(&host.store(2, LENGTH)));
    host.is_stored(2, LENGTH);
}

#[test]
fn a_cancelled_load_is_answered_at_once_and_a_tier_is_closed_while_the_server_hangs() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    server.fail("GET", Fault::Hang, 9);
    let load = host.op(LOAD, 1, LENGTH);
    assert_eq!(host.tier.submit(&[load]), 1);
    host.tier.cancel(load.id);
    let mut completions = Vec::new();
    host.tier.poll(&mut completions);
    assert_eq!(completions.iter().map(|done| done.outcome).collect::<Vec<_>>(), [LATE]);
    let load = host.op(LOAD, 1, LENGTH);
    assert_eq!(host.tier.submit(&[load]), 1);
    let begun = Instant::now();
    drop(host);
    assert!(begun.elapsed() < DEADLINE / 4, "the timeout is half a minute");
}

#[test]
fn what_cannot_be_used_is_refused_with_a_hint() {
    let server = Server::start();
    let good = config(&server.endpoint);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (wrong, kind) in [
        (ObjectConfig { bucket: String::new(), ..good.clone() }, ErrorKind::Invalid),
        (ObjectConfig { prefix: "/a".to_owned(), ..good.clone() }, ErrorKind::Invalid),
        (ObjectConfig { part_bytes: 1 << 20, ..good.clone() }, ErrorKind::Invalid),
        (ObjectConfig { secret_access_key: None, ..good.clone() }, ErrorKind::Invalid),
        (ObjectConfig { requests: 0, ..good.clone() }, ErrorKind::Invalid),
        (ObjectConfig { bucket: "elsewhere".to_owned(), ..good.clone() }, ErrorKind::Unavailable),
        (ObjectConfig { endpoint: Some(format!("http://{nobody}")), ..good.clone() }, ErrorKind::Unavailable),
    ] {
        let error = Object::open(&wrong, Region::anonymous(4096).unwrap()).err().expect("it is refused");
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.hint_text().is_some() && !format!("{wrong:?} {error}").contains("\"secret\""), "{wrong:?}");
    }
}

#[test]
fn a_reader_stores_and_removes_nothing() {
    let (server, mut host) = served();
    host.is_stored(1, LENGTH);
    let mut reader = Host::open(&ObjectConfig { read_only: true, ..config(&server.endpoint) });
    assert!(!reader.tier.capabilities().can_store);
    let refused = Outcome::Failed(ErrorKind::Unsupported);
    assert_eq!((reader.store(2, LENGTH), reader.one(REMOVE, 1, 0)), (refused, refused));
    reader.verify(1, LENGTH);
    server.alter(|bytes| bytes[5000] ^= 1);
    assert_eq!(reader.one(LOAD, 1, LENGTH), CORRUPT);
    assert_eq!(server.count(), 1);
}
