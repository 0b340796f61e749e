//! One thread and everything that it drives: connections, nodes, timers.
//!
//! An event loop waits in one place for all of its sockets. So an operation that a redirect moves to another
//! connection never crosses a thread, and a loaded machine pays one wake-up for everything that arrived meanwhile.
//! Several event loops are for networks that one thread cannot fill.
//!
//! Invariants: nothing in an event loop blocks on a server or a name lookup. Every operation that enters leaves once.
//! Only its event loop touches a slot, and not after the operation has left.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Completion, OpId, OpKind, Outcome};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::address::Address;
use super::config::{Mode, Settings};
use super::connect::Use;
use super::connection::{self, Connection, Context, Ended, Greeting, Loss};
use super::in_flight::{Job, Verb, Verdict};
use super::name::{self, SLOTS};
use super::node::Node;
use super::report::Counters;
use super::shared::{Inbox, Outbox, Queue, Said, State};
use super::topology::{Discovery, Found, authenticate};
use crate::uring::Region;

const MOST_EVENTS: usize = 64;
/// While more is in flight, at most this many completions are collected before the owner is woken, for a limited
/// time: each wake-up of the owner costs three system calls and two context switches, whether it brings one block or
/// many.
const MOST_HELD: usize = 16;
const LONGEST_HELD: Duration = Duration::from_millis(1);
/// Limit on the redirects of one operation.
const MOST_REDIRECTS: u8 = 5;
/// At most one connection in this time is replaced because its server has become a replica: a replica that stays one is
/// read from all the time.
const LEAVE_PAUSE: Duration = Duration::from_secs(1);
/// No known node has the slot.
const NOBODY: u16 = u16::MAX;

/// The object of an event.
const INBOX: u64 = u64::MAX;
const DISCOVERY: u64 = u64::MAX - 1;

pub(super) struct EventLoop {
    settings: Arc<Settings>,
    pool: Region,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox>,
    connections: usize,
    epoll: OwnedFd,
    nodes: Vec<Node>,
    discovery: Option<Discovery>,
    /// The node of each slot of a cluster.
    slots: Vec<u16>,
    /// Operations whose node is not known yet, and until when they wait for it.
    unrouted: VecDeque<(Instant, Job)>,
    queue: Queue,
    ended: Vec<Ended>,
    completions: Vec<Completion>,
    said: Vec<Said>,
    /// When the first of them began to wait for others.
    held_since: Option<Instant>,
    counters: Counters,
    scratch: Vec<u8>,
    random: u64,
    begun: Instant,
    /// Since `begun`, at the last wake-up.
    now: Duration,
    /// When the next connection to a replica may be replaced.
    next_leave: Instant,
}

