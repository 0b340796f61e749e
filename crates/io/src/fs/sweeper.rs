//! The thread that keeps a shared directory within its limits, if this host holds the lease.
//!
//! Every host has a sweeper; the one with the lease sweeps. It walks, counts, and removes blocks that are too old,
//! unfinished files that nobody finishes, and the least recently used blocks when the directory is nearly full, or when
//! stores found no room on its volume.
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
use super::lease::{Lease, now};
use super::samples::Samples;
use super::walk::{Ages, Candidate, Walk, evict};

/// How often the figures are read between walks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause between two folders of a walk that is not urgent: 4,096 folders take about 20 s and little of the server.
const STEP_PAUSE: Duration = Duration::from_millis(5);
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
        while sweeper.turn().is_some_and(|pause| self.rest(pause)) {}
        sweeper.end();
        lock(&self.wishes).has_ended = true;
        self.changed.notify_all();
    }

    /// False when the thread must end.
    fn rest(&self, pause: Duration) -> bool {
        let resting = |wishes: &mut Wishes| !wishes.is_closed && !wishes.is_urgent;
        let waited = self.changed.wait_timeout_while(lock(&self.wishes), pause, resting);
        let (mut wishes, _) = waited.unwrap_or_else(PoisonError::into_inner);
        wishes.is_urgent = false;
        !wishes.is_closed
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
    /// Sorted, the oldest last.
    candidates: Vec<Candidate>,
    /// Since when the volume has been full, and when that was seen last.
    full: Option<(Instant, Instant)>,
    /// Bytes still to be removed for that reason, and when that was decided.
    owed_bytes: u64,
    last_round: Option<Instant>,
    last_look: Instant,
    /// By the last walk.
    found_bytes: u64,
    has_failed: bool,
    has_skipped: bool,
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
            candidates: Vec::new(),
            full: None,
            owed_bytes: 0,
            last_round: None,
            last_look: Instant::now(),
            found_bytes: 0,
            has_failed: false,
            has_skipped: false,
        }
    }

    /// Does one step of work; returns how long to rest, or none if the directory is lost.
    fn turn(&mut self) -> Option<Duration> {
        if self.last_look.elapsed() >= LOOK_EVERY {
            if let Some(loss) = self.directory.loss() {
                let _ = self.sweeps.loss.set(loss);
                return None;
            }
            self.last_look = Instant::now();
        }
        if self.directory.is_read_only {
            return Some(LOOK_EVERY);
        }
        Some(self.step())
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
            Err(error) => {
                if !mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(path = %self.directory.path.display(), %error, "cannot sweep the shared directory");
                }
                self.walk = None;
                LOOK_EVERY
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
            return Ok((self.lease_duration / 4).min(LOOK_EVERY));
        };
        let figures = self.directory.grants.figures()?;
        self.samples.saw(figures.as_ref(), clock());
        let excess_bytes = figures.map_or(Ok(0), |figures| self.excess(&figures))?;
        if excess_bytes > 0 && !self.candidates.is_empty() {
            // After this the walk's count so far would be wrong.
            self.walk = None;
            return self.make_room(excess_bytes).map(|()| Duration::ZERO);
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
            false => Ok((self.lease_duration / 4).min(LOOK_EVERY).min(self.interval)),
        }
    }

    /// Bytes to remove: for the capacity, or because the volume is full before the directory is.
    fn excess(&mut self, figures: &Figures) -> Result<u64, Errno> {
        // If removing frees nothing, because of snapshots or another user's quota, that must not soon cost all blocks.
        let is_due = self.last_round.is_none_or(|last| last.elapsed() >= self.lease_duration);
        if self.stays_full(figures)? && is_due {
            self.last_round = Some(Instant::now());
            // The bound counts grants too, and may exceed a small volume. Before the first walk this only begins one.
            self.owed_bytes = figures.wanted_bytes.max(self.found_bytes / 10).max(1);
        }
        Ok(excess(figures, self.directory.grants.capacity_bytes()).max(self.owed_bytes))
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

    fn make_room(&mut self, excess_bytes: u64) -> Result<(), Errno> {
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
        self.directory.grants.settle(clock(), false)
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
                return Ok(if is_hurried { Duration::ZERO } else { STEP_PAUSE });
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
        let had_found_bytes = mem::replace(&mut self.found_bytes, walk.found_bytes);
        if self.owed_bytes > 0 && had_found_bytes == 0 {
            self.owed_bytes = self.owed_bytes.max(self.found_bytes / 10);
        }
        self.candidates = walk.into_candidates();
        if self.candidates.is_empty() {
            self.owed_bytes = 0;
        }
        // If nothing in a full directory may be removed, walking without a pause would not help.
        Ok(if self.candidates.is_empty() { LOOK_EVERY.min(self.interval) } else { Duration::ZERO })
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

/// Bytes to remove: above 19/20 of the capacity, or after a refused store, down to 9/10.
fn excess(figures: &Figures, capacity_bytes: Option<u64>) -> u64 {
    let Some(capacity) = capacity_bytes else { return 0 };
    let is_nearly_full = figures.used_bytes > capacity - capacity / 20;
    let is_refusing = figures.wanted_bytes > 0 && figures.used_bytes + figures.wanted_bytes > capacity;
    if !is_nearly_full && !is_refusing {
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
        let excess = |used_bytes, wanted_bytes, capacity| {
            super::excess(&Figures { used_bytes, wanted_bytes, ..Figures::default() }, capacity)
        };
        assert_eq!(excess(1 << 60, 0, None), 0, "no limit");
        assert_eq!(excess(950, 0, Some(1000)), 0);
        assert_eq!(excess(951, 0, Some(1000)), 51);
        assert_eq!(excess(800, 150, Some(1000)), 0, "there is room meanwhile");
        assert_eq!(excess(900, 150, Some(1000)), 50);
        assert_eq!(excess(900, 400, Some(1000)), 300);
        assert_eq!(excess(2000, 0, Some(1000)), 1100);
    }
}
