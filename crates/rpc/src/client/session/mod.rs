//! The scheduler side of one engine.
//!
//! Holds true: no call waits for the daemon, except `Ticket::poll` and `close`, for as long as they are told to.
//! Everything that is handed out is written down in the [`ledger`] until the daemon acknowledged that it came
//! back; what the ledger holds is declared again after a reconnect. Replies of an earlier connection are never
//! applied: the calls of a connection are dropped with it. Every queue has a limit ([`limits`]); at the limit a
//! lookup is a miss, a reservation is not given, a commit becomes an abort, and each is counted.
//!
//! In path order: this file is what the engine calls; [`ticket`] a lookup's answer; [`ledger`] what the engine
//! holds, made of [`link`] (how far the connection got), [`leases`], [`stock`], [`outbox`] and [`waiting`]; `thread`
//! connects and reconnects; `calls` is what runs while a connection lasts.
//!
//! A forked child has the ledger but not the thread: a session must be made after the fork.

mod calls;
mod leases;
mod ledger;
mod link;
mod outbox;
mod stats;
mod stock;
mod thread;
mod ticket;
mod waiting;

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

use ledger::Ledger;
use ticket::{Answer, Cell, Lookup};

/// What bounds each queue, and why there.
pub mod limits {
    use std::time::Duration;

    /// Lookups on their way, late ones included. An engine asks once for each request that waits, and a burst of
    /// a thousand requests is not unusual.
    pub const LOOKUPS: usize = 1024;
    /// Keys of all lookups on their way, 32 MiB. A request of a million tokens in blocks of 16 has 65,536.
    pub const LOOKUP_KEYS: usize = 1 << 20;
    /// Keys of one lookup, which stays well inside a message.
    pub const KEYS_PER_LOOKUP: usize = 1 << 18;
    /// Blocks under lease. All of them must fit one message when they are declared after a reconnect.
    pub const LEASED_BLOCKS: usize = 1 << 19;
    /// Slots with the engine or in queued commits.
    pub const RESERVED_BLOCKS: usize = 1 << 16;
    /// Blocks in one commit call, so that a call stays short on the daemon's side.
    pub const COMMIT_BLOCKS: usize = 4096;
    /// Requests in the engine's queue that the daemon is told of: many more than are honoured in most pools.
    pub const WAITING: usize = 64;
    /// Keys of each group of a waiting request; the daemon takes no more.
    pub const KEYS_PER_WAITING: usize = 2048;
    /// How much longer than the deadline a late answer is waited for before the connection is given up: until
    /// then it can still be put right (its lease released, its slots used).
    pub const LATE_FACTOR: u32 = 4;
    /// Without lookups and reservations for so long, an engine counts as idle.
    pub const IDLE: Duration = Duration::from_secs(2);
    /// Slots an idle engine keeps of each group.
    pub const IDLE_STOCK: usize = 4;
}

/// How a session behaves.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    pub socket_directory: PathBuf,
    pub engine_id: String,
    /// Which start of the engine this is; not all zero. Its workers attach with the same.
    pub incarnation: [u8; 16],
    /// Worker processes that will attach under the same engine id and incarnation.
    pub ranks: u32,
    /// Slots of each group kept reserved ahead.
    pub stock_blocks: usize,
    /// After this long a call counts as failed.
    pub deadline: Duration,
    /// Failures, with no lookup answered in time between them, after which the daemon is not asked until it was
    /// reached again.
    pub breaker_failures: u32,
}

/// What is stored and loaded from now on.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    pub fields: BTreeMap<String, String>,
    pub groups: Vec<proto::Group>,
}

