//! Emptying tiers of purged namespaces.
//!
//! The core serves nothing of such a namespace from below until the last of its blocks is removed; a removal that
//! fails is tried again, for as long as that takes.

use std::collections::{BTreeSet, VecDeque};

use forebay_core::{BlockKey, NamespaceId};

use super::driver::{Driver, Stack, Under};
use crate::state::State;

/// Removals under way at a time: half of what a disk takes of stores and removals, so that stores go on.
const REMOVALS_AT_A_TIME: usize = 128;

#[derive(Default)]
pub(super) struct Purges {
    namespaces: BTreeSet<NamespaceId>,
    /// Blocks to be removed.
    keys: VecDeque<BlockKey>,
    /// Removals under way.
    pub removing: usize,
}

impl Purges {
    /// What was purged before the tier was open is looked for now.
    pub fn find_all(&mut self, tier: &Stack) {
        let its = |key: &BlockKey| self.namespaces.contains(&key.namespace);
        let keys = tier.inner().inner().inner().blocks().map(|block| block.key).filter(its);
        self.keys = keys.collect();
    }

    pub fn removed(&mut self) {
        self.removing -= 1;
    }

    pub fn put_back(&mut self, key: BlockKey) {
        self.removing -= 1;
        self.keys.push_back(key);
    }
}

impl Driver {
    /// For `Effect::PurgeBelow`.
    pub fn purge(&mut self, namespace: NamespaceId) {
        self.purges.namespaces.insert(namespace);
        if let Some(tier) = &self.tier {
            let all = tier.inner().inner().inner().blocks().map(|block| block.key);
            self.purges.keys.extend(all.filter(|key| key.namespace == namespace));
        }
    }

    /// Starts some removals. Returns the namespaces of which nothing is left, nor on its way down.
    fn step_purges(&mut self) -> Vec<NamespaceId> {
        // A sick tier would only fail them, again and again.
        if self.purges.namespaces.is_empty() || !self.was_healthy {
            return Vec::new();
        }
        while self.purges.removing < REMOVALS_AT_A_TIME
            && let Some(key) = self.purges.keys.pop_front()
        {
            self.remove(key);
        }
        let waiting = self.purges.keys.iter().map(|key| key.namespace);
        let under_way = self.under_way.values().filter_map(|under| match under {
            Under::Store { key, .. } | Under::Remove { key } => Some(key.namespace),
            Under::Load { .. } => None,
        });
        let busy: BTreeSet<NamespaceId> = waiting.chain(under_way).collect();
        let done: Vec<NamespaceId> = self.purges.namespaces.difference(&busy).copied().collect();
        done.iter().for_each(|namespace| _ = self.purges.namespaces.remove(namespace));
        done
    }
}

impl State {
    pub fn step_purges(&mut self) {
        for namespace in self.tiers.step_purges() {
            self.core.purged_below(namespace);
        }
    }
}
