//! What more room would buy: the hit rates that other capacities of pool and disk would have had.
//!
//! For each pair of capacities that is told about, the real core with its real policy serves a sample of the keys,
//! chosen by their hash, with pool and disk as much smaller as the sample is (miniature simulation: Waldspurger et al.,
//! ATC 2017). Prompts are sampled with their keys, so what is half of a pool is half of it in miniature, and leases,
//! promotions and extents that move between sizes do there what they do in the daemon. Capacities of few blocks are
//! served whole.
//!
//! Invariants: a miniature holds at most [`Samples`] blocks, whatever the capacities and sizes are: memory is fixed.
//! All miniatures are asked for the same requests and begin at the same time; when a block size comes that was never
//! seen, the scale of all changes, and all begin anew. Counts are kept for each owner, some namespace, of which there
//! are [`OWNERS`] at most; all share pool and disk.

mod miniature;

use forebay_core::layout::Attention;
use forebay_core::policy::Make;
use forebay_core::tiers::Admission;
use forebay_core::{Config, Core};

use crate::rehearsal::Shape;

use miniature::Miniature;

/// Owners that are told apart; the last one may stand for all others.
pub const OWNERS: usize = 16;
/// Sizes and kinds of blocks that are told apart; what comes later counts as the size next to its own.
const SHAPES: usize = 16;
/// How many times smaller than the largest a block counts at least: so that a miniature's pool always holds some of the
/// largest.
const LEAST_SHARE: u64 = 256;

/// What is told about together: a pool, and the disk under it, 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    pub pool_bytes: u64,
    pub disk_bytes: u64,
}

/// What all capacities have in common.
#[derive(Clone, Copy)]
pub struct Rules {
    pub policy: Make,
    pub seed: u64,
    /// Thousandths of a pool that leases may pin.
    pub promise_permille: u32,
    /// What a disk is given.
    pub admission: Admission,
    /// Different blocks after which the core has forgotten that it knew one.
    pub memory_blocks: u64,
}

impl Rules {
    /// Those of this core, with a disk, if there is or were one, that is given `admission`.
    pub fn of(core: &Core, admission: Admission) -> Rules {
        let Config { policy, seed, promise_permille, memory_entries, .. } = *core.config();
        Rules { policy, seed, promise_permille, admission, memory_blocks: memory_entries as u64 }
    }
}

/// The most blocks that a miniature holds.
#[derive(Clone, Copy, Debug)]
pub struct Samples {
    pub pool: u64,
    pub disk: u64,
    /// Keys that it knows again after they left both.
    pub memory: u64,
}

impl Default for Samples {
    fn default() -> Samples {
        Samples { pool: 4096, disk: 8192, memory: 64 << 10 }
    }
}

pub struct Curve {
    rules: Rules,
    samples: Samples,
    shapes: Vec<Shape>,
    miniatures: Vec<Miniature>,
    asked: [f64; OWNERS],
    /// The keys of a request that any miniature follows.
    followed: Vec<u64>,
}

impl Curve {
    pub fn new(rules: Rules, samples: Samples, capacities: &[Capacities]) -> Curve {
        Curve {
            rules,
            samples,
            shapes: Vec::new(),
            miniatures: capacities.iter().map(|capacities| Miniature::new(*capacities)).collect(),
            asked: [0.0; OWNERS],
            followed: Vec::new(),
        }
    }

    /// A request of `owner` asked for `keys` of blocks of one shape, in prefix order. Keys must be well mixed, as those
    /// of the index are. Costs each capacity what the core takes for the keys that it follows, about a microsecond
    /// each.
    pub fn note(&mut self, owner: usize, shape: Shape, keys: &[u64]) {
        let namespace = self.namespace(shape);
        self.asked[owner] += keys.len() as f64;
        let threshold = self.miniatures.iter().map(Miniature::threshold).max().unwrap_or(0);
        self.followed.clear();
        self.followed.extend(keys.iter().filter(|key| **key <= threshold));
        for miniature in &mut self.miniatures {
            miniature.ask(owner, namespace, &self.followed);
        }
    }

    /// The share of all keys asked for that the capacities of this number would have hit; 0 if none was asked for.
    pub fn hit_ratio(&self, at: usize) -> f64 {
        self.miniatures[at].hit_ratio(&self.asked, 0..OWNERS)
    }

    pub fn hit_ratio_of(&self, owner: usize, at: usize) -> f64 {
        self.miniatures[at].hit_ratio(&self.asked, owner..owner + 1)
    }

    /// The share of the keys that is followed to tell about the capacities of this number.
    pub fn rate(&self, at: usize) -> f64 {
        self.miniatures[at].rate()
    }

    /// Lets what was counted so far weigh only `keep` of what is to come, so that the curve follows the load.
    pub fn fade(&mut self, keep: f64) {
        self.asked.iter_mut().for_each(|asked| *asked *= keep);
        self.miniatures.iter_mut().for_each(|miniature| miniature.fade(keep));
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        let miniatures = self.miniatures.iter().map(Miniature::heap_bytes).sum::<usize>();
        miniatures + self.miniatures.capacity() * size_of::<Miniature>() + self.followed.capacity() * size_of::<u64>()
    }

    /// The number of the namespace that stands for all blocks of this shape.
    fn namespace(&mut self, shape: Shape) -> usize {
        if let Some(known) = self.shapes.iter().position(|known| *known == shape) {
            return known;
        }
        if self.shapes.len() == SHAPES {
            let distance =
                |known: &Shape| (known.attention != shape.attention, known.block_bytes.abs_diff(shape.block_bytes));
            return (0..SHAPES).min_by_key(|at| distance(&self.shapes[*at])).expect("there are shapes");
        }
        self.shapes.push(shape);
        self.begin();
        self.shapes.len() - 1
    }

    /// Begins anew, with blocks of the shapes known by now.
    fn begin(&mut self) {
        let largest = self.shapes.iter().map(|shape| shape.block_bytes).max().expect("there is a shape");
        let counted =
            |shape: &Shape| Shape { block_bytes: shape.block_bytes.max(largest / LEAST_SHARE).max(1), ..*shape };
        let shapes: Vec<Shape> = self.shapes.iter().map(counted).collect();
        self.asked = [0.0; OWNERS];
        self.miniatures.iter_mut().for_each(|miniature| miniature.begin(&self.rules, &self.samples, &shapes));
    }
}

/// Of prompts, whose blocks need all before them.
impl Shape {
    pub fn of_prompts(block_bytes: u64) -> Shape {
        Shape { block_bytes, attention: Attention::Full }
    }
}

#[cfg(test)]
mod tests;
