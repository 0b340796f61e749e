//! How much a shared directory holds, counted by hosts that share nothing but the directory.
//!
//! One small file has an upper bound of the bytes in the directory, and how many bytes were ever granted and
//! subtracted. A host takes a grant of some blocks under the file's lock, writes blocks out of it, and asks again
//! when it is spent. Whoever removes blocks subtracts their bytes. The sweeper corrects the bound after a walk.
//!
//! Invariant: published bytes plus granted bytes that may still be spent never exceed the bound, and the bound never
//! exceeds the capacity. Three rules keep counts from breaking it:
//! - A grant lapses. A count starts from a sample of the figures that was older than any grant that could still be
//!   spent when its walk began (`samples`), so whatever the walk could not see was granted after the sample.
//! - A count lowers the bound to no less than what its walk found plus what was granted since its sample. It raises
//!   the bound to no more than what its walk found and nobody subtracted since.
//! - Removed bytes are subtracted from the bound only if no count has lowered it since: that count may have been
//!   right already. The next count corrects what was not subtracted for this reason.
//!
//! The remaining error is a store that hangs between its grant and its name for longer than a grant lives: bytes in
//! flight. An unreadable figure grants nothing until the directory was counted again.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::directory::errno;
use super::folder::Folder;
use super::layout::{self, OWN_FOLDER, USAGE};

const MAGIC: &[u8; 8] = b"FBUSAGE2";
const FILE_BYTES: usize = 56;
const SEAL_AT: usize = FILE_BYTES - 8;
/// A grant is this part of the capacity, and no more than [`MAX_GRANT_BYTES`]: one round trip serves many blocks,
/// while the unspent grants of all hosts together stay small.
const GRANT_PART: u64 = 256;
const MAX_GRANT_BYTES: u64 = 64 << 20;
/// A host that stands still with the lock in its hand keeps it: the others fail their stores, but no thread of theirs
/// stands still with it. Far above a change, which is four round trips to a server.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// The first and the longest pause between two attempts to lock.
const LOCK_PAUSES: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));

/// What the file records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Figures {
    pub used_bytes: u64,
    /// Total by all hosts; wraps.
    pub granted_bytes: u64,
    /// Total of removed files; wraps.
    pub removed_bytes: u64,
    /// The largest refused grant or store, less the bytes that were returned or removed since.
    pub wanted_bytes: u64,
    /// A random number, drawn again by each count that lowers the bound.
    pub count: Count,
}

/// Shows whether a count lowered the bound meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Count(u64);

/// Bytes that may be published until they are given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spent {
    bytes: u64,
    count: Count,
}

/// Bytes granted to this host, neither spent nor given back.
#[derive(Clone, Copy)]
struct Grant {
    bytes: u64,
    /// A time before the request for the grant.
    since: Duration,
    count: Count,
}

/// Bytes to subtract from the bound, if no count has lowered it since.
#[derive(Clone, Copy, Default)]
struct Returns {
    unspent_bytes: u64,
    removed_bytes: u64,
    count: Count,
}

#[derive(Default)]
struct Own {
    grant: Option<Grant>,
    returns: Returns,
    /// The value read from the file last.
    count: Count,
    /// Whether the volume had no room for granted bytes since that was last asked.
    is_refused: bool,
}

/// What one change tells the next one in this process.
#[derive(Default)]
struct Turn {
    /// When this host last waited for the file's lock in vain.
    waited: Option<Instant>,
}

/// See the module documentation. Times are those of one clock that continues while a host sleeps.
pub(super) struct Grants {
    directory: PathBuf,
    capacity_bytes: Option<u64>,
    grant_age: Duration,
    own: Mutex<Own>,
    /// One change at a time in this process; the file's lock is between processes.
    changing: Mutex<Turn>,
    last_used_bytes: Mutex<Option<u64>>,
}

impl Grants {
    pub fn new(directory: PathBuf, capacity_bytes: Option<u64>, grant_age: Duration) -> Grants {
        let (own, changing, last_used_bytes) = Default::default();
        Grants { directory, capacity_bytes, grant_age, own, changing, last_used_bytes }
    }

    /// The file of a directory that holds nothing.
    pub fn empty() -> [u8; FILE_BYTES] {
        Figures::default().write()
    }

    /// The bound as this host last saw it, none before; does no I/O.
    pub fn last_used_bytes(&self) -> Option<u64> {
        *lock(&self.last_used_bytes)
    }

    pub fn capacity_bytes(&self) -> Option<u64> {
        self.capacity_bytes
    }

