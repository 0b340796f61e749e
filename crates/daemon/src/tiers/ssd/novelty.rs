//! Which of the configured disks are new: files that are not there yet, on a host that has no other disk.
//!
//! A file that is missing beside disks that are there is more probably on a filesystem that is not mounted: it has
//! blocks that a purge must reach, and a blank file in its place would hide that. So it is made only where all files
//! are missing, as at the first start, or where the operator says so.
//!
//! A first start may be killed when it has made some of the files. So each of them begins with a mark until it is
//! formatted, and a marked file is as good as a missing one for the next start. Invariants: the mark counts for the
//! same disks and until the host restarts, when a mount may be missing. No disk is formatted while another has no file
//! yet, and none takes a block while another has its mark: where a mark is left, no disk of that start has ever stored
//! anything. A disk that hangs between its file and its format holds up the others for `OTHERS` at most.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_core::checksum::Checksum;
use forebay_core::{Error, ErrorKind};

/// How long one disk waits for what becomes of the others: they are asked at the same time.
const OTHERS: Duration = Duration::from_secs(2);

/// What is known of each disk, by its number in the configuration.
pub struct Novelty {
    /// What the marks of this daemon say; none where the kernel does not name its start, and nothing is marked.
    start: Option<u64>,
    disks: Mutex<Vec<Known>>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// It did not answer yet, or its place cannot be looked at.
    Nothing,
    /// There is no file yet where there could be one.
    ToBeMade,
    /// There is no file, and it could not be made.
    NotMade,
    /// This daemon, or one whose first start was killed, has made its file. It is not formatted yet.
    Made,
    /// This daemon has formatted it.
    Formatted,
    /// It was there, whatever is wrong with it.
    Found,
}

impl Novelty {
    /// Of all disks of a configuration, by place.
    pub fn of<'a>(paths: impl Iterator<Item = &'a Path> + Clone) -> Novelty {
        let start = first_start(paths.clone());
        Novelty { start, disks: Mutex::new(vec![Known::Nothing; paths.count()]), changed: Condvar::new() }
    }

    /// The number that marks what this start makes.
    pub fn start(&self) -> Option<u64> {
        self.start
    }

    pub fn know(&self, place: usize, known: Known) {
        self.lock()[place] = known;
        self.changed.notify_all();
    }

    /// Whether no disk was there when the daemon started. Waits for those that are still being looked at; one that
    /// takes longer may be there.
    pub fn are_all_new(&self) -> bool {
        let disks = self.wait_while(OTHERS, |disks| disks.contains(&Known::Nothing) && !disks.contains(&Known::Found));
        !disks.iter().any(|known| matches!(known, Known::Nothing | Known::Found))
    }

    /// Waits until each disk that is new has a file, before the disk at `place` is formatted.
    pub fn await_files(&self, place: usize) {
        drop(self.wait_while(OTHERS, |disks| disks[place] == Known::Made && disks.contains(&Known::ToBeMade)));
    }

    /// This disk was opened. If it was new, it is formatted by now, and waits until each other new one is too.
    pub fn opened(&self, place: usize) {
        if self.lock()[place] == Known::Made {
            self.know(place, Known::Formatted);
            drop(self.wait_while(OTHERS, |disks| disks.contains(&Known::Made)));
        }
    }

    fn wait_while(&self, patience: Duration, is_awaited: impl Fn(&[Known]) -> bool) -> MutexGuard<'_, Vec<Known>> {
        let waited = self.changed.wait_timeout_while(self.lock(), patience, |disks| is_awaited(disks));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Known>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of first starts with these disks since the host started.
pub fn first_start<'a>(paths: impl Iterator<Item = &'a Path>) -> Option<u64> {
    let mut sum = Checksum::new();
    sum.update(&std::fs::read("/proc/sys/kernel/random/boot_id").ok()?);
    for path in paths {
        sum.update(path.as_os_str().as_encoded_bytes());
        sum.update(&[0]);
    }
    Some(sum.finish())
}

/// Of a file that is not made.
pub fn missing_beside_others(path: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "a disk's file does not exist, and other disks are there or do not answer")
        .with("path", path.display())
        .hint(format!(
            "mount the disk there; if it is a new disk, make an empty file as the daemon's user: `touch {}`",
            path.display()
        ))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::Known::*;
    use super::*;

    fn of(known: &[Known]) -> Novelty {
        let paths: Vec<PathBuf> = (0..known.len()).map(|place| PathBuf::from(format!("/disk{place}"))).collect();
        let novelty = Novelty::of(paths.iter().map(PathBuf::as_path));
        known.iter().enumerate().for_each(|(place, known)| novelty.know(place, *known));
        novelty
    }

    #[test]
    fn disks_are_new_only_if_none_was_there_and_all_places_were_seen() {
        for (known, are_new) in [
            (vec![ToBeMade], true),
            (vec![ToBeMade, ToBeMade, Made], true),
            (vec![ToBeMade, NotMade, Formatted], true),
            (vec![ToBeMade, Found], false),
            (vec![ToBeMade, Nothing], false),
            (vec![Made, Nothing, Found], false),
        ] {
            assert_eq!(of(&known).are_all_new(), are_new, "{known:?}");
        }
    }

    /// Has `waits` wait until a second disk, known as `awaited`, is `then`.
    fn is_held_up(awaited: Known, then: Known, waits: fn(&Novelty)) {
        let novelty = of(&[Made, awaited]);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| waits(&novelty));
            novelty.know(1, then);
            asked.join().unwrap();
        });
    }

    #[test]
    fn a_disk_waits_for_what_becomes_of_the_others() {
        is_held_up(Nothing, ToBeMade, |novelty| assert!(novelty.are_all_new()));
        is_held_up(ToBeMade, Made, |novelty| {
            novelty.await_files(0);
            assert!(!novelty.lock().contains(&ToBeMade));
        });
        is_held_up(Made, Formatted, |novelty| {
            novelty.opened(0);
            assert!(!novelty.lock().contains(&Made));
        });
    }

    #[test]
    fn a_disk_that_was_there_is_not_new_once_it_is_opened() {
        let novelty = of(&[Found, ToBeMade]);
        novelty.await_files(0);
        novelty.opened(0);
        assert!(!novelty.are_all_new());
    }

    #[test]
    fn a_mark_counts_for_the_same_disks() {
        let start = |paths: &[&str]| first_start(paths.iter().map(Path::new));
        assert_eq!(start(&["/a", "/b"]), start(&["/a", "/b"]));
        assert!(start(&["/a", "/b"]) != start(&["/a", "/c"]) && start(&["/a", "/b"]) != start(&["/ab"]));
    }
}
