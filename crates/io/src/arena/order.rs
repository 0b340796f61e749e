//! The order in which a slot's number, its bytes and the words that speak for them become visible, in one place, so that
//! a model can try all interleavings of the very operations that daemon and workers use.
//!
//! Who takes a slot publishes its number, then writes; who reads looks at the number, copies, and looks again. Both
//! numbers are loaded without an order of their own (a mapping that may only be read allows no other), so fences stand
//! between them and the bytes: without the second one a processor with weak order may look again before it has
//! copied, and take the new owner's bytes for the old one's.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// A word that several processes see: an atomic of the machine, or of the model.
pub(super) trait Word {
    type Value: Copy + PartialEq;
    fn load(&self, order: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value, order: Ordering);
    fn fence(order: Ordering);
}

/// The slot has the owner `generation` from now on. What this thread writes afterwards is seen with it.
pub(super) fn publish<W: Word>(word: &W, generation: W::Value) {
    word.store(generation, Release);
    W::fence(Release);
}

/// The slot's number. What is read afterwards is as new as it at least, and what is written afterwards is seen with it.
pub(super) fn current<W: Word>(word: &W) -> W::Value {
    let generation = word.load(Relaxed);
    W::fence(Ordering::AcqRel);
    generation
}

/// Whether the slot still had the owner `generation` when the last byte that this thread read was read.
pub(super) fn is_still<W: Word>(word: &W, generation: W::Value) -> bool {
    W::fence(Acquire);
    word.load(Relaxed) == generation
}

/// Makes `words` say `values`, and then the first of them count: `state`.
pub(super) fn seal<W: Word>(state: &W, words: &[W], values: &[W::Value], now: W::Value) {
    for (word, value) in words.iter().zip(values) {
        word.store(*value, Relaxed);
    }
    state.store(now, Release);
}

/// The state, and then what `words` say, as new as it at least. Whether they belong together their seal says.
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
