//! Sentinels that know the master, before and after it has changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::{Health, Tier};
use forebay_io::redis::{Credentials, Mode, Password, RedisConfig, SentinelConfig};
use rustix::process::Signal;

use crate::bed::{Bed, config, loaded};
use crate::fake::{Answer, Fake, bulk};
use crate::purge::{OWN, emptied, empty};
use crate::servers::{BOTH, Kind, Server, until};

#[test]
fn the_master_is_found_through_sentinels_and_followed_when_it_changes() {
    let first = Server::on_port(Kind::Valkey, &[]);
    let (port, second) = (first.port.unwrap().to_string(), Server::on_port(Kind::Valkey, &[]));
    second.admin().must(&["REPLICAOF", "127.0.0.1", &port]);
    until(
        || second.admin().ask(&["INFO", "replication"]).contains("master_link_status:up"),
        || "the replica does not follow".to_string(),
    );
    let sentinel = Server::sentinel(Kind::Valkey, &format!("sentinel monitor blocks 127.0.0.1 {port} 1\n"));
    until(
        || sentinel.admin().ask(&["SENTINEL", "MASTER", "blocks"]).contains("num-slaves\n1"),
        || "the sentinel does not see the replica".to_string(),
    );
    // One of the sentinels is not there.
    let watched = SentinelConfig { master: "blocks".to_string(), ..SentinelConfig::default() };
    let mut config = RedisConfig { mode: Mode::Sentinel, sentinel: watched, ..config("redis://127.0.0.1:1") };
    config.urls.push(sentinel.tcp_url());
    let mut bed = Bed::ready(&config);
    bed.store_all(0..4, 5000);
    assert_eq!(bed.redis.report().servers, [format!("127.0.0.1:{port}")]);
    until(
        || sentinel.admin().ask(&["SENTINEL", "FAILOVER", "blocks"]) == "OK",
        || "the sentinel finds no replica to promote".to_string(),
    );
    let new_master = format!("127.0.0.1:{}", second.port.unwrap());
    until(
        || {
            // A store is refused by a master that has become a replica, which tells that there is a new one.
            let store = bed.store(9, 9, 5000);
            bed.run(&[store]);
            bed.redis.report().servers == [new_master.clone()]
        },
        || "the new master is not followed".to_string(),
    );
    bed.await_service();
    bed.store_all(10..14, 5000);
    assert_eq!(bed.look(11, 5000), loaded(11, 5000));
    assert_eq!(second.admin().must(&["ROLE"]).lines().next(), Some("master"));
    assert!(emptied(&bed, &[OWN]).0 >= 4, "the new master is emptied");
    assert_eq!(second.admin().must(&["DBSIZE"]), "0");
}

/// Of a master with the password `master's`, seen by `sentinel`.
fn watched(sentinel: &Server, user: Option<&str>, password: Option<&str>) -> RedisConfig {
    let credentials = Credentials { user: user.map(str::to_owned), password: password.map(Password::from) };
    let sentinel_config = SentinelConfig { master: "blocks".to_string(), credentials, is_tls: None };
    let url = sentinel.tcp_url().replace("redis://", "redis://:master's@");
    RedisConfig { mode: Mode::Sentinel, sentinel: sentinel_config, ..config(&url) }
}

#[test]
fn sentinels_may_have_passwords_and_users_of_their_own() {
    for kind in BOTH {
        let master = Server::on_port(kind, &["--requirepass", "master's"]);
        let watch = format!("sentinel monitor blocks 127.0.0.1 {} 1\n", master.port.unwrap());
        let known = "requirepass \"sentinel's\"\nuser scout on \">w:rd\" allcommands allkeys allchannels\n";
        let sentinel = Server::sentinel(kind, &format!("{known}{watch}"));
        for (user, password) in [(None, "sentinel's"), (Some("scout"), "w:rd")] {
            let mut bed = Bed::ready(&watched(&sentinel, user, Some(password)));
            bed.store_all([1], 5000);
            assert_eq!(bed.look(1, 5000), loaded(1, 5000), "{kind:?}, {user:?}");
        }
        for (password, answer) in [(Some("of-nobody"), "WRONGPASS"), (None, "NOAUTH")] {
            let mut bed = Bed::open(&watched(&sentinel, None, password));
            until(
                || {
                    bed.turn();
                    bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
                },
                || format!("{kind:?} lets {password:?} in"),
            );
            let report = bed.redis.report();
            let (why, _) = report.last_error.clone().expect("there was an error");
            assert!(why.contains(answer) && !format!("{report:?}").contains("of-nobody"), "{kind:?}: {why}");
        }
    }
}

