//! Harder traffic from a given trace: one-time requests between the real ones.
//!
//! A one-time request begins like a real one, with its system prompt, and continues with blocks that nobody requests
//! again. Scans of only new blocks would be too easy to detect. The tree of all prompts shows where a system prompt
//! ends: where most different prompts branch. The number of requests for a block does not show it, since a long
//! conversation requests its own beginning as often as many conversations request theirs.

use std::cmp::Reverse;

use crate::trace::{ROOT, Trace, mix};

/// `trace` with inserted one-time requests, which make up `share` of all. Each has the system prompt of a random
/// earlier request and the length of another.
pub fn with_one_time_requests(trace: &Trace, share: f64, seed: u64) -> Trace {
    assert!((0.0..1.0).contains(&share), "a share of {share} leaves no real requests");
    let ways_on = ways_on(trace);
    let mut mixed = Trace::new(&trace.name, trace.shapes.clone());
    let mut renumber = vec![ROOT; trace.unique()];
    let mut next = 0;
    let mut owed = 0.0;
    let mut random = seed;
    for at in 0..trace.len() {
        let request = trace.request(at);
        let blocks: Vec<u32> = request.blocks.iter().map(|block| number(&mut renumber, &mut next, *block)).collect();
        mixed.push(request.at_us, request.namespace, &blocks);
        owed += share / (1.0 - share);
        while owed >= 1.0 {
            owed -= 1.0;
            let mut pick = || {
                random = mix(random);
                trace.request((random % (at as u64 + 1)) as usize)
            };
            let (model, length) = (pick(), pick().blocks.len());
            let shared = system_prompt(model.blocks, &ways_on);
            let mut blocks: Vec<u32> = shared.iter().map(|block| renumber[*block as usize]).collect();
            blocks.extend((shared.len()..length.max(shared.len() + 1)).map(|_| fresh(&mut next)));
            mixed.push(request.at_us, model.namespace, &blocks);
        }
    }
    mixed
}

/// Number of distinct successors of each block.
fn ways_on(trace: &Trace) -> Vec<u32> {
    let mut ways_on = vec![0; trace.unique()];
    let parents = (0..trace.unique() as u32).map(|block| trace.parent(block));
    parents.filter(|parent| *parent != ROOT).for_each(|parent| ways_on[parent as usize] += 1);
    ways_on
}

/// The leading blocks of a prompt down to the place where most others branch from it; of several such places, the
/// first. A prompt without branches shares its first block alone.
fn system_prompt<'a>(prompt: &'a [u32], ways_on: &[u32]) -> &'a [u32] {
    let parting = (0..prompt.len()).max_by_key(|at| (ways_on[prompt[*at] as usize], Reverse(*at)));
    &prompt[..parting.map_or(0, |at| at + 1)]
}

fn number(renumber: &mut [u32], next: &mut u32, block: u32) -> u32 {
    if renumber[block as usize] == ROOT {
        renumber[block as usize] = fresh(next);
    }
    renumber[block as usize]
}

fn fresh(next: &mut u32) -> u32 {
    *next += 1;
    *next - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Shape;

    /// Three conversations after the system prompt 0, 1, one of them requested much more often than the others, and
    /// one that shares nothing.
    fn conversations() -> Trace {
        let mut trace = Trace::new("conversations", vec![Shape { block_tokens: 16, block_bytes: None }]);
        trace.push(0, 0, &[0, 1, 2, 3]);
        trace.push(0, 0, &[0, 1, 4]);
        trace.push(0, 0, &[0, 1, 5]);
        trace.push(0, 0, &[6, 7]);
        (0..40).for_each(|_| trace.push(0, 0, &[0, 1, 2, 3]));
        trace.push(0, 0, &[6, 7, 8]);
        trace
    }

    #[test]
    fn a_system_prompt_ends_where_most_prompts_part() {
        let trace = conversations();
        let ways_on = ways_on(&trace);
        assert_eq!(system_prompt(&[0, 1, 2, 3], &ways_on), [0, 1]);
        assert_eq!(system_prompt(&[6, 7, 8], &ways_on), [6]);
        assert!(system_prompt(&[], &ways_on).is_empty());
    }

    #[test]
    fn one_time_requests_share_no_conversation() {
        let trace = conversations();
        let mixed = with_one_time_requests(&trace, 0.5, 7);
        assert_eq!(mixed.len(), 2 * trace.len());
        let uses = |block: u32| mixed.requests().filter(|request| request.blocks.contains(&block)).count();
        for one_time in mixed.requests().skip(1).step_by(2) {
            let new = one_time.blocks.iter().position(|block| uses(*block) == 1).expect("it has blocks of its own");
            assert!(one_time.blocks[new..].iter().all(|block| uses(*block) == 1), "{:?}", one_time.blocks);
            let parent = new.checked_sub(1).map(|before| one_time.blocks[before]).expect("it shares its beginning");
            assert!((0..mixed.unique() as u32).filter(|block| mixed.parent(*block) == parent).count() > 1);
        }
    }
}
