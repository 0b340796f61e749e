//! Servers that answer reads and let changes hang, as during a failover: nothing that is read waits for a change.

use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Health, OpKind, Operation, Outcome, Tier};
use forebay_io::redis::RedisConfig;

use crate::bed::{Bed, SLOT_BYTES, config, loaded};
use crate::servers::{BOTH, Kind, Server, until};

/// Longer than a test.
const FOREVER: Duration = Duration::from_secs(3600);
const UNAVAILABLE: Outcome = Outcome::Failed(ErrorKind::Unavailable);

fn pause(server: &Server) {
    server.admin().must(&["CLIENT", "PAUSE", "3600000", "WRITE"]);
}

fn unpause(server: &Server) {
    server.admin().must(&["CLIENT", "UNPAUSE"]);
}

fn stores(bed: &mut Bed, numbers: std::ops::Range<u64>) -> Vec<Operation> {
    numbers.map(|number| bed.store(number, number % 32, SLOT_BYTES)).collect()
}

fn loads(bed: &mut Bed) -> Vec<Operation> {
    (0..16).map(|number| bed.load(number, 40 + number, SLOT_BYTES)).collect()
}

#[test]
fn loads_do_not_wait_for_stores_that_hang() {
    for kind in BOTH {
        let server = Server::start(kind);
        let mut bed = Bed::ready(&RedisConfig { operation_timeout: FOREVER, ..config(&server.url()) });
        bed.store_all(0..16, SLOT_BYTES);
        pause(&server);
        let hanging = stores(&mut bed, 100..132);
        bed.submit(&hanging);
        for round in 0..8 {
            let loads = loads(&mut bed);
            let expected: Vec<_> = (0..16).map(|number| loaded(number, SLOT_BYTES)).collect();
            assert_eq!(bed.run(&loads), expected, "{kind:?}, round {round}");
            assert_eq!(bed.redis.report().stores, 32, "they hang still");
        }
        unpause(&server);
        assert_eq!(bed.outcomes_of(&hanging), [Outcome::Stored; 32]);
        assert_eq!(bed.redis.report().counters.connections_lost, 0);
    }
}

#[test]
fn probes_do_not_wait_for_touches_that_hang() {
    for kind in BOTH {
        let server = Server::start(kind);
        let config = RedisConfig { operation_timeout: FOREVER, ttl_seconds: Some(1000), ..config(&server.url()) };
        let mut bed = Bed::ready(&config);
        bed.store_all(0..16, SLOT_BYTES);
        pause(&server);
        let touch = |bed: &mut Bed, number| Operation {
            kind: OpKind::Touch { fresh_seconds: 0 },
            length_bytes: SLOT_BYTES,
            ..bed.find(number)
        };
        let touches: Vec<_> = (0..16).map(|number| touch(&mut bed, number)).collect();
        bed.submit(&touches);
        for number in 0..16 {
            let find = bed.find(number);
            assert_eq!(bed.run(&[find]), [Outcome::Found], "{kind:?}");
            assert_eq!(bed.look(number, SLOT_BYTES), loaded(number, SLOT_BYTES), "{kind:?}");
        }
        unpause(&server);
        assert_eq!(bed.outcomes_of(&touches), [Outcome::Found; 16]);
    }
}

/// The first connection ends, and the next one, which carries a part of a block, takes its place.
#[test]
fn a_store_goes_on_when_its_connection_becomes_the_first() {
    let server = Server::start(Kind::Redis);
    let few = RedisConfig { connections: 3, value_bytes: 4096, pipeline_bytes: 4096, ..config(&server.url()) };
    let mut bed = Bed::ready(&RedisConfig { operation_timeout: FOREVER, ..few });
    let mut admin = server.admin();
    admin.must(&["CLIENT", "PAUSE", "3600000", "WRITE"]);
    let store = bed.store(1, 1, SLOT_BYTES);
    bed.submit(&[store]);
    let with = |list: &str, word: &str| -> Vec<u64> {
        let id = |line: &str| line.split_once("id=")?.1.split(' ').next()?.parse().ok();
        list.lines().filter(|line| line.contains(word)).filter_map(id).collect()
    };
    let mut list = String::new();
    until(
        || {
            list = admin.must(&["CLIENT", "LIST"]);
            with(&list, "cmd=set").len() == 1
        },
        || "the store is sent".to_string(),
    );
    let [storing] = with(&list, "cmd=set")[..] else { panic!("{list}") };
    // No other connection is let in.
    admin.must(&["CONFIG", "SET", "maxclients", "1"]);
    let earlier = with(&list, "id=").into_iter().filter(|id| *id < storing);
    let ended = earlier.filter(|id| !with(&list, "cmd=client").contains(id)).collect::<Vec<_>>();
    assert!(!ended.is_empty(), "{list}");
    ended.iter().for_each(|id| drop(admin.must(&["CLIENT", "KILL", "ID", &id.to_string()])));
    until(
        || {
            bed.turn();
            bed.redis.report().connections <= 3
        },
        || "they are gone".to_string(),
    );
    admin.must(&["CLIENT", "UNPAUSE"]);
    assert_eq!(bed.outcomes_of(&[store]), [Outcome::Stored]);
    admin.must(&["CONFIG", "SET", "maxclients", "1000"]);
    bed.await_service();
    assert_eq!(bed.look(1, SLOT_BYTES), loaded(1, SLOT_BYTES));
}

#[test]
fn a_server_that_lets_stores_hang_is_spared_them_and_told_of() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&RedisConfig { operation_timeout: Duration::from_millis(1500), ..config(&server.url()) });
    bed.store_all(0..16, SLOT_BYTES);
    pause(&server);
    // Those that still wait when the breaker opens are not sent.
    let many = stores(&mut bed, 100..300);
    bed.submit(&many);
    let outcomes = bed.outcomes_of(&many);
    let refused = outcomes.iter().filter(|outcome| **outcome == UNAVAILABLE).count();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))) && refused > 100, "{outcomes:?}");
    let opened = bed.redis.report().counters.breakers_opened;
    assert!(opened >= 1);
    // Now and then some are tried, each time after a longer pause, whatever connections are made anew meanwhile.
    let mut rounds = 0;
    until(
        || {
            rounds += 1;
            let (loads, some) = (loads(&mut bed), stores(&mut bed, 300..310));
            bed.submit(&some);
            let expected: Vec<_> = (0..16).map(|number| loaded(number, SLOT_BYTES)).collect();
            assert_eq!(bed.run(&loads), expected, "round {rounds}");
            bed.outcomes_of(&some);
            assert_eq!(bed.redis.health(), Health::Healthy);
            bed.redis.advance(Duration::ZERO);
            bed.redis.report().refuses_writes.is_some_and(|why| why.contains("does not answer writes in time"))
        },
        || "nobody is told".to_string(),
    );
    let opened = bed.redis.report().counters.breakers_opened;
    assert!(opened <= 6, "opened {opened} times within {rounds} rounds");
    unpause(&server);
    until(
        || {
            let some = stores(&mut bed, 400..401);
            bed.run(&some) == [Outcome::Stored] && bed.redis.report().refuses_writes.is_none()
        },
        || "it takes writes again".to_string(),
    );
}