/// A sentinel that names this port's server.
fn fake_sentinel(port: u16) -> Fake {
    fake_sentinel_of(Arc::new(AtomicU16::new(port)))
}

/// One that names the server of the port that it has then.
fn fake_sentinel_of(port: Arc<AtomicU16>) -> Fake {
    Fake::start_tcp(move |_| {
        let port = port.clone();
        Box::new(move |_, _| {
            let port = port.load(Ordering::Relaxed).to_string();
            Answer::say(format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len()))
        })
    })
}

/// A sentinel that names that master, and replicas by their ports, each with its flags.
fn fake_sentinel_with(master: u16, replicas: &[(u16, &str)]) -> Fake {
    let words = |words: &[&str]| {
        let words: Vec<u8> = words.iter().flat_map(|word| bulk(word.as_bytes())).collect();
        words
    };
    let master = [b"*2\r\n".to_vec(), words(&["127.0.0.1", &master.to_string()])].concat();
    let replica = |(port, flags): &(u16, &str)| {
        [b"*6\r\n".to_vec(), words(&["ip", "127.0.0.1", "port", &port.to_string(), "flags", flags])].concat()
    };
    let replicas = [vec![format!("*{}\r\n", replicas.len()).into_bytes()], replicas.iter().map(replica).collect()];
    let replicas = replicas.concat().concat();
    Fake::start_tcp(move |_| {
        let (master, replicas) = (master.clone(), replicas.clone());
        Box::new(move |command, _| {
            let asks_for_replicas = command.get(1).is_some_and(|word| word == b"REPLICAS");
            Answer::say(if asks_for_replicas { replicas.clone() } else { master.clone() })
        })
    })
}

/// By those sentinels.
fn told_by(sentinels: &[&Fake]) -> RedisConfig {
    let sentinel = SentinelConfig { master: "blocks".to_string(), ..SentinelConfig::default() };
    let urls = sentinels.iter().map(|fake| fake.url()).collect();
    RedisConfig { mode: Mode::Sentinel, sentinel, urls, ..config("redis://127.0.0.1:1") }
}

#[test]
fn a_sentinel_that_names_a_master_that_is_none_is_left_for_the_next() {
    for kind in BOTH {
        let (master, replica) = (Server::on_port(kind, &[]), Server::on_port(kind, &[]));
        let mut gone = Server::on_port(kind, &[]);
        gone.kill();
        replica.admin().must(&["REPLICAOF", "127.0.0.1", &master.port.unwrap().to_string()]);
        let good = fake_sentinel(master.port.unwrap());
        for former in [&gone, &replica] {
            let stale = fake_sentinel(former.port.unwrap());
            let mut bed = Bed::ready(&told_by(&[&stale, &good]));
            bed.store_all([7], 4096);
            assert_eq!(bed.redis.report().servers, [format!("127.0.0.1:{}", master.port.unwrap())], "{kind:?}");
        }
        let stale = fake_sentinel(gone.port.unwrap());
        let mut bed = Bed::open(&told_by(&[&stale]));
        until(
            || {
                bed.turn();
                bed.redis.health() == Health::Sick(ErrorKind::Unavailable)
            },
            || "a master that is gone is followed".to_string(),
        );
        let (why, _) = bed.redis.report().last_error.expect("there was an error");
        assert!(why.contains(&format!(" names 127.0.0.1:{}: ", gone.port.unwrap())), "{why}");
    }
}

#[test]
fn a_sentinel_that_knows_no_better_than_before_is_left_when_the_master_is_gone() {
    let (mut first, second) = (Server::on_port(Kind::Valkey, &[]), Server::on_port(Kind::Valkey, &[]));
    let [stale, good] = [&first, &second].map(|server| fake_sentinel(server.port.unwrap()));
    let mut bed = Bed::ready(&told_by(&[&stale, &good]));
    assert_eq!(bed.redis.report().servers, [format!("127.0.0.1:{}", first.port.unwrap())]);
    first.kill();
    bed.await_service();
    bed.store_all([7], 4096);
    assert_eq!(second.admin().must(&["DBSIZE"]), "1");
}

