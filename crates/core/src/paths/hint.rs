//! Adding and withdrawing the hints of waiting requests.
//!
//! Call [`Core::hint`] when a request begins to wait, and [`Core::withdraw_hint`] when it is looked up or gone. Keys
//! are protected in pieces in `step`: resident blocks are refreshed in the policy, and blocks on a tier are promoted
//! (`prefetch`).

use crate::core::Core;
use crate::hints::{HintId, Window};
use crate::key::{Fingerprint, Instance, NamespaceIndex, PackedKeys};

/// Thousandths of the pool that hints may protect: the rest turns over, so that a queue longer than the pool can serve
/// leaves slots for new blocks. Hit rates grow slowly from 500 to 900.
const SHARE_PERMILLE: u32 = 750;
/// Once so many keys are protected, the next request is left to the next step: an index probe and a list move each.
const KEYS_PER_STEP: usize = 512;

impl Core {
    /// Keys of all waiting requests together, 8 bytes each and as much again where protected; above a tier the bytes of
    /// the key itself as well, 32 at most.
    pub const MAX_HINTED_KEYS: usize = 1 << 20;

    /// A request of `instance` that will look up these `hashes` (packed, `hash_bytes` each) waits. Call
    /// [`Core::withdraw_hint`] when it is looked up or gone. `HintId(0)` if there is no room for more,
    /// or the namespace is a trial.
    pub fn hint(
        &mut self,
        instance: Instance,
        namespace: NamespaceIndex,
        group: u16,
        hashes: &[u8],
        hash_bytes: usize,
    ) -> HintId {
        self.add_hint(instance, PackedKeys { namespace, group, hashes, hash_bytes }, None)
    }

    /// As [`Core::hint`], of a group that needs the last `window` blocks of a prefix only: they are prefetched once it
    /// is known how long the prefix is by `full`, the hints of the groups of full attention.
    pub fn hint_window(
        &mut self,
        instance: Instance,
        keys: PackedKeys,
        window: usize,
        full: &[(HintId, u16)],
    ) -> HintId {
        let layout = &self.cache.namespace(keys.namespace).layout;
        let tokens = |group| layout.group(group).map_or(1, |layout| u64::from(layout.tokens_per_block).max(1));
        let full = full.iter().map(|(id, group)| (*id, tokens(*group))).collect();
        let (tokens, most) = (tokens(keys.group), Core::MAX_KEYS_PER_EVENT);
        self.add_hint(instance, keys, Some(Window { blocks: window, tokens, full, most }))
    }

    fn add_hint(&mut self, instance: Instance, keys: PackedKeys, window: Option<Window>) -> HintId {
        let PackedKeys { namespace, group, hashes, hash_bytes } = keys;
        let count = keys.count();
        debug_assert!(count <= Core::MAX_KEYS_PER_EVENT);
        let Some(class) = self.cache.namespace(namespace).class(group) else { return HintId(0) };
        if count == 0 || self.is_trial(namespace) || self.hints.keys() + count > Core::MAX_HINTED_KEYS {
            return HintId(0);
        }
        let key = |hash| self.cache.fingerprint(namespace, group, hash);
        let keys: Vec<Fingerprint> = hashes.chunks_exact(hash_bytes).map(key).collect();
        let slot_bytes = self.slots.space().class_info(class).slot_bytes;
        let hashes = if self.tiers.is_on() { hashes.to_vec() } else { Vec::new() };
        let window = window.filter(|_| self.tiers.is_on());
        self.hints.add(instance, (namespace, group), slot_bytes, keys, (hashes, hash_bytes), window)
    }

    /// The request waits no more. Unknown and foreign ids are ignored.
    pub fn withdraw_hint(&mut self, instance: Instance, id: HintId) {
        self.hints.withdraw(instance, id);
    }

    /// No request of `instance` waits any more, or it is not known which do.
    pub(crate) fn drop_hints(&mut self, instance: Instance) {
        self.hints.drop_all(instance);
    }

    /// Goes on protecting. True if there is more to do now.
    pub(crate) fn step_hints(&mut self) -> bool {
        let limit = self.slots.share(SHARE_PERMILLE);
        let mut done = 0;
        while done < KEYS_PER_STEP {
            let keys = self.hints.protect(limit);
            if keys.is_empty() {
                return false;
            }
            done += keys.len();
            // Last to first, like touches, so that recency stays leaf-first.
            keys.into_iter().rev().for_each(|key| self.refresh_resident(key));
        }
        true
    }

