//! What happens to real servers: values that go, memory that ends, processes that are killed, stopped, or not there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::checksum::checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Health, Operation, Outcome, Tier};
use forebay_io::header::Sealing;
use forebay_io::redis::RedisConfig;
use rustix::process::Signal;

use crate::bed::{Bed, KIB, SLOT_BYTES, block_bytes, config, key, loaded, name_of};
use crate::fake::{Answer, Fake, Then, well_behaved};
use crate::purge::{OWN, emptied};
use crate::servers::{BOTH, Kind, Server, until};

const STORED: Outcome = Outcome::Stored;

fn failed(kind: ErrorKind) -> Outcome {
    Outcome::Failed(kind)
}

#[test]
fn a_missing_key_in_the_middle_of_a_batch_is_absent_and_the_rest_is_delivered() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&config(&server.url()));
        bed.store_all(0..32, SLOT_BYTES);
        server.admin().must(&["DEL", &name_of(&key(17))]);
        let loads: Vec<_> = (0..32).map(|number| bed.load(number, number, SLOT_BYTES)).collect();
        let outcomes = bed.run(&loads);
        for (number, outcome) in (0..).zip(outcomes) {
            let expected = if number == 17 { Outcome::Absent } else { loaded(number, SLOT_BYTES) };
            assert_eq!(outcome, expected, "block {number}");
            assert!(number == 17 || bed.holds(number, number, SLOT_BYTES));
        }
        assert_eq!(bed.redis.report().counters.connections_lost, 0, "a miss is a value");
    }
}

#[test]
fn a_block_that_is_evicted_between_lookup_and_load_is_absent() {
    let server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all([1], 5000);
    let find = bed.find(1);
    assert!(matches!(bed.run(&[find])[0], Outcome::Found));
    server.admin().must(&["FLUSHALL"]);
    assert_eq!(bed.look(1, 5000), Outcome::Absent);
}

#[test]
fn a_split_block_without_all_of_its_parts_is_absent() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&RedisConfig { value_bytes: 16 * KIB, ..config(&server.url()) });
    bed.store_all([1, 2], SLOT_BYTES);
    server.admin().must(&["DEL", &format!("{}:2", name_of(&key(1)))]);
    assert_eq!(bed.look(1, SLOT_BYTES), Outcome::Absent);
    assert_eq!(bed.look(2, SLOT_BYTES), loaded(2, SLOT_BYTES));
    // A lookup that knows the length asks for all parts.
    let finds = [1, 2].map(|number| Operation { length_bytes: SLOT_BYTES, ..bed.find(number) });
    assert_eq!(bed.run(&finds), [Outcome::Absent, Outcome::Found]);
}

#[test]
fn a_server_without_memory_refuses_a_store_and_the_connection_goes_on() {
    for kind in BOTH {
        let server = Server::with(kind, &["--maxmemory-policy", "noeviction"]);
        let mut bed = Bed::ready(&config(&server.url()));
        bed.store_all([1], SLOT_BYTES);
        server.admin().must(&["CONFIG", "SET", "maxmemory", "1"]);
        for round in 0..10 {
            let ops: Vec<_> =
                (10..20)
                    .map(|number| {
                        if number % 2 == 0 { bed.store(number, number, 9000) } else { bed.load(1, number, SLOT_BYTES) }
                    })
                    .collect();
            let expected: Vec<_> = (10..20)
                .map(|number| if number % 2 == 0 { failed(ErrorKind::Full) } else { loaded(1, SLOT_BYTES) })
                .collect();
            assert_eq!(bed.run(&ops), expected, "round {round}");
        }
        server.admin().must(&["CONFIG", "SET", "maxmemory", "0"]);
        bed.store_all(20..60, 9000);
        for number in 20..60 {
            assert_eq!(bed.look(number, 9000), loaded(number, 9000));
        }
        let counters = bed.redis.report().counters;
        assert_eq!((counters.connections_lost, counters.full_stores), (0, 50));
    }
}

/// Makes a server refuse writes, and take them again.
struct Refusal {
    code: &'static str,
    begin: fn(&Server),
    end: fn(&Server),
}

