//! The SSD tier: bounded, crash-safe, checksummed, without copies between pool and disk.
//!
//! In the order data passes: [`SsdConfig`] → [`Claim`] (locks; is an earlier daemon's I/O over?) → [`Claim::open`]
//! → [`Ssd`], a [`forebay_core::tier::Tier`] beside `tick`, `register`, `block`, `blocks`, `take_evicted`, `report`. Without a
//! daemon: [`Inspection`].
//!
//! Invariants, each with tests: a stored block survives any crash; a block that is not whole is never found; what
//! is loaded has the key asked for and the bytes that were stored; one daemon uses a disk; space and memory are
//! bounded. The disk is drawn in `docs/formats/ssd.md`; what the tier promises and how it fails is told in
//! `docs/tiers/ssd.md`.

mod batch;
pub mod bench;
mod budget;
mod config;
mod device;
mod disk;
mod flush;
mod footer;
mod index;
mod inspect;
mod io;
mod layout;
mod reader;
mod reclaim;
mod recover;
mod report;
mod space;
mod staging;
mod tier;
mod writer;

pub use config::{DiskConfig, SsdConfig};
pub use device::{DAEMON_BYTE, TRANSFERS_BYTE};
pub use inspect::{Audit, Inspection};
pub use layout::Geometry;
pub use recover::Medium;
pub use report::{BlockInfo, Counters, DiskReport, Recovery, SegmentReport};
pub use space::SegmentState;
pub use staging::STAGING_BYTES;
pub use tier::{Claim, Ssd};
