//! What every tier needs and no tier does itself: deadlines, a circuit breaker, counts, retries, a throttle.
//!
//! [`Stack`] is a tier with the rules around it. It owns the table of the operations in flight and the order of the
//! rules. Each rule is a file beside it and owns only its own state. A stack keeps the contract of [`Tier`]: each
//! operation that it takes completes exactly once, with the tier's outcome or its own; no load completes while the tier
//! may still write into its slot. [`Faults`] is a tier around a tier, for tests and the simulator.

mod breaker;
mod breakers;
mod deadline;
mod faults;
mod retry;
mod stack;
mod stats;
mod throttle;

use std::time::Duration;

use crate::tier::Tier;

pub use breaker::Breaker;
pub use breakers::Breakers;
pub use faults::{Faults, Rates};
pub use retry::Attempts;
pub use stack::{Rules, Stack};
pub use stats::Counts;
pub use throttle::Limits;

/// A tier that is told the time.
pub trait Timed: Tier {
    /// It is `now`, counted from any fixed moment; never earlier than before.
    fn advance(&mut self, now: Duration);
}

impl<T: Timed + ?Sized> Timed for Box<T> {
    fn advance(&mut self, now: Duration) {
        (**self).advance(now);
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A tier in memory that does as it is told.

    use super::*;
    use crate::key::{BlockHash, BlockKey, NamespaceId};
    use crate::tier::*;

    #[derive(Default)]
    pub struct Told {
        pub capabilities: Capabilities,
        pub taken: Vec<Operation>,
        pub room: Option<usize>,
        pub completions: Vec<Completion>,
        pub cancelled: Vec<OpId>,
    }

    impl Tier for Told {
        fn name(&self) -> &'static str {
            "told"
        }

        fn capabilities(&self) -> Capabilities {
            self.capabilities
        }

        fn submit(&mut self, batch: &[Operation]) -> usize {
            let taken = self.room.unwrap_or(usize::MAX).min(batch.len());
            self.taken.extend(&batch[..taken]);
            taken
        }

        fn poll(&mut self, completions: &mut Vec<Completion>) {
            completions.append(&mut self.completions);
        }

        fn cancel(&mut self, id: OpId) {
            self.cancelled.push(id);
        }

        fn health(&self) -> Health {
            Health::Healthy
        }
    }

    impl Timed for Told {
        fn advance(&mut self, _now: Duration) {}
    }

    /// Rules that let everything through; a test adds the one it is about.
    pub fn bare() -> Rules {
        let (limits, attempts) = (Limits::default(), Attempts { most: 1, ..Attempts::default() });
        Rules { limits, attempts, seed: 1, deadline: Duration::from_secs(3600), has_breaker: false }
    }

    pub fn stack(rules: Rules) -> Stack<Told> {
        Stack::new(Told::default(), rules)
    }

    pub fn op(id: u64, kind: OpKind) -> Operation {
        let key = BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&id.to_le_bytes()).unwrap() };
        Operation { id: OpId(id), kind, key, slot: None, length_bytes: 4096, checksum: 0, lineage: None }
    }

    pub const LOAD: OpKind = OpKind::Load;

    pub fn done(id: u64, outcome: Outcome) -> Completion {
        Completion { id: OpId(id), outcome }
    }

    pub fn polled(tier: &mut impl Tier) -> Vec<Completion> {
        let mut completions = Vec::new();
        tier.poll(&mut completions);
        completions
    }
}
