//! Finds the servers: asks sentinels for their master, and nodes of a cluster for its map of slots.
//!
//! Invariant: there is one question at a time, to one server after the other, each on a separate connection that is
//! closed after the answer. There is a pause between questions.
//!
//! Who is asked may be cut off from the others and know only how it was. So a master that a sentinel names is asked
//! for its role before it is followed, and a node says with its map whether its cluster is well. An answer that is not
//! believed is a failure: the next server is asked. The map of a node whose cluster is down is better than none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::config::{Access, Mode, Settings};
use super::connect::{Backoff, Dialer, Use};
use super::connection::{Connection, Greeting};
use super::name::SLOTS;
use super::replaceable::Replaceable;
use super::resp::Reply;
use super::shared::Inbox;

/// While a cluster moves slots, each redirect requests a new map; more requests than this do not help.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
/// Limit on the servers that are asked in turn: those that are configured, and those that the last map names.
const MOST_SERVERS: usize = 64;
/// Asks a node how its cluster is.
pub(super) const CLUSTER_INFO: &[&[u8]] = &[b"CLUSTER", b"INFO"];
/// Asks a node for all nodes of its cluster.
pub(super) const CLUSTER_NODES: &[&[u8]] = &[b"CLUSTER", b"NODES"];
/// Asks a server for its role: `ROLE` itself takes a right that a user of a cache need not have.
pub(super) const ROLE: &[&[u8]] = &[b"HELLO", b"2"];
/// Asks a server whom it follows or who follows it, and how far they are.
pub(super) const REPLICATION: &[&[u8]] = &[b"INFO", b"replication"];
/// Why a node is not believed that has left its cluster.
const NO_SLOTS: &str = "it knows no node that has slots (hint: let it join the cluster, or take it out of \
                        `tier.redis.urls`)";

/// Why a node is not believed that knows only where some of the others are.
const NO_HOST: &str = "it does not know the host of each node (hint: set `cluster-announce-hostname` on all nodes, or \
                       another `cluster-preferred-endpoint-type`)";

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
    /// First those that are configured.
    dialers: Vec<Dialer>,
    configured: usize,
    at: usize,
    mode: Mode,
    /// The master that a sentinel names, while it is asked for its role.
    named: Option<Dialer>,
    is_wanted: bool,
    /// Whether the next question goes to the next server. However often that is said between two questions, it is one
    /// step, so that each server gets its turn.
    is_doubted: bool,
    has_found: bool,
    pub backoff: Backoff,
    pub connection: Option<Connection>,
}

impl Discovery {
    /// `None` if there is nothing to discover.
    pub fn new(settings: &Settings, now: Instant) -> Option<Discovery> {
        (settings.config.mode != Mode::Single).then(|| Discovery {
            dialers: settings.addresses.iter().cloned().map(Dialer::new).collect(),
            configured: settings.addresses.len(),
            at: 0,
            mode: settings.config.mode,
            named: None,
            is_wanted: true,
            is_doubted: false,
            has_found: false,
            backoff: Backoff::new(now),
            connection: None,
        })
    }

    /// Who is asked, for people.
    pub fn asked(&self) -> String {
        let teller = &self.dialers[self.at].address;
        match &self.named {
            Some(named) => format!("{teller} names {}", named.address),
            None => teller.to_string(),
        }
    }

    /// Whether an answer may still come before another failure.
    pub fn is_hopeful(&self) -> bool {
        self.connection.is_some() || self.named.is_some() || self.backoff.failures == 0
    }

    pub fn want(&mut self) {
        self.is_wanted = true;
    }

    /// A server that was found is of no use, so whoever told of it may know no better: another one is asked.
    pub fn doubt(&mut self) {
        (self.is_wanted, self.is_doubted) = (true, true);
    }

    pub fn due(&self) -> Option<Instant> {
        match &self.connection {
            Some(connection) => connection.due(),
            None => {
                self.named.as_ref().unwrap_or(&self.dialers[self.at]).due(self.backoff.at).filter(|_| self.is_wanted)
            }
        }
    }

