//! The hits that a block is expected to earn for the time that it stays, as learned from earlier blocks.
//!
//! An age is the number of inserts and touches since a block was last used, in logarithmic buckets. For each age two
//! counts are kept: of the blocks that were looked up again at that age, and of those that aged out, which means that
//! they were forgotten without another lookup. Both together give a survival curve. The hit density at an age is the
//! best rate of hits per time that keeping the block from this age to a later one can earn (the Gittins index; "hit
//! density" in LHD, Beckmann et al., NSDI 2018).
//!
//! The curve also says how many blocks were due: a block that grows from one age to a later one was to be looked up in
//! each bucket between, with the share of those that reached the bucket. Blocks that were due and did not come show
//! that the record is out of date, long before it fades.
//!
//! Invariant: the hit density is the first slope of the least concave majorant of the curve, so one pass finds it.

/// Four to the octave: ages of one bucket differ by less than a fifth.
const STEPS_PER_OCTAVE: u32 = 4;
const OCTAVES: usize = 32;
const BUCKETS: usize = OCTAVES * STEPS_PER_OCTAVE as usize;

/// See the module's head. It knows nothing before the first [`HitDensity::learn`].
pub struct HitDensity {
    hits: [f64; BUCKETS],
    /// Those since the last update.
    new_hits: [f64; BUCKETS],
    aged_out: [f64; BUCKETS],
    hit_density: [f64; BUCKETS],
    /// Blocks of which neither is known yet, at the last update.
    alive: [f64; BUCKETS],
    /// Hits that were expected of a block before it reached a bucket, as far as it was not looked up.
    due: [f64; BUCKETS],
}

impl Default for HitDensity {
    fn default() -> Self {
        HitDensity {
            hits: [0.0; BUCKETS],
            new_hits: [0.0; BUCKETS],
            aged_out: [0.0; BUCKETS],
            hit_density: [0.0; BUCKETS],
            alive: [0.0; BUCKETS],
            due: [0.0; BUCKETS],
        }
    }
}

impl HitDensity {
    /// Calls of `learn` while as many blocks are evicted as the cache holds.
    pub const UPDATES_PER_TURNOVER: u32 = 8;
    /// The share of old evidence that each `learn` keeps: half of it after 8.6 turnovers of the cache. With more, some
    /// traces gain and others lose (bench/reports/2026-11-24-cliff.md).
    pub const KEEP: f64 = 0.99;

    /// The hit density of a block that was last used `age` ago. It is 0 at ages that are not known.
    pub fn at(&self, age: u32) -> f64 {
        self.hit_density[bucket(age)]
    }

    /// A block last used `age` ago was asked for.
    pub fn hit(&mut self, age: u32) {
        self.new_hits[bucket(age)] += 1.0;
    }

    /// A block last used `age` ago was forgotten without being asked for.
    pub fn age_out(&mut self, age: u32) {
        self.aged_out[bucket(age)] += 1.0;
    }

    /// A block of this age may still be looked up. Such blocks are counted anew before each update, by a sample.
    /// Without them, the blocks that come back late would be missing from the curve until they are forgotten.
    pub fn wait(&mut self, age: u32) {
        self.alive[bucket(age)] += 1.0;
    }

    /// Hits that were due from a block that grew from one age to a later one, by the last update. A bucket that the
    /// block has not left counts nothing: it may still be looked up there.
    pub fn due(&self, from: u32, to: u32) -> f64 {
        self.due[bucket(to)] - self.due[bucket(from)]
    }

    /// Blocks of this age or older that were asked for since the last update, by whole buckets.
    pub fn came(&self, from: u32) -> f64 {
        self.new_hits[bucket(from)..].iter().sum()
    }

