//! Everything that touches shared memory, disks and networks. `forebay-core` decides what to do with them.
//!
//! Invariant: `unsafe` appears only in the files that allow it by name, and each block there says who guarantees
//! what.

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod cancel;
pub mod conformance;
mod demand;
mod descriptors;
pub mod fs;
pub mod header;
#[cfg(feature = "object")]
pub mod object;
pub mod pool;
pub mod purge;
pub mod redis;
mod refusals;
pub mod secret_file;
mod seldom;
pub mod ssd;
mod store_report;
mod thread_time;
mod transfers;
pub mod trust;
pub mod uring;

pub use demand::{Demand, LONGEST_MS};
pub use seldom::Seldom;
pub use store_report::StoreReport;
pub use thread_time::thread_time;
