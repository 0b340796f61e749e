//! What the tier tells: for metrics, readiness and `inspect`.

use forebay_core::ErrorKind;
use forebay_core::below::TierReport;
use forebay_core::decorate::Counts;
use forebay_core::tier::{Health, Tier};
use forebay_io::StoreReport;
use forebay_io::ssd::DiskReport;

use super::driver::{Driver, Stack};
use super::kind::Driven;
use crate::state::State;

/// How far the configured tier is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    Opening,
    Serving,
    Sick(String),
    /// It will not be open before the next start.
    Failed(String),
}

/// One tier, at one moment.
#[derive(Clone, Debug)]
pub struct Report {
    pub name: &'static str,
    pub standing: Standing,
    pub core: TierReport,
    /// By kind of operation.
    pub counts: Vec<(&'static str, Counts)>,
    /// Operations that wait to be taken by the tier.
    pub waiting: u64,
    pub breaker_opened: u64,
    pub disks: Vec<DiskReport>,
    /// Those that hosts share.
    pub stores: Vec<StoreReport>,
}

impl Standing {
    /// In one word, and why.
    pub fn told(&self) -> (&'static str, &str) {
        match self {
            Standing::Opening => ("opening", "its blocks are being read"),
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
            (None, Some(why)) => Standing::Failed(why.clone()),
            (None, None) => Standing::Opening,
        }
    }

    /// What kind of trouble the tier is in, and what its stores say of it.
    fn sickness(&self, kind: ErrorKind) -> String {
        let kind = format!("{kind:?}").to_lowercase();
        let stores = self
            .inmost()
            .map_or(Vec::new(), Driven::stores)
            .into_iter()
            .filter(|store| store.health != Health::Healthy);
        let troubles: Vec<String> = stores.filter_map(|store| store.trouble).collect();
        if troubles.is_empty() { kind } else { format!("{kind}: {}", troubles.join("; ")) }
    }

    /// Of the tier itself, without what is around it.
    fn inmost(&self) -> Option<&dyn Driven> {
        self.tier.as_ref().map(|tier| &**tier.inner().inner().inner().inner().inner())
    }
}

impl State {
    /// The configured tiers, the nearest first.
    pub fn tier_reports(&self) -> Vec<Report> {
        self.tiers.drivers.iter().map(|driver| self.report_of(driver)).collect()
    }

    fn report_of(&self, driver: &Driver) -> Report {
        let tier = driver.tier.as_ref();
        Report {
            name: driver.kind.name(),
            standing: driver.standing(),
            core: self.core.tier_report(driver.id),
            counts: tier.iter().flat_map(|tier| Stack::KINDS.into_iter().zip(tier.counts().clone())).collect(),
            waiting: driver.waiting() as u64,
            breaker_opened: tier.map_or(0, |tier| tier.inner().opened()),
            disks: driver.inmost().map_or(Vec::new(), Driven::disks),
            stores: driver.inmost().map_or(Vec::new(), Driven::stores),
        }
    }
}
