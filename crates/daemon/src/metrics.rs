//! Everything that the daemon measures, as plain numbers, and the one table that names them.
//!
//! The owner of a number counts it in plain integers and [`Histogram`]s. For each scrape the daemon gathers them into a
//! [`Snapshot`], and [`render`] writes that in the OpenMetrics text form that Prometheus reads. docs/metrics.md is
//! generated from the same table.

mod table;

use std::sync::Arc;
use std::time::Duration;

use forebay_core::report::{ClassReport, Held};
use forebay_core::stats::Stats;

pub use crate::clients::UserReport as User;
pub use crate::insight::{Alarm, Estimates, Share};
pub use crate::tiers::{PurgeReport, Report as Tier, Standing};
pub use forebay_core::histogram::Histogram;
pub use table::{CONTENT_TYPE, page, render};

/// All that is measured, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What the core counts since the daemon started.
    pub core: Stats,
    /// The core's view of each slot size.
    pub classes: Vec<ClassReport>,
    /// What the core must not evict.
    pub held: Held,
    pub pool: Pool,
    /// Those below the pool.
    pub tiers: Vec<Tier>,
    pub clients: Clients,
    pub saved: Saved,
    pub rpc: Rpc,
    /// How good the hit rate could be.
    pub estimates: Arc<Estimates>,
    /// Those that hold now.
    pub alarms: Vec<Alarm>,
    /// From a lookup's arrival on the control plane to its answer.
    pub lookup_time: Histogram,
    /// What kept the deciding thread from its next decision.
    pub event_time: Histogram,
    /// For which the deciding thread could run and had no core.
    pub queue_time: Duration,
    /// When the daemon started, in seconds since 1970.
    pub start_time_seconds: u64,
    /// The commit that the daemon was built from; empty if it is not known.
    pub revision: &'static str,
}

#[derive(Clone, Debug, Default)]
pub struct Pool {
    pub capacity_bytes: u64,
    pub populated_bytes: u64,
    pub huge_bytes: u64,
    /// By NUMA node, on a host with several.
    pub nodes: Vec<(u32, u64)>,
}

#[derive(Clone, Debug, Default)]
pub struct Clients {
    pub sessions: u64,
    pub attached_workers: u64,
    /// Those of them that copy from and to a GPU, and the bytes of the pool that all of these have registered with its
    /// driver.
    pub gpu_workers: u64,
    pub registered_bytes: u64,
    pub namespaces: u64,
    /// That have connected since the daemon started.
    pub users: Vec<User>,
}

/// What engines say that loads have saved them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Saved {
    /// Of prompts, loaded and so not computed.
    pub tokens: u64,
    /// The least time that computing them would have taken.
    pub prefill_us: u64,
}

impl Saved {
    pub fn add(&mut self, more: Saved) {
        self.tokens = self.tokens.saturating_add(more.tokens);
        self.prefill_us = self.prefill_us.saturating_add(more.prefill_us);
    }
}

#[derive(Clone, Debug, Default)]
pub struct Rpc {
    /// Bytes copied by `Put` and `Get`, for clients that do not map the pool.
    pub put_bytes: u64,
    pub get_bytes: u64,
    /// Connections refused because of who the peer is.
    pub refused_peers: u64,
    pub errors: Vec<RpcErrors>,
}

/// Calls of one method that ended with one status.
#[derive(Clone, Debug, Default)]
pub struct RpcErrors {
    pub method: &'static str,
    /// Such as `invalid_argument`.
    pub code: &'static str,
    pub count: u64,
}
