//! The hits that a block is expected to earn for the time that it stays, as learned from earlier blocks.
//!
//! An age is the number of inserts and touches since a block was last used, in logarithmic buckets. For each age two
//! counts are kept: of the blocks that were looked up again at that age, and of those that aged out, which means that
//! they were forgotten without another lookup. Both together give the hazard at each age: of the blocks that reached
//! it, the share that was looked up there. The hazards give a survival curve. The hit density at an age is the best
//! rate of hits per time that keeping the block from this age to a later one can earn (the Gittins index; "hit density"
//! in LHD, Beckmann et al., NSDI 2018).
//!
//! Traffic changes, and may change back. So there are three memories of these counts, which fade after 9, 2 and half a
//! turnover of the cache. The hazards are those of the three together, each by its share. The longest has half of the
//! shares at least, and so keeps what it knows. The rest goes by the posterior probabilities of the memories, given the
//! ages at which blocks came: one that foretold these better has more (prediction with expert advice). How many came
//! does not count, and where fewer came than usual, the two shorter memories fade less: they are memories of so many
//! hits. Otherwise a burst of one-time blocks would be taken for the end of all other traffic.
//!
//! The hazards also say how many blocks were due: a block that grows from one age to a later one was to be looked up in
//! each bucket between. Blocks that were due and did not come show that the record is out of date, before it fades.
//!
//! Invariant: the hit density is the first slope of the least concave majorant of the curve, so one pass finds it.

use std::array;

/// Four to the octave: ages of one bucket differ by less than a fifth.
const STEPS_PER_OCTAVE: u32 = 4;
const OCTAVES: usize = 32;
const BUCKETS: usize = OCTAVES * STEPS_PER_OCTAVE as usize;
const MEMORIES: usize = 3;
/// The share of old evidence that each memory keeps at a usual update: half of it after 8.6, 1.7 and 0.4 turnovers of
/// the cache (bench/reports/2026-11-30-memories.md).
const KEEP: [f64; MEMORIES] = [0.99, 0.95, 0.8];
/// No hit is less likely than this: it may be the first of its age.
const LEAST_HAZARD: f64 = 1e-6;
/// Blocks come by whole prompts, so each counts for less than an independent one would. A memory that held each hit of
/// as many as there are residents for twice as likely gets 8 times the share. With 2 to 8 for 3 the results hardly
/// differ (bench/reports/2026-11-30-memories.md).
const EVIDENCE_OF_RESIDENTS: f64 = 3.0;
/// This much of the posterior is spread evenly at each update, so that a memory that was wrong for long can be right
/// again.
const SPREAD: f64 = 0.02;
/// Where the short memories could have nearly all, prompts that are asked twice lost up to a quarter of their hits to
/// bursts of one-time blocks (bench/reports/2026-11-30-memories.md).
const LEAST_OF_LONGEST: f64 = 0.5;

/// What was counted by age.
type Ages = [f64; BUCKETS];

/// See the module's head. It knows nothing before the first [`HitDensity::learn`].
pub struct HitDensity {
    memories: [Memory; MEMORIES],
    /// Hits since the last update, blocks that were forgotten, and blocks that left a bucket without a hit.
    hits: Ages,
    aged_out: Ages,
    passed: Ages,
    /// Blocks of which neither is known yet.
    waiting: Ages,
    hazards: Ages,
    hit_density: Ages,
}

struct Memory {
    hits: Ages,
    aged_out: Ages,
    hazards: Ages,
}

/// How much each memory counts, for all hit densities of one policy.
pub struct Shares {
    /// Of each memory, given what came.
    posterior: [f64; MEMORIES],
    /// Hits and updates, as far as the longest memory reaches.
    usual: [f64; 2],
    /// The hits of the last update beside those of a usual one, at most 1.
    pace: f64,
}

impl Default for HitDensity {
    fn default() -> Self {
        let none = [0.0; BUCKETS];
        HitDensity {
            memories: array::from_fn(|_| Memory { hits: none, aged_out: none, hazards: none }),
            hits: none,
            aged_out: none,
            passed: none,
            waiting: none,
            hazards: none,
            hit_density: none,
        }
    }
}

impl HitDensity {
    /// Calls of `learn` while as many blocks are evicted as the cache holds.
    pub const UPDATES_PER_TURNOVER: u32 = 8;
    /// The share of old evidence that the longest memory keeps at an update.
    pub const KEEP: f64 = KEEP[0];

