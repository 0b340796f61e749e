//! The leases and slots that the engine holds, and the messages that the daemon must still receive.
//!
//! Pure: no thread, no socket; the caller passes the time. The invariants are in the documentation of [`super`];
//! [`super::link`], [`super::leases`], [`super::stock`], [`super::outbox`] and [`super::hints`] are the parts.

use std::collections::HashSet;
use std::time::Instant;

use forebay_core::Error;

use super::answer::{Answer, Cell};
use super::config::Namespace;
use super::hints::Hints;
use super::leases::Leases;
use super::limits;
use super::link::{Link, SessionState};
use super::outbox::{Batch, Commit, Outbox, Saved};
use super::stats::Stats;
use super::stock::{Refill, Reservations, Returned};
use crate::Hashes;
use crate::proto::{CommitOutcome, Held, HintRequest, Welcome};

/// See the module documentation.
pub(super) struct Holdings {
    pub link: Link,
    lookups_in_flight: usize,
    keys_in_flight: usize,
    leases: Leases,
    reservations: Reservations,
    outbox: Outbox,
    hints: Hints,
    stats: Stats,
}

/// What a new session declares.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Declaration {
    pub leases: Vec<Held>,
    pub reservations: Vec<Held>,
}

/// The engine's calls.
impl Holdings {
    pub fn new(stock_blocks: usize, now: Instant) -> Holdings {
        Holdings {
            link: Link::default(),
            lookups_in_flight: 0,
            keys_in_flight: 0,
            leases: Leases::default(),
            reservations: Reservations::new(stock_blocks, now),
            outbox: Outbox::default(),
            hints: Hints::default(),
            stats: Stats::default(),
        }
    }

    /// Does nothing if this is the current namespace and the daemon has not refused it.
    pub fn set_namespace(&mut self, namespace: Namespace) {
        let is_known = self.link.wanted().is_some_and(|wanted| **wanted == namespace);
        if is_known && self.link.state() != SessionState::Refused {
            return;
        }
        let groups: Vec<u32> = namespace.groups.iter().map(|group| group.group).collect();
        self.link.want(namespace);
        let stock = self.reservations.set_groups(groups);
        self.outbox.return_unused(stock);
        self.hints.leave();
        self.leave_namespace();
    }

    /// The lookup's epoch, `None` if the answer is a miss; and whether the engine was idle.
    pub fn begin_lookup(&mut self, keys: usize, now: Instant) -> (Option<u64>, bool) {
        self.stats.lookups += 1;
        let was_idle = self.reservations.used(now);
        let has_room = self.lookups_in_flight < limits::LOOKUPS
            && keys <= limits::KEYS_PER_LOOKUP
            && self.keys_in_flight + keys <= limits::LOOKUP_KEYS
            && !self.leases.is_full();
        if self.link.state() != SessionState::Ready || !has_room {
            self.stats.lookup_failures += 1;
            return (None, was_idle);
        }
        self.lookups_in_flight += 1;
        self.keys_in_flight += keys;
        (Some(self.link.epoch()), was_idle)
    }

    /// Answers with misses, unless there is an answer already.
    pub fn fail_lookup(&mut self, cell: &Cell) {
        if cell.is_waiting() {
            self.stats.lookup_failures += 1;
            cell.settle(Answer::failed());
        }
    }

    /// Applies the daemon's answer, if it could be read, with the leased slots. Returns whether there is something to
    /// deliver.
    pub fn answer_lookup(&mut self, cell: &Cell, epoch: u64, lease: u64, answer: Option<(Answer, Vec<Held>)>) -> bool {
        let is_wanted = cell.is_waiting() && epoch == self.link.epoch();
        self.stats.lookups_late += u64::from(!is_wanted);
        let held = answer.filter(|_| is_wanted).and_then(|(answer, slots)| {
            let is_held = if lease == 0 { slots.is_empty() } else { self.leases.hold(cell.id, lease, slots) };
            is_held.then_some(answer)
        });
        if let Some(answer) = held {
            cell.settle(answer.in_pool(self.link.pool()));
            return false;
        }
        self.fail_lookup(cell);
        if lease != 0 {
            self.outbox.release(lease);
        }
        lease != 0
    }

    /// Applies what the daemon says of keys that were promoting, with the slots that their lease covers now. If that is
    /// of no use, so is what follows. Returns whether there is something to deliver.
    pub fn update_lookup(&mut self, cell: &Cell, epoch: u64, answer: Option<(Answer, Vec<Held>)>) -> bool {
        match answer.filter(|(_, slots)| epoch == self.link.epoch() && self.leases.extend(cell.id, slots)) {
            Some((news, _)) => cell.update(&news),
            None => return self.stop_waiting(cell),
        }
        false
    }

