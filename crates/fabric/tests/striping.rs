//! A session over several addresses of one endpoint.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_core::{Error, ErrorKind};
use forebay_fabric::{Address, Event, Operation, Options, PeerId, Rights, Verb};
use support::{Side, Transport, both, bytes_of, end_of, options, options_of, pattern, segment, take};

/// Two cards of one host.
const HOSTS: [&str; 2] = ["127.0.0.1", "127.0.0.2"];

/// Listens at both addresses.
fn listen(side: &mut Side) -> Vec<Address> {
    let at = |host: &str| Address::parse(&format!("tcp://{host}:0")).unwrap();
    HOSTS.iter().map(|host| side.fabric.listen(&at(host)).unwrap()).collect()
}

/// A way to an address, which counts its connections and bytes.
struct Way {
    address: Address,
    connections: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

impl Way {
    fn to(target: &Address) -> Way {
        let Address::Tcp(target) = *target else { panic!("another address") };
        let listener = TcpListener::bind(SocketAddr::new(target.ip(), 0)).unwrap();
        let way = Way {
            address: Address::Tcp(listener.local_addr().unwrap()),
            connections: Arc::default(),
            bytes: Arc::default(),
        };
        let (connections, bytes) = (way.connections.clone(), way.bytes.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::SeqCst);
                let server = TcpStream::connect(target).unwrap();
                for (from, into) in [(&client, &server), (&server, &client)] {
                    from.set_nodelay(true).unwrap();
                    let (from, into, bytes) = (from.try_clone().unwrap(), into.try_clone().unwrap(), bytes.clone());
                    std::thread::spawn(move || forward(&from, &into, &bytes));
                }
            }
        });
        way
    }
}

