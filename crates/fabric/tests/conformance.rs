//! What every transport promises, on each.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{ErrorKind, Result};
use forebay_fabric::{
    Descriptor, Endpoint, Event, MESSAGE_WINDOW, MOST_MESSAGE_BYTES, Memory, OpId, Operation, Rights, Verb,
};
use support::{Pair, Side, Transport, both, bytes_of, end_of, options, options_of, pattern, segment, take, transports};

/// Runs a claim on each transport.
fn on_each(claim: impl Fn(&mut Pair)) {
    for transport in transports() {
        println!("on {transport:?}");
        claim(&mut Pair::new(transport));
    }
}

#[test]
fn bytes_arrive_whatever_their_number() {
    on_each(|pair| {
        let most = 5 << 20;
        let (theirs, _, remote) = pair.remote(most, Rights::READ_AND_WRITE);
        let (ours, local) = pair.a.memory(most, Rights::NONE);
        for (seed, bytes) in [1, 7, 4095, 4096, 4160, 65_537, 1 << 20, (1 << 20) + 1, most].into_iter().enumerate() {
            let (read, written) = (pattern(seed as u64, bytes), pattern(seed as u64 + 100, bytes));
            let offset = (most - bytes) / 2;
            theirs.write(offset, &read);
            pair.run(Verb::Read, vec![segment(local, 0, remote, offset, bytes)]).unwrap();
            assert!(bytes_of(&ours, 0, bytes) == read, "{bytes} bytes read");
            ours.write(0, &written);
            pair.run(Verb::Write, vec![segment(local, 0, remote, offset, bytes)]).unwrap();
            assert!(bytes_of(&theirs, offset, bytes) == written, "{bytes} bytes written");
        }
    });
}

