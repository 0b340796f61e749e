//! Asks for the masters with a blocking client, and whether each of them answers.
//!
//! Who is asked may be cut off from the others, have left them, or hear late who took over, and not know it. So all
//! that are configured are asked, and in a cluster all masters that these name. The masters are all that any of them
//! names, if at least one of them can be believed.

use std::collections::BTreeMap;
use std::thread;

use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{Mode, RedisConfig, Settings};
use super::connection::Greeting;
use super::event_loop::greeting;
use super::name::SLOTS;
use super::resp::{self, Reply};
use super::topology::{CLUSTER_INFO, Found, ROLE, found, is_master, is_well, question};

/// Those that are configured are asked first, then the masters that they name, and so on. One that has taken over is
/// named by the masters that have heard of this.
pub(super) const ROUNDS: u32 = 3;
/// How blocks are read.
const READS: [&str; 2] = ["EXISTS", "GET"];

/// Connects to each master as the tier would, and reads: a finding each, or what to change. Writes nothing. Takes
/// `connect_timeout` for each configured server that does not answer, and once more for the masters together.
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
    let (mut client, _) = BlockingClient::connect(address, &settings.access, &greeting(settings), &settings.config)?;
    // A name as a block has it, of no block.
    let hash = BlockHash::new(&[0; BlockHash::MAX_LEN])?;
    let (mut name, mut commands) = (Vec::new(), Vec::new());
    settings.config.write_name(&mut name, &BlockKey { namespace: NamespaceId(0), group: 0, hash }, 0);
    READS.iter().for_each(|verb| resp::command(&mut commands, &[verb.as_bytes(), &name]));
    let replies = client.ask(&commands, READS.len())?;
    for (verb, said) in READS.iter().zip(&replies).filter_map(|(verb, reply)| Some((verb, reply.error()?))) {
        // Another node of the cluster has the name, and this one would have let us read.
        if !said.starts_with("MOVED ") && !said.starts_with("ASK ") {
            let hint = match said.starts_with("NOPERM") {
                true => {
                    "give the urls' user the rights to GET, EXISTS, SET and TOUCH on names that begin with `key_prefix`"
                }
                false => "check the server, and try again when it can be read",
            };
            return Err(client.refused(verb, said).hint(hint));
        }
    }
    Ok(format!("`{address}` answers"))
}

/// The masters, as they were told of.
#[derive(PartialEq, Eq)]
pub(super) struct Masters(Vec<Found>);

impl Masters {
    /// Each once.
    pub fn addresses(&self) -> BTreeMap<String, &Address> {
        let addresses = self.0.iter().flat_map(Found::addresses);
        addresses.map(|address| (address.to_string(), address)).collect()
    }

    /// Adds servers that nobody was asked for.
    pub fn add(&mut self, servers: impl IntoIterator<Item = Address>) {
        self.0.extend(servers.into_iter().map(Found::Master));
    }
}

/// All masters that a server names that is asked, of which at least one can be believed: a node of a cluster that is
/// well, whose map has all slots, or a sentinel whose master is none that has become a replica. Takes `connect_timeout`
/// and `operation_timeout` once, in a cluster [`ROUNDS`] times at most.
pub(super) fn masters(settings: &Settings) -> Result<Masters> {
    let Some(question) = question(settings) else {
        return Ok(Masters(vec![Found::Master(settings.addresses[0].clone())]));
    };
    let (mut tellers, mut masters, mut failure) = (settings.addresses.clone(), Masters(Vec::new()), None);
    let (mut asked, mut is_believed) = (0, false);
    for _ in 0..ROUNDS {
        let told = at_once(&tellers[asked..], |teller| tell(teller, &question, settings));
        asked = tellers.len();
        for told in told {
            match told {
                Ok((found, doubt)) => {
                    is_believed |= doubt.is_none();
                    failure = failure.or(doubt);
                    masters.0.push(found);
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

fn at_once<T: Send>(tellers: &[Address], ask: impl Fn(&Address) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ask = &ask;
        let asked: Vec<_> = tellers.iter().map(|teller| scope.spawn(move || ask(teller))).collect();
        asked.into_iter().map(|thread| thread.join().expect("a question does not panic")).collect()
    })
}

/// What one of them tells, and why that cannot be believed alone.
fn tell(teller: &Address, question: &Greeting, settings: &Settings) -> Result<(Found, Option<Error>)> {
    let cannot = |why: String| {
        Error::new(ErrorKind::Unavailable, "cannot find the masters")
            .with("server", teller)
            .source(why)
            .hint("check the server, `tier.redis.urls` and `tier.redis.mode`")
    };
    let (mut client, answer) = BlockingClient::connect(teller, &settings.sentinel_access, question, &settings.config)?;
    let found = found(&answer, teller).map_err(cannot)?;
    let doubt = match &found {
        Found::Master(address) => return role_of(address, settings).map_err(cannot).map(|()| (found, None)),
        Found::Map(map) => {
            let state = asked(&mut client, CLUSTER_INFO)?;
            if let Reply::Error(text) = &state {
                return Err(client.refused("CLUSTER INFO", text));
            }
            is_well(&state).and_then(|()| is_whole(map))
        }
    };
    Ok((found, doubt.err().map(cannot)))
}

fn asked(client: &mut BlockingClient, command: &[&[u8]]) -> Result<Reply> {
    let mut bytes = Vec::new();
    resp::command(&mut bytes, command);
    Ok(client.ask(&bytes, 1)?.remove(0))
}

/// An error if the master of a sentinel is none. One that cannot be asked may be one: whoever needs it will see.
fn role_of(address: &Address, settings: &Settings) -> Result<(), String> {
    let connected = BlockingClient::connect(address, &settings.access, &greeting(settings), &settings.config);
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
