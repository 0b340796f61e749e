//! Forebay's decisions: a deterministic state machine over keys, slots, leases and tiers.
//!
//! Invariants: nothing here reads a clock, starts a thread, opens a file or contains `unsafe`; events bring the time.
//! The daemon drives this crate with real tiers, the simulator with traces, and the tests with seeds.
//!
//! Reading order: `key`, `layout`, `namespace` (names and sizes). Then the parts, each of which owns its state: `slots`
//! (who may use each slot), `cache` with `policy` (which block each key has, and which is evicted next), `leases`,
//! `hints` (which blocks waiting requests need), `tiers` (which blocks are on lower tiers), `rebalance`, `scrub`,
//! `journal` (effects and counts). Then `core` (the parts together) and `paths` (one event each: `store`, `lookup`,
//! `promote`, `prefetch`, `write_back`, `evict` and others). Beside them `tier` and `decorate` (what a tier can do, and
//! the decorators around it), `trust` (which files are trusted) and `size` (sizes as people write them).

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod cache;

mod chunked;
pub mod core;
pub mod decorate;
pub mod error;
pub mod hints;
pub mod histogram;
mod journal;
pub mod key;
pub mod layout;
mod leases;
pub mod miss;
pub mod namespace;
pub mod nodes;
mod paths;
pub mod policy;
mod rebalance;
mod scrub;
pub mod size;
mod slots;
pub mod stats;
mod tables;
pub mod tier;
pub mod tiers;
pub mod trust;

pub use paths::{lookup, purge, recover, report, store};

pub use forebay_checksum as checksum;

pub use crate::core::{Config, Core};
pub use error::{Error, ErrorKind, Result};
pub use journal::Effect;
pub use key::{
    BlockHash, BlockId, BlockKey, ClassId, Fingerprint, Generation, Instance, NamespaceId, NamespaceIndex, PAGE_BYTES,
    PackedKeys, SlotId,
};
