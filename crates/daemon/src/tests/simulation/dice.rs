//! The seed, and what is drawn from it.

/// One number after another from a seed; the same on every machine.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    /// Of step `step` of a run: what one step draws, no other step changes.
    pub fn new(seed: u64, step: u64) -> Dice {
        Dice(mix(seed ^ mix(step.wrapping_add(0x5eed))))
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to `end`, without it.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() % end.max(1) as u64) as usize
    }

    pub fn is_one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// The place of one of them, if there is one.
    pub fn pick(&mut self, len: usize) -> Option<usize> {
        (len > 0).then(|| self.below(len))
    }

    /// One of these, each as often as its weight says.
    pub fn weighted<T: Copy>(&mut self, of: &[(usize, T)]) -> T {
        let mut at = self.below(of.iter().map(|(weight, _)| weight).sum());
        for (weight, it) in of {
            match at.checked_sub(*weight) {
                Some(rest) => at = rest,
                None => return *it,
            }
        }
        of[0].1
    }
}

/// Spreads every bit over all bits.
pub fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