    /// The hit density of a block that was last used `age` ago. It is 0 at ages that are not known.
    pub fn at(&self, age: u32) -> f64 {
        self.hit_density[bucket(age)]
    }

    /// A block last used `age` ago was asked for.
    pub fn hit(&mut self, age: u32) {
        self.hits[bucket(age)] += 1.0;
    }

    /// A block last used `age` ago was forgotten without being asked for.
    pub fn age_out(&mut self, age: u32) {
        self.aged_out[bucket(age)] += 1.0;
    }

    /// `count` blocks of this age may still be looked up. Such blocks are counted anew before each update, by a sample.
    /// Without them, the blocks that come back late would be missing from the curve until they are forgotten.
    pub fn wait(&mut self, age: u32, count: f64) {
        self.waiting[bucket(age)] += count;
    }

    /// `count` blocks of this age were not looked up in the last `since` steps of the clock. A bucket that they have
    /// not left counts nothing: they may still be looked up there.
    pub fn pass(&mut self, age: u32, since: u32, count: f64) {
        let left = bucket(age.saturating_sub(since))..bucket(age);
        self.passed[left].iter_mut().for_each(|passed| *passed += count);
    }

    /// Makes what was counted since the last update count for a part of it.
    pub fn count_as(&mut self, part: f64) {
        let counted = [&mut self.hits, &mut self.aged_out, &mut self.passed];
        counted.into_iter().flatten().for_each(|count| *count *= part);
    }

    /// Hits that were due since the last update, of blocks of this age or older, by whole buckets.
    pub fn due(&self, from: u32) -> f64 {
        let from = bucket(from);
        self.passed[from..].iter().zip(&self.hazards[from..]).map(|(passed, hazard)| passed * hazard).sum()
    }

    /// Blocks of this age or older that were asked for since the last update, by whole buckets.
    pub fn came(&self, from: u32) -> f64 {
        self.hits[bucket(from)..].iter().sum()
    }

    /// Makes the hit densities anew from all counts, and lets old evidence fade. A block that waits has faded since it
    /// was last used, as what was counted then has, or blocks that never come back would outweigh those that do.
    /// `steps` of the clock lie between two updates. No memory keeps more than the longest, or a short one would become
    /// the longest where hits come seldom and many at once.
    pub fn learn(&mut self, steps: f64, shares: &Shares) {
        for (nth, (memory, keep)) in self.memories.iter_mut().zip(KEEP).enumerate() {
            add(&mut memory.hits, &self.hits);
            add(&mut memory.aged_out, &self.aged_out);
            let keep = if nth == 0 { keep } else { (1.0 - (1.0 - keep) * shares.pace).min(HitDensity::KEEP) };
            memory.learn(&self.waiting, &weights(keep, steps));
            memory.hits.iter_mut().chain(&mut memory.aged_out).for_each(|count| *count *= keep);
        }
        let shares = shares.of_all();
        let of_all = |b: usize| self.memories.iter().zip(shares).map(|(memory, share)| share * memory.hazards[b]).sum();
        self.hazards = array::from_fn(of_all);
        self.hit_density = first_slopes(&curve(&self.hazards));
        for counts in [&mut self.hits, &mut self.aged_out, &mut self.passed, &mut self.waiting] {
            counts.fill(0.0);
        }
    }
}

impl Memory {
    /// Of those that reached each bucket, the share that was looked up there.
    fn learn(&mut self, waiting: &Ages, weights: &Ages) {
        // One survivor more than seen, so that no age is ever certain.
        let mut reached = 1.0;
        for b in (0..BUCKETS).rev() {
            reached += self.hits[b] + self.aged_out[b] + waiting[b] * weights[b];
            self.hazards[b] = self.hits[b] / reached;
        }
    }

    /// Of the hits that were due from these blocks: how many, and the sum of the logarithms of the hazards of those
    /// that came.
    fn foretold(&self, hits: &Ages, passed: &Ages) -> [f64; 2] {
        let [mut due, mut of_hits] = [0.0; 2];
        for b in 0..BUCKETS {
            let hazard = self.hazards[b].max(LEAST_HAZARD);
            due += (hits[b] + passed[b]) * hazard;
            of_hits += if hits[b] > 0.0 { hits[b] * libm::log(hazard) } else { 0.0 };
        }
        [due, of_hits]
    }
}

impl Default for Shares {
    fn default() -> Self {
        Shares { posterior: [1.0 / MEMORIES as f64; MEMORIES], usual: [0.0; 2], pace: 1.0 }
    }
}

