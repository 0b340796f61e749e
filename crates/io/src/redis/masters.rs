//! Asks for the masters with a blocking client, and whether each of them answers.
//!
//! Who is asked may be cut off from the others, have left them, or hear late who took over, and not know it. So all
//! that are configured are asked, and in a cluster all masters that these name. The masters are all that any of them
//! names, if at least one of them can be believed.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{Mode, RedisConfig, Settings};
use super::event_loop::greeting;
use super::name::SLOTS;
use super::resp::{self, Reply};
use super::topology::{
    CLUSTER_INFO, CLUSTER_NODES, Found, REPLICATION, ROLE, epoch, found, is_master, is_well, question, replicas_known,
    replicas_of_cluster, replicas_of_sentinel,
};

/// Those that are configured are asked first, then the masters that they name, and so on. One that has taken over is
/// named by the masters that have heard of this.
pub(super) const ROUNDS: u32 = 3;

/// Connects to each master as the tier would, and tries what the tier does on a name that no block has: a finding each,
/// or what to change. Writes nothing. Takes `connect_timeout` for each configured server that does not answer, and once
/// more for the masters together.
pub fn examine(config: &RedisConfig) -> Vec<Result<String>> {
    let settings = match Settings::of(config) {
        Ok(settings) => settings,
        Err(error) => return vec![Err(error)],
    };
    let masters = match masters(&settings) {
        Ok(masters) => masters,
        Err(error) => return vec![Err(error)],
    };
    let addresses: Vec<Address> = masters.addresses().into_values().cloned().collect();
    at_once(&addresses, |address| answers(address, &settings))
}

fn answers(address: &Address, settings: &Settings) -> Result<String> {
    let (mut client, _) = BlockingClient::connect(address, &settings.access, || greeting(settings), &settings.config)?;
    // A name as a block has it, of no block.
    let hash = BlockHash::new(&[0; BlockHash::MAX_LEN])?;
    let mut name = Vec::new();
    settings.config.write_name(&mut name, &BlockKey { namespace: NamespaceId(0), group: 0, hash }, 0);
    let touch: &[&[u8]] = match settings.config.ttl_seconds {
        None => &[b"TOUCH", &name],
        Some(_) => &[b"EXPIRE", &name, b"1"],
    };
    // With `XX`, a name that is not there stays so.
    let of_blocks: [&[&[u8]]; 4] = [&[b"EXISTS", &name], &[b"GET", &name], &[b"SET", &name, b"", b"XX"], touch];
    let of_purges: [&[&[u8]]; 3] = [&[b"SCAN", b"0", b"COUNT", b"1"], &[b"UNLINK", &name], REPLICATION];
    let mut commands = Vec::new();
    let all = || of_blocks.iter().chain(&of_purges).copied();
    all().for_each(|command| resp::command(&mut commands, command));
    let replies = client.ask(&commands, all().count())?;
    // A name of the cluster that another node has. This one would have done as it was told.
    let is_elsewhere = |said: &str| said.starts_with("MOVED ") || said.starts_with("ASK ");
    let refused = |command: &[&[u8]], reply: &Reply| {
        let said = reply.error().filter(|said| !is_elsewhere(said))?;
        Some((String::from_utf8_lossy(command[0]).into_owned(), said.to_owned()))
    };
    let refusals: Vec<_> = all().zip(&replies).map(|(command, reply)| refused(command, reply)).collect();
    let (of_blocks, of_purges) = refusals.split_at(of_blocks.len());
    if let Some((verb, said)) = of_blocks.iter().flatten().next() {
        let hint = match said.starts_with("NOPERM") {
            true => {
                "give the urls' user the rights to GET, EXISTS, SET and TOUCH on names that begin with `key_prefix`, \
                 with `ttl_seconds` to EXPIRE in place of TOUCH"
            }
            false => "check the server, and try again when it can be read and written",
        };
        return Err(client.refused(verb, said).hint(hint));
    }
    let mut memory = Vec::new();
    resp::command(&mut memory, &[b"INFO", b"memory"]);
    let keeps_all = client.ask(&memory, 1)?.first().and_then(Reply::text).and_then(keeps_all);
    let lacking: Vec<&str> = of_purges.iter().flatten().map(|(verb, _)| verb.as_str()).collect();
    Ok(match (&lacking[..], keeps_all) {
        ([], None) => format!("`{address}` answers"),
        ([], Some(why)) => format!("`{address}` answers, and {why}"),
        _ => format!("`{address}` answers, and refuses what a purge needs: {}", lacking.join(", ")),
    })
}

