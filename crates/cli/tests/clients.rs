//! What one user, or one connection, can take of the shipped daemon, and what it cannot take from others.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_rpc::proto::*;
use forebay_rpc::{ATTACH_SOCKET, RPC_SOCKET};
use rustix::process::{Pid, Resource, Rlimit, Signal, Uid, kill_process};
use support::*;

const SMALL: &[&str] = &["--pool.capacity_bytes", "64MiB"];
/// Of one block that nearly fills a message.
const LARGE: u64 = 15 << 20;
const NOBODY: u32 = 65_534;

fn serves(place: &Place, who: &str) {
    let (client, worker) = engine(place, who, 4096);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 9);
    client.commit(namespace, &[hash(9)], &slots);
    let reply = client.lookup(namespace, &[hash(9)]);
    assert_eq!(worker.read(reply.groups[0].slots()[0]), pattern(9, 4096));
}

fn is_healthy(place: &Place) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.env_clear().env("FOREBAY_CONFIG", "").arg("health").arg("--socket.directory").arg(place.sockets());
    let answer = command.output().expect("it runs");
    assert!(answer.status.success(), "{}{}", text(&answer.stdout), text(&answer.stderr));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// This process may have so many files open.
fn allow_files(files: u64) {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let current = limit.current.map(|current| current.max(files));
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current, ..limit }).expect("the hard limit allows it");
}

fn connect_idle(place: &Place, socket: &str, count: usize) -> Vec<UnixStream> {
    (0..count).map(|_| UnixStream::connect(place.sockets().join(socket)).expect("the daemon listens")).collect()
}

/// Whether the daemon has closed it.
fn is_closed(mut stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).expect("it is ours");
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return true,
            // The daemon's settings, say.
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
            Err(_) => return true,
        }
    }
}

fn plain_namespace(client: &Client, bytes: u64) -> u32 {
    client.namespace("plain", vec![Group { rank_bytes: vec![bytes], ..group() }]).expect("a namespace")
}

fn put_request(client: &Client, namespace: u32, seed: u64, bytes: u64) -> PutRequest {
    let blocks = vec![Block { hash: hash(seed).to_vec(), data: pattern(seed, bytes) }];
    PutRequest { session: client.welcome.session, namespace, group: 0, predecessor: vec![], blocks, lent: None }
}

#[test]
fn idle_connections_shut_out_neither_engines_nor_probes() {
    allow_files(4096);
    let place = Place::new();
    let mut daemon = Daemon::start_after(&place, SMALL, "ulimit -Sn 1024");
    let idle = [RPC_SOCKET, ATTACH_SOCKET].map(|socket| connect_idle(&place, socket, 1100));
    serves(&place, "a");
    is_healthy(&place);
    assert!(daemon.is_running());
    drop(idle);
    serves(&place, "b");
}

#[test]
fn forty_puts_at_once_take_little_memory() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let clients: Vec<(Client, PutRequest)> = (0..40)
        .map(|seed| {
            let client = Client::open(&place, &format!("plain{seed}"), 0);
            let request = put_request(&client, plain_namespace(&client, LARGE), seed, LARGE);
            (client, request)
        })
        .collect();
    let before = anonymous_kib(&daemon);
    let mut most = 0;
    std::thread::scope(|scope| {
        let put = |(client, request): (Client, PutRequest)| {
            scope.spawn(move || {
                // Its session lives as long as all of it.
                let client = client;
                call!(client, put, request).expect("it waits its turn").outcomes().collect::<Vec<_>>()
            })
        };
        let puts: Vec<_> = clients.into_iter().map(put).collect();
        while puts.iter().any(|put| !put.is_finished()) {
            most = most.max(anonymous_kib(&daemon));
            std::thread::sleep(Duration::from_millis(1));
        }
        for put in puts {
            assert_eq!(put.join().expect("a client").len(), 1);
        }
    });
    assert!(most.saturating_sub(before) < 150 << 10, "{before} KiB grew to {most} KiB");
}

