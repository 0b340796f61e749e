//! Which block goes when room is needed: one trait, one file a policy.
//!
//! A policy sees block ids, never keys or bytes of memory; its entries are the intrusive nodes of the slots, so that a
//! resident block costs no allocation. Each size class has a policy of its own. A request's blocks are touched
//! last-to-first, hence a parent is always more recent than its children and plain recency is leaf-first.

pub mod ghosts;
pub mod hit_density;
pub mod lhd;
pub mod lists;
pub mod lru;
mod named;
pub mod sketch;
pub mod tinylfu;

use crate::key::{BlockId, Fingerprint};
pub use crate::slots::{List, Node, Nodes};
pub use named::{ALL, Make, by_name};

/// What a policy asks about a block it would like to evict.
pub trait Residents {
    /// True while somebody may touch its slot: it must stay.
    fn is_held(&self, block: BlockId) -> bool;
    /// True while a waiting request expects it: it had better stay.
    fn is_protected(&self, block: BlockId) -> bool;
    /// Whether a wanted block goes if nothing else is found.
    fn may_take_protected(&self) -> bool;
    /// For ghosts, which remember keys after their blocks are gone.
    fn fingerprint(&self, block: BlockId) -> Fingerprint;
}

/// Entries that one `evict` may pass over because somebody holds or wants them; bounds the time of an eviction.
pub const MAX_SCAN: usize = 64;

/// See the module's head. No call looks at more than [`MAX_SCAN`] entries.
pub trait Policy: Send {
    /// The name under which [`ALL`] or a report lists the policy.
    fn name(&self) -> &'static str;

    /// `block` became resident. `parent` is the block before it in its prompt, resident in the same class: a
    /// child goes right behind its parent, so that a prompt stored piece by piece ends up leaf-first too.
    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>);

    /// As `insert`, of a block that a waiting request expects.
    fn insert_wanted(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        self.insert(nodes, block, key, parent);
    }

    /// A block of this key came and was not admitted, since its parent is not resident.
    fn refuse(&mut self, _nodes: &mut Nodes, _key: Fingerprint) {}

    /// `block` was asked for and found.
    fn touch(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block`, inserted before anybody asked for it, is asked for now, and touched soon.
    fn begin_use(&mut self, _nodes: &mut Nodes, _block: BlockId) {}

    /// `block` is in use or will be soon: no sign of its worth, but not to be evicted next.
    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block` left without being evicted.
    fn remove(&mut self, nodes: &mut Nodes, block: BlockId);

    /// Takes the next victim out, or none if all candidates looked at are held, or wanted and to be spared.
    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId>;

    /// Whether a tier below is given the blocks that were asked for again, and not the others.
    fn back(&mut self, _is_backed: bool) {}

    /// The block that `evict` would look at first.
    fn coldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// The block used longest ago, as far as the policy knows: how long it keeps what is of no use, which compares
    /// classes whatever else their policies go by.
    fn oldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// `insert` or `evict` is about to be called for blocks of these keys, if the guess is right: a chance to
    /// start loads from memory, so that they overlap.
    fn touch_lines(&self, _keys: &[Fingerprint]) {}

    /// Bytes on the heap that remember keys without blocks.
    fn ghost_bytes(&self) -> usize {
        0
    }
}
