//! A hostile peer: one that knows the secret, and says what it likes, and one that does not.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::wire::{ANSWER_BYTES, Answer, Header, Hello, Key, PIECE_BYTES, WINDOW, WireSegment, segments_to_wire};

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &[u8] = b"a secret of the tests";

/// The side under attack, with one region of each kind in the middle of its memory.
struct Victim {
    fabric: Fabric,
    events: Vec<Event>,
    address: std::net::SocketAddr,
    memory: Arc<Memory>,
    readable: RegionId,
    writable: RegionId,
}

/// Of each region, and of what lies before, between and behind them.
const REGION: u64 = 8192;

impl Victim {
    fn new() -> Victim {
        let secret = Some(Secret::new(SECRET).unwrap());
        let mut fabric = Fabric::new(Options { secret, ..Options::default() }).unwrap();
        let listening = fabric.listen(&Address::parse("tcp://127.0.0.1:0").unwrap()).unwrap();
        let Address::Tcp(address) = listening else { panic!("{listening}") };
        let memory = Arc::new(Memory::allocate(5 * REGION).unwrap());
        memory.write(0, &[0x55; 5 * REGION as usize]);
        let readable = fabric.register(&memory, REGION, REGION, Rights::READ).unwrap();
        let write = Rights { read: false, write: true };
        let writable = fabric.register(&memory, 3 * REGION, REGION, write).unwrap();
        Victim { fabric, events: Vec::new(), address, memory, readable, writable }
    }

    fn name(&self, region: RegionId) -> u64 {
        self.fabric.export(region).unwrap().name
    }

    /// Polls until it is so.
    fn until(&mut self, mut is_so: impl FnMut(&mut Victim) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < end, "it never came; there is {:?}", self.events);
            self.fabric.poll(Some(Duration::from_millis(1)), &mut self.events).unwrap();
        }
    }

    /// Why the attacker was thrown out.
    fn until_gone(&mut self) -> String {
        let gone = |event: &Event| match event {
            Event::Gone { reason, .. } => Some(reason.to_string()),
            _ => None,
        };
        self.until(|victim| victim.events.iter().any(|event| gone(event).is_some()));
        assert!(self.fabric.lines.is_empty() && self.fabric.books.peers.is_empty(), "it left something behind");
        self.events.iter().find_map(gone).unwrap()
    }

    /// Nothing was written but where a peer may write.
    fn is_untouched(&self) -> bool {
        let mut bytes = vec![0; 5 * REGION as usize];
        self.memory.read(0, &mut bytes);
        let writable = 3 * REGION as usize..4 * REGION as usize;
        bytes.iter().enumerate().all(|(at, byte)| *byte == 0x55 || writable.contains(&at))
    }
}

/// A peer that knows the secret.
struct Attacker {
    stream: TcpStream,
    send: (Key, u64),
}

impl Attacker {
    fn connect(victim: &mut Victim) -> Attacker {
        let mut stream = TcpStream::connect(victim.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello = Hello { session: [1; 16], epoch: 5, index: 0, connections: 1, nonce: [2; 32] }.to_wire();
        stream.write_all(&hello).unwrap();
        let answer = victim.answer(&stream);
        let secret = Secret::new(SECRET).unwrap();
        secret.check_answer(&hello, answer).unwrap();
        stream.write_all(&secret.proof_of_caller(&hello, answer)).unwrap();
        victim.until(|victim| victim.events.iter().any(|event| matches!(event, Event::Up { .. })));
        victim.events.clear();
        Attacker { stream, send: (secret.keys(&hello, answer).0, 0) }
    }

    fn say(&mut self, kind: Kind, count: u16, op: u64, body: &[u8], payload: &[u8]) {
        let header = Header { kind, count, body: body.len() as u32, payload: payload.len() as u32, op };
        self.say_header(header, body, payload);
    }

    fn say_header(&mut self, header: Header, body: &[u8], payload: &[u8]) {
        let sealed = header.sealed(&self.send.0, self.send.1, body);
        self.send.1 += 1;
        // The victim may have thrown us out by now.
        let _ = self.stream.write_all(&[&sealed, body, payload].concat());
    }

    fn ask(&mut self, kind: Kind, op: u64, segments: &[WireSegment], payload: &[u8]) {
        self.say(kind, segments.len() as u16, op, &segments_to_wire(segments), payload);
    }

    /// The next frame that comes back, and its payload.
    fn hear(&mut self, victim: &mut Victim) -> (Header, Vec<u8>) {
        let bytes = victim.bytes(&self.stream, crate::wire::HEADER_BYTES);
        let header = Header::parse(bytes.as_slice().try_into().unwrap()).unwrap();
        let payload = victim.bytes(&self.stream, (header.body + header.payload) as usize);
        (header, payload)
    }
}

impl Victim {
    fn answer(&mut self, stream: &TcpStream) -> Answer {
        let bytes = self.bytes(stream, ANSWER_BYTES);
        Answer::from_wire(bytes.as_slice().try_into().unwrap()).unwrap()
    }

