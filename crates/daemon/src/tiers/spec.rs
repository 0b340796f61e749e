//! What the daemon has to know of a kind of tier: one [`TierSpec`], from which configuration, validation, opening,
//! driving, reports, metrics and `forebay doctor` follow.
//!
//! A tier of another kind needs a folder in `crates/io/src` and its `mod` in `lib.rs` there, a file beside this one
//! with its section and its `TierSpec`, and two lines in `mod.rs`: a `mod` and a line in `ALL`. If hosts share it, it
//! also needs its part of `store_report.rs` in `crates/io/src`. If Python programs open it without a daemon, it needs
//! its options in `store/options.rs` of `crates/python/src`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::decorate::{Limits as Rates, Timed};
use forebay_core::tier::Capabilities;
use forebay_core::tiers::{Admission, TierHasher};
use forebay_core::{BlockKey, Fingerprint, NamespaceId, Result};
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::ssd::DiskReport;
use forebay_io::{Demand, StoreReport};

use crate::config::{Bytes, Idle, Section};

/// What is known of shared stores ages so often: often enough that what other hosts stored is soon found, and seldom
/// enough that a request does not wait twice for a block whose load failed or was late.
pub const TICK: Duration = Duration::from_secs(2);

/// A kind of tier: its section of the configuration, and what follows from that.
pub trait TierSpec: Section {
    /// As in metrics and logs: the name of the section without `tier.`.
    fn name(&self) -> &'static str {
        let section = self.section();
        section.strip_prefix("tier.").unwrap_or(section)
    }

    /// The most that a tier of this kind can do, as it is known before one is open.
    fn capabilities(&self) -> Capabilities;

    fn is_configured(&self) -> bool;

    /// The key that switches the tier on.
    fn switch(&self) -> &'static str;

    /// What the section's values must hold beyond their types, except those in [`Options`].
    fn demands(&self) -> Vec<Demand> {
        Vec::new()
    }

    /// Settings of a configured tier that have no effect beside its others.
    fn idle(&self) -> Vec<Idle> {
        Vec::new()
    }

    /// After what time an operation fails, and the key that says so.
    fn operation_timeout(&self) -> Option<(&'static str, Duration)> {
        None
    }

    fn options(&self) -> Options;

    /// Of this host's own disks, if their sizes are configured.
    fn capacity_bytes(&self) -> Option<u64> {
        None
    }

    /// Whether parts of the tier that fail by themselves have breakers, so that the tier as a whole needs none.
    fn has_own_breakers(&self) -> bool {
        false
    }

    /// Disks that hang and fail each by themselves, if the tier has disks: each may keep its own share of the tier's
    /// limits.
    fn disks(&self) -> Option<usize> {
        None
    }

    /// How the tier is told of uses that it does not see, if it takes that.
    fn touching(&self) -> Option<Touches> {
        None
    }

    /// Checks what the values and the files of secrets say, before anything else is touched. Errors with what the
    /// operator has to change.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// What `forebay doctor` says of a configured tier that has passed its check and that no daemon serves: a finding
    /// each, or what the operator has to change. Looks at disks, directories and servers, and changes nothing.
    fn examine(&self) -> Vec<Result<String>>;

    /// Takes what only one daemon may have, for a tier that has passed its check. Blocks in stores that hosts share are
    /// sealed with `sealing`. Errors with what the operator has to change.
    fn claim(&self, sealing: &Sealing) -> Result<Box<dyn Claimed>>;
}

/// What every tier has of the configuration. Tiers name the keys of these alike.
pub struct Options {
    pub admission: Admission,
    /// How long a request waits for a block of the tier.
    pub load_deadline: Duration,
    /// How much of the tier this daemon uses. A disk keeps its own budget, since that lasts for days.
    pub rates: Rates,
}

/// How a shared store is told of the uses of blocks that are in the pool.
pub struct Touches {
    /// Of this host.
    pub per_second: u32,
    /// After this time without a touch a block is touched at its next use; longer, up to `most`, where the store keeps
    /// blocks for long.
    pub least: Duration,
    pub most: Duration,
    /// Blocks that the store was given before and that come up from a disk: it is asked for so many, by a touch each,
    /// before they are sent there again. 0 where a store asks by itself.
    pub asks_per_second: u32,
}

impl Touches {
    /// For stores that evict by use, or whose blocks end by time: at most a quarter of the time that the store keeps a
    /// block unused, if that is known. With one touch in four minutes, 256 a second keep 65,536 blocks of a host.
    pub fn by_use(kept: Option<Duration>) -> Touches {
        let most = Duration::from_secs(256);
        Touches { per_second: 256, least: TICK, most: kept.map_or(most, |kept| most.min(kept / 4)), asks_per_second: 0 }
    }
}

