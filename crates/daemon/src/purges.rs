//! Purges, as the pool records them: those that have not ended, and when others have.
//!
//! Invariants: a purge of blocks in the pool or on this host's disks is in the record before the first block goes and
//! until the last one is gone. So a daemon that starts goes on with it, before it serves anything of the namespace.
//! The latest purges that have ended are in the record too, each with the time that the disks have for it, before
//! anybody hears that it has. So a disk that was away hears of it from the pool, and what a disk knows of that the pool
//! has not heard of is found.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_io::pool::{ENDED_PURGES, EndedPurge, NAMESPACES, PURGES, Pool, PurgePlaces, PurgeRecord};
use forebay_io::ssd::purge_time_after;

/// Records that purges of namespaces which the daemon does not know leave to the others: so many may be known.
const KEPT: usize = NAMESPACES as usize;

/// See the module's head.
pub struct Purges {
    /// From where each is not gone yet, and its number in the pool's file.
    records: BTreeMap<NamespaceId, (u32, PurgePlaces)>,
    vacant: Vec<u32>,
    ended: Ended,
    /// Of those of `records`, which somebody was told of as not ended.
    told: BTreeSet<NamespaceId>,
}

/// When the last purge of each namespace has ended, as far as there is room.
struct Ended {
    /// With its number in the pool's file.
    records: BTreeMap<NamespaceId, (u32, u64)>,
    vacant: Vec<u32>,
}

impl Default for Purges {
    fn default() -> Purges {
        let ended = Ended { records: BTreeMap::new(), vacant: (0..ENDED_PURGES).rev().collect() };
        Purges { records: BTreeMap::new(), vacant: (0..PURGES).rev().collect(), ended, told: BTreeSet::new() }
    }
}

impl Purges {
    /// Found in the pool: purges that have not ended, and those that have.
    pub fn restore(&mut self, found: &[(u32, PurgeRecord)], ended: &[(u32, EndedPurge)]) {
        self.ended.restore(ended);
        self.records = found.iter().map(|(number, record)| (record.namespace, (*number, record.places))).collect();
        let used: BTreeSet<u32> = found.iter().map(|(number, _)| *number).collect();
        self.vacant.retain(|number| !used.contains(number));
        self.told = self.records.keys().copied().collect();
    }

