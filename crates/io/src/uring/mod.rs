//! Block I/O between one file or device and the memory of pool and tiers, without copies.
//!
//! - [`Memory`] is what may be read and written: the pool, passed once, and a tier's own staging pages. A [`Span`]
//!   names a piece of it, so that no addresses are passed around.
//! - [`Engine`] takes [`Request`]s and returns [`Done`]s, in any order. [`Uring`] uses one ring and one thread per
//!   disk. [`Threads`] uses plain system calls where rings are forbidden. [`Simulated`] is a disk in memory that
//!   fails, tears, reorders and loses power as a test wishes. [`start`] picks one and gives the reason.
//! - [`Private`] is memory that belongs to one tier, which may borrow it as bytes.
//! - [`Region::send`] and [`Region::receive`] move bytes between the pool and a socket; [`wake_at`] sets how many
//!   bytes are worth a wake-up.
//! - [`try_lock`] marks a file as in use, [`is_locked`] tests that.
//!
//! Invariants: a request's memory is mapped until the request is done, even when its owner is long gone. An engine
//! repeats nothing and hides nothing: the caller continues short transfers and `EINTR`.

mod engine;
mod lock;
mod memory;
mod private;
mod registration;
mod ring;
mod shared;
mod simulated;
mod socket;
mod start;
mod sum;
mod threads;

pub use engine::{Done, Engine, Request, Work};
pub use lock::{is_locked, try_lock};
pub use memory::{MOST_SPANS, Memory, Place, Region, Span, Spans};
pub use private::Private;
pub use ring::Uring;
pub use shared::Waker;
pub use simulated::{Fault, FaultKind, Simulated, SimulatedDisk};
pub use socket::{MOST_PIECES, Piece, wake_at};
pub use start::{EngineChoice, Started, start};
pub(crate) use sum::sum_up;
pub use threads::Threads;