/// A tier that is claimed and does not serve yet.
pub trait Claimed: Send {
    /// Opens the tier; on a thread of its own. Called again after an error that may pass, if hosts share the tier.
    fn open(&mut self, pool: &Arc<Pool>, core: &dyn OpeningEvents) -> Result<Box<dyn Driven>>;
}

/// What a tier reports to the core while it is being opened.
pub trait OpeningEvents {
    /// What gives blocks their fingerprints.
    fn hasher(&self) -> TierHasher;

    /// The tier holds these blocks.
    fn found(&self, found: Found);
}

impl Options {
    /// Rates in bytes a second.
    pub fn new(admission: Admission, load_deadline_ms: u64, loads: Option<Bytes>, stores: Option<Bytes>) -> Options {
        let [load_bytes_per_second, store_bytes_per_second] = [loads, stores].map(|rate| rate.map(|bytes| bytes.0));
        let rates = Rates { load_bytes_per_second, store_bytes_per_second, in_flight: None };
        Options { admission, load_deadline: Duration::from_millis(load_deadline_ms), rates }
    }
}

/// Blocks that a tier had from the start.
#[derive(Default)]
pub struct Found {
    /// By the core's fingerprints.
    pub blocks: Vec<Fingerprint>,
    /// Of which there are blocks.
    pub namespaces: Vec<NamespaceId>,
}

/// A step of [`Driven::walk`].
pub enum Walked {
    /// What it met; it goes on at once.
    Keys(Vec<BlockKey>),
    /// The tier's next turn may be of use.
    Waits,
    /// All blocks were looked at.
    End,
}

/// A tier as the driver has it.
pub trait Driven: Timed + Send {
    /// Readable when `poll` has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// The pool's first bytes are populated, and may be pinned.
    fn register(&mut self, _populated_bytes: u64) {}

    /// Of an own tier: whether nothing lands any more in the slots that an earlier daemon's transfers were filling.
    /// Once true, it stays so.
    fn are_earlier_transfers_over(&self) -> bool {
        true
    }

    /// Appends blocks of parts that came after the tier was opened, some at a time; it is woken for the rest.
    fn take_found(&mut self, _found: &mut Found) {}

    /// Whether there are more of them to take.
    fn has_more_found(&self) -> bool {
        false
    }

    /// Parts of an own tier that are configured and not in use.
    fn missing_parts(&self) -> usize {
        0
    }

    /// Appends blocks that the tier gave up by itself, and those that it lost without knowing their keys.
    fn take_evicted(&mut self, _keys: &mut Vec<BlockKey>, _lost: &mut Vec<Fingerprint>) {}

    /// Goes on with the walk through the tier's own blocks, or begins a new one. Takes at most some 100 us. A block
    /// that is there from the start of the walk to its end is met, if it is of these namespaces; one that is stored
    /// meanwhile may be missing.
    fn walk(&mut self, _namespaces: &BTreeSet<NamespaceId>, _is_new: bool) -> Walked {
        Walked::End
    }

    /// Nothing of these namespaces is in the tier, or on its way there. One that outlives the daemon has to see to it
    /// that none of their present blocks ever comes back. [`Driven::noted`] says how that ends.
    fn note_purged(&mut self, _namespaces: &BTreeSet<NamespaceId>) {}

    /// Whether the tier has seen to that, for the namespaces that it was told last; none while it is at it.
    fn noted(&mut self) -> Option<bool> {
        Some(true)
    }

    /// Namespaces that were purged while a part was away, whether or not it has blocks of them. Each is told once, and
    /// has to be purged again.
    fn take_void(&mut self) -> BTreeSet<NamespaceId> {
        BTreeSet::new()
    }

    /// Purges that the tier knows of, and a pool that has met no disk does not, and when each has ended. They are to be
    /// written down, and that the pool has met disks. None if nothing has changed.
    fn take_heard(&mut self) -> Option<BTreeMap<NamespaceId, u64>> {
        None
    }

    /// When the last purge of the namespace that has ended did so, if the tier remembers purges.
    fn purge_time(&self, _namespace: NamespaceId) -> Option<u64> {
        None
    }

    /// The share of the tier that the walk has gone through.
    fn walked_ratio(&self) -> f64 {
        0.0
    }

    fn disks(&self) -> Vec<DiskReport> {
        Vec::new()
    }

    fn stores(&self) -> Vec<StoreReport> {
        Vec::new()
    }

    /// How often breakers of the tier's own have opened.
    fn breakers_opened(&self) -> u64 {
        0
    }

    /// Where the blocks of a tier are that hosts share, to be emptied of namespaces.
    fn places(&self) -> Vec<Place> {
        Vec::new()
    }
}
