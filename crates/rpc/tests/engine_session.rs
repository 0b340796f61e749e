//! The engine's session against a daemon that fails on purpose (see `fake`).
//!
//! No test sleeps: each waits for what must happen, with a deadline. That something does *not* happen is tested
//! by letting something later happen first.

mod fake;

use std::time::{Duration, Instant};

use fake::{Fake, PATIENCE, eventually};
use forebay_core::ErrorKind;
use forebay_rpc::client::session::{Namespace, limits};
use forebay_rpc::client::{EngineSession, SessionConfig, SessionState, Ticket};
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::{Attached, CommitOutcome, Detached, Draining, Group, Held};
use forebay_rpc::{Hashes, pack};

const STOCK: usize = 8;

fn config(fake: &Fake) -> SessionConfig {
    SessionConfig {
        socket_directory: fake.directory().into(),
        engine_id: "engine-a".to_string(),
        incarnation: [7; 16],
        ranks: 1,
        stock_blocks: STOCK,
        // Long, so that a slow machine is not taken for a frozen daemon; tests of deadlines set their own.
        deadline: PATIENCE,
        breaker_failures: 3,
    }
}

fn namespace(name: &str) -> Namespace {
    let groups = vec![Group { group: 0, tokens_per_block: 16, ..Group::default() }];
    Namespace { fields: [("model".to_string(), name.to_string())].into(), groups }
}

fn is_ready(session: &EngineSession) -> bool {
    session.state() == SessionState::Ready
}

fn ready_with(fake: &Fake, config: SessionConfig) -> EngineSession {
    let _ = fake;
    let session = EngineSession::new(config).unwrap();
    session.set_namespace(namespace("a"));
    eventually("the session is ready", || is_ready(&session));
    session
}

fn ready(fake: &Fake) -> EngineSession {
    ready_with(fake, config(fake))
}

/// Ready, with a full stock.
fn stocked(fake: &Fake) -> EngineSession {
    let session = ready(fake);
    fill(&session);
    session
}

fn fill(session: &EngineSession) {
    session.reserve(0, 0);
    eventually("the stock is full", || session.stats().reserved_stock == STOCK as u64);
}

fn keys(count: u8) -> Hashes {
    let hashes: Vec<[u8; 32]> = (0..count).map(|key| [key; 32]).collect();
    pack(hashes.iter().map(|hash| hash.as_slice())).unwrap()
}

fn look_up(session: &EngineSession, count: u8) -> Ticket {
    session.lookup(vec![(0, keys(count))])
}

fn hit(session: &EngineSession, count: u8) -> Ticket {
    let ticket = look_up(session, count);
    assert!(ticket.poll(PATIENCE) && !ticket.has_failed());
    ticket
}

#[track_caller]
fn assert_misses_at_once(session: &EngineSession) {
    let ticket = look_up(session, 3);
    assert!(ticket.poll(Duration::ZERO), "the answer is there without waiting");
    assert!(ticket.has_failed());
    assert_eq!(ticket.states(0).unwrap(), [0; 3]);
    assert_eq!(ticket.slots(0).unwrap(), [0xFF; 12]);
    assert!(ticket.pool().is_empty());
}

#[test]
fn a_lookup_brings_states_slots_and_the_pool() {
    let fake = Fake::started();
    let session = ready(&fake);
    let ticket = session.lookup(vec![(0, keys(2)), (5, keys(0)), (7, keys(1))]);
    assert!(ticket.poll(PATIENCE));
    assert_eq!(ticket.states(0).unwrap(), [1, 1]);
    assert_eq!(ticket.slots(0).unwrap(), [1000u32.to_le_bytes(), 1001u32.to_le_bytes()].concat());
    assert_eq!(ticket.generations(2).unwrap(), 1u32.to_le_bytes());
    assert!(ticket.states(1).unwrap().is_empty() && ticket.states(3).is_err());
    assert_eq!(ticket.pool(), [1; 16]);
    let memory = fake.memory();
    let groups: Vec<u32> = memory.lookups[0].groups.iter().map(|group| group.group).collect();
    assert_eq!((groups, memory.lookups[0].namespace), (vec![0, 5, 7], 1));
}

