//! The books: regions, peers, operations, and which piece goes to which connection.
//!
//! Invariants: an operation is in `ops` until its one `Done`. A region's name is drawn at random and never given twice,
//! so a name that a peer says is either that of a registered region or of none. A peer that breaks the rules, or loses
//! one connection, loses all.

mod descriptor;
mod frames;
mod greet;
mod moves;
mod ops;
mod timers;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::epoll;
use rustix::event::{EventfdFlags, Timespec};

pub use self::descriptor::{Descriptor, Rights};
use self::timers::{Timer, Timers};
use crate::address::{Address, Listener, Origin};
use crate::auth::Secret;
use crate::ids::{OpId, PeerId, RegionId, RemoteId};
use crate::line::Line;
use crate::memory::Memory;
use crate::tls::Keys;
use crate::ucx::{Context, Worker};
use crate::wire::{Kind, MESSAGE_WINDOW, MOST_CONNECTIONS, MOST_MESSAGE_BYTES, Refusal, broken};

/// Sessions at once; each can have [`MESSAGE_WINDOW`] messages here that nobody has taken.
const MOST_PEERS: usize = 256;
/// Of messages that our program has not taken, of all peers. Sixteen peers that fill their windows have so much.
const MOST_UNTAKEN_BYTES: usize = 64 << 20;
/// Operations at once.
const MOST_OPS: usize = 4096;
/// Notices of writes to one peer that are under way or wait for it to take others: 16 MiB at most.
const MOST_NOTICES: usize = 256;
/// Longest limit of connecting that can be asked for.
const MOST_CONNECT: Duration = Duration::from_secs(3600);
/// Limit of a handshake that somebody else began.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// For which a connection that has proven nothing keeps its place though others wait.
const GRACE: Duration = Duration::from_millis(100);
/// For which a session that nobody uses any more waits for the peer to take what was sent.
const LINGER: Duration = Duration::from_secs(10);
/// Segments of one operation.
const MOST_OP_SEGMENTS: usize = 65_536;
/// Events of the kernel in one call.
const EVENTS: usize = 64;
/// Frames and copies in one turn of a line or an operation, before the others' turns.
const TURN: usize = 16;
/// Rounds in one call of `poll`; what is left makes the descriptor readable again.
const ROUNDS: usize = 64;
/// Calls of `poll` that may have events without asking the kernel.
const UNWATCHED: usize = 8;
/// For payloads that go nowhere.
const SCRATCH_BYTES: usize = 256 << 10;

/// What an endpoint may be told.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shared by all endpoints that may connect. Without one, they connect within this host only.
    pub secret: Option<Secret>,
    /// TCP connections of each peer that this side connects to, 1 to 16.
    pub connections: u16,
    /// Limit of connecting and of the handshake.
    pub connect_deadline: Duration,
    /// Connections over TCP are encrypted, or there are none: both sides need it, and a secret. Costs processor time
    /// for each byte, and a round trip to connect. Shared memory does not leave the host and stays as it is. Addresses
    /// of UCX are refused.
    pub encrypt: bool,
    /// The file of libucp for addresses of UCX, 1.18 or later; `libucp.so.0` of the system by default.
    pub ucx_library: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        let connect_deadline = Duration::from_secs(5);
        Options { secret: None, connections: 4, connect_deadline, encrypt: false, ucx_library: None }
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// From the peer's memory to ours.
    Read,
    /// From our memory to the peer's.
    Write,
}

/// `bytes` bytes, here and there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub local: RegionId,
    pub local_offset: u64,
    pub remote: RemoteId,
    pub remote_offset: u64,
    pub bytes: u64,
}

/// What [`Fabric::submit`] takes.
#[derive(Clone, Debug)]
pub struct Operation {
    pub peer: PeerId,
    pub verb: Verb,
    /// In any order, of any of the peer's regions.
    pub segments: Vec<Segment>,
    /// When it is given up.
    pub deadline: Option<Instant>,
    /// Sent to the peer when all bytes are there.
    pub notice: Option<Vec<u8>>,
}

