//! One directory's queues, threads and bounce buffers.
//!
//! Invariants: a thread has one job at a time, and one buffer if the job is a transfer. There are never more buffers
//! than configured. The first thread does no stores and stores never take the last buffer, so slow or hanging writes
//! leave resources for lookups and loads. A job whose [`SlotGuard`] was given up does not touch its slot.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, mem};

use forebay_core::tier::{OpId, OpKind, Operation, Outcome};
use forebay_core::{ErrorKind, NamespaceId};

use super::aside;
use super::buffer::Buffer;
use super::directory::{Directory, Visit};
use super::{reader, writer};
use crate::cancel::SlotGuard;
use crate::uring::{Region, Waker};

/// Lookups are cheap: a thread takes this many at once.
const FINDS_AT_ONCE: usize = 16;
pub(super) struct Job {
    pub op: Operation,
    pub guard: Arc<SlotGuard>,
}

pub(super) struct Done {
    pub id: OpId,
    pub outcome: Outcome,
    /// A store whose block was already there.
    pub was_there: bool,
}

/// The kinds of jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    Loads,
    Finds,
    Stores,
}

impl Queue {
    pub fn of(kind: OpKind) -> Queue {
        match kind {
            OpKind::Load => Queue::Loads,
            OpKind::Exists | OpKind::Remove | OpKind::Touch { .. } => Queue::Finds,
            OpKind::Store => Queue::Stores,
        }
    }
}

/// See the module documentation.
pub(super) struct IoThreads {
    directory: Arc<Directory>,
    pool: Region,
    waker: Arc<Waker>,
    max_buffers: usize,
    /// What each thread is at.
    busy: Vec<Mutex<Option<Busy>>>,
    state: Mutex<State>,
    has_jobs: Condvar,
    done: Mutex<Vec<Done>>,
    has_done: Condvar,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

struct Busy {
    since: Instant,
    /// Of the block that it stores.
    stores: Option<NamespaceId>,
}

#[derive(Default)]
struct State {
    loads: VecDeque<Job>,
    finds: VecDeque<Job>,
    stores: VecDeque<Job>,
    free_buffers: Vec<Buffer>,
    buffers: usize,
    is_closed: bool,
}

/// What a thread does next.
enum Work {
    Finds(Vec<Job>),
    Transfer(Job, Option<Buffer>),
}

impl IoThreads {
    pub fn start(
        directory: Arc<Directory>,
        pool: Region,
        waker: Arc<Waker>,
        streams: u32,
        buffers: u32,
    ) -> io::Result<Arc<IoThreads>> {
        let io_threads = Arc::new(IoThreads {
            directory,
            pool,
            waker,
            max_buffers: buffers as usize,
            busy: (0..streams).map(|_| Mutex::default()).collect(),
            state: Mutex::default(),
            has_jobs: Condvar::new(),
            done: Mutex::default(),
            has_done: Condvar::new(),
            handles: Mutex::default(),
        });
        for number in 0..streams as usize {
            let (theirs, waker) = (io_threads.clone(), io_threads.waker.clone());
            let handle = aside::spawn("forebay-fs", Some(waker), move || theirs.serve(number))?;
            lock(&io_threads.handles).push(handle);
        }
        Ok(io_threads)
    }

    pub fn push(&self, job: Job) {
        lock(&self.state).queue(Queue::of(job.op.kind)).push_back(job);
    }

    /// Wakes threads for new jobs.
    pub fn wake_threads(&self) {
        self.has_jobs.notify_all();
    }

    pub fn waiting(&self, queue: Queue) -> usize {
        lock(&self.state).queue(queue).len()
    }

    /// Drops jobs that were given up. A hanging thread would never take them.
    pub fn forget_given_up(&self) {
        let mut state = lock(&self.state);
        for queue in [Queue::Loads, Queue::Finds, Queue::Stores] {
            state.queue(queue).retain(|job| !job.guard.is_given_up());
        }
    }

    /// Takes all waiting jobs out of a queue.
    pub fn take_waiting(&self, queue: Queue) -> Vec<Job> {
        lock(&self.state).queue(queue).drain(..).collect()
    }

    pub fn poll(&self, done: &mut Vec<Done>) {
        done.append(&mut lock(&self.done));
    }

    /// Blocks until some job is done.
    pub fn wait(&self, timeout: Duration) {
        let _ = self.has_done.wait_timeout_while(lock(&self.done), timeout, |done| done.is_empty());
    }

    /// How many threads have been at one job for longer than `timeout`.
    pub fn hanging(&self, timeout: Duration) -> usize {
        let hangs = |busy: &Busy| busy.since.elapsed() > timeout;
        self.busy.iter().filter(|busy| lock(busy).as_ref().is_some_and(hangs)).count()
    }

    /// Whether a thread is at a store of one of these namespaces, also at one that was given up.
    pub fn is_storing(&self, is_theirs: impl Fn(NamespaceId) -> bool) -> bool {
        self.busy.iter().any(|busy| lock(busy).as_ref().and_then(|busy| busy.stores).is_some_and(&is_theirs))
    }

    pub fn threads(&self) -> usize {
        self.busy.len()
    }

    /// How many transfers run at a time, and how many of them may be stores.
    pub fn widths(&self) -> (usize, usize) {
        let stores = (self.threads() - self.first_writer()).min(self.max_buffers.saturating_sub(1).max(1));
        (self.threads().min(self.max_buffers), stores)
    }

