//! The cache's contents: the block of each key, the namespaces, and the policies.
//!
//! Invariants: a block is in the index if its state is `Unverified`, `Verifying`, `Ready` or `Promoting`, under the key
//! in its record, and its namespace counts it. In all of these states but `Promoting`, it is in its class's policy.
//! Every class has a policy. When a key leaves the pool, the reason is noted in `history`.
//!
//! In the order of a lookup: `names` (the key's namespace), `index` (its block), `history` (why it has none).

mod history;
mod index;
mod names;

use std::collections::VecDeque;

use crate::error::Result;
use crate::hints::QueueHints;
use crate::key::{BlockHash, BlockId, ClassId, Fingerprint, NamespaceId, NamespaceIndex};
use crate::layout::Layout;
use crate::miss::MissReason;
use crate::policy::{Backing, Make, Policy, Residents};
use crate::slots::{Block, Holds, Slots};

use history::Memory;
use index::Index;

pub(crate) use history::Fate;
pub(crate) use names::{Names, Namespace};

/// See the module's head.
pub(crate) struct Cache {
    names: Names,
    index: Index,
    memory: Memory,
    /// Makes index fingerprints unpredictable.
    seed: u64,
    make: Make,
    /// By class.
    policies: Vec<Box<dyn Policy>>,
    /// Blocks to be touched, coldest first; applied after the reply.
    touches: VecDeque<BlockId>,
}

