//! The plain client for any program.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_core::{Error, ErrorKind};
use forebay_io::pool::MAX_LENT_BYTES;
use forebay_rpc::client::{self, GroupBytes, Sink, Source};
use forebay_rpc::pack;
use forebay_rpc::proto::{CommitOutcome, InspectReply, NamespaceInfo, PurgeRequest, SessionInfo, TierInfo, TierPurge};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use tokio::runtime::Runtime;

use crate::buffers::{NewBytes, Pinned};
use crate::convert::{self, from_hex, hex};
use crate::error::Raised;
use crate::fork::Own;
use crate::lend::lend;

/// New `bytes` that a `get` makes at a time, before it is known which blocks are found: room is reserved for them, and
/// those that are not found are never touched.
const NEW_BYTES: u64 = 64 << 20;

/// A plain client for any program: no engine, no mapping of the pool needed. Raises ForebayError.
#[pyclass(frozen, module = "forebay._native")]
pub struct Client {
    /// `None` once closed. One call runs at a time; others wait for it, without the GIL.
    open: Own<Mutex<Option<Open>>>,
}

struct Open {
    runtime: Runtime,
    client: client::Client,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket_directory = None, *, deadline = 5.0, memory_bytes = 16777216))]
    fn new(socket_directory: Option<&str>, deadline: f64, memory_bytes: u64) -> Result<Client, Raised> {
        static CLIENTS: AtomicU32 = AtomicU32::new(0);
        let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start a client").source(error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
        // Processes in containers may have the same number; the random part distinguishes them.
        let (process, number) = (std::process::id(), CLIENTS.fetch_add(1, Ordering::Relaxed));
        let engine_id = format!("client-{process}-{number}-{:016x}", random());
        let directory = client::find_sockets(socket_directory);
        check_memory(memory_bytes)?;
        let mut client = client::Client::new(directory, engine_id, convert::duration(deadline));
        if memory_bytes > 0 {
            client = client.lending(memory_bytes, Box::new(lend));
        }
        Ok(Client { open: Own::new(Mutex::new(Some(Open { runtime, client }))) })
    }

    /// Namespace handle for `block_bytes` (group -> bytes of a block). One round trip.
    fn open_namespace(
        &self,
        py: Python<'_>,
        fields: &Bound<'_, PyAny>,
        block_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<u32> {
        let fields = convert::fields(fields)?;
        let groups = convert::numbers(block_bytes)?.into_iter().map(|(group, bytes)| GroupBytes { group, bytes });
        let groups: Vec<GroupBytes> = groups.collect();
        Ok(self.call(py, async |client| client.open_namespace(fields, groups).await)?)
    }

    /// Stores (hash, bytes) in prefix order. One round trip per 8 MiB.
    #[pyo3(signature = (namespace, group, blocks, predecessor = None))]
    fn put(
        &self,
        py: Python<'_>,
        namespace: u32,
        group: u32,
        blocks: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
        predecessor: Option<&[u8]>,
    ) -> PyResult<Vec<&'static str>> {
        let pin = |(hash, data): (Bound<'_, PyBytes>, Bound<'_, PyAny>)| {
            Ok(ToStore { hash: hash.as_bytes().to_vec(), data: Pinned::to_read(&data)? })
        };
        let blocks = blocks.into_iter().map(pin).collect::<PyResult<Vec<_>>>()?;
        let predecessor = predecessor.unwrap_or_default();
        let outcomes = self.call(py, async |client| client.put(namespace, group, predecessor, blocks).await)?;
        Ok(outcomes.into_iter().map(outcome_name).collect())
    }

    /// The blocks' bytes, None where not found. One round trip per 8 MiB.
    fn get<'py>(
        &self,
        py: Python<'py>,
        namespace: u32,
        group: u32,
        hashes: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let hashes = convert::hashes(hashes)?;
        let bytes = self.call(py, async |client| client.block_bytes(namespace, group))?;
        let at_a_time = (NEW_BYTES / bytes).max(1) as usize;
        let all: Vec<&[u8]> = hashes.iter().collect();
        let mut blocks: Vec<Option<Bound<'py, PyBytes>>> = vec![None; all.len()];
        // The last ones first, as within one `get_into`.
        for (part, blocks) in all.chunks(at_a_time).zip(blocks.chunks_mut(at_a_time)).rev() {
            let part = pack(part.iter().copied()).map_err(Raised::from)?;
            let new = (0..part.len()).map(|_| NewBytes::new(py, bytes as usize)).collect::<PyResult<Vec<_>>>()?;
            self.call(py, async |client| client.get_into(namespace, group, &part, &new).await)?;
            blocks.iter_mut().zip(new).for_each(|(block, new)| *block = new.filled(py));
        }
        Ok(blocks)
    }

    /// Fills one buffer per hash, each as long as the block; whether it was found. One round trip per 8 MiB.
    fn get_into(
        &self,
        py: Python<'_>,
        namespace: u32,
        group: u32,
        hashes: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<bool>> {
        let hashes = convert::hashes(hashes)?;
        let pinned = buffers.iter().map(Pinned::to_write).collect::<PyResult<Vec<_>>>()?;
        Ok(self.call(py, async |client| client.get_into(namespace, group, &hashes, &pinned).await)?)
    }

    /// Which blocks are ready. No lease remains afterwards. One round trip.
    fn lookup(&self, py: Python<'_>, namespace: u32, group: u32, hashes: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let hashes = convert::hashes(hashes)?;
        Ok(self.call(py, async |client| client.lookup(namespace, group, &hashes).await)?)
    }

    /// The daemon's content and state. One round trip.
    fn inspect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let reply = self.call(py, async |client| client.inspect().await)?;
        inspected(py, &reply)
    }

    /// Drops the blocks of one namespace or one tenant that nobody holds. One round trip.
    #[pyo3(signature = (*, namespace_id = None, tenant = None, wait_seconds = 10))]
    fn purge<'py>(
        &self,
        py: Python<'py>,
        namespace_id: Option<&str>,
        tenant: Option<String>,
        wait_seconds: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let request = match (namespace_id, tenant) {
            (Some(id), None) => PurgeRequest { namespace_id: from_hex(id)?, ..PurgeRequest::default() },
            (None, Some(tenant)) => {
                PurgeRequest { all_tenants_named_empty: tenant.is_empty(), tenant, ..PurgeRequest::default() }
            }
            _ => return Err(Raised::from(Error::invalid("a purge names a namespace or a tenant")).into()),
        };
        let request = PurgeRequest { wait_seconds, ..request };
        let reply = self.call(py, async |client| client.purge(request).await)?;
        let purged = PyDict::new(py);
        purged.set_item("purged_blocks", reply.purged_blocks)?;
        purged.set_item("purged_bytes", reply.purged_bytes)?;
        purged.set_item("held_blocks", reply.held_blocks)?;
        let ids: Vec<String> = reply.namespace_ids.iter().map(|id| hex(id)).collect();
        purged.set_item("namespace_ids", ids)?;
        Ok(purged)
    }

    /// Ends the connection. Idempotent; does nothing in a child that was forked.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().map(|mut open| open.take())));
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let way = py.detach(|| {
            let open = self.lock()?;
            let Some(Open { client, .. }) = open.as_ref() else { return Ok("closed".to_owned()) };
            Ok::<_, Error>(match client.lends() {
                (true, _) => "copies through shared memory".to_owned(),
                (false, Some(why)) => format!("copies through messages: {why}"),
                (false, None) => "copies through messages".to_owned(),
            })
        });
        format!("<forebay.Client: {}>", way.unwrap_or_else(|error| error.to_string()))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

