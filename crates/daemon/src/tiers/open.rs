//! From configuration to open tiers, without holding up the daemon.
//!
//! Claiming comes first and may refuse the start: a wrong path or a disk in use is the operator's mistake. The rest goes
//! on beside serving, on a thread for each tier, and a tier that fails then costs its blocks alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::below::TierId;
use forebay_core::tier::Location;
use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::arena::Pool;
use forebay_io::fs::{Fs, FsConfig};
#[cfg(feature = "object")]
use forebay_io::object::{Object, ObjectConfig};
use forebay_io::redis::{Redis, RedisConfig};
use forebay_io::ssd::{Claim, Ssd};
use forebay_io::uring::Region;

use super::kind::{Driven, Kind};
use super::settings;
use crate::config::Config;
use crate::state::Shared;
use crate::vital;

/// How often a killed daemon's transfers are asked about; they take as long as a disk's slowest answer.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);
/// How often a store that cannot be opened is tried again.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// Blocks told to the core in one event: a table insert each.
const BLOCKS_PER_EVENT: usize = 1024;

/// Tiers that are claimed and do not serve yet.
pub type Openings = Vec<Opening>;

/// One of them.
pub struct Opening {
    tier: TierId,
    since: Instant,
    what: Claimed,
}

enum Claimed {
    Ssd(Claim),
    Fs(FsConfig),
    Redis(Box<RedisConfig>),
    #[cfg(feature = "object")]
    Object(ObjectConfig),
}

/// The tiers that are configured. Errors with what the operator has to change; a disk that fails on its own is an error
/// too, since nobody would notice its absence later.
pub fn claim(config: &Config) -> Result<Openings> {
    let kinds = Kind::configured(config).into_iter().zip(0..);
    let claim = |(kind, number)| {
        let what = match kind {
            Kind::Ssd => Claimed::Ssd(Claim::new(&settings::ssd(&config.tier_ssd))?),
            Kind::Fs => {
                let config = settings::fs(&config.tier_fs);
                config.check()?;
                Claimed::Fs(config)
            }
            Kind::Redis => {
                let config = settings::redis(&config.tier_redis);
                config.check()?;
                Claimed::Redis(Box::new(config))
            }
            #[cfg(feature = "object")]
            Kind::Object => {
                let config = settings::object(&config.tier_object);
                config.check()?;
                Claimed::Object(config)
            }
            #[cfg(not(feature = "object"))]
            Kind::Object => return Err(Error::new(ErrorKind::Unsupported, "this build has no object tier")),
        };
        Ok(Opening { tier: TierId(number), since: Instant::now(), what })
    };
    kinds.map(claim).collect()
}

impl Opening {
    /// Goes on until the tier serves, on a thread that then ends.
    pub(super) fn spawn(self, shared: &Shared) {
        let shared = shared.clone();
        // The wake-up is waited for in the runtime that calls this.
        let runtime = tokio::runtime::Handle::current();
        let tier = self.tier;
        let run = move || {
            if let Err(error) = self.open(&shared, &runtime) {
                let hint = error.hint_text().unwrap_or("look at the tier, and restart the daemon").to_owned();
                shared.event(|state| {
                    let driver = state.tiers.of(tier);
                    tracing::error!(tier = driver.kind.name(), %error, hint, "a tier cannot be opened; serving without it");
                    driver.failed(error.to_string());
                });
            }
        };
        std::thread::Builder::new().name("tier-open".into()).spawn(run).expect("the system starts a thread");
    }

    fn open(self, shared: &Shared, runtime: &tokio::runtime::Handle) -> Result<()> {
        let pool: Arc<Pool> = shared.lock().pool.clone();
        let tier: Box<dyn Driven> = match self.what {
            Claimed::Ssd(claim) => Box::new(open_ssd(claim, self.tier, shared, pool)?),
            Claimed::Fs(config) => {
                let pool = Region::of_pool(pool);
                Box::new(wait_for(self.tier, shared, || Fs::open(&config, pool.clone()))?)
            }
            #[cfg(feature = "object")]
            Claimed::Object(config) => {
                let pool = Region::of_pool(pool);
                Box::new(wait_for(self.tier, shared, || Object::open(&config, pool.clone()))?)
            }
            Claimed::Redis(config) => Box::new(Redis::open(&config, Region::of_pool(pool))?),
        };
        let no_wake = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot wait for a tier").source(error);
        let wake = tier.wake_fd().try_clone_to_owned().map_err(no_wake)?;
        let (name, can_store) = (tier.name(), tier.capabilities().can_store);
        shared.event(|state| {
            if !can_store {
                tracing::warn!(tier = name, "the tier cannot be written to; it is only read from");
                state.core.set_read_only(self.tier);
            }
            let seed = state.boot_id;
            state.tiers.of(self.tier).attach(tier, seed);
            // Whoever is told that it serves is served: the core hears how it is before anybody asks.
            state.drive_tier(self.tier);
        });
        tracing::info!(tier = name, ms = self.since.elapsed().as_millis() as u64, "the tier is open");
        let _runtime = runtime.enter();
        vital::task(super::run::run(shared.clone(), self.tier, wake));
        Ok(())
    }
}

/// Waits until an earlier daemon's transfers are over, then reads what the disks hold.
fn open_ssd(mut claim: Claim, tier: TierId, shared: &Shared, pool: Arc<Pool>) -> Result<Ssd> {
    let mut was_told = false;
    while !claim.is_earlier_io_done()? {
        if !std::mem::replace(&mut was_told, true) {
            tracing::info!("an earlier daemon's transfers are not over yet");
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    // Nothing lands any more in the slots that it was filling.
    shared.event(|state| state.core.transfers_over());
    let ssd = claim.open(Region::of_pool(pool))?;
    let found: Vec<(BlockKey, Location)> = ssd.blocks().map(|block| (block.key, block.location)).collect();
    for disk in ssd.report() {
        let (engine, why) = (disk.engine, &disk.engine_why);
        let (disk, blocks, is_direct) = (disk.name.as_str(), disk.blocks, disk.is_direct);
        tracing::info!(disk, blocks, engine, why, is_direct, "opened a disk");
    }
    for piece in found.chunks(BLOCKS_PER_EVENT) {
        shared.event(|state| piece.iter().for_each(|(key, at)| state.core.found_below(tier, key, *at)));
    }
    Ok(ssd)
}

/// A mount or a bucket may come later than the daemon: it is waited for, beside serving.
fn wait_for<T>(tier: TierId, shared: &Shared, open: impl Fn() -> Result<T>) -> Result<T> {
    loop {
        match open() {
            Err(error) if error.kind() != ErrorKind::Invalid => {
                let hint = error.hint_text().unwrap_or("look at the store").to_owned();
                shared.event(|state| {
                    let driver = state.tiers.of(tier);
                    if driver.failure.is_none() {
                        let tier = driver.kind.name();
                        tracing::warn!(tier, %error, hint, "a store cannot be opened yet; serving without it");
                    }
                    driver.failed(error.to_string());
                });
                std::thread::sleep(STORE_PAUSE);
            }
            outcome => return outcome,
        }
    }
}
