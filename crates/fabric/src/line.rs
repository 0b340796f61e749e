//! One connection: what waits to be sent on it, and what is being received.
//!
//! Invariants: no call waits. A frame that began is finished, from a copy if its memory is taken away meanwhile, so the
//! stream stays whole. Readiness is edge-triggered: `can_read` and `can_write` are false only after the kernel said so.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::epoll::EventFlags;

use crate::ids::{OpId, PeerId, RegionId};
use crate::memory::Memory;
use crate::socket::{self, MOST_PARTS, Part, Place};
use crate::tls::{self, Tls};
use crate::wire::{Answer, HEADER_BYTES, Header, Hello, Key, Kind, PROOF_BYTES, Refusal, WireSegment, broken};

/// Bytes that may come with a header in one call: a frame of 4 KiB, whole.
const INBOX_BYTES: usize = 4096 + 2 * HEADER_BYTES;
/// Frames go together in one call up to about this many bytes.
const GATHER_BYTES: u64 = 256 << 10;

/// A range of local memory in an operation.
#[derive(Clone)]
pub struct Span {
    pub memory: Arc<Memory>,
    pub region: RegionId,
    pub offset: u64,
    pub bytes: u64,
}

/// Looks up where a peer's read reads.
pub type Serve<'a> = dyn FnMut(&[WireSegment]) -> Result<Vec<Span>, Refusal> + 'a;

/// A part of an operation that is asked of the peer in one frame.
pub struct Piece {
    pub op: OpId,
    pub is_write: bool,
    /// `None` once the operation was given up: what comes is dropped.
    pub spans: Option<Vec<Span>>,
    pub wire: Vec<WireSegment>,
    pub bytes: u64,
    /// Its request has begun to leave.
    pub is_sent: bool,
    /// Over UCX.
    pub ucx: Moving,
}

/// Where a piece stands whose bytes go through UCX.
#[derive(Default)]
pub struct Moving {
    /// Of the landing place here.
    pub tag: u64,
    /// The peer has said where a write lands.
    pub is_landing: bool,
    /// UCX has ended the write here.
    pub is_moved: bool,
    /// The peer's answer has come.
    pub answer: Option<Option<Refusal>>,
}

/// What waits to be sent.
pub enum Queued {
    /// A record of the handshake.
    Record(Vec<u8>),
    Frame {
        header: Header,
        body: Vec<u8>,
    },
    /// The answer to `Map`, with the file.
    File {
        name: u64,
        file: OwnedFd,
    },
    /// A piece in `asked`.
    Request(u64),
    /// A peer's read, looked up when its turn comes.
    Serve {
        op: u64,
        segments: Vec<WireSegment>,
    },
}

enum Chunk {
    Bytes(Vec<u8>),
    /// Of this request of ours, if it is one.
    Span(Span, Option<u64>),
}

impl Chunk {
    fn bytes(&self) -> u64 {
        match self {
            Chunk::Bytes(bytes) => bytes.len() as u64,
            Chunk::Span(span, _) => span.bytes,
        }
    }
}

/// Where a payload goes.
pub struct Landing {
    pub header: Header,
    /// `None`: nowhere.
    pub spans: Option<Vec<Span>>,
    /// Of a write that goes nowhere.
    pub refusal: Refusal,
    pub done: u64,
}

pub enum Incoming {
    /// A record of this many bytes.
    Record(usize),
    Header,
    Body([u8; HEADER_BYTES], Header, Vec<u8>),
    Payload(Landing),
}

/// What came in.
pub enum Arrived {
    /// Nothing more for now.
    Nothing,
    Record(Vec<u8>),
    /// A frame whose tag is right. Its payload, if it has one, is still to come.
    Frame(Header, Vec<u8>),
    /// The last byte of a payload.
    Landed(Landing),
}

/// Where the handshake stands.
pub enum Phase {
    /// Ours: the kernel connects.
    Connecting(Hello),
    /// Ours: the answer is awaited.
    Asked(Hello),
    /// Ours, with TLS: it begins.
    Securing(Hello, Answer),
    /// Ours, with TLS: the proof of its channel is awaited.
    Secured(Hello, Answer),
    /// Theirs: the hello is awaited.
    Accepted,
    /// Theirs: the proof is awaited.
    Answered(Hello, Answer),
    /// Theirs, with TLS: it begins, and the proof of its channel is awaited.
    Proven(Hello, Answer),
    Open,
}

