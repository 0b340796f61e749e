//! A hostile peer: one that knows the secret, and says what it likes, and one that does not.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::socket::{Part, Place};
use crate::tls::Tls;
use crate::wire::{ANSWER_BYTES, Answer, Header, Hello, Key, PIECE_BYTES, WINDOW, WireSegment, segments_to_wire};

mod ucx;

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &[u8] = b"a secret of the tests";

/// The side under attack, with one region of each kind in the middle of its memory.
struct Victim {
    fabric: Fabric,
    events: Vec<Event>,
    address: Address,
    _home: tempfile::TempDir,
    memory: Arc<Memory>,
    readable: RegionId,
    writable: RegionId,
}

/// Of each region, and of what lies before, between and behind them.
const REGION: u64 = 8192;

impl Victim {
    fn new(is_shm: bool) -> Victim {
        Victim::with(is_shm, false)
    }

    /// Over TCP.
    fn encrypting() -> Victim {
        Victim::with(false, true)
    }

    fn with(is_shm: bool, encrypt: bool) -> Victim {
        let home = tempfile::tempdir().unwrap();
        let address = match is_shm {
            true => Address::Shm(home.path().join("a.sock")),
            false => Address::parse("tcp://127.0.0.1:0").unwrap(),
        };
        Victim::at(&address, home, Options { encrypt, ..Options::default() })
    }

    fn at(address: &Address, home: tempfile::TempDir, options: Options) -> Victim {
        let secret = Some(Secret::new(SECRET).unwrap());
        let mut fabric = Fabric::new(Options { secret, ..options }).unwrap();
        let address = fabric.listen(address).unwrap();
        let memory = Arc::new(Memory::allocate(5 * REGION).unwrap());
        memory.write(0, &[0x55; 5 * REGION as usize]);
        let readable = fabric.register(&memory, REGION, REGION, Rights::READ).unwrap();
        let write = Rights { read: false, write: true };
        let writable = fabric.register(&memory, 3 * REGION, REGION, write).unwrap();
        Victim { fabric, events: Vec::new(), address, _home: home, memory, readable, writable }
    }

    fn dial(&self) -> File {
        match &self.address {
            Address::Tcp(address) | Address::Ucx(address) => {
                let stream = TcpStream::connect(address).unwrap();
                // The parts of a handshake would wait for each other.
                stream.set_nodelay(true).unwrap();
                File::from(OwnedFd::from(stream))
            }
            Address::Shm(path) => File::from(OwnedFd::from(UnixStream::connect(path).unwrap())),
        }
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
    stream: File,
    tls: Option<Tls>,
    send: (Key, u64),
}

impl Attacker {
    fn connect(victim: &mut Victim) -> Attacker {
        let attacker = Attacker::greet(victim, false);
        victim.until(|victim| victim.events.iter().any(|event| matches!(event, Event::Up { .. })));
        victim.events.clear();
        attacker
    }

    fn greet(victim: &mut Victim, is_ucx: bool) -> Attacker {
        let mut stream = victim.dial();
        let hello = hello_of(victim.fabric.keys.is_some(), is_ucx);
        stream.write_all(&hello).unwrap();
        let answer = victim.answer(&stream);
        let secret = Secret::new(SECRET).unwrap();
        secret.check_answer(&hello, answer).unwrap();
        stream.write_all(&secret.proof_of_caller(&hello, answer)).unwrap();
        let mut attacker = Attacker { stream, tls: None, send: (secret.keys(&hello, answer).0, 0) };
        if victim.fabric.keys.is_some() {
            let within = secret.within(&attacker.secure(victim));
            attacker.put(&within.proof_of_caller(&hello, answer));
            attacker.send.0 = within.keys(&hello, answer).0;
        }
        attacker
    }

