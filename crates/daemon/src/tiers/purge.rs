//! Removes purged namespaces from this host's own tiers.
//!
//! Until the last block of such a namespace is removed, the core serves none of its blocks from a tier and writes none
//! to one. A walk goes through the tier's blocks, piece by piece, and what it finds is removed. A removal that fails is
//! tried again until it succeeds, and stands in the way of no other namespace. If those that are tried again fail too,
//! the next are tried after a pause, which doubles. A namespace is clean when a whole walk has found nothing of it: a
//! block may be on two parts, and a removal reaches one. It is purged when the tier has noted that, so that damage to
//! the removals brings nothing back. While a part is missing, the purge waits for it, and the other parts note the
//! purge: so the missing one hears of it when it comes, even if nothing else is left of this daemon. Shared stores keep
//! their blocks, because other hosts use them too, unless `empty_shared` removes them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use forebay_core::tier::{Outcome, Tier};
use forebay_core::{BlockKey, NamespaceId};

use super::driver::{Driver, Under};
use super::spec::{Driven, Walked};

/// Removals under way at a time: half of what a disk takes of stores and removals, so that stores go on.
const REMOVALS_AT_A_TIME: usize = 128;
/// Keys that may wait for their first removal; with as many, the walk waits too. As many may wait for another one, and
/// one of each namespace beside them, so that no walk finds at once what has just failed.
const MAX_KEYS: usize = 4096;
/// Between two rounds of removals that are tried again: a disk that takes nothing fails 13 a second at last.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

#[derive(Default)]
pub(super) struct Purges {
    /// Of each namespace, how many of `keys` and `failed` are its own.
    namespaces: BTreeMap<NamespaceId, usize>,
    /// Those of them that no walk has begun for.
    unlisted: BTreeSet<NamespaceId>,
    /// The walk under way: one for all namespaces of which nothing waited when it began.
    walk: Option<Walk>,
    /// Blocks to be removed.
    keys: VecDeque<BlockKey>,
    /// Blocks whose removal has failed. What has no place here is found by a later walk.
    failed: VecDeque<BlockKey>,
    retries: Retries,
    /// Of which a walk has found nothing, and of which the tier is to note that.
    clean: BTreeSet<NamespaceId>,
    /// Those of which it is noting that.
    noting: BTreeSet<NamespaceId>,
    /// Those of which all parts that are there have noted it, and which wait for the others.
    noted: BTreeSet<NamespaceId>,
    /// When the tier is told again, and how long that is after it has failed.
    note_at: Duration,
    note_pause: Duration,
    /// Removals under way.
    pub removing: usize,
    /// Parts of the tier that were missing when the blocks were looked for; none before it was open.
    missing_parts: Option<usize>,
    /// Names of disks that were missing while a purge was under way.
    awaited: BTreeSet<String>,
    /// So many were missing when these were looked for.
    looked_at: Option<usize>,
    /// Of blocks that the tier had from the start.
    found: BTreeSet<NamespaceId>,
    /// Blocks that were removed since the tier was opened.
    removed_blocks: u64,
    /// Of those, when the first of the purges under way began.
    removed_before: u64,
}

/// How far purges of a tier are.
#[derive(Clone, Copy, Debug, Default)]
pub struct PurgeReport {
    /// Namespaces that are not off the tier yet.
    pub namespaces: u64,
    /// Blocks that were removed since the tier was opened.
    pub removed_blocks: u64,
    /// Of those, how many since purges are under way.
    pub removed_of_these: u64,
    /// The share of the tier that the walk under way has looked at; none between walks. The last walk finds nothing.
    pub walked_ratio: Option<f64>,
}

/// Removals that are tried again, a round at a time.
#[derive(Default)]
struct Retries {
    /// Of this round, those that are under way.
    under_way: BTreeSet<BlockKey>,
    /// How many may still join it.
    left: usize,
    /// When the next round begins.
    next_at: Duration,
    /// How long that is after this one.
    pause: Duration,
}

impl Retries {
    /// Whether one more of these may begin. What fails in a round is not tried again in it.
    fn may_begin(&mut self, waiting: usize, now: Duration) -> bool {
        if self.left == 0 && self.under_way.is_empty() && now >= self.next_at {
            let [shortest, longest] = PAUSES;
            self.left = REMOVALS_AT_A_TIME.min(waiting);
            self.pause = (2 * self.pause).clamp(shortest, longest);
            self.next_at = now + self.pause;
        }
        self.left > 0
    }

