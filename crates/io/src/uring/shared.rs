//! The two queues between an engine's owner and its threads, and the descriptor that wakes the owner.
//!
//! Invariant: a completion is in the queue before its wake-up is sent, so an owner that polls after each wake-up
//! misses none.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::engine::{Done, Request, Work};

/// How long a dropped engine waits for its thread; a slower thread is left to end alone.
const PATIENCE: Duration = Duration::from_secs(5);

/// An eventfd: readable when something is done, on whichever disk.
pub struct Waker(OwnedFd);

impl Waker {
    /// An eventfd that does not block. Errors when the process has no descriptor left.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// The same eventfd, by a descriptor of its own.
    pub(crate) fn try_clone(&self) -> io::Result<Waker> {
        Ok(Waker(self.0.try_clone()?))
    }

    /// Makes the descriptor readable. One system call; wake-ups before a [`Waker::clear`] count once.
    pub fn wake(&self) {
        // A full counter wakes equally well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next wake-up.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Shared {
    requests: Mutex<Requests>,
    has_requests: Condvar,
    done: Mutex<Ended>,
    has_done: Condvar,
}

#[derive(Default)]
pub(super) struct Requests {
    pub queue: VecDeque<Request>,
    pub populated_bytes: u64,
    pub is_closed: bool,
    /// The engine's one thread sleeps in the kernel, or is about to, and nobody has begun to wake it.
    is_asleep: bool,
    /// Threads that wait for `has_requests`.
    waiting: usize,
    /// Requests under way that change the disk, of those that [`Shared::next`] has given.
    changing: usize,
}

impl Requests {
    /// The place of the first request that may begin.
    fn first(&self, most_changing: usize) -> Option<usize> {
        let may_change = self.changing < most_changing || self.is_closed;
        self.queue.iter().position(|request| may_change || !is_change(&request.work))
    }
}

#[derive(Default)]
struct Ended {
    queue: Vec<Done>,
    /// Threads that will add no more completions.
    ended_threads: usize,
    /// Whether the owner waits for `has_done`.
    is_awaited: bool,
}

impl Shared {
    /// Returns whether a thread that has begun to sleep is to be woken.
    pub fn submit(&self, requests: &mut VecDeque<Request>) -> bool {
        let mut shared = lock(&self.requests);
        shared.queue.append(requests);
        let (is_asleep, has_waiting) = (std::mem::take(&mut shared.is_asleep), shared.waiting > 0);
        drop(shared);
        // It is a system call also when nobody waits.
        if has_waiting {
            self.has_requests.notify_all();
        }
        is_asleep
    }

    /// From now on a submission wakes the thread. False if there are requests already, which the thread has to take.
    pub fn begin_sleep(&self) -> bool {
        let mut shared = lock(&self.requests);
        shared.is_asleep = shared.queue.is_empty();
        shared.is_asleep
    }

    pub fn end_sleep(&self) {
        lock(&self.requests).is_asleep = false;
    }

    pub fn requests(&self) -> MutexGuard<'_, Requests> {
        lock(&self.requests)
    }

    /// The next request, as soon as there is one; none once the engine is closed. At most `most_changing` of those
    /// under way change the disk: then reads go before.
    pub fn next(&self, most_changing: usize) -> Option<Request> {
        let mut requests = lock(&self.requests);
        requests.waiting += 1;
        let wanting = |requests: &mut Requests| {
            requests.first(most_changing).is_none() && !(requests.is_closed && requests.queue.is_empty())
        };
        let mut requests = self.has_requests.wait_while(requests, wanting).unwrap_or_else(PoisonError::into_inner);
        requests.waiting -= 1;
        let first = requests.first(most_changing)?;
        let next = requests.queue.remove(first)?;
        requests.changing += usize::from(is_change(&next.work));
        Some(next)
    }

    /// A request that [`Shared::next`] gave, and that changes the disk, has ended.
    pub fn changed(&self) {
        let mut requests = lock(&self.requests);
        requests.changing -= 1;
        let has_waiting = requests.waiting > 0 && !requests.queue.is_empty();
        drop(requests);
        if has_waiting {
            self.has_requests.notify_one();
        }
    }

    /// Passes `done` to the owner and wakes it.
    pub fn publish(&self, done: &mut Vec<Done>, waker: &Waker) {
        let mut ended = lock(&self.done);
        let (was_empty, is_awaited) = (ended.queue.is_empty(), ended.is_awaited);
        ended.queue.append(done);
        drop(ended);
        if is_awaited {
            self.has_done.notify_all();
        }
        if was_empty {
            waker.wake();
        }
    }

    pub fn poll(&self, done: &mut Vec<Done>) {
        done.append(&mut lock(&self.done).queue);
    }

    pub fn wait(&self, timeout: Duration) {
        let mut ended = lock(&self.done);
        ended.is_awaited = true;
        let waiting = |ended: &mut Ended| ended.queue.is_empty();
        let waited = self.has_done.wait_timeout_while(ended, timeout, waiting);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_awaited = false;
    }

    pub fn thread_ended(&self) {
        lock(&self.done).ended_threads += 1;
        self.has_done.notify_all();
    }

    /// Lets the threads end after the submitted requests, and waits for them; false if they hang.
    pub fn close(&self, threads: usize) -> bool {
        lock(&self.requests).is_closed = true;
        self.has_requests.notify_all();
        let running = |ended: &mut Ended| ended.ended_threads < threads;
        let waited = self.has_done.wait_timeout_while(lock(&self.done), PATIENCE, running);
        let (ended, _) = waited.unwrap_or_else(PoisonError::into_inner);
        ended.ended_threads == threads
    }
}

pub(super) fn is_change(work: &Work) -> bool {
    !matches!(work, Work::Read { .. })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uring::Span;

    fn read(tag: u64) -> Request {
        Request { tag, work: Work::Read { at: 0, span: Span::pool(0, 4096), checksum: None } }
    }

    fn sync(tag: u64) -> Request {
        Request { tag, work: Work::Sync }
    }

    fn next(shared: &Shared) -> Option<u64> {
        shared.next(2).map(|request| request.tag)
    }

    #[test]
    fn reads_go_on_while_changes_hang() {
        let shared = Shared::default();
        shared.submit(&mut [sync(1), sync(2), sync(3), read(4), sync(5), read(6)].into());
        assert_eq!([next(&shared), next(&shared), next(&shared)], [Some(1), Some(2), Some(4)]);
        shared.changed();
        assert_eq!([next(&shared), next(&shared)], [Some(3), Some(6)]);
    }

    #[test]
    fn a_thread_that_waits_for_a_change_to_end_takes_the_next_one() {
        let shared = Shared::default();
        shared.submit(&mut [sync(1), sync(2), sync(3)].into());
        assert_eq!([next(&shared), next(&shared)], [Some(1), Some(2)]);
        std::thread::scope(|scope| {
            let third = scope.spawn(|| next(&shared));
            while lock(&shared.requests).waiting == 0 {
                std::thread::yield_now();
            }
            shared.changed();
            assert_eq!(third.join().unwrap(), Some(3));
        });
    }

    #[test]
    fn what_was_submitted_is_done_before_the_end() {
        let shared = Shared::default();
        shared.submit(&mut [sync(1), sync(2), sync(3)].into());
        assert_eq!([next(&shared), next(&shared)], [Some(1), Some(2)]);
        lock(&shared.requests).is_closed = true;
        assert_eq!([next(&shared), next(&shared)], [Some(3), None]);
    }
}
