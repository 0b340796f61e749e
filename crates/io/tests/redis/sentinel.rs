//! Sentinels that know the master, before and after it has changed.

use forebay_io::redis::{Mode, RedisConfig};

use crate::bed::{Bed, config, loaded};
use crate::servers::{Kind, Server, until};

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
    let mut config =
        RedisConfig { mode: Mode::Sentinel { master: "blocks".to_string() }, ..config("redis://127.0.0.1:1") };
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
}
