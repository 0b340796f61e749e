//! The SSD tier: bounded, crash-safe, checksummed, without copies between pool and disk.
//!
//! In the order data passes: [`SsdConfig`] → [`DiskClaim`] of each disk (locks; has an earlier daemon's I/O ended?), by
//! a [`ClaimProcess`] where nobody may wait for a disk that hangs → [`DiskClaim::open`] → [`Ssd`], a
//! [`forebay_core::tier::Tier`] beside `tick`, `register`, `block`, `walk`, `take_found`, `take_evicted`, `report`.
//! Disks come one by one, through an [`Inbox`]. Without a daemon: [`Inspection`].
//!
//! Invariants, each with tests: a stored block survives any crash. An incomplete block is never found. A loaded block
//! has the requested key and the bytes that were stored. One daemon uses a disk. Space and memory are bounded.
//! `docs/formats/ssd.md` draws the disk; `docs/tiers/ssd.md` says what the tier promises and how it fails.

pub mod bench;
mod budget;
mod claim;
mod claim_process;
mod closing;
mod config;
mod device;
mod disk;
mod examine;
mod flush;
mod footer;
mod inbox;
mod index;
mod inspect;
mod io;
mod layout;
mod listing;
mod lists;
mod log;
mod mounts;
mod noting;
mod owner;
mod placement;
mod places;
mod pool_purges;
mod purges;
mod read_ahead;
mod reader;
mod reads;
mod reclaim;
mod recover;
mod report;
mod space;
mod staging;
mod tier;
mod void;
mod watch;
mod writer;

pub use claim::{DiskClaim, OpenedDisk};
pub use claim_process::{Answer, ClaimProcess, answer_claim};
pub use config::{DiskConfig, SsdConfig};
pub use device::{DAEMON_BYTE, TRANSFERS_BYTE};
pub use examine::{Look, Prospect, check_twins, examine, named_twice};
pub use inbox::Inbox;
pub use index::MEMORY_BYTES_PER_BLOCK;
pub use inspect::{Audit, Inspection};
pub use layout::Geometry;
pub use layout::VERSION as FORMAT_VERSION;
pub use pool_purges::PoolPurges;
pub use purges::purge_time_after;
pub use recover::Medium;
pub use report::{BlockInfo, Counters, DiskReport, Recovery, SegmentReport};
pub use space::SegmentState;
pub use staging::STAGING_BYTES;
pub use tier::{HeldBlock, Ssd, Walked};
