//! Removes all blocks of namespaces from servers: it scans the names of every master, on a separate connection.
//!
//! `SCAN` with a pattern → exact reading of the names → `UNLINK`, one command per name, several at a time. `SCAN` on
//! one server reports everything that is present from its beginning to its end. For a cluster this holds only while
//! nothing moves between nodes. So a pass counts only if the masters, their slots and the cluster's epoch are the same
//! after it, and no node was giving or taking a slot; otherwise another pass follows. With sentinels, the master must
//! be the same. Where those who are asked name different masters, all of them are emptied.
//!
//! A replica that becomes the master has what it has not removed yet. So the replicas are waited for, as `replicas`
//! describes. One that has become a master meanwhile is emptied like any other.
//!
//! Invariant: a server that the tier uses at the end of a purge that succeeds is one of those that were emptied. The
//! tier may use one that nobody names any more. If such a server is a replica, its blocks go with those of its master.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{Mode, Settings};
use super::event_loop::greeting;
use super::masters::{Masters, ROUNDS, asked, masters};
use super::name;
use super::replicas::{self, Emptied};
use super::resp::{self, Reply};
use super::topology::CLUSTER_NODES;
use crate::purge::{Place, Purging};

/// Names that a server examines in one `SCAN`, while it serves nobody else: 1,000 took Redis 6.2 with a million names
/// 2.3 ms, on a busy machine.
const NAMES_AT_ONCE: &[u8] = b"100";
/// Names removed in one step; each took the same server 2 us with its value of 1 MiB.
const UNLINKS_AT_ONCE: usize = 64;
/// If a cluster still moves slots after this many passes, the purge must be repeated when it is at rest.
const MOST_PASSES: u32 = 5;
const PASS_PAUSE: Duration = Duration::from_secs(1);

/// `used` tells which servers the tier uses.
pub(super) fn place(settings: &Arc<Settings>, used: impl Fn() -> BTreeSet<Address> + Send + 'static) -> Place {
    let settings = settings.clone();
    let servers: Vec<String> = settings.addresses.iter().map(Address::to_string).collect();
    // To find the masters takes the time to connect and two requests in each round, and once more for the replicas.
    let patience =
        (ROUNDS + 1) * (settings.config.connect_timeout + 2 * settings.config.operation_timeout) + PASS_PAUSE;
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
        let promoted = replicas::promoted(&masters, settings);
        masters.add(promoted);
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
            None if all()?.are_those_of(&before) => return Ok(()),
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

/// Scans all masters, even if some fail, and waits for their replicas. Returns what may have moved meanwhile.
fn pass(masters: &Masters, settings: &Settings, purging: &Purging) -> Result<Option<String>> {
    let (mut seen, mut failure, mut emptied) = (None, None, Vec::new());
    for address in masters.addresses().into_values() {
        match (Master { address, settings, purging, seen: None }).empty() {
            Ok((seen_here, emptied_here)) => {
                seen = seen.or(seen_here);
                emptied.push(emptied_here);
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    Ok(seen.or(replicas::wait(emptied, masters, settings, purging)?))
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
    fn empty(mut self) -> Result<(Option<String>, Emptied)> {
        let begun = Instant::now();
        let (mut client, _) = BlockingClient::connect(
            self.address,
            &self.settings.access,
            || greeting(self.settings),
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
        Ok((self.seen, Emptied::new(self.address, client)?))
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
        let reply = asked(client, CLUSTER_NODES)?;
        let Some(nodes) = reply.text() else { return Err(not_understood(client, "CLUSTER NODES", &reply)) };
        // A moving slot is written as `[slot->-node]` or `[slot-<-node]` after the others, on the node's own line
        // only.
        if nodes.lines().any(|line| line.contains("myself") && line.contains(" [")) {
            self.seen = Some(format!("{}: it gives or takes a slot", self.address));
        }
        Ok(())
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
