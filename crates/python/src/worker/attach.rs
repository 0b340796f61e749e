//! The thread that maps the pool: it attaches, maps, stays connected, and attaches again.
//!
//! Invariants: the connection lasts as long as the daemon. Every expected message has a deadline. Dropping
//! [`Attaching`] ends the thread at its next step without waiting for it.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::pool::{GeometryDescription, MapperFds, Mapping, peer_uid, recv_fds, send_fds};
use forebay_rpc::client::{Backoff, SessionState};
use forebay_rpc::proto::worker_says::Says;
use forebay_rpc::proto::{
    AttachAck, AttachReady, AttachReply, AttachRequest, RankGroup, Registered, Suspects, WorkerSays,
};
use forebay_rpc::{ATTACH_SOCKET, MAX_SUSPECTS, PROTOCOL_VERSION};
use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::copies::Copies;
use super::pool::{GroupShape, offsets};

/// Deadline for each message that the daemon owes. A running daemon answers at once.
const DEADLINE: Duration = Duration::from_secs(5);

/// The identity of the worker, and its share of each group.
pub struct Worker {
    pub directory: PathBuf,
    pub engine_id: String,
    /// One start of the engine; its session uses the same number.
    pub incarnation: [u8; 16],
    pub rank: u32,
    pub ranks: u32,
    pub groups: Vec<GroupShape>,
}

/// Runs the thread for as long as this value lives.
pub struct Attaching {
    /// Its end wakes the thread.
    _alive: UnixStream,
}

impl Attaching {
    /// `woken` has a byte to read when the copies have something to report to the daemon.
    pub fn start(worker: Worker, copies: Arc<Copies>, woken: UnixStream) -> Result<Attaching> {
        let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start the attach thread").source(error);
        let (alive, ending) = UnixStream::pair().map_err(cannot)?;
        let run = move || run(&worker, &copies, &ending, &woken);
        std::thread::Builder::new().name("forebay-attach".to_string()).spawn(run).map_err(cannot)?;
        Ok(Attaching { _alive: alive })
    }
}

fn run(worker: &Worker, copies: &Copies, ending: &UnixStream, woken: &UnixStream) {
    let mut backoff = Backoff::new();
    loop {
        let outcome = attach(worker, copies).and_then(|attached| {
            copies.stand(SessionState::Attaching, Some("waits for the other ranks".to_string()));
            converse(&attached, worker, copies, [ending, woken], &mut backoff)
        });
        let Err(error) = outcome else { return };
        tracing::debug!(%error, "not attached");
        let state = match error.kind() {
            ErrorKind::Invalid | ErrorKind::Unsupported => SessionState::Refused,
            _ => SessionState::Connecting,
        };
        copies.stand(state, Some(error.told()));
        match wait(&[ending], Some(backoff.pause())) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return,
        }
    }
}

/// The connection, and the pool that it is about.
struct Attached {
    stream: UnixStream,
    unit_bytes: u64,
    /// Whether the daemon hears how much of the pool is registered. One of an earlier build would take it for an ack.
    hears_registered: bool,
}

/// Connects, identifies itself, and maps the daemon's files.
fn attach(worker: &Worker, copies: &Copies) -> Result<Attached> {
    let stream = dial(&forebay_rpc::client::socket(&worker.directory, ATTACH_SOCKET)?, DEADLINE)?;
    let group = |shape: &GroupShape| RankGroup {
        group: shape.group,
        bytes: shape.slice_bytes,
        is_replicated: shape.is_replicated,
    };
    let held = copies.pool_id();
    let request = AttachRequest {
        protocol: PROTOCOL_VERSION,
        engine_id: worker.engine_id.clone(),
        rank: worker.rank,
        ranks: worker.ranks,
        groups: worker.groups.iter().map(group).collect(),
        held_pool_id: held.clone().unwrap_or_default(),
        incarnation: worker.incarnation.to_vec(),
        lending: None,
        hears_population: true,
        numa_node: copies.report().and_then(|report| report.numa_node),
    };
    send_fds(&stream, &request.encode_to_vec(), &[], soon())?;
    let (bytes, fds) = recv_fds(&stream, soon())?;
    let reply: AttachReply = decode(&bytes)?;
    if !reply.error.is_empty() {
        let error = Error::invalid(reply.error);
        return Err(if reply.hint.is_empty() { error } else { error.hint(reply.hint) });
    }
    if reply.has_files {
        let mapping = Mapping::new(MapperFds::from_received(fds)?, &description(&reply)?)?;
        copies.map(reply.pool_id, mapping)?;
    } else if held.as_ref() != Some(&reply.pool_id) {
        return Err(Error::new(ErrorKind::Io, "the daemon sent no files of a pool that is not mapped here"));
    } else if let Err(error) = copies.grow(&description(&reply)?) {
        // The lock ends with the old mapping, so files of the new size can only come at the next attempt.
        copies.unmap()?;
        return Err(Error::new(ErrorKind::Unavailable, "the pool has grown and is mapped anew").source(error));
    }
    copies.populated(u64::from(reply.populated_units) * reply.unit_bytes);
    copies.trust_births(reply.has_births);
    if !reply.has_births {
        // A daemon that does not support suspicions would treat one as a connection error.
        copies.suspects().take(usize::MAX);
    }
    Ok(Attached { stream, unit_bytes: reply.unit_bytes, hears_registered: reply.hears_registered })
}

