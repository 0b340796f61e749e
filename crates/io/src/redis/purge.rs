//! Emptying servers of namespaces: every master is gone through name by name, on a connection of its own.
//!
//! `SCAN` with a pattern → names that are read exactly → `UNLINK`, a command for each name, some of them at a time. What
//! `SCAN` promises of one server, that it tells of whatever is there from its beginning to its end, holds for a cluster
//! as long as nothing moves between nodes. So a pass counts only if the masters and their slots are the same after it,
//! and no node was giving or taking a slot; else there is another. With sentinels likewise: the master is the same.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::caller::Caller;
use super::config::{Mode, Settings};
use super::lane::greeting;
use super::name;
use super::resp::{self, Reply};
use super::scout::{Found, found, question};
use crate::purge::{Place, Purging};

/// Names that a server looks at for one `SCAN`, in which it serves nobody else: 1,000 took Redis 6.2 with a million names
/// 2.3 ms, on a busy machine.
const NAMES_AT_ONCE: &[u8] = b"100";
/// Names removed in one step; each took the same server 2 us with its value of 1 MiB.
const UNLINKS_AT_ONCE: usize = 64;
/// A cluster that moves slots for longer is to be purged when it has come to rest.
const MOST_PASSES: u32 = 5;
const PASS_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn place(settings: &Arc<Settings>) -> Place {
    let settings = settings.clone();
    let servers: Vec<String> = settings.addresses.iter().map(Address::to_string).collect();
    // Until a connection may be used, and then one question; a pass of a cluster asks once more in between.
    let patience = settings.config.connect_timeout + settings.config.operation_timeout + PASS_PAUSE;
    Place { name: servers.join(","), patience, empty: Box::new(move |purging| empty(&settings, purging)) }
}

fn empty(settings: &Settings, purging: &Purging) -> Result<()> {
    for _ in 0..MOST_PASSES {
        let begun = Instant::now();
        let before = masters(settings)?;
        purging.rest(begun)?;
        let is_still = pass(&before, settings, purging)?;
        let begun = Instant::now();
        if is_still && masters(settings)? == before {
            return Ok(());
        }
        thread::sleep(PASS_PAUSE);
        purging.rest(begun)?;
    }
    Err(Error::new(ErrorKind::Unavailable, "blocks move between servers, and some may have been passed over")
        .with("passes", MOST_PASSES)
        .hint("purge again when the cluster has moved its slots, or the sentinels have their master"))
}

/// Who has what, as far as there is a choice.
fn masters(settings: &Settings) -> Result<Found> {
    let Some(question) = question(settings) else { return Ok(Found::Master(settings.addresses[0].clone())) };
    let mut failure = None;
    for teller in &settings.addresses {
        let asked = Caller::connect(teller, &settings.scout_access, &question, &settings.config);
        match asked.map(|(_, answer)| found(&answer, teller)) {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(why)) => {
                let error = Error::new(ErrorKind::Unavailable, "cannot find the masters").with("server", teller);
                failure = Some(error.source(why).hint("look at the server, and at `tier.redis.mode`"));
            }
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.expect("a configuration has an address"))
}

/// Goes through all masters, whatever becomes of some. False if something may have moved meanwhile.
fn pass(masters: &Found, settings: &Settings, purging: &Purging) -> Result<bool> {
    let mut addresses: Vec<&Address> = match masters {
        Found::Master(address) => vec![address],
        Found::Map(ranges) => ranges.iter().map(|(_, _, address)| address).collect(),
    };
    addresses.sort_by_key(|address| address.to_string());
    addresses.dedup();
    let (mut is_still, mut failure) = (true, None);
    for address in addresses {
        match (Master { address, settings, purging, is_still: true }).empty() {
            Ok(master_is_still) => is_still &= master_is_still,
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(is_still), Err)
}

/// One of the servers.
struct Master<'a> {
    address: &'a Address,
    settings: &'a Settings,
    purging: &'a Purging,
    is_still: bool,
}

