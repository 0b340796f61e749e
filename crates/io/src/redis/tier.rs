//! The tier's public interface: it accepts operations, passes them to event loops, and hands out their completions.
//!
//! Invariants: no call waits for a server. The configuration's limits bound the operations in an event loop. An event
//! loop ends with the tier, and keeps the pool mapped until then.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Tier};
use forebay_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::config::{RedisConfig, Settings};
use super::event_loop::EventLoop;
use super::purge;
use super::refusing::Refusing;
use super::report::RedisReport;
use super::shared::{self, Inbox, Outbox, State};
use crate::purge::Place;
use crate::refusals::Refused;
use crate::uring::Region;

/// The event loop for lookups; the others are for loads and stores.
const LOOKUPS: usize = 0;
/// A connection for lookups takes a whole batch at once, which then costs one round trip.
const LOOKUP_DEPTH: usize = 4096;

/// See the module documentation.
pub struct Redis {
    /// The configured servers.
    name: String,
    settings: Arc<Settings>,
    event_loops: Vec<Running>,
    outbox: Arc<Outbox>,
    taken: HashMap<OpId, Taken>,
    /// Number of `taken` operations by class.
    counts: [usize; 3],
    refusing: Refusing,
}

struct Running {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    bytes: u64,
    has_news: bool,
}

#[derive(Clone, Copy)]
struct Taken {
    event_loop: usize,
    bytes: u64,
    class: Class,
}

#[derive(Clone, Copy)]
enum Class {
    Load,
    Store,
    Find,
}

impl Redis {
    /// Not durable: the server's operator decides whether values survive a restart, or are kept at all. No operation
    /// hangs: bytes reach a slot only through our own calls, which end when the connection is closed.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, can_touch: true, is_durable: false, is_shared: true };

    /// Begins to connect, without waiting: a server that is absent now is found later. Errors are about the
    /// configuration alone, and say what to change. `pool` is the memory with the slots.
    pub fn open(config: &RedisConfig, pool: Region) -> Result<Redis> {
        let settings = Arc::new(Settings::of(config)?);
        let outbox = Arc::new(Outbox::new().map_err(no_means)?);
        let named: Vec<String> = settings.addresses.iter().map(ToString::to_string).collect();
        let mut redis = Redis {
            name: named.join(","),
            settings: settings.clone(),
            event_loops: Vec::new(),
            outbox,
            taken: HashMap::new(),
            counts: [0; 3],
            refusing: Refusing::default(),
        };
        let mut lookups = Settings::clone(&settings);
        lookups.config.pipeline_depth = LOOKUP_DEPTH;
        redis.start(&Arc::new(lookups), &pool, 1)?;
        let threads = config.threads.min(config.connections);
        for at in 0..threads {
            let connections = (config.connections + at) / threads;
            redis.start(&settings, &pool, connections)?;
        }
        Ok(redis)
    }

    fn start(&mut self, settings: &Arc<Settings>, pool: &Region, connections: usize) -> Result<()> {
        let inbox = Arc::new(Inbox::new().map_err(no_means)?);
        let event_loop =
            EventLoop::new(settings, pool, &inbox, &self.outbox, connections, random()?).map_err(no_means)?;
        let name = format!("redis-{}", self.event_loops.len());
        let thread = thread::Builder::new().name(name).spawn(move || event_loop.run()).map_err(no_means)?;
        self.event_loops.push(Running { inbox, thread: Some(thread), bytes: 0, has_news: false });
        Ok(())
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.outbox.waker_fd()
    }

    /// The figures at this moment. Never waits for a server.
    pub fn report(&self) -> RedisReport {
        let done = self.outbox.done();
        let connections =
            self.event_loops.iter().map(|event_loop| event_loop.inbox.connections.load(Ordering::Relaxed)).sum();
        let [loads, stores, finds] = self.counts;
        RedisReport {
            name: self.name.clone(),
            servers: self.servers(),
            health: self.health(),
            connections,
            loads,
            stores,
            finds,
            last_error: done.last_error.clone(),
            refuses_writes: self.refusing.told(Refused::Writes, &self.settings.config.mode),
            refuses_reads: self.refusing.told(Refused::Reads, &self.settings.config.mode),
            hint: self.refusing.hint(),
            counters: done.counters,
        }
    }

    /// Where its blocks are, for purges of namespaces.
    pub fn places(&self) -> Vec<Place> {
        let inboxes: Vec<_> = self.event_loops.iter().map(|event_loop| event_loop.inbox.clone()).collect();
        vec![purge::place(&self.settings, move || shared::servers(&inboxes))]
    }