/// A lookup of three keys, of which the last two are promoting.
fn promoting(fake: &Fake, session: &EngineSession) -> Ticket {
    fake.memory().promoting = 2;
    let ticket = hit(session, 3);
    assert_eq!(ticket.states(0).unwrap(), [1, 2, 2]);
    ticket
}

#[test]
fn keys_that_are_promoting_become_ready_without_another_question() {
    let fake = Fake::started();
    let session = ready(&fake);
    let ticket = promoting(&fake, &session);
    fake.reply(&[1, 2], &[7]);
    eventually("the second key is ready", || ticket.states(0).unwrap() == [1, 1, 2]);
    let slots = |numbers: [u32; 3]| numbers.map(u32::to_le_bytes).concat();
    assert_eq!(ticket.slots(0).unwrap(), slots([1000, 7, u32::MAX]));
    fake.reply(&[0], &[]);
    eventually("the third key is a miss", || ticket.states(0).unwrap() == [1, 1, 0]);
    assert_eq!(ticket.slots(0).unwrap(), slots([1000, 7, u32::MAX]));
    let memory = fake.memory();
    assert_eq!((memory.lookups.len(), session.stats().lookups, session.stats().leases_held), (1, 1, 1));
    drop(memory);
    ticket.release();
    eventually("the lease is released once", || fake.memory().released == [101]);
}

#[test]
fn what_is_ready_later_is_declared_after_a_reconnect_and_what_still_promoted_is_a_miss() {
    let mut fake = Fake::started();
    let session = ready(&fake);
    let ticket = promoting(&fake, &session);
    fake.reply(&[1, 2], &[7]);
    eventually("the second key is ready", || ticket.states(0).unwrap() == [1, 1, 2]);
    fake.kill();
    eventually("nothing is promoting", || ticket.states(0).unwrap() == [1, 1, 0]);
    fake.start();
    eventually("the session is ready", || fake.memory().opened.len() == 2 && is_ready(&session));
    let mut declared: Vec<u32> = fake.memory().opened[1].leases.iter().map(|held| held.slot).collect();
    declared.sort_unstable();
    assert_eq!(declared, [7, 1000]);
}

#[test]
fn what_comes_up_for_another_namespace_or_does_not_fit_is_a_miss() {
    let fake = Fake::started();
    let session = ready(&fake);
    let ticket = promoting(&fake, &session);
    fake.reply(&[1, 1, 1], &[7, 8, 9]);
    eventually("a reply that answers other keys is of no use", || ticket.states(0).unwrap() == [1, 0, 0]);
    eventually("the daemon knows", || fake.memory().ended == [101]);
    let ticket = promoting(&fake, &session);
    session.set_namespace(namespace("b"));
    fake.reply(&[1, 1], &[7, 8]);
    eventually("the namespace is another", || ticket.states(0).unwrap() == [1, 0, 0]);
    eventually("the daemon knows", || fake.memory().ended == [101, 102]);
}

#[test]
fn what_nobody_waits_for_any_more_is_a_miss_and_the_rest_stays_leased() {
    let fake = Fake::started();
    let session = ready(&fake);
    let ticket = promoting(&fake, &session);
    ticket.stop_waiting();
    assert_eq!(ticket.states(0).unwrap(), [1, 0, 0]);
    ticket.stop_waiting();
    eventually("the daemon knows", || fake.memory().ended == [101]);
    assert_eq!((session.stats().leases_held, fake.memory().released.len()), (1, 0));
    ticket.release();
    eventually("the lease is released", || fake.memory().released == [101]);
    assert_eq!(fake.memory().ended, [101], "it ends once");
}

