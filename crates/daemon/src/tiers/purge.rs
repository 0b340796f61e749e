//! Emptying this host's own tiers of purged namespaces.
//!
//! The core serves nothing of such a namespace from below until the last of its blocks is removed; a removal that
//! fails is tried again, for as long as that takes. Shared stores keep what they have, since it is other hosts' too,
//! unless they are emptied by `stores`.

use std::collections::{BTreeSet, VecDeque};

use forebay_core::{BlockKey, NamespaceId};

use super::Tiers;
use super::driver::{Driver, Under};
use super::kind::Driven;
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
    /// For `Effect::PurgeBelow`.
    pub(super) fn purge(&mut self, namespace: NamespaceId) {
        self.purges.namespaces.insert(namespace);
        let known = self.driven().map(|tier| tier.blocks_of(namespace));
        self.purges.keys.extend(known.unwrap_or_default());
    }

    /// Starts some removals, and forgets the namespaces of which nothing is left, nor on its way down.
    fn step_purges(&mut self) {
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
            Under::Load { .. } | Under::Find { .. } => None,
        });
        let busy: BTreeSet<NamespaceId> = waiting.chain(under_way).collect();
        self.purges.namespaces.retain(|namespace| busy.contains(namespace));
    }
}

impl Tiers {
    /// Names of this host's own tiers that are not off one of these namespaces yet.
    pub fn purging(&self, namespaces: &[NamespaceId]) -> Vec<&'static str> {
        let is_purging = |driver: &&Driver| namespaces.iter().any(|namespace| driver.purges.is_purging(*namespace));
        self.drivers.iter().filter(is_purging).map(|driver| driver.kind.name()).collect()
    }
}

impl State {
    /// A purge is over when every tier is done with it.
    pub fn step_purges(&mut self) {
        self.tiers.drivers.iter_mut().for_each(Driver::step_purges);
        let is_over = |namespace: &NamespaceId| {
            let is_off = self.tiers.drivers.iter().all(|driver| !driver.purges.is_purging(*namespace));
            is_off && !self.tiers.emptying.contains(namespace)
        };
        let over: Vec<NamespaceId> = self.tiers.purging.iter().copied().filter(is_over).collect();
        for namespace in over {
            self.tiers.purging.remove(&namespace);
            self.core.purged_below(namespace);
        }
    }
}
