//! The upper bound of every policy: the exact offline optimum of prefix hits.
//!
//! At each request, count the hit and give its blocks the index of the next request for them. Drop blocks that are
//! never requested again. Then evict the block with the latest next request until the capacity holds (ties: the
//! deeper block). A parent is requested no later than its child, so the kept set is closed, and the optimum for
//! single blocks is that for prefixes.

use std::collections::BinaryHeap;

use crate::trace::Trace;

const NEVER: u32 = u32::MAX;

/// Prefix hits of the optimum with a capacity of `capacity` blocks of one size.
pub fn opt_prefix_hits(trace: &Trace, next_uses: &NextUses, capacity: usize) -> u64 {
    let bytes = trace.uniform_bytes().expect("the optimum counts blocks of one size");
    opt_hit_bytes(trace, next_uses, capacity as u64 * bytes) / bytes
}

/// Bytes of the blocks that the optimum hits. If blocks differ in size it may keep parts of them, so no cache of
/// whole blocks does better. If all have one size, it is exact.
pub fn opt_hit_bytes(trace: &Trace, next_uses: &NextUses, capacity_bytes: u64) -> u64 {
    // By block: the next use and the kept bytes; `NEVER` and 0 if it is not kept.
    let mut kept = vec![(NEVER, 0u64); trace.unique()];
    let mut used = 0;
    // Entries are stale if `kept` differs.
    let mut latest: BinaryHeap<(u32, u32, u32)> = BinaryHeap::new();
    let mut live = 0;
    let mut hits = 0;
    let mut at = 0;
    for request in trace.requests() {
        let bytes = trace.bytes_in(request.namespace);
        for (depth, block) in request.blocks.iter().enumerate() {
            let next = next_uses.0[at];
            at += 1;
            let (before, was_kept) = kept[*block as usize];
            live -= usize::from(before != NEVER);
            hits += was_kept;
            used -= was_kept;
            kept[*block as usize] = (NEVER, 0);
            if next != NEVER {
                kept[*block as usize] = (next, bytes);
                used += bytes;
                live += 1;
                latest.push((next, depth as u32, *block));
            }
        }
        while used > capacity_bytes {
            let (next, depth, block) = latest.pop().expect("what is kept is in the heap");
            let (expected, bytes) = kept[block as usize];
            if expected != next {
                continue;
            }
            let excess = (used - capacity_bytes).min(bytes);
            used -= excess;
            if excess == bytes {
                kept[block as usize] = (NEVER, 0);
                live -= 1;
            } else {
                kept[block as usize].1 -= excess;
                latest.push((next, depth, block));
            }
        }
        if latest.len() > 4 * live + 1024 {
            latest = std::mem::take(&mut latest).into_iter().filter(|e| kept[e.2 as usize].0 == e.0).collect();
        }
    }
    hits
}

/// For each access in order, the index of the next request for the same block.
pub struct NextUses(Vec<u32>);

impl NextUses {
    pub fn of(trace: &Trace) -> NextUses {
        let mut seen = vec![NEVER; trace.unique()];
        let mut uses = Vec::with_capacity(trace.accesses());
        for index in (0..trace.len()).rev() {
            for block in trace.request(index).blocks.iter().rev() {
                uses.push(seen[*block as usize]);
                seen[*block as usize] = index as u32;
            }
        }
        uses.reverse();
        NextUses(uses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Shape;
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashMap};

    /// The best over all ways to keep any closed set of at most `capacity` blocks after each request.
    fn exhaustive(trace: &Trace, capacity: usize) -> u64 {
        let mut states: HashMap<BTreeSet<u32>, u64> = HashMap::from([(BTreeSet::new(), 0)]);
        for request in trace.requests() {
            let mut after: HashMap<BTreeSet<u32>, u64> = HashMap::new();
            for (kept, hits) in states {
                let hits = hits + request.blocks.iter().take_while(|block| kept.contains(block)).count() as u64;
                let all: Vec<u32> =
                    kept.iter().chain(request.blocks).copied().collect::<BTreeSet<_>>().into_iter().collect();
                for chosen in 0..1u32 << all.len() {
                    let set: BTreeSet<u32> = (0..all.len()).filter(|i| chosen >> i & 1 == 1).map(|i| all[i]).collect();
                    if set.len() <= capacity {
                        let best = after.entry(set).or_default();
                        *best = hits.max(*best);
                    }
                }
            }
            states = after;
        }
        states.into_values().max().unwrap_or(0)
    }

    #[test]
    fn blocks_of_several_sizes_are_kept_by_when_they_come_again() {
        let shape = |block_bytes| Shape { block_tokens: 16, block_bytes: Some(block_bytes) };
        let mut trace = Trace::new("sizes", vec![shape(10), shape(30)]);
        // A small block, a large one, the small one, the large one.
        [(0, 0), (1, 1), (0, 0), (1, 1)].iter().for_each(|(namespace, block)| trace.push(0, *namespace, &[*block]));
        let next_uses = NextUses::of(&trace);
        let bytes = [40, 30, 10, 5].map(|capacity| opt_hit_bytes(&trace, &next_uses, capacity));
        // After the second request for the small block nothing else needs its space; part of the large one is kept.
        assert_eq!(bytes, [40, 30, 10, 5]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_optimum_equals_exhaustive_search(paths in proptest::collection::vec((0usize..4, 1usize..4), 1..6), capacity in 1usize..4) {
            // Four prompts that share prefixes, three blocks deep at most.
            let prompts = [[0, 1, 2], [0, 1, 3], [0, 4, 5], [6, 7, 8]];
            let mut numbers = HashMap::new();
            let mut trace = Trace::new("tiny", vec![Shape { block_tokens: 16, block_bytes: Some(1) }]);
            for (prompt, len) in paths {
                let blocks: Vec<u32> = prompts[prompt][..len].iter().map(|id| {
                    let next = numbers.len() as u32;
                    *numbers.entry(*id).or_insert(next)
                }).collect();
                trace.push(0, 0, &blocks);
            }
            prop_assert_eq!(opt_prefix_hits(&trace, &NextUses::of(&trace), capacity), exhaustive(&trace, capacity));
        }
    }
}
