//! Block I/O between one file or device and the memory of pool and tiers, without copies.
//!
//! - [`Memory`] is what may be read and written: the pool, given once, and a tier's own staging pages. A [`Span`]
//!   names a piece of it, so that no address travels.
//! - [`Engine`] takes [`Request`]s and gives back [`Done`]s, in any order. [`Uring`] does it with one ring and one
//!   thread per disk, [`Threads`] with plain system calls where rings are forbidden, [`Simulated`] on a disk in
//!   memory that fails, tears, reorders and loses power as a test wishes. [`start`] picks one and says why.
//! - [`Private`] is memory that one tier has for itself, and may borrow as bytes.
//! - [`Region::send`] and [`Region::receive`] move bytes between the pool and a socket; [`wake_at`] says for how many
//!   bytes it is worth to be woken.
//! - [`try_lock`] marks a file as in use, [`is_locked`] tells.
//!
//! Invariants: memory named by a request is mapped until its request is done, even when its owner is long gone;
//! an engine repeats nothing and hides nothing: short transfers and `EINTR` are the caller's to continue.

mod engine;
mod lock;
mod memory;
mod private;
mod ring;
mod shared;
mod simulated;
mod socket;
mod sum;
mod threads;

pub use engine::{Done, Engine, EngineChoice, Request, Started, Work, start};
pub use lock::{is_locked, try_lock};
pub use memory::{MOST_SPANS, Memory, Place, Region, Span, Spans};
pub use private::Private;
pub use ring::Uring;
pub use shared::Waker;
pub use simulated::{Fault, FaultKind, Simulated, SimulatedDisk};
pub use socket::{MOST_PIECES, Piece, wake_at};
pub(crate) use sum::sum_up;
pub use threads::Threads;
