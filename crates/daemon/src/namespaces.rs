//! The namespaces that the pool records: whose they are, and which of them give up their records.
//!
//! Invariants: a namespace has at most one record. The number of a record is its place in the pool's file and nothing
//! else: blocks, tiers, leases, hints and sessions name a namespace by its id, a digest, or by its short name in the
//! core, and neither is ever given to another namespace. So a record can be taken by another namespace as soon as the
//! pool has no block of the first.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::namespace::Descriptor;
use forebay_core::{Core, Error, ErrorKind, NamespaceId, Result};
use forebay_io::pool::NAMESPACES;

/// Records that each user who may connect can count on, or its part if there are not so many: an engine has one
/// namespace at a time, and a few of an earlier start or of a reset whose blocks are still in the pool.
const KEPT: usize = 64;
/// Empty namespaces that give up their records together, so that an engine that often resets its cache does not have
/// them looked for each time.
const GIVEN_UP_TOGETHER: usize = 64;

/// See the module's head.
#[derive(Default)]
pub struct Namespaces {
    records: BTreeMap<u32, Record>,
    /// By the digest of its tenant, namespaces whose records others have taken. Tiers may hold blocks of them all the
    /// same. [`Namespaces::take_name`] bounds how many there are.
    forgotten: BTreeMap<u128, BTreeSet<NamespaceId>>,
    /// Short names of the core that each user has taken since the daemon started.
    taken: BTreeMap<u32, usize>,
    /// Counts openings.
    clock: u64,
}

struct Record {
    id: NamespaceId,
    descriptor: Descriptor,
    /// Who opened it first; not known of what an earlier build recorded, until somebody opens it.
    uid: Option<u32>,
    /// When it was opened last; 0 if not since the daemon started.
    opened: u64,
}

/// A namespace that gives up its record.
pub struct GivenUp {
    pub number: u32,
    pub id: NamespaceId,
}

impl Namespaces {
    /// Found in the pool.
    pub fn restore(&mut self, number: u32, id: NamespaceId, descriptor: Descriptor, uid: Option<u32>) {
        self.records.insert(number, Record { id, descriptor, uid, opened: 0 });
    }

    /// Written to the pool.
    pub fn record(&mut self, number: u32, id: NamespaceId, descriptor: Descriptor, uid: u32) {
        self.recall(id);
        self.restore(number, id, descriptor, Some(uid));
        self.note_opened(id, uid);
    }

    /// Somebody opened it. False if it has no record.
    pub fn note_opened(&mut self, id: NamespaceId, uid: u32) -> bool {
        self.clock += 1;
        let record = self.records.values_mut().find(|record| record.id == id);
        let opened = record.map(|record| {
            record.opened = self.clock;
            record.uid.get_or_insert(uid);
        });
        opened.is_some()
    }

    /// A vacant record for one more namespace of this user. Errors with `Full` if none is left for it: then
    /// [`Namespaces::idlest`] may help.
    pub fn vacant(&self, uid: u32, users: &[u32]) -> Result<u32> {
        let limit = NAMESPACES as usize;
        let kept = KEPT.min(limit / users.len().max(1));
        let records = |uid: u32| self.records.values().filter(|record| record.uid == Some(uid)).count();
        let needed: usize =
            users.iter().filter(|user| **user != uid).map(|user| kept.saturating_sub(records(*user))).sum();
        let is_own = records(uid) < kept;
        let vacant = limit - self.records.len();
        let first = (0..NAMESPACES).find(|number| !self.records.contains_key(number));
        first.filter(|_| is_own || vacant > needed).ok_or_else(|| {
            Error::new(ErrorKind::Full, "the pool has no space for another namespace of this user")
                .with("limit", limit)
                .with("user", uid)
                .with("namespaces_of_user", records(uid))
                .hint(
                    "purge tenants or models that are no longer used (`forebay inspect` lists the namespaces), or \
                     close clients that keep empty ones open",
                )
        })
    }

