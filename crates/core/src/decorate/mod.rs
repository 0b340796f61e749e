//! What every tier needs and no tier does itself, as wrappers: deadlines, a circuit breaker, counts, retries, a
//! throttle, faults.
//!
//! [`Stack`] wraps a tier as `Stats<Breaker<Deadline<Retry<Throttle<tier>>>>>`, each where what it sees is right: counts see
//! what the driver sees; the breaker sees what is late, and one failure for all attempts at an operation; the deadline
//! covers all attempts, and its cancelling ends them; the throttle holds up second attempts as well as first ones.
//! Leave out what a tier does not need. Each wrapper keeps the contract of [`Tier`]: what it takes is completed exactly
//! once, in its own words or the tier's; none completes a load while the tier may still write into its slot.

mod breaker;
mod deadline;
mod faults;
mod retry;
mod stack;
mod stats;
mod throttle;

use std::time::Duration;

use crate::tier::{OpId, Tier};

pub use breaker::Breaker;
pub use deadline::Deadline;
pub use faults::{Faults, Rates};
pub use retry::{Attempts, Retry};
pub use stack::Stack;
pub use stats::{Counts, Stats};
pub use throttle::{Limits, Throttle};

/// A tier that is told the time. `now` counts from any fixed moment and never goes back.
pub trait Timed: Tier {
    /// It is `now`: deadlines, pauses and budgets go by this.
    fn advance(&mut self, now: Duration);

    /// Appends loads that are late, each once; their completions still come.
    fn take_late(&mut self, _late: &mut Vec<OpId>) {}
}

impl<T: Timed + ?Sized> Timed for Box<T> {
    fn advance(&mut self, now: Duration) {
        (**self).advance(now);
    }

    fn take_late(&mut self, late: &mut Vec<OpId>) {
        (**self).take_late(late);
    }
}

/// The parts of [`Tier`] that a wrapper passes on.
macro_rules! pass_on {
    ($($method:ident),+) => { $( crate::decorate::pass_on!(@ $method); )+ };
    (@ name) => {
        fn name(&self) -> &'static str {
            self.inner.name()
        }
    };
    (@ capabilities) => {
        fn capabilities(&self) -> crate::tier::Capabilities {
            self.inner.capabilities()
        }
    };
    (@ cancel) => {
        fn cancel(&mut self, id: crate::tier::OpId) {
            self.inner.cancel(id);
        }
    };
    (@ health) => {
        fn health(&self) -> crate::tier::Health {
            self.inner.health()
        }
    };
}
use pass_on;

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

    pub fn op(id: u64, kind: OpKind) -> Operation {
        let key = BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&id.to_le_bytes()).unwrap() };
        Operation { id: OpId(id), kind, key, slot: None, length_bytes: 4096, checksum: 0 }
    }

    pub const LOAD: OpKind = OpKind::Load { at: Location(0, 0) };

    pub fn done(id: u64, outcome: Outcome) -> Completion {
        Completion { id: OpId(id), outcome }
    }

    pub fn polled(tier: &mut impl Tier) -> Vec<Completion> {
        let mut completions = Vec::new();
        tier.poll(&mut completions);
        completions
    }
}
