//! One disk: waiting operations, transfers in flight, and stored blocks.
//!
//! Invariants: each accepted operation is completed exactly once. Everything has a limit: waiting loads and stores,
//! transfers in flight, bytes not flushed. No call blocks. [`Disk::poll`] shows what happens in a turn.
//!
//! A disk is a log and its reads. `log` keeps what the log has in progress; `writer`, `flush`, `footer` and `reclaim`
//! go on with it. `purges` keeps what was purged, beside the log; `noting` writes it, and `void` withdraws what was
//! purged while the disk was away. `reads` keeps the loads; `reader` carries them out. `index` and `space` say what is
//! on the disk, `listing` reads which keys a segment has, into `lists`, and `io` has the transfers of all of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_core::tier::{Completion, Health, OpId, OpKind, Operation, Outcome};
use forebay_core::{BlockKey, Error, ErrorKind, Fingerprint, NamespaceId};

use super::budget::Budget;
use super::config::SsdConfig;
use super::device::Device;
use super::index::{Entry, Index};
use super::io::{Finished, Flight, Io, Lane, RETRY_INTERVAL};
use super::layout::{Balance, Geometry, PAGE, Record};
use super::lists::Lists;
use super::log::{Log, STORE_DEADLINE, Sequences};
use super::owner::{Owner, Watch};
use super::purges::{Purges, Void};
use super::reads::Reads;
use super::reclaim::Reclaim;
use super::report::{Counters, DiskReport, Recovery, SegmentReport, hint_of, trouble};
use super::space::Space;
use super::staging::Staging;
use crate::uring::{Memory, Work};

/// This many failures in a row make a disk sick.
const SICK_AFTER: u32 = 4;
/// A disk that has answered nothing in one direction for this long gets no new work in that direction, so that it does
/// not delay the others.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// A disk that is sick for less is not worth a line.
const LASTING: Duration = Duration::from_secs(1);
/// Keys of evicted blocks that are kept for [`Disk::take_evicted`].
const MAX_EVICTED_KEYS: usize = 1 << 16;

/// The parts of a disk that opening determines.
pub(super) struct Opened {
    pub name: String,
    pub engine_why: String,
    pub is_direct: bool,
    pub geometry: Geometry,
    /// As it was signed.
    pub owner: Owner,
    pub memory: Arc<Memory>,
    pub io: Io,
    pub index: Index,
    pub space: Space,
    pub purges: Purges,
    pub sequences: Sequences,
    pub written_bytes: u64,
    pub stored_bytes: u64,
    /// The latest that was found.
    pub balance: Option<Balance>,
    pub recovery: Recovery,
    /// Of blocks that are served.
    pub namespaces: Vec<NamespaceId>,
    pub device: Option<Device>,
    /// Whether it takes trims.
    pub can_trim: bool,
}

/// See the module documentation.
pub(super) struct Disk {
    /// Dropped before the device: this ends the transfers, which the device's lock covers.
    pub io: Io,
    pub limits: SsdConfig,
    pub geometry: Geometry,
    pub memory: Arc<Memory>,
    pub staging: Staging,
    pub index: Index,
    pub space: Space,
    pub reads: Reads,
    pub log: Log,
    pub reclaim: Option<Reclaim>,
    pub lists: Lists,
    pub purges: Purges,
    pub void: Void,
    pub watch: Watch,
    /// Why it is not used any more, once it is taken.
    pub why_taken: Option<Error>,
    pub budget: Budget,
    pub counters: Counters,
    pub now: Duration,
    pub completions: Vec<Completion>,
    evicted: VecDeque<BlockKey>,
    /// How many of them were evicted before the last poll returned its completions.
    evicted_before_poll: usize,
    /// Blocks that were given up, whose keys nobody knows.
    pub lost: Vec<Fingerprint>,
    /// Of blocks that opening the disk has found, until the owner asks.
    pub namespaces: Vec<NamespaceId>,
    next_probe: Duration,
    /// Of reads and writes, since when, and what the log says of them.
    healths: [Health; 2],
    healths_since: Duration,
    logged_healths: [Health; 2],
    /// Bytes written to the disk before it was opened, as stored on it.
    earlier_written_bytes: u64,
    earlier_stored_bytes: u64,
    name: String,
    engine_why: String,
    is_direct: bool,
    pub recovery: Recovery,
    finished: Vec<Finished>,
    /// Whether the device is told of segments that hold nothing any more.
    pub trims: bool,
    /// The last turn has left something that the next one can do without waiting.
    pub has_more: bool,
    _device: Option<Device>,
}

