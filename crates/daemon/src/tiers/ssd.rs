//! The entry of this host's disks in `ALL`, the list of tiers. How each disk comes into the tier is in `arrival`.

mod arrival;
mod novelty;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_core::size::{human, human_at_most};
use forebay_core::tier::Capabilities;
use forebay_core::tiers::{Admission, TierHasher};
use forebay_core::{BlockKey, Fingerprint, NamespaceId, Result};
use forebay_io::Demand;
use forebay_io::header::Sealing;
use forebay_io::pool::{EndedPurge, Pool};
use forebay_io::ssd::{self, DiskConfig, DiskReport, Look, PoolPurges, Prospect, Ssd, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};
use toml::Value;

use super::spec::{Claimed, Driven, Found, OpeningEvents, Options, TierSpec, Walked};
use crate::config::{Bytes, Setting, rate, settings};
use arrival::Arrival;
use novelty::{Novelty, missing_beside_others};

pub use arrival::CLAIM_COMMAND;

settings! {
    /// Files or block devices on this host that hold blocks for which the pool has no space. They outlive the daemon,
    /// the pool and restarts of the host.
    "tier.ssd": TierSsd {
        /// Files or block devices, one for each disk; an empty list switches the tier off. Blocks are spread over the
        /// disks in runs of neighbours. A disk belongs to one daemon.
        disks: Vec<PathBuf> = Vec::new();
        /// Bytes of each disk. Required for a file, which is preallocated to this length; a device without it is used
        /// whole. At least 1 MiB plus eight times `tier.ssd.segment_bytes`; 9 MiB if that is not set.
        capacity_bytes: Option<Bytes> = None;
        /// Whether a missing file is created in any case. By default it is created only at the first start, when all
        /// disks are missing, and neither on the root filesystem nor below a mount point of `/etc/fstab` without its
        /// mount. Otherwise the disk is probably not mounted: a new file would hide its blocks from purges, and could
        /// fill the wrong filesystem.
        create: bool = false;
        /// Size of the segments in which space is reclaimed, a power of two; no block may be longer. From 64 KiB to
        /// 1 GiB. Not set by default: about a 64th of the disk, from 1 MiB to 256 MiB. A disk that is there keeps its
        /// own.
        segment_bytes: Option<Bytes> = None;
        /// I/O engine: `auto` takes `io_uring` where the kernel allows it, and `threads` elsewhere.
        engine: EngineChoice = EngineChoice::Auto;
        /// Which blocks are written to the disks: `second_sighting` writes those that were looked up again, or stored
        /// again after the pool had evicted or refused them; `all` writes every block. The default is
        /// `second_sighting`, because most blocks are never looked up again, and writes wear a disk.
        admission: Admission = Admission::SecondSighting;
        /// Milliseconds that a request may wait for a block to be promoted before it is a miss. One second is far more
        /// than a healthy disk takes, and less than the computation of a long prefix. A wait for room in the pool does
        /// not count: it ends after half a second in which no block comes.
        load_deadline_ms: u64 = 1000;
        /// Limit on the bytes written to each disk per second. Not limited by default.
        write_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to each disk per day, to spare its endurance. Not limited by default.
        write_bytes_per_day: Option<Bytes> = None;
        /// Whether a block device is told of each segment that is emptied for new blocks, in pieces of 16 MiB, before
        /// it is written again. The device then knows that it need not keep the old bytes. Nothing waits for it. Files
        /// are not trimmed, because they would lose the space that is reserved for them.
        trim: bool = false;
    }
}

impl TierSpec for TierSsd {
    fn capabilities(&self) -> Capabilities {
        Ssd::CAPABILITIES
    }

    fn is_configured(&self) -> bool {
        !self.disks.is_empty()
    }

    fn switch(&self) -> &'static str {
        "tier.ssd.disks"
    }

    fn demands(&self) -> Vec<Demand> {
        let segment_bytes = self.segment_bytes.map(|bytes| bytes.0);
        let least_bytes = SsdConfig::least_disk_bytes(segment_bytes);
        vec![
            Demand::new(
                "tier.ssd.segment_bytes",
                segment_bytes.is_none_or(SsdConfig::is_segment),
                "be a power of two from 64 KiB to 1 GiB, or not set",
            ),
            Demand::new(
                "tier.ssd.capacity_bytes",
                self.capacity_bytes.is_none_or(|bytes| bytes.0 >= least_bytes),
                "be at least 1 MiB plus eight times `tier.ssd.segment_bytes`; 9 MiB if that is not set",
            ),
            Demand::new(
                "tier.ssd.disks",
                (1..self.disks.len()).all(|place| !self.disks[..place].contains(&self.disks[place])),
                "name each disk once: one of them stands there twice",
            ),
            rate("tier.ssd.write_bytes_per_second", self.write_bytes_per_second),
            rate("tier.ssd.write_bytes_per_day", self.write_bytes_per_day),
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
        let disks = settings(self).disks;
        let twins = forebay_io::ssd::check_twins(&disks).err();
        let looks: Vec<Look> = disks.iter().map(forebay_io::ssd::examine).collect();
        let are_others_there = looks.iter().any(|look| look.is_there);
        let found = disks.iter().zip(looks).flat_map(|(disk, look)| judged(disk, look, are_others_there));
        twins.map(Err).into_iter().chain(found).collect()
    }

    fn claim(&self, _: &Sealing) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(Arrivals::start(settings(self))?))
    }
}