impl Cache {
    pub fn new(seed: u64, table_bits: u32, memory_entries: usize, make: Make) -> Cache {
        Cache {
            names: Names::default(),
            index: Index::new(table_bits),
            memory: Memory::new(memory_entries, seed),
            seed,
            make,
            policies: Vec::new(),
            touches: VecDeque::new(),
        }
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    #[inline]
    pub fn namespace(&self, namespace: NamespaceIndex) -> &Namespace {
        self.names.get(namespace)
    }

    /// See [`Names::open`].
    pub fn open_namespace(
        &mut self,
        id: NamespaceId,
        layout: &Layout,
        is_trial: bool,
        slots: &mut Slots,
    ) -> Result<NamespaceIndex> {
        self.names.open(id, layout, is_trial, slots)
    }

    /// See [`Names::end`].
    pub fn end_trial(&mut self, id: NamespaceId) {
        self.names.end(id);
    }

    /// See [`Names::close`].
    pub fn close_namespace(&mut self, id: NamespaceId) -> bool {
        self.names.close(id)
    }

    /// Makes `id` mean an empty namespace; the caller drops the blocks of the old one. Returns (old, new).
    pub fn begin_purge(&mut self, id: NamespaceId) -> Option<(NamespaceIndex, NamespaceIndex)> {
        self.names.replace(id)
    }

    /// See [`Names::advance_purge`].
    pub fn advance_purge(&mut self, cursor: Option<u32>) {
        self.names.advance_purge(cursor);
    }

    /// Every class has a policy, which knows what the tiers are given.
    pub fn cover_classes(&mut self, slots: &Slots, backing: Backing) {
        self.policies.resize_with(slots.space().classes().count(), self.make);
        self.policies.iter_mut().for_each(|policy| policy.back(backing));
    }

    /// Blocks in the index.
    pub fn len(&self) -> u64 {
        self.index.len()
    }

    pub fn index_bytes(&self) -> usize {
        self.index.heap_bytes()
    }

    pub fn memory_bytes(&self) -> usize {
        self.memory.heap_bytes()
    }

    pub fn ghost_bytes(&self) -> usize {
        self.policies.iter().map(|policy| policy.ghost_bytes()).sum()
    }

    // Keys.

    #[inline]
    pub fn fingerprint(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
        Fingerprint::new(self.seed, namespace, group, hash)
    }

    /// The key of a block, as the index knows it.
    #[inline]
    pub fn key_of(&self, record: &Block) -> Fingerprint {
        self.fingerprint(record.namespace, record.group, record.hash.as_bytes())
    }

    /// The block of a key.
    #[inline]
    pub fn find(&self, slots: &Slots, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> Option<BlockId> {
        let hash = hash.as_bytes();
        let key = self.fingerprint(namespace, group, hash);
        self.index.find(key, |id| slots[id].has_key(namespace, group, hash))
    }

    /// The block under `key` for which `is_match` says yes.
    #[inline]
    pub fn find_under(&self, key: Fingerprint, is_match: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        self.index.find(key, is_match)
    }

    /// For each key the first block that may be its own, to be compared by the caller, or `NONE`.
    #[inline]
    pub fn candidates<const N: usize>(&self, keys: &[Fingerprint; N]) -> [BlockId; N] {
        self.index.candidates(keys)
    }

    /// From now on lookups find the block by its key, whose fingerprint is `key`.
    pub fn name(&mut self, slots: &Slots, key: Fingerprint, block: BlockId) {
        let record = &slots[block];
        debug_assert_eq!(key, self.key_of(record), "another key's fingerprint");
        self.index.insert(key, block);
        self.names.enter(record.namespace, record.group);
    }

    /// From now on they do not.
    pub fn unname(&mut self, slots: &Slots, block: BlockId) {
        let record = &slots[block];
        self.index.remove(self.key_of(record), block);
        self.names.leave(record.namespace, record.group);
    }

    // Memory.

    /// Keeps in mind what became of a key.
    pub fn note(&mut self, namespace: NamespaceIndex, group: u16, hash: &BlockHash, fate: Fate) {
        self.memory.note(namespace, group, hash, fate);
    }

    /// Keeps in mind what became of a block's key.
    pub fn remember(&mut self, record: &Block, fate: Fate) {
        self.memory.note(record.namespace, record.group, &record.hash, fate);
    }

    /// Why a key has no block.
    pub fn explain(&self, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> MissReason {
        match self.memory.recall(group, hash) {
            None => MissReason::NeverSeen,
            Some((other, _)) if !self.names.is_same(other, namespace) => MissReason::OtherNamespace,
            Some((_, Fate::Refused)) => MissReason::Refused,
            Some((_, Fate::Failed)) => MissReason::Failed,
            // Stored and yet not here: it was purged or lost with its slot, which people call evicted.
            Some((_, Fate::Evicted | Fate::Stored)) => MissReason::Evicted,
        }
    }

    /// Whether a block of this key came before: it was in the pool, or was refused.
    pub fn was_offered(&self, namespace: NamespaceIndex, group: u16, hash: &BlockHash) -> bool {
        matches!(self.memory.recall(group, hash.as_bytes()),
            Some((known, Fate::Stored | Fate::Evicted | Fate::Refused)) if self.names.is_same(known, namespace))
    }

    // Policies.

    /// From now on the policy of its class decides how long the block stays.
    pub fn admit(&mut self, slots: &mut Slots, block: BlockId, parent: Option<BlockId>, hints: &QueueHints) {
        let record = &slots[block];
        let class = record.class;
        let parent = parent.filter(|parent| slots[*parent].class == class && slots.is_indexed(*parent));
        let is_protected = !hints.is_empty() && hints.is_protected(self.key_of(record));
        let key = policy_key(record.namespace, record.group, record.hash.as_bytes());
        let policy = &mut self.policies[class.0 as usize];
        match is_protected {
            true => policy.insert_wanted(slots.nodes_mut(), block, key, parent),
            false => policy.insert(slots.nodes_mut(), block, key, parent),
        }
    }

    /// As `admit`, for a block whose parent is on a tier and not in the pool.
    pub fn admit_detached(&mut self, slots: &mut Slots, block: BlockId, hints: &QueueHints) {
        let record = &slots[block];
        let class = record.class;
        let is_protected = hints.is_protected(self.key_of(record));
        let key = policy_key(record.namespace, record.group, record.hash.as_bytes());
        let policy = &mut self.policies[class.0 as usize];
        match is_protected {
            true => policy.insert_wanted(slots.nodes_mut(), block, key, None),
            false => policy.insert_detached(slots.nodes_mut(), block, key),
        }
    }

    /// The block, just admitted behind `parent`, waits until a tier takes it.
    pub fn begin_wait(&mut self, slots: &mut Slots, block: BlockId, parent: Option<BlockId>) {
        let class = slots[block].class;
        let parent = parent.filter(|parent| slots[*parent].class == class && slots.is_indexed(*parent));
        self.policies[class.0 as usize].begin_wait(slots.nodes_mut(), block, parent);
    }

    /// A tier has written the block, or gave up on it.
    pub fn end_wait(&mut self, slots: &mut Slots, block: BlockId) {
        if slots.is_indexed(block) {
            let class = slots[block].class;
            self.policies[class.0 as usize].end_wait(slots.nodes_mut(), block);
        }
    }

    /// As `admit`, for a block that a tier loaded.
    pub fn admit_loaded(&mut self, slots: &mut Slots, block: BlockId) {
        let record = &slots[block];
        let class = record.class;
        let key = policy_key(record.namespace, record.group, record.hash.as_bytes());
        self.policies[class.0 as usize].insert_loaded(slots.nodes_mut(), block, key);
    }

    /// The block leaves its policy without being evicted.
    pub fn dismiss(&mut self, slots: &mut Slots, block: BlockId) {
        let class = slots[block].class;
        self.policies[class.0 as usize].remove(slots.nodes_mut(), block);
    }

    /// A block of this key came, and no prefix leads to it.
    pub fn refuse(
        &mut self,
        slots: &mut Slots,
        class: ClassId,
        namespace: NamespaceIndex,
        group: u16,
        hash: &BlockHash,
    ) {
        self.memory.note(namespace, group, hash, Fate::Refused);
        let key = policy_key(namespace, group, hash.as_bytes());
        self.policies[class.0 as usize].refuse(slots.nodes_mut(), key);
    }

    /// Takes the victim of a class out of policy and index; the caller frees its slot. `None` if all blocks that were
    /// examined are held, or are protected and protected ones must stay.
    pub fn evict(
        &mut self,
        slots: &mut Slots,
        class: ClassId,
        hints: &QueueHints,
        may_take_protected: bool,
    ) -> Option<BlockId> {
        let (nodes, holds) = slots.nodes_and_holds();
        let view = View { holds, class, seed: self.seed, hints, may_take_protected };
        let block = self.policies[class.0 as usize].evict(nodes, &view)?;
        self.remember(&slots[block], Fate::Evicted);
        self.unname(slots, block);
        Some(block)
    }

    /// Inserts and touches since the block of `class` that was used longest ago was used. `None` if it has none.
    pub fn oldest_age(&self, slots: &Slots, class: ClassId) -> Option<u64> {
        self.policies[class.0 as usize].oldest(slots.nodes()).map(|block| slots.nodes().age(block).into())
    }

    /// See [`Policy::hit_densities`].
    pub fn hit_densities(&self, slots: &Slots, class: ClassId) -> Option<[f64; 2]> {
        self.policies[class.0 as usize].hit_densities(slots.nodes())
    }

    /// The block is in use or will be soon.
    pub fn refresh(&mut self, slots: &mut Slots, block: BlockId) {
        let class = slots[block].class;
        self.policies[class.0 as usize].refresh(slots.nodes_mut(), block);
    }

    /// These blocks are to be touched, coldest first.
    pub fn add_touches(&mut self, blocks: impl IntoIterator<Item = BlockId>) {
        self.touches.extend(blocks);
    }

    pub fn waiting_touches(&self) -> usize {
        self.touches.len()
    }

    /// The next blocks to be touched, at most `limit`.
    pub fn take_touches(&mut self, limit: usize) -> Vec<BlockId> {
        let count = limit.min(self.touches.len());
        self.touches.drain(..count).collect()
    }

    /// The block was asked for and found.
    #[inline]
    pub fn touch(&mut self, slots: &mut Slots, block: BlockId) {
        // It may have been corrupt or purged meanwhile, and its record reused.
        if slots.is_indexed(block) {
            let class = slots[block].class;
            self.policies[class.0 as usize].touch(slots.nodes_mut(), block);
        }
    }

    // Loads from memory that are started early, so that they overlap.

    /// Brings the data that commits of these keys will read into the processor's cache, all at once. Changes nothing.
    pub fn prepare_commits(&self, class: ClassId, namespace: NamespaceIndex, group: u16, hashes: &[BlockHash]) {
        // Reckoned before, or fewer of the loads overlap.
        let key = |hash: &BlockHash| self.fingerprint(namespace, group, hash.as_bytes());
        let keys: Vec<Fingerprint> = hashes.iter().map(key).collect();
        self.index.touch_lines(keys.into_iter());
        let key = |hash: &BlockHash| policy_key(namespace, group, hash.as_bytes());
        let keys: Vec<Fingerprint> = hashes.iter().map(key).collect();
        self.policies[class.0 as usize].touch_lines(&keys);
        self.memory.touch_lines(hashes.iter().map(|hash| (group, hash.as_bytes())));
    }

    /// Brings the data that the next evictions will read into the processor's cache. A guess: the blocks before the
    /// coldest in its list.
    pub fn touch_victims(&self, slots: &Slots, class: ClassId, count: usize) {
        let policy = &self.policies[class.0 as usize];
        let is_there = |block: &BlockId| *block != BlockId::NONE;
        let before = |block: &BlockId| Some(slots.nodes()[*block].prev).filter(is_there);
        let victims: Vec<BlockId> = std::iter::successors(policy.coldest(slots.nodes()), before).take(count).collect();
        slots.touch_lines(&victims);
        let keys: Vec<Fingerprint> = victims.iter().map(|block| self.key_of(&slots[*block])).collect();
        self.index.touch_lines(keys.into_iter());
        let records = victims.iter().map(|block| &slots[*block]);
        let keys: Vec<Fingerprint> =
            records.map(|record| policy_key(record.namespace, record.group, record.hash.as_bytes())).collect();
        policy.touch_lines(&keys);
        slots.space().touch_lines(victims.iter().map(|block| slots[*block].slot));
        self.memory.touch_lines(victims.iter().map(|block| (slots[*block].group, slots[*block].hash.as_bytes())));
    }
}

/// A block's key as policies use it: the same in every core, so that a replayed trace has the same hits. If a client
/// chose hashes that fall into one bucket of ghosts, the policy would forget some keys, and nothing worse.
fn policy_key(namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
    Fingerprint::new(0, namespace, group, hash)
}

/// What a policy may ask, borrowed apart from the policies themselves.
struct View<'a> {
    holds: Holds<'a>,
    class: ClassId,
    seed: u64,
    hints: &'a QueueHints,
    may_take_protected: bool,
}

impl Residents for View<'_> {
    fn is_held(&self, block: BlockId) -> bool {
        self.holds.is_held(block)
    }

    fn is_protected(&self, block: BlockId) -> bool {
        if self.hints.is_empty() {
            return false;
        }
        let record = self.holds.record(block);
        let key = Fingerprint::new(self.seed, record.namespace, record.group, record.hash.as_bytes());
        self.hints.is_protected(key)
    }

    fn may_take_protected(&self) -> bool {
        self.may_take_protected
    }

    fn fingerprint(&self, block: BlockId) -> Fingerprint {
        let record = self.holds.record(block);
        policy_key(record.namespace, record.group, record.hash.as_bytes())
    }

    fn at(&self, place: u32) -> Option<BlockId> {
        let end = self.holds.end();
        if end == 0 {
            return None;
        }
        let block = BlockId(((u64::from(place) * u64::from(end)) >> u32::BITS) as u32);
        let record = self.holds.record(block);
        (record.class == self.class && record.is_indexed()).then_some(block)
    }
}

#[cfg(test)]
impl Cache {
    /// Puts a block under a key that is not its own, as if the two collided.
    pub fn insert_under(&mut self, key: Fingerprint, block: BlockId) {
        self.index.insert(key, block);
    }

    pub fn remove_under(&mut self, key: Fingerprint, block: BlockId) {
        self.index.remove(key, block);
    }
}