#[test]
fn a_message_of_empty_entries_is_refused_before_it_takes_memory() {
    let place = Place::new();
    let daemon = Daemon::start(&place, SMALL);
    let client = Client::open(&place, "plain", 0);
    let session = client.welcome.session;
    // 2 MiB on the wire each, and fifty times as much once decoded.
    let groups = vec![GroupBlocks::default(); 1_000_000];
    let commit = CommitRequest { session, namespace: 0, groups };
    let put = PutRequest { session, blocks: vec![Block::default(); 1_000_000], ..Default::default() };
    let before = anonymous_kib(&daemon);
    let mut most = 0;
    let mut refused = Vec::new();
    std::thread::scope(|scope| {
        let calls = [
            scope.spawn(|| call!(client, commit, commit).expect_err("it is refused")),
            scope.spawn(|| call!(client, put, put).expect_err("it is refused")),
        ];
        while calls.iter().any(|call| !call.is_finished()) {
            most = most.max(anonymous_kib(&daemon));
            std::thread::sleep(Duration::from_millis(1));
        }
        refused.extend(calls.map(|call| call.join().expect("a client")));
    });
    for refused in refused {
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("too much memory"), "{refused}");
    }
    assert!(most.saturating_sub(before) < 40 << 10, "{before} KiB grew to {most} KiB");
    serves(&place, "a");
}

/// Memory of the daemon's own, without the pool.
fn anonymous_kib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel tells");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn clients_that_map_nothing_take_no_place_of_an_engine() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &[SMALL, &["--limits.engines", "2"]].concat());
    let plain: Vec<Client> = (0..70).map(|n| Client::open(&place, &format!("plain{n}"), 0)).collect();
    let waiting: Vec<Client> = (0..10).map(|n| Client::open(&place, &format!("waiting{n}"), 1)).collect();
    let _first = engine(&place, "a", 4096);
    let _second = engine(&place, "b", 4096);
    let third = Worker::attach(&place, Worker::request("c", 0, 1, 4096), None);
    assert!(third.reply.error.contains("too many engines"), "{}", third.reply.error);
    drop((plain, waiting));
}

#[test]
fn a_connection_that_asks_for_nothing_is_closed_and_one_with_a_session_is_not() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &[SMALL, &["--limits.idle_seconds", "1"]].concat());
    let (client, worker) = engine(&place, "a", 4096);
    let silent = [RPC_SOCKET, ATTACH_SOCKET].map(|socket| connect_idle(&place, socket, 1));
    let mut trickling = Raw::connect(&place);
    wait_until("silent connections are closed", || {
        // A byte now and then is no call.
        let _ = trickling.0.write_all(&[0]);
        silent.iter().flatten().all(is_closed) && is_closed(&trickling.0)
    });
    let namespace = client.namespace("t", vec![group()]).expect("its session is there");
    assert!(!client.reserve(namespace, 1).is_empty());
    drop(worker);
}

#[test]
fn a_place_is_free_when_its_client_is_gone_or_has_said_all() {
    let place = Place::new();
    let limits = ["--limits.connections_per_user", "3", "--limits.sessions_per_user", "2"];
    let _daemon = Daemon::start(&place, &[SMALL, &limits].concat());
    let watcher = Client::open(&place, "watcher", 0);
    for _ in 0..10 {
        let client = Client::open(&place, "a", 0);
        let refused = Client::try_open(&place, Client::request("b", 0, 0)).err().expect("there are two");
        let told = forebay_rpc::from_status(refused).told();
        assert!(told.contains("too many sessions") && told.contains("`limits.sessions_per_user`"), "{told}");
        drop(client);
        wait_until("its session has ended", || user(&watcher).sessions == 1);
    }
    let mut half_closed = Raw::connect(&place);
    half_closed.call(1, "OpenSession");
    half_closed.0.shutdown(std::net::Shutdown::Write).expect("it is connected");
    wait_until("the half-closed connection has ended", || is_closed(&half_closed.0));
    wait_until("its place is free", || user(&watcher).connections == 1);
}

/// What the user of this process has of the daemon.
fn user(client: &Client) -> UserInfo {
    let own = rustix::process::geteuid().as_raw();
    client.inspect().users.into_iter().find(|user| user.uid == own).expect("it is connected")
}

