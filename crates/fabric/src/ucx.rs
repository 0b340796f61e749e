//! Payloads through UCX: one worker of libucp for each session, which sends and receives tagged messages.
//!
//! Only messages are used, never UCX's remote reads and writes: its software transports compare neither a key nor a
//! range. The receiver names a landing place by a random tag; the sender sends after it has compared rights and range.
//!
//! A session has a worker of its own, so that its end is one: nothing of another session waits for the same endpoint.
//! What a peer sends too late, or a stranger, has no landing place and is dropped.

mod library;
mod worker;

pub use worker::{Context, Failure, Job, Worker};

/// Major, minor and release of the system's libucp, which is loaded and stays so. Errors with `Unsupported` if there is
/// none, or none that sessions can use.
pub fn version() -> forebay_core::Result<[u32; 3]> {
    library::Library::open(None).map(|library| library.version())
}