impl Master<'_> {
    fn empty(mut self) -> Result<bool> {
        let begun = Instant::now();
        let (mut caller, _) =
            Caller::connect(self.address, &self.settings.access, &greeting(self.settings), &self.settings.config)?;
        self.look_for_moves(&mut caller)?;
        self.purging.rest(begun)?;
        let namespaces: Vec<NamespaceId> = self.purging.namespaces().collect();
        let pattern = name::pattern(&self.settings.config.key_prefix, &namespaces);
        let mut cursor = b"0".to_vec();
        loop {
            let begun = Instant::now();
            let (next, names) = scan(&mut caller, &cursor, &pattern)?;
            self.purging.rest(begun)?;
            self.remove(&mut caller, &names)?;
            if next == b"0" {
                break;
            }
            cursor = next;
        }
        self.look_for_moves(&mut caller)?;
        Ok(self.is_still)
    }

    /// Removes those of the names that are blocks of the namespaces, and no other.
    fn remove(&mut self, caller: &mut Caller, names: &[Vec<u8>]) -> Result<()> {
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
            for (reply, (_, part)) in caller.ask(&commands, some.len())?.into_iter().zip(some) {
                match reply {
                    // Gone meanwhile, or told twice.
                    Reply::Integer(0) => {}
                    Reply::Integer(_) => self.purging.removed(u64::from(*part == 0), 1),
                    Reply::Error(text) if has_moved(&text) => self.is_still = false,
                    Reply::Error(text) => return Err(caller.refused("UNLINK", &text)),
                    _ => return Err(caller.refused("UNLINK", "an answer that cannot be understood")),
                }
            }
            self.purging.rest(begun)?;
        }
        Ok(())
    }

    /// Asks a node of a cluster whether it is giving a slot or taking one.
    fn look_for_moves(&mut self, caller: &mut Caller) -> Result<()> {
        if self.settings.config.mode != Mode::Cluster {
            return Ok(());
        }
        let mut command = Vec::new();
        resp::command(&mut command, &[b"CLUSTER", b"NODES"]);
        let reply = caller.ask(&command, 1)?.remove(0);
        let Some(nodes) = reply.text() else { return Err(not_understood(caller, "CLUSTER NODES", &reply)) };
        // A slot on its way stands as `[slot->-node]` or `[slot-<-node]` behind the others, with the node itself alone.
        self.is_still &= !nodes.lines().any(|line| line.contains("myself") && line.contains(" ["));
        Ok(())
    }
}

fn scan(caller: &mut Caller, cursor: &[u8], pattern: &[u8]) -> Result<(Vec<u8>, Vec<Vec<u8>>)> {
    let mut command = Vec::new();
    resp::command(&mut command, &[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", NAMES_AT_ONCE]);
    let reply = caller.ask(&command, 1)?.remove(0);
    let told = match reply.items() {
        Some([Reply::Text(next), Reply::Array(names)]) => {
            names.iter().map(bytes).collect::<Option<_>>().zip(Some(next))
        }
        _ => None,
    };
    match told {
        Some((names, next)) => Ok((next.clone(), names)),
        None => Err(not_understood(caller, "SCAN", &reply)),
    }
}

fn bytes(name: &Reply) -> Option<Vec<u8>> {
    match name {
        Reply::Text(name) => Some(name.clone()),
        _ => None,
    }
}

fn not_understood(caller: &Caller, what: &str, reply: &Reply) -> Error {
    match reply {
        Reply::Error(text) => caller.refused(what, text),
        _ => caller.refused(what, "an answer that cannot be understood"),
    }
}

/// Another node has it by now, or will have it soon.
fn has_moved(text: &str) -> bool {
    matches!(text.split(' ').next(), Some("MOVED" | "ASK" | "TRYAGAIN"))
}
