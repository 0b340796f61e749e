//! The kernel's calls about CPUs and nodes.
//!
//! Invariant: no call changes the content of memory, or moves a page.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::ptr::null_mut;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A call each; tests have others in its place.
pub trait Kernel: Debug + Send + Sync {
    /// The CPUs on which the calling thread may run.
    fn affinity(&self) -> io::Result<BTreeSet<usize>>;
    /// Lets the calling thread run on these alone.
    fn set_affinity(&self, cpus: &BTreeSet<usize>) -> io::Result<()>;
    /// Whether somebody has told this thread from which nodes to take memory, as `numactl` does.
    fn has_policy(&self) -> io::Result<bool>;
    /// Takes memory for these addresses from `node`, where they have none yet and the node has some left. Of a shared
    /// mapping it holds for the file, whoever touches it. Pages that are there stay where they are.
    fn prefer(&self, addresses: Range<usize>, node: u32) -> io::Result<()>;
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

    fn has_policy(&self) -> io::Result<bool> {
        let mut mode: libc::c_int = 0;
        let mask = null_mut::<libc::c_ulong>();
        // SAFETY: the mode is a place for the answer; nothing is written where the pointer is null.
        let rc = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask, 0usize, 0usize, 0usize) };
        if rc == 0 { Ok(mode != libc::MPOL_DEFAULT) } else { Err(io::Error::last_os_error()) }
    }

    fn prefer(&self, addresses: Range<usize>, node: u32) -> io::Result<()> {
        const WORD: usize = libc::c_ulong::BITS as usize;
        let mut mask = [0 as libc::c_ulong; NODES / WORD];
        let Some(word) = mask.get_mut(node as usize / WORD) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        *word = 1 << (node as usize % WORD);
        // The kernel takes one bit less than it is told.
        let bits = NODES + 1;
        let (start, len, mode) = (addresses.start, addresses.len(), libc::MPOL_PREFERRED as usize);
        // SAFETY: the mask has that many bits. Without flags the call says from where pages come that are not there
        // yet, and touches none, whatever lies at the addresses. All arguments are as wide as a register.
        let rc = unsafe { libc::syscall(libc::SYS_mbind, start, len, mode, &raw const mask, bits, 0usize) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// As many as a kernel is built for at most.
const NODES: usize = 1024;
