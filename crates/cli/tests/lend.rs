//! Memory that clients lend: what lies in it is stored and found again, and no client can reach beyond it, use
//! another's, or stop the daemon.

mod support;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_io::pool::{Lending as Memory, Lent, recv_fds, send_fds};
use forebay_rpc::proto::*;
use forebay_rpc::{ATTACH_SOCKET, PROTOCOL_VERSION};
use prost::Message;
use rustix::process::Uid;
use support::*;

const BYTES: u64 = 64 << 10;
const LENT_BYTES: u64 = 1 << 20;
const SMALL: &[&str] = &["--pool.capacity_bytes", "64MiB", "--pool.unit_bytes", "2MiB"];

/// A client of one namespace.
struct Lender {
    client: Client,
    namespace: u32,
}

impl Lender {
    fn new(place: &Place, name: &str) -> Lender {
        let client = Client::open(place, name, 0);
        let namespace = client.namespace("t", vec![Group { rank_bytes: vec![BYTES], ..group() }]).expect("a namespace");
        Lender { client, namespace }
    }

    fn lending(&self) -> Lending {
        let Welcome { session, lending_token, .. } = self.client.welcome.clone();
        Lending { session, token: lending_token, bytes: LENT_BYTES }
    }

    fn lend(&self, place: &Place) -> (u64, Lent) {
        let stream = ask(place, self.lending()).expect("a daemon that takes memory");
        let memory = Memory::make(LENT_BYTES).expect("memory");
        assert_eq!(tell(&stream, &[memory.file()]).error, "");
        let memory = memory.seal().expect("seals");
        let reply = tell(&stream, &[]);
        assert!(reply.error.is_empty() && reply.lent != 0, "{reply:?}");
        (reply.lent, memory)
    }

    fn put(&self, seeds: &[u64], memory: u64, offset: u64) -> Result<PutReply, tonic::Status> {
        let block = |seed: &u64| Block { hash: hash(*seed).to_vec(), data: Vec::new() };
        let request = PutRequest {
            session: self.client.welcome.session,
            namespace: self.namespace,
            group: 0,
            predecessor: Vec::new(),
            blocks: seeds.iter().map(block).collect(),
            lent: Some(LentPlace { memory, offset }),
        };
        call!(self.client, put, request)
    }

    fn get(&self, seeds: &[u64], lent: Option<LentPlace>) -> Result<GetReply, tonic::Status> {
        let request = GetRequest {
            session: self.client.welcome.session,
            namespace: self.namespace,
            group: 0,
            hash_bytes: 32,
            hashes: seeds.iter().flat_map(|seed| hash(*seed)).collect(),
            lent,
        };
        call!(self.client, get, request)
    }

    /// The bytes of a stored block, as a message carries them.
    fn stored(&self, seed: u64) -> Vec<u8> {
        self.get(&[seed], None).expect("an answer").blocks.pop().expect("the block").data
    }
}

fn ask(place: &Place, lending: Lending) -> Result<UnixStream, String> {
    let stream = UnixStream::connect(place.sockets().join(ATTACH_SOCKET)).expect("the attach socket");
    let request = AttachRequest { protocol: PROTOCOL_VERSION, lending: Some(lending), ..AttachRequest::default() };
    send(&stream, &request);
    let reply = answer(&stream);
    if reply.error.is_empty() { Ok(stream) } else { Err(reply.error) }
}

fn answer(stream: &UnixStream) -> AttachReply {
    let (bytes, _) = recv_fds(stream, Instant::now() + DEADLINE).expect("an answer");
    AttachReply::decode(bytes.as_slice()).expect("an AttachReply")
}

fn tell(stream: &UnixStream, files: &[BorrowedFd<'_>]) -> AttachReply {
    send_fds(stream, &[], files, Instant::now() + DEADLINE).expect("room in the socket");
    answer(stream)
}

#[test]
fn what_lies_in_lent_memory_is_stored_and_found() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let lender = Lender::new(&place, "a");
    let (number, memory) = lender.lend(&place);
    (0..3).for_each(|seed| memory.write(4096 + seed * BYTES, &pattern(seed, BYTES)));
    let stored = lender.put(&[0, 1, 2], number, 4096).expect("a put");
    assert!(stored.outcomes().all(|outcome| outcome == CommitOutcome::CommitStored), "{stored:?}");
    (0..3).for_each(|seed| assert_eq!(lender.stored(seed), pattern(seed, BYTES)));
    memory.write(0, &vec![0; LENT_BYTES as usize]);
    let found = lender.get(&[2, 9, 0], Some(LentPlace { memory: number, offset: 8192 })).expect("a get");
    assert_eq!((found.found, found.blocks.len()), (vec![0, 2], 0));
    for (index, (at, seed)) in [(0, 2), (2, 0)].into_iter().enumerate() {
        let mut bytes = vec![0; BYTES as usize];
        memory.read(8192 + at * BYTES, &mut bytes);
        assert_eq!(bytes, pattern(seed, BYTES));
        assert_eq!(found.checksums[index], checksum(&bytes));
    }
}