impl Shares {
    /// Weighs the memories by how well they foretold the ages of the hits since the last update, in a cache of so many
    /// residents. Call it before these learn from the hits.
    pub fn learn(&mut self, of: &[HitDensity], residents: u32) {
        let came: f64 = of.iter().flat_map(|of| of.hits).sum();
        let [hits, updates] = self.usual;
        self.usual = [HitDensity::KEEP * hits + came, HitDensity::KEEP * updates + 1.0];
        self.pace = if came > 0.0 { (came / self.usual[0] * self.usual[1]).min(1.0) } else { 0.0 };
        let likelihood = |nth: usize| {
            let each = of.iter().map(|of| of.memories[nth].foretold(&of.hits, &of.passed));
            let [due, of_hits] = each.fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
            // Each hit has an age with its hazard's share of all that was due.
            of_hits - came * libm::log(due.max(LEAST_HAZARD))
        };
        let likelihoods: [f64; MEMORIES] = array::from_fn(likelihood);
        let best = likelihoods.into_iter().fold(f64::NEG_INFINITY, f64::max);
        let evidence = EVIDENCE_OF_RESIDENTS / f64::from(residents.max(1));
        let weight = |nth: usize| self.posterior[nth] * libm::exp(evidence * (likelihoods[nth] - best));
        let weights: [f64; MEMORIES] = array::from_fn(weight);
        let sum: f64 = weights.iter().sum();
        self.posterior = weights.map(|weight| (1.0 - SPREAD) * weight / sum + SPREAD / MEMORIES as f64);
    }

    fn of_all(&self) -> [f64; MEMORIES] {
        let mut shares = self.posterior.map(|share| (1.0 - LEAST_OF_LONGEST) * share);
        shares[0] += LEAST_OF_LONGEST;
        shares
    }
}

fn add(all: &mut Ages, new: &Ages) {
    all.iter_mut().zip(new).for_each(|(all, new)| *all += new);
}

/// (time spent in the cache, hits earned) by a block that is kept until the end of each bucket.
fn curve(hazards: &Ages) -> [(f64, f64); BUCKETS + 1] {
    let mut curve = [(0.0, 0.0); BUCKETS + 1];
    let mut alive = 1.0;
    for (b, hazard) in hazards.iter().enumerate() {
        let (time, hits) = curve[b];
        let width = start(b + 1) - start(b);
        curve[b + 1] = (time + alive * (1.0 - hazard / 2.0) * width, hits + alive * hazard);
        alive *= 1.0 - hazard;
    }
    curve
}

/// For each point the steepest slope to a later one, by a stack that holds the concave hull of those behind it.
fn first_slopes(curve: &[(f64, f64); BUCKETS + 1]) -> Ages {
    let slope = |from: (f64, f64), to: (f64, f64)| if to.0 > from.0 { (to.1 - from.1) / (to.0 - from.0) } else { 0.0 };
    let mut hull = Vec::with_capacity(BUCKETS + 1);
    hull.push(curve[BUCKETS]);
    let mut slopes = [0.0; BUCKETS];
    for (at, point) in curve[..BUCKETS].iter().enumerate().rev() {
        while let [.., second, first] = hull[..]
            && slope(*point, first) <= slope(first, second)
        {
            hull.pop();
        }
        slopes[at] = slope(*point, hull[hull.len() - 1]);
        hull.push(*point);
    }
    slopes
}

/// What evidence of each age still weighs. By multiplications alone, which give the same on all machines.
fn weights(keep: f64, steps: f64) -> Ages {
    let mut after_octave = [1.0 - (1.0 - keep) / steps.max(1.0); OCTAVES];
    (1..OCTAVES).for_each(|octave| after_octave[octave] = after_octave[octave - 1] * after_octave[octave - 1]);
    let mut weights = [1.0; BUCKETS];
    for (octave, of_octave) in weights.chunks_exact_mut(STEPS_PER_OCTAVE as usize).enumerate() {
        // A step is a quarter of the octave's first age. Below the age of 4 there are none.
        let after_step = octave.checked_sub(2).map_or(1.0, |quarter| after_octave[quarter]);
        of_octave[0] = after_octave[octave];
        (1..of_octave.len()).for_each(|step| of_octave[step] = of_octave[step - 1] * after_step);
    }
    weights
}

fn bucket(age: u32) -> usize {
    let age = age.max(1);
    let octave = age.ilog2();
    // The two bits behind the leading one.
    let step = (u64::from(age) << 2 >> octave) as u32 & (STEPS_PER_OCTAVE - 1);
    (octave * STEPS_PER_OCTAVE + step) as usize
}

