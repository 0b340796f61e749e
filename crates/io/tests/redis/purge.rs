//! Emptying servers of namespaces: what goes, what stays, and servers that refuse, stand still or are not there.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forebay_core::tier::{Operation, Outcome};
use forebay_core::{BlockKey, Error, ErrorKind, NamespaceId};
use forebay_io::purge::Purging;
use forebay_io::redis::RedisConfig;
use rustix::process::Signal;

use crate::bed::{Bed, KIB, SLOT_BYTES, config, key, loaded, name_of};
use crate::servers::{BOTH, Kind, Server};

/// That of the bed's own blocks, and another one.
pub const OWN: NamespaceId = NamespaceId(0xFEED);
const OTHER: NamespaceId = NamespaceId(0xFEED << 64 | 0xFEED);

/// What a purge came to: its outcome, and how many blocks and values it removed.
pub fn empty(bed: &Bed, namespaces: &[NamespaceId]) -> (Result<(), Error>, u64, u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let purging = Purging::new(namespaces.iter().copied().collect::<BTreeSet<_>>(), deadline);
    let place = bed.redis.places().remove(0);
    let outcome = (place.empty)(&purging);
    (outcome, purging.blocks(), purging.values())
}

pub fn emptied(bed: &Bed, namespaces: &[NamespaceId]) -> (u64, u64) {
    let (outcome, blocks, values) = empty(bed, namespaces);
    outcome.unwrap_or_else(|error| panic!("{error}"));
    (blocks, values)
}

fn of_other(op: Operation) -> Operation {
    Operation { key: BlockKey { namespace: OTHER, ..op.key }, ..op }
}

fn store_other(bed: &mut Bed, numbers: std::ops::Range<u64>, length_bytes: u64) {
    let stores: Vec<_> = numbers.map(|number| of_other(bed.store(number, number % 60, length_bytes))).collect();
    bed.run(&stores);
}

#[test]
fn one_namespace_goes_with_all_parts_of_its_blocks_and_nothing_else() {
    for kind in BOTH {
        let server = Server::start(kind);
        // As a pattern it would match `a1bc:`, and not itself.
        for prefix in ["forebay:", r"a*[b]c?\:", ""] {
            let config = RedisConfig { value_bytes: 16 * KIB, key_prefix: prefix.to_owned(), ..config(&server.url()) };
            let mut bed = Bed::ready(&config);
            bed.store_all(0..500, 40 * KIB);
            bed.store_all(500..510, 100);
            store_other(&mut bed, 0..50, 40 * KIB);
            let mut admin = server.admin();
            let ours = name_of(&key(1)).replace("forebay:", prefix);
            let alike = [
                format!("{ours}:03"),
                format!("{ours}:x"),
                format!("{ours} "),
                ours.to_uppercase(),
                ours.replace(":1:", ":01:"),
                ours.replace('{', "{{"),
                format!("{prefix}{{{OWN}:"),
                format!("{prefix}{OWN}"),
                format!("x{ours}"),
                ours.replace(prefix, "a1bc:"),
                ours.replace(&OWN.to_string(), &NamespaceId(1).to_string()),
            ];
            let foreign: Vec<&String> = alike.iter().filter(|name| **name != ours).collect();
            foreign.iter().for_each(|name| drop(admin.must(&["SET", name, "somebody's"])));
            assert_eq!(emptied(&bed, &[OWN]), (510, 1510), "{kind:?} {prefix:?}");
            for name in &foreign {
                assert_eq!(admin.must(&["GET", name]), "somebody's", "{name}");
            }
            assert_eq!(admin.must(&["DBSIZE"]), (150 + foreign.len()).to_string(), "{kind:?} {prefix:?}");
            assert_eq!(emptied(&bed, &[OWN]), (0, 0));
            bed.store_all(0..5, 100);
            assert_eq!(emptied(&bed, &[OWN, OTHER]), (55, 155));
            assert_eq!(admin.must(&["DBSIZE"]), foreign.len().to_string());
            admin.must(&["FLUSHALL"]);
        }
    }
}

#[test]
fn what_a_user_may_not_do_is_an_error_that_says_what_to_allow() {
    for kind in BOTH {
        for lacking in ["SCAN", "UNLINK"] {
            let server = Server::on_port(kind, &[]);
            let right = format!("-{}", lacking.to_lowercase());
            server.admin().must(&["ACL", "SETUSER", "cache", "on", ">pw", "~*", "+@all", &right]);
            let mut bed = Bed::ready(&config(&server.tcp_url().replace("redis://", "redis://cache:pw@")));
            bed.store_all(0..10, 100);
            let (outcome, blocks, _) = empty(&bed, &[OWN]);
            let error = outcome.unwrap_err();
            assert_eq!((error.kind(), blocks), (ErrorKind::Unsupported, 0));
            assert!(error.to_string().contains("NOPERM") && !error.to_string().contains("pw"), "{error}");
            assert!(error.hint_text().unwrap().contains(lacking), "{error}");
            assert_eq!(bed.look(3, 100), loaded(3, 100));
        }
    }
}

