//! The tiers below the pool, driven: what the core decides goes down as operations, what ends comes back as events.
//!
//! `open` (claim, wait for an earlier daemon's transfers, read what is there) → `driver` (effects to operations,
//! completions to events) → `run` (the tier's wake-up and the clock). Nothing waits for a tier: until it is open,
//! when it is sick, and when it is late, its blocks are misses.
//!
//! Invariants: an operation is submitted after its slot is written down as held; each ends exactly once in the core;
//! what waits here is bounded by what the core has under way.

mod driver;
mod open;
mod purge;
mod report;
mod run;

pub use driver::Driver;
pub use open::{Opening, claim};
pub use report::{Report, Standing};
pub use run::start;
