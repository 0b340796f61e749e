//! Requests in flight on one disk, and the purpose of each.
//!
//! Invariants: each request ends exactly once. A short transfer continues where it stopped and an interrupted one is
//! repeated, a bounded number of times without progress.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_core::tier::{OpId, Operation};
use forebay_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use super::index::{Proof, Spot};
use super::layout::PAGE;
use super::lists::Reader;
use crate::uring::{Done, Engine, Request, Work};

/// Attempts without progress before a transfer counts as failed.
const MAX_IDLE_TRIES: u32 = 16;
/// What failed on a disk is tried again this often.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The purpose of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flight {
    Load {
        op: Operation,
        spot: Spot,
        length_bytes: u64,
        proof: Proof,
    },
    /// The payloads of a run of a batch's items.
    Payloads {
        batch: u64,
        first: usize,
        end: usize,
    },
    Head {
        batch: u64,
    },
    Sync,
    /// One of the two writes of the footer in progress.
    Footer,
    /// The header that begins a segment's new life.
    Erase {
        segment: u32,
    },
    /// A piece of a block that is carried over.
    CarryRead {
        piece: usize,
    },
    CarryWrite {
        piece: usize,
    },
    /// The list of a segment in this life.
    List {
        reader: Reader,
        segment: u32,
        life: u64,
    },
    /// A test transfer on a sick disk.
    Probe,
    /// A step of writing the list of purges.
    Purges,
    /// A look at the superblock, for the signature.
    Look,
    /// Of a part of a segment that holds nothing.
    Trim,
    /// The nth of several reads or writes while opening.
    Opening(usize),
}

impl Flight {
    /// That one page can be read says nothing of the blocks, and a device that does not trim may write. So a look and a
    /// trim count in no lane.
    fn has_lane(&self) -> bool {
        !matches!(self, Flight::Look | Flight::Trim)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub flight: Flight,
    /// The requested checksum.
    pub result: Result<u64, ErrorKind>,
}

struct InFlight {
    flight: Flight,
    work: Work,
    idle_tries: u32,
}

/// The transfers of one direction: a disk may fail in one and serve in the other.
pub(super) struct Lane {
    in_flight: usize,
    has_ended: bool,
    /// When one ended last, or none was in flight.
    last_progress: Duration,
    /// Transfers that failed since the last success.
    pub failures_in_a_row: u32,
    pub last_failure: ErrorKind,
}

impl Lane {
    const NEW: Lane = Lane {
        in_flight: 0,
        has_ended: false,
        last_progress: Duration::ZERO,
        failures_in_a_row: 0,
        last_failure: ErrorKind::Io,
    };

    /// Whether nothing was answered for so long.
    pub fn is_silent_for(&self, limit: Duration, now: Duration) -> bool {
        self.in_flight > 0 && now.saturating_sub(self.last_progress) >= limit
    }

    fn ended(&mut self, result: Result<u64, ErrorKind>) {
        self.in_flight -= 1;
        self.has_ended = true;
        match result {
            Ok(_) => self.failures_in_a_row = 0,
            Err(kind) => {
                self.failures_in_a_row += 1;
                self.last_failure = kind;
            }
        }
    }

    fn note_progress(&mut self, now: Duration) {
        if std::mem::take(&mut self.has_ended) || self.in_flight == 0 {
            self.last_progress = now;
        }
    }
}

/// Work of [`Io::run_all`] under way.
pub(super) struct Begun {
    work: Vec<Work>,
    started: usize,
    depth: usize,
    results: Vec<Result<u64, ErrorKind>>,
}

/// See the module documentation.
pub(super) struct Io {
    pub engine: Box<dyn Engine>,
    flights: HashMap<u64, InFlight>,
    outgoing: VecDeque<Request>,
    next_tag: u64,
    done: Vec<Done>,
    pub reads: Lane,
    /// Writes and flushes.
    pub writes: Lane,
}

impl Io {
    pub fn new(engine: Box<dyn Engine>) -> Io {
        Io {
            engine,
            flights: HashMap::new(),
            outgoing: VecDeque::new(),
            next_tag: 0,
            done: Vec::new(),
            reads: Lane::NEW,
            writes: Lane::NEW,
        }
    }

    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Whether a load with this id is in flight. A pass over all of them, for those that are late.
    pub fn is_loading(&self, id: OpId) -> bool {
        self.flights.values().any(|flying| matches!(flying.flight, Flight::Load { op, .. } if op.id == id))
    }

    pub fn start(&mut self, flight: Flight, work: Work) {
        if flight.has_lane() {
            self.lane(&work).in_flight += 1;
        }
        self.send(InFlight { flight, work, idle_tries: 0 });
    }

    /// Passes all started requests to the engine at once.
    pub fn submit(&mut self) {
        if !self.outgoing.is_empty() {
            self.engine.submit(&mut self.outgoing);
        }
    }

