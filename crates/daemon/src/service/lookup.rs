//! Lookup and release.
//!
//! A lookup that finds keys "not yet" goes on by itself: it waits until something has ended that it may wait for, looks
//! at those keys again until none is on its way, and answers whenever more is known. So nobody asks twice.
//!
//! A lookup of as many keys as one event may look at takes one event, and so does each later look.
//!
//! Of a windowed group whose window the engine has told, only the blocks that the prefix needs are looked at: the last
//! window before the end that the prefix may have. If the prefix turns out to be shorter, the last window before its
//! end is looked at then. Room for both is set aside: a prefix without its window is of no use. Nobody knows how long
//! the request waits. So behind the promotions of four windows' length, of eight, of sixteen and so on, the window at
//! that place is looked at too. Shared stores are asked for these windows before anything else of the lookup: a store
//! that answers slowly would tell of them when the whole prefix is on its way.

use std::mem::take;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::layout::Attention;
use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_LEFT_OUT, STATE_MISS, STATE_NOT_YET, STATE_READY};
use forebay_core::{Core, Error, ErrorKind, NamespaceIndex, PackedKeys, Result};
use forebay_rpc::proto::{Done, GroupAnswer, GroupKeys, LookupReply, LookupRequest, ReleaseRequest};
use forebay_rpc::to_words;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{check_hashes, group_index};
use crate::follows::{Alive, Keys};
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
/// A lookup that finds no slot looks for one again, until its answer has not changed for so long. Then it misses what
/// finds none. Blocks that move out of the way of another size take milliseconds. But this very lookup may hold what
/// has to go, or others may that wait for each other.
const LONGEST_WAIT_FOR_ROOM: Duration = Duration::from_millis(500);
/// The first place at which a request may stop waiting and still have a window, in lengths of the window. The others
/// follow at twice the place before: a request has some half of what has come up, and a lookup brings up few windows
/// that it may not need.
const FIRST_STOP: u64 = 4;
/// Keys of the windows at which a request may stop waiting that stores are asked for first.
const ASKED_AHEAD: usize = 128;
/// Of the keys of a windowed group that an answer has, so many take as long as a look at one of them.
const PUT_OFF_PER_KEY: usize = 8;
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
    /// Keys of a windowed group were chosen: their promotions begin.
    has_chosen: bool,
    /// Looks at all keys that have ended.
    looks: u64,
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
    /// Where those are that were "not yet" in the last answer; `None` before the first one.
    waiting: Option<Vec<u32>>,
    /// Those of them that are looked at for the next answer, and their hashes; `None` for all keys.
    asked: Option<(Vec<u32>, Vec<u8>)>,
    hits: usize,
    is_full: bool,
    /// Of a block.
    tokens: u64,
    /// Of the slot of a block.
    slot_bytes: u64,
    /// Keys from the first on that are hits, or may become some; and those that are hits.
    prefix: u64,
    ready: u64,
    /// Blocks before the end of a prefix that are needed; 0 if all may be.
    window: usize,
    aim: Aim,
}

/// Which keys of a windowed group were chosen.
#[derive(Default)]
struct Aim {
    /// Those that may be needed.
    needed: Vec<Range<usize>>,
    /// None were chosen before the first time. Then the next place to stop at, in tokens.
    next_stop: Option<u64>,
    /// No other keys will be chosen: those that are needed, which are the last.
    is_final: bool,
}

/// A prefix for which keys of a windowed group are to be chosen.
struct Target {
    tokens: u64,
    kind: TargetKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TargetKind {
    /// The whole prefix, as far as is known at the first look.
    First,
    /// A part of it.
    Stop,
    /// What the prefix is.
    Final,
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
            looks: 0,
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
            asked.is_full = is_full;
            asked.slot_bytes = layout.slot_bytes();
            // Blocks are counted where a client does not say.
            asked.tokens = layout.tokens_per_block.max(1).into();
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
        self.ask_ahead(&mut state.core);
        Ok(place)
    }

