//! Forebay's decisions: a deterministic state machine over keys, slots, leases and tiers.
//!
//! Invariants: nothing here reads a clock, starts a thread, opens a file or contains `unsafe`; time comes in
//! with events. The daemon drives this crate with real tiers, the simulator with traces, the tests with seeds.
//!
//! Reading order: `key`, `layout`, `namespace` (the words); `space`, `block`, `index`, `policy` (what is kept);
//! `core` (the state machine), `load`, `store`, `room`, `relocate` (its paths), `below` (the tiers under the pool),
//! `recover`, `purge` (what outlives whom), `corrupt`, `scrub` (what is dropped for its bytes, what is read to find it), `trust`
//! (whose files are believed); `tier`, `decorate` (what a tier can do, and what is put around each); `rehearsal`, `curve` (all of it without payloads,
//! and in miniature).

#![forbid(unsafe_code)]

pub mod below;
pub mod block;
pub mod ceiling;
pub mod checksum;
mod chunked;
pub mod core;
pub mod corrupt;
pub mod curve;
pub mod decorate;
pub mod error;
pub mod expect;
pub mod histogram;
pub mod index;
pub mod key;
pub mod layout;
pub mod load;
pub mod miss;
#[cfg(test)]
mod mix;
mod names;
pub mod namespace;
pub mod optimum;
pub mod policy;
pub mod purge;
pub mod recover;
pub mod rehearsal;
mod relocate;
pub mod report;
mod room;
mod scrub;
pub mod space;
pub mod stats;
pub mod store;
mod tables;
pub mod tier;
pub mod trust;

pub use crate::core::{Config, Core, Effect};
pub use error::{Error, ErrorKind, Result};
pub use key::{BlockHash, BlockKey, Generation, Instance, NamespaceId, PAGE_BYTES, SlotId};
