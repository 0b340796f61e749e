//! Two endpoints in one thread, polled in turn, over each transport.

#![allow(dead_code, reason = "each test uses a part")]

pub mod other;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::Result;
use forebay_fabric::{
    Address, Descriptor, Event, Fabric, Memory, OpId, Operation, Options, PeerId, RegionId, RemoteId, Rights, Secret,
    Segment, Verb,
};

/// Until something is there that always comes.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A way to connect two endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Encrypted,
    Shm,
    Ucx,
}

/// Those that are there: UCX if `FOREBAY_UCX_LIBRARY` names its library.
pub fn transports() -> Vec<Transport> {
    let sockets = [Transport::Tcp, Transport::Encrypted, Transport::Shm];
    sockets.into_iter().chain(ucx_library().map(|_| Transport::Ucx)).collect()
}

pub fn ucx_library() -> Option<PathBuf> {
    std::env::var_os("FOREBAY_UCX_LIBRARY").map(PathBuf::from)
}

/// An address to listen at, and the directory that it may need.
pub fn address(transport: Transport) -> (Address, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let address = match transport {
        Transport::Tcp | Transport::Encrypted => Address::parse("tcp://127.0.0.1:0").unwrap(),
        Transport::Ucx => Address::parse("ucx://127.0.0.1:0").unwrap(),
        Transport::Shm => Address::Shm(home.path().join("a.sock")),
    };
    (address, home)
}

pub fn options() -> Options {
    let secret = Some(Secret::new(b"a secret of the tests").unwrap());
    Options { secret, ucx_library: ucx_library(), ..Options::default() }
}

pub fn options_of(transport: Transport) -> Options {
    Options { encrypt: transport == Transport::Encrypted, ..options() }
}

/// One side.
pub struct Side {
    pub fabric: Fabric,
    pub events: Vec<Event>,
}

impl Side {
    pub fn new(options: Options) -> Side {
        Side { fabric: Fabric::new(options).unwrap(), events: Vec::new() }
    }

    pub fn poll(&mut self, timeout: Duration) {
        self.fabric.poll(Some(timeout), &mut self.events).unwrap();
    }

    /// Polls until there is an event like this, and takes it.
    pub fn until<T>(&mut self, mut is_it: impl FnMut(&Event) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.events.iter().position(|event| is_it(event).is_some()) {
                return is_it(&self.events.remove(at)).unwrap();
            }
            assert!(Instant::now() < end, "it never came; there is {:?}", self.events);
            self.poll(Duration::from_millis(10));
        }
    }

    pub fn memory(&mut self, bytes: u64, rights: Rights) -> (Arc<Memory>, RegionId) {
        let memory = Arc::new(Memory::allocate(bytes).unwrap());
        let region = self.fabric.register(&memory, 0, bytes, rights).unwrap();
        (memory, region)
    }
}

/// Polls both until `a` or `b` has what `look` finds.
pub fn both<T>(a: &mut Side, b: &mut Side, mut look: impl FnMut(&mut Side, &mut Side) -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look(a, b) {
            return found;
        }
        assert!(Instant::now() < end, "it never came; there is {:?} and {:?}", a.events, b.events);
        a.poll(Duration::from_millis(1));
        b.poll(Duration::from_millis(1));
    }
}

/// The first event of a side that is like this, taken out.
pub fn take<T>(side: &mut Side, is_it: impl Fn(&Event) -> Option<T>) -> Option<T> {
    let at = side.events.iter().position(|event| is_it(event).is_some())?;
    is_it(&side.events.remove(at))
}

/// `a` is connected to `b`.
pub struct Pair {
    pub a: Side,
    pub b: Side,
    /// `b` as `a` knows it, and the reverse.
    pub to_b: PeerId,
    pub to_a: PeerId,
    pub address: Address,
    pub transport: Transport,
    _home: tempfile::TempDir,
}