const REFUSALS: [Refusal; 3] = [
    Refusal {
        code: "NOREPLICAS",
        begin: |server| drop(server.admin().must(&["CONFIG", "SET", "min-replicas-to-write", "1"])),
        end: |server| drop(server.admin().must(&["CONFIG", "SET", "min-replicas-to-write", "0"])),
    },
    Refusal {
        code: "MISCONF",
        // The file that it saves to is a directory.
        begin: |server| {
            std::fs::create_dir(server.directory.path().join("values")).unwrap();
            server.admin().must(&["CONFIG", "SET", "save", "3600 1"]);
            server.admin().must(&["BGSAVE"]);
            let has_failed = || server.admin().ask(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:err");
            until(has_failed, || "the server saves".to_string());
        },
        end: |server| drop(server.admin().must(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"])),
    },
    Refusal {
        code: "READONLY",
        // Its master is not there, so it keeps what it holds.
        begin: |server| drop(server.admin().must(&["REPLICAOF", "127.0.0.1", "1"])),
        end: |server| drop(server.admin().must(&["REPLICAOF", "NO", "ONE"])),
    },
];

#[test]
fn a_server_that_refuses_writes_is_read_in_full() {
    for kind in BOTH {
        for refusal in &REFUSALS {
            let server = Server::with(kind, &["--dbfilename", "values"]);
            let mut bed = Bed::ready(&config(&server.url()));
            bed.store_all([1], SLOT_BYTES);
            (refusal.begin)(&server);
            let said = server.admin().ask(&["SET", "elsewhere", "1"]);
            assert!(said.starts_with(&format!("-{}", refusal.code)), "{kind:?}: {said}");
            for round in 0..10 {
                let of =
                    |even, odd| (10..20).map(|number| if number % 2 == 0 { even } else { odd }).collect::<Vec<_>>();
                let ops: Vec<_> = (10..20)
                    .map(|number| match number % 2 {
                        0 => bed.store(number, number, 9000),
                        _ => bed.load(1, number, SLOT_BYTES),
                    })
                    .collect();
                let expected = of(failed(ErrorKind::Full), loaded(1, SLOT_BYTES));
                assert_eq!(bed.run(&ops), expected, "{kind:?}, {}, round {round}", refusal.code);
            }
            let counters = bed.redis.report().counters;
            assert_eq!((counters.full_stores, counters.breakers_opened), (50, 0), "{kind:?}, {}", refusal.code);
            let is_replaced = counters.connections_lost > 0;
            assert_eq!(is_replaced, refusal.code == "READONLY", "{kind:?}, {}", refusal.code);
            (refusal.end)(&server);
            bed.store_all(20..60, 9000);
        }
    }
}

/// As a proxy may when it restarts, or when it forgets who logged in.
#[test]
fn a_connection_whose_login_is_taken_back_is_replaced() {
    let forgotten = Arc::new(AtomicUsize::new(0));
    let now = forgotten.clone();
    let server = Fake::start_tcp(move |_| {
        let (now, born) = (now.clone(), now.load(Ordering::SeqCst));
        Box::new(move |command, store| {
            let is_known = now.load(Ordering::SeqCst) == born;
            Answer::say(if is_known {
                well_behaved(command, store)
            } else {
                b"-NOAUTH Authentication required.\r\n".to_vec()
            })
        })
    });
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all([1], SLOT_BYTES);
    for round in 1..3 {
        forgotten.store(round, Ordering::SeqCst);
        until(|| bed.look(1, SLOT_BYTES) == loaded(1, SLOT_BYTES), || format!("round {round}: it logs in no more"));
    }
    assert!(bed.redis.report().counters.connections_lost >= 2);
}

#[test]
fn a_server_that_answers_reads_with_errors_is_sick_in_its_words_and_by_its_address() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&config(&server.url()));
        server.admin().must(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
        server.admin().must(&["REPLICAOF", "127.0.0.1", "1"]);
        sickens(&mut bed, |bed, ops| drop(bed.run(ops)));
        let (why, _) = bed.redis.report().last_error.expect("there was a problem");
        let socket = server.socket();
        assert!(why.contains("MASTERDOWN") && why.contains(socket.to_str().unwrap()), "{kind:?}: {why}");
        server.admin().must(&["REPLICAOF", "NO", "ONE"]);
        bed.await_service();
    }
}

#[test]
fn a_server_that_leaves_reads_unanswered_is_sick_with_its_address_before_its_connections_end() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&config(&server.url()));
    server.signal(Signal::STOP);
    sickens(&mut bed, |bed, ops| {
        bed.submit(ops);
        ops.iter().for_each(|op| bed.redis.cancel(op.id));
        bed.outcomes_of(ops);
    });
    let report = bed.redis.report();
    assert_eq!(report.counters.connections_lost, 0);
    let (why, _) = report.last_error.expect("there was a problem");
    assert!(why.contains("in time") && why.contains(server.socket().to_str().unwrap()), "{why}");
    server.signal(Signal::CONT);
    bed.await_service();
}

