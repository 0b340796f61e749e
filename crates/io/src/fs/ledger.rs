//! How much a shared directory holds, counted together by hosts that share nothing but the directory.
//!
//! One small file has two figures: an upper bound of the bytes in the directory, and how many bytes were ever granted.
//! A host takes a grant of some blocks under the file's lock, writes blocks out of it, and asks again when it is spent;
//! the sweeper takes off what it removes and puts the figure right after each walk.
//!
//! Invariant: a file is published only out of a grant, and grants end at the capacity; so the directory exceeds it by
//! no more than was granted and not written when the sweeper last counted. An unreadable figure grants nothing until
//! it was counted anew.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_core::checksum::checksum;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::directory::errno;

const MAGIC: &[u8; 8] = b"FBUSAGE1";
const FILE_BYTES: usize = 40;
const SEAL_AT: usize = FILE_BYTES - 8;
/// A grant is this part of the capacity, and no more than [`MAX_GRANT_BYTES`]: one round trip for many blocks, while
/// all hosts' unspent grants together stay small.
const GRANT_PART: u64 = 256;
const MAX_GRANT_BYTES: u64 = 64 << 20;

/// What the file says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Figures {
    pub used_bytes: u64,
    /// Ever, by all hosts; wraps.
    pub granted_bytes: u64,
    /// The largest grant that was refused since room was made.
    pub wanted_bytes: u64,
}

/// See the module's head.
pub(super) struct Ledger {
    path: PathBuf,
    capacity_bytes: Option<u64>,
    /// Granted to this host and not spent.
    unspent_bytes: Mutex<u64>,
    /// One change at a time in this process; the file's lock is between processes.
    changing: Mutex<()>,
    last_used_bytes: AtomicU64,
}

impl Ledger {
    pub fn new(path: PathBuf, capacity_bytes: Option<u64>) -> Ledger {
        let (unspent_bytes, changing, last_used_bytes) = Default::default();
        Ledger { path, capacity_bytes, unspent_bytes, changing, last_used_bytes }
    }

    /// The file of a directory that holds nothing.
    pub fn empty() -> [u8; FILE_BYTES] {
        Figures::default().write()
    }

    /// As this host last saw it; asks nobody.
    pub fn last_used_bytes(&self) -> u64 {
        self.last_used_bytes.load(Relaxed)
    }

    pub fn capacity_bytes(&self) -> Option<u64> {
        self.capacity_bytes
    }

    /// Takes `bytes` out of what was granted, asking for more if need be; false if the directory is full.
    pub fn spend(&self, bytes: u64) -> Result<bool, Errno> {
        let own_bytes = self.take(bytes);
        let needed_bytes = bytes - own_bytes;
        if needed_bytes == 0 {
            return Ok(true);
        }
        let granted = self.grant(needed_bytes);
        // The first of them are this caller's, whoever else spends meanwhile.
        self.refund(match granted {
            Ok(granted_bytes) if granted_bytes > 0 => granted_bytes - needed_bytes,
            _ => own_bytes,
        });
        Ok(granted? > 0)
    }

    /// Gives back what was spent for nothing, or what a removed file had taken.
    pub fn refund(&self, bytes: u64) {
        *lock(&self.unspent_bytes) += bytes;
    }

    /// Returns to the directory what this host keeps beyond a usual grant, or all of it.
    pub fn settle(&self, is_all: bool) -> Result<(), Errno> {
        let kept_bytes = if is_all { 0 } else { self.usual_bytes() };
        let mut unspent = lock(&self.unspent_bytes);
        let surplus_bytes = unspent.saturating_sub(kept_bytes);
        *unspent -= surplus_bytes;
        drop(unspent);
        if surplus_bytes > 0 { self.removed(surplus_bytes) } else { Ok(()) }
    }

    pub fn removed(&self, bytes: u64) -> Result<(), Errno> {
        self.change(|figures| {
            let figures = figures?;
            figures.used_bytes = figures.used_bytes.saturating_sub(bytes);
            figures.wanted_bytes = figures.wanted_bytes.saturating_sub(bytes);
            Some(())
        })?;
        Ok(())
    }

    /// Puts down what a walk found that began when `granted_bytes` had been granted: what was granted since may have
    /// been written behind it.
    pub fn counted(&self, found_bytes: u64, granted_bytes: u64) -> Result<(), Errno> {
        self.change_any(|figures| {
            figures.used_bytes = found_bytes + figures.granted_bytes.wrapping_sub(granted_bytes);
        })
    }

    /// What the file says now; none if it cannot be read.
    pub fn figures(&self) -> Result<Option<Figures>, Errno> {
        self.change(|figures| figures.map(|figures| *figures))
    }

    /// As much of `bytes` as there is.
    fn take(&self, bytes: u64) -> u64 {
        let mut unspent = lock(&self.unspent_bytes);
        let taken_bytes = bytes.min(*unspent);
        *unspent -= taken_bytes;
        taken_bytes
    }

    /// A usual grant, if it has at least `bytes`, else so many; 0 if there is no room for them.
    fn grant(&self, bytes: u64) -> Result<u64, Errno> {
        let capacity_bytes = self.capacity_bytes.unwrap_or(u64::MAX);
        self.change(|figures| {
            let Some(figures) = figures else { return 0 };
            let room_bytes = capacity_bytes.saturating_sub(figures.used_bytes);
            let grant_bytes = self.usual_bytes().max(bytes).min(room_bytes);
            if grant_bytes < bytes {
                // What can never fit is not made room for.
                figures.wanted_bytes = figures.wanted_bytes.max(if bytes > capacity_bytes { 0 } else { bytes });
                return 0;
            }
            figures.used_bytes += grant_bytes;
            figures.granted_bytes = figures.granted_bytes.wrapping_add(grant_bytes);
            grant_bytes
        })
    }

