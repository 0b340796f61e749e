//! The SSD tier: blocks distributed over disks.
//!
//! A disk is in the tier from the moment it was opened on, whenever that is. Invariants: a new block goes to one of the
//! disks that are there and well, which [`Placement`] chooses. A block that a disk has is found on it, whatever the
//! order of the configuration, and whatever disks came or went. A disk that fails or is missing affects its own blocks
//! only. A disk that cannot be read for long is as one that is missing: the owner hears that its blocks are gone, and
//! hears of them again when the disk is well.
//!
//! While a disk is missing or sick, another may get a block that this disk has too. Then both have it when the disk is
//! back. That is no harm: a block of one key is one block. The owner hears that a block is gone when no disk has it.
//!
//! What was purged while a disk was missing is void on it when it comes, as long as the pool or one of the other disks
//! knows of it: their lists of purges are compared whenever a disk comes. What the pool does not know of is void in the
//! pool too, since a disk that did not know of it may have filled the pool.
//!
//! Only a store shows that a disk which refused stores takes them again. So such a disk gets one a second, and if the
//! disk refuses it, another disk gets it.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockKey, Error, ErrorKind, Fingerprint, NamespaceId, Result};

use super::claim::{DiskClaim, OpenedDisk};
use super::config::SsdConfig;
use super::disk::Disk;
use super::inbox::{Inbox, News};
use super::index::{Entry, Index};
use super::io::RETRY_INTERVAL;
use super::layout::{Geometry, Record};
use super::lists::{Reader, Step, Walk};
use super::placement::{Choice, Disks, Placement};
use super::pool_purges::PoolPurges;
use super::purges::purge_time_after;
use super::recover::{self, Medium, Mode};
use super::report::{BlockInfo, DiskReport, SegmentReport, hint_of};
use super::staging::no_memory;
use crate::uring::{Region, Waker};

/// Places of the index that one call of [`Ssd::take_found`] goes through: the owner inserts each block into a table.
const PLACES_AT_A_TIME: u32 = 512;
/// Records that one step of [`Ssd::walk`] looks at.
const RECORDS_AT_A_TIME: u32 = 256;
/// A disk that could not be read for so long is given up until it can. A drive that resets is back before.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(10);

/// See the module documentation.
pub struct Ssd {
    /// In the order of the configuration.
    parts: Vec<Part>,
    inbox: Inbox,
    news: Receiver<(usize, News)>,
    placement: Placement,
    /// Stores on disks that refused the ones before.
    trials: HashMap<OpId, Operation>,
    /// Disks that came, and the place in the index of each from which on the owner was not told of its blocks yet.
    found: VecDeque<(usize, u32)>,
    /// The same of disks that were given up: the owner was not told yet that these blocks are gone.
    lost: VecDeque<(usize, u32)>,
    /// What was on disks that another has taken, and from which place on the owner was not told of that yet.
    gone: VecDeque<(Index, u32)>,
    /// Namespaces of which a disk had blocks that were purged while it was away, or the pool may have such blocks.
    void: BTreeSet<NamespaceId>,
    /// The walk under way: the place of the disk, and how far it is there.
    walk: (usize, Walk),
    pool: PoolPurges,
    /// What the pool has heard of from the first disk that it met, until the owner takes it.
    heard: Option<BTreeMap<NamespaceId, u64>>,
    /// Namespaces whose purge is being noted, and the time of the purge.
    noting: BTreeMap<NamespaceId, u64>,
    /// Of operations that came while there was no disk at all.
    refused: Vec<Completion>,
    populated_bytes: u64,
    now: Duration,
}

/// A configured disk.
struct Part {
    name: String,
    is_earlier_io_done: bool,
    state: State,
    /// Since when it cannot be read.
    sick_since: Option<Duration>,
    /// Its blocks are not served.
    is_given_up: bool,
    /// Namespaces for which a walk has passed it over, because it cannot be read, and none has gone through it since.
    unread: BTreeSet<NamespaceId>,
    next_trial: Duration,
}

