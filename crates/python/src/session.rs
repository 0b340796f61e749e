//! The scheduler side: `EngineSession` and `Ticket`.

use forebay_core::Error;
use forebay_rpc::Hashes;
use forebay_rpc::client::session::Namespace;
use forebay_rpc::client::{self, SessionConfig};
use forebay_rpc::proto::{Attention, Group};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::convert;
use crate::error::Raised;
use crate::fork::Own;
use crate::mask::Mask;

type GroupTuple = (u32, Reach, u32, bool);

/// How a group's layers look back: by its name, or the blocks of its window.
#[derive(FromPyObject)]
enum Reach {
    Window(u32),
    Name(String),
}

/// A lookup in progress. Dropping it (or `release`) returns its lease, now or when the answer arrives.
#[pyclass(frozen, module = "forebay._native")]
pub struct Ticket(Own<client::Ticket>);

#[pymethods]
impl Ticket {
    /// True once there is an answer; a failure is an answer of misses. Waits at most `timeout` seconds.
    fn poll(&self, py: Python<'_>, timeout: f64) -> bool {
        let timeout = convert::duration(timeout);
        self.0.poll(std::time::Duration::ZERO) || !timeout.is_zero() && py.detach(|| self.0.poll(timeout))
    }

    /// One byte per key of the position-th requested group: 0 miss, 1 ready and leased, 2 promoting. A key that is
    /// promoting becomes one of the others in a later call.
    fn states<'py>(&self, py: Python<'py>, position: usize) -> Result<Bound<'py, PyBytes>, Raised> {
        Ok(PyBytes::new(py, &self.0.states(position)?))
    }

    /// Little-endian u32 slots, one per key of the group: 0xFFFFFFFF where the key is not ready.
    fn slots<'py>(&self, py: Python<'py>, position: usize) -> Result<Bound<'py, PyBytes>, Raised> {
        Ok(PyBytes::new(py, &self.0.slots(position)?))
    }

    /// Little-endian u32 generations, parallel to `slots`.
    fn generations<'py>(&self, py: Python<'py>, position: usize) -> Result<Bound<'py, PyBytes>, Raised> {
        Ok(PyBytes::new(py, &self.0.generations(position)?))
    }

    /// Where each key's block was before this hit, a byte a key: 0 the pool, 1 a tier of this host, 2 a tier that hosts
    /// share. The first hit of a block that a tier brought up is the tier's.
    fn sources<'py>(&self, py: Python<'py>, position: usize) -> Result<Bound<'py, PyBytes>, Raised> {
        Ok(PyBytes::new(py, &self.0.sources(position)?))
    }

    /// True if the daemon could not be asked; the answer is then a miss for every key.
    fn has_failed(&self) -> bool {
        self.0.has_failed()
    }

    /// Id of the pool with the slots, 16 bytes; empty if the lookup failed.
    #[getter]
    fn pool<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.pool())
    }

    /// Keys that are promoting are misses from now on; without an answer, all keys. What is ready stays leased. Never
    /// waits. Idempotent.
    fn stop_waiting(&self) {
        self.0.stop_waiting();
    }

    /// Returns the lease. Queued, never waits. Idempotent.
    fn release(&self) {
        self.0.release();
    }
}

/// The scheduler side of one engine: never raises for a missing daemon, never waits unless asked to.
#[pyclass(frozen, module = "forebay._native")]
pub struct EngineSession(Own<client::EngineSession>);

#[pymethods]
impl EngineSession {
    #[new]
    #[pyo3(signature = (socket_directory, engine_id, ranks, *, incarnation, stock_blocks = 64, deadline = 1.0, breaker_failures = 3))]
    fn new(
        socket_directory: Option<&str>,
        engine_id: String,
        ranks: u32,
        incarnation: &[u8],
        stock_blocks: usize,
        deadline: f64,
        breaker_failures: u32,
    ) -> Result<EngineSession, Raised> {
        let socket_directory = client::find_sockets(socket_directory);
        let deadline = convert::duration(deadline);
        let incarnation = convert::incarnation(incarnation)?;
        let config =
            SessionConfig { socket_directory, engine_id, incarnation, ranks, stock_blocks, deadline, breaker_failures };
        Ok(EngineSession(Own::new(client::EngineSession::new(config)?)))
    }