fn forward(mut from: &TcpStream, mut into: &TcpStream, bytes: &AtomicU64) {
    let mut some = [0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut some) {
        bytes.fetch_add(count as u64, Ordering::SeqCst);
        if into.write_all(&some[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = into.shutdown(Shutdown::Both);
}

fn until_up(a: &mut Side, b: &mut Side) -> Result<(), Error> {
    both(a, b, |a, _| {
        let is_it = |event: &Event| matches!(event, Event::Up { .. } | Event::Gone { .. });
        let at = a.events.iter().position(is_it)?;
        match a.events.remove(at) {
            Event::Gone { reason, .. } => Some(Err(reason)),
            _ => Some(Ok(())),
        }
    })
}

/// Reads and writes 32 MiB each.
fn move_bytes(a: &mut Side, b: &mut Side, peer: PeerId) {
    let bytes = 32 << 20;
    let (theirs, region) = b.memory(bytes, Rights::READ_AND_WRITE);
    let (ours, local) = a.memory(bytes, Rights::NONE);
    let remote = a.fabric.import(peer, &b.fabric.export(region).unwrap()).unwrap();
    theirs.write(0, &pattern(1, bytes));
    for (verb, seed) in [(Verb::Read, 1), (Verb::Write, 2)] {
        let segments = vec![segment(local, 0, remote, 0, bytes)];
        let op = a.fabric.submit(Operation { peer, verb, segments, deadline: None, notice: None }).unwrap();
        both(a, b, |a, _| end_of(a, op)).unwrap();
        let memory = if verb == Verb::Read { &ours } else { &theirs };
        assert!(bytes_of(memory, 0, bytes) == pattern(seed, bytes), "{verb:?}");
        ours.write(0, &pattern(2, bytes));
    }
}

#[test]
fn a_session_uses_all_its_addresses_for_its_connections_and_its_bytes() {
    for transport in [Transport::Tcp, Transport::Encrypted] {
        let (mut a, mut b) = (Side::new(options_of(transport)), Side::new(options_of(transport)));
        let ways: Vec<Way> = listen(&mut b).iter().map(Way::to).collect();
        let addresses: Vec<Address> = ways.iter().map(|way| way.address.clone()).collect();
        let peer = a.fabric.connect_over(&addresses).unwrap();
        until_up(&mut a, &mut b).unwrap();
        move_bytes(&mut a, &mut b, peer);
        for way in &ways {
            let (connections, bytes) = (way.connections.load(Ordering::SeqCst), way.bytes.load(Ordering::SeqCst));
            assert_eq!(connections, 2, "{transport:?} over {}", way.address);
            // Which way is free at a moment is chance.
            assert!(bytes > 16 << 20, "{transport:?} over {}: {bytes} bytes", way.address);
        }
    }
}

#[test]
fn there_is_a_connection_for_each_address() {
    let (mut a, mut b) = (Side::new(Options { connections: 1, ..options() }), Side::new(options()));
    let ways: Vec<Way> = listen(&mut b).iter().map(Way::to).collect();
    let addresses: Vec<Address> = ways.iter().map(|way| way.address.clone()).collect();
    let peer = a.fabric.connect_over(&addresses).unwrap();
    until_up(&mut a, &mut b).unwrap();
    move_bytes(&mut a, &mut b, peer);
    assert!(ways.iter().all(|way| way.connections.load(Ordering::SeqCst) == 1));
}

#[test]
fn addresses_of_two_endpoints_are_no_session() {
    for transport in [Transport::Tcp, Transport::Encrypted] {
        let mut sides = [(); 3].map(|()| Side::new(options_of(transport)));
        let [a, b, c] = &mut sides;
        let addresses = [listen(b).remove(0), listen(c).remove(1)];
        a.fabric.connect_over(&addresses).unwrap();
        let reason = both(a, b, |a, _| {
            c.poll(Duration::from_millis(1));
            take(a, |event| match event {
                Event::Gone { reason, .. } => {
                    Some((reason.kind(), reason.to_string(), reason.hint_text().map(str::to_owned)))
                }
                _ => None,
            })
        });
        assert!(reason.0 == ErrorKind::Invalid && reason.1.contains("different endpoints"), "{reason:?}");
        assert_eq!(reason.2.as_deref(), Some("give addresses at which one endpoint listens"), "{transport:?}");
        assert!([&a, &b, &c].iter().all(|side| !side.events.iter().any(|event| matches!(event, Event::Up { .. }))));
    }
}

#[test]
fn an_address_at_which_nobody_listens_or_answers_is_named() {
    let connect_deadline = Duration::from_millis(500);
    let (mut a, mut b) = (Side::new(Options { connect_deadline, ..options() }), Side::new(options()));
    let right = listen(&mut b).remove(0);
    let (refuses, silent) = (TcpListener::bind("127.0.0.2:0").unwrap(), TcpListener::bind("127.0.0.2:0").unwrap());
    let [closed, mute] = [&refuses, &silent].map(|listener| Address::Tcp(listener.local_addr().unwrap()));
    drop(refuses);
    for (wrong, kind) in [(closed, ErrorKind::Unavailable), (mute, ErrorKind::Timeout)] {
        let reason = match a.fabric.connect_over(&[right.clone(), wrong.clone()]) {
            Ok(_) => until_up(&mut a, &mut b).unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(reason.kind(), kind, "{reason}");
        let said = reason.to_string();
        assert!(said.contains(&wrong.to_string()) && !said.contains(&right.to_string()), "{said}");
    }
}

#[test]
fn one_way_that_ends_takes_the_session_with_it_and_is_named() {
    let (mut a, mut b) = (Side::new(options()), Side::new(options()));
    let listened = listen(&mut b);
    let cut = TcpListener::bind("127.0.0.2:0").unwrap();
    let addresses = [listened[0].clone(), Address::Tcp(cut.local_addr().unwrap())];
    let Address::Tcp(target) = listened[1] else { panic!("another address") };
    let (stop, stopped) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut ends = Vec::new();
        for _ in 0..2 {
            let (client, _) = cut.accept().unwrap();
            let server = TcpStream::connect(target).unwrap();
            for (from, into) in [(&client, &server), (&server, &client)] {
                let (from, into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                std::thread::spawn(move || forward(&from, &into, &AtomicU64::new(0)));
            }
            ends.extend([client, server]);
        }
        stopped.recv().unwrap();
        ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
    });
    a.fabric.connect_over(&addresses).unwrap();
    until_up(&mut a, &mut b).unwrap();
    stop.send(()).unwrap();
    let said = until_up(&mut a, &mut b).unwrap_err().to_string();
    assert!(said.contains(&addresses[1].to_string()) && !said.contains(&addresses[0].to_string()), "{said}");
    thread.join().unwrap();
}

#[test]
fn what_are_no_addresses_of_one_endpoint_is_refused() {
    let mut side = Side::new(options());
    let tcp = Address::parse("tcp://127.0.0.1:7000").unwrap();
    let shm = Address::Shm("/tmp/a.sock".into());
    let ucx = Address::parse("ucx://127.0.0.1:7000").unwrap();
    let mixed = [vec![tcp.clone(), shm.clone()], vec![tcp.clone(), ucx.clone()], vec![shm.clone(), shm], vec![ucx; 2]];
    for addresses in [vec![], vec![tcp; 17]].into_iter().chain(mixed) {
        let error = side.fabric.connect_over(&addresses).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
        let text: Vec<String> = addresses.iter().map(Address::to_string).collect();
        // A path may have commas in it.
        let is_path = text.first().is_some_and(|first| first.starts_with("shm://"));
        assert_eq!(Address::parse_all(&text.join(",")).is_ok(), is_path, "nobody listens where nobody can connect");
    }
}

/// The side that listens asks at once, and its word that the session is up comes late.
#[test]
fn a_request_that_overtakes_the_beginning_of_the_session_waits_for_it() {
    for transport in [Transport::Tcp, Transport::Encrypted] {
        let (mut a, mut b) = (Side::new(options_of(transport)), Side::new(options_of(transport)));
        let listened = listen(&mut b);
        let slow = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [Address::Tcp(slow.local_addr().unwrap()), listened[1].clone()];
        let Address::Tcp(target) = listened[0] else { panic!("another address") };
        std::thread::spawn(move || {
            for client in slow.incoming().flatten() {
                let server = TcpStream::connect(target).unwrap();
                for (from, into, wait) in [(&client, &server, 0), (&server, &client, 50)] {
                    from.set_nodelay(true).unwrap();
                    let (from, into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                    std::thread::spawn(move || forward_late(&from, &into, Duration::from_millis(wait)));
                }
            }
        });
        let bytes = 8 << 20;
        let (ours, region) = a.memory(bytes, Rights::READ);
        ours.write(0, &pattern(1, bytes));
        let descriptor = a.fabric.export(region).unwrap();
        a.fabric.connect_over(&addresses).unwrap();
        let to_a = both(&mut a, &mut b, |_, b| {
            take(b, |event| match event {
                Event::Up { peer } => Some(*peer),
                _ => None,
            })
        });
        let (theirs, local) = b.memory(bytes, Rights::NONE);
        let remote = b.fabric.import(to_a, &descriptor).unwrap();
        let segments = vec![segment(local, 0, remote, 0, bytes)];
        let operation = Operation { peer: to_a, verb: Verb::Read, segments, deadline: None, notice: None };
        let op = b.fabric.submit(operation).unwrap();
        both(&mut a, &mut b, |_, b| end_of(b, op)).unwrap();
        assert!(bytes_of(&theirs, 0, bytes) == pattern(1, bytes), "{transport:?}");
        assert!(take(&mut a, |event| matches!(event, Event::Up { .. }).then_some(())).is_some());
    }
}

fn forward_late(mut from: &TcpStream, mut into: &TcpStream, late: Duration) {
    let mut some = [0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut some) {
        std::thread::sleep(late);
        if into.write_all(&some[..count]).is_err() {
            break;
        }
    }
}
