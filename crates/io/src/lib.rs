//! Everything that touches shared memory, disks and networks; what to do with them is decided in `forebay-core`.
//!
//! Invariant: `unsafe` appears only in the files that allow it by name, and each block there says who
//! guarantees what.

#![deny(unsafe_code)]

pub mod arena;
pub mod conformance;
pub mod fs;
pub mod header;
#[cfg(feature = "object")]
pub mod object;
pub mod purge;
pub mod redis;
pub mod ssd;
mod store;
mod ticket;
mod transfers;
pub mod trust;
pub mod uring;

pub use store::StoreReport;