#[test]
fn no_call_reaches_beyond_the_memory() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let lender = Lender::new(&place, "a");
    let (memory, _lent) = lender.lend(&place);
    for offset in [LENT_BYTES, LENT_BYTES - BYTES + 1, u64::MAX, u64::MAX - BYTES + 1] {
        let put = lender.put(&[1], memory, offset).unwrap_err();
        let get = lender.get(&[1], Some(LentPlace { memory, offset })).unwrap_err();
        assert_eq!([put.code(), get.code()], [tonic::Code::InvalidArgument; 2], "{offset}");
    }
    let seeds: Vec<u64> = (0..=LENT_BYTES / BYTES).collect();
    assert_eq!(lender.put(&seeds, memory, 0).unwrap_err().code(), tonic::Code::InvalidArgument);
    Lender::new(&place, "b").lend(&place);
}

/// The call of a client that gave it up may come when the client has lent other memory.
#[test]
fn a_call_touches_no_memory_but_the_one_it_names() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (lender, other) = (Lender::new(&place, "a"), Lender::new(&place, "b"));
    let (old, _old) = lender.lend(&place);
    let (new, memory) = lender.lend(&place);
    memory.write(0, &pattern(1, BYTES));
    lender.put(&[1], new, 0).expect("a put");
    memory.write(0, &[7; BYTES as usize]);
    let gone = lender.get(&[1], Some(LentPlace { memory: old, offset: 0 })).unwrap_err();
    let others = other.get(&[1], Some(LentPlace { memory: new, offset: 0 })).unwrap_err();
    assert_eq!([gone.code(), others.code()], [tonic::Code::NotFound; 2]);
    let mut bytes = vec![0; BYTES as usize];
    memory.read(0, &mut bytes);
    assert_eq!(bytes, [7; BYTES as usize]);
}

#[test]
fn memory_is_lent_with_the_token_of_the_session_alone() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (lender, other) = (Lender::new(&place, "a"), Lender::new(&place, "b"));
    let foreign = Lending { session: lender.client.welcome.session, ..other.lending() };
    assert!(ask(&place, foreign).unwrap_err().contains("token"));
    assert!(ask(&place, Lending { token: Vec::new(), ..lender.lending() }).unwrap_err().contains("token"));
    let ended = Lending { session: 1 << 40, ..lender.lending() };
    assert!(ask(&place, ended).unwrap_err().contains("the session has ended"));
}

#[test]
fn other_descriptors_are_refused_and_the_daemon_serves_on() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let lender = Lender::new(&place, "a");
    let (pipe, _writer) = std::io::pipe().unwrap();
    let zeros = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let stream = || ask(&place, lender.lending()).expect("a daemon that takes memory");
    for other in [pipe.as_fd(), zeros.as_fd(), stream().as_fd()] {
        assert!(tell(&stream(), &[other]).error.contains("no memory of small pages"));
    }
    assert!(tell(&stream(), &[]).error.contains("one descriptor"));
    assert!(tell(&stream(), &[zeros.as_fd(); 8]).error.contains("one descriptor"));
    let unsealed = Memory::make(LENT_BYTES).unwrap();
    let stream = stream();
    assert_eq!(tell(&stream, &[unsealed.file()]).error, "");
    assert!(tell(&stream, &[]).error.contains("not sealed"));
    lender.lend(&place);
    Lender::new(&place, "b").lend(&place);
}

/// A thousand memories of one session cost the daemon no descriptor.
#[test]
fn a_session_has_one_memory_however_often_it_lends() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let lender = Lender::new(&place, "a");
    let (first, _) = lender.lend(&place);
    let mappings = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).expect("the daemon's mappings");
        maps.lines().filter(|line| line.contains("memfd:forebay-client")).count()
    };
    let files = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("the daemon's files").count();
    let before = files();
    let (last, _) = (0..200).map(|_| lender.lend(&place)).last().expect("some");
    assert!(last != first);
    wait_until("the others are unmapped", || mappings() == 1);
    wait_until("their connections are closed", || files() <= before + 2);
    drop(lender);
    wait_until("the last goes with its session", || mappings() == 0);
}

/// Stops the writer however the test ends: a scope waits for its threads.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whatever the client writes meanwhile, the block is one that its checksum says.
#[test]
fn a_client_that_writes_while_the_daemon_copies_hurts_its_own_block_alone() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let lender = Lender::new(&place, "a");
    let (number, memory) = lender.lend(&place);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0u8;
            while !is_over.load(Ordering::Relaxed) {
                byte = byte.wrapping_add(1);
                memory.write(0, &[byte; BYTES as usize]);
            }
        });
        let _over = Over(&is_over);
        for seed in 100..200 {
            lender.put(&[seed], number, 0).expect("a put");
            assert_eq!(lender.stored(seed).len() as u64, BYTES);
        }
    });
    let audit = call!(lender.client, audit, AuditRequest {}).expect("an audit");
    assert_eq!((audit.corrupt, audit.blocks), (0, 100), "{audit:?}");
}

