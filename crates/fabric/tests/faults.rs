//! What a peer's end, silence or return does, with real processes; and what a cut connection does, at each byte.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_fabric::{Address, Event, OpId, Operation, Options, Rights, Verb};
use rustix::process::Signal;
use support::other::{BYTES, Other, SEED, meet, submit, wait};
use support::{
    Side, Transport, address, both, bytes_of, end_of, options_of, pattern, segment, take, transports, ucx_library,
};

#[test]
fn a_peer_that_is_killed_ends_its_operations_and_may_come_back_at_its_address() {
    for transport in transports() {
        println!("on {transport:?}");
        let (address, _home) = support::address(transport);
        let mut other = Other::start(transport, &address);
        let mut side = Side::new(options_of(transport));
        let (ours, local) = side.memory(BYTES, Rights::NONE);
        let (peer, descriptors, [remote, _]) = meet(&mut side, &other.address);
        let op = submit(&mut side, peer, Verb::Read, segment(local, 0, remote, 0, BYTES), None);
        wait(&mut side, op).unwrap();
        assert!(bytes_of(&ours, 0, BYTES) == pattern(SEED, BYTES));

        other.signal(Signal::STOP);
        let ops: Vec<OpId> =
            (0..8).map(|_| submit(&mut side, peer, Verb::Read, segment(local, 0, remote, 0, BYTES), None)).collect();
        other.kill();
        for op in ops {
            assert_eq!(wait(&mut side, op).unwrap_err().kind(), ErrorKind::Unavailable);
        }
        side.until(|event| matches!(event, Event::Gone { .. }).then_some(()));

        let other = Other::start(transport, &other.address);
        let (peer, _, remotes) = meet(&mut side, &other.address);
        for descriptor in descriptors {
            assert_eq!(side.fabric.import(peer, &descriptor).unwrap_err().kind(), ErrorKind::NotFound);
        }
        for remote in remotes {
            ours.write(0, &vec![0; BYTES as usize]);
            let op = submit(&mut side, peer, Verb::Read, segment(local, 0, remote, 0, BYTES), None);
            wait(&mut side, op).unwrap();
            assert!(bytes_of(&ours, 0, BYTES) == pattern(SEED, BYTES));
        }
    }
}

#[test]
fn a_frozen_peer_costs_its_operations_their_deadline_and_nothing_that_comes_later_touches_memory() {
    for transport in transports() {
        println!("on {transport:?}");
        let (address, _home) = support::address(transport);
        let other = Other::start(transport, &address);
        let mut side = Side::new(options_of(transport));
        let (ours, local) = side.memory(BYTES, Rights::NONE);
        let (mut peer, _, [mut remote, _]) = meet(&mut side, &other.address);
        // A first one under way, so that some of its bytes are on the way when the peer stops.
        let op = submit(&mut side, peer, Verb::Read, segment(local, 0, remote, 0, BYTES), None);
        side.poll(Duration::from_millis(1));
        other.signal(Signal::STOP);
        side.fabric.give_up(op);
        let _ = wait(&mut side, op);
        // Over UCX, each operation that ends early ends its session; and a frozen peer greets nobody.
        let is_ucx = transport == Transport::Ucx;
        let mut meet_again = |side: &mut Side| {
            if is_ucx {
                other.signal(Signal::CONT);
                let (again, _, [same, _]) = meet(side, &other.address);
                (peer, remote) = (again, same);
                side.poll(Duration::from_millis(20));
                other.signal(Signal::STOP);
                side.events.clear();
            }
            (peer, remote)
        };
        let soon = Some(Duration::from_millis(100));
        let (news, source) = side.memory(BYTES, Rights::NONE);
        news.write(0, &pattern(99, BYTES));
        for (verb, local) in [(Verb::Read, local), (Verb::Write, source)] {
            let (peer, remote) = meet_again(&mut side);
            let op = submit(&mut side, peer, verb, segment(local, 0, remote, 0, BYTES), soon);
            assert_eq!(wait(&mut side, op).unwrap_err().kind(), ErrorKind::Timeout);
        }
        ours.write(0, &vec![0xAA; BYTES as usize]);
        news.write(0, &vec![0xAA; BYTES as usize]);
        let (peer, remote) = meet_again(&mut side);
        other.signal(Signal::CONT);
        let (fresh, local) = side.memory(4096, Rights::NONE);
        let op = submit(&mut side, peer, Verb::Read, segment(local, 0, remote, 0, 4096), None);
        wait(&mut side, op).unwrap();
        // The write that was given up may come through in part, and then with the bytes that it had.
        let (found, before, after) = (bytes_of(&fresh, 0, 4096), pattern(SEED, 4096), pattern(99, 4096));
        let is_right = |at: usize| found[at] == before[at] || found[at] == after[at];
        assert!((0..4096).all(is_right), "bytes that nobody wrote");
        assert!(bytes_of(&ours, 0, BYTES).iter().all(|byte| *byte == 0xAA), "a late answer wrote to memory");
        assert!(!side.events.iter().any(|event| matches!(event, Event::Done { .. } | Event::Gone { .. })));
    }
}

