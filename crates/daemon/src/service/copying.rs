//! Put and get, for clients that do not map the pool and so need not belong to its trust domain.
//!
//! The bytes are in the messages, or in memory that the client has lent (`tasks/lend.rs`).
//!
//! The copies run on other threads, between two events, and continue to their end even if the client is gone. A `Get`
//! waits for tiers before it copies, without a thread.
//!
//! Invariant: until its copy has ended, a slot or block is the daemon's own ([`Instance::DAEMON`]), whatever happens to
//! the client's session and instance: a reservation while a slot is filled, a lease while a block is read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::key::{BlockHash, BlockId};
use forebay_core::lookup::{Answer, LeaseId, STATE_NOT_YET, STATE_READY};
use forebay_core::stats::Finder;
use forebay_core::store::CommitOutcome as Outcome;
use forebay_core::{Core, Error, ErrorKind, Generation, Instance, NamespaceIndex, Result, SlotId};
use forebay_io::pool::{Lent, Pool, Slice};
use forebay_rpc::proto::{Block, CommitOutcome, GetReply, GetRequest, LentPlace, PutReply, PutRequest};
use forebay_rpc::{MAX_BLOCKS, MAX_MESSAGE_BYTES, pack};
use tokio::sync::watch;

use super::{check_hashes, group_index, store};
use crate::clients::{Place, Room};
use crate::loans::Borrowed;
use crate::state::{Shared, State};

/// How long a `Put` waits in all for room that moves from blocks of another size to its own.
const ROOM_PATIENCE: Duration = Duration::from_millis(100);
/// Before it looks again for the first time. Each pause is twice as long as the one before: each look counts as a
/// request for slots.
const ROOM_PAUSE: Duration = Duration::from_millis(1);

pub async fn put(shared: &Shared, place: &Place, request: PutRequest) -> Result<PutReply> {
    let (copiers, uid) = (place.copiers(), place.uid());
    let copier = copiers.acquire_owned().await.expect("the semaphore is never closed");
    shared.work_off().await;
    let shared = shared.clone();
    let run = move || {
        let _copier = copier;
        put_blocks(&shared, uid, &request)
    };
    tokio::task::spawn_blocking(run).await.expect("a copy does not panic")
}

/// Returns the room that the answer takes as well.
///
/// While it waits for a tier, a call holds neither a thread nor room, which the user's other calls need: it holds its
/// keys, and counts towards `limits.waiting_gets_per_user`. A call that no tier keeps waiting does not.
pub async fn get(shared: &Shared, place: &Arc<Place>, request: GetRequest) -> Result<(GetReply, Room)> {
    // What is brought up evicts: blocks whose use was noted last would go first.
    shared.work_off().await;
    let mut getting = Getting::begin(shared, place.uid(), request)?;
    getting.settle(shared, Some(place), getting.count()).await?;
    let room = place.room(place.limits().message_bytes).await?;
    loop {
        let copier = place.copiers().acquire_owned().await.expect("the semaphore is never closed");
        let shared_there = shared.clone();
        let run = move || {
            let _copier = copier;
            getting.copy(&shared_there).map(|is_over| (getting, is_over))
        };
        let (copied, is_over) = tokio::task::spawn_blocking(run).await.expect("a copy does not panic")?;
        if is_over {
            return Ok((copied.reply, room));
        }
        getting = copied;
        // The block was evicted before its turn. To wait for more of them would evict others. Each try takes patience,
        // so calls that evict each other's blocks end.
        getting.patience.waited += FIRST_PAUSE;
        getting.settle(shared, None, getting.at + 1).await?;
    }
}

/// What the daemon keeps of a block of a call does not depend on the block's size.
fn check_count(blocks: usize) -> Result<()> {
    match blocks <= MAX_BLOCKS {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Full, "a call has too many blocks")
            .with("blocks", blocks)
            .with("limit", MAX_BLOCKS)
            .hint("put or request fewer blocks at a time")),
    }
}

