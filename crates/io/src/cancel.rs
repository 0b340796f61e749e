//! Decides between a thread that wants to touch a slot and a waiter that wants to give up. Tiers that may never
//! answer use it.
//!
//! Invariant: exactly one of the two wins. After [`SlotGuard::give_up`] returned true, nothing touches the slot
//! again.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

const WAITS: u8 = 0;
const USES_SLOT: u8 = 1;
const GIVEN_UP: u8 = 2;

/// See the module documentation.
#[derive(Default)]
pub(crate) struct SlotGuard {
    state: AtomicU8,
    begun: OnceLock<Instant>,
}

impl SlotGuard {
    /// Runs `copy`, which touches the slot, unless the waiter was told that the operation failed.
    pub fn use_slot<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        self.state.compare_exchange(WAITS, USES_SLOT, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let result = copy();
        self.state.store(WAITS, Ordering::Release);
        Some(result)
    }

    /// After true, nothing touches the slot again. False while a copy touches the slot, which takes a short time
    /// only.
    pub fn give_up(&self) -> bool {
        self.state.compare_exchange(WAITS, GIVEN_UP, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    pub fn is_given_up(&self) -> bool {
        self.state.load(Ordering::Relaxed) == GIVEN_UP
    }

    /// Records when work on the operation began.
    pub fn begin(&self, now: Instant) {
        let _ = self.begun.set(now);
    }

    /// When work on the operation began.
    pub fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }
}