    /// Asks stores for the windows at which the request may stop waiting.
    fn ask_ahead(&self, core: &mut Core) {
        let full = self.groups.iter().filter(|asked| asked.is_full);
        let Some(tokens) = full.map(|asked| asked.count() as u64 * asked.tokens).min() else { return };
        let mut left = ASKED_AHEAD;
        for asked in self.groups.iter().filter(|asked| asked.window > 0) {
            for window in asked.stops(tokens) {
                let some = window.start..window.end.min(window.start + left);
                left -= some.len();
                core.ask_ahead(asked.keys(self.namespace), some);
            }
        }
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
        let Pending { lookup, groups, looked, namespace, has_chosen, looks, .. } = self;
        let lookup = lookup.as_mut().expect("taken only at the end");
        let mut keys_left = Core::MAX_KEYS_PER_EVENT;
        for at in looked.answers.len()..groups.len() {
            let (earlier, asked) = groups.split_at_mut(at);
            let asked = &mut asked[0];
            if asked.window > 0 && keys_left == 0 {
                return None;
            }
            if looked.at == 0 {
                while asked.window > 0
                    && let Some(target) = asked.target(earlier, *looks, core)
                {
                    if keys_left < Core::MAX_NARROWED_KEYS {
                        return None;
                    }
                    keys_left -= asked.choose(core, *namespace, lookup, target);
                    *has_chosen = true;
                }
                asked.ask();
                lookup.begin_group(asked.before());
            }
            let hashes = asked.hashes_asked();
            let end = hashes.len().min(looked.at + keys_left * asked.hash_bytes);
            core.look(lookup, asked.group, &hashes[looked.at..end], asked.hash_bytes, &mut looked.answer);
            keys_left -= (end - looked.at) / asked.hash_bytes;
            if end < hashes.len() {
                looked.at = end;
                return None;
            }
            let answer = take(&mut looked.answer);
            looked.at = 0;
            if asked.window > 0 {
                keys_left = keys_left.saturating_sub(asked.waiting_or_all() / PUT_OFF_PER_KEY);
            }
            looked.answers.push(asked.note(answer));
        }
        *looks += 1;
        Some(take(looked).answers)
    }

