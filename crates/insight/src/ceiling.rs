//! The best hit rate any cache could have had, over the last 15 minutes, hour and day.
//!
//! A cache of any size must miss each different key once, so the ceiling is (asked - different) / asked. Keys that
//! never missed are not among the different ones: they were stored before anybody asked. So no hit rate is above its
//! ceiling. The different ones are estimated by HyperLogLog, a sketch for each sixth of a window, merged when read: a
//! window reaches back between 5 and 6 sixths of its length. Time comes in with the keys.
//!
//! Invariants: less than 1 MiB a window; the standard error is 1.04 / sqrt(131072) = 0.29 % (Flajolet et al.,
//! 2007), so that one estimate in two thousand is off by more than 1 % (with half as many registers and twice as many
//! slices one in seventy was), with Ertl's estimator (arXiv 1702.01284), which has no bias to be corrected at any size.

const PRECISION: u32 = 17;
const REGISTERS: usize = 1 << PRECISION;
/// Bits left for the rank; the highest rank is one more.
const RANK_BITS: u32 = 64 - PRECISION;
const SLICES: u64 = 6;

const MINUTE_US: u64 = 60_000_000;
/// Lengths of the windows.
pub const WINDOWS_US: [u64; 3] = [15 * MINUTE_US, 60 * MINUTE_US, 24 * 60 * MINUTE_US];

/// See the module's head.
pub struct Ceiling {
    windows: [Window; WINDOWS_US.len()],
}

/// What a window says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub window_us: u64,
    /// Keys asked for.
    pub asked: u64,
    /// Of those, different ones that missed.
    pub different: f64,
}

impl Estimate {
    /// The highest possible hit rate; `None` if nothing was asked for.
    pub fn ceiling(&self) -> Option<f64> {
        (self.asked > 0).then(|| 1.0 - (self.different / self.asked as f64).min(1.0))
    }
}

impl Default for Ceiling {
    fn default() -> Self {
        Ceiling { windows: WINDOWS_US.map(Window::new) }
    }
}

impl Ceiling {
    /// Keys were asked for at `now_us`, of which the first `hits` were there. They must be well mixed, as those of the
    /// index are.
    pub fn note(&mut self, now_us: u64, keys: &[u64], hits: usize) {
        let mut slices = self.windows.each_mut().map(|window| window.current(now_us));
        slices.iter_mut().for_each(|slice| slice.asked += keys.len() as u64);
        for key in keys.iter().skip(hits) {
            let register = (key >> RANK_BITS) as usize;
            let rank = ((key << PRECISION | 1 << (PRECISION - 1)).leading_zeros() + 1) as u8;
            for slice in &mut slices {
                slice.registers[register] = slice.registers[register].max(rank);
            }
        }
    }

    pub fn estimates(&mut self, now_us: u64) -> [Estimate; WINDOWS_US.len()] {
        self.windows.each_mut().map(|window| window.estimate(now_us))
    }

    pub fn heap_bytes(&self) -> usize {
        self.windows.iter().map(|window| window.slices.len() * REGISTERS).sum()
    }
}

struct Window {
    length_us: u64,
    /// The number of the newest sixth since time 0.
    newest: u64,
    /// By number modulo their count.
    slices: Vec<Slice>,
}

#[derive(Clone)]
struct Slice {
    asked: u64,
    registers: Box<[u8]>,
}

impl Window {
    fn new(length_us: u64) -> Window {
        let slice = Slice { asked: 0, registers: vec![0; REGISTERS].into_boxed_slice() };
        Window { length_us, newest: 0, slices: vec![slice; SLICES as usize] }
    }

    /// Forgets what is too old, and returns the slice of `now_us`. Time that runs back counts as now.
    fn current(&mut self, now_us: u64) -> &mut Slice {
        let number = (now_us / (self.length_us / SLICES)).max(self.newest);
        let passed = number - self.newest;
        for old in 0..passed.min(SLICES) {
            let slice = &mut self.slices[((number - old) % SLICES) as usize];
            slice.asked = 0;
            slice.registers.fill(0);
        }
        self.newest = number;
        &mut self.slices[(number % SLICES) as usize]
    }