/// What [`Fabric::poll`] reports.
#[derive(Debug)]
pub enum Event {
    /// The peer's endpoint has proven who it is.
    Up { peer: PeerId },
    /// The peer's operations were reported before.
    Gone { peer: PeerId, reason: Error },
    /// The end of an operation. After an error, local memory of a read and remote memory of a write may be in part new.
    Done { op: OpId, result: Result<()> },
    /// A message, to be acknowledged with [`Fabric::taken`].
    Message { peer: PeerId, bytes: Vec<u8> },
    /// The notice of the peer's operation, or one that it sent alone; as a message otherwise.
    Notice { peer: PeerId, bytes: Vec<u8> },
    /// No peer reaches the region any more, and no operation of ours.
    Deregistered { region: RegionId },
}

struct Region {
    memory: Arc<Memory>,
    /// Of the memory.
    start: u64,
    bytes: u64,
    rights: Rights,
    name: u64,
    /// Who has the file of the memory, or messages of UCX in it.
    mapped_by: HashSet<PeerId>,
}

struct Remote {
    peer: PeerId,
    descriptor: Descriptor,
    /// The peer's memory in this process.
    mapping: Option<Arc<Memory>>,
}

#[derive(Default)]
struct Peer {
    epoch: u64,
    /// By index.
    lines: Vec<Option<u64>>,
    session: [u8; 16],
    /// Over which its lines go in turn, if there are several.
    addresses: Vec<Address>,
    /// This side connected.
    is_ours: bool,
    is_up: bool,
    is_shm: bool,
    is_ucx: bool,
    /// Of a session over UCX, from its beginning on.
    worker: Option<Worker>,
    /// Operations with pieces that no connection has taken yet.
    queue: VecDeque<OpId>,
    /// Messages that the peer has not taken.
    unacknowledged: usize,
    /// Messages that wait for the peer to take others.
    outbox: VecDeque<(bool, Vec<u8>)>,
    /// Operations under way that have a notice.
    noticing: usize,
    /// Messages of the peer that our program has not taken; those that it took and the peer does not know of.
    untaken: usize,
    taken: u16,
    /// Lengths of as many of the latest messages as the program has not taken.
    lengths: VecDeque<usize>,
    /// Who began the session, if it was not this side.
    origin: Option<Origin>,
    /// Those whose files are not asked for yet.
    to_map: VecDeque<RemoteId>,
    /// Names that are asked for, each with those who wait for its file.
    mapping: HashMap<u64, Vec<RemoteId>>,
    /// One mapping for all remotes of one region; it ends with the last of them.
    maps: HashMap<Map, Weak<Memory>>,
}

/// What a mapping is of: name, length, and whether it may be written.
type Map = (u64, u64, bool);

struct Op {
    operation: Operation,
    /// The next byte that no piece has: a segment, and an offset in it.
    next: (usize, u64),
    /// Of pieces under way.
    pieces: usize,
    fault: Option<Refusal>,
    is_copied: bool,
}

/// Why an operation ended early.
enum Cause {
    Late,
    GivenUp,
    PeerGone(String),
    Refused(Refusal),
    Deregistered,
}

impl Cause {
    fn error(&self) -> Error {
        let reconnect = "connect again, and import the new descriptors of the peer";
        match self {
            Cause::Late => Error::new(ErrorKind::Timeout, "a transfer did not end before its deadline")
                .hint("is the peer frozen or overloaded? what comes later is dropped"),
            Cause::GivenUp => Error::new(ErrorKind::Timeout, "a transfer was given up"),
            Cause::PeerGone(reason) => {
                Error::new(ErrorKind::Unavailable, format!("the peer is gone: {reason}")).hint(reconnect)
            }
            Cause::Refused(Refusal::Unknown) => {
                Error::new(ErrorKind::NotFound, "the peer has no such memory, or no longer").hint(reconnect)
            }
            Cause::Refused(Refusal::Outside) => Error::invalid("a segment ends outside of the peer's memory"),
            Cause::Refused(Refusal::Forbidden) => Error::invalid("the peer's memory was not exported for this"),
            Cause::Refused(Refusal::Full) => {
                let error = Error::new(ErrorKind::Full, "the peer has no place for another session");
                error.hint("close sessions that are not used: of this process, of its user, and of this host")
            }
            Cause::Refused(Refusal::Transport) => Error::invalid("the peer listens there for another transport")
                .hint("write the address as the peer's endpoint does, with `tcp://` or `ucx://`"),
            Cause::Deregistered => Error::invalid("memory was deregistered under way")
                .hint("wait for the operations on it before you deregister it"),
        }
    }
}

