//! One server as a lane sees it: its connections, and the operations that wait for one of them.
//!
//! Invariants: loads and lookups are launched before stores; if there are several connections, the first one carries
//! no stores, so that a load never waits behind all of them; operations wait only while a connection is there or
//! being made.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use forebay_core::tier::OpId;

use super::address::Address;
use super::config::Settings;
use super::connection::{Connection, Greeting};
use super::dial::{Backoff, Dial};
use super::flight::{Flight, Job};
use super::shared::Inbox;

pub(super) struct Node {
    pub dial: Dial,
    /// The cluster does not name it any more: what is connected stays so, and is not replaced.
    pub is_retired: bool,
    pub seats: Vec<Seat>,
    urgent: VecDeque<Job>,
    later: VecDeque<Job>,
}

/// Room for one connection.
pub(super) struct Seat {
    pub connection: Option<Connection>,
    pub backoff: Backoff,
}

impl Node {
    pub fn new(address: Address, connections: usize, now: Instant) -> Node {
        let seat = || Seat { connection: None, backoff: Backoff::new(now) };
        Node {
            dial: Dial::new(address),
            is_retired: false,
            seats: (0..connections).map(|_| seat()).collect(),
            urgent: VecDeque::new(),
            later: VecDeque::new(),
        }
    }

    pub fn ready(&self) -> usize {
        let is_ready = |seat: &&Seat| seat.connection.as_ref().is_some_and(Connection::is_ready);
        self.seats.iter().filter(is_ready).count()
    }

    /// Whether it makes sense to wait for it: some connection is there, under way, or was never tried.
    pub fn is_hopeful(&self) -> bool {
        let is_tried = |seat: &Seat| seat.backoff.failures > 0 || self.is_retired;
        self.seats.iter().any(|seat| seat.connection.is_some() || !is_tried(seat))
    }

    pub fn has_flights(&self) -> bool {
        self.seats.iter().any(|seat| seat.connection.as_ref().is_some_and(Connection::has_flights))
    }

    pub fn push(&mut self, job: Job) {
        let queue = if job.is_store() { &mut self.later } else { &mut self.urgent };
        queue.push_back(job);
    }

    /// All that waits, if it waits in vain.
    pub fn take_waiting(&mut self) -> impl Iterator<Item = Job> {
        self.urgent.drain(..).chain(self.later.drain(..))
    }

    /// Takes an operation out of those that wait.
    pub fn withdraw(&mut self, id: OpId) -> Option<Job> {
        let queues = [&mut self.urgent, &mut self.later];
        queues.into_iter().find_map(|queue| {
            let at = queue.iter().position(|job| job.op.id == id)?;
            queue.remove(at)
        })
    }

    /// Goes on with what was begun and launches what waits, as far as there is room. Nothing is sent yet.
    pub fn dispatch(&mut self, now: Instant, settings: &Settings, scratch: &mut Vec<u8>) {
        let due = now + settings.config.operation_timeout;
        let first_for_stores = usize::from(self.seats.len() > 1);
        for (of_stores, queue, from) in [(false, &mut self.urgent, 0), (true, &mut self.later, first_for_stores)] {
            let seats = &mut self.seats[from..];
            let of_class = |connection: &mut Connection| connection.bytes_in_flight()[usize::from(of_stores)];
            let mut in_flight: u64 = connections(seats).map(of_class).sum();
            let mut takes = |bytes| {
                let fits = in_flight == 0 || in_flight + bytes <= settings.config.pipeline_bytes;
                in_flight += if fits { bytes } else { 0 };
                fits
            };
            loop {
                let begun = connections(seats).find_map(|connection| {
                    let bytes = connection.more_bytes(of_stores, settings)?;
                    Some((connection, bytes))
                });
                if let Some((connection, bytes)) = begun {
                    if !takes(bytes) {
                        break;
                    }
                    connection.ask(settings, scratch);
                } else if let Some(job) = queue.front()
                    && let Some(connection) = emptiest(seats, settings)
                    && takes(Flight::first_bytes(&job.op, settings))
                {
                    connection.launch(*job, due, settings, scratch);
                    queue.pop_front();
                } else {
                    break;
                }
            }
        }
    }

    /// The seats whose time for a new connection has come.
    pub fn begin(
        &mut self,
        now: Instant,
        settings: &Settings,
        greeting: &Greeting,
        inbox: &Arc<Inbox>,
    ) -> Vec<(usize, Result<(), String>)> {
        let mut begun = Vec::new();
        for (at, seat) in self.seats.iter_mut().enumerate() {
            if self.is_retired || seat.connection.is_some() || seat.backoff.at > now {
                continue;
            }
            match self.dial.begin(settings.config.socket_buffer_bytes, settings.access.tls.as_ref(), inbox) {
                Ok(Some(transport)) => {
                    let due = now + settings.config.connect_timeout;
                    seat.connection = Some(Connection::new(transport, self.dial.address.clone(), greeting, due));
                    begun.push((at, Ok(())));
                }
                Ok(None) => break,
                Err(why) => begun.push((at, Err(why))),
            }
        }
        begun
    }

    /// When something is to be done for it, though nothing arrives.
    pub fn due(&self) -> Option<Instant> {
        let due = |seat: &Seat| match &seat.connection {
            Some(connection) => connection.due(),
            None => Some(seat.backoff.at).filter(|_| !self.is_retired && !self.dial.is_waiting()),
        };
        self.seats.iter().filter_map(due).min()
    }
}

fn connections(seats: &mut [Seat]) -> impl Iterator<Item = &mut Connection> {
    seats.iter_mut().filter_map(|seat| seat.connection.as_mut())
}

/// The connection with the fewest bytes in flight, of those that can take one more operation.
fn emptiest<'a>(seats: &'a mut [Seat], settings: &Settings) -> Option<&'a mut Connection> {
    let roomy = connections(seats).filter(|connection| connection.has_room(settings));
    roomy.min_by_key(|connection| connection.bytes_in_flight().iter().sum::<u64>())
}