#[test]
fn what_one_user_takes_is_taken_from_no_other() {
    if !rustix::process::geteuid().is_root() {
        // Another user is needed, and root alone can be one.
        return;
    }
    let place = Place::new();
    let limits = ["--limits.connections_per_user", "10", "--limits.engines", "12"];
    let allowing = ["--socket.allow_uids", "[65534]"];
    let _daemon = Daemon::start_after(&place, &[SMALL, &limits, &allowing].concat(), "umask 022");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.sockets().parent().expect("the place"), open).expect("it is ours");
    let place = &place;
    std::thread::scope(|scope| {
        let (taken, is_taken) = std::sync::mpsc::channel();
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let hog = scope.spawn(move || {
            let nobody = Uid::from_raw(NOBODY);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            let held = take_all(place);
            taken.send(()).expect("it waits");
            // Held until the others are done.
            let _ = is_over.recv();
            drop(held);
        });
        // An error means that the hog has failed, which says why.
        if is_taken.recv().is_ok() {
            serves(place, "a");
            is_healthy(place);
        }
        drop(over);
        hog.join().expect("the other user is refused as it should be");
    });
}

/// All that a user can take: numbers of engines first, then connections with sessions.
fn take_all(place: &Place) -> (Vec<Worker>, Vec<Client>) {
    let (mut workers, mut clients) = (Vec::new(), Vec::new());
    let refused = loop {
        let worker = Worker::attach(place, Worker::request(&format!("n{}", workers.len()), 0, 1, 4096), None);
        match worker.reply.error.is_empty() {
            true => workers.push(worker),
            false => break worker.reply.error,
        }
    };
    // Four numbers are the other user's.
    assert!(workers.len() == 8 && refused.contains("too many engines"), "{}: {refused}", workers.len());
    let refused = loop {
        match Client::try_open(place, Client::request(&format!("c{}", clients.len()), 0, 0)) {
            Ok(client) => clients.push(client),
            Err(refused) => break forebay_rpc::from_status(refused).told(),
        }
    };
    let wanted = ["too many connections of this user", "65534", "`limits.connections_per_user`"];
    assert!(clients.len() == 2 && wanted.iter().all(|part| refused.contains(part)), "{}: {refused}", clients.len());
    let health = runtime().block_on(async { connect(&place.sockets()).await.health(HealthRequest {}).await });
    assert!(health.expect("a probe gets through").into_inner().live.iter().all(|check| check.finding == "ok"));
    let told = clients[0].inspect().users.into_iter().find(|user| user.uid == NOBODY).expect("it is told of");
    assert_eq!((told.connections, told.sessions), (10, 2));
    assert!(told.refused["connections_per_user"] >= 1 && told.refused["engines"] == 1, "{told:?}");
    (workers, clients)
}

/// Opens namespaces of another user than root, each with a block if `has_block`, up to the first that is refused.
fn take_namespaces(place: &Place, from: u64, most: u64, has_block: bool) -> (u64, String) {
    let take = || {
        let nobody = Uid::from_raw(NOBODY);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        let client = Client::open(place, "hog", 0);
        for number in from..from + most {
            let groups = vec![Group { rank_bytes: vec![64], ..group() }];
            let namespace = match client.namespace(&number.to_string(), groups) {
                Ok(namespace) => namespace,
                Err(refused) => return (number - from, forebay_rpc::from_status(refused).told()),
            };
            if has_block {
                let reply = call!(client, put, put_request(&client, namespace, number, 64)).expect("a put");
                assert_eq!(reply.outcomes().collect::<Vec<_>>(), [CommitOutcome::CommitStored]);
            }
        }
        (most, String::new())
    };
    std::thread::scope(|scope| scope.spawn(take).join().expect("it is refused or not"))
}

#[test]
fn a_user_who_fills_its_namespaces_keeps_none_from_another() {
    if !rustix::process::geteuid().is_root() {
        // As above.
        return;
    }
    let place = Place::new();
    let arguments = [SMALL, &["--socket.allow_uids", "[65534]"]].concat();
    let daemon = Daemon::start_after(&place, &arguments, "umask 022");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.sockets().parent().expect("the place"), open).expect("it is ours");
    // What holds no block and is open in no session gives way.
    assert_eq!(take_namespaces(&place, 0, 2000, false).0, 2000);
    // 64 of the 1,024 are root's.
    let (taken, refused) = take_namespaces(&place, 10_000, 2000, true);
    assert_eq!(taken, 960, "{refused}");
    assert!(["namespace", "65534", "hint: purge"].iter().all(|part| refused.contains(part)), "{refused}");
    serves(&place, "a");
    // The pool remembers whose they are.
    daemon.kill();
    let _daemon = Daemon::start_after(&place, &arguments, "umask 022");
    assert_eq!(take_namespaces(&place, 20_000, 1, true).0, 0);
    let client = Client::open(&place, "b", 0);
    for number in 0..63 {
        let namespace = client.namespace(&format!("r{number}"), vec![Group { rank_bytes: vec![64], ..group() }]);
        let put = put_request(&client, namespace.expect("it is root's"), number, 64);
        call!(client, put, put).expect("a put");
    }
}

