//! Harder traffic from a given trace: one-time requests between the real ones.
//!
//! A one-time request begins like a real one, with the part that many share (its system prompt), and goes on
//! with blocks nobody asks for again. Scans of all new blocks would be too easy: they betray themselves at once.

use crate::trace::{ROOT, Trace, mix};

/// A leading block belongs to the system prompt if one in so many requests has it; the first one always does.
const SHARED_BY_ONE_IN: usize = 100;

/// `trace` with one-time requests strewn in, so that they make up `share` of all.
pub fn with_one_time_requests(trace: &Trace, share: f64, seed: u64) -> Trace {
    assert!((0.0..1.0).contains(&share), "a share of {share} leaves no real requests");
    let uses = uses(trace);
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
            let is_shared = |block: &&u32| uses[**block as usize] as usize * SHARED_BY_ONE_IN >= trace.len();
            let shared = model.blocks.iter().take_while(is_shared).count().max(1).min(model.blocks.len());
            let mut blocks: Vec<u32> = model.blocks[..shared].iter().map(|b| renumber[*b as usize]).collect();
            blocks.extend((shared..length.max(shared + 1)).map(|_| fresh(&mut next)));
            mixed.push(request.at_us, model.namespace, &blocks);
        }
    }
    mixed
}

fn uses(trace: &Trace) -> Vec<u32> {
    let mut uses = vec![0; trace.unique()];
    trace.requests().flat_map(|request| request.blocks).for_each(|block| uses[*block as usize] += 1);
    uses
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
