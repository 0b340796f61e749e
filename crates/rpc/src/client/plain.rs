//! The plain client: it calls, waits, and reports errors.
//!
//! Invariants: it connects at first use and again after the connection ended, so it outlives restarts of the daemon.
//! Namespace handles are the client's own and stay valid: a session keeps only the last namespaces that it opened, so
//! the client opens a namespace again that its session has forgotten, once for each call. Every call can be repeated
//! without harm, so a call that fails because the daemon was replaced since the last call is repeated once.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use tonic::{Response, Status, Streaming};

use super::connect::{Rpc, connect};
use crate::from_status;
use crate::proto::{self, CommitOutcome};
use crate::{Hashes, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, PURGE_OF_DISKS, draw};

/// Bytes of block data in one call: half the largest message, and about 10 ms of the daemon's time.
const CALL_BYTES: usize = MAX_MESSAGE_BYTES / 2;

/// Upper bound of a block's hash and the message's framing.
const OVERHEAD_BYTES: u64 = 4096;

/// A group, and the bytes of one of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupBytes {
    /// The group's index in the namespace; the caller's choice.
    pub group: u32,
    /// Bytes of one block, no more than fit a message.
    pub bytes: u64,
}

/// See the module documentation. Needs a tokio runtime with time and I/O.
pub struct Client {
    directory: PathBuf,
    engine_id: String,
    deadline: Duration,
    namespaces: Vec<Namespace>,
    connection: Option<Connection>,
}

#[derive(PartialEq)]
struct Namespace {
    fields: BTreeMap<String, String>,
    groups: Vec<GroupBytes>,
}

struct Connection {
    rpc: Rpc,
    session: Option<Session>,
}

struct Session {
    id: u64,
    /// The daemon's names of our namespaces, by handle.
    names: HashMap<u32, u32>,
    /// The session lives as long as this stream.
    _events: Streaming<proto::SessionEvent>,
}

/// The common fields of a call within a session.
struct Target {
    rpc: Rpc,
    session: u64,
    namespace: u32,
}

impl Client {
    /// `engine_id` must be unique among the clients of the daemon. Does not connect yet.
    pub fn new(directory: impl Into<PathBuf>, engine_id: impl Into<String>, deadline: Duration) -> Client {
        let (directory, engine_id) = (directory.into(), engine_id.into());
        Client { directory, engine_id, deadline, namespaces: Vec::new(), connection: None }
    }

    /// A handle for blocks of these sizes under this descriptor. One round trip, the first time three. A later call on
    /// it takes two more if the daemon has forgotten it, which keeps the last 256 of a session.
    pub async fn open_namespace(
        &mut self,
        fields: impl IntoIterator<Item = (String, String)>,
        groups: impl IntoIterator<Item = GroupBytes>,
    ) -> Result<u32> {
        let namespace = Namespace { fields: fields.into_iter().collect(), groups: groups.into_iter().collect() };
        if let Some(group) = namespace.groups.iter().find(|group| !fits_a_message(group.bytes)) {
            return Err(Error::new(ErrorKind::Unsupported, "a block is too large for one message")
                .with("bytes", group.bytes)
                .with("largest", MAX_MESSAGE_BYTES as u64 - OVERHEAD_BYTES)
                .hint("use a client that maps the pool for blocks of this size"));
        }
        let known = self.namespaces.iter().position(|other| *other == namespace);
        let handle = known.unwrap_or(self.namespaces.len()) as u32;
        if known.is_none() {
            self.namespaces.push(namespace);
        }
        let opened = self.repeat(async |client: &mut Client| client.target(handle).await).await;
        if opened.is_err() && known.is_none() {
            self.namespaces.pop();
        }
        opened.map(|_| handle)
    }

    /// Stores blocks in prefix order; outcomes in the same order, `Lost` where there was no space. One round trip per
    /// 8 MiB.
    pub async fn put(
        &mut self,
        namespace: u32,
        group: u32,
        predecessor: &[u8],
        blocks: Vec<proto::Block>,
    ) -> Result<Vec<CommitOutcome>> {
        let mut outcomes = Vec::with_capacity(blocks.len());
        let mut predecessor = predecessor.to_vec();
        for blocks in split_by_bytes(blocks) {
            let last = blocks.last().map(|block| block.hash.clone());
            let request = proto::PutRequest { group, predecessor, blocks, ..Default::default() };
            let ask = async |mut to: Target| {
                let request = proto::PutRequest { session: to.session, namespace: to.namespace, ..request.clone() };
                to.rpc.put(request).await
            };
            let reply: proto::PutReply = self.ask(namespace, ask).await?;
            if reply.outcomes.len() != request.blocks.len() {
                return Err(malformed("the reply to a put has the wrong number of outcomes"));
            }
            outcomes.extend(reply.outcomes());
            predecessor = last.unwrap_or_default();
        }
        Ok(outcomes)
    }