/// Receives the offsets of the slices from the daemon, each time all ranks are attached, and how much memory the pool
/// has. `Ok` at the engine's end.
fn converse(
    Attached { stream, unit_bytes, hears_registered }: &Attached,
    worker: &Worker,
    copies: &Copies,
    [ending, woken]: [&UnixStream; 2],
    backoff: &mut Backoff,
) -> Result<()> {
    let mut told_bytes = None;
    loop {
        // Slots suspected while there was no connection are reported first.
        tell_suspects(stream, copies)?;
        if *hears_registered {
            tell_registered(stream, copies, &mut told_bytes)?;
        }
        match wait(&[ending, stream, woken], None)? {
            Some(0) => return Ok(()),
            Some(1) => {}
            _ => {
                let _ = (&*woken).read(&mut [0; 64]);
                continue;
            }
        }
        let (bytes, _) = recv_fds(stream, soon())?;
        let said: AttachReady = decode(&bytes)?;
        if let Some(units) = said.populated_units {
            copies.populated(u64::from(units) * unit_bytes);
            continue;
        }
        copies.place(offsets(&said, &worker.groups)?);
        say(stream, Says::Ack(AttachAck {}))?;
        copies.stand(SessionState::Ready, None);
        backoff.reset();
    }
}

/// Reports slots that could not be loaded, so that the daemon compares them.
fn tell_suspects(stream: &UnixStream, copies: &Copies) -> Result<()> {
    loop {
        let slots = copies.suspects().take(MAX_SUSPECTS);
        if slots.is_empty() {
            return Ok(());
        }
        say(stream, Says::Suspects(Suspects { slots }))?;
    }
}

/// Says how much of the pool is registered with the driver, if that has changed.
fn tell_registered(stream: &UnixStream, copies: &Copies, told_bytes: &mut Option<u64>) -> Result<()> {
    let registered_bytes = copies.registered_bytes();
    match registered_bytes {
        Some(bytes) if registered_bytes != *told_bytes => {
            *told_bytes = registered_bytes;
            say(stream, Says::Registered(Registered { bytes }))
        }
        _ => Ok(()),
    }
}

fn say(stream: &UnixStream, says: Says) -> Result<()> {
    send_fds(stream, &WorkerSays { says: Some(says) }.encode_to_vec(), &[], soon())
}

/// Connects. If the daemon accepts nobody, the kernel itself blocks the caller, for this time at most.
pub fn dial(path: &Path, time: Duration) -> Result<UnixStream> {
    let unreachable = |error| forebay_rpc::client::unreachable(ErrorKind::Unavailable, path, error);
    let cannot = |errno: Errno| unreachable(std::io::Error::from(errno));
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(cannot)?;
    set_socket_timeout(&socket, Timeout::Send, Some(time)).map_err(cannot)?;
    connect(&socket, &SocketAddrUnix::new(path).map_err(cannot)?).map_err(cannot)?;
    forebay_rpc::client::peer(peer_uid(&socket).map_err(unreachable)?)?;
    Ok(UnixStream::from(socket))
}

/// The first readable socket; `None` after `timeout`.
fn wait(sockets: &[&UnixStream], timeout: Option<Duration>) -> Result<Option<usize>> {
    let fds: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = timeout.map(|left| Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ });
    loop {
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => return Ok(polled.iter().position(|socket| !socket.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::new(ErrorKind::Io, "cannot wait").source(std::io::Error::from(errno))),
        }
    }
}

fn description(reply: &AttachReply) -> Result<GeometryDescription> {
    let pool_id: [u8; 16] = reply
        .pool_id
        .as_slice()
        .try_into()
        .map_err(|_| Error::new(ErrorKind::Io, "a pool's id has 16 bytes").with("bytes", reply.pool_id.len()))?;
    let pool_id = u128::from_be_bytes(pool_id);
    Ok(GeometryDescription { pool_id, unit_bytes: reply.unit_bytes, units: reply.units })
}

pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    M::decode(bytes).map_err(|error| Error::new(ErrorKind::Io, "the daemon's message cannot be read").source(error))
}

fn soon() -> Instant {
    Instant::now() + DEADLINE
}
