//! Who may speak to a server: passwords, users, databases; and what is wrong with a configuration.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Health, Outcome, Tier};
use forebay_io::StoreReport;
use forebay_io::redis::{Credentials, Mode, Password, Redis, RedisConfig, SentinelConfig, examine};
use forebay_io::secret_file::SecretFile;
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
fn what_is_wrong_with_a_url_is_told_with_what_to_change() {
    for kind in BOTH {
        let server = Server::on_port(kind, &[]);
        let database = RedisConfig { urls: vec![format!("{}/99", server.tcp_url())], ..config("redis://x") };
        let cluster = RedisConfig { mode: Mode::Cluster, ..config(&server.tcp_url()) };
        for (config, hint) in [
            (database, "name a database"),
            (with_password(&server, ":secret"), "take the password"),
            (cluster, "to `single`"),
        ] {
            let error = examine(&config).remove(0).unwrap_err();
            assert!(
                error.hint_text().is_some_and(|told| told.contains(hint)),
                "{kind:?}: {error}: {:?}",
                error.hint_text()
            );
        }
    }
}

#[test]
fn a_user_may_stand_in_the_urls_while_its_password_comes_from_elsewhere() {
    let server = Server::on_port(Kind::Valkey, &[]);
    server.admin().must(&["ACL", "SETUSER", "cache", "on", ">w:rd", "~forebay:*", "+@all"]);
    for who in ["cache", "cache:"] {
        let credentials = Credentials { user: None, password: Some("w:rd".into()) };
        let mut bed = Bed::ready(&RedisConfig { credentials, ..with_password(&server, who) });
        bed.store_all([1], 4096);
        assert_eq!(bed.look(1, 4096), loaded(1, 4096), "{who}");
    }
}

/// First the server has a new password, then the file. Connections that there were are closed.
#[test]
fn a_password_that_is_replaced_in_its_file_needs_no_restart() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("password");
    for kind in BOTH {
        std::fs::write(&file, "old\n").unwrap();
        let server = Server::on_port(kind, &["--requirepass", "old"]);
        let mut admin = server.admin();
        admin.must(&["AUTH", "old"]);
        let password = Some(Password::File(SecretFile::new("password_file", file.clone())));
        let config = RedisConfig { credentials: Credentials { user: None, password }, ..config(&server.tcp_url()) };
        let mut bed = Bed::ready(&config);
        bed.store_all([1], 4096);
        admin.must(&["CONFIG", "SET", "requirepass", "new"]);
        admin.must(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        let mut is_well = || {
            bed.turn();
            bed.redis.health() == Health::Healthy
        };
        until(|| !is_well(), || format!("{kind:?} takes the old password"));
        assert!(examine(&config)[0].is_err());
        std::fs::write(home.path().join("new"), "new\n").unwrap();
        std::fs::rename(home.path().join("new"), &file).unwrap();
        until(is_well, || format!("{kind:?}: the new password is not used"));
        assert_eq!(bed.look(1, 4096), loaded(1, 4096));
        assert!(examine(&config)[0].is_ok());
    }
}

#[test]
fn a_server_that_refuses_all_reads_is_told_in_its_words_until_it_answers_them() {
    let cases = [
        (Kind::Redis, ["-get", "+get"], true),
        (Kind::Valkey, ["-exists", "+exists"], true),
        (Kind::Valkey, ["resetkeys", "~forebay:*"], false),
    ];
    for (kind, [without, with], is_written) in cases {
        let server = Server::on_port(kind, &[]);
        let set = |right: &str| drop(server.admin().must(&["ACL", "SETUSER", "cache", right]));
        server.admin().must(&["ACL", "SETUSER", "cache", "on", ">pw", "~forebay:*", "+@all"]);
        let config = with_password(&server, "cache:pw");
        let mut bed = Bed::ready(&config);
        bed.store_all([1], 4096);
        let store = |bed: &mut Bed| {
            let ops = [bed.find(1), bed.load(1, 1, 4096), bed.store(2, 2, 4096)];
            bed.run(&ops);
            bed.redis.advance(Duration::ZERO);
            StoreReport::of_redis(bed.redis.report())
        };
        assert!(store(&mut bed).can_load() && examine(&config).iter().all(Result::is_ok));
        set(without);
        let is_told = |told: &StoreReport| !told.can_load() && told.can_store() == is_written;
        until(|| is_told(&store(&mut bed)), || format!("{kind:?}, {without}: nothing says so"));
        let told = store(&mut bed);
        assert_eq!(told.health, Health::Healthy, "{told:?}");
        assert!(format!("{told:?}").contains("NOPERM"), "{told:?}");
        let examined = examine(&config);
        let error = examined[0].as_ref().expect_err("it cannot be read");
        assert!(error.to_string().contains("NOPERM") && error.hint_text().unwrap().contains("EXISTS"), "{error:?}");
        set(with);
        until(|| store(&mut bed).can_load(), || format!("{kind:?}, {with}: it is not over"));
        assert!(examine(&config).iter().all(Result::is_ok), "{kind:?}, {with}");
    }
}

