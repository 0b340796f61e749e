//! What the tests share: the tier over a server, and blocks whose bytes follow from their numbers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};
use forebay_io::object::{Object, ObjectConfig, Secret};
use forebay_io::uring::Region;
use rustix::event::{PollFd, PollFlags};

pub const SLOTS: u64 = 4;
pub const SLOT_BYTES: u64 = 16 << 20;
/// Only against hanging tests.
pub const DEADLINE: Duration = Duration::from_secs(60);
pub const LOAD: OpKind = OpKind::Load;
pub const REMOVE: OpKind = OpKind::Remove;

pub fn config(endpoint: &str) -> ObjectConfig {
    ObjectConfig {
        endpoint: Some(endpoint.to_owned()),
        prefix: "team/cache".to_owned(),
        access_key_id: Some("id".to_owned()),
        secret_access_key: Some(Secret("secret".to_owned())),
        ..ObjectConfig::new(crate::s3::BUCKET)
    }
}

pub fn block_bytes(number: u64, length_bytes: u64) -> Vec<u8> {
    (0..length_bytes).map(|at| ((at ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub struct Host {
    pub tier: Object,
    pub pool: Region,
    next_id: u64,
}

impl Host {
    pub fn open(config: &ObjectConfig) -> Host {
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        Host { tier: Object::open(config, pool.clone()).unwrap(), pool, next_id: 0 }
    }

    pub fn op(&mut self, kind: OpKind, number: u64, length_bytes: u64) -> Operation {
        self.next_id += 1;
        let hash = BlockHash::new(&number.to_be_bytes()).unwrap();
        let key = BlockKey { namespace: NamespaceId(9), group: 1, hash };
        let slot = Some((SlotId((number % SLOTS * SLOT_BYTES / 4096) as u32), Generation(1)));
        Operation { id: OpId(self.next_id), kind, key, slot, length_bytes, checksum: 0, lineage: None }
    }

    pub fn store(&mut self, number: u64, length_bytes: u64) -> Outcome {
        let bytes = block_bytes(number, length_bytes);
        self.pool.write(number % SLOTS * SLOT_BYTES, &bytes);
        let op = Operation { checksum: checksum(&bytes), ..self.op(OpKind::Store, number, length_bytes) };
        self.run(&[op])[0]
    }

    pub fn is_stored(&mut self, number: u64, length_bytes: u64) {
        let outcome = self.store(number, length_bytes);
        assert!(matches!(outcome, Outcome::Stored), "block {number}: {outcome:?}");
    }

    pub fn one(&mut self, kind: OpKind, number: u64, length_bytes: u64) -> Outcome {
        let op = self.op(kind, number, length_bytes);
        self.run(&[op])[0]
    }

    pub fn verify(&mut self, number: u64, length_bytes: u64) {
        self.fill(number, 0x77);
        let outcome = self.one(LOAD, number, length_bytes);
        assert!(matches!(outcome, Outcome::Loaded { .. }), "block {number}: {outcome:?}");
        let mut bytes = vec![0; length_bytes as usize];
        self.pool.read(number % SLOTS * SLOT_BYTES, &mut bytes);
        assert!(bytes == block_bytes(number, length_bytes), "block {number} came back as other bytes");
    }

    pub fn fill(&self, number: u64, byte: u8) {
        self.pool.write(number % SLOTS * SLOT_BYTES, &vec![byte; SLOT_BYTES as usize]);
    }

    pub fn is_filled(&self, number: u64, byte: u8) -> bool {
        let mut bytes = vec![0; SLOT_BYTES as usize];
        self.pool.read(number % SLOTS * SLOT_BYTES, &mut bytes);
        bytes.iter().all(|found| *found == byte)
    }

    pub fn run(&mut self, ops: &[Operation]) -> Vec<Outcome> {
        let (mut outcomes, mut taken, begun) = (HashMap::new(), 0, Instant::now());
        while outcomes.len() < ops.len() {
            taken += self.tier.submit(&ops[taken..]);
            turn_taken(&self.tier, Duration::from_millis(5));
            let mut completions = Vec::new();
            self.tier.poll(&mut completions);
            outcomes.extend(completions.into_iter().map(|done| (done.id, done.outcome)));
            assert!(begun.elapsed() < DEADLINE, "{} of {} completed", outcomes.len(), ops.len());
        }
        ops.iter().map(|op| outcomes[&op.id]).collect()
    }
}

/// Sleeps until the tier has something to do.
pub fn turn_taken(tier: &Object, timeout: Duration) {
    let fd = tier.wake_fd();
    let timeout = timeout.try_into().unwrap();
    let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
}
