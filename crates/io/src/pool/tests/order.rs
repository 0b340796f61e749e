//! The model of `order`. Over a slot of two words, loom tries all interleavings of the functions that daemon and
//! workers use, and all values that a weakly ordered processor may see.
//!
//! The daemon's messages to a worker over a socket are left out: in the model the filler knows the number alone,
//! which is less than in reality. The words without the fence show that the model can fail.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, fence};
use loom::thread;

use crate::pool::order::{Word, current, is_still, publish, seal, unseal};

/// A word of the model.
struct Fenced(AtomicU32);

/// The same, without the acquire fence between a copy and the second load of the number.
struct Unfenced(AtomicU32);

impl Word for Fenced {
    type Value = u32;

    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}

impl Word for Unfenced {
    type Value = u32;

    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn fence(order: Ordering) {
        if order != Acquire {
            fence(order);
        }
    }
}

/// One slot: published number, the table's entry, the bytes, and the birth {generation, checksum}.
struct Slot<W> {
    generation: W,
    state: W,
    sealed: [W; 1],
    bytes: [W; 2],
    birth: [W; 2],
}

const OLD: u32 = 1;
const NEW: u32 = 2;

/// Checksum of the model's blocks, whose words are their owner's number.
fn checksum(bytes: [u32; 2]) -> u32 {
    bytes[0] << 8 | bytes[1]
}

impl<W: Word<Value = u32>> Slot<W> {
    /// A ready block of the old owner.
    fn new(word: fn(u32) -> W) -> Slot<W> {
        let sum = checksum([OLD; 2]);
        Slot {
            generation: word(OLD),
            state: word(OLD),
            sealed: [word(sum)],
            bytes: [word(OLD), word(OLD)],
            birth: [word(OLD), word(sum)],
        }
    }

    fn read<const N: usize>(words: &[W; N]) -> [u32; N] {
        std::array::from_fn(|at| words[at].load(Relaxed))
    }

    /// A copy into the slot and its birth record: in any order that processors may choose.
    fn fill(&self) {
        self.bytes.iter().for_each(|word| word.store(NEW, Relaxed));
        self.birth[1].store(checksum([NEW; 2]), Relaxed);
        self.birth[0].store(NEW, Relaxed);
    }

    /// A load of the old block that reports success has the old block's bytes and birth.
    fn load(&self) {
        if current(&self.generation) != OLD {
            return;
        }
        let (bytes, birth) = (Self::read(&self.bytes), Self::read(&self.birth));
        if is_still(&self.generation, OLD) {
            assert_eq!((bytes, birth), ([OLD; 2], [OLD, checksum([OLD; 2])]), "another owner's bytes were loaded");
        }
    }
}

/// The daemon reassigns the slot and fills it itself, as for `Put` and for blocks from a tier; a worker loads.
fn a_daemon_that_fills<W: Word<Value = u32> + Send + Sync + 'static>(word: fn(u32) -> W) {
    loom::model(move || {
        let slot = Arc::new(Slot::new(word));
        let daemon = slot.clone();
        let daemon = thread::spawn(move || {
            publish(&daemon.generation, NEW);
            daemon.fill();
        });
        slot.load();
        daemon.join().unwrap();
    });
}

/// The daemon reassigns the slot, another worker fills it, and a worker loads.
fn a_worker_that_fills<W: Word<Value = u32> + Send + Sync + 'static>(word: fn(u32) -> W) {
    loom::model(move || {
        let slot = Arc::new(Slot::new(word));
        let (daemon, filler) = (slot.clone(), slot.clone());
        let daemon = thread::spawn(move || publish(&daemon.generation, NEW));
        let filler = thread::spawn(move || {
            if current(&filler.generation) == NEW {
                filler.fill();
            }
        });
        slot.load();
        daemon.join().unwrap();
        filler.join().unwrap();
    });
}

#[test]
fn a_load_that_counts_has_the_bytes_of_the_owner_that_was_meant() {
    a_daemon_that_fills(|value| Fenced(AtomicU32::new(value)));
    a_worker_that_fills(|value| Fenced(AtomicU32::new(value)));
}

#[test]
#[should_panic(expected = "another owner's bytes were loaded")]
fn without_the_fence_behind_the_copy_a_load_counts_that_has_bytes_of_the_next_owner() {
    a_daemon_that_fills(|value| Unfenced(AtomicU32::new(value)));
}

#[test]
fn who_finds_a_slot_ready_in_the_table_finds_its_bytes_and_its_birth() {
    loom::model(|| {
        let slot = Arc::new(Slot::new(|value| Fenced(AtomicU32::new(value))));
        let daemon = slot.clone();
        let daemon = thread::spawn(move || {
            publish(&daemon.generation, NEW);
            daemon.fill();
            seal(&daemon.state, &daemon.sealed, &[checksum([NEW; 2])], NEW);
        });
        let (state, [sealed]) = unseal(&slot.state, &slot.sealed);
        if state == NEW {
            assert_eq!((sealed, current(&slot.generation)), (checksum([NEW; 2]), NEW));
            assert_eq!((Slot::read(&slot.bytes), Slot::read(&slot.birth)), ([NEW; 2], [NEW, sealed]));
        }
        daemon.join().unwrap();
    });
}
