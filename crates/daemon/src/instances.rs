//! The users of the pool: engine process groups, their sessions and their attached workers.
//!
//! An instance is identified by its engine's id and incarnation: another start of an engine is another instance,
//! whatever its id. It has a number from its first worker's attaching until its session has ended and none of its
//! processes maps the pool any more; only then can the number be given again. Sessions of clients without workers, and
//! of engines whose workers are still to come, have no number and hold nothing. The slots that an instance got are
//! freed in two cases only: its owner (the session that got them) declares what it still holds, or its locks are gone.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_core::hints::HintId;
use forebay_core::layout::Layout;
use forebay_core::tiers::TRANSFERS;
use forebay_core::{Error, ErrorKind, Instance, NamespaceIndex, Result};
use forebay_io::pool::MAX_ENGINE_ID_BYTES;
use forebay_rpc::proto::{RankGroup, SessionEvent};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::follows::Follows;
use crate::loans::Loan;
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
    pub looked: Looked,
    /// By rank; an entry lives as long as its attach connection.
    pub workers: BTreeMap<u32, Worker>,
    /// Of its first worker; unknown in an instance of an earlier epoch.
    uid: Option<u32>,
}

/// What it has looked up, without trials.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    pub keys: u64,
    /// Of these.
    pub hits: u64,
}

/// Who wants a number, and how numbers are shared.
pub struct Share<'a> {
    pub uid: u32,
    /// All users that may connect.
    pub users: &'a [u32],
    /// Numbers that may be given.
    pub limit: usize,
}

pub struct Session {
    pub id: u64,
    pub engine_id: String,
    /// Of a client with workers. Other sessions may be short and many, so the log tells of them at `debug`.
    pub is_of_engine: bool,
    /// Its namespaces are trials, and end with it.
    pub is_trial: bool,
    pub events: EventSender,
    /// The short names it was given, by the numbers it was told. See [`Session::MAX_NAMESPACES`].
    pub namespaces: BTreeMap<u32, NamespaceIndex>,
    /// By the same numbers: groups with the lengths of their windows, in blocks, which the session has told.
    pub windows: BTreeMap<u32, Vec<(u16, u32)>>,
    /// Requests in the engine's queue, by its count: what the core was told of each group.
    pub hints: BTreeMap<u64, Vec<HintId>>,
    /// Lookups whose blocks are promoted; they end with it.
    pub follows: Follows,
    /// It has said what it holds, and may be told things.
    pub is_welcome: bool,
    pub was_told_attached: bool,
    /// Shows who may lend it memory.
    pub lending_token: [u8; 16],
    pub lent: Option<Loan>,
}

pub struct Worker {
    /// Tells this connection from a later one of the same rank.
    pub connection: u64,
    pub groups: Vec<RankGroup>,
    /// It knows where its slices lie.
    pub is_ready: bool,
    /// Of the pool's memory, with its GPU's driver; `None` until it says so, as of one that copies from and to no GPU.
    pub registered_bytes: Option<u64>,
    /// Near which it copies, on a host with several.
    pub numa_node: Option<u32>,
    /// Wakes the connection's task when all ranks are there.
    pub ready: mpsc::Sender<()>,
}

#[derive(Default)]
pub struct Instances {
    members: BTreeMap<u8, Member>,
    /// Those without a number, each with a session, by its id.
    unnumbered: BTreeMap<u64, Member>,
}

impl Instances {
    /// The number of the engine with this identity, which maps the pool from now on. Errors with `Full` if no number is
    /// free for its user, and with `Invalid` if its number of ranks has changed. `is_in_use` says which numbers
    /// processes or slots of the pool still use, whether or not there is a member.
    pub fn enter(
        &mut self,
        identity: Identity,
        ranks: u32,
        is_in_use: impl Fn(Instance) -> bool,
        share: &Share,
    ) -> Result<Instance> {
        check_ranks(ranks)?;
        if let Some(instance) = self.number_of(&identity) {
            check_same_ranks(&self.members[&instance.0], ranks)?;
            return Ok(instance);
        }
        let waiting = self.unnumbered.iter().find(|(_, member)| member.ranks > 0 && member.identity == identity);
        let waiting =
            waiting.map(|(session, member)| check_same_ranks(member, ranks).map(|()| *session)).transpose()?;
        let index = self.vacant(is_in_use, share)?;
        let waiting = waiting.and_then(|session| self.unnumbered.remove(&session));
        let member = waiting.unwrap_or_else(|| Member::new(identity, ranks, 0));
        self.members.insert(index, Member { uid: Some(share.uid), ..member });
        Ok(Instance(index))
    }