    /// Those that were not opened for longest, of which `is_free` says that nobody has a use for them; a few at a time.
    pub fn idlest(&self, is_free: impl Fn(NamespaceId) -> bool) -> Vec<GivenUp> {
        let mut free: Vec<(&u32, &Record)> = self.records.iter().filter(|(_, record)| is_free(record.id)).collect();
        free.sort_by_key(|(number, record)| (record.opened, **number));
        let given_up = |(number, record): (&u32, &Record)| GivenUp { number: *number, id: record.id };
        free.into_iter().take(GIVEN_UP_TOGETHER).map(given_up).collect()
    }

    /// Its record is vacant from now on. `has_tiers`: blocks of it may be on tiers.
    pub fn give_up(&mut self, number: u32, has_tiers: bool) {
        let Some(record) = self.records.remove(&number).filter(|_| has_tiers) else { return };
        let tenant = digest(record.descriptor.tenant()).expect("a descriptor has room for its own tenant");
        self.forgotten.entry(tenant).or_default().insert(record.id);
    }

    /// Counts a short name of the core that the user is about to take. They are given once, so one user's share of them
    /// is as large as another's. Errors with `Full` if its share is taken.
    pub fn take_name(&mut self, uid: u32, users: &[u32]) -> Result<()> {
        let (limit, taken) = (Core::MAX_NAMESPACES / users.len().max(1), self.taken.entry(uid).or_default());
        if *taken >= limit {
            return Err(Error::new(
                ErrorKind::Full,
                "this user has opened too many namespaces since the daemon started",
            )
            .with("limit", limit)
            .with("user", uid)
            .hint("restart the daemon; the pool stays"));
        }
        *taken += 1;
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Those with a record.
    pub fn ids(&self) -> impl Iterator<Item = NamespaceId> {
        self.records.values().map(|record| record.id)
    }

    /// Those whose tenant is known.
    pub fn known(&self) -> impl Iterator<Item = NamespaceId> {
        self.ids().chain(self.forgotten.values().flatten().copied())
    }

    /// Those with a record, with what they are.
    pub fn descriptors(&self) -> impl Iterator<Item = (NamespaceId, &Descriptor)> {
        self.records.values().map(|record| (record.id, &record.descriptor))
    }

    /// Whether somebody opened it since the pool was made.
    pub fn knows(&self, id: NamespaceId) -> bool {
        self.known().any(|known| known == id)
    }

    /// Of a tenant, also those whose records others have taken since the daemon started.
    pub fn of_tenant(&self, tenant: &str) -> Vec<NamespaceId> {
        let its = self.records.values().filter(|record| record.descriptor.tenant() == tenant);
        its.map(|record| record.id)
            .chain(digest(tenant).and_then(|tenant| self.forgotten.get(&tenant)).into_iter().flatten().copied())
            .collect()
    }

    pub fn descriptor(&self, id: NamespaceId) -> Option<&Descriptor> {
        self.records.values().find(|record| record.id == id).map(|record| &record.descriptor)
    }

    /// The namespace has a record again, or no tier has a block of it.
    pub fn recall(&mut self, id: NamespaceId) {
        self.forgotten.retain(|_, ids| !ids.remove(&id) || !ids.is_empty());
    }
}

/// Stands for a tenant's name, which may be long; `None` for what is too long for a descriptor.
fn digest(tenant: &str) -> Option<u128> {
    let descriptor = Descriptor::new([(Descriptor::TENANT.to_owned(), tenant.to_owned())]);
    descriptor.ok().map(|descriptor| descriptor.id().0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: [u32; 3] = [0, 1000, 1001];
    const HOG: u32 = 1000;

    /// The namespaces of a pool, each with its number as its id.
    struct Pool(Namespaces);

    impl Pool {
        fn open(&mut self, uid: u32, id: u128) -> Result<u32> {
            if self.0.note_opened(NamespaceId(id), uid) {
                return Ok(u32::MAX);
            }
            let number = self.0.vacant(uid, &USERS)?;
            self.0.record(number, NamespaceId(id), descriptor(id), uid);
            Ok(number)
        }

        fn take(&mut self, uid: u32, first: u128) -> usize {
            (first..).take_while(|id| self.open(uid, *id).is_ok()).count()
        }
    }

    fn descriptor(id: u128) -> Descriptor {
        Descriptor::new([("tenant".to_owned(), "t".to_owned()), ("model".to_owned(), id.to_string())]).unwrap()
    }

    #[test]
    fn a_user_may_have_all_records_but_those_that_the_others_can_count_on() {
        let mut pool = Pool(Namespaces::default());
        assert_eq!(pool.take(HOG, 0), NAMESPACES as usize - 2 * KEPT);
        let refused = pool.open(HOG, 1 << 20).unwrap_err();
        assert_eq!((refused.kind(), refused.hint_text().is_some()), (ErrorKind::Full, true));
        assert_eq!(pool.take(0, 1 << 32), KEPT);
        assert_eq!(pool.take(1001, 1 << 33), KEPT);
        assert!(USERS.iter().all(|uid| pool.open(*uid, 1 << 40).is_err()) && pool.0.len() == NAMESPACES as usize);
    }

    #[test]
    fn a_restart_gives_a_user_no_more_than_it_had() {
        let mut pool = Pool(Namespaces::default());
        pool.take(HOG, 0);
        let restarted = |old: Pool| {
            let mut new = Namespaces::default();
            let records = old.0.records.into_iter();
            records.for_each(|(number, it)| new.restore(number, it.id, it.descriptor, it.uid));
            Pool(new)
        };
        let mut pool = restarted(restarted(pool));
        assert_eq!(pool.take(HOG, 1 << 20), 0);
        assert_eq!(pool.take(0, 1 << 32), KEPT);
        assert_eq!(pool.take(1001, 1 << 33), KEPT);
    }

    #[test]
    fn what_an_earlier_build_recorded_is_whose_who_opens_it_first() {
        let mut pool = Pool(Namespaces::default());
        (0..1000)
            .for_each(|number| pool.0.restore(number, NamespaceId(number.into()), descriptor(number.into()), None));
        assert!((0..1000).all(|id| pool.open(HOG, id).is_ok() && pool.open(0, id).is_ok()));
        assert!(pool.open(HOG, 2000).is_err() && pool.take(0, 1 << 32) == 24);
    }

    #[test]
    fn those_not_opened_for_longest_are_given_up_first_and_stay_known_where_tiers_may_have_blocks() {
        let mut pool = Pool(Namespaces::default());
        pool.0.restore(7, NamespaceId(7), descriptor(7), Some(0));
        for id in [3, 1, 2, 3] {
            pool.open(HOG, id).unwrap();
        }
        let order: Vec<u128> = pool.0.idlest(|id| id != NamespaceId(1)).iter().map(|it| it.id.0).collect();
        assert_eq!(order, [7, 2, 3]);
        let two = pool.0.idlest(|id| id == NamespaceId(2)).remove(0);
        pool.0.give_up(two.number, true);
        pool.0.give_up(7, false);
        assert!(pool.0.knows(NamespaceId(2)) && pool.0.of_tenant("t").contains(&NamespaceId(2)));
        assert!(!pool.0.knows(NamespaceId(7)) && pool.0.descriptor(NamespaceId(2)).is_none());
        // Another namespace has its record; it is found under no other id.
        assert_eq!(pool.open(0, 5).unwrap(), two.number.min(7));
        assert!(pool.open(0, 2).unwrap() != u32::MAX);
        assert_eq!(pool.0.of_tenant("t").iter().filter(|id| id.0 == 2).count(), 1);
    }

    #[test]
    fn the_names_that_are_given_once_are_shared_as_well() {
        let mut namespaces = Namespaces::default();
        let share = Core::MAX_NAMESPACES / USERS.len();
        assert_eq!((0..).take_while(|_| namespaces.take_name(HOG, &USERS).is_ok()).count(), share);
        assert!(namespaces.take_name(0, &USERS).is_ok());
    }
}
