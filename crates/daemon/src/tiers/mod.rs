//! Drives the tiers below the pool: the core's decisions become operations, and completions become events of the core.
//!
//! `ALL` (the kinds of tiers, each a file with its `spec`) → `driver` (one for each tier: effects to operations,
//! completions to events) → `purge` (own tiers), `empty_shared` and `pauses` (shared
//! stores). Tasks open and drive the tiers;
//! nothing here knows the daemon's state. Nothing waits for a tier: while a tier is not open, is sick or is late, its
//! blocks are misses.
//!
//! Invariants: an operation is submitted after its slot is recorded as held. Each operation ends exactly once in the
//! core. The core's limits bound the operations that wait here.

mod driver;
mod empty_shared;
mod fs;
mod index_memory;
#[cfg(test)]
mod memory;
mod object;
mod pauses;
mod purge;
mod redis;
mod report;
pub mod spec;
mod ssd;
mod submissions;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use forebay_core::tiers::{Probe, TierId};
use forebay_core::{Core, NamespaceId, Result};
use forebay_io::pool::Pool;

use driver::Driver;
use pauses::Pauses;
use spec::TierSpec;

pub use driver::Failure;
pub use empty_shared::Busy;
pub use index_memory::{Disks, IndexMemory};
pub use pauses::Paused;
pub use purge::PurgeReport;
pub use report::{Moved, Report, Standing};
pub use spec::TICK;
pub use ssd::CLAIM_COMMAND;

/// All kinds of tiers, in the order in which they are asked: the nearest first.
const ALL: &[fn() -> Box<dyn TierSpec>] = &[
    || Box::new(ssd::TierSsd::default()),
    || Box::new(fs::TierFs::default()),
    || Box::new(redis::TierRedis::default()),
    || Box::new(object::TierObject::default()),
    #[cfg(test)]
    || Box::new(memory::TierMemory::default()),
];

/// Each of them with its defaults, which switch it off.
pub fn all() -> Vec<Box<dyn TierSpec>> {
    ALL.iter().map(|new| new()).collect()
}

/// All configured tiers, the nearest first: a tier's place here is its number in the core.
pub struct Tiers {
    drivers: Vec<Driver>,
    /// Namespaces that are not off the tiers yet.
    purging: BTreeSet<NamespaceId>,
    /// Those that are off the tiers since the last [`Tiers::take_purged`].
    purged: Vec<NamespaceId>,
    /// Those of them that the stores which hosts share are being emptied of.
    emptying: BTreeSet<NamespaceId>,
    pauses: Pauses,
    /// Places that were being emptied when they were last looked at.
    busy: Vec<Busy>,
    probes: Vec<Probe>,
}

