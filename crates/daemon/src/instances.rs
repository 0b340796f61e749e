//! The users of the pool: engine process groups, their sessions and their attached workers.
//!
//! An instance is identified by its engine's id and incarnation: another start of an engine is another instance,
//! whatever its id. An instance exists from the first worker or session that names it until its session has ended and
//! none of its processes maps the pool any more; only then can its number be given again. The slots that it got are
//! freed in two cases only: its owner (the session that got them) declares what it still holds, or its locks are gone.

use std::collections::BTreeMap;

use forebay_core::hints::HintId;
use forebay_core::layout::Layout;
use forebay_core::tiers::TRANSFERS;
use forebay_core::{Error, ErrorKind, Instance, NamespaceIndex, Result};
use forebay_io::pool::MAX_ENGINE_ID_BYTES;
use forebay_rpc::proto::{RankGroup, SessionEvent};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::follows::Follows;
use crate::metrics::Saved;

/// Events that wait for a session's stream; an engine reads them at once, so few are ever there.
pub const EVENTS: usize = 64;

pub type EventSender = mpsc::Sender<Result<SessionEvent, tonic::Status>>;

/// The process group behind an instance.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    pub engine_id: String,
    /// Which start of the engine; never 0. Processes of an earlier epoch whose record does not say it have 0, and no
    /// engine is identified with them.
    pub incarnation: u128,
}

pub struct Member {
    pub identity: Identity,
    /// Workers that belong to it; 0 for a client that maps nothing.
    pub ranks: u32,
    /// The session that was handed slots; 0 before the first.
    pub owner: u128,
    pub session: Option<Session>,
    pub saved: Saved,
    /// By rank; an entry lives as long as its attach connection.
    pub workers: BTreeMap<u32, Worker>,
}

pub struct Session {
    pub id: u64,
    /// Its namespaces are trials, and end with it.
    pub is_trial: bool,
    pub events: EventSender,
    /// The short names it was given, by the numbers it was told. See [`Session::MAX_NAMESPACES`].
    pub namespaces: BTreeMap<u32, NamespaceIndex>,
    /// Requests in the engine's queue, by its count: what the core was told of each group.
    pub hints: BTreeMap<u64, Vec<HintId>>,
    /// Lookups whose blocks are promoted; they end with it.
    pub follows: Follows,
    /// It has said what it holds, and may be told things.
    pub is_welcome: bool,
    pub was_told_attached: bool,
}

pub struct Worker {
    /// Tells this connection from a later one of the same rank.
    pub connection: u64,
    pub groups: Vec<RankGroup>,
    /// It knows where its slices lie.
    pub is_ready: bool,
    /// Wakes the connection's task when all ranks are there.
    pub ready: mpsc::Sender<()>,
}

#[derive(Default)]
pub struct Instances {
    members: BTreeMap<u8, Member>,
}

impl Instances {
    /// The member with this identity, made if it is new. Errors with `Full` if no number is free, and with `Invalid` if
    /// its number of ranks has changed. `is_in_use` says which numbers processes or slots of the pool still use,
    /// whether or not there is a member.
    pub fn enter(
        &mut self,
        identity: Identity,
        ranks: u32,
        is_in_use: impl Fn(Instance) -> bool,
        limit: usize,
    ) -> Result<(Instance, &mut Member)> {
        check_ranks(ranks)?;
        let known = self.members.iter().find(|(_, member)| member.identity == identity).map(|(index, _)| *index);
        let index = match known {
            Some(index) => index,
            None => self.vacant(is_in_use, limit)?,
        };
        let member = self.members.entry(index).or_insert_with(|| Member::new(identity, ranks, 0));
        if member.ranks != ranks {
            return Err(Error::invalid("the engine changed its number of ranks")
                .with("engine_id", &member.identity.engine_id)
                .with("was", member.ranks)
                .with("is", ranks)
                .hint("give each start of an engine its own incarnation"));
        }
        Ok((Instance(index), member))
    }

    /// Puts back an instance of an earlier epoch.
    pub fn restore(&mut self, instance: Instance, identity: Identity, ranks: u32, owner: u128) {
        self.members.insert(instance.0, Member::new(identity, ranks, owner));
    }

    pub fn remove(&mut self, instance: Instance) -> Option<Member> {
        self.members.remove(&instance.0)
    }

    pub fn get(&mut self, instance: Instance) -> Option<&mut Member> {
        self.members.get_mut(&instance.0)
    }

