//! The disks of this host: their entry among the tiers.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::tier::Location;
use forebay_core::{BlockKey, NamespaceId, Result};
use forebay_io::pool::Pool;
use forebay_io::ssd::{Claim, DiskConfig, DiskReport, Ssd, SsdConfig};
use forebay_io::uring::Region;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec};
use crate::config::{Config, TierSsd};

pub const SPEC: TierSpec = TierSpec {
    name: "ssd",
    is_shared: false,
    is_configured: |config| !config.tier_ssd.disks.is_empty(),
    options: |Config { tier_ssd, .. }| Options::new(tier_ssd.admission, tier_ssd.load_deadline_ms, None, None),
    claim: |config| Ok(Box::new(Some(Claim::new(&settings(&config.tier_ssd))?))),
};

/// How often a killed daemon's transfers are asked about; they take as long as a disk's slowest answer.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

impl Claimed for Option<Claim> {
    /// Waits until an earlier daemon's transfers are over, then reads what the disks hold.
    fn open(&mut self, pool: &Arc<Pool>, core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        let mut claim = self.take().expect("disks are opened once");
        let mut was_told = false;
        while !claim.is_earlier_io_done()? {
            if !std::mem::replace(&mut was_told, true) {
                tracing::info!("waiting for transfers of an earlier daemon to end");
            }
            std::thread::sleep(CLAIM_PAUSE);
        }
        core.transfers_over();
        let ssd = claim.open(Region::of_pool(pool.clone()))?;
        for disk in ssd.report() {
            let (engine, why) = (disk.engine, &disk.engine_why);
            let (disk, blocks, is_direct) = (disk.name.as_str(), disk.blocks, disk.is_direct);
            tracing::info!(disk, blocks, engine, why, is_direct, "opened a disk");
        }
        let found: Vec<(BlockKey, Location)> = ssd.blocks().map(|block| (block.key, block.location)).collect();
        core.found(&found);
        Ok(Box::new(ssd))
    }
}

impl Driven for Ssd {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Ssd::wake_fd(self)
    }

    fn register(&mut self, populated_bytes: u64) {
        Ssd::register(self, populated_bytes);
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>) {
        Ssd::take_evicted(self, keys);
    }

    fn blocks_of(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.blocks().map(|block| block.key).filter(|key| key.namespace == namespace).collect()
    }

    fn disks(&self) -> Vec<DiskReport> {
        self.report()
    }
}

fn settings(config: &TierSsd) -> SsdConfig {
    let disk = |path: &Path| DiskConfig {
        path: path.to_path_buf(),
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
    };
    SsdConfig {
        segment_bytes: config.segment_bytes.map(|bytes| bytes.0),
        engine: config.engine,
        write_bytes_per_second: config.write_bytes_per_second.map(|bytes| bytes.0),
        write_bytes_per_day: config.write_bytes_per_day.map(|bytes| bytes.0),
        ..SsdConfig::new(config.disks.iter().map(|path| disk(path)).collect())
    }
}
