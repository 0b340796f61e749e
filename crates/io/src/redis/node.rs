//! One server in an event loop: its connections, and the operations that wait for one of them.
//!
//! Invariants: reads (loads and lookups) are launched before changes (stores, removals and touches). If several
//! connections are ready, the first of them carries no changes, and no read is launched behind a change: a server may
//! let changes hang and answer reads. Operations wait only while a connection exists or is being made. A node that
//! fails is left alone for a while, in the direction in which it fails: other nodes are used meanwhile, and a node that
//! takes no writes is read from.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::decorate::Breakers;
use forebay_core::tier::{OpId, Outcome};

use super::address::Address;
use super::config::Settings;
use super::connect::{Backoff, Dialer};
use super::connection::{Connection, Context, Greeting};
use super::in_flight::{InFlight, Job, Verb};
use super::shared::{Inbox, Said};

pub(super) struct Node {
    pub dialer: Dialer,
    /// The cluster no longer names it: its connections stay, and are not replaced.
    pub is_retired: bool,
    pub links: Vec<Link>,
    name: Arc<str>,
    /// What it said last, by [`Verb`], since it last answered such an operation or lost a connection.
    pub last_refusals: [Option<String>; Verb::COUNT],
    breakers: Breakers,
    urgent: VecDeque<Job>,
    later: VecDeque<Job>,
}

/// The place for one connection.
pub(super) struct Link {
    pub connection: Option<Connection>,
    pub backoff: Backoff,
}

impl Link {
    fn is_ready(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::is_ready)
    }
}

impl Node {
    pub fn new(address: Address, connections: usize, has_breakers: bool, now: Instant) -> Node {
        let link = || Link { connection: None, backoff: Backoff::new(now) };
        Node {
            name: address.to_string().into(),
            last_refusals: Default::default(),
            dialer: Dialer::new(address),
            is_retired: false,
            links: (0..connections).map(|_| link()).collect(),
            breakers: Breakers::new(has_breakers),
            urgent: VecDeque::new(),
            later: VecDeque::new(),
        }
    }

    pub fn ready(&self) -> usize {
        self.links.iter().filter(|link| link.is_ready()).count()
    }

    /// Whether waiting for the node makes sense: some connection exists, is being made, or was never tried.
    pub fn is_hopeful(&self) -> bool {
        let is_tried = |link: &Link| link.backoff.failures > 0 || self.is_retired;
        self.links.iter().any(|link| link.connection.is_some() || !is_tried(link))
    }

    /// An operation that was given to it has ended. Returns how many breakers this opened.
    pub fn heard(&mut self, job: &Job, outcome: Outcome, now: Duration) -> u64 {
        if !matches!(outcome, Outcome::Failed(_)) {
            self.last_refusals[job.verb() as usize] = None;
        }
        let opened = self.breakers.opened();
        self.breakers.heard(job.op.kind, outcome, true, now);
        self.breakers.opened() - opened
    }

    /// Notes what was said to operations that were refused.
    pub fn refused(&mut self, refusals: [Option<String>; Verb::COUNT]) {
        for (last, said) in self.last_refusals.iter_mut().zip(refusals) {
            *last = said.or(last.take());
        }
    }

    /// Why it is left alone after an operation that ended so.
    pub fn why_left_alone(&self, job: &Job, outcome: Outcome) -> Option<String> {
        let verb = job.verb();
        match outcome {
            Outcome::Failed(ErrorKind::Timeout) => Some(unanswered(verb)),
            _ => {
                let said = self.last_refusals[verb as usize].as_ref()?;
                Some(format!("the server refuses {}: {said}", verb.name()))
            }
        }
    }

    /// What an operation that has ended tells of its kind. Reads that were answered are told only where somebody
    /// `hears` them.
    pub fn said(&self, job: &Job, outcome: Outcome, hears: bool) -> Option<Said> {
        let verb = job.verb();
        let refusal = match (verb, outcome) {
            (Verb::Write, Outcome::Stored) => None,
            (Verb::Probe | Verb::Load, Outcome::Found | Outcome::Absent | Outcome::Loaded { .. }) if hears => None,
            // Reads that hang make the tier sick.
            (Verb::Write, Outcome::Failed(ErrorKind::Timeout)) => Some(unanswered(verb)),
            // Whatever a server says or does to a write, it did not take it. A block without its checksum was not sent.
            (Verb::Write, Outcome::Failed(kind)) if kind != ErrorKind::Corrupt => {
                Some(self.last_refusals[verb as usize].clone()?)
            }
            (Verb::Probe | Verb::Load, Outcome::Failed(ErrorKind::Unsupported)) => {
                Some(self.last_refusals[verb as usize].clone().unwrap_or_default())
            }
            _ => return None,
        };
        Some(Said { server: self.name.clone(), verb, refusal })
    }

    /// What it refused before it refuses no more, once the pause is over.
    pub fn advance(&mut self, now: Duration) {
        self.breakers.advance(now);
    }

    /// It has let a connection in: it may try, and one more failure is enough.
    pub fn welcomed(&mut self) {
        self.breakers.welcomed();
    }

    /// Whether operations of this kind are kept from it.
    pub fn refuses(&self, job: &Job) -> bool {
        self.breakers.refuse(job.op.kind)
    }

