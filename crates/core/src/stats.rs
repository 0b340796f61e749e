//! The core's counters. Plain numbers; the daemon turns them into metrics.

use std::collections::VecDeque;

use crate::key::{Fingerprint, Instance};
use crate::miss::MissReason;

/// Who found that a block is not what was stored. The order is that of `Stats::corrupt`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Finder {
    /// The comparison of a recovered block, when it was first asked for.
    Restart,
    /// A worker that loaded it; the daemon looked for itself afterwards.
    Load,
    /// A client that the daemon copied it for.
    Get,
    /// The daemon, while it read the pool on its own account.
    Scrub,
    /// Somebody who asked for all blocks to be compared.
    Audit,
    /// The daemon, when a tier had promoted the block in several slices, or refused to write it.
    Tier,
}

impl Finder {
    /// All of them, in the order of `Stats::corrupt`.
    pub const ALL: [Finder; 6] =
        [Finder::Restart, Finder::Load, Finder::Get, Finder::Scrub, Finder::Audit, Finder::Tier];

    /// As it stands in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Finder::Restart => "restart",
            Finder::Load => "load",
            Finder::Get => "get",
            Finder::Scrub => "scrub",
            Finder::Audit => "audit",
            Finder::Tier => "tier",
        }
    }
}

/// Counts since the core was made. Bytes are those of whole slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that were looked up, each with all its groups. A lookup that is repeated while blocks are promoted
    /// counts once, with its last answer.
    pub lookups: u64,
    /// Keys asked about; `hits + misses.sum()` equals it.
    pub keys: u64,
    /// Keys answered as ready and, in full-attention groups, without a gap before them.
    pub hits: u64,
    /// Bytes of the hits.
    pub hit_bytes: u64,
    /// By `MissReason as usize`.
    pub misses: [u64; MissReason::ALL.len()],
    /// Slots given out for filling.
    pub reserved: u64,
    /// Calls of `reserve` that gave fewer slots than they were asked for, or none.
    pub short_reservations: u64,
    /// Blocks that were committed and became ready.
    pub stored: u64,
    /// Bytes of those.
    pub stored_bytes: u64,
    /// Commits of a block that was there already.
    pub duplicates: u64,
    /// Commits of a block whose predecessor is neither in the pool nor on a tier.
    pub orphans: u64,
    /// Commits without the births of all ranks, or into a slot of another size.
    pub incomplete: u64,
    /// Commits of a slot that was not the instance's.
    pub lost: u64,
    /// Reserved slots that their instance gave back unfilled.
    pub aborted: u64,
    /// Blocks that were evicted.
    pub evicted: u64,
    /// Bytes of those.
    pub evicted_bytes: u64,
    /// Blocks in the index that purges removed.
    pub purged: u64,
    /// Blocks of an earlier epoch that were found in the table.
    pub recovered: u64,
    /// Of those, blocks that were whole when they were first asked for and compared.
    pub verified: u64,
    /// Ready blocks that were compared because a worker said that they are not what was stored.
    pub suspected: u64,
    /// Blocks that were not what was stored, by `Finder as usize`.
    pub corrupt: [u64; Finder::ALL.len()],
    /// Bytes of the slots that were given out to be read by the scrub.
    pub scrubbed_bytes: u64,
    /// Walks of the scrub over all blocks that ended.
    pub scrubs: u64,
    /// Extents that were drained, so that another class could have their memory.
    pub extents_moved: u64,
    /// Blocks that left a draining extent for another slot.
    pub moved: u64,
}

impl Stats {
    /// Keys that were misses, for whatever reason.
    pub fn miss_count(&self) -> u64 {
        self.misses.iter().sum()
    }

    pub(crate) fn count(&mut self, lookup: &Counts) {
        self.lookups += 1;
        self.keys += lookup.keys;
        self.hits += lookup.hits;
        self.hit_bytes += lookup.hit_bytes;
        self.misses.iter_mut().zip(lookup.misses).for_each(|(sum, more)| *sum += more);
    }
}

/// What one lookup found, as in [`Stats`].
#[derive(Default)]
pub(crate) struct Counts {
    pub keys: u64,
    pub hits: u64,
    pub hit_bytes: u64,
    pub misses: [u64; MissReason::ALL.len()],
}

impl Counts {
    /// Whether who asked was told to ask again.
    pub fn is_unfinished(&self) -> bool {
        MissReason::ALL.iter().any(|reason| reason.is_passing() && self.misses[*reason as usize] > 0)
    }
}

/// Lookups that were answered "not yet", oldest first, by instance and last key: the hash of a block stands for all
/// blocks before it, so another request with the same last key asks for the same blocks.
#[derive(Default)]
pub(crate) struct Unfinished(VecDeque<(Instance, Fingerprint, Counts)>);

impl Unfinished {
    /// As many as an engine has under way. A lookup that is never repeated is counted when so many others have come.
    const MOST: usize = 64;

    /// The lookup is asked again.
    pub fn forget(&mut self, instance: Instance, last: Fingerprint) {
        self.0.retain(|(by, key, _)| (*by, *key) != (instance, last));
    }

    /// Keeps a lookup; what falls out is not expected any more.
    pub fn keep(&mut self, instance: Instance, last: Fingerprint, counts: Counts) -> Option<Counts> {
        self.0.push_back((instance, last, counts));
        let oldest = if self.0.len() > Unfinished::MOST { self.0.pop_front() } else { None };
        oldest.map(|(_, _, counts)| counts)
    }

    /// Nobody of this instance asks again.
    pub fn take(&mut self, instance: Instance) -> Vec<Counts> {
        let (its, others): (Vec<_>, _) =
            std::mem::take(&mut self.0).into_iter().partition(|(by, _, _)| *by == instance);
        self.0 = others.into();
        its.into_iter().map(|(_, _, counts)| counts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_never_asked_again_is_counted_when_so_many_others_came() {
        let mut unfinished = Unfinished::default();
        let lookup = |keys| Counts { keys, ..Counts::default() };
        let at_once = Unfinished::MOST as u64;
        for key in 0..at_once {
            assert!(unfinished.keep(Instance(1), Fingerprint(key), lookup(key)).is_none());
        }
        unfinished.forget(Instance(2), Fingerprint(0));
        unfinished.forget(Instance(1), Fingerprint(1));
        assert!(unfinished.keep(Instance(2), Fingerprint(1), lookup(at_once)).is_none());
        let oldest = unfinished.keep(Instance(1), Fingerprint(1), lookup(1)).expect("the limit is reached");
        assert_eq!(oldest.keys, 0);
        assert_eq!(unfinished.take(Instance(2)).len(), 1);
        assert_eq!(unfinished.take(Instance(1)).len() as u64, at_once - 1);
    }
}
