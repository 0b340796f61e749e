//! Who is connected to the two sockets, and what each user may take of the daemon.
//!
//! Invariants: every connection has a place, and every call of the control plane is counted here before its message is
//! read. All limits are per user, so what one user takes is taken from no other. A connection beyond a user's places is
//! a guest: it may ask whether the daemon is well, and with any other call it takes the place of a connection that is
//! idle, or is told why it is refused. A place ends with its connection, and after `limits.idle_seconds` of being idle.
//! A connection that holds a session or a worker, or makes a call, is not idle.
//!
//! This module knows neither the core nor the state: it is asked before both.

mod call;
mod connection;
mod decoded;
mod files;
mod taken;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::Seldom;
use tokio::sync::{Notify, Semaphore};

use crate::config::Config;

pub use call::Room;
pub use connection::serve;
pub use files::raise_limit;
pub use taken::UserReport;

use taken::{Refusal, Refusals};

/// Connections of a user beyond its places. Enough for a probe to get its answer among clients that connect again and
/// again.
const GUESTS: usize = 16;
/// How long a guest may stay: it has one answer to read.
const GUEST_STAY: Duration = Duration::from_secs(5);
/// A client asks within a millisecond of connecting, on a busy host within a few; before that it is not idle.
const TIME_TO_ASK: Duration = Duration::from_millis(50);
/// How long and how often a guest looks for a place: by then, all that have asked nothing are idle.
const TIME_TO_FIND: Duration = Duration::from_millis(100);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// How often places are looked at that may have been idle for too long.
const SWEEP: Duration = Duration::from_secs(1);
/// A client takes its answers within milliseconds. One that took none for so long is stopped or gone.
const TIME_TO_READ: Duration = Duration::from_secs(10);
/// Answers that a client may leave unread for as long as it likes: as an engine that a debugger has stopped does.
const UNREAD_BYTES: u64 = 1 << 20;
/// Calls that wait for `limits.copy_bytes_per_user`. A `Put` may keep half a MiB of its message in the connection's
/// buffer.
const WAITING_COPIES: usize = 64;
/// Of those, on one connection: their buffers fit the connection's window, so its other calls are heard.
const WAITING_COPIES_OF_CONNECTION: usize = 48;

/// What a user may have at a time. See the section `limits` of the configuration.
#[derive(Clone, Copy)]
pub struct Limits {
    pub connections: usize,
    pub sessions: usize,
    pub calls: usize,
    pub calls_of_connection: u32,
    pub call_bytes: u64,
    pub copy_bytes: u64,
    pub waiting_gets: usize,
    pub lent_bytes: u64,
    pub message_bytes: u64,
    pub idle: Duration,
}

pub struct Clients {
    limits: Limits,
    users: Mutex<BTreeMap<u32, User>>,
    /// Warnings of refusals.
    told: Seldom,
}

struct User {
    /// By age.
    connections: BTreeMap<u64, Connection>,
    next: u64,
    sessions: usize,
    calls: usize,
    /// Of calls that are being received, and of answers that were not taken yet; without those of `copies`.
    call_bytes: u64,
    waiting_copies: usize,
    /// `Get` calls that wait for a tier.
    waiting_gets: usize,
    /// Of the memory that its clients lend, as long as the daemon maps it.
    lent_bytes: u64,
    /// KiB that copying calls may have in memory.
    copies: Arc<Semaphore>,
    /// Copying calls at a time, each on a thread of its own.
    copiers: Arc<Semaphore>,
    refusals: Refusals,
}

struct Connection {
    close: Arc<Notify>,
    is_guest: bool,
    /// When it last began a call, got an answer, or took a part of one.
    used: Instant,
    /// Those without an answer yet, and those whose answer was not taken yet.
    answering: u32,
    unfinished: u32,
    /// Its sessions, workers and recordings.
    holds: u32,
    waiting_copies: usize,
    /// Of answers that its client has not taken yet, and since when it took none.
    unread_bytes: u64,
    unread_since: Instant,
}

/// A connection's place; it ends when this is dropped.
pub struct Place {
    clients: Arc<Clients>,
    uid: u32,
    id: u64,
    close: Arc<Notify>,
}

/// A session, worker or recording of a connection, which keeps its place however long it says nothing.
pub struct Hold {
    place: Arc<Place>,
    is_session: bool,
}

/// Lent memory that the daemon maps; it counts until this is dropped, which its connection does not live to see.
pub struct LentBytes {
    clients: Arc<Clients>,
    uid: u32,
    bytes: u64,
}

/// Calls of a user that copy at a time: each holds a thread, and its message of up to 16 MiB.
const COPIES_AT_A_TIME: usize = 4;