#[test]
fn a_worker_that_hangs_after_its_session_keeps_no_other_engine_from_storing() {
    const BYTES: u64 = 1 << 20;
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, _hung) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let mut held = 0;
    wait_until("it holds a quarter of the pool", || {
        held += client.reserve(namespace, 64).len();
        held >= 16
    });
    drop(client);
    let (client, worker) = engine(&place, "b", BYTES);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let mut slots = Vec::new();
    wait_until("the others store as before", || {
        slots.extend(client.reserve(namespace, 4));
        slots.len() >= 4
    });
    worker.fill(&slots[0], 9);
    client.commit(namespace, &[hash(9)], &slots[..1]);
}

const HOARD: &str = "FOREBAY_TEST_HOARD";
const MIB: u64 = 1 << 20;

/// Plays the part of an engine that reserves all it gets and fills nothing; a test of its own only for being started
/// by one.
#[test]
fn hoarder() {
    let Some(root) = std::env::var_os(HOARD) else { return };
    let place = Place::of(root.as_ref());
    let (client, _worker) = engine(&place, "hoarder", MIB);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let parent = rustix::process::getppid();
    while rustix::process::getppid() == parent {
        client.reserve(namespace, 64);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Killed when dropped.
struct Hoarder(Child);

impl Hoarder {
    /// Returns when it has what it can get.
    fn start(place: &Place, watcher: &Client, most_bytes: u64) -> Hoarder {
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.args(["--exact", "hoarder"]).env(HOARD, place.root()).stdout(Stdio::null());
        let hoarder = Hoarder(command.spawn().expect("this test, once more"));
        wait_until("it has all that it can get", || watcher.inspect().pinned_bytes >= most_bytes);
        hoarder
    }

    fn stop(&self) {
        kill_process(Pid::from_child(&self.0), Signal::STOP).expect("it lives");
        let stat = format!("/proc/{}/stat", self.0.id());
        let is_stopped = |stat: String| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"));
        wait_until("it is stopped", || std::fs::read_to_string(&stat).is_ok_and(is_stopped));
    }
}

impl Drop for Hoarder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_engine_that_fills_nothing_keeps_no_other_from_storing_while_it_runs_or_is_stopped_or_killed() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, worker) = engine(&place, "engine", MIB);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let mut seed = 0;
    let mut stores = |least: usize| {
        let mut slots = Vec::new();
        wait_until("it has slots", || {
            slots.extend(client.reserve(namespace, 64));
            slots.len() >= least
        });
        for held in &slots {
            worker.fill(held, seed);
            assert_eq!(client.commit(namespace, &[hash(seed)], &[*held]), [CommitOutcome::CommitStored]);
            let reply = client.lookup(namespace, &[hash(seed)]);
            assert_eq!(worker.read(reply.groups[0].slots()[0]), pattern(seed, MIB));
            client.release(reply.lease);
            seed += 1;
        }
    };
    // A quarter of the pool's 64 blocks, and of an eighth beyond it what is left to others.
    let hoarder = Hoarder::start(&place, &client, 16 * MIB);
    // Twice the pool, so that all that can be evicted is.
    (0..64).for_each(|_| stores(2));
    hoarder.stop();
    (0..64).for_each(|_| stores(2));
    drop(hoarder);
    stores(16);
}

#[test]
fn a_trial_leaves_no_namespace_behind_however_many_it_opens() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let request = OpenSessionRequest { is_trial: true, ..Client::request("trial", 0, 0) };
    let trial = Client::try_open(&place, request).expect("a session");
    let opened = (0..300).take_while(|number| {
        trial.namespace(&number.to_string(), vec![Group { rank_bytes: vec![64], ..group() }]).is_ok()
    });
    assert_eq!(opened.count(), 256);
    drop(trial);
    let client = Client::open(&place, "a", 0);
    wait_until("all of them are gone", || client.inspect().namespaces.is_empty());
}

