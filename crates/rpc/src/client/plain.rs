//! The plain client: it calls, waits, and reports errors.
//!
//! Invariants: it connects at first use and again after the connection ended, so it outlives restarts of the daemon.
//! Namespace handles are the client's own and stay valid: a session keeps only the last namespaces that it opened, so
//! the client opens a namespace again that its session has forgotten, once for each call. Every call can be repeated
//! without harm, so a call that fails because the daemon was replaced since the last call is repeated once.
//!
//! Payloads go through memory that the client lends to the daemon, if it has a way to lend some, and else through the
//! messages. It lends when its calls have moved enough, and gives the memory back when no call used it for a while.
//! Lent memory belongs to one call at a time. A call that is given up takes its memory with it, because the daemon may
//! still touch it: only a call that the daemon has answered leaves it for the next one.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use tonic::{Response, Status, Streaming};

use super::connect::{Rpc, connect};
use super::lending::{Lend, Memory, Shelf, Sink, Source};
use crate::from_status;
use crate::proto::{self, CommitOutcome};
use crate::{Hashes, MAX_BLOCKS, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, PURGE_OF_DISKS, pack, random_id};

/// When a daemon that refused memory is asked again: a limit may have been reached, and left.
const LEND_AGAIN: Duration = Duration::from_secs(30);

/// Time for the exchange in which memory is lent: a daemon needs some milliseconds. What is left of a call's deadline
/// is for its messages.
const LEND_DEADLINE: Duration = Duration::from_secs(2);

/// Calls that move less gain nothing by memory that is still to be lent.
const LARGE_BYTES: u64 = 256 << 10;

/// Memory that no call used for so long is given back. The daemon gives it back after `limits.idle_seconds`.
const IDLE: Duration = Duration::from_secs(30);

/// Bytes of block data in one call: half the largest message, and about 10 ms of the daemon's time.
const CALL_BYTES: u64 = MAX_MESSAGE_BYTES as u64 / 2;

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
    /// How memory is lent, and how much.
    lend: Option<(u64, Lend)>,
    /// Why payloads go through messages, and when that was found.
    not_lent: Option<(String, Instant)>,
    /// Somebody knows.
    is_told: bool,
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
    /// For memory; an older daemon has given none.
    lending_token: Vec<u8>,
    memory: Option<Shelf>,
    /// What large calls have moved in messages since memory was lent last.
    moved_bytes: u64,
    /// The session lives as long as this stream.
    _events: Streaming<proto::SessionEvent>,
}

/// The common fields of a call within a session.
struct Target {
    rpc: Rpc,
    session: u64,
    namespace: u32,
    memory: Option<Box<dyn Memory>>,
}

impl Client {
    /// `engine_id` must be unique among the clients of the daemon. Does not connect yet.
    pub fn new(directory: impl Into<PathBuf>, engine_id: impl Into<String>, deadline: Duration) -> Client {
        let (directory, engine_id) = (directory.into(), engine_id.into());
        Client {
            directory,
            engine_id,
            deadline,
            namespaces: Vec::new(),
            connection: None,
            lend: None,
            not_lent: None,
            is_told: false,
        }
    }

    /// Lets payloads go through memory, of so many bytes.
    pub fn lending(self, bytes: u64, lend: Lend) -> Client {
        Client { lend: Some((bytes, lend)), ..self }
    }

    /// Why payloads go through messages, the first time that it is asked after that began.
    pub fn take_note(&mut self) -> Option<String> {
        let (why, _) = self.not_lent.as_ref().filter(|_| !self.is_told)?;
        self.is_told = true;
        Some(why.clone())
    }

    /// Whether payloads go through lent memory now, and why not if it was tried.
    pub fn lends(&self) -> (bool, Option<&str>) {
        let session = self.connection.as_ref().and_then(|connection| connection.session.as_ref());
        let memory = session.and_then(|session| session.memory.as_ref());
        (memory.is_some_and(Shelf::has_memory), self.not_lent.as_ref().map(|(why, _)| why.as_str()))
    }