    /// Somebody is told that these purges have not ended, as far as they have not: the log says when they have.
    pub fn note_told(&mut self, namespaces: &[NamespaceId]) {
        let waiting = namespaces.iter().filter(|namespace| self.records.contains_key(namespace));
        self.told.extend(waiting);
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

    /// The pool has no such block any more. If the host `has_disks`, the purge ends when they are done with it.
    pub fn off_pool(&mut self, pool: &Pool, namespace: NamespaceId, has_disks: bool) {
        let time = (!has_disks).then(|| self.ended.time_of_next());
        self.off(pool, namespace, time, |places| places.pool = false);
    }

    /// Neither the pool nor the host has anything to remove. Disks that are configured later hear of it.
    pub fn end_without_disks(&mut self, pool: &Pool, namespace: NamespaceId) -> Result<()> {
        let time = self.ended.time_of_next();
        self.ended.set(pool, EndedPurge { namespace, time })
    }

    /// The disks have no such block any more, since that time if they remember it.
    pub fn off_disks(&mut self, pool: &Pool, namespace: NamespaceId, time: Option<u64>) {
        self.off(pool, namespace, time, |places| places.disks = false);
    }

    /// Purges that the disks know of, and when each has ended, at a pool that had met no disk. From now on the pool has
    /// to have heard of what a disk knows.
    pub fn hear(&mut self, pool: &Pool, heard: BTreeMap<NamespaceId, u64>) {
        // Some 2,000 at most, once in a pool's life, at about 1 µs each.
        let record = |(namespace, time)| self.ended.set(pool, EndedPurge { namespace, time });
        let written = heard.into_iter().try_for_each(record);
        // If the pool keeps that it has met a disk, what is not written is purged again by the next daemon.
        if let Err(error) = pool.set_met_disks().and(written) {
            tracing::warn!(%error, "cannot write down all purges of which the disks know");
        }
    }

    /// If the purge has ended at that `time`, it is written down before it is forgotten.
    fn off(&mut self, pool: &Pool, namespace: NamespaceId, time: Option<u64>, is_off: impl FnOnce(&mut PurgePlaces)) {
        let Some((number, old)) = self.records.get(&namespace).copied() else { return };
        let mut places = old;
        is_off(&mut places);
        if places == old {
            return;
        }
        let is_ended = time.map_or(Ok(()), |time| self.ended.set(pool, EndedPurge { namespace, time }));
        let written = is_ended.and_then(|()| match places {
            PurgePlaces { pool: false, disks: false } => pool.clear_purge(number),
            places => pool.set_purge(number, &PurgeRecord { namespace, places }),
        });
        // What stays is done once more by the next daemon.
        if let Err(error) = written {
            return tracing::warn!(%namespace, %error, "cannot write down the end of a purge");
        }
        if places == PurgePlaces::default() {
            self.records.remove(&namespace);
            self.vacant.push(number);
            if self.told.remove(&namespace) && self.told.is_empty() {
                tracing::info!("all purges that had not ended have ended now");
            }
        } else {
            self.records.insert(namespace, (number, places));
        }
    }

    /// What is not purged yet.
    pub fn under_way(&self) -> Vec<(NamespaceId, PurgePlaces)> {
        self.records.iter().map(|(namespace, (_, places))| (*namespace, *places)).collect()
    }
}

impl Ended {
    fn restore(&mut self, found: &[(u32, EndedPurge)]) {
        self.records = found.iter().map(|(number, record)| (record.namespace, (*number, record.time))).collect();
        let used: BTreeSet<u32> = found.iter().map(|(number, _)| *number).collect();
        self.vacant.retain(|number| !used.contains(number));
    }

    /// In the place of the earliest, if there is no other. An earlier one than those has none.
    fn set(&mut self, pool: &Pool, record: EndedPurge) -> Result<()> {
        let EndedPurge { namespace, time } = record;
        let known = self.records.get(&namespace).map(|(number, _)| *number);
        let (number, replaced) = match known.or_else(|| self.vacant.last().copied()) {
            Some(number) => (number, namespace),
            None => {
                let order = self.records.iter().map(|(namespace, (number, time))| (*time, *number, *namespace));
                let (earliest, number, replaced) = order.min().expect("a list without a vacant place has records");
                if time < earliest {
                    return Ok(());
                }
                (number, replaced)
            }
        };
        pool.set_ended_purge(number, &record)?;
        self.vacant.pop_if(|vacant| *vacant == number);
        self.records.remove(&replaced);
        self.records.insert(namespace, (number, time));
        Ok(())
    }

    fn time_of_next(&self) -> u64 {
        purge_time_after(self.records.values().map(|(_, time)| *time).max().unwrap_or(0))
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
            purges.restore(&pool.purges().unwrap(), &pool.ended_purges().unwrap());
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
        purges.off_pool(&pool, one, true);
        drop(pool);
        let (pool, mut purges) = place.open();
        assert_eq!(purges.under_way(), [(one, DISKS), (two, DISKS)]);
        // Another purge of the same namespace, before the first has ended.
        purges.begin(&pool, one, BOTH, true).unwrap();
        purges.off_disks(&pool, two, None);
        purges.off_disks(&pool, two, None);
        drop(pool);
        let (pool, mut purges) = place.open();
        assert_eq!(purges.under_way(), [(one, BOTH)]);
        purges.off_disks(&pool, one, None);
        assert_eq!(purges.under_way(), [(one, POOL)]);
        purges.off_pool(&pool, one, true);
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
        purges.off_disks(&pool, NamespaceId(7), None);
        purges.begin(&pool, NamespaceId(1 << 66), BOTH, true).expect("there is room again");
    }