impl Disk {
    pub fn new(opened: Opened, config: &SsdConfig) -> Disk {
        let mut budget = Budget::new(config.write_bytes_per_second, config.write_bytes_per_day);
        if let Some(Balance { unix_seconds, bytes, .. }) = opened.balance {
            // A clock that was set back since says nothing of the pause, which counts as none.
            budget.resume_day(bytes, Duration::from_secs(unix_seconds_now().saturating_sub(unix_seconds)));
        }
        Disk {
            io: opened.io,
            limits: config.clone(),
            geometry: opened.geometry,
            memory: opened.memory,
            staging: Staging::new(),
            index: opened.index,
            space: opened.space,
            reads: Reads::new(config.has_breakers),
            log: Log::new(opened.sequences),
            reclaim: None,
            lists: Lists::default(),
            purges: opened.purges,
            void: Void::default(),
            watch: Watch::new(opened.owner, Duration::ZERO),
            why_taken: None,
            budget,
            counters: Counters::default(),
            now: Duration::ZERO,
            completions: Vec::new(),
            evicted: VecDeque::new(),
            evicted_before_poll: 0,
            lost: Vec::new(),
            namespaces: opened.namespaces,
            next_probe: Duration::ZERO,
            healths: [Health::Healthy; 2],
            healths_since: Duration::ZERO,
            logged_healths: [Health::Healthy; 2],
            earlier_written_bytes: opened.written_bytes,
            earlier_stored_bytes: opened.stored_bytes,
            name: opened.name,
            engine_why: opened.engine_why,
            is_direct: opened.is_direct,
            recovery: opened.recovery,
            finished: Vec::new(),
            trims: config.trim && opened.can_trim,
            has_more: false,
            _device: opened.device,
        }
    }

    /// Its time begins with that of a tier which was there before.
    pub fn start_at(&mut self, now: Duration) {
        (self.now, self.healths_since) = (now, now);
        self.watch = Watch::new(self.watch.owner, now);
    }

    /// Accepts the operation, unless its queue is full.
    pub fn take(&mut self, op: &Operation) -> bool {
        if self.watch.is_taken {
            self.complete(op.id, Outcome::Failed(ErrorKind::Unavailable));
            return true;
        }
        let is_load = matches!(op.kind, OpKind::Load);
        let is_stuck = if is_load { self.is_stuck(&self.io.reads) } else { self.are_writes_stuck() };
        match op.kind {
            OpKind::Exists => {
                let is_there = self.served(&op.key).is_some();
                self.complete(op.id, if is_there { Outcome::Found } else { Outcome::Absent });
            }
            OpKind::Touch { .. } => self.complete(op.id, Outcome::Failed(ErrorKind::Unsupported)),
            _ if is_stuck => self.complete(op.id, Outcome::Failed(ErrorKind::Unavailable)),
            OpKind::Load if self.reads.waiting() >= self.limits.queued_loads => return false,
            OpKind::Load => self.take_load(op),
            OpKind::Store => return self.take_store(op),
            OpKind::Remove => return self.log.push(op, self.now, self.limits.queued_stores),
        }
        true
    }

    /// One turn: handles what ended, then starts what may start.
    pub fn poll(&mut self) {
        self.hear();
        self.has_more = false;
        if !self.watch.is_taken {
            self.settle_flushed();
            self.start();
            self.withdraw_void();
            self.go_on_giving_up();
        }
        self.evicted_before_poll = self.evicted.len();
    }

