//! The suite for tiers, on both engines and on a simulated disk.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::BlockKey;
use forebay_core::tier::Tier;
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_io::ssd::{Ssd, SsdConfig};
use forebay_io::uring::{EngineChoice, Region, SimulatedDisk};

use crate::bed::{MIB, open_tier};
use crate::files::{file_config, home, open, open_when_free, turn_taken};

struct OnFile {
    config: SsdConfig,
    pool: Region,
    ssd: Option<Ssd>,
    begun: Instant,
}

impl OnFile {
    fn new(directory: &Path, engine: EngineChoice) -> OnFile {
        let mut config = file_config(&directory.join("disk"), 64 * MIB);
        config.engine = engine;
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        let ssd = Some(open(&config, &pool).unwrap());
        OnFile { config, pool, ssd, begun: Instant::now() }
    }

    fn ssd(&mut self) -> &mut Ssd {
        self.ssd.as_mut().unwrap()
    }
}

impl conformance::Bed for OnFile {
    fn tier(&mut self) -> &mut dyn Tier {
        self.ssd()
    }

    fn pool(&self) -> Region {
        self.pool.clone()
    }

    fn turn(&mut self) {
        let now = self.begun.elapsed();
        self.ssd().tick(now);
        turn_taken(self.ssd(), Duration::from_millis(1));
    }

    fn reopen(&mut self) {
        self.ssd = None;
        self.ssd = Some(open_when_free(&self.config, &self.pool));
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let geometry = self.ssd().report()[0].geometry;
        let at = self.ssd().block(key).unwrap().offset_bytes(&geometry) + length_bytes / 2;
        let file = std::fs::File::options().read(true).write(true).open(&self.config.disks[0].path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
        file.sync_all().unwrap();
        true
    }
}

struct OnSimulation {
    disk: SimulatedDisk,
    pool: Region,
    ssd: Ssd,
    config: SsdConfig,
    now: Duration,
}

impl conformance::Bed for OnSimulation {
    fn tier(&mut self) -> &mut dyn Tier {
        &mut self.ssd
    }

    fn pool(&self) -> Region {
        self.pool.clone()
    }

    fn turn(&mut self) {
        self.now += Duration::from_millis(5);
        self.ssd.tick(self.now);
    }

    fn reopen(&mut self) {
        self.ssd = open_tier(&self.disk, &self.config, Some(5), &self.pool).unwrap();
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let geometry = self.ssd.report()[0].geometry;
        let at = self.ssd.block(key).unwrap().offset_bytes(&geometry) + length_bytes / 2;
        self.disk.alter(at as usize, |bytes| bytes[0] ^= 0x40);
        true
    }
}

#[test]
fn the_tier_conforms_on_io_uring() {
    let directory = home();
    let mut bed = OnFile::new(directory.path(), EngineChoice::Uring);
    assert_eq!(bed.ssd().report()[0].engine, "io_uring");
    conformance::check(&mut bed);
}

#[test]
fn the_tier_conforms_on_registered_memory() {
    let directory = home();
    let mut bed = OnFile::new(directory.path(), EngineChoice::Uring);
    let populated_bytes = bed.pool.len() as u64;
    bed.ssd().register(populated_bytes);
    conformance::check(&mut bed);
}

#[test]
fn the_tier_conforms_on_threads() {
    let directory = home();
    let mut bed = OnFile::new(directory.path(), EngineChoice::Threads);
    assert_eq!(bed.ssd().report()[0].engine, "threads");
    conformance::check(&mut bed);
}

#[test]
fn the_tier_conforms_on_a_simulated_disk_that_reorders() {
    let disk = SimulatedDisk::new((64 * MIB) as usize);
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
    let config = SsdConfig::new(Vec::new());
    let ssd = open_tier(&disk, &config, Some(5), &pool).unwrap();
    conformance::check(&mut OnSimulation { disk, pool, ssd, config, now: Duration::ZERO });
}