    /// When each has ended, as the next daemon finds it.
    fn ended(purges: &Purges) -> Vec<(u128, u64)> {
        purges.ended.records.iter().map(|(namespace, (_, time))| (namespace.0, *time)).collect()
    }

    #[test]
    fn when_a_purge_has_ended_is_written_down_before_it_is_forgotten() {
        let place = Place::new();
        let [one, two, three] = [1, 2, 3].map(NamespaceId);
        let (pool, mut purges) = place.open();
        [one, two, three].into_iter().for_each(|namespace| purges.begin(&pool, namespace, BOTH, true).unwrap());
        purges.off_pool(&pool, one, true);
        assert_eq!(ended(&purges), [], "the disks have to say when");
        purges.off_disks(&pool, one, Some(1 << 50));
        purges.off_disks(&pool, two, Some(1 << 51));
        purges.off_disks(&pool, three, None);
        // It is no purge of this record.
        purges.off_disks(&pool, NamespaceId(4), Some(1 << 51));
        drop(pool);
        let (pool, mut purges) = place.open();
        assert_eq!(ended(&purges), [(1, 1 << 50), (2, 1 << 51)]);
        assert_eq!(purges.under_way(), [(two, POOL), (three, POOL)]);
        // The next purge of the same namespace has the same place.
        purges.begin(&pool, one, DISKS, true).unwrap();
        purges.off_disks(&pool, one, Some(1 << 52));
        drop(pool);
        let (pool, purges) = place.open();
        assert_eq!((ended(&purges), pool.ended_purges().unwrap().len()), (vec![(1, 1 << 52), (2, 1 << 51)], 2));
    }

    #[test]
    fn a_host_without_disks_says_itself_when_a_purge_has_ended_later_than_all_that_it_knows() {
        let place = Place::new();
        let (pool, mut purges) = place.open();
        purges.hear(&pool, BTreeMap::from([(NamespaceId(7), 1 << 60)]));
        purges.begin(&pool, NamespaceId(1), POOL, true).unwrap();
        purges.off_pool(&pool, NamespaceId(1), false);
        purges.end_without_disks(&pool, NamespaceId(3)).unwrap();
        // An earlier daemon had disks, which have this one still.
        purges.begin(&pool, NamespaceId(2), DISKS, true).unwrap();
        purges.off_pool(&pool, NamespaceId(2), false);
        drop(pool);
        let (_, purges) = place.open();
        assert_eq!(
            (ended(&purges), purges.under_way()),
            (vec![(1, (1 << 60) + 2), (3, (1 << 60) + 4), (7, 1 << 60)], vec![(NamespaceId(2), DISKS)])
        );
    }

    #[test]
    fn a_full_list_of_purges_that_have_ended_keeps_the_latest() {
        let place = Place::new();
        let most = u128::from(ENDED_PURGES);
        let (pool, mut purges) = place.open();
        assert!(!pool.has_met_disks().unwrap());
        let time = |namespace: u128| (1 << 50) + 10 * namespace as u64;
        purges.hear(&pool, (0..most).map(|namespace| (NamespaceId(namespace), time(namespace))).collect());
        let later = BTreeMap::from([(1 << 90, time(most)), (1 << 91, time(0) + 1), (1 << 92, time(0) - 1)]);
        purges.hear(&pool, later.into_iter().map(|(namespace, time)| (NamespaceId(namespace), time)).collect());
        purges.hear(&pool, BTreeMap::from([(NamespaceId(1), time(most + 1))]));
        drop(pool);
        let (pool, purges) = place.open();
        assert!(pool.has_met_disks().unwrap());
        let mut expected: Vec<(u128, u64)> = (2..most).map(|namespace| (namespace, time(namespace))).collect();
        expected.insert(0, (1, time(most + 1)));
        expected.push((1 << 90, time(most)));
        assert_eq!(ended(&purges), expected);
    }
}
