//! Transfers between processes: the native part of `forebay.transfer`.
//!
//! Invariants: no lock of the endpoint is taken while the GIL is held, because its thread may need the GIL to release a
//! buffer. A wait looks for signals every tenth of a second.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind};
use forebay_fabric::{
    Address, Descriptor, Endpoint, Memory, OpId, Operation, Options, PeerId, RegionId, Released, RemoteId, Report,
    Rights, Secret, Segment, Verb,
};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::buffers::{Pinned, TransferMemory, reachable};
use crate::convert;
use crate::error::Raised;

/// Between two looks for signals.
const SLICE: Duration = Duration::from_millis(100);

/// The native part of `forebay.transfer.Endpoint`.
#[pyclass(frozen, module = "forebay._native")]
pub struct TransferEngine(Endpoint);

/// Local region and offset, remote region and offset, bytes.
type Place = (u64, u64, u64, u64, u64);

#[pymethods]
impl TransferEngine {
    #[new]
    fn new(
        py: Python<'_>,
        secret_file: Option<PathBuf>,
        connections: u16,
        connect_timeout: f64,
        encrypt: bool,
        ucx_library: Option<PathBuf>,
    ) -> Result<TransferEngine, Raised> {
        py.detach(|| {
            let secret = secret_file.as_deref().map(Secret::read).transpose()?;
            let connect_deadline = convert::duration(connect_timeout);
            let options = Options { secret, connections, connect_deadline, encrypt, ucx_library };
            Ok(TransferEngine(Endpoint::new(options)?))
        })
    }

    fn listen(&self, py: Python<'_>, address: &str) -> Result<String, Raised> {
        py.detach(|| {
            let listen = |address| Ok(self.0.with(|fabric| fabric.listen(address))?.to_string());
            let addresses: Result<Vec<String>, Raised> = Address::parse_all(address)?.iter().map(listen).collect();
            Ok(addresses?.join(","))
        })
    }

    /// Number and length of the region.
    fn register(&self, buffer: &Bound<'_, PyAny>, read: bool, write: bool) -> PyResult<(u64, u64)> {
        let memory = match buffer.cast::<TransferMemory>() {
            Ok(ours) => ours.get().0.clone(),
            Err(_) => Arc::new(Pinned::to_read(buffer)?.into_memory()),
        };
        let nbytes = memory.len();
        Ok((self.add(buffer.py(), memory, read, write)?, nbytes))
    }

    fn register_address(
        &self,
        py: Python<'_>,
        address: usize,
        nbytes: u64,
        read: bool,
        write: bool,
        may_write: bool,
    ) -> PyResult<u64> {
        let memory = reachable(address, nbytes, may_write).map_err(Raised::from)?;
        self.add(py, Arc::new(memory), read, write)
    }

    fn export(&self, py: Python<'_>, region: u64) -> Result<Vec<u8>, Raised> {
        py.detach(|| Ok(self.0.with(|fabric| fabric.export(RegionId(region)))?.to_bytes().to_vec()))
    }

    fn deregister(&self, py: Python<'_>, region: u64, timeout: f64) -> PyResult<()> {
        let region = RegionId(region);
        py.detach(|| self.0.deregister(region)).map_err(Raised::from)?;
        let ended = patiently(py, Some(timeout), |slice| self.0.deregistered(region, slice).map(Ok))?;
        ended.ok_or_else(|| {
            let error = Error::new(ErrorKind::Timeout, "a peer still maps the memory");
            Raised::from(error.hint("the memory stays in place until the peer answers or its process ends")).into()
        })
    }

    fn connect(&self, py: Python<'_>, address: &str) -> PyResult<u64> {
        let addresses = py.detach(|| Address::parse_all(address)).map_err(Raised::from)?;
        let peer = py.detach(|| self.0.connect_over(&addresses)).map_err(Raised::from)?;
        let answer = |slice| self.0.connected(peer, slice).map(|it| it.map_err(|error| error.with("address", address)));
        let connected = patiently(py, None, answer);
        if connected.is_err() {
            // A signal's handler raised, or the peer is gone.
            let _ = py.detach(|| self.0.disconnect(peer));
        }
        connected.map(|_| peer.0)
    }

    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<u64>> {
        let accepted = patiently(py, timeout, |slice| self.0.accept(Some(slice)).transpose())?;
        Ok(accepted.map(|peer| peer.0))
    }

    fn is_up(&self, py: Python<'_>, peer: u64) -> bool {
        py.detach(|| self.0.is_up(PeerId(peer)))
    }

    fn disconnect(&self, py: Python<'_>, peer: u64) -> Result<(), Raised> {
        py.detach(|| Ok(self.0.disconnect(PeerId(peer))?))
    }

    /// Number and length of the peer's region.
    fn import_memory(&self, py: Python<'_>, peer: u64, descriptor: &[u8]) -> Result<(u64, u64), Raised> {
        py.detach(|| {
            let descriptor = Descriptor::from_bytes(descriptor)?;
            let remote = self.0.with(|fabric| fabric.import(PeerId(peer), &descriptor))?;
            Ok((remote.0, descriptor.region_bytes()))
        })
    }

    fn is_mapped(&self, py: Python<'_>, remote: u64) -> Result<bool, Raised> {
        py.detach(|| Ok(self.0.with(|fabric| Ok(fabric.is_mapped(RemoteId(remote))))?))
    }