/// See the crate's head.
pub struct Fabric {
    epoll: OwnedFd,
    wake: OwnedFd,
    is_woken: bool,
    timers: Timers,
    options: Options,
    /// If it encrypts.
    keys: Option<Keys>,
    epoch: u64,
    /// Numbers that are left of the latest block.
    ids: std::ops::Range<u64>,
    listeners: HashMap<u64, Listener>,
    lines: HashMap<u64, Line>,
    /// Lines that may go on without the kernel, at most once each.
    ready: VecDeque<u64>,
    /// libucp, once an address needs it.
    ucx: Option<Arc<Context>>,
    /// Workers of UCX by the number that the kernel reports.
    workers: HashMap<u64, PeerId>,
    /// Sessions whose workers may go on, at most once each.
    moving: VecDeque<PeerId>,
    books: Books,
    events: VecDeque<Event>,
    /// See `take_dropped`.
    dropped: Vec<Arc<Memory>>,
    /// Sessions that end when what was sent has left.
    released: HashSet<PeerId>,
    /// Calls of `poll` since the kernel was asked.
    unwatched: usize,
    scratch: Vec<u8>,
    /// Limit of a handshake that somebody else began, and the part of it that nobody takes away.
    handshake: Duration,
    grace: Duration,
}

/// What frames change.
#[derive(Default)]
struct Books {
    peers: HashMap<PeerId, Peer>,
    sessions: HashMap<[u8; 16], PeerId>,
    regions: HashMap<RegionId, Region>,
    names: HashMap<u64, RegionId>,
    /// Deregistered, and still mapped by a peer.
    leaving: HashMap<u64, (RegionId, Region)>,
    remotes: HashMap<RemoteId, Remote>,
    ops: HashMap<OpId, Op>,
    /// Operations that this process copies itself.
    copies: VecDeque<OpId>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Of messages that our program has not taken.
    untaken_bytes: usize,
}

/// Numbers that a fabric takes at a time. At a million each second, they last for half a million years.
const IDS: u64 = 1 << 20;
/// The next block of numbers of this process.
static NEXT_IDS: AtomicU64 = AtomicU64::new(1);

const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

