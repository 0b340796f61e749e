//! The same over UCX, if `FOREBAY_UCX_LIBRARY` names its library; and what of it comes over other transports.

use super::*;
use crate::line::Span;
use crate::ucx::{Context, Job, Worker};

/// A peer over UCX, with a worker of its own.
struct UcxAttacker {
    attacker: Attacker,
    worker: Worker,
}

impl UcxAttacker {
    /// `None` without a library.
    fn connect() -> Option<(Victim, UcxAttacker)> {
        let library = std::env::var_os("FOREBAY_UCX_LIBRARY").map(std::path::PathBuf::from)?;
        let worker = Worker::new(&Context::open(Some(&library)).unwrap()).unwrap();
        let options = Options { ucx_library: Some(library), ..Options::default() };
        let address = Address::parse("ucx://127.0.0.1:0").unwrap();
        let mut victim = Victim::at(&address, tempfile::tempdir().unwrap(), options);
        let mut attacker = Attacker::greet(&mut victim, true);
        assert_eq!(attacker.hear(&mut victim).0.kind, Kind::Ready);
        let mut attacker = UcxAttacker { attacker, worker };
        let (header, address) = attacker.attacker.hear(&mut victim);
        assert_eq!(header.kind, Kind::Worker);
        attacker.worker.connect(&address).unwrap();
        victim.events.clear();
        Some((victim, attacker))
    }

    fn say_worker(&mut self) {
        let address = self.worker.address().to_vec();
        self.attacker.say(Kind::Worker, 0, 0, &address, &[]);
    }

    /// Sends this byte so often, to a landing place or to none.
    fn send(&mut self, tag: u64, bytes: u64) {
        let memory = Arc::new(Memory::allocate(bytes).unwrap());
        memory.write(0, &vec![0x66; bytes as usize]);
        let span = Span { memory, region: RegionId(0), offset: 0, bytes };
        self.worker.send(Job::Serve, vec![span], tag).unwrap();
    }

    fn pull(tag: u64, segments: &[WireSegment]) -> Vec<u8> {
        [&tag.to_le_bytes(), &segments_to_wire(segments)[..]].concat()
    }
}

#[test]
fn frames_of_ucx_over_another_transport_are_refused() {
    for (kind, count, body) in [
        (Kind::Worker, 0, vec![1; 100]),
        (Kind::Pull, 1, UcxAttacker::pull(1, &[segment(1, 0, 8)])),
        (Kind::Push, 1, segments_to_wire(&[segment(1, 0, 8)])),
        (Kind::Land, 0, vec![1; 8]),
    ] {
        let mut victim = Victim::new(false);
        let mut attacker = Attacker::connect(&mut victim);
        attacker.say(kind, count, 1, &body, &[]);
        let why = victim.until_gone();
        assert!(why.contains("broke the protocol"), "{kind:?}: {why}");
    }
}

#[test]
fn who_connects_for_another_transport_hears_so() {
    let mut victim = Victim::new(false);
    let mut attacker = Attacker::greet(&mut victim, true);
    let (header, _) = attacker.hear(&mut victim);
    assert_eq!((header.kind, header.count), (Kind::Refused, Refusal::Transport as u16));
}

#[test]
fn who_breaks_the_rules_of_ucx_is_thrown_out() {
    let list = segments_to_wire(&[segment(1, 0, 8)]);
    let pull = UcxAttacker::pull(1, &[segment(1, 0, 8)]);
    for (is_known, kind, count, body, payload) in [
        (false, Kind::Pull, 1, pull, &[][..]),
        (false, Kind::Push, 1, list.clone(), &[]),
        (true, Kind::Worker, 0, vec![1; 100], &[]),
        (true, Kind::Land, 0, vec![1; 8], &[]),
        (true, Kind::Read, 1, list.clone(), &[]),
        (true, Kind::Write, 1, list, &[7; 8]),
        (true, Kind::Map, 0, Vec::new(), &[]),
        (true, Kind::Unmapped, 0, Vec::new(), &[]),
        (true, Kind::Written, 0, Vec::new(), &[]),
    ] {
        let Some((mut victim, mut attacker)) = UcxAttacker::connect() else { return };
        if is_known {
            attacker.say_worker();
        }
        attacker.attacker.say(kind, count, 1, &body, payload);
        let why = victim.until_gone();
        assert!(why.contains("broke the protocol") && victim.is_untouched(), "{kind:?}: {why}");
    }
}

#[test]
fn what_was_not_exported_for_it_is_refused_over_ucx_too() {
    let Some((mut victim, mut attacker)) = UcxAttacker::connect() else { return };
    attacker.say_worker();
    let (readable, writable) = (victim.name(victim.readable), victim.name(victim.writable));
    for (segments, refusal) in [
        (vec![segment(1, 0, 8)], Refusal::Unknown),
        (vec![segment(readable, REGION - 1, 2)], Refusal::Outside),
        (vec![segment(writable, 0, 8)], Refusal::Forbidden),
    ] {
        attacker.attacker.say(Kind::Pull, segments.len() as u16, 9, &UcxAttacker::pull(1, &segments), &[]);
        let (header, _) = attacker.attacker.hear(&mut victim);
        assert_eq!((header.kind, header.count), (Kind::Refused, refusal as u16), "{segments:?}");
    }
    for (name, offset, refusal) in [(readable, 0, Refusal::Forbidden), (writable, REGION - 7, Refusal::Outside)] {
        attacker.attacker.say(Kind::Push, 1, 9, &segments_to_wire(&[segment(name, offset, 8)]), &[]);
        let (header, _) = attacker.attacker.hear(&mut victim);
        assert_eq!((header.kind, header.count), (Kind::Refused, refusal as u16), "{name} {offset}");
    }
    assert!(victim.is_untouched());
}

#[test]
fn a_message_of_another_length_ends_the_session_and_one_of_no_landing_place_is_dropped() {
    // The right length, one more, one less, and many more.
    for (bytes, is_right) in [(4096, true), (4097, false), (4095, false), (1 << 20, false)] {
        let Some((mut victim, mut attacker)) = UcxAttacker::connect() else { return };
        attacker.say_worker();
        attacker.send(7, 100_000);
        let name = victim.name(victim.writable);
        attacker.attacker.say(Kind::Push, 1, 3, &segments_to_wire(&[segment(name, 0, 4096)]), &[]);
        let (header, tag) = attacker.attacker.hear(&mut victim);
        assert_eq!((header.kind, header.op), (Kind::Land, 3));
        attacker.send(u64::from_le_bytes(tag.as_slice().try_into().unwrap()), bytes);
        let mut is_gone = false;
        victim.until(|victim| {
            attacker.worker.progress();
            let mut found = [0; 4096];
            victim.memory.read(3 * REGION, &mut found);
            is_gone = victim.events.iter().any(|event| matches!(event, Event::Gone { .. }));
            is_gone || (is_right && found == [0x66; 4096])
        });
        assert!(is_gone != is_right, "{bytes} bytes");
        assert!(victim.is_untouched(), "{bytes} bytes");
        if is_right {
            assert_eq!(attacker.attacker.hear(&mut victim).0.kind, Kind::Written);
        }
    }
}
