//! The tier's public face: takes operations, gives them to lanes, and hands out what these have completed.
//!
//! Invariants: no call waits for a server; what is in a lane is bounded by the limits of the configuration; a lane
//! ends with the tier, and until then keeps the pool mapped.

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
use super::lane::Lane;
use super::purge;
use super::report::RedisReport;
use super::shared::{Inbox, Outbox, State};
use crate::purge::Place;
use crate::uring::Region;

/// The lane of lookups; the others are for loads and stores.
const LOOKUPS: usize = 0;
/// A lookup's connection takes a whole batch at once, since one round trip is what it costs.
const LOOKUP_DEPTH: usize = 4096;

/// See the module's head.
pub struct Redis {
    settings: Arc<Settings>,
    lanes: Vec<Running>,
    outbox: Arc<Outbox>,
    taken: HashMap<OpId, Taken>,
    /// Of `taken`, by class.
    counts: [usize; 3],
}

struct Running {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    bytes: u64,
    has_news: bool,
}

#[derive(Clone, Copy)]
struct Taken {
    lane: usize,
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
    /// Begins to connect, and waits for nobody: a server that is absent now is found later. Errors are about the
    /// configuration alone, and say what to change. `pool` is where slots lie.
    pub fn open(config: &RedisConfig, pool: Region) -> Result<Redis> {
        let settings = Arc::new(Settings::of(config)?);
        let outbox = Arc::new(Outbox::new().map_err(no_means)?);
        let mut redis =
            Redis { settings: settings.clone(), lanes: Vec::new(), outbox, taken: HashMap::new(), counts: [0; 3] };
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
        let lane = Lane::new(settings, pool, &inbox, &self.outbox, connections, random()?).map_err(no_means)?;
        let name = format!("redis-{}", self.lanes.len());
        let thread = thread::Builder::new().name(name).spawn(move || lane.run()).map_err(no_means)?;
        self.lanes.push(Running { inbox, thread: Some(thread), bytes: 0, has_news: false });
        Ok(())
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.outbox.waker_fd()
    }

    pub fn report(&self) -> RedisReport {
        let done = self.outbox.done();
        let connections = self.lanes.iter().map(|lane| lane.inbox.connections.load(Ordering::Relaxed)).sum();
        let [loads, stores, finds] = self.counts;
        let named: Vec<String> = self.settings.addresses.iter().map(ToString::to_string).collect();
        RedisReport {
            name: named.join(","),
            servers: done.servers.clone(),
            health: self.health(),
            connections,
            loads,
            stores,
            finds,
            last_error: done.last_error.clone(),
            counters: done.counters,
        }
    }

    /// Where its blocks are, to be emptied of namespaces.
    pub fn places(&self) -> Vec<Place> {
        vec![purge::place(&self.settings)]
    }

    /// Blocks until everything taken has completed; false if that takes longer than `timeout`.
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
            // An interrupted wait is as good as one that ended.
            let _ = rustix::event::poll(&mut [PollFd::new(&self.wake_fd(), PollFlags::IN)], Some(&rest));
        }
    }

    /// The lane for an operation: of those that work, the one with the least to do.
    fn lane_for(&self, class: Class) -> usize {
        match class {
            Class::Find => LOOKUPS,
            Class::Load | Class::Store => {
                let least = |at: &usize| (self.lanes[*at].inbox.state() == State::Down, self.lanes[*at].bytes);
                (LOOKUPS + 1..self.lanes.len()).min_by_key(least).expect("there is one for loads and stores")
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

    /// Not durable: whether a server keeps what it was given, across its restarts or at all, is its operator's choice.
    /// Nothing hangs: bytes reach a slot only through our own calls, which end when the connection is closed.
    fn capabilities(&self) -> Capabilities {
        Capabilities { can_store: true, can_remove: true, is_durable: false, is_shared: true, may_hang: false }
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let mut count = 0;
        for op in batch {
            let class = class_of(op);
            if !self.has_room(class) {
                break;
            }
            // Operations without bytes count as well.
            let bytes = op.slot.map_or(1, |_| op.length_bytes);
            let lane = self.lane_for(class);
            self.lanes[lane].bytes += bytes;
            self.lanes[lane].has_news = true;
            self.lanes[lane].inbox.queue().ops.push(*op);
            self.taken.insert(op.id, Taken { lane, bytes, class });
            self.counts[class as usize] += 1;
            count += 1;
        }
        for lane in self.lanes.iter_mut().filter(|lane| lane.has_news) {
            lane.has_news = false;
            lane.inbox.wake();
        }
        count
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.outbox.poll(completions);
        for completion in &completions[from..] {
            let taken = self.taken.remove(&completion.id).expect("only what was taken completes, and once");
            self.lanes[taken.lane].bytes -= taken.bytes;
            self.counts[taken.class as usize] -= 1;
        }
    }

    fn cancel(&mut self, id: OpId) {
        if let Some(taken) = self.taken.get(&id) {
            let inbox = &self.lanes[taken.lane].inbox;
            inbox.queue().cancelled.push(id);
            inbox.wake();
        }
    }

    /// Sick if lookups or all of loads and stores have nobody to talk to.
    fn health(&self) -> Health {
        let is_down = |lane: &Running| lane.inbox.state() == State::Down;
        let is_sick = is_down(&self.lanes[LOOKUPS]) || self.lanes[LOOKUPS + 1..].iter().all(is_down);
        if is_sick { Health::Sick(ErrorKind::Unavailable) } else { Health::Healthy }
    }
}

impl Timed for Redis {
    /// Lanes have a clock of their own, for they wait for sockets: pauses and timeouts pass without this.
    fn advance(&mut self, _now: Duration) {}
}

impl Drop for Redis {
    fn drop(&mut self) {
        for lane in &self.lanes {
            lane.inbox.is_closed.store(true, Ordering::Relaxed);
            lane.inbox.wake();
        }
        for thread in self.lanes.iter_mut().filter_map(|lane| lane.thread.take()) {
            // A lane that panicked has said so already.
            let _ = thread.join();
        }
    }
}

fn class_of(op: &Operation) -> Class {
    match op.kind {
        OpKind::Load { .. } => Class::Load,
        OpKind::Store | OpKind::Remove { .. } => Class::Store,
        OpKind::Find => Class::Find,
    }
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| no_means(error.into()))?;
    Ok(u64::from_le_bytes(bytes))
}

fn no_means(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot get what a redis tier needs from this machine").source(error)
}
