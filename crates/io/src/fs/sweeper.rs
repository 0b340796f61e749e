//! The thread that keeps a shared directory within its limits, if this host holds the lease.
//!
//! Every host has a sweeper; the one with the lease sweeps. Its walks count what is there, and remove blocks that are
//! too old and unfinished files that nobody finishes. When the directory is nearly full, or stores found no room on its
//! volume, its hand finds blocks to evict (`hand`).
//! On every host the thread also looks whether the directory is still at its path. If not, it ends.
//! Invariants: a killed sweeper leaves nothing to repair. Two sweepers at a time remove what one would have removed,
//! or a little more.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::io::Errno;

use super::aside;
use super::config::FsConfig;
use super::directory::{Directory, Loss, clock};
use super::grants::Figures;
use super::hand::{Candidate, Hand, Step, evict};
use super::lease::{Lease, now};
use super::samples::Samples;
use super::walk::{Ages, Walk};

/// How often each host looks whether the directory is still there.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How often the sweeper reads the figures while they change.
const FIGURES_EVERY: Duration = Duration::from_secs(1);
/// The same while nothing changes. Meanwhile a hundred hosts that begin to store fill less than the twentieth of a
/// large directory that is left when room is made; a store that is refused wakes the sweeper of its own host at once.
const IDLE_FIGURES_EVERY: Duration = Duration::from_secs(8);
/// Pause between two folders of a walk that is not urgent, at least and by the time that the last folder took: a walk
/// takes a ninth of one client's time, however large the directory is.
const STEP_PAUSE: Duration = Duration::from_millis(5);
const STEP_PAUSES: u32 = 8;
/// Files removed before the figures are corrected and the lease is renewed.
const EVICTIONS_AT_ONCE: usize = 256;
/// Blocks are evicted for a volume that is full for this long: another program's temporary file costs none.
const FULL_FOR: Duration = Duration::from_secs(5);

/// Counts of this host's sweeping.
#[derive(Default)]
pub(super) struct Sweeps {
    pub is_sweeper: AtomicBool,
    pub walks: AtomicU64,
    pub evicted_blocks: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub expired_blocks: AtomicU64,
    pub orphans: AtomicU64,
    pub blocks: AtomicU64,
    pub skipped_folders: AtomicU64,
    /// Nothing is swept after this.
    pub loss: OnceLock<Loss>,
}

/// See the module documentation.
pub(super) struct SweeperHandle {
    shared: Arc<Shared>,
    pub sweeps: Arc<Sweeps>,
}

#[derive(Default)]
struct Shared {
    wishes: Mutex<Wishes>,
    changed: Condvar,
}

#[derive(Default)]
struct Wishes {
    is_closed: bool,
    is_urgent: bool,
    has_ended: bool,
}

impl SweeperHandle {
    /// Where nothing is written the thread only looks.
    pub fn start(directory: Arc<Directory>, config: &FsConfig) -> io::Result<SweeperHandle> {
        let sweeps = Arc::<Sweeps>::default();
        let shared = Arc::<Shared>::default();
        let sweeper = Sweeper::new(directory, config, sweeps.clone());
        let watched = shared.clone();
        aside::spawn("forebay-sweep", None, move || watched.run(sweeper))?;
        Ok(SweeperHandle { shared, sweeps })
    }

    /// Called when a store found the directory full.
    pub fn hurry(&self) {
        lock(&self.shared.wishes).is_urgent = true;
        self.shared.changed.notify_all();
    }

    /// Lets the thread end after its current step.
    pub fn close(&self) {
        lock(&self.shared.wishes).is_closed = true;
        self.shared.changed.notify_all();
    }

    /// Waits for the thread of a closed sweeper, unless its mount hangs.
    pub fn wait_for_end(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited =
            self.shared.changed.wait_timeout_while(lock(&self.shared.wishes), left, |wishes| !wishes.has_ended);
        drop(waited);
    }
}