/// Looks and loads as `reads` does until the tier says that it is sick.
fn sickens(bed: &mut Bed, reads: impl Fn(&mut Bed, &[Operation])) {
    until(
        || {
            let ops = [bed.find(1), bed.load(1, 1, 4096)];
            reads(bed, &ops);
            bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
        },
        || "the tier stays well".to_string(),
    );
}

#[test]
fn what_others_wrote_under_a_blocks_name_is_corrupt_and_the_connection_goes_on() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&config(&server.url()));
        bed.store_all([1, 2, 3, 4, 5], 5000);
        let (mut admin, name) = (server.admin(), |number| name_of(&key(number)));
        admin.must(&[b"SET".as_slice(), name(1).as_bytes(), &[b'x'; 5096]]);
        admin.must(&[b"SET".as_slice(), name(2).as_bytes(), b"short"]);
        admin.must(&["DEL", &name(3)]);
        admin.must(&["LPUSH", &name(3), "a list"]);
        admin.must(&["SETRANGE", &name(4), "100", "\u{1}\u{2}"]);
        admin.must(&["APPEND", &name(5), "more"]);
        for number in 1..=5 {
            bed.fill(0, 0xEE);
            assert_eq!(bed.look(number, 5000), failed(ErrorKind::Corrupt), "block {number}");
        }
        bed.store_all([6], 5000);
        assert_eq!(bed.look(6, 5000), loaded(6, 5000));
        let counters = bed.redis.report().counters;
        assert_eq!(counters.connections_lost, 0);
        assert_eq!((counters.foreign_values, counters.wrong_sizes, counters.corrupt_blocks), (1, 2, 1));
    }
}

#[test]
fn a_block_of_another_length_is_not_damaged_whole_or_split() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&RedisConfig { value_bytes: 4096, ..config(&server.url()) });
        // One value, the same number of values, more of them, fewer of them.
        let lengths = [(3000, 2000), (9000, 9001), (9000, 20_000), (20_000, 9000), (8192, 4096)];
        for (number, (stored_bytes, asked_bytes)) in (0..).zip(lengths) {
            bed.store_all([number], stored_bytes);
            assert_eq!(bed.look(number, asked_bytes), failed(ErrorKind::Invalid), "{stored_bytes}, {asked_bytes}");
            assert_eq!(bed.look(number, stored_bytes), loaded(number, stored_bytes));
        }
        let counters = bed.redis.report().counters;
        assert_eq!((counters.wrong_sizes, counters.foreign_values, counters.corrupt_blocks), (5, 0, 0));
        assert_eq!((counters.refused_operations, counters.connections_lost), (0, 0));
    }
}

#[test]
fn a_value_of_a_later_version_is_absent_and_stays() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&config(&server.url()));
        bed.store_all([1, 2], 5000);
        let mut admin = server.admin();
        for (number, more) in [(1, ""), (2, "more")] {
            let name = name_of(&key(number));
            let sum = checksum(&block_bytes(number, 5000));
            let header = Sealing::default().header(&key(number), 5000, sum, |_| ());
            let mut header = header.expect("no byte is read").write();
            header[8] += 1;
            let seal = checksum(&header[..88]);
            header[88..].copy_from_slice(&seal.to_le_bytes());
            admin.must(&[b"SETRANGE".as_slice(), name.as_bytes(), b"0", &header]);
            admin.must(&["APPEND", &name, more]);
        }
        for number in [1, 2] {
            assert_eq!(bed.look(number, 5000), Outcome::Absent, "{kind:?}, block {number}");
            assert_eq!(admin.must(&["EXISTS", &name_of(&key(number))]), "1");
        }
        let counters = bed.redis.report().counters;
        assert_eq!((counters.foreign_values, counters.wrong_sizes, counters.connections_lost), (0, 0, 0));
    }
}

