//! The estimates of the hit rate, as metrics and `forebay advise` report them.

use forebay_insight::ceiling::{Estimate, WINDOWS_US};
use forebay_insight::optimum::Sampled;

/// All that is estimated, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    pub windows: [Option<Estimate>; WINDOWS_US.len()],
    pub all: Share,
    pub namespaces: Vec<Share>,
    /// Groups of lookups that were not looked at, because too many waited.
    pub left_out: u64,
}

/// What is estimated for all, or for one namespace of those that share the tiers.
#[derive(Clone, Debug, Default)]
pub struct Share {
    /// Id of the namespace; "all", or "others".
    pub name: String,
    /// The hits are those of all tiers; the optimum is that of the pool.
    pub sampled: Sampled,
    /// With the optimum of pool and disk together, if a disk of known size is configured; another sample.
    pub sampled_tiers: Option<Sampled>,
    /// (capacity, hit ratio) of a half of the pool's bytes, all of them, and more, with the disk there is.
    pub curve: Vec<(u64, f64)>,
    /// (capacity, hit ratio) of the pool as it is, alone and with disks of these sizes under it.
    pub disk_curve: Vec<(u64, f64)>,
}
