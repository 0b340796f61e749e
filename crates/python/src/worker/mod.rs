//! The worker side of one rank: maps the pool and copies between tensors and slots.
//!
//! In path order: this file has the Python interface. [`copies`] turns a job into copies and tracks it, [`pool`] is
//! the mapped pool with the offsets of this rank's slices, [`attach`] is the thread that maps it.
//!
//! Invariants: every job is reported once; if its pool is not mapped, at once and as failed. A job runs on the
//! mapping for which it was submitted, which stays until its last copy has ended. A mapping outlives the daemon's
//! connection, so that leased blocks can be loaded while a daemon restarts.

pub mod attach;
mod copies;
mod pool;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_core::{Error, ErrorKind, Result};
use forebay_device::cuda::CudaOptions;
use forebay_device::{After, Direction, PageRef, Place, Tensor, Tensors};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffers;
use crate::convert;
use crate::error::Raised;
use crate::fork::Own;
use attach::Attaching;
use copies::{Copies, GroupJob};
use pool::GroupShape;

type TensorTuple = (usize, u32, u64, u64);
type GroupTuple = (u32, bool, Vec<(usize, u64)>);
type JobTuple<'a> = (u32, Vec<u8>, Vec<u8>, Vec<u8>, u32);

/// The worker side of one rank: maps the pool and copies between tensors and slots on its own threads.
#[pyclass(frozen, module = "forebay._native")]
pub struct WorkerEngine {
    copies: Own<Arc<Copies>>,
    /// Whether the tensors are a device's, whose driver is called in each submission.
    is_device: bool,
    attaching: Own<Mutex<Option<Attaching>>>,
}

#[pymethods]
impl WorkerEngine {
    #[new]
    #[pyo3(signature = (
        socket_directory, engine_id, rank, ranks, *, incarnation, tensors, groups, blocks_per_chunk = 1, threads = 0,
        verify = true, device = None, stages = true, method = "auto", multiprocessors = 0,
        calibrations = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        socket_directory: Option<&str>,
        engine_id: String,
        rank: u32,
        ranks: u32,
        incarnation: &[u8],
        tensors: Vec<TensorTuple>,
        groups: Vec<GroupTuple>,
        blocks_per_chunk: u32,
        threads: usize,
        verify: bool,
        device: Option<u32>,
        stages: bool,
        method: &str,
        multiprocessors: u32,
        calibrations: Option<PathBuf>,
    ) -> Result<WorkerEngine, Raised> {
        if rank >= ranks || blocks_per_chunk == 0 {
            return Err(Error::invalid("a rank is below the number of ranks, and a chunk has a block")
                .with("rank", rank)
                .with("ranks", ranks)
                .with("blocks_per_chunk", blocks_per_chunk)
                .into());
        }
        let (shapes, tensors) = layout(tensors, groups, blocks_per_chunk, device)?;
        let (wake, woken) = wake().map_err(Raised::from)?;
        let cuda = device.map(|ordinal| copies::cuda(ordinal, stages, method, multiprocessors)).transpose()?;
        let cuda = cuda.map(|cuda| CudaOptions { calibrations, ..cuda });
        let engine = py.detach(|| copies::engine(tensors, cuda, threads))?;
        let bell =
            wake.try_clone().map_err(|error| Error::new(ErrorKind::Io, "cannot start a worker").source(error))?;
        // A full pipe wakes equally well; a closed one has no reader to wake.
        engine.ring_when_registered(Box::new(move || _ = (&bell).write(&[0])));
        let copies = Arc::new(Copies::new(engine, shapes.clone(), rank, blocks_per_chunk, verify, wake));
        let incarnation = convert::incarnation(incarnation)?;
        let directory = forebay_rpc::client::find_sockets(socket_directory);
        let worker = attach::Worker { directory, engine_id, incarnation, rank, ranks, groups: shapes };
        let attaching = Own::new(Mutex::new(Some(Attaching::start(worker, copies.clone(), woken)?)));
        Ok(WorkerEngine { copies: Own::new(copies), is_device: device.is_some(), attaching })
    }

    fn state(&self) -> &'static str {
        self.copies.standing().state.as_str()
    }

    /// Why the worker is not ready, as one line for a log; None if it is.
    fn reason(&self) -> Option<String> {
        self.copies.standing().reason
    }

    /// Queues a copy tensors -> slots. Never waits, never raises for a lost pool.
    #[pyo3(signature = (job, pool, groups, stream = 0))]
    fn submit_store(
        &self,
        py: Python<'_>,
        job: u64,
        pool: &[u8],
        groups: Vec<JobTuple<'_>>,
        stream: u64,
    ) -> Result<(), Raised> {
        self.submit(py, Direction::Store, job, pool, groups, stream)
    }

    /// Queues a copy slots -> tensors, under the same rules.
    #[pyo3(signature = (job, pool, groups, stream = 0))]
    fn submit_load(
        &self,
        py: Python<'_>,
        job: u64,
        pool: &[u8],
        groups: Vec<JobTuple<'_>>,
        stream: u64,
    ) -> Result<(), Raised> {
        self.submit(py, Direction::Load, job, pool, groups, stream)
    }

    /// (job, all copied, bytes, seconds), each job exactly once. Never waits.
    fn finished(&self) -> Vec<(u64, bool, u64, f64)> {
        let finished = self.copies.finished().into_iter();
        finished.map(|end| (end.job, end.is_whole, end.bytes, end.elapsed.as_secs_f64())).collect()
    }

    /// True once no tensor of `jobs` is touched any more; unknown ids count as ended.
    fn wait(&self, py: Python<'_>, jobs: Vec<u64>, timeout: f64) -> bool {
        let now = Instant::now();
        // A deadline outside the clock's range becomes one day: nobody waits longer for a copy.
        let deadline =
            now.checked_add(convert::duration(timeout)).unwrap_or(now + std::time::Duration::from_secs(86_400));
        py.detach(|| self.copies.wait(&jobs, deadline))
    }

    /// Loads that failed because a block in the pool was not what was stored.
    fn corrupt_loads(&self) -> u64 {
        self.copies.suspects().count()
    }

    /// How it copies: device, numa_node, methods, choice, pool_bytes, registered_bytes, copied_bytes, staged_bytes,
    /// trouble.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // If another thread shuts the worker down meanwhile, the engine or a pool may end here, which waits for copies.
        let report = py.detach(|| self.copies.report()).unwrap_or_default();
        let answer = PyDict::new(py);
        answer.set_item("device", report.device)?;
        answer.set_item("numa_node", report.numa_node)?;
        answer.set_item("methods", report.methods)?;
        answer.set_item("pool_bytes", report.pool_bytes)?;
        answer.set_item("choice", report.choice)?;
        answer.set_item("registered_bytes", report.registered_bytes)?;
        answer.set_item("copied_bytes", report.copied_bytes)?;
        answer.set_item("staged_bytes", report.staged_bytes)?;
        answer.set_item("trouble", report.trouble)?;
        Ok(answer)
    }

    /// Ends the copies that have begun, abandons the others, unmaps the pool. Idempotent; does nothing in a child that
    /// was forked.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.shutdown(py);
    }
}

