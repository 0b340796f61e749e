//! Removes all blocks of namespaces from servers: it scans the names of every master, on a separate connection.
//!
//! `SCAN` with a pattern → exact reading of the names → `UNLINK`, one command per name, several at a time. `SCAN` on
//! one server reports everything that is present from its beginning to its end. For a cluster this holds only while
//! nothing moves between nodes. So a pass counts only if the masters and their slots are the same after it, and no
//! node was giving or taking a slot; otherwise another pass follows. With sentinels, the master must be the same. Where
//! those who are asked name different masters, all of them are emptied.
//!
//! A replica that becomes the master has what it has not removed yet. So the replicas that follow a master are waited
//! for.
//!
//! Invariant: a server that the tier uses at the end of a purge that succeeds is one of those that were emptied. The
//! tier may use one that nobody names any more. If such a server is a replica, its blocks go with those of its master.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{Mode, Settings};
use super::event_loop::greeting;
use super::masters::{Masters, ROUNDS, masters};
use super::name;
use super::resp::{self, Reply};
use crate::purge::{Place, Purging};

/// Names that a server examines in one `SCAN`, while it serves nobody else: 1,000 took Redis 6.2 with a million names
/// 2.3 ms, on a busy machine.
const NAMES_AT_ONCE: &[u8] = b"100";
/// Names removed in one step; each took the same server 2 us with its value of 1 MiB.
const UNLINKS_AT_ONCE: usize = 64;
/// If a cluster still moves slots after this many passes, the purge must be repeated when it is at rest.
const MOST_PASSES: u32 = 5;
const PASS_PAUSE: Duration = Duration::from_secs(1);
/// A replica says once a second how far it is.
const REPLICA_PATIENCE: Duration = Duration::from_secs(10);
const REPLICA_PAUSE: Duration = Duration::from_millis(100);

/// `used` tells which servers the tier uses.
pub(super) fn place(settings: &Arc<Settings>, used: impl Fn() -> BTreeSet<Address> + Send + 'static) -> Place {
    let settings = settings.clone();
    let servers: Vec<String> = settings.addresses.iter().map(Address::to_string).collect();
    // To find the masters takes the time to connect and one request in each round.
    let patience = ROUNDS * (settings.config.connect_timeout + settings.config.operation_timeout) + PASS_PAUSE;
    Place {
        name: servers.join(","),
        patience,
        empty: Box::new(move |purging| empty(&settings, &used, purging)),
        is_mount: false,
    }
}

fn empty(settings: &Settings, used: &dyn Fn() -> BTreeSet<Address>, purging: &Purging) -> Result<()> {
    let all = || {
        let mut masters = masters(settings)?;
        masters.add(used());
        Ok(masters)
    };
    let mut last_move = String::new();
    for _ in 0..MOST_PASSES {
        let begun = Instant::now();
        let before = all()?;
        purging.rest(begun)?;
        let seen = pass(&before, settings, purging)?;
        let begun = Instant::now();
        last_move = match seen {
            None if all()? == before => return Ok(()),
            None => "the masters are not those from before".to_owned(),
            Some(seen) => seen,
        };
        thread::sleep(PASS_PAUSE);
        purging.rest(begun)?;
    }
    Err(Error::new(ErrorKind::Unavailable, "blocks are moving between servers, and the purge may have missed some")
        .with("passes", MOST_PASSES)
        .source(last_move)
        .hint("purge again when the cluster has moved its slots, or the sentinels have elected a master"))
}

