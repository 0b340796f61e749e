//! The policies against libCacheSim on plain object hits (`data/oracle.json`, made by `tools/policy_oracle.py`).
//!
//! Method: one access at a time on the policy alone, each request last to first; no parents are told, so that
//! prompts are nothing special, as they are none to the oracle. LRU must agree exactly. ARC evicts before it
//! knows the key and keeps its ghosts in buckets: it agrees within one
//! point where the cache holds at least 500 blocks. (S3-FIFO there fills main first
//! while the cache is cold, which is most of a short trace; it is tested by hand.)

use std::path::PathBuf;

use forebay_core::policy::{Nodes, Residents};
use forebay_core::{BlockId, Fingerprint};
use forebay_sim::policy::by_name;
use forebay_sim::read::{Hints, read};
use serde::Deserialize;

#[derive(Deserialize, Debug)]
struct Case {
    trace: String,
    capacity: usize,
    policy: String,
    hits: u64,
}

struct Nobody;

impl Residents for Nobody {
    fn is_held(&self, _block: BlockId) -> bool {
        false
    }

    fn is_protected(&self, _block: BlockId) -> bool {
        false
    }

    fn may_take_protected(&self) -> bool {
        true
    }

    fn fingerprint(&self, block: BlockId) -> Fingerprint {
        let product = u128::from(block.0 + 1) * 0x9e37_79b9_7f4a_7c15;
        Fingerprint((product as u64 ^ (product >> 32) as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    fn at(&self, _place: u32) -> Option<BlockId> {
        None
    }
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// (hits, accesses). A block's number is its id, so that the policy's nodes are those of all blocks.
fn object_hits(case: &Case) -> (u64, u64) {
    let trace = read(&data(&format!("{}.jsonl.zst", case.trace)), Hints::default()).unwrap();
    let mut policy = by_name(&case.policy).unwrap()();
    let mut nodes = Nodes::default();
    nodes.cover(BlockId(trace.unique() as u32));
    let mut is_resident = vec![false; trace.unique()];
    let (mut count, mut hits) = (0, 0);
    for request in trace.requests() {
        for block in request.blocks.iter().rev().map(|block| BlockId(*block)) {
            if is_resident[block.0 as usize] {
                hits += 1;
                policy.touch(&mut nodes, block);
                continue;
            }
            if count == case.capacity {
                let victim = policy.evict(&mut nodes, &Nobody).unwrap();
                is_resident[victim.0 as usize] = false;
                count -= 1;
            }
            policy.insert(&mut nodes, block, Nobody.fingerprint(block), None);
            is_resident[block.0 as usize] = true;
            count += 1;
        }
    }
    (hits, trace.accesses() as u64)
}

#[test]
fn policies_agree_with_an_independent_implementation() {
    let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(data("oracle.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 18);
    for case in cases {
        let (hits, accesses) = object_hits(&case);
        let points = 100.0 * (hits as f64 - case.hits as f64) / accesses as f64;
        println!("{case:?}: {hits} here, {points:+.2} points");
        match case.policy.as_str() {
            "lru" => assert_eq!(hits, case.hits, "{case:?}"),
            _ if case.capacity >= 500 => assert!(points.abs() <= 1.0, "{case:?}: {hits} here, {points:+.2} points"),
            _ => {}
        }
    }
}
