//! The order in which a slot's number, its bytes and the words that vouch for them become visible. All of it is in
//! one place, so that a model can try all interleavings of the same operations that daemon and workers use.
//!
//! A new owner of a slot publishes its number, then writes. A reader loads the number, copies, and loads the number
//! again. Both loads are relaxed (a read-only mapping allows no other), so fences stand between them and the bytes.
//! Without the second fence a weakly ordered processor may load the number again before it has copied, and take the
//! new owner's bytes for the old one's.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// A word shared by several processes: an atomic of the machine, or of the model.
pub(super) trait Word {
    type Value: Copy + PartialEq;
    fn load(&self, order: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value, order: Ordering);
    fn fence(order: Ordering);
}

/// Makes `generation` the slot's owner. Later writes of this thread become visible after it.
pub(super) fn publish<W: Word>(word: &W, generation: W::Value) {
    word.store(generation, Release);
    W::fence(Release);
}

/// The slot's number. Later reads are at least as new as the number, and later writes become visible with it.
pub(super) fn current<W: Word>(word: &W) -> W::Value {
    let generation = word.load(Relaxed);
    W::fence(Ordering::AcqRel);
    generation
}

/// Whether `generation` still owned the slot when this thread read its last byte.
pub(super) fn is_still<W: Word>(word: &W, generation: W::Value) -> bool {
    W::fence(Acquire);
    word.load(Relaxed) == generation
}

/// Stores `values` into `words`, then `now` into `state`, which makes them valid.
pub(super) fn seal<W: Word>(state: &W, words: &[W], values: &[W::Value], now: W::Value) {
    for (word, value) in words.iter().zip(values) {
        word.store(*value, Relaxed);
    }
    state.store(now, Release);
}

/// The state, then the content of `words`, which is at least as new. Their seal shows whether they belong together.
pub(super) fn unseal<W: Word, const N: usize>(state: &W, words: &[W]) -> (W::Value, [W::Value; N]) {
    let now = state.load(Acquire);
    (now, std::array::from_fn(|at| words[at].load(Relaxed)))
}

impl Word for AtomicU32 {
    type Value = u32;

    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Word for AtomicU64 {
    type Value = u64;

    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}
