//! The suite for tiers: on both servers, over both kinds of sockets, with whole blocks and with split ones.

use std::time::Duration;

use forebay_core::BlockKey;
use forebay_core::tier::Tier;
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_io::header::Sealing;
use forebay_io::redis::{Redis, RedisConfig};
use forebay_io::uring::Region;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::bed::{KIB, config, name_of};
use crate::servers::{Admin, BOTH, Kind, Server};

/// A tier for the suite, and a way to the values behind it.
pub struct Suited<'a> {
    config: RedisConfig,
    pool: Region,
    redis: Redis,
    /// Leads to whoever holds a value.
    admin: &'a dyn Fn(&str) -> Admin,
}

impl<'a> Suited<'a> {
    pub fn open(config: RedisConfig, admin: &'a dyn Fn(&str) -> Admin) -> Suited<'a> {
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        // Operations that the suite cancels would look like a node that hangs.
        let config = RedisConfig { has_breakers: false, ..config };
        let redis = Redis::open(&config, pool.clone()).unwrap();
        Suited { config, pool, redis, admin }
    }
}

impl conformance::Bed for Suited<'_> {
    fn tier(&mut self) -> &mut dyn Tier {
        &mut self.redis
    }

    fn pool(&self) -> Region {
        self.pool.clone()
    }

    fn turn(&mut self) {
        let wait = Timespec::try_from(Duration::from_millis(1)).unwrap();
        let _ = rustix::event::poll(&mut [PollFd::new(&self.redis.wake_fd(), PollFlags::IN)], Some(&wait));
    }

    fn reopen(&mut self) {
        self.redis = Redis::open(&self.config, self.pool.clone()).unwrap();
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let (part, within) = (length_bytes / 2 / self.config.value_bytes, length_bytes / 2 % self.config.value_bytes);
        let version = if self.config.sealing.has_secret() { "v2" } else { "" };
        let mut name = format!("{}{version}", name_of(key));
        if part > 0 {
            name = format!("{name}:{part}");
        }
        let (mut admin, at) = ((self.admin)(&name), (96 + within).to_string());
        let before = admin.must(&["BITFIELD", &name, "GET", "u8", &format!("#{at}")]);
        let after = (before.parse::<u8>().unwrap() ^ 1).to_string();
        admin.must(&["BITFIELD", &name, "SET", "u8", &format!("#{at}"), &after]);
        true
    }
}

fn check(server: &Server, config: RedisConfig) {
    conformance::check(&mut Suited::open(config, &|_| server.admin()));
}

#[test]
fn over_a_unix_socket_it_is_a_tier() {
    for kind in BOTH {
        let server = Server::start(kind);
        check(&server, config(&server.url()));
    }
}

#[test]
fn over_tcp_with_several_threads_it_is_a_tier() {
    for kind in BOTH {
        let server = Server::on_port(kind, &[]);
        check(&server, RedisConfig { threads: 3, connections: 5, ..config(&server.tcp_url()) });
    }
}

#[test]
fn with_one_operation_at_a_time_it_is_a_tier() {
    let server = Server::start(Kind::Valkey);
    check(&server, RedisConfig { connections: 1, pipeline_depth: 1, ..config(&server.url()) });
}

#[test]
fn with_split_blocks_it_is_a_tier() {
    for kind in BOTH {
        let server = Server::start(kind);
        check(&server, RedisConfig { value_bytes: 40 * KIB + 1, ..config(&server.url()) });
        check(&server, RedisConfig { value_bytes: 7 * KIB, pipeline_bytes: 15 * KIB, ..config(&server.url()) });
    }
}

#[test]
fn with_a_secret_it_is_a_tier() {
    let (server, sealing) = (Server::start(Kind::Redis), Sealing::with(&[7; 32]).unwrap());
    check(&server, RedisConfig { value_bytes: 40 * KIB + 1, sealing, ..config(&server.url()) });
}