/// Such a MAC would make them right for every host. Without a secret, the checksum tells each of them.
#[test]
fn bytes_that_changed_in_the_pool_get_no_mac() {
    let (server, sealing) = (Server::start(Kind::Redis), Sealing::with(&[7; 32]).unwrap());
    let mut bed = Bed::ready(&RedisConfig { value_bytes: 16 * KIB, sealing, ..config(&server.url()) });
    let (damaged, good) = (bed.store(1, 1, 40 * KIB), bed.store(2, 2, 40 * KIB));
    bed.pool.write(SLOT_BYTES + 17_000, &[!block_bytes(1, 40 * KIB)[17_000]]);
    let outcomes = bed.run(&[damaged, good]);
    assert_eq!(outcomes, [failed(ErrorKind::Corrupt), STORED]);
    assert_eq!(server.admin().must(&["DBSIZE"]), "3", "the three parts of the good one");
    assert_eq!(bed.look(2, 40 * KIB), loaded(2, 40 * KIB));
    let counters = bed.redis.report().counters;
    assert_eq!((counters.corrupt_blocks, counters.connections_lost), (1, 0));
}

/// A later build names its values after its version: no store, load or removal of this one meets them.
#[test]
fn a_block_of_a_later_version_stays_whatever_is_done_with_the_block_here() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&RedisConfig { value_bytes: 16 * KIB, ..config(&server.url()) });
        let mut admin = server.admin();
        let later = ["v2", "v2:1", "v2:2"].map(|more| format!("{}{more}", name_of(&key(1))));
        later.iter().for_each(|name| drop(admin.must(&["SET", name, "a later version's"])));
        assert_eq!(bed.look(1, 40 * KIB), Outcome::Absent, "a miss");
        bed.store_all([1], 40 * KIB);
        assert_eq!(bed.look(1, 40 * KIB), loaded(1, 40 * KIB));
        let remove = Operation { length_bytes: 40 * KIB, ..bed.remove(1) };
        assert_eq!(bed.run(&[remove]), [Outcome::Removed]);
        for name in &later {
            assert_eq!(admin.must(&["GET", name]), "a later version's", "{kind:?} {name}");
        }
        assert_eq!(admin.must(&["DBSIZE"]), "3");
        assert_eq!(emptied(&bed, &[OWN]), (1, 3), "a purge leaves no version");
    }
}

#[test]
fn a_value_of_another_block_is_corrupt_and_ends_the_connection() {
    let server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all([1, 2], 5000);
    server.admin().must(&["COPY", &name_of(&key(1)), &name_of(&key(2)), "REPLACE"]);
    assert_eq!(bed.look(2, 5000), failed(ErrorKind::Corrupt));
    assert_eq!(bed.redis.report().counters.lost_steps, 1);
    bed.await_service();
    assert_eq!(bed.look(1, 5000), loaded(1, 5000));
}

#[test]
fn a_server_that_is_absent_at_start_is_found_when_it_comes() {
    let mut server = Server::start(Kind::Valkey);
    server.kill();
    let mut bed = Bed::open(&config(&server.url()));
    until(
        || {
            bed.turn();
            bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
        },
        || "an absent server does not show".to_string(),
    );
    let ops = [bed.load(1, 1, 4096), bed.find(1), bed.store(1, 2, 4096)];
    assert_eq!(bed.run(&ops), [failed(ErrorKind::Unavailable); 3]);
    server.restart();
    bed.await_service();
    bed.store_all([1], 4096);
    assert_eq!(bed.look(1, 4096), loaded(1, 4096));
}

#[test]
fn a_server_that_is_killed_under_load_fails_what_it_had_and_serves_again_when_it_is_back() {
    for kind in BOTH {
        let mut server = Server::start(kind);
        let mut bed = Bed::ready(&config(&server.url()));
        for round in 0..5 {
            bed.store_all(0..32, SLOT_BYTES);
            let loads: Vec<_> = (0..32).map(|number| bed.load(number, number, SLOT_BYTES)).collect();
            bed.submit(&loads);
            server.kill();
            for (number, outcome) in (0..).zip(bed.outcomes_of(&loads)) {
                match outcome {
                    Outcome::Loaded { .. } => assert!(bed.holds(number, number, SLOT_BYTES), "round {round}"),
                    outcome => assert_eq!(outcome, failed(ErrorKind::Unavailable), "round {round}"),
                }
            }
            server.restart();
            bed.await_service();
        }
    }
}

