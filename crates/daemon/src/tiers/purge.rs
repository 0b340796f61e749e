//! Emptying this host's own tiers of purged namespaces.
//!
//! The core serves nothing of such a namespace from below until the last of its blocks is removed; a removal that
//! fails is tried again, for as long as that takes. Shared stores keep what they have, since it is other hosts' too,
//! unless they are emptied by `empty_shared`.

use std::collections::{BTreeSet, VecDeque};

use forebay_core::{BlockKey, NamespaceId};

use super::driver::{Driver, Under};
use super::spec::Driven;

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
    pub fn find_all(&mut self, tier: &dyn Driven) {
        self.keys = self.namespaces.iter().flat_map(|namespace| tier.blocks_of(*namespace)).collect();
    }

    pub fn is_purging(&self, namespace: NamespaceId) -> bool {
        self.namespaces.contains(&namespace)
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
    /// For `Effect::PurgeTiers`.
    pub(super) fn purge(&mut self, namespace: NamespaceId) {
        self.purges.namespaces.insert(namespace);
        let known = self.driven().map(|tier| tier.blocks_of(namespace));
        self.purges.keys.extend(known.unwrap_or_default());
    }

    /// Starts some removals, and forgets the namespaces of which nothing is left, nor on its way down.
    pub(super) fn step_purges(&mut self) {
        // A sick tier would only fail them, again and again.
        if self.purges.namespaces.is_empty() || !self.was_healthy {
            return;
        }
        while self.purges.removing < REMOVALS_AT_A_TIME
            && let Some(key) = self.purges.keys.pop_front()
        {
            self.remove(key, 0);
        }
        let waiting = self.purges.keys.iter().map(|key| key.namespace);
        let under_way = self.under_way.values().filter_map(|under| match under {
            Under::Store { key, .. } | Under::Remove { key } => Some(key.namespace),
            Under::Load { .. } | Under::Exists { .. } => None,
        });
        let busy: BTreeSet<NamespaceId> = waiting.chain(under_way).collect();
        self.purges.namespaces.retain(|namespace| busy.contains(namespace));
    }
}