/// What happens at a server that evicts nothing, of its `INFO memory`.
fn keeps_all(info: &str) -> Option<&'static str> {
    let of = |name| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match (of("maxmemory:")?, of("maxmemory_policy:")?) {
        ("0", _) => Some("takes all memory of its host: its `maxmemory` is 0"),
        (_, "noeviction") => Some("refuses blocks when it is full: its `maxmemory-policy` is `noeviction`"),
        _ => None,
    }
}

/// The masters, as they were told of.
#[derive(Default)]
pub(super) struct Masters {
    found: Vec<Found>,
    /// The latest epoch of the cluster that anybody told of. A slot that changes its master begins another one, also if
    /// it comes back.
    epoch: u64,
    /// The replicas, and whether all who named one said that it is down.
    replicas: BTreeMap<Address, bool>,
}

impl Masters {
    /// Each once.
    pub fn addresses(&self) -> BTreeMap<String, &Address> {
        let addresses = self.found.iter().flat_map(Found::addresses);
        addresses.map(|address| (address.to_string(), address)).collect()
    }

    /// Whether they were told of in the same way, and no slot has moved in between.
    pub fn are_those_of(&self, other: &Masters) -> bool {
        self.found == other.found && self.epoch == other.epoch
    }

    /// The replicas that were named, some of which may have become masters, and whether each is down.
    pub fn replicas(&self) -> impl Iterator<Item = (&Address, bool)> {
        self.replicas.iter().map(|(address, is_down)| (address, *is_down))
    }

    /// Adds servers that nobody was asked for.
    pub fn add(&mut self, servers: impl IntoIterator<Item = Address>) {
        self.found.extend(servers.into_iter().map(Found::Master));
    }

    fn hear(&mut self, found: Found, epoch: u64, replicas: Vec<(Address, bool)>) {
        self.found.push(found);
        self.epoch = self.epoch.max(epoch);
        for (address, is_down) in replicas {
            *self.replicas.entry(address).or_insert(is_down) &= is_down;
        }
    }
}

/// What one server told.
struct Told {
    found: Found,
    /// Why that cannot be believed alone.
    doubt: Option<Error>,
    epoch: u64,
    replicas: Vec<(Address, bool)>,
}

