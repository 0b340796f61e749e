//! Asks for the masters with a blocking client, and whether each of them answers.

use std::thread;

use forebay_core::{Error, ErrorKind, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::{RedisConfig, Settings};
use super::event_loop::greeting;
use super::topology::{Found, found, question};

/// Connects to each master as the tier would: a finding each, or what to change. Writes nothing. Takes
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
    BlockingClient::connect(address, &settings.access, &greeting(settings), &settings.config)?;
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
