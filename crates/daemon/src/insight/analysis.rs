//! The estimates themselves, computed from one lookup after another.
//!
//! Invariant: each owner is one namespace; owners are numbered in order of appearance; the last number stands for all
//! further namespaces.

use std::time::Instant;

use forebay_core::{Fingerprint, NamespaceId};
use forebay_insight::ceiling::Ceiling;
use forebay_insight::curve::{Capacities, Curve, OWNERS, Rules, Samples};
use forebay_insight::optimum::{Optimum, Sampled};
use forebay_insight::rehearsal::Shape;

use super::estimates::{Estimates, Share};
use super::record::Recording;
use super::seen::Seen;

/// The curves cover the load of about the last eight turnovers of the pool: older lookups count half after that many.
const FADE_TURNOVERS: u64 = 8;
/// Capacities of the pool for which the hit rate is estimated, with the present disk, in halves of the present pool.
const POOL_HALVES: [u64; 7] = [1, 2, 3, 4, 8, 16, 32];
/// Capacities of a disk under the pool there is, in pools.
const DISK_POOLS: [u64; 7] = [0, 1, 2, 4, 8, 16, 32];

/// What there is.
#[derive(Clone)]
pub struct Present {
    pub pool_bytes: u64,
    /// Of the disk, if one of known size is configured.
    pub disk_bytes: Option<u64>,
    /// Those of the daemon's core, and what a disk is given, or would be.
    pub rules: Rules,
}

pub(super) struct Analysis {
    start: Instant,
    seed: u64,
    present: Present,
    ceiling: Ceiling,
    curve: Curve,
    /// What the curve tells about; one of them is what there is.
    capacities: Vec<Capacities>,
    /// Of the pool, and of pool and disk; made when the first lookup tells how large blocks are.
    optimums: [Option<Optimum>; 2],
    owners: Vec<NamespaceId>,
    asked_bytes_since_fade: u64,
    pub recording: Option<Recording>,
}

impl Analysis {
    pub fn new(seed: u64, present: Present) -> Analysis {
        let Present { pool_bytes, disk_bytes, rules } = present;
        let own_disk = disk_bytes.unwrap_or(0);
        let pools = POOL_HALVES.map(|halves| Capacities { pool_bytes: pool_bytes * halves / 2, disk_bytes: own_disk });
        let disks = DISK_POOLS.map(|pools| pools * pool_bytes).into_iter().chain([own_disk]);
        let disks = disks.map(|disk_bytes| Capacities { pool_bytes, disk_bytes });
        let mut capacities: Vec<Capacities> = pools.into_iter().chain(disks).collect();
        capacities.sort_unstable_by_key(|capacities| (capacities.pool_bytes, capacities.disk_bytes));
        capacities.dedup();
        Analysis {
            start: Instant::now(),
            seed,
            present,
            ceiling: Ceiling::default(),
            curve: Curve::new(rules, Samples::default(), &capacities),
            capacities,
            optimums: [None, None],
            owners: Vec::new(),
            asked_bytes_since_fade: 0,
            recording: None,
        }
    }

    pub fn see(&mut self, seen: &Seen) {
        let key = |hash: &[u8]| Fingerprint::new(self.seed, seen.namespace, seen.group, hash).0.max(1);
        let keys: Vec<u64> = seen.hashes.chunks_exact(seen.hash_bytes).map(key).collect();
        let owner = self.owner(seen.id);
        let Present { pool_bytes, disk_bytes, .. } = self.present;
        for (optimum, bytes) in self.optimums.iter_mut().zip([Some(pool_bytes), disk_bytes.map(|b| pool_bytes + b)]) {
            if let Some(bytes) = bytes {
                let optimum = optimum.get_or_insert_with(|| Optimum::new(bytes, seen.block_bytes));
                optimum.note(owner, seen.block_bytes, &keys, seen.hits);
            }
        }
        let at_us = seen.at.saturating_duration_since(self.start).as_micros() as u64;
        self.ceiling.note(at_us, &keys, seen.hits);
        self.curve.note(owner, Shape { block_bytes: seen.block_bytes, attention: seen.attention }, &keys);
        self.fade(keys.len() as u64 * seen.block_bytes);
        if let Some(recording) = &mut self.recording {
            recording.see(seen);
            if recording.is_over() {
                self.recording = None;
            }
        }
    }

    /// All but what the optimums say, and these.
    pub fn estimates(&mut self) -> (Estimates, [Option<Optimum>; 2]) {
        let now_us = self.start.elapsed().as_micros() as u64;
        let namespaces = (0..self.owners.len()).map(|owner| {
            let is_others = owner == OWNERS - 1;
            let name = if is_others { "others".to_string() } else { self.owners[owner].to_string() };
            self.share(name, |at| self.curve.hit_ratio_of(owner, at))
        });
        let namespaces = namespaces.collect();
        let all = self.share("all".to_string(), |at| self.curve.hit_ratio(at));
        let windows = self.ceiling.estimates(now_us).map(Some);
        (Estimates { windows, all, namespaces, left_out: 0 }, self.optimums.clone())
    }