#[test]
fn a_lookup_that_is_given_up_before_its_answer_misses_at_once_and_its_late_lease_is_returned() {
    let fake = Fake::started();
    let session = ready(&fake);
    fake.memory().promoting = 2;
    fake.hold(&["lookup"]);
    let ticket = look_up(&session, 3);
    eventually("the daemon has it", || fake.memory().lookups.len() == 1);
    ticket.stop_waiting();
    assert!(ticket.poll(Duration::ZERO) && ticket.has_failed());
    fake.resume();
    eventually("the lease is returned", || fake.memory().released == [101]);
    eventually("its lookup has ended", || fake.memory().replies.is_none());
    assert_eq!((session.stats().lookups_late, session.stats().leases_held), (1, 0));
    hit(&session, 1);
}

#[test]
fn what_was_saved_is_told_with_the_next_lease_that_is_returned() {
    let fake = Fake::started();
    let session = ready(&fake);
    for round in 1..=2 {
        let ticket = hit(&session, 4);
        session.saved(64, Duration::from_micros(7));
        assert_eq!(fake.memory().released.len(), round - 1, "it is no reason for a call");
        ticket.release();
        eventually("the lease is returned", || fake.memory().released.len() == round);
        assert_eq!(fake.memory().saved, (64 * round as u64, 7 * round as u64));
    }
}

#[test]
fn a_released_ticket_takes_nothing_that_comes_up_later() {
    let fake = Fake::started();
    let session = ready(&fake);
    let ticket = promoting(&fake, &session);
    ticket.release();
    eventually("the lease is released", || fake.memory().released == [101]);
    eventually("the lookup has ended", || ticket.states(0).unwrap() == [1, 0, 0]);
    assert_eq!(session.stats().leases_held, 0);
}

#[test]
fn without_a_daemon_everything_misses_at_once_and_one_that_comes_later_is_found() {
    let mut fake = Fake::new();
    let session = EngineSession::new(config(&fake)).unwrap();
    session.set_namespace(namespace("a"));
    assert_misses_at_once(&session);
    assert_eq!(session.reserve(0, 4), []);
    assert!(session.pool().is_empty());
    eventually("the reason is known", || session.reason().unwrap().starts_with("cannot reach the daemon"));
    assert_eq!(session.state(), SessionState::Connecting);
    fake.start();
    eventually("the session is ready", || is_ready(&session));
    assert_eq!((session.reason(), session.pool()), (None, vec![1; 16]));
    assert_eq!(session.stats().reconnects, 0);
}

#[test]
fn a_dropped_ticket_gives_its_lease_back_once() {
    let fake = Fake::started();
    let session = ready(&fake);
    let (first, second) = (hit(&session, 1), hit(&session, 1));
    assert_eq!(session.stats().leases_held, 2);
    first.release();
    drop(first);
    drop(second);
    eventually("both leases are released", || fake.memory().released.len() == 2);
    assert_eq!(fake.memory().released, [101, 102]);
    assert_eq!(session.stats().leases_held, 0);
}

