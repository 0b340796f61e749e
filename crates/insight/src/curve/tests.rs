//! What a curve says, against what is known of the traffic or what the whole core does.

use super::*;
use forebay_core::PAGE_BYTES;
use forebay_core::policy::{ALL, by_name};

use crate::mix::mix;
use crate::rehearsal::{Hash, Rehearsal, Setup, Ssd, store_batch};

fn rules(admission: Admission) -> Rules {
    let policy = by_name("lru").unwrap();
    Rules { policy, seed: 3, promise_permille: 1000, admission, memory_blocks: 1 << 20 }
}

fn pools(blocks: &[u64]) -> Vec<Capacities> {
    blocks.iter().map(|blocks| Capacities { pool_bytes: blocks * PAGE_BYTES, disk_bytes: 0 }).collect()
}

fn samples(pool: u64) -> Samples {
    Samples { pool, disk: 2 * pool, ..Samples::default() }
}

fn curve(most: u64, capacities: &[Capacities]) -> Curve {
    Curve::new(rules(Admission::SecondSighting), samples(most), capacities)
}

fn shape() -> Shape {
    Shape::of_prompts(PAGE_BYTES)
}

/// Some prompts hot, most cold: prompt n of 1..=limit with density 1/n, of up to 40 blocks.
fn prompts(count: u64, limit: f64) -> impl Iterator<Item = Vec<u64>> {
    (0..count).map(move |n| {
        let prompt = limit.powf(mix(n) as f64 / u64::MAX as f64) as u64;
        (0..1 + mix(prompt) % 40).map(|at| mix(prompt << 16 | at)).collect()
    })
}

/// What the whole core hits of these prompts.
fn exact(rules: Rules, prompts: impl Iterator<Item = Vec<u64>>, capacities: Capacities) -> f64 {
    let Capacities { pool_bytes, disk_bytes } = capacities;
    let Rules { policy, seed, promise_permille, admission, .. } = rules;
    let setup = Setup {
        policy,
        seed,
        capacity_bytes: pool_bytes,
        ssd: (disk_bytes > 0).then_some(Ssd { capacity_bytes: disk_bytes, admission }),
        promise_permille,
        store_batch: store_batch(pool_bytes / PAGE_BYTES, 1),
        memory_entries: 1 << 20,
        table_bits: 12,
    };
    let mut whole = Rehearsal::new(&setup, &[shape()]).unwrap();
    let (mut asked, mut hits) = (0, 0);
    for keys in prompts {
        let hashes: Vec<Hash> = keys.iter().map(|key| u128::from(*key).to_le_bytes()).collect();
        asked += keys.len();
        hits += whole.serve(0, &hashes, &mut ()).hits;
    }
    hits as f64 / asked as f64
}

#[test]
fn it_is_exact_while_all_keys_are_followed() {
    let capacities = [(100, 0), (1000, 0), (200, 800)]
        .map(|(pool, disk)| Capacities { pool_bytes: pool * PAGE_BYTES, disk_bytes: disk * PAGE_BYTES });
    let mut curve = curve(4096, &capacities);
    prompts(3000, 1000.0).for_each(|keys| curve.note(0, shape(), &keys));
    for (at, capacities) in capacities.into_iter().enumerate() {
        assert_eq!(curve.rate(at), 1.0);
        let exact = exact(rules(Admission::SecondSighting), prompts(3000, 1000.0), capacities);
        let curve = curve.hit_ratio(at);
        // Two keys that share a line of the memory of keys do so under other names.
        let tolerance = if capacities.disk_bytes > 0 { 0.005 } else { 1e-9 };
        assert!(exact > 0.1 && (exact - curve).abs() < tolerance, "{capacities:?}: {curve}, exactly {exact}");
    }
}

