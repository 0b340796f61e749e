//! The mapped pool, and the offsets of this rank's slices in its slots.

use std::collections::HashMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_core::{Error, ErrorKind, Generation, Result, SlotId};
use forebay_device::{Direction, PoolId, SlotGuard};
use forebay_io::pool::{BirthRecord, Mapping};
use forebay_rpc::proto::{AttachReady, Held};

/// This rank's share of a group's block.
#[derive(Clone, Debug)]
pub struct GroupShape {
    pub group: u32,
    pub is_replicated: bool,
    /// Bytes of one of the engine's blocks.
    pub block_bytes: u64,
    /// Bytes of the slice in a slot: `blocks_per_chunk` blocks.
    pub slice_bytes: u64,
}

/// See the module documentation.
#[derive(Clone)]
pub struct MappedPool {
    pub id: Vec<u8>,
    pub mapping: Arc<Mapping>,
    /// The copy engine's id of the pool.
    pub handle: PoolId,
    /// Whether the daemon declares that every ready block has births.
    pub has_births: bool,
    /// By group, from the start of the slot; `None` until all ranks are attached.
    pub offsets: Option<Arc<HashMap<u32, u64>>>,
}

/// The offsets from the daemon. Errors with `Io` if they contradict this rank's declaration.
pub fn offsets(ready: &AttachReady, groups: &[GroupShape]) -> Result<HashMap<u32, u64>> {
    let offset = |shape: &GroupShape| {
        let slice = ready.slices.iter().find(|slice| slice.group == shape.group)?;
        let end = slice.offset.checked_add(shape.slice_bytes)?;
        (end <= slice.slot_bytes).then_some((shape.group, slice.offset))
    };
    groups.iter().map(offset).collect::<Option<_>>().ok_or_else(|| {
        Error::new(ErrorKind::Io, "the daemon's slices do not fit this rank's blocks")
            .with("slices", format!("{:?}", ready.slices))
            .hint("the daemon and this engine may be of different versions")
    })
}

/// The expected slice of a rank in a slot.
#[derive(Clone, Copy)]
pub struct Meant {
    pub held: Held,
    /// Length of the whole slice.
    pub bytes: u64,
    /// The rank whose birth record covers these bytes: this rank, or rank 0 where all load the same.
    pub rank: usize,
}

/// Checks that each slot is still the intended one, records the checksum of stored slices, and compares loaded slices
/// with the record.
pub struct Guard {
    pub mapping: Arc<Mapping>,
    pub direction: Direction,
    /// By item.
    pub meant: Vec<Meant>,
    pub suspects: Arc<Suspects>,
}

impl Guard {
    fn sign(&self, Meant { held, bytes, rank }: Meant, checksum: u64) -> bool {
        let record = BirthRecord { generation: Generation(held.generation), length: bytes, checksum };
        let written = self.mapping.write_birth(SlotId(held.slot), rank, &record);
        written.inspect_err(|error| tracing::warn!(%error, "a stored block is lost")).is_ok()
    }

    fn compare(&self, Meant { held, bytes, rank }: Meant, checksum: u64) -> bool {
        let record = BirthRecord { generation: Generation(held.generation), length: bytes, checksum };
        let is_whole = self.mapping.birth(SlotId(held.slot), rank) == Some(record);
        // A slot that changed hands meanwhile was read too late; its content is not suspect.
        if !is_whole && self.is_still(held) {
            tracing::warn!(slot = held.slot, "a load failed: the block in the pool does not match its checksum");
            self.suspects.count.fetch_add(1, Relaxed);
            self.suspects.tell(held);
        }
        is_whole
    }

    fn is_still(&self, held: Held) -> bool {
        !self.mapping.is_retired() && self.mapping.is_still(SlotId(held.slot), Generation(held.generation))
    }
}

impl SlotGuard for Guard {
    fn before(&self, item: usize) -> bool {
        let held = self.meant[item].held;
        let is_meant = self.mapping.generation(SlotId(held.slot)) == Generation(held.generation);
        let is_mapped = !self.mapping.is_retired();
        // The daemon can tell whether the slot changed hands or a bit of its number flipped.
        if is_mapped && !is_meant && self.direction == Direction::Load {
            tracing::debug!(slot = held.slot, "a slot to load from has another generation");
            self.suspects.tell(held);
        }
        is_mapped && is_meant
    }

    fn after(&self, item: usize, checksum: Option<u64>) -> bool {
        let meant = self.meant[item];
        self.is_still(meant.held)
            && match (self.direction, checksum) {
                (_, None) => true,
                (Direction::Store, Some(checksum)) => self.sign(meant, checksum),
                (Direction::Load, Some(checksum)) => self.compare(meant, checksum),
            }
    }
}

/// Slots whose load failed unexpectedly, until they are reported to the daemon.
pub struct Suspects {
    slots: Mutex<Vec<Held>>,
    /// Writing a byte here wakes the attach thread.
    wake: UnixStream,
    /// Total of loads whose bytes were not what was stored.
    count: AtomicU64,
}

impl Suspects {
    /// Further ones are dropped: their loads have failed anyway, and the next failure is reported.
    const MAX_WAITING: usize = 4096;

    pub fn new(wake: UnixStream) -> Suspects {
        Suspects { slots: Mutex::default(), wake, count: AtomicU64::new(0) }
    }

    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Takes up to `most` of the waiting ones.
    pub fn take(&self, most: usize) -> Vec<Held> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let count = slots.len().min(most);
        slots.drain(..count).collect()
    }

    fn tell(&self, held: Held) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() < Suspects::MAX_WAITING && !slots.contains(&held) {
            slots.push(held);
            // A full pipe wakes equally well; a closed one has no reader to wake.
            let _ = (&self.wake).write(&[0]);
        }
    }
}