/// Scans all masters, even if some fail. Returns what may have moved meanwhile.
fn pass(masters: &Masters, settings: &Settings, purging: &Purging) -> Result<Option<String>> {
    let (mut seen, mut failure, mut followed) = (None, None, Vec::new());
    for address in masters.addresses().into_values() {
        match (Master { address, settings, purging, seen: None }).empty() {
            Ok((seen_here, followed_here)) => {
                seen = seen.or(seen_here);
                followed.extend(followed_here);
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let failure = failure.or(await_replicas(followed, purging).err());
    failure.map_or(Ok(seen), Err)
}

/// One of the servers.
struct Master<'a> {
    address: &'a Address,
    settings: &'a Settings,
    purging: &'a Purging,
    /// What may move, as seen last.
    seen: Option<String>,
}

impl Master<'_> {
    fn empty(mut self) -> Result<(Option<String>, Option<Followed>)> {
        let begun = Instant::now();
        let (mut client, _) = BlockingClient::connect(
            self.address,
            &self.settings.access,
            &greeting(self.settings),
            &self.settings.config,
        )?;
        self.look_for_moves(&mut client)?;
        self.purging.rest(begun)?;
        let namespaces: Vec<NamespaceId> = self.purging.namespaces().collect();
        let pattern = name::pattern(&self.settings.config.key_prefix, &namespaces);
        let mut cursor = b"0".to_vec();
        loop {
            let begun = Instant::now();
            let (next, names) = scan(&mut client, &cursor, &pattern)?;
            self.purging.rest(begun)?;
            self.remove(&mut client, &names)?;
            if next == b"0" {
                break;
            }
            cursor = next;
        }
        self.look_for_moves(&mut client)?;
        Ok((self.seen, Followed::by(self.address, client)?))
    }

    /// Removes exactly those names that are blocks of the namespaces.
    fn remove(&mut self, client: &mut BlockingClient, names: &[Vec<u8>]) -> Result<()> {
        let prefix = &self.settings.config.key_prefix;
        let part_of = |name: &Vec<u8>| {
            let (key, part) = name::read(name, prefix)?;
            self.purging.is_of(key.namespace).then_some(part)
        };
        let ours: Vec<(&[u8], u32)> = names.iter().filter_map(|name| Some((&name[..], part_of(name)?))).collect();
        for some in ours.chunks(UNLINKS_AT_ONCE) {
            let begun = Instant::now();
            let mut commands = Vec::new();
            some.iter().for_each(|(name, _)| resp::command(&mut commands, &[b"UNLINK", name]));
            for (reply, (_, part)) in client.ask(&commands, some.len())?.into_iter().zip(some) {
                match reply {
                    // Removed meanwhile, or reported twice.
                    Reply::Integer(0) => {}
                    Reply::Integer(_) => self.purging.removed(u64::from(*part == 0), 1),
                    Reply::Error(text) if has_moved(&text) => self.seen = Some(format!("{}: {text}", self.address)),
                    Reply::Error(text) => return Err(client.refused("UNLINK", &text)),
                    _ => return Err(client.refused("UNLINK", "an unexpected reply")),
                }
            }
            self.purging.rest(begun)?;
        }
        Ok(())
    }

    /// Asks a cluster node whether it is giving or taking a slot.
    fn look_for_moves(&mut self, client: &mut BlockingClient) -> Result<()> {
        if self.settings.config.mode != Mode::Cluster {
            return Ok(());
        }
        let mut command = Vec::new();
        resp::command(&mut command, &[b"CLUSTER", b"NODES"]);
        let reply = client.ask(&command, 1)?.remove(0);
        let Some(nodes) = reply.text() else { return Err(not_understood(client, "CLUSTER NODES", &reply)) };
        // A moving slot is written as `[slot->-node]` or `[slot-<-node]` after the others, on the node's own line
        // only.
        if nodes.lines().any(|line| line.contains("myself") && line.contains(" [")) {
            self.seen = Some(format!("{}: it gives or takes a slot", self.address));
        }
        Ok(())
    }
}

/// A master whose replicas have not done what it has done.
struct Followed {
    client: BlockingClient,
    address: Address,
    /// How far the master is, in bytes of its replication.
    offset: u64,
    /// The replicas.
    behind: Vec<String>,
}

impl Followed {
    /// `None` if no replica is behind, or the server does not tell.
    fn by(address: &Address, mut client: BlockingClient) -> Result<Option<Followed>> {
        let Some(Replication { offset, replicas }) = Replication::of(address, &mut client)? else { return Ok(None) };
        let behind: Vec<_> = replicas.into_iter().filter(|(_, at)| *at < offset).map(|(name, _)| name).collect();
        let followed = Followed { client, address: address.clone(), offset, behind };
        Ok(Some(followed).filter(|followed| !followed.behind.is_empty()))
    }

    /// Asks again. Whether some are still behind.
    fn is_behind(&mut self) -> Result<bool> {
        let Some(now) = Replication::of(&self.address, &mut self.client)? else { return Ok(false) };
        self.behind.retain(|name| now.replicas.get(name).is_none_or(|at| *at < self.offset));
        Ok(!self.behind.is_empty())
    }
}

/// Waits until all replicas have done what their masters have done, in the time for all of them together.
fn await_replicas(mut followed: Vec<Followed>, purging: &Purging) -> Result<()> {
    let due = Instant::now() + REPLICA_PATIENCE;
    while !followed.is_empty() {
        thread::sleep(REPLICA_PAUSE);
        purging.rest(Instant::now())?;
        let mut behind = Vec::new();
        for mut master in followed {
            if master.is_behind()? {
                behind.push(master);
            }
        }
        if let Some(master) = behind.first().filter(|_| Instant::now() >= due) {
            return Err(Error::new(ErrorKind::Unavailable, "a replica has not removed the blocks yet")
                .with("server", &master.address)
                .with("replica", &master.behind[0])
                .hint(
                    "purge again when the replica follows its master or has become the master; until then it may bring \
                     blocks back",
                ));
        }
        followed = behind;
    }
    Ok(())
}

/// What a server tells of its replication.
struct Replication {
    /// How far it is itself, in bytes.
    offset: u64,
    /// How far the replicas are that follow it, by place. One that still takes a copy of everything is nowhere: until
    /// then it has what it had before. Of several at one place, behind a proxy, the last one counts.
    replicas: BTreeMap<String, u64>,
}

impl Replication {
    /// `None` if the server does not tell.
    fn of(address: &Address, client: &mut BlockingClient) -> Result<Option<Replication>> {
        let mut command = Vec::new();
        resp::command(&mut command, &[b"INFO", b"replication"]);
        let reply = client.ask(&command, 1)?.remove(0);
        let told = reply.text().and_then(Replication::read);
        if told.is_none() {
            tracing::warn!(
                server = %address,
                reply = reply.error().unwrap_or("another reply than expected"),
                hint = "give the urls' user the right to INFO, or purge again if a replica soon becomes the master",
                "a purge cannot see whether replicas have removed the blocks"
            );
        }
        Ok(told)
    }

    fn read(told: &str) -> Option<Replication> {
        let offset = told.lines().find_map(|line| line.strip_prefix("master_repl_offset:")?.parse().ok())?;
        let replica = |line: &str| {
            let (_, fields) = line.strip_prefix("slave")?.split_once(':')?;
            let fields: BTreeMap<&str, &str> = fields.split(',').filter_map(|field| field.split_once('=')).collect();
            let has_copy = fields.get("state") == Some(&"online");
            let place = format!("{}:{}", fields.get("ip")?, fields.get("port")?);
            Some((place, if has_copy { fields.get("offset")?.parse().ok()? } else { 0 }))
        };
        let mut replicas = BTreeMap::new();
        for (place, at) in told.lines().filter_map(replica) {
            let known = replicas.entry(place).or_insert(at);
            *known = at.min(*known);
        }
        Some(Replication { offset, replicas })
    }
}

fn scan(client: &mut BlockingClient, cursor: &[u8], pattern: &[u8]) -> Result<(Vec<u8>, Vec<Vec<u8>>)> {
    let mut command = Vec::new();
    resp::command(&mut command, &[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", NAMES_AT_ONCE]);
    let reply = client.ask(&command, 1)?.remove(0);
    let told = match reply.items() {
        Some([Reply::Text(next), Reply::Array(names)]) => {
            names.iter().map(bytes).collect::<Option<_>>().zip(Some(next))
        }
        _ => None,
    };
    match told {
        Some((names, next)) => Ok((next.clone(), names)),
        None => Err(not_understood(client, "SCAN", &reply)),
    }
}

fn bytes(name: &Reply) -> Option<Vec<u8>> {
    match name {
        Reply::Text(name) => Some(name.clone()),
        _ => None,
    }
}

fn not_understood(client: &BlockingClient, what: &str, reply: &Reply) -> Error {
    match reply {
        Reply::Error(text) => client.refused(what, text),
        _ => client.refused(what, "an unexpected reply"),
    }
}

/// Another node has the slot by now, or will have it soon; or the server is a replica, from which only its master
/// removes.
fn has_moved(text: &str) -> bool {
    matches!(text.split(' ').next(), Some("MOVED" | "ASK" | "TRYAGAIN" | "READONLY"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(lines: &str) -> Vec<(String, u64)> {
        let told = format!("# Replication\r\nrole:master\r\n{lines}master_repl_offset:700\r\n");
        let Replication { offset, replicas } = Replication::read(&told).expect("it tells");
        assert_eq!(offset, 700);
        replicas.into_iter().collect()
    }

    #[test]
    fn a_replica_that_takes_a_copy_has_none_of_what_its_master_has_done() {
        let lines = "slave0:ip=10.0.0.1,port=1,state=online,offset=690,lag=0\r\n\
                     slave1:ip=10.0.0.2,port=1,state=wait_bgsave,offset=0,lag=0\r\n\
                     slave2:ip=10.0.0.3,port=1,state=send_bulk,offset=700,lag=1\r\n";
        let expected = [("10.0.0.1:1", 690), ("10.0.0.2:1", 0), ("10.0.0.3:1", 0)];
        assert_eq!(replicas(lines), expected.map(|(place, at)| (place.to_owned(), at)));
    }

    #[test]
    fn of_replicas_at_one_place_the_last_counts() {
        let [ahead, behind] =
            [700, 600].map(|at| format!("slave0:ip=10.0.0.1,port=1,state=online,offset={at},lag=0\r\n"));
        let expected = vec![("10.0.0.1:1".to_owned(), 600)];
        assert_eq!(replicas(&format!("{ahead}{behind}")), expected);
        assert_eq!(replicas(&format!("{behind}{ahead}")), expected);
    }
}
