//! A Redis tier over a pool of its own, and blocks whose bytes are known from their number.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, PAGE_BYTES, SlotId};
use forebay_io::redis::{Redis, RedisConfig};
use forebay_io::uring::Region;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::servers::{PATIENCE, until};

pub const KIB: u64 = 1 << 10;
pub const SLOTS: u64 = 64;
pub const SLOT_BYTES: u64 = 64 * KIB;

/// Timeouts that are long for a loaded machine; tests that wait for them choose their own.
pub fn config(url: &str) -> RedisConfig {
    let mut config = RedisConfig::new(vec![url.to_string()]);
    config.connect_timeout = Duration::from_secs(30);
    config.operation_timeout = Duration::from_secs(30);
    config
}

pub struct Bed {
    pub pool: Region,
    pub redis: Redis,
    next_id: u64,
    pub outcomes: HashMap<OpId, Outcome>,
    /// What has ended, in order.
    pub ended: Vec<OpId>,
}

impl Bed {
    pub fn open(config: &RedisConfig) -> Bed {
        Bed::on(config, Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap())
    }

    pub fn on(config: &RedisConfig, pool: Region) -> Bed {
        let redis = Redis::open(config, pool.clone()).unwrap_or_else(|error| panic!("{error}"));
        Bed { pool, redis, next_id: 0, outcomes: HashMap::new(), ended: Vec::new() }
    }

    /// With a server that answers already.
    pub fn ready(config: &RedisConfig) -> Bed {
        let mut bed = Bed::open(config);
        bed.await_service();
        bed
    }

    /// Until lookups, loads and stores are answered.
    pub fn await_service(&mut self) {
        until(
            || {
                let probes = [self.find(u64::MAX), self.load(u64::MAX, SLOTS - 1, 1)];
                let outcomes = self.run(&probes);
                self.redis.health() == Health::Healthy && outcomes == [Outcome::Absent; 2]
            },
            || "the tier does not come to serve".to_string(),
        );
    }

    pub fn store(&mut self, number: u64, slot: u64, length_bytes: u64) -> Operation {
        let bytes = block_bytes(number, length_bytes);
        self.pool.write(slot * SLOT_BYTES, &bytes);
        self.operation(OpKind::Store, number, Some(slot), length_bytes, checksum(&bytes))
    }

    pub fn load(&mut self, number: u64, slot: u64, length_bytes: u64) -> Operation {
        self.operation(OpKind::Load, number, Some(slot), length_bytes, 0)
    }

    pub fn find(&mut self, number: u64) -> Operation {
        self.operation(OpKind::Exists, number, None, 0, 0)
    }

    pub fn remove(&mut self, number: u64) -> Operation {
        self.operation(OpKind::Remove, number, None, 0, 0)
    }

    fn operation(&mut self, kind: OpKind, number: u64, slot: Option<u64>, length_bytes: u64, sum: u64) -> Operation {
        self.next_id += 1;
        let slot = slot.map(|slot| (SlotId((slot * SLOT_BYTES / PAGE_BYTES) as u32), Generation(0)));
        Operation { id: OpId(self.next_id), kind, key: key(number), slot, length_bytes, checksum: sum, lineage: None }
    }

    /// Submits, and returns what is waited for with [`Bed::outcomes_of`].
    pub fn submit(&mut self, ops: &[Operation]) {
        assert_eq!(self.redis.submit(ops), ops.len(), "all of them are taken");
    }

    /// Waits for completions, a little while.
    pub fn turn(&mut self) {
        let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let _ = rustix::event::poll(&mut [PollFd::new(&self.redis.wake_fd(), PollFlags::IN)], Some(&wait));
        let mut completions = Vec::new();
        self.redis.poll(&mut completions);
        for Completion { id, outcome } in completions {
            self.ended.push(id);
            let earlier = self.outcomes.insert(id, outcome);
            assert_eq!(earlier, None, "{id:?} completed twice");
        }
    }

    pub fn outcomes_of(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        let begun = Instant::now();
        while let Some(op) = ops.iter().find(|op| !self.outcomes.contains_key(&op.id)) {
            assert!(begun.elapsed() < PATIENCE, "{op:?} never completed: {:?}", self.redis.report());
            self.turn();
        }
        ops.iter().map(|op| self.outcomes[&op.id]).collect()
    }

    pub fn run(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        self.submit(ops);
        self.outcomes_of(ops)
    }

    pub fn store_all(&mut self, numbers: impl IntoIterator<Item = u64>, length_bytes: u64) {
        let numbers: Vec<_> = numbers.into_iter().collect();
        for some in numbers.chunks(SLOTS as usize) {
            let stores: Vec<_> =
                (0..).zip(some).map(|(slot, number)| self.store(*number, slot, length_bytes)).collect();
            let outcomes = self.run(&stores);
            assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Stored)), "{outcomes:?}");
        }
    }

    /// Whether the slot holds the block.
    pub fn holds(&self, number: u64, slot: u64, length_bytes: u64) -> bool {
        let mut bytes = vec![0; length_bytes as usize];
        self.pool.read(slot * SLOT_BYTES, &mut bytes);
        bytes == block_bytes(number, length_bytes)
    }

    pub fn fill(&mut self, slot: u64, byte: u8) {
        self.pool.write(slot * SLOT_BYTES, &vec![byte; SLOT_BYTES as usize]);
    }

    pub fn is_filled(&self, slot: u64, byte: u8) -> bool {
        let mut bytes = vec![0; SLOT_BYTES as usize];
        self.pool.read(slot * SLOT_BYTES, &mut bytes);
        bytes.iter().all(|found| *found == byte)
    }

    /// Loads a block into the last slot but one; whatever is called loaded is the block.
    pub fn look(&mut self, number: u64, length_bytes: u64) -> Outcome {
        let load = self.load(number, SLOTS - 2, length_bytes);
        let outcome = self.run(&[load])[0];
        if let Outcome::Loaded { .. } = outcome {
            assert!(self.holds(number, SLOTS - 2, length_bytes), "block {number} came back as other bytes");
        }
        outcome
    }
}

pub fn key(number: u64) -> BlockKey {
    let hash = BlockHash::new(&number.to_be_bytes()).unwrap();
    BlockKey { namespace: NamespaceId(0xFEED), group: 1, hash }
}

/// The name under which a server holds the first part of a block.
pub fn name_of(key: &BlockKey) -> String {
    format!("forebay:{{{}:{}:{}}}", key.namespace, key.group, key.hash)
}

pub fn block_bytes(number: u64, length_bytes: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length_bytes).map(|_| next()).collect()
}

pub fn loaded(number: u64, length_bytes: u64) -> Outcome {
    Outcome::Loaded { length_bytes, checksum: checksum(&block_bytes(number, length_bytes)) }
}