    /// Must be called before a file is removed.
    pub fn count(&self) -> Count {
        lock(&self.own).count
    }

    /// Takes `bytes` out of the grant, and asks for another grant if needed; none if the directory is full.
    pub fn spend(&self, bytes: u64, now: Duration) -> Result<Option<Spent>, Errno> {
        if let Some(spent) = self.take(bytes, now) {
            return Ok(Some(spent));
        }
        let mut turn = lock(&self.changing);
        // Another thread may have asked for a grant meanwhile.
        if let Some(spent) = self.take(bytes, now) {
            return Ok(Some(spent));
        }
        // The rest of the grant is too small. Returning it leaves its bytes for the next grant.
        lock(&self.own).give_back_grant();
        let (granted_bytes, count) = self.locked(&mut turn, |figures| {
            let granted_bytes = figures.as_mut().map_or(0, |figures| self.grant(figures, bytes));
            (granted_bytes, figures.unwrap_or_default().count)
        })?;
        if granted_bytes == 0 {
            return Ok(None);
        }
        lock(&self.own).grant = Some(Grant { bytes: granted_bytes - bytes, since: now, count });
        Ok(Some(Spent { bytes, count }))
    }

    /// Gives back bytes that were spent but not published.
    pub fn refund(&self, spent: Spent) {
        lock(&self.own).give_back(spent.bytes, 0, spent.count);
    }

    /// Records that the volume had no room for granted bytes, so that the sweeper makes room, whichever host's it is.
    pub fn refused(&self, bytes: u64) -> Result<(), Errno> {
        let mut turn = lock(&self.changing);
        let mut own = lock(&self.own);
        own.is_refused = true;
        // What is returned later would look like room.
        own.give_back_grant();
        drop(own);
        self.locked(&mut turn, |figures| {
            if let Some(figures) = figures {
                figures.wanted_bytes = figures.wanted_bytes.max(bytes);
            }
        })
    }

    /// Whether the volume had no room for a store of this host since this was last asked.
    pub fn take_refusal(&self) -> bool {
        std::mem::take(&mut lock(&self.own).is_refused)
    }

    /// Records that a file was removed; `count` was read before the removal.
    pub fn removed(&self, bytes: u64, count: Count) {
        lock(&self.own).give_back(0, bytes, count);
    }

    /// Writes returned bytes to the file. Also gives back what this host will not spend soon, or all of it.
    pub fn settle(&self, now: Duration, is_all: bool) -> Result<(), Errno> {
        let mut turn = lock(&self.changing);
        let mut own = lock(&self.own);
        if is_all || own.grant.is_some_and(|grant| now.saturating_sub(grant.since) > self.grant_age / 2) {
            own.give_back_grant();
        }
        let has_returns = own.returns.unspent_bytes + own.returns.removed_bytes > 0;
        drop(own);
        if has_returns { self.locked(&mut turn, |_| ()) } else { Ok(()) }
    }

    /// What the file records now; none if it cannot be read.
    pub fn figures(&self) -> Result<Option<Figures>, Errno> {
        self.locked(&mut lock(&self.changing), |figures| *figures)
    }

    /// Corrects the bound after a walk. The file said `begun` when the walk began, and `granted_bytes` had been
    /// granted at least a grant's age before. Both are none if the file could not be read then.
    pub fn counted(&self, found_bytes: u64, granted_bytes: Option<u64>, begun: Option<Figures>) -> Result<(), Errno> {
        self.locked(&mut lock(&self.changing), |figures| match (figures, granted_bytes, begun) {
            (Some(figures), Some(granted_bytes), Some(begun)) => {
                let most = found_bytes.saturating_add(figures.granted_bytes.wrapping_sub(granted_bytes));
                let least = found_bytes.saturating_sub(figures.removed_bytes.wrapping_sub(begun.removed_bytes));
                if most < figures.used_bytes {
                    figures.count = Count(layout::random());
                }
                figures.used_bytes = figures.used_bytes.clamp(least, most);
            }
            (figures @ None, None, None) => {
                // Random, so that no figure from before the damage matches.
                let (count, granted_bytes) = (Count(layout::random()), layout::random());
                *figures = Some(Figures { used_bytes: found_bytes, granted_bytes, count, ..Figures::default() });
            }
            // The file was damaged or repaired meanwhile.
            _ => {}
        })
    }

