//! The purges that have not ended, as the pool records them.
//!
//! Invariant: a purge of blocks in the pool or on this host's disks is in the record before the first block goes and
//! until the last one is gone. So a daemon that starts goes on with it, before it serves anything of the namespace.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_io::pool::{NAMESPACES, PURGES, Pool, PurgePlaces, PurgeRecord};

/// Records that purges of namespaces which the daemon does not know leave to the others: so many may be known.
const KEPT: usize = NAMESPACES as usize;

/// See the module's head.
pub struct Purges {
    /// From where each is not gone yet, and its number in the pool's file.
    records: BTreeMap<NamespaceId, (u32, PurgePlaces)>,
    vacant: Vec<u32>,
}

impl Default for Purges {
    fn default() -> Purges {
        Purges { records: BTreeMap::new(), vacant: (0..PURGES).rev().collect() }
    }
}

impl Purges {
    /// Found in the pool.
    pub fn restore(&mut self, found: &[(u32, PurgeRecord)]) {
        self.records = found.iter().map(|(number, record)| (record.namespace, (*number, record.places))).collect();
        let used: BTreeSet<u32> = found.iter().map(|(number, _)| *number).collect();
        self.vacant.retain(|number| !used.contains(number));
    }

    /// The purge is about to begin, or to begin anew. Errors with `Full` if too many are under way.
    pub fn begin(&mut self, pool: &Pool, namespace: NamespaceId, wanted: PurgePlaces, is_known: bool) -> Result<()> {
        let (number, old) = match self.records.get(&namespace) {
            Some((number, places)) => (*number, *places),
            None => (self.vacant_number(is_known)?, PurgePlaces::default()),
        };
        let places = PurgePlaces { pool: old.pool || wanted.pool, disks: old.disks || wanted.disks };
        if places != old {
            pool.set_purge(number, &PurgeRecord { namespace, places })?;
            self.vacant.pop_if(|vacant| *vacant == number);
            self.records.insert(namespace, (number, places));
        }
        Ok(())
    }

    fn vacant_number(&self, is_known: bool) -> Result<u32> {
        let kept = if is_known { 0 } else { KEPT };
        self.vacant.last().copied().filter(|_| self.vacant.len() > kept).ok_or_else(|| {
            Error::new(ErrorKind::Full, "too many purges have not ended")
                .with("purges", self.records.len())
                .with("limit", PURGES as usize - kept)
                .hint("they wait for a disk that is missing or sick: `forebay inspect` names it; purge again when it is well")
        })
    }

    /// The pool has no such block any more.
    pub fn off_pool(&mut self, pool: &Pool, namespace: NamespaceId) {
        self.off(pool, namespace, |places| places.pool = false);
    }

    /// The disks have no such block any more.
    pub fn off_disks(&mut self, pool: &Pool, namespace: NamespaceId) {
        self.off(pool, namespace, |places| places.disks = false);
    }

    fn off(&mut self, pool: &Pool, namespace: NamespaceId, is_off: impl FnOnce(&mut PurgePlaces)) {
        let Some((number, old)) = self.records.get(&namespace).copied() else { return };
        let mut places = old;
        is_off(&mut places);
        let written = match places {
            places if places == old => return,
            PurgePlaces { pool: false, disks: false } => pool.clear_purge(number),
            places => pool.set_purge(number, &PurgeRecord { namespace, places }),
        };
        // What stays is done once more by the next daemon.
        if let Err(error) = written {
            return tracing::warn!(%namespace, %error, "cannot write down the end of a purge");
        }
        if places == PurgePlaces::default() {
            self.records.remove(&namespace);
            self.vacant.push(number);
        } else {
            self.records.insert(namespace, (number, places));
        }
    }

    /// What is not purged yet.
    pub fn under_way(&self) -> Vec<(NamespaceId, PurgePlaces)> {
        self.records.iter().map(|(namespace, (_, places))| (*namespace, *places)).collect()
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::pool::{HugePages, PoolConfig};

    use super::*;

    const POOL: PurgePlaces = PurgePlaces { pool: true, disks: false };
    const DISKS: PurgePlaces = PurgePlaces { pool: false, disks: true };
    const BOTH: PurgePlaces = PurgePlaces { pool: true, disks: true };

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Place {
            Place(tempfile::tempdir_in("/dev/shm").unwrap())
        }

        /// As the next daemon finds them.
        fn open(&self) -> (Pool, Purges) {
            let (directory, huge_pages) = (self.0.path().to_owned(), HugePages::Off);
            let config = PoolConfig { directory, capacity_bytes: 4 << 20, unit_bytes: None, huge_pages };
            let pool = Pool::open(&config).unwrap().pool;
            let mut purges = Purges::default();
            purges.restore(&pool.purges().unwrap());
            (pool, purges)
        }
    }

    #[test]
    fn what_a_purge_has_left_is_known_to_the_next_daemon() {
        let place = Place::new();
        let [one, two] = [1, 2].map(NamespaceId);
        let (pool, mut purges) = place.open();
        purges.begin(&pool, one, BOTH, true).unwrap();
        purges.begin(&pool, two, DISKS, true).unwrap();
        purges.off_pool(&pool, one);
        drop(pool);
        let (pool, mut purges) = place.open();
        assert_eq!(purges.under_way(), [(one, DISKS), (two, DISKS)]);
        // Another purge of the same namespace, before the first has ended.
        purges.begin(&pool, one, BOTH, true).unwrap();
        purges.off_disks(&pool, two);
        purges.off_disks(&pool, two);
        drop(pool);
        let (pool, mut purges) = place.open();
        assert_eq!(purges.under_way(), [(one, BOTH)]);
        purges.off_disks(&pool, one);
        assert_eq!(purges.under_way(), [(one, POOL)]);
        purges.off_pool(&pool, one);
        drop(pool);
        assert_eq!(place.open().1.under_way(), []);
    }

    /// They wait for a disk that is missing, and any number can be asked for.
    #[test]
    fn purges_of_unknown_namespaces_leave_room_for_those_that_the_daemon_knows() {
        let place = Place::new();
        let (pool, mut purges) = place.open();
        let begin = |purges: &mut Purges, id, is_known| purges.begin(&pool, NamespaceId(id), DISKS, is_known);
        let begun = (0..).take_while(|id| begin(&mut purges, *id, false).is_ok()).count();
        assert_eq!(begun, PURGES as usize - KEPT);
        let refused = begin(&mut purges, 1 << 64, false).unwrap_err();
        assert_eq!((refused.kind(), refused.hint_text().is_some()), (ErrorKind::Full, true));
        begin(&mut purges, 0, false).expect("it is under way");
        let known = (1 << 65..).take_while(|id| begin(&mut purges, *id, true).is_ok()).count();
        assert_eq!((known, purges.under_way().len()), (KEPT, PURGES as usize));
        drop(purges);
        drop(pool);
        let (pool, mut purges) = place.open();
        assert!(purges.begin(&pool, NamespaceId(1 << 66), BOTH, true).is_err());
        purges.off_disks(&pool, NamespaceId(7));
        purges.begin(&pool, NamespaceId(1 << 66), BOTH, true).expect("there is room again");
    }
}
