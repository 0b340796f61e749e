//! Waits until the replicas have removed what their masters have removed.
//!
//! A replica that becomes the master brings back what it has not removed. Each master names the replicas that follow
//! it, and how far they are. It forgets one whose connection has ended. So those that sentinels and the nodes of a
//! cluster name are asked too: such a replica has done all that its master had done when the purge was over there, or
//! it has become a master, and is then to be emptied like any other.
//!
//! Not known are replicas of replicas, and those that nobody names any more.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};

use super::address::Address;
use super::blocking::BlockingClient;
use super::config::Settings;
use super::event_loop::greeting;
use super::masters::{Masters, asked, at_once};
use super::resp::Reply;
use super::topology::{REPLICATION, ROLE, role};
use crate::purge::Purging;

/// A replica says once a second how far it is.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// Those of the replicas that say that they are masters. Takes the time to connect and one request.
pub(super) fn promoted(masters: &Masters, settings: &Settings) -> Vec<Address> {
    let is_master = |address: &Address| {
        let connected = BlockingClient::connect(address, &settings.access, || greeting(settings), &settings.config);
        // One that does not tell is no master here. `wait` asks it again, and says why it cannot be asked.
        let told = connected.and_then(|(mut client, _)| asked(&mut client, ROLE)).ok();
        (role(told.as_ref()) == Some("master")).then(|| address.clone())
    };
    at_once(masters.replicas().map(|(address, _)| address), is_master).into_iter().flatten().collect()
}

/// A master that was emptied.
pub(super) struct Emptied {
    client: BlockingClient,
    address: Address,
    /// None if it does not tell.
    told: Option<Replication>,
}

impl Emptied {
    pub fn new(address: &Address, mut client: BlockingClient) -> Result<Emptied> {
        let told = Replication::of(address, &mut client)?;
        Ok(Emptied { client, address: address.clone(), told })
    }

    /// The replicas that follow it and have not done what it had done when it was emptied.
    fn behind(&self) -> Vec<String> {
        let Some(Replication { offset, replicas, .. }) = &self.told else { return Vec::new() };
        replicas.iter().filter(|(_, at)| *at < offset).map(|(name, _)| name.clone()).collect()
    }

    /// Which of those still have not.
    fn still(&mut self, behind: Vec<String>) -> Result<Vec<String>> {
        let (Some(told), Some(now)) = (&self.told, Replication::of(&self.address, &mut self.client)?) else {
            return Ok(Vec::new());
        };
        let is_behind = |name: &String| now.replicas.get(name).is_none_or(|at| *at < told.offset);
        Ok(behind.into_iter().filter(is_behind).collect())
    }
}

/// A replica that sentinels or nodes name.
struct Named {
    address: Address,
    /// The sentinels or the cluster say that it is.
    is_down: bool,
    client: Option<BlockingClient>,
}

/// What the named replica is found to be.
enum Standing {
    /// It has removed what was removed.
    Done,
    /// Or it has not yet, for that reason.
    Behind(String),
    Master,
}

impl Named {
    fn ask(&mut self, settings: &Settings) -> Result<Reply> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => {
                BlockingClient::connect(&self.address, &settings.access, || greeting(settings), &settings.config)?.0
            }
        };
        let reply = asked(&mut client, REPLICATION)?;
        self.client = Some(client);
        Ok(reply)
    }

    fn standing(&mut self, settings: &Settings, emptied: &[Emptied]) -> Standing {
        let reply = match self.ask(settings) {
            Ok(reply) => reply,
            Err(error) => return self.unasked(&error, emptied),
        };
        let Some(told) = reply.text().and_then(Replication::read) else {
            warn_untold(&self.address, &reply);
            return Standing::Done;
        };
        let mut masters = emptied.iter().map(|master| master.told.as_ref());
        if told.is_master {
            return Standing::Master;
        }
        match masters.clone().flatten().find(|master| master.history == told.history) {
            Some(master) if told.offset >= master.offset && !told.is_copying => Standing::Done,
            Some(_) => Standing::Behind("it is behind its master".to_owned()),
            // One of the masters that do not tell may be its own.
            None if masters.any(|told| told.is_none()) => Standing::Done,
            None => Standing::Behind("it follows none of the masters".to_owned()),
        }
    }

    /// One that cannot be asked is as its master says, if its master names it under the same address.
    fn unasked(&self, error: &Error, emptied: &[Emptied]) -> Standing {
        let place = self.address.to_string();
        let mut told = emptied.iter().filter_map(|master| master.told.as_ref());
        if told.any(|told| told.replicas.contains_key(&place)) {
            return Standing::Done;
        }
        if self.is_down {
            tracing::warn!(
                replica = place,
                %error,
                hint = "purge again if it comes back and soon becomes the master",
                "a purge cannot ask a replica, and its sentinels or its cluster say that it is down"
            );
            return Standing::Done;
        }
        Standing::Behind(error.to_string())
    }
}

