//! Copy engines: KV blocks between the engine's tensors and slots of the mapped pool.
//!
//! In the order data passes: [`tensor`] describes where a block's fragments lie, [`job`] the copies and their outcomes,
//! [`engine`] the promises of every copy engine. `plan` checks a job and cuts it into tiles, [`host`] runs the tiles on
//! threads, [`copy`] moves the bytes. [`mod@bench`] measures it. [`cuda`] is the engine over the memory of a GPU.
//!
//! Invariants: a job that could touch a byte outside the registered memory is refused at submission. Every accepted
//! job is completed exactly once. `unsafe` is in `copy` and `cuda::libcuda` alone.

#![deny(unsafe_code)]

pub mod bench;
#[allow(unsafe_code)]
pub mod copy;
pub mod cuda;
pub mod engine;
pub mod host;
pub mod job;
mod plan;
pub mod tensor;

#[cfg(test)]
mod tests;

pub use copy::{Level, Memory};
pub use engine::{Bell, CopyEngine, EngineReport, PoolId};
pub use host::{HostCopyEngine, HostOptions};
pub use job::{After, Completion, Direction, Item, Job, JobId, Outcome, SlotGuard, Until};
pub use tensor::{PageRef, Place, Tensor, Tensors};