#[test]
fn memory_that_is_no_file_is_reached_too() {
    on_each(|pair| {
        let bytes = 3 << 20;
        // Half of a file: who maps a file has all of it, so this goes through the socket.
        let whole = Arc::new(Memory::allocate(2 * bytes).unwrap());
        let region = pair.b.fabric.register(&whole, bytes, bytes, Rights::READ_AND_WRITE).unwrap();
        let descriptor = pair.b.fabric.export(region).unwrap();
        let remote = pair.a.fabric.import(pair.to_b, &descriptor).unwrap();
        let (ours, local) = pair.a.memory(bytes, Rights::NONE);
        whole.write(bytes, &pattern(1, bytes));
        pair.run(Verb::Read, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
        assert!(!pair.a.fabric.is_mapped(remote) && bytes_of(&ours, 0, bytes) == pattern(1, bytes));
        ours.write(0, &pattern(2, bytes));
        pair.run(Verb::Write, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
        assert!(bytes_of(&whole, bytes, bytes) == pattern(2, bytes));
        assert!(bytes_of(&whole, 0, bytes).iter().all(|byte| *byte == 0), "only what was exported is written");
    });
}

#[test]
fn scattered_segments_arrive_each_in_its_place() {
    on_each(|pair| {
        let (count, bytes) = (3000, 700);
        let (theirs, _, remote) = pair.remote(count * bytes, Rights::READ_AND_WRITE);
        let (ours, local) = pair.a.memory(count * bytes, Rights::NONE);
        theirs.write(0, &pattern(1, count * bytes));
        // Backwards there, forwards here.
        let segments: Vec<_> =
            (0..count).map(|at| segment(local, at * bytes, remote, (count - 1 - at) * bytes, bytes)).collect();
        pair.run(Verb::Read, segments.clone()).unwrap();
        let expected: Vec<u8> = pattern(1, count * bytes).chunks(bytes as usize).rev().flatten().copied().collect();
        assert!(bytes_of(&ours, 0, count * bytes) == expected);
        ours.write(0, &pattern(2, count * bytes));
        pair.run(Verb::Write, segments).unwrap();
        let expected: Vec<u8> = pattern(2, count * bytes).chunks(bytes as usize).rev().flatten().copied().collect();
        assert!(bytes_of(&theirs, 0, count * bytes) == expected);
    });
}

#[test]
fn many_operations_at_once_end_once_each() {
    on_each(|pair| {
        let (count, bytes) = (300, 50_000);
        let (theirs, _, remote) = pair.remote(count * bytes, Rights::READ);
        let (ours, local) = pair.a.memory(count * bytes, Rights::NONE);
        theirs.write(0, &pattern(3, count * bytes));
        let ops: Vec<_> = (0..count)
            .map(|at| pair.submit(Verb::Read, vec![segment(local, at * bytes, remote, at * bytes, bytes)]).unwrap())
            .collect();
        for op in ops {
            pair.end_of(op).unwrap();
        }
        assert!(bytes_of(&ours, 0, count * bytes) == pattern(3, count * bytes));
        pair.a.poll(Duration::ZERO);
        assert!(pair.a.events.is_empty(), "{:?}", pair.a.events);
    });
}

#[test]
fn both_sides_read_and_write_at_once() {
    on_each(|pair| {
        let bytes = 4 << 20;
        let (theirs, their_region, remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
        let (ours, local) = pair.a.memory(bytes, Rights::READ_AND_WRITE);
        let descriptor = pair.a.fabric.export(local).unwrap();
        let back = pair.b.fabric.import(pair.to_a, &descriptor).unwrap();
        theirs.write(0, &pattern(1, bytes / 2));
        ours.write(bytes / 2, &pattern(2, bytes / 2));
        let half = bytes / 2;
        let forth = pair.submit(Verb::Read, vec![segment(local, 0, remote, 0, half)]).unwrap();
        let segments = vec![segment(their_region, half, back, half, half)];
        let other = Operation { peer: pair.to_a, verb: Verb::Read, segments, deadline: None, notice: None };
        let other = pair.b.fabric.submit(other).unwrap();
        pair.end_of(forth).unwrap();
        both(&mut pair.a, &mut pair.b, |_, b| end_of(b, other)).unwrap();
        assert!(bytes_of(&ours, 0, half) == pattern(1, half) && bytes_of(&theirs, half, half) == pattern(2, half));
    });
}

#[test]
fn what_another_endpoint_of_the_process_calls_by_its_numbers_is_unknown() {
    on_each(|pair| {
        let (theirs, _, remote) = pair.remote(4096, Rights::READ_AND_WRITE);
        theirs.write(0, &pattern(1, 4096));
        let mut third = Side::new(options_of(pair.transport));
        let to_b = third.fabric.connect(&pair.address).unwrap();
        both(&mut third, &mut pair.b, |third, _| take(third, |event| matches!(event, Event::Up { .. }).then_some(())));
        // As many as the first has, so that small numbers would be the same.
        let ours: Vec<_> = (0..64).map(|_| pair.a.memory(4096, Rights::NONE)).collect();
        let others: Vec<_> = (0..64).map(|_| third.memory(4096, Rights::NONE)).collect();
        let (_, region) = pair.b.memory(4096, Rights::READ_AND_WRITE);
        let descriptor = pair.b.fabric.export(region).unwrap();
        let remotes: Vec<_> = (0..64).map(|_| third.fabric.import(to_b, &descriptor).unwrap()).collect();
        let refused = |result: Result<OpId>| {
            let error = result.unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
        };
        for ((_, local), other) in others.iter().zip(&remotes) {
            refused(pair.submit(Verb::Read, vec![segment(*local, 0, remote, 0, 4096)]));
            refused(pair.submit(Verb::Write, vec![segment(ours[0].1, 0, *other, 0, 4096)]));
        }
        assert!(ours.iter().all(|(memory, _)| bytes_of(memory, 0, 4096) == vec![0; 4096]));
        assert!(bytes_of(&theirs, 0, 4096) == pattern(1, 4096));
    });
}

#[test]
fn notices_that_nobody_takes_are_limited() {
    on_each(|pair| {
        let (_, _, remote) = pair.remote(4096, Rights::READ_AND_WRITE);
        let (_, local) = pair.a.memory(4096, Rights::NONE);
        let write = |pair: &mut Pair| {
            let segments = vec![segment(local, 0, remote, 0, 1)];
            let (verb, notice) = (Verb::Write, Some(vec![7; MOST_MESSAGE_BYTES]));
            pair.a.fabric.submit(Operation { peer: pair.to_b, verb, segments, deadline: None, notice })
        };
        let mut written = 0;
        let error = loop {
            match write(pair) {
                Ok(op) => pair.end_of(op).unwrap(),
                Err(error) => break error,
            }
            written += 1;
            assert!(written < 1000, "notices wait without a limit");
        };
        assert!(error.kind() == ErrorKind::Full && error.hint_text().is_some(), "{error}");
        // Those that were begun arrive, and make room.
        for _ in 0..written {
            both(&mut pair.a, &mut pair.b, |_, b| take(b, notice_of));
            pair.b.fabric.taken(pair.to_a);
        }
        let op = write(pair).unwrap();
        pair.end_of(op).unwrap();
    });
}

/// As who gave up waiting for the end, and comes again.
#[test]
fn memory_may_be_deregistered_again_until_its_end_was_told() {
    let endpoint = Endpoint::new(options()).unwrap();
    let memory = Arc::new(Memory::allocate(4096).unwrap());
    for _ in 0..100 {
        let region = endpoint.with(|fabric| fabric.register(&memory, 0, 4096, Rights::NONE)).unwrap();
        // The end comes at any time between these.
        (0..10).for_each(|_| endpoint.deregister(region).unwrap());
        endpoint.deregistered(region, Duration::from_secs(20)).expect("the end");
        assert_eq!(endpoint.deregister(region).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_limit_of_connecting_that_is_no_time_is_refused() {
    for connect_deadline in [Duration::ZERO, Duration::MAX, Duration::from_secs(1 << 40)] {
        let error = forebay_fabric::Fabric::new(forebay_fabric::Options { connect_deadline, ..options() }).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
    }
}

#[test]
fn who_gets_no_place_hears_why() {
    [Transport::Tcp, Transport::Encrypted].into_iter().for_each(no_place);
}

fn no_place(transport: Transport) {
    let mut b = Side::new(options_of(transport));
    let (address, _home) = support::address(transport);
    let address = b.fabric.listen(&address).unwrap();
    // Two, because each has the same limit for its own sessions.
    let mut sides = [(200, None), (57, Some(ErrorKind::Full))].map(|(sessions, reason)| {
        let mut a = Side::new(forebay_fabric::Options { connections: 1, ..options_of(transport) });
        for _ in 0..sessions {
            a.fabric.connect(&address).unwrap();
        }
        let (mut answers, mut gone) = (0, None);
        both(&mut a, &mut b, |a, _| {
            while let Some(reason) = take(a, |event| match event {
                Event::Up { .. } => Some(None),
                Event::Gone { reason, .. } => Some(Some((reason.kind(), reason.hint_text().is_some()))),
                _ => None,
            }) {
                answers += 1;
                gone = gone.or(reason);
            }
            (answers == sessions).then_some(())
        });
        assert_eq!(gone, reason.map(|kind| (kind, true)));
        a
    });
    // The places of who ends are free.
    let [first, second] = &mut sides;
    *first = Side::new(options_of(transport));
    b.until(|event| matches!(event, Event::Gone { .. }).then_some(()));
    second.fabric.connect(&address).unwrap();
    both(second, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
}

#[test]
fn messages_that_nobody_takes_end_the_session_that_has_most_of_them() {
    let mut b = Side::new(options());
    let (address, _home) = support::address(Transport::Tcp);
    let address = b.fabric.listen(&address).unwrap();
    let mut a = Side::new(options());
    let mut peers = Vec::new();
    for number in 0..18 {
        let peer = a.fabric.connect(&address).unwrap();
        both(&mut a, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        peers.push(peer);
        // The first says little; the others all that they may.
        let (count, bytes) = if number == 0 { (1, 1) } else { (MESSAGE_WINDOW, MOST_MESSAGE_BYTES) };
        for _ in 0..count {
            a.fabric.send(peer, vec![7; bytes]).unwrap();
        }
    }
    let gone = both(&mut a, &mut b, |_, b| {
        take(b, |event| match event {
            Event::Gone { reason, .. } => Some(reason.kind()),
            _ => None,
        })
    });
    assert_eq!(gone, ErrorKind::Full);
    a.fabric.send(peers[0], vec![8]).unwrap();
    both(&mut a, &mut b, |_, b| {
        take(b, |event| matches!(event, Event::Message { bytes, .. } if bytes == &[8]).then_some(()))
    });
}

#[test]
fn what_was_not_exported_for_it_is_refused() {
    on_each(|pair| {
        let (_, _, readable) = pair.remote(4096, Rights::READ);
        let (_, region, _) = pair.remote(4096, Rights::READ);
        let (_, local) = pair.a.memory(8192, Rights::NONE);
        let kind = |result: forebay_core::Result<()>| result.unwrap_err().kind();
        // Known on this side already.
        assert_eq!(kind(pair.run(Verb::Write, vec![segment(local, 0, readable, 0, 1)])), ErrorKind::Invalid);
        assert_eq!(kind(pair.run(Verb::Read, vec![segment(local, 0, readable, 4096, 1)])), ErrorKind::Invalid);
        assert_eq!(kind(pair.run(Verb::Read, vec![segment(local, 0, readable, u64::MAX, 1)])), ErrorKind::Invalid);
        assert_eq!(kind(pair.run(Verb::Read, vec![segment(local, 8000, readable, 0, 1000)])), ErrorKind::Invalid);
        assert_eq!(kind(pair.run(Verb::Read, vec![])), ErrorKind::Invalid);
        // Descriptors that lie: the owner refuses.
        let mut bytes = pair.b.fabric.export(region).unwrap().to_bytes();
        bytes[9] = 3;
        bytes[33] = 0xff;
        let lie = pair.a.fabric.import(pair.to_b, &Descriptor::from_bytes(&bytes).unwrap()).unwrap();
        assert_eq!(kind(pair.run(Verb::Write, vec![segment(local, 0, lie, 0, 1)])), ErrorKind::Invalid);
        assert_eq!(kind(pair.run(Verb::Read, vec![segment(local, 0, lie, 4000, 200)])), ErrorKind::Invalid);
        bytes[24] ^= 1;
        let made_up = pair.a.fabric.import(pair.to_b, &Descriptor::from_bytes(&bytes).unwrap()).unwrap();
        assert_eq!(kind(pair.run(Verb::Read, vec![segment(local, 0, made_up, 0, 1)])), ErrorKind::NotFound);
        // The session goes on.
        pair.run(Verb::Read, vec![segment(local, 0, readable, 0, 4096)]).unwrap();
    });
}

#[test]
fn a_write_in_part_outside_writes_nothing_of_its_piece() {
    on_each(|pair| {
        let whole = Arc::new(Memory::allocate(16_384).unwrap());
        let region = pair.b.fabric.register(&whole, 4096, 4096, Rights::READ_AND_WRITE).unwrap();
        let mut bytes = pair.b.fabric.export(region).unwrap().to_bytes();
        bytes[33] = 0xff;
        let lie = pair.a.fabric.import(pair.to_b, &Descriptor::from_bytes(&bytes).unwrap()).unwrap();
        let (ours, local) = pair.a.memory(16_384, Rights::NONE);
        ours.write(0, &pattern(9, 16_384));
        let segments = vec![segment(local, 0, lie, 0, 100), segment(local, 0, lie, 4000, 8000)];
        assert_eq!(pair.run(Verb::Write, segments).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(bytes_of(&whole, 0, 16_384).iter().all(|byte| *byte == 0));
    });
}

#[test]
fn nothing_is_reached_after_deregister() {
    on_each(|pair| {
        let bytes = 2 << 20;
        let (theirs, region, remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
        let (_, local) = pair.a.memory(bytes, Rights::NONE);
        pair.run(Verb::Read, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
        pair.b.fabric.deregister(region).unwrap();
        both(&mut pair.a, &mut pair.b, |_, b| {
            take(b, |event| matches!(event, Event::Deregistered { region: it } if *it == region).then_some(()))
        });
        assert!(!pair.a.fabric.is_mapped(remote), "a file of memory that is gone is still mapped");
        theirs.write(0, &pattern(5, bytes));
        for verb in [Verb::Read, Verb::Write] {
            let error = pair.run(verb, vec![segment(local, 0, remote, 0, bytes)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
        assert!(bytes_of(&theirs, 0, bytes) == pattern(5, bytes));
        assert_eq!(pair.b.fabric.deregister(region).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(pair.b.fabric.export(region).unwrap_err().kind(), ErrorKind::Invalid);
    });
}

#[test]
fn memory_that_a_peer_maps_and_does_not_let_go_is_not_given_back() {
    let mut pair = Pair::new(Transport::Shm);
    let bytes = 1 << 20;
    let (theirs, region, remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
    let (ours, local) = pair.a.memory(bytes, Rights::NONE);
    pair.b.fabric.deregister(region).unwrap();
    // The peer does not run, so it may still write, and does.
    for _ in 0..10 {
        pair.b.poll(Duration::from_millis(1));
        pair.b.fabric.deregister(region).unwrap();
    }
    assert!(pair.b.events.is_empty(), "memory that a peer writes was given back: {:?}", pair.b.events);
    ours.write(0, &pattern(6, bytes));
    let op = pair.submit(Verb::Write, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
    // One call: the copy comes before the word of the owner is read, or after it.
    pair.a.poll(Duration::ZERO);
    let is_written = pair.end_of(op).is_ok();
    assert_eq!(bytes_of(&theirs, 0, bytes) == pattern(6, bytes), is_written);
    let is_it = |event: &Event| matches!(event, Event::Deregistered { region: it } if *it == region).then_some(());
    both(&mut pair.a, &mut pair.b, |_, b| take(b, is_it));
    theirs.write(0, &pattern(7, bytes));
    assert!(pair.run(Verb::Write, vec![segment(local, 0, remote, 0, bytes)]).is_err());
    assert!(bytes_of(&theirs, 0, bytes) == pattern(7, bytes) && take(&mut pair.b, is_it).is_none());
}

#[test]
fn local_memory_that_is_deregistered_under_way_ends_its_operations_and_stays_as_it_is() {
    on_each(|pair| {
        let bytes = 8 << 20;
        let (theirs, region, remote) = pair.remote(bytes, Rights::READ);
        theirs.write(0, &pattern(7, bytes));
        let (ours, local) = pair.a.memory(bytes, Rights::NONE);
        let op = pair.submit(Verb::Read, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
        for _ in 0..3 {
            pair.b.poll(Duration::ZERO);
        }
        pair.a.fabric.deregister(local).unwrap();
        ours.write(0, &vec![0xAA; bytes as usize]);
        assert!(end_of(&mut pair.a, op).is_none());
        assert_eq!(pair.end_of(op).unwrap_err().kind(), ErrorKind::Invalid);
        // What the peer had begun to send goes nowhere, and what comes behind it is right.
        let remote = pair.remain(region, remote);
        let (other, local) = pair.a.memory(bytes, Rights::NONE);
        pair.run(Verb::Read, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
        assert!(bytes_of(&other, 0, bytes) == pattern(7, bytes));
        assert!(bytes_of(&ours, 0, bytes).iter().all(|byte| *byte == 0xAA), "memory was written after deregister");
    });
}

#[test]
fn an_operation_that_is_given_up_ends_at_once_and_leaves_its_memory_alone() {
    on_each(|pair| {
        let bytes = 8 << 20;
        let (theirs, region, mut remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
        theirs.write(0, &pattern(7, bytes));
        let (ours, local) = pair.a.memory(bytes, Rights::NONE);
        for verb in [Verb::Read, Verb::Write] {
            let op = pair.submit(verb, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
            pair.b.poll(Duration::ZERO);
            pair.a.fabric.give_up(op);
            // Without a word from the peer.
            pair.a.poll(Duration::ZERO);
            assert_eq!(end_of(&mut pair.a, op).expect("it ended").unwrap_err().kind(), ErrorKind::Timeout);
            pair.a.fabric.give_up(op);
            ours.write(0, &vec![0xAA; bytes as usize]);
            remote = pair.remain(region, remote);
        }
        let (other, local) = pair.a.memory(4096, Rights::NONE);
        theirs.write(0, &pattern(8, 4096));
        pair.run(Verb::Read, vec![segment(local, 0, remote, 0, 4096)]).unwrap();
        assert!(bytes_of(&ours, 0, bytes).iter().all(|byte| *byte == 0xAA), "memory was written after its end");
        drop(other);
        pair.a.poll(Duration::ZERO);
        assert!(pair.a.events.is_empty(), "an operation ended twice: {:?}", pair.a.events);
    });
}

#[test]
fn a_deadline_ends_an_operation_of_a_peer_that_does_nothing() {
    let mut pair = Pair::new(Transport::Tcp);
    let (_, _, remote) = pair.remote(4096, Rights::READ);
    let (_, local) = pair.a.memory(4096, Rights::NONE);
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let segments = vec![segment(local, 0, remote, 0, 4096)];
    let operation = Operation { peer: pair.to_b, verb: Verb::Read, segments, deadline, notice: None };
    let op = pair.a.fabric.submit(operation).unwrap();
    let error = pair.a.until(|event| match event {
        Event::Done { op: it, result: Err(error) } if *it == op => Some(error.kind()),
        _ => None,
    });
    assert_eq!(error, ErrorKind::Timeout);
    pair.run(Verb::Read, vec![segment(local, 0, remote, 0, 4096)]).unwrap();
}

#[test]
fn a_notice_comes_after_the_bytes_and_messages_come_in_order() {
    on_each(|pair| {
        let bytes = 3 << 20;
        let (theirs, _, remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
        let (ours, local) = pair.a.memory(bytes, Rights::NONE);
        ours.write(0, &pattern(4, bytes));
        let segments = vec![segment(local, 0, remote, 0, bytes)];
        let notice = Some(b"there".to_vec());
        let operation = Operation { peer: pair.to_b, verb: Verb::Write, segments, deadline: None, notice };
        let op = pair.a.fabric.submit(operation).unwrap();
        let notice = both(&mut pair.a, &mut pair.b, |_, b| take(b, notice_of));
        assert_eq!(notice, b"there");
        assert!(bytes_of(&theirs, 0, bytes) == pattern(4, bytes), "the notice came first");
        pair.end_of(op).unwrap();
        pair.b.fabric.taken(pair.to_a);
        for number in 0..1000u64 {
            let message = pattern(number, number * 7);
            // A full window is no error of the program: it tries again.
            both(&mut pair.a, &mut pair.b, |a, b| {
                let sent = a.fabric.send(pair.to_b, message.clone()).map_err(|error| error.kind());
                check_in_order(b, pair.to_a);
                match sent {
                    Ok(()) => Some(()),
                    Err(ErrorKind::Full) => None,
                    Err(kind) => panic!("{kind:?}"),
                }
            });
        }
        both(&mut pair.a, &mut pair.b, |_, b| (check_in_order(b, pair.to_a) == 1000).then_some(()));
    });
}

fn notice_of(event: &Event) -> Option<Vec<u8>> {
    match event {
        Event::Notice { bytes, .. } => Some(bytes.clone()),
        _ => None,
    }
}

/// Takes the messages that have come; each says its number by its length. Returns how many came in all.
fn check_in_order(side: &mut Side, peer: forebay_fabric::PeerId) -> u64 {
    thread_local!(static NEXT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    while let Some(bytes) = take(side, |event| match event {
        Event::Message { bytes, .. } => Some(bytes.clone()),
        _ => None,
    }) {
        let number = NEXT.get();
        assert!(bytes == pattern(number, number * 7), "message {number}");
        NEXT.set(number + 1);
        side.fabric.taken(peer);
    }
    let came = NEXT.get();
    if came == 1000 {
        NEXT.set(0);
    }
    came
}

#[test]
fn a_program_that_takes_no_messages_stops_the_sender_alone() {
    on_each(|pair| {
        let mut sent = 0;
        while pair.a.fabric.send(pair.to_b, vec![1; MOST_MESSAGE_BYTES]).is_ok() {
            sent += 1;
            pair.b.poll(Duration::ZERO);
            pair.a.poll(Duration::ZERO);
        }
        assert_eq!(sent, MESSAGE_WINDOW);
        let error = pair.a.fabric.send(pair.to_b, vec![1; MOST_MESSAGE_BYTES + 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let (_, _, remote) = pair.remote(4096, Rights::READ);
        let (_, local) = pair.a.memory(4096, Rights::NONE);
        pair.run(Verb::Read, vec![segment(local, 0, remote, 0, 4096)]).unwrap();
    });
}

#[test]
fn a_peer_that_disconnects_ends_everything_first() {
    on_each(|pair| {
        let (_, _, remote) = pair.remote(8 << 20, Rights::READ);
        let (_, local) = pair.a.memory(8 << 20, Rights::NONE);
        let segments = vec![segment(local, 0, remote, 0, 8 << 20)];
        let ops: Vec<_> = (0..5).map(|_| pair.submit(Verb::Read, segments.clone()).unwrap()).collect();
        pair.b.fabric.disconnect(pair.to_a);
        let gone = |event: &Event| matches!(event, Event::Gone { .. }).then_some(());
        both(&mut pair.a, &mut pair.b, |a, _| a.events.iter().find_map(gone));
        let order: Vec<bool> = pair.a.events.iter().map(|event| matches!(event, Event::Gone { .. })).collect();
        assert_eq!(order, [vec![false; ops.len()], vec![true]].concat(), "{:?}", pair.a.events);
        assert_eq!(pair.submit(Verb::Read, segments).unwrap_err().kind(), ErrorKind::Unavailable);
    });
}

#[test]
fn descriptors_of_another_start_are_refused() {
    on_each(|pair| {
        let (_, region) = pair.b.memory(4096, Rights::READ);
        let old = pair.b.fabric.export(region).unwrap();
        // The peer starts again at the same address.
        pair.b = Side::new(options_of(pair.transport));
        let gone = |event: &Event| matches!(event, Event::Gone { .. }).then_some(());
        pair.a.until(gone);
        let address = pair.b.fabric.listen(&pair.address.clone()).unwrap();
        pair.to_b = pair.a.fabric.connect(&address).unwrap();
        both(&mut pair.a, &mut pair.b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        let error = pair.a.fabric.import(pair.to_b, &old).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        // The epoch may be forged; the name is still nobody's.
        let (_, region) = pair.b.memory(4096, Rights::READ);
        let mut forged = pair.b.fabric.export(region).unwrap().to_bytes();
        forged[24..32].copy_from_slice(&old.to_bytes()[24..32]);
        let remote = pair.a.fabric.import(pair.to_b, &Descriptor::from_bytes(&forged).unwrap()).unwrap();
        let (_, local) = pair.a.memory(4096, Rights::NONE);
        let error = pair.run(Verb::Read, vec![segment(local, 0, remote, 0, 1)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    });
}

#[test]
fn a_thousand_connections_are_served_and_leave_nothing_behind() {
    [Transport::Tcp, Transport::Encrypted].into_iter().for_each(thousand_connections);
}

fn thousand_connections(transport: Transport) {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = rustix::process::Rlimit { current: files.maximum, maximum: files.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, all).unwrap();
    let (mut a, mut b) = (Side::new(options_of(transport)), Side::new(options_of(transport)));
    let address = b.fabric.listen(&support::address(transport).0).unwrap();
    let (theirs, region) = b.memory(4096, Rights::READ);
    theirs.write(0, &pattern(1, 4096));
    let descriptor = b.fabric.export(region).unwrap();
    let peers: Vec<_> = (0..250).map(|_| a.fabric.connect(&address).unwrap()).collect();
    let mut is_up = 0;
    both(&mut a, &mut b, |a, _| {
        while take(a, |event| matches!(event, Event::Up { .. }).then_some(())).is_some() {
            is_up += 1;
        }
        (is_up == peers.len()).then_some(())
    });
    let (ours, local) = a.memory(4096, Rights::NONE);
    for peer in &peers {
        ours.write(0, &[0; 4096]);
        let remote = a.fabric.import(*peer, &descriptor).unwrap();
        let segments = vec![segment(local, 0, remote, 0, 4096)];
        let operation = Operation { peer: *peer, verb: Verb::Read, segments, deadline: None, notice: None };
        let op = a.fabric.submit(operation).unwrap();
        both(&mut a, &mut b, |a, _| end_of(a, op)).unwrap();
        assert!(bytes_of(&ours, 0, 4096) == pattern(1, 4096));
    }
    drop(a);
    let mut gone = 0;
    while gone < peers.len() {
        b.until(|event| matches!(event, Event::Gone { .. }).then_some(()));
        gone += 1;
    }
    assert_eq!(format!("{:?}", b.fabric), "Fabric(0 peers, 0 operations)");
}