    /// The blocks' bytes in the order of the request, `None` where not found. One round trip per 8 MiB.
    pub async fn get(&mut self, namespace: u32, group: u32, hashes: &Hashes) -> Result<Vec<Option<Vec<u8>>>> {
        let block_bytes = self.block_bytes(namespace, group)?;
        let per_call = (CALL_BYTES as u64 / block_bytes).max(1) as usize;
        let mut found: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        let all: Vec<&[u8]> = hashes.iter().collect();
        for part in all.chunks(per_call) {
            let hash_bytes = hashes.hash_bytes() as u32;
            let packed = part.concat();
            let ask = async |mut to: Target| {
                let hashes = packed.clone();
                let Target { session, namespace, .. } = to;
                to.rpc.get(proto::GetRequest { session, namespace, group, hash_bytes, hashes }).await
            };
            let reply: proto::GetReply = self.ask(namespace, ask).await?;
            if reply.blocks.iter().any(|block| block.data.len() as u64 != block_bytes) {
                return Err(malformed("a block was returned with the wrong size"));
            }
            found.extend(reply.blocks.into_iter().map(|block| (block.hash, block.data)));
        }
        Ok(all.into_iter().map(|hash| found.get(hash).cloned()).collect())
    }

    /// As [`get`](Self::get). Errors with `Invalid`, before anything is asked, unless there is a length for each hash
    /// and all are the group's.
    pub async fn get_of_lengths(
        &mut self,
        namespace: u32,
        group: u32,
        hashes: &Hashes,
        mut lengths: impl ExactSizeIterator<Item = u64>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let block_bytes = self.block_bytes(namespace, group)?;
        if lengths.len() != hashes.len() {
            return Err(Error::invalid("there is one buffer for each hash"));
        }
        if let Some(bytes) = lengths.find(|bytes| *bytes != block_bytes) {
            return Err(Error::invalid("a buffer is as long as a block of its group")
                .with("bytes", bytes)
                .with("block_bytes", block_bytes));
        }
        self.get(namespace, group, hashes).await
    }

    /// Which blocks are ready now. No lease remains: a second round trip returns it.
    pub async fn lookup(&mut self, namespace: u32, group: u32, hashes: &Hashes) -> Result<Vec<bool>> {
        let ask = async |mut to: Target| {
            let keys = proto::GroupKeys {
                group,
                hash_bytes: hashes.hash_bytes() as u32,
                hashes: hashes.clone().into_packed(),
            };
            let request = proto::LookupRequest { session: to.session, namespace: to.namespace, groups: vec![keys] };
            let mut replies = to.rpc.lookup(request).await?.into_inner();
            let reply = replies.message().await?.unwrap_or_default();
            // Without a lease it ends here. HTTP/2 closes a connection on which many streams were dropped before.
            while replies.message().await?.is_some() {}
            if reply.lease != 0 {
                let leases = vec![reply.lease];
                let request = proto::ReleaseRequest { session: to.session, leases, ..Default::default() };
                to.rpc.release(request).await?;
            }
            Ok(Response::new(reply))
        };
        let reply: proto::LookupReply = self.ask(namespace, ask).await?;
        let states = reply.groups.into_iter().next().map(|answer| answer.states).unwrap_or_default();
        Ok((0..hashes.len()).map(|at| states.get(at) == Some(&1)).collect())
    }

    /// The daemon's content and state. One round trip, no session.
    pub async fn inspect(&mut self) -> Result<proto::InspectReply> {
        self.ask_without_session(async |mut rpc: Rpc| rpc.inspect(proto::InspectRequest {}).await).await
    }

    /// Whether the daemon is alive and ready. One round trip, no session.
    pub async fn health(&mut self) -> Result<proto::HealthReply> {
        self.ask_without_session(async |mut rpc: Rpc| rpc.health(proto::HealthRequest {}).await).await
    }

