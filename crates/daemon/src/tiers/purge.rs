//! Removes purged namespaces from this host's own tiers.
//!
//! Until the last block of such a namespace is removed, the core serves none of its blocks from a tier. A removal that
//! fails is tried again until it succeeds. Shared stores keep their blocks, because other hosts use them too, unless
//! `empty_shared` removes them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use forebay_core::tier::Location;
use forebay_core::{BlockKey, NamespaceId};

use super::driver::{Driver, Under};
use super::spec::Driven;

/// Removals under way at a time: half of what a disk takes of stores and removals, so that stores go on.
const REMOVALS_AT_A_TIME: usize = 128;

#[derive(Default)]
pub(super) struct Purges {
    /// Of each namespace, how many of `keys` are its own.
    namespaces: BTreeMap<NamespaceId, usize>,
    /// Those of them whose blocks were not listed yet: the tier goes through all its blocks for as many as there are.
    unlisted: BTreeSet<NamespaceId>,
    /// Blocks to be removed.
    keys: VecDeque<BlockKey>,
    /// Removals under way.
    pub removing: usize,
    /// Parts of the tier that were missing when the blocks were looked for; none before it was open.
    missing_parts: Option<usize>,
    /// Of blocks that the tier had from the start.
    found: BTreeSet<NamespaceId>,
}

impl Purges {
    /// Blocks that the tier had from the start.
    pub fn note_found(&mut self, found: &[(BlockKey, Location)]) {
        self.found.extend(found.iter().map(|(key, _)| key.namespace));
    }

    /// See [`super::Tiers::namespaces_found`].
    pub fn namespaces_found(&self) -> impl Iterator<Item = NamespaceId> {
        self.found.iter().copied()
    }

    fn begin(&mut self, namespace: NamespaceId) {
        self.found.remove(&namespace);
        self.namespaces.entry(namespace).or_default();
        self.unlisted.insert(namespace);
    }

    /// What was purged while the tier or a part of it was missing is looked for when it is there.
    fn find(&mut self, tier: &dyn Driven) {
        let missing = Some(tier.missing_parts());
        if self.missing_parts != missing {
            self.missing_parts = missing;
            self.keys.clear();
            self.namespaces.values_mut().for_each(|waiting| *waiting = 0);
            self.unlisted = self.namespaces.keys().copied().collect();
        }
        if !self.unlisted.is_empty() {
            let unlisted = std::mem::take(&mut self.unlisted);
            tier.blocks_of(&unlisted).into_iter().for_each(|key| self.push(key));
        }
    }

    pub fn is_purging(&self, namespace: NamespaceId) -> bool {
        self.namespaces.contains_key(&namespace)
    }

    pub fn removed(&mut self) {
        self.removing -= 1;
    }

    pub fn put_back(&mut self, key: BlockKey) {
        self.removing -= 1;
        self.push(key);
    }

    fn push(&mut self, key: BlockKey) {
        *self.namespaces.entry(key.namespace).or_default() += 1;
        self.keys.push_back(key);
    }

    fn pop(&mut self) -> Option<BlockKey> {
        let key = self.keys.pop_front()?;
        *self.namespaces.get_mut(&key.namespace).expect("counted by `push`") -= 1;
        Some(key)
    }

    /// Forgets the namespaces of which no key waits, but for those that are `busy`. A block may be on two parts, and a
    /// removal reaches one: the tier is asked again, of many namespaces for half of them at a time.
    fn forget_empty(&mut self, busy: &BTreeSet<NamespaceId>, tier: &dyn Driven) {
        let is_empty = |(namespace, waiting): &(&NamespaceId, &usize)| **waiting == 0 && !busy.contains(namespace);
        let empty: BTreeSet<NamespaceId> =
            self.namespaces.iter().filter(is_empty).map(|(namespace, _)| *namespace).collect();
        if !empty.is_empty() && (2 * empty.len() >= self.namespaces.len() || self.keys.is_empty()) {
            self.namespaces.retain(|namespace, _| !empty.contains(namespace));
            tier.blocks_of(&empty).into_iter().for_each(|key| self.push(key));
        }
    }
}

impl Driver {
    /// For `Effect::PurgeTiers`.
    pub(super) fn purge(&mut self, namespace: NamespaceId) {
        self.purges.begin(namespace);
    }

    /// Starts some removals, and forgets the namespaces of which nothing is left, nor on its way down. What a missing
    /// part has of them is not known, so they wait for it. Takes as long as there are operations under way, however
    /// many keys wait.
    pub(super) fn step_purges(&mut self) {
        // A sick tier would only fail them, again and again.
        if self.purges.namespaces.is_empty() || !self.was_healthy {
            return;
        }
        let Some(tier) = self.tier.as_ref().map(|tier| &**tier.tier()) else { return };
        self.purges.find(tier);
        while self.purges.removing < REMOVALS_AT_A_TIME
            && let Some(key) = self.purges.pop()
        {
            self.remove(key, 0);
        }
        let under_way = self.under_way.values().filter_map(|under| match under {
            Under::Store { key, .. } | Under::Remove { key } => Some(key.namespace),
            Under::Load { .. } | Under::Exists { .. } | Under::Touch { .. } => None,
        });
        let busy: BTreeSet<NamespaceId> = under_way.collect();
        if self.purges.missing_parts == Some(0)
            && let Some(tier) = &self.tier
        {
            self.purges.forget_empty(&busy, &**tier.tier());
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::tier::{OpId, OpKind, Operation, Tier};
    use forebay_core::{BlockHash, Generation, SlotId};
    use forebay_io::uring::Region;

    use super::super::memory::Memory;
    use super::*;

    const NAMESPACES: u128 = 200;

    fn run(memory: &mut Memory, kind: OpKind, key: BlockKey) {
        let slot = Some((SlotId(0), Generation(0)));
        assert_eq!(memory.submit(&[Operation { id: OpId(1), kind, key, slot, length_bytes: 1, checksum: 0 }]), 1);
        memory.poll(&mut Vec::new());
    }

    /// The tier goes through all its blocks each time, and nobody is served meanwhile.
    #[test]
    fn a_purge_of_many_namespaces_lists_the_blocks_of_a_tier_a_few_times() {
        let mut memory = Memory::new(Region::anonymous(4096).unwrap(), 1 << 20);
        let hash = BlockHash::new(&[1]).unwrap();
        let key = |id| BlockKey { namespace: NamespaceId(id), group: 0, hash };
        (0..2 * NAMESPACES).for_each(|id| run(&mut memory, OpKind::Store, key(id)));
        let mut purges = Purges::default();
        (0..NAMESPACES).for_each(|id| purges.begin(NamespaceId(id)));
        loop {
            purges.find(&memory);
            let Some(key) = purges.pop() else { break };
            run(&mut memory, OpKind::Remove { at: Location::default() }, key);
            purges.forget_empty(&BTreeSet::new(), &memory);
        }
        assert!(!(0..NAMESPACES).any(|id| purges.is_purging(NamespaceId(id))));
        assert!(memory.blocks_of(&(0..NAMESPACES).map(NamespaceId).collect()).is_empty());
        assert_eq!(memory.blocks_of(&(NAMESPACES..2 * NAMESPACES).map(NamespaceId).collect()).len(), 200);
        assert!(memory.listings.get() < 14, "{}", memory.listings.get());
    }
}
