//! One directory from the tier's side: what is in flight, what is late, whether the directory hangs.
//!
//! Invariant: each accepted operation completes once: by its thread, or earlier because it was given up. In the
//! second case the thread's result is ignored.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Completion, Health, OpId, OpKind, Operation, Outcome};
use rustix::io::Errno;

use super::config::FsConfig;
use super::directory::{Directory, Loss};
use super::io_threads::{Done, IoThreads, Job, Queue};
use super::purge;
use super::report::{Counters, RootReport};
use super::sweeper::SweeperHandle;
use crate::cancel::SlotGuard;
use crate::purge::Place;
use crate::refusals::{Refusals, Refused, joined};

const WRITE_HINT: &str = "make room, or let the daemon's user write in the directory";
const READ_HINT: &str =
    "let the daemon's user list the directory and read its files; look for errors of its device, server or network";

struct Flight {
    guard: Arc<SlotGuard>,
    kind: OpKind,
    length_bytes: u64,
}

/// See the module documentation.
pub(super) struct Root {
    pub directory: Arc<Directory>,
    pub completions: Vec<Completion>,
    io_threads: Arc<IoThreads>,
    sweeper: SweeperHandle,
    flights: HashMap<OpId, Flight>,
    /// Loads, lookups and removals in the order of their deadlines, which run from the request because somebody
    /// waits. Some entries may have ended already.
    due: VecDeque<(Instant, OpId)>,
    /// Stores. Their deadline runs from when a thread starts them, since nobody waits for them.
    stores: Vec<OpId>,
    has_given_up: bool,
    hanging: usize,
    /// After this time an operation's waiter is told that it failed.
    timeout: Duration,
    max_block_bytes: u64,
    /// For loads, finds, stores.
    queue_limits: [usize; 3],
    counters: Counters,
    refused_stores: Refusals,
    refused_loads: Refusals,
    /// Apart from those of loads: a file that this user may not read is found all the same.
    refused_probes: Refusals,
}

impl Root {
    pub fn new(
        directory: Arc<Directory>,
        io_threads: Arc<IoThreads>,
        sweeper: SweeperHandle,
        config: &FsConfig,
    ) -> Root {
        let refused_stores = Refusals::found(Refused::Writes, WRITE_HINT, directory.last_refusal().map(said));
        Root {
            directory,
            completions: Vec::new(),
            io_threads,
            sweeper,
            flights: HashMap::new(),
            due: VecDeque::new(),
            stores: Vec::new(),
            has_given_up: false,
            hanging: 0,
            timeout: config.timeout,
            max_block_bytes: config.max_block_bytes,
            queue_limits: [config.queued_loads, config.queued_finds, config.queued_stores],
            counters: Counters::default(),
            refused_stores,
            refused_loads: Refusals::of(Refused::Reads, READ_HINT),
            refused_probes: Refusals::of(Refused::Reads, READ_HINT),
        }
    }

    /// Accepts the operation; false if its queue is full.
    pub fn take(&mut self, op: &Operation) -> bool {
        if let Some(kind) = self.refusal(op) {
            self.flights.insert(op.id, Flight { guard: Arc::default(), kind: op.kind, length_bytes: op.length_bytes });
            self.complete(op.id, Outcome::Failed(kind), false);
            return true;
        }
        let queue = Queue::of(op.kind);
        if self.io_threads.waiting(queue) >= self.queue_limits[queue as usize] {
            return false;
        }
        let guard = Arc::<SlotGuard>::default();
        self.flights.insert(op.id, Flight { guard: guard.clone(), kind: op.kind, length_bytes: op.length_bytes });
        match queue {
            Queue::Stores => self.stores.push(op.id),
            _ => self.due.push_back((Instant::now() + self.timeout, op.id)),
        }
        self.io_threads.push(Job { op: *op, guard });
        true
    }

    /// Starts the accepted operations.
    pub fn start(&self) {
        self.io_threads.wake_threads();
    }

    pub fn poll(&mut self) {
        let mut done = Vec::new();
        self.io_threads.poll(&mut done);
        for Done { id, outcome, was_there } in done {
            self.complete(id, outcome, was_there);
        }
        while self.due.front().is_some_and(|(_, id)| !self.flights.contains_key(id)) {
            self.due.pop_front();
        }
    }

