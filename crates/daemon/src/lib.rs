//! The daemon: drives the core with a real pool, real sockets and real processes.
//!
//! One thread makes all decisions: the gRPC service, the attach socket, the ticks and the HTTP pages share a
//! current-thread runtime and one `State`, which is locked for one event at a time and never across an await. Long work
//! (populating memory, verifying recovered blocks, large messages, copies of `Put` and `Get`) runs on other threads,
//! which report the result with an event, or let a task of this thread report it if they run at low priority.
//!
//! Reading order: `serve` (start and end), `state` (the owner of all), `table` (the pool's table), `tiers` (the lower
//! tiers and their drivers), `service` (calls of clients), `clients` (what each user may take), `tasks` (work beside
//! the calls), `recover`, `insight` (estimates of the hit rate), `frame` (what an operator asks), `turns` (what keeps
//! the thread), `vital` (what ends the daemon).

#![forbid(unsafe_code)]

mod clients;
pub mod config;
mod follows;
mod frame;
pub mod health;
pub mod http;
mod insight;
mod instances;
mod listen;
mod loans;
pub mod metrics;
mod namespaces;
mod nodes;
mod own_files;
mod precedence;
mod purges;
mod random;
mod recover;
mod serve;
mod service;
mod state;
mod table;
mod tasks;
#[cfg(test)]
mod tests;
mod tiers;
mod turns;
mod vital;

pub use serve::serve;
pub use tiers::{CLAIM_COMMAND, Disks, IndexMemory};
pub use vital::{abort_on_panic, check_threads, current_thread_runtime, write_whole};