/// How long a start waits to hear of the disks, for one that hangs too.
const FIRST_LOOK: Duration = Duration::from_secs(6);
/// How long disks that are there wait for those that are still being read.
const OTHERS: Duration = Duration::from_secs(5);
/// After an answer the next may take as long again, and at least this. Healthy disks are asked at the same time and
/// take milliseconds. A busy host delays one of them by a second, and a mistake that it shows would go unnoticed.
const GRACE: Duration = Duration::from_secs(2);

/// The tier while its disks come.
struct Arrivals {
    ssd: Option<Ssd>,
    /// Where the pool goes, and what gives blocks their fingerprints.
    pools: Vec<Sender<(Region, TierHasher)>>,
    /// Disks that the first look heard nothing of. Nobody waits for them a second time.
    silent: usize,
}

impl Arrivals {
    /// Looks at all disks at once. An error is a mistake of the operator.
    fn start(config: SsdConfig) -> Result<Arrivals> {
        let ssd = Ssd::awaiting(config.disks.iter().map(|disk| disk.path.display().to_string()).collect())?;
        let (first_look, looks) = mpsc::channel();
        let novelty = Arc::new(Novelty::of(config.disks.len()));
        let mut pools = Vec::new();
        let identities = Arc::new(Mutex::new(vec![None; config.disks.len()]));
        for place in 0..config.disks.len() {
            let (sender, receiver) = mpsc::channel();
            pools.push(sender);
            let (config, novelty, identities) = (config.clone(), novelty.clone(), identities.clone());
            let (inbox, first_look, pools) = (ssd.inbox(), Some(first_look.clone()), receiver);
            let said = String::new();
            Arrival { place, config, novelty, inbox, first_look, pools, pool: None, said, identities }.spawn();
        }
        drop(first_look);
        let silent = pools.len() - judge(&looks)?;
        Ok(Arrivals { ssd: Some(ssd), pools, silent })
    }
}

/// Nobody changes what the pool knows before the tier is open.
fn known_purges(pool: &Pool) -> Result<PoolPurges> {
    let records = pool.ended_purges()?.into_iter();
    let times = records.map(|(_, EndedPurge { namespace, time })| (namespace, time)).collect();
    Ok(PoolPurges::new(times, pool.has_met_disks()?))
}

/// Waits for the first look at each disk, or until those that are left take far longer than the others. The number of
/// disks that were looked at.
fn judge(looks: &Receiver<Result<()>>) -> Result<usize> {
    let mut patience = Patience::new(FIRST_LOOK);
    let mut heard = 0;
    while let Ok(look) = looks.recv_timeout(patience.left()) {
        look?;
        heard += 1;
        patience.answered();
    }
    Ok(heard)
}

/// How long to wait for disks that are asked at the same time, each of which may hang.
struct Patience {
    begun: Instant,
    until: Instant,
    limit: Instant,
}

impl Patience {
    fn new(limit: Duration) -> Patience {
        let begun = Instant::now();
        Patience { begun, until: begun + limit, limit: begun + limit }
    }

    /// One of them.
    fn answered(&mut self) {
        let taken = self.begun.elapsed();
        self.until = self.limit.min(self.begun + taken + taken.max(GRACE));
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

impl Claimed for Arrivals {
    /// Waits until each disk was read or is known to be missing. Once one was read, the others have a limit.
    fn open(&mut self, pool: &Arc<Pool>, core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        let mut ssd = self.ssd.take().expect("disks are opened once");
        ssd.know_purges(known_purges(pool)?);
        // A disk whose thread has ended needs no pool.
        let given = || (Region::of_pool(pool.clone()), core.hasher());
        self.pools.iter().for_each(|waiting| drop(waiting.send(given())));
        let (mut patience, mut missing) = (Patience::new(OTHERS), self.pools.len());
        loop {
            if ssd.missing() < missing {
                missing = ssd.missing();
                patience.answered();
            }
            let is_there = missing < self.pools.len();
            if ssd.awaited() == 0 || is_there && (ssd.awaited() <= self.silent || patience.left().is_zero()) {
                break;
            }
            ssd.receive(Duration::from_millis(100));
        }
        loop {
            let mut found = Found::default();
            let is_more = ssd.take_found(&mut found.blocks, &mut found.namespaces);
            core.found(found);
            if !is_more {
                return Ok(Box::new(ssd));
            }
        }
    }
}

impl Driven for Ssd {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Ssd::wake_fd(self)
    }

    fn register(&mut self, populated_bytes: u64) {
        Ssd::register(self, populated_bytes);
    }

    fn are_earlier_transfers_over(&self) -> bool {
        self.is_earlier_io_done()
    }

    fn take_found(&mut self, found: &mut Found) {
        Ssd::take_found(self, &mut found.blocks, &mut found.namespaces);
    }

    fn has_more_found(&self) -> bool {
        Ssd::has_more_found(self)
    }

    fn missing_parts(&self) -> usize {
        self.missing()
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>, lost: &mut Vec<Fingerprint>) {
        Ssd::take_evicted(self, keys, lost);
    }

    fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>, is_new: bool) -> Walked {
        match Ssd::walk(self, is_new, namespaces) {
            ssd::Walked::Blocks(blocks) => Walked::Keys(blocks.iter().map(|block| block.key).collect()),
            ssd::Walked::Waits => Walked::Waits,
            ssd::Walked::End => Walked::End,
        }
    }