/// Forwards between two connections until so many bytes went in one direction, and then cuts both.
struct Proxy {
    address: SocketAddr,
}

impl Proxy {
    /// `cut` counts down; `forth` says whose bytes it counts.
    fn start(target: SocketAddr, cut: Arc<AtomicI64>, forth: bool) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let Ok((client, _)) = listener.accept() else { return };
            let Ok(server) = TcpStream::connect(target) else { return };
            // Small pieces of a handshake would wait for each other.
            [&client, &server].into_iter().for_each(|stream| stream.set_nodelay(true).unwrap());
            let (from, into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let other = cut.clone();
            std::thread::spawn(move || forward(&from, &into, forth.then_some(&other)));
            forward(&server, &client, (!forth).then_some(&cut));
        });
        Proxy { address }
    }
}

fn forward(mut from: &TcpStream, mut into: &TcpStream, cut: Option<&Arc<AtomicI64>>) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let left = cut.map_or(i64::MAX, |cut| cut.fetch_sub(count as i64, Ordering::SeqCst));
        let now = count.min(left.max(0) as usize);
        if into.write_all(&bytes[..now]).is_err() || now < count {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = into.shutdown(Shutdown::Both);
}

/// One session through a proxy: a read, a write, a message. Returns how many of its steps were done.
fn session(transport: Transport, cut: i64, forth: bool) -> usize {
    let cut = Arc::new(AtomicI64::new(cut));
    let one = || Side::new(Options { connections: 1, ..options_of(transport) });
    let (mut a, mut b) = (one(), one());
    let (target, connect): (SocketAddr, fn(SocketAddr) -> Address) =
        match b.fabric.listen(&address(transport).0).unwrap() {
            Address::Tcp(target) => (target, Address::Tcp),
            Address::Ucx(target) => (target, Address::Ucx),
            Address::Shm(_) => panic!("another address"),
        };
    let proxy = Proxy::start(target, cut, forth);
    let (theirs, region) = b.memory(300, Rights::READ_AND_WRITE);
    theirs.write(0, &pattern(1, 300));
    let (ours, local) = a.memory(300, Rights::NONE);
    let peer = a.fabric.connect(&connect(proxy.address)).unwrap();
    let is_up = both(&mut a, &mut b, |a, _| {
        take(a, |event| match event {
            Event::Up { .. } => Some(true),
            Event::Gone { .. } => Some(false),
            _ => None,
        })
    });
    let mut done = usize::from(is_up);
    if !is_up {
        return done;
    }
    let descriptor = b.fabric.export(region).unwrap();
    let mut steps = |a: &mut Side, b: &mut Side| -> forebay_core::Result<()> {
        let remote = a.fabric.import(peer, &descriptor)?;
        for verb in [Verb::Read, Verb::Write] {
            let segments = vec![segment(local, 0, remote, 0, 300)];
            let op = a.fabric.submit(Operation { peer, verb, segments, deadline: None, notice: None })?;
            both(a, b, |a, _| end_of(a, op))?;
            match verb {
                Verb::Read => assert!(bytes_of(&ours, 0, 300) == pattern(1, 300), "wrong bytes read"),
                Verb::Write => assert!(bytes_of(&theirs, 0, 300) == pattern(2, 300), "wrong bytes written"),
            }
            ours.write(0, &pattern(2, 300));
            done += 1;
        }
        a.fabric.send(peer, b"over".to_vec())?;
        Ok(())
    };
    let is_over = steps(&mut a, &mut b).is_ok();
    // The other side hears of the message or of the end.
    let is_told = both(&mut a, &mut b, |_, b| {
        take(b, |event| match event {
            Event::Message { bytes, .. } => Some(bytes == b"over"),
            Event::Gone { .. } => Some(false),
            _ => None,
        })
    });
    drop(a);
    if is_told {
        b.until(|event| matches!(event, Event::Gone { .. }).then_some(()));
    }
    done + usize::from(is_over && is_told)
}

#[test]
fn a_connection_that_is_cut_anywhere_ends_in_order() {
    // Of TLS at every third one, which has twice as many; at each one where UCX is tested, which takes long anyway.
    let all = match ucx_library() {
        None => vec![(Transport::Tcp, 1), (Transport::Encrypted, 3)],
        Some(_) => vec![(Transport::Tcp, 1), (Transport::Encrypted, 1), (Transport::Ucx, 1)],
    };
    for (transport, step) in all {
        for forth in [true, false] {
            let mut last = 0;
            let mut cut = 0;
            while last < 4 {
                let done = session(transport, cut, forth);
                assert!(done + 1 >= last, "cut {cut}: {done} steps after {last}");
                last = done;
                cut += step;
                assert!(cut < 5000, "the session never ends");
            }
            println!("{transport:?}, cut at each of {cut} bytes / {step}, {}", if forth { "forth" } else { "back" });
        }
    }
}