#[test]
fn commits_arrive_in_order_and_together_and_are_counted() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 4);
    assert_eq!(slots.len(), 4);
    fake.hold(&["commit"]);
    session.commit(0, &keys(1), b"", &slots[..1]).unwrap();
    eventually("the first commit is on its way", || session.stats().queued == 1);
    session.commit(0, &keys(2), &[7; 32], &slots[1..3]).unwrap();
    session.commit(0, &keys(1), b"", &slots[3..]).unwrap();
    fake.resume();
    eventually("all is acknowledged", || session.stats().queued == 0);
    let memory = fake.memory();
    let groups: Vec<_> = memory.commits.iter().flat_map(|commit| &commit.groups).collect();
    assert_eq!(groups.iter().flat_map(|group| group.slots.clone()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(memory.commits.len() <= 2, "what was queued during a call goes into one call");
    assert_eq!((groups[1].predecessor.as_slice(), groups[1].hash_bytes), ([7; 32].as_slice(), 32));
    assert_eq!(session.stats().stored, 4);
}

#[test]
fn a_daemon_that_lost_its_connection_is_told_what_the_engine_still_holds() {
    let mut fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 5);
    let (kept, dropped) = (hit(&session, 2), hit(&session, 3));
    fake.hold(&["commit", "abort", "release"]);
    session.commit(0, &keys(2), b"", &slots[..2]).unwrap();
    session.abort(&slots[2..3]);
    drop(dropped);
    fake.kill();
    fake.memory().lost = vec![slots[0]];
    fake.resume();
    fake.start();
    eventually("the session is ready again", || session.stats().reconnects == 1 && is_ready(&session));

    let sorted = |held: &[Held]| {
        let mut slots: Vec<u32> = held.iter().map(|held| held.slot).collect();
        slots.sort();
        slots
    };
    let declared = fake.memory().opened[1].clone();
    assert_eq!(declared.engine_id, "engine-a");
    assert_eq!(sorted(&declared.leases), [1000, 1001], "the dropped ticket's slot 1002 is not declared");
    assert_eq!(sorted(&declared.reservations), [0, 1, 3, 4], "neither the aborted slot nor the stock is declared");

    eventually("the commit is delivered", || session.stats().queued == 0);
    let commits = fake.memory().commits.clone();
    assert_eq!(commits.len(), 1);
    assert_eq!(commits[0].groups[0].slots, [1], "the lost slot dropped out");
    assert_eq!(commits[0].groups[0].predecessor, [0; 32]);
    assert_eq!((session.stats().stored, session.stats().lost), (1, 1));
    drop(kept);
    eventually("the declared lease is released", || fake.memory().released == [1]);
}

#[test]
fn tickets_from_before_a_reconnect_share_one_lease_until_the_last_is_dropped() {
    let mut fake = Fake::started();
    let session = ready(&fake);
    let (first, second) = (hit(&session, 1), hit(&session, 1));
    fake.kill();
    fake.memory().welcome_lease = 55;
    fake.start();
    eventually("the session is ready again", || session.stats().reconnects == 1 && is_ready(&session));
    drop(first);
    let third = hit(&session, 1);
    drop(third);
    eventually("the new ticket's lease is released", || !fake.memory().released.is_empty());
    assert_eq!(fake.memory().released, [103], "the old lease is still held by the second ticket");
    drop(second);
    eventually("the old lease is released", || fake.memory().released == [103, 55]);
}

#[test]
fn a_replaced_pool_voids_what_was_held() {
    let mut fake = Fake::started();
    let session = stocked(&fake);
    let old = session.reserve(0, 2);
    let ticket = hit(&session, 1);
    fake.kill();
    {
        // The new pool counts its slots from the beginning.
        let mut memory = fake.memory();
        (memory.pool, memory.next_slot, memory.welcome_lease) = (vec![2; 16], 0, 0);
    }
    fake.start();
    eventually("the session is ready again", || session.pool() == [2; 16]);
    session.reserve(0, 0);
    // Slots 0 and 1 of the new pool look like those the engine still has in hand.
    eventually("the slots that look alike are aborted", || fake.memory().aborted.len() == 2);
    assert_eq!(fake.memory().aborted, old);
    session.commit(0, &keys(2), b"", &old).unwrap();
    drop(ticket);
    let slots = session.reserve(0, 1);
    assert_eq!(slots[0].slot, 2);
    session.commit(0, &keys(1), b"", &slots).unwrap();
    eventually("the new commit is stored", || session.stats().stored == 1);
    assert_eq!(fake.memory().commits.len(), 1, "nothing of the old pool was committed");
    assert!(fake.memory().released.is_empty());
    assert_eq!(session.stats().lost, 2);
}

#[test]
fn a_lookup_on_its_way_fails_with_its_connection() {
    let mut fake = Fake::started();
    let session = ready(&fake);
    fake.hold(&["lookup"]);
    let ticket = look_up(&session, 1);
    eventually("the daemon has it", || fake.memory().lookups.len() == 1);
    fake.kill();
    assert!(ticket.poll(PATIENCE) && ticket.has_failed());
    fake.start();
    fake.resume();
    eventually("the session is ready again", || session.stats().reconnects == 1 && is_ready(&session));
    assert_eq!(session.stats().leases_held, 0);
}