    /// Opens a session of this identity. It replaces what is left of its owner's last one, which is returned. The
    /// instance is that of an engine which has one. Errors with `Unavailable` if it belongs to another owner.
    pub fn open(
        &mut self,
        identity: Identity,
        ranks: u32,
        owner: u128,
        session: Session,
    ) -> Result<(Option<Instance>, Option<Session>)> {
        check_ranks(ranks)?;
        let instance = if ranks > 0 { self.number_of(&identity) } else { None };
        if let Some(instance) = instance {
            let member = self.members.get_mut(&instance.0).expect("it has this number");
            check_same_ranks(member, ranks)?;
            member.own(owner)?;
            return Ok((Some(instance), member.session.replace(session)));
        }
        let known = self.unnumbered.iter_mut().find(|(_, member)| ranks > 0 && member.identity == identity);
        let known =
            known.map(|(id, member)| check_same_ranks(member, ranks).and_then(|()| member.own(owner)).map(|()| *id));
        let old = known.transpose()?.and_then(|id| self.unnumbered.remove(&id)?.session);
        let id = session.id;
        let member = Member { session: Some(session), ..Member::new(identity, ranks, owner) };
        self.unnumbered.insert(id, member);
        Ok((None, old))
    }

    /// Ends a session; what is left is its instance, if it has one.
    pub fn close(&mut self, session: u64) -> Option<(Option<Instance>, Session)> {
        if let Some(member) = self.unnumbered.remove(&session) {
            return Some((None, member.session?));
        }
        let (instance, member) = self.of_session(session).ok()?;
        let ended = member.session.take();
        Some((instance, ended?))
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

    /// The member whose session this is, and its number if it has one. Errors with `NotFound` if the session has ended.
    pub fn of_session(&mut self, session: u64) -> Result<(Option<Instance>, &mut Member)> {
        if let Some(member) = self.unnumbered.get_mut(&session) {
            return Ok((None, member));
        }
        let is_its = |member: &Member| member.session.as_ref().is_some_and(|s| s.id == session);
        let found = self.members.iter_mut().find(|(_, member)| is_its(member));
        found.map(|(index, member)| (Some(Instance(*index)), member)).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the session has ended").with("session", session).hint("open a new session")
        })
    }

    /// As [`Instances::of_session`], of an engine whose workers map the pool. Errors with `Invalid` if there are none.
    pub fn of_engine(&mut self, session: u64) -> Result<(Instance, &mut Member)> {
        let (instance, member) = self.of_session(session)?;
        let instance = instance.ok_or_else(|| {
            Error::invalid("a session without workers has neither slots nor hints")
                .hint("use `Put` and `Get`, or open the session with the number of workers that will attach")
        })?;
        Ok((instance, member))
    }

    /// A purge gave a namespace another short name.
    pub fn rename(&mut self, old: NamespaceIndex, new: NamespaceIndex) {
        let namespaces = self.sessions().flat_map(|session| session.namespaces.values_mut());
        namespaces.filter(|namespace| **namespace == old).for_each(|namespace| *namespace = new);
    }

    /// The namespaces that sessions have open.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceIndex> {
        let sessions = self.iter().filter_map(|(_, member)| member.session.as_ref());
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
        let members = self.members.values_mut().chain(self.unnumbered.values_mut());
        members.filter_map(|member| member.session.as_mut())
    }

    /// Those with a number first.
    pub fn iter(&self) -> impl Iterator<Item = (Option<Instance>, &Member)> {
        let numbered = self.members.iter().map(|(index, member)| (Some(Instance(*index)), member));
        numbered.chain(self.unnumbered.values().map(|member| (None, member)))
    }

    /// Ends the loans that no call has used for so long.
    pub fn give_back_idle(&mut self, time: Duration) {
        for session in self.sessions() {
            session.lent.take_if(|loan| loan.is_idle(time));
        }
    }

    /// Engines that have neither session nor connection.
    pub fn idle(&self) -> Vec<Instance> {
        let idle = self.members.iter().filter(|(_, member)| member.session.is_none() && member.workers.is_empty());
        idle.map(|(index, _)| Instance(*index)).collect()
    }

    /// Whether an engine of this user would get a number now; the error is that of [`Instances::enter`].
    pub fn check_vacant(&self, is_in_use: impl Fn(Instance) -> bool, share: &Share) -> Result<()> {
        self.vacant(is_in_use, share).map(|_| ())
    }

    pub fn number_of(&self, identity: &Identity) -> Option<Instance> {
        self.members.iter().find(|(_, member)| member.identity == *identity).map(|(index, _)| Instance(*index))
    }

    /// A free number, unless the others need it: each of them may have [`KEPT`] engines, or fewer if there are not so
    /// many numbers.
    fn vacant(&self, is_in_use: impl Fn(Instance) -> bool, share: &Share) -> Result<u8> {
        let limit = share.limit.min(TRANSFERS.0.into());
        let is_vacant = |index: &u8| !self.members.contains_key(index) && !is_in_use(Instance(*index));
        let vacant: Vec<u8> = (0..limit as u8).filter(is_vacant).collect();
        let engines = |uid: u32| self.members.values().filter(|member| member.uid == Some(uid)).count();
        let kept = KEPT.min(limit / share.users.len().max(1));
        let others = share.users.iter().filter(|uid| **uid != share.uid);
        let needed: usize = others.map(|uid| kept.saturating_sub(engines(*uid))).sum();
        // Its own part is as safe from the others.
        let is_own = engines(share.uid) < kept;
        vacant.first().filter(|_| is_own || vacant.len() > needed).copied().ok_or_else(|| {
            Error::new(ErrorKind::Full, "too many engines use this pool")
                .with("limit", limit)
                .with("user", share.uid)
                .with("engines_of_user", engines(share.uid))
                .hint("raise `limits.engines` (at most 63), or run a second daemon with a pool of its own")
        })
    }
}

