//! Lookup and release.
//!
//! A lookup that finds keys "not yet" goes on by itself: it waits until something has ended that it may wait for, looks
//! at those keys again until none is on its way, and answers whenever more is known. So nobody asks twice.
//!
//! A lookup of as many keys as one event may look at takes one event, and so does each later look.
//!
//! Of a windowed group whose window the engine has told, only the blocks that the prefix needs are looked at. That
//! begins when all of the prefix is there, since it may turn out to be shorter. Room for these blocks is set aside
//! before: a prefix without its window is of no use.

use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::layout::Attention;
use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_LEFT_OUT, STATE_NOT_YET, STATE_READY};
use forebay_core::{Core, Error, ErrorKind, NamespaceIndex, PackedKeys, Result};
use forebay_rpc::proto::{Done, GroupAnswer, GroupKeys, LookupReply, LookupRequest, ReleaseRequest};
use forebay_rpc::to_words;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{check_hashes, group_index};
use crate::follows::Alive;
use crate::instances::Session;
use crate::metrics::Saved;
use crate::state::{Shared, State};
use crate::turns;

pub type Replies = ReceiverStream<Result<LookupReply, Status>>;
type Sender = mpsc::Sender<Result<LookupReply, Status>>;

/// Pauses between two looks at what is "not yet" grow from the first, in which a disk reads a few blocks, to the last:
/// so that blocks that come up one by one are not looked at one by one. While a look can start more promotions, there
/// are no such pauses. Those of a session with many such keys are
/// longer: see [`Follows`](crate::follows::Follows).
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(10);
/// A lookup looks again after so long at the latest, whether anything is said to have ended or not.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// To end a lease of 2,048 blocks takes the deciding thread about 10 µs.
const LEASES_PER_EVENT: usize = 64;

/// Answers for all keys of all groups, and takes the lease. Long prompts are looked up in pieces, so that other
/// calls get in between.
pub async fn lookup(shared: &Shared, places: &Arc<Semaphore>, request: LookupRequest) -> Result<Replies> {
    let start = Instant::now();
    let mut pending = Pending::parse(shared, request)?;
    let (place, reply) = pending.look(start, |pending, state| pending.begin(state, places)).await?;
    let reply = reply.expect("the first look is always answered");
    let alive = pending.begin_follow(reply.lease, place, start);
    let (replies, stream) = mpsc::channel(1);
    replies.try_send(Ok(reply)).expect("it is the first");
    if let Some(alive) = alive {
        turns::spawn(follow(pending, alive, replies));
    }
    Ok(ReceiverStream::new(stream))
}