#[test]
fn an_answer_for_a_dropped_ticket_is_given_back() {
    let fake = Fake::started();
    let session = ready(&fake);
    fake.hold(&["lookup"]);
    drop({
        let ticket = look_up(&session, 1);
        eventually("the daemon has it", || fake.memory().lookups.len() == 1);
        ticket
    });
    fake.resume();
    eventually("its lease is released", || fake.memory().released == [101]);
    let stats = session.stats();
    assert_eq!((stats.lookups_late, stats.leases_held), (1, 0));
}

#[test]
fn an_answer_after_the_deadline_is_given_back() {
    let fake = Fake::started();
    let session = ready_with(&fake, SessionConfig { deadline: Duration::from_millis(300), ..config(&fake) });
    fake.hold(&["lookup"]);
    let ticket = look_up(&session, 1);
    assert!(!ticket.poll(Duration::ZERO), "a poll without patience comes back at once");
    assert!(ticket.poll(PATIENCE) && ticket.has_failed(), "the deadline answers for the daemon");
    fake.resume();
    eventually("its lease is released", || fake.memory().released == [101]);
    assert_eq!(session.stats().lookups_late, 1);
    assert!(ticket.has_failed(), "an answer is given once");
    assert!(!hit(&session, 1).has_failed());
}

#[test]
fn a_frozen_daemon_costs_a_few_lookups_and_then_nothing_until_it_thaws() {
    let fake = Fake::started();
    let session = ready_with(&fake, SessionConfig { deadline: Duration::from_millis(200), ..config(&fake) });
    let slots = {
        fill(&session);
        session.reserve(0, 1)
    };
    fake.freeze();
    let tickets: Vec<Ticket> = (0..3).map(|_| look_up(&session, 1)).collect();
    assert!(tickets.iter().all(|ticket| ticket.poll(PATIENCE) && ticket.has_failed()));
    eventually("the breaker opens", || session.stats().breaker_open == 1);
    assert_eq!(session.state(), SessionState::Connecting);
    let asked = fake.memory().lookups.len();
    for _ in 0..100 {
        assert_misses_at_once(&session);
    }
    session.commit(0, &keys(1), b"", &slots).unwrap();
    eventually("it is tried again", || session.reason().unwrap().contains("did not open a session in time"));
    assert_eq!(fake.memory().lookups.len(), asked, "nothing was asked meanwhile");
    assert_eq!(session.stats().breaker_open, 1);
    fake.resume();
    eventually("the session is ready again", || is_ready(&session));
    eventually("the commit is delivered", || session.stats().stored == 1);
    assert_eq!(session.stats().breaker_open, 0);
    assert!(!hit(&session, 1).has_failed());
}

#[test]
fn a_daemon_that_is_always_late_is_no_better_than_a_frozen_one() {
    let fake = Fake::started();
    let session = ready_with(&fake, SessionConfig { deadline: Duration::from_millis(200), ..config(&fake) });
    for late in 1..=3 {
        fake.hold(&["lookup"]);
        let ticket = look_up(&session, 1);
        assert!(ticket.poll(PATIENCE) && ticket.has_failed());
        fake.resume();
        if late < 3 {
            eventually("the late answer came", || session.stats().lookups_late == late);
        }
    }
    eventually("the connection is given up", || session.stats().reconnects == 1);
}

#[test]
fn the_stock_is_refilled_behind_the_engine_s_back() {
    let fake = Fake::started();
    let session = stocked(&fake);
    assert_eq!(session.reserve(0, STOCK + 5).len(), STOCK);
    assert_eq!(session.stats().reserve_short, 5);
    eventually("the stock is full again", || session.stats().reserved_stock == STOCK as u64);
    assert_eq!(session.stats().reservations_held, STOCK as u64);
    assert!(fake.memory().reserves.iter().all(|reserve| reserve.namespace == 1 && reserve.count <= STOCK as u32));
}