    /// Whether loads and lookups are kept from it.
    pub fn refuses_reads(&self) -> bool {
        self.breakers.why_no_reads().is_some()
    }

    /// When the next pause of its breakers is over.
    pub fn refuses_until(&self) -> Option<Duration> {
        self.breakers.open_until()
    }

    /// Changes that are kept from it since they began to wait. Reads that wait are tried.
    pub fn take_refused(&mut self) -> VecDeque<Job> {
        if self.breakers.open_until().is_none() {
            return VecDeque::new();
        }
        let (refused, kept) = self.later.drain(..).partition(|job| self.breakers.refuse(job.op.kind));
        self.later = kept;
        refused
    }

    pub fn has_in_flight(&self) -> bool {
        self.links.iter().any(|link| link.connection.as_ref().is_some_and(Connection::has_in_flight))
    }

    pub fn push(&mut self, job: Job) {
        let queue = if job.is_change() { &mut self.later } else { &mut self.urgent };
        queue.push_back(job);
    }

    /// All waiting operations, if they wait without hope.
    pub fn take_waiting(&mut self) -> impl Iterator<Item = Job> {
        self.urgent.drain(..).chain(self.later.drain(..))
    }

    /// Removes a waiting operation.
    pub fn withdraw(&mut self, id: OpId) -> Option<Job> {
        let queues = [&mut self.urgent, &mut self.later];
        queues.into_iter().find_map(|queue| {
            let at = queue.iter().position(|job| job.op.id == id)?;
            queue.remove(at)
        })
    }

    /// Continues begun operations and launches waiting ones as capacity allows. Nothing is sent yet.
    pub fn dispatch(&mut self, now: Instant, context: &mut Context<'_>, scratch: &mut Vec<u8>) {
        let settings = context.settings;
        let due = now + settings.config.operation_timeout;
        let mut ready = (0..self.links.len()).filter(|at| self.links[*at].is_ready());
        let (first, second) = (ready.next().unwrap_or(0), ready.next());
        let first_for_changes = second.map_or(first, |_| first + 1);
        for (of_changes, queue, from) in [(false, &mut self.urgent, 0), (true, &mut self.later, first_for_changes)] {
            let links = &mut self.links[..];
            let of_class = |connection: &mut Connection| connection.bytes_in_flight()[usize::from(of_changes)];
            let is_meant = |connection: &Connection| of_changes || second.is_none() || !connection.has_changes();
            let mut in_flight: u64 = connections(links).map(of_class).sum();
            let mut takes = |bytes| {
                let fits = in_flight == 0 || in_flight + bytes <= settings.config.pipeline_bytes;
                in_flight += if fits { bytes } else { 0 };
                fits
            };
            loop {
                // What was begun goes on where it is, whichever connection is the first by now.
                let begun = connections(links).find_map(|connection| {
                    let bytes = connection.more_bytes(of_changes, settings)?;
                    Some((connection, bytes))
                });
                if let Some((connection, bytes)) = begun {
                    if !takes(bytes) {
                        break;
                    }
                    connection.ask(settings, scratch);
                } else if let Some(job) = queue.front()
                    && let Some(connection) = emptiest(&mut links[from..], settings, is_meant)
                    && takes(InFlight::first_bytes(&job.op, settings))
                {
                    connection.launch(*job, due, context, scratch);
                    queue.pop_front();
                } else {
                    break;
                }
            }
        }
    }

    /// Begins new connections on the links that are due.
    pub fn begin(
        &mut self,
        now: Instant,
        settings: &Settings,
        greet: impl Fn() -> Greeting,
        inbox: &Arc<Inbox>,
    ) -> Vec<(usize, Result<(), String>)> {
        let mut begun = Vec::new();
        for (at, link) in self.links.iter_mut().enumerate() {
            if self.is_retired || link.connection.is_some() || link.backoff.at > now {
                continue;
            }
            match self.dialer.begin(settings.config.socket_buffer_bytes, settings.access.tls.as_ref(), inbox) {
                Ok(Some(transport)) => {
                    let due = now + settings.config.connect_timeout;
                    link.connection = Some(Connection::new(transport, self.dialer.address.clone(), &greet(), due));
                    begun.push((at, Ok(())));
                }
                Ok(None) => break,
                Err(why) => begun.push((at, Err(why))),
            }
        }
        begun
    }

    /// When the node next needs a turn even if nothing arrives.
    pub fn due(&self) -> Option<Instant> {
        let due = |link: &Link| match &link.connection {
            Some(connection) => connection.due(),
            None => self.dialer.due(link.backoff.at).filter(|_| !self.is_retired),
        };
        self.links.iter().filter_map(due).min()
    }
}

fn connections(links: &mut [Link]) -> impl Iterator<Item = &mut Connection> {
    links.iter_mut().filter_map(|link| link.connection.as_mut())
}

/// The connection with the fewest bytes in flight, of those that are meant and can take one more operation.
fn emptiest<'a>(
    links: &'a mut [Link],
    settings: &Settings,
    is_meant: impl Fn(&Connection) -> bool,
) -> Option<&'a mut Connection> {
    let roomy = connections(links).filter(|connection| connection.has_room(settings) && is_meant(connection));
    roomy.min_by_key(|connection| connection.bytes_in_flight().iter().sum::<u64>())
}

fn unanswered(verb: Verb) -> String {
    format!("the server does not answer {} in time", verb.name())
}
