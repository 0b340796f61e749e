//! One connection: what is sent, what is in flight, and the replies as they arrive.
//!
//! Short data pass through a small buffer: a reply's line and the header of its value. A payload goes from the kernel
//! into its slot; the same call receives the end of the value and the next reply's line. A payload is summed up piece
//! by piece, while the pieces are in the cache.
//!
//! Invariants: replies belong to the operations in flight in the order of their launch. Bytes are written to a slot
//! only while its operation is the first in flight, has no failure and was not abandoned. Any [`Loss`] ends the
//! connection.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use forebay_core::ErrorKind;
use forebay_core::tier::{OpId, OpKind, Outcome};

use super::address::Address;
use super::config::Settings;
use super::in_flight::{InFlight, Job, Moving, Verb, Verdict};
use super::report::Counters;
use super::resp::{self, Head, LostStep, Reply};
use super::send_buffer::SendBuffer;
use super::transport::Transport;
use crate::header::HEADER_BYTES;
use crate::uring::Region;

/// Replies without payload are read in pieces of this size.
const INPUT_BYTES: usize = 16 << 10;
/// Bytes received after a payload: the end of the value and the next line, but little of the next payload.
const TAIL_BYTES: usize = 256;
/// Payloads are received in pieces that stay in the second-level cache until they are summed up.
const PIECE_BYTES: u64 = 256 << 10;
/// The event loop waits for a value up to this length as a whole if nothing is to follow it. See
/// [`Connection::awaited`].
const WHOLE_BYTES: u64 = (1 << 20) + HEADER_BYTES as u64 + 2;
/// Longest reply to a greeting; it may be the map of a large cluster.
const LONGEST_GREETING: usize = 4 << 20;

/// The parts of the event loop that a connection uses.
pub(super) struct Context<'a> {
    pub settings: &'a Settings,
    pub pool: &'a Region,
    pub counters: &'a mut Counters,
    pub ended: &'a mut Vec<Ended>,
}

/// An operation whose last reply has come.
pub(super) struct Ended {
    pub job: Job,
    pub verdict: Verdict,
}

/// Why a connection has ended.
#[derive(Debug)]
pub(super) struct Loss {
    /// The error of every operation that was in flight.
    pub kind: ErrorKind,
    pub why: String,
    /// The server violated the protocol.
    pub is_lost_step: bool,
}

/// First commands of a connection, and their number.
#[derive(Clone, Default)]
pub(super) struct Greeting {
    pub bytes: Vec<u8>,
    pub commands: usize,
}

impl Greeting {
    pub fn say(&mut self, arguments: &[&[u8]]) {
        resp::command(&mut self.bytes, arguments);
        self.commands += 1;
    }
}

enum Stage {
    Connecting {
        commands: usize,
        due: Instant,
    },
    /// Number of replies that have not come yet.
    Greeting {
        commands: usize,
        due: Instant,
    },
    Ready,
}

/// The value that is arriving for the first operation in flight.
struct Body {
    len: u64,
    /// Bytes that have arrived of header, payload and end of line.
    done: u64,
    header: [u8; HEADER_BYTES],
    /// Whether the length is that of the part; a later version may give it another.
    is_of_length: bool,
    /// Where the payload goes; `None` if it is discarded.
    target: Option<u64>,
}

pub(super) struct Connection {
    address: Address,
    transport: Transport,
    stage: Stage,
    out: SendBuffer,
    /// The socket accepts no more until it becomes writable.
    is_blocked: bool,
    input: Vec<u8>,
    /// Start of the bytes that were received but not parsed.
    from: usize,
    to: usize,
    body: Option<Body>,
    in_flight: VecDeque<InFlight>,
    /// Number of `in_flight` that change something.
    changes: usize,
    /// For reads and for changes.
    bytes_in_flight: [u64; 2],
    /// The replies to the greeting.
    pub answers: Vec<Reply>,
    /// An operation was answered, so the connection was useful.
    pub has_served: bool,
    /// The server is a replica, and has refused a write; or it has taken the login back, as a proxy may.
    pub is_useless: bool,
    /// What the server said last to an operation that it refused, by [`Verb`].
    pub refusals: [Option<String>; Verb::COUNT],
    /// It takes nothing new, and ends with the last operation in flight.
    pub is_leaving: bool,
}

