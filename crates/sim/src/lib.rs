//! Replays request traces on the real core, with payloads that do not exist and time that is simulated.
//!
//! Reading order: `trace` (what a trace is), `read` (its forms on disk), `capacity`, `replay` (one policy at one
//! capacity, on the core's `rehearsal`), `bounds` (what no policy can exceed), `mix` (harder traffic), `estimate`
//! (the core's own estimates), `simulate` (all of it side by side), `table` and `plot` (what people see).

#![forbid(unsafe_code)]

pub mod bounds;
pub mod capacity;
pub mod estimate;
pub mod mix;
pub mod plot;
pub mod read;
pub mod replay;
pub mod simulate;
pub mod table;
pub mod trace;

pub use replay::{Outcome, Setup, replay};
pub use simulate::{Arguments, Row, simulate};
pub use trace::{Request, Trace, merge};