/// A place among the lookups under way. One whose first answer is out gives its place to a new one: a lookup that waits
/// for a tier keeps nobody from what is in the pool.
fn find_place(state: &mut State, places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit> {
    let free = places.clone().try_acquire_owned().ok();
    free.or_else(|| state.instances.end_follow()).ok_or_else(|| {
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

/// One event for what was saved and the first leases, and one for each further piece of the lists.
pub async fn release(shared: &Shared, request: ReleaseRequest) -> Result<Done> {
    let mut saved = Saved { tokens: request.saved_tokens, prefill_us: request.saved_prefill_us };
    let mut leases = request.leases.chunks(LEASES_PER_EVENT);
    let mut lookups = request.lookups.chunks(LEASES_PER_EVENT);
    loop {
        let (saved, leases_now) = (take(&mut saved), leases.next().unwrap_or_default());
        let lookups_now = lookups.next().unwrap_or_default();
        shared.event(|state| release_some(state, request.session, saved, leases_now, lookups_now))?;
        if leases.len() + lookups.len() == 0 {
            return Ok(Done {});
        }
        tokio::task::yield_now().await;
    }
}

fn release_some(state: &mut State, id: u64, saved: Saved, leases: &[u64], lookups: &[u64]) -> Result<()> {
    let (instance, member) = state.instances.of_session(id)?;
    member.saved.add(saved);
    state.saved.add(saved);
    // Whoever has no number has no lease.
    if let Some(instance) = instance {
        leases.iter().for_each(|lease| state.core.release(instance, LeaseId(*lease)));
    }
    let session = session(state, id).expect("found above");
    leases.iter().chain(lookups).for_each(|lease| session.follows.end(*lease));
    Ok(())
}

/// A lookup under way; dropped with what it pinned when the call is cancelled. Never drop it inside an event: its drop
/// is one.
struct Pending {
    shared: Shared,
    session: u64,
    /// As the session calls it, and what that means.
    name: u32,
    namespace: NamespaceIndex,
    /// Whether there are workers, which load what they hold a lease on.
    maps_pool: bool,
    /// `None` before it has begun, and when it has ended.
    lookup: Option<Lookup>,
    groups: Vec<Group>,
    looked: Looked,
    /// The needed keys of a windowed group were chosen: their promotions begin.
    has_chosen: bool,
    /// Keys that were "not yet" in the last answer; `None` before the first.
    told: Option<usize>,
    /// Changes when something has ended that a lookup may wait for.
    ends: watch::Receiver<u64>,
    /// Its lease, once it is in the session's `follows`.
    followed: Option<u64>,
}

/// The keys of one group.
struct Group {
    group: u16,
    hash_bytes: usize,
    hashes: Vec<u8>,
    /// Those that were "not yet" in the last answer, or are to be looked at for the next, and how many keys lie before
    /// them; `None` before the first one.
    waiting: Option<(u64, Vec<u8>)>,
    hits: usize,
    /// Of a block of full attention.
    full_tokens: Option<u64>,
    /// Of the slot of a block.
    slot_bytes: u64,
    /// Keys from the first on that are hits, or may become some.
    prefix: u64,
    /// Blocks before the end of a prefix that are needed; 0 if all may be, and from when these were chosen on.
    window: usize,
    /// Keys before those.
    left_out: usize,
    is_left_out_told: bool,
}

/// How far one look has come.
#[derive(Default)]
struct Looked {
    /// Of the groups that are done.
    answers: Vec<GroupAnswer>,
    /// Of the next group, and how many bytes of its keys were looked at.
    answer: Answer,
    at: usize,
}

enum Step {
    /// Keys are left for another event.
    Unfinished,
    /// All keys are as in the last answer.
    Same,
    Answer(LookupReply),
}

impl Pending {
    fn parse(shared: &Shared, request: LookupRequest) -> Result<Pending> {
        let groups = request.groups.into_iter().map(Group::parse).collect::<Result<_>>()?;
        let ends = shared.lock().ends.subscribe();
        Ok(Pending {
            shared: shared.clone(),
            session: request.session,
            name: request.namespace,
            namespace: NamespaceIndex::NONE,
            maps_pool: false,
            lookup: None,
            groups,
            looked: Looked::default(),
            has_chosen: false,
            told: None,
            ends,
            followed: None,
        })
    }

    /// Its place is the last thing that it takes: a lookup that is refused takes nobody's.
    fn begin(&mut self, state: &mut State, places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit> {
        let limits = &state.config.limits;
        check_size(&self.groups, limits.keys_per_lookup as usize)?;
        let limit = u64::from(limits.leases_per_session);
        let (instance, member) = state.instances.of_session(self.session)?;
        self.maps_pool = instance.is_some();
        let session = member.session.as_ref().expect("found by its session");
        self.namespace = session.namespace(self.name)?;
        let layout = state.core.layout(self.namespace);
        let mut has_full = false;
        for asked in &mut self.groups {
            let Some(layout) = layout.group(asked.group) else { continue };
            let is_full = layout.attention == Attention::Full;
            asked.full_tokens = is_full.then_some(layout.tokens_per_block.into());
            asked.slot_bytes = layout.slot_bytes();
            // Without a lease nothing comes up, and without a prefix nobody knows what is needed.
            asked.window = if self.maps_pool && has_full { session.window(self.name, asked.group) } else { 0 };
            has_full |= is_full;
        }
        let windows_bytes = self.groups.iter().map(Group::window_bytes).sum();
        if instance.is_some_and(|instance| state.core.lease_count(instance) >= limit) {
            return Err(Error::new(ErrorKind::Full, "the session holds too many leases")
                .with("limit", limit)
                .hint("raise `limits.leases_per_session`, or release leases"));
        }
        let place = find_place(state, places)?;
        // Whoever maps nothing has no use for offsets, and asks without taking a lease.
        let mut lookup = state.core.begin_lookup(instance, self.namespace);
        if !state.core.set_aside(&mut lookup, windows_bytes) {
            self.groups.iter_mut().for_each(|asked| asked.window = 0);
        }
        self.lookup = Some(lookup);
        Ok(place)
    }

    /// Looks at all keys at first, then at those that were "not yet"; `begin` is part of the first event. Returns what
    /// `begin` did, and an answer if there is something new to say.
    async fn look<T>(
        &mut self,
        asked_at: Instant,
        begin: impl FnOnce(&mut Pending, &mut State) -> Result<T>,
    ) -> Result<(T, Option<LookupReply>)> {
        let shared = self.shared.clone();
        let (begun, mut step) = shared.event(|state| -> Result<_> {
            let begun = begin(self, state)?;
            Ok((begun, self.step(state, asked_at)?))
        })?;
        loop {
            match step {
                Step::Unfinished => tokio::task::yield_now().await,
                Step::Same => return Ok((begun, None)),
                Step::Answer(reply) => return Ok((begun, Some(reply))),
            }
            step = shared.event(|state| self.step(state, asked_at))?;
        }
    }

    /// One event's part of a look, with its answer when all keys were looked at.
    fn step(&mut self, state: &mut State, asked_at: Instant) -> Result<Step> {
        let Some(groups) = self.look_at_some(&mut state.core) else { return Ok(Step::Unfinished) };
        let waiting = self.waiting_keys();
        if self.told == Some(waiting) {
            return Ok(Step::Same);
        }
        self.told = Some(waiting);
        let lease = self.hand_out(state, asked_at)?;
        Ok(Step::Answer(LookupReply { lease, groups }))
    }

    /// `None` if keys are left.
    fn look_at_some(&mut self, core: &mut Core) -> Option<Vec<GroupAnswer>> {
        let Pending { lookup, groups, looked, namespace, has_chosen, .. } = self;
        let lookup = lookup.as_mut().expect("taken only at the end");
        let mut keys_left = Core::MAX_KEYS_PER_EVENT;
        for at in looked.answers.len()..groups.len() {
            let (earlier, asked) = groups.split_at_mut(at);
            let asked = &mut asked[0];
            if looked.at == 0
                && asked.window > 0
                && let Some(prefix_tokens) = earlier.iter().filter_map(Group::prefix_tokens).min()
            {
                if earlier.iter().any(Group::may_end_earlier) {
                    looked.answers.push(asked.put_off());
                    continue;
                }
                if keys_left < Core::MAX_NARROWED_KEYS {
                    return None;
                }
                keys_left -= asked.narrow(core, *namespace, lookup, prefix_tokens);
                *has_chosen = true;
            }
            let (before, hashes) = asked.asked();
            if looked.at == 0 {
                lookup.begin_group(before);
            }
            let end = hashes.len().min(looked.at + keys_left * asked.hash_bytes);
            core.look(lookup, asked.group, &hashes[looked.at..end], asked.hash_bytes, &mut looked.answer);
            keys_left -= (end - looked.at) / asked.hash_bytes;
            if end < hashes.len() {
                looked.at = end;
                return None;
            }
            let answer = take(&mut looked.answer);
            looked.at = 0;
            looked.answers.push(asked.note(answer));
        }
        Some(take(looked).answers)
    }

    /// From now on it counts among those that the session has looked at again. `None` if it has ended, or is to end.
    fn begin_follow(&mut self, lease: u64, place: OwnedSemaphorePermit, asked_at: Instant) -> Option<Alive> {
        let keys = self.busy_keys();
        let mut state = self.shared.lock();
        if !state.core.is_trial(self.namespace) {
            state.lookup_time.record(asked_at.elapsed().as_micros() as u64);
        }
        if self.lookup.is_none() || state.is_draining {
            return None;
        }
        self.followed = Some(lease);
        Some(session(&mut state, self.session)?.follows.begin(lease, place, keys))
    }

    async fn keep_looking(&mut self, replies: &Sender) {
        let mut pause = FIRST_PAUSE;
        while let Some(lookup) = &self.lookup {
            let (lacks_room, has_more) = (lookup.lacks_room(), lookup.has_more_to_start());
            if has_more {
                tokio::time::sleep(self.least_pause()).await;
            } else {
                tokio::time::sleep(pause.max(self.least_pause())).await;
                pause = (pause * 2).min(LAST_PAUSE);
                if !lacks_room {
                    // What has ended since the last look counts.
                    let _ = tokio::time::timeout(LONGEST_WAIT, self.ends.changed()).await;
                }
            }
            let Ok(((), reply)) = self.look(Instant::now(), Pending::resume).await else { return };
            if take(&mut self.has_chosen) {
                pause = FIRST_PAUSE;
            }
            let Some(reply) = reply else { continue };
            if reply.lease == 0 || replies.send(Ok(reply)).await.is_err() {
                return;
            }
        }
    }

    fn least_pause(&self) -> Duration {
        let mut state = self.shared.lock();
        let sessions = state.instances.engine_sessions();
        session(&mut state, self.session).map_or(Duration::ZERO, |session| session.follows.pause(sessions))
    }

    /// Errors with `NotFound` if the session or the lease has ended. A namespace that was purged meanwhile is looked at
    /// as the empty one it is now.
    fn resume(&mut self, state: &mut State) -> Result<()> {
        let is_over = || Error::new(ErrorKind::NotFound, "nobody waits for this lookup any more");
        self.namespace = session(state, self.session).ok_or_else(is_over)?.namespace(self.name)?;
        let lookup = self.lookup.as_mut().expect("taken only at the end");
        state.core.look_again(lookup, self.namespace).then_some(()).ok_or_else(is_over)
    }

    /// The lease of what was found; 0 if there is none, or if it has ended. Ends the lookup unless it is to go on.
    /// Errors with `NotFound` if the session has ended: it would never release what was found now. What it holds by
    /// earlier answers is still its own.
    fn hand_out(&mut self, state: &mut State, asked_at: Instant) -> Result<u64> {
        let (is_settled, keys) = (self.waiting_keys() == 0, self.busy_keys());
        let (_, member) = state.instances.of_session(self.session)?;
        let session = member.session.as_mut().expect("found by its session");
        self.followed.into_iter().for_each(|id| session.follows.set_keys(id, keys));
        let lease = match self.lookup.as_mut() {
            // Without a lease nothing comes up.
            Some(lookup) if !is_settled && self.maps_pool => state.core.pause_lookup(lookup),
            _ => state.finish_lookup(self.session, self.lookup.take().expect("taken only here")),
        };
        if is_settled {
            self.tell(state, asked_at);
        }
        Ok(lease.0)
    }

    /// Hands the keys to those who look at them later.
    fn tell(&mut self, state: &State, at: Instant) {
        for Group { group, hash_bytes, hashes, hits, left_out, .. } in self.groups.drain(..) {
            // What the prefix did not need is as good as there.
            let hits = if hits > 0 { left_out + hits } else { 0 };
            state.note_seen(at, (self.namespace, group), (hashes, hash_bytes), hits);
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
            match lookup {
                Some(lookup) if self.told.is_some() => state.cancel_lookup(self.session, lookup),
                Some(lookup) => state.core.cancel_lookup(lookup),
                None => {}
            }
            if let (Some(id), Some(session)) = (self.followed, session(state, self.session)) {
                session.follows.end(id);
            }
        });
    }
}

impl Group {
    fn parse(keys: GroupKeys) -> Result<Group> {
        let hash_bytes = check_hashes(&keys.hashes, keys.hash_bytes)?;
        Ok(Group {
            group: group_index(keys.group)?,
            hash_bytes,
            hashes: keys.hashes,
            waiting: None,
            hits: 0,
            full_tokens: None,
            slot_bytes: 0,
            prefix: 0,
            window: 0,
            left_out: 0,
            is_left_out_told: false,
        })
    }

    /// The keys to look at, and how many of the group lie before them.
    fn asked(&self) -> (u64, &[u8]) {
        self.waiting.as_ref().map_or((0, &self.hashes), |(before, keys)| (*before, keys))
    }

    /// Of the blocks that a windowed group needs.
    fn window_bytes(&self) -> u64 {
        self.window.min(self.hashes.len() / self.hash_bytes) as u64 * self.slot_bytes
    }

    /// Whether blocks of full attention are "not yet", and may not come.
    fn may_end_earlier(&self) -> bool {
        self.full_tokens.is_some() && self.waiting.as_ref().is_some_and(|(_, keys)| !keys.is_empty())
    }

    /// How far the prefix of a group of full attention may reach, as far as is known.
    fn prefix_tokens(&self) -> Option<u64> {
        Some(self.prefix * self.full_tokens?)
    }

    /// The answer while it is not known which keys of a windowed group are needed.
    fn put_off(&mut self) -> GroupAnswer {
        let keys = self.hashes.len() / self.hash_bytes;
        self.waiting.get_or_insert_with(|| (0, self.hashes.clone()));
        GroupAnswer { states: vec![STATE_NOT_YET; keys], ..GroupAnswer::default() }
    }

    /// Chooses the keys of a windowed group that a prefix of so many tokens needs. Returns how many it looked through.
    fn narrow(&mut self, core: &Core, namespace: NamespaceIndex, lookup: &mut Lookup, prefix_tokens: u64) -> usize {
        let Group { group, hash_bytes, .. } = *self;
        let keys = PackedKeys { namespace, group, hashes: &self.hashes, hash_bytes };
        let needed = core.narrow(keys, take(&mut self.window), prefix_tokens, Core::MAX_NARROWED_KEYS);
        lookup.miss_behind((keys.count() - needed.end) as u64);
        self.left_out = needed.start;
        let hashes = self.hashes[needed.start * hash_bytes..needed.end * hash_bytes].to_vec();
        self.waiting = Some((needed.start as u64, hashes));
        needed.len().min(Core::MAX_NARROWED_KEYS)
    }

    /// Takes the answer for the keys that were looked at.
    fn note(&mut self, answer: Answer) -> GroupAnswer {
        self.hits += answer.slots.len();
        let (before, keys) = self.asked();
        let may_be_hit = |state: &&u8| matches!(**state, STATE_READY | STATE_NOT_YET);
        let prefix = before + answer.states.iter().take_while(may_be_hit).count() as u64;
        let prefix = if keys.is_empty() { self.prefix } else { prefix };
        let is_waiting = |at: &usize| answer.states[*at] == STATE_NOT_YET;
        let waiting: Vec<usize> = (0..answer.states.len()).filter(is_waiting).collect();
        let hash = |at: &usize| &keys[at * self.hash_bytes..][..self.hash_bytes];
        let first = waiting.first().map_or(0, |first| *first as u64);
        self.waiting = Some((before + first, waiting.iter().map(hash).collect::<Vec<_>>().concat()));
        self.prefix = prefix;
        let Answer { mut states, slots, generations, sources } = answer;
        if !std::mem::replace(&mut self.is_left_out_told, true) && self.left_out > 0 {
            states.splice(0..0, std::iter::repeat_n(STATE_LEFT_OUT, self.left_out));
        }
        GroupAnswer { states, slots: to_words(&slots), generations: to_words(&generations), sources }
    }
}

fn session(state: &mut State, id: u64) -> Option<&mut Session> {
    state.instances.of_session(id).ok()?.1.session.as_mut()
}

fn check_size(groups: &[Group], limit: usize) -> Result<()> {
    let keys: usize = groups.iter().map(|asked| asked.hashes.len() / asked.hash_bytes).sum();
    if keys > limit {
        return Err(Error::invalid("the lookup has too many keys").with("keys", keys).with("limit", limit));
    }
    Ok(())
}
