//! Queue hints: the keys that waiting requests will look up.
//!
//! An engine that queues a request sends the request's keys. Those blocks that are resident are refreshed, and
//! evictions pass over them while the request waits; blocks that only a tier has are prefetched (`paths/prefetch.rs`).
//! Requests are protected in the order in which they came, and their keys in prefix order, until the protected blocks
//! would fill three quarters of the pool. When a hint is withdrawn, the next request is protected. A hint is never a
//! pin: if the pool needs the space, a protected block is evicted.
//!
//! Invariants: `wanted` counts each key once for every protected mention; at most [`crate::Core::MAX_HINTED_KEYS`] keys
//! are remembered; keys are protected in pieces; only protected keys are prefetched.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::key::{BlockHash, Fingerprint, Instance, NamespaceIndex, PackedKeys};

/// Number of keys of a prompt that are probed at once before any of its blocks is found; after that, as many again as
/// are found. If shared tiers lack a block, they mostly have nothing of its prompt, and on some tiers each request
/// costs money.
const FIRST_ASKED: usize = 8;

/// Names what one waiting request expects. 0 is nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct HintId(pub u64);

#[derive(Default)]
pub(crate) struct QueueHints {
    queue: VecDeque<Hint>,
    /// Requests at the head of the queue that are protected in full.
    protected: usize,
    next_id: u64,
    keys: usize,
    protected_bytes: u64,
    wanted: HashMap<u64, u32>,
    /// Protected keys that may have to be prefetched, over all requests.
    unprefetched: usize,
}

struct Hint {
    id: u64,
    instance: Instance,
    namespace: NamespaceIndex,
    group: u16,
    slot_bytes: u64,
    keys: Vec<Fingerprint>,
    /// Packed, to ask tiers with; empty where there is none.
    hashes: Vec<u8>,
    hash_bytes: usize,
    /// Keys from the first that are counted in `wanted`.
    protected: usize,
    /// Of these, counted from the first: the keys that are in the pool or being prefetched, and the keys for which
    /// shared tiers were probed.
    prefetched: usize,
    asked: usize,
    /// The next one is nowhere: what is behind it is of no use.
    is_at_end: bool,
    /// How much of it is needed is not known yet.
    window: Option<Window>,
    /// Keys that are prefetched, by their numbers.
    needed: Range<usize>,
}

/// A windowed group needs so many blocks before the end of what other groups of the request have.
pub(crate) struct Window {
    pub blocks: usize,
    /// Of one of its blocks.
    pub tokens: u64,
    /// The hints of the groups of full attention, and the tokens of one of their blocks.
    pub full: Vec<(HintId, u64)>,
    /// Keys of a group that is longer than its hint.
    pub most: usize,
}

/// A key that a waiting request will ask for.
#[derive(Clone, Copy)]
pub(crate) struct HintedKey {
    pub namespace: NamespaceIndex,
    pub group: u16,
    pub hash: BlockHash,
}

impl QueueHints {
    /// A request of `instance` for these keys waits; `hashes` are the keys' own bytes, packed, if tiers may be probed
    /// for them.
    pub fn add(
        &mut self,
        instance: Instance,
        (namespace, group): (NamespaceIndex, u16),
        slot_bytes: u64,
        keys: Vec<Fingerprint>,
        (hashes, hash_bytes): (Vec<u8>, usize),
        window: Option<Window>,
    ) -> HintId {
        self.keys += keys.len();
        self.next_id += 1;
        let id = self.next_id;
        self.queue.push_back(Hint {
            id,
            instance,
            namespace,
            group,
            slot_bytes,
            needed: 0..keys.len(),
            keys,
            hashes,
            hash_bytes,
            protected: 0,
            prefetched: 0,
            asked: 0,
            is_at_end: false,
            window,
        });
        HintId(id)
    }

    /// The request waits no more. Unknown and foreign ids are ignored.
    pub fn withdraw(&mut self, instance: Instance, id: HintId) {
        if let Ok(at) = self.queue.binary_search_by_key(&id.0, |hint| hint.id)
            && self.queue[at].instance == instance
        {
            self.remove(at);
        }
    }

    /// No request of `instance` waits any more.
    pub fn drop_all(&mut self, instance: Instance) {
        for at in (0..self.queue.len()).rev() {
            if self.queue[at].instance == instance {
                self.remove(at);
            }
        }
    }

    /// Keys of all waiting requests together.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Different keys that are protected, and requests that are protected in full.
    #[cfg(test)]
    pub fn protected(&self) -> (usize, usize) {
        (self.wanted.len(), self.protected)
    }

    pub fn is_protected(&self, key: Fingerprint) -> bool {
        self.wanted.contains_key(&key.0)
    }

    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn protected_bytes(&self) -> u64 {
        self.protected_bytes
    }

    pub fn has_prefetches(&self) -> bool {
        self.unprefetched > 0
    }

    /// The first key of request number `at` that may have to be prefetched, if it is within the request's first
    /// `reach_bytes`.
    pub fn next_to_prefetch(&self, at: usize, reach_bytes: u64) -> Option<HintedKey> {
        let hint = &self.queue[at];
        let is_within = hint.reached() as u64 * hint.slot_bytes < reach_bytes;
        (is_within && hint.window.is_none() && hint.unprefetched() > 0).then(|| hint.wanted(hint.prefetched))
    }