impl Shared {
    fn run(&self, mut sweeper: Sweeper) {
        let mut is_urgent = Some(false);
        while let Some(pause) = is_urgent.and_then(|is_urgent| sweeper.turn(is_urgent)) {
            is_urgent = self.rest(pause);
        }
        sweeper.end();
        lock(&self.wishes).has_ended = true;
        self.changed.notify_all();
    }

    /// Whether somebody is in a hurry; none when the thread must end.
    fn rest(&self, pause: Duration) -> Option<bool> {
        let resting = |wishes: &mut Wishes| !wishes.is_closed && !wishes.is_urgent;
        let waited = self.changed.wait_timeout_while(lock(&self.wishes), pause, resting);
        let (mut wishes, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_urgent = mem::take(&mut wishes.is_urgent);
        (!wishes.is_closed).then_some(is_urgent)
    }
}

struct Sweeper {
    directory: Arc<Directory>,
    lease: Lease,
    lease_duration: Duration,
    interval: Duration,
    max_age: Option<Duration>,
    orphan_age: Duration,
    sweeps: Arc<Sweeps>,
    samples: Samples,
    walk: Option<Walk>,
    last_walk: Option<Instant>,
    hand: Hand,
    /// Sorted, the oldest last.
    candidates: Vec<Candidate>,
    /// The hand found nothing to evict since the last walk.
    is_bare: bool,
    /// Since when the volume has been full, and when that was seen last.
    full: Option<(Instant, Instant)>,
    /// Bytes still to be removed for that reason, and when that was decided.
    owed_bytes: u64,
    last_round: Option<Instant>,
    /// For the capacity.
    is_making_room: bool,
    next_look: Instant,
    next_step: Instant,
    /// What was read last, when to read again, at once if none, and how long to rest between.
    figures: Option<Figures>,
    next_figures: Option<Instant>,
    figures_pause: Duration,
    has_failed: bool,
    has_skipped: bool,
    has_been_beyond: bool,
}

impl Sweeper {
    fn new(directory: Arc<Directory>, config: &FsConfig, sweeps: Arc<Sweeps>) -> Sweeper {
        Sweeper {
            lease: Lease::new(&directory, config.lease),
            directory,
            lease_duration: config.lease,
            interval: config.sweep_interval,
            max_age: config.max_age,
            orphan_age: config.orphan_age,
            sweeps,
            samples: Samples::new(config.grant_age),
            walk: None,
            last_walk: None,
            hand: Hand::default(),
            candidates: Vec::new(),
            is_bare: false,
            full: None,
            owed_bytes: 0,
            last_round: None,
            is_making_room: false,
            next_look: Instant::now() + LOOK_EVERY,
            next_step: Instant::now(),
            figures: None,
            next_figures: None,
            figures_pause: FIGURES_EVERY,
            has_failed: false,
            has_skipped: false,
            has_been_beyond: false,
        }
    }

    /// Does what is due, a step of work at most; returns how long to rest, or none if the directory is lost.
    fn turn(&mut self, is_urgent: bool) -> Option<Duration> {
        if self.next_look <= Instant::now() {
            if let Some(loss) = self.directory.loss() {
                let _ = self.sweeps.loss.set(loss);
                return None;
            }
            self.next_look = Instant::now() + LOOK_EVERY;
        }
        if is_urgent {
            (self.next_step, self.next_figures) = (Instant::now(), None);
        }
        if !self.directory.is_read_only && self.next_step <= Instant::now() {
            self.next_step = Instant::now() + self.step();
        }
        let next = if self.directory.is_read_only { self.next_look } else { self.next_look.min(self.next_step) };
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Returns how long to rest.
    fn step(&mut self) -> Duration {
        let worked = self.work();
        self.sweeps.is_sweeper.store(self.lease.is_held(), Relaxed);
        match worked {
            Ok(pause) => {
                self.has_failed = false;
                pause
            }
            Err(Errno::NOENT) if self.directory.restore_usage() => {
                tracing::warn!(
                    path = %self.directory.path.display(),
                    hint = "leave the files in `.forebay` where they are",
                    "the shared directory's usage file was gone: what is there is counted anew"
                );
                Duration::ZERO
            }
            Err(error) => {
                if !mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(
                        path = %self.directory.path.display(),
                        %error,
                        hint = "look at the directory's mount, and at `.forebay` in it: all in there are plain files",
                        "cannot sweep the shared directory"
                    );
                }
                self.walk = None;
                FIGURES_EVERY
            }
        }
    }