/// Numbers of sessions count up, and a number of memory may leak: neither is a right.
#[test]
fn no_other_user_can_name_the_memory_of_a_session() {
    if !rustix::process::geteuid().is_root() {
        // Another user is needed, and root alone can be one.
        return;
    }
    let place = Place::new();
    let allowing = [SMALL, &["--socket.allow_uids", "[65534]"]].concat();
    let _daemon = Daemon::start_after(&place, &allowing, "umask 022");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.sockets().parent().expect("the place"), open).expect("it is ours");
    let lender = Lender::new(&place, "a");
    let (number, memory) = lender.lend(&place);
    memory.write(0, &pattern(1, BYTES));
    lender.put(&[1], number, 0).expect("a put");
    memory.write(0, &[7; BYTES as usize]);
    let (session, namespace) = (lender.client.welcome.session, lender.namespace);
    let other = || {
        let nobody = Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        let mut spy = Lender { client: Client::open(&place, "b", 0), namespace };
        // Its calls may name the session of another user, whose namespaces are no secret either.
        spy.client.welcome.session = session;
        let lent = LentPlace { memory: number, offset: 0 };
        assert_eq!(spy.stored(1), pattern(1, BYTES));
        [spy.put(&[2], number, 0).map(drop), spy.get(&[1], Some(lent)).map(drop)].map(|call| call.unwrap_err().code())
    };
    let refused = std::thread::scope(|scope| scope.spawn(other).join().expect("the other user is refused"));
    assert_eq!(refused, [tonic::Code::NotFound; 2]);
    let mut bytes = vec![0; BYTES as usize];
    memory.read(0, &mut bytes);
    assert_eq!(bytes, [7; BYTES as usize]);
    let found = lender.get(&[2], None).expect("an answer");
    assert_eq!(found.blocks.len(), 0, "nothing of the memory was stored");
}

#[test]
fn a_user_lends_no_more_than_the_limit_and_inspect_shows_it() {
    let place = Place::new();
    let limit = ["--limits.lent_bytes_per_user", "3MiB"];
    let _daemon = Daemon::start(&place, &[SMALL, &limit].concat());
    let lenders: Vec<Lender> = (0..4).map(|number| Lender::new(&place, &format!("{number}"))).collect();
    let lent: Vec<_> = lenders[..3].iter().map(|lender| lender.lend(&place)).collect();
    let of_user = || lenders[0].client.inspect().users.pop().expect("this user");
    let refused = ask(&place, lenders[3].lending()).unwrap_err();
    assert!(refused.contains("too much memory"), "{refused}");
    let user = of_user();
    assert_eq!((user.lent_bytes, user.refused.get("lent_bytes_per_user")), (3 * LENT_BYTES, Some(&1)));
    for bytes in [0, 1, 65 << 20, u64::MAX] {
        let wrong = ask(&place, Lending { bytes, ..lenders[0].lending() }).unwrap_err();
        assert!(wrong.contains("cannot have this size"), "{wrong}");
    }
    drop(lent);
    let mut lenders = lenders;
    drop(lenders.remove(1));
    wait_until("the memory of the session that ended is given back", || {
        lenders[0].client.inspect().users.pop().expect("this user").lent_bytes == 2 * LENT_BYTES
    });
    lenders[2].lend(&place);
}

/// Its descriptor, or its seals, never come: the daemon forgets it in time, and serves its user meanwhile.
#[test]
fn a_client_that_stops_half_way_is_forgotten() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (silent, other) = (Lender::new(&place, "a"), Lender::new(&place, "b"));
    let waiting: Vec<UnixStream> = (0..3).map(|_| ask(&place, silent.lending()).expect("it may lend")).collect();
    let (number, memory) = other.lend(&place);
    memory.write(0, &pattern(1, BYTES));
    other.put(&[1], number, 0).expect("a put");
    for stream in &waiting {
        assert!(answer(stream).error.contains("did not answer in time"));
    }
    wait_until("it counts no more", || other.client.inspect().users.pop().expect("this user").lent_bytes == LENT_BYTES);
}

/// A client that dies while the daemon copies takes no page away from under it.
#[test]
fn a_client_that_dies_leaves_a_daemon_that_serves() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    for round in 0..20 {
        let lender = Lender::new(&place, &format!("{round}"));
        let (number, memory) = lender.lend(&place);
        memory.write(0, &pattern(round, BYTES));
        let (session, namespace) = (lender.client.welcome.session, lender.namespace);
        let block = Block { hash: hash(round).to_vec(), data: Vec::new() };
        let lent = Some(LentPlace { memory: number, offset: 0 });
        let request =
            PutRequest { session, namespace, group: 0, predecessor: Vec::new(), blocks: vec![block; 16], lent };
        let mut rpc = lender.client.rpc.clone();
        let time = Duration::from_micros(200 * round);
        let _given_up = lender.client.runtime.block_on(async { tokio::time::timeout(time, rpc.put(request)).await });
        drop((lender, memory));
    }
    let last = Lender::new(&place, "last");
    last.lend(&place);
    let audit = call!(last.client, audit, AuditRequest {}).expect("an audit");
    assert_eq!(audit.corrupt, 0, "{audit:?}");
    wait_until("only the last memory counts", || {
        last.client.inspect().users.pop().expect("this user").lent_bytes == LENT_BYTES
    });
}
