//! The scheduler side of one engine.
//!
//! Invariants: no call waits for the daemon, except `Ticket::poll` and `close`, for a given time at most. Every lease
//! and slot that the engine received is recorded in [`holdings`] until the daemon has acknowledged its return.
//! Recorded leases and slots are declared again after a reconnect. Replies of an earlier connection are never
//! applied: the calls of a connection are dropped with it. Every queue has a limit ([`limits`]). At the limit a
//! lookup is a miss, a reservation is refused, a commit becomes an abort, and each is counted.
//!
//! In path order: this file has the engine's calls; [`ticket`] is a lookup's answer; [`holdings`] records the leases
//! and slots that the engine holds, and is made of [`link`] (the state of the connection), [`leases`], [`stock`],
//! [`outbox`] and [`hints`]; `thread` connects and reconnects; `calls` has the tasks of one connection.
//!
//! A forked child has the holdings but not the thread: a session must be made after the fork.

mod calls;
mod hints;
mod holdings;
mod leases;
mod link;
mod outbox;
mod stats;
mod stock;
mod thread;
mod ticket;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use forebay_core::{Error, Result};
use tokio::sync::{Notify, watch};

use crate::Hashes;
use crate::proto::{self, Held};

pub use link::SessionState;
pub use stats::Stats;
pub use ticket::Ticket;

use holdings::Holdings;
use ticket::{Answer, Cell, Lookup};

/// The limit of each queue, with its reason.
pub mod limits {
    use std::time::Duration;

    /// Lookups in flight, late ones included. An engine makes one lookup per waiting request, and a burst of a
    /// thousand requests is not unusual.
    pub const LOOKUPS: usize = 1024;
    /// Keys of all lookups in flight, 32 MiB. A request of a million tokens in blocks of 16 has 65,536.
    pub const LOOKUP_KEYS: usize = 1 << 20;
    /// Keys of one lookup; this fits well into a message.
    pub const KEYS_PER_LOOKUP: usize = 1 << 18;
    /// Leased blocks. All of them must fit into one message when they are declared after a reconnect.
    pub const LEASED_BLOCKS: usize = 1 << 19;
    /// Slots held by the engine or in queued commits.
    pub const RESERVED_BLOCKS: usize = 1 << 16;
    /// Blocks in one commit call, so that a call stays short on the daemon's side.
    pub const COMMIT_BLOCKS: usize = 4096;
    /// Requests in the engine's queue that are reported to the daemon: many more than most pools can protect.
    pub const WAITING: usize = 64;
    /// Keys per group of a waiting request; the daemon accepts no more.
    pub const KEYS_PER_WAITING: usize = 2048;
    /// A late answer is awaited for this many further deadlines before the connection is given up. Until then the
    /// late answer is still useful: its lease can be released, its slots used.
    pub const LATE_FACTOR: u32 = 4;
    /// After this long without lookups and reservations an engine counts as idle.
    pub const IDLE: Duration = Duration::from_secs(2);
    /// Slots of each group that an idle engine keeps.
    pub const IDLE_STOCK: usize = 4;
}

/// A session's configuration.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    pub socket_directory: PathBuf,
    pub engine_id: String,
    /// One start of the engine; not all zero. Its workers attach with the same number.
    pub incarnation: [u8; 16],
    /// Worker processes that will attach under the same engine id and incarnation.
    pub ranks: u32,
    /// Slots of each group that are kept reserved in the stock.
    pub stock_blocks: usize,
    /// After this long a call counts as failed.
    pub deadline: Duration,
    /// Failures, with no lookup answered in time between them, after which lookups are not sent until the daemon was
    /// reached again.
    pub breaker_failures: u32,
}

/// The namespace of all later stores and loads.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    pub fields: BTreeMap<String, String>,
    pub groups: Vec<proto::Group>,
}

/// See the module documentation. Shared by threads; dropping it ends the session without waiting.
pub struct EngineSession {
    shared: Arc<Shared>,
    lookups: tokio::sync::mpsc::Sender<Lookup>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl EngineSession {
    /// Starts the background thread. Errors with `Invalid` on a contradictory configuration.
    pub fn new(config: SessionConfig) -> Result<EngineSession> {
        check(&config)?;
        let shared = Arc::new(Shared::new(config));
        let (lookups, receiver) = tokio::sync::mpsc::channel(limits::LOOKUPS);
        let ended = thread::start(shared.clone(), receiver)?;
        Ok(EngineSession { shared, lookups, ended: Mutex::new(ended) })
    }

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
        let (begun, was_idle) = self.shared.holdings().begin_lookup(cell.keys(), Instant::now());
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
        self.shared.holdings().commit(group, hashes, predecessor, slots);
        self.shared.wake_deliver.notify_one();
        Ok(())
    }

    /// Returns unfilled slots.
    pub fn abort(&self, slots: &[Held]) {
        self.shared.holdings().abort(slots);
        self.shared.wake_deliver.notify_one();
    }

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

fn check(config: &SessionConfig) -> Result<()> {
    if config.engine_id.is_empty() || config.engine_id.len() > 64 {
        return Err(Error::invalid("an engine id must have 1 to 64 bytes").with("engine_id", &config.engine_id));
    }
    if config.incarnation == [0; 16] {
        return Err(Error::invalid("an engine's incarnation must not be zero").with("engine_id", &config.engine_id));
    }
    if config.deadline.is_zero() || config.breaker_failures == 0 {
        return Err(Error::invalid("a session's deadline and breaker must be greater than zero"));
    }
    Ok(())
}

/// State that the engine's threads and the background thread share.
struct Shared {
    config: SessionConfig,
    /// Identifies this session to the daemon after a reconnect: no other holdings record what it holds.
    owner: [u8; 16],
    holdings: Mutex<Holdings>,
    wake_deliver: Notify,
    wake_stock: Notify,
    wake_name: Notify,
    wake_hints: Notify,
    /// The connection was marked as broken.
    broken: Notify,
    /// The queue is empty.
    drained: Notify,
    closing: watch::Sender<bool>,
}

impl Shared {
    fn new(config: SessionConfig) -> Shared {
        Shared {
            holdings: Mutex::new(Holdings::new(config.stock_blocks, Instant::now())),
            config,
            owner: crate::draw(),
            wake_deliver: Notify::new(),
            wake_stock: Notify::new(),
            wake_name: Notify::new(),
            wake_hints: Notify::new(),
            broken: Notify::new(),
            drained: Notify::new(),
            closing: watch::Sender::new(false),
        }
    }

    /// Held for microseconds, never across a wait. After a panic under it the holdings are in a state between two of
    /// their changes, and the daemon checks all messages; so the poison is ignored.
    fn holdings(&self) -> MutexGuard<'_, Holdings> {
        self.holdings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_all(&self) {
        self.wake_name.notify_one();
        self.wake_deliver.notify_one();
        self.wake_stock.notify_one();
        self.wake_hints.notify_one();
    }

    fn close(&self) {
        self.closing.send_replace(true);
        self.wake_all();
    }

    /// Gives the connection up.
    fn break_off(&self) {
        self.holdings().link.broken();
        self.broken.notify_one();
    }

    async fn closing(&self) {
        // The sender is in `self`, so the wait cannot end because it was dropped.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }
}
