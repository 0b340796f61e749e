//! Forebay's decisions: a deterministic state machine over keys, slots, leases and tiers.
//!
//! Invariants: nothing here reads a clock, starts a thread, opens a file or contains `unsafe`; time comes in
//! with events. The daemon drives this crate with real tiers, the simulator with traces, the tests with seeds.

#![forbid(unsafe_code)]

pub mod checksum;
pub mod error;
pub mod key;
pub mod layout;
pub mod namespace;

pub use error::{Error, ErrorKind, Result};
pub use key::{BlockHash, BlockKey, Generation, Instance, NamespaceId, PAGE_BYTES, SlotId};
