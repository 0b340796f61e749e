//! An operator's settings for the pool.

use std::path::PathBuf;

/// Where the pool lies and how large it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Holds the region files, or the private mount `mnt` with them in it. Created (mode 0700) if missing.
    pub directory: PathBuf,
    /// Bytes of slots; rounded down to whole units.
    pub capacity_bytes: u64,
    /// Memory is assigned in pieces of this size, a power of two from 2 MiB to 256 MiB. Without it an existing pool
    /// keeps its unit size, and a new one takes about a sixteenth of the capacity.
    pub unit_bytes: Option<u64>,
    /// What to do where 2 MiB pages are not to be had.
    pub huge_pages: HugePages,
}

/// How hard to try for 2 MiB pages. They make mapping and registering the pool 10 to 250 times cheaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// The best that this machine offers: hugetlbfs, a tmpfs with huge pages, `MADV_COLLAPSE`, or small pages with a
    /// warning.
    #[default]
    Auto,
    /// Small pages, without trying anything else.
    Off,
    /// Refuse to start on small pages.
    Require,
}