    /// Loads first, then stores, then the reclaiming of space for them.
    pub fn start(&mut self) {
        if self.watch.is_taken {
            return;
        }
        self.start_loads();
        if self.watch.may_write(self.now) {
            self.start_batches();
            self.make_room();
            self.close_segments();
            self.write_purges();
        }
        self.flush();
        self.io.submit();
    }

    /// Advances the time.
    pub fn tick(&mut self, now: Duration) {
        self.budget.advance(now.saturating_sub(self.now));
        self.now = self.now.max(now);
        if self.watch.is_taken {
            return;
        }
        self.reads.breaker.advance(self.now);
        if self.are_writes_stuck() {
            self.fail_waiting(ErrorKind::Unavailable);
        }
        self.fail_late();
        self.purges.retry(self.now);
        self.look_again();
        let is_sick = self.io.reads.failures_in_a_row >= SICK_AFTER;
        if is_sick && now >= self.next_probe {
            self.next_probe = now + RETRY_INTERVAL;
            self.io.start(Flight::Probe, Work::Read { at: 0, span: Staging::probe(), checksum: None });
        }
        self.log_health();
    }

    /// After a trim has failed, until the disk is opened again.
    pub(super) fn stop_trimming(&mut self, kind: ErrorKind) {
        self.trims = false;
        let (disk, why) = (self.name.as_str(), format!("{kind:?}"));
        let hint = "nothing is lost; set `tier.ssd.trim = false` if the device does not support it";
        tracing::warn!(disk, why, hint, "a disk does not take trims; it gets none until the daemon starts again");
    }

    /// One line for each change that lasts.
    fn log_health(&mut self) {
        let healths = [self.health(), self.health_of_writes()];
        if healths != self.healths {
            (self.healths, self.healths_since) = (healths, self.now);
        }
        if healths == self.logged_healths || self.now.saturating_sub(self.healths_since) < LASTING {
            return;
        }
        self.logged_healths = healths;
        let disk = self.name.as_str();
        match trouble(healths[0], healths[1]) {
            Some(why) => tracing::warn!(disk, why, "a disk is sick; the tier does not use it until it recovers"),
            None => tracing::info!(disk, "the disk serves"),
        }
    }

    /// Gives the operation up: it ends now if it has not begun. False if it is not here.
    pub fn cancel(&mut self, id: OpId) -> bool {
        let was_waiting = self.reads.withdraw(id);
        let is_load = was_waiting || self.io.is_loading(id);
        if is_load {
            self.reads.breaker.failed(ErrorKind::Timeout, self.now);
        }
        let is_withdrawn = was_waiting || self.log.withdraw(id);
        if is_withdrawn {
            self.complete(id, Outcome::Failed(ErrorKind::Timeout));
        } else if is_load {
            self.reads.note_late(id);
        }
        is_load || is_withdrawn
    }

    /// Whether it is of use: whether it can be read.
    pub fn health(&self) -> Health {
        if self.watch.is_taken {
            return Health::Sick(ErrorKind::Unavailable);
        }
        let health = self.health_of(&self.io.reads);
        if health == Health::Healthy { self.reads.breaker.why_open().map_or(health, Health::Sick) } else { health }
    }

    pub fn health_of_writes(&self) -> Health {
        match self.health_of(&self.io.writes) {
            Health::Healthy if self.are_writes_stuck() => Health::Sick(ErrorKind::Timeout),
            Health::Healthy if self.log.losses_in_a_row >= SICK_AFTER => Health::Sick(self.log.last_loss),
            health => health,
        }
    }

    /// Whether new blocks had better go here: it is well, and its write budget is not spent for longer than a store may
    /// wait.
    pub fn is_usable(&self) -> bool {
        let is_well = |health| health == Health::Healthy;
        is_well(self.health()) && is_well(self.health_of_writes()) && self.budget.wait() <= STORE_DEADLINE
    }

    /// Whether only a store can show that it takes stores again.
    pub fn awaits_trial(&self) -> bool {
        let is_refusing = self.health() == Health::Healthy && self.health_of_writes() != Health::Healthy;
        is_refusing && !self.are_writes_stuck() && self.now >= self.log.paused_until
    }

