//! What the daemon has to know of a tier: one entry, from which opening, driving, reports and metrics follow.
//!
//! A tier of another kind needs a folder in `forebay-io` (and its line in `lib.rs`), a file beside this one with its
//! [`TierSpec`] (and its lines in `mod.rs`, one of them in `ALL`), and a section in `config.rs` with its arm in
//! `config/table.rs` and its rules in `config/check.rs`.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::decorate::{Limits as Rates, Timed};
use forebay_core::tier::Location;
use forebay_core::tiers::{Admission, Limits};
use forebay_core::{BlockKey, NamespaceId, Result};
use forebay_io::StoreReport;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::ssd::DiskReport;

use crate::config::{Bytes, Config};

/// See the module's head.
pub struct TierSpec {
    /// As in metrics and in the configuration's section.
    pub name: &'static str,
    /// Other hosts store and evict there too.
    pub is_shared: bool,
    pub is_configured: fn(&Config) -> bool,
    pub options: fn(&Config) -> Options,
    /// Checks the configuration and takes what only one daemon may have. Errors with what the operator has to change.
    pub claim: fn(&Config) -> Result<Box<dyn Claimed>>,
}

/// What every tier has of the configuration.
pub struct Options {
    pub admission: Admission,
    /// How long a request waits for a block of the tier.
    pub load_deadline: Duration,
    /// How much of the tier this daemon uses. A disk keeps its own budget, since that lasts for days.
    pub rates: Rates,
}

/// A tier that is claimed and does not serve yet.
pub trait Claimed: Send {
    /// Opens the tier; on a thread of its own. Called again after an error that may pass, if hosts share the tier.
    fn open(&mut self, pool: &Arc<Pool>, core: &dyn OpeningEvents) -> Result<Box<dyn Driven>>;
}

/// What a tier reports to the core while it is being opened.
pub trait OpeningEvents {
    /// Nothing lands any more in the slots that an earlier daemon's transfers were filling.
    fn transfers_over(&self);

    /// The tier holds these blocks.
    fn found(&self, blocks: &[(BlockKey, Location)]);
}

impl TierSpec {
    /// What the core may do with it.
    pub fn limits(&self, config: &Config) -> Limits {
        Limits { admission: (self.options)(config).admission, is_shared: self.is_shared, ..Limits::default() }
    }
}

impl Options {
    /// Rates in bytes a second.
    pub fn new(admission: Admission, load_deadline_ms: u64, loads: Option<Bytes>, stores: Option<Bytes>) -> Options {
        let [load_bytes_per_second, store_bytes_per_second] = [loads, stores].map(|rate| rate.map(|bytes| bytes.0));
        let rates = Rates { load_bytes_per_second, store_bytes_per_second, in_flight: None };
        Options { admission, load_deadline: Duration::from_millis(load_deadline_ms), rates }
    }
}

/// A tier as the driver has it.
pub trait Driven: Timed + Send {
    /// Readable when `poll` has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// The pool's first bytes are populated, and may be pinned.
    fn register(&mut self, _populated_bytes: u64) {}

    /// Appends blocks that the tier gave up by itself.
    fn take_evicted(&mut self, _keys: &mut Vec<BlockKey>) {}

    /// All blocks of a namespace, as far as the tier knows without asking anybody.
    fn blocks_of(&self, _namespace: NamespaceId) -> Vec<BlockKey> {
        Vec::new()
    }

    fn disks(&self) -> Vec<DiskReport> {
        Vec::new()
    }

    fn stores(&self) -> Vec<StoreReport> {
        Vec::new()
    }

    /// Where the blocks of a tier are that hosts share, to be emptied of namespaces.
    fn places(&self) -> Vec<Place> {
        Vec::new()
    }
}
