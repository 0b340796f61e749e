//! A tier of one's own: blocks in a map, lost with the process.
//!
//! It keeps every tier's promises, and the suite for all tiers checks them:
//! `cargo test -p forebay-io --test memory_tier`. A tier is polled and never awaited; it neither retries nor counts nor
//! watches deadlines, since the daemon's decorators do.

use std::collections::{HashMap, VecDeque};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockKey, ErrorKind, SlotId};
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_io::uring::Region;

/// Operations between `submit` and `poll`; the caller submits the others again.
const QUEUE: usize = 64;

struct MemoryTier {
    /// The memory that slots lie in.
    pool: Region,
    blocks: HashMap<BlockKey, (Vec<u8>, u64)>,
    ended: VecDeque<Completion>,
}

impl MemoryTier {
    fn new(pool: Region) -> MemoryTier {
        MemoryTier { pool, blocks: HashMap::new(), ended: VecDeque::new() }
    }

    fn run(&mut self, op: &Operation) -> Outcome {
        let slot = op.slot.map(|(slot, _)| slot);
        match (op.kind, slot) {
            (OpKind::Store, Some(slot)) => self.store(op, slot),
            (OpKind::Load, Some(slot)) => self.load(op, slot),
            (OpKind::Store | OpKind::Load, None) => Outcome::Failed(ErrorKind::Invalid),
            (OpKind::Remove, _) if self.blocks.remove(&op.key).is_some() => Outcome::Removed,
            (OpKind::Exists, _) if self.blocks.contains_key(&op.key) => Outcome::Found,
            (OpKind::Remove | OpKind::Exists, _) => Outcome::Absent,
            (OpKind::Touch { .. }, _) => Outcome::Failed(ErrorKind::Unsupported),
        }
    }

    fn store(&mut self, op: &Operation, slot: SlotId) -> Outcome {
        let mut bytes = vec![0; op.length_bytes as usize];
        self.pool.read(slot.offset(), &mut bytes);
        self.blocks.insert(op.key, (bytes, op.checksum));
        Outcome::Stored
    }

    /// Writes to the slot only what is known to be the block.
    fn load(&mut self, op: &Operation, slot: SlotId) -> Outcome {
        match self.blocks.get(&op.key) {
            None => Outcome::Absent,
            Some((bytes, _)) if bytes.len() as u64 != op.length_bytes => Outcome::Failed(ErrorKind::Invalid),
            Some((bytes, sum)) if checksum(bytes) != *sum => Outcome::Failed(ErrorKind::Corrupt),
            Some((bytes, sum)) => {
                self.pool.write(slot.offset(), bytes);
                Outcome::Loaded { length_bytes: op.length_bytes, checksum: *sum }
            }
        }
    }
}

impl Tier for MemoryTier {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { can_store: true, can_remove: true, ..Capabilities::default() }
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.len().min(QUEUE - self.ended.len());
        for op in &batch[..taken] {
            let outcome = self.run(op);
            self.ended.push_back(Completion { id: op.id, outcome });
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        completions.extend(self.ended.drain(..));
    }

    /// Everything is over when `submit` returns.
    fn cancel(&mut self, _: OpId) {}

    fn health(&self) -> Health {
        Health::Healthy
    }
}

/// What the suite needs beside the tier: its memory, and a way to damage a block.
struct Bed(MemoryTier);

impl conformance::Bed for Bed {
    fn tier(&mut self) -> &mut dyn Tier {
        &mut self.0
    }

    fn pool(&self) -> Region {
        self.0.pool.clone()
    }

    fn reopen(&mut self) {
        unreachable!("only durable tiers are opened again");
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let (bytes, _) = self.0.blocks.get_mut(key).expect("the block was stored");
        bytes[length_bytes as usize / 2] ^= 1;
        true
    }
}

#[test]
fn it_is_a_tier_like_any_other() {
    let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).expect("memory");
    conformance::check(&mut Bed(MemoryTier::new(pool)));
}
