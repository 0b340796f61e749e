//! Memory that Rust cannot vouch for: the engine's tensors, known by their addresses, and the mapped pool.
//!
//! The only `unsafe` of this crate.

use std::sync::Arc;

use forebay_core::Result;
use forebay_device::Memory;
use forebay_io::arena::Mapping;

/// The `bytes` bytes at `address`, which Python says are a tensor's.
pub fn tensor(address: usize, bytes: usize) -> Result<Memory> {
    let base = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the caller of `WorkerEngine` vouches, as the stub says, that the tensors are host memory of these
    // sizes that outlives the engine. That nobody touches a block while it is copied is the connector's contract
    // with vLLM: blocks of a job are neither freed nor written before the job is reported.
    unsafe { Memory::new(base, bytes, ()) }
}

/// The pool's slots. The mapping lives as long as the engine uses them.
pub fn pool(mapping: Arc<Mapping>) -> Result<Memory> {
    let (base, bytes) = (mapping.data_ptr(), mapping.len());
    // SAFETY: `mapping` owns the range and is kept as its owner. Who may touch a slot when is decided by leases
    // and reservations; a job whose slot changed hands is disowned by its guard.
    unsafe { Memory::new(base, bytes, mapping) }
}