impl Limits {
    /// `connections` may be fewer than configured: see [`raise_limit`].
    pub fn of(config: &Config, connections: usize) -> Limits {
        let limits = &config.limits;
        Limits {
            connections,
            sessions: limits.sessions_per_user as usize,
            calls: limits.calls_per_user as usize,
            calls_of_connection: limits.calls_per_connection,
            call_bytes: limits.call_bytes_per_user.0,
            copy_bytes: limits.copy_bytes_per_user.0,
            waiting_gets: limits.waiting_gets_per_user as usize,
            lent_bytes: limits.lent_bytes_per_user.0,
            message_bytes: limits.message_bytes.0,
            idle: Duration::from_secs(limits.idle_seconds),
        }
    }
}

impl Clients {
    pub fn new(limits: Limits) -> Arc<Clients> {
        Arc::new(Clients { limits, users: Mutex::default(), told: Seldom::default() })
    }

    /// A place for one more connection of this user. If all are taken, a connection that was idle for a while makes
    /// room, or this one is a guest. Among guests beyond number, what is idle goes at once.
    pub fn enter(self: &Arc<Clients>, uid: u32) -> Arc<Place> {
        let mut users = self.lock();
        let user = users.entry(uid).or_insert_with(|| User::new(&self.limits));
        let now = Instant::now();
        let is_full = user.places() >= self.limits.connections;
        let mut is_guest = is_full && !user.close_idlest(now, TIME_TO_ASK);
        if is_guest && user.connections.len() - user.places() >= GUESTS {
            is_guest = !user.close_idlest(now, Duration::ZERO);
            if is_guest {
                user.close_oldest_guest();
            }
        }
        let (id, close) = (user.next, Arc::new(Notify::new()));
        user.next += 1;
        let connection = Connection {
            close: close.clone(),
            is_guest,
            used: now,
            answering: 0,
            unfinished: 0,
            holds: 0,
            waiting_copies: 0,
            unread_bytes: 0,
            unread_since: now,
        };
        user.connections.insert(id, connection);
        drop(users);
        Arc::new(Place { clients: self.clone(), uid, id, close })
    }