    /// Begins to ask, if it is time. True if this began a connection.
    pub fn begin(&mut self, now: Instant, settings: &Settings, inbox: &Arc<Inbox>) -> Result<bool, String> {
        if !self.is_wanted || self.connection.is_some() || self.backoff.at > now {
            return Ok(false);
        }
        if self.named.is_none() && std::mem::take(&mut self.is_doubted) {
            self.at = (self.at + 1) % self.dialers.len();
        }
        let is_named = self.named.is_some();
        let (dialer, access) = match &mut self.named {
            Some(named) => (named, &settings.access),
            None => (&mut self.dialers[self.at], &settings.sentinel_access),
        };
        let tls = access.tls.as_ref();
        let Some(transport) = dialer.begin(settings.config.socket_buffer_bytes, tls, inbox)? else { return Ok(false) };
        let due = now + settings.config.connect_timeout;
        let greeting = if is_named { role_question(settings) } else { found_question(settings) };
        self.connection = Some(Connection::new(transport, dialer.address.clone(), &greeting, due));
        Ok(true)
    }

    /// Records that a server gave no answer, or none to be believed: the next one is asked, after a pause.
    pub fn failed(&mut self, now: Instant, random: &mut u64) {
        self.connection = None;
        if self.named.take().is_none() {
            self.dialers[self.at].failed();
        }
        self.doubt();
        self.backoff.ended(now, Use::Failed, random);
    }

    /// Takes the answer: what is to be used, and an error if the next server is to be asked nonetheless.
    pub fn read(&mut self, now: Instant) -> (Option<Found>, Result<(), String>) {
        let answers = self.connection.take().map(|connection| connection.answers).unwrap_or_default();
        let teller = &self.dialers[self.at].address;
        let (found, ended) = match &self.named {
            Some(named) => match is_master(answers.last()) {
                Ok(()) => (Some(Found::Master(named.address.clone())), Ok(())),
                Err(why) => (None, Err(why)),
            },
            None => match told(&answers, teller, &self.mode) {
                Ok((Found::Master(address), _)) => {
                    self.named = Some(Dialer::new(address));
                    return (None, Ok(()));
                }
                Ok((map, Ok(()))) => (Some(map), Ok(())),
                Ok((map, Err(why))) => (Some(map).filter(|_| !self.has_found), Err(why)),
                Err(why) => (None, Err(why)),
            },
        };
        self.has_found |= found.is_some();
        if let Some(map @ Found::Map(_)) = &found {
            self.learn(&map.addresses());
        }
        if ended.is_ok() {
            // What came meanwhile is asked again.
            (self.is_wanted, self.named) = (self.is_doubted, None);
            self.backoff.failures = 0;
            self.backoff.at = now + LEAST_PAUSE;
        }
        (found, ended)
    }

    /// Any node of a cluster may be asked, so the configured seeds may disappear. An address that the map no longer
    /// names is forgotten: it may be another cluster's by now, and those that the map names need the place.
    fn learn(&mut self, named: &[&Address]) {
        let teller = self.dialers[self.at].address.clone();
        let learned = self.dialers.split_off(self.configured);
        self.dialers.extend(learned.into_iter().filter(|dialer| named.contains(&&dialer.address)));
        for address in named {
            let is_known = self.dialers.iter().any(|dialer| dialer.address == **address);
            if !is_known && self.dialers.len() < MOST_SERVERS {
                self.dialers.push(Dialer::new((*address).clone()));
            }
        }
        self.at = self.dialers.iter().position(|dialer| dialer.address == teller).unwrap_or(0);
    }
}

/// The greeting whose last reply tells where the servers are, for [`found`].
pub(super) fn question(settings: &Settings) -> Greeting {
    let mut greeting = Greeting::default();
    authenticate(&settings.sentinel_access, &mut greeting);
    match settings.config.mode {
        Mode::Single => {}
        Mode::Sentinel => {
            let master = settings.config.sentinel.master.as_bytes();
            greeting.say(&[b"SENTINEL", b"get-master-addr-by-name", master]);
        }
        Mode::Cluster => greeting.say(&[b"CLUSTER", b"SLOTS"]),
    }
    greeting
}

