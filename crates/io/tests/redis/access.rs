//! Who may speak to a server: passwords, users, databases; and what is wrong with a configuration.

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::redis::{Redis, RedisConfig};
use forebay_io::uring::Region;

use crate::bed::{Bed, config, key, loaded, name_of};
use crate::servers::{BOTH, Kind, Server, until};

fn with_password(server: &Server, who: &str) -> RedisConfig {
    config(&server.tcp_url().replace("redis://", &format!("redis://{who}@")))
}

#[test]
fn passwords_users_and_databases_are_told_to_the_server() {
    for kind in BOTH {
        let server = Server::on_port(kind, &["--requirepass", "p@ss"]);
        let mut admin = server.admin();
        admin.must(&["AUTH", "p@ss"]);
        admin.must(&["ACL", "SETUSER", "cache", "on", ">w:rd", "~forebay:*", "+@all"]);
        let mut by_password = with_password(&server, ":p%40ss");
        by_password.urls[0].push_str("/3");
        let mut bed = Bed::ready(&by_password);
        bed.store_all([1], 4096);
        assert_eq!(admin.must(&["EXISTS", &name_of(&key(1))]), "0", "database 0 holds nothing");
        admin.must(&["SELECT", "3"]);
        assert_eq!(admin.must(&["EXISTS", &name_of(&key(1))]), "1");
        let mut bed = Bed::ready(&with_password(&server, "cache:w:rd"));
        bed.store_all([2], 4096);
        assert_eq!(bed.look(2, 4096), loaded(2, 4096));
    }
}

#[test]
fn a_refused_password_is_sickness_and_is_told_without_the_password() {
    let server = Server::on_port(Kind::Valkey, &["--requirepass", "right"]);
    let mut bed = Bed::open(&with_password(&server, ":wrong-one"));
    until(
        || {
            bed.turn();
            bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
        },
        || "a refused password does not show".to_string(),
    );
    let load = bed.load(1, 1, 4096);
    assert_eq!(bed.run(&[load]), [Outcome::Failed(ErrorKind::Unavailable)]);
    let report = bed.redis.report();
    let (why, _) = report.last_error.clone().expect("there was an error");
    assert!(why.contains("WRONGPASS") && !format!("{report:?}").contains("wrong-one"), "{why}");
    // What was wrong with the server may be mended without us.
    let mut admin = server.admin();
    admin.must(&["AUTH", "right"]);
    admin.must(&["CONFIG", "SET", "requirepass", "wrong-one"]);
    bed.await_service();
}

#[test]
fn a_user_without_a_right_fails_the_operation_alone() {
    let server = Server::on_port(Kind::Valkey, &[]);
    server.admin().must(&["ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+ping"]);
    let mut bed = Bed::ready(&with_password(&server, "reader:pw"));
    let ops = [bed.store(1, 1, 4096), bed.find(1)];
    assert_eq!(bed.run(&ops), [Outcome::Failed(ErrorKind::Unsupported), Outcome::Absent]);
    assert_eq!(bed.redis.report().counters.connections_lost, 0);
}

#[test]
fn opening_waits_for_nobody_and_refuses_only_what_cannot_be_right() {
    let pool = || Region::anonymous(4096).unwrap();
    // An address of a network that is for documents only: nobody answers.
    for url in ["redis://192.0.2.1", "redis://no-such-host.invalid", "redis://[2001:db8::1]:6379", "unix:///nowhere"] {
        Redis::open(&config(url), pool()).unwrap_or_else(|error| panic!("{url}: {error}"));
    }
    for url in ["", "redis://", "http://cache", "unix://here"] {
        let error = Redis::open(&config(url), pool()).err().unwrap_or_else(|| panic!("`{url}` passes"));
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.hint_text().is_some(), "{error}");
    }
}

#[test]
fn names_of_hosts_and_ipv6_addresses_lead_to_a_server() {
    let server = Server::on_port(Kind::Valkey, &["--bind", "127.0.0.1", "::1"]);
    let port = server.port.unwrap();
    for host in ["localhost", "[::1]", "127.0.0.1"] {
        let mut bed = Bed::ready(&config(&format!("redis://{host}:{port}")));
        bed.store_all([1], 4096);
        assert_eq!(bed.look(1, 4096), loaded(1, 4096), "{host}");
    }
}