    /// Gives up operations that are late, and those that wait for hanging threads.
    pub fn advance(&mut self) {
        let now = Instant::now();
        while let Some((_, id)) = self.due.pop_front_if(|(at, _)| *at <= now) {
            // An operation that is being copied now ends before it is late again.
            if self.flights.contains_key(&id) && !self.give_up(id) {
                self.due.push_back((now + self.timeout, id));
            }
        }
        let late_stores: Vec<OpId> = self.stores.iter().copied().filter(|id| self.is_late_store(id, now)).collect();
        for id in late_stores {
            self.give_up(id);
        }
        self.stores.retain(|id| self.flights.contains_key(id));
        self.hanging = self.io_threads.hanging(self.timeout);
        let (_, stores) = self.io_threads.widths();
        if self.hanging >= stores {
            self.answer_waiting(Queue::Stores);
        }
        if self.health() != Health::Healthy {
            self.answer_waiting(Queue::Loads);
            self.answer_waiting(Queue::Finds);
        }
        if std::mem::take(&mut self.has_given_up) {
            self.io_threads.forget_given_up();
        }
        // Room may have been made since the last store: the next one shows.
        if !matches!(self.directory.last_refusal(), None | Some(Errno::NOSPC | Errno::DQUOT)) {
            self.judge_refusals(now);
        }
    }

    /// Completes the operation as late, unless it has ended or is being copied now.
    pub fn give_up(&mut self, id: OpId) -> bool {
        let is_given_up = self.flights.get(&id).is_some_and(|flight| flight.guard.give_up());
        if is_given_up {
            self.counters.given_up += 1;
            self.has_given_up = true;
            self.complete(id, Outcome::Failed(ErrorKind::Timeout), false);
        }
        is_given_up
    }

    /// Where its blocks are, for purges of namespaces.
    pub fn place(&self) -> Place {
        purge::place(&self.directory, &self.io_threads, self.timeout)
    }

    /// Sick when all threads hang that can transfer at a time. Healthy again as soon as one of them returns, since
    /// the mount then answers.
    pub fn health(&self) -> Health {
        let (transfers, _) = self.io_threads.widths();
        if self.hanging >= transfers { Health::Sick(ErrorKind::Timeout) } else { Health::Healthy }
    }

    /// None while the directory is at its path. Does no I/O.
    pub fn loss(&self) -> Option<Loss> {
        self.sweeper.sweeps.loss.get().copied()
    }

    /// Ends all operations as failed, and lets the threads end. One that copies at this moment ends with its thread, or
    /// when this is called again.
    pub fn abandon(&mut self) {
        let over = self.flights.iter().filter(|(_, flight)| flight.guard.give_up()).map(|(id, _)| *id);
        for id in over.collect::<Vec<_>>() {
            self.complete(id, Outcome::Failed(ErrorKind::Unavailable), false);
        }
        self.io_threads.forget_given_up();
        self.io_threads.close();
        self.sweeper.close();
    }

    /// Ends all operations, and lets the threads end. After [`Root::wait_for_end`] has returned nothing touches a
    /// slot, whatever hangs.
    pub fn close(&mut self) {
        let is_over = |flight: &Flight| flight.guard.give_up() || flight.guard.is_given_up();
        // A running copy ends before its thread does, and the thread is waited for.
        self.flights.retain(|_, flight| !is_over(flight));
        self.io_threads.close();
        self.sweeper.close();
    }

    pub fn wait_for_end(&self, deadline: Instant) {
        self.io_threads.wait_for_end(deadline);
        self.sweeper.wait_for_end(deadline);
    }

