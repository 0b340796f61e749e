//! The plain client for any program.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_core::{Error, ErrorKind};
use forebay_rpc::client::{self, GroupBytes};
use forebay_rpc::proto::{
    Block, CommitOutcome, InspectReply, NamespaceInfo, PurgeRequest, SessionInfo, TierInfo, TierPurge,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use tokio::runtime::Runtime;

use crate::buffers::Pinned;
use crate::convert::{self, from_hex, hex};
use crate::error::Raised;
use crate::fork::Own;

/// A plain client for any program: no engine, no shared memory needed. Raises ForebayError.
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
    #[pyo3(signature = (socket_directory = None, *, deadline = 5.0))]
    fn new(socket_directory: Option<&str>, deadline: f64) -> Result<Client, Raised> {
        static CLIENTS: AtomicU32 = AtomicU32::new(0);
        let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start a client").source(error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
        // Processes in containers may have the same number; the random part distinguishes them.
        let (process, number) = (std::process::id(), CLIENTS.fetch_add(1, Ordering::Relaxed));
        let engine_id = format!("client-{process}-{number}-{:016x}", random());
        let directory = client::find_sockets(socket_directory);
        let client = client::Client::new(directory, engine_id, convert::duration(deadline));
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
            Ok((hash.as_bytes().to_vec(), Pinned::to_read(&data)?))
        };
        let pinned = blocks.into_iter().map(pin).collect::<PyResult<Vec<_>>>()?;
        let copy = |(hash, data): (Vec<u8>, Pinned)| Block { hash, data: data.read(<[u8]>::to_vec) };
        let blocks = py.detach(|| pinned.into_iter().map(copy).collect());
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
        let blocks = self.call(py, async |client| client.get(namespace, group, &hashes).await)?;
        Ok(blocks.into_iter().map(|block| block.map(|bytes| PyBytes::new(py, &bytes))).collect())
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
        let lengths = || pinned.iter().map(|buffer| buffer.len() as u64);
        let found = self.call(py, async |client| client.get_of_lengths(namespace, group, &hashes, lengths()).await)?;
        let copy = |(block, buffer): (&Option<Vec<u8>>, &Pinned)| {
            block.as_ref().map(|block| buffer.write(|bytes| bytes.copy_from_slice(block))).is_some()
        };
        Ok(py.detach(|| found.iter().zip(&pinned).map(copy).collect()))
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
        Ok(purged)
    }

    /// Ends the connection. Idempotent; does nothing in a child that was forked.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().map(|mut open| open.take())));
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
        py.detach(|| {
            let mut open = self.lock()?;
            let Open { runtime, client } = open.as_mut().ok_or_else(|| Error::invalid("the client is closed"))?;
            Ok(runtime.block_on(call(client))?)
        })
    }

    /// Errors in a child that was forked.
    fn lock(&self) -> forebay_core::Result<MutexGuard<'_, Option<Open>>> {
        // A call that panicked left a client that reconnects when necessary.
        Ok(self.open.here()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
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