pub struct Line {
    socket: OwnedFd,
    /// Between the line and its socket.
    tls: Option<Box<Tls>>,
    /// A Unix socket, which can carry descriptors.
    pub is_shm: bool,
    /// Payloads go through UCX.
    pub is_ucx: bool,
    pub peer: Option<PeerId>,
    pub phase: Phase,
    /// It began to be one.
    pub since: Instant,
    /// Small frames, which go first.
    control: VecDeque<Queued>,
    bulk: VecDeque<Queued>,
    sending: Vec<Chunk>,
    /// Of the first chunk.
    sent: u64,
    right: Option<OwnedFd>,
    pub incoming: Incoming,
    /// A request that overtook the word, on another connection, that the session is up. No other frame is received
    /// before that word.
    pub held: Option<(Header, Vec<u8>)>,
    inbox: Box<[u8; INBOX_BYTES]>,
    /// Of the inbox, that nobody has looked at.
    fresh: std::ops::Range<usize>,
    rights: Vec<OwnedFd>,
    pub asked: HashMap<u64, Piece>,
    pub asked_bytes: u64,
    /// The peer's reads that wait for their turn.
    pub serving: usize,
    send_key: (Key, u64),
    receive_key: (Key, u64),
    pub can_read: bool,
    pub can_write: bool,
    /// The kernel is asked to tell when the socket takes more. Otherwise each event that was already dealt with would
    /// be told once more: a socket nearly always takes more.
    pub is_room_watched: bool,
    /// Its latest turn ended before it had looked at all that was received.
    pub has_more: bool,
    /// The kernel has said that the other side closed: a short read is no longer the end of what is there.
    pub is_ending: bool,
}