#[test]
fn a_purge_empties_each_master_that_a_sentinel_names_and_fails_if_one_is_gone() {
    let (master, mut other) = (Server::on_port(Kind::Valkey, &[]), Server::on_port(Kind::Valkey, &[]));
    let replica = Server::on_port(Kind::Valkey, &[]);
    replica.admin().must(&["REPLICAOF", "127.0.0.1", &master.port.unwrap().to_string()]);
    let [named, former, demoted] = [&master, &other, &replica].map(|server| fake_sentinel(server.port.unwrap()));
    for sentinel in [&named, &former] {
        Bed::ready(&told_by(&[sentinel])).store_all([7], 4096);
    }
    let bed = Bed::open(&told_by(&[&demoted, &former, &named]));
    assert_eq!(emptied(&bed, &[OWN]), (2, 2));
    assert!(empty(&Bed::open(&told_by(&[&demoted])), &[OWN]).0.unwrap_err().to_string().contains("no master"));
    other.kill();
    let error = empty(&bed, &[OWN]).0.unwrap_err();
    assert!(error.to_string().contains(&other.port.unwrap().to_string()) && error.hint_text().is_some(), "{error}");
}

#[test]
fn a_purge_empties_the_server_that_is_used_though_no_sentinel_names_it_any_more() {
    let (former, new) = (Server::on_port(Kind::Valkey, &[]), Server::on_port(Kind::Valkey, &[]));
    let port = |server: &Server| server.port.unwrap();
    let named = Arc::new(AtomicU16::new(port(&former)));
    let sentinel = fake_sentinel_of(named.clone());
    let timeouts = Duration::from_secs(1);
    let mut bed = Bed::ready(&RedisConfig { operation_timeout: timeouts, ..told_by(&[&sentinel]) });
    bed.store_all([7], 4096);
    named.store(port(&new), Ordering::Relaxed);
    assert_eq!(emptied(&bed, &[OWN]), (1, 1));
    assert_eq!(former.admin().must(&["DBSIZE"]), "0");
    bed.store_all([8], 4096);
    former.signal(Signal::STOP);
    let error = empty(&bed, &[OWN]).0.unwrap_err();
    assert!(error.to_string().contains(&port(&former).to_string()) && error.hint_text().is_some(), "{error}");
    former.signal(Signal::CONT);
    // A replica takes no removals: what it has goes with the blocks of its master.
    new.admin().must(&["REPLICAOF", "127.0.0.1", &port(&former).to_string()]);
    until(|| new.admin().must(&["DBSIZE"]) == "1", || "the replica does not follow".to_string());
    new.admin().must(&["REPLICAOF", "NO", "ONE"]);
    former.admin().must(&["REPLICAOF", "127.0.0.1", &port(&new).to_string()]);
    assert_eq!(emptied(&bed, &[OWN]), (1, 1));
    assert_eq!(former.admin().must(&["DBSIZE"]), "0");
}

#[test]
fn a_purge_waits_for_replicas_and_fails_while_one_that_follows_stands_still() {
    std::thread::scope(|scope| BOTH.iter().for_each(|kind| drop(scope.spawn(|| check_replica(*kind)))));
}

fn check_replica(kind: Kind) {
    let (master, replica) = (Server::on_port(kind, &[]), Server::on_port(kind, &[]));
    let port = replica.port.unwrap();
    replica.admin().must(&["REPLICAOF", "127.0.0.1", &master.port.unwrap().to_string()]);
    let mut bed = Bed::ready(&config(&master.tcp_url()));
    bed.store_all(0..100, 4096);
    until(|| replica.admin().must(&["DBSIZE"]) == "100", || "the replica does not follow".to_string());
    let told = || master.admin().must(&["INFO", "replication"]);
    until(|| told().contains("state=online"), told);
    replica.signal(Signal::STOP);
    // The second purge finds no value on the master any more, and the replica has all of them.
    for blocks in [100, 0] {
        let (outcome, removed, _) = empty(&bed, &[OWN]);
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains(&port.to_string()) && error.hint_text().is_some(), "{error}");
        assert_eq!((error.kind(), removed), (ErrorKind::Unavailable, blocks));
    }
    replica.signal(Signal::CONT);
    assert_eq!(emptied(&bed, &[OWN]), (0, 0));
    assert_eq!(replica.admin().must(&["DBSIZE"]), "0");
}

/// Its master does not name it. It may be elected, and has all blocks then.
#[test]
fn a_purge_waits_for_a_replica_that_was_cut_off_and_empties_it_when_it_is_a_master() {
    std::thread::scope(|scope| BOTH.iter().for_each(|kind| drop(scope.spawn(|| check_cut_off(*kind)))));
}

