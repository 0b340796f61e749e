//! From configuration to open tiers, without delaying the daemon.
//!
//! Claiming comes first and may prevent the start: a wrong path or a disk in use is the operator's mistake. Opening
//! runs while the daemon serves, on a thread for each tier; if it fails, only that tier's blocks are misses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::tier::Location;
use forebay_core::tiers::TierId;
use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::pool::Pool;
use tokio::sync::oneshot;

use super::drive_tiers;
use crate::config::Config;
use crate::state::{Shared, State};
use crate::tiers::spec::{Claimed, Driven, OpeningEvents, TierSpec};
use crate::vital;

/// How often the log says that the disks have not answered yet.
const SLOW_CLAIM: Duration = Duration::from_secs(5);
/// How often a shared store that cannot be opened is tried again.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// Blocks that the core is told of in one event: a table insert each.
const BLOCKS_PER_EVENT: usize = 1024;

/// Tiers that are claimed and do not serve yet.
pub type Openings = Vec<Opening>;

/// One of them.
pub struct Opening {
    tier: TierId,
    name: &'static str,
    is_shared: bool,
    since: Instant,
    claimed: Box<dyn Claimed>,
}

/// The configured tiers. An error says what the operator must change. A disk that fails by itself is an error too,
/// because its absence would go unnoticed later. A thread of its own looks at the disks, one of which may hang for ever.
pub async fn claim(config: Config) -> Result<(Config, Openings)> {
    let (done, mut claimed) = oneshot::channel();
    let run = move || {
        let openings = claim_all(&config);
        // Nobody waits any more after a signal.
        let _ = done.send(openings.map(|openings| (config, openings)));
    };
    std::thread::Builder::new().name("claim".into()).spawn(run).expect("the system starts a thread");
    loop {
        match tokio::time::timeout(SLOW_CLAIM, &mut claimed).await {
            Ok(claimed) => return claimed.expect("the thread sends, or ends the process"),
            Err(_) => tracing::warn!(
                hint = "look for errors of the disks in the kernel's log; `tier.ssd.disks` names them",
                "the disks have not answered yet, and the daemon waits for them"
            ),
        }
    }
}

fn claim_all(config: &Config) -> Result<Openings> {
    let claim = |(spec, number): (&dyn TierSpec, u8)| {
        let (name, is_shared) = (spec.name(), spec.capabilities().is_shared);
        Ok(Opening { tier: TierId(number), name, is_shared, since: Instant::now(), claimed: spec.claim()? })
    };
    config.configured_tiers().zip(0..).map(claim).collect()
}

impl Opening {
    /// Goes on until the tier serves, on a thread that then ends.
    pub(super) fn spawn(self, shared: &Shared) {
        let shared = shared.clone();
        // The wake-up is waited for in the runtime that calls this.
        let runtime = tokio::runtime::Handle::current();
        let tier = self.tier;
        let mut opening = self;
        let run = move || {
            if let Err(error) = opening.open(&shared, &runtime) {
                let hint = error.hint_text().unwrap_or("check the tier, and restart the daemon").to_owned();
                shared.event(|state| {
                    let driver = state.tiers.of(tier);
                    tracing::error!(tier = driver.name, %error, hint, "cannot open a tier; serving without it");
                    driver.failed(error.to_string());
                });
            }
        };
        std::thread::Builder::new().name("tier-open".into()).spawn(run).expect("the system starts a thread");
    }

    fn open(&mut self, shared: &Shared, runtime: &tokio::runtime::Handle) -> Result<()> {
        let pool: Arc<Pool> = shared.lock().table.pool().clone();
        let tier = self.open_tier(shared, &pool)?;
        let no_wake = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot wait for a tier").source(error);
        let wake = tier.wake_fd().try_clone_to_owned().map_err(no_wake)?;
        let (name, can_store) = (self.name, tier.capabilities().can_store);
        shared.event(|state| {
            if !can_store {
                tracing::warn!(tier = name, "cannot write to the tier; it is used read-only");
                state.core.set_read_only(self.tier);
            }
            let seed = state.boot_id;
            state.tiers.of(self.tier).attach(tier, seed);
            // Whoever is told that it serves is served: the core hears how it is before anybody asks.
            let State { tiers, core, table, .. } = state;
            tiers.drive(self.tier, core, table);
        });
        tracing::info!(tier = name, ms = self.since.elapsed().as_millis() as u64, "the tier is open");
        let _runtime = runtime.enter();
        vital::task(drive_tiers::run(shared.clone(), self.tier, wake));
        Ok(())
    }

    /// A mount or a bucket may come later than the daemon: it is waited for, beside serving.
    fn open_tier(&mut self, shared: &Shared, pool: &Arc<Pool>) -> Result<Box<dyn Driven>> {
        let core = Reports { shared, tier: self.tier };
        loop {
            match self.claimed.open(pool, &core) {
                Err(error) if self.is_shared && error.kind() != ErrorKind::Invalid => {
                    let (tier, hint) = (self.name, error.hint_text().unwrap_or("check the shared store").to_owned());
                    shared.event(|state| {
                        let driver = state.tiers.of(self.tier);
                        if driver.failure.is_none() {
                            tracing::warn!(tier, %error, hint, "cannot open a shared store yet; serving without it");
                        }
                        driver.failed(error.to_string());
                    });
                    std::thread::sleep(STORE_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }
}

/// Brings what an opening tier reports to the core.
struct Reports<'a> {
    shared: &'a Shared,
    tier: TierId,
}

impl OpeningEvents for Reports<'_> {
    fn transfers_over(&self) {
        self.shared.event(|state| state.core.transfers_over());
    }

    fn found(&self, blocks: &[(BlockKey, Location)]) {
        for piece in blocks.chunks(BLOCKS_PER_EVENT) {
            self.shared.event(|state| piece.iter().for_each(|(key, at)| state.core.tier_found(self.tier, key, *at)));
        }
    }
}
