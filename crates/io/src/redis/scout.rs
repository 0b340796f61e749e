//! Asks where the servers are: sentinels for their master, nodes of a cluster for its map of slots.
//!
//! Invariant: one question at a time, to one server after the other, each on a connection of its own that is closed
//! after the answer; between questions there is a pause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::config::{Access, Mode, Settings};
use super::connection::{Connection, Greeting};
use super::dial::{Backoff, Dial};
use super::name::SLOTS;
use super::resp::Reply;
use super::shared::Inbox;

/// While a cluster moves slots, each redirect asks for a new map; more often than this is of no use.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
/// Servers that are asked in turn.
const MOST_SERVERS: usize = 64;

/// What was found out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Master(Address),
    /// First and last slot, and who has them.
    Map(Vec<(u16, u16, Address)>),
}

pub(super) struct Scout {
    dials: Vec<Dial>,
    at: usize,
    greeting: Greeting,
    is_wanted: bool,
    pub backoff: Backoff,
    pub connection: Option<Connection>,
}

impl Scout {
    /// `None` if there is nothing to find out.
    pub fn new(settings: &Settings, now: Instant) -> Option<Scout> {
        let greeting = question(settings)?;
        let dials = settings.addresses.iter().cloned().map(Dial::new).collect();
        let backoff = Backoff::new(now);
        Some(Scout { dials, at: 0, greeting, is_wanted: true, backoff, connection: None })
    }

    /// Whether an answer may still come without another failure before it.
    pub fn is_hopeful(&self) -> bool {
        self.connection.is_some() || self.backoff.failures == 0
    }

    pub fn want(&mut self) {
        self.is_wanted = true;
    }

    pub fn due(&self) -> Option<Instant> {
        match &self.connection {
            Some(connection) => connection.due(),
            None => Some(self.backoff.at).filter(|_| self.is_wanted && !self.dials[self.at].is_waiting()),
        }
    }

    /// Begins to ask, if it is time. True if a connection is under way that was not before.
    pub fn begin(&mut self, now: Instant, settings: &Settings, inbox: &Arc<Inbox>) -> Result<bool, String> {
        if !self.is_wanted || self.connection.is_some() || self.backoff.at > now {
            return Ok(false);
        }
        let dial = &mut self.dials[self.at];
        let tls = settings.scout_access.tls.as_ref();
        let Some(transport) = dial.begin(settings.config.socket_buffer_bytes, tls, inbox)? else { return Ok(false) };
        let due = now + settings.config.connect_timeout;
        self.connection = Some(Connection::new(transport, dial.address.clone(), &self.greeting, due));
        Ok(true)
    }

    /// Nothing was found out there: the next one is asked, after a pause.
    pub fn failed(&mut self, now: Instant, random: &mut u64) {
        self.connection = None;
        self.dials[self.at].failed();
        self.at = (self.at + 1) % self.dials.len();
        self.backoff.ended(now, false, random);
    }

    /// What the answer says; an error if it says nothing.
    pub fn read(&mut self, now: Instant) -> Result<Found, String> {
        let answer = self.connection.as_mut().and_then(|connection| connection.answer.take());
        let teller = &self.dials[self.at].address;
        let found = found(&answer.unwrap_or(Reply::Null), teller)?;
        self.connection = None;
        self.is_wanted = false;
        self.backoff.failures = 0;
        self.backoff.at = now + LEAST_PAUSE;
        if let Found::Map(map) = &found {
            self.learn(map);
        }
        Ok(found)
    }

    /// Any node of a cluster may be asked, so that the seeds may go.
    fn learn(&mut self, map: &[(u16, u16, Address)]) {
        for (_, _, address) in map {
            let is_known = self.dials.iter().any(|dial| dial.address == *address);
            if !is_known && self.dials.len() < MOST_SERVERS {
                self.dials.push(Dial::new(address.clone()));
            }
        }
    }
}