    /// Closes connections that were idle for too long, and those whose client leaves its answers.
    pub async fn sweep(self: Arc<Clients>) -> Infallible {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            for user in self.lock().values_mut() {
                user.sweep(now, &self.limits);
            }
        }
    }

    /// For metrics and `forebay inspect`: each user that has connected since the daemon started.
    pub fn reports(&self) -> Vec<UserReport> {
        self.lock().iter().map(|(uid, user)| user.report(*uid, &self.limits)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, User>> {
        self.users.lock().expect("nothing that holds it panics")
    }

    fn refuse(&self, uid: u32, user: &mut User, refusal: Refusal) -> Error {
        user.refusals.add(refusal);
        let error = refusal.error(uid, &self.limits);
        if let Some(times) = self.told.add(Instant::now()) {
            tracing::warn!(%error, hint = error.hint_text(), times, "a client was refused");
        }
        error
    }
}

impl User {
    fn new(limits: &Limits) -> User {
        User {
            connections: BTreeMap::new(),
            next: 0,
            sessions: 0,
            calls: 0,
            call_bytes: 0,
            waiting_copies: 0,
            waiting_gets: 0,
            lent_bytes: 0,
            copies: Arc::new(Semaphore::new(kib(limits.copy_bytes) as usize)),
            copiers: Arc::new(Semaphore::new(COPIES_AT_A_TIME)),
            refusals: Refusals::default(),
        }
    }

    /// Those that are taken.
    fn places(&self) -> usize {
        self.connections.values().filter(|connection| !connection.is_guest).count()
    }

    fn close(&mut self, id: u64) {
        if let Some(connection) = self.connections.remove(&id) {
            connection.close.notify_one();
        }
    }

    /// False if none is idle.
    fn close_idlest(&mut self, now: Instant, stay: Duration) -> bool {
        let is_idle = |connection: &Connection| {
            let stay = if connection.unfinished > 0 { TIME_TO_READ } else { stay };
            connection.is_idle() && !connection.is_guest && now - connection.used >= stay
        };
        let idle = self.connections.iter().filter(|(_, connection)| is_idle(connection));
        let idlest = idle.min_by_key(|(_, connection)| connection.used).map(|(id, _)| *id);
        idlest.into_iter().for_each(|id| self.close(id));
        idlest.is_some()
    }

    /// The oldest that asks nothing, or else the oldest.
    fn close_oldest_guest(&mut self) {
        let guests = || self.connections.iter().filter(|(_, connection)| connection.is_guest);
        let oldest = guests().find(|(_, guest)| guest.is_idle()).or(guests().next()).map(|(id, _)| *id);
        oldest.into_iter().for_each(|id| self.close(id));
    }

    /// A guest takes a place that is free, or that of the connection that was idle for longest. False if there is none.
    fn seat(&mut self, id: u64, limit: usize) -> Result<bool> {
        if !self.connections.get(&id).ok_or_else(leaving)?.is_guest {
            return Ok(true);
        }
        let is_free = self.places() < limit || self.close_idlest(Instant::now(), TIME_TO_ASK);
        self.connections.get_mut(&id).ok_or_else(leaving)?.is_guest = !is_free;
        Ok(is_free)
    }

    fn sweep(&mut self, now: Instant, limits: &Limits) {
        let is_scarce = self.call_bytes > limits.call_bytes / 2;
        let is_over = |connection: &Connection| {
            let idle = if connection.is_guest { GUEST_STAY } else { limits.idle };
            let is_unread = connection.unread_bytes > if is_scarce { 0 } else { UNREAD_BYTES };
            (connection.is_idle() || connection.is_guest) && now - connection.used >= idle
                || is_unread && now - connection.unread_since >= TIME_TO_READ
        };
        let over: Vec<u64> =
            self.connections.iter().filter(|(_, connection)| is_over(connection)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.close(id));
    }
}

impl Connection {
    /// The daemon has nothing to do for it; its client may still have an answer to take.
    fn is_idle(&self) -> bool {
        self.answering == 0 && self.holds == 0
    }
}

impl Place {
    /// Ends when the place is needed by another, or was idle for too long.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// A guest looks for a place. Errors with `Full` if it finds none.
    pub async fn seat(&self) -> Result<()> {
        let start = Instant::now();
        while !self.with(|clients, user, id| user.seat(id, clients.limits.connections))? {
            if start.elapsed() >= TIME_TO_FIND {
                return Err(self.with(|clients, user, _| clients.refuse(self.uid, user, Refusal::Connections)));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Calls of its user that may copy at a time.
    pub fn copiers(&self) -> Arc<Semaphore> {
        self.with(|_, user, _| user.copiers.clone())
    }

    /// Counts an engine that was refused because there are too many.
    pub fn note_engine(&self, error: &Error) {
        if error.kind() == ErrorKind::Full {
            self.with(|_, user, _| user.refusals.engines += 1);
        }
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub fn limits(&self) -> &Limits {
        &self.clients.limits
    }

    /// Errors with `Full` if the user has too many sessions.
    pub fn hold_session(self: &Arc<Place>) -> Result<Hold> {
        self.with(|clients, user, id| {
            if user.sessions >= clients.limits.sessions {
                return Err(clients.refuse(self.uid, user, Refusal::Sessions));
            }
            user.connections.get_mut(&id).ok_or_else(leaving)?.holds += 1;
            user.sessions += 1;
            Ok(Hold { place: self.clone(), is_session: true })
        })
    }

    /// For a worker that is attached, and for a recording of lookups.
    pub fn hold(self: &Arc<Place>) -> Result<Hold> {
        self.with(|_, user, id| {
            user.connections.get_mut(&id).ok_or_else(leaving)?.holds += 1;
            Ok(Hold { place: self.clone(), is_session: false })
        })
    }

    /// Counts memory before it is mapped. Errors with `Full` if the user's clients lend too much.
    pub fn borrow(&self, bytes: u64) -> Result<LentBytes> {
        self.with(|clients, user, _| {
            if bytes > clients.limits.lent_bytes.saturating_sub(user.lent_bytes) {
                return Err(clients.refuse(self.uid, user, Refusal::LentBytes));
            }
            user.lent_bytes += bytes;
            Ok(LentBytes { clients: self.clients.clone(), uid: self.uid, bytes })
        })
    }

    fn with<T>(&self, run: impl FnOnce(&Clients, &mut User, u64) -> T) -> T {
        let mut users = self.clients.lock();
        run(&self.clients, users.get_mut(&self.uid).expect("it came in"), self.id)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.with(|_, user, id| user.connections.remove(&id));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.place.with(|_, user, id| {
            user.sessions -= usize::from(self.is_session);
            if let Some(connection) = user.connections.get_mut(&id) {
                connection.holds -= 1;
                connection.used = Instant::now();
            }
        });
    }
}

impl LentBytes {
    /// The user whose client lent them.
    pub fn uid(&self) -> u32 {
        self.uid
    }
}

impl Drop for LentBytes {
    fn drop(&mut self) {
        self.clients.lock().get_mut(&self.uid).expect("it came in").lent_bytes -= self.bytes;
    }
}

/// Its place is another's by now.
fn leaving() -> Error {
    Error::new(ErrorKind::Unavailable, "the daemon is closing this connection").hint("connect again")
}

/// Rounded up, so that nothing is free.
fn kib(bytes: u64) -> u32 {
    bytes.div_ceil(1 << 10).min(u32::MAX.into()) as u32
}
