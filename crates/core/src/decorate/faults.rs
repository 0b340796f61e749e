//! Makes a tier fail, by a seed: the same seed and the same calls give the same faults.

use std::collections::VecDeque;
use std::time::Duration;

use super::Timed;
use crate::error::ErrorKind;
use crate::tier::{Capabilities, Completion, Health, OpId, Operation, Outcome, Tier};

/// How many of a thousand operations meet each fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    /// Submissions that take nothing.
    pub refused: u32,
    /// Operations of any kind that end with an error of the medium.
    pub failed: u32,
    /// Loads that end as corrupt.
    pub corrupt: u32,
    /// Loads of blocks that are not there any more.
    pub absent: u32,
    /// Completions held back for `delay`.
    pub delayed: u32,
}

/// See the module's head.
pub struct Faults<T> {
    inner: T,
    rates: Rates,
    delay: Duration,
    now: Duration,
    state: u64,
    held: VecDeque<(Duration, Completion)>,
}

impl<T> Faults<T> {
    /// `delay` is for completions that are held back.
    pub fn new(inner: T, seed: u64, rates: Rates, delay: Duration) -> Faults<T> {
        Faults { inner, rates, delay, now: Duration::ZERO, state: seed, held: VecDeque::new() }
    }

    /// The tier itself.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    fn meets(&mut self, rate: u32) -> bool {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % 1000) < u64::from(rate)
    }

    /// A load was carried out, whatever is said of it: nothing touches its slot any more.
    fn spoil(&mut self, outcome: Outcome) -> Outcome {
        let is_load = matches!(outcome, Outcome::Loaded { .. });
        match outcome {
            _ if self.meets(self.rates.failed) => Outcome::Failed(ErrorKind::Io),
            _ if is_load && self.meets(self.rates.corrupt) => Outcome::Failed(ErrorKind::Corrupt),
            _ if is_load && self.meets(self.rates.absent) => Outcome::Absent,
            outcome => outcome,
        }
    }
}

impl<T: Timed> Tier for Faults<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        if self.meets(self.rates.refused) { 0 } else { self.inner.submit(batch) }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let from = completions.len();
        self.inner.poll(completions);
        let ended = completions.split_off(from);
        for Completion { id, outcome } in ended {
            let completion = Completion { id, outcome: self.spoil(outcome) };
            if self.meets(self.rates.delayed) {
                self.held.push_back((self.now + self.delay, completion));
            } else {
                completions.push(completion);
            }
        }
        while let Some((_, completion)) = self.held.pop_front_if(|(until, _)| *until <= self.now) {
            completions.push(completion);
        }
    }

    fn cancel(&mut self, id: OpId) {
        self.inner.cancel(id);
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

impl<T: Timed> Timed for Faults<T> {
    fn advance(&mut self, now: Duration) {
        self.inner.advance(now);
        self.now = now;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{LOAD, Told, done, op, polled};
    use super::*;

    const LOADED: Outcome = Outcome::Loaded { length_bytes: 4096, checksum: 0 };

    fn run(seed: u64) -> (Vec<Completion>, usize) {
        let rates = Rates { refused: 100, failed: 100, corrupt: 100, absent: 100, delayed: 200 };
        let mut tier = Faults::new(Told::default(), seed, rates, Duration::from_millis(5));
        let (mut ended, mut refused) = (Vec::new(), 0);
        for id in 0..1000 {
            tier.advance(Duration::from_millis(id));
            while tier.submit(&[op(id, LOAD)]) == 0 {
                refused += 1;
            }
            tier.inner.completions.push(done(id, LOADED));
            ended.extend(polled(&mut tier));
        }
        tier.advance(Duration::from_secs(10));
        ended.extend(polled(&mut tier));
        (ended, refused)
    }

    #[test]
    fn every_fault_comes_and_every_operation_completes_once() {
        let (ended, refused) = run(7);
        let mut ids: Vec<u64> = ended.iter().map(|completion| completion.id.0).collect();
        assert!(!ids.is_sorted(), "some are delayed");
        ids.sort_unstable();
        assert_eq!(ids, (0..1000).collect::<Vec<u64>>());
        let corrupt = Outcome::Failed(ErrorKind::Corrupt);
        for outcome in [LOADED, Outcome::Failed(ErrorKind::Io), corrupt, Outcome::Absent] {
            assert!(ended.iter().filter(|completion| completion.outcome == outcome).count() > 50, "{outcome:?}");
        }
        assert!(refused > 50);
    }

    #[test]
    fn a_seed_gives_the_same_faults_again_and_another_seed_others() {
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
