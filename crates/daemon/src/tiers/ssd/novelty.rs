//! Which of the configured disks are new: files that are not there yet, on a host that has no other disk.
//!
//! A file that is missing beside disks that are there is more probably on a filesystem that is not mounted: it has
//! blocks that a purge must reach, and a blank file in its place would hide that. So it is made only where all files
//! are missing, as at the first start, or where the operator says so.

use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use forebay_core::{Error, ErrorKind};

/// What is known of each disk, by its number in the configuration.
pub struct Novelty {
    disks: Mutex<Vec<Known>>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// It did not answer yet, or its place cannot be looked at.
    Nothing,
    /// There is no file yet where there could be one.
    ToBeMade,
    /// This daemon has made it.
    Made,
    /// It was there, whatever is wrong with it.
    Found,
}

impl Novelty {
    pub fn of(disks: usize) -> Novelty {
        Novelty { disks: Mutex::new(vec![Known::Nothing; disks]), changed: Condvar::new() }
    }

    pub fn know(&self, place: usize, known: Known) {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)[place] = known;
        self.changed.notify_all();
    }

    /// Whether no disk was there when the daemon started. Waits for those that are still being looked at; one that
    /// takes longer may be there.
    pub fn are_all_new(&self, patience: Duration) -> bool {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let is_awaited = |disks: &mut Vec<Known>| disks.contains(&Known::Nothing) && !disks.contains(&Known::Found);
        let waited = self.changed.wait_timeout_while(disks, patience, is_awaited);
        let (disks, _) = waited.unwrap_or_else(PoisonError::into_inner);
        disks.iter().all(|known| matches!(known, Known::ToBeMade | Known::Made))
    }
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
    use super::Known::*;
    use super::*;

    #[test]
    fn disks_are_new_only_if_none_was_there_and_all_places_were_seen() {
        for (known, are_new) in [
            (vec![ToBeMade], true),
            (vec![ToBeMade, ToBeMade, Made], true),
            (vec![ToBeMade, Found], false),
            (vec![ToBeMade, Nothing], false),
            (vec![Made, Nothing, Found], false),
        ] {
            let novelty = Novelty::of(known.len());
            known.iter().enumerate().for_each(|(place, known)| novelty.know(place, *known));
            assert_eq!(novelty.are_all_new(Duration::ZERO), are_new, "{known:?}");
        }
    }

    #[test]
    fn a_disk_waits_for_what_is_found_of_the_others() {
        let novelty = Novelty::of(2);
        novelty.know(0, ToBeMade);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| novelty.are_all_new(Duration::from_secs(60)));
            novelty.know(1, ToBeMade);
            assert!(asked.join().unwrap());
        });
    }
}