    fn work(&mut self) -> Result<Duration, Errno> {
        self.directory.grants.settle(clock(), false)?;
        if self.directory.grants.last_used_bytes().is_none() {
            // Whoever holds the lease, and however long the first walk takes: people ask this host how full it is.
            self.directory.grants.figures()?;
        }
        let held = match self.lease.hold(&self.directory) {
            // A full volume has no room for a lease. Until it has, several hosts may make room.
            Err(Errno::NOSPC | Errno::DQUOT) => now(&self.directory).map(Some),
            held => held,
        };
        let Some(now) = held? else {
            self.walk = None;
            self.directory.grants.take_refusal();
            return Ok(self.lease_duration / 4);
        };
        self.read_figures()?;
        let figures = self.figures;
        let excess_bytes = figures.map_or(Ok(0), |figures| self.excess(&figures))?;
        if excess_bytes > 0 && !self.candidates.is_empty() {
            return self.make_room(excess_bytes);
        }
        if excess_bytes > 0 && !self.is_bare {
            return self.look_for_candidates(now).map(|()| Duration::ZERO);
        }
        // Figures that were damaged or repaired meanwhile do not continue those from the start of the walk.
        self.walk.take_if(|walk| walk.begun.is_some() != figures.is_some());
        // Without a basis a walk can find files to remove, but its count would not be valid.
        let is_due = self.last_walk.is_none_or(|last| last.elapsed() >= self.interval) || figures.is_none();
        if self.walk.is_none() && (is_due && self.samples.basis().is_some() || excess_bytes > 0) {
            self.walk = Some(Walk::new(self.samples.basis(), figures));
        }
        let is_hurried = excess_bytes > 0 || figures.is_none();
        match self.walk.is_some() {
            true => self.walk_on(now, is_hurried),
            false => Ok((self.lease_duration / 4).min(self.figures_pause).min(self.interval)),
        }
    }

    /// If it is time.
    fn read_figures(&mut self) -> Result<(), Errno> {
        if self.next_figures.is_some_and(|next| next > Instant::now()) {
            return Ok(());
        }
        let figures = self.directory.grants.figures()?;
        self.samples.saw(figures.as_ref(), clock());
        self.warn_of_other_capacity(figures);
        let is_idle = mem::replace(&mut self.figures, figures) == figures;
        self.figures_pause = if is_idle { self.figures_pause * 2 } else { FIGURES_EVERY }.min(IDLE_FIGURES_EVERY);
        self.next_figures = Some(Instant::now() + self.figures_pause.min(self.interval));
        Ok(())
    }

    /// No host is granted more than its own capacity leaves. So what is beyond this one's is of hosts with a larger
    /// one, or was put there by hand.
    fn warn_of_other_capacity(&mut self, figures: Option<Figures>) {
        let Some((figures, capacity_bytes)) = figures.zip(self.directory.grants.capacity_bytes()) else { return };
        if figures.used_bytes > capacity_bytes && !mem::replace(&mut self.has_been_beyond, true) {
            tracing::warn!(
                path = %self.directory.path.display(),
                used_bytes = figures.used_bytes,
                capacity_bytes,
                hint = "set the same `tier.fs.capacity_bytes` on all hosts",
                "the shared directory holds more than this host's capacity, and this host makes room"
            );
        }
    }

