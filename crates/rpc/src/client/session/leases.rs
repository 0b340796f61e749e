//! Which tickets hold which leases.
//!
//! Invariants: a lease is released when its last ticket is released. Each release is returned once. After a reconnect
//! one lease covers everything that was declared, and all tickets share it.

use std::collections::{HashMap, HashSet};

use super::limits::LEASED_BLOCKS;
use crate::proto::Held;

/// See the module documentation.
#[derive(Default)]
pub(super) struct Leases {
    tickets: HashMap<u64, Leased>,
    /// Number of tickets of each lease.
    users: HashMap<u64, usize>,
    /// With duplicates, where tickets lease the same slot.
    blocks: usize,
}

struct Leased {
    lease: u64,
    slots: Vec<Held>,
}

impl Leases {
    /// Tickets that hold a lease.
    pub fn len(&self) -> usize {
        self.tickets.len()
    }

    pub fn is_full(&self) -> bool {
        self.blocks >= LEASED_BLOCKS
    }

    /// The lease that a ticket holds.
    pub fn of(&self, ticket: u64) -> Option<u64> {
        self.tickets.get(&ticket).map(|leased| leased.lease)
    }

    /// Records that `ticket` holds `lease`; false, without a record, if that would exceed the limit.
    pub fn hold(&mut self, ticket: u64, lease: u64, slots: Vec<Held>) -> bool {
        if self.blocks + slots.len() > LEASED_BLOCKS {
            return false;
        }
        self.blocks += slots.len();
        *self.users.entry(lease).or_default() += 1;
        self.tickets.insert(ticket, Leased { lease, slots });
        true
    }

    /// Records that the lease of `ticket` covers these too; false, without a record, if that would exceed the limit or
    /// the ticket holds none any more.
    pub fn extend(&mut self, ticket: u64, slots: &[Held]) -> bool {
        let Some(leased) = self.tickets.get_mut(&ticket) else { return false };
        if self.blocks + slots.len() > LEASED_BLOCKS {
            return false;
        }
        self.blocks += slots.len();
        leased.slots.extend_from_slice(slots);
        true
    }

    /// Removes a ticket; returns the lease to release, if this was its last ticket.
    pub fn release(&mut self, ticket: u64) -> Option<u64> {
        let Leased { lease, slots } = self.tickets.remove(&ticket)?;
        self.blocks -= slots.len();
        let users = self.users.get_mut(&lease)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        self.users.remove(&lease);
        (lease != 0).then_some(lease)
    }

    /// Every leased slot once, as declared after a reconnect.
    pub fn slots(&self) -> HashSet<Held> {
        self.tickets.values().flat_map(|leased| leased.slots.iter().copied()).collect()
    }

    /// The daemon now holds the declared slots, except `lost`, under `lease` (0 if there are none). Returns the lease
    /// to release, if no ticket is left to hold it.
    pub fn moved(&mut self, lease: u64, lost: &HashSet<Held>) -> Option<u64> {
        for leased in self.tickets.values_mut() {
            leased.slots.retain(|slot| !lost.contains(slot));
            leased.lease = lease;
        }
        self.blocks = self.tickets.values().map(|leased| leased.slots.len()).sum();
        self.users = HashMap::from([(lease, self.tickets.len())]);
        self.users.retain(|_, tickets| *tickets > 0);
        (self.tickets.is_empty() && lease != 0).then_some(lease)
    }

    /// The pool of the leases is gone.
    pub fn void(&mut self) {
        *self = Leases::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(slot: u32) -> Held {
        Held { slot, generation: 1 }
    }

    #[test]
    fn after_a_reconnect_the_last_ticket_releases_the_shared_lease() {
        let mut leases = Leases::default();
        leases.hold(1, 10, vec![held(1), held(2)]);
        leases.hold(2, 11, vec![held(2), held(3)]);
        leases.hold(3, 12, vec![held(4)]);
        assert_eq!(leases.slots(), HashSet::from([held(1), held(2), held(3), held(4)]));
        assert_eq!(leases.release(3), Some(12));

        assert_eq!(leases.moved(77, &HashSet::from([held(1)])), None);
        assert_eq!(leases.slots(), HashSet::from([held(2), held(3)]));
        assert_eq!(leases.release(1), None);
        assert_eq!(leases.release(1), None, "a ticket is released once");
        leases.hold(4, 78, vec![held(5)]);
        assert_eq!(leases.release(4), Some(78));
        assert_eq!(leases.release(2), Some(77));
    }

    #[test]
    fn a_declared_lease_that_nobody_waits_for_any_more_is_released_at_once() {
        let mut leases = Leases::default();
        leases.hold(1, 10, vec![held(1)]);
        leases.release(1);
        assert_eq!(leases.moved(77, &HashSet::new()), Some(77));
        assert_eq!(leases.moved(0, &HashSet::new()), None);
    }

    #[test]
    fn leased_blocks_are_limited() {
        let mut leases = Leases::default();
        assert!(leases.hold(1, 10, vec![held(1); LEASED_BLOCKS - 1]));
        assert!(!leases.hold(2, 11, vec![held(1); 2]));
        assert!(!leases.extend(1, &[held(2); 2]) && !leases.extend(2, &[held(2)]));
        assert!(leases.hold(3, 12, Vec::new()) && leases.extend(3, &[held(1)]) && leases.is_full());
        leases.release(1);
        assert!(!leases.is_full());
    }
}