impl Line {
    pub fn new(socket: OwnedFd, is_shm: bool, phase: Phase, record: usize) -> Line {
        Line {
            socket,
            tls: None,
            is_shm,
            is_ucx: false,
            peer: None,
            can_write: !matches!(phase, Phase::Connecting(_)),
            is_room_watched: matches!(phase, Phase::Connecting(_)),
            phase,
            since: Instant::now(),
            control: VecDeque::new(),
            bulk: VecDeque::new(),
            sending: Vec::new(),
            sent: 0,
            right: None,
            incoming: Incoming::Record(record),
            held: None,
            inbox: Box::new([0; INBOX_BYTES]),
            fresh: 0..0,
            rights: Vec::new(),
            asked: HashMap::new(),
            asked_bytes: 0,
            serving: 0,
            send_key: ([0; 32], 0),
            receive_key: ([0; 32], 0),
            can_read: false,
            has_more: false,
            is_ending: false,
        }
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// From now on TLS carries all that goes either way, but for what waits to be sent. The other side's proof of the
    /// channel comes next.
    pub fn secure(&mut self, mut tls: Tls, phase: Phase) {
        let waiting = self.control.drain(..).filter_map(|queued| match queued {
            Queued::Record(bytes) => Some(bytes),
            _ => None,
        });
        let begun = self.sending.drain(..).filter_map(|chunk| match chunk {
            Chunk::Bytes(bytes) => Some(bytes),
            Chunk::Span(..) => None,
        });
        let mut clear: Vec<u8> = begun.chain(waiting).flatten().collect();
        clear.drain(..std::mem::take(&mut self.sent) as usize);
        tls.begin(clear, self.inbox[self.fresh.clone()].to_vec());
        self.fresh = 0..0;
        self.tls = Some(Box::new(tls));
        // What has come is in its hands: the kernel will not tell of it again.
        self.can_read = true;
        self.phase = phase;
        self.incoming = Incoming::Record(PROOF_BYTES);
    }

    #[cfg(test)]
    pub fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// What only this channel of TLS has, once it stands.
    pub fn channel(&self) -> Option<[u8; 32]> {
        self.tls.as_ref().and_then(|tls| tls.channel())
    }

    /// From now on frames go both ways.
    pub fn open(&mut self, send: Key, receive: Key) {
        self.phase = Phase::Open;
        self.incoming = Incoming::Header;
        (self.send_key, self.receive_key) = ((send, 0), (receive, 0));
    }

    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub fn push(&mut self, queued: Queued) {
        match queued {
            Queued::Request(_) | Queued::Serve { .. } => self.bulk.push_back(queued),
            _ => self.control.push_back(queued),
        }
    }

    /// A frame without a body.
    pub fn push_frame(&mut self, kind: Kind, count: u16, op: u64) {
        let header = Header { kind, count, body: 0, payload: 0, op };
        self.push(Queued::Frame { header, body: Vec::new() });
    }

    /// Whether bytes of this request still wait for the socket.
    pub fn is_sending(&self, request: u64) -> bool {
        self.sending.iter().any(|chunk| matches!(chunk, Chunk::Span(_, Some(number)) if *number == request))
    }

    /// Files that wait; each is a descriptor.
    pub fn files(&self) -> usize {
        self.control.iter().filter(|queued| matches!(queued, Queued::File { .. })).count()
    }

    /// Small frames that wait.
    pub fn waiting(&self) -> usize {
        self.control.len()
    }

    /// Whether it can go on without the kernel.
    pub fn is_ready(&self) -> bool {
        (self.can_read && self.held.is_none()) || self.has_more || (self.can_write && self.has_to_send())
    }

    /// What the kernel is asked to tell.
    pub fn events(&self) -> EventFlags {
        let room = if self.is_room_watched { EventFlags::OUT } else { EventFlags::empty() };
        EventFlags::IN | EventFlags::RDHUP | room
    }

    /// Whether the kernel must be asked for other events than now. Room is watched until all has left, so that a socket
    /// that is full again and again costs no calls.
    pub fn must_watch_otherwise(&self) -> bool {
        if self.is_room_watched { self.can_write && !self.has_to_send() } else { !self.can_write }
    }

    /// Whether bytes wait for the socket.
    pub fn has_to_send(&self) -> bool {
        let is_waiting = !self.sending.is_empty() || !self.control.is_empty() || !self.bulk.is_empty();
        is_waiting || self.tls.as_ref().is_some_and(|tls| tls.has_to_send())
    }

    /// The descriptor that came with the latest frame.
    pub fn take_right(&mut self) -> Option<OwnedFd> {
        if self.rights.is_empty() { None } else { Some(self.rights.remove(0)) }
    }

    /// Sends what waits until the socket is full. `serve` looks a peer's read up; without spans it is refused.
    pub fn flush(&mut self, serve: &mut Serve<'_>) -> Result<()> {
        while self.can_write && self.has_to_send() {
            if self.sending.is_empty() {
                self.gather(serve);
            }
            let mut skip = self.sent;
            let mut wanted = 0;
            let parts = self.sending.iter().take(MOST_PARTS).map(|chunk| {
                let from = std::mem::take(&mut skip);
                wanted += chunk.bytes() - from;
                match chunk {
                    Chunk::Bytes(bytes) => Part::Bytes(&bytes[from as usize..]),
                    Chunk::Span(span, _) => Part::Memory(&span.memory, span.offset + from, span.bytes - from),
                }
            });
            let sent = match &mut self.tls {
                None => socket::send(self.socket.as_fd(), parts, self.right.as_ref().map(|right| right.as_fd())),
                Some(tls) => tls.send(self.socket.as_fd(), parts),
            };
            match sent {
                Ok(sent) => {
                    self.right = None;
                    self.can_write = match &self.tls {
                        None => sent as u64 == wanted,
                        Some(tls) => !tls.has_to_send(),
                    };
                    self.advance(sent as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.can_write = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
        Ok(())
    }

    fn advance(&mut self, sent: u64) {
        let mut left = self.sent + sent;
        let is_over = |chunk: &Chunk| match left.checked_sub(chunk.bytes()) {
            Some(more) => {
                left = more;
                true
            }
            None => false,
        };
        let over = self.sending.iter().map(is_over).take_while(|is_over| *is_over).count();
        self.sending.drain(..over);
        self.sent = left;
    }

    /// Puts frames together for the next call.
    fn gather(&mut self, serve: &mut Serve<'_>) {
        let mut bytes = 0;
        self.sent = 0;
        while bytes < GATHER_BYTES && self.sending.len() < MOST_PARTS {
            let is_file = matches!(self.control.front(), Some(Queued::File { .. }));
            // A descriptor goes with the first byte of a call.
            if is_file && !self.sending.is_empty() {
                return;
            }
            let Some(queued) = self.control.pop_front().or_else(|| self.bulk.pop_front()) else { return };
            let before = self.sending.len();
            self.begin(queued, serve);
            bytes += self.sending[before..].iter().map(Chunk::bytes).sum::<u64>();
            if is_file {
                return;
            }
        }
    }

    fn begin(&mut self, queued: Queued, serve: &mut Serve<'_>) {
        match queued {
            Queued::Record(bytes) => self.sending.push(Chunk::Bytes(bytes)),
            Queued::Frame { header, body } => self.begin_frame(header, &body),
            Queued::File { name, file } => {
                self.right = Some(file);
                self.begin_frame(Header { kind: Kind::Mapped, count: 0, body: 0, payload: 0, op: name }, &[]);
            }
            Queued::Request(number) => {
                let Some(piece) = self.asked.get_mut(&number) else { return };
                piece.is_sent = true;
                let segments = crate::wire::segments_to_wire(&piece.wire);
                if self.is_ucx {
                    let (kind, body) = match piece.is_write {
                        true => (Kind::Push, segments),
                        false => (Kind::Pull, [&piece.ucx.tag.to_le_bytes(), &segments[..]].concat()),
                    };
                    let count = piece.wire.len() as u16;
                    return self
                        .begin_frame(Header { kind, count, body: body.len() as u32, payload: 0, op: number }, &body);
                }
                let body = segments;
                let (kind, payload) = if piece.is_write { (Kind::Write, piece.bytes) } else { (Kind::Read, 0) };
                let spans = if piece.is_write { piece.spans.clone().unwrap_or_default() } else { Vec::new() };
                let count = piece.wire.len() as u16;
                let header = Header { kind, count, body: body.len() as u32, payload: payload as u32, op: number };
                self.begin_frame(header, &body);
                self.sending.extend(spans.into_iter().map(|span| Chunk::Span(span, Some(number))));
            }
            Queued::Serve { op, segments } => {
                self.serving -= 1;
                match serve(&segments) {
                    Ok(spans) => {
                        let payload = spans.iter().map(|span| span.bytes).sum::<u64>() as u32;
                        self.begin_frame(Header { kind: Kind::Data, count: 0, body: 0, payload, op }, &[]);
                        self.sending.extend(spans.into_iter().map(|span| Chunk::Span(span, None)));
                    }
                    Err(refusal) => {
                        let count = refusal as u16;
                        self.begin_frame(Header { kind: Kind::Refused, count, body: 0, payload: 0, op }, &[]);
                    }
                }
            }
        }
    }

    fn begin_frame(&mut self, header: Header, body: &[u8]) {
        let (key, sequence) = &mut self.send_key;
        let mut bytes = header.sealed(key, *sequence, body).to_vec();
        *sequence += 1;
        bytes.extend_from_slice(body);
        match self.sending.last_mut() {
            Some(Chunk::Bytes(before)) => before.append(&mut bytes),
            _ => self.sending.push(Chunk::Bytes(bytes)),
        }
    }

    /// What comes next. `scratch` takes payloads that go nowhere.
    pub fn receive(&mut self, scratch: &mut [u8]) -> Result<Arrived> {
        if self.held.is_some() {
            return Ok(Arrived::Nothing);
        }
        loop {
            match &mut self.incoming {
                Incoming::Record(bytes) if self.fresh.len() >= *bytes => {
                    let record = self.inbox[self.fresh.start..self.fresh.start + *bytes].to_vec();
                    self.fresh.start += record.len();
                    return Ok(Arrived::Record(record));
                }
                Incoming::Header if self.fresh.len() >= HEADER_BYTES => {
                    let start = self.fresh.start;
                    let bytes: [u8; HEADER_BYTES] =
                        self.inbox[start..start + HEADER_BYTES].try_into().expect("as many bytes");
                    let header = Header::parse(&bytes)?;
                    self.fresh.start += HEADER_BYTES;
                    self.incoming = Incoming::Body(bytes, header, Vec::with_capacity(header.body as usize));
                }
                Incoming::Body(bytes, header, body) => {
                    let left = header.body as usize - body.len();
                    let here = left.min(self.fresh.len());
                    body.extend_from_slice(&self.inbox[self.fresh.start..self.fresh.start + here]);
                    self.fresh.start += here;
                    if here == left {
                        let (key, sequence) = &mut self.receive_key;
                        Header::check(bytes, body, key, *sequence)?;
                        *sequence += 1;
                        let (header, body) = (*header, std::mem::take(body));
                        self.incoming = Incoming::Header;
                        return Ok(Arrived::Frame(header, body));
                    }
                    if !self.fill()? {
                        return Ok(Arrived::Nothing);
                    }
                }
                Incoming::Payload(_) => match self.receive_payload(scratch)? {
                    Some(landing) => return Ok(Arrived::Landed(landing)),
                    None if self.can_read => {}
                    None => return Ok(Arrived::Nothing),
                },
                Incoming::Record(_) | Incoming::Header => {
                    if !self.fill()? {
                        return Ok(Arrived::Nothing);
                    }
                }
            }
        }
    }

    /// Receives into the inbox. False if nothing is there.
    fn fill(&mut self) -> Result<bool> {
        if !self.can_read {
            return Ok(false);
        }
        self.inbox.copy_within(self.fresh.clone(), 0);
        self.fresh = 0..self.fresh.len();
        let room = self.inbox.len() - self.fresh.end;
        let place = Place::Bytes(&mut self.inbox[self.fresh.end..]);
        let rights = self.is_shm.then_some(&mut self.rights);
        let received = receive(&self.socket, &mut self.tls, std::iter::once(place), rights);
        let received = self.received(received, room)?;
        self.fresh.end += received;
        // A descriptor that nobody asked for keeps a file open; two are an attack.
        if self.rights.len() > 2 {
            return Err(broken("descriptors that were not asked for"));
        }
        Ok(received > 0)
    }

    fn receive_payload(&mut self, scratch: &mut [u8]) -> Result<Option<Landing>> {
        let Incoming::Payload(landing) = &mut self.incoming else { unreachable!("checked by the caller") };
        let mut left = u64::from(landing.header.payload) - landing.done;
        if !self.fresh.is_empty() && left > 0 {
            let here = left.min(self.fresh.len() as u64) as usize;
            land(landing, &self.inbox[self.fresh.start..self.fresh.start + here]);
            self.fresh.start += here;
            landing.done += here as u64;
            left -= here as u64;
        }
        if left > 0 {
            if !self.can_read {
                return Ok(None);
            }
            // The next frame's header comes in the same call. A descriptor is never behind a payload: it goes alone.
            let mut parts: Vec<Place<'_>> = Vec::with_capacity(4);
            let mut wanted = 0;
            match &landing.spans {
                Some(spans) => {
                    for (span, offset, bytes) in rest(spans, landing.done).take(MOST_PARTS - 1) {
                        parts.push(Place::Memory(&span.memory, offset, bytes));
                        wanted += bytes;
                    }
                }
                None => {
                    wanted = left.min(scratch.len() as u64);
                    parts.push(Place::Bytes(&mut scratch[..wanted as usize]));
                }
            }
            let mut room = wanted as usize;
            if wanted == left && !self.is_shm {
                self.fresh = 0..0;
                room += self.inbox.len();
                parts.push(Place::Bytes(&mut self.inbox[..]));
            }
            let received = receive(&self.socket, &mut self.tls, parts.into_iter(), None);
            let received = self.received(received, room)? as u64;
            let Incoming::Payload(landing) = &mut self.incoming else { unreachable!("nothing changed it") };
            landing.done += received.min(wanted);
            left -= received.min(wanted);
            if received > wanted {
                self.fresh = 0..(received - wanted) as usize;
            }
        }
        if left > 0 {
            return Ok(None);
        }
        match std::mem::replace(&mut self.incoming, Incoming::Header) {
            Incoming::Payload(landing) => Ok(Some(landing)),
            _ => unreachable!("nothing changed it"),
        }
    }

    /// What a call for `room` bytes says of the socket.
    fn received(&mut self, received: io::Result<usize>, room: usize) -> Result<usize> {
        match received {
            Ok(0) => Err(closed()),
            Ok(received) => {
                // A short answer of a stream is all there was, except at a descriptor and at the end.
                self.can_read = received == room || self.is_shm || self.is_ending;
                Ok(received)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.can_read = false;
                Ok(0)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(tls::changed(error)),
            Err(error) => Err(lost(error)),
        }
    }

    /// Takes a region away: what of it is being sent goes on from a copy, what comes for it goes nowhere.
    pub fn forget_region(&mut self, region: RegionId) {
        self.save(|span, _| span.region == region);
        if let Incoming::Payload(landing) = &mut self.incoming
            && landing.spans.as_ref().is_some_and(|spans| spans.iter().any(|span| span.region == region))
        {
            landing.spans = None;
        }
    }

    /// Takes the memory of an operation away. Requests that have not begun are taken back.
    pub fn forget_op(&mut self, op: OpId) {
        let ours: Vec<u64> = self.asked.iter().filter(|(_, piece)| piece.op == op).map(|(id, _)| *id).collect();
        if ours.is_empty() {
            return;
        }
        self.save(|_, request| request.is_some_and(|request| ours.contains(&request)));
        if let Incoming::Payload(landing) = &mut self.incoming
            && landing.header.kind == Kind::Data
            && ours.contains(&landing.header.op)
        {
            landing.spans = None;
        }
        for number in &ours {
            let piece = self.asked.get_mut(number).expect("listed above");
            piece.spans = None;
            if !piece.is_sent {
                self.asked_bytes -= piece.bytes;
                self.asked.remove(number);
            }
        }
        let asked = &self.asked;
        self.bulk.retain(|queued| !matches!(queued, Queued::Request(number) if !asked.contains_key(number)));
    }

    fn save(&mut self, is_taken: impl Fn(&Span, Option<u64>) -> bool) {
        for chunk in &mut self.sending {
            if let Chunk::Span(span, request) = chunk
                && is_taken(span, *request)
            {
                let mut bytes = vec![0; span.bytes as usize];
                span.memory.read(span.offset, &mut bytes);
                *chunk = Chunk::Bytes(bytes);
            }
        }
    }
}

impl Drop for Line {
    /// A child that was forked keeps the socket open; the other side hears of the end all the same.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

/// Receives through TLS, if there is one.
fn receive<'a>(
    socket: &OwnedFd,
    tls: &mut Option<Box<Tls>>,
    places: impl Iterator<Item = Place<'a>>,
    rights: Option<&mut Vec<OwnedFd>>,
) -> io::Result<usize> {
    match tls {
        None => socket::receive(socket.as_fd(), places, rights),
        Some(tls) => tls.receive(socket.as_fd(), places),
    }
}

fn land(landing: &Landing, mut bytes: &[u8]) {
    let Some(spans) = &landing.spans else { return };
    for (span, offset, room) in rest(spans, landing.done) {
        let (now, later) = bytes.split_at(bytes.len().min(room as usize));
        span.memory.write(offset, now);
        bytes = later;
        if bytes.is_empty() {
            return;
        }
    }
}

/// What is left of the spans after `done` bytes: each with its offset and length.
fn rest(spans: &[Span], mut done: u64) -> impl Iterator<Item = (&Span, u64, u64)> {
    spans.iter().filter_map(move |span| {
        let skipped = done.min(span.bytes);
        done -= skipped;
        (skipped < span.bytes).then_some((span, span.offset + skipped, span.bytes - skipped))
    })
}

fn lost(error: io::Error) -> Error {
    let hint = "is the peer's process still there, and the network between?";
    Error::new(ErrorKind::Unavailable, "the connection to the peer broke").source(error).hint(hint)
}

pub fn closed() -> Error {
    let hint = "has its process ended? connect again when it is back";
    Error::new(ErrorKind::Unavailable, "the peer closed the connection").hint(hint)
}
