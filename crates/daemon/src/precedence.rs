//! A lock that the deciding thread gets before all others.
//!
//! Other threads bring many events in a row: a disk that was opened tells of millions of blocks. A thread that gives
//! a lock back and takes it again at once is faster than one that has to wake up for it, so the deciding thread waited
//! for up to 80 ms on two cores. Now the others let it go first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use crate::turns;

/// After which the others look again whether the deciding thread has it.
const PAUSE: Duration = Duration::from_micros(20);

/// See the module documentation.
pub struct Precedence<T> {
    value: Mutex<T>,
    /// Whether the deciding thread waits for it.
    is_wanted: AtomicBool,
}

impl<T> Precedence<T> {
    pub fn new(value: T) -> Precedence<T> {
        Precedence { value: Mutex::new(value), is_wanted: AtomicBool::new(false) }
    }

    /// The deciding thread waits for the holder, and for those others that began to lock before it did. All other
    /// threads wait as long as it does. Panics if a holder has panicked.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let locked = if turns::is_deciding() {
            match self.value.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    self.is_wanted.store(true, Ordering::Release);
                    let locked = self.value.lock();
                    self.is_wanted.store(false, Ordering::Release);
                    locked
                }
                Err(TryLockError::Poisoned(poisoned)) => Err(poisoned),
                Ok(free) => Ok(free),
            }
        } else {
            while self.is_wanted.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
            }
            self.value.lock()
        };
        locked.expect("an event panicked; the daemon cannot go on with half of it done")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use super::*;
    use crate::turns::Turns;

    /// Others take the lock again as soon as they have given it back, as the threads that open disks do.
    #[test]
    fn no_other_thread_gets_it_twice_while_the_deciding_thread_waits() {
        const ROUNDS: u64 = 200;
        const OTHERS: u64 = 4;
        let (shared, went_first, is_over) = (Precedence::new(()), AtomicU64::new(0), AtomicBool::new(false));
        let other = || {
            while !is_over.load(Ordering::Relaxed) {
                let _held = shared.lock();
                went_first.fetch_add(u64::from(shared.is_wanted.load(Ordering::Acquire)), Ordering::Relaxed);
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_micros(20) {}
            }
        };
        let decide = || {
            Turns::default().begin();
            for _ in 0..ROUNDS {
                drop(shared.lock());
                std::thread::sleep(Duration::from_micros(200));
            }
            is_over.store(true, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            (0..OTHERS).for_each(|_| _ = scope.spawn(other));
            scope.spawn(decide);
        });
        let went_first = went_first.into_inner();
        assert!(went_first <= ROUNDS * OTHERS, "{went_first} events went before {ROUNDS} of the deciding thread");
    }

    #[test]
    fn a_panic_while_it_is_held_ends_the_next_holder_too() {
        let shared = Precedence::new(());
        let died = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = shared.lock();
                panic!("on purpose");
            });
            holder.join().is_err()
        });
        assert!(died);
        let next = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(shared.lock())));
        assert!(next.is_err(), "half of an event is no state");
    }
}
