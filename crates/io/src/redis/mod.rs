//! The Redis tier: blocks in a Redis or Valkey server, a cluster of them, or whatever speaks RESP2 for them.
//!
//! In the order data passes: [`RedisConfig`] (and the URLs in it) → [`Redis`], a [`forebay_core::tier::Tier`] → its
//! lanes, one thread each: one for lookups, the others for loads and stores → the nodes that a lane knows, by what
//! the sentinels or the cluster say → connections, each with requests in flight and the replies to them.
//!
//! Invariants, each with tests: every operation taken completes once; only bytes whose header and checksum are those
//! of the block are called loaded; no byte reaches a slot after its load has completed; a connection that lost step
//! is closed and never used again, one that was merely told of an error stays; no call waits for a server. What the
//! tier promises and how it fails is told in `docs/tiers/redis.md`; a value is drawn in `docs/formats/block.md`.

mod address;
pub mod bench;
mod caller;
mod config;
mod connection;
mod dial;
mod flight;
mod lane;
mod name;
mod node;
mod outgoing;
mod purge;
mod report;
mod resp;
mod scout;
mod shared;
mod tier;
mod transport;

pub use address::Credentials;
pub use config::{Mode, RedisConfig, SentinelConfig, TlsConfig};
pub use report::{Counters, RedisReport};
pub use tier::Redis;
