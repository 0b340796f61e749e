//! Whether the daemon is alive and whether it can serve, decided from facts alone.

use std::time::Duration;

use forebay_core::size::human;
use forebay_core::tier::Health as Judged;
use forebay_io::StoreReport;

use crate::own_files::OwnFiles;
use crate::state::State;
use crate::tiers::{Report, Standing};

/// How long the core's thread may be silent. It ticks many times a second and no event takes a millisecond, so
/// two seconds are a thread that is stuck or dead, or a host that is far beyond its load.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);

/// The facts, at one moment.
#[derive(Clone, Debug)]
pub struct Health {
    /// Since the core's thread last ticked.
    pub core_silence: Duration,
    /// The index of a pool found at start is rebuilt.
    pub is_recovered: bool,
    pub populated_bytes: u64,
    /// What must be populated before the first block can be stored.
    pub needed_bytes: u64,
    pub capacity_bytes: u64,
    /// Why the rest of the pool is not populated; nothing while it is being populated, or is.
    pub lacks_memory: Option<String>,
    pub own_files: OwnFiles,
    pub is_draining: bool,
    /// Of each tier below the pool: its name, its state, and why. None of them is needed to serve.
    pub tiers: Vec<TierHealth>,
}

/// Of a tier below the pool.
#[derive(Clone, Debug)]
pub struct TierHealth {
    pub name: &'static str,
    pub state: &'static str,
    pub why: String,
    /// It serves, with all its disks and stores.
    pub is_whole: bool,
}

/// What comes of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finding {
    Holds,
    /// Something is wrong, and the daemon serves on without it.
    Impaired,
    Fails,
}

impl Finding {
    /// As probes and people read it.
    pub fn name(self) -> &'static str {
        match self {
            Finding::Holds => "ok",
            Finding::Impaired => "warn",
            Finding::Fails => "fail",
        }
    }
}

/// One reason for or against.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    pub name: &'static str,
    pub finding: Finding,
    pub why: String,
}

impl Health {
    /// As it is now.
    pub(crate) fn of(state: &State) -> Health {
        Health {
            core_silence: state.last_tick.elapsed(),
            is_recovered: state.is_recovered,
            populated_bytes: state.core.populated_bytes(),
            needed_bytes: state.table.pool().geometry().unit_bytes,
            capacity_bytes: state.core.capacity_bytes(),
            lacks_memory: state.lacks_memory.clone(),
            own_files: state.own_files.clone(),
            is_draining: state.is_draining,
            tiers: state.tiers.reports(&state.core).iter().map(told).collect(),
        }
    }

    /// If one of these fails, only a restart helps.
    pub fn live(&self) -> Vec<Check> {
        vec![self.core()]
    }

    /// If one of these fails, engines should be sent elsewhere, or wait.
    pub fn ready(&self) -> Vec<Check> {
        let serving = if self.is_draining { "draining: no new slots and leases are granted" } else { "not draining" };
        let index = if self.is_recovered { "complete" } else { "still being read from the pool" };
        let tiers = self.tiers.iter().map(|tier| {
            let TierHealth { name, state, why, is_whole } = tier;
            let colon = if why.is_empty() { "" } else { ": " };
            // The rest serves on without it: an engine that is sent elsewhere would gain nothing.
            let finding = if *is_whole { Finding::Holds } else { Finding::Impaired };
            Check { name, finding, why: format!("{state}{colon}{why}") }
        });
        let mut checks = vec![
            self.core(),
            check("index", self.is_recovered, index.to_string()),
            self.pool(),
            check("drain", !self.is_draining, serving.to_string()),
        ];
        let lost = self.own_files.sockets.clone();
        checks.extend(lost.map(|why| check("sockets", false, why)));
        checks.extend(tiers);
        let disks = self.own_files.disks.join("; ");
        checks.extend((!disks.is_empty()).then_some(Check { name: "disks", finding: Finding::Impaired, why: disks }));
        checks
    }

    fn pool(&self) -> Check {
        let Health { populated_bytes, needed_bytes, .. } = *self;
        let why = match self.without_memory().or(self.own_files.pool.clone()) {
            Some(why) => why,
            None => format!("{} populated, {} needed", human(populated_bytes), human(needed_bytes)),
        };
        let finding = match (populated_bytes >= needed_bytes, &self.lacks_memory, &self.own_files.pool) {
            (false, ..) => Finding::Fails,
            (true, None, None) => Finding::Holds,
            // A smaller pool serves as any other, and what is stored in one without records is served.
            (true, ..) => Finding::Impaired,
        };
        Check { name: "pool", finding, why }
    }

