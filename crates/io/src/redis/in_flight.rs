//! One operation in flight on a connection: its commands, and the meaning of their replies.
//!
//! A store is one `SET` per part, the first part last, so that a block is found only after all of it was written. A
//! load is one `GET` per part, the first one first. A lookup is one `EXISTS`, whose reply is four bytes; the load
//! checks whether the value matches its name, because the value may be evicted before the load anyway. A removal is
//! one `UNLINK`. A touch is one `TOUCH`, or where values end by time one `EXPIRE` per part.
//!
//! Invariant: whatever the replies are, an operation takes exactly one reply for each of its commands, so that the
//! connection stays in step. The first failure decides the outcome. Commands that were not sent by then are never
//! sent.

use std::time::Instant;

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Operation, Outcome};

use super::address::Address;
use super::config::Settings;
use super::name;
use super::resp;
use super::send_buffer::SendBuffer;
use crate::header::{BlockSum, HEADER_BYTES, Header, Sealing};
use crate::uring::Region;

/// An accepted operation, and how often a cluster has redirected it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub op: Operation,
    /// The node that it was given to last.
    pub node: u16,
    pub redirects: u8,
    /// The next node needs an `ASKING` first.
    pub is_asking: bool,
}

/// What kind of command an operation is: a server may refuse one and answer another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Verb {
    Probe,
    Load,
    Write,
    Touch,
}

impl Verb {
    pub const COUNT: usize = 4;

    /// Such operations.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Probe => "probes",
            Verb::Load => "loads",
            Verb::Write => "writes",
            Verb::Touch => "touches",
        }
    }
}

impl Job {
    pub fn verb(&self) -> Verb {
        match self.op.kind {
            OpKind::Exists => Verb::Probe,
            OpKind::Load => Verb::Load,
            OpKind::Store | OpKind::Remove => Verb::Write,
            OpKind::Touch { .. } => Verb::Touch,
        }
    }

    /// Whether nobody waits for it: a store, a removal or a touch. A server may let it hang and answer reads.
    pub fn is_change(&self) -> bool {
        !matches!(self.op.kind, OpKind::Load | OpKind::Exists)
    }
}

/// How an operation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Done(Outcome),
    /// It was given to no server.
    InVain,
    /// Another node has it, permanently or for this time.
    Moved {
        slot: u16,
        to: Address,
    },
    Ask {
        to: Address,
    },
}

/// The block that an operation moves.
pub(super) enum Moving {
    Nothing,
    /// To a server, with this header before each part.
    Out(Header),
    /// From a server: the sum of what has come, and the header of the first part.
    In(Box<BlockSum>, Header),
}

/// See the module documentation.
pub(super) struct InFlight {
    pub job: Job,
    pub due: Instant,
    /// The outcome that was decided before the last reply.
    pub verdict: Option<Verdict>,
    pub moving: Moving,
    /// Its completion was already reported: its replies are ignored, and its slot is no longer ours.
    is_abandoned: bool,
    /// Number of its commands: one per part, or one in all.
    commands: u32,
    /// Commands to write; fewer once the outcome is decided.
    wanted: u32,
    /// Commands that were written.
    asked: u32,
    replies: u32,
}

impl InFlight {
    /// No command is written yet. `None` for a store whose bytes were read for their MAC and lost their checksum.
    pub fn new(job: Job, due: Instant, settings: &Settings, pool: &Region) -> Option<InFlight> {
        let is_by_part = job.op.slot.is_some() || is_prolonged(&job.op, settings);
        let commands = if is_by_part { parts(&job.op, settings) } else { 1 };
        let moving = match (job.op.kind, job.op.slot) {
            (OpKind::Store, Some((slot, _))) => {
                let Operation { key, length_bytes, checksum, .. } = &job.op;
                let add = |sum: &mut BlockSum| sum.update_from(pool, slot.offset(), *length_bytes as usize);
                Moving::Out(settings.config.sealing.header(key, *length_bytes, *checksum, add)?)
            }
            _ => Moving::Nothing,
        };
        Some(InFlight {
            job,
            due,
            verdict: None,
            moving,
            is_abandoned: false,
            commands,
            wanted: commands,
            asked: 0,
            replies: 0,
        })
    }