/// The same, and whether the teller's cluster is well.
fn found_question(settings: &Settings) -> Greeting {
    let mut greeting = question(settings);
    if settings.config.mode == Mode::Cluster {
        greeting.say(CLUSTER_INFO);
    }
    greeting
}

/// What the master that a sentinel names is asked.
fn role_question(settings: &Settings) -> Greeting {
    let mut greeting = Greeting::default();
    authenticate(&settings.access, &mut greeting);
    greeting.say(ROLE);
    greeting
}

/// Appends the commands that authenticate.
pub(super) fn authenticate(access: &Access, greeting: &mut Greeting) {
    let password = access.password.as_ref().map(Replaceable::get);
    match (&access.user, password) {
        (Some(user), Some(password)) => greeting.say(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
        (None, Some(password)) => greeting.say(&[b"AUTH", password.as_bytes()]),
        _ => {}
    }
}

/// What the answers to a discovery's greeting tell, and whether the teller's cluster is well. Who may not ask a cluster
/// how it is takes its map as it is.
fn told(answers: &[Reply], teller: &Address, mode: &Mode) -> Result<(Found, Result<(), String>), String> {
    let (answers, state) = match (mode, answers) {
        (Mode::Cluster, [answers @ .., state]) => (answers, is_well(state)),
        _ => (answers, Ok(())),
    };
    // The first refusal is the relevant one: it caused the others.
    let answer = answers.iter().find(|reply| reply.error().is_some()).or(answers.last());
    Ok((found(answer.unwrap_or(&Reply::Null), teller)?, state))
}

/// Whether a node's cluster is well, as the answer to [`CLUSTER_INFO`] says.
pub(super) fn is_well(info: &Reply) -> Result<(), String> {
    let is_down = info.text().is_some_and(|text| text.contains("cluster_state:fail"));
    if is_down { Err("its cluster is down, or it is cut off from it (cluster_state:fail)".to_string()) } else { Ok(()) }
}

/// The epoch of a node's cluster, as the answer to [`CLUSTER_INFO`] says.
pub(super) fn epoch(info: &Reply) -> u64 {
    let told = info.text().unwrap_or_default().lines().find_map(|line| line.strip_prefix("cluster_current_epoch:"));
    told.and_then(|told| told.parse().ok()).unwrap_or_default()
}

/// A server's role, if the answer to [`ROLE`] says so.
pub(super) fn role(answer: Option<&Reply>) -> Option<&str> {
    fact(answer.and_then(Reply::items)?, "role")
}

/// The text behind that name, in a list of names that each have a value behind them.
fn fact<'a>(facts: &'a [Reply], name: &str) -> Option<&'a str> {
    facts.chunks_exact(2).find(|fact| fact[0].text() == Some(name))?[1].text()
}

/// Whether a server is a master, as the answer to [`ROLE`] says. One that does not say so may be one.
pub(super) fn is_master(answer: Option<&Reply>) -> Result<(), String> {
    match role(answer) {
        Some(role) if role != "master" => Err(format!("it is a {role}, and no master")),
        _ => Ok(()),
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
            ranges if ranges.iter().any(is_of_unknown) => return Err(NO_HOST.to_string()),
            ranges => ranges.iter().map(|range| range_of(range, teller)).collect::<Option<_>>().map(Found::Map),
        }
        .ok_or_else(|| "its answer cannot be understood".to_string()),
        _ => Err("its answer cannot be understood".to_string()),
    }
}

fn master(host: &Reply, port: &Reply, teller: &Address) -> Option<Found> {
    Address::of_node(host.text()?, port.text()?.parse().ok()?, teller).map(Found::Master)
}

/// Whether the teller does not know the master's host.
fn is_of_unknown(range: &Reply) -> bool {
    let master = range.items().and_then(|range| range.get(2)?.items()?.first());
    master.and_then(Reply::text) == Some("?")
}