    /// How much of the pool there is, and why not all, if the rest cannot be had.
    pub(crate) fn without_memory(&self) -> Option<String> {
        let why = self.lacks_memory.as_ref()?;
        Some(format!("{} of {} populated: {why}", human(self.populated_bytes), human(self.capacity_bytes)))
    }

    fn core(&self) -> Check {
        let ms = self.core_silence.as_millis();
        check("core", self.core_silence <= SILENCE_LIMIT, format!("ticked {ms} ms ago"))
    }
}

/// A tier that serves says which of its shared stores and disks it does without, or with half of.
fn told(tier: &Report) -> TierHealth {
    let (state, why) = tier.standing.told();
    let stores = tier.stores.iter().flat_map(without_store);
    let disks = tier.disks.iter().filter_map(|disk| {
        let what = if disk.health == Judged::Healthy { "writes to " } else { "" };
        Some(format!("without {what}`{}`: {}", disk.name, disk.trouble()?))
    });
    let without = stores.chain(disks).filter(|_| tier.standing == Standing::Serving);
    let without = without.collect::<Vec<_>>().join("; ");
    let is_whole = tier.standing == Standing::Serving && without.is_empty();
    TierHealth { name: tier.name, state, why: if without.is_empty() { why.to_owned() } else { without }, is_whole }
}

fn without_store(store: &StoreReport) -> Vec<String> {
    if store.health == Judged::Healthy {
        let refused = [("reads from", &store.refuses_reads), ("writes to", &store.refuses_writes)];
        let told = refused
            .into_iter()
            .filter_map(|(what, why)| Some(format!("without {what} `{}`: {}", store.name, why.as_ref()?)));
        return told.collect();
    }
    let why = store.trouble.as_ref().map_or(String::new(), |trouble| format!(": {trouble}"));
    vec![format!("without `{}`{why}", store.name)]
}

fn check(name: &'static str, holds: bool, why: String) -> Check {
    Check { name, finding: if holds { Finding::Holds } else { Finding::Fails }, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: Health = Health {
        tiers: Vec::new(),
        core_silence: Duration::from_millis(10),
        is_recovered: true,
        populated_bytes: 2 << 20,
        needed_bytes: 2 << 20,
        capacity_bytes: 60 << 20,
        lacks_memory: None,
        own_files: OwnFiles { sockets: None, pool: None, disks: Vec::new() },
        is_draining: false,
    };

    fn failing(checks: Vec<Check>) -> Vec<&'static str> {
        checks.into_iter().filter(|check| check.finding == Finding::Fails).map(|check| check.name).collect()
    }

    #[test]
    fn each_trouble_fails_its_own_check_and_only_a_stuck_core_asks_for_a_restart() {
        assert_eq!(failing(WELL.ready()), [""; 0]);
        for (health, name) in [
            (Health { core_silence: Duration::from_secs(3), ..WELL }, "core"),
            (Health { is_recovered: false, ..WELL }, "index"),
            (Health { populated_bytes: 0, ..WELL }, "pool"),
            (Health { is_draining: true, ..WELL }, "drain"),
        ] {
            assert_eq!(failing(health.ready()), [name]);
            assert_eq!(failing(health.live()).is_empty(), name != "core", "{health:?}");
        }
    }

    #[test]
    fn a_pool_without_memory_for_all_of_itself_warns_and_one_without_any_fails() {
        for (populated_bytes, finding) in [(32 << 20, Finding::Impaired), (0, Finding::Fails)] {
            let lacks_memory = Some("no memory for the rest".to_owned());
            let checks = Health { populated_bytes, lacks_memory, ..WELL }.ready();
            let pool = checks.iter().find(|check| check.name == "pool").expect("there is one");
            let why = format!("{} of 60.0 MiB populated: no memory for the rest", human(populated_bytes));
            assert_eq!((pool.finding, &pool.why), (finding, &why));
        }
        // It is being populated.
        let checks = Health { populated_bytes: 32 << 20, ..WELL }.ready();
        assert!(checks.iter().all(|check| check.finding == Finding::Holds), "{checks:?}");
    }

    #[test]
    fn a_sick_tier_is_told_and_does_not_send_engines_away() {
        for (state, is_whole, finding) in [
            ("sick", false, Finding::Impaired),
            ("serving", false, Finding::Impaired),
            ("serving", true, Finding::Holds),
        ] {
            let tier = TierHealth { name: "ssd", state, why: "io".to_string(), is_whole };
            let checks = Health { tiers: vec![tier], ..WELL }.ready();
            assert_eq!(failing(checks.clone()), [""; 0]);
            let last = checks.last().expect("the tier's");
            assert_eq!((last.name, last.finding, last.why.as_str()), ("ssd", finding, &*format!("{state}: io")));
        }
    }
}
