//! One directory as its owner sees it: what is in flight, what is late, whether it hangs.
//!
//! Invariant: each operation that was taken completes once: by its thread, or before that because it was given up, and
//! then whatever its thread says is not heard.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Completion, Health, OpId, OpKind, Operation, Outcome};

use super::config::FsConfig;
use super::directory::Directory;
use super::keeper::Keeper;
use super::lane::{Done, Job, Lane, Queue};
use super::report::{Counters, RootReport};
use crate::ticket::Ticket;

struct Flight {
    ticket: Arc<Ticket>,
    kind: OpKind,
    length_bytes: u64,
}

/// See the module's head.
pub(super) struct Root {
    pub directory: Arc<Directory>,
    pub completions: Vec<Completion>,
    lane: Arc<Lane>,
    keeper: Keeper,
    flights: HashMap<OpId, Flight>,
    /// Loads, lookups and removals by the moment they are late, counted from when they were asked for, since somebody
    /// waits; and some that have ended.
    due: VecDeque<(Instant, OpId)>,
    /// Stores, which are late by the time that a thread has been at them: nobody waits for them.
    stores: Vec<OpId>,
    has_given_up: bool,
    hanging: usize,
    timeout: Duration,
    max_block_bytes: u64,
    /// Of loads, finds, stores.
    queue_limits: [usize; 3],
    counters: Counters,
}

impl Root {
    pub fn new(directory: Arc<Directory>, lane: Arc<Lane>, keeper: Keeper, config: &FsConfig) -> Root {
        Root {
            directory,
            completions: Vec::new(),
            lane,
            keeper,
            flights: HashMap::new(),
            due: VecDeque::new(),
            stores: Vec::new(),
            has_given_up: false,
            hanging: 0,
            timeout: config.timeout,
            max_block_bytes: config.max_block_bytes,
            queue_limits: [config.queued_loads, config.queued_finds, config.queued_stores],
            counters: Counters::default(),
        }
    }

    /// Takes the operation; false if its queue is full.
    pub fn take(&mut self, op: &Operation) -> bool {
        if let Some(kind) = self.refusal(op) {
            self.flights.insert(op.id, Flight { ticket: Arc::default(), kind: op.kind, length_bytes: op.length_bytes });
            self.complete(op.id, Outcome::Failed(kind), false);
            return true;
        }
        let queue = Queue::of(op.kind);
        if self.lane.waiting(queue) >= self.queue_limits[queue as usize] {
            return false;
        }
        let ticket = Arc::<Ticket>::default();
        self.flights.insert(op.id, Flight { ticket: ticket.clone(), kind: op.kind, length_bytes: op.length_bytes });
        match queue {
            Queue::Stores => self.stores.push(op.id),
            _ => self.due.push_back((Instant::now() + self.timeout, op.id)),
        }
        self.lane.push(Job { op: *op, ticket });
        true
    }

    /// Lets what was taken begin.
    pub fn start(&self) {
        self.lane.wake_threads();
    }

    pub fn poll(&mut self) {
        let mut done = Vec::new();
        self.lane.poll(&mut done);
        for Done { id, outcome, was_there } in done {
            self.complete(id, outcome, was_there);
        }
        while self.due.front().is_some_and(|(_, id)| !self.flights.contains_key(id)) {
            self.due.pop_front();
        }
    }

    /// Gives up what is late, and what waits for threads that hang.
    pub fn advance(&mut self) {
        let now = Instant::now();
        while let Some((_, id)) = self.due.pop_front_if(|(at, _)| *at <= now) {
            // One that is being copied this moment is over before it is late again.
            if self.flights.contains_key(&id) && !self.give_up(id) {
                self.due.push_back((now + self.timeout, id));
            }
        }
        let late_stores: Vec<OpId> = self.stores.iter().copied().filter(|id| self.is_late_store(id, now)).collect();
        for id in late_stores {
            self.give_up(id);
        }
        self.stores.retain(|id| self.flights.contains_key(id));
        self.hanging = self.lane.hanging(self.timeout);
        let (_, stores) = self.lane.widths();
        if self.hanging >= stores {
            self.answer_waiting(Queue::Stores);
        }
        if self.health() != Health::Healthy {
            self.answer_waiting(Queue::Loads);
            self.answer_waiting(Queue::Finds);
        }
        if std::mem::take(&mut self.has_given_up) {
            self.lane.forget_given_up();
        }
    }

    /// Completes the operation as late, unless it is over or being copied this moment.
    pub fn give_up(&mut self, id: OpId) -> bool {
        let is_given_up = self.flights.get(&id).is_some_and(|flight| flight.ticket.give_up());
        if is_given_up {
            self.counters.given_up += 1;
            self.has_given_up = true;
            self.complete(id, Outcome::Failed(ErrorKind::Timeout), false);
        }
        is_given_up
    }

    /// After which an operation's waiter is told that it failed.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sick when all threads hang that can transfer at a time; well again as soon as one of them comes back, for then
    /// the mount answers.
    pub fn health(&self) -> Health {
        let (transfers, _) = self.lane.widths();
        if self.hanging >= transfers { Health::Sick(ErrorKind::Timeout) } else { Health::Healthy }
    }

