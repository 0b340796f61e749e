//! Descriptors: each connection takes one, and the system limits them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::GUESTS;
use crate::config::Config;
use crate::listen;

/// Descriptors for all that is no client's connection: the pool, disks, directories, stores, HTTP.
const OWN_FILES: u64 = 1024;
/// With fewer connections a user could not run an engine of eight ranks.
const FEWEST: u64 = 16;

/// Raises the limit of open files so far that all users that may connect can have all their connections, and returns
/// how many connections each of them can have: fewer than configured if the system does not allow so many files.
pub fn raise_limit(config: &Config) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let users = listen::users(config).len() as u64;
    let wanted = u64::from(config.limits.connections_per_user);
    let files = |connections: u64| OWN_FILES + users * (connections + GUESTS as u64);
    let most = limit.maximum.unwrap_or(u64::MAX);
    let current = limit.current.unwrap_or(u64::MAX);
    let needed = files(wanted);
    if current < needed {
        let raised = Rlimit { current: Some(needed.min(most)), maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let fit = (allowed.saturating_sub(OWN_FILES) / users).saturating_sub(GUESTS as u64).max(FEWEST);
    if fit < wanted {
        let hint = format!("raise the hard limit of open files to {needed} (systemd: `LimitNOFILE={needed}`)");
        tracing::warn!(connections_per_user = fit, configured = wanted, hint, "users get fewer connections");
    }
    fit.min(wanted) as usize
}
