//! The Redis tier: blocks in a Redis or Valkey server, a cluster, or any other server that speaks RESP2.
//!
//! In the order data passes: [`RedisConfig`] (and the URLs in it) → [`Redis`], a [`forebay_core::tier::Tier`] → its
//! event loops, one thread each: one for lookups, the others for loads and stores → the nodes of an event loop, as
//! sentinels or the cluster report them → connections, each with requests in flight and the replies to them.
//!
//! Invariants, each with tests: every accepted operation completes once. Only bytes with the block's header and
//! checksum count as loaded. No byte reaches a slot after its load has completed. A connection that lost step is
//! closed and never used again; an error reply alone does not end a connection. No call waits for a server.
//! `docs/tiers/redis.md` says what the tier promises and how it fails; `docs/formats/block.md` draws a value.

mod address;
pub mod bench;
mod blocking;
mod config;
mod connect;
mod connection;
mod event_loop;
mod in_flight;
mod masters;
mod name;
mod node;
mod purge;
mod refusing;
mod replaceable;
mod replicas;
mod report;
mod resp;
mod send_buffer;
mod shared;
mod tier;
mod tls;
mod topology;
mod transport;

pub use address::{Credentials, MASK, Password, shown_place};
pub use config::{Mode, RedisConfig, SentinelConfig, TlsConfig, VALUE_BYTES};
pub use masters::examine;
pub use report::{Counters, RedisReport};
pub use tier::Redis;