    /// If one of them succeeds, the others wait no longer.
    fn ended(&mut self, key: &BlockKey, is_removed: bool) {
        if self.under_way.remove(key) && is_removed {
            (self.pause, self.next_at) = Default::default();
        }
    }
}

/// A walk through all blocks of the tier.
struct Walk {
    namespaces: BTreeSet<NamespaceId>,
    /// Those of them that the tier may have a block of: the walk met one, or one was on its way down when it began.
    unclean: BTreeSet<NamespaceId>,
    /// Whether it has begun.
    has_begun: bool,
    /// Whether the tier's next turn may be of use, and nothing before.
    waits: bool,
}

impl Purges {
    /// Blocks that the tier had from the start.
    pub fn note_found(&mut self, namespaces: Vec<NamespaceId>) {
        let others = namespaces.into_iter().filter(|namespace| !self.is_purging(*namespace));
        let others: Vec<NamespaceId> = others.collect();
        self.found.extend(others);
    }

    /// See [`super::Tiers::namespaces_found`].
    pub fn namespaces_found(&self) -> impl Iterator<Item = NamespaceId> {
        self.found.iter().copied()
    }

    pub fn is_purging(&self, namespace: NamespaceId) -> bool {
        self.namespaces.contains_key(&namespace)
    }

    fn may_walk(&self) -> bool {
        self.walk.is_some() && self.keys.len() < MAX_KEYS
    }

    fn is_walking(&self) -> bool {
        self.may_walk() && self.walk.as_ref().is_some_and(|walk| !walk.waits)
    }

    /// A removal has ended: the tier has no such block.
    pub fn removed(&mut self, key: BlockKey, outcome: Outcome) {
        self.removing -= 1;
        self.retries.ended(&key, true);
        self.removed_blocks += u64::from(outcome == Outcome::Removed && self.is_purging(key.namespace));
    }

    /// A removal that is not tried again has ended.
    pub fn given_up(&mut self) {
        self.removing -= 1;
    }

    fn report(&self, tier: &dyn Driven) -> PurgeReport {
        PurgeReport {
            namespaces: self.namespaces.len() as u64,
            removed_blocks: self.removed_blocks,
            removed_of_these: if self.namespaces.is_empty() { 0 } else { self.removed_blocks - self.removed_before },
            walked_ratio: self.walk.as_ref().map(|walk| if walk.has_begun { tier.walked_ratio() } else { 0.0 }),
        }
    }

    pub fn put_back(&mut self, key: BlockKey) {
        self.removing -= 1;
        self.retries.ended(&key, false);
        let has_place = self.failed.len() < MAX_KEYS;
        if has_place || self.namespaces.get(&key.namespace).is_none_or(|waiting| *waiting == 0) {
            self.count(key);
            self.failed.push_back(key);
        }
    }

    fn begin(&mut self, namespace: NamespaceId) {
        self.found.remove(&namespace);
        self.clean.remove(&namespace);
        self.noting.remove(&namespace);
        self.noted.remove(&namespace);
        if self.namespaces.is_empty() {
            self.removed_before = self.removed_blocks;
        }
        self.namespaces.entry(namespace).or_default();
        self.unlisted.insert(namespace);
    }

    /// One piece of a walk, if there is one to make. `busy` namespaces have operations under way.
    fn step(&mut self, busy: &BTreeSet<NamespaceId>, tier: &mut dyn Driven, now: Duration) {
        let missing = Some(tier.missing_parts());
        if self.missing_parts != missing {
            self.missing_parts = missing;
            self.start_anew();
        }
        if self.walk.is_none() && self.is_walk_due(busy) {
            let mut namespaces = std::mem::take(&mut self.unlisted);
            // What a namespace still has waiting would be found again.
            namespaces.extend(self.idle(busy));
            let unclean = namespaces.iter().copied().filter(|namespace| self.may_have_more(*namespace, busy)).collect();
            self.walk = Some(Walk { namespaces, unclean, has_begun: false, waits: false });
        }
        if self.may_walk()
            && let Some(walk) = self.walk.take()
        {
            self.walk_on(walk, busy, tier);
        }
        self.note_clean(tier, now);
    }

