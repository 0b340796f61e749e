//! What values must hold beyond their type, checked once all of them are known.
//!
//! What only the machine can tell (is there that much memory, may we write there) is checked by those who use
//! the value.

use std::path::Path;

use super::value::HttpAddress;
use super::{Bytes, Config, Demand, TierSpec};
use crate::tiers::spec::Options;

/// The longest path of a Unix socket, less the longest name of ours, `/forebay.sock`.
const SOCKET_DIRECTORY_BYTES: usize = 107 - 13;

const LOG_LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// The first demand that `config` does not meet.
pub(super) fn first_unmet(config: &Config) -> Option<Demand> {
    let tiers = config.tiers.iter().flat_map(|tier| tier.demands().into_iter().chain(of_every_tier(&**tier)));
    demands(config).into_iter().chain(tiers).find(|demand| !demand.holds)
}

/// Of the daemon itself.
fn demands(config: &Config) -> Vec<Demand> {
    let Config { alarm, socket, pool, http, limits, log, .. } = config;
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
            "pool.promise_share",
            pool.promise_share > 0.0 && pool.promise_share <= 1.0,
            "be greater than 0 and at most 1",
        ),
        Demand::new(
            "http.address",
            is_local(http.address) || http.allow_remote,
            "be a loopback address, unless `http.allow_remote` is true",
        ),
        Demand::at_least_1("alarm.step_seconds", alarm.step_seconds),
        Demand::new("limits.engines", (1..=63).contains(&limits.engines), "be from 1 to 63"),
        Demand::at_least_1("limits.connections_per_user", limits.connections_per_user.into()),
        Demand::at_least_1("limits.sessions_per_user", limits.sessions_per_user.into()),
        Demand::at_least_1("limits.idle_seconds", limits.idle_seconds),
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
            log.level.split(',').all(is_directive),
            "be error, warn, info, debug, trace or `module=level`",
        ),
    ]
}

/// Of the keys that tiers have in common.
fn of_every_tier(tier: &dyn TierSpec) -> [Demand; 3] {
    let Options { load_deadline, rates, .. } = tier.options();
    let key = |name: &str| format!("{}.{name}", tier.section());
    [
        Demand::at_least_1(key("load_deadline_ms"), load_deadline.as_millis() as u64),
        Demand::rate(key("load_bytes_per_second"), rates.load_bytes_per_second.map(Bytes)),
        Demand::rate(key("store_bytes_per_second"), rates.store_bytes_per_second.map(Bytes)),
    ]
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
