//! What no policy can exceed: the exact offline optimum of prefix hits.
//!
//! At each request count the hit, give its blocks the index of the next request that asks for them, drop those
//! never asked for again, then evict whatever is asked for latest until the capacity holds (ties: the deeper
//! block). A parent is asked for no later than its child, so what is kept is closed and the optimum for single
//! blocks is that for prefixes.

use std::collections::BinaryHeap;

use crate::trace::Trace;

const NEVER: u32 = u32::MAX;

/// Prefix hits of the optimum with room for `capacity` blocks of one size.
pub fn opt_prefix_hits(trace: &Trace, next_uses: &NextUses, capacity: usize) -> u64 {
    // By block: the next use while kept, else NEVER.
    let mut kept = vec![NEVER; trace.unique()];
    let mut count = 0;
    // Entries are stale once `kept` says otherwise.
    let mut latest: BinaryHeap<(u32, u32, u32)> = BinaryHeap::new();
    let mut hits = 0;
    let mut at = 0;
    for request in trace.requests() {
        hits += request.blocks.iter().take_while(|block| kept[**block as usize] != NEVER).count() as u64;
        for (depth, block) in request.blocks.iter().enumerate() {
            let next = next_uses.0[at];
            at += 1;
            let was_kept = kept[*block as usize] != NEVER;
            kept[*block as usize] = next;
            count = count + usize::from(next != NEVER) - usize::from(was_kept);
            if next != NEVER {
                latest.push((next, depth as u32, *block));
            }
        }
        while count > capacity {
            let (next, _, block) = latest.pop().expect("what is kept is in the heap");
            if kept[block as usize] == next {
                kept[block as usize] = NEVER;
                count -= 1;
            }
        }
        if latest.len() > 4 * capacity + 1024 {
            latest = std::mem::take(&mut latest).into_iter().filter(|e| kept[e.2 as usize] == e.0).collect();
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_optimum_equals_exhaustive_search(paths in proptest::collection::vec((0usize..4, 1usize..4), 1..6), capacity in 1usize..4) {
            // Four prompts that share prefixes, three blocks deep at most.
            let prompts = [[0, 1, 2], [0, 1, 3], [0, 4, 5], [6, 7, 8]];
            let mut numbers = HashMap::new();
            let mut trace = Trace::new("tiny", Vec::new());
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