    fn forget(&self, py: Python<'_>, remote: u64) -> Result<(), Raised> {
        py.detach(|| {
            Ok(self.0.with(|fabric| {
                fabric.forget(RemoteId(remote));
                Ok(())
            })?)
        })
    }

    /// Python has collected the peer. The finalizer of an object: it never waits.
    fn release_peer(&self, peer: u64) {
        self.0.release(Released::Peer(PeerId(peer)));
    }

    /// Python has collected the peer's memory.
    fn release_remote(&self, remote: u64) {
        self.0.release(Released::Remote(RemoteId(remote)));
    }

    /// Runs a transfer to its end; raises its error. One call, so that no signal's handler can raise between its
    /// beginning and the wait for it: if one raises during the wait, the transfer has ended first.
    fn transfer(
        &self,
        py: Python<'_>,
        peer: u64,
        write: bool,
        places: Vec<Place>,
        deadline: f64,
        notice: Option<Vec<u8>>,
    ) -> PyResult<()> {
        let operation = operation(peer, write, places, deadline, notice);
        let op = py.detach(|| self.0.submit(operation, Report::Waited)).map_err(Raised::from)?;
        let mut has_ended = false;
        let waited = patiently(py, None, |slice| self.0.wait(op, Some(slice)).inspect(|_| has_ended = true));
        if !has_ended {
            py.detach(|| {
                self.0.give_up(op);
                // It ended with that; its report is not kept for anybody.
                self.0.wait(op, None)
            });
        }
        waited.map(drop)
    }

    /// Begins a transfer whose end is told to `finished` of the queue, under this name. Appends its number to `begun`,
    /// which the caller has also if a signal's handler raises before this returns.
    #[allow(clippy::too_many_arguments, reason = "Python's side names them")]
    fn submit(
        &self,
        py: Python<'_>,
        peer: u64,
        write: bool,
        places: Vec<Place>,
        deadline: f64,
        notice: Option<Vec<u8>>,
        queue: usize,
        name: u64,
        begun: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        let operation = operation(peer, write, places, deadline, notice);
        let op = py.detach(|| self.0.submit(operation, Report::Queue(queue, name))).map_err(Raised::from)?;
        begun.append(op.0)
    }

    /// Ends a transfer, if it has not ended. Nothing touches its local memory afterwards; `finished` reports it.
    fn cancel(&self, py: Python<'_>, op: u64) {
        py.detach(|| self.0.give_up(OpId(op)));
    }

    /// Operations that have ended, each with its number, its name, and its error or `None`.
    fn finished(&self, py: Python<'_>, queue: usize, timeout: f64) -> PyResult<Vec<(u64, u64, Option<PyErr>)>> {
        let some = |slice| match self.0.finished(queue, Some(slice)) {
            Ok(finished) if finished.is_empty() && !self.0.is_closed() => None,
            finished => Some(finished),
        };
        let finished = patiently(py, Some(timeout), some)?.unwrap_or_default();
        let raised = |result: forebay_core::Result<()>| result.err().map(|error| Raised::from(error).into());
        Ok(finished.into_iter().map(|(op, name, result)| (op.0, name, raised(result))).collect())
    }

    fn is_closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.is_closed())
    }

    fn fileno(&self, queue: usize) -> Result<i32, Raised> {
        Ok(self.0.queue_fd(queue)?.as_raw_fd())
    }

    fn send(&self, py: Python<'_>, peer: u64, data: Vec<u8>, is_notice: bool) -> Result<(), Raised> {
        py.detach(|| {
            Ok(self.0.with(|fabric| match is_notice {
                true => fabric.notify(PeerId(peer), data),
                false => fabric.send(PeerId(peer), data),
            })?)
        })
    }

    fn receive(&self, py: Python<'_>, peer: u64, is_notice: bool, timeout: Option<f64>) -> PyResult<Option<Vec<u8>>> {
        patiently(py, timeout, |slice| self.0.receive(PeerId(peer), is_notice, Some(slice)).transpose())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

impl TransferEngine {
    fn add(&self, py: Python<'_>, memory: Arc<Memory>, read: bool, write: bool) -> PyResult<u64> {
        let rights = Rights { read, write };
        let bytes = memory.len();
        let region = py.detach(|| self.0.with(|fabric| fabric.register(&memory, 0, bytes, rights)));
        Ok(region.map_err(Raised::from)?.0)
    }
}

fn operation(peer: u64, write: bool, places: Vec<Place>, deadline: f64, notice: Option<Vec<u8>>) -> Operation {
    let segment = |(local, local_offset, remote, remote_offset, bytes): Place| Segment {
        local: RegionId(local),
        local_offset,
        remote: RemoteId(remote),
        remote_offset,
        bytes,
    };
    Operation {
        peer: PeerId(peer),
        verb: if write { Verb::Write } else { Verb::Read },
        segments: places.into_iter().map(segment).collect(),
        deadline: Instant::now().checked_add(convert::duration(deadline)),
        notice,
    }
}

/// Waits without the GIL, in slices between which Python may raise what a signal's handler raised.
fn patiently<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    mut wait: impl FnMut(Duration) -> Option<forebay_core::Result<T>> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout.and_then(|seconds| Instant::now().checked_add(convert::duration(seconds)));
    loop {
        let left = deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
        if let Some(found) = py.detach(|| wait(left.min(SLICE))) {
            return Ok(Some(found.map_err(Raised::from)?));
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(None);
        }
    }
}