    /// Nobody waits any more for keys that are promoting, or for an answer: they are misses. Returns whether there is
    /// something to deliver.
    pub fn stop_waiting(&mut self, cell: &Cell) -> bool {
        self.fail_lookup(cell);
        let lease = self.leases.of(cell.id).filter(|_| cell.end());
        lease.into_iter().for_each(|lease| self.outbox.end_lookup(lease));
        lease.is_some()
    }

    /// The lookup is no longer in flight.
    pub fn end_lookup(&mut self, cell: &Cell) {
        self.fail_lookup(cell);
        cell.end();
        self.lookups_in_flight -= 1;
        self.keys_in_flight -= cell.key_count();
    }

    pub fn release(&mut self, ticket: u64) {
        let lease = self.leases.release(ticket);
        if let Some(lease) = lease.filter(|_| self.link.is_connected()) {
            self.outbox.release(lease);
        }
    }

    pub fn save(&mut self, saved: Saved) {
        self.outbox.save(saved);
    }

    pub fn hint(&mut self, request: u64, groups: Vec<(u32, Hashes)>) {
        if self.link.state() == SessionState::Ready {
            self.hints.add(request, groups);
        }
    }

    pub fn withdraw_hint(&mut self, request: u64) {
        self.hints.withdraw(request);
    }

    pub fn reserve(&mut self, group: u32, count: usize, now: Instant) -> Vec<Held> {
        self.reservations.used(now);
        let slots = match self.link.state() {
            SessionState::Ready => self.reservations.take(group, count, self.outbox.blocks(), self.link.epoch(), now),
            _ => Vec::new(),
        };
        self.stats.reserve_short += (count - slots.len()) as u64;
        slots
    }

    /// Queues the slots that belong to the engine. Slots of an earlier namespace are aborted, all others counted as
    /// lost.
    pub fn commit(&mut self, group: u32, hashes: &Hashes, predecessor: &[u8], slots: &[Held], now: Instant) {
        let returned: Vec<(Held, Returned)> =
            slots.iter().map(|slot| (*slot, self.reservations.give_back(*slot, now))).collect();
        let epoch = self.link.epoch();
        let (mut kept, mut dropped) = (HashSet::new(), Vec::new());
        for (slot, returned) in returned {
            match returned {
                Returned::Taken(at) if at == epoch => drop(kept.insert(slot)),
                Returned::Taken(_) => dropped.push(slot),
                Returned::Unknown => self.stats.lost += 1,
            }
        }
        self.stats.commits_dropped += dropped.len() as u64;
        self.outbox.abort(dropped);
        let (predecessor, hashes, slots) = (predecessor.to_vec(), hashes.clone(), slots.to_vec());
        let commit = Commit { epoch, group, predecessor, hashes, slots };
        commit.only(|slot| kept.contains(slot)).into_iter().for_each(|run| self.outbox.commit(run));
    }

    pub fn abort(&mut self, slots: &[Held], now: Instant) {
        let is_ours = |slot: &&Held| matches!(self.reservations.give_back(**slot, now), Returned::Taken(_));
        let ours: Vec<Held> = slots.iter().filter(is_ours).copied().collect();
        self.outbox.abort(ours);
    }

    pub fn stats(&self) -> Stats {
        Stats {
            reserved_stock: self.reservations.in_stock() as u64,
            stock_filling: u64::from(self.reservations.is_filling(Instant::now())),
            leases_held: self.leases.len() as u64,
            reservations_held: (self.reservations.taken() + self.outbox.commit_slots().count()) as u64,
            queued: self.outbox.len() as u64,
            breaker_open: u64::from(self.link.is_breaker_open()),
            ..self.stats
        }
    }
}

/// The background thread's calls.
impl Holdings {
    /// The declaration for a new session. Queued aborts and releases are dropped: slots and leases that are not
    /// declared are freed.
    pub fn declare(&mut self) -> Declaration {
        self.outbox.forget_aborts_and_releases();
        let reservations = self.reservations.taken_slots().chain(self.outbox.commit_slots()).collect();
        Declaration { leases: self.leases.slots().into_iter().collect(), reservations }
    }