impl EventLoop {
    /// `seed` randomises the pauses between attempts to connect.
    pub fn new(
        settings: &Arc<Settings>,
        pool: &Region,
        inbox: &Arc<Inbox>,
        outbox: &Arc<Outbox>,
        connections: usize,
        seed: u64,
    ) -> io::Result<EventLoop> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, inbox.waker_fd(), EventData::new_u64(INBOX), EventFlags::IN)?;
        let now = Instant::now();
        let mut event_loop = EventLoop {
            discovery: Discovery::new(settings, now),
            slots: vec![NOBODY; usize::from(SLOTS)],
            settings: settings.clone(),
            pool: pool.clone(),
            inbox: inbox.clone(),
            outbox: outbox.clone(),
            connections,
            epoll,
            nodes: Vec::new(),
            unrouted: VecDeque::new(),
            queue: Queue::default(),
            ended: Vec::new(),
            completions: Vec::new(),
            said: Vec::new(),
            held_since: None,
            counters: Counters::default(),
            scratch: Vec::new(),
            random: seed,
            begun: now,
            now: Duration::ZERO,
            next_leave: now,
        };
        if event_loop.discovery.is_none() {
            event_loop.node_of(&settings.addresses[0]);
        }
        Ok(event_loop)
    }

    /// Runs until the inbox is closed.
    pub fn run(mut self) {
        while !self.inbox.is_closed.load(Ordering::Relaxed) {
            let is_called = self.wait_and_receive();
            let now = Instant::now();
            self.now = now - self.begun;
            self.nodes.iter_mut().for_each(|node| node.advance(self.now));
            if is_called {
                self.accept();
            }
            self.expire(now);
            self.discovery(now);
            self.connect(now);
            self.settle();
            self.launch(now);
            self.settle();
            self.report_state();
            self.publish(now);
        }
    }

    /// Returns whether the inbox has something.
    fn wait_and_receive(&mut self) -> bool {
        let mut events = [MaybeUninit::<Event>::uninit(); MOST_EVENTS];
        let timeout = self.due().map(|due| {
            // Rounded up; otherwise the last part of a millisecond would be a busy loop.
            let rest = due.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000) * 1_000_000;
            rustix::event::Timespec { tv_sec: (rest / 1_000_000_000) as i64, tv_nsec: (rest % 1_000_000_000) as _ }
        });
        let events = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => &*events,
            Err(Errno::INTR) => return false,
            Err(error) => panic!("cannot wait for sockets: {error}"),
        };
        let mut is_called = false;
        for event in events {
            match event.data.u64() {
                INBOX => is_called = true,
                token => self.on_event(token, event.flags),
            }
        }
        is_called
    }

    fn due(&self) -> Option<Instant> {
        let nodes = self.nodes.iter().filter_map(Node::due);
        let held = self.held_since.map(|since| since + LONGEST_HELD);
        let refused = self.nodes.iter().filter_map(Node::refuses_until).map(|until| self.begun + until);
        let unrouted = self.unrouted.front().map(|(due, _)| *due);
        nodes.chain(self.discovery.as_ref().and_then(Discovery::due)).chain(held).chain(refused).chain(unrouted).min()
    }

    fn on_event(&mut self, token: u64, flags: EventFlags) {
        let EventLoop { settings, pool, counters, ended, nodes, discovery, .. } = self;
        let (node, link) = ((token >> 32) as usize, token as u32 as usize);
        let connection = match token {
            DISCOVERY => discovery.as_mut().and_then(|discovery| discovery.connection.as_mut()),
            _ => nodes.get_mut(node).and_then(|node| node.links[link].connection.as_mut()),
        };
        // The event may be about a connection that ended in this turn.
        let Some(connection) = connection else { return };
        let was_ready = connection.is_ready();
        let is_at_end = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        let mut context = Context { settings, pool, counters, ended };
        let mut result = Ok(());
        if flags.contains(EventFlags::OUT) || is_at_end {
            result = connection.on_writable(pool);
        }
        if result.is_ok() && (flags.contains(EventFlags::IN) || is_at_end) {
            result = connection.on_readable(is_at_end, &mut context);
        }
        let is_new = !was_ready && connection.is_ready();
        let refusals = std::mem::take(&mut connection.refusals);
        let words = if token == DISCOVERY && result.is_err() { connection.last_words(pool) } else { None };
        if std::mem::take(&mut connection.is_useless) {
            let now = Instant::now();
            if self.next_leave <= now {
                (connection.is_leaving, self.next_leave) = (true, now + LEAVE_PAUSE);
            }
            discovery.iter_mut().for_each(Discovery::want);
        }
        // A redirect is a refusal if it does not say to whom.
        if refusals.iter().flatten().any(|said| said.starts_with("CLUSTERDOWN") || said.starts_with("MOVED")) {
            discovery.iter_mut().for_each(Discovery::doubt);
        }
        if let Some(node) = nodes.get_mut(node) {
            node.refused(refusals);
        }
        match (token, result) {
            (DISCOVERY, _) if is_new => self.heard(),
            (DISCOVERY, Err(loss)) => self.discovery_failed(&words.unwrap_or(loss.why)),
            (DISCOVERY, Ok(())) => {}
            (_, Err(loss)) => self.lose(node, link, loss),
            (_, Ok(())) if is_new => self.welcome(node, link),
            (_, Ok(())) => {}
        }
    }

    /// Handles the reply to a connection's greeting.
    fn welcome(&mut self, node: usize, link: usize) {
        let place = &mut self.nodes[node].links[link].connection;
        match place.as_ref().and_then(Connection::refusal).map(connection::refused) {
            // `LOADING`, `NOAUTH`, `WRONGPASS`, …: a later attempt may succeed.
            Some(why) => {
                *place = None;
                self.counters.failed_connects += 1;
                self.fail_link(node, link, Use::Failed, &why);
            }
            _ => {
                self.counters.connections_made += 1;
                self.nodes[node].welcomed();
            }
        }
    }

    /// Handles the end of a connection and of everything in flight on it.
    fn lose(&mut self, node: usize, link: usize, loss: Loss) {
        let place = &mut self.nodes[node];
        let Some(mut connection) = place.links[link].connection.take() else { return };
        place.last_refusals = Default::default();
        let words = connection.last_words(&self.pool);
        let was_ready = connection.is_ready() && words.is_none();
        let was = match was_ready && !connection.has_in_flight() && !loss.is_lost_step {
            _ if connection.has_served => Use::Served,
            true => Use::Idle,
            false => Use::Failed,
        };
        if connection.has_changes() {
            place.last_refusals[Verb::Write as usize] = Some(format!("the connection ends ({})", loss.why));
        }
        connection.end_with(loss.kind, &mut self.ended);
        self.fail_link(node, link, was, &words.unwrap_or(loss.why));
        self.counters.lost_steps += u64::from(loss.is_lost_step);
        match was_ready {
            true => self.counters.connections_lost += 1,
            false => self.counters.failed_connects += 1,
        }
    }

    fn fail_link(&mut self, node: usize, link: usize, was: Use, why: &str) {
        let now = Instant::now();
        let place = &mut self.nodes[node];
        match was {
            Use::Served | Use::Idle => place.dialer.served(),
            Use::Failed => place.dialer.failed(),
        }
        if was == Use::Failed {
            self.settings.access.renew_aside();
        }
        place.links[link].backoff.ended(now, was, &mut self.random);
        let why = format!("{}: {why}", place.dialer.address);
        tracing::debug!(tier = "redis", server = %place.dialer.address, why, "connection ended");
        self.outbox.done().last_error = Some((why, Instant::now()));
        match (&mut self.discovery, was) {
            (Some(discovery), Use::Served | Use::Idle) => discovery.want(),
            (Some(discovery), Use::Failed) => discovery.doubt(),
            (None, _) => {}
        }
    }

    fn discovery_failed(&mut self, why: &str) {
        let Some(discovery) = &mut self.discovery else { return };
        let why = format!("cannot find the servers: {}: {why}", discovery.asked());
        discovery.failed(Instant::now(), &mut self.random);
        self.settings.access.renew_aside();
        self.settings.sentinel_access.renew_aside();
        self.counters.failed_connects += 1;
        self.outbox.done().last_error = Some((why, Instant::now()));
    }

    fn heard(&mut self) {
        let Some(discovery) = &mut self.discovery else { return };
        let (found, ended) = discovery.read(Instant::now());
        match found {
            Some(Found::Master(address)) => self.follow(&address),
            Some(Found::Map(map)) => self.adopt(&map),
            None => {}
        }
        if let Err(why) = ended {
            self.discovery_failed(&why);
        }
    }

    /// Switches to the master at `address`. A former master keeps only what is in flight.
    fn follow(&mut self, address: &Address) {
        if self.nodes.first().is_some_and(|node| node.dialer.address == *address) {
            return;
        }
        for mut node in self.nodes.drain(..) {
            let due = Instant::now() + self.settings.config.operation_timeout;
            self.unrouted.extend(node.take_waiting().map(|job| (due, job)));
            let connections = node.links.into_iter().filter_map(|link| link.connection);
            for connection in connections {
                self.counters.connections_lost += u64::from(connection.is_ready());
                connection.end_with(ErrorKind::Unavailable, &mut self.ended);
            }
        }
        // Failures of operations on the former master count against that master.
        self.settle();
        self.node_of(address);
        self.reroute();
    }

    fn adopt(&mut self, map: &[(u16, u16, Address)]) {
        self.slots.fill(NOBODY);
        for (first, last, address) in map {
            let node = self.node_of(address);
            self.slots[usize::from(*first)..=usize::from(*last)].fill(node);
        }
        for node in &mut self.nodes {
            node.is_retired = !map.iter().any(|(_, _, address)| node.dialer.address == *address);
        }
        self.report_servers();
        self.reroute();
    }

    /// The node with that address; created if new.
    fn node_of(&mut self, address: &Address) -> u16 {
        let known = self.nodes.iter().position(|node| node.dialer.address == *address);
        let at = known.unwrap_or_else(|| {
            let has_breakers = self.settings.config.has_breakers;
            self.nodes.push(Node::new(address.clone(), self.connections, has_breakers, Instant::now()));
            self.nodes.len() - 1
        });
        let was_retired = std::mem::take(&mut self.nodes[at].is_retired);
        if known.is_none() || was_retired {
            self.report_servers();
        }
        u16::try_from(at).expect("a cluster has fewer nodes than slots")
    }

    fn report_servers(&self) {
        let used = self.nodes.iter().filter(|node| !node.is_retired);
        *self.inbox.servers() = used.map(|node| node.dialer.address.clone()).collect();
    }

    fn reroute(&mut self) {
        for (_, job) in std::mem::take(&mut self.unrouted) {
            self.route(job);
        }
    }

    fn route(&mut self, job: Job) {
        let node = match self.settings.config.mode {
            Mode::Cluster => {
                self.settings.config.write_name(&mut self.scratch, &job.op.key, 0);
                self.slots[usize::from(name::slot(&self.scratch))]
            }
            _ => 0,
        };
        let is_known = !self.nodes.is_empty();
        match self.nodes.get(usize::from(node)) {
            Some(_) => self.give(node, job),
            None => {
                match is_known {
                    // The cluster has a gap; the next map may close it.
                    true => self.ended.push(in_vain(job)),
                    false => {
                        self.unrouted.push_back((Instant::now() + self.settings.config.operation_timeout, job));
                    }
                }
                self.discovery.iter_mut().for_each(Discovery::want);
            }
        }
    }

    /// Hands the operation to a known node. A node that fails in this direction gets nothing.
    fn give(&mut self, at: u16, job: Job) {
        let job = Job { node: at, ..job };
        let node = &mut self.nodes[usize::from(at)];
        match node.refuses(&job) {
            true => self.finish(&job, Outcome::Failed(ErrorKind::Unavailable)),
            false => node.push(job),
        }
    }

    /// Takes requests from the owner.
    fn accept(&mut self) {
        let mut queue = std::mem::take(&mut self.queue);
        self.inbox.take(&mut queue);
        for op in queue.ops.drain(..) {
            self.route(Job { op, node: NOBODY, redirects: 0, is_asking: false });
        }
        for id in queue.cancelled.drain(..) {
            self.cancel(id);
        }
        self.queue = queue;
    }

    fn cancel(&mut self, id: OpId) {
        let unrouted = self.unrouted.iter().position(|(_, job)| job.op.id == id);
        let unrouted = unrouted.and_then(|at| self.unrouted.remove(at)).map(|(_, job)| job);
        let waiting = unrouted.or_else(|| self.nodes.iter_mut().find_map(|node| node.withdraw(id)));
        let mut connections =
            self.nodes.iter_mut().flat_map(|node| &mut node.links).filter_map(|link| link.connection.as_mut());
        if let Some(job) = waiting.or_else(|| connections.find_map(|connection| connection.abandon(id))) {
            self.counters.cancelled_operations += 1;
            self.say(&job, Outcome::Failed(ErrorKind::Timeout));
            self.hear(&job, Outcome::Failed(ErrorKind::Timeout));
            self.completions.push(Completion { id, outcome: Outcome::Failed(ErrorKind::Timeout) });
        }
    }

    /// Ends connections that are past a deadline, or were leaving, and operations that have found no node in time.
    fn expire(&mut self, now: Instant) {
        while let Some((_, job)) = self.unrouted.pop_front_if(|(due, _)| *due <= now) {
            self.ended.push(Ended { job, verdict: Verdict::Done(Outcome::Failed(ErrorKind::Timeout)) });
        }
        for node in 0..self.nodes.len() {
            for link in 0..self.nodes[node].links.len() {
                let connection = self.nodes[node].links[link].connection.as_ref();
                if connection.and_then(Connection::due).is_some_and(|due| due <= now) {
                    let why = "the server does not answer in time".to_string();
                    self.lose(node, link, Loss { kind: ErrorKind::Timeout, why, is_lost_step: false });
                } else if connection.is_some_and(Connection::has_left) {
                    let why = "the server is no longer a master".to_string();
                    self.lose(node, link, Loss { kind: ErrorKind::Unavailable, why, is_lost_step: false });
                }
            }
        }
        let discovery = self.discovery.as_ref().and_then(|discovery| discovery.connection.as_ref());
        if discovery.and_then(Connection::due).is_some_and(|due| due <= now) {
            self.discovery_failed("the server does not answer in time");
        }
    }

    fn discovery(&mut self, now: Instant) {
        let Some(discovery) = &mut self.discovery else { return };
        match discovery.begin(now, &self.settings, &self.inbox) {
            Ok(false) => {}
            Ok(true) => {
                let connection = discovery.connection.as_ref().expect("it has just begun");
                watch(&self.epoll, connection, DISCOVERY);
            }
            Err(why) => self.discovery_failed(&why),
        }
    }

    fn connect(&mut self, now: Instant) {
        for at in 0..self.nodes.len() {
            let greet = || greeting(&self.settings);
            for (link, begun) in self.nodes[at].begin(now, &self.settings, greet, &self.inbox) {
                match begun {
                    Ok(()) => {
                        let connection = self.nodes[at].links[link].connection.as_ref().expect("it has just begun");
                        watch(&self.epoll, connection, (at as u64) << 32 | link as u64);
                    }
                    Err(why) => {
                        self.counters.failed_connects += 1;
                        self.fail_link(at, link, Use::Failed, &why);
                    }
                }
            }
        }
    }

    /// Launches and sends operations as capacity allows. Operations that wait without hope fail.
    fn launch(&mut self, now: Instant) {
        for at in 0..self.nodes.len() {
            let EventLoop { settings, pool, counters, ended, nodes, scratch, .. } = self;
            ended.extend(nodes[at].take_refused().into_iter().map(in_vain));
            nodes[at].dispatch(now, &mut Context { settings, pool, counters, ended }, scratch);
            for link in 0..self.nodes[at].links.len() {
                let connection = self.nodes[at].links[link].connection.as_mut();
                if let Some(Err(loss)) = connection.map(|connection| connection.send(&self.pool)) {
                    self.lose(at, link, loss);
                }
            }
            if !self.nodes[at].is_hopeful() {
                self.ended.extend(self.nodes[at].take_waiting().map(in_vain));
            }
        }
        if self.discovery.as_ref().is_some_and(|discovery| !discovery.is_hopeful()) {
            self.ended.extend(self.unrouted.drain(..).map(|(_, job)| in_vain(job)));
        }
    }

    /// Completes operations that have ended, or passes them on to another node.
    fn settle(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        for Ended { job, verdict } in ended.drain(..) {
            match verdict {
                Verdict::Done(outcome) => {
                    self.say(&job, outcome);
                    self.finish(&job, outcome);
                }
                Verdict::InVain => self.finish(&job, Outcome::Failed(ErrorKind::Unavailable)),
                Verdict::Moved { slot, to } => self.redirect(job, Some(slot), &to),
                Verdict::Ask { to } => self.redirect(job, None, &to),
            }
        }
        self.ended = ended;
    }

    /// `slot` now belongs to another node. Without it, only this operation moves.
    fn redirect(&mut self, job: Job, slot: Option<u16>, to: &Address) {
        self.counters.redirects += 1;
        if self.settings.config.mode != Mode::Cluster || job.redirects == MOST_REDIRECTS {
            let why = format!("the operation was redirected to {to}: set `mode` to `cluster` if this is a cluster");
            self.outbox.done().last_error = Some((why, Instant::now()));
            return self.finish(&job, Outcome::Failed(ErrorKind::Unavailable));
        }
        let node = self.node_of(to);
        if let (Some(slot), Some(discovery)) = (slot, &mut self.discovery) {
            self.slots[usize::from(slot)] = node;
            discovery.want();
        }
        let job = Job { redirects: job.redirects + 1, is_asking: slot.is_none(), ..job };
        self.give(node, job);
    }

    fn finish(&mut self, job: &Job, outcome: Outcome) {
        self.hear(job, outcome);
        count(&mut self.counters, job, outcome);
        self.completions.push(Completion { id: job.op.id, outcome });
    }

    /// The node that had the operation is judged by its outcome.
    fn hear(&mut self, job: &Job, outcome: Outcome) {
        if let Some(node) = self.nodes.get_mut(usize::from(job.node)) {
            let opened = node.heard(job, outcome, self.now);
            self.counters.breakers_opened += opened;
            if opened > 0 {
                self.discovery.iter_mut().for_each(Discovery::doubt);
            }
            if opened > 0
                && let Some(why) = node.why_left_alone(job, outcome)
            {
                self.outbox.done().last_error = Some((format!("{}: {why}", node.dialer.address), Instant::now()));
            }
        }
    }

    /// What the node that had the operation did with it is told, where it lasts.
    fn say(&mut self, job: &Job, outcome: Outcome) {
        if let Some(node) = self.nodes.get(usize::from(job.node)) {
            self.said.extend(node.said(job, outcome, self.outbox.hears_reads.load(Ordering::Relaxed)));
        }
    }

    fn report_state(&self) {
        let ready = self.nodes.iter().map(Node::ready).sum();
        self.inbox.connections.store(ready, Ordering::Relaxed);
        // Without a node to read from, nobody can be asked. One that is retired is not asked, though it may answer.
        let read = || self.nodes.iter().filter(|node| !node.is_retired && !node.refuses_reads());
        let is_hopeful = match &self.discovery {
            Some(discovery) if self.nodes.is_empty() => discovery.is_hopeful(),
            _ => read().any(Node::is_hopeful),
        };
        match (read().map(Node::ready).sum::<usize>(), is_hopeful) {
            (1.., _) => self.inbox.set_state(State::Up),
            (0, false) => self.inbox.set_state(State::Down),
            // A connection is being made: the state stays as it is.
            (0, true) => {}
        }
    }

    /// Hands out completions, unless more are about to come.
    fn publish(&mut self, now: Instant) {
        let since = self.held_since.unwrap_or(now);
        let is_lonely = !self.completions.is_empty() && self.completions.len() < MOST_HELD;
        if is_lonely && now < since + LONGEST_HELD && self.nodes.iter().any(Node::has_in_flight) {
            self.held_since = Some(since);
            return;
        }
        self.held_since = None;
        self.outbox.publish(&mut self.completions, &mut self.said, &mut self.counters);
    }
}

