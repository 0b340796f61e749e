//! What is true, whatever the daemon thinks: who may touch which pages, what was stored under which key, what was
//! purged, and which pages a fault spoiled.
//!
//! A claim is made when the daemon has decided, and ends when the holder's own part ends: its last write, its release,
//! its death. So two claims that overlap, at least one of which writes, are a slot in two hands.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use forebay_core::{Generation, PAGE_BYTES, SlotId};

use super::dice::mix;

pub type At = (SlotId, Generation);

/// A block's name, before any hash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    pub shape: u8,
    pub group: u16,
    pub chain: u8,
    pub position: u8,
}

impl Key {
    /// Blocks of all groups of a shape have the same hashes, and two shapes have hashes in common.
    pub fn hash(self) -> Vec<u8> {
        let chain = if self.position < self.chain { 0 } else { self.chain };
        let mut hash = vec![0xa5; [8, 32, 16][self.shape as usize % 3]];
        (hash[0], hash[1]) = (chain, self.position);
        hash
    }

    /// Of everything that tells it from other keys.
    pub fn digest(self) -> u64 {
        let hash = self.hash();
        mix(u64::from(hash[0]) << 40 | u64::from(hash[1]) << 32 | u64::from(self.shape) << 16 | u64::from(self.group))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// A scheduler: what is in its stock and under its leases. It counts while the daemon has to respect it.
    Engine(u32),
    /// A worker's process, whose kernel lock shows that it lives.
    Worker(u32),
    /// A thread of the daemon.
    Daemon,
    /// A transfer of a tier, by the tier's number.
    Transfer(usize),
}

struct Claim {
    pages: Range<u32>,
    generation: Generation,
    is_write: bool,
    holders: Vec<Holder>,
    why: &'static str,
    /// Its engine was gone for the daemon since, and has not heard yet whether it still has the slot.
    is_void: bool,
}

impl Claim {
    fn told(&self) -> String {
        let Claim { pages, generation, is_write, holders, why, is_void: _ } = self;
        format!("{why} of {holders:?}, pages {pages:?}, {generation:?}, writes: {is_write}")
    }
}

struct Store {
    key: Key,
    /// Commits that nobody knows the outcome of.
    pending: u32,
    /// When it last became a block.
    stored: Option<u64>,
}

struct Purge {
    shape: u8,
    began: u64,
    ended: u64,
}

#[derive(Default)]
pub struct Truth {
    /// Steps since the start.
    pub now: u64,
    /// The first thing that must never be.
    pub violation: Option<String>,
    claims: BTreeMap<u64, Claim>,
    next_claim: u64,
    /// Engines that the daemon has to respect: with a session, or a process that maps the pool.
    live: BTreeSet<u32>,
    stores: Vec<Store>,
    purges: Vec<Purge>,
    /// Pages whose bytes a fault changed.
    spoiled: BTreeSet<u32>,
    /// How often what happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Of all that happened, so that two runs can be compared.
    pub digest: u64,
}

/// Shared with the tiers, which learn from the product when they may touch a slot.
#[derive(Clone, Default)]
pub struct SharedTruth(Arc<Mutex<Truth>>);

impl SharedTruth {
    pub fn get(&self) -> MutexGuard<'_, Truth> {
        self.0.lock().expect("the model does not panic under its lock")
    }
}

