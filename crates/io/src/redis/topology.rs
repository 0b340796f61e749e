//! Finds the servers: asks sentinels for their master, and nodes of a cluster for its map of slots.
//!
//! Invariant: there is one question at a time, to one server after the other, each on a separate connection that is
//! closed after the answer. There is a pause between questions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::config::{Access, Mode, Settings};
use super::connect::{Backoff, Dialer};
use super::connection::{Connection, Greeting};
use super::name::SLOTS;
use super::resp::Reply;
use super::shared::Inbox;

/// While a cluster moves slots, each redirect requests a new map; more requests than this do not help.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
/// Limit on the servers that are asked in turn.
const MOST_SERVERS: usize = 64;
/// Why a node is not believed that has left its cluster.
const NO_SLOTS: &str = "it knows no node that has slots (hint: let it join the cluster, or take it out of \
                        `tier.redis.urls`)";

/// A discovered topology.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Master(Address),
    /// First and last slot, and their node.
    Map(Vec<(u16, u16, Address)>),
}

impl Found {
    /// The masters, each once.
    pub fn addresses(&self) -> Vec<&Address> {
        let mut addresses: Vec<&Address> = match self {
            Found::Master(address) => vec![address],
            Found::Map(ranges) => ranges.iter().map(|(_, _, address)| address).collect(),
        };
        addresses.sort_by_key(|address| address.to_string());
        addresses.dedup();
        addresses
    }
}

pub(super) struct Discovery {
    dialers: Vec<Dialer>,
    at: usize,
    greeting: Greeting,
    is_wanted: bool,
    pub backoff: Backoff,
    pub connection: Option<Connection>,
}

impl Discovery {
    /// `None` if there is nothing to discover.
    pub fn new(settings: &Settings, now: Instant) -> Option<Discovery> {
        let greeting = question(settings)?;
        let dialers = settings.addresses.iter().cloned().map(Dialer::new).collect();
        let backoff = Backoff::new(now);
        Some(Discovery { dialers, at: 0, greeting, is_wanted: true, backoff, connection: None })
    }

    /// The server that is asked, or that will be.
    pub fn teller(&self) -> &Address {
        &self.dialers[self.at].address
    }

    /// Whether an answer may still come before another failure.
    pub fn is_hopeful(&self) -> bool {
        self.connection.is_some() || self.backoff.failures == 0
    }

    pub fn want(&mut self) {
        self.is_wanted = true;
    }

    pub fn due(&self) -> Option<Instant> {
        match &self.connection {
            Some(connection) => connection.due(),
            None => self.dialers[self.at].due(self.backoff.at).filter(|_| self.is_wanted),
        }
    }

    /// Begins to ask, if it is time. True if this began a connection.
    pub fn begin(&mut self, now: Instant, settings: &Settings, inbox: &Arc<Inbox>) -> Result<bool, String> {
        if !self.is_wanted || self.connection.is_some() || self.backoff.at > now {
            return Ok(false);
        }
        let dialer = &mut self.dialers[self.at];
        let tls = settings.sentinel_access.tls.as_ref();
        let Some(transport) = dialer.begin(settings.config.socket_buffer_bytes, tls, inbox)? else { return Ok(false) };
        let due = now + settings.config.connect_timeout;
        self.connection = Some(Connection::new(transport, dialer.address.clone(), &self.greeting, due));
        Ok(true)
    }

    /// Records that a server gave no answer: the next one is asked, after a pause.
    pub fn failed(&mut self, now: Instant, random: &mut u64) {
        self.connection = None;
        self.dialers[self.at].failed();
        self.at = (self.at + 1) % self.dialers.len();
        self.backoff.ended(now, false, random);
    }

    /// Parses the answer; an error if it has no topology.
    pub fn read(&mut self, now: Instant) -> Result<Found, String> {
        let answer = self.connection.as_mut().and_then(|connection| connection.answer.take());
        let teller = self.teller();
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

    /// Any node of a cluster may be asked, so the configured seeds may disappear.
    fn learn(&mut self, map: &[(u16, u16, Address)]) {
        for (_, _, address) in map {
            let is_known = self.dialers.iter().any(|dialer| dialer.address == *address);
            if !is_known && self.dialers.len() < MOST_SERVERS {
                self.dialers.push(Dialer::new(address.clone()));
            }
        }
    }
}

/// The greeting whose last reply tells where the servers are, for [`found`]; `None` if no question is needed.
pub(super) fn question(settings: &Settings) -> Option<Greeting> {
    let mut greeting = Greeting::default();
    authenticate(&settings.sentinel_access, &mut greeting);
    match settings.config.mode {
        Mode::Single => return None,
        Mode::Sentinel => {
            let master = settings.config.sentinel.master.as_bytes();
            greeting.say(&[b"SENTINEL", b"get-master-addr-by-name", master]);
        }
        Mode::Cluster => greeting.say(&[b"CLUSTER", b"SLOTS"]),
    }
    Some(greeting)
}

/// Appends the commands that authenticate.
pub(super) fn authenticate(access: &Access, greeting: &mut Greeting) {
    match (&access.credentials.user, &access.credentials.password) {
        (Some(user), Some(password)) => greeting.say(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
        (None, Some(password)) => greeting.say(&[b"AUTH", password.as_bytes()]),
        _ => {}
    }
}

/// Parses the answer to a [`question`].
pub(super) fn found(answer: &Reply, teller: &Address) -> Result<Found, String> {
    match answer {
        Reply::Error(text) => Err(format!("it refused the question: {text}")),
        Reply::Null => Err("the sentinel knows no master of this name".to_string()),
        // Of a cluster that has not begun, or that the node has left.
        Reply::Array(items) if items.is_empty() => Err(NO_SLOTS.to_string()),
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
    let (first, last) = (slot(first)?, slot(last)?);
    (first <= last).then_some((first, last, address))
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
        assert!(
            read(b"*1\r\n*3\r\n:9\r\n:7\r\n*2\r\n$1\r\na\r\n:1\r\n").is_err(),
            "a range that ends before it begins"
        );
        assert_eq!(read(b"*0\r\n"), Err(NO_SLOTS.to_string()));
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        #[test]
        fn whatever_map_a_cluster_tells_of_names_slots_and_nodes_that_can_be() {
            let map = b"*2\r\n*4\r\n:0\r\n:8000\r\n*3\r\n$8\r\n10.0.0.2\r\n:7000\r\n$2\r\nid\r\n*2\r\n$8\r\n10.0.0.9\r\n:1\r\n\
                *3\r\n:8001\r\n:16383\r\n*2\r\n$0\r\n\r\n:7001\r\n";
            let inputs = vec![map.to_vec(), b"*2\r\n$3\r\n::1\r\n$4\r\n7000\r\n".to_vec(), b"*-1\r\n".to_vec()];
            let teller = Address::Tcp { host: "10.0.0.1".to_string(), port: 1 };
            let words: [&[u8]; 5] = [b"$-1\r\n", b"$0\r\n\r\n", b":16384\r\n", b":65536\r\n", b"[::1]"];
            Target::new("topologies", inputs).words(&words).cases(40_000).run(|bytes| {
                let Ok(Some((answer, _))) = reply(bytes) else { return Err(String::new()) };
                let found = found(&answer, &teller)?;
                if let Found::Map(ranges) = &found {
                    assert!(
                        !ranges.is_empty() && ranges.iter().all(|(first, last, _)| first <= last && *last < SLOTS),
                        "{ranges:?}"
                    );
                }
                Ok(found.addresses().len())
            });
        }
    }
}
