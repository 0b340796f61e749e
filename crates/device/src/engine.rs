//! The promises of every copy engine.
//!
//! - `submit` never waits for a copy; a device engine calls the driver in it. It refuses with `Full` at the limit, and
//!   with `Invalid` any job that could touch a byte outside the registered memory. A refused job leaves no trace.
//! - An accepted job is completed exactly once, whatever happens to its items. Completions of one direction come in
//!   the order of submission; loads and stores may overtake each other.
//! - When a completion can be polled, all bytes of the job are visible to every process that maps them.

use std::time::Instant;

use forebay_core::Result;

use crate::copy::Memory;
use crate::job::{Completion, Job, JobId, Until};

/// Called when there is something to look at.
pub type Bell = Box<dyn Fn() + Send + Sync>;

/// A pool mapping attached to an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PoolId(pub u32);

/// See the module documentation. Shared between the thread that submits and those that poll or wait.
pub trait CopyEngine: Send + Sync {
    /// Makes a pool's data mapping a source and destination of jobs. A mapping that begins where an attached one does
    /// is that pool, which has grown: what is registered of it stays registered, and the other may be detached.
    /// `Invalid` if it overlaps a tensor.
    fn attach_pool(&self, memory: Memory) -> Result<PoolId>;

    /// Says that so many bytes at the pool's start have memory by now. A device's engine pins no other memory, which
    /// that would populate with small pages. Jobs may touch any of it all the same.
    fn populated(&self, pool: PoolId, bytes: u64);

    /// Rings after each change of [`EngineReport::registered_bytes`] that nobody asked for, on a thread of the engine,
    /// which must not wait in it. Only the first bell is taken. A host's engine has no use for one.
    fn ring_when_registered(&self, bell: Bell);

    /// Refuses new jobs on the pool. Jobs in flight continue; the mapping's owner is dropped after the last one.
    /// `NotFound` if the pool is not attached.
    fn detach_pool(&self, pool: PoolId) -> Result<()>;

    /// Queues a job.
    fn submit(&self, job: Job) -> Result<()>;

    /// Takes the available completions, without waiting.
    fn poll(&self) -> Vec<Completion>;

    /// Waits until all of `jobs` are as far as `until` says. Ids that are unknown or already completed are accepted.
    /// Takes no completions. `Timeout` at the deadline.
    fn wait(&self, jobs: &[JobId], until: Until, deadline: Instant) -> Result<()>;

    /// How the engine copies, and how well it does.
    fn report(&self) -> EngineReport;
}

/// What is known of an engine at this moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EngineReport {
    /// The device with its driver; `None` of an engine over host memory.
    pub device: Option<String>,
    /// The NUMA node on which the device hangs, or that has all CPUs of the threads; `None` on a host with one node.
    pub numa_node: Option<u32>,
    /// What copies, the preferred one first.
    pub methods: Vec<&'static str>,
    /// Where the order of the methods comes from: `given`, `measured` by this engine, or `kept` from another one's.
    pub choice: &'static str,
    /// Bytes of the attached pools, and how many of them the driver has registered.
    pub pool_bytes: u64,
    pub registered_bytes: u64,
    /// Bytes copied since the start, and how many of them went through staging memory.
    pub copied_bytes: u64,
    pub staged_bytes: u64,
    /// What hinders the engine, in a line for a log.
    pub trouble: Option<String>,
}
