//! Messages that the daemon has not acknowledged yet: commits, aborts, unused slots, releases and ends of lookups.
//!
//! Invariants: each kind is delivered in its own order, a commit's parent before its children, and is kept until the
//! daemon acknowledged it. An unacknowledged batch goes back to the front; all calls can be repeated without
//! harm. All but commits come only from slots and leases that were held, each once, so limits on those bound them.

use std::collections::{HashSet, VecDeque};

use super::limits::COMMIT_BLOCKS;
use crate::proto::{self, Held};
use crate::{Hashes, pack};

/// See the module documentation.
#[derive(Default)]
pub(super) struct Outbox {
    commits: VecDeque<Commit>,
    aborts: VecDeque<Held>,
    /// Slots of the stock, which nothing was to be stored in.
    returns: VecDeque<Held>,
    releases: VecDeque<u64>,
    /// Leases of lookups that end while blocks are promoted.
    ends: VecDeque<u64>,
    saved: Saved,
    /// Blocks and leases of the batch in flight.
    in_flight: usize,
    /// Whether that is of unused slots.
    are_returns_in_flight: bool,
}

/// A run of blocks, each the predecessor of the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    /// Epoch of the namespace for which the slots were reserved.
    pub epoch: u64,
    pub group: u32,
    /// Empty at the start of a prompt.
    pub predecessor: Vec<u8>,
    pub hashes: Hashes,
    pub slots: Vec<Held>,
}

/// The content of one call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Batch {
    Commits(Vec<Commit>),
    Aborts(Vec<Held>),
    /// Of slots that were never handed out.
    Returns(Vec<Held>),
    /// Of leases, and ends of lookups.
    Releases {
        leases: Vec<u64>,
        lookups: Vec<u64>,
        saved: Saved,
    },
}

/// What loads have saved the engine. It goes with the next releases, and at most once: what a call loses is not said
/// again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Saved {
    pub tokens: u64,
    /// The least time that computing them would have taken.
    pub prefill_us: u64,
}

impl Outbox {
    pub fn commit(&mut self, commit: Commit) {
        if !commit.slots.is_empty() {
            self.commits.push_back(commit);
        }
    }

    pub fn abort(&mut self, slots: impl IntoIterator<Item = Held>) {
        self.aborts.extend(slots);
    }

    pub fn return_unused(&mut self, slots: impl IntoIterator<Item = Held>) {
        self.returns.extend(slots);
    }

    pub fn release(&mut self, lease: u64) {
        self.releases.push_back(lease);
    }

    /// The lookup with this lease promotes nothing more; what is ready stays leased.
    pub fn end_lookup(&mut self, lease: u64) {
        self.ends.push_back(lease);
    }

    /// The daemon is told of it with the next releases.
    pub fn save(&mut self, saved: Saved) {
        self.saved.tokens = self.saved.tokens.saturating_add(saved.tokens);
        self.saved.prefill_us = self.saved.prefill_us.saturating_add(saved.prefill_us);
    }

    /// Blocks and leases not yet acknowledged.
    pub fn len(&self) -> usize {
        self.blocks() + self.releases.len() + self.ends.len()
    }

    /// Blocks whose commit or abort is queued or in flight.
    pub fn blocks(&self) -> usize {
        self.commit_blocks() + self.aborts.len() + self.returns.len() + self.in_flight
    }

    /// The next batch. Commits are included only if the namespace was declared.
    pub fn next(&mut self, is_named: bool) -> Option<Batch> {
        let batch = if is_named && !self.commits.is_empty() {
            Batch::Commits(self.next_commits())
        } else if !self.aborts.is_empty() {
            Batch::Aborts(std::mem::take(&mut self.aborts).into())
        } else if !self.returns.is_empty() {
            Batch::Returns(std::mem::take(&mut self.returns).into())
        } else if !self.releases.is_empty() || !self.ends.is_empty() {
            let [leases, lookups] = [&mut self.releases, &mut self.ends].map(|all| std::mem::take(all).into());
            Batch::Releases { leases, lookups, saved: std::mem::take(&mut self.saved) }
        } else {
            return None;
        };
        (self.in_flight, self.are_returns_in_flight) = (batch.len(), matches!(batch, Batch::Returns(_)));
        Some(batch)
    }

    /// The batch was acknowledged, or will not be sent again.
    pub fn done(&mut self) {
        (self.in_flight, self.are_returns_in_flight) = (0, false);
    }

    /// Whether the daemon does not have all unused slots yet.
    pub fn is_returning(&self) -> bool {
        self.are_returns_in_flight || !self.returns.is_empty()
    }

