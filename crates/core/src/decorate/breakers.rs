//! The breakers of a tier, or of a server of it.
//!
//! Probes, loads and writes have one each: a store that answers probes may fail all loads, and a store that takes no
//! writes still gives what it has. Touches have none: whether a touch reads or writes depends on the store.

use std::time::Duration;

use super::breaker::Breaker;
use crate::error::ErrorKind;
use crate::tier::{OpKind, Outcome};

/// See the module's head.
pub struct Breakers {
    probes: Breaker,
    loads: Breaker,
    /// Of stores and removals.
    writes: Breaker,
}

impl Breakers {
    /// Those that may not open never do.
    pub fn new(may_open: bool) -> Breakers {
        let breaker = || Breaker::new(may_open);
        Breakers { probes: breaker(), loads: breaker(), writes: breaker() }
    }

    /// Whether operations of this kind are kept from the tier.
    pub fn refuse(&self, kind: OpKind) -> bool {
        match kind {
            // What a probe finds is of no use without loads.
            OpKind::Exists | OpKind::Load => self.why_no_reads().is_some(),
            OpKind::Store | OpKind::Remove => self.writes.is_open(),
            OpKind::Touch { .. } => self.all().any(Breaker::is_open),
        }
    }

    /// The tier ended an operation.
    pub fn heard(&mut self, kind: OpKind, outcome: Outcome, is_shared: bool, now: Duration) {
        self.of(kind).into_iter().for_each(|breaker| breaker.heard(outcome, is_shared, now));
    }

    /// An operation is late, and has not ended.
    pub fn late(&mut self, kind: OpKind, now: Duration) {
        self.of(kind).into_iter().for_each(|breaker| breaker.failed(ErrorKind::Timeout, now));
    }

    /// After its pause the tier may try, and one more failure is enough.
    pub fn advance(&mut self, now: Duration) {
        [&mut self.probes, &mut self.loads, &mut self.writes].into_iter().for_each(|breaker| breaker.advance(now));
    }

    /// The tier has answered after a pause: it may try at once. It may still let writes hang that hung before.
    pub fn welcomed(&mut self) {
        let hangs = self.why_no_writes() == Some(ErrorKind::Timeout);
        let but_writes = [&mut self.probes, &mut self.loads];
        but_writes.into_iter().chain((!hangs).then_some(&mut self.writes)).for_each(Breaker::end_pause);
    }

    /// What failed last before reads were kept from the tier; none while they are not.
    pub fn why_no_reads(&self) -> Option<ErrorKind> {
        self.loads.why_open().or(self.probes.why_open())
    }

    /// What failed last before writes were kept from the tier; none while they are not.
    pub fn why_no_writes(&self) -> Option<ErrorKind> {
        self.writes.why_open()
    }

    /// When the next pause is over.
    pub fn open_until(&self) -> Option<Duration> {
        self.all().filter_map(Breaker::open_until).min()
    }

    /// How often they have opened.
    pub fn opened(&self) -> u64 {
        self.all().map(Breaker::opened).sum()
    }

    fn of(&mut self, kind: OpKind) -> Option<&mut Breaker> {
        match kind {
            OpKind::Exists => Some(&mut self.probes),
            OpKind::Load => Some(&mut self.loads),
            OpKind::Store | OpKind::Remove => Some(&mut self.writes),
            OpKind::Touch { .. } => None,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Breaker> {
        [&self.probes, &self.loads, &self.writes].into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IO: Outcome = Outcome::Failed(ErrorKind::Io);
    const TOUCH: OpKind = OpKind::Touch { fresh_seconds: 0 };
    const SECOND: Duration = Duration::from_secs(1);

    fn heard(breakers: &mut Breakers, kind: OpKind, outcome: Outcome, times: u32) {
        (0..times).for_each(|_| breakers.heard(kind, outcome, true, Duration::ZERO));
    }

    #[test]
    fn probes_that_are_answered_do_not_hide_loads_that_fail() {
        let mut breakers = Breakers::new(true);
        for _ in 0..8 {
            heard(&mut breakers, OpKind::Exists, Outcome::Found, 1);
            heard(&mut breakers, OpKind::Load, IO, 1);
        }
        assert_eq!((breakers.why_no_reads(), breakers.opened()), (Some(ErrorKind::Io), 1));
        assert!(breakers.refuse(OpKind::Exists) && breakers.refuse(OpKind::Load));
        breakers.advance(SECOND);
        heard(&mut breakers, OpKind::Exists, Outcome::Found, 1);
        breakers.heard(OpKind::Load, IO, true, SECOND);
        assert_eq!(breakers.open_until(), Some(3 * SECOND), "the second pause is longer");
    }

    #[test]
    fn touches_count_for_nothing_and_are_spared_what_is_sick() {
        let mut breakers = Breakers::new(true);
        heard(&mut breakers, TOUCH, IO, 100);
        assert_eq!(breakers.opened(), 0);
        for sick in [OpKind::Exists, OpKind::Load, OpKind::Store] {
            let mut breakers = Breakers::new(true);
            (0..8).for_each(|_| breakers.late(sick, Duration::ZERO));
            heard(&mut breakers, TOUCH, Outcome::Found, 1);
            assert!(breakers.refuse(TOUCH) && breakers.refuse(sick));
        }
    }

    #[test]
    fn an_answer_ends_all_pauses_but_that_of_writes_that_hung() {
        for (why, is_refused) in [(ErrorKind::Io, false), (ErrorKind::Timeout, true)] {
            let mut breakers = Breakers::new(true);
            for kind in [OpKind::Exists, OpKind::Load, OpKind::Store] {
                heard(&mut breakers, kind, Outcome::Failed(why), 8);
            }
            breakers.welcomed();
            assert_eq!((breakers.why_no_reads(), breakers.refuse(OpKind::Store)), (None, is_refused));
            heard(&mut breakers, OpKind::Load, IO, 1);
            assert!(breakers.refuse(OpKind::Load), "one failure is enough");
        }
    }
}