    /// Whether its queue takes a store.
    pub fn has_room(&self) -> bool {
        self.log.has_room(self.limits.queued_stores)
    }

    /// Whether a store of the key waits or is under way.
    pub fn is_storing(&self, key: &BlockKey) -> bool {
        self.log.is_storing(key)
    }

    fn health_of(&self, lane: &Lane) -> Health {
        match lane.failures_in_a_row {
            _ if self.is_stuck(lane) => Health::Sick(ErrorKind::Timeout),
            SICK_AFTER.. => Health::Sick(lane.last_failure),
            _ => Health::Healthy,
        }
    }

    /// Handles what ended, and starts nothing else.
    pub(super) fn hear(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.io.poll(self.now, &mut finished);
        finished.drain(..).for_each(|finished| self.ended(finished));
        self.finished = finished;
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        let looks = usize::from(self.watch.is_looking());
        let is_waiting = self.reads.waiting() > 0 || !self.log.is_idle() || !self.purges.is_idle();
        !is_waiting && self.io.in_flight() == looks && self.completions.is_empty()
    }

    /// Whether the other disk, of the same id, has gone on from what this one has: it was found with later records or
    /// purges. Never so where this daemon has added some: the other may be this one, found after that.
    pub fn is_behind(&self, other: &Disk) -> bool {
        let found = self.log.found().filter(|_| !self.purges.has_purged);
        found.is_some_and(|found| other.log.found().is_some_and(|other| found < other))
    }

    pub fn take_evicted(&mut self, keys: &mut Vec<BlockKey>) {
        let count = std::mem::take(&mut self.evicted_before_poll);
        // A block that was stored again meanwhile is not evicted.
        keys.extend(self.evicted.drain(..count).filter(|key| self.index.get(key).is_none()));
    }

    /// Whether the block can be loaded.
    pub fn has(&self, key: &BlockKey) -> bool {
        self.served(key).is_some()
    }

    /// Whether a restart could find the block, served or not.
    pub fn names(&self, key: &BlockKey) -> bool {
        self.index.record(key).is_some()
    }

    /// By number. Takes time by their number.
    pub fn segments(&self) -> Vec<SegmentReport> {
        let written_bytes = self.lifetime_written_bytes();
        let segment = |(index, segment): (usize, &super::space::Segment)| SegmentReport {
            index: index as u32,
            state: segment.state,
            life: segment.life,
            age_bytes: written_bytes - segment.began_at_bytes,
            used_bytes: u64::from(segment.next_page) * PAGE,
            live_blocks: segment.live_blocks,
            live_bytes: segment.live_bytes,
        };
        self.space.segments.iter().enumerate().map(segment).collect()
    }

    pub fn breaker_opened(&self) -> u64 {
        self.reads.breaker.opened()
    }

    pub fn report(&self) -> DiskReport {
        DiskReport {
            name: self.name.clone(),
            engine: self.io.engine.name(),
            engine_why: self.engine_why.clone(),
            is_direct: self.is_direct,
            geometry: self.geometry,
            health: self.health(),
            health_of_writes: self.health_of_writes(),
            missing: self.why_taken.as_ref().map(Error::to_string),
            hint: self.why_taken.as_ref().and_then(hint_of),
            breaker_opened: self.breaker_opened(),
            blocks: self.index.len() as u64,
            index_room_blocks: self.index.capacity() as u64,
            live_bytes: self.space.live_bytes,
            waiting_loads: self.reads.waiting(),
            waiting_stores: self.log.waiting(),
            transfers_in_flight: self.io.in_flight(),
            lifetime_written_bytes: self.lifetime_written_bytes(),
            lifetime_stored_bytes: self.lifetime_stored_bytes(),
            counters: self.counters,
            recovery: self.recovery,
        }
    }

    pub(super) fn complete(&mut self, id: OpId, outcome: Outcome) {
        self.completions.push(Completion { id, outcome });
    }

