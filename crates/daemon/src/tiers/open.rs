//! From configuration to an open tier, without holding up the daemon.
//!
//! Claiming comes first and may refuse the start: a wrong path or a disk in use is the operator's mistake. Reading
//! the disk goes on beside serving, on a thread of its own, and a disk that fails then costs its blocks alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::below::{Limits, TRANSFERS};
use forebay_core::tier::Location;
use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::arena::Pool;
use forebay_io::ssd::{Claim, DiskConfig, Ssd, SsdConfig};
use forebay_io::uring::Region;

use super::Driver;
use crate::config::{Config, TierSsd};
use crate::state::Shared;

/// How often a killed daemon's transfers are asked about; they take as long as a disk's slowest answer.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);
/// Blocks told to the core in one event: a table insert each.
const BLOCKS_PER_EVENT: usize = 1024;

/// A claimed tier that is not read yet.
pub struct Opening {
    claim: Claim,
    since: Instant,
}

/// The tier that is configured, if one is. Errors with what the operator has to change; a disk that fails on its own
/// is an error too, since nobody would notice its absence later.
pub fn claim(config: &Config) -> Result<Option<Opening>> {
    let ssd = &config.tier_ssd;
    if ssd.disks.is_empty() {
        return Ok(None);
    }
    Ok(Some(Opening { claim: Claim::new(&ssd_config(ssd))?, since: Instant::now() }))
}

impl Opening {
    /// Goes on until the tier serves, on a thread that then ends.
    pub fn spawn(self, shared: &Shared) {
        let shared = shared.clone();
        // The wake-up is waited for in the runtime that calls this.
        let runtime = tokio::runtime::Handle::current();
        let run = move || {
            if let Err(error) = self.open(&shared, &runtime) {
                let hint = error.hint_text().unwrap_or("look at the disk, and restart the daemon").to_owned();
                tracing::error!(%error, hint, "the SSD tier cannot be opened; serving without it");
                shared.event(|state| state.tiers.failed(error.to_string()));
            }
        };
        std::thread::Builder::new().name("tier-open".into()).spawn(run).expect("the system starts a thread");
    }

    fn open(mut self, shared: &Shared, runtime: &tokio::runtime::Handle) -> Result<()> {
        let mut was_told = false;
        while !self.claim.is_earlier_io_done()? {
            if !std::mem::replace(&mut was_told, true) {
                tracing::info!("an earlier daemon's transfers are not over yet");
            }
            std::thread::sleep(CLAIM_PAUSE);
        }
        // Nothing lands any more in the slots that it was filling.
        shared.event(|state| state.core.instance_gone(TRANSFERS));
        let pool: Arc<Pool> = shared.lock().pool.clone();
        let ssd = self.claim.open(Region::of_pool(pool))?;
        let found: Vec<(BlockKey, Location)> = ssd.blocks().map(|block| (block.key, block.location)).collect();
        for disk in ssd.report() {
            let (engine, why) = (disk.engine, &disk.engine_why);
            let (disk, blocks, is_direct) = (disk.name.as_str(), disk.blocks, disk.is_direct);
            tracing::info!(disk, blocks, engine, why, is_direct, "opened a disk");
        }
        for piece in found.chunks(BLOCKS_PER_EVENT) {
            shared.event(|state| {
                let tier = state.tiers.id();
                piece.iter().for_each(|(key, at)| state.core.found_below(tier, key, *at));
            });
        }
        let ms = self.since.elapsed().as_millis() as u64;
        tracing::info!(blocks = found.len(), ms, "the SSD tier serves");
        start_driving(shared, runtime, ssd)
    }
}

impl Driver {
    /// What the core may do with the configured tier.
    pub(super) fn limits(config: &TierSsd) -> Limits {
        Limits { admission: config.admission, ..Limits::default() }
    }
}

fn start_driving(shared: &Shared, runtime: &tokio::runtime::Handle, ssd: Ssd) -> Result<()> {
    let no_wake = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot wait for the disks").source(error);
    let wake = ssd.wake_fd().try_clone_to_owned().map_err(no_wake)?;
    shared.event(|state| {
        let deadline = Duration::from_millis(state.config.tier_ssd.load_deadline_ms);
        state.tiers.attach(ssd, deadline);
    });
    runtime.spawn(super::run::run(shared.clone(), wake));
    Ok(())
}

fn ssd_config(config: &TierSsd) -> SsdConfig {
    let disk = |path: &std::path::PathBuf| DiskConfig {
        path: path.clone(),
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
    };
    SsdConfig {
        segment_bytes: config.segment_bytes.map(|bytes| bytes.0),
        engine: config.engine,
        write_bytes_per_second: config.write_bytes_per_second.map(|bytes| bytes.0),
        write_bytes_per_day: config.write_bytes_per_day.map(|bytes| bytes.0),
        ..SsdConfig::new(config.disks.iter().map(disk).collect())
    }
}
