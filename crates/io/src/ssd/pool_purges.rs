//! Purges that the pool knows of.
//!
//! To the lists of the disks, that of the pool is one more: it tells disks that were away what was purged, also if no
//! other disk of that time is there. It has to have heard of what a disk knows, too: if it has not, a disk that had not
//! heard of it either may have filled the pool. As those of the disks, it is bounded, and the earliest purges go.

use std::collections::BTreeMap;

use forebay_core::NamespaceId;

use crate::pool::ENDED_PURGES;

/// See the module documentation.
#[derive(Default)]
pub struct PoolPurges {
    times: BTreeMap<NamespaceId, u64>,
    has_met_disks: bool,
}

impl PoolPurges {
    /// Of each namespace, when its last purge has ended. `has_met_disks`: a disk that had blocks may have filled the
    /// pool before.
    pub fn new(times: BTreeMap<NamespaceId, u64>, has_met_disks: bool) -> PoolPurges {
        PoolPurges { times, has_met_disks }
    }

    pub(super) fn times(&self) -> &BTreeMap<NamespaceId, u64> {
        &self.times
    }

    /// The pool hears of these, and forgets the earliest beyond its limit. Returns those that it did not know of; a
    /// full list may have had what is earlier than all of its own.
    pub(super) fn hear(&mut self, mut purges: BTreeMap<NamespaceId, u64>) -> BTreeMap<NamespaceId, u64> {
        let is_full = self.times.len() == ENDED_PURGES as usize;
        let least = if is_full { self.times.values().copied().min().unwrap_or(0) } else { 0 };
        purges.retain(|namespace, time| match self.times.get(namespace) {
            Some(known) => *known < *time,
            None => *time > least,
        });
        self.times.extend(&purges);
        self.cut();
        purges
    }

    /// The first disk that had blocks meets the pool: what it knows needs no purge. False if it is not the first.
    pub(super) fn meet_disks(&mut self) -> bool {
        !std::mem::replace(&mut self.has_met_disks, true)
    }

    fn cut(&mut self) {
        let excess = self.times.len().saturating_sub(ENDED_PURGES as usize);
        if excess > 0 {
            let mut order: Vec<_> = self.times.iter().map(|(namespace, time)| (*time, *namespace)).collect();
            order.select_nth_unstable(excess - 1);
            order[..excess].iter().for_each(|(_, namespace)| _ = self.times.remove(namespace));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn purges(namespaces: std::ops::Range<u128>, time: u64) -> BTreeMap<NamespaceId, u64> {
        namespaces.map(|namespace| (NamespaceId(namespace), time + namespace as u64)).collect()
    }

    #[test]
    fn a_pool_hears_of_what_is_later_than_its_own_and_a_full_list_may_have_had_what_is_earlier() {
        let most = u128::from(ENDED_PURGES);
        let mut pool = PoolPurges::new(purges(0..10, 1000), true);
        assert_eq!(pool.hear(purges(0..10, 1000)), BTreeMap::new());
        assert_eq!(pool.hear(purges(4..6, 900)), BTreeMap::new());
        assert_eq!(pool.hear(purges(8..12, 1001)), purges(8..12, 1001));
        // Of a build that wrote no times.
        assert_eq!(pool.hear(BTreeMap::from([(NamespaceId(20), 0)])), BTreeMap::new());
        assert_eq!(pool.hear(purges(0..most, 5000)), purges(0..most, 5000));
        assert_eq!(pool.hear(BTreeMap::from([(NamespaceId(1 << 90), 5000)])), BTreeMap::new());
        let later = purges(most + 5..most + 8, 5000);
        assert_eq!(pool.hear(later.clone()), later);
        assert_eq!((pool.times().len(), pool.times().keys().next()), (most as usize, Some(&NamespaceId(3))));
        assert_eq!(pool.hear(purges(0..3, 5000)), BTreeMap::new(), "they were forgotten");
    }

    #[test]
    fn of_more_than_a_pool_has_room_for_it_keeps_the_latest() {
        let mut pool = PoolPurges::default();
        let all = purges(0..6000, 1000);
        assert_eq!(pool.hear(all.clone()), all);
        assert_eq!(pool.times(), &purges(6000 - u128::from(ENDED_PURGES)..6000, 1000));
    }
}