    /// The member whose session this is. Errors with `NotFound` if the session has ended.
    pub fn of_session(&mut self, session: u64) -> Result<(Instance, &mut Member)> {
        let is_its = |member: &Member| member.session.as_ref().is_some_and(|s| s.id == session);
        let found = self.members.iter_mut().find(|(_, member)| is_its(member));
        found.map(|(index, member)| (Instance(*index), member)).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the session has ended").with("session", session).hint("open a new session")
        })
    }

    /// A purge gave a namespace another short name.
    pub fn rename(&mut self, old: NamespaceIndex, new: NamespaceIndex) {
        let namespaces = self.sessions().flat_map(|session| session.namespaces.values_mut());
        namespaces.filter(|namespace| **namespace == old).for_each(|namespace| *namespace = new);
    }

    /// The namespaces that sessions have open.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceIndex> {
        let sessions = self.members.values().filter_map(|member| member.session.as_ref());
        sessions.flat_map(|session| session.namespaces.values().copied())
    }

    /// Ends the oldest followed lookup of the session that has most of them, and hands its place on.
    pub fn end_follow(&mut self) -> Option<OwnedSemaphorePermit> {
        self.sessions().max_by_key(|session| session.follows.len())?.follows.end_oldest()
    }

    /// Sessions of engines, which alone have followed lookups.
    pub fn engine_sessions(&self) -> usize {
        self.members.values().filter(|member| member.ranks > 0 && member.session.is_some()).count()
    }

    pub fn sessions(&mut self) -> impl Iterator<Item = &mut Session> {
        self.members.values_mut().filter_map(|member| member.session.as_mut())
    }

    pub fn iter(&self) -> impl Iterator<Item = (Instance, &Member)> {
        self.members.iter().map(|(index, member)| (Instance(*index), member))
    }

    fn vacant(&self, is_in_use: impl Fn(Instance) -> bool, limit: usize) -> Result<u8> {
        let limit = limit.min(TRANSFERS.0.into());
        let is_vacant = |index: &u8| !self.members.contains_key(index) && !is_in_use(Instance(*index));
        (0..limit as u8).find(is_vacant).ok_or_else(|| {
            Error::new(ErrorKind::Full, "too many engines use this pool")
                .with("limit", limit)
                .hint("raise `limits.sessions` (at most 63), or run a second daemon with a pool of its own")
        })
    }
}

impl Member {
    fn new(identity: Identity, ranks: u32, owner: u128) -> Member {
        Member { identity, ranks, owner, session: None, saved: Saved::default(), workers: BTreeMap::new() }
    }

    /// Makes `owner` the session that slots are given to. Errors with `Unavailable` if another session was the owner:
    /// only that session knows which slots the workers still use.
    pub fn own(&mut self, owner: u128) -> Result<()> {
        if self.owner != 0 && self.owner != owner {
            return Err(Error::new(ErrorKind::Unavailable, "another session of this engine holds slots")
                .with("engine_id", &self.identity.engine_id)
                .hint(
                    "stop the workers of that session, after which this session may open, or give this start its \
                     own incarnation",
                ));
        }
        self.owner = owner;
        Ok(())
    }

    /// No session and no connection; its processes may still map the pool.
    pub fn is_idle(&self) -> bool {
        self.session.is_none() && self.workers.is_empty()
    }

    /// All ranks are attached and know where their slices lie.
    pub fn is_attached(&self) -> bool {
        self.workers.len() as u32 == self.ranks && self.workers.values().all(|worker| worker.is_ready)
    }

    /// Bytes of `group` on each rank that stores it, in rank order. `None` unless all ranks declared it alike.
    pub fn rank_bytes(&self, group: u32, is_replicated: bool) -> Option<Vec<u64>> {
        let declared = |worker: &Worker| worker.groups.iter().find(|g| g.group == group).map(|g| g.bytes);
        let bytes = self.workers.values().map(declared).collect::<Option<Vec<u64>>>()?;
        match (is_replicated, bytes.iter().all(|b| *b == bytes[0])) {
            (false, _) => Some(bytes),
            (true, true) => Some(vec![*bytes.first()?]),
            (true, false) => None,
        }
    }
}

impl Session {
    /// Beyond this number, a session's oldest namespace is forgotten: an engine that resets its cache leaves a
    /// namespace behind each time, and never uses it again.
    pub const MAX_NAMESPACES: usize = 256;
    /// Far more than can be honoured in most pools.
    pub const MAX_WAITING: usize = 256;

    /// The number by which the client names `index` from now on.
    pub fn open_namespace(&mut self, index: NamespaceIndex) -> u32 {
        if let Some((handle, _)) = self.namespaces.iter().find(|(_, known)| **known == index) {
            return *handle;
        }
        if self.namespaces.len() >= Session::MAX_NAMESPACES {
            self.namespaces.pop_first();
        }
        let handle = self.namespaces.last_key_value().map_or(0, |(last, _)| last + 1);
        self.namespaces.insert(handle, index);
        handle
    }

    pub fn namespace(&self, handle: u32) -> Result<NamespaceIndex> {
        self.namespaces
            .get(&handle)
            .copied()
            .ok_or_else(|| Error::invalid("the session has not opened the namespace").with("namespace", handle))
    }

    /// An engine that does not read its events loses them; it asks for the state anyway. Its welcome is the first that
    /// it hears, and says all that was before.
    pub fn tell(&self, event: forebay_rpc::proto::session_event::Event) {
        if self.is_welcome {
            let _ = self.events.try_send(Ok(SessionEvent { event: Some(event) }));
        }
    }
}

impl Identity {
    /// As a client names itself. Errors with `Invalid` on what cannot be a name.
    pub fn parse(engine_id: &str, incarnation: &[u8]) -> Result<Identity> {
        if engine_id.is_empty() || engine_id.len() > MAX_ENGINE_ID_BYTES {
            return Err(Error::invalid("an engine id must have 1 to 64 bytes").with("bytes", engine_id.len()));
        }
        Ok(Identity { engine_id: engine_id.to_owned(), incarnation: drawn("incarnation", incarnation)? })
    }
}

/// 16 bytes that somebody drew. Errors with `Invalid` on others.
pub fn drawn(what: &'static str, bytes: &[u8]) -> Result<u128> {
    let number = bytes.try_into().map_or(0, u128::from_be_bytes);
    match number {
        0 => Err(Error::invalid(format!("an {what} must have 16 bytes, not all zero")).with("bytes", bytes.len())),
        number => Ok(number),
    }
}

fn check_ranks(ranks: u32) -> Result<()> {
    if ranks as usize > Layout::MAX_RANKS {
        return Err(Error::invalid("an engine may have at most 64 ranks").with("ranks", ranks));
    }
    Ok(())
}