    /// From now on it counts among those that the session has looked at again. `None` if it has ended, or is to end.
    fn begin_follow(&mut self, lease: u64, place: OwnedSemaphorePermit, asked_at: Instant) -> Option<Alive> {
        let keys = self.keys();
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
        let mut news_at = Instant::now();
        while let Some(lookup) = &mut self.lookup {
            let (lacks_room, has_more) = (lookup.lacks_room(), lookup.has_more_to_start());
            if !lacks_room {
                news_at = Instant::now();
            } else if news_at.elapsed() > LONGEST_WAIT_FOR_ROOM {
                lookup.stop_waiting_for_room();
            }
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
            news_at = Instant::now();
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
        let (is_settled, keys) = (self.waiting_keys() == 0, self.keys());
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
        for Group { group, hash_bytes, hashes, hits, aim, .. } in self.groups.drain(..) {
            // What the prefix did not need is as good as there.
            let left_out = aim.last().map_or(0, |needed| needed.start);
            let hits = if hits > 0 { left_out + hits } else { 0 };
            state.note_seen(at, (self.namespace, group), (hashes, hash_bytes), hits);
        }
    }

    fn waiting_keys(&self) -> usize {
        self.groups.iter().filter_map(|asked| asked.waiting.as_ref()).map(Vec::len).sum()
    }

    /// See [`Follows`](crate::follows::Follows).
    fn keys(&self) -> Keys {
        let hits: usize = self.groups.iter().map(|asked| asked.hits).sum();
        let looked_at: usize = self.groups.iter().map(Group::waiting_of_chosen).sum();
        Keys { all: (self.waiting_keys() + hits) as u64, looked_at: (looked_at + hits) as u64 }
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
            asked: None,
            hits: 0,
            is_full: false,
            tokens: 0,
            slot_bytes: 0,
            prefix: 0,
            ready: 0,
            window: 0,
            aim: Aim::default(),
        })
    }

    fn count(&self) -> usize {
        self.hashes.len() / self.hash_bytes
    }

    /// Prepares the keys for the next answer.
    fn ask(&mut self) {
        let is_aimed = self.window > 0 && self.aim.next_stop.is_some();
        let places: Vec<u32> = match &self.waiting {
            None if !is_aimed => return,
            None => (0..self.count() as u32).filter(|at| self.aim.has(*at)).collect(),
            Some(waiting) if !is_aimed => waiting.clone(),
            Some(waiting) => waiting.iter().copied().filter(|at| self.aim.has(*at)).collect(),
        };
        let mut hashes = Vec::with_capacity(places.len() * self.hash_bytes);
        places.iter().for_each(|at| hashes.extend_from_slice(self.hash(*at)));
        self.asked = Some((places, hashes));
    }

    fn hash(&self, at: u32) -> &[u8] {
        &self.hashes[at as usize * self.hash_bytes..][..self.hash_bytes]
    }

    fn hashes_asked(&self) -> &[u8] {
        self.asked.as_ref().map_or(&self.hashes, |(_, hashes)| hashes)
    }

    /// How many keys lie before the first that is looked at.
    fn before(&self) -> u64 {
        self.asked.as_ref().and_then(|(places, _)| places.first()).map_or(0, |first| u64::from(*first))
    }

    /// Of the blocks that a windowed group needs.
    fn window_bytes(&self) -> u64 {
        self.window.min(self.count()) as u64 * self.slot_bytes
    }

    /// Keys that are "not yet" and that each look takes time for.
    fn waiting_of_chosen(&self) -> usize {
        let Some(waiting) = &self.waiting else { return 0 };
        let is_put_off = |at: &u32| self.window > 0 && !self.aim.has(*at);
        waiting.iter().filter(|at| !is_put_off(at)).count()
    }

    /// Keys that the next answer has.
    fn waiting_or_all(&self) -> usize {
        self.waiting.as_ref().map_or(self.count(), Vec::len)
    }

    /// Whether keys are "not yet", and may not come.
    fn is_waiting(&self) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| !waiting.is_empty())
    }

    /// The prefix for which keys of a windowed group are to be chosen now, after so many looks; none if no others are.
    /// `earlier` groups are those of full attention, among others.
    fn target(&self, earlier: &[Group], looks: u64, core: &Core) -> Option<Target> {
        let full = || earlier.iter().filter(|asked| asked.is_full);
        let tokens = full().map(|asked| asked.prefix * asked.tokens).min()?;
        let may_end_earlier = full().any(Group::is_waiting);
        match self.aim.next_stop {
            _ if self.aim.is_final => None,
            _ if !may_end_earlier => Some(Target { tokens, kind: TargetKind::Final }),
            None => Some(Target { tokens, kind: TargetKind::First }),
            Some(stop) => {
                let starts = (looks + 1) * Core::MAX_STARTS_PER_LOOK as u64;
                let started = full().map(|asked| (asked.ready + starts) * asked.tokens).min()?;
                let is_due = stop <= started && stop < tokens && !core.is_half_promised();
                is_due.then_some(Target { tokens: stop, kind: TargetKind::Stop })
            }
        }
    }

    /// In tokens.
    fn first_stop(&self) -> u64 {
        FIRST_STOP.saturating_mul(self.window as u64).saturating_mul(self.tokens)
    }

    /// The windows at which a request may stop waiting for a prefix of so many tokens, as far as there are keys.
    fn stops(&self, tokens: u64) -> impl Iterator<Item = Range<usize>> {
        let stops = std::iter::successors(Some(self.first_stop()), |stop| stop.checked_mul(2));
        let ends = stops.take_while(move |stop| *stop < tokens).map(|stop| stop.div_ceil(self.tokens) as usize);
        ends.take_while(|end| *end <= self.count()).map(|end| end.saturating_sub(self.window)..end)
    }

    fn keys(&self, namespace: NamespaceIndex) -> PackedKeys<'_> {
        PackedKeys { namespace, group: self.group, hashes: &self.hashes, hash_bytes: self.hash_bytes }
    }

    /// Chooses the keys of a windowed group that a prefix needs. Returns how many it looked through.
    fn choose(&mut self, core: &Core, namespace: NamespaceIndex, lookup: &mut Lookup, target: Target) -> usize {
        let keys = self.keys(namespace);
        let (window, tokens, most) = (self.window, target.tokens, Core::MAX_NARROWED_KEYS);
        let first_stop = self.first_stop();
        let needed = match target.kind {
            TargetKind::Final => Some(core.narrow(keys, window, tokens, most)),
            _ => core.last_window(keys, window, tokens, most),
        };
        let looked_through = needed.as_ref().map_or(most, Range::len).min(most);
        match target.kind {
            TargetKind::First => self.aim.next_stop = Some(first_stop),
            TargetKind::Stop => self.aim.next_stop = Some(tokens.saturating_mul(2)),
            TargetKind::Final => {
                lookup.begin_last_windows();
                let end = needed.as_ref().map_or(0, |needed| needed.end);
                lookup.miss_behind((keys.count() - end) as u64);
                self.aim.needed.clear();
                self.aim.next_stop.get_or_insert(first_stop);
                self.aim.is_final = true;
            }
        }
        self.aim.needed.extend(needed);
        looked_through
    }

    /// Takes the answer for the keys that were looked at.
    fn note(&mut self, answer: Answer) -> GroupAnswer {
        let Answer { states, slots, generations, sources } = answer;
        self.hits += slots.len();
        let places = self.asked.take().map(|(places, _)| places);
        let asked = places.as_ref().map_or(self.count(), Vec::len);
        // The first one looked at that is not so; between these, all were ready before.
        let first_not = |is_so: fn(&u8) -> bool| {
            let index = states.iter().take_while(|state| is_so(state)).count();
            (index < asked).then(|| places.as_ref().map_or(index as u64, |places| places[index].into()))
        };
        let known = if self.waiting.is_none() { self.count() as u64 } else { self.prefix };
        self.prefix = first_not(|state| matches!(*state, STATE_READY | STATE_NOT_YET)).unwrap_or(known);
        self.ready = first_not(|state| *state == STATE_READY).unwrap_or(self.prefix).min(self.prefix);
        // Of all that were "not yet", those that were not looked at are so still, or turn out not to be needed.
        let states = match (&self.waiting, &places) {
            (None, None) => states,
            (Some(waiting), Some(places)) if waiting.len() == places.len() => states,
            (waiting, places) => {
                let looked_at = places.as_deref().unwrap_or_default();
                let mut looked = looked_at.iter().copied().zip(states.into_iter().chain(std::iter::repeat(STATE_MISS)));
                let mut looked_next = looked.next();
                let all = waiting.clone().unwrap_or_else(|| (0..self.count() as u32).collect());
                let state = |at: u32| match looked_next {
                    Some((place, state)) if place == at => {
                        looked_next = looked.next();
                        state
                    }
                    _ => self.aim.state_of_others(at),
                };
                all.into_iter().map(state).collect()
            }
        };
        let place_of = |index: usize| self.waiting.as_ref().map_or(index as u32, |waiting| waiting[index]);
        let is_waiting = |(_, state): &(usize, &u8)| **state == STATE_NOT_YET;
        let waiting = states.iter().enumerate().filter(is_waiting).map(|(index, _)| place_of(index)).collect();
        self.waiting = Some(waiting);
        GroupAnswer { states, slots: to_words(&slots), generations: to_words(&generations), sources }
    }
}

impl Aim {
    fn has(&self, at: u32) -> bool {
        self.needed.iter().any(|needed| needed.contains(&(at as usize)))
    }

    /// The keys of the end that the prefix has.
    fn last(&self) -> Option<&Range<usize>> {
        self.needed.last().filter(|_| self.is_final)
    }

    /// Of a key that is not looked at.
    fn state_of_others(&self, at: u32) -> u8 {
        match self.last() {
            None => STATE_NOT_YET,
            Some(needed) if (at as usize) < needed.start => STATE_LEFT_OUT,
            Some(_) => STATE_MISS,
        }
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
