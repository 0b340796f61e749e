//! Finds blocks to evict: a hand that goes round a shared directory, a few folders at a time.
//!
//! The hash of a block's name chooses one of 4,096 folders in its namespace. So the folders of one number, in all
//! namespaces, are a fair sample of the directory. A batch is such samples until it has seen enough blocks, and the
//! least recently used eighth of it goes. So the cost of room follows what is freed, however much is there: about
//! eight looks a block. Where one batch sees the whole directory, blocks go exactly in the order of their last use.
//!
//! Invariants: the hand enters and offers only folders and files with names of ours, and passes over what it cannot
//! read. Its memory is bounded for any number of objects.

use std::collections::BinaryHeap;
use std::time::Duration;

use forebay_core::BlockKey;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::directory::Directory;
use super::folder::Folder;
use super::layout::{self, is_folder};
use super::lease::touched_at;
use super::walk::is_a_folder;
use super::writer::resolve;

/// A batch ends once it has seen so many blocks. The boundary of the oldest eighth of them is within some 1 % of its
/// place among all blocks.
const BATCH_BLOCKS: u64 = 4096;
/// The part of a batch that goes, unless the batch is the whole directory. A larger part would be cheaper, and would
/// evict blocks that were used later.
const PART: u64 = 8;
/// Candidates take 12 MiB at most.
const MOST_CANDIDATES: usize = 1 << 17;
/// Hosts of one store may see clocks that differ by less.
const MOST_AHEAD: Duration = Duration::from_secs(60);
/// First digits of a folder's number, and last digits.
const FIRSTS: u16 = 256;
const LASTS: u16 = 16;

/// An object that may be evicted. The order is that of the last use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Candidate {
    /// Not so if the time of the last use lies ahead: the clock was set back since, so all later uses lie before it.
    is_in_time: bool,
    pub touched: Duration,
    pub key: BlockKey,
    pub bytes: u64,
}

/// What one step came to.
pub(super) enum Step {
    /// The batch is not over.
    Looked,
    /// The oldest last. None if the whole directory has nothing to evict.
    Candidates(Vec<Candidate>),
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Hand {
    /// The next folders: first digits, and the last digit.
    first: u16,
    last: u16,
    /// Of these first digits, the namespaces that have them, and a bit for each last digit.
    namespaces: Vec<(String, u16)>,
    /// Of these, the next one to look at.
    next: usize,
    batch: Batch,
}

#[derive(Default)]
struct Batch {
    seen: u64,
    /// Folders' numbers that it has looked at.
    numbers: u16,
    least_recent: BinaryHeap<Candidate>,
}

impl Hand {
    /// Looks at one folder. `now` is the time of the filesystem's clock, or somewhat earlier.
    pub fn step(&mut self, directory: &Directory, now: Duration) -> Result<Step, Errno> {
        let root = directory.enter()?;
        if !directory.is_sharded {
            return self.whole(&root, now).map(Step::Candidates);
        }
        if self.last == 0 && self.next == 0 {
            self.namespaces = namespaces(&root)?.into_iter().map(|name| having(&root, name, self.first)).collect();
            self.namespaces.retain(|(_, lasts)| *lasts != 0);
        }
        let is_there = |(_, lasts): &(String, u16)| lasts & 1 << self.last != 0;
        let rest = self.namespaces[self.next..].iter().position(is_there);
        if let Some(at) = rest.map(|at| self.next + at) {
            self.next = at + 1;
            let path = format!("{}/{:02x}/{:x}", self.namespaces[at].0, self.first, self.last);
            self.batch.look_in(&root, &path, true, now);
            return Ok(Step::Looked);
        }
        // Where no namespace has the first digits, all numbers that begin with them are empty.
        let passed = if self.namespaces.is_empty() { LASTS - self.last } else { 1 };
        (self.next, self.last) = (0, (self.last + passed) % LASTS);
        self.first = (self.first + u16::from(self.last == 0)) % FIRSTS;
        self.batch.numbers += passed;
        let is_whole = self.batch.numbers >= FIRSTS * LASTS;
        if !is_whole && self.batch.seen < BATCH_BLOCKS {
            return Ok(Step::Looked);
        }
        Ok(Step::Candidates(std::mem::take(&mut self.batch).candidates(is_whole)))
    }

    /// Of a directory whose namespaces are one folder each.
    fn whole(&mut self, root: &Folder, now: Duration) -> Result<Vec<Candidate>, Errno> {
        let mut batch = Batch::default();
        namespaces(root)?.iter().for_each(|namespace| batch.look_in(root, namespace, false, now));
        Ok(batch.candidates(true))
    }
}

impl Batch {
    /// What cannot be read is left to the walk, which says so.
    fn look_in(&mut self, root: &Folder, path: &str, is_sharded: bool, now: Duration) {
        let Ok(folder) = root.folder(path) else { return };
        let Ok(entries) = folder.list() else { return };
        for entry in entries.map_while(Result::ok) {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if let Some(key) = layout::key_of(format!("{path}/{name}").as_ref(), is_sharded)
                && let Ok(about) = folder.about(name)
                && FileType::from_raw_mode(about.st_mode) == FileType::RegularFile
            {
                self.seen += 1;
                let (touched, bytes) = (touched_at(&about), about.st_size as u64);
                self.least_recent.push(Candidate { is_in_time: touched <= now + MOST_AHEAD, touched, key, bytes });
                if self.least_recent.len() > MOST_CANDIDATES {
                    self.least_recent.pop();
                }
            }
        }
    }