    fn usual_bytes(&self) -> u64 {
        self.capacity_bytes.map_or(MAX_GRANT_BYTES, |capacity| (capacity / GRANT_PART).min(MAX_GRANT_BYTES))
    }

    fn change<T>(&self, change: impl FnOnce(Option<&mut Figures>) -> T) -> Result<T, Errno> {
        self.locked(|figures| change(figures.as_mut()))
    }

    fn change_any(&self, change: impl FnOnce(&mut Figures)) -> Result<(), Errno> {
        self.locked(|figures| change(figures.get_or_insert_default()))
    }

    fn locked<T>(&self, change: impl FnOnce(&mut Option<Figures>) -> T) -> Result<T, Errno> {
        let _turn = lock(&self.changing);
        let file = File::options().read(true).write(true).open(&self.path).map_err(errno)?;
        // Goes with the file, at the end of this function or of this process. Over NFS it is a lock of the server's,
        // and taking it refreshes what the client has of the file.
        flock(&file, FlockOperation::LockExclusive)?;
        let mut bytes = [0; FILE_BYTES];
        let before = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Figures::read(&bytes),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(errno(error)),
        };
        let mut after = before;
        let result = change(&mut after);
        if let Some(figures) = after {
            self.last_used_bytes.store(figures.used_bytes, Relaxed);
            if after != before {
                file.write_all_at(&figures.write(), 0).map_err(errno)?;
            }
        }
        Ok(result)
    }
}

impl Figures {
    fn write(self) -> [u8; FILE_BYTES] {
        let mut bytes = [0; FILE_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.used_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.granted_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.wanted_bytes.to_le_bytes());
        let seal = checksum(&bytes[..SEAL_AT]);
        bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8; FILE_BYTES]) -> Option<Figures> {
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let is_whole = &bytes[..8] == MAGIC && field(SEAL_AT) == checksum(&bytes[..SEAL_AT]);
        is_whole.then(|| Figures { used_bytes: field(8), granted_bytes: field(16), wanted_bytes: field(24) })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 1 << 20;

    fn two_hosts() -> (tempfile::TempDir, Ledger, Ledger) {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("usage");
        std::fs::write(&path, Ledger::empty()).unwrap();
        let [a, b] = [0, 1].map(|_| Ledger::new(path.clone(), Some(CAPACITY)));
        (home, a, b)
    }

    fn spend_all(ledger: &Ledger, bytes: u64) -> u64 {
        std::iter::from_fn(|| ledger.spend(bytes).unwrap().then_some(bytes)).sum()
    }

    #[test]
    fn two_hosts_together_spend_the_capacity_and_no_more() {
        let (_home, a, b) = two_hosts();
        let mut spent = 0;
        for round in 0..5 {
            spent += (if round % 2 == 0 { &a } else { &b }).spend(100_000).unwrap() as u64 * 100_000;
        }
        spent += spend_all(&a, 8192) + spend_all(&b, 8192) + spend_all(&a, 1) + spend_all(&b, 1);
        assert_eq!(spent, CAPACITY, "to the last byte");
        a.removed(5000).unwrap();
        assert_eq!((spend_all(&b, 1000), spend_all(&a, 1000)), (5000, 0));
    }

    #[test]
    fn what_is_not_spent_goes_back_when_a_host_leaves() {
        let (_home, a, b) = two_hosts();
        assert!(a.spend(10).unwrap());
        assert!(a.figures().unwrap().unwrap().used_bytes > 10);
        a.settle(true).unwrap();
        assert_eq!(b.figures().unwrap().unwrap().used_bytes, 10);
        b.refund(10);
        b.settle(true).unwrap();
        assert_eq!(a.figures().unwrap().unwrap().used_bytes, 0);
    }

    #[test]
    fn a_damaged_figure_grants_nothing_until_it_was_counted() {
        let (home, a, b) = two_hosts();
        for damage in [&b""[..], b"FBUSAGE1", &[0xff; FILE_BYTES]] {
            std::fs::write(home.path().join("usage"), damage).unwrap();
            assert!(!a.spend(1).unwrap());
            assert_eq!(a.figures().unwrap(), None);
            b.counted(CAPACITY - 7, 0).unwrap();
            assert_eq!(spend_all(&a, 1), 7);
        }
    }

    #[test]
    fn what_was_granted_during_a_walk_is_added_to_what_it_found() {
        let (_home, a, b) = two_hosts();
        assert!(a.spend(300_000).unwrap());
        let before = b.figures().unwrap().unwrap();
        assert!(a.spend(200_000).unwrap());
        b.counted(1000, before.granted_bytes).unwrap();
        assert_eq!(b.figures().unwrap().unwrap().used_bytes, 201_000);
    }

    #[test]
    fn a_refused_grant_says_how_much_is_wanted() {
        let (_home, a, b) = two_hosts();
        assert!(a.spend(CAPACITY - 5).unwrap() && !a.spend(10_000).unwrap());
        assert_eq!(b.figures().unwrap().unwrap().wanted_bytes, 10_000);
        b.removed(10_000).unwrap();
        assert_eq!(b.figures().unwrap().unwrap().wanted_bytes, 0);
    }
}
