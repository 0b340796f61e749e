//! Says whether an operation may touch its slot, and whether its waiter may go: for tiers that may never answer.
//!
//! Invariant: one of both wins. After [`Ticket::give_up`] said so, the slot is not touched again, whatever still comes.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

const WAITS: u8 = 0;
const USES_SLOT: u8 = 1;
const GIVEN_UP: u8 = 2;

/// See the module's head.
#[derive(Default)]
pub(crate) struct Ticket {
    state: AtomicU8,
    begun: OnceLock<Instant>,
}

impl Ticket {
    /// Runs `copy`, which touches the slot, unless the waiter was told that it failed.
    pub fn use_slot<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        self.state.compare_exchange(WAITS, USES_SLOT, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let result = copy();
        self.state.store(WAITS, Ordering::Release);
        Some(result)
    }

    /// After true, the slot is never touched again. False while it is, which is not for long.
    pub fn give_up(&self) -> bool {
        self.state.compare_exchange(WAITS, GIVEN_UP, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    pub fn is_given_up(&self) -> bool {
        self.state.load(Ordering::Relaxed) == GIVEN_UP
    }

    /// Notes that it was taken up.
    pub fn begin(&self, now: Instant) {
        let _ = self.begun.set(now);
    }

    /// When it was taken up.
    pub fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }
}