    fn estimate(&mut self, now_us: u64) -> Estimate {
        self.current(now_us);
        let mut counts = [0u32; RANK_BITS as usize + 2];
        // Those of an idle time would be most of what an estimate reads.
        let live: Vec<&Slice> = self.slices.iter().filter(|slice| slice.asked > 0).collect();
        for register in 0..REGISTERS {
            let rank = live.iter().map(|slice| slice.registers[register]).max().unwrap_or(0);
            counts[rank as usize] += 1;
        }
        let asked = self.slices.iter().map(|slice| slice.asked).sum();
        Estimate { window_us: self.length_us, asked, different: different(&counts) }
    }
}

/// Ertl's improved raw estimator, from how many registers have each rank.
fn different(counts: &[u32; RANK_BITS as usize + 2]) -> f64 {
    let m = REGISTERS as f64;
    let highest = RANK_BITS as usize + 1;
    let mut z = m * tau(1.0 - f64::from(counts[highest]) / m);
    for rank in (1..highest).rev() {
        z = 0.5 * (z + f64::from(counts[rank]));
    }
    z += m * sigma(f64::from(counts[0]) / m);
    m * m / (2.0 * std::f64::consts::LN_2 * z)
}

fn sigma(mut x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    let (mut y, mut z) = (1.0, x);
    loop {
        x *= x;
        let before = z;
        z += x * y;
        y += y;
        if z == before {
            return z;
        }
    }
}

fn tau(mut x: f64) -> f64 {
    if x == 0.0 || x == 1.0 {
        return 0.0;
    }
    let (mut y, mut z) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = z;
        y *= 0.5;
        z -= (1.0 - x).powi(2) * y;
        if z == before {
            return z / 3.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::mix;

    #[test]
    fn counts_are_within_one_percent_and_as_good_as_those_of_datasketches() {
        for count in [1u64, 10, 1000, 30_000, 100_000, 400_000, 3_000_000] {
            let mut ceiling = Ceiling::default();
            let mut oracle =
                datasketches::hll::HllSketch::new(PRECISION as u8, datasketches::hll::HllType::Hll8).unwrap();
            // Each twice, so that half could have been hits.
            for key in (0..count).chain(0..count) {
                ceiling.note(0, &[mix(key)], 0);
                oracle.update(key);
            }
            let [short, ..] = ceiling.estimates(0);
            let error = short.different / count as f64 - 1.0;
            let difference = short.different / oracle.estimate() - 1.0;
            assert!(error.abs() <= 0.01, "{count} keys: {} estimated", short.different);
            assert!(difference.abs() <= 0.015, "{count} keys: {} here, {} there", short.different, oracle.estimate());
            assert_eq!(short.asked, 2 * count);
            assert!((short.ceiling().unwrap() - 0.5).abs() <= 0.005);
        }
    }

    #[test]
    fn what_was_stored_before_anybody_asked_need_not_miss() {
        let mut ceiling = Ceiling::default();
        (0..100).for_each(|key| ceiling.note(0, &[mix(key), mix(1000 + key)], 1));
        let [short, ..] = ceiling.estimates(0);
        assert_eq!((short.asked, short.different.round()), (200, 100.0));
        assert!((short.ceiling().unwrap() - 0.5).abs() <= 0.005);
    }

    #[test]
    fn a_window_forgets_what_is_older_than_itself() {
        let mut ceiling = Ceiling::default();
        ceiling.note(0, &(0..1000).map(mix).collect::<Vec<_>>(), 0);
        ceiling.note(10 * MINUTE_US, &(1000..1500).map(mix).collect::<Vec<_>>(), 0);
        let different = |ceiling: &mut Ceiling, at| ceiling.estimates(at).map(|e| e.different.round() as i64 / 50 * 50);
        assert_eq!(different(&mut ceiling, 10 * MINUTE_US), [1500, 1500, 1500]);
        assert_eq!(different(&mut ceiling, 16 * MINUTE_US), [500, 1500, 1500]);
        assert_eq!(different(&mut ceiling, 63 * MINUTE_US), [0, 500, 1500]);
        assert_eq!(different(&mut ceiling, 3000 * MINUTE_US), [0, 0, 0]);
        assert_eq!(ceiling.estimates(3000 * MINUTE_US)[2].ceiling(), None);
    }

    #[test]
    fn a_window_takes_less_than_a_mebibyte() {
        assert!(Ceiling::default().heap_bytes() / WINDOWS_US.len() < 1 << 20);
    }
}