    /// Those that are in use.
    fn servers(&self) -> Vec<String> {
        let inboxes = self.event_loops.iter().map(|event_loop| &event_loop.inbox);
        shared::servers(inboxes).iter().map(ToString::to_string).collect()
    }

    /// Blocks until every accepted operation has completed; false if that takes longer than `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll(completions);
            if self.taken.is_empty() {
                return true;
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return false;
            }
            let rest = Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
            // An interrupted wait only ended early.
            let _ = rustix::event::poll(&mut [PollFd::new(&self.wake_fd(), PollFlags::IN)], Some(&rest));
        }
    }

    fn class_of(&self, op: &Operation) -> Class {
        match op.kind {
            OpKind::Load => Class::Load,
            OpKind::Store | OpKind::Remove => Class::Store,
            // What prolongs a value is a write, which may hang where probes are answered.
            OpKind::Touch { .. } if self.settings.config.ttl_seconds.is_some() => Class::Store,
            OpKind::Exists | OpKind::Touch { .. } => Class::Find,
        }
    }

    /// The event loop for an operation: the least loaded one that works.
    fn event_loop_for(&self, class: Class) -> usize {
        match class {
            Class::Find => LOOKUPS,
            Class::Load | Class::Store => {
                let least =
                    |at: &usize| (self.event_loops[*at].inbox.state() == State::Down, self.event_loops[*at].bytes);
                (LOOKUPS + 1..self.event_loops.len()).min_by_key(least).expect("there is one for loads and stores")
            }
        }
    }

    fn has_room(&self, class: Class) -> bool {
        let config = &self.settings.config;
        let limits = [config.queued_loads, config.queued_stores, config.queued_finds];
        self.counts[class as usize] < limits[class as usize]
    }
}

impl Tier for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn capabilities(&self) -> Capabilities {
        Redis::CAPABILITIES
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let mut count = 0;
        for op in batch {
            let class = self.class_of(op);
            if !self.has_room(class) {
                break;
            }
            // Operations without bytes count as well.
            let bytes = op.slot.map_or(1, |_| op.length_bytes);
            let event_loop = self.event_loop_for(class);
            self.event_loops[event_loop].bytes += bytes;
            self.event_loops[event_loop].has_news = true;
            self.event_loops[event_loop].inbox.queue().ops.push(*op);
            self.taken.insert(op.id, Taken { event_loop, bytes, class });
            self.counts[class as usize] += 1;
            count += 1;
        }
        for event_loop in self.event_loops.iter_mut().filter(|event_loop| event_loop.has_news) {
            event_loop.has_news = false;
            event_loop.inbox.wake();
        }
        count
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        let said = self.outbox.poll(completions);
        if !said.is_empty() {
            let now = Instant::now();
            said.into_iter().for_each(|said| self.refusing.hear(said, now));
            self.outbox.hears_reads.store(self.refusing.has_refused_reads(), Ordering::Relaxed);
        }
        for completion in &completions[from..] {
            let taken = self.taken.remove(&completion.id).expect("only what was taken completes, and once");
            self.event_loops[taken.event_loop].bytes -= taken.bytes;
            self.counts[taken.class as usize] -= 1;
        }
    }

    fn cancel(&mut self, id: OpId) {
        if let Some(taken) = self.taken.get(&id) {
            let inbox = &self.event_loops[taken.event_loop].inbox;
            inbox.queue().cancelled.push(id);
            inbox.wake();
        }
    }

    /// Sick if lookups have no server, or all loads and stores have none.
    fn health(&self) -> Health {
        let is_down = |event_loop: &Running| event_loop.inbox.state() == State::Down;
        let is_sick = is_down(&self.event_loops[LOOKUPS]) || self.event_loops[LOOKUPS + 1..].iter().all(is_down);
        if is_sick { Health::Sick(ErrorKind::Unavailable) } else { Health::Healthy }
    }
}

impl Timed for Redis {
    /// Event loops wait for sockets and have a clock of their own: pauses and timeouts need no call of this. What lasts
    /// is told.
    fn advance(&mut self, _now: Duration) {
        if !self.refusing.is_empty() {
            self.refusing.judge(&self.servers(), Instant::now());
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        for event_loop in &self.event_loops {
            event_loop.inbox.is_closed.store(true, Ordering::Relaxed);
            event_loop.inbox.wake();
        }
        for thread in self.event_loops.iter_mut().filter_map(|event_loop| event_loop.thread.take()) {
            // An event loop that panicked has already logged it.
            let _ = thread.join();
        }
    }
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| no_means(error.into()))?;
    Ok(u64::from_le_bytes(bytes))
}

fn no_means(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot get threads or memory for the redis tier").source(error)
}
