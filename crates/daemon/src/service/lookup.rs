//! Lookup and release.
//!
//! A lookup that finds keys "not yet" goes on by itself: it looks at those keys again until none is on its way, and
//! answers whenever more is known. So nobody asks twice.

use std::time::{Duration, Instant};

use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_NOT_YET};
use forebay_core::{Core, Error, ErrorKind, Instance, NamespaceIndex, Result};
use forebay_rpc::proto::{Done, GroupAnswer, GroupKeys, LookupReply, LookupRequest, ReleaseRequest};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{check_hashes, group_index};
use crate::insight::Seen;
use crate::state::{Shared, State};

pub type Replies = ReceiverStream<Result<LookupReply, Status>>;
type Sender = mpsc::Sender<Result<LookupReply, Status>>;

/// Pauses between two looks at what is "not yet" grow from the first, in which a disk reads a few blocks, to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(10);
/// No pause is shorter than this for each key that all lookups look at again. A look at a key takes 0.1 µs, so all of
/// them together take the deciding thread a tenth of its time. The pause of a million keys, which one engine can have
/// under way, is the longest.
const KEY_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Answers for all keys of all groups, and takes the lease. Long prompts are looked up in pieces, so that other
/// calls get in between.
pub async fn lookup(shared: &Shared, places: &Semaphore, request: LookupRequest) -> Result<Replies> {
    let start = Instant::now();
    let _place = places.try_acquire().map_err(|_| {
        Error::new(ErrorKind::Full, "too many lookups are waiting").hint("raise `limits.lookups_in_flight`")
    })?;
    check_size(shared, &request)?;
    let mut pending = begin(shared, request)?;
    let groups = pending.look().await;
    let lease = pending.hand_out(start);
    shared.lock().lookup_time.record(start.elapsed().as_micros() as u64);
    let (replies, stream) = mpsc::channel(1);
    replies.try_send(Ok(LookupReply { lease, groups })).expect("it is the first");
    if pending.lookup.is_some() {
        tokio::spawn(follow(pending, replies));
    }
    Ok(ReceiverStream::new(stream))
}

/// Answers as keys come up, until none is on its way, nobody listens, or the lease has ended.
async fn follow(mut pending: Pending, replies: Sender) {
    let mut pause = FIRST_PAUSE;
    while pending.lookup.is_some() {
        tokio::select! {
            () = replies.closed() => return,
            () = tokio::time::sleep(pause.max(pending.least_pause())) => pause = (pause * 2).min(LAST_PAUSE),
        }
        let before = pending.waiting_keys();
        let Some(groups) = pending.look_again().await else { return };
        if pending.waiting_keys() == before {
            continue;
        }
        let lease = pending.hand_out(Instant::now());
        if lease == 0 || replies.send(Ok(LookupReply { lease, groups })).await.is_err() {
            return;
        }
    }
}

pub fn release(shared: &Shared, request: ReleaseRequest) -> Result<Done> {
    shared.event(|state| {
        let (instance, _) = state.instances.of_session(request.session)?;
        request.leases.iter().for_each(|lease| state.core.release(instance, LeaseId(*lease)));
        Ok(Done {})
    })
}

/// A lookup under way; dropped with what it pinned when the call is cancelled.
struct Pending {
    shared: Shared,
    session: u64,
    instance: Instance,
    /// As the session calls it, and what that means.
    name: u32,
    namespace: NamespaceIndex,
    /// Whether there are workers, which load what they hold a lease on.
    maps_pool: bool,
    /// `None` when it has ended.
    lookup: Option<Lookup>,
    groups: Vec<Group>,
    /// Its part of `State::followed_keys`.
    followed: usize,
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

    /// `None` if the session or the lease has ended, or the daemon drains and so grants no more. A namespace that was
    /// purged meanwhile is looked at as the empty one it is now.
    async fn look_again(&mut self) -> Option<Vec<GroupAnswer>> {
        let shared = self.shared.clone();
        let is_awaited = shared.event(|state| {
            let (_, member) = state.instances.of_session(self.session).ok().filter(|_| !state.is_draining)?;
            self.namespace = member.session.as_ref().expect("found by its session").namespace(self.name).ok()?;
            let lookup = self.lookup.as_mut().expect("taken only at the end");
            state.core.look_again(lookup, self.namespace).then_some(())
        });
        is_awaited?;
        Some(self.look().await)
    }

    /// The lease of what was found; 0 if there is none, or if it has ended. Ends the lookup unless it is to go on.
    fn hand_out(&mut self, asked_at: Instant) -> u64 {
        let is_settled = self.waiting_keys() == 0;
        let shared = self.shared.clone();
        shared.event(|state| {
            let lease = match self.lookup.as_mut() {
                // Without a lease nothing comes up.
                Some(lookup) if !is_settled && self.maps_pool => state.core.pause_lookup(lookup),
                _ => state.core.finish_lookup(self.lookup.take().expect("taken only here")),
            };
            // A session that ended meanwhile would never release it.
            if state.instances.of_session(self.session).is_err() {
                state.core.release(self.instance, lease);
            }
            self.follow_keys(state);
            if is_settled {
                self.tell(state, asked_at);
            }
            lease.0
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

    /// Says how many keys are looked at again from now on: none if the lookup has ended.
    fn follow_keys(&mut self, state: &mut State) {
        state.followed_keys -= self.followed;
        self.followed = if self.lookup.is_some() { self.waiting_keys() } else { 0 };
        state.followed_keys += self.followed;
    }

    fn least_pause(&self) -> Duration {
        (KEY_PAUSE * self.shared.lock().followed_keys as u32).min(LONGEST_PAUSE)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(lookup) = self.lookup.take() {
            let shared = self.shared.clone();
            shared.event(|state| {
                state.core.cancel_lookup(lookup);
                self.follow_keys(state);
            });
        }
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
        self.waiting = Some((before + first, waiting.iter().flat_map(hash).copied().collect()));
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
        Ok(Pending { shared, session, instance, name, namespace, maps_pool, lookup, groups, followed: 0 })
    })
}

fn check_size(shared: &Shared, request: &LookupRequest) -> Result<()> {
    let limit = shared.lock().config.limits.keys_per_lookup as usize;
    let keys: usize = request.groups.iter().map(|keys| keys.hashes.len() / keys.hash_bytes.max(1) as usize).sum();
    if keys > limit {
        return Err(Error::invalid("the lookup has too many keys").with("keys", keys).with("limit", limit));
    }
    Ok(())
}
