//! One walk through a shared directory, folder by folder: it finds what is there, what is too old, and what was used
//! least recently.
//!
//! Invariants: it enters, counts and removes only folders and files with names of ours. Its memory is bounded for any
//! number of objects.

use std::collections::BinaryHeap;
use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::BlockKey;

use super::directory::Directory;
use super::grants::Figures;
use super::layout::{self, OWN_FOLDER, is_folder, is_object_length, is_temporary};

/// At most this many of the least recently used objects are kept for removal. They take 12 MiB at most, and at 1 MiB
/// per block they free 128 GiB before the next walk.
const MAX_CANDIDATES: usize = 1 << 17;

/// What is removed whatever the capacity is.
#[derive(Clone, Copy)]
pub(super) struct Ages {
    /// By the filesystem's clock.
    pub now: Duration,
    pub max_age: Option<Duration>,
    pub orphan_age: Duration,
}

/// An object that may be evicted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Candidate {
    pub touched: Duration,
    pub key: BlockKey,
    pub bytes: u64,
}

/// What the sweep of one folder removed.
#[derive(Clone, Copy, Default)]
pub(super) struct Swept {
    pub expired_blocks: u64,
    pub expired_bytes: u64,
    pub orphans: u64,
}

/// See the module documentation.
pub(super) struct Walk {
    pending: Vec<PathBuf>,
    /// Bytes granted long enough before the walk began; none if its count is not valid.
    pub basis: Option<Option<u64>>,
    /// The figures when the walk began.
    pub begun: Option<Figures>,
    pub found_bytes: u64,
    pub found_blocks: u64,
    least_recent: BinaryHeap<Candidate>,
}

impl Walk {
    pub fn new(directory: &Directory, basis: Option<Option<u64>>, begun: Option<Figures>) -> Walk {
        let pending = vec![directory.path.join(OWN_FOLDER), directory.path.clone()];
        Walk { pending, basis, begun, found_bytes: 0, found_blocks: 0, least_recent: BinaryHeap::new() }
    }

    /// Processes the next folder; none when all were seen.
    pub fn step(&mut self, directory: &Directory, ages: Ages) -> io::Result<Option<Swept>> {
        let Some(folder) = self.pending.pop() else { return Ok(None) };
        let mut swept = Swept::default();
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // Another sweeper removed the empty folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(swept)),
            Err(error) => return Err(error),
        };
        let mut is_empty = true;
        for entry in entries {
            is_empty = false;
            self.look(directory, ages, &entry?, &mut swept);
        }
        if is_empty && folder != directory.path && is_older(&folder, ages.now, ages.orphan_age) {
            // This fails if a file was just created in it.
            let _ = fs::remove_dir(&folder);
        }
        Ok(Some(swept))
    }

    /// The least recently used objects, the oldest last.
    pub fn into_candidates(self) -> Vec<Candidate> {
        let mut candidates = self.least_recent.into_sorted_vec();
        candidates.reverse();
        candidates
    }

    fn look(&mut self, directory: &Directory, ages: Ages, entry: &DirEntry, swept: &mut Swept) {
        let (name, path) = (entry.file_name(), entry.path());
        let (Some(name), Ok(kind)) = (name.to_str(), entry.file_type()) else { return };
        if kind.is_dir() {
            if is_folder(name) {
                self.pending.push(path);
            }
        } else if is_temporary(name) {
            if is_older(&path, ages.now, ages.orphan_age) && fs::remove_file(&path).is_ok() {
                swept.orphans += 1;
            }
        } else if let Some(key) = directory.below(&path).and_then(|path| layout::key_of(path, directory.is_sharded))
            && let Ok(about) = entry.metadata()
            && about.is_file()
        {
            self.object(ages, key, &path, &about, swept);
        }
    }

    fn object(&mut self, ages: Ages, key: BlockKey, path: &Path, about: &Metadata, swept: &mut Swept) {
        let touched = touched_at(about);
        let is_expired = ages.max_age.is_some_and(|age| ages.now.saturating_sub(touched) > age);
        // Only whole files get a name. This one lost a part later, and every load of it is a miss.
        let is_broken = !is_object_length(about.len());
        if (is_expired || is_broken) && fs::remove_file(path).is_ok() {
            swept.expired_blocks += 1;
            swept.expired_bytes += about.len();
            return;
        }
        self.found_bytes += about.len();
        self.found_blocks += 1;
        self.least_recent.push(Candidate { touched, key, bytes: about.len() });
        if self.least_recent.len() > MAX_CANDIDATES {
            self.least_recent.pop();
        }
    }
}

/// Removes the object if it was not used since it became a candidate. Returns whether this call removed it.
pub(super) fn evict(directory: &Directory, candidate: &Candidate) -> bool {
    let path = directory.path.join(layout::object(&candidate.key, directory.is_sharded));
    let is_unused = fs::symlink_metadata(&path).is_ok_and(|about| touched_at(&about) == candidate.touched);
    is_unused && fs::remove_file(&path).is_ok()
}

pub(super) fn is_older(path: &Path, now: Duration, age: Duration) -> bool {
    fs::symlink_metadata(path).is_ok_and(|about| now.saturating_sub(touched_at(&about)) > age)
}

fn touched_at(about: &Metadata) -> Duration {
    let touched = about.modified().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    touched.unwrap_or_default()
}