    /// Takes the bytes out of a grant that has not lapsed.
    fn take(&self, bytes: u64, now: Duration) -> Option<Spent> {
        let mut own = lock(&self.own);
        if own.grant.is_some_and(|grant| now.saturating_sub(grant.since) >= self.grant_age) {
            own.give_back_grant();
        }
        let grant = own.grant.as_mut().filter(|grant| grant.bytes >= bytes)?;
        grant.bytes -= bytes;
        Some(Spent { bytes, count: grant.count })
    }

    /// A normal grant if it holds at least `bytes`, otherwise that many; 0 if there is no space for them.
    fn grant(&self, figures: &mut Figures, bytes: u64) -> u64 {
        let capacity_bytes = self.capacity_bytes.unwrap_or(u64::MAX);
        let usual_bytes = self.capacity_bytes.map_or(MAX_GRANT_BYTES, |all| (all / GRANT_PART).min(MAX_GRANT_BYTES));
        let room_bytes = capacity_bytes.saturating_sub(figures.used_bytes);
        let grant_bytes = usual_bytes.max(bytes).min(room_bytes);
        if grant_bytes < bytes {
            // Nothing is evicted for a block that can never fit.
            figures.wanted_bytes = figures.wanted_bytes.max(if bytes > capacity_bytes { 0 } else { bytes });
            return 0;
        }
        figures.used_bytes += grant_bytes;
        figures.granted_bytes = figures.granted_bytes.wrapping_add(grant_bytes);
        grant_bytes
    }

    /// Subtracts returned bytes, then makes the change. `TIMEDOUT` if another host keeps the lock.
    fn locked<T>(&self, turn: &mut Turn, change: impl FnOnce(&mut Option<Figures>) -> T) -> Result<T, Errno> {
        let file = Folder::enter(&self.directory)?.folder(OWN_FOLDER)?.open(USAGE, OFlags::RDWR)?;
        // The lock ends with the file, at the end of this function or of this process. Over NFS it is a lock of the
        // server, and taking it refreshes the client's copy of the file.
        turn.lock(&file)?;
        let mut bytes = [0; FILE_BYTES];
        let before = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Figures::read(&bytes),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(errno(error)),
        };
        let returns = std::mem::take(&mut lock(&self.own).returns);
        let mut after = before;
        if let Some(figures) = &mut after {
            figures.take_off(returns);
        }
        let result = change(&mut after);
        let Some(figures) = after else { return Ok(result) };
        // If the write fails, the returned bytes are lost until the next count, and nothing is granted.
        if after != before {
            file.write_all_at(&figures.write(), 0).map_err(errno)?;
        }
        *lock(&self.last_used_bytes) = Some(figures.used_bytes);
        lock(&self.own).count = figures.count;
        Ok(result)
    }
}

impl Turn {
    /// Locks the file within [`LOCK_WAIT`]. After a wait in vain only one change in that time waits again.
    fn lock(&mut self, file: &File) -> Result<(), Errno> {
        let begun = Instant::now();
        let is_patient = self.waited.is_none_or(|waited| waited.elapsed() >= LOCK_WAIT);
        let (mut pause, longest) = LOCK_PAUSES;
        loop {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK | Errno::INTR) if is_patient && begun.elapsed() < LOCK_WAIT => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(longest);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    if is_patient {
                        self.waited = Some(Instant::now());
                    }
                    return Err(Errno::TIMEDOUT);
                }
                locked => {
                    self.waited = None;
                    return locked;
                }
            }
        }
    }
}

impl Own {
    fn give_back_grant(&mut self) {
        if let Some(Grant { bytes, count, .. }) = self.grant.take() {
            self.give_back(bytes, 0, count);
        }
    }

    /// Bytes of any count but the last known one are too late.
    fn give_back(&mut self, unspent_bytes: u64, removed_bytes: u64, count: Count) {
        if self.returns.count != self.count {
            self.returns = Returns { count: self.count, ..Returns::default() };
        }
        if count == self.count {
            self.returns.unspent_bytes += unspent_bytes;
            self.returns.removed_bytes += removed_bytes;
        }
    }
}

impl Figures {
    fn take_off(&mut self, Returns { unspent_bytes, removed_bytes, count }: Returns) {
        if count == self.count {
            let bytes = unspent_bytes + removed_bytes;
            self.used_bytes = self.used_bytes.saturating_sub(bytes);
            self.wanted_bytes = self.wanted_bytes.saturating_sub(bytes);
            self.removed_bytes = self.removed_bytes.wrapping_add(removed_bytes);
        }
    }