    /// Adds a block to the index and to its segment's account.
    pub(super) fn put(&mut self, record: &Record, segment: u32) {
        self.space.enter(segment);
        if let Some(replaced) = self.index.insert(record, segment) {
            self.space.leave(replaced.spot.segment);
            self.discount(&replaced);
        }
        self.space.count(segment, record.length_bytes);
    }

    /// The block is not served any more. Its record may still be on the disk.
    pub(super) fn withdraw(&mut self, block: Fingerprint) {
        if let Some(entry) = self.index.withdraw(block) {
            self.discount(&entry);
        }
    }

    /// No record of the block is on the disk any more, or a later one says that it was removed.
    pub(super) fn forget(&mut self, block: Fingerprint) {
        if let Some(entry) = self.index.remove(block) {
            self.space.leave(entry.spot.segment);
            self.discount(&entry);
        }
    }

    /// Reports to the owner that the disk evicted the block by itself.
    pub(super) fn tell_evicted(&mut self, key: BlockKey) {
        if self.evicted.len() == MAX_EVICTED_KEYS {
            self.evicted.pop_front();
            self.evicted_before_poll = self.evicted_before_poll.saturating_sub(1);
            self.counters.untold_evictions += 1;
        }
        self.evicted.push_back(key);
    }

    pub(super) fn write(&mut self, flight: Flight, work: Work) {
        if let Work::Write { spans, .. } = &work {
            let bytes = spans.len_bytes();
            self.counters.written_bytes += bytes;
            self.budget.take(bytes);
        }
        self.io.start(flight, work);
    }

    /// For the pages that are written now. Without a daily limit nothing of one was ever spent.
    pub(super) fn balance(&self) -> Balance {
        let of_day = self.budget.left_of_day().map(|bytes| (unix_seconds_now(), bytes));
        let (unix_seconds, bytes) = of_day.unwrap_or((1, i64::MAX));
        Balance { unix_seconds, bytes, written_bytes: self.lifetime_written_bytes() }
    }

    pub(super) fn lifetime_written_bytes(&self) -> u64 {
        self.earlier_written_bytes + self.counters.written_bytes
    }

    pub(super) fn lifetime_stored_bytes(&self) -> u64 {
        self.earlier_stored_bytes + self.counters.stored_bytes
    }

    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    fn discount(&mut self, entry: &Entry) {
        if !entry.is_withdrawn {
            self.space.discount(entry.spot.segment, entry.length_bytes);
        }
    }

    /// Writes wait for a look at the signature too.
    fn are_writes_stuck(&self) -> bool {
        self.is_stuck(&self.io.writes) || self.watch.is_blind_for(STUCK_AFTER, self.now)
    }

    fn is_stuck(&self, lane: &Lane) -> bool {
        lane.is_silent_for(STUCK_AFTER, self.now)
    }

    fn ended(&mut self, Finished { flight, result }: Finished) {
        let is_taken = self.watch.is_taken;
        match flight {
            Flight::Load { .. } if is_taken => self.load_ended(flight, Err(ErrorKind::Unavailable)),
            Flight::Load { .. } => self.load_ended(flight, result),
            Flight::Look => self.looked(result),
            // The stores end all together.
            _ if is_taken => {}
            Flight::Payloads { batch, first, end } => self.payloads_ended(batch, first..end, result),
            Flight::Head { batch } => self.head_ended(batch, result),
            Flight::Sync => self.sync_ended(result),
            Flight::Footer => self.footer_ended(result),
            Flight::Erase { segment } => self.erase_ended(segment, result),
            Flight::Trim => self.trim_ended(result),
            Flight::CarryRead { piece } => self.carry_read(piece, result),
            Flight::CarryWrite { piece } => self.carry_written(piece, result),
            Flight::Purges => self.purges_ended(result),
            Flight::List { reader, segment, life } => self.list_ended(reader, segment, life, result),
            Flight::Probe => self.note_read(result),
            Flight::Opening(_) => unreachable!("opening waits for all its transfers"),
        }
    }
}

fn unix_seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