    pub fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.completions.is_empty()
    }

    pub fn wait(&self, timeout: Duration) {
        self.io_threads.wait(timeout);
    }

    pub fn report(&self) -> RootReport {
        let sweeps = &self.sweeper.sweeps;
        let counters = Counters {
            evicted_blocks: sweeps.evicted_blocks.load(Relaxed),
            evicted_bytes: sweeps.evicted_bytes.load(Relaxed),
            expired_blocks: sweeps.expired_blocks.load(Relaxed),
            removed_orphans: sweeps.orphans.load(Relaxed),
            skipped_folders: sweeps.skipped_folders.load(Relaxed),
            sweeps: sweeps.walks.load(Relaxed),
            misread_blocks: self.directory.misreads.load(Relaxed),
            ..self.counters
        };
        let refused_reads =
            [&self.refused_loads, &self.refused_probes].into_iter().find(|reads| reads.told().is_some());
        RootReport {
            path: self.directory.path.clone(),
            id: self.directory.id,
            health: self.health(),
            missing: None,
            is_read_only: self.directory.is_read_only,
            refuses_writes: self.refused_stores.told(),
            refuses_reads: refused_reads.and_then(Refusals::told),
            hint: joined([refused_reads.and_then(Refusals::hint), self.refused_stores.hint()]),
            used_bytes: self.directory.grants.last_used_bytes(),
            capacity_bytes: self.directory.grants.capacity_bytes(),
            counted_blocks: sweeps.blocks.load(Relaxed),
            is_sweeper: sweeps.is_sweeper.load(Relaxed),
            threads: self.io_threads.threads(),
            hanging_threads: self.hanging,
            buffers: self.io_threads.buffers(),
            waiting_loads: self.io_threads.waiting(Queue::Loads),
            waiting_finds: self.io_threads.waiting(Queue::Finds),
            waiting_stores: self.io_threads.waiting(Queue::Stores),
            in_flight: self.flights.len(),
            counters,
        }
    }

    /// Why an operation is refused at once.
    fn refusal(&self, op: &Operation) -> Option<ErrorKind> {
        let is_change = matches!(op.kind, OpKind::Store | OpKind::Remove | OpKind::Touch { .. });
        if is_change && self.directory.is_read_only {
            return Some(ErrorKind::Unsupported);
        }
        let is_transfer = matches!(op.kind, OpKind::Store | OpKind::Load);
        let fits = (1..=self.max_block_bytes).contains(&op.length_bytes);
        (is_transfer && !fits).then_some(ErrorKind::Invalid)
    }

    fn is_late_store(&self, id: &OpId, now: Instant) -> bool {
        let begun = self.flights.get(id).and_then(|flight| flight.guard.begun());
        begun.is_some_and(|begun| now.saturating_duration_since(begun) > self.timeout)
    }

    fn answer_waiting(&mut self, queue: Queue) {
        for job in self.io_threads.take_waiting(queue) {
            self.complete(job.op.id, Outcome::Failed(ErrorKind::Unavailable), false);
        }
    }

    fn complete(&mut self, id: OpId, outcome: Outcome, was_there: bool) {
        let Some(flight) = self.flights.remove(&id) else { return };
        self.count(&flight, outcome, was_there);
        match flight.kind {
            OpKind::Store if !self.directory.is_read_only => self.note_store(outcome, was_there),
            OpKind::Load => note_read(&mut self.refused_loads, &self.directory, outcome),
            OpKind::Exists => note_read(&mut self.refused_probes, &self.directory, outcome),
            _ => {}
        }
        if outcome == Outcome::Failed(ErrorKind::Full) {
            self.sweeper.hurry();
        }
        self.completions.push(Completion { id, outcome });
    }

    fn note_store(&mut self, outcome: Outcome, was_there: bool) {
        let now = Instant::now();
        match outcome {
            Outcome::Stored if !was_there => self.refused_stores.taken(&self.directory.path.to_string_lossy(), now),
            Outcome::Failed(ErrorKind::Full | ErrorKind::Unsupported | ErrorKind::Io) => {
                self.refused_stores.refused(now);
                self.judge_refusals(now);
            }
            _ => {}
        }
    }

    fn judge_refusals(&mut self, now: Instant) {
        let error = self.directory.last_refusal();
        let why = || error.map_or_else(|| "its capacity is used".to_string(), said);
        self.refused_stores.judge(&self.directory.path.to_string_lossy(), now, why);
    }

    fn count(&mut self, flight: &Flight, outcome: Outcome, was_there: bool) {
        let counters = &mut self.counters;
        match (flight.kind, outcome) {
            (_, Outcome::Stored) if was_there => counters.repeated_stores += 1,
            (_, Outcome::Stored) => {
                counters.stored_blocks += 1;
                counters.stored_bytes += flight.length_bytes;
            }
            (_, Outcome::Loaded { length_bytes, .. }) => {
                counters.loaded_blocks += 1;
                counters.loaded_bytes += length_bytes;
            }
            (OpKind::Exists, Outcome::Found) => counters.found_blocks += 1,
            (_, Outcome::Removed) => counters.removed_blocks += 1,
            (OpKind::Load, Outcome::Absent) => counters.absent_loads += 1,
            (OpKind::Load, Outcome::Failed(ErrorKind::Corrupt)) => counters.corrupt_blocks += 1,
            (OpKind::Load, Outcome::Failed(_)) => counters.failed_loads += 1,
            (OpKind::Store, Outcome::Failed(kind)) => {
                counters.failed_stores += 1;
                counters.full_stores += u64::from(kind == ErrorKind::Full);
            }
            (_, Outcome::Found | Outcome::Absent | Outcome::Failed(_)) => {}
        }
    }
}

/// What a load or a probe says of whether the directory answers such operations.
fn note_read(refused: &mut Refusals, directory: &Directory, outcome: Outcome) {
    let (path, now) = (directory.path.to_string_lossy(), Instant::now());
    match outcome {
        Outcome::Failed(kind @ (ErrorKind::Unsupported | ErrorKind::Io)) => {
            refused.refused(now);
            refused.judge(&path, now, || match kind {
                ErrorKind::Io => "reads fail with input/output errors".to_string(),
                _ => said(Errno::ACCESS),
            });
        }
        Outcome::Loaded { .. } | Outcome::Found | Outcome::Absent | Outcome::Failed(ErrorKind::Corrupt) => {
            refused.taken(&path, now);
        }
        _ => {}
    }
}

/// What the system said of a refusal.
fn said(error: Errno) -> String {
    io::Error::from(error).to_string()
}
