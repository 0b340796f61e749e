//! The entry of this host's disks in `ALL`, the list of tiers. How each disk comes into the tier is in `arrival`.

mod arrival;

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use forebay_core::tier::{Capabilities, Location};
use forebay_core::tiers::Admission;
use forebay_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::ssd::{Create, DiskConfig, DiskReport, Known, Prospect, Ssd, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};
use toml::Value;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec};
use crate::config::{Bytes, Demand, Setting, settings};
use arrival::{Arrival, Look};

pub use arrival::CLAIM_COMMAND;

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
        /// Whether a missing file is created: `true` always, `false` never. Not set by default: then only a new disk's
        /// file is created, and not on the root filesystem, where a mount is probably missing. A disk is new if the
        /// pool's earlier daemons did not have it. If the pool knows of no disks, as after a restart of the host, all
        /// of them are new, unless another of them holds blocks. A host with a single disk should set `false` after
        /// its first start.
        create: Option<bool> = None;
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

    fn examine(&self, known: &Known) -> Vec<Result<String>> {
        let mut config = settings(self, known);
        let look = |config: &SsdConfig| config.disks.iter().map(forebay_io::ssd::examine).collect::<Vec<_>>();
        let mut looks = look(&config);
        let is_past = |look: &Result<Prospect, Vec<Error>>| match look {
            Ok(prospect) => *prospect == Prospect::Take { is_blank: false },
            Err(errors) => errors.iter().any(tells_of_past),
        };
        if asks_others(self, known) && !looks.iter().any(is_past) {
            config.disks.iter_mut().for_each(|disk| disk.create = Create::OffRoot);
            looks = look(&config);
        }
        config.disks.iter().zip(looks).flat_map(|(disk, look)| told(disk, look)).collect()
    }

    fn claim(&self, _: &Sealing, known: &Arc<Known>) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(Arrivals::start(settings(self, known), known, asks_others(self, known))?))
    }
}

/// How long a start waits to hear of the disks, for one that hangs too.
const FIRST_LOOK: Duration = Duration::from_secs(6);
/// How long disks that are there wait for those that are still being read.
const OTHERS: Duration = Duration::from_secs(5);
/// After an answer the next may take as long again, and at least this. Healthy disks are asked at the same time and
/// take milliseconds. A busy host delays one of them by a second, and a mistake that it shows would go unnoticed.
const GRACE: Duration = Duration::from_secs(2);

/// Places of a disk's index that a purge goes through in one event: 20 to 100 us.
const PLACES_AT_A_TIME: u32 = 2048;

/// The tier while its disks come.
struct Arrivals {
    ssd: Option<Ssd>,
    pools: Vec<Sender<Region>>,
    /// Disks that the first look heard nothing of. Nobody waits for them a second time.
    silent: usize,
    known: Arc<Known>,
}

impl Arrivals {
    /// Looks at all disks at once. An error is a mistake of the operator. If the pool knows of no disks, the other
    /// disks tell whether one that is not there is new: it asks.
    fn start(config: SsdConfig, known: &Arc<Known>, asks: bool) -> Result<Arrivals> {
        let ssd = Ssd::awaiting(config.disks.iter().map(|disk| disk.path.display().to_string()).collect())?;
        let (first_look, looks) = mpsc::channel();
        let mut pools = Vec::new();
        for place in 0..config.disks.len() {
            let (sender, receiver) = mpsc::channel();
            pools.push(sender);
            let (config, inbox, first_look) = (config.clone(), ssd.inbox(), Some(first_look.clone()));
            let (known, said) = (known.clone(), String::new());
            Arrival { place, config, inbox, known, asks, first_look, pools: receiver, pool: None, said }.spawn();
        }
        drop(first_look);
        let heard = judge(&looks, pools.len())?;
        let mut silent = pools.len() - heard.disks;
        // One that hangs is there.
        let is_past = heard.is_past || silent > 0;
        if asks && is_past {
            config.disks.iter().for_each(|disk| known.add(&disk.path));
        }
        let create = if is_past { Create::Never } else { Create::OffRoot };
        for asking in &heard.asking {
            // It waits for the answer.
            let _ = asking.send(create);
        }
        silent += heard.asking.len().saturating_sub(judge(&looks, heard.asking.len())?.disks);
        Ok(Arrivals { ssd: Some(ssd), pools, silent, known: known.clone() })
    }
}

