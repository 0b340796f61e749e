//! Bad input at every door of the shipped daemon: a clear error, and it serves on.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_rpc::proto::*;
use forebay_rpc::{ATTACH_SOCKET, RPC_SOCKET};
use support::*;

const SMALL: &[&str] = &["--pool.capacity_bytes", "32MiB"];

/// Somebody else's engine goes on.
fn serves(place: &Place, who: &str) {
    let (client, worker) = engine(place, who, 4096);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 9);
    client.commit(namespace, &[hash(9)], &slots);
    let reply = client.lookup(namespace, &[hash(9)]);
    assert_eq!(worker.read(reply.groups[0].slots()[0]), pattern(9, 4096));
}

#[test]
fn random_bytes_at_both_sockets_harm_nobody() {
    let place = Place::new();
    let mut daemon = Daemon::start(&place, SMALL);
    for seed in 0..40 {
        for name in [RPC_SOCKET, ATTACH_SOCKET] {
            let mut stream = UnixStream::connect(place.sockets().join(name)).unwrap();
            stream.set_read_timeout(Some(std::time::Duration::from_millis(20))).unwrap();
            let _ = stream.write_all(&pattern(seed, 1 + seed * 97));
            let _ = stream.read(&mut [0; 512]);
        }
    }
    assert!(daemon.is_running(), "{}", daemon.log());
    serves(&place, "a");
}

#[test]
fn connections_that_fail_fill_no_log() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[SMALL, &["--log.level", "info"]].concat());
    let connect = || UnixStream::connect(place.sockets().join(ATTACH_SOCKET)).unwrap();
    let warnings = || daemon.log().lines().filter(|line| line.contains("WARN")).map(str::to_owned).collect::<Vec<_>>();
    // Probes connect, and say nothing.
    (0..300).for_each(|_| drop(connect()));
    // The daemon accepts in order: when it has answered the last, it is done with the others.
    let talk = |bytes: &[u8]| {
        let mut stream = connect();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.read(&mut [0; 512])
    };
    assert_eq!(talk(&u32::MAX.to_le_bytes()).unwrap(), 0);
    wait_until("the last is told of", || !warnings().is_empty());
    let first = warnings();
    assert!(first.len() == 1 && first[0].contains("a worker's message is too long"), "{first:#?}");
    (0..300).for_each(|_| assert_eq!(talk(&u32::MAX.to_le_bytes()).unwrap(), 0));
    let told = warnings();
    assert!(told.len() < 10 && told.iter().all(|line| !line.contains("hint=\"\"")), "{told:#?}");
    serves(&place, "a");
}

#[test]
fn a_worker_that_lies_is_told_what_is_wrong() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let good = || Worker::request("liar", 0, 1, 4096);
    let lies: Vec<(&str, AttachRequest)> = vec![
        ("rank", AttachRequest { rank: 1, ..good() }),
        ("rank", AttachRequest { ranks: 0, ..good() }),
        ("rank", AttachRequest { ranks: 1_000_000, ..good() }),
        ("engine id", AttachRequest { engine_id: String::new(), ..good() }),
        ("engine id", AttachRequest { engine_id: "x".repeat(65), ..good() }),
        ("incarnation", AttachRequest { incarnation: vec![], ..good() }),
        ("incarnation", AttachRequest { incarnation: vec![0; 16], ..good() }),
        ("incarnation", AttachRequest { incarnation: vec![1; 17], ..good() }),
        ("protocol", AttachRequest { protocol: 99, ..good() }),
        ("groups", AttachRequest { groups: vec![], ..good() }),
        (
            "512 MiB",
            AttachRequest { groups: vec![RankGroup { group: 0, bytes: u64::MAX, is_replicated: false }], ..good() },
        ),
        ("512 MiB", AttachRequest { groups: vec![RankGroup { group: 0, bytes: 0, is_replicated: false }], ..good() }),
    ];
    for (word, request) in lies {
        let worker = Worker::attach(&place, request.clone(), None);
        assert!(worker.reply.error.contains(word), "{request:?} was answered with `{}`", worker.reply.error);
        assert!(!worker.reply.has_files);
    }
    serves(&place, "a");
}