/// A call of which a block has another size, or a hash another length, stores none of its blocks.
fn put_blocks(shared: &Shared, uid: u32, request: &PutRequest) -> Result<PutReply> {
    check_count(request.blocks.len())?;
    let group = group_index(request.group)?;
    let (_, length) = target(&mut shared.lock(), request.session, request.namespace, group)?;
    let lent = request.lent.as_ref().map(|place| lent(shared, uid, request.session, place)).transpose()?;
    if let Some(lent) = &lent {
        lent.check(request.blocks.len(), length)?;
    }
    let mut before = if request.predecessor.is_empty() { None } else { Some(BlockHash::new(&request.predecessor)?) };
    let hashes = pack(request.blocks.iter().map(|block| block.hash.as_slice()))?;
    let mut lengths = request.blocks.iter().map(|block| block.data.len() as u64);
    if let Some(other) = lengths.find(|bytes| lent.is_none() && *bytes != length) {
        return Err(Error::invalid("a block's size differs from its group's block size")
            .with("bytes", other)
            .with("block_bytes", length)
            .hint("all blocks of a group have the size with which their namespace was opened"));
    }
    let mut outcomes = Vec::with_capacity(request.blocks.len());
    let mut patience = ROOM_PATIENCE;
    for (at, (hash, block)) in hashes.iter().zip(&request.blocks).enumerate() {
        let hash = BlockHash::new(hash)?;
        let payload = match &lent {
            Some(lent) => Payload::Lent(&lent.memory, lent.place(at, length), length),
            None => Payload::Message(&block.data),
        };
        let outcome = put_one(shared, request, (group, hash, before), payload, &mut patience)?;
        outcomes.push(outcome.into());
        before = Some(hash);
    }
    Ok(PutReply { outcomes })
}

/// The owner of the block is checked again when the bytes are there: a session that has ended stores nothing, and if
/// the session's namespace was purged meanwhile, the block is stored in the new one.
fn put_one(
    shared: &Shared,
    request: &PutRequest,
    key: (u16, BlockHash, Option<BlockHash>),
    payload: Payload<'_>,
    patience: &mut Duration,
) -> Result<CommitOutcome> {
    let length = payload.len();
    let mut pause = ROOM_PAUSE;
    let taken = loop {
        let (taken, is_moving_room) =
            shared.event(|state| (take(state, request, key.0, length), state.core.is_moving_room()));
        match taken? {
            Some(taken) => break taken,
            None if is_moving_room && !patience.is_zero() => {
                pause = pause.min(*patience);
                std::thread::sleep(pause);
                *patience -= pause;
                pause *= 2;
            }
            None => return Ok(CommitOutcome::CommitLost),
        }
    };
    let written = write(&taken, payload);
    shared.event(|state| keep(state, request, key, &taken, &written))
}

/// Where the bytes of a block come from.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    Message(&'a [u8]),
    /// From this offset, so many bytes.
    Lent(&'a Lent, u64, u64),
}

impl Payload<'_> {
    fn len(self) -> u64 {
        match self {
            Payload::Message(data) => data.len() as u64,
            Payload::Lent(_, _, length) => length,
        }
    }
}

/// The part of lent memory that a call names. The memory stays mapped until the call has ended.
struct LentPart {
    memory: Arc<Borrowed>,
    offset: u64,
}

impl LentPart {
    fn check(&self, blocks: usize, length: u64) -> Result<()> {
        let end = (blocks as u64).checked_mul(length).and_then(|bytes| bytes.checked_add(self.offset));
        if end.is_none_or(|end| end > self.memory.bytes()) {
            return Err(Error::invalid("the blocks of a call leave the lent memory")
                .with("offset", self.offset)
                .with("blocks", blocks)
                .with("lent_bytes", self.memory.bytes()));
        }
        Ok(())
    }

    /// Of the block with this index; `check` was called.
    fn place(&self, index: usize, length: u64) -> u64 {
        self.offset + index as u64 * length
    }
}

