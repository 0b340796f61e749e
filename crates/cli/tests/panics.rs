//! A panic ends the shipped daemon, for good and with a reason, whichever of its threads it meets; the next one serves.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;

use forebay_rpc::proto::*;
use support::*;

const BYTES: u64 = 20_000;
/// Without the scrub, which would find the spoilt block, and free its slot, before anybody trips over it.
const SMALL: &[&str] = &["--pool.capacity_bytes", "32MiB", "--pool.scrub_bytes_per_second", "0"];
/// Where the table's entries begin, and the bytes of each.
const ENTRIES_AT: u64 = 1 << 20;
const ENTRY_BYTES: u64 = 128;

/// Spoils the whole table under the running daemon, as nobody but its own user could: what cannot be, is asserted.
fn spoil_table(place: &Place, pages: u64) {
    let mounted = place.pool().join("mnt/table");
    let path = if mounted.exists() { mounted } else { place.pool().join("table") };
    let table = fs::File::options().write(true).open(path).expect("the pool's table");
    table.write_all_at(&vec![0xa5; (pages * ENTRY_BYTES) as usize], ENTRIES_AT).expect("its entries");
}

#[test]
fn a_panic_in_an_event_ends_the_daemon_and_the_next_one_serves() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 1);
    assert_eq!(client.commit(namespace, &[hash(1)], &slots), [CommitOutcome::CommitStored]);
    spoil_table(&place, (32 << 20) / 4096);
    let request = ReserveRequest { session: client.welcome.session, namespace, group: 0, count: 1 };
    call!(client, reserve, request).expect_err("the daemon is gone");
    let (succeeded, log) = daemon.finish();
    assert!(!succeeded);
    for word in ["the daemon stops: thread `main` panicked at", "reserved while", "hint: ", "daemon/src/state.rs"] {
        assert!(log.contains(word), "`{word}` is missing in:\n{log}");
    }
    drop((client, worker));
    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 2);
    assert_eq!(client.commit(namespace, &[hash(2)], &slots), [CommitOutcome::CommitStored]);
}

#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let place = Place::new();
    // Each write to it fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", place.log()).expect("a log file");
    let mut daemon = Daemon::spawn(&place, SMALL).listening(&place);
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("some of the pool is populated", || client.inspect().populated_bytes > 0);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 1);
    assert_eq!(client.commit(namespace, &[hash(1)], &slots), [CommitOutcome::CommitStored]);
    assert!(daemon.is_running());
}
