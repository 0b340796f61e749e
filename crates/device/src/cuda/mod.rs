//! Copies between a GPU's memory and the pool, by NVIDIA's driver, which is found at run time.
//!
//! **Never run on a GPU.** Everything here was built and tested on a driver over host memory ([`fake`]); the
//! measurements that a GPU has to confirm are listed by `bench/gpu.sh`.
//!
//! In the order data passes: [`engine`] takes jobs, `ops` turns them into copies between addresses, `methods` and
//! `kernel` queue these on the stream of a `lane`, whose thread waits for them and stages what is not registered;
//! `register` pins the pool. `choice` says which methods are used for a job, of those that `selftest` has found to copy
//! rightly at the start; it goes by `costs`, which `calibrate` measures and keeps. [`context`] is the device's context,
//! [`driver`] the calls of a driver, [`libcuda`] the real one. [`gpus`] says what is there, without a context.
//! `bench` and `product` measure.
//!
//! Order, as the engine's own offloading has it: a store follows what its stream of the model has queued, and reads in
//! the order of its stream. A load follows it too, since its destination may still be read or zeroed. Both directions
//! have a stream. Tensors are released when the device has made the last copy, before anything is summed.

pub mod bench;
mod calibrate;
mod choice;
pub mod context;
mod costs;
pub mod driver;
pub mod engine;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod gpus;
mod kernel;
mod lane;
#[allow(unsafe_code)]
pub mod libcuda;
mod methods;
mod ops;
mod pitched;
mod product;
#[cfg(any(test, feature = "fake"))]
mod ptx;
mod register;
mod selftest;
#[cfg(test)]
mod tests;

pub use choice::Wish;
pub use driver::Driver;
pub use engine::{CudaCopyEngine, CudaOptions};
pub use libcuda::LibCuda;