/// Waits until all replicas have done what their masters had done when they were emptied, for ten seconds in all. What
/// has changed if one of them is a master by now.
pub(super) fn wait(
    mut emptied: Vec<Emptied>,
    masters: &Masters,
    settings: &Settings,
    purging: &Purging,
) -> Result<Option<String>> {
    let due = Instant::now() + PATIENCE;
    let mut behind: Vec<Vec<String>> = emptied.iter().map(Emptied::behind).collect();
    let known = masters.addresses();
    let named = masters.replicas().filter(|(address, _)| !known.contains_key(&address.to_string()));
    let mut named: Vec<Named> =
        named.map(|(address, is_down)| Named { address: address.clone(), is_down, client: None }).collect();
    loop {
        let standings = at_once(named, |mut named| (named.standing(settings, &emptied), named));
        let mut waiting = Vec::new();
        for (standing, named) in standings {
            match standing {
                Standing::Done => {}
                Standing::Behind(why) => waiting.push((named, why)),
                Standing::Master => return Ok(Some(format!("{}: it has become a master", named.address))),
            }
        }
        let of_masters = emptied.iter().zip(&behind).find_map(|(master, behind)| Some((master, behind.first()?)));
        if of_masters.is_none() && waiting.is_empty() {
            return Ok(None);
        }
        if Instant::now() >= due {
            let error = Error::new(ErrorKind::Unavailable, "a replica has not removed the blocks yet");
            let error = match (of_masters, waiting.first()) {
                (None, Some((named, why))) => error.with("replica", &named.address).source(why.clone()),
                (Some((master, replica)), _) => error.with("server", &master.address).with("replica", replica),
                (None, None) => error,
            };
            return Err(error.hint(
                "purge again when the replica follows its master or has become the master; until then it may bring \
                 blocks back. If it is gone for good, let the sentinels or the cluster forget it",
            ));
        }
        thread::sleep(PAUSE);
        purging.rest(Instant::now())?;
        for (master, behind) in emptied.iter_mut().zip(&mut behind).filter(|(_, behind)| !behind.is_empty()) {
            *behind = master.still(std::mem::take(behind))?;
        }
        named = waiting.into_iter().map(|(named, _)| named).collect();
    }
}

/// What a server tells of its replication.
struct Replication {
    is_master: bool,
    /// Names the history of changes that it has, its own or its master's.
    history: String,
    /// How far it is in that, in bytes.
    offset: u64,
    /// It takes a copy of everything. Until then it has what it had before.
    is_copying: bool,
    /// How far the replicas are that follow it, by place. One that still takes a copy of everything is nowhere. Of
    /// several at one place, behind a proxy, the last one counts.
    replicas: BTreeMap<String, u64>,
}

impl Replication {
    /// `None` if the server does not tell.
    fn of(address: &Address, client: &mut BlockingClient) -> Result<Option<Replication>> {
        let reply = asked(client, REPLICATION)?;
        let told = reply.text().and_then(Replication::read);
        if told.is_none() {
            warn_untold(address, &reply);
        }
        Ok(told)
    }

    fn read(told: &str) -> Option<Replication> {
        let field = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let is_master = field("role") == Some("master");
        // That of the link, where it has one: what it has done of what came.
        let offset = field("slave_repl_offset").or_else(|| field("master_repl_offset"))?.parse().ok()?;
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
        let history = field("master_replid").unwrap_or_default().to_owned();
        let is_copying = field("master_sync_in_progress").is_some_and(|told| told != "0");
        Some(Replication { is_master, history, offset, is_copying, replicas })
    }
}

fn warn_untold(server: &Address, reply: &Reply) {
    tracing::warn!(
        %server,
        reply = reply.error().unwrap_or("another reply than expected"),
        hint = "give the urls' user the right to INFO, or purge again if a replica soon becomes the master",
        "a purge cannot see whether replicas have removed the blocks"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(lines: &str) -> Vec<(String, u64)> {
        let told = format!("# Replication\r\nrole:master\r\n{lines}master_repl_offset:700\r\n");
        let Replication { offset, replicas, is_master, .. } = Replication::read(&told).expect("it tells");
        assert_eq!((offset, is_master), (700, true));
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

    #[test]
    fn a_replica_tells_whose_history_it_has_how_far_and_whether_it_copies() {
        let told = |is_copying: u32| {
            let told = format!(
                "# Replication\r\nrole:slave\r\nmaster_link_status:down\r\nmaster_sync_in_progress:{is_copying}\r\n\
                 slave_repl_offset:90\r\nmaster_replid:ab\r\nmaster_replid2:00\r\nmaster_repl_offset:95\r\n"
            );
            let told = Replication::read(&told).expect("it tells");
            (told.is_master, told.history, told.offset, told.is_copying)
        };
        assert_eq!(told(0), (false, "ab".to_owned(), 90, false));
        assert_eq!(told(1), (false, "ab".to_owned(), 90, true));
    }
}