#[test]
fn an_examination_names_each_right_that_the_user_lacks_and_writes_nothing() {
    for kind in BOTH {
        let server = Server::on_port(kind, &[]);
        let set = |right: &str| drop(server.admin().must(&["ACL", "SETUSER", "cache", right]));
        server.admin().must(&["ACL", "SETUSER", "cache", "on", ">pw", "~forebay:*", "+@all"]);
        let config = with_password(&server, "cache:pw");
        let by_time = RedisConfig { ttl_seconds: Some(60), ..config.clone() };
        for (right, config) in [("get", &config), ("set", &config), ("touch", &config), ("expire", &by_time)] {
            set(&format!("-{right}"));
            let error = examine(config).remove(0).expect_err("the tier cannot do without");
            let named = right.to_uppercase();
            assert!(error.to_string().contains(&named) && error.hint_text().unwrap().contains(&named), "{error}");
            set(&format!("+{right}"));
        }
        set("-touch");
        assert!(examine(&by_time)[0].is_ok());
        set("+touch");
        for right in ["SCAN", "UNLINK", "INFO"] {
            set(&format!("-{}", right.to_lowercase()));
            let found = examine(&config).remove(0).unwrap();
            assert!(found.ends_with(&format!("refuses what a purge needs: {right}")), "{found}");
            set(&format!("+{}", right.to_lowercase()));
        }
        for (limit, policy, told) in [
            ("0", "allkeys-lru", "its `maxmemory` is 0"),
            ("100mb", "noeviction", "its `maxmemory-policy` is `noeviction`"),
            ("100mb", "allkeys-lru", "answers"),
        ] {
            server.admin().must(&["CONFIG", "SET", "maxmemory", limit]);
            server.admin().must(&["CONFIG", "SET", "maxmemory-policy", policy]);
            let found = examine(&config).remove(0).unwrap();
            assert!(found.ends_with(told), "{found}");
        }
        assert_eq!(server.admin().must(&["DBSIZE"]), "0", "{kind:?}");
    }
}

#[test]
fn a_server_that_lets_no_more_clients_in_is_told_in_its_words() {
    for kind in BOTH {
        let server = Server::on_port(kind, &["--maxclients", "3"]);
        let mut clients: Vec<TcpStream> = Vec::new();
        let mut enter = || {
            let mut client = TcpStream::connect(("127.0.0.1", server.port.unwrap())).unwrap();
            let mut reply = [0; 5];
            let is_in = client.write_all(b"PING\r\n").and_then(|()| client.read_exact(&mut reply)).is_ok();
            clients.extend((is_in && &reply == b"+PONG").then_some(client));
            clients.len() == 3
        };
        until(&mut enter, || "it lets nobody in".to_string());
        // With a password the greeting has several commands, of which none is answered.
        let config = with_password(&server, ":pw");
        for _ in 0..5 {
            let mut bed = Bed::open(&config);
            let report = |bed: &mut Bed| {
                bed.turn();
                bed.redis.report()
            };
            until(|| report(&mut bed).counters.failed_connects >= 10, || "it lets us in".to_string());
            let (why, _) = report(&mut bed).last_error.expect("there was an error");
            assert!(why.contains("max number of clients reached"), "{kind:?}: {why}");
            let examined = examine(&config);
            let error = examined[0].as_ref().expect_err("there is no room").to_string();
            assert!(error.contains("max number of clients reached"), "{kind:?}: {error}");
        }
        drop(clients);
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

/// Its answer repeats what it did not understand.
#[test]
fn a_server_that_does_not_know_the_command_is_told_without_the_password() {
    const PASSWORD: &str = "S3cretHunter2";
    for kind in BOTH {
        let server = Server::on_port(kind, &["--rename-command", "AUTH", "LOGIN"]);
        let single = with_password(&server, &format!(":{PASSWORD}"));
        let cluster = RedisConfig { mode: Mode::Cluster, ..single.clone() };
        let credentials = Credentials { user: None, password: Some(PASSWORD.into()) };
        let sentinel = SentinelConfig { master: "cache".to_owned(), credentials, is_tls: None };
        let sentinel = RedisConfig { mode: Mode::Sentinel, sentinel, ..config(&server.tcp_url()) };
        for config in [single, cluster, sentinel] {
            let mut bed = Bed::open(&config);
            until(
                || {
                    bed.turn();
                    bed.redis.report().last_error.is_some()
                },
                || "an unknown command does not show".to_string(),
            );
            let report = format!("{:?}", bed.redis.report());
            assert!(report.contains("unknown command") && !report.contains(PASSWORD), "{report}");
            let error = examine(&config).remove(0).unwrap_err();
            assert!(error.to_string().contains("unknown command"), "{error}");
            assert!(!error.told().contains(PASSWORD), "{}", error.told());
        }
    }
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