#[test]
fn an_engine_that_lies_about_sizes_is_refused() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, _worker) = engine(&place, "a", 4096);
    client.namespace("t", vec![group()]).unwrap();
    let (other, _other_worker) = engine(&place, "b", 8192);
    let refused = other.namespace("t", vec![group()]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("block sizes"), "{refused}");
    let told = forebay_rpc::from_status(refused).told();
    for part in ["group 0: 4096 bytes of ", "group 0: 8192 bytes of ", "another `revision`"] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    let undeclared = Group { group: 5, ..group() };
    assert_eq!(other.namespace("u", vec![undeclared]).unwrap_err().code(), tonic::Code::InvalidArgument);
    let larger_than_the_pool = Group { rank_bytes: vec![256 << 20], ..group() };
    let plain = Client::open(&place, "plain", 0);
    assert!(plain.namespace("v", vec![larger_than_the_pool]).is_err());
    let namespace = plain.namespace("v", vec![Group { rank_bytes: vec![4096], ..group() }]).unwrap();
    let good = Block { hash: hash(1).to_vec(), data: vec![0; 4096] };
    let of_another_size = Block { hash: hash(2).to_vec(), data: vec![0; 1000] };
    let of_another_length = Block { hash: vec![2; 16], data: vec![0; 4096] };
    let put = |second: Block| PutRequest {
        session: plain.welcome.session,
        namespace,
        group: 0,
        predecessor: vec![],
        blocks: vec![good.clone(), second],
        lent: None,
    };
    for second in [of_another_size, of_another_length, Block::default()] {
        assert_eq!(call!(plain, put, put(second)).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    let hashes = hash(1).to_vec();
    let get = GetRequest { session: plain.welcome.session, namespace, group: 0, hash_bytes: 32, hashes, lent: None };
    let reply = call!(plain, get, get).unwrap();
    assert!(reply.blocks.is_empty(), "a refused call stores none of its blocks");
}

#[test]
fn malformed_calls_are_errors_for_the_caller_alone() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, _worker) = engine(&place, "a", 4096);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let session = client.welcome.session;
    let lookup = |group: u32, hash_bytes: u32, bytes: usize| LookupRequest {
        session,
        namespace,
        groups: vec![GroupKeys { group, hash_bytes, hashes: vec![1; bytes] }],
    };
    for request in
        [lookup(0, 0, 32), lookup(0, 33, 66), lookup(0, 32, 33), lookup(70_000, 32, 32), lookup(0, 1, 70_000)]
    {
        assert_eq!(call!(client, lookup, request).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    let unknown_session = LookupRequest { session: 999, ..lookup(0, 32, 32) };
    assert_eq!(call!(client, lookup, unknown_session).unwrap_err().code(), tonic::Code::NotFound);
    let unknown_namespace = LookupRequest { namespace: 9, ..lookup(0, 32, 32) };
    assert_eq!(call!(client, lookup, unknown_namespace).unwrap_err().code(), tonic::Code::NotFound);
    // An unknown group and no keys at all are just misses.
    for request in [lookup(3, 32, 64), lookup(0, 32, 0)] {
        let mut replies = call!(client, lookup, request).unwrap();
        let reply = client.next(&mut replies, DEADLINE).unwrap().unwrap();
        assert!(reply.groups[0].states.is_empty());
    }
    let hint = |request: u64, group: u32, bytes: usize| HintRequest {
        session,
        namespace,
        withdrawn: vec![request, 12_345],
        hints: vec![QueueHint { request, groups: vec![GroupKeys { group, hash_bytes: 32, hashes: vec![1; bytes] }] }],
    };
    for request in [hint(1, 0, 33), hint(1, 70_000, 32)] {
        assert_eq!(call!(client, hint, request).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    let unknown = [HintRequest { namespace: 9, ..hint(1, 0, 32) }, HintRequest { session: 999, ..hint(1, 0, 32) }];
    for request in unknown {
        assert_eq!(call!(client, hint, request).unwrap_err().code(), tonic::Code::NotFound);
    }
    // More keys than count, an unknown group, none at all: a hint is taken as far as it goes.
    for (request, group, keys) in [(1, 0, 100_000), (2, 3, 4), (3, 0, 0)] {
        call!(client, hint, hint(request, group, keys * 32)).unwrap();
    }
    let full = (4..1000).find_map(|request| call!(client, hint, hint(request, 0, 32)).err()).expect("a limit");
    assert_eq!(full.code(), tonic::Code::ResourceExhausted, "{full}");
    let slots = vec![1, 2];
    let uneven =
        GroupBlocks { group: 0, hash_bytes: 32, hashes: vec![0; 32], predecessor: vec![], slots, generations: vec![1] };
    let commit = CommitRequest { session, namespace, groups: vec![uneven] };
    assert_eq!(call!(client, commit, commit).unwrap_err().code(), tonic::Code::InvalidArgument);
    // Slots that are nobody's, or outside the pool.
    let wild = [Held { slot: u32::MAX, generation: 1 }, Held { slot: 3, generation: 1 }];
    assert_eq!(client.commit(namespace, &hashes(0..2), &wild), [CommitOutcome::CommitLost; 2]);
    let purge = PurgeRequest::default();
    assert_eq!(call!(client, purge, purge).unwrap_err().code(), tonic::Code::InvalidArgument);
    serves(&place, "b");
}

#[test]
fn a_message_over_the_limit_is_refused() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, SMALL);
    let (client, _worker) = engine(&place, "a", 4096);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let keys = GroupKeys { group: 0, hash_bytes: 32, hashes: vec![0; 20 << 20] };
    let request = LookupRequest { session: client.welcome.session, namespace, groups: vec![keys] };
    let refused = call!(client, lookup, request).unwrap_err();
    assert!(matches!(refused.code(), tonic::Code::OutOfRange | tonic::Code::ResourceExhausted), "{refused}");
    serves(&place, "b");
}

#[test]
fn one_engine_too_many_is_refused_with_a_hint_and_the_others_go_on() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "32MiB", "--limits.engines", "3"]);
    let all: Vec<(Client, Worker)> = (0..3).map(|i| engine(&place, &format!("e{i}"), 4096)).collect();
    let refused = Client::try_open(&place, Client::request("one more", 0, 1)).err().expect("there are three");
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    let told = forebay_rpc::from_status(refused).told();
    assert!(told.contains("too many engines") && told.contains("limits.engines"), "{told}");
    for (client, _) in &all {
        client.namespace("t", vec![group()]).unwrap();
    }
}

