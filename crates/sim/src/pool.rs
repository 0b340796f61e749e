//! A core with a pool of an exact capacity for the blocks of a trace.
//!
//! Payloads do not exist, so sizes are scaled: blocks of one size take a page each, others as many pages as keep
//! their ratio to within 2 %. What the last unit has too much for the capacity is reserved and never filled.

use forebay_core::block::NamespaceIndex;
use forebay_core::key::{Instance, NamespaceId};
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::{Config, Core, Error, PAGE_BYTES, Result};

use crate::replay::{GROUP, Setup};
use crate::trace::Trace;

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
    pub fn of(trace: &Trace) -> Scale {
        let sizes: Vec<u64> = (0..trace.shapes.len() as u16).map(|namespace| trace.bytes_in(namespace)).collect();
        let smallest = *sizes.iter().min().expect("a trace has a shape");
        let divisor = sizes.iter().copied().reduce(common_divisor).expect("a trace has a shape");
        let unit = if smallest / divisor <= SCALED_PAGES { divisor } else { smallest.div_ceil(SCALED_PAGES) };
        let pages = sizes.iter().map(|size| (size + unit / 2) / unit).collect();
        Scale { pages, page_bytes: unit as f64 }
    }

    /// Whole pages of a capacity.
    pub fn pages_of(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.page_bytes) as u64
    }
}

/// Number of pages of the pool; its core, empty; and the trace's namespaces in it.
pub fn open(trace: &Trace, setup: &Setup, scale: &Scale) -> Result<(u64, Core, Vec<NamespaceIndex>)> {
    let largest = *scale.pages.iter().max().expect("a trace has a shape");
    if largest > Layout::MAX_BLOCK_BYTES / PAGE_BYTES {
        return Err(Error::invalid("the sizes of blocks in one cache are too different").with("pages", largest));
    }
    let capacity = scale.pages_of(setup.capacity_bytes).min(most_pages(trace, scale));
    let unit_pages = unit_pages(capacity, largest);
    if capacity.next_multiple_of(unit_pages) > u64::from(u32::MAX) {
        return Err(Error::invalid("a simulated pool has at most 2^32 times the common divisor of all block sizes")
            .with("capacity_bytes", setup.capacity_bytes)
            .hint("give the traces rounder `--block-bytes`"));
    }
    let is_uniform = largest == 1;
    let units = if is_uniform { capacity.div_ceil(unit_pages) } else { (capacity / unit_pages).max(1) };
    let mut config = Config::new(unit_pages * PAGE_BYTES, units as u32);
    config.policy = setup.policy;
    config.seed = setup.salt;
    config.promise_permille = 1000;
    config.reserve_permille = 1000;
    let mut core = Core::new(config);
    (0..units as u32).for_each(|unit| core.populate(unit));
    let namespaces = (trace.shapes.iter().zip(&scale.pages).enumerate()).map(|(at, (shape, pages))| {
        let group = GroupLayout {
            attention: Attention::Full,
            tokens_per_block: shape.block_tokens,
            rank_bytes: vec![pages * PAGE_BYTES],
            is_replicated: false,
        };
        core.open_namespace(NamespaceId(at as u128 + 1), &Layout::new(vec![(GROUP, group)])?)
    });
    let namespaces = namespaces.collect::<Result<Vec<_>>>()?;
    if is_uniform {
        ballast(&mut core, namespaces[0], units * unit_pages - capacity);
    }
    Ok((units * unit_pages, core, namespaces))
}

/// Room for all blocks of the trace several times over: more makes no difference.
fn most_pages(trace: &Trace, scale: &Scale) -> u64 {
    const TIMES: u64 = 4;
    let pages = (0..trace.unique() as u32).map(|block| scale.pages[usize::from(trace.namespace_of(block))]);
    TIMES * pages.sum::<u64>() + 256
}

fn ballast(core: &mut Core, namespace: NamespaceIndex, slots: u64) {
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
    use crate::trace::Shape;

    fn scale(sizes: &[u64]) -> Vec<u64> {
        let shape = |bytes: &u64| Shape { block_tokens: 16, block_bytes: Some(*bytes) };
        Scale::of(&Trace::new("sizes", sizes.iter().map(shape).collect())).pages
    }

    #[test]
    fn sizes_keep_their_ratio() {
        assert_eq!(scale(&[2 << 20, 2 << 20]), [1, 1]);
        assert_eq!(scale(&[2 << 20, 3 << 20, 10 << 20]), [2, 3, 10]);
        let pages = scale(&[1_000_003, 2_345_678, 1_000_003]);
        let ratio = pages[1] as f64 / pages[0] as f64 / 2.345671;
        assert!((0.98..1.02).contains(&ratio), "{pages:?}");
    }
}