#[test]
fn a_full_pool_is_asked_again_until_it_has_room() {
    let fake = Fake::started();
    fake.memory().room = Some(0);
    let session = ready(&fake);
    eventually("it asked and paused and asked", || {
        session.reserve(0, 1);
        fake.memory().reserves.len() >= 3
    });
    assert!(session.stats().reserve_short >= 1);
    fake.memory().room = None;
    eventually("the stock fills up", || {
        session.reserve(0, 0);
        session.stats().reserved_stock == STOCK as u64
    });
}

#[test]
fn an_idle_engine_keeps_few_slots() {
    let fake = Fake::started();
    let session = stocked(&fake);
    eventually("the stock shrinks", || session.stats().reserved_stock == limits::IDLE_STOCK as u64);
    eventually("the rest is given back", || fake.memory().aborted.len() == STOCK - limits::IDLE_STOCK);
    let _ticket = hit(&session, 1);
    session.reserve(0, 2);
    eventually("a busy engine fills up again", || session.stats().reserved_stock == STOCK as u64);
}

#[test]
fn lookups_beyond_the_limit_miss_at_once() {
    let fake = Fake::started();
    let session = ready(&fake);
    fake.hold(&["lookup"]);
    let tickets: Vec<Ticket> = (0..limits::LOOKUPS).map(|_| look_up(&session, 1)).collect();
    assert_misses_at_once(&session);
    fake.resume();
    assert!(tickets.iter().all(|ticket| ticket.poll(PATIENCE) && !ticket.has_failed()));
    assert!(!hit(&session, 1).has_failed(), "answered lookups make room");
}

#[test]
fn waiting_requests_are_told_in_few_calls_and_not_again_after_a_reconnect() {
    let mut fake = Fake::started();
    let session = ready(&fake);
    fake.hold(&["hint"]);
    session.hint(1, vec![(0, keys(2)), (7, keys(1))]);
    eventually("the first call is on its way", || fake.memory().hinted.len() == 1);
    (2..=5).for_each(|request| session.hint(request, vec![(0, keys(1))]));
    [1, 2, 99].iter().for_each(|request| session.withdraw_hint(*request));
    fake.resume();
    eventually("all is told", || fake.memory().hinted.len() == 2);
    let told: Vec<(Vec<u64>, Vec<u64>)> = (fake.memory().hinted.iter())
        .map(|call| (call.withdrawn.clone(), call.hints.iter().map(|waiting| waiting.request).collect()))
        .collect();
    assert_eq!(told, [(vec![], vec![1]), (vec![1], vec![3, 4, 5])]);
    assert_eq!(fake.memory().hinted[0].hints[0].groups[1].group, 7);
    fake.kill();
    fake.start();
    eventually("the session is ready again", || session.stats().reconnects == 1 && is_ready(&session));
    session.withdraw_hint(3);
    session.hint(6, vec![(0, keys(1))]);
    eventually("what is new is told", || fake.memory().hinted.len() == 3);
    let last = fake.memory().hinted[2].clone();
    assert_eq!((last.withdrawn.len(), last.hints[0].request), (0, 6));
}

#[test]
fn another_namespace_aborts_the_stock_and_asks_under_its_own_name() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 2);
    let ticket = hit(&session, 1);
    session.set_namespace(namespace("b"));
    eventually("the new one is declared", || is_ready(&session));
    session.commit(0, &keys(2), b"", &slots).unwrap();
    // A slow test finds the stock filled up again after its two slots were taken.
    eventually("stock and slots are aborted", || fake.memory().aborted.len() >= STOCK);
    eventually("the commits were dropped", || session.stats().commits_dropped == 2);
    assert!(!ticket.has_failed() && session.stats().leases_held == 1, "leases stay");
    hit(&session, 1);
    fill(&session);
    let memory = fake.memory();
    assert_eq!(memory.namespaces[1].fields["model"], "b");
    assert_eq!(memory.lookups.last().unwrap().namespace, 2);
    assert_eq!(memory.reserves.last().unwrap().namespace, 2);
    assert!(memory.commits.is_empty());
}