    /// Ends all operations, and lets the threads end. Once [`Root::wait_for_end`] has returned no slot is touched any
    /// more, whatever hangs.
    pub fn close(&mut self) {
        let is_over = |flight: &Flight| flight.ticket.give_up() || flight.ticket.is_given_up();
        // A copy that runs this moment ends before its thread does, which is waited for.
        self.flights.retain(|_, flight| !is_over(flight));
        self.lane.close();
        self.keeper.close();
    }

    pub fn wait_for_end(&self, deadline: Instant) {
        self.lane.wait_for_end(deadline);
        self.keeper.wait_for_end(deadline);
    }

    pub fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.completions.is_empty()
    }

    pub fn wait(&self, timeout: Duration) {
        self.lane.wait(timeout);
    }

    pub fn report(&self) -> RootReport {
        let sweeps = &self.keeper.sweeps;
        let counters = Counters {
            evicted_blocks: sweeps.evicted_blocks.load(Relaxed),
            evicted_bytes: sweeps.evicted_bytes.load(Relaxed),
            expired_blocks: sweeps.expired_blocks.load(Relaxed),
            removed_orphans: sweeps.orphans.load(Relaxed),
            sweeps: sweeps.walks.load(Relaxed),
            misread_blocks: self.directory.misreads.load(Relaxed),
            ..self.counters
        };
        RootReport {
            path: self.directory.path.clone(),
            id: self.directory.id,
            health: self.health(),
            read_only: self.directory.read_only.clone(),
            used_bytes: self.directory.ledger.last_used_bytes(),
            capacity_bytes: self.directory.ledger.capacity_bytes(),
            counted_blocks: sweeps.blocks.load(Relaxed),
            is_sweeper: sweeps.is_sweeper.load(Relaxed),
            threads: self.lane.threads(),
            hanging_threads: self.hanging,
            buffers: self.lane.buffers(),
            waiting_loads: self.lane.waiting(Queue::Loads),
            waiting_finds: self.lane.waiting(Queue::Finds),
            waiting_stores: self.lane.waiting(Queue::Stores),
            in_flight: self.flights.len(),
            counters,
        }
    }

    /// Why an operation is not even tried.
    fn refusal(&self, op: &Operation) -> Option<ErrorKind> {
        let is_change = matches!(op.kind, OpKind::Store | OpKind::Remove { .. });
        if is_change && self.directory.read_only.is_some() {
            return Some(ErrorKind::Unsupported);
        }
        let is_transfer = matches!(op.kind, OpKind::Store | OpKind::Load { .. });
        let fits = (1..=self.max_block_bytes).contains(&op.length_bytes);
        (is_transfer && !fits).then_some(ErrorKind::Invalid)
    }

    fn is_late_store(&self, id: &OpId, now: Instant) -> bool {
        let begun = self.flights.get(id).and_then(|flight| flight.ticket.begun());
        begun.is_some_and(|begun| now.saturating_duration_since(begun) > self.timeout)
    }

    fn answer_waiting(&mut self, queue: Queue) {
        for job in self.lane.take_waiting(queue) {
            self.complete(job.op.id, Outcome::Failed(ErrorKind::Unavailable), false);
        }
    }

    fn complete(&mut self, id: OpId, outcome: Outcome, was_there: bool) {
        let Some(flight) = self.flights.remove(&id) else { return };
        self.count(&flight, outcome, was_there);
        if outcome == Outcome::Failed(ErrorKind::Full) {
            self.keeper.hurry();
        }
        self.completions.push(Completion { id, outcome });
    }

    fn count(&mut self, flight: &Flight, outcome: Outcome, was_there: bool) {
        let counters = &mut self.counters;
        match (flight.kind, outcome) {
            (_, Outcome::Stored(_)) if was_there => counters.repeated_stores += 1,
            (_, Outcome::Stored(_)) => {
                counters.stored_blocks += 1;
                counters.stored_bytes += flight.length_bytes;
            }
            (_, Outcome::Loaded { length_bytes, .. }) => {
                counters.loaded_blocks += 1;
                counters.loaded_bytes += length_bytes;
            }
            (_, Outcome::Found(_)) => counters.found_blocks += 1,
            (_, Outcome::Removed) => counters.removed_blocks += 1,
            (OpKind::Load { .. }, Outcome::Absent) => counters.absent_loads += 1,
            (OpKind::Load { .. }, Outcome::Failed(ErrorKind::Corrupt)) => counters.corrupt_blocks += 1,
            (OpKind::Load { .. }, Outcome::Failed(_)) => counters.failed_loads += 1,
            (OpKind::Store, Outcome::Failed(kind)) => {
                counters.failed_stores += 1;
                counters.full_stores += u64::from(kind == ErrorKind::Full);
            }
            (_, Outcome::Absent | Outcome::Failed(_)) => {}
        }
    }
}