    /// Has the tier note what is clean. What it has noted is purged, if no part is missing.
    fn note_clean(&mut self, tier: &mut dyn Driven, now: Duration) {
        if self.noting.is_empty() && !self.clean.is_empty() && now >= self.note_at {
            self.noting = std::mem::take(&mut self.clean);
            tier.note_purged(&self.noting);
        }
        if self.noting.is_empty() {
            return;
        }
        match tier.noted() {
            None => {}
            Some(true) => {
                let noted = std::mem::take(&mut self.noting);
                if self.missing_parts == Some(0) {
                    noted.iter().for_each(|namespace| _ = self.namespaces.remove(namespace));
                } else {
                    self.noted.extend(noted);
                }
                self.note_pause = Duration::ZERO;
            }
            Some(false) => {
                let [shortest, longest] = PAUSES;
                self.note_pause = (2 * self.note_pause).clamp(shortest, longest);
                self.note_at = now + self.note_pause;
                self.clean.append(&mut self.noting);
            }
        }
    }

    /// A purge that has waited for a disk ends with the disk that comes. Nobody knows whether it is the one that was
    /// missing. If another disk has noted the purge, the missing one hears of it whenever it comes. If not, the pool
    /// alone tells it, until the host restarts.
    fn look_at_disks(&mut self, tier: &dyn Driven) {
        let missing = tier.missing_parts();
        if self.looked_at == Some(missing) {
            return;
        }
        self.looked_at = Some(missing);
        let disks = tier.disks();
        let are_others_there = disks.iter().filter(|disk| disk.missing.is_none()).count() > 1;
        for disk in disks {
            if disk.missing.is_some() {
                self.awaited.insert(disk.name);
            } else if self.awaited.remove(&disk.name) && !are_others_there {
                let hint = match disk.recovery.was_made {
                    true => {
                        "it is a new disk: if the old one returns after a restart of the host, purge again, since that \
                         one has the blocks still"
                    }
                    false => {
                        "if the disk that was missing has another id, and returns after a restart of the host, purge \
                         again"
                    }
                };
                let (disk, id) = (disk.name, format!("{:032x}", disk.geometry.id));
                tracing::warn!(disk, id, hint, "purges have waited for a disk, and end with the one that came");
            }
        }
    }

    /// What was purged while the tier or a part of it was missing is looked for when it is there.
    fn start_anew(&mut self) {
        self.walk = None;
        self.keys.clear();
        self.failed.clear();
        self.retries = Retries::default();
        self.clean.clear();
        self.noting.clear();
        self.noted.clear();
        self.namespaces.values_mut().for_each(|waiting| *waiting = 0);
        self.unlisted = self.namespaces.keys().copied().collect();
    }

    /// For namespaces that no walk has begun for, at once. A last walk, when nothing of them is left as far as is
    /// known: of many namespaces for half of them at a time.
    fn is_walk_due(&self, busy: &BTreeSet<NamespaceId>) -> bool {
        let (idle, clean) = (self.idle(busy).count(), self.clean.len() + self.noting.len() + self.noted.len());
        let is_last = idle > 0 && (2 * idle >= self.namespaces.len() - clean || self.keys.is_empty());
        !self.unlisted.is_empty() || is_last
    }

    /// Those of which nothing is left as far as is known, and of which no walk has shown it.
    fn idle<'a>(&'a self, busy: &'a BTreeSet<NamespaceId>) -> impl Iterator<Item = NamespaceId> + 'a {
        let shown = [&self.clean, &self.noting, &self.noted];
        let is_clean = move |namespace: &NamespaceId| shown.iter().any(|those| those.contains(namespace));
        let namespaces = self.namespaces.keys().copied();
        namespaces.filter(move |namespace| !self.may_have_more(*namespace, busy) && !is_clean(namespace))
    }

    fn may_have_more(&self, namespace: NamespaceId, busy: &BTreeSet<NamespaceId>) -> bool {
        self.namespaces.get(&namespace).is_some_and(|waiting| *waiting > 0) || busy.contains(&namespace)
    }

