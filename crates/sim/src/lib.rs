//! Replays request traces on the real core, without payloads and in simulated time.
//!
//! Reading order: `trace` (a trace in memory), `read` (its forms on disk), `capacity`, `replay` (one policy at one
//! capacity, on `forebay_insight::rehearsal`), `policy` (policies beside the core's), `bounds` (the upper bound of
//! every policy), `mix` (harder traffic),
//! `estimate` (the daemon's own estimates), `fleet` (hosts on one shared store), `simulate` (all of it side by side),
//! `table` and `plot` (the output), `chart` (pictures, also of measurements).

#![forbid(unsafe_code)]

pub mod bounds;
pub mod capacity;
pub mod chart;
pub mod estimate;
pub mod fleet;
pub mod mix;
pub mod plot;
pub mod policy;
pub mod read;
pub mod replay;
pub mod rounds;
pub mod simulate;
pub mod table;
pub mod trace;

pub use replay::{Outcome, Setup, replay};
pub use simulate::{Arguments, Row, check, simulate};
pub use trace::{Request, Trace, merge};
