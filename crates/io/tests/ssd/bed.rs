//! A tier on a simulated disk, and blocks whose bytes are known from their number.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::TierHasher;
use forebay_core::{BlockHash, BlockKey, Fingerprint, Generation, NamespaceId, PAGE_BYTES, SlotId};
use forebay_io::ssd::{BlockInfo, Medium, STAGING_BYTES, Ssd, SsdConfig, Walked};
use forebay_io::uring::{Memory, Region, Simulated, SimulatedDisk};

use crate::files::turn_taken;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// Slots of the bed's pool.
pub const SLOTS: u64 = 64;
pub const SLOT_BYTES: u64 = 64 * KIB;

/// A disk of the smallest shape: eight segments of 64 KiB behind the superblock's MiB.
pub fn small_config() -> SsdConfig {
    let mut config = SsdConfig::new(Vec::new());
    config.segment_bytes = Some(64 * KIB);
    config.depth = 16;
    config.hasher = hasher();
    config.trim = true;
    config
}

pub fn blank(config: &SsdConfig, segments: u64) -> SimulatedDisk {
    SimulatedDisk::new((MIB + segments * config.segment_bytes.unwrap()) as usize)
}

/// A tier and what it was asked.
pub struct Bed {
    pub disk: SimulatedDisk,
    pub pool: Region,
    pub ssd: Ssd,
    pub now: Duration,
    /// Turns wait for a real disk; a simulated one is never late.
    is_on_file: bool,
    pub next_id: u64,
    pub outcomes: HashMap<OpId, Outcome>,
}

impl Bed {
    pub fn open(disk: &SimulatedDisk, config: &SsdConfig, seed: Option<u64>) -> forebay_core::Result<Bed> {
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        let ssd = open_tier(disk, config, seed, &pool)?;
        Ok(Bed::with(ssd, pool, disk))
    }

    pub fn with(ssd: Ssd, pool: Region, disk: &SimulatedDisk) -> Bed {
        let (now, outcomes) = (Duration::ZERO, HashMap::new());
        Bed { disk: disk.clone(), pool, ssd, now, is_on_file: false, next_id: 0, outcomes }
    }

    /// A tier on a real file; the bed's own disk is never touched.
    pub fn on_file(ssd: Ssd, pool: &Region) -> Bed {
        Bed { is_on_file: true, ..Bed::with(ssd, pool.clone(), &SimulatedDisk::new(0)) }
    }

    pub fn store(&mut self, number: u64, slot: u64, length_bytes: u64) -> Operation {
        let bytes = block_bytes(number, length_bytes);
        self.pool.write(slot * SLOT_BYTES, &bytes);
        self.operation(OpKind::Store, number, Some(slot), length_bytes, checksum(&bytes))
    }

    pub fn load(&mut self, number: u64, slot: u64, length_bytes: u64) -> Operation {
        self.operation(OpKind::Load, number, Some(slot), length_bytes, 0)
    }

    pub fn remove(&mut self, number: u64) -> Operation {
        self.operation(OpKind::Remove, number, None, 0, 0)
    }

    fn operation(
        &mut self,
        kind: OpKind,
        number: u64,
        slot: Option<u64>,
        length_bytes: u64,
        checksum: u64,
    ) -> Operation {
        self.next_id += 1;
        let slot = slot.map(|slot| (SlotId((slot * SLOT_BYTES / PAGE_BYTES) as u32), Generation(0)));
        Operation { id: OpId(self.next_id), kind, key: key(number), slot, length_bytes, checksum, lineage: None }
    }

    /// One turn, 5 ms of the tier's time.
    pub fn turn(&mut self) {
        if self.is_on_file {
            turn_taken(&self.ssd, Duration::from_millis(5));
        }
        let mut completions = Vec::new();
        self.now += Duration::from_millis(5);
        self.ssd.tick(self.now);
        self.ssd.poll(&mut completions);
        for Completion { id, outcome } in completions {
            let earlier = self.outcomes.insert(id, outcome);
            assert_eq!(earlier, None, "{id:?} completed twice");
        }
    }

    /// Submits and waits; None where the disk has lost power before the end.
    pub fn run(&mut self, ops: &[Operation]) -> Option<Vec<Outcome>> {
        let mut taken = 0;
        for _ in 0..100_000 {
            taken += self.ssd.submit(&ops[taken..]);
            if ops.iter().all(|op| self.outcomes.contains_key(&op.id)) {
                return Some(ops.iter().map(|op| self.outcomes[&op.id]).collect());
            }
            if self.disk.is_off() {
                return None;
            }
            self.turn();
        }
        let waiting: Vec<_> = ops.iter().filter(|op| !self.outcomes.contains_key(&op.id)).collect();
        panic!("{} operations never completed: {:?}", waiting.len(), waiting[0]);
    }

    /// Waits for operations that were submitted.
    pub fn ended(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        for _ in 0..10_000 {
            if ops.iter().all(|op| self.outcomes.contains_key(&op.id)) {
                break;
            }
            self.turn();
        }
        ops.iter().map(|op| self.outcomes[&op.id]).collect()
    }

