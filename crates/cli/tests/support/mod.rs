//! A real daemon process, a client of its control plane, and a worker that maps its pool from this process.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod threads;
pub mod tiers;

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::{Generation, SlotId};
use forebay_io::pool::{BirthRecord, GeometryDescription, MapperFds, Mapping, recv_fds};
use forebay_rpc::proto::forebay_client::ForebayClient;
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::worker_says::Says;
use forebay_rpc::proto::*;
use forebay_rpc::{ATTACH_SOCKET, PROTOCOL_VERSION, RPC_SOCKET, words};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::time::error::Elapsed;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// No single step of a test takes longer on any machine that is alive.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Directories of one daemon, removed at the end with the pool in them.
pub struct Place {
    root: PathBuf,
    /// Nothing in a process that another test has started: the directories are that test's.
    directory: Option<tempfile::TempDir>,
    /// The command that serves here.
    binary: PathBuf,
}

impl Place {
    pub fn new() -> Place {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let mut place = Place::of(directory.path());
        place.directory = Some(directory);
        place
    }

    /// The place of the process that has started this one.
    pub fn of(root: &Path) -> Place {
        Place { root: root.into(), directory: None, binary: env!("CARGO_BIN_EXE_forebay").into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The next daemon of this place runs another build of the command.
    pub fn run_next(&mut self, binary: &Path) {
        self.binary = binary.into();
    }

    pub fn sockets(&self) -> PathBuf {
        self.root.join("s")
    }

    pub fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    /// Where daemons write their log.
    pub fn log(&self) -> PathBuf {
        self.root.join("log")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.directory.is_none() {
            return;
        }
        // The pool may have mounted a filesystem of its own. There is none where the test made a directory that is
        // refused. A process that another test is starting has copies of all descriptors, until it is another program.
        let begun = Instant::now();
        let (removed, is_left) = loop {
            let removed = forebay_io::pool::remove(&self.pool());
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("the kernel tells");
            let is_left = mounts.contains(&*self.root.to_string_lossy());
            if !is_left || begun.elapsed() > DEADLINE / 4 {
                break (removed, is_left);
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(std::thread::panicking() || !is_left, "the test leaves a mount: {removed:?}");
    }
}

/// How long loads of these tiers may take that no argument says it of: hits are counted in tests, and a busy machine or
/// disk may take longer than the default of a second.
const PATIENCE_MS: &str = "10000";

fn patience(arguments: &[&str]) -> Vec<String> {
    let is_named = |part: &String| arguments.iter().any(|argument| argument.starts_with(part.as_str()));
    let tiers = ["ssd", "fs", "redis", "object"].map(|tier| format!("--tier.{tier}."));
    let deadlines = tiers.into_iter().filter(is_named).map(|tier| tier + "load_deadline_ms");
    deadlines.filter(|flag| !is_named(flag)).flat_map(|flag| [flag, PATIENCE_MS.to_owned()]).collect()
}

/// A daemon process; killed when dropped.
pub struct Daemon {
    child: Child,
    log: PathBuf,
    /// Where its own part of the log begins: earlier daemons of the place wrote to the same file.
    log_start: u64,
}

impl Daemon {
    pub fn start(place: &Place, arguments: &[&str]) -> Daemon {
        Daemon::start_in(place, arguments, &[])
    }

    /// With this environment and nothing else in it.
    pub fn start_in(place: &Place, arguments: &[&str], environment: &[(&str, &str)]) -> Daemon {
        Daemon::spawn_in(place, arguments, environment, None).whole(place)
    }

    /// Of another user, which root can start alone.
    pub fn start_as(place: &Place, arguments: &[&str], uid: u32) -> Daemon {
        Daemon::spawn_in(place, arguments, &[], Some(uid)).whole(place)
    }

    /// After `first`, a line of a shell such as `umask 077`: such things are a process's, and other tests run in this
    /// one.
    pub fn start_after(place: &Place, arguments: &[&str], first: &str) -> Daemon {
        let mut command = Command::new("sh");
        let script = format!("{first}; exec \"$0\" \"$@\"");
        command.env_clear().env("FOREBAY_CONFIG", "").args(["-c", &script]).arg(&place.binary);
        Daemon::spawn_by(command, place, arguments).whole(place)
    }

    /// Waits until it answers.
    pub fn listening(mut self, place: &Place) -> Daemon {
        let start = Instant::now();
        while UnixStream::connect(place.sockets().join(RPC_SOCKET)).is_err() {
            assert!(self.is_running() && start.elapsed() < DEADLINE, "the daemon does not listen:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self
    }

    /// Waits until it answers, and has all of its pool: it serves from the first unit of memory on, and evicts where
    /// all that is there is full.
    fn whole(self, place: &Place) -> Daemon {
        let daemon = self.listening(place);
        let ends = ["the pool is populated", "cannot populate more"];
        wait_until("the pool is populated", || ends.iter().any(|end| daemon.own_log().contains(end)));
        daemon
    }

    pub fn spawn(place: &Place, arguments: &[&str]) -> Daemon {
        Daemon::spawn_in(place, arguments, &[], None)
    }

    fn spawn_in(place: &Place, arguments: &[&str], environment: &[(&str, &str)], uid: Option<u32>) -> Daemon {
        let own = rustix::process::geteuid().as_raw();
        let mut command = Command::new(&place.binary);
        // No file is read, this host's own neither.
        command.env_clear().env("FOREBAY_CONFIG", "").envs(environment.iter().copied()).uid(uid.unwrap_or(own));
        Daemon::spawn_by(command, place, arguments)
    }

    fn spawn_by(mut command: Command, place: &Place, arguments: &[&str]) -> Daemon {
        let log = place.log();
        let stderr = fs::File::options().create(true).append(true).open(&log).expect("a log file");
        let log_start = stderr.metadata().expect("its size").len();
        // Tests keep their disks where they are built, which is on the root filesystem of most machines.
        let says = |flag: &str| arguments.contains(&flag);
        let is_made = says("--tier.ssd.disks") && !says("--tier.ssd.create");
        let create = ["--tier.ssd.create", "true"].into_iter().filter(|_| is_made);
        let child = command
            .arg("serve")
            .args(["--socket.directory".as_ref(), place.sockets().as_os_str()])
            .args(["--pool.directory".as_ref(), place.pool().as_os_str()])
            .args(["--http.address", "off"])
            .args(create)
            .args(patience(arguments))
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("the daemon starts");
        Daemon { child, log, log_start }
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.child.kill().expect("it is ours to kill");
        self.child.wait().expect("it ends");
    }

    /// Waits for its own end; returns whether it succeeded, and what it said.
    pub fn finish(mut self) -> (bool, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is ours") {
                return (status.success(), self.log());
            }
            assert!(start.elapsed() < DEADLINE, "the daemon does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is ours").is_none()
    }

    /// SIGTERM, as a service manager stops it.
    pub fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is ours");
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Where its pages are; its arguments name an address for them.
    pub fn address(&self) -> String {
        let mut address = String::new();
        wait_until("the daemon names its pages", || {
            let log = self.own_log();
            let line = log.lines().find(|line| line.contains("metrics and health"));
            address = line.and_then(|line| line.split("address=").nth(1)).unwrap_or_default().trim().to_owned();
            !address.is_empty()
        });
        address
    }

    /// What the daemon answers on one of its pages, head and body.
    pub fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).expect("the pages are served");
        stream.set_read_timeout(Some(DEADLINE)).expect("a limit");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").expect("a question");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// What the daemons of this place have said.
    pub fn log(&self) -> String {
        self.log_from(0)
    }

    /// Waits until the log has this text so many times, and says how often it has it. Another thread of the daemon
    /// writes the lines.
    pub fn says(&self, text: &str, times: usize) -> usize {
        let begun = Instant::now();
        loop {
            let count = self.log().matches(text).count();
            if count >= times {
                return count;
            }
            assert!(begun.elapsed() < DEADLINE, "`{text}` is {count} and not {times} times in:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn own_log(&self) -> String {
        self.log_from(self.log_start)
    }

    /// The log must be a file that ends.
    fn log_from(&self, start: u64) -> String {
        let mut file = fs::File::open(&self.log).expect("the log is there");
        file.seek(SeekFrom::Start(start)).expect("a file");
        BufReader::new(file).lines().map_while(Result::ok).map(|line| line + "\n").collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One session on the control plane, driven from a test without async.
pub struct Client {
    pub runtime: tokio::runtime::Runtime,
    pub rpc: ForebayClient<Channel>,
    pub events: Streaming<SessionEvent>,
    pub welcome: Welcome,
}

/// The numbers of a lookup's answer.
pub trait Places {
    fn slots(&self) -> Vec<u32>;
    fn generations(&self) -> Vec<u32>;
}

impl Places for GroupAnswer {
    fn slots(&self) -> Vec<u32> {
        words(&self.slots).collect()
    }

    fn generations(&self) -> Vec<u32> {
        words(&self.generations).collect()
    }
}

/// Later replies answer what was "not yet", which under full attention is a prefix's end.
pub fn add(all: &mut LookupReply, news: LookupReply) {
    assert_eq!(all.lease, news.lease, "there is one lease");
    for (all, news) in all.groups.iter_mut().zip(news.groups) {
        let first = all.states.iter().position(|state| *state == 2).expect("nothing else is answered again");
        all.states.splice(first.., news.states);
        all.slots.extend(news.slots);
        all.generations.extend(news.generations);
    }
}

/// Makes `client.call(...)` of a method one line.
#[macro_export]
macro_rules! call {
    ($client:expr, $method:ident, $request:expr) => {{
        let mut rpc = $client.rpc.clone();
        let reply = $client
            .runtime
            .block_on(async { tokio::time::timeout($crate::support::DEADLINE, rpc.$method($request)).await });
        reply.expect("an answer in time").map(|reply| reply.into_inner())
    }};
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

pub async fn connect(sockets: &Path) -> ForebayClient<Channel> {
    connect_with(sockets, 1 << 20).await
}

/// The daemon may send so many bytes of a stream before somebody reads them.
async fn connect_with(sockets: &Path, window_bytes: u32) -> ForebayClient<Channel> {
    let path = sockets.join(RPC_SOCKET);
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://forebay").initial_stream_window_size(window_bytes);
    let channel = endpoint.connect_with_connector(connector).await.expect("a daemon");
    ForebayClient::new(channel).max_decoding_message_size(64 << 20).max_encoding_message_size(64 << 20)
}

impl Client {
    pub fn open(place: &Place, engine_id: &str, ranks: u32) -> Client {
        Client::resume(place, engine_id, ranks, Vec::new(), Vec::new())
    }

    /// The session of another start of an engine of this id.
    pub fn open_start(place: &Place, engine_id: &str, start: u8, ranks: u32) -> Client {
        let request = Client::request(engine_id, start, ranks);
        Client::try_open(place, request).expect("a session")
    }

    pub fn resume(place: &Place, engine_id: &str, ranks: u32, leases: Vec<Held>, reservations: Vec<Held>) -> Client {
        let request = OpenSessionRequest { leases, reservations, ..Client::request(engine_id, 0, ranks) };
        Client::try_open(place, request).expect("a session")
    }

    pub fn request(engine_id: &str, start: u8, ranks: u32) -> OpenSessionRequest {
        OpenSessionRequest {
            protocol: PROTOCOL_VERSION,
            engine_id: engine_id.to_owned(),
            ranks,
            incarnation: incarnation(start),
            owner: vec![start + 1; 16],
            ..OpenSessionRequest::default()
        }
    }

    pub fn try_open(place: &Place, request: OpenSessionRequest) -> Result<Client, tonic::Status> {
        let runtime = runtime();
        let (rpc, events, welcome) = runtime.block_on(async {
            let mut rpc = connect(&place.sockets()).await;
            let mut events = rpc.open_session(request).await?.into_inner();
            let first = events.message().await.expect("a stream").expect("an event");
            let Some(Event::Welcome(welcome)) = first.event else { panic!("the first event is {first:?}") };
            Ok::<_, tonic::Status>((rpc, events, welcome))
        })?;
        Ok(Client { runtime, rpc, events, welcome })
    }

    /// From now on the daemon may send so many bytes of a stream before somebody reads them.
    pub fn narrow(&mut self, place: &Place, window_bytes: u32) {
        self.rpc = self.runtime.block_on(connect_with(&place.sockets(), window_bytes));
    }

    /// The next event of the session.
    pub fn event(&mut self) -> Event {
        let next = self.runtime.block_on(async { tokio::time::timeout(DEADLINE, self.events.message()).await });
        next.expect("an event in time").expect("a stream").expect("an event").event.expect("it says what")
    }

    pub fn namespace(&self, tenant: &str, groups: Vec<Group>) -> Result<u32, tonic::Status> {
        let fields = [("model", "test"), ("tenant", tenant)];
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let request = OpenNamespaceRequest { session: self.welcome.session, fields, groups };
        call!(self, open_namespace, request).map(|reply| reply.namespace)
    }

    /// The first reply: what is "not yet" is not waited for.
    pub fn lookup(&self, namespace: u32, hashes: &[[u8; 32]]) -> LookupReply {
        self.next(&mut self.replies(namespace, hashes), DEADLINE).expect("a reply in time").expect("a first one")
    }

    pub fn replies<const N: usize>(&self, namespace: u32, hashes: &[[u8; N]]) -> Streaming<LookupReply> {
        let keys = GroupKeys { group: 0, hash_bytes: N as u32, hashes: hashes.concat() };
        let request = LookupRequest { session: self.welcome.session, namespace, groups: vec![keys] };
        call!(self, lookup, request).expect("a lookup")
    }

    /// `None` at the end; an error if none comes in this time.
    pub fn next<T>(&self, replies: &mut Streaming<T>, within: Duration) -> Result<Option<T>, Elapsed> {
        let next = self.runtime.block_on(async { tokio::time::timeout(within, replies.message()).await });
        next.map(|reply| reply.expect("a stream"))
    }

    /// This request waits for these blocks.
    pub fn hint(&self, namespace: u32, request: u64, hashes: &[[u8; 32]]) {
        let keys = GroupKeys { group: 0, hash_bytes: 32, hashes: hashes.concat() };
        let hints = vec![QueueHint { request, groups: vec![keys] }];
        let request = HintRequest { session: self.welcome.session, namespace, withdrawn: Vec::new(), hints };
        call!(self, hint, request).expect("it is told");
    }

    /// Waits until nothing is "not yet".
    pub fn lookup_settled(&self, namespace: u32, hashes: &[[u8; 32]]) -> LookupReply {
        let mut replies = self.replies(namespace, hashes);
        let mut all: Option<LookupReply> = None;
        while let Some(news) = self.next(&mut replies, DEADLINE).expect("blocks are verified in time") {
            match &mut all {
                Some(all) => add(all, news),
                None => all = Some(news),
            }
        }
        all.expect("a first reply")
    }

    pub fn release(&self, lease: u64) {
        let request = ReleaseRequest { session: self.welcome.session, leases: vec![lease], ..Default::default() };
        call!(self, release, request).expect("a release");
    }

    pub fn reserve(&self, namespace: u32, count: u32) -> Vec<Held> {
        let request = ReserveRequest { session: self.welcome.session, namespace, group: 0, count };
        let reply = call!(self, reserve, request).expect("a reserve");
        reply
            .slots
            .iter()
            .zip(&reply.generations)
            .map(|(slot, generation)| Held { slot: *slot, generation: *generation })
            .collect()
    }

    /// Commits a chain from its start.
    pub fn commit(&self, namespace: u32, hashes: &[[u8; 32]], slots: &[Held]) -> Vec<CommitOutcome> {
        let blocks = GroupBlocks {
            group: 0,
            hash_bytes: 32,
            hashes: hashes.concat(),
            predecessor: Vec::new(),
            slots: slots.iter().map(|held| held.slot).collect(),
            generations: slots.iter().map(|held| held.generation).collect(),
        };
        let request = CommitRequest { session: self.welcome.session, namespace, groups: vec![blocks] };
        call!(self, commit, request).expect("a commit").outcomes().collect()
    }

    pub fn inspect(&self) -> InspectReply {
        call!(self, inspect, InspectRequest {}).expect("an inspection")
    }
}

/// A worker of `bytes` per block in group 0, attached from this process.
pub struct Worker {
    stream: UnixStream,
    pub mapping: Option<Mapping>,
    pub reply: AttachReply,
    rank: usize,
    offset: u64,
    bytes: u64,
}

impl Worker {
    /// Words of a slot that [`Worker::arrived`] looks at.
    pub const SAMPLES: usize = 64;

    pub fn request(engine_id: &str, rank: u32, ranks: u32, bytes: u64) -> AttachRequest {
        Worker::request_of(engine_id, 0, rank, ranks, bytes)
    }

    /// Of another start of an engine of this id.
    pub fn request_of(engine_id: &str, start: u8, rank: u32, ranks: u32, bytes: u64) -> AttachRequest {
        AttachRequest {
            protocol: PROTOCOL_VERSION,
            engine_id: engine_id.to_owned(),
            rank,
            ranks,
            groups: vec![RankGroup { group: 0, bytes, is_replicated: false }],
            held_pool_id: Vec::new(),
            incarnation: incarnation(start),
            lending: None,
            hears_population: false,
            numa_node: None,
        }
    }

    /// Attaches; with `held` it keeps that mapping.
    pub fn attach(place: &Place, mut request: AttachRequest, held: Option<Mapping>) -> Worker {
        if let Some(mapping) = &held {
            request.held_pool_id = mapping.pool_id().to_be_bytes().to_vec();
        }
        let stream = UnixStream::connect(place.sockets().join(ATTACH_SOCKET)).expect("the attach socket");
        send(&stream, &request);
        let (bytes, fds) = recv_fds(&stream, Instant::now() + DEADLINE).expect("an answer");
        let reply = AttachReply::decode(bytes.as_slice()).expect("an AttachReply");
        let pool_id = reply.pool_id.as_slice().try_into().map_or(0, u128::from_be_bytes);
        let mapping = if reply.has_files {
            let description = GeometryDescription { pool_id, unit_bytes: reply.unit_bytes, units: reply.units };
            Some(Mapping::new(MapperFds::from_received(fds).expect("three files"), &description).expect("a mapping"))
        } else {
            held
        };
        Worker {
            stream,
            mapping,
            reply,
            rank: request.rank as usize,
            offset: 0,
            bytes: request.groups.first().map_or(0, |group| group.bytes),
        }
    }

    /// Waits until all ranks are there, and acknowledges.
    pub fn acknowledge(&mut self) {
        let ready = self.hear();
        self.offset = ready.slices[0].offset;
        send(&self.stream, &AttachAck {});
    }

    /// The daemon's next message.
    pub fn hear(&self) -> AttachReady {
        let (bytes, _) = recv_fds(&self.stream, Instant::now() + DEADLINE).expect("an AttachReady");
        AttachReady::decode(bytes.as_slice()).expect("an AttachReady")
    }

    /// Says how much of the pool it has registered with a GPU's driver.
    pub fn register(&self, bytes: u64) {
        send(&self.stream, &WorkerSays { says: Some(Says::Registered(Registered { bytes })) });
    }

    /// Fills this rank's slice with bytes made from `seed`, and writes its birth record.
    pub fn fill(&self, held: &Held, seed: u64) {
        let bytes = pattern(seed, self.bytes);
        self.write(held, &bytes);
        let record =
            BirthRecord { generation: Generation(held.generation), length: self.bytes, checksum: checksum(&bytes) };
        self.mapping().write_birth(SlotId(held.slot), self.rank, &record).expect("a birth record");
    }

    pub fn write(&self, held: &Held, bytes: &[u8]) {
        let at = (SlotId(held.slot).offset() + self.offset) as usize;
        assert!(at + bytes.len() <= self.mapping().len());
        // SAFETY: checked to lie in the mapping; only this process writes to a slot that it holds.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.mapping().data_ptr().add(at), bytes.len()) }
    }

    pub fn read(&self, slot: u32) -> Vec<u8> {
        let at = (SlotId(slot).offset() + self.offset) as usize;
        let mut bytes = vec![0; self.bytes as usize];
        assert!(at + bytes.len() <= self.mapping().len());
        // SAFETY: checked to lie in the mapping; the slot is leased, so nobody writes to it.
        unsafe { std::ptr::copy_nonoverlapping(self.mapping().data_ptr().add(at), bytes.as_mut_ptr(), bytes.len()) }
        bytes
    }

    /// How many of [`Worker::SAMPLES`] words, spread over a slot, are these bytes' by now, whoever holds the slot.
    /// Which come first is the processor's to say: a copy may write its first bytes last.
    pub fn arrived(&self, slot: u32, bytes: &[u8]) -> usize {
        let at = SlotId(slot).offset() as usize;
        assert!(at + bytes.len() <= self.mapping().len());
        let words = (0..bytes.len() - 8).step_by(bytes.len() / Worker::SAMPLES).take(Worker::SAMPLES);
        let is_there = |offset: &usize| {
            // SAFETY: checked to lie in the mapping; what others write meanwhile is read as it is.
            let word: [u8; 8] = unsafe { std::ptr::read_volatile(self.mapping().data_ptr().add(at + offset).cast()) };
            word == bytes[*offset..offset + 8]
        };
        words.filter(is_there).count()
    }

    pub fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("attached")
    }

    /// Closes the connection and keeps the mapping.
    pub fn detach(self) -> Mapping {
        self.mapping.expect("attached")
    }
}

/// An engine with one rank: session and worker, ready to store.
pub fn engine(place: &Place, engine_id: &str, bytes: u64) -> (Client, Worker) {
    let mut client = Client::open(place, engine_id, 1);
    let mut worker = Worker::attach(place, Worker::request(engine_id, 0, 1, bytes), None);
    assert_eq!(worker.reply.error, "");
    worker.acknowledge();
    assert!(matches!(client.event(), Event::Attached(_)));
    (client, worker)
}

/// Of an engine's `start`th start.
fn incarnation(start: u8) -> Vec<u8> {
    vec![start + 1; 16]
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < DEADLINE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn group() -> Group {
    Group {
        group: 0,
        attention: Attention::Full.into(),
        tokens_per_block: 16,
        is_replicated: false,
        rank_bytes: Vec::new(),
        window_blocks: 0,
    }
}

pub fn hash(seed: u64) -> [u8; 32] {
    let mut hash = [7; 32];
    hash[..8].copy_from_slice(&seed.to_le_bytes());
    hash
}

pub fn hashes(seeds: std::ops::Range<u64>) -> Vec<[u8; 32]> {
    seeds.map(hash).collect()
}

/// `length` bytes that tell from which seed they came.
pub fn pattern(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_le_bytes).take(length as usize).collect()
}

pub fn send(mut stream: &UnixStream, message: &impl Message) {
    stream.write_all(&(message.encoded_len() as u32).to_le_bytes()).expect("the daemon reads");
    stream.write_all(&message.encode_to_vec()).expect("the daemon reads");
}