#[test]
fn it_runs_the_policy_of_the_core_whose_rules_it_has() {
    let capacities = pools(&[300]);
    let exact = ALL.map(|(name, policy)| {
        let core = Core::new(Config { policy, ..Config::new(2 << 20, 1) });
        let rules = Rules { promise_permille: 1000, ..Rules::of(&core, Admission::All) };
        let mut curve = Curve::new(rules, samples(4096), &capacities);
        prompts(3000, 1000.0).for_each(|keys| curve.note(0, shape(), &keys));
        let (exact, curve) = (exact(rules, prompts(3000, 1000.0), capacities[0]), curve.hit_ratio(0));
        // Under other names other keys meet in a bucket of ghosts.
        assert!((exact - curve).abs() < 0.005, "{name}: {curve}, exactly {exact}");
        exact
    });
    let gaps = [exact[0] - exact[1], exact[1] - exact[2], exact[0] - exact[2]];
    assert!(gaps.iter().all(|gap| gap.abs() > 0.02), "two policies hit the same: {exact:?}");
}

#[test]
fn it_is_within_two_points_when_it_follows_one_key_in_ten() {
    let capacities = [(5000, 0), (10_000, 0), (5000, 10_000)]
        .map(|(pool, disk)| Capacities { pool_bytes: pool * PAGE_BYTES, disk_bytes: disk * PAGE_BYTES });
    let mut curve = curve(1000, &capacities);
    prompts(12_000, 20_000.0).for_each(|keys| curve.note(0, shape(), &keys));
    for (at, capacities) in capacities.into_iter().enumerate() {
        assert!(curve.rate(at) <= 0.2);
        let exact = exact(rules(Admission::SecondSighting), prompts(12_000, 20_000.0), capacities);
        let curve = curve.hit_ratio(at);
        assert!((exact - curve).abs() < 0.02, "{capacities:?}: {curve}, exactly {exact}");
    }
}

#[test]
fn a_prompt_larger_than_the_pool_is_larger_than_it_in_miniature() {
    // A hundred times the same prompt of 4,000 blocks, in pools of 1,000 and 5,000, with room for 500 in miniature.
    let mut curve = curve(500, &pools(&[1000, 5000]));
    let prompt: Vec<u64> = (0..4000).map(mix).collect();
    (0..100).for_each(|_| curve.note(0, shape(), &prompt));
    let [small, large] = [0, 1].map(|at| curve.hit_ratio(at));
    assert!((small - 0.25).abs() < 0.03 && large > 0.98, "{small} and {large}");
}

#[test]
fn very_hot_keys_count_whether_they_are_followed_or_not() {
    // Half of all keys asked for are one of two, which one key in a hundred hardly ever is, or counts a hundred times;
    // the others come twice each.
    for salt in 0..20u64 {
        let mut curve = curve(100, &pools(&[10_000]));
        for n in 0..40_000u64 {
            curve.note(0, shape(), &[mix((salt << 40) | (n % 2))]);
            curve.note(0, shape(), &[mix((salt << 40) | (10 + n / 2))]);
        }
        let ratio = curve.hit_ratio(0);
        assert!((ratio - 0.75).abs() < 0.06, "salt {salt}: {ratio}");
    }
}

#[test]
fn the_same_requests_give_the_same_curve() {
    let told = || {
        let mut curve = curve(300, &pools(&[500, 3000]));
        prompts(2000, 5000.0).for_each(|keys| curve.note(0, shape(), &keys));
        [0, 1].map(|at| curve.hit_ratio(at))
    };
    assert_eq!(told(), told());
}

#[test]
fn a_fading_curve_follows_the_load() {
    let mut curve = curve(1024, &pools(&[500]));
    (0..50_000u64).for_each(|n| curve.note(0, shape(), &[mix(n)]));
    assert!(curve.hit_ratio(0) < 0.05);
    curve.fade(0.01);
    (0..50_000u64).for_each(|n| curve.note(0, shape(), &[mix(n % 100)]));
    assert!(curve.hit_ratio(0) > 0.9, "{}", curve.hit_ratio(0));
}

#[test]
fn what_is_said_of_a_capacity_is_as_good_after_a_long_time() {
    // New keys all the time, each asked for once more 500 keys later.
    let mut curve = curve(256, &pools(&[400, 1200]));
    for n in 0..400_000u64 {
        curve.note(0, shape(), &[mix(n + 500)]);
        curve.note(0, shape(), &[mix(n)]);
        if n % 10_000 == 0 {
            curve.fade(0.5);
        }
    }
    let [below, above] = [0, 1].map(|at| curve.hit_ratio(at));
    assert!(below < 0.02 && (above - 0.5).abs() < 0.02, "{below} and {above}");
}