/// Errors with `NotFound` if the session has no such memory by now: it was idle, or a call that its client gave up came
/// after the client has lent other memory, and must not touch that. The same goes for calls of another user.
fn lent(shared: &Shared, uid: u32, session: u64, place: &LentPlace) -> Result<LentPart> {
    let mut state = shared.lock();
    let (_, member) = state.instances.of_session(session)?;
    let session = member.session.as_mut().expect("found by its session");
    let named = session.lent.as_mut().and_then(|loan| loan.named(place.memory, uid));
    let memory = named.ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "the session's client has lent no such memory, or it was idle for too long")
            .hint("lend memory again")
    })?;
    Ok(LentPart { memory, offset: place.offset })
}

/// A slot for a block, the daemon's own until `keep`.
pub struct Taken {
    pub at: (SlotId, Generation),
    lengths: Vec<u64>,
    pool: Arc<Pool>,
}

/// What was written to it.
pub struct Written {
    length: u64,
    sum: u64,
    has_births: bool,
}

/// `None` if there is no room, or if blocks of the namespace have another length by now.
pub fn take(state: &mut State, request: &PutRequest, group: u16, length: u64) -> Result<Option<Taken>> {
    let (namespace, block_bytes) = target(state, request.session, request.namespace, group)?;
    let mut slots = Vec::new();
    if length == block_bytes {
        state.core.reserve(Instance::DAEMON, namespace, group, 1, false, &mut slots);
    }
    let lengths = state.core.layout(namespace).group(group).map_or(vec![], |layout| layout.rank_bytes.clone());
    Ok(slots.pop().map(|at| Taken { at, lengths, pool: state.table.pool().clone() }))
}

/// The copy; runs without the state.
pub fn write(Taken { at, lengths, pool }: &Taken, payload: Payload<'_>) -> Written {
    let length = payload.len();
    let slices = match payload {
        Payload::Message(data) => {
            pool.write(at.0.offset(), data);
            sum_slices(data, lengths)
        }
        // The client may change its bytes at any time, so only those in the slot count.
        Payload::Lent(lent, from, _) => pool.copy_in(lent, from, at.0.offset(), lengths),
    };
    let has_births = pool.set_births(at.0, at.1, &slices);
    let sum = Slice::combine(&slices).expect("a block has a slice");
    Written { length, sum, has_births }
}

/// The slot becomes the block, or is given back.
pub fn keep(
    state: &mut State,
    request: &PutRequest,
    (group, hash, before): (u16, BlockHash, Option<BlockHash>),
    Taken { at, .. }: &Taken,
    Written { length, sum, has_births }: &Written,
) -> Result<CommitOutcome> {
    let (namespace, block_bytes) = target(state, request.session, request.namespace, group)
        .inspect_err(|_| state.core.abort(Instance::DAEMON, *at))?;
    let is_whole = *length == block_bytes && *has_births;
    let outcome = state.core.commit(Instance::DAEMON, namespace, group, hash, before, *at, is_whole.then_some(*sum));
    if outcome == Outcome::Stored {
        state.rpc.put_bytes += if state.core.is_trial(namespace) { 0 } else { *length };
    }
    Ok(store::wire(outcome))
}

fn sum_slices(data: &[u8], lengths: &[u64]) -> Vec<Slice> {
    let mut rest = data;
    let slice = |length: &u64| {
        let (slice, behind) = rest.split_at(*length as usize);
        rest = behind;
        Slice { length: *length, checksum: checksum(slice) }
    };
    lengths.iter().map(slice).collect()
}

/// A `Get` under way.
struct Getting {
    start: Instant,
    request: GetRequest,
    group: u16,
    hash_bytes: usize,
    /// Of a block.
    length: u64,
    lent: Option<LentPart>,
    /// The key whose turn it is.
    at: usize,
    patience: Patience,
    reply: GetReply,
    size: usize,
    hits: usize,
    has_gap: bool,
    /// The blocks that were copied, in the order of their keys.
    used: Vec<BlockId>,
}