/// Numbers that each user who may connect can count on: an engine, its successor, and room for a second pair.
const KEPT: usize = 4;

impl Member {
    fn new(identity: Identity, ranks: u32, owner: u128) -> Member {
        let (saved, looked, workers) = (Saved::default(), Looked::default(), BTreeMap::new());
        Member { identity, ranks, owner, session: None, saved, looked, workers, uid: None }
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
    /// namespace behind each time, and never uses it again. A client that still uses it opens it again.
    pub const MAX_NAMESPACES: usize = 256;
    /// Far more than can be honoured in most pools.
    pub const MAX_WAITING: usize = 256;

    /// The number by which the client names `index` from now on.
    pub fn open_namespace(&mut self, index: NamespaceIndex, windows: Vec<(u16, u32)>) -> u32 {
        let handle = self.handle(index);
        self.windows.insert(handle, windows);
        handle
    }

    fn handle(&mut self, index: NamespaceIndex) -> u32 {
        if let Some((handle, _)) = self.namespaces.iter().find(|(_, known)| **known == index) {
            return *handle;
        }
        if self.namespaces.len() >= Session::MAX_NAMESPACES
            && let Some((forgotten, _)) = self.namespaces.pop_first()
        {
            self.windows.remove(&forgotten);
        }
        let handle = self.namespaces.last_key_value().map_or(0, |(last, _)| last + 1);
        self.namespaces.insert(handle, index);
        handle
    }

    /// Blocks before the end of a prefix that the group of the namespace needs; 0 if all may be, or nobody has said.
    pub fn window(&self, handle: u32, group: u16) -> usize {
        let windows = self.windows.get(&handle).into_iter().flatten();
        windows.into_iter().find(|(windowed, _)| *windowed == group).map_or(0, |(_, blocks)| *blocks as usize)
    }

    /// Errors with `NotFound`, by which a client knows that it has to open the namespace again.
    pub fn namespace(&self, handle: u32) -> Result<NamespaceIndex> {
        self.namespaces.get(&handle).copied().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the session has not opened the namespace, or has opened many others since")
                .with("namespace", handle)
                .with("kept", Session::MAX_NAMESPACES)
                .hint("open the namespace again")
        })
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

fn check_same_ranks(member: &Member, ranks: u32) -> Result<()> {
    if member.ranks == ranks {
        return Ok(());
    }
    Err(Error::invalid("the engine changed its number of ranks")
        .with("engine_id", &member.identity.engine_id)
        .with("was", member.ranks)
        .with("is", ranks)
        .hint("give each start of an engine its own incarnation"))
}

fn check_ranks(ranks: u32) -> Result<()> {
    if ranks as usize > Layout::MAX_RANKS {
        return Err(Error::invalid("an engine may have at most 64 ranks").with("ranks", ranks));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(engine_id: &str) -> Identity {
        Identity { engine_id: engine_id.to_owned(), incarnation: 1 }
    }

    fn session(id: u64) -> Session {
        Session {
            id,
            engine_id: String::new(),
            is_of_engine: true,
            is_trial: false,
            events: mpsc::channel(1).0,
            namespaces: BTreeMap::new(),
            windows: BTreeMap::new(),
            hints: BTreeMap::new(),
            follows: Follows::default(),
            is_welcome: false,
            was_told_attached: false,
            lending_token: [1; 16],
            lent: None,
        }
    }

    fn share(uid: u32, users: &[u32], limit: usize) -> Share<'_> {
        Share { uid, users, limit }
    }

    #[test]
    fn a_session_has_its_number_when_a_worker_comes_and_clients_without_workers_never_have_one() {
        let mut instances = Instances::default();
        assert_eq!(instances.open(identity("engine"), 2, 7, session(1)).unwrap().0, None);
        assert_eq!(instances.open(identity("engine"), 0, 8, session(2)).unwrap().0, None);
        assert!(instances.of_engine(1).is_err());
        let number = instances.enter(identity("engine"), 2, |_| false, &share(0, &[0], 63)).unwrap();
        let (instance, member) = instances.of_engine(1).unwrap();
        assert_eq!((instance, member.owner, member.ranks), (number, 7, 2));
        assert!(instances.of_engine(2).is_err() && instances.of_session(2).is_ok());
        // The same engine again, another owner, another number of ranks.
        assert_eq!(instances.enter(identity("engine"), 2, |_| false, &share(0, &[0], 63)).unwrap(), number);
        assert!(instances.open(identity("engine"), 2, 9, session(3)).is_err());
        assert!(instances.enter(identity("engine"), 3, |_| false, &share(0, &[0], 63)).is_err());
        let (instance, old) = instances.open(identity("engine"), 2, 7, session(4)).unwrap();
        assert_eq!((instance, old.map(|old| old.id)), (Some(number), Some(1)));
        assert_eq!(instances.close(2).unwrap().0, None);
        assert_eq!(instances.close(4).unwrap().0, Some(number));
        assert!(instances.close(4).is_none() && instances.idle() == [number]);
    }

    #[test]
    fn a_user_may_have_all_numbers_but_those_that_the_others_can_count_on() {
        for (limit, kept) in [(63, 4), (12, 4), (6, 2), (2, 0)] {
            let (mut instances, users) = (Instances::default(), [0, 1000, 1001]);
            let mut enter = |uid: u32, n: usize| {
                instances.enter(identity(&format!("{uid}-{n}")), 1, |_| false, &share(uid, &users, limit))
            };
            let taken = (0..limit + 1).take_while(|n| enter(1000, *n).is_ok()).count();
            assert_eq!(taken, limit - 2 * kept, "of {limit}");
            for uid in [0, 1001] {
                assert!((0..kept).all(|n| enter(uid, n).is_ok()), "user {uid}, of {limit}");
            }
            assert!(enter(0, kept).is_err() && enter(1000, taken).is_err());
        }
    }
}