    fn walk_on(&mut self, mut walk: Walk, busy: &BTreeSet<NamespaceId>, tier: &mut dyn Driven) {
        match tier.walk(&walk.namespaces, !walk.has_begun) {
            Walked::Keys(keys) => {
                for key in keys {
                    walk.unclean.insert(key.namespace);
                    self.count(key);
                    self.keys.push_back(key);
                }
                self.walk = Some(Walk { has_begun: true, waits: false, ..walk });
            }
            Walked::Waits => self.walk = Some(Walk { has_begun: true, waits: true, ..walk }),
            Walked::End => {
                let clean = walk.namespaces.difference(&walk.unclean).copied();
                let clean: Vec<NamespaceId> =
                    clean.filter(|namespace| !self.unlisted.contains(namespace) && !busy.contains(namespace)).collect();
                self.clean.extend(clean);
            }
        }
    }

    fn count(&mut self, key: BlockKey) {
        *self.namespaces.entry(key.namespace).or_default() += 1;
    }

    /// Those that were never tried go first, so that a part that refuses removals does not keep the others waiting.
    fn pop(&mut self, now: Duration) -> Option<BlockKey> {
        let key = self.keys.pop_front().or_else(|| self.pop_failed(now))?;
        *self.namespaces.get_mut(&key.namespace).expect("counted when it began to wait") -= 1;
        Some(key)
    }

    fn pop_failed(&mut self, now: Duration) -> Option<BlockKey> {
        if self.failed.is_empty() || !self.retries.may_begin(self.failed.len(), now) {
            return None;
        }
        let key = self.failed.pop_front()?;
        self.retries.left -= 1;
        self.retries.under_way.insert(key);
        Some(key)
    }
}

impl Driver {
    /// For `Effect::PurgeTiers`.
    pub(super) fn purge(&mut self, namespace: NamespaceId) {
        self.purges.begin(namespace);
    }

    pub(super) fn purge_report(&self) -> PurgeReport {
        self.tier.as_ref().map_or_else(PurgeReport::default, |tier| self.purges.report(&**tier.tier()))
    }

    /// Whether [`Driver::step_purges`] has something to do that waits for nothing.
    pub(super) fn is_walking(&self) -> bool {
        self.was_healthy && self.purges.is_walking()
    }

    /// Starts some removals, walks on, and forgets the namespaces of which nothing is left, nor on its way down. Takes
    /// as long as there are operations under way and places in a piece of the tier's blocks, however many blocks there
    /// are.
    pub(super) fn step_purges(&mut self) {
        if self.purges.namespaces.is_empty() {
            return;
        }
        if let Some(tier) = &self.tier {
            self.purges.look_at_disks(&**tier.tier());
        }
        // A sick tier would only fail them, again and again.
        if !self.was_healthy {
            return;
        }
        let under_way = self.under_way.values().filter_map(|under| match under {
            Under::Store { key, .. } | Under::Remove { key } => Some(key.namespace),
            Under::Load { .. } | Under::Exists { .. } | Under::Touch { .. } => None,
        });
        let busy: BTreeSet<NamespaceId> = under_way.collect();
        let now = self.now();
        let Some(tier) = &mut self.tier else { return };
        self.purges.step(&busy, &mut **tier.tier_mut(), now);
        self.give_up_purged_stores();
        while self.purges.removing < REMOVALS_AT_A_TIME
            && let Some(key) = self.purges.pop(now)
        {
            self.remove(key, 0);
        }
    }
}

