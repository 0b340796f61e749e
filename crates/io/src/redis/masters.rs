//! Asks for the masters with a blocking client, and whether each of them answers.

use std::thread;

use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{RedisConfig, Settings};
use super::event_loop::greeting;
use super::resp;
use super::topology::{Found, found, question};

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
    thread::scope(|scope| {
        let asked = masters.addresses().into_iter().map(|address| scope.spawn(|| answers(address, &settings)));
        let asked: Vec<_> = asked.collect();
        asked.into_iter().map(|thread| thread.join().expect("a question does not panic")).collect()
    })
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

/// The masters and their slots, where there can be several masters.
pub(super) fn masters(settings: &Settings) -> Result<Found> {
    let Some(question) = question(settings) else { return Ok(Found::Master(settings.addresses[0].clone())) };
    let mut failure = None;
    for teller in &settings.addresses {
        let asked = BlockingClient::connect(teller, &settings.sentinel_access, &question, &settings.config);
        match asked.map(|(_, answer)| found(&answer, teller)) {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(why)) => {
                let error = Error::new(ErrorKind::Unavailable, "cannot find the masters").with("server", teller);
                failure = Some(error.source(why).hint("check the server and `tier.redis.mode`"));
            }
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.expect("a configuration has an address"))
}