    fn refresh_resident(&mut self, key: Fingerprint) {
        let found = self.cache.find_under(key, |block| self.cache.key_of(&self.slots[block]) == key);
        if let Some(block) = found.filter(|block| self.slots.is_indexed(*block)) {
            self.cache.refresh(&mut self.slots, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Config;
    use crate::key::{BlockHash, NamespaceId};
    use crate::layout::{Attention, GroupLayout, Layout};
    use crate::paths::store::CommitOutcome;

    const ENGINE: Instance = Instance(0);
    const SLOTS: u32 = 16;

    fn core() -> (Core, NamespaceIndex) {
        let mut config = Config::new(u64::from(SLOTS) * 4096, 1);
        config.policy = crate::policy::by_name("lru").unwrap();
        config.reserve_permille = 1000;
        let mut core = Core::new(config);
        core.populate(0);
        let group = GroupLayout {
            attention: Attention::Full,
            tokens_per_block: 16,
            rank_bytes: vec![4096],
            is_replicated: false,
        };
        let namespace = core.open_namespace(NamespaceId(1), &Layout::new(vec![(0, group)]).unwrap()).unwrap();
        (core, namespace)
    }

    fn store(core: &mut Core, namespace: NamespaceIndex, block: u8) {
        let mut slots = Vec::new();
        core.reserve(ENGINE, namespace, 0, 1, false, &mut slots);
        let outcome = core.commit(ENGINE, namespace, 0, BlockHash::new(&[block]).unwrap(), None, slots[0], Some(0));
        assert_eq!(outcome, CommitOutcome::Stored);
    }

    fn is_resident(core: &Core, namespace: NamespaceIndex, block: u8) -> bool {
        core.cache.find(&core.slots, namespace, 0, &BlockHash::new(&[block]).unwrap()).is_some()
    }

    #[test]
    fn expected_blocks_outlive_others_until_their_request_is_met() {
        let (mut core, namespace) = core();
        (0..16).for_each(|block| store(&mut core, namespace, block));
        // 40 is not there yet; it is wanted from the moment it is stored.
        let id = core.hint(ENGINE, namespace, 0, &[0, 1, 40], 1);
        while core.step() {}
        store(&mut core, namespace, 40);
        (50..80).for_each(|block| store(&mut core, namespace, block));
        assert!([0, 1, 40].iter().all(|block| is_resident(&core, namespace, *block)));
        core.withdraw_hint(ENGINE, id);
        (80..100).for_each(|block| store(&mut core, namespace, block));
        assert!(![0, 1, 40].iter().any(|block| is_resident(&core, namespace, *block)));
    }

    #[test]
    fn no_more_is_wanted_than_its_share_and_those_behind_move_up() {
        let (mut core, namespace) = core();
        let ids: Vec<_> = (0..4u8)
            .map(|n| {
                let keys: Vec<u8> = (0..8).map(|block| n * 8 + block).collect();
                core.hint(ENGINE, namespace, 0, &keys, 1)
            })
            .collect();
        while core.step() {}
        assert_eq!(core.hints.protected().0, 12, "three quarters of 16");
        core.withdraw_hint(ENGINE, ids[0]);
        core.withdraw_hint(ENGINE, ids[0]);
        core.withdraw_hint(Instance(1), ids[1]);
        while core.step() {}
        assert_eq!(core.hints.protected(), (12, 1));
        core.withdraw_hint(ENGINE, ids[2]);
        core.withdraw_hint(ENGINE, ids[3]);
        assert_eq!((core.hints.protected().0, core.hints.keys()), (8, 8));
        core.instance_gone(ENGINE);
        assert_eq!((core.hints.protected().0, core.hints.protected_bytes()), (0, 0));
    }

    #[test]
    fn a_pool_full_of_wanted_blocks_still_takes_new_ones() {
        let (mut core, namespace) = core();
        (0..16).for_each(|block| store(&mut core, namespace, block));
        core.hint(ENGINE, namespace, 0, &(0..16).collect::<Vec<u8>>(), 1);
        while core.step() {}
        (20..60).for_each(|block| store(&mut core, namespace, block));
        assert!(is_resident(&core, namespace, 59));
    }

    #[test]
    fn there_is_a_limit_on_what_is_expected() {
        let (mut core, namespace) = core();
        let keys = vec![7; 2048];
        let full = (0..=Core::MAX_HINTED_KEYS / 2048).map(|_| core.hint(ENGINE, namespace, 0, &keys, 1)).last();
        assert_eq!(full, Some(HintId(0)));
        assert_eq!(core.hint(ENGINE, namespace, 9, &keys, 1), HintId(0), "there is no such group");
    }
}