    /// A session has begun. Slots that it lost, or all if its pool is another one, no longer belong to the engine.
    pub fn welcomed(&mut self, welcome: Welcome) {
        self.stats.reconnects += u64::from(!self.link.pool().is_empty());
        let is_same_pool = self.link.pool().is_empty() || self.link.pool() == welcome.pool_id;
        self.link.welcomed(welcome.pool_id);
        let lost: HashSet<Held> = welcome.lost.into_iter().collect();
        let lost = is_same_pool.then_some(&lost);
        self.reservations.lost(lost);
        self.stats.lost += self.outbox.lost(lost) as u64;
        let orphaned = match lost {
            Some(lost) => self.leases.moved(welcome.lease, lost),
            None => {
                self.leases.void();
                (welcome.lease != 0).then_some(welcome.lease)
            }
        };
        orphaned.into_iter().for_each(|lease| self.outbox.release(lease));
    }

    pub fn disconnected(&mut self) {
        self.link.disconnected();
        self.reservations.disconnected();
        self.hints.disconnected();
    }

    /// The daemon is about to end: it waits for transfers, which the stock is not for.
    pub fn draining(&mut self) {
        self.link.draining();
        let stock = self.reservations.drain();
        self.outbox.return_unused(stock);
    }

    /// The next batch to deliver, with the daemon's name of the namespace.
    pub fn next_batch(&mut self) -> Option<(Batch, u32)> {
        let handle = self.link.handle(self.link.epoch());
        Some((self.outbox.next(handle.is_some())?, handle.unwrap_or_default()))
    }

    /// The next hints about the engine's queue.
    pub fn next_hints(&mut self, session: u64) -> Option<HintRequest> {
        let namespace = self.link.handle(self.link.epoch())?;
        let (withdrawn, hints) = self.hints.next()?;
        Some(HintRequest { session, namespace, withdrawn, hints })
    }

    pub fn is_drained(&self) -> bool {
        self.outbox.len() == 0
    }

    /// The batch was acknowledged; `outcomes` are those of its commits, in order.
    pub fn delivered(&mut self, batch: &Batch, outcomes: impl Iterator<Item = CommitOutcome>) {
        self.outbox.done();
        if !matches!(batch, Batch::Releases { .. }) {
            self.reservations.freed();
        }
        for outcome in outcomes {
            *match outcome {
                CommitOutcome::CommitStored => &mut self.stats.stored,
                CommitOutcome::CommitDuplicate => &mut self.stats.duplicate,
                CommitOutcome::CommitOrphan => &mut self.stats.orphan,
                CommitOutcome::CommitIncomplete => &mut self.stats.incomplete,
                CommitOutcome::CommitLost => &mut self.stats.lost,
            } += 1;
        }
    }

    /// The batch was not acknowledged and will be sent again.
    pub fn undelivered(&mut self, batch: Batch) {
        self.outbox.put_back(batch);
        self.leave_namespace();
    }

    /// The daemon refuses the batch for good: commits become aborts.
    pub fn refused(&mut self, batch: Batch) {
        self.outbox.done();
        if let Batch::Commits(commits) = batch {
            self.stats.commits_dropped += commits.iter().map(|commit| commit.slots.len() as u64).sum::<u64>();
            self.outbox.abort(commits.into_iter().flat_map(|commit| commit.slots));
        }
    }

    /// The next step for the stock, with its epoch and namespace; and whether there is something to deliver.
    pub fn refill(&mut self, now: Instant) -> (Refill, u64, u32, bool) {
        let epoch = self.link.epoch();
        match self.link.handle(epoch).filter(|_| self.link.state() == SessionState::Ready) {
            Some(handle) => {
                let (refill, surplus) = self.reservations.refill(now, self.outbox.is_returning());
                let has_surplus = !surplus.is_empty();
                self.outbox.return_unused(surplus);
                (refill, epoch, handle, has_surplus)
            }
            None => (Refill::Wait(None), epoch, 0, false),
        }
    }

    /// The daemon reserved these slots, `None` if it could not be asked. Returns whether there is something to
    /// deliver.
    pub fn stocked(&mut self, epoch: u64, group: u32, asked: usize, slots: Option<Vec<Held>>, now: Instant) -> bool {
        let unusable = match slots {
            Some(slots) if epoch == self.link.epoch() && !self.link.is_draining() => {
                self.reservations.stocked(group, slots, asked, now)
            }
            Some(slots) => slots,
            None => {
                self.reservations.not_stocked(group, now);
                Vec::new()
            }
        };
        let has_surplus = !unusable.is_empty();
        self.outbox.return_unused(unusable);
        has_surplus
    }

    pub fn session_refused(&mut self, error: &Error) {
        self.link.refused(None, error);
    }

