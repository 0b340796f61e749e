//! What each policy evicts in cases worked out by hand, and what must hold for any traffic.

mod cache;

use cache::Cache;
use forebay_core::BlockId;
use forebay_core::policy::{ALL, Backing, Residents, by_name};
use proptest::prelude::*;

/// A cache with the policy of this name.
fn cache_of(name: &str, capacity: usize) -> Cache {
    Cache::new(by_name(name).unwrap(), capacity)
}

#[test]
fn lru_evicts_what_was_used_longest_ago() {
    let mut cache = cache_of("lru", 3);
    let evicted: Vec<_> = [1, 2, 3, 1, 4, 5].into_iter().filter_map(|block| cache.ask(block)).collect();
    assert_eq!(evicted, [2, 3]);
    assert_eq!(cache.drain(), [1, 4, 5]);
}

#[test]
fn lru_evicts_a_prompt_from_its_end() {
    let mut cache = cache_of("lru", 8);
    cache.request(&[1, 2, 3, 4]);
    cache.request(&[1, 2, 5]);
    assert_eq!(cache.drain(), [4, 3, 5, 2, 1]);
}

#[test]
fn tinylfu_admits_to_main_only_what_is_as_popular_as_its_victim() {
    let mut cache = cache_of("tinylfu", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    for _ in 0..3 {
        (0..8).for_each(|block| assert_eq!(cache.ask(block), None));
    }
    // Main is full with blocks asked for four times; 8, asked for twice, stays in the window and goes first.
    cache.ask(8);
    assert_eq!([cache.ask(20), cache.ask(21)], [Some(9), Some(8)]);
}

/// Blocks asked for again and again among ten times as many that come once.
fn share_of_hits_under_scan(name: &str) -> f64 {
    let mut cache = cache_of(name, 100);
    let (mut hits, mut asked) = (0, 0);
    for round in 0..400u32 {
        let block = round % 40;
        if round >= 160 {
            asked += 1;
            hits += u32::from(cache.residents.contains_key(&block));
        }
        cache.ask(block);
        (0..9).for_each(|n| {
            cache.ask(100 + (round * 9 + n) % 3900);
        });
    }
    f64::from(hits) / f64::from(asked)
}

#[test]
fn density_learns_to_keep_what_returns_out_of_a_scan() {
    assert_eq!(share_of_hits_under_scan("lru"), 0.0);
    let density = share_of_hits_under_scan("lhd");
    assert!(density > 0.9, "{density} of the returning blocks were hits");
}

/// Two kinds of traffic that do not fit into these pools together: 60 blocks asked for in a circle, and new ones, of
/// which one in four comes back after 25 rounds. Hits of each.
fn hits_by_kind(pool: usize, is_backed: bool) -> (u32, u32) {
    let mut cache = cache_of("lhd", pool);
    cache.policy.back(if is_backed { Backing::OfReturning } else { Backing::None });
    let (mut circling, mut new) = (0, 0);
    for round in 0..8000u32 {
        let fresh = |round: u32, nth: u32| 100 + (round * 2 + nth) % 3900;
        let is_hit = |cache: &Cache, block: u32| u32::from(round > 3000 && cache.residents.contains_key(&block));
        circling += is_hit(&cache, round % 60);
        cache.ask(round % 60);
        (0..2).for_each(|nth| {
            cache.ask(fresh(round, nth));
        });
        if round % 2 == 0 && round > 25 {
            new += is_hit(&cache, fresh(round - 25, 0));
            cache.ask(fresh(round - 25, 0));
        }
    }
    (circling, new)
}

/// In all pools together: in some, one kind alone gains or loses.
#[test]
fn density_leaves_to_a_tier_what_returns_and_keeps_what_the_tier_lacks() {
    let hits = |is_backed| {
        let of_each = (60..=110).step_by(10).map(|pool| hits_by_kind(pool, is_backed));
        of_each.fold((0, 0), |sum, hits| (sum.0 + hits.0, sum.1 + hits.1))
    };
    let ((circling, new), (circling_backed, new_backed)) = (hits(false), hits(true));
    let what = format!("{circling} and {new} hits alone, {circling_backed} and {new_backed} above a tier");
    assert!(new_backed > 2 * new && circling_backed < circling, "{what}");
}

/// Two blocks of a prompt are loaded and used.
fn load_and_use(cache: &mut Cache) {
    for block in [4000, 4001] {
        let victim = cache.evict();
        assert!(victim.is_some());
        let key = cache.world.fingerprint(BlockId(block));
        cache.policy.insert_loaded(&mut cache.nodes, BlockId(block), key);
        cache.residents.insert(block, None);
    }
    [4001, 4000].iter().for_each(|block| cache.policy.touch(&mut cache.nodes, BlockId(*block)));
}

#[test]
fn the_use_that_a_block_was_loaded_for_is_no_reason_to_keep_it() {
    let mut cache = cache_of("lhd", 100);
    cache.policy.back(Backing::OfAll);
    // A circle of 150 blocks: what is kept of it will be asked for sooner than what was just used.
    (0..6000u32).for_each(|n| _ = cache.ask(n % 150));
    load_and_use(&mut cache);
    assert_eq!(
        [cache.evict(), cache.evict()],
        [Some(4001), Some(4000)],
        "they go first, the last one before its parent"
    );
    load_and_use(&mut cache);
    [4001, 4000].iter().for_each(|block| cache.policy.touch(&mut cache.nodes, BlockId(*block)));
    assert!(![4000, 4001].contains(&cache.evict().unwrap()), "a second use is one");
}

#[test]
fn what_no_prefix_in_the_cache_leads_to_goes_first() {
    let mut cache = cache_of("lhd", 100);
    (0..100u32).for_each(|n| _ = cache.ask(n));
    cache.evict();
    let key = cache.world.fingerprint(BlockId(4000));
    cache.policy.insert_detached(&mut cache.nodes, BlockId(4000), key);
    cache.residents.insert(4000, None);
    assert_eq!(cache.evict(), Some(4000));
}

cache::test_all!(ALL);

proptest! {
    /// Prompts are paths of a tree in which block b has children 4b+1 to 4b+4.
    #[test]
    fn lru_and_density_never_strand_a_child(
        paths in proptest::collection::vec((proptest::collection::vec(1u32..5, 1..6), any::<bool>()), 1..200),
        capacity in 6usize..40,
    ) {
        for name in ["lru", "lhd"] {
            let mut cache = cache_of(name, capacity);
            for (steps, is_expected) in &paths {
                let descend = |block: &mut u32, step: &u32| { *block = *block * 4 + step; Some(*block) };
                let path: Vec<u32> = steps.iter().scan(0, |block, step| descend(block, step)).collect();
                if *is_expected {
                    let residents: Vec<u32> = path.iter().copied().filter(|b| cache.residents.contains_key(b)).collect();
                    residents.iter().rev().for_each(|b| cache.policy.refresh(&mut cache.nodes, BlockId(*b)));
                }
                cache.request(&path);
                prop_assert_eq!(cache.orphans(), 0, "{} after {:?}", name, path);
            }
        }
    }
}