#[test]
fn a_second_daemon_on_the_same_sockets_or_the_same_pool_is_refused() {
    let place = Place::new();
    let mut daemon = Daemon::start(&place, SMALL);
    let (succeeded, log) = Daemon::spawn(&place, SMALL).finish();
    assert!(!succeeded);
    assert!(log.contains("another daemon is listening"), "{log}");
    let elsewhere = tempfile::tempdir().unwrap();
    let sockets = elsewhere.path().to_str().unwrap();
    let (succeeded, log) =
        Daemon::spawn(&place, &["--socket.directory", sockets, "--pool.capacity_bytes", "32MiB"]).finish();
    assert!(!succeeded);
    assert!(log.contains("hint: "), "{log}");
    assert!(daemon.is_running());
    serves(&place, "a");
}

#[test]
fn a_stale_socket_is_replaced_and_a_file_in_its_place_is_not() {
    let place = Place::new();
    Daemon::start(&place, SMALL).kill();
    assert!(place.sockets().join(RPC_SOCKET).exists(), "the killed daemon left its socket");
    let daemon = Daemon::start(&place, SMALL);
    serves(&place, "a");
    daemon.kill();
    std::fs::remove_file(place.sockets().join(RPC_SOCKET)).unwrap();
    std::fs::write(place.sockets().join(RPC_SOCKET), "precious").unwrap();
    let (succeeded, log) = Daemon::spawn(&place, SMALL).finish();
    assert!(!succeeded);
    assert!(log.contains("is not a socket"), "{log}");
    assert_eq!(std::fs::read(place.sockets().join(RPC_SOCKET)).unwrap(), b"precious");
}

