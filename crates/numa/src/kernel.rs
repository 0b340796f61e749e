//! The kernel's calls about CPUs.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A call each; tests have others in its place.
pub trait Kernel: Debug + Send + Sync {
    /// The CPUs on which the calling thread may run.
    fn affinity(&self) -> io::Result<BTreeSet<usize>>;
    /// Lets the calling thread run on these alone.
    fn set_affinity(&self, cpus: &BTreeSet<usize>) -> io::Result<()>;
}

/// This host's.
#[derive(Clone, Copy, Debug)]
pub struct Linux;

impl Kernel for Linux {
    fn affinity(&self) -> io::Result<BTreeSet<usize>> {
        let set = sched_getaffinity(None)?;
        Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
    }

    fn set_affinity(&self, cpus: &BTreeSet<usize>) -> io::Result<()> {
        let mut set = CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        Ok(sched_setaffinity(None, &set)?)
    }
}