/// What the looks at the disks have shown.
#[derive(Default)]
struct Heard {
    disks: usize,
    /// Whether one of them is in use by this host, or was.
    is_past: bool,
    /// Those that are not there, and ask whether they are new.
    asking: Vec<Sender<Create>>,
}

/// Waits for so many looks at disks, or until those that are left take far longer than the others.
fn judge(looks: &Receiver<Look>, disks: usize) -> Result<Heard> {
    let mut patience = Patience::new(FIRST_LOOK);
    let mut heard = Heard::default();
    while heard.disks < disks
        && let Ok(look) = looks.recv_timeout(patience.left())
    {
        match look {
            Look::Taken { is_new } => heard.is_past |= !is_new,
            Look::Absent(asking) => heard.asking.push(asking),
            Look::Missing { is_past } => heard.is_past |= is_past,
            Look::Mistake(error) => return Err(error),
        }
        heard.disks += 1;
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
        self.known.keep()?;
        // A disk whose thread has ended needs no pool.
        self.pools.iter().for_each(|waiting| drop(waiting.send(Region::of_pool(pool.clone()))));
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
        let mut found = Vec::new();
        loop {
            let is_more = ssd.take_found(&mut found);
            core.found(&found);
            found.clear();
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

    fn take_found(&mut self, found: &mut Vec<(BlockKey, Location)>) {
        Ssd::take_found(self, found);
    }

    fn has_more_found(&self) -> bool {
        Ssd::has_more_found(self)
    }

    fn missing_parts(&self) -> usize {
        self.missing()
    }

    fn take_evicted(&mut self, keys: &mut Vec<BlockKey>) {
        Ssd::take_evicted(self, keys);
    }

    fn blocks_of(&self, namespaces: &BTreeSet<NamespaceId>, at: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.piece(at, PLACES_AT_A_TIME, |key| namespaces.contains(&key.namespace))
    }

    fn ratio_before(&self, at: u64) -> f64 {
        Ssd::ratio_before(self, at)
    }

    fn disks(&self) -> Vec<DiskReport> {
        self.report()
    }

    fn breakers_opened(&self) -> u64 {
        Ssd::breakers_opened(self)
    }
}

/// Whether the other disks tell if a disk that is not there is new.
fn asks_others(config: &TierSsd, known: &Known) -> bool {
    config.create.is_none() && known.is_nothing()
}

/// Whether the error shows a disk that was made earlier.
fn tells_of_past(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Corrupt)
}

fn settings(config: &TierSsd, known: &Known) -> SsdConfig {
    let create = |path: &Path| match config.create {
        Some(true) => Create::Always,
        None if !known.is_nothing() && !known.has(path) => Create::OffRoot,
        Some(false) | None => Create::Never,
    };
    let disk = |path: &Path| DiskConfig {
        path: path.to_path_buf(),
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
        create: create(path),
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
fn told(disk: &DiskConfig, look: Result<Prospect, Vec<Error>>) -> Vec<Result<String>> {
    let shown = disk.path.display();
    match look {
        Ok(Prospect::Take { .. }) => vec![Ok(format!("`{shown}` can be used"))],
        Ok(Prospect::Make { free_bytes }) => {
            let (wanted, free) = (Bytes(disk.capacity_bytes.unwrap_or(0)), Bytes(free_bytes >> 20 << 20));
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
            let create = create.then_some(true);
            let tier = TierSsd { disks, capacity_bytes: capacity_bytes.map(Bytes), create, ..TierSsd::default() };
            let found = tier.examine(&Known::default());
            assert_eq!((found.len(), found[0].is_ok()), (1, is_fine), "{path:?}: {found:?}");
            assert!(found[0].as_ref().err().is_none_or(|error| error.hint_text().is_some()), "{path:?}: {found:?}");
        }
    }
}
