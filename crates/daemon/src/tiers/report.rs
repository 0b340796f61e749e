//! What the tier tells: for metrics, readiness and `inspect`.

use forebay_core::below::TierReport;
use forebay_core::decorate::Counts;
use forebay_core::tier::{Health, Tier};
use forebay_io::ssd::DiskReport;

use super::driver::{Driver, Stack};
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
    fn standing(&self) -> Standing {
        match (&self.tier, &self.failure) {
            (Some(tier), _) => match tier.health() {
                Health::Healthy => Standing::Serving,
                Health::Sick(kind) => Standing::Sick(format!("{kind:?}").to_lowercase()),
            },
            (None, Some(why)) => Standing::Failed(why.clone()),
            (None, None) => Standing::Opening,
        }
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
            disks: tier.map_or(Vec::new(), |tier| tier.inner().inner().inner().inner().inner().disks()),
        }
    }
}
