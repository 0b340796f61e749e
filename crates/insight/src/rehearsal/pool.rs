//! A core with a pool of an exact capacity.
//!
//! Payloads do not exist, so sizes are scaled: blocks of one size take a page each, others as many pages as keep
//! their ratio to within 2 %. What the last unit has too much for the capacity is reserved and never filled.

use forebay_core::layout::{GroupLayout, Layout};
use forebay_core::{Config, Core, Error, Instance, NamespaceId, NamespaceIndex, PAGE_BYTES, Result};

use super::{GROUP, Setup, Shape};

/// Holds what is too much.
const BALLAST: Instance = Instance(1);
/// Pages of the smallest block where there are several sizes and no common divisor does.
const SCALED_PAGES: u64 = 25;

/// Sizes of blocks in pages.
pub struct Scale {
    /// By namespace.
    pub pages: Vec<u64>,
    page_bytes: f64,
}

impl Scale {
    /// Panics if there is no size.
    pub fn of(sizes: &[u64]) -> Scale {
        let smallest = *sizes.iter().min().expect("there is a size");
        let divisor = sizes.iter().copied().reduce(common_divisor).expect("there is a size");
        let unit = if smallest / divisor <= SCALED_PAGES { divisor } else { smallest.div_ceil(SCALED_PAGES) };
        let pages = sizes.iter().map(|size| (size + unit / 2) / unit).collect();
        Scale { pages, page_bytes: unit as f64 }
    }

    /// The least capacity of so many pages.
    pub fn bytes_of(&self, pages: u64) -> u64 {
        (pages as f64 * self.page_bytes).ceil() as u64
    }

    /// Whole pages of a capacity.
    pub fn pages_of(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.page_bytes) as u64
    }

    /// Pages that blocks can fill of a pool of this capacity. Blocks of several sizes share it by whole units.
    pub fn pool_pages(&self, capacity_bytes: u64) -> u64 {
        let capacity = self.pages_of(capacity_bytes);
        match self.largest() {
            1 => capacity,
            largest => (capacity / unit_pages(capacity, largest)).max(1) * unit_pages(capacity, largest),
        }
    }

    fn largest(&self) -> u64 {
        *self.pages.iter().max().expect("there is a size")
    }
}

/// The core, empty, and its namespaces.
pub(super) fn open(setup: &Setup, shapes: &[Shape]) -> Result<(Core, Vec<NamespaceIndex>)> {
    let scale = Scale::of(&shapes.iter().map(|shape| shape.block_bytes).collect::<Vec<_>>());
    let largest = scale.largest();
    if largest > Layout::MAX_BLOCK_BYTES / PAGE_BYTES {
        return Err(Error::invalid("the sizes of blocks in one cache are too different").with("pages", largest));
    }
    let capacity = scale.pages_of(setup.capacity_bytes);
    let unit_pages = unit_pages(capacity, largest);
    if capacity.next_multiple_of(unit_pages) > u64::from(u32::MAX) {
        return Err(Error::invalid("a simulated pool has at most 2^32 times the common divisor of all block sizes")
            .with("capacity_bytes", setup.capacity_bytes)
            .hint("give the traces rounder `--block-bytes`"));
    }
    let pages = scale.pool_pages(setup.capacity_bytes);
    let units = pages.div_ceil(unit_pages);
    let ballast_pages = units * unit_pages - pages;
    let mut core = Core::new(config(setup, unit_pages, units, ballast_pages));
    (0..units as u32).for_each(|unit| core.populate(unit));
    let namespaces = (shapes.iter().zip(&scale.pages).enumerate()).map(|(at, (shape, pages))| {
        let group = GroupLayout {
            attention: shape.attention,
            // Tells positions of one group apart, which their order does as well.
            tokens_per_block: 1,
            rank_bytes: vec![pages * PAGE_BYTES],
            is_replicated: false,
        };
        core.open_namespace(NamespaceId(at as u128 + 1), &Layout::new(vec![(GROUP, group)])?)
    });
    let namespaces = namespaces.collect::<Result<Vec<_>>>()?;
    reserve_ballast(&mut core, namespaces[0], ballast_pages);
    Ok((core, namespaces))
}

fn config(setup: &Setup, unit_pages: u64, units: u64, ballast_pages: u64) -> Config {
    let mut config = Config::new(unit_pages * PAGE_BYTES, units as u32);
    config.policy = setup.policy;
    config.seed = setup.seed;
    config.memory_entries = setup.memory_entries;
    config.table_bits = setup.table_bits;
    // The core takes the ballast for a part of the pool, but where leases may pin all there is, no share is left to
    // scale.
    let pages = units * unit_pages;
    config.promise_permille = match setup.promise_permille {
        share @ 0..1000 => (u64::from(share) * (pages - ballast_pages)).div_ceil(pages.max(1)) as u32,
        all => all,
    };
    config.reserve_permille = 1000;
    config
}

fn reserve_ballast(core: &mut Core, namespace: NamespaceIndex, slots: u64) {
    let mut taken = Vec::new();
    while (taken.len() as u64) < slots {
        let count = (slots - taken.len() as u64).min(Core::MAX_RESERVE_PER_EVENT as u64) as usize;
        core.reserve(BALLAST, namespace, GROUP, count, false, &mut taken);
    }
}

/// Few enough units that finding one is cheap. Blocks of several sizes share the pool by units, so these are about a
/// hundredth of it, like those of a daemon.
fn unit_pages(capacity: u64, largest: u64) -> u64 {
    match largest {
        1 => (capacity / 256).next_power_of_two().clamp(256, 1 << 18),
        _ => ((capacity / 64).next_power_of_two() / 2).max(largest.next_power_of_two()).clamp(1, 1 << 18),
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_their_ratio() {
        assert_eq!(Scale::of(&[2 << 20, 2 << 20]).pages, [1, 1]);
        assert_eq!(Scale::of(&[2 << 20, 3 << 20, 10 << 20]).pages, [2, 3, 10]);
        let pages = Scale::of(&[1_000_003, 2_345_678, 1_000_003]).pages;
        let ratio = pages[1] as f64 / pages[0] as f64 / 2.345671;
        assert!((0.98..1.02).contains(&ratio), "{pages:?}");
    }
}
