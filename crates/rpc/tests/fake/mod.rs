//! A daemon whose faults a test decides: it freezes, dies, comes back, loses things and holds answers back.
//!
//! It speaks the real protocol over a real socket, remembers every request, and otherwise does the least that a
//! client needs: every key is ready, every reservation is granted from a counter. What the real daemon decides
//! is tested with the real daemon.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::HashMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind};
use forebay_rpc::proto::forebay_server::{Forebay, ForebayServer};
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::*;
use forebay_rpc::{MAX_MESSAGE_BYTES, RPC_SOCKET, to_status, to_words};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::{UnboundedReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// Longest that any test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until `what` is true; panics with its name if that takes too long.
#[track_caller]
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The daemon's directory and memory, which outlive its process.
pub struct Fake {
    directory: tempfile::TempDir,
    shared: Arc<Shared>,
    process: Option<Process>,
}

struct Process {
    stop: oneshot::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

struct Shared {
    memory: Mutex<Memory>,
    /// The names of the calls that are not answered for now.
    held: watch::Sender<Vec<&'static str>>,
}

/// What was asked, and what will be answered.
#[derive(Default)]
pub struct Memory {
    pub pool: Vec<u8>,
    pub opened: Vec<OpenSessionRequest>,
    pub namespaces: Vec<OpenNamespaceRequest>,
    pub lookups: Vec<LookupRequest>,
    pub reserves: Vec<ReserveRequest>,
    pub commits: Vec<CommitRequest>,
    pub aborted: Vec<Held>,
    pub released: Vec<u64>,
    /// Tokens and microseconds.
    pub saved: (u64, u64),
    /// Leases of lookups that were given up.
    pub ended: Vec<u64>,
    pub hinted: Vec<HintRequest>,
    /// Namespaces that a session keeps; all if it is `None`.
    pub kept_namespaces: Option<u32>,
    pub puts: Vec<PutRequest>,
    pub gets: Vec<GetRequest>,
    pub blocks: HashMap<Vec<u8>, Vec<u8>>,
    /// Told to the next session.
    pub lost: Vec<Held>,
    /// The lease of what a session declares.
    pub welcome_lease: u64,
    /// Ranks do not attach by themselves.
    pub is_detached: bool,
    /// Slots it still gives; `None` is without end.
    pub room: Option<usize>,
    pub next_slot: u32,
    pub next_lease: u64,
    pub outcome: CommitOutcome,
    /// So many keys of a lookup, the last ones, are promoting.
    pub promoting: usize,
    /// Of the last lookup; dropped, they end its stream.
    pub replies: Option<mpsc::UnboundedSender<Result<LookupReply, Status>>>,
    pub refuse_session: Option<ErrorKind>,
    pub refuse_namespace: Option<ErrorKind>,
    pub refuse_commits: Option<ErrorKind>,
    pub forget_sessions: bool,
    events: Vec<mpsc::UnboundedSender<Result<SessionEvent, Status>>>,
}

impl Fake {
    /// With its sockets' directory, but not running.
    pub fn new() -> Fake {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let memory = Memory { pool: vec![1; 16], next_lease: 100, welcome_lease: 1, ..Memory::default() };
        let shared = Shared { memory: Mutex::new(memory), held: watch::Sender::new(Vec::new()) };
        Fake { directory, shared: Arc::new(shared), process: None }
    }

    pub fn started() -> Fake {
        let mut fake = Fake::new();
        fake.start();
        fake
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.shared)
    }

    pub fn start(&mut self) {
        let socket = self.directory().join(RPC_SOCKET);
        // A killed daemon leaves its socket behind.
        let _ = std::fs::remove_file(&socket);
        let (stop, stopped) = oneshot::channel();
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("the socket is free");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let shared = self.shared.clone();
        let thread = std::thread::spawn(move || serve(shared, listener, stopped));
        self.process = Some(Process { stop, thread });
    }

    /// Says more of the last lookup: the states of the keys that were promoting, and the slots of those that are ready.
    pub fn reply(&self, states: &[u8], slots: &[u32]) {
        let memory = self.memory();
        let group = GroupAnswer {
            states: states.to_vec(),
            slots: to_words(slots),
            generations: to_words(&vec![1; slots.len()]),
            sources: Vec::new(),
        };
        let reply = LookupReply { lease: memory.next_lease, groups: vec![group] };
        memory.replies.as_ref().expect("keys are promoting").send(Ok(reply)).expect("the lookup goes on");
    }

    /// Ends it at once, with all its connections.
    pub fn kill(&mut self) {
        let process = self.process.take().expect("it runs");
        drop(process.stop);
        process.thread.join().expect("the fake does not panic");
        self.memory().events.clear();
        self.memory().replies = None;
    }

    /// Calls of these names are taken but not answered until `resume`.
    pub fn hold(&self, calls: &[&'static str]) {
        self.shared.held.send_replace(calls.to_vec());
    }

    pub fn freeze(&self) {
        self.hold(&["open_session", "open_namespace", "lookup", "reserve", "commit", "abort", "release", "hint"]);
    }

    pub fn resume(&self) {
        self.shared.held.send_replace(Vec::new());
    }

    pub fn send(&self, event: Event) {
        for events in &self.memory().events {
            // An ended session cannot be told anything.
            let _ = events.send(Ok(SessionEvent { event: Some(event.clone()) }));
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if self.process.is_some() {
            self.kill();
        }
    }
}

fn serve(shared: Arc<Shared>, listener: std::os::unix::net::UnixListener, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
        let service = ForebayServer::new(Service(shared))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let server = tonic::transport::Server::builder()
            .initial_stream_window_size(forebay_rpc::WINDOW_BYTES)
            .initial_connection_window_size(forebay_rpc::WINDOW_BYTES)
            .max_frame_size(forebay_rpc::FRAME_BYTES)
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::select! {
            outcome = server => outcome.expect("the fake serves"),
            _ = stopped => (),
        }
    });
}

struct Service(Arc<Shared>);

impl Service {
    async fn answer(&self, call: &'static str) -> MutexGuard<'_, Memory> {
        let mut held = self.0.held.subscribe();
        held.wait_for(|held| !held.contains(&call)).await.expect("the sender is in `self`");
        lock(&self.0)
    }
}

/// A test that fails while it reads the memory must not make the fake fail too.
fn lock(shared: &Shared) -> MutexGuard<'_, Memory> {
    shared.memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refusal(kind: Option<ErrorKind>) -> Result<(), Status> {
    kind.map_or(Ok(()), |kind| Err(to_status(&Error::new(kind, "the test says no"))))
}

impl Memory {
    /// Names count from 1 on, over all sessions.
    fn check_namespace(&self, name: u32) -> Result<(), Status> {
        let newest = self.namespaces.len() as u32;
        let is_kept = (1..=newest).contains(&name) && self.kept_namespaces.is_none_or(|kept| newest - name < kept);
        refusal((!is_kept).then_some(ErrorKind::NotFound))
    }
}

#[tonic::async_trait]
impl Forebay for Service {
    type OpenSessionStream = Pin<Box<dyn Stream<Item = Result<SessionEvent, Status>> + Send>>;

    async fn open_session(
        &self,
        request: Request<OpenSessionRequest>,
    ) -> Result<Response<Self::OpenSessionStream>, Status> {
        let mut memory = self.answer("open_session").await;
        let request = request.into_inner();
        let lease = if request.leases.is_empty() { 0 } else { memory.welcome_lease };
        memory.opened.push(request);
        refusal(memory.refuse_session)?;
        let (sender, events) = mpsc::unbounded_channel();
        let welcome = Welcome {
            session: memory.opened.len() as u64,
            pool_id: memory.pool.clone(),
            lost: std::mem::take(&mut memory.lost),
            lease,
            ..Welcome::default()
        };
        let attached = (!memory.is_detached).then_some(Event::Attached(Attached {}));
        for event in [Some(Event::Welcome(welcome)), attached].into_iter().flatten() {
            sender.send(Ok(SessionEvent { event: Some(event) })).expect("the receiver is here");
        }
        memory.events.push(sender);
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(events).map(|event| event))))
    }

    async fn open_namespace(
        &self,
        request: Request<OpenNamespaceRequest>,
    ) -> Result<Response<OpenNamespaceReply>, Status> {
        let mut memory = self.answer("open_namespace").await;
        memory.namespaces.push(request.into_inner());
        refusal(memory.refuse_namespace)?;
        let namespace = memory.namespaces.len() as u32;
        Ok(Response::new(OpenNamespaceReply { namespace, namespace_id: vec![0; 16] }))
    }

    type LookupStream = UnboundedReceiverStream<Result<LookupReply, Status>>;

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<Self::LookupStream>, Status> {
        let request = request.into_inner();
        lock(&self.0).lookups.push(request.clone());
        let mut memory = self.answer("lookup").await;
        if memory.forget_sessions {
            return Err(to_status(&Error::new(ErrorKind::NotFound, "there is no such session")));
        }
        memory.check_namespace(request.namespace)?;
        memory.next_lease += 1;
        let groups = request.groups.iter().map(|group| {
            let keys = group.hashes.len() / group.hash_bytes as usize;
            let ready = keys - memory.promoting.min(keys);
            GroupAnswer {
                states: (0..keys).map(|key| if key < ready { 1 } else { 2 }).collect(),
                slots: to_words(&(0..ready as u32).map(|key| 1000 + key).collect::<Vec<_>>()),
                generations: to_words(&vec![1; ready]),
                sources: Vec::new(),
            }
        });
        let reply = LookupReply { lease: memory.next_lease, groups: groups.collect() };
        let (sender, replies) = mpsc::unbounded_channel();
        sender.send(Ok(reply)).expect("the receiver is here");
        memory.replies = Some(sender).filter(|_| memory.promoting > 0);
        Ok(Response::new(UnboundedReceiverStream::new(replies)))
    }

    async fn hint(&self, request: Request<HintRequest>) -> Result<Response<Done>, Status> {
        lock(&self.0).hinted.push(request.into_inner());
        drop(self.answer("hint").await);
        Ok(Response::new(Done {}))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<Done>, Status> {
        let mut memory = self.answer("release").await;
        let ReleaseRequest { leases, lookups, saved_tokens, saved_prefill_us, .. } = request.into_inner();
        if leases.iter().chain(&lookups).any(|lease| *lease == memory.next_lease) {
            memory.replies = None;
        }
        memory.released.extend(leases);
        memory.saved = (memory.saved.0 + saved_tokens, memory.saved.1 + saved_prefill_us);
        memory.ended.extend(lookups);
        Ok(Response::new(Done {}))
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Result<Response<ReserveReply>, Status> {
        let mut memory = self.answer("reserve").await;
        let request = request.into_inner();
        memory.reserves.push(request);
        let count = memory.room.map_or(request.count, |room| request.count.min(room as u32));
        memory.room = memory.room.map(|room| room - count as usize);
        let slots: Vec<u32> = (memory.next_slot..memory.next_slot + count).collect();
        memory.next_slot += count;
        Ok(Response::new(ReserveReply { generations: vec![1; slots.len()], slots }))
    }

    async fn commit(&self, request: Request<CommitRequest>) -> Result<Response<CommitReply>, Status> {
        let mut memory = self.answer("commit").await;
        refusal(memory.refuse_commits)?;
        let request = request.into_inner();
        let blocks = request.groups.iter().map(|group| group.slots.len()).sum();
        memory.commits.push(request);
        Ok(Response::new(CommitReply { outcomes: vec![memory.outcome as i32; blocks] }))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<Done>, Status> {
        let mut memory = self.answer("abort").await;
        memory.aborted.extend(request.into_inner().slots);
        Ok(Response::new(Done {}))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let mut memory = self.answer("put").await;
        let request = request.into_inner();
        memory.check_namespace(request.namespace)?;
        let mut outcomes = Vec::new();
        for block in &request.blocks {
            let old = memory.blocks.insert(block.hash.clone(), block.data.clone());
            outcomes
                .push(if old.is_none() { CommitOutcome::CommitStored } else { CommitOutcome::CommitDuplicate } as i32);
        }
        memory.puts.push(request);
        Ok(Response::new(PutReply { outcomes }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let mut memory = self.answer("get").await;
        let request = request.into_inner();
        memory.check_namespace(request.namespace)?;
        let find = |hash: &[u8]| {
            let data = memory.blocks.get(hash)?.clone();
            Some(Block { hash: hash.to_vec(), data })
        };
        let blocks = request.hashes.chunks(request.hash_bytes as usize).filter_map(find).collect();
        memory.gets.push(request);
        Ok(Response::new(GetReply { blocks, ..GetReply::default() }))
    }

    async fn inspect(&self, _: Request<InspectRequest>) -> Result<Response<InspectReply>, Status> {
        let memory = self.answer("inspect").await;
        Ok(Response::new(InspectReply { pool_id: memory.pool.clone(), ..InspectReply::default() }))
    }

    async fn audit(&self, _: Request<AuditRequest>) -> Result<Response<AuditReply>, Status> {
        Ok(Response::new(AuditReply::default()))
    }

    async fn health(&self, _: Request<HealthRequest>) -> Result<Response<HealthReply>, Status> {
        Ok(Response::new(HealthReply::default()))
    }

    async fn purge(&self, _: Request<PurgeRequest>) -> Result<Response<PurgeReply>, Status> {
        Ok(Response::new(PurgeReply::default()))
    }

    async fn advise(&self, _: Request<AdviseRequest>) -> Result<Response<AdviseReply>, Status> {
        Ok(Response::new(AdviseReply::default()))
    }

    async fn frame(&self, _: Request<FrameRequest>) -> Result<Response<FrameReply>, Status> {
        Ok(Response::new(FrameReply::default()))
    }

    type PingStream = Pin<Box<dyn Stream<Item = Result<PingReply, Status>> + Send>>;

    async fn ping(&self, _: Request<PingRequest>) -> Result<Response<Self::PingStream>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }

    type RecordStream = Pin<Box<dyn Stream<Item = Result<Recorded, Status>> + Send>>;

    async fn record(&self, _: Request<RecordRequest>) -> Result<Response<Self::RecordStream>, Status> {
        Err(Status::unimplemented("the fake records nothing"))
    }
}