impl Part {
    fn awaited(name: String) -> Part {
        Part {
            name,
            is_earlier_io_done: false,
            state: State::Awaited,
            sick_since: None,
            is_given_up: false,
            unread: BTreeSet::new(),
            next_trial: Duration::ZERO,
        }
    }

    fn disk(&self) -> Option<&Disk> {
        if let State::Open(disk) = &self.state { Some(disk) } else { None }
    }

    fn disk_mut(&mut self) -> Option<&mut Disk> {
        if let State::Open(disk) = &mut self.state { Some(disk) } else { None }
    }

    fn has(&self, key: &BlockKey) -> bool {
        self.disk().is_some_and(|disk| disk.has(key))
    }

    fn serves(&self, key: &BlockKey) -> bool {
        !self.is_given_up && self.has(key)
    }

    fn serves_some(&self, block: Fingerprint) -> bool {
        let is_served = |disk: &Disk| disk.index.entry_of(block).is_some_and(|entry| entry.is_served());
        !self.is_given_up && self.disk().is_some_and(is_served)
    }
}

/// For [`Placement`].
struct Targets<'a>(&'a [Part]);

impl Disks for Targets<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn is_usable(&self, disk: usize) -> bool {
        self.0[disk].disk().is_some_and(Disk::is_usable)
    }

    fn has_room(&self, disk: usize) -> bool {
        self.0[disk].disk().is_some_and(Disk::has_room)
    }
}

enum State {
    /// Nothing is known of it yet.
    Awaited,
    /// Why it is not there.
    Missing(Error),
    Open(Box<Disk>),
}

impl Ssd {
    /// A disk of this host alone: its operations may outlive the process, in the kernel.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, can_touch: false, is_durable: true, is_shared: false };

    /// A tier whose disks come through its [`Ssd::inbox`]; these are their names, for reports.
    pub fn awaiting(names: Vec<String>) -> Result<Ssd> {
        let waker = Arc::new(Waker::new().map_err(no_memory)?);
        let (sender, news) = mpsc::channel();
        Ok(Ssd {
            placement: Placement::new(names.len()),
            parts: names.into_iter().map(Part::awaited).collect(),
            inbox: Inbox { sender, waker },
            news,
            trials: HashMap::new(),
            found: VecDeque::new(),
            lost: VecDeque::new(),
            gone: VecDeque::new(),
            void: BTreeSet::new(),
            walk: (0, Walk::new(Reader::Purge)),
            pool: PoolPurges::default(),
            heard: None,
            noting: BTreeMap::new(),
            refused: Vec::new(),
            populated_bytes: 0,
            now: Duration::ZERO,
        })
    }

    /// Opens claimed disks, one after another. What they hold need not be asked for with [`Ssd::take_found`].
    pub fn open(claims: Vec<DiskClaim>, config: &SsdConfig, pool: &Region) -> Result<Ssd> {
        let names = config.disks.iter().map(|disk| disk.path.display().to_string()).collect();
        let mut ssd = Ssd::awaiting(names)?;
        for (place, claim) in claims.into_iter().enumerate() {
            ssd.add(place, claim.open(config, pool, &ssd.inbox.waker)?);
        }
        Ok(ssd.told())
    }

    /// Opens disks behind the caller's engines, for tests and simulations.
    pub fn on(media: Vec<Medium>, config: &SsdConfig) -> Result<Ssd> {
        Ssd::on_below(PoolPurges::default(), media, config)
    }

    /// The same, below a pool that knows of these purges.
    pub fn on_below(pool: PoolPurges, media: Vec<Medium>, config: &SsdConfig) -> Result<Ssd> {
        let mut ssd = Ssd::awaiting(media.iter().map(|medium| medium.name.clone()).collect())?;
        ssd.know_purges(pool);
        for (place, medium) in media.into_iter().enumerate() {
            ssd.add(place, OpenedDisk::new(recover::open(medium, None, config, Mode::Serve)?));
        }
        Ok(ssd.told())
    }

    /// As if the owner had asked for all that was found.
    fn told(mut self) -> Ssd {
        self.found.clear();
        self
    }