impl Client {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl AsyncFnOnce(&mut client::Client) -> forebay_core::Result<T> + Send,
    ) -> Result<T, Raised> {
        let (answer, note) = py.detach(|| {
            let mut open = self.lock()?;
            let Open { runtime, client } = open.as_mut().ok_or_else(|| Error::invalid("the client is closed"))?;
            let answer = runtime.block_on(call(client));
            Ok::<_, Error>((answer, client.take_note()))
        })?;
        if let Some(why) = note {
            warn(py, &why);
        }
        Ok(answer?)
    }

    /// Errors in a child that was forked.
    fn lock(&self) -> forebay_core::Result<MutexGuard<'_, Option<Open>>> {
        // A call that panicked left a client that reconnects when necessary.
        Ok(self.open.here()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct ToStore {
    hash: Vec<u8>,
    data: Pinned,
}

impl Source for ToStore {
    fn hash(&self) -> &[u8] {
        &self.hash
    }

    fn bytes(&self) -> u64 {
        self.data.len() as u64
    }

    fn read(&self, read: &mut dyn FnMut(&[u8])) {
        self.data.read(read);
    }
}

impl Sink for NewBytes {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn fill(&self, _: u64, write: &mut dyn FnMut(&mut [u8])) {
        self.fill(write);
    }
}

impl Sink for Pinned {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn fill(&self, _: u64, write: &mut dyn FnMut(&mut [u8])) {
        self.write(write);
    }
}

/// Says why a client cannot lend memory.
fn warn(py: Python<'_>, why: &str) {
    let text = "blocks travel in messages, not through lent memory: %s";
    let told = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", ("forebay",)))
        .and_then(|log| log.call_method1("warning", (text, why)));
    if let Err(error) = told {
        error.write_unraisable(py, None);
    }
}

fn check_memory(bytes: u64) -> forebay_core::Result<()> {
    if bytes > MAX_LENT_BYTES || !bytes.is_multiple_of(1 << 20) {
        return Err(Error::invalid("the memory of a client cannot have this size")
            .with("memory_bytes", bytes)
            .hint("give whole MiB up to 64 MiB, or 0 for copies through messages"));
    }
    Ok(())
}

fn random() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(0u8)
}