#[test]
fn a_lookup_of_the_namespace_that_was_left_is_a_miss() {
    let fake = Fake::started();
    let session = ready(&fake);
    fake.hold(&["lookup"]);
    let ticket = look_up(&session, 1);
    eventually("the daemon has it", || fake.memory().lookups.len() == 1);
    session.set_namespace(namespace("b"));
    fake.resume();
    assert!(ticket.poll(PATIENCE) && ticket.has_failed());
    eventually("its lease is released", || fake.memory().released == [101]);
}

#[test]
fn a_refused_namespace_is_reported_and_another_one_heals_it() {
    let fake = Fake::started();
    fake.memory().refuse_namespace = Some(ErrorKind::Invalid);
    let session = EngineSession::new(config(&fake)).unwrap();
    session.set_namespace(namespace("a"));
    eventually("it is refused", || session.state() == SessionState::Refused);
    assert_eq!(session.reason().unwrap(), "the test says no");
    assert_misses_at_once(&session);
    fake.memory().refuse_namespace = None;
    session.set_namespace(namespace("b"));
    eventually("the session is ready", || is_ready(&session));
    assert_eq!(fake.memory().namespaces.len(), 2, "the refused one was asked for once");
}

#[test]
fn a_namespace_the_daemon_cannot_open_yet_is_asked_for_again() {
    let fake = Fake::started();
    fake.memory().refuse_namespace = Some(ErrorKind::Unavailable);
    let session = EngineSession::new(config(&fake)).unwrap();
    session.set_namespace(namespace("a"));
    eventually("it asked twice", || fake.memory().namespaces.len() >= 2);
    assert_eq!(session.state(), SessionState::Naming);
    assert_eq!(session.reason().unwrap(), "the test says no");
    fake.memory().refuse_namespace = None;
    eventually("the session is ready", || is_ready(&session));
}

#[test]
fn a_refused_session_heals_when_another_daemon_takes_its_place() {
    let fake = Fake::started();
    fake.memory().refuse_session = Some(ErrorKind::Unsupported);
    let session = EngineSession::new(config(&fake)).unwrap();
    session.set_namespace(namespace("a"));
    eventually("it is refused", || session.state() == SessionState::Refused);
    eventually("it is still asked now and then", || fake.memory().opened.len() >= 3);
    assert_eq!(session.state(), SessionState::Refused);
    fake.memory().refuse_session = None;
    eventually("the session is ready", || is_ready(&session));
}

#[test]
fn lookups_wait_for_all_ranks_and_miss_when_one_is_gone() {
    let fake = Fake::started();
    fake.memory().is_detached = true;
    let session = EngineSession::new(config(&fake)).unwrap();
    session.set_namespace(namespace("a"));
    eventually("it waits for ranks", || session.state() == SessionState::Attaching);
    assert_misses_at_once(&session);
    fake.send(Event::Attached(Attached {}));
    eventually("the session is ready", || is_ready(&session));
    fake.send(Event::Detached(Detached { rank: 0 }));
    eventually("a rank is gone", || session.state() == SessionState::Attaching);
    assert_misses_at_once(&session);
    fake.send(Event::Attached(Attached {}));
    eventually("the session is ready again", || is_ready(&session));
    assert_eq!(fake.memory().namespaces.len(), 2, "it is declared again: the rank may have changed");
}

#[test]
fn a_draining_daemon_is_asked_for_nothing_new_but_told_the_rest() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 1);
    fake.send(Event::Draining(Draining {}));
    eventually("it is known", || session.state() == SessionState::Connecting);
    assert_eq!(session.reason().unwrap(), "the daemon is shutting down");
    assert_misses_at_once(&session);
    assert_eq!(session.reserve(0, 1), []);
    session.commit(0, &keys(1), b"", &slots).unwrap();
    eventually("the commit is delivered", || session.stats().stored == 1);
    eventually("the stock is given back", || !fake.memory().aborted.is_empty());
    assert!(fake.memory().aborted.iter().all(|slot| !slots.contains(slot)), "what was committed is not aborted");
}

