//! The filesystem tier: directories, local or NFS, that hosts share without communicating with each other.
//!
//! In the order data passes: [`FsConfig`] → `directory` (is it ours, may we write?) → [`Fs`], a
//! [`forebay_core::tier::Tier`] → `io_threads` (queues, threads and bounce buffers of one directory) → `writer` and
//! `reader` (one file per block) → `sweeper` (one sweeper among all hosts: capacity, age, orphans).
//!
//! Invariants, each with tests:
//! - A name leads to a whole object or to none, whichever process is killed at whatever moment.
//! - A loaded block has the requested key and the bytes that were stored.
//! - Nothing outside the directory is read or changed, whatever links others put into it (`folder`).
//! - A mount that hangs costs its own threads and bounce buffers, never a slot of the pool, and never blocks the
//!   caller.
//! - A directory holds no more than its capacity plus what is in flight.
//!
//! - A directory that is missing at the start costs its own blocks, and is taken up when it comes (`missing`).
//!
//! `docs/formats/directory.md` draws the directory. `docs/tiers/fs.md` says what the tier promises and how it fails.

mod aside;
mod buffer;
mod config;
mod directory;
mod folder;
mod grants;
mod ground;
mod hand;
mod io_threads;
mod layout;
mod lease;
mod missing;
mod purge;
mod reader;
mod report;
mod root;
mod samples;
mod sweeper;
mod tier;
mod walk;
mod writer;

pub use config::{FsConfig, Fsync};
pub use report::{Counters, FsReport, RootReport};
pub use tier::{Fs, Opening, examine};
