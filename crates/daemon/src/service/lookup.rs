//! Lookup and release.
//!
//! A lookup that finds keys "not yet" goes on by itself: it looks at those keys again until none is on its way, and
//! answers whenever more is known. So nobody asks twice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_NOT_YET};
use forebay_core::{Core, Error, ErrorKind, NamespaceIndex, Result};
use forebay_rpc::proto::{Done, GroupAnswer, GroupKeys, LookupReply, LookupRequest, ReleaseRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{check_hashes, group_index};
use crate::follows::Alive;
use crate::insight::Seen;
use crate::instances::Session;
use crate::state::{Shared, State};

pub type Replies = ReceiverStream<Result<LookupReply, Status>>;
type Sender = mpsc::Sender<Result<LookupReply, Status>>;

/// Pauses between two looks at what is "not yet" grow from the first, in which a disk reads a few blocks, to the last.
/// Those of a session with many such keys are longer: see [`Follows`](crate::follows::Follows).
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(10);

/// Answers for all keys of all groups, and takes the lease. Long prompts are looked up in pieces, so that other
/// calls get in between.
pub async fn lookup(shared: &Shared, places: &Arc<Semaphore>, request: LookupRequest) -> Result<Replies> {
    let start = Instant::now();
    let place = find_place(shared, places)?;
    check_size(shared, &request)?;
    let mut pending = begin(shared, request)?;
    let groups = pending.look().await;
    let lease = pending.hand_out(start)?;
    shared.lock().lookup_time.record(start.elapsed().as_micros() as u64);
    let (replies, stream) = mpsc::channel(1);
    replies.try_send(Ok(LookupReply { lease, groups })).expect("it is the first");
    if let Some(alive) = pending.begin_follow(lease, place) {
        tokio::spawn(follow(pending, alive, replies));
    }
    Ok(ReceiverStream::new(stream))
}

/// A place among the lookups under way. One whose first answer is out gives its place to a new one: a lookup that waits
/// for a tier keeps nobody from what is in the pool.
fn find_place(shared: &Shared, places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit> {
    let free = places.clone().try_acquire_owned().ok();
    free.or_else(|| shared.lock().instances.end_follow()).ok_or_else(|| {
        Error::new(ErrorKind::Full, "too many lookups are waiting").hint("raise `limits.lookups_in_flight`")
    })
}

/// Answers as keys come up, until none is on its way, nobody listens, or the lookup is to end.
async fn follow(mut pending: Pending, alive: Alive, replies: Sender) {
    tokio::select! {
        biased;
        _ = alive => {}
        () = replies.closed() => {}
        () = pending.keep_looking(&replies) => {}
    }
}

pub fn release(shared: &Shared, request: ReleaseRequest) -> Result<Done> {
    shared.event(|state| {
        let (instance, _) = state.instances.of_session(request.session)?;
        request.leases.iter().for_each(|lease| state.core.release(instance, LeaseId(*lease)));
        let session = session(state, request.session).expect("found above");
        request.leases.iter().chain(&request.lookups).for_each(|lease| session.follows.end(*lease));
        Ok(Done {})
    })
}

/// A lookup under way; dropped with what it pinned when the call is cancelled.
struct Pending {
    shared: Shared,
    session: u64,
    /// As the session calls it, and what that means.
    name: u32,
    namespace: NamespaceIndex,
    /// Whether there are workers, which load what they hold a lease on.
    maps_pool: bool,
    /// `None` when it has ended.
    lookup: Option<Lookup>,
    groups: Vec<Group>,
    /// Its lease, once it is in the session's `follows`.
    followed: Option<u64>,
}

/// The keys of one group.
struct Group {
    group: u16,
    hash_bytes: usize,
    hashes: Vec<u8>,
    /// Those that were "not yet" in the last answer, and how many keys lie before them; `None` before the first one.
    waiting: Option<(u64, Vec<u8>)>,
    hits: usize,
}

impl Pending {
    /// Looks at all keys at first, then at those that were "not yet".
    async fn look(&mut self) -> Vec<GroupAnswer> {
        let Pending { shared, lookup, groups, .. } = self;
        let lookup = lookup.as_mut().expect("taken only at the end");
        let mut answers = Vec::with_capacity(groups.len());
        for asked in groups {
            let (before, hashes) = asked.waiting.as_ref().map_or((0, &asked.hashes), |(before, keys)| (*before, keys));
            let mut answer = Answer::default();
            lookup.begin_group(before);
            for (piece, hashes) in hashes.chunks(Core::MAX_KEYS_PER_EVENT * asked.hash_bytes).enumerate() {
                if piece > 0 {
                    tokio::task::yield_now().await;
                }
                shared.event(|state| state.core.look(lookup, asked.group, hashes, asked.hash_bytes, &mut answer));
            }
            asked.note(&answer);
            answers.push(GroupAnswer { states: answer.states, slots: answer.slots, generations: answer.generations });
        }
        answers
    }

    /// From now on it counts among those that the session has looked at again. `None` if it has ended, or is to end.
    fn begin_follow(&mut self, lease: u64, place: OwnedSemaphorePermit) -> Option<Alive> {
        let keys = self.busy_keys();
        let mut state = self.shared.lock();
        if self.lookup.is_none() || state.is_draining {
            return None;
        }
        self.followed = Some(lease);
        Some(session(&mut state, self.session)?.follows.begin(lease, place, keys))
    }

    async fn keep_looking(&mut self, replies: &Sender) {
        let mut pause = FIRST_PAUSE;
        while self.lookup.is_some() {
            tokio::time::sleep(pause.max(self.least_pause())).await;
            pause = (pause * 2).min(LAST_PAUSE);
            let before = self.waiting_keys();
            let Some(groups) = self.look_again().await else { return };
            if self.waiting_keys() == before {
                continue;
            }
            let Ok(lease) = self.hand_out(Instant::now()) else { return };
            if lease == 0 || replies.send(Ok(LookupReply { lease, groups })).await.is_err() {
                return;
            }
        }
    }

    fn least_pause(&self) -> Duration {
        let mut state = self.shared.lock();
        let sessions = state.instances.engine_sessions();
        session(&mut state, self.session).map_or(Duration::ZERO, |session| session.follows.pause(sessions))
    }

    /// `None` if the session or the lease has ended. A namespace that was purged meanwhile is looked at as the empty
    /// one it is now.
    async fn look_again(&mut self) -> Option<Vec<GroupAnswer>> {
        let shared = self.shared.clone();
        let is_awaited = shared.event(|state| {
            self.namespace = session(state, self.session)?.namespace(self.name).ok()?;
            let lookup = self.lookup.as_mut().expect("taken only at the end");
            state.core.look_again(lookup, self.namespace).then_some(())
        });
        is_awaited?;
        Some(self.look().await)
    }

    /// The lease of what was found; 0 if there is none, or if it has ended. Ends the lookup unless it is to go on.
    /// Errors with `NotFound` if the session has ended: it would never release what was found now. What it holds by
    /// earlier answers is still its own.
    fn hand_out(&mut self, asked_at: Instant) -> Result<u64> {
        let (is_settled, keys) = (self.waiting_keys() == 0, self.busy_keys());
        let shared = self.shared.clone();
        shared.event(|state| {
            let (_, member) = state.instances.of_session(self.session)?;
            let session = member.session.as_mut().expect("found by its session");
            self.followed.into_iter().for_each(|id| session.follows.set_keys(id, keys));
            let lease = match self.lookup.as_mut() {
                // Without a lease nothing comes up.
                Some(lookup) if !is_settled && self.maps_pool => state.core.pause_lookup(lookup),
                _ => state.core.finish_lookup(self.lookup.take().expect("taken only here")),
            };
            if is_settled {
                self.tell(state, asked_at);
            }
            Ok(lease.0)
        })
    }

    /// Hands the keys to those who look at them later.
    fn tell(&mut self, state: &State, at: Instant) {
        for asked in self.groups.drain(..).filter(|asked| !asked.hashes.is_empty()) {
            let Some(layout) = state.core.layout(self.namespace).group(asked.group) else { continue };
            state.insight.note(Seen {
                at,
                namespace: self.namespace,
                id: state.core.namespace_id(self.namespace),
                group: asked.group,
                block_tokens: layout.tokens_per_block,
                block_bytes: layout.slot_bytes(),
                attention: layout.attention,
                hashes: asked.hashes,
                hash_bytes: asked.hash_bytes,
                hits: asked.hits,
            });
        }
    }

    fn waiting_keys(&self) -> usize {
        let keys = |asked: &Group| asked.waiting.as_ref().map_or(0, |(_, keys)| keys.len() / asked.hash_bytes);
        self.groups.iter().map(keys).sum()
    }

    /// See [`Follows`](crate::follows::Follows).
    fn busy_keys(&self) -> u64 {
        (self.waiting_keys() + self.groups.iter().map(|asked| asked.hits).sum::<usize>()) as u64
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let lookup = self.lookup.take();
        if lookup.is_none() && self.followed.is_none() {
            return;
        }
        self.shared.event(|state| {
            lookup.into_iter().for_each(|lookup| state.core.cancel_lookup(lookup));
            if let (Some(id), Some(session)) = (self.followed, session(state, self.session)) {
                session.follows.end(id);
            }
        });
    }
}

impl Group {
    fn parse(keys: GroupKeys) -> Result<Group> {
        let hash_bytes = check_hashes(&keys.hashes, keys.hash_bytes)?;
        Ok(Group { group: group_index(keys.group)?, hash_bytes, hashes: keys.hashes, waiting: None, hits: 0 })
    }

    /// Takes the answer for the keys that were looked at.
    fn note(&mut self, answer: &Answer) {
        self.hits += answer.slots.len();
        let (before, keys) = self.waiting.as_ref().map_or((0, &self.hashes), |(before, keys)| (*before, keys));
        let is_waiting = |at: &usize| answer.states[*at] == STATE_NOT_YET;
        let waiting: Vec<usize> = (0..answer.states.len()).filter(is_waiting).collect();
        let hash = |at: &usize| &keys[at * self.hash_bytes..][..self.hash_bytes];
        let first = waiting.first().map_or(0, |first| *first as u64);
        self.waiting = Some((before + first, waiting.iter().map(hash).collect::<Vec<_>>().concat()));
    }
}

fn begin(shared: &Shared, request: LookupRequest) -> Result<Pending> {
    let groups = request.groups.into_iter().map(Group::parse).collect::<Result<_>>()?;
    shared.event(|state| {
        let limit = u64::from(state.config.limits.leases_per_session);
        let (instance, member) = state.instances.of_session(request.session)?;
        let maps_pool = member.ranks > 0;
        let namespace = member.session.as_ref().expect("found by its session").namespace(request.namespace)?;
        if state.core.lease_count(instance) >= limit {
            return Err(Error::new(ErrorKind::Full, "the session holds too many leases")
                .with("limit", limit)
                .hint("raise `limits.leases_per_session`, or release leases"));
        }
        // Whoever maps nothing has no use for offsets, and asks without taking a lease.
        let lookup = Some(state.core.begin_lookup(maps_pool.then_some(instance), namespace));
        let (session, name, shared) = (request.session, request.namespace, shared.clone());
        Ok(Pending { shared, session, name, namespace, maps_pool, lookup, groups, followed: None })
    })
}

fn session(state: &mut State, id: u64) -> Option<&mut Session> {
    state.instances.of_session(id).ok()?.1.session.as_mut()
}

fn check_size(shared: &Shared, request: &LookupRequest) -> Result<()> {
    let limit = shared.lock().config.limits.keys_per_lookup as usize;
    let keys: usize = request.groups.iter().map(|keys| keys.hashes.len() / keys.hash_bytes.max(1) as usize).sum();
    if keys > limit {
        return Err(Error::invalid("the lookup has too many keys").with("keys", keys).with("limit", limit));
    }
    Ok(())
}
