//! The daemon's clients.
//!
//! In path order: [`connect`] makes the connection that both kinds use, [`Client`] is for programs that call and
//! wait, [`EngineSession`] is for an inference engine, which never waits.

mod backoff;
mod connect;
mod plain;
pub mod session;
mod sockets;
mod trust;

pub use backoff::Backoff;
pub use connect::{Rpc, connect};
pub use plain::{Client, GroupBytes, lone_session};
pub use session::{EngineSession, SessionConfig, SessionState, Ticket};
pub use sockets::{find_sockets, sockets_of_variables};
pub use trust::{peer, socket, unreachable};