/// First and last slot, and the master.
fn range_of(range: &Reply, teller: &Address) -> Option<(u16, u16, Address)> {
    let [first, last, node, ..] = range.items()? else { return None };
    let slot = |reply: &Reply| u16::try_from(reply.integer()?).ok().filter(|slot| *slot < SLOTS);
    let (first, last, address) = (slot(first)?, slot(last)?, address_of(node, teller)?);
    (first <= last).then_some((first, last, address))
}

/// Of a node in a map.
fn address_of(node: &Reply, teller: &Address) -> Option<Address> {
    let [host, port, ..] = node.items()? else { return None };
    let host = if *host == Reply::Null { "" } else { host.text()? };
    Address::of_node(host, u16::try_from(port.integer()?).ok()?, teller)
}

/// The replicas in the answer to `CLUSTER NODES`, and whether the cluster takes each for down. `CLUSTER SLOTS` leaves
/// out those that have taken nothing from their master since they started: they may have old blocks, and be elected.
/// Hosts are named as the map names them.
pub(super) fn replicas_of_cluster(nodes: &str, map: &[(u16, u16, Address)], teller: &Address) -> Vec<(Address, bool)> {
    let nodes: Vec<Node> = nodes.lines().filter_map(Node::read).collect();
    let in_map = |address: Option<Address>| map.iter().any(|(_, _, master)| Some(master) == address.as_ref());
    let is_by_name = nodes.iter().any(|node| !node.name.is_empty() && in_map(node.address(node.name, teller)));
    let is_by_ip = nodes.iter().any(|node| in_map(node.address(node.ip, teller)));
    let address = |node: &Node| match (is_by_name, is_by_ip) {
        (true, _) => node.address(node.name, teller),
        (false, true) => node.address(node.ip, teller),
        // The map says that all are where its teller is.
        (false, false) => node.address("", teller),
    };
    let replicas = nodes.iter().filter(|node| node.is("slave") && !node.is("noaddr") && !node.is("handshake"));
    replicas.filter_map(|node| Some((address(node)?, node.is("fail")))).collect()
}

/// A line of `CLUSTER NODES`: `<id> <ip>:<port>@<bus>,<name> <flags> <master> ...`, without a name before Redis 7.
struct Node<'a> {
    ip: &'a str,
    name: &'a str,
    port: u16,
    flags: &'a str,
}

impl Node<'_> {
    fn read(line: &str) -> Option<Node<'_>> {
        let mut words = line.split(' ').skip(1);
        let (place, flags) = (words.next()?, words.next()?);
        let mut fields = place.split(',');
        let (place, name) = (fields.next()?, fields.next().unwrap_or_default());
        let (ip, port) = place.split('@').next()?.rsplit_once(':')?;
        Some(Node { ip, name, port: port.parse().ok()?, flags })
    }

    fn is(&self, flag: &str) -> bool {
        self.flags.split(',').any(|other| other == flag)
    }

    fn address(&self, host: &str, teller: &Address) -> Option<Address> {
        Address::of_node(host, self.port, teller)
    }
}

/// How many replicas the sentinel knows, as the answer to `SENTINEL MASTER` says. It does not name those with
/// `replica-announced no`.
pub(super) fn replicas_known(answer: &Reply) -> usize {
    let told = answer.items().and_then(|facts| fact(facts, "num-slaves"));
    told.and_then(|told| told.parse().ok()).unwrap_or_default()
}

