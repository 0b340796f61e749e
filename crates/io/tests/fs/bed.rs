//! What the tests share: a host with the tier open, and blocks whose bytes follow from their numbers.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};
use forebay_io::fs::{Fs, FsConfig};
use forebay_io::uring::Region;
use rustix::event::{PollFd, PollFlags};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const SLOTS: u64 = 64;
pub const SLOT_BYTES: u64 = 64 * KIB;
/// Only against hanging tests.
pub const DEADLINE: Duration = Duration::from_secs(60);
pub const LOAD: OpKind = OpKind::Load;
pub const REMOVE: OpKind = OpKind::Remove;

/// A directory on a real disk: direct I/O is no such thing in memory.
pub fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn config(path: &Path) -> FsConfig {
    FsConfig { streams: 3, buffers: 2, ..FsConfig::new(vec![path.to_owned()]) }
}

pub fn pool() -> Region {
    Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap()
}

pub fn key(number: u64) -> BlockKey {
    let hash = BlockHash::new(&number.to_be_bytes()).unwrap();
    BlockKey { namespace: NamespaceId(9), group: (number % 3) as u16, hash }
}

pub fn block_bytes(number: u64, length_bytes: u64) -> Vec<u8> {
    let mut dice = Dice(number);
    let mut bytes: Vec<u8> = (0..length_bytes.div_ceil(8)).flat_map(|_| dice.next().to_le_bytes()).collect();
    bytes.truncate(length_bytes as usize);
    bytes
}

pub fn slot(number: u64) -> Option<(SlotId, Generation)> {
    Some((SlotId((number % SLOTS * SLOT_BYTES / 4096) as u32), Generation(1)))
}

/// A directory whose mount goes away for a while: the empty folder below it appears.
pub fn without_mount(path: &Path, meanwhile: impl FnOnce()) {
    let away = path.with_extension("away");
    fs::rename(path, &away).unwrap();
    fs::create_dir(path).unwrap();
    meanwhile();
    assert!(files(path).is_empty(), "{:?}", files(path));
    fs::remove_dir(path).unwrap();
    fs::rename(&away, path).unwrap();
}

/// All files below `path`, with their names.
pub fn files(path: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(folder) = folders.pop() {
        // What a sweeper takes away meanwhile is not there.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => found.push(entry.path()),
            }
        }
    }
    found
}

pub fn name_of(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// The object files below `path`.
pub fn objects(path: &Path) -> Vec<PathBuf> {
    let is_object = |file: &PathBuf| !name_of(file).starts_with('.') && !file.starts_with(path.join(".forebay"));
    files(path).into_iter().filter(is_object).collect()
}

/// The files of blocks that were begun. The tier's own folder is left out: the sweeper may make a file there.
pub fn unfinished(path: &Path) -> Vec<PathBuf> {
    let is_begun = |file: &PathBuf| name_of(file).starts_with(".tmp-") && !file.starts_with(path.join(".forebay"));
    files(path).into_iter().filter(is_begun).collect()
}

/// The file of a stored block.
pub fn object_of(path: &Path, number: u64) -> PathBuf {
    let end = format!("-{}", key(number).hash);
    objects(path).into_iter().find(|file| name_of(file).ends_with(&end)).expect("the block has a file")
}

pub fn object_bytes(path: &Path) -> u64 {
    objects(path).iter().filter_map(|file| fs::metadata(file).ok()).map(|about| about.len()).sum()
}

/// A daemon's side of the tier.
pub struct Host {
    pub fs: Fs,
    pub pool: Region,
    next_id: u64,
}

impl Host {
    pub fn open(config: &FsConfig) -> Host {
        let pool = pool();
        Host { fs: Fs::open(config, pool.clone()).unwrap(), pool, next_id: 0 }
    }

    pub fn op(&mut self, kind: OpKind, number: u64, length_bytes: u64) -> Operation {
        self.next_id += 1;
        let (id, key, slot) = (OpId(self.next_id), key(number), slot(number));
        Operation { id, kind, key, slot, length_bytes, checksum: 0, lineage: None }
    }

    /// A store of the block's own bytes, which it lays into its slot.
    pub fn store_op(&mut self, number: u64, length_bytes: u64) -> Operation {
        let bytes = block_bytes(number, length_bytes);
        self.pool.write(number % SLOTS * SLOT_BYTES, &bytes);
        Operation { checksum: checksum(&bytes), ..self.op(OpKind::Store, number, length_bytes) }
    }

    pub fn store(&mut self, number: u64, length_bytes: u64) -> Outcome {
        let op = self.store_op(number, length_bytes);
        self.run(&[op])[0]
    }

    pub fn load(&mut self, number: u64, length_bytes: u64) -> Outcome {
        let op = self.op(LOAD, number, length_bytes);
        self.run(&[op])[0]
    }

    pub fn find(&mut self, number: u64) -> Outcome {
        let op = self.op(OpKind::Exists, number, 0);
        self.run(&[op])[0]
    }

    /// Loads a block that must be there, and looks at each byte.
    pub fn verify(&mut self, number: u64, length_bytes: u64) {
        let outcome = self.load(number, length_bytes);
        assert!(matches!(outcome, Outcome::Loaded { .. }), "block {number}: {outcome:?}");
        self.holds(number, length_bytes);
    }

    pub fn holds(&self, number: u64, length_bytes: u64) {
        let mut bytes = vec![0; length_bytes as usize];
        self.pool.read(number % SLOTS * SLOT_BYTES, &mut bytes);
        assert!(bytes == block_bytes(number, length_bytes), "block {number} came back as other bytes");
    }

    pub fn is_stored(&mut self, number: u64, length_bytes: u64) {
        let outcome = self.store(number, length_bytes);
        assert!(matches!(outcome, Outcome::Stored), "block {number}: {outcome:?}");
    }

    /// Lets time pass, and returns what completed.
    pub fn turn(&mut self) -> Vec<Completion> {
        let mut completions = Vec::new();
        turn_taken(&self.fs, Duration::from_millis(5));
        self.fs.advance(Duration::ZERO);
        self.fs.poll(&mut completions);
        completions
    }

    /// Turns until `is_so`.
    pub fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Host) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < DEADLINE, "not in time: {what}; {:?}", self.fs.report());
            self.turn();
        }
    }

    pub fn run(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        let (mut outcomes, mut taken, begun) = (HashMap::new(), 0, Instant::now());
        while outcomes.len() < ops.len() {
            taken += self.fs.submit(&ops[taken..]);
            outcomes.extend(self.turn().into_iter().map(|done| (done.id, done.outcome)));
            assert!(begun.elapsed() < DEADLINE, "{} of {} completed", outcomes.len(), ops.len());
        }
        ops.iter().map(|op| outcomes[&op.id]).collect()
    }
}

/// Sleeps until the tier has something to do.
pub fn turn_taken(fs: &Fs, timeout: Duration) {
    let fd = fs.wake_fd();
    let timeout = timeout.try_into().unwrap();
    let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
}

/// Splitmix64: what a seed draws.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
