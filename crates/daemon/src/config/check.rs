//! What values must hold beyond their type, and those that have no effect, checked once all of them are known.
//!
//! What only the machine can tell (is there that much memory, may we write there) is checked by those who use
//! the value.

use std::path::Path;

use forebay_io::pool::Geometry;
use forebay_io::{Demand, LONGEST_MS};
use tracing_subscriber::filter::Targets;

use super::demand::{Idle, rate};
use super::value::HttpAddress;
use super::{Bytes, Config, TierSpec};
use crate::tiers::spec::Options;

/// The longest path of a Unix socket, less the longest name of ours, `/forebay.sock`.
const SOCKET_DIRECTORY_BYTES: usize = 107 - 13;

/// A century: the clock has no end at which a sum of times could arrive.
const LONGEST_SECONDS: u64 = 100 * 366 * 24 * 3600;

const LOG_LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// The first demand that `config` does not meet.
pub(super) fn first_unmet(config: &Config) -> Option<Demand> {
    let tiers = config.tiers.iter().flat_map(|tier| tier.demands().into_iter().chain(of_every_tier(&**tier)));
    demands(config).into_iter().chain(tiers).find(|demand| !demand.holds)
}

/// Of the daemon itself.
fn demands(config: &Config) -> Vec<Demand> {
    let Config { alarm, drain, socket, pool, http, limits, log, .. } = config;
    let mib = |bytes: Bytes| bytes.0 >> 20;
    vec![
        Demand::new(
            "socket.directory",
            fits_a_socket(&socket.directory),
            "be a path of at most 94 bytes, the limit of Unix sockets",
        ),
        Demand::new("pool.capacity_bytes", mib(pool.capacity_bytes) >= 2, "be at least 2 MiB"),
        Demand::new("pool.unit_bytes", pool.unit_bytes.is_none_or(is_unit), "be a power of two from 2 MiB to 256 MiB"),
        Demand::new(
            "pool.unit_bytes",
            pool.unit_bytes.is_none_or(|unit| unit <= pool.capacity_bytes),
            "be at most `pool.capacity_bytes`",
        ),
        Demand::new(
            "pool.capacity_bytes",
            Geometry::new(pool.capacity_bytes.0, pool.unit_bytes.map(|unit| unit.0)).is_ok(),
            "be at most 65,536 times `pool.unit_bytes`, and at most 16 TiB",
        ),
        Demand::new(
            "pool.promise_share",
            pool.promise_share > 0.0 && pool.promise_share <= 1.0,
            "be greater than 0 and at most 1",
        ),
        Demand::new(
            "http.address",
            is_local(http.address) || http.allow_remote,
            "be a loopback address, unless `http.allow_remote` is true",
        ),
        Demand::within("pool.scrub_walk_seconds", pool.scrub_walk_seconds, 0..=LONGEST_SECONDS),
        Demand::within("alarm.step_seconds", alarm.step_seconds, 1..=LONGEST_SECONDS),
        Demand::new("limits.engines", (1..=63).contains(&limits.engines), "be from 1 to 63"),
        Demand::at_least_1("limits.connections_per_user", limits.connections_per_user.into()),
        Demand::at_least_1("limits.sessions_per_user", limits.sessions_per_user.into()),
        Demand::within("limits.idle_seconds", limits.idle_seconds, 1..=LONGEST_SECONDS),
        Demand::at_least_1("limits.calls_per_connection", limits.calls_per_connection.into()),
        Demand::at_least_1("limits.calls_per_user", limits.calls_per_user.into()),
        Demand::new(
            "limits.call_bytes_per_user",
            limits.call_bytes_per_user >= limits.message_bytes,
            "be at least `limits.message_bytes`",
        ),
        Demand::new(
            "limits.copy_bytes_per_user",
            limits.copy_bytes_per_user >= limits.message_bytes,
            "be at least `limits.message_bytes`",
        ),
        Demand::within("limits.waiting_gets_per_user", limits.waiting_gets_per_user.into(), 1..=1024),
        Demand::new(
            "limits.message_bytes",
            (64 << 10..=16 << 20).contains(&limits.message_bytes.0),
            "be from 64 KiB to 16 MiB, the limit of the protocol",
        ),
        Demand::at_least_1("limits.lookups_in_flight", limits.lookups_in_flight.into()),
        Demand::at_least_1("limits.keys_per_lookup", limits.keys_per_lookup.into()),
        Demand::at_least_1("limits.blocks_per_commit", limits.blocks_per_commit.into()),
        Demand::at_least_1("limits.leases_per_session", limits.leases_per_session.into()),
        Demand::new(
            "log.level",
            log.level.split(',').all(is_directive) && log.level.parse::<Targets>().is_ok(),
            "be error, warn, info, debug, trace, off or `module=level`, or several with commas between",
        ),
        Demand::within("drain.deadline_seconds", drain.deadline_seconds, 0..=LONGEST_MS / 1000),
    ]
}

/// Of the keys that tiers have in common.
fn of_every_tier(tier: &dyn TierSpec) -> [Demand; 3] {
    let Options { load_deadline, rates, .. } = tier.options();
    let key = |name: &str| format!("{}.{name}", tier.section());
    [
        Demand::within(key("load_deadline_ms"), load_deadline.as_millis() as u64, 1..=LONGEST_MS),
        rate(key("load_bytes_per_second"), rates.load_bytes_per_second.map(Bytes)),
        rate(key("store_bytes_per_second"), rates.store_bytes_per_second.map(Bytes)),
    ]
}

/// Settings that are allowed where they have no effect, whoever made them. Somebody who did is told.
pub(super) fn idle(config: &Config) -> Vec<Idle> {
    let Config { http, limits, tiers, .. } = config;
    let mut idle = Vec::new();
    if http.address == HttpAddress::Off {
        idle.push(Idle::new(["http.allow_remote", "http.hosts"], "`http.address` is `off`"));
    }
    if limits.sessions_per_user > limits.connections_per_user {
        let because = "each session takes a connection, and `limits.connections_per_user` is less";
        idle.push(Idle::new(["limits.sessions_per_user"], because));
    }
    if limits.calls_per_connection > limits.calls_per_user {
        let because = "`limits.calls_per_user` counts the same calls, and is less";
        idle.push(Idle::new(["limits.calls_per_connection"], because));
    }
    idle.extend(tiers.iter().flat_map(|tier| idle_in(&**tier)));
    idle
}

fn idle_in(tier: &dyn TierSpec) -> Vec<Idle> {
    if !tier.is_configured() {
        let keys = tier.keys().iter().map(|key| key.name).filter(|name| *name != tier.switch());
        return vec![Idle::new(keys, format!("`{}` is not set", tier.switch()))];
    }
    let mut idle = tier.idle();
    if let Some((key, timeout)) = tier.operation_timeout()
        && tier.options().load_deadline > timeout
    {
        let because = format!("operations fail after `{key}`, which is less");
        idle.push(Idle::new([format!("{}.load_deadline_ms", tier.section())], because));
    }
    idle
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
