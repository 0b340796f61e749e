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

    fn begin(&mut self, namespace: NamespaceId, known: Vec<BlockKey>) {
        self.namespaces.entry(namespace).or_default();
        known.into_iter().for_each(|key| self.push(key));
    }

    /// What was purged while the tier or a part of it was missing is looked for when it is there.
    fn find_all(&mut self, tier: &dyn Driven) {
        let missing = Some(tier.missing_parts());
        if self.missing_parts == missing {
            return;
        }
        self.missing_parts = missing;
        self.keys.clear();
        for namespace in std::mem::take(&mut self.namespaces).into_keys() {
            self.begin(namespace, tier.blocks_of(namespace));
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
    /// removal reaches one: the tier is asked again.
    fn forget_empty(&mut self, busy: &BTreeSet<NamespaceId>, tier: &dyn Driven) {
        let is_empty = |(namespace, waiting): &(&NamespaceId, &usize)| **waiting == 0 && !busy.contains(namespace);
        let empty: Vec<NamespaceId> =
            self.namespaces.iter().filter(is_empty).map(|(namespace, _)| *namespace).collect();
        for namespace in empty {
            self.namespaces.remove(&namespace);
            let left = tier.blocks_of(namespace);
            if !left.is_empty() {
                self.begin(namespace, left);
            }
        }
    }
}

impl Driver {
    /// For `Effect::PurgeTiers`.
    pub(super) fn purge(&mut self, namespace: NamespaceId) {
        self.purges.found.remove(&namespace);
        let known = self.driven().map(|tier| tier.blocks_of(namespace));
        self.purges.begin(namespace, known.unwrap_or_default());
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
        self.purges.find_all(tier);
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