    /// connecting: no daemon. attaching: waits for ranks. naming: `set_namespace` is missing or in progress.
    fn state(&self) -> &'static str {
        self.0.state().as_str()
    }

    /// Why the session is not ready, as one line for a log; None if it is.
    fn reason(&self) -> Option<String> {
        self.0.reason()
    }

    /// Sets the namespace for all later stores and loads: (group, attention, tokens per block, is replicated).
    fn set_namespace(&self, fields: &Bound<'_, PyAny>, groups: Vec<GroupTuple>) -> PyResult<()> {
        let groups = groups.into_iter().map(group).collect::<Result<_, _>>()?;
        self.0.set_namespace(Namespace { fields: convert::fields(fields)?, groups });
        Ok(())
    }

    /// Looks up all keys of all groups of one request, in prefix order. One round trip, not waited for.
    #[pyo3(signature = (groups, mask = None))]
    fn lookup(&self, groups: Vec<(u32, Bound<'_, PyAny>)>, mask: Option<&[u8]>) -> PyResult<Ticket> {
        Ok(Ticket(Own::new(self.0.lookup(keys(groups, mask)?))))
    }

    /// Hints that the request with this number is queued and will look up these keys. Sent in the background.
    #[pyo3(signature = (request, groups, mask = None))]
    fn hint(&self, request: u64, groups: Vec<(u32, Bound<'_, PyAny>)>, mask: Option<&[u8]>) -> PyResult<()> {
        self.0.hint(request, keys(groups, mask)?);
        Ok(())
    }

    /// Withdraws the hint of this request. Unknown numbers are ignored.
    fn withdraw_hint(&self, request: u64) {
        self.0.withdraw_hint(request);
    }

    /// (slots, generations) as little-endian u32, up to `count` of them, from the stock: never waits.
    fn reserve<'py>(&self, py: Python<'py>, group: u32, count: usize) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>) {
        let slots = self.0.reserve(group, count);
        let numbers: Vec<u8> = slots.iter().flat_map(|held| held.slot.to_le_bytes()).collect();
        let generations: Vec<u8> = slots.iter().flat_map(|held| held.generation.to_le_bytes()).collect();
        (PyBytes::new(py, &numbers), PyBytes::new(py, &generations))
    }

    /// Names filled slots; `predecessor` is the hash before the first. Queued, never waits.
    #[pyo3(signature = (group, hashes, predecessor, slots, generations, mask = None))]
    fn commit(
        &self,
        group: u32,
        hashes: &Bound<'_, PyAny>,
        predecessor: Option<&[u8]>,
        slots: &[u8],
        generations: &[u8],
        mask: Option<&[u8]>,
    ) -> PyResult<()> {
        let mask = mask.map(Mask::new).transpose()?;
        let (hashes, slots) = (convert::masked(hashes, mask.as_ref())?, convert::held(slots, generations)?);
        let predecessor = predecessor.unwrap_or_default();
        let committed = match mask.filter(|_| !predecessor.is_empty()) {
            Some(mask) => self.0.commit(group, &hashes, mask.apply(predecessor).as_bytes(), &slots),
            None => self.0.commit(group, &hashes, predecessor, &slots),
        };
        Ok(committed.map_err(Raised::from)?)
    }

    /// Returns unfilled slots. Queued, never waits.
    fn abort(&self, group: u32, slots: &[u8], generations: &[u8]) -> Result<(), Raised> {
        // A slot identifies its own group; the parameter makes a call read like `commit`.
        let _ = group;
        self.0.abort(&convert::held(slots, generations)?);
        Ok(())
    }

    /// Loads have saved these tokens of computing, and at least these seconds. The daemon is told with the next release
    /// of a lease, at most once. Never waits.
    fn saved(&self, tokens: u64, seconds: f64) {
        self.0.saved(tokens, convert::duration(seconds));
    }

    /// Id of the pool with the reserved slots, 16 bytes; empty when not ready.
    #[getter]
    fn pool<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.pool())
    }

    /// Counters since the start, and the present state.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        self.0.stats().entries().into_iter().try_for_each(|(name, value)| stats.set_item(name, value))?;
        Ok(stats)
    }

    /// Ends the session and joins the thread, at most `deadline` seconds. Does nothing in a child that was forked.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.here().map(client::EngineSession::close).unwrap_or_default());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

fn keys(groups: Vec<(u32, Bound<'_, PyAny>)>, mask: Option<&[u8]>) -> PyResult<Vec<(u32, Hashes)>> {
    let mask = mask.map(Mask::new).transpose()?;
    groups.into_iter().map(|(group, hashes)| Ok((group, convert::masked(&hashes, mask.as_ref())?))).collect()
}

fn group((group, attention, tokens_per_block, is_replicated): GroupTuple) -> Result<Group, Raised> {
    let (attention, window_blocks) = match attention {
        Reach::Window(blocks) if blocks > 0 => (Attention::Windowed, blocks),
        Reach::Window(_) => return Err(Error::invalid("a window has one block at least").into()),
        Reach::Name(name) => match name.as_str() {
            "full" => (Attention::Full, 0),
            "windowed" => (Attention::Windowed, 0),
            _ => {
                return Err(Error::invalid("attention is `full`, `windowed`, or a number of blocks")
                    .with("attention", name)
                    .into());
            }
        },
    };
    let attention = attention as i32;
    Ok(Group { group, attention, tokens_per_block, is_replicated, rank_bytes: Vec::new(), window_blocks })
}
