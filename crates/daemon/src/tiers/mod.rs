//! The tiers below the pool, driven: what the core decides goes down as operations, what ends comes back as events.
//!
//! `open` (claim, wait for an earlier daemon's transfers, read what is there) → `driver` (effects to operations,
//! completions to events, one for each tier) → `run` (a tier's wake-up and the clock). Nothing waits for a tier: until it
//! is open, when it is sick, and when it is late, its blocks are misses.
//!
//! Invariants: an operation is submitted after its slot is written down as held; each ends exactly once in the core;
//! what waits here is bounded by what the core has under way.

mod driver;
mod kind;
mod open;
mod purge;
mod report;
mod run;
mod settings;
mod stores;
mod waiting;

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_core::below::{Find, TierId};
use forebay_core::{Core, NamespaceId};

use crate::config::Config;
use crate::state::State;
use driver::Driver;
use kind::Kind;
use stores::Busy;

pub use open::{Openings, claim};
pub use report::{Report, Standing};
pub use run::start;
pub use stores::{Emptied, Emptying};

/// All configured tiers, the nearest first: a tier's place here is its number in the core.
pub struct Tiers {
    drivers: Vec<Driver>,
    /// Namespaces that are not off the tiers yet.
    purging: BTreeSet<NamespaceId>,
    /// Those of them that the stores which hosts share are being emptied of.
    emptying: BTreeSet<NamespaceId>,
    /// Places that were being emptied when they were last looked at.
    busy: Vec<Busy>,
    finds: Vec<Find>,
}

impl Tiers {
    /// Tells the core of the tiers that are configured; they are opened later.
    pub fn new(config: &Config, core: &mut Core) -> Tiers {
        let open = |kind: Kind| Driver::new(core.open_tier(kind.limits(config)), kind, config);
        let drivers: Vec<Driver> = Kind::configured(config).into_iter().map(open).collect();
        drivers.iter().for_each(|driver| core.set_healthy(driver.id, false));
        let (purging, emptying) = Default::default();
        Tiers { drivers, purging, emptying, busy: Vec::new(), finds: Vec::new() }
    }

    /// Whether a tier's transfers can outlive a daemon that is killed; that tier says when they are over.
    pub fn has_own_disks(&self) -> bool {
        self.drivers.iter().any(|driver| driver.kind == Kind::Ssd)
    }

    /// Kinds of the tiers that hosts share.
    pub fn shared_stores(&self) -> impl Iterator<Item = &'static str> {
        self.drivers.iter().filter(|driver| driver.kind.is_shared()).map(|driver| driver.kind.name())
    }

    /// How long a block may take to come up, from any of them.
    pub fn longest_deadline(&self) -> Duration {
        self.drivers.iter().map(|driver| driver.deadline).max().unwrap_or_default()
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.drivers.iter().all(Driver::is_idle)
    }

    pub(crate) fn of(&mut self, tier: TierId) -> &mut Driver {
        &mut self.drivers[tier.0 as usize]
    }

    /// For `Effect::PurgeBelow`.
    pub fn purge(&mut self, namespace: NamespaceId) {
        self.purging.insert(namespace);
        let own = self.drivers.iter_mut().filter(|driver| !driver.kind.is_shared());
        own.for_each(|driver| driver.purge(namespace));
    }

    /// Passes on the core's questions, and all that waits, as far as the tiers take it.
    pub fn submit(&mut self, core: &mut Core) {
        core.take_finds(&mut self.finds);
        for find in self.finds.drain(..) {
            self.drivers[find.tier.0 as usize].find(find);
        }
        self.drivers.iter_mut().for_each(|driver| driver.submit(core));
    }
}

impl State {
    /// Nothing new goes to a tier, or comes up from it.
    pub fn close_tiers(&mut self) {
        for tier in 0..self.tiers.drivers.len() as u8 {
            self.tiers.of(TierId(tier)).is_closed = true;
            self.note_health(TierId(tier), false);
        }
    }
}