impl Connection {
    pub fn new(transport: Transport, address: Address, greeting: &Greeting, due: Instant) -> Connection {
        let mut out = SendBuffer::default();
        out.push(|bytes| bytes.extend_from_slice(&greeting.bytes));
        Connection {
            address,
            transport,
            stage: Stage::Connecting { commands: greeting.commands, due },
            out,
            is_blocked: true,
            input: vec![0; INPUT_BYTES],
            from: 0,
            to: 0,
            body: None,
            in_flight: VecDeque::new(),
            changes: 0,
            bytes_in_flight: [0; 2],
            answers: Vec::new(),
            has_served: false,
            is_useless: false,
            refusals: Default::default(),
            is_leaving: false,
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }

    pub fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready)
    }

    /// The deadline of what the connection waits for.
    pub fn due(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Connecting { due, .. } | Stage::Greeting { due, .. } => Some(*due),
            Stage::Ready => self.in_flight.front().map(|flight| flight.due),
        }
    }

    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// For reads and for changes.
    pub fn bytes_in_flight(&self) -> [u64; 2] {
        self.bytes_in_flight
    }

    /// Whether a read that is launched now has to wait for a change.
    pub fn has_changes(&self) -> bool {
        self.changes > 0
    }

    /// Whether it was leaving, and nothing is in flight any more.
    pub fn has_left(&self) -> bool {
        self.is_leaving && !self.has_in_flight()
    }

    /// Whether one more operation can be launched. Replies come in the order of commands, so all commands of the
    /// previous operation must have been written.
    pub fn has_room(&self, settings: &Settings) -> bool {
        self.is_ready()
            && !self.is_leaving
            && self.in_flight.len() < settings.config.pipeline_depth
            && !self.in_flight.back().is_some_and(InFlight::has_more)
    }

    /// Begins `job` with its first command, to be sent with [`Connection::send`]. A store may end here instead: with a
    /// secret, bytes that lost their checksum are not sent.
    pub fn launch(&mut self, job: Job, due: Instant, context: &mut Context<'_>, scratch: &mut Vec<u8>) {
        match InFlight::new(job, due, context.settings, context.pool) {
            Some(flight) => {
                self.changes += usize::from(job.is_change());
                self.in_flight.push_back(flight);
                self.ask(context.settings, scratch);
            }
            None => {
                context.counters.corrupt_blocks += 1;
                context.ended.push(Ended { job, verdict: Verdict::Done(Outcome::Failed(ErrorKind::Corrupt)) });
            }
        }
    }

    /// Bytes of the last operation's next command. None if it has no command left, or if `of_changes` does not match
    /// its kind.
    pub fn more_bytes(&self, of_changes: bool, settings: &Settings) -> Option<u64> {
        let last = self.in_flight.back().filter(|flight| flight.has_more() && flight.job.is_change() == of_changes)?;
        Some(last.next_bytes(settings))
    }

    /// Writes the next command of the last operation, to be sent with [`Connection::send`].
    pub fn ask(&mut self, settings: &Settings, scratch: &mut Vec<u8>) {
        let flight = self.in_flight.back_mut().expect("there is one to go on with");
        self.bytes_in_flight[usize::from(flight.job.is_change())] += flight.next_bytes(settings);
        flight.ask(settings, &mut self.out, scratch);
    }

    /// Drops an operation in flight: data that arrive for it are discarded. A store whose bytes are not all sent
    /// stays, since its slot is still read.
    pub fn abandon(&mut self, id: OpId) -> Option<Job> {
        let wanted = |flight: &InFlight| flight.job.op.id == id && !flight.is_abandoned();
        let at = self.in_flight.iter().position(wanted)?;
        let flight = &mut self.in_flight[at];
        let job = flight.job;
        if job.op.kind == OpKind::Store {
            return None;
        }
        flight.abandon();
        if flight.is_over() {
            // The operation's next command was still waiting, so no reply would come that could end it.
            self.in_flight.remove(at);
            self.changes -= usize::from(job.is_change());
        } else if let (0, Some(body)) = (at, &mut self.body) {
            body.target = None;
        }
        Some(job)
    }

    /// Ends all operations in flight that were not abandoned, with their decided outcome or as failed.
    pub fn end_with(self, kind: ErrorKind, ended: &mut Vec<Ended>) {
        for flight in self.in_flight.into_iter().filter(|flight| !flight.is_abandoned()) {
            let verdict = flight.verdict.filter(|verdict| matches!(verdict, Verdict::Done(_)));
            let verdict = verdict.unwrap_or(Verdict::Done(Outcome::Failed(kind)));
            ended.push(Ended { job: flight.job, verdict });
        }
    }

    /// Sends waiting data until the socket accepts no more.
    pub fn send(&mut self, pool: &Region) -> Result<(), Loss> {
        if self.is_blocked {
            return Ok(());
        }
        self.transport.flush().and_then(|()| self.out.send(&mut self.transport, pool)).map_err(|error| lost(&error))?;
        self.is_blocked = !self.out.is_empty() || self.transport.holds_bytes();
        Ok(())
    }

    /// Handles a writable socket; a connecting one is now connected.
    pub fn on_writable(&mut self, pool: &Region) -> Result<(), Loss> {
        if let Stage::Connecting { commands, due } = self.stage {
            self.transport.check().map_err(|error| lost(&error.into()))?;
            self.stage = Stage::Greeting { commands, due };
        }
        self.is_blocked = false;
        self.send(pool)
    }

    /// Receives what has arrived. If `is_at_end`, the other side has closed and everything is read. Otherwise reading
    /// ends with the first call that returns less than was asked for.
    pub fn on_readable(&mut self, is_at_end: bool, context: &mut Context<'_>) -> Result<(), Loss> {
        while self.receive_some(is_at_end, context)? {}
        self.transport.await_bytes(self.awaited() as u32);
        Ok(())
    }

    /// Why the server ended the connection before it was of use, if it said so. A server that lets nobody in writes a
    /// line and closes: then the line waits in the socket, though whatever is written fails.
    pub fn last_words(&mut self, pool: &Region) -> Option<String> {
        while !self.is_ready() && self.to < self.input.len() {
            match self.transport.receive(pool, None, &mut self.input[self.to..]) {
                Ok(0) => break,
                Ok(received) => self.to += received,
                // What TLS has to say.
                Err(error) if error.kind() == io::ErrorKind::Other => return Some(error.to_string()),
                Err(_) => break,
            }
        }
        if let Some(text) = self.refusal() {
            return Some(refused(text));
        }
        let rest = (!self.is_ready()).then_some(&self.input[self.from..self.to])?;
        let (reply, _) = resp::reply(rest).ok().flatten()?;
        reply.error().map(refused)
    }

    /// The first refusal of the greeting is the relevant one: it caused the others.
    pub fn refusal(&self) -> Option<&str> {
        self.answers.iter().find_map(Reply::error)
    }

    /// How many bytes must have arrived before a wake-up is worth it. Never more than must come, or the event loop
    /// would miss the end of a value. Woken for any amount, the event loop follows the server in steps of about 64
    /// KiB, with a system call or two and contention on the socket's lock in each. But data that wait in the socket
    /// leave the second-level cache when much more follow. In that case one piece at a time is best, on one core as
    /// on two (bench/reports/2026-11-21-redis.md).
    fn awaited(&self) -> u64 {
        let Some(rest) = self.body.as_ref().map(Body::rest) else { return 1 };
        let is_last = self.in_flight.len() == 1 && self.in_flight[0].awaits_last();
        if is_last && rest <= WHOLE_BYTES { rest } else { rest.min(PIECE_BYTES) }
    }

    /// Returns whether there may be more.
    fn receive_some(&mut self, is_at_end: bool, context: &mut Context<'_>) -> Result<bool, Loss> {
        let (received, asked) = match self.receive(context.pool) {
            Ok(counts) => counts,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(lost(&error)),
        };
        if received == 0 {
            return Err(lost(&io::Error::other("the server has closed the connection")));
        }
        self.consume(context).map_err(lost_step)?;
        Ok(received == asked || is_at_end || self.transport.hides_bytes())
    }

    /// One call: bytes received, and bytes asked for.
    fn receive(&mut self, pool: &Region) -> io::Result<(usize, usize)> {
        if let Some((place, len)) = self.body.as_ref().and_then(Body::in_payload) {
            // All bytes received before have gone to the slot.
            debug_assert_eq!(self.from, self.to, "a payload is received when nothing lies before it");
            let rest = self.body.as_ref().map_or(0, |body| body.len - body.done);
            let tail_bytes = if len as u64 == rest { TAIL_BYTES } else { 0 };
            let received = self.transport.receive(pool, Some((place, len)), &mut self.input[..tail_bytes])?;
            let payload = received.min(len);
            self.in_flight.front_mut().expect("a body has a flight").received(pool, place, payload);
            self.body.as_mut().expect("it was there").done += payload as u64;
            (self.from, self.to) = (0, received - payload);
            return Ok((received, len + tail_bytes));
        }
        // A load's line and header fit; more would only have to be copied from here to the slot.
        let is_load = self.body.is_none() && self.in_flight.front().is_some_and(InFlight::is_load);
        let most = if is_load { self.to + TAIL_BYTES } else { self.input.len() };
        let room = self.to..most.min(self.input.len());
        let asked = room.len();
        let received = self.transport.receive(pool, None, &mut self.input[room])?;
        self.to += received;
        Ok((received, asked))
    }

    /// Parses the complete part of what was received.
    fn consume(&mut self, context: &mut Context<'_>) -> Result<(), LostStep> {
        loop {
            if self.body.is_some() {
                if !self.consume_body(context)? {
                    break;
                }
            } else if !self.consume_reply(context)? {
                break;
            }
        }
        self.input.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        if self.to == self.input.len() {
            self.grow()?;
        }
        Ok(())
    }

    /// Only the replies to a greeting may be long.
    fn grow(&mut self) -> Result<(), LostStep> {
        if self.is_ready() || self.input.len() >= LONGEST_GREETING {
            return Err(LostStep("a reply is too long"));
        }
        self.input.resize(self.input.len() * 2, 0);
        Ok(())
    }

    /// False if more must arrive.
    fn consume_reply(&mut self, context: &mut Context<'_>) -> Result<bool, LostStep> {
        if self.from == self.to {
            return Ok(false);
        }
        if !self.is_ready() {
            return self.consume_greeting();
        }
        let Some((head, len)) = resp::head(&self.input[self.from..self.to])? else { return Ok(false) };
        let flight = self.in_flight.front_mut().filter(|flight| flight.awaits_reply());
        let flight = flight.ok_or(LostStep("a reply came without a request"))?;
        match (&flight.job.op.kind, head) {
            (_, Head::Error(text)) => {
                self.is_useless |= text.starts_with(b"READONLY") || text.starts_with(b"NOAUTH");
                flight.refused(text, &self.address);
                if let Some(Verdict::Done(Outcome::Failed(_))) = flight.verdict {
                    self.refusals[flight.job.verb() as usize] = Some(resp::said(text));
                }
            }
            (_, Head::Simple(b"OK")) if flight.awaits_asking() => {}
            _ if flight.awaits_asking() => return Err(LostStep("a reply is of another type than its command's")),
            (OpKind::Load, Head::Bulk(len_of_value)) => {
                self.body = Some(Body::of(flight, len_of_value, context));
                self.from += len;
                return Ok(true);
            }
            (OpKind::Load, Head::Null) => flight.decide(Verdict::Done(Outcome::Absent)),
            (OpKind::Store, Head::Simple(b"OK")) => {}
            (OpKind::Exists | OpKind::Remove | OpKind::Touch { .. }, Head::Integer(number)) => {
                flight.counted(number, context.settings);
            }
            _ => return Err(LostStep("a reply is of another type than its command's")),
        }
        self.from += len;
        self.end_reply(context);
        Ok(true)
    }

    fn consume_greeting(&mut self) -> Result<bool, LostStep> {
        let Some((reply, len)) = resp::reply(&self.input[self.from..self.to])? else { return Ok(false) };
        let Stage::Greeting { commands, .. } = &mut self.stage else {
            return Err(LostStep("a reply came before a command"));
        };
        self.from += len;
        *commands -= 1;
        let is_last = *commands == 0;
        self.answers.push(reply);
        if is_last {
            self.stage = Stage::Ready;
        }
        Ok(true)
    }

    /// False if more must arrive.
    fn consume_body(&mut self, context: &mut Context<'_>) -> Result<bool, LostStep> {
        let body = self.body.as_mut().expect("called with one");
        let bytes = &self.input[self.from..self.to];
        if bytes.is_empty() {
            return Ok(false);
        }
        let payload_at = (HEADER_BYTES as u64).min(body.len);
        let some = if body.done < payload_at {
            let some = bytes.len().min((payload_at - body.done) as usize);
            body.header[body.done as usize..][..some].copy_from_slice(&bytes[..some]);
            if body.done + some as u64 == HEADER_BYTES as u64 && body.target.is_some() {
                let flight = self.in_flight.front_mut().expect("a body has a flight");
                if !check_header(flight, body, context)? {
                    body.target = None;
                }
            }
            some
        } else if body.done < body.len {
            let some = bytes.len().min((body.len - body.done) as usize);
            if let Some(target) = body.target {
                let place = target + body.done - payload_at;
                context.pool.write(place, &bytes[..some]);
                let flight = self.in_flight.front_mut().expect("a body has a flight");
                flight.received(context.pool, place, some);
            }
            some
        } else {
            if bytes[0] != b"\r\n"[(body.done - body.len) as usize] {
                return Err(LostStep("a value does not end with a line break"));
            }
            1
        };
        self.from += some;
        body.done += some as u64;
        if body.done == body.len + 2 {
            self.body = None;
            self.end_reply(context);
        }
        Ok(true)
    }

    /// Counts one more reply for the first operation in flight.
    fn end_reply(&mut self, context: &mut Context<'_>) {
        let flight = self.in_flight.front_mut().expect("a reply has a flight");
        self.bytes_in_flight[usize::from(flight.job.is_change())] -= flight.answer(context.settings);
        if !flight.is_over() {
            return;
        }
        let flight = self.in_flight.pop_front().expect("it was there");
        self.changes -= usize::from(flight.job.is_change());
        self.has_served = true;
        if flight.is_abandoned() {
            return;
        }
        let length_bytes = flight.job.op.length_bytes;
        let verdict = match (flight.verdict, flight.moving) {
            (Some(verdict), _) => verdict,
            (None, Moving::In(sum, header)) => match sum.proves(&header) {
                Some(checksum) => Verdict::Done(Outcome::Loaded { length_bytes, checksum }),
                None => {
                    context.counters.corrupt_blocks += 1;
                    Verdict::Done(Outcome::Failed(ErrorKind::Corrupt))
                }
            },
            (None, Moving::Out(_) | Moving::Nothing) => Verdict::Done(Outcome::Stored),
        };
        context.ended.push(Ended { job: flight.job, verdict });
    }
}

