//! A tier below the pool, and its driver: what lies there, what the core was told of it, and what moves.
//!
//! Present, absent, corrupt, late, refusing and closed, as events say. A killed daemon's loads go on writing into
//! their slots until they are over, so these stay touched across restarts.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::tier::Outcome;
use forebay_core::tiers::{Admission, Limits, TRANSFERS, TierId};
use forebay_core::{BlockId, BlockKey, Core, Effect, ErrorKind, Generation, NamespaceId, NamespaceIndex, SlotId};

use crate::event::Loading;
use crate::prompts::{NAMESPACES, UNIT_BYTES, layout};
use crate::table::{Key, Row};

const TIER: TierId = TierId(0);

type At = (SlotId, Generation);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    Good,
    Bad,
}

#[derive(Debug)]
pub struct Load {
    block: BlockId,
    at: At,
    pub key: Key,
    slot_bytes: u64,
    is_given_up: bool,
    /// Nobody asked for it yet: a step began it.
    is_prefetch: bool,
}

#[derive(Debug)]
pub struct Store {
    block: BlockId,
    at: At,
    key: Key,
}

#[derive(Default)]
pub struct Tiers {
    is_open: bool,
    is_healthy: bool,
    /// What lies on the tier, by the core's words for it.
    truth: BTreeSet<BlockKey>,
    /// What the core was told lies there.
    known: BTreeMap<BlockKey, Standing>,
    pub loads: Vec<Load>,
    pub stores: Vec<Store>,
    /// Loads of killed daemons that are not over.
    earlier: Vec<At>,
    purging: BTreeSet<NamespaceId>,
    /// Short names that were purged: what of theirs is under way may be taken back at any moment.
    purged: BTreeSet<NamespaceIndex>,
    /// A step of the core is under way, in which nobody asks.
    pub is_stepping: bool,
}

impl Tiers {
    /// A daemon starts. What is on the tier is told at once, also while a transfer of an earlier daemon is under way:
    /// then the tier has another disk, which is missing and may be writing.
    pub fn open(&mut self, core: &mut Core, admission: Option<Admission>) {
        let Some(admission) = admission else { return };
        // Few blocks, so that its limits are met.
        let limits = Limits { admission, queue_blocks: 12, load_blocks: 12, store_permille: 60, ..Limits::default() };
        assert_eq!(core.open_tier(limits), TIER);
        self.is_open = true;
        self.set_healthy(core, false);
        self.tell(core);
    }

    pub fn restart(&mut self) -> u64 {
        self.earlier.extend(self.loads.drain(..).map(|load| load.at));
        // Every other write had reached the disk.
        self.truth.extend(self.stores.drain(..).step_by(2).map(|store| wire(&store.key)));
        self.known.clear();
        self.purging.clear();
        self.purged.clear();
        if self.earlier.is_empty() { 0 } else { TRANSFERS.bit() }
    }

    /// The tier has told of all its blocks, and the pool's were restored.
    pub fn told_all(&mut self, core: &mut Core) {
        if self.is_open {
            core.tier_is_whole(TIER);
        }
    }

    pub fn transfers_over(&mut self, core: &mut Core) {
        if self.earlier.is_empty() {
            return;
        }
        self.earlier.clear();
        core.transfers_over();
    }

    pub fn set_healthy(&mut self, core: &mut Core, is_healthy: bool) {
        if self.is_open {
            self.is_healthy = is_healthy;
            core.set_healthy(TIER, is_healthy);
        }
    }

    pub fn expire_skips(&mut self, core: &mut Core) {
        core.expire_skips();
        core.retry_drains();
        self.known.values_mut().for_each(|standing| *standing = Standing::Good);
    }