    /// Aborts queued commits of earlier namespaces.
    fn leave_namespace(&mut self) {
        let left = self.outbox.leave(self.link.epoch());
        self.stats.commits_dropped += left.len() as u64;
        self.outbox.abort(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack;

    const POOL: [u8; 16] = [1; 16];

    fn held(slot: u32) -> Held {
        Held { slot, generation: 1 }
    }

    fn namespace(name: &str) -> Namespace {
        let groups = vec![crate::proto::Group { group: 0, ..Default::default() }];
        Namespace { fields: [("model".to_string(), name.to_string())].into(), groups }
    }

    fn welcome(pool: [u8; 16]) -> Welcome {
        Welcome { pool_id: pool.to_vec(), ..Default::default() }
    }

    /// Ready, with slots 0 to 7 in the stock.
    fn ready() -> Holdings {
        let mut holdings = Holdings::new(8, Instant::now());
        holdings.set_namespace(namespace("a"));
        reconnect(&mut holdings, welcome(POOL));
        holdings.stocked(1, 0, 8, Some((0..8).map(held).collect()), Instant::now());
        holdings
    }

    fn reconnect(holdings: &mut Holdings, welcome: Welcome) {
        holdings.disconnected();
        holdings.declare();
        holdings.welcomed(welcome);
        holdings.link.attached();
        holdings.link.named(holdings.link.epoch(), 5);
    }

    fn commit(holdings: &mut Holdings, slots: &[Held]) {
        let hashes: Vec<[u8; 4]> = slots.iter().map(|slot| slot.slot.to_le_bytes()).collect();
        holdings.commit(0, &pack(hashes.iter().map(|hash| hash.as_slice())).unwrap(), b"", slots, Instant::now());
    }

    fn releases(lease: u64) -> Batch {
        Batch::Releases { leases: vec![lease], lookups: Vec::new(), saved: Saved::default() }
    }

    fn batches(holdings: &mut Holdings) -> Vec<Batch> {
        std::iter::from_fn(|| holdings.next_batch().map(|(batch, _)| batch)).collect()
    }

    #[test]
    fn what_the_engine_holds_is_declared_and_the_rest_is_not() {
        let mut holdings = ready();
        let slots = holdings.reserve(0, 4, Instant::now());
        commit(&mut holdings, &slots[..1]);
        holdings.abort(&slots[1..2], Instant::now());
        holdings.disconnected();
        let mut declared = holdings.declare().reservations;
        declared.sort_by_key(|slot| slot.slot);
        assert_eq!(declared, [slots[0], slots[2], slots[3]]);
        assert_eq!(holdings.stats().reserved_stock, 0);
    }

    #[test]
    fn an_unacknowledged_commit_survives_a_reconnect_and_a_lost_one_does_not() {
        let mut holdings = ready();
        let slots = holdings.reserve(0, 2, Instant::now());
        commit(&mut holdings, &slots);
        let (batch, _) = holdings.next_batch().unwrap();
        holdings.undelivered(batch);
        reconnect(&mut holdings, Welcome { lost: vec![slots[0]], ..welcome(POOL) });
        let [Batch::Commits(commits)] = &batches(&mut holdings)[..] else { panic!("no commit") };
        assert_eq!(commits.len(), 1);
        assert_eq!(commits[0].slots, [slots[1]]);
        assert_eq!(commits[0].predecessor, slots[0].slot.to_le_bytes(), "the daemon may have the lost one's block");
        assert_eq!(holdings.stats().lost, 1);
    }

    #[test]
    fn another_pool_voids_everything() {
        let mut holdings = ready();
        let slots = holdings.reserve(0, 3, Instant::now());
        commit(&mut holdings, &slots[..1]);
        let cell = Cell::new(vec![1]);
        let epoch = holdings.begin_lookup(1, Instant::now()).0.unwrap();
        holdings.answer_lookup(&cell, epoch, 9, Some((Answer::default(), vec![held(7)])));
        reconnect(&mut holdings, Welcome { lease: 4, ..welcome([2; 16]) });
        assert_eq!(batches(&mut holdings), [releases(4)], "a lease declared of the old pool is given back");
        commit(&mut holdings, &slots[1..2]);
        holdings.abort(&slots[2..], Instant::now());
        holdings.release(cell.id);
        assert_eq!(batches(&mut holdings), []);
        assert_eq!(holdings.stats().lost, 2);
        assert_eq!(holdings.declare(), Declaration::default());
    }

    #[test]
    fn commits_of_a_namespace_that_was_left_become_aborts() {
        let mut holdings = ready();
        let slots = holdings.reserve(0, 3, Instant::now());
        commit(&mut holdings, &slots[..1]);
        let (in_flight, _) = holdings.next_batch().unwrap();
        commit(&mut holdings, &slots[1..2]);
        holdings.set_namespace(namespace("b"));
        holdings.link.named(2, 6);
        commit(&mut holdings, &slots[2..]);
        let [aborted, unused] = [1..3, 3..8].map(|slots| slots.map(held).collect());
        assert_eq!(batches(&mut holdings), [Batch::Aborts(aborted), Batch::Returns(unused)]);
        holdings.undelivered(in_flight);
        assert_eq!(batches(&mut holdings), [Batch::Aborts(vec![held(0)])]);
        assert_eq!(holdings.stats().commits_dropped, 3);
    }

    #[test]
    fn slots_reserved_for_a_namespace_that_was_left_are_given_back() {
        let mut holdings = ready();
        batches(&mut holdings);
        holdings.set_namespace(namespace("b"));
        holdings.link.named(2, 6);
        batches(&mut holdings);
        holdings.stocked(1, 0, 2, Some(vec![held(20), held(21)]), Instant::now());
        assert_eq!(batches(&mut holdings), [Batch::Returns(vec![held(20), held(21)])]);
        assert_eq!(holdings.stats().reserved_stock, 0);
    }

    #[test]
    fn the_same_namespace_again_changes_nothing() {
        let mut holdings = ready();
        holdings.set_namespace(namespace("a"));
        assert_eq!(holdings.link.state(), SessionState::Ready);
        assert_eq!(holdings.stats().reserved_stock, 8);
    }

    #[test]
    fn an_answer_nobody_waits_for_gives_its_lease_back() {
        let answer = || Some((Answer::default(), vec![held(7)]));
        for is_epoch_old in [false, true] {
            let mut holdings = ready();
            let cell = Cell::new(vec![1]);
            let epoch = holdings.begin_lookup(1, Instant::now()).0.unwrap();
            match is_epoch_old {
                true => holdings.set_namespace(namespace("b")),
                false => holdings.fail_lookup(&cell),
            }
            batches(&mut holdings);
            holdings.answer_lookup(&cell, epoch, 9, answer());
            assert_eq!(batches(&mut holdings), [releases(9)]);
            assert_eq!((holdings.stats().lookups_late, holdings.stats().leases_held), (1, 0));
        }
    }

    #[test]
    fn an_unreadable_answer_is_a_failure_and_its_lease_is_given_back() {
        let mut holdings = ready();
        let cell = Cell::new(vec![1]);
        let epoch = holdings.begin_lookup(1, Instant::now()).0.unwrap();
        holdings.answer_lookup(&cell, epoch, 9, None);
        assert_eq!(batches(&mut holdings), [releases(9)]);
        assert_eq!(holdings.stats().lookup_failures, 1);
        assert!(!cell.is_waiting());
    }

    #[test]
    fn lookups_on_their_way_are_limited() {
        let mut holdings = ready();
        let mut begin = |keys| holdings.begin_lookup(keys, Instant::now()).0.is_some();
        assert!(!begin(limits::KEYS_PER_LOOKUP + 1));
        let full = limits::LOOKUP_KEYS / limits::KEYS_PER_LOOKUP;
        assert!((0..full - 1).all(|_| begin(limits::KEYS_PER_LOOKUP)));
        assert!((full..=limits::LOOKUPS).all(|_| begin(1)));
        assert!(!begin(1), "there are too many");
        holdings.end_lookup(&Cell::new(vec![1]));
        let mut begin = |keys| holdings.begin_lookup(keys, Instant::now()).0.is_some();
        assert!(!begin(limits::KEYS_PER_LOOKUP), "there are too many keys");
        assert!(begin(1));
    }

    #[test]
    fn a_slot_is_committed_once() {
        let mut holdings = ready();
        let slots = holdings.reserve(0, 1, Instant::now());
        commit(&mut holdings, &slots);
        commit(&mut holdings, &slots);
        holdings.abort(&slots, Instant::now());
        assert_eq!(batches(&mut holdings).len(), 1);
        assert_eq!(holdings.stats().lost, 1);
    }

    #[test]
    fn nothing_is_handed_out_while_the_session_is_not_ready() {
        let mut holdings = ready();
        holdings.link.draining();
        assert_eq!(holdings.reserve(0, 1, Instant::now()), []);
        assert!(holdings.begin_lookup(1, Instant::now()).0.is_none());
        assert_eq!(holdings.stats().reserve_short, 1);
    }
}
