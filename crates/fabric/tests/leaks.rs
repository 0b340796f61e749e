//! What sessions leave behind in a process: no descriptor and no mapping. Alone in its process, which it counts.

mod support;

use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Memory, Rights, Verb};
use support::{Pair, segment, transports};

/// Open descriptors, and mappings of memory that was allocated for transfers.
fn held() -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (files, maps.lines().filter(|line| line.contains("forebay-transfer")).count())
}

/// One session: operations that end, operations that are given up, files that are mapped, and memory that is not.
fn session(transport: support::Transport, round: u64) {
    let mut pair = Pair::new(transport);
    let bytes = 1 << 20;
    let (_, _, mapped) = pair.remote(bytes, Rights::READ_AND_WRITE);
    let part = Arc::new(Memory::allocate(2 * bytes).unwrap());
    let region = pair.b.fabric.register(&part, bytes, bytes, Rights::READ_AND_WRITE).unwrap();
    let descriptor = pair.b.fabric.export(region).unwrap();
    let part = pair.a.fabric.import(pair.to_b, &descriptor).unwrap();
    let (_, local) = pair.a.memory(bytes, Rights::NONE);
    for remote in [mapped, part] {
        for verb in [Verb::Read, Verb::Write] {
            pair.run(verb, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
            let op = pair.submit(verb, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
            // Over UCX it would end the session.
            match transport {
                support::Transport::Ucx => pair.end_of(op).unwrap(),
                _ => pair.a.fabric.give_up(op),
            }
        }
    }
    // The session ends in another way each time, with an operation and a request for a file under way.
    let (_, late) = pair.b.memory(bytes, Rights::READ);
    let descriptor = pair.b.fabric.export(late).unwrap();
    pair.a.fabric.import(pair.to_b, &descriptor).unwrap();
    let _ = pair.submit(Verb::Read, vec![segment(local, 0, part, 0, bytes)]);
    match round % 3 {
        0 => pair.a.fabric.disconnect(pair.to_b),
        1 => pair.b.fabric.disconnect(pair.to_a),
        _ => {}
    }
    pair.b.poll(Duration::ZERO);
}

#[test]
fn sessions_and_imports_leave_no_descriptor_and_no_mapping_behind() {
    for transport in transports() {
        session(transport, 0);
        let before = held();
        for round in 0..12 {
            session(transport, round);
        }
        assert_eq!(held(), before, "{transport:?}");
    }
    imports_share_one_mapping();
}

/// In the test above, because it counts what the process has.
fn imports_share_one_mapping() {
    let mut pair = Pair::new(support::Transport::Shm);
    let (_, region, first) = pair.remote(1 << 20, Rights::READ);
    let descriptor = pair.b.fabric.export(region).unwrap();
    let (_, before) = held();
    let import = |pair: &mut Pair| pair.a.fabric.import(pair.to_b, &descriptor).unwrap();
    let others: Vec<_> = (0..100).map(|_| import(&mut pair)).collect();
    assert!(others.iter().all(|other| pair.a.fabric.is_mapped(*other)));
    assert_eq!(held().1, before);
    others.into_iter().chain([first]).for_each(|remote| pair.a.fabric.forget(remote));
    assert_eq!(held().1, before - 1, "a mapping that nobody uses");
    // Those that come while the file is asked for share it too.
    let again: Vec<_> = (0..3).map(|_| import(&mut pair)).collect();
    let is_mapped = |side: &support::Side| again.iter().all(|remote| side.fabric.is_mapped(*remote));
    support::both(&mut pair.a, &mut pair.b, |a, _| is_mapped(a).then_some(()));
    assert_eq!(held().1, before);
}