    /// Appends the requests that ended by now.
    pub fn poll(&mut self, now: Duration, finished: &mut Vec<Finished>) {
        let mut done = std::mem::take(&mut self.done);
        self.engine.poll(&mut done);
        for Done { tag, result, checksum } in done.drain(..) {
            let in_flight = self.flights.remove(&tag).expect("an engine ends each request once");
            finished.extend(self.ended(in_flight, result, checksum));
        }
        self.done = done;
        self.reads.note_progress(now);
        self.writes.note_progress(now);
        self.submit();
    }

    /// Does all of `work`, at most `depth` at once, and returns the results in the same order. An error if nothing was
    /// answered for `patience`.
    pub fn run_all(&mut self, work: &[Work], depth: usize, patience: Duration) -> Result<Vec<Result<u64, ErrorKind>>> {
        let begun = self.begin_all(work, depth);
        self.end_all(begun, patience)
    }

    /// The first half of [`Io::run_all`]: nothing else may be started before [`Io::end_all`].
    pub fn begin_all(&mut self, work: &[Work], depth: usize) -> Begun {
        debug_assert!(self.in_flight() == 0, "what ends is counted as one of these");
        let mut begun =
            Begun { results: vec![Err(ErrorKind::Timeout); work.len()], work: work.to_vec(), started: 0, depth };
        self.go_on(&mut begun);
        begun
    }

    /// The second half.
    pub fn end_all(&mut self, mut begun: Begun, patience: Duration) -> Result<Vec<Result<u64, ErrorKind>>> {
        let (mut answered_at, mut finished) = (Instant::now(), Vec::new());
        while self.in_flight() > 0 {
            self.engine.wait(Duration::from_millis(100));
            self.poll(Duration::ZERO, &mut finished);
            if !finished.is_empty() {
                answered_at = Instant::now();
            }
            for Finished { flight, result } in finished.drain(..) {
                let Flight::Opening(index) = flight else { unreachable!("nothing else flies while opening") };
                begun.results[index] = result;
            }
            if answered_at.elapsed() > patience {
                return Err(Error::new(ErrorKind::Timeout, "a disk did not answer while it was opened")
                    .with("transfers_waiting", self.in_flight()));
            }
            self.go_on(&mut begun);
        }
        Ok(begun.results)
    }

    fn go_on(&mut self, begun: &mut Begun) {
        while begun.started < begun.work.len() && self.in_flight() < begun.depth {
            self.start(Flight::Opening(begun.started), begun.work[begun.started].clone());
            begun.started += 1;
        }
        self.submit();
    }

    fn send(&mut self, in_flight: InFlight) {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.outgoing.push_back(Request { tag, work: in_flight.work.clone() });
        self.flights.insert(tag, in_flight);
    }

    fn ended(&mut self, in_flight: InFlight, result: Result<u32, Errno>, checksum: u64) -> Option<Finished> {
        let InFlight { flight, work, idle_tries } = in_flight;
        let idle_tries = idle_tries + 1;
        let result = match result {
            Ok(bytes) => match rest(&work, bytes) {
                None => Ok(checksum),
                Some(_) if bytes == 0 => Err(ErrorKind::Io),
                Some(rest) => {
                    let idle_tries = if rest == work { idle_tries } else { 0 };
                    return self.again(InFlight { flight, work: rest, idle_tries });
                }
            },
            Err(Errno::INTR | Errno::AGAIN) => return self.again(InFlight { flight, work, idle_tries }),
            Err(Errno::NOSPC | Errno::DQUOT) => Err(ErrorKind::Full),
            Err(Errno::OPNOTSUPP) if matches!(work, Work::Trim { .. }) => Err(ErrorKind::Unsupported),
            Err(_) => Err(ErrorKind::Io),
        };
        Some(self.counted(Finished { flight, result }, &work))
    }

    fn again(&mut self, in_flight: InFlight) -> Option<Finished> {
        if in_flight.idle_tries < MAX_IDLE_TRIES {
            self.send(in_flight);
            return None;
        }
        Some(self.counted(Finished { flight: in_flight.flight, result: Err(ErrorKind::Io) }, &in_flight.work))
    }

    fn counted(&mut self, finished: Finished, work: &Work) -> Finished {
        if finished.flight.has_lane() {
            self.lane(work).ended(finished.result);
        }
        finished
    }

    fn lane(&mut self, work: &Work) -> &mut Lane {
        match work {
            Work::Read { .. } => &mut self.reads,
            Work::Write { .. } | Work::Sync | Work::Trim { .. } => &mut self.writes,
        }
    }
}

/// The part of `work` after its first `bytes`, in whole pages as direct I/O requires.
fn rest(work: &Work, bytes: u32) -> Option<Work> {
    let moved = bytes - bytes % PAGE as u32;
    match work {
        Work::Read { at, span, checksum } if bytes < span.len => {
            Some(Work::Read { at: at + u64::from(moved), span: span.after(moved), checksum: *checksum })
        }
        Work::Write { at, spans } if u64::from(bytes) < spans.len_bytes() => {
            let moved = u64::from(moved);
            Some(Work::Write { at: at + moved, spans: spans.after(moved) })
        }
        _ => None,
    }
}