    fn candidates(self, is_whole: bool) -> Vec<Candidate> {
        let mut candidates = self.least_recent.into_sorted_vec();
        if !is_whole {
            candidates.truncate((self.seen / PART) as usize);
        }
        candidates.reverse();
        candidates
    }
}

/// Removes the object if it was not used since it became a candidate. Returns whether this call removed it.
pub(super) fn evict(root: &Folder, candidate: &Candidate, is_sharded: bool) -> bool {
    let path = layout::object(&candidate.key, is_sharded);
    let Ok((folder, name)) = resolve(root, &path) else { return false };
    let is_unused = folder.about(name).is_ok_and(|about| touched_at(&about) == candidate.touched);
    is_unused && folder.remove(name).is_ok()
}

fn namespaces(root: &Folder) -> Result<Vec<String>, Errno> {
    let mut names = folders_in(root)?;
    names.retain(|name| name.len() == 32);
    Ok(names)
}

/// A namespace, and which last digits it has of these first ones.
fn having(root: &Folder, namespace: String, first: u16) -> (String, u16) {
    let listed = root.folder(format!("{namespace}/{first:02x}")).and_then(|folder| folders_in(&folder));
    let lasts = listed
        .unwrap_or_default()
        .iter()
        .filter(|name| name.len() == 1)
        .fold(0, |lasts, name| lasts | u16::from_str_radix(name, 16).map_or(0, |last| 1 << last));
    (namespace, lasts)
}

fn folders_in(folder: &Folder) -> Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in folder.list()? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().to_str()
            && is_folder(name)
            && is_a_folder(folder, name, entry.file_type())
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs::{self, File};
    use std::time::{SystemTime, UNIX_EPOCH};

    use forebay_core::{BlockHash, NamespaceId};

    use super::super::config::FsConfig;
    use super::*;

    fn key(number: u64) -> BlockKey {
        let namespace = NamespaceId(u128::from(number % 3) << 90 | 7);
        BlockKey { namespace, group: 0, hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
    }

    /// With blocks 0 to `count`, the first one the oldest.
    fn filled(count: u64, is_sharded: bool) -> (tempfile::TempDir, Directory) {
        let home = tempfile::tempdir().unwrap();
        let config = FsConfig { is_sharded, ..FsConfig::new(vec![home.path().to_owned()]) };
        let directory = Directory::open(home.path(), &config).unwrap();
        let begun = SystemTime::now() - Duration::from_secs(1_000_000);
        (0..count).for_each(|number| {
            let path = home.path().join(layout::object(&key(number), is_sharded));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = File::create(path).unwrap();
            file.set_len(8192).unwrap();
            file.set_modified(begun + Duration::from_secs(number)).unwrap();
        });
        (home, directory)
    }

    fn batch(hand: &mut Hand, directory: &Directory) -> Vec<BlockKey> {
        loop {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            if let Step::Candidates(candidates) = hand.step(directory, now).unwrap() {
                assert!(candidates.is_sorted_by(|one, next| one > next));
                return candidates.into_iter().map(|candidate| candidate.key).collect();
            }
        }
    }

    #[test]
    fn blocks_of_a_small_directory_go_in_the_order_of_their_use_whatever_else_is_there() {
        for is_sharded in [true, false] {
            let (home, directory) = filled(500, is_sharded);
            for foreign in ["notes", "ab", "00000000000000000000000000000007/zz"] {
                fs::create_dir_all(home.path().join(foreign)).unwrap();
                fs::write(home.path().join(foreign).join("0000-ab"), "somebody's").unwrap();
            }
            let expected: Vec<BlockKey> = (0..500).rev().map(key).collect();
            let mut hand = Hand::default();
            (0..3).for_each(|_| assert_eq!(batch(&mut hand, &directory), expected, "{is_sharded}"));
        }
        let (_home, empty) = filled(0, true);
        assert_eq!(batch(&mut Hand::default(), &empty), []);
    }

    #[test]
    fn blocks_used_before_the_clock_was_set_back_go_first() {
        let (home, directory) = filled(100, true);
        let touch = |number: u64, at: SystemTime| {
            let path = home.path().join(layout::object(&key(number), true));
            File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
        };
        let (now, second) = (SystemTime::now(), Duration::from_secs(1));
        (0..40).for_each(|number| touch(number, now + Duration::from_secs(86_400 + number)));
        // Another host of the store sees a clock that is somewhat ahead.
        touch(99, now + 5 * second);
        let expected: Vec<BlockKey> = (0..100).rev().map(key).collect();
        assert_eq!(batch(&mut Hand::default(), &directory), expected);
    }

    /// Each batch is a fair sample, so what it gives up is about the oldest eighth of the directory; and batches come
    /// to each block in turn.
    #[test]
    fn an_eighth_of_each_batch_goes_and_all_blocks_have_their_turn() {
        const ALL: u64 = 30_000;
        let (_home, directory) = filled(ALL, true);
        let numbers: BTreeMap<BlockKey, u64> = (0..ALL).map(|number| (key(number), number)).collect();
        let (mut hand, mut offered) = (Hand::default(), BTreeSet::new());
        // Eight batches go past the end of the round.
        for _ in 0..8 {
            let batch: Vec<u64> = batch(&mut hand, &directory).iter().map(|key| numbers[key]).collect();
            assert!((512..640).contains(&batch.len()), "an eighth of somewhat more than 4,096: {}", batch.len());
            let (youngest, oldest) = (batch[0], batch[batch.len() - 1]);
            assert!(youngest < ALL * 3 / 20, "{youngest} is not among the oldest eighth of {ALL}");
            assert!(oldest < ALL / 100, "{oldest} is offered before older ones");
            offered.extend(batch);
        }
        let missing = (0..ALL / 10).filter(|number| !offered.contains(number)).count();
        assert_eq!(missing, 0, "old blocks were passed over in a whole round");
    }
}