/// All masters that a server names that is asked, of which at least one can be believed: a node of a cluster that is
/// well, whose map has all slots, or a sentinel whose master is none that has become a replica. Takes `connect_timeout`
/// and `operation_timeout` once, in a cluster [`ROUNDS`] times at most.
pub(super) fn masters(settings: &Settings) -> Result<Masters> {
    if settings.config.mode == Mode::Single {
        let found = vec![Found::Master(settings.addresses[0].clone())];
        return Ok(Masters { found, ..Masters::default() });
    }
    let (mut tellers, mut masters, mut failure) = (settings.addresses.clone(), Masters::default(), None);
    let (mut asked, mut is_believed) = (0, false);
    for _ in 0..ROUNDS {
        let told = at_once(&tellers[asked..], |teller| tell(teller, settings));
        asked = tellers.len();
        for told in told {
            match told {
                Ok(Told { found, doubt, epoch, replicas }) => {
                    is_believed |= doubt.is_none();
                    failure = failure.or(doubt);
                    masters.hear(found, epoch, replicas);
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if settings.config.mode == Mode::Cluster {
            let named = masters.addresses().into_values().filter(|named| !tellers.contains(*named));
            let named: Vec<Address> = named.cloned().collect();
            tellers.extend(named);
        }
    }
    match failure {
        Some(error) if !is_believed => Err(error),
        _ => Ok(masters),
    }
}

/// Asks all servers at the same time; one after another where the system starts no more threads.
pub(super) fn at_once<A: Send, T: Send>(servers: impl IntoIterator<Item = A>, ask: impl Fn(A) -> T + Sync) -> Vec<T> {
    let servers: Vec<_> = servers.into_iter().map(|server| Mutex::new(Some(server))).collect();
    let take = |server: &Mutex<Option<A>>| server.lock().ok()?.take();
    let ask = &|server| ask(take(server).expect("each server is asked once"));
    thread::scope(|scope| {
        let start = |server| (server, thread::Builder::new().spawn_scoped(scope, move || ask(server)));
        let asked: Vec<_> = servers.iter().map(start).collect();
        let mut answers = Vec::with_capacity(asked.len());
        for (server, thread) in asked {
            answers.push(match thread {
                Ok(thread) => thread.join().expect("a question does not panic"),
                Err(_) => ask(server),
            });
        }
        answers
    })
}

fn tell(teller: &Address, settings: &Settings) -> Result<Told> {
    let cannot = |why: String| {
        Error::new(ErrorKind::Unavailable, "cannot find the masters")
            .with("server", teller)
            .source(why)
            .hint("check the server, `tier.redis.urls` and `tier.redis.mode`")
    };
    let (mut client, answer) =
        BlockingClient::connect(teller, &settings.sentinel_access, || question(settings), &settings.config)?;
    let found = found(&answer, teller).map_err(cannot)?;
    let (doubt, epoch, replicas) = match &found {
        Found::Master(address) => {
            role_of(address, settings).map_err(cannot)?;
            let name = settings.config.sentinel.master.as_bytes();
            // In this order: a replica that is found in between is named.
            let known = asked(&mut client, &[b"SENTINEL", b"MASTER", name])?;
            let replicas = asked(&mut client, &[b"SENTINEL", b"REPLICAS", name])?;
            let named = replicas_of_sentinel(&replicas, teller);
            if let Some(reply) = replicas.error() {
                warn_unnamed(teller, reply, "give the user that asks the sentinels the right to `SENTINEL REPLICAS`");
            } else if replicas_known(&known) > named.len() {
                warn_unnamed(
                    teller,
                    "fewer than it knows",
                    "purge again if a replica with `replica-announced no` is elected",
                );
            }
            (Ok(()), 0, named)
        }
        Found::Map(map) => {
            let state = asked(&mut client, CLUSTER_INFO)?;
            if let Reply::Error(text) = &state {
                return Err(client.refused("CLUSTER INFO", text));
            }
            // The purge of a master ends with an error if this is refused.
            let nodes = asked(&mut client, CLUSTER_NODES)?;
            let replicas = replicas_of_cluster(nodes.text().unwrap_or_default(), map, teller);
            (is_well(&state).and_then(|()| is_whole(map)), epoch(&state), replicas)
        }
    };
    Ok(Told { found, doubt: doubt.err().map(cannot), epoch, replicas })
}

fn warn_unnamed(sentinel: &Address, reply: &str, hint: &str) {
    tracing::warn!(
        %sentinel,
        reply,
        hint,
        "a sentinel does not name all replicas: of the others, a purge waits for those only that the master names"
    );
}

pub(super) fn asked(client: &mut BlockingClient, command: &[&[u8]]) -> Result<Reply> {
    let mut bytes = Vec::new();
    resp::command(&mut bytes, command);
    Ok(client.ask(&bytes, 1)?.remove(0))
}

/// An error if the master of a sentinel is none. One that cannot be asked may be one: whoever needs it will see.
fn role_of(address: &Address, settings: &Settings) -> Result<(), String> {
    let connected = BlockingClient::connect(address, &settings.access, || greeting(settings), &settings.config);
    let role = connected.and_then(|(mut client, _)| asked(&mut client, ROLE));
    is_master(role.ok().as_ref()).map_err(|why| format!("it names {address}: {why}"))
}

fn is_whole(map: &[(u16, u16, Address)]) -> Result<(), String> {
    let mut has = vec![false; usize::from(SLOTS)];
    map.iter().for_each(|(first, last, _)| has[usize::from(*first)..=usize::from(*last)].fill(true));
    match has.iter().filter(|has| **has).count() {
        count if count < has.len() => Err(format!("its map has {count} of {SLOTS} slots")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs itself in a process that can start no thread: its stack would be as large as the address space.
    #[test]
    fn servers_are_asked_one_after_another_where_no_thread_can_be_started() {
        let stack = ["RUST_MIN_STACK", "140737488355328"];
        if std::env::var(stack[0]).is_ok() {
            assert!(thread::Builder::new().spawn(|| ()).is_err(), "a thread with a stack of 128 TiB");
            return assert_eq!(at_once([1, 2, 3], |server| 2 * server), [2, 4, 6]);
        }
        let itself = "redis::masters::tests::servers_are_asked_one_after_another_where_no_thread_can_be_started";
        let mut without_threads = std::process::Command::new(std::env::current_exe().unwrap());
        let ran = without_threads.args(["--exact", itself, "--test-threads=1"]).env(stack[0], stack[1]).output();
        let ran = ran.unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    }
}