impl Truth {
    pub fn violate(&mut self, what: String) {
        let now = self.now;
        self.violation.get_or_insert_with(|| format!("step {now}: {what}"));
    }

    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
        let hash = what.bytes().fold(self.now, |hash, byte| mix(hash ^ u64::from(byte)));
        self.digest = mix(self.digest ^ hash);
    }

    // Hands.

    /// `holder` may read, or write, `bytes` of the slot from now on.
    pub fn claim(&mut self, at: At, bytes: u64, is_write: bool, holder: Holder, why: &'static str) -> u64 {
        let pages = at.0.0..at.0.0 + bytes.div_ceil(PAGE_BYTES) as u32;
        self.digest = mix(self.digest ^ u64::from(at.0.0) << 32 ^ u64::from(at.1.0));
        let overlaps = |other: &Range<u32>| pages.start < other.end && other.start < pages.end;
        let meets = |claim: &&Claim| overlaps(&claim.pages) && (is_write || claim.is_write) && self.is_live(claim);
        if let Some(other) = self.claims.values().find(meets) {
            let what = format!("pages {pages:?} in two hands: {why} of {holder:?}, {:?}, and {}", at.1, other.told());
            self.violate(what);
        }
        if is_write {
            pages.clone().for_each(|page| _ = self.spoiled.remove(&page));
        }
        self.next_claim += 1;
        let claim = Claim { pages, generation: at.1, is_write, holders: vec![holder], why, is_void: false };
        self.claims.insert(self.next_claim, claim);
        self.next_claim
    }

    /// Another one works under the same claim.
    pub fn join(&mut self, claim: u64, holder: Holder) {
        if let Some(claim) = self.claims.get_mut(&claim) {
            claim.holders.push(holder);
        }
    }

    /// One that works under the claim is done; the last one ends it.
    pub fn leave(&mut self, claim: u64, holder: Holder) {
        let Some(known) = self.claims.get_mut(&claim) else { return };
        if let Some(at) = known.holders.iter().position(|known| *known == holder) {
            known.holders.swap_remove(at);
        }
        if known.holders.is_empty() {
            self.claims.remove(&claim);
        }
    }

    /// Whether somebody beside `holder` has it.
    pub fn is_held_with(&self, claim: u64, holder: Holder) -> bool {
        self.claims.get(&claim).is_some_and(|claim| claim.holders.iter().any(|known| *known != holder))
    }

    /// It is dead.
    pub fn end(&mut self, holder: Holder) {
        self.claims.values_mut().for_each(|claim| claim.holders.retain(|known| *known != holder));
        self.claims.retain(|_, claim| !claim.holders.is_empty());
    }

    fn is_live(&self, claim: &Claim) -> bool {
        claim.holders.iter().any(|holder| match holder {
            Holder::Engine(engine) => self.live.contains(engine) && !claim.is_void,
            _ => true,
        })
    }

    /// Which engines the daemon has to respect from now on. What the others hold is void until they hear that they
    /// still have it: a worker that comes back may get the same number in another life of it.
    pub fn respect(&mut self, live: BTreeSet<u32>) {
        self.live = live;
        let is_gone = |holder: &Holder| matches!(holder, Holder::Engine(engine) if !self.live.contains(engine));
        let void = self.claims.values_mut().filter(|claim| claim.holders.iter().any(is_gone));
        void.for_each(|claim| claim.is_void = true);
    }

    /// Its engine has heard that it has the slot.
    pub fn renew(&mut self, claim: u64) {
        self.claims.get_mut(&claim).into_iter().for_each(|claim| claim.is_void = false);
    }

    pub fn is_void(&self, claim: u64) -> bool {
        self.claims.get(&claim).is_some_and(|claim| claim.is_void)
    }

    /// `None`, or a claim that the daemon has forgotten: the slot has another owner's generation.
    pub fn check_generations(&mut self, published: impl Fn(SlotId) -> Generation) {
        let is_lost = |claim: &&Claim| published(SlotId(claim.pages.start)) != claim.generation;
        let lost = self.claims.values().filter(|claim| self.is_live(claim)).find(is_lost);
        if let Some(what) = lost.map(|claim| format!("a held slot changed hands: {}", claim.told())) {
            self.violate(what);
        }
    }

    /// What is still in somebody's hands.
    pub fn claims(&self) -> Vec<String> {
        self.claims.values().map(Claim::told).collect()
    }

    // Blocks.

    /// Somebody begins to store a block; the number is in every page.
    pub fn begin_store(&mut self, key: Key) -> u64 {
        self.stores.push(Store { key, pending: 0, stored: None });
        self.stores.len() as u64
    }

    pub fn begin_commit(&mut self, store: u64) {
        self.stores[store as usize - 1].pending += 1;
    }

    /// `is_stored` is `None` if nobody will know.
    pub fn end_commit(&mut self, store: u64, is_stored: Option<bool>) {
        let now = self.now;
        let store = &mut self.stores[store as usize - 1];
        store.pending -= 1;
        if is_stored != Some(false) {
            store.stored = Some(now);
        }
    }

    pub fn purged(&mut self, shape: u8, began: u64) {
        self.purges.push(Purge { shape, began, ended: self.now });
    }

    /// A block was handed out to somebody who asked at step `asked`.
    pub fn served(&mut self, key: Key, store: u64, asked: u64, by: &'static str) {
        self.count(by);
        let Some(known) = (store as usize).checked_sub(1).and_then(|at| self.stores.get(at)) else {
            return self.violate(format!("{by} got bytes for {key:?} that nobody stored: store {store}"));
        };
        if known.key.digest() != key.digest() {
            let what = format!("{by} got {:?} for {key:?}", known.key);
            return self.violate(what);
        }
        let stored = if known.pending > 0 { Some(self.now) } else { known.stored };
        let Some(stored) = stored else {
            return self.violate(format!("{by} got {key:?} of store {store}, which never became a block"));
        };
        let is_gone = |purge: &Purge| purge.shape == key.shape && stored < purge.began && purge.ended < asked;
        if self.purges.iter().any(is_gone) {
            self.violate(format!("{by} got {key:?} of store {store}, which a purge said was gone"));
        }
    }

    // Faults.

    pub fn spoil(&mut self, page: u32) {
        self.spoiled.insert(page);
    }

    pub fn is_spoiled(&self, slot: SlotId, bytes: u64) -> bool {
        let end = slot.0 + bytes.div_ceil(PAGE_BYTES) as u32;
        self.spoiled.range(slot.0..end).next().is_some()
    }

    /// A copy carries what is wrong with it.
    pub fn spoil_copy(&mut self, from: SlotId, to: SlotId, bytes: u64) {
        let end = from.0 + bytes.div_ceil(PAGE_BYTES) as u32;
        let pages: Vec<u32> = self.spoiled.range(from.0..end).map(|page| page - from.0 + to.0).collect();
        self.spoiled.extend(pages);
    }
}

/// The bytes of one rank's slice, as store `store` writes them: each page names its key, its store and its place.
pub fn slice(key: Key, store: u64, rank: usize, bytes: u64) -> Vec<u8> {
    let mut slice = vec![store as u8; bytes as usize];
    for (number, page) in slice.chunks_mut(PAGE_BYTES as usize).enumerate() {
        page[..8].copy_from_slice(&mix(key.digest() ^ (rank as u64) << 32 ^ number as u64).to_le_bytes());
        page[8..16].copy_from_slice(&store.to_le_bytes());
    }
    slice
}

/// The store that wrote this slice of `key`, whole.
pub fn store_of(key: Key, rank: usize, slice: &[u8]) -> Result<u64, String> {
    let store = u64::from_le_bytes(slice[8..16].try_into().expect("eight bytes"));
    let wanted = self::slice(key, store, rank, slice.len() as u64);
    if wanted == slice {
        return Ok(store);
    }
    let page = wanted.chunks(4096).zip(slice.chunks(4096)).position(|(wanted, page)| wanted != page);
    Err(format!("page {} of rank {rank} is not that of {key:?}, store {store}", page.unwrap_or(0)))
}
