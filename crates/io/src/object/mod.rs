//! The object tier: blocks as objects of an S3-compatible store.
//!
//! In the order data passes: [`ObjectConfig`] → [`Object`], a [`forebay_core::tier::Tier`] → `client` (one thread
//! with all requests) → `moves` (one block: header and payload in one object).
//!
//! Invariants, each with tests: a loaded block has the requested key and the bytes that were stored. Bytes from the
//! network go to memory of the tier's own, and to a slot only after they were verified and while somebody still
//! waits. Requests, queues and memory are bounded. `docs/tiers/object.md` says what the tier promises and how it
//! fails.

mod client;
mod config;
mod moves;
mod purge;
mod report;
mod tier;

pub use config::{ObjectConfig, Secret};
pub use report::{Counters, ObjectReport};
pub use tier::Object;