impl Driver {
    /// A store that a disk has not begun may wait for its write budget, and the purge would wait for the store.
    fn give_up_purged_stores(&mut self) {
        let Some(tier) = self.tier.as_mut().filter(|_| !self.is_shared) else { return };
        for (id, under) in &self.under_way {
            if matches!(under, Under::Store { key, .. } if self.purges.is_purging(key.namespace)) {
                tier.cancel(*id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use forebay_core::{BlockHash, Config, Core};

    use super::super::memory::TierMemory;
    use super::*;

    const NAMESPACES: u128 = 200;
    const PIECE: usize = 10;

    /// A tier of two parts, each a list of places, of which a piece is gone through at a time.
    struct Parts {
        places: Vec<Option<BlockKey>>,
        /// Where the walk goes on.
        at: usize,
        missing: usize,
        pieces: Cell<usize>,
        /// Namespaces that it was to note, each time.
        told: Vec<BTreeSet<NamespaceId>>,
        noted: Option<bool>,
    }

    impl Parts {
        fn new(keys: impl Iterator<Item = BlockKey>) -> Parts {
            let places = keys.map(Some).collect();
            Parts { places, at: 0, missing: 0, pieces: Cell::new(0), told: Vec::new(), noted: Some(true) }
        }

        /// On the first part that has it.
        fn remove(&mut self, key: BlockKey) {
            if let Some(place) = self.places.iter_mut().find(|place| **place == Some(key)) {
                *place = None;
            }
        }

        fn has(&self, namespace: NamespaceId) -> bool {
            self.places.iter().flatten().any(|key| key.namespace == namespace)
        }
    }

    impl forebay_core::tier::Tier for Parts {
        fn name(&self) -> &'static str {
            "parts"
        }

        fn capabilities(&self) -> forebay_core::tier::Capabilities {
            forebay_io::ssd::Ssd::CAPABILITIES
        }

        fn submit(&mut self, _: &[forebay_core::tier::Operation]) -> usize {
            0
        }

        fn poll(&mut self, _: &mut Vec<forebay_core::tier::Completion>) {}

        fn cancel(&mut self, _: forebay_core::tier::OpId) {}

        fn health(&self) -> forebay_core::tier::Health {
            forebay_core::tier::Health::Healthy
        }
    }

    impl forebay_core::decorate::Timed for Parts {
        fn advance(&mut self, _: std::time::Duration) {}
    }

    impl Driven for Parts {
        fn wake_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            unreachable!("nobody waits for it")
        }

        fn missing_parts(&self) -> usize {
            self.missing
        }

        fn walked_ratio(&self) -> f64 {
            self.at as f64 / self.places.len() as f64
        }

        fn note_purged(&mut self, namespaces: &BTreeSet<NamespaceId>) {
            self.told.push(namespaces.clone());
        }

        fn noted(&mut self) -> Option<bool> {
            self.noted
        }

        fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>, is_new: bool) -> Walked {
            if is_new {
                self.at = 0;
            }
            if self.at == self.places.len() {
                return Walked::End;
            }
            self.pieces.set(self.pieces.get() + 1);
            let end = self.places.len().min(self.at + PIECE);
            let keys = self.places[std::mem::replace(&mut self.at, end)..end].iter().flatten().copied();
            Walked::Keys(keys.filter(|key| namespaces.contains(&key.namespace)).collect())
        }
    }

    fn key(namespace: u128, number: u8) -> BlockKey {
        BlockKey { namespace: NamespaceId(namespace), group: 0, hash: BlockHash::new(&[number]).unwrap() }
    }

    /// Steps until nothing is purged any more; at each step what waits is removed.
    fn purge_all(purges: &mut Purges, parts: &mut Parts) {
        for _ in 0..100_000 {
            if purges.namespaces.is_empty() {
                return;
            }
            purges.step(&BTreeSet::new(), parts, Duration::ZERO);
            while let Some(key) = purges.pop(Duration::ZERO) {
                parts.remove(key);
            }
        }
        panic!("the purge does not end");
    }

    /// The tier goes through all its blocks each time, and nobody is served meanwhile.
    #[test]
    fn a_purge_of_many_namespaces_goes_through_the_blocks_of_a_tier_a_few_times() {
        let mut parts = Parts::new((0..2 * NAMESPACES).map(|namespace| key(namespace, 1)));
        let mut purges = Purges::default();
        (0..NAMESPACES).for_each(|id| purges.begin(NamespaceId(id)));
        purge_all(&mut purges, &mut parts);
        assert!(!(0..NAMESPACES).any(|id| parts.has(NamespaceId(id))));
        assert!((NAMESPACES..2 * NAMESPACES).all(|id| parts.has(NamespaceId(id))));
        assert_eq!(parts.pieces.get(), 2 * parts.places.len() / PIECE, "one walk finds them, one finds none");
    }

    /// A disk may take its time, or not keep what is written to it.
    #[test]
    fn a_purge_ends_when_the_tier_has_noted_it_and_nothing_spins_until_then() {
        let mut parts = Parts::new((0..50).map(|number| key(1, number)));
        let (mut purges, mut now) = (Purges::default(), Duration::ZERO);
        let mut go_on = |purges: &mut Purges, parts: &mut Parts, seconds: u64| {
            for _ in 0..seconds * 100 {
                now += Duration::from_millis(10);
                purges.step(&BTreeSet::new(), parts, now);
                while let Some(key) = purges.pop(now) {
                    parts.remove(key);
                }
            }
        };
        parts.noted = None;
        purges.begin(NamespaceId(1));
        go_on(&mut purges, &mut parts, 60);
        let walks = 2 * 50 / PIECE;
        assert_eq!((purges.is_purging(NamespaceId(1)), parts.told.len(), parts.pieces.get()), (true, 1, walks));
        parts.noted = Some(false);
        go_on(&mut purges, &mut parts, 60);
        assert!(purges.is_purging(NamespaceId(1)) && (8..=13).contains(&parts.told.len()), "{}", parts.told.len());
        assert_eq!(parts.pieces.get(), walks, "it is clean, and stays so");
        // Another purge is not kept from its walk, and is noted with the first.
        parts.places.push(Some(key(2, 1)));
        purges.begin(NamespaceId(2));
        parts.noted = Some(true);
        go_on(&mut purges, &mut parts, 11);
        assert!(purges.namespaces.is_empty() && !parts.has(NamespaceId(2)));
        assert_eq!(parts.told.iter().flatten().copied().max(), Some(NamespaceId(2)));
        // One that is purged again while the tier is at it has a walk of its own.
        parts.noted = None;
        purges.begin(NamespaceId(1));
        go_on(&mut purges, &mut parts, 1);
        parts.places.push(Some(key(1, 99)));
        purges.begin(NamespaceId(1));
        parts.noted = Some(true);
        go_on(&mut purges, &mut parts, 1);
        assert!(purges.namespaces.is_empty() && !parts.has(NamespaceId(1)));
    }

    /// One of two disks may refuse them while the tier counts as healthy.
    #[test]
    fn removals_that_fail_stand_in_the_way_of_no_other_namespace() {
        for blocks in [1_000, 2_048, 5_000, 20_000u32] {
            let long = |number: u32| BlockKey { hash: BlockHash::new(&number.to_le_bytes()).unwrap(), ..key(1, 0) };
            let mut parts = Parts::new((0..blocks).map(long).chain((0..10).map(|number| key(2, number))));
            let (mut purges, mut is_refusing) = (Purges::default(), true);
            let mut now = Duration::ZERO;
            let mut go_on = |purges: &mut Purges, is_refusing: bool| {
                now += Duration::from_millis(10);
                purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO);
                let keys: Vec<_> = (0..REMOVALS_AT_A_TIME).map_while(|_| purges.pop(now)).collect();
                for key in keys {
                    purges.removing += 1;
                    if is_refusing && key.namespace == NamespaceId(1) {
                        purges.put_back(key);
                    } else {
                        parts.remove(key);
                        purges.removed(key, Outcome::Removed);
                    }
                }
                assert!(purges.failed.len() <= MAX_KEYS && purges.keys.len() < MAX_KEYS + PIECE);
            };
            purges.begin(NamespaceId(1));
            (0..1_000).for_each(|_| go_on(&mut purges, is_refusing));
            purges.begin(NamespaceId(2));
            for _ in 0..20_000 {
                go_on(&mut purges, is_refusing);
            }
            assert!(!purges.is_purging(NamespaceId(2)), "beside {blocks} blocks that stay");
            assert!(purges.is_purging(NamespaceId(1)));
            is_refusing = false;
            for _ in 0..20_000 {
                go_on(&mut purges, is_refusing);
            }
            assert!(!purges.is_purging(NamespaceId(1)), "of {blocks} blocks some stayed");
            assert!(!parts.has(NamespaceId(1)));
        }
    }