#[test]
fn a_daemon_that_forgot_the_session_is_connected_to_again() {
    let fake = Fake::started();
    let session = ready(&fake);
    fake.memory().forget_sessions = true;
    let ticket = look_up(&session, 1);
    assert!(ticket.poll(PATIENCE) && ticket.has_failed());
    fake.memory().forget_sessions = false;
    eventually("there is a new session", || session.stats().reconnects == 1 && is_ready(&session));
}

#[test]
fn commits_the_daemon_will_never_have_become_aborts() {
    let fake = Fake::started();
    let session = stocked(&fake);
    fake.memory().refuse_commits = Some(ErrorKind::Invalid);
    let slots = session.reserve(0, 2);
    session.commit(0, &keys(2), b"", &slots).unwrap();
    eventually("the slots are given back", || fake.memory().aborted == slots);
    eventually("nothing is queued", || session.stats().queued == 0);
    assert_eq!(session.stats().commits_dropped, 2);
}

#[test]
fn each_outcome_is_counted_apart() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let outcomes = [
        CommitOutcome::CommitStored,
        CommitOutcome::CommitDuplicate,
        CommitOutcome::CommitOrphan,
        CommitOutcome::CommitIncomplete,
        CommitOutcome::CommitLost,
    ];
    for (outcome, slot) in outcomes.into_iter().zip(session.reserve(0, 5)) {
        fake.memory().outcome = outcome;
        session.commit(0, &keys(1), b"", &[slot]).unwrap();
        eventually("it is acknowledged", || session.stats().queued == 0);
    }
    let stats = session.stats();
    assert_eq!([stats.stored, stats.duplicate, stats.orphan, stats.incomplete, stats.lost], [1; 5]);
}

#[test]
fn a_commit_whose_lists_differ_is_an_error_and_takes_nothing() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 2);
    assert_eq!(session.commit(0, &keys(1), b"", &slots).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(session.stats().reservations_held, 2);
}

#[test]
fn closing_delivers_what_is_queued_and_fails_what_is_asked() {
    let fake = Fake::started();
    let session = stocked(&fake);
    let slots = session.reserve(0, 2);
    fake.hold(&["lookup"]);
    let ticket = look_up(&session, 1);
    session.commit(0, &keys(2), b"", &slots).unwrap();
    session.close();
    assert_eq!(session.state(), SessionState::Closed);
    assert_eq!(fake.memory().commits.len(), 1);
    assert!(ticket.poll(PATIENCE) && ticket.has_failed());
    assert_misses_at_once(&session);
    session.close();
}

#[test]
fn closing_does_not_wait_longer_than_the_deadline_for_a_frozen_daemon() {
    let fake = Fake::started();
    let deadline = Duration::from_millis(400);
    let session = ready_with(&fake, SessionConfig { deadline, ..config(&fake) });
    fill(&session);
    let slots = session.reserve(0, 1);
    fake.freeze();
    session.commit(0, &keys(1), b"", &slots).unwrap();
    let begun = Instant::now();
    session.close();
    // Ten times the deadline: this must hold on a loaded machine, and a hang would be the test's own timeout.
    assert!(begun.elapsed() < deadline * 10);
}

#[test]
fn a_session_that_cannot_be_is_refused() {
    let fake = Fake::new();
    for bad in [
        SessionConfig { engine_id: String::new(), ..config(&fake) },
        SessionConfig { engine_id: "x".repeat(65), ..config(&fake) },
        SessionConfig { incarnation: [0; 16], ..config(&fake) },
        SessionConfig { deadline: Duration::ZERO, ..config(&fake) },
        SessionConfig { breaker_failures: 0, ..config(&fake) },
    ] {
        assert_eq!(EngineSession::new(bad).err().map(|error| error.kind()), Some(ErrorKind::Invalid));
    }
}
