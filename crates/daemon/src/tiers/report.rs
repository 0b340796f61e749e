//! Figures and state of a tier for metrics, readiness and `inspect`.

use forebay_core::decorate::Counts;
use forebay_core::histogram::Histogram;
use forebay_core::tier::{Health, Tier};
use forebay_core::tiers::TierReport;
use forebay_core::{Core, ErrorKind};
use forebay_io::StoreReport;
use forebay_io::ssd::DiskReport;

use super::driver::{Driver, Failure};
use super::purge::PurgeReport;
use super::spec::Driven;

/// How far the configured tier is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    Opening,
    Serving,
    Sick(String),
    /// The tier will not open before the daemon's next start.
    Failed(String),
}

/// One tier, at one moment.
#[derive(Clone, Debug)]
pub struct Report {
    pub name: &'static str,
    /// Other hosts store and evict there too.
    pub is_shared: bool,
    pub standing: Standing,
    pub core: TierReport,
    /// By kind of operation.
    pub counts: Vec<(&'static str, Counts)>,
    /// Operations that wait to be taken by the tier.
    pub waiting: u64,
    pub breaker_opened: u64,
    pub purge: PurgeReport,
    pub disks: Vec<DiskReport>,
    /// The shared stores of the tier.
    pub stores: Vec<StoreReport>,
}

impl Report {
    /// Blocks that the tier took and did not have: a block that another host has stored, say, is not written again. The
    /// two counts are made at different times, so it may be one block short for a moment: it is no counter of metrics.
    pub fn stored_blocks(&self) -> u64 {
        let of_disks = self.disks.iter().map(|disk| disk.counters.repeated_stores);
        let of_stores = self.stores.iter().flat_map(|store| &store.events);
        let of_stores = of_stores.filter(|(event, _)| *event == "repeated_stores").map(|(_, count)| *count);
        self.core.stats.stored.saturating_sub(of_disks.chain(of_stores).sum())
    }
}

/// What went through one tier.
#[derive(Clone, Debug, Default)]
pub struct Moved {
    /// Keys looked up that were first hits of promoted blocks.
    pub hits: u64,
    /// Of promoted blocks.
    pub up_bytes: u64,
    /// Of blocks that were written to it.
    pub down_bytes: u64,
    pub load_time: Histogram,
}

impl Standing {
    /// The state in one word, and the reason.
    pub fn told(&self) -> (&'static str, &str) {
        match self {
            Standing::Opening => ("opening", "its index is being read"),
            Standing::Serving => ("serving", ""),
            Standing::Sick(why) => ("sick", why),
            Standing::Failed(why) => ("failed", why),
        }
    }
}

impl Driver {
    pub(super) fn standing(&self) -> Standing {
        match (&self.tier, &self.failure) {
            (Some(tier), _) => match tier.health() {
                Health::Healthy => Standing::Serving,
                Health::Sick(kind) => Standing::Sick(self.sickness(kind)),
            },
            (None, Some(Failure { why, is_tried_again: true })) => Standing::Sick(why.clone()),
            (None, Some(Failure { why, is_tried_again: false })) => Standing::Failed(why.clone()),
            (None, None) => Standing::Opening,
        }
    }

    /// What kind of trouble the tier is in, and what its stores and disks say of it.
    fn sickness(&self, kind: ErrorKind) -> String {
        let kind = format!("{kind:?}").to_lowercase();
        let (stores, disks) = self.inmost().map_or_else(Default::default, |tier| (tier.stores(), tier.disks()));
        let stores = stores.into_iter().map(|store| match store.health {
            Health::Healthy => store.refuses_reads,
            Health::Sick(_) => store.trouble,
        });
        let disks = disks.iter().filter_map(|disk| Some(format!("`{}`: {}", disk.name, disk.trouble()?)));
        let troubles: Vec<String> = stores.flatten().chain(disks).collect();
        if troubles.is_empty() { kind } else { format!("{kind}: {}", troubles.join("; ")) }
    }

    pub(super) fn moved(&self, core: &Core) -> Moved {
        let stats = core.tier_report(self.id).stats;
        let loads = self.tier.iter().flat_map(|tier| tier.counts()).find(|(kind, _)| *kind == "load");
        Moved {
            hits: stats.hits,
            up_bytes: stats.promoted_bytes,
            down_bytes: stats.stored_bytes,
            load_time: loads.map_or(Histogram::default(), |(_, counts)| counts.time.clone()),
        }
    }

    pub(super) fn report(&self, core: &Core) -> Report {
        let tier = self.tier.as_ref();
        Report {
            name: self.name,
            is_shared: self.is_shared,
            standing: self.standing(),
            core: core.tier_report(self.id),
            counts: tier.iter().flat_map(|tier| tier.counts().map(|(kind, counts)| (kind, counts.clone()))).collect(),
            waiting: self.waiting() as u64,
            breaker_opened: tier.map_or(0, |tier| tier.opened()) + self.inmost().map_or(0, Driven::breakers_opened),
            purge: self.purge_report(),
            disks: self.inmost().map_or(Vec::new(), Driven::disks),
            stores: self.stores(),
        }
    }

    /// With what the breakers know: a tier that is kept from writes is healthy, and need not say so itself.
    fn stores(&self) -> Vec<StoreReport> {
        let mut stores = self.inmost().map_or(Vec::new(), Driven::stores);
        if let Some(kind) = self.tier.as_ref().and_then(|tier| tier.why_no_writes())
            && stores.iter().all(|store| store.refuses_writes.is_none())
        {
            let why = format!("writes fail ({})", format!("{kind:?}").to_lowercase());
            stores.iter_mut().for_each(|store| store.refuses_writes = Some(why.clone()));
        }
        stores
    }

    /// Of the tier itself, without what is around it.
    fn inmost(&self) -> Option<&dyn Driven> {
        self.tier.as_ref().map(|tier| &**tier.tier())
    }
}