    /// A metric counts the failures, and each is work for a disk that is ill.
    #[test]
    fn a_disk_that_refuses_removals_is_asked_ever_more_seldom_until_it_takes_one() {
        for blocks in [1, 100, 5_000u32] {
            let long = |number: u32| BlockKey { hash: BlockHash::new(&number.to_le_bytes()).unwrap(), ..key(1, 0) };
            let mut parts = Parts::new((0..blocks).map(long));
            let (mut purges, mut now) = (Purges::default(), Duration::ZERO);
            let mut go_on = |purges: &mut Purges, seconds: u64, is_refusing: bool| {
                let (end, mut tries) = (now + Duration::from_secs(seconds), 0);
                while now < end && purges.is_purging(NamespaceId(1)) {
                    now += Duration::from_millis(10);
                    (0..100).for_each(|_| purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO));
                    let keys: Vec<_> = (0..REMOVALS_AT_A_TIME).map_while(|_| purges.pop(now)).collect();
                    tries += keys.len();
                    for key in keys {
                        purges.removing += 1;
                        match is_refusing {
                            true => purges.put_back(key),
                            false => {
                                parts.remove(key);
                                purges.removed(key, Outcome::Removed);
                            }
                        }
                    }
                }
                (tries, end - now)
            };
            purges.begin(NamespaceId(1));
            let (first, _) = go_on(&mut purges, 60, true);
            let (most, round) = (blocks as usize, REMOVALS_AT_A_TIME.min(blocks as usize));
            assert!((most + round..=most + 13 * round).contains(&first), "{first} tries of {blocks} in a minute");
            let (later, _) = go_on(&mut purges, 600, true);
            assert!((59 * round..=61 * round).contains(&later), "{later} tries of {blocks} in ten minutes");
            let (tries, left) = go_on(&mut purges, 20, false);
            assert!(!purges.is_purging(NamespaceId(1)) && tries == most, "{tries} tries of {blocks}");
            assert!(left >= Duration::from_secs(8), "within the longest pause and a little more: {left:?}");
        }
    }

    /// Each purge waits for its end before the next begins, as commands do.
    #[test]
    fn a_purge_that_begins_during_another_waits_for_the_next_walk() {
        let mut parts = Parts::new((0..100).map(|number| key(u128::from(number % 2), number)));
        let mut purges = Purges::default();
        purges.begin(NamespaceId(0));
        purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO);
        purges.begin(NamespaceId(1));
        purge_all(&mut purges, &mut parts);
        assert!(!parts.has(NamespaceId(0)) && !parts.has(NamespaceId(1)));
    }

    /// Another purge joins; the count begins anew when nothing was purged any more.
    #[test]
    fn the_report_counts_what_the_purges_under_way_have_removed() {
        let mut parts = Parts::new((0..100).map(|number| key(u128::from(number % 2), number)));
        let mut purges = Purges::default();
        let seen = |purges: &Purges, parts: &Parts| {
            let PurgeReport { namespaces, removed_blocks, removed_of_these, walked_ratio } = purges.report(parts);
            (namespaces, removed_blocks, removed_of_these, walked_ratio)
        };
        let all_gone = |purges: &mut Purges, parts: &mut Parts| {
            while let Some(key) = purges.pop(Duration::ZERO) {
                parts.remove(key);
                purges.removing += 1;
                purges.removed(key, Outcome::Removed);
            }
        };
        assert_eq!(seen(&purges, &parts), (0, 0, 0, None));
        purges.begin(NamespaceId(0));
        purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO);
        all_gone(&mut purges, &mut parts);
        assert_eq!(seen(&purges, &parts), (1, 5, 5, Some(0.1)));
        purges.begin(NamespaceId(1));
        assert_eq!(seen(&purges, &parts), (2, 5, 5, Some(0.1)));
        while !purges.namespaces.is_empty() {
            purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO);
            all_gone(&mut purges, &mut parts);
        }
        assert_eq!(seen(&purges, &parts), (0, 100, 0, None));
        purges.begin(NamespaceId(0));
        assert_eq!(seen(&purges, &parts), (1, 100, 0, None));
        purges.removing += 1;
        purges.removed(key(0, 0), Outcome::Absent);
        assert_eq!(seen(&purges, &parts), (1, 100, 0, None), "there was none");
    }

    #[test]
    fn a_block_on_two_parts_is_removed_from_both() {
        let numbers = || (0..25u8).map(|number| key(1, number));
        let mut parts = Parts::new(numbers().chain(numbers()));
        let mut purges = Purges::default();
        purges.begin(NamespaceId(1));
        purge_all(&mut purges, &mut parts);
        assert!(!parts.has(NamespaceId(1)));
    }

    /// A store that was under way when the purge began may land behind the walk.
    #[test]
    fn what_lands_behind_the_walk_is_found_by_the_next() {
        let mut parts = Parts::new((0..50).map(|number| key(2, number)));
        parts.places.insert(0, None);
        let (mut purges, busy) = (Purges::default(), BTreeSet::from([NamespaceId(1)]));
        purges.begin(NamespaceId(1));
        purges.step(&busy, &mut parts, Duration::ZERO);
        purges.step(&busy, &mut parts, Duration::ZERO);
        parts.places[0] = Some(key(1, 7));
        (0..20).for_each(|_| purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO));
        assert!(purges.is_purging(NamespaceId(1)), "one walk began before the store ended");
        purge_all(&mut purges, &mut parts);
        assert!(!parts.has(NamespaceId(1)));
    }

    #[test]
    fn a_namespace_is_not_purged_while_a_part_is_missing_and_nothing_spins_meanwhile() {
        let mut parts = Parts::new((0..50).map(|number| key(1, number)));
        parts.missing = 1;
        let mut purges = Purges::default();
        purges.begin(NamespaceId(1));
        for _ in 0..100 {
            purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO);
            while let Some(key) = purges.pop(Duration::ZERO) {
                parts.remove(key);
            }
        }
        assert!(purges.is_purging(NamespaceId(1)) && !parts.has(NamespaceId(1)));
        assert_eq!((parts.pieces.get(), purges.is_walking()), (2 * 50 / PIECE, false), "one walk finds them, one none");
        assert_eq!(parts.told, [BTreeSet::from([NamespaceId(1)])], "the parts that are there have noted it");
        parts.missing = 0;
        parts.places.push(Some(key(1, 99)));
        purge_all(&mut purges, &mut parts);
        assert!(!parts.has(NamespaceId(1)), "what the part had when it came back");
        assert_eq!(parts.told.len(), 2);
    }

    /// Else its task would run in a circle until the tier is well again.
    /// A disk that the walk has passed over can be read again.
    #[test]
    fn a_purge_that_begins_once_more_looks_through_the_tier_once_more() {
        let mut parts = Parts::new((0..50).map(|number| key(2, number)));
        let (mut purges, nothing) = (Purges::default(), BTreeSet::new());
        purges.begin(NamespaceId(1));
        parts.noted = None;
        (0..20).for_each(|_| purges.step(&nothing, &mut parts, Duration::ZERO));
        assert_eq!((parts.told.len(), purges.is_purging(NamespaceId(1))), (1, true), "it waits for the note");
        parts.places.push(Some(key(1, 0)));
        purges.begin(NamespaceId(1));
        parts.noted = Some(true);
        (0..20).for_each(|_| purges.step(&nothing, &mut parts, Duration::ZERO));
        assert_eq!(purges.keys, [key(1, 0)]);
        assert!(purges.is_purging(NamespaceId(1)));
    }

    #[test]
    fn a_sick_tier_has_no_walk_to_go_on_with() {
        let mut core = Core::new(Config::new(4096, 64));
        let mut driver = Driver::new(&TierMemory::default(), &mut core);
        driver.attach(Box::new(Parts::new((0..50).map(|number| key(1, number)))), 7);
        driver.was_healthy = true;
        driver.purge(NamespaceId(1));
        driver.step_purges();
        assert!(driver.is_walking());
        driver.was_healthy = false;
        assert!(!driver.is_walking());
    }

    #[test]
    fn no_more_keys_wait_than_their_limit_and_a_piece() {
        let mut parts = Parts::new(
            (0..20_000u32).map(|number| BlockKey { hash: BlockHash::new(&number.to_le_bytes()).unwrap(), ..key(1, 0) }),
        );
        let mut purges = Purges::default();
        purges.begin(NamespaceId(1));
        (0..10_000).for_each(|_| purges.step(&BTreeSet::new(), &mut parts, Duration::ZERO));
        assert!((MAX_KEYS..MAX_KEYS + PIECE).contains(&purges.keys.len()), "{}", purges.keys.len());
        assert!(!purges.is_walking());
    }
}