    pub fn apply(
        &mut self,
        core: &Core,
        effect: Effect,
        rows: &BTreeMap<SlotId, Row>,
        shorts: &[Option<NamespaceIndex>],
    ) {
        match effect {
            Effect::Promote { block, slot, generation, .. } => {
                let row = &rows[&slot];
                assert_eq!((row.key, row.generation), (None, generation), "{slot:?} is filled over something");
                assert_ne!(row.holders & TRANSFERS.bit(), 0, "{slot:?} is not written down as being filled");
                let key = core.block_key(block);
                let namespace = key.namespace.0 as u8;
                let short = shorts[namespace as usize].expect("a namespace that is open");
                let key = Key { short, namespace, group: key.group, hash: key.hash };
                assert!(!self.is_promoting(&key), "{key:?} is promoted twice at a time");
                assert!(self.is_healthy, "a sick tier is asked for {key:?}");
                assert!(!self.purging.contains(&wire(&key).namespace), "{key:?} is being purged");
                let at = (slot, generation);
                let (slot_bytes, is_prefetch) = (row.slot_bytes, self.is_stepping);
                self.loads.push(Load { block, at, key, slot_bytes, is_given_up: false, is_prefetch });
            }
            Effect::WriteBack { block, slot, generation, .. } => {
                let row = &rows[&slot];
                // A commit is written to the table after its effects were taken, hence not compared here.
                assert_eq!(row.generation, generation, "{slot:?} is written in another life");
                let key = core.block_key(block);
                let namespace = key.namespace.0 as u8;
                let short = shorts[namespace as usize].expect("a namespace that is open");
                let key = Key { short, namespace, group: key.group, hash: key.hash };
                self.stores.push(Store { block, at: (slot, generation), key });
            }
            Effect::PurgeTiers { namespace } => {
                self.purging.insert(core.namespace_id(namespace));
                self.purged.insert(namespace);
            }
            _ => {}
        }
    }

    /// Returns the slot and, if it is ready now, what is in it.
    pub fn end_load(&mut self, core: &mut Core, which: u8, how: Loading) -> Option<(At, Key, bool)> {
        if self.loads.is_empty() {
            return None;
        }
        let load = self.loads.remove(which as usize % self.loads.len());
        let key = wire(&load.key);
        let length_bytes = layout(load.key.namespace).group(load.key.group).unwrap().block_bytes();
        let outcome = match how {
            _ if !self.truth.contains(&key) => Outcome::Absent,
            Loading::Whole => Outcome::Loaded { length_bytes, checksum: 1 },
            Loading::OtherLength => Outcome::Loaded { length_bytes: length_bytes + 1, checksum: 1 },
            Loading::Corrupt => Outcome::Failed(ErrorKind::Corrupt),
            Loading::Io => Outcome::Failed(ErrorKind::Io),
        };
        let is_purged = self.purged.contains(&load.key.short);
        let is_ready = core.promoted(load.block, load.at.1, outcome);
        let is_whole = matches!(outcome, Outcome::Loaded { length_bytes: l, .. } if l == length_bytes);
        assert!(!is_ready || is_whole && !load.is_given_up, "{load:?} is ready after {outcome:?}");
        assert!(is_ready || !is_whole || load.is_given_up || is_purged, "{load:?} is lost after {outcome:?}");
        let is_blamed = !is_whole && !load.is_given_up && !is_purged;
        match outcome {
            // Whoever asks tries for himself.
            Outcome::Failed(ErrorKind::Io) if is_blamed && load.is_prefetch => {}
            Outcome::Failed(ErrorKind::Io) if is_blamed => {
                self.known.entry(key).and_modify(|standing| *standing = Standing::Bad);
            }
            _ if is_blamed => {
                self.known.remove(&key);
            }
            _ => {}
        }
        Some((load.at, load.key, is_ready))
    }

    pub fn give_up(&mut self, core: &mut Core, which: u8) {
        if self.loads.is_empty() {
            return;
        }
        let which = which as usize % self.loads.len();
        let Load { block, at, key, is_prefetch, .. } = self.loads[which];
        core.give_up(block, at.1);
        if !std::mem::replace(&mut self.loads[which].is_given_up, true)
            && !self.purged.contains(&key.short)
            && !is_prefetch
        {
            self.known.entry(wire(&key)).and_modify(|standing| *standing = Standing::Bad);
        }
    }