    /// What the pool knows of purges, to be told before the first disk comes. A pool that was never mentioned knows of
    /// none, and has met no disk.
    pub fn know_purges(&mut self, pool: PoolPurges) {
        self.pool = pool;
    }

    /// Where disks come in.
    pub fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inbox.waker.as_fd()
    }

    /// Takes in the disks that came; [`Tier::poll`] does that too. `timeout` is how long it waits for one.
    pub fn receive(&mut self, timeout: Duration) {
        if let Ok((place, news)) = self.news.recv_timeout(timeout) {
            self.hear(place, news);
        }
        self.hear_all();
    }

    /// Disks of which nothing is known yet.
    pub fn awaited(&self) -> usize {
        self.parts.iter().filter(|part| matches!(part.state, State::Awaited)).count()
    }

    /// Disks that are not in use.
    pub fn missing(&self) -> usize {
        self.parts.len() - self.disks().filter(|disk| !disk.watch.is_taken).count()
    }

    /// Whether no transfer of an earlier daemon is under way on any of the disks. Once true, it stays so.
    pub fn is_earlier_io_done(&self) -> bool {
        self.parts.iter().all(|part| part.is_earlier_io_done)
    }

    /// Appends some of the blocks of disks that came, by the fingerprints of [`SsdConfig::hasher`], and the namespaces
    /// of which these disks have blocks. True if there are more; then it wakes the owner. A block that is stored
    /// meanwhile may be among them, and one that was purged while its disk was away.
    pub fn take_found(&mut self, found: &mut Vec<Fingerprint>, namespaces: &mut Vec<NamespaceId>) -> bool {
        if let Some((place, at)) = self.found.pop_front()
            && let State::Open(disk) = &mut self.parts[place].state
        {
            namespaces.append(&mut disk.namespaces);
            let (entries, next) = disk.index.piece(at, PLACES_AT_A_TIME);
            found.extend(entries.filter(Entry::is_served).map(|entry| entry.block));
            next.into_iter().for_each(|at| self.found.push_front((place, at)));
        }
        let is_more = self.has_more_found();
        if is_more {
            self.inbox.waker.wake();
        }
        is_more
    }

    /// Whether [`Ssd::take_found`] has more blocks of disks that came.
    pub fn has_more_found(&self) -> bool {
        !self.found.is_empty()
    }

    /// Namespaces that were purged while a disk was away, and are due again. Blocks that the disk has of them are not
    /// served any more, but copies may be elsewhere, and no removal says so on the disk: the owner has to purge them
    /// again.
    pub fn take_void(&mut self) -> BTreeSet<NamespaceId> {
        std::mem::take(&mut self.void)
    }

    /// Each disk hears of the purges that another has noted and it has not, or not the last one of a namespace.
    fn compare_purges(&mut self) {
        let mut last = self.pool.times().clone();
        for (namespace, time) in self.disks().flat_map(|disk| disk.purges.times()) {
            let known = last.entry(namespace).or_default();
            *known = time.max(*known);
        }
        for disk in self.parts.iter_mut().filter_map(Part::disk_mut) {
            let lacking = disk.purges.lacking(&last);
            if !lacking.is_empty() {
                // What ends the purge is noted with a later time than what the disk has heard of.
                self.noting.retain(|namespace, _| !lacking.contains_key(namespace));
                disk.void(lacking);
                self.void.extend(disk.purges.due_again());
            }
        }
        let has_blocks = self.disks().any(|disk| !disk.is_new());
        let is_first = has_blocks && self.pool.meet_disks();
        let unknown = self.pool.hear(last);
        if is_first {
            self.heard = Some(unknown);
        } else if !unknown.is_empty() {
            let namespaces = unknown.len();
            tracing::info!(
                namespaces,
                "namespaces were purged, and the pool has not heard of it: they are purged again"
            );
            self.void.extend(unknown.into_keys());
        }
    }

    /// Purges that the first disk that had blocks knows, at a pool that had met none, and when each has ended. The
    /// owner has to write down for the pool that they have, and that it has met disks. None if nothing has changed.
    pub fn take_heard(&mut self) -> Option<BTreeMap<NamespaceId, u64>> {
        self.heard.take()
    }

    /// When the last purge of the namespace that has ended did so, as the disks have it.
    pub fn purge_time(&self, namespace: NamespaceId) -> Option<u64> {
        self.pool.times().get(&namespace).copied()
    }

    /// Advances the time for the write budgets, delayed flushes and sick disks. `now` counts from any fixed moment;
    /// call about every 10 ms.
    pub fn tick(&mut self, now: Duration) {
        self.now = self.now.max(now);
        self.disks_mut().for_each(|disk| disk.tick(now));
        self.judge();
    }

    /// Gives up disks that could not be read for long, and takes them back when they can.
    fn judge(&mut self) {
        for (place, part) in self.parts.iter_mut().enumerate() {
            let State::Open(disk) = &part.state else { continue };
            if disk.health() != Health::Healthy {
                let since = *part.sick_since.get_or_insert(self.now);
                if !part.is_given_up && self.now.saturating_sub(since) >= GIVEN_UP_AFTER {
                    part.is_given_up = true;
                    self.found.retain(|(other, _)| *other != place);
                    self.lost.push_back((place, 0));
                    self.inbox.waker.wake();
                }
            } else if part.sick_since.take().is_some() && std::mem::take(&mut part.is_given_up) {
                self.void.extend(&part.unread);
                self.lost.retain(|(other, _)| *other != place);
                self.found.push_back((place, 0));
                self.inbox.waker.wake();
            }
        }
    }

    /// Reports that the pool's first bytes are populated: they are then pinned for the engines, once.
    pub fn register(&mut self, populated_bytes: u64) {
        self.populated_bytes = populated_bytes;
        self.disks_mut().for_each(|disk| disk.io.engine.register(populated_bytes));
    }

    /// What the index knows of a block that can be loaded; does no I/O.
    pub fn block(&self, key: &BlockKey) -> Option<HeldBlock> {
        let Entry { spot, length_bytes, is_hot, .. } = self.disks().find_map(|disk| disk.served(key))?;
        Some(HeldBlock { segment: spot.segment, first_page: spot.first_page, length_bytes, is_hot })
    }

    /// Goes on with the walk through the lists of all disks for the blocks of these namespaces, the same from its start
    /// to its end, or begins a new one. Blocks come disk by disk, the oldest first, also those that are not served any
    /// more and that a restart might find. A block that is there from the start of the walk to its end is met, perhaps
    /// twice; one that is stored meanwhile may be missing. Takes at most some 100 us: lists are read from the disks,
    /// one at a time, and while one is read the walk waits. A disk that cannot be read for long is passed over, and a
    /// segment whose list cannot be read.
    pub fn walk(&mut self, is_new: bool, namespaces: &BTreeSet<NamespaceId>) -> Walked {
        if is_new {
            self.walk = (0, Walk::new(Reader::Purge));
        }
        let (place, walk) = &mut self.walk;
        while let Some(part) = self.parts.get_mut(*place) {
            let readable = if part.is_given_up { None } else { part.disk_mut() };
            let was_read = readable.is_some();
            let step = readable.map_or(Step::End, |disk| {
                let is_wanted = |record: &Record| namespaces.contains(&record.key.namespace);
                let step = disk.walk_on(walk, RECORDS_AT_A_TIME, is_wanted);
                disk.io.submit();
                step
            });
            match step {
                Step::Blocks(segment, blocks) => {
                    let blocks = blocks.iter().map(|(record, entry)| BlockInfo::new(record, entry, segment));
                    return Walked::Blocks(blocks.collect());
                }
                Step::Waits => return Walked::Waits,
                Step::End => {
                    match was_read {
                        true => part.unread.retain(|namespace| !namespaces.contains(namespace)),
                        false => part.unread.extend(namespaces),
                    }
                    (*place, *walk) = (*place + 1, Walk::new(Reader::Purge));
                }
            }
        }
        Walked::End
    }

    /// The share of the segments that the walk has gone through.
    pub fn walked_ratio(&self) -> f64 {
        let (place, walk) = &self.walk;
        let (mut before, mut all) = (0, 0);
        for (number, part) in self.parts.iter().enumerate() {
            let Some(disk) = part.disk() else { continue };
            let (reached, segments) = disk.ratio_before(walk);
            all += segments;
            before += match number.cmp(place) {
                Ordering::Less => segments,
                Ordering::Equal => reached,
                Ordering::Greater => 0,
            };
        }
        if all == 0 { 0.0 } else { before as f64 / all as f64 }
    }

    /// Has each disk that is there note that nothing of these namespaces is on it, nor on its way there: whatever
    /// becomes of the log, a restart finds none of the blocks that were there before. [`Ssd::noted`] says how that
    /// ends.
    pub fn note_purged(&mut self, namespaces: &BTreeSet<NamespaceId>) {
        // The disks have heard of all that the pool knows.
        let last = self.disks().flat_map(|disk| disk.purges.times()).map(|(_, time)| time).max();
        let time = purge_time_after(last.unwrap_or(0));
        // The same until all disks have noted it.
        let time_of = |namespace| self.noting.get(namespace).copied().unwrap_or(time);
        let times = namespaces.iter().map(|namespace| (*namespace, time_of(namespace)));
        let times: BTreeMap<NamespaceId, u64> = times.collect();
        for part in &mut self.parts {
            if let State::Open(disk) = &mut part.state {
                disk.note_purged(&times, &part.unread);
            }
        }
        self.disks_mut().for_each(Disk::start);
        self.noting.extend(times);
    }

    /// Whether all disks that are there have noted what they were told to, and read it back; none while they are at it.
    pub fn noted(&mut self) -> Option<bool> {
        let noted: Option<Vec<bool>> = self.disks().map(|disk| disk.purges.noted()).collect();
        let are_noted = noted?.iter().all(|is_noted| *is_noted);
        if are_noted {
            self.pool.hear(std::mem::take(&mut self.noting));
        }
        Some(are_noted)
    }

    /// Appends the keys of blocks that the disks evicted to free space since the last call, and the fingerprints of
    /// those that were lost with a disk, or with the list of a segment. Call it after `poll` and after its completions
    /// were handled: a block may be stored and evicted in one turn, and is then reported here last.
    pub fn take_evicted(&mut self, keys: &mut Vec<BlockKey>, lost: &mut Vec<Fingerprint>) {
        let before = (keys.len(), lost.len());
        for disk in self.parts.iter_mut().filter_map(Part::disk_mut) {
            disk.take_evicted(keys);
            lost.append(&mut disk.lost);
        }
        self.take_gone(lost);
        self.take_lost(lost);
        let (mut own_keys, mut own_lost) = (keys.split_off(before.0), lost.split_off(before.1));
        own_keys.retain(|key| !self.parts.iter().any(|part| part.serves(key)));
        own_lost.retain(|block| !self.parts.iter().any(|part| part.serves_some(*block)));
        keys.append(&mut own_keys);
        lost.append(&mut own_lost);
    }

    /// Some of the blocks of a disk that was given up.
    fn take_lost(&mut self, lost: &mut Vec<Fingerprint>) {
        let Some((place, at)) = self.lost.pop_front() else { return };
        let Some(disk) = self.parts[place].disk() else { return };
        let (entries, next) = disk.index.piece(at, PLACES_AT_A_TIME);
        lost.extend(entries.filter(Entry::is_served).map(|entry| entry.block));
        next.into_iter().for_each(|at| self.lost.push_front((place, at)));
        if !self.lost.is_empty() {
            self.inbox.waker.wake();
        }
    }

    /// Some of the blocks that went with a disk.
    fn take_gone(&mut self, lost: &mut Vec<Fingerprint>) {
        let Some((index, at)) = self.gone.pop_front() else { return };
        let (entries, next) = index.piece(at, PLACES_AT_A_TIME);
        lost.extend(entries.filter(Entry::is_served).map(|entry| entry.block));
        match next {
            Some(at) => self.gone.push_front((index, at)),
            None => drop_aside(index),
        }
        if !self.gone.is_empty() {
            self.inbox.waker.wake();
        }
    }

    /// How often breakers of the disks have opened.
    pub fn breakers_opened(&self) -> u64 {
        self.disks().map(Disk::breaker_opened).sum()
    }

    /// The segments of one disk, by number; none of a disk that is not in use. Takes time by their number.
    pub fn segments(&self, place: usize) -> Vec<SegmentReport> {
        match self.parts.get(place).map(|part| &part.state) {
            Some(State::Open(disk)) => disk.segments(),
            _ => Vec::new(),
        }
    }

    /// The figures of each disk, in the order of the configuration. Takes the same time for large disks and small ones.
    pub fn report(&self) -> Vec<DiskReport> {
        let report = |part: &Part| match &part.state {
            State::Open(disk) => disk.report(),
            State::Missing(why) => DiskReport::missing(part.name.clone(), why.to_string(), hint_of(why)),
            State::Awaited => DiskReport::missing(part.name.clone(), "it is being opened".to_owned(), None),
        };
        self.parts.iter().map(report).collect()
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.refused.is_empty() && self.disks().all(Disk::is_idle)
    }

    /// Blocks until every accepted operation has completed and was flushed; false if that takes longer than
    /// `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll(completions);
            if self.is_idle() {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            let busy = self.disks_mut().find(|disk| disk.io.in_flight() > 0);
            busy.into_iter().for_each(|disk| disk.io.engine.wait(Duration::from_millis(10)));
        }
    }

    fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.parts.iter().filter_map(Part::disk)
    }

    fn disks_mut(&mut self) -> impl Iterator<Item = &mut Disk> {
        self.parts.iter_mut().filter_map(Part::disk_mut)
    }

    fn hear_all(&mut self) {
        while let Ok((place, news)) = self.news.try_recv() {
            self.hear(place, news);
        }
    }

    fn hear(&mut self, place: usize, news: News) {
        match news {
            News::EarlierIoDone => self.parts[place].is_earlier_io_done = true,
            News::Missing(why) => self.parts[place].state = State::Missing(why),
            News::Opened(disk) => self.add(place, *disk),
        }
    }

    fn add(&mut self, place: usize, OpenedDisk { mut disk }: OpenedDisk) {
        let is_it = |other: &Disk| !other.watch.is_taken && other.geometry.id == disk.geometry.id;
        if let Some(twin) = self.parts.iter().position(|part| part.disk().is_some_and(is_it)) {
            // What one of them writes, the other would overwrite. A copy of a disk has what the disk had then: what was
            // purged since would be back, whichever answers first.
            let is_behind = self.parts[twin].disk().is_some_and(|twin| twin.is_behind(&disk));
            let (used, unused) = if is_behind { (place, twin) } else { (twin, place) };
            let why = format!("it is a copy of `{}`, or another path to it", self.parts[used].name);
            let hint = "name a disk once, under one path; if it is a copy on a disk of its own, empty it (delete a \
                        file and `touch` it, zero a device with `blkdiscard -z`); then restart the daemon";
            tracing::error!(disk = self.parts[unused].name, error = why, hint, "a disk is not used");
            let why = Error::new(ErrorKind::Unavailable, why).hint(hint);
            let part = &mut self.parts[unused];
            if !is_behind {
                (part.is_earlier_io_done, part.state) = (true, State::Missing(why));
                return;
            }
            if let Some(twin) = part.disk_mut() {
                twin.lose(why);
            }
            self.found.retain(|(other, _)| *other != twin);
            self.inbox.waker.wake();
        }
        disk.start_at(self.now);
        let due: Vec<NamespaceId> = disk.purges.due_again().collect();
        if !due.is_empty() {
            let (disk, namespaces) = (&self.parts[place].name, due.len());
            tracing::info!(disk, namespaces, "namespaces are purged again: an earlier daemon did not end that");
        }
        self.void.extend(due);
        disk.io.engine.register(self.populated_bytes);
        self.found.push_back((place, 0));
        let part = &mut self.parts[place];
        (part.is_earlier_io_done, part.state) = (true, State::Open(Box::new(disk)));
        (part.sick_since, part.is_given_up, part.unread) = (None, false, BTreeSet::new());
        self.compare_purges();
    }

    /// A disk that another has taken leaves the tier.
    fn part_with_taken(&mut self, completions: &mut Vec<Completion>) {
        for part in &mut self.parts {
            let State::Open(disk) = &mut part.state else { continue };
            if disk.is_gone()
                && let Some(why) = disk.why_taken.take()
            {
                completions.append(&mut disk.completions);
                let none = Index::new(0, 1, disk.index.hasher().clone());
                self.gone.push_back((std::mem::replace(&mut disk.index, none), 0));
                drop_aside(std::mem::replace(&mut part.state, State::Missing(why)));
                self.inbox.waker.wake();
            }
        }
    }

    /// The disk for everything but a store: one that has the block, and can be read if there is one such. A removal
    /// also goes to a disk that serves the key no more and could find it after a restart, or is about to have it. If
    /// none knows the key, any disk says so. None if there is no disk.
    fn disk_of(&mut self, op: &Operation) -> Option<&mut Disk> {
        let key = &op.key;
        let is_removal = matches!(op.kind, OpKind::Remove);
        let is_well = |part: &Part| part.disk().is_some_and(|disk| disk.health() == Health::Healthy);
        let find = |is_it: &dyn Fn(&Part) -> bool| self.parts.iter().position(is_it);
        let knows = |disk: &Disk| disk.names(key) || disk.is_storing(key);
        let place = find(&|part| part.serves(key) && is_well(part))
            .or_else(|| find(&|part| part.has(key) && (is_removal || !part.is_given_up)))
            .or_else(|| find(&|part| is_removal && part.disk().is_some_and(knows)))
            .or_else(|| find(&is_well))
            .or_else(|| find(&|part| part.disk().is_some()))?;
        self.parts[place].disk_mut()
    }

    /// Gives a store to a disk that has the block already, or to one that the placement chooses. False if its queue is
    /// full. If all disks are sick, the store fails as the disk fails it.
    fn take_store(&mut self, op: &Operation) -> bool {
        let is_held = |part: &Part| part.serves(&op.key) && part.disk().is_some_and(Disk::is_usable);
        let holder = self.parts.iter().position(is_held);
        let has_choice = holder.is_none() && self.parts.len() > 1;
        let choice = has_choice.then(|| self.choose(op)).flatten();
        if holder.is_none()
            && choice.is_none_or(|choice| choice.begins_run())
            && let Some(place) = self.due_for_trial()
        {
            return self.try_out(place, op);
        }
        let any = || self.parts.iter().position(|part| part.disk().is_some_and(|disk| !disk.watch.is_taken));
        let place = holder.or(choice.map(|choice| choice.disk)).or_else(any);
        let Some(disk) = place.and_then(|place| self.parts[place].disk_mut()) else { return self.refuse(op) };
        let is_taken = disk.take(op);
        if is_taken && let Some(choice) = choice {
            self.placement.note(choice, op.lineage, op.length_bytes, &Targets(&self.parts));
        }
        is_taken
    }

    fn choose(&self, op: &Operation) -> Option<Choice> {
        self.placement.choose(op.lineage, op.length_bytes, &Targets(&self.parts))
    }

    fn due_for_trial(&self) -> Option<usize> {
        let is_due = |part: &Part| part.next_trial <= self.now && part.disk().is_some_and(Disk::awaits_trial);
        self.parts.iter().position(is_due)
    }

    fn try_out(&mut self, place: usize, op: &Operation) -> bool {
        let part = &mut self.parts[place];
        part.next_trial = self.now + RETRY_INTERVAL;
        let is_taken = part.disk_mut().is_some_and(|disk| disk.take(op));
        if is_taken {
            self.trials.insert(op.id, *op);
        }
        is_taken
    }

    /// Stores that a disk refused once more go to another, where there is one.
    fn end_trials(&mut self, completions: &mut Vec<Completion>) {
        if self.trials.is_empty() {
            return;
        }
        completions.retain(|Completion { id, outcome }| {
            let Some(op) = self.trials.remove(id) else { return true };
            let is_failed = matches!(outcome, Outcome::Failed(_));
            let Some(choice) = self.choose(&op).filter(|_| is_failed) else { return true };
            let disk = self.parts[choice.disk].disk_mut();
            let is_taken = disk.is_some_and(|disk| {
                let is_taken = disk.take(&op);
                disk.start();
                is_taken
            });
            if is_taken {
                self.placement.note(choice, op.lineage, op.length_bytes, &Targets(&self.parts));
            }
            !is_taken
        });
    }

    /// A turn is short. What is left for the next one waits for no transfer.
    fn wake_for_more(&self) {
        if self.disks().any(|disk| disk.has_more) {
            self.inbox.waker.wake();
        }
    }

    fn take(&mut self, op: &Operation) -> bool {
        if op.kind == OpKind::Store {
            return self.take_store(op);
        }
        if matches!(op.kind, OpKind::Remove) && !self.trials.is_empty() {
            // A second attempt at its store would come after its removal.
            self.trials.retain(|_, trial| trial.key != op.key);
        }
        match self.disk_of(op) {
            Some(disk) => disk.take(op),
            None => self.refuse(op),
        }
    }

    /// Ends an operation for which there is no disk.
    fn refuse(&mut self, op: &Operation) -> bool {
        let outcome = match op.kind {
            OpKind::Exists | OpKind::Remove => Outcome::Absent,
            OpKind::Load | OpKind::Store => Outcome::Failed(ErrorKind::Unavailable),
            OpKind::Touch { .. } => Outcome::Failed(ErrorKind::Unsupported),
        };
        self.refused.push(Completion { id: op.id, outcome });
        self.inbox.waker.wake();
        true
    }
}