/// The age a bucket begins at, as a real number: below 4 several buckets share one whole age.
fn start(bucket: usize) -> f64 {
    let (octave, step) = (bucket as u32 / STEPS_PER_OCTAVE, bucket as u32 % STEPS_PER_OCTAVE);
    (1u64 << octave) as f64 * (1.0 + f64::from(step) / f64::from(STEPS_PER_OCTAVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Shares = Shares { posterior: [1.0, 0.0, 0.0], usual: [0.0; 2], pace: 1.0 };

    #[test]
    fn every_age_falls_into_the_bucket_that_covers_it() {
        for age in (1..5000).chain([u32::MAX, u32::MAX - 1, 1 << 31, (1 << 31) - 1]) {
            let b = bucket(age);
            assert!(start(b) <= f64::from(age) && f64::from(age) < start(b + 1), "age {age} in bucket {b}");
        }
        assert_eq!(bucket(0), bucket(1));
    }

    #[test]
    fn what_is_asked_for_sooner_is_worth_more() {
        let (mut soon, mut late) = (HitDensity::default(), HitDensity::default());
        for _ in 0..1000 {
            soon.hit(100);
            late.hit(10_000);
        }
        soon.learn(1e6, &Shares::default());
        late.learn(1e6, &Shares::default());
        assert!(soon.at(10) > 50.0 * late.at(10), "{} and {}", soon.at(10), late.at(10));
        // Past the age at which all were asked for, nothing is to be expected.
        assert!(soon.at(200) < late.at(200) / 10.0, "{} and {}", soon.at(200), late.at(200));
    }

    #[test]
    fn worth_counts_those_that_never_came_back() {
        let (mut sure, mut rare) = (HitDensity::default(), HitDensity::default());
        for n in 0..1000 {
            sure.hit(1000);
            if n % 10 == 0 { rare.hit(1000) } else { rare.age_out(20_000) }
        }
        sure.learn(1e6, &Shares::default());
        rare.learn(1e6, &Shares::default());
        let ratio = sure.at(1) / rare.at(1);
        assert!((8.0..12.0).contains(&ratio), "a tenth of the hits is worth {ratio} times less");
    }

    #[test]
    fn waiting_for_a_sure_hit_makes_a_block_worth_more_the_closer_it_is() {
        let mut hit_density = HitDensity::default();
        (0..1000).for_each(|_| hit_density.hit(4096));
        hit_density.learn(1e6, &Shares::default());
        assert!(hit_density.at(3500) > 2.0 * hit_density.at(1), "{} and {}", hit_density.at(3500), hit_density.at(1));
    }

    #[test]
    fn what_never_comes_back_fades_while_it_waits() {
        let worth = |steps: f64| {
            let mut hit_density = HitDensity::default();
            for _ in 0..1000 {
                hit_density.hit(1000);
                hit_density.wait(100_000, 1.0);
            }
            hit_density.learn(steps, &LONGEST);
            hit_density.at(1)
        };
        // All of its evidence is left, half of it, and none.
        let [all, half, none] = [1e12, 98_304.0 * (1.0 - HitDensity::KEEP) / std::f64::consts::LN_2, 10.0].map(worth);
        assert!((1.9..2.3).contains(&(none / all)), "{none} and {all}: half of the blocks came back");
        assert!((1.3..1.6).contains(&(half / all)), "{half} and {all}: two of three count");
    }

    #[test]
    fn what_is_due_is_what_comes_while_the_traffic_stays_and_is_missed_when_it_ends() {
        let mut hit_density = HitDensity::default();
        (0..1000).for_each(|_| hit_density.hit(3000));
        (0..1000).for_each(|_| hit_density.age_out(9000));
        assert_eq!(hit_density.came(3000), 1000.0);
        assert_eq!(hit_density.came(4000), 0.0);
        hit_density.learn(1e6, &Shares::default());
        assert_eq!(hit_density.came(1), 0.0);
        let mut due = |age, since, from| {
            hit_density.passed.fill(0.0);
            hit_density.pass(age, since, 10.0);
            hit_density.due(from)
        };
        let half = due(8000, 7900, 1);
        assert!((4.9..5.1).contains(&half), "half of ten blocks came: {half}");
        assert_eq!(due(8000, 7900, 4000), 0.0);
        assert_eq!(due(8000, 4000, 1), 0.0);
        assert_eq!(due(3050, 3000, 1), 0.0, "they may still come at this age");
    }

    /// At each update a tenth of 1000 residents has come, all at one age.
    fn come(hit_density: &mut [HitDensity; 1], shares: &mut Shares, age: u32, updates: usize) {
        for _ in 0..updates {
            (0..100).for_each(|_| hit_density[0].hit(age));
            // They passed the younger ages on their way.
            hit_density[0].pass(age, age, 100.0);
            shares.learn(hit_density, 1000);
            hit_density[0].learn(1000.0, shares);
        }
    }

    #[test]
    fn a_memory_that_foretells_what_comes_counts_for_more() {
        let (mut hit_density, mut shares) = ([HitDensity::default()], Shares::default());
        come(&mut hit_density, &mut shares, 1000, 200);
        let before = shares.posterior;
        assert!(before.iter().all(|share| (0.3..0.4).contains(share)), "all say the same: {before:?}");
        let [long_ago, at_change] = [1000, 8000].map(|age| hit_density[0].at(age));
        assert!(long_ago > 100.0 * at_change);
        come(&mut hit_density, &mut shares, 8000, 12);
        let [long, middle, short] = shares.posterior;
        assert!(short > middle && middle > long, "what is new is known to the shortest first: {:?}", shares.posterior);
        assert!((0.999..1.001).contains(&(long + middle + short)));
        // The long memory alone would still expect what no longer comes.
        let Memory { hazards, .. } = &hit_density[0].memories[0];
        assert!(hazards[bucket(1000)] > 0.5, "{}", hazards[bucket(1000)]);
        let (of_long, of_all) = (hazards[bucket(1000)], hit_density[0].hazards[bucket(1000)]);
        assert!(of_all < 0.75 * of_long, "{of_all} and {of_long}");
    }

    #[test]
    fn a_burst_of_blocks_that_nobody_asks_for_again_moves_no_share() {
        let (mut hit_density, mut shares) = ([HitDensity::default()], Shares::default());
        come(&mut hit_density, &mut shares, 1000, 200);
        for _ in 0..50 {
            hit_density[0].pass(8000, 7900, 500.0);
            hit_density[0].wait(8000, 500.0);
            shares.learn(&hit_density, 1000);
            hit_density[0].learn(1000.0, &shares);
        }
        assert!(shares.posterior.iter().all(|share| (0.3..0.4).contains(share)), "{:?}", shares.posterior);
        let kept = |nth: usize| hit_density[0].memories[nth].hits.iter().sum::<f64>();
        assert!(kept(2) > 50.0, "the shortest keeps the hits from before: {}", kept(2));
        assert!(kept(2) < kept(1) && kept(1) < kept(0), "none remembers more than a longer one");
    }

    #[test]
    fn a_memory_that_was_wrong_for_long_counts_again_when_it_is_right() {
        let (mut hit_density, mut shares) = ([HitDensity::default()], Shares::default());
        come(&mut hit_density, &mut shares, 1000, 200);
        come(&mut hit_density, &mut shares, 8000, 30);
        let [long, ..] = shares.posterior;
        assert!(long < 0.1 && long >= SPREAD / MEMORIES as f64, "{long}");
        come(&mut hit_density, &mut shares, 1000, 20);
        assert!(shares.posterior[0] > 2.0 * long, "{} after {long}", shares.posterior[0]);
        // Nothing that comes, whatever is asked, takes a share from its bounds.
        for hits in [0.0, 1e12] {
            hit_density[0].hits.fill(hits);
            shares.learn(&hit_density, 0);
            assert!(
                shares.posterior.iter().all(|share| (SPREAD / 4.0..=1.0).contains(share)),
                "{:?}",
                shares.posterior
            );
        }
    }

    #[test]
    fn slopes_agree_with_trying_every_later_age() {
        let mut hit_density = HitDensity::default();
        let mut state = 7u64;
        for _ in 0..3000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let age = 1 << (state >> 33 & 15);
            if state >> 40 & 3 == 0 { hit_density.age_out(age * 3) } else { hit_density.hit(age) }
        }
        hit_density.learn(1e6, &Shares::default());
        let curve = curve(&hit_density.hazards);
        let slopes = first_slopes(&curve);
        for (at, slope) in slopes.iter().enumerate() {
            let later = curve[at + 1..].iter().map(|to| (to.1 - curve[at].1) / (to.0 - curve[at].0));
            let best = later.fold(0.0, f64::max);
            assert!((slope - best).abs() <= best * 1e-9, "bucket {at}: {slope}, best {best}");
        }
    }
}