    /// The batch was not acknowledged.
    pub fn put_back(&mut self, batch: Batch) {
        self.done();
        match batch {
            Batch::Commits(commits) => commits.into_iter().rev().for_each(|commit| self.commits.push_front(commit)),
            Batch::Aborts(slots) => slots.into_iter().rev().for_each(|slot| self.aborts.push_front(slot)),
            Batch::Returns(slots) => slots.into_iter().rev().for_each(|slot| self.returns.push_front(slot)),
            Batch::Releases { leases, lookups, saved: _ } => {
                leases.into_iter().rev().for_each(|lease| self.releases.push_front(lease));
                lookups.into_iter().rev().for_each(|lease| self.ends.push_front(lease));
            }
        }
    }

    /// Removes and returns the slots of commits of other epochs; they must be aborted.
    pub fn leave(&mut self, epoch: u64) -> Vec<Held> {
        let (stay, leave): (Vec<_>, Vec<_>) = self.commits.drain(..).partition(|commit| commit.epoch == epoch);
        self.commits = stay.into();
        leave.into_iter().flat_map(|commit| commit.slots).collect()
    }

    /// The slots of queued commits, which still belong to the engine.
    pub fn commit_slots(&self) -> impl Iterator<Item = Held> {
        self.commits.iter().flat_map(|commit| commit.slots.iter().copied())
    }

    /// Drops them: after a reconnect the daemon frees everything that is not declared.
    pub fn forget_aborts_and_releases(&mut self) {
        self.aborts.clear();
        self.returns.clear();
        self.releases.clear();
        self.ends.clear();
    }

    /// These slots no longer belong to the engine; `None` means all. Returns how many blocks of commits were lost
    /// with them.
    pub fn lost(&mut self, lost: Option<&HashSet<Held>>) -> usize {
        let before = self.commit_blocks();
        let is_kept = |slot: &Held| lost.is_some_and(|lost| !lost.contains(slot));
        self.commits = self.commits.drain(..).flat_map(|commit| commit.only(is_kept)).collect();
        self.aborts.retain(is_kept);
        self.returns.retain(is_kept);
        before - self.commit_blocks()
    }

    fn commit_blocks(&self) -> usize {
        self.commits.iter().map(|commit| commit.slots.len()).sum()
    }

    /// As many as one call may carry. A commit is never split, so a long one is sent alone.
    fn next_commits(&mut self) -> Vec<Commit> {
        let mut blocks = 0;
        let fits = |commit: &&Commit| {
            blocks += commit.slots.len();
            blocks <= COMMIT_BLOCKS
        };
        let count = self.commits.iter().take_while(fits).count().max(1);
        self.commits.drain(..count).collect()
    }
}

impl Batch {
    pub fn len(&self) -> usize {
        match self {
            Batch::Commits(commits) => commits.iter().map(|commit| commit.slots.len()).sum(),
            Batch::Aborts(slots) | Batch::Returns(slots) => slots.len(),
            Batch::Releases { leases, lookups, .. } => leases.len() + lookups.len(),
        }
    }
}

impl Commit {
    /// The runs that are left when some blocks are removed. A run after a gap still names the block before it: the
    /// daemon refuses the run if that block is absent.
    pub fn only(self, is_kept: impl Fn(&Held) -> bool) -> Vec<Commit> {
        if self.slots.iter().all(&is_kept) {
            return vec![self];
        }
        let (mut runs, mut run): (Vec<Commit>, Vec<(&[u8], Held)>) = (Vec::new(), Vec::new());
        let mut predecessor: &[u8] = &self.predecessor;
        let mut close = |run: &mut Vec<(&[u8], Held)>, predecessor: &[u8]| {
            if !run.is_empty() {
                let hashes = pack(run.iter().map(|(hash, _)| *hash)).unwrap_or_default();
                let slots = run.drain(..).map(|(_, slot)| slot).collect();
                runs.push(Commit { hashes, slots, predecessor: predecessor.to_vec(), ..self.head() });
            }
        };
        for (hash, slot) in self.hashes.iter().zip(&self.slots) {
            if is_kept(slot) {
                run.push((hash, *slot));
            } else {
                close(&mut run, predecessor);
                predecessor = hash;
            }
        }
        close(&mut run, predecessor);
        runs
    }

    pub fn message(&self) -> proto::GroupBlocks {
        proto::GroupBlocks {
            group: self.group,
            hash_bytes: self.hashes.hash_bytes() as u32,
            hashes: self.hashes.clone().into_packed(),
            predecessor: self.predecessor.clone(),
            slots: self.slots.iter().map(|held| held.slot).collect(),
            generations: self.slots.iter().map(|held| held.generation).collect(),
        }
    }