    /// Compares the whole pool with its checksums. One round trip; takes as long as reading the pool; no session, no
    /// deadline.
    pub async fn audit(&mut self) -> Result<proto::AuditReply> {
        let mut rpc = connect(&self.directory, self.deadline).await?;
        rpc.audit(proto::AuditRequest {}).await.map(Response::into_inner).map_err(from_status)
    }

    /// Drops blocks; see the protocol. One round trip, no session. Waits longer than other calls, for as long as the
    /// daemon may wait for its disks, and for shared stores if it is asked to empty them. `inspect`, by another client,
    /// says how far the disks are meanwhile. If this call is dropped, the daemon goes on emptying its disks.
    pub async fn purge(&mut self, request: proto::PurgeRequest) -> Result<proto::PurgeReply> {
        let stores = if request.shared_stores { request.timeout_seconds } else { 0 };
        let usual = self.deadline;
        self.deadline += PURGE_OF_DISKS + Duration::from_secs(u64::from(stores) + u64::from(request.wait_seconds));
        let purged = self.ask_without_session(async |mut rpc: Rpc| rpc.purge(request.clone()).await).await;
        self.deadline = usual;
        purged
    }

    /// The hit rate and the best possible one. One round trip, no session.
    pub async fn advise(&mut self) -> Result<proto::AdviseReply> {
        self.ask_without_session(async |mut rpc: Rpc| rpc.advise(proto::AdviseRequest {}).await).await
    }

    /// What an operator asks, at one moment. One round trip, no session.
    pub async fn frame(&mut self, request: proto::FrameRequest) -> Result<proto::FrameReply> {
        self.ask_without_session(async |mut rpc: Rpc| rpc.frame(request.clone()).await).await
    }

    /// Streams all later lookups until the stream is dropped. No session. The deadline is for the beginning.
    pub async fn record(&mut self) -> Result<Streaming<proto::Recorded>> {
        self.ask_without_session(async |mut rpc: Rpc| rpc.record(proto::RecordRequest {}).await).await
    }

    fn block_bytes(&self, namespace: u32, group: u32) -> Result<u64> {
        let groups = &self.namespace(namespace)?.groups;
        let found = groups.iter().find(|other| other.group == group);
        found.map(|group| group.bytes).ok_or_else(|| {
            let error = Error::invalid("the namespace has no such group").with("group", group);
            error.hint("name one of the groups with which the namespace was opened")
        })
    }

    fn namespace(&self, handle: u32) -> Result<&Namespace> {
        let found = self.namespaces.get(handle as usize);
        found.ok_or_else(|| {
            let error = Error::invalid("the namespace does not exist").with("namespace", handle);
            error.hint("give the number that `open_namespace` returned to this client")
        })
    }

    async fn ask<R>(&mut self, namespace: u32, ask: impl AsyncFn(Target) -> Result<Response<R>, Status>) -> Result<R> {
        self.namespace(namespace)?;
        self.repeat(async |client: &mut Client| {
            let target = client.target(namespace).await?;
            let error = match ask(target).await.map_err(from_status) {
                Ok(reply) => return Ok(reply.into_inner()),
                Err(error) => error,
            };
            // No call of a session says so of anything else than the session or its namespace.
            if error.kind() != ErrorKind::NotFound || !client.forget_name(namespace) {
                return Err(error);
            }
            let target = client.target(namespace).await?;
            ask(target).await.map(Response::into_inner).map_err(from_status)
        })
        .await
    }

    async fn ask_without_session<R>(&mut self, ask: impl AsyncFn(Rpc) -> Result<Response<R>, Status>) -> Result<R> {
        self.repeat(async |client: &mut Client| {
            let rpc = client.connection().await?.rpc.clone();
            ask(rpc).await.map(Response::into_inner).map_err(from_status)
        })
        .await
    }

    /// Runs a call, and repeats it once if an older connection turned out to be dead.
    async fn repeat<R>(&mut self, call: impl AsyncFn(&mut Client) -> Result<R>) -> Result<R> {
        let was_connected = self.connection.is_some();
        match self.attempt(&call).await {
            Err(error) if was_connected && error.kind() == ErrorKind::Unavailable => self.attempt(&call).await,
            outcome => outcome,
        }
    }

