//! What an operator says about the pool.

use std::path::PathBuf;

/// Where the pool lies and how large it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Holds the region files, or the private mount `mnt` with them in it. Created (mode 0700) where missing.
    pub directory: PathBuf,
    /// Bytes of slots; rounded down to whole units.
    pub capacity_bytes: u64,
    /// Memory is handed out in pieces of this size, a power of two from 2 MiB to 256 MiB. Without it an
    /// existing pool keeps its own, and a new one takes about a sixteenth of the capacity.
    pub unit_bytes: Option<u64>,
    pub huge_pages: HugePages,
}

/// How hard to try for 2 MiB pages, which make mapping and registering the pool 10 to 250 times cheaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// The best this machine gives: hugetlbfs, a tmpfs that has huge pages, `MADV_COLLAPSE`, or small pages
    /// with a warning.
    #[default]
    Auto,
    /// Small pages, without asking.
    Off,
    /// Refuse to start on small pages.
    Require,
}