    fn share(&self, name: String, ratio: impl Fn(usize) -> f64) -> Share {
        let Present { pool_bytes, disk_bytes, .. } = self.present;
        let points = |is_told: &dyn Fn(&Capacities) -> bool, bytes: fn(&Capacities) -> u64| {
            let told = self.capacities.iter().enumerate().filter(|(_, capacities)| is_told(capacities));
            never_falling(told.map(|(at, capacities)| (bytes(capacities), ratio(at))))
        };
        let curve = points(&|it| it.disk_bytes == disk_bytes.unwrap_or(0), |it| it.pool_bytes);
        let disk_curve = points(&|it| it.pool_bytes == pool_bytes, |it| it.disk_bytes);
        Share { name, curve, disk_curve, ..Share::default() }
    }

    fn owner(&mut self, id: NamespaceId) -> usize {
        if let Some(known) = self.owners.iter().take(OWNERS - 1).position(|owner| *owner == id) {
            return known;
        }
        if self.owners.len() < OWNERS {
            self.owners.push(id);
        }
        self.owners.len() - 1
    }

    fn fade(&mut self, asked_bytes: u64) {
        self.asked_bytes_since_fade += asked_bytes;
        if self.asked_bytes_since_fade > FADE_TURNOVERS * self.present.pool_bytes {
            self.asked_bytes_since_fade = 0;
            self.curve.fade(0.5);
        }
    }
}

/// More capacity never hits less, since it need not be used: where a point of the curve is below the one before it, the
/// sample of that capacity was smaller or the traffic of its time was another.
fn never_falling(points: impl Iterator<Item = (u64, f64)>) -> Vec<(u64, f64)> {
    let rising = points.scan(0.0_f64, |best, (bytes, ratio)| {
        *best = best.max(ratio);
        Some((bytes, *best))
    });
    rising.collect()
}

/// Adds what the optimums of the pool, and of pool and disk, say by owner. No curve is above the ceiling then, and a
/// namespace that the sample does not have has none.
pub(super) fn fill(estimates: &mut Estimates, [pool, below]: [Option<[Sampled; OWNERS]>; 2]) {
    let pool = pool.unwrap_or([Sampled::default(); OWNERS]);
    estimates.all.sampled = pool.into_iter().sum();
    estimates.all.sampled_tiers = below.map(|below| below.into_iter().sum());
    for (owner, share) in estimates.namespaces.iter_mut().enumerate() {
        share.sampled = pool[owner];
        share.sampled_tiers = below.map(|below| below[owner]);
        if share.sampled.asked == 0 {
            // What a curve remembers of it is older than all that it is told beside.
            (share.curve, share.disk_curve) = (Vec::new(), Vec::new());
        }
    }
    if let Some(ceiling) = ceiling(estimates) {
        let Share { curve, disk_curve, .. } = &mut estimates.all;
        curve.iter_mut().chain(disk_curve).for_each(|(_, ratio)| *ratio = ratio.min(ceiling));
    }
}

/// What no capacity can hit more than. A curve may exceed it by itself: it is of another sample, a small one, and
/// forgets the first misses of its keys as it fades. The sample reaches back sixteen times the present capacity, which
/// is too little to know what the largest capacities could hit; the day knows it.
fn ceiling(estimates: &Estimates) -> Option<f64> {
    let Sampled { asked, again, .. } = estimates.all.sampled;
    let of_sample = (asked > 0).then(|| again as f64 / asked as f64)?;
    let of_day = estimates.windows.last().copied().flatten().and_then(|day| day.ceiling());
    Some(of_day.map_or(of_sample, |of_day| of_day.max(of_sample)))
}

#[cfg(test)]
impl Present {
    pub fn of_pool(pool_bytes: u64) -> Present {
        let rules = Rules {
            policy: forebay_core::policy::by_name("lru").expect("there is an lru"),
            seed: 0,
            promise_permille: 1000,
            admission: forebay_core::tiers::Admission::SecondSighting,
            memory_blocks: 1 << 20,
        };
        Present { pool_bytes, disk_bytes: None, rules }
    }
}

