//! One-sided reads and writes between processes, over TCP, shared memory or UCX, with one interface.
//!
//! A [`Fabric`] belongs to one thread, which polls it. In path order: [`Memory`] is registered under some [`Rights`]
//! and exported as a [`Descriptor`]; a peer connects to an [`Address`], imports the descriptor, and submits operations
//! on it. `fabric` decides and keeps the books, `line` is one connection, `wire` the bytes on it, `socket` the two
//! calls that move them, `tls` what encrypts them, `ucx` another way for payloads, `auth` who may connect. An
//! [`Endpoint`] is a fabric with a thread of its own, for programs.
//!
//! Invariants:
//!
//! - Every operation ends exactly once, with [`Event::Done`], and before its peer is [`Event::Gone`].
//! - Whatever ends an operation (deadline, giving up, deregistering, the end of the session), its local memory is the
//!   caller's again when [`Event::Done`] is there: what comes later is dropped, what is still being sent is a copy.
//!   Over UCX, an operation that ends early ends its session, and [`Event::Done`] comes up to 0.1 s later.
//! - Nothing is read or written that was not exported, and nothing after [`Event::Deregistered`]. A process that was
//!   killed and started again has other descriptors.
//! - Everything that a peer can send has a limit, which is compared before anything is allocated.
//! - Nothing spins, and nothing waits but `poll`.

mod address;
mod auth;
mod endpoint;
mod fabric;
mod ids;
mod line;
mod memory;
mod socket;
mod tls;
mod ucx;
mod wire;

pub use address::Address;
pub use auth::Secret;
pub use endpoint::{Endpoint, Finished, Released, Report};
pub use fabric::{Descriptor, Event, Fabric, Operation, Options, Rights, Segment, Verb};
pub use ids::{OpId, PeerId, RegionId, RemoteId};
pub use memory::Memory;
pub use ucx::version as ucx_version;
pub use wire::{MESSAGE_WINDOW, MOST_CONNECTIONS, MOST_MESSAGE_BYTES, PIECE_BYTES};