    /// Of request number `at`, if it is of a windowed group and the end of the prefix is known by now: its keys, the
    /// blocks of its window, and the tokens before that end.
    pub fn to_narrow(&self, at: usize) -> Option<(PackedKeys<'_>, usize, u64)> {
        let hint = &self.queue[at];
        let window = hint.window.as_ref()?;
        let mut prefix: Option<u64> = None;
        for (id, of_block) in &window.full {
            let Ok(full) = self.queue.binary_search_by_key(&id.0, |hint| hint.id) else { continue };
            let full = &self.queue[full];
            let is_whole = full.prefetched == full.keys.len();
            if !full.is_at_end && !is_whole {
                return None;
            }
            // Otherwise it goes on behind the keys that were told, as far as anybody knows.
            if full.is_at_end || full.keys.len() < window.most {
                let tokens = full.prefetched as u64 * of_block;
                prefix = Some(prefix.map_or(tokens, |known| known.min(tokens)));
            }
        }
        // Nobody says where the end is, or it is behind the keys that were told: none of these is needed.
        let is_here =
            |tokens: &u64| hint.keys.len() < window.most || tokens.div_ceil(window.tokens) <= hint.keys.len() as u64;
        let tokens = prefix.filter(is_here).unwrap_or(0);
        let Hint { namespace, group, hashes, hash_bytes, .. } = hint;
        let keys = PackedKeys { namespace: *namespace, group: *group, hashes, hash_bytes: *hash_bytes };
        Some((keys, window.blocks, tokens))
    }

    /// Only these keys of it are prefetched.
    pub fn narrow(&mut self, at: usize, needed: Range<usize>) {
        self.update(at, |hint| {
            (hint.window, hint.prefetched) = (None, needed.start);
            hint.needed = needed;
        });
    }

    /// Of all its keys that are in the pool, or may have to be prefetched.
    pub fn reachable_bytes(&self, at: usize) -> u64 {
        let hint = &self.queue[at];
        let most = hint.window.as_ref().map_or(usize::MAX, |window| window.blocks);
        (hint.reached() + hint.unprefetched()).min(most) as u64 * hint.slot_bytes
    }

    /// That key is up, or is passed over.
    pub fn prefetched(&mut self, at: usize) {
        self.update(at, |hint| hint.prefetched += 1);
    }

    /// That key is nowhere.
    pub fn end_prefix(&mut self, at: usize) {
        self.update(at, |hint| hint.is_at_end = true);
    }

    /// The next key behind that one that shared tiers may be asked for; each is told once.
    pub fn next_to_probe(&mut self, at: usize) -> Option<HintedKey> {
        let hint = &mut self.queue[at];
        let next = hint.asked.max(hint.prefetched + 1);
        let end = hint.last().min(hint.prefetched + hint.reached() + FIRST_ASKED);
        let wanted = (next < end).then(|| hint.wanted(next))?;
        hint.asked = next + 1;
        Some(wanted)
    }

    /// They are told once more.
    pub fn probe_anew(&mut self, at: usize) {
        self.queue[at].asked = 0;
    }

    /// Changes a request, and what is counted of it.
    fn update(&mut self, at: usize, change: impl FnOnce(&mut Hint)) {
        let hint = &mut self.queue[at];
        self.unprefetched -= hint.unprefetched();
        change(hint);
        self.unprefetched += hint.unprefetched();
    }

    /// Counts as many more keys of the first request that is not fully protected as `limit` bytes allow. Returns all
    /// keys that are counted now, so that they stay in order. None if there was nothing to count.
    pub fn protect(&mut self, limit: u64) -> Vec<Fingerprint> {
        let Some(first) = self.queue.get_mut(self.protected) else { return Vec::new() };
        let (from, before) = (first.protected, first.unprefetched());
        for key in &first.keys[from..] {
            match self.wanted.entry(key.0) {
                Entry::Occupied(mut mentions) => *mentions.get_mut() += 1,
                Entry::Vacant(_) if self.protected_bytes + first.slot_bytes > limit => break,
                Entry::Vacant(place) => {
                    place.insert(1);
                    self.protected_bytes += first.slot_bytes;
                }
            }
            first.protected += 1;
        }
        self.unprefetched += first.unprefetched() - before;
        if first.protected == first.keys.len() {
            self.protected += 1;
        }
        if first.protected > from { first.keys[..first.protected].to_vec() } else { Vec::new() }
    }

    fn remove(&mut self, at: usize) {
        let gone = self.queue.remove(at).expect("the caller found it");
        self.protected -= usize::from(at < self.protected);
        self.keys -= gone.keys.len();
        self.unprefetched -= gone.unprefetched();
        for key in &gone.keys[..gone.protected] {
            let Entry::Occupied(mut mentions) = self.wanted.entry(key.0) else {
                unreachable!("protected keys are counted")
            };
            *mentions.get_mut() -= 1;
            if *mentions.get() == 0 {
                mentions.remove();
                self.protected_bytes -= gone.slot_bytes;
            }
        }
    }
}

impl Hint {
    /// Protected keys that may have to be prefetched.
    fn unprefetched(&self) -> usize {
        if self.is_at_end { 0 } else { self.last().saturating_sub(self.prefetched) }
    }

    /// Where the keys end that are protected and needed.
    fn last(&self) -> usize {
        self.protected.min(self.needed.end)
    }

    /// Needed keys that need not be prefetched any more.
    fn reached(&self) -> usize {
        self.prefetched - self.needed.start
    }

    fn wanted(&self, at: usize) -> HintedKey {
        let hash = &self.hashes[at * self.hash_bytes..][..self.hash_bytes];
        let hash = BlockHash::new(hash).expect("hashes have 1 to 32 bytes each");
        HintedKey { namespace: self.namespace, group: self.group, hash }
    }
}