    fn write(self) -> [u8; FILE_BYTES] {
        let mut bytes = [0; FILE_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        let fields = [self.used_bytes, self.granted_bytes, self.wanted_bytes, self.removed_bytes, self.count.0];
        for (at, field) in (8..).step_by(8).zip(fields) {
            bytes[at..at + 8].copy_from_slice(&field.to_le_bytes());
        }
        let seal = checksum(&bytes[..SEAL_AT]);
        bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8; FILE_BYTES]) -> Option<Figures> {
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let is_whole = &bytes[..8] == MAGIC && field(SEAL_AT) == checksum(&bytes[..SEAL_AT]);
        is_whole.then(|| Figures {
            used_bytes: field(8),
            granted_bytes: field(16),
            wanted_bytes: field(24),
            removed_bytes: field(32),
            count: Count(field(40)),
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 1 << 20;
    const AGE: Duration = Duration::from_secs(5);
    const NOW: Duration = Duration::from_secs(1000);

    fn hosts<const N: usize>() -> (tempfile::TempDir, [Grants; N]) {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(OWN_FOLDER)).unwrap();
        std::fs::write(home.path().join(OWN_FOLDER).join(USAGE), Grants::empty()).unwrap();
        let grants = std::array::from_fn(|_| Grants::new(home.path().to_owned(), Some(CAPACITY), AGE));
        (home, grants)
    }

    fn spends(grants: &Grants, bytes: u64, now: Duration) -> bool {
        grants.spend(bytes, now).unwrap().is_some()
    }

    fn spend_all(grants: &Grants, bytes: u64, now: Duration) -> u64 {
        std::iter::from_fn(|| spends(grants, bytes, now).then_some(bytes)).sum()
    }

    fn used(grants: &Grants) -> u64 {
        grants.figures().unwrap().unwrap().used_bytes
    }

    #[test]
    fn two_hosts_together_spend_the_capacity_and_no_more() {
        let (_home, [a, b]) = hosts();
        let mut spent = 0;
        for round in 0..5 {
            spent += u64::from(spends(if round % 2 == 0 { &a } else { &b }, 100_000, NOW)) * 100_000;
        }
        for bytes in [8192, 1] {
            spent += spend_all(&a, bytes, NOW) + spend_all(&b, bytes, NOW);
        }
        assert_eq!(spent, CAPACITY, "to the last byte");
        a.removed(5000, a.count());
        a.settle(NOW, false).unwrap();
        assert_eq!((spend_all(&b, 1000, NOW), spend_all(&a, 1000, NOW)), (5000, 0));
    }

    #[test]
    fn what_is_not_spent_goes_back_when_a_host_leaves_or_lingers() {
        let (_home, [a, b]) = hosts();
        for is_leaving in [true, false] {
            let spent = a.spend(10, NOW).unwrap().unwrap();
            assert!(used(&a) > 10);
            a.settle(NOW + if is_leaving { Duration::ZERO } else { AGE / 2 + AGE / 10 }, is_leaving).unwrap();
            assert_eq!(used(&b), 10);
            a.refund(spent);
            a.settle(NOW, false).unwrap();
            assert_eq!(used(&b), 0);
        }
    }

    #[test]
    fn a_damaged_figure_grants_nothing_until_it_was_counted() {
        let (home, [a, b]) = hosts();
        for damage in [&b""[..], b"FBUSAGE1", &[0xff; FILE_BYTES]] {
            std::fs::write(home.path().join(OWN_FOLDER).join(USAGE), damage).unwrap();
            a.settle(NOW, true).unwrap();
            assert!(!spends(&a, 1, NOW));
            assert_eq!(a.figures().unwrap(), None);
            b.counted(3, Some(5), None).unwrap();
            assert_eq!(a.figures().unwrap(), None, "a walk from before the damage counts for nothing");
            b.counted(CAPACITY - 7, None, None).unwrap();
            assert_eq!(spend_all(&a, 1, NOW), 7);
        }
    }

    #[test]
    fn what_was_granted_before_a_walk_and_not_spent_is_not_spent_after_it() {
        let (_home, [a, b]) = hosts();
        assert!(spends(&a, 1000, NOW), "it is granted more than that");
        // The walk does not see the rest of the grant: bytes published after the walk are not found.
        let basis = b.figures().unwrap().unwrap();
        b.counted(1000, Some(basis.granted_bytes), Some(basis)).unwrap();
        assert_eq!(used(&b), 1000);
        assert_eq!(spend_all(&b, 1000, NOW + AGE * 2) / 1000, (CAPACITY - 1000) / 1000);
        assert!(!spends(&a, 1000, NOW + AGE * 2), "the rest of the grant has lapsed");
    }

    #[test]
    fn a_count_lies_between_what_is_proved() {
        let (_home, [a, b]) = hosts();
        assert!(spends(&a, 300_000, NOW));
        let begun = b.figures().unwrap().unwrap();
        let count = |found| b.counted(found, Some(begun.granted_bytes), Some(begun)).map(|()| used(&b)).unwrap();
        assert_eq!(count(500_000), 500_000, "files that nobody was granted");
        assert_eq!(count(300_000), 300_000);
        assert!(spends(&a, 200_000, NOW));
        assert_eq!(count(1000), 201_000, "granted since, perhaps behind the walk");
        b.removed(50_000, b.count());
        b.settle(NOW, false).unwrap();
        assert_eq!(used(&b), 151_000);
        assert_eq!(count(190_000), 151_000, "what was removed since may have been found");
    }

    #[test]
    fn what_a_count_has_lowered_is_not_taken_off_twice() {
        let (_home, [a, b]) = hosts();
        let spent = a.spend(100_000, NOW).unwrap().unwrap();
        assert!(spends(&a, 100_000, NOW));
        let gone = a.count();
        // One store is given up and one file removed. Before either is reported, a walk finds neither.
        let begun = b.figures().unwrap().unwrap();
        b.counted(0, Some(begun.granted_bytes), Some(begun)).unwrap();
        assert!(spends(&b, 150_000, NOW));
        let before = used(&b);
        a.refund(spent);
        a.removed(100_000, gone);
        a.settle(NOW, true).unwrap();
        assert_eq!(used(&b), before);
    }

    #[test]
    fn a_refused_grant_says_how_much_is_wanted() {
        let (_home, [a, b]) = hosts();
        assert!(spends(&a, CAPACITY - 5, NOW) && !spends(&a, 10_000, NOW));
        let wanted = || b.figures().unwrap().unwrap().wanted_bytes;
        assert_eq!(wanted(), 10_000);
        b.removed(10_000, b.count());
        b.settle(NOW, false).unwrap();
        assert_eq!(wanted(), 0);
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        fn reseal(bytes: &mut [u8]) {
            if let Some(file) = bytes.first_chunk_mut::<FILE_BYTES>() {
                let seal = checksum(&file[..SEAL_AT]);
                file[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
            }
        }

        /// Every host of a shared directory may write its figures, also one that is broken.
        #[test]
        fn whatever_figures_lie_there_no_more_than_the_capacity_is_granted() {
            let (home, [grants]) = hosts();
            let path = home.path().join(OWN_FOLDER).join(USAGE);
            let full = Figures {
                used_bytes: CAPACITY,
                granted_bytes: u64::MAX - 5,
                removed_bytes: 7,
                wanted_bytes: 9,
                count: Count(3),
            };
            let inputs = vec![Grants::empty().to_vec(), full.write().to_vec()];
            let target = Target::new("figures", inputs).mended(reseal).cases(3000);
            target.run(|bytes| {
                std::fs::write(&path, bytes).unwrap();
                let told = bytes.first_chunk().and_then(Figures::read);
                let is_whole = bytes.len() >= FILE_BYTES
                    && checksum(&bytes[..SEAL_AT]).to_le_bytes() == bytes[SEAL_AT..FILE_BYTES];
                assert!(told.is_none() || is_whole, "figures without their checksum are believed");
                if let Some(told) = told {
                    assert_eq!(told.write(), bytes[..FILE_BYTES], "figures are written as they were read");
                }
                let grants = Grants::new(home.path().to_owned(), grants.capacity_bytes(), AGE);
                let spent = spend_all(&grants, 300_000, NOW);
                assert!(told.is_some() || spent == 0, "figures that nobody can read grant something");
                assert!(spent <= CAPACITY.saturating_sub(told.map_or(0, |told| told.used_bytes)), "{spent} bytes");
                grants.removed(5000, grants.count());
                grants.settle(NOW + AGE, true).unwrap();
                let begun = grants.figures().unwrap();
                grants.counted(CAPACITY / 2, begun.map(|begun| begun.granted_bytes.wrapping_sub(1)), begun).unwrap();
                let after = grants.figures().unwrap().expect("counted figures can be read");
                assert!(begun.is_none() || after.used_bytes <= CAPACITY / 2 + 1, "a count corrects them");
                (told.is_some(), spent, after.wanted_bytes > 0)
            });
        }
    }
}
