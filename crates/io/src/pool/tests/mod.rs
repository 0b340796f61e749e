//! The pool's promises, on real files in `/dev/shm` and with real processes.
//!
//! Child processes run this same test binary; the environment says which part to play. They communicate with the test
//! over a socket in place of their standard input.

mod crash;
mod fixture;
mod flips;
mod fuzz;
mod huge_pages;
mod life;
mod model;
mod order;
mod ours;
mod process;
mod workers;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use forebay_core::checksum::checksum;
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};

use super::*;

const MIB: u64 = 1 << 20;

/// A process that starts a child has all its descriptors twice, and with them all locks, until the child has become
/// another program. So tests that start children run alone, and tests that watch locks may run together.
static CHILDREN: RwLock<()> = RwLock::new(());

#[allow(dead_code, reason = "held for its lock")]
pub enum Turn {
    WithOthers(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// For tests that watch locks and start no children.
pub fn with_others() -> Turn {
    Turn::WithOthers(CHILDREN.read().unwrap_or_else(PoisonError::into_inner))
}

/// A pool's directory that is removed with everything created in it.
struct Home {
    directory: tempfile::TempDir,
    _turn: Option<Turn>,
}

impl Home {
    /// For a test that starts no children.
    fn new() -> Home {
        Home::in_turn(Some(with_others()))
    }

    /// For a test that starts children.
    fn alone() -> Home {
        Home::in_turn(Some(Turn::Alone(CHILDREN.write().unwrap_or_else(PoisonError::into_inner))))
    }

    /// For a test that already has its turn.
    fn another() -> Home {
        Home::in_turn(None)
    }

    fn in_turn(turn: Option<Turn>) -> Home {
        let directory = tempfile::Builder::new().prefix("forebay-test-").tempdir_in("/dev/shm").unwrap();
        Home { directory, _turn: turn }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path().join(name)).unwrap()
    }

    fn config(&self, capacity_bytes: u64) -> PoolConfig {
        let directory = self.path().to_owned();
        PoolConfig { directory, capacity_bytes, unit_bytes: None, huge_pages: HugePages::Off }
    }

    fn open(&self, capacity_bytes: u64) -> Opened {
        Pool::open(&self.config(capacity_bytes)).unwrap()
    }

    fn pool(&self, capacity_bytes: u64) -> Pool {
        self.open(capacity_bytes).pool
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Only a private mount could be left; if the test failed, this may fail too.
        let _ = remove(self.path());
    }
}

/// A block whose bytes, key and entry are computed from its number.
fn block(number: u64) -> (Entry, Vec<u8>) {
    let bytes: Vec<u8> = (0..600u64).map(|i| (i * 31 + number * 7 + i * i * number) as u8).collect();
    let hash = BlockHash::new(&checksum(&number.to_le_bytes()).to_be_bytes().repeat(3)).unwrap();
    let key = BlockKey { namespace: NamespaceId(u128::from(number) << 70 | 5), group: number as u16, hash };
    let (length, checksum) = (bytes.len() as u64, checksum(&bytes));
    (Entry { key, length, checksum, sequence: number * 3, tokens: number as u32 + 1 }, bytes)
}

/// Does the whole store of block `number`, worker's part and daemon's part.
fn store(pool: &Pool, slot: SlotId, generation: u32, number: u64) {
    let (entry, bytes) = block(number);
    pool.reserve(slot, Generation(generation));
    pool.set_holders(slot, 1 << 3);
    pool.write(slot.offset(), &bytes);
    pool.ready(slot, Generation(generation), &entry);
    pool.set_holders(slot, 0);
}

/// All slots of an opened pool.
fn recovered(pool: &Pool) -> Vec<RecoveredSlot> {
    let mut slots = Vec::new();
    assert!(!pool.recover(&mut RecoveryCursor::default(), usize::MAX, |slot| slots.push(slot)));
    slots
}

/// The block in a slot, if the slot is ready; checks that its bytes are those that were stored.
fn block_in(pool: &Pool, slot: &RecoveredSlot) -> Option<Entry> {
    let SlotState::Ready(entry) = slot.state else { return None };
    assert_eq!(pool.checksum(slot.slot.offset(), entry.length), entry.checksum, "{slot:?} is ready with wrong bytes");
    Some(entry)
}

fn write_at(home: &Home, name: &str, at: u64, bytes: &[u8]) {
    home.file(name).write_all_at(bytes, at).unwrap();
}

/// A file as a pool makes it.
fn make_file(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).mode(files::FILE_MODE).open(path).unwrap()
}

fn files_in(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The one extent that most tests use: slots of `slot_bytes` in the first unit.
fn with_extent(pool: &Pool, slot_bytes: u64) -> Extent {
    let extent = Extent { first_unit: 0, units: 1, slot_bytes };
    pool.populate_unit(0).unwrap();
    pool.set_extent(&extent).unwrap();
    extent
}