#[test]
fn a_server_that_refuses_us_or_is_not_there_is_an_error_at_once() {
    let server = Server::on_port(Kind::Valkey, &["--requirepass", "right"]);
    let bed = Bed::open(&config(&server.tcp_url().replace("redis://", "redis://:wrong@")));
    let error = empty(&bed, &[OWN]).0.unwrap_err();
    assert!(error.to_string().contains("WRONGPASS") && !error.to_string().contains("wrong@"), "{error}");
    assert!(error.hint_text().unwrap().contains("password"), "{error}");
    for url in ["redis://127.0.0.1:1", "unix:///nowhere", "redis://no-such-host.invalid"] {
        let error = empty(&Bed::open(&config(url)), &[OWN]).0.unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable && error.hint_text().is_some(), "{url}: {error}");
    }
}

#[test]
fn a_server_that_stands_still_is_given_up_after_a_step_and_done_when_it_goes_on() {
    for url in [|server: &Server| server.url(), |server: &Server| server.tcp_url()] {
        let server = Server::on_port(Kind::Valkey, &[]);
        let timeouts = Duration::from_millis(300);
        let mut bed = Bed::ready(&config(&url(&server)));
        bed.store_all(0..10, 100);
        let impatient = RedisConfig { connect_timeout: timeouts, operation_timeout: timeouts, ..config(&url(&server)) };
        let other = Bed::open(&impatient);
        server.signal(Signal::STOP);
        let begun = Instant::now();
        let error = empty(&other, &[OWN]).0.unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable && error.hint_text().is_some(), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        server.signal(Signal::CONT);
        assert_eq!(emptied(&bed, &[OWN]), (10, 10));
    }
}

#[test]
fn a_purge_that_is_stopped_in_the_middle_leaves_the_rest_to_the_next() {
    let server = Server::start(Kind::Valkey);
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all(0..3000, 100);
    let purging = Purging::new(BTreeSet::from([OWN]), Instant::now() + Duration::from_secs(60));
    let place = bed.redis.places().remove(0);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| (place.empty)(&purging));
        while purging.values() == 0 {
            std::thread::yield_now();
        }
        purging.stop();
        assert_eq!(running.join().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    });
    let left = server.admin().must(&["DBSIZE"]).parse::<u64>().unwrap();
    assert!(left > 0 && left == 3000 - purging.blocks(), "{left} are left");
    assert_eq!(emptied(&bed, &[OWN]), (left, left));
}

#[test]
fn blocks_are_stored_and_loaded_while_others_are_removed() {
    let server = Server::start(Kind::Redis);
    let mut bed = Bed::ready(&config(&server.url()));
    bed.store_all(0..5000, 100);
    store_other(&mut bed, 0..20, 5000);
    let purging = Purging::new(BTreeSet::from([OWN]), Instant::now() + Duration::from_secs(60));
    let place = bed.redis.places().remove(0);
    let mut rounds = 0;
    std::thread::scope(|scope| {
        let running = scope.spawn(|| (place.empty)(&purging));
        while !running.is_finished() {
            store_other(&mut bed, 20..40, 5000);
            let loads: Vec<_> = (0..40).map(|number| of_other(bed.load(number, number, 5000))).collect();
            let outcomes = bed.run(&loads);
            assert!((0..40).all(|number| outcomes[number as usize] == loaded(number, 5000)), "{outcomes:?}");
            rounds += 1;
        }
        running.join().unwrap().unwrap();
    });
    assert!(rounds > 0);
    assert_eq!(purging.blocks(), 5000);
}

/// A purge could be over before what the kernel still sends arrives.
#[test]
fn stores_that_were_given_up_are_not_sent_any_more() {
    let server = Server::on_port(Kind::Valkey, &[]);
    let timeout = Duration::from_millis(300);
    let mut bed = Bed::ready(&RedisConfig { operation_timeout: timeout, ..config(&server.tcp_url()) });
    server.signal(Signal::STOP);
    let stores: Vec<Operation> = (0..60).map(|number| bed.store(number, number, SLOT_BYTES)).collect();
    let outcomes = bed.run(&stores);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{outcomes:?}");
    assert!(bed.redis.report().counters.connections_lost > 0);
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let to_server = format!("0100007F:{:04X}", server.port.unwrap());
    // Connected, or being connected.
    let is_in_use = |fields: &[&str]| ["01", "02"].contains(&fields[3]);
    let closed = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let closed: Vec<_> = closed.filter(|fields| fields[2] == to_server && !is_in_use(fields)).collect();
    assert!(closed.is_empty(), "{closed:?}");
    server.signal(Signal::CONT);
}