    /// Writes the next command. `scratch` is for names.
    pub fn ask(&mut self, settings: &Settings, out: &mut SendBuffer, scratch: &mut Vec<u8>) {
        debug_assert!(self.has_more(), "all was asked");
        let op = &self.job.op;
        if self.job.is_asking {
            out.push(|bytes| resp::command(bytes, &[b"ASKING"]));
        }
        let part = self.part_of(self.asked);
        settings.config.write_name(scratch, &op.key, part);
        match op.kind {
            OpKind::Load => out.push(|bytes| resp::command(bytes, &[b"GET", scratch])),
            OpKind::Store => {
                let Moving::Out(header) = &self.moving else { unreachable!("a store moves a block out") };
                set(op, header, part, settings, out, scratch);
            }
            OpKind::Exists => every(b"EXISTS", op, settings, out, scratch),
            OpKind::Remove => every(b"UNLINK", op, settings, out, scratch),
            OpKind::Touch { .. } => match settings.config.ttl_seconds {
                None => every(b"TOUCH", op, settings, out, scratch),
                Some(seconds) => out.push(|bytes| {
                    resp::command(bytes, &[b"EXPIRE", scratch, resp::digits(seconds, &mut [0; 20])]);
                }),
            },
        }
        self.asked += 1;
    }

    /// Whether another command remains to be written.
    pub fn has_more(&self) -> bool {
        self.asked < self.wanted
    }

    /// Bytes that the next command moves.
    pub fn next_bytes(&self, settings: &Settings) -> u64 {
        self.bytes_of(self.asked, settings)
    }

    /// Bytes that the first command of an operation moves, at most.
    pub fn first_bytes(op: &Operation, settings: &Settings) -> u64 {
        if op.slot.is_some() { op.length_bytes.min(settings.config.value_bytes) } else { 0 }
    }

    pub fn is_load(&self) -> bool {
        matches!(self.job.op.kind, OpKind::Load)
    }

    /// Whether the next reply is to an `ASKING`.
    pub fn awaits_asking(&self) -> bool {
        self.job.is_asking && self.replies.is_multiple_of(2)
    }

    /// The part of the block that the next reply concerns.
    pub fn part(&self) -> u32 {
        self.part_of(self.answered())
    }

    /// Position and length of the next reply's bytes in the block.
    pub fn span(&self, settings: &Settings) -> (u64, u64) {
        name::span(self.part(), self.job.op.length_bytes, settings.config.value_bytes)
    }

    /// Sets the verdict, unless there is one.
    pub fn decide(&mut self, verdict: Verdict) {
        self.verdict.get_or_insert(verdict);
        self.wanted = self.asked;
    }

    pub fn fail(&mut self, kind: ErrorKind) {
        self.decide(Verdict::Done(Outcome::Failed(kind)));
    }

    pub fn abandon(&mut self) {
        self.is_abandoned = true;
        self.wanted = self.asked;
    }

    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// Whether a command was written and not answered.
    pub fn awaits_reply(&self) -> bool {
        self.answered() < self.asked
    }

    /// Whether at most one reply to the written commands is missing.
    pub fn awaits_last(&self) -> bool {
        self.replies + 1 == self.asked * self.replies_each()
    }

    /// Whether the part with this header, which is the block's, may follow what has come: parts of two versions of a
    /// block do not make a block.
    pub fn arrives(&mut self, header: Header, sealing: &Sealing) -> bool {
        if let Moving::Nothing = self.moving {
            self.moving = Moving::In(Box::new(sealing.sum(&header.key, header.length_bytes)), header);
        }
        matches!(self.moving, Moving::In(_, first) if first == header)
    }

    /// The next bytes of the block have come, and lie in its slot.
    pub fn received(&mut self, pool: &Region, place: u64, len: usize) {
        if let Moving::In(sum, _) = &mut self.moving {
            sum.update_from(pool, place, len);
        }
    }

    /// Counts a reply; returns how many bytes its command moved, if this was the command's last reply.
    pub fn answer(&mut self, settings: &Settings) -> u64 {
        let answered = self.answered();
        self.replies += 1;
        if self.answered() > answered { self.bytes_of(answered, settings) } else { 0 }
    }

    /// Whether every reply has come.
    pub fn is_over(&self) -> bool {
        self.answered() == self.wanted
    }

    /// Commands whose replies have come.
    fn answered(&self) -> u32 {
        self.replies / self.replies_each()
    }

    /// An `ASKING` has a reply of its own.
    fn replies_each(&self) -> u32 {
        1 + u32::from(self.job.is_asking)
    }

    /// Bytes that a command moves.
    fn bytes_of(&self, command: u32, settings: &Settings) -> u64 {
        let op = &self.job.op;
        let span = || name::span(self.part_of(command), op.length_bytes, settings.config.value_bytes).1;
        if op.slot.is_some() { span() } else { 0 }
    }