impl Body {
    /// A value of `len` bytes for the next part of a load. One that is too short for a header is discarded.
    fn of(flight: &mut InFlight, len: u64, context: &mut Context<'_>) -> Body {
        let (at, part_bytes) = flight.span(context.settings);
        let is_of_length = len == HEADER_BYTES as u64 + part_bytes;
        if len < HEADER_BYTES as u64 {
            context.counters.wrong_sizes += 1;
            flight.fail(ErrorKind::Corrupt);
        }
        let is_wanted = flight.verdict.is_none() && !flight.is_abandoned();
        let slot = flight.job.op.slot.filter(|_| is_wanted);
        Body { len, done: 0, header: [0; HEADER_BYTES], is_of_length, target: slot.map(|(slot, _)| slot.offset() + at) }
    }

    /// Bytes of it still to come, end of line included.
    fn rest(&self) -> u64 {
        self.len + 2 - self.done
    }

    /// Where the next bytes of the payload go, if anywhere, and how many are received at once.
    fn in_payload(&self) -> Option<(u64, usize)> {
        let is_payload = (HEADER_BYTES as u64..self.len).contains(&self.done);
        let target = self.target.filter(|_| is_payload)?;
        Some((target + self.done - HEADER_BYTES as u64, (self.len - self.done).min(PIECE_BYTES) as usize))
    }
}