    /// Begins TLS. Returns what its channel has.
    fn secure(&mut self, victim: &mut Victim) -> [u8; 32] {
        let mut tls = new_keys().unwrap().connect().unwrap();
        victim.until(|_| {
            tls.send(self.stream.as_fd(), std::iter::empty()).unwrap();
            let _ = tls.receive(self.stream.as_fd(), std::iter::once(Place::Bytes(&mut [0])));
            tls.channel().is_some()
        });
        let channel = tls.channel().unwrap();
        self.tls = Some(tls);
        channel
    }

    /// The victim may have thrown us out by now.
    fn put(&mut self, bytes: &[u8]) {
        let Some(tls) = &mut self.tls else { return drop(self.stream.write_all(bytes)) };
        let mut done = 0;
        while done < bytes.len() || tls.has_to_send() {
            match tls.send(self.stream.as_fd(), std::iter::once(Part::Bytes(&bytes[done..]))) {
                Ok(sent) => done += sent,
                Err(_) => return,
            }
            std::thread::yield_now();
        }
    }

    fn say(&mut self, kind: Kind, count: u16, op: u64, body: &[u8], payload: &[u8]) {
        let header = Header { kind, count, body: body.len() as u32, payload: payload.len() as u32, op };
        self.say_header(header, body, payload);
    }

    fn say_header(&mut self, header: Header, body: &[u8], payload: &[u8]) {
        let sealed = header.sealed(&self.send.0, self.send.1, body);
        self.send.1 += 1;
        self.put(&[&sealed, body, payload].concat());
    }

    /// A frame of any 24 bytes, with the tag that they should have.
    fn say_any(&mut self, head: &[u8; 24], body: &[u8], payload: &[u8]) {
        let tag = crate::wire::tag(&self.send.0, self.send.1, head, body).to_le_bytes();
        self.send.1 += 1;
        self.put(&[head, &tag[..], body, payload].concat());
    }