#[test]
fn answers_that_nobody_reads_cost_their_own_client_its_connection() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &[SMALL, &["--limits.call_bytes_per_user", "16MiB"]].concat());
    // HTTP/2 lets the daemon send 64 KiB of each answer, and the socket takes a little more.
    let mut deaf = Raw::connect(&place);
    for stream in (1..80).step_by(2) {
        deaf.call(stream, "Ping");
        // One MiB, please.
        deaf.message(stream, &[0x10, 0x80, 0x80, 0x40]);
    }
    let ask = || {
        runtime().block_on(async {
            let request = PingRequest { filler: vec![0; 1 << 20], reply_bytes: 0 };
            connect(&place.sockets()).await.ping(request).await
        })
    };
    wait_until("the user's bytes are taken", || ask().is_err());
    let told = forebay_rpc::from_status(ask().expect_err("nothing was read")).told();
    assert!(
        told.contains("too many bytes of this user's calls") && told.contains("limits.call_bytes_per_user"),
        "{told}"
    );
    is_healthy(&place);
    wait_until("the connection is closed", || is_closed(&deaf.0));
    wait_until("the bytes are free", || ask().is_ok());
}

#[test]
fn a_message_that_does_not_come_costs_its_own_call_its_room() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let client = Client::open(&place, "a", 0);
    let request = put_request(&client, plain_namespace(&client, LARGE), 1, LARGE);
    let mut slow = Raw::connect(&place);
    for stream in [1, 3] {
        slow.call(stream, "Put");
        slow.length(stream, LARGE);
    }
    wait_until("it has all the room", || user(&client).bytes >= 2 * LARGE);
    let outcomes = call!(client, put, request).expect("it gets room in the end").outcomes().collect::<Vec<_>>();
    assert_eq!(outcomes, [CommitOutcome::CommitStored]);
    is_healthy(&place);
}

#[test]
fn calls_beyond_the_limit_are_refused_and_a_probe_is_not() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &[SMALL, &["--limits.calls_per_user", "8"]].concat());
    let client = Client::open(&place, "a", 0);
    let mut slow = Raw::connect(&place);
    let mut streams = (1..).step_by(2);
    let mut hang = |slow: &mut Raw| slow.call(streams.next().expect("there are many"), "Lookup");
    (0..20).for_each(|_| hang(&mut slow));
    let mut told = String::new();
    wait_until("calls are refused", || match call!(client, inspect, InspectRequest {}) {
        // It may have had the last place when the others came.
        Ok(_) => {
            hang(&mut slow);
            false
        }
        Err(refused) => {
            told = forebay_rpc::from_status(refused).told();
            true
        }
    });
    assert!(told.contains("too many calls of this user") && told.contains("limits.calls_per_user"), "{told}");
    is_healthy(&place);
    drop(slow);
    wait_until("its calls have ended", || call!(client, inspect, InspectRequest {}).is_ok());
}

/// A client of HTTP/2 that says no more than it is told to.
struct Raw(UnixStream);

impl Raw {
    fn connect(place: &Place) -> Raw {
        let mut stream = UnixStream::connect(place.sockets().join(RPC_SOCKET)).expect("the daemon listens");
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("it reads");
        let mut raw = Raw(stream);
        raw.frame(4, 0, 0, &[]);
        raw
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.0.write_all(&frame).expect("it reads");
    }

    /// Begins a call; each needs a stream of its own, 1, 3, 5 and so on.
    fn call(&mut self, stream: u32, method: &str) {
        let mut headers = vec![0x83, 0x86];
        let path = format!("/forebay.v1.Forebay/{method}");
        headers.extend([0x04, path.len() as u8]);
        headers.extend(path.as_bytes());
        headers.extend([0x0f, 0x10, 16]);
        headers.extend(b"application/grpc");
        headers.extend(b"\x00\x02te\x08trailers");
        self.frame(1, 4, stream, &headers);
    }

    fn message(&mut self, stream: u32, message: &[u8]) {
        self.length(stream, message.len() as u64);
        self.frame(0, 1, stream, message);
    }

    /// Says how long the call's message is.
    fn length(&mut self, stream: u32, length: u64) {
        let mut prefix = vec![0];
        prefix.extend((length as u32).to_be_bytes());
        self.frame(0, 0, stream, &prefix);
    }
}