    pub fn store_all(&mut self, blocks: impl IntoIterator<Item = (u64, u64)>) {
        let blocks: Vec<_> = blocks.into_iter().collect();
        for some in blocks.chunks(SLOTS as usize) {
            let stores: Vec<_> = (0..).zip(some).map(|(slot, (number, len))| self.store(*number, slot, *len)).collect();
            let outcomes = self.run(&stores).unwrap();
            assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Stored)), "{outcomes:?}");
        }
    }

    /// What a load of the block gives; checks that loaded bytes are the block's.
    pub fn look(&mut self, number: u64, length_bytes: u64) -> Outcome {
        let load = self.load(number, SLOTS - 1, length_bytes);
        let outcome = self.run(&[load]).unwrap()[0];
        if matches!(outcome, Outcome::Loaded { .. }) {
            let mut bytes = vec![0; length_bytes as usize];
            self.pool.read((SLOTS - 1) * SLOT_BYTES, &mut bytes);
            assert!(bytes == block_bytes(number, length_bytes), "block {number} came back as other bytes");
        }
        outcome
    }

    /// Turns until nothing is in flight.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            self.turn();
            if self.ssd.is_idle() {
                return;
            }
        }
        panic!("the tier does not come to rest: {:?}", self.ssd.report());
    }

    /// The blocks that are there, as stores that passed.
    pub fn holds_numbers(&mut self) -> BTreeMap<u64, Outcome> {
        self.blocks().into_iter().map(|block| (number_of(&block.key), Outcome::Stored)).collect()
    }

    /// What the lists of all disks have, blocks that are not served too. Takes turns while lists are read.
    pub fn listed(&mut self) -> Vec<BlockInfo> {
        let (mut is_new, mut all) = (true, Vec::<BlockInfo>::new());
        for _ in 0..100_000 {
            match self.ssd.walk(std::mem::take(&mut is_new), &namespaces()) {
                Walked::Blocks(some) => all.extend(some),
                Walked::Waits => self.turn(),
                Walked::End => {
                    // A block that was carried over meanwhile was met twice.
                    let mut met = HashSet::new();
                    all.reverse();
                    all.retain(|block| met.insert(block.key));
                    all.reverse();
                    return all;
                }
            }
        }
        panic!("a walk does not end: {:?}", self.ssd.report());
    }

    /// The blocks that can be loaded, disk by disk, the oldest first.
    pub fn blocks(&mut self) -> Vec<BlockInfo> {
        let listed = self.listed().into_iter();
        listed.filter(|block| self.ssd.block(&block.key).is_some()).collect()
    }

    /// The blocks that the tier gave up since this was asked last.
    pub fn evictions(&mut self) -> Vec<u64> {
        let (mut keys, mut lost) = (Vec::new(), Vec::new());
        self.ssd.take_evicted(&mut keys, &mut lost);
        keys.iter().map(number_of).chain(numbers_of(&lost)).collect()
    }

    pub fn holds(&mut self) -> HashMap<BlockKey, BlockInfo> {
        self.blocks().into_iter().map(|block| (block.key, block)).collect()
    }
}

pub fn open_tier(
    disk: &SimulatedDisk,
    config: &SsdConfig,
    seed: Option<u64>,
    pool: &Region,
) -> forebay_core::Result<Ssd> {
    Ssd::on(vec![medium(disk, seed, pool, 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff)], config)
}

pub fn medium(disk: &SimulatedDisk, seed: Option<u64>, pool: &Region, new_id: u128) -> Medium {
    let staging = Region::anonymous(STAGING_BYTES).unwrap();
    let memory = Arc::new(Memory::new(pool.clone(), staging));
    Medium {
        name: "simulated".to_owned(),
        engine: Box::new(Simulated::new(disk.clone(), memory.clone(), seed)),
        engine_why: "a test asks for it".to_owned(),
        memory,
        bytes: disk.len() as u64,
        is_direct: true,
        can_trim: true,
        new_id,
    }
}

pub fn key(number: u64) -> BlockKey {
    let mut hash = [0x5A; 32];
    hash[..8].copy_from_slice(&number.to_be_bytes());
    BlockKey { namespace: NamespaceId(7), group: 2, hash: BlockHash::new(&hash).unwrap() }
}

/// All namespaces of these tests that are walked through.
pub fn namespaces() -> BTreeSet<NamespaceId> {
    [7, 100, 101, 102].map(NamespaceId).into()
}

/// What names the blocks of all tiers of these tests.
pub fn hasher() -> TierHasher {
    TierHasher::new(0x00de_11ca_7e5e_edfe)
}

/// The numbers of these blocks, in the order of numbers.
pub fn numbers_of(blocks: &[Fingerprint]) -> impl Iterator<Item = u64> {
    let wanted: HashSet<Fingerprint> = blocks.iter().copied().collect();
    let most = if blocks.is_empty() { 0 } else { 20_000 };
    (0..most).filter(move |number| wanted.contains(&hasher().hash(&key(*number))))
}

pub fn number_of(key: &BlockKey) -> u64 {
    u64::from_be_bytes(key.hash.as_bytes()[..8].try_into().unwrap())
}

/// The bytes of a block: every page of every block is another.
pub fn block_bytes(number: u64, length_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![(number % 251) as u8; length_bytes as usize];
    for (page, bytes) in bytes.chunks_mut(PAGE_BYTES as usize).enumerate() {
        let tag = (number << 16 | page as u64).to_le_bytes();
        let len = bytes.len().min(8);
        bytes[..len].copy_from_slice(&tag[..len]);
    }
    bytes
}

/// Splitmix64: what a seed draws.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % limit
    }
}
