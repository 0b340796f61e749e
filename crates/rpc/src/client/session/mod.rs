//! The scheduler side of one engine.
//!
//! Invariants: no call waits for the daemon, except `Ticket::poll` and `close`, for a given time at most. Every lease
//! and slot that the engine received is recorded in [`holdings`] until the daemon has acknowledged its return.
//! Recorded leases and slots are declared again after a reconnect. Replies of an earlier connection are never
//! applied: the calls of a connection are dropped with it. Every queue has a limit ([`limits`]). At the limit a
//! lookup is a miss, a reservation is refused, a commit becomes an abort, and each is counted.
//!
//! In path order: this file has the engine's calls; [`config`] is what the engine says at the start; [`ticket`] has
//! both ends of a lookup, and [`answer`] is what passes between them; [`shared`] is the state of both threads;
//! [`holdings`] records the leases and slots that the engine holds, and is made of [`link`] (the state of the
//! connection), [`leases`], [`stock`], [`outbox`] and [`hints`]; [`thread`] connects and reconnects; [`calls`] has the
//! tasks of one connection.
//!
//! A forked child has the holdings but not the thread: a session must be made after the fork.

mod answer;
mod calls;
mod config;
mod hints;
mod holdings;
mod leases;
pub mod limits;
mod link;
mod outbox;
mod shared;
mod stats;
mod stock;
mod thread;
mod ticket;

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use forebay_core::{Error, Result};

use crate::Hashes;
use crate::proto::Held;

pub use config::{Namespace, SessionConfig};
pub use link::SessionState;
pub use stats::Stats;
pub use ticket::Ticket;

use answer::{Answer, Cell};
use outbox::Saved;
use shared::Shared;
use ticket::Lookup;

/// See the module documentation. Shared by threads; dropping it ends the session without waiting.
pub struct EngineSession {
    shared: Arc<Shared>,
    lookups: tokio::sync::mpsc::Sender<Lookup>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl EngineSession {
    /// Starts the background thread. Errors with `Invalid` on a contradictory configuration.
    pub fn new(config: SessionConfig) -> Result<EngineSession> {
        config.check()?;
        let shared = Arc::new(Shared::new(config));
        let (lookups, receiver) = tokio::sync::mpsc::channel(limits::LOOKUPS);
        let ended = thread::start(shared.clone(), receiver)?;
        Ok(EngineSession { shared, lookups, ended: Mutex::new(ended) })
    }

    /// How far the connection has got. No round trip.
    pub fn state(&self) -> SessionState {
        self.shared.holdings().link.state()
    }

    /// Why the session is not ready, as one line; `None` if it is.
    pub fn reason(&self) -> Option<String> {
        self.shared.holdings().link.reason()
    }

    /// The pool with the reserved slots; empty when not ready.
    pub fn pool(&self) -> Vec<u8> {
        let holdings = self.shared.holdings();
        if holdings.link.state() == SessionState::Ready { holdings.link.pool().to_vec() } else { Vec::new() }
    }

    /// Changes the namespace. The stock and the queued commits of another one are aborted; leases stay.
    pub fn set_namespace(&self, namespace: Namespace) {
        self.shared.holdings().set_namespace(namespace);
        self.shared.wake_all();
    }

    /// Looks up all keys of all groups of one request, in prefix order.
    pub fn lookup(&self, groups: Vec<(u32, Hashes)>) -> Ticket {
        let cell = Arc::new(Cell::new(groups.iter().map(|(_, hashes)| hashes.len()).collect()));
        let (begun, was_idle) = self.shared.holdings().begin_lookup(cell.key_count(), Instant::now());
        if was_idle {
            self.shared.wake_stock.notify_one();
        }
        match begun {
            // The channel is full only if the thread is stuck; the dropped lookup then fails.
            Some(epoch) => drop(self.lookups.try_send(Lookup::new(self.shared.clone(), cell.clone(), epoch, groups))),
            None => cell.settle(Answer::failed()),
        }
        Ticket::new(self.shared.clone(), cell)
    }

    /// Hints that the request with this number waits and will look up these keys. Only the first
    /// [`limits::KEYS_PER_WAITING`] of each group are used. The daemon may protect and prefetch their blocks.
    pub fn hint(&self, request: u64, groups: Vec<(u32, Hashes)>) {
        self.shared.holdings().hint(request, groups);
        self.shared.wake_hints.notify_one();
    }

    /// Withdraws the hint of this request. Unknown numbers are ignored.
    pub fn withdraw_hint(&self, request: u64) {
        self.shared.holdings().withdraw_hint(request);
        self.shared.wake_hints.notify_one();
    }

    /// Up to `count` slots from the stock.
    pub fn reserve(&self, group: u32, count: usize) -> Vec<Held> {
        let slots = self.shared.holdings().reserve(group, count, Instant::now());
        self.shared.wake_stock.notify_one();
        slots
    }

    /// Names filled slots; `predecessor` is the hash before the first, empty at the start of a prompt. Errors with
    /// `Invalid` if the lists differ in length.
    pub fn commit(&self, group: u32, hashes: &Hashes, predecessor: &[u8], slots: &[Held]) -> Result<()> {
        if hashes.len() != slots.len() {
            return Err(Error::invalid("a commit must name as many slots as hashes")
                .with("hashes", hashes.len())
                .with("slots", slots.len()));
        }
        self.shared.holdings().commit(group, hashes, predecessor, slots, Instant::now());
        self.shared.wake_deliver.notify_one();
        Ok(())
    }

    /// Returns unfilled slots.
    pub fn abort(&self, slots: &[Held]) {
        self.shared.holdings().abort(slots, Instant::now());
        self.shared.wake_deliver.notify_one();
    }

    /// Loads have saved the engine these tokens, and at least this time of computing them. The daemon is told of it
    /// with the next release of a lease, at most once. No round trip.
    pub fn saved(&self, tokens: u64, prefill: Duration) {
        let prefill_us = prefill.as_micros().try_into().unwrap_or(u64::MAX);
        self.shared.holdings().save(Saved { tokens, prefill_us });
    }

    /// Counters since the start, and the present state. No round trip.
    pub fn stats(&self) -> Stats {
        self.shared.holdings().stats()
    }

    /// Delivers queued messages and ends the session; returns after the deadline at the latest. Idempotent.
    pub fn close(&self) {
        self.shared.close();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // An error means that the thread has ended, which is the purpose of the wait.
        let _ = ended.recv_timeout(self.shared.config.deadline);
    }
}

impl Drop for EngineSession {
    fn drop(&mut self) {
        self.shared.close();
    }
}
