//! The daemon: drives the core with a real pool, real sockets and real processes.
//!
//! One thread runs everything that decides: the gRPC service, the attach socket, the ticks and the HTTP pages
//! share a current-thread runtime and one `State`, locked for one event at a time and never across an await.
//! What takes long (populating memory, verifying recovered blocks, copies of `Put` and `Get`) runs on threads of
//! its own and comes back with an event.
//!
//! Reading order: `serve` (start and end), `state` (the owner of all), `service` (the control plane), `attach`
//! (workers), `recover`, `populate`, `verify`, `scrub`, `tick`, `tiers` (what lies below the pool), `insight` (how good the
//! hit rate is), `vital` (what ends the daemon).

#![forbid(unsafe_code)]

mod attach;
pub mod config;
pub mod http;
mod insight;
mod instances;
mod listen;
pub mod metrics;
mod populate;
mod recover;
mod relocate;
mod scrub;
mod serve;
mod service;
mod state;
mod tick;
mod tiers;
mod verify;
mod vital;

pub use serve::serve;
pub use vital::abort_on_panic;