#[test]
fn a_server_that_stands_still_costs_a_timeout_and_is_used_again_when_it_goes_on() {
    let server = Server::start(Kind::Redis);
    let short = Duration::from_millis(300);
    let mut bed =
        Bed::ready(&RedisConfig { operation_timeout: short, connect_timeout: short, ..config(&server.url()) });
    bed.store_all(0..4, SLOT_BYTES);
    server.signal(Signal::STOP);
    let mut ops: Vec<_> = (0..4).map(|number| bed.load(number, number, SLOT_BYTES)).collect();
    ops.push(bed.find(1));
    for (op, outcome) in ops.iter().zip(bed.run(&ops)) {
        assert_eq!(outcome, failed(ErrorKind::Timeout), "{op:?}");
    }
    // What it says when it goes on reaches no slot.
    (0..4).for_each(|slot| bed.fill(slot, 0xEE));
    server.signal(Signal::CONT);
    bed.await_service();
    assert!((0..4).all(|slot| bed.is_filled(slot, 0xEE)), "late bytes landed in a slot");
    assert_eq!(bed.look(1, SLOT_BYTES), loaded(1, SLOT_BYTES));
}

#[test]
fn a_cancelled_load_completes_at_once_and_its_bytes_land_nowhere() {
    let server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&RedisConfig { connections: 1, ..config(&server.url()) });
    bed.store_all(0..16, SLOT_BYTES);
    server.signal(Signal::STOP);
    let loads: Vec<_> = (0..16).map(|number| bed.load(number, number, SLOT_BYTES)).collect();
    bed.submit(&loads);
    loads[..15].iter().for_each(|op| bed.redis.cancel(op.id));
    assert_eq!(bed.outcomes_of(&loads[..15]), [failed(ErrorKind::Timeout); 15], "though the server stands still");
    (0..15).for_each(|slot| bed.fill(slot, 0xEE));
    server.signal(Signal::CONT);
    assert_eq!(bed.outcomes_of(&loads[15..]), [loaded(15, SLOT_BYTES)], "the connection is in step");
    assert!((0..15).all(|slot| bed.is_filled(slot, 0xEE)), "late bytes landed in a slot");
    assert_eq!(bed.redis.report().counters.connections_lost, 0);
}

#[test]
fn stores_under_a_lifetime_end_with_it() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&RedisConfig { ttl_seconds: Some(1000), value_bytes: 4 * KIB, ..config(&server.url()) });
    bed.store_all([1], 9000);
    for name in [name_of(&key(1)), format!("{}:2", name_of(&key(1)))] {
        let left: u64 = server.admin().must(&["TTL", &name]).parse().unwrap();
        assert!((900..=1000).contains(&left), "{name} lives for {left} s");
    }
}

#[test]
fn loads_pass_stores_that_wait() {
    let server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&RedisConfig { connections: 1, pipeline_depth: 1, ..config(&server.url()) });
    bed.store_all([1], 4096);
    server.signal(Signal::STOP);
    let mut ops: Vec<_> = (10..50).map(|number| bed.store(number, number, SLOT_BYTES)).collect();
    ops.push(bed.load(1, 60, 4096));
    bed.submit(&ops);
    server.signal(Signal::CONT);
    let (stores, load) = ops.split_at(40);
    assert_eq!(bed.outcomes_of(load), [loaded(1, 4096)]);
    assert_eq!(bed.outcomes_of(stores), [STORED; 40]);
    let begin = bed.ended.len() - ops.len();
    assert!(bed.ended[begin..][..2].contains(&load[0].id), "more came first than the store that was on its way");
}

#[test]
fn more_than_the_limits_is_refused_and_a_drain_ends_all_that_was_taken() {
    let server = Server::start(Kind::Valkey);
    let limits = RedisConfig { queued_loads: 5, queued_stores: 3, queued_finds: 7, ..config(&server.url()) };
    let mut bed = Bed::ready(&limits);
    server.signal(Signal::STOP);
    let loads: Vec<_> = (0..9).map(|number| bed.load(number, number, 4096)).collect();
    let stores: Vec<_> = (0..9).map(|number| bed.store(number, 20 + number, 4096)).collect();
    let finds: Vec<_> = (0..9).map(|number| bed.find(number)).collect();
    let taken = [&loads, &stores, &finds].map(|ops| bed.redis.submit(ops));
    assert_eq!(taken, [5, 3, 7]);
    assert_eq!(bed.redis.submit(&[finds[7], loads[5]]), 0);
    let mut completions = Vec::new();
    assert!(!bed.redis.drain(Duration::from_millis(10), &mut completions), "the server stands still");
    server.signal(Signal::CONT);
    assert!(bed.redis.drain(crate::servers::PATIENCE, &mut completions));
    assert_eq!(completions.len(), 15);
    let report = bed.redis.report();
    assert_eq!((report.loads, report.stores, report.finds), (0, 0, 0));
}