    /// A handle for blocks of these sizes under this descriptor. One round trip, the first time three. A later call on
    /// it takes two more if the daemon has forgotten it, which keeps the last 256 of a session.
    pub async fn open_namespace(
        &mut self,
        fields: impl IntoIterator<Item = (String, String)>,
        groups: impl IntoIterator<Item = GroupBytes>,
    ) -> Result<u32> {
        let namespace = Namespace { fields: fields.into_iter().collect(), groups: groups.into_iter().collect() };
        if let Some(group) = namespace.groups.iter().find(|group| group.bytes == 0) {
            return Err(Error::invalid("blocks of a group have no bytes")
                .with("group", group.group)
                .hint("give the bytes of one block for each group"));
        }
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

    /// Stores blocks in prefix order; outcomes in the same order, `Lost` where there was no space. Errors with
    /// `Invalid`, before anything is asked, unless all blocks have the size of the group's blocks and all hashes one
    /// length. One round trip per 8 MiB.
    pub async fn put<S: Source>(
        &mut self,
        namespace: u32,
        group: u32,
        predecessor: &[u8],
        blocks: Vec<S>,
    ) -> Result<Vec<CommitOutcome>> {
        self.check_sizes(namespace, group, blocks.iter().map(Source::bytes))?;
        pack(blocks.iter().map(Source::hash))?;
        let mut outcomes = Vec::with_capacity(blocks.len());
        let mut predecessor = predecessor.to_vec();
        for blocks in split(&blocks, self.call_bytes()) {
            let ask = async |to: &mut Target| put_part(to, group, &predecessor, blocks).await;
            let bytes = blocks.iter().map(Source::bytes).sum();
            let reply: proto::PutReply = self.ask(namespace, bytes, ask).await?;
            if reply.outcomes.len() != blocks.len() {
                return Err(malformed("the reply to a put has the wrong number of outcomes"));
            }
            outcomes.extend(reply.outcomes());
            predecessor = blocks.last().map(|block| block.hash().to_vec()).unwrap_or_default();
        }
        Ok(outcomes)
    }

    /// The blocks' bytes in the order of the request, `None` where not found. One round trip per 8 MiB.
    pub async fn get(&mut self, namespace: u32, group: u32, hashes: &Hashes) -> Result<Vec<Option<Vec<u8>>>> {
        let blocks: Vec<Mutex<Vec<u8>>> = (0..hashes.len()).map(|_| Mutex::default()).collect();
        let found = self.fill(namespace, group, hashes, &blocks).await?;
        let bytes = |block: Mutex<Vec<u8>>| block.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(blocks.into_iter().zip(found).map(|(block, found)| found.then(|| bytes(block))).collect())
    }

    /// Fills one place for each hash that is found, and says which were. One round trip per 8 MiB, the last ones first:
    /// the first block of a prompt then counts as the one used last, so the policy keeps it longest.
    async fn fill<S: Sink>(&mut self, namespace: u32, group: u32, hashes: &Hashes, sinks: &[S]) -> Result<Vec<bool>> {
        let block_bytes = self.block_bytes(namespace, group)?;
        let per_call = (self.call_bytes() / block_bytes).clamp(1, MAX_BLOCKS as u64) as usize;
        let mut found = vec![false; hashes.len()];
        let all: Vec<&[u8]> = hashes.iter().collect();
        let parts = all.chunks(per_call).zip(sinks.chunks(per_call)).zip(found.chunks_mut(per_call));
        for ((part, sinks), found) in parts.rev() {
            let ask = async |to: &mut Target| get_part(to, group, part, sinks, block_bytes).await;
            found.copy_from_slice(&self.ask(namespace, part.len() as u64 * block_bytes, ask).await?);
        }
        Ok(found)
    }

    /// Fills one place for each hash, and says which were found; the other places are unchanged. Errors with `Invalid`,
    /// before anything is asked, unless there is a place for each hash and all are as long as the group's blocks. One
    /// round trip per 8 MiB.
    pub async fn get_into<S: Sink>(
        &mut self,
        namespace: u32,
        group: u32,
        hashes: &Hashes,
        sinks: &[S],
    ) -> Result<Vec<bool>> {
        let mut lengths = sinks.iter().map(Sink::bytes);
        let block_bytes = self.block_bytes(namespace, group)?;
        if lengths.len() != hashes.len() {
            return Err(Error::invalid("there is one buffer for each hash"));
        }
        if let Some(bytes) = lengths.find(|bytes| *bytes != block_bytes) {
            return Err(Error::invalid("a buffer is as long as a block of its group")
                .with("bytes", bytes)
                .with("block_bytes", block_bytes));
        }
        self.fill(namespace, group, hashes, sinks).await
    }

    /// Which blocks are ready now. No lease remains: a second round trip returns it.
    pub async fn lookup(&mut self, namespace: u32, group: u32, hashes: &Hashes) -> Result<Vec<bool>> {
        let ask = async |to: &mut Target| {
            let keys = proto::GroupKeys {
                group,
                hash_bytes: hashes.hash_bytes() as u32,
                hashes: hashes.clone().into_packed(),
            };
            let request = proto::LookupRequest { session: to.session, namespace: to.namespace, groups: vec![keys] };
            let mut replies = to.rpc.lookup(request).await.map_err(from_status)?.into_inner();
            let reply = replies.message().await.map_err(from_status)?.unwrap_or_default();
            // Without a lease it ends here. HTTP/2 closes a connection on which many streams were dropped before.
            while replies.message().await.map_err(from_status)?.is_some() {}
            if reply.lease != 0 {
                let leases = vec![reply.lease];
                let request = proto::ReleaseRequest { session: to.session, leases, ..Default::default() };
                to.rpc.release(request).await.map_err(from_status)?;
            }
            Ok(reply)
        };
        let reply: proto::LookupReply = self.ask(namespace, 0, ask).await?;
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

    /// Errors with `Invalid` where one is not a block of the group: it may be too long for a message.
    fn check_sizes(&self, namespace: u32, group: u32, mut sizes: impl Iterator<Item = u64>) -> Result<()> {
        let block_bytes = self.block_bytes(namespace, group)?;
        match sizes.find(|bytes| *bytes != block_bytes) {
            None => Ok(()),
            Some(bytes) => Err(Error::invalid("a block's size differs from its group's block size")
                .with("bytes", bytes)
                .with("block_bytes", block_bytes)
                .hint("all blocks of a group have the size with which their namespace was opened")),
        }
    }

    /// Bytes of a block of the group. No round trip.
    pub fn block_bytes(&self, namespace: u32, group: u32) -> Result<u64> {
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

    /// Most bytes of blocks in a call of more than one.
    fn call_bytes(&self) -> u64 {
        self.lend.as_ref().map_or(CALL_BYTES, |(bytes, _)| CALL_BYTES.min(*bytes))
    }

    /// A call that moves so many bytes of blocks.
    async fn ask<R>(&mut self, namespace: u32, bytes: u64, ask: impl AsyncFn(&mut Target) -> Result<R>) -> Result<R> {
        self.namespace(namespace)?;
        self.repeat(async |client: &mut Client| {
            let error = match client.ask_once(namespace, bytes, &ask, true).await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            // No call of a session says so of anything else than the session, its namespace or its memory.
            if error.kind() != ErrorKind::NotFound || !client.forget_name(namespace) {
                return Err(error);
            }
            match client.ask_once(namespace, bytes, &ask, false).await {
                // The name is new, so it was the memory, which is gone here too.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    client.ask_once(namespace, bytes, &ask, false).await
                }
                answer => answer,
            }
        })
        .await
    }

    /// `is_kept`: the memory, also where the daemon does not know it, or the name of the namespace.
    async fn ask_once<R>(
        &mut self,
        namespace: u32,
        bytes: u64,
        ask: &impl AsyncFn(&mut Target) -> Result<R>,
        is_kept: bool,
    ) -> Result<R> {
        let mut target = self.target(namespace).await?;
        target.memory = self.memory(bytes);
        let answer = ask(&mut target).await;
        // Other errors may come from the connection, while the daemon is still at the call.
        let is_over = answer.as_ref().map_or_else(|error| is_of_daemon(error.kind(), is_kept), |_| true);
        let session = self.connection.as_mut().and_then(|connection| connection.session.as_mut());
        let shelf = session.and_then(|session| session.memory.as_ref());
        if let Some((shelf, memory)) = shelf.zip(target.memory.take()).filter(|_| is_over) {
            shelf.put_back(memory);
        }
        answer
    }

    /// The memory for a call of the session that moves so many bytes, lent now if there is none. `None`: they travel in
    /// messages. Whatever keeps the daemon from taking memory, the call itself finds out whether the daemon is there.
    fn memory(&mut self, bytes: u64) -> Option<Box<dyn Memory>> {
        let (lent_bytes, lend) = self.lend.as_mut().filter(|(lent_bytes, _)| bytes <= *lent_bytes)?;
        let session = self.connection.as_mut()?.session.as_mut()?;
        if bytes == 0 {
            return None;
        }
        if let Some(memory) = session.memory.as_ref().and_then(Shelf::take) {
            return Some(memory);
        }
        let was_refused = self.not_lent.as_ref().is_some_and(|(_, at)| at.elapsed() < LEND_AGAIN);
        session.moved_bytes += if bytes < LARGE_BYTES { 0 } else { bytes };
        // Memory of 16 MiB takes some 16 ms of a processor to lend, and 8 MiB in messages 11 ms.
        if bytes < LARGE_BYTES || session.moved_bytes < *lent_bytes / 2 || was_refused {
            return None;
        }
        session.moved_bytes = 0;
        let (id, token) = (session.id, session.lending_token.clone());
        let lent = match token.is_empty() {
            true => Err(Error::new(ErrorKind::Unsupported, "the daemon is older and takes no memory")),
            false => {
                let lending = proto::Lending { session: id, token, bytes: *lent_bytes };
                lend(&self.directory, lending, LEND_DEADLINE.min(self.deadline / 2))
            }
        };
        match lent.and_then(|memory| Shelf::new(memory, IDLE)) {
            Ok(shelf) => {
                self.not_lent = None;
                session.memory.insert(shelf).take()
            }
            Err(error) => {
                self.not_lent = Some((error.told(), Instant::now()));
                None
            }
        }
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
        self.connection().await?;
        let Connection { rpc, session } = self.connection.as_mut().expect("it was just made");
        if session.is_none() {
            *session = Some(open_session(rpc, engine_id).await?);
        }
        let session = session.as_mut().expect("it was just opened");
        if !session.names.contains_key(&handle) {
            let request = proto::OpenNamespaceRequest { session: session.id, ..request };
            let reply = rpc.open_namespace(request).await.map_err(from_status)?;
            session.names.insert(handle, reply.into_inner().namespace);
        }
        Ok(Target { rpc: rpc.clone(), session: session.id, namespace: session.names[&handle], memory: None })
    }
}

/// Requests a session without workers. It holds nothing that could be resumed, so each session is independent.
pub fn lone_session(engine_id: String) -> proto::OpenSessionRequest {
    proto::OpenSessionRequest {
        protocol: PROTOCOL_VERSION,
        engine_id,
        incarnation: random_id().to_vec(),
        owner: random_id().to_vec(),
        ..Default::default()
    }
}

async fn open_session(rpc: &mut Rpc, engine_id: String) -> Result<Session> {
    let mut events = rpc.open_session(lone_session(engine_id)).await.map_err(from_status)?.into_inner();
    match events.message().await.map_err(from_status)?.and_then(|event| event.event) {
        Some(proto::session_event::Event::Welcome(welcome)) => {
            let (names, lending_token) = (HashMap::new(), welcome.lending_token);
            Ok(Session { id: welcome.session, names, lending_token, memory: None, moved_bytes: 0, _events: events })
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
        window_blocks: 0,
    }
}

/// Whether the daemon itself has answered, so that it touches no memory for the call any more.
fn is_of_daemon(kind: ErrorKind, is_not_found: bool) -> bool {
    kind == ErrorKind::Invalid || is_not_found && kind == ErrorKind::NotFound
}

/// One call of a put.
async fn put_part<S: Source>(to: &mut Target, group: u32, predecessor: &[u8], blocks: &[S]) -> Result<proto::PutReply> {
    let lent = to.memory.as_mut().map(|memory| {
        let mut offset = 0;
        for block in blocks {
            block.read(&mut |bytes| memory.write(offset, bytes));
            offset += block.bytes();
        }
        proto::LentPlace { memory: memory.number(), offset: 0 }
    });
    let message = |block: &S| {
        let mut data = Vec::new();
        if lent.is_none() {
            block.read(&mut |bytes| data = bytes.to_vec());
        }
        proto::Block { hash: block.hash().to_vec(), data }
    };
    let request = proto::PutRequest {
        session: to.session,
        namespace: to.namespace,
        group,
        predecessor: predecessor.to_vec(),
        blocks: blocks.iter().map(message).collect(),
        lent,
    };
    to.rpc.put(request).await.map(Response::into_inner).map_err(from_status)
}

/// One call of a get; a block that does not match its checksum is asked for again, in a message.
async fn get_part<S: Sink>(
    to: &mut Target,
    group: u32,
    hashes: &[&[u8]],
    sinks: &[S],
    block_bytes: u64,
) -> Result<Vec<bool>> {
    let lent = to.memory.as_ref().map(|memory| proto::LentPlace { memory: memory.number(), offset: 0 });
    let is_lent = lent.is_some();
    let reply = get_call(to, group, hashes, lent).await?;
    if !is_lent {
        return take_blocks(reply, hashes, sinks, block_bytes);
    }
    let memory = to.memory.as_mut().expect("it was named");
    let mut is_found = vec![false; hashes.len()];
    let mut differ = Vec::new();
    let is_compared = !reply.checksums.is_empty();
    if is_compared && reply.checksums.len() != reply.found.len() {
        return Err(malformed("the reply to a get has the wrong number of checksums"));
    }
    for (index, at) in reply.found.iter().enumerate() {
        let at = *at as usize;
        let sink = sinks.get(at).ok_or_else(|| malformed("the reply to a get names a block that was not asked for"))?;
        let offset = at as u64 * block_bytes;
        if is_compared && memory.checksum(offset, block_bytes) != reply.checksums[index] {
            differ.push(at);
            continue;
        }
        sink.fill(block_bytes, &mut |bytes| memory.read(offset, bytes));
        is_found[at] = true;
    }
    for at in differ {
        let reply = get_call(to, group, &hashes[at..=at], None).await?;
        is_found[at] = take_blocks(reply, &hashes[at..=at], &sinks[at..=at], block_bytes)? == [true];
    }
    Ok(is_found)
}

async fn get_call(
    to: &mut Target,
    group: u32,
    hashes: &[&[u8]],
    lent: Option<proto::LentPlace>,
) -> Result<proto::GetReply> {
    let Target { session, namespace, .. } = *to;
    let hash_bytes = hashes.first().map_or(0, |hash| hash.len()) as u32;
    let request = proto::GetRequest { session, namespace, group, hash_bytes, hashes: hashes.concat(), lent };
    to.rpc.get(request).await.map(Response::into_inner).map_err(from_status)
}

/// The blocks of a message, each to the places of its hash.
fn take_blocks<S: Sink>(reply: proto::GetReply, hashes: &[&[u8]], sinks: &[S], block_bytes: u64) -> Result<Vec<bool>> {
    if reply.blocks.iter().any(|block| block.data.len() as u64 != block_bytes) {
        return Err(malformed("a block was returned with the wrong size"));
    }
    let found: HashMap<&[u8], &[u8]> = reply.blocks.iter().map(|block| (&block.hash[..], &block.data[..])).collect();
    let take = |(hash, sink): (&&[u8], &S)| {
        let data = found.get(hash);
        data.map(|data| sink.fill(block_bytes, &mut |bytes| bytes.copy_from_slice(data))).is_some()
    };
    Ok(hashes.iter().zip(sinks).map(take).collect())
}

/// Runs of blocks with a total of up to `call_bytes`, at least one block each and as many as a call may have.
fn split<S: Source>(blocks: &[S], call_bytes: u64) -> Vec<&[S]> {
    let (mut runs, mut begin, mut bytes) = (Vec::new(), 0, 0);
    for (at, block) in blocks.iter().enumerate() {
        if at > begin && (bytes + block.bytes() > call_bytes || at - begin == MAX_BLOCKS) {
            runs.push(&blocks[begin..at]);
            (begin, bytes) = (at, 0);
        }
        bytes += block.bytes();
    }
    runs.extend((begin < blocks.len()).then(|| &blocks[begin..]));
    runs
}

fn fits_a_message(block_bytes: u64) -> bool {
    block_bytes + OVERHEAD_BYTES <= MAX_MESSAGE_BYTES as u64
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
        let third = CALL_BYTES as usize / 3;
        let sizes = [third, third, third, third, CALL_BYTES as usize + 1, 1, 1];
        let blocks: Vec<_> = sizes.into_iter().map(block).collect();
        let runs = split(&blocks, CALL_BYTES);
        assert_eq!(runs.iter().map(|run| run.len()).collect::<Vec<_>>(), [3, 1, 1, 2]);
        assert!(split::<proto::Block>(&[], CALL_BYTES).is_empty());
        let tiny: Vec<_> = (0..=MAX_BLOCKS).map(|_| block(1)).collect();
        assert_eq!(split(&tiny, CALL_BYTES).iter().map(|run| run.len()).collect::<Vec<_>>(), [MAX_BLOCKS, 1]);
    }
}