/// See the module's head. Shared by threads; dropping it ends the session without waiting.
pub struct EngineSession {
    shared: Arc<Shared>,
    lookups: tokio::sync::mpsc::Sender<Lookup>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl EngineSession {
    /// Starts the background thread. Errors with `Invalid` on a configuration that cannot be.
    pub fn new(config: SessionConfig) -> Result<EngineSession> {
        check(&config)?;
        let shared = Arc::new(Shared::new(config));
        let (lookups, receiver) = tokio::sync::mpsc::channel(limits::LOOKUPS);
        let ended = thread::start(shared.clone(), receiver)?;
        Ok(EngineSession { shared, lookups, ended: Mutex::new(ended) })
    }

    pub fn state(&self) -> SessionState {
        self.shared.ledger().link.state()
    }

    /// Why the session is not ready, as one line; `None` if it is.
    pub fn reason(&self) -> Option<String> {
        self.shared.ledger().link.reason()
    }

    /// The pool that reserved slots lie in; empty when not ready.
    pub fn pool(&self) -> Vec<u8> {
        let ledger = self.shared.ledger();
        if ledger.link.state() == SessionState::Ready { ledger.link.pool().to_vec() } else { Vec::new() }
    }

    /// Moves to a namespace. The stock and the queued commits of another one are aborted; leases stay.
    pub fn set_namespace(&self, namespace: Namespace) {
        self.shared.ledger().set_namespace(namespace);
        self.shared.wake_all();
    }

    /// Asks for all keys of all groups of one request, in prefix order.
    pub fn lookup(&self, groups: Vec<(u32, Hashes)>) -> Ticket {
        let cell = Arc::new(Cell::new(groups.iter().map(|(_, hashes)| hashes.len()).collect()));
        let (begun, was_idle) = self.shared.ledger().begin_lookup(cell.keys(), Instant::now());
        if was_idle {
            self.shared.wake_stock.notify_one();
        }
        match begun {
            // The channel is full only if the thread is stuck; the lookup then fails as it is dropped.
            Some(epoch) => drop(self.lookups.try_send(Lookup::new(self.shared.clone(), cell.clone(), epoch, groups))),
            None => cell.settle(Answer::failed()),
        }
        Ticket::new(self.shared.clone(), cell)
    }

    /// A request of this number, by the engine's count, waits and will ask for these keys, of which the first
    /// [`limits::KEYS_PER_WAITING`] of each group count. A hint to the daemon's evictions.
    pub fn expect(&self, request: u64, groups: Vec<(u32, Hashes)>) {
        self.shared.ledger().expect(request, groups);
        self.shared.wake_waiting.notify_one();
    }

    /// It waits no more. Unknown numbers are ignored.
    pub fn met(&self, request: u64) {
        self.shared.ledger().met(request);
        self.shared.wake_waiting.notify_one();
    }

    /// Up to `count` slots from the stock.
    pub fn reserve(&self, group: u32, count: usize) -> Vec<Held> {
        let slots = self.shared.ledger().reserve(group, count, Instant::now());
        self.shared.wake_stock.notify_one();
        slots
    }

    /// Names filled slots; `predecessor` is the hash before the first, empty at the start of a prompt. Errors
    /// with `Invalid` if the lists differ in length.
    pub fn commit(&self, group: u32, hashes: &Hashes, predecessor: &[u8], slots: &[Held]) -> Result<()> {
        if hashes.len() != slots.len() {
            return Err(Error::invalid("a commit names as many slots as hashes")
                .with("hashes", hashes.len())
                .with("slots", slots.len()));
        }
        self.shared.ledger().commit(group, hashes, predecessor, slots);
        self.shared.wake_deliver.notify_one();
        Ok(())
    }

    /// Gives unfilled slots back.
    pub fn abort(&self, slots: &[Held]) {
        self.shared.ledger().abort(slots);
        self.shared.wake_deliver.notify_one();
    }

    pub fn stats(&self) -> Stats {
        self.shared.ledger().stats()
    }

    /// Delivers what is queued and ends the session; returns after the deadline at the latest. Idempotent.
    pub fn close(&self) {
        self.shared.close();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // An error means that the thread has ended, which is what is waited for.
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
        return Err(Error::invalid("an engine id has 1 to 64 bytes").with("engine_id", &config.engine_id));
    }
    if config.incarnation == [0; 16] {
        return Err(Error::invalid("an engine's incarnation is not zero").with("engine_id", &config.engine_id));
    }
    if config.deadline.is_zero() || config.breaker_failures == 0 {
        return Err(Error::invalid("a session's deadline and breaker are above zero"));
    }
    Ok(())
}

/// What the engine's threads and the background thread share.
struct Shared {
    config: SessionConfig,
    /// By which the daemon knows this session after a reconnect: what it holds is in this ledger and no other.
    owner: [u8; 16],
    ledger: Mutex<Ledger>,
    wake_deliver: Notify,
    wake_stock: Notify,
    wake_name: Notify,
    wake_waiting: Notify,
    /// The ledger's link is broken.
    broken: Notify,
    /// Nothing is queued any more.
    drained: Notify,
    closing: watch::Sender<bool>,
}

impl Shared {
    fn new(config: SessionConfig) -> Shared {
        Shared {
            ledger: Mutex::new(Ledger::new(config.stock_blocks, Instant::now())),
            config,
            owner: crate::draw(),
            wake_deliver: Notify::new(),
            wake_stock: Notify::new(),
            wake_name: Notify::new(),
            wake_waiting: Notify::new(),
            broken: Notify::new(),
            drained: Notify::new(),
            closing: watch::Sender::new(false),
        }
    }

    /// Held for microseconds, never across a wait. A panic under it leaves the ledger as it was at some step
    /// between two of its changes, and the daemon checks whatever it says; so the poison is ignored.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_all(&self) {
        self.wake_name.notify_one();
        self.wake_deliver.notify_one();
        self.wake_stock.notify_one();
        self.wake_waiting.notify_one();
    }

    fn close(&self) {
        self.closing.send_replace(true);
        self.wake_all();
    }

    /// Gives the connection up.
    fn break_off(&self) {
        self.ledger().link.broken();
        self.broken.notify_one();
    }

    async fn closing(&self) {
        // The sender is in `self`, so the wait cannot end by its loss.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }
}
