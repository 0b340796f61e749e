//! The reasons of misses.

/// Why a key that was asked for was not served. The order is that of `Stats::misses`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum MissReason {
    /// Not among the keys that are remembered: never stored, or too long ago.
    NeverSeen,
    /// Was in the pool, and was evicted.
    Evicted,
    /// Not admitted: its predecessor was absent, or the policy refused it.
    Refused,
    /// A checksum or a tier failed, or no shared tier could tell whether it has the key.
    Failed,
    /// Found on a lower tier, but not in time.
    TooSlow,
    /// Being verified after a restart, or behind one that is not ready yet.
    NotYet,
    /// The same block exists under another model, layout or tenant.
    OtherNamespace,
    /// Ready or on a lower tier, but leases hold all memory that they may, or all of its size.
    OverLimit,
    /// On its way up from a lower tier.
    PromotionUnfinished,
}

impl MissReason {
    /// All of them, in the order of `Stats::misses`.
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
