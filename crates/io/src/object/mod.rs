//! The object tier: blocks as objects of an S3-compatible store.
//!
//! In the order data passes: [`ObjectConfig`] → [`Object`], a [`forebay_core::tier::Tier`] → `client` (one thread with all
//! requests) → `moves` (one block: header and payload in one object).
//!
//! Invariants, each with tests: what is loaded has the key asked for and the bytes that were stored; bytes from the
//! network go to memory of the tier's own and to a slot only when they were verified and somebody still waits for them;
//! requests, queues and memory are bounded. What the tier promises and how it fails is told in
//! `docs/tiers/object.md`.

mod client;
mod config;
mod moves;
mod purge;
mod report;
mod tier;

pub use config::{ObjectConfig, Secret};
pub use report::{Counters, ObjectReport};
pub use tier::Object;