/// Whether the payload after this header may go to the slot.
fn check_header(flight: &mut InFlight, body: &Body, context: &mut Context<'_>) -> Result<bool, LostStep> {
    let (sealing, counters) = (&context.settings.config.sealing, &mut *context.counters);
    if sealing.is_later(&body.header) {
        // Whoever wrote it can read it: it stays.
        flight.decide(Verdict::Done(Outcome::Absent));
        return Ok(false);
    }
    let (op, header) = (&flight.job.op, sealing.read(&body.header));
    if header.is_some_and(|header| header.key == op.key && header.length_bytes != op.length_bytes) {
        // The block, whole or not, of whoever asks for another length of it.
        counters.wrong_sizes += 1;
        flight.fail(ErrorKind::Invalid);
        return Ok(false);
    }
    if !body.is_of_length {
        counters.wrong_sizes += 1;
        flight.fail(ErrorKind::Corrupt);
        return Ok(false);
    }
    if let Some(header) = header.filter(|header| header.is_of(&op.key, op.length_bytes))
        && flight.arrives(header, sealing)
    {
        return Ok(true);
    }
    counters.foreign_values += 1;
    flight.fail(ErrorKind::Corrupt);
    if header.is_some_and(|header| header.key != flight.job.op.key) {
        // A valid value of another block: replies no longer match their commands.
        return Err(LostStep("the reply is for another key"));
    }
    Ok(false)
}

/// What is told of a server that refused the greeting.
pub(super) fn refused(text: &str) -> String {
    format!("it refused the connection: {text}")
}

fn lost(error: &io::Error) -> Loss {
    Loss { kind: ErrorKind::Unavailable, why: error.to_string(), is_lost_step: false }
}

fn lost_step(LostStep(why): LostStep) -> Loss {
    Loss { kind: ErrorKind::Unavailable, why: why.to_string(), is_lost_step: true }
}
