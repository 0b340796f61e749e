//! Who owns memory when an operation has ended, whatever ended it: deadline, give up, deregister, disconnect of either
//! side, drop of the fabric, death of the peer; for reads and writes, over each transport, with a peer that runs or is
//! stopped, in a real process.
//!
//! The model: each byte of a read's memory is as before or the peer's, and all are the peer's after success. Each byte
//! of a write's target is as before or the source's *at the time of the end*. From the end on the memory is somebody
//! else's, who fills it: nothing of that is overwritten, and nothing of it is sent.
//!
//! `FOREBAY_FABRIC_SEED=... FOREBAY_FABRIC_SEEDS=1` repeats one seed.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{ErrorKind, Result};
use forebay_fabric::{Event, Memory, OpId, Operation, PeerId, RegionId, RemoteId, Rights, Segment, Verb};
use rustix::process::Signal;
use support::other::{BYTES, Other, SEED, meet, wait};
use support::{PATIENCE, Side, Transport, bytes_of, end_of, options_of, pattern, segment};

/// In CI.
const SEEDS: u64 = 2;
/// What local memory holds before a read, and what its next owner fills it with.
const BEFORE: u8 = 0xEE;
const NEXT_OWNER: u8 = 0xAA;
/// Reads at once of all the peer's memory, for pieces on each connection.
const ROUNDS: u64 = 4;

/// How bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tcp,
    Encrypted,
    Ucx,
    /// Through the Unix socket.
    ShmSocket,
    /// By a copy of this process.
    ShmMapped,
}

