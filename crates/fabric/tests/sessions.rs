//! Random sessions with random faults, each a function of its seed: `FOREBAY_FABRIC_SEED=... FOREBAY_FABRIC_SESSIONS=1`
//! repeats one. After each: every operation has ended once, what was read is right, and memory that was given back
//! stayed as it was.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric::{Event, Memory, OpId, Operation, PeerId, RegionId, RemoteId, Rights, Segment, Verb};
use support::{PATIENCE, Pair, bytes_of, pattern, transports};

/// In CI; `FOREBAY_FABRIC_SESSIONS` sets another number.
const SESSIONS: u64 = 60;
/// Of each memory here and there.
const BYTES: u64 = 3 << 19;
const SLOTS: u64 = 6;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }
}

/// A place of ours with at most one operation.
struct Slot {
    memory: Arc<Memory>,
    region: Option<RegionId>,
}

struct UnderWay {
    slot: usize,
    verb: Verb,
    segments: Vec<Segment>,
    /// Which of the peer's memories, which says the bytes.
    remote: usize,
}

struct Session {
    random: Random,
    pair: Pair,
    slots: Vec<Slot>,
    /// The peer's memories: the first two are only read, the third only written.
    theirs: Vec<(Arc<Memory>, Option<RegionId>, RemoteId)>,
    under_way: HashMap<OpId, UnderWay>,
    ended: HashMap<OpId, usize>,
    begun: usize,
    is_gone: bool,
}

impl Session {
    fn new(seed: u64) -> Session {
        let mut random = Random(seed);
        let transports = transports();
        let mut pair = Pair::new(transports[random.below(transports.len() as u64) as usize]);
        let mut theirs = Vec::new();
        for (at, rights) in [Rights::READ, Rights::READ, Rights::READ_AND_WRITE].into_iter().enumerate() {
            // The second cannot be mapped, so its bytes go through the socket.
            let whole = Arc::new(Memory::allocate(BYTES + 4096).unwrap());
            let bytes = if at == 1 { BYTES } else { BYTES + 4096 };
            let region = pair.b.fabric.register(&whole, 0, bytes, rights).unwrap();
            whole.write(0, &pattern(at as u64, BYTES));
            let descriptor = pair.b.fabric.export(region).unwrap();
            let remote = pair.a.fabric.import(pair.to_b, &descriptor).unwrap();
            theirs.push((whole, Some(region), remote));
        }
        let slot = |_| {
            let memory = Arc::new(Memory::allocate(BYTES).unwrap());
            let region = pair.a.fabric.register(&memory, 0, BYTES, Rights::NONE).unwrap();
            Slot { memory, region: Some(region) }
        };
        let slots = (0..SLOTS).map(slot).collect();
        let (under_way, ended) = (HashMap::new(), HashMap::new());
        Session { random, pair, slots, theirs, under_way, ended, begun: 0, is_gone: false }
    }

    fn peer(&self) -> PeerId {
        self.pair.to_b
    }

