//! The mapped pool, and where this rank's slices lie in its slots.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Generation, Result, SlotId};
use forebay_device::{PoolId, SlotGuard};
use forebay_io::arena::{BirthRecord, Mapping};
use forebay_rpc::proto::{AttachReady, Held};

/// What this rank has of a block of a group.
#[derive(Clone, Debug)]
pub struct GroupShape {
    pub group: u32,
    pub is_replicated: bool,
    /// Of one of the engine's blocks.
    pub block_bytes: u64,
    /// Of a slot: `blocks_per_chunk` blocks.
    pub slice_bytes: u64,
}

/// See the module's head.
#[derive(Clone)]
pub struct MappedPool {
    pub id: Vec<u8>,
    pub mapping: Arc<Mapping>,
    /// As the copy engine knows it.
    pub handle: PoolId,
    /// By group, from the start of the slot; `None` until all ranks are attached.
    pub offsets: Option<Arc<HashMap<u32, u64>>>,
}

/// The offsets the daemon tells. Errors with `Io` if they do not fit what this rank declared.
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

/// Checks that each slot is still the one that was meant, and signs what was stored into it.
pub struct Guard {
    pub mapping: Arc<Mapping>,
    /// By item.
    pub slots: Vec<Held>,
    /// For a store: this rank, and the bytes of each item.
    pub birth: Option<(usize, Vec<u64>)>,
}

impl Guard {
    fn is_current(&self, item: usize) -> bool {
        let Held { slot, generation } = self.slots[item];
        !self.mapping.is_retired() && self.mapping.generation(SlotId(slot)) == Generation(generation)
    }
}

impl SlotGuard for Guard {
    fn before(&self, item: usize) -> bool {
        self.is_current(item)
    }

    fn after(&self, item: usize, checksum: Option<u64>) -> bool {
        if !self.is_current(item) {
            return false;
        }
        let (Some((rank, lengths)), Some(checksum)) = (&self.birth, checksum) else { return true };
        let Held { slot, generation } = self.slots[item];
        let record = BirthRecord { generation: Generation(generation), length: lengths[item], checksum };
        let written = self.mapping.write_birth(SlotId(slot), *rank, &record);
        written.inspect_err(|error| tracing::warn!(%error, "a stored block is lost")).is_ok()
    }
}