impl Way {
    fn transport(self) -> Transport {
        match self {
            Way::Tcp => Transport::Tcp,
            Way::Encrypted => Transport::Encrypted,
            Way::Ucx => Transport::Ucx,
            Way::ShmSocket | Way::ShmMapped => Transport::Shm,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Deadline,
    GiveUp,
    Deregister,
    Disconnect,
    Drop,
    PeerDisconnects,
    PeerIsKilled,
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

struct Case {
    way: Way,
    random: Random,
    other: Other,
    side: Side,
    peer: PeerId,
    remote: RemoteId,
    verb: Verb,
    memory: Arc<Memory>,
    region: RegionId,
    segments: Vec<Segment>,
    /// What a write writes.
    source: Vec<u8>,
    _home: tempfile::TempDir,
}

impl Case {
    fn new(way: Way, verb: Verb, seed: u64) -> Case {
        let mut random = Random(seed);
        let transport = way.transport();
        let (address, home) = support::address(transport);
        let other = Other::start(transport, &address);
        let mut side = Side::new(options_of(transport));
        let (peer, _, [part, whole]) = meet(&mut side, &other.address);
        let remote = if way == Way::ShmMapped { whole } else { part };
        let end = Instant::now() + PATIENCE;
        while way == Way::ShmMapped && !side.fabric.is_mapped(remote) {
            assert!(Instant::now() < end, "the memory is never mapped");
            side.poll(Duration::from_millis(1));
        }
        let (memory, region) = side.memory(BYTES, Rights::NONE);
        let source = pattern(seed, BYTES);
        match verb {
            Verb::Read => memory.write(0, &vec![BEFORE; BYTES as usize]),
            Verb::Write => memory.write(0, &source),
        }
        let count = 1 + random.below(20);
        let most = BYTES / count;
        let place = |at: u64| {
            let bytes = most - random.below(most / 4);
            let offset = at * most + random.below(most - bytes + 1);
            segment(region, offset, remote, offset, bytes)
        };
        let segments = (0..count).map(place).collect();
        Case { way, random, other, side, peer, remote, verb, memory, region, segments, source, _home: home }
    }

    fn submit(&mut self, deadline: Option<Instant>) -> OpId {
        let (peer, verb, segments) = (self.peer, self.verb, self.segments.clone());
        self.side.fabric.submit(Operation { peer, verb, segments, deadline, notice: None }).unwrap()
    }

    /// Lets the operation run for a while, or not at all, and stops the peer or not.
    fn run_a_while(&mut self) {
        for _ in 0..self.random.below(4) {
            self.side.poll(Duration::ZERO);
        }
        if self.random.below(2) == 0 {
            self.other.freeze();
        }
        for _ in 0..self.random.below(2) {
            self.side.poll(Duration::ZERO);
        }
    }

    /// The end, which is there without a word from the peer. UCX may take a moment to let go of the memory.
    fn ended_now(&mut self, op: OpId) -> Result<()> {
        if self.way == Way::Ucx {
            return wait(&mut self.side, op);
        }
        end_of(&mut self.side, op).unwrap_or_else(|| {
            self.side.poll(Duration::ZERO);
            end_of(&mut self.side, op).expect("an operation that ended did not say so")
        })
    }

    /// Ends the operation so. Its result, if somebody is told.
    fn end(&mut self, ending: Ending) -> Option<Result<()>> {
        let soon = Duration::from_millis(self.random.below(30));
        let op = self.submit((ending == Ending::Deadline).then(|| Instant::now() + soon));
        self.run_a_while();
        let expected = match ending {
            Ending::Deadline | Ending::GiveUp => ErrorKind::Timeout,
            Ending::Deregister => ErrorKind::Invalid,
            _ => ErrorKind::Unavailable,
        };
        let result = match ending {
            Ending::Deadline => wait(&mut self.side, op),
            Ending::GiveUp => {
                self.side.fabric.give_up(op);
                self.ended_now(op)
            }
            Ending::Deregister => {
                self.side.fabric.deregister(self.region).unwrap();
                self.ended_now(op)
            }
            Ending::Disconnect => {
                self.side.fabric.disconnect(self.peer);
                self.ended_now(op)
            }
            Ending::Drop => {
                self.side = Side::new(options_of(self.way.transport()));
                return None;
            }
            Ending::PeerDisconnects => {
                self.other.signal(Signal::CONT);
                self.side.fabric.send(self.peer, b"disconnect".to_vec()).unwrap();
                wait(&mut self.side, op)
            }
            Ending::PeerIsKilled => {
                self.other.kill();
                wait(&mut self.side, op)
            }
        };
        if let Err(error) = &result {
            assert_eq!(error.kind(), expected, "{error}");
        }
        Some(result)
    }

    /// Each byte is `old`, or `new` where a segment is; all of them there, if it must be.
    fn check(&self, found: &[u8], old: &[u8], new: &[u8], is_whole: bool) {
        let mut at = 0;
        for segment in &self.segments {
            let (start, end) = (segment.local_offset as usize, (segment.local_offset + segment.bytes) as usize);
            assert!(found[at..start] == old[at..start], "a byte before {start} changed, outside of all segments");
            let is_right = |at: usize| found[at] == new[at] || (!is_whole && found[at] == old[at]);
            let wrong = (start..end).find(|at| !is_right(*at));
            assert_eq!(wrong, None, "a byte that nobody wrote there, of a segment at {start}");
            at = end;
        }
        assert!(found[at..] == old[at..], "a byte behind all segments changed");
    }

    fn run(mut self, ending: Ending) {
        let result = self.end(ending);
        let is_whole = matches!(result, Some(Ok(())));
        let theirs = pattern(SEED, BYTES);
        if self.verb == Verb::Read {
            let found = bytes_of(&self.memory, 0, BYTES);
            self.check(&found, &vec![BEFORE; BYTES as usize], &theirs, is_whole);
        }
        self.memory.write(0, &vec![NEXT_OWNER; BYTES as usize]);
        if ending != Ending::PeerIsKilled {
            self.other.signal(Signal::CONT);
            self.look_at_the_peer(ending, &theirs, is_whole);
        }
        let found = bytes_of(&self.memory, 0, BYTES);
        assert!(found.iter().all(|byte| *byte == NEXT_OWNER), "memory was written after its operation had ended");
        assert!(!self.side.events.iter().any(|event| matches!(event, Event::Done { .. })), "an operation ended twice");
    }

    /// Reads the peer's memory, over all connections of the session if it stands: late answers come before these.
    fn look_at_the_peer(&mut self, ending: Ending, before: &[u8], is_whole: bool) {
        let is_early = matches!(ending, Ending::Deadline | Ending::GiveUp | Ending::Deregister);
        // Over UCX, the session has ended with an operation that ended early.
        let is_gone = self.side.events.iter().any(|event| matches!(event, Event::Gone { .. }));
        if !is_early || is_gone {
            let (peer, _, remotes) = meet(&mut self.side, &self.other.address);
            (self.peer, self.remote) = (peer, remotes[usize::from(self.way == Way::ShmMapped)]);
        }
        let (memory, region) = self.side.memory(ROUNDS * BYTES, Rights::NONE);
        let mut ops = Vec::new();
        for round in 0..ROUNDS {
            let segments = vec![segment(region, round * BYTES, self.remote, 0, BYTES)];
            let operation = Operation { peer: self.peer, verb: Verb::Read, segments, deadline: None, notice: None };
            ops.push(self.side.fabric.submit(operation).unwrap());
        }
        for op in ops {
            wait(&mut self.side, op).unwrap();
        }
        let after = if self.verb == Verb::Read { before } else { &self.source };
        for round in 0..ROUNDS {
            self.check(&bytes_of(&memory, round * BYTES, BYTES), before, after, is_whole);
        }
    }
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn whatever_ends_it(ending: Ending) {
    let first = from_environment("FOREBAY_FABRIC_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20);
    for seed in first..first + from_environment("FOREBAY_FABRIC_SEEDS").unwrap_or(SEEDS) {
        let ucx = support::ucx_library().map(|_| Way::Ucx);
        for way in [Way::Tcp, Way::Encrypted, Way::ShmSocket, Way::ShmMapped].into_iter().chain(ucx) {
            for verb in [Verb::Read, Verb::Write] {
                println!("{ending:?} of a {verb:?}, {way:?}: FOREBAY_FABRIC_SEED={seed} FOREBAY_FABRIC_SEEDS=1");
                Case::new(way, verb, seed).run(ending);
            }
        }
    }
}

#[test]
fn an_operation_that_is_late_has_given_its_memory_back() {
    whatever_ends_it(Ending::Deadline);
}

#[test]
fn an_operation_that_is_given_up_has_given_its_memory_back() {
    whatever_ends_it(Ending::GiveUp);
}

#[test]
fn an_operation_on_memory_that_is_deregistered_has_given_it_back() {
    whatever_ends_it(Ending::Deregister);
}

#[test]
fn an_operation_of_a_session_that_this_side_ends_has_given_its_memory_back() {
    whatever_ends_it(Ending::Disconnect);
}

#[test]
fn an_operation_of_a_fabric_that_is_dropped_has_given_its_memory_back() {
    whatever_ends_it(Ending::Drop);
}

#[test]
fn an_operation_of_a_session_that_the_peer_ends_has_given_its_memory_back() {
    whatever_ends_it(Ending::PeerDisconnects);
}

#[test]
fn an_operation_whose_peer_is_killed_has_given_its_memory_back() {
    whatever_ends_it(Ending::PeerIsKilled);
}
