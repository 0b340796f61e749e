//! The core's counters. Plain numbers; the daemon turns them into metrics.

use crate::key::TierId;
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
    /// A tier, that had it or was to write it, or the daemon, when a tier had promoted it in several slices.
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
    /// Requests that were looked up, each with all its groups. A lookup counts once, with its last answer for
    /// each key.
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
    /// Of the hits, those on blocks that a tier had just brought up, by tier.
    pub hits_of_tiers: [u64; TierId::MAX],
    pub misses: [u64; MissReason::ALL.len()],
}

impl Counts {
    /// Takes out the keys that are asked again, because they were "not yet".
    pub fn forget_passing(&mut self) {
        for reason in MissReason::ALL.into_iter().filter(|reason| reason.is_passing()) {
            self.keys -= std::mem::take(&mut self.misses[reason as usize]);
        }
    }
}
