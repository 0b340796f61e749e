//! The queues between the tier's owner and its event loops: operations in, completions out.
//!
//! Invariant: an entry is in its queue before the reader is woken, so a reader that empties its queue after each
//! wake-up misses nothing.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use forebay_core::tier::{Completion, OpId, Operation};

use super::address::Address;
use super::in_flight::Verb;
use super::report::Counters;
use crate::uring::Waker;

/// What an event loop can do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// It has not failed yet.
    New,
    Up,
    Down,
}

/// Belongs to one event loop.
pub(super) struct Inbox {
    queue: Mutex<Queue>,
    waker: Waker,
    state: AtomicU8,
    pub connections: AtomicUsize,
    servers: Mutex<Vec<Address>>,
    pub is_closed: AtomicBool,
}

#[derive(Default)]
pub(super) struct Queue {
    pub ops: Vec<Operation>,
    pub cancelled: Vec<OpId>,
}

impl Inbox {
    pub fn new() -> std::io::Result<Inbox> {
        Ok(Inbox {
            queue: Mutex::default(),
            waker: Waker::new()?,
            state: AtomicU8::new(State::New as u8),
            connections: AtomicUsize::new(0),
            servers: Mutex::default(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// The queue for new operations; the caller must wake the event loop afterwards.
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Those to which operations go.
    pub fn servers(&self) -> MutexGuard<'_, Vec<Address>> {
        lock(&self.servers)
    }

    pub fn waker_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    /// Moves the content to `queue`, which is empty.
    pub fn take(&self, queue: &mut Queue) {
        self.waker.clear();
        std::mem::swap(queue, &mut *lock(&self.queue));
    }

    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::New,
            1 => State::Up,
            _ => State::Down,
        }
    }

    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }
}

/// Shared by all event loops.
pub(super) struct Outbox {
    done: Mutex<Done>,
    waker: Waker,
    /// Whether a read that is answered is worth telling: some were refused before.
    pub hears_reads: AtomicBool,
}

#[derive(Default)]
pub(super) struct Done {
    pub completions: Vec<Completion>,
    pub counters: Counters,
    pub last_error: Option<(String, Instant)>,
    pub said: Vec<Said>,
}

/// What a server said to an operation.
pub(super) struct Said {
    pub server: Arc<str>,
    pub verb: Verb,
    /// Why it refused; absent if it did not.
    pub refusal: Option<String>,
}

impl Outbox {
    pub fn new() -> std::io::Result<Outbox> {
        Ok(Outbox { done: Mutex::default(), waker: Waker::new()?, hears_reads: AtomicBool::new(false) })
    }

    pub fn done(&self) -> MutexGuard<'_, Done> {
        lock(&self.done)
    }

    /// Hands `completions` to the owner, with what was said, wakes it, and adds to the counts.
    pub fn publish(&self, completions: &mut Vec<Completion>, said: &mut Vec<Said>, counters: &mut Counters) {
        let mut done = lock(&self.done);
        let is_news = done.completions.is_empty() && !completions.is_empty();
        done.completions.append(completions);
        done.said.append(said);
        done.counters.add(counters);
        *counters = Counters::default();
        drop(done);
        if is_news {
            self.waker.wake();
        }
    }

    pub fn poll(&self, completions: &mut Vec<Completion>) -> Vec<Said> {
        self.waker.clear();
        let mut done = lock(&self.done);
        completions.append(&mut done.completions);
        std::mem::take(&mut done.said)
    }

    pub fn waker_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}

/// The servers of all these event loops: each finds its own.
pub(super) fn servers<'a>(inboxes: impl IntoIterator<Item = &'a Arc<Inbox>>) -> BTreeSet<Address> {
    inboxes.into_iter().flat_map(|inbox| inbox.servers().clone()).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
