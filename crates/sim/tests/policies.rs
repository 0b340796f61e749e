//! What the simulator's own policies evict in cases worked out by hand, and what must hold of all policies.

#[path = "../../core/tests/policy/cache.rs"]
mod cache;

use cache::Cache;
use forebay_sim::policy::{ALL, by_name};
use proptest::prelude::*;

/// A cache with the policy of this name.
fn cache_of(name: &str, capacity: usize) -> Cache {
    Cache::new(by_name(name).unwrap(), capacity)
}

#[test]
fn twoq_evicts_from_probation_while_it_holds_its_tenth() {
    let mut cache = cache_of("twoq", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    (0..9).for_each(|block| assert_eq!(cache.ask(block), None));
    // Nine in main, 9 on probation: each newcomer pushes the one before out.
    assert_eq!([cache.ask(20), cache.ask(21), cache.ask(22)], [Some(9), Some(20), Some(21)]);
    // 9 is remembered: it goes to main, which gives its coldest as soon as probation is below its share.
    assert_eq!([cache.ask(9), cache.ask(30)], [Some(22), Some(0)]);
}

#[test]
fn arc_gives_room_to_what_returns() {
    let mut cache = cache_of("arc", 4);
    for block in [1, 1, 2, 2, 3, 4] {
        assert_eq!(cache.ask(block), None);
    }
    // 1 and 2 were asked for twice; of the others the older goes, as long as nothing speaks for them.
    assert_eq!([cache.ask(5), cache.ask(6)], [Some(3), Some(4)]);
    // 3 returns: one block seen once is worth keeping. 5 goes for it, and then the oldest seen twice.
    assert_eq!([cache.ask(3), cache.ask(7)], [Some(5), Some(1)]);
}

#[test]
fn s3fifo_promotes_what_was_hit_twice_and_remembers_what_was_not() {
    let mut cache = cache_of("s3fifo", 10);
    (0..10).for_each(|block| assert_eq!(cache.ask(block), None));
    for block in [0, 0, 1] {
        assert_eq!(cache.ask(block), None);
    }
    // 0 moves on to main, 1 was hit only once.
    assert_eq!([cache.ask(20), cache.ask(21)], [Some(1), Some(2)]);
    // 1 is remembered and comes back into main: the small queue is evicted around it.
    assert_eq!(cache.ask(1), Some(3));
    let order = cache.drain();
    assert_eq!(order[..order.len() - 3], [4, 5, 6, 7, 8, 9, 20]);
}

cache::test_all!(ALL);