impl Fabric {
    /// Draws the epoch. Errors if the kernel has no descriptors left.
    pub fn new(options: Options) -> Result<Fabric> {
        if options.connections == 0 || options.connections > MOST_CONNECTIONS {
            let error = Error::invalid("a wrong number of connections").with("connections", options.connections);
            return Err(error.hint(format!("1 to {MOST_CONNECTIONS}")));
        }
        if options.connect_deadline.is_zero() || options.connect_deadline > MOST_CONNECT {
            let error = Error::invalid("a wrong limit of the time to connect");
            return Err(error.hint(format!("more than 0 and at most {} seconds", MOST_CONNECT.as_secs())));
        }
        if options.encrypt && options.secret.is_none() {
            let error = Error::invalid("encryption needs a secret, which shows who is at the other end");
            return Err(error.hint(SECRET_HINT));
        }
        let failed = |errno: rustix::io::Errno| {
            let error = Error::new(ErrorKind::Io, "cannot make a transfer endpoint").source(errno);
            error.hint("are there descriptors left (`ulimit -n`)?")
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let timers = Timers::new().map_err(failed)?;
        for (source, data) in [(wake.as_fd(), WAKE), (timers.as_fd(), TIMER)] {
            let data = epoll::EventData::new_u64(data);
            epoll::add(&epoll, source, data, epoll::EventFlags::IN | epoll::EventFlags::ET).map_err(failed)?;
        }
        let mut epoch = [0; 8];
        fill_random(&mut epoch)?;
        let keys = options.encrypt.then(new_keys).transpose()?;
        Ok(Fabric {
            epoll,
            wake,
            is_woken: false,
            timers,
            options,
            keys,
            epoch: u64::from_le_bytes(epoch),
            ids: 0..0,
            listeners: HashMap::new(),
            lines: HashMap::new(),
            ready: VecDeque::new(),
            ucx: None,
            workers: HashMap::new(),
            moving: VecDeque::new(),
            books: Books::default(),
            events: VecDeque::new(),
            dropped: Vec::new(),
            released: HashSet::new(),
            unwatched: 0,
            scratch: vec![0; SCRATCH_BYTES],
            handshake: HANDSHAKE,
            grace: GRACE,
        })
    }

    /// Readable when `poll` has something to do. For an event loop; level- or edge-triggered.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Accepts peers there until the fabric is dropped. Returns the address with the port that it got.
    pub fn listen(&mut self, address: &Address) -> Result<Address> {
        self.check_reach(address)?;
        if address.is_ucx() {
            self.need_ucx()?;
        }
        let listener = address.listen()?;
        let id = self.draw_id();
        self.watch(&listener.socket, id, epoll::EventFlags::IN)?;
        let address = listener.address.clone();
        self.listeners.insert(id, listener);
        Ok(address)
    }

    /// Makes `bytes` bytes at `start` of a memory reachable for operations of this side, and, with rights, of peers.
    pub fn register(&mut self, memory: &Arc<Memory>, start: u64, bytes: u64, rights: Rights) -> Result<RegionId> {
        let is_inside = start.checked_add(bytes).is_some_and(|end| end <= memory.len());
        if bytes == 0 {
            return Err(Error::invalid("memory of no bytes").hint("give at least one byte"));
        }
        if !is_inside {
            let error = Error::invalid("a range outside of the memory").with("start", start).with("bytes", bytes);
            return Err(error.with("memory_bytes", memory.len()));
        }
        if rights.write && !memory.may_write() {
            return Err(Error::invalid("memory that may only be read cannot be exported for writes"));
        }
        let mut name = [0; 8];
        fill_random(&mut name)?;
        let name = u64::from_le_bytes(name);
        let region = RegionId(self.draw_id());
        self.books.names.insert(name, region);
        let memory = memory.clone();
        let entry = Region { memory, start, bytes, rights, name, mapped_by: HashSet::new() };
        self.books.regions.insert(region, entry);
        Ok(region)
    }

    /// What a peer needs to reach the region, for [`Fabric::import`] there. It holds no secret of the endpoint, but who
    /// has it and may connect can use the region's rights.
    pub fn export(&self, region: RegionId) -> Result<Descriptor> {
        let entry = self.books.region(region)?;
        let is_whole = entry.start == 0 && entry.bytes == entry.memory.len();
        Ok(Descriptor {
            epoch: self.epoch,
            name: entry.name,
            bytes: entry.bytes,
            rights: entry.rights,
            // Who maps a file has all of it.
            is_mappable: is_whole && entry.memory.file().is_some(),
        })
    }

    /// Ends the region: our operations on it end with an error at once, peers' are refused from now on.
    /// [`Event::Deregistered`] follows once, when peers that had mapped it no longer do, or are gone. Until then a
    /// second call does nothing.
    pub fn deregister(&mut self, region: RegionId) -> Result<()> {
        let is_told = |event: &Event| matches!(event, Event::Deregistered { region: it } if *it == region);
        if self.books.leaving.values().any(|(leaving, _)| *leaving == region) || self.events.iter().any(is_told) {
            return Ok(());
        }
        let mut entry = self.books.regions.remove(&region).ok_or_else(no_region)?;
        self.books.names.remove(&entry.name);
        let uses_it = |op: &Op| op.operation.segments.iter().any(|segment| segment.local == region);
        let ops: Vec<OpId> = self.books.ops.iter().filter(|(_, op)| uses_it(op)).map(|(id, _)| *id).collect();
        self.abandon_all(&ops, &Cause::Deregistered);
        for line in self.lines.values_mut() {
            line.forget_region(region);
        }
        let holders = self.holders(region);
        if entry.mapped_by.is_empty() && holders.is_empty() {
            self.dropped.push(entry.memory);
            self.event(Event::Deregistered { region });
            self.leave();
            return Ok(());
        }
        for peer in &entry.mapped_by {
            self.books.push_frame(&mut self.lines, *peer, Kind::Revoke, 0, entry.name);
            self.make_ready(*peer);
        }
        let name = entry.name;
        entry.mapped_by.extend(&holders);
        self.books.leaving.insert(name, (region, entry));
        self.wait_for(name, &holders);
        self.leave();
        Ok(())
    }

    /// Starts to connect. `Up` or `Gone` follows, within the deadline of connecting.
    pub fn connect(&mut self, address: &Address) -> Result<PeerId> {
        self.connect_over(std::slice::from_ref(address))
    }

    /// As `connect`, with the session's connections over several TCP addresses of one endpoint in turn, and one at
    /// least over each: so several network cards carry one session. Errors if there are more than 16; `Gone` names the
    /// address that failed.
    pub fn connect_over(&mut self, addresses: &[Address]) -> Result<PeerId> {
        Address::check_together(addresses)?;
        addresses.iter().try_for_each(|address| self.check_reach(address))?;
        if self.books.peers.len() >= MOST_PEERS {
            let error = Error::new(ErrorKind::Full, "this endpoint has too many peers").with("peers", MOST_PEERS);
            return Err(error.hint("close sessions that are not used, or make another endpoint"));
        }
        self.greet(addresses)
    }

    /// Makes a peer's region known here. Errors if the descriptor is of another start of the peer's process.
    pub fn import(&mut self, peer: PeerId, descriptor: &Descriptor) -> Result<RemoteId> {
        let remote = RemoteId(self.draw_id());
        let entry = self.books.peer_mut(peer)?;
        if entry.epoch != descriptor.epoch {
            let error = Error::new(ErrorKind::NotFound, "a descriptor of another process, or of an earlier start");
            return Err(error.hint("ask the peer for its descriptor again"));
        }
        let mapping = entry.maps.get(&descriptor.map()).and_then(Weak::upgrade);
        if entry.is_shm && descriptor.is_mappable && mapping.is_none() {
            entry.to_map.push_back(remote);
        }
        let descriptor = *descriptor;
        self.books.remotes.insert(remote, Remote { peer, descriptor, mapping });
        self.books.ask_for_files(&mut self.lines, peer);
        self.make_ready(peer);
        self.leave();
        Ok(remote)
    }

    /// Whether operations on it are copies in this process. A mapping takes a moment after `import`; until then bytes
    /// go through the socket.
    pub fn is_mapped(&self, remote: RemoteId) -> bool {
        self.books.remotes.get(&remote).is_some_and(|remote| remote.mapping.is_some())
    }

    /// Forgets a peer's region. Operations on it end.
    pub fn forget(&mut self, remote: RemoteId) {
        let uses_it = |op: &Op| op.operation.segments.iter().any(|segment| segment.remote == remote);
        let ops: Vec<OpId> = self.books.ops.iter().filter(|(_, op)| uses_it(op)).map(|(id, _)| *id).collect();
        self.abandon_all(&ops, &Cause::GivenUp);
        if let Some(Remote { peer, descriptor, mapping: Some(mapping) }) = self.books.remotes.remove(&remote) {
            drop(mapping);
            let peer = self.books.peers.get_mut(&peer);
            let maps = peer.map(|peer| peer.maps.entry(descriptor.map()));
            if let Some(Entry::Occupied(map)) = maps
                && map.get().strong_count() == 0
            {
                map.remove();
            }
        }
        self.leave();
    }

    /// Sends at most 64 KiB, which arrive as one [`Event::Message`], in order. Errors with `Full` if the peer has not
    /// taken the latest 64 messages.
    pub fn send(&mut self, peer: PeerId, bytes: Vec<u8>) -> Result<()> {
        self.tell(peer, false, bytes)
    }

    /// As `send`, for an [`Event::Notice`].
    pub fn notify(&mut self, peer: PeerId, bytes: Vec<u8>) -> Result<()> {
        self.tell(peer, true, bytes)
    }

    fn tell(&mut self, peer: PeerId, is_notice: bool, bytes: Vec<u8>) -> Result<()> {
        check_message(&bytes)?;
        let entry = self.books.peer_mut(peer)?;
        if entry.unacknowledged >= MESSAGE_WINDOW || !entry.outbox.is_empty() {
            return Err(takes_none(MESSAGE_WINDOW));
        }
        entry.outbox.push_back((is_notice, bytes));
        self.books.send_messages(&mut self.lines, peer);
        self.go_on(peer);
        self.leave();
        Ok(())
    }

    /// The program has taken one message or notice of this peer; the peer may send another.
    pub fn taken(&mut self, peer: PeerId) {
        let entry = self.books.peers.get_mut(&peer);
        if let Some(entry) = entry.filter(|entry| usize::from(entry.taken) < entry.untaken) {
            entry.taken += 1;
            self.books.untaken_bytes -= entry.lengths.pop_front().unwrap_or(0);
            // One answer for some messages, in time before the peer has to wait.
            if usize::from(entry.taken) >= MESSAGE_WINDOW / 4 {
                let taken = std::mem::take(&mut entry.taken);
                entry.untaken -= usize::from(taken);
                self.books.push_frame(&mut self.lines, peer, Kind::Taken, taken, 0);
                self.make_ready(peer);
                self.leave();
            }
        }
    }

    /// Ends the session. Its operations end, and `Gone` follows.
    pub fn disconnect(&mut self, peer: PeerId) {
        self.gone(peer, Error::new(ErrorKind::Unavailable, "this side disconnected"));
        self.leave();
    }

    /// As `disconnect`, for a session that nobody uses any more: what was sent leaves first, if the peer takes it.
    pub fn release(&mut self, peer: PeerId) {
        if self.books.peers.contains_key(&peer) {
            self.released.insert(peer);
            self.set_timer(Instant::now() + LINGER, Timer::Released(peer));
            self.make_ready(peer);
            self.wake();
        }
    }

    fn end_released(&mut self) {
        let lines = |peer: &Peer| peer.lines.clone().into_iter().flatten();
        let has_left = |peer: &PeerId| match self.books.peers.get(peer) {
            Some(entry) => {
                entry.worker.as_ref().is_none_or(Worker::is_idle)
                    && !lines(entry).any(|line| self.lines.get(&line).is_some_and(Line::has_to_send))
            }
            None => true,
        };
        let ended: Vec<PeerId> = self.released.iter().copied().filter(has_left).collect();
        for peer in ended {
            self.released.remove(&peer);
            self.disconnect(peer);
        }
    }

    /// Ends all sessions and regions, and stops listening. All operations end.
    pub fn close(&mut self, events: &mut Vec<Event>) {
        self.listeners.clear();
        let mut peers: Vec<PeerId> = self.books.peers.keys().copied().collect();
        peers.sort();
        for peer in peers {
            self.gone(peer, Error::new(ErrorKind::Unavailable, "this side closed its endpoint"));
        }
        self.lines.clear();
        self.books.names.clear();
        self.dropped.extend(self.books.regions.drain().map(|(_, region)| region.memory));
        events.extend(self.events.drain(..));
    }

    /// Memory that nothing here uses any more. The caller drops it without its own lock of the fabric: whose memory it
    /// was may run anything when it is given back.
    pub fn take_dropped(&mut self) -> Vec<Arc<Memory>> {
        std::mem::take(&mut self.dropped)
    }

    /// Waits for events at most `timeout`, or without end, and moves them to `events`.
    pub fn poll(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> Result<()> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.dropped.clear();
        let mut is_last = false;
        loop {
            self.work();
            if !self.released.is_empty() {
                self.end_released();
            }
            events.extend(self.events.drain(..));
            let has_more = self.has_more();
            if !events.is_empty() || is_last {
                break;
            }
            let left = match until {
                _ if has_more => Some(Duration::ZERO),
                Some(until) => Some(until.saturating_duration_since(Instant::now())),
                None => None,
            };
            is_last = timeout == Some(Duration::ZERO) || (left == Some(Duration::ZERO) && !has_more);
            self.wait(left)?;
        }
        self.unwatched += 1;
        if self.unwatched > UNWATCHED {
            self.wait(Some(Duration::ZERO))?;
        }
        // What is left shows at the descriptor.
        if self.has_more() {
            self.wake();
        }
        Ok(())
    }

    fn has_more(&self) -> bool {
        !self.ready.is_empty() || !self.moving.is_empty() || !self.books.copies.is_empty()
    }

    /// Takes what the kernel reports.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout
            .map(|timeout| Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: i32::MAX.into(), tv_nsec: 0 }));
        self.unwatched = 0;
        let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let events = match epoll::wait(&self.epoll, &mut buffer, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(Error::new(ErrorKind::Io, "cannot wait for events").source(errno)),
        };
        for event in events {
            self.kernel_event(event.data.u64(), event.flags);
        }
        Ok(())
    }

    fn kernel_event(&mut self, data: u64, flags: epoll::EventFlags) {
        use epoll::EventFlags as Flags;
        match data {
            WAKE => {
                self.is_woken = false;
                let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            }
            TIMER => self.timers.rang(),
            _ if self.listeners.contains_key(&data) => self.accept(data),
            _ => {
                if let Some(peer) = self.workers.get(&data) {
                    return self.make_worker_ready(*peer);
                }
                let Some(line) = self.lines.get_mut(&data) else { return };
                line.is_ending |= flags.intersects(Flags::RDHUP | Flags::HUP | Flags::ERR);
                line.can_read |= flags.intersects(Flags::IN | Flags::RDHUP | Flags::HUP | Flags::ERR);
                line.can_write |= flags.intersects(Flags::OUT | Flags::HUP | Flags::ERR);
                self.make_line_ready(data);
            }
        }
    }

    /// Goes on with everything that can go on, for a while.
    fn work(&mut self) {
        for _ in 0..ROUNDS {
            self.ring(Instant::now());
            if !self.has_more() {
                break;
            }
            for _ in 0..self.ready.len() {
                let Some(line) = self.ready.pop_front() else { break };
                self.turn(line);
            }
            for _ in 0..self.moving.len() {
                let Some(peer) = self.moving.pop_front() else { break };
                self.move_some(peer);
            }
            if self.copy_some() {
                break;
            }
        }
    }

    fn make_line_ready(&mut self, line: u64) {
        if !self.ready.contains(&line) {
            self.ready.push_back(line);
        }
    }

    /// Its first line, on which all small frames go.
    fn make_ready(&mut self, peer: PeerId) {
        if let Some(line) = self.books.peers.get(&peer).and_then(|peer| peer.lines.first().copied().flatten()) {
            self.make_line_ready(line);
        }
    }

    fn event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// At the end of a call that is not `poll`: what it left for `poll` shows at the descriptor.
    fn leave(&mut self) {
        if self.has_more() || !self.events.is_empty() {
            self.wake();
        }
    }

    fn wake(&mut self) {
        if !self.is_woken {
            self.is_woken = rustix::io::write(&self.wake, &1u64.to_ne_bytes()).is_ok();
        }
    }

    fn watch(&self, socket: &OwnedFd, data: u64, flags: epoll::EventFlags) -> Result<()> {
        let data = epoll::EventData::new_u64(data);
        epoll::add(&self.epoll, socket, data, flags | epoll::EventFlags::ET).map_err(cannot_watch)
    }

    /// For a descriptor that stays readable while its owner has something to do.
    fn watch_level(&self, file: BorrowedFd<'_>, data: u64) -> Result<()> {
        epoll::add(&self.epoll, file, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
            .map_err(|errno| Error::new(ErrorKind::Io, "cannot watch a worker of UCX").source(errno))
    }

    /// Numbers of everything here, never given twice in one process: what another fabric calls by one is unknown here.
    fn draw_id(&mut self) -> u64 {
        loop {
            match self.ids.next() {
                Some(id) => return id,
                None => {
                    let first = NEXT_IDS.fetch_add(IDS, Ordering::Relaxed);
                    self.ids = first..first + IDS;
                }
            }
        }
    }

    fn check_reach(&self, address: &Address) -> Result<()> {
        if address.is_ucx() && self.keys.is_some() {
            let error = Error::invalid("bytes through UCX are not encrypted").with("address", address);
            return Err(error.hint("use `tcp://` with `encrypt`, or `ucx://` without it on a trusted network"));
        }
        if self.options.secret.is_some() || address.is_on_this_host() {
            return Ok(());
        }
        let error = Error::invalid("without a secret, an endpoint reaches this host only").with("address", address);
        Err(error.hint(SECRET_HINT))
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fabric({} peers, {} operations)", self.books.peers.len(), self.books.ops.len())
    }
}

