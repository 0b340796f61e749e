//! One operation on its way through a connection: the commands it is made of, and what its replies mean.
//!
//! A store is one `SET` for each part, the first part last, so that a block is found only when all of it was
//! written; a load is one `GET` for each part, the first one first; a lookup is one `EXISTS`, whose reply is four bytes
//! (whether a value is what its name says is told by the load, before which it may be evicted anyway); a removal is
//! one `UNLINK`.
//!
//! Invariant: whatever the replies are, a flight takes exactly as many of them as it has commands, so that the
//! connection stays in step; the first that fails decides the outcome.

use std::time::Instant;

use forebay_core::ErrorKind;
use forebay_core::tier::{Location, OpKind, Operation, Outcome};

use super::address::Address;
use super::config::Settings;
use super::name;
use super::outgoing::Outgoing;
use super::resp;
use crate::header::{HEADER_BYTES, Header};

/// An operation that was taken, and how often a cluster has sent it elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub op: Operation,
    pub redirects: u8,
    /// The next node must be told that it was asked to.
    pub is_asking: bool,
}

impl Job {
    /// Whether it waits with those that nobody waits for.
    pub fn is_store(&self) -> bool {
        matches!(self.op.kind, OpKind::Store | OpKind::Remove { .. })
    }
}

/// How a flight ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Done(Outcome),
    /// Another node has it: for good, or for this time.
    Moved {
        slot: u16,
        to: Address,
    },
    Ask {
        to: Address,
    },
}

/// See the module's head.
pub(super) struct Flight {
    pub job: Job,
    pub due: Instant,
    /// Its completion was given already: its replies mean nothing any more, and its slot is not ours.
    pub is_abandoned: bool,
    /// What was decided before the last reply.
    pub verdict: Option<Verdict>,
    /// Of the first part of a load.
    pub header: Option<Header>,
    replies: u32,
    commands: u32,
}

impl Flight {
    /// Writes the commands of `job`. `scratch` is for names.
    pub fn launch(job: Job, due: Instant, settings: &Settings, out: &mut Outgoing, scratch: &mut Vec<u8>) -> Flight {
        let count = parts(&job.op, settings);
        let config = &settings.config;
        let ask = |out: &mut Outgoing| {
            if job.is_asking {
                out.push(|bytes| resp::command(bytes, &[b"ASKING"]));
            }
        };
        let commands = match job.op.kind {
            OpKind::Load { .. } => {
                for part in 0..count {
                    ask(out);
                    name::write(scratch, &config.key_prefix, &job.op.key, part);
                    out.push(|bytes| resp::command(bytes, &[b"GET", scratch]));
                }
                count
            }
            OpKind::Store => {
                for part in (0..count).rev() {
                    ask(out);
                    name::write(scratch, &config.key_prefix, &job.op.key, part);
                    set(&job.op, part, settings, out, scratch);
                }
                count
            }
            OpKind::Find | OpKind::Remove { .. } => {
                let verb: &[u8] = if job.op.kind == OpKind::Find { b"EXISTS" } else { b"UNLINK" };
                ask(out);
                out.push(|bytes| {
                    resp::begin(bytes, 1 + count as usize);
                    resp::bulk(bytes, verb);
                });
                for part in 0..count {
                    name::write(scratch, &config.key_prefix, &job.op.key, part);
                    out.push(|bytes| resp::bulk(bytes, scratch));
                }
                1
            }
        };
        let commands = if job.is_asking { commands * 2 } else { commands };
        Flight { job, due, is_abandoned: false, verdict: None, header: None, replies: 0, commands }
    }

    /// Bytes that the operation moves.
    pub fn bytes(op: &Operation) -> u64 {
        if op.slot.is_some() { op.length_bytes } else { 0 }
    }

    pub fn is_load(&self) -> bool {
        matches!(self.job.op.kind, OpKind::Load { .. })
    }

    /// Whether the next reply is to an `ASKING`.
    pub fn awaits_asking(&self) -> bool {
        self.job.is_asking && self.replies.is_multiple_of(2)
    }

    /// Which part of the block the next reply brings.
    pub fn part(&self) -> u32 {
        if self.job.is_asking { self.replies / 2 } else { self.replies }
    }

    /// Where in the block the next reply's bytes belong, and how many they are.
    pub fn span(&self, settings: &Settings) -> (u64, u64) {
        name::span(self.part(), self.job.op.length_bytes, settings.config.value_bytes)
    }

    /// Decides, unless that was done.
    pub fn decide(&mut self, verdict: Verdict) {
        self.verdict.get_or_insert(verdict);
    }

    pub fn fail(&mut self, kind: ErrorKind) {
        self.decide(Verdict::Done(Outcome::Failed(kind)));
    }

    /// Whether no more than one reply is missing.
    pub fn awaits_last(&self) -> bool {
        self.replies + 1 == self.commands
    }

    /// Counts a reply; true if it was the last.
    pub fn has_all(&mut self) -> bool {
        self.replies += 1;
        self.replies == self.commands
    }

    /// What a `:number` means.
    pub fn counted(&mut self, number: i64, settings: &Settings) {
        let is_all = number >= i64::from(parts(&self.job.op, settings));
        self.decide(Verdict::Done(match self.job.op.kind {
            OpKind::Find if is_all => Outcome::Found(Location::default()),
            OpKind::Remove { .. } if number > 0 => Outcome::Removed,
            _ => Outcome::Absent,
        }));
    }

    /// What an error says. The connection is in step: the error is the whole reply.
    pub fn refused(&mut self, text: &[u8], from: &Address) {
        let text = String::from_utf8_lossy(text);
        let mut words = text.split(' ');
        let (code, slot, place) = (words.next().unwrap_or(""), words.next(), words.next());
        let to = place.and_then(|place| Address::told(place, from));
        let slot = slot.and_then(|slot| slot.parse().ok()).filter(|slot| *slot < name::SLOTS);
        match (code, slot, to) {
            ("MOVED", Some(slot), Some(to)) => self.decide(Verdict::Moved { slot, to }),
            ("ASK", _, Some(to)) => self.decide(Verdict::Ask { to }),
            _ => self.fail(kind_of(code)),
        }
    }
}

/// How many values an operation names. Of a block whose length is not told, only the first part is asked for, which
/// was written last.
fn parts(op: &Operation, settings: &Settings) -> u32 {
    name::parts(op.length_bytes, settings.config.value_bytes)
}

fn set(op: &Operation, part: u32, settings: &Settings, out: &mut Outgoing, name: &[u8]) {
    let (slot, _) = op.slot.expect("a store has a slot");
    let (at, len) = name::span(part, op.length_bytes, settings.config.value_bytes);
    let header = Header { key: op.key, length_bytes: op.length_bytes, checksum: op.checksum };
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

/// What the first word of an error means for the operation.
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