    pub fn end_store(&mut self, core: &mut Core, which: u8, is_written: bool, shorts: &[Option<NamespaceIndex>]) {
        if self.stores.is_empty() {
            return;
        }
        let store = self.stores.remove(which as usize % self.stores.len());
        let key = wire(&store.key);
        let outcome = if is_written { Outcome::Stored } else { Outcome::Failed(ErrorKind::Full) };
        let is_kept = core.written_back(TIER, store.block, outcome);
        let is_current = shorts[store.key.namespace as usize] == Some(store.key.short);
        let expected = !is_written || is_current && !self.purging.contains(&key.namespace);
        assert_eq!(is_kept, expected, "{store:?}");
        if is_written && is_kept {
            self.truth.insert(key);
            self.known.insert(key, Standing::Good);
        }
    }

    pub fn evict(&mut self, core: &mut Core, which: u8) {
        let key = self.truth.iter().nth(which as usize % self.truth.len().max(1)).copied();
        if let Some(key) = key.filter(|_| self.is_open && self.earlier.is_empty()) {
            self.drop_block(core, &key);
        }
    }

    /// One block of a purged namespace goes; with the last one the purge is over.
    pub fn remove(&mut self, core: &mut Core) {
        let Some(&namespace) = self.purging.first() else { return };
        // What is on the tier is not known before.
        if !self.earlier.is_empty() {
            return;
        }
        match self.truth.iter().find(|key| key.namespace == namespace).copied() {
            Some(key) => self.drop_block(core, &key),
            None => {
                self.purging.remove(&namespace);
                self.known.retain(|key, _| key.namespace != namespace);
                core.tiers_purged(namespace);
            }
        }
    }

    /// What the core was told lies there.
    pub fn known(&self) -> impl Iterator<Item = &BlockKey> {
        self.known.keys()
    }

    /// A lookup finds it on its way up.
    pub fn is_promoting(&self, key: &Key) -> bool {
        self.loads.iter().any(|load| load.key == *key && !load.is_given_up)
    }

    /// An engine asked for it and was told that it is on its way.
    pub fn ask(&mut self, key: &Key) {
        let its = self.loads.iter_mut().filter(|load| load.key == *key && !load.is_given_up);
        its.for_each(|load| load.is_prefetch = false);
    }

    /// Bytes on their way up that nobody asked for yet.
    pub fn prefetch_bytes(&self) -> u64 {
        self.loads.iter().filter(|load| load.is_prefetch && !load.is_given_up).map(|load| load.slot_bytes).sum()
    }

    /// A lookup that wants a lease starts a promotion, if no limit is in its way.
    pub fn would_promote(&self, core: &Core, key: &Key) -> bool {
        let key = wire(key);
        let is_good = self.known.get(&key) == Some(&Standing::Good);
        is_good && core.tier_report(TIER).is_open && !self.purging.contains(&key.namespace)
    }

    pub fn is_known(&self, key: &Key) -> bool {
        let key = wire(key);
        self.known.contains_key(&key) && !self.purging.contains(&key.namespace)
    }

    /// Slots being filled for lookups of this short name.
    pub fn promoting(&self, short: NamespaceIndex) -> impl Iterator<Item = SlotId> {
        self.loads.iter().filter(move |load| load.key.short == short && !load.is_given_up).map(|load| load.at.0)
    }

    /// Slots that the tier, or that of a killed daemon, reads or writes.
    pub fn touched(&self) -> impl Iterator<Item = At> {
        let loads = self.loads.iter().map(|load| load.at);
        loads.chain(self.stores.iter().map(|store| store.at)).chain(self.earlier.iter().copied())
    }