impl Getting {
    fn begin(shared: &Shared, uid: u32, request: GetRequest) -> Result<Getting> {
        let start = Instant::now();
        let hash_bytes = check_hashes(&request.hashes, request.hash_bytes)?;
        check_count(request.hashes.len() / hash_bytes)?;
        let group = group_index(request.group)?;
        let (_, length) = target(&mut shared.lock(), request.session, request.namespace, group)?;
        let lent = request.lent.as_ref().map(|place| lent(shared, uid, request.session, place)).transpose()?;
        if let Some(lent) = &lent {
            lent.check(request.hashes.len() / hash_bytes, length)?;
        }
        let patience = Patience::new(shared.lock().tiers.longest_deadline());
        let reply = GetReply::default();
        let (at, size, hits, has_gap, used) = (0, 0, 0, false, Vec::new());
        Ok(Getting { start, request, group, hash_bytes, length, lent, at, patience, reply, size, hits, has_gap, used })
    }

    fn count(&self) -> usize {
        self.request.hashes.len() / self.hash_bytes
    }

    /// Waits until no block from this call's turn on, up to one key, is being verified or promoted, or patience ends.
    /// While it waits it counts at `place`; a call that has room need not, as there is room for few.
    async fn settle(&mut self, shared: &Shared, place: Option<&Arc<Place>>, until: usize) -> Result<()> {
        let (mut at, mut pause, mut waiting) = (self.at, FIRST_PAUSE, None);
        let mut early = EARLY_LOOKS;
        while at < until {
            let (states, mut ends) = self.ask(shared, at)?;
            // Trailing misses have no state.
            let settled = states.iter().position(|state| *state == STATE_NOT_YET).unwrap_or(ASKED_AT_ONCE);
            if states.first() == Some(&STATE_READY) && settled > 0 {
                self.patience.came(at);
            }
            at += settled;
            if settled == ASKED_AT_ONCE || at >= until {
                continue;
            }
            if self.patience.is_over() {
                return Ok(());
            }
            if waiting.is_none() {
                waiting = place.map(Place::wait_for_tier).transpose()?;
            }
            let begun = tokio::time::Instant::now();
            let is_early = early > 0 && tokio::time::timeout(pause, ends.changed()).await.is_ok();
            if early == 0 {
                tokio::time::sleep(pause).await;
            }
            early = early.saturating_sub(1);
            self.patience.waited += begun.elapsed();
            pause = match settled {
                0 if is_early => pause,
                0 => (pause * 2).min(LAST_PAUSE),
                _ => FIRST_PAUSE,
            };
        }
        Ok(())
    }

    /// Starts the probes, promotions and verifications of the call's next keys, so that the call does not wait for one
    /// block after another. Returns their states, and what changes when something ends from now on.
    fn ask(&self, shared: &Shared, from: usize) -> Result<(Vec<u8>, watch::Receiver<u64>)> {
        let keys = &self.request.hashes[from * self.hash_bytes..];
        let keys = &keys[..keys.len().min(ASKED_AT_ONCE * self.hash_bytes)];
        shared.event(|state| {
            let (namespace, _) = target(state, self.request.session, self.request.namespace, self.group)?;
            let mut lookup = state.core.begin_lookup(Some(Instance::DAEMON), namespace);
            let mut answer = Answer::default();
            state.core.look(&mut lookup, self.group, keys, self.hash_bytes, &mut answer);
            state.core.cancel_lookup(lookup);
            Ok((answer.states, state.ends.subscribe()))
        })
    }

    /// Copies blocks from the call's turn on. False if one has to be waited for.
    fn copy(&mut self, shared: &Shared) -> Result<bool> {
        while self.at < self.count() {
            let hash = &self.request.hashes[self.at * self.hash_bytes..][..self.hash_bytes];
            let is_last = self.patience.is_over();
            let looked =
                shared.event(|state| look(state, &self.request, self.group, (hash, self.hash_bytes), is_last))?;
            match looked {
                Looked::Found(found) => self.take(shared, &found)?,
                Looked::Absent => self.has_gap = true,
                Looked::NotYet => return Ok(false),
            }
            self.at += 1;
        }
        // The last key first, as of a lookup: to note each use when its block is copied would evict prompts from their
        // start.
        for used in self.used.rchunks(Core::MAX_KEYS_PER_EVENT) {
            shared.event(|state| state.core.note_use(used));
        }
        note_seen(shared, &self.request, self.group, self.hash_bytes, self.hits, self.start);
        Ok(true)
    }