#[test]
fn sizes_count_in_bytes_and_owners_are_told_apart() {
    let mut curve = curve(1024, &pools(&[90, 140]));
    // Each owner goes round ten keys, of one and of nine pages: extents apart, both fit into 140 pages, and not into
    // 90.
    for n in 0..2000u64 {
        curve.note(1, shape(), &[mix(n % 10)]);
        curve.note(2, Shape::of_prompts(9 * PAGE_BYTES), &[mix(100 + n % 10)]);
    }
    let [small, large] = [0, 1].map(|at| [1, 2].map(|owner| curve.hit_ratio_of(owner, at)));
    assert!(large.iter().all(|ratio| *ratio > 0.98) && small[1] < 0.9, "{small:?} and {large:?}");
    assert!((curve.hit_ratio(1) - large[0]).abs() < 0.01);
    assert_eq!(curve.hit_ratio_of(3, 1), 0.0);
}

#[test]
fn a_new_size_begins_all_anew_and_one_too_many_counts_as_its_neighbour() {
    let mut curve = curve(1024, &pools(&[1000]));
    (0..100u64).for_each(|n| curve.note(0, shape(), &[mix(n % 10)]));
    assert!(curve.hit_ratio(0) > 0.8);
    curve.note(1, Shape::of_prompts(2 * PAGE_BYTES), &[mix(1000)]);
    assert_eq!(curve.hit_ratio(0), 0.0, "nothing was asked for since");
    for pages in 3..40u64 {
        (0..50).for_each(|n| curve.note(1, Shape::of_prompts(pages * PAGE_BYTES), &[mix((pages << 8) | (n % 10))]));
    }
    assert_eq!(curve.shapes.len(), SHAPES);
    assert!(curve.hit_ratio(0) > 0.7, "{}", curve.hit_ratio(0));
}

#[test]
fn a_pool_that_cannot_hold_a_block_hits_nothing() {
    let mut curve = curve(1024, &pools(&[4, 4000]));
    (0..100).for_each(|_| curve.note(0, Shape::of_prompts(16 * PAGE_BYTES), &[mix(7)]));
    assert_eq!((curve.hit_ratio(0), curve.hit_ratio(1) > 0.98), (0.0, true));
}

/// The daemon's configuration, with a disk: pools of half to sixteen times what there is, and disks of 0 to 32 pools.
fn all(pool_blocks: u64) -> Vec<Capacities> {
    let pool_bytes = pool_blocks * PAGE_BYTES;
    let pools = [1, 2, 3, 4, 8, 16, 32].map(|halves| (pool_bytes / 2 * halves, 3 * pool_bytes));
    let disks = [0, 1, 2, 4, 8, 16, 32].map(|pools| (pool_bytes, pools * pool_bytes));
    let all = pools.into_iter().chain(disks);
    all.map(|(pool_bytes, disk_bytes)| Capacities { pool_bytes, disk_bytes }).collect()
}

#[test]
fn memory_is_fixed_whatever_the_capacities_and_sizes_are() {
    for pool_blocks in [1 << 10, 1 << 14, 1 << 18] {
        for sizes in [&[1][..], &[25, 26, 4000]] {
            let mut curve = Curve::new(rules(Admission::All), Samples::default(), &all(pool_blocks * sizes[0]));
            for n in 0..4000u64 {
                let shape = Shape::of_prompts(sizes[n as usize % sizes.len()] * PAGE_BYTES);
                let keys: Vec<u64> = (0..100).map(|at| mix(((n / 2) << 16) | at)).collect();
                curve.note(0, shape, &keys);
                let mib = curve.heap_bytes() as f64 / f64::from(1 << 20);
                assert!(n % 500 > 0 || mib <= 16.0, "pool of {pool_blocks}, blocks of {sizes:?}: {mib} MiB");
            }
        }
    }
}