impl Books {
    fn region(&self, region: RegionId) -> Result<&Region> {
        self.regions.get(&region).ok_or_else(no_region)
    }

    fn peer_mut(&mut self, peer: PeerId) -> Result<&mut Peer> {
        self.peers.get_mut(&peer).ok_or_else(|| {
            let error = Error::new(ErrorKind::Unavailable, "the peer is gone, or never was");
            error.hint("connect again, and import the new descriptors of the peer")
        })
    }

    /// Of a session over UCX that stands.
    fn worker(&mut self, peer: PeerId) -> Result<&mut Worker> {
        self.peer_mut(peer)?.worker.as_mut().ok_or_else(|| broken("a frame of another transport"))
    }

    fn first_line<'a>(&self, lines: &'a mut HashMap<u64, Line>, peer: PeerId) -> Option<&'a mut Line> {
        let line = self.peers.get(&peer)?.lines.first().copied().flatten()?;
        lines.get_mut(&line)
    }

    fn push_frame(&self, lines: &mut HashMap<u64, Line>, peer: PeerId, kind: Kind, count: u16, op: u64) {
        if let Some(line) = self.first_line(lines, peer) {
            line.push_frame(kind, count, op);
        }
    }
}

fn check_message(bytes: &[u8]) -> Result<()> {
    if bytes.len() <= MOST_MESSAGE_BYTES {
        return Ok(());
    }
    let error = Error::invalid("a message is too long").with("bytes", bytes.len()).with("most", MOST_MESSAGE_BYTES);
    Err(error.hint("write it to memory of the peer, and send a notice"))
}

fn takes_none(waiting: usize) -> Error {
    let error = Error::new(ErrorKind::Full, "the peer takes no messages").with("waiting", waiting);
    error.hint("does its program receive them? try again later")
}

fn cannot_watch(errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Io, "cannot watch a socket").source(errno)
}

fn no_region() -> Error {
    Error::invalid("the memory is not registered at this endpoint, or no longer")
        .hint("register it at the endpoint that uses it, and deregister it afterwards")
}

const SECRET_HINT: &str = "give all endpoints one secret file: `(umask 077 && openssl rand -hex 32 > FILE)`";

fn new_keys() -> Result<Keys> {
    let mut random = [0; 32];
    fill_random(&mut random)?;
    Keys::new(random)
}

/// Fills `bytes` from the kernel's generator.
fn fill_random(mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(drawn) => bytes = &mut bytes[drawn..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::new(ErrorKind::Io, "the kernel gives no random numbers").source(errno)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
