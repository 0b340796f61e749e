//! What values must hold beyond their type, checked once all of them are known.
//!
//! What only the machine can tell (is there that much memory, may we write there) is checked by those who use
//! the value.

use std::path::Path;

use super::value::HttpAddress;
use super::{Bytes, Config};

/// The longest path of a Unix socket, less the longest name of ours, `/forebay.sock`.
const SOCKET_DIRECTORY_BYTES: usize = 107 - 13;

const LOG_LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// A key whose value cannot be, and what it must be instead.
pub(super) struct Demand {
    pub key: &'static str,
    pub must: &'static str,
}

/// The first demand that `config` does not meet.
pub(super) fn first_unmet(config: &Config) -> Option<Demand> {
    let Config { alarm, socket, pool, tier_ssd, tier_fs, tier_redis, tier_object, http, limits, log, .. } = config;
    let mib = |bytes: Bytes| bytes.0 >> 20;
    let demands = [
        (
            "socket.directory",
            fits_a_socket(&socket.directory),
            "be a path of at most 94 bytes, the limit of Unix sockets",
        ),
        ("pool.capacity_bytes", mib(pool.capacity_bytes) >= 2, "be at least 2 MiB"),
        ("pool.unit_bytes", pool.unit_bytes.is_none_or(is_unit), "be a power of two from 2 MiB to 256 MiB"),
        (
            "pool.promise_share",
            pool.promise_share > 0.0 && pool.promise_share <= 1.0,
            "be greater than 0 and at most 1",
        ),
        (
            "http.address",
            is_local(http.address) || http.allow_remote,
            "be a loopback address, unless `http.allow_remote` is true",
        ),
        ("alarm.step_seconds", alarm.step_seconds > 0, "be at least 1"),
        ("limits.sessions", (1..=63).contains(&limits.sessions), "be from 1 to 63"),
        ("tier.ssd.load_deadline_ms", tier_ssd.load_deadline_ms > 0, "be at least 1"),
        ("tier.ssd.write_bytes_per_second", is_rate(tier_ssd.write_bytes_per_second), RATE),
        ("tier.ssd.write_bytes_per_day", is_rate(tier_ssd.write_bytes_per_day), RATE),
        ("tier.fs.load_bytes_per_second", is_rate(tier_fs.load_bytes_per_second), RATE),
        ("tier.fs.store_bytes_per_second", is_rate(tier_fs.store_bytes_per_second), RATE),
        ("tier.redis.load_bytes_per_second", is_rate(tier_redis.load_bytes_per_second), RATE),
        ("tier.redis.store_bytes_per_second", is_rate(tier_redis.store_bytes_per_second), RATE),
        ("tier.object.load_bytes_per_second", is_rate(tier_object.load_bytes_per_second), RATE),
        ("tier.object.store_bytes_per_second", is_rate(tier_object.store_bytes_per_second), RATE),
        ("tier.fs.load_deadline_ms", tier_fs.load_deadline_ms > 0, "be at least 1"),
        ("tier.redis.load_deadline_ms", tier_redis.load_deadline_ms > 0, "be at least 1"),
        ("tier.object.load_deadline_ms", tier_object.load_deadline_ms > 0, "be at least 1"),
        (
            "tier.object.bucket",
            tier_object.bucket.is_empty() || cfg!(feature = "object"),
            "be empty in this build: object stores need a build with `--features object`",
        ),
        (
            "limits.message_bytes",
            (64 << 10..=16 << 20).contains(&limits.message_bytes.0),
            "be from 64 KiB to 16 MiB, the limit of the protocol",
        ),
        ("limits.lookups_in_flight", limits.lookups_in_flight > 0, "be at least 1"),
        ("limits.keys_per_lookup", limits.keys_per_lookup > 0, "be at least 1"),
        ("limits.blocks_per_commit", limits.blocks_per_commit > 0, "be at least 1"),
        ("limits.leases_per_session", limits.leases_per_session > 0, "be at least 1"),
        ("log.level", log.level.split(',').all(is_directive), "be error, warn, info, debug, trace or `module=level`"),
    ];
    demands.into_iter().find(|(_, holds, _)| !holds).map(|(key, _, must)| Demand { key, must })
}

/// What [`is_rate`] demands.
const RATE: &str = "be greater than 0, or not set";

fn is_rate(rate: Option<Bytes>) -> bool {
    rate.is_none_or(|bytes| bytes.0 > 0)
}

fn fits_a_socket(directory: &Path) -> bool {
    directory.as_os_str().len() <= SOCKET_DIRECTORY_BYTES
}

fn is_unit(bytes: Bytes) -> bool {
    bytes.0.is_power_of_two() && (2 << 20..=256 << 20).contains(&bytes.0)
}

fn is_local(address: HttpAddress) -> bool {
    match address {
        HttpAddress::Off => true,
        HttpAddress::At(address) => address.ip().is_loopback(),
    }
}

/// A bare word that is no level would be read as a module's name, and silence everything else.
fn is_directive(text: &str) -> bool {
    text.contains('=') || LOG_LEVELS.contains(&text)
}