/// Credentials, database, and a test whether the server serves.
pub(super) fn greeting(settings: &Settings) -> Greeting {
    let mut greeting = Greeting::default();
    authenticate(&settings.access, &mut greeting);
    if settings.database != 0 {
        greeting.say(&[b"SELECT", settings.database.to_string().as_bytes()]);
    }
    greeting.say(&[b"PING"]);
    greeting
}

/// Edge-triggered: reading and sending continue until the socket has no more.
fn watch(epoll: &OwnedFd, connection: &Connection, token: u64) {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    let added = epoll::add(epoll.as_fd(), connection.fd(), EventData::new_u64(token), flags);
    // Without the event, the connection's deadline ends it.
    if let Err(error) = added {
        tracing::warn!(tier = "redis", %error, "cannot watch a connection");
    }
}

fn in_vain(job: Job) -> Ended {
    Ended { job, verdict: Verdict::InVain }
}

fn count(counters: &mut Counters, job: &Job, outcome: Outcome) {
    match (job.op.kind, outcome) {
        (_, Outcome::Stored) => {
            counters.stored_blocks += 1;
            counters.stored_bytes += job.op.length_bytes;
        }
        (_, Outcome::Loaded { length_bytes, .. }) => {
            counters.loaded_blocks += 1;
            counters.loaded_bytes += length_bytes;
        }
        (OpKind::Exists, Outcome::Found) => counters.found_blocks += 1,
        (_, Outcome::Removed) => counters.removed_blocks += 1,
        (OpKind::Exists, Outcome::Absent) => counters.absent_finds += 1,
        (OpKind::Load, Outcome::Absent) => counters.absent_loads += 1,
        (OpKind::Store, Outcome::Failed(ErrorKind::Full)) => counters.full_stores += 1,
        (_, Outcome::Failed(ErrorKind::Unavailable)) => counters.unavailable_operations += 1,
        (_, Outcome::Failed(ErrorKind::Timeout)) => counters.late_operations += 1,
        // Already counted by kind: wrong sizes, foreign values, corrupt blocks.
        (_, Outcome::Failed(ErrorKind::Corrupt | ErrorKind::Invalid)) => {}
        (_, Outcome::Failed(_)) => counters.refused_operations += 1,
        (_, Outcome::Found | Outcome::Absent) => {}
    }
}