    pub fn pinned(&self) -> impl Iterator<Item = SlotId> {
        self.loads.iter().map(|load| load.at.0).chain(self.stores.iter().map(|store| store.at.0))
    }

    pub fn storing_bytes(&self, core: &Core) -> u64 {
        if self.is_open { core.tier_report(TIER).storing_bytes } else { 0 }
    }

    pub fn check(&self, core: &Core, rows: &BTreeMap<SlotId, Row>) {
        if !self.is_open {
            return assert!(self.loads.is_empty() && self.stores.is_empty());
        }
        let report = core.tier_report(TIER);
        let counts = (self.loads.len() as u64, self.stores.len() as u64, self.known.len() as u64);
        assert_eq!((report.loading_blocks, report.storing_blocks, report.blocks), counts, "loads, stores, known");
        self.check_late(core);
        self.check_prefetches(core);
        let bytes: u64 = self.stores.iter().map(|store| rows[&store.at.0].slot_bytes).sum();
        let largest = (0..NAMESPACES).flat_map(|ns| layout(ns).groups().map(|(_, g)| g.slot_bytes()).max()).max();
        assert!(bytes < core.capacity_bytes() * 60 / 1000 + largest.unwrap(), "{bytes} bytes are pinned by stores");
        for (slot, generation) in self.touched().filter(|at| !self.earlier.contains(at)) {
            assert_eq!(rows[&slot].generation, generation, "{slot:?} was given away under a transfer");
        }
        assert!(core.tier_heap_bytes() < UNIT_BYTES as usize * 10, "few blocks take little");
    }

    fn tell(&mut self, core: &mut Core) {
        for key in &self.truth {
            core.tier_found(TIER, core.tier_hasher().hash(key));
            self.known.insert(*key, Standing::Good);
        }
        self.set_healthy(core, true);
    }

    fn drop_block(&mut self, core: &mut Core, key: &BlockKey) {
        self.truth.remove(key);
        self.known.remove(key);
        core.tier_evicted(TIER, key);
    }

    /// The core knows which loads nobody asked for, and they stay within their limits.
    fn check_prefetches(&self, core: &Core) {
        for load in self.loads.iter().filter(|load| !load.is_given_up && !self.purged.contains(&load.key.short)) {
            assert_eq!(core.is_prefetch(load.block), load.is_prefetch, "{load:?}");
        }
        let prefetch = self.loads.iter().filter(|load| core.is_prefetch(load.block));
        let (count, bytes) = prefetch.fold((0, 0), |(count, bytes), load| (count + 1, bytes + load.slot_bytes));
        assert!(count <= 6, "half of the tier's load slots, not {count}");
        assert!(count <= 1 || bytes <= core.capacity_bytes() * 62 / 1000, "{bytes} bytes are on their way up unasked");
    }

    /// Too many bytes of late loads close the tier, and nothing else does but its health.
    fn check_late(&self, core: &Core) {
        let report = core.tier_report(TIER);
        let bytes = |loads: Vec<&Load>| loads.iter().map(|load| load.slot_bytes).sum::<u64>();
        let given_up = bytes(self.loads.iter().filter(|load| load.is_given_up).collect());
        let is_late = |load: &&Load| load.is_given_up || self.purged.contains(&load.key.short);
        let at_most: Vec<&Load> = self.loads.iter().filter(is_late).collect();
        let is_one = at_most.len() <= 1;
        assert!((given_up..=bytes(at_most)).contains(&report.late_bytes), "{} bytes are late", report.late_bytes);
        let is_full = !is_one && report.late_bytes >= core.capacity_bytes() * 62 / 1000;
        assert!(!report.is_open || self.is_healthy, "a sick tier is asked");
        assert!(report.is_open || !self.is_healthy || is_full, "a healthy tier is not asked");
    }
}

fn wire(key: &Key) -> BlockKey {
    BlockKey { namespace: NamespaceId(key.namespace.into()), group: key.group, hash: key.hash }
}