/// Ends the others when the test ends, however it does.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Connections to the pages that ask for nothing: idle ones, half a request, a byte at a time, an answer never read.
#[test]
fn a_thousand_connections_that_ask_for_nothing_keep_no_probe_waiting() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[SMALL, &["--http.address", "127.0.0.1:0"]].concat());
    let address = daemon.address();
    let is_over = &AtomicBool::new(false);
    let connect = |first: &[u8]| {
        let mut stream = TcpStream::connect(&address).unwrap();
        // It may be closed by now, which is its fate.
        let _ = stream.write_all(first);
        stream
    };
    // A busy machine may delay one answer, but not most of them.
    let taken = std::cell::RefCell::new(Vec::new());
    let answers_all = |when: &str| {
        for path in ["/livez", "/readyz", "/metrics"] {
            let begun = Instant::now();
            let answer = daemon.page(path);
            assert!(answer.starts_with("HTTP/1.1 200"), "{when}: {path}: {answer}");
            taken.borrow_mut().push(begun.elapsed());
        }
    };
    for first in [&b""[..], b"GET /liv", b"GET /metrics HTTP/1.1\r\n\r\n"] {
        let idle: Vec<TcpStream> = (0..64).map(|_| connect(first)).collect();
        answers_all("64");
        drop(idle);
    }
    std::thread::scope(|scope| {
        let _over = Over(is_over);
        // Each comes back when it is sent away.
        for part in 0..4 {
            let connect = &connect;
            scope.spawn(move || {
                let mut held: Vec<TcpStream> = Vec::new();
                while !is_over.load(Relaxed) {
                    held.retain_mut(|stream| stream.write_all(b"G").is_ok());
                    while held.len() < 250 && !is_over.load(Relaxed) {
                        held.push(connect(if part % 2 == 0 { b"" } else { b"GET /livez HTTP/1.1\r\nX: " }));
                    }
                    std::thread::sleep(Duration::from_secs(1));
                }
            });
        }
        for _ in 0..10 {
            answers_all("1,000");
            std::thread::sleep(Duration::from_millis(300));
        }
    });
    let mut taken = taken.into_inner();
    taken.sort_unstable();
    assert!(taken[taken.len() / 2] < Duration::from_secs(1), "{taken:?}");
    serves(&place, "a");
}

/// Threads of the daemon.
fn threads(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().count()
}

#[test]
fn askers_who_go_before_their_answer_leave_no_work_behind() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[SMALL, &["--http.address", "127.0.0.1:0"]].concat());
    let before = threads(&daemon);
    let address = daemon.address();
    let mut most = 0;
    for round in 0..20 {
        for _ in 0..100 {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        }
        tokio::task::LocalSet::new().block_on(&runtime(), async {
            let asked = (0..50).map(|_| {
                let mut client = forebay_rpc::client::Client::new(place.sockets(), "asker", DEADLINE);
                tokio::task::spawn_local(async move { client.advise().await.map(drop) })
            });
            let asked: Vec<_> = asked.collect();
            tokio::time::sleep(Duration::from_millis(round % 4)).await;
            asked.iter().for_each(tokio::task::JoinHandle::abort);
        });
        most = most.max(threads(&daemon));
    }
    assert!(most < before + 32, "{most} threads instead of {before}");
    serves(&place, "a");
    assert!(daemon.page("/metrics").contains("forebay_"));
    let start = Instant::now();
    daemon.terminate();
    assert!(daemon.finish().0);
    assert!(start.elapsed() < DEADLINE, "it ended after {:?}", start.elapsed());
}