impl Tiers {
    /// Tells the core of the tiers that are configured; they are opened later.
    pub fn new<'a>(configured: impl Iterator<Item = &'a dyn TierSpec>, core: &mut Core) -> Tiers {
        let drivers: Vec<Driver> = configured.map(|spec| Driver::new(spec, core)).collect();
        drivers.iter().for_each(|driver| core.set_healthy(driver.id, false));
        let (purging, emptying, pauses) = Default::default();
        Tiers { drivers, purging, purged: Vec::new(), emptying, pauses, busy: Vec::new(), probes: Vec::new() }
    }

    /// Whether there is a place below the pool.
    pub fn is_any(&self) -> bool {
        !self.drivers.is_empty()
    }

    /// Whether a tier's transfers can outlive a daemon that is killed; that tier says when they are over.
    pub fn has_own_disks(&self) -> bool {
        self.drivers.iter().any(|driver| !driver.is_shared)
    }

    /// Kinds of the tiers that hosts share.
    pub fn shared_stores(&self) -> impl Iterator<Item = &'static str> {
        self.drivers.iter().filter(|driver| driver.is_shared).map(|driver| driver.name)
    }

    /// How long a block may take to come up, from any of them.
    pub fn longest_deadline(&self) -> Duration {
        self.drivers.iter().map(|driver| driver.deadline).max().unwrap_or_default()
    }

    /// Whether a stop has nothing to wait for: each tier that was closed is idle, or would not become so.
    pub fn is_drained(&self) -> bool {
        self.drivers.iter().all(|driver| driver.is_idle() || driver.is_given_up())
    }

    /// Names of the tiers that a stop does not wait for, although they have operations left.
    pub fn given_up(&self) -> impl Iterator<Item = &'static str> {
        self.drivers.iter().filter(|driver| !driver.is_idle() && driver.is_given_up()).map(|driver| driver.name)
    }

    /// Names of the tiers, with the operations that each has not ended.
    pub fn under_way(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.drivers.iter().map(|driver| (driver.name, driver.under_way()))
    }

    /// Nothing new goes to a tier, or comes up from it.
    pub fn close(&mut self, core: &mut Core) {
        for tier in (0..self.drivers.len() as u8).map(TierId) {
            self.of(tier).close(core);
        }
    }

    /// The stores that hosts share, which are closed and idle. They end where they are dropped: a directory's next
    /// sweeper need not wait then until this host's lease has expired, nor its stores for what was granted here.
    pub fn take_shared(&mut self) -> Vec<impl Sized + use<>> {
        let idle = self.drivers.iter_mut().filter(|driver| driver.is_shared && driver.is_idle());
        idle.filter(|driver| !driver.is_given_up()).filter_map(|driver| driver.tier.take()).collect()
    }

    pub fn of(&mut self, tier: TierId) -> &mut Driver {
        &mut self.drivers[tier.0 as usize]
    }

    /// Namespaces of blocks that were on this host's own tiers before this daemon wrote any, but for those that were
    /// purged since.
    pub fn namespaces_found(&self) -> BTreeSet<NamespaceId> {
        self.drivers.iter().flat_map(|driver| driver.purges.namespaces_found()).collect()
    }

    /// For `Effect::PurgeTiers`, and for namespaces that the core does not know.
    pub fn purge(&mut self, namespace: NamespaceId) {
        self.purging.insert(namespace);
        let own = self.drivers.iter_mut().filter(|driver| !driver.is_shared);
        own.for_each(|driver| driver.purge(namespace));
    }

    /// Passes on the core's questions, and all that waits, as far as the tiers take it.
    pub fn submit(&mut self, core: &mut Core) {
        core.take_probes(&mut self.probes);
        for probe in self.probes.drain(..) {
            self.drivers[probe.tier.0 as usize].probe(probe);
        }
        self.drivers.iter_mut().for_each(|driver| driver.submit(core));
    }

    /// One turn of a tier: what is late, what has ended, what was given up, how it is.
    pub fn drive(&mut self, tier: TierId, core: &mut Core, pool: &Pool) {
        self.of(tier).drive(core, pool);
        self.step_purges(core);
    }

    /// See [`spec::Driven::take_void`].
    pub fn take_void(&mut self, tier: TierId) -> BTreeSet<NamespaceId> {
        self.of(tier).driven().map(|tier| tier.take_void()).unwrap_or_default()
    }

    /// See [`spec::Driven::take_heard`].
    pub fn take_heard(&mut self, tier: TierId) -> Option<BTreeMap<NamespaceId, u64>> {
        self.of(tier).driven().and_then(|tier| tier.take_heard())
    }

    /// See [`spec::Driven::purge_time`].
    pub fn purge_time(&mut self, namespace: NamespaceId) -> Option<u64> {
        self.drivers.iter_mut().find_map(|driver| driver.driven()?.purge_time(namespace))
    }

    /// Whether a purge of the namespace is under way, or a pause after it.
    pub fn is_purging(&self, namespace: NamespaceId) -> bool {
        self.purging.contains(&namespace) || self.pauses.is_waiting(namespace)
    }

    /// Whether [`Tiers::pause`] has room for this.
    pub fn check_pause(&self, paused: &Paused) -> Result<()> {
        self.pauses.check(paused)
    }

    /// No block of the namespaces, whose purge begins in this event, is written to a tier or promoted from one before
    /// the end that [`Tiers::end_paused_purge`] gives; nor of namespaces of the tenant that are opened before.
    pub fn begin_paused_purge(&mut self, paused: Paused, namespaces: &[NamespaceId]) {
        self.pauses.begin_purge(paused, namespaces, Instant::now());
    }

    /// The purge has ended, and the pause lasts until `end`.
    pub fn end_paused_purge(&mut self, paused: &Paused, end: Instant) {
        self.pauses.end_purge(paused, end);
    }

    /// Somebody opens a namespace of the tenant.
    pub fn note_opened(&mut self, namespace: NamespaceId, tenant: &str, core: &mut Core) {
        if self.pauses.join(namespace, tenant) {
            core.begin_tier_purge(namespace);
            self.purging.insert(namespace);
        }
    }

    /// What pauses, with the time that each pause has left; none while its purge is under way.
    pub fn pauses(&self, now: Instant) -> impl Iterator<Item = (&Paused, Option<Duration>)> {
        self.pauses.all(now)
    }

    /// Ends pauses whose time has come, a piece at a time.
    pub fn end_pauses(&mut self, now: Instant, core: &mut Core) {
        let free = self.pauses.end(now);
        if !free.is_empty() {
            self.purging.extend(free);
            self.step_purges(core);
        }
    }

    /// Names of this host's own tiers that are not off one of these namespaces yet.
    pub fn purging(&self, namespaces: &[NamespaceId]) -> Vec<&'static str> {
        let is_purging = |driver: &&Driver| namespaces.iter().any(|namespace| driver.purges.is_purging(*namespace));
        self.drivers.iter().filter(is_purging).map(|driver| driver.name).collect()
    }

    /// Names of this host's own tiers that are not open, lack a part, or have not told of all the blocks that they had.
    pub fn own_not_whole(&self) -> impl Iterator<Item = &'static str> {
        self.drivers.iter().filter(|driver| !driver.is_shared && !driver.is_whole()).map(|driver| driver.name)
    }

    /// Names of this host's disks that are missing.
    pub fn missing_disks(&mut self) -> Vec<String> {
        let tiers = self.drivers.iter_mut().filter(|driver| !driver.is_shared).filter_map(Driver::driven);
        let missing = tiers.flat_map(|tier| tier.disks()).filter(|disk| disk.missing.is_some());
        missing.map(|disk| disk.name).collect()
    }

    /// Names of this host's disks that are in use, which are their paths.
    pub fn used_disks(&mut self) -> Vec<String> {
        let tiers = self.drivers.iter_mut().filter(|driver| !driver.is_shared).filter_map(Driver::driven);
        tiers.flat_map(|tier| tier.disks()).filter(|disk| disk.missing.is_none()).map(|disk| disk.name).collect()
    }

    /// Blocks that purges removed from this host's own tiers since these were opened.
    pub fn purged_blocks(&self) -> u64 {
        self.drivers.iter().map(|driver| driver.purge_report().removed_blocks).sum()
    }

    /// What changes as long as purges of this host's own tiers get on: blocks that were removed, and how far walks are.
    pub fn purge_progress(&self) -> (u64, Vec<Option<f64>>) {
        (self.purged_blocks(), self.drivers.iter().map(|driver| driver.purge_report().walked_ratio).collect())
    }

    /// A piece of a purge's walk through the tier's blocks, if there is one to make. True if there is more.
    pub fn walk(&mut self, tier: TierId, core: &mut Core) -> bool {
        if self.of(tier).is_walking() {
            self.step_purges(core);
        }
        self.of(tier).is_walking()
    }

    /// A purge is over when every tier is done with it, and no pause keeps its namespace off the tiers.
    pub fn step_purges(&mut self, core: &mut Core) {
        self.drivers.iter_mut().for_each(Driver::step_purges);
        let is_over = |namespace: &NamespaceId| {
            let is_off = self.drivers.iter().all(|driver| !driver.purges.is_purging(*namespace));
            is_off && !self.emptying.contains(namespace)
        };
        let over: Vec<NamespaceId> = self.purging.iter().copied().filter(is_over).collect();
        for namespace in over {
            self.purging.remove(&namespace);
            if self.pauses.keep(namespace) {
                continue;
            }
            self.purged.push(namespace);
            core.tiers_purged(namespace);
        }
    }

    /// The namespaces whose purges have ended.
    pub fn take_purged(&mut self) -> Vec<NamespaceId> {
        std::mem::take(&mut self.purged)
    }

    /// What went up and down since each was opened, the nearest first.
    pub fn moved(&self, core: &Core) -> Vec<Moved> {
        self.drivers.iter().map(|driver| driver.moved(core)).collect()
    }

    /// The configured tiers, the nearest first.
    pub fn reports(&self, core: &Core) -> Vec<Report> {
        self.drivers.iter().map(|driver| driver.report(core)).collect()
    }
}
