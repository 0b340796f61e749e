//! Which block is evicted when a slot is needed: one trait, and one file for each policy.
//!
//! A policy sees block ids, never keys or bytes of memory. Its entries are the intrusive nodes of the slots, so a
//! resident block costs no allocation. Each size class has a policy of its own. A request's blocks are touched from the
//! last to the first. So a parent is always more recent than its children, and plain recency is leaf-first.

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
pub use named::{ALL, Make, PolicyChoice, by_name};

/// What a policy asks about a block it would like to evict.
pub trait Residents {
    /// Whether somebody may touch the block's slot; then the block must stay.
    fn is_held(&self, block: BlockId) -> bool;
    /// Whether a waiting request will look the block up; then other blocks go first.
    fn is_protected(&self, block: BlockId) -> bool;
    /// Whether a protected block goes if no other is found.
    fn may_take_protected(&self) -> bool;
    /// The block's key, for ghosts: they remember keys after their blocks are gone.
    fn fingerprint(&self, block: BlockId) -> Fingerprint;
    /// For samples: the block that is so many 2^-32ths of the way through the slots of all classes. None if the policy
    /// that asks does not have it.
    fn at(&self, place: u32) -> Option<BlockId>;
}

/// Which blocks of the pool lower tiers get.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Backing {
    /// There is no tier.
    #[default]
    None,
    /// Those that are looked up again, and not the others.
    OfReturning,
    /// Others too.
    OfAll,
}

/// Entries that one `evict` may pass over because they are held or protected. It bounds the time of an eviction.
pub const MAX_SCAN: usize = 64;

/// The order in which the blocks of one size class are evicted. No call looks at more than [`MAX_SCAN`] entries.
pub trait Policy: Send {
    /// The policy's own name, as [`by_name`] takes it.
    fn name(&self) -> &'static str;

    /// `block` became resident. `parent` is the block before it in its prompt, if that is resident in the same class. A
    /// child goes right behind its parent, so a prompt that is stored piece by piece is evicted leaf-first too.
    fn insert(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>);

    /// As `insert`, for a block that a waiting request will look up.
    fn insert_wanted(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint, parent: Option<BlockId>) {
        self.insert(nodes, block, key, parent);
    }

    /// As `insert`, for a block that no prefix in the pool leads to: a tier has its parent.
    fn insert_detached(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint) {
        self.insert(nodes, block, key, None);
    }

    /// A tier loaded `block` for a lookup, or for a request that waits. Its first touch is the use that it came for.
    fn insert_loaded(&mut self, nodes: &mut Nodes, block: BlockId, key: Fingerprint) {
        self.insert(nodes, block, key, None);
    }

    /// A block of this key was committed and not admitted, because its parent is not resident.
    fn refuse(&mut self, _nodes: &mut Nodes, _key: Fingerprint) {}

    /// A lookup found `block`.
    fn touch(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block` is in use or will be soon. That says nothing about its hit density, but it must not be evicted next.
    fn refresh(&mut self, nodes: &mut Nodes, block: BlockId);

    /// `block`, which was inserted just now behind `parent`, waits until a tier takes it. It is not to be evicted next.
    fn begin_wait(&mut self, _nodes: &mut Nodes, _block: BlockId, _parent: Option<BlockId>) {}

    /// A tier has written `block`, or gave up on it.
    fn end_wait(&mut self, _nodes: &mut Nodes, _block: BlockId) {}

    /// `block` left without being evicted.
    fn remove(&mut self, nodes: &mut Nodes, block: BlockId);

    /// Takes the next victim out. None if all candidates that it looked at must stay.
    fn evict(&mut self, nodes: &mut Nodes, residents: &dyn Residents) -> Option<BlockId>;

    /// What the tiers below get.
    fn back(&mut self, _backing: Backing) {}

    /// The block that `evict` looks at first.
    fn coldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// The block that was used longest ago, as far as the policy knows. Its age says how long a class keeps useless
    /// blocks, so classes can be compared whatever their policies are.
    fn oldest(&self, nodes: &Nodes) -> Option<BlockId>;

    /// The expected hits for the time that they stay, of a block that is used now and of the oldest. `None` if the
    /// policy expects nothing.
    fn hit_densities(&self, _nodes: &Nodes) -> Option<[f64; 2]> {
        None
    }

    /// `insert` or `evict` is probably called next for blocks of these keys. Loads from memory that start here overlap.
    fn touch_lines(&self, _keys: &[Fingerprint]) {}

    /// Bytes on the heap that remember keys without blocks.
    fn ghost_bytes(&self) -> usize {
        0
    }
}