impl WorkerEngine {
    fn submit(
        &self,
        py: Python<'_>,
        direction: Direction,
        job: u64,
        pool: &[u8],
        groups: Vec<JobTuple<'_>>,
        stream: u64,
    ) -> Result<(), Raised> {
        let read = |(group, slots, generations, block_ids, skipped): JobTuple<'_>| -> Result<GroupJob, Raised> {
            let slots = convert::held(&slots, &generations)?;
            Ok(GroupJob { group, slots, block_ids: convert::words(&block_ids)?, skipped })
        };
        let groups = groups.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        if self.is_device {
            // The driver takes locks of its own, and a thread that has one may wait for the GIL.
            return Ok(py.detach(|| self.copies.submit(direction, job, pool, groups, After::Stream(stream)))?);
        }
        Ok(self.copies.submit(direction, job, pool, groups, After::Now)?)
    }

    fn end(&self) {
        let Ok(attaching) = self.attaching.here() else { return };
        drop(attaching.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.copies.close();
    }
}

impl Drop for WorkerEngine {
    fn drop(&mut self) {
        self.end();
    }
}

/// A pair of sockets that never block.
fn wake() -> Result<(UnixStream, UnixStream)> {
    let cannot = |error| Error::new(ErrorKind::Io, "cannot start a worker").source(error);
    let (one, other) = UnixStream::pair().map_err(cannot)?;
    [&one, &other].into_iter().try_for_each(|end| end.set_nonblocking(true)).map_err(cannot)?;
    Ok((one, other))
}

/// Each group's part of the tensors. Errors with `Invalid` if a ref does not fit its tensor.
fn layout(
    tensors: Vec<TensorTuple>,
    groups: Vec<GroupTuple>,
    blocks: u32,
    device: Option<u32>,
) -> Result<(Vec<GroupShape>, Tensors)> {
    let pages: Vec<u64> = tensors.iter().map(|(.., page_bytes)| *page_bytes).collect();
    let tensors = tensors.into_iter().map(|described| tensor(described, device)).collect::<Result<Vec<_>>>()?;
    let (mut shapes, mut refs) = (Vec::new(), Vec::new());
    for (group, is_replicated, group_refs) in groups {
        let mut block_bytes = 0u64;
        for (tensor, bytes) in &group_refs {
            if pages.get(*tensor).is_none_or(|page| bytes > page) {
                return Err(Error::invalid("a ref does not fit its tensor")
                    .with("group", group)
                    .with("tensor", tensor)
                    .with("page_bytes", bytes));
            }
            block_bytes = block_bytes.saturating_add(*bytes);
        }
        if shapes.iter().any(|shape: &GroupShape| shape.group == group) {
            return Err(Error::invalid("a group is named twice").with("group", group));
        }
        let slice_bytes = block_bytes.saturating_mul(blocks.into());
        shapes.push(GroupShape { group, is_replicated, block_bytes, slice_bytes });
        refs.push(group_refs.into_iter().map(|(tensor, page_bytes)| PageRef { tensor, page_bytes }).collect());
    }
    Ok((shapes, Tensors::new(tensors, refs)?))
}

fn tensor((address, rows, row_stride_bytes, page_bytes): TensorTuple, device: Option<u32>) -> Result<Tensor> {
    let before_last = u64::from(rows.saturating_sub(1)).checked_mul(row_stride_bytes);
    let bytes =
        before_last.and_then(|bytes| bytes.checked_add(page_bytes)).and_then(|bytes| usize::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| Error::invalid("a tensor is larger than memory").with("rows", rows))?;
    let place = match device {
        None => Place::Host(buffers::tensor(address, bytes)?),
        Some(ordinal) => Place::Device { ordinal, base: address as u64, bytes: bytes as u64 },
    };
    Ok(Tensor { place, offset: 0, rows, row_stride_bytes })
}