    pub fn buffers(&self) -> usize {
        lock(&self.state).buffers
    }

    /// Lets the threads end after their current jobs.
    pub fn close(&self) {
        lock(&self.state).is_closed = true;
        self.has_jobs.notify_all();
    }

    /// Waits for the threads after `close`; threads that hang are left to end alone.
    pub fn wait_for_end(&self, deadline: Instant) {
        if !aside::have_ended(&mut lock(&self.handles), deadline) {
            // The last to drop the memory closes descriptors of the process, which a directory's thread cannot.
            mem::forget(self.pool.clone());
        }
    }

    fn first_writer(&self) -> usize {
        usize::from(self.threads() > 1)
    }

    fn serve(&self, number: usize) {
        let mut visit = Visit::default();
        while let Some(work) = self.next(number, &mut visit) {
            match work {
                Work::Finds(jobs) => jobs.into_iter().for_each(|job| {
                    self.begin(number, &job);
                    let outcome = match job.op.kind {
                        _ if job.guard.is_given_up() => Outcome::Failed(ErrorKind::Timeout),
                        OpKind::Exists => reader::find(&self.directory, &mut visit, &job.op),
                        OpKind::Touch { fresh_seconds } => {
                            let fresh = Duration::from_secs(fresh_seconds.into());
                            reader::note(&self.directory, &mut visit, &job.op, fresh)
                        }
                        _ => writer::remove(&self.directory, &job.op),
                    };
                    self.finish(Done { id: job.op.id, outcome, was_there: false });
                }),
                Work::Transfer(job, buffer) => {
                    self.begin(number, &job);
                    self.transfer(&job, &mut visit, buffer);
                }
            }
            *lock(&self.busy[number]) = None;
        }
    }

    fn begin(&self, number: usize, job: &Job) {
        let now = Instant::now();
        let stores = (job.op.kind == OpKind::Store).then_some(job.op.key.namespace);
        *lock(&self.busy[number]) = Some(Busy { since: now, stores });
        job.guard.begin(now);
    }

    /// Moves one block. The buffer is freed before the completion is reported, so that a job that waits for a buffer
    /// can continue.
    fn transfer(&self, job: &Job, visit: &mut Visit, buffer: Option<Buffer>) {
        let length_bytes = job.op.length_bytes;
        let buffer = buffer.filter(|buffer| buffer.fits(length_bytes));
        let mut buffer = buffer.or_else(|| Buffer::new(&self.pool, length_bytes).ok());
        let (outcome, was_there) = match &mut buffer {
            Some(_) if job.guard.is_given_up() => (Outcome::Failed(ErrorKind::Timeout), false),
            None => (Outcome::Failed(ErrorKind::Unavailable), false),
            Some(buffer) if job.op.kind == OpKind::Store => writer::store(&self.directory, buffer, &job.op, &job.guard),
            Some(buffer) => (reader::load(&self.directory, visit, buffer, &job.op, &job.guard), false),
        };
        let mut state = lock(&self.state);
        match buffer {
            Some(buffer) => state.free_buffers.push(buffer),
            None => state.buffers -= 1,
        }
        drop(state);
        self.has_jobs.notify_one();
        self.finish(Done { id: job.op.id, outcome, was_there });
    }

    fn finish(&self, done: Done) {
        let mut all = lock(&self.done);
        let was_empty = all.is_empty();
        all.push(done);
        drop(all);
        self.has_done.notify_all();
        if was_empty {
            self.waker.wake();
        }
    }

    /// The next job for a thread, as soon as there is one; none after `close` once all jobs are done.
    fn next(&self, number: usize, visit: &mut Visit) -> Option<Work> {
        let does_stores = number >= self.first_writer();
        let mut state = lock(&self.state);
        loop {
            if let Some(work) = state.pick(number == 0, does_stores, self.max_buffers) {
                return Some(work);
            }
            if state.is_closed {
                return None;
            }
            if visit.is_open() {
                // Leaving may take as long as a mount does: others go on meanwhile.
                drop(state);
                visit.leave();
                state = lock(&self.state);
                continue;
            }
            state = self.has_jobs.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    fn queue(&mut self, queue: Queue) -> &mut VecDeque<Job> {
        match queue {
            Queue::Loads => &mut self.loads,
            Queue::Finds => &mut self.finds,
            Queue::Stores => &mut self.stores,
        }
    }

    /// Loads before lookups before stores. One thread takes lookups first, because they would otherwise wait behind
    /// long loads.
    fn pick(&mut self, finds_first: bool, does_stores: bool, max_buffers: usize) -> Option<Work> {
        let left = self.free_buffers.len() + max_buffers - self.buffers;
        let has_buffer = left > 0;
        // Hanging stores leave a buffer for loads, if there is more than one.
        let does_stores = does_stores && left >= max_buffers.min(2);
        if !self.finds.is_empty() && (finds_first || !has_buffer || self.loads.is_empty()) {
            let count = self.finds.len().min(FINDS_AT_ONCE);
            return Some(Work::Finds(self.finds.drain(..count).collect()));
        }
        if !has_buffer {
            return None;
        }
        let job = self.loads.pop_front().or_else(|| self.stores.pop_front_if(|_| does_stores))?;
        let buffer = self.free_buffers.pop();
        self.buffers += usize::from(buffer.is_none());
        Some(Work::Transfer(job, buffer))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