fn outcome_name(outcome: CommitOutcome) -> &'static str {
    match outcome {
        CommitOutcome::CommitStored => "stored",
        CommitOutcome::CommitDuplicate => "duplicate",
        CommitOutcome::CommitOrphan => "orphan",
        // The daemon writes the birth record itself, so a block that was not stored had no slot.
        CommitOutcome::CommitIncomplete | CommitOutcome::CommitLost => "full",
    }
}

fn inspected<'py>(py: Python<'py>, reply: &InspectReply) -> PyResult<Bound<'py, PyDict>> {
    let names = ["boot_id", "capacity_bytes", "populated_bytes", "huge_bytes", "pinned_bytes", "fenced_bytes"];
    let numbers = [
        reply.boot_id,
        reply.capacity_bytes,
        reply.populated_bytes,
        reply.huge_bytes,
        reply.pinned_bytes,
        reply.fenced_bytes,
    ];
    let all = dict(py, &names, &numbers)?;
    all.set_item("pool_id", hex(&reply.pool_id))?;
    for (name, text) in [("version", &reply.version), ("revision", &reply.revision), ("policy", &reply.policy)] {
        all.set_item(name, text)?;
    }
    let namespaces = reply.namespaces.iter().map(|namespace| namespace_dict(py, namespace));
    all.set_item("namespaces", namespaces.collect::<PyResult<Vec<_>>>()?)?;
    let sessions = reply.sessions.iter().map(|session| session_dict(py, session));
    all.set_item("sessions", sessions.collect::<PyResult<Vec<_>>>()?)?;
    let classes = reply.classes.iter().map(|class| {
        let names = ["slot_bytes", "slots", "ready", "free", "pinned"];
        dict(py, &names, &[class.slot_bytes, class.slots, class.ready, class.free, class.pinned])
    });
    all.set_item("classes", classes.collect::<PyResult<Vec<_>>>()?)?;
    all.set_item("tiers", reply.tiers.iter().map(|tier| tier_dict(py, tier)).collect::<PyResult<Vec<_>>>()?)?;
    Ok(all)
}

fn namespace_dict<'py>(py: Python<'py>, namespace: &NamespaceInfo) -> PyResult<Bound<'py, PyDict>> {
    let groups = namespace.groups.iter().map(|group| {
        let names = ["group", "block_bytes", "ready_blocks"];
        dict(py, &names, &[group.group.into(), group.block_bytes, group.ready_blocks])
    });
    let entry = PyDict::new(py);
    entry.set_item("namespace_id", hex(&namespace.namespace_id))?;
    entry.set_item("fields", &namespace.fields)?;
    entry.set_item("groups", groups.collect::<PyResult<Vec<_>>>()?)?;
    Ok(entry)
}

fn session_dict<'py>(py: Python<'py>, session: &SessionInfo) -> PyResult<Bound<'py, PyDict>> {
    let names = ["session", "ranks", "attached_ranks", "leases", "leased_blocks", "reserved_blocks"];
    let numbers = [
        session.session,
        session.ranks.into(),
        session.attached_ranks.into(),
        session.leases,
        session.leased_blocks,
        session.reserved_blocks,
    ];
    let entry = dict(py, &names, &numbers)?;
    entry.set_item("instance", session.instance)?;
    entry.set_item("engine_id", &session.engine_id)?;
    entry.set_item("is_connected", session.is_connected)?;
    entry.set_item("registered_bytes", session.registered_bytes)?;
    Ok(entry)
}

fn tier_dict<'py>(py: Python<'py>, tier: &TierInfo) -> PyResult<Bound<'py, PyDict>> {
    let names = [
        "blocks",
        "loading_blocks",
        "late_bytes",
        "waiting_blocks",
        "storing_blocks",
        "promoted_blocks",
        "stored_blocks",
        "evicted_blocks",
    ];
    let numbers = [
        tier.blocks,
        tier.loading_blocks,
        tier.late_bytes,
        tier.waiting_blocks,
        tier.storing_blocks,
        tier.promoted_blocks,
        tier.stored_blocks,
        tier.evicted_blocks,
    ];
    let entry = dict(py, &names, &numbers)?;
    entry.set_item("name", &tier.name)?;
    entry.set_item("state", &tier.state)?;
    entry.set_item("why", &tier.why)?;
    entry.set_item("purge", tier.purge.map(|purge| purge_dict(py, purge)).transpose()?)?;
    Ok(entry)
}

fn purge_dict<'py>(py: Python<'py>, purge: TierPurge) -> PyResult<Bound<'py, PyDict>> {
    let entry = dict(py, &["namespaces", "removed_blocks"], &[purge.namespaces, purge.removed_blocks])?;
    entry.set_item("walked_ratio", purge.walked_ratio)?;
    Ok(entry)
}

fn dict<'py>(py: Python<'py>, names: &[&str], numbers: &[u64]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    names.iter().zip(numbers).try_for_each(|(name, number)| dict.set_item(name, number))?;
    Ok(dict)
}