    /// Makes the hit densities anew from all counts, and lets old evidence fade. Each block that waits stands for
    /// `stands_for` of them. It has faded since it was last used, as what was counted then has, or blocks that never
    /// come back would outweigh those that do. `steps` of the clock lie between two updates.
    pub fn learn(&mut self, stands_for: f64, steps: f64) {
        let weights = weights(steps);
        self.alive.iter_mut().zip(weights).for_each(|(count, weight)| *count *= weight * stands_for);
        self.hits.iter_mut().zip(&mut self.new_hits).for_each(|(hits, new)| *hits += std::mem::take(new));
        let hazards = self.hazards();
        self.hit_density = first_slopes(&curve(&hazards));
        (1..BUCKETS).for_each(|b| self.due[b] = self.due[b - 1] + hazards[b - 1]);
        self.alive.fill(0.0);
        self.hits.iter_mut().chain(&mut self.aged_out).for_each(|count| *count *= HitDensity::KEEP);
    }

    /// Of those that reached each bucket, the share that was looked up there.
    fn hazards(&self) -> [f64; BUCKETS] {
        let mut hazards = [0.0; BUCKETS];
        // One survivor more than seen, so that no age is ever certain.
        let mut reached = 1.0;
        for b in (0..BUCKETS).rev() {
            reached += self.hits[b] + self.aged_out[b] + self.alive[b];
            hazards[b] = self.hits[b] / reached;
        }
        hazards
    }
}

/// (time spent in the cache, hits earned) by a block that is kept until the end of each bucket.
fn curve(hazards: &[f64; BUCKETS]) -> [(f64, f64); BUCKETS + 1] {
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
fn first_slopes(curve: &[(f64, f64); BUCKETS + 1]) -> [f64; BUCKETS] {
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
fn weights(steps: f64) -> [f64; BUCKETS] {
    let mut after_octave = [1.0 - (1.0 - HitDensity::KEEP) / steps.max(1.0); OCTAVES];
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
    f64::from(octave).exp2() * (1.0 + f64::from(step) / f64::from(STEPS_PER_OCTAVE))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        soon.learn(1.0, 1e6);
        late.learn(1.0, 1e6);
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
        sure.learn(1.0, 1e6);
        rare.learn(1.0, 1e6);
        let ratio = sure.at(1) / rare.at(1);
        assert!((8.0..12.0).contains(&ratio), "a tenth of the hits is worth {ratio} times less");
    }

    #[test]
    fn waiting_for_a_sure_hit_makes_a_block_worth_more_the_closer_it_is() {
        let mut hit_density = HitDensity::default();
        (0..1000).for_each(|_| hit_density.hit(4096));
        hit_density.learn(1.0, 1e6);
        assert!(hit_density.at(3500) > 2.0 * hit_density.at(1), "{} and {}", hit_density.at(3500), hit_density.at(1));
    }

    #[test]
    fn what_never_comes_back_fades_while_it_waits() {
        let worth = |steps: f64| {
            let mut hit_density = HitDensity::default();
            for _ in 0..1000 {
                hit_density.hit(1000);
                hit_density.wait(100_000);
            }
            hit_density.learn(1.0, steps);
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
        hit_density.learn(1.0, 1e6);
        assert_eq!(hit_density.came(1), 0.0);
        let due = hit_density.due(100, 8000);
        assert!((0.49..0.51).contains(&due), "half of them came: {due}");
        assert_eq!(hit_density.due(4000, 8000), 0.0);
        assert_eq!(hit_density.due(100, 3050), 0.0, "it may still come at this age");
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
        hit_density.learn(1.0, 1e6);
        let curve = curve(&hit_density.hazards());
        let slopes = first_slopes(&curve);
        for (at, slope) in slopes.iter().enumerate() {
            let later = curve[at + 1..].iter().map(|to| (to.1 - curve[at].1) / (to.0 - curve[at].0));
            let best = later.fold(0.0, f64::max);
            assert!((slope - best).abs() <= best * 1e-9, "bucket {at}: {slope}, best {best}");
        }
    }
}