    fn take(&mut self, shared: &Shared, found: &Pinned) -> Result<()> {
        self.hits += usize::from(!self.has_gap);
        self.used.push(found.block);
        let in_message = if self.lent.is_some() { 16 } else { found.length as usize + self.hash_bytes + 16 };
        self.size += in_message;
        if self.size > MAX_MESSAGE_BYTES {
            shared.event(|state| state.core.release(Instance::DAEMON, found.lease));
            return Err(Error::new(ErrorKind::Full, "the requested blocks do not fit in one message")
                .with("limit", MAX_MESSAGE_BYTES)
                .hint("request fewer blocks at a time"));
        }
        if let Some(lent) = &self.lent {
            // Its namespace may be a new one by now, with blocks of another length.
            let copy = || copy_out(shared, found, lent, lent.place(self.at, self.length));
            let checksum = (found.length == self.length).then(copy);
            shared.event(|state| release(state, found, checksum.map_or(0, |_| self.length)));
            if let Some(checksum) = checksum {
                self.reply.found.push(self.at as u32);
                self.reply.checksums.extend(checksum);
            }
            return Ok(());
        }
        let data = read(shared, found);
        shared.event(|state| give_back(state, found, data.as_deref()));
        let hash = &self.request.hashes[self.at * self.hash_bytes..][..self.hash_bytes];
        self.reply.blocks.extend(data.map(|data| Block { hash: hash.to_vec(), data }));
        Ok(())
    }
}

/// Copies the block to lent memory, and returns the checksum with which the client compares it, if that is to be done.
/// A client that finds a difference asks for the block in a message: then the daemon itself reads and compares it.
fn copy_out(shared: &Shared, found: &Pinned, lent: &LentPart, to: u64) -> Option<u64> {
    let (pool, is_verifying) = pool(shared);
    pool.copy_out(found.at.0.offset(), &lent.memory, to, found.length);
    // Without an entry there is no right sum; the daemon's own reading says so too.
    is_verifying.then(|| found.checksum.unwrap_or_else(|| !pool.checksum(found.at.0.offset(), found.length)))
}

fn pool(shared: &Shared) -> (Arc<Pool>, bool) {
    let state = shared.lock();
    (state.table.pool().clone(), state.config.pool.verify_loads)
}

/// The block was copied, or its bytes were wrong.
pub fn give_back(state: &mut State, found: &Pinned, data: Option<&[u8]>) {
    if data.is_none() {
        state.core.drop_corrupt(found.at.0, found.at.1, Finder::Get);
    }
    release(state, found, data.map_or(0, <[u8]>::len) as u64);
}

fn release(state: &mut State, found: &Pinned, copied: u64) {
    state.core.release(Instance::DAEMON, found.lease);
    state.rpc.get_bytes += if found.is_of_trial { 0 } else { copied };
}

/// A load is in the estimates of the hit rate as a lookup of its keys is.
fn note_seen(shared: &Shared, request: &GetRequest, group: u16, hash_bytes: usize, hits: usize, start: Instant) {
    let mut state = shared.lock();
    // Its session may have ended meanwhile.
    if let Ok((namespace, _)) = target(&mut state, request.session, request.namespace, group) {
        state.note_seen(start, (namespace, group), (request.hashes.clone(), hash_bytes), hits);
    }
}

/// The block's bytes; `None` if two readings both differ from what was stored.
pub fn read(shared: &Shared, found: &Pinned) -> Option<Vec<u8>> {
    let (pool, is_verifying) = pool(shared);
    let mut data = vec![0; found.length as usize];
    for _ in 0..2 {
        pool.read(found.at.0.offset(), &mut data);
        if !is_verifying || found.checksum == Some(checksum(&data)) {
            return Some(data);
        }
    }
    let (slot, found_by) = (found.at.0.0, Finder::Get.name());
    tracing::warn!(slot, found_by, "dropped a corrupt block: its bytes do not match its checksum");
    None
}

