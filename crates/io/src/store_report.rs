//! A shared tier's report of each shared store that it uses. All kinds of stores report in the same terms, for
//! metrics, `inspect` and `doctor`.

use std::time::Duration;

use forebay_core::tier::Health;

use crate::fs::{FsReport, RootReport};
#[cfg(feature = "object")]
use crate::object::ObjectReport;
use crate::redis::RedisReport;

/// One shared store: a server or a cluster of them, a directory, a bucket. A figure is absent where it does not
/// apply.
#[derive(Clone, PartialEq, Debug)]
pub struct StoreReport {
    /// The configured name, without passwords.
    pub name: String,
    /// The tier's own judgement of this store.
    pub health: Health,
    /// Its present problem, or its last one.
    pub trouble: Option<String>,
    /// How long ago that was seen, if it is the last one; none while it lasts.
    pub trouble_age: Option<Duration>,
    /// Why it, or a server of it, has refused most recent writes; none while it takes them.
    pub refuses_writes: Option<String>,
    /// Why it, or a server of it, has refused most recent reads of a kind; none while it answers them.
    pub refuses_reads: Option<String>,
    /// What to do about its present problem, or what it refuses; none if nothing is known.
    pub hint: Option<String>,
    /// Whether nothing is written to it: by configuration, or because it cannot be written to.
    pub is_read_only: bool,
    /// Connections that are usable now.
    pub connections: Option<u64>,
    /// An upper bound of the content of all hosts, as this one last saw it; none before it saw one.
    pub used_bytes: Option<u64>,
    /// The configured limit of the content of all hosts.
    pub capacity_bytes: Option<u64>,
    /// Threads that have been working on one operation for longer than its timeout.
    pub hanging_threads: Option<u64>,
    /// Whether this host evicts there for all hosts.
    pub is_sweeper: Option<bool>,
    /// Counts since the tier was opened, beyond those that every tier has. The tier's page in `docs/tiers/` explains
    /// the names.
    pub events: Vec<(&'static str, u64)>,
}

/// Counters under their own names.
macro_rules! events {
    ($counters:expr, $($name:ident),+ $(,)?) => { vec![$((stringify!($name), $counters.$name)),+] };
}

/// The trouble of a store that is not to be written.
const READ_ONLY: &str = "configured as read-only";

impl StoreReport {
    /// Whether blocks are loaded from it.
    pub fn can_load(&self) -> bool {
        self.health == Health::Healthy && self.refuses_reads.is_none()
    }

    /// Whether blocks are written to it.
    pub fn can_store(&self) -> bool {
        self.health == Health::Healthy && !self.is_read_only && self.refuses_writes.is_none()
    }

    fn new(name: String, health: Health, trouble: Option<String>, events: Vec<(&'static str, u64)>) -> StoreReport {
        StoreReport {
            name,
            health,
            trouble,
            trouble_age: None,
            refuses_writes: None,
            refuses_reads: None,
            hint: None,
            is_read_only: false,
            connections: None,
            used_bytes: None,
            capacity_bytes: None,
            hanging_threads: None,
            is_sweeper: None,
            events,
        }
    }

    /// One report for all servers of the tier.
    pub fn of_redis(report: RedisReport) -> StoreReport {
        let events = events!(
            report.counters,
            connections_made,
            connections_lost,
            failed_connects,
            lost_steps,
            redirects,
            wrong_sizes,
            foreign_values,
            corrupt_blocks,
            full_stores,
            refused_operations,
            unavailable_operations,
            late_operations,
            absent_loads,
        );
        let connections = Some(report.connections as u64);
        let (trouble, seen) = report.last_error.unzip();
        StoreReport {
            trouble_age: seen.map(|seen| seen.elapsed()),
            connections,
            refuses_writes: report.refuses_writes,
            refuses_reads: report.refuses_reads,
            hint: report.hint,
            ..StoreReport::new(report.name, report.health, trouble, events)
        }
    }

    /// One report per directory.
    pub fn of_fs(report: FsReport) -> Vec<StoreReport> {
        report.roots.into_iter().map(StoreReport::of_root).collect()
    }

    fn of_root(root: RootReport) -> StoreReport {
        let events = events!(
            root.counters,
            repeated_stores,
            absent_loads,
            failed_loads,
            failed_stores,
            corrupt_blocks,
            misread_blocks,
            full_stores,
            given_up,
            sweeps,
            evicted_blocks,
            expired_blocks,
            removed_orphans,
            skipped_folders,
        );
        let hangs = || format!("{} of {} threads hang", root.hanging_threads, root.threads);
        let is_open = root.missing.is_none();
        let is_read_only = root.is_read_only;
        let configured = || is_read_only.then(|| READ_ONLY.to_string());
        let trouble = if root.hanging_threads > 0 { Some(hangs()) } else { root.missing.or_else(configured) };
        StoreReport {
            refuses_writes: root.refuses_writes,
            refuses_reads: root.refuses_reads,
            hint: root.hint,
            is_read_only,
            used_bytes: root.used_bytes,
            capacity_bytes: root.capacity_bytes,
            hanging_threads: is_open.then_some(root.hanging_threads as u64),
            is_sweeper: is_open.then_some(root.is_sweeper),
            ..StoreReport::new(root.path.display().to_string(), root.health, trouble, events)
        }
    }

    /// One report for the bucket.
    #[cfg(feature = "object")]
    pub fn of_object(report: ObjectReport) -> StoreReport {
        let events = events!(
            report.counters,
            repeated_stores,
            absent_loads,
            failed_loads,
            failed_stores,
            corrupt_blocks,
            misread_blocks,
            given_up,
        );
        let is_read_only = report.read_only;
        let trouble = is_read_only.then(|| READ_ONLY.to_string());
        StoreReport { is_read_only, ..StoreReport::new(report.name, report.health, trouble, events) }
    }
}