    fn begin(&mut self) {
        let free = |slot: &usize| !self.under_way.values().any(|op| op.slot == *slot);
        let Some(slot) = (0..self.slots.len()).find(free) else { return };
        let Some(region) = self.slots[slot].region else { return };
        let remote = self.random.below(3) as usize;
        let verb = if remote == 2 { Verb::Write } else { Verb::Read };
        let count = 1 + self.random.below(40);
        let most = BYTES / count;
        let segments: Vec<Segment> = (0..count)
            .map(|at| {
                let bytes = 1 + self.random.below(most);
                let offset = at * most + self.random.below(most - bytes + 1);
                let remote = self.theirs[remote].2;
                Segment { local: region, local_offset: offset, remote, remote_offset: offset, bytes }
            })
            .collect();
        // A write writes what is there already, whole or in part: the same at each offset.
        let content = if verb == Verb::Write { pattern(2, BYTES) } else { vec![0xEE; BYTES as usize] };
        self.slots[slot].memory.write(0, &content);
        let soon = Instant::now() + Duration::from_millis(self.random.below(20));
        let deadline = (self.random.below(4) == 0).then_some(soon);
        let operation = Operation { peer: self.peer(), verb, segments: segments.clone(), deadline, notice: None };
        if let Ok(op) = self.pair.a.fabric.submit(operation) {
            self.begun += 1;
            self.under_way.insert(op, UnderWay { slot, verb, segments, remote });
        } else {
            self.slots[slot].memory.write(0, &vec![0xAA; BYTES as usize]);
        }
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..30 => self.begin(),
            30..60 => self.pair.a.poll(Duration::ZERO),
            60..90 => self.pair.b.poll(Duration::ZERO),
            90..94 => {
                let op = self.under_way.keys().copied().min();
                op.into_iter().for_each(|op| self.pair.a.fabric.give_up(op));
            }
            94..96 => {
                let slot = self.random.below(SLOTS) as usize;
                if let Some(region) = self.slots[slot].region.take() {
                    self.pair.a.fabric.deregister(region).unwrap();
                }
            }
            96 => {
                let at = self.random.below(3) as usize;
                if let Some(region) = self.theirs[at].1.take() {
                    self.pair.b.fabric.deregister(region).unwrap();
                }
            }
            97 => drop(self.pair.a.fabric.send(self.peer(), vec![7; self.random.below(60_000) as usize])),
            98 if self.random.below(4) == 0 => self.pair.b.fabric.disconnect(self.pair.to_a),
            _ => {}
        }
        self.look();
    }

    /// Takes what has come, and compares.
    fn look(&mut self) {
        for event in std::mem::take(&mut self.pair.a.events) {
            match event {
                Event::Done { op, result } => {
                    assert!(!self.is_gone, "an operation ended after its peer");
                    *self.ended.entry(op).or_default() += 1;
                    let ended = self.under_way.remove(&op).expect("an operation ended twice");
                    let slot = &self.slots[ended.slot];
                    if result.is_ok() && ended.verb == Verb::Read {
                        let expected = pattern(ended.remote as u64, BYTES);
                        for segment in &ended.segments {
                            let (start, end) = (segment.local_offset, segment.local_offset + segment.bytes);
                            let found = bytes_of(&slot.memory, start, segment.bytes);
                            assert!(found == expected[start as usize..end as usize], "wrong bytes");
                        }
                    }
                    // From now on it is somebody else's.
                    slot.memory.write(0, &vec![0xAA; BYTES as usize]);
                }
                Event::Gone { .. } => self.is_gone = true,
                _ => {}
            }
        }
        for event in std::mem::take(&mut self.pair.b.events) {
            if let Event::Message { peer, .. } = event {
                self.pair.b.fabric.taken(peer);
            }
        }
    }

    fn end(mut self) {
        let until = Instant::now() + PATIENCE;
        while !self.under_way.is_empty() {
            assert!(Instant::now() < until, "{} operations did not end", self.under_way.len());
            self.pair.a.poll(Duration::from_millis(1));
            self.pair.b.poll(Duration::from_millis(1));
            self.look();
        }
        for _ in 0..20 {
            self.pair.a.poll(Duration::ZERO);
            self.pair.b.poll(Duration::ZERO);
            self.look();
        }
        assert_eq!(self.ended.len(), self.begun);
        assert!(self.ended.values().all(|count| *count == 1));
        for slot in &self.slots {
            let found = bytes_of(&slot.memory, 0, BYTES);
            let is_unused = found.iter().all(|byte| *byte == 0);
            assert!(is_unused || found.iter().all(|byte| *byte == 0xAA), "memory was written after its operation");
        }
        for (at, (memory, ..)) in self.theirs.iter().enumerate() {
            assert!(bytes_of(memory, 0, BYTES) == pattern(at as u64, BYTES), "the peer's memory {at} is wrong");
            assert!(bytes_of(memory, BYTES, 4096).iter().all(|byte| *byte == 0), "written outside");
        }
    }
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn random_sessions_with_faults_have_no_wrong_byte_and_end_each_operation_once() {
    let first = from_environment("FOREBAY_FABRIC_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20);
    let sessions = from_environment("FOREBAY_FABRIC_SESSIONS").unwrap_or(SESSIONS);
    for seed in first..first + sessions {
        println!("repeat this one with FOREBAY_FABRIC_SEED={seed} FOREBAY_FABRIC_SESSIONS=1");
        let mut session = Session::new(seed);
        for _ in 0..200 {
            session.step();
        }
        session.end();
    }
}