    /// Polls while these bytes come.
    fn bytes(&mut self, mut stream: &TcpStream, count: usize) -> Vec<u8> {
        stream.set_nonblocking(true).unwrap();
        let mut bytes = Vec::new();
        self.until(|_| {
            let mut some = vec![0; count - bytes.len()];
            if let Ok(received) = stream.read(&mut some) {
                bytes.extend_from_slice(&some[..received]);
            }
            bytes.len() == count
        });
        stream.set_nonblocking(false).unwrap();
        bytes
    }
}

fn segment(name: u64, offset: u64, bytes: u64) -> WireSegment {
    WireSegment { name, offset, bytes }
}

#[test]
fn what_was_never_exported_is_refused_and_what_was_is_served() {
    let mut victim = Victim::new();
    let mut attacker = Attacker::connect(&mut victim);
    let (readable, writable) = (victim.name(victim.readable), victim.name(victim.writable));
    assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
    for (segments, refusal) in [
        (vec![segment(1, 0, 8)], Refusal::Unknown),
        (vec![segment(readable, 0, 8), segment(readable ^ 1, 0, 8)], Refusal::Unknown),
        (vec![segment(readable, REGION, 1)], Refusal::Outside),
        (vec![segment(readable, REGION - 1, 2)], Refusal::Outside),
        (vec![segment(readable, u64::MAX, 2)], Refusal::Outside),
        (vec![segment(writable, 0, 8)], Refusal::Forbidden),
    ] {
        attacker.ask(Kind::Read, 9, &segments, &[]);
        let (header, _) = attacker.hear(&mut victim);
        assert_eq!((header.kind, header.count, header.op), (Kind::Refused, refusal as u16, 9), "{segments:?}");
    }
    for (name, offset, refusal) in [
        (1, 0, Refusal::Unknown),
        (readable, 0, Refusal::Forbidden),
        (writable, REGION - 7, Refusal::Outside),
        (writable, u64::MAX - 7, Refusal::Outside),
    ] {
        attacker.ask(Kind::Write, 9, &[segment(name, offset, 8)], b"attacked");
        let (header, _) = attacker.hear(&mut victim);
        assert_eq!((header.kind, header.count), (Kind::Refused, refusal as u16), "{name} {offset}");
    }
    attacker.ask(Kind::Read, 10, &[segment(readable, 0, 8), segment(readable, REGION - 8, 8)], &[]);
    let (header, payload) = attacker.hear(&mut victim);
    assert_eq!((header.kind, payload), (Kind::Data, vec![0x55; 16]));
    attacker.ask(Kind::Write, 11, &[segment(writable, 0, 8)], b"attacked");
    assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Written);
    victim.fabric.deregister(victim.writable).unwrap();
    attacker.ask(Kind::Write, 12, &[segment(writable, 0, 8)], b"too late");
    assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Refused);
    assert!(victim.is_untouched());
    let mut bytes = [0; 8];
    victim.memory.read(3 * REGION, &mut bytes);
    assert_eq!(&bytes, b"attacked");
}

#[test]
fn who_breaks_the_rules_is_thrown_out() {
    type Attack = fn(&mut Attacker, u64, u64);
    let attacks: [(&str, Attack, &str); 12] = [
        ("data", |it, _, _| it.say(Kind::Data, 0, 7, &[], b"x"), "not asked for"),
        ("an answer", |it, _, _| it.say(Kind::Written, 0, 7, &[], &[]), "without a question"),
        ("a refusal", |it, _, _| it.say(Kind::Refused, 1, 7, &[], &[]), "without a question"),
        ("a file", |it, _, _| it.say(Kind::Map, 0, 7, &[], &[]), "over a network"),
        ("no file", |it, _, _| it.say(Kind::Mapped, 0, 7, &[], &[]), "not asked for"),
        ("ready", |it, _, _| it.say(Kind::Ready, 0, 0, &[], &[]), "second beginning"),
        ("taken", |it, _, _| it.say(Kind::Taken, 1, 0, &[], &[]), "without a question"),
        ("messages", |it, _, _| (0..65).for_each(|_| it.say(Kind::Message, 0, 0, b"x", &[])), "than its window"),
        (
            "requests",
            |it, readable, _| {
                // More than the socket holds, and none is received.
                let all = vec![segment(readable, 0, REGION); 128];
                (0..20 * WINDOW as u64).for_each(|op| it.ask(Kind::Read, op, &all, &[]));
            },
            "than its window",
        ),
        (
            "a piece too long",
            |it, readable, _| it.ask(Kind::Read, 1, &[segment(readable, 0, PIECE_BYTES + 1)], &[]),
            "too many",
        ),
        (
            "other lengths",
            |it, _, writable| it.ask(Kind::Write, 1, &[segment(writable, 0, 9)], b"12345678"),
            "than the payload",
        ),
        (
            "a replay",
            |it, readable, _| {
                it.ask(Kind::Read, 1, &[segment(readable, 0, 8)], &[]);
                it.send.1 -= 1;
                it.ask(Kind::Read, 1, &[segment(readable, 0, 8)], &[]);
            },
            "or not now",
        ),
    ];
    for (name, attack, reason) in attacks {
        let mut victim = Victim::new();
        let mut attacker = Attacker::connect(&mut victim);
        let (readable, writable) = (victim.name(victim.readable), victim.name(victim.writable));
        let thread = std::thread::spawn(move || {
            attack(&mut attacker, readable, writable);
            attacker
        });
        let found = victim.until_gone();
        assert!(found.contains(reason), "{name}: {found}");
        assert!(victim.is_untouched(), "{name}");
        thread.join().unwrap();
    }
}