    /// Bytes to remove: for the capacity, or because the volume is full before the directory is.
    fn excess(&mut self, figures: &Figures) -> Result<u64, Errno> {
        // If removing frees nothing, because of snapshots or another user's quota, that must not soon cost all blocks.
        let is_due = self.last_round.is_none_or(|last| last.elapsed() >= self.lease_duration);
        if self.stays_full(figures)? && is_due {
            self.last_round = Some(Instant::now());
            // The bound counts grants too, and may exceed a small volume.
            let used_bytes = figures.used_bytes.min(self.directory.volume_used_bytes()?);
            self.owed_bytes = figures.wanted_bytes.max(used_bytes / 10).max(1);
        }
        let excess_bytes = excess(figures, self.directory.grants.capacity_bytes(), self.is_making_room);
        self.is_making_room = excess_bytes > 0;
        Ok(excess_bytes.max(self.owed_bytes))
    }

    fn stays_full(&mut self, figures: &Figures) -> Result<bool, Errno> {
        if !self.is_volume_full(figures)? {
            return Ok(false);
        }
        let now = Instant::now();
        let last_time = self.full.filter(|(_, seen)| now - *seen < self.lease_duration);
        let since = last_time.map_or(now, |(since, _)| since);
        self.full = Some((since, now));
        Ok(now - since >= FULL_FOR)
    }

    /// Whether a store found no room on the volume: one of this host, or one of another host that said so.
    fn is_volume_full(&self, figures: &Figures) -> Result<bool, Errno> {
        let is_refused = self.directory.grants.take_refusal();
        Ok(is_refused || figures.wanted_bytes > 0 && self.directory.free_bytes()? < figures.wanted_bytes)
    }

    /// Goes on with the hand, until the lease may have to be renewed.
    fn look_for_candidates(&mut self, now: Duration) -> Result<(), Errno> {
        let begun = Instant::now();
        while begun.elapsed() <= self.lease_duration / 8 {
            if let Step::Candidates(candidates) = self.hand.step(&self.directory, now)? {
                // The walk corrects figures that say otherwise.
                self.is_bare = candidates.is_empty();
                self.candidates = candidates;
                self.next_figures = None;
                break;
            }
        }
        if self.is_bare {
            self.owed_bytes = 0;
        }
        Ok(())
    }

    /// Returns how long to rest.
    fn make_room(&mut self, excess_bytes: u64) -> Result<Duration, Errno> {
        let count = self.directory.grants.count();
        let (root, mut freed_bytes, mut evicted) = (self.directory.enter()?, 0, 0);
        for _ in 0..EVICTIONS_AT_ONCE {
            if freed_bytes >= excess_bytes {
                break;
            }
            let Some(candidate) = self.candidates.pop() else { break };
            if evict(&root, &candidate, self.directory.is_sharded) {
                freed_bytes += candidate.bytes;
                evicted += 1;
            }
        }
        self.owed_bytes = self.owed_bytes.saturating_sub(freed_bytes);
        self.sweeps.evicted_blocks.fetch_add(evicted, Relaxed);
        self.sweeps.evicted_bytes.fetch_add(freed_bytes, Relaxed);
        self.directory.grants.removed(freed_bytes, count);
        self.next_figures = None;
        self.directory.grants.settle(clock(), false)?;
        // Where this user may not remove files, more candidates would not help.
        let is_in_vain = evicted == 0 && self.candidates.is_empty();
        Ok(if is_in_vain { FIGURES_EVERY.min(self.interval) } else { Duration::ZERO })
    }

    fn walk_on(&mut self, now: Duration, is_hurried: bool) -> Result<Duration, Errno> {
        let Some(walk) = &mut self.walk else { return Ok(Duration::ZERO) };
        let ages = Ages { now, max_age: self.max_age, orphan_age: self.orphan_age };
        let (begun, count) = (Instant::now(), self.directory.grants.count());
        while let Some(swept) = walk.step(&self.directory, ages)? {
            self.sweeps.expired_blocks.fetch_add(swept.expired_blocks, Relaxed);
            self.sweeps.orphans.fetch_add(swept.orphans, Relaxed);
            self.directory.grants.removed(swept.expired_bytes, count);
            // The lease is renewed between steps.
            if !is_hurried || begun.elapsed() > self.lease_duration / 8 {
                return Ok(if is_hurried { Duration::ZERO } else { STEP_PAUSE.max(begun.elapsed() * STEP_PAUSES) });
            }
        }
        self.walked()
    }

