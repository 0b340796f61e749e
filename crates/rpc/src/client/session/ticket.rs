//! Both ends of a lookup: the engine holds the ticket, the background thread the lookup in flight.
//!
//! Invariants: a ticket is answered exactly once; if its lookup is dropped, with a failure. Afterwards only keys that
//! are promoting change: they become ready or a miss, at the latest when the lookup ends. The lease of an answer is
//! released when the ticket is dropped, or at once if that happened before.
//!
//! Locks are taken in the order holdings, cell.

use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, Result};

use super::answer::{Answer, Cell, Group};
use super::shared::Shared;
use crate::Hashes;
use crate::proto;

/// The engine's end of a lookup. Dropping it returns the lease.
pub struct Ticket {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
}

impl Ticket {
    pub(super) fn new(shared: Arc<Shared>, cell: Arc<Cell>) -> Ticket {
        Ticket { shared, cell }
    }

    /// Whether there is an answer; waits for one at most `timeout`.
    pub fn poll(&self, timeout: Duration) -> bool {
        self.cell.wait(timeout)
    }

    /// One byte per key of the `position`-th group: 0 miss, 1 ready and leased, 2 promoting, which becomes one of the
    /// others. Errors with `Invalid` if there is no such group.
    pub fn states(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.states, 0, 1)
    }

    /// Little-endian u32 slots, one per key: 0xFFFFFFFF where the key is not ready.
    pub fn slots(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.slots, 0xFF, 4)
    }

    /// Little-endian u32 generations, parallel to `slots`.
    pub fn generations(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.generations, 0xFF, 4)
    }

    /// Where each key's block was before this hit, a byte a key: 0 the pool, 1 a tier of this host, 2 a shared tier.
    /// The first hit of a block that a tier brought up is the tier's. 0 for keys that are not ready.
    pub fn sources(&self, position: usize) -> Result<Vec<u8>> {
        self.read(position, |group| &group.sources, 0, 1)
    }

    /// Whether the daemon could not be asked.
    pub fn has_failed(&self) -> bool {
        self.cell.read(|answer| answer.has_failed).unwrap_or(false)
    }

    /// The pool with the slots; empty if the lookup failed or is in flight.
    pub fn pool(&self) -> Vec<u8> {
        self.cell.read(|answer| answer.pool.clone()).unwrap_or_default()
    }

    /// Keys that are promoting are misses from now on; all keys, if there is no answer yet. What is ready stays leased.
    /// Idempotent.
    pub fn stop_waiting(&self) {
        if self.shared.holdings().stop_waiting(&self.cell) {
            self.shared.wake_deliver.notify_one();
        }
    }

    /// Returns the lease. Idempotent.
    pub fn release(&self) {
        let mut holdings = self.shared.holdings();
        if self.cell.release() {
            holdings.release(self.cell.id);
            drop(holdings);
            self.shared.wake_deliver.notify_one();
        }
    }

    fn read(
        &self,
        position: usize,
        part: impl Fn(&Group) -> &Vec<u8>,
        missing: u8,
        key_bytes: usize,
    ) -> Result<Vec<u8>> {
        let no_such_group = || {
            Error::invalid("the lookup has no such group")
                .with("position", position)
                .with("groups", self.cell.keys.len())
        };
        let keys = self.cell.keys.get(position).ok_or_else(no_such_group)?;
        let group = self.cell.read(|answer| answer.groups.get(position).map(|group| part(group).clone()));
        Ok(group.flatten().unwrap_or_else(|| vec![missing; keys * key_bytes]))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.release();
    }
}

/// The background thread's end of a lookup: it carries the request and the answer.
pub(super) struct Lookup {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
    /// Epoch of the lookup's namespace.
    epoch: u64,
    groups: Vec<(u32, Hashes)>,
}

impl Lookup {
    pub fn new(shared: Arc<Shared>, cell: Arc<Cell>, epoch: u64, groups: Vec<(u32, Hashes)>) -> Lookup {
        Lookup { shared, cell, epoch, groups }
    }

    /// The message to send, if the answer will be useful; can be taken once.
    pub fn request(&mut self, session: u64) -> Option<proto::LookupRequest> {
        let namespace = self.shared.holdings().link.handle(self.epoch)?;
        let groups = std::mem::take(&mut self.groups).into_iter().map(|(group, hashes)| proto::GroupKeys {
            group,
            hash_bytes: hashes.hash_bytes() as u32,
            hashes: hashes.into_packed(),
        });
        let groups = groups.collect();
        self.cell.is_waiting().then_some(proto::LookupRequest { session, namespace, groups })
    }

    /// The deadline passed: the engine continues without the answer, which may still come.
    pub fn give_up(&self) {
        self.shared.holdings().fail_lookup(&self.cell);
    }

    /// Takes the daemon's answer, and returns the lease at once if nobody needs it any more.
    pub fn answer(&self, reply: proto::LookupReply) {
        let lease = reply.lease;
        let answer = Answer::from_reply(reply, &self.cell.keys);
        if self.shared.holdings().answer_lookup(&self.cell, self.epoch, lease, answer) {
            self.shared.wake_deliver.notify_one();
        }
    }

    /// Takes what the daemon says of the keys that were promoting, and ends the lookup if that is of no use.
    pub fn update(&self, reply: proto::LookupReply) {
        let news = Answer::from_reply(reply, &self.cell.promoting());
        if self.shared.holdings().update_lookup(&self.cell, self.epoch, news) {
            self.shared.wake_deliver.notify_one();
        }
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        self.shared.holdings().end_lookup(&self.cell);
    }
}
