//! Why a miss missed: a small, lossy memory of keys that are no longer, or never were, in the pool.
//!
//! One entry a place, newest wins; a forgotten key is reported as never seen. Reasons add up to all misses.

use std::hint::black_box;

use crate::block::NamespaceIndex;
use crate::key::BlockHash;

/// Why a key that was asked for was not served. The order is that of `Stats::misses`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum MissReason {
    NeverSeen,
    Evicted,
    /// Not admitted: its predecessor was absent, or the policy refused it.
    Refused,
    /// A checksum or a tier failed.
    Failed,
    /// Found on a lower tier, but not in time.
    TooSlow,
    /// Being verified after a restart, or behind one that is not ready yet.
    NotYet,
    /// The same block exists under another model, layout or tenant.
    OtherNamespace,
    /// Ready, but the engine's promises are at their limit.
    OverLimit,
    /// On its way up from a lower tier.
    PromotionUnfinished,
}

impl MissReason {
    pub const ALL: [MissReason; 9] = [
        MissReason::NeverSeen,
        MissReason::Evicted,
        MissReason::Refused,
        MissReason::Failed,
        MissReason::TooSlow,
        MissReason::NotYet,
        MissReason::OtherNamespace,
        MissReason::OverLimit,
        MissReason::PromotionUnfinished,
    ];

    /// Whether the key may be a hit if it is asked for again soon.
    pub fn is_passing(self) -> bool {
        matches!(self, MissReason::NotYet | MissReason::PromotionUnfinished)
    }

    /// As it stands in metrics.
    pub fn name(self) -> &'static str {
        match self {
            MissReason::NeverSeen => "never_seen",
            MissReason::Evicted => "evicted",
            MissReason::Refused => "refused",
            MissReason::Failed => "failed",
            MissReason::TooSlow => "too_slow",
            MissReason::NotYet => "not_yet",
            MissReason::OtherNamespace => "other_namespace",
            MissReason::OverLimit => "over_limit",
            MissReason::PromotionUnfinished => "promotion_unfinished",
        }
    }
}

/// The last thing that happened to a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Fate {
    Stored = 1,
    Evicted,
    Refused,
    Failed,
}

pub struct Memory {
    /// Tag (32 bits), namespace (24 bits), fate (8 bits). Zero: empty.
    entries: Box<[u64]>,
    seed: u64,
}

impl Memory {
    /// 8 bytes an entry; touched pages only.
    pub fn new(entries: usize, seed: u64) -> Memory {
        Memory { entries: vec![0; entries.next_power_of_two()].into_boxed_slice(), seed }
    }

    pub fn note(&mut self, namespace: NamespaceIndex, group: u16, hash: &BlockHash, fate: Fate) {
        let (at, tag) = self.place(group, hash.as_bytes());
        self.entries[at] = tag << 32 | u64::from(namespace.0 & 0xff_ffff) << 8 | fate as u64;
    }

    /// Brings entries into the processor's cache.
    pub fn warm<'a>(&self, keys: impl Iterator<Item = (u16, &'a [u8])>) {
        black_box(keys.fold(0, |sum, (group, hash)| sum ^ self.entries[self.place(group, hash).0]));
    }

    /// What happened last to this hash, and in which namespace.
    pub fn recall(&self, group: u16, hash: &[u8]) -> Option<(NamespaceIndex, Fate)> {
        let (at, tag) = self.place(group, hash);
        let entry = self.entries[at];
        let fate =
            [Fate::Stored, Fate::Evicted, Fate::Refused, Fate::Failed].into_iter().find(|f| *f as u8 == entry as u8)?;
        (entry >> 32 == tag).then_some((NamespaceIndex((entry >> 8) as u32 & 0xff_ffff), fate))
    }

    pub fn heap_bytes(&self) -> usize {
        self.entries.len() * 8
    }

    fn place(&self, group: u16, hash: &[u8]) -> (usize, u64) {
        let key = crate::index::Fingerprint::new(self.seed, NamespaceIndex(0), group, hash).0;
        (key as usize & (self.entries.len() - 1), key >> 32)
    }
}