/// The replicas in the answer to `SENTINEL REPLICAS`, and whether the sentinel takes each for down. A sentinel calls
/// one `disconnected` for a moment whenever it connects to it, so this does not count.
pub(super) fn replicas_of_sentinel(answer: &Reply, teller: &Address) -> Vec<(Address, bool)> {
    let replica = |replica: &Reply| {
        let facts = replica.items()?;
        let address = Address::of_node(fact(facts, "ip")?, fact(facts, "port")?.parse().ok()?, teller)?;
        let mut flags = fact(facts, "flags").unwrap_or_default().split(',');
        Some((address, flags.any(|flag| matches!(flag, "s_down" | "o_down"))))
    };
    answer.items().unwrap_or_default().iter().filter_map(replica).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    use super::super::config::{RedisConfig, SentinelConfig};
    use super::super::resp::reply;
    use super::*;

    fn read(bytes: &[u8]) -> Result<Found, String> {
        let teller = Address::Tcp { host: "10.0.0.1".to_string(), port: 1 };
        found(&reply(bytes).unwrap().unwrap().0, &teller)
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_string(), port }
    }

    /// Asks as many servers as there are `urls`.
    fn discovery(mode: Mode, urls: Vec<String>) -> (Discovery, Settings) {
        let master = if mode == Mode::Sentinel { "blocks".to_string() } else { String::new() };
        let sentinel = SentinelConfig { master, ..SentinelConfig::default() };
        let settings = Settings::of(&RedisConfig { mode, sentinel, ..RedisConfig::new(urls) }).unwrap();
        (Discovery::new(&settings, Instant::now()).unwrap(), settings)
    }

    #[test]
    fn each_server_is_asked_within_one_round_whatever_else_fails() {
        let inbox = Arc::new(Inbox::new().unwrap());
        for (count, doubts) in [2, 3, 4].into_iter().flat_map(|count| [0, 1, 2].map(|doubts| (count, doubts))) {
            let servers: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let urls = servers.iter().map(|server| format!("redis://{}", server.local_addr().unwrap())).collect();
            let (mut discovery, settings) = discovery(Mode::Sentinel, urls);
            let (mut asked, mut random) = (BTreeSet::new(), 7);
            for _ in 0..count {
                let now = discovery.backoff.at;
                assert!(discovery.begin(now, &settings, &inbox).unwrap());
                asked.insert(discovery.asked());
                // Connections to the master that is gone fail all the time.
                (0..doubts).for_each(|_| discovery.doubt());
                discovery.failed(now, &mut random);
                (0..doubts).for_each(|_| discovery.doubt());
            }
            assert_eq!(asked.len(), count, "after {doubts} doubts each, only these were asked: {asked:?}");
        }
    }

    #[test]
    fn nodes_that_the_last_map_names_are_asked_however_many_addresses_there_were_before() {
        let (mut discovery, _) = discovery(Mode::Cluster, vec!["redis://10.0.0.1:1".to_string()]);
        let stays = tcp("10.0.0.2", 1);
        for host in 0..2 * MOST_SERVERS {
            let moves = tcp(&format!("10.0.1.{host}"), 1);
            discovery.learn(&[&stays, &moves]);
            let asked: Vec<_> = discovery.dialers.iter().map(|dialer| &dialer.address).collect();
            assert_eq!(asked, [&tcp("10.0.0.1", 1), &stays, &moves]);
        }
        discovery.at = 2;
        discovery.learn(&[&stays]);
        assert_eq!((discovery.asked(), discovery.dialers.len()), ("10.0.0.1:1".to_string(), 2));
    }

    #[test]
    fn replicas_of_a_cluster_are_named_as_its_map_names_the_masters() {
        let nodes = "a 10.0.0.2:7000@17000,one myself,master - 0 0 1 connected 0-16383\n\
                     b 10.0.0.3:7000@17000,two slave a 0 0 1 connected\n\
                     c 10.0.0.4:7001@17001,three,shard-id=9 slave,fail? a 0 0 1 connected\n\
                     d ::5:7000@17000 slave,fail a 0 0 1 disconnected\n\
                     e :0@0 slave,noaddr a 0 0 1 disconnected\n";
        let teller = tcp("10.0.0.1", 1);
        let replicas = |host| replicas_of_cluster(nodes, &[(0, SLOTS - 1, tcp(host, 7000))], &teller);
        let [b, c, d] = [("10.0.0.3", 7000), ("10.0.0.4", 7001), ("::5", 7000)].map(|(host, port)| tcp(host, port));
        assert_eq!(replicas("10.0.0.2"), [(b, false), (c, false), (d, true)]);
        assert_eq!(replicas("one")[..2], [(tcp("two", 7000), false), (tcp("three", 7001), false)]);
        assert_eq!(replicas("10.0.0.1")[..2], [(tcp("10.0.0.1", 7000), false), (tcp("10.0.0.1", 7001), false)]);
    }

    #[test]
    fn a_sentinels_answer_is_read() {
        assert_eq!(read(b"*2\r\n$3\r\n::1\r\n$4\r\n7000\r\n"), Ok(Found::Master(tcp("::1", 7000))));
        assert!(read(b"*-1\r\n").is_err() && read(b"-ERR no\r\n").is_err() && read(b":1\r\n").is_err());
    }

    #[test]
    fn replicas_are_read_where_sentinels_name_them() {
        let teller = tcp("10.0.0.1", 1);
        let text = |words: &[&str]| Reply::Array(words.iter().map(|word| Reply::Text((*word).into())).collect());
        let named = |port, flags| text(&["name", "x", "ip", "10.0.0.3", "port", port, "flags", flags]);
        let told = Reply::Array(vec![named("1", "slave"), named("2", "s_down,slave"), text(&["ip", "a", "port"])]);
        assert_eq!(replicas_of_sentinel(&told, &teller), [(tcp("10.0.0.3", 1), false), (tcp("10.0.0.3", 2), true)]);
        assert_eq!(replicas_known(&text(&["name", "x", "num-slaves", "3"])), 3);
        for other in [Reply::Null, Reply::Error("ERR no".to_string()), text(&["127.0.0.1", "7"])] {
            assert!(replicas_of_sentinel(&other, &teller).is_empty());
            assert_eq!(replicas_known(&other), 0);
        }
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
        let of_host = |host: &str| read(format!("*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n{host}\r\n:7001\r\n").as_bytes());
        assert_eq!(of_host("$-1"), Ok(Found::Map(vec![(0, 9, tcp("10.0.0.1", 7001))])), "that of who tells");
        assert_eq!(of_host("$1\r\n?"), Err(NO_HOST.to_string()));
    }

    #[test]
    fn a_node_tells_with_its_map_whether_its_cluster_is_well() {
        let teller = tcp("10.0.0.1", 1);
        let told = |answers: &[Reply]| told(answers, &teller, &Mode::Cluster);
        let map = reply(b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:1\r\n").unwrap().unwrap().0;
        let (text, error) = (|text: &str| Reply::Text(text.into()), |text: &str| Reply::Error(text.to_string()));
        let whole = Found::Map(vec![(0, 16_383, tcp("a", 1))]);
        for state in [text("cluster_enabled:1\r\ncluster_state:ok\r\n"), error("NOPERM this user may not")] {
            assert_eq!(told(&[text("OK"), map.clone(), state]), Ok((whole.clone(), Ok(()))));
        }
        let (map, doubt) = told(&[map.clone(), text("cluster_enabled:1\r\ncluster_state:fail\r\n")]).unwrap();
        assert!(map == whole && doubt.unwrap_err().contains("down"));
        let refused = told(&[error("WRONGPASS no"), error("NOAUTH no"), error("NOAUTH no")]);
        assert!(refused.unwrap_err().contains("WRONGPASS"));
        assert!(told(&[]).is_err());
    }

    #[test]
    fn only_a_server_that_says_that_it_is_none_is_no_master() {
        let hello = |role: &str| {
            let words = ["mode", "standalone", "role", role, "modules"].map(|word| Reply::Text(word.into()));
            Reply::Array(words.into_iter().chain([Reply::Array(Vec::new())]).collect())
        };
        assert_eq!(is_master(Some(&hello("master"))), Ok(()));
        assert_eq!(is_master(Some(&hello("replica"))), Err("it is a replica, and no master".to_string()));
        assert_eq!(is_master(Some(&Reply::Error("ERR unknown command".to_string()))), Ok(()));
        assert_eq!(is_master(None), Ok(()));
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