/// The greeting whose last reply says where the servers are, for [`found`]; `None` if nobody has to be asked.
pub(super) fn question(settings: &Settings) -> Option<Greeting> {
    let mut greeting = Greeting::default();
    authenticate(&settings.scout_access, &mut greeting);
    match &settings.config.mode {
        Mode::Single => return None,
        Mode::Sentinel { master } => {
            greeting.say(&[b"SENTINEL", b"get-master-addr-by-name", master.as_bytes()]);
        }
        Mode::Cluster => greeting.say(&[b"CLUSTER", b"SLOTS"]),
    }
    Some(greeting)
}

/// The commands that say who we are.
pub(super) fn authenticate(access: &Access, greeting: &mut Greeting) {
    match (&access.credentials.user, &access.credentials.password) {
        (Some(user), Some(password)) => greeting.say(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
        (None, Some(password)) => greeting.say(&[b"AUTH", password.as_bytes()]),
        _ => {}
    }
}

/// What the answer to a [`question`] says.
pub(super) fn found(answer: &Reply, teller: &Address) -> Result<Found, String> {
    match answer {
        Reply::Error(text) => Err(format!("it refuses: {text}")),
        Reply::Null => Err("the sentinel knows no such master".to_string()),
        Reply::Array(items) => match items.as_slice() {
            [host @ Reply::Text(_), port @ Reply::Text(_)] => master(host, port, teller),
            ranges => ranges.iter().map(|range| range_of(range, teller)).collect::<Option<_>>().map(Found::Map),
        }
        .ok_or_else(|| "its answer cannot be understood".to_string()),
        _ => Err("its answer cannot be understood".to_string()),
    }
}

fn master(host: &Reply, port: &Reply, teller: &Address) -> Option<Found> {
    Address::of_node(host.text()?, port.text()?.parse().ok()?, teller).map(Found::Master)
}

/// First and last slot, the master, and its replicas, which are not used.
fn range_of(range: &Reply, teller: &Address) -> Option<(u16, u16, Address)> {
    let [first, last, node, ..] = range.items()? else { return None };
    let slot = |reply: &Reply| u16::try_from(reply.integer()?).ok().filter(|slot| *slot < SLOTS);
    let [host, port, ..] = node.items()? else { return None };
    let host = if *host == Reply::Null { "" } else { host.text()? };
    let address = Address::of_node(host, u16::try_from(port.integer()?).ok()?, teller)?;
    Some((slot(first)?, slot(last)?, address))
}

#[cfg(test)]
mod tests {
    use super::super::resp::reply;
    use super::*;

    fn read(bytes: &[u8]) -> Result<Found, String> {
        let teller = Address::Tcp { host: "10.0.0.1".to_string(), port: 1 };
        found(&reply(bytes).unwrap().unwrap().0, &teller)
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_string(), port }
    }

    #[test]
    fn a_sentinels_answer_is_read() {
        assert_eq!(read(b"*2\r\n$3\r\n::1\r\n$4\r\n7000\r\n"), Ok(Found::Master(tcp("::1", 7000))));
        assert!(read(b"*-1\r\n").is_err() && read(b"-ERR no\r\n").is_err() && read(b":1\r\n").is_err());
    }

    #[test]
    fn a_clusters_map_is_read() {
        let map =
            b"*2\r\n*4\r\n:0\r\n:8000\r\n*3\r\n$8\r\n10.0.0.2\r\n:7000\r\n$2\r\nid\r\n*2\r\n$8\r\n10.0.0.9\r\n:1\r\n\
            *3\r\n:8001\r\n:16383\r\n*2\r\n$0\r\n\r\n:7001\r\n";
        let expected = vec![(0, 8000, tcp("10.0.0.2", 7000)), (8001, 16_383, tcp("10.0.0.1", 7001))];
        assert_eq!(read(map), Ok(Found::Map(expected)));
        assert!(read(b"*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n").is_err(), "no such slot");
    }
}
