//! From configuration to open tiers, without delaying the daemon.
//!
//! Claiming comes first and may prevent the start: a disk in use, or one that holds something else, is the operator's
//! mistake. A disk that is missing prevents nothing. Opening runs while the daemon serves, on a thread for each tier;
//! if it fails, only that tier's blocks are misses.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::tiers::{TierHasher, TierId};
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::pool::{Pool, Room};
use forebay_io::ssd::DiskReport;
use tokio::sync::oneshot;

use super::drive_tiers;
use crate::config::Config;
use crate::state::{Shared, State};
use crate::tiers::spec::{Claimed, Driven, Found, OpeningEvents, TierSpec};
use crate::tiers::{Disks, Failure};
use crate::vital;

/// How often a shared store that cannot be opened is tried again.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// Blocks that the core is told of in one event, for which the deciding thread may have to wait: some 70 us.
const BLOCKS_PER_EVENT: usize = 128;

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

/// The configured tiers. An error says what the operator must change. A thread of its own looks at them, since that may
/// take seconds, and a signal must end the daemon meanwhile.
pub async fn claim(config: Config) -> Result<(Config, Openings)> {
    let (done, claimed) = oneshot::channel();
    let run = move || {
        let openings = claim_all(&config);
        // Nobody waits any more after a signal.
        let _ = done.send(openings.map(|openings| (config, openings)));
    };
    std::thread::Builder::new().name("claim".into()).spawn(run).expect("the system starts a thread");
    claimed.await.expect("the thread sends, or ends the process")
}

fn claim_all(config: &Config) -> Result<Openings> {
    config.check()?;
    let sealing = config.sealing()?;
    let claim = |(spec, number): (&dyn TierSpec, u8)| {
        let (name, is_shared) = (spec.name(), spec.capabilities().is_shared);
        Ok(Opening { tier: TierId(number), name, is_shared, since: Instant::now(), claimed: spec.claim(&sealing)? })
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
                    driver.failed(Failure { why: error.to_string(), is_tried_again: false });
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
        reckon(&tier.disks(), shared);
        shared.event(|state| {
            if !can_store {
                tracing::warn!(tier = name, "cannot write to the tier; it is used read-only");
                state.core.set_read_only(self.tier);
            }
            let seed = state.boot_id;
            state.tiers.of(self.tier).attach(tier, seed);
            // Whoever is told that it serves is served: the core hears how it is before anybody asks.
            let State { tiers, core, table, .. } = state;
            tiers.drive(self.tier, core, table.pool());
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
                        driver.failed(Failure { why: error.to_string(), is_tried_again: true });
                    });
                    std::thread::sleep(STORE_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }
}

/// The log says if the disks' blocks will have no room in memory.
fn reckon(disks: &[DiskReport], shared: &Shared) {
    let missing_bytes = |state: &State| state.core.capacity_bytes().saturating_sub(state.core.populated_bytes());
    let pool_bytes = missing_bytes(&shared.lock());
    // Where memory cannot be read, the pool has said so.
    let Ok(room) = Room::read(Path::new("/")) else { return };
    if let Err(error) = Disks::of(disks).when_full().check(&room, pool_bytes) {
        let hint = error.hint_text().unwrap_or_default();
        tracing::warn!(%error, hint, "the disks may outgrow this host's memory");
    }
}

/// Brings what an opening tier reports to the core.
struct Reports<'a> {
    shared: &'a Shared,
    tier: TierId,
}

impl OpeningEvents for Reports<'_> {
    fn hasher(&self) -> TierHasher {
        self.shared.lock().core.tier_hasher()
    }

    fn found(&self, Found { blocks, namespaces }: Found) {
        let pieces =
            blocks.chunks(BLOCKS_PER_EVENT).map(|piece| Found { blocks: piece.to_vec(), namespaces: Vec::new() });
        for piece in std::iter::once(Found { blocks: Vec::new(), namespaces }).chain(pieces) {
            self.shared.event(|state| state.tiers.of(self.tier).found(piece, &mut state.core));
        }
    }
}