#[test]
fn strangers_are_forgotten_and_cost_others_nothing() {
    let mut victim = Victim::new();
    // Silent ones, up to the limit and beyond.
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(victim.address).unwrap()).collect();
    let hello = Hello { session: [1; 16], epoch: 5, index: 0, connections: 1, nonce: [2; 32] }.to_wire();
    victim.until(|victim| victim.fabric.lines.len() >= 64);
    assert_eq!(victim.fabric.lines.len(), 64, "as many as may be pending");
    drop(silent);
    victim.until(|victim| victim.fabric.lines.is_empty());
    // Noise, and half a hello.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 4096], &hello[..95]] {
        let mut stream = TcpStream::connect(victim.address).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.set_nonblocking(true).unwrap();
        let is_closed = |mut stream: &TcpStream| match stream.read(&mut [0; 64]) {
            Ok(received) => received == 0,
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
        };
        victim.until(|_| is_closed(&stream));
        assert!(victim.fabric.lines.is_empty());
    }
    // A hello without the secret, and a recorded one with its proof.
    for proof in [[0; 32], [7; 32]] {
        let mut stream = TcpStream::connect(victim.address).unwrap();
        stream.write_all(&hello).unwrap();
        victim.answer(&stream);
        stream.write_all(&proof).unwrap();
        victim.until(|victim| victim.fabric.lines.is_empty());
    }
    assert!(victim.events.is_empty(), "{:?}", victim.events);
    Attacker::connect(&mut victim);
}

#[test]
fn whatever_a_peer_says_nothing_panics_and_nothing_else_is_written() {
    let seed = std::env::var("FOREBAY_FABRIC_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let rounds = std::env::var("FOREBAY_FABRIC_FUZZ").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(300);
    println!("repeat with FOREBAY_FABRIC_SEED={seed}");
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for round in 0..rounds {
        let mut victim = Victim::new();
        let mut attacker = Attacker::connect(&mut victim);
        let names = [victim.name(victim.readable), victim.name(victim.writable), u64::from(random())];
        for _ in 0..1 + random() % 12 {
            let segments: Vec<WireSegment> = (0..random() % 4)
                .map(|_| {
                    let name = names[random() as usize % 3];
                    let odd = [0, 1, 4096, REGION, u64::MAX, u64::from(random())];
                    segment(name, odd[random() as usize % 6], odd[random() as usize % 6])
                })
                .collect();
            let body = segments_to_wire(&segments);
            let payload = vec![0xA7; random() as usize % 9000];
            let all = [
                Kind::Ready,
                Kind::Read,
                Kind::Data,
                Kind::Write,
                Kind::Write,
                Kind::Written,
                Kind::Refused,
                Kind::Message,
                Kind::Taken,
                Kind::Map,
                Kind::Mapped,
                Kind::Revoke,
                Kind::Unmapped,
            ];
            let kind = all[random() as usize % all.len()];
            let is_list = matches!(kind, Kind::Read | Kind::Write);
            let count = if random() % 4 > 0 && is_list { segments.len() as u16 } else { (random() % 3) as u16 };
            let lengths = [body.len() as u32, 0, random()];
            let payloads = [payload.len() as u32, 0, random() % 2_000_000];
            let (length, promised) = (lengths[random() as usize % 3], payloads[random() as usize % 3]);
            let header = Header { kind, count, body: length, payload: promised, op: u64::from(random() % 4) };
            attacker.say_header(header, &body, &payload);
        }
        if random() % 2 == 0 {
            drop(attacker);
            victim.until_gone();
        } else {
            for _ in 0..3 {
                victim.fabric.poll(Some(Duration::ZERO), &mut victim.events).unwrap();
            }
        }
        assert!(victim.is_untouched(), "round {round} of seed {seed}");
    }
}