    fn head(&self) -> Commit {
        let (epoch, group) = (self.epoch, self.group);
        Commit { epoch, group, predecessor: Vec::new(), hashes: Hashes::default(), slots: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(slot: u32) -> Held {
        Held { slot, generation: 1 }
    }

    /// Blocks whose names are their slots' numbers.
    fn commit(epoch: u64, predecessor: &[u8], slots: &[u8]) -> Commit {
        Commit {
            epoch,
            group: 3,
            predecessor: predecessor.to_vec(),
            hashes: pack(slots.iter().map(std::slice::from_ref)).unwrap(),
            slots: slots.iter().map(|slot| held(u32::from(*slot))).collect(),
        }
    }

    #[test]
    fn a_commit_with_gaps_becomes_runs_that_name_the_block_before_them() {
        let whole = commit(1, b"p", &[1, 2, 3, 4, 5, 6]);
        let runs = whole.clone().only(|slot| ![1, 4, 5].contains(&slot.slot));
        assert_eq!(runs, [commit(1, &[1], &[2, 3]), commit(1, &[5], &[6])]);
        assert_eq!(whole.clone().only(|slot| slot.slot != 6), [commit(1, b"p", &[1, 2, 3, 4, 5])]);
        assert_eq!(whole.clone().only(|_| true), std::slice::from_ref(&whole));
        assert_eq!(whole.only(|_| false), []);
    }

    #[test]
    fn a_batch_that_was_not_acknowledged_comes_again_first() {
        let mut outbox = Outbox::default();
        outbox.commit(commit(1, b"", &[1, 2]));
        outbox.commit(commit(1, b"", &[3]));
        let batch = outbox.next(true).unwrap();
        outbox.commit(commit(1, b"", &[4]));
        assert_eq!(outbox.len(), 4);
        outbox.put_back(batch);
        let all = [commit(1, b"", &[1, 2]), commit(1, b"", &[3]), commit(1, b"", &[4])];
        assert_eq!(outbox.next(true), Some(Batch::Commits(all.to_vec())));
        outbox.done();
        assert_eq!((outbox.len(), outbox.next(true)), (0, None));
    }

    #[test]
    fn commits_wait_for_the_namespace_and_the_rest_does_not() {
        let mut outbox = Outbox::default();
        outbox.commit(commit(1, b"", &[1]));
        outbox.abort([held(2), held(3)]);
        outbox.release(7);
        outbox.end_lookup(8);
        assert_eq!(outbox.next(false), Some(Batch::Aborts(vec![held(2), held(3)])));
        let saved = Saved::default();
        assert_eq!(outbox.next(false), Some(Batch::Releases { leases: vec![7], lookups: vec![8], saved }));
        assert_eq!(outbox.next(false), None);
        assert!(matches!(outbox.next(true), Some(Batch::Commits(_))));
    }

    #[test]
    fn what_was_saved_goes_with_the_next_releases_and_never_twice() {
        let mut outbox = Outbox::default();
        outbox.save(Saved { tokens: 100, prefill_us: 7 });
        outbox.save(Saved { tokens: 20, prefill_us: 0 });
        assert_eq!(outbox.next(true), None, "it is no reason for a call");
        outbox.release(7);
        let all = Saved { tokens: 120, prefill_us: 7 };
        let batch = outbox.next(true).unwrap();
        assert_eq!(batch, Batch::Releases { leases: vec![7], lookups: vec![], saved: all });
        outbox.save(Saved { tokens: 3, prefill_us: 1 });
        outbox.put_back(batch);
        let rest = Saved { tokens: 3, prefill_us: 1 };
        assert_eq!(outbox.next(true), Some(Batch::Releases { leases: vec![7], lookups: vec![], saved: rest }));
    }

    #[test]
    fn a_call_carries_whole_commits_up_to_its_limit() {
        let mut outbox = Outbox::default();
        let hash = [7; 32];
        for blocks in [COMMIT_BLOCKS - 1, 1, 1, COMMIT_BLOCKS + 5] {
            let hashes = pack(std::iter::repeat_n(hash.as_slice(), blocks)).unwrap();
            outbox.commit(Commit { hashes, slots: vec![held(1); blocks], ..commit(1, b"", &[]) });
        }
        let sizes = std::iter::from_fn(|| outbox.next(true).map(|batch| batch.len()));
        assert_eq!(sizes.collect::<Vec<_>>(), [COMMIT_BLOCKS, 1, COMMIT_BLOCKS + 5]);
    }

    #[test]
    fn leaving_a_namespace_takes_its_commits_out() {
        let mut outbox = Outbox::default();
        outbox.commit(commit(1, b"", &[1, 2]));
        outbox.commit(commit(2, b"", &[3]));
        assert_eq!(outbox.leave(2), [held(1), held(2)]);
        assert_eq!(outbox.commit_slots().collect::<Vec<_>>(), [held(3)]);
    }

    #[test]
    fn lost_slots_drop_out_of_what_is_queued() {
        let mut outbox = Outbox::default();
        outbox.commit(commit(1, b"", &[1, 2, 3]));
        outbox.abort([held(2), held(9)]);
        assert_eq!(outbox.lost(Some(&HashSet::from([held(2)]))), 1);
        assert_eq!(outbox.commit_slots().collect::<Vec<_>>(), [held(1), held(3)]);
        assert_eq!(outbox.lost(None), 2);
        assert_eq!(outbox.next(true), None);
    }
}