/// A lookup in some namespace.
#[cfg(test)]
pub(super) fn seen(namespace: u32, first: u64, count: u64, hits: usize) -> Seen {
    Seen {
        at: Instant::now(),
        namespace: forebay_core::NamespaceIndex(namespace),
        id: NamespaceId(u128::from(namespace)),
        group: 0,
        block_tokens: 16,
        block_bytes: 4096,
        attention: forebay_core::layout::Attention::Full,
        hashes: (first..first + count).flat_map(|n| n.to_le_bytes()).collect(),
        hash_bytes: 8,
        hits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_insight::ceiling::Estimate;

    fn estimates(analysis: &mut Analysis) -> Estimates {
        let (mut estimates, optimums) = analysis.estimates();
        fill(&mut estimates, optimums.map(|optimum| optimum.map(|optimum| optimum.sampled())));
        estimates
    }

    #[test]
    fn what_was_asked_for_twice_could_have_been_hit() {
        let mut analysis = Analysis::new(7, Present::of_pool(1000 * 4096));
        for round in 0..2 {
            (0..50).for_each(|n| analysis.see(&seen(0, n * 10, 10, 10 * round)));
        }
        let Estimates { windows, all, namespaces, .. } = estimates(&mut analysis);
        let short = windows[0].expect("it was noted");
        assert_eq!(short.asked, 1000);
        assert!((short.ceiling().unwrap() - 0.5).abs() < 0.01);
        assert_eq!(all.sampled, Sampled { asked: 1000, again: 500, hits: 500, optimum_hits: 500 });
        assert_eq!((namespaces.len(), namespaces[0].sampled, all.sampled_tiers), (1, all.sampled, None));
        assert!(all.curve[1].1 > 0.49, "all 500 fit: {:?}", all.curve);
    }

    #[test]
    fn a_disk_is_told_about_beside_the_pool() {
        let present = Present { disk_bytes: Some(300 * 4096), ..Present::of_pool(100 * 4096) };
        let mut analysis = Analysis::new(7, present);
        // A circle of 300 blocks: the pool holds a third of it, the disk all.
        (0..300).for_each(|n| analysis.see(&seen(0, n * 10 % 300, 10, 0)));
        let Estimates { all, .. } = estimates(&mut analysis);
        let disk = |pools: u64| all.disk_curve.iter().find(|(bytes, _)| *bytes == pools * 100 * 4096).unwrap().1;
        assert!(disk(0) < 0.02 && disk(1) < 0.1 && disk(4) > 0.7, "{all:?}");
        assert_eq!(all.curve[1], (100 * 4096, disk(3)), "more memory is told about with the disk there is");
        assert_eq!((all.curve.len(), all.disk_curve.len()), (7, 8));
        let below = all.sampled_tiers.expect("there is a disk");
        assert!(all.sampled.optimum_hits < below.again / 2 && below.optimum_hits == below.again, "{all:?}");
    }

    #[test]
    fn namespaces_are_told_apart_up_to_a_limit_and_share_the_pool() {
        let mut analysis = Analysis::new(7, Present::of_pool(1000 * 4096));
        for round in 0..2 {
            // The first asks for the same again, the others never do.
            analysis.see(&seen(0, 0, 10, 10 * round));
            (1..40).for_each(|n| analysis.see(&seen(n, 1000 * (round as u64 + 1), 10, 0)));
        }
        let Estimates { all, namespaces, .. } = estimates(&mut analysis);
        assert_eq!(namespaces.len(), OWNERS);
        assert_eq!(namespaces[OWNERS - 1].name, "others");
        assert_eq!(namespaces[1].name, NamespaceId(1).to_string());
        assert_eq!(namespaces[0].sampled, Sampled { asked: 20, again: 10, hits: 10, optimum_hits: 10 });
        let others = namespaces[OWNERS - 1].sampled;
        assert_eq!((others.asked, others.again), (20 * 25, 0));
        assert_eq!(namespaces.iter().map(|share| share.sampled).sum::<Sampled>(), all.sampled);
        assert!(namespaces[0].curve[1].1 > 0.45 && namespaces[1].curve[1].1 == 0.0);
    }

    #[test]
    fn no_curve_is_above_the_ceiling_and_what_the_sample_lacks_has_no_curve() {
        let points = || vec![(1, 0.5), (2, 1.0)];
        let share = || Share { curve: points(), disk_curve: points(), ..Share::default() };
        let filled = |day: Option<Estimate>| {
            let namespaces = vec![share(), share()];
            let mut estimates = Estimates { windows: [None, None, day], all: share(), namespaces, left_out: 0 };
            let mut sampled = [Sampled::default(); OWNERS];
            sampled[0] = Sampled { asked: 1000, again: 931, hits: 900, optimum_hits: 931 };
            fill(&mut estimates, [Some(sampled), None]);
            estimates
        };
        let estimates = filled(None);
        assert_eq!(
            (&estimates.all.curve, &estimates.all.disk_curve),
            (&vec![(1, 0.5), (2, 0.931)], &estimates.all.curve)
        );
        let [asked, idle] = &estimates.namespaces[..] else { panic!("two were given") };
        assert_eq!((asked.curve.len(), idle.curve.len(), idle.disk_curve.len()), (2, 0, 0));
        // More than the sample knows.
        let day = Estimate { window_us: 1, asked: 100, different: 4.0 };
        assert_eq!(filled(Some(day)).all.curve, [(1, 0.5), (2, 0.96)]);
    }

    #[test]
    fn more_capacity_is_never_told_to_hit_less() {
        let estimated = [(1, 0.2), (2, 0.8), (3, 0.09), (4, 0.81)];
        assert_eq!(never_falling(estimated.into_iter()), [(1, 0.2), (2, 0.8), (3, 0.8), (4, 0.81)]);
    }
}