    /// The part that a command concerns. The first part is loaded first and stored last.
    fn part_of(&self, command: u32) -> u32 {
        if self.job.op.kind == OpKind::Store { self.commands - 1 - command } else { command }
    }

    /// Interprets a `:number`.
    pub fn counted(&mut self, number: i64, settings: &Settings) {
        let is_prolonged = is_prolonged(&self.job.op, settings);
        if is_prolonged && number > 0 && self.part() + 1 < self.commands {
            return;
        }
        let wanted = if is_prolonged { 1 } else { parts(&self.job.op, settings) };
        let is_all = number >= i64::from(wanted);
        self.decide(Verdict::Done(match self.job.op.kind {
            OpKind::Exists | OpKind::Touch { .. } if is_all => Outcome::Found,
            OpKind::Remove if number > 0 => Outcome::Removed,
            _ => Outcome::Absent,
        }));
    }

    /// Interprets an error. The connection is in step: the error is the whole reply.
    pub fn refused(&mut self, text: &[u8], from: &Address) {
        let text = String::from_utf8_lossy(text);
        let mut words = text.split(' ');
        let (code, slot, place) = (words.next().unwrap_or(""), words.next(), words.next());
        let to = place.and_then(|place| Address::told(place, from));
        let slot = slot.and_then(|slot| slot.parse().ok()).filter(|slot| *slot < name::SLOTS);
        match (code, slot, to) {
            ("MOVED", Some(slot), Some(to)) => self.decide(Verdict::Moved { slot, to }),
            ("ASK", _, Some(to)) => self.decide(Verdict::Ask { to }),
            // Another attempt would be refused as well, and what the server holds can be read.
            ("MISCONF" | "NOREPLICAS" | "READONLY", ..)
                if matches!(self.job.op.kind, OpKind::Store | OpKind::Touch { .. }) =>
            {
                self.fail(ErrorKind::Full);
            }
            _ => self.fail(kind_of(code)),
        }
    }
}

/// Whether the operation touches values that end by time: each is given its time anew.
fn is_prolonged(op: &Operation, settings: &Settings) -> bool {
    matches!(op.kind, OpKind::Touch { .. }) && settings.config.ttl_seconds.is_some()
}

/// How many values an operation names. If the block's length is unknown, only the first part, which was written last,
/// is requested.
fn parts(op: &Operation, settings: &Settings) -> u32 {
    name::parts(op.length_bytes, settings.config.value_bytes)
}

/// One command that names all values of the block.
fn every(verb: &[u8], op: &Operation, settings: &Settings, out: &mut SendBuffer, name: &mut Vec<u8>) {
    let count = parts(op, settings);
    out.push(|bytes| {
        resp::begin(bytes, 1 + count as usize);
        resp::bulk(bytes, verb);
    });
    for part in 0..count {
        settings.config.write_name(name, &op.key, part);
        out.push(|bytes| resp::bulk(bytes, name));
    }
}

fn set(op: &Operation, header: &Header, part: u32, settings: &Settings, out: &mut SendBuffer, name: &[u8]) {
    let (slot, _) = op.slot.expect("a store has a slot");
    let (at, len) = name::span(part, op.length_bytes, settings.config.value_bytes);
    let ttl = settings.config.ttl_seconds;
    out.push(|bytes| {
        resp::begin(bytes, if ttl.is_some() { 5 } else { 3 });
        resp::bulk(bytes, b"SET");
        resp::bulk(bytes, name);
        resp::bulk_head(bytes, HEADER_BYTES as u64 + len);
        bytes.extend_from_slice(&header.write());
    });
    out.push_pool(slot.offset() + at, len as usize);
    out.push(|bytes| {
        bytes.extend_from_slice(b"\r\n");
        if let Some(seconds) = ttl {
            resp::bulk(bytes, b"EX");
            resp::bulk(bytes, resp::digits(seconds, &mut [0; 20]));
        }
    });
}

/// Maps the first word of an error to the operation's error kind.
pub(super) fn kind_of(code: &str) -> ErrorKind {
    match code {
        "OOM" => ErrorKind::Full,
        "LOADING" | "BUSY" | "CLUSTERDOWN" | "MASTERDOWN" | "TRYAGAIN" | "READONLY" | "NOREPLICAS" | "NOAUTH"
        | "MOVED" | "ASK" => ErrorKind::Unavailable,
        "WRONGTYPE" => ErrorKind::Corrupt,
        "NOPERM" => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}