impl Pair {
    pub fn new(transport: Transport) -> Pair {
        let (mut a, mut b) = (Side::new(options_of(transport)), Side::new(options_of(transport)));
        let (address, home) = address(transport);
        let address = b.fabric.listen(&address).unwrap();
        let to_b = a.fabric.connect(&address).unwrap();
        both(&mut a, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        let is_up = |event: &Event| match event {
            Event::Up { peer } => Some(*peer),
            _ => None,
        };
        let to_a = both(&mut a, &mut b, |_, b| take(b, is_up));
        Pair { a, b, to_b, to_a, address, transport, _home: home }
    }

    /// Memory of `b`, imported by `a`, and mapped if the transport maps it.
    pub fn remote(&mut self, bytes: u64, rights: Rights) -> (Arc<Memory>, RegionId, RemoteId) {
        let (memory, region) = self.b.memory(bytes, rights);
        let remote = self.import(region);
        (memory, region, remote)
    }

    pub fn import(&mut self, region: RegionId) -> RemoteId {
        let descriptor = self.b.fabric.export(region).unwrap().to_bytes();
        let remote = self.a.fabric.import(self.to_b, &Descriptor::from_bytes(&descriptor).unwrap()).unwrap();
        if matches!(self.address, Address::Shm(_)) {
            both(&mut self.a, &mut self.b, |a, _| a.fabric.is_mapped(remote).then_some(()));
        }
        remote
    }

    /// After an operation that ended early: over UCX its session has ended too, so that both connect again.
    pub fn remain(&mut self, region: RegionId, remote: RemoteId) -> RemoteId {
        if !matches!(self.address, Address::Ucx(_)) {
            return remote;
        }
        let gone = |event: &Event| matches!(event, Event::Gone { .. }).then_some(());
        both(&mut self.a, &mut self.b, |a, _| take(a, gone));
        both(&mut self.a, &mut self.b, |_, b| take(b, gone));
        self.to_b = self.a.fabric.connect(&self.address).unwrap();
        both(&mut self.a, &mut self.b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        self.to_a = both(&mut self.a, &mut self.b, |_, b| {
            take(b, |event| match event {
                Event::Up { peer } => Some(*peer),
                _ => None,
            })
        });
        self.import(region)
    }

    /// Runs one operation of `a` to its end.
    pub fn run(&mut self, verb: Verb, segments: Vec<Segment>) -> Result<()> {
        let op = self.submit(verb, segments)?;
        self.end_of(op)
    }

    pub fn submit(&mut self, verb: Verb, segments: Vec<Segment>) -> Result<OpId> {
        self.a.fabric.submit(Operation { peer: self.to_b, verb, segments, deadline: None, notice: None })
    }

    pub fn end_of(&mut self, op: OpId) -> Result<()> {
        both(&mut self.a, &mut self.b, |a, _| end_of(a, op))
    }
}

/// The end of an operation, if it has ended.
pub fn end_of(side: &mut Side, id: OpId) -> Option<Result<()>> {
    let at = side.events.iter().position(|event| matches!(event, Event::Done { op, .. } if *op == id))?;
    match side.events.remove(at) {
        Event::Done { result, .. } => Some(result),
        _ => unreachable!("found by its kind"),
    }
}

/// Bytes that differ at each offset and for each seed.
pub fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at.wrapping_mul(0x9E37_79B9).wrapping_add(seed.wrapping_mul(0x85EB_CA6B)) >> 13) as u8)
        .collect()
}

pub fn bytes_of(memory: &Memory, offset: u64, bytes: u64) -> Vec<u8> {
    let mut into = vec![0; bytes as usize];
    memory.read(offset, &mut into);
    into
}

pub fn segment(local: RegionId, local_offset: u64, remote: RemoteId, remote_offset: u64, bytes: u64) -> Segment {
    Segment { local, local_offset, remote, remote_offset, bytes }
}
