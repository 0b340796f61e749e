//! The daemon's clients.
//!
//! In path order: [`connect`] makes the connection that both kinds use, [`Client`] is for programs that call and
//! wait, [`EngineSession`] is for an inference engine, which never waits.

mod backoff;
mod configuration;
mod connect;
mod lending;
mod plain;
pub mod session;
mod sockets;
mod trial;
mod trust;

pub use backoff::Backoff;
pub use configuration::{CONFIG_VARIABLE, USUAL_CONFIG, config_file, read_config};
pub use connect::{Rpc, connect};
pub use lending::{Lend, Memory, Sink, Source};
pub use plain::{Client, GroupBytes, lone_session};
pub use session::{EngineSession, SessionConfig, SessionState, Ticket};
pub use sockets::{find_sockets, knock, look_for_sockets, sockets_of_variables, usual_sockets};
pub use trial::Trial;
pub use trust::{peer, socket, unreachable};