fn check_cut_off(kind: Kind) {
    let (master, mut replica) = (Server::on_port(kind, &[]), Server::on_port(kind, &[]));
    let [of_master, of_replica] = [&master, &replica].map(|server| server.port.unwrap());
    let follow = |port: &str| drop(replica.admin().must(&["REPLICAOF", "127.0.0.1", port]));
    follow(&of_master.to_string());
    let sentinel = fake_sentinel_with(of_master, &[(of_replica, "slave")]);
    let mut bed = Bed::ready(&told_by(&[&sentinel]));
    bed.store_all(0..20, 4096);
    until(|| replica.admin().must(&["DBSIZE"]) == "20", || "the replica does not follow".to_string());
    assert_eq!(emptied(&bed, &[OWN]), (20, 20), "{kind:?}");
    assert_eq!(replica.admin().must(&["DBSIZE"]), "0");

    bed.store_all(0..20, 4096);
    until(|| replica.admin().must(&["DBSIZE"]) == "20", || "the replica does not follow".to_string());
    follow("1");
    let told = || master.admin().must(&["INFO", "replication"]);
    until(|| told().contains("connected_slaves:0"), told);
    // The second purge finds no value on the master any more.
    for blocks in [20, 0] {
        let (outcome, removed, _) = empty(&bed, &[OWN]);
        let error = outcome.expect_err("a replica has all blocks, and may be elected");
        assert!(error.to_string().contains(&of_replica.to_string()) && error.hint_text().is_some(), "{error}");
        assert_eq!((error.kind(), removed), (ErrorKind::Unavailable, blocks), "{kind:?}");
    }
    // It was elected, and the sentinel does not say so yet.
    replica.admin().must(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(emptied(&bed, &[OWN]), (20, 20), "{kind:?}");
    assert_eq!(replica.admin().must(&["DBSIZE"]), "0");

    replica.kill();
    // A sentinel has connections of its own, which end and begin.
    for flags in ["slave", "slave,disconnected"] {
        let bed = Bed::open(&told_by(&[&fake_sentinel_with(of_master, &[(of_replica, flags)])]));
        let error = empty(&bed, &[OWN]).0.expect_err("no sentinel says that the replica is down");
        assert!(error.to_string().contains(&of_replica.to_string()) && error.hint_text().is_some(), "{error}");
    }
    let sentinel = fake_sentinel_with(of_master, &[(of_replica, "s_down,slave,disconnected")]);
    let mut bed = Bed::ready(&told_by(&[&sentinel]));
    bed.store_all(0..20, 4096);
    assert_eq!(emptied(&bed, &[OWN]), (20, 20), "{kind:?}");
}

#[test]
fn a_purge_waits_for_the_replicas_that_real_sentinels_name() {
    std::thread::scope(|scope| BOTH.iter().for_each(|kind| drop(scope.spawn(|| check_named(*kind)))));
}

fn check_named(kind: Kind) {
    let (master, replica) = (Server::on_port(kind, &[]), Server::on_port(kind, &[]));
    let port = master.port.unwrap().to_string();
    replica.admin().must(&["REPLICAOF", "127.0.0.1", &port]);
    let watch = format!("sentinel monitor blocks 127.0.0.1 {port} 1\nsentinel down-after-milliseconds blocks 60000\n");
    let sentinel = Server::sentinel(kind, &watch);
    until(
        || sentinel.admin().ask(&["SENTINEL", "MASTER", "blocks"]).contains("num-slaves\n1"),
        || "the sentinel does not see the replica".to_string(),
    );
    let watched = SentinelConfig { master: "blocks".to_string(), ..SentinelConfig::default() };
    let config = RedisConfig { mode: Mode::Sentinel, sentinel: watched, ..config(&sentinel.tcp_url()) };
    let timeouts = Duration::from_secs(4);
    let mut bed = Bed::ready(&RedisConfig { connect_timeout: timeouts, operation_timeout: timeouts, ..config });
    bed.store_all(0..20, 4096);
    until(|| replica.admin().must(&["DBSIZE"]) == "20", || "the replica does not follow".to_string());
    replica.signal(Signal::STOP);
    master.admin().must(&["CLIENT", "KILL", "TYPE", "replica"]);
    let error = empty(&bed, &[OWN]).0.expect_err("a replica has all blocks, and may be elected");
    let named = format!("127.0.0.1:{}", replica.port.unwrap());
    assert!(error.to_string().contains(&named) && error.hint_text().is_some(), "{error}");
    replica.signal(Signal::CONT);
    assert_eq!(emptied(&bed, &[OWN]), (0, 0), "{kind:?}");
    assert_eq!(replica.admin().must(&["DBSIZE"]), "0");
}

#[test]
fn a_user_who_may_not_ask_for_replicas_can_purge() {
    let server = Server::on_port(Kind::Valkey, &[]);
    server.admin().must(&["ACL", "SETUSER", "cache", "on", ">pw", "~*", "+@all", "-info"]);
    let mut bed = Bed::ready(&config(&server.tcp_url().replace("redis://", "redis://cache:pw@")));
    bed.store_all(0..10, 100);
    assert_eq!(emptied(&bed, &[OWN]), (10, 10));
}