    /// With a descriptor beside each of so many bytes of the frame.
    fn say_with_files(&mut self, kind: Kind, op: u64, files: usize) {
        let header = Header { kind, count: 0, body: 0, payload: 0, op };
        let sealed = header.sealed(&self.send.0, self.send.1, &[]);
        self.send.1 += 1;
        let file = rustix::fs::memfd_create("attack", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (first, rest) = sealed.split_at(files);
        for byte in first {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = rustix::net::SendAncillaryBuffer::new(&mut space);
            let rights = [file.as_fd()];
            assert!(beside.push(rustix::net::SendAncillaryMessage::ScmRights(&rights)));
            let bytes = [std::io::IoSlice::new(std::slice::from_ref(byte))];
            let _ = rustix::net::sendmsg(&self.stream, &bytes, &mut beside, rustix::net::SendFlags::NOSIGNAL);
        }
        let _ = self.stream.write_all(rest);
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
    fn answer(&mut self, stream: &File) -> Answer {
        let bytes = self.bytes(stream, ANSWER_BYTES);
        Answer::from_wire(bytes.as_slice().try_into().unwrap()).unwrap()
    }

    /// Polls while these bytes come.
    fn bytes(&mut self, mut stream: &File, count: usize) -> Vec<u8> {
        rustix::io::ioctl_fionbio(stream, true).unwrap();
        let mut bytes = Vec::new();
        self.until(|_| {
            let mut some = vec![0; count - bytes.len()];
            if let Ok(received) = stream.read(&mut some) {
                bytes.extend_from_slice(&some[..received]);
            }
            bytes.len() == count
        });
        rustix::io::ioctl_fionbio(stream, false).unwrap();
        bytes
    }
}

fn segment(name: u64, offset: u64, bytes: u64) -> WireSegment {
    WireSegment { name, offset, bytes }
}

fn hello(is_encrypted: bool) -> [u8; crate::wire::HELLO_BYTES] {
    hello_of(is_encrypted, false)
}

fn hello_of(is_encrypted: bool, is_ucx: bool) -> [u8; crate::wire::HELLO_BYTES] {
    Hello { session: [1; 16], epoch: 5, index: 0, connections: 1, is_encrypted, is_ucx, nonce: [2; 32] }.to_wire()
}

#[test]
fn what_was_never_exported_is_refused_and_what_was_is_served() {
    [false, true].into_iter().for_each(refused_or_served);
}

fn refused_or_served(is_shm: bool) {
    let mut victim = Victim::new(is_shm);
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
fn what_was_received_is_not_told_again() {
    let mut victim = Victim::new(false);
    let mut attacker = Attacker::connect(&mut victim);
    victim.until(|victim| !victim.fabric.has_more());
    victim.fabric.wait(Some(Duration::ZERO)).unwrap();
    victim.fabric.work();
    attacker.say(Kind::Message, 0, 0, b"first", b"");
    victim.fabric.wait(Some(PATIENCE)).unwrap();
    attacker.say(Kind::Message, 0, 0, b"second", b"");
    victim.until(|victim| victim.events.len() == 2);
    victim.fabric.wait(Some(Duration::ZERO)).unwrap();
    assert!(!victim.fabric.has_more(), "the kernel told of the second message after it was received");
}

#[test]
fn room_is_watched_while_something_waits_for_it() {
    const READS: u64 = 40;
    let mut victim = Victim::new(false);
    let mut attacker = Attacker::connect(&mut victim);
    let watched = |victim: &Victim| victim.fabric.lines.values().any(|line| line.is_room_watched);
    victim.until(|victim| !victim.fabric.has_more());
    assert!(!watched(&victim));
    rustix::net::sockopt::set_socket_send_buffer_size(victim.fabric.lines.values().next().unwrap().socket(), 4096)
        .unwrap();
    let name = victim.name(victim.readable);
    for op in 0..READS {
        attacker.ask(Kind::Read, op, &[segment(name, 0, REGION)], b"");
    }
    victim.until(|victim| watched(victim));
    assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
    for op in 0..READS {
        let (header, _) = attacker.hear(&mut victim);
        assert_eq!((header.kind, header.op), (Kind::Data, op));
    }
    victim.until(|victim| !watched(victim));
}

#[test]
fn what_comes_after_the_end_of_a_read_goes_nowhere() {
    for is_shm in [false, true] {
        cut_short(is_shm, |victim, op, _| victim.fabric.give_up(op));
        cut_short(is_shm, |victim, _, region| victim.fabric.deregister(region).unwrap());
    }
}

/// The peer stops in the middle of its answer, and goes on when the read has ended.
fn cut_short(is_shm: bool, end: fn(&mut Victim, OpId, RegionId)) {
    let mut victim = Victim::new(is_shm);
    let mut attacker = Attacker::connect(&mut victim);
    assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
    let peer = *victim.fabric.books.peers.keys().next().unwrap();
    let descriptor = Descriptor { epoch: 5, name: 1, bytes: REGION, rights: Rights::READ, is_mappable: false };
    let remote = victim.fabric.import(peer, &descriptor).unwrap();
    let memory = Arc::new(Memory::allocate(REGION).unwrap());
    let local = victim.fabric.register(&memory, 0, REGION, Rights::NONE).unwrap();
    let segments = vec![Segment { local, local_offset: 0, remote, remote_offset: 0, bytes: REGION }];
    let read = Operation { peer, verb: Verb::Read, segments, deadline: None, notice: None };
    let op = victim.fabric.submit(read).unwrap();
    let (request, _) = attacker.hear(&mut victim);
    assert_eq!(request.kind, Kind::Read);

    let (first, second) = ([0xA1; REGION as usize / 2], [0xA2; REGION as usize / 2]);
    let answer = Header { kind: Kind::Data, count: 0, body: 0, payload: REGION as u32, op: request.op };
    attacker.say_header(answer, &[], &first);
    let mut found = [0; REGION as usize];
    victim.until(|_| {
        memory.read(0, &mut found);
        found[..first.len()] == first
    });
    end(&mut victim, op, local);
    victim.fabric.poll(Some(Duration::ZERO), &mut victim.events).unwrap();
    let is_end = |event: &&Event| matches!(event, Event::Done { op: it, result: Err(_) } if *it == op);
    assert_eq!(victim.events.iter().filter(is_end).count(), 1, "{:?}", victim.events);
    // The memory's next owner.
    memory.write(0, &[0xAA; REGION as usize]);

    attacker.stream.write_all(&second).unwrap();
    attacker.say(Kind::Message, 0, 0, b"behind it", &[]);
    victim.until(|victim| victim.events.iter().any(|event| matches!(event, Event::Message { .. })));
    memory.read(0, &mut found);
    assert!(found == [0xAA; REGION as usize], "a read that has ended wrote into memory");
    assert_eq!(victim.events.iter().filter(|event| matches!(event, Event::Done { .. })).count(), 1);
}

#[test]
fn what_comes_of_a_write_after_its_region_was_taken_away_goes_nowhere() {
    for is_shm in [false, true] {
        let mut victim = Victim::new(is_shm);
        let mut attacker = Attacker::connect(&mut victim);
        assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
        let body = segments_to_wire(&[segment(victim.name(victim.writable), 0, REGION)]);
        let (first, second) = ([0xA1; REGION as usize / 2], [0xA2; REGION as usize / 2]);
        let write = Header { kind: Kind::Write, count: 1, body: body.len() as u32, payload: REGION as u32, op: 1 };
        attacker.say_header(write, &body, &first);
        let mut found = [0; REGION as usize];
        victim.until(|victim| {
            victim.memory.read(3 * REGION, &mut found);
            found[..first.len()] == first
        });
        victim.fabric.deregister(victim.writable).unwrap();
        // The memory's next owner.
        victim.memory.write(3 * REGION, &[0xAA; REGION as usize]);
        attacker.stream.write_all(&second).unwrap();
        attacker.say(Kind::Message, 0, 0, b"behind it", &[]);
        victim.until(|victim| victim.events.iter().any(|event| matches!(event, Event::Message { .. })));
        victim.memory.read(3 * REGION, &mut found);
        assert!(found == [0xAA; REGION as usize], "a write went into memory that was taken away");
        assert!(victim.is_untouched());
    }
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
    let shm_alone: [(&str, Attack, &str); 3] = [
        ("a file that nobody wants", |it, _, _| it.say_with_files(Kind::Mapped, 7, 1), "not asked for"),
        ("many files", |it, _, _| it.say_with_files(Kind::Map, 7, 4), "were not asked for"),
        // None of them is there, so each is answered; and no answer is received.
        ("questions", |it, _, _| (0..100_000).for_each(|op| it.say(Kind::Map, 0, op, &[], &[])), "takes no answers"),
    ];
    let with = |is_shm, encrypts| move |attack| (is_shm, encrypts, attack);
    let on_tcp = attacks.iter().map(with(false, false)).chain(attacks.iter().map(with(false, true)));
    let on_shm = attacks.iter().filter(|(name, ..)| *name != "a file").chain(&shm_alone).map(with(true, false));
    for (is_shm, encrypts, &(name, attack, reason)) in on_tcp.chain(on_shm) {
        let mut victim = Victim::with(is_shm, encrypts);
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
    [false, true].into_iter().for_each(strangers);
}

fn strangers(is_shm: bool) {
    let mut victim = Victim::new(is_shm);
    // None has to go before its time.
    victim.fabric.grace = victim.fabric.handshake;
    // Silent ones, up to the limit and beyond.
    let silent: Vec<File> = (0..100).map(|_| victim.dial()).collect();
    let hello = hello(false);
    victim.until(|victim| victim.fabric.lines.len() >= 64);
    assert_eq!(victim.fabric.lines.len(), 64, "as many as may be pending");
    drop(silent);
    victim.until(|victim| victim.fabric.lines.is_empty());
    // Noise, and half a hello.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 4096], &hello[..95]] {
        let mut stream = victim.dial();
        stream.write_all(bytes).unwrap();
        rustix::net::shutdown(&stream, rustix::net::Shutdown::Write).unwrap();
        rustix::io::ioctl_fionbio(&stream, true).unwrap();
        let is_closed = |mut stream: &File| match stream.read(&mut [0; 64]) {
            Ok(received) => received == 0,
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
        };
        victim.until(|_| is_closed(&stream));
        assert!(victim.fabric.lines.is_empty());
    }
    // A hello without the secret, and a recorded one with its proof.
    for proof in [[0; 32], [7; 32]] {
        let mut stream = victim.dial();
        stream.write_all(&hello).unwrap();
        victim.answer(&stream);
        stream.write_all(&proof).unwrap();
        victim.until(|victim| victim.fabric.lines.is_empty());
    }
    assert!(victim.events.is_empty(), "{:?}", victim.events);
    Attacker::connect(&mut victim);
}

/// One that knows the secret, or that passes on the words of one that does.
#[test]
fn who_begins_tls_and_breaks_it_or_proves_another_channel_gets_no_session() {
    type Attack = fn(&mut Attacker, &mut Victim);
    let attacks: [(&str, Attack); 6] = [
        ("noise", |it, _| drop(it.stream.write_all(&[0xA7; 4096]))),
        ("nothing of TLS", |it, _| drop(it.stream.write_all(&hello(true)))),
        ("a handshake without end", |it, _| {
            // Records of a message that says it has 60 KB.
            let record = |first: &[u8]| [&[22, 3, 3, 0x3F, 0xFF][..], first, &vec![0; 0x3FFF - first.len()]].concat();
            let _ = it.stream.write_all(&[record(&[1, 0, 0xEA, 0x60]), record(&[]), record(&[])].concat());
        }),
        ("no proof", |it, victim| {
            it.secure(victim);
            it.put(&[0; 32]);
        }),
        ("a proof of another channel", |it, victim| {
            it.secure(victim);
            let hello = hello(true);
            let answer = Answer { epoch: 0, is_encrypted: true, nonce: [0; 32], proof: [0; 32] };
            let within = Secret::new(SECRET).unwrap().within(&[7; 32]);
            it.put(&within.proof_of_caller(&hello, answer));
        }),
        ("frames before the proof", |it, victim| {
            it.secure(victim);
            it.say(Kind::Message, 0, 0, b"first", &[]);
        }),
    ];
    for (name, attack) in attacks {
        let mut victim = Victim::encrypting();
        let mut stream = victim.dial();
        stream.write_all(&hello(true)).unwrap();
        let answer = victim.answer(&stream);
        let secret = Secret::new(SECRET).unwrap();
        stream.write_all(&secret.proof_of_caller(&hello(true), answer)).unwrap();
        let mut attacker = Attacker { stream, tls: None, send: (secret.keys(&hello(true), answer).0, 0) };
        let start = Instant::now();
        attack(&mut attacker, &mut victim);
        victim.until(|victim| victim.fabric.lines.is_empty() && start.elapsed() > Duration::from_millis(20));
        assert!(start.elapsed() < HANDSHAKE, "{name}: it was only late");
        assert!(victim.events.is_empty() && victim.fabric.books.peers.is_empty(), "{name}: {:?}", victim.events);
    }
}

/// Without the proof, no byte reaches TLS.
#[test]
fn a_stranger_gets_no_tls() {
    let mut victim = Victim::encrypting();
    for proof in [None, Some([7; 32])] {
        let mut stream = victim.dial();
        stream.write_all(&hello(true)).unwrap();
        victim.answer(&stream);
        if let Some(proof) = proof {
            stream.write_all(&proof).unwrap();
            victim.until(|victim| victim.fabric.lines.is_empty());
        } else {
            let is_secured = victim.fabric.lines.values().any(|line| line.is_secured());
            assert!(!is_secured && victim.fabric.lines.len() == 1);
            drop(stream);
            victim.until(|victim| victim.fabric.lines.is_empty());
        }
    }
    // It does not encrypt, and knows the secret.
    let mut stream = victim.dial();
    stream.write_all(&hello(false)).unwrap();
    let answer = victim.answer(&stream);
    assert!(answer.is_encrypted);
    stream.write_all(&Secret::new(SECRET).unwrap().proof_of_caller(&hello(false), answer)).unwrap();
    victim.until(|victim| victim.fabric.lines.is_empty());
    assert!(victim.events.is_empty());
}

#[test]
fn silent_strangers_that_never_end_keep_nobody_out() {
    for is_shm in [false, true] {
        let mut victim = Victim::new(is_shm);
        victim.fabric.handshake = Duration::from_secs(3600);
        let silent: Vec<File> = (0..100).map(|_| victim.dial()).collect();
        victim.until(|victim| victim.fabric.lines.len() >= 64);
        assert_eq!(victim.fabric.lines.len(), 64, "as many as may be pending");
        let mut attacker = Attacker::connect(&mut victim);
        assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
        drop(silent);
    }
}

#[test]
fn no_stranger_takes_the_places_of_others() {
    let mut books = Books::default();
    let ours = Origin::User(rustix::process::geteuid().as_raw());
    let mut join = |origin: Origin| {
        let mut count = 0;
        while books.has_place(origin) {
            let id = PeerId(books.peers.len() as u64);
            books.peers.insert(id, Peer { origin: Some(origin), ..Peer::default() });
            count += 1;
        }
        count
    };
    let hosts = [1, 2, 3].map(|last| Origin::Host(std::net::IpAddr::from([10, 0, 0, last])));
    assert_eq!(hosts.map(&mut join), [128, 64, 32]);
    assert_eq!(join(Origin::User(54321)), 16);
    assert_eq!(join(ours), 16);
    assert_eq!(join(Origin::Unknown), 0);
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
        let is_shm = random() % 2 == 0;
        let mut victim = Victim::with(is_shm, !is_shm && random() % 2 == 0);
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
            match random() % 8 {
                0 if is_shm => attacker.say_with_files(kind, header.op, random() as usize % 4),
                _ => attacker.say_header(header, &body, &payload),
            }
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

#[test]
fn who_was_given_a_file_to_read_cannot_open_it_again_to_write() {
    let mut fabric = Fabric::new(Options::default()).unwrap();
    let open_again = |file: &OwnedFd| {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
        rustix::fs::open(path, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap()
    };
    for (rights, may_write) in [(Rights::READ, false), (Rights::READ_AND_WRITE, true)] {
        let memory = Arc::new(Memory::allocate(4096).unwrap());
        let region = fabric.register(&memory, 0, 4096, rights).unwrap();
        let file = fabric.books.file_of(&fabric.books.regions[&region]).unwrap();
        assert_eq!(Memory::of_peer(&open_again(&file), 4096, true).is_ok(), may_write, "{rights:?}");
        assert!(Memory::of_peer(&file, 4096, false).is_ok());
        // The owner writes as before.
        memory.write(0, b"news");
    }
}

mod fuzz {
    use forebay_fuzz::Target;

    use super::*;

    /// In a script a region's name is its number.
    const NAMES: std::ops::Range<u64> = 0..2;

    /// One frame of a script: its header without the tag, then body and payload.
    fn frame(kind: Kind, count: u16, op: u64, body: &[u8], payload: &[u8]) -> Vec<u8> {
        let header = Header { kind, count, body: body.len() as u32, payload: payload.len() as u32, op };
        [&header.sealed(&[0; 32], 0, body)[..24], body, payload].concat()
    }

    fn scripts() -> Vec<Vec<u8>> {
        let list = |segments: &[WireSegment]| segments_to_wire(segments);
        let read = list(&[segment(0, 0, 64), segment(0, REGION - 8, 8)]);
        let write = list(&[segment(1, 16, 32)]);
        let reads = [frame(Kind::Read, 2, 1, &read, &[]), frame(Kind::Map, 0, 0, &[], &[])].concat();
        let writes =
            [frame(Kind::Write, 1, 2, &write, &[0xA7; 32]), frame(Kind::Message, 0, 0, b"words", &[])].concat();
        let answers = [
            frame(Kind::Data, 0, 3, &[], &[0xA7; 100]),
            frame(Kind::Refused, 1, 4, &[], &[]),
            frame(Kind::Taken, 1, 0, &[], &[]),
            frame(Kind::Unmapped, 0, 0, &[], &[]),
        ];
        vec![reads, writes, answers.concat(), frame(Kind::Message, 1, 0, b"a notice", &[])]
    }

    /// Says the frames of a script, with the regions' real names.
    fn say(attacker: &mut Attacker, names: [u64; 2], mut script: &[u8]) {
        while let Some((head, rest)) = script.split_first_chunk::<24>() {
            let mut head = *head;
            let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes")) as usize;
            let (body, rest) = rest.split_at(rest.len().min(number(0)));
            let (payload, rest) = rest.split_at(rest.len().min(number(4)));
            let real = |bytes: &mut [u8]| {
                let name = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
                if NAMES.contains(&name) {
                    bytes.copy_from_slice(&names[name as usize].to_le_bytes());
                }
            };
            let mut body = body.to_vec();
            match head[8] {
                kind if kind == Kind::Read as u8 || kind == Kind::Write as u8 => {
                    body.chunks_exact_mut(24).for_each(|segment| real(&mut segment[..8]));
                }
                _ => real(&mut head[16..24]),
            }
            attacker.say_any(&head, &body, payload);
            script = rest;
        }
    }

    #[test]
    fn whatever_a_peer_says_that_has_the_secret_only_what_it_may_write_changes() {
        Target::new("sessions", scripts()).cases(300).allocates(16, 8 << 20).run(|script| {
            let is_shm = script.len().is_multiple_of(2);
            let mut victim = Victim::with(is_shm, !is_shm && script.len() % 4 == 1);
            let mut attacker = Attacker::connect(&mut victim);
            let names = [victim.name(victim.readable), victim.name(victim.writable)];
            say(&mut attacker, names, script);
            // What it sent is read to its end, or it is thrown out before.
            drop(attacker);
            let why = victim.until_gone();
            assert!(victim.is_untouched(), "something else was written");
            (why.split(" (").next().unwrap_or_default().to_owned(), victim.events.len().min(8))
        });
    }

    /// What the side that connects says first in TLS.
    fn first_words() -> Vec<u8> {
        let (mut here, there) = UnixStream::pair().unwrap();
        let mut tls = new_keys().unwrap().connect().unwrap();
        tls.send(there.as_fd(), std::iter::empty()).unwrap();
        drop(there);
        let mut bytes = Vec::new();
        here.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn whatever_comes_instead_of_tls_ends_it_or_waits_for_more() {
        let keys = new_keys().unwrap();
        let words = first_words();
        let inputs = vec![[&words[..], &words].concat(), words];
        Target::new("tls", inputs).cases(1_500).allocates(64, 1 << 20).run(|bytes| {
            let (mut here, there) = UnixStream::pair().unwrap();
            here.write_all(bytes).unwrap();
            let mut tls = keys.listen().unwrap();
            let received = tls.receive(there.as_fd(), std::iter::once(Place::Bytes(&mut [0; 64])));
            let kind = received.expect_err("content without a handshake").kind();
            assert!(tls.channel().is_none(), "a channel with nobody");
            (format!("{kind:?}"), tls.has_to_send())
        });
    }
}