    fn note_purged(&mut self, namespaces: &BTreeSet<NamespaceId>) {
        Ssd::note_purged(self, namespaces);
    }

    fn noted(&mut self) -> Option<bool> {
        Ssd::noted(self)
    }

    fn take_void(&mut self) -> BTreeSet<NamespaceId> {
        Ssd::take_void(self)
    }

    fn take_heard(&mut self) -> Option<BTreeMap<NamespaceId, u64>> {
        Ssd::take_heard(self)
    }

    fn purge_time(&self, namespace: NamespaceId) -> Option<u64> {
        Ssd::purge_time(self, namespace)
    }

    fn walked_ratio(&self) -> f64 {
        Ssd::walked_ratio(self)
    }

    fn disks(&self) -> Vec<DiskReport> {
        self.report()
    }

    fn breakers_opened(&self) -> u64 {
        Ssd::breakers_opened(self)
    }
}

fn settings(config: &TierSsd) -> SsdConfig {
    let disk = |path: &Path| DiskConfig {
        path: path.to_path_buf(),
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
        create: config.create,
    };
    SsdConfig {
        segment_bytes: config.segment_bytes.map(|bytes| bytes.0),
        engine: config.engine,
        has_breakers: true,
        write_bytes_per_second: config.write_bytes_per_second.map(|bytes| bytes.0),
        write_bytes_per_day: config.write_bytes_per_day.map(|bytes| bytes.0),
        trim: config.trim,
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
fn judged(disk: &DiskConfig, look: Look, are_others_there: bool) -> Vec<Result<String>> {
    let shown = disk.path.display();
    match look.prospect {
        Ok(Prospect::Take { cut_bytes: Some(bytes), .. }) => {
            let bytes = human(bytes);
            vec![Ok(format!("`{shown}` was cut to {bytes}: it can be used, but the blocks that were behind are lost"))]
        }
        Ok(Prospect::Take { made_bytes: None, cut_bytes: None }) => vec![Ok(format!("`{shown}` can be used"))],
        Ok(Prospect::Take { made_bytes: Some(bytes), cut_bytes: None }) => {
            let bytes = human(bytes);
            vec![Ok(format!("`{shown}` can be used, with the {bytes} that it was formatted with, until it is emptied"))]
        }
        Ok(Prospect::Make { .. }) if are_others_there && !disk.create => vec![Err(missing_beside_others(&disk.path))],
        Ok(Prospect::Make { free_bytes }) => {
            let (wanted, free) = (human(disk.capacity_bytes.unwrap_or(0)), human_at_most(free_bytes));
            vec![Ok(format!("`{shown}` will be created with {wanted} of {free} free"))]
        }
        Err(refusals) => refusals.into_iter().map(Err).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn without_a_daemon_a_disk_is_there_or_can_be_made_or_not() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        std::fs::write(&there, "").unwrap();
        let is_on_root = directory.path().metadata().unwrap().dev() == Path::new("/").metadata().unwrap().dev();
        for (path, capacity_bytes, create, is_fine) in [
            (there.clone(), Some(4096), false, true),
            (there, None, false, false),
            (directory.path().join("new"), Some(4096), true, true),
            (directory.path().join("new"), Some(4096), false, !is_on_root),
            (directory.path().join("new"), None, true, false),
            (directory.path().join("new"), Some(1 << 60), true, false),
            (directory.path().join("no/such"), Some(4096), true, false),
        ] {
            let disks = vec![path.clone()];
            let tier = TierSsd { disks, capacity_bytes: capacity_bytes.map(Bytes), create, ..TierSsd::default() };
            let found = tier.examine();
            assert_eq!((found.len(), found[0].is_ok()), (1, is_fine), "{path:?}: {found:?}");
            assert!(found[0].as_ref().err().is_none_or(|error| error.hint_text().is_some()), "{path:?}: {found:?}");
        }
    }
}