#[test]
fn lookups_do_not_wait_behind_stores() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all(0..20, 4096);
    let stores: Vec<_> = (100..160).map(|number| bed.store(number, number - 100, SLOT_BYTES)).collect();
    let finds: Vec<_> = (0..40).map(|number| bed.find(number)).collect();
    // Held back, so that all of them are sent before any is answered.
    server.signal(Signal::STOP);
    bed.submit(&stores);
    bed.submit(&finds);
    server.signal(Signal::CONT);
    for (number, outcome) in finds.iter().zip(bed.outcomes_of(&finds)).map(|(op, outcome)| (op.key, outcome)) {
        let is_there = (0..20).any(|there| key(there) == number);
        assert_eq!(matches!(outcome, Outcome::Found), is_there);
    }
    assert_eq!(bed.outcomes_of(&stores), [STORED; 60]);
    let removes: Vec<_> = (0..2).map(|_| bed.remove(3)).collect();
    let [first, second] = [0, 1].map(|at| bed.run(&removes[at..=at])[0]);
    assert_eq!((first, second), (Outcome::Removed, Outcome::Absent));
}

#[test]
fn whatever_a_server_says_or_does_to_all_writes_is_told_until_it_takes_one() {
    let cases = [
        (
            "-ERR unknown command 'SET', with args beginning with: 'forebay:{feed:1:8}' 'FOREBAYB'",
            "ERR unknown command",
        ),
        ("-CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        ("-NOAUTH Authentication required.", "NOAUTH"),
        ("", "the connection ends"),
    ];
    std::thread::scope(|scope| {
        for (says, told) in cases {
            scope.spawn(move || tells_of(says, told));
        }
    });
}

/// Of a server that answers each write so, or without an answer ends the connection.
fn tells_of(says: &'static str, told: &str) {
    let refuses = Arc::new(AtomicBool::new(false));
    let is_told = refuses.clone();
    let server = Fake::start(move |_| {
        let refuses = is_told.clone();
        Box::new(move |command, store| match (command[0] == b"SET" && refuses.load(Ordering::Relaxed), says) {
            (true, "") => Answer { then: Then::Close, ..Answer::say("") },
            (true, _) => Answer::say(format!("{says}\r\n")),
            (false, _) => Answer::say(well_behaved(command, store)),
        })
    });
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all([7], 4096);
    let writes_until = |bed: &mut Bed, is_so: &dyn Fn(Option<String>) -> bool| {
        until(
            || {
                let store = bed.store(8, 8, 4096);
                bed.run(&[store]);
                bed.redis.advance(Duration::ZERO);
                is_so(bed.redis.report().refuses_writes)
            },
            || format!("after {says:?}"),
        );
    };
    refuses.store(true, Ordering::Relaxed);
    writes_until(&mut bed, &|refusal| refusal.is_some_and(|why| why.starts_with(told) && why.len() < 60));
    until(|| bed.look(7, 4096) == loaded(7, 4096), || format!("it is not read after {says:?}"));
    refuses.store(false, Ordering::Relaxed);
    writes_until(&mut bed, &|refusal| refusal.is_none());
}

#[test]
fn writes_that_reach_no_server_are_no_refusals() {
    let mut server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&config(&server.url()));
    server.kill();
    let begun = Instant::now();
    until(
        || {
            let store = bed.store(8, 8, 4096);
            bed.run(&[store]);
            bed.redis.advance(Duration::ZERO);
            // Refusals that last so long are told.
            begun.elapsed() > Duration::from_secs(7)
        },
        || "the time passes".to_string(),
    );
    assert_eq!(bed.redis.report().refuses_writes, None);
    assert!(matches!(bed.redis.health(), Health::Sick(_)));
}