/// Keys from the one that a call waits for on, which are asked for with it: as many as one event may ask shared stores
/// for. A look at them takes about 25 µs.
const ASKED_AT_ONCE: usize = 256;

/// How long a call still waits for blocks: as long as the slowest tier may take for one, from the last block on that
/// came up while it waited. So a store that brings nothing costs a call one wait, however many blocks it asks for.
struct Patience {
    waited: Duration,
    most: Duration,
    /// Keys that can no longer renew it: each does so once, however often its block is evicted and comes again.
    came: usize,
}

impl Patience {
    fn new(deadline: Duration) -> Patience {
        Patience { waited: Duration::ZERO, most: deadline.max(VERIFY_DEADLINE), came: 0 }
    }

    /// A block came up.
    fn came(&mut self, at: usize) {
        if at >= self.came {
            (self.waited, self.came) = (Duration::ZERO, at + 1);
        }
    }

    fn is_over(&self) -> bool {
        self.waited >= self.most
    }
}

/// Under a lease of the daemon.
pub struct Pinned {
    lease: LeaseId,
    /// Whose use is to be noted at the end of the call.
    block: BlockId,
    pub at: (SlotId, Generation),
    pub length: u64,
    /// As the table had it when the block was found; a purge meanwhile takes it from the table, not from its reader.
    checksum: Option<u64>,
    is_of_trial: bool,
}

pub enum Looked {
    Found(Pinned),
    Absent,
    NotYet,
}

/// One look at one key, for a lease of its own, which notes no use. With `is_last` a block that is not there yet is
/// absent. However often a call looks, the key counts once, with the last answer.
pub fn look(
    state: &mut State,
    request: &GetRequest,
    group: u16,
    (hash, hash_bytes): (&[u8], usize),
    is_last: bool,
) -> Result<Looked> {
    let (namespace, length) = target(state, request.session, request.namespace, group)?;
    let mut lookup = state.core.begin_lookup(Some(Instance::DAEMON), namespace);
    let mut answer = Answer::default();
    state.core.look(&mut lookup, group, hash, hash_bytes, &mut answer);
    if answer.states == [STATE_NOT_YET] && !is_last {
        state.core.cancel_lookup(lookup);
        return Ok(Looked::NotYet);
    }
    let (lease, used) = state.finish_part(request.session, lookup);
    let found = answer.slots.first().zip(answer.generations.first()).zip(used.first());
    Ok(found.map_or(Looked::Absent, |((slot, generation), block)| {
        let at = (SlotId(*slot), Generation(*generation));
        let checksum = state.table.pool().entry(at.0, at.1).map(|entry| entry.checksum);
        Looked::Found(Pinned {
            lease,
            block: *block,
            at,
            length,
            checksum,
            is_of_trial: state.core.is_trial(namespace),
        })
    }))
}

const VERIFY_DEADLINE: Duration = Duration::from_millis(100);
/// 16 MiB are verified in about a millisecond, and read in some. Pauses grow, so that all calls of a user that may wait
/// for a slow store leave the deciding thread to others.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// So many looks of a wait come as soon as something has ended, since a probe and a load may take less than a pause.
/// The ends of others wake it as well, in vain.
const EARLY_LOOKS: u32 = 8;
const LAST_PAUSE: Duration = Duration::from_millis(40);

fn no_group(group: u16) -> Error {
    let error = Error::invalid("the namespace has no such group").with("group", group);
    error.hint("name one of the groups with which the namespace was opened")
}

/// Where a call goes, and how long a block is there.
fn target(state: &mut State, session: u64, handle: u32, group: u16) -> Result<(NamespaceIndex, u64)> {
    let (_, member) = state.instances.of_session(session)?;
    let namespace = member.session.as_ref().expect("found by its session").namespace(handle)?;
    let core: &Core = &state.core;
    let length = core.layout(namespace).group(group).map(|layout| layout.block_bytes());
    let length = length.ok_or_else(|| no_group(group))?;
    Ok((namespace, length))
}