    fn walked(&mut self) -> Result<Duration, Errno> {
        let Some(walk) = self.walk.take() else { return Ok(Duration::ZERO) };
        self.tell_skipped(&walk);
        if let Some(granted_bytes) = walk.basis {
            // The bound stays right without the bytes of folders that cannot be read; a sum without them would not be.
            // But nothing is granted before there is a bound.
            if walk.skipped.is_none() || walk.begun.is_none() {
                self.directory.grants.counted(walk.found_bytes, granted_bytes, walk.begun)?;
            }
            self.last_walk = Some(Instant::now());
        }
        tracing::debug!(path = %self.directory.path.display(), blocks = walk.found_blocks, bytes = walk.found_bytes,
            "swept the shared directory");
        self.sweeps.walks.fetch_add(1, Relaxed);
        self.sweeps.blocks.store(walk.found_blocks, Relaxed);
        self.next_figures = None;
        // If nothing in a full directory may be removed, walking without a pause would not help.
        let pause = if self.is_bare { FIGURES_EVERY.min(self.interval) } else { Duration::ZERO };
        self.is_bare = false;
        Ok(pause)
    }

    /// Counts folders that cannot be read, and warns of the first one since all could be read.
    fn tell_skipped(&mut self, walk: &Walk) {
        self.sweeps.skipped_folders.fetch_add(walk.skipped_folders, Relaxed);
        let had_skipped = mem::replace(&mut self.has_skipped, walk.skipped.is_some());
        if let Some((folder, error)) = walk.skipped.as_ref().filter(|_| !had_skipped) {
            let (path, folders) = (self.directory.path.join(folder), walk.skipped_folders);
            tracing::warn!(path = %path.display(), %error, folders, "the sweeper cannot read a folder, and skips it");
        }
    }

    fn end(&mut self) {
        if self.directory.is_read_only || self.sweeps.loss.get().is_some() {
            self.sweeps.is_sweeper.store(false, Relaxed);
            return;
        }
        self.lease.give_back(&self.directory);
        self.sweeps.is_sweeper.store(false, Relaxed);
        // If this fails, the next walk still counts correctly.
        let _ = self.directory.grants.settle(clock(), true);
    }
}

/// Bytes to remove: above 19/20 of the capacity, or after a refused store, down to 9/10, also where that has begun.
fn excess(figures: &Figures, capacity_bytes: Option<u64>, has_begun: bool) -> u64 {
    let Some(capacity) = capacity_bytes else { return 0 };
    let is_nearly_full = figures.used_bytes > capacity - capacity / 20;
    let is_refusing = figures.wanted_bytes > 0 && figures.used_bytes + figures.wanted_bytes > capacity;
    if !is_nearly_full && !is_refusing && !has_begun {
        return 0;
    }
    let low_bytes = (capacity - capacity / 10).min(capacity.saturating_sub(figures.wanted_bytes));
    figures.used_bytes.saturating_sub(low_bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_when_a_directory_is_nearly_full_or_refuses() {
        let figures = |used_bytes, wanted_bytes| Figures { used_bytes, wanted_bytes, ..Figures::default() };
        let excess =
            |used_bytes, wanted_bytes, capacity| super::excess(&figures(used_bytes, wanted_bytes), capacity, false);
        assert_eq!(super::excess(&figures(949, 0), Some(1000), true), 49, "it goes on, once it has begun");
        assert_eq!(super::excess(&figures(900, 0), Some(1000), true), 0);
        assert_eq!(excess(1 << 60, 0, None), 0, "no limit");
        assert_eq!(excess(950, 0, Some(1000)), 0);
        assert_eq!(excess(951, 0, Some(1000)), 51);
        assert_eq!(excess(800, 150, Some(1000)), 0, "there is room meanwhile");
        assert_eq!(excess(900, 150, Some(1000)), 50);
        assert_eq!(excess(900, 400, Some(1000)), 300);
        assert_eq!(excess(2000, 0, Some(1000)), 1100);
    }
}
