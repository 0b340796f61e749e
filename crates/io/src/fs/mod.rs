//! The filesystem tier: directories, local or NFS, that hosts share without talking to each other.
//!
//! In the order data passes: [`FsConfig`] → `directory` (is this ours, may we write?) → [`Fs`], a
//! [`forebay_core::tier::Tier`] → `lane` (queues, threads and bounce buffers of one directory) → `writer` and `reader` (one file
//! a block) → `keeper` (one sweeper among all hosts: capacity, age, orphans).
//!
//! Invariants, each with tests: a name leads to a whole object or to none, whatever is killed when; what is loaded
//! has the key asked for and the bytes that were stored; a mount that hangs costs its own threads and bounce buffers,
//! never a slot of the pool and never the caller; a directory holds no more than its capacity and what is in flight.
//! The directory is drawn in `docs/formats/directory.md`; what the tier promises and how it fails is told in
//! `docs/tiers/fs.md`.

mod buffer;
mod census;
mod config;
mod directory;
mod keeper;
mod lane;
mod layout;
mod lease;
mod ledger;
mod purge;
mod reader;
mod report;
mod root;
mod tier;
mod walk;
mod writer;

pub use config::{FsConfig, Fsync};
pub use report::{Counters, FsReport, RootReport};
pub use tier::Fs;