impl Tier for Ssd {
    fn name(&self) -> &'static str {
        "ssd"
    }

    fn capabilities(&self) -> Capabilities {
        Ssd::CAPABILITIES
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.iter().take_while(|op| self.take(op)).count();
        self.disks_mut().for_each(Disk::start);
        self.wake_for_more();
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inbox.waker.clear();
        self.hear_all();
        completions.append(&mut self.refused);
        for disk in self.disks_mut() {
            disk.poll();
            completions.append(&mut disk.completions);
        }
        self.part_with_taken(completions);
        self.end_trials(completions);
        self.wake_for_more();
    }

    fn cancel(&mut self, id: OpId) {
        self.trials.remove(&id);
        self.disks_mut().any(|disk| disk.cancel(id));
    }

    /// Sick only when no disk can be read.
    fn health(&self) -> Health {
        let mut health = Health::Sick(ErrorKind::Unavailable);
        for disk in self.disks() {
            health = disk.health();
            if health == Health::Healthy {
                break;
            }
        }
        health
    }
}

impl Timed for Ssd {
    fn advance(&mut self, now: Duration) {
        self.tick(now);
    }
}

/// A block that can be loaded, as the index knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldBlock {
    /// The segment in which a load finds it, and the first page there; both change when the block is carried over.
    pub segment: u32,
    /// See `segment`.
    pub first_page: u32,
    /// Bytes of the block without padding.
    pub length_bytes: u64,
    /// Whether it was read since it was written.
    pub is_hot: bool,
}

impl HeldBlock {
    /// Where the payload starts on a disk of this geometry, in bytes.
    pub fn offset_bytes(&self, geometry: &Geometry) -> u64 {
        geometry.at(self.segment, self.first_page)
    }
}

/// A step of [`Ssd::walk`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Walked {
    /// Those of some blocks that are wanted; the walk goes on at once.
    Blocks(Vec<BlockInfo>),
    /// A disk reads a list, or something else has to end first. Then the tier wakes the owner.
    Waits,
    /// All blocks were looked at.
    End,
}

/// An index of millions, and an engine's threads, take milliseconds to go. Where the system starts no thread, they go
/// here: the closure is dropped.
fn drop_aside(what: impl Send + 'static) {
    let _ = std::thread::Builder::new().name("disk-drop".to_owned()).spawn(move || drop(what));
}