    async fn attempt<R>(&mut self, call: &impl AsyncFn(&mut Client) -> Result<R>) -> Result<R> {
        let deadline = self.deadline;
        let outcome = tokio::time::timeout(deadline, call(self)).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Timeout, "the daemon did not answer in time")
                .with("deadline_seconds", deadline.as_secs_f64())
                .hint("check whether its process is stopped (state `T` in `ps`), or this machine is overloaded"))
        });
        if let Err(error) = &outcome
            && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
        {
            self.connection = None;
        }
        outcome
    }

    async fn connection(&mut self) -> Result<&mut Connection> {
        if self.connection.is_none() {
            let rpc = connect(&self.directory, self.deadline).await?;
            self.connection = Some(Connection { rpc, session: None });
        }
        Ok(self.connection.as_mut().expect("it was just made"))
    }

    /// The daemon does not know its name of the namespace any more. False if it was never told one.
    fn forget_name(&mut self, handle: u32) -> bool {
        let session = self.connection.as_mut().and_then(|connection| connection.session.as_mut());
        session.is_some_and(|session| session.names.remove(&handle).is_some())
    }

    /// Opens the session and declares the namespace if this connection has not done so yet.
    async fn target(&mut self, handle: u32) -> Result<Target> {
        let request = proto::OpenNamespaceRequest {
            session: 0,
            fields: self.namespace(handle)?.fields.clone().into_iter().collect(),
            groups: self.namespace(handle)?.groups.iter().map(group_message).collect(),
        };
        let engine_id = self.engine_id.clone();
        let Connection { rpc, session } = self.connection().await?;
        if session.is_none() {
            *session = Some(open_session(rpc, engine_id).await?);
        }
        let session = session.as_mut().expect("it was just opened");
        if !session.names.contains_key(&handle) {
            let request = proto::OpenNamespaceRequest { session: session.id, ..request };
            let reply = rpc.open_namespace(request).await.map_err(from_status)?;
            session.names.insert(handle, reply.into_inner().namespace);
        }
        Ok(Target { rpc: rpc.clone(), session: session.id, namespace: session.names[&handle] })
    }
}

/// Requests a session without workers. It holds nothing that could be resumed, so each session is independent.
pub fn lone_session(engine_id: String) -> proto::OpenSessionRequest {
    proto::OpenSessionRequest {
        protocol: PROTOCOL_VERSION,
        engine_id,
        incarnation: draw().to_vec(),
        owner: draw().to_vec(),
        ..Default::default()
    }
}

async fn open_session(rpc: &mut Rpc, engine_id: String) -> Result<Session> {
    let mut events = rpc.open_session(lone_session(engine_id)).await.map_err(from_status)?.into_inner();
    match events.message().await.map_err(from_status)?.and_then(|event| event.event) {
        Some(proto::session_event::Event::Welcome(welcome)) => {
            Ok(Session { id: welcome.session, names: HashMap::new(), _events: events })
        }
        _ => Err(malformed("the session did not begin with a welcome")),
    }
}

fn group_message(group: &GroupBytes) -> proto::Group {
    proto::Group {
        group: group.group,
        attention: proto::Attention::Full as i32,
        // A plain client has no tokens; the daemon requires at least one.
        tokens_per_block: 1,
        is_replicated: false,
        rank_bytes: vec![group.bytes],
    }
}

/// Runs of blocks with a total of up to `CALL_BYTES`, at least one block each.
fn split_by_bytes(blocks: Vec<proto::Block>) -> Vec<Vec<proto::Block>> {
    let (mut runs, mut bytes): (Vec<Vec<_>>, _) = (Vec::new(), 0);
    for block in blocks {
        let size = block.data.len();
        match runs.last_mut() {
            Some(run) if bytes + size <= CALL_BYTES => {
                bytes += size;
                run.push(block);
            }
            _ => {
                bytes = size;
                runs.push(vec![block]);
            }
        }
    }
    runs
}

fn fits_a_message(block_bytes: u64) -> bool {
    block_bytes > 0 && block_bytes + OVERHEAD_BYTES <= MAX_MESSAGE_BYTES as u64
}

fn malformed(message: &str) -> Error {
    Error::new(ErrorKind::Io, message).hint("the daemon and this client may be of different versions")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(bytes: usize) -> proto::Block {
        proto::Block { hash: vec![1], data: vec![0; bytes] }
    }

    #[test]
    fn calls_carry_as_many_blocks_as_fit_and_at_least_one() {
        let third = CALL_BYTES / 3;
        let sizes = [third, third, third, third, CALL_BYTES + 1, 1, 1];
        let runs = split_by_bytes(sizes.into_iter().map(block).collect());
        assert_eq!(runs.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1, 1, 2]);
        assert!(split_by_bytes(Vec::new()).is_empty());
    }
}
