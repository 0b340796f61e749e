//! The disks of this host: their entry among the tiers.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::tier::{Capabilities, Location};
use forebay_core::tiers::Admission;
use forebay_core::{BlockKey, Error, NamespaceId, Result};
use forebay_io::pool::Pool;
use forebay_io::ssd::{Claim, DiskConfig, DiskReport, Ssd, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};
use toml::Value;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec};
use crate::config::{Bytes, Demand, Setting, settings};

settings! {
    /// Files or block devices on this host that hold blocks for which the pool has no space. They outlive the daemon,
    /// the pool and restarts of the host.
    "tier.ssd": TierSsd {
        /// Files or block devices, one for each disk; an empty list switches the tier off. Blocks are spread over the
        /// disks by key. A disk belongs to one daemon.
        disks: Vec<PathBuf> = Vec::new();
        /// Bytes of each disk. Required for a file, which is preallocated to this length; a device without it is used
        /// whole.
        capacity_bytes: Option<Bytes> = None;
        /// Size of the segments in which space is reclaimed, a power of two; no block may be longer. Not set by
        /// default: about a 64th of the disk, from 1 MiB to 256 MiB.
        segment_bytes: Option<Bytes> = None;
        /// I/O engine: `auto` takes `io_uring` where the kernel allows it, and `threads` elsewhere.
        engine: EngineChoice = EngineChoice::Auto;
        /// Which blocks are written to the disks: `second_sighting` writes those that were looked up again, or stored
        /// again after the pool had evicted or refused them; `all` writes every block. The default is
        /// `second_sighting`, because most blocks are never looked up again, and writes wear a disk.
        admission: Admission = Admission::SecondSighting;
        /// Milliseconds that a request may wait for a block to be promoted before it is a miss. One second is far more
        /// than a healthy disk takes, and less than the computation of a long prefix.
        load_deadline_ms: u64 = 1000;
        /// Limit on the bytes written to each disk per second. Not limited by default.
        write_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to each disk per day, to spare its endurance. Not limited by default.
        write_bytes_per_day: Option<Bytes> = None;
    }
}

impl TierSpec for TierSsd {
    fn capabilities(&self) -> Capabilities {
        Ssd::CAPABILITIES
    }

    fn is_configured(&self) -> bool {
        !self.disks.is_empty()
    }

    fn demands(&self) -> Vec<Demand> {
        vec![
            Demand::rate("tier.ssd.write_bytes_per_second", self.write_bytes_per_second),
            Demand::rate("tier.ssd.write_bytes_per_day", self.write_bytes_per_day),
        ]
    }

    fn options(&self) -> Options {
        Options::new(self.admission, self.load_deadline_ms, None, None)
    }

    fn capacity_bytes(&self) -> Option<u64> {
        self.capacity_bytes.map(|bytes| bytes.0 * self.disks.len() as u64).filter(|all| *all > 0)
    }

    fn disks(&self) -> Option<usize> {
        Some(self.disks.len())
    }

    fn has_own_breakers(&self) -> bool {
        true
    }

    fn examine(&self) -> Vec<Result<String>> {
        self.disks.iter().map(|disk| examine(disk, self.capacity_bytes)).collect()
    }

    fn claim(&self) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(Some(Claim::new(&settings(self))?)))
    }
}

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

    fn breakers_opened(&self) -> u64 {
        self.report().iter().map(|disk| disk.breaker_opened).sum()
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
        has_breakers: true,
        write_bytes_per_second: config.write_bytes_per_second.map(|bytes| bytes.0),
        write_bytes_per_day: config.write_bytes_per_day.map(|bytes| bytes.0),
        ..SsdConfig::new(config.disks.iter().map(|path| disk(path)).collect())
    }
}

impl Setting for EngineChoice {
    const KIND: &'static str = "`\"auto\"`, `\"uring\"` or `\"threads\"`";

    fn read(value: &Value) -> Option<EngineChoice> {
        match value.as_str()? {
            "auto" => Some(EngineChoice::Auto),
            "uring" => Some(EngineChoice::Uring),
            "threads" => Some(EngineChoice::Threads),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Uring => "uring",
            EngineChoice::Threads => "threads",
        };
        Some(Value::String(text.to_string()))
    }
}

/// A disk that no daemon has opened yet.
fn examine(path: &Path, capacity_bytes: Option<Bytes>) -> Result<String> {
    let shown = path.display();
    if path.exists() {
        return Ok(format!("`{shown}` exists"));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(wanted) = capacity_bytes else {
        return Err(Error::invalid(format!("`{shown}` does not exist"))
            .hint("set `tier.ssd.capacity_bytes`, which a new file needs"));
    };
    let found = rustix::fs::statvfs(parent).map_err(|error| {
        Error::invalid(format!("cannot create `{shown}`: {error}")).hint("create its directory first")
    })?;
    let free = Bytes((found.f_bavail * found.f_frsize) >> 20 << 20);
    let finding = format!("`{shown}` will be created with {wanted} of {free} free");
    if free >= wanted {
        Ok(finding)
    } else {
        Err(Error::invalid(finding).hint("lower `tier.ssd.capacity_bytes`, or free space"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_daemon_a_disk_is_there_or_can_be_made_or_not() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        std::fs::write(&there, "").unwrap();
        for (path, capacity_bytes, is_fine) in [
            (there, None, true),
            (directory.path().join("new"), Some(4096), true),
            (directory.path().join("new"), None, false),
            (directory.path().join("new"), Some(1 << 60), false),
            (directory.path().join("no/such"), Some(4096), false),
        ] {
            let disks = vec![path.clone()];
            let tier = TierSsd { disks, capacity_bytes: capacity_bytes.map(Bytes), ..TierSsd::default() };
            let found = tier.examine();
            assert_eq!((found.len(), found[0].is_ok()), (1, is_fine), "{path:?}: {found:?}");
            assert!(found[0].as_ref().err().is_none_or(|error| error.hint_text().is_some()), "{path:?}: {found:?}");
        }
    }
}
